/* The table of worker kinds: how a worker of each kind is started. A new kind is one row and one function. */
#include <errno.h>
#include <string.h>

#include "children_private.h"
#include "config.h"
#include "paths.h"

/* resvisor-worker --executor FILE --mapping M --model NAME … */
static int native_command(const struct rv_config_type *type, struct rv_worker_command *command, struct rv_error *err)
{
    int r = rv_installed_path(RV_BIN, "resvisor-worker", command->path, sizeof(command->path));
    const char **argv = command->argv;
    unsigned n = 0;

    if (r < 0)
        return rv_error_set(err, -r, RESVISOR__V1__ERROR_CODE__ERROR_INTERNAL, "resvisor-worker is not found: %s",
                            strerror(-r));
    argv[n++] = "resvisor-worker";
    argv[n++] = "--executor";
    argv[n++] = type->executor;
    argv[n++] = "--mapping";
    argv[n++] = type->mapping;
    for (uint32_t i = 0; i < type->model_count; i++) {
        argv[n++] = "--model";
        argv[n++] = type->models[i];
    }
    argv[n] = NULL;
    return 0;
}

/* PYTHON …/resvisor-comfyui.py --state FOLDER --pooling P DIRECTORY/main.py ARGS…: the launcher lies beside the Python
 * package, so that it is found whatever the environment says. */
static int comfyui_command(const struct rv_config_type *type, struct rv_worker_command *command, struct rv_error *err)
{
    int r = rv_installed_path(RV_PYTHON, "resvisor-comfyui.py", command->script, sizeof(command->script));
    const char **argv = command->argv;
    unsigned n = 0;

    if (r < 0)
        return rv_error_set(err, -r, RESVISOR__V1__ERROR_CODE__ERROR_INTERNAL, "the launcher of ComfyUI is not found: %s",
                            strerror(-r));
    (void)snprintf(command->path, sizeof(command->path), "%s", type->python);
    (void)snprintf(command->main, sizeof(command->main), "%s/main.py", type->directory);
    argv[n++] = type->python; /* not another name: Python finds its virtual environment by it */
    argv[n++] = command->script;
    argv[n++] = "--state";
    argv[n++] = type->state_folder;
    argv[n++] = "--pooling";
    argv[n++] = type->pooling;
    argv[n++] = command->main;
    for (uint32_t i = 0; i < type->arg_count; i++)
        argv[n++] = type->args[i];
    argv[n] = NULL;
    return 0;
}

static const struct rv_worker_kind kinds[] = {
    {"native", native_command},
    {"comfyui", comfyui_command},
};

const struct rv_worker_kind *rv_worker_kind_by_name(const char *name)
{
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    return NULL;
}
