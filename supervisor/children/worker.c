/* A worker's life: states, restart policy, pings, draining. The restart policy is in on_exit and nowhere else. */
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
#include "pool/pool.h"
#include "supervisor.h"
#include "worker_private.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define STABLE_US (60 * RV_SEC) /* ready for so long: earlier deaths no longer delay a restart */
#define BACKOFF_MAX_US (60 * RV_SEC)
#define SPAWN_RETRY_US RV_SEC      /* when the process could not even be made */
#define PORT_RETRY_US (5 * RV_SEC) /* when somebody else has its port */
#define EXIT_DO_NOT_RESTART 78     /* EX_CONFIG: the worker says that a restart does not help */
#define RESTART_WAITS_MAX 64u
#define LAST_WORDS_MAX 320 /* bytes of its last line that are shown as the reason of its end */

struct rv_restart_wait {
    struct rv_session *session;
    uint64_t id;
    char type[RV_NAME_MAX + 1];
};

static void start(struct rv_worker *w);

static void arm(struct rv_worker *w, uint64_t delay_us)
{
    struct timeval tv = rv_timeval(delay_us);

    (void)event_add(w->timer, &tv);
}

static void set_state(struct rv_worker *w, enum rv_worker_state state)
{
    w->record->state = state;
    (void)event_del(w->timer);
    rv_router_type_state(w->supervisor, w->type->name);
}

/* ---- who waits for a restart ------------------------------------------------------------------------------------ */

/* True = the wait is over and was answered. */
static bool restart_wait_check(struct rv_supervisor *s, const struct rv_restart_wait *wait)
{
    const struct rv_children *c = s->children;
    struct rv_error err = {0};

    for (uint32_t i = 0; i < c->worker_count; i++) {
        const struct rv_worker *w = &c->workers[i];

        if (strcmp(w->type->name, wait->type) != 0 || w->record->state == RV_WORKER_READY)
            continue;
        if (w->record->state != RV_WORKER_FAILED && !s->stopping)
            return false;
        rv_error_set(&err, EIO, s->stopping ? ERROR(SHUTTING_DOWN) : ERROR(TYPE_FAILED), "%s: %s", w->record->id,
                     w->record->last_exit);
    }
    rv_session_reply(wait->session, wait->id, &err);
    return true;
}

static void restart_waits_check(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;

    for (uint32_t i = 0; i < c->restart_wait_count;) {
        struct rv_restart_wait wait = c->restart_waits[i];

        if (!restart_wait_check(s, &wait)) {
            i++;
            continue;
        }
        c->restart_waits[i] = c->restart_waits[--c->restart_wait_count];
    }
}

void rv_workers_forget_session(struct rv_supervisor *s, struct rv_session *session)
{
    struct rv_children *c = s->children;

    for (uint32_t i = 0; c && i < c->restart_wait_count;) {
        if (c->restart_waits[i].session == session)
            c->restart_waits[i] = c->restart_waits[--c->restart_wait_count];
        else
            i++;
    }
}

/* ---- turns to warm up: one worker at a time, in the order of the configuration --------------------------------- */

static void end_turn(struct rv_worker *w)
{
    if (w->turn_fd >= 0)
        (void)close(w->turn_fd);
    w->turn_fd = -1;
    w->has_turn = false;
}

void rv_workers_next_turn(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;
    struct rv_worker *next = NULL;

    for (uint32_t i = 0; c && i < c->worker_count; i++) {
        if (c->workers[i].has_turn)
            return;
        if (!next && c->workers[i].turn_fd >= 0)
            next = &c->workers[i];
    }
    if (!next || s->stopping || rv_pool_is_preloading(s))
        return;
    (void)!write(next->turn_fd, "", 1); /* it is dead if that fails: then its exit gives the turn on */
    end_turn(next);
    next->has_turn = true;
    if (next->record->state == RV_WORKER_STARTING)
        arm(next, next->type->start_timeout_us); /* waiting for it did not count */
}

/* ---- death ------------------------------------------------------------------------------------------------------ */

