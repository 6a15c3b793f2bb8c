/* Built with -DRESVISOR_CUDA=OFF, or without the Toolkit's headers: there is no driver, and so no device to use.
 * Nothing but rv_cuda_open can be reached; the others answer the same, for callers that do not know which build this
 * is. */
#include <errno.h>
#include <stddef.h>

#include "rpc.pb-c.h"
#include "rv_cuda.h"

static int built_without(struct rv_error *err)
{
    rv_error_set(err, EOPNOTSUPP, RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED, "this resvisor was built without CUDA");
    rv_error_remedy(err, "build it with the headers of a CUDA Toolkit, see docs/guide.md");
    return -EOPNOTSUPP;
}

int rv_cuda_open(struct rv_cuda **ret_cuda, struct rv_error *err)
{
    (void)ret_cuda;
    return built_without(err);
}

void rv_cuda_close(struct rv_cuda *cuda)
{
    (void)cuda;
}

int rv_cuda_driver_version(const struct rv_cuda *cuda)
{
    (void)cuda;
    return 0;
}

uint32_t rv_cuda_device_count(const struct rv_cuda *cuda)
{
    (void)cuda;
    return 0;
}

int rv_cuda_device_info(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_info *ret_info, struct rv_error *err)
{
    (void)cuda;
    (void)ordinal;
    (void)ret_info;
    return built_without(err);
}

int rv_cuda_device_open(struct rv_cuda *cuda, const uint8_t uuid[RV_DEVICE_UUID_SIZE],
                        struct rv_cuda_device **ret_device, struct rv_error *err)
{
    (void)cuda;
    (void)uuid;
    (void)ret_device;
    return built_without(err);
}

void rv_cuda_device_close(struct rv_cuda_device *device)
{
    (void)device;
}

uint32_t rv_cuda_device_ordinal(const struct rv_cuda_device *device)
{
    (void)device;
    return 0;
}

int rv_cuda_device_check(struct rv_cuda_device *device, struct rv_error *err)
{
    (void)device;
    return built_without(err);
}

int rv_cuda_last_error(void)
{
    return 0;
}

int rv_cuda_vmm_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err)
{
    (void)device;
    (void)size;
    (void)ret_memory;
    (void)ret_arena;
    return built_without(err);
}

int rv_cuda_vmm_export(struct rv_cuda_device *device, struct rv_cuda_memory *memory, struct rv_error *err)
{
    (void)device;
    (void)memory;
    return built_without(err);
}

int rv_cuda_vmm_import(struct rv_cuda_device *device, int fd, const struct rv_arena *arena, bool writable,
                       struct rv_cuda_memory *ret_memory, struct rv_error *err)
{
    (void)device;
    (void)fd;
    (void)arena;
    (void)writable;
    (void)ret_memory;
    return built_without(err);
}

int rv_cuda_ipc_create(struct rv_cuda_device *device, uint64_t size, struct rv_cuda_memory *ret_memory,
                       struct rv_arena *ret_arena, struct rv_error *err)
{
    (void)device;
    (void)size;
    (void)ret_memory;
    (void)ret_arena;
    return built_without(err);
}

int rv_cuda_ipc_open(struct rv_cuda_device *device, const struct rv_arena *arena, struct rv_cuda_memory *ret_memory,
                     struct rv_error *err)
{
    (void)device;
    (void)arena;
    (void)ret_memory;
    return built_without(err);
}

void rv_cuda_memory_close(struct rv_cuda_device *device, struct rv_cuda_memory *memory)
{
    (void)device;
    (void)memory;
}

int rv_cuda_read(struct rv_cuda_device *device, void *host, uint64_t address, uint64_t length, struct rv_error *err)
{
    (void)device;
    (void)host;
    (void)address;
    (void)length;
    return built_without(err);
}

int rv_cuda_write(struct rv_cuda_device *device, uint64_t address, const void *host, uint64_t length,
                  struct rv_error *err)
{
    (void)device;
    (void)address;
    (void)host;
    (void)length;
    return built_without(err);
}

int rv_cuda_fill(struct rv_cuda_device *device, uint64_t address, uint8_t byte, uint64_t length, struct rv_error *err)
{
    (void)device;
    (void)address;
    (void)byte;
    (void)length;
    return built_without(err);
}

void *rv_cuda_host_alloc(struct rv_cuda_device *device, uint64_t size, struct rv_error *err)
{
    (void)device;
    (void)size;
    (void)built_without(err);
    return NULL;
}

void rv_cuda_host_free(struct rv_cuda_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

int rv_cuda_copier_create(struct rv_cuda_device *device, struct rv_cuda_copier **ret_copier, struct rv_error *err)
{
    (void)device;
    (void)ret_copier;
    return built_without(err);
}

void rv_cuda_copier_destroy(struct rv_cuda_copier *copier)
{
    (void)copier;
}

int rv_cuda_copier_put(struct rv_cuda_copier *copier, uint64_t address, const void *host, uint64_t length,
                       struct rv_error *err)
{
    (void)copier;
    (void)address;
    (void)host;
    (void)length;
    return built_without(err);
}

int rv_cuda_copier_zero(struct rv_cuda_copier *copier, uint64_t address, uint64_t length, struct rv_error *err)
{
    (void)copier;
    (void)address;
    (void)length;
    return built_without(err);
}

int rv_cuda_copier_mark(struct rv_cuda_copier *copier, uint64_t *ret_mark, struct rv_error *err)
{
    (void)copier;
    (void)ret_mark;
    return built_without(err);
}

int rv_cuda_copier_wait(struct rv_cuda_copier *copier, uint64_t mark, struct rv_error *err)
{
    (void)copier;
    (void)mark;
    return built_without(err);
}

uint64_t rv_cuda_copier_reached(struct rv_cuda_copier *copier)
{
    (void)copier;
    return 0;
}
