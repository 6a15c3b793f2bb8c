/* The reader of requests' JSON: what it gives, what it refuses and where, and that jansson says the same of damaged
 * texts. */
#include <errno.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "json.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define MUTATIONS 60000u
#define TEXT_MAX 4096u

static const struct rv_json_limits limits = {64, 10000, "the text"};
static struct rv_error err;

static struct rv_json read_text(const char *text)
{
    struct rv_json json;

    if (rv_json_parse(&json, text, strlen(text), &limits, &err) < 0)
        fail_msg("%s: %s", text, err.message);
    return json;
}

static void refused(const char *text, const char *message)
{
    struct rv_json json;

    memset(&err, 0, sizeof(err));
    assert_int_equal(rv_json_parse(&json, text, strlen(text), &limits, &err), -EINVAL);
    rv_json_fini(&json);
    assert_int_equal(err.code, CODE(BAD_REQUEST));
    if (!strstr(err.message, message))
        fail_msg("%s: said \"%s\", not \"%s\"", text, err.message, message);
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static void test_values_are_read(void **state)
{
    const char *text = " {\"a\": [1, -2.5e3, true, false, null], \"b\": {\"c\": \"x\\ty\\u00e9\\ud83d\\ude00/\\/\"}} ";
    struct rv_json json = read_text(text);
    uint32_t a = rv_json_get(&json, 0, "a"), i, c;
    size_t length;

    (void)state;
    assert_true(rv_json_is(&json, 0, RV_JSON_OBJECT) && rv_json_size(&json, 0) == 2);
    assert_true(rv_json_is(&json, a, RV_JSON_ARRAY) && rv_json_size(&json, a) == 5);
    i = rv_json_first(&json, a);
    assert_true(rv_json_number(&json, i) == 1);
    i = rv_json_next(&json, i);
    assert_true(rv_json_number(&json, i) == -2500);
    assert_memory_equal(text + json.values[i].begin, "-2.5e3", json.values[i].end - json.values[i].begin);
    i = rv_json_next(&json, i);
    assert_true(rv_json_is(&json, i, RV_JSON_TRUE));
    i = rv_json_next(&json, i);
    assert_true(rv_json_is(&json, i, RV_JSON_FALSE));
    i = rv_json_next(&json, i);
    assert_true(rv_json_is(&json, i, RV_JSON_NULL));
    assert_int_equal(rv_json_next(&json, i), RV_JSON_NONE);
    c = rv_json_get(&json, rv_json_get(&json, 0, "b"), "c");
    assert_string_equal(rv_json_string(&json, c, &length), "x\ty\xc3\xa9\xf0\x9f\x98\x80//");
    assert_int_equal(length, 11);
    assert_memory_equal(text + json.values[c].begin, "\"x\\ty", 5);
    assert_int_equal(text[json.values[0].end - 1], '}');
    rv_json_fini(&json);
}

static void test_what_is_not_there_is_none(void **state)
{
    struct rv_json json = read_text("{\"a\": 1, \"e\": {}, \"f\": []}");
    uint32_t a = rv_json_get(&json, 0, "a"), none = rv_json_get(&json, 0, "b");

    (void)state;
    assert_int_equal(none, RV_JSON_NONE);
    assert_int_equal(rv_json_get(&json, none, "c"), RV_JSON_NONE);
    assert_int_equal(rv_json_get(&json, a, "c"), RV_JSON_NONE);
    assert_int_equal(rv_json_get(&json, rv_json_get(&json, 0, "e"), "c"), RV_JSON_NONE);
    assert_int_equal(rv_json_first(&json, none), RV_JSON_NONE);
    assert_int_equal(rv_json_first(&json, a), RV_JSON_NONE);
    assert_int_equal(rv_json_first(&json, rv_json_get(&json, 0, "f")), RV_JSON_NONE);
    assert_null(rv_json_string(&json, a, NULL));
    assert_null(rv_json_string(&json, none, NULL));
    assert_true(rv_json_number(&json, none) == 0 && rv_json_size(&json, none) == 0);
    rv_json_fini(&json);
}

/* As in Python: the place of the first, the value of the last. */
static void same_names(unsigned others)
{
    char text[2048] = "{", *p = text + 1;
    struct rv_json json;
    uint32_t i;

    p += sprintf(p, "\"a\":1,\"b\":2,\"\\u0061\":3");
    for (unsigned k = 0; k < others; k++)
        p += sprintf(p, ",\"k%u\":0", (k * 7919) % 1000);
    (void)sprintf(p, ",\"b\":[4],\"a\":5}");
    json = read_text(text);
    assert_int_equal(rv_json_size(&json, 0), 2 + others);
    i = rv_json_first(&json, 0);
    assert_string_equal(rv_json_key(&json, i), "a");
    assert_true(rv_json_number(&json, rv_json_value_at(&json, i)) == 5);
    assert_true(rv_json_number(&json, rv_json_get(&json, 0, "a")) == 5);
    i = rv_json_next(&json, i);
    assert_string_equal(rv_json_key(&json, i), "b");
    assert_true(rv_json_is(&json, rv_json_value_at(&json, i), RV_JSON_ARRAY));
    rv_json_fini(&json);
}

static void test_of_members_with_one_name_the_last_counts(void **state)
{
    (void)state;
    same_names(0);
    same_names(5);
    same_names(100);
}

static void test_faults_are_named_with_their_place(void **state)
{
    static const char *const texts[][2] = {
        {"", "line 1, column 1: it ends where '{' or '[' should be"},
        {"7", "'{' or '['"},
        {"\"a\"", "'{' or '['"},
        {"{", "it ends where a name in quotes should be"},
        {"{\"a\"}", "line 1, column 5: ':'"},
        {"{\"a\":}", "a value should be here"},
        {"{\"a\":1,}", "a name in quotes"},
        {"[1,]", "line 1, column 4: a value"},
        {"[1 2]", "',' or ']'"},
        {"{\"a\":1]", "',' or '}'"},
        {"[\n \"\xc3\xa9\", nul]", "line 2, column 7: a value"},
        {"[01]", "no number"},
        {"[-]", "no number"},
        {"[1.]", "no number"},
        {"[1e]", "no number"},
        {"[+1]", "a value"},
        {"[.5]", "a value"},
        {"[NaN]", "a value"},
        {"[1e999]", "too large"},
        {"[\"\\x\"]", "unknown escape"},
        {"[\"\\u12g4\"]", "four hexadecimal digits"},
        {"[\"\\ud800\"]", "half a surrogate"},
        {"[\"\\ud800\\u0041\"]", "half a surrogate"},
        {"[\"\\udc00\"]", "half a surrogate"},
        {"[\"a\tb\"]", "control character"},
        {"[\"\xff\"]", "not UTF-8"},
        {"[\"\xed\xa0\x80\"]", "not UTF-8"},
        {"[\"\xc0\xaf\"]", "not UTF-8"},
        {"[\"abcdefghijk", "column 2: a text without an end"},
        {"{\"a\\u0000\":1}", "a NUL in a name"},
        {"[] []", "column 4: more behind the end"},
        {"[]\v", "more behind"},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        refused(texts[i][0], texts[i][1]);
}

static void too_large(const char *text, const struct rv_json_limits *given, const char *message)
{
    struct rv_json json;

    assert_int_equal(rv_json_parse(&json, text, strlen(text), given, &err), -E2BIG);
    rv_json_fini(&json);
    assert_int_equal(err.code, CODE(TOO_LARGE));
    assert_non_null(strstr(err.message, message));
}

static void test_limits(void **state)
{
    const struct rv_json_limits small = {3, 5, "the text"};
    struct rv_json json;

    (void)state;
    too_large("[[[[]]]]", &small, "the text is nested deeper than 3 levels");
    too_large("[1,2,3,4,5]", &small, "the text has more than 5 values");
    assert_int_equal(rv_json_parse(&json, "[[[1]],2]", 9, &small, &err), 0);
    rv_json_fini(&json);
}

/* Many names that a sort could be slow for. */
static void test_a_hundred_thousand_members(void **state)
{
    const struct rv_json_limits wide = {4, 200000, "the text"};
    const unsigned count = 100000;
    char *text = malloc((size_t)count * 16), *p = text;
    struct rv_json json;

    (void)state;
    assert_non_null(text);
    *p++ = '{';
    for (unsigned i = 0; i < count; i++)
        p += sprintf(p, "%s\"%u\":%u", i ? "," : "", i * 7919u % (count / 2), i);
    *p++ = '}';
    assert_int_equal(rv_json_parse(&json, text, (size_t)(p - text), &wide, &err), 0);
    assert_int_equal(rv_json_size(&json, 0), count / 2);
    assert_true(rv_json_number(&json, rv_json_get(&json, 0, "0")) == count / 2);
    rv_json_fini(&json);
    free(text);
}

/* ---- beside jansson ---------------------------------------------------------------------------------------------- */

static void compare(const struct rv_json *json, uint32_t value, const json_t *other);

static void compare_members(const struct rv_json *json, uint32_t value, json_t *other)
{
    uint32_t place = rv_json_first(json, value);
    const char *key;
    json_t *member;

    assert_int_equal(rv_json_size(json, value), json_object_size(other));
    json_object_foreach (other, key, member) {
        assert_string_equal(rv_json_key(json, place), key);
        compare(json, rv_json_value_at(json, place), member);
        assert_int_equal(rv_json_get(json, value, key), rv_json_value_at(json, place));
        place = rv_json_next(json, place);
    }
}

static void compare(const struct rv_json *json, uint32_t value, const json_t *other)
{
    static const enum rv_json_kind kinds[] = {
        [JSON_OBJECT] = RV_JSON_OBJECT,  [JSON_ARRAY] = RV_JSON_ARRAY, [JSON_STRING] = RV_JSON_STRING,
        [JSON_INTEGER] = RV_JSON_NUMBER, [JSON_REAL] = RV_JSON_NUMBER, [JSON_TRUE] = RV_JSON_TRUE,
        [JSON_FALSE] = RV_JSON_FALSE,    [JSON_NULL] = RV_JSON_NULL,
    };
    uint32_t place = rv_json_first(json, value);
    size_t length, i;
    const char *text = rv_json_string(json, value, &length);

    assert_true(rv_json_is(json, value, kinds[json_typeof(other)]));
    if (json_is_object(other))
        compare_members(json, value, (json_t *)other);
    if (json_is_number(other))
        assert_true(rv_json_number(json, value) == json_number_value(other));
    if (json_is_string(other)) {
        assert_int_equal(length, json_string_length(other));
        assert_memory_equal(text, json_string_value(other), length + 1);
    }
    for (i = 0; i < json_array_size(other); i++, place = rv_json_next(json, place))
        compare(json, place, json_array_get(other, i));
    if (json_is_array(other))
        assert_int_equal(place, RV_JSON_NONE);
}

static uint32_t next_random(uint64_t *random)
{
    *random = *random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*random >> 33);
}

/* Some bytes become others that matter in JSON, some go, some come twice. */
static size_t damage(char *text, size_t length, uint64_t *random)
{
    static const char words[] = "\"\\{}[]:,0123456789eE+-.tfn \n\tu\xc3\xa9\xed\xa0\xff/ab";
    unsigned times = 1 + next_random(random) % 4;

    for (unsigned i = 0; i < times && length > 1; i++) {
        size_t at = next_random(random) % length, n = 1 + next_random(random) % 8;

        n = n < length - at ? n : length - at;
        switch (next_random(random) % 4) {
        case 0:
            text[at] = words[next_random(random) % (sizeof(words) - 1)];
            break;
        case 1:
            text[at] ^= (char)(1u << next_random(random) % 8);
            break;
        case 2:
            memmove(text + at, text + at + n, length - at - n);
            length -= n;
            break;
        default:
            if (length + n <= TEXT_MAX) {
                memmove(text + at + n, text + at, length - at);
                length += n;
            }
        }
    }
    return length;
}

static void test_damaged_texts_are_read_as_by_jansson(void **state)
{
    static const char *const texts[] = {
        "{\"client_id\":\"1c0a\",\"prompt\":{\"3\":{\"inputs\":{\"seed\":18446744073709551615,\"cfg\":8.0,\"model\":["
        "\"4\",0]},"
        "\"class_type\":\"KSampler\",\"_meta\":{\"title\":\"K\\u00e9 "
        "\\ud83d\\ude00\"}}},\"extra_data\":{\"a\":null,\"b\":[]}}",
        "[1e5,-0,0.5,-12.25E-3,1E+2,true,false,null,\"\\\"\\\\\\/"
        "\\b\\f\\n\\r\\t\\u0001\",{\"a\":1,\"a\":2,\"b\":{\"a\":3}},"
        "[[[[]]]],\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"]",
        "{\"a\":0,\"b\":0,\"c\":0,\"d\":0,\"e\":0,\"f\":0,\"g\":0,\"h\":0,\"i\":0,\"j\":0,\"k\":0,\"l\":0,\"m\":0,"
        "\"n\":0,"
        "\"o\":0,\"p\":0,\"q\":0,\"a\":1,\"c\":{\"x\":1},\"b\":[2]}",
    };
    uint64_t random = 1;
    unsigned accepted = 0;

    (void)state;
    for (unsigned i = 0; i < MUTATIONS; i++) {
        const char *given = texts[i % 3];
        char text[TEXT_MAX];
        size_t length = strlen(given);
        struct rv_json json;
        json_t *other;
        int r;

        memcpy(text, given, length);
        length = damage(text, length, &random);
        other = json_loadb(text, length, JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL);
        r = rv_json_parse(&json, text, length, &limits, &err);
        if ((r == 0) != (other != NULL))
            fail_msg("mutation %u: %s, jansson %s: %.*s", i, r == 0 ? "accepted" : err.message,
                     other ? "accepts it" : "refuses it", (int)length, text);
        if (other)
            compare(&json, 0, other);
        accepted += other != NULL;
        json_decref(other);
        rv_json_fini(&json);
    }
    assert_in_range(accepted, MUTATIONS / 50, MUTATIONS); /* the others would test errors only */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_are_read),
        cmocka_unit_test(test_what_is_not_there_is_none),
        cmocka_unit_test(test_of_members_with_one_name_the_last_counts),
        cmocka_unit_test(test_faults_are_named_with_their_place),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_a_hundred_thousand_members),
        cmocka_unit_test(test_damaged_texts_are_read_as_by_jansson),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
