#include "model_plan.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

#define WIDTH_MIN 32u
#define WIDTH_MAX 2048u
#define HIDDEN_MAX (1u << 17)
#define LAYERS_WANTED 8u /* at least, before the width grows */
#define TENSORS_MAX 1000000u
#define HIDDEN_STEP 8u
#define TEXT_HIDDEN 4u /* times the width */

struct kind {
    const char *name;
    uint32_t patch[4]; /* frames, channels, height, width */
    uint32_t stages, outputs, kernel_rank;
    uint32_t channels[RV_DECODER_STAGES_MAX];
    uint32_t blocks[RV_DECODER_STAGES_MAX];
};

static const struct kind kinds[] = {
    {"image",
     {1, RV_PICTURE_LATENTS, RV_PICTURE_PATCH, RV_PICTURE_PATCH},
     RV_PICTURE_STAGES,
     3,
     2,
     {64, 48, 32, 16},
     {2, 2, 1, 1}},
    {"video",
     {RV_VIDEO_PATCH_FRAMES, RV_PICTURE_LATENTS, RV_PICTURE_PATCH, RV_PICTURE_PATCH},
     RV_PICTURE_STAGES,
     3,
     2,
     {64, 48, 32, 16},
     {2, 2, 1, 1}},
    {"audio",
     {1, RV_SOUND_LATENTS, 1, RV_SOUND_PATCH},
     RV_SOUND_STAGES,
     RV_SOUND_PARTIALS,
     1,
     {64, 48, 32, 16, 8},
     {2, 2, 1, 1, 1}},
};

static const struct {
    const char *name;
    uint32_t bytes;
} dtypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}};

const char *rv_plan_name(const struct rv_plan_tensor *tensor, char name[RV_PLAN_NAME_MAX])
{
    (void)snprintf(name, RV_PLAN_NAME_MAX, tensor->pattern, tensor->numbers[0], tensor->numbers[1], tensor->numbers[2]);
    return name;
}

uint64_t rv_plan_elements(const struct rv_plan_tensor *tensor)
{
    uint64_t elements = 1;
    uint32_t i;

    for (i = 0; i < tensor->rank; i++)
        elements *= tensor->shape[i];
    return elements;
}

static uint64_t plan_bytes(const struct rv_plan *plan)
{
    uint64_t elements = 0, i;

    for (i = 0; i < plan->count; i++)
        elements += rv_plan_elements(&plan->tensors[i]);
    return elements * plan->element;
}

static int add(struct rv_plan *plan, struct rv_plan_tensor tensor)
{
    uint64_t room = plan->room ? plan->room * 2 : 256;
    struct rv_plan_tensor *tensors;

    if (plan->count == plan->room) {
        tensors = realloc(plan->tensors, room * sizeof(*tensors));
        if (!tensors)
            return -ENOMEM;
        plan->tensors = tensors;
        plan->room = room;
    }
    plan->tensors[plan->count++] = tensor;
    return 0;
}

static int add_matrix(struct rv_plan *plan, const char *pattern, uint32_t number, uint32_t fill, float gain,
                      uint64_t rows, uint64_t columns)
{
    return add(plan, (struct rv_plan_tensor){pattern, {number, 0, 0}, 2, fill, gain, {rows, columns, 0, 0}});
}

/* A convolution's weight and bias. */
static int add_convolution(struct rv_plan *plan, const struct kind *kind, const char *weight, const char *bias,
                           const uint32_t numbers[3], float gain, uint32_t outputs, uint32_t inputs)
{
    struct rv_plan_tensor tensor = {
        weight, {numbers[0], numbers[1], numbers[2]}, kind->kernel_rank + 2, RV_FILL_KERNEL, gain, {outputs, inputs}};
    int r;

    tensor.shape[2] = kind->kernel_rank == 1 ? RV_SOUND_KERNEL : RV_PICTURE_KERNEL;
    tensor.shape[3] = RV_PICTURE_KERNEL;
    if ((r = add(plan, tensor)) < 0 || !bias)
        return r;
    tensor = (struct rv_plan_tensor){bias, {numbers[0], numbers[1], numbers[2]}, 1, RV_FILL_ZERO, 0, {outputs}};
    return add(plan, tensor);
}

