/* One Event per change of a job: published, and kept in a ring for subscribers that missed some. */
#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>

#include "clock.h"
#include "router.h"

#define PROGRESS_INTERVAL_US 100000u /* at most ten progress events per second and job */

static void on_progress_due(int socket, short what, void *context)
{
    struct rv_router *router = context;
    struct rv_worker_entry *worker;

    (void)socket;
    (void)what;
    TAILQ_FOREACH (worker, &router->workers, link)
        if (worker->job && worker->job->event_due)
            rv_events_job(router, worker->job);
}

int rv_events_init(struct rv_router *router)
{
    router->progress_timer = event_new(router->base, -1, 0, on_progress_due, router);
    return router->progress_timer ? 0 : -ENOMEM;
}

void rv_events_fini(struct rv_router *router)
{
    if (router->progress_timer)
        event_free(router->progress_timer);
    router->progress_timer = NULL;
    for (unsigned i = 0; i < RV_EVENTS_KEPT; i++) {
        free(router->events[i].bytes);
        router->events[i].bytes = NULL;
    }
}

uint64_t rv_events_oldest(const struct rv_router *router)
{
    return router->event_sequence < RV_EVENTS_KEPT ? 1 : router->event_sequence - RV_EVENTS_KEPT + 1;
}

void rv_events_job(struct rv_router *router, struct rv_job_record *job)
{
    Resvisor__V1__Event event = RESVISOR__V1__EVENT__INIT;
    struct rv_event_slot *slot;
    struct rv_job_view view;

    rv_jobs_view(job, &view);
    event.sequence = ++router->event_sequence;
    event.epoch = router->setup->epoch;
    event.job = &view.job;
    job->event_due = false;
    job->event_us = rv_now_us();
    slot = &router->events[event.sequence % RV_EVENTS_KEPT];
    free(slot->bytes);
    slot->length = (uint32_t)resvisor__v1__event__get_packed_size(&event);
    slot->bytes = malloc(slot->length);
    if (!slot->bytes) /* a gap, as every subscriber must expect */
        return;
    (void)resvisor__v1__event__pack(&event, slot->bytes);
    rv_nano_publish(router, slot->bytes, slot->length);
    rv_http_event(router);
}

void rv_events_progress(struct rv_router *router, struct rv_job_record *job)
{
    static const struct timeval interval = {0, PROGRESS_INTERVAL_US};

    if (rv_now_us() - job->event_us >= PROGRESS_INTERVAL_US) {
        rv_events_job(router, job);
        return;
    }
    job->event_due = true;
    if (!event_pending(router->progress_timer, EV_TIMEOUT, NULL))
        (void)event_add(router->progress_timer, &interval);
}
