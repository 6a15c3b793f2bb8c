/*
 * The WebSocket part of the front door: handshakes and events as pure functions; a link against another one, and
 * against bytes that no honest peer sends.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <event2/event.h>
#include <jansson.h>
#include <sys/socket.h>

#include "router/front/ws_link.h"
#include "router/front/ws_parts.h"

#define KEY "dGhlIHNhbXBsZSBub25jZQ==" /* with its answer from RFC 6455 section 1.3 */
#define ACCEPT "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="

/* ---- handshakes ------------------------------------------------------------------------------------------------- */

static struct rv_http_head head_of(const char *const fields[][2], unsigned count)
{
    struct rv_http_head head = {.method = "GET", .version = "HTTP/1.1", .field_count = count};

    for (unsigned i = 0; i < count; i++)
        head.fields[i] = (struct rv_http_field){fields[i][0], fields[i][1], strlen(fields[i][0]), strlen(fields[i][1])};
    return head;
}

static void test_a_good_request(void **state)
{
    static const char *const fields[][2] = {
        {"Host", "localhost"},
        {"upgrade", "h2c, WebSocket"},
        {"Connection", "keep-alive,  Upgrade"},
        {"Sec-WebSocket-Version", "13"},
        {"Sec-WebSocket-Key", KEY},
        {"Sec-WebSocket-Extensions", "permessage-deflate"},
    };
    struct rv_http_head head = head_of(fields, 6);
    char accept[RV_WS_ACCEPT_LENGTH + 1];
    const char *why;

    (void)state;
    assert_int_equal(rv_ws_check_request(&head, accept, &why), 0);
    assert_string_equal(accept, ACCEPT);
}

static void test_bad_requests(void **state)
{
    static const struct {
        const char *method, *version, *upgrade, *connection, *number, *key;
        unsigned status;
    } bad[] = {
        {"POST", "HTTP/1.1", "websocket", "upgrade", "13", KEY, 400},
        {"GET", "HTTP/1.0", "websocket", "upgrade", "13", KEY, 400},
        {"GET", "HTTP/1.1", "h2c", "upgrade", "13", KEY, 400},
        {"GET", "HTTP/1.1", "websockets", "upgrade", "13", KEY, 400},
        {"GET", "HTTP/1.1", "websocket", "close", "13", KEY, 400},
        {"GET", "HTTP/1.1", "websocket", "", "13", KEY, 400},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "8", KEY, 426},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "", KEY, 426},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "13", "", 400},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "13", "dGhlIHNhbXBsZSBub25jZQ=", 400},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "13", "dGhlIHNhbXBsZSBub25jZQ==AAAA", 400},
        {"GET", "HTTP/1.1", "websocket", "upgrade", "13", "!!!!IHNhbXBsZSBub25jZQ==", 400},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        const char *fields[][2] = {
            {"Upgrade", bad[i].upgrade},
            {"Connection", bad[i].connection},
            {"Sec-WebSocket-Version", bad[i].number},
            {"Sec-WebSocket-Key", bad[i].key},
            {"Sec-WebSocket-Key", bad[i].key},
        };
        struct rv_http_head head = head_of((const char *const(*)[2])fields, 4);
        char accept[RV_WS_ACCEPT_LENGTH + 1];
        const char *why = NULL;

        head.method = bad[i].method;
        head.version = bad[i].version;
        assert_int_equal(rv_ws_check_request(&head, accept, &why), bad[i].status);
        assert_non_null(why);
        head.field_count = 5; /* two keys */
        assert_int_not_equal(rv_ws_check_request(&head, accept, &why), 0);
    }
}