struct verdict {
    enum rv_worker_state state;
    uint64_t delay_us; /* BACKOFF: until the next start */
    char next[128];    /* in words */
};

static void judge(struct rv_worker *w, const struct rv_exit_report *report, struct verdict *v)
{
    uint64_t now = rv_now_us();
    uint32_t within;

    v->delay_us = 0;
    w->no_device = false;
    if (w->supervisor->stopping || (w->record->state == RV_WORKER_DRAINING && !w->record->start_again)) {
        v->state = RV_WORKER_STOPPED;
        (void)snprintf(v->next, sizeof(v->next), "stays stopped");
        return;
    }
    if (w->record->state == RV_WORKER_DRAINING) {
        v->state = RV_WORKER_BACKOFF;
        (void)snprintf(v->next, sizeof(v->next), "restarts as asked");
        return;
    }
    if (w->lost_code) { /* no fault of its own */
        w->no_device = rv_worker_lacks_device(w, &(struct rv_error){0});
        v->state = w->no_device ? RV_WORKER_FAILED : RV_WORKER_BACKOFF;
        (void)snprintf(v->next, sizeof(v->next), w->no_device ? "FAILED until the device is back" : "restarts at once");
        return;
    }
    if (w->record->ready_us && now - w->record->ready_us >= STABLE_US)
        w->record->deaths.consecutive = 0;
    within = rv_deaths_add(&w->record->deaths, now, w->type->death_window_us);
    if (!report->signaled && report->status == EXIT_DO_NOT_RESTART) {
        v->state = RV_WORKER_FAILED;
        (void)snprintf(v->next, sizeof(v->next),
                       "FAILED: it says that a restart does not help; `resvisor restart %s` "
                       "resets it",
                       w->type->name);
    } else if (within >= w->type->max_deaths) {
        v->state = RV_WORKER_FAILED;
        (void)snprintf(v->next, sizeof(v->next), "FAILED: %u deaths within %llu s; `resvisor restart %s` resets it",
                       within, (unsigned long long)(w->type->death_window_us / RV_SEC), w->type->name);
    } else {
        v->state = RV_WORKER_BACKOFF;
        v->delay_us = rv_backoff_us(w->record->deaths.consecutive, BACKOFF_MAX_US, rv_random32());
        if (v->delay_us == 0)
            (void)snprintf(v->next, sizeof(v->next), "restarts at once");
        else
            (void)snprintf(v->next, sizeof(v->next), "restarts in %.1f s", (double)v->delay_us / (double)RV_SEC);
    }
}

static void on_exit_worker(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_worker *w = (struct rv_worker *)child;
    bool as_asked = w->record->state == RV_WORKER_DRAINING && !report->signaled && report->status == 0;
    char cause[RV_EXIT_TEXT_MAX + LAST_WORDS_MAX + 4];
    const char *words = "";
    struct verdict v;

    judge(w, report, &v);
    if (!as_asked)
        s->state.counters.worker_deaths++;
    if (!report->signaled && report->status != 0 && child->log) /* it chose to end, so it has most likely said why */
        words = rv_log_last_line(child->log);
    (void)snprintf(w->record->last_exit, sizeof(w->record->last_exit), "%s%s%s%s%s%.*s", report->text,
                   w->record->state == RV_WORKER_STARTING ? ", before it was ready" : "",
                   w->record->job[0] ? ", in job " : "", w->record->job, *words ? ": " : "", LAST_WORDS_MAX, words);
    (void)snprintf(cause, sizeof(cause), "%s%s%.*s", report->text, *words ? ": " : "", LAST_WORDS_MAX, words);
    (void)rv_text_mend(w->record->last_exit);
    (void)rv_text_mend(cause);
    rv_log(as_asked ? RV_LOG_INFO : RV_LOG_WARNING, "worker %s %s; %s", w->record->id, w->record->last_exit, v.next);
    rv_router_worker_gone(s, w->record->id, child->process->incarnation, w->lost_code, cause, v.next);
    w->lost_code = 0;
    end_turn(w);
    w->record->job[0] = '\0';
    w->record->detail[0] = '\0';
    w->record->ready_us = 0;
    w->record->start_again = false;
    set_state(w, v.state);
    if (v.state == RV_WORKER_FAILED || v.state == RV_WORKER_STOPPED)
        rv_port_give_up(&w->record->port);
    if (v.state == RV_WORKER_BACKOFF) {
        if (v.delay_us)
            arm(w, v.delay_us);
        else
            start(w);
    }
    rv_workers_next_turn(s);
    restart_waits_check(s);
}

