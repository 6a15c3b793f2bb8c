/*
 * Templates: processes that have imported what the workers of some types need, and from which those are forked. The
 * life of one is here; how it makes a worker is in birth.c, and its own side in worker/python/resvisor/comfyui.
 *
 * A template is never needed: a worker whose template is not there starts the long way, and says why.
 */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children_private.h"
#include "clock.h"
#include "config.h"
#include "control/control.h"
#include "log.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define DEATHS_MAX 5u /* within DEATH_WINDOW_US: no new one until `resvisor restart` */
#define DEATH_WINDOW_US (300 * RV_SEC)
#define STABLE_US (60 * RV_SEC)
#define BACKOFF_MAX_US (60 * RV_SEC)
#define SPAWN_RETRY_US RV_SEC
#define LEAVE_US (2 * RV_SEC) /* one whose files have changed ends by itself, or is killed */
#define EXIT_OF_NO_USE 78     /* it says that another one would not do better */

struct rv_template {
    struct rv_child child; /* first */
    struct rv_supervisor *supervisor;
    const struct rv_config_type *type; /* the first of its group: python, directory, args and env are equal in all */
    struct rv_template_record *record; /* in the state */
    struct event *timer;
    char parting[RV_EXIT_TEXT_MAX]; /* what it said before it ended: why it is of no use; empty = nothing */
    bool awaited;                   /* workers wait while it starts: not when the one before it died */
};

static void start(struct rv_template *t);

static void set_state(struct rv_template *t, enum rv_worker_state state, uint64_t timer_us)
{
    struct timeval tv = rv_timeval(timer_us);

    t->record->state = state;
    (void)event_del(t->timer);
    if (timer_us)
        (void)event_add(t->timer, &tv);
}

/* ---- groups ----------------------------------------------------------------------------------------------------- */

static bool wants_template(const struct rv_config_type *type)
{
    return strcmp(type->kind, "comfyui") == 0 && strcmp(type->fast_start, "auto") == 0;
}

/* Modules look at arguments and environment when they are imported, so these must be the same. */
static bool same_group(const struct rv_config_type *a, const struct rv_config_type *b)
{
    if (strcmp(a->python, b->python) != 0 || strcmp(a->directory, b->directory) != 0 ||
        strcmp(a->pooling, b->pooling) != 0 || a->arg_count != b->arg_count || a->env_count != b->env_count)
        return false;
    for (uint32_t i = 0; i < a->arg_count; i++)
        if (strcmp(a->args[i], b->args[i]) != 0)
            return false;
    for (uint32_t i = 0; i < a->env_count; i++)
        if (strcmp(a->env[i].key, b->env[i].key) != 0 || strcmp(a->env[i].value, b->env[i].value) != 0)
            return false;
    return true;
}

static struct rv_template *template_of(const struct rv_supervisor *s, const struct rv_config_type *type)
{
    return s->children->template_of_type[type - s->config->types];
}

/* Gives each type its template's number. The number of templates. */
static uint32_t make_groups(const struct rv_config *config, uint32_t *ret_group, uint32_t *ret_first)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < config->type_count; i++) {
        uint32_t g = 0;

        if (!wants_template(&config->types[i]))
            continue;
        while (g < count && !same_group(&config->types[ret_first[g]], &config->types[i]))
            g++;
        if (g == count)
            ret_first[count++] = i;
        ret_group[i] = g;
    }
    return count;
}

/* ---- death ------------------------------------------------------------------------------------------------------ */

static void die(struct rv_template *t, const struct rv_exit_report *report, bool was_stable)
{
    uint64_t delay;
    uint32_t within;

    t->awaited = false;
    if (was_stable)
        t->record->deaths.consecutive = 0;
    within = rv_deaths_add(&t->record->deaths, rv_now_us(), DEATH_WINDOW_US);
    if (within >= DEATHS_MAX || (!report->signaled && report->status == EXIT_OF_NO_USE)) {
        rv_log_warning("%s %s; FAILED: workers start the long way; `resvisor restart %s` resets it", t->record->id,
                       t->record->last_exit, t->type->name);
        set_state(t, RV_WORKER_FAILED, 0);
        return;
    }
    delay = rv_backoff_us(t->record->deaths.consecutive, BACKOFF_MAX_US, rv_random32());
    rv_log_warning("%s %s; until a new one is ready, workers start the long way", t->record->id, t->record->last_exit);
    if (delay)
        set_state(t, RV_WORKER_BACKOFF, delay);
    else
        start(t);
}

