/* Arenas on a device: cuda-vmm and cuda-ipc. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "device_private.h"

/* Arenas are whole blocks of this size, also where the driver's granularity is smaller: the largest page of a device. A
 * smaller cuMemAlloc may be a part of a block that has other allocations in it, which IPC would share too. */
#define BLOCK (2u * 1024 * 1024)

#define MEMORY_WAIT_US (3 * RV_SEC)     /* for memory that a killed process had */
#define MEMORY_TRY_US (50 * RV_MSEC)    /* between two tries */
#define MAPPING_MAX (UINT64_C(1) << 47) /* bytes: more than a process can address */

/* Size of an arena for `size` bytes: whole blocks, also of `granularity` (0 = none). */
static int round_up(uint64_t size, uint64_t granularity, uint64_t *ret_size, struct rv_error *err)
{
    uint64_t block = granularity > BLOCK ? granularity : BLOCK; /* both are powers of two */

    if (size > MAPPING_MAX)
        return rv_cuda_refused(err, EFBIG, RV_CUDA_ERROR(TOO_LARGE), "an arena of %llu bytes is beyond any device",
                               (unsigned long long)size);
    *ret_size = size ? (size + block - 1) / block * block : block;
    return 0;
}

/*
 * Calls `allocate` until it does not fail for want of memory, for a limited time: the driver gives the memory of a
 * process that was killed back some time after its end is reported. At once when more is wanted than the device has.
 */
static CUresult allocate_patiently(const struct rv_cuda_device *device, uint64_t size,
                                   CUresult (*allocate)(const struct rv_cuda_device *device, uint64_t size, void *ret),
                                   void *ret)
{
    uint64_t until = rv_now_us() + MEMORY_WAIT_US;
    CUresult result;

    /* There is no event for "the driver has the memory back", so this polls. */
    while ((result = allocate(device, size, ret)) == CUDA_ERROR_OUT_OF_MEMORY && size <= device->total_bytes &&
           rv_now_us() < until)
        (void)usleep(MEMORY_TRY_US);
    return result;
}

/* Reserves addresses, maps and gives access. On failure nothing is left. */
static int vmm_map(struct rv_cuda_device *device, CUmemGenericAllocationHandle_v1 handle, uint64_t size, bool writable,
                   CUdeviceptr_v2 *ret_address, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    const char *call = "cuMemAddressReserve";
    CUdeviceptr_v2 address = 0;
    CUmemAccessDesc_v1 access;
    bool mapped = false;
    CUresult result;

    memset(&access, 0, sizeof(access));
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device->device;
    access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    result = driver->MemAddressReserve(&address, size, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return rv_cuda_failed_of(device->cuda, result, call, size, err);
    call = "cuMemMap";
    result = driver->MemMap(address, size, 0, handle, 0); /* the offset must be 0 */
    if (result == CUDA_SUCCESS) {
        mapped = true;
        call = "cuMemSetAccess";
        result = driver->MemSetAccess(address, size, &access, 1);
    }
    if (result == CUDA_SUCCESS) {
        *ret_address = address;
        return 0;
    }
    if (mapped)
        (void)driver->MemUnmap(address, size);
    (void)driver->MemAddressFree(address, size);
    return rv_cuda_failed_of(device->cuda, result, call, size, err);
}

static CUresult vmm_allocate(const struct rv_cuda_device *device, uint64_t size, void *ret)
{
    CUmemAllocationProp_v1 properties = rv_cuda_vmm_properties(device->device);

    return device->cuda->driver.MemCreate(ret, size, &properties, 0);
}

int rv_cuda_vmm_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err)
{
    CUmemGenericAllocationHandle_v1 handle = 0;
    CUdeviceptr_v2 address = 0;
    struct rv_cuda_scope scope;
    uint32_t granularity = 0;
    CUresult result;
    int r = rv_cuda_need_vmm(device->cuda, err);

    if (r == 0)
        r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    r = rv_cuda_granularity(device->cuda, device->device, &granularity, err);
    if (r == 0)
        r = round_up(size, granularity, &size, err);
    if (r == 0) {
        result = allocate_patiently(device, size, vmm_allocate, &handle);
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed_of(device->cuda, result, "cuMemCreate", size, err);
    }
    if (r == 0) {
        r = vmm_map(device, handle, size, true, &address, err);
        if (r < 0)
            (void)device->cuda->driver.MemRelease(handle);
    }
    rv_cuda_leave(device, &scope);
    if (r < 0)
        return r;
    *ret_memory = (struct rv_cuda_memory){address, size, RV_BACKEND_CUDA_VMM, handle, true};
    *ret_arena = (struct rv_arena){.size = size, .page_size = granularity, .backend = RV_BACKEND_CUDA_VMM};
    return 0;
}