/* ---- start ------------------------------------------------------------------------------------------------------ */

static void spawn_failed(struct rv_worker *w, const struct rv_error *err)
{
    /* No descriptors, no processes, no memory: none of it is the worker's fault, so it does not count as a death. */
    (void)snprintf(w->record->last_exit, sizeof(w->record->last_exit), "not started: %.*s", RV_EXIT_TEXT_MAX,
                   err->message);
    (void)rv_text_mend(w->record->last_exit);
    rv_log_error("worker %s %s; tried again in 1 s", w->record->id, w->record->last_exit);
    set_state(w, RV_WORKER_BACKOFF);
    arm(w, SPAWN_RETRY_US);
    rv_workers_next_turn(w->supervisor); /* it may have had it */
}

/* Somebody else has its port: tried again until it is free, said when it is news. */
static void port_failed(struct rv_worker *w, const struct rv_error *err)
{
    char text[sizeof(w->record->last_exit)];

    (void)snprintf(text, sizeof(text), "not started: %s", err->message);
    if (strcmp(text, w->record->last_exit) != 0)
        rv_log_error("worker %s %s; tried again every %.0f s", w->record->id, text,
                     (double)PORT_RETRY_US / (double)RV_SEC);
    memcpy(w->record->last_exit, text, sizeof(text));
    set_state(w, RV_WORKER_BACKOFF);
    arm(w, PORT_RETRY_US);
}

int rv_worker_kind_environment(const struct rv_config_type *type, const struct rv_worker_kind *kind, char **env,
                               unsigned *ret_count, struct rv_error *err)
{
    unsigned of_kind;
    int r = kind->environment ? kind->environment(type, env, ret_count, err) : 0;

    of_kind = *ret_count;
    for (uint32_t i = 0; i < type->env_count && r >= 0; i++) {
        size_t length = strlen(type->env[i].key);
        bool merged = false;

        for (unsigned k = 0; k < of_kind; k++)
            merged |= strncmp(env[k], type->env[i].key, length) == 0 && env[k][length] == '=';
        if (merged)
            continue;
        r = asprintf(&env[*ret_count], "%s=%s", type->env[i].key, type->env[i].value);
        if (r < 0)
            rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for its environment");
        else
            (*ret_count)++;
    }
    return r < 0 ? r : 0;
}

/* A process is there. */
static void started(struct rv_worker *w)
{
    w->waits = w->renewed = false;
    w->record->starts++;
    w->ping_unanswered = false;
    set_state(w, RV_WORKER_STARTING);
    arm(w, w->type->start_timeout_us);
    rv_log_info("worker %s started, pid %d%s%s", w->record->id, (int)w->child.process->pid,
                w->record->start_way[0] ? "; " : "", w->record->start_way);
    rv_workers_next_turn(w->supervisor);
}

/* There is nothing that it could do: it starts when the device is back. */
static void wait_for_device(struct rv_worker *w, const struct rv_error *err)
{
    w->no_device = true;
    (void)snprintf(w->record->last_exit, sizeof(w->record->last_exit), "not started: %s", err->message);
    rv_log_warning("worker %s %s; it starts when the device can be used", w->record->id, w->record->last_exit);
    set_state(w, RV_WORKER_FAILED);
    rv_port_give_up(&w->record->port);
    restart_waits_check(w->supervisor);
}

