/* The table of routes, and what each of them asks: the same requests as by RPC, of the same table of handlers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http.h"

#define WAIT_DEFAULT_MS 30000u
#define JSON_OF(message) rv_http_json((const ProtobufCMessage *)(message))
/* ---- replies ---------------------------------------------------------------------------------------------------- */

static void render_job(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, JSON_OF(reply->job));
}

/* 202 = it waits or runs. */
static void render_submitted(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    bool unfinished = reply->job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED ||
                      reply->job->state == RESVISOR__V1__JOB_STATE__JOB_RUNNING;
    char place[RV_NAME_MAX + 32];

    (void)fd;
    (void)snprintf(place, sizeof(place), "/resvisor/v1/jobs/%s", reply->job->job_id); /* an id needs no escapes */
    rv_http_answer_json(request, unfinished ? 202 : 200, JSON_OF(reply->job));
    rv_http_add_header(request, "Location", place);
}

static void render_jobs(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, JSON_OF(reply->jobs));
}

static void render_status(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, JSON_OF(reply->status));
}

static void render_models(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    json_t *status = JSON_OF(reply->status), *answer = json_object();

    (void)fd;
    if (!status || !answer || json_object_set(answer, "models", json_object_get(status, "models")) < 0) {
        json_decref(answer);
        answer = NULL;
    }
    json_decref(status);
    rv_http_answer_json(request, 200, answer);
}

static void render_model(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, JSON_OF(reply->model));
}

static void render_devices(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, JSON_OF(reply->devices));
}

static void render_device(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)fd;
    rv_http_answer_json(request, 200, reply->devices->n_devices ? JSON_OF(reply->devices->devices[0]) : NULL);
}

static void render_restarted(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    (void)reply;
    (void)fd;
    rv_http_answer_json(request, 200, json_pack("{s:s, s:b}", "type", request->target.segments[3], "restarted", 1));
}

static void render_logs(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd)
{
    char *text = request->text ? request->text : strdup("");

    (void)reply;
    (void)fd;
    request->text = NULL;
    rv_http_answer_text(request, 200, "text/plain; charset=utf-8", text, request->text_length);
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static void ask(struct rv_http_request *request, Resvisor__V1__Request *message, rv_http_render *render)
{
    struct rv_asker asker = {.local = true, .socket = -1, .http = request};

    message->version = RV_PROTOCOL_VERSION;
    request->render = render;
    rv_rpc_request(request->http->router, &asker, message);
}

/* False = it is there and is no number; the answer says so. */
static bool read_number(struct rv_http_request *request, const char *name, uint64_t most, uint64_t *number)
{
    const char *text = rv_http_query(&request->target, name);

    if (!text)
        return true;
    if (rv_http_parse_number(text, strlen(text), number) && *number <= most)
        return true;
    rv_http_refuse(request, 0, RV_CODE(BAD_REQUEST), "%s must be a whole number, at most %llu", name,
                   (unsigned long long)most);
    return false;
}

static bool read_bool(struct rv_http_request *request, const char *name, bool *ret_value)
{
    const char *text = rv_http_query(&request->target, name);

    *ret_value = text && strcmp(text, "true") == 0;
    if (!text || *ret_value || strcmp(text, "false") == 0)
        return true;
    rv_http_refuse(request, 0, RV_CODE(BAD_REQUEST), "%s must be true or false", name);
    return false;
}

static void ask_status(struct rv_http_request *request, rv_http_render *render)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__StatusRequest status = RESVISOR__V1__STATUS_REQUEST__INIT;

    message.body_case = RESVISOR__V1__REQUEST__BODY_STATUS;
    message.status = &status;
    ask(request, &message, render);
}

static void do_health(struct rv_http_request *request)
{
    rv_http_answer_json(request, 200, json_pack("{s:s}", "status", "ok"));
}

static void do_ready(struct rv_http_request *request)
{
    const char *type = rv_http_query(&request->target, "type");

    if (type && !rv_types_find(request->http->router, type))
        rv_http_refuse(request, 0, RV_CODE(NO_SUCH_TYPE), "no workflow type of that name");
    else
        ask_status(request, rv_http_render_ready);
}

static void do_metrics(struct rv_http_request *request)
{
    ask_status(request, rv_http_render_metrics);
}

static void do_status(struct rv_http_request *request)
{
    ask_status(request, render_status);
}

static void do_models(struct rv_http_request *request)
{
    ask_status(request, render_models);
}

static void ask_model(struct rv_http_request *request, Resvisor__V1__ModelAction action)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__ModelRequest model = RESVISOR__V1__MODEL_REQUEST__INIT;

    model.action = action;
    model.model = (char *)request->target.segments[3];
    if (rv_http_query(&request->target, "device"))
        model.device = (char *)rv_http_query(&request->target, "device");
    message.body_case = RESVISOR__V1__REQUEST__BODY_MODEL;
    message.model = &model;
    ask(request, &message, render_model);
}

