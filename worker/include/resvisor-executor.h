/*
 * The executor ABI: a shared object that `resvisor-worker --executor FILE.so` loads and gives jobs to.
 *
 * The object exports one symbol, `resvisor_executor`, a struct rv_executor with constant content. All functions are
 * called on one thread, never two at once. They may take as long as they like as long as they call progress() (or
 * rv_job_progress) from time to time: a job that shows no sign of life for `stall_timeout` ends with its worker.
 *
 * An executor needs libresvisor's tensor and job functions only (resvisor.h). It may write to tensors under the default
 * private mapping: only its own process sees that, and only until the lease ends.
 *
 * Version rule: abi_version changes when a field changes its meaning or place; the host refuses another number with a
 * message. Fields are only added at the end, and struct_size says which are there.
 */
#ifndef RESVISOR_EXECUTOR_H
#define RESVISOR_EXECUTOR_H

#include "resvisor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RV_EXECUTOR_ABI_VERSION 1

/* rv_executor.flags */
#define RV_EXECUTOR_DEVICE_MEMORY 1u /* run() takes leases in a device's memory, whose pointers the CPU cannot read */

/* What the host gives to run(): the job and the leases of the models that the workflow type names. */
struct rv_execution {
    size_t struct_size;
    struct rv_job *job; /* parameters, payload, progress, outputs; the host finishes it after run() */
    void *state;        /* what start() returned */
    uint32_t lease_count;
    struct rv_lease *const *leases;   /* the job's model first, then the type's other models in configured order */
    const char *const *model_names;   /* lease_count names, same order */
    struct rv_connection *connection; /* the worker's, for rv_device_report; never rv_disconnect it */
};

struct rv_executor {
    uint32_t abi_version; /* RV_EXECUTOR_ABI_VERSION */
    uint32_t struct_size; /* sizeof(struct rv_executor) */
    const char *name;     /* for logs */
    const char *version;  /* for logs */

    /* Once, before the first job. *ret_state goes to run() and stop(). NULL pointer = nothing to do. 0 or negative
     * errno: then the worker says why and exits, and the supervisor's restart policy applies. */
    int (*start)(void **ret_state, struct rv_failure *err);

    /*
     * Runs one job: reads tensors, adds outputs by rv_job_add_output. 0 = done; negative errno = failed, with err
     * filled. -ECANCELED after rv_job_progress or rv_job_cancelled said so. Must not call rv_job_finish or rv_job_fail.
     * After a failure with ERROR_DEVICE or ERROR_DEVICE_LOST the host reports the job and ends: an error of a device
     * stays with the process that met it, and a new worker takes its place.
     */
    int (*run)(struct rv_execution *execution, struct rv_failure *err);

    /* Once, before a clean exit. May be NULL. */
    void (*stop)(void *state);

    /* RV_EXECUTOR_…; 0 where struct_size does not reach it. Without DEVICE_MEMORY the host refuses to start on models
     * in a device's own memory (backends cuda-vmm and cuda-ipc). */
    uint64_t flags;
};

#ifdef __cplusplus
}
#endif
#endif
