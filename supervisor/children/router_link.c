/* The router as a child: its start, its setup, what it is told. Its death costs nothing but time, so it always
 * restarts. */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children_private.h"
#include "clock.h"
#include "control/control.h"
#include "log.h"
#include "paths.h"
#include "supervisor.h"

#define STABLE_US (60 * RV_SEC)
#define BACKOFF_MAX_US (5 * RV_SEC)
#define SPAWN_RETRY_US RV_SEC
#define START_TIMEOUT_US (15 * RV_SEC)
#define STOP_TIMEOUT_US (3 * RV_SEC)
#define TOKEN_MAX 256u
#define START_TRIES 3u /* of the first start: what fails so often does not mend itself */

enum router_state { ROUTER_STOPPED, ROUTER_STARTING, ROUTER_READY, ROUTER_STOPPING, ROUTER_BACKOFF };

static const char *const state_names[] = {
    [ROUTER_STOPPED] = "STOPPED",   [ROUTER_STARTING] = "STARTING", [ROUTER_READY] = "READY",
    [ROUTER_STOPPING] = "STOPPING", [ROUTER_BACKOFF] = "BACKOFF",
};

struct rv_router {
    struct rv_child child; /* first */
    struct rv_supervisor *supervisor;
    enum router_state state;
    struct rv_router_record *record;
    struct event *timer;
    unsigned failed_starts;
    bool set_up; /* RouterSetup was sent: it may be told of workers */
};

static void start(struct rv_router *r);
static void send_to_router(struct rv_supervisor *s, const Rv__Frame *frame, const int *fds, unsigned fd_count);

static void arm(struct rv_router *r, uint64_t delay_us)
{
    struct timeval tv = rv_timeval(delay_us);

    (void)event_add(r->timer, &tv);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_router *r = context;

    (void)fd;
    (void)what;
    if (r->state == ROUTER_BACKOFF)
        start(r);
    else if (r->state == ROUTER_STARTING)
        rv_child_kill(&r->child, "it was not ready in time");
    else if (r->state == ROUTER_STOPPING)
        rv_child_kill(&r->child, "it did not stop in time");
}

/* True = resvisor has never been ready and gives up: whoever waits for its start must not wait for ever. */
static bool give_up(struct rv_router *r)
{
    struct rv_supervisor *s = r->supervisor;

    if (s->ready_told || ++r->failed_starts < START_TRIES)
        return false;
    rv_log_error("the router could not be started %u times; giving up", r->failed_starts);
    s->exit_code = RV_EXIT_INTERNAL;
    r->state = ROUTER_STOPPED;
    rv_supervisor_stop(s, "the router cannot be started");
    return true;
}

static void on_exit_router(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_router *r = (struct rv_router *)child;
    uint64_t now = rv_now_us(), delay;
    char next[32] = "at once";

    (void)event_del(r->timer);
    r->set_up = false;
    if (s->stopping) {
        r->state = ROUTER_STOPPED;
        return;
    }
    if (r->record->ready_us && now - r->record->ready_us > STABLE_US)
        r->record->deaths.consecutive = 0;
    r->record->ready_us = 0;
    (void)rv_deaths_add(&r->record->deaths, now, STABLE_US);
    s->state.counters.router_deaths++;
    if (give_up(r))
        return;
    delay = rv_backoff_us(r->record->deaths.consecutive, BACKOFF_MAX_US, rv_random32());
    if (delay)
        (void)snprintf(next, sizeof(next), "in %.1f s", (double)delay / (double)RV_SEC);
    rv_log_warning("the router %s; restarts %s; running jobs go on", report->text, next);
    r->state = ROUTER_BACKOFF;
    if (delay)
        arm(r, delay);
    else
        start(r);
}

static void start(struct rv_router *r)
{
    struct rv_supervisor *s = r->supervisor;
    const char *argv[] = {"resvisor-router", NULL}, *env[] = {"RESVISOR_CONTROL_FD=3", NULL};
    char path[RV_PATH_MAX];
    struct rv_error err = {0};
    int rc = rv_installed_path(RV_LIBEXEC, "resvisor-router", path, sizeof(path));

    if (s->stopping)
        return;
    if (rc == 0)
        rc = rv_child_spawn(
            s, &r->child, &(struct rv_spawn_options){RV_CHILD_ROUTER, "router", path, argv, env, NULL, NULL, 0}, &err);
    if (rc < 0) {
        rv_log_error("the router could not be started: %s; tried again in 1 s", err.code ? err.message : strerror(-rc));
        if (give_up(r))
            return;
        r->state = ROUTER_BACKOFF;
        arm(r, SPAWN_RETRY_US);
        return;
    }
    r->state = ROUTER_STARTING;
    arm(r, START_TIMEOUT_US);
}

