/* Answers that are made of several workers': node classes, extensions, system_stats, free. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "gather.h"
#include "join.h"

/* A node that holds Python's lock shall not hold up a page: how long another type may take, and one that is known. */
#define OTHER_US (10 * RV_SEC)
#define KNOWN_US (2 * RV_SEC)

/* The primary's answer, if nothing is known of it. */
static uint64_t first_us(const struct rv_front *front)
{
    return front->router->setup->http_worker_timeout_ms * RV_MSEC;
}

/* What a type last said of its node classes: used while it is too busy to say it. */
struct cached {
    char worker[RV_WORKER_NAME_MAX + 1];
    uint64_t incarnation; /* of the worker that said it */
    char *text;
    size_t length;
};

struct rv_front_merges {
    struct cached nodes[RV_TYPES_MAX]; /* by the type's place */
};

static struct cached *cached_of(struct rv_front *front, const struct rv_type *type)
{
    return &front->merges->nodes[type - front->router->types];
}

static void forget(struct cached *cached)
{
    free(cached->text);
    *cached = (struct cached){0};
}

int rv_front_merges_init(struct rv_front *front)
{
    front->merges = calloc(1, sizeof(*front->merges));
    return front->merges ? 0 : -ENOMEM;
}

void rv_front_merges_fini(struct rv_front *front)
{
    for (unsigned i = 0; front->merges && i < RV_TYPES_MAX; i++)
        forget(&front->merges->nodes[i]);
    free(front->merges);
    front->merges = NULL;
}

void rv_front_merges_worker_changed(struct rv_front *front, const struct rv_worker_entry *worker)
{
    if (front->merges)
        forget(cached_of(front, worker->type));
}

/* ---- union ------------------------------------------------------------------------------------------------------ */

static bool is_good(const struct rv_front_part *part)
{
    return part->r == 0 && part->status == 200 && part->text;
}

/* No worker has given what was wanted: the first one's answer or failure is the client's. */
static void answer_failure(struct rv_front_gather *gather)
{
    struct rv_front_part *part = &gather->parts[0];

    if (part->r == 0 && part->text) {
        rv_front_answer_text(gather->request, part->status, part->text, part->length);
        part->text = NULL;
    } else {
        rv_front_answer_failure(gather->request, part->worker, part->r);
    }
}

static void answer_joined(struct rv_front_gather *gather, bool arrays, bool cache)
{
    struct rv_front_text texts[RV_FRONT_PARTS_MAX];
    unsigned count = 0;
    size_t length = 0;
    char *text = NULL;
    int r;

    for (unsigned i = 0; i < gather->count; i++) {
        const struct rv_front_part *part = &gather->parts[i];
        const struct cached *known = cache ? cached_of(gather->front, part->type) : NULL;

        if (is_good(part))
            texts[count++] = (struct rv_front_text){part->text, part->length};
        else if (known && known->text)
            texts[count++] = (struct rv_front_text){known->text, known->length};
    }
    r = (arrays ? rv_front_join_arrays : rv_front_join_objects)(texts, count, &text, &length);
    if (r == 0)
        rv_front_answer_text(gather->request, 200, text, length);
    else if (count > 0)
        rv_front_answer_error(gather->request, 502, "worker_answer_invalid", "", 0,
                              "no worker's answer is JSON as it should be");
    else
        answer_failure(gather);
}

static void keep_nodes(struct rv_front *front, struct rv_front_part *part)
{
    struct cached *known = cached_of(front, part->type);

    forget(known);
    (void)snprintf(known->worker, sizeof(known->worker), "%s", part->worker);
    known->incarnation = part->incarnation;
    known->text = part->text;
    known->length = part->length;
    part->text = NULL;
}

static void nodes_done(struct rv_front_gather *gather)
{
    answer_joined(gather, false, true);
    for (unsigned i = 0; i < gather->count; i++)
        if (is_good(&gather->parts[i]) &&
            rv_front_find(gather->front, gather->parts[i].worker, gather->parts[i].incarnation))
            keep_nodes(gather->front, &gather->parts[i]);
}

static void class_done(struct rv_front_gather *gather)
{
    answer_joined(gather, false, false);
}

static void arrays_done(struct rv_front_gather *gather)
{
    answer_joined(gather, true, false);
}

static void gather_types(struct rv_http_request *request, void (*done)(struct rv_front_gather *gather), bool cache,
                         uint64_t answer_max)
{
    struct rv_front_gather *gather;
    struct rv_front_call_options options = {.method = "GET", .path = request->uri, .answer_max = answer_max};

    if (rv_front_is_pinned(request)) {
        rv_front_pass_on(request);
        return;
    }
    gather = rv_front_gather_create(request, done);
    if (!gather)
        return;
    rv_front_gather_types(gather);
    rv_front_gather_limit(gather, first_us(gather->front), OTHER_US);
    for (unsigned i = 0; cache && i < gather->count; i++)
        if (cached_of(gather->front, gather->parts[i].type)->text)
            gather->parts[i].limit_us = KNOWN_US;
    rv_front_gather_start(gather, &options);
}

void rv_front_object_info(struct rv_http_request *request)
{
    gather_types(request, nodes_done, true, RV_FRONT_ANSWER_MAX);
}