static void test_a_request_to_a_worker(void **state)
{
    struct rv_http_target target = {.query_count = 4};
    char path[256], text[512], key[RV_WS_KEY_LENGTH + 1], small[20];

    (void)state;
    target.query[0].name = "clientId";
    target.query[0].value = "mine";
    target.query[1].name = "a b";
    target.query[1].value = "c&d=e\r\nHost: x";
    target.query[2].name = "token";
    target.query[2].value = "secret";
    target.query[3].name = "clientId";
    target.query[3].value = "another";
    assert_int_not_equal(rv_ws_write_target(path, sizeof(path), &target, "mine /?"), 0);
    assert_string_equal(path, "/ws?clientId=mine%20%2F%3F&a%20b=c%26d%3De%0D%0AHost%3A%20x");
    assert_int_equal(rv_ws_write_target(small, sizeof(small), &target, "mine /?"), 0);
    assert_int_not_equal(rv_ws_write_request(text, sizeof(text), "/ws?clientId=a", "localhost:8188", KEY), 0);
    assert_string_equal(text, "GET /ws?clientId=a HTTP/1.1\r\nHost: localhost:8188\r\nUpgrade: websocket\r\n"
                              "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " KEY "\r\n\r\n");
    assert_true(rv_ws_make_key(key));
    assert_int_equal(strlen(key), RV_WS_KEY_LENGTH);
}

static void test_answers_of_workers(void **state)
{
#define GOOD "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    static const struct {
        const char *text;
        enum rv_ws_response found;
    } answers[] = {
        {GOOD "Sec-WebSocket-Accept: " ACCEPT "\r\n\r\n\x81\x02hi", RV_WS_RESPONSE_GOOD},
        {GOOD "Date: now\r\nsec-websocket-accept:" ACCEPT " \r\n\r\n", RV_WS_RESPONSE_GOOD},
        {GOOD "Sec-WebSocket-Accept: " ACCEPT "\r\n", RV_WS_RESPONSE_MORE},
        {"", RV_WS_RESPONSE_MORE},
        {"HTTP/1.1 403 Forbidden\r\n\r\n", RV_WS_RESPONSE_BAD},
        {"\r\n\r\n", RV_WS_RESPONSE_BAD},
        {GOOD "\r\n", RV_WS_RESPONSE_BAD},
        {GOOD "Sec-WebSocket-Accept: " KEY "\r\n\r\n", RV_WS_RESPONSE_BAD},
        {GOOD "Sec-WebSocket-Accept: " ACCEPT "\r\nSec-WebSocket-Accept: " ACCEPT "\r\n\r\n", RV_WS_RESPONSE_BAD},
        {GOOD "Sec-WebSocket-Accept: " ACCEPT "\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n",
         RV_WS_RESPONSE_BAD},
        {GOOD "no colon\r\nSec-WebSocket-Accept: " ACCEPT "\r\n\r\n", RV_WS_RESPONSE_BAD},
        {"HTTP/1.1 101 x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nSec-WebSocket-Accept: " ACCEPT "\r\n\r\n",
         RV_WS_RESPONSE_BAD},
    };
    char *large = malloc(RV_WS_RESPONSE_MAX);
    const char *why;
    size_t length = 0;

    (void)state;
    for (unsigned i = 0; i < sizeof(answers) / sizeof(answers[0]); i++)
        assert_int_equal(rv_ws_read_response(answers[i].text, strlen(answers[i].text), ACCEPT, &length, &why),
                         answers[i].found);
    assert_int_equal(rv_ws_read_response(answers[0].text, strlen(answers[0].text), ACCEPT, &length, &why),
                     RV_WS_RESPONSE_GOOD);
    assert_int_equal(length, strlen(answers[0].text) - 4);
    memset(large, 'a', RV_WS_RESPONSE_MAX);
    assert_int_equal(rv_ws_read_response(large, RV_WS_RESPONSE_MAX, ACCEPT, &length, &why), RV_WS_RESPONSE_BAD);
    free(large);
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static void test_events(void **state)
{
    static const struct {
        const char *text;
        enum rv_ws_kind kind;
        const char *prompt_id, *node;
    } events[] = {
        {"{\"type\": \"status\", \"data\": {}}", RV_WS_STATUS, "", ""},
        {" {\n\"type\" : \"feature_flags\"}", RV_WS_FEATURE_FLAGS, "", ""},
        {"{\"data\": {\"a\": [1]}, \"type\": \"status\"}", RV_WS_STATUS, "", ""},
        {"{\"type\": \"stat\\u0075s\"}", RV_WS_STATUS, "", ""},
        {"{\"type\": \"progress\", \"data\": {\"type\": \"status\"}}", RV_WS_OTHER, "", ""},
        {"{\"type\": \"executing\", \"data\": {\"node\": \"57:8\", \"prompt_id\": \"p\"}}", RV_WS_EXECUTING, "p",
         "57:8"},
        {"{\"type\": \"executing\", \"data\": {\"node\": null, \"prompt_id\": \"p\"}}", RV_WS_EXECUTING, "p", ""},
        {"{\"type\": \"execution_error\", \"data\": {\"node_id\": \"3\", \"prompt_id\": \"p\"}}", RV_WS_EXECUTION_ERROR,
         "p", "3"},
        {"{\"type\": \"execution_success\", \"data\": {\"prompt_id\": 7}}", RV_WS_EXECUTION_SUCCESS, "", ""},
        {"{\"type\": \"execution_start\"", RV_WS_OTHER, "", ""},
        {"{\"type\": 7}", RV_WS_OTHER, "", ""},
        {"{\"type", RV_WS_OTHER, "", ""},
        {"[\"type\", \"status\"]", RV_WS_OTHER, "", ""},
        {"status", RV_WS_OTHER, "", ""},
        {"", RV_WS_OTHER, "", ""},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(events) / sizeof(events[0]); i++) {
        struct rv_ws_event found;

        rv_ws_read_event(events[i].text, strlen(events[i].text), &found);
        assert_int_equal(found.kind, events[i].kind);
        assert_string_equal(found.prompt_id, events[i].prompt_id);
        assert_string_equal(found.node, events[i].node);
    }
}

