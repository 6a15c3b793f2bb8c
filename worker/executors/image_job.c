#include "image_job.h"

#include <errno.h>
#include <png.h>
#include <stdlib.h>

#include "picture.h"
#include "pipeline.h"
#include "rpc.pb-c.h"

static const struct rv_param_rule rules[] = {
    RV_PARAM_RULES_COMMON,
    {RV_PARAM_WIDTH, "width", 64, 1024, 64, 256},
    {RV_PARAM_HEIGHT, "height", 64, 1024, 64, 256},
};

static int png_add(struct rv_run *run, const uint8_t *rgb, uint32_t width, uint32_t height)
{
    png_image image = {.version = PNG_IMAGE_VERSION, .width = width, .height = height, .format = PNG_FORMAT_RGB};
    png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image);
    uint8_t *file = malloc(size);
    int r;

    if (!file)
        r = rv_run_no_memory(run, "the PNG file");
    else if (!png_image_write_to_memory(&image, file, &size, 0, rgb, 0, NULL))
        r = rv_fail(run->err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, "libpng: %s", image.message);
    else
        r = rv_run_add_output(run, "image.png", "image/png", file, size);
    free(file);
    return r;
}

int rv_image_run(struct rv_execution *execution, const struct rv_compute *compute, void *device, struct rv_failure *err)
{
    struct rv_pipeline pipeline = {0};
    struct rv_request request;
    struct rv_geometry geometry;
    struct rv_exposure exposure;
    float *latent = NULL, *planes = NULL;
    uint8_t *rgb = NULL;
    uint32_t width, height;
    int r;

    if ((r = rv_request_read(execution->job, rules, sizeof(rules) / sizeof(rules[0]), err, &request)) < 0)
        return r;
    width = (uint32_t)request.values[RV_PARAM_WIDTH];
    height = (uint32_t)request.values[RV_PARAM_HEIGHT];
    geometry = (struct rv_geometry){
        .channels = RV_PICTURE_LATENTS,
        .frames = 1,
        .height = height / RV_PICTURE_SCALE,
        .width = width / RV_PICTURE_SCALE,
        .patch_frames = 1,
        .patch_height = RV_PICTURE_PATCH,
        .patch_width = RV_PICTURE_PATCH,
    };
    if ((r = rv_pipeline_init(&pipeline, execution, &request, &geometry, &rv_picture_decoder, 1, err)) < 0)
        goto out;
    pipeline.run.compute = compute;
    pipeline.run.device = device;
    if ((r = rv_pipeline_denoise(&pipeline, &request, &latent)) < 0)
        goto out;
    rv_run_describe(&pipeline.run, "decoding the picture");
    if ((r = rv_decode(&pipeline.run, &pipeline.decoder, latent, geometry.height, geometry.width, &planes)) < 0)
        goto out;
    if (!(rgb = malloc((size_t)width * height * 3))) {
        r = rv_run_no_memory(&pipeline.run, "the picture");
        goto out;
    }
    rv_exposure_measure(&exposure, planes, (size_t)width * height);
    rv_picture_develop(&exposure, planes, (size_t)width * height, 3, rgb);
    r = png_add(&pipeline.run, rgb, width, height);
out:
    free(latent);
    free(planes);
    free(rgb);
    rv_pipeline_fini(&pipeline);
    return r;
}
