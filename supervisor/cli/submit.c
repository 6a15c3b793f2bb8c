/* `submit`. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "cli.h"
#include "clock.h"
#include "save.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define WAIT_SLICE_MS 500u          /* progress is shown, and Ctrl-C noticed, at least this often */
#define WAIT_SLICE_TERMINAL_MS 200u /* somebody looks on */
#define UUID_TEXT 37

static const struct rv_option submit_options[] = {
    {"id", 'i', "ID", "Job id, 1 to 64 of letters, digits and . _ : - (default: a new UUID)."},
    {"model", 'm', "MODEL", "Model to use (default: the type's first)."},
    {"param", 'p', "KEY=VALUE", "A parameter for the executor; may be repeated."},
    {"payload", 'f', "FILE", "File to hand to the executor, at most 512 KiB; - for standard input."},
    {"priority", 0, "N", "-1000 to 1000; higher runs earlier (default 0)."},
    {"retry", 0, NULL, "Run it once more if its worker dies; only for work that may run twice."},
    {"out", 'o', "FILE", "Wait, then write the outputs to this file or folder; - for standard output."},
    {"wait", 'w', NULL, "Wait for the end of the job."},
    {"timeout", 0, "SECONDS", "Give up waiting after this time; the job goes on."},
    {0},
};
enum { OPT_ID, OPT_MODEL, OPT_PARAM, OPT_PAYLOAD, OPT_PRIORITY, OPT_RETRY, OPT_OUT, OPT_WAIT, OPT_TIMEOUT };

struct order {
    struct rv_args args;
    Resvisor__V1__Submit submit;
    Resvisor__V1__Param params[RV_PARAMS_MAX];
    Resvisor__V1__Param *param_list[RV_PARAMS_MAX];
    char *param_texts[RV_PARAMS_MAX];
    uint8_t *payload;
    char uuid[UUID_TEXT];
    const char *out;
    bool wait;
    uint64_t timeout_us;
};

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

static void order_fini(struct order *order)
{
    for (size_t i = 0; i < order->submit.n_params; i++)
        free(order->param_texts[i]);
    free(order->payload);
    rv_args_fini(&order->args);
}

/* ---- reading the command line ------------------------------------------------------------------------------------ */

