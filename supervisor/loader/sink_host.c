/*
 * Filling an arena of this machine's memory.
 *
 * Arenas of 4 KiB pages are written by write(2): nothing is zeroed first, nothing faults, a full memory filesystem is
 * ENOSPC and never SIGBUS, and no mapping has to go before the seal. Measured: 2.1 GiB/s against 0.65 GiB/s for
 * fallocate ahead and a shared mapping (tests/bench/bench_fill.c). Huge pages know no write(2): there it is a mapping.
 *
 * 4 KiB pages are what an arena promises. Where the kernel can (6.1 and later), ordinary memory is gathered into blocks
 * of 2 MiB just before it is written (MADV_COLLAPSE; needs no privilege and no reserved pages): the fill then costs
 * half the CPU time and a client's first touch a third, since one fault maps a whole block. Where the kernel cannot, or
 * where it costs more than it gains, the rest of the load goes without. RESVISOR_LOADER_GATHER=never in the
 * environment: all of it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clock.h"
#include "rpc.pb-c.h"
#include "sink_kind.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; the C library of Debian 12 does not name it */
#endif

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define WRITE_PAGE 4096u
#define HUGE_PAGE (2u * 1024 * 1024)
#define STAGE (64u * 1024)        /* small tensors are gathered up to this */
#define AHEAD (16u * 1024 * 1024) /* bytes allocated at once in front of a mapping's writer */

#define BLOCK (2u * 1024 * 1024)
#define GATHER (16u * 1024 * 1024) /* bytes per call: each call first waits for all processors' page lists */
/* CPU time per call; 2 to 3 ms are usual. More: a virtual machine whose host has to find the memory first (free page
 * reporting takes whole free blocks back, 30 ms), or memory so fragmented that the kernel has to move pages. */
#define GATHER_SLOW_US (10 * RV_MSEC)
#define GATHER_MISSES_MAX 3

struct host_sink {
    struct rv_sink base;
    enum rv_huge_pages huge_pages;
    int fd;             /* the arena; -1 = not ours (any more) */
    uint8_t *map;       /* huge pages only */
    uint64_t allocated; /* bytes of the map that may be touched */
    uint8_t *stage;     /* write(2) only: the bytes [position - staged, position) */
    uint32_t staged;
    uint64_t position;
    uint64_t gathered;      /* write(2) only: blocks before this offset have been asked for */
    unsigned gather_misses; /* times that the kernel had none, or took too long */
};

static struct host_sink *host_of(struct rv_sink *sink)
{
    return (struct host_sink *)sink; /* base is the first member */
}

static int write_failed(int number, uint64_t offset, struct rv_error *err)
{
    return rv_error_set(err, number, ERROR(NO_MEMORY), "cannot fill the arena at byte %llu: %s",
                        (unsigned long long)offset, strerror(number));
}

static int host_create(const struct rv_sink_wish *wish, struct rv_sink **ret_sink, struct rv_error *err)
{
    const char *gather = getenv("RESVISOR_LOADER_GATHER");
    struct host_sink *sink = calloc(1, sizeof(*sink));

    if (!sink)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the loader's buffers");
    sink->fd = -1;
    sink->huge_pages = wish->huge_pages;
    if (gather && strcmp(gather, "never") == 0)
        sink->gather_misses = GATHER_MISSES_MAX;
    *ret_sink = &sink->base;
    return 0;
}

static int host_plan(struct rv_sink *base, uint64_t used, uint64_t *ret_bytes, struct rv_error *err)
{
    uint64_t page = host_of(base)->huge_pages == RV_HUGE_OFF ? WRITE_PAGE : HUGE_PAGE;

    (void)err;
    *ret_bytes = (used + page - 1) / page * page;
    return 0;
}

static int host_begin(struct rv_sink *base, uint64_t used, const struct rv_arena *given, struct rv_error *err)
{
    struct host_sink *sink = host_of(base);
    int r = base->backend->create("resvisor-arena", used, sink->huge_pages, &base->arena, err);

    (void)given;
    if (r < 0)
        return r;
    sink->fd = r;
    if (base->arena.page_size == WRITE_PAGE) {
        sink->stage = aligned_alloc(WRITE_PAGE, STAGE);
        return sink->stage ? 0 : rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the loader's buffers");
    }
    if (base->arena.size == 0)
        return 0;
    sink->map = mmap(NULL, base->arena.size, PROT_READ | PROT_WRITE, MAP_SHARED, sink->fd, 0);
    if (sink->map == MAP_FAILED) {
        sink->map = NULL;
        return rv_error_set(err, errno, ERROR(NO_MEMORY), "cannot map an arena of %llu bytes of huge pages: %s",
                            (unsigned long long)base->arena.size, strerror(errno));
    }
    return 0;
}

