/* Tensors of a lease: the index is used in place, each entry is checked by index.c when it is looked up. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "internal.h"

#define VERIFY_CHUNK (4u << 20) /* bytes that are copied from a device at once */

_Static_assert((int)RV_BLOB == (int)RV_INDEX_BLOB && (int)RV_F64 == (int)RV_INDEX_F64 &&
                   (int)RV_F8_E5M2FNUZ == (int)RV_INDEX_F8_E5M2FNUZ && RV_MAX_RANK == RV_RANK_MAX,
               "the public numbers are those of the index");

static void fill(const struct rv_lease *lease, const struct rv_index_entry *entry, const char *name,
                 struct rv_tensor *ret_tensor)
{
    uint8_t *base = lease->memory->arenas[entry->arena].address;

    *ret_tensor = (struct rv_tensor){
        .name = name,
        .dtype = (enum rv_dtype)entry->dtype,
        .rank = entry->rank,
        .shape = entry->shape,
        .data = base ? base + entry->offset : NULL,
        .length = entry->length,
        .digest = entry->digest,
    };
}

int rv_tensor_find(const struct rv_lease *lease, const char *name, struct rv_tensor *ret_tensor)
{
    const struct rv_index_entry *entry;
    int r = rv_lease_usable(lease);

    if (r < 0)
        return r;
    if (!name || !ret_tensor)
        return -EINVAL;
    entry = rv_index_find(&lease->index, name, strlen(name));
    if (!entry)
        return -ENOENT;
    fill(lease, entry, (const char *)lease->index.map + lease->index.header->names_offset + entry->name_offset,
         ret_tensor);
    return 0;
}

uint64_t rv_tensor_count(const struct rv_lease *lease)
{
    return rv_lease_usable(lease) < 0 ? 0 : rv_index_count(&lease->index);
}

int rv_tensor_at(const struct rv_lease *lease, uint64_t i, struct rv_tensor *ret_tensor)
{
    const struct rv_index_entry *entry;
    const char *name = NULL;
    int r = rv_lease_usable(lease);

    if (r < 0)
        return r;
    if (!ret_tensor)
        return -EINVAL;
    entry = i < rv_index_count(&lease->index) ? rv_index_at(&lease->index, (uint32_t)i, &name) : NULL;
    if (!entry)
        return -ENOENT;
    fill(lease, entry, name, ret_tensor);
    return 0;
}

uint32_t rv_dtype_bytes(enum rv_dtype dtype)
{
    return rv_dtype_size((uint32_t)dtype);
}

const char *rv_dtype_text(enum rv_dtype dtype)
{
    return rv_dtype_name((uint32_t)dtype);
}

const char *rv_lease_metadata(const struct rv_lease *lease)
{
    uint64_t length;

    return rv_lease_usable(lease) < 0 ? NULL : rv_index_metadata(&lease->index, &length);
}

/* ---- copies and digests ---------------------------------------------------------------------------------------- */

int rv_tensor_read(const struct rv_lease *lease, const char *name, uint64_t offset, void *buffer, uint64_t length,
                   struct rv_failure *err)
{
    struct rv_error error = {0};
    struct rv_tensor tensor;
    int r = rv_tensor_find(lease, name, &tensor);

    if (r == 0 && !buffer && length > 0)
        r = -EINVAL;
    if (r == -ENOENT)
        rv_error_set(&error, ENOENT, ERROR(BAD_REQUEST), "the model %.128s has no tensor of that name", lease->model);
    else if (r == -EPERM)
        rv_error_set(&error, EPERM, ERROR(NOT_PERMITTED), "a lease cannot be used in a child after fork");
    else if (r < 0)
        rv_error_set(&error, EINVAL, ERROR(BAD_REQUEST), "rv_tensor_read needs a lease, a name and a buffer");
    if (r == 0 && (offset > tensor.length || length > tensor.length - offset))
        r = rv_error_set(&error, ERANGE, ERROR(BAD_REQUEST),
                         "%llu bytes from byte %llu are not within the tensor of %llu bytes",
                         (unsigned long long)length, (unsigned long long)offset, (unsigned long long)tensor.length);
    if (r < 0 || length == 0)
        return rv_failure_from(err, &error, r);
    if (rv_lease_memory_is_remote(lease->memory)) {
        r = rv_lease_memory_read(lease->memory, buffer, (uint64_t)(uintptr_t)tensor.data + offset, length, &error);
    } else {
        memcpy(buffer, (const uint8_t *)tensor.data + offset, length);
    }
    return rv_failure_from(err, &error, r);
}

