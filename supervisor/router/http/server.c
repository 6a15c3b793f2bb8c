/*
 * Connections. The listener is ours, so that a connection over the limit gets an answer, a descriptor that is kept for
 * workers is not taken, and each connection's socket is known: it is shut down when its time is over, and watched while
 * its request waits (libmicrohttpd does not look at a suspended connection). libmicrohttpd has one descriptor (epoll)
 * in our loop.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../front/front.h"
#include "http.h"
#include "log.h"

#define BACKLOG 128
#define ACCEPTS_PER_TURN 16u
#define CHECK_US 5000
#define CHECKS_MAX 1000u
#define REST_FACTOR 3u          /* of http.timeout: for a body, a stalled answer, the time between two requests */
#define POOL_BYTES (32u * 1024) /* of libmicrohttpd per connection: holds the head */
#define DISCARD_MAX (8u * 1024 * 1024)    /* bytes of a body that are read only to answer that they are too many */
#define UNWANTED_MAX (256u * 1024 * 1024) /* the same of a body that a worker has refused */
#define BODIES_MAX (256ull * 1024 * 1024) /* of bodies that are read whole, those of all requests together */
#define BODY_SMALL (64u * 1024)           /* so many bytes of a body are taken in any case */
#define RUNS_PER_TURN 4u
#define LAST_TURNS 4u /* at the end, for answers that are on their way */

/* ---- the loop --------------------------------------------------------------------------------------------------- */

static void schedule(struct rv_http *http)
{
    event_active(http->run_event, EV_TIMEOUT, 0);
}

static void run(int fd, short what, void *context)
{
    struct rv_http *http = context;
    MHD_UNSIGNED_LONG_LONG ms = 0;
    bool waits = true;

    (void)fd;
    (void)what;
    http->running = true;
    for (unsigned i = 0; i < RUNS_PER_TURN && waits && ms == 0; i++) { /* 0 = it has more to do at once */
        (void)MHD_run(http->daemon);
        waits = MHD_get_timeout(http->daemon, &ms) == MHD_YES;
    }
    http->running = false;
    if (waits) {
        struct timeval tv = {(time_t)(ms / 1000), (suseconds_t)(ms % 1000 * 1000)};

        (void)event_add(http->daemon_timer, &tv);
    } else {
        (void)event_del(http->daemon_timer);
    }
}

static void arm(struct rv_http_request *request, unsigned factor)
{
    uint64_t ms = request->http->router->setup->http_timeout_ms * factor;
    struct timeval tv = {(time_t)(ms / 1000), (suseconds_t)(ms % 1000 * 1000)};

    (void)event_add(request->deadline, &tv);
}

/*
 * The client sends no more, and its request is not complete. libmicrohttpd may have missed that: its epoll is
 * edge-triggered, and bytes that come together with the end are one edge. What is in the socket is left to it; when
 * that is read, and a moment has passed, nothing can come of this connection.
 */
static bool is_finished(struct rv_http_request *request)
{
    static const struct timeval soon = {0, CHECK_US};
    int unread = 0;

    if (ioctl(request->socket, FIONREAD, &unread) == 0 && unread > 0)
        request->quiet_checks = 0;
    else
        request->quiet_checks++;
    if (request->quiet_checks > 1 || ++request->checks > CHECKS_MAX)
        return true;
    (void)event_add(request->deadline, &soon);
    return false;
}

static void on_deadline(int fd, short what, void *context)
{
    struct rv_http_request *request = context;

    (void)fd;
    (void)what;
    if (request->streaming) {
        request->due = true;
        rv_http_resume(request);
        return;
    }
    if (request->half_closed && !is_finished(request))
        return;
    if (!request->half_closed)
        request->http->expired_connections++;
    (void)shutdown(request->socket, SHUT_RDWR); /* libmicrohttpd sees its end and closes it */
}