/* Makes blocks out of [start, end), which nothing was written to yet. False = the kernel could not. */
static bool gather(const struct host_sink *sink, uint64_t start, uint64_t end)
{
    uint64_t length = end - start;
    uint8_t *room, *aligned;
    bool done;

    /* A range without any page is not gathered: give each block its first one. */
    for (uint64_t at = start; at < end; at += BLOCK)
        if (pwrite(sink->fd, "", 1, (off_t)at) != 1)
            return false; /* if memory is full, the real write says so */
    room = mmap(NULL, length + BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return false;
    aligned = room + (BLOCK - (uintptr_t)room % BLOCK) % BLOCK;
    done =
        mmap(aligned, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, sink->fd, (off_t)start) != MAP_FAILED &&
        madvise(aligned, length, MADV_COLLAPSE) == 0;
    (void)munmap(room, length + BLOCK);
    return done;
}

/* Before a write that ends at `end`: only whole blocks inside the arena, and each is asked for once. */
static void gather_to(struct host_sink *sink, uint64_t end)
{
    uint64_t whole = sink->base.arena.size / BLOCK * BLOCK;

    while (sink->gathered < end && sink->gathered < whole && sink->gather_misses < GATHER_MISSES_MAX) {
        uint64_t next = whole - sink->gathered < GATHER ? whole : sink->gathered + GATHER;
        uint64_t before = rv_clock_read(CLOCK_THREAD_CPUTIME_ID);

        if (!gather(sink, sink->gathered, next) || rv_clock_read(CLOCK_THREAD_CPUTIME_ID) - before > GATHER_SLOW_US)
            sink->gather_misses++;
        sink->gathered = next;
    }
}

static int write_all(struct host_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length,
                     struct rv_error *err)
{
    gather_to(sink, offset + length);
    while (length > 0) {
        ssize_t n = pwrite(sink->fd, data, length, (off_t)offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return write_failed(n < 0 ? errno : ENOSPC, offset, err);
        data += n;
        offset += (uint64_t)n;
        length -= (uint64_t)n;
    }
    return 0;
}

static int flush(struct host_sink *sink, struct rv_error *err)
{
    int r = write_all(sink, sink->position - sink->staged, sink->stage, sink->staged, err);

    if (r == 0)
        sink->staged = 0;
    return r;
}

/* Only whole pages are written, each once: a page written in two halves would be zeroed first. data NULL = zeros. */
static int put_staged(struct host_sink *sink, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    int r;

    while (length > 0) {
        uint64_t n = STAGE - sink->staged;

        if (data && sink->staged == 0 && length >= WRITE_PAGE) {
            n = length / WRITE_PAGE * WRITE_PAGE;
            r = write_all(sink, sink->position, data, n, err);
            if (r < 0)
                return r;
            sink->position += n;
        } else {
            if (length >= STAGE && sink->staged % WRITE_PAGE) /* up to the page, the rest goes without a copy */
                n = WRITE_PAGE - sink->staged % WRITE_PAGE;
            n = n < length ? n : length;
            if (data)
                memcpy(sink->stage + sink->staged, data, n);
            else
                memset(sink->stage + sink->staged, 0, n);
            sink->staged += (uint32_t)n;
            sink->position += n;
            if (sink->staged == STAGE || (sink->staged % WRITE_PAGE == 0 && length - n >= STAGE)) {
                r = flush(sink, err);
                if (r < 0)
                    return r;
            }
        }
        data = data ? data + n : NULL;
        length -= n;
    }
    return 0;
}

/* Allocates in front of the writer: an error here instead of a SIGBUS there. */
static int allocate_to(struct host_sink *sink, uint64_t end, struct rv_error *err)
{
    while (sink->allocated < end) {
        uint64_t left = sink->base.arena.size - sink->allocated;
        uint64_t n = left < AHEAD ? left : AHEAD;

        if (fallocate(sink->fd, 0, (off_t)sink->allocated, (off_t)n) == 0)
            sink->allocated += n;
        else if (errno != EINTR)
            return write_failed(errno, sink->allocated, err);
    }
    return 0;
}

static int host_put(struct rv_sink *base, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    struct host_sink *sink = host_of(base);
    int r;

    if (offset < sink->position)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "a write at byte %llu after one at byte %llu",
                            (unsigned long long)offset, (unsigned long long)sink->position);
    if (sink->stage) {
        r = put_staged(sink, NULL, offset - sink->position, err);
        return r < 0 ? r : put_staged(sink, data, length, err);
    }
    r = allocate_to(sink, offset + length, err);
    if (r < 0)
        return r;
    if (length)
        memcpy(sink->map + offset, data, length);
    sink->position = offset + length;
    return 0;
}

/* What was not written of a file that has its size already is a hole: zeros. */
static int host_finish(struct rv_sink *base, struct rv_error *err)
{
    struct host_sink *sink = host_of(base);

    return sink->stage ? flush(sink, err) : allocate_to(sink, base->arena.size, err);
}

static void unmap(struct host_sink *sink)
{
    if (sink->map)
        (void)munmap(sink->map, sink->base.arena.size);
    sink->map = NULL;
}

static int host_hand_over(struct rv_sink *base, int *ret_fd, struct rv_error *err)
{
    struct host_sink *sink = host_of(base);
    int r;

    unmap(sink);
    r = base->backend->seal(sink->fd, err);
    if (r < 0)
        return r;
    *ret_fd = sink->fd;
    sink->fd = -1;
    return 0;
}

static void host_destroy(struct rv_sink *base)
{
    struct host_sink *sink = host_of(base);

    unmap(sink);
    if (sink->fd >= 0)
        (void)close(sink->fd);
    free(sink->stage);
    free(sink);
}

const struct rv_sink_kind rv_sink_host = {.create = host_create,
                                          .plan = host_plan,
                                          .begin = host_begin,
                                          .put = host_put,
                                          .finish = host_finish,
                                          .hand_over = host_hand_over,
                                          .destroy = host_destroy};
