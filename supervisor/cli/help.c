/* Finding and running a command; `help`, and the words for shell completion. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "client.h"
#include "config_keys.h"
#include "output.h"

#define SUGGESTION_WORDS_MAX 1024
#define COMPLETE_TIMEOUT_US UINT64_C(500000) /* a shell that completes must not wait for long */

static void print_commands(FILE *out)
{
    fprintf(out, "resvisor keeps model weights in memory once and lends them to worker processes.\n\n"
                 "Usage: resvisor COMMAND [ARGUMENT]... [OPTION]...\n\nCommands:\n");
    for (unsigned i = 0; rv_commands[i]; i++)
        if (!rv_commands[i]->hidden)
            fprintf(out, "  %-10s %s\n", rv_commands[i]->name, rv_commands[i]->summary);
    fprintf(out, "\n`resvisor help COMMAND` says more. Exit codes: `resvisor errors`.\n");
}

static int run_help(int argc, char **argv)
{
    struct rv_args args;
    const char *value;
    const struct rv_command *command;
    int i;

    rv_args_init(&args, &rv_command_help, argc, argv);
    i = rv_args_next(&args, &value);
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (args.count == 0) {
        print_commands(stdout);
        return RV_EXIT_DONE;
    }
    command = rv_command_find(args.arguments[0]);
    if (!command || command->hidden)
        return rv_args_wrong(&args, "there is no command %s", args.arguments[0]);
    rv_command_print_help(command, stdout);
    return RV_EXIT_DONE;
}

const struct rv_command rv_command_help = {
    .name = "help",
    .arguments = "[COMMAND]",
    .summary = "Say what the commands do.",
    .text = "",
    .max_arguments = 1,
    .run = run_help,
};

/* ---- completion -------------------------------------------------------------------------------------------------- */

static void print_options(const char *name)
{
    const struct rv_command *command = rv_command_find(name);
    struct rv_args args;

    if (!command || command->hidden)
        return;
    rv_args_init(&args, command, 0, NULL);
    rv_args_print_options(&args, stdout);
}

static void print_job_ids(const char *runtime_dir, struct rv_client *client)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__List list = RESVISOR__V1__LIST__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_error err = {0};

    request.body_case = RESVISOR__V1__REQUEST__BODY_LIST;
    request.list = &list;
    if (rv_client_connect(client, runtime_dir, RV_SOCKET_ROUTER, COMPLETE_TIMEOUT_US, &err) == 0 &&
        rv_client_rpc(client, &request, COMPLETE_TIMEOUT_US, &answer, &err) == 0 &&
        answer.message->rpc_reply->body_case == RESVISOR__V1__REPLY__BODY_JOBS)
        for (size_t i = 0; i < answer.message->rpc_reply->jobs->n_jobs; i++)
            puts(answer.message->rpc_reply->jobs->jobs[i]->job_id);
    rv_frame_fini(&answer);
}

static void print_models_or_types(const char *runtime_dir, struct rv_client *client, bool models)
{
    Resvisor__V1__StatusRequest body = RESVISOR__V1__STATUS_REQUEST__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_error err = {0};
    char safe[RV_KEY_VALUE_MAX];

    request.body_case = RV__FRAME__BODY_STATUS_REQUEST;
    request.status_request = &body;
    if (rv_client_connect(client, runtime_dir, RV_SOCKET_CONTROL, COMPLETE_TIMEOUT_US, &err) == 0 &&
        rv_client_request(client, &request, RV__FRAME__BODY_STATUS, COMPLETE_TIMEOUT_US, NULL, NULL, &answer, &err) ==
            0) {
        const Resvisor__V1__Status *status = answer.message->status;

        for (size_t i = 0; i < (models ? status->n_models : status->n_types); i++) {
            const char *name = models ? status->models[i]->name : status->types[i]->name;

            if (models && i && strcmp(status->models[i - 1]->name, name) == 0)
                continue; /* the same one on another device */
            puts(rv_escape(safe, sizeof(safe), name, strlen(name)));
        }
    }
    rv_frame_fini(&answer);
}