void rv_http_resume(struct rv_http_request *request)
{
    if (!request->suspended)
        return;
    request->suspended = false;
    MHD_resume_connection(request->connection);
    schedule(request->http); /* without it, nothing would wake it up */
}

void rv_http_suspend(struct rv_http_request *request)
{
    request->suspended = true;
    MHD_suspend_connection(request->connection);
    if (request->half_closed) /* it was told already */
        event_active(request->left, EV_CLOSED, 0);
}

void rv_http_pause_stream(struct rv_http_request *request, uint64_t us)
{
    struct timeval tv = {(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};

    (void)event_add(request->deadline, &tv);
    rv_http_suspend(request);
}

/*
 * Its end; or, while it waits, a reset or more bytes from a client that does not wait for answers. After a reset
 * libevent tells of reading and writing, and not of EV_CLOSED: so `reset` asks for reading, at edges, for bytes stay
 * there and would wake us for ever.
 */
static void on_left(int fd, short what, void *context)
{
    struct rv_http_request *request = context;
    struct pollfd now = {.fd = fd, .events = POLLRDHUP};

    if (what == EV_READ && !request->suspended) /* libmicrohttpd reads it */
        return;
    if (poll(&now, 1, 0) <= 0)
        return;
    request->half_closed = true;
    if (!request->suspended) {
        if (request->stage == RV_HTTP_HEAD || request->stage == RV_HTTP_BODY)
            (void)is_finished(request);
        return;
    }
    rv_parked_http_gone(request->http->router, request);
    rv_front_left(request);
    request->gone = request->close = true;
    if (!request->streaming && request->stage != RV_HTTP_ANSWER)
        rv_http_refuse(request, 0, RV_CODE(CANCELLED), "the connection was closed before the answer was there");
    rv_http_resume(request);
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static void request_reset(struct rv_http_request *request)
{
    rv_front_release(request);
    free(request->uri);
    free(request->target.text);
    free(request->body);
    free(request->text);
    free(request->piece);
    if (request->response)
        MHD_destroy_response(request->response);
    if (request->streaming)
        request->http->streams--;
    request->uri = request->body = request->text = request->piece = NULL;
    request->target = (struct rv_http_target){0};
    request->body_length = request->text_length = request->piece_length = request->piece_at = 0;
    request->body_room = 0;
    request->body_beyond = 0;
    request->http->body_bytes -= request->body_counted;
    request->body_counted = 0;
    request->body_no_room = false;
    request->has_uri = request->streaming = request->due = false;
    request->route = NULL;
    request->front = NULL;
    request->api = false;
    request->render = NULL;
    request->response = NULL;
    request->stage = RV_HTTP_HEAD;
}

static void request_free(struct rv_http_request *request)
{
    struct rv_http *http = request->http;

    if (request->stage == RV_HTTP_WORK)
        rv_parked_http_gone(http->router, request);
    request_reset(request);
    TAILQ_REMOVE(&http->requests, request, link);
    http->count--;
    if (request->deadline)
        event_free(request->deadline);
    if (request->left)
        event_free(request->left);
    if (request->reset)
        event_free(request->reset);
    free(request);
}

/* Gives the target as it came: the library decodes it in place afterwards. */
static void *on_uri(void *context, const char *uri, struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct rv_http_request *request = info ? info->socket_context : NULL;

    (void)context;
    if (!request)
        return NULL;
    free(request->uri);
    request->uri_length = strlen(uri);
    request->uri = strdup(uri);
    request->has_uri = true;
    return request;
}

static enum MHD_Result send_response(struct rv_http_request *request)
{
    struct MHD_Response *response = request->response;
    enum MHD_Result r;

    if (!response)
        return MHD_NO; /* no memory for it */
    request->response = NULL;
    request->stage = RV_HTTP_ANSWER;
    if (request->close)
        (void)MHD_add_response_header(response, "Connection", "close");
    request->http->answers[request->status / 100 % 6]++;
    r = MHD_queue_response(request->connection, request->status, response);
    MHD_destroy_response(response);
    return r;
}

static enum MHD_Result add_to_body(struct rv_http_request *request, const char *data, size_t length)
{
    size_t wanted = request->body_length + length + 1;

    request->body_no_room = request->body_no_room || (request->body_length + length > BODY_SMALL &&
                                                      request->http->body_bytes + length > BODIES_MAX);
    if (request->body_no_room || request->body_beyond || request->body_length + length > request->body_max) {
        request->body_beyond += length;
        return request->body_beyond > (request->body_no_room ? request->body_max : DISCARD_MAX) ? MHD_NO : MHD_YES;
    }
    if (wanted > request->body_room) { /* what is announced at once, else twice as much each time */
        size_t room = request->framing.length && !request->body_room ? request->framing.length + 1 : 2 * wanted;
        char *grown = realloc(request->body, room);

        if (!grown)
            return MHD_NO;
        request->body = grown;
        request->body_room = room;
    }
    memcpy(request->body + request->body_length, data, length);
    request->body_length += length;
    request->body_counted += length;
    request->http->body_bytes += length;
    request->body[request->body_length] = '\0';
    return MHD_YES;
}

static void work(struct rv_http_request *request)
{
    request->stage = RV_HTTP_WORK;
    (void)event_del(request->deadline);
    if (request->body_beyond) {
        request->close = true;
        if (request->body_no_room)
            rv_http_refuse(request, 503, RV_CODE(LIMIT),
                           "the bodies of all requests have %llu MiB, as much as they may", BODIES_MAX >> 20);
        else
            rv_http_refuse(request, 0, RV_CODE(TOO_LARGE), "the request's body is larger than %u KiB",
                           (unsigned)(request->body_max / 1024));
        return;
    }
    request->inside = true;
    if (request->front)
        request->front->handle(request);
    else
        request->route->handle(request);
    request->inside = false;
}

/* To a worker, as it comes. */
static enum MHD_Result pass_on(struct rv_http_request *request, const char *data, size_t *size)
{
    if (request->stage == RV_HTTP_BODY && *size > 0) {
        if (request->gone)
            return MHD_NO;
        arm(request, REST_FACTOR);
        *size -= rv_front_take(request, data, *size);
        return request->body_beyond > UNWANTED_MAX ? MHD_NO : MHD_YES;
    }
    if (request->stage == RV_HTTP_BODY) {
        request->stage = RV_HTTP_WORK;
        (void)event_del(request->deadline);
        if (!request->gone)
            rv_front_end_body(request);
        if (!request->response && !request->gone) {
            rv_http_suspend(request);
            return MHD_YES;
        }
    }
    return send_response(request);
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **place)
{
    struct rv_http_request *request = *place;

    (void)context;
    (void)connection;
    (void)url;
    if (!request)
        return MHD_NO;
    if (request->stage == RV_HTTP_HEAD) {
        request->stage = RV_HTTP_BODY;
        arm(request, REST_FACTOR);
        rv_http_check(request, method, version);
        if (request->front && !request->response && request->front->action != RV_FRONT_HANDLE)
            rv_front_pass_on(request);
        /* After an answer that is given now, libmicrohttpd closes the connection: of a request without a body, it is
         * given when the library calls again, which it does at once. */
        if (request->front && !request->framing.has_body && !request->close)
            return MHD_YES;
        return request->response || !(request->route || request->front) ? send_response(request) : MHD_YES;
    }
    if (request->exchange)
        return pass_on(request, data, size);
    if (request->stage == RV_HTTP_BODY && request->response) { /* refused */
        (void)event_del(request->deadline);
        return *size > 0 ? MHD_NO : send_response(request);
    }
    if (request->stage == RV_HTTP_BODY && *size > 0) {
        enum MHD_Result r = add_to_body(request, data, *size);

        *size = 0;
        return r;
    }
    if (request->stage == RV_HTTP_BODY) {
        work(request);
        if (!request->response && !request->gone && (request->render || request->waiting || request->exchange)) {
            rv_http_suspend(request);
            return MHD_YES;
        }
    }
    return send_response(request);
}

static void on_completed(void *context, struct MHD_Connection *connection, void **place,
                         enum MHD_RequestTerminationCode how)
{
    struct rv_http_request *request = *place;

    (void)context;
    (void)connection;
    (void)how;
    if (!request)
        return;
    if (request->stage == RV_HTTP_WORK)
        rv_parked_http_gone(request->http->router, request);
    request_reset(request);
    if (request->half_closed)
        (void)is_finished(request);
    else
        arm(request, REST_FACTOR);
    *place = NULL;
}

static void on_connection(void *context, struct MHD_Connection *connection, void **place,
                          enum MHD_ConnectionNotificationCode what)
{
    struct rv_http *http = context;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        *place = http->arriving;
        if (http->arriving)
            http->arriving->connection = connection;
        http->arriving = NULL;
    } else if (*place) {
        request_free(*place);
        *place = NULL;
    }
}

/* ---- accepting -------------------------------------------------------------------------------------------------- */

void rv_http_run(struct rv_http *http)
{
    if (!http->running && event_pending(http->run_event, EV_TIMEOUT, NULL)) {
        (void)event_del(http->run_event);
        run(-1, 0, http);
    }
}

/* What the client has sent is read first, for closing with it unread would take the answer back. Nobody waits. */
static void say_full(struct rv_http *http, int socket)
{
    static const char text[] =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        "Connection: close\r\nContent-Length: 93\r\n\r\n"
        "{\"error\":{\"code\":\"limit\",\"message\":\"too many connections\","
        "\"remedy\":\"\",\"retry_after_ms\":1000}}";
    char waste[4096];

    http->refused_connections++;
    (void)recv(socket, waste, sizeof(waste), MSG_DONTWAIT);
    (void)send(socket, text, sizeof(text) - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)shutdown(socket, SHUT_WR);
    (void)close(socket);
}

static void admit(struct rv_http *http, int socket, const struct sockaddr *address, socklen_t length)
{
    struct rv_http_request *request = NULL;
    int on = 1;

    if (http->count < http->router->setup->http_connections && !rv_fd_is_reserved(socket))
        request = calloc(1, sizeof(*request));
    if (!request) {
        say_full(http, socket);
        return;
    }
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    request->http = http;
    request->socket = socket;
    TAILQ_INSERT_TAIL(&http->requests, request, link);
    http->count++;
    request->deadline = event_new(http->router->base, -1, 0, on_deadline, request);
    request->left = event_new(http->router->base, socket, EV_CLOSED | EV_ET | EV_PERSIST, on_left, request);
    request->reset = event_new(http->router->base, socket, EV_READ | EV_ET | EV_PERSIST, on_left, request);
    if (!request->deadline || !request->left || !request->reset || event_add(request->left, NULL) < 0 ||
        event_add(request->reset, NULL) < 0) {
        request_free(request);
        (void)close(socket);
        return;
    }
    arm(request, 1);
    http->arriving = request;
    if (MHD_add_connection(http->daemon, socket, address, length) != MHD_YES && http->arriving)
        request_free(request); /* the socket is closed already */
    http->arriving = NULL;
}

static void on_accept(int listener, short what, void *context)
{
    static const struct timeval pause = {1, 0};
    struct rv_http *http = context;

    (void)what;
    for (unsigned i = 0; i < ACCEPTS_PER_TURN; i++) {
        struct sockaddr_storage address;
        socklen_t length = sizeof(address);
        int socket = accept4(listener, (struct sockaddr *)&address, &length, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (socket >= 0) {
            admit(http, socket, (const struct sockaddr *)&address, length);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno != EAGAIN) { /* it stays readable: without a pause this would spin */
            rv_log_warning("cannot accept an HTTP connection: %s; trying again in 1 s", strerror(errno));
            (void)event_del(http->accept_event);
            (void)event_add(http->accept_pause, &pause);
        }
        break;
    }
    schedule(http);
}

static void on_pause_end(int fd, short what, void *context)
{
    struct rv_http *http = context;

    (void)fd;
    (void)what;
    (void)event_add(http->accept_event, NULL);
}

/* "HOST:PORT" with the host as a number; the configuration has been checked. */
static int read_address(const char *text, struct sockaddr_storage *ret_address, socklen_t *ret_length)
{
    struct sockaddr_in *four = (struct sockaddr_in *)ret_address;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)ret_address;
    const char *colon = strrchr(text, ':');
    char host[INET6_ADDRSTRLEN + 2];
    uint64_t port;

    memset(ret_address, 0, sizeof(*ret_address));
    if (!colon || (size_t)(colon - text) >= sizeof(host) ||
        !rv_http_parse_number(colon + 1, strlen(colon + 1), &port) || port > UINT16_MAX)
        return -EINVAL;
    (void)snprintf(host, sizeof(host), "%.*s", (int)(colon - text), text);
    if (host[0] == '[') {
        host[strlen(host) - 1] = '\0';
        six->sin6_family = AF_INET6;
        six->sin6_port = htons((uint16_t)port);
        *ret_length = sizeof(*six);
        return inet_pton(AF_INET6, host + 1, &six->sin6_addr) == 1 ? 0 : -EINVAL;
    }
    four->sin_family = AF_INET;
    four->sin_port = htons((uint16_t)port);
    *ret_length = sizeof(*four);
    return inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &four->sin_addr) == 1 ? 0 : -EINVAL;
}

