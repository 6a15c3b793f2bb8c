/* Devices: their facts, and their primary contexts. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_private.h"

#define GRANULARITY_MAX (1u << 30) /* bytes; a larger one makes no sense for arenas */

/* What is asked. Numbers, since Toolkit 12.0 has not all of the names. */
static const struct {
    uint32_t number;
    char name[RV_CUDA_ATTRIBUTE_NAME_MAX];
} attributes[] = {
    {75, "compute_capability_major"},
    {76, "compute_capability_minor"},
    {16, "multiprocessor_count"},
    {18, "integrated"},
    {20, "compute_mode"},
    {32, "ecc_enabled"},
    {40, "async_engine_count"},
    {41, "unified_addressing"},
    {88, "pageable_memory_access"},
    {89, "concurrent_managed_access"},
    {99, "host_register_supported"},
    {100, "pageable_memory_access_uses_host_page_tables"},
    {101, "direct_managed_mem_access_from_host"},
    {102, "virtual_memory_management_supported"},
    {103, "handle_type_posix_file_descriptor_supported"},
    {113, "read_only_host_register_supported"},
    {115, "memory_pools_supported"},
    {119, "mempool_supported_handle_types"},
    {124, "dma_buf_supported"},
    {125, "ipc_event_supported"},
    {128, "handle_type_fabric_supported"},
    {130, "numa_config"},
    {131, "numa_id"},
    {133, "mps_enabled"},
    {134, "host_numa_id"},
    {141, "host_numa_virtual_memory_management_supported"},
    {142, "host_numa_memory_pools_supported"},
    {143, "host_numa_multinode_ipc_supported"},
    {144, "host_memory_pools_supported"},
    {145, "host_virtual_memory_management_supported"},
    {146, "host_alloc_dma_buf_supported"},
    {147, "only_partial_host_native_atomic_supported"},
};
#define ATTRIBUTES (sizeof(attributes) / sizeof(attributes[0]))
_Static_assert(ATTRIBUTES <= RV_CUDA_ATTRIBUTES_MAX, "rv_cuda_info holds all that is asked");

static int32_t attribute_of(const struct rv_cuda_info *info, uint32_t number)
{
    for (unsigned i = 0; i < info->attribute_count; i++)
        if (info->attributes[i].number == number)
            return info->attributes[i].value;
    return 0;
}

static int ask_attributes(const struct rv_cuda *cuda, CUdevice_v1 device, struct rv_cuda_info *info,
                          struct rv_error *err)
{
    for (unsigned i = 0; i < ATTRIBUTES; i++) {
        int value = 0;
        CUresult result = cuda->driver.DeviceGetAttribute(&value, (CUdevice_attribute)attributes[i].number, device);

        if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_NOT_SUPPORTED)
            continue; /* newer than this driver */
        if (result != CUDA_SUCCESS)
            return rv_cuda_failed(cuda, result, "cuDeviceGetAttribute", err);
        info->attributes[info->attribute_count] =
            (struct rv_cuda_attribute){.number = attributes[i].number, .value = value};
        (void)snprintf(info->attributes[info->attribute_count++].name, RV_CUDA_ATTRIBUTE_NAME_MAX, "%s",
                       attributes[i].name);
    }
    return 0;
}

CUmemAllocationProp_v1 rv_cuda_vmm_properties(CUdevice_v1 device)
{
    CUmemAllocationProp_v1 properties;

    memset(&properties, 0, sizeof(properties)); /* also its reserved bytes */
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return properties;
}

int rv_cuda_granularity(const struct rv_cuda *cuda, CUdevice_v1 device, uint32_t *ret_bytes, struct rv_error *err)
{
    CUmemAllocationProp_v1 properties = rv_cuda_vmm_properties(device);
    size_t bytes = 0;
    CUresult result;

    result = cuda->driver.MemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS)
        return rv_cuda_failed(cuda, result, "cuMemGetAllocationGranularity", err);
    if (bytes == 0 || bytes > GRANULARITY_MAX || (bytes & (bytes - 1)) != 0)
        return rv_cuda_refused(err, EIO, RV_CUDA_ERROR(DEVICE), "cuMemGetAllocationGranularity gave %zu bytes", bytes);
    *ret_bytes = (uint32_t)bytes;
    return 0;
}

