/*
 * Filling a device's memory from blocks of a file: few and large copies that go on while the file is read on.
 *
 * Bytes that lie one after the other both in the block and in the arena are one copy straight from the block. What is
 * smaller than RV_COPY_MIN, and the zeros between tensors, are first gathered in a pinned stage. Loader only, one
 * thread at a time.
 */
#ifndef RV_LOADER_COPY_H
#define RV_LOADER_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "rv_cuda.h"

#define RV_COPY_MIN (256u * 1024)
#define RV_COPY_STAGE (1024u * 1024) /* at least 3 * RV_COPY_MIN: copy.c says why */
#define RV_COPY_STAGES 4u

struct rv_copy {
    struct rv_cuda_device *device;
    struct rv_cuda_copier *copier;
    uint64_t address, size; /* of the arena on the device */
    uint64_t position;      /* up to here the arena is written, or in the stage */
    const uint8_t *run;     /* comes after position; not yet sent off */
    uint64_t run_length;
    uint8_t *memory; /* of all stages; NULL = before init */
    bool memory_pinned;
    bool pinned; /* else each copy waits until it is done */
    uint64_t stage_marks[RV_COPY_STAGES];
    unsigned stage;  /* the one that is gathered in */
    uint32_t staged; /* bytes in it: the arena's [position - staged, position) */
};

/* Cleared memory is a copy that fini may be called on. The device stays the caller's. */
int rv_copy_init(struct rv_copy *copy, struct rv_cuda_device *device, uint64_t address, uint64_t size,
                 struct rv_error *err);

/* As rv_sink_put, _mark, _reached, _wait and _finish. */
int rv_copy_put(struct rv_copy *copy, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err);
int rv_copy_mark(struct rv_copy *copy, uint64_t *ret_mark, struct rv_error *err);
uint64_t rv_copy_reached(struct rv_copy *copy);
int rv_copy_wait(struct rv_copy *copy, uint64_t mark, struct rv_error *err);
int rv_copy_finish(struct rv_copy *copy, struct rv_error *err);

/* Waits for what is under way and gives everything back. */
void rv_copy_fini(struct rv_copy *copy);

#endif
