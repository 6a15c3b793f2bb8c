/*
 * The ComfyUI front door, inside: one address in front of all workers of kind `comfyui`. Router only, one thread (the
 * loop's). It sits on http/: the same listener, token, limits and checks of heads. Every path but /healthz, /readyz,
 * /metrics and /resvisor/… is its own, if at least one type is of that kind.
 *
 *   front.c      start and end, hooks, which worker is asked      routes.c   the table of paths
 *   answer.c     answers in ComfyUI's shape, waiting              match.c    paths and fields (pure functions)
 *   proxy.c      a request and its answer, streamed both ways     upstream.c libcurl in the loop
 *   call.c       a small request of our own to a worker           gather.c   the same one to several
 *   merge.c      answers out of several workers'                  join.c     their JSON (pure functions)
 *   owner.c      which worker has a file                          restart.c  reboot routes become an orderly restart
 *   prompt.c, queue.c, history.c, jobs_api.c   prompts are jobs   ws*.c      the WebSocket
 *
 * How a handler gets a request and answers it
 *   - request->target     path and query, decoded; a leading segment "api" is taken away (request->api tells).
 *     segments are counted after that: of /api/history/ID, segments[0] is "history" and segments[1] is the id.
 *   - request->body, body_length    the whole body, at most the route's body_max; ends with a NUL that does not count.
 *   - MHD_lookup_connection_value(request->connection, …)           header fields.
 *   - request->http->router, …->front                               everything else.
 *   It either answers before it returns (rv_front_answer_…), or calls rv_front_wait and answers later, followed by
 *   rv_front_answered. No answer at all ends the connection.
 */
#ifndef RV_FRONT_H
#define RV_FRONT_H

#include <jansson.h>

#include "../http/http.h"
#include "match.h"

#define RV_FRONT_PROMPT_MAX (16u * 1024 * 1024)   /* bytes of a body of POST /prompt: workflows embed images */
#define RV_FRONT_BODY_MAX (1024u * 1024)          /* of other bodies that are read here */
#define RV_FRONT_ANSWER_MAX (64ull * 1024 * 1024) /* of a worker's answer that is read here, as object_info is */
#define RV_FRONT_COOKIE "resvisor_token"          /* shows the token of a browser that was let in by /?token=… */
#define RV_FRONT_TYPE_FIELD "X-Resvisor-Type"     /* of a request: a worker of that type shall answer */
#define RV_FRONT_WORKER_FIELD "X-Resvisor-Worker" /* that worker: "image/0" */
#define RV_FRONT_RETRY_MS 2000u                   /* Retry-After while a worker starts */

struct rv_front_upstream; /* upstream.c */
struct rv_front_exchange; /* proxy.c */
struct rv_front_call;     /* call.c */
struct rv_front_merges;   /* merge.c */
struct rv_front_owners;   /* owner.c */
struct rv_front_prompts;  /* prompt.c: what the four files about prompts keep */
struct rv_front_ws;       /* ws.c: what the files of the WebSocket keep */

struct rv_front {
    struct rv_router *router;
    struct rv_type *primary; /* its first worker has the users' folder */
    struct rv_front_upstream *upstream;
    struct rv_front_merges *merges;
    struct rv_front_owners *owners;
    struct rv_front_prompts *prompts;
    struct rv_front_ws *ws;
};

/* ---- front.c ---------------------------------------------------------------------------------------------------- */

/* Nothing is made without HTTP, or without a type of kind comfyui: then router->front stays NULL. */
int rv_front_open(struct rv_router *router, struct rv_error *err);

/* In two steps: what is under way ends before the daemon of http/ does, memory goes after it. */
void rv_front_stop(struct rv_router *router);
void rv_front_close(struct rv_router *router);

/* What others tell; each may be called with router->front == NULL. */
void rv_front_worker_ready(struct rv_router *router, struct rv_worker_entry *worker);
void rv_front_worker_gone(struct rv_router *router, struct rv_worker_entry *worker); /* freed afterwards */
void rv_front_job_ending(struct rv_router *router, struct rv_job_record *job);       /* its submit is still there */
void rv_front_job_ended(struct rv_router *router,
                        struct rv_job_record *job); /* state and error are set, submit is gone */
void rv_front_job_removed(struct rv_router *router, struct rv_job_record *job); /* freed afterwards: free job->prompt */
void rv_front_queue_changed(struct rv_router *router); /* a job was queued, was started, or has ended */

/* Loopback port of its ComfyUI; 0 = it has none, or is not of that kind. */
uint16_t rv_front_worker_port(const struct rv_worker_entry *worker);

/* READY, not draining, and with a port. Only such a worker may be asked. */
bool rv_front_worker_is_ready(const struct rv_worker_entry *worker);

/* The primary worker; NULL = it is not ready. */
struct rv_worker_entry *rv_front_primary(const struct rv_front *front);

/* A ready worker, the primary first: of that type, or of any (NULL). NULL = none is ready. */
struct rv_worker_entry *rv_front_any(const struct rv_front *front, const struct rv_type *type);

