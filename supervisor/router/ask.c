/* Requests that only the supervisor can answer. It answers every one; if it dies, so does the router. */
#include <errno.h>
#include <string.h>

#include "router.h"

#define UNDER_WAY_MAX 64u       /* requests about models: with paths of 4 KiB they must fit the supervisor's queue */
#define LOG_BYTES (512u * 1024) /* of all logs of a type */

static void send(struct rv_router *router, Rv__Frame *frame)
{
    (void)rv_peer_send(router->supervisor, frame, NULL, 0, RV_SEND_REPLY); /* failure ends the connection, and us */
}

static void send_status_ask(struct rv_router *router)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__StatusRequest request = RESVISOR__V1__STATUS_REQUEST__INIT;

    router->status_ask = ++router->next_ask;
    frame.id = router->status_ask;
    frame.body_case = RV__FRAME__BODY_STATUS_REQUEST;
    frame.status_request = &request;
    send(router, &frame);
}

/* Those who wait for the next status now wait for the one that is asked for here. */
static void next_status(struct rv_router *router)
{
    struct rv_parked *parked;

    router->status_ask = 0;
    TAILQ_FOREACH (parked, &router->parked, link) {
        if (parked->job || parked->ask_id)
            continue;
        if (!router->status_ask)
            send_status_ask(router);
        parked->ask_id = router->status_ask;
    }
}

/*
 * One status is under way at a time, and all who ask meanwhile share the next one: the one under way may be older than
 * what they know. A flood of these large answers would else fill the way between supervisor and router, and end it.
 */
int rv_ask_status(struct rv_router *router, struct rv_asker *asker, struct rv_error *err)
{
    uint64_t id;
    int r = rv_parked_add(router, asker, NULL, 0, &id, err);

    if (r < 0)
        return r;
    rv_parked_find(router, id)->ask_id = 0;
    if (!router->status_ask)
        next_status(router);
    return 0;
}

static unsigned under_way(const struct rv_router *router)
{
    const struct rv_parked *parked;
    unsigned n = 0;

    TAILQ_FOREACH (parked, &router->parked, link)
        n += !parked->job && parked->ask_id && parked->ask_id != router->status_ask;
    return n;
}

static int too_many(struct rv_error *err)
{
    return rv_error_set(err, EBUSY, RV_CODE(LIMIT), "%u requests wait for the supervisor's answer", UNDER_WAY_MAX);
}

/* What the asker waits for: the answer to this frame, which gets an id of its own. */
static int ask(struct rv_router *router, struct rv_asker *asker, Rv__Frame *frame, struct rv_error *err)
{
    int r;

    if (under_way(router) >= UNDER_WAY_MAX)
        return too_many(err);
    r = rv_parked_add(router, asker, NULL, 0, &frame->id, err);
    if (r == 0)
        send(router, frame);
    return r;
}

int rv_ask_model(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__ModelRequest *request,
                 struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__ModelRequest copy = RESVISOR__V1__MODEL_REQUEST__INIT; /* without what we do not know */

    copy.action = request->action;
    copy.model = request->model;
    copy.device = request->device;
    frame.body_case = RV__FRAME__BODY_MODEL_REQUEST;
    frame.model_request = &copy;
    return ask(router, asker, &frame, err);
}

int rv_ask_device(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__DeviceRequest *request,
                  struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__DeviceRequest copy = RESVISOR__V1__DEVICE_REQUEST__INIT; /* without what we do not know */

    copy.action = request->action;
    copy.device = request->device;
    frame.body_case = RV__FRAME__BODY_DEVICE_REQUEST;
    frame.device_request = &copy;
    return ask(router, asker, &frame, err);
}

int rv_ask_restart(struct rv_router *router, struct rv_asker *asker, const char *type, struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__RestartType restart = RV__RESTART_TYPE__INIT;

    restart.type = (char *)type;
    frame.body_case = RV__FRAME__BODY_RESTART_TYPE;
    frame.restart_type = &restart;
    return ask(router, asker, &frame, err);
}

/* One at a time, and a bounded part of each log: what the supervisor can queue for us ends our connection when it is
 * full. */
