/* The executors' building blocks against plain arithmetic: number formats, products, convolutions, noise of all kinds.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "convolution.h"
#include "executor_host.h"
#include "numbers.h"

static float half_by_definition(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float sign = bits & 0x8000 ? -1.0f : 1.0f;

    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    return exponent ? sign * ldexpf((float)(1024 + fraction), exponent - 25) : sign * ldexpf((float)fraction, -24);
}

static void every_f16_is_read_exactly_and_written_back(void **state)
{
    uint32_t i;

    (void)state;
    for (i = 0; i < 65536; i++) {
        uint16_t in = (uint16_t)i, back = 0;
        float value, expected = half_by_definition(in);

        rv_floats_from_f16(&value, &in, 1);
        if (isnan(expected)) {
            assert_true(isnan(value));
            continue;
        }
        assert_true(value == expected && signbit(value) == signbit(expected));
        if (isfinite(value)) {
            rv_floats_to_f16(&back, &value, 1);
            assert_int_equal(back, in);
        }
    }
}

static void every_bf16_is_read_exactly_and_written_back(void **state)
{
    uint32_t i;

    (void)state;
    for (i = 0; i < 65536; i++) {
        uint16_t in = (uint16_t)i, back = 0;
        float value;

        rv_floats_from_bf16(&value, &in, 1);
        if (!isfinite(value))
            continue;
        assert_true(value == ldexpf(value, 0));
        rv_floats_to_bf16(&back, &value, 1);
        assert_int_equal(back, in);
    }
}

static void writing_2_byte_floats_rounds_to_the_nearest(void **state)
{
    const float third = 1.0f / 3, tiny = 3e-6f;
    uint16_t half, brain;
    float back;

    (void)state;
    rv_floats_to_f16(&half, &third, 1);
    assert_int_equal(half, 0x3555);
    rv_floats_to_bf16(&brain, &third, 1);
    assert_int_equal(brain, 0x3eab);
    rv_floats_to_f16(&half, &tiny, 1); /* subnormal: steps of 2^-24 */
    rv_floats_from_f16(&back, &half, 1);
    assert_true(fabsf(back - tiny) <= ldexpf(1, -25));
}

struct bench {
    struct rv_job job;
    struct rv_execution execution;
    struct rv_run run;
    struct rv_failure err;
};

static void bench_init(struct bench *b)
{
    memset(b, 0, sizeof(*b));
    b->execution.job = &b->job;
    b->run.execution = &b->execution;
    b->run.err = &b->err;
}

static float *floats_random(size_t count, uint64_t seed)
{
    struct rv_random random = {seed};
    float *values = malloc(count * sizeof(float));
    size_t i;

    assert_non_null(values);
    for (i = 0; i < count; i++)
        values[i] = rv_random_normal(&random);
    return values;
}

static uint32_t clamped(int64_t i, uint32_t size)
{
    return i < 0 ? 0 : i >= size ? size - 1 : (uint32_t)i;
}

/* One output value by the definition of a convolution. */
static double convolution_at(const struct rv_convolution *c, const float *in, uint32_t height, uint32_t width,
                             uint32_t output, uint32_t y, uint32_t x)
{
    const float *weight = (const float *)c->weight.data + (size_t)output * c->weight.columns;
    double sum = ((const float *)c->bias.data)[output];
    uint32_t i, ky, kx;

    for (i = 0; i < c->inputs; i++) {
        for (ky = 0; ky < c->kernel_height; ky++) {
            for (kx = 0; kx < c->kernel_width; kx++) {
                uint32_t from_y = clamped((int64_t)y + ky - c->kernel_height / 2, height);
                uint32_t from_x = clamped((int64_t)x + kx - c->kernel_width / 2, width);

                sum += (double)*weight++ * in[((size_t)i * height + from_y) * width + from_x];
            }
        }
    }
    return sum;
}

static void convolution_check(uint32_t inputs, uint32_t outputs, uint32_t height, uint32_t width, uint32_t tall,
                              uint32_t wide, bool relu)
{
    size_t plane = (size_t)height * width, checked;
    float *in = floats_random(inputs * plane, 1), *bias = floats_random(outputs, 2);
    float *weight = floats_random((size_t)outputs * inputs * tall * wide, 3), *out = malloc(outputs * plane * 4);
    struct rv_convolution c = {
        {RV_F32, outputs, inputs * tall * wide, weight}, {RV_F32, outputs, 1, bias}, inputs, outputs, tall, wide};
    struct bench b;

    bench_init(&b);
    assert_int_equal(rv_convolve(&b.run, &c, in, height, width, relu, out), 0);
    for (checked = 0; checked < outputs * plane; checked += 7) {
        uint32_t y = (uint32_t)(checked % plane / width), x = (uint32_t)(checked % width);
        double expected = convolution_at(&c, in, height, width, (uint32_t)(checked / plane), y, x);

        expected = relu && expected < 0 ? 0 : expected;
        assert_true(fabs(out[checked] - expected) < 1e-3);
    }
    rv_run_fini(&b.run);
    free(in);
    free(bias);
    free(weight);
    free(out);
}

