/* Finished jobs: kept until the router acknowledges them, so that a router that died in between loses none. */
#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "clock.h"
#include "worker.h"

void rv_result_destroy(struct rv_result *result)
{
    if (!result)
        return;
    for (unsigned i = 0; i < result->fd_count; i++)
        (void)close(result->fds[i]);
    free(result->bytes);
    free(result);
}

/* Packs the message; the frame is small by construction: texts are bounded and outputs are descriptors. */
static int pack(const struct rv_job *job, int code, const char *message, struct rv_result *result)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobResult body = RV__JOB_RESULT__INIT;
    Resvisor__V1__Error error;
    Resvisor__V1__Output outputs[RV_OUTPUTS_MAX], *pointers[RV_OUTPUTS_MAX];
    struct rv_error failure = {0};
    int spill = -1, r;

    if (code)
        rv_error_set(&failure, EIO, code, "%s", message);
    rv_error_to_message(&failure, &error);
    body.job_id = job->submit->job_id;
    body.error = &error;
    body.run_us = rv_now_us() - job->arrived_us;
    body.load_us = job->load_us;
    body.read_bytes = job->read_bytes;
    body.content_digest = job->start->content_digest;
    body.type = job->submit->type;
    body.model = job->submit->model;
    body.outputs = pointers;
    for (unsigned i = 0; i < job->output_count; i++) {
        resvisor__v1__output__init(&outputs[i]);
        outputs[i].name = job->outputs[i]->name;
        outputs[i].content_type = job->outputs[i]->content_type;
        outputs[i].size = job->outputs[i]->size;
        pointers[body.n_outputs++] = &outputs[i];
    }
    frame.body_case = RV__FRAME__BODY_JOB_RESULT;
    frame.job_result = &body;
    r = rv_frame_pack(&frame, &result->bytes, &result->length, &spill);
    if (r == 0 && spill >= 0) {
        (void)close(spill);
        r = -EMSGSIZE;
    }
    return r;
}

int rv_result_create(const struct rv_job *job, int code, const char *message, struct rv_result **ret_result)
{
    struct rv_result *result = calloc(1, sizeof(*result));
    int r;

    if (!result)
        return -ENOMEM;
    (void)snprintf(result->job_id, sizeof(result->job_id), "%s", job->submit->job_id);
    r = pack(job, code, message, result);
    if (r < 0) {
        rv_result_destroy(result);
        return r;
    }
    for (unsigned i = 0; i < job->output_count; i++) {
        result->fds[result->fd_count++] = job->outputs[i]->fd;
        result->size += job->outputs[i]->size;
        job->outputs[i]->fd = -1;
    }
    *ret_result = result;
    return 0;
}

static void forget_oldest(struct rv_worker *w)
{
    struct rv_result *oldest = w->results;

    w->results = oldest->next;
    w->result_count--;
    w->result_bytes -= oldest->size;
    rv_result_destroy(oldest);
}

void rv_results_add(struct rv_worker *w, struct rv_result *result)
{
    struct rv_result **link = &w->results;

    while (w->results && (w->result_count >= RV_RESULTS_MAX || w->result_bytes + result->size > RV_RESULTS_BYTES_MAX)) {
        forget_oldest(w);
        w->results_dropped++;
    }
    while (*link)
        link = &(*link)->next;
    *link = result;
    w->result_count++;
    w->result_bytes += result->size;
    if (rv_results_push(w) < 0)
        rv_worker_wake(w);
}

struct rv_result *rv_results_find(const struct rv_worker *w, const char *job_id)
{
    struct rv_result *result = w->results;

    while (result && strcmp(result->job_id, job_id) != 0)
        result = result->next;
    return result;
}

void rv_results_forget(struct rv_worker *w, const char *job_id)
{
    struct rv_result **link = &w->results, *result;

    while (*link && strcmp((*link)->job_id, job_id) != 0)
        link = &(*link)->next;
    result = *link;
    if (!result)
        return;
    *link = result->next;
    w->result_count--;
    w->result_bytes -= result->size;
    rv_result_destroy(result);
}

void rv_results_fini(struct rv_worker *w)
{
    while (w->results)
        forget_oldest(w);
}

unsigned rv_results_unsent(const struct rv_worker *w)
{
    unsigned count = 0;

    for (const struct rv_result *result = w->results; result; result = result->next)
        count += !result->sent;
    return count;
}

/* Descriptors in flight count against a limit of the whole user: one frame of them at a time, as everywhere. */
static int send_one(const struct rv_worker *w, const struct rv_result *result)
{
    int unread = 0, r;

    if (result->fd_count && ioctl(w->router, SIOCOUTQ, &unread) == 0 && unread > 0)
        return -EBUSY;
    r = rv_frame_send_packed(w->router, result->bytes, result->length, result->fds, result->fd_count);
    return r == -ETOOMANYREFS || r == -ENOBUFS ? -EBUSY : r;
}

int rv_results_push(struct rv_worker *w)
{
    struct rv_result *result;

    if (w->router < 0)
        return 0;
    for (result = w->results; result; result = result->next) {
        int r;

        if (result->sent)
            continue;
        r = send_one(w, result);
        if (r == -EAGAIN || r == -EBUSY)
            return r;
        if (r < 0)
            return 0;
        result->sent = true;
        w->router_wait_ms = RV_ROUTER_WAIT_MS_FIRST; /* it reads: look again soon */
    }
    (void)pthread_cond_broadcast(&w->changed); /* rv_worker_close may wait for it */
    return 0;
}
