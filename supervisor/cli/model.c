/* `load`, `unload`, `pin`, `unpin`. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "client.h"
#include "clock.h"
#include "config_keys.h"
#include "output.h"

static const struct rv_option model_options[] = {
    {"timeout", 0, "SECONDS", "Give up waiting after this time; a load goes on."},
    {"device", 0, "DEVICE", "Only there: host, cuda:0, or GPU- and a uuid."},
    {0},
};

enum { OPTION_TIMEOUT, OPTION_DEVICE }; /* their rows */

struct bar {
    struct rv_progress progress;
    const char *model;
};

static void on_progress(const Rv__LoadProgress *progress, void *context)
{
    struct bar *bar = context;

    rv_progress_show(&bar->progress, bar->model, progress->bytes_done, progress->bytes_total, "");
}

static void print_model(const Resvisor__V1__ModelStatus *m, bool json)
{
    char size[32], time[32], name[256], state[32], device[64];

    if (json) {
        rv_json_print(rv_model_json(m));
        return;
    }
    rv_format_size(m->bytes, size, sizeof(size));
    rv_format_duration(m->load_ms * RV_MSEC, time, sizeof(time));
    printf("%s: %s", rv_escape(name, sizeof(name), m->name, strlen(m->name)),
           rv_escape(state, sizeof(state), m->state, strlen(m->state)));
    if (*m->device && strcmp(m->device, "host") != 0)
        printf(" on %s", rv_escape(device, sizeof(device), m->device, strlen(m->device)));
    if (m->pinned)
        (void)fputs(", pinned", stdout);
    if (m->bytes)
        printf(", %s, %" PRIu64 " tensors, generation %" PRIu64 ", loaded in %s", size, m->tensors, m->generation,
               time);
    (void)putchar('\n');
}

/* A configured name has no slash; a path is made absolute, since the supervisor's folder is another one. */
static const char *absolute_model(const char *model, char *buffer)
{
    return strchr(model, '/') && realpath(model, buffer) ? buffer : model;
}

static int run(const struct rv_command *command, Resvisor__V1__ModelAction action, int argc, char **argv)
{
    Resvisor__V1__ModelRequest body = RESVISOR__V1__MODEL_REQUEST__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    uint64_t timeout_us = UINT64_MAX;
    struct rv_args args;
    char path[PATH_MAX];
    struct bar bar;
    const char *value;
    int i, r, exit_code = RV_EXIT_DONE;

    rv_args_init(&args, command, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        if (i == OPTION_DEVICE)
            body.device = (char *)value;
        else if (!rv_args_seconds(&args, "timeout", value, &timeout_us))
            return rv_args_exit(&args, RV_ARGS_ERROR);
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    body.action = action;
    body.model = (char *)absolute_model(args.arguments[0], path);
    request.body_case = RV__FRAME__BODY_MODEL_REQUEST;
    request.model_request = &body;
    bar.model = strrchr(args.arguments[0], '/') ? strrchr(args.arguments[0], '/') + 1 : args.arguments[0];
    rv_progress_init(&bar.progress, true, args.json);
    r = rv_cli_connect(&client, &args, RV_SOCKET_CONTROL, &err);
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_MODEL_STATUS, timeout_us, on_progress, &bar, &answer,
                              &err);
    rv_progress_end(&bar.progress);
    if (r < 0)
        exit_code = rv_say_error(&err, args.json);
    else
        print_model(answer.message->model_status, args.json);
    rv_frame_fini(&answer);
    rv_client_close(&client);
    rv_args_fini(&args);
    return exit_code;
}

static int run_load(int argc, char **argv)
{
    return run(&rv_command_load, RESVISOR__V1__MODEL_ACTION__MODEL_LOAD, argc, argv);
}

static int run_unload(int argc, char **argv)
{
    return run(&rv_command_unload, RESVISOR__V1__MODEL_ACTION__MODEL_UNLOAD, argc, argv);
}

static int run_pin(int argc, char **argv)
{
    return run(&rv_command_pin, RESVISOR__V1__MODEL_ACTION__MODEL_PIN, argc, argv);
}

static int run_unpin(int argc, char **argv)
{
    return run(&rv_command_unpin, RESVISOR__V1__MODEL_ACTION__MODEL_UNPIN, argc, argv);
}

#define MODEL_COMMAND(word, what, more)                                                                               \
    const struct rv_command rv_command_##word = {.name = #word,                                                       \
                                                 .arguments = "MODEL [--device DEVICE] [--timeout SECONDS] [--json]", \
                                                 .summary = what,                                                     \
                                                 .text = more,                                                        \
                                                 .common = RV_COMMON_CONFIG | RV_COMMON_JSON,                         \
                                                 .min_arguments = 1,                                                  \
                                                 .max_arguments = 1,                                                  \
                                                 .options = model_options,                                            \
                                                 .run = run_##word}

MODEL_COMMAND(
    load, "Load a model into memory and wait until it is there.",
    "MODEL is a configured name, or the path of a file inside a configured model folder. A model that is in memory\n"
    "already and whose file is unchanged is left as it is. Without --device it is loaded to every device on which a\n"
    "type that lists it wants it, else to the host.");
MODEL_COMMAND(unload, "Take a model out of memory.",
              "Refused while the model has leases or is pinned. Without --device it is taken from everywhere, or from "
              "nowhere.");
MODEL_COMMAND(pin, "Keep a model in memory: it cannot be unloaded. Loads it if needed.",
              "Without --device it is pinned, and loaded, where `resvisor load` would load it.");
MODEL_COMMAND(unpin, "Let a pinned model go again.",
              "The model stays in memory until it is unloaded. Without --device it is unpinned everywhere.");
