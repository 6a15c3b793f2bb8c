/* Any bytes as an index: a client must survive, and be given nothing outside of the arenas. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "index.h"
#include "memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)   \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

#define ENTRIES_MAX 64u

/* A good index of three tensors; the input is laid over it at the place that its first two bytes name. */
static uint8_t *template_bytes(uint64_t *ret_size)
{
    struct rv_index_builder *builder = rv_index_builder_create(3, 64);
    const struct rv_index_arena arena = {1 << 20, RV_BACKEND_MEMFD, 4096};
    static const uint8_t digest[16];
    uint8_t *bytes;
    int fd;

    for (uint32_t i = 0; i < 3; i++) {
        struct rv_index_entry entry = {.dtype = RV_INDEX_U8, .rank = 1, .offset = 256 * i, .length = 9, .shape = {9}};
        const char name[] = {'t', (char)('0' + i)};

        MUST(rv_index_builder_add(builder, name, sizeof(name), &entry) == 0);
    }
    fd = rv_index_builder_write(builder, &arena, 1, "{}", 2, digest, ret_size);
    bytes = malloc(*ret_size);
    MUST(fd >= 0 && bytes && pread(fd, bytes, *ret_size, 0) == (ssize_t)*ret_size);
    (void)close(fd);
    rv_index_builder_destroy(builder);
    return bytes;
}

static void use(const uint8_t *bytes, uint64_t size)
{
    static const uint64_t arena_size = 1 << 20;
    struct rv_index index;
    struct rv_error err = {0};
    uint64_t length;
    const char *metadata;
    int fd = rv_sealed_create("fuzz", bytes, size), r;

    MUST(fd >= 0);
    r = rv_index_open(&index, fd, &arena_size, 1, &err);
    (void)close(fd);
    if (r < 0)
        return;
    for (uint32_t i = 0; i < rv_index_count(&index) && i < ENTRIES_MAX; i++) {
        const char *name;
        const struct rv_index_entry *e = rv_index_at(&index, i, &name);

        if (!e)
            continue;
        MUST(e->arena == 0 && e->offset <= arena_size && e->length <= arena_size - e->offset);
        MUST(strlen(name) == e->name_length);
        (void)rv_index_find(&index, name, e->name_length);
    }
    (void)rv_index_find(&index, "t1", 2);
    (void)rv_index_find(&index, "nothing", 7);
    metadata = rv_index_metadata(&index, &length);
    MUST(!metadata || strlen(metadata) <= length);
    rv_index_close(&index);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t *template, *bytes;
    static uint64_t template_size;
    uint64_t at;

    if (!template) {
        template = template_bytes(&template_size);
        bytes = malloc(template_size);
        MUST(bytes);
    }
    if (size < 2)
        return 0;
    at = (data[0] | (uint64_t)data[1] << 8) % (template_size + 1);
    if (at == template_size) { /* the input alone */
        use(data + 2, size - 2);
        return 0;
    }
    memcpy(bytes, template, template_size);
    memcpy(bytes + at, data + 2, size - 2 < template_size - at ? size - 2 : template_size - at);
    use(bytes, template_size);
    return 0;
}