static int ask_names(const struct rv_cuda *cuda, CUdevice_v1 device, struct rv_cuda_info *info, struct rv_error *err)
{
    char text[RV_DEVICE_NAME_MAX] = "";
    const char *call = "cuDeviceGetName";
    CUuuid uuid = {{0}};
    size_t total = 0;
    CUresult result = cuda->driver.DeviceGetName(text, sizeof(text) - 1, device);

    if (result == CUDA_SUCCESS) {
        rv_escape(info->name, sizeof(info->name), text, strlen(text));
        call = "cuDeviceGetUuid";
        result = cuda->driver.DeviceGetUuid(&uuid, device);
    }
    if (result == CUDA_SUCCESS) {
        memcpy(info->uuid, uuid.bytes, sizeof(info->uuid));
        call = "cuDeviceGetPCIBusId";
        memset(text, 0, sizeof(text));
        result = cuda->driver.DeviceGetPCIBusId(text, sizeof(info->pci) - 1, device);
    }
    if (result == CUDA_SUCCESS) {
        rv_escape(info->pci, sizeof(info->pci), text, strlen(text));
        call = "cuDeviceTotalMem";
        result = cuda->driver.DeviceTotalMem(&total, device);
    }
    if (result != CUDA_SUCCESS)
        return rv_cuda_failed(cuda, result, call, err);
    info->total_bytes = total;
    return 0;
}

static int device_of(const struct rv_cuda *cuda, uint32_t ordinal, CUdevice_v1 *ret_device, struct rv_error *err)
{
    CUresult result = CUDA_ERROR_INVALID_DEVICE;

    if (rv_cuda_is_forked(cuda))
        return rv_cuda_refuse_fork(err);
    if (ordinal < cuda->count)
        result = cuda->driver.DeviceGet(ret_device, (int)ordinal);
    return result == CUDA_SUCCESS ? 0 : rv_cuda_failed(cuda, result, "cuDeviceGet", err);
}

int rv_cuda_device_info(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_info *ret_info, struct rv_error *err)
{
    struct rv_cuda_info info = {.ordinal = ordinal};
    bool functions = rv_cuda_need_vmm(cuda, NULL) == 0;
    CUdevice_v1 device;
    int r = device_of(cuda, ordinal, &device, err);

    if (r == 0)
        r = ask_names(cuda, device, &info, err);
    if (r == 0)
        r = ask_attributes(cuda, device, &info, err);
    if (r < 0)
        return r;
    info.major = (uint32_t)attribute_of(&info, 75);
    info.minor = (uint32_t)attribute_of(&info, 76);
    info.integrated = attribute_of(&info, 18) != 0;
    info.vmm = functions && attribute_of(&info, 102) != 0;
    info.fd_handles = functions && attribute_of(&info, 103) != 0;
    info.pageable = attribute_of(&info, 88) != 0 && attribute_of(&info, 100) != 0;
    if (info.vmm && info.fd_handles)
        (void)rv_cuda_granularity(cuda, device, &info.granularity, NULL); /* 0 = unknown */
    *ret_info = info;
    return 0;
}

static int find_device(struct rv_cuda *cuda, const uint8_t uuid[RV_DEVICE_UUID_SIZE], struct rv_cuda_device *device,
                       struct rv_error *err)
{
    CUuuid found;

    for (uint32_t i = 0; i < cuda->count; i++) {
        CUresult result;
        int r = device_of(cuda, i, &device->device, err);

        if (r < 0)
            return r;
        result = cuda->driver.DeviceGetUuid(&found, device->device);
        if (result != CUDA_SUCCESS)
            return rv_cuda_failed(cuda, result, "cuDeviceGetUuid", err);
        if (memcmp(found.bytes, uuid, RV_DEVICE_UUID_SIZE) == 0) {
            device->ordinal = i;
            return 0;
        }
    }
    rv_cuda_refused(err, ENODEV, RV_CUDA_ERROR(NO_SUCH_DEVICE), "this process sees no device %s", device->uuid);
    rv_cuda_remedy_of_visible(err);
    return -ENODEV;
}

static CUresult retain(void *argument)
{
    struct rv_cuda_device *device = argument;

    return device->cuda->driver.DevicePrimaryCtxRetain(&device->context, device->device);
}

int rv_cuda_device_open(struct rv_cuda *cuda, const uint8_t uuid[RV_DEVICE_UUID_SIZE],
                        struct rv_cuda_device **ret_device, struct rv_error *err)
{
    struct rv_cuda_device *device = calloc(1, sizeof(*device));
    size_t total = 0;
    CUresult result;
    int r;

