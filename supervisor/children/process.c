/* Starting, signalling and ending processes; what workers, router and loaders share. */
#include <dirent.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "children.h"
#include "children_private.h"
#include "clock.h"
#include "control/control.h"
#include "log.h"
#include "pool/devices.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define CHILD_CONTROL_FD 3
#define EXIT_CANNOT_EXECUTE 127
#define CUT_OFF_US (5 * RV_SEC) /* a child may live on without its connection for so long */

extern char **environ;

static void on_cut_off(int fd, short what, void *context);

int rv_children_init(struct rv_supervisor *s)
{
    struct rv_children *c = calloc(1, sizeof(*c));
    uint32_t workers = 0;

    if (!c)
        return -ENOMEM;
    s->children = c;
    for (uint32_t i = 0; i < s->config->type_count; i++)
        workers += s->config->types[i].workers;
    if (rv_templates_init(s) < 0)
        return -ENOMEM;
    c->child_limit = workers + s->config->max_loads + 1 + s->state.template_count + RV_DEVICE_CHILDREN_MAX;
    c->alive = calloc(c->child_limit, sizeof(*c->alive));
    c->cut_off_event = event_new(s->base, -1, 0, on_cut_off, c);
    if (!c->alive || !c->cut_off_event || rv_workers_init(s, workers) < 0 || rv_router_link_init(s) < 0)
        return -ENOMEM;
    return rv_logs_init(s);
}

void rv_children_fini(struct rv_supervisor *s)
{
    if (!s->children)
        return;
    rv_workers_fini(s);
    rv_templates_fini(s);
    rv_router_link_fini(s);
    rv_logs_fini(s);
    if (s->children->cut_off_event)
        event_free(s->children->cut_off_event);
    free(s->children->alive);
    free(s->children);
    s->children = NULL;
}

/* ---- start ------------------------------------------------------------------------------------------------------ */

const char **rv_child_environment_create(const char *const *extra)
{
    size_t inherited = 0, added = 0, n = 0;
    const char **env;

    while (environ[inherited])
        inherited++;
    while (extra && extra[added])
        added++;
    env = calloc(inherited + added + 1, sizeof(*env));
    if (!env)
        return NULL;
    for (size_t i = 0; i < inherited; i++) {
        const char *equal = strchr(environ[i], '=');
        bool replaced = strncmp(environ[i], "NOTIFY_SOCKET=", 14) == 0;

        for (size_t k = 0; k < added && equal && !replaced; k++)
            replaced = strncmp(environ[i], extra[k], (size_t)(equal - environ[i]) + 1) == 0;
        if (!replaced)
            env[n++] = environ[i];
    }
    for (size_t k = 0; k < added; k++)
        env[n++] = extra[k];
    return env;
}

/* When memory runs out, the kernel shall take a worker or a loader, which come back, and not the supervisor. */
static void prefer_for_oom(enum rv_child_kind kind)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    (void)!write(fd, kind == RV_CHILD_ROUTER ? "0" : "300", kind == RV_CHILD_ROUTER ? 1 : 3);
    (void)close(fd);
}

/* Closes all but the first descriptors and those that the child is given. */
static void pass_descriptors(const struct rv_spawn_options *options)
{
    unsigned first = CHILD_CONTROL_FD + 1;

    for (unsigned i = 0; i < options->fd_count; i++) {
        unsigned fd = (unsigned)options->fds[i];

        if (fd > first)
            (void)syscall(SYS_close_range, first, fd - 1, 0);
        (void)fcntl((int)fd, F_SETFD, 0);
        first = fd + 1;
    }
    (void)syscall(SYS_close_range, first, ~0U, 0);
}

