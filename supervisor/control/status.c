/* Answers StatusRequest: what `resvisor status` and the RPC's Status show. Queue counts are the router's to add. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children/children.h"
#include "clock.h"
#include "control.h"
#include "log.h"
#include "pool/devices.h"
#include "pool/pool.h"
#include "supervisor.h"

/* Everything that one Status points to. */
struct answer {
    Resvisor__V1__Status status;
    Resvisor__V1__TypeStatus *types;
    Resvisor__V1__TypeStatus **type_pointers;
    Resvisor__V1__WorkerStatus *workers;
    Resvisor__V1__WorkerStatus **worker_pointers;
    Resvisor__V1__ModelStatus *models;
    Resvisor__V1__ModelStatus **model_pointers;
    Resvisor__V1__Error *errors;
    Resvisor__V1__TemplateStatus *templates;
    Resvisor__V1__TemplateStatus **template_pointers;
    char **template_types; /* RV_TYPES_MAX for each */
    void *devices;
};

static void answer_free(struct answer *a)
{
    free(a->types);
    free(a->type_pointers);
    free(a->workers);
    free(a->worker_pointers);
    free(a->models);
    free(a->model_pointers);
    free(a->errors);
    free(a->templates);
    free(a->template_pointers);
    free(a->template_types);
    free(a->devices);
}

static bool answer_allocate(struct answer *a, size_t types, size_t workers, size_t models, size_t templates)
{
    a->types = calloc(types + 1, sizeof(*a->types));
    a->type_pointers = calloc(types + 1, sizeof(*a->type_pointers));
    a->workers = calloc(workers + 1, sizeof(*a->workers));
    a->worker_pointers = calloc(workers + 1, sizeof(*a->worker_pointers));
    a->models = calloc(models + 1, sizeof(*a->models));
    a->model_pointers = calloc(models + 1, sizeof(*a->model_pointers));
    a->errors = calloc(models + 1, sizeof(*a->errors));
    a->templates = calloc(templates + 1, sizeof(*a->templates));
    a->template_pointers = calloc(templates + 1, sizeof(*a->template_pointers));
    a->template_types = calloc((templates + 1) * RV_TYPES_MAX, sizeof(*a->template_types));
    return a->types && a->type_pointers && a->workers && a->worker_pointers && a->models && a->model_pointers &&
           a->errors && a->templates && a->template_pointers && a->template_types;
}

/* What its arenas are, or would be. */
static const char *backend_of(const struct rv_state *state, const struct rv_model *model)
{
    const struct rv_generation *current = rv_model_current(model);
    const struct rv_backend *backend;

    if (current && current->arena_count)
        backend = rv_backend_by_id(current->arenas[0].backend);
    else if (model->device != RV_HOST)
        backend = rv_backend_by_id(state->devices[model->device].backend);
    else
        backend = current ? rv_backend_by_id(RV_BACKEND_MEMFD) : NULL;
    return backend ? backend->name : "";
}

void rv_status_fill_model(const struct rv_state *state, const struct rv_model *model, Resvisor__V1__ModelStatus *m,
                          Resvisor__V1__Error *error)
{
    const struct rv_generation *current = rv_model_current(model), *generation;
    uint64_t now = rv_now_us();

    resvisor__v1__model_status__init(m);
    m->name = model->name;
    m->path = model->path;
    m->state = (char *)rv_model_state_name(rv_model_state_of(model));
    m->generation = model->generation_count;
    m->pinned = model->pinned;
    m->loads = model->loads;
    m->load_ms = model->last_load_us / RV_MSEC;
    m->read_bytes = model->read_bytes;
    TAILQ_FOREACH (generation, &model->generations, link) {
        m->bytes += generation->bytes;
        m->leases += generation->lease_count;
        m->old_generations += generation != current;
    }
    if (current)
        m->tensors = current->tensors;
    m->backend = (char *)backend_of(state, model);
    m->device = (char *)rv_place_name(state, model->device);
    if (model->failure.code) {
        rv_error_to_message(&model->failure, error);
        if (model->retry_at_us > now)
            error->retry_after_ms = (model->retry_at_us - now) / RV_MSEC;
        m->error = error;
    }
    rv_load_progress_of(model, &m->progress_bytes, &m->total_bytes);
}

static void send_model(struct rv_session *session, uint64_t id, Resvisor__V1__ModelStatus *status)
{
    Rv__Frame frame = RV__FRAME__INIT;

    frame.id = id;
    frame.body_case = RV__FRAME__BODY_MODEL_STATUS;
    frame.model_status = status;
    rv_session_send(session, &frame, NULL, 0);
}

void rv_status_send_model(struct rv_session *session, uint64_t id, const struct rv_model *model)
{
    Resvisor__V1__ModelStatus status;
    Resvisor__V1__Error error;

    rv_status_fill_model(&session->supervisor->state, model, &status, &error);
    send_model(session, id, &status);
}

void rv_status_send_absent_model(struct rv_session *session, uint64_t id, const struct rv_model *model, int device)
{
    Resvisor__V1__ModelStatus status = RESVISOR__V1__MODEL_STATUS__INIT;

    status.name = model->name;
    status.path = model->path;
    status.state = (char *)rv_model_state_name(RV_MODEL_ABSENT);
    status.device = (char *)rv_place_name(&session->supervisor->state, device);
    send_model(session, id, &status);
}