/* A template's answer: how it goes on. */
static void on_forked(struct rv_supervisor *s, struct rv_child *child, enum rv_fork_end end, const char *why)
{
    struct rv_worker *w = (struct rv_worker *)child;

    (void)s;
    if (end == RV_FORK_BORN) {
        (void)snprintf(w->record->start_way, sizeof(w->record->start_way), "%s", why);
        started(w);
        return;
    }
    if (end == RV_FORK_FAILED || w->renewed) /* files that change again and again are not waited for */
        (void)snprintf(w->long_way, sizeof(w->long_way), "%s", why);
    w->renewed = true;
    start(w);
}

/* Forks it or spawns it. 1 = it is on its way, and on_forked or another start follows; 0 or negative errno with err. */
static int make_process(struct rv_worker *w, const struct rv_spawn_options *options, struct rv_error *err)
{
    enum rv_fork_answer answer = RV_FORK_NONE;
    char why[RV_EXIT_TEXT_MAX] = "";
    int r;

    if (w->long_way[0])
        (void)snprintf(why, sizeof(why), "%s", w->long_way);
    else
        answer = rv_template_fork(w->supervisor,
                                  &(struct rv_fork_request){.child = &w->child,
                                                            .type = w->type,
                                                            .name = options->name,
                                                            .arguments = options->argv,
                                                            .env = options->env,
                                                            .fds = options->fds,
                                                            .fd_names = options->fd_names,
                                                            .fd_count = options->fd_count,
                                                            .done = on_forked},
                                  why, sizeof(why));
    w->long_way[0] = w->record->start_way[0] = '\0';
    w->waits = answer == RV_FORK_WAIT;
    if (answer != RV_FORK_NONE) {
        set_state(w, RV_WORKER_STARTING);
        return 1;
    }
    r = rv_child_spawn(w->supervisor, &w->child, options, err);
    if (r == 0 && why[0])
        (void)snprintf(w->record->start_way, sizeof(w->record->start_way), "started the long way: %.200s", why);
    return r;
}

void rv_worker_start_again(struct rv_worker *w)
{
    start(w);
}

void rv_workers_start_waiting(struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->children->worker_count; i++)
        if (s->children->workers[i].waits)
            start(&s->children->workers[i]);
}

