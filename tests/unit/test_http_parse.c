/* What the HTTP front reads itself. Heads are laid out here as libmicrohttpd leaves them: lines cut in place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/http/http.h"

/* A head in a buffer of its own, cut at its line ends and separators. `text` has '\r' '\n' as they would have come. */
struct cut {
    char text[4096];
    struct rv_http_head head;
};

static char *word(char **at, char end)
{
    char *begin = *at, *found = strchr(begin, end);

    assert_non_null(found);
    *found = '\0';
    *at = found + 1;
    return begin;
}

static void line_end(char **at)
{
    if (**at == '\r')
        *(*at)++ = '\0';
    if (**at == '\n')
        *(*at)++ = '\0';
}

static void cut(struct cut *c, const char *text)
{
    char *at = c->text;

    memset(c, 0, sizeof(*c));
    strcpy(c->text, text);
    c->head.size = strlen(text);
    c->head.method = word(&at, ' ');
    c->head.uri_length = strlen(word(&at, ' '));
    c->head.version = at;
    at += strcspn(at, "\r\n");
    line_end(&at);
    while (*at != '\r' && *at != '\n' && *at) {
        struct rv_http_field *field = &c->head.fields[c->head.field_count++];

        field->name = word(&at, ':');
        field->name_length = strlen(field->name);
        at += strspn(at, " \t");
        field->value = at;
        field->value_length = strcspn(at, "\r\n");
        at += field->value_length;
        line_end(&at);
    }
}

static unsigned check(const char *text, struct rv_http_framing *framing)
{
    struct cut c;
    const char *why = "";
    unsigned status;

    cut(&c, text);
    status = rv_http_check_head(&c.head, framing, &why);
    assert_true(status == 0 || *why);
    return status;
}

static void test_good_heads(void **state)
{
    struct rv_http_framing framing;

    (void)state;
    assert_int_equal(check("GET / HTTP/1.1\r\nHost: a\r\n\r\n", &framing), 0);
    assert_true(framing.keep_alive && !framing.has_body);
    assert_int_equal(check("GET / HTTP/1.0\r\n\r\n", &framing), 0);
    assert_false(framing.keep_alive);
    assert_int_equal(check("POST / HTTP/1.1\r\nHost:a\r\nContent-Length:  12\r\n\r\n", &framing), 0);
    assert_true(framing.has_body && framing.length == 12);
    assert_int_equal(check("POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: CHUNKED\r\n\r\n", &framing), 0);
    assert_true(framing.has_body && framing.chunked);
}

