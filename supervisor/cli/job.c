#include "job.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "clock.h"
#include "config.h"
#include "config_keys.h"

#define REPEAT_INTERVAL_MS 100
#define SAFE_MAX 1024

int rv_router_init(struct rv_router *router, const struct rv_args *args, struct rv_error *err)
{
    *router = (struct rv_router){.client = RV_CLIENT_INIT};
    return rv_cli_runtime_dir(args, router->runtime_dir, sizeof(router->runtime_dir), err);
}

void rv_router_fini(struct rv_router *router)
{
    rv_client_close(&router->client);
}

/* The supervisor answers, so its router will be back. If not, its error is the better one to tell. */
static bool supervisor_lives(const struct rv_router *router, struct rv_error *err)
{
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error reason = {0};
    int r = rv_client_connect(&client, router->runtime_dir, RV_SOCKET_CONTROL, RV_SEC, &reason);

    rv_client_close(&client);
    if (r < 0)
        *err = reason;
    return r == 0;
}

static int ask_once(struct rv_router *router, Resvisor__V1__Request *request, uint64_t timeout_us,
                    struct rv_frame *ret_answer, struct rv_error *err)
{
    int r = 0;

    if (router->client.socket < 0) {
        r = rv_client_connect(&router->client, router->runtime_dir, RV_SOCKET_ROUTER, RV_CLIENT_TIMEOUT_US, err);
        if (r == 0)
            router->connections++;
    }
    return r < 0 ? r : rv_client_rpc(&router->client, request, timeout_us, ret_answer, err);
}

int rv_router_ask(struct rv_router *router, Resvisor__V1__Request *request, uint64_t timeout_us, uint64_t patience_us,
                  struct rv_frame *ret_answer, struct rv_error *err)
{
    uint64_t start = rv_now_us();

    for (;;) {
        int r = ask_once(router, request, timeout_us, ret_answer, err);

        if (r == 0 || !rv_client_may_repeat(r, err) || !supervisor_lives(router, err) ||
            rv_now_us() - start >= patience_us)
            return r;
        /* Nothing tells us when the new router listens: its socket may be the old one's for a moment. */
        (void)poll(NULL, 0, REPEAT_INTERVAL_MS);
    }
}

const Resvisor__V1__Job *rv_answer_job(struct rv_frame *answer, struct rv_error *err)
{
    const Resvisor__V1__Reply *reply = answer->message->rpc_reply;

    if (reply->body_case == RESVISOR__V1__REPLY__BODY_JOB)
        return reply->job;
    (void)rv_error_set(err, EPROTO, RESVISOR__V1__ERROR_CODE__ERROR_INTERNAL, "the router answered without a job");
    rv_frame_fini(answer);
    return NULL;
}

bool rv_job_has_ended(const Resvisor__V1__Job *job)
{
    return job->state != RESVISOR__V1__JOB_STATE__JOB_QUEUED && job->state != RESVISOR__V1__JOB_STATE__JOB_RUNNING;
}

int rv_job_exit_code(const Resvisor__V1__Job *job)
{
    /* One code for every job that ran or was to run and failed, so that a script can tell it from a refusal; which
     * failure it was is in the output. */
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_FAILED)
        return RV_EXIT_JOB_FAILED;
    return job->state == RESVISOR__V1__JOB_STATE__JOB_CANCELLED ? RV_EXIT_CANCELLED : RV_EXIT_DONE;
}