int rv_router_link_init(struct rv_supervisor *s)
{
    struct rv_router *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    s->children->router = r;
    r->supervisor = s;
    r->child.on_exit = on_exit_router;
    r->record = &s->state.router;
    r->child.process = &r->record->process;
    r->timer = event_new(s->base, -1, 0, on_timer, r);
    r->child.log = rv_log_create(s, "router", "router");
    return r->timer && r->child.log ? 0 : -ENOMEM;
}

void rv_router_link_fini(struct rv_supervisor *s)
{
    struct rv_router *r = s->children->router;

    if (r && r->timer)
        event_free(r->timer);
    free(r);
}

void rv_router_refuse_new_jobs(struct rv_supervisor *s)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Drain drain = RV__DRAIN__INIT;

    frame.body_case = RV__FRAME__BODY_DRAIN;
    frame.drain = &drain;
    send_to_router(s, &frame, NULL, 0);
}

void rv_router_start(struct rv_supervisor *s)
{
    start(s->children->router);
}

void rv_router_stop(struct rv_supervisor *s, bool now)
{
    struct rv_router *r = s->children->router;

    if (now)
        rv_child_kill(&r->child, "resvisor stops at once");
    if (r->state == ROUTER_STOPPING || r->state == ROUTER_STOPPED)
        return;
    if (r->child.process->pid <= 0) {
        (void)event_del(r->timer);
        r->state = ROUTER_STOPPED;
        return;
    }
    rv_child_signal(&r->child, SIGTERM);
    r->state = ROUTER_STOPPING;
    arm(r, STOP_TIMEOUT_US);
}

pid_t rv_router_pid(const struct rv_supervisor *s)
{
    return s->children->router->child.process->pid;
}

void rv_router_drain(struct rv_supervisor *s)
{
    struct rv_router *r = s->children->router;

    if (r->child.session)
        rv_peer_drain(r->child.session->peer);
}

const char *rv_router_state(const struct rv_supervisor *s)
{
    return state_names[s->children->router->state];
}

/* ---- setup ------------------------------------------------------------------------------------------------------ */

/* Everything that RouterSetup points to. */
struct setup {
    Rv__RouterSetup message;
    Rv__TypeSetup types[RV_TYPES_MAX];
    Rv__TypeSetup *type_pointers[RV_TYPES_MAX];
    char *model_files[RV_TYPES_MAX][RV_TYPE_MODELS_MAX];
    char *workers[RV_TYPES_MAX * RV_WORKERS_PER_TYPE_MAX];
    char control[RV_PATH_MAX], rpc[RV_PATH_MAX], events[RV_PATH_MAX], token[TOKEN_MAX + 1], http_token[TOKEN_MAX + 1];
    Rv__MarkedJob jobs[RV_JOB_LEDGER_MAX];
    Rv__MarkedJob *job_pointers[RV_JOB_LEDGER_MAX];
};

static void read_token(const char *path, char token[TOKEN_MAX + 1])
{
    int fd = path && path[0] ? open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY) : -1;
    ssize_t n = fd >= 0 ? read(fd, token, TOKEN_MAX) : 0;

    if (path && path[0] && n <= 0)
        rv_log_error("the token file %s cannot be read or is empty: no request that needs it will be admitted", path);
    token[n > 0 ? n : 0] = '\0';
    token[strcspn(token, "\r\n")] = '\0';
    if (fd >= 0)
        (void)close(fd);
}

static char *model_path(const struct rv_config *config, const char *name)
{
    for (uint32_t i = 0; i < config->model_count; i++)
        if (strcmp(config->models[i].name, name) == 0)
            return config->models[i].path;
    return (char *)name;
}

