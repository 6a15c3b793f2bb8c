/*
 * What the files of common/cuda share. Private to them.
 *
 * Every function that calls the driver begins with rv_cuda_enter, which refuses a forked child and makes the device's
 * primary context current, and ends with rv_cuda_leave, which puts back the caller's.
 */
#ifndef RV_CUDA_DEVICE_PRIVATE_H
#define RV_CUDA_DEVICE_PRIVATE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "driver.h"
#include "rpc.pb-c.h"
#include "rv_cuda.h"

#define RV_CUDA_ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

struct rv_cuda {
    struct rv_cuda_driver driver;
    pid_t owner; /* the process that may use it */
    int version;
    uint32_t count;
};

struct rv_cuda_device {
    struct rv_cuda *cuda;
    CUdevice_v1 device;
    CUcontext context; /* retained */
    uint32_t ordinal;
    uint64_t total_bytes;
    char uuid[RV_DEVICE_UUID_TEXT];
    _Atomic(CUstream) spare; /* an idle stream for the next read or write, or NULL */
};

struct rv_cuda_scope {
    CUcontext before;
    bool changed;
};

/* True in a process that was forked from the one that opened it. */
bool rv_cuda_is_forked(const struct rv_cuda *cuda);

/* -EPERM with its message. */
int rv_cuda_refuse_fork(struct rv_error *err);

/* Makes the device's context current. After 0, rv_cuda_leave must follow; after an error nothing has changed. */
int rv_cuda_enter(struct rv_cuda_device *device, struct rv_cuda_scope *scope, struct rv_error *err);
void rv_cuda_leave(struct rv_cuda_device *device, const struct rv_cuda_scope *scope);

/* Fills *err for a failed call ("cuMemCreate") and remembers the number. Returns the negative errno of its kind. */
int rv_cuda_failed(const struct rv_cuda *cuda, CUresult result, const char *call, struct rv_error *err);

/* The same for want of `size` bytes of memory: says the size. */
int rv_cuda_failed_of(const struct rv_cuda *cuda, CUresult result, const char *call, uint64_t size,
                      struct rv_error *err);

/* Like rv_error_set for a refusal of our own: no CUresult is remembered. */
int rv_cuda_refused(struct rv_error *err, int err_number, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* True for errors after which every further call in this context fails the same way. */
bool rv_cuda_is_sticky(CUresult result);

/* Calls a function that may start the driver's threads, with signals blocked: the threads inherit the mask, and shall
 * not be chosen for signals of this process. */
CUresult rv_cuda_start_quietly(CUresult (*start)(void *argument), void *argument);

/* Where no device is seen: the remedy says so if CUDA_VISIBLE_DEVICES may hide it. */
void rv_cuda_remedy_of_visible(struct rv_error *err);

/* Forgets or sets what rv_cuda_last_error answers. */
void rv_cuda_remember(CUresult result);

/* The functions of a backend that this driver lacks: 0, or -EOPNOTSUPP with the first one's name. */
int rv_cuda_need_vmm(const struct rv_cuda *cuda, struct rv_error *err);
int rv_cuda_need_ipc(const struct rv_cuda *cuda, struct rv_error *err);

/* The minimum granularity of VMM memory with fd handles; a value that makes no sense is an error. */
int rv_cuda_granularity(const struct rv_cuda *cuda, CUdevice_v1 device, uint32_t *ret_bytes, struct rv_error *err);

/* Memory on that device that can be exported as a descriptor. */
CUmemAllocationProp_v1 rv_cuda_vmm_properties(CUdevice_v1 device);

/* A stream for one call. _give takes it back; broken = it is destroyed, not kept. */
int rv_cuda_stream_take(struct rv_cuda_device *device, CUstream *ret_stream, struct rv_error *err);
void rv_cuda_stream_give(struct rv_cuda_device *device, CUstream stream, bool broken);

#endif
