/* Copies that wait, and pinned memory. */
#include <errno.h>
#include <unistd.h>

#include "device_private.h"

struct copy {
    uint64_t address;
    uint64_t length;
    void *to;         /* host memory, or NULL */
    const void *from; /* host memory, or NULL: fill */
    uint8_t byte;
    const char *call;
};

static CUresult start_copy(const struct rv_cuda_driver *driver, const struct copy *copy, CUstream stream)
{
    if (copy->to)
        return driver->MemcpyDtoHAsync(copy->to, copy->address, copy->length, stream);
    if (copy->from)
        return driver->MemcpyHtoDAsync(copy->address, copy->from, copy->length, stream);
    return driver->MemsetD8Async(copy->address, copy->byte, copy->length, stream);
}

static int do_copy(struct rv_cuda_device *device, const struct copy *copy, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    const char *call = copy->call;
    struct rv_cuda_scope scope;
    CUstream stream = NULL;
    CUresult result;
    int r;

    if (copy->length == 0 && !rv_cuda_is_forked(device->cuda))
        return 0;
    r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    r = rv_cuda_stream_take(device, &stream, err);
    if (r == 0) {
        result = start_copy(driver, copy, stream);
        if (result == CUDA_SUCCESS) {
            call = "cuStreamSynchronize";
            result = driver->StreamSynchronize(stream);
        }
        rv_cuda_stream_give(device, stream, result != CUDA_SUCCESS);
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed(device->cuda, result, call, err);
    }
    rv_cuda_leave(device, &scope);
    return r;
}

int rv_cuda_read(struct rv_cuda_device *device, void *host, uint64_t address, uint64_t length, struct rv_error *err)
{
    struct copy copy = {.address = address, .length = length, .to = host, .call = "cuMemcpyDtoHAsync"};

    return do_copy(device, &copy, err);
}

int rv_cuda_write(struct rv_cuda_device *device, uint64_t address, const void *host, uint64_t length,
                  struct rv_error *err)
{
    struct copy copy = {.address = address, .length = length, .from = host, .call = "cuMemcpyHtoDAsync"};

    return do_copy(device, &copy, err);
}

int rv_cuda_fill(struct rv_cuda_device *device, uint64_t address, uint8_t byte, uint64_t length, struct rv_error *err)
{
    struct copy copy = {.address = address, .length = length, .byte = byte, .call = "cuMemsetD8Async"};

    return do_copy(device, &copy, err);
}

void *rv_cuda_host_alloc(struct rv_cuda_device *device, uint64_t size, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct rv_cuda_scope scope;
    void *memory = NULL;
    CUresult result;

    if (rv_cuda_enter(device, &scope, err) < 0)
        return NULL;
    result = driver->MemHostAlloc(&memory, size, 0);
    if (result != CUDA_SUCCESS) {
        rv_cuda_failed_of(device->cuda, result, "cuMemHostAlloc", size, err);
        memory = NULL;
    } else if ((uintptr_t)memory % page != 0) { /* reads past the page cache go into it */
        rv_cuda_refused(err, EIO, RV_CUDA_ERROR(DEVICE), "cuMemHostAlloc gave memory that begins within a page");
        (void)driver->MemFreeHost(memory);
        memory = NULL;
    }
    rv_cuda_leave(device, &scope);
    return memory;
}

void rv_cuda_host_free(struct rv_cuda_device *device, void *memory)
{
    struct rv_cuda_scope scope;
    int last = rv_cuda_last_error();

    if (memory && !rv_cuda_is_forked(device->cuda) && rv_cuda_enter(device, &scope, NULL) == 0) {
        (void)device->cuda->driver.MemFreeHost(memory);
        rv_cuda_leave(device, &scope);
    }
    rv_cuda_remember((CUresult)last);
}