static void do_show(struct rv_http_request *request)
{
    ask_model(request, RESVISOR__V1__MODEL_ACTION__MODEL_SHOW);
}

static void do_load(struct rv_http_request *request)
{
    ask_model(request, RESVISOR__V1__MODEL_ACTION__MODEL_LOAD);
}

static void do_unload(struct rv_http_request *request)
{
    ask_model(request, RESVISOR__V1__MODEL_ACTION__MODEL_UNLOAD);
}

static void do_pin(struct rv_http_request *request)
{
    ask_model(request, RESVISOR__V1__MODEL_ACTION__MODEL_PIN);
}

static void do_unpin(struct rv_http_request *request)
{
    ask_model(request, RESVISOR__V1__MODEL_ACTION__MODEL_UNPIN);
}

static void ask_device(struct rv_http_request *request, Resvisor__V1__DeviceAction action, const char *device)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__DeviceRequest body = RESVISOR__V1__DEVICE_REQUEST__INIT;

    body.action = action;
    body.device = (char *)device;
    message.body_case = RESVISOR__V1__REQUEST__BODY_DEVICE;
    message.device = &body;
    ask(request, &message, *device ? render_device : render_devices);
}

static void do_devices(struct rv_http_request *request)
{
    ask_device(request, RESVISOR__V1__DEVICE_ACTION__DEVICE_SHOW, "");
}

static void do_device(struct rv_http_request *request)
{
    ask_device(request, RESVISOR__V1__DEVICE_ACTION__DEVICE_SHOW, request->target.segments[3]);
}

static void do_test_all(struct rv_http_request *request)
{
    ask_device(request, RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST, "");
}

static void do_test(struct rv_http_request *request)
{
    ask_device(request, RESVISOR__V1__DEVICE_ACTION__DEVICE_TEST, request->target.segments[3]);
}

static void do_submit(struct rv_http_request *request)
{
    struct rv_http_submit *submit = calloc(1, sizeof(*submit));
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    struct rv_error err = {0};

    if (!submit) {
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory for the request");
        return;
    }
    if (rv_http_submit_parse(request->body ? request->body : "", request->body_length, submit, &err) < 0) {
        rv_http_answer_error(request, &err, 0, 0);
    } else {
        message.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
        message.submit = &submit->submit;
        ask(request, &message, render_submitted);
    }
    rv_http_submit_fini(submit);
    free(submit);
}

static void do_list(struct rv_http_request *request)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    const char *type = rv_http_query(&request->target, "type");
    uint64_t limit = 0;
    bool unfinished;

    if (!read_number(request, "limit", UINT32_MAX, &limit) || !read_bool(request, "unfinished", &unfinished))
        return;
    list.type = (char *)(type ? type : "");
    list.unfinished_only = unfinished;
    list.limit = (uint32_t)limit;
    message.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    message.list = &list;
    ask(request, &message, render_jobs);
}

static void do_get(struct rv_http_request *request)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Get get = RESVISOR__V1__GET__INIT;

    get.job_id = (char *)request->target.segments[3];
    message.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    message.get = &get;
    ask(request, &message, render_job);
}

static void do_wait(struct rv_http_request *request)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Wait wait = RESVISOR__V1__WAIT__INIT;

    wait.timeout_ms = WAIT_DEFAULT_MS;
    if (!read_number(request, "timeout_ms", RV_WAIT_MAX_MS, &wait.timeout_ms))
        return;
    wait.job_id = (char *)request->target.segments[3];
    message.body_case = RESVISOR__V1__REQUEST__BODY_WAIT;
    message.wait = &wait;
    ask(request, &message, render_job);
}

static void do_cancel(struct rv_http_request *request)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Cancel cancel = RESVISOR__V1__CANCEL__INIT;

    cancel.job_id = (char *)request->target.segments[3];
    message.body_case = RESVISOR__V1__REQUEST__BODY_CANCEL;
    message.cancel = &cancel;
    ask(request, &message, render_job);
}

static void do_output(struct rv_http_request *request)
{
    Resvisor__V1__Request message = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Fetch fetch = RESVISOR__V1__FETCH__INIT;
    const char *text = request->target.segments[5];
    uint64_t number = 0;

    if (!rv_http_parse_number(text, strlen(text), &number) || number >= UINT32_MAX) {
        rv_http_refuse(request, 0, RV_CODE(NO_SUCH_RESULT), "outputs are numbered from 0");
        return;
    }
    fetch.job_id = (char *)request->target.segments[3];
    fetch.output = (uint32_t)number;
    message.body_case = RESVISOR__V1__REQUEST__BODY_FETCH;
    message.fetch = &fetch;
    ask(request, &message, rv_http_render_output);
}

