#include "weights.h"

#include <cblas.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute.h"
#include "numbers.h"
#include "rpc.pb-c.h"

#define NAME_MAX_BYTES 128
#define SHAPE_TEXT 96
#define CALL_FLOATS (1u << 22)   /* weights per call of the matrix library: a cancel is noticed between two calls */
#define CALL_PRODUCTS (1u << 30) /* multiplications per call: about 20 ms */
#define CALL_ROWS_MIN 16u

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static const char *shape_text(char *buffer, uint32_t rank, const uint64_t *shape)
{
    size_t used = 0;
    uint32_t i;

    used += (size_t)snprintf(buffer, SHAPE_TEXT, "[");
    for (i = 0; i < rank && used < SHAPE_TEXT; i++) {
        const char *comma = i ? ", " : "";

        if (shape[i])
            used += (size_t)snprintf(buffer + used, SHAPE_TEXT - used, "%s%llu", comma, (unsigned long long)shape[i]);
        else
            used += (size_t)snprintf(buffer + used, SHAPE_TEXT - used, "%sany", comma);
    }
    if (used < SHAPE_TEXT)
        (void)snprintf(buffer + used, SHAPE_TEXT - used, "]");
    return buffer;
}

static bool shape_fits(const struct rv_tensor *tensor, const struct rv_shape *shape)
{
    uint64_t columns = 1;
    uint32_t i;

    if (tensor->rank != shape->rank)
        return false;
    for (i = 0; i < shape->rank; i++) {
        if ((shape->size[i] && tensor->shape[i] != shape->size[i]) || tensor->shape[i] == 0 ||
            tensor->shape[i] > RV_DIMENSION_MAX)
            return false;
        columns *= i ? tensor->shape[i] : 1;
        if (columns > RV_DIMENSION_MAX)
            return false;
    }
    return true;
}

static int weight_check(const struct rv_model *model, const struct rv_shape *shape, const struct rv_tensor *tensor,
                        const char *name, struct rv_failure *err)
{
    const char *dtype = rv_dtype_text(tensor->dtype);
    char expected[SHAPE_TEXT], actual[SHAPE_TEXT];

    if (tensor->dtype != RV_F32 && tensor->dtype != RV_BF16 && tensor->dtype != RV_F16)
        return rv_fail(err, EBADMSG, ERROR(MODEL_INVALID), "model %s: tensor %s is %s; F32, BF16 or F16 is needed",
                       model->name, name, dtype ? dtype : "of an unknown dtype");
    if (!shape_fits(tensor, shape))
        return rv_fail(err, EBADMSG, ERROR(MODEL_INVALID),
                       "model %s: tensor %s has shape %s; expected %s with at most %u in a row or column", model->name,
                       name, shape_text(actual, tensor->rank, tensor->shape),
                       shape_text(expected, shape->rank, shape->size), RV_DIMENSION_MAX);
    return 0;
}

int rv_weight_find(const struct rv_model *model, const struct rv_shape *shape, struct rv_failure *err,
                   struct rv_weight *ret_weight, const char *name, ...)
{
    struct rv_tensor tensor;
    char text[NAME_MAX_BYTES], expected[SHAPE_TEXT];
    uint64_t columns = 1;
    va_list arguments;
    uint32_t i;
    int r;

    va_start(arguments, name);
    (void)vsnprintf(text, sizeof(text), name, arguments);
    va_end(arguments);
    r = rv_tensor_find(model->lease, text, &tensor);
    if (r < 0)
        return rv_fail(err, ENOENT, ERROR(MODEL_INVALID), "model %s has no tensor %s; expected one of shape %s",
                       model->name, text, shape_text(expected, shape->rank, shape->size));
    if ((r = weight_check(model, shape, &tensor, text, err)) < 0)
        return r;
    for (i = 1; i < tensor.rank; i++)
        columns *= tensor.shape[i];
    *ret_weight = (struct rv_weight){tensor.dtype, (uint32_t)tensor.shape[0], (uint32_t)columns, tensor.data};
    return 0;
}

bool rv_model_has(const struct rv_model *model, const char *name, ...)
{
    struct rv_tensor tensor;
    char text[NAME_MAX_BYTES];
    va_list arguments;

    va_start(arguments, name);
    (void)vsnprintf(text, sizeof(text), name, arguments);
    va_end(arguments);
    return rv_tensor_find(model->lease, text, &tensor) == 0;
}

const float *rv_weight_rows(struct rv_run *run, const struct rv_weight *weight, uint32_t first, uint32_t count)
{
    size_t start = (size_t)first * weight->columns, length = (size_t)count * weight->columns;

    if (weight->dtype == RV_F32 && !run->compute)
        return (const float *)weight->data + start;
    if (!run->panel && !(run->panel = malloc(RV_PANEL_FLOATS * sizeof(float)))) {
        (void)rv_run_no_memory(run, "converted weights");
        return NULL;
    }
    if (run->compute)
        return run->compute->rows(run, weight, first, count, run->panel) == 0 ? run->panel : NULL;
    if (weight->dtype == RV_BF16)
        rv_floats_from_bf16(run->panel, (const uint16_t *)weight->data + start, length);
    else
        rv_floats_from_f16(run->panel, (const uint16_t *)weight->data + start, length);
    return run->panel;
}

/* Rows of weights for one call of the matrix library. */
static uint32_t rows_per_call(const struct rv_weight *weight, uint32_t count)
{
    uint32_t floats = CALL_PRODUCTS / count < CALL_FLOATS ? CALL_PRODUCTS / count : CALL_FLOATS, rows;

    if (weight->dtype != RV_F32)
        return RV_PANEL_FLOATS / weight->columns;
    rows = floats / weight->columns;
    return rows < CALL_ROWS_MIN ? CALL_ROWS_MIN : rows;
}

int rv_weight_multiply(struct rv_run *run, const struct rv_weight *weight, const float *x, uint32_t count, float alpha,
                       float beta, float *out)
{
    uint32_t limit = rows_per_call(weight, count), first, rows;
    const float *w;
    int r;

    if (run->compute)
        return run->compute->multiply(run, weight, x, count, alpha, beta, out);
    for (first = 0; first < weight->rows; first += rows) {
        rows = weight->rows - first < limit ? weight->rows - first : limit;
        if (!(w = rv_weight_rows(run, weight, first, rows)))
            return -ENOMEM;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)count, (int)rows, (int)weight->columns, alpha, x,
                    (int)weight->columns, w, (int)weight->columns, beta, out + first, (int)weight->rows);
        if ((r = rv_run_advance(run, 0)) < 0)
            return r;
    }
    return 0;
}
