/*
 * The audio executor: a prompt becomes a WAV file, 16 bit, mono.
 *
 * The decoder gives loudness curves of a note's partials at the full sample rate; an oscillator bank sounds them. The
 * notes follow the latent: each RV_NOTE_LATENTS values choose one of a pentatonic scale.
 */
#include <errno.h>
#include <math.h>
#include <sndfile.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "pipeline.h"
#include "rpc.pb-c.h"

#define TWO_PI 6.28318530717958647692
#define NOTE_LATENTS 16u /* 0.256 s */
#define PEAK 0.7f        /* of full scale: 3 dB below */
#define LOWEST_HZ 164.81 /* E3 */
#define DECAY 3.0f       /* over one note, as the exponent of e */
#define ATTACK_SAMPLES 160u
#define HEADER_ROOM 4096u

static const struct rv_param_rule rules[] = {
    RV_PARAM_RULES_COMMON,
    {RV_PARAM_SECONDS, "seconds", 1, 30, 1, 4},
};

static const uint8_t scale[] = {0, 2, 4, 7, 9, 12, 14, 16}; /* semitones */
#define SCALE_NOTES (sizeof(scale) / sizeof(scale[0]))

/* The pitch of the note at a place of the latent, in Hz: by the mean of its first channel. */
static double note_hz(const float *latent, uint32_t width, uint32_t note)
{
    uint32_t first = note * NOTE_LATENTS, last = first + NOTE_LATENTS < width ? first + NOTE_LATENTS : width, i;
    float sum = 0, place;

    for (i = first; i < last; i++)
        sum += latent[i];
    place = 0.5f + 0.5f * tanhf(sum / (float)(last - first)); /* 0 to 1 */
    i = (uint32_t)(place * (float)SCALE_NOTES);
    i = i < SCALE_NOTES ? i : SCALE_NOTES - 1;
    return LOWEST_HZ * pow(2, scale[i] / 12.0);
}

static float envelope(uint32_t sample, uint32_t samples)
{
    float attack = sample < ATTACK_SAMPLES ? (float)sample / ATTACK_SAMPLES : 1;
    float release = samples - sample < ATTACK_SAMPLES ? (float)(samples - sample) / ATTACK_SAMPLES : 1;

    return attack * release * expf(-DECAY * (float)sample / (float)samples);
}

/* loudness[RV_SOUND_PARTIALS][width x RV_SOUND_SCALE] -> sound[samples]. */
static int oscillate(struct rv_run *run, const float *latent, uint32_t width, const float *loudness, uint32_t samples,
                     float *sound)
{
    const uint32_t note_samples = NOTE_LATENTS * RV_SOUND_SCALE;
    size_t stride = (size_t)width * RV_SOUND_SCALE;
    uint32_t i, partial;
    double phase = 0, step = 0;
    int r;

    for (i = 0; i < samples; i++) {
        float sum = 0;

        if (i % note_samples == 0) {
            if ((r = rv_run_advance(run, 0)) < 0)
                return r;
            step = TWO_PI * note_hz(latent, width, i / note_samples) / RV_SOUND_RATE;
        }
        for (partial = 0; partial < RV_SOUND_PARTIALS; partial++) {
            double angle = phase * (partial + 1);

            if (step * (partial + 1) > TWO_PI / 2) /* above half the sample rate it would fold back */
                break;
            sum += (1 + tanhf(loudness[partial * stride + i])) * sinf((float)angle) / (float)(partial + 1);
        }
        sound[i] = sum * envelope(i % note_samples, note_samples);
        phase = fmod(phase + step, TWO_PI);
    }
    return 0;
}

static void loudness_even_out(float *sound, uint32_t samples)
{
    float most = 0;
    uint32_t i;

    for (i = 0; i < samples; i++)
        most = fabsf(sound[i]) > most ? fabsf(sound[i]) : most;
    for (i = 0; i < samples && most > 0; i++)
        sound[i] *= PEAK / most;
}

/* A file in memory, for libsndfile. */
struct memory_file {
    uint8_t *data;
    sf_count_t size, room, place;
};

static sf_count_t file_length(void *context)
{
    return ((struct memory_file *)context)->size;
}

static sf_count_t file_seek(sf_count_t offset, int whence, void *context)
{
    struct memory_file *file = context;
    sf_count_t base = whence == SEEK_CUR ? file->place : whence == SEEK_END ? file->size : 0;

    if (base + offset < 0 || base + offset > file->room)
        return -1;
    return file->place = base + offset;
}

