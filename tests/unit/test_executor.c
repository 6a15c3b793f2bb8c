/*
 * The executors that ship, loaded as the worker loads them, on models that resvisor-make-model writes: what they make
 * is what it should be, the same twice, and everything wrong with a job or a model is said in words.
 */
#include <errno.h>
#include <math.h>
#include <png.h>
#include <setjmp.h>
#include <signal.h>
#include <sndfile.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <webp/demux.h>

#include <cmocka.h>

#include "executor_host.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define PATH_BYTES 512
#define NEVER 0

enum model_id { IMAGE, IMAGE_BF16, IMAGE_F16, VIDEO, AUDIO, TEXT, MODELS };
static const struct {
    const char *kind, *dtype;
} model_rows[MODELS] = {{"image", "F32"}, {"image", "BF16"}, {"image", "F16"},
                        {"video", "F32"}, {"audio", "F32"},  {"text-encoder", "F32"}};

static char folder[] = "/tmp/rv-executor-XXXXXX";
static struct rv_lease models[MODELS];
static const struct rv_executor *image, *video, *audio;

/* Runs resvisor-make-model; its exit status. file_limit: RLIMIT_FSIZE in bytes, 0 = none. */
static int make_model(const char *const *arguments, uint64_t file_limit)
{
    const char *all[12] = {RV_MAKE_MODEL};
    struct rlimit limit = {file_limit, file_limit};
    pid_t pid;
    int status, i;

    for (i = 0; arguments[i]; i++)
        all[i + 1] = arguments[i];
    pid = fork();
    if (pid == 0) {
        (void)signal(SIGXFSZ, SIG_IGN);
        if (file_limit)
            (void)setrlimit(RLIMIT_FSIZE, &limit);
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))
            _exit(99);
        (void)execv(RV_MAKE_MODEL, (char *const *)all);
        _exit(98);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static const char *path_of(char path[PATH_BYTES], const char *name)
{
    (void)snprintf(path, PATH_BYTES, "%s/%s", folder, name);
    return path;
}

static int group_setup(void **state)
{
    char path[PATH_BYTES], name[64];
    struct rv_failure err = {0};
    void *executor_state;
    int i;

    (void)state;
    if (!mkdtemp(folder))
        return -1;
    for (i = 0; i < MODELS; i++) {
        (void)snprintf(name, sizeof(name), "%d.safetensors", i);
        if (make_model((const char *const[]){model_rows[i].kind, "--bytes", "4MiB", "--dtype", model_rows[i].dtype,
                                             path_of(path, name), NULL},
                       0) != 0 ||
            host_lease_open(path, &models[i]) < 0)
            return -1;
    }
    image = host_executor_load(RV_EXECUTORS "/image.so");
    video = host_executor_load(RV_EXECUTORS "/video.so");
    audio = host_executor_load(RV_EXECUTORS "/audio.so");
    if (!image || !video || !audio)
        return -1;
    return image->start(&executor_state, &err) + video->start(&executor_state, &err) +
           audio->start(&executor_state, &err);
}

static int group_teardown(void **state)
{
    char path[PATH_BYTES], name[64];
    int i;

    (void)state;
    for (i = 0; i < MODELS; i++) {
        (void)snprintf(name, sizeof(name), "%d.safetensors", i);
        (void)unlink(path_of(path, name));
        host_lease_close(&models[i]);
    }
    return rmdir(folder); /* fails if a test left something */
}

static int run(const struct rv_executor *executor, enum model_id model, const char *const *params, uint64_t cancel_at,
               struct rv_job *job, struct rv_failure *err)
{
    struct rv_lease *leases[] = {&models[model], &models[TEXT]};

    *err = (struct rv_failure){0};
    return host_run(executor, leases, 2, params, cancel_at, job, err);
}

/* Two runs with equal parameters; asserts equal bytes and keeps the first. */
static void run_twice(const struct rv_executor *executor, enum model_id model, const char *const *params,
                      struct rv_job *ret_job)
{
    struct rv_failure err;
    struct rv_job again;

