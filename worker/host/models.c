/* The leases of this worker. A model that is still the same generation keeps its mapping: its pages are touched
 * already. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "host.h"

static struct rv_lease_info info_of(const struct rv_lease *lease)
{
    struct rv_lease_info info = {.struct_size = sizeof(info)};

    (void)rv_lease_get_info(lease, &info); /* fails for no lease at all: then all is 0 */
    return info;
}

/* Makes the lease of a place one of the newest generation. On failure the old one stays. */
static int refresh(struct host *host, struct host_model *model, struct rv_failure *err)
{
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_lease *lease = NULL;
    struct rv_lease_info old = info_of(model->lease), new;
    int r;

    options.mapping = host->mapping;
    r = rv_attach(rv_worker_connection(host->worker), model->name, &options, &lease, err);
    if (r < 0)
        return r;
    new = info_of(lease);
    r = host_executor_takes(host, model->name, &new, err);
    if (r < 0) {
        rv_detach(lease);
        return r;
    }
    if (model->lease && old.generation == new.generation &&strcmp(old.device, new.device) == 0) {
        rv_detach(lease);
    } else {
        rv_detach(model->lease);
        model->lease = lease;
    }
    model->used = host->jobs;
    return 0;
}

int host_models_attach(struct host *host, struct rv_failure *err)
{
    for (uint32_t i = 0; i < host->model_count; i++) {
        int r = refresh(host, &host->models[i], err);

        if (r < 0)
            return r;
    }
    return 0;
}

void host_models_detach(struct host *host)
{
    for (uint32_t i = 0; i < host->model_count; i++) {
        rv_detach(host->models[i].lease);
        host->models[i].lease = NULL;
    }
    for (uint32_t i = 0; i < HOST_EXTRA_MAX; i++) {
        rv_detach(host->extra[i].lease);
        host->extra[i].lease = NULL;
    }
}

/* " on cuda:0, host": the places, unless all is the machine's memory. */
static void describe_places(const struct host *host, char *buffer, size_t size)
{
    bool any = false;
    size_t length;

    (void)snprintf(buffer, size, " on ");
    for (uint32_t i = 0; i < host->model_count; i++) {
        struct rv_lease_info info = info_of(host->models[i].lease);
        bool known = false;

        for (uint32_t k = 0; k < i && !known; k++)
            known = strcmp(info_of(host->models[k].lease).device, info.device) == 0;
        if (known)
            continue;
        length = strlen(buffer);
        (void)snprintf(buffer + length, size - length, "%s%s", i > 0 ? ", " : "", info.device);
        any |= strcmp(info.device, "host") != 0;
    }
    if (!any)
        buffer[0] = '\0';
}

void host_models_describe(const struct host *host, char *buffer, size_t size)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    char places[256];
    double bytes = 0;
    unsigned unit = 0;

    for (uint32_t i = 0; i < host->model_count; i++)
        bytes += (double)info_of(host->models[i].lease).bytes;
    for (; bytes >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0]); unit++)
        bytes /= 1024;
    describe_places(host, places, sizeof(places));
    (void)snprintf(buffer, size, "%u model%s, %.1f %s mapped%s", host->model_count, host->model_count == 1 ? "" : "s",
                   bytes, units[unit], places);
}

static struct host_model *find_configured(struct host *host, const char *name)
{
    for (uint32_t i = 0; i < host->model_count; i++)
        if (strcmp(host->models[i].name, name) == 0)
            return &host->models[i];
    return NULL;
}

/* The place of a model that only jobs name: its own, a free one, or that of the one unused for longest. */
static struct host_model *find_extra(struct host *host, const char *name)
{
    struct host_model *oldest = &host->extra[0];

    for (uint32_t i = 0; i < HOST_EXTRA_MAX; i++) {
        if (strcmp(host->extra[i].name, name) == 0)
            return &host->extra[i];
        if (host->extra[i].used < oldest->used)
            oldest = &host->extra[i];
    }
    rv_detach(oldest->lease);
    oldest->lease = NULL;
    (void)snprintf(oldest->name, sizeof(oldest->name), "%s", name);
    return oldest;
}

int host_models_pick(struct host *host, const char *job_model, struct rv_lease **leases, const char **names,
                     uint32_t *ret_count, struct rv_failure *err)
{
    struct host_model *own = NULL;
    uint32_t count = 0;
    int r;

    if (*job_model) {
        own = find_configured(host, job_model);
        if (!own)
            own = find_extra(host, job_model);
        r = refresh(host, own, err);
        if (r < 0)
            return r;
        leases[count] = own->lease;
        names[count++] = own->name;
    }
    for (uint32_t i = 0; i < host->model_count; i++) {
        struct host_model *model = &host->models[i];

        if (model == own)
            continue;
        r = refresh(host, model, err);
        if (r < 0)
            return r;
        leases[count] = model->lease;
        names[count++] = model->name;
    }
    *ret_count = count;
    return 0;
}
