#include "numbers.h"

#include <math.h>
#include <string.h>

/* A half's exponent is 15 too large, a float's 127: multiplying by this moves a shifted half to the right exponent,
 * also when it is subnormal. */
#define HALF_TO_FLOAT 0x1p112f
#define SMALLEST_NORMAL_HALF 0x38800000u /* 2^-14 as a float's bits */
#define TWO_PI 6.28318530717958647692f

void rv_floats_from_bf16(float *out, const uint16_t *in, size_t count)
{
    uint32_t bits;
    size_t i;

    for (i = 0; i < count; i++) {
        bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, sizeof(bits));
    }
}

void rv_floats_from_f16(float *out, const uint16_t *in, size_t count)
{
    uint32_t bits, special;
    float value;
    size_t i;

    for (i = 0; i < count; i++) {
        special = (in[i] & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0; /* infinity and NaN keep the largest exponent */
        bits = (uint32_t)(in[i] & 0x7fffu) << 13;
        memcpy(&value, &bits, sizeof(bits));
        value *= HALF_TO_FLOAT;
        memcpy(&bits, &value, sizeof(bits));
        bits |= special | (uint32_t)(in[i] & 0x8000u) << 16;
        memcpy(&out[i], &bits, sizeof(bits));
    }
}

void rv_floats_to_bf16(uint16_t *out, const float *in, size_t count)
{
    uint32_t bits;
    size_t i;

    for (i = 0; i < count; i++) {
        memcpy(&bits, &in[i], sizeof(bits));
        out[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
}

void rv_floats_to_f16(uint16_t *out, const float *in, size_t count)
{
    uint32_t bits, sign, normal, small;
    float value;
    size_t i;

    for (i = 0; i < count; i++) {
        memcpy(&bits, &in[i], sizeof(bits));
        sign = bits >> 16 & 0x8000u;
        bits &= 0x7fffffffu;
        normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13;
        /* Subnormal: adding 0.5 leaves multiples of 2^-24, rounded, in the low bits. */
        memcpy(&value, &bits, sizeof(bits));
        value += 0.5f;
        memcpy(&small, &value, sizeof(small));
        small -= 0x3f000000u;
        out[i] = (uint16_t)(sign | (bits < SMALLEST_NORMAL_HALF ? small : normal));
    }
}

uint64_t rv_mix64(uint64_t value)
{
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

uint64_t rv_random_next(struct rv_random *random)
{
    random->state += UINT64_C(0x9e3779b97f4a7c15);
    return rv_mix64(random->state);
}

float rv_random_uniform(struct rv_random *random)
{
    return (float)(rv_random_next(random) >> 40) * 0x1p-24f;
}

float rv_random_normal(struct rv_random *random)
{
    float radius = sqrtf(-2.0f * logf(1.0f - rv_random_uniform(random)));

    return radius * cosf(TWO_PI * rv_random_uniform(random));
}

uint64_t rv_hash_text(const char *text, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    size_t i;

    for (i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}

void rv_floats_standardise(float *values, size_t count)
{
    double sum = 0, squares = 0, mean;
    float scale;
    size_t i;

    for (i = 0; i < count; i++)
        sum += values[i];
    mean = count ? sum / (double)count : 0;
    for (i = 0; i < count; i++)
        squares += ((double)values[i] - mean) * ((double)values[i] - mean);
    scale = squares > 0 ? (float)(1 / sqrt(squares / (double)count)) : 0;
    for (i = 0; i < count; i++)
        values[i] = (values[i] - (float)mean) * scale;
}

bool rv_floats_finite(const float *values, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++) {
        if (!isfinite(values[i]))
            return false;
    }
    return true;
}
