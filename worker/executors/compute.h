/*
 * The arithmetic on weights, where it is not done by the CPU: what an executor sets as run->compute. All memory in the
 * arguments is ordinary memory, but that of weights, which lies where the lease says.
 *
 * Each function does what its namesake on the CPU does, with progress and cancelling, and returns 0 or a negative errno
 * with err filled.
 */
#ifndef RV_EXECUTOR_COMPUTE_H
#define RV_EXECUTOR_COMPUTE_H

#include "decoder.h"
#include "stack.h"

struct rv_compute {
    /* rv_weight_multiply */
    int (*multiply)(struct rv_run *run, const struct rv_weight *weight, const float *x, uint32_t count, float alpha,
                    float beta, float *out);
    /* rv_weight_rows, into out */
    int (*rows)(struct rv_run *run, const struct rv_weight *weight, uint32_t first, uint32_t count, float *out);
    /* rv_stack_apply */
    int (*stack)(struct rv_run *run, const struct rv_stack *stack, float *x, uint32_t rows);
    /* rv_convolve */
    int (*convolve)(struct rv_run *run, const struct rv_convolution *convolution, const float *in, uint32_t height,
                    uint32_t width, bool relu, float *out);
    /* For the fault write-weights: flips the highest bit of every byte data[i x stride + first], while that is <
     * length.
     */
    int (*flip)(struct rv_run *run, void *data, uint64_t length, uint64_t first, uint64_t stride);
};

#endif
