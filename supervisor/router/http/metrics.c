/* /metrics in the text format of Prometheus, and /readyz: the supervisor's status, with what only the router counts. */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../front/front.h"
#include "http.h"

#define METRICS_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define MICRO 1e6
#define NAME "resvisor_"

/* ---- text ------------------------------------------------------------------------------------------------------- */

static void head(FILE *out, const char *name, const char *type, const char *help)
{
    (void)fprintf(out, "# HELP " NAME "%s %s\n# TYPE " NAME "%s %s\n", name, help, name, type);
}

static void label(FILE *out, const char *name, const char *value, bool first)
{
    (void)fprintf(out, "%s%s=\"", first ? "{" : ",", name);
    for (; *value; value++) {
        if (*value == '\n') {
            (void)fputs("\\n", out);
            continue;
        }
        if (*value == '"' || *value == '\\')
            (void)fputc('\\', out);
        (void)fputc(*value, out);
    }
    (void)fputc('"', out);
}

/* A sample with up to two labels; NULL = none. */
static void sample(FILE *out, const char *name, double value, const char *label1, const char *value1,
                   const char *label2, const char *value2)
{
    (void)fprintf(out, NAME "%s", name);
    if (label1)
        label(out, label1, value1, true);
    if (label2)
        label(out, label2, value2, false);
    (void)fprintf(out, "%s %.15g\n", label1 ? "}" : "", value);
}

/* ---- what has one value ----------------------------------------------------------------------------------------- */

struct single {
    const char *name, *type, *help;
    double value;
};

static void write_singles(FILE *out, const struct single *singles, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        head(out, singles[i].name, singles[i].type, singles[i].help);
        sample(out, singles[i].name, singles[i].value, NULL, NULL, NULL, NULL);
    }
}

static void write_pool(FILE *out, const Resvisor__V1__Status *s)
{
    const struct single singles[] = {
        {"uptime_seconds", "gauge", "Time since the supervisor was started.", (double)s->uptime_ms / 1e3},
        {"pool_bytes", "gauge", "Memory of the host that models take, old generations included.",
         (double)s->pool_bytes},
        {"pool_budget_bytes", "gauge", "What pool.budget allows; 0 = no limit.", (double)s->pool_budget},
        {"leases", "gauge", "Leases that clients and workers hold.", s->leases},
        {"clients", "gauge", "Connections to the supervisor's socket.", s->clients},
        {"model_loads_total", "counter", "Loads that succeeded.", (double)s->loads},
        {"model_load_failures_total", "counter", "Loads that failed.", (double)s->failed_loads},
        {"model_load_seconds_total", "counter", "Time of the loads that succeeded.", (double)s->load_us / MICRO},
        {"model_read_bytes_total", "counter", "Bytes read from model files.", (double)s->read_bytes},
        {"model_disk_read_bytes_total", "counter", "Of these, bytes from the disk and not the page cache.",
         (double)s->disk_bytes},
        {"attaches_total", "counter", "Leases given.", (double)s->attaches},
        {"warm_attaches_total", "counter", "Of these, without waiting for a load.", (double)s->warm_attaches},
        {"warm_bytes_total", "counter", "Size of models that were given from memory.", (double)s->warm_bytes},
        {"saved_seconds_total", "counter", "Time that loading those took once, and was not spent again.",
         (double)s->saved_us / MICRO},
        {"worker_deaths_total", "counter", "Workers that died.", (double)s->worker_deaths},
        {"router_deaths_total", "counter", "Routers that died.", (double)s->router_deaths},
    };

    write_singles(out, singles, sizeof(singles) / sizeof(singles[0]));
}

static void write_front(FILE *out, const struct rv_http *http)
{
    const struct rv_router *r = http->router;
    const struct single singles[] = {
        {"rpc_requests_total", "counter", "Requests by RPC, command line and HTTP.", (double)r->rpc_requests},
        {"rpc_refused_total", "counter", "Of these, answered with an error.", (double)r->rpc_refusals},
        {"results", "gauge", "Results that wait to be fetched.", r->kept_count},
        {"results_bytes", "gauge", "Their memory.", (double)r->kept_bytes},
        {"waiting_requests", "gauge", "Requests whose answer waits for something.", r->parked_count},
        {"http_connections", "gauge", "Open HTTP connections.", http->count},
        {"http_streams", "gauge", "Of these, streams of events.", http->streams},
        {"http_refused_connections_total", "counter", "Connections over the limit.", (double)http->refused_connections},
        {"http_expired_connections_total", "counter", "Connections ended for being too slow.",
         (double)http->expired_connections},
    };
    static const char *const classes[] = {"0xx", "1xx", "2xx", "3xx", "4xx", "5xx"};

    write_singles(out, singles, sizeof(singles) / sizeof(singles[0]));
    head(out, "http_responses_total", "counter", "HTTP responses by class of status.");
    for (unsigned i = 2; i < 6; i++)
        sample(out, "http_responses_total", (double)http->answers[i], "class", classes[i], NULL, NULL);
}

