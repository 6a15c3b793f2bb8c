/*
 * A request passed on to a worker, and its answer passed back, both as they come.
 *
 * Each way has one buffer. When the buffer to the worker is full, the client's connection is suspended; when the buffer
 * to the client is full, libcurl's transfer is paused: so a slow reader or a large upload costs two buffers and no
 * more. The client leaves: the transfer is ended, and the worker sees its connection close. The worker dies before its
 * answer has begun: the client gets an error; within it: its connection is closed before the end that was promised.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "clock.h"
#include "log.h"
#include "upstream.h"

#define BUFFER_MAX (128u * 1024) /* each way */
#define BUFFER_FIRST 4096u
#define HEAD_MAX (12u * 1024) /* of an answer: with a request's head it must fit libmicrohttpd's 32 KiB */
#define BLOCK_BYTES (64u * 1024)

struct buffer {
    char *bytes;
    size_t begin, end, room;
};

struct rv_front_exchange {
    struct rv_front_transfer transfer;
    struct rv_http_request *request;
    char worker[RV_WORKER_NAME_MAX + 1];
    struct buffer up, down;
    bool up_ended;               /* the client has sent all */
    bool up_paused, down_paused; /* libcurl waits for us */
    bool blocked;                /* the client waits for room in `up` */
    bool answered;               /* the response was made: its reader takes from `down` */
    bool head_done;              /* of the answer, and not of a 1xx */
    bool too_large;              /* its head is */
    bool asked[RV_TYPES_MAX];    /* types that did not know it */
    unsigned status;
    char *head; /* name NUL value NUL … */
    size_t head_length, head_room;
};

/* ---- buffers ---------------------------------------------------------------------------------------------------- */

static size_t buffer_used(const struct buffer *b)
{
    return b->end - b->begin;
}

/* Appends as much as has room. */
static size_t buffer_put(struct buffer *b, const char *data, size_t length)
{
    size_t used = buffer_used(b);

    if (b->end + length > b->room && b->begin > 0) {
        memmove(b->bytes, b->bytes + b->begin, used);
        b->begin = 0;
        b->end = used;
    }
    if (b->end + length > b->room && b->room < BUFFER_MAX) {
        size_t room = b->room ? b->room : BUFFER_FIRST;
        char *grown;

        while (room < b->end + length && room < BUFFER_MAX)
            room *= 2;
        grown = realloc(b->bytes, room);
        if (grown) {
            b->bytes = grown;
            b->room = room;
        }
    }
    if (length > b->room - b->end)
        length = b->room - b->end;
    if (length)
        memcpy(b->bytes + b->end, data, length);
    b->end += length;
    return length;
}

static size_t buffer_take(struct buffer *b, char *data, size_t most)
{
    size_t n = buffer_used(b) < most ? buffer_used(b) : most;

    if (n)
        memcpy(data, b->bytes + b->begin, n);
    b->begin += n;
    if (b->begin == b->end)
        b->begin = b->end = 0;
    return n;
}

/* ---- what libcurl calls ----------------------------------------------------------------------------------------- */

static struct rv_front_exchange *exchange_of(struct rv_front_transfer *transfer)
{
    return (struct rv_front_exchange *)transfer; /* its first member */
}

static size_t on_send(char *place, size_t size, size_t count, void *context)
{
    struct rv_front_exchange *x = context;
    size_t n = buffer_take(&x->up, place, size * count);

    x->transfer.moved_us = rv_now_us();
    if (x->blocked)
        rv_front_touch(&x->transfer);
    if (n > 0 || x->up_ended)
        return n;
    x->up_paused = true;
    return CURL_READFUNC_PAUSE;
}

static size_t on_body(char *data, size_t size, size_t count, void *context)
{
    struct rv_front_exchange *x = context;
    size_t length = size * count;

    x->transfer.moved_us = rv_now_us();
    if (buffer_used(&x->down) + length > BUFFER_MAX) {
        x->down_paused = true;
        return CURL_WRITEFUNC_PAUSE;
    }
    rv_front_touch(&x->transfer);
    return buffer_put(&x->down, data, length); /* fewer = no memory: libcurl ends the transfer */
}

static void drop_head(struct rv_front_exchange *x)
{
    x->head_length = 0;
    x->head_done = false;
}

static bool add_to_head(struct rv_front_exchange *x, const char *text, size_t length)
{
    size_t wanted = x->head_length + length + 1;

    if (wanted > HEAD_MAX)
        return false;
    if (wanted > x->head_room) {
        size_t room = 2 * wanted + 512;
        char *grown = realloc(x->head, room);

        if (!grown)
            return false;
        x->head = grown;
        x->head_room = room;
    }
    memcpy(x->head + x->head_length, text, length);
    x->head_length += length;
    x->head[x->head_length++] = '\0';
    return true;
}