/* Each ready worker: worker = NULL gives the first, NULL after the last. */
struct rv_worker_entry *rv_front_next(const struct rv_front *front, const struct rv_worker_entry *worker);

/* By name and incarnation, for what waits: a worker may be gone when an answer comes. */
struct rv_worker_entry *rv_front_find(const struct rv_front *front, const char *name, uint64_t incarnation);

/* ---- routes.c --------------------------------------------------------------------------------------------------- */

enum rv_front_action {
    RV_FRONT_HANDLE,  /* the body is read here, then the handler is called */
    RV_FRONT_PRIMARY, /* passed on to the primary worker */
    RV_FRONT_ANY,     /* passed on to the primary, or to another ready worker */
    RV_FRONT_SEARCH,  /* the same; of a GET that it does not know (404), the other types are asked as well */
};

struct rv_front_route {
    const char *method; /* "" = any */
    const char *path;   /* without /api; a segment `*` stands for anything, `**` at the end for the rest */
    enum rv_front_action action;
    bool only_api;     /* not without /api */
    bool operator;     /* needs the token, which must be there: as a restart by /resvisor/v1 does */
    uint32_t body_max; /* of HANDLE; 0 = no body */
    void (*handle)(struct rv_http_request *request);
};

/* The route of a path that is the front's own; never NULL: what is not in the table is passed on to the primary. */
const struct rv_front_route *rv_front_find_route(const char *method, const char *const *segments, unsigned count,
                                                 bool api);

/* At the end of a good head: true = the path is the front's. request->front is set, and a response if it is refused. */
bool rv_front_check(struct rv_http_request *request, const char *method, const struct rv_http_head *head);

/* ---- answer.c --------------------------------------------------------------------------------------------------- */

/*
 * ComfyUI's shape: {"error":{"type","message","details","extra_info":{}},"node_errors":{}}. type is a word such as
 * "invalid_prompt_id". retry_after_ms > 0 adds Retry-After. details: "" = none.
 */
void rv_front_answer_error(struct rv_http_request *request, unsigned status, const char *type, const char *details,
                           uint64_t retry_after_ms, const char *format, ...) __attribute__((format(printf, 6, 7)));

/* The error table's code becomes type, and status if that is 0. rv_http_refuse and rv_http_answer_error end up here for
 * a request of the front. */
void rv_front_answer_rv_error(struct rv_http_request *request, const struct rv_error *err, uint64_t retry_after_ms,
                              unsigned status);

/* 503 with Retry-After: no worker is there that could answer. type = NULL: of the primary. */
void rv_front_answer_not_ready(struct rv_http_request *request, const struct rv_type *type);

/* A worker could not answer: r is a negative errno of rv_front_call. */
void rv_front_answer_failure(struct rv_http_request *request, const char *worker, int r);

/* Takes over `json`; keys keep their order. NULL = no memory: the connection ends. */
void rv_front_answer_json(struct rv_http_request *request, unsigned status, json_t *json);

/* Takes over `text` (malloc), which is JSON already. */
void rv_front_answer_text(struct rv_http_request *request, unsigned status, char *text, size_t length);

/*
 * The answer comes later. `gone` is called once if the client leaves (or we stop) before it: from then on `request`
 * must not be touched, and rv_front_answered not be called.
 */
void rv_front_wait(struct rv_http_request *request, void (*gone)(void *context), void *context);

/* After rv_front_wait and rv_front_answer_…: sends it. */
void rv_front_answered(struct rv_http_request *request);

/* The client of a request has left: whatever is under way for it ends. The response may still be read from. */
void rv_front_left(struct rv_http_request *request);

/* The request ends. */
void rv_front_release(struct rv_http_request *request);

/* ---- upstream.c, proxy.c ---------------------------------------------------------------------------------------- */

int rv_front_upstream_init(struct rv_front *front);
void rv_front_upstream_stop(struct rv_front *front);
void rv_front_upstream_fini(struct rv_front *front);
void rv_front_upstream_worker_gone(struct rv_front *front, const struct rv_worker_entry *worker);

/* At the end of the head: sends the request on. A response is set if that cannot be. */
void rv_front_pass_on(struct rv_http_request *request);

/* The client names a type or a worker: nobody else answers. */
bool rv_front_is_pinned(const struct rv_http_request *request);

/* The same later, to that worker: for a handler without a body that had to find out which. After rv_front_wait. */
void rv_front_pass_on_to(struct rv_http_request *request, struct rv_worker_entry *worker);

/* Bytes of the body; returns how many were taken. Fewer than all: the connection is suspended until there is room. */
size_t rv_front_take(struct rv_http_request *request, const char *data, size_t length);

/* There is no more of the body. */
void rv_front_end_body(struct rv_http_request *request);

/* ---- call.c: a small request of our own to a worker ---------------------------------------------------------------
 */