static int listen_at(struct rv_http *http, const char *text, struct rv_error *err)
{
    struct sockaddr_storage address;
    socklen_t length;
    int on = 1, r = read_address(text, &address, &length);

    if (r < 0)
        return rv_error_set(err, EINVAL, RV_CODE(CONFIG), "http.listen: \"%s\" is not an address", text);
    http->listener = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (http->listener < 0)
        return rv_error_set(err, errno, RV_CODE(INTERNAL), "cannot make a socket: %s", strerror(errno));
    /* After a router's end its connections linger, and the next one must not wait for them. */
    (void)setsockopt(http->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(http->listener, (const struct sockaddr *)&address, length) < 0 || listen(http->listener, BACKLOG) < 0) {
        r = rv_error_set(err, errno, RV_CODE(CONFIG), "cannot serve HTTP at %s: %s", text, strerror(errno));
        rv_error_remedy(err, "give http.listen an address of this machine and a free port");
        return r;
    }
    return 0;
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

static void on_log(void *context, const char *format, va_list ap)
{
    char text[256], safe[512];

    (void)context;
    (void)vsnprintf(text, sizeof(text), format, ap);
    text[strcspn(text, "\n")] = '\0';
    rv_log_debug("http: %s", rv_escape(safe, sizeof(safe), text, strlen(text)));
}

static struct MHD_Daemon *start_daemon(struct rv_http *http)
{
    return MHD_start_daemon(
        MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME | MHD_ALLOW_UPGRADE | MHD_USE_ERROR_LOG, 0,
        NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log, http, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, http, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http, MHD_OPTION_URI_LOG_CALLBACK, on_uri,
        http, MHD_OPTION_CONNECTION_LIMIT, http->router->setup->http_connections + 1, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)(http->router->setup->http_timeout_ms * REST_FACTOR / 1000 + 1), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)POOL_BYTES, MHD_OPTION_END);
}