static void test_ambiguous_heads(void **state)
{
    static const char *const texts[] = {
        "GET / HTTP/1.1\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n\n",
        "GET / HTTP/1.1\r\nA: b\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1 \r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\x01\r\n\r\n",
    };
    struct rv_http_framing framing;

    (void)state;
    for (unsigned i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        assert_int_equal(check(texts[i], &framing), 400);
    assert_int_equal(check("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", &framing), 501);
    assert_int_equal(check("GET / HTTP/2.0\r\nHost: a\r\n\r\n", &framing), 505);
}

static unsigned parse(const char *uri, struct rv_http_target *target)
{
    const char *why = "";

    memset(target, 0, sizeof(*target));
    return rv_http_parse_target(uri, strlen(uri), target, &why);
}

static void test_targets(void **state)
{
    struct rv_http_target target;

    (void)state;
    assert_int_equal(parse("/a/b%2Fc/%C3%A9?x=1%262&y=a+b&z", &target), 0);
    assert_int_equal(target.segment_count, 3);
    assert_string_equal(target.segments[1], "b/c");
    assert_string_equal(target.segments[2], "\xc3\xa9");
    assert_string_equal(rv_http_query(&target, "x"), "1&2");
    assert_string_equal(rv_http_query(&target, "y"), "a b");
    assert_string_equal(rv_http_query(&target, "z"), "");
    assert_null(rv_http_query(&target, "a"));
    free(target.text);
    assert_int_equal(parse("/", &target), 0);
    assert_int_equal(target.segment_count, 0);
    free(target.text);
}

static void test_bad_targets(void **state)
{
    static const struct {
        const char *uri;
        unsigned status;
    } rows[] = {
        {"", 400},
        {"*", 400},
        {"http://a/", 400},
        {"/%", 400},
        {"/%4", 400},
        {"/%g0", 400},
        {"/%00", 400},
        {"/%ff", 400},
        {"/a b", 400},
        {"/a#b", 400},
        {"/\x80", 400},
        {"/a?b=%zz", 400},
        {"/?a&a=1", 400},
        {"//", 404},
        {"/a//b", 404},
        {"/a/..", 404},
        {"/a/%2e", 404},
        {"/a/", 404},
        {"/1/2/3/4/5/6/7/8/9", 404},
        {"/?1&2&3&4&5&6&7&8&9", 400},
    };
    struct rv_http_target target;
    char *longest = calloc(1, RV_HTTP_URI_MAX + 2);

    (void)state;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_int_equal(parse(rows[i].uri, &target), rows[i].status);
    memset(longest, '/', RV_HTTP_URI_MAX + 1);
    assert_int_equal(parse(longest, &target), 414);
    free(longest);
}

static void test_ranges(void **state)
{
    static const struct {
        const char *text;
        enum rv_http_range kind;
        uint64_t first, length;
    } rows[] = {
        {"bytes=0-0", RV_HTTP_RANGE_PART, 0, 1},
        {"bytes=5-", RV_HTTP_RANGE_PART, 5, 95},
        {"BYTES=-10", RV_HTTP_RANGE_PART, 90, 10},
        {"bytes=-1000", RV_HTTP_RANGE_PART, 0, 100},
        {"bytes=99-18446744073709551615", RV_HTTP_RANGE_PART, 99, 1},
        {"bytes=100-", RV_HTTP_RANGE_BEYOND, 0, 0},
        {"bytes=-0", RV_HTTP_RANGE_BEYOND, 0, 0},
        {"bytes=2-1", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=1-2,4-5", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=a-b", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=-", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=1", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"items=1-2", RV_HTTP_RANGE_WHOLE, 0, 0},
        {"bytes=18446744073709551616-", RV_HTTP_RANGE_WHOLE, 0, 0},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        uint64_t first = 0, length = 0;

        assert_int_equal(rv_http_parse_range(rows[i].text, strlen(rows[i].text), 100, &first, &length), rows[i].kind);
        assert_int_equal(first, rows[i].first);
        assert_int_equal(length, rows[i].length);
    }
    {
        uint64_t first, length;

        assert_int_equal(rv_http_parse_range("bytes=-1", 8, 0, &first, &length), RV_HTTP_RANGE_BEYOND);
        assert_int_equal(rv_http_parse_range("bytes=0-", 8, 0, &first, &length), RV_HTTP_RANGE_BEYOND);
    }
}

static void test_hosts(void **state)
{
    static const char *const local[] = {"localhost",   "LocalHost:1", "127.0.0.1",
                                        "10.0.0.1:80", "[::1]",       "[fe80::1]:8188"};
    static const char *const other[] = {"",    "a", "localhost.a", "127.0.0.1.a", "[::1", "[::1]a", "[localhost]",
                                        "::1", "1"};

    (void)state;
    for (unsigned i = 0; i < sizeof(local) / sizeof(local[0]); i++)
        assert_true(rv_http_host_is_local(local[i], strlen(local[i])));
    for (unsigned i = 0; i < sizeof(other) / sizeof(other[0]); i++)
        assert_false(rv_http_host_is_local(other[i], strlen(other[i])));
    assert_true(rv_http_origin_matches("http://a:1", 10, "A:1", 3));
    assert_true(rv_http_origin_matches("https://a", 9, "a", 1));
    assert_false(rv_http_origin_matches("http://ab", 9, "a", 1));
    assert_false(rv_http_origin_matches("null", 4, "", 0));
}

static int submit(const char *body, struct rv_http_submit *s)
{
    struct rv_error err = {0};
    int r;

    memset(s, 0, sizeof(*s));
    r = rv_http_submit_parse(body, strlen(body), s, &err);
    assert_true(r == 0 || (err.code && err.message[0]));
    return r;
}

static void test_submits(void **state)
{
    struct rv_http_submit s;

    (void)state;
    assert_int_equal(
        submit("{\"job_id\":\"a\",\"type\":\"t\",\"params\":{\"x\":1,\"y\":true,\"z\":0.5,\"w\":\"v\"},"
               "\"payload_base64\":\"AAEC/w==\",\"priority\":-3,\"wait_ms\":7,\"retry_on_worker_death\":true}",
               &s),
        0);
    assert_string_equal(s.submit.job_id, "a");
    assert_int_equal(s.submit.n_params, 4);
    assert_string_equal(s.submit.params[0]->value, "1");
    assert_string_equal(s.submit.params[1]->value, "true");
    assert_string_equal(s.submit.params[2]->value, "0.5");
    assert_int_equal(s.submit.payload.len, 4);
    assert_memory_equal(s.submit.payload.data, "\0\1\2\xff", 4);
    assert_int_equal(s.submit.priority, -3);
    assert_int_equal(s.submit.wait_ms, 7);
    assert_true(s.submit.retry_on_worker_death);
    rv_http_submit_fini(&s);
}

static void test_bad_submits(void **state)
{
    static const char *const bodies[] = {
        "",
        "[",
        "[]",
        "{\"x\":1}",
        "{\"job_id\":1}",
        "{\"job_id\":\"a\",\"job_id\":\"a\"}",
        "{\"params\":[]}",
        "{\"params\":{\"a\":null}}",
        "{\"payload_base64\":\"a\"}",
        "{\"payload_base64\":\"====\"}",
        "{\"payload_base64\":\"AA=A\"}",
        "{\"payload\":\"a\",\"payload_base64\":\"AAAA\"}",
        "{\"priority\":1.5}",
        "{\"priority\":99999999999}",
        "{\"wait_ms\":-1}",
        "{\"retry_on_worker_death\":0}",
        "{\"payload\":\"\\u0000\"}",
    };
    struct rv_http_submit s;

    (void)state;
    for (unsigned i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        assert_true(submit(bodies[i], &s) < 0);
        rv_http_submit_fini(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_heads),  cmocka_unit_test(test_ambiguous_heads), cmocka_unit_test(test_targets),
        cmocka_unit_test(test_bad_targets), cmocka_unit_test(test_ranges),          cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_submits),     cmocka_unit_test(test_bad_submits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
