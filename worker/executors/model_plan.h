/* What resvisor-make-model will write: names, shapes and starting values of all tensors, scaled to a wanted size. */
#ifndef RV_MODEL_PLAN_H
#define RV_MODEL_PLAN_H

#include <stdint.h>

#define RV_PLAN_NAME_MAX 64u

enum rv_plan_fill {
    RV_FILL_UNIFORM, /* uniform, with variance gain^2 / inputs: keeps the size of what passes through */
    RV_FILL_KERNEL,  /* a smoothing kernel for each pair of channels, and a little noise */
    RV_FILL_PATCH,   /* rows of a patch are straight ramps, so that a patch has no edges inside */
    RV_FILL_ZERO,
    RV_FILL_BITS, /* any bits */
};

struct rv_plan_tensor {
    const char *pattern; /* of the name, for numbers[0..2] */
    uint32_t numbers[3];
    uint32_t rank;
    uint32_t fill; /* enum rv_plan_fill */
    float gain;
    uint64_t shape[4];
};

struct rv_plan_request {
    const char *kind;  /* image, video, audio, text-encoder, plain */
    const char *dtype; /* F32, BF16, F16 */
    uint64_t bytes;
    uint64_t tensors; /* 0 = whatever suits */
    uint64_t seed;
};

struct rv_plan {
    struct rv_plan_request request;
    uint32_t element; /* bytes */
    struct rv_plan_tensor *tensors;
    uint64_t count, room;
    uint32_t width, hidden, layers; /* of the stack; 0 for plain */
    uint32_t patch[4];              /* frames, channels, height, width */
};

/* 0; -EINVAL with a message in `problem` (size bytes); -ENOMEM. End it by rv_plan_fini. */
int rv_plan_init(struct rv_plan *plan, const struct rv_plan_request *request, char *problem, unsigned size);
void rv_plan_fini(struct rv_plan *plan);

/* Writes the name; returns name. */
const char *rv_plan_name(const struct rv_plan_tensor *tensor, char name[RV_PLAN_NAME_MAX]);
uint64_t rv_plan_elements(const struct rv_plan_tensor *tensor);

#endif