static void on_exit_template(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_template *t = (struct rv_template *)child;
    bool was_stable = t->record->ready_us && rv_now_us() - t->record->ready_us >= STABLE_US;

    rv_births_read(s); /* while its state still says why it ended */
    t->record->ready_us = 0;
    (void)snprintf(t->record->last_exit, sizeof(t->record->last_exit), "%s%s%s%s", report->text,
                   t->record->state == RV_WORKER_STARTING ? ", before it was ready" : "", t->parting[0] ? ": " : "",
                   t->parting);
    t->parting[0] = '\0';
    t->record->detail[0] = '\0';
    if (s->stopping)
        set_state(t, RV_WORKER_STOPPED, 0);
    else if (t->record->state == RV_WORKER_DRAINING)
        start(t);
    else
        die(t, report, was_stable);
    rv_workers_start_waiting(s);
}

/* ---- start ------------------------------------------------------------------------------------------------------ */

/* PYTHON -m resvisor.comfyui.template --pooling P DIRECTORY ARGS… */
static void make_command(const struct rv_config_type *type, const char **argv)
{
    const char *const first[] = {type->python, "-m",          "resvisor.comfyui.template",
                                 "--pooling",  type->pooling, type->directory};
    unsigned n = 0;

    while (n < sizeof(first) / sizeof(first[0])) {
        argv[n] = first[n];
        n++;
    }
    for (uint32_t i = 0; i < type->arg_count; i++)
        argv[n++] = type->args[i];
    argv[n] = NULL;
}

static int spawn(struct rv_template *t, struct rv_error *err)
{
    struct rv_supervisor *s = t->supervisor;
    char *own[RV_KIND_ENV_MAX + RV_ENV_MAX] = {NULL}, incarnation[64];
    const char *argv[RV_WORKER_ARGS_MAX + 1], *env[RV_SPAWN_ENV_MAX + 1];
    unsigned count = 0, n = 0;
    int r = rv_worker_kind_environment(t->type, rv_worker_kind_by_name(t->type->kind), own, &count, err);

    /* Of a fixed width: a forked worker writes its own number over it, since /proc/PID/environ, by which strays are
     * known, shows what the program was started with. */
    (void)snprintf(incarnation, sizeof(incarnation), "RESVISOR_INCARNATION=%020llu",
                   (unsigned long long)s->state.counters.next_incarnation);
    env[n++] = "RESVISOR_CONTROL_FD=3";
    env[n++] = incarnation;
    for (unsigned i = 0; i < count; i++)
        env[n++] = own[i];
    env[n] = NULL;
    make_command(t->type, argv);
    if (r >= 0)
        r = rv_child_spawn(
            s, &t->child,
            &(struct rv_spawn_options){RV_CHILD_TEMPLATE, t->record->id, t->type->python, argv, env, NULL, NULL, 0},
            err);
    for (unsigned i = 0; i < count; i++)
        free(own[i]);
    return r;
}