/* In the child, between clone and exec: only async-signal-safe calls. */
static void child_exec(const struct rv_spawn_options *options, const char *const *env, int control, int log,
                       pid_t keeper)
{
    sigset_t none;

    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != keeper)
        _exit(EXIT_CANNOT_EXECUTE);
    for (int sig = 1; sig < NSIG; sig++)
        (void)signal(sig, SIG_DFL);
    /* At the limit of descriptors nothing new can be opened, so nothing is: our ends take the places 0 to 3, which the
     * supervisor keeps filled and which no end of a new child is, and what the supervisor has open goes. */
    (void)close(STDIN_FILENO);
    if (open("/dev/null", O_RDONLY) != STDIN_FILENO || dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0 ||
        dup2(control, CHILD_CONTROL_FD) < 0)
        _exit(EXIT_CANNOT_EXECUTE);
    pass_descriptors(options);
    prefer_for_oom(options->kind);
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)execve(options->path, (char *const *)options->argv, (char *const *)env);
    {
        const char *reason = strerror(errno);

        (void)!write(STDERR_FILENO, "cannot execute ", 15);
        (void)!write(STDERR_FILENO, options->path, strlen(options->path));
        (void)!write(STDERR_FILENO, ": ", 2);
        (void)!write(STDERR_FILENO, reason, strlen(reason));
        (void)!write(STDERR_FILENO, "\n", 1);
    }
    _exit(EXIT_CANNOT_EXECUTE);
}

/* The number of processes that the kernel has killed for want of memory since boot; UINT64_MAX = not known now. */
static uint64_t oom_kills(void)
{
    char line[128];
    unsigned long long n = UINT64_MAX;
    FILE *f = fopen("/proc/vmstat", "re");

    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "oom_kill %llu", &n) == 1)
            break;
    if (f)
        (void)fclose(f);
    return n;
}

static pid_t clone_child(const struct rv_spawn_options *options, const char *const *env, int control, int log,
                         pid_t keeper, int *ret_pidfd)
{
    sigset_t all, old;
    int pidfd = -1;
    long pid;

    /* A signal in the child before exec would reach our handlers' sockets: none until the child has reset them. */
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_BLOCK, &all, &old);
    pid = syscall(SYS_clone, (unsigned long)(CLONE_PARENT | CLONE_PIDFD), NULL, &pidfd, NULL, 0UL);
    if (pid == 0)
        child_exec(options, env, control, log, keeper);
    if (pid < 0)
        pid = -errno;
    (void)sigprocmask(SIG_SETMASK, &old, NULL);
    *ret_pidfd = pidfd;
    return (pid_t)pid;
}

void rv_child_adopt(struct rv_supervisor *s, struct rv_child *child, const struct rv_process *process, int control)
{
    static const Rv__Role roles[] = {
        [RV_CHILD_WORKER] = RV__ROLE__ROLE_WORKER, [RV_CHILD_LOADER] = RV__ROLE__ROLE_LOADER,
        [RV_CHILD_ROUTER] = RV__ROLE__ROLE_ROUTER, [RV_CHILD_TEMPLATE] = RV__ROLE__ROLE_TEMPLATE,
        [RV_CHILD_DEVICE] = RV__ROLE__ROLE_DEVICE,
    };
    struct rv_children *c = s->children;

    *child->process = *process;
    child->cut_off_us = 0;
    child->killed_by_us = false;
    child->kill_reason[0] = '\0';
    child->oom_kills_at_start = oom_kills();
    c->alive[c->alive_count++] = child;
    child->session = rv_session_create(s, control, roles[process->kind], child);
    if (!child->session) /* it will be reported like any other death */
        rv_child_kill(child, "no memory for its connection");
}

int rv_child_spawn(struct rv_supervisor *s, struct rv_child *child, const struct rv_spawn_options *options,
                   struct rv_error *err)
{
    const char **env = rv_child_environment_create(options->env);
    int control[2] = {-1, -1}, log[2] = {-1, -1}, pidfd = -1, r;
    pid_t pid = 0;

    r = env ? rv_frame_pair(control) : -ENOMEM;
    if (r == 0 && pipe2(log, O_CLOEXEC) < 0)
        r = -errno;
    if (r == 0 && s->children->alive_count >= s->children->child_limit)
        r = -EAGAIN;
    if (r < 0)
        goto out;
    pid = clone_child(options, env, control[1], log[1], s->keeper_pid, &pidfd);
    if (pid < 0) {
        r = pid;
        goto out;
    }
    rv_child_adopt(s, child,
                   &(struct rv_process){
                       .kind = options->kind,
                       .pid = pid,
                       .pidfd = pidfd,
                       .incarnation = s->state.counters.next_incarnation++,
                       .started_us = rv_now_us(),
                   },
                   control[0]);
    control[0] = -1;
    if (child->log && rv_log_open_pipe(child->log, log[0]) == 0)
        log[0] = -1;
    r = 0;
out:
    for (int i = 0; i < 2; i++) {
        if (control[i] >= 0)
            (void)close(control[i]);
        if (log[i] >= 0)
            (void)close(log[i]);
    }
    free(env);
    if (r < 0)
        return rv_error_set(err, -r, ERROR(LIMIT), "cannot start %s: %s", options->name, strerror(-r));
    return 0;
}