    assert_int_equal(run(executor, model, params, NEVER, ret_job, &err), 0);
    assert_int_equal(run(executor, model, params, NEVER, &again, &err), 0);
    assert_int_equal(ret_job->output_count, 1);
    assert_int_equal(again.outputs[0].size, ret_job->outputs[0].size);
    assert_memory_equal(again.outputs[0].data, ret_job->outputs[0].data, again.outputs[0].size);
    assert_true(ret_job->total > 0);
    assert_int_equal(ret_job->done, ret_job->total);
    host_job_fini(&again);
}

/* Variance of byte values: 0 = flat. */
static double spread(const uint8_t *bytes, size_t count)
{
    double sum = 0, squares = 0;
    size_t i;

    for (i = 0; i < count; i++) {
        sum += bytes[i];
        squares += (double)bytes[i] * bytes[i];
    }
    return squares / (double)count - sum / (double)count * (sum / (double)count);
}

/* Mean difference between neighbours on a line, of one colour. */
static double roughness(const uint8_t *rgb, uint32_t width, uint32_t height)
{
    double sum = 0;
    uint32_t x, y;

    for (y = 0; y < height; y++) {
        for (x = 1; x < width; x++)
            sum += abs(rgb[(y * width + x) * 3] - rgb[(y * width + x - 1) * 3]);
    }
    return sum / (height * (width - 1));
}

static uint8_t *png_read(const struct host_output *file, uint32_t *ret_width, uint32_t *ret_height)
{
    png_image picture = {.version = PNG_IMAGE_VERSION};
    uint8_t *rgb;

    assert_true(png_image_begin_read_from_memory(&picture, file->data, file->size));
    picture.format = PNG_FORMAT_RGB;
    rgb = malloc(PNG_IMAGE_SIZE(picture));
    assert_non_null(rgb);
    assert_true(png_image_finish_read(&picture, NULL, rgb, 0, NULL));
    *ret_width = picture.width;
    *ret_height = picture.height;
    return rgb;
}

static void image_makes_the_same_smooth_picture_twice(void **state)
{
    static const enum model_id ids[] = {IMAGE, IMAGE_BF16, IMAGE_F16};
    uint32_t i, width, height;
    struct rv_job job;
    uint8_t *rgb;

    (void)state;
    for (i = 0; i < 3; i++) {
        run_twice(image, ids[i], (const char *const[]){"prompt=a red boat", "width=192", "height=128", NULL}, &job);
        assert_string_equal(job.outputs[0].name, "image.png");
        assert_string_equal(job.outputs[0].type, "image/png");
        rgb = png_read(&job.outputs[0], &width, &height);
        assert_int_equal(width, 192);
        assert_int_equal(height, 128);
        assert_true(spread(rgb, (size_t)width * height * 3) > 400);
        assert_true(roughness(rgb, width, height) < 12); /* noise would have about 80 */
        free(rgb);
        host_job_fini(&job);
    }
}

static void seed_prompt_and_word_order_change_the_picture(void **state)
{
    static const char *const variants[][4] = {{"prompt=red boat", "seed=1", "width=64", "height=64"},
                                              {"prompt=red boat", "seed=2", "width=64", "height=64"},
                                              {"prompt=boat red", "seed=1", "width=64", "height=64"},
                                              {"prompt=", "seed=1", "width=64", "height=64"}};
    struct rv_job jobs[4];
    struct rv_failure err;
    uint32_t i, k;

    (void)state;
    for (i = 0; i < 4; i++) {
        const char *const params[] = {variants[i][0], variants[i][1], variants[i][2], variants[i][3], NULL};

        assert_int_equal(run(image, IMAGE, params, NEVER, &jobs[i], &err), 0);
        for (k = 0; k < i; k++)
            assert_true(jobs[i].outputs[0].size != jobs[k].outputs[0].size ||
                        memcmp(jobs[i].outputs[0].data, jobs[k].outputs[0].data, jobs[i].outputs[0].size) != 0);
    }
    for (i = 0; i < 4; i++)
        host_job_fini(&jobs[i]);
}