/* Names that a running supervisor knows. Without one there is nothing to offer, and nothing to complain about. */
static void print_names(const char *kind)
{
    struct rv_args none;
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    char folder[PATH_MAX];

    rv_args_init(&none, NULL, 0, NULL);
    if (rv_cli_runtime_dir(&none, folder, sizeof(folder), &err) < 0)
        return;
    if (strcmp(kind, "jobs") == 0)
        print_job_ids(folder, &client);
    else if (strcmp(kind, "models") == 0 || strcmp(kind, "types") == 0)
        print_models_or_types(folder, &client, kind[0] == 'm');
    rv_client_close(&client);
}

static int run_words(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "";

    if (strcmp(kind, "commands") == 0) {
        for (unsigned i = 0; rv_commands[i]; i++)
            if (!rv_commands[i]->hidden)
                printf("%s\t%s\n", rv_commands[i]->name, rv_commands[i]->summary);
    } else if (strcmp(kind, "options") == 0 && argc > 2) {
        print_options(argv[2]);
    } else if (strcmp(kind, "keys") == 0) {
        for (unsigned i = 0; rv_key_at(i); i++)
            if (!strchr(rv_key_at(i)->pattern, '*'))
                printf("%s=\n", rv_key_at(i)->pattern);
    } else {
        print_names(kind);
    }
    return RV_EXIT_DONE;
}

const struct rv_command rv_command_words = {
    .name = "_complete", .arguments = "KIND [COMMAND]", .summary = "", .text = "", .run = run_words, .hidden = true};

static int run_complete(int argc, char **argv)
{
    struct rv_args args;
    const char *value;
    int i;

    rv_args_init(&args, &rv_command_complete, argc, argv);
    i = rv_args_next(&args, &value);
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    for (const struct rv_completion *c = rv_completions; c->shell; c++) {
        if (strcmp(c->shell, args.arguments[0]) == 0) {
            (void)fputs(c->script, stdout);
            return RV_EXIT_DONE;
        }
    }
    return rv_args_wrong(&args, "there is no completion for that shell; there is one for bash, zsh and fish");
}

const struct rv_command rv_command_complete = {
    .name = "complete",
    .arguments = "SHELL",
    .summary = "Print the completion script of bash, zsh or fish.",
    .text = "For this shell: source <(resvisor complete bash)",
    .min_arguments = 1,
    .max_arguments = 1,
    .run = run_complete,
};

/* ---- running ----------------------------------------------------------------------------------------------------- */

static int unknown_command(const struct rv_args *args, const char *name)
{
    char words[SUGGESTION_WORDS_MAX] = "", guess[RV_KEY_PATH_MAX], safe[64];
    size_t n = 0;

    for (unsigned i = 0; rv_commands[i]; i++)
        if (!rv_commands[i]->hidden && n + strlen(rv_commands[i]->name) + 2 < sizeof(words))
            n += (size_t)sprintf(words + n, "%s%s", n ? "|" : "", rv_commands[i]->name);
    rv_escape(safe, sizeof(safe), name, strlen(name));
    if (rv_word_suggest(words, name, guess, sizeof(guess)))
        return rv_args_wrong(args, "there is no command %s, did you mean %s?", safe, guess);
    return rv_args_wrong(args, "there is no command %s", safe);
}

int rv_cli_run(int argc, char **argv)
{
    static const char *const help_words[] = {"--help", "-h", NULL}, *const version_words[] = {"--version", "-V", NULL};
    const struct rv_command *command;
    struct rv_args none;
    int exit_code;

    rv_args_init(&none, NULL, argc, argv);
    if (argc < 2) {
        print_commands(stderr);
        return RV_EXIT_USAGE;
    }
    for (unsigned i = 0; help_words[i]; i++) {
        if (strcmp(argv[1], help_words[i]) == 0)
            argv[1] = (char *)"help";
        if (strcmp(argv[1], version_words[i]) == 0)
            argv[1] = (char *)"version";
    }
    command = rv_command_find(argv[1]);
    if (!command)
        return unknown_command(&none, argv[1]);
    exit_code = command->run(argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        if (errno != EPIPE)
            fprintf(stderr, "resvisor: the output cannot be written: %s\n", strerror(errno));
        exit_code = exit_code ? exit_code : RV_EXIT_INTERNAL;
    }
    return exit_code;
}
