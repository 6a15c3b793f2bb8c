/*
 * Commands and their options: one row per command, one row per option; parsing, --help and shell completion come from
 * these rows. Used by every command, `start` included.
 *
 *   static const struct rv_option options[] = {{"detach", 'd', NULL, "Return when it is ready."}, {0}};
 *
 *   int rv_command_start(int argc, char **argv)
 *   {
 *       struct rv_args args;
 *       const char *value;
 *       int i;
 *
 *       rv_args_init(&args, rv_command_find("start"), argc, argv);
 *       while ((i = rv_args_next(&args, &value)) >= 0)
 *           if (i == 0)
 *               detach = true;
 *       if (i != RV_ARGS_END)
 *           return rv_args_exit(&args, i);    // --help was printed, or the error was
 *       … rv_args_sources(&args, &sources); rv_config_load(&sources, stderr, &config) …
 */
#ifndef RV_CLI_OPTIONS_H
#define RV_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "config.h"
#include "error.h"

#define RV_ARGS_SETS_MAX 256u
#define RV_ARGS_POSITIONAL_MAX 8u

struct rv_option {
    const char *name;     /* without dashes; NULL ends the list */
    char letter;          /* 0 = none */
    const char *argument; /* "FILE"; NULL = a flag */
    const char *help;     /* one sentence */
};

/* Options that several commands have; a bit per command says which. */
enum rv_common {
    RV_COMMON_CONFIG = 1 << 0, /* -c/--config, --runtime-dir, --set */
    RV_COMMON_LOG = 1 << 1,    /* --log-level */
    RV_COMMON_JSON = 1 << 2,   /* --json */
};

struct rv_command {
    const char *name;
    const char *arguments; /* "TYPE [OPTION]..." */
    const char *summary;   /* one line of `resvisor help` */
    const char *text;      /* paragraphs of `resvisor help COMMAND` */
    unsigned common;       /* enum rv_common */
    unsigned min_arguments, max_arguments;
    const struct rv_option *options;   /* NULL = none of its own */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns the exit code */
    bool hidden;
};

/* The program's commands, in the order of `resvisor help`, ended by NULL: main.c. Each row stands beside its code. */
extern const struct rv_command *const rv_commands[];

/* NULL = no such command. */
const struct rv_command *rv_command_find(const char *name);

struct rv_args {
    const struct rv_command *command;
    int argc, index;
    char **argv;
    const char *letters; /* rest of "-fd" */
    bool only_arguments; /* "--" was seen */

    const char *arguments[RV_ARGS_POSITIONAL_MAX]; /* what is no option, in order */
    unsigned count;

    const char *config_file;
    char *sets[RV_ARGS_SETS_MAX + 1]; /* "key=value"; --runtime-dir and --log-level are among them */
    unsigned set_count;
    bool json;
};

#define RV_ARGS_END (-1)   /* all read and the number of arguments is right */
#define RV_ARGS_HELP (-2)  /* --help: it was printed */
#define RV_ARGS_ERROR (-3) /* wrong: it was said */

/* command NULL is allowed: no options, any arguments. */
void rv_args_init(struct rv_args *args, const struct rv_command *command, int argc, char **argv);

/* The number of the next option in command->options, its value in *ret_value (flags: NULL); or one of the above. Common
 * options are taken in on the way. */
int rv_args_next(struct rv_args *args, const char **ret_value);

/* The exit code for RV_ARGS_HELP or RV_ARGS_ERROR; frees like rv_args_fini. */
int rv_args_exit(struct rv_args *args, int result);

/* Frees the texts that rv_args_next made. */
void rv_args_fini(struct rv_args *args);

/* Fills what rv_config_load wants. Points into args. */
void rv_args_sources(const struct rv_args *args, struct rv_config_sources *ret_sources);

/* Reads a number in a range; on failure the error was said and false is returned. */
bool rv_args_number(struct rv_args *args, const char *option, const char *text, int64_t min, int64_t max,
                    int64_t *ret_value);

/* Reads seconds, "10" or "0.5", into microseconds; as above. */
bool rv_args_seconds(struct rv_args *args, const char *option, const char *text, uint64_t *ret_us);

/* Says that the command line is wrong (JSON with --json) and returns RV_EXIT_USAGE. */
int rv_args_wrong(const struct rv_args *args, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Says an error as the command line does, on stderr, or with json as {"error":{…}} on stdout; returns its exit code. */
int rv_say_error(const struct rv_error *err, bool json);

/* Prints `resvisor help COMMAND`. */
void rv_command_print_help(const struct rv_command *command, FILE *out);

/* For shell completion: "--name<TAB>help" lines, "--name=" for those that take a value. */
void rv_args_print_options(const struct rv_args *args, FILE *out);

#endif
