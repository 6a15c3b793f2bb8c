/* The table of worker kinds: how a worker of each kind is started. A new kind is one row and one function. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "children_private.h"
#include "clock.h"
#include "config.h"
#include "paths.h"

/* resvisor-worker --executor FILE --mapping M --model NAME … */
static int native_command(const struct rv_config_type *type, char *path, size_t path_size, const char **argv,
                          struct rv_error *err)
{
    int r = rv_installed_path(RV_BIN, "resvisor-worker", path, path_size);
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

/* PYTHON SCRIPT ARGS… */
static int python_command(const struct rv_config_type *type, char *path, size_t path_size, const char **argv,
                          struct rv_error *err)
{
    unsigned n = 0;

    if (strlen(type->python) >= path_size)
        return rv_error_set(err, ENAMETOOLONG, RESVISOR__V1__ERROR_CODE__ERROR_CONFIG,
                            "the path of python is too long");
    memcpy(path, type->python, strlen(type->python) + 1);
    argv[n++] = type->python; /* the path as configured: by it an interpreter finds its virtual environment */
    argv[n++] = type->script;
    for (uint32_t i = 0; i < type->arg_count; i++)
        argv[n++] = type->args[i];
    argv[n] = NULL;
    return 0;
}

/* PYTHON -m resvisor.comfyui --state FOLDER --pooling P … DIRECTORY ARGS… */
static int comfyui_command(const struct rv_config_type *type, char *path, size_t path_size, const char **argv,
                           struct rv_error *err)
{
    const char *const first[] = {type->python,         "-m",
                                 "resvisor.comfyui",   "--state",
                                 type->state_folder,   "--pooling",
                                 type->pooling,        "--output-prefix",
                                 type->output_prefix,  "--warmup",
                                 type->warmup,         "--warmup-failure",
                                 type->warmup_failure, type->primary ? "--primary" : "--not-primary",
                                 type->directory};
    unsigned n = 0;

    if (strlen(type->python) >= path_size)
        return rv_error_set(err, ENAMETOOLONG, RESVISOR__V1__ERROR_CODE__ERROR_CONFIG,
                            "the path of python is too long");
    memcpy(path, type->python, strlen(type->python) + 1);
    while (n < sizeof(first) / sizeof(first[0])) {
        argv[n] = first[n];
        n++;
    }
    for (uint32_t i = 0; i < type->arg_count; i++)
        argv[n++] = type->args[i];
    argv[n] = NULL;
    return 0;
}

static const char *own_value(const struct rv_config_type *type, const char *key)
{
    for (uint32_t i = 0; i < type->env_count; i++)
        if (strcmp(type->env[i].key, key) == 0)
            return type->env[i].value;
    return NULL;
}

/* "a,b" of the type's models: names have no comma. */
static char *model_list(const struct rv_config_type *type)
{
    size_t size = sizeof("RESVISOR_MODELS="), n;
    char *text;

    for (uint32_t i = 0; i < type->model_count; i++)
        size += strlen(type->models[i]) + 1;
    text = malloc(size);
    if (!text)
        return NULL;
    n = (size_t)snprintf(text, size, "RESVISOR_MODELS=");
    for (uint32_t i = 0; i < type->model_count; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%s", i ? "," : "", type->models[i]);
    return text;
}

/* The package of this installation comes first, so that supervisor, library and package are of one version. */
static int python_environment(const struct rv_config_type *type, char **env, unsigned *ret_count, struct rv_error *err)
{
    const char *path = own_value(type, "PYTHONPATH");
    char package[RV_PATH_MAX];
    int r = rv_installed_path(RV_LIB, "python", package, sizeof(package));
    unsigned n = *ret_count;

    if (r < 0)
        return rv_error_set(err, -r, RESVISOR__V1__ERROR_CODE__ERROR_INTERNAL, "the Python package is not found: %s",
                            strerror(-r));
    if (!path)
        path = getenv("PYTHONPATH");
    r = asprintf(&env[n], "PYTHONPATH=%s%s%s", package, path && *path ? ":" : "", path ? path : "");
    n += r >= 0;
    env[n] = model_list(type);
    r = env[n] ? r : -1;
    n += env[n] != NULL;
    if (r >= 0) {
        r = asprintf(&env[n], "RESVISOR_MAPPING=%s", type->mapping);
        n += r >= 0;
    }
    if (r >= 0 && !own_value(type, "PYTHONUNBUFFERED")) { /* the log shows a line when it is printed */
        env[n] = strdup("PYTHONUNBUFFERED=1");
        r = env[n] ? r : -1;
        n += env[n] != NULL;
    }
    *ret_count = n;
    return r < 0 ? rv_error_set(err, ENOMEM, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for its environment")
                 : 0;
}

static int comfyui_environment(const struct rv_config_type *type, char **env, unsigned *ret_count, struct rv_error *err)
{
    int r = python_environment(type, env, ret_count, err);

    if (r < 0)
        return r;
    if (asprintf(&env[*ret_count], "RESVISOR_LOOP_TIMEOUT_MS=%llu",
                 (unsigned long long)(type->loop_timeout_us / RV_MSEC)) < 0)
        return rv_error_set(err, ENOMEM, RESVISOR__V1__ERROR_CODE__ERROR_NO_MEMORY, "no memory for its environment");
    (*ret_count)++;
    return 0;
}

#define INTERRUPT_US (5 * RV_SEC) /* ComfyUI's own way to stop: it empties its temporary folder */
#define TERMINATE_US (2 * RV_SEC)

static const struct rv_stop_step terminate[] = {{SIGTERM, TERMINATE_US}, {0, 0}};
static const struct rv_stop_step interrupt_first[] = {{SIGINT, INTERRUPT_US}, {SIGTERM, TERMINATE_US}, {0, 0}};

static const struct rv_worker_kind kinds[] = {
    {"native", native_command, NULL, false, terminate},
    {"python", python_command, python_environment, false, terminate},
    {"comfyui", comfyui_command, comfyui_environment, true, interrupt_first},
};

const struct rv_worker_kind *rv_worker_kind_by_name(const char *name)
{
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    return NULL;
}
