#include "decoder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "numbers.h"
#include "rpc.pb-c.h"

const struct rv_decoder_shape rv_picture_decoder = {
    .inputs = RV_PICTURE_LATENTS,
    .outputs = 3,
    .stages = RV_PICTURE_STAGES,
    .enlarge_height = 2,
    .enlarge_width = 2,
    .kernel_height = RV_PICTURE_KERNEL,
    .kernel_width = RV_PICTURE_KERNEL,
};

const struct rv_decoder_shape rv_sound_decoder = {
    .inputs = RV_SOUND_LATENTS,
    .outputs = RV_SOUND_PARTIALS,
    .stages = RV_SOUND_STAGES,
    .enlarge_height = 1,
    .enlarge_width = 4,
    .kernel_height = 1,
    .kernel_width = RV_SOUND_KERNEL,
};

struct planes {
    float *data;
    uint32_t height, width;
};

static int stage_find(struct rv_decoder *decoder, const struct rv_model *model, uint32_t number, uint32_t channels,
                      struct rv_failure *err)
{
    struct rv_stage *stage = &decoder->stages[number];
    const struct rv_decoder_shape *shape = &decoder->shape;
    uint32_t block, i;
    int r;

    stage->channels = channels;
    for (block = 0; block < RV_DECODER_BLOCKS_MAX; block++) {
        if (block > 0 && !rv_model_has(model, "decoder.stages.%u.blocks.%u.0.weight", number, block))
            break;
        for (i = 0; i < RV_DECODER_CONVS; i++) {
            r = rv_convolution_find(&stage->blocks[block].convolutions[i], model, shape, channels, channels, err,
                                    "decoder.stages.%u.blocks.%u.%u", number, block, i);
            if (r < 0)
                return r;
        }
    }
    stage->block_count = block;
    decoder->convolutions += block * RV_DECODER_CONVS;
    if (number + 1 == shape->stages)
        return 0;
    decoder->convolutions++;
    return rv_convolution_find(&stage->up, model, shape, channels, 0, err, "decoder.stages.%u.up", number);
}

int rv_decoder_init(struct rv_decoder *decoder, const struct rv_model *model, const struct rv_decoder_shape *shape,
                    struct rv_failure *err)
{
    uint32_t i, channels;
    int r;

    *decoder = (struct rv_decoder){.shape = *shape, .convolutions = 2};
    if ((r = rv_convolution_find(&decoder->input, model, shape, shape->inputs, 0, err, "decoder.input")) < 0)
        return r;
    channels = decoder->input.outputs;
    for (i = 0; i < shape->stages; i++) {
        if ((r = stage_find(decoder, model, i, channels, err)) < 0)
            return r;
        channels = i + 1 < shape->stages ? decoder->stages[i].up.outputs : channels;
    }
    return rv_convolution_find(&decoder->output, model, shape, channels, shape->outputs, err, "decoder.output");
}

/* Each value becomes `tall` x `wide` equal ones. */
static void enlarge(float *out, const float *in, uint32_t channels, struct planes *size, uint32_t tall, uint32_t wide)
{
    uint32_t width = size->width * wide, row, rows = channels * size->height, x, i;

    for (row = 0; row < rows; row++, in += size->width) {
        for (x = 0; x < size->width; x++) {
            for (i = 0; i < wide; i++)
                out[x * wide + i] = in[x];
        }
        for (i = 1; i < tall; i++)
            memcpy(out + (size_t)i * width, out, width * sizeof(float));
        out += (size_t)tall * width;
    }
    size->height *= tall;
    size->width = width;
}

static size_t buffer_floats(const struct rv_decoder *decoder, uint32_t height, uint32_t width)
{
    const struct rv_decoder_shape *shape = &decoder->shape;
    size_t plane = (size_t)height * width, most = plane * decoder->input.outputs, needed;
    uint32_t i;

    for (i = 0; i < shape->stages; i++) {
        needed = plane * decoder->stages[i].channels;
        most = needed > most ? needed : most;
        if (i + 1 < shape->stages)
            plane *= (size_t)shape->enlarge_height * shape->enlarge_width;
        needed = plane * decoder->stages[i].channels; /* enlarged, before the stage's last convolution */
        most = needed > most ? needed : most;
    }
    needed = plane * shape->outputs;
    return needed > most ? needed : most;
}

/* x = relu(x + conv(relu(conv(relu(conv(x)))))) */
static int block_apply(struct rv_run *run, const struct rv_block *block, struct planes *x, float *a, float *b)
{
    size_t count = (size_t)block->convolutions[0].outputs * x->height * x->width, i;
    int r;

    if ((r = rv_convolve(run, &block->convolutions[0], x->data, x->height, x->width, true, a)) < 0 ||
        (r = rv_convolve(run, &block->convolutions[1], a, x->height, x->width, true, b)) < 0 ||
        (r = rv_convolve(run, &block->convolutions[2], b, x->height, x->width, false, a)) < 0)
        return r;
    for (i = 0; i < count; i++) {
        float sum = x->data[i] + a[i];

        x->data[i] = sum > 0 ? sum : 0;
    }
    return 0;
}

static int stages_apply(struct rv_run *run, const struct rv_decoder *decoder, struct planes *x, float *a, float *b)
{
    const struct rv_decoder_shape *shape = &decoder->shape;
    uint32_t i, block;
    int r;

    for (i = 0; i < shape->stages; i++) {
        const struct rv_stage *stage = &decoder->stages[i];

        for (block = 0; block < stage->block_count; block++) {
            if ((r = block_apply(run, &stage->blocks[block], x, a, b)) < 0)
                return r;
        }
        if (i + 1 == shape->stages)
            break;
        enlarge(a, x->data, stage->channels, x, shape->enlarge_height, shape->enlarge_width);
        if ((r = rv_convolve(run, &stage->up, a, x->height, x->width, false, x->data)) < 0)
            return r;
    }
    return 0;
}

int rv_decode(struct rv_run *run, const struct rv_decoder *decoder, const float *latent, uint32_t height,
              uint32_t width, float **ret_planes)
{
    size_t floats = buffer_floats(decoder, height, width);
    float *a = malloc(floats * sizeof(float)), *b = malloc(floats * sizeof(float));
    struct planes x = {malloc(floats * sizeof(float)), height, width};
    int r;

    if (!a || !b || !x.data) {
        r = rv_run_no_memory(run, "the decoder");
        goto out;
    }
    if ((r = rv_convolve(run, &decoder->input, latent, height, width, true, x.data)) < 0 ||
        (r = stages_apply(run, decoder, &x, a, b)) < 0 ||
        (r = rv_convolve(run, &decoder->output, x.data, x.height, x.width, false, a)) < 0)
        goto out;
    if (!rv_floats_finite(a, (size_t)decoder->shape.outputs * x.height * x.width)) {
        r = rv_fail(run->err, ERANGE, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED,
                    "the decoder's result has numbers that are not finite; are the weights sound?");
        goto out;
    }
    *ret_planes = a;
    a = NULL;
out:
    free(a);
    free(b);
    free(x.data);
    return r;
}
