/* What the benchmark programs share: time in nanoseconds, and samples printed as a JSON object. */
#ifndef BENCH_COMMON_H
#define BENCH_COMMON_H

#include <stddef.h>
#include <stdint.h>

/* Times of one kind; the array is the caller's. */
struct bench_samples {
    uint64_t *ns;
    size_t count, capacity;
};

uint64_t bench_now_ns(void);

/* Room for so many; ends the program when there is no memory. */
struct bench_samples bench_samples_make(size_t capacity);
void bench_samples_free(struct bench_samples *samples);

/* Counts the time since start_ns; samples beyond the capacity are dropped. */
void bench_sample(struct bench_samples *samples, uint64_t start_ns);

/* Sorts, and prints `"name": {"n": …, "p50": …, "p99": …, "min": …, "max": …}`, in microseconds. No comma, no newline.
 */
void bench_samples_print(const char *name, struct bench_samples *samples);

/* A whole number of 1 or more; ends the program with a message otherwise. */
uint64_t bench_number(const char *text);

/* "what: why" on stderr, then exit code 1. */
__attribute__((noreturn, format(printf, 1, 2))) void bench_fail(const char *format, ...);

#endif
