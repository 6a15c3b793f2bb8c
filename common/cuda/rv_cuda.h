/*
 * Device memory through the CUDA driver, for the three programs that touch it: resvisor-loader, resvisor-device and
 * libresvisor. The supervisor never calls anything here and never loads libcuda.
 *
 * The driver is found at run time (driver.h); without one, or built with -DRESVISOR_CUDA=OFF, rv_cuda_open says why and
 * everything else is never called. No type of cuda.h is in this header, so that its users build without the Toolkit.
 * Nothing here logs. Errors: code ERROR_DEVICE with call, number and name ("cuMemCreate: 2 CUDA_ERROR_OUT_OF_MEMORY"),
 * ERROR_NO_MEMORY for want of device memory (-ENOMEM), ERROR_DEVICE_LOST for a device that is gone (-ENODEV).
 *
 * Contexts. All work is done in the primary context of the device, which is shared with the runtime (torch, cudart) of
 * the process. Functions that need it current make it so for the calling thread and put back what was current before.
 *
 * Threads. One struct rv_cuda may be used by several threads; one mapping, stream or buffer by one at a time. After
 * fork, the child must not use any of it: functions return -EPERM (rv_cuda_close is fine and does nothing).
 */
#ifndef RV_CUDA_H
#define RV_CUDA_H

#include <stdbool.h>
#include <stdint.h>

#include "error.h"
#include "memory.h"
#include "rv_limits.h"

#define RV_DEVICE_NAME_MAX 256

struct rv_cuda;        /* the driver, opened */
struct rv_cuda_device; /* one device with its primary context retained */
struct rv_cuda_copier; /* pinned buffers and a stream */

/* ---- driver and devices ----------------------------------------------------------------------------------------- */

/*
 * Opens libcuda.so.1 and calls cuInit. -ENOENT = there is no driver library; -ENOSYS = it lacks functions (their names
 * are in err; a driver before 12.0 has no cuGetProcAddress_v2); -ENODEV = cuInit found no device or does not work
 * (err has its error, which is never DEVICE_LOST, and rv_cuda_last_error says NOT_INITIALIZED for what would be sticky
 * in a context); -EOPNOTSUPP = built without CUDA.
 *
 * The driver sees what CUDA_VISIBLE_DEVICES of this process names, in that order, up to its first wrong word; without
 * it, all devices, the fastest first. So an ordinal means nothing to another process: a uuid does. Signals are blocked
 * while the driver starts, for the threads that it may make. Its library stays loaded for good.
 */
int rv_cuda_open(struct rv_cuda **ret_cuda, struct rv_error *err);
void rv_cuda_close(struct rv_cuda *cuda); /* NULL is fine. Devices must be closed before. */

/* CUDA_VERSION's form: 13000 = 13.0. */
int rv_cuda_driver_version(const struct rv_cuda *cuda);

uint32_t rv_cuda_device_count(const struct rv_cuda *cuda); /* at most RV_DEVICES_MAX are looked at */

#define RV_CUDA_ATTRIBUTE_NAME_MAX 48u
struct rv_cuda_attribute {
    uint32_t number;                       /* CUdevice_attribute */
    char name[RV_CUDA_ATTRIBUTE_NAME_MAX]; /* a copy: the struct travels between processes */
    int32_t value;
};
#define RV_CUDA_ATTRIBUTES_MAX 32u

struct rv_cuda_info {
    uint32_t ordinal; /* in this process */
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    char name[RV_DEVICE_NAME_MAX];
    char pci[32];
    uint64_t total_bytes;
    uint32_t major, minor; /* compute capability */
    bool integrated;       /* attribute 18: unified memory */
    bool vmm;              /* 102 */
    bool fd_handles;       /* 103 */
    bool pageable;         /* 88 and 100: it reads the machine's memory through the host's page tables */
    uint32_t granularity;  /* bytes, of VMM with fd handles: the minimum; 0 = unknown */
    struct rv_cuda_attribute attributes[RV_CUDA_ATTRIBUTES_MAX]; /* all that was asked; one that the driver does not
                                                                    know is left out */
    uint32_t attribute_count;
};
/* Facts of device 0 <= ordinal < count. Makes no context. */
int rv_cuda_device_info(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_info *ret_info, struct rv_error *err);

/*
 * The device of that uuid, with its primary context retained. -ENODEV (NO_SUCH_DEVICE) = this process does not see it
 * (CUDA_VISIBLE_DEVICES); -EPERM = after fork.
 */
int rv_cuda_device_open(struct rv_cuda *cuda, const uint8_t uuid[RV_DEVICE_UUID_SIZE],
                        struct rv_cuda_device **ret_device, struct rv_error *err);
/* Releases the context. What is still mapped must have been closed. A context or driver that is gone already (process
 * exit, cuDevicePrimaryCtxReset) is no error. NULL is fine. */
