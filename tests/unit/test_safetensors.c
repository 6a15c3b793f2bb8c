/* The header scanner: what it takes, what it refuses and where it says so, and that jansson agrees about what is JSON.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>
#include <jansson.h>

#include "clock.h"
#include "index.h"
#include "rpc.pb-c.h"
#include "safetensors.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static int parse_length(const char *header, uint64_t length, uint64_t data, struct rv_safetensors *ret,
                        struct rv_error *err)
{
    uint8_t *copy = malloc(length ? length : 1); /* exactly as long: a step too far is seen by the sanitizer */
    int r;

    memcpy(copy, header, length);
    r = rv_safetensors_parse(copy, length, 8 + length + data, ret, err);
    free(copy);
    return r;
}

static int parse(const char *header, uint64_t data, struct rv_safetensors *ret, struct rv_error *err)
{
    return parse_length(header, strlen(header), data, ret, err);
}

#define T(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end "]}"

static void test_order_and_contents(void **state)
{
    struct rv_safetensors st;
    struct rv_error err = {0};

    (void)state;
    assert_int_equal(
        parse("{" T("z", "F32", "2,3", "4", "28") ",\"__metadata__\": {\"k\" : \"v\\n\"} , " T(
                  "a\\u00e4\\ud83d\\ude00\\n", "U8", "4", "0",
                  "4") "," T("e2", "U8", "0", "4", "4") "," T("e1", "U8", "0", "4", "4") "," T("s", "BF16", "", "28",
                                                                                               "30") "}   \n",
              30, &st, &err),
        0);
    assert_int_equal(st.count, 5);
    assert_string_equal(st.tensors[0].name, "a\xc3\xa4\xf0\x9f\x98\x80\n");
    assert_string_equal(st.tensors[1].name, "e1"); /* empty ones by name */
    assert_string_equal(st.tensors[2].name, "e2");
    assert_string_equal(st.tensors[3].name, "z");
    assert_int_equal(st.tensors[3].rank, 2);
    assert_int_equal(st.tensors[3].shape[1], 3);
    assert_int_equal(st.tensors[4].rank, 0);
    assert_string_equal(st.metadata, "{\"k\":\"v\\n\"}");
    assert_int_equal(st.metadata_length, strlen(st.metadata));
    assert_int_equal(st.data_length, 30);
    rv_safetensors_fini(&st);
}

