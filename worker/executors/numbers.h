/* Plain number work: conversions of 2-byte floats, and random numbers that are the same on every machine. No state. */
#ifndef RV_EXECUTOR_NUMBERS_H
#define RV_EXECUTOR_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exact. out and in must not overlap. */
void rv_floats_from_bf16(float *out, const uint16_t *in, size_t count);
void rv_floats_from_f16(float *out, const uint16_t *in, size_t count);

/* Rounds to nearest, ties to even. Input must be finite; F16: below 65504. */
void rv_floats_to_bf16(uint16_t *out, const float *in, size_t count);
void rv_floats_to_f16(uint16_t *out, const float *in, size_t count);

/* splitmix64's mixing: a well-spread 64-bit number for each input. */
uint64_t rv_mix64(uint64_t value);

/* A stream of random numbers; any start value is good. */
struct rv_random {
    uint64_t state;
};
uint64_t rv_random_next(struct rv_random *random);
float rv_random_uniform(struct rv_random *random); /* 0 <= x < 1 */
float rv_random_normal(struct rv_random *random);  /* mean 0, variance 1 */

/* A number for a text (FNV-1a), for seeds. */
uint64_t rv_hash_text(const char *text, size_t length);

/* Scales values to mean 0 and variance 1 (a constant becomes 0). */
void rv_floats_standardise(float *values, size_t count);

bool rv_floats_finite(const float *values, size_t count);

#endif