static void write_prompts(FILE *out, const struct rv_front *front)
{
    uint64_t taken, refused, unvalidated;

    rv_front_prompt_counts(front, &taken, &refused, &unvalidated);
    write_singles(out,
                  (const struct single[]){
                      {"prompts_total", "counter", "Prompts taken at ComfyUI's address.", (double)taken},
                      {"prompts_refused_total", "counter", "Prompts refused there.", (double)refused},
                      {"prompts_unvalidated_total", "counter", "Of those taken, not judged by a worker before.",
                       (double)unvalidated},
                  },
                  3);
}

/* ---- by model, type, worker ------------------------------------------------------------------------------------- */

/* A model on the host has no label for its device: its series are called as they were before there were devices. */
static void model_sample(FILE *out, const char *name, double value, const Resvisor__V1__ModelStatus *m)
{
    bool on_device = *m->device && strcmp(m->device, "host") != 0;

    sample(out, name, value, "model", m->name, on_device ? "device" : NULL, on_device ? m->device : NULL);
}

static void write_models(FILE *out, const Resvisor__V1__Status *s)
{
    head(out, "model_bytes", "gauge", "Memory of a model.");
    for (size_t i = 0; i < s->n_models; i++)
        model_sample(out, "model_bytes", (double)s->models[i]->bytes, s->models[i]);
    head(out, "model_leases", "gauge", "Leases of a model.");
    for (size_t i = 0; i < s->n_models; i++)
        model_sample(out, "model_leases", s->models[i]->leases, s->models[i]);
}

static void write_workers(FILE *out, const Resvisor__V1__Status *s)
{
    head(out, "worker_starts_total", "counter", "Starts of a worker.");
    for (size_t i = 0; i < s->n_types; i++)
        for (size_t k = 0; k < s->types[i]->n_workers; k++)
            sample(out, "worker_starts_total", s->types[i]->workers[k]->starts, "type", s->types[i]->name, "worker",
                   s->types[i]->workers[k]->id);
    head(out, "worker_ready", "gauge", "1 = the worker is READY.");
    for (size_t i = 0; i < s->n_types; i++)
        for (size_t k = 0; k < s->types[i]->n_workers; k++)
            sample(out, "worker_ready", strcmp(s->types[i]->workers[k]->state, "READY") == 0, "type", s->types[i]->name,
                   "worker", s->types[i]->workers[k]->id);
}

static void write_types(FILE *out, const struct rv_router *r)
{
    head(out, "queued_jobs", "gauge", "Jobs that wait.");
    for (unsigned i = 0; i < r->type_count; i++)
        sample(out, "queued_jobs", r->types[i].queued, "type", r->types[i].name, NULL, NULL);
    head(out, "running_jobs", "gauge", "Jobs that run.");
    for (unsigned i = 0; i < r->type_count; i++)
        sample(out, "running_jobs", r->types[i].running, "type", r->types[i].name, NULL, NULL);
    head(out, "jobs_total", "counter", "Jobs that ended since the router was started, by outcome.");
    for (unsigned i = 0; i < r->type_count; i++)
        for (int code = 0; code < rv_error_count(); code++)
            if (code == 0 || r->types[i].outcomes[code])
                sample(out, "jobs_total", (double)r->types[i].outcomes[code], "type", r->types[i].name, "outcome",
                       code ? rv_error_row(code)->name : "done");
    head(out, "job_runs_total", "counter", "Jobs that are done: warm = nothing was read from model files for them.");
    for (unsigned i = 0; i < r->type_count; i++) {
        sample(out, "job_runs_total", (double)r->types[i].warm_runs, "type", r->types[i].name, "start", "warm");
        sample(out, "job_runs_total", (double)r->types[i].cold_runs, "type", r->types[i].name, "start", "cold");
    }
}

_Static_assert(RV_OUTCOMES_MAX > RESVISOR__V1__ERROR_CODE__ERROR_FILE_DAMAGED, "a counter per error code");

