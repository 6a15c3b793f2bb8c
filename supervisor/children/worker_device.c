/* Workers and the devices that they use: they end when a device or what lay there is gone, and come back with it. */
#include <stdio.h>

#include "log.h"
#include "pool/devices.h"
#include "supervisor.h"
#include "worker_private.h"

static int device_of(const struct rv_worker *w)
{
    return rv_devices_by_name(w->supervisor, rv_devices_of_type(w->type));
}

bool rv_worker_device_is_lost(const struct rv_worker *w)
{
    int device = device_of(w);

    return device >= 0 && w->supervisor->state.devices[device].state == RV_DEVICE_LOST;
}

void rv_worker_say_no_device(struct rv_worker *w)
{
    const struct rv_device_record *d = &w->supervisor->state.devices[device_of(w)];

    (void)snprintf(w->record->last_exit, sizeof(w->record->last_exit), "not started: %s is lost: %.500s", d->name,
                   d->reason);
    rv_log_warning("worker %s %s", w->record->id, w->record->last_exit);
}

static bool has_lease_on(const struct rv_worker *w, int device)
{
    const struct rv_lease *lease;

    TAILQ_FOREACH (lease, &w->supervisor->state.leases, all_link)
        if (lease->incarnation == w->child.process->incarnation && lease->generation &&
            lease->generation->model->device == device)
            return true;
    return false;
}

static void end_users(struct rv_supervisor *s, int device, bool also_by_type, const struct rv_error *err)
{
    for (uint32_t i = 0; s->children && i < s->children->worker_count; i++) {
        struct rv_worker *w = &s->children->workers[i];

        if (w->child.process->pid <= 0 || (!has_lease_on(w, device) && !(also_by_type && device_of(w) == device)))
            continue;
        w->lost_code = err->code;
        rv_child_kill(&w->child, err->message);
    }
}

void rv_workers_device_lost(struct rv_supervisor *s, int device, const struct rv_error *err)
{
    end_users(s, device, true, err);
}

void rv_workers_memory_lost(struct rv_supervisor *s, int device, const struct rv_error *err)
{
    end_users(s, device, false, err);
}

void rv_workers_device_back(struct rv_supervisor *s, int device)
{
    for (uint32_t i = 0; s->children && i < s->children->worker_count; i++) {
        struct rv_worker *w = &s->children->workers[i];

        if (w->record->state != RV_WORKER_FAILED || !w->no_device || device_of(w) != device)
            continue;
        rv_log_info("worker %s starts again: %s is back", w->record->id, s->state.devices[device].name);
        rv_worker_start_again(w);
    }
}