static void video_makes_the_same_moving_film_twice(void **state)
{
    WebPAnimDecoder *decoder;
    uint8_t *frame, *first;
    WebPAnimInfo info;
    struct rv_job job;
    WebPData file;
    uint32_t count = 0, moved = 0;
    int time_ms = 0;

    (void)state;
    run_twice(video, VIDEO, (const char *const[]){"prompt=waves", "frames=6", "width=64", "fps=10", NULL}, &job);
    assert_string_equal(job.outputs[0].name, "video.webp");
    file = (WebPData){job.outputs[0].data, job.outputs[0].size};
    decoder = WebPAnimDecoderNew(&file, NULL);
    assert_non_null(decoder);
    assert_true(WebPAnimDecoderGetInfo(decoder, &info));
    assert_int_equal(info.canvas_width, 64);
    assert_int_equal(info.canvas_height, 128);
    assert_int_equal(info.frame_count, 6);
    first = malloc((size_t)info.canvas_width * info.canvas_height * 4);
    for (; WebPAnimDecoderHasMoreFrames(decoder); count++) {
        assert_true(WebPAnimDecoderGetNext(decoder, &frame, &time_ms));
        assert_true(spread(frame, (size_t)info.canvas_width * info.canvas_height * 4) > 400);
        if (count == 0)
            memcpy(first, frame, (size_t)info.canvas_width * info.canvas_height * 4);
        moved += memcmp(first, frame, (size_t)info.canvas_width * info.canvas_height * 4) != 0;
    }
    assert_int_equal(count, 6);
    assert_int_equal(moved, 5);
    assert_int_equal(time_ms, 600);
    WebPAnimDecoderDelete(decoder);
    free(first);
    host_job_fini(&job);
}

struct reader {
    const struct host_output *file;
    sf_count_t place;
};

static sf_count_t reader_length(void *context)
{
    return (sf_count_t)((struct reader *)context)->file->size;
}

static sf_count_t reader_seek(sf_count_t offset, int whence, void *context)
{
    struct reader *reader = context;

    reader->place = offset + (whence == SEEK_CUR   ? reader->place
                              : whence == SEEK_END ? (sf_count_t)reader->file->size
                                                   : 0);
    return reader->place;
}

static sf_count_t reader_read(void *to, sf_count_t count, void *context)
{
    struct reader *reader = context;
    sf_count_t left = (sf_count_t)reader->file->size - reader->place;

    count = count < left ? count : left;
    memcpy(to, reader->file->data + reader->place, (size_t)count);
    reader->place += count;
    return count;
}

static sf_count_t reader_tell(void *context)
{
    return ((struct reader *)context)->place;
}

static void audio_makes_the_same_audible_sound_twice(void **state)
{
    SF_VIRTUAL_IO calls = {reader_length, reader_seek, reader_read, NULL, reader_tell};
    struct rv_job job;
    struct reader reader = {&job.outputs[0], 0};
    SF_INFO info = {0};
    double squares = 0;
    static float sound[32000];
    float peak = 0;
    SNDFILE *wav;
    uint32_t i;

    (void)state;
    run_twice(audio, AUDIO, (const char *const[]){"prompt=bells", "seconds=2", NULL}, &job);
    assert_string_equal(job.outputs[0].name, "audio.wav");
    wav = sf_open_virtual(&calls, SFM_READ, &info, &reader);
    assert_non_null(wav);
    assert_int_equal(info.samplerate, 16000);
    assert_int_equal(info.channels, 1);
    assert_int_equal(info.frames, 32000);
    assert_int_equal(sf_readf_float(wav, sound, 32000), 32000);
    for (i = 0; i < 32000; i++) {
        squares += (double)sound[i] * sound[i];
        peak = fabsf(sound[i]) > peak ? fabsf(sound[i]) : peak;
    }
    assert_true(sqrt(squares / 32000) > 0.05);
    assert_true(peak > 0.65f && peak < 0.75f);
    (void)sf_close(wav);
    host_job_fini(&job);
}