void rv_front_object_info_one(struct rv_http_request *request)
{
    gather_types(request, class_done, false, RV_FRONT_ANSWER_MAX);
}

void rv_front_extensions(struct rv_http_request *request)
{
    gather_types(request, arrays_done, false, RV_FRONT_ANSWER_MAX);
}

/* ---- system_stats ----------------------------------------------------------------------------------------------- */

static bool same_device(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"type", "index", "name"};

    for (unsigned i = 0; i < 3; i++) {
        const json_t *x = json_object_get(a, keys[i]), *y = json_object_get(b, keys[i]);

        if ((x || y) && !(x && y && json_equal(x, y)))
            return false;
    }
    return true;
}

/* Devices that another type's workers use, and the primary does not. */
static void add_devices(json_t *devices, const json_t *others)
{
    json_t *device;
    size_t i, k;

    json_array_foreach (others, i, device) {
        bool known = false;

        for (k = 0; k < json_array_size(devices); k++)
            known |= same_device(json_array_get(devices, k), device);
        if (!known)
            (void)json_array_append(devices, device);
    }
}

static json_t *join_stats(const struct rv_front_gather *gather)
{
    json_t *stats = NULL;

    for (unsigned i = 0; i < gather->count; i++) {
        json_t *one =
            is_good(&gather->parts[i]) ? json_loadb(gather->parts[i].text, gather->parts[i].length, 0, NULL) : NULL;

        if (!stats && json_is_object(one)) {
            stats = json_incref(one);
            if (!json_is_array(json_object_get(stats, "devices")))
                (void)json_object_set_new(stats, "devices", json_array());
        } else if (stats) {
            add_devices(json_object_get(stats, "devices"), json_object_get(one, "devices"));
        }
        json_decref(one);
    }
    return stats;
}

static json_t *pool_of(const Resvisor__V1__Status *status)
{
    json_t *models = json_array();
    json_t *pool;

    for (size_t i = 0; i < status->n_models; i++) {
        const Resvisor__V1__ModelStatus *m = status->models[i];

        (void)json_array_append_new(models, json_pack("{s:s, s:s, s:s, s:I, s:I}", "name", m->name, "device", m->device,
                                                      "state", m->state, "bytes", (json_int_t)m->bytes, "leases",
                                                      (json_int_t)m->leases));
    }
    pool = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "version", status->version, "pool_bytes",
                     (json_int_t)status->pool_bytes, "pool_budget", (json_int_t)status->pool_budget, "leases",
                     (json_int_t)status->leases, "loads", (json_int_t)status->loads, "read_bytes",
                     (json_int_t)status->read_bytes, "warm_bytes", (json_int_t)status->warm_bytes, "models", models);
    return pool;
}

/* request->body holds what the workers have said. */
static void render_stats(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    json_t *stats = json_loadb(request->body ? request->body : "", request->body_length, 0, NULL);

    (void)fd;
    if (json_is_object(stats))
        (void)json_object_set_new(stats, "resvisor", pool_of(reply->status));
    rv_front_answer_json(request, 200, stats);
}

static void stats_done(struct rv_front_gather *gather)
{
    struct rv_http_request *request = gather->request;
    struct rv_asker asker = {.local = true, .socket = -1, .http = request};
    json_t *stats = join_stats(gather);
    struct rv_error err = {0};

    if (!stats) {
        answer_failure(gather);
        return;
    }
    request->body = json_dumps(stats, JSON_COMPACT);
    request->body_length = request->body ? strlen(request->body) : 0;
    json_decref(stats);
    request->waiting = false;
    request->front_gone = NULL; /* from now on it waits as a request of http/ does */
    request->render = render_stats;
    if (rv_ask_status(gather->front->router, &asker, &err) < 0) {
        request->render = NULL;
        rv_http_answer_error(request, &err, 0, 0);
    }
}

void rv_front_system_stats(struct rv_http_request *request)
{
    gather_types(request, stats_done, false, RV_FRONT_BODY_MAX); /* a tree is built of it */
}

/* ---- free ------------------------------------------------------------------------------------------------------- */

/* Each worker was told; the first that refuses, or cannot be reached, is named. */
static void free_done(struct rv_front_gather *gather)
{
    for (unsigned i = 0; i < gather->count; i++) {
        struct rv_front_part *part = &gather->parts[i];

        if (part->r == 0 && part->status == 200)
            continue;
        if (part->r == 0) {
            rv_front_answer_text(gather->request, part->status, part->text, part->length);
            part->text = NULL;
        } else {
            rv_front_answer_failure(gather->request, part->worker, part->r);
        }
        return;
    }
    rv_front_answer_text(gather->request, 200, strdup(""), 0);
}

void rv_front_free(struct rv_http_request *request)
{
    struct rv_front_gather *gather = rv_front_gather_create(request, free_done);
    struct rv_front_call_options options = {.method = "POST",
                                            .path = "/free",
                                            .body = request->body ? request->body : "",
                                            .length = request->body_length,
                                            .answer_max = RV_FRONT_BODY_MAX};

    if (!gather)
        return;
    rv_front_gather_all(gather);
    rv_front_gather_limit(gather, first_us(gather->front), first_us(gather->front));
    rv_front_gather_start(gather, &options);
}