/* One line of the head, its end included; a status line begins another head: that of a 1xx is dropped. */
static size_t on_head(char *line, size_t size, size_t count, void *context)
{
    struct rv_front_exchange *x = context;
    size_t all = size * count, length = all;
    const char *colon;

    x->transfer.moved_us = rv_now_us();
    while (length > 0 && (line[length - 1] == '\n' || line[length - 1] == '\r'))
        length--;
    if (length == 0) {
        long status = 0;

        (void)curl_easy_getinfo(x->transfer.easy, CURLINFO_RESPONSE_CODE, &status);
        if (status < 100 || status == 101) /* nobody asked for 101; what follows is no answer, and has no end */
            return 0;
        x->status = (unsigned)status;
        x->head_done = status >= 200;
        if (x->head_done)
            rv_front_touch(&x->transfer);
        return all;
    }
    if (*line == ' ' || *line == '\t') /* a folded field: RFC 9112 section 5.2 leaves it to us to refuse it */
        return 0;
    if (length > 5 && strncasecmp(line, "HTTP/", 5) == 0) {
        drop_head(x);
        return all;
    }
    colon = memchr(line, ':', length);
    if (x->head_done || !colon) /* trailers, and lines that are no fields */
        return all;
    {
        const char *value = colon + 1, *end = line + length;

        while (value < end && (*value == ' ' || *value == '\t'))
            value++;
        if (!add_to_head(x, line, (size_t)(colon - line)) || !add_to_head(x, value, (size_t)(end - value))) {
            x->too_large = true;
            return 0;
        }
    }
    return all;
}

static bool waits_for_client(const struct rv_front_transfer *transfer)
{
    const struct rv_front_exchange *x = (const struct rv_front_exchange *)transfer;

    /* While it sends, it does not read: an answer that has begun waits for that. */
    return x->request->stage == RV_HTTP_ANSWER ? x->down_paused : x->up_paused && !x->up_ended;
}

/* libcurl goes on with what waited for us, and may call back from here. */
static void go_on(struct rv_front_exchange *x, bool sending, bool receiving)
{
    int still = 0;

    if (x->transfer.done || ((!sending || !x->up_paused) && (!receiving || !x->down_paused)))
        return;
    if (sending)
        x->up_paused = false;
    if (receiving)
        x->down_paused = false;
    still |= x->up_paused ? CURLPAUSE_SEND : 0;
    still |= x->down_paused ? CURLPAUSE_RECV : 0;
    x->transfer.moved_us = rv_now_us();
    (void)curl_easy_pause(x->transfer.easy, still);
}

/* ---- the answer to the client ----------------------------------------------------------------------------------- */

/* libmicrohttpd wants bytes of the body. */
static ssize_t on_read(void *context, uint64_t position, char *place, size_t most)
{
    struct rv_front_exchange *x = context;
    size_t n = buffer_take(&x->down, place, most);

    (void)position;
    if (x->down_paused && buffer_used(&x->down) <= BUFFER_MAX / 2)
        go_on(x, false, true);
    if (n > 0)
        return (ssize_t)n;
    if (x->transfer.done)
        return x->transfer.result == CURLE_OK ? MHD_CONTENT_READER_END_OF_STREAM : MHD_CONTENT_READER_END_WITH_ERROR;
    if (buffer_used(&x->down) > 0) { /* go_on has brought some */
        n = buffer_take(&x->down, place, most);
        return (ssize_t)n;
    }
    rv_http_suspend(x->request);
    return 0;
}

static bool has_no_body(const struct rv_front_exchange *x)
{
    return x->status == 204 || x->status == 304;
}

static struct MHD_Response *make_response(struct rv_front_exchange *x)
{
    curl_off_t size = -1;

    /* libmicrohttpd 0.9.75 says `Content-Length: 0` in a 304; of an unknown size, it would send the end of a chunked
     * body that was not there, which the client would take for the next answer. */
    if (has_no_body(x))
        return MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    (void)curl_easy_getinfo(x->transfer.easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &size);
    if (x->request->head_only) /* of a body that does not come, libmicrohttpd 0.9.75 would send the end */
        return size < 0 ? MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT)
                        : MHD_create_response_from_callback((uint64_t)size, BLOCK_BYTES, on_read, x, NULL);
    if (x->transfer.done && x->transfer.result == CURLE_OK) { /* all of it is here: the usual case */
        char *bytes = x->down.bytes;
        size_t length = x->down.end;
        struct MHD_Response *response = length ? MHD_create_response_from_buffer(length, bytes, MHD_RESPMEM_MUST_FREE)
                                               : MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);

        if (response && length)
            x->down = (struct buffer){0};
        return response;
    }
    return MHD_create_response_from_callback(size < 0 ? MHD_SIZE_UNKNOWN : (uint64_t)size, BLOCK_BYTES, on_read, x,
                                             NULL);
}