int rv_ask_logs(struct rv_router *router, struct rv_asker *asker, const char *type, struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LogRequest request = RV__LOG_REQUEST__INIT;
    int r;

    if (router->log_ask)
        return rv_error_set(err, EBUSY, RV_CODE(LIMIT), "another request for logs is being answered");
    r = rv_parked_add(router, asker, NULL, 0, &frame.id, err);
    if (r < 0)
        return r;
    router->log_ask = frame.id;
    request.type = (char *)type;
    request.max_bytes = LOG_BYTES;
    frame.body_case = RV__FRAME__BODY_LOG_REQUEST;
    frame.log_request = &request;
    send(router, &frame);
    return 0;
}

void rv_ask_log_lines(struct rv_router *router, const Rv__Frame *message)
{
    const Rv__LogLines *lines = message->log_lines;
    struct rv_parked *parked = message->id ? rv_parked_find(router, message->id) : NULL;
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    struct rv_asker asker;

    if (lines->last && message->id == router->log_ask)
        router->log_ask = 0;
    if (!parked || !parked->asker.http) /* the asker has gone */
        return;
    rv_http_log_lines(parked->asker.http, lines->text.data, lines->text.len);
    if (!lines->last)
        return;
    rv_parked_release(parked, &asker);
    rv_rpc_reply(router, &asker, &reply, -1);
}

/* Puts in what only the router knows. The texts live as long as the jobs and types do: longer than this reply. */
static void complete_status(struct rv_router *router, Resvisor__V1__Status *status)
{
    status->router_state = router->stopping ? "STOPPING" : router->settling ? "SETTLING" : "READY";
    for (size_t i = 0; i < status->n_types; i++) {
        Resvisor__V1__TypeStatus *row = status->types[i];
        const struct rv_type *type = rv_types_find(router, row->name);

        if (!type)
            continue;
        row->queued = type->queued;
        row->running = type->running;
        for (size_t k = 0; k < row->n_workers; k++) {
            struct rv_worker_entry *worker;

            TAILQ_FOREACH (worker, &router->workers, link)
                if (worker->job && strcmp(worker->name, row->workers[k]->id) == 0)
                    row->workers[k]->job = worker->job->id;
        }
    }
}

static void forward_error(struct rv_router *router, struct rv_asker *asker, Resvisor__V1__Error *error)
{
    struct rv_error err = {0};

    (void)rv_error_from_message(&err, error);
    if (err.code == 0)
        (void)rv_error_set(&err, EIO, RV_CODE(INTERNAL), "the supervisor sent an answer of another kind");
    rv_rpc_reply_error(router, asker, &err, error ? error->retry_after_ms : 0);
}

static void answer(struct rv_router *router, struct rv_asker *asker, Rv__Frame *message)
{
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;

    switch (message->body_case) {
    case RV__FRAME__BODY_STATUS:
        reply.body_case = RESVISOR__V1__REPLY__BODY_STATUS;
        reply.status = message->status;
        break;
    case RV__FRAME__BODY_MODEL_STATUS:
        reply.body_case = RESVISOR__V1__REPLY__BODY_MODEL;
        reply.model = message->model_status;
        break;
    case RV__FRAME__BODY_DEVICE_LIST:
        reply.body_case = RESVISOR__V1__REPLY__BODY_DEVICES;
        reply.devices = message->device_list;
        break;
    case RV__FRAME__BODY_DONE:
        break;
    default:
        forward_error(router, asker, message->body_case == RV__FRAME__BODY_ERROR ? message->error : NULL);
        return;
    }
    rv_rpc_reply(router, asker, &reply, -1);
}

void rv_ask_answered(struct rv_router *router, Rv__Frame *message)
{
    struct rv_parked *parked;

    if (!message->id)
        return;
    if (message->id == router->log_ask) /* not lines, so it was refused */
        router->log_ask = 0;
    if (message->body_case == RV__FRAME__BODY_STATUS)
        complete_status(router, message->status);
    while ((parked = rv_parked_find(router, message->id))) { /* none: the asker has gone */
        struct rv_asker asker;

        rv_parked_release(parked, &asker);
        answer(router, &asker, message);
    }
    if (message->id == router->status_ask)
        next_status(router);
}
