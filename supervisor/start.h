/* The command `resvisor start`: checks, takes the runtime directory, becomes the keeper. */
#ifndef RV_START_H
#define RV_START_H

#include <stdbool.h>

#include "cli/options.h"
#include "config.h"

extern const struct rv_command rv_command_start;      /* becomes the keeper */
extern const struct rv_command rv_command_supervisor; /* hidden: what the keeper starts; supervisor.c runs it */

/* What both read from the command line. */
struct rv_start_arguments {
    struct rv_args args; /* rv_args_fini ends it */
    struct rv_config *config;
    bool detach;
    int ready_fd; /* -1 = none */
};

/* Reads options and configuration. RV_EXIT_DONE, or the exit code of a failure that was said (then nothing is to end);
 * `ret_go_on` is false after --help. */
int rv_start_arguments_read(const struct rv_command *command, int argc, char **argv, struct rv_start_arguments *ret,
                            bool *ret_go_on);

#endif