static json_t *load(char *text)
{
    json_t *json = json_loads(text, 0, NULL);

    assert_non_null(json);
    free(text);
    return json;
}

static void test_status(void **state)
{
    static const char plain[] =
        "{\"type\": \"status\", \"data\": {\"status\": {\"exec_info\": {\"queue_remaining\": 1}}, "
        "\"sid\": \"x\"}}";
    static const char more[] = "{\"type\": \"status\", \"data\": {\"status\": {\"exec_info\": {\"queue_remaining\": 1, "
                               "\"new\": 2}}, \"sid\": \"x\"}}";
    json_t *json = load(rv_ws_status_text(3, "an id")), *info;

    (void)state;
    assert_string_equal(json_string_value(json_object_get(json_object_get(json, "data"), "sid")), "an id");
    json_decref(json);
    json = load(rv_ws_status_text(3, NULL));
    assert_null(json_object_get(json_object_get(json, "data"), "sid"));
    json_decref(json);
    assert_null(rv_ws_merge_status(plain, strlen(plain), 5));
    assert_null(rv_ws_merge_status("{", 1, 5));
    assert_null(rv_ws_merge_status("[]", 2, 5));
    json = load(rv_ws_merge_status(more, strlen(more), 5));
    assert_null(json_object_get(json_object_get(json, "data"), "sid"));
    info = json_object_get(json_object_get(json_object_get(json, "data"), "status"), "exec_info");
    assert_int_equal(json_integer_value(json_object_get(info, "queue_remaining")), 5);
    assert_int_equal(json_integer_value(json_object_get(info, "new")), 2);
    json_decref(json);
}

static void test_verdicts(void **state)
{
    struct rv_ws_verdict verdict = {"p", "4", "", false, "resvisor.WorkerDied", "killed; it starts again"};
    json_t *json = load(rv_ws_verdict_text(&verdict)), *data = json_object_get(json, "data");

    (void)state;
    assert_string_equal(json_string_value(json_object_get(json, "type")), "execution_error");
    assert_string_equal(json_string_value(json_object_get(data, "node_id")), "4");
    assert_string_equal(json_string_value(json_object_get(data, "exception_type")), "resvisor.WorkerDied");
    assert_true(json_is_array(json_object_get(data, "traceback")));
    json_decref(json);
    verdict.interrupted = true;
    json = load(rv_ws_verdict_text(&verdict));
    assert_string_equal(json_string_value(json_object_get(json, "type")), "execution_interrupted");
    assert_null(json_object_get(json_object_get(json, "data"), "exception_type"));
    json_decref(json);
}

/* ---- links ------------------------------------------------------------------------------------------------------ */

