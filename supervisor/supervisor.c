#include "supervisor.h"

#include <errno.h>
#include <event2/event.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "children/children.h"
#include "clock.h"
#include "control/control.h"
#include "error.h"
#include "keeper_link.h"
#include "log.h"
#include "pool/devices.h"
#include "pool/pool.h"
#include "start.h"

/* ---- the end ---------------------------------------------------------------------------------------------------- */

void rv_supervisor_check_stopped(struct rv_supervisor *s)
{
    if (!s->stopping)
        return;
    /* The router stays until the workers are gone: it takes their last results and answers those who wait. */
    if (rv_workers_all_stopped(s)) {
        rv_router_stop(s, false);
        rv_devices_stop(s, false);
    }
    if (rv_children_alive(s) == 0)
        (void)event_base_loopbreak(s->base);
}

void rv_supervisor_stop(struct rv_supervisor *s, const char *why)
{
    bool again = s->stopping;

    rv_log_info("stopping: %s%s", why, again ? ", for the second time: at once" : "");
    s->stopping = true;
    if (!again)
        rv_router_refuse_new_jobs(s);
    rv_load_cancel_all(s);
    rv_workers_stop(s, again);
    rv_devices_stop(s, again);
    if (again)
        rv_router_stop(s, true);
    rv_supervisor_check_stopped(s);
}

void rv_supervisor_tell_ready(struct rv_supervisor *s)
{
    if (s->ready_told)
        return;
    s->ready_told = true;
    rv_keeper_link_ready(s);
    rv_log_info("ready: %s", s->config->runtime_dir);
}

static void on_signal(int signal, short what, void *context)
{
    (void)what;
    if (signal != SIGHUP)
        rv_supervisor_stop(context, "asked by a signal");
    else
        rv_log_info("SIGHUP: the configuration is read at start only; use `resvisor stop` and `resvisor start`");
}

/* ---- the start -------------------------------------------------------------------------------------------------- */

static void raise_limits(void)
{
    struct rlimit limit;

    /* Every model, lease and client is a descriptor; descriptors in flight count too. */
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    /* One thread, small frames: one arena of malloc, and freed memory goes back. */
    (void)mallopt(M_ARENA_MAX, 1);
}

static int add_signals(struct rv_supervisor *s)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGQUIT, SIGHUP};
    sigset_t none;

    for (unsigned i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        s->signal_events[i] = evsignal_new(s->base, signals[i], on_signal, s);
        if (!s->signal_events[i] || event_add(s->signal_events[i], NULL) < 0)
            return -ENOMEM;
    }
    /* The keeper started us with these blocked, so that none could end us before somebody listens. */
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    return 0;
}

static void on_fatal(int err)
{
    rv_log_error("libevent gave up with error %d", err);
    _exit(RV_EXIT_INTERNAL);
}

static int init(struct rv_supervisor *s)
{
    int r;

    raise_limits();
    event_set_fatal_callback(on_fatal);
    s->base = event_base_new();
    if (!s->base || event_base_priority_init(s->base, 2) < 0)
        return -ENOMEM;
    r = rv_state_init(&s->state);
    if (r == 0)
        r = rv_keeper_link_init(s);
    if (r == 0)
        r = add_signals(s);
    if (r == 0)
        r = rv_pool_init(s);
    if (r == 0)
        r = rv_devices_init(s);
    if (r == 0)
        r = rv_children_init(s);
    if (r == 0)
        r = rv_control_init(s);
    return r;
}

static void fini(struct rv_supervisor *s)
{
    rv_control_fini(s);
    rv_children_fini(s);
    rv_devices_fini(s);
    rv_pool_fini(s);
    rv_keeper_link_fini(s);
    rv_state_fini(&s->state);
    for (unsigned i = 0; i < sizeof(s->signal_events) / sizeof(s->signal_events[0]); i++)
        if (s->signal_events[i])
            event_free(s->signal_events[i]);
    if (s->base)
        event_base_free(s->base);
    rv_config_destroy(s->config);
}

int rv_supervisor_main(int argc, char **argv)
{
    struct rv_supervisor s = {0};
    struct rv_start_arguments a;
    bool go_on;
    int r, code;

    (void)prctl(PR_SET_NAME, "resvisor-super");
    code = rv_start_arguments_read(&rv_command_supervisor, argc, argv, &a, &go_on);
    if (!go_on)
        return code;
    s.config = a.config;
    rv_log_init("resvisor", s.config->log_level);
    r = init(&s);
    if (r < 0) {
        rv_log_error("the supervisor cannot start: %s", strerror(-r));
        code = RV_EXIT_INTERNAL;
        goto out;
    }
    rv_log_info("resvisor " RV_VERSION " starts, pid %d, runtime directory %s", (int)getpid(), s.config->runtime_dir);
    rv_router_start(&s);
    rv_devices_start(&s);
    rv_pool_preload(&s);
    rv_workers_start(&s);

    (void)event_base_loop(s.base, EVLOOP_NO_EXIT_ON_EMPTY);

    rv_log_info("stopped");
    code = s.exit_code;
out:
    fini(&s);
    rv_args_fini(&a.args);
    return code;
}