int rv_http_open(struct rv_router *router, struct rv_error *err)
{
    const char *text = router->setup->http_listen;
    const union MHD_DaemonInfo *info;
    struct rv_http *http;
    int r;

    if (text[0] == '\0')
        return 0;
    http = calloc(1, sizeof(*http));
    if (!http)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory to serve HTTP");
    http->router = router;
    http->listener = -1;
    TAILQ_INIT(&http->requests);
    router->http = http;
    r = listen_at(http, text, err);
    if (r < 0)
        return r;
    http->daemon = start_daemon(http);
    info = http->daemon ? MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (!info)
        return rv_error_set(err, EIO, RV_CODE(INTERNAL), "libmicrohttpd does not start");
    http->daemon_event = event_new(router->base, info->epoll_fd, EV_READ | EV_PERSIST, run, http);
    http->daemon_timer = event_new(router->base, -1, 0, run, http);
    http->run_event = event_new(router->base, -1, 0, run, http);
    http->accept_event = event_new(router->base, http->listener, EV_READ | EV_PERSIST, on_accept, http);
    http->accept_pause = event_new(router->base, -1, 0, on_pause_end, http);
    if (!http->daemon_event || !http->daemon_timer || !http->run_event || !http->accept_event || !http->accept_pause ||
        event_add(http->daemon_event, NULL) < 0 || event_add(http->accept_event, NULL) < 0)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory to serve HTTP");
    rv_log_info("HTTP is served at http://%s%s", text, router->setup->http_token[0] ? ", with a token" : "");
    return 0;
}

