/*
 * Any bytes as the body of POST /prompt, and as a worker's entry of the history. What the scanner accepts, jansson
 * accepts too, and the other way round, but for halves of pairs of surrogates, NULs, depth and numbers that are too
 * large; what is made out of it is JSON again.
 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "router/front/body.h"
#include "router/front/shape.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)   \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

static void must_be_json(struct rv_shape *shape)
{
    struct rv_span value;
    size_t where;

    MUST(!shape->failed && rv_scan_check(shape->bytes, shape->length, &value, &where) == 0);
    rv_shape_fini(shape);
}

static void compare(const char *text, size_t size, int r)
{
    json_error_t problem;
    json_t *json;

    if (memchr(text, '\0', size)) { /* jansson takes it for the end */
        MUST(r != 0);
        return;
    }
    json = json_loadb(text, size, JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &problem);
    if (json)
        MUST(r == 0 || r == -E2BIG);
    else if (r == 0)
        MUST(strstr(problem.text, "\\u") || strstr(problem.text, "surrogate") || strstr(problem.text, "overflow") ||
             strstr(problem.text, "NUL") || json_error_code(&problem) == json_error_numeric_overflow ||
             json_error_code(&problem) == json_error_out_of_memory);
    json_decref(json);
}

static void walk(const char *text, struct rv_span container, unsigned depth)
{
    struct rv_span key, value;
    uint32_t at = 0, before = container.at;
    char copy[64];
    double number;

    while (rv_scan_next(text, container, &at, &key, &value)) {
        MUST(value.length > 0 && value.at > before && value.at + value.length < container.at + container.length);
        before = value.at;
        (void)rv_scan_copy(text, value, copy, sizeof(copy));
        (void)rv_scan_number(text, value, &number);
        (void)rv_scan_is_true(text, value);
        if (depth < RV_SCAN_DEPTH_MAX)
            walk(text, value, depth + 1);
    }
}

static void shapes(const char *text, struct rv_span whole)
{
    static const struct rv_shape_run run = {"t", "t/0", 1, 2, 3, 4, true, -5};
    struct rv_shape shape = {0};

    if (rv_shape_history(&shape, text, whole, "id", &run) == 0)
        must_be_json(&shape);
    rv_shape_fini(&shape);
    if (rv_scan_is(text, whole, '{')) {
        rv_shape_text(&shape, "{");
        rv_shape_summary(&shape, text, whole);
        rv_shape_text(&shape, "}");
        must_be_json(&shape);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    struct rv_prompt_body body;
    struct rv_prompt_fault fault = {0};
    struct rv_shape shape = {0};
    struct rv_span whole;
    size_t where = 0;
    int r;

    MUST(text);
    memcpy(text, data, size);
    r = rv_scan_check(text, size, &whole, &where);
    MUST(where <= size);
    compare(text, size, r);
    if (r == 0) {
        walk(text, whole, 0);
        shapes(text, whole);
    }
    if (rv_prompt_body_read(text, size, &body, &fault) == 0) {
        struct rv_shape_prompt prompt = {text,           body.prompt, body.extra_data, "id",
                                         body.client_id, NULL,        body.number,     1};

        rv_shape_queue_item(&shape, &prompt);
        must_be_json(&shape);
        rv_shape_failed(&shape, &prompt, &(struct rv_shape_failure){false, body.type, body.client_id, 1, 2});
        must_be_json(&shape);
    } else {
        MUST(fault.type && fault.message);
    }
    free(text);
    return 0;
}
