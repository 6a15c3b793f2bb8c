#include "cuda_compute.h"

#include <errno.h>
#include <math.h>

#include <cuda_runtime_api.h>

#include "cuda_kernels.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

enum { IN, OUT, INSIDE };

/* 0, or a negative errno with err filled. */
static int check(struct rv_run *run, int error, const char *what)
{
    struct rv_cuda_state *state = run->device;

    if (error == (int)cudaSuccess)
        return 0;
    if (error == (int)cudaErrorMemoryAllocation)
        return rv_fail(run->err, ENOMEM, ERROR(NO_MEMORY), "no memory of the device for %s", what);
    state->error = state->error ? state->error : error;
    return rv_fail(run->err, EIO, ERROR(DEVICE), "%s: %d %s", what, error, cudaGetErrorName((cudaError_t)error));
}

/* Waits for what is under way: an error of a kernel is seen here. */
static int wait(struct rv_run *run, const char *what)
{
    return check(run, (int)cudaStreamSynchronize(cudaStreamLegacy), what);
}

static int reserve(struct rv_run *run, int which, size_t floats, float **ret_buffer)
{
    struct rv_cuda_state *state = run->device;
    size_t size = floats * sizeof(float);
    int r;

    if (state->buffers[which].size < size) {
        (void)cudaFree(state->buffers[which].data);
        state->buffers[which].data = NULL;
        state->buffers[which].size = 0;
        if ((r = check(run, (int)cudaMalloc(&state->buffers[which].data, size), "a buffer")) < 0)
            return r;
        state->buffers[which].size = size;
    }
    *ret_buffer = state->buffers[which].data;
    return 0;
}

static int up(struct rv_run *run, int which, const float *from, size_t floats, float **ret_buffer)
{
    int r = reserve(run, which, floats, ret_buffer);

    if (r == 0 && from)
        r = check(run, (int)cudaMemcpy(*ret_buffer, from, floats * sizeof(float), cudaMemcpyHostToDevice),
                  "a copy to the device");
    return r;
}

static int down(struct rv_run *run, float *to, const float *from, size_t floats, const char *what)
{
    return check(run, (int)cudaMemcpy(to, from, floats * sizeof(float), cudaMemcpyDeviceToHost), what);
}

static struct rv_cuda_matrix matrix_of(const struct rv_weight *weight)
{
    int dtype = weight->dtype == RV_F32 ? RV_CUDA_F32 : weight->dtype == RV_BF16 ? RV_CUDA_BF16 : RV_CUDA_F16;

    return (struct rv_cuda_matrix){weight->data, dtype, weight->rows, weight->columns};
}

static int multiply(struct rv_run *run, const struct rv_weight *weight, const float *x, uint32_t count, float alpha,
                    float beta, float *out)
{
    struct rv_cuda_matrix matrix = matrix_of(weight);
    size_t results = (size_t)count * weight->rows;
    float *in, *product;
    int r;

    if ((r = up(run, IN, x, (size_t)count * weight->columns, &in)) < 0 ||
        (r = up(run, OUT, beta != 0 ? out : NULL, results, &product)) < 0 ||
        (r = check(run, rv_cuda_product(&matrix, in, count, alpha, beta, product), "a matrix product")) < 0 ||
        (r = down(run, out, product, results, "a matrix product")) < 0)
        return r;
    return rv_run_advance(run, 0);
}

static int rows(struct rv_run *run, const struct rv_weight *weight, uint32_t first, uint32_t count, float *out)
{
    struct rv_cuda_matrix matrix = matrix_of(weight);
    uint64_t floats = (uint64_t)count * weight->columns;
    float *converted;
    int r;

    if ((r = reserve(run, OUT, floats, &converted)) < 0 ||
        (r = check(run, rv_cuda_convert(&matrix, (uint64_t)first * weight->columns, floats, converted),
                   "rows of a weight")) < 0)
        return r;
    return down(run, out, converted, floats, "rows of a weight");
}

static int layer_apply(struct rv_run *run, const struct rv_layer *layer, float *x, uint32_t count, float share,
                       float *normal, float *inside)
{
    struct rv_cuda_matrix rise = matrix_of(&layer->up), fall = matrix_of(&layer->down);
    int error = rv_cuda_normalise(normal, x, count, rise.columns);

    if (error == 0)
        error = rv_cuda_product(&rise, normal, count, 1, 0, inside);
    if (error == 0)
        error = rv_cuda_activate(inside, (uint64_t)count * rise.rows);
    if (error == 0)
        error = rv_cuda_product(&fall, inside, count, share, 1, x);
    return check(run, error, "a layer");
}

static int stack_apply(struct rv_run *run, const struct rv_stack *stack, float *x, uint32_t count)
{
    size_t floats = (size_t)count * stack->width;
    float share = 1 / sqrtf((float)stack->count); /* as rv_stack_apply */
    float *there, *normal, *inside;
    uint32_t i;
    int r;

    if ((r = up(run, IN, x, floats, &there)) < 0 || (r = reserve(run, OUT, floats, &normal)) < 0 ||
        (r = reserve(run, INSIDE, (size_t)count * stack->hidden, &inside)) < 0)
        return r;
    for (i = 0; i < stack->count; i++) {
        if ((r = layer_apply(run, &stack->layers[i], there, count, share, normal, inside)) < 0 ||
            (r = wait(run, "a layer")) < 0 || (r = rv_run_advance(run, 1)) < 0)
            return r;
    }
    return down(run, x, there, floats, "a layer");
}

static int convolve(struct rv_run *run, const struct rv_convolution *c, const float *in, uint32_t height,
                    uint32_t width, bool relu, float *out)
{
    struct rv_cuda_convolution order = {
        .weight = matrix_of(&c->weight),
        .bias = matrix_of(&c->bias),
        .inputs = c->inputs,
        .outputs = c->outputs,
        .kernel_height = c->kernel_height,
        .kernel_width = c->kernel_width,
        .height = height,
        .width = width,
        .relu = relu,
    };
    size_t plane = (size_t)height * width;
    float *from, *to;
    int r;

    if ((r = up(run, IN, in, plane * c->inputs, &from)) < 0 || (r = reserve(run, OUT, plane * c->outputs, &to)) < 0 ||
        (r = check(run, rv_cuda_convolve(&order, from, to), "a convolution")) < 0 ||
        (r = down(run, out, to, plane * c->outputs, "a convolution")) < 0)
        return r;
    return rv_run_advance(run, 1);
}

static int flip(struct rv_run *run, void *data, uint64_t length, uint64_t first, uint64_t stride)
{
    uint64_t count = first < length ? (length - first + stride - 1) / stride : 0;
    int r = count ? check(run, rv_cuda_flip(data, first, stride, count), "a store to weights") : 0;

    return r < 0 ? r : wait(run, "a store to weights");
}

const struct rv_compute rv_cuda_compute = {multiply, rows, stack_apply, convolve, flip};

void rv_cuda_state_fini(struct rv_cuda_state *state)
{
    uint32_t i;

    for (i = 0; i < RV_CUDA_BUFFERS; i++)
        (void)cudaFree(state->buffers[i].data);
    *state = (struct rv_cuda_state){0};
}
