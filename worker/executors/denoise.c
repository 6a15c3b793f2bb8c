#include "denoise.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "numbers.h"
#include "rpc.pb-c.h"

#define TWO_PI 6.28318530717958647692f
#define WAVES 5u         /* cosines per channel in the noise at the start */
#define WAVE_CYCLES 2.5f /* at most so many periods over the picture */
#define GRAIN 0.08f      /* share of white noise */
#define FREQUENCIES 4u   /* per coordinate: RV_POSITION_FEATURES = 3 coordinates x 2 x FREQUENCIES */
#define TIME_DECAY 0.2f  /* a video moves slowly */
_Static_assert(RV_POSITION_FEATURES == 3 * 2 * FREQUENCIES, "sine and cosine of each coordinate");

/* Everything that a denoising run allocates. */
struct buffers {
    float *latent;  /* the geometry's size */
    float *tokens;  /* tokens x input columns */
    float *x;       /* tokens x width */
    float *patches; /* tokens x patch */
    float *prompt;  /* width */
    float *scratch; /* tokens x (width + hidden) */
};

static uint32_t patch_size(const struct rv_geometry *g)
{
    return g->channels * g->patch_frames * g->patch_height * g->patch_width;
}

static uint32_t token_count(const struct rv_geometry *g)
{
    return g->frames / g->patch_frames * (g->height / g->patch_height) * (g->width / g->patch_width);
}

size_t rv_geometry_size(const struct rv_geometry *g)
{
    return (size_t)g->channels * g->frames * g->height * g->width;
}

int rv_denoiser_init(struct rv_denoiser *denoiser, const struct rv_model *model, const struct rv_geometry *geometry,
                     uint32_t text_width, struct rv_failure *err)
{
    uint32_t patch = patch_size(geometry), features = patch + RV_POSITION_FEATURES + RV_TIME_FEATURES;
    int r;

    *denoiser = (struct rv_denoiser){0};
    r = rv_weight_find(model, RV_SHAPE(2, 0, features), err, &denoiser->input, "denoiser.input.weight");
    if (r < 0)
        return r;
    r = rv_weight_find(model, RV_SHAPE(2, denoiser->input.rows, text_width), err, &denoiser->condition,
                       "denoiser.condition.weight");
    if (r < 0)
        return r;
    r = rv_weight_find(model, RV_SHAPE(2, patch, denoiser->input.rows), err, &denoiser->output,
                       "denoiser.output.weight");
    if (r < 0)
        return r;
    return rv_stack_init(&denoiser->stack, model, "denoiser", denoiser->input.rows, err);
}

void rv_denoiser_fini(struct rv_denoiser *denoiser)
{
    rv_stack_fini(&denoiser->stack);
}

/* One channel of the noise: a few long waves, whole periods in time so that a video can loop, and a little grain. */
static void noise_channel(const struct rv_geometry *g, struct rv_random *random, uint32_t channel, float *latent)
{
    float waves[WAVES][4];
    uint32_t i, f, y, x;

    for (i = 0; i < WAVES; i++) {
        waves[i][0] = (2 * rv_random_uniform(random) - 1) * WAVE_CYCLES;
        waves[i][1] = (2 * rv_random_uniform(random) - 1) * WAVE_CYCLES;
        waves[i][2] = (float)(rv_random_next(random) % 3) - 1;
        waves[i][3] = rv_random_uniform(random);
    }
    for (f = 0; f < g->frames; f++) {
        float *plane = latent + ((size_t)f * g->channels + channel) * g->height * g->width;

        for (y = 0; y < g->height; y++) {
            for (x = 0; x < g->width; x++) {
                float value = GRAIN * rv_random_normal(random);

                for (i = 0; i < WAVES; i++)
                    value += cosf(TWO_PI * (waves[i][0] * (float)x / (float)g->width +
                                            waves[i][1] * (float)y / (float)g->height +
                                            waves[i][2] * (float)f / (float)g->frames + waves[i][3]));
                plane[(size_t)y * g->width + x] = value;
            }
        }
    }
}

/* Every channel to mean 0 and variance 1 over all frames. */
static void channels_standardise(const struct rv_geometry *g, float *latent)
{
    size_t plane = (size_t)g->height * g->width, i;
    uint32_t channel, f;

    for (channel = 0; channel < g->channels; channel++) {
        double sum = 0, squares = 0, count = (double)plane * g->frames, mean, variance;
        float scale;

        for (f = 0; f < g->frames; f++) {
            for (i = 0; i < plane; i++) {
                double value = latent[((size_t)f * g->channels + channel) * plane + i];

                sum += value;
                squares += value * value;
            }
        }
        mean = sum / count;
        variance = squares / count - mean * mean;
        scale = variance > 1e-12 ? (float)(1 / sqrt(variance)) : 0;
        for (f = 0; f < g->frames; f++) {
            for (i = 0; i < plane; i++) {
                float *value = &latent[((size_t)f * g->channels + channel) * plane + i];

                *value = (*value - (float)mean) * scale;
            }
        }
    }
}

/* Walks all patches: copies between the latent and rows of `stride` numbers, or adds `rate` x rows to the latent. */
static void patches_walk(const struct rv_geometry *g, float *latent, float *rows, uint32_t stride, bool to_latent,
                         float rate)
{
    uint32_t tokens_x = g->width / g->patch_width, tokens_y = g->height / g->patch_height;
    uint32_t token, tokens = token_count(g), c, f, y, x;

    for (token = 0; token < tokens; token++, rows += stride) {
        uint32_t x0 = token % tokens_x * g->patch_width, y0 = token / tokens_x % tokens_y * g->patch_height;
        uint32_t f0 = token / tokens_x / tokens_y * g->patch_frames;
        float *row = rows;

        for (f = f0; f < f0 + g->patch_frames; f++) {
            for (c = 0; c < g->channels; c++) {
                for (y = y0; y < y0 + g->patch_height; y++) {
                    float *line = latent + (((size_t)f * g->channels + c) * g->height + y) * g->width + x0;

                    for (x = 0; x < g->patch_width; x++, row++) {
                        if (to_latent)
                            line[x] += rate * *row;
                        else
                            *row = line[x];
                    }
                }
            }
        }
    }
}

