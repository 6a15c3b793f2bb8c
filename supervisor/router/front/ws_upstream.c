/*
 * Our sockets to workers: one per client and ready worker. ComfyUI forgets the newer of two sockets with one id when
 * the older one ends (server.py: the handler's `finally` removes by id). So a socket is closed in good order, its end
 * is waited for, and only then the next one with that id is opened at that worker.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "log.h"
#include "ws.h"

static void on_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length);
static void on_ended(struct rv_ws_link *link, const char *why);
static void connect_to(struct rv_ws_upstream *upstream);

static const struct rv_ws_handlers handlers = {.message = on_message, .ended = on_ended};

/* ---- life ------------------------------------------------------------------------------------------------------- */

static bool is_same(const struct rv_ws_upstream *a, const struct rv_ws_upstream *b)
{
    return a->incarnation == b->incarnation && strcmp(a->worker, b->worker) == 0 && strcmp(a->id, b->id) == 0;
}

static bool has_socket(const struct rv_ws_upstream *upstream)
{
    return upstream->fd >= 0;
}

static void drop_event(struct rv_ws_upstream *upstream)
{
    if (upstream->event)
        event_free(upstream->event);
    upstream->event = NULL;
}

static void drop_socket(struct rv_ws_upstream *upstream)
{
    drop_event(upstream);
    rv_ws_link_fini(&upstream->socket);
    free(upstream->head);
    upstream->head = NULL;
    upstream->head_length = 0;
    if (upstream->fd >= 0)
        (void)close(upstream->fd);
    upstream->fd = -1;
}

static void destroy(struct rv_ws_upstream *upstream)
{
    struct rv_front_ws *ws = upstream->ws;

    drop_socket(upstream);
    TAILQ_REMOVE(&ws->upstreams, upstream, link);
    ws->upstream_count--;
    free(upstream);
    if (!ws->stopping)
        event_active(ws->wake_event, EV_TIMEOUT, 0);
}

static bool set_event(struct rv_ws_upstream *upstream, short what, event_callback_fn callback, uint64_t us)
{
    struct timeval tv = rv_timeval(us);

    drop_event(upstream);
    upstream->event = event_new(upstream->ws->front->router->base, what ? upstream->fd : -1, what, callback, upstream);
    return upstream->event && event_add(upstream->event, &tv) == 0;
}

static void on_rested(int fd, short what, void *context)
{
    (void)fd;
    (void)what;
    connect_to(context);
}

/* Clients that come and go would fill the log. */
static bool may_warn(struct rv_front_ws *ws)
{
    uint64_t now = rv_now_us();

    if (now < ws->quiet_until)
        return false;
    ws->quiet_until = now + RV_WS_WARN_US;
    return true;
}

/* It is tried again while its worker is ready: one that restarts brings a new socket by being ready again. */
static void fail(struct rv_ws_upstream *upstream, const char *why)
{
    uint64_t rest = RV_WS_REST_US;

    drop_socket(upstream);
    if (!upstream->client || !rv_front_find(upstream->ws->front, upstream->worker, upstream->incarnation)) {
        destroy(upstream);
        return;
    }
    /* The first time it may be the worker's end, of which we hear in a moment. */
    if (upstream->failures++ == 1 && may_warn(upstream->ws))
        rv_log_warning("a client's socket to worker %s does not stay open: %s; trying again", upstream->worker, why);
    for (unsigned i = 1; i < upstream->failures && rest < RV_WS_REST_MAX_US; i++)
        rest *= 2;
    upstream->state = RV_WS_RESTING;
    if (!set_event(upstream, 0, on_rested, rest < RV_WS_REST_MAX_US ? rest : RV_WS_REST_MAX_US))
        destroy(upstream);
}

/* ---- leaving ---------------------------------------------------------------------------------------------------- */

static bool is_awaited(const struct rv_ws_upstream *upstream)
{
    const struct rv_ws_upstream *other;

    TAILQ_FOREACH (other, &upstream->ws->upstreams, link)
        if (other->state == RV_WS_WAITING && is_same(other, upstream))
            return true;
    return false;
}

/* A worker that does not answer may be busy in a node's code. While a client wants events for that id there is nothing
 * better than to wait: a second socket would be answered no sooner, and forgotten when the first one ends. */
