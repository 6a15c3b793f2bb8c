/* What is longer than a message: outputs straight from their sealed memory, and events for as long as the client stays.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "http.h"

#define HEARTBEAT_US (15 * 1000000ull) /* a stream without events shows that it lives */
#define BLOCK_BYTES (32u * 1024)
#define STREAMS_SHARE 2u /* one connection in so many may be a stream of events */
#define EVENT_SLACK (16u * 1024)

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

/* filename*=UTF-8''… of RFC 8187: everything but letters and digits is escaped. */
static void disposition(const char *name, char *buffer, size_t size)
{
    size_t n = (size_t)snprintf(buffer, size, "inline; filename*=UTF-8''");

    for (const unsigned char *p = (const unsigned char *)name; *p && n + 4 < size; p++) {
        bool plain =
            (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') || strchr("-._", *p);

        n += (size_t)snprintf(buffer + n, size - n, plain ? "%c" : "%%%02X", *p);
    }
}

static bool is_plain(const char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            return false;
    return true;
}

static struct MHD_Response *response_of(int fd, uint64_t first, uint64_t length)
{
    struct MHD_Response *response = NULL;
    int copy;

    if (length == 0)
        return MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy >= 0 && !rv_fd_is_reserved(copy))
        response = MHD_create_response_from_fd_at_offset64(length, copy, first);
    if (copy >= 0 && !response)
        (void)close(copy);
    return response;
}

void rv_http_render_output(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    const char *range = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Range");
    const struct rv_job_record *job = rv_jobs_find(request->http->router, request->target.segments[3]);
    const struct rv_output *output = &job->outputs[strtoul(request->target.segments[5], NULL, 10)];
    uint64_t size = reply->piece->total, first = 0, length = size;
    enum rv_http_range kind = RV_HTTP_RANGE_WHOLE;
    char text[4 * RV_OUTPUT_NAME_MAX];

    /* An answer to If-Range would need an ETag; without one, the whole is the right answer. */
    if (range && !MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "If-Range"))
        kind = rv_http_parse_range(range, strlen(range), size, &first, &length);
    if (kind == RV_HTTP_RANGE_BEYOND) {
        rv_http_refuse(request, 416, RV_CODE(BAD_REQUEST), "the range lies beyond the %llu bytes of the output",
                       (unsigned long long)size);
        (void)snprintf(text, sizeof(text), "bytes */%llu", (unsigned long long)size);
        rv_http_add_header(request, "Content-Range", text);
        return;
    }
    request->status = kind == RV_HTTP_RANGE_PART ? 206 : 200;
    request->response = response_of(fd, first, length);
    if (!request->response) {
        rv_http_refuse(request, 0, RV_CODE(LIMIT), "no memory or no descriptor is left to send the output");
        return;
    }
    if (kind == RV_HTTP_RANGE_PART) {
        (void)snprintf(text, sizeof(text), "bytes %llu-%llu/%llu", (unsigned long long)first,
                       (unsigned long long)(first + length - 1), (unsigned long long)size);
        rv_http_add_header(request, "Content-Range", text);
    }
    disposition(output->name, text, sizeof(text));
    rv_http_add_header(request, "Content-Disposition", text);
    rv_http_add_header(request, "Content-Type",
                       output->content_type[0] && is_plain(output->content_type) ? output->content_type
                                                                                 : "application/octet-stream");
    rv_http_add_header(request, "Accept-Ranges", "bytes");
    rv_http_add_header(request, "X-Content-Type-Options", "nosniff");
    rv_http_add_header(request, "Content-Security-Policy",
                       "sandbox"); /* a page that a worker made may run nothing here */
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static bool set_piece(struct rv_http_request *request, char *text)
{
    free(request->piece);
    request->piece = text;
    request->piece_length = text ? strlen(text) : 0;
    request->piece_at = 0;
    return text != NULL;
}

static bool say_gap(struct rv_http_request *request, uint64_t from, uint64_t to)
{
    char *text = NULL;

    if (asprintf(&text, "event: gap\ndata: {\"epoch\":%llu,\"from\":%llu,\"to\":%llu}\n\n",
                 (unsigned long long)request->http->router->setup->epoch, (unsigned long long)from,
                 (unsigned long long)to) < 0)
        text = NULL;
    return set_piece(request, text);
}

