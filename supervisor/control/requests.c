/* The protocol at a glance: which role may send which frame, and who handles it. */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "children/children.h"
#include "control.h"
#include "log.h"
#include "pool/devices.h"
#include "pool/pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* ---- everybody -------------------------------------------------------------------------------------------------- */

static void handle_hello(struct rv_session *session, struct rv_frame *frame)
{
    struct rv_supervisor *s = session->supervisor;
    const Rv__Hello *hello = frame->message->hello;
    Rv__Frame answer = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;

    if (hello->version != RV_PROTOCOL_VERSION || hello->role != session->role) {
        struct rv_error err = {0};

        if (hello->version != RV_PROTOCOL_VERSION)
            rv_error_set(&err, EPROTO, ERROR(BAD_VERSION), "this supervisor speaks version %u, the other side %u",
                         RV_PROTOCOL_VERSION, hello->version);
        else
            rv_error_set(&err, EPERM, ERROR(NOT_PERMITTED), "this connection is for another role");
        rv_session_reply(session, frame->message->id, &err);
        rv_peer_drop(session->peer, "it said Hello with another version or role");
        return;
    }
    (void)rv_escape(session->name, sizeof(session->name), hello->name, strlen(hello->name));
    session->greeted = true;
    if (session->hello_timer)
        (void)event_del(session->hello_timer);
    reply.version = RV_PROTOCOL_VERSION;
    reply.pid = getpid();
    reply.instance = s->state.instance;
    reply.operator_ = session->is_operator;
    answer.id = frame->message->id;
    answer.body_case = RV__FRAME__BODY_HELLO_REPLY;
    answer.hello_reply = &reply;
    rv_session_send(session, &answer, NULL, 0);
    if (session->role == RV__ROLE__ROLE_LOADER)
        rv_load_on_hello(s, session->child);
    if (session->role == RV__ROLE__ROLE_ROUTER)
        rv_router_on_hello(s);
    if (session->role == RV__ROLE__ROLE_DEVICE)
        rv_device_on_hello(s, session->child);
}

/* ---- leases ----------------------------------------------------------------------------------------------------- */

static void handle_attach(struct rv_session *session, struct rv_frame *frame)
{
    rv_lease_attach(session, frame->message->id, frame->message->attach, rv_frame_take_fd(frame, 0));
}

static void handle_detach(struct rv_session *session, struct rv_frame *frame)
{
    rv_lease_detach(session, frame->message->detach->lease_id);
    if (frame->message->id)
        rv_session_reply(session, frame->message->id, NULL);
}

/* ---- operators -------------------------------------------------------------------------------------------------- */

static void handle_status(struct rv_session *session, struct rv_frame *frame)
{
    rv_status_send(session, frame->message->id);
}

static void handle_model(struct rv_session *session, struct rv_frame *frame)
{
    const Resvisor__V1__ModelRequest *request = frame->message->model_request;
    struct rv_error err = {0};

    if (request->action > RESVISOR__V1__MODEL_ACTION__MODEL_LOAD && !session->is_operator &&
        session->role == RV__ROLE__ROLE_CLIENT) {
        rv_error_set(&err, EPERM, ERROR(NOT_PERMITTED), "only the owner may unload, pin or unpin models");
        rv_session_reply(session, frame->message->id, &err);
        return;
    }
    rv_pool_model_request(session, frame->message->id, request);
}

static void handle_devices(struct rv_session *session, struct rv_frame *frame)
{
    const Resvisor__V1__DeviceRequest *request = frame->message->device_request;
    struct rv_error err = {0};

    if (request->action != RESVISOR__V1__DEVICE_ACTION__DEVICE_SHOW && !session->is_operator &&
        session->role == RV__ROLE__ROLE_CLIENT) {
        rv_error_set(&err, EPERM, ERROR(NOT_PERMITTED), "only the owner may test devices");
        rv_session_reply(session, frame->message->id, &err);
        return;
    }
    rv_device_request(session, frame->message->id, request);
}

