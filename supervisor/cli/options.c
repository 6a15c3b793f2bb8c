#include "options.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"
#include "rpc.pb-c.h"

#define HELP_COLUMN 26 /* where the text of an option begins */
#define HELP_WIDTH 80
#define SECONDS_MAX 31536000 /* a year */

/* Numbers of the common options; those of the command itself are 0 and up. */
enum { OPTION_CONFIG = 1000, OPTION_RUNTIME_DIR, OPTION_SET, OPTION_LOG_LEVEL, OPTION_JSON, OPTION_HELP };

static const struct {
    struct rv_option option;
    unsigned common; /* 0 = every command has it */
    int number;
} common_options[] = {
    {{"config", 'c', "FILE", "Configuration file."}, RV_COMMON_CONFIG, OPTION_CONFIG},
    {{"runtime-dir", 0, "DIR", "Folder of the sockets; sets runtime_dir."}, RV_COMMON_CONFIG, OPTION_RUNTIME_DIR},
    {{"set", 0, "KEY=VALUE", "Set one configuration key; may be repeated."}, RV_COMMON_CONFIG, OPTION_SET},
    {{"log-level", 0, "LEVEL", "error, warning, info or debug; sets log_level."}, RV_COMMON_LOG, OPTION_LOG_LEVEL},
    {{"json", 0, NULL, "Print JSON, errors too."}, RV_COMMON_JSON, OPTION_JSON},
    {{"help", 'h', NULL, "Print this help."}, 0, OPTION_HELP},
};
#define COMMON_COUNT (sizeof(common_options) / sizeof(common_options[0]))