static void pass_fields_back(struct rv_front_exchange *x, struct MHD_Response *response)
{
    const char *connection = "", *end = x->head + x->head_length;

    for (const char *name = x->head; name < end;) {
        const char *value = name + strlen(name) + 1;

        if (strcasecmp(name, "Connection") == 0)
            connection = value;
        name = value + strlen(value) + 1;
    }
    for (const char *name = x->head; name < end;) {
        const char *value = name + strlen(name) + 1;

        if (strcasecmp(name, "Content-Length") != 0 &&
            !rv_front_field_is_hop(name, strlen(name), connection, strlen(connection)))
            (void)MHD_add_response_header(response, name, value);
        name = value + strlen(value) + 1;
    }
}

static void start_answer(struct rv_front_exchange *x)
{
    struct rv_http_request *request = x->request;
    struct MHD_Response *response = make_response(x);

    x->answered = true;
    if (!response) {
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory for the answer of worker %s", x->worker);
        request->close = true;
        return;
    }
    pass_fields_back(x, response);
    request->response = response;
    request->status = x->status;
}

static void refuse(struct rv_front_exchange *x)
{
    struct rv_http_request *request = x->request;

    x->answered = true;
    if (x->too_large)
        rv_front_answer_error(request, 502, "worker_answer_invalid", "", 0,
                              "the head of worker %s's answer has more than %u KiB", x->worker, HEAD_MAX / 1024);
    else
        rv_front_answer_failure(request, x->worker, rv_front_transfer_errno(&x->transfer));
    if (!x->up_ended)
        request->close = true;
}

static int prepare(struct rv_front_exchange *x, struct rv_worker_entry *worker);

/* The worker does not know it: a worker of a type that has not been asked; NULL = none, or the route does not say so.
 */
static struct rv_worker_entry *next_to_ask(struct rv_front_exchange *x)
{
    struct rv_front *front = x->transfer.front;
    struct rv_router *router = front->router;
    struct rv_worker_entry *worker = NULL;

    if (x->request->front->action != RV_FRONT_SEARCH || x->status != 404 || x->request->framing.has_body ||
        rv_front_is_pinned(x->request))
        return NULL;
    for (unsigned i = 0; i < router->type_count && !worker; i++) {
        if (!x->asked[i] && router->types[i].is_comfyui)
            worker = rv_front_any(front, &router->types[i]);
        x->asked[i] |= worker != NULL;
    }
    return worker;
}

/* True = the same question goes to another worker. */
static bool ask_another(struct rv_front_exchange *x)
{
    struct rv_worker_entry *worker = next_to_ask(x);

    if (!worker)
        return false;
    rv_front_transfer_fini(&x->transfer);
    memset(&x->transfer, 0, sizeof(x->transfer));
    drop_head(x);
    x->down.begin = x->down.end = 0;
    x->down_paused = false;
    x->status = 0;
    if (prepare(x, worker) < 0 || rv_front_transfer_start(&x->transfer) < 0) {
        x->transfer.done = true;
        x->transfer.result = CURLE_OUT_OF_MEMORY;
        rv_front_touch(&x->transfer);
    }
    return true;
}

/* libcurl has returned, and something has changed. */
static void advance(struct rv_front_transfer *transfer)
{
    struct rv_front_exchange *x = exchange_of(transfer);
    struct rv_http_request *request = x->request;

    if (!x->answered && x->head_done && ask_another(x))
        return;
    if (!x->answered && x->head_done && !x->too_large)
        start_answer(x);
    else if (!x->answered && transfer->done)
        refuse(x);
    if (transfer->done)
        rv_front_transfer_fini(transfer);
    if (x->answered || (x->blocked && buffer_used(&x->up) <= BUFFER_MAX / 2)) {
        x->blocked = false;
        rv_http_resume(request);
    }
}

/* ---- the request ------------------------------------------------------------------------------------------------ */

struct fields {
    struct rv_front_exchange *exchange;
    struct rv_http_head head;
    bool hide_token, has_accept, has_content_type;
};