static void the_text_encoder_is_found_wherever_it_stands(void **state)
{
    struct rv_lease *leases[] = {&models[IMAGE], &models[AUDIO], &models[VIDEO], &models[TEXT]};
    const char *const params[] = {"width=64", "height=64", NULL};
    struct rv_failure err;
    struct rv_job job, usual;

    (void)state;
    assert_int_equal(host_run(image, leases, 4, params, NEVER, &job, &err), 0);
    assert_int_equal(run(image, IMAGE, params, NEVER, &usual, &err), 0);
    assert_int_equal(job.outputs[0].size, usual.outputs[0].size);
    assert_memory_equal(job.outputs[0].data, usual.outputs[0].data, job.outputs[0].size);
    host_job_fini(&job);
    host_job_fini(&usual);
}

static void wrong_parameters_are_refused_in_words(void **state)
{
    static const struct {
        const struct rv_executor **executor;
        const char *param, *word, *other_word;
    } rows[] = {
        {&image, "colour=red", "unknown parameter \"colour\"", "prompt, seed, steps, width, height, fault"},
        {&image, "frames=8", "unknown parameter \"frames\"", "width"},
        {&image, "width=100", "parameter width is \"100\"", "from 64 to 1024, a multiple of 64"},
        {&image, "width=0", "width", "64"},
        {&image, "height=1088", "height", "1024"},
        {&image, "steps=0", "steps", "from 1 to 100"},
        {&image, "steps= 4", "steps", "whole number"},
        {&image, "steps=4.5", "steps", "whole number"},
        {&image, "seed=-1", "seed", "18446744073709551615"},
        {&image, "seed=18446744073709551616", "seed", "18446744073709551615"},
        {&image, "seed=", "parameter seed is \"\"", "whole number"},
        {&image, "fault=burn", "fault", "crash, abort"},
        {&image, "bad\n\"key\x1b=1", "unknown parameter \"bad??key?\"", "prompt"},
        {&video, "frames=7", "frames", "multiple of 2"},
        {&video, "seconds=3", "unknown parameter", "frames, fps"},
        {&audio, "seconds=31", "seconds", "from 1 to 30"},
        {&audio, "width=64", "unknown parameter", "seconds"},
    };
    struct rv_failure err;
    struct rv_job job;
    uint32_t i;

    (void)state;
    for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(run(*rows[i].executor, IMAGE, (const char *const[]){rows[i].param, NULL}, NEVER, &job, &err),
                         -EINVAL);
        assert_int_equal(err.code, ERROR(BAD_REQUEST));
        if (!strstr(err.message, rows[i].word) || !strstr(err.message, rows[i].other_word))
            fail_msg("%s: %s", rows[i].param, err.message);
        assert_int_equal(job.output_count, 0);
        host_job_fini(&job);
    }
}

static void wrong_models_are_refused_in_words(void **state)
{
    static const struct {
        enum model_id first, second;
        const char *word, *other_word;
    } rows[] = {
        {IMAGE, VIDEO, "none of the 2 models", "text.embedding.weight"},
        {TEXT, IMAGE, "model first has no tensor denoiser.input.weight", "[any, 104]"},
        {AUDIO, TEXT, "tensor denoiser.input.weight has shape [", "expected [any, 104]"},
    };
    const char *const none[] = {NULL};
    struct rv_failure err;
    struct rv_job job;
    uint32_t i;

    (void)state;
    for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct rv_lease *leases[] = {&models[rows[i].first], &models[rows[i].second]};

        assert_true(host_run(image, leases, 2, none, NEVER, &job, &err) < 0);
        assert_int_equal(err.code, ERROR(MODEL_INVALID));
        if (!strstr(err.message, rows[i].word) || !strstr(err.message, rows[i].other_word))
            fail_msg("row %u: %s", i, err.message);
        host_job_fini(&job);
    }
    assert_int_equal(host_run(image, NULL, 0, none, NEVER, &job, &err), -EINVAL);
    assert_int_equal(err.code, ERROR(CONFIG));
    host_job_fini(&job);
}

static struct rv_safetensor *tensor_of(struct rv_lease *lease, const char *name)
{
    uint32_t i;