static const struct {
    const char *header;
    uint64_t data;
    const char *words; /* NULL = good */
} cases[] = {
    {"{}", 0, NULL},
    {"{ \t\r\n}", 0, NULL},
    {"{\"__metadata__\":{}}", 0, NULL},
    {"{" T("", "U8", "1", "0", "1") "}", 1, NULL},
    {"{" T("a", "U8", "1,1,1,1,1,1,1,1", "0", "1") "}", 1, NULL},
    {"{\"a\":{\"data_offsets\":[0,1],\"dtype\":\"U8\",\"shape\":[ 1 ]}}", 1, NULL},
    {"{\"a\":{\"\\u0064type\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, NULL},
    {"", 0, "byte 8"},
    {" {}", 0, "byte 8"},
    {"[]", 0, "'{' should be here"},
    {"{", 0, "it ends"},
    {"{}x", 0, "something follows"},
    {"{}{}", 0, "something follows"},
    {"{\"a\"}", 0, "':' should be here"},
    {"{\"a\":1}", 0, "'{' should be here"},
    {"{\"a\":{}}", 0, "no dtype"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 0, "no data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 0, "twice"},
    {"{\"a\":{\"dtype\":\"U8\",\"extra\":1}}", 0, "unknown key \"extra\""},
    {"{\"a\":{\"dtype\":8}}", 0, "'\"' should be here"},
    {"{" T("a", "U8", "1,1,1,1,1,1,1,1,1", "0", "1") "}", 1, "more than 8"},
    {"{" T("a", "U8", "-1", "0", "1") "}", 1, "whole number"},
    {"{" T("a", "U8", "1.0", "0", "1") "}", 1, "point or exponent"},
    {"{" T("a", "U8", "1e0", "0", "1") "}", 1, "point or exponent"},
    {"{" T("a", "U8", "01", "0", "1") "}", 1, "zero in front"},
    {"{" T("a", "U8", "18446744073709551616", "0", "1") "}", 1, "over 2^64"},
    {"{" T("a", "U8", "1,", "0", "1") "}", 1, "whole number"},
    {"{" T("a", "U8", "1", "0", "1,2") "}", 1, "more than 2"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "two numbers"},
    {"{" T("a", "U16", "9223372036854775808", "0", "0") "}", 0, "2^64"},
    {"{" T("a", "U8", "2", "0", "1") "}", 1, "takes 2 bytes"},
    {"{" T("a", "U8", "1", "1", "0") "}", 1, "takes 1 bytes"},
    {"{" T("a", "f32", "1", "0", "4") "}", 4, "unknown dtype"},
    {"{" T("a", "U8", "4", "0", "4") "," T("b", "U8", "4", "2", "6") "}", 6, "inside the tensor"},
    {"{" T("a", "U8", "4", "0", "4") "," T("b", "U8", "0", "2", "2") "}", 4, "inside the tensor"},
    {"{" T("a", "U8", "4", "1", "5") "}", 5, "gap"},
    {"{" T("a", "U8", "1", "0", "1") "}", 2, "follow the last"},
    {"{" T("a", "U8", "1", "0", "1") "," T("a", "U8", "1", "1", "2") "}", 2, "twice"},
    {"{" T("a\\nb", "U8", "1", "0", "1") "}", 0, "\\x0ab"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
    {"{\"__metadata__\":{\"a\":\"1\",\"\\u0061\":\"2\"}}", 0, "twice"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "texts"},
    {"{\"__metadata__\":[]}", 0, "'{' should be here"},
    {"{\"a\\u0000b\":1}", 0, "NUL"},
    {"{\"a\\x\":1}", 0, "escape"},
    {"{\"\\ud800\":1}", 0, "surrogate"},
    {"{\"\\udc00\":1}", 0, "surrogate"},
    {"{\"\\ud800\\u0041\":1}", 0, "surrogate"},
    {"{\"\\u12g4\":1}", 0, "hexadecimal"},
    {"{\"a\nb\":1}", 0, "control character"},
    {"{\"a\xff\":1}", 0, "UTF-8"},
    {"{\"a\xc0\x80\":1}", 0, "UTF-8"},
    {"{\"a\xed\xa0\x80\":1}", 0, "UTF-8"},
    {"{\"a", 0, "without an end"},
    {"{\"a\\", 0, "escape"},
    {"{\"a\\u00", 0, "hexadecimal"},
};

static void test_cases(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct rv_safetensors st = {0};
        struct rv_error err = {0};
        int r = parse(cases[i].header, cases[i].data, &st, &err);

        if (!cases[i].words) {
            if (r != 0)
                fail_msg("%s: %s", cases[i].header, err.message);
            rv_safetensors_fini(&st);
        } else {
            if (r != -EBADMSG || err.code != ERROR(MODEL_INVALID) || !strstr(err.message, cases[i].words))
                fail_msg("%s: %d %s", cases[i].header, r, err.message);
        }
    }
}

static void test_sub_byte_dtypes_are_unsupported(void **state)
{
    static const char *const dtypes[] = {"F4", "F6_E2M3", "F6_E3M2"};

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        struct rv_safetensors st;
        struct rv_error err = {0};
        char header[128];

        (void)snprintf(header, sizeof(header), "{\"a\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,4]}}",
                       dtypes[i]);
        assert_int_equal(parse(header, 4, &st, &err), -EOPNOTSUPP);
        assert_int_equal(err.code, ERROR(UNSUPPORTED));
        assert_non_null(strstr(err.message, dtypes[i]));
    }
}

/* ---- the same verdict as jansson -------------------------------------------------------------------------------- */

/* jansson's view of a header: valid JSON without duplicates, of the right form. Places are not looked at. */
static bool jansson_accepts(const char *text, size_t length)
{
    json_error_t error;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error), *value;
    const char *name, *key;
    json_t *field;
    bool ok = root && json_is_object(root) && text[0] == '{';

    if (ok) {
        json_object_foreach (root, name, value) {
            bool meta = strcmp(name, "__metadata__") == 0;

            ok = ok && json_is_object(value) && (meta || json_object_size(value) == 3);
            if (!json_is_object(value))
                continue;
            json_object_foreach (value, key, field) {
                size_t i;
                json_t *number;

                if (meta || strcmp(key, "dtype") == 0) {
                    ok = ok && json_is_string(field) &&
                         (meta || (rv_dtype_by_name(json_string_value(field), json_string_length(field)) != 0 &&
                                   strcmp(json_string_value(field), "BLOB") != 0));
                    continue;
                }
                ok = ok && (strcmp(key, "shape") == 0 || strcmp(key, "data_offsets") == 0) && json_is_array(field) &&
                     json_array_size(field) <= (key[0] == 's' ? 8 : 2) &&
                     (key[0] == 's' || json_array_size(field) == 2);
                json_array_foreach (field, i, number)
                    ok = ok && json_is_integer(number) && json_integer_value(number) >= 0;
            }
        }
    }
    json_decref(root);
    return ok;
}