struct end {
    struct event_base *base;
    struct rv_ws_link link;
    unsigned messages, drained, wanted; /* wanted: the loop is left at that many messages */
    size_t bytes;
    bool text, echo;
    char last[64];
    const char *ended;
};

static void end_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length)
{
    struct end *end = link->context;

    end->messages++;
    end->bytes += length;
    end->text = text;
    (void)snprintf(end->last, sizeof(end->last), "%.*s", (int)(length < 60 ? length : 60), (const char *)bytes);
    if (end->echo)
        assert_int_equal(rv_ws_link_send(link, text, bytes, length), 0);
    if (end->messages == end->wanted)
        (void)event_base_loopbreak(end->base);
}

static void end_drained(struct rv_ws_link *link)
{
    ((struct end *)link->context)->drained++;
}

static void end_ended(struct rv_ws_link *link, const char *why)
{
    struct end *end = link->context;

    end->ended = why;
    rv_ws_link_fini(link);
    (void)event_base_loopbreak(end->base);
}

static const struct rv_ws_handlers end_handlers = {end_message, end_drained, end_ended};

static void open_end(struct end *end, struct event_base *base, int fd, bool server)
{
    *end = (struct end){.base = base};
    assert_int_equal(rv_ws_link_init(&end->link, base, fd, server, 8 << 20, &end_handlers, end), 0);
    assert_int_equal(rv_ws_link_start(&end->link, NULL, 0), 0);
}

struct pair {
    struct event_base *base;
    int fds[2];
    struct end server, client;
};

static void open_pair(struct pair *p)
{
    memset(p, 0, sizeof(*p));
    p->base = event_base_new();
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p->fds), 0);
    open_end(&p->server, p->base, p->fds[0], true);
    open_end(&p->client, p->base, p->fds[1], false);
}

static void close_pair(struct pair *p)
{
    rv_ws_link_fini(&p->server.link);
    rv_ws_link_fini(&p->client.link);
    (void)close(p->fds[0]);
    (void)close(p->fds[1]);
    event_base_free(p->base);
}

static void test_messages_both_ways(void **state)
{
    static const size_t sizes[] = {0, 1, 125, 126, 65535, 65536, 5 << 20};
    char *bytes = calloc(1, 5 << 20);
    struct pair p;
    size_t total = 0;

    (void)state;
    open_pair(&p);
    p.server.echo = true;
    p.client.wanted = sizeof(sizes) / sizeof(sizes[0]);
    for (unsigned i = 0; i < p.client.wanted; i++) {
        assert_int_equal(rv_ws_link_send(&p.client.link, false, bytes, sizes[i]), 0);
        total += sizes[i];
    }
    (void)event_base_dispatch(p.base);
    assert_int_equal(p.client.messages, p.client.wanted);
    assert_int_equal(p.client.bytes, total);
    assert_false(p.client.text);
    assert_int_equal(rv_ws_link_unsent(&p.client.link), 0);
    assert_int_equal(p.client.drained, 1);
    close_pair(&p);
    free(bytes);
}

static void test_the_close_handshake(void **state)
{
    struct pair p;

    (void)state;
    open_pair(&p);
    rv_ws_link_close(&p.client.link, 1000, "", true);
    while (!p.server.ended && !p.client.ended)
        (void)event_base_dispatch(p.base);
    /* The server has shut its side down: that is the client's end. Then the client closes: the server's. */
    assert_null(p.server.ended);
    assert_string_equal(p.client.ended, "closed");
    (void)shutdown(p.fds[1], SHUT_RDWR);
    (void)event_base_dispatch(p.base);
    assert_string_equal(p.server.ended, "closed");
    close_pair(&p);
}

static void test_an_idle_link_has_no_timer(void **state)
{
    struct pair p;

    (void)state;
    open_pair(&p);
    p.client.wanted = 1;
    p.server.echo = true;
    assert_int_equal(rv_ws_link_send(&p.client.link, true, "x", 1), 0);
    (void)event_base_dispatch(p.base);
    (void)event_base_loop(p.base, EVLOOP_NONBLOCK);
    /* Two events for reading are all that is left: without a timer, the loop would wait for ever. */
    assert_int_equal(event_base_get_num_events(p.base, EVENT_BASE_COUNT_ADDED), 2);
    assert_false(event_pending(p.client.link.read_event, EV_TIMEOUT, NULL));
    assert_false(event_pending(p.server.link.read_event, EV_TIMEOUT, NULL));
    close_pair(&p);
}

