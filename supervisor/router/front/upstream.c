/*
 * libcurl in the loop. One multi handle keeps the connections to all workers; handles are used again. A connection's
 * event stays registered while it idles, so that a request on a kept connection costs no system call for it.
 */
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
#include "upstream.h"

#define CONNECT_MS 5000L /* to a socket of this machine */
#define IDLE_S 60L       /* a connection that rested longer is not used again: ComfyUI closes it after 75 s */
#define IDLE_MAX 64L     /* connections kept */
#define HANDLES_KEPT 32u
#define BLOCK_BYTES (64L * 1024)
#define SWEEP_US (RV_SEC / 2)
#define SOCKETS_MAX 65536

struct watch {
    struct rv_front_upstream *upstream;
    struct event *read, *write;
    int wanted; /* CURL_POLL_… */
    bool reading, writing;
    bool connected; /* libcurl 7.88 closes a socket that is not, without a word */
};

struct rv_front_upstream {
    struct rv_front *front;
    CURLM *multi;
    struct event *timer, *sweep;
    struct rv_front_transfer_list running, touched;
    struct watch *watches[SOCKETS_MAX]; /* by descriptor */
    CURL *handles[HANDLES_KEPT];
    unsigned handle_count;
    bool inside; /* libcurl is on the stack */
};

/* ---- sockets and time ------------------------------------------------------------------------------------------- */

static void collect_done(struct rv_front_upstream *upstream)
{
    CURLMsg *message;
    int left;

    while ((message = curl_multi_info_read(upstream->multi, &left))) {
        struct rv_front_transfer *transfer = NULL;

        if (message->msg != CURLMSG_DONE)
            continue;
        (void)curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
        transfer->done = true;
        transfer->result = message->data.result;
        rv_front_touch(transfer);
    }
}

static void act(struct rv_front_upstream *upstream, curl_socket_t socket, int what)
{
    int running;

    upstream->inside = true;
    (void)curl_multi_socket_action(upstream->multi, socket, what, &running);
    upstream->inside = false;
    collect_done(upstream);
    rv_front_settle(upstream->front);
}

/* From an event of the loop, and only then: clients that go on are served at once, and requests may end in it. */
static void act_and_serve(struct rv_front_upstream *upstream, curl_socket_t socket, int what)
{
    act(upstream, socket, what);
    rv_http_run(upstream->front->router->http);
}

static void set(struct event *event, bool *is_on, bool wanted)
{
    if (*is_on == wanted)
        return;
    *is_on = wanted;
    if (wanted)
        (void)event_add(event, NULL);
    else
        (void)event_del(event);
}

static void on_readable(int socket, short what, void *context)
{
    struct watch *watch = context;

    (void)what;
    if (watch->wanted & CURL_POLL_IN)
        act_and_serve(watch->upstream, socket, CURL_CSELECT_IN);
    else /* it idles, or its reader is slow: libcurl asks again when it wants to know */
        set(watch->read, &watch->reading, false);
}

static void on_writable(int socket, short what, void *context)
{
    struct watch *watch = context;

    (void)what;
    if (watch->wanted & CURL_POLL_OUT)
        act_and_serve(watch->upstream, socket, CURL_CSELECT_OUT);
    else
        set(watch->write, &watch->writing, false);
}

static int on_interest(CURL *easy, curl_socket_t socket, int wanted, void *context, void *socket_context)
{
    struct rv_front_upstream *upstream = context;
    struct watch *watch = socket >= 0 && socket < SOCKETS_MAX ? upstream->watches[socket] : NULL;

    (void)easy;
    (void)socket_context;
    if (!watch)
        return 0;
    watch->wanted = wanted == CURL_POLL_REMOVE ? 0 : wanted;
    if (watch->wanted & CURL_POLL_IN)
        watch->connected = true;
    if (watch->wanted & CURL_POLL_IN || !watch->connected)
        set(watch->read, &watch->reading, (watch->wanted & CURL_POLL_IN) != 0);
    set(watch->write, &watch->writing, (watch->wanted & CURL_POLL_OUT) != 0);
    return 0;
}