static int add_decoder(struct rv_plan *plan, const struct kind *kind)
{
    const uint32_t none[3] = {0};
    uint32_t stage, block, i;
    int r = add_convolution(plan, kind, "decoder.input.weight", "decoder.input.bias", none, 1.4f, kind->channels[0],
                            kind->patch[1]);

    for (stage = 0; r == 0 && stage < kind->stages; stage++) {
        uint32_t channels = kind->channels[stage];

        for (block = 0; r == 0 && block < kind->blocks[stage]; block++) {
            for (i = 0; r == 0 && i < RV_DECODER_CONVS; i++) {
                const uint32_t numbers[3] = {stage, block, i};

                r = add_convolution(plan, kind, "decoder.stages.%u.blocks.%u.%u.weight",
                                    "decoder.stages.%u.blocks.%u.%u.bias", numbers, 1.2f, channels, channels);
            }
        }
        if (r == 0 && stage + 1 < kind->stages) {
            const uint32_t numbers[3] = {stage, 0, 0};

            r = add_convolution(plan, kind, "decoder.stages.%u.up.weight", NULL, numbers, 1, kind->channels[stage + 1],
                                channels);
        }
    }
    if (r == 0)
        r = add_convolution(plan, kind, "decoder.output.weight", "decoder.output.bias", none, 1, kind->outputs,
                            kind->channels[kind->stages - 1]);
    return r;
}

static int add_layers(struct rv_plan *plan, const char *up, const char *down)
{
    uint32_t i;
    int r = 0;

    for (i = 0; r == 0 && i < plan->layers; i++) {
        r = add_matrix(plan, up, i, RV_FILL_UNIFORM, 1.4f, plan->hidden, plan->width);
        if (r == 0)
            r = add_matrix(plan, down, i, RV_FILL_UNIFORM, 1.4f, plan->width, plan->hidden);
    }
    return r;
}

/* Everything but the layers, for plan->width. */
static int add_type_fixed(struct rv_plan *plan, const struct kind *kind)
{
    uint32_t patch = kind->patch[0] * kind->patch[1] * kind->patch[2] * kind->patch[3];
    uint32_t features = patch + RV_POSITION_FEATURES + RV_TIME_FEATURES;
    int r = add_matrix(plan, "denoiser.input.weight", 0, RV_FILL_UNIFORM, 1, plan->width, features);

    memcpy(plan->patch, kind->patch, sizeof(plan->patch));
    if (r == 0)
        r = add_matrix(plan, "denoiser.condition.weight", 0, RV_FILL_UNIFORM, 1, plan->width, RV_TEXT_WIDTH);
    if (r == 0)
        r = add_matrix(plan, "denoiser.output.weight", 0, RV_FILL_PATCH, 1, patch, plan->width);
    return r == 0 ? add_decoder(plan, kind) : r;
}

static int add_text_fixed(struct rv_plan *plan)
{
    return add_matrix(plan, "text.embedding.weight", 0, RV_FILL_UNIFORM, sqrtf(RV_TEXT_WIDTH), RV_TEXT_ROWS,
                      RV_TEXT_WIDTH);
}

static int add_fixed(struct rv_plan *plan, const struct kind *kind)
{
    plan->count = 0;
    return kind ? add_type_fixed(plan, kind) : add_text_fixed(plan);
}

/* The widest power of two that leaves room for the wanted layers, each 8 x width^2 numbers. */
static uint32_t width_choose(const struct rv_plan *plan)
{
    uint64_t layers = plan->request.tensors ? plan->request.tensors / 2 : LAYERS_WANTED;
    uint32_t width = WIDTH_MAX;

    while (width > WIDTH_MIN && layers * 8 * width * width * plan->element > plan->request.bytes)
        width /= 2;
    return width;
}