    if (!device)
        return rv_cuda_refused(err, ENOMEM, RV_CUDA_ERROR(NO_MEMORY), "no memory for a device");
    device->cuda = cuda;
    rv_device_uuid_text(uuid, device->uuid);
    r = rv_cuda_is_forked(cuda) ? rv_cuda_refuse_fork(err) : find_device(cuda, uuid, device, err);
    if (r == 0) {
        result = cuda->driver.DeviceTotalMem(&total, device->device);
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed(cuda, result, "cuDeviceTotalMem", err);
    }
    if (r == 0) {
        result = rv_cuda_start_quietly(retain, device);
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed(cuda, result, "cuDevicePrimaryCtxRetain", err);
    }
    if (r < 0) {
        free(device);
        return r;
    }
    device->total_bytes = total;
    *ret_device = device;
    return 0;
}

void rv_cuda_device_close(struct rv_cuda_device *device)
{
    struct rv_cuda_scope scope;
    CUstream spare;

    if (!device)
        return;
    if (!rv_cuda_is_forked(device->cuda)) {
        spare = atomic_exchange(&device->spare, NULL);
        if (spare && rv_cuda_enter(device, &scope, NULL) == 0) {
            (void)device->cuda->driver.StreamDestroy(spare);
            rv_cuda_leave(device, &scope);
        }
        (void)device->cuda->driver.DevicePrimaryCtxRelease(device->device);
    }
    free(device);
}

uint32_t rv_cuda_device_ordinal(const struct rv_cuda_device *device)
{
    return device->ordinal;
}

int rv_cuda_enter(struct rv_cuda_device *device, struct rv_cuda_scope *scope, struct rv_error *err)
{
    const struct rv_cuda *cuda = device->cuda;
    const char *call = "cuCtxGetCurrent";
    CUresult result;

    *scope = (struct rv_cuda_scope){0};
    if (rv_cuda_is_forked(cuda))
        return rv_cuda_refuse_fork(err);
    result = cuda->driver.CtxGetCurrent(&scope->before);
    if (result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT) {
        scope->before = NULL; /* the caller's is gone (cudaDeviceReset): no reason why ours should not work */
        result = CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS && scope->before != device->context) {
        call = "cuCtxSetCurrent";
        result = cuda->driver.CtxSetCurrent(device->context);
        scope->changed = true;
    }
    return result == CUDA_SUCCESS ? 0 : rv_cuda_failed(cuda, result, call, err);
}

void rv_cuda_leave(struct rv_cuda_device *device, const struct rv_cuda_scope *scope)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;

    /* It fails when the caller's context was destroyed. Ours must not stay in its place: it would make the runtime take
     * this device for the thread's, and be left behind when it ends. */
    if (scope->changed && driver->CtxSetCurrent(scope->before) != CUDA_SUCCESS && scope->before)
        (void)driver->CtxSetCurrent(NULL);
}

int rv_cuda_stream_take(struct rv_cuda_device *device, CUstream *ret_stream, struct rv_error *err)
{
    CUstream stream = atomic_exchange(&device->spare, NULL);
    CUresult result;

    if (!stream) { /* not blocking: it does not wait for the legacy stream, which others in this process use */
        result = device->cuda->driver.StreamCreate(&stream, CU_STREAM_NON_BLOCKING);
        if (result != CUDA_SUCCESS)
            return rv_cuda_failed(device->cuda, result, "cuStreamCreate", err);
    }
    *ret_stream = stream;
    return 0;
}

void rv_cuda_stream_give(struct rv_cuda_device *device, CUstream stream, bool broken)
{
    CUstream none = NULL;

    if (broken || !atomic_compare_exchange_strong(&device->spare, &none, stream))
        (void)device->cuda->driver.StreamDestroy(stream);
}

int rv_cuda_device_check(struct rv_cuda_device *device, struct rv_error *err)
{
    const struct rv_cuda_driver *driver = &device->cuda->driver;
    const char *call = "cuStreamQuery";
    size_t free_bytes = 0, total = 0;
    struct rv_cuda_scope scope;
    CUstream stream = NULL;
    CUresult result;
    int r = rv_cuda_enter(device, &scope, err);

    if (r < 0)
        return r;
    /* Neither waits for the work of others in this context, and the second asks the kernel's driver, which notices a
     * device that is off the bus. */
    r = rv_cuda_stream_take(device, &stream, err);
    if (r == 0) {
        result = driver->StreamQuery(stream);
        if (result == CUDA_ERROR_NOT_READY)
            result = CUDA_SUCCESS;
        rv_cuda_stream_give(device, stream, result != CUDA_SUCCESS);
        if (result == CUDA_SUCCESS) {
            call = "cuMemGetInfo";
            result = driver->MemGetInfo(&free_bytes, &total);
        }
        if (result != CUDA_SUCCESS)
            r = rv_cuda_failed(device->cuda, result, call, err);
    }
    rv_cuda_leave(device, &scope);
    return r;
}
