#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "save.h"
#include "verify.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define WAIT_SLICE_MS 200u /* progress is shown, and Ctrl-C noticed, at least this often */
#define CANCEL_TIMEOUT_US UINT64_C(60000000)
#define REPORT_NAME "report.json"
#define REPORT_MAX (16u * 1024 * 1024) /* bytes */

/* One run on its way. */
struct attempt {
    struct rv_router *router;
    Resvisor__V1__Submit submit;
    Resvisor__V1__Param params[2];
    Resvisor__V1__Param *param_list[2];
    char id[RV_NAME_MAX], offset[24];
};

static void prepare(struct attempt *attempt, struct rv_verify *verify, unsigned number)
{
    const struct rv_verify_run *run = &verify->runs[number];
    const struct rv_verify_file *file = &verify->files[run->file];

    resvisor__v1__submit__init(&attempt->submit);
    (void)snprintf(attempt->id, sizeof(attempt->id), "verify-%" PRIx64 "-%u", rv_now_us(), number + 1);
    (void)snprintf(attempt->offset, sizeof(attempt->offset), "%" PRIu64, run->seed_offset);
    for (unsigned i = 0; i < 2; i++) {
        resvisor__v1__param__init(&attempt->params[i]);
        attempt->param_list[i] = &attempt->params[i];
    }
    attempt->params[0].key = (char *)"outputs";
    attempt->params[0].value = (char *)"report";
    attempt->params[1].key = (char *)"seed_offset";
    attempt->params[1].value = attempt->offset;
    attempt->submit.params = attempt->param_list;
    attempt->submit.n_params = 2;
    attempt->submit.job_id = attempt->id;
    attempt->submit.type = verify->types.config->types[file->type].name;
    attempt->submit.payload.data = (uint8_t *)file->text;
    attempt->submit.payload.len = file->length;
}

static int ask_submit(struct attempt *attempt, struct rv_frame *ret_answer, struct rv_error *err)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;

    request.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
    request.submit = &attempt->submit;
    return rv_router_ask(attempt->router, &request, RV_CLIENT_TIMEOUT_US, RV_ROUTER_PATIENCE_US, ret_answer, err);
}

static int ask_wait(struct attempt *attempt, struct rv_frame *ret_answer, struct rv_error *err)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Wait wait = RESVISOR__V1__WAIT__INIT;
    unsigned connections = attempt->router->connections;
    int r;

    wait.job_id = attempt->id;
    wait.timeout_ms = WAIT_SLICE_MS;
    request.body_case = RESVISOR__V1__REQUEST__BODY_WAIT;
    request.wait = &wait;
    r = rv_router_ask(attempt->router, &request, RV_CLIENT_TIMEOUT_US, RV_ROUTER_PATIENCE_US, ret_answer, err);
    /* A new router has forgotten jobs that only waited; those that ran it knows, so nothing runs twice. */
    if (r < 0 && err->code == CODE(NO_SUCH_JOB) && attempt->router->connections != connections)
        r = ask_submit(attempt, ret_answer, err);
    return r;
}

/* Cancels it and waits until it has ended, so that nothing of it goes on behind the user's back. */
static int cancel(struct attempt *attempt, struct rv_error *err)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Cancel body = RESVISOR__V1__CANCEL__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_error problem = {0};
    uint64_t start = rv_now_us();
    bool ended = false;
    int r;

    body.job_id = attempt->id;
    request.body_case = RESVISOR__V1__REQUEST__BODY_CANCEL;
    request.cancel = &body;
    r = rv_router_ask(attempt->router, &request, RV_CLIENT_TIMEOUT_US, 0, &answer, &problem);
    while (r == 0 && !ended && rv_now_us() - start < CANCEL_TIMEOUT_US) {
        const Resvisor__V1__Job *job = rv_answer_job(&answer, &problem);

        ended = !job || rv_job_has_ended(job);
        rv_frame_fini(&answer);
        if (!ended)
            r = ask_wait(attempt, &answer, &problem);
    }
    rv_frame_fini(&answer);
    if (r < 0 || !ended)
        return rv_error_set(err, EINTR, CODE(CANCELLED), "interrupted; job %s goes on: %s", attempt->id,
                            r < 0 ? problem.message : "it does not end");
    return rv_error_set(err, EINTR, CODE(CANCELLED), "interrupted; job %s was cancelled", attempt->id);
}

/* Until the job has ended; *answer then holds its last state. */
static int wait_for_end(struct attempt *attempt, const char *what, bool quiet, struct rv_frame *answer,
                        struct rv_error *err)
{
    struct rv_progress progress;
    int r = 0;

