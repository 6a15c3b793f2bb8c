#include <assert.h>
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "front/front.h"
#include "graph_route.h"
#include "log.h"
#include "router.h"

#define JOBS_LIMIT_MIN 16u      /* a table without room for one job would refuse everything */
#define JOBS_LIMIT_MAX 1048576u /* records are about 1 KiB */

struct rv_type *rv_types_find(struct rv_router *router, const char *name)
{
    for (unsigned i = 0; i < router->type_count; i++)
        if (strcmp(router->types[i].name, name) == 0)
            return &router->types[i];
    return NULL;
}

static int add_type(struct rv_router *router, const Rv__TypeSetup *setup)
{
    struct rv_type *type = &router->types[router->type_count];

    if (router->type_count == RV_TYPES_MAX || strlen(setup->name) > RV_NAME_MAX || setup->name[0] == '\0' ||
        rv_types_find(router, setup->name))
        return -EINVAL;
    (void)snprintf(type->name, sizeof(type->name), "%s", setup->name);
    type->queue_limit = setup->queue_limit;
    type->job_timeout_us = setup->job_timeout_ms * RV_MSEC;
    type->cancel_timeout_us = setup->cancel_timeout_ms * RV_MSEC;
    if (setup->n_models > 0 && strlen(setup->models[0]) <= RV_NAME_MAX)
        (void)snprintf(type->first_model, sizeof(type->first_model), "%s", setup->models[0]);
    type->failed = strcmp(setup->state, "FAILED") == 0;
    type->is_comfyui = strcmp(setup->kind, "comfyui") == 0;
    type->is_primary = setup->primary;
    for (size_t i = 0; i < setup->n_accepts; i++)
        type->accepts |= rv_route_accepts(setup->accepts[i]);
    type->files = (const char *const *)setup->model_files;
    type->file_count = (uint32_t)setup->n_model_files;
    TAILQ_INIT(&type->queue);
    router->type_count++;
    return 0;
}

int rv_jobs_init(struct rv_router *router)
{
    const Rv__RouterSetup *setup = router->setup;
    uint32_t wanted;

    TAILQ_INIT(&router->all);
    TAILQ_INIT(&router->ended);
    for (size_t i = 0; i < setup->n_types; i++) {
        int r = add_type(router, setup->types[i]);

        if (r < 0)
            return r;
    }
    router->jobs_limit = setup->jobs_limit < JOBS_LIMIT_MIN   ? JOBS_LIMIT_MIN
                         : setup->jobs_limit > JOBS_LIMIT_MAX ? JOBS_LIMIT_MAX
                                                              : setup->jobs_limit;
    wanted = router->jobs_limit + RV_JOB_LEDGER_MAX;
    for (router->bucket_count = 1024; router->bucket_count < wanted;)
        router->bucket_count *= 2;
    router->buckets = calloc(router->bucket_count, sizeof(struct rv_job_record *));
    if (!router->buckets)
        return -ENOMEM;
    /* Ids are chosen by clients: without a secret seed they could choose a thousand of one bucket. */
    if (getrandom(&router->hash_seed, sizeof(router->hash_seed), 0) != (ssize_t)sizeof(router->hash_seed))
        return -EIO;
    return 0;
}

void rv_jobs_fini(struct rv_router *router)
{
    struct rv_job_record *job;

    while ((job = TAILQ_FIRST(&router->all)))
        rv_jobs_remove(router, job);
    free(router->buckets);
    router->buckets = NULL;
}

static struct rv_job_record **bucket_of(struct rv_router *router, const char *id)
{
    return &router->buckets[XXH3_64bits_withSeed(id, strlen(id), router->hash_seed) & (router->bucket_count - 1)];
}

struct rv_job_record *rv_jobs_find(struct rv_router *router, const char *id)
{
    struct rv_job_record *job = *bucket_of(router, id);

    while (job && strcmp(job->id, id) != 0)
        job = job->hash_next;
    return job;
}

bool rv_jobs_has_ended(const struct rv_job_record *job)
{
    return job->state == RESVISOR__V1__JOB_STATE__JOB_DONE || job->state == RESVISOR__V1__JOB_STATE__JOB_FAILED ||
           job->state == RESVISOR__V1__JOB_STATE__JOB_CANCELLED;
}

struct rv_job_record *rv_jobs_add(struct rv_router *router, const char *id, const char *type, struct rv_error *err)
{
    struct rv_job_record *job, **bucket = bucket_of(router, id);

    while (router->job_count >= router->jobs_limit && !TAILQ_EMPTY(&router->ended))
        rv_jobs_remove(router, TAILQ_FIRST(&router->ended));
    if (router->job_count >= router->jobs_limit + (router->settling ? RV_JOB_LEDGER_MAX : 0)) {
        (void)rv_error_set(err, EBUSY, RV_CODE(LIMIT), "%u jobs are unfinished, as many as rpc.jobs allows",
                           router->job_count);
        return NULL;
    }
    job = calloc(1, sizeof(*job));
    if (!job) {
        (void)rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a job record");
        return NULL;
    }
    (void)snprintf(job->id, sizeof(job->id), "%s", id);
    (void)snprintf(job->type_name, sizeof(job->type_name), "%s", type);
    job->type = rv_types_find(router, type);
    TAILQ_INIT(&job->waiters);
    job->hash_next = *bucket;
    *bucket = job;
    TAILQ_INSERT_TAIL(&router->all, job, all_link);
    router->job_count++;
    return job;
}

