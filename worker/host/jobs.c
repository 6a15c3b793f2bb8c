/* Jobs: models, run, result. A job that fails is one line in the log; a job that succeeds is none. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "host.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* Its end could not even be written down: better to die loudly than to keep a job for ever. */
static int ended(int r)
{
    if (r < 0)
        (void)fprintf(stderr, "cannot report the end of a job: %s\n", strerror(-r));
    return r;
}

static int fail(struct host *host, struct rv_job *job, int r, struct rv_failure *err)
{
    char shown[sizeof(err->message)];

    /* An executor may write anything into err. */
    err->message[sizeof(err->message) - 1] = '\0';
    if (!err->message[0])
        (void)snprintf(err->message, sizeof(err->message), "executor %.64s failed: %s", host->executor.name,
                       strerror(-r));
    if (err->code == 0)
        err->code = r == -ECANCELED ? CODE(CANCELLED) : CODE(JOB_FAILED);
    (void)fprintf(stderr, "job %s failed: %s\n", rv_job_id(job),
                  rv_escape(shown, sizeof(shown), err->message, strlen(err->message)));
    return ended(rv_job_fail(job, err->code, err->message));
}

/* A context that has met an error of its device fails everything that follows. */
static bool is_of_device(const struct rv_failure *err)
{
    return err->code == CODE(DEVICE) || err->code == CODE(DEVICE_LOST);
}

static int run_one(struct host *host, struct rv_job *job)
{
    struct rv_lease *leases[RV_TYPE_MODELS_MAX + 1];
    const char *names[RV_TYPE_MODELS_MAX + 1];
    struct rv_execution execution = {
        .struct_size = sizeof(execution),
        .job = job,
        .state = host->state,
        .leases = leases,
        .model_names = names,
        .connection = rv_worker_connection(host->worker),
    };
    struct rv_failure err = {0};
    bool has_run = false;
    int r;

    host->jobs++;
    r = host_models_pick(host, rv_job_model(job), leases, names, &execution.lease_count, &err);
    if (r == 0) {
        err = (struct rv_failure){0};
        has_run = !rv_job_cancelled(job);
        r = has_run ? host->executor.run(&execution, &err) : -ECANCELED;
    }
    if (r > 0)
        r = -EINVAL;
    if (r == 0)
        return ended(rv_job_finish(job));
    r = fail(host, job, r, &err);
    if (r == 0 && has_run && is_of_device(&err)) {
        host->device_failed = true;
        r = -EIO;
    }
    return r;
}

int host_jobs_run(struct host *host)
{
    struct rv_job *job = NULL;
    int r;

    while ((r = rv_worker_next(host->worker, &job)) > 0) {
        r = run_one(host, job);
        if (r < 0)
            return r;
    }
    return r;
}
