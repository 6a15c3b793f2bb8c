/*
 * `restore-config TYPE`: puts the good copies of damaged settings files back, which a worker of kind comfyui refuses to
 * start with. The files and their copies are the Python package's: it is run once per worker, and says what it did.
 */
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "output.h"
#include "paths.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define FIXED_ARGUMENTS 10u

extern char **environ;

/* The environment that the type's workers have, as far as it says where things are. Ours ends with the command. */
static int set_environment(const struct rv_config_type *type, struct rv_error *err)
{
    char package[RV_PATH_MAX], *path = NULL;
    const char *given;
    int r = rv_installed_path(RV_LIB, "python", package, sizeof(package));

    if (r < 0)
        return rv_error_set(err, -r, CODE(INTERNAL), "the Python package is not found: %s", strerror(-r));
    for (uint32_t i = 0; i < type->env_count; i++)
        if (setenv(type->env[i].key, type->env[i].value, 1) < 0)
            return rv_error_set(err, errno, CODE(NO_MEMORY), "no memory for the environment");
    given = getenv("PYTHONPATH");
    if (asprintf(&path, "%s%s%s", package, given && *given ? ":" : "", given ? given : "") < 0)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the environment");
    r = setenv("PYTHONPATH", path, 1);
    free(path);
    return r < 0 ? rv_error_set(err, errno, CODE(NO_MEMORY), "no memory for the environment") : 0;
}

static int restore_worker(const struct rv_config_type *type, uint32_t number, struct rv_error *err)
{
    char worker[RV_NAME_MAX + 16];
    const char *argv[FIXED_ARGUMENTS + RV_TYPE_ARGS_MAX + 1];
    unsigned n = 0;
    int status = 0, r;
    pid_t pid;

    (void)snprintf(worker, sizeof(worker), "%s/%u", type->name, number);
    argv[n++] = type->python;
    argv[n++] = "-m";
    argv[n++] = "resvisor.comfyui";
    argv[n++] = "--state";
    argv[n++] = type->state_folder;
    argv[n++] = type->primary ? "--primary" : "--not-primary";
    argv[n++] = "--restore";
    argv[n++] = worker;
    argv[n++] = type->directory;
    for (uint32_t i = 0; i < type->arg_count; i++)
        argv[n++] = type->args[i];
    argv[n] = NULL;
    r = posix_spawn(&pid, type->python, NULL, NULL, (char *const *)argv, environ);
    if (r != 0)
        return rv_error_set(err, r, CODE(CONFIG), "cannot run %s: %s", type->python, strerror(r));
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return rv_error_set(err, errno, CODE(INTERNAL), "waiting for %s: %s", type->python, strerror(errno));
    if (status != 0)
        return rv_error_set(err, EIO, CODE(FILE), "%s: its files could not be restored; the lines above say why",
                            worker);
    return 0;
}

static int restore_type(const struct rv_args *args, struct rv_error *err)
{
    const char *name = args->arguments[0];
    const struct rv_config_type *type = NULL;
    struct rv_config_sources sources;
    struct rv_config *config = NULL;
    char shown[4 * RV_NAME_MAX];
    int r;

    rv_args_sources(args, &sources);
    r = rv_config_load(&sources, stderr, &config);
    if (r < 0)
        return rv_error_set(err, -r, CODE(CONFIG), "the configuration is wrong");
    for (uint32_t i = 0; i < config->type_count; i++)
        if (strcmp(config->types[i].name, name) == 0)
            type = &config->types[i];
    if (!type) {
        r = rv_error_set(err, ENOENT, CODE(NO_SUCH_TYPE), "the configuration has no workflow type \"%s\"",
                         rv_escape(shown, sizeof(shown), name, strlen(name)));
        rv_error_remedy(err, "name the configuration that resvisor was started with: --config FILE");
    } else if (strcmp(type->kind, "comfyui") != 0)
        r = rv_error_set(err, EINVAL, CODE(BAD_REQUEST),
                         "%s is of kind %s: only workers of kind comfyui have such files", type->name, type->kind);
    else
        r = set_environment(type, err);
    for (uint32_t i = 0, count = r >= 0 && type ? type->workers : 0; i < count; i++) {
        int one = restore_worker(type, i, err); /* what one cannot have back says nothing of the others */

        r = r < 0 ? r : one;
    }
    rv_config_destroy(config);
    return r < 0 ? r : 0;
}

static int run_restore(int argc, char **argv)
{
    struct rv_error err = {0};
    const char *value;
    struct rv_args args;
    int i;

    rv_args_init(&args, &rv_command_restore_config, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        ;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    i = restore_type(&args, &err) < 0 ? rv_say_error(&err, false) : 0;
    rv_args_fini(&args);
    return i;
}

const struct rv_command rv_command_restore_config = {
    .name = "restore-config",
    .arguments = "TYPE",
    .summary = "Put good copies of a ComfyUI type's damaged settings files back.",
    .text =
        "A worker of kind comfyui does not start while one of the settings files that ComfyUI reads is damaged, since "
        "ComfyUI would overwrite it: `resvisor logs TYPE` names the file and the place. This command replaces each "
        "damaged file by the copy that was kept at the last start or stop when it was good, and leaves the damaged "
        "one beside it. Files that are good are not touched.\n\n"
        "Nothing is asked or restarted: `resvisor restart TYPE` does that.",
    .common = RV_COMMON_CONFIG,
    .min_arguments = 1,
    .max_arguments = 1,
    .run = run_restore,
};