static int make_uuid(char *buffer, struct rv_error *err)
{
    uint8_t b[16];

    if (getrandom(b, sizeof(b), 0) != (ssize_t)sizeof(b))
        return rv_error_set(err, EIO, CODE(INTERNAL), "no random bytes for a job id: %s", strerror(errno));
    b[6] = (uint8_t)((b[6] & 0x0f) | 0x40); /* version 4, RFC 9562 */
    b[8] = (uint8_t)((b[8] & 0x3f) | 0x80);
    (void)snprintf(buffer, UUID_TEXT, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                   b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return 0;
}

static bool add_param(struct order *order, const char *text)
{
    size_t n = order->submit.n_params;
    const char *equals = strchr(text, '=');
    char *copy;

    if (n == RV_PARAMS_MAX)
        return (void)rv_args_wrong(&order->args, "more than %u parameters", RV_PARAMS_MAX), false;
    if (!equals || equals == text || equals - text > (ptrdiff_t)RV_NAME_MAX)
        return (void)rv_args_wrong(&order->args, "--param takes KEY=VALUE with a key of 1 to 64 bytes"), false;
    if (strlen(equals + 1) > RV_PARAM_VALUE_MAX)
        return (void)rv_args_wrong(&order->args, "a parameter's value is longer than %u bytes", RV_PARAM_VALUE_MAX),
               false;
    copy = strdup(text);
    if (!copy)
        return (void)rv_args_wrong(&order->args, "no memory"), false;
    copy[equals - text] = '\0';
    order->param_texts[n] = copy;
    resvisor__v1__param__init(&order->params[n]);
    order->params[n].key = copy;
    order->params[n].value = copy + (equals - text) + 1;
    order->param_list[n] = &order->params[n];
    order->submit.n_params = n + 1;
    return true;
}

static int read_payload(struct order *order, const char *path, struct rv_error *err)
{
    int fd = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;
    ssize_t n = 0;
    int r = 0;

    if (fd < 0)
        return rv_error_set(err, errno, CODE(FILE), "%s cannot be read: %s", path, strerror(errno));
    free(order->payload);
    order->payload = malloc(RV_PAYLOAD_MAX + 1);
    while (order->payload && length <= RV_PAYLOAD_MAX) {
        n = read(fd, order->payload + length, RV_PAYLOAD_MAX + 1 - length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        length += (size_t)n;
    }
    if (!order->payload)
        r = rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the payload");
    else if (n < 0)
        r = rv_error_set(err, errno, CODE(FILE), "%s cannot be read: %s", path, strerror(errno));
    else if (length > RV_PAYLOAD_MAX)
        r = rv_error_set(err, EFBIG, CODE(TOO_LARGE), "%s is larger than 512 KiB", path);
    if (fd != STDIN_FILENO)
        (void)close(fd);
    order->submit.payload.data = order->payload;
    order->submit.payload.len = length;
    return r;
}

/* 1 = taken; else a result for rv_args_exit. */
static int take_option(struct order *order, int option, const char *value, const char **payload)
{
    int64_t priority;

    switch (option) {
    case OPT_ID:
        order->submit.job_id = (char *)value;
        return 1;
    case OPT_MODEL:
        order->submit.model = (char *)value;
        return 1;
    case OPT_PARAM:
        return add_param(order, value) ? 1 : RV_ARGS_ERROR;
    case OPT_PAYLOAD:
        *payload = value;
        return 1;
    case OPT_PRIORITY:
        if (!rv_args_number(&order->args, "priority", value, -1000, 1000, &priority))
            return RV_ARGS_ERROR;
        order->submit.priority = (int32_t)priority;
        return 1;
    case OPT_RETRY:
        order->submit.retry_on_worker_death = true;
        return 1;
    case OPT_OUT:
        order->out = value;
        order->wait = true;
        return 1;
    case OPT_WAIT:
        order->wait = true;
        return 1;
    default:
        return rv_args_seconds(&order->args, "timeout", value, &order->timeout_us) ? 1 : RV_ARGS_ERROR;
    }
}

/* 0, or the exit code with *ret_done set. */
static int read_order(struct order *order, int argc, char **argv, bool *ret_done)
{
    const char *value, *payload = NULL;
    struct rv_error err = {0};
    int i;

    rv_args_init(&order->args, &rv_command_submit, argc, argv);
    resvisor__v1__submit__init(&order->submit);
    order->timeout_us = UINT64_MAX;
    order->submit.params = order->param_list;
    while ((i = rv_args_next(&order->args, &value)) >= 0) {
        i = take_option(order, i, value, &payload);
        if (i != 1)
            break;
    }
    *ret_done = true;
    if (i != RV_ARGS_END)
        return rv_args_exit(&order->args, i);
    order->submit.type = (char *)order->args.arguments[0];
    if (payload && read_payload(order, payload, &err) < 0)
        return rv_say_error(&err, order->args.json);
    if (*order->submit.job_id == '\0') {
        if (make_uuid(order->uuid, &err) < 0)
            return rv_say_error(&err, order->args.json);
        order->submit.job_id = order->uuid;
    }
    *ret_done = false;
    return 0;
}

/* ---- waiting ----------------------------------------------------------------------------------------------------- */

/* Submits, or (slice_ms not 0) waits for the job so long. */
static int ask_for_job(struct order *order, struct rv_router *router, uint64_t slice_ms, struct rv_frame *ret_answer,
                       struct rv_error *err)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Wait wait = RESVISOR__V1__WAIT__INIT;

    if (slice_ms == 0) {
        request.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
        request.submit = &order->submit;
    } else {
        wait.job_id = order->submit.job_id;
        wait.timeout_ms = slice_ms;
        request.body_case = RESVISOR__V1__REQUEST__BODY_WAIT;
        request.wait = &wait;
    }
    return rv_router_ask(router, &request, RV_CLIENT_TIMEOUT_US, RV_ROUTER_PATIENCE_US, ret_answer, err);
}

static void show_progress(struct rv_progress *progress, const Resvisor__V1__Job *job)
{
    char what[RV_NAME_MAX + 32], text[128];

    (void)snprintf(what, sizeof(what), "%s %s", job->type, rv_job_state_name(job->state));
    (void)snprintf(text, sizeof(text), "%s%s%s", job->worker, *job->worker && *job->progress_text ? " " : "",
                   job->progress_text);
    rv_progress_show(progress, what, job->progress_done, job->progress_total, text);
}

/* Not beyond the end of the user's own patience; never 0. */
static uint64_t slice_ms(const struct order *order, const struct rv_progress *progress, uint64_t start)
{
    uint64_t most = progress->terminal ? WAIT_SLICE_TERMINAL_MS : WAIT_SLICE_MS;
    uint64_t spent = rv_now_us() - start;
    uint64_t left = order->timeout_us > spent ? (order->timeout_us - spent) / RV_MSEC + 1 : 1;

    return left < most ? left : most;
}

/* Waits until the job in *answer has ended; *answer then holds its last state. */
static int wait_for_end(struct order *order, struct rv_router *router, struct rv_frame *answer, struct rv_error *err)
{
    uint64_t start = rv_now_us();
    struct rv_progress progress;
    int r = 0;

    rv_progress_init(&progress, false, order->args.json);
    while (r == 0) {
        const Resvisor__V1__Job *job = rv_answer_job(answer, err);
        unsigned connections = router->connections;

        if (!job) {
            r = -EPROTO;
        } else if (rv_job_has_ended(job)) {
            break;
        } else if (interrupted) {
            r = rv_error_set(err, EINTR, CODE(CANCELLED), "interrupted; job %s goes on", job->job_id);
            rv_error_remedy(err, "`resvisor cancel %s` ends it, `resvisor fetch %s` gets its outputs later",
                            job->job_id, job->job_id);
        } else if (rv_now_us() - start >= order->timeout_us) {
            r = rv_error_set(err, ETIMEDOUT, CODE(DEADLINE), "job %s is still %s; it goes on", job->job_id,
                             rv_job_state_name(job->state));
            rv_error_remedy(err, "`resvisor job %s` shows it, `resvisor cancel %s` ends it", job->job_id, job->job_id);
        } else {
            show_progress(&progress, job);
            rv_frame_fini(answer);
            r = ask_for_job(order, router, slice_ms(order, &progress, start), answer, err);
            /* A new router has forgotten jobs that only waited; those that ran it knows, so nothing runs twice. */
            if (r < 0 && err->code == CODE(NO_SUCH_JOB) && router->connections != connections)
                r = ask_for_job(order, router, 0, answer, err);
        }
    }
    rv_progress_end(&progress);
    return r;
}

/* ---- all together ------------------------------------------------------------------------------------------------ */

static int print_result(struct order *order, const Resvisor__V1__Job *job, json_t *files)
{
    bool to_stdout = order->out && strcmp(order->out, "-") == 0;

    if (order->args.json && !to_stdout) {
        json_t *root = rv_job_json(job);

        (void)json_object_set(root, "files", files);
        rv_json_print(root);
    } else if (!order->wait) {
        printf("job %s %s\n", job->job_id, rv_job_state_name(job->state));
    } else if (!to_stdout) {
        rv_job_print(job);
    }
    return rv_job_exit_code(job);
}

static int run_order(struct order *order)
{
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_error err = {0};
    json_t *files = json_array();
    struct rv_router router;
    const Resvisor__V1__Job *job;
    int r = rv_router_init(&router, &order->args, &err), exit_code;

    if (r == 0)
        r = ask_for_job(order, &router, 0, &answer, &err);
    if (r == 0 && order->wait) {
        struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESETHAND}; /* a second one ends us */

        (void)sigaction(SIGINT, &action, NULL);
        r = wait_for_end(order, &router, &answer, &err);
    }
    job = r == 0 ? rv_answer_job(&answer, &err) : NULL;
    if (job && order->out && job->state == RESVISOR__V1__JOB_STATE__JOB_DONE &&
        rv_save_outputs(&router, job, RV_SAVE_ALL, order->out, files, order->args.json, &err) < 0)
        job = NULL;
    exit_code = job ? print_result(order, job, files) : rv_say_error(&err, order->args.json);
    json_decref(files);
    rv_frame_fini(&answer);
    rv_router_fini(&router);
    return exit_code;
}

static int run_submit(int argc, char **argv)
{
    static struct order order; /* large */
    bool done;
    int exit_code = read_order(&order, argc, argv, &done);

    if (!done)
        exit_code = run_order(&order);
    order_fini(&order);
    return exit_code;
}

const struct rv_command rv_command_submit = {
    .name = "submit",
    .arguments = "TYPE [--param KEY=VALUE]... [--out FILE] [--wait] [OPTION]...",
    .summary = "Queue a job; with --wait or --out wait for its end.",
    .text = "The same id with the same content again is the same job: it is shown, and nothing runs twice. Ctrl-C ends "
            "the\n"
            "wait, not the job. A job that failed gives exit code 5 whatever its error, a cancelled one 9. An existing "
            "file is\n"
            "replaced, as cp does; several outputs go to a folder, which is made if needed.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .options = submit_options,
    .run = run_submit,
};