static void handle_restart(struct rv_session *session, struct rv_frame *frame)
{
    struct rv_error err = {0};

    if (session->supervisor->stopping)
        rv_error_set(&err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    else
        (void)rv_workers_restart_type(session->supervisor, session, frame->message->id,
                                      frame->message->restart_type->type, &err);
    if (err.code)
        rv_session_reply(session, frame->message->id, &err);
}

static void handle_stop(struct rv_session *session, struct rv_frame *frame)
{
    rv_session_reply(session, frame->message->id, NULL);
    rv_supervisor_stop(session->supervisor, "asked by `resvisor stop`");
}

static void handle_logs(struct rv_session *session, struct rv_frame *frame)
{
    const Rv__LogRequest *request = frame->message->log_request;
    struct rv_error err = {0};

    if (rv_logs_send(session->supervisor, session, frame->message->id, request, &err) < 0)
        rv_session_reply(session, frame->message->id, &err);
}

/* ---- children --------------------------------------------------------------------------------------------------- */

static void handle_load_plan(struct rv_session *session, struct rv_frame *frame)
{
    rv_load_on_plan(session->supervisor, session->child, frame->message->load_plan);
}

static void handle_load_progress(struct rv_session *session, struct rv_frame *frame)
{
    rv_load_on_progress(session->supervisor, session->child, frame->message->load_progress);
}

static void handle_load_done(struct rv_session *session, struct rv_frame *frame)
{
    rv_load_on_done(session->supervisor, session->child, frame);
}

static void handle_device_frame(struct rv_session *session, struct rv_frame *frame)
{
    if (!rv_device_on_frame(session->supervisor, session->child, frame->message))
        rv_peer_drop(session->peer, "it said what is not its part to say");
}

static void handle_error(struct rv_session *session, struct rv_frame *frame)
{
    if (session->role == RV__ROLE__ROLE_LOADER)
        rv_load_on_error(session->supervisor, session->child, frame->message->error);
    if (session->role == RV__ROLE__ROLE_TEMPLATE)
        rv_template_on_error(rv_template_of_child(session->child), frame->message->id, frame->message->error);
    if (session->role == RV__ROLE__ROLE_DEVICE)
        handle_device_frame(session, frame);
}

static void handle_template_ready(struct rv_session *session, struct rv_frame *frame)
{
    rv_template_on_ready(rv_template_of_child(session->child), frame->message->template_ready);
}

static void handle_worker_ready(struct rv_session *session, struct rv_frame *frame)
{
    rv_worker_on_ready(session->supervisor, rv_worker_of_child(session->child), frame->message->worker_ready);
}

static void handle_pong(struct rv_session *session, struct rv_frame *frame)
{
    rv_worker_on_pong(session->supervisor, rv_worker_of_child(session->child), frame->message->pong);
}

static void handle_router_ready(struct rv_session *session, struct rv_frame *frame)
{
    (void)frame;
    rv_router_on_ready(session->supervisor);
}

static void handle_job_mark(struct rv_session *session, struct rv_frame *frame)
{
    const Rv__JobMark *mark = frame->message->job_mark;
    struct rv_ledger_entry entry = {0};

    if (!mark->job || mark->job->content_digest.len != 16 || strlen(mark->job->job_id) > RV_NAME_MAX) {
        rv_peer_drop(session->peer, "it marked a job without id or digest");
        return;
    }
    (void)snprintf(entry.job_id, sizeof(entry.job_id), "%s", mark->job->job_id);
    (void)snprintf(entry.type, sizeof(entry.type), "%s", mark->job->type);
    memcpy(entry.digest, mark->job->content_digest.data, sizeof(entry.digest));
    entry.attempts = (uint16_t)mark->job->attempts;
    entry.ended = mark->job->ended;
    entry.outcome = (uint8_t)mark->job->outcome;
    rv_ledger_mark(&session->supervisor->state.ledger, &entry);
    rv_worker_mark_job(session->supervisor, mark->worker, mark->job->job_id, mark->job->ended);
}

static void handle_device_event(struct rv_session *session, struct rv_frame *frame)
{
    if (session->role == RV__ROLE__ROLE_DEVICE)
        handle_device_frame(session, frame);
    else
        rv_device_on_event(session->supervisor, session, frame->message->device_event);
}

static void handle_kill_worker(struct rv_session *session, struct rv_frame *frame)
{
    const Rv__KillWorker *kill = frame->message->kill_worker;

    rv_worker_kill_by_id(session->supervisor, kill->worker, kill->incarnation, kill->reason);
}

/* ---- the table -------------------------------------------------------------------------------------------------- */

#define CLIENT (1u << RV__ROLE__ROLE_CLIENT)
#define WORKER (1u << RV__ROLE__ROLE_WORKER)
#define LOADER (1u << RV__ROLE__ROLE_LOADER)
#define ROUTER (1u << RV__ROLE__ROLE_ROUTER)
#define TEMPLATE (1u << RV__ROLE__ROLE_TEMPLATE)
#define DEVICE (1u << RV__ROLE__ROLE_DEVICE)
#define OPERATOR                                                                                        \
    (1u << 31) /* with CLIENT: only the owner and root. The router asks for whom it has admitted itself \
                */

static const struct {
    Rv__Frame__BodyCase body;
    uint32_t roles;
    void (*handle)(struct rv_session *session, struct rv_frame *frame);
} requests[] = {
    {RV__FRAME__BODY_HELLO, CLIENT | WORKER | LOADER | ROUTER | TEMPLATE | DEVICE, handle_hello},
    {RV__FRAME__BODY_ATTACH, CLIENT | WORKER, handle_attach},
    {RV__FRAME__BODY_DETACH, CLIENT | WORKER, handle_detach},
    {RV__FRAME__BODY_STATUS_REQUEST, CLIENT | ROUTER, handle_status},
    {RV__FRAME__BODY_MODEL_REQUEST, CLIENT | ROUTER, handle_model},
    {RV__FRAME__BODY_RESTART_TYPE, CLIENT | ROUTER | OPERATOR, handle_restart},
    {RV__FRAME__BODY_STOP, CLIENT | OPERATOR, handle_stop},
    {RV__FRAME__BODY_LOG_REQUEST, CLIENT | ROUTER | OPERATOR, handle_logs},
    {RV__FRAME__BODY_LOAD_PLAN, LOADER, handle_load_plan},
    {RV__FRAME__BODY_LOAD_PROGRESS, LOADER, handle_load_progress},
    {RV__FRAME__BODY_LOAD_DONE, LOADER, handle_load_done},
    {RV__FRAME__BODY_ERROR, LOADER | WORKER | ROUTER | TEMPLATE | DEVICE, handle_error},
    {RV__FRAME__BODY_TEMPLATE_READY, TEMPLATE, handle_template_ready},
    {RV__FRAME__BODY_WORKER_READY, WORKER, handle_worker_ready},
    {RV__FRAME__BODY_PONG, WORKER, handle_pong},
    {RV__FRAME__BODY_ROUTER_READY, ROUTER, handle_router_ready},
    {RV__FRAME__BODY_JOB_MARK, ROUTER, handle_job_mark},
    {RV__FRAME__BODY_KILL_WORKER, ROUTER, handle_kill_worker},
    {RV__FRAME__BODY_DEVICE_REQUEST, CLIENT | ROUTER, handle_devices},
    {RV__FRAME__BODY_DEVICE_FOUND, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_DEVICE_TESTS, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_DEVICE_DONE, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_HOLDER_ALLOCATED, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_DONE, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_DEVICE_MEMORY, DEVICE, handle_device_frame},
    {RV__FRAME__BODY_DEVICE_EVENT, DEVICE | LOADER | WORKER | CLIENT, handle_device_event},
};

void rv_request_dispatch(struct rv_session *session, struct rv_frame *frame)
{
    Rv__Frame__BodyCase body = frame->message->body_case;
    struct rv_error err = {0};

    for (unsigned i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        if (requests[i].body != body)
            continue;
        if (!(requests[i].roles & (1u << session->role)) || (!session->greeted && body != RV__FRAME__BODY_HELLO))
            break;
        if ((requests[i].roles & OPERATOR) && session->role == RV__ROLE__ROLE_CLIENT && !session->is_operator) {
            rv_error_set(&err, EPERM, ERROR(NOT_PERMITTED), "only the owner of this resvisor may do that");
            rv_session_reply(session, frame->message->id, &err);
            return;
        }
        requests[i].handle(session, frame);
        return;
    }
    rv_error_set(&err, EPROTO, ERROR(BAD_REQUEST), "a frame that this connection may not send (number %d)", (int)body);
    rv_session_reply(session, frame->message->id, &err);
    rv_peer_drop(session->peer, "it sent a frame that it may not send");
}
