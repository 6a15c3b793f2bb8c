#include "model_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "numbers.h"

#define HEADER_MAX 100000000u /* what the reference reader accepts, in bytes */
#define HEADER_ALIGN 8u
#define CHUNK (1u << 20) /* numbers per write */
#define LANES 16u        /* independent generators, so that the compiler can use vectors */
#define SQRT_3 1.7320508f
#define KERNEL_NOISE 0.35f

struct writer {
    const struct rv_plan *plan;
    const volatile sig_atomic_t *stop;
    int fd;
    float *numbers;  /* CHUNK */
    uint16_t *small; /* CHUNK, for 2-byte dtypes */
};

static int write_all(const struct writer *writer, const void *data, size_t length)
{
    const char *at = data;
    ssize_t n;

    while (length > 0) {
        if (writer->stop && *writer->stop)
            return -ECANCELED;
        n = write(writer->fd, at, length);
        if (n < 0 && errno != EINTR)
            return -errno;
        if (n > 0) {
            at += n;
            length -= (size_t)n;
        }
    }
    return 0;
}

static void header_tensor(FILE *out, const struct rv_plan *plan, const struct rv_plan_tensor *tensor, uint64_t *offset)
{
    uint64_t end = *offset + rv_plan_elements(tensor) * plan->element;
    char name[RV_PLAN_NAME_MAX];
    uint32_t i;

    (void)fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", rv_plan_name(tensor, name), plan->request.dtype);
    for (i = 0; i < tensor->rank; i++)
        (void)fprintf(out, "%s%" PRIu64, i ? "," : "", tensor->shape[i]);
    (void)fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", *offset, end);
    *offset = end;
}

/* The length and the header, in memory: at most HEADER_MAX. */
static int header_make(const struct rv_plan *plan, char **ret_header, size_t *ret_length, uint64_t *ret_data)
{
    uint64_t offset = 0, i, length;
    size_t size = 0;
    char *header = NULL;
    FILE *out = open_memstream(&header, &size);
    bool bad;

    if (!out)
        return -ENOMEM;
    (void)fprintf(out, "%8s", ""); /* the length comes here */
    (void)fprintf(out,
                  "{\"__metadata__\":{\"generator\":\"resvisor-make-model\",\"kind\":\"%s\",\"seed\":\"%" PRIu64 "\"}",
                  plan->request.kind, plan->request.seed);
    for (i = 0; i < plan->count; i++)
        header_tensor(out, plan, &plan->tensors[i], &offset);
    (void)fputc('}', out);
    while (ftell(out) % HEADER_ALIGN != 0)
        (void)fputc(' ', out);
    bad = ferror(out);
    if (fclose(out) != 0 || bad) {
        free(header);
        return -ENOMEM;
    }
    length = size - sizeof(length);
    if (length > HEADER_MAX) {
        free(header);
        return -E2BIG;
    }
    for (i = 0; i < sizeof(length); i++)
        header[i] = (char)(length >> (8 * i)); /* little endian */
    *ret_header = header;
    *ret_length = size;
    *ret_data = offset;
    return 0;
}

static void lanes_seed(uint32_t lanes[LANES], uint64_t seed)
{
    struct rv_random random = {seed};
    uint32_t i;

    for (i = 0; i < LANES; i++)
        lanes[i] = (uint32_t)(rv_random_next(&random) >> 32) | 1; /* xorshift must not start at 0 */
}

static uint32_t lane_next(uint32_t x)
{
    x ^= x << 13;
    x ^= x >> 17;
    return x ^ x << 5;
}

/* count is rounded up to a multiple of LANES; CHUNK is one. */
static void fill_uniform(uint32_t lanes[LANES], float *out, uint64_t count, float range)
{
    float scale = range * 0x1p-31f;
    uint32_t i, lane;

    for (i = 0; i < count; i += LANES) {
        for (lane = 0; lane < LANES; lane++) {
            lanes[lane] = lane_next(lanes[lane]);
            out[i + lane] = (float)(int32_t)lanes[lane] * scale;
        }
    }
}

static void fill_bits(uint32_t lanes[LANES], uint32_t *out, uint64_t count)
{
    uint32_t i, lane;

    for (i = 0; i < count; i += LANES) {
        for (lane = 0; lane < LANES; lane++)
            out[i + lane] = lanes[lane] = lane_next(lanes[lane]);
    }
}

/* The middle of the kernel counts most: a binomial window with a mean square of 1. */
static float window_at(uint32_t place, uint32_t size)
{
    static const float three[] = {0.7071f, 1.4142f, 0.7071f};
    static const float seven[] = {0.0870f, 0.5222f, 1.3055f, 1.7407f, 1.3055f, 0.5222f, 0.0870f};

    return size == 3 ? three[place] : size == 7 ? seven[place] : 1;
}

static float uniform_at(struct rv_random *random)
{
    return SQRT_3 * (2 * rv_random_uniform(random) - 1);
}

static void fill_kernel(const struct rv_plan_tensor *tensor, uint64_t seed, float *out)
{
    uint64_t width = tensor->shape[tensor->rank - 1], height = tensor->rank == 4 ? tensor->shape[2] : 1;
    uint64_t pairs = tensor->shape[0] * tensor->shape[1], pair, y, x;
    float gain = tensor->gain / sqrtf((float)(tensor->shape[1] * height * width));
    struct rv_random random = {seed};

    for (pair = 0; pair < pairs; pair++) {
        /* All taps of a pair have one sign and neighbours are alike, so the sum grows by the root of the taps: undo. */
        float strength = gain * uniform_at(&random) / sqrtf((float)(height * width));

        for (y = 0; y < height; y++) {
            for (x = 0; x < width; x++)
                *out++ = strength * (height > 1 ? window_at((uint32_t)y, (uint32_t)height) : 1) *
                             window_at((uint32_t)x, (uint32_t)width) +
                         KERNEL_NOISE * gain * uniform_at(&random);
        }
    }
}