static void start(struct rv_worker *w)
{
    struct rv_supervisor *s = w->supervisor;
    char path[RV_PATH_MAX], http[64], turn_text[64], id[128], type[128], incarnation[64], socket[RV_PATH_MAX + 64];
    char *own_env[RV_KIND_ENV_MAX + RV_ENV_MAX] = {NULL};
    unsigned own_count = 0;
    const char *argv[RV_WORKER_ARGS_MAX + 1], *env[RV_SPAWN_ENV_MAX + 1];
    struct rv_error err = {0};
    unsigned n = 0, fd_count = 0;
    const char *fd_names[2];
    int r = 0, fds[2], turn[2] = {-1, -1};

    if (s->stopping)
        return;
    end_turn(w); /* of a start that came to nothing */
    w->no_device = false;
    if (rv_worker_lacks_device(w, &err)) {
        wait_for_device(w, &err);
        return;
    }
    if (w->kind->command(w->type, path, sizeof(path), argv, &err) < 0) {
        spawn_failed(w, &err);
        return;
    }
    if (w->kind->has_port && rv_port_take(w->type, w->number, &w->record->port, &err) < 0) {
        port_failed(w, &err);
        return;
    }
    (void)snprintf(id, sizeof(id), "RESVISOR_WORKER=%s", w->record->id);
    (void)snprintf(type, sizeof(type), "RESVISOR_TYPE=%s", w->type->name);
    (void)snprintf(incarnation, sizeof(incarnation), "RESVISOR_INCARNATION=%llu",
                   (unsigned long long)s->state.counters.next_incarnation);
    (void)snprintf(socket, sizeof(socket), "RESVISOR_SOCKET=%s/" RV_SOCKET_CONTROL, s->config->runtime_dir);
    env[n++] = "RESVISOR_CONTROL_FD=3";
    env[n++] = id;
    env[n++] = type;
    env[n++] = incarnation;
    env[n++] = socket;
    if (w->kind->has_port) {
        (void)snprintf(http, sizeof(http), "RESVISOR_HTTP_FD=%d", w->record->port.fd);
        env[n++] = http;
        fds[fd_count] = w->record->port.fd;
        fd_names[fd_count++] = "RESVISOR_HTTP_FD";
    }
    if (w->type->warmup[0]) {
        r = pipe2(turn, O_CLOEXEC) < 0 ? rv_error_set(&err, errno, ERROR(LIMIT), "a pipe: %s", strerror(errno)) : 0;
        (void)snprintf(turn_text, sizeof(turn_text), "RESVISOR_TURN_FD=%d", turn[0]);
        env[n++] = turn_text;
        fds[fd_count] = turn[0];
        fd_names[fd_count] = "RESVISOR_TURN_FD";
        fd_count += r >= 0;
    }
    if (fd_count == 2 && fds[0] > fds[1]) {
        fds[0] = turn[0];
        fds[1] = w->record->port.fd;
        fd_names[0] = "RESVISOR_TURN_FD";
        fd_names[1] = "RESVISOR_HTTP_FD";
    }
    r = r < 0 ? r : rv_worker_kind_environment(w->type, w->kind, own_env, &own_count, &err);
    for (unsigned i = 0; i < own_count; i++)
        env[n++] = own_env[i];
    env[n] = NULL;
    if (r >= 0)
        r = make_process(w,
                         &(struct rv_spawn_options){.kind = RV_CHILD_WORKER,
                                                    .name = w->record->id,
                                                    .path = path,
                                                    .argv = argv,
                                                    .env = env,
                                                    .fds = fds,
                                                    .fd_names = fd_names,
                                                    .fd_count = fd_count},
                         &err);
    for (unsigned i = 0; i < own_count; i++)
        free(own_env[i]);
    if (turn[0] >= 0)
        (void)close(turn[0]);
    w->turn_fd = turn[1];
    if (r < 0) {
        end_turn(w);
        spawn_failed(w, &err);
        return;
    }
    if (r == 0)
        started(w);
    else if (w->waits) /* for its template: another start follows, with another turn */
        end_turn(w);
}

void rv_worker_on_ready(struct rv_supervisor *s, struct rv_worker *w, const Rv__WorkerReady *message)
{
    if (w->record->state != RV_WORKER_STARTING && w->record->state != RV_WORKER_READY)
        return;
    rv_escape(w->record->detail, sizeof(w->record->detail), message->detail, strlen(message->detail));
    if (w->record->start_way[0]) {
        size_t n = strlen(w->record->detail);

        (void)snprintf(w->record->detail + n, sizeof(w->record->detail) - n, "; %s", w->record->start_way);
    }
    if (w->record->state == RV_WORKER_READY)
        return; /* what it says of itself has changed */
    w->record->ready_us = rv_now_us();
    set_state(w, RV_WORKER_READY);
    rv_log_info("worker %s is ready after %.2f s: %s", w->record->id,
                (double)(w->record->ready_us - w->child.process->started_us) / (double)RV_SEC, w->record->detail);
    rv_router_connect_worker(s, w);
    end_turn(w);
    rv_workers_next_turn(s);
    restart_waits_check(s);
}

/* ---- pings ------------------------------------------------------------------------------------------------------ */

static void send_ping(struct rv_worker *w)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Ping ping = RV__PING__INIT;

    if (!w->child.session)
        return;
    ping.sequence = ++w->ping_sequence;
    frame.body_case = RV__FRAME__BODY_PING;
    frame.ping = &ping;
    w->ping_sent_us = rv_now_us();
    w->ping_unanswered = true;
    rv_session_send(w->child.session, &frame, NULL, 0);
}

static void kill_hung(struct rv_worker *w, const char *what, uint64_t quiet_us)
{
    char reason[RV_EXIT_TEXT_MAX];

    (void)snprintf(reason, sizeof(reason), "hung: %s for %.1f s", what, (double)quiet_us / (double)RV_SEC);
    rv_child_kill(&w->child, reason);
}

