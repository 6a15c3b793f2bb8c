/*
 * The commands of `resvisor`, one row each (options.h). All but `start` and `_supervisor` are clients of the two
 * control sockets and keep no state: they connect, ask, print and end. Exit codes come from the error table.
 *
 *   options.c  reading arguments, --help          output.c  tables, JSON, progress, colours
 *   client.c   one connection, one request        job.c     a job in words and JSON; talking to the router patiently
 */
#ifndef RV_CLI_H
#define RV_CLI_H

#include "options.h"

extern const struct rv_command rv_command_status, rv_command_models;                                 /* status.c */
extern const struct rv_command rv_command_load, rv_command_unload, rv_command_pin, rv_command_unpin; /* model.c */
extern const struct rv_command rv_command_devices;                                                   /* devices.c */
extern const struct rv_command rv_command_submit;                                                    /* submit.c */
extern const struct rv_command rv_command_jobs, rv_command_job, rv_command_cancel;                   /* jobs.c */
extern const struct rv_command rv_command_fetch;                                                     /* fetch.c */
extern const struct rv_command rv_command_restart, rv_command_logs, rv_command_stop;                 /* operate.c */
extern const struct rv_command rv_command_init;                                                      /* init.c */
extern const struct rv_command rv_command_restore_config;                                            /* restore.c */
extern const struct rv_command rv_command_route;                                                     /* route.c */
extern const struct rv_command rv_command_verify;                                                    /* verify.c */
extern const struct rv_command rv_command_check, rv_command_errors, rv_command_version;              /* info.c */
extern const struct rv_command rv_command_help, rv_command_complete, rv_command_words;               /* help.c */

/* The files of deploy/completion, built in (CMakeLists.txt); ended by an empty row. */
struct rv_completion {
    const char *shell, *script;
};
extern const struct rv_completion rv_completions[];

/* Finds the command of argv[1] and runs it. Returns the exit code. */
int rv_cli_run(int argc, char **argv);

#endif
