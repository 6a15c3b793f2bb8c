/* `restart`, `logs`, `stop`. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cli.h"
#include "client.h"
#include "clock.h"
#include "output.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define STOP_TIMEOUT_US UINT64_C(120000000) /* workers may finish their jobs */
/* The answer comes when the new workers are ready: each finishes its job first, and ComfyUI alone starts for many
 * seconds. A supervisor that goes away ends the wait at once. */
#define RESTART_TIMEOUT_US UINT64_C(86400000000)
#define ESCAPED_LINE_MAX 8192

static void print_done(bool json, const char *text)
{
    if (json) {
        json_t *root = json_object();

        (void)json_object_set_new(root, "done", json_true());
        rv_json_print(root);
    } else {
        puts(text);
    }
}

/* Reads arguments without options of the command's own. -1 = go on, else the exit code. */
static int read_args(struct rv_args *args, const struct rv_command *command, int argc, char **argv)
{
    const char *value;
    int i;

    rv_args_init(args, command, argc, argv);
    while ((i = rv_args_next(args, &value)) >= 0)
        ;
    return i == RV_ARGS_END ? -1 : rv_args_exit(args, i);
}

/* ---- restart ----------------------------------------------------------------------------------------------------- */

static int run_restart(int argc, char **argv)
{
    Rv__RestartType body = RV__RESTART_TYPE__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    struct rv_args args;
    char text[128];
    int r, exit_code = read_args(&args, &rv_command_restart, argc, argv);

    if (exit_code >= 0)
        return exit_code;
    body.type = (char *)args.arguments[0];
    request.body_case = RV__FRAME__BODY_RESTART_TYPE;
    request.restart_type = &body;
    r = rv_cli_connect(&client, &args, RV_SOCKET_CONTROL, &err);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_DONE, RESTART_TIMEOUT_US, NULL, NULL, &answer, &err);
    if (r == 0)
        (void)snprintf(text, sizeof(text), "%.64s: its workers have restarted", body.type);
    if (r == 0)
        print_done(args.json, text);
    exit_code = r < 0 ? rv_say_error(&err, args.json) : RV_EXIT_DONE;
    rv_frame_fini(&answer);
    rv_client_close(&client);
    rv_args_fini(&args);
    return exit_code;
}

const struct rv_command rv_command_restart = {
    .name = "restart",
    .arguments = "TYPE [--json]",
    .summary = "Restart the workers of a workflow type, also after too many deaths.",
    .text =
        "Models stay in memory. A worker that runs a job finishes it first. Returns when the new workers are ready.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = run_restart,
};

/* ---- logs -------------------------------------------------------------------------------------------------------- */

static const struct rv_option logs_options[] = {
    {"follow", 'f', NULL, "Go on with new lines until Ctrl-C."},
    {0},
};

/* What a worker printed could steer a terminal; into a file or pipe it goes as it is. */
static void print_log(const uint8_t *text, size_t length, bool terminal)
{
    char safe[ESCAPED_LINE_MAX];

    if (length == 0)
        return; /* text may be NULL */
    if (!terminal) {
        (void)fwrite(text, 1, length, stdout);
        return;
    }
    while (length > 0) {
        const uint8_t *end = memchr(text, '\n', length);
        size_t n = end ? (size_t)(end - text) : length;

        (void)fputs(rv_escape(safe, sizeof(safe), text, n), stdout);
        if (end)
            (void)putchar('\n');
        n += end != NULL;
        text += n;
        length -= n;
    }
}

/* The first answer comes by rv_client_request, further ones carry the same id. */
static int follow(struct rv_client *client, struct rv_frame *answer, struct rv_error *err)
{
    bool terminal = isatty(STDOUT_FILENO);

    for (;;) {
        const Rv__LogLines *lines = answer->message->log_lines;
        bool last = lines->last;
        int r;

        print_log(lines->text.data, lines->text.len, terminal);
        if (fflush(stdout) != 0)
            return rv_error_set(err, EPIPE, CODE(INTERNAL), "the output cannot be written: %s", strerror(errno));
        rv_frame_fini(answer);
        if (last)
            return 0;
        do {
            rv_frame_fini(answer);
            r = rv_frame_wait(client->socket, answer, UINT64_MAX);
            if (r <= 0)
                return rv_error_set(err, EPIPE, CODE(NOT_RUNNING), "%s closed the connection", client->path);
            if (answer->message->body_case == RV__FRAME__BODY_ERROR)
                return rv_error_from_message(err, answer->message->error);
        } while (answer->message->body_case != RV__FRAME__BODY_LOG_LINES);
    }
}

static int run_logs(int argc, char **argv)
{
    Rv__LogRequest body = RV__LOG_REQUEST__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    struct rv_args args;
    const char *value;
    int i, r;

    rv_args_init(&args, &rv_command_logs, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        body.follow = true;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    body.type = (char *)args.arguments[0];
    request.body_case = RV__FRAME__BODY_LOG_REQUEST;
    request.log_request = &body;
    r = rv_cli_connect(&client, &args, RV_SOCKET_CONTROL, &err);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_LOG_LINES, RV_CLIENT_TIMEOUT_US, NULL, NULL, &answer,
                              &err);
    if (r == 0)
        r = follow(&client, &answer, &err);
    rv_frame_fini(&answer);
    rv_client_close(&client);
    r = r < 0 ? rv_say_error(&err, args.json) : RV_EXIT_DONE;
    rv_args_fini(&args);
    return r;
}

