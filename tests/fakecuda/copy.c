/* Moving bytes: between a memfd and the host by pread and pwrite, so that no pointer of the device is ever followed. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

#define BOUNCE_BYTES (1u << 20)

static bool pageable(unsigned gpu)
{
    return fake_gpu_attribute(gpu, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) &&
           fake_gpu_attribute(gpu, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
}

CUresult fake_copy_check(const struct CUctx_st *context, uint64_t address, uint64_t length)
{
    if (length > UINT64_MAX - address)
        return CUDA_ERROR_INVALID_VALUE;
    const struct fake_range *range = fake_range_find(address);
    if (range == NULL)
        return fake_host_pinned((void *)(uintptr_t)address, length) || pageable(context->gpu)
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    for (uint64_t end = address + length; address < end; address = range->address + range->size, range = range->next)
        if (range == NULL || range->address > address || range->memory->gpu != context->gpu)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* One piece between a memfd and the host; false = the host's side is not to be read or written. */
static bool move_file(enum fake_way way, int fd, uint64_t offset, void *host, uint64_t length)
{
    for (char *at = host; length > 0;) {
        ssize_t done =
            way == FAKE_TO_DEVICE ? pwrite(fd, at, length, (off_t)offset) : pread(fd, at, length, (off_t)offset);
        if (done <= 0)
            return false;
        at += done;
        offset += (uint64_t)done;
        length -= (uint64_t)done;
    }
    return true;
}

static bool fill_file(int fd, uint64_t offset, uint8_t byte, uint64_t length)
{
    uint64_t size = length < BOUNCE_BYTES ? length : BOUNCE_BYTES;
    char *buffer = malloc(size);
    bool good = buffer != NULL;
    if (good)
        memset(buffer, byte, size);
    for (uint64_t part; good && length > 0; offset += part, length -= part) {
        part = length < size ? length : size;
        good = move_file(FAKE_TO_DEVICE, fd, offset, buffer, part);
    }
    free(buffer);
    return good;
}

/*
 * The device reads or writes the host's memory through the host's page tables: the kernel checks every page for us,
 * because both steps are system calls. device is the address that the device uses.
 */
static bool move_host(enum fake_way way, void *device, void *host, uint8_t byte, uint64_t length)
{
    int scratch = memfd_create("fakecuda-scratch", MFD_CLOEXEC);
    bool good = scratch >= 0;
    for (uint64_t done = 0, part; good && done < length; done += part) {
        part = length - done < BOUNCE_BYTES ? length - done : BOUNCE_BYTES;
        void *from = way == FAKE_TO_HOST ? (char *)device + done : (char *)host + done;
        void *to = way == FAKE_TO_HOST ? (char *)host + done : (char *)device + done;
        good = way == FAKE_SET ? fill_file(scratch, 0, byte, part) : move_file(FAKE_TO_DEVICE, scratch, 0, from, part);
        good = good && move_file(FAKE_TO_HOST, scratch, 0, to, part);
    }
    if (scratch >= 0)
        close(scratch);
    return good;
}

/* The same by the processor, which a driver may prefer where both ends are the host's. */
static void move_by_processor(enum fake_way way, void *device, void *host, uint8_t byte, uint64_t length)
{
    if (way == FAKE_SET)
        memset(device, byte, length);
    else
        memcpy(way == FAKE_TO_HOST ? host : device, way == FAKE_TO_HOST ? device : host, length);
}

/* The piece at address: moved, or the error. The lock is dropped while bytes move. */
static CUresult piece(struct CUctx_st *context, const struct fake_range *range, enum fake_way way, uint64_t address,
                      void *host, uint8_t byte, uint64_t length)
{
    uint8_t access = range->access[context->gpu];
    uint8_t wanted = way == FAKE_TO_HOST ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (access != CU_MEM_ACCESS_FLAGS_PROT_NONE && fake_config()->gpus[context->gpu].writable)
        access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if ((access & wanted) != wanted || fake_memory_gone(range->memory))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    struct fake_memory *memory = fake_memory_ref(range->memory);
    uint64_t offset = range->offset + (address - range->address);
    fake_unlock();
    bool good = way == FAKE_SET ? fill_file(memory->fd, offset, byte, length)
                                : move_file(way, memory->fd, offset, host, length);
    fake_lock();
    fake_memory_unref(memory);
    return good ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult fake_copy(struct CUctx_st *context, enum fake_way way, uint64_t address, void *host, uint8_t byte,
                   uint64_t length)
{
    CUresult result = fake_gpu_health(context->gpu);
    while (result == CUDA_SUCCESS && length > 0) {
        const struct fake_range *range = fake_range_find(address);
        uint64_t part = length;
        if (range != NULL) {
            uint64_t left = range->size - (address - range->address);
            part = length < left ? length : left;
            result = piece(context, range, way, address, host, byte, part);
        } else if (fake_host_pinned((void *)(uintptr_t)address, length) || pageable(context->gpu)) {
            fake_unlock();
            bool good = true;
            if (fake_config()->gpus[context->gpu].processor)
                move_by_processor(way, (void *)(uintptr_t)address, host, byte, length);
            else
                good = move_host(way, (void *)(uintptr_t)address, host, byte, length);
            fake_lock();
            result = good ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
        } else {
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        address += part;
        length -= part;
        host = host == NULL ? NULL : (char *)host + part;
    }
    if (result == CUDA_ERROR_ILLEGAL_ADDRESS && fake_gpu_health(context->gpu) == CUDA_SUCCESS) {
        fake_gpu_poison(context->gpu, result);
        fake_state_xid(context->gpu, 31); /* MMU fault */
    }
    return result;
}
