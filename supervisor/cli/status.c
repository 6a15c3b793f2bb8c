/* `status` and `models`. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "client.h"
#include "clock.h"
#include "config_keys.h"
#include "devices.h"
#include "output.h"

#define ROUTER_TIMEOUT_US RV_SEC /* for the queues; without it the supervisor's part is shown */
#define SAFE_MAX 1024

/* Both answers. `queues` is the router's: it knows what waits. */
struct facts {
    struct rv_frame supervisor_frame, router_frame;
    const Resvisor__V1__Status *status, *queues;
    struct rv_error router_error;
};

static void facts_fini(struct facts *facts)
{
    rv_frame_fini(&facts->supervisor_frame);
    rv_frame_fini(&facts->router_frame);
}

static void ask_router(const char *runtime_dir, struct facts *facts)
{
    struct rv_client client = RV_CLIENT_INIT;
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__StatusRequest body = RESVISOR__V1__STATUS_REQUEST__INIT;

    request.body_case = RESVISOR__V1__REQUEST__BODY_STATUS;
    request.status = &body;
    if (rv_client_connect(&client, runtime_dir, RV_SOCKET_ROUTER, ROUTER_TIMEOUT_US, &facts->router_error) == 0 &&
        rv_client_rpc(&client, &request, ROUTER_TIMEOUT_US, &facts->router_frame, &facts->router_error) == 0 &&
        facts->router_frame.message->rpc_reply->body_case == RESVISOR__V1__REPLY__BODY_STATUS)
        facts->queues = facts->router_frame.message->rpc_reply->status;
    rv_client_close(&client);
}

static int ask(const struct rv_args *args, bool with_queues, struct facts *facts, struct rv_error *err)
{
    struct rv_client client = RV_CLIENT_INIT;
    Rv__Frame request = RV__FRAME__INIT;
    Resvisor__V1__StatusRequest body = RESVISOR__V1__STATUS_REQUEST__INIT;
    char runtime_dir[PATH_MAX];
    int r = rv_cli_runtime_dir(args, runtime_dir, sizeof(runtime_dir), err);

    request.body_case = RV__FRAME__BODY_STATUS_REQUEST;
    request.status_request = &body;
    if (r == 0)
        r = rv_client_connect(&client, runtime_dir, RV_SOCKET_CONTROL, RV_CLIENT_TIMEOUT_US, err);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_STATUS, RV_CLIENT_TIMEOUT_US, NULL, NULL,
                              &facts->supervisor_frame, err);
    rv_client_close(&client);
    if (r < 0)
        return r;
    facts->status = facts->supervisor_frame.message->status;
    if (with_queues)
        ask_router(runtime_dir, facts);
    return 0;
}

/* The router's numbers of a type. NULL = it did not tell. */
static const Resvisor__V1__TypeStatus *queue_of(const struct facts *facts, const char *type)
{
    for (size_t i = 0; facts->queues && i < facts->queues->n_types; i++)
        if (strcmp(facts->queues->types[i]->name, type) == 0)
            return facts->queues->types[i];
    return NULL;
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static json_t *worker_json(const Resvisor__V1__WorkerStatus *worker)
{
    json_t *root = json_object();

    rv_json_set_text(root, "id", worker->id);
    rv_json_set_integer(root, "pid", worker->pid);
    rv_json_set_text(root, "state", worker->state);
    rv_json_set_integer(root, "starts", worker->starts);
    rv_json_set_text(root, "last_exit", worker->last_exit);
    rv_json_set_text(root, "job", worker->job);
    rv_json_set_text(root, "detail", worker->detail);
    rv_json_set_integer(root, "uptime_ms", worker->uptime_ms);
    return root;
}

static json_t *type_json(const Resvisor__V1__TypeStatus *type, const Resvisor__V1__TypeStatus *queue)
{
    json_t *root = json_object(), *workers = json_array();

    rv_json_set_text(root, "name", type->name);
    rv_json_set_text(root, "kind", type->kind);
    rv_json_set_text(root, "device", type->device);
    rv_json_set_text(root, "state", type->state);
    rv_json_set_integer(root, "queued", queue ? queue->queued : type->queued);
    rv_json_set_integer(root, "running", queue ? queue->running : type->running);
    for (size_t i = 0; i < type->n_workers; i++)
        (void)json_array_append_new(workers, worker_json(type->workers[i]));
    (void)json_object_set_new(root, "workers", workers);
    return root;
}

/* Its part of its memory: what it shares with workers counts in parts. 0 = not known, or of another user. */
static uint64_t pss_of(pid_t pid)
{
    char path[64], line[128];
    unsigned long long kib = 0;
    FILE *f;

    (void)snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
    f = pid > 0 ? fopen(path, "re") : NULL;
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "Pss: %llu kB", &kib) == 1)
            break;
    if (f)
        (void)fclose(f);
    return kib * 1024;
}

