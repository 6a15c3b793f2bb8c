/*
 * The supervisor's children: starting them, their logs, their ends. Workers with their restart policy are in worker.c,
 * templates in template.c, workers that a template forks in birth.c, the router in router_link.c, loaders in
 * pool/load.c; process.c is what they share.
 *
 * A child is the keeper's child from birth (clone with CLONE_PARENT); we hold its pidfd and the other end of its
 * descriptor 3. One thread, the supervisor's.
 */
#ifndef RV_CHILDREN_H
#define RV_CHILDREN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "control.pb-c.h"
#include "state.h"

struct rv_child;
struct rv_peer;
struct rv_session;
struct rv_supervisor;
struct rv_worker;
struct rv_log;
struct rv_config_type;

/* How it ended. */
struct rv_exit_report {
    bool signaled;
    int status; /* exit code or signal */
    uint64_t uptime_us;
    bool oom;                    /* the kernel killed something for want of memory in its lifetime */
    char text[RV_EXIT_TEXT_MAX]; /* "killed by signal 9 (SIGKILL) after 12.3 s" */
};

/* A process with descriptor 3 and a log. Embedded in what it is for (worker, loader, router). */
struct rv_child {
    struct rv_process
        *process; /* the fact of it: a worker's and the router's are in the state, a loader's in its load */
    struct rv_session *session; /* its connection; NULL once that is closed */
    struct rv_log *log;         /* kept over restarts; NULL = none yet */
    uint64_t oom_kills_at_start;
    uint64_t cut_off_us; /* when its connection ended before it did; 0 = it has not */
    bool killed_by_us;   /* SIGKILL came from us: `kill_reason` says why */
    char kill_reason[RV_EXIT_TEXT_MAX - 64];
    /* Called when the process has ended and everything it sent was read. */
    void (*on_exit)(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report);
};

#define RV_SPAWN_ENV_MAX (RV_ENV_MAX + 16u)

struct rv_spawn_options {
    enum rv_child_kind kind;
    const char *name;        /* for logs: "image/0", "loader", "router" */
    const char *path;        /* absolute */
    const char *const *argv; /* NULL-terminated */
    const char *const *env;  /* NULL-terminated "KEY=value", added to the supervisor's own environment */
    const int *fds;          /* further descriptors that it inherits under their numbers, ascending; not taken over */
    const char *const *fd_names; /* the variables of env that have their numbers */
    unsigned fd_count;
};

/* ---- process.c ---- */

int rv_children_init(struct rv_supervisor *s);
void rv_children_fini(struct rv_supervisor *s);

/*
 * Starts a process: own group, PR_SET_PDEATHSIG, /dev/null, log pipe, descriptor 3 with a session behind it. 0, or a
 * negative errno with err filled and child unchanged (process.pid 0). A program that cannot be executed ends with
 * code 127 and says why in its log.
 */
int rv_child_spawn(struct rv_supervisor *s, struct rv_child *child, const struct rv_spawn_options *options,
                   struct rv_error *err);

/*
 * The same for a process that exists already, the keeper's child too: its record becomes *process (pidfd taken over),
 * and control, taken over, its connection. There is room, since children and workers are counted at the start.
 */
void rv_child_adopt(struct rv_supervisor *s, struct rv_child *child, const struct rv_process *process, int control);

/* The supervisor's environment without what is for one child only, then the child's own. The texts are not copied: only
 * the array is the caller's to free. NULL = no memory. */
const char **rv_child_environment_create(const char *const *extra);

/* Signals the child's group, each process once. No process: nothing happens. */
void rv_child_signal(struct rv_child *child, int signal);

/* SIGKILL to the group, with a reason for the obituary. */
void rv_child_kill(struct rv_child *child, const char *reason);

/*
 * Its connection has ended, by it or by us. A process that ends closes it a moment before; one that lives on can be
 * neither asked nor told anything, and is killed soon.
 */
void rv_child_cut_off(struct rv_supervisor *s, struct rv_child *child);

/* From the keeper: the process is a zombie. Unknown pids (reparented grandchildren) are fine. */
void rv_children_exited(struct rv_supervisor *s, pid_t pid, int code, int status);

/* Kills processes that a worker started and left behind (RESVISOR_INCARNATION of a dead one in their environment). */
void rv_children_sweep_strays(struct rv_supervisor *s);

/* Processes that have not ended yet. */
uint32_t rv_children_alive(const struct rv_supervisor *s);

/* What kind of child that is, for people; "" = none of ours. */
const char *rv_child_name_of_pid(const struct rv_supervisor *s, pid_t pid);

/* ---- worker.c ---- */

/* Starts all workers of all types. */
void rv_workers_start(struct rv_supervisor *s);

/* Drains and stops all; now = SIGKILL at once. */
void rv_workers_stop(struct rv_supervisor *s, bool now);
bool rv_workers_all_stopped(const struct rv_supervisor *s);

/* `resvisor restart TYPE`: answers request `id` of the session when all its workers are ready again. */
int rv_workers_restart_type(struct rv_supervisor *s, struct rv_session *session, uint64_t id, const char *type,
                            struct rv_error *err);

/* Gives the next worker its turn to warm up, unless one has it or models are still preloaded. Called when that may have
 * changed. */
