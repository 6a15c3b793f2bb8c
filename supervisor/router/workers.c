/* Worker channels: reports, dispatch, progress, results, death. */
#include <assert.h>
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "front/front.h"
#include "log.h"
#include "router.h"

#define ATTEMPTS_MAX 2u           /* a job that ended two workers is not given to a third */
#define HELD_POLL_US 2000u        /* how soon to look again whether the supervisor took our marks */
#define CUT_OFF_US (2 * RV_SEC)   /* a worker without channel whose end nobody reports is ended */
#define LAST_FRAMES_MAX 4096u     /* frames read from a dead worker's socket */
#define UNPACK_SLACK (16u * 1024) /* structs of a small message take more than four times its bytes */

#define SILENT (1u << RV_WORKER_SILENT)
#define REPORTING (1u << RV_WORKER_REPORTING)
#define READY (1u << RV_WORKER_READY)
#define CUT_OFF (1u << RV_WORKER_CUT_OFF) /* what it sent before is still read */

static void on_held(int socket, short what, void *context);

int rv_workers_init(struct rv_router *router)
{
    TAILQ_INIT(&router->workers);
    router->held_timer = event_new(router->base, -1, 0, on_held, router);
    return router->held_timer ? 0 : -ENOMEM;
}

static struct rv_worker_entry *find(struct rv_router *router, const char *name)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &router->workers, link)
        if (strcmp(worker->name, name) == 0)
            return worker;
    return NULL;
}

static void free_worker(struct rv_worker_entry *worker)
{
    struct rv_router *router = worker->router;
    struct rv_job_record *job;

    TAILQ_FOREACH (job, &router->kept, kept_link)
        if (job->holder == worker)
            job->holder = NULL;
    TAILQ_REMOVE(&router->workers, worker, link);
    rv_peer_destroy(worker->peer);
    if (worker->timer)
        event_free(worker->timer);
    free(worker);
}

void rv_workers_fini(struct rv_router *router)
{
    struct rv_worker_entry *worker;

    while ((worker = TAILQ_FIRST(&router->workers)))
        free_worker(worker);
    if (router->held_timer)
        event_free(router->held_timer);
    router->held_timer = NULL;
}

/* ---- sending ---------------------------------------------------------------------------------------------------- */

void rv_workers_send_cancel(struct rv_worker_entry *worker, const char *job_id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobCancel cancel = RV__JOB_CANCEL__INIT;

    if (!worker->peer || worker->held) /* held: sent after JobStart */
        return;
    cancel.job_id = (char *)job_id;
    frame.body_case = RV__FRAME__BODY_JOB_CANCEL;
    frame.job_cancel = &cancel;
    (void)rv_peer_send(worker->peer, &frame, NULL, 0, RV_SEND_REPLY);
}

void rv_workers_send_ack(struct rv_worker_entry *worker, const char *job_id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobAck ack = RV__JOB_ACK__INIT;

    if (!worker->peer)
        return;
    ack.job_id = (char *)job_id;
    frame.body_case = RV__FRAME__BODY_JOB_ACK;
    frame.job_ack = &ack;
    (void)rv_peer_send(worker->peer, &frame, NULL, 0, RV_SEND_REPLY);
}

void rv_workers_kill(struct rv_worker_entry *worker, const char *reason)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__KillWorker kill_worker = RV__KILL_WORKER__INIT;

    kill_worker.worker = worker->name;
    kill_worker.incarnation = worker->incarnation;
    kill_worker.reason = (char *)reason;
    frame.body_case = RV__FRAME__BODY_KILL_WORKER;
    frame.kill_worker = &kill_worker;
    (void)rv_peer_send(worker->router->supervisor, &frame, NULL, 0, RV_SEND_REPLY);
}

/* ---- dispatch --------------------------------------------------------------------------------------------------- */

static struct rv_worker_entry *find_idle(struct rv_router *router, const struct rv_type *type)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &router->workers, link)
        if (worker->type == type && worker->state == RV_WORKER_READY && !worker->draining && !worker->job &&
            !worker->foreign_job[0])
            return worker;
    return NULL;
}

/* The job leaves its worker and waits again, before its equals. */
static void put_back(struct rv_worker_entry *worker)
{
    struct rv_job_record *job = worker->job;

    rv_jobs_arm(worker->router, job, 0);
    worker->job = NULL;
    worker->held = false;
    job->worker = NULL;
    job->started_us = 0;
    job->type->running--;
    job->progress_done = 0;
    job->progress_total = 0;
    job->progress_text[0] = '\0';
    rv_jobs_enqueue(worker->router, job, true);
    rv_events_job(worker->router, job);
    if (worker->router->stopping)
        rv_jobs_end_queued(worker->router);
}

