/* Start and end, what others tell the front door, and which worker is asked. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "front.h"
#include "log.h"

static struct rv_type *find_primary(struct rv_router *router)
{
    struct rv_type *first = NULL;

    for (unsigned i = 0; i < router->type_count; i++) {
        if (!router->types[i].is_comfyui)
            continue;
        if (router->types[i].is_primary)
            return &router->types[i];
        if (!first)
            first = &router->types[i];
    }
    return first;
}

static int open_parts(struct rv_front *front, struct rv_error *err)
{
    static int (*const parts[])(struct rv_front *) = {
        rv_front_upstream_init, rv_front_merges_init, rv_front_owners_init, rv_front_prompts_init, rv_front_ws_init,
    };

    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int r = parts[i](front);

        if (r < 0)
            return rv_error_set(err, -r, RV_CODE(INTERNAL), "cannot set up ComfyUI's address: %s", strerror(-r));
    }
    return 0;
}

int rv_front_open(struct rv_router *router, struct rv_error *err)
{
    struct rv_type *primary = find_primary(router);
    struct rv_front *front;

    if (!router->http || !primary)
        return 0;
    front = calloc(1, sizeof(*front));
    if (!front)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for ComfyUI's address");
    front->router = router;
    front->primary = primary;
    router->front = front;
    return open_parts(front, err);
}

void rv_front_stop(struct rv_router *router)
{
    if (!router->front)
        return;
    rv_front_ws_stop(router->front);
    rv_front_upstream_stop(router->front);
}

void rv_front_close(struct rv_router *router)
{
    struct rv_front *front = router->front;

    if (!front)
        return;
    rv_front_ws_fini(front);
    rv_front_prompts_fini(front);
    rv_front_owners_fini(front);
    rv_front_merges_fini(front);
    rv_front_upstream_fini(front);
    free(front);
    router->front = NULL;
}

/* ---- what others tell ------------------------------------------------------------------------------------------- */

void rv_front_worker_ready(struct rv_router *router, struct rv_worker_entry *worker)
{
    if (!router->front || !rv_front_worker_port(worker))
        return;
    rv_front_merges_worker_changed(router->front, worker);
    rv_front_ws_worker_ready(router->front, worker);
}

void rv_front_worker_gone(struct rv_router *router, struct rv_worker_entry *worker)
{
    if (!router->front || !rv_front_worker_port(worker))
        return;
    rv_front_upstream_worker_gone(router->front, worker);
    rv_front_merges_worker_changed(router->front, worker);
    rv_front_ws_worker_gone(router->front, worker);
}

void rv_front_job_ending(struct rv_router *router, struct rv_job_record *job)
{
    if (!router->front)
        return;
    rv_front_prompts_job_ending(router->front, job);
    rv_front_ws_job_ending(router->front, job);
}

void rv_front_job_ended(struct rv_router *router, struct rv_job_record *job)
{
    if (router->front)
        rv_front_owners_job_ended(router->front, job);
}

void rv_front_job_removed(struct rv_router *router, struct rv_job_record *job)
{
    if (job->prompt)
        rv_front_prompts_job_removed(router->front, job);
}

void rv_front_queue_changed(struct rv_router *router)
{
    if (router->front)
        rv_front_ws_queue_changed(router->front);
}

/* ---- workers ---------------------------------------------------------------------------------------------------- */

uint16_t rv_front_worker_port(const struct rv_worker_entry *worker)
{
    return worker->type && worker->type->is_comfyui ? worker->http_port : 0;
}

bool rv_front_worker_is_ready(const struct rv_worker_entry *worker)
{
    return worker->state == RV_WORKER_READY && !worker->draining && rv_front_worker_port(worker) != 0;
}

/* Workers are numbered: TYPE/0 is the first. */
static bool is_first(const struct rv_worker_entry *worker)
{
    const char *slash = strrchr(worker->name, '/');

    return slash && strcmp(slash, "/0") == 0;
}

struct rv_worker_entry *rv_front_primary(const struct rv_front *front)
{
    struct rv_worker_entry *worker = NULL;

    while ((worker = rv_front_next(front, worker)))
        if (worker->type == front->primary && is_first(worker))
            return worker;
    return NULL;
}

struct rv_worker_entry *rv_front_any(const struct rv_front *front, const struct rv_type *type)
{
    struct rv_worker_entry *worker = rv_front_primary(front);

    if (worker && (!type || worker->type == type))
        return worker;
    worker = NULL;
    while ((worker = rv_front_next(front, worker)))
        if (!type || worker->type == type)
            return worker;
    return NULL;
}

struct rv_worker_entry *rv_front_next(const struct rv_front *front, const struct rv_worker_entry *worker)
{
    struct rv_worker_entry *next = worker ? TAILQ_NEXT(worker, link) : TAILQ_FIRST(&front->router->workers);

    while (next && !rv_front_worker_is_ready(next))
        next = TAILQ_NEXT(next, link);
    return next;
}

struct rv_worker_entry *rv_front_find(const struct rv_front *front, const char *name, uint64_t incarnation)
{
    struct rv_worker_entry *worker;

    TAILQ_FOREACH (worker, &front->router->workers, link)
        if (worker->incarnation == incarnation && strcmp(worker->name, name) == 0)
            return rv_front_worker_is_ready(worker) ? worker : NULL;
    return NULL;
}