static void setup_types(struct rv_supervisor *s, struct setup *setup)
{
    for (uint32_t i = 0; i < s->config->type_count; i++) {
        const struct rv_config_type *type = &s->config->types[i];
        Rv__TypeSetup *t = &setup->types[i];

        rv__type_setup__init(t);
        t->name = type->name;
        t->primary = type->primary;
        t->queue_limit = type->queue;
        t->job_timeout_ms = type->job_timeout_us / RV_MSEC;
        t->cancel_timeout_ms = type->cancel_timeout_us / RV_MSEC;
        t->n_models = type->model_count;
        t->models = (char **)type->models;
        t->kind = type->kind;
        t->n_accepts = type->accept_count;
        t->accepts = (char **)type->accepts;
        for (uint32_t k = 0; k < type->model_count; k++)
            setup->model_files[i][k] = model_path(s->config, type->models[k]);
        t->n_model_files = type->model_count;
        t->model_files = setup->model_files[i];
        t->state = (char *)rv_worker_state_name(rv_type_state(s, type->name));
        setup->type_pointers[i] = t;
    }
    setup->message.n_types = s->config->type_count;
    setup->message.types = setup->type_pointers;
}

static void setup_jobs(struct rv_supervisor *s, struct setup *setup)
{
    const struct rv_ledger *ledger = &s->state.ledger;

    for (uint32_t i = 0; i < ledger->used; i++) {
        struct rv_ledger_entry *e = &ledger->entries[i];
        Rv__MarkedJob *j = &setup->jobs[i];

        rv__marked_job__init(j);
        j->job_id = e->job_id;
        j->type = e->type;
        j->ended = e->ended;
        j->attempts = e->attempts;
        j->outcome = (Resvisor__V1__ErrorCode)e->outcome;
        j->content_digest.data = e->digest;
        j->content_digest.len = sizeof(e->digest);
        setup->job_pointers[i] = j;
    }
    setup->message.n_jobs = ledger->used;
    setup->message.jobs = setup->job_pointers;
}

static bool worker_is_connectable(const struct rv_worker_facts *facts)
{
    return facts->session && (facts->state == RV_WORKER_READY || facts->state == RV_WORKER_DRAINING);
}

static void setup_fill(struct rv_router *r, struct setup *setup)
{
    struct rv_supervisor *s = r->supervisor;
    const struct rv_config *config = s->config;
    Rv__RouterSetup *m = &setup->message;

    rv__router_setup__init(m);
    (void)snprintf(setup->control, sizeof(setup->control), "%s/" RV_SOCKET_ROUTER, config->runtime_dir);
    (void)snprintf(setup->rpc, sizeof(setup->rpc), "ipc://%s/" RV_SOCKET_RPC, config->runtime_dir);
    (void)snprintf(setup->events, sizeof(setup->events), "ipc://%s/" RV_SOCKET_EVENTS, config->runtime_dir);
    read_token(config->rpc_tcp[0] ? config->rpc_token_file : NULL, setup->token);
    m->control_path = setup->control;
    m->control_gid = config->clients_gid;
    m->rpc_address = config->rpc_enabled ? setup->rpc : (char *)"";
    m->events_address = config->rpc_enabled ? setup->events : (char *)"";
    m->rpc_tcp = setup->token[0] ? config->rpc_tcp : (char *)"";
    m->events_tcp = config->rpc_events_tcp;
    m->token = setup->token;
    m->rpc_gid = config->rpc_gid;
    m->result_bytes = config->rpc_result_bytes;
    m->result_count = config->rpc_result_count;
    m->result_age_ms = config->rpc_result_age_us / RV_MSEC;
    m->jobs_limit = config->rpc_jobs;
    read_token(config->http_listen[0] ? config->http_token_file : NULL, setup->http_token);
    m->http_listen = config->http_listen;
    m->http_token = setup->http_token;
    m->http_connections = config->http_connections;
    m->http_timeout_ms = config->http_timeout_us / RV_MSEC;
    m->http_worker_timeout_ms = config->http_worker_timeout_us / RV_MSEC;
    if (config->http_token_file[0] && !setup->http_token[0]) /* better no front than an open one */
        m->http_listen = (char *)"";
    m->epoch = rv_wall_ms() * 1000 + ++r->record->epoch % 1000; /* another one each time, also after a restart of all */
    setup_types(s, setup);
    setup_jobs(s, setup);
    for (uint32_t i = 0; i < rv_worker_count(s); i++) {
        struct rv_worker_facts facts;

        rv_worker_get_facts(rv_worker_at(s, i), &facts);
        if (worker_is_connectable(&facts))
            setup->workers[m->n_workers++] = (char *)facts.id;
    }
    m->workers = setup->workers;
}

