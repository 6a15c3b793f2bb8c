#include "pipeline.h"

#include <errno.h>
#include <stdlib.h>

#include "rpc.pb-c.h"

/* The text encoder is known by its content: where it stands in the configuration does not matter. */
static int text_model_find(const struct rv_execution *execution, struct rv_failure *err, struct rv_model *ret_model)
{
    uint32_t i;

    for (i = 0; i < execution->lease_count; i++) {
        struct rv_model model = {execution->leases[i], execution->model_names[i]};

        if (rv_model_has(&model, RV_TEXT_MARK)) {
            *ret_model = model;
            return 0;
        }
    }
    return rv_fail(err, ENOENT, RESVISOR__V1__ERROR_CODE__ERROR_MODEL_INVALID,
                   "none of the %u models of this workflow type is a text encoder (has the tensor %s)",
                   execution->lease_count, RV_TEXT_MARK);
}

int rv_pipeline_init(struct rv_pipeline *pipeline, struct rv_execution *execution, const struct rv_request *request,
                     const struct rv_geometry *geometry, const struct rv_decoder_shape *shape, uint32_t decodings,
                     struct rv_failure *err)
{
    struct rv_model model, text;
    int r;

    *pipeline = (struct rv_pipeline){.geometry = *geometry};
    pipeline->run = (struct rv_run){.execution = execution, .err = err, .fault = request->fault};
    if (execution->lease_count == 0)
        return rv_fail(err, EINVAL, RESVISOR__V1__ERROR_CODE__ERROR_CONFIG,
                       "this workflow type has no model; name one and a text encoder under `models`");
    model = (struct rv_model){execution->leases[0], execution->model_names[0]};
    if ((r = text_model_find(execution, err, &text)) < 0 ||
        (r = rv_text_encoder_init(&pipeline->text, &text, err)) < 0 ||
        (r = rv_denoiser_init(&pipeline->denoiser, &model, geometry, pipeline->text.embedding.columns, err)) < 0 ||
        (r = rv_decoder_init(&pipeline->decoder, &model, shape, err)) < 0)
        return r;
    pipeline->run.total = pipeline->text.stack.count +
                          request->values[RV_PARAM_STEPS] * pipeline->denoiser.stack.count +
                          (uint64_t)decodings * pipeline->decoder.convolutions;
    return 0;
}

int rv_pipeline_denoise(struct rv_pipeline *pipeline, const struct rv_request *request, float **ret_latent)
{
    float *prompt = malloc(pipeline->text.embedding.columns * sizeof(float));
    int r;

    if (!prompt)
        return rv_run_no_memory(&pipeline->run, "the prompt");
    r = rv_text_encode(&pipeline->run, &pipeline->text, request->prompt, prompt);
    if (r == 0)
        r = rv_denoise(&pipeline->run, &pipeline->denoiser, &pipeline->geometry, prompt, request->values[RV_PARAM_SEED],
                       (uint32_t)request->values[RV_PARAM_STEPS], ret_latent);
    free(prompt);
    return r;
}

void rv_pipeline_fini(struct rv_pipeline *pipeline)
{
    rv_text_encoder_fini(&pipeline->text);
    rv_denoiser_fini(&pipeline->denoiser);
    rv_run_fini(&pipeline->run);
}