/* NULL = it was lost for want of memory. */
static char *event_text(const struct rv_router *router, uint64_t sequence)
{
    const struct rv_event_slot *slot = &router->events[sequence % RV_EVENTS_KEPT];
    ProtobufCMessage *event = NULL;
    json_t *json = NULL;
    char *data = NULL, *text = NULL;
    void *arena = NULL;

    if (slot->bytes)
        event = rv_message_unpack(&resvisor__v1__event__descriptor, slot->bytes, slot->length,
                                  4 * (size_t)slot->length + EVENT_SLACK, &arena, NULL);
    if (event)
        json = rv_http_json(event);
    if (json)
        data = json_dumps(json, JSON_COMPACT);
    if (data && asprintf(&text, "id: %llu-%llu\nevent: job\ndata: %s\n\n", (unsigned long long)router->setup->epoch,
                         (unsigned long long)sequence, data) < 0)
        text = NULL;
    free(data);
    json_decref(json);
    free(arena);
    return text;
}

/* False = nothing to send now. */
static bool next_piece(struct rv_http_request *request)
{
    const struct rv_router *router = request->http->router;
    uint64_t oldest = rv_events_oldest(router), wanted = request->next_event;

    if (wanted <= router->event_sequence && wanted < oldest) {
        request->next_event = oldest;
        return say_gap(request, wanted, oldest - 1);
    }
    if (wanted <= router->event_sequence) {
        request->next_event++;
        return set_piece(request, event_text(router, wanted)) || say_gap(request, wanted, wanted);
    }
    if (request->due) {
        request->due = false;
        return set_piece(request, strdup(":\n\n"));
    }
    return false;
}

static ssize_t read_stream(void *context, uint64_t position, char *buffer, size_t most)
{
    struct rv_http_request *request = context;
    size_t n;

    (void)position;
    if (request->gone)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (request->piece_at == request->piece_length && !next_piece(request)) {
        rv_http_pause_stream(request, HEARTBEAT_US);
        return 0;
    }
    n = request->piece_length - request->piece_at;
    n = n < most ? n : most;
    memcpy(buffer, request->piece + request->piece_at, n);
    request->piece_at += n;
    return (ssize_t)n;
}

/* Where to begin: after `since`, after Last-Event-ID of the same router, or with what comes. False = refused. */
static bool read_begin(struct rv_http_request *request, uint64_t *ret_next)
{
    const struct rv_router *router = request->http->router;
    const char *since = rv_http_query(&request->target, "since");
    const char *last = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, "Last-Event-ID");
    const char *dash = last ? strchr(last, '-') : NULL;
    uint64_t epoch, number = router->event_sequence;

    if (since && (!rv_http_parse_number(since, strlen(since), &number) || number > INT64_MAX)) {
        rv_http_refuse(request, 0, RV_CODE(BAD_REQUEST), "since must be the sequence number of an event");
        return false;
    }
    if (dash && rv_http_parse_number(last, (size_t)(dash - last), &epoch) &&
        (epoch != router->setup->epoch || !rv_http_parse_number(dash + 1, strlen(dash + 1), &number)))
        number = 0; /* another router's numbers mean nothing here: all that is kept */
    *ret_next = (number < router->event_sequence ? number : router->event_sequence) + 1;
    return true;
}

void rv_http_stream_events(struct rv_http_request *request)
{
    struct rv_http *http = request->http;
    char *hello = NULL;

    if (!read_begin(request, &request->next_event))
        return;
    if (http->streams >= http->router->setup->http_connections / STREAMS_SHARE) {
        rv_http_refuse(request, 0, RV_CODE(LIMIT), "%u streams of events are open already", http->streams);
        return;
    }
    if (asprintf(&hello, "retry: 1000\nevent: hello\ndata: {\"epoch\":%llu,\"sequence\":%llu}\n\n",
                 (unsigned long long)http->router->setup->epoch, (unsigned long long)(request->next_event - 1)) < 0)
        hello = NULL;
    (void)set_piece(request, hello);
    /* To HEAD, libmicrohttpd 0.9.75 would send the end of a chunked body that was not there. */
    request->response = request->head_only ? MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT)
                                           : MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES,
                                                                               read_stream, request, NULL);
    if (!request->response)
        return;
    request->status = 200;
    request->streaming = !request->head_only;
    http->streams += request->streaming;
    rv_http_add_header(request, "Content-Type", "text/event-stream");
    rv_http_add_header(request, "Cache-Control", "no-store");
    rv_http_add_header(request, "X-Content-Type-Options", "nosniff");
}
