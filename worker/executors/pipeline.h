/*
 * What the three executors share: find the models among the leases, encode the prompt, denoise. Each executor then
 * decodes the latent and writes its own kind of file.
 */
#ifndef RV_EXECUTOR_PIPELINE_H
#define RV_EXECUTOR_PIPELINE_H

#include "decoder.h"
#include "denoise.h"
#include "request.h"
#include "text.h"

struct rv_pipeline {
    struct rv_run run;
    struct rv_text_encoder text;
    struct rv_denoiser denoiser;
    struct rv_decoder decoder;
    struct rv_geometry geometry;
};

/*
 * Checks all tensors before anything is computed. decodings: how often rv_decode will run, for progress. err filled on
 * failure. End it by rv_pipeline_fini in both cases.
 */
int rv_pipeline_init(struct rv_pipeline *pipeline, struct rv_execution *execution, const struct rv_request *request,
                     const struct rv_geometry *geometry, const struct rv_decoder_shape *shape, uint32_t decodings,
                     struct rv_failure *err);

/* Prompt and noise to *ret_latent (free()). */
int rv_pipeline_denoise(struct rv_pipeline *pipeline, const struct rv_request *request, float **ret_latent);

void rv_pipeline_fini(struct rv_pipeline *pipeline);

#endif