/* ---- signals ---------------------------------------------------------------------------------------------------- */

void rv_child_signal(struct rv_child *child, int signal)
{
    if (child->process->pid <= 0)
        return;
    /* The pid is ours until we acknowledge its exit, so the group cannot be a stranger's. The pidfd is for the moment
     * before the child's own setpgid. Never both: a second SIGINT would interrupt what the first one made it do. */
    if (kill(-child->process->pid, signal) < 0)
        (void)syscall(SYS_pidfd_send_signal, child->process->pidfd, signal, NULL, 0);
}

void rv_child_kill(struct rv_child *child, const char *reason)
{
    if (child->process->pid <= 0)
        return;
    if (!child->killed_by_us) {
        child->killed_by_us = true;
        (void)snprintf(child->kill_reason, sizeof(child->kill_reason), "%s", reason);
    }
    rv_child_signal(child, SIGKILL);
}

static void arm_cut_off(struct rv_children *c)
{
    static const struct timeval soon = {CUT_OFF_US / RV_SEC, 0};

    if (!event_pending(c->cut_off_event, EV_TIMEOUT, NULL))
        (void)event_add(c->cut_off_event, &soon);
}

static void on_cut_off(int fd, short what, void *context)
{
    struct rv_children *c = context;
    uint64_t now = rv_now_us();

    (void)fd;
    (void)what;
    for (uint32_t i = 0; i < c->alive_count; i++) {
        struct rv_child *child = c->alive[i];

        if (child->cut_off_us == 0 || child->killed_by_us)
            continue;
        if (now - child->cut_off_us >= CUT_OFF_US)
            rv_child_kill(child, "its connection to the supervisor ended, and it did not");
        else
            arm_cut_off(c);
    }
}

void rv_child_cut_off(struct rv_supervisor *s, struct rv_child *child)
{
    child->session = NULL;
    child->cut_off_us = rv_now_us();
    arm_cut_off(s->children);
}

/* ---- ends ------------------------------------------------------------------------------------------------------- */

static void report_fill(const struct rv_child *child, int code, int status, struct rv_exit_report *report)
{
    uint64_t kills = oom_kills();
    double seconds;

    report->signaled = code != CLD_EXITED;
    report->status = status;
    report->uptime_us = rv_now_us() - child->process->started_us;
    report->oom = report->signaled && status == SIGKILL && !child->killed_by_us && kills != UINT64_MAX &&
                  kills > child->oom_kills_at_start;
    seconds = (double)report->uptime_us / (double)RV_SEC;
    if (child->killed_by_us)
        (void)snprintf(report->text, sizeof(report->text), "killed after %.1f s: %s", seconds, child->kill_reason);
    else if (report->signaled)
        (void)snprintf(report->text, sizeof(report->text), "killed by signal %d (SIG%s%s) after %.1f s%s", status,
                       sigabbrev_np(status) ? sigabbrev_np(status) : "?", code == CLD_DUMPED ? ", core dumped" : "",
                       seconds, report->oom ? ", most likely by the kernel for want of memory" : "");
    else
        (void)snprintf(report->text, sizeof(report->text), "exited with code %d after %.1f s", status, seconds);
    (void)rv_text_mend(report->text); /* a reason to kill it that was cut */
}

/* Takes it off the list of those alive; NULL = it is not on it. */
static struct rv_child *take_alive(struct rv_children *c, pid_t pid)
{
    for (uint32_t i = 0; i < c->alive_count; i++) {
        struct rv_child *child = c->alive[i];

        if (child->process->pid != pid)
            continue;
        c->alive[i] = c->alive[--c->alive_count];
        return child;
    }
    return NULL;
}

