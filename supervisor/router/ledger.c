/*
 * After a restart: what earlier routers dispatched (RouterSetup.jobs), and what the workers say of it. Until every
 * worker has spoken, is gone, or 5 s have passed, nothing is answered; a retry would run a job twice.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "log.h"
#include "router.h"

static int add_job(struct rv_router *router, const Rv__MarkedJob *marked)
{
    struct rv_job_record *job;
    struct rv_error err = {0};

    if (rv_submit_check_id(marked->job_id, &err) < 0 || rv_jobs_find(router, marked->job_id))
        return 0; /* not ours to judge: the ledger is the supervisor's */
    job = rv_jobs_add(router, marked->job_id, marked->type, &err);
    if (!job)
        return err.code == RV_CODE(NO_MEMORY) ? -ENOMEM : 0;
    job->state = RESVISOR__V1__JOB_STATE__JOB_RUNNING;
    job->pending = true;
    job->marked_ended = marked->ended;
    job->marked_outcome = (int)marked->outcome;
    job->attempts = marked->attempts ? marked->attempts : 1;
    job->has_digest = marked->content_digest.len == RV_DIGEST_SIZE;
    if (job->has_digest)
        memcpy(job->digest, marked->content_digest.data, RV_DIGEST_SIZE);
    return 0;
}

/* How a job ended that no worker knows any more. */
static void recall(struct rv_router *router, struct rv_job_record *job)
{
    struct rv_error err = {0};

    job->recalled = true;
    if (!job->marked_ended) {
        (void)rv_error_set(
            &err, EIO, RV_CODE(JOB_LOST),
            "the job was given to a worker, and its outcome was lost when the router was restarted; it is "
            "not run again");
    } else if (job->marked_outcome) {
        (void)rv_error_set(&err, EIO, job->marked_outcome,
                           "the job ended so (%s); the details were lost when the router was restarted",
                           rv_error_row(job->marked_outcome)->name);
    } else {
        (void)snprintf(job->progress_text, sizeof(job->progress_text),
                       "done; its result was lost when the router was restarted");
    }
    rv_jobs_end(router, job, err.code ? &err : NULL);
}

/* Everybody has spoken: what is still open is lost. */
static void settle(struct rv_router *router)
{
    struct rv_job_record *job, *next;
    unsigned lost = 0;

    router->settling = false;
    (void)event_del(router->settle_timer);
    for (job = TAILQ_FIRST(&router->all); job; job = next) {
        next = TAILQ_NEXT(job, all_link);
        if (!job->pending)
            continue;
        lost += !job->marked_ended;
        recall(router, job);
    }
    if (lost)
        rv_log_warning("%u jobs of an earlier router are lost: no worker knows them", lost);
    if (router->open)
        rv_router_say_ready(router);
}

static void on_late(int socket, short what, void *context)
{
    struct rv_router *router = context;

    (void)socket;
    (void)what;
    rv_log_warning("not all workers reported within %llu s; going on without them", RV_SETTLE_US / RV_SEC);
    settle(router);
}

int rv_ledger_init(struct rv_router *router)
{
    static const struct timeval limit = {RV_SETTLE_US / RV_SEC, 0};
    const Rv__RouterSetup *setup = router->setup;

    router->settling = true;
    router->settle_timer = event_new(router->base, -1, 0, on_late, router);
    router->expected_done = calloc(setup->n_workers + 1, sizeof(bool));
    if (!router->settle_timer || !router->expected_done)
        return -ENOMEM;
    for (size_t i = 0; i < setup->n_jobs; i++)
        if (add_job(router, setup->jobs[i]) < 0)
            return -ENOMEM;
    if (setup->n_workers == 0)
        settle(router);
    else
        (void)event_add(router->settle_timer, &limit);
    return 0;
}

void rv_ledger_fini(struct rv_router *router)
{
    if (router->settle_timer)
        event_free(router->settle_timer);
    router->settle_timer = NULL;
    free(router->expected_done);
    router->expected_done = NULL;
}

void rv_ledger_heard(struct rv_router *router, const char *worker)
{
    bool all = true;

    if (!router->settling)
        return;
    for (size_t i = 0; i < router->setup->n_workers; i++) {
        if (strcmp(router->setup->workers[i], worker) == 0)
            router->expected_done[i] = true;
        all = all && router->expected_done[i];
    }
    if (all)
        settle(router);
}

/* A job known from the ledger only, of which nobody was told yet, can still turn out to be there. */
static bool take_back(struct rv_router *router, struct rv_job_record *job)
{
    if (!job->recalled || job->told || job->worker)
        return false;
    job->recalled = false;
    job->progress_text[0] = '\0';
    TAILQ_REMOVE(&router->ended, job, ended_link);
    job->state = RESVISOR__V1__JOB_STATE__JOB_RUNNING;
    job->error_code = 0;
    job->marked_ended = false;
    return true;
}

struct rv_job_record *rv_ledger_adopt(struct rv_router *router, struct rv_worker_entry *worker, const char *job_id,
                                      ProtobufCBinaryData digest)
{
    struct rv_job_record *job = rv_jobs_find(router, job_id);
    struct rv_error err = {0};

    if (digest.len != RV_DIGEST_SIZE) { /* we gave it one with the job: this is none of ours, and could not be marked */
        rv_log_warning("worker %s names job %s without its digest", worker->name, job_id);
        return NULL;
    }
    if (!job) {
        job = rv_jobs_add(router, job_id, worker->type->name, &err);
        if (!job) {
            rv_log_warning("job %s of worker %s has no place: %s", job_id, worker->name, err.message);
            return NULL;
        }
        job->attempts = 1;
        job->state = RESVISOR__V1__JOB_STATE__JOB_RUNNING;
    } else if (job->has_digest && memcmp(job->digest, digest.data, RV_DIGEST_SIZE) != 0) {
        return NULL;
    } else if (!job->pending && (!rv_jobs_has_ended(job) || !take_back(router, job))) {
        return NULL;
    }
    if (!job->has_digest) {
        memcpy(job->digest, digest.data, RV_DIGEST_SIZE);
        job->has_digest = true;
    }
    job->pending = false;
    job->started_us = rv_now_us();
    (void)snprintf(job->worker_name, sizeof(job->worker_name), "%s", worker->name);
    return job;
}