/* What rv_lease_verify reads from. */
struct source {
    const struct rv_lease_memory *memory;
    void *maps[RV_ARENAS_MAX]; /* the pool's own pages, which a private mapping may hide behind copies */
    uint8_t *chunk;            /* of VERIFY_CHUNK bytes, for a device */
    XXH3_state_t *state;
};

static int source_open(struct source *source)
{
    const struct rv_lease_memory *memory = source->memory;

    if (rv_lease_memory_is_remote(memory)) {
        source->chunk = malloc(VERIFY_CHUNK);
        source->state = XXH3_createState();
        return source->chunk && source->state ? 0 : -ENOMEM;
    }
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        const struct rv_mapped_arena *a = &memory->arenas[i];
        int r = memory->backend->map(a->fd, &a->arena, RV_MAP_SHARED, &source->maps[i], NULL);

        if (r < 0)
            return r;
    }
    return 0;
}

static void source_close(struct source *source)
{
    for (uint32_t i = 0; i < source->memory->arena_count; i++)
        if (source->maps[i])
            (void)munmap(source->maps[i], source->memory->arenas[i].arena.size);
    free(source->chunk);
    (void)XXH3_freeState(source->state);
}

static int digest_remote(struct source *source, uint64_t address, uint64_t length, XXH128_hash_t *ret_hash)
{
    (void)XXH3_128bits_reset(source->state);
    for (uint64_t done = 0; done < length;) {
        uint64_t n = length - done < VERIFY_CHUNK ? length - done : VERIFY_CHUNK;
        int r = rv_lease_memory_read(source->memory, source->chunk, address + done, n, NULL);

        if (r < 0)
            return r;
        (void)XXH3_128bits_update(source->state, source->chunk, n);
        done += n;
    }
    *ret_hash = XXH3_128bits_digest(source->state);
    return 0;
}

static int verify_entry(struct source *source, const struct rv_index_entry *entry)
{
    XXH128_canonical_t digest;
    XXH128_hash_t hash;
    int r = 0;

    if (source->chunk) {
        r = digest_remote(source, (uint64_t)(uintptr_t)source->memory->arenas[entry->arena].address + entry->offset,
                          entry->length, &hash);
        if (r < 0)
            return r;
    } else {
        const uint8_t *base = source->maps[entry->arena];

        hash = XXH3_128bits(base ? base + entry->offset : NULL, entry->length);
    }
    XXH128_canonicalFromHash(&digest, hash);
    return memcmp(digest.digest, entry->digest, sizeof(entry->digest)) == 0 ? 0 : -EBADMSG;
}

int rv_lease_verify(const struct rv_lease *lease, const char **ret_tensor)
{
    struct source source = {0};
    int r = rv_lease_usable(lease);

    if (r < 0)
        return r;
    source.memory = lease->memory;
    r = source_open(&source);
    for (uint32_t i = 0; r == 0 && i < rv_index_count(&lease->index); i++) {
        const char *name = "";
        const struct rv_index_entry *entry = rv_index_at(&lease->index, i, &name);

        r = entry ? verify_entry(&source, entry) : -EBADMSG;
        if (r == -EBADMSG && ret_tensor)
            *ret_tensor = name;
    }
    source_close(&source);
    return r;
}