    for (i = 0; i < lease->file.count; i++) {
        if (strcmp(lease->file.tensors[i].name, name) == 0)
            return &lease->file.tensors[i];
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

/* Runs an image job that must fail with a message that has `word` in it. */
static void expect_refusal(int number, const char *word)
{
    struct rv_failure err;
    struct rv_job job;

    assert_int_equal(run(image, IMAGE, (const char *const[]){"width=64", NULL}, NEVER, &job, &err), number);
    assert_int_equal(err.code, ERROR(MODEL_INVALID));
    if (!strstr(err.message, word))
        fail_msg("%s is not in: %s", word, err.message);
    host_job_fini(&job);
}

/* Every kind of tensor that an image needs: another name, dtype or shape is refused and named. */
static void a_missing_or_misshapen_tensor_is_named(void **state)
{
    static const char *const names[] = {"denoiser.input.weight",
                                        "denoiser.condition.weight",
                                        "denoiser.output.weight",
                                        "denoiser.layers.0.up.weight",
                                        "denoiser.layers.0.down.weight",
                                        "decoder.input.weight",
                                        "decoder.stages.0.blocks.1.2.weight",
                                        "decoder.stages.2.up.weight",
                                        "decoder.output.weight"};
    uint32_t i;

    (void)state;
    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct rv_safetensor *tensor = tensor_of(&models[IMAGE], names[i]), good = *tensor;

        tensor->rank = 8;
        expect_refusal(-EBADMSG, names[i]);
        *tensor = good;
        tensor->shape[tensor->rank - 1] *= 1u << 20;
        expect_refusal(-EBADMSG, "expected [");
        *tensor = good;
        tensor->dtype = RV_I8;
        expect_refusal(-EBADMSG, "is I8; F32, BF16 or F16 is needed");
        *tensor = good;
        tensor->name = "other";
        expect_refusal(-ENOENT, names[i]);
        *tensor = good;
    }
}

static void a_bias_may_be_left_out(void **state)
{
    struct rv_safetensor *tensor = tensor_of(&models[IMAGE], "decoder.input.bias"), good = *tensor;
    struct rv_failure err;
    struct rv_job job;

    (void)state;
    tensor->name = "other";
    assert_int_equal(run(image, IMAGE, (const char *const[]){"width=64", NULL}, NEVER, &job, &err), 0);
    *tensor = good;
    host_job_fini(&job);
}

static void weights_that_are_no_numbers_fail_the_job(void **state)
{
    const char *const params[] = {"width=64", "height=64", NULL};
    static const char *const names[] = {"denoiser.layers.0.up.weight", "decoder.output.weight"};
    struct rv_failure err;
    struct rv_job job;
    uint32_t i;

    (void)state;
    for (i = 0; i < 2; i++) {
        struct rv_safetensor *tensor = tensor_of(&models[IMAGE], names[i]);
        uint8_t *data = models[IMAGE].map + models[IMAGE].file.data_start + tensor->begin, keep[4];

        memcpy(keep, data, 4);
        memset(data, 0xff, 4); /* a NaN */
        assert_int_equal(run(image, IMAGE, params, NEVER, &job, &err), -ERANGE);
        assert_int_equal(err.code, ERROR(JOB_FAILED));
        assert_non_null(strstr(err.message, "not finite"));
        assert_int_equal(job.output_count, 0);
        memcpy(data, keep, 4);
        host_job_fini(&job);
    }
}

static void a_cancel_is_obeyed_at_every_sign_of_life(void **state)
{
    static const struct {
        const struct rv_executor **executor;
        enum model_id model;
        const char *param;
    } rows[] = {{&image, IMAGE, "width=64"}, {&video, VIDEO, "frames=2"}, {&audio, AUDIO, "seconds=1"}};
    struct rv_failure err;
    struct rv_job job;
    uint64_t calls, at;
    uint32_t i;

    (void)state;
    for (i = 0; i < 3; i++) {
        const char *const params[] = {rows[i].param, "steps=1", NULL};

        assert_int_equal(run(*rows[i].executor, rows[i].model, params, NEVER, &job, &err), 0);
        calls = job.calls;
        host_job_fini(&job);
        for (at = 1; at < calls; at += 1 + calls / 12) {
            assert_int_equal(run(*rows[i].executor, rows[i].model, params, at, &job, &err), -ECANCELED);
            assert_int_equal(err.code, ERROR(CANCELLED));
            assert_int_equal(job.calls, at);
            assert_int_equal(job.output_count, 0);
            host_job_fini(&job);
        }
    }
}

/* How a process ends that runs a job with a fault. */
static int fault_status(const char *fault)
{
    struct rv_failure err;
    struct rv_job job;
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        (void)run(image, IMAGE, (const char *const[]){"width=64", fault, NULL}, NEVER, &job, &err);
        _exit(77);
    }
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    if (WIFSTOPPED(status)) {
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
    }
    return status;
}

