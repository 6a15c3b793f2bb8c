/*
 * Reading a range of a file in order: blocks come one after the other, several reads are in flight behind them.
 *
 * Three ways behind one interface: io_uring and a pool of threads read with O_DIRECT into a ring of aligned buffers, so
 * that a load does not push other files out of the page cache; the third copies from the page cache, for a file that
 * is there already (by several threads when the ring lies in a device's pinned memory). The caller's thread opens,
 * takes and releases; blocks must be released in order, and their bytes may be read by other threads until then.
 */
#ifndef RV_LOADER_READER_H
#define RV_LOADER_READER_H

#include <stdint.h>

#include "error.h"

#define RV_READER_SLOTS 8u

enum rv_direct_mode { RV_DIRECT_AUTO = 0, RV_DIRECT_ALWAYS = 1, RV_DIRECT_NEVER = 2 };

struct rv_block {
    const uint8_t *data;
    uint64_t offset; /* in the file */
    uint64_t length; /* bytes, > 0 */
};

/* Where the ring lies, if not in ordinary memory. */
struct rv_reader_memory {
    void *(*allocate)(void *context, uint64_t size); /* at a page's start; NULL = none: ordinary memory is taken */
    void (*release)(void *context, void *memory);
    void *context;
};

struct rv_reader;

/*
 * file: stays the caller's. Reads [begin, end). force: NULL, or "io_uring", "threads", "cache" (tests). memory: NULL =
 * ordinary; it must stay until the reader is closed. Falls back from io_uring to threads where it is not allowed, and
 * from O_DIRECT to the page cache where that is refused.
 */
int rv_reader_open(int file, uint64_t begin, uint64_t end, enum rv_direct_mode direct, const char *force,
                   const struct rv_reader_memory *memory, struct rv_reader **ret_reader, struct rv_error *err);

/* 1 = the next block; 0 = that was all, or all blocks are taken and none released; negative errno. -ESTALE = the file
 * has become shorter (ERROR_MODEL_CHANGED). */
int rv_reader_next(struct rv_reader *reader, struct rv_block *ret_block, struct rv_error *err);

/* Gives the oldest taken block back; its buffer is read into again at once. */
void rv_reader_release(struct rv_reader *reader);

/* Blocks taken and not released. RV_READER_SLOTS = release before the next. */
unsigned rv_reader_taken(const struct rv_reader *reader);

/* "io_uring", "threads" or "page cache": what was really used. */
const char *rv_reader_method(const struct rv_reader *reader);

void rv_reader_close(struct rv_reader *reader);

#endif
