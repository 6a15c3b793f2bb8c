/* Holders: one process for each device of backend cuda-ipc, which keeps the memory that others import. */
#include <errno.h>

#include "devices.h"
#include "devices_private.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

int rv_holder_allocate(struct rv_supervisor *s, int device, uint64_t size, rv_holder_reply *reply, void *context,
                       struct rv_error *err)
{
    (void)size;
    (void)reply;
    (void)context;
    if (device < 0 || (uint32_t)device >= s->state.device_count ||
        s->state.devices[device].backend != RV_BACKEND_CUDA_IPC)
        return rv_error_set(err, ENODEV, ERROR(NO_SUCH_DEVICE), "no device of that number has backend cuda-ipc");
    return rv_error_set(err, ENODEV, ERROR(DEVICE), "%s has no holder", s->state.devices[device].name);
}

void rv_holder_forget(struct rv_supervisor *s, void *context)
{
    (void)s;
    (void)context;
}

void rv_holder_free(struct rv_supervisor *s, int device, uint64_t holder, uint64_t allocation)
{
    (void)s;
    (void)device;
    (void)holder;
    (void)allocation;
}