void rv_cuda_device_close(struct rv_cuda_device *device);
uint32_t rv_cuda_device_ordinal(const struct rv_cuda_device *device);

/* 0, or the first sticky error of its context: DEVICE_LOST for 719, 999 and the like. Does not wait for work that is
 * under way in the context, so a fault that the device has not met yet is not seen. */
int rv_cuda_device_check(struct rv_cuda_device *device, struct rv_error *err);

/* The last CUresult that a function of this thread failed with; 0 = none. For DeviceEvent: its receiver takes a sticky
 * error for a broken device. */
int rv_cuda_last_error(void);

/* ---- arenas ----------------------------------------------------------------------------------------------------- */

/* One arena, mapped in this process. */
struct rv_cuda_memory {
    uint64_t address; /* device pointer; 0 = not mapped */
    uint64_t size;    /* bytes, a multiple of the granularity */
    uint32_t backend; /* enum rv_backend_id */
    uint64_t handle;  /* cuda-vmm: CUmemGenericAllocationHandle; 0 = given back */
    bool owned;       /* cuda-ipc: allocated here, not opened */
};

/* Loader: a new cuda-vmm arena, mapped read-write. size is rounded up. *ret_memory and *ret_arena are filled. Without
 * free memory it tries for 3 s, unless the device has not that much at all: the driver gives the memory of a killed
 * process back late. So does rv_cuda_ipc_create. */
int rv_cuda_vmm_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err);

/* Loader: waits for the device, unmaps it and exports a descriptor (O_CLOEXEC, the caller's), which alone keeps the
 * memory from then on. After an error *memory must still be closed. */
int rv_cuda_vmm_export(struct rv_cuda_device *device, struct rv_cuda_memory *memory, struct rv_error *err);

/* Imports and maps. The descriptor stays the caller's. writable: for tests and the self-test only. */
int rv_cuda_vmm_import(struct rv_cuda_device *device, int fd, const struct rv_arena *arena, bool writable,
                       struct rv_cuda_memory *ret_memory, struct rv_error *err);

/* Holder: a new cuda-ipc arena: allocated, with its handle in *ret_arena. */
int rv_cuda_ipc_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err);

/* Opens another process' cuda-ipc arena. Always writable: there is no read-only form. Refused when the driver says that
 * it is smaller than arena->size. */
int rv_cuda_ipc_open(struct rv_cuda_device *device, const struct rv_arena *arena, struct rv_cuda_memory *ret_memory,
                     struct rv_error *err);

/* Unmaps, closes, gives back; waits until the device is done with it. Safe in any order with the end of the context:
 * what is gone already is no error. memory->address is 0 afterwards. */
void rv_cuda_memory_close(struct rv_cuda_device *device, struct rv_cuda_memory *memory);

/* ---- copies ----------------------------------------------------------------------------------------------------- */

/* Waits until done. */
int rv_cuda_read(struct rv_cuda_device *device, void *host, uint64_t address, uint64_t length, struct rv_error *err);
int rv_cuda_write(struct rv_cuda_device *device, uint64_t address, const void *host, uint64_t length,
                  struct rv_error *err);
int rv_cuda_fill(struct rv_cuda_device *device, uint64_t address, uint8_t byte, uint64_t length, struct rv_error *err);

/* Pinned memory that begins at a page, for copiers and for reads past the page cache; NULL = the driver gave none. */
void *rv_cuda_host_alloc(struct rv_cuda_device *device, uint64_t size, struct rv_error *err);
void rv_cuda_host_free(struct rv_cuda_device *device, void *memory);

/*
 * Copies to the device that go on while the caller does other things: one stream, in order. A mark is a place in that
 * order; marks count from 1.
 */
int rv_cuda_copier_create(struct rv_cuda_device *device, struct rv_cuda_copier **ret_copier, struct rv_error *err);
void rv_cuda_copier_destroy(struct rv_cuda_copier *copier); /* waits for what is under way */

/* host must be pinned and unchanged until a later mark is reached. */
int rv_cuda_copier_put(struct rv_cuda_copier *copier, uint64_t address, const void *host, uint64_t length,
                       struct rv_error *err);
int rv_cuda_copier_zero(struct rv_cuda_copier *copier, uint64_t address, uint64_t length, struct rv_error *err);
#define RV_CUDA_MARKS_MAX 16u /* under way at once; one more waits for the oldest */
int rv_cuda_copier_mark(struct rv_cuda_copier *copier, uint64_t *ret_mark, struct rv_error *err);
/* Waits until everything before the mark is done. */
int rv_cuda_copier_wait(struct rv_cuda_copier *copier, uint64_t mark, struct rv_error *err);
/* The last mark that is reached, without waiting; 0 = none. */
uint64_t rv_cuda_copier_reached(struct rv_cuda_copier *copier);

#endif
