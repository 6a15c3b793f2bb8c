/* Where models lie: what the types that list them want, and what is loaded at start. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "children/children.h"
#include "devices.h"
#include "log.h"
#include "pool_private.h"
#include "supervisor.h"

static const char host[] = "host";

static bool lists(const struct rv_config_type *type, const char *model)
{
    for (uint32_t i = 0; i < type->model_count; i++)
        if (strcmp(type->models[i], model) == 0)
            return true;
    return false;
}

/* The device of the next type from *at on that lists the model, as the type calls it; NULL = no further one. */
static const char *next_place(const struct rv_config *config, const char *model, uint32_t *at)
{
    while (*at < config->type_count) {
        const struct rv_config_type *type = &config->types[(*at)++];

        if (lists(type, model))
            return rv_devices_of_type(type);
    }
    return NULL;
}

static void places_add(struct rv_places *places, int device)
{
    for (unsigned i = 0; i < places->count; i++)
        if (places->device[i] == device)
            return;
    places->device[places->count++] = device;
}

int rv_places_of(struct rv_supervisor *s, const char *name, struct rv_places *ret_places, struct rv_error *err)
{
    struct rv_places places = {.count = 0};
    const char *place;
    uint32_t at = 0;

    while ((place = next_place(s->config, name, &at))) {
        int device, user, r = rv_devices_find(s, place, &device, &user, err);

        if (r < 0)
            return r;
        places_add(&places, device);
    }
    if (places.count == 0)
        places_add(&places, RV_HOST);
    *ret_places = places;
    return 0;
}

bool rv_places_host_is_wanted(const struct rv_config *config, const char *name)
{
    const char *place;
    uint32_t at = 0;
    bool any = false;

    while ((place = next_place(config, name, &at))) {
        if (strcmp(place, host) == 0)
            return true;
        any = true;
    }
    return !any;
}

const char *rv_place_text(const struct rv_supervisor *s, int device, char buffer[32])
{
    buffer[0] = '\0';
    if (device != RV_HOST)
        (void)snprintf(buffer, 32, " on %s", rv_place_name(&s->state, device));
    return buffer;
}

/* ---- preload ---------------------------------------------------------------------------------------------------- */

static int preload_at(struct rv_supervisor *s, const struct rv_config_model *c, int device, struct rv_error *err)
{
    const struct rv_generation *current;
    struct rv_file_identity identity;
    struct rv_model *model;
    int fd, r = rv_catalog_find(s, c->name, device, &model, &fd, &identity, err);

    if (r < 0)
        return r;
    current = rv_model_current(model);
    if (current && rv_identity_equal(&current->identity, &identity)) {
        if (fd >= 0)
            (void)close(fd);
    } else {
        r = rv_load_join(s, model, fd, &identity, &(struct rv_wait_options){.user = RV_HOST}, err);
    }
    if (r == 0 && c->pin)
        model->pinned = true; /* another name of its file may be the entry at work */
    return r;
}

static void preload(struct rv_supervisor *s, const struct rv_config_model *c, const char *place)
{
    struct rv_error err = {0};
    int device, user, r = rv_devices_find(s, place, &device, &user, &err);

    if (r == -EAGAIN) {
        s->pool->preload_waits = true;
        return;
    }
    if (r == 0)
        r = preload_at(s, c, device, &err);
    if (r < 0)
        rv_log_warning("%s is not preloaded%s%s: %s", c->name, place == host ? "" : " on ", place == host ? "" : place,
                       err.message);
}

/* On all places, or only on those that had to wait for the devices. */
static void preload_all(struct rv_supervisor *s, bool only_devices)
{
    s->pool->preload_waits = false;
    for (uint32_t i = 0; i < s->config->model_count; i++) {
        const struct rv_config_model *c = &s->config->models[i];
        const char *place;
        uint32_t at = 0;

        if (!c->preload && !c->pin)
            continue;
        if (!only_devices && rv_places_host_is_wanted(s->config, c->name))
            preload(s, c, host);
        while ((place = next_place(s->config, c->name, &at)))
            if (strcmp(place, host) != 0)
                preload(s, c, place);
    }
}

void rv_pool_preload(struct rv_supervisor *s)
{
    preload_all(s, false);
}

bool rv_pool_is_preloading(const struct rv_supervisor *s)
{
    return s->pool->preload_waits || rv_load_is_preload(s);
}

/* ---- devices are known ------------------------------------------------------------------------------------------ */

/* What is pinned was lost with its device, and is loaded again when that is back. */
static void restore_pinned(struct rv_supervisor *s)
{
    struct rv_model *model;

    TAILQ_FOREACH (model, &s->state.models, link) {
        const struct rv_config_model as_pinned = {.name = model->name, .pin = true};
        struct rv_error err = {0};

        if (model->device == RV_HOST || !model->pinned || model->load || rv_model_current(model) ||
            model->failure.code != RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST ||
            s->state.devices[model->device].state != RV_DEVICE_READY)
            continue;
        if (preload_at(s, &as_pinned, model->device, &err) < 0)
            rv_log_warning("%s is pinned, and cannot be loaded again on %s: %s", model->name,
                           rv_place_name(&s->state, model->device), err.message);
    }
}

void rv_pool_devices_known(struct rv_supervisor *s)
{
    if (s->pool->preload_waits && !s->stopping)
        preload_all(s, true);
    if (!s->stopping)
        restore_pinned(s);
    rv_park_resume_all(s);
    rv_workers_next_turn(s); /* nothing may be left that is preloaded */
}