static bool must_wait(const struct rv_ws_upstream *upstream)
{
    return (upstream->client || is_awaited(upstream)) &&
           rv_front_find(upstream->ws->front, upstream->worker, upstream->incarnation);
}

static void on_leave_late(int fd, short what, void *context)
{
    struct rv_ws_upstream *upstream = context;
    struct timeval again = rv_timeval(RV_WS_LEAVE_US);

    (void)fd;
    (void)what;
    if (must_wait(upstream))
        (void)event_add(upstream->event, &again);
    else
        rv_ws_link_abort(&upstream->socket, "it did not answer the close frame");
}

static void close_in_order(struct rv_ws_upstream *upstream)
{
    rv_ws_link_close(&upstream->socket, 1000, "", true);
    if (!set_event(upstream, 0, on_leave_late, RV_WS_LEAVE_US))
        rv_ws_link_abort(&upstream->socket, "no memory to wait for its end");
}

static void leave(struct rv_ws_upstream *upstream)
{
    upstream->client = NULL;
    if (upstream->state == RV_WS_OPEN)
        close_in_order(upstream);
    else if (upstream->state != RV_WS_HANDSHAKE) /* the worker may know that one: it is opened first, then closed */
        destroy(upstream);
}

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static void become_open(struct rv_ws_upstream *upstream, size_t head_length)
{
    int on = 1;

    drop_event(upstream);
    upstream->state = RV_WS_OPEN;
    (void)setsockopt(upstream->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (upstream->client && upstream->client->choked)
        rv_ws_link_pause(&upstream->socket, true);
    if (rv_ws_link_start(&upstream->socket, upstream->head + head_length, upstream->head_length - head_length) < 0)
        rv_ws_link_abort(&upstream->socket, "no memory for its first bytes");
    free(upstream->head);
    upstream->head = NULL;
    if (!upstream->client)
        close_in_order(upstream);
}

static void on_head(int fd, short what, void *context)
{
    struct rv_ws_upstream *upstream = context;
    enum rv_ws_response found;
    const char *why;
    size_t length;
    ssize_t n;

    if (what & EV_TIMEOUT) {
        if (!must_wait(upstream))
            fail(upstream, "it did not answer the handshake");
        return;
    }
    n = recv(fd, upstream->head + upstream->head_length, RV_WS_RESPONSE_MAX - upstream->head_length, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        fail(upstream, "it closed the connection in the handshake");
        return;
    }
    upstream->head_length += (size_t)n;
    found = rv_ws_read_response(upstream->head, upstream->head_length, upstream->accept, &length, &why);
    if (found == RV_WS_RESPONSE_BAD)
        fail(upstream, why);
    else if (found == RV_WS_RESPONSE_GOOD)
        become_open(upstream, length);
}

/* NULL = sent; else why not. */
static const char *send_request(struct rv_ws_upstream *upstream)
{
    char request[RV_WS_REQUEST_MAX], key[RV_WS_KEY_LENGTH + 1];
    size_t length;

    if (!rv_ws_make_key(key))
        return "there are no random bytes";
    rv_ws_accept(key, upstream->accept);
    length = rv_ws_write_request(request, sizeof(request), upstream->client->target, upstream->client->host, key);
    if (length == 0)
        return "the request for the handshake is too long";
    upstream->head = malloc(RV_WS_RESPONSE_MAX);
    if (!upstream->head)
        return "no memory for the handshake";
    /* A fresh socket takes it whole: its buffer is larger. */
    if (send(upstream->fd, request, length, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)length)
        return "it does not take the handshake";
    return NULL;
}

static void on_connected(int fd, short what, void *context)
{
    struct rv_ws_upstream *upstream = context;
    int error = 0;
    socklen_t size = sizeof(error);
    const char *why = NULL;

    if (what & EV_TIMEOUT || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0 || error != 0)
        why = "it does not accept connections";
    else
        why = send_request(upstream);
    upstream->state = RV_WS_HANDSHAKE;
    if (!why && !set_event(upstream, EV_READ | EV_PERSIST, on_head, RV_WS_LEAVE_US))
        why = "no memory for the handshake";
    if (why)
        fail(upstream, why);
}

static const char *make_socket(struct rv_ws_upstream *upstream, uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct rv_ws_client *client = upstream->client;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    upstream->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (upstream->fd < 0 || rv_fd_is_reserved(upstream->fd))
        return "too many descriptors are open";
    if (rv_ws_link_init(&upstream->socket, upstream->ws->front->router->base, upstream->fd, false,
                        RV_WS_WORKER_MESSAGE_MAX, &handlers, upstream) < 0 ||
        (client->flags && rv_ws_link_send(&upstream->socket, true, client->flags, client->flags_length) < 0))
        return "no memory for a socket";
    if (connect(upstream->fd, (const struct sockaddr *)&address, sizeof(address)) < 0 && errno != EINPROGRESS)
        return "it does not accept connections";
    return set_event(upstream, EV_WRITE, on_connected, RV_WS_CONNECT_US) ? NULL : "no memory for a socket";
}

static void connect_to(struct rv_ws_upstream *upstream)
{
    const struct rv_worker_entry *worker = rv_front_find(upstream->ws->front, upstream->worker, upstream->incarnation);
    const char *why;

    if (!worker) {
        destroy(upstream);
        return;
    }
    drop_event(upstream);
    upstream->state = RV_WS_CONNECTING;
    why = make_socket(upstream, rv_front_worker_port(worker));
    if (why)
        fail(upstream, why);
}

void rv_ws_upstream_add(struct rv_ws_client *client, const struct rv_worker_entry *worker)
{
    struct rv_front_ws *ws = client->ws;
    struct rv_ws_upstream *upstream, *other;
    bool taken = false;

    if (ws->upstream_count >= RV_WS_UPSTREAMS_MAX || !(upstream = calloc(1, sizeof(*upstream)))) {
        if (may_warn(ws))
            rv_log_warning("a client gets no events of worker %s: %u sockets to workers are open", worker->name,
                           ws->upstream_count);
        return;
    }
    upstream->ws = ws;
    upstream->client = client;
    upstream->fd = -1;
    upstream->incarnation = worker->incarnation;
    upstream->state = RV_WS_WAITING;
    (void)snprintf(upstream->id, sizeof(upstream->id), "%s", client->id);
    (void)snprintf(upstream->worker, sizeof(upstream->worker), "%s", worker->name);
    TAILQ_FOREACH (other, &ws->upstreams, link)
        taken = taken || is_same(other, upstream); /* of a client that has left, or gets no events any more */
    TAILQ_INSERT_TAIL(&ws->upstreams, upstream, link);
    ws->upstream_count++;
    if (!taken)
        connect_to(upstream);
}

/* ---- what comes ------------------------------------------------------------------------------------------------- */

/* True = the client gets it as it is. */
static bool look_at(struct rv_ws_upstream *upstream, const char *text, size_t length)
{
    struct rv_ws_client *client = upstream->client;
    struct rv_ws_event event;
    char *merged;

    rv_ws_read_event(text, length, &event);
    switch (event.kind) {
    case RV_WS_OTHER:
        return true;
    case RV_WS_STATUS: /* ours is sent at each change of the queue */
        merged = rv_ws_merge_status(text, length, rv_ws_remaining(upstream->ws));
        if (merged)
            rv_ws_client_send(client, true, merged, strlen(merged));
        free(merged);
        return false;
    case RV_WS_FEATURE_FLAGS:
        if (client->flags && client->flags_answered)
            return false;
        client->flags_answered = true;
        return true;
    default:
        rv_ws_verdicts_note(client, &event);
        return true;
    }
}

static void on_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length)
{
    struct rv_ws_upstream *upstream = link->context;

    upstream->failures = 0;
    if (upstream->client && (!text || look_at(upstream, (const char *)bytes, length)))
        rv_ws_client_send(upstream->client, text, bytes, length);
}