static int stack_scale(struct rv_plan *plan, const struct kind *kind, char *problem, unsigned size)
{
    uint64_t wanted = plan->request.bytes, fixed, rest, layer, least;
    int r;

    plan->width = kind ? width_choose(plan) : RV_TEXT_WIDTH;
    if ((r = add_fixed(plan, kind)) < 0)
        return r;
    fixed = plan_bytes(plan);
    layer = (uint64_t)8 * plan->width * plan->width * plan->element;
    rest = wanted > fixed ? wanted - fixed : 0;
    plan->layers = (uint32_t)((rest + layer / 2) / layer);
    if (plan->request.tensors)
        plan->layers = plan->request.tensors > plan->count ? (uint32_t)(plan->request.tensors - plan->count) / 2 : 1;
    plan->layers = plan->layers ? plan->layers : 1;
    layer = (uint64_t)2 * plan->width * plan->element * plan->layers; /* bytes per hidden unit */
    plan->hidden = rest / layer < HIDDEN_MAX ? (uint32_t)(rest / layer) / HIDDEN_STEP * HIDDEN_STEP : HIDDEN_MAX;
    least = fixed + layer * HIDDEN_STEP;
    if (plan->hidden == 0) {
        (void)snprintf(problem, size, "%llu bytes are too few for %u layers; at least %llu bytes are needed",
                       (unsigned long long)wanted, plan->layers, (unsigned long long)least);
        return -EINVAL;
    }
    return kind ? add_layers(plan, "denoiser.layers.%u.up.weight", "denoiser.layers.%u.down.weight")
                : add_layers(plan, "text.layers.%u.up.weight", "text.layers.%u.down.weight");
}

static int plain_scale(struct rv_plan *plan, char *problem, unsigned size)
{
    uint64_t i, count = plan->request.tensors ? plan->request.tensors : 1000;
    uint64_t elements = plan->request.bytes / count / plan->element;
    int r = 0;

    if (elements == 0) {
        (void)snprintf(problem, size, "%llu bytes are too few for %llu tensors",
                       (unsigned long long)plan->request.bytes, (unsigned long long)count);
        return -EINVAL;
    }
    for (i = 0; r == 0 && i < count; i++)
        r = add(plan, (struct rv_plan_tensor){"t%u", {(uint32_t)i, 0, 0}, 1, RV_FILL_BITS, 0, {elements, 0, 0, 0}});
    return r;
}

int rv_plan_init(struct rv_plan *plan, const struct rv_plan_request *request, char *problem, unsigned size)
{
    const struct kind *kind = NULL;
    unsigned i;

    *plan = (struct rv_plan){.request = *request};
    for (i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        if (strcmp(request->dtype, dtypes[i].name) == 0)
            plan->element = dtypes[i].bytes;
    }
    if (!plan->element) {
        (void)snprintf(problem, size, "unknown dtype %s; allowed are F32, BF16 and F16", request->dtype);
        return -EINVAL;
    }
    if (request->tensors > TENSORS_MAX) {
        (void)snprintf(problem, size, "at most %u tensors can be written", TENSORS_MAX);
        return -EINVAL;
    }
    if (strcmp(request->kind, "plain") == 0)
        return plain_scale(plan, problem, size);
    for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(request->kind, kinds[i].name) == 0)
            kind = &kinds[i];
    }
    if (!kind && strcmp(request->kind, "text-encoder") != 0) {
        (void)snprintf(problem, size, "unknown kind %s; allowed are image, video, audio, text-encoder and plain",
                       request->kind);
        return -EINVAL;
    }
    return stack_scale(plan, kind, problem, size);
}

void rv_plan_fini(struct rv_plan *plan)
{
    free(plan->tensors);
    plan->tensors = NULL;
}