static void send_start(struct rv_worker_entry *worker)
{
    struct rv_job_record *job = worker->job;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobStart start = RV__JOB_START__INIT;
    struct rv_error err = {0};
    void *arena = NULL;

    start.submit =
        (Resvisor__V1__Submit *)rv_message_unpack(&resvisor__v1__submit__descriptor, job->submit, job->submit_length,
                                                  4 * (size_t)job->submit_length + UNPACK_SLACK, &arena, NULL);
    if (!start.submit) {
        (void)rv_error_set(&err, ENOMEM, RV_CODE(NO_MEMORY), "no memory to send the job to its worker");
        rv_jobs_end(worker->router, job, &err);
        return;
    }
    start.attempt = job->attempts;
    start.content_digest = (ProtobufCBinaryData){RV_DIGEST_SIZE, job->digest};
    frame.body_case = RV__FRAME__BODY_JOB_START;
    frame.job_start = &start;
    worker->held = false;
    if (rv_peer_send(worker->peer, &frame, NULL, 0, RV_SEND_REPLY) < 0) {
        worker->state = RV_WORKER_CUT_OFF; /* nothing was sent: the job is as it was */
        job->attempts--;
        put_back(worker);
    } else if (job->cancelled || job->overdue) {
        rv_workers_send_cancel(worker, job->id);
    }
    free(arena);
}

static void arm_held(struct rv_router *router)
{
    static const struct timeval soon = {0, HELD_POLL_US};

    (void)event_add(router->held_timer, &soon);
}

static void on_held(int socket, short what, void *context)
{
    struct rv_router *router = context;
    struct rv_worker_entry *worker;

    (void)socket;
    (void)what;
    if (!rv_peer_is_idle(router->supervisor)) {
        arm_held(router);
        return;
    }
    TAILQ_FOREACH (worker, &router->workers, link)
        if (worker->held && worker->peer) /* without a channel it waits for WorkerGone, which puts the job back */
            send_start(worker);
}

static void start(struct rv_worker_entry *worker, struct rv_job_record *job)
{
    struct rv_router *router = worker->router;

    rv_jobs_dequeue(job);
    job->state = RESVISOR__V1__JOB_STATE__JOB_RUNNING;
    job->worker = worker;
    job->attempts++;
    job->overdue = false;
    job->started_us = rv_now_us();
    (void)snprintf(job->worker_name, sizeof(job->worker_name), "%s", worker->name);
    job->type->running++;
    worker->job = job;
    rv_jobs_mark(router, job, false);
    rv_events_job(router, job);
    rv_front_queue_changed(router);
    if (job->type->job_timeout_us)
        rv_jobs_arm(router, job, job->type->job_timeout_us);
    /* The ledger must know of the job before its worker does: if the mark still waits in this process, so must the
     * start, or a kill of us and the worker would make a job that ran look like one that never was. */
    if (rv_peer_is_idle(router->supervisor)) {
        send_start(worker);
    } else {
        worker->held = true;
        arm_held(router);
    }
}

void rv_workers_dispatch(struct rv_router *router, struct rv_type *type)
{
    struct rv_worker_entry *worker;

    while (!TAILQ_EMPTY(&type->queue) && (worker = find_idle(router, type)))
        start(worker, TAILQ_FIRST(&type->queue));
}

/* ---- frames of a worker ----------------------------------------------------------------------------------------- */

static void become_ready(struct rv_worker_entry *worker)
{
    worker->state = RV_WORKER_READY;
    rv_ledger_heard(worker->router, worker->name);
    rv_front_worker_ready(worker->router, worker);
    rv_workers_dispatch(worker->router, worker->type);
}

static bool report_is_valid(const struct rv_worker_entry *worker, const Rv__WorkerReport *report)
{
    struct rv_error err;

    return strcmp(report->worker, worker->name) == 0 && report->incarnation == worker->incarnation &&
           (report->running_job[0] == '\0' || rv_submit_check_id(report->running_job, &err) == 0);
}