static void tick_ready(struct rv_worker *w)
{
    uint64_t now = rv_now_us();

    if (!w->record->job[0])
        return; /* an idle worker is not pinged, so an idle system does not wake up */
    /* Were we stopped ourselves? Then the answer may be waiting: it gets its full time again. */
    if (now - w->tick_us > 2 * w->type->ping_interval_us + RV_SEC)
        w->ping_sent_us = now;
    w->tick_us = now;
    if (w->ping_unanswered && now - w->ping_sent_us >= w->type->ping_timeout_us) {
        kill_hung(w, "no answer to a ping", now - w->ping_sent_us);
        return;
    }
    if (!w->ping_unanswered)
        send_ping(w);
    arm(w, w->type->ping_interval_us);
}

void rv_worker_on_pong(struct rv_supervisor *s, struct rv_worker *w, const Rv__Pong *message)
{
    (void)s;
    if (message->sequence != w->ping_sequence)
        return;
    w->ping_unanswered = false;
    if (message->job_id[0] == '\0') {
        /* Marked busy, but idle: the job is on its way, or its end was marked by a router that is dead. */
        if (++w->empty_pongs > 2)
            w->record->job[0] = '\0';
        return;
    }
    w->empty_pongs = 0;
    if (w->type->stall_timeout_us && message->quiet_ms * RV_MSEC > w->type->stall_timeout_us)
        kill_hung(w, "its job shows no sign of life", message->quiet_ms * RV_MSEC);
}

static struct rv_worker *find(const struct rv_supervisor *s, const char *id)
{
    for (uint32_t i = 0; i < s->children->worker_count; i++)
        if (strcmp(s->children->workers[i].record->id, id) == 0)
            return &s->children->workers[i];
    return NULL;
}

void rv_worker_mark_job(struct rv_supervisor *s, const char *id, const char *job_id, bool ended)
{
    struct rv_worker *w = find(s, id);

    if (!w)
        return;
    if (ended) {
        if (strcmp(w->record->job, job_id) != 0)
            return;
        w->record->job[0] = '\0';
        if (w->record->state == RV_WORKER_READY)
            (void)event_del(w->timer);
        return;
    }
    (void)snprintf(w->record->job, sizeof(w->record->job), "%s", job_id);
    w->empty_pongs = 0;
    w->ping_unanswered = false;
    if (w->record->state == RV_WORKER_READY) {
        w->tick_us = rv_now_us();
        arm(w, w->type->ping_interval_us);
    }
}

void rv_worker_kill_by_id(struct rv_supervisor *s, const char *id, uint64_t incarnation, const char *reason)
{
    struct rv_worker *w = find(s, id);
    char text[RV_EXIT_TEXT_MAX];

    if (w && w->child.process->incarnation == incarnation)
        rv_child_kill(&w->child, rv_escape(text, sizeof(text), reason, strlen(reason)));
}

/* ---- draining --------------------------------------------------------------------------------------------------- */

/* The next signal of its kind's order, in the end SIGKILL. */
static void stop_next(struct rv_worker *w)
{
    const struct rv_stop_step *step = &w->kind->stop[w->stop_step];
    char reason[RV_EXIT_TEXT_MAX];

    if (step->signal) {
        w->stop_step++;
        w->stop_us += step->wait_us;
        rv_child_signal(&w->child, step->signal);
        arm(w, step->wait_us);
        return;
    }
    (void)snprintf(reason, sizeof(reason), "it did not end within %.1f s of being asked",
                   (double)w->stop_us / (double)RV_SEC);
    rv_child_kill(&w->child, reason);
}

