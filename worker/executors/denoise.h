/*
 * The denoiser: smooth noise becomes a latent in a few steps, and each step reads every weight of the denoiser.
 *
 * The latent is cut into patches; each patch is a row ("token") that the stack works on, with its place, the time and
 * the prompt's vector added. latent(t + dt) = latent(t) + dt * velocity, as in rectified flow.
 */
#ifndef RV_EXECUTOR_DENOISE_H
#define RV_EXECUTOR_DENOISE_H

#include "stack.h"

/* Latent sizes, each a multiple of its patch. Layout: [frames][channels][height][width]. */
struct rv_geometry {
    uint32_t channels, frames, height, width;
    uint32_t patch_frames, patch_height, patch_width;
};

struct rv_denoiser {
    struct rv_weight input, condition, output;
    struct rv_stack stack;
};

/* text_width: numbers of the prompt's vector. */
int rv_denoiser_init(struct rv_denoiser *denoiser, const struct rv_model *model, const struct rv_geometry *geometry,
                     uint32_t text_width, struct rv_failure *err);
void rv_denoiser_fini(struct rv_denoiser *denoiser);

/* *ret_latent (free()) has mean 0 and variance 1 in each channel of the whole. steps x layers steps of progress. */
int rv_denoise(struct rv_run *run, const struct rv_denoiser *denoiser, const struct rv_geometry *geometry,
               const float *prompt, uint64_t seed, uint32_t steps, float **ret_latent);

/* Numbers in the whole latent. */
size_t rv_geometry_size(const struct rv_geometry *geometry);

#endif
