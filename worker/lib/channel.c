/* The router's channel: jobs, cancels and acknowledgements come in. Everything here runs on the service thread. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "worker.h"

#define JOB_ID_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"
#define TURN 64u /* frames read before the control connection gets its turn */

struct rv_job *rv_worker_job(const struct rv_worker *w)
{
    return w->running ? w->running : w->pending;
}

/* Locked. Answers a job that is not run at all. */
static void refuse(struct rv_worker *w, struct rv_frame *frame, int code, const char *message)
{
    struct rv_job *job = rv_job_create(w, frame);
    struct rv_result *result = NULL;

    if (job && rv_result_create(job, code, message, &result) == 0)
        rv_results_add(w, result);
    rv_job_destroy(job);
}

static void on_start(struct rv_worker *w, struct rv_frame *frame)
{
    const Resvisor__V1__Submit *submit = frame->message->job_start->submit;
    struct rv_job *now = rv_worker_job(w);
    struct rv_result *kept;
    size_t length = submit ? strlen(submit->job_id) : 0;

    if (length == 0 || length > RV_NAME_MAX || strspn(submit->job_id, JOB_ID_LETTERS) != length)
        return;
    kept = rv_results_find(w, submit->job_id);
    if (kept) { /* it ran: say again how it ended */
        kept->sent = false;
        (void)rv_results_push(w);
    } else if (now && strcmp(now->submit->job_id, submit->job_id) == 0) {
        return; /* it runs */
    } else if (now) {
        refuse(w, frame, ERROR(LIMIT), "the worker is busy with another job");
    } else if (w->left) {
        refuse(w, frame, ERROR(SHUTTING_DOWN), "the worker is leaving");
    } else {
        w->pending = rv_job_create(w, frame);
        (void)pthread_cond_broadcast(&w->changed);
    }
}

static void on_cancel(struct rv_worker *w, struct rv_frame *frame)
{
    struct rv_job *now = rv_worker_job(w);

    if (now && strcmp(now->submit->job_id, frame->message->job_cancel->job_id) == 0)
        atomic_store_explicit(&now->cancelled, true, memory_order_relaxed);
}

static void on_ack(struct rv_worker *w, struct rv_frame *frame)
{
    rv_results_forget(w, frame->message->job_ack->job_id);
}

static const struct {
    Rv__Frame__BodyCase body;
    void (*handle)(struct rv_worker *w, struct rv_frame *frame);
} handlers[] = {
    {RV__FRAME__BODY_JOB_START, on_start},
    {RV__FRAME__BODY_JOB_CANCEL, on_cancel},
    {RV__FRAME__BODY_JOB_ACK, on_ack},
};

/* Locked. false = there is nothing more, now or ever. */
static bool read_one(struct rv_worker *w)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r = rv_frame_receive(w->router, &frame, NULL);

    if (r == -EAGAIN)
        return false;
    if (r != 1) { /* gone, or not a router: results stay, a new channel comes */
        (void)close(w->router);
        w->router = -1;
        (void)pthread_cond_broadcast(&w->changed);
        return false;
    }
    for (unsigned i = 0; i < sizeof(handlers) / sizeof(handlers[0]); i++) {
        if (handlers[i].body == frame.message->body_case) {
            handlers[i].handle(w, &frame); /* may take the message away */
            break;
        }
    }
    rv_frame_fini(&frame);
    return true;
}

void rv_channel_read(struct rv_worker *w)
{
    (void)pthread_mutex_lock(&w->lock);
    for (unsigned i = 0; i < TURN && w->router >= 0; i++)
        if (!read_one(w))
            break;
    (void)pthread_mutex_unlock(&w->lock);
}

static int send_report(struct rv_worker *w, int socket, const Rv__RouterChannel *message)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerReport report = RV__WORKER_REPORT__INIT;
    const struct rv_job *now = rv_worker_job(w);

    report.worker = message->worker;
    report.incarnation = message->incarnation;
    if (now) {
        report.running_job = now->submit->job_id;
        report.running_digest = now->start->content_digest;
    }
    report.unacknowledged = w->result_count;
    frame.body_case = RV__FRAME__BODY_WORKER_REPORT;
    frame.worker_report = &report;
    return rv_frame_send(socket, &frame, NULL, 0, 0);
}

void rv_channel_replace(struct rv_worker *w, int socket, const Rv__RouterChannel *message)
{
    (void)pthread_mutex_lock(&w->lock);
    /* A job that the old router started and nobody has read yet: it counts as running, else it would be lost. */
    for (unsigned i = 0; i < TURN && w->router >= 0; i++)
        if (!read_one(w))
            break;
    if (w->router >= 0)
        (void)close(w->router);
    w->router = -1;
    if (send_report(w, socket, message) < 0) {
        (void)close(socket);
    } else {
        for (struct rv_result *result = w->results; result; result = result->next)
            result->sent = false;
        w->router = socket;
        (void)rv_results_push(w);
    }
    (void)pthread_mutex_unlock(&w->lock);
}
