/* Requests that only the supervisor can answer. It answers every one; if it dies, so does the router. */
#include <errno.h>
#include <string.h>

#include "router.h"

static int ask(struct rv_router *router, struct rv_asker *asker, Rv__Frame *frame, struct rv_error *err)
{
    int r = rv_parked_add(router, asker, NULL, 0, &frame->id, err);

    if (r == 0)
        (void)rv_peer_send(router->supervisor, frame, NULL, 0, RV_SEND_REPLY);
    return r;
}

int rv_ask_status(struct rv_router *router, struct rv_asker *asker, struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__StatusRequest request = RESVISOR__V1__STATUS_REQUEST__INIT;

    frame.body_case = RV__FRAME__BODY_STATUS_REQUEST;
    frame.status_request = &request;
    return ask(router, asker, &frame, err);
}

int rv_ask_model(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__ModelRequest *request,
                 struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__ModelRequest copy = RESVISOR__V1__MODEL_REQUEST__INIT; /* without what we do not know */

    copy.action = request->action;
    copy.model = request->model;
    frame.body_case = RV__FRAME__BODY_MODEL_REQUEST;
    frame.model_request = &copy;
    return ask(router, asker, &frame, err);
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

            TAILQ_FOREACH(worker, &router->workers, link)
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

void rv_ask_answered(struct rv_router *router, Rv__Frame *message)
{
    struct rv_parked *parked = rv_parked_find(router, message->id);
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    struct rv_asker asker;

    if (!parked)
        return; /* the asker has gone */
    asker = parked->asker;
    if (asker.peer)
        asker.peer->parked--;
    parked->asker = (struct rv_asker){0};
    rv_parked_free(parked);
    switch (message->body_case) {
    case RV__FRAME__BODY_STATUS:
        complete_status(router, message->status);
        reply.body_case = RESVISOR__V1__REPLY__BODY_STATUS;
        reply.status = message->status;
        break;
    case RV__FRAME__BODY_MODEL_STATUS:
        reply.body_case = RESVISOR__V1__REPLY__BODY_MODEL;
        reply.model = message->model_status;
        break;
    default:
        forward_error(router, &asker, message->body_case == RV__FRAME__BODY_ERROR ? message->error : NULL);
        return;
    }
    rv_rpc_reply(router, &asker, &reply, -1);
}
