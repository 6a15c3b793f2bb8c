/* Clients: how one comes, what it says, what all are told, how it leaves. */
#include <errno.h>
#include <event2/event.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "clock.h"
#include "log.h"
#include "ws.h"

#define KEEPALIVE_IDLE_S 60 /* the kernel finds clients that vanished: no timer of ours */
#define KEEPALIVE_STEP_S 15
#define KEEPALIVE_COUNT 4
#define TARGET_MAX (RV_WS_REQUEST_MAX / 2)

static void on_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length);
static void on_drained(struct rv_ws_link *link);
static void on_ended(struct rv_ws_link *link, const char *why);

static const struct rv_ws_handlers handlers = {.message = on_message, .drained = on_drained, .ended = on_ended};

/* ---- sending ---------------------------------------------------------------------------------------------------- */

static size_t unsent_total(const struct rv_front_ws *ws)
{
    const struct rv_ws_client *client;
    size_t total = 0;

    TAILQ_FOREACH (client, &ws->clients, link)
        total += rv_ws_link_unsent(&client->socket);
    return total;
}

void rv_ws_client_send(struct rv_ws_client *client, bool text, const void *bytes, size_t length)
{
    if (rv_ws_link_unsent(&client->socket) + length >= RV_WS_COUNTED_FROM &&
        unsent_total(client->ws) + length > RV_WS_UNSENT_TOTAL) {
        rv_ws_link_close(&client->socket, 1013, "too much waits for clients that do not read", false);
        return;
    }
    (void)rv_ws_link_send(&client->socket, text, bytes, length);
    if (!client->choked && rv_ws_link_unsent(&client->socket) > RV_WS_UNSENT_HIGH) {
        struct timeval limit = rv_timeval(RV_WS_CHOKED_US);

        client->choked = true;
        rv_ws_upstreams_pause(client, true);
        (void)event_add(client->choke_timer, &limit);
    }
}

/* ComfyUI sends to its sockets in turn: one that is not read keeps events from all others of that worker. */
static void on_choked_long(int fd, short what, void *context)
{
    struct rv_ws_client *client = context;

    (void)fd;
    (void)what;
    rv_ws_link_close(&client->socket, 1013, "it reads too slowly", false);
}

static void on_drained(struct rv_ws_link *link)
{
    struct rv_ws_client *client = link->context;

    if (!client->choked)
        return;
    client->choked = false;
    (void)event_del(client->choke_timer);
    rv_ws_upstreams_pause(client, false);
    if (client->status_due)
        rv_ws_client_send_status(client, NULL);
}

uint64_t rv_ws_remaining(const struct rv_front_ws *ws)
{
    return rv_front_queue_remaining(ws->front);
}

void rv_ws_client_send_status(struct rv_ws_client *client, const char *sid)
{
    char *text;

    client->status_due = client->choked; /* it says how things stand: one, when there is room, does for all */
    if (client->choked)
        return;
    text = rv_ws_status_text(rv_ws_remaining(client->ws), sid);
    if (text)
        rv_ws_client_send(client, true, text, strlen(text));
    free(text);
}

/* One for all changes of a turn. */
static void on_status(int fd, short what, void *context)
{
    struct rv_front_ws *ws = context;
    struct rv_ws_client *client;

    (void)fd;
    (void)what;
    TAILQ_FOREACH (client, &ws->clients, link)
        rv_ws_client_send_status(client, NULL);
}

/* ---- what a client says ----------------------------------------------------------------------------------------- */

static void keep_flags(struct rv_ws_client *client, const uint8_t *bytes, size_t length)
{
    struct rv_ws_event event;

    rv_ws_read_event((const char *)bytes, length, &event);
    if (event.kind != RV_WS_FEATURE_FLAGS || client->flags || length > RV_WS_FLAGS_MAX)
        return;
    client->flags = malloc(length);
    if (!client->flags)
        return;
    memcpy(client->flags, bytes, length);
    client->flags_length = length;
}

static void on_message(struct rv_ws_link *link, bool text, const uint8_t *bytes, size_t length)
{
    struct rv_ws_client *client = link->context;

    if (client->superseded)
        return;
    if (text)
        keep_flags(client, bytes, length);
    rv_ws_upstreams_send(client, text, bytes, length);
}

/* ---- leaving ---------------------------------------------------------------------------------------------------- */

static void client_destroy(struct rv_ws_client *client)
{
    struct rv_front_ws *ws = client->ws;

    rv_ws_upstreams_leave(client);
    rv_ws_verdicts_fini(client);
    rv_ws_link_fini(&client->socket);
    TAILQ_REMOVE(&ws->clients, client, link);
    ws->client_count--;
    (void)MHD_upgrade_action(client->handle, MHD_UPGRADE_ACTION_CLOSE);
    event_active(ws->front->router->http->run_event, EV_TIMEOUT, 0); /* without it, nothing would close the socket */
    if (client->choke_timer)
        event_free(client->choke_timer);
    free(client->flags);
    free(client->target);
    free(client->host);
    free(client);
}

