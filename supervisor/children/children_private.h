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

    struct rv_log *logs; /* list of all logs */
    struct rv_log *own_log;
    struct rv_log_follower *followers;
    uint32_t follower_count;
};

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

#endif
