/*
 * A host for executors inside a test: the functions of resvisor.h that an executor calls, over a safetensors file
 * mapped privately. There is no supervisor, no connection and no second thread; the executors are the ones that ship.
 */
#ifndef EXECUTOR_HOST_H
#define EXECUTOR_HOST_H

#include "resvisor-executor.h"
#include "safetensors.h"

#define HOST_OUTPUTS_MAX 8
#define HOST_PARAMS_MAX 16
#define HOST_LEASES_MAX 4

struct rv_lease {
    struct rv_safetensors file;
    uint8_t *map;
    uint64_t size;
};

struct host_output {
    char name[64], type[64];
    uint8_t *data;
    uint64_t size;
};

struct rv_job {
    const char *keys[HOST_PARAMS_MAX], *values[HOST_PARAMS_MAX];
    uint32_t param_count;
    struct host_output outputs[HOST_OUTPUTS_MAX];
    uint32_t output_count;
    uint64_t cancel_at; /* progress calls until it is cancelled; 0 = never */
    uint64_t calls, done, total;
};

/* Maps a model file. The mapping may be written; the file does not change. 0 or a negative errno. */
int host_lease_open(const char *path, struct rv_lease *ret_lease);
void host_lease_close(struct rv_lease *lease);

/* Loads an executor; NULL with the reason on stderr. It stays loaded. */
const struct rv_executor *host_executor_load(const char *path);

/* Runs one job with "key=value" parameters, NULL at the end; the caller ends job by host_job_fini. */
int host_run(const struct rv_executor *executor, struct rv_lease *const *leases, uint32_t lease_count,
             const char *const *params, uint64_t cancel_at, struct rv_job *job, struct rv_failure *err);
void host_job_fini(struct rv_job *job);

#endif
