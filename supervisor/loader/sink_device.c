/*
 * Filling an arena on a device, through its driver.
 *
 * The driver and the context take a tenth of a second or more to come up: a thread of its own does that while the
 * file's header is read. The driver's setuid program (nvidia-modprobe) cannot gain privileges here; resvisor-device has
 * opened the devices before any load, and may use it, so the nodes in /dev are there.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copy.h"
#include "rpc.pb-c.h"
#include "rv_cuda.h"
#include "sink_kind.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define BLOCK_MIN (2u * 1024 * 1024) /* what rv_cuda makes arenas of, or the granularity if that is more */

struct device_sink {
    struct rv_sink base;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    pthread_t opener;
    bool opening;   /* the opener runs, and owns the next six members until it is joined */
    int opened;     /* what it came to: 0 or a negative errno */
    int open_fault; /* CUresult */
    struct rv_error open_error;
    struct rv_cuda *cuda;
    struct rv_cuda_device *device;
    uint32_t block; /* bytes: an arena is whole ones */
    struct rv_cuda_memory memory;
    struct rv_copy copy;
};

static struct device_sink *device_of(struct rv_sink *sink)
{
    return (struct device_sink *)sink; /* base is the first member */
}

static void keep_fault(struct device_sink *sink, int number, const struct rv_error *err)
{
    if (number == 0 || sink->base.fault != 0)
        return;
    sink->base.fault = number;
    (void)snprintf(sink->base.fault_what, sizeof(sink->base.fault_what), "%s", err->message);
}

/* Passes r on, and keeps the error if it is the driver's. To be called in the thread that failed. */
static int checked(struct device_sink *sink, int r, const struct rv_error *err)
{
    if (r < 0)
        keep_fault(sink, rv_cuda_last_error(), err);
    return r;
}

static int open_device(struct device_sink *sink)
{
    struct rv_cuda_info info = {0};
    int r = rv_cuda_open(&sink->cuda, &sink->open_error);

    if (r == 0)
        r = rv_cuda_device_open(sink->cuda, sink->uuid, &sink->device, &sink->open_error);
    if (r == 0)
        r = rv_cuda_device_info(sink->cuda, rv_cuda_device_ordinal(sink->device), &info, &sink->open_error);
    sink->block = info.granularity > BLOCK_MIN ? info.granularity : BLOCK_MIN;
    return r;
}

static void *opener_run(void *context)
{
    struct device_sink *sink = context;

    sink->opened = open_device(sink);
    sink->open_fault = sink->opened < 0 ? rv_cuda_last_error() : 0;
    return NULL;
}

static int device_create(const struct rv_sink_wish *wish, struct rv_sink **ret_sink, struct rv_error *err)
{
    struct device_sink *sink;
    int r;

    if (!wish->uuid)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "a load of backend %s without a device", wish->backend->name);
    sink = calloc(1, sizeof(*sink));
    if (!sink)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the loader's buffers");
    memcpy(sink->uuid, wish->uuid, sizeof(sink->uuid));
    r = pthread_create(&sink->opener, NULL, opener_run, sink);
    if (r != 0) {
        free(sink);
        return rv_error_set(err, r, ERROR(NO_MEMORY), "cannot start the thread that opens the device: %s", strerror(r));
    }
    sink->opening = true;
    *ret_sink = &sink->base;
    return 0;
}

static void join_opener(struct device_sink *sink)
{
    if (sink->opening)
        (void)pthread_join(sink->opener, NULL);
    sink->opening = false;
}

static int device_plan(struct rv_sink *base, uint64_t used, uint64_t *ret_bytes, struct rv_error *err)
{
    struct device_sink *sink = device_of(base);

    join_opener(sink);
    if (sink->opened < 0) {
        keep_fault(sink, sink->open_fault, &sink->open_error);
        *err = sink->open_error;
        return sink->opened;
    }
    used = used ? used : 1; /* a device has no empty allocations */
    *ret_bytes = (used + sink->block - 1) / sink->block * sink->block;
    return 0;
}