static void convolutions_equal_their_definition(void **state)
{
    (void)state;
    convolution_check(3, 5, 7, 9, 3, 3, false);
    convolution_check(16, 8, 100, 70, 3, 3, true);  /* several strips of whole rows */
    convolution_check(8, 4, 1, 20000, 1, 7, false); /* one row in several strips */
    convolution_check(2, 2, 1, 3, 1, 7, true);      /* kernel wider than the row */
    convolution_check(1, 1, 1, 1, 3, 3, false);
}

/* rows x columns weights of a dtype, and their values. */
static void product_check(enum rv_dtype dtype, uint32_t rows, uint32_t columns, uint32_t count)
{
    size_t size = (size_t)rows * columns, i;
    float *values = floats_random(size, 4), *x = floats_random((size_t)count * columns, 5);
    float *out = floats_random((size_t)count * rows, 6), *before = malloc((size_t)count * rows * sizeof(float));
    uint16_t *small = malloc(size * sizeof(uint16_t));
    struct rv_weight weight = {dtype, rows, columns, dtype == RV_F32 ? (void *)values : (void *)small};
    struct bench b;
    uint32_t row, line, k;

    bench_init(&b);
    memcpy(before, out, (size_t)count * rows * sizeof(float));
    if (dtype == RV_BF16) {
        rv_floats_to_bf16(small, values, size);
        rv_floats_from_bf16(values, small, size);
    } else if (dtype == RV_F16) {
        rv_floats_to_f16(small, values, size);
        rv_floats_from_f16(values, small, size);
    }
    assert_int_equal(rv_weight_multiply(&b.run, &weight, x, count, 0.5f, 1, out), 0);
    for (i = 0; i < (size_t)count * rows; i += 13) {
        double sum = 0;

        line = (uint32_t)(i / rows);
        row = (uint32_t)(i % rows);
        for (k = 0; k < columns; k++)
            sum += (double)values[(size_t)row * columns + k] * x[(size_t)line * columns + k];
        assert_true(fabs(out[i] - (before[i] + 0.5 * sum)) < 1e-2);
    }
    rv_run_fini(&b.run);
    free(values);
    free(x);
    free(out);
    free(before);
    free(small);
}

static void products_equal_their_definition_in_every_dtype(void **state)
{
    (void)state;
    product_check(RV_F32, 300, 77, 5);
    product_check(RV_BF16, 1500, 700, 3); /* more than one panel */
    product_check(RV_F16, 1500, 700, 3);
    product_check(RV_BF16, 1, 1, 1);
}

static void standardised_numbers_have_mean_0_and_variance_1(void **state)
{
    float *values = floats_random(10000, 7), same[3] = {5, 5, 5};
    double sum = 0, squares = 0;
    uint32_t i;

    (void)state;
    for (i = 0; i < 10000; i++)
        values[i] = 3 * values[i] + 100;
    rv_floats_standardise(values, 10000);
    for (i = 0; i < 10000; i++) {
        sum += values[i];
        squares += (double)values[i] * values[i];
    }
    assert_true(fabs(sum / 10000) < 1e-4 && fabs(squares / 10000 - 1) < 1e-3);
    rv_floats_standardise(same, 3);
    assert_true(same[0] == 0 && same[2] == 0);
    free(values);
}

static void faults_are_read_strictly(void **state)
{
    static const char *const bad[] = {"slow", "slow:", "slow:-1", "slow:1x", "slow: 1", "slow:99999999999", "Crash"};
    struct rv_fault fault;
    uint32_t i;

    (void)state;
    for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(rv_fault_parse(bad[i], &fault), -EINVAL);
    assert_int_equal(rv_fault_parse("slow:250", &fault), 0);
    assert_int_equal(fault.kind, RV_FAULT_SLOW);
    assert_int_equal(fault.milliseconds, 250);
    assert_int_equal(rv_fault_parse("write-weights", &fault), 0);
    assert_int_equal(fault.kind, RV_FAULT_WRITE_WEIGHTS);
    assert_int_equal(rv_fault_parse("", &fault), 0);
    assert_int_equal(fault.kind, RV_FAULT_NONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_f16_is_read_exactly_and_written_back),
        cmocka_unit_test(every_bf16_is_read_exactly_and_written_back),
        cmocka_unit_test(writing_2_byte_floats_rounds_to_the_nearest),
        cmocka_unit_test(convolutions_equal_their_definition),
        cmocka_unit_test(products_equal_their_definition_in_every_dtype),
        cmocka_unit_test(standardised_numbers_have_mean_0_and_variance_1),
        cmocka_unit_test(faults_are_read_strictly),
    };

    rv_matrix_setup();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