static void start(struct rv_template *t)
{
    struct rv_error err = {0};

    if (t->supervisor->stopping)
        return;
    if (spawn(t, &err) < 0) {
        (void)snprintf(t->record->last_exit, sizeof(t->record->last_exit), "not started: %.*s", RV_EXIT_TEXT_MAX,
                       err.message);
        rv_log_error("%s %s; tried again in 1 s", t->record->id, t->record->last_exit);
        set_state(t, RV_WORKER_BACKOFF, SPAWN_RETRY_US);
        return;
    }
    t->record->starts++;
    set_state(t, RV_WORKER_STARTING, t->type->start_timeout_us);
    rv_log_info("%s started, pid %d", t->record->id, (int)t->child.process->pid);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_template *t = context;
    char reason[128];

    (void)fd;
    (void)what;
    if (t->record->state == RV_WORKER_BACKOFF) {
        start(t);
        rv_workers_start_waiting(t->supervisor);
    } else if (t->record->state == RV_WORKER_STARTING) {
        (void)snprintf(reason, sizeof(reason), "it was not ready within %.1f s (types.%s.start_timeout)",
                       (double)t->type->start_timeout_us / (double)RV_SEC, t->type->name);
        rv_child_kill(&t->child, reason);
    } else if (t->record->state == RV_WORKER_DRAINING) {
        rv_child_kill(&t->child, "its files have changed, and it did not end by itself");
    }
}

void rv_template_on_ready(struct rv_template *t, const Rv__TemplateReady *message)
{
    if (t->record->state != RV_WORKER_STARTING)
        return;
    rv_escape(t->record->detail, sizeof(t->record->detail), message->detail, strlen(message->detail));
    t->record->ready_us = rv_now_us();
    set_state(t, RV_WORKER_READY, 0);
    rv_log_info("%s is ready after %.2f s: %s", t->record->id,
                (double)(t->record->ready_us - t->child.process->started_us) / (double)RV_SEC, t->record->detail);
    rv_workers_start_waiting(t->supervisor);
}

/* ---- workers ---------------------------------------------------------------------------------------------------- */

/* The launcher's own arguments: what follows its name on the command line. */
static const char *const *launcher_arguments(const char *const *argv)
{
    while (*argv && strcmp(*argv, "resvisor.comfyui") != 0)
        argv++;
    return *argv ? argv + 1 : argv;
}

enum rv_fork_answer rv_template_fork(struct rv_supervisor *s, const struct rv_fork_request *request, char *why,
                                     size_t why_size)
{
    struct rv_template *t = template_of(s, request->type);
    struct rv_fork_request launch = *request;
    int r;

    if (!t) {
        if (strcmp(request->type->kind, "comfyui") == 0)
            (void)snprintf(why, why_size, "types.%s.fast_start is off", request->type->name);
        return RV_FORK_NONE;
    }
    if (t->record->state == RV_WORKER_DRAINING || (t->record->state == RV_WORKER_STARTING && t->awaited))
        return RV_FORK_WAIT;
    if (t->record->state != RV_WORKER_READY || !t->child.session) {
        (void)snprintf(why, why_size, "%s is %s: %s", t->record->id, rv_worker_state_name(t->record->state),
                       t->record->last_exit);
        return RV_FORK_NONE;
    }
    launch.arguments = launcher_arguments(request->arguments);
    r = rv_birth_begin(s, t, t->child.session, &launch);
    if (r < 0) {
        (void)snprintf(why, why_size, "%s could not be asked: %s", t->record->id, strerror(-r));
        return RV_FORK_NONE;
    }
    return RV_FORK_UNDER_WAY;
}

void rv_template_on_error(struct rv_template *t, uint64_t id, const Resvisor__V1__Error *message)
{
    bool renewed = message->code == ERROR(NOT_READY) && t->record->state == RV_WORKER_READY;
    char text[RV_EXIT_TEXT_MAX];

    rv_escape(text, sizeof(text), message->message, strlen(message->message));
    if (renewed) {
        rv_log_info("%s ends, and a new one is made: %s", t->record->id, text);
        t->awaited = true;
        set_state(t, RV_WORKER_DRAINING, LEAVE_US);
    }
    if (id == 0)
        (void)snprintf(t->parting, sizeof(t->parting), "%s", text);
    else
        rv_birth_refused(t->supervisor, id, renewed || t->record->state == RV_WORKER_DRAINING, text);
}

void rv_template_counts_fork(struct rv_template *t)
{
    t->record->forks++;
}