/* Gives back all that can be given back. The result and the name of the first call that failed. */
static CUresult vmm_unmap(const struct rv_cuda_driver *driver, struct rv_cuda_memory *memory, const char **ret_call)
{
    const char *calls[] = {"cuMemUnmap", "cuMemAddressFree", "cuMemRelease"};
    CUresult results[3] = {CUDA_SUCCESS, CUDA_SUCCESS, CUDA_SUCCESS};
    unsigned i = 0;

    if (memory->address) {
        results[0] = driver->MemUnmap(memory->address, memory->size);
        results[1] = driver->MemAddressFree(memory->address, memory->size);
        memory->address = 0;
    }
    if (memory->handle) {
        results[2] = driver->MemRelease(memory->handle);
        memory->handle = 0;
    }
    while (i < 2 && results[i] == CUDA_SUCCESS)
        i++;
    *ret_call = calls[i];
    return results[i];
}

/* The driver wrote a number; it must be a descriptor of this process, and no child's. */
static int take_descriptor(int fd, struct rv_error *err)
{
    int flags = fd < 0 ? -1 : fcntl(fd, F_GETFD);

    if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
        return rv_cuda_refused(err, EIO, RV_CUDA_ERROR(DEVICE),
                               "cuMemExportToShareableHandle gave %d, which is no descriptor", fd);
    return fd;
}

int rv_cuda_vmm_export(struct rv_cuda_device *device, struct rv_cuda_memory *memory, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    const char *call = "cuCtxSynchronize";
    struct rv_cuda_scope scope;
    CUresult result;
    int fd = -1, r;

    if (memory->backend != RV_BACKEND_CUDA_VMM || memory->handle == 0)
        return rv_cuda_refused(err, EINVAL, RV_CUDA_ERROR(INTERNAL), "only a new cuda-vmm arena can be exported");
    r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    result = driver->MemExportToShareableHandle(&fd, memory->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) {
        r = rv_cuda_failed(device->cuda, result, "cuMemExportToShareableHandle", err);
        goto out;
    }
    r = take_descriptor(fd, err);
    if (r < 0)
        goto out;
    result = driver->CtxSynchronize(); /* a failed copy is found here, before anybody reads the arena */
    if (result == CUDA_SUCCESS)        /* it would not be read-only for others while it is mapped here */
        result = vmm_unmap(driver, memory, &call);
    if (result != CUDA_SUCCESS) {
        r = rv_cuda_failed(device->cuda, result, call, err);
        (void)close(fd);
        goto out;
    }
    r = fd;
out:
    rv_cuda_leave(device, &scope);
    return r;
}

int rv_cuda_vmm_import(struct rv_cuda_device *device, int fd, const struct rv_arena *arena, bool writable,
                       struct rv_cuda_memory *ret_memory, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    CUmemGenericAllocationHandle_v1 handle = 0;
    CUdeviceptr_v2 address = 0;
    struct rv_cuda_scope scope;
    CUresult result;
    int r = rv_cuda_need_vmm(device->cuda, err);

    if (r < 0)
        return r;
    if (arena->backend != RV_BACKEND_CUDA_VMM || arena->size == 0 || arena->size > MAPPING_MAX ||
        arena->size % BLOCK != 0 || fd < 0)
        return rv_cuda_refused(err, EINVAL, RV_CUDA_ERROR(INTERNAL), "an arena of %llu bytes that is no cuda-vmm arena",
                               (unsigned long long)arena->size);
    r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    result =
        driver->MemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) {
        r = rv_cuda_failed(device->cuda, result, "cuMemImportFromShareableHandle", err);
    } else {
        r = vmm_map(device, handle, arena->size, writable, &address, err);
        (void)driver->MemRelease(handle); /* the mapping keeps the memory */
    }
    rv_cuda_leave(device, &scope);
    if (r < 0)
        return r;
    *ret_memory = (struct rv_cuda_memory){address, arena->size, RV_BACKEND_CUDA_VMM, 0, false};
    return 0;
}

static CUresult ipc_allocate(const struct rv_cuda_device *device, uint64_t size, void *ret)
{
    return device->cuda->driver.MemAlloc(ret, size);
}