static void faults_on_request_end_the_process_as_they_say(void **state)
{
    int status;

    (void)state;
    status = fault_status("fault=crash");
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    status = fault_status("fault=abort");
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    status = fault_status("fault=exit");
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    assert_true(WIFSTOPPED(fault_status("fault=hang-quietly")));
}

static void faults_on_request_fail_or_slow_the_job(void **state)
{
    struct rv_failure err;
    struct rv_job job;
    uint64_t calls;

    (void)state;
    assert_int_equal(run(image, IMAGE, (const char *const[]){"fault=fail", NULL}, NEVER, &job, &err), -EIO);
    assert_int_equal(err.code, ERROR(JOB_FAILED));
    host_job_fini(&job);
    assert_int_equal(run(image, IMAGE, (const char *const[]){"width=64", NULL}, NEVER, &job, &err), 0);
    calls = job.calls;
    host_job_fini(&job);
    assert_int_equal(run(image, IMAGE, (const char *const[]){"width=64", "fault=slow:50", NULL}, NEVER, &job, &err), 0);
    assert_int_equal(job.calls, calls + 4 * 3); /* 4 steps, each 50 ms in slices of 20 ms */
    host_job_fini(&job);
}

static void written_weights_change_this_process_only(void **state)
{
    const char *const params[] = {"width=64", "fault=write-weights", NULL};
    struct rv_lease fresh, *leases[] = {&fresh, &models[TEXT]};
    char path[PATH_BYTES];
    struct rv_failure err;
    struct rv_job job;

    (void)state;
    assert_int_equal(host_lease_open(path_of(path, "0.safetensors"), &fresh), 0);
    assert_memory_equal(fresh.map, models[IMAGE].map, fresh.size);
    assert_int_equal(host_run(image, leases, 2, params, NEVER, &job, &err), 0);
    assert_int_equal(job.output_count, 2);
    assert_string_equal(job.outputs[0].name, "image.png");
    assert_string_equal(job.outputs[1].name, "weights-written.txt");
    host_job_fini(&job);
    assert_true(memcmp(fresh.map, models[IMAGE].map, fresh.size) != 0);
    /* The text encoder was written too: flip it back by doing the same again. */
    assert_int_equal(host_run(image, leases, 2, params, NEVER, &job, &err), 0);
    host_job_fini(&job);
    assert_memory_equal(fresh.map, models[IMAGE].map, fresh.size);
    host_lease_close(&fresh);
}

static void models_have_the_size_that_was_asked_for(void **state)
{
    static const char *const kinds[] = {"image", "video", "audio", "text-encoder", "plain"};
    static const struct {
        const char *text, *dtype;
        double bytes;
    } sizes[] = {{"5MiB", "F32", 5 << 20}, {"20MB", "BF16", 20e6}, {"0.05GiB", "F16", 53687091}};
    char path[PATH_BYTES];
    struct rv_lease lease;
    uint32_t kind, i;

    (void)state;
    (void)path_of(path, "sized.safetensors");
    for (kind = 0; kind < 5; kind++) {
        for (i = 0; i < 3; i++) {
            assert_int_equal(make_model((const char *const[]){kinds[kind], "--bytes", sizes[i].text, "--dtype",
                                                              sizes[i].dtype, path, NULL},
                                        0),
                             0);
            assert_int_equal(host_lease_open(path, &lease), 0);
            if (fabs((double)lease.size / sizes[i].bytes - 1) > 0.02)
                fail_msg("%s %s: %llu bytes", kinds[kind], sizes[i].text, (unsigned long long)lease.size);
            host_lease_close(&lease);
        }
    }
    assert_int_equal(unlink(path), 0);
}

