/*
 * A stack of residual layers, the bulk of every model: x += down(act(up(norm(x)))) / sqrt(layers).
 *
 * Used by the text encoder and the denoiser. The weights stay where they lie; a stack holds only where that is.
 */
#ifndef RV_EXECUTOR_STACK_H
#define RV_EXECUTOR_STACK_H

#include "weights.h"

struct rv_layer {
    struct rv_weight up, down;
};

struct rv_stack {
    struct rv_layer *layers;
    uint32_t count;
    uint32_t width;  /* numbers per row of x */
    uint32_t hidden; /* the widest layer's inside */
};

/* Finds PREFIX.layers.0, 1, 2 … with the given width. At least one is needed. End it by rv_stack_fini. */
int rv_stack_init(struct rv_stack *stack, const struct rv_model *model, const char *prefix, uint32_t width,
                  struct rv_failure *err);
void rv_stack_fini(struct rv_stack *stack);

/* x[rows][width] in place; scratch: rows x (width + hidden) floats. One step of progress per layer. */
int rv_stack_apply(struct rv_run *run, const struct rv_stack *stack, float *x, uint32_t rows, float *scratch);

/* Each row of out is the row of x scaled to a mean square of 1. out may be x. */
void rv_rows_normalise(float *out, const float *x, uint32_t rows, uint32_t width);

#endif