static void on_ended(struct rv_ws_link *link, const char *why)
{
    struct rv_ws_client *client = link->context;
    char id[RV_WS_CLIENT_ID_MAX + 1];

    rv_log_debug("the WebSocket of client %s ended: %s", rv_escape(id, sizeof(id), client->id, strlen(client->id)),
                 why);
    client_destroy(client);
}

/* ---- coming ----------------------------------------------------------------------------------------------------- */

/* As ComfyUI does: 32 hexadecimal digits. */
static bool mint_id(char *ret_id)
{
    uint8_t bytes[16];

    if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes))
        return false;
    for (unsigned i = 0; i < sizeof(bytes); i++)
        (void)snprintf(ret_id + 2 * (size_t)i, 3, "%02x", bytes[i]);
    return true;
}

/* The client's id and what its workers are asked for; false = no memory, or it does not fit. */
static bool fill_client(struct rv_ws_client *client, const struct rv_http_request *request)
{
    const char *id = rv_http_query(&request->target, "clientId");
    const char *host = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Host");
    char target[TARGET_MAX];

    if (id && id[0])
        (void)snprintf(client->id, sizeof(client->id), "%s", id);
    else if (!mint_id(client->id))
        return false;
    if (rv_ws_write_target(target, sizeof(target), &request->target, client->id) == 0)
        return false;
    client->target = strdup(target);
    client->host = strdup(host ? host : "localhost");
    return client->target && client->host;
}

/* The older one stays, as it does in ComfyUI, but its workers' sockets give way to new ones. */
static void supersede(struct rv_ws_client *client)
{
    struct rv_ws_client *other;

    TAILQ_FOREACH (other, &client->ws->clients, link) {
        if (other == client || other->superseded || strcmp(other->id, client->id) != 0)
            continue;
        other->superseded = true;
        rv_ws_upstreams_leave(other);
        memcpy(client->prompts, other->prompts, sizeof(client->prompts));
        client->next_prompt = other->next_prompt;
    }
}

static void prepare_socket(int socket)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S},
        {IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_STEP_S},
        {IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_COUNT},
    };

    for (unsigned i = 0; i < sizeof(options) / sizeof(options[0]); i++)
        (void)setsockopt(socket, options[i].level, options[i].name, &options[i].value, sizeof(options[i].value));
}

/* The socket is ours from here until MHD_UPGRADE_ACTION_CLOSE, which closes it. */
static void on_upgraded(void *context, struct MHD_Connection *connection, void *request_context, const char *early,
                        size_t early_length, MHD_socket socket, struct MHD_UpgradeResponseHandle *handle)
{
    struct rv_front_ws *ws = context;
    struct rv_http_request *request = request_context;
    struct rv_ws_client *client = ws->stopping ? NULL : calloc(1, sizeof(*client));
    struct rv_worker_entry *worker = NULL;

    (void)connection;
    (void)event_del(request->deadline);
    (void)event_del(request->left);
    (void)event_del(request->reset);
    if (!client) {
        (void)MHD_upgrade_action(handle, MHD_UPGRADE_ACTION_CLOSE);
        return;
    }
    client->ws = ws;
    client->handle = handle;
    TAILQ_INSERT_TAIL(&ws->clients, client, link);
    ws->client_count++;
    prepare_socket(socket);
    client->choke_timer = event_new(ws->front->router->base, -1, 0, on_choked_long, client);
    if (rv_ws_verdicts_init(client) < 0 || !client->choke_timer || !fill_client(client, request) ||
        rv_ws_link_init(&client->socket, ws->front->router->base, socket, true, RV_WS_CLIENT_MESSAGE_MAX, &handlers,
                        client) < 0) {
        client_destroy(client);
        return;
    }
    supersede(client);
    rv_ws_client_send_status(client, client->id);
    if (rv_ws_link_start(&client->socket, early, early_length) < 0)
        rv_ws_link_abort(&client->socket, "no memory for its first bytes");
    while ((worker = rv_front_next(ws->front, worker)))
        rv_ws_upstream_add(client, worker);
}

static unsigned count_ready(const struct rv_front *front)
{
    const struct rv_worker_entry *worker = NULL;
    unsigned count = 0;

    while ((worker = rv_front_next(front, worker)))
        count++;
    return count;
}

