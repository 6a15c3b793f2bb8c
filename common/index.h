/*
 * The index: the sealed table that names each tensor of a model. The loader writes it once; clients use it in place.
 *
 * Layout, little endian, all offsets in bytes from the start of the memfd and 8-aligned:
 *
 *   header   rv_index_header, 192 bytes
 *   arenas   arena_count x rv_index_arena
 *   slots    slot_count x uint32: 0 = free, else entry number + 1. slot_count is a power of two >= 2 x tensor_count
 *            (and >= 2). A name's first slot is XXH3_64bits(name, seed 0) & (slot_count - 1); collisions go to the next
 *            slot, round the end.
 *   entries  tensor_count x rv_index_entry, in the order of the file's data
 *   names    names_length bytes; each name is UTF-8 with a NUL after it (so pointers into the map are C strings)
 *   metadata metadata_length bytes: the file's __metadata__ as compact JSON text, with a NUL after them that is not
 *            counted; 0 = none
 *
 * A client trusts nothing: rv_index_open checks seals, size, header and table bounds in O(1); each entry is checked
 * when it is looked up. Then a hostile index can at most make a lookup fail or name other bytes of the same arenas.
 * Reading functions allocate nothing, do not log, and are safe from several threads at once.
 */
#ifndef RV_INDEX_H
#define RV_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "error.h"
#include "rv_limits.h"

#define RV_INDEX_MAGIC "RVINDEX\n"
#define RV_INDEX_VERSION 1u
#define RV_INDEX_BYTE_ORDER 0x01020304u
#define RV_INDEX_PROBES_MAX 1024u /* slots that a lookup tries; the builder refuses names that would need more */

/* Numbers are fixed for ever: they are part of the layout and of resvisor.h (enum rv_dtype there has the same values).
 */
enum rv_index_dtype {
    RV_INDEX_DTYPE_NONE = 0,
    RV_INDEX_BOOL = 1,
    RV_INDEX_U8 = 2,
    RV_INDEX_I8 = 3,
    RV_INDEX_F8_E4M3 = 4,
    RV_INDEX_F8_E5M2 = 5,
    RV_INDEX_U16 = 6,
    RV_INDEX_I16 = 7,
    RV_INDEX_F16 = 8,
    RV_INDEX_BF16 = 9,
    RV_INDEX_U32 = 10,
    RV_INDEX_I32 = 11,
    RV_INDEX_F32 = 12,
    RV_INDEX_U64 = 13,
    RV_INDEX_I64 = 14,
    RV_INDEX_F64 = 15,
    RV_INDEX_C64 = 16, /* two F32 */
    RV_INDEX_F8_E8M0 = 17,
    RV_INDEX_F8_E4M3FNUZ = 18,
    RV_INDEX_F8_E5M2FNUZ = 19,
    RV_INDEX_BLOB = 20, /* a whole file: shape = {bytes} */
    RV_INDEX_DTYPE_COUNT
};

struct rv_index_header {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
    uint64_t total_size;
    uint32_t tensor_count;
    uint32_t slot_count;
    uint32_t arena_count;
    uint32_t flags; /* 0 */
    uint64_t arenas_offset;
    uint64_t slots_offset;
    uint64_t entries_offset;
    uint64_t names_offset;
    uint64_t names_length;
    uint64_t metadata_offset;
    uint64_t metadata_length;
    uint8_t header_digest[16]; /* XXH3-128 (canonical, big endian) of the file's header; of nothing for a blob */
    uint64_t tensor_bytes;     /* sum of the lengths */
    uint8_t reserved[72];      /* 0 */
};
_Static_assert(sizeof(struct rv_index_header) == 192, "the layout is fixed");

struct rv_index_arena {
    uint64_t size;      /* bytes */
    uint32_t backend;   /* enum rv_backend_id */
    uint32_t page_size; /* bytes */
};
_Static_assert(sizeof(struct rv_index_arena) == 16, "the layout is fixed");

