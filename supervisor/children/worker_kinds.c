/* The table of worker kinds: how a worker of each kind is started. A new kind is one row and one function. */
#include <errno.h>
#include <string.h>

#include "children_private.h"
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

static const struct rv_worker_kind kinds[] = {
    {"native", native_command},
};

const struct rv_worker_kind *rv_worker_kind_by_name(const char *name)
{
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcmp(kinds[i].name, name) == 0)
            return &kinds[i];
    return NULL;
}