static bool is_named(const char *name, size_t length, const char *word)
{
    return length == strlen(word) && strncasecmp(name, word, length) == 0;
}

/* Without the cookie that is for us. */
static int pass_cookies(struct fields *fields, const char *name, size_t name_length, const char *value, size_t length)
{
    char *kept = malloc(length + 1);
    size_t n = kept ? rv_front_strip_cookie(value, length, RV_FRONT_COOKIE, kept) : 0;
    int r = kept ? 0 : -ENOMEM;

    if (n > 0)
        r = rv_front_transfer_field(&fields->exchange->transfer, name, name_length, kept, n);
    free(kept);
    return r;
}

/* There may be several fields `Connection`: together they are one list. */
static bool is_hop(const struct rv_http_head *head, const struct rv_http_field *field)
{
    bool found = rv_front_field_is_hop(field->name, field->name_length, "", 0);

    for (unsigned i = 0; i < head->field_count && !found; i++)
        found =
            is_named(head->fields[i].name, head->fields[i].name_length, "Connection") &&
            rv_front_field_is_hop(field->name, field->name_length, head->fields[i].value, head->fields[i].value_length);
    return found;
}

static int pass_field(struct fields *fields, const struct rv_http_field *field)
{
    const char *name = field->name;
    size_t length = field->name_length;

    if (is_hop(&fields->head, field) || is_named(name, length, "Content-Length") || is_named(name, length, "Expect") ||
        (fields->hide_token && is_named(name, length, "Authorization")))
        return 0;
    fields->has_accept |= is_named(name, length, "Accept");
    fields->has_content_type |= is_named(name, length, "Content-Type");
    if (fields->hide_token && is_named(name, length, "Cookie"))
        return pass_cookies(fields, name, length, field->value, field->value_length);
    return rv_front_transfer_field(&fields->exchange->transfer, name, length, field->value, field->value_length);
}

static int pass_fields(struct rv_front_exchange *x)
{
    static const char *const unwanted[] = {"Expect:", "Accept:", "Content-Type:"};
    struct rv_http_request *request = x->request;
    struct fields fields = {.exchange = x, .hide_token = request->http->router->setup->http_token[0] != '\0'};
    bool there[3];
    int r = 0;

    rv_http_read_head(request, request->method, "", &fields.head);
    for (unsigned i = 0; i < fields.head.field_count && r == 0; i++)
        r = pass_field(&fields, &fields.head.fields[i]);
    there[0] = false;
    there[1] = fields.has_accept;
    there[2] = fields.has_content_type;
    for (unsigned i = 0; i < 3; i++) { /* what libcurl would add of its own */
        struct curl_slist *longer = there[i] ? x->transfer.fields : curl_slist_append(x->transfer.fields, unwanted[i]);

        if (!longer)
            return -ENOMEM;
        x->transfer.fields = longer;
    }
    return r;
}

static void set_method(struct rv_front_exchange *x, const char *method)
{
    const struct rv_http_framing *framing = &x->request->framing;
    CURL *easy = x->transfer.easy;

    if (framing->has_body) {
        curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(easy, CURLOPT_READFUNCTION, on_send);
        curl_easy_setopt(easy, CURLOPT_READDATA, x);
        if (x->up_ended || !framing->chunked)
            curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE,
                             (curl_off_t)(x->up_ended ? buffer_used(&x->up) : framing->length));
    } else if (x->request->head_only) {
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    } else if (strcmp(method, "POST") == 0 || strcmp(method, "PUT") == 0 || strcmp(method, "PATCH") == 0) {
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE, 0L);
    }
    curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, method);
}

static int prepare(struct rv_front_exchange *x, struct rv_worker_entry *worker)
{
    struct rv_http_request *request = x->request;
    CURL *easy;
    int r;

    x->transfer.advance = advance;
    r = rv_front_transfer_init(&x->transfer, request->http->router->front, worker);
    if (r < 0)
        return r;
    easy = x->transfer.easy;
    x->transfer.waits_for_client = waits_for_client;
    x->transfer.limit_us = request->http->router->setup->http_worker_timeout_ms * RV_MSEC;
    x->up_ended = !request->framing.has_body || request->stage == RV_HTTP_WORK;
    if (request->stage == RV_HTTP_WORK && request->body) { /* a handler has looked at it */
        x->up = (struct buffer){request->body, 0, request->body_length, request->body_room};
        request->body = NULL;
        request->body_length = request->body_room = 0;
    }
    (void)snprintf(x->worker, sizeof(x->worker), "%s", worker->name);
    set_method(x, request->method);
    curl_easy_setopt(easy, CURLOPT_REQUEST_TARGET, request->uri);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, x);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_head);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, x);
    return pass_fields(x);
}