/* What only the supervisor does, and the RPC does not have. */
static void ask_supervisor(struct rv_http_request *request, rv_http_render *render,
                           int (*send)(struct rv_router *, struct rv_asker *, const char *, struct rv_error *))
{
    struct rv_asker asker = {.local = true, .socket = -1, .http = request};
    struct rv_error err = {0};

    request->render = render;
    if (send(request->http->router, &asker, request->target.segments[3], &err) < 0)
        rv_http_answer_error(request, &err, 0, 0);
}

static void do_restart(struct rv_http_request *request)
{
    ask_supervisor(request, render_restarted, rv_ask_restart);
}

static void do_logs(struct rv_http_request *request)
{
    ask_supervisor(request, render_logs, rv_ask_logs);
}

/* ---- the table -------------------------------------------------------------------------------------------------- */

#define V1 "/resvisor/v1/"

static const struct rv_http_route routes[] = {
    {"GET", "/healthz", RV_HTTP_OPEN, false, "", do_health},
    {"GET", "/readyz", RV_HTTP_OPEN, false, "type ", do_ready},
    {"GET", "/metrics", RV_HTTP_CLIENT, false, "", do_metrics},
    {"GET", V1 "status", RV_HTTP_CLIENT, false, "", do_status},
    {"GET", V1 "models", RV_HTTP_CLIENT, false, "", do_models},
    {"GET", V1 "models/*", RV_HTTP_CLIENT, false, "device ", do_show},
    {"POST", V1 "models/*/load", RV_HTTP_CLIENT, false, "device ", do_load},
    {"POST", V1 "models/*/unload", RV_HTTP_OPERATOR, false, "device ", do_unload},
    {"POST", V1 "models/*/pin", RV_HTTP_OPERATOR, false, "device ", do_pin},
    {"POST", V1 "models/*/unpin", RV_HTTP_OPERATOR, false, "device ", do_unpin},
    {"GET", V1 "devices", RV_HTTP_CLIENT, false, "", do_devices},
    {"POST", V1 "devices/test", RV_HTTP_OPERATOR, false, "", do_test_all},
    {"GET", V1 "devices/*", RV_HTTP_CLIENT, false, "", do_device},
    {"POST", V1 "devices/*/test", RV_HTTP_OPERATOR, false, "", do_test},
    {"POST", V1 "jobs", RV_HTTP_CLIENT, true, "", do_submit},
    {"GET", V1 "jobs", RV_HTTP_CLIENT, false, "type unfinished limit ", do_list},
    {"GET", V1 "jobs/*", RV_HTTP_CLIENT, false, "", do_get},
    {"GET", V1 "jobs/*/wait", RV_HTTP_CLIENT, false, "timeout_ms ", do_wait},
    {"POST", V1 "jobs/*/cancel", RV_HTTP_CLIENT, false, "", do_cancel},
    {"GET", V1 "jobs/*/outputs/*", RV_HTTP_CLIENT, false, "", do_output},
    {"GET", V1 "events", RV_HTTP_CLIENT, false, "since ", rv_http_stream_events},
    {"POST", V1 "types/*/restart", RV_HTTP_OPERATOR, false, "", do_restart},
    {"GET", V1 "types/*/logs", RV_HTTP_OPERATOR, false, "", do_logs},
};

static bool path_matches(const struct rv_http_target *target, const char *path)
{
    for (unsigned i = 0; i < target->segment_count; i++) {
        size_t n;

        if (*path++ != '/')
            return false;
        n = strcspn(path, "/");
        if (!(n == 1 && *path == '*') &&
            (strlen(target->segments[i]) != n || memcmp(path, target->segments[i], n) != 0))
            return false;
        path += n;
    }
    return *path == '\0' && target->segment_count > 0;
}

const struct rv_http_route *rv_http_find_route(const struct rv_http_target *target, const char *method,
                                               char *ret_allowed, size_t size)
{
    const char *wanted = strcmp(method, "HEAD") == 0 ? "GET" : method;
    size_t used = 0;

    ret_allowed[0] = '\0';
    for (unsigned i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        if (!path_matches(target, routes[i].path))
            continue;
        if (strcmp(routes[i].method, wanted) == 0)
            return &routes[i];
        used += (size_t)snprintf(ret_allowed + used, size - used, "%s%s", used ? ", " : "",
                                 strcmp(routes[i].method, "GET") == 0 ? "GET, HEAD" : routes[i].method);
    }
    if (used)
        (void)snprintf(ret_allowed + used, size - used, ", OPTIONS");
    return NULL;
}