static void test_a_paused_link_reads_nothing(void **state)
{
    struct pair p;

    (void)state;
    open_pair(&p);
    rv_ws_link_pause(&p.server.link, true);
    assert_int_equal(rv_ws_link_send(&p.client.link, true, "x", 1), 0);
    (void)event_base_loop(p.base, EVLOOP_NONBLOCK);
    (void)event_base_loop(p.base, EVLOOP_NONBLOCK);
    assert_int_equal(p.server.messages, 0);
    rv_ws_link_pause(&p.server.link, false);
    p.server.wanted = 1;
    (void)event_base_dispatch(p.base);
    assert_string_equal(p.server.last, "x");
    close_pair(&p);
}

/* What a server does with bytes of a client: its answer, read to the end. */
static size_t give(const void *bytes, size_t length, bool early, char *answer, size_t size, struct end *ret_end)
{
    struct event_base *base = event_base_new();
    int fds[2];
    size_t got = 0;
    ssize_t n;

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    *ret_end = (struct end){.base = base};
    assert_int_equal(rv_ws_link_init(&ret_end->link, base, fds[0], true, 1 << 20, &end_handlers, ret_end), 0);
    assert_int_equal(rv_ws_link_start(&ret_end->link, early ? bytes : NULL, early ? length : 0), 0);
    if (!early)
        assert_int_equal(write(fds[1], bytes, length), (ssize_t)length);
    (void)shutdown(fds[1], SHUT_WR);
    while (!ret_end->ended)
        (void)event_base_dispatch(base);
    while ((n = read(fds[1], answer + got, size - got)) > 0)
        got += (size_t)n;
    (void)close(fds[0]);
    (void)close(fds[1]);
    event_base_free(base);
    return got;
}

#define MASK "\0\0\0\0"

static void test_offences(void **state)
{
    static const struct {
        const char *bytes;
        size_t length;
        unsigned code; /* of the close frame that answers; 0 = none */
    } cases[] = {
        {"\x81\x02hi", 4, 1002},                          /* not masked */
        {"\xc1\x82" MASK "hi", 8, 1002},                  /* a reserved bit */
        {"\x83\x82" MASK "hi", 8, 1002},                  /* an unknown kind */
        {"\x80\x82" MASK "hi", 8, 1002},                  /* goes on with nothing */
        {"\x01\x81" MASK "a\x81\x81" MASK "b", 14, 1002}, /* a new message within another */
        {"\x81\x82" MASK "\xc3\x28", 8, 1007},            /* no UTF-8 */
        {"\x81\xff\0\0\0\0\1\0\0\0" MASK "a", 15, 1009},  /* 16 MiB are announced */
        {"\x88\x82" MASK "\x03\xea", 8, 1002},            /* their code is given back */
        {"\x81\x82" MASK "h", 7, 0},                      /* half a frame, then the end */
        {"\x81", 1, 0},                                   /* half a head */
        {"GET / HTTP/1.1\r\n\r\n", 18, 0},                /* no frame at all */
    };
    char answer[256];
    struct end end;

    (void)state;
    for (unsigned i = 0; i < 2 * sizeof(cases) / sizeof(cases[0]); i++) {
        size_t n = give(cases[i / 2].bytes, cases[i / 2].length, i % 2, answer, sizeof(answer), &end);

        if (cases[i / 2].code) {
            assert_int_equal(n, 4);
            assert_int_equal(answer[0] & 0xff, 0x88);
            assert_int_equal((answer[2] & 0xff) << 8 | (answer[3] & 0xff), cases[i / 2].code);
        }
        assert_non_null(end.ended);
    }
}

static void test_control_frames_that_are_too_long_or_in_pieces(void **state)
{
    char bytes[512] = "\x89\xfe\0\xc8" MASK, answer[256];
    struct end end;

    (void)state;
    assert_int_equal(give(bytes, 208, false, answer, sizeof(answer), &end), 2);
    assert_memory_equal(answer, "\x88\0", 2);
    assert_int_equal(end.messages, 0);
    memcpy(bytes, "\x09\x81" MASK "a", 7);
    assert_int_equal(give(bytes, 7, false, answer, sizeof(answer), &end), 2);
    assert_memory_equal(answer, "\x88\0", 2);
    assert_int_equal(end.messages, 0);
}

