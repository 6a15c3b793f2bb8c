/*
 * What the WebSocket of the front door reads itself: a worker's answer to the handshake, events, and frames of clients.
 * The first byte chooses. Whatever comes, a link ends or waits, and what is made out of an event is JSON.
 */
#include <event2/event.h>
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "router/front/ws_link.h"
#include "router/front/ws_parts.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void answer(const char *text, size_t size)
{
    size_t length = 0;
    const char *why = NULL;
    enum rv_ws_response found = rv_ws_read_response(text, size, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", &length, &why);

    if ((found == RV_WS_RESPONSE_GOOD && (length == 0 || length > size)) || (found == RV_WS_RESPONSE_BAD && !why))
        abort();
}

static void request(const char *text, size_t size)
{
    struct rv_http_head head = {.method = "GET", .version = "HTTP/1.1", .field_count = 4};
    static const char *const names[] = {"Upgrade", "Connection", "Sec-WebSocket-Version", "Sec-WebSocket-Key"};
    char accept[RV_WS_ACCEPT_LENGTH + 1];
    const char *why = NULL;

    for (unsigned i = 0; i < 4; i++) { /* a line for each field */
        const char *end = memchr(text, '\n', size);
        size_t length = end ? (size_t)(end - text) : size;

        head.fields[i] = (struct rv_http_field){names[i], text, strlen(names[i]), length};
        text += end ? length + 1 : length;
        size -= end ? length + 1 : length;
    }
    if (rv_ws_check_request(&head, accept, &why) == 0 && strlen(accept) != RV_WS_ACCEPT_LENGTH)
        abort();
}

static void event(const char *text, size_t size)
{
    struct rv_ws_event found;
    char *merged;

    rv_ws_read_event(text, size, &found);
    if (strlen(found.prompt_id) > RV_WS_PROMPT_ID_MAX || strlen(found.node) > RV_WS_NODE_MAX)
        abort();
    merged = rv_ws_merge_status(text, size, 3);
    if (merged) {
        json_t *json = json_loads(merged, 0, NULL);

        if (!json || json_object_get(json_object_get(json, "data"), "sid"))
            abort();
        json_decref(json);
    }
    free(merged);
}

static void on_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length)
{
    (void)rv_ws_link_send(link, text, bytes, length);
}

static void on_ended(struct rv_ws_link *link, const char *why)
{
    if (!why)
        abort();
    rv_ws_link_fini(link);
}

static void frames(const char *text, size_t size)
{
    static const struct rv_ws_handlers handlers = {.message = on_message, .ended = on_ended};
    static struct event_base *base;
    struct rv_ws_link link;
    int fds[2];

    if (!base)
        base = event_base_new();
    if (size == 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) < 0)
        return;
    (void)shutdown(fds[1], SHUT_WR);
    if (rv_ws_link_init(&link, base, fds[0], text[0] & 1, 1 << 16, &handlers, NULL) == 0) {
        if (rv_ws_link_start(&link, text + 1, size - 1) < 0)
            abort();
        for (unsigned i = 0; i < 8 && link.handlers; i++)
            (void)event_base_loop(base, EVLOOP_NONBLOCK);
        rv_ws_link_fini(&link);
    }
    (void)close(fds[0]);
    (void)close(fds[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const parts[])(const char *, size_t) = {answer, request, event, frames};
    char *text;

    if (size < 1)
        return 0;
    text = malloc(size); /* exactly as long */
    memcpy(text, data + 1, size - 1);
    parts[data[0] % 4](text, size - 1);
    free(text);
    return 0;
}
