/*
 * The HTTP front, inside: what its files know of each other. Router only, one thread (the loop's).
 *
 *   server.c   connections: the listener, libmicrohttpd in the loop, deadlines, waiting   parse.c    bytes of strangers
 *   request.c  what a request must satisfy before anything looks at it                    v1.c       the table of
 * routes answer.c   responses                                                                  submit.c   a job from
 * JSON json.c     messages of rpc.proto as JSON                                              metrics.c  /metrics,
 * /readyz stream.c   outputs in ranges, events as they come
 */
#ifndef RV_HTTP_H
#define RV_HTTP_H

#include <jansson.h>
#include <microhttpd.h>

#include "../router.h"
#include "parse.h"

#define RV_HTTP_BODY_MAX (1024u * 1024) /* of a request: a payload of 512 KiB in base64, and parameters */

enum rv_http_stage {
    RV_HTTP_HEAD,   /* no request, or half a head */
    RV_HTTP_BODY,   /* the head is good */
    RV_HTTP_WORK,   /* all of it is here */
    RV_HTTP_ANSWER, /* the response is on its way */
};

struct rv_front_exchange;
struct rv_front_route;
struct rv_http_route;

enum rv_http_access {
    RV_HTTP_OPEN,     /* without a token */
    RV_HTTP_CLIENT,   /* with the token, if there is one */
    RV_HTTP_OPERATOR, /* with the token, which must be there */
};

/* Makes the response out of a reply that has no error. */
typedef void rv_http_render(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd);

/* A connection, and the request that it is at. Owned by server.c; dies with the connection. */
struct rv_http_request {
    TAILQ_ENTRY(rv_http_request) link;
    struct rv_http *http;
    struct MHD_Connection *connection;
    int socket; /* libmicrohttpd's */
    struct event *deadline, *left, *reset;
    enum rv_http_stage stage;
    bool inside;      /* its handler is running: the answer may be kept for when it returns */
    bool suspended;   /* libmicrohttpd does not look at it */
    bool close;       /* nothing may follow on this connection */
    bool gone;        /* the client has left, or we leave */
    bool half_closed; /* nothing more will come */
    unsigned checks, quiet_checks;

    const char *method; /* libmicrohttpd's */
    char *uri;
    size_t uri_length;
    bool has_uri, head_only;
    struct rv_http_framing framing;
    struct rv_http_target target;
    const struct rv_http_route *route;
    char *body;
    size_t body_length, body_room, body_max;
    uint64_t body_beyond; /* bytes that were too many */
    size_t body_counted;  /* in http->body_bytes */
    bool body_no_room;

    rv_http_render *render;
    struct MHD_Response *response;
    unsigned status;

    const struct rv_front_route *front; /* of front/; NULL = its path is one of v1.c's, or of nobody */
    struct rv_front_exchange *exchange; /* of front/: it is passed on to a worker */
    bool api;                           /* of front/: its path began with /api */
    bool waiting;                       /* of front/: the answer comes later */
    void (*front_gone)(void *context);
    void *front_context;

    char *text; /* log lines */
    size_t text_length;
    bool streaming, due; /* events; due: something must be sent even if nothing happened */
    uint64_t next_event, lost_from;
    char *piece;
    size_t piece_length, piece_at;
};

TAILQ_HEAD(rv_http_list, rv_http_request);

struct rv_http {
    struct rv_router *router;
    struct MHD_Daemon *daemon;
    int listener;
    struct event *accept_event, *accept_pause, *daemon_event, *daemon_timer, *run_event;
    struct rv_http_list requests;
    struct rv_http_request *arriving; /* being given to libmicrohttpd */
    bool running;                     /* libmicrohttpd is on the stack */
    unsigned count, streams;
    uint64_t body_bytes; /* of bodies that are read whole */
    uint64_t answers[6]; /* by the status' first digit */
    uint64_t refused_connections, expired_connections;
};

