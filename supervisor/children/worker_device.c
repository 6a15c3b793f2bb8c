/* Workers and the devices that they use: they end when a device or what lay there is gone, and come back with it. */
#include <errno.h>
#include <string.h>

#include "log.h"
#include "pool/devices.h"
#include "supervisor.h"
#include "worker_private.h"

static int device_of(const struct rv_worker *w)
{
    return rv_devices_by_name(w->supervisor, rv_devices_of_type(w->type));
}

bool rv_worker_lacks_device(const struct rv_worker *w, struct rv_error *err)
{
    int device, user, r = rv_devices_find(w->supervisor, rv_devices_of_type(w->type), &device, &user, err);

    if (r == 0 || r == -EAGAIN)
        return false;
    /* ComfyUI may do without the pool, on a device that we cannot share or do not see: not on one that is gone. */
    return err->code == RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST || strcmp(w->type->kind, "comfyui") != 0;
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