void rv_children_exited(struct rv_supervisor *s, pid_t pid, int code, int status)
{
    struct rv_children *c = s->children;
    struct rv_exit_report report;
    struct rv_child *child = take_alive(c, pid);

    if (!child) { /* a forked worker whose first message nobody has read yet? */
        rv_births_read(s);
        child = take_alive(c, pid);
    }
    if (!child)
        return; /* a grandchild that outlived its parent */
    report_fill(child, code, status, &report);
    rv_router_drain(s); /* what job it had, if that was marked a moment ago */
    if (child->session)
        rv_peer_drain(child->session->peer); /* what it said before it died counts */
    if (child->session) {
        struct rv_session *session = child->session;

        child->session = NULL;
        rv_session_destroy(session);
    }
    if (child->log)
        rv_log_close_pipe(child->log);
    (void)close(child->process->pidfd);
    child->process->pidfd = -1;
    child->process->pid = 0;
    child->on_exit(s, child, &report);
}

uint32_t rv_children_alive(const struct rv_supervisor *s)
{
    return s->children->alive_count;
}

static const struct rv_child *child_by_pid(const struct rv_children *c, pid_t pid)
{
    for (uint32_t i = 0; i < c->alive_count; i++)
        if (c->alive[i]->process->pid == pid)
            return c->alive[i];
    return NULL;
}

const char *rv_child_name_of_pid(const struct rv_supervisor *s, pid_t pid)
{
    static const char *const names[] = {[RV_CHILD_WORKER] = "worker",
                                        [RV_CHILD_LOADER] = "loader",
                                        [RV_CHILD_ROUTER] = "router",
                                        [RV_CHILD_TEMPLATE] = "template",
                                        [RV_CHILD_DEVICE] = "self-test"};
    const struct rv_child *child = child_by_pid(s->children, pid);

    return child ? names[child->process->kind] : "";
}

/* ---- strays ----------------------------------------------------------------------------------------------------- */

/* The incarnation in a process' environment; 0 = it has none, or is not readable. */
static uint64_t stray_incarnation(pid_t pid)
{
    static const char key[] = "RESVISOR_INCARNATION=";
    static char text[64 * 1024];
    char path[64];
    ssize_t n;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    n = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    for (char *p = text; p < text + n; p += strlen(p) + 1)
        if (strncmp(p, key, sizeof(key) - 1) == 0)
            return strtoull(p + sizeof(key) - 1, NULL, 10);
    return 0;
}

static bool incarnation_is_alive(const struct rv_children *c, uint64_t incarnation)
{
    if (rv_birth_is_expected(c, incarnation))
        return true;
    for (uint32_t i = 0; i < c->alive_count; i++)
        if (c->alive[i]->process->incarnation == incarnation)
            return true;
    return false;
}

static void sweep(struct rv_supervisor *s)
{
    char path[64], text[16 * 1024];
    ssize_t n;
    int fd;

    /* A process whose parent died is the keeper's child now. Killing it makes its own children the keeper's, whose ends
     * bring us here again: so a whole tree goes. */
    (void)snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)s->keeper_pid, (int)s->keeper_pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    n = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (n <= 0)
        return;
    text[n] = '\0';
    if (n == (ssize_t)sizeof(text) - 1) { /* the last number may be cut, and so be somebody else's */
        char *space = strrchr(text, ' ');

        if (space)
            *space = '\0';
    }
    for (char *p = text, *end; *p; p = end) {
        pid_t pid = (pid_t)strtol(p, &end, 10);
        uint64_t incarnation;

        if (end == p)
            break;
        while (*end == ' ')
            end++;
        if (pid == getpid() || child_by_pid(s->children, pid))
            continue;
        incarnation = stray_incarnation(pid);
        if (incarnation == 0 || incarnation_is_alive(s->children, incarnation))
            continue;
        rv_log_warning("process %d was left behind by a worker that is gone; killing it", (int)pid);
        (void)kill(pid, SIGKILL); /* it cannot be reaped, so its id cannot be reused, before we acknowledge its exit */
    }
}

void rv_children_sweep_strays(struct rv_supervisor *s)
{
    /* The list is exact only while no child is taken off it (proc(5)), and the keeper reaps the one whose exit was
     * acknowledged just now. That can spoil one of two readings. */
    sweep(s);
    sweep(s);
}