void rv_router_on_hello(struct rv_supervisor *s)
{
    struct rv_router *r = s->children->router;
    struct setup *setup = calloc(1, sizeof(*setup));
    Rv__Frame frame = RV__FRAME__INIT;

    if (!setup) {
        rv_child_kill(&r->child, "no memory for its setup");
        return;
    }
    setup_fill(r, setup);
    frame.body_case = RV__FRAME__BODY_ROUTER_SETUP;
    frame.router_setup = &setup->message;
    rv_session_send(r->child.session, &frame, NULL, 0);
    r->set_up = true;
    for (uint32_t i = 0; i < rv_worker_count(s); i++)
        rv_router_connect_worker(s, rv_worker_at(s, i));
    free(setup);
}

void rv_router_on_ready(struct rv_supervisor *s)
{
    struct rv_router *r = s->children->router;

    if (r->state != ROUTER_STARTING)
        return;
    r->state = ROUTER_READY;
    r->record->ready_us = rv_now_us();
    (void)event_del(r->timer);
    rv_log_info("the router is ready, pid %d", (int)r->child.process->pid);
    rv_supervisor_tell_ready(s);
}

/* ---- what it is told -------------------------------------------------------------------------------------------- */

static void send_to_router(struct rv_supervisor *s, const Rv__Frame *frame, const int *fds, unsigned fd_count)
{
    struct rv_router *r = s->children->router;

    if (r->set_up && r->child.session)
        rv_session_send(r->child.session, frame, fds, fd_count);
}

void rv_router_connect_worker(struct rv_supervisor *s, const struct rv_worker *worker)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__RouterChannel channel = RV__ROUTER_CHANNEL__INIT;
    struct rv_worker_facts facts;
    int pair[2], r;

    rv_worker_get_facts(worker, &facts);
    if (!s->children->router->set_up || !worker_is_connectable(&facts))
        return;
    r = rv_frame_pair(pair);
    if (r < 0) {
        rv_log_error("worker %s cannot be connected to the router: %s; it is restarted", facts.id, strerror(-r));
        rv_worker_kill_by_id(s, facts.id, facts.incarnation, "no descriptors for its connection to the router");
        return;
    }
    channel.worker = (char *)facts.id;
    channel.type = (char *)facts.type;
    channel.incarnation = facts.incarnation;
    channel.http_port = facts.http_port;
    frame.body_case = RV__FRAME__BODY_ROUTER_CHANNEL;
    frame.router_channel = &channel;
    send_to_router(s, &frame, &pair[0], 1);
    rv_session_send(facts.session, &frame, &pair[1], 1);
    (void)close(pair[0]);
    (void)close(pair[1]);
}

void rv_router_worker_gone(struct rv_supervisor *s, const char *worker, uint64_t incarnation, int code,
                           const char *cause, const char *next)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerGone gone = RV__WORKER_GONE__INIT;

    gone.worker = (char *)worker;
    gone.incarnation = incarnation;
    gone.cause = (char *)cause;
    gone.next = (char *)next;
    gone.code = (Resvisor__V1__ErrorCode)code;
    frame.body_case = RV__FRAME__BODY_WORKER_GONE;
    frame.worker_gone = &gone;
    send_to_router(s, &frame, NULL, 0);
}

void rv_router_worker_drain(struct rv_supervisor *s, const char *worker, uint64_t incarnation)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerDrain drain = RV__WORKER_DRAIN__INIT;

    drain.worker = (char *)worker;
    drain.incarnation = incarnation;
    frame.body_case = RV__FRAME__BODY_WORKER_DRAIN;
    frame.worker_drain = &drain;
    send_to_router(s, &frame, NULL, 0);
}

void rv_router_type_state(struct rv_supervisor *s, const char *type)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__TypeState state = RV__TYPE_STATE__INIT;

    if (!s->children || !s->children->router)
        return;
    state.type = (char *)type;
    state.state = (char *)rv_worker_state_name(rv_type_state(s, type));
    for (uint32_t i = 0; i < rv_worker_count(s); i++) {
        struct rv_worker_facts facts;

        rv_worker_get_facts(rv_worker_at(s, i), &facts);
        if (strcmp(facts.type, type) == 0 && facts.last_exit[0])
            state.detail = (char *)facts.last_exit;
    }
    frame.body_case = RV__FRAME__BODY_TYPE_STATE;
    frame.type_state = &state;
    send_to_router(s, &frame, NULL, 0);
}