void rv_template_listen(struct rv_template *t)
{
    if (t->child.session)
        rv_peer_drain(t->child.session->peer);
}

bool rv_template_is_leaving(const struct rv_template *t)
{
    return t->record->state == RV_WORKER_DRAINING;
}

void rv_template_is_hung(struct rv_template *t, const char *reason)
{
    rv_child_kill(&t->child, reason);
}

void rv_template_reset(struct rv_supervisor *s, const struct rv_config_type *type)
{
    struct rv_template *t = template_of(s, type);

    if (!t || (t->record->state != RV_WORKER_FAILED && t->record->state != RV_WORKER_BACKOFF))
        return;
    t->record->deaths = (struct rv_deaths){0};
    t->awaited = true;
    start(t);
}

/* ---- all of them ------------------------------------------------------------------------------------------------ */

int rv_templates_init(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;
    uint32_t group[RV_TYPES_MAX], first[RV_TYPES_MAX], count = make_groups(s->config, group, first);

    c->templates = calloc(count ? count : 1, sizeof(*c->templates));
    c->template_of_type = calloc(s->config->type_count ? s->config->type_count : 1, sizeof(*c->template_of_type));
    if (!c->templates || !c->template_of_type || rv_state_place_templates(&s->state, count) < 0 ||
        rv_births_init(s) < 0)
        return -ENOMEM;
    for (uint32_t i = 0; i < s->config->type_count; i++)
        if (wants_template(&s->config->types[i]))
            c->template_of_type[i] = &c->templates[group[i]];
    for (uint32_t g = 0; g < count; g++) {
        struct rv_template *t = &c->templates[g];

        t->record = &s->state.templates[g];
        t->supervisor = s;
        t->type = &s->config->types[first[g]];
        t->awaited = true;
        t->child.on_exit = on_exit_template;
        t->child.process = &t->record->process;
        (void)snprintf(t->record->id, sizeof(t->record->id), "template/%u", g);
        t->timer = event_new(s->base, -1, 0, on_timer, t);
        t->child.log = rv_log_create(s, t->record->id, "template");
        if (!t->timer || !t->child.log)
            return -ENOMEM;
    }
    return 0;
}

void rv_templates_fini(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;

    rv_births_fini(s);
    for (uint32_t i = 0; c->templates && i < s->state.template_count; i++)
        if (c->templates[i].timer)
            event_free(c->templates[i].timer);
    free(c->templates);
    free(c->template_of_type);
}

void rv_templates_start(struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->state.template_count; i++)
        start(&s->children->templates[i]);
}

void rv_templates_stop(struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->state.template_count; i++) {
        struct rv_template *t = &s->children->templates[i];

        if (t->child.process->pid > 0)
            rv_child_kill(&t->child, "resvisor stops");
        else
            set_state(t, RV_WORKER_STOPPED, 0);
    }
}

struct rv_template *rv_template_of_child(struct rv_child *child)
{
    return child && child->process->kind == RV_CHILD_TEMPLATE ? (struct rv_template *)child : NULL;
}

const char *rv_template_name(const struct rv_template *t)
{
    return t->record->id;
}

const struct rv_template_record *rv_template_at(const struct rv_supervisor *s, uint32_t i, const char **types,
                                                uint32_t max, uint32_t *ret_count)
{
    *ret_count = 0;
    for (uint32_t k = 0; k < s->config->type_count && *ret_count < max; k++)
        if (s->children->template_of_type[k] == &s->children->templates[i])
            types[(*ret_count)++] = s->config->types[k].name;
    return &s->state.templates[i];
}

uint64_t rv_template_rss(const struct rv_supervisor *s, uint32_t i)
{
    pid_t pid = s->state.templates[i].process.pid;
    unsigned long long pages = 0;
    char path[64];
    FILE *f;

    if (pid <= 0)
        return 0;
    (void)snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    f = fopen(path, "re");
    if (f && fscanf(f, "%*u %llu", &pages) != 1)
        pages = 0;
    if (f)
        (void)fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}