int rv_cuda_ipc_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    CUipcMemHandle_v1 handle;
    CUdeviceptr_v2 address = 0;
    struct rv_cuda_scope scope;
    CUresult result;
    int r = rv_cuda_need_ipc(device->cuda, err);

    if (r == 0)
        r = round_up(size, 0, &size, err);
    if (r == 0)
        r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    result = allocate_patiently(device, size, ipc_allocate, &address);
    if (result != CUDA_SUCCESS) {
        r = rv_cuda_failed_of(device->cuda, result, "cuMemAlloc", size, err);
    } else {
        result = driver->IpcGetMemHandle(&handle, address);
        if (result != CUDA_SUCCESS) {
            (void)driver->MemFree(address);
            r = rv_cuda_failed(device->cuda, result, "cuIpcGetMemHandle", err);
        }
    }
    rv_cuda_leave(device, &scope);
    if (r < 0)
        return r;
    *ret_memory = (struct rv_cuda_memory){address, size, RV_BACKEND_CUDA_IPC, 0, true};
    *ret_arena = (struct rv_arena){.size = size, .page_size = BLOCK, .backend = RV_BACKEND_CUDA_IPC};
    _Static_assert(sizeof(handle) == RV_IPC_HANDLE_SIZE, "a handle fits into an arena's description");
    memcpy(ret_arena->handle, &handle, sizeof(handle));
    return 0;
}

/* A handle says nothing of the size. The driver knows it of what it has opened; one that does not say is believed. */
static int ipc_check_size(const struct rv_cuda *cuda, CUdeviceptr_v2 address, uint64_t size, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &cuda->driver;
    CUdeviceptr_v2 start = 0;
    size_t range = 0;

    if (!driver->PointerGetAttribute ||
        driver->PointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) != CUDA_SUCCESS ||
        driver->PointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address) != CUDA_SUCCESS || range == 0)
        return 0;
    if (start > address || address - start > range || size > range - (address - start))
        return rv_cuda_refused(err, EINVAL, RV_CUDA_ERROR(INTERNAL),
                               "an opened arena has %zu bytes from its start, not %llu", range,
                               (unsigned long long)size);
    return 0;
}

int rv_cuda_ipc_open(struct rv_cuda_device *device, const struct rv_arena *arena, struct rv_cuda_memory *ret_memory,
                     struct rv_error *err)
{
    CUipcMemHandle_v1 handle;
    CUdeviceptr_v2 address = 0;
    struct rv_cuda_scope scope;
    CUresult result;
    int r = rv_cuda_need_ipc(device->cuda, err);

    if (r < 0)
        return r;
    if (arena->backend != RV_BACKEND_CUDA_IPC || arena->size == 0)
        return rv_cuda_refused(err, EINVAL, RV_CUDA_ERROR(INTERNAL), "an arena of %llu bytes that is no cuda-ipc arena",
                               (unsigned long long)arena->size);
    r = rv_cuda_enter(device, &scope, err);
    if (r < 0)
        return r;
    memcpy(&handle, arena->handle, sizeof(handle));
    /* The only flag there is, and it must be given. */
    result = device->cuda->driver.IpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result != CUDA_SUCCESS) {
        r = rv_cuda_failed_of(device->cuda, result, "cuIpcOpenMemHandle", arena->size, err);
    } else {
        r = ipc_check_size(device->cuda, address, arena->size, err);
        if (r < 0)
            (void)device->cuda->driver.IpcCloseMemHandle(address);
    }
    rv_cuda_leave(device, &scope);
    if (r < 0)
        return r;
    *ret_memory = (struct rv_cuda_memory){address, arena->size, RV_BACKEND_CUDA_IPC, 0, false};
    return 0;
}

static void ipc_unmap(const struct rv_cuda_driver *driver, struct rv_cuda_memory *memory)
{
    if (memory->address)
        (void)(memory->owned ? driver->MemFree : driver->IpcCloseMemHandle)(memory->address);
}

void rv_cuda_memory_close(struct rv_cuda_device *device, struct rv_cuda_memory *memory)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    struct rv_cuda_scope scope;
    int last = rv_cuda_last_error();
    const char *call;

    if ((memory->address || memory->handle) && !rv_cuda_is_forked(device->cuda)) {
        bool entered = rv_cuda_enter(device, &scope, NULL) == 0;

        /* Errors mean that the context, or the driver at the end of the process, is gone, and the mapping with it. VMM
         * mappings are the process' own, so they are ended also then. */
        if (entered)
            (void)driver->CtxSynchronize();
        if (memory->backend == RV_BACKEND_CUDA_VMM)
            (void)vmm_unmap(driver, memory, &call);
        else if (entered)
            ipc_unmap(driver, memory);
        if (entered)
            rv_cuda_leave(device, &scope);
    }
    rv_cuda_remember((CUresult)last); /* nothing that failed here is a failure of the caller's */
    memory->address = 0;
    memory->handle = 0;
}