static void drain(struct rv_worker *w, bool start_again)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Drain body = RV__DRAIN__INIT;

    w->record->start_again = start_again;
    if (w->record->state == RV_WORKER_STARTING && w->child.process->pid <= 0) { /* asked of a template: not there yet */
        rv_births_forget(w->supervisor, &w->child);
        w->waits = false;
        end_turn(w);
        set_state(w, RV_WORKER_STOPPED);
        rv_workers_next_turn(w->supervisor);
    }
    switch (w->record->state) {
    case RV_WORKER_STARTING:
    case RV_WORKER_READY:
        rv_router_worker_drain(w->supervisor, w->record->id, w->child.process->incarnation);
        frame.body_case = RV__FRAME__BODY_DRAIN;
        frame.drain = &body;
        w->stop_step = 0;
        if (w->record->state == RV_WORKER_STARTING) { /* it has nothing to finish */
            set_state(w, RV_WORKER_DRAINING);
            w->stop_us = 0;
            stop_next(w);
            break;
        }
        if (w->child.session)
            rv_session_send(w->child.session, &frame, NULL, 0);
        set_state(w, RV_WORKER_DRAINING);
        w->stop_us = w->type->stop_timeout_us;
        arm(w, w->stop_us);
        break;
    case RV_WORKER_DRAINING:
        break; /* under way: only what follows has changed */
    default:   /* no process */
        set_state(w, RV_WORKER_STOPPED);
        if (start_again) {
            w->record->deaths = (struct rv_deaths){0};
            start(w);
        }
    }
}

static void tick_starting(struct rv_worker *w)
{
    char reason[RV_EXIT_TEXT_MAX];

    /* Weights may take minutes: their loading does not count. */
    if (w->turn_fd >= 0 || (w->child.session && rv_load_session_waits(w->supervisor, w->child.session))) {
        arm(w, w->type->start_timeout_us);
        return;
    }
    (void)snprintf(reason, sizeof(reason), "it was not ready within %.1f s (types.%s.start_timeout)",
                   (double)w->type->start_timeout_us / (double)RV_SEC, w->type->name);
    rv_child_kill(&w->child, reason);
}

static void (*const timers[RV_WORKER_STATE_COUNT])(struct rv_worker *) = {
    [RV_WORKER_STARTING] = tick_starting,
    [RV_WORKER_READY] = tick_ready,
    [RV_WORKER_DRAINING] = stop_next,
    [RV_WORKER_BACKOFF] = start,
};

static void on_timer(int fd, short what, void *context)
{
    struct rv_worker *w = context;

    (void)fd;
    (void)what;
    if (timers[w->record->state])
        timers[w->record->state](w);
}

/* ---- all of them ------------------------------------------------------------------------------------------------ */

int rv_workers_init(struct rv_supervisor *s, uint32_t count)
{
    struct rv_children *c = s->children;

    c->workers = calloc(count ? count : 1, sizeof(*c->workers));
    c->restart_waits = calloc(RESTART_WAITS_MAX, sizeof(*c->restart_waits));
    if (!c->workers || !c->restart_waits || rv_state_place_workers(&s->state, count) < 0)
        return -ENOMEM;
    for (uint32_t t = 0; t < s->config->type_count; t++) {
        for (uint32_t i = 0; i < s->config->types[t].workers; i++) {
            struct rv_worker *w = &c->workers[c->worker_count];

            w->record = &s->state.workers[c->worker_count++];
            w->supervisor = s;
            w->type = &s->config->types[t];
            w->kind = rv_worker_kind_by_name(w->type->kind);
            w->number = i;
            w->record->port.fd = -1;
            w->turn_fd = -1;
            w->child.on_exit = on_exit_worker;
            w->child.process = &w->record->process;
            (void)snprintf(w->record->type, sizeof(w->record->type), "%s", w->type->name);
            (void)snprintf(w->record->id, sizeof(w->record->id), "%.*s/%u", (int)RV_NAME_MAX, w->type->name, i);
            w->timer = event_new(s->base, -1, 0, on_timer, w);
            w->child.log = rv_log_create(s, w->record->id, w->type->name);
            if (!w->timer || !w->child.log || !w->kind)
                return -ENOMEM;
        }
    }
    return 0;
}

void rv_workers_fini(struct rv_supervisor *s)
{
    struct rv_children *c = s->children;

    for (uint32_t i = 0; i < c->worker_count; i++) {
        if (c->workers[i].timer)
            event_free(c->workers[i].timer);
        rv_port_give_up(&c->workers[i].record->port);
        end_turn(&c->workers[i]);
    }
    free(c->workers);
    free(c->restart_waits);
}

