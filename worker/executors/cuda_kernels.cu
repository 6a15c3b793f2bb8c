/* The kernels and their launches: C, but for what CUDA adds. Each thread makes one element (cuda_elements.h). */
#include "cuda_kernels.h"

#define THREADS 256u
#define TILE_ROWS 8u   /* of the matrix, per block */
#define TILE_COUNT 32u /* rows of x, per block: a warp reads one row of the matrix together */
#define GRID_MAX 65535u

static unsigned blocks_for(uint64_t count, unsigned threads)
{
    uint64_t blocks = (count + threads - 1) / threads;

    return blocks < GRID_MAX ? (unsigned)blocks : GRID_MAX; /* kernels go on in steps of the grid */
}

/* i runs over what this thread makes of `count` elements. */
#define FOR_EACH(i, count)                                                             \
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count); \
         i += (uint64_t)gridDim.x * blockDim.x)

static __global__ void product_kernel(struct rv_cuda_matrix matrix, const float *x, uint32_t count, float alpha,
                                      float beta, float *out)
{
    uint32_t i = blockIdx.y * TILE_COUNT + threadIdx.x;
    uint64_t row = (uint64_t)blockIdx.x * TILE_ROWS + threadIdx.y;

    for (; i < count && row < matrix.rows; row += (uint64_t)gridDim.x * TILE_ROWS)
        rv_element_product(&matrix, x, i, (uint32_t)row, alpha, beta, out);
}

static __global__ void convert_kernel(struct rv_cuda_matrix matrix, uint64_t first, uint64_t count, float *out)
{
    FOR_EACH(i, count)
        out[i] = rv_element_weight(&matrix, first + i);
}

static __global__ void normalise_kernel(float *out, const float *x, uint32_t rows, uint32_t width)
{
    FOR_EACH(row, rows)
        rv_element_normalise(out, x, (uint32_t)row, width);
}

static __global__ void activate_kernel(float *x, uint64_t count)
{
    FOR_EACH(i, count)
        x[i] = rv_element_activate(x[i]);
}

static __global__ void convolve_kernel(struct rv_cuda_convolution c, const float *in, float *out)
{
    uint64_t plane = (uint64_t)c.height * c.width;

    FOR_EACH(i, plane * c.outputs)
        out[i] = rv_element_convolve(&c, in, (uint32_t)(i / plane), (uint32_t)(i % plane / c.width),
                                     (uint32_t)(i % c.width));
}

static __global__ void flip_kernel(uint8_t *data, uint64_t first, uint64_t stride, uint64_t count)
{
    FOR_EACH(i, count)
        data[first + i * stride] ^= 0x80;
}

int rv_cuda_product(const struct rv_cuda_matrix *matrix, const float *x, uint32_t count, float alpha, float beta,
                    float *out)
{
    dim3 grid(blocks_for(matrix->rows, TILE_ROWS), (count + TILE_COUNT - 1) / TILE_COUNT), block(TILE_COUNT, TILE_ROWS);

    if (grid.y > GRID_MAX)
        return (int)cudaErrorInvalidValue;
    product_kernel<<<grid, block>>>(*matrix, x, count, alpha, beta, out);
    return (int)cudaGetLastError();
}

int rv_cuda_convert(const struct rv_cuda_matrix *matrix, uint64_t first, uint64_t count, float *out)
{
    convert_kernel<<<blocks_for(count, THREADS), THREADS>>>(*matrix, first, count, out);
    return (int)cudaGetLastError();
}

int rv_cuda_normalise(float *out, const float *x, uint32_t rows, uint32_t width)
{
    normalise_kernel<<<blocks_for(rows, TILE_COUNT), TILE_COUNT>>>(out, x, rows, width);
    return (int)cudaGetLastError();
}

int rv_cuda_activate(float *x, uint64_t count)
{
    activate_kernel<<<blocks_for(count, THREADS), THREADS>>>(x, count);
    return (int)cudaGetLastError();
}

int rv_cuda_convolve(const struct rv_cuda_convolution *c, const float *in, float *out)
{
    convolve_kernel<<<blocks_for((uint64_t)c->height * c->width * c->outputs, THREADS), THREADS>>>(*c, in, out);
    return (int)cudaGetLastError();
}

int rv_cuda_flip(void *data, uint64_t first, uint64_t stride, uint64_t count)
{
    flip_kernel<<<blocks_for(count, THREADS), THREADS>>>((uint8_t *)data, first, stride, count);
    return (int)cudaGetLastError();
}
