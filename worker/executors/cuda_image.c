/*
 * The image executor on a CUDA device: the same job and nearly the same picture, computed by the CUDA runtime on the
 * pool's memory in place. So it also shows what the runtime makes of memory that libresvisor has imported.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "cuda_compute.h"
#include "image_job.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define DEVICE_CUDA 2 /* of rv_lease_info.device_type */

static int start(void **ret_state, struct rv_failure *err)
{
    struct rv_cuda_state *state = calloc(1, sizeof(*state));

    if (!state)
        return rv_fail(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the executor");
    *ret_state = state;
    return 0;
}

static void stop(void *state)
{
    rv_cuda_state_fini(state);
    free(state);
}

/* Does the runtime take the lease's memory for memory of that device? Unified memory it need not know. */
static int pointer_check(const struct rv_lease *lease, const struct rv_lease_info *info, struct rv_failure *err)
{
    struct cudaPointerAttributes found = {0};
    struct rv_tensor tensor;
    cudaError_t error;

    if (rv_tensor_at(lease, 0, &tensor) < 0 || tensor.length == 0)
        return 0;
    error = cudaPointerGetAttributes(&found, tensor.data);
    if (error != cudaSuccess)
        return rv_fail(err, EIO, ERROR(DEVICE), "cudaPointerGetAttributes: %d %s", (int)error, cudaGetErrorName(error));
    if (found.type == cudaMemoryTypeDevice ? found.device == info->device_id : strcmp(info->backend, "memfd") == 0)
        return 0;
    return rv_fail(err, EIO, ERROR(DEVICE),
                   "model %s: the CUDA runtime says that its memory is of type %d on device %d, not on device %d",
                   info->model, (int)found.type, found.device, (int)info->device_id);
}

/* All models on one device, which becomes the runtime's. */
static int device_choose(const struct rv_execution *execution, struct rv_failure *err)
{
    int32_t device = -1;
    cudaError_t error;
    uint32_t i;
    int r;

    for (i = 0; i < execution->lease_count; i++) {
        struct rv_lease_info info = {.struct_size = sizeof(info)};

        if ((r = rv_lease_get_info(execution->leases[i], &info)) < 0)
            return rv_fail(err, -r, ERROR(INTERNAL), "model %s: no facts of its lease", execution->model_names[i]);
        if (info.device_type != DEVICE_CUDA)
            return rv_fail(err, EINVAL, ERROR(CONFIG),
                           "model %s is on %s, and this executor computes on a CUDA device; set the type's `device`",
                           info.model, info.device);
        if (device >= 0 && device != info.device_id)
            return rv_fail(err, EINVAL, ERROR(CONFIG), "the models of this type are on different devices");
        device = info.device_id;
        if (i == 0 && (error = cudaSetDevice(device)) != cudaSuccess)
            return rv_fail(err, EIO, ERROR(DEVICE), "cudaSetDevice(%d): %d %s", (int)device, (int)error,
                           cudaGetErrorName(error));
        if ((r = pointer_check(execution->leases[i], &info, err)) < 0)
            return r;
    }
    return 0;
}

static int cuda_image_run(struct rv_execution *execution, struct rv_failure *err)
{
    struct rv_cuda_state *state = execution->state;
    int r = device_choose(execution, err);

    state->error = 0;
    if (r == 0)
        r = rv_image_run(execution, &rv_cuda_compute, state, err);
    if (state->error)
        rv_device_report(execution->connection, execution->leases[0], state->error, err->message);
    return r;
}

extern const struct rv_executor resvisor_executor;
__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "cuda-image",
    .version = RV_VERSION,
    .start = start,
    .run = cuda_image_run,
    .stop = stop,
    .flags = RV_EXECUTOR_DEVICE_MEMORY,
};