static void free_watch(struct watch *watch)
{
    if (!watch)
        return;
    if (watch->read)
        event_free(watch->read);
    if (watch->write)
        event_free(watch->write);
    free(watch);
}

static curl_socket_t on_open(void *context, curlsocktype purpose, struct curl_sockaddr *address)
{
    struct rv_front_upstream *upstream = context;
    int on = 1, fd = socket(address->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct watch *watch;

    (void)purpose;
    if (fd < 0)
        return CURL_SOCKET_BAD;
    watch = fd < SOCKETS_MAX && !rv_fd_is_reserved(fd) ? calloc(1, sizeof(*watch)) : NULL;
    if (watch) {
        watch->upstream = upstream;
        watch->read = event_new(upstream->front->router->base, fd, EV_READ | EV_PERSIST, on_readable, watch);
        watch->write = event_new(upstream->front->router->base, fd, EV_WRITE | EV_PERSIST, on_writable, watch);
    }
    if (!watch || !watch->read || !watch->write) {
        free_watch(watch);
        (void)close(fd);
        return CURL_SOCKET_BAD;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    free_watch(upstream->watches[fd]); /* of a socket that was closed without a word: it waits for nothing */
    upstream->watches[fd] = watch;
    return fd;
}

static int on_close(void *context, curl_socket_t socket)
{
    struct rv_front_upstream *upstream = context;

    if (socket >= 0 && socket < SOCKETS_MAX) {
        free_watch(upstream->watches[socket]);
        upstream->watches[socket] = NULL;
    }
    return close(socket);
}

static int on_timeout_wish(CURLM *multi, long ms, void *context)
{
    struct rv_front_upstream *upstream = context;
    struct timeval tv = {ms / 1000, ms % 1000 * 1000};

    (void)multi;
    if (ms < 0)
        (void)event_del(upstream->timer);
    else
        (void)event_add(upstream->timer, &tv);
    return 0;
}

static void on_timer(int fd, short what, void *context)
{
    (void)fd;
    (void)what;
    act_and_serve(context, CURL_SOCKET_TIMEOUT, 0);
}

static bool is_overdue(struct rv_front_transfer *transfer, uint64_t now)
{
    if (!transfer->whole && transfer->waits_for_client && transfer->waits_for_client(transfer))
        transfer->moved_us = now;
    return !transfer->done && now - transfer->moved_us > transfer->limit_us;
}

static void on_sweep(int fd, short what, void *context)
{
    static const struct timeval again = {SWEEP_US / RV_SEC, SWEEP_US % RV_SEC};
    struct rv_front_upstream *upstream = context;
    struct rv_front_transfer *transfer;
    uint64_t now = rv_now_us();

    (void)fd;
    (void)what;
    TAILQ_FOREACH (transfer, &upstream->running, link) {
        if (!is_overdue(transfer, now))
            continue;
        transfer->done = transfer->timed_out = true;
        transfer->result = CURLE_OPERATION_TIMEDOUT;
        rv_front_touch(transfer);
    }
    rv_front_settle(upstream->front);
    if (!TAILQ_EMPTY(&upstream->running))
        (void)event_add(upstream->sweep, &again);
}

/* ---- transfers -------------------------------------------------------------------------------------------------- */

void rv_front_touch(struct rv_front_transfer *transfer)
{
    if (transfer->touched)
        return;
    transfer->touched = true;
    TAILQ_INSERT_TAIL(&transfer->front->upstream->touched, transfer, touched_link);
}

void rv_front_settle(struct rv_front *front)
{
    struct rv_front_upstream *upstream = front->upstream;
    struct rv_front_transfer *transfer;

    while (!upstream->inside && (transfer = TAILQ_FIRST(&upstream->touched))) {
        TAILQ_REMOVE(&upstream->touched, transfer, touched_link);
        transfer->touched = false;
        transfer->advance(transfer);
    }
}

static CURL *take_handle(struct rv_front_upstream *upstream)
{
    return upstream->handle_count ? upstream->handles[--upstream->handle_count] : curl_easy_init();
}

int rv_front_transfer_init(struct rv_front_transfer *transfer, struct rv_front *front,
                           const struct rv_worker_entry *worker)
{
    char url[64];

    transfer->front = front;
    transfer->worker = worker;
    transfer->easy = take_handle(front->upstream);
    if (!transfer->easy)
        return -ENOMEM;
    (void)snprintf(url, sizeof(url), "http://127.0.0.1:%u/", rv_front_worker_port(worker));
    curl_easy_setopt(transfer->easy, CURLOPT_URL, url);
    curl_easy_setopt(transfer->easy, CURLOPT_PRIVATE, transfer);
    curl_easy_setopt(transfer->easy, CURLOPT_ERRORBUFFER, transfer->error);
    curl_easy_setopt(transfer->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(transfer->easy, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(transfer->easy, CURLOPT_PROTOCOLS_STR, "http");
    curl_easy_setopt(transfer->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(transfer->easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(transfer->easy, CURLOPT_HTTP_CONTENT_DECODING, 0L);
    curl_easy_setopt(transfer->easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_MS);
    curl_easy_setopt(transfer->easy, CURLOPT_MAXAGE_CONN, IDLE_S);
    curl_easy_setopt(transfer->easy, CURLOPT_TCP_NODELAY, 0L); /* on_open sets it */
    curl_easy_setopt(transfer->easy, CURLOPT_BUFFERSIZE, BLOCK_BYTES);
    curl_easy_setopt(transfer->easy, CURLOPT_OPENSOCKETFUNCTION, on_open);
    curl_easy_setopt(transfer->easy, CURLOPT_OPENSOCKETDATA, front->upstream);
    curl_easy_setopt(transfer->easy, CURLOPT_CLOSESOCKETFUNCTION, on_close);
    curl_easy_setopt(transfer->easy, CURLOPT_CLOSESOCKETDATA, front->upstream);
    return 0;
}

int rv_front_transfer_field(struct rv_front_transfer *transfer, const char *name, size_t name_length, const char *value,
                            size_t value_length)
{
    char small[512], *line = small;
    size_t size = name_length + value_length + 3;
    struct curl_slist *longer;

    if (size > sizeof(small))
        line = malloc(size);
    if (!line)
        return -ENOMEM;
    /* "Name;" is libcurl's way to say: the field is there and is empty. */
    (void)snprintf(line, size, "%.*s%s%.*s", (int)name_length, name, value_length ? ": " : ";", (int)value_length,
                   value);
    longer = curl_slist_append(transfer->fields, line);
    if (line != small)
        free(line);
    if (!longer)
        return -ENOMEM;
    transfer->fields = longer;
    return 0;
}

int rv_front_transfer_queue(struct rv_front_transfer *transfer)
{
    static const struct timeval first = {SWEEP_US / RV_SEC, SWEEP_US % RV_SEC};
    struct rv_front_upstream *upstream = transfer->front->upstream;

    curl_easy_setopt(transfer->easy, CURLOPT_HTTPHEADER, transfer->fields);
    if (curl_multi_add_handle(upstream->multi, transfer->easy) != CURLM_OK)
        return -ENOMEM;
    transfer->running = true;
    transfer->moved_us = rv_now_us();
    if (TAILQ_EMPTY(&upstream->running))
        (void)event_add(upstream->sweep, &first);
    TAILQ_INSERT_TAIL(&upstream->running, transfer, link);
    return 0;
}

int rv_front_transfer_start(struct rv_front_transfer *transfer)
{
    int r = rv_front_transfer_queue(transfer);

    if (r == 0)
        act(transfer->front->upstream, CURL_SOCKET_TIMEOUT, 0);
    return r;
}

void rv_front_transfer_fini(struct rv_front_transfer *transfer)
{
    struct rv_front_upstream *upstream = transfer->front->upstream;

    if (transfer->touched)
        TAILQ_REMOVE(&upstream->touched, transfer, touched_link);
    transfer->touched = false;
    if (transfer->running) {
        TAILQ_REMOVE(&upstream->running, transfer, link);
        (void)curl_multi_remove_handle(upstream->multi, transfer->easy);
    }
    transfer->running = false;
    curl_slist_free_all(transfer->fields);
    transfer->fields = NULL;
    if (transfer->easy && upstream->handle_count < HANDLES_KEPT) {
        curl_easy_reset(transfer->easy); /* it points into the transfer */
        upstream->handles[upstream->handle_count++] = transfer->easy;
    } else {
        curl_easy_cleanup(transfer->easy);
    }
    transfer->easy = NULL;
}

int rv_front_transfer_errno(const struct rv_front_transfer *transfer)
{
    switch (transfer->result) {
    case CURLE_OK:
        return 0;
    case CURLE_COULDNT_CONNECT:
        return -ECONNREFUSED;
    case CURLE_OPERATION_TIMEDOUT:
        return -ETIMEDOUT;
    case CURLE_OUT_OF_MEMORY:
        return -ENOMEM;
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_PARTIAL_FILE:
    case CURLE_SEND_FAIL_REWIND:
        return -ECONNRESET;
    default:
        return -EPROTO;
    }
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

int rv_front_upstream_init(struct rv_front *front)
{
    struct rv_front_upstream *upstream = calloc(1, sizeof(*upstream));

    if (!upstream)
        return -ENOMEM;
    front->upstream = upstream;
    upstream->front = front;
    TAILQ_INIT(&upstream->running);
    TAILQ_INIT(&upstream->touched);
    if (curl_global_init(CURL_GLOBAL_NOTHING) != CURLE_OK)
        return -ENOMEM;
    upstream->multi = curl_multi_init();
    upstream->timer = event_new(front->router->base, -1, 0, on_timer, upstream);
    upstream->sweep = event_new(front->router->base, -1, 0, on_sweep, upstream);
    if (!upstream->multi || !upstream->timer || !upstream->sweep)
        return -ENOMEM;
    curl_multi_setopt(upstream->multi, CURLMOPT_SOCKETFUNCTION, on_interest);
    curl_multi_setopt(upstream->multi, CURLMOPT_SOCKETDATA, upstream);
    curl_multi_setopt(upstream->multi, CURLMOPT_TIMERFUNCTION, on_timeout_wish);
    curl_multi_setopt(upstream->multi, CURLMOPT_TIMERDATA, upstream);
    curl_multi_setopt(upstream->multi, CURLMOPT_MAXCONNECTS, IDLE_MAX);
    curl_multi_setopt(upstream->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
    return 0;
}

/* What is under way to that worker (NULL = to any) ends as if it had closed the connection. */
static void fail(struct rv_front *front, const struct rv_worker_entry *worker)
{
    struct rv_front_transfer *transfer;

    TAILQ_FOREACH (transfer, &front->upstream->running, link) {
        if (transfer->done || (worker && transfer->worker != worker))
            continue;
        transfer->done = true;
        transfer->result = CURLE_RECV_ERROR;
        rv_front_touch(transfer);
    }
    rv_front_settle(front);
}

/* Its port may be held open for the next process: who waits there for an answer would wait for that one. */
void rv_front_upstream_worker_gone(struct rv_front *front, const struct rv_worker_entry *worker)
{
    if (front->upstream)
        fail(front, worker);
}

/* Clients are answered while the daemon still is there. */
void rv_front_upstream_stop(struct rv_front *front)
{
    if (front->upstream)
        fail(front, NULL);
}

void rv_front_upstream_fini(struct rv_front *front)
{
    struct rv_front_upstream *upstream = front->upstream;

    if (!upstream)
        return;
    while (upstream->handle_count > 0)
        curl_easy_cleanup(upstream->handles[--upstream->handle_count]);
    if (upstream->multi)
        (void)curl_multi_cleanup(upstream->multi);
    for (unsigned i = 0; i < SOCKETS_MAX; i++)
        free_watch(upstream->watches[i]);
    if (upstream->timer)
        event_free(upstream->timer);
    if (upstream->sweep)
        event_free(upstream->sweep);
    curl_global_cleanup();
    free(upstream);
    front->upstream = NULL;
}
