/* Copies to the device that go on while the caller does other things. */
#include <errno.h>
#include <stdlib.h>

#include "device_private.h"

struct rv_cuda_copier {
    struct rv_cuda_device *device;
    CUstream stream;
    CUevent events[RV_CUDA_MARKS_MAX]; /* of mark n: n % RV_CUDA_MARKS_MAX */
    uint64_t set;                      /* the last mark that was set */
    uint64_t reached;                  /* the last one that is known to be reached */
};

static CUevent event_of(const struct rv_cuda_copier *copier, uint64_t mark)
{
    return copier->events[mark % RV_CUDA_MARKS_MAX];
}

static void destroy(struct rv_cuda_copier *copier)
{
    const struct rv_cuda_driver *driver = &copier->device->cuda->driver;

    for (unsigned i = 0; i < RV_CUDA_MARKS_MAX; i++)
        if (copier->events[i])
            (void)driver->EventDestroy(copier->events[i]);
    if (copier->stream)
        (void)driver->StreamDestroy(copier->stream);
}

static int create(struct rv_cuda_copier *copier, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &copier->device->cuda->driver;
    CUresult result = driver->StreamCreate(&copier->stream, CU_STREAM_NON_BLOCKING);

    if (result != CUDA_SUCCESS) {
        copier->stream = NULL;
        return rv_cuda_failed(copier->device->cuda, result, "cuStreamCreate", err);
    }
    for (unsigned i = 0; i < RV_CUDA_MARKS_MAX; i++) { /* a wait sleeps instead of spinning */
        result = driver->EventCreate(&copier->events[i], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS) {
            copier->events[i] = NULL;
            return rv_cuda_failed(copier->device->cuda, result, "cuEventCreate", err);
        }
    }
    return 0;
}

int rv_cuda_copier_create(struct rv_cuda_device *device, struct rv_cuda_copier **ret_copier, struct rv_error *err)
{
    struct rv_cuda_copier *copier = calloc(1, sizeof(*copier));
    struct rv_cuda_scope scope;
    int r;

    if (!copier)
        return rv_cuda_refused(err, ENOMEM, RV_CUDA_ERROR(NO_MEMORY), "no memory for a copier");
    copier->device = device;
    r = rv_cuda_enter(device, &scope, err);
    if (r == 0) {
        r = create(copier, err);
        if (r < 0)
            destroy(copier);
        rv_cuda_leave(device, &scope);
    }
    if (r < 0) {
        free(copier);
        return r;
    }
    *ret_copier = copier;
    return 0;
}

void rv_cuda_copier_destroy(struct rv_cuda_copier *copier)
{
    struct rv_cuda_scope scope;

    if (!copier)
        return;
    if (!rv_cuda_is_forked(copier->device->cuda) && rv_cuda_enter(copier->device, &scope, NULL) == 0) {
        /* The caller frees the buffers next, so nothing may be under way. */
        (void)copier->device->cuda->driver.StreamSynchronize(copier->stream);
        destroy(copier);
        rv_cuda_leave(copier->device, &scope);
    }
    free(copier);
}

int rv_cuda_copier_put(struct rv_cuda_copier *copier, uint64_t address, const void *host, uint64_t length,
                       struct rv_error *err)
{
    const struct rv_cuda *cuda = copier->device->cuda;
    struct rv_cuda_scope scope;
    CUresult result = CUDA_SUCCESS;
    int r = rv_cuda_enter(copier->device, &scope, err);

    if (r < 0)
        return r;
    if (length)
        result = cuda->driver.MemcpyHtoDAsync(address, host, length, copier->stream);
    if (result != CUDA_SUCCESS)
        r = rv_cuda_failed(cuda, result, "cuMemcpyHtoDAsync", err);
    rv_cuda_leave(copier->device, &scope);
    return r;
}

int rv_cuda_copier_zero(struct rv_cuda_copier *copier, uint64_t address, uint64_t length, struct rv_error *err)
{
    const struct rv_cuda *cuda = copier->device->cuda;
    struct rv_cuda_scope scope;
    CUresult result = CUDA_SUCCESS;
    int r = rv_cuda_enter(copier->device, &scope, err);

    if (r < 0)
        return r;
    if (length)
        result = cuda->driver.MemsetD8Async(address, 0, length, copier->stream);
    if (result != CUDA_SUCCESS)
        r = rv_cuda_failed(cuda, result, "cuMemsetD8Async", err);
    rv_cuda_leave(copier->device, &scope);
    return r;
}

/* In the context. Events of one stream are reached in order, so the last one stands for those before it. */
static int wait_for(struct rv_cuda_copier *copier, uint64_t mark, struct rv_error *err)
{
    const struct rv_cuda *cuda = copier->device->cuda;
    CUresult result;

    if (mark <= copier->reached)
        return 0;
    if (mark > copier->set)
        return rv_cuda_refused(err, EINVAL, RV_CUDA_ERROR(INTERNAL), "mark %llu was never set",
                               (unsigned long long)mark);
    result = cuda->driver.EventSynchronize(event_of(copier, mark));
    if (result != CUDA_SUCCESS)
        return rv_cuda_failed(cuda, result, "cuEventSynchronize", err);
    copier->reached = mark;
    return 0;
}

int rv_cuda_copier_mark(struct rv_cuda_copier *copier, uint64_t *ret_mark, struct rv_error *err)
{
    const struct rv_cuda *cuda = copier->device->cuda;
    struct rv_cuda_scope scope;
    CUresult result;
    int r = rv_cuda_enter(copier->device, &scope, err);

    if (r < 0)
        return r;
    if (copier->set - copier->reached == RV_CUDA_MARKS_MAX)
        r = wait_for(copier, copier->reached + 1, err);
    if (r == 0) {
        result = cuda->driver.EventRecord(event_of(copier, copier->set + 1), copier->stream);
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed(cuda, result, "cuEventRecord", err);
        else
            *ret_mark = ++copier->set;
    }
    rv_cuda_leave(copier->device, &scope);
    return r;
}

int rv_cuda_copier_wait(struct rv_cuda_copier *copier, uint64_t mark, struct rv_error *err)
{
    struct rv_cuda_scope scope;
    int r = rv_cuda_enter(copier->device, &scope, err);

    if (r < 0)
        return r;
    r = wait_for(copier, mark, err);
    rv_cuda_leave(copier->device, &scope);
    return r;
}

uint64_t rv_cuda_copier_reached(struct rv_cuda_copier *copier)
{
    const struct rv_cuda *cuda = copier->device->cuda;
    struct rv_cuda_scope scope;
    int last = rv_cuda_last_error();

    if (rv_cuda_enter(copier->device, &scope, NULL) < 0) {
        rv_cuda_remember((CUresult)last);
        return copier->reached;
    }
    while (copier->reached < copier->set &&
           cuda->driver.EventQuery(event_of(copier, copier->reached + 1)) == CUDA_SUCCESS)
        copier->reached++;
    rv_cuda_leave(copier->device, &scope);
    return copier->reached;
}