void rv_workers_next_turn(struct rv_supervisor *s);
void rv_workers_forget_session(struct rv_supervisor *s, struct rv_session *session);

struct rv_worker *rv_worker_of_child(struct rv_child *child);
const char *rv_worker_name(const struct rv_worker *worker);
void rv_worker_on_ready(struct rv_supervisor *s, struct rv_worker *worker, const Rv__WorkerReady *message);
void rv_worker_on_pong(struct rv_supervisor *s, struct rv_worker *worker, const Rv__Pong *message);

/* From the router: this worker got a job, or is done with it. */
void rv_worker_mark_job(struct rv_supervisor *s, const char *worker, const char *job_id, bool ended);
void rv_worker_kill_by_id(struct rv_supervisor *s, const char *worker, uint64_t incarnation, const char *reason);

/* For status, the router's setup, and logs. */
uint32_t rv_worker_count(const struct rv_supervisor *s);
struct rv_worker *rv_worker_at(const struct rv_supervisor *s, uint32_t i);
struct rv_worker_facts {
    const char *id, *type;
    enum rv_worker_state state;
    pid_t pid;
    uint64_t incarnation, started_us;
    uint32_t starts;
    const char *last_exit, *job, *detail;
    unsigned http_port; /* 0 = it serves none */
    struct rv_session *session;
    struct rv_log *log;
};
void rv_worker_get_facts(const struct rv_worker *worker, struct rv_worker_facts *ret_facts);

/* The best state of a type's workers: what the router needs to know of it. */
enum rv_worker_state rv_type_state(const struct rv_supervisor *s, const char *type);

/* ---- template.c ---- */

/* Starts the templates; before the workers that wait for them. */
void rv_templates_start(struct rv_supervisor *s);

/* SIGKILL: a template has nothing to save. */
void rv_templates_stop(struct rv_supervisor *s);

struct rv_template;
struct rv_template *rv_template_of_child(struct rv_child *child);
const char *rv_template_name(const struct rv_template *t);
void rv_template_on_ready(struct rv_template *t, const Rv__TemplateReady *message);
void rv_template_on_error(struct rv_template *t, uint64_t id, const Resvisor__V1__Error *message);

/* The state's record, and the types whose workers it makes: at most `max` names. */
const struct rv_template_record *rv_template_at(const struct rv_supervisor *s, uint32_t i, const char **types,
                                                uint32_t max, uint32_t *ret_count);

/* Resident memory in bytes; 0 = not known. Its proportional part is not told: the kernel would walk all of its pages,
 * for 20 ms and more, in which nobody gets a lease. */
uint64_t rv_template_rss(const struct rv_supervisor *s, uint32_t i);

/* ---- router_link.c ---- */

void rv_router_start(struct rv_supervisor *s);

/* Resvisor is stopping: new jobs get ERROR_SHUTTING_DOWN from now on. */
void rv_router_refuse_new_jobs(struct rv_supervisor *s);
void rv_router_stop(struct rv_supervisor *s, bool now);
pid_t rv_router_pid(const struct rv_supervisor *s);

/* Reads what the router has already sent. */
void rv_router_drain(struct rv_supervisor *s);
const char *rv_router_state(const struct rv_supervisor *s);
struct rv_log *rv_router_log(const struct rv_supervisor *s);

/* The router said Hello: send it everything. */
void rv_router_on_hello(struct rv_supervisor *s);
void rv_router_on_ready(struct rv_supervisor *s);

/* A worker has become ready: connect the two. Nothing happens while there is no router; its setup will. */
void rv_router_connect_worker(struct rv_supervisor *s, const struct rv_worker *worker);
/* code: what its job fails with if it was ended for what it is not to blame for; 0 = it died. */
void rv_router_worker_gone(struct rv_supervisor *s, const char *worker, uint64_t incarnation, int code,
                           const char *cause, const char *next);
void rv_router_worker_drain(struct rv_supervisor *s, const char *worker, uint64_t incarnation);
void rv_router_type_state(struct rv_supervisor *s, const char *type);

/* ---- logs.c ---- */

#define RV_LOG_RING (64u * 1024) /* bytes kept per worker, router or loader */

/* A log is kept under a name over restarts of its process. NULL = no memory. */
struct rv_log *rv_log_create(struct rv_supervisor *s, const char *name, const char *type);
void rv_log_destroy(struct rv_log *log);

/* Reads `pipe` from now on (taken over on success). 0 or negative errno. */
int rv_log_open_pipe(struct rv_log *log, int pipe);

/* The last line that its process has finished; "" = none. The log's. */
const char *rv_log_last_line(const struct rv_log *log);

/* The process has ended: reads what is there and closes the pipe. */
void rv_log_close_pipe(struct rv_log *log);

/* Answers a LogRequest with what is kept of all logs of that type, and goes on sending if follow. */
int rv_logs_send(struct rv_supervisor *s, struct rv_session *session, uint64_t id, const Rv__LogRequest *request,
                 struct rv_error *err);
void rv_logs_forget_session(struct rv_supervisor *s, struct rv_session *session);

/* The supervisor's own lines go to the log named "resvisor". */
int rv_logs_init(struct rv_supervisor *s);

#endif
