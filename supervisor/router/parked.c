/* Replies that wait: for the end of a job, or for an answer of the supervisor. */
#include <assert.h>
#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>

#include "clock.h"
#include "router.h"

#define PARKED_PER_PEER_MAX 64u /* one command line cannot take all places */

static void on_timeout(int socket, short what, void *context)
{
    struct rv_parked *parked = context;
    struct rv_job_record *job = parked->job;
    struct rv_router *router = parked->router;
    struct rv_asker asker;

    (void)socket;
    (void)what;
    rv_parked_release(parked, &asker);
    rv_rpc_reply_job(router, &asker, job);
}

/* nanomsg's REQ sends its request again every 60 s. The first one waits already, and its time must not start anew. */
static bool is_repeated(struct rv_job_record *job, const struct rv_asker *asker)
{
    struct rv_parked *other;

    if (asker->local)
        return false;
    TAILQ_FOREACH (other, &job->waiters, job_link)
        if (!other->asker.local && rv_nano_same(&other->asker, asker))
            return true;
    return false;
}

int rv_parked_add(struct rv_router *router, struct rv_asker *asker, struct rv_job_record *job, uint64_t timeout_ms,
                  uint64_t *ret_ask_id, struct rv_error *err)
{
    struct timeval tv = {(time_t)(timeout_ms / 1000), (suseconds_t)(timeout_ms % 1000 * 1000)};
    struct rv_parked *parked = NULL;

    if (job && is_repeated(job, asker)) {
        rv_asker_fini(asker);
        return 0;
    }
    if (router->parked_count >= RV_PARKED_MAX || (asker->peer && asker->peer->parked >= PARKED_PER_PEER_MAX))
        return rv_error_set(err, EBUSY, RV_CODE(LIMIT), "%u requests wait for their answer, as many as may",
                            asker->peer ? asker->peer->parked : router->parked_count);
    parked = calloc(1, sizeof(*parked));
    if (parked && job)
        parked->timer = event_new(router->base, -1, 0, on_timeout, parked);
    if (!parked || (job && !parked->timer)) {
        free(parked);
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a request that waits");
    }
    parked->router = router;
    parked->asker = *asker;
    *asker = (struct rv_asker){0};
    parked->job = job;
    parked->ask_id = ++router->next_ask;
    if (parked->asker.peer)
        parked->asker.peer->parked++;
    TAILQ_INSERT_TAIL(&router->parked, parked, link);
    router->parked_count++;
    if (job) {
        TAILQ_INSERT_TAIL(&job->waiters, parked, job_link);
        (void)event_add(parked->timer, &tv);
    }
    if (ret_ask_id)
        *ret_ask_id = parked->ask_id;
    return 0;
}

struct rv_parked *rv_parked_find(struct rv_router *router, uint64_t ask_id)
{
    struct rv_parked *parked;

    TAILQ_FOREACH (parked, &router->parked, link)
        if (!parked->job && parked->ask_id == ask_id)
            return parked;
    return NULL;
}

void rv_parked_free(struct rv_parked *parked)
{
    struct rv_router *router = parked->router;

    if (parked->job)
        TAILQ_REMOVE(&parked->job->waiters, parked, job_link);
    TAILQ_REMOVE(&router->parked, parked, link);
    router->parked_count--;
    if (parked->asker.peer)
        parked->asker.peer->parked--;
    rv_asker_fini(&parked->asker);
    if (parked->timer)
        event_free(parked->timer);
    free(parked);
}

void rv_parked_release(struct rv_parked *parked, struct rv_asker *ret_asker)
{
    *ret_asker = parked->asker;
    if (ret_asker->peer)
        ret_asker->peer->parked--;
    parked->asker = (struct rv_asker){0};
    rv_parked_free(parked);
}

void rv_parked_job_ended(struct rv_router *router, struct rv_job_record *job)
{
    struct rv_parked *parked;

    (void)router;
    while ((parked = TAILQ_FIRST(&job->waiters)))
        on_timeout(-1, 0, parked);
}

void rv_parked_peer_gone(struct rv_router *router, struct rv_local_peer *peer)
{
    struct rv_parked *parked, *next;

    for (parked = TAILQ_FIRST(&router->parked); parked; parked = next) {
        next = TAILQ_NEXT(parked, link);
        if (parked->asker.peer == peer)
            rv_parked_free(parked);
    }
}

void rv_parked_http_gone(struct rv_router *router, const struct rv_http_request *request)
{
    struct rv_parked *parked;

    TAILQ_FOREACH (parked, &router->parked, link) {
        if (parked->asker.http == request) {
            rv_parked_free(parked); /* one request waits for one thing */
            return;
        }
    }
}
