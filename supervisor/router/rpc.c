/* The table of requests, the same for nanomsg and for the command line. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "router.h"

#define LIST_DEFAULT 100u
#define LIST_MAX 1000u
#define NOT_READY_RETRY_MS 200u
#define REPLY_ROOM (RV_RPC_FRAME_MAX - 4096u) /* for the rows of a long reply */
#define EVENT_SLACK (16u * 1024)              /* an unpacked event takes this much more than its bytes */

#define BODY(name) RESVISOR__V1__REQUEST__BODY_##name
#define REPLY(name) RESVISOR__V1__REPLY__BODY_##name

/* One request on its way. A handler answers or parks the asker and returns 0, or fills err and returns less. */
struct call {
    struct rv_router *router;
    struct rv_asker *asker;
    const Resvisor__V1__Request *request;
    uint64_t retry_after_ms;
};

/* ---- replies ---------------------------------------------------------------------------------------------------- */

static void send_reply(struct rv_asker *asker, Resvisor__V1__Reply *reply, int fd)
{
    Rv__Frame frame = RV__FRAME__INIT;

    reply->version = RV_PROTOCOL_VERSION;
    reply->id = asker->request_id;
    if (asker->http) {
        rv_http_reply(asker->http, reply, fd);
        return;
    }
    if (!asker->local) {
        rv_nano_reply(asker, reply, resvisor__v1__reply__get_packed_size(reply));
        return;
    }
    frame.id = asker->frame_id;
    frame.body_case = RV__FRAME__BODY_RPC_REPLY;
    frame.rpc_reply = reply;
    (void)rv_peer_send(asker->peer->peer, &frame, &fd, fd >= 0, RV_SEND_REPLY); /* failure ends that peer only */
}

void rv_rpc_reply_error(struct rv_router *router, struct rv_asker *asker, const struct rv_error *err,
                        uint64_t retry_after_ms)
{
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    Resvisor__V1__Error error;

    router->rpc_refusals++;
    rv_error_to_message(err, &error);
    error.retry_after_ms = retry_after_ms;
    reply.error = &error;
    send_reply(asker, &reply, -1);
    rv_asker_fini(asker);
}

void rv_rpc_reply(struct rv_router *router, struct rv_asker *asker, Resvisor__V1__Reply *reply, int fd)
{
    struct rv_error err;

    if (!asker->local && resvisor__v1__reply__get_packed_size(reply) > RV_RPC_FRAME_MAX - 64) {
        (void)rv_error_set(&err, EMSGSIZE, RV_CODE(TOO_LARGE), "the answer would be larger than %u KiB",
                           RV_RPC_FRAME_MAX / 1024);
        rv_rpc_reply_error(router, asker, &err, 0);
        return;
    }
    send_reply(asker, reply, fd);
    rv_asker_fini(asker);
}

void rv_rpc_reply_job(struct rv_router *router, struct rv_asker *asker, struct rv_job_record *job)
{
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    struct rv_job_view view;

    rv_jobs_view(job, &view);
    reply.body_case = REPLY(JOB);
    reply.job = &view.job;
    rv_rpc_reply(router, asker, &reply, -1);
    rv_results_told(router, job);
}

/* ---- handlers --------------------------------------------------------------------------------------------------- */

static struct rv_job_record *find_job(struct call *call, const char *id, struct rv_error *err)
{
    struct rv_job_record *job;

    if (rv_submit_check_id(id, err) < 0)
        return NULL;
    job = rv_jobs_find(call->router, id);
    if (!job)
        (void)rv_error_set(err, ENOENT, RV_CODE(NO_SUCH_JOB), "no job is named %s, or its record has expired", id);
    return job;
}

/* Answers now if the job has ended or nobody wants to wait. */
static int answer_or_wait(struct call *call, struct rv_job_record *job, uint64_t timeout_ms, struct rv_error *err)
{
    if (timeout_ms > 0 && !rv_jobs_has_ended(job))
        return rv_parked_add(call->router, call->asker, job, timeout_ms, NULL, err);
    rv_rpc_reply_job(call->router, call->asker, job);
    return 0;
}

