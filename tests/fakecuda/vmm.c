/* Virtual memory management: physical memory by handles, addresses by reservations. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fake.h"

struct reservation {
    uint64_t address, size;
    struct reservation *next;
};

struct handle {
    CUmemGenericAllocationHandle number;
    struct fake_memory *memory;
    struct handle *next;
};

/* What travels in an exported descriptor; see fake_export. */
struct parcel {
    uint64_t magic;
    uint8_t uuid[16];
    uint64_t token, size, handle_types;
};

static struct reservation *reservations;
static struct handle *handles;

static bool aligned(uint64_t value)
{
    return value % FAKE_GRANULARITY == 0;
}

static struct handle **handle_find(CUmemGenericAllocationHandle number)
{
    struct handle **at = &handles;
    while (*at != NULL && (*at)->number != number)
        at = &(*at)->next;
    return at;
}

static CUresult handle_add(struct fake_memory *memory, CUmemGenericAllocationHandle *ret_number)
{
    static CUmemGenericAllocationHandle last = 0x7f00;
    struct handle *handle = calloc(1, sizeof(*handle));
    if (handle == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (struct handle){.number = ++last, .memory = memory, .next = handles};
    handles = handle;
    *ret_number = handle->number;
    return CUDA_SUCCESS;
}

/* Is any visible device able? VMM calls without a location fail where none is. */
static bool vmm_somewhere(void)
{
    for (int ordinal = 0; fake_gpu_of(ordinal) >= 0; ordinal++)
        if (fake_gpu_attribute((unsigned)fake_gpu_of(ordinal), CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
            return true;
    return false;
}

static CUresult vmm_enter(enum fake_function function)
{
    CUresult result = fake_enter(function, FAKE_ANYTIME);
    if (result == CUDA_SUCCESS && !vmm_somewhere())
        return fake_leave(CUDA_ERROR_NOT_SUPPORTED);
    return result;
}

/* Checks properties as far as cuMemCreate and the granularity share it. */
static CUresult location_check(const CUmemAllocationProp *prop, unsigned *ret_gpu)
{
    if (prop == NULL || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE; /* host locations are outside of this double */
    int gpu = fake_gpu_of(prop->location.id);
    if (gpu < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!fake_gpu_attribute((unsigned)gpu, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
        return CUDA_ERROR_NOT_SUPPORTED;
    *ret_gpu = (unsigned)gpu;
    return fake_gpu_health(*ret_gpu);
}

CUresult fake_MemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                          CUmemAllocationGranularity_flags option)
{
    unsigned gpu;
    CUresult result = vmm_enter(FN_MemGetAllocationGranularity);
    if (result != CUDA_SUCCESS)
        return result;
    if (granularity == NULL || (unsigned)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    result = location_check(prop, &gpu);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    *granularity = FAKE_GRANULARITY;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_MemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                        unsigned long long flags)
{
    unsigned gpu;
    struct fake_memory *memory = NULL;
    CUresult result = vmm_enter(FN_MemCreate);
    if (result != CUDA_SUCCESS)
        return result;
    if (handle == NULL || size == 0 || !aligned(size) || flags != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    result = location_check(prop, &gpu);
    if (result == CUDA_SUCCESS && (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS && prop->requestedHandleTypes != 0 &&
        (!fake_config()->gpus[gpu].fd_works ||
         !fake_gpu_attribute(gpu, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)))
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS)
        result = fake_memory_create(gpu, size, FAKE_VMM, &memory);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    memory->handle_types = prop->requestedHandleTypes;
    result = handle_add(memory, handle);
    if (result != CUDA_SUCCESS)
        fake_memory_unref(memory);
    return fake_leave(result);
}

CUresult fake_MemRelease(CUmemGenericAllocationHandle number)
{
    CUresult result = vmm_enter(FN_MemRelease);
    if (result != CUDA_SUCCESS)
        return result;
    struct handle **at = handle_find(number), *handle = *at;
    if (handle == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *at = handle->next;
    fake_memory_unref(handle->memory);
    free(handle);
    return fake_leave(CUDA_SUCCESS);
}

/* ---- addresses -------------------------------------------------------------------------------------------------- */

CUresult fake_MemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
                                unsigned long long flags)
{
    CUresult result = vmm_enter(FN_MemAddressReserve);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer == NULL || size == 0 || size % FAKE_PAGE != 0 || flags != 0 || hint % FAKE_PAGE != 0 ||
        (alignment & (alignment - 1)) != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct reservation *reservation = calloc(1, sizeof(*reservation));
    uint64_t address = reservation == NULL ? 0 : fake_address_reserve(size, alignment, hint);
    if (address == 0) {
        free(reservation);
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *reservation = (struct reservation){.address = address, .size = size, .next = reservations};
    reservations = reservation;
    *pointer = address;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_MemAddressFree(CUdeviceptr pointer, size_t size)
{
    CUresult result = vmm_enter(FN_MemAddressFree);
    if (result != CUDA_SUCCESS)
        return result;
    struct reservation **at = &reservations, *reservation;
    while (*at != NULL && (*at)->address != pointer)
        at = &(*at)->next;
    reservation = *at;
    const struct fake_range *mapped = fake_range_first(pointer);
    if (reservation == NULL || reservation->size != size || (mapped != NULL && mapped->address < pointer + size))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *at = reservation->next;
    fake_address_free(pointer, size);
    free(reservation);
    return fake_leave(CUDA_SUCCESS);
}

static bool reserved(uint64_t address, uint64_t size)
{
    for (const struct reservation *at = reservations; at != NULL; at = at->next)
        if (address >= at->address && size <= at->size && address - at->address <= at->size - size)
            return true;
    return false;
}

CUresult fake_MemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle number,
                     unsigned long long flags)
{
    CUresult result = vmm_enter(FN_MemMap);
    if (result != CUDA_SUCCESS)
        return result;
    const struct handle *handle = *handle_find(number);
    const struct fake_range *next = fake_range_first(pointer);
    if (handle == NULL || flags != 0 || offset != 0 || !aligned(pointer) || size != handle->memory->size ||
        !reserved(pointer, size))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (next != NULL && next->address < pointer + size)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    result = fake_gpu_health(handle->memory->gpu);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    if (fake_range_add(pointer, size, handle->memory, 0) == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    fake_memory_ref(handle->memory);
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_MemUnmap(CUdeviceptr pointer, size_t size)
{
    CUresult result = vmm_enter(FN_MemUnmap);
    if (result != CUDA_SUCCESS)
        return result;
    struct fake_range *range = fake_range_find(pointer);
    if (range == NULL || range->address != pointer || range->size != size || range->memory->kind != FAKE_VMM)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    result = fake_gpu_health(range->memory->gpu);
    if (result == CUDA_SUCCESS)
        fake_range_remove(range);
    return fake_leave(result);
}

CUresult fake_MemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    CUresult result = vmm_enter(FN_MemSetAccess);
    if (result != CUDA_SUCCESS)
        return result;
    if (desc == NULL || count == 0 || size == 0 || size > UINT64_MAX - pointer)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_range *first = fake_range_find(pointer), *range = first;
    if (first == NULL || first->address != pointer)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t at = pointer, end = pointer + size;
    for (; at < end; at += range->size, range = range->next)
        if (range == NULL || range->address != at || range->memory->kind != FAKE_VMM || range->size > end - at)
            return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        int gpu = fake_gpu_of(desc[i].location.id);
        if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc[i].flags == 2 || (unsigned)desc[i].flags > 3)
            return fake_leave(CUDA_ERROR_INVALID_VALUE);
        if (gpu < 0 || (unsigned)gpu != first->memory->gpu)
            return fake_leave(CUDA_ERROR_INVALID_DEVICE); /* devices of this double are no peers */
        result = fake_gpu_health((unsigned)gpu);
        if (result != CUDA_SUCCESS)
            return fake_leave(result);
        for (range = first; range != NULL && range->address < end; range = range->next)
            range->access[gpu] = (uint8_t)desc[i].flags;
    }
    return fake_leave(CUDA_SUCCESS);
}

/* ---- sharing ---------------------------------------------------------------------------------------------------- */

/*
 * An exported descriptor is a socket in whose queue the memory's descriptors lie. So it keeps the memory by itself, as
 * the driver's does, and is as opaque: it cannot be read, mapped, resized or sealed. Importers look into the queue
 * without taking anything out.
 */
static CUresult memory_export(const struct fake_memory *memory, int *ret_fd)
{
    int pair[2], fds[2] = {memory->fd, memory->ledger};
    struct parcel parcel = {FAKE_MAGIC, {0}, memory->token, memory->size, memory->handle_types};
    memcpy(parcel.uuid, fake_config()->gpus[memory->gpu].uuid, sizeof(parcel.uuid));
    size_t bytes = memory->ledger >= 0 ? sizeof(fds) : sizeof(fds[0]);
    struct iovec part = {.iov_base = &parcel, .iov_len = sizeof(parcel)};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control};
    message.msg_controllen = CMSG_SPACE(bytes);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(header), fds, bytes);
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    ssize_t sent = sendmsg(pair[1], &message, MSG_NOSIGNAL);
    close(pair[1]);
    if (sent != (ssize_t)sizeof(parcel)) {
        close(pair[0]);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *ret_fd = pair[0];
    return CUDA_SUCCESS;
}

CUresult fake_MemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle number,
                                         CUmemAllocationHandleType type, unsigned long long flags)
{
    CUresult result = vmm_enter(FN_MemExportToShareableHandle);
    if (result != CUDA_SUCCESS)
        return result;
    const struct handle *handle = *handle_find(number);
    if (shareable == NULL || handle == NULL || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(handle->memory->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    result = fake_gpu_health(handle->memory->gpu);
    if (result == CUDA_SUCCESS)
        result = memory_export(handle->memory, shareable);
    return fake_leave(result);
}

/* Looks into an exported descriptor. false = it is none. *ret_memory->gpu is not set. */
static bool parcel_open(int socket, struct parcel *ret_parcel, struct fake_memory *ret_memory)
{
    int fds[2] = {-1, -1};
    struct iovec part = {.iov_base = ret_parcel, .iov_len = sizeof(*ret_parcel)};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    ssize_t length = recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0)
        return false;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
        size_t bytes = header->cmsg_len - CMSG_LEN(0);
        memcpy(fds, CMSG_DATA(header), bytes < sizeof(fds) ? bytes : sizeof(fds));
    }
    if (length == (ssize_t)sizeof(*ret_parcel) && ret_parcel->magic == FAKE_MAGIC && fds[0] >= 0) {
        ret_memory->fd = fds[0];
        ret_memory->ledger = fds[1];
        return true;
    }
    for (unsigned i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return false;
}

CUresult fake_MemImportFromShareableHandle(CUmemGenericAllocationHandle *number, void *shareable,
                                           CUmemAllocationHandleType type)
{
    CUresult result = vmm_enter(FN_MemImportFromShareableHandle);
    if (result != CUDA_SUCCESS)
        return result;
    struct parcel parcel = {0};
    if (number == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_memory *memory = calloc(1, sizeof(*memory));
    if (memory == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *memory = (struct fake_memory){.refs = 1, .fd = -1, .ledger = -1, .kind = FAKE_VMM, .exporter = -1};
    /* The descriptor itself is passed in the pointer: cuda.h, CUmemAllocationHandleType. */
    if (!parcel_open((int)(intptr_t)shareable, &parcel, memory)) {
        free(memory);
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    }
    int gpu = fake_gpu_by_uuid(parcel.uuid);
    memory->size = parcel.size;
    memory->token = parcel.token;
    memory->handle_types = parcel.handle_types;
    if (gpu < 0 || fake_ordinal_of((unsigned)gpu) < 0)
        result = CUDA_ERROR_NOT_SUPPORTED; /* "cannot support the memory described": a device not visible here */
    else if (!fake_config()->gpus[gpu].fd_works)
        result = CUDA_ERROR_NOT_SUPPORTED;
    else
        result = fake_gpu_health((unsigned)gpu);
    memory->gpu = gpu < 0 ? 0 : (unsigned)gpu;
    if (result == CUDA_SUCCESS && fake_config()->gpus[gpu].mortal) {
        memory->exporter = (int)syscall(SYS_pidfd_open, (pid_t)(memory->token >> 32), 0);
        result = memory->exporter < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = handle_add(memory, number);
    if (result != CUDA_SUCCESS)
        fake_memory_unref(memory);
    return fake_leave(result);
}