void rv_workers_start(struct rv_supervisor *s)
{
    rv_templates_start(s);
    for (uint32_t i = 0; i < s->children->worker_count; i++)
        start(&s->children->workers[i]);
}

void rv_workers_stop(struct rv_supervisor *s, bool now)
{
    rv_templates_stop(s);
    for (uint32_t i = 0; i < s->children->worker_count; i++) {
        struct rv_worker *w = &s->children->workers[i];

        drain(w, false);
        if (now)
            rv_child_kill(&w->child, "resvisor stops at once");
    }
    restart_waits_check(s);
}

bool rv_workers_all_stopped(const struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->children->worker_count; i++)
        if (s->children->workers[i].child.process->pid > 0)
            return false;
    return true;
}

int rv_workers_restart_type(struct rv_supervisor *s, struct rv_session *session, uint64_t id, const char *type,
                            struct rv_error *err)
{
    struct rv_children *c = s->children;
    struct rv_restart_wait *wait;
    char name[RV_NAME_MAX + 1];
    bool found = false;

    for (uint32_t i = 0; i < c->worker_count; i++)
        found = found || strcmp(c->workers[i].type->name, type) == 0;
    if (!found)
        return rv_error_set(err, ENOENT, ERROR(NO_SUCH_TYPE), "no workflow type \"%s\"",
                            rv_escape(name, sizeof(name), type, strlen(type)));
    if (c->restart_wait_count >= RESTART_WAITS_MAX)
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "%u restarts are being waited for", RESTART_WAITS_MAX);
    wait = &c->restart_waits[c->restart_wait_count++];
    *wait = (struct rv_restart_wait){.session = session, .id = id};
    (void)snprintf(wait->type, sizeof(wait->type), "%s", type);
    for (uint32_t i = 0; i < c->worker_count; i++) {
        if (strcmp(c->workers[i].type->name, type) != 0)
            continue;
        rv_template_reset(s, c->workers[i].type);
        drain(&c->workers[i], true);
    }
    return 0;
}

struct rv_worker *rv_worker_of_child(struct rv_child *child)
{
    return child && child->process->kind == RV_CHILD_WORKER ? (struct rv_worker *)child : NULL;
}

const char *rv_worker_name(const struct rv_worker *w)
{
    return w->record->id;
}

uint32_t rv_worker_count(const struct rv_supervisor *s)
{
    return s->children->worker_count;
}

struct rv_worker *rv_worker_at(const struct rv_supervisor *s, uint32_t i)
{
    return &s->children->workers[i];
}

void rv_worker_get_facts(const struct rv_worker *w, struct rv_worker_facts *ret_facts)
{
    *ret_facts = (struct rv_worker_facts){
        .id = w->record->id,
        .type = w->type->name,
        .state = w->record->state,
        .pid = w->child.process->pid,
        .incarnation = w->child.process->incarnation,
        .started_us = w->child.process->started_us,
        .starts = w->record->starts,
        .last_exit = w->record->last_exit,
        .detail = w->record->detail,
        .http_port = w->record->port.fd >= 0 ? w->record->port.number : 0,
        .job = w->record->job,
        .session = w->child.session,
        .log = w->child.log,
    };
}

enum rv_worker_state rv_type_state(const struct rv_supervisor *s, const char *type)
{
    static const uint8_t rank[RV_WORKER_STATE_COUNT] = {
        [RV_WORKER_READY] = 6,    [RV_WORKER_STARTING] = 5, [RV_WORKER_BACKOFF] = 4,
        [RV_WORKER_DRAINING] = 3, [RV_WORKER_STOPPED] = 2,  [RV_WORKER_FAILED] = 1,
    };
    enum rv_worker_state best = RV_WORKER_FAILED;

    for (uint32_t i = 0; i < s->children->worker_count; i++) {
        const struct rv_worker *w = &s->children->workers[i];

        if (strcmp(w->type->name, type) == 0 && rank[w->record->state] > rank[best])
            best = w->record->state;
    }
    return best;
}
