#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "index.h"
#include "index_hash.h"
#include "memory.h"

#define SLOTS_MIN 2u
#define CAPACITY_MIN 16u

struct rv_index_builder {
    struct rv_index_entry *entries;
    uint32_t count, capacity;
    char *names;
    uint64_t names_length, names_capacity;
    uint32_t *slots;
    uint32_t slot_count;
    uint64_t tensor_bytes;
};

static uint32_t slots_for(uint32_t tensors)
{
    uint32_t slots = SLOTS_MIN;

    while (slots < 2 * (uint64_t)tensors)
        slots *= 2;
    return slots;
}

struct rv_index_builder *rv_index_builder_create(uint32_t tensor_capacity, uint64_t names_capacity)
{
    struct rv_index_builder *builder;

    if (tensor_capacity > RV_TENSORS_MAX)
        return NULL;
    builder = calloc(1, sizeof(*builder));
    if (!builder)
        return NULL;
    builder->capacity = tensor_capacity ? tensor_capacity : CAPACITY_MIN;
    builder->names_capacity = names_capacity ? names_capacity : 1;
    builder->slot_count = slots_for(tensor_capacity);
    builder->entries = calloc(builder->capacity, sizeof(*builder->entries));
    builder->names = malloc(builder->names_capacity);
    builder->slots = calloc(builder->slot_count, sizeof(*builder->slots));
    if (!builder->entries || !builder->names || !builder->slots) {
        rv_index_builder_destroy(builder);
        return NULL;
    }
    return builder;
}

void rv_index_builder_destroy(struct rv_index_builder *builder)
{
    if (!builder)
        return;
    free(builder->entries);
    free(builder->names);
    free(builder->slots);
    free(builder);
}

/*
 * The slot of a name: its own, or a free one. -EEXIST = taken by the same name; -ELOOP = too many names share a place,
 * which honest names never do at this load.
 */
static int find_slot(const struct rv_index_builder *builder, const char *name, uint32_t length, uint32_t *ret_slot)
{
    uint32_t mask = builder->slot_count - 1;
    uint32_t slot = (uint32_t)rv_index_hash(name, length) & mask;

    for (uint32_t probes = 0; probes < RV_INDEX_PROBES_MAX; probes++, slot = (slot + 1) & mask) {
        const struct rv_index_entry *entry;

        if (builder->slots[slot] == 0) {
            *ret_slot = slot;
            return 0;
        }
        entry = &builder->entries[builder->slots[slot] - 1];
        if (entry->name_length == length && memcmp(builder->names + entry->name_offset, name, length) == 0)
            return -EEXIST;
    }
    return -ELOOP;
}

static int grow_slots(struct rv_index_builder *builder)
{
    uint32_t count = builder->slot_count * 2;
    uint32_t *slots = calloc(count, sizeof(*slots));

    if (!slots)
        return -ENOMEM;
    free(builder->slots);
    builder->slots = slots;
    builder->slot_count = count;
    for (uint32_t i = 0; i < builder->count; i++) {
        const struct rv_index_entry *entry = &builder->entries[i];
        uint32_t slot;
        int r = find_slot(builder, builder->names + entry->name_offset, entry->name_length, &slot);

        if (r < 0)
            return r;
        slots[slot] = i + 1;
    }
    return 0;
}

static int reserve(struct rv_index_builder *builder, uint32_t name_length)
{
    uint64_t need = builder->names_length + name_length + 1;

    if (builder->count == builder->capacity) {
        uint32_t capacity = builder->capacity * 2;
        struct rv_index_entry *entries = realloc(builder->entries, (size_t)capacity * sizeof(*entries));

        if (!entries)
            return -ENOMEM;
        builder->entries = entries;
        builder->capacity = capacity;
    }
    if (need > builder->names_capacity) {
        uint64_t capacity = need * 2;
        char *names = realloc(builder->names, capacity);

        if (!names)
            return -ENOMEM;
        builder->names = names;
        builder->names_capacity = capacity;
    }
    return 2 * (uint64_t)(builder->count + 1) > builder->slot_count ? grow_slots(builder) : 0;
}

