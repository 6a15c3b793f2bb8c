#include "index.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "index_hash.h"
#include "memory.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the index is little endian and used in place");

static const struct {
    const char *name;
    uint32_t size;
} dtypes[] = {
    [RV_INDEX_DTYPE_NONE] = {NULL, 0},
    [RV_INDEX_BOOL] = {"BOOL", 1},
    [RV_INDEX_U8] = {"U8", 1},
    [RV_INDEX_I8] = {"I8", 1},
    [RV_INDEX_F8_E4M3] = {"F8_E4M3", 1},
    [RV_INDEX_F8_E5M2] = {"F8_E5M2", 1},
    [RV_INDEX_U16] = {"U16", 2},
    [RV_INDEX_I16] = {"I16", 2},
    [RV_INDEX_F16] = {"F16", 2},
    [RV_INDEX_BF16] = {"BF16", 2},
    [RV_INDEX_U32] = {"U32", 4},
    [RV_INDEX_I32] = {"I32", 4},
    [RV_INDEX_F32] = {"F32", 4},
    [RV_INDEX_U64] = {"U64", 8},
    [RV_INDEX_I64] = {"I64", 8},
    [RV_INDEX_F64] = {"F64", 8},
    [RV_INDEX_C64] = {"C64", 8},
    [RV_INDEX_F8_E8M0] = {"F8_E8M0", 1},
    [RV_INDEX_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 1},
    [RV_INDEX_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 1},
    [RV_INDEX_BLOB] = {"BLOB", 1},
};
_Static_assert(sizeof(dtypes) / sizeof(dtypes[0]) == RV_INDEX_DTYPE_COUNT, "one row per dtype");