static void on_report(struct rv_worker_entry *worker, struct rv_frame *frame)
{
    const Rv__WorkerReport *report = frame->message->worker_report;
    struct rv_job_record *job;

    if (!report_is_valid(worker, report)) {
        rv_peer_drop(worker->peer, "its report is about another worker, or names a malformed job");
        return;
    }
    if (report->running_job[0]) {
        job = rv_ledger_adopt(worker->router, worker, report->running_job, report->running_digest);
        if (job) {
            worker->job = job;
            job->worker = worker;
            job->type = worker->type;
            job->type->running++;
            if (job->type->job_timeout_us) /* counted anew: nobody knows how long it has run */
                rv_jobs_arm(worker->router, job, job->type->job_timeout_us);
            rv_events_job(worker->router, job);
        } else {
            (void)snprintf(worker->foreign_job, sizeof(worker->foreign_job), "%s", report->running_job);
            rv_workers_send_cancel(worker, report->running_job);
        }
    }
    worker->state = RV_WORKER_REPORTING;
    worker->results_due = report->unacknowledged;
    if (worker->results_due == 0)
        become_ready(worker);
}

static void on_progress(struct rv_worker_entry *worker, struct rv_frame *frame)
{
    const Rv__JobProgress *progress = frame->message->job_progress;
    struct rv_job_record *job = worker->job;

    if (!job || strcmp(job->id, progress->job_id) != 0)
        return; /* of a job that has ended meanwhile */
    job->progress_done = progress->done;
    job->progress_total = progress->total;
    (void)rv_escape(job->progress_text, sizeof(job->progress_text), progress->text, strlen(progress->text));
    rv_events_progress(worker->router, job);
}

/* What the job's end is called, when its executor's words are not the whole story. */
static void judge(const struct rv_job_record *job, struct rv_error *err)
{
    if (err->code == 0)
        return;
    if (job->overdue)
        (void)rv_error_set(err, ETIMEDOUT, RV_CODE(DEADLINE), "the job ran longer than the %llu ms that %s allows",
                           (unsigned long long)(job->type->job_timeout_us / RV_MSEC), job->type_name);
    else if (job->cancelled && (err->code == RV_CODE(CANCELLED) || err->code == RV_CODE(SHUTTING_DOWN)))
        (void)rv_error_set(err, ECANCELED, RV_CODE(CANCELLED), "cancelled while it ran at %s", job->worker_name);
    else if (err->code == RV_CODE(CANCELLED))
        err->code = RV_CODE(JOB_FAILED); /* nobody asked for it */
}

static void finish(struct rv_worker_entry *worker, struct rv_job_record *job, struct rv_frame *frame)
{
    const Rv__JobResult *result = frame->message->job_result;
    struct rv_error err = {0};

    (void)rv_error_from_message(&err, result->error);
    judge(job, &err);
    if (err.code == 0 || result->n_outputs > 0) { /* a failed job keeps what it made until then */
        struct rv_error problem = {0};
        int r = rv_results_take(worker->router, job, frame, &problem);

        if (r == -EPROTO)
            rv_workers_kill(worker, "it sent a result that breaks the contract");
        if (r < 0 && err.code == 0)
            err = problem;
    }
    job->run_us = result->run_us;
    job->load_us = result->load_us;
    job->read_bytes = result->read_bytes;
    if (job->model[0] == '\0')
        (void)rv_escape(job->model, sizeof(job->model), result->model, strlen(result->model));
    job->ended_us = rv_now_us();
    rv_results_keep(worker->router, job, worker); /* first: telling the waiters may already let it go */
    rv_jobs_end(worker->router, job, &err);
}

/* A worker that leaves says so instead of starting the job: its news and our JobStart passed each other. */
static bool was_refused(const struct rv_job_record *job, const Rv__JobResult *result)
{
    return job->submit && result->error && result->error->code == RV_CODE(SHUTTING_DOWN) && !job->cancelled &&
           !job->overdue;
}

static void take_elsewhere(struct rv_worker_entry *worker)
{
    struct rv_job_record *job = worker->job;

    worker->draining = true;
    job->attempts--;
    put_back(worker);
    rv_workers_send_ack(worker, job->id);
}

