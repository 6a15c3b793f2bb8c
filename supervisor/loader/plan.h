/*
 * What a model file holds and where it goes: made from the header, before anything is allocated. Loader only.
 *
 * The data section of the file is the tensors in order without gaps; in the arena each starts at the next multiple of
 * 256.
 */
#ifndef RV_LOADER_PLAN_H
#define RV_LOADER_PLAN_H

#include <stdint.h>

#include "error.h"
#include "index.h"

struct rv_plan {
    struct rv_index_builder *builder; /* entries in the order of the data; digests are filled later */
    uint32_t count;
    uint64_t data_start, data_length; /* of the file, in bytes */
    uint64_t arena_used;              /* bytes; the arena rounds it to pages */
    char *metadata;                   /* NULL = none */
    uint64_t metadata_length;
    uint8_t header_digest[16];
};

/* format: "auto", "safetensors" or "blob". path: for "auto" and messages. file_size: what fstat said. */
int rv_plan_make(int file, uint64_t file_size, const char *path, const char *format, struct rv_plan *ret_plan,
                 struct rv_error *err);
void rv_plan_fini(struct rv_plan *plan);

/* Walks the tensors along the data section. Start with {0}. */
struct rv_cursor {
    uint32_t tensor;
    uint64_t done; /* bytes of it */
};

struct rv_piece {
    struct rv_index_entry *entry;
    uint64_t offset;  /* in the arena */
    uint64_t length;  /* may be 0 for an empty tensor */
    bool first, last; /* piece of the tensor */
};

/* The next piece, at most max bytes. false = all tensors are done, or max is 0 and the next one is not empty. */
bool rv_cursor_next(struct rv_cursor *cursor, const struct rv_plan *plan, uint64_t max, struct rv_piece *ret_piece);

#endif