/* Our view of the same: refusals that are about places, not about JSON, count as accepted. */
static bool we_accept(const char *text, size_t length)
{
    static const char *const of_places[] = {"takes", "2^64 bytes",      "truncated", "inside the tensor",
                                            "gap",   "follow the last", "over 2^64"};
    struct rv_safetensors st = {0};
    struct rv_error err = {0};

    if (parse_length(text, length, 6, &st, &err) == 0) {
        rv_safetensors_fini(&st);
        return true;
    }
    for (unsigned i = 0; i < sizeof(of_places) / sizeof(of_places[0]); i++)
        if (strstr(err.message, of_places[i]))
            return true;
    return false;
}

static uint32_t next_random(uint32_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 17;
    *x ^= *x << 5;
    return *x;
}

/*
 * Damages good headers at random. What we take, jansson takes too: nothing that is not JSON gets through. And what
 * jansson takes, we refuse for a place or a size only.
 */
static void test_random_damage_agrees_with_jansson(void **state)
{
    static const char *const seeds[] = {
        "{\"__metadata__\":{\"k\":\"v\",\"\\u00e4\":\"\\ud83d\\ude00\"}," T("a", "U8", "2,1", "0",
                                                                            "2") "," T("b", "F32", "1", "2", "6") "}",
        "{ \"x\" : { \"shape\" : [ 3 ] , \"dtype\" : \"BF16\" , \"data_offsets\" : [ 0 , 6 ] } } ",
        "{" T("\xc3\xa4", "I8", "6", "0", "6") "," T("e", "C64", "0", "6", "6") "}",
    };
    static const char bytes[] = "{}[]\",:\\u0 19-.eE+\x01\x7f\xc3\xa4\xff/bnrt";
    uint32_t random = 12345, taken = 0;

    (void)state;
    for (unsigned round = 0; round < 200000; round++) {
        char text[512];
        size_t length = strlen(seeds[round % 3]);
        struct rv_safetensors st = {0};
        bool ours;

        memcpy(text, seeds[round % 3], length);
        for (unsigned n = next_random(&random) % 4; n > 0; n--) {
            size_t at = next_random(&random) % length;
            char c = bytes[next_random(&random) % (sizeof(bytes) - 1)];

            switch (next_random(&random) % 3) {
            case 0:
                text[at] = c;
                break;
            case 1:
                memmove(text + at, text + at + 1, length - at - 1);
                length--;
                break;
            default:
                memmove(text + at + 1, text + at, length - at);
                text[at] = c;
                length++;
            }
        }
        ours = parse_length(text, length, 6, &st, NULL) == 0;
        rv_safetensors_fini(&st);
        taken += ours;
        if (ours && !jansson_accepts(text, length))
            fail_msg("we take what jansson refuses: %.*s", (int)length, text);
        if (memchr(text, '-', length)) /* JSON has a -0; we want whole numbers from 0 */
            continue;
        if (!ours && jansson_accepts(text, length) && !we_accept(text, length))
            fail_msg("jansson takes what we refuse: %.*s", (int)length, text);
    }
    assert_true(taken > 1000); /* the test would say nothing otherwise */
}