uint32_t rv_dtype_size(uint32_t dtype)
{
    return dtype < RV_INDEX_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *rv_dtype_name(uint32_t dtype)
{
    return dtype < RV_INDEX_DTYPE_COUNT ? dtypes[dtype].name : NULL;
}

uint32_t rv_dtype_by_name(const char *name, uint64_t length)
{
    for (uint32_t i = 1; i < RV_INDEX_DTYPE_COUNT; i++)
        if (strlen(dtypes[i].name) == length && memcmp(dtypes[i].name, name, length) == 0)
            return i;
    return RV_INDEX_DTYPE_NONE;
}

bool rv_shape_bytes(uint32_t dtype, const uint64_t *shape, uint32_t rank, uint64_t *ret_bytes)
{
    uint64_t bytes = rv_dtype_size(dtype);
    bool empty = false;

    if (bytes == 0 || rank > RV_RANK_MAX)
        return false;
    /* A zero among the dimensions must not hide an overflow: readers compute strides from the others. */
    for (uint32_t i = 0; i < rank; i++) {
        if (shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(bytes, shape[i], &bytes))
            return false;
    }
    *ret_bytes = empty ? 0 : bytes;
    return true;
}

uint64_t rv_index_hash(const char *name, uint64_t length)
{
    return XXH3_64bits(name, length);
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

/* `count` elements of `size` bytes at offset lie inside total bytes. */
static bool table_fits(uint64_t total, uint64_t offset, uint64_t count, uint64_t size)
{
    return offset % 8 == 0 && offset <= total && count <= (total - offset) / size;
}

/* NULL = fine, else what is wrong. O(1): entries are checked when they are looked up. */
static const char *header_problem(const struct rv_index_header *h, uint64_t size)
{
    if (memcmp(h->magic, RV_INDEX_MAGIC, sizeof(h->magic)) != 0)
        return "it does not start with the index magic";
    if (h->byte_order != RV_INDEX_BYTE_ORDER)
        return "it has another byte order";
    if (h->version != RV_INDEX_VERSION)
        return "it has another layout version";
    if (h->flags != 0)
        return "it has unknown flags";
    if (h->total_size != size)
        return "its size is not the one in its header";
    if (h->tensor_count > RV_TENSORS_MAX || h->arena_count > RV_ARENAS_MAX)
        return "it has too many tensors or arenas";
    if (h->slot_count < 2 || (h->slot_count & (h->slot_count - 1)) != 0 ||
        h->slot_count < 2 * (uint64_t)h->tensor_count)
        return "its number of slots is wrong";
    if (!table_fits(size, h->arenas_offset, h->arena_count, sizeof(struct rv_index_arena)) ||
        !table_fits(size, h->slots_offset, h->slot_count, sizeof(uint32_t)) ||
        !table_fits(size, h->entries_offset, h->tensor_count, sizeof(struct rv_index_entry)) ||
        !table_fits(size, h->names_offset, h->names_length, 1))
        return "a table lies outside";
    if (h->metadata_length > 0 && (!table_fits(size, h->metadata_offset, h->metadata_length, 1) ||
                                   size - h->metadata_offset == h->metadata_length ||
                                   ((const char *)h)[h->metadata_offset + h->metadata_length] != '\0'))
        return "its metadata lie outside";
    return NULL;
}

static const char *arenas_problem(const struct rv_index_header *h, const uint64_t *arena_sizes, uint32_t arena_count)
{
    const struct rv_index_arena *arenas = (const void *)((const uint8_t *)h + h->arenas_offset);

    if (h->arena_count != arena_count)
        return "it names another number of arenas";
    for (uint32_t i = 0; i < arena_count; i++)
        if (arenas[i].size != arena_sizes[i])
            return "it names an arena of another size";
    return NULL;
}

int rv_index_open(struct rv_index *ret_index, int fd, const uint64_t *arena_sizes, uint32_t arena_count,
                  struct rv_error *err)
{
    struct rv_index index = {0};
    const char *problem;
    struct stat st;
    void *map;

    if (arena_count > RV_ARENAS_MAX)
        return rv_error_set(err, EBADMSG, ERROR(INTERNAL), "more than %u arenas", RV_ARENAS_MAX);
    if (fstat(fd, &st) < 0)
        return rv_error_set(err, errno, ERROR(INTERNAL), "cannot examine the index: %s", strerror(errno));
    if (rv_sealed_check(fd, (uint64_t)st.st_size) < 0)
        return rv_error_set(err, EBADMSG, ERROR(INTERNAL), "the index is not sealed");
    if ((uint64_t)st.st_size < sizeof(struct rv_index_header))
        return rv_error_set(err, EBADMSG, ERROR(INTERNAL), "the index is shorter than its header");
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return rv_error_set(err, errno, ERROR(NO_MEMORY), "cannot map an index of %lld bytes: %s",
                            (long long)st.st_size, strerror(errno));
    problem = header_problem(map, (uint64_t)st.st_size);
    if (!problem)
        problem = arenas_problem(map, arena_sizes, arena_count);
    if (problem) {
        (void)munmap(map, (size_t)st.st_size);
        return rv_error_set(err, EBADMSG, ERROR(INTERNAL), "this is not an index: %s", problem);
    }
    index.map = map;
    index.size = (uint64_t)st.st_size;
    index.header = map;
    index.arena_count = arena_count;
    for (uint32_t i = 0; i < arena_count; i++)
        index.arena_sizes[i] = arena_sizes[i];
    *ret_index = index;
    return 0;
}

void rv_index_close(struct rv_index *index)
{
    if (index->map)
        (void)munmap((void *)index->map, index->size);
    *index = (struct rv_index){0};
}

uint32_t rv_index_count(const struct rv_index *index)
{
    return index->header->tensor_count;
}

/* The name of an entry, or NULL if it lies outside, has no NUL after it, or has one inside. */
static const char *entry_name(const struct rv_index *index, const struct rv_index_entry *entry)
{
    const struct rv_index_header *h = index->header;
    const char *name;

    if (entry->name_length > RV_TENSOR_NAME_MAX || entry->name_offset >= h->names_length ||
        entry->name_length >= h->names_length - entry->name_offset)
        return NULL;
    name = (const char *)index->map + h->names_offset + entry->name_offset;
    return strnlen(name, (size_t)entry->name_length + 1) == entry->name_length ? name : NULL;
}

static bool entry_is_valid(const struct rv_index *index, const struct rv_index_entry *entry)
{
    uint64_t bytes;

    return entry->rank <= RV_RANK_MAX && rv_shape_bytes(entry->dtype, entry->shape, entry->rank, &bytes) &&
           bytes == entry->length && entry->arena < index->arena_count && entry->offset % RV_TENSOR_ALIGN == 0 &&
           entry->offset <= index->arena_sizes[entry->arena] &&
           entry->length <= index->arena_sizes[entry->arena] - entry->offset;
}

const struct rv_index_entry *rv_index_at(const struct rv_index *index, uint32_t i, const char **ret_name)
{
    const struct rv_index_entry *entries = (const void *)(index->map + index->header->entries_offset);
    const char *name;

    if (i >= index->header->tensor_count)
        return NULL;
    name = entry_name(index, &entries[i]);
    if (!name || !entry_is_valid(index, &entries[i]))
        return NULL;
    if (ret_name)
        *ret_name = name;
    return &entries[i];
}

const struct rv_index_entry *rv_index_find(const struct rv_index *index, const char *name, uint64_t length)
{
    const uint32_t *slots = (const void *)(index->map + index->header->slots_offset);
    const struct rv_index_entry *entries = (const void *)(index->map + index->header->entries_offset);
    uint32_t mask = index->header->slot_count - 1;
    uint32_t slot = (uint32_t)rv_index_hash(name, length) & mask;

    for (uint32_t probes = 0; probes <= mask && probes < RV_INDEX_PROBES_MAX; probes++, slot = (slot + 1) & mask) {
        const char *found;
        uint32_t i = slots[slot];

        if (i == 0)
            return NULL;
        if (i > index->header->tensor_count || entries[i - 1].name_length != length)
            continue;
        found = entry_name(index, &entries[i - 1]);
        if (found && memcmp(found, name, length) == 0)
            return entry_is_valid(index, &entries[i - 1]) ? &entries[i - 1] : NULL;
    }
    return NULL;
}

const char *rv_index_metadata(const struct rv_index *index, uint64_t *ret_length)
{
    if (index->header->metadata_length == 0)
        return NULL;
    if (ret_length)
        *ret_length = index->header->metadata_length;
    return (const char *)index->map + index->header->metadata_offset;
}