static void on_ended(struct rv_ws_link *link, const char *why)
{
    struct rv_ws_upstream *upstream = link->context;

    if (upstream->client)
        rv_ws_verdicts_worker_ended(upstream->client, upstream->worker);
    fail(upstream, why);
}

/* A socket has ended: whoever waited for that opens its own. In a turn of its own, for this changes the list. */
static void on_wake(int fd, short what, void *context)
{
    struct rv_front_ws *ws = context;
    struct rv_ws_upstream *upstream, *other;

    (void)fd;
    (void)what;
again:
    TAILQ_FOREACH (upstream, &ws->upstreams, link) {
        bool taken = false;

        if (upstream->state != RV_WS_WAITING)
            continue;
        TAILQ_FOREACH (other, &ws->upstreams, link)
            taken = taken || (other != upstream && is_same(other, upstream));
        if (!taken) {
            connect_to(upstream);
            goto again;
        }
    }
}

/* ---- for ws.c --------------------------------------------------------------------------------------------------- */

int rv_ws_upstreams_init(struct rv_front_ws *ws)
{
    TAILQ_INIT(&ws->upstreams);
    ws->wake_event = event_new(ws->front->router->base, -1, 0, on_wake, ws);
    return ws->wake_event ? 0 : -ENOMEM;
}

