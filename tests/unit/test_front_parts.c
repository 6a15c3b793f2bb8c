/* What the front door reads of strangers: paths, fields, and JSON of several workers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/front/join.h"
#include "router/front/match.h"

static bool matches(const char *path, const char *pattern)
{
    struct rv_http_target target;
    const char *why;
    bool api, found;

    assert_int_equal(rv_front_parse_target(path, strlen(path), &target, &api, &why), 0);
    found = rv_front_path_matches(target.segments, target.segment_count, pattern);
    free(target.text);
    return found;
}

static void test_paths(void **state)
{
    (void)state;
    assert_true(matches("/prompt", "prompt"));
    assert_true(matches("/api/prompt?x=1", "prompt"));
    assert_true(matches("/%70rompt", "prompt"));
    assert_false(matches("/prompt/", "prompt"));
    assert_false(matches("//prompt", "prompt"));
    assert_false(matches("/prompts", "prompt"));
    assert_false(matches("/promp", "prompt"));
    assert_true(matches("/history/a%2Fb", "history/*"));
    assert_false(matches("/history/a/b", "history/*"));
    assert_false(matches("/history", "history/*"));
    assert_true(matches("/userdata", "userdata/**"));
    assert_true(matches("/userdata/a/b/c", "userdata/**"));
    assert_false(matches("/userdatas", "userdata/**"));
    assert_true(matches("/", "**"));
    assert_true(matches("/a/b/c/d/e/f/g/h/i/j/k", "**"));
    assert_false(matches("/api/api/prompt", "prompt"));
}

static unsigned status_of(const char *path)
{
    struct rv_http_target target = {0};
    const char *why;
    bool api;
    unsigned status = rv_front_parse_target(path, strlen(path), &target, &api, &why);

    if (status == 0)
        free(target.text);
    else
        assert_true(why[0] != '\0');
    return status;
}

static void test_targets(void **state)
{
    static const char *const bad[] = {"/a/../b", "/..",  "/%2e%2E/b", "/./a",     "/a/.",  "http://a/b",
                                      "*",       "a",    "/a%",       "/a%2",     "/a%zz", "/a%00b",
                                      "/%ff",    "/a b", "/a#b",      "/a?b=%zz", "/a\x7f"};
    char longer[RV_HTTP_URI_MAX + 2];

    (void)state;
    for (unsigned i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(status_of(bad[i]), 400);
    assert_int_equal(status_of("/..a/b..?..=.."), 0);
    assert_int_equal(status_of("/a%2F..%2Fb"), 0); /* one segment, and it goes on as it is */
    memset(longer, 'a', sizeof(longer));
    longer[0] = '/';
    longer[sizeof(longer) - 1] = '\0';
    assert_int_equal(status_of(longer), 414);
}

static void test_queries(void **state)
{
    static const char text[] = "/api/view?filename=a%20b+c.png&type=temp&type=output&&x&a=1&b=1&c=1&d=1&e=1&f=1&g=1";
    struct rv_http_target target;
    const char *why;
    bool api;

    (void)state;
    assert_int_equal(rv_front_parse_target(text, strlen(text), &target, &api, &why), 0);
    assert_true(api);
    assert_int_equal(target.segment_count, 1);
    assert_string_equal(rv_http_query(&target, "filename"), "a b c.png");
    assert_string_equal(rv_http_query(&target, "type"), "temp");
    assert_string_equal(rv_http_query(&target, "x"), "");
    assert_int_equal(target.query_count, RV_HTTP_QUERY_MAX);
    free(target.text);
}

static bool is_hop(const char *name, const char *connection)
{
    return rv_front_field_is_hop(name, strlen(name), connection, strlen(connection));
}

static void test_fields(void **state)
{
    (void)state;
    assert_true(is_hop("connection", ""));
    assert_true(is_hop("TE", "close"));
    assert_true(is_hop("Upgrade", ""));
    assert_true(is_hop("X-Own", "close, x-own"));
    assert_true(is_hop("X-Own", " X-OWN ,"));
    assert_false(is_hop("X-Own", "x-owner, x-ow, own"));
    assert_false(is_hop("Host", "close"));
    assert_false(is_hop("", ",,"));
}

