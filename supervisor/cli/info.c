/* Commands that need no running supervisor: `check`, `errors`, `version`. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "output.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* ---- check ------------------------------------------------------------------------------------------------------- */

static const struct rv_option check_options[] = {
    {"show", 's', NULL, "Print every effective value, its unit, and where it comes from."},
    {"reference", 0, NULL, "Print the reference of all keys, in Markdown."},
    {0},
};
enum { CHECK_SHOW, CHECK_REFERENCE };

static void print_problems_json(const char *problems)
{
    json_t *root = json_object(), *array = json_array();

    while (*problems) {
        size_t n = strcspn(problems, "\n");

        (void)json_array_append_new(array, json_stringn(problems, n));
        problems += n + (problems[n] == '\n');
    }
    (void)json_object_set_new(root, "error", rv_json_error(CODE(CONFIG), "", "mend what `problems` names"));
    (void)json_object_set_new(root, "problems", array);
    rv_json_print(root);
}

static void print_good(const struct rv_config *config, bool json)
{
    if (json) {
        json_t *root = json_object();

        (void)json_object_set_new(root, "file", config->file ? rv_json_text(config->file) : json_null());
        (void)json_object_set_new(root, "models", json_integer(config->model_count));
        (void)json_object_set_new(root, "types", json_integer(config->type_count));
        rv_json_print(root);
    } else {
        printf("%s: good, %u models, %u workflow types\n", config->file ? config->file : "no file, defaults only",
               config->model_count, config->type_count);
    }
}

static int check(const struct rv_args *args, bool show)
{
    struct rv_config_sources sources;
    struct rv_config *config = NULL;
    char *problems = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&problems, &length);
    int r;

    if (!out)
        return RV_EXIT_INTERNAL;
    rv_args_sources(args, &sources);
    r = rv_config_load(&sources, out, &config);
    (void)fclose(out);
    if (r < 0 && args->json)
        print_problems_json(problems);
    else if (r < 0)
        (void)fputs(problems, stderr);
    else if (show)
        rv_config_show(config, stdout, args->json);
    else
        print_good(config, args->json);
    free(problems);
    rv_config_destroy(config);
    return r < 0 ? RV_EXIT_USAGE : RV_EXIT_DONE;
}

static int run_check(int argc, char **argv)
{
    bool show = false, reference = false;
    struct rv_args args;
    const char *value;
    int i;

    rv_args_init(&args, &rv_command_check, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0) {
        show |= i == CHECK_SHOW;
        reference |= i == CHECK_REFERENCE;
    }
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (reference)
        rv_config_write_reference(stdout);
    i = reference ? RV_EXIT_DONE : check(&args, show);
    rv_args_fini(&args);
    return i;
}

const struct rv_command rv_command_check = {
    .name = "check",
    .arguments = "[-c FILE] [--show] [--json]",
    .summary = "Check the configuration, or show it.",
    .text = "Names every problem with file, line and key, and what is allowed. Nothing is started or changed.",
    .common = RV_COMMON_CONFIG | RV_COMMON_LOG | RV_COMMON_JSON,
    .options = check_options,
    .run = run_check,
};

/* ---- errors ------------------------------------------------------------------------------------------------------ */

static const struct rv_option errors_options[] = {
    {"reference", 0, NULL, "Print the reference of all errors, in Markdown."},
    {0},
};

static const char *const exit_texts[] = {
    [RV_EXIT_DONE] = "done",
    [RV_EXIT_INTERNAL] = "a fault of resvisor itself",
    [RV_EXIT_USAGE] = "wrong command line, request or configuration",
    [RV_EXIT_NOT_RUNNING] = "resvisor is not running",
    [RV_EXIT_REFUSED] = "refused",
    [RV_EXIT_JOB_FAILED] = "the job failed",
    [RV_EXIT_NOT_FOUND] = "there is no such thing",
    [RV_EXIT_NO_ROOM] = "memory, budget, queue or table is full",
    [RV_EXIT_DEADLINE] = "the deadline passed",
    [RV_EXIT_CANCELLED] = "cancelled",
    [RV_EXIT_ALREADY_RUNNING] = "resvisor is already running",
    [RV_EXIT_SUPERVISOR_DIED] = "the supervisor died; only from `resvisor start`",
};
#define EXIT_COUNT (sizeof(exit_texts) / sizeof(exit_texts[0]))