struct rv_front_call_options {
    const char *method, *path; /* "/api/object_info" */
    const char *content_type;  /* NULL = application/json, if there is a body */
    const void *body;          /* copied; NULL = none */
    size_t length;
    uint64_t timeout_us; /* for all of it; 0 = 60 s */
    uint64_t answer_max; /* bytes; 0 = RV_FRONT_ANSWER_MAX */
};

/*
 * r = 0: the worker has answered, with any status; body ends with a NUL that does not count, and is freed afterwards.
 * Else a negative errno: ECONNREFUSED, ECONNRESET (it is gone, or its answer is cut), ETIMEDOUT, EMSGSIZE (longer than
 * answer_max), EPROTO, ENOMEM.
 */
typedef void rv_front_called(void *context, int r, unsigned status, const char *body, size_t length);

/* `done` is called exactly once, later, from the loop; never from within this function. On an error it is not called.
 */
int rv_front_call(struct rv_front *front, struct rv_worker_entry *worker, const struct rv_front_call_options *options,
                  rv_front_called *done, void *context, struct rv_front_call **ret_call);

/* `done` will not be called. Not from within `done`. */
void rv_front_call_cancel(struct rv_front_call *call);

/* ---- merge.c, owner.c, restart.c -------------------------------------------------------------------------------- */

int rv_front_merges_init(struct rv_front *front);
void rv_front_merges_fini(struct rv_front *front);

/* Another process serves under its name, or none: what its type said of its nodes counts no more. */
void rv_front_merges_worker_changed(struct rv_front *front, const struct rv_worker_entry *worker);
void rv_front_object_info(struct rv_http_request *request);
void rv_front_object_info_one(struct rv_http_request *request);
void rv_front_extensions(struct rv_http_request *request);
void rv_front_system_stats(struct rv_http_request *request);
void rv_front_free(struct rv_http_request *request);

int rv_front_owners_init(struct rv_front *front);
void rv_front_owners_fini(struct rv_front *front);
void rv_front_owners_job_ended(struct rv_front *front, const struct rv_job_record *job);
void rv_front_view(struct rv_http_request *request);
void rv_front_reboot(struct rv_http_request *request);

/* ---- prompt.c, queue.c, history.c, jobs_api.c ------------------------------------------------------------------- */

int rv_front_prompts_init(struct rv_front *front);
void rv_front_prompts_fini(struct rv_front *front);

/* A job that failed without a history of its own gets one, so that its error is seen. */
void rv_front_prompts_job_ending(struct rv_front *front, struct rv_job_record *job);

/* Frees job->prompt. */
void rv_front_prompts_job_removed(struct rv_front *front, struct rv_job_record *job);

/* The client_id of the prompt that the job is; NULL = it has none, or did not come as a prompt. */
const char *rv_front_prompt_client(const struct rv_job_record *job);

/* For /metrics: prompts that were taken, refused, and of those taken not validated before. front may be NULL. */
void rv_front_prompt_counts(const struct rv_front *front, uint64_t *ret_taken, uint64_t *ret_refused,
                            uint64_t *ret_unvalidated);

/* Jobs of all comfyui types that wait or run: exec_info.queue_remaining. */
uint32_t rv_front_queue_remaining(const struct rv_front *front);

void rv_front_prompt_get(struct rv_http_request *request);
void rv_front_prompt_post(struct rv_http_request *request);
void rv_front_queue_get(struct rv_http_request *request);
void rv_front_queue_post(struct rv_http_request *request);
void rv_front_interrupt(struct rv_http_request *request);
void rv_front_history_get(struct rv_http_request *request);     /* /history */
void rv_front_history_get_one(struct rv_http_request *request); /* /history/{id} */
void rv_front_history_post(struct rv_http_request *request);
void rv_front_jobs_list(struct rv_http_request *request);        /* GET /api/jobs */
void rv_front_jobs_get(struct rv_http_request *request);         /* GET /api/jobs/{id} */
void rv_front_jobs_cancel(struct rv_http_request *request);      /* POST /api/jobs/{id}/cancel */
void rv_front_jobs_cancel_many(struct rv_http_request *request); /* POST /api/jobs/cancel */

/* ---- ws.c ------------------------------------------------------------------------------------------------------- */

int rv_front_ws_init(struct rv_front *front);
void rv_front_ws_stop(struct rv_front *front); /* closes every socket, before the daemon ends */
void rv_front_ws_fini(struct rv_front *front);

/*
 * GET /ws: sets request->response (MHD_create_response_for_upgrade) and request->status = 101. Once it is upgraded,
 * server.c watches the socket no more: deadlines and the client's end are the WebSocket's. The connection still counts
 * against http.connections until MHD_upgrade_action(…CLOSE).
 */
void rv_front_ws_open(struct rv_http_request *request);
void rv_front_ws_worker_ready(struct rv_front *front, struct rv_worker_entry *worker);
void rv_front_ws_worker_gone(struct rv_front *front, struct rv_worker_entry *worker);
void rv_front_ws_job_ending(struct rv_front *front, struct rv_job_record *job);
void rv_front_ws_queue_changed(struct rv_front *front);

#endif