static void write_devices(FILE *out, const Resvisor__V1__Status *s)
{
    static const char *const states[] = {"UNTESTED", "TESTING", "READY", "UNUSABLE", "LOST"};
    const struct {
        const char *name, *help;
        size_t offset;
    } sizes[] = {
        {"device_memory_bytes", "Memory of a device.", offsetof(Resvisor__V1__DeviceStatus, total_bytes)},
        {"device_pool_bytes", "Memory of a device that models take.", offsetof(Resvisor__V1__DeviceStatus, pool_bytes)},
        {"device_budget_bytes", "What devices.NAME.budget allows; 0 = no limit.",
         offsetof(Resvisor__V1__DeviceStatus, budget_bytes)},
        {"device_free_bytes",
         "Free memory of a device; on unified memory what models may take of the machine's. No sample "
         "when nobody tells.",
         offsetof(Resvisor__V1__DeviceStatus, free_bytes)},
    };

    if (s->n_devices == 0)
        return;
    head(out, "device_state", "gauge", "1 for the state that a device is in.");
    for (size_t i = 0; i < s->n_devices; i++)
        for (unsigned k = 0; k < sizeof(states) / sizeof(states[0]); k++)
            sample(out, "device_state", strcmp(s->devices[i]->state, states[k]) == 0, "device", s->devices[i]->name,
                   "state", states[k]);
    for (unsigned k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        head(out, sizes[k].name, "gauge", sizes[k].help);
        for (size_t i = 0; i < s->n_devices; i++) {
            const uint64_t *value = (const void *)((const char *)s->devices[i] + sizes[k].offset);

            if (strcmp(sizes[k].name, "device_free_bytes") != 0 || s->devices[i]->memory_source[0])
                sample(out, sizes[k].name, (double)*value, "device", s->devices[i]->name, NULL, NULL);
        }
    }
}

void rv_http_render_metrics(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    const Resvisor__V1__Status *s = reply->status;
    size_t length = 0;
    char *text = NULL;
    FILE *out = open_memstream(&text, &length);

    (void)fd;
    if (!out) {
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory for the metrics");
        return;
    }
    head(out, "build_info", "gauge", "Always 1; the label says which version.");
    sample(out, "build_info", 1, "version", s->version, NULL, NULL);
    write_pool(out, s);
    write_devices(out, s);
    write_models(out, s);
    write_workers(out, s);
    write_types(out, request->http->router);
    head(out, "bad_frames_total", "counter", "Local peers that were dropped for what they sent.");
    sample(out, "bad_frames_total", (double)s->bad_frames, "process", "supervisor", NULL, NULL);
    sample(out, "bad_frames_total", (double)rv_peer_bad_frames(), "process", "router", NULL, NULL);
    write_front(out, request->http);
    write_prompts(out, request->http->router->front);
    if (fclose(out) != 0) {
        free(text);
        text = NULL;
    }
    rv_http_answer_text(request, 200, METRICS_TYPE, text, length);
}

/* ---- readiness -------------------------------------------------------------------------------------------------- */

static const char *why_not(struct rv_router *router, const Resvisor__V1__TypeStatus *status)
{
    const struct rv_type *type = rv_types_find(router, status->name);

    if (!type || type->failed)
        return "its workers died too often";
    if (type->queued >= type->queue_limit)
        return "its queue is full";
    for (size_t i = 0; i < status->n_workers; i++)
        if (strcmp(status->workers[i]->state, "READY") == 0)
            return NULL;
    return "no worker is ready";
}

void rv_http_render_ready(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    struct rv_router *router = request->http->router;
    const char *only = rv_http_query(&request->target, "type");
    const char *state = router->stopping ? "stopping" : router->settling ? "settling" : "ready";
    bool ready = !router->stopping && !router->settling;
    json_t *types = json_object();

    (void)fd;
    for (size_t i = 0; i < reply->status->n_types; i++) {
        const Resvisor__V1__TypeStatus *type = reply->status->types[i];
        const char *why = why_not(router, type);

        if (only && strcmp(only, type->name) != 0)
            continue;
        ready = ready && !why;
        (void)json_object_set_new(types, type->name,
                                  json_pack("{s:b, s:s, s:s, s:i, s:i}", "ready", !why, "state", type->state, "reason",
                                            why ? why : "", "queued", (int)type->queued, "running",
                                            (int)type->running));
    }
    rv_http_answer_json(request, ready ? 200 : 503,
                        json_pack("{s:b, s:s, s:o}", "ready", ready, "router", state, "types", types));
    if (!ready)
        rv_http_add_header(request, "Retry-After", "1");
}