/* A link on one end of a socket, with bytes that came with the handshake. */
struct lone {
    struct event_base *base;
    int fds[2];
    struct end end;
};

static void open_lone(struct lone *lone, const void *bytes, size_t length)
{
    int small = 4096;

    memset(lone, 0, sizeof(*lone));
    lone->base = lone->end.base = event_base_new();
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, lone->fds), 0);
    (void)setsockopt(lone->fds[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    assert_int_equal(
        rv_ws_link_init(&lone->end.link, lone->base, lone->fds[0], true, 1 << 20, &end_handlers, &lone->end), 0);
    assert_int_equal(rv_ws_link_start(&lone->end.link, bytes, length), 0);
}

static void close_lone(struct lone *lone)
{
    rv_ws_link_fini(&lone->end.link);
    (void)close(lone->fds[0]);
    (void)close(lone->fds[1]);
    event_base_free(lone->base);
}

static void test_fragments_and_a_ping_between_them(void **state)
{
    static const char bytes[] = "\x01\x82" MASK "ab\x89\x81" MASK "p\x00\x80" MASK "\x80\x81" MASK "c";
    char answer[256];
    struct lone lone;

    (void)state;
    open_lone(&lone, bytes, sizeof(bytes) - 1);
    (void)event_base_loop(lone.base, EVLOOP_NONBLOCK);
    assert_int_equal(read(lone.fds[1], answer, sizeof(answer)), 3);
    assert_memory_equal(answer, "\x8a\x01p", 3);
    assert_int_equal(lone.end.messages, 1);
    assert_string_equal(lone.end.last, "abc");
    close_lone(&lone);
}

static void test_too_many_fragments(void **state)
{
    size_t count = RV_WS_FRAGMENTS_MAX + 10;
    char *bytes = calloc(count, 7);
    struct lone lone;

    (void)state;
    for (size_t i = 0; i < count; i++)
        memcpy(bytes + 7 * i, i ? "\x00\x81" MASK "a" : "\x01\x81" MASK "a", 7);
    open_lone(&lone, bytes, count * 7);
    (void)event_base_dispatch(lone.base);
    assert_string_equal(lone.end.ended, "it sent a message in too many fragments");
    close_lone(&lone);
    free(bytes);
}

/* Pongs for who does not read them are bounded: nothing more is read. */
static void test_a_flood_of_pings(void **state)
{
    size_t count = 20 * RV_WS_UNSENT_MAX;
    char *bytes = calloc(count, 6);
    struct lone lone;

    (void)state;
    for (size_t i = 0; i < count; i++)
        memcpy(bytes + 6 * i, "\x89\x80" MASK, 6);
    open_lone(&lone, bytes, count * 6);
    for (unsigned i = 0; i < 100; i++)
        (void)event_base_loop(lone.base, EVLOOP_NONBLOCK);
    assert_true(lone.end.link.early_length - lone.end.link.early_at > 0);
    assert_null(lone.end.ended);
    close_lone(&lone);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_good_request),
        cmocka_unit_test(test_bad_requests),
        cmocka_unit_test(test_a_request_to_a_worker),
        cmocka_unit_test(test_answers_of_workers),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_verdicts),
        cmocka_unit_test(test_messages_both_ways),
        cmocka_unit_test(test_the_close_handshake),
        cmocka_unit_test(test_an_idle_link_has_no_timer),
        cmocka_unit_test(test_a_paused_link_reads_nothing),
        cmocka_unit_test(test_offences),
        cmocka_unit_test(test_control_frames_that_are_too_long_or_in_pieces),
        cmocka_unit_test(test_fragments_and_a_ping_between_them),
        cmocka_unit_test(test_too_many_fragments),
        cmocka_unit_test(test_a_flood_of_pings),
    };

    return cmocka_run_group_tests_name("front_ws", tests, NULL, NULL);
}