/* ---- server.c --------------------------------------------------------------------------------------------------- */

/* A connection that waits goes on: its response is there, or its stream has more. */
void rv_http_resume(struct rv_http_request *request);

/* Whatever has been resumed is looked at now, not in the loop's next turn. Only from an event of the loop. */
void rv_http_run(struct rv_http *http);

/* From a stream's reader: nothing to send now. It goes on after `us` at the latest, with `due` set. */
void rv_http_pause_stream(struct rv_http_request *request, uint64_t us);

/* libmicrohttpd does not look at the connection until rv_http_resume; its end is seen. */
void rv_http_suspend(struct rv_http_request *request);

/* ---- request.c -------------------------------------------------------------------------------------------------- */

/* At the end of the head. Sets the route, or a response that refuses. */
void rv_http_check(struct rv_http_request *request, const char *method, const char *version);

/* The head as libmicrohttpd holds it; *head is empty before. */
void rv_http_read_head(struct rv_http_request *request, const char *method, const char *version,
                       struct rv_http_head *head);

/* The token, in a time that does not tell where the first difference is. False also if there is none. */
bool rv_http_is_token(const struct rv_http_request *request, const char *shown, size_t length);

/* Of the parts of a check, for front/: false = refused, and the response says so. */
bool rv_http_check_client(struct rv_http_request *request, const struct rv_http_head *head, enum rv_http_access access);

/* ---- v1.c ------------------------------------------------------------------------------------------------------- */

struct rv_http_route {
    const char *method, *path; /* a segment `*` stands for anything */
    enum rv_http_access access;
    bool body;           /* wants JSON */
    const char *queries; /* names of parameters, each with a blank after it */
    void (*handle)(struct rv_http_request *request);
};

/* NULL = none; *ret_allowed gets the methods that the path has, separated by commas ("" = there is no such path). */
const struct rv_http_route *rv_http_find_route(const struct rv_http_target *target, const char *method,
                                               char *ret_allowed, size_t size);

/* ---- answer.c --------------------------------------------------------------------------------------------------- */

/* Takes over `text` (malloc). NULL = no memory: the connection ends. */
void rv_http_answer_text(struct rv_http_request *request, unsigned status, const char *type, char *text, size_t length);
/* Takes over `json`. */
void rv_http_answer_json(struct rv_http_request *request, unsigned status, json_t *json);

/* status 0 = that of the error table. */
void rv_http_answer_error(struct rv_http_request *request, const struct rv_error *err, uint64_t retry_after_ms,
                          unsigned status);
void rv_http_refuse(struct rv_http_request *request, unsigned status, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void rv_http_add_header(struct rv_http_request *request, const char *name, const char *value);

/* ---- json.c ----------------------------------------------------------------------------------------------------- */

/* Any message, by its descriptor. NULL = no memory. */
json_t *rv_http_json(const ProtobufCMessage *message);

/* ---- submit.c --------------------------------------------------------------------------------------------------- */

/* A Submit that points into itself and into the JSON. */
struct rv_http_submit {
    Resvisor__V1__Submit submit;
    Resvisor__V1__Param params[RV_PARAMS_MAX], *list[RV_PARAMS_MAX];
    char values[RV_PARAMS_MAX][32]; /* of parameters that are numbers */
    uint8_t *payload;               /* decoded; free() */
    json_t *root;
};

/* 0 or a negative errno with err. Either way to be ended by _fini. */
int rv_http_submit_parse(const char *body, size_t length, struct rv_http_submit *ret_submit, struct rv_error *err);
void rv_http_submit_fini(struct rv_http_submit *submit);

/* ---- metrics.c -------------------------------------------------------------------------------------------------- */

void rv_http_render_metrics(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd);
void rv_http_render_ready(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd);

/* ---- stream.c --------------------------------------------------------------------------------------------------- */

void rv_http_render_output(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd);
void rv_http_stream_events(struct rv_http_request *request);

#endif