struct rv_index_entry {
    uint64_t name_offset; /* from names_offset */
    uint32_t name_length; /* bytes without the NUL */
    uint16_t dtype;       /* enum rv_index_dtype */
    uint8_t rank;         /* 0 to 8; 0 = a scalar of one element */
    uint8_t reserved;
    uint32_t arena;
    uint32_t reserved2;
    uint64_t offset; /* in the arena, a multiple of 256 */
    uint64_t length; /* bytes */
    uint64_t shape[RV_RANK_MAX];
    uint8_t digest[16]; /* XXH3-128 (canonical, big endian) of the tensor's bytes */
};
_Static_assert(sizeof(struct rv_index_entry) == 120, "the layout is fixed");

/* Bytes of one element; 0 = no such dtype. BLOB = 1. */
uint32_t rv_dtype_size(uint32_t dtype);

/* The safetensors name ("F32", "BF16", "F8_E4M3", "BLOB"); NULL = no such dtype. */
const char *rv_dtype_name(uint32_t dtype);

/* 0 = no such name. */
uint32_t rv_dtype_by_name(const char *name, uint64_t length);

/* Elements x element size of a shape; false = overflow or unknown dtype. rank <= RV_RANK_MAX. */
bool rv_shape_bytes(uint32_t dtype, const uint64_t *shape, uint32_t rank, uint64_t *ret_bytes);

/* ---- writing: the loader ---- */

struct rv_index_builder;

struct rv_index_builder *rv_index_builder_create(uint32_t tensor_capacity, uint64_t names_capacity);
void rv_index_builder_destroy(struct rv_index_builder *builder);

/* Adds a tensor; entry->name_* are filled here, all else is the caller's. -EEXIST = duplicate name;
 * -ELOOP = a hostile choice of names that all share one slot; -E2BIG = over a limit; -ENOMEM. */
int rv_index_builder_add(struct rv_index_builder *builder, const char *name, uint32_t name_length,
                         const struct rv_index_entry *entry);

/* Entry i, to fill its digest later. Valid until the next _add. */
struct rv_index_entry *rv_index_builder_entry(struct rv_index_builder *builder, uint32_t i);

/* Bytes that _write will take with these extras: for the plan. */
uint64_t rv_index_builder_size(const struct rv_index_builder *builder, uint32_t arena_count, uint64_t metadata_length);

/* Writes and seals: the memfd (the caller's) or a negative errno. metadata may be NULL with length 0. */
int rv_index_builder_write(struct rv_index_builder *builder, const struct rv_index_arena *arenas, uint32_t arena_count,
                           const char *metadata, uint64_t metadata_length, const uint8_t header_digest[16],
                           uint64_t *ret_size);

/* ---- reading: libresvisor ---- */

struct rv_index {
    const uint8_t *map;
    uint64_t size;
    const struct rv_index_header *header;
    uint64_t arena_sizes[RV_ARENAS_MAX]; /* from the lease, checked by fstat: the limits for all entries */
    uint32_t arena_count;
};

/*
 * Checks a received index memfd and maps it read-only. fd stays the caller's and may be closed afterwards. arena_sizes:
 * what fstat says of the arena descriptors. -EBADMSG = not an index; err (may be NULL) says what is wrong.
 */
int rv_index_open(struct rv_index *ret_index, int fd, const uint64_t *arena_sizes, uint32_t arena_count,
                  struct rv_error *err);
void rv_index_close(struct rv_index *index);

uint32_t rv_index_count(const struct rv_index *index);

/* Entry i, checked; NULL = out of range or hostile. *ret_name (may be NULL) is a C string inside the map. */
const struct rv_index_entry *rv_index_at(const struct rv_index *index, uint32_t i, const char **ret_name);

/* By name, without a scan; NULL = not there, or hostile. */
const struct rv_index_entry *rv_index_find(const struct rv_index *index, const char *name, uint64_t length);

/* The file's __metadata__ as JSON text; NULL = none. */
const char *rv_index_metadata(const struct rv_index *index, uint64_t *ret_length);

#endif