static void free_exchange(struct rv_front_exchange *x)
{
    if (x->transfer.front)
        rv_front_transfer_fini(&x->transfer);
    free(x->up.bytes);
    free(x->down.bytes);
    free(x->head);
    free(x);
}

void rv_front_pass_on_to(struct rv_http_request *request, struct rv_worker_entry *worker)
{
    struct rv_front_exchange *x = calloc(1, sizeof(*x));

    if (x)
        x->request = request;
    if (!x || prepare(x, worker) < 0) {
        if (x)
            free_exchange(x);
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory to pass the request on");
    } else {
        request->exchange = x;
        x->asked[worker->type - request->http->router->types] = true;
        if (rv_front_transfer_start(&x->transfer) < 0) {
            x->answered = x->transfer.done = true;
            rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory to pass the request on");
        }
    }
    request->waiting = false;
    request->front_gone = NULL;
    if (request->response)
        rv_http_resume(request);
}

bool rv_front_is_pinned(const struct rv_http_request *request)
{
    return MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, RV_FRONT_WORKER_FIELD) ||
           MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, RV_FRONT_TYPE_FIELD);
}

/* The worker that the client names, or that the route says. False = what it names is not there; NULL = not ready. */
static bool choose(struct rv_http_request *request, struct rv_worker_entry **ret_worker,
                   const struct rv_type **ret_type)
{
    struct rv_front *front = request->http->router->front;
    const char *name = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, RV_FRONT_WORKER_FIELD);
    const char *type = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, RV_FRONT_TYPE_FIELD);
    struct rv_worker_entry *worker;

    if (name) {
        TAILQ_FOREACH (worker, &front->router->workers, link)
            if (worker->type && worker->type->is_comfyui && strcmp(worker->name, name) == 0)
                break;
        if (!worker)
            return false;
        *ret_type = worker->type;
        *ret_worker = rv_front_worker_is_ready(worker) ? worker : NULL;
        return true;
    }
    if (type) {
        *ret_type = rv_types_find(front->router, type);
        if (!*ret_type || !(*ret_type)->is_comfyui)
            return false;
        *ret_worker = rv_front_any(front, *ret_type);
        return true;
    }
    *ret_worker = request->front->action == RV_FRONT_PRIMARY ? rv_front_primary(front) : rv_front_any(front, NULL);
    return true;
}

void rv_front_pass_on(struct rv_http_request *request)
{
    struct rv_worker_entry *worker = NULL;
    const struct rv_type *type = NULL;

    if (!choose(request, &worker, &type))
        rv_front_answer_error(request, 400, "unknown_worker", "`resvisor status` lists types and workers", 0,
                              "the request names a type or worker of ComfyUI that is not there");
    else if (worker)
        rv_front_pass_on_to(request, worker);
    else
        rv_front_answer_not_ready(request, type);
}

size_t rv_front_take(struct rv_http_request *request, const char *data, size_t length)
{
    struct rv_front_exchange *x = request->exchange;
    size_t n;

    /* The worker did not want it (libcurl sends no more after such an answer); the client reads when it has sent all.
     */
    if (x->answered && (x->transfer.done || x->status >= 300)) {
        request->body_beyond += length;
        return length;
    }
    n = buffer_put(&x->up, data, length);
    if (n < length) {
        x->blocked = true;
        (void)event_del(request->deadline); /* the worker's time runs, not the client's */
        rv_http_suspend(request);
    }
    go_on(x, true, false);
    rv_front_settle(request->http->router->front);
    return n;
}

void rv_front_end_body(struct rv_http_request *request)
{
    struct rv_front_exchange *x = request->exchange;

    x->up_ended = true;
    go_on(x, true, false);
    rv_front_settle(request->http->router->front);
}

void rv_front_left(struct rv_http_request *request)
{
    struct rv_front_exchange *x = request->exchange;
    void (*gone)(void *context) = request->front_gone;

    request->front_gone = NULL;
    request->waiting = false;
    if (gone)
        gone(request->front_context);
    if (!x)
        return;
    x->answered = true;
    if (!x->transfer.done || x->transfer.running) {
        x->transfer.done = true;
        x->transfer.result = CURLE_ABORTED_BY_CALLBACK;
        rv_front_transfer_fini(&x->transfer);
    }
}

void rv_front_release(struct rv_http_request *request)
{
    rv_front_left(request);
    if (request->exchange)
        free_exchange(request->exchange);
    request->exchange = NULL;
}
