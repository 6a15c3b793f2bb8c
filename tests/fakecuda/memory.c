/* Physical memory (memfds), device addresses (PROT_NONE), what is mapped where, and moving bytes. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

struct host_block {
    void *address;
    uint64_t size;
    struct CUctx_st *context;
    struct host_block *next;
};

static struct fake_range *ranges; /* in the order of their addresses */
static struct host_block *pinned;

/* ---- physical memory -------------------------------------------------------------------------------------------- */

static uint64_t gpu_limit(unsigned gpu)
{
    const struct fake_gpu *facts = &fake_config()->gpus[gpu];
    return facts->total < facts->oom_at ? facts->total : facts->oom_at;
}

CUresult fake_memory_create(unsigned gpu, uint64_t size, enum fake_kind kind, struct fake_memory **ret_memory)
{
    static uint64_t serial;
    struct fake_memory *memory = calloc(1, sizeof(*memory));
    if (memory == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *memory = (struct fake_memory){.refs = 1, .fd = -1, .ledger = -1, .kind = kind, .gpu = gpu, .size = size};
    memory->exporter = -1;
    memory->token = (uint64_t)getpid() << 32 | (uint32_t)++serial;
    const struct fake_control control = {.magic = FAKE_MAGIC, .token = memory->token};
    if (fake_state_charge(gpu, size, gpu_limit(gpu), kind == FAKE_VMM ? "vmm" : "alloc", &memory->ledger) != 0) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->charged = true;
    memory->fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (memory->fd < 0 || ftruncate(memory->fd, (off_t)(size + FAKE_PAGE)) != 0 ||
        pwrite(memory->fd, &control, sizeof(control), (off_t)size) != (ssize_t)sizeof(control)) {
        fake_memory_unref(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *ret_memory = memory;
    return CUDA_SUCCESS;
}

struct fake_memory *fake_memory_ref(struct fake_memory *memory)
{
    memory->refs++;
    return memory;
}

void fake_memory_unref(struct fake_memory *memory)
{
    if (--memory->refs > 0)
        return;
    const int fds[] = {memory->fd, memory->ledger, memory->exporter};
    for (unsigned i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    if (memory->charged)
        fake_state_uncharge(memory->gpu, memory->size);
    free(memory);
}

void fake_memory_mark_freed(struct fake_memory *memory)
{
    const struct fake_control control = {.magic = FAKE_MAGIC, .token = memory->token, .freed = 1};
    if (pwrite(memory->fd, &control, sizeof(control), (off_t)memory->size) != (ssize_t)sizeof(control))
        abort();
}

bool fake_memory_gone(const struct fake_memory *memory)
{
    struct fake_control control = {0};
    struct pollfd exporter = {.fd = memory->exporter, .events = POLLIN};
    if (memory->exporter < 0)
        return false;
    if (poll(&exporter, 1, 0) != 0)
        return true;
    return pread(memory->fd, &control, sizeof(control), (off_t)memory->size) != (ssize_t)sizeof(control) ||
           control.magic != FAKE_MAGIC || control.freed;
}

/* ---- device addresses ------------------------------------------------------------------------------------------- */

uint64_t fake_address_reserve(uint64_t size, uint64_t alignment, uint64_t hint)
{
    if (alignment < FAKE_GRANULARITY)
        alignment = FAKE_GRANULARITY;
    if (size > UINT64_MAX / 2 || alignment > UINT64_MAX / 4)
        return 0;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint != 0 && hint % alignment == 0) {
        char *at = mmap((void *)(uintptr_t)hint, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != MAP_FAILED)
            return (uintptr_t)at;
    }
    char *block = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (block == MAP_FAILED)
        return 0;
    uint64_t begin = ((uintptr_t)block + alignment - 1) / alignment * alignment, skipped = begin - (uintptr_t)block;
    if (skipped > 0)
        munmap(block, skipped);
    if (alignment > skipped)
        munmap((void *)(uintptr_t)(begin + size), alignment - skipped);
    return begin;
}

void fake_address_free(uint64_t address, uint64_t size)
{
    munmap((void *)(uintptr_t)address, size);
}

struct fake_range *fake_range_add(uint64_t address, uint64_t size, struct fake_memory *memory, uint64_t offset)
{
    struct fake_range **at = &ranges, *range = calloc(1, sizeof(*range));
    if (range == NULL)
        return NULL;
    *range = (struct fake_range){.address = address, .size = size, .memory = memory, .offset = offset};
    while (*at != NULL && (*at)->address < address)
        at = &(*at)->next;
    range->next = *at;
    *at = range;
    return range;
}

void fake_range_remove(struct fake_range *range)
{
    struct fake_range **at = &ranges;
    while (*at != range)
        at = &(*at)->next;
    *at = range->next;
    fake_memory_unref(range->memory);
    free(range);
}

struct fake_range *fake_range_first(uint64_t address)
{
    struct fake_range *range = ranges;
    while (range != NULL && range->address + range->size <= address)
        range = range->next;
    return range;
}

struct fake_range *fake_range_find(uint64_t address)
{
    struct fake_range *range = fake_range_first(address);
    return range != NULL && range->address <= address ? range : NULL;
}

/* Gives a range back; with the last of its memory, the block of addresses too. Nothing is under way on it. */
void fake_range_free(struct fake_range *range)
{
    struct fake_memory *memory = range->memory;
    if (memory->refs == 1) {
        if (memory->kind == FAKE_ALLOC)
            fake_memory_mark_freed(memory);
        fake_address_free(range->address - range->offset, memory->size);
    }
    while (range->opens != NULL) {
        struct fake_open *open = range->opens;
        range->opens = open->next;
        free(open);
    }
    fake_range_remove(range);
}

/* A gap for a small allocation behind range or one of its neighbours in the same memory; 0 = none. */
static uint64_t gap_find(const struct fake_range *range, uint64_t size)
{
    uint64_t block = range->address - range->offset, at = block;
    const struct fake_range *next = fake_range_first(block);
    for (; next != NULL && next->memory == range->memory; next = next->next) {
        if (next->address - at >= size)
            return at;
        at = next->address + (next->size + FAKE_CHUNK - 1) / FAKE_CHUNK * FAKE_CHUNK;
    }
    return block + range->memory->size - at >= size ? at : 0;
}

/* Small allocations of one context lie together in blocks. */
static struct fake_range *small_add(const struct CUctx_st *context, uint64_t size)
{
    for (struct fake_range *range = ranges; range != NULL; range = range->next) {
        if (range->context != context || range->memory->kind != FAKE_ALLOC || !range->memory->small)
            continue;
        uint64_t at = gap_find(range, size);
        uint64_t block = range->address - range->offset;
        struct fake_range *added = at == 0 ? NULL : fake_range_add(at, size, range->memory, at - block);
        if (added != NULL)
            fake_memory_ref(range->memory);
        if (added != NULL)
            return added;
    }
    return NULL;
}

static CUresult block_add(struct CUctx_st *context, uint64_t size, struct fake_range **ret_range)
{
    struct fake_memory *memory = NULL;
    uint64_t rounded = (size + FAKE_GRANULARITY - 1) / FAKE_GRANULARITY * FAKE_GRANULARITY;
    CUresult result = fake_memory_create(context->gpu, rounded, FAKE_ALLOC, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    memory->small = size <= FAKE_SMALL_MAX;
    uint64_t address = fake_address_reserve(rounded, 0, 0);
    *ret_range = address == 0 ? NULL : fake_range_add(address, size, memory, 0);
    if (*ret_range == NULL)
        fake_memory_unref(memory);
    return *ret_range == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* ---- cuMemAlloc, cuMemHostAlloc --------------------------------------------------------------------------------- */

CUresult fake_MemAlloc(CUdeviceptr *pointer, size_t size)
{
    CUresult result = fake_enter(FN_MemAlloc, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    struct CUctx_st *context = fake_current();
    if (pointer == NULL || size == 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (size > gpu_limit(context->gpu))
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    struct fake_range *range = size <= FAKE_SMALL_MAX ? small_add(context, size) : NULL;
    if (range == NULL)
        result = block_add(context, size, &range);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    range->context = context;
    range->access[context->gpu] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    *pointer = range->address;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_MemFree(CUdeviceptr pointer)
{
    CUresult result = fake_enter(FN_MemFree, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_context_drain(fake_current()); /* it waits for the device; cuda.h API synchronisation behaviour */
    struct fake_range *range = fake_range_find(pointer);
    if (range == NULL || range->address != pointer || range->memory->kind != FAKE_ALLOC)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    fake_range_free(range);
    return fake_leave(fake_gpu_health(fake_current()->gpu));
}

CUresult fake_MemHostAlloc(void **pointer, size_t size, unsigned int flags)
{
    CUresult result = fake_enter(FN_MemHostAlloc, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (pointer == NULL || size == 0 || flags > 7)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct host_block *block = calloc(1, sizeof(*block));
    if (block == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    block->size = (size + FAKE_PAGE - 1) / FAKE_PAGE * FAKE_PAGE;
    block->address = mmap(NULL, block->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block->address == MAP_FAILED) {
        free(block);
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    block->context = fake_current();
    block->next = pinned;
    pinned = block;
    *pointer = block->address;
    return fake_leave(CUDA_SUCCESS);
}

static void host_free(struct host_block **at)
{
    struct host_block *block = *at;
    *at = block->next;
    munmap(block->address, block->size);
    free(block);
}

CUresult fake_MemFreeHost(void *pointer)
{
    CUresult result = fake_enter(FN_MemFreeHost, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_context_drain(fake_current());
    struct host_block **at = &pinned;
    while (*at != NULL && (*at)->address != pointer)
        at = &(*at)->next;
    if (pointer == NULL || *at == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    host_free(at);
    return fake_leave(CUDA_SUCCESS);
}

bool fake_host_pinned(const void *host, uint64_t size)
{
    for (const struct host_block *block = pinned; block != NULL; block = block->next) {
        uint64_t at = (uintptr_t)host, begin = (uintptr_t)block->address;
        if (at >= begin && at - begin < block->size)
            return size <= block->size - (at - begin);
    }
    return false;
}

void fake_ranges_of_context_free(struct CUctx_st *context)
{
    for (struct fake_range *range = ranges, *next; range != NULL; range = next) {
        next = range->next;
        if (range->context == context)
            fake_range_free(range);
    }
    for (struct host_block **at = &pinned; *at != NULL;)
        if ((*at)->context == context)
            host_free(at);
        else
            at = &(*at)->next;
}

CUresult fake_MemGetInfo(size_t *free_bytes, size_t *total)
{
    CUresult result = fake_enter(FN_MemGetInfo, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    unsigned gpu = fake_current()->gpu;
    if (free_bytes == NULL || total == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t used = fake_state_used(gpu) + fake_config()->gpus[gpu].cache, limit = gpu_limit(gpu);
    *free_bytes = used < limit ? limit - used : 0;
    *total = fake_config()->gpus[gpu].total;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_PointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    CUresult result = fake_enter(FN_PointerGetAttribute, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    const struct fake_range *range = fake_range_find(pointer);
    bool host = fake_host_pinned((const void *)(uintptr_t)pointer, 1);
    if (data == NULL || (range == NULL && !host))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = host ? 0 : fake_ordinal_of(range->memory->gpu);
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = !host && range->memory->kind == FAKE_ALLOC;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = host ? pointer : range->address;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = host ? 0 : range->size;
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        /* Memory of VMM belongs to no context. */
        *(CUcontext *)data = host ? NULL : range->context;
        result = host || range->context == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        break;
    default:
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    return fake_leave(result);
}
