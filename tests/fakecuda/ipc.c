/* Legacy inter-process memory: a 64-byte handle names the exporting process and its memory. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fake.h"

struct ipc_handle {
    uint64_t magic;
    uint8_t uuid[16];
    uint64_t token;
    uint64_t size;    /* of the whole block */
    uint64_t offset;  /* of the allocation in it */
    uint64_t started; /* of the process, in ticks: a number used anew is another process */
    int32_t pid;
    int32_t fd;
};
_Static_assert(sizeof(struct ipc_handle) <= CU_IPC_HANDLE_SIZE, "fits the driver's handle");

/* Field 22 of /proc/PID/stat; 0 = no such process. */
static uint64_t process_start(pid_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    const char *at = strrchr(text, ')');
    for (unsigned field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

CUresult fake_IpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    CUresult result = fake_enter(FN_IpcGetMemHandle, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    const struct fake_range *range = fake_range_find(pointer);
    if (!fake_config()->gpus[fake_current()->gpu].ipc_memory)
        return fake_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (handle == NULL || range == NULL || range->address != pointer || range->memory->kind != FAKE_ALLOC)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    const struct fake_memory *memory = range->memory;
    struct ipc_handle filled = {.magic = FAKE_MAGIC, .token = memory->token, .size = memory->size};
    memcpy(filled.uuid, fake_config()->gpus[memory->gpu].uuid, sizeof(filled.uuid));
    filled.offset = range->offset;
    filled.pid = getpid();
    filled.started = process_start(filled.pid);
    filled.fd = memory->fd;
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &filled, sizeof(filled));
    return fake_leave(CUDA_SUCCESS);
}

static CUresult memory_open(const struct ipc_handle *handle, unsigned gpu, struct fake_memory **ret_memory)
{
    char path[64];
    struct fake_control control = {0};
    struct fake_memory *memory = calloc(1, sizeof(*memory));
    if (memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *memory = (struct fake_memory){.refs = 1, .ledger = -1, .kind = FAKE_IPC, .gpu = gpu, .size = handle->size};
    memory->token = handle->token;
    memory->exporter = (int)syscall(SYS_pidfd_open, handle->pid, 0);
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
    memory->fd = memory->exporter < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (memory->fd < 0 || process_start(handle->pid) != handle->started || fake_memory_gone(memory) ||
        pread(memory->fd, &control, sizeof(control), (off_t)memory->size) != (ssize_t)sizeof(control) ||
        control.token != handle->token) {
        fake_memory_unref(memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *ret_memory = memory;
    return CUDA_SUCCESS;
}

/* Opens of one handle in one context share an address. */
static struct fake_range *range_opened(const struct CUctx_st *context, uint64_t token)
{
    struct fake_range *range = fake_range_first(0);
    while (range != NULL &&
           (range->memory->kind != FAKE_IPC || range->memory->token != token || range->context != context))
        range = range->next;
    return range;
}

static CUresult open_new(struct CUctx_st *context, const struct ipc_handle *handle, struct fake_range **ret_range)
{
    struct fake_memory *memory = NULL;
    CUresult result = memory_open(handle, context->gpu, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t address = fake_address_reserve(memory->size, 0, 0);
    struct fake_range *range = address == 0 ? NULL : fake_range_add(address, memory->size, memory, 0);
    if (range == NULL) {
        fake_memory_unref(memory);
        return CUDA_ERROR_MAP_FAILED;
    }
    range->context = context;
    range->access[context->gpu] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    *ret_range = range;
    return CUDA_SUCCESS;
}

static bool open_count(struct fake_range *range, uint64_t address)
{
    struct fake_open *open = range->opens;
    while (open != NULL && open->address != address)
        open = open->next;
    if (open == NULL) {
        open = calloc(1, sizeof(*open));
        if (open == NULL)
            return false;
        *open = (struct fake_open){.address = address, .next = range->opens};
        range->opens = open;
    }
    open->count++;
    return true;
}

CUresult fake_IpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle opaque, unsigned int flags)
{
    struct ipc_handle handle;
    CUresult result = fake_enter(FN_IpcOpenMemHandle, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    struct CUctx_st *context = fake_current();
    memcpy(&handle, &opaque, sizeof(handle));
    if (pointer == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != FAKE_MAGIC)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (!fake_config()->gpus[context->gpu].ipc_memory)
        return fake_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (handle.pid == getpid())
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (fake_gpu_by_uuid(handle.uuid) != (int)context->gpu)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_range *range = range_opened(context, handle.token);
    if (range == NULL)
        result = open_new(context, &handle, &range);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    if (handle.offset >= range->size || !open_count(range, range->address + handle.offset))
        return fake_leave(CUDA_ERROR_MAP_FAILED);
    *pointer = range->address + handle.offset;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_IpcCloseMemHandle(CUdeviceptr pointer)
{
    CUresult result = fake_enter(FN_IpcCloseMemHandle, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_context_drain(fake_current());
    struct fake_range *range = fake_range_find(pointer);
    if (range == NULL || range->memory->kind != FAKE_IPC)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct fake_open **at = &range->opens, *open;
    while (*at != NULL && (*at)->address != pointer)
        at = &(*at)->next;
    open = *at;
    if (open == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (--open->count == 0) {
        *at = open->next;
        free(open);
    }
    if (range->opens == NULL)
        fake_range_free(range);
    return fake_leave(fake_gpu_health(fake_current()->gpu));
}