    rv_progress_init(&progress, false, quiet);
    while (r == 0) {
        const Resvisor__V1__Job *job = rv_answer_job(answer, err);

        if (!job) {
            r = -EPROTO;
        } else if (rv_job_has_ended(job)) {
            break;
        } else if (rv_verify_interrupted()) {
            r = cancel(attempt, err);
        } else {
            rv_progress_show(&progress, what, job->progress_done, job->progress_total, job->progress_text);
            rv_frame_fini(answer);
            r = ask_wait(attempt, answer, err);
            if (r < 0 && rv_verify_interrupted())
                r = cancel(attempt, err);
        }
    }
    rv_progress_end(&progress);
    return r;
}

/* ---- what it did ------------------------------------------------------------------------------------------------- */

static int read_report(int fd, json_t **ret_report, struct rv_error *err)
{
    struct stat st;
    json_t *report = NULL;
    char *text = NULL;

    if (fstat(fd, &st) == 0 && st.st_size > 0 && st.st_size <= REPORT_MAX)
        text = malloc((size_t)st.st_size);
    if (text && pread(fd, text, (size_t)st.st_size, 0) == st.st_size)
        report = json_loadb(text, (size_t)st.st_size, 0, NULL);
    free(text);
    if (!json_is_object(report)) {
        json_decref(report);
        return rv_error_set(err, EPROTO, CODE(INTERNAL), "the worker's report cannot be read");
    }
    *ret_report = report;
    return 0;
}

static int fetch_report(struct rv_router *router, const Resvisor__V1__Job *job, json_t **ret_report,
                        struct rv_error *err)
{
    uint32_t number = 0;
    int fd, r;

    while (number < job->n_outputs && strcmp(job->outputs[number]->name, REPORT_NAME) != 0)
        number++;
    if (number == job->n_outputs || job->outputs[number]->size > REPORT_MAX)
        return rv_error_set(err, EPROTO, CODE(INTERNAL), "job %s has no %s", job->job_id, REPORT_NAME);
    fd = memfd_create("resvisor-report", MFD_CLOEXEC);
    if (fd < 0)
        return rv_error_set(err, errno, CODE(NO_MEMORY), "no memory for the report: %s", strerror(errno));
    r = rv_fetch_output(router, job, number, fd, REPORT_NAME, err);
    if (r == 0)
        r = read_report(fd, ret_report, err);
    (void)close(fd);
    return r;
}

static int judge_job(struct rv_verify *verify, unsigned number, const Resvisor__V1__Job *job, struct rv_error *err)
{
    const char *path = verify->files[verify->runs[number].file].path;
    const Resvisor__V1__Error *error = job->error;

    if (job->state == RESVISOR__V1__JOB_STATE__JOB_DONE)
        return 0;
    verify->job_failed = job->state == RESVISOR__V1__JOB_STATE__JOB_FAILED;
    (void)rv_error_set(err, EIO, error ? (int)error->code : CODE(JOB_FAILED), "run %u, %s: %s", number + 1, path,
                       error && *error->message ? error->message : rv_job_state_name(job->state));
    if (error && *error->remedy)
        rv_error_remedy(err, "%s", error->remedy);
    return -EIO;
}

int rv_verify_job(struct rv_verify *verify, struct rv_router *router, unsigned number, struct rv_error *err)
{
    struct rv_verify_run *run = &verify->runs[number];
    struct attempt attempt = {.router = router};
    struct rv_frame answer = RV_FRAME_INIT;
    const Resvisor__V1__Job *job;
    char what[64];
    int r;

    prepare(&attempt, verify, number);
    (void)snprintf(what, sizeof(what), "run %u of %u, %c", number + 1, verify->run_count, 'A' + (int)run->file);
    r = ask_submit(&attempt, &answer, err);
    if (r == 0)
        r = wait_for_end(&attempt, what, verify->args.json, &answer, err);
    if (r < 0)
        goto out;
    job = rv_answer_job(&answer, err);
    r = job ? judge_job(verify, number, job, err) : -EPROTO;
    if (r == 0)
        r = fetch_report(router, job, &run->report, err);
    if (r < 0)
        goto out;
    (void)snprintf(run->worker, sizeof(run->worker), "%s", job->worker);
    run->wait_us = job->wait_us;
    run->load_us = job->load_us;
    run->run_us = job->run_us;
    run->read_bytes = job->read_bytes + rv_verify_number(run->report, "own_bytes");
out:
    rv_frame_fini(&answer);
    return r;
}
