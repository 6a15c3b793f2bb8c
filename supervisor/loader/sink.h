/*
 * Where a load writes: one arena, in ascending order. There are two kinds, and the backend's row says which:
 * sink_host.c fills memory of this machine, sink_device.c that of a device. Loader only.
 *
 * The life of a sink: create, plan, begin, (put, mark, wait or reached)…, finish, hand_over, destroy. One thread at a
 * time.
 */
#ifndef RV_LOADER_SINK_H
#define RV_LOADER_SINK_H

#include <stdint.h>

#include "error.h"
#include "memory.h"
#include "reader.h"

struct rv_sink;

struct rv_sink_wish {
    const struct rv_backend *backend;
    enum rv_huge_pages huge_pages; /* host only */
    const uint8_t *uuid;           /* RV_DEVICE_UUID_SIZE bytes: the device; NULL = host */
};

/* A device is looked for meanwhile: that takes a tenth of a second or more. */
int rv_sink_create(const struct rv_sink_wish *wish, struct rv_sink **ret_sink, struct rv_error *err);

/* What an arena for `used` bytes takes at most: huge pages may turn out not to be there. Waits for the device. */
int rv_sink_plan(struct rv_sink *sink, uint64_t used, uint64_t *ret_bytes, struct rv_error *err);

/* Makes the arena for `used` bytes. given: one that was allocated elsewhere (a backend without descriptors), or NULL.
 */
int rv_sink_begin(struct rv_sink *sink, uint64_t used, const struct rv_arena *given, struct rv_error *err);

/* What the reader's ring should lie in; NULL = ordinary memory. Valid from begin to destroy. */
const struct rv_reader_memory *rv_sink_memory(struct rv_sink *sink);

/*
 * Writes at offset >= the end of what came before; the gap is zeros. data must stay as it is until a later mark is
 * reached.
 */
int rv_sink_put(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err);

/* A place in the order of what was put. */
int rv_sink_mark(struct rv_sink *sink, uint64_t *ret_mark, struct rv_error *err);
uint64_t rv_sink_reached(struct rv_sink *sink); /* the last mark that is, without waiting */
int rv_sink_wait(struct rv_sink *sink, uint64_t mark, struct rv_error *err);

/* Writes the rest, zeros up to the arena's end. Nothing is under way afterwards. */
int rv_sink_finish(struct rv_sink *sink, struct rv_error *err);

/* Instead of finish, after an error: what is under way ends, and no memory that was put is read any more. */
void rv_sink_stop(struct rv_sink *sink);

/* After finish: the arena becomes what others can have. *ret_fd is the caller's; -1 for a backend without one. */
int rv_sink_hand_over(struct rv_sink *sink, struct rv_arena *ret_arena, int *ret_fd, struct rv_error *err);

/* For people: how it was written, such as "pinned"; "" = nothing to say. */
const char *rv_sink_note(const struct rv_sink *sink);

/* The first error of the driver that made a function above fail: its number, and *ret_what says which call. 0 = none.
 */
int rv_sink_fault(const struct rv_sink *sink, const char **ret_what);

/* What was not handed over is given back. The reader must be closed before. NULL is fine. */
void rv_sink_destroy(struct rv_sink *sink);

#endif