/* What its workers will be asked; false = refused. */
static bool check_target(struct rv_http_request *request, const struct rv_http_head *head)
{
    const char *id = rv_http_query(&request->target, "clientId");
    const struct rv_http_field *host = rv_http_find(head, "Host", NULL);
    char target[TARGET_MAX];

    if (id && strlen(id) > RV_WS_CLIENT_ID_MAX) {
        rv_front_answer_error(request, 400, "bad_request", "", 0, "clientId is longer than %u bytes",
                              RV_WS_CLIENT_ID_MAX);
        return false;
    }
    if ((host && host->value_length > RV_WS_HOST_MAX) ||
        rv_ws_write_target(target, sizeof(target), &request->target, id ? id : "") == 0) {
        rv_front_answer_error(request, 414, "bad_request", "", 0, "the Host field or the query is too long");
        return false;
    }
    return true;
}

static bool check_limits(struct rv_http_request *request, const struct rv_front_ws *ws)
{
    unsigned limit = request->http->router->setup->http_connections / 2;

    if (ws->stopping || ws->client_count >= limit ||
        ws->upstream_count + count_ready(ws->front) > RV_WS_UPSTREAMS_MAX) {
        rv_front_answer_error(request, 503, "limit", "raise http.connections: half of them may be WebSockets",
                              RV_FRONT_RETRY_MS, "%u WebSockets are open, as many as there may be", ws->client_count);
        return false;
    }
    return true;
}

void rv_front_ws_open(struct rv_http_request *request)
{
    struct rv_front_ws *ws = request->http->router->front->ws;
    struct rv_http_head head = {0};
    char accept[RV_WS_ACCEPT_LENGTH + 1];
    const char *why;
    unsigned status;

    rv_http_read_head(request, request->head_only ? "HEAD" : "GET",
                      request->framing.keep_alive ? MHD_HTTP_VERSION_1_1 : MHD_HTTP_VERSION_1_0, &head);
    request->close = true; /* if it is refused: what follows could be frames */
    status = rv_ws_check_request(&head, accept, &why);
    if (status) {
        rv_front_answer_error(request, status, "bad_request", "", 0, "%s", why);
        if (status == 426)
            rv_http_add_header(request, "Sec-WebSocket-Version", "13");
        return;
    }
    if (!check_target(request, &head) || !check_limits(request, ws))
        return;
    request->close = false; /* "Connection: close" does not go with an upgrade */
    request->status = 101;
    request->response = MHD_create_response_for_upgrade(on_upgraded, ws);
    if (!request->response)
        return;
    rv_http_add_header(request, "Upgrade", "websocket");
    rv_http_add_header(request, "Sec-WebSocket-Accept", accept);
}

/* ---- what others tell ------------------------------------------------------------------------------------------- */

void rv_front_ws_worker_ready(struct rv_front *front, struct rv_worker_entry *worker)
{
    struct rv_ws_client *client;

    TAILQ_FOREACH (client, &front->ws->clients, link)
        if (!client->superseded && !client->socket.closing)
            rv_ws_upstream_add(client, worker);
}

void rv_front_ws_worker_gone(struct rv_front *front, struct rv_worker_entry *worker)
{
    rv_ws_upstreams_worker_gone(front->ws, worker);
}

void rv_front_ws_job_ending(struct rv_front *front, struct rv_job_record *job)
{
    const char *id = rv_front_prompt_client(job);
    struct rv_ws_client *client;

    if (!id)
        return;
    TAILQ_FOREACH (client, &front->ws->clients, link)
        if (!client->superseded && strcmp(client->id, id) == 0)
            rv_ws_verdicts_job(client, job);
}

void rv_front_ws_queue_changed(struct rv_front *front)
{
    if (!TAILQ_EMPTY(&front->ws->clients))
        event_active(front->ws->status_event, EV_TIMEOUT, 0);
}

int rv_front_ws_init(struct rv_front *front)
{
    struct rv_front_ws *ws = calloc(1, sizeof(*ws));

    if (!ws)
        return -ENOMEM;
    ws->front = front;
    TAILQ_INIT(&ws->clients);
    front->ws = ws;
    ws->status_event = event_new(front->router->base, -1, 0, on_status, ws);
    return ws->status_event ? rv_ws_upstreams_init(ws) : -ENOMEM;
}

/* Clients are told; what does not fit into their sockets now is lost. libmicrohttpd closes the sockets in its turns. */
void rv_front_ws_stop(struct rv_front *front)
{
    struct rv_front_ws *ws = front->ws;

    if (!ws)
        return;
    ws->stopping = true;
    rv_ws_upstreams_destroy(ws);
    while (!TAILQ_EMPTY(&ws->clients)) {
        struct rv_ws_client *client = TAILQ_FIRST(&ws->clients);

        rv_ws_link_close(&client->socket, 1001, "resvisor is stopping", false);
        client_destroy(client);
    }
}

void rv_front_ws_fini(struct rv_front *front)
{
    if (!front->ws)
        return;
    if (front->ws->status_event)
        event_free(front->ws->status_event);
    rv_ws_upstreams_fini(front->ws);
    free(front->ws);
    front->ws = NULL;
}
