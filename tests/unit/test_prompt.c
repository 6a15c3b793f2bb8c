/* Prompts as bytes of strangers: JSON in one pass, the body of POST /prompt, and the shapes of ComfyUI's API. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <jansson.h>

#include "router/front/body.h"
#include "router/front/shape.h"

/* ---- scan.c ------------------------------------------------------------------------------------------------------ */

static int check(const char *text, size_t length)
{
    struct rv_span value;
    size_t where = 0;
    char *exact = malloc(length ? length : 1); /* so that a sanitizer sees a byte too many */
    int r;

    memcpy(exact, text, length);
    r = rv_scan_check(exact, length, &value, &where);
    assert_true(where <= length);
    if (r == 0)
        assert_true(value.length > 0 && value.at + value.length <= length);
    free(exact);
    return r;
}

static void json_is_checked_strictly(void **state)
{
    static const char *const good[] = {
        "0",
        "-0",
        "10.5e-3",
        "1E+9",
        "true",
        "false",
        "null",
        "\"\"",
        "{}",
        "[]",
        " [ ] ",
        "[1, 2]",
        "{\"a\":1}",
        "{\"a\" : [ {\"b\" : null } , \"\\u00e9\\ud83d\\ude00\\\"\\\\\\/\\b\\f\\n\\r\\t\" ] }",
        "\"gr\xc3\xbc\xc3\x9f\xe2\x82\xac\xf0\x9f\x98\x80 and a text that is longer than a word\"",
        "[[[[]]],{}]"};
    static const char *const bad[] = {"",
                                      " ",
                                      "01",
                                      "-",
                                      "+1",
                                      "1.",
                                      ".5",
                                      "1e",
                                      "0x1",
                                      "NaN",
                                      "Infinity",
                                      "tru",
                                      "nul",
                                      "True",
                                      "'a'",
                                      "\"",
                                      "\"\\",
                                      "\"\\x\"",
                                      "\"\\u12g4\"",
                                      "\"\\u12\"",
                                      "\"a\nb\"",
                                      "{",
                                      "[",
                                      "[1",
                                      "[1,",
                                      "[1,]",
                                      "[,1]",
                                      "{\"a\"",
                                      "{\"a\":",
                                      "{\"a\":1",
                                      "{\"a\":1,",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "{1:1}",
                                      "{\"a\" 1}",
                                      "[1 2]",
                                      "[1]]",
                                      "{}{}",
                                      "1 2",
                                      "[}",
                                      "{]",
                                      "\"\x80\"",
                                      "\"\xc0\x80\"",
                                      "\"\xc3\"",
                                      "\"\xe0\x80\x80\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf0\x80\x80\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xf5\x80\x80\x80\"",
                                      "\"abcdefg\x80hijklmn\"",
                                      "\"abcdefghijk\x01lmnopq\"",
                                      "// a\n1"};

    (void)state;
    for (unsigned i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        if (check(good[i], strlen(good[i])) != 0)
            fail_msg("refused: %s", good[i]);
    for (unsigned i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (check(bad[i], strlen(bad[i])) != -EINVAL)
            fail_msg("accepted: %s", bad[i]);
    assert_int_equal(check("\"a\0b\"", 5), -EINVAL);
    assert_int_equal(check("1\0", 2), -EINVAL);
}

static void depth_is_bounded(void **state)
{
    char text[2 * (RV_SCAN_DEPTH_MAX + 1)];

    (void)state;
    for (unsigned depth = RV_SCAN_DEPTH_MAX; depth <= RV_SCAN_DEPTH_MAX + 1; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        assert_int_equal(check(text, 2 * depth), depth > RV_SCAN_DEPTH_MAX ? -E2BIG : 0);
    }
}

static struct rv_span span_of(const char *text)
{
    struct rv_span value;
    size_t where;

    assert_int_equal(rv_scan_check(text, strlen(text), &value, &where), 0);
    return value;
}

static void members_are_found(void **state)
{
    static const char text[] = " { \"a\" : [1, \"x,]}\", {\"b\": {}}] , \"\\u0062\\/\":-2.5,\"a\":\"last\\\"\" } ";
    struct rv_span whole = span_of(text), key, value;
    uint32_t at = 0;
    char copy[32];
    double number;

    (void)state;
    assert_true(rv_scan_next(text, whole, &at, &key, &value));
    assert_true(rv_scan_equals(text, key, "a"));
    assert_memory_equal(text + value.at, "[1, \"x,]}\", {\"b\": {}}]", value.length);
    {
        struct rv_span item;
        uint32_t inner = 0;
        unsigned count = 0;

        while (rv_scan_next(text, value, &inner, NULL, &item))
            count++;
        assert_int_equal(count, 3);
        assert_memory_equal(text + item.at, "{\"b\": {}}", item.length);
    }
    assert_true(rv_scan_next(text, whole, &at, &key, &value));
    assert_true(rv_scan_equals(text, key, "b/"));
    assert_false(rv_scan_equals(text, key, "b"));
    assert_false(rv_scan_equals(text, key, "b//"));
    assert_true(rv_scan_number(text, value, &number) && number == -2.5);
    assert_true(rv_scan_next(text, whole, &at, &key, &value));
    assert_false(rv_scan_next(text, whole, &at, &key, &value));
    assert_true(rv_scan_find(text, whole, "a", &value)); /* the last one */
    assert_int_equal(rv_scan_copy(text, value, copy, sizeof(copy)), 0);
    assert_string_equal(copy, "last\"");
    assert_int_equal(rv_scan_copy(text, value, copy, 5), -E2BIG);
    assert_int_equal(rv_scan_copy(text, whole, copy, sizeof(copy)), -EINVAL);
    assert_false(rv_scan_find(text, value, "a", &value));
    assert_false(rv_scan_find(text, (struct rv_span){0}, "a", &value));
}

static void texts_are_decoded(void **state)
{
    static const struct {
        const char *json, *text; /* NULL = refused */
    } cases[] = {
        {"\"\\u0041\\u00e9\\u20ac\\ud83d\\ude00\"", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"\"\\ud83d\"", "\xef\xbf\xbd"},
        {"\"\\ude00x\"", "\xef\xbf\xbdx"},
        {"\"\\ud83d\\u0041\"", "\xef\xbf\xbd"
                               "A"},
        {"\"\\b\\f\\n\\r\\t\\/\\\\\"", "\b\f\n\r\t/\\"},
        {"\"a\\u0000b\"", NULL},
    };
    char copy[64];

    (void)state;
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int r = rv_scan_copy(cases[i].json, span_of(cases[i].json), copy, sizeof(copy));

        assert_int_equal(r, cases[i].text ? 0 : -E2BIG);
        if (cases[i].text)
            assert_string_equal(copy, cases[i].text);
    }
}

static void truth_is_pythons(void **state)
{
    static const char *const yes[] = {"true", "1", "-0.5", "\"0\"", "[0]", "{\"a\":0}"}, *const no[] = {"false", "null",
                                                                                                        "0",     "0.0",
                                                                                                        "-0",    "\"\"",
                                                                                                        "[]",    "{ }"};

    (void)state;
    for (unsigned i = 0; i < sizeof(yes) / sizeof(yes[0]); i++)
        assert_true(rv_scan_is_true(yes[i], span_of(yes[i])));
    for (unsigned i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        assert_false(rv_scan_is_true(no[i], span_of(no[i])));
}

/* ---- body.c ------------------------------------------------------------------------------------------------------ */

static void a_body_is_read(void **state)
{
    static const char text[] =
        "{\"client_id\": \"me\", \"prompt\": {\"1\": {}}, \"front\": true, \"number\": 2.5, \"other\": [1],"
        "\"prompt_id\": \"01234567-89ab-cdef-0123-456789abcdef\", \"partial_execution_targets\": [\"1\"],"
        "\"extra_data\": {\"resvisor\": {\"type\": \"video\", \"priority\": -7, \"retry\": true, \"new\": 1}, \"x\": "
        "1}}";
    struct rv_prompt_body body;
    struct rv_prompt_fault fault;

    (void)state;
    assert_int_equal(rv_prompt_body_read(text, strlen(text), &body, &fault), 0);
    assert_memory_equal(text + body.prompt.at, "{\"1\": {}}", body.prompt.length);
    assert_true(rv_scan_is(text, body.extra_data, '{'));
    assert_true(body.has_client_id && body.front && body.has_number && body.retry);
    assert_string_equal(body.client_id, "me");
    assert_string_equal(body.prompt_id, "01234567-89ab-cdef-0123-456789abcdef");
    assert_string_equal(body.type, "video");
    assert_int_equal(body.priority, -7);
    assert_true(body.number == 2.5);
}

static void absent_and_null_fields_are_fine(void **state)
{
    static const char *const texts[] = {
        "{\"prompt\": {}}",
        "{\"prompt\": {}, \"client_id\": null, \"prompt_id\": null, \"partial_execution_targets\": null, "
        "\"front\": null, \"extra_data\": {\"resvisor\": {\"type\": null}}}"};
    struct rv_prompt_body body;
    struct rv_prompt_fault fault;

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(rv_prompt_body_read(texts[i], strlen(texts[i]), &body, &fault), 0);
        assert_false(body.has_client_id || body.front || body.has_number || body.retry);
        assert_true(body.prompt_id[0] == '\0' && body.type[0] == '\0');
    }
}

/* Every field as every kind of JSON: an answer, never a fault. */
static void wrong_kinds_are_refused(void **state)
{
    static const char *const values[] = {"null",  "true", "0",      "-1e9", "\"\"",
                                         "\"x\"", "[]",   "[null]", "{}",   "{\"a\":[]}"};
    static const char *const forms[] = {
        "{\"prompt\": %s}",
        "{\"prompt\": {}, \"client_id\": %s}",
        "{\"prompt\": {}, \"prompt_id\": %s}",
        "{\"prompt\": {}, \"number\": %s}",
        "{\"prompt\": {}, \"front\": %s}",
        "{\"prompt\": {}, \"partial_execution_targets\": %s}",
        "{\"prompt\": {}, \"extra_data\": %s}",
        "{\"prompt\": {}, \"extra_data\": {\"resvisor\": %s}}",
        "{\"prompt\": {}, \"extra_data\": {\"resvisor\": {\"type\": %s}}}",
        "{\"prompt\": {}, \"extra_data\": {\"resvisor\": {\"priority\": %s}}}",
        "{\"prompt\": {}, \"extra_data\": {\"resvisor\": {\"retry\": %s}}}",
    };
    static const unsigned accepted[] = {2, 3, 1, 2, 10, 2, 2, 2, 3, 1, 1}; /* of the ten values */

    (void)state;
    for (unsigned i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        unsigned count = 0;

        for (unsigned k = 0; k < sizeof(values) / sizeof(values[0]); k++) {
            struct rv_prompt_body body;
            struct rv_prompt_fault fault = {0};
            char text[256];
            int r;

            (void)snprintf(text, sizeof(text), forms[i], values[k]);
            r = rv_prompt_body_read(text, strlen(text), &body, &fault);
            count += r == 0;
            if (r < 0)
                assert_true(r == -EINVAL && fault.type && fault.message);
        }
        if (count != accepted[i])
            fail_msg("%s: %u of the values are accepted", forms[i], count);
    }
}

static void ids_are_canonical(void **state)
{
    static const char *const wrong[] = {"",
                                        "0",
                                        "01234567-89ab-cdef-0123-456789abcde",
                                        "01234567-89ab-cdef-0123-456789abcdef0",
                                        "01234567-89AB-cdef-0123-456789abcdef",
                                        "01234567x89ab-cdef-0123-456789abcdef",
                                        "0123456789ab-cdef-0123-456789abcdef-",
                                        "g1234567-89ab-cdef-0123-456789abcdef"};
    uint8_t random[16];
    char text[RV_UUID_SIZE];

    (void)state;
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(rv_uuid_is_canonical(wrong[i]));
    memset(random, 0xff, sizeof(random));
    rv_uuid_write(random, text);
    assert_string_equal(text, "ffffffff-ffff-4fff-bfff-ffffffffffff");
    assert_true(rv_uuid_is_canonical(text));
}

/* ---- shape.c ----------------------------------------------------------------------------------------------------- */

static json_t *parse(struct rv_shape *shape)
{
    json_t *json;

    assert_false(shape->failed);
    json = json_loadb(shape->bytes, shape->length, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(json);
    rv_shape_fini(shape);
    return json;
}

static void a_queue_item_has_no_secrets(void **state)
{
    static const char text[] =
        "{\"prompt\": {\"1\": {\"class_type\": \"A\"}}, \"extra_data\": {\"api_key_comfy_org\": \"s\","
        "\"auth\\u005ftoken_comfy_org\": \"s\", \"client_id\": 1, \"create_time\": 2, \"k\": [1]}}";
    struct rv_shape_prompt prompt = {.text = text, .id = "a\"b\n", .client_id = "c\\", .number = -3, .created_ms = 17};
    struct rv_prompt_body body;
    struct rv_prompt_fault fault;
    struct rv_shape shape = {0};
    json_t *item, *wanted;

    (void)state;
    assert_int_equal(rv_prompt_body_read(text, strlen(text), &body, &fault), 0);
    prompt.prompt = body.prompt;
    prompt.extra_data = body.extra_data;
    rv_shape_queue_item(&shape, &prompt);
    item = parse(&shape);
    wanted = json_pack("[i, s, {s:{s:s}}, {s:[i], s:s, s:i}, []]", -3, "a\"b\n", "1", "class_type", "A", "k", 1,
                       "client_id", "c\\", "create_time", 17);
    assert_true(json_equal(item, wanted));
    json_decref(item);
    json_decref(wanted);
    rv_shape_queue_item(&shape, &(struct rv_shape_prompt){.id = "x", .outputs = "[\"9\"]", .number = 0.5});
    item = parse(&shape);
    wanted = json_pack("[f, s, {}, {s:i}, [s]]", 0.5, "x", "create_time", 0, "9");
    assert_true(json_equal(item, wanted));
    json_decref(item);
    json_decref(wanted);
}

static void an_entry_says_how_it_ran(void **state)
{
    static const struct rv_shape_run run = {"image", "image/0", 1500, 0, 2000000, 7, true, 5};
    static const char *const entries[] = {
        "{\"prompt\": [0, \"theirs\", {\"1\": 1}, {}, [\"9\"]], \"outputs\": {\"9\": 1}, \"status\": {\"completed\": "
        "true}, "
        "\"meta\": 1}",
        "{\"prompt\": [0, \"theirs\", {\"1\": 1}, {}, [\"9\"]], \"status\": null}",
        "{\"prompt\": [0, \"theirs\", {\"1\": 1}, {}, [\"9\"]]}",
    };
    struct rv_shape shape = {0};

    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        json_t *json, *ours;

        assert_int_equal(rv_shape_history(&shape, entries[i], span_of(entries[i]), "mine", &run), 0);
        json = parse(&shape);
        ours = json_object_get(json_object_get(json, "status"), "resvisor");
        assert_string_equal(json_string_value(json_array_get(json_object_get(json, "prompt"), 1)), "mine");
        assert_int_equal(json_integer_value(json_array_get(json_object_get(json, "prompt"), 0)), 5);
        assert_string_equal(json_string_value(json_object_get(ours, "worker")), "image/0");
        assert_true(json_is_true(json_object_get(ours, "cold")));
        assert_true(json_real_value(json_object_get(ours, "wait_ms")) == 1.5);
        json_decref(json);
    }
    assert_int_equal(rv_shape_history(&shape, "{}", span_of("{}"), "mine", &run), -EINVAL);
    assert_int_equal(rv_shape_history(&shape, "[1]", span_of("[1]"), "mine", &run), -EINVAL);
    assert_int_equal(shape.length, 0);
}

static void a_failure_becomes_an_entry(void **state)
{
    static const struct rv_shape_failure failures[] = {{false, "resvisor.WorkerDied", "it \"died\"", 1, 2},
                                                       {true, "", "", 1, 2}};
    struct rv_shape shape = {0};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        json_t *json, *last;

        rv_shape_failed(&shape, &(struct rv_shape_prompt){.id = "x"}, &failures[i]);
        json = parse(&shape);
        last = json_array_get(json_object_get(json_object_get(json, "status"), "messages"), 1);
        assert_string_equal(json_string_value(json_array_get(last, 0)),
                            i ? "execution_interrupted" : "execution_error");
        assert_int_equal(json_integer_value(json_object_get(json_array_get(last, 1), "timestamp")), 2);
        json_decref(json);
    }
}

