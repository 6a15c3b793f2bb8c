/*
 * The kernels, as C functions that launch them on the legacy default stream. All pointers are device pointers. They
 * return a cudaError_t of the launch; what the kernel itself meets comes with the next call that waits.
 */
#ifndef RV_EXECUTOR_CUDA_KERNELS_H
#define RV_EXECUTOR_CUDA_KERNELS_H

#include "cuda_elements.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[count][rows] = beta * out + alpha * x[count][columns] * transposed(matrix) */
int rv_cuda_product(const struct rv_cuda_matrix *matrix, const float *x, uint32_t count, float alpha, float beta,
                    float *out);
/* out[i] = element first + i of the matrix */
int rv_cuda_convert(const struct rv_cuda_matrix *matrix, uint64_t first, uint64_t count, float *out);
int rv_cuda_normalise(float *out, const float *x, uint32_t rows, uint32_t width);
int rv_cuda_activate(float *x, uint64_t count);
int rv_cuda_convolve(const struct rv_cuda_convolution *convolution, const float *in, float *out);
/* Flips the highest bit of data[first + i x stride], i < count. */
int rv_cuda_flip(void *data, uint64_t first, uint64_t stride, uint64_t count);

#ifdef __cplusplus
}
#endif
#endif