static int do_submit(struct call *call, struct rv_error *err)
{
    struct rv_job_record *job = NULL;
    int r = rv_submit_accept(call->router, call->request->submit, NULL, &job, err, &call->retry_after_ms);

    return r < 0 ? r : answer_or_wait(call, job, call->request->submit->wait_ms, err);
}

static int do_wait(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__Wait *wait = call->request->wait;
    struct rv_job_record *job;

    if (wait->timeout_ms > RV_WAIT_MAX_MS)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "timeout_ms is %llu; at most %llu are allowed",
                            (unsigned long long)wait->timeout_ms, (unsigned long long)RV_WAIT_MAX_MS);
    job = find_job(call, wait->job_id, err);
    return job ? answer_or_wait(call, job, wait->timeout_ms, err) : -ENOENT;
}

static int do_get(struct call *call, struct rv_error *err)
{
    struct rv_job_record *job = find_job(call, call->request->get->job_id, err);

    return job ? answer_or_wait(call, job, 0, err) : -ENOENT;
}

static int do_cancel(struct call *call, struct rv_error *err)
{
    struct rv_job_record *job = find_job(call, call->request->cancel->job_id, err);

    if (!job)
        return -ENOENT;
    rv_jobs_cancel(call->router, job);
    return answer_or_wait(call, job, 0, err);
}

static int do_list(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__List *list = call->request->list;
    uint32_t limit = list->limit ? list->limit : LIST_DEFAULT, count = 0;
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    Resvisor__V1__JobList jobs = RESVISOR__V1__JOB_LIST__INIT;
    struct rv_job_record *job, **listed;
    struct rv_job_view *views;
    Resvisor__V1__Job **rows;
    size_t bytes = 0;

    if (limit > LIST_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "limit is %u; at most %u are allowed", limit, LIST_MAX);
    if (list->type[0] && !rv_types_find(call->router, list->type))
        return rv_error_set(err, ENOENT, RV_CODE(NO_SUCH_TYPE), "no workflow type of that name");
    if (limit > call->router->job_count)
        limit = call->router->job_count;
    views = calloc(limit + 1, sizeof(*views));
    rows = calloc(limit + 1, sizeof(Resvisor__V1__Job *));
    listed = calloc(limit + 1, sizeof(struct rv_job_record *));
    if (!views || !rows || !listed) {
        (void)rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a list of %u jobs", limit);
        goto out;
    }
    TAILQ_FOREACH_REVERSE(job, &call->router->all, rv_job_list, all_link)
    {
        if (count == limit)
            break;
        if ((list->type[0] && strcmp(list->type, job->type_name) != 0) ||
            (list->unfinished_only && rv_jobs_has_ended(job)))
            continue;
        rv_jobs_view(job, &views[count]);
        bytes += resvisor__v1__job__get_packed_size(&views[count].job) + 8;
        if (bytes > REPLY_ROOM)
            break;
        rows[count] = &views[count].job;
        listed[count++] = job;
    }
    jobs.n_jobs = count;
    jobs.jobs = rows;
    reply.body_case = REPLY(JOBS);
    reply.jobs = &jobs;
    rv_rpc_reply(call->router, call->asker, &reply, -1);
    for (uint32_t i = 0; i < count; i++)
        rv_results_told(call->router, listed[i]);
out:
    free(views);
    free(rows);
    free(listed);
    return err->code ? -ENOMEM : 0;
}

static const struct rv_output *find_output(struct call *call, struct rv_job_record *job, struct rv_error *err)
{
    uint32_t i = call->request->fetch->output;

    if (i >= job->output_count) {
        (void)rv_error_set(err, ENOENT, RV_CODE(NO_SUCH_RESULT), "job %s has %u outputs, and none of number %u",
                           job->id, job->output_count, i);
        return NULL;
    }
    if (job->outputs[i].fd < 0) {
        (void)rv_error_set(err, ENOENT, RV_CODE(NO_SUCH_RESULT), "output %u of job %s was kept for a time, and is gone",
                           i, job->id);
        return NULL;
    }
    return &job->outputs[i];
}