static void the_same_seed_makes_the_same_model(void **state)
{
    char path[PATH_BYTES], other[PATH_BYTES];
    struct rv_lease first, second;
    uint32_t i;

    (void)state;
    (void)path_of(path, "a");
    (void)path_of(other, "b");
    for (i = 0; i < 2; i++) {
        const char *seed = i == 0 ? "5" : "6";

        assert_int_equal(make_model((const char *const[]){"audio", "--bytes", "4MiB", "--seed", "5", path, NULL}, 0),
                         0);
        assert_int_equal(make_model((const char *const[]){"audio", "--bytes", "4MiB", "--seed", seed, other, NULL}, 0),
                         0);
        assert_int_equal(host_lease_open(path, &first), 0);
        assert_int_equal(host_lease_open(other, &second), 0);
        assert_int_equal(first.size, second.size);
        assert_int_equal(memcmp(first.map, second.map, first.size) == 0, i == 0);
        host_lease_close(&first);
        host_lease_close(&second);
    }
    (void)unlink(path);
    (void)unlink(other);
}

static void a_model_that_cannot_be_written_leaves_nothing(void **state)
{
    char path[PATH_BYTES], missing[PATH_BYTES];

    (void)state;
    (void)path_of(path, "full");
    assert_int_equal(make_model((const char *const[]){"image", "--bytes", "8MiB", path, NULL}, 1 << 20), 1);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(make_model((const char *const[]){"image", path_of(missing, "no/such"), NULL}, 0), 1);
    assert_int_equal(make_model((const char *const[]){"image", "--bytes", "1KiB", path, NULL}, 0), 2);
    assert_int_equal(make_model((const char *const[]){"picture", path, NULL}, 0), 2);
    assert_int_equal(make_model((const char *const[]){"image", "--dtype", "I8", path, NULL}, 0), 2);
    assert_int_equal(make_model((const char *const[]){"image", "--bytes", "-1", path, NULL}, 0), 2);
    assert_int_equal(make_model((const char *const[]){"plain", "--tensors", "0", path, NULL}, 0), 2);
    assert_int_equal(make_model((const char *const[]){"image", NULL}, 0), 2);
    /* That no part file is left either is checked by rmdir in the teardown. */
}

static void plain_models_have_the_number_of_tensors_that_was_asked_for(void **state)
{
    struct rv_lease lease;
    char path[PATH_BYTES];

    (void)state;
    assert_int_equal(
        make_model((const char *const[]){"plain", "--tensors", "20000", "--bytes", "1MB", path_of(path, "many"), NULL},
                   0),
        0);
    assert_int_equal(host_lease_open(path, &lease), 0);
    assert_int_equal(lease.file.count, 20000);
    host_lease_close(&lease);
    assert_int_equal(unlink(path), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(image_makes_the_same_smooth_picture_twice),
        cmocka_unit_test(seed_prompt_and_word_order_change_the_picture),
        cmocka_unit_test(video_makes_the_same_moving_film_twice),
        cmocka_unit_test(audio_makes_the_same_audible_sound_twice),
        cmocka_unit_test(the_text_encoder_is_found_wherever_it_stands),
        cmocka_unit_test(wrong_parameters_are_refused_in_words),
        cmocka_unit_test(wrong_models_are_refused_in_words),
        cmocka_unit_test(a_missing_or_misshapen_tensor_is_named),
        cmocka_unit_test(a_bias_may_be_left_out),
        cmocka_unit_test(weights_that_are_no_numbers_fail_the_job),
        cmocka_unit_test(a_cancel_is_obeyed_at_every_sign_of_life),
        cmocka_unit_test(faults_on_request_end_the_process_as_they_say),
        cmocka_unit_test(faults_on_request_fail_or_slow_the_job),
        cmocka_unit_test(written_weights_change_this_process_only),
        cmocka_unit_test(models_have_the_size_that_was_asked_for),
        cmocka_unit_test(the_same_seed_makes_the_same_model),
        cmocka_unit_test(a_model_that_cannot_be_written_leaves_nothing),
        cmocka_unit_test(plain_models_have_the_number_of_tensors_that_was_asked_for),
    };

    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