const struct rv_command *rv_command_find(const char *name)
{
    for (unsigned i = 0; rv_commands[i]; i++)
        if (strcmp(rv_commands[i]->name, name) == 0)
            return rv_commands[i];
    return NULL;
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

static void say_json(const struct rv_error *err)
{
    json_t *root = json_object();

    (void)json_object_set_new(root, "error", rv_json_error(err->code, err->message, err->remedy));
    rv_json_print(root);
}

int rv_say_error(const struct rv_error *err, bool json)
{
    const struct rv_error_row *row = rv_error_row(err->code);
    const char *message = *err->message ? err->message : row->text;
    char safe[2 * RV_ERROR_TEXT_MAX];

    if (json) {
        say_json(err);
        return row->exit_code;
    }
    fprintf(stderr, "resvisor: %s\n", rv_escape(safe, sizeof(safe), message, strlen(message)));
    if (*err->remedy)
        fprintf(stderr, "  what to do: %s\n", rv_escape(safe, sizeof(safe), err->remedy, strlen(err->remedy)));
    return row->exit_code;
}

int rv_args_wrong(const struct rv_args *args, const char *format, ...)
{
    struct rv_error err = {.code = RESVISOR__V1__ERROR_CODE__ERROR_USAGE};
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(err.message, sizeof(err.message), format, ap);
    va_end(ap);
    rv_error_remedy(&err,
                    args->command ? "`resvisor help %s` shows how it is used" : "`resvisor help` shows the commands",
                    args->command ? args->command->name : "");
    return rv_say_error(&err, args->json);
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

void rv_args_init(struct rv_args *args, const struct rv_command *command, int argc, char **argv)
{
    memset(args, 0, sizeof(*args));
    args->command = command;
    args->argc = argc;
    args->argv = argv;
    args->index = 1;
    /* An error in front of --json is JSON too. */
    for (int i = 1; command && (command->common & RV_COMMON_JSON) && i < argc && strcmp(argv[i], "--") != 0; i++)
        args->json |= strcmp(argv[i], "--json") == 0;
}

void rv_args_fini(struct rv_args *args)
{
    for (unsigned i = 0; i < args->set_count; i++)
        free(args->sets[i]);
    args->set_count = 0;
}

int rv_args_exit(struct rv_args *args, int result)
{
    rv_args_fini(args);
    return result == RV_ARGS_HELP ? RV_EXIT_DONE : RV_EXIT_USAGE;
}

void rv_args_sources(const struct rv_args *args, struct rv_config_sources *ret_sources)
{
    ret_sources->file = args->config_file;
    ret_sources->sets = (const char *const *)args->sets;
}

static bool option_matches(const struct rv_option *option, const char *name, size_t length, char letter)
{
    return letter ? option->letter == letter
                  : strlen(option->name) == length && strncmp(option->name, name, length) == 0;
}

/* By name or, if letter is not 0, by letter. NULL = none. */
static const struct rv_option *find_option(const struct rv_args *args, const char *name, size_t length, char letter,
                                           int *ret_number)
{
    unsigned common = args->command ? args->command->common : 0;
    const struct rv_option *own = args->command ? args->command->options : NULL;

    for (int i = 0; own && own[i].name; i++) {
        if (option_matches(&own[i], name, length, letter)) {
            *ret_number = i;
            return &own[i];
        }
    }
    for (unsigned i = 0; i < COMMON_COUNT; i++) {
        if ((common_options[i].common & ~common) == 0 &&
            option_matches(&common_options[i].option, name, length, letter)) {
            *ret_number = common_options[i].number;
            return &common_options[i].option;
        }
    }
    return NULL;
}

static int add_set(struct rv_args *args, const char *key, const char *value)
{
    char *text = NULL;

    if (args->set_count >= RV_ARGS_SETS_MAX) {
        (void)rv_args_wrong(args, "more than %u values set", RV_ARGS_SETS_MAX);
        return RV_ARGS_ERROR;
    }
    if (asprintf(&text, "%s%s%s", key, *key ? "=" : "", value) < 0) {
        (void)rv_args_wrong(args, "no memory");
        return RV_ARGS_ERROR;
    }
    args->sets[args->set_count++] = text;
    return 0;
}

/* 1 = one of the command's own; 0 = taken in; else RV_ARGS_HELP or RV_ARGS_ERROR. */
static int take_common(struct rv_args *args, int number, const char *value)
{
    switch (number) {
    case OPTION_CONFIG:
        args->config_file = value;
        return 0;
    case OPTION_RUNTIME_DIR:
        return add_set(args, "runtime_dir", value);
    case OPTION_LOG_LEVEL:
        return add_set(args, "log_level", value);
    case OPTION_SET:
        return add_set(args, "", value);
    case OPTION_JSON:
        args->json = true;
        return 0;
    case OPTION_HELP:
        if (args->command)
            rv_command_print_help(args->command, stdout);
        return RV_ARGS_HELP;
    default:
        return 1;
    }
}

static int unknown_option(struct rv_args *args, const char *text)
{
    char safe[64];

    (void)rv_args_wrong(args, "unknown option %s", rv_escape(safe, sizeof(safe), text, strlen(text)));
    return RV_ARGS_ERROR;
}

/* Reads the option at args->index or the next of its letters. Returns as take_common, 1 with *ret_number filled. */
static int read_option(struct rv_args *args, int *ret_number, const char **ret_value)
{
    const char *word = args->argv[args->index], *equals = NULL, *value = NULL;
    const struct rv_option *option;
    char shown[3] = "-";
    int r;

    if (args->letters || word[1] != '-') {
        const char *at = args->letters ? args->letters : word + 1;

        shown[1] = *at;
        option = find_option(args, NULL, 0, *at, ret_number);
        if (!option)
            return unknown_option(args, shown);
        if (option->argument && at[1])
            value = at + 1;
        args->letters = !option->argument && at[1] ? at + 1 : NULL;
    } else {
        equals = strchr(word, '=');
        option = find_option(args, word + 2, equals ? (size_t)(equals - word - 2) : strlen(word + 2), 0, ret_number);
        if (!option)
            return unknown_option(args, word);
        value = equals ? equals + 1 : NULL;
    }
    if (!args->letters)
        args->index++;
    if (option->argument && !value && args->index < args->argc)
        value = args->argv[args->index++];
    if (!!option->argument != !!value) {
        (void)rv_args_wrong(args, "--%s takes %s%s", option->name, option->argument ? "a value: " : "no value",
                            option->argument ? option->argument : "");
        return RV_ARGS_ERROR;
    }
    r = take_common(args, *ret_number, value);
    *ret_value = value;
    return r;
}

static int check_count(struct rv_args *args)
{
    const struct rv_command *c = args->command;

    if (!c || (args->count >= c->min_arguments && args->count <= c->max_arguments))
        return RV_ARGS_END;
    if (args->count < c->min_arguments)
        (void)rv_args_wrong(args, "%s: something is missing; usage: resvisor %s %s", c->name, c->name, c->arguments);
    else
        (void)rv_args_wrong(args, "%s: too many arguments; usage: resvisor %s %s", c->name, c->name, c->arguments);
    return RV_ARGS_ERROR;
}

int rv_args_next(struct rv_args *args, const char **ret_value)
{
    *ret_value = NULL;
    while (args->index < args->argc) {
        const char *word = args->argv[args->index];
        int number, r;

        if (!args->letters && !args->only_arguments && strcmp(word, "--") == 0) {
            args->only_arguments = true;
            args->index++;
        } else if (!args->letters && (args->only_arguments || word[0] != '-' || word[1] == '\0')) {
            if (args->count == RV_ARGS_POSITIONAL_MAX) {
                (void)rv_args_wrong(args, "too many arguments");
                return RV_ARGS_ERROR;
            }
            args->arguments[args->count++] = word;
            args->index++;
        } else if ((r = read_option(args, &number, ret_value)) != 0) {
            return r == 1 ? number : r;
        }
    }
    return check_count(args);
}

bool rv_args_number(struct rv_args *args, const char *option, const char *text, int64_t min, int64_t max,
                    int64_t *ret_value)
{
    char *end, safe[64];
    long long value;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max) {
        (void)rv_args_wrong(args, "--%s: \"%s\" is not a number from %lld to %lld", option,
                            rv_escape(safe, sizeof(safe), text, strlen(text)), (long long)min, (long long)max);
        return false;
    }
    *ret_value = value;
    return true;
}

bool rv_args_seconds(struct rv_args *args, const char *option, const char *text, uint64_t *ret_us)
{
    char *end, safe[64];
    double value;

    errno = 0;
    value = strtod(text, &end);
    if (errno || end == text || *end || !(value >= 0 && value <= SECONDS_MAX)) {
        (void)rv_args_wrong(args, "--%s: \"%s\" is not a number of seconds such as 10 or 0.5", option,
                            rv_escape(safe, sizeof(safe), text, strlen(text)));
        return false;
    }
    *ret_us = (uint64_t)(value * 1e6);
    return true;
}

/* ---- help -------------------------------------------------------------------------------------------------------- */

static void print_option(const struct rv_option *option, FILE *out)
{
    char left[64];
    const char *text = option->help;
    int column = HELP_COLUMN;

    (void)snprintf(left, sizeof(left), "  %c%c%c --%s%s%s", option->letter ? '-' : ' ',
                   option->letter ? option->letter : ' ', option->letter ? ',' : ' ', option->name,
                   option->argument ? " " : "", option->argument ? option->argument : "");
    fprintf(out, "%-*s", HELP_COLUMN, left);
    if (strlen(left) >= HELP_COLUMN)
        fprintf(out, "\n%*s", HELP_COLUMN, "");
    while (*text) {
        int word = (int)strcspn(text, " ");

        if (column + word > HELP_WIDTH && column > HELP_COLUMN) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        fprintf(out, "%s%.*s", column > HELP_COLUMN ? " " : "", word, text);
        column += word + 1;
        text += word;
        text += *text == ' ';
    }
    (void)fputc('\n', out);
}

void rv_command_print_help(const struct rv_command *command, FILE *out)
{
    fprintf(out, "resvisor %s%s%s\n\n%s\n", command->name, *command->arguments ? " " : "", command->arguments,
            command->summary);
    if (*command->text)
        fprintf(out, "\n%s\n", command->text);
    fprintf(out, "\nOptions:\n");
    for (const struct rv_option *o = command->options; o && o->name; o++)
        print_option(o, out);
    for (unsigned i = 0; i < COMMON_COUNT; i++)
        if ((common_options[i].common & ~command->common) == 0)
            print_option(&common_options[i].option, out);
}

void rv_args_print_options(const struct rv_args *args, FILE *out)
{
    const struct rv_option *own = args->command->options;

    for (unsigned i = 0; own && own[i].name; i++)
        fprintf(out, "--%s%s\t%s\n", own[i].name, own[i].argument ? "=" : "", own[i].help);
    for (unsigned i = 0; i < COMMON_COUNT; i++)
        if ((common_options[i].common & ~args->command->common) == 0)
            fprintf(out, "--%s%s\t%s\n", common_options[i].option.name, common_options[i].option.argument ? "=" : "",
                    common_options[i].option.help);
}