/* decay: how much weaker each higher frequency is. */
static float *waves_write(float *to, float coordinate, float lowest, float decay)
{
    float strength = 1;
    uint32_t i;

    for (i = 0; i < FREQUENCIES; i++, strength *= decay) {
        *to++ = strength * sinf(TWO_PI * coordinate * lowest * (float)(1u << i));
        *to++ = strength * cosf(TWO_PI * coordinate * lowest * (float)(1u << i));
    }
    return to;
}

/* The place of every token and the time, after its patch. */
static void features_write(const struct rv_geometry *g, float *tokens, uint32_t stride, float time)
{
    uint32_t tokens_x = g->width / g->patch_width, tokens_y = g->height / g->patch_height;
    uint32_t token, count = token_count(g), i;

    for (token = 0; token < count; token++) {
        float *to = tokens + (size_t)token * stride + patch_size(g);

        to = waves_write(to, ((float)(token % tokens_x) + 0.5f) / (float)tokens_x, 0.25f, 1);
        to = waves_write(to, ((float)(token / tokens_x % tokens_y) + 0.5f) / (float)tokens_y, 0.25f, 1);
        to = waves_write(to, (float)(token / tokens_x / tokens_y * g->patch_frames) / (float)g->frames, 1, TIME_DECAY);
        for (i = 0; i < RV_TIME_FEATURES; i++)
            *to++ = cosf(TWO_PI * 0.5f * time * (float)(i + 1));
    }
}

static int denoise_step(struct rv_run *run, const struct rv_denoiser *denoiser, const struct rv_geometry *g,
                        struct buffers *b, float time, float rate)
{
    uint32_t tokens = token_count(g), width = denoiser->stack.width, stride = denoiser->input.columns, i, row;
    int r;

    patches_walk(g, b->latent, b->tokens, stride, false, 0);
    features_write(g, b->tokens, stride, time);
    for (row = 0; row < tokens; row++) {
        for (i = 0; i < width; i++)
            b->x[(size_t)row * width + i] = b->prompt[i];
    }
    if ((r = rv_weight_multiply(run, &denoiser->input, b->tokens, tokens, 1, 1, b->x)) < 0 ||
        (r = rv_stack_apply(run, &denoiser->stack, b->x, tokens, b->scratch)) < 0)
        return r;
    rv_rows_normalise(b->x, b->x, tokens, width);
    if ((r = rv_weight_multiply(run, &denoiser->output, b->x, tokens, 1, 0, b->patches)) < 0)
        return r;
    patches_walk(g, b->latent, b->patches, patch_size(g), true, rate);
    return 0;
}

static int buffers_init(struct rv_run *run, const struct rv_denoiser *denoiser, const struct rv_geometry *g,
                        struct buffers *b)
{
    size_t tokens = token_count(g), width = denoiser->stack.width;

    b->latent = malloc(rv_geometry_size(g) * sizeof(float));
    b->tokens = malloc(tokens * denoiser->input.columns * sizeof(float));
    b->x = malloc(tokens * width * sizeof(float));
    b->patches = malloc(tokens * patch_size(g) * sizeof(float));
    b->prompt = malloc(width * sizeof(float));
    b->scratch = malloc(tokens * (width + denoiser->stack.hidden) * sizeof(float));
    if (b->latent && b->tokens && b->x && b->patches && b->prompt && b->scratch)
        return 0;
    return rv_run_no_memory(run, "the denoiser");
}

static void buffers_fini(struct buffers *b)
{
    free(b->latent);
    free(b->tokens);
    free(b->x);
    free(b->patches);
    free(b->prompt);
    free(b->scratch);
}

int rv_denoise(struct rv_run *run, const struct rv_denoiser *denoiser, const struct rv_geometry *geometry,
               const float *prompt, uint64_t seed, uint32_t steps, float **ret_latent)
{
    struct rv_random random = {rv_mix64(seed + 1)};
    struct buffers b = {0};
    uint32_t i;
    int r;

    if ((r = buffers_init(run, denoiser, geometry, &b)) < 0)
        goto out;
    for (i = 0; i < geometry->channels; i++)
        noise_channel(geometry, &random, i, b.latent);
    channels_standardise(geometry, b.latent);
    if ((r = rv_weight_multiply(run, &denoiser->condition, prompt, 1, 1, 0, b.prompt)) < 0)
        goto out;
    for (i = 0; i < steps; i++) {
        rv_run_describe(run, "denoising, step %u of %u", i + 1, steps);
        if ((r = rv_run_advance(run, 0)) < 0 || (r = rv_fault_step(run, i, steps)) < 0 ||
            (r = denoise_step(run, denoiser, geometry, &b, (float)i / (float)steps, 1 / (float)steps)) < 0)
            goto out;
    }
    if (!rv_floats_finite(b.latent, rv_geometry_size(geometry))) {
        r = rv_fail(run->err, ERANGE, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED,
                    "the denoiser's result has numbers that are not finite; are the weights sound?");
        goto out;
    }
    channels_standardise(geometry, b.latent);
    *ret_latent = b.latent;
    b.latent = NULL;
out:
    buffers_fini(&b);
    return r;
}
