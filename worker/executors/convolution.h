/* One convolution layer by im2col and a matrix product, in strips, so that the unfolded input stays in the cache. */
#ifndef RV_EXECUTOR_CONVOLUTION_H
#define RV_EXECUTOR_CONVOLUTION_H

#include "decoder.h"

/*
 * Finds NAME.weight and NAME.bias (a missing bias is none). outputs 0 = any number up to 256. Kernel sizes are the
 * shape's; a kernel of height 1 has tensors of rank 3.
 */
int rv_convolution_find(struct rv_convolution *convolution, const struct rv_model *model,
                        const struct rv_decoder_shape *shape, uint32_t inputs, uint32_t outputs, struct rv_failure *err,
                        const char *name, ...) __attribute__((format(printf, 7, 8)));

/*
 * in[inputs][height][width] -> out[outputs][height][width], stride 1; beyond the edge lies the edge's value. One step
 * of progress. in and out must not overlap.
 */
int rv_convolve(struct rv_run *run, const struct rv_convolution *convolution, const float *in, uint32_t height,
                uint32_t width, bool relu, float *out);

#endif