static int read_piece(const struct rv_output *output, Resvisor__V1__Piece *piece, uint64_t offset, size_t length,
                      struct rv_error *err)
{
    piece->data.data = malloc(length ? length : 1);
    if (!piece->data.data)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a piece of %zu bytes", length);
    while (piece->data.len < length) {
        ssize_t n = pread(output->fd, piece->data.data + piece->data.len, length - piece->data.len,
                          (off_t)(offset + piece->data.len));

        if (n <= 0)
            return rv_error_set(err, EIO, RV_CODE(INTERNAL), "an output cannot be read: %s",
                                n < 0 ? strerror(errno) : "it is too short");
        piece->data.len += (size_t)n;
    }
    return 0;
}

static int do_fetch(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__Fetch *fetch = call->request->fetch;
    struct rv_job_record *job = find_job(call, fetch->job_id, err);
    const struct rv_output *output = job ? find_output(call, job, err) : NULL;
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    Resvisor__V1__Piece piece = RESVISOR__V1__PIECE__INIT;
    bool whole = call->asker->local && fetch->offset == 0 && fetch->length == 0;
    uint64_t length = fetch->length && fetch->length < RV_PIECE_MAX ? fetch->length : RV_PIECE_MAX;
    int r = 0;

    if (!output)
        return -ENOENT;
    if (fetch->offset > output->size)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "offset %llu is beyond the %llu bytes of the output",
                            (unsigned long long)fetch->offset, (unsigned long long)output->size);
    if (length > output->size - fetch->offset)
        length = output->size - fetch->offset;
    piece.offset = fetch->offset;
    piece.total = output->size;
    if (!whole)
        r = read_piece(output, &piece, fetch->offset, length, err);
    if (r == 0) {
        reply.body_case = REPLY(PIECE);
        reply.piece = &piece;
        rv_rpc_reply(call->router, call->asker, &reply, whole ? output->fd : -1);
        rv_results_told(call->router, job);
    }
    free(piece.data.data);
    return r;
}

static int do_events(struct call *call, struct rv_error *err)
{
    struct rv_router *router = call->router;
    uint64_t oldest = rv_events_oldest(router), after = call->request->events_since->sequence;
    uint64_t from = after < oldest - 1                ? oldest
                    : after >= router->event_sequence ? router->event_sequence + 1
                                                      : after + 1;
    Resvisor__V1__Reply reply = RESVISOR__V1__REPLY__INIT;
    Resvisor__V1__EventList list = RESVISOR__V1__EVENT_LIST__INIT;
    Resvisor__V1__Event **rows = calloc(RV_EVENTS_KEPT, sizeof(Resvisor__V1__Event *));
    void **arenas = calloc(RV_EVENTS_KEPT, sizeof(void *));
    size_t bytes = 0, count = 0;
    int r = 0;

    if (!rows || !arenas) {
        r = rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a list of events");
        goto out;
    }
    for (uint64_t s = from; s <= router->event_sequence; s++) {
        const struct rv_event_slot *slot = &router->events[s % RV_EVENTS_KEPT];

        bytes += slot->length + 8;
        if (bytes > REPLY_ROOM)
            break; /* the client asks again from the last one it got */
        if (!slot->bytes)
            continue;
        rows[count] =
            (Resvisor__V1__Event *)rv_message_unpack(&resvisor__v1__event__descriptor, slot->bytes, slot->length,
                                                     4 * (size_t)slot->length + EVENT_SLACK, &arenas[count], NULL);
        if (rows[count])
            count++;
    }
    list.n_events = count;
    list.events = rows;
    list.oldest = oldest;
    reply.body_case = REPLY(EVENTS);
    reply.events = &list;
    rv_rpc_reply(router, call->asker, &reply, -1);
out:
    for (size_t i = 0; i < count; i++)
        free(arenas[i]);
    free(arenas);
    free(rows);
    return r;
}

static int do_status(struct call *call, struct rv_error *err)
{
    return rv_ask_status(call->router, call->asker, err);
}

