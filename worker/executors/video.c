/* The video executor: a prompt becomes a short film, an animated WebP file that loops. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <webp/encode.h>
#include <webp/mux.h>

#include "picture.h"
#include "pipeline.h"
#include "rpc.pb-c.h"

#define QUALITY 80.0f /* of 100 */
#define EFFORT 2      /* libwebp's method, 0 to 6 */

static const struct rv_param_rule rules[] = {
    RV_PARAM_RULES_COMMON,
    {RV_PARAM_WIDTH, "width", 64, 512, 64, 128},
    {RV_PARAM_HEIGHT, "height", 64, 512, 64, 128},
    {RV_PARAM_FRAMES, "frames", 2, 64, RV_VIDEO_PATCH_FRAMES, 8},
    {RV_PARAM_FPS, "fps", 1, 60, 1, 8},
};

struct film {
    WebPAnimEncoder *encoder;
    WebPConfig config;
    uint32_t width, height;
    uint32_t fps;
    uint8_t *rgba;
    struct rv_exposure exposure; /* of the first frame, for all */
};

static int film_fail(struct rv_run *run, const char *what)
{
    return rv_fail(run->err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, "libwebp: %s", what);
}

static int film_init(struct rv_run *run, struct film *film)
{
    WebPAnimEncoderOptions options;

    film->rgba = malloc((size_t)film->width * film->height * 4);
    if (!film->rgba)
        return rv_run_no_memory(run, "a frame");
    if (!WebPAnimEncoderOptionsInit(&options) || !WebPConfigInit(&film->config))
        return film_fail(run, "another version than at build time");
    film->config.quality = QUALITY;
    film->config.method = EFFORT;
    film->encoder = WebPAnimEncoderNew((int)film->width, (int)film->height, &options);
    return film->encoder ? 0 : film_fail(run, "cannot start an animation");
}

static void film_fini(struct film *film)
{
    WebPAnimEncoderDelete(film->encoder);
    free(film->rgba);
}

static int film_time_ms(const struct film *film, uint32_t frame)
{
    return (int)(frame * 1000u / film->fps);
}

static int film_add_frame(struct rv_run *run, struct film *film, const float *planes, uint32_t number)
{
    size_t pixels = (size_t)film->width * film->height;
    WebPPicture picture;
    int r = 0;

    if (number == 0)
        rv_exposure_measure(&film->exposure, planes, pixels);
    rv_picture_develop(&film->exposure, planes, pixels, 4, film->rgba);
    if (!WebPPictureInit(&picture))
        return film_fail(run, "another version than at build time");
    picture.width = (int)film->width;
    picture.height = (int)film->height;
    picture.use_argb = 1;
    if (!WebPPictureImportRGBX(&picture, film->rgba, (int)film->width * 4))
        r = rv_run_no_memory(run, "a frame");
    else if (!WebPAnimEncoderAdd(film->encoder, &picture, film_time_ms(film, number), &film->config))
        r = film_fail(run, WebPAnimEncoderGetError(film->encoder));
    WebPPictureFree(&picture);
    return r;
}

static int film_finish(struct rv_run *run, struct film *film, uint32_t frames)
{
    WebPData file;
    int r;

    WebPDataInit(&file);
    if (!WebPAnimEncoderAdd(film->encoder, NULL, film_time_ms(film, frames), NULL) ||
        !WebPAnimEncoderAssemble(film->encoder, &file))
        r = film_fail(run, WebPAnimEncoderGetError(film->encoder));
    else
        r = rv_run_add_output(run, "video.webp", "image/webp", file.bytes, file.size);
    WebPDataClear(&file);
    return r;
}

/* Each frame takes a quarter from each neighbour, round the end: tokens hold two frames, and would show as jumps. */
static int frames_smooth(struct rv_pipeline *pipeline, float *latent)
{
    const struct rv_geometry *g = &pipeline->geometry;
    size_t size = rv_geometry_size(g), frame = size / g->frames, i;
    float *old = malloc(size * sizeof(float));

    if (!old)
        return rv_run_no_memory(&pipeline->run, "the frames");
    memcpy(old, latent, size * sizeof(float));
    for (i = 0; i < size; i++)
        latent[i] = 0.5f * old[i] + 0.25f * (old[(i + frame) % size] + old[(i + size - frame) % size]);
    free(old);
    return 0;
}

static int frames_decode(struct rv_pipeline *pipeline, struct film *film, const float *latent)
{
    const struct rv_geometry *g = &pipeline->geometry;
    float *planes = NULL;
    uint32_t i;
    int r;

    for (i = 0; i < g->frames; i++) {
        const float *frame = latent + (size_t)i * g->channels * g->height * g->width;

        rv_run_describe(&pipeline->run, "decoding, frame %u of %u", i + 1, g->frames);
        if ((r = rv_decode(&pipeline->run, &pipeline->decoder, frame, g->height, g->width, &planes)) < 0)
            return r;
        r = film_add_frame(&pipeline->run, film, planes, i);
        free(planes);
        if (r < 0)
            return r;
    }
    return film_finish(&pipeline->run, film, g->frames);
}

static int video_run(struct rv_execution *execution, struct rv_failure *err)
{
    struct rv_pipeline pipeline = {0};
    struct rv_request request;
    struct rv_geometry geometry;
    struct film film = {0};
    float *latent = NULL;
    int r;

    if ((r = rv_request_read(execution->job, rules, sizeof(rules) / sizeof(rules[0]), err, &request)) < 0)
        return r;
    film.width = (uint32_t)request.values[RV_PARAM_WIDTH];
    film.height = (uint32_t)request.values[RV_PARAM_HEIGHT];
    film.fps = (uint32_t)request.values[RV_PARAM_FPS];
    geometry = (struct rv_geometry){
        .channels = RV_PICTURE_LATENTS,
        .frames = (uint32_t)request.values[RV_PARAM_FRAMES],
        .height = film.height / RV_PICTURE_SCALE,
        .width = film.width / RV_PICTURE_SCALE,
        .patch_frames = RV_VIDEO_PATCH_FRAMES,
        .patch_height = RV_PICTURE_PATCH,
        .patch_width = RV_PICTURE_PATCH,
    };
    if ((r = rv_pipeline_init(&pipeline, execution, &request, &geometry, &rv_picture_decoder, geometry.frames, err)) <
            0 ||
        (r = film_init(&pipeline.run, &film)) < 0 || (r = rv_pipeline_denoise(&pipeline, &request, &latent)) < 0)
        goto out;
    if ((r = frames_smooth(&pipeline, latent)) == 0)
        r = frames_decode(&pipeline, &film, latent);
out:
    free(latent);
    film_fini(&film);
    rv_pipeline_fini(&pipeline);
    return r;
}

extern const struct rv_executor resvisor_executor;
__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "video",
    .version = RV_VERSION,
    .start = rv_executor_start,
    .run = video_run,
};
