#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "actor.h"
#include "clock.h"
#include "memory.h"
#include "rpc.pb-c.h"

/* Each figure is the median of up to RUNS runs. A slow bus or a loaded machine gets fewer, so that it stays short. */
#define RUNS 5
#define RUNS_US (100 * RV_MSEC)
#define PINNED (16u * 1024 * 1024)
#define FILLS 4 /* in one run: one alone is over before its launch is paid */

struct speed {
    struct rv_cuda_device *device;
    struct rv_cuda_copier *copier;
    struct rv_cuda_memory memory;
    uint64_t address, size;
    uint8_t *pinned;
    uint64_t pinned_size;
};

typedef int run_function(struct speed *s, uint64_t *ret_bytes, struct rv_error *err);

static int finish(struct speed *s, struct rv_error *err)
{
    uint64_t mark;
    int r = rv_cuda_copier_mark(s->copier, &mark, err);

    return r < 0 ? r : rv_cuda_copier_wait(s->copier, mark, err);
}

static int run_up(struct speed *s, uint64_t *ret_bytes, struct rv_error *err)
{
    for (uint64_t offset = 0; offset < s->size; offset += s->pinned_size) {
        uint64_t length = s->size - offset < s->pinned_size ? s->size - offset : s->pinned_size;
        int r = rv_cuda_copier_put(s->copier, s->address + offset, s->pinned, length, err);

        if (r < 0)
            return r;
    }
    *ret_bytes = s->size;
    return finish(s, err);
}

static int run_read(struct speed *s, uint64_t *ret_bytes, struct rv_error *err)
{
    for (uint64_t offset = 0; offset < s->size; offset += s->pinned_size) {
        uint64_t length = s->size - offset < s->pinned_size ? s->size - offset : s->pinned_size;
        int r = rv_cuda_read(s->device, s->pinned, s->address + offset, length, err);

        if (r < 0)
            return r;
    }
    *ret_bytes = s->size;
    return 0;
}

static int run_fill(struct speed *s, uint64_t *ret_bytes, struct rv_error *err)
{
    for (int i = 0; i < FILLS; i++) {
        int r = rv_cuda_copier_zero(s->copier, s->address, s->size, err);

        if (r < 0)
            return r;
    }
    *ret_bytes = FILLS * s->size;
    return finish(s, err);
}

static int by_size(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Bytes per second. The first run is not counted: it pays for what is made at first use. */
static int median(struct speed *s, run_function *run, uint64_t *ret_speed, struct rv_error *err)
{
    uint64_t figures[RUNS], until = rv_now_us() + RUNS_US, bytes = 0;
    int count = 0, r = run(s, &bytes, err);

    while (r == 0 && count < RUNS && (count == 0 || rv_now_us() < until)) {
        uint64_t started = rv_now_us(), passed;

        r = run(s, &bytes, err);
        passed = rv_now_us() - started;
        figures[count++] = bytes * RV_SEC / (passed ? passed : 1);
    }
    if (r < 0)
        return r;
    qsort(figures, (size_t)count, sizeof(figures[0]), by_size);
    *ret_speed = figures[count / 2];
    return 0;
}

static int measure_device(struct speed *s, uint32_t backend, struct rv_answer *answer, struct rv_error *err)
{
    struct rv_arena arena;
    int r = backend == RV_BACKEND_CUDA_VMM ? rv_cuda_vmm_create(s->device, s->size, &s->memory, &arena, err)
                                           : rv_cuda_ipc_create(s->device, s->size, &s->memory, &arena, err);

    if (r < 0)
        return r;
    s->address = s->memory.address;
    r = rv_cuda_copier_create(s->device, &s->copier, err);
    if (r == 0)
        r = median(s, run_up, &answer->values[RV_SPEED_UP], err);
    if (r == 0)
        r = median(s, run_read, &answer->values[RV_SPEED_READ], err);
    if (r == 0)
        r = median(s, run_fill, &answer->values[RV_SPEED_FILL], err);
    rv_cuda_copier_destroy(s->copier);
    rv_cuda_memory_close(s->device, &s->memory);
    return r;
}

/* The machine's memory: the device only reads it. */
static int measure_host(struct speed *s, struct rv_answer *answer, struct rv_error *err)
{
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    struct rv_arena arena;
    void *map = NULL;
    int r, fd = backend->create("resvisor-test", s->size, RV_HUGE_OFF, &arena, err);

    if (fd < 0)
        return fd;
    r = posix_fallocate(fd, 0, (off_t)arena.size);
    if (r != 0)
        r = rv_error_set(err, r, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for %llu bytes: %s",
                         (unsigned long long)arena.size, strerror(r));
    if (r == 0)
        r = backend->seal(fd, err);
    if (r == 0)
        r = backend->map(fd, &arena, RV_MAP_SHARED, &map, err);
    if (r == 0) {
        s->address = (uint64_t)(uintptr_t)map;
        r = median(s, run_read, &answer->values[RV_SPEED_READ], err);
        (void)munmap(map, arena.size);
    }
    (void)close(fd);
    return r;
}

int rv_speed_measure(struct rv_cuda_device *device, uint32_t backend, uint64_t size, struct rv_answer *answer,
                     struct rv_error *err)
{
    struct speed s = {.device = device, .size = size, .pinned_size = size < PINNED ? size : PINNED};
    int r;

    s.pinned = rv_cuda_host_alloc(device, s.pinned_size, err);
    if (!s.pinned)
        return -ENOMEM;
    memset(s.pinned, 0x3c, s.pinned_size);
    r = backend == RV_BACKEND_MEMFD ? measure_host(&s, answer, err) : measure_device(&s, backend, answer, err);
    rv_cuda_host_free(device, s.pinned);
    return r;
}
