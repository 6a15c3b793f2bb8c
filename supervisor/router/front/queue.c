/* GET and POST /queue, POST /interrupt: the job table in ComfyUI's shape. */
#include <string.h>

#include "prompts.h"

enum { RUNNING, PENDING };

static bool write_item(struct rv_shape *shape, struct rv_job_record *job, unsigned section, bool first)
{
    struct rv_shape_prompt prompt;

    (void)section;
    if (rv_jobs_has_ended(job) || !rv_prompt_shape(job, &prompt))
        return false;
    if (!first)
        rv_shape_text(shape, ", ");
    rv_shape_queue_item(shape, &prompt);
    return true;
}

static int add_all(struct rv_listing *listing, const struct rv_router *router)
{
    const struct rv_worker_entry *worker;
    const struct rv_job_record *job;
    int r = 0;

    TAILQ_FOREACH (worker, &router->workers, link)
        if (r == 0 && worker->job && rv_prompt_is_one(worker->job))
            r = rv_listing_add(listing, worker->job, RUNNING);
    for (unsigned i = 0; i < router->type_count; i++)
        if (router->types[i].is_comfyui)
            TAILQ_FOREACH (job, &router->types[i].queue, queue_link)
                if (r == 0)
                    r = rv_listing_add(listing, job, PENDING);
    return r;
}

void rv_front_queue_get(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_listing *listing;

    if (!rv_prompt_is_settled(request))
        return;
    listing = rv_listing_create(router, write_item, "{\"queue_running\": [", "], \"queue_pending\": [", "]}");
    if (listing && add_all(listing, router) == 0) {
        rv_listing_answer(request, listing);
        return;
    }
    rv_listing_destroy(listing);
    rv_front_answer_error(request, 503, "no_memory", "", RV_FRONT_RETRY_MS, "no memory for the list");
}

/* ---- changes ----------------------------------------------------------------------------------------------------- */

static bool is_queued(const struct rv_job_record *job)
{
    return rv_prompt_is_one(job) && job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED;
}

/* Once through: an end may not put anything into the queue. */
static void clear(struct rv_router *router)
{
    struct rv_job_record *job, *next;

    for (unsigned i = 0; i < router->type_count; i++) {
        if (!router->types[i].is_comfyui)
            continue;
        for (job = TAILQ_FIRST(&router->types[i].queue); job; job = next) {
            next = TAILQ_NEXT(job, queue_link);
            rv_jobs_cancel(router, job);
        }
    }
}

/* The job that a text names; NULL = none. */
static struct rv_job_record *find_named(struct rv_router *router, const char *text, struct rv_span name)
{
    char id[RV_NAME_MAX + 1];

    return rv_scan_copy(text, name, id, sizeof(id)) == 0 ? rv_jobs_find(router, id) : NULL;
}

static void answer_empty(struct rv_http_request *request)
{
    rv_http_answer_text(request, 200, NULL, strdup(""), 0);
}

void rv_front_queue_post(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_span body, value, name;
    uint32_t at = 0;

    if (!rv_prompt_is_settled(request) || !rv_prompt_read_object(request, &body))
        return;
    if (rv_scan_find(request->body, body, "clear", &value) && rv_scan_is_true(request->body, value))
        clear(router);
    if (rv_scan_find(request->body, body, "delete", &value) && rv_scan_is(request->body, value, '[')) {
        while (rv_scan_next(request->body, value, &at, NULL, &name)) {
            struct rv_job_record *job = find_named(router, request->body, name);

            if (job && is_queued(job))
                rv_jobs_cancel(router, job);
        }
    }
    answer_empty(request);
}

/* ---- interrupt --------------------------------------------------------------------------------------------------- */

static void interrupt_all(struct rv_router *router)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &router->workers, link)
        if (worker->job && rv_prompt_is_one(worker->job))
            rv_jobs_cancel(router, worker->job);
}

/* A body that is no JSON means all, as ComfyUI takes it. */
void rv_front_interrupt(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_span body, id;
    size_t where;

    if (!rv_prompt_is_settled(request))
        return;
    if (request->body && rv_scan_check(request->body, request->body_length, &body, &where) == 0 &&
        rv_scan_find(request->body, body, "prompt_id", &id) && rv_scan_is_true(request->body, id)) {
        struct rv_job_record *job = find_named(router, request->body, id);

        if (job && rv_prompt_is_one(job) && job->state == RESVISOR__V1__JOB_STATE__JOB_RUNNING)
            rv_jobs_cancel(router, job);
    } else {
        interrupt_all(router);
    }
    answer_empty(request);
}
