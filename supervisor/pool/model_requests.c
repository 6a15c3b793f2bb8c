/* Load, unload, pin, unpin and show: what operators and gateways ask of one model, in one place or wherever it lies. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "devices.h"
#include "log.h"
#include "pool_private.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define ACTION(name) RESVISOR__V1__MODEL_ACTION__MODEL_##name

/* The entries of one model. */
struct entries {
    struct rv_model *model[RV_DEVICES_MAX + 1];
    unsigned count;
};

/* ---- load and pin ----------------------------------------------------------------------------------------------- */

/*
 * Loads in one place unless it is resident there. 1 = it is, 0 = the request waits, or was answered with a failure
 * already.
 */
static int load_at(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request, int device,
                   bool progress, struct rv_model **ret_model, struct rv_error *err)
{
    struct rv_supervisor *s = session->supervisor;
    struct rv_file_identity identity;
    struct rv_generation *current;
    struct rv_model *model;
    int fd, r = rv_catalog_find(s, request->model, device, &model, &fd, &identity, err);

    if (r < 0)
        return r;
    *ret_model = model;
    current = rv_model_current(model);
    if (request->action == ACTION(PIN))
        model->pinned = true;
    if (current && rv_identity_equal(&current->identity, &identity)) {
        if (fd >= 0)
            (void)close(fd);
        model->failure.code = 0;
        return 1;
    }
    model->retry_at_us = 0; /* an operator's wish is tried at once */
    return rv_load_join(s, model, fd, &identity,
                        &(struct rv_wait_options){
                            .session = session, .id = id, .kind = RV_WAIT_MODEL, .user = RV_HOST, .progress = progress},
                        err);
}

/* Answered when it is resident in all of these places. Pinned: stays so if that works. */
static int load(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request,
                const struct rv_places *places, struct rv_error *err)
{
    struct rv_model *model = NULL;
    bool waits = false;

    for (unsigned i = 0; i < places->count; i++) {
        int r = load_at(session, id, request, places->device[i], !waits, &model, err);

        if (r < 0) {
            rv_load_forget_request(session->supervisor, session, id);
            return r;
        }
        if (r == 0 && !model->load)
            return 0; /* its loader could not even be started: that was the answer */
        waits |= r == 0;
    }
    if (!waits)
        rv_status_send_model(session, id, model);
    return 0;
}

/* ---- unload ----------------------------------------------------------------------------------------------------- */

static int may_unload(struct rv_supervisor *s, const struct rv_model *model, struct rv_error *err)
{
    const struct rv_generation *current = rv_model_current(model);
    char holders[RV_ERROR_TEXT_MAX / 2], place[32];

    (void)rv_place_text(s, model->device, place);
    if (model->pinned)
        return rv_error_set(err, EBUSY, ERROR(MODEL_PINNED), "%s is pinned%s", model->name, place);
    if (current && current->lease_count) {
        rv_lease_holders(s, current, holders, sizeof(holders));
        return rv_error_set(err, EBUSY, ERROR(MODEL_IN_USE), "%s has %u lease%s%s: %s", model->name,
                            current->lease_count, current->lease_count == 1 ? "" : "s", place, holders);
    }
    return 0;
}

static void unload_one(struct rv_supervisor *s, struct rv_model *model)
{
    struct rv_generation *current = rv_model_current(model);
    char place[32];

    (void)rv_place_text(s, model->device, place);
    if (model->load) {
        struct rv_error cancelled = {0};

        rv_error_set(&cancelled, 0, ERROR(CANCELLED), "the load of %s%s was cancelled by an unload", model->name,
                     place);
        rv_load_cancel(s, model, &cancelled);
    }
    if (current) {
        rv_log_info("%s is unloaded: %.1f MiB are free%s", model->name, (double)current->bytes / (1 << 20), place);
        rv_generation_free(s, current);
    }
}

/* All or nothing. */
static int unload(struct rv_supervisor *s, const struct entries *entries, struct rv_error *err)
{
    for (unsigned i = 0; i < entries->count; i++) {
        int r = may_unload(s, entries->model[i], err);

        if (r < 0) {
            if (entries->count > 1)
                rv_error_remedy(err, "it lies in several places: --device says in which one it is meant");
            return r;
        }
    }
    for (unsigned i = 0; i < entries->count; i++)
        unload_one(s, entries->model[i]);
    return 0;
}

