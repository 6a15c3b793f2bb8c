/* Any bytes as JSON: the reader of requests and jansson accept the same texts, and find the same in them. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#define DEPTH 64u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)   \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

/* Goes no deeper than DEPTH: what is deeper was refused. */
static void compare(const struct rv_json *json, uint32_t value, json_t *other)
{
    uint32_t place = rv_json_first(json, value);
    size_t length, i;
    const char *text = rv_json_string(json, value, &length), *key;
    json_t *member;

    MUST(json->values[value].begin < json->values[value].end && json->values[value].end <= json->length);
    MUST(rv_json_is(json, value, RV_JSON_OBJECT) == json_is_object(other));
    MUST(rv_json_is(json, value, RV_JSON_ARRAY) == json_is_array(other));
    MUST(rv_json_is(json, value, RV_JSON_NUMBER) == json_is_number(other));
    MUST(rv_json_is(json, value, RV_JSON_TRUE) == json_is_true(other));
    MUST(rv_json_is(json, value, RV_JSON_FALSE) == json_is_false(other));
    MUST(rv_json_is(json, value, RV_JSON_NULL) == json_is_null(other));
    MUST((text != NULL) == json_is_string(other));
    MUST(!text || (length == json_string_length(other) && memcmp(text, json_string_value(other), length + 1) == 0));
    MUST(rv_json_number(json, value) == json_number_value(other));
    json_array_foreach (other, i, member) {
        MUST(place != RV_JSON_NONE);
        compare(json, place, member);
        place = rv_json_next(json, place);
    }
    json_object_foreach (other, key, member) {
        MUST(place != RV_JSON_NONE && strcmp(rv_json_key(json, place), key) == 0);
        compare(json, rv_json_value_at(json, place), member);
        place = rv_json_next(json, place);
    }
    MUST(place == RV_JSON_NONE);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct rv_json_limits limits = {DEPTH, 65536, "the text"};
    struct rv_error err = {0};
    struct rv_json json;
    int r = rv_json_parse(&json, (const char *)data, size, &limits, &err);
    json_t *other = json_loadb((const char *)data, size, JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL);

    MUST(r == 0 || (err.code != 0 && *err.message));
    if (r == 0) {
        MUST(other);
        compare(&json, 0, other);
    } else {
        /* jansson overlooks a NUL behind a number, since it puts it back into a text that a NUL ends */
        MUST(!other || r == -E2BIG || memchr(data, '\0', size));
    }
    json_decref(other);
    rv_json_fini(&json);
    return 0;
}