static sf_count_t file_read(void *to, sf_count_t count, void *context)
{
    struct memory_file *file = context;

    count = file->place >= file->size ? 0 : count < file->size - file->place ? count : file->size - file->place;
    memcpy(to, file->data + file->place, (size_t)count);
    file->place += count;
    return count;
}

static sf_count_t file_write(const void *from, sf_count_t count, void *context)
{
    struct memory_file *file = context;

    count = count < file->room - file->place ? count : file->room - file->place;
    memcpy(file->data + file->place, from, (size_t)count);
    file->place += count;
    file->size = file->place > file->size ? file->place : file->size;
    return count;
}

static sf_count_t file_tell(void *context)
{
    return ((struct memory_file *)context)->place;
}

static int wav_add(struct rv_run *run, const float *sound, uint32_t samples)
{
    SF_VIRTUAL_IO calls = {file_length, file_seek, file_read, file_write, file_tell};
    SF_INFO info = {.samplerate = RV_SOUND_RATE, .channels = 1, .format = SF_FORMAT_WAV | SF_FORMAT_PCM_16};
    struct memory_file file = {.room = (sf_count_t)samples * 2 + HEADER_ROOM};
    SNDFILE *wav;
    int r;

    file.data = calloc(1, (size_t)file.room);
    if (!file.data)
        return rv_run_no_memory(run, "the WAV file");
    wav = sf_open_virtual(&calls, SFM_WRITE, &info, &file);
    if (!wav)
        r = rv_fail(run->err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, "libsndfile: %s", sf_strerror(NULL));
    else if (sf_writef_float(wav, sound, samples) != samples)
        r = rv_fail(run->err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, "libsndfile: %s", sf_strerror(wav));
    else
        r = 0;
    if (wav && sf_close(wav) != 0 && r == 0) /* writes the sizes into the header */
        r = rv_fail(run->err, EIO, RESVISOR__V1__ERROR_CODE__ERROR_JOB_FAILED, "libsndfile cannot end the file");
    if (r == 0)
        r = rv_run_add_output(run, "audio.wav", "audio/wav", file.data, (uint64_t)file.size);
    free(file.data);
    return r;
}

static int audio_run(struct rv_execution *execution, struct rv_failure *err)
{
    struct rv_pipeline pipeline = {0};
    struct rv_request request;
    struct rv_geometry geometry = {RV_SOUND_LATENTS, 1, 1, 0, 1, 1, RV_SOUND_PATCH};
    float *latent = NULL, *loudness = NULL, *sound = NULL;
    uint32_t samples, i;
    int r;

    if ((r = rv_request_read(execution->job, rules, sizeof(rules) / sizeof(rules[0]), err, &request)) < 0)
        return r;
    samples = (uint32_t)request.values[RV_PARAM_SECONDS] * RV_SOUND_RATE;
    geometry.width = samples / (RV_SOUND_SCALE * RV_SOUND_PATCH) + 1; /* patches, rounded up */
    geometry.width *= RV_SOUND_PATCH;
    if ((r = rv_pipeline_init(&pipeline, execution, &request, &geometry, &rv_sound_decoder, 1, err)) < 0 ||
        (r = rv_pipeline_denoise(&pipeline, &request, &latent)) < 0)
        goto out;
    rv_run_describe(&pipeline.run, "decoding the sound");
    if ((r = rv_decode(&pipeline.run, &pipeline.decoder, latent, 1, geometry.width, &loudness)) < 0)
        goto out;
    if (!(sound = malloc(samples * sizeof(float)))) {
        r = rv_run_no_memory(&pipeline.run, "the sound");
        goto out;
    }
    for (i = 0; i < RV_SOUND_PARTIALS; i++)
        rv_floats_standardise(loudness + (size_t)i * geometry.width * RV_SOUND_SCALE,
                              (size_t)geometry.width * RV_SOUND_SCALE);
    if ((r = oscillate(&pipeline.run, latent, geometry.width, loudness, samples, sound)) < 0)
        goto out;
    loudness_even_out(sound, samples);
    r = wav_add(&pipeline.run, sound, samples);
out:
    free(latent);
    free(loudness);
    free(sound);
    rv_pipeline_fini(&pipeline);
    return r;
}

extern const struct rv_executor resvisor_executor;
__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "audio",
    .version = RV_VERSION,
    .start = rv_executor_start,
    .run = audio_run,
};
