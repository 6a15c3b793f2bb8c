#include "sink.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clock.h"
#include "rpc.pb-c.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1; the C library of Debian 12 does not name it */
#endif

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define WRITE_PAGE 4096u
#define AHEAD (16u * 1024 * 1024) /* bytes allocated at once in front of a mapping's writer */

#define BLOCK (2u * 1024 * 1024)
#define GATHER (16u * 1024 * 1024) /* bytes per call: each call first waits for all processors' page lists */
/* CPU time per call; 2 to 3 ms are usual. More: a virtual machine whose host has to find the memory first (free page
 * reporting takes whole free blocks back, 30 ms), or memory so fragmented that the kernel has to move pages. */
#define GATHER_SLOW_US (10 * RV_MSEC)
#define GATHER_MISSES_MAX 3

static int write_failed(int number, uint64_t offset, struct rv_error *err)
{
    return rv_error_set(err, number, ERROR(NO_MEMORY), "cannot fill the arena at byte %llu: %s",
                        (unsigned long long)offset, strerror(number));
}

int rv_sink_init(struct rv_sink *sink, int fd, const struct rv_arena *arena, struct rv_error *err)
{
    const char *wish = getenv("RESVISOR_LOADER_GATHER");

    *sink = (struct rv_sink){.fd = fd, .arena = *arena};
    if (wish && strcmp(wish, "never") == 0)
        sink->gather_misses = GATHER_MISSES_MAX;
    if (arena->page_size == WRITE_PAGE) {
        sink->stage = aligned_alloc(WRITE_PAGE, RV_SINK_STAGE);
        return sink->stage ? 0 : rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the loader's buffers");
    }
    if (arena->size == 0)
        return 0;
    sink->map = mmap(NULL, arena->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (sink->map == MAP_FAILED) {
        sink->map = NULL;
        return rv_error_set(err, errno, ERROR(NO_MEMORY), "cannot map an arena of %llu bytes of huge pages: %s",
                            (unsigned long long)arena->size, strerror(errno));
    }
    return 0;
}

/* Makes blocks out of [start, end), which nothing was written to yet. False = the kernel could not. */
static bool gather(const struct rv_sink *sink, uint64_t start, uint64_t end)
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
static void gather_to(struct rv_sink *sink, uint64_t end)
{
    uint64_t whole = sink->arena.size / BLOCK * BLOCK;

    while (sink->gathered < end && sink->gathered < whole && sink->gather_misses < GATHER_MISSES_MAX) {
        uint64_t next = whole - sink->gathered < GATHER ? whole : sink->gathered + GATHER;
        uint64_t before = rv_clock_read(CLOCK_THREAD_CPUTIME_ID);

        if (!gather(sink, sink->gathered, next) || rv_clock_read(CLOCK_THREAD_CPUTIME_ID) - before > GATHER_SLOW_US)
            sink->gather_misses++;
        sink->gathered = next;
    }
}

static int write_all(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
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

static int flush(struct rv_sink *sink, struct rv_error *err)
{
    int r = write_all(sink, sink->position - sink->staged, sink->stage, sink->staged, err);

    if (r == 0)
        sink->staged = 0;
    return r;
}

/* Only whole pages are written, each once: a page written in two halves would be zeroed first. data NULL = zeros. */
static int put_staged(struct rv_sink *sink, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    int r;

    while (length > 0) {
        uint64_t n = RV_SINK_STAGE - sink->staged;

        if (data && sink->staged == 0 && length >= WRITE_PAGE) {
            n = length / WRITE_PAGE * WRITE_PAGE;
            r = write_all(sink, sink->position, data, n, err);
            if (r < 0)
                return r;
            sink->position += n;
        } else {
            if (length >= RV_SINK_STAGE && sink->staged % WRITE_PAGE) /* up to the page, the rest goes without a copy */
                n = WRITE_PAGE - sink->staged % WRITE_PAGE;
            n = n < length ? n : length;
            if (data)
                memcpy(sink->stage + sink->staged, data, n);
            else
                memset(sink->stage + sink->staged, 0, n);
            sink->staged += (uint32_t)n;
            sink->position += n;
            if (sink->staged == RV_SINK_STAGE || (sink->staged % WRITE_PAGE == 0 && length - n >= RV_SINK_STAGE)) {
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
static int allocate_to(struct rv_sink *sink, uint64_t end, struct rv_error *err)
{
    while (sink->allocated < end) {
        uint64_t left = sink->arena.size - sink->allocated;
        uint64_t n = left < AHEAD ? left : AHEAD;

        if (fallocate(sink->fd, 0, (off_t)sink->allocated, (off_t)n) == 0)
            sink->allocated += n;
        else if (errno != EINTR)
            return write_failed(errno, sink->allocated, err);
    }
    return 0;
}

int rv_sink_put(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    int r;

    if (offset < sink->position || offset > sink->arena.size || length > sink->arena.size - offset)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "a write at byte %llu of an arena of %llu bytes",
                            (unsigned long long)offset, (unsigned long long)sink->arena.size);
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

int rv_sink_finish(struct rv_sink *sink, struct rv_error *err)
{
    int r = sink->stage ? flush(sink, err) : allocate_to(sink, sink->arena.size, err);

    if (r == 0)
        rv_sink_fini(sink);
    return r;
}

void rv_sink_fini(struct rv_sink *sink)
{
    if (sink->map)
        (void)munmap(sink->map, sink->arena.size);
    free(sink->stage);
    sink->map = NULL;
    sink->stage = NULL;
}