/* ---- size ------------------------------------------------------------------------------------------------------- */

static long peak_rss_kib(void)
{
    struct rusage u;

    (void)getrusage(RUSAGE_SELF, &u);
    return u.ru_maxrss;
}

static void test_a_million_tensors(void **state)
{
    const uint32_t count = 1000000;
    char *text = malloc(count * 100ull + 3), *p = text;
    struct rv_safetensors st = {0};
    struct rv_error err = {0};
    long before;
    uint64_t start;

    (void)state;
    *p++ = '{';
    for (uint32_t i = count; i-- > 0;) /* in reverse: the worst order */
        p += sprintf(p, "%s\"model.layers.%u.w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%u,%u]}",
                     i + 1 < count ? "," : "", i, i * 4, i * 4 + 4);
    *p++ = '}';
    before = peak_rss_kib();
    start = rv_now_us();
    assert_int_equal(
        rv_safetensors_parse((uint8_t *)text, (uint64_t)(p - text), 8 + (uint64_t)(p - text) + 4ull * count, &st, &err),
        0);
    print_message("1,000,000 tensors, a header of %lld MiB: %llu ms, %ld MiB more\n", (long long)(p - text) >> 20,
                  (unsigned long long)(rv_now_us() - start) / 1000, (peak_rss_kib() - before) / 1024);
    assert_int_equal(st.count, count);
    assert_string_equal(st.tensors[7].name, "model.layers.7.w");
    rv_safetensors_fini(&st);
    if (getenv("RESVISOR_TEST_JANSSON_COST")) { /* the figure in docs/design.md */
        before = peak_rss_kib();
        start = rv_now_us();
        json_decref(json_loadb(text, (size_t)(p - text), JSON_REJECT_DUPLICATES, NULL));
        print_message("the same by jansson: %llu ms, %ld MiB more\n", (unsigned long long)(rv_now_us() - start) / 1000,
                      (peak_rss_kib() - before) / 1024);
    }
    free(text);
}

static void test_limits(void **state)
{
    struct rv_safetensors st;
    struct rv_error err = {0};
    char *name = malloc(RV_TENSOR_NAME_MAX + 200);

    (void)state;
    assert_int_equal(rv_safetensors_parse(NULL, UINT64_C(1) << 63, 100, &st, &err), -EBADMSG);
    assert_int_equal(rv_safetensors_parse(NULL, 93, 100, &st, &err), -EBADMSG);
    assert_int_equal(rv_safetensors_parse(NULL, 0, 7, &st, &err), -EBADMSG);
    memset(name, 'x', RV_TENSOR_NAME_MAX + 200);
    name[0] = '{';
    name[1] = '"';
    (void)strcpy(name + 2 + RV_TENSOR_NAME_MAX, "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    assert_int_equal(parse(name, 0, &st, &err), 0);
    rv_safetensors_fini(&st);
    memset(name + 2, 'x', RV_TENSOR_NAME_MAX + 1);
    (void)strcpy(name + 3 + RV_TENSOR_NAME_MAX, "\":{}}");
    assert_int_equal(parse(name, 0, &st, &err), -EBADMSG);
    free(name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_contents),
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_sub_byte_dtypes_are_unsupported),
        cmocka_unit_test(test_random_damage_agrees_with_jansson),
        cmocka_unit_test(test_a_million_tensors),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
