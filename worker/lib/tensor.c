/* Tensors of a lease: the index is used in place, each entry is checked by index.c when it is looked up. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "internal.h"

_Static_assert((int)RV_BLOB == (int)RV_INDEX_BLOB && (int)RV_F64 == (int)RV_INDEX_F64 &&
                   (int)RV_F8_E5M2FNUZ == (int)RV_INDEX_F8_E5M2FNUZ && RV_MAX_RANK == RV_RANK_MAX,
               "the public numbers are those of the index");

static int usable(const struct rv_lease *lease)
{
    if (!lease || lease->magic != RV_LEASE_MAGIC)
        return -EINVAL;
    return rv_fork_happened(lease->fork_number) ? -EPERM : 0;
}

static void fill(const struct rv_lease *lease, const struct rv_index_entry *entry, const char *name,
                 struct rv_tensor *ret_tensor)
{
    uint8_t *base = lease->arenas[entry->arena].address;

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
    int r = usable(lease);

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
    return usable(lease) < 0 ? 0 : rv_index_count(&lease->index);
}

int rv_tensor_at(const struct rv_lease *lease, uint64_t i, struct rv_tensor *ret_tensor)
{
    const struct rv_index_entry *entry;
    const char *name = NULL;
    int r = usable(lease);

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

    return usable(lease) < 0 ? NULL : rv_index_metadata(&lease->index, &length);
}

/* Maps the pool's own pages, which a private mapping may hide behind copies. */
static int map_pool(const struct rv_lease *lease, void *maps[RV_ARENAS_MAX])
{
    for (uint32_t i = 0; i < lease->arena_count; i++) {
        const struct rv_mapped_arena *a = &lease->arenas[i];
        int r = rv_backend_by_id(a->arena.backend)->map(a->fd, &a->arena, RV_MAP_SHARED, &maps[i], NULL);

        if (r < 0)
            return r;
    }
    return 0;
}

int rv_lease_verify(const struct rv_lease *lease, const char **ret_tensor)
{
    void *maps[RV_ARENAS_MAX] = {NULL};
    int r = usable(lease);

    if (r < 0)
        return r;
    r = map_pool(lease, maps);
    for (uint32_t i = 0; r == 0 && i < rv_index_count(&lease->index); i++) {
        const char *name = "";
        const struct rv_index_entry *entry = rv_index_at(&lease->index, i, &name);
        XXH128_canonical_t digest;

        if (entry) {
            const uint8_t *base = maps[entry->arena];

            XXH128_canonicalFromHash(&digest, XXH3_128bits(base ? base + entry->offset : NULL, entry->length));
        }
        if (!entry || memcmp(digest.digest, entry->digest, sizeof(entry->digest)) != 0) {
            r = -EBADMSG;
            if (ret_tensor)
                *ret_tensor = name;
        }
    }
    for (uint32_t i = 0; i < lease->arena_count; i++)
        if (maps[i])
            (void)munmap(maps[i], lease->arenas[i].arena.size);
    return r;
}
