/* Loading an executor: every way in which a file can be the wrong one has a message of its own. */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "host.h"
#include "memory.h"
#include "paths.h"
#include "rpc.pb-c.h"

#define SYMBOL "resvisor_executor"
#define SIZE_FIRST offsetof(struct rv_executor, flags) /* of ABI version 1; later fields are added at the end */

static int say(struct rv_failure *err, int number, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int say(struct rv_failure *err, int number, const char *remedy, const char *format, ...)
{
    va_list ap;

    err->code = RESVISOR__V1__ERROR_CODE__ERROR_CONFIG;
    va_start(ap, format);
    (void)vsnprintf(err->message, sizeof(err->message), format, ap);
    va_end(ap);
    (void)snprintf(err->remedy, sizeof(err->remedy), "%s", remedy);
    return -number;
}

/* A name such as "image" is lib/resvisor/executors/image.so of this installation. */
static int find_file(const char *name, char *path, size_t size)
{
    const char *suffix = strstr(name, ".so") ? "" : ".so";
    char file[NAME_MAX + 1];
    int n;

    if (strchr(name, '/')) {
        n = snprintf(path, size, "%s", name);
        return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
    }
    n = snprintf(file, sizeof(file), "%s%s", name, suffix);
    if (n < 0 || (size_t)n >= sizeof(file))
        return -ENAMETOOLONG;
    return rv_installed_path(RV_EXECUTORS, file, path, size);
}

static int check(const struct host *host, const struct rv_executor *e, struct rv_failure *err)
{
    const char *path = host->executor_path;

    if (e->abi_version != RV_EXECUTOR_ABI_VERSION)
        return say(err, EPROTO, "build the executor against the resvisor-executor.h of this version",
                   "%s has executor ABI version %u, this host needs %u", path, e->abi_version, RV_EXECUTOR_ABI_VERSION);
    if (e->struct_size < SIZE_FIRST)
        return say(err, EINVAL, "set struct_size to sizeof(struct rv_executor)",
                   "%s has struct_size %u, at least %zu are needed", path, e->struct_size, SIZE_FIRST);
    if (!e->run)
        return say(err, EINVAL, "set the field run", "%s has no run function", path);
    return 0;
}

int host_executor_open(struct host *host, const char *name, struct rv_failure *err)
{
    const struct rv_executor *e;
    int r = find_file(name, host->executor_path, sizeof(host->executor_path));

    if (r < 0)
        return say(err, -r, "", "no path can be made of the executor's name %.200s: %s", name, strerror(-r));
    host->library = dlopen(host->executor_path, RTLD_NOW | RTLD_LOCAL);
    if (!host->library)
        return say(err, ENOENT, "check types.NAME.executor and the libraries that it needs (ldd)",
                   "cannot load the executor: %s", dlerror());
    e = dlsym(host->library, SYMBOL);
    if (!e)
        return say(err, EINVAL, "export a `const struct rv_executor " SYMBOL "`", "%s has no symbol " SYMBOL,
                   host->executor_path);
    r = check(host, e, err);
    if (r < 0)
        return r;
    memcpy(&host->executor, e, e->struct_size < sizeof(*e) ? SIZE_FIRST : sizeof(*e));
    if (!host->executor.name)
        host->executor.name = "(no name)";
    if (!host->executor.version)
        host->executor.version = "?";
    return 0;
}

int host_executor_takes(const struct host *host, const char *model, const struct rv_lease_info *info,
                        struct rv_failure *err)
{
    const struct rv_backend *backend = rv_backend_by_name(info->backend);

    if ((backend && !backend->on_device) || (host->executor.flags & RV_EXECUTOR_DEVICE_MEMORY))
        return 0;
    return say(err, EOPNOTSUPP, "set types.NAME.device to host, or use an executor that is made for devices",
               "the model %.128s lies in the memory of %s (%s), and the executor %.64s reads weights by the CPU", model,
               info->device, info->backend, host->executor.name);
}

void host_executor_close(struct host *host)
{
    if (host->started && host->executor.stop)
        host->executor.stop(host->state);
    host->started = false;
    /* The library stays loaded: threads of its libraries (BLAS) may still run, and the process ends now anyway. */
}