static void free_submit(struct rv_router *router, struct rv_job_record *job)
{
    router->submit_bytes -= job->submit_length;
    free(job->submit);
    job->submit = NULL;
    job->submit_length = 0;
}

static void free_timer(struct rv_job_record *job)
{
    if (job->timer)
        event_free(job->timer);
    job->timer = NULL;
}

void rv_jobs_remove(struct rv_router *router, struct rv_job_record *job)
{
    struct rv_job_record **link = bucket_of(router, job->id);

    assert(TAILQ_EMPTY(&job->waiters));
    while (*link != job)
        link = &(*link)->hash_next;
    *link = job->hash_next;
    TAILQ_REMOVE(&router->all, job, all_link);
    router->job_count--;
    if (rv_jobs_has_ended(job))
        TAILQ_REMOVE(&router->ended, job, ended_link);
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED)
        rv_jobs_dequeue(job);
    rv_front_job_removed(router, job);
    rv_results_drop(router, job);
    free(job->outputs);
    free_submit(router, job);
    free_timer(job);
    free(job->error_message);
    free(job->error_remedy);
    free(job);
}

static void insert(struct rv_job_record *job, bool first)
{
    struct rv_job_record *other;

    if (first) { /* before all that are not more important */
        TAILQ_FOREACH (other, &job->type->queue, queue_link) {
            if (other->priority <= job->priority) {
                TAILQ_INSERT_BEFORE(other, job, queue_link);
                return;
            }
        }
        TAILQ_INSERT_TAIL(&job->type->queue, job, queue_link);
        return;
    }
    /* From the end: jobs of one priority, the usual case, cost one step. */
    TAILQ_FOREACH_REVERSE(other, &job->type->queue, rv_job_list, queue_link)
    {
        if (other->priority > job->priority || (other->priority == job->priority && other->number <= job->number)) {
            TAILQ_INSERT_AFTER(&job->type->queue, other, job, queue_link);
            return;
        }
    }
    TAILQ_INSERT_HEAD(&job->type->queue, job, queue_link);
}

void rv_jobs_enqueue(struct rv_router *router, struct rv_job_record *job, bool first)
{
    job->state = RESVISOR__V1__JOB_STATE__JOB_QUEUED;
    job->queued_us = rv_now_us();
    job->type->queued++;
    insert(job, first);
    rv_front_queue_changed(router);
}

void rv_jobs_dequeue(struct rv_job_record *job)
{
    TAILQ_REMOVE(&job->type->queue, job, queue_link);
    job->type->queued--;
    job->wait_us += rv_now_us() - job->queued_us;
    job->state = RESVISOR__V1__JOB_STATE__JOB_UNKNOWN;
}

void rv_jobs_mark(struct rv_router *router, struct rv_job_record *job, bool ended)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobMark mark = RV__JOB_MARK__INIT;
    Rv__MarkedJob marked = RV__MARKED_JOB__INIT;

    marked.job_id = job->id;
    marked.type = job->type_name;
    marked.ended = ended;
    if (job->has_digest)
        marked.content_digest = (ProtobufCBinaryData){RV_DIGEST_SIZE, job->digest};
    marked.attempts = job->attempts;
    marked.outcome = (Resvisor__V1__ErrorCode)job->error_code;
    mark.job = &marked;
    mark.worker = job->worker_name;
    frame.body_case = RV__FRAME__BODY_JOB_MARK;
    frame.job_mark = &mark;
    job->marked_ended = ended;
    (void)rv_peer_send(router->supervisor, &frame, NULL, 0, RV_SEND_REPLY); /* failure ends the connection, and us */
}

static void set_error(struct rv_job_record *job, const struct rv_error *err)
{
    free(job->error_message);
    free(job->error_remedy);
    job->error_message = NULL;
    job->error_remedy = NULL;
    job->error_code = err ? err->code : 0;
    if (job->error_code) { /* without memory the table's words must do */
        job->error_message = strdup(err->message);
        job->error_remedy = strdup(err->remedy);
    }
}