/* A number that a driver gave a device is better known than its uuid; while that is not known, what was configured. */
static const char *device_of(struct rv_supervisor *s, const struct rv_config_type *type)
{
    const char *name = rv_devices_of_type(type);
    struct rv_error err = {0};
    int device, user;

    return rv_devices_find(s, name, &device, &user, &err) == 0 ? rv_place_name(&s->state, user) : name;
}

static void fill_types(struct rv_supervisor *s, struct answer *a)
{
    uint32_t next = 0;

    a->status.types = a->type_pointers;
    a->status.n_types = s->config->type_count;
    for (uint32_t t = 0; t < s->config->type_count; t++) {
        Resvisor__V1__TypeStatus *type = &a->types[t];

        resvisor__v1__type_status__init(type);
        type->name = s->config->types[t].name;
        type->kind = s->config->types[t].kind;
        type->device = (char *)device_of(s, &s->config->types[t]);
        type->state = (char *)rv_worker_state_name(rv_type_state(s, type->name));
        type->workers = a->worker_pointers + next;
        type->n_workers = s->config->types[t].workers;
        a->type_pointers[t] = type;
        for (uint32_t i = 0; i < s->config->types[t].workers; i++, next++) {
            Resvisor__V1__WorkerStatus *worker = &a->workers[next];
            struct rv_worker_facts facts;

            rv_worker_get_facts(rv_worker_at(s, next), &facts);
            resvisor__v1__worker_status__init(worker);
            worker->id = (char *)facts.id;
            worker->pid = facts.pid;
            worker->state = (char *)rv_worker_state_name(facts.state);
            worker->starts = facts.starts;
            worker->last_exit = (char *)facts.last_exit;
            worker->job = (char *)facts.job;
            worker->detail = (char *)facts.detail;
            worker->uptime_ms = facts.pid ? (rv_now_us() - facts.started_us) / RV_MSEC : 0;
            a->worker_pointers[next] = worker;
        }
    }
}

static void fill_templates(struct rv_supervisor *s, struct answer *a)
{
    a->status.templates = a->template_pointers;
    a->status.n_templates = s->state.template_count;
    for (uint32_t i = 0; i < s->state.template_count; i++) {
        Resvisor__V1__TemplateStatus *t = &a->templates[i];
        char **types = a->template_types + i * RV_TYPES_MAX;
        uint32_t count;
        const struct rv_template_record *record =
            rv_template_at(s, i, (const char **)(void *)types, RV_TYPES_MAX, &count);

        resvisor__v1__template_status__init(t);
        t->id = (char *)record->id;
        t->pid = record->process.pid;
        t->state = (char *)rv_worker_state_name(record->state);
        t->types = types;
        t->n_types = count;
        t->uptime_ms = record->process.pid ? (rv_now_us() - record->process.started_us) / RV_MSEC : 0;
        t->rss_bytes = rv_template_rss(s, i);
        t->starts = record->starts;
        t->forks = record->forks;
        t->detail = (char *)record->detail;
        t->last_exit = (char *)record->last_exit;
        a->template_pointers[i] = t;
    }
}

static void fill_counters(const struct rv_counters *counters, Resvisor__V1__Status *status)
{
    status->loads = counters->loads;
    status->failed_loads = counters->failed_loads;
    status->load_us = counters->load_us;
    status->read_bytes = counters->read_bytes;
    status->disk_bytes = counters->disk_bytes;
    status->attaches = counters->attaches;
    status->warm_attaches = counters->warm_attaches;
    status->warm_bytes = counters->warm_bytes;
    status->saved_us = counters->saved_us;
    status->worker_deaths = counters->worker_deaths;
    status->router_deaths = counters->router_deaths;
}

void rv_status_send(struct rv_session *session, uint64_t id)
{
    struct rv_supervisor *s = session->supervisor;
    struct answer a = {.status = RESVISOR__V1__STATUS__INIT};
    Rv__Frame frame = RV__FRAME__INIT;
    const struct rv_model *model;
    struct rv_error err = {0};
    size_t n = 0;

    a.status.devices = rv_devices_status(s, &a.status.n_devices, &a.devices);
    a.status.devices_reason = s->state.devices_reason;
    if (!a.status.devices || !answer_allocate(&a, s->config->type_count, rv_worker_count(s), s->state.model_count,
                                              s->state.template_count)) {
        rv_error_set(&err, 0, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for the status");
        rv_session_reply(session, id, &err);
        answer_free(&a);
        return;
    }
    fill_types(s, &a);
    fill_templates(s, &a);
    TAILQ_FOREACH (model, &s->state.models, link) {
        if (rv_model_is_elsewhere(&s->state, model))
            continue;
        rv_status_fill_model(&s->state, model, &a.models[n], &a.errors[n]);
        a.model_pointers[n] = &a.models[n];
        n++;
    }
    a.status.models = a.model_pointers;
    a.status.n_models = n;
    a.status.supervisor_pid = getpid();
    a.status.keeper_pid = s->keeper_pid;
    a.status.uptime_ms = (rv_now_us() - s->state.counters.started_us) / RV_MSEC;
    a.status.router_pid = rv_router_pid(s);
    a.status.router_state = (char *)rv_router_state(s);
    a.status.pool_bytes = rv_state_pool_bytes(&s->state, RV_HOST);
    a.status.pool_budget = s->config->pool_budget;
    a.status.clients = s->state.counters.clients;
    a.status.leases = s->state.counters.leases;
    a.status.version = (char *)RV_VERSION;
    a.status.bad_frames = rv_peer_bad_frames();
    fill_counters(&s->state.counters, &a.status);
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_STATUS;
    frame.status = &a.status;
    rv_session_send(session, &frame, NULL, 0);
    answer_free(&a);
}
