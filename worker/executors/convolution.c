#include "convolution.h"

#include <cblas.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute.h"
#include "rpc.pb-c.h"

#define NAME_BYTES 96
#define CHANNELS_MAX 256u
#define STRIP_FLOATS (1u << 18) /* of unfolded input: 1 MiB */
#define STRIP_PIXELS_MIN 64u

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

int rv_convolution_find(struct rv_convolution *convolution, const struct rv_model *model,
                        const struct rv_decoder_shape *shape, uint32_t inputs, uint32_t outputs, struct rv_failure *err,
                        const char *name, ...)
{
    struct rv_shape expected = {4, {outputs, inputs, shape->kernel_height, shape->kernel_width}};
    char text[NAME_BYTES];
    va_list arguments;
    int r;

    va_start(arguments, name);
    (void)vsnprintf(text, sizeof(text), name, arguments);
    va_end(arguments);
    if (shape->kernel_height == 1)
        expected = (struct rv_shape){3, {outputs, inputs, shape->kernel_width, 0}};
    *convolution = (struct rv_convolution){0};
    if ((r = rv_weight_find(model, &expected, err, &convolution->weight, "%s.weight", text)) < 0)
        return r;
    if (convolution->weight.rows > CHANNELS_MAX ||
        (uint64_t)convolution->weight.rows * convolution->weight.columns > RV_PANEL_FLOATS)
        return rv_fail(err, EBADMSG, ERROR(MODEL_INVALID),
                       "model %s: tensor %s.weight has %u channels; at most %u and "
                       "%u numbers in all are supported",
                       model->name, text, convolution->weight.rows, CHANNELS_MAX, RV_PANEL_FLOATS);
    convolution->inputs = inputs;
    convolution->outputs = convolution->weight.rows;
    convolution->kernel_height = shape->kernel_height;
    convolution->kernel_width = shape->kernel_width;
    if (!rv_model_has(model, "%s.bias", text))
        return 0;
    return rv_weight_find(model, RV_SHAPE(1, convolution->outputs), err, &convolution->bias, "%s.bias", text);
}

struct window {
    uint32_t y, rows, x, columns; /* of the output */
};

static uint32_t clamp_index(int64_t index, uint32_t size)
{
    return index < 0 ? 0 : index >= size ? size - 1 : (uint32_t)index;
}

/* One row of the unfolded input: line shifted by `shift`, the edge repeated. */
static void line_shift(float *out, const float *line, uint32_t width, const struct window *w, int64_t shift)
{
    uint32_t i;

    for (i = 0; i < w->columns && (int64_t)w->x + i + shift < 0; i++)
        out[i] = line[0];
    for (; i < w->columns && (int64_t)w->x + i + shift < width; i++)
        out[i] = line[(int64_t)w->x + i + shift];
    for (; i < w->columns; i++)
        out[i] = line[width - 1];
}

/* unfolded[inputs x kernel][rows x columns of the window] */
static void unfold(const struct rv_convolution *c, const float *in, uint32_t height, uint32_t width,
                   const struct window *w, float *unfolded)
{
    uint32_t channel, ky, kx, y;

    for (channel = 0; channel < c->inputs; channel++) {
        const float *plane = in + (size_t)channel * height * width;

        for (ky = 0; ky < c->kernel_height; ky++) {
            for (kx = 0; kx < c->kernel_width; kx++) {
                for (y = w->y; y < w->y + w->rows; y++) {
                    uint32_t line = clamp_index((int64_t)y + ky - c->kernel_height / 2, height);

                    line_shift(unfolded, plane + (size_t)line * width, width, w, (int64_t)kx - c->kernel_width / 2);
                    unfolded += w->columns;
                }
            }
        }
    }
}

static void finish(const struct rv_convolution *c, const float *bias, bool relu, size_t plane, float *out)
{
    uint32_t channel;
    size_t i;

    for (channel = 0; channel < c->outputs; channel++, out += plane) {
        float add = bias ? bias[channel] : 0;

        for (i = 0; i < plane; i++) {
            float value = out[i] + add;

            out[i] = relu && value < 0 ? 0 : value;
        }
    }
}

/* The strip that starts at row y, column x: whole rows, or a part of one row where rows are long. */
static struct window window_at(const struct rv_convolution *c, uint32_t height, uint32_t width, uint32_t y, uint32_t x)
{
    uint32_t pixels = STRIP_FLOATS / c->weight.columns;
    struct window w = {.y = y, .rows = 1, .x = x};

    pixels = pixels < STRIP_PIXELS_MIN ? STRIP_PIXELS_MIN : pixels;
    w.columns = width - x < pixels ? width - x : pixels;
    if (pixels >= width) {
        w.rows = pixels / width;
        w.rows = height - y < w.rows ? height - y : w.rows;
    }
    return w;
}

int rv_convolve(struct rv_run *run, const struct rv_convolution *c, const float *in, uint32_t height, uint32_t width,
                bool relu, float *out)
{
    size_t plane = (size_t)height * width, pixels = STRIP_FLOATS / c->weight.columns + STRIP_PIXELS_MIN;
    const float *weight, *bias = NULL;
    float *unfolded;
    struct window w = {0};
    int r = 0;

    if (run->compute)
        return run->compute->convolve(run, c, in, height, width, relu, out);
    if (!(unfolded = malloc(pixels * c->weight.columns * sizeof(float)))) {
        r = rv_run_no_memory(run, "a convolution");
        goto out;
    }
    if (!(weight = rv_weight_rows(run, &c->weight, 0, c->outputs))) {
        r = -ENOMEM;
        goto out;
    }
    while (w.y < height) {
        w = window_at(c, height, width, w.y, w.x);
        unfold(c, in, height, width, &w, unfolded);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)c->outputs, (int)(w.rows * w.columns),
                    (int)c->weight.columns, 1, weight, (int)c->weight.columns, unfolded, (int)(w.rows * w.columns), 0,
                    out + (size_t)w.y * width + w.x, (int)plane);
        w.x = (w.x + w.columns) % width;
        w.y += w.x == 0 ? w.rows : 0;
        if ((r = rv_run_advance(run, 0)) < 0)
            goto out;
    }
    if (c->bias.data && !(bias = rv_weight_rows(run, &c->bias, 0, c->outputs))) {
        r = -ENOMEM;
        goto out;
    }
    finish(c, bias, relu, plane, out);
    r = rv_run_advance(run, 1);
out:
    free(unfolded);
    return r;
}