static void on_result(struct rv_worker_entry *worker, struct rv_frame *frame)
{
    const Rv__JobResult *result = frame->message->job_result;
    struct rv_job_record *job = worker->job;
    struct rv_error err;

    if (rv_submit_check_id(result->job_id, &err) < 0) {
        rv_peer_drop(worker->peer, "it sent the result of a malformed job id");
        return;
    }
    if (job && strcmp(job->id, result->job_id) == 0) {
        if (was_refused(job, result))
            take_elsewhere(worker);
        else
            finish(worker, job, frame);
    } else {
        job = worker->state == RV_WORKER_REPORTING || worker->results_due
                  ? rv_ledger_adopt(worker->router, worker, result->job_id, result->content_digest)
                  : NULL;
        if (strcmp(worker->foreign_job, result->job_id) == 0)
            worker->foreign_job[0] = '\0';
        else if (worker->results_due)
            worker->results_due--;
        if (job)
            finish(worker, job, frame);
        else
            rv_workers_send_ack(worker, result->job_id); /* nobody wants it any more */
    }
    if (worker->state == RV_WORKER_REPORTING && worker->results_due == 0)
        become_ready(worker);
    else
        rv_workers_dispatch(worker->router, worker->type);
}

static const struct {
    Rv__Frame__BodyCase body;
    unsigned states;
    void (*handle)(struct rv_worker_entry *worker, struct rv_frame *frame);
} frames[] = {
    {RV__FRAME__BODY_WORKER_REPORT, SILENT, on_report},
    {RV__FRAME__BODY_JOB_PROGRESS, REPORTING | READY | CUT_OFF, on_progress},
    {RV__FRAME__BODY_JOB_RESULT, REPORTING | READY | CUT_OFF, on_result},
};

static void on_frame(struct rv_peer *peer, struct rv_frame *frame, void *context)
{
    struct rv_worker_entry *worker = context;

    for (unsigned i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
        if (frames[i].body == frame->message->body_case && frames[i].states & 1u << worker->state) {
            frames[i].handle(worker, frame);
            return;
        }
    }
    rv_peer_drop(peer, "it sent a frame that a worker may not send now");
}

/* ---- the end of a worker ---------------------------------------------------------------------------------------- */

/*
 * What it sent before it died still counts. The peer reads no more once a send to it has failed, and a reset comes
 * before the data, so the socket is read here to its end.
 */
static void read_what_is_left(struct rv_worker_entry *worker)
{
    struct rv_frame frame = RV_FRAME_INIT;
    unsigned resets = 0;

    rv_peer_drain(worker->peer);
    for (unsigned i = 0; i < LAST_FRAMES_MAX; i++) {
        int r = rv_frame_receive_limited(rv_peer_socket(worker->peer), 0, &frame, NULL);

        if (r == 1) {
            on_frame(worker->peer, &frame, worker);
            rv_frame_fini(&frame);
        } else if (r == 0 || r == -EAGAIN || resets++ > 0) {
            return;
        }
    }
}

static void on_cut_off(int socket, short what, void *context)
{
    (void)socket;
    (void)what;
    rv_workers_kill(context, "its channel to the router broke and it did not end");
}

static void on_close(struct rv_peer *peer, const char *why, void *context)
{
    static const struct timeval wait = {CUT_OFF_US / RV_SEC, 0};
    struct rv_worker_entry *worker = context;

    (void)peer;
    if (strcmp(why, "it closed") != 0)
        rv_log_warning("the channel of worker %s ended: %s", worker->name, why);
    worker->draining = true; /* it gets nothing more, whatever its last frames say */
    if (worker->state != RV_WORKER_SILENT)
        worker->state = RV_WORKER_CUT_OFF;
    read_what_is_left(worker);
    worker->state = RV_WORKER_CUT_OFF;
    worker->peer = NULL;
    worker->timer = event_new(worker->router->base, -1, 0, on_cut_off, worker);
    if (worker->timer)
        (void)event_add(worker->timer, &wait);
}

/* What becomes of the job whose worker died. */
static void decide(struct rv_router *router, struct rv_job_record *job, const char *worker, int code, const char *cause,
                   const char *next)
{
    struct rv_error err = {0};

    if (job->cancelled)
        (void)rv_error_set(&err, ECANCELED, RV_CODE(CANCELLED), "cancelled; %s had to be ended for it", worker);
    else if (job->overdue)
        (void)rv_error_set(&err, ETIMEDOUT, RV_CODE(DEADLINE),
                           "the job ran longer than the %llu ms that %s allows, and %s had to be ended",
                           (unsigned long long)(job->type->job_timeout_us / RV_MSEC), job->type_name, worker);
    else if (code)
        (void)rv_error_set(&err, EIO, code, "worker %s was ended while it ran this job: %s; the worker %s", worker,
                           cause, next);
    else if (job->retry && job->attempts >= ATTEMPTS_MAX)
        (void)rv_error_set(&err, EIO, RV_CODE(QUARANTINED),
                           "its worker died in %u of %u attempts; the last was %s: %s; the worker %s", job->attempts,
                           job->attempts, worker, cause, next);
    else
        (void)rv_error_set(&err, EIO, RV_CODE(WORKER_DIED), "worker %s died while it ran this job: %s; the worker %s",
                           worker, cause, next);
    rv_jobs_end(router, job, &err);
}