static void expect_cookies(const char *field, const char *value, const char *rest)
{
    char kept[100];
    size_t length = 0, n;
    const char *found = rv_front_find_cookie(field, strlen(field), "t", &length);

    assert_int_equal(found != NULL, value != NULL);
    if (value) {
        assert_int_equal(length, strlen(value));
        assert_memory_equal(found, value, length);
    }
    n = rv_front_strip_cookie(field, strlen(field), "t", kept);
    assert_int_equal(n, strlen(rest));
    assert_memory_equal(kept, rest, n);
}

static void test_cookies(void **state)
{
    (void)state;
    expect_cookies("t=secret", "secret", "");
    expect_cookies("a=b; t=secret; c=d", "secret", "a=b; c=d");
    expect_cookies("a=b;t=x=y ;c=d;", "x=y", "a=b;c=d");
    expect_cookies("t=1; t=2", "1", "");
    expect_cookies("tt=1; xt=2; T=3; t", NULL, "tt=1; xt=2; T=3; t");
    expect_cookies("", NULL, "");
    expect_cookies(" ; ;", NULL, "");
    expect_cookies("=x; t=", "", "=x");
    assert_true(rv_front_is_cookie_value("a-token_1.2~"));
    assert_false(rv_front_is_cookie_value("a b"));
    assert_false(rv_front_is_cookie_value("a;b"));
    assert_false(rv_front_is_cookie_value(""));
}

static void expect_joined(bool arrays, const char *a, const char *b, const char *wanted)
{
    struct rv_front_text texts[2] = {{a, strlen(a)}, {b, strlen(b)}};
    char *text = NULL;
    size_t length = 0;
    int r = (arrays ? rv_front_join_arrays : rv_front_join_objects)(texts, 2, &text, &length);

    if (!wanted) {
        assert_true(r < 0);
        return;
    }
    assert_int_equal(r, 0);
    assert_int_equal(length, strlen(wanted));
    assert_memory_equal(text, wanted, length);
    free(text);
}

static void test_joining(void **state)
{
    (void)state;
    expect_joined(false, "{\"A\": {\"x\": [1, \"}\"]}, \"B\":2}", " {\"B\": 3,\"C\" : null}\n",
                  "{\"A\":{\"x\": [1, \"}\"]},\"B\":2,\"C\":null}");
    expect_joined(false, "{}", "{}", "{}");
    expect_joined(false, "{\"a\":1", "{\"b\":2}", "{\"b\":2}"); /* half a document counts for nothing */
    expect_joined(false, "[1]", "{\"b\":2}", "{\"b\":2}");
    expect_joined(false, "", "nothing", NULL);
    expect_joined(true, "[\"a\",\"b\"]", "[ \"b\" , {\"c\":[]} ]", "[\"a\",\"b\",{\"c\":[]}]");
    expect_joined(true, "[]", "[]", "[]");
    expect_joined(true, "{}", "[1,1,2]", "[1,2]");
}

static void test_joining_many(void **state)
{
    char *many = malloc(2000 * 16), *text = NULL;
    struct rv_front_text texts[3];
    size_t n = 1, length;

    (void)state;
    assert_non_null(many);
    many[0] = '{';
    for (unsigned i = 0; i < 2000; i++)
        n += (size_t)snprintf(many + n, 16, "%s\"n%u\":%u", i ? "," : "", i, i);
    many[n++] = '}';
    for (unsigned i = 0; i < 3; i++)
        texts[i] = (struct rv_front_text){many, n};
    assert_int_equal(rv_front_join_objects(texts, 3, &text, &length), 0);
    assert_int_equal(length, n);
    assert_memory_equal(text, many, n);
    free(text);
    free(many);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),        cmocka_unit_test(test_targets), cmocka_unit_test(test_queries),
        cmocka_unit_test(test_fields),       cmocka_unit_test(test_cookies), cmocka_unit_test(test_joining),
        cmocka_unit_test(test_joining_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
