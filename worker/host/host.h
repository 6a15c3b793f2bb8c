/*
 * The parts of resvisor-worker: the executor's shared object, the leases that jobs need, and the running of jobs.
 *
 * One thread. Everything belongs to struct host, which main() owns. Failures are reported by rv_failure; main() and
 * host_run print them, one line each, to standard error, which is the supervisor's log.
 */
#ifndef RV_HOST_H
#define RV_HOST_H

#include <limits.h>

#include "resvisor-executor.h"
#include "rv_limits.h"

/* Exit codes; --help and docs/executors.md say the same. */
enum host_exit {
    HOST_EXIT_DONE = 0,   /* drained, or the supervisor has gone */
    HOST_EXIT_FAILED = 1, /* a restart may help */
    HOST_EXIT_CONFIG = 78 /* EX_CONFIG: no restart will mend it: wrong option, no such file, wrong ABI */
};

#define HOST_EXTRA_MAX 4u /* leases of models that jobs named and the configuration did not */

struct host_model {
    char name[RV_PATH_MAX]; /* empty = a free place */
    struct rv_lease *lease;
    uint64_t used; /* job number of the last use: the oldest extra one goes first */
};

struct host {
    char executor_path[PATH_MAX];
    void *library;
    struct rv_executor executor; /* a copy; functions that its version does not have are NULL */
    void *state;                 /* what start() returned */
    bool started;
    bool device_failed; /* its context is broken: the process must end */
    enum rv_mapping mapping;
    struct rv_worker *worker;
    struct host_model models[RV_TYPE_MODELS_MAX]; /* in configured order */
    uint32_t model_count;
    struct host_model extra[HOST_EXTRA_MAX];
    uint64_t jobs;
};

/* executor.c: dlopen and checks. An argument without a slash is an installed executor's name. */
int host_executor_open(struct host *host, const char *name, struct rv_failure *err);
void host_executor_close(struct host *host);
/* 0, or -EOPNOTSUPP: the model lies where this executor cannot read it. */
int host_executor_takes(const struct host *host, const char *model, const struct rv_lease_info *info,
                        struct rv_failure *err);

/* models.c */
int host_models_attach(struct host *host, struct rv_failure *err);
void host_models_detach(struct host *host);
/* "3 models, 1.0 GiB mapped", and where if that is not the machine's memory: " on cuda:0" */
void host_models_describe(const struct host *host, char *buffer, size_t size);
/*
 * Fills leases and names (room for RV_TYPE_MODELS_MAX + 1) for a job: its model first, then the configured ones. Each
 * is looked at again: a model whose file has changed is mapped anew.
 */
int host_models_pick(struct host *host, const char *job_model, struct rv_lease **leases, const char **names,
                     uint32_t *ret_count, struct rv_failure *err);

/* jobs.c: takes jobs until there are no more. 0, or a negative errno of rv_worker_next or of an end of a job. */
int host_jobs_run(struct host *host);

#endif