/* code: see WorkerGone. A device that is lost takes its jobs with it: another worker would have to do without it too.
 */
static void bury(struct rv_worker_entry *worker, int code, const char *cause, const char *next)
{
    struct rv_router *router = worker->router;
    struct rv_type *type = worker->type;
    struct rv_job_record *job;
    char name[RV_WORKER_NAME_MAX + 1], cause_text[RV_ERROR_TEXT_MAX / 3], next_text[RV_ERROR_TEXT_MAX / 4];

    (void)snprintf(name, sizeof(name), "%s", worker->name);
    (void)rv_escape(cause_text, sizeof(cause_text), cause, strlen(cause));
    (void)rv_escape(next_text, sizeof(next_text), next, strlen(next));
    worker->draining = true; /* it gets nothing more, whatever its last frames say */
    if (worker->peer)
        read_what_is_left(worker);
    job = worker->job;
    if (job && worker->held && !job->cancelled && !job->overdue) { /* it never heard of the job */
        job->attempts--;
        put_back(worker);
    } else if (job && job->retry && job->submit && job->attempts < ATTEMPTS_MAX && !job->cancelled && !job->overdue &&
               code != RV_CODE(DEVICE_LOST)) {
        put_back(worker);
    } else if (job) {
        decide(router, job, name, code, cause_text, next_text[0] ? next_text : "is not started again");
    }
    rv_front_worker_gone(router, worker);
    free_worker(worker);
    rv_ledger_heard(router, name);
    rv_workers_dispatch(router, type);
}

void rv_workers_gone(struct rv_router *router, const Rv__WorkerGone *gone)
{
    struct rv_worker_entry *worker = find(router, gone->worker);

    if (worker && worker->incarnation == gone->incarnation)
        bury(worker, (int)gone->code, gone->cause, gone->next);
    else if (!worker)
        rv_ledger_heard(router, gone->worker);
}

void rv_workers_drain(struct rv_router *router, const Rv__WorkerDrain *drain)
{
    struct rv_worker_entry *worker = find(router, drain->worker);

    if (worker && worker->incarnation == drain->incarnation)
        worker->draining = true;
}

void rv_workers_channel(struct rv_router *router, struct rv_frame *frame)
{
    static const struct rv_peer_handlers handlers = {on_frame, on_close};
    const Rv__RouterChannel *channel = frame->message->router_channel;
    struct rv_worker_entry *worker = find(router, channel->worker);
    struct rv_type *type = rv_types_find(router, channel->type);
    int fd = rv_frame_take_fd(frame, 0);

    if (fd < 0 || !type || strlen(channel->worker) > RV_WORKER_NAME_MAX || channel->worker[0] == '\0' ||
        (worker && worker->incarnation == channel->incarnation)) {
        rv_log_error("the supervisor sent a channel that makes no sense: worker %.80s, type %.64s", channel->worker,
                     channel->type);
        if (fd >= 0)
            (void)close(fd);
        return;
    }
    if (worker)
        bury(worker, 0, "it was replaced", "was started again");
    worker = calloc(1, sizeof(*worker));
    if (!worker) {
        rv_log_error("no memory for the channel of worker %s", channel->worker);
        (void)close(fd);
        return;
    }
    worker->router = router;
    worker->type = type;
    worker->incarnation = channel->incarnation;
    worker->http_port = channel->http_port <= UINT16_MAX ? (uint16_t)channel->http_port : 0;
    (void)snprintf(worker->name, sizeof(worker->name), "%s", channel->worker);
    TAILQ_INSERT_TAIL(&router->workers, worker, link);
    worker->peer = rv_peer_create(router->base, fd, &handlers, worker);
    if (!worker->peer) {
        rv_log_error("no memory for the channel of worker %s", worker->name);
        rv_workers_kill(worker, "the router has no memory for its channel");
        worker->state = RV_WORKER_CUT_OFF;
        return;
    }
    rv_peer_limit_bodies(worker->peer, 0); /* outputs are descriptors, texts are short */
}