void rv_jobs_end(struct rv_router *router, struct rv_job_record *job, const struct rv_error *err)
{
    int code = err ? err->code : 0;

    assert(!rv_jobs_has_ended(job));
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED)
        rv_jobs_dequeue(job);
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_RUNNING && job->worker) {
        job->worker->job = NULL;
        job->worker->held = false;
        job->type->running--;
    }
    job->worker = NULL;
    job->pending = false;
    job->ended_us = rv_now_us();
    free_timer(job);
    set_error(job, err);
    if (code == 0) /* the last report may have been thinned out */
        job->progress_done = job->progress_total;
    job->state = code == 0                    ? RESVISOR__V1__JOB_STATE__JOB_DONE
                 : code == RV_CODE(CANCELLED) ? RESVISOR__V1__JOB_STATE__JOB_CANCELLED
                                              : RESVISOR__V1__JOB_STATE__JOB_FAILED;
    if (job->type) {
        job->type->outcomes[(unsigned)code % RV_OUTCOMES_MAX]++;
        if (code == 0)
            ++*(job->read_bytes ? &job->type->cold_runs : &job->type->warm_runs);
    }
    if (job->run_us == 0 && job->started_us)
        job->run_us = job->ended_us - job->started_us;
    rv_front_job_ending(router, job);
    free_submit(router, job);
    TAILQ_INSERT_TAIL(&router->ended, job, ended_link);
    if (job->attempts > 0 && !job->marked_ended)
        rv_jobs_mark(router, job, true);
    rv_events_job(router, job);
    rv_parked_job_ended(router, job);
    rv_front_job_ended(router, job);
    rv_front_queue_changed(router);
}

static void on_timer(int socket, short what, void *context)
{
    struct rv_job_record *job = context;
    struct rv_worker_entry *worker = job->worker;
    struct rv_router *router = worker->router;

    (void)socket;
    (void)what;
    if (job->cancelled || job->overdue) { /* it was asked to stop, and did not */
        rv_workers_kill(worker, job->overdue ? "its job ran into its time limit and did not stop when asked"
                                             : "its job was cancelled and did not stop");
        return;
    }
    job->overdue = true;
    rv_workers_send_cancel(worker, job->id);
    rv_jobs_arm(router, job, job->type->cancel_timeout_us ? job->type->cancel_timeout_us : 1);
}

void rv_jobs_arm(struct rv_router *router, struct rv_job_record *job, uint64_t us)
{
    struct timeval tv = rv_timeval(us);

    if (!job->timer && us == 0)
        return;
    if (!job->timer)
        job->timer = event_new(router->base, -1, 0, on_timer, job);
    if (!job->timer) {
        rv_log_error("no memory for the timer of job %s: it runs without its time limit", job->id);
        return;
    }
    (void)event_del(job->timer);
    if (us > 0)
        (void)event_add(job->timer, &tv);
}

void rv_jobs_cancel(struct rv_router *router, struct rv_job_record *job)
{
    struct rv_error err = {0};

    if (rv_jobs_has_ended(job) || job->cancelled)
        return;
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED) {
        (void)rv_error_set(&err, ECANCELED, RV_CODE(CANCELLED), "cancelled while it waited in the queue of %s",
                           job->type_name);
        rv_jobs_end(router, job, &err);
        return;
    }
    job->cancelled = true;
    if (job->overdue) /* already asked to stop, the timer runs */
        return;
    rv_workers_send_cancel(job->worker, job->id);
    rv_jobs_arm(router, job, job->type->cancel_timeout_us ? job->type->cancel_timeout_us : 1);
}

void rv_jobs_end_queued(struct rv_router *router)
{
    struct rv_job_record *job;
    struct rv_error err = {0};

    (void)rv_error_set(&err, ESHUTDOWN, RV_CODE(SHUTTING_DOWN),
                       "resvisor was stopped while the job waited in its queue");
    for (unsigned i = 0; i < router->type_count; i++)
        while ((job = TAILQ_FIRST(&router->types[i].queue)))
            rv_jobs_end(router, job, &err);
}

void rv_jobs_view(const struct rv_job_record *job, struct rv_job_view *view)
{
    Resvisor__V1__Job *m = &view->job;

    resvisor__v1__job__init(m);
    m->job_id = (char *)job->id;
    m->type = (char *)job->type_name;
    m->model = (char *)job->model;
    m->state = job->state;
    m->priority = job->priority;
    m->progress_done = job->progress_done;
    m->progress_total = job->progress_total;
    m->progress_text = (char *)job->progress_text;
    m->worker = (char *)job->worker_name;
    m->attempts = job->attempts;
    m->wait_us = job->wait_us;
    m->run_us = job->run_us;
    m->load_us = job->load_us;
    m->read_bytes = job->read_bytes;
    m->submitted_ms = job->submitted_ms;
    if (job->error_code) {
        const struct rv_error_row *row = rv_error_row(job->error_code);

        resvisor__v1__error__init(&view->error);
        view->error.code = (Resvisor__V1__ErrorCode)job->error_code;
        view->error.message = job->error_message ? job->error_message : (char *)row->text;
        view->error.remedy = job->error_remedy ? job->error_remedy : (char *)row->remedy;
        m->error = &view->error;
    }
    for (uint32_t i = 0; i < job->output_count; i++) {
        resvisor__v1__output__init(&view->outputs[i]);
        view->outputs[i].name = job->outputs[i].name;
        view->outputs[i].content_type = job->outputs[i].content_type;
        view->outputs[i].size = job->outputs[i].size;
        view->output_list[i] = &view->outputs[i];
    }
    m->n_outputs = job->output_count;
    m->outputs = view->output_list;
}