json_t *rv_job_json(const Resvisor__V1__Job *job)
{
    json_t *root = json_object(), *outputs = json_array(), *progress = json_object();

    (void)json_object_set_new(root, "job_id", rv_json_text(job->job_id));
    (void)json_object_set_new(root, "type", rv_json_text(job->type));
    (void)json_object_set_new(root, "state", json_string(rv_job_state_name(job->state)));
    (void)json_object_set_new(root, "model", rv_json_text(job->model));
    (void)json_object_set_new(root, "priority", json_integer(job->priority));
    (void)json_object_set_new(progress, "done", json_integer((json_int_t)job->progress_done));
    (void)json_object_set_new(progress, "total", json_integer((json_int_t)job->progress_total));
    (void)json_object_set_new(progress, "text", rv_json_text(job->progress_text));
    (void)json_object_set_new(root, "progress", progress);
    (void)json_object_set_new(root, "worker", rv_json_text(job->worker));
    (void)json_object_set_new(root, "attempts", json_integer(job->attempts));
    (void)json_object_set_new(root, "wait_us", json_integer((json_int_t)job->wait_us));
    (void)json_object_set_new(root, "run_us", json_integer((json_int_t)job->run_us));
    (void)json_object_set_new(root, "load_us", json_integer((json_int_t)job->load_us));
    (void)json_object_set_new(root, "read_bytes", json_integer((json_int_t)job->read_bytes));
    (void)json_object_set_new(root, "submitted_ms", json_integer((json_int_t)job->submitted_ms));
    for (size_t i = 0; i < job->n_outputs; i++) {
        json_t *output = json_object();

        (void)json_object_set_new(output, "name", rv_json_text(job->outputs[i]->name));
        (void)json_object_set_new(output, "content_type", rv_json_text(job->outputs[i]->content_type));
        (void)json_object_set_new(output, "size", json_integer((json_int_t)job->outputs[i]->size));
        (void)json_array_append_new(outputs, output);
    }
    (void)json_object_set_new(root, "outputs", outputs);
    if (job->error && job->error->code != RESVISOR__V1__ERROR_CODE__ERROR_OK)
        (void)json_object_set_new(root, "error",
                                  rv_json_error((int)job->error->code, job->error->message, job->error->remedy));
    return root;
}

static void print_text(const char *label, const char *text)
{
    char safe[SAFE_MAX];

    if (text && *text)
        printf("  %-10s %s\n", label, rv_escape(safe, sizeof(safe), text, strlen(text)));
}

static void print_error(const Resvisor__V1__Error *error)
{
    const struct rv_error_row *row;

    if (!error || error->code == RESVISOR__V1__ERROR_CODE__ERROR_OK)
        return;
    row = rv_error_row((int)error->code);
    print_text("error", *error->message ? error->message : row->text);
    print_text("code", row->name);
    print_text("what to do", *error->remedy ? error->remedy : row->remedy);
}

static void print_times(const Resvisor__V1__Job *job)
{
    char wait[32], run[32], load[32], bytes[32];
    time_t seconds = (time_t)(job->submitted_ms / 1000);
    char when[64] = "";
    struct tm tm;

    if (job->submitted_ms && localtime_r(&seconds, &tm))
        (void)strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S", &tm);
    print_text("submitted", when);
    if (job->attempts == 0)
        return;
    rv_format_duration(job->wait_us, wait, sizeof(wait));
    rv_format_duration(job->run_us, run, sizeof(run));
    rv_format_duration(job->load_us, load, sizeof(load));
    rv_format_size(job->read_bytes, bytes, sizeof(bytes));
    printf("  %-10s waited %s, ran %s, of that %s for weights (%s read)\n", "times", wait, run, load, bytes);
}

void rv_job_print(const Resvisor__V1__Job *job)
{
    char safe[SAFE_MAX], size[32];

    printf("job %s  %s\n", rv_escape(safe, sizeof(safe), job->job_id, strlen(job->job_id)),
           rv_job_state_name(job->state));
    print_text("type", job->type);
    print_text("model", job->model);
    print_text("worker", job->worker);
    if (job->priority)
        printf("  %-10s %d\n", "priority", job->priority);
    if (job->attempts > 1)
        printf("  %-10s %" PRIu32 "\n", "attempts", job->attempts);
    if (!rv_job_has_ended(job) && job->progress_total)
        printf("  %-10s %" PRIu64 " of %" PRIu64 " steps\n", "progress", job->progress_done, job->progress_total);
    print_times(job);
    for (size_t i = 0; i < job->n_outputs; i++) {
        rv_format_size(job->outputs[i]->size, size, sizeof(size));
        printf("  output %zu   %s", i,
               rv_escape(safe, sizeof(safe), job->outputs[i]->name, strlen(job->outputs[i]->name)));
        printf("  %s  %s\n",
               rv_escape(safe, sizeof(safe), job->outputs[i]->content_type, strlen(job->outputs[i]->content_type)),
               size);
    }
    print_error(job->error);
}