void rv_ws_upstreams_fini(struct rv_front_ws *ws)
{
    if (ws->wake_event)
        event_free(ws->wake_event);
}

void rv_ws_upstreams_leave(struct rv_ws_client *client)
{
    struct rv_ws_upstream *upstream, *next;

    for (upstream = TAILQ_FIRST(&client->ws->upstreams); upstream; upstream = next) {
        next = TAILQ_NEXT(upstream, link);
        if (upstream->client == client)
            leave(upstream);
    }
}

static size_t unsent_total(const struct rv_front_ws *ws)
{
    const struct rv_ws_upstream *upstream;
    size_t total = 0;

    TAILQ_FOREACH (upstream, &ws->upstreams, link)
        total += rv_ws_link_unsent(&upstream->socket);
    return total;
}

void rv_ws_upstreams_send(struct rv_ws_client *client, bool text, const uint8_t *bytes, size_t length)
{
    struct rv_ws_upstream *upstream;
    size_t total = 0;

    TAILQ_FOREACH (upstream, &client->ws->upstreams, link) {
        size_t waiting;

        if (upstream->client != client || !has_socket(upstream))
            continue;
        waiting = rv_ws_link_unsent(&upstream->socket) + length;
        if (waiting >= RV_WS_COUNTED_FROM && total == 0)
            total = unsent_total(client->ws);
        if (waiting > RV_WS_UNSENT_WORKER) {
            rv_ws_link_abort(&upstream->socket, "it does not read what clients send to it");
        } else if (waiting >= RV_WS_COUNTED_FROM && total + length > RV_WS_UNSENT_WORKERS) {
            rv_ws_link_close(&client->socket, 1013, "too much waits for workers that do not read", false);
            return;
        } else if (rv_ws_link_send(&upstream->socket, text, bytes, length) == 0) {
            total += total ? length : 0;
        }
    }
}

void rv_ws_upstreams_pause(struct rv_ws_client *client, bool paused)
{
    struct rv_ws_upstream *upstream;

    TAILQ_FOREACH (upstream, &client->ws->upstreams, link)
        if (upstream->client == client && upstream->state == RV_WS_OPEN)
            rv_ws_link_pause(&upstream->socket, paused);
}

bool rv_ws_upstreams_has(const struct rv_ws_client *client, const char *worker)
{
    const struct rv_ws_upstream *upstream;

    TAILQ_FOREACH (upstream, &client->ws->upstreams, link)
        if (upstream->client == client && upstream->state == RV_WS_OPEN && strcmp(upstream->worker, worker) == 0)
            return true;
    return false;
}

void rv_ws_upstreams_worker_gone(struct rv_front_ws *ws, const struct rv_worker_entry *worker)
{
    struct rv_ws_upstream *upstream, *next;

    for (upstream = TAILQ_FIRST(&ws->upstreams); upstream; upstream = next) {
        next = TAILQ_NEXT(upstream, link);
        if (upstream->incarnation == worker->incarnation && strcmp(upstream->worker, worker->name) == 0 &&
            upstream->state != RV_WS_OPEN) /* what an open one still holds is read; then comes its end */
            destroy(upstream);
    }
}

void rv_ws_upstreams_destroy(struct rv_front_ws *ws)
{
    while (!TAILQ_EMPTY(&ws->upstreams))
        destroy(TAILQ_FIRST(&ws->upstreams));
}
