/* What the files of children/ share among themselves. */
#ifndef RV_CHILDREN_PRIVATE_H
#define RV_CHILDREN_PRIVATE_H

#include "children.h"

struct event;
struct rv_log_follower;
struct rv_router;

struct rv_children {
    struct rv_child **alive; /* processes that have not ended; child_limit places */
    uint32_t alive_count, child_limit;
    struct event *cut_off_event; /* looks for children without a connection */

    struct rv_worker *workers; /* all of all types, in the order of the configuration */
    uint32_t worker_count;
    struct rv_restart_wait *restart_waits;
    uint32_t restart_wait_count;

    struct rv_router *router;

    struct rv_template *templates;         /* as many as the state has records */
    struct rv_template **template_of_type; /* by the type's place in the configuration; NULL = it has none */
    struct rv_birth_list *births;          /* workers that a template was asked for */

    struct rv_log *logs; /* list of all logs */
    struct rv_log *own_log;
    struct rv_log_follower *followers;
    uint32_t follower_count;
};

/* ---- template.c and birth.c: workers that are forked ---- */

enum rv_fork_answer {
    RV_FORK_NONE,      /* it must be started the long way; `why` says why, empty = this type has no template */
    RV_FORK_WAIT,      /* its template will be ready: rv_workers_start_waiting is called then, or when it cannot be */
    RV_FORK_UNDER_WAY, /* `done` is called once, later */
};

enum rv_fork_end {
    RV_FORK_BORN,    /* the child is alive */
    RV_FORK_RENEWED, /* the template had to be made anew, since its files have changed: ask again */
    RV_FORK_FAILED,  /* `why` says why */
};

struct rv_fork_request {
    struct rv_child *child;
    const struct rv_config_type *type;
    const char *name;             /* the worker's id */
    const char *const *arguments; /* the command line of the long way, NULL-terminated */
    const char *const *env;       /* as in rv_spawn_options, and the next three */
    const int *fds;
    const char *const *fd_names;
    unsigned fd_count;
    void (*done)(struct rv_supervisor *s, struct rv_child *child, enum rv_fork_end end, const char *why);
};

int rv_templates_init(struct rv_supervisor *s);
void rv_templates_fini(struct rv_supervisor *s);
enum rv_fork_answer rv_template_fork(struct rv_supervisor *s, const struct rv_fork_request *request, char *why,
                                     size_t why_size);

/* Nobody waits for that fork any more: `done` is not called, and the process ends by itself if it comes to life. */
void rv_births_forget(struct rv_supervisor *s, const struct rv_child *child);

/* `resvisor restart TYPE`: a template that has died too often gets another chance. */
void rv_template_reset(struct rv_supervisor *s, const struct rv_config_type *type);

/* Reads what forked workers have already said. */
void rv_births_read(struct rv_supervisor *s);
bool rv_birth_is_expected(const struct rv_children *c, uint64_t incarnation);

/* Sends the request to the template. 0 or a negative errno: nothing has happened. */
int rv_birth_begin(struct rv_supervisor *s, struct rv_template *t, struct rv_session *session,
                   const struct rv_fork_request *request);

/* The template's refusal of request `id`. */
void rv_birth_refused(struct rv_supervisor *s, uint64_t id, bool renewed, const char *why);
int rv_births_init(struct rv_supervisor *s);
void rv_births_fini(struct rv_supervisor *s);

/* What a template must do to be told of: template.c. */
void rv_template_counts_fork(struct rv_template *t);
void rv_template_listen(struct rv_template *t);           /* reads what it has said already */
bool rv_template_is_leaving(const struct rv_template *t); /* its files have changed; another one follows */
void rv_template_is_hung(struct rv_template *t, const char *reason);

/* worker.c: those who wait for a template look again. */
void rv_workers_start_waiting(struct rv_supervisor *s);

int rv_workers_init(struct rv_supervisor *s, uint32_t count);
void rv_workers_fini(struct rv_supervisor *s);
int rv_router_link_init(struct rv_supervisor *s);
void rv_router_link_fini(struct rv_supervisor *s);
void rv_logs_fini(struct rv_supervisor *s);

/* The process of a worker as the kind of its type wants it started: the table of worker kinds is in worker_kinds.c. */
struct rv_worker_kind {
    const char *name;
    /* Fills path and argv (texts owned by storage, at most RV_WORKER_ARGS_MAX pointers). 0 or negative errno with err.
     */
    int (*command)(const struct rv_config_type *type, char *path, size_t path_size, const char **argv,
                   struct rv_error *err);
    /* Adds "KEY=value" texts that the caller frees, at most RV_KIND_ENV_MAX, and counts them in *ret_count, also on
     * failure. They go before the type's own. 0 or negative errno with err. NULL = none. */
    int (*environment)(const struct rv_config_type *type, char **env, unsigned *ret_count, struct rv_error *err);
    bool has_port; /* it serves HTTP at a port that the supervisor keeps */
    /* How a process that does not end by itself is made to: signals with the time that each has, ended by signal 0.
     * Then SIGKILL. */
    const struct rv_stop_step *stop;
};

struct rv_stop_step {
    int signal;
    uint64_t wait_us;
};
#define RV_WORKER_ARGS_MAX (16u + 2u * RV_TYPE_MODELS_MAX + RV_TYPE_ARGS_MAX)
#define RV_KIND_ENV_MAX 8u

const struct rv_worker_kind *rv_worker_kind_by_name(const char *name);

/* ---- port.c ---- */

/* Listens at the port of worker `number` of the type, unless it does already. A port of our choice stays the same for
 * the supervisor's life if it can. 0, or negative errno and err with who has the port. */
int rv_port_take(const struct rv_config_type *type, unsigned number, struct rv_http_port *port, struct rv_error *err);

/* No process of the worker is to come: whoever connects shall be refused, instead of waiting for ever. */
void rv_port_give_up(struct rv_http_port *port);
/* worker.c: what its kind sets, then the type's env without what the kind has merged already: at most RV_KIND_ENV_MAX +
 * RV_ENV_MAX texts that the caller frees, counted also on failure. 0 or negative errno with err. */
int rv_worker_kind_environment(const struct rv_config_type *type, const struct rv_worker_kind *kind, char **env,
                               unsigned *ret_count, struct rv_error *err);

#endif
