/*
 * The arithmetic of the executors on a CUDA device, by the CUDA runtime, on weights where the pool has them: nothing of
 * a model is copied. What goes in and out of each operation travels; inside a stack of layers it stays on the device.
 */
#ifndef RV_EXECUTOR_CUDA_COMPUTE_H
#define RV_EXECUTOR_CUDA_COMPUTE_H

#include "compute.h"

#define RV_CUDA_BUFFERS 3u

/* run->device of runs with rv_cuda_compute. All zeros to begin with; the worker's one thread uses it. */
struct rv_cuda_state {
    struct {
        void *data;
        size_t size;
    } buffers[RV_CUDA_BUFFERS];
    int error; /* the first cudaError_t of this run that was none of running out of memory */
};

extern const struct rv_compute rv_cuda_compute;

/* Gives the buffers back. */
void rv_cuda_state_fini(struct rv_cuda_state *state);

#endif