int rv_index_builder_add(struct rv_index_builder *builder, const char *name, uint32_t name_length,
                         const struct rv_index_entry *entry)
{
    struct rv_index_entry *added;
    uint32_t slot;
    int r;

    if (builder->count >= RV_TENSORS_MAX || name_length > RV_TENSOR_NAME_MAX)
        return -E2BIG;
    r = reserve(builder, name_length);
    if (r == 0)
        r = find_slot(builder, name, name_length, &slot);
    if (r < 0)
        return r;
    added = &builder->entries[builder->count++];
    *added = *entry;
    added->name_offset = builder->names_length;
    added->name_length = name_length;
    memcpy(builder->names + builder->names_length, name, name_length);
    builder->names[builder->names_length + name_length] = '\0';
    builder->names_length += (uint64_t)name_length + 1;
    builder->slots[slot] = builder->count;
    builder->tensor_bytes += entry->length;
    return 0;
}

struct rv_index_entry *rv_index_builder_entry(struct rv_index_builder *builder, uint32_t i)
{
    return i < builder->count ? &builder->entries[i] : NULL;
}

static uint64_t align8(uint64_t offset)
{
    return (offset + 7) / 8 * 8;
}

static void lay_out(const struct rv_index_builder *builder, uint32_t arena_count, uint64_t metadata_length,
                    struct rv_index_header *ret_header)
{
    struct rv_index_header h = {.version = RV_INDEX_VERSION, .byte_order = RV_INDEX_BYTE_ORDER};

    memcpy(h.magic, RV_INDEX_MAGIC, sizeof(h.magic));
    h.tensor_count = builder->count;
    h.slot_count = builder->slot_count;
    h.arena_count = arena_count;
    h.tensor_bytes = builder->tensor_bytes;
    h.names_length = builder->names_length;
    h.metadata_length = metadata_length;
    h.arenas_offset = sizeof(h);
    h.slots_offset = h.arenas_offset + (uint64_t)arena_count * sizeof(struct rv_index_arena);
    h.entries_offset = h.slots_offset + (uint64_t)builder->slot_count * sizeof(uint32_t);
    h.names_offset = h.entries_offset + (uint64_t)builder->count * sizeof(struct rv_index_entry);
    h.metadata_offset = align8(h.names_offset + h.names_length);
    h.total_size = align8(h.metadata_offset + (metadata_length ? metadata_length + 1 : 0));
    *ret_header = h;
}

uint64_t rv_index_builder_size(const struct rv_index_builder *builder, uint32_t arena_count, uint64_t metadata_length)
{
    struct rv_index_header h;

    lay_out(builder, arena_count, metadata_length, &h);
    return h.total_size;
}

/* pwrite, not a mapping: a full memory filesystem is ENOSPC here and SIGBUS there. */
static int write_at(int fd, uint64_t offset, const void *data, uint64_t length)
{
    const char *p = data;

    while (length > 0) {
        ssize_t n = pwrite(fd, p, length, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -ENOSPC;
        p += n;
        offset += (uint64_t)n;
        length -= (uint64_t)n;
    }
    return 0;
}

static int write_tables(const struct rv_index_builder *builder, int fd, const struct rv_index_header *h,
                        const struct rv_index_arena *arenas, const char *metadata)
{
    const struct {
        uint64_t offset, length;
        const void *data;
    } parts[] = {
        {0, sizeof(*h), h},
        {h->arenas_offset, h->arena_count * sizeof(*arenas), arenas},
        {h->slots_offset, h->slot_count * sizeof(uint32_t), builder->slots},
        {h->entries_offset, h->tensor_count * sizeof(struct rv_index_entry), builder->entries},
        {h->names_offset, h->names_length, builder->names},
        {h->metadata_offset, h->metadata_length, metadata},
    };

    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int r = write_at(fd, parts[i].offset, parts[i].data, parts[i].length);

        if (r < 0)
            return r;
    }
    return 0;
}

int rv_index_builder_write(struct rv_index_builder *builder, const struct rv_index_arena *arenas, uint32_t arena_count,
                           const char *metadata, uint64_t metadata_length, const uint8_t header_digest[16],
                           uint64_t *ret_size)
{
    struct rv_index_header h;
    int fd, r;

    if (arena_count > RV_ARENAS_MAX)
        return -E2BIG;
    lay_out(builder, arena_count, metadata_length, &h);
    memcpy(h.header_digest, header_digest, sizeof(h.header_digest));
    fd = rv_memfd_create("resvisor-index", 0);
    if (fd < 0)
        return fd;
    /* The gaps between the tables and the NULs at the end are the zeros of the file itself. */
    r = ftruncate(fd, (off_t)h.total_size) < 0 ? -errno : 0;
    if (r == 0)
        r = write_tables(builder, fd, &h, arenas, metadata);
    if (r == 0)
        r = rv_memfd_seal(fd);
    if (r < 0) {
        (void)close(fd);
        return r;
    }
    *ret_size = h.total_size;
    return fd;
}