/* Those that wait get their answer first: a daemon that ends with a suspended connection aborts. */
static void end_requests(struct rv_http *http)
{
    struct rv_http_request *request;

    TAILQ_FOREACH (request, &http->requests, link) {
        if (!request->suspended)
            continue;
        rv_parked_http_gone(http->router, request);
        rv_front_left(request);
        request->gone = request->close = true;
        if (!request->streaming && request->stage != RV_HTTP_ANSWER)
            rv_http_refuse(request, 0, RV_CODE(SHUTTING_DOWN), "resvisor is stopping");
        rv_http_resume(request);
    }
    for (unsigned i = 0; i < LAST_TURNS; i++)
        (void)MHD_run(http->daemon);
    TAILQ_FOREACH (request, &http->requests, link)
        if (request->suspended) /* a request that came in between */
            rv_http_resume(request);
}

void rv_http_close(struct rv_router *router)
{
    struct rv_http *http = router->http;

    if (!http)
        return;
    if (http->run_event)
        end_requests(http);
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    if (http->daemon_event)
        event_free(http->daemon_event);
    if (http->daemon_timer)
        event_free(http->daemon_timer);
    if (http->run_event)
        event_free(http->run_event);
    if (http->accept_event)
        event_free(http->accept_event);
    if (http->accept_pause)
        event_free(http->accept_pause);
    if (http->listener >= 0)
        (void)close(http->listener);
    free(http);
    router->http = NULL;
}

/* ---- what the router tells -------------------------------------------------------------------------------------- */

void rv_http_reply(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    struct rv_error err = {0};

    (void)rv_error_from_message(&err, reply->error);
    if (err.code)
        rv_http_answer_error(request, &err, reply->error->retry_after_ms, 0);
    else
        request->render(request, reply, fd);
    if (!request->inside)
        rv_http_resume(request);
}

void rv_http_log_lines(struct rv_http_request *request, const uint8_t *text, size_t length)
{
    char *grown = length ? realloc(request->text, request->text_length + length) : NULL;

    if (!grown)
        return; /* lines are missing, as they do when they are old */
    request->text = grown;
    memcpy(grown + request->text_length, text, length);
    request->text_length += length;
}

void rv_http_event(struct rv_router *router)
{
    struct rv_http_request *request;

    if (!router->http || router->http->streams == 0)
        return;
    TAILQ_FOREACH (request, &router->http->requests, link)
        if (request->streaming)
            rv_http_resume(request);
}