/* ---- all of them ------------------------------------------------------------------------------------------------ */

static void add(struct entries *entries, struct rv_model *model)
{
    for (unsigned i = 0; i < entries->count; i++)
        if (entries->model[i] == model)
            return;
    if (model)
        entries->model[entries->count++] = model;
}

/*
 * The entries of a name or path as the catalogue has them, whether the file is there or not: on one device, which may
 * be none, or on all. NULL = no such model, else one of its entries anywhere.
 */
static const struct rv_model *find_entries(struct rv_supervisor *s, const char *name, int device, struct entries *ret,
                                           struct rv_error *err)
{
    const struct rv_model *any = rv_model_by_name(&s->state, name, RV_ANYWHERE);
    const char *path = any ? any->path : name;
    char shown[RV_ERROR_TEXT_MAX / 2];

    ret->count = 0;
    for (int i = RV_HOST; i < (int)s->state.device_count; i++) {
        struct rv_model *model = rv_model_by_path(&s->state, path, i);

        if (device == RV_ANYWHERE || device == i)
            add(ret, model ? model : rv_model_by_name(&s->state, name, i));
    }
    if (!any)
        any = rv_model_by_path(&s->state, path, RV_ANYWHERE);
    if (!any)
        rv_error_set(err, ENOENT, ERROR(NO_SUCH_MODEL), "no model \"%s\" is known",
                     rv_escape(shown, sizeof(shown), name, strlen(name)));
    return any;
}

/* Of several places the one with most to tell. */
static const struct rv_model *best_of(const struct entries *entries)
{
    for (unsigned i = 0; i < entries->count; i++)
        if (entries->model[i]->load || rv_model_current(entries->model[i]))
            return entries->model[i];
    return entries->model[0];
}

static int change_or_show(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request,
                          int device, struct rv_error *err)
{
    struct rv_supervisor *s = session->supervisor;
    struct entries entries;
    const struct rv_model *any = find_entries(s, request->model, device, &entries, err), *shown;
    int r = 0;

    if (!any)
        return -ENOENT;
    if (entries.count == 0) { /* it is known, and has never been on that device */
        rv_status_send_absent_model(session, id, any, device);
        return 0;
    }
    shown = best_of(&entries);
    if (request->action == ACTION(UNLOAD))
        r = unload(s, &entries, err);
    if (request->action == ACTION(UNPIN))
        for (unsigned i = 0; i < entries.count; i++)
            entries.model[i]->pinned = false;
    if (r == 0)
        rv_status_send_model(session, id, shown);
    return r;
}

/* Which places are meant; -EAGAIN = that is not known yet. *ret_device is RV_ANYWHERE for all of them. */
static int find_places(struct rv_supervisor *s, const Resvisor__V1__ModelRequest *request, bool load,
                       struct rv_places *ret_places, int *ret_device, struct rv_error *err)
{
    const struct rv_model *known;
    int user, r;

    *ret_device = RV_ANYWHERE;
    if (request->device[0]) {
        r = rv_devices_find(s, request->device, ret_device, &user, err);
        *ret_places = (struct rv_places){{*ret_device}, 1};
        return r;
    }
    if (!load)
        return 0;
    known = rv_model_by_name(&s->state, request->model, RV_ANYWHERE);
    if (!known)
        known = rv_model_by_path(&s->state, request->model, RV_ANYWHERE);
    return rv_places_of(s, known ? known->name : request->model, ret_places, err);
}

void rv_pool_model_request(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request)
{
    struct rv_supervisor *s = session->supervisor;
    bool loads = request->action == ACTION(LOAD) || request->action == ACTION(PIN);
    struct rv_error err = {0};
    struct rv_places places;
    int device, r;

    if (loads && s->stopping)
        r = rv_error_set(&err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    else
        r = find_places(s, request, loads, &places, &device, &err);
    if (r == -EAGAIN)
        r = rv_park_model_request(session, id, request, &err);
    else if (r == 0 && loads)
        r = load(session, id, request, &places, &err);
    else if (r == 0)
        r = change_or_show(session, id, request, device, &err);
    if (r < 0)
        rv_session_reply(session, id, &err);
}
