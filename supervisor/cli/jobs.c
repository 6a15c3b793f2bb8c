/* `jobs`, `job` and `cancel`. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "config_keys.h"
#include "job.h"

#define CANCEL_TIMEOUT_US UINT64_C(120000000) /* a running job ends when its worker has stopped it */
#define LIST_MAX 1000

static const struct rv_option jobs_options[] = {
    {"type", 't', "TYPE", "Jobs of this workflow type only."},
    {"all", 'a', NULL, "Ended jobs too; without it those that wait or run."},
    {"limit", 'n', "N", "At most N jobs, newest first (default 100, at most 1000)."},
    {0},
};
enum { JOBS_TYPE, JOBS_ALL, JOBS_LIMIT };

static void print_jobs_table(const Resvisor__V1__JobList *list)
{
    static const char *const titles[] = {"JOB",     "TYPE", "STATE", "WORKER", ">STEPS",
                                         ">WAITED", ">RAN", ">READ", "ERROR",  NULL};
    struct rv_table table;

    rv_table_init(&table, titles);
    for (size_t i = 0; i < list->n_jobs; i++) {
        const Resvisor__V1__Job *job = list->jobs[i];
        char wait[32], run[32], bytes[32];

        rv_format_duration(job->wait_us, wait, sizeof(wait));
        rv_format_duration(job->run_us, run, sizeof(run));
        rv_format_size(job->read_bytes, bytes, sizeof(bytes));
        rv_table_add(&table, "%s", job->job_id);
        rv_table_add(&table, "%s", job->type);
        rv_table_add(&table, "%s", rv_job_state_name(job->state));
        rv_table_add(&table, "%s", *job->worker ? job->worker : "-");
        if (job->progress_total)
            rv_table_add(&table, "%" PRIu64 "/%" PRIu64, job->progress_done, job->progress_total);
        else
            rv_table_add(&table, "-");
        rv_table_add(&table, "%s", wait);
        rv_table_add(&table, "%s", job->attempts ? run : "-");
        rv_table_add(&table, "%s", job->attempts ? bytes : "-");
        rv_table_add(&table, "%s", job->error && job->error->code ? rv_error_row((int)job->error->code)->name : "");
    }
    rv_table_print(&table);
}

static int print_jobs(const Resvisor__V1__Reply *reply, bool json, bool all)
{
    Resvisor__V1__JobList none = RESVISOR__V1__JOB_LIST__INIT;
    const Resvisor__V1__JobList *list = reply->body_case == RESVISOR__V1__REPLY__BODY_JOBS ? reply->jobs : &none;

    if (json) {
        json_t *root = json_object(), *array = json_array();

        for (size_t i = 0; i < list->n_jobs; i++)
            (void)json_array_append_new(array, rv_job_json(list->jobs[i]));
        (void)json_object_set_new(root, "jobs", array);
        rv_json_print(root);
    } else if (list->n_jobs == 0) {
        puts(all ? "no jobs" : "no jobs wait or run (--all shows ended ones)");
    } else {
        print_jobs_table(list);
    }
    return RV_EXIT_DONE;
}

/* One request, one answer: the answer is printed by the caller. Returns 0 or the exit code. */
static int ask(struct rv_args *args, Resvisor__V1__Request *request, uint64_t timeout_us, struct rv_frame *ret_answer)
{
    struct rv_router router;
    struct rv_error err = {0};
    int r = rv_router_init(&router, args, &err);

    if (r == 0)
        r = rv_router_ask(&router, request, timeout_us, RV_ROUTER_PATIENCE_US, ret_answer, &err);
    rv_router_fini(&router);
    return r < 0 ? rv_say_error(&err, args->json) : 0;
}

static int run_jobs(int argc, char **argv)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_args args;
    const char *value;
    int64_t limit = 0;
    int i, exit_code;

    list.unfinished_only = true;
    rv_args_init(&args, &rv_command_jobs, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        if (i == JOBS_TYPE)
            list.type = (char *)value;
        else if (i == JOBS_ALL)
            list.unfinished_only = false;
        else if (i == JOBS_LIMIT && !rv_args_number(&args, "limit", value, 1, LIST_MAX, &limit))
            return rv_args_exit(&args, RV_ARGS_ERROR);
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    list.limit = (uint32_t)limit;
    request.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    request.list = &list;
    exit_code = ask(&args, &request, RV_CLIENT_TIMEOUT_US, &answer);
    if (exit_code == 0)
        exit_code = print_jobs(answer.message->rpc_reply, args.json, !list.unfinished_only);
    rv_frame_fini(&answer);
    rv_args_fini(&args);
    return exit_code;
}

const struct rv_command rv_command_jobs = {
    .name = "jobs",
    .arguments = "[--type TYPE] [--all] [--json]",
    .summary = "List jobs, newest first.",
    .text = "",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .options = jobs_options,
    .run = run_jobs,
};

/* `job` and `cancel`: one id, one job as the answer. */
static int run_with_id(const struct rv_command *command, int argc, char **argv, Resvisor__V1__Request *request,
                       char **id, uint64_t timeout_us)
{
    struct rv_frame answer = RV_FRAME_INIT;
    const Resvisor__V1__Job *job;
    struct rv_error err = {0};
    struct rv_args args;
    const char *value;
    int i, exit_code;

    rv_args_init(&args, command, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        ;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    *id = (char *)args.arguments[0];
    exit_code = ask(&args, request, timeout_us, &answer);
    if (exit_code == 0) {
        job = rv_answer_job(&answer, &err);
        if (!job)
            exit_code = rv_say_error(&err, args.json);
        else if (args.json)
            rv_json_print(rv_job_json(job));
        else
            rv_job_print(job);
    }
    rv_frame_fini(&answer);
    rv_args_fini(&args);
    return exit_code;
}

static int run_job(int argc, char **argv)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Get get = RESVISOR__V1__GET__INIT;

    request.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    request.get = &get;
    return run_with_id(&rv_command_job, argc, argv, &request, &get.job_id, RV_CLIENT_TIMEOUT_US);
}

const struct rv_command rv_command_job = {
    .name = "job",
    .arguments = "ID [--json]",
    .summary = "Show one job.",
    .text = "Ends with 0 if the job is known, also if it failed; its state is in the output.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = run_job,
};

static int run_cancel(int argc, char **argv)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Cancel cancel = RESVISOR__V1__CANCEL__INIT;

    request.body_case = RESVISOR__V1__REQUEST__BODY_CANCEL;
    request.cancel = &cancel;
    return run_with_id(&rv_command_cancel, argc, argv, &request, &cancel.job_id, CANCEL_TIMEOUT_US);
}

const struct rv_command rv_command_cancel = {
    .name = "cancel",
    .arguments = "ID [--json]",
    .summary = "Cancel a job that waits or runs.",
    .text =
        "A waiting job ends at once, a running one when its worker has stopped it. The job is shown as it stands then.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = run_cancel,
};
