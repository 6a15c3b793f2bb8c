#include "stack.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compute.h"
#include "rpc.pb-c.h"

#define LAYERS_MAX 65536u
#define LAYERS_FIRST 64u
#define NORM_FLOOR 1e-12f

static int layer_find(const struct rv_model *model, const char *prefix, uint32_t number, uint32_t width,
                      struct rv_failure *err, struct rv_layer *ret_layer)
{
    struct rv_layer layer;
    int r = rv_weight_find(model, RV_SHAPE(2, 0, width), err, &layer.up, "%s.layers.%u.up.weight", prefix, number);

    if (r == 0)
        r = rv_weight_find(model, RV_SHAPE(2, width, layer.up.rows), err, &layer.down, "%s.layers.%u.down.weight",
                           prefix, number);
    if (r == 0)
        *ret_layer = layer;
    return r;
}

static int layers_grow(struct rv_stack *stack, uint32_t *capacity, struct rv_failure *err)
{
    uint32_t wanted = *capacity ? *capacity * 2 : LAYERS_FIRST;
    struct rv_layer *layers = realloc(stack->layers, wanted * sizeof(*layers));

    if (!layers)
        return rv_fail(err, ENOMEM, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for a table of layers");
    stack->layers = layers;
    *capacity = wanted;
    return 0;
}

int rv_stack_init(struct rv_stack *stack, const struct rv_model *model, const char *prefix, uint32_t width,
                  struct rv_failure *err)
{
    uint32_t capacity = 0;
    int r = 0;

    *stack = (struct rv_stack){.width = width};
    while (r == 0 && stack->count < LAYERS_MAX) {
        if (stack->count > 0 && !rv_model_has(model, "%s.layers.%u.up.weight", prefix, stack->count))
            return 0;
        if (stack->count == capacity && (r = layers_grow(stack, &capacity, err)) < 0)
            break;
        r = layer_find(model, prefix, stack->count, width, err, &stack->layers[stack->count]);
        if (r == 0 && stack->layers[stack->count].up.rows > stack->hidden)
            stack->hidden = stack->layers[stack->count].up.rows;
        stack->count += r == 0;
    }
    if (r < 0)
        rv_stack_fini(stack);
    return r;
}

void rv_stack_fini(struct rv_stack *stack)
{
    free(stack->layers);
    *stack = (struct rv_stack){0};
}

void rv_rows_normalise(float *out, const float *x, uint32_t rows, uint32_t width)
{
    uint32_t row, i;

    for (row = 0; row < rows; row++, x += width, out += width) {
        float squares = 0, scale;

        for (i = 0; i < width; i++)
            squares += x[i] * x[i];
        scale = 1 / sqrtf(squares / (float)width + NORM_FLOOR);
        for (i = 0; i < width; i++)
            out[i] = x[i] * scale;
    }
}

/* Smooth, nearly x where x is large, nearly 0 where it is very negative, and cheap: no exponential. */
static void activate(float *x, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        x[i] *= 0.5f + 0.5f * x[i] / (1 + fabsf(x[i]));
}

int rv_stack_apply(struct rv_run *run, const struct rv_stack *stack, float *x, uint32_t rows, float *scratch)
{
    float *normal = scratch, *inside = scratch + (size_t)rows * stack->width;
    float share = 1 / sqrtf((float)stack->count); /* so that the sum of all layers does not grow with their number */
    uint32_t i;
    int r;

    if (run->compute)
        return run->compute->stack(run, stack, x, rows);
    for (i = 0; i < stack->count; i++) {
        const struct rv_layer *layer = &stack->layers[i];

        rv_rows_normalise(normal, x, rows, stack->width);
        if ((r = rv_weight_multiply(run, &layer->up, normal, rows, 1, 0, inside)) < 0)
            return r;
        activate(inside, (size_t)rows * layer->up.rows);
        if ((r = rv_weight_multiply(run, &layer->down, inside, rows, share, 1, x)) < 0)
            return r;
        if ((r = rv_run_advance(run, 1)) < 0)
            return r;
    }
    return 0;
}
