#include "common.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t bench_now_ns(void)
{
    struct timespec ts = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

struct bench_samples bench_samples_make(size_t capacity)
{
    struct bench_samples samples = {.ns = calloc(capacity ? capacity : 1, sizeof(uint64_t)), .capacity = capacity};

    if (!samples.ns)
        bench_fail("no memory for %zu samples", capacity);
    return samples;
}

void bench_samples_free(struct bench_samples *samples)
{
    free(samples->ns);
    *samples = (struct bench_samples){0};
}

void bench_sample(struct bench_samples *samples, uint64_t start_ns)
{
    if (samples->count < samples->capacity)
        samples->ns[samples->count++] = bench_now_ns() - start_ns;
}

static int compare(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

/* The smallest sample that `percent` of all do not exceed. */
static double percentile_us(const struct bench_samples *samples, unsigned percent)
{
    size_t i = (samples->count * percent + 99) / 100;

    return (double)samples->ns[i > 0 ? i - 1 : 0] / 1e3;
}

void bench_samples_print(const char *name, struct bench_samples *samples)
{
    if (samples->count == 0)
        bench_fail("no samples of %s", name);
    qsort(samples->ns, samples->count, sizeof(uint64_t), compare);
    (void)printf("\"%s\": {\"n\": %zu, \"p50\": %.2f, \"p99\": %.2f, \"min\": %.2f, \"max\": %.2f}", name,
                 samples->count, percentile_us(samples, 50), percentile_us(samples, 99), percentile_us(samples, 0),
                 percentile_us(samples, 100));
}

uint64_t bench_number(const char *text)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);

    if (n == 0 || *end != '\0')
        bench_fail("%s is not a whole number of 1 or more", text);
    return n;
}

void bench_fail(const char *format, ...)
{
    va_list list;

    va_start(list, format);
    (void)vfprintf(stderr, format, list);
    va_end(list);
    (void)fputc('\n', stderr);
    exit(1);
}