static void write_reference(FILE *out)
{
    fprintf(
        out,
        "# Errors\n\n"
        "<!-- Written by `resvisor errors --reference` from the error table. Change the table, not this file. -->\n\n"
        "One table for RPC, command line and HTTP. The number and the name never change their meaning. An error also\n"
        "carries a message that says what happened to what, and a remedy; those below stand for cases without a "
        "better\n"
        "one. \"Again\" says whether the same request can succeed later without a change.\n\n"
        "## Exit codes of `resvisor`\n\n| exit code | meaning |\n| ---: | --- |\n");
    for (unsigned i = 0; i < EXIT_COUNT; i++)
        fprintf(out, "| %u | %s |\n", i, exit_texts[i]);
    fprintf(out, "\n## Codes\n\n| code | name | exit code | HTTP | again | what happened | what to do |\n"
                 "| ---: | --- | ---: | ---: | --- | --- | --- |\n");
    for (int i = 0; i < rv_error_count(); i++) {
        const struct rv_error_row *row = rv_error_row(i);

        fprintf(out, "| %d | `%s` | %u | %u | %s | %s | %s |\n", i, row->name, row->exit_code, row->http_status,
                row->retryable ? "yes" : "no", row->text, row->remedy);
    }
}

static void print_errors_json(void)
{
    json_t *root = json_object(), *array = json_array();

    for (int i = 0; i < rv_error_count(); i++) {
        const struct rv_error_row *row = rv_error_row(i);
        json_t *error = rv_json_error(i, row->text, row->remedy);

        (void)json_object_set_new(error, "exit_code", json_integer(row->exit_code));
        (void)json_object_set_new(error, "http_status", json_integer(row->http_status));
        (void)json_object_set_new(error, "retryable", json_boolean(row->retryable));
        (void)json_array_append_new(array, error);
    }
    (void)json_object_set_new(root, "errors", array);
    rv_json_print(root);
}

static void print_errors(void)
{
    static const char *const titles[] = {">CODE", "NAME", ">EXIT CODE", ">HTTP", "WHAT HAPPENED", NULL};
    struct rv_table table;

    rv_table_init(&table, titles);
    for (int i = 0; i < rv_error_count(); i++) {
        const struct rv_error_row *row = rv_error_row(i);

        rv_table_add(&table, "%d", i);
        rv_table_add(&table, "%s", row->name);
        rv_table_add(&table, "%u", row->exit_code);
        rv_table_add(&table, "%u", row->http_status);
        rv_table_add(&table, "%s", row->text);
    }
    rv_table_print(&table);
    printf("\nExit codes:\n");
    for (unsigned i = 0; i < EXIT_COUNT; i++)
        printf("  %2u  %s\n", i, exit_texts[i]);
}

static int run_errors(int argc, char **argv)
{
    bool reference = false;
    struct rv_args args;
    const char *value;
    int i;

    rv_args_init(&args, &rv_command_errors, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        reference = true;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (reference)
        write_reference(stdout);
    else if (args.json)
        print_errors_json();
    else
        print_errors();
    return RV_EXIT_DONE;
}

const struct rv_command rv_command_errors = {
    .name = "errors",
    .arguments = "[--json]",
    .summary = "List error codes and exit codes.",
    .text = "",
    .common = RV_COMMON_JSON,
    .options = errors_options,
    .run = run_errors,
};

/* ---- version ----------------------------------------------------------------------------------------------------- */

static int run_version(int argc, char **argv)
{
    struct rv_args args;
    const char *value;
    int i;

    rv_args_init(&args, &rv_command_version, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        ;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    if (args.json) {
        json_t *root = json_object();

        (void)json_object_set_new(root, "version", json_string(RV_VERSION));
        (void)json_object_set_new(root, "protocol", json_integer(RV_PROTOCOL_VERSION));
        rv_json_print(root);
    } else {
        printf("resvisor %s (protocol %u)\n", RV_VERSION, RV_PROTOCOL_VERSION);
    }
    return RV_EXIT_DONE;
}

const struct rv_command rv_command_version = {
    .name = "version",
    .arguments = "[--json]",
    .summary = "Print the version.",
    .text = "",
    .common = RV_COMMON_JSON,
    .run = run_version,
};
