/* Jobs: models, run, result. A job that fails is one line in the log; a job that succeeds is none. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "host.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

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
    return rv_job_fail(job, err->code, err->message);
}

static int run_one(struct host *host, struct rv_job *job)
{
    struct rv_lease *leases[RV_TYPE_MODELS_MAX + 1];
    const char *names[RV_TYPE_MODELS_MAX + 1];
    struct rv_execution execution = {
        .struct_size = sizeof(execution), .job = job, .state = host->state, .leases = leases, .model_names = names};
    struct rv_failure err = {0};
    int r;

    host->jobs++;
    r = host_models_pick(host, rv_job_model(job), leases, names, &execution.lease_count, &err);
    if (r == 0) {
        err = (struct rv_failure){0};
        r = rv_job_cancelled(job) ? -ECANCELED : host->executor.run(&execution, &err);
    }
    if (r > 0)
        r = -EINVAL;
    return r < 0 ? fail(host, job, r, &err) : rv_job_finish(job);
}

int host_jobs_run(struct host *host)
{
    struct rv_job *job = NULL;
    int r;

    while ((r = rv_worker_next(host->worker, &job)) > 0) {
        r = run_one(host, job);
        if (r < 0) { /* its end could not even be written down: better to die loudly than to keep a job for ever */
            (void)fprintf(stderr, "cannot report the end of a job: %s\n", strerror(-r));
            return r;
        }
    }
    return r;
}
