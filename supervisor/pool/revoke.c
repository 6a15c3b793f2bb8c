/* A device's memory is gone, with everything that lay there: the catalogue forgets it, and who used it is told. */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "devices.h"
#include "log.h"
#include "pool_private.h"
#include "supervisor.h"

#define TELL_US (20 * RV_MSEC) /* between two looks whether a client has read what it was told */

static void tell(struct rv_session *session, struct rv_lease *lease)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LeaseRevoke revoke = RV__LEASE_REVOKE__INIT;

    lease->told = true;
    revoke.lease_id = lease->id;
    revoke.reason = session->supervisor->pool->revoke_reasons[lease->device];
    frame.body_case = RV__FRAME__BODY_LEASE_REVOKE;
    frame.lease_revoke = &revoke;
    rv_session_send(session, &frame, NULL, 0);
}

/* More than fits into a socket waits: who has many leases, and reads, must not be cut off for that. */
static void tell_clients(struct rv_supervisor *s)
{
    struct timeval tv = rv_timeval(TELL_US);
    struct rv_session *session;
    struct rv_lease *lease;
    bool more = false;

    TAILQ_FOREACH (session, rv_control_sessions(s), link) {
        TAILQ_FOREACH (lease, &session->leases, link) {
            if (session->child || lease->generation || lease->told)
                continue;
            if (rv_peer_is_idle(session->peer))
                tell(session, lease);
            else
                more = true;
        }
    }
    if (more)
        (void)event_add(s->pool->tell_timer, &tv);
}

void rv_pool_on_tell_timer(int fd, short what, void *context)
{
    (void)fd;
    (void)what;
    tell_clients(context);
}

/* Leases stay with their sessions until those detach: what they point to does not. */
static uint32_t take_leases(struct rv_supervisor *s, int device, const struct rv_error *err)
{
    uint64_t now = rv_now_us();
    struct rv_session *session;
    struct rv_lease *lease;
    uint32_t taken = 0;

    TAILQ_FOREACH (session, rv_control_sessions(s), link) {
        TAILQ_FOREACH (lease, &session->leases, link) {
            if (!lease->generation || lease->generation->model->device != device)
                continue;
            lease->generation->lease_count--;
            lease->generation = NULL;
            lease->revoked_us = now;
            taken++;
        }
    }
    (void)snprintf(s->pool->revoke_reasons[device], sizeof(s->pool->revoke_reasons[device]), "%s", err->message);
    tell_clients(s); /* workers are ended by rv_workers_device_lost */
    return taken;
}

bool rv_pool_device_is_held(struct rv_supervisor *s, int device)
{
    const struct rv_session *session;
    const struct rv_lease *lease;

    TAILQ_FOREACH (session, rv_control_sessions(s), link)
        TAILQ_FOREACH (lease, &session->leases, link)
            if (!session->child && !lease->generation && lease->device == device)
                return true;
    return false;
}

static void wait_for_clients(struct rv_supervisor *s, uint64_t delay_us)
{
    struct timeval tv = rv_timeval(delay_us);

    if (!event_pending(s->pool->revoke_timer, EV_TIMEOUT, NULL))
        (void)event_add(s->pool->revoke_timer, &tv);
}

void rv_pool_on_revoke_timer(int fd, short what, void *context)
{
    struct rv_supervisor *s = context;
    uint64_t now = rv_now_us(), timeout = s->config->revoke_timeout_us, next = UINT64_MAX;
    struct rv_session *session;
    const struct rv_lease *lease;

    (void)fd;
    (void)what;
    TAILQ_FOREACH (session, rv_control_sessions(s), link) {
        TAILQ_FOREACH (lease, &session->leases, link) {
            if (session->child || lease->generation)
                continue;
            if (now - lease->revoked_us >= timeout)
                rv_peer_drop(session->peer, "it kept a device's memory for longer than cuda.revoke_timeout");
            else if (lease->revoked_us + timeout - now < next)
                next = lease->revoked_us + timeout - now;
        }
    }
    if (next != UINT64_MAX)
        wait_for_clients(s, next);
}

void rv_pool_device_gone(struct rv_supervisor *s, int device, const struct rv_error *err)
{
    uint32_t leases = take_leases(s, device, err), count = 0;
    struct rv_generation *generation;
    struct rv_model *model;
    uint64_t bytes = 0;

    TAILQ_FOREACH (model, &s->state.models, link) {
        bool touched = model->load != NULL;

        if (model->device != device)
            continue;
        if (rv_model_current(model))
            model->failed_identity = rv_model_current(model)->identity;
        rv_load_cancel(s, model, err);
        while ((generation = TAILQ_FIRST(&model->generations))) {
            touched = true;
            bytes += generation->bytes;
            rv_generation_free(s, generation);
        }
        if (!touched)
            continue;
        count++;
        model->failure = *err;
        model->retry_at_us = rv_now_us(); /* whether the device can be used is for rv_devices_find to say */
    }
    if (count)
        rv_log(s->stopping ? RV_LOG_INFO : RV_LOG_WARNING, "%s: %u model%s gone, %.1f MiB, %u lease%s taken away: %s",
               rv_place_name(&s->state, device), count, count == 1 ? " is" : "s are", (double)bytes / (1 << 20), leases,
               leases == 1 ? "" : "s", err->message);
    if (leases)
        wait_for_clients(s, s->config->revoke_timeout_us);
}