static void a_job_is_summed_up(void **state)
{
    static const char text[] =
        "{\"prompt\": [0, \"p\", {}, {\"extra_pnginfo\": {\"workflow\": {\"id\": \"w\"}}}, []],"
        "\"outputs\": {\"1\": {\"images\": [{\"filename\": \"t.png\", \"type\": \"temp\"}], \"animated\": [true]},"
        "\"2\": {\"gifs\": [{\"filename\": \"v.mp4\", \"format\": \"video/h264\", \"type\": \"output\"}, 5],"
        "\"text\": [\"a\"], \"3d\": [{\"filename\": \"A.GLB\"}]}, \"3\": null},"
        "\"status\": {\"messages\": [[\"execution_start\", {\"timestamp\": 10}], 1, [], [\"x\"], [\"y\", 2],"
        "[\"execution_error\", {\"timestamp\": 20, \"exception_type\": \"E\"}]]}}";
    struct rv_span entry = span_of(text), extra = rv_shape_prompt_item(text, entry, 3);
    struct rv_shape shape = {0};
    char id[16];
    json_t *json, *preview;

    (void)state;
    rv_shape_text(&shape, "{");
    rv_shape_summary(&shape, text, entry);
    rv_shape_text(&shape, "}");
    json = parse(&shape);
    preview = json_object_get(json, "preview_output");
    assert_int_equal(json_integer_value(json_object_get(json, "outputs_count")), 3);
    assert_string_equal(json_string_value(json_object_get(preview, "filename")), "v.mp4");
    assert_string_equal(json_string_value(json_object_get(preview, "mediaType")), "gifs");
    assert_string_equal(json_string_value(json_object_get(preview, "nodeId")), "2");
    assert_int_equal(json_integer_value(json_object_get(json, "execution_start_time")), 10);
    assert_int_equal(json_integer_value(json_object_get(json, "execution_end_time")), 20);
    assert_non_null(json_object_get(json, "execution_error"));
    json_decref(json);
    assert_int_equal(rv_shape_workflow_id(text, extra, id, sizeof(id)), 0);
    assert_string_equal(id, "w");
    assert_int_equal(rv_shape_workflow_id(text, rv_shape_prompt_item(text, entry, 2), id, sizeof(id)), -ENOENT);
    assert_int_equal(rv_shape_prompt_item(text, entry, 9).length, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_is_checked_strictly),
        cmocka_unit_test(depth_is_bounded),
        cmocka_unit_test(members_are_found),
        cmocka_unit_test(texts_are_decoded),
        cmocka_unit_test(truth_is_pythons),
        cmocka_unit_test(a_body_is_read),
        cmocka_unit_test(absent_and_null_fields_are_fine),
        cmocka_unit_test(wrong_kinds_are_refused),
        cmocka_unit_test(ids_are_canonical),
        cmocka_unit_test(a_queue_item_has_no_secrets),
        cmocka_unit_test(an_entry_says_how_it_ran),
        cmocka_unit_test(a_failure_becomes_an_entry),
        cmocka_unit_test(a_job_is_summed_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