static int do_model(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__ModelRequest *request = call->request->model;
    const struct rv_local_peer *peer = call->asker->peer;

    if (request->model[0] == '\0' || strlen(request->model) > RV_PATH_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "model has %zu bytes; 1 to %u are allowed",
                            strlen(request->model), RV_PATH_MAX);
    if (strlen(request->device) > RV_NAME_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "device has %zu bytes; at most %u are allowed",
                            strlen(request->device), RV_NAME_MAX);
    if (peer && !peer->is_operator && request->action != RESVISOR__V1__MODEL_ACTION__MODEL_SHOW &&
        request->action != RESVISOR__V1__MODEL_ACTION__MODEL_LOAD)
        return rv_error_set(err, EACCES, RV_CODE(NOT_PERMITTED),
                            "only the owner of resvisor and root may unload, pin and unpin models here");
    return rv_ask_model(call->router, call->asker, request, err);
}

static int do_device(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__DeviceRequest *request = call->request->device;
    const struct rv_local_peer *peer = call->asker->peer;

    if (strlen(request->device) > RV_NAME_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "device has %zu bytes; at most %u are allowed",
                            strlen(request->device), RV_NAME_MAX);
    if (peer && !peer->is_operator && request->action != RESVISOR__V1__DEVICE_ACTION__DEVICE_SHOW)
        return rv_error_set(err, EACCES, RV_CODE(NOT_PERMITTED),
                            "only the owner of resvisor and root may test devices here");
    return rv_ask_device(call->router, call->asker, request, err);
}

static const struct {
    Resvisor__V1__Request__BodyCase body;
    bool early; /* answered before all workers have reported */
    int (*handle)(struct call *call, struct rv_error *err);
} requests[] = {
    {BODY(SUBMIT), false, do_submit},       {BODY(WAIT), false, do_wait},     {BODY(GET), false, do_get},
    {BODY(LIST), false, do_list},           {BODY(CANCEL), false, do_cancel}, {BODY(FETCH), false, do_fetch},
    {BODY(EVENTS_SINCE), false, do_events}, {BODY(STATUS), true, do_status},  {BODY(MODEL), false, do_model},
    {BODY(DEVICE), false, do_device},
};

/* Takes the same time wherever the first difference is. */
static bool token_matches(const char *right, const char *shown)
{
    size_t right_length = strlen(right), shown_length = strlen(shown);
    volatile unsigned char difference = right_length != shown_length;

    if (right_length == 0 || shown_length == 0)
        return false;
    for (size_t i = 0; i < right_length; i++)
        difference = difference | (unsigned char)(right[i] ^ shown[i % shown_length]);
    return difference == 0;
}

static int check(struct call *call, struct rv_error *err)
{
    const Resvisor__V1__Request *request = call->request;

    if (request->version != RV_PROTOCOL_VERSION)
        return rv_error_set(err, EPROTO, RV_CODE(BAD_VERSION), "the request has version %u; this is version %u",
                            request->version, RV_PROTOCOL_VERSION);
    if (call->asker->tcp && !token_matches(call->router->setup->token, request->token))
        return rv_error_set(err, EACCES, RV_CODE(UNAUTHENTICATED), "the token is %s",
                            request->token[0] ? "wrong" : "missing");
    return 0;
}

static int dispatch(struct call *call, struct rv_error *err)
{
    int r = check(call, err);

    if (r < 0)
        return r;
    for (unsigned i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        if (requests[i].body != call->request->body_case)
            continue;
        if (call->router->settling && !requests[i].early) {
            call->retry_after_ms = NOT_READY_RETRY_MS;
            return rv_error_set(err, EAGAIN, RV_CODE(NOT_READY),
                                "the router has just started and waits for the workers' reports");
        }
        return requests[i].handle(call, err);
    }
    return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "the request asks for nothing that this version knows");
}

void rv_rpc_request(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__Request *request)
{
    struct call call = {.router = router, .asker = asker, .request = request};
    struct rv_error err = {0};

    router->rpc_requests++;
    asker->request_id = request->id;
    if (dispatch(&call, &err) < 0)
        rv_rpc_reply_error(router, asker, &err, call.retry_after_ms);
}
