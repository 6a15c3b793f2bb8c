/*
 * What one thread of each kernel computes, as functions that the CPU's compiler takes too: the arithmetic is tested
 * without a GPU (tests/unit/test_cuda_compute.c), and only the launches are left to a machine that has one.
 *
 * Sums run in one order, one float at a time. The matrix library of the CPU adds in another, so results differ in last
 * bits and are compared with a tolerance.
 */
#ifndef RV_EXECUTOR_CUDA_ELEMENTS_H
#define RV_EXECUTOR_CUDA_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define RV_ELEMENT static __device__ __forceinline__
#else
#define RV_ELEMENT static inline
#endif

#define RV_ELEMENT_NORM_FLOOR 1e-12f      /* as stack.c */
#define RV_ELEMENT_HALF_TO_FLOAT 0x1p112f /* as numbers.c */

/* A matrix of a model where it lies. dtype: RV_F32, RV_BF16 or RV_F16 of resvisor.h. */
struct rv_cuda_matrix {
    const void *data;
    int dtype;
    uint32_t rows, columns;
};

/* in[inputs][height][width] -> out[outputs][height][width] */
struct rv_cuda_convolution {
    struct rv_cuda_matrix weight; /* [outputs][inputs x kernel_height x kernel_width] */
    struct rv_cuda_matrix bias;   /* data NULL = none */
    uint32_t inputs, outputs, kernel_height, kernel_width;
    uint32_t height, width;
    int relu;
};

enum { RV_CUDA_F32, RV_CUDA_BF16, RV_CUDA_F16 };

RV_ELEMENT float rv_element_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

RV_ELEMENT uint32_t rv_element_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

RV_ELEMENT float rv_element_half(uint16_t half)
{
    uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
    float value = rv_element_float((uint32_t)(half & 0x7fffu) << 13) * RV_ELEMENT_HALF_TO_FLOAT;

    return rv_element_float(rv_element_bits(value) | special | (uint32_t)(half & 0x8000u) << 16);
}

RV_ELEMENT float rv_element_weight(const struct rv_cuda_matrix *m, uint64_t i)
{
    if (m->dtype == RV_CUDA_F32)
        return ((const float *)m->data)[i];
    if (m->dtype == RV_CUDA_BF16)
        return rv_element_float((uint32_t)((const uint16_t *)m->data)[i] << 16);
    return rv_element_half(((const uint16_t *)m->data)[i]);
}

/* out[i][row] = beta * out[i][row] + alpha * x[i] . weight[row] */
RV_ELEMENT void rv_element_product(const struct rv_cuda_matrix *m, const float *x, uint32_t i, uint32_t row,
                                   float alpha, float beta, float *out)
{
    const float *line = x + (uint64_t)i * m->columns;
    uint64_t start = (uint64_t)row * m->columns, place = (uint64_t)i * m->rows + row;
    float sum = 0;
    uint32_t k;

    for (k = 0; k < m->columns; k++)
        sum += line[k] * rv_element_weight(m, start + k);
    out[place] = alpha * sum + (beta != 0 ? beta * out[place] : 0);
}

/* One row of x to a mean square of 1. */
RV_ELEMENT void rv_element_normalise(float *out, const float *x, uint32_t row, uint32_t width)
{
    float squares = 0, scale;
    uint32_t i;

    x += (uint64_t)row * width;
    out += (uint64_t)row * width;
    for (i = 0; i < width; i++)
        squares += x[i] * x[i];
    scale = 1 / sqrtf(squares / (float)width + RV_ELEMENT_NORM_FLOOR);
    for (i = 0; i < width; i++)
        out[i] = x[i] * scale;
}

RV_ELEMENT float rv_element_activate(float x)
{
    return x * (0.5f + 0.5f * x / (1 + fabsf(x)));
}

RV_ELEMENT uint32_t rv_element_clamp(int64_t index, uint32_t size)
{
    return index < 0 ? 0 : index >= (int64_t)size ? size - 1 : (uint32_t)index;
}

/* One value of the output; beyond the edge lies the edge's value. */
RV_ELEMENT float rv_element_convolve(const struct rv_cuda_convolution *c, const float *in, uint32_t output, uint32_t y,
                                     uint32_t x)
{
    uint64_t weight = (uint64_t)output * c->weight.columns;
    float sum = 0;
    uint32_t channel, ky, kx;

    for (channel = 0; channel < c->inputs; channel++) {
        for (ky = 0; ky < c->kernel_height; ky++) {
            uint32_t line = rv_element_clamp((int64_t)y + ky - c->kernel_height / 2, c->height);
            const float *values = in + ((uint64_t)channel * c->height + line) * c->width;

            for (kx = 0; kx < c->kernel_width; kx++, weight++)
                sum += values[rv_element_clamp((int64_t)x + kx - c->kernel_width / 2, c->width)] *
                       rv_element_weight(&c->weight, weight);
        }
    }
    sum += c->bias.data ? rv_element_weight(&c->bias, output) : 0;
    return c->relu && sum < 0 ? 0 : sum;
}

#endif
