/* Load, unload, pin, unpin and show: what operators and gateways ask of one model. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "log.h"
#include "pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define ACTION(name) RESVISOR__V1__MODEL_ACTION__MODEL_##name

/* Loads unless resident; answered when it is. pin: stays pinned if that works. */
static int load(struct rv_session *session, uint64_t id, const char *name, bool pin, struct rv_error *err)
{
    struct rv_supervisor *s = session->supervisor;
    struct rv_file_identity identity;
    struct rv_generation *current;
    struct rv_model *model;
    int fd, r;

    if (s->stopping)
        return rv_error_set(err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    r = rv_catalog_find(s, name, &model, &fd, &identity, err);
    if (r < 0)
        return r;
    current = rv_model_current(model);
    if (pin)
        model->pinned = true;
    if (current && rv_identity_equal(&current->identity, &identity)) {
        if (fd >= 0)
            (void)close(fd);
        model->failure.code = 0;
        rv_status_send_model(session, id, model);
        return 0;
    }
    model->retry_at_us = 0; /* an operator's wish is tried at once */
    return rv_load_join(
        s, model, fd, &identity,
        &(struct rv_wait_options){.session = session, .id = id, .kind = RV_WAIT_MODEL, .progress = true}, err);
}

static int unload(struct rv_session *session, uint64_t id, struct rv_model *model, struct rv_error *err)
{
    struct rv_supervisor *s = session->supervisor;
    struct rv_generation *current = rv_model_current(model);
    char holders[RV_ERROR_TEXT_MAX / 2];

    if (model->pinned)
        return rv_error_set(err, EBUSY, ERROR(MODEL_PINNED), "%s is pinned", model->name);
    if (current && current->lease_count) {
        rv_lease_holders(s, current, holders, sizeof(holders));
        rv_error_set(err, EBUSY, ERROR(MODEL_IN_USE), "%s has %u lease%s: %s", model->name, current->lease_count,
                     current->lease_count == 1 ? "" : "s", holders);
        return -EBUSY;
    }
    if (model->load) {
        struct rv_error cancelled = {0};

        rv_error_set(&cancelled, 0, ERROR(CANCELLED), "the load of %s was cancelled by an unload", model->name);
        rv_load_cancel(s, model, &cancelled);
    }
    if (current) {
        rv_log_info("%s is unloaded: %.1f MiB are free", model->name, (double)current->bytes / (1 << 20));
        rv_generation_destroy(current);
    }
    rv_status_send_model(session, id, model);
    return 0;
}

/* The entry of a name or path as the catalogue has it, whether the file is there or not. */
static struct rv_model *find_entry(struct rv_supervisor *s, const char *name, struct rv_error *err)
{
    struct rv_model *model = rv_model_by_name(&s->state, name);
    char shown[RV_ERROR_TEXT_MAX / 2];

    model = rv_model_by_path(&s->state, model ? model->path : name);
    if (!model)
        rv_error_set(err, ENOENT, ERROR(NO_SUCH_MODEL), "no model \"%s\" is known",
                     rv_escape(shown, sizeof(shown), name, strlen(name)));
    return model;
}

void rv_pool_model_request(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request)
{
    struct rv_supervisor *s = session->supervisor;
    struct rv_error err = {0};
    struct rv_model *model;
    int r = 0;

    switch (request->action) {
    case ACTION(LOAD):
    case ACTION(PIN):
        r = load(session, id, request->model, request->action == ACTION(PIN), &err);
        break;
    default:
        model = find_entry(s, request->model, &err);
        if (!model)
            r = -ENOENT;
        else if (request->action == ACTION(UNLOAD))
            r = unload(session, id, model, &err);
        else {
            if (request->action == ACTION(UNPIN))
                model->pinned = false;
            rv_status_send_model(session, id, model);
        }
    }
    if (r < 0)
        rv_session_reply(session, id, &err);
}