static void *allocate_pinned(void *context, uint64_t size)
{
    struct device_sink *sink = context;
    struct rv_error err = {0};
    void *memory = sink->copy.pinned ? rv_cuda_host_alloc(sink->device, size, &err) : NULL;

    if (!memory && sink->copy.pinned) {
        sink->copy.pinned = false;
        (void)snprintf(sink->base.note, sizeof(sink->base.note), "not pinned: %.80s", err.message);
    }
    return memory;
}

static void release_pinned(void *context, void *memory)
{
    struct device_sink *sink = context;

    rv_cuda_host_free(sink->device, memory);
}

static int take_arena(struct device_sink *sink, uint64_t used, const struct rv_arena *given, struct rv_error *err)
{
    int r;

    if (!given)
        return rv_cuda_vmm_create(sink->device, used, &sink->memory, &sink->base.arena, err);
    if (given->size < used || given->page_size == 0)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the holder's arena of %llu bytes is too small for %llu",
                            (unsigned long long)given->size, (unsigned long long)used);
    r = rv_cuda_ipc_open(sink->device, given, &sink->memory, err);
    if (r == 0)
        sink->base.arena = *given;
    return r;
}

static int device_begin(struct rv_sink *base, uint64_t used, const struct rv_arena *given, struct rv_error *err)
{
    struct device_sink *sink = device_of(base);
    int r = take_arena(sink, used ? used : 1, given, err);

    if (r == 0)
        r = rv_copy_init(&sink->copy, sink->device, sink->memory.address, base->arena.size, err);
    if (r < 0)
        return checked(sink, r, err);
    if (sink->copy.pinned)
        (void)snprintf(base->note, sizeof(base->note), "pinned");
    else
        (void)snprintf(base->note, sizeof(base->note), "not pinned: %.80s", err->message);
    base->memory = (struct rv_reader_memory){.allocate = allocate_pinned, .release = release_pinned, .context = sink};
    return 0;
}

static int device_put(struct rv_sink *base, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    return checked(device_of(base), rv_copy_put(&device_of(base)->copy, offset, data, length, err), err);
}

static int device_mark(struct rv_sink *base, uint64_t *ret_mark, struct rv_error *err)
{
    return checked(device_of(base), rv_copy_mark(&device_of(base)->copy, ret_mark, err), err);
}

static uint64_t device_reached(struct rv_sink *base)
{
    return rv_copy_reached(&device_of(base)->copy);
}

static int device_wait(struct rv_sink *base, uint64_t mark, struct rv_error *err)
{
    return checked(device_of(base), rv_copy_wait(&device_of(base)->copy, mark, err), err);
}

static int device_finish(struct rv_sink *base, struct rv_error *err)
{
    struct device_sink *sink = device_of(base);
    int r = rv_copy_finish(&sink->copy, err);

    if (r == 0)
        r = rv_cuda_device_check(sink->device, err);
    return checked(sink, r, err);
}

static void device_stop(struct rv_sink *base)
{
    rv_copy_fini(&device_of(base)->copy);
}

static int device_hand_over(struct rv_sink *base, int *ret_fd, struct rv_error *err)
{
    struct device_sink *sink = device_of(base);
    int r;

    rv_copy_fini(&sink->copy);
    if (!base->backend->has_descriptor) {
        rv_cuda_memory_close(sink->device, &sink->memory);
        *ret_fd = -1;
        return 0;
    }
    r = rv_cuda_vmm_export(sink->device, &sink->memory, err);
    if (r < 0)
        return checked(sink, r, err);
    *ret_fd = r;
    return 0;
}

static void device_destroy(struct rv_sink *base)
{
    struct device_sink *sink = device_of(base);

    join_opener(sink);
    rv_copy_fini(&sink->copy);
    if (sink->memory.address)
        rv_cuda_memory_close(sink->device, &sink->memory);
    rv_cuda_device_close(sink->device);
    rv_cuda_close(sink->cuda);
    free(sink);
}

const struct rv_sink_kind rv_sink_device = {.create = device_create,
                                            .plan = device_plan,
                                            .begin = device_begin,
                                            .put = device_put,
                                            .mark = device_mark,
                                            .reached = device_reached,
                                            .wait = device_wait,
                                            .finish = device_finish,
                                            .stop = device_stop,
                                            .hand_over = device_hand_over,
                                            .destroy = device_destroy};
