/*
 * Weights in place: finding a tensor with its shape checked, and multiplying by it.
 *
 * Nothing of a model is copied as a whole: F32 is used where it lies, BF16 and F16 are converted a panel of rows at a
 * time into run->panel. Names and data belong to the lease.
 */
#ifndef RV_EXECUTOR_WEIGHTS_H
#define RV_EXECUTOR_WEIGHTS_H

#include "run.h"

#define RV_PANEL_FLOATS (1u << 19)  /* 2 MiB: fits beside the rest into a second-level cache */
#define RV_DIMENSION_MAX (1u << 18) /* of one dimension; a row always fits into the panel */

struct rv_weight {
    enum rv_dtype dtype;
    uint32_t rows;    /* outermost dimension */
    uint32_t columns; /* product of the others */
    const void *data;
};

/* What a tensor's shape must be; 0 = any size in that place. */
struct rv_shape {
    uint32_t rank;
    uint64_t size[4];
};
#define RV_SHAPE(rank, ...) (&(struct rv_shape){(rank), {__VA_ARGS__}})

/* A lease with the name of its model, for messages. */
struct rv_model {
    const struct rv_lease *lease;
    const char *name;
};

/*
 * Finds a tensor by its formatted name and checks dtype and shape. -ENOENT = absent; -EBADMSG = another shape or dtype;
 * both with err filled: model, tensor, what is expected, what is there.
 */
int rv_weight_find(const struct rv_model *model, const struct rv_shape *shape, struct rv_failure *err,
                   struct rv_weight *ret_weight, const char *name, ...) __attribute__((format(printf, 5, 6)));

/* True if the model has a tensor of that formatted name. */
bool rv_model_has(const struct rv_model *model, const char *name, ...) __attribute__((format(printf, 2, 3)));

/*
 * out[count][rows] = beta * out + alpha * x[count][columns] * transposed(weight). beta 0 ignores what out holds.
 * 0, -ECANCELED or -ENOMEM with err filled.
 */
int rv_weight_multiply(struct rv_run *run, const struct rv_weight *weight, const float *x, uint32_t count, float alpha,
                       float beta, float *out);

/*
 * `count` rows from `first` as floats: in place for F32, else converted into run->panel (count x columns must fit).
 * NULL = no memory, with err filled.
 */
const float *rv_weight_rows(struct rv_run *run, const struct rv_weight *weight, uint32_t first, uint32_t count);

#endif