const struct rv_command rv_command_logs = {
    .name = "logs",
    .arguments = "TYPE [-f]",
    .summary = "Print the newest log lines of a type's workers.",
    .text = "TYPE is a workflow type, `router`, `loader` or `resvisor`.",
    .common = RV_COMMON_CONFIG,
    .min_arguments = 1,
    .max_arguments = 1,
    .options = logs_options,
    .run = run_logs,
};

/* ---- stop -------------------------------------------------------------------------------------------------------- */

static const struct rv_option stop_options[] = {
    {"timeout", 0, "SECONDS", "Give up waiting after this time (default 120)."},
    {0},
};

/* The keeper is the last to go: a descriptor of its process becomes readable then. -1 = cannot be watched. */
static int watch_keeper(struct rv_client *client, struct rv_error *err, int *ret_pidfd)
{
    Resvisor__V1__StatusRequest body = RESVISOR__V1__STATUS_REQUEST__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    int r;

    request.body_case = RV__FRAME__BODY_STATUS_REQUEST;
    request.status_request = &body;
    r = rv_client_request(client, &request, RV__FRAME__BODY_STATUS, RV_CLIENT_TIMEOUT_US, NULL, NULL, &answer, err);
    if (r < 0)
        return r;
    *ret_pidfd = answer.message->status->keeper_pid > 0
                     ? (int)syscall(SYS_pidfd_open, answer.message->status->keeper_pid, 0)
                     : -1;
    rv_frame_fini(&answer);
    return 0;
}

static int still_there(struct rv_error *err, uint64_t timeout_us)
{
    (void)rv_error_set(err, ETIMEDOUT, CODE(DEADLINE), "resvisor is still stopping after %.1f s",
                       (double)timeout_us / 1e6);
    rv_error_remedy(err, "wait, or `resvisor stop` again to end it at once");
    return -ETIMEDOUT;
}

/* The socket's end says that the supervisor is gone, the pidfd that everything is. */
static int wait_for_end(struct rv_client *client, int pidfd, uint64_t timeout_us, struct rv_error *err)
{
    uint64_t start = rv_now_us();
    int r;

    do {
        struct rv_frame frame = RV_FRAME_INIT;
        uint64_t spent = rv_now_us() - start;

        r = rv_frame_wait(client->socket, &frame, spent < timeout_us ? timeout_us - spent : 0);
        rv_frame_fini(&frame);
    } while (r > 0);
    if (r == -ETIMEDOUT)
        return still_there(err, timeout_us);
    for (r = 0; pidfd >= 0 && r <= 0;) {
        struct pollfd pfd = {.fd = pidfd, .events = POLLIN};
        uint64_t spent = rv_now_us() - start;

        if (spent >= timeout_us)
            return still_there(err, timeout_us);
        r = poll(&pfd, 1,
                 (int)((timeout_us - spent) / RV_MSEC > INT_MAX - 1 ? INT_MAX : (timeout_us - spent) / RV_MSEC + 1));
        if (r < 0 && errno != EINTR)
            break;
    }
    return 0;
}

static int run_stop(int argc, char **argv)
{
    Rv__Stop body = RV__STOP__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    uint64_t timeout_us = STOP_TIMEOUT_US;
    struct rv_args args;
    const char *value;
    int i, r, pidfd = -1;

    rv_args_init(&args, &rv_command_stop, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        if (!rv_args_seconds(&args, "timeout", value, &timeout_us))
            return rv_args_exit(&args, RV_ARGS_ERROR);
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    request.body_case = RV__FRAME__BODY_STOP;
    request.stop = &body;
    r = rv_cli_connect(&client, &args, RV_SOCKET_CONTROL, &err);
    if (r == 0)
        r = watch_keeper(&client, &err, &pidfd);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_DONE, RV_CLIENT_TIMEOUT_US, NULL, NULL, &answer, &err);
    rv_frame_fini(&answer);
    if (r == 0)
        r = wait_for_end(&client, pidfd, timeout_us, &err);
    if (r == 0)
        print_done(args.json, "stopped");
    r = r < 0 ? rv_say_error(&err, args.json) : RV_EXIT_DONE;
    if (pidfd >= 0)
        (void)close(pidfd);
    rv_client_close(&client);
    rv_args_fini(&args);
    return r;
}

const struct rv_command rv_command_stop = {
    .name = "stop",
    .arguments = "[--timeout SECONDS] [--json]",
    .summary = "Stop resvisor and wait until it is gone.",
    .text = "Workers may finish the job that they run, for up to their stop_timeout. Models are gone from memory then.",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .options = stop_options,
    .run = run_stop,
};
