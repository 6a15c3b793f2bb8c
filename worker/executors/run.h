/*
 * One job on its way through an executor: progress, cancelling, failures and the scratch memory for conversions.
 *
 * Lives on the stack of the executor's run(); used on that one thread only. The job, the leases and err stay the
 * host's.
 */
#ifndef RV_EXECUTOR_RUN_H
#define RV_EXECUTOR_RUN_H

#include "fault.h"
#include "resvisor-executor.h"

struct rv_compute;

struct rv_run {
    struct rv_execution *execution;
    struct rv_failure *err;
    struct rv_fault fault;
    uint64_t done, total;             /* steps of progress */
    char text[64];                    /* what the job is doing, for people */
    char report[160];                 /* of a fault, for a second output; empty = none */
    float *panel;                     /* RV_PANEL_FLOATS, made when the first 2-byte weight is met */
    const struct rv_compute *compute; /* NULL = the CPU */
    void *device;                     /* its own */
};

/* Fills err (may be NULL) and returns -number. code: resvisor.v1.ErrorCode. */
int rv_fail(struct rv_failure *err, int number, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Sets what progress says from now on. */
void rv_run_describe(struct rv_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Counts `steps` more as done and shows a sign of life; 0 steps is fine. 0, or -ECANCELED with err filled. */
int rv_run_advance(struct rv_run *run, uint64_t steps);

/* -ENOMEM with err filled; `what` names the memory. */
int rv_run_no_memory(struct rv_run *run, const char *what);

/* Adds the executor's output, and the report of a fault after it. As rv_job_add_output. */
int rv_run_add_output(struct rv_run *run, const char *name, const char *content_type, const void *data, uint64_t size);

void rv_run_fini(struct rv_run *run);

/* Threads of the matrix library: decided once, before the first job. Safe to call again. */
void rv_matrix_setup(void);

/* For struct rv_executor: prepares the matrix library. */
int rv_executor_start(void **ret_state, struct rv_failure *err);

#endif