static float ramp(uint32_t place, uint32_t size)
{
    return size > 1 ? 2 * ((float)place + 0.5f) / (float)size - 1 : 0;
}

static void fill_patch(const struct rv_plan *plan, const struct rv_plan_tensor *tensor, uint64_t seed, float *out)
{
    const uint32_t *patch = plan->patch;
    uint64_t width = tensor->shape[1], column;
    float gain = tensor->gain / sqrtf((float)width);
    struct rv_random random = {seed};
    uint32_t f, c, y, x;

    for (column = 0; column < width; column++) {
        for (c = 0; c < patch[1]; c++) {
            float level = gain * uniform_at(&random), slope_x = 0.4f * gain * uniform_at(&random);
            float slope_y = 0.4f * gain * uniform_at(&random), slope_f = 0.2f * gain * uniform_at(&random);

            for (f = 0; f < patch[0]; f++) {
                for (y = 0; y < patch[2]; y++) {
                    for (x = 0; x < patch[3]; x++) {
                        uint64_t row = (((uint64_t)f * patch[1] + c) * patch[2] + y) * patch[3] + x;

                        out[row * width + column] = level + slope_x * ramp(x, patch[3]) + slope_y * ramp(y, patch[2]) +
                                                    slope_f * ramp(f, patch[0]);
                    }
                }
            }
        }
    }
}

static int numbers_write(struct writer *writer, uint64_t count)
{
    const char *dtype = writer->plan->request.dtype;

    if (writer->plan->element == sizeof(float))
        return write_all(writer, writer->numbers, count * sizeof(float));
    if (strcmp(dtype, "BF16") == 0)
        rv_floats_to_bf16(writer->small, writer->numbers, count);
    else
        rv_floats_to_f16(writer->small, writer->numbers, count);
    return write_all(writer, writer->small, count * sizeof(uint16_t));
}

/* Tensors of any size, a chunk at a time. */
static int stream_write(struct writer *writer, const struct rv_plan_tensor *tensor, uint64_t seed)
{
    uint64_t left = rv_plan_elements(tensor), now, inputs = left / tensor->shape[0];
    float range = SQRT_3 * tensor->gain / sqrtf((float)inputs);
    uint32_t lanes[LANES];
    int r = 0;

    lanes_seed(lanes, seed);
    for (; r == 0 && left > 0; left -= now) {
        now = left < CHUNK ? left : CHUNK;
        if (tensor->fill == RV_FILL_BITS) {
            fill_bits(lanes, (uint32_t *)writer->numbers, now);
            r = write_all(writer, writer->numbers, now * writer->plan->element);
        } else {
            fill_uniform(lanes, writer->numbers, now, range);
            r = numbers_write(writer, now);
        }
    }
    return r;
}

static int tensor_write(struct writer *writer, const struct rv_plan_tensor *tensor)
{
    uint64_t elements = rv_plan_elements(tensor), seed;
    char name[RV_PLAN_NAME_MAX];

    (void)rv_plan_name(tensor, name);
    seed = rv_mix64(writer->plan->request.seed ^ rv_hash_text(name, strlen(name)));
    if (tensor->fill == RV_FILL_UNIFORM || tensor->fill == RV_FILL_BITS)
        return stream_write(writer, tensor, seed);
    if (elements > CHUNK)
        return -E2BIG;
    if (tensor->fill == RV_FILL_KERNEL)
        fill_kernel(tensor, seed, writer->numbers);
    else if (tensor->fill == RV_FILL_PATCH)
        fill_patch(writer->plan, tensor, seed, writer->numbers);
    else
        memset(writer->numbers, 0, elements * sizeof(float));
    return numbers_write(writer, elements);
}

static int content_write(struct writer *writer, const char *header, size_t header_length, uint64_t data)
{
    uint64_t i;
    int r;

    /* A full disk shows at once. Not every filesystem can do this, and those say so. */
    if (fallocate(writer->fd, 0, 0, (off_t)(header_length + data)) < 0 && errno != EOPNOTSUPP && errno != EINTR)
        return -errno;
    r = write_all(writer, header, header_length);
    for (i = 0; r == 0 && i < writer->plan->count; i++)
        r = tensor_write(writer, &writer->plan->tensors[i]);
    return r;
}

int rv_model_write(const struct rv_plan *plan, const char *path, const volatile sig_atomic_t *stop,
                   uint64_t *ret_file_bytes)
{
    struct writer writer = {.plan = plan, .stop = stop, .fd = -1};
    char temporary[PATH_MAX], *header = NULL;
    size_t header_length = 0;
    uint64_t data = 0;
    int r;

    if ((size_t)snprintf(temporary, sizeof(temporary), "%s.%d.part", path, (int)getpid()) >= sizeof(temporary))
        return -ENAMETOOLONG;
    if ((r = header_make(plan, &header, &header_length, &data)) < 0)
        return r;
    writer.numbers = malloc(CHUNK * sizeof(float));
    writer.small = malloc(CHUNK * sizeof(uint16_t));
    if (!writer.numbers || !writer.small) {
        r = -ENOMEM;
        goto out;
    }
    writer.fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (writer.fd < 0) {
        r = -errno;
        goto out;
    }
    r = content_write(&writer, header, header_length, data);
    if (close(writer.fd) < 0 && r == 0)
        r = -errno;
    if (r == 0 && rename(temporary, path) < 0)
        r = -errno;
    if (r < 0)
        (void)unlink(temporary);
    else
        *ret_file_bytes = header_length + data;
out:
    free(writer.numbers);
    free(writer.small);
    free(header);
    return r;
}
