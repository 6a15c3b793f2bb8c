/* `fetch`. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "save.h"

static const struct rv_option fetch_options[] = {
    {"output", 'n', "N", "Only output number N; the first is 0."},
    {"out", 'o', "FILE", "File or folder to write to, or - for standard output (default: the output's name, here)."},
    {0},
};
enum { FETCH_OUTPUT, FETCH_OUT };

/* A job without outputs: its own error says more than "no such result". */
static int check_done(const Resvisor__V1__Job *job, struct rv_error *err)
{
    int r;

    if (job->state == RESVISOR__V1__JOB_STATE__JOB_DONE)
        return 0;
    if (rv_job_has_ended(job)) {
        r = rv_error_from_message(err, job->error);
        if (r < 0)
            return r;
    }
    (void)rv_error_set(err, EAGAIN, RESVISOR__V1__ERROR_CODE__ERROR_NO_SUCH_RESULT, "job %s has no outputs: it is %s",
                       job->job_id, rv_job_state_name(job->state));
    if (!rv_job_has_ended(job))
        rv_error_remedy(err, "fetch again when it is DONE; `resvisor job %s` shows it", job->job_id);
    return -EAGAIN;
}

static int fetch(struct rv_args *args, int number, const char *out)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Get get = RESVISOR__V1__GET__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    const Resvisor__V1__Job *job = NULL;
    json_t *files = json_array();
    struct rv_router router;
    struct rv_error err = {0};
    int r = rv_router_init(&router, args, &err), exit_code = RV_EXIT_DONE;

    get.job_id = (char *)args->arguments[0];
    request.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    request.get = &get;
    if (r == 0)
        r = rv_router_ask(&router, &request, RV_CLIENT_TIMEOUT_US, RV_ROUTER_PATIENCE_US, &answer, &err);
    if (r == 0)
        job = rv_answer_job(&answer, &err);
    if (job)
        r = check_done(job, &err);
    if (job && r == 0)
        r = rv_save_outputs(&router, job, number, out, files, args->json, &err);
    if (r < 0 || !job)
        exit_code = rv_say_error(&err, args->json);
    else if (args->json && !(out && strcmp(out, "-") == 0)) {
        json_t *root = rv_job_json(job);

        (void)json_object_set(root, "files", files);
        rv_json_print(root);
    }
    json_decref(files);
    rv_frame_fini(&answer);
    rv_router_fini(&router);
    return exit_code;
}

static int run_fetch(int argc, char **argv)
{
    struct rv_args args;
    const char *value, *out = NULL;
    int64_t number = RV_SAVE_ALL;
    int i, exit_code;

    rv_args_init(&args, &rv_command_fetch, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        if (i == FETCH_OUT)
            out = value;
        else if (!rv_args_number(&args, "output", value, 0, RV_OUTPUTS_MAX - 1, &number))
            return rv_args_exit(&args, RV_ARGS_ERROR);
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    exit_code = fetch(&args, (int)number, out);
    rv_args_fini(&args);
    return exit_code;
}

const struct rv_command rv_command_fetch = {
    .name = "fetch",
    .arguments = "ID [--output N] [--out FILE] [--json]",
    .summary = "Write the outputs of a finished job to files.",
    .text =
        "A file is complete or not there: it is written under another name first. An existing file is replaced, as cp\n"
        "does. Several outputs go to a folder, which is made if needed. Outputs are kept for rpc.result_age.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .options = fetch_options,
    .run = run_fetch,
};