static json_t *template_json(const Resvisor__V1__TemplateStatus *template)
{
    json_t *root = json_object(), *types = json_array();

    rv_json_set_text(root, "id", template->id);
    rv_json_set_integer(root, "pid", template->pid);
    rv_json_set_text(root, "state", template->state);
    for (size_t i = 0; i < template->n_types; i++)
        (void)json_array_append_new(types, json_string(template->types[i]));
    (void)json_object_set_new(root, "types", types);
    rv_json_set_integer(root, "uptime_ms", template->uptime_ms);
    rv_json_set_integer(root, "rss_bytes", template->rss_bytes);
    rv_json_set_integer(root, "pss_bytes", pss_of(template->pid));
    rv_json_set_integer(root, "starts", template->starts);
    rv_json_set_integer(root, "forks", template->forks);
    rv_json_set_text(root, "detail", template->detail);
    rv_json_set_text(root, "last_exit", template->last_exit);
    return root;
}

static json_t *models_json(const Resvisor__V1__Status *status)
{
    json_t *array = json_array();

    for (size_t i = 0; i < status->n_models; i++)
        (void)json_array_append_new(array, rv_model_json(status->models[i]));
    return array;
}

static void print_status_json(const struct facts *facts)
{
    const Resvisor__V1__Status *s = facts->status;
    json_t *root = json_object(), *supervisor = json_object(), *router = json_object(), *pool = json_object(),
           *types = json_array(), *templates = json_array(), *devices = json_array();

    rv_json_set_text(root, "version", s->version);
    rv_json_set_integer(supervisor, "pid", s->supervisor_pid);
    rv_json_set_integer(supervisor, "uptime_ms", s->uptime_ms);
    rv_json_set_integer(supervisor, "keeper_pid", s->keeper_pid);
    (void)json_object_set_new(root, "supervisor", supervisor);
    rv_json_set_integer(router, "pid", s->router_pid);
    rv_json_set_text(router, "state", s->router_state);
    (void)json_object_set_new(router, "answers", json_boolean(facts->queues));
    (void)json_object_set_new(root, "router", router);
    for (size_t i = 0; i < s->n_types; i++)
        (void)json_array_append_new(types, type_json(s->types[i], queue_of(facts, s->types[i]->name)));
    (void)json_object_set_new(root, "types", types);
    for (size_t i = 0; i < s->n_templates; i++)
        (void)json_array_append_new(templates, template_json(s->templates[i]));
    (void)json_object_set_new(root, "templates", templates);
    (void)json_object_set_new(root, "models", models_json(s));
    rv_json_set_integer(pool, "bytes", s->pool_bytes);
    rv_json_set_integer(pool, "budget", s->pool_budget);
    (void)json_object_set_new(root, "pool", pool);
    for (size_t i = 0; i < s->n_devices; i++)
        (void)json_array_append_new(devices, rv_device_json(s->devices[i]));
    (void)json_object_set_new(root, "devices", devices);
    rv_json_set_text(root, "devices_reason", s->devices_reason);
    rv_json_set_integer(root, "clients", s->clients);
    rv_json_set_integer(root, "leases", s->leases);
    rv_json_set_integer(root, "bad_frames", s->bad_frames);
    rv_json_print(root);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

static const char *escaped(char *buffer, size_t size, const char *text)
{
    return rv_escape(buffer, size, text, strlen(text));
}

static void print_head(const struct facts *facts)
{
    const Resvisor__V1__Status *s = facts->status;
    char version[64], state[64], uptime[32], bytes[32], budget[32], reason[RV_ERROR_TEXT_MAX];

    rv_format_duration(s->uptime_ms * RV_MSEC, uptime, sizeof(uptime));
    rv_format_size(s->pool_bytes, bytes, sizeof(bytes));
    rv_format_size(s->pool_budget, budget, sizeof(budget));
    printf("resvisor %s   supervisor %d, up %s   keeper %d   router %d %s\n",
           escaped(version, sizeof(version), s->version), s->supervisor_pid, uptime, s->keeper_pid, s->router_pid,
           escaped(state, sizeof(state), s->router_state));
    printf("pool %s", bytes);
    if (s->pool_budget)
        printf(" of %s (%.0f%%)", budget, (double)s->pool_bytes * 100 / (double)s->pool_budget);
    printf("   clients %" PRIu32 "   leases %" PRIu32 "   bad frames %" PRIu64 "\n", s->clients, s->leases,
           s->bad_frames);
    if (!facts->queues)
        printf("the router does not answer (%s): queue lengths are not known\n",
               escaped(reason, sizeof(reason), facts->router_error.message));
}

/* The columns of the type: in the row of its first worker only. */
static void add_type(struct rv_table *table, const Resvisor__V1__TypeStatus *type,
                     const Resvisor__V1__TypeStatus *queue, bool first)
{
    if (!first) {
        for (unsigned i = 0; i < 4; i++)
            rv_table_add(table, "%s", "");
        return;
    }
    rv_table_add(table, "%s", type->name);
    rv_table_add(table, "%s", type->state);
    rv_table_add(table, "%" PRIu32, queue ? queue->queued : type->queued);
    rv_table_add(table, "%" PRIu32, queue ? queue->running : type->running);
}

static void add_worker(struct rv_table *table, const Resvisor__V1__WorkerStatus *worker)
{
    char pid[16] = "-", uptime[32] = "-";

    if (worker->pid) {
        (void)snprintf(pid, sizeof(pid), "%d", worker->pid);
        rv_format_duration(worker->uptime_ms * RV_MSEC, uptime, sizeof(uptime));
    }
    rv_table_add(table, "%s", worker->id);
    rv_table_add(table, "%s", pid);
    rv_table_add(table, "%s", worker->state);
    rv_table_add(table, "%s", uptime);
    rv_table_add(table, "%" PRIu32, worker->starts);
    rv_table_add(table, "%s", *worker->job ? worker->job : "-");
    rv_table_add(table, "%s", worker->last_exit);
}

static void print_types(const struct facts *facts)
{
    static const char *const titles[] = {"TYPE",  "STATE",   ">QUEUED", ">RUNNING", "WORKER",    ">PID",
                                         "STATE", ">UPTIME", ">STARTS", "JOB",      "LAST EXIT", NULL};
    struct rv_table table;

    rv_table_init(&table, titles);
    for (size_t i = 0; i < facts->status->n_types; i++) {
        const Resvisor__V1__TypeStatus *type = facts->status->types[i];

        for (size_t k = 0; k < type->n_workers; k++) {
            add_type(&table, type, queue_of(facts, type->name), k == 0);
            add_worker(&table, type->workers[k]);
        }
    }
    rv_table_print(&table);
}

static void print_templates(const Resvisor__V1__Status *status)
{
    static const char *const titles[] = {"TEMPLATE", ">PID",   "STATE",    ">UPTIME",   ">RSS", ">PSS",
                                         ">STARTS",  ">FORKS", "OF TYPES", "LAST EXIT", NULL};
    char uptime[32], rss[32], pss[32], types[SAFE_MAX];
    struct rv_table table;

    rv_table_init(&table, titles);
    for (size_t i = 0; i < status->n_templates; i++) {
        const Resvisor__V1__TemplateStatus *t = status->templates[i];
        size_t n = 0;

        types[0] = '\0';
        for (size_t k = 0; k < t->n_types && n < sizeof(types); k++)
            n += (size_t)snprintf(types + n, sizeof(types) - n, "%s%s", k ? ", " : "", t->types[k]);
        rv_format_duration(t->uptime_ms * RV_MSEC, uptime, sizeof(uptime));
        rv_format_size(t->rss_bytes, rss, sizeof(rss));
        rv_format_size(pss_of(t->pid), pss, sizeof(pss));
        rv_table_add(&table, "%s", t->id);
        rv_table_add(&table, "%" PRIi32, t->pid);
        rv_table_add(&table, "%s", t->state);
        rv_table_add(&table, "%s", t->pid ? uptime : "-");
        rv_table_add(&table, "%s", t->pid ? rss : "-");
        rv_table_add(&table, "%s", t->pid ? pss : "-");
        rv_table_add(&table, "%" PRIu32, t->starts);
        rv_table_add(&table, "%" PRIu64, t->forks);
        rv_table_add(&table, "%s", types);
        rv_table_add(&table, "%s", t->last_exit);
    }
    rv_table_print(&table);
}

static bool is_unusual(const char *detail)
{
    const char *way = strstr(detail, "started the long way: ");

    return strstr(detail, "unpooled: ") || (way && !strstr(way, "fast_start is off"));
}

/* What a worker says of itself is long; only one that works without the pool, or could not be forked from its template,
 * needs to be seen here. */
static void print_unusual(const Resvisor__V1__Status *status)
{
    for (size_t i = 0; i < status->n_types; i++)
        for (size_t k = 0; k < status->types[i]->n_workers; k++)
            if (is_unusual(status->types[i]->workers[k]->detail))
                printf("%s: %s\n", status->types[i]->workers[k]->id, status->types[i]->workers[k]->detail);
}

static bool any_on_device(const Resvisor__V1__Status *status)
{
    for (size_t i = 0; i < status->n_models; i++)
        if (*status->models[i]->device && strcmp(status->models[i]->device, "host") != 0)
            return true;
    return false;
}

/* Where they lie is a column only if not all lie on the host. */
static void print_models(const Resvisor__V1__Status *status)
{
    static const char *const titles[] = {"MODEL",  "STATE",      ">SIZE", ">TENSORS",    ">LEASES", "PIN",
                                         ">LOADS", ">LOAD TIME", ">READ", ">GENERATION", NULL};
    static const char *const placed[] = {"MODEL", "DEVICE", "STATE",      ">SIZE", ">TENSORS",    ">LEASES",
                                         "PIN",   ">LOADS", ">LOAD TIME", ">READ", ">GENERATION", NULL};
    bool places = any_on_device(status);
    struct rv_table table;
    char size[32], load[32], bytes[32], safe[SAFE_MAX], name[SAFE_MAX];

    rv_table_init(&table, places ? placed : titles);
    for (size_t i = 0; i < status->n_models; i++) {
        const Resvisor__V1__ModelStatus *m = status->models[i];

        rv_format_size(m->total_bytes ? m->progress_bytes : m->bytes, size, sizeof(size));
        rv_format_duration(m->load_ms * RV_MSEC, load, sizeof(load));
        rv_format_size(m->read_bytes, bytes, sizeof(bytes));
        rv_table_add(&table, "%s", m->name);
        if (places)
            rv_table_add(&table, "%s", m->device);
        rv_table_add(&table, "%s", m->state);
        rv_table_add(&table, "%s", size);
        rv_table_add(&table, "%" PRIu64, m->tensors);
        rv_table_add(&table, "%" PRIu32, m->leases);
        rv_table_add(&table, "%s", m->pinned ? "pin" : "-");
        rv_table_add(&table, "%" PRIu32, m->loads);
        rv_table_add(&table, "%s", m->loads ? load : "-");
        rv_table_add(&table, "%s", bytes);
        rv_table_add(&table, m->old_generations ? "%" PRIu64 " (+%" PRIu32 " old)" : "%" PRIu64, m->generation,
                     m->old_generations);
    }
    rv_table_print(&table);
    for (size_t i = 0; i < status->n_models; i++) {
        const Resvisor__V1__ModelStatus *m = status->models[i];

        if (m->error && m->error->code != RESVISOR__V1__ERROR_CODE__ERROR_OK)
            printf("%s: %s\n", escaped(name, sizeof(name), m->name), escaped(safe, sizeof(safe), m->error->message));
    }
}

static void print_status(const struct facts *facts)
{
    print_head(facts);
    if (facts->status->n_devices) {
        (void)putchar('\n');
        rv_devices_print_table(facts->status->devices, facts->status->n_devices);
    }
    if (facts->status->n_types) {
        (void)putchar('\n');
        print_types(facts);
        print_unusual(facts->status);
    }
    if (facts->status->n_templates) {
        (void)putchar('\n');
        print_templates(facts->status);
    }
    if (facts->status->n_models) {
        (void)putchar('\n');
        print_models(facts->status);
    }
}

static void print_only_models(const struct facts *facts, bool json)
{
    if (json) {
        json_t *root = json_object();

        (void)json_object_set_new(root, "models", models_json(facts->status));
        rv_json_print(root);
    } else if (facts->status->n_models == 0) {
        puts("no models");
    } else {
        print_models(facts->status);
    }
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

static int run(const struct rv_command *command, int argc, char **argv)
{
    bool only_models = command == &rv_command_models;
    struct facts facts = {0};
    struct rv_error err = {0};
    struct rv_args args;
    const char *value;
    int i, exit_code = RV_EXIT_DONE;

    rv_args_init(&args, command, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        ;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (ask(&args, !only_models, &facts, &err) < 0)
        exit_code = rv_say_error(&err, args.json);
    else if (only_models)
        print_only_models(&facts, args.json);
    else if (args.json)
        print_status_json(&facts);
    else
        print_status(&facts);
    facts_fini(&facts);
    rv_args_fini(&args);
    return exit_code;
}

static int run_status(int argc, char **argv)
{
    return run(&rv_command_status, argc, argv);
}

static int run_models(int argc, char **argv)
{
    return run(&rv_command_models, argc, argv);
}

const struct rv_command rv_command_status = {
    .name = "status",
    .arguments = "[--json]",
    .summary = "Show processes, workers, models and queues.",
    .text = "",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .run = run_status,
};

const struct rv_command rv_command_models = {
    .name = "models",
    .arguments = "[--json]",
    .summary = "List models: what is in memory, who uses it, what it cost.",
    .text = "",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .run = run_models,
};
