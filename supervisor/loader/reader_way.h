/* Between reader.c and the three ways to read. */
#ifndef RV_LOADER_READER_WAY_H
#define RV_LOADER_READER_WAY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "reader.h"

/* One buffer of the ring and the read that goes into it. */
struct reader_slot {
    uint8_t *buffer;
    uint64_t offset;  /* of the file: aligned for O_DIRECT */
    uint32_t request; /* bytes asked for: aligned for O_DIRECT, may reach over the end */
    uint32_t need;    /* bytes that must come */
    bool done;        /* written by the way */
    int64_t result;   /* bytes, or a negative errno; valid when done */
};

struct rv_reader {
    const struct reader_way *way;
    void *state; /* the way's own */
    int file;    /* buffered; the caller's */
    int fd;      /* what the way reads from: `file`, or opened anew with O_DIRECT */
    uint64_t begin, end;
    uint64_t next_offset; /* of the next read to start */
    uint32_t block, align;
    const struct rv_reader_memory *source; /* NULL = ordinary memory */
    uint8_t *memory;
    uint64_t memory_size;              /* 0 = it came from the source */
    uint64_t started, taken, released; /* blocks; released <= taken <= started <= released + RV_READER_SLOTS */
    bool fell_back;                    /* some block had to come through the page cache */
    struct reader_slot slots[RV_READER_SLOTS];
};

struct reader_way {
    const char *name;
    bool direct;                                                       /* past the page cache */
    uint32_t block;                                                    /* bytes per read */
    int (*open)(struct rv_reader *reader);                             /* 0 or negative errno */
    void (*start)(struct rv_reader *reader, struct reader_slot *slot); /* a failure becomes the slot's result */
    void (*wait)(struct rv_reader *reader, struct reader_slot *slot);  /* until slot->done */
    void (*close)(struct rv_reader *reader);                           /* no read is in flight afterwards */
};

#define READER_DIRECT_BLOCK (4u * 1024 * 1024)

/* rv_reader_cache_threads: from the page cache by several threads, where nothing but that copy is to be done. */
extern const struct reader_way rv_reader_cache, rv_reader_cache_threads, rv_reader_threads, rv_reader_uring;

#endif
