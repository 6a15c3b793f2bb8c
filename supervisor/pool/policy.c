/*
 * Who may have memory: the one place where that is decided. Now: budgets, what is free, and a refusal that says what
 * could be given back. Eviction and reservations will be decided here too.
 *
 * A discrete device has its own budget and its own memory. The host and devices that share its memory have one sum:
 * pool.budget, and where there is such a device MemAvailable - cuda.reserve. The index of every model lies on the host.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "devices.h"
#include "pool.h"
#include "supervisor.h"

#define MIB (1024.0 * 1024.0)
#define NAME_SHOWN (RV_NAME_MAX * 2)

/* Does what lies there take the machine's own memory? */
static bool is_of_the_machine(const struct rv_supervisor *s, int device)
{
    return device == RV_HOST || s->state.devices[device].unified;
}

/* Does memory at `other` count where the model wants some? */
static bool is_one_sum(const struct rv_supervisor *s, int device, int other)
{
    return device == other || (is_of_the_machine(s, device) && is_of_the_machine(s, other));
}

/* Names what `resvisor unload` would free: resident, not leased, not pinned. */
static void name_candidates(const struct rv_supervisor *s, int device, char *text, size_t size)
{
    const struct rv_model *model;
    size_t used = 0;

    text[0] = '\0';
    TAILQ_FOREACH (model, &s->state.models, link) {
        const struct rv_generation *g = rv_model_current(model);
        char name[RV_NAME_MAX];
        int n;

        if (!g || g->lease_count || model->pinned || model->load || !is_one_sum(s, device, model->device))
            continue;
        n = snprintf(text + used, size - used, "%s%s%s%s (%.1f MiB)", used ? ", " : "",
                     rv_escape(name, sizeof(name), model->name, strlen(model->name)),
                     model->device == RV_HOST ? "" : " --device ",
                     model->device == RV_HOST ? "" : rv_place_name(&s->state, model->device), (double)g->bytes / MIB);
        if (n < 0 || (size_t)n >= size - used) {
            text[used] = '\0';
            return;
        }
        used += (size_t)n;
    }
}

static void advise(const struct rv_supervisor *s, int device, bool helps, const char *else_do, struct rv_error *err)
{
    char candidates[RV_ERROR_TEXT_MAX / 4] = "";

    if (helps)
        name_candidates(s, device, candidates, sizeof(candidates));
    if (candidates[0])
        rv_error_remedy(err, "`resvisor unload` one of: %s; or %s", candidates, else_do);
    else
        rv_error_remedy(err, "%s", else_do);
}

/* pool.budget, of everything that takes the machine's memory. */
static int admit_by_budget(const struct rv_supervisor *s, const char *name, uint64_t bytes, struct rv_error *err)
{
    uint64_t budget = s->config->pool_budget;
    uint64_t held = rv_state_pool_bytes(&s->state, RV_HOST), promised = rv_load_admitted_bytes(s, RV_HOST);

    for (uint32_t i = 0; i < s->state.device_count; i++) {
        if (s->state.devices[i].unified) {
            held += rv_state_pool_bytes(&s->state, (int)i);
            promised += rv_load_admitted_bytes(s, (int)i);
        }
    }
    if (budget == 0 || (bytes <= budget && held + promised <= budget - bytes))
        return 0;
    rv_error_set(err, ENOSPC, RESVISOR__V1__ERROR_CODE__ERROR_OVER_BUDGET,
                 "%s needs %.1f MiB; of the budget of %.1f MiB, %.1f MiB are held and %.1f MiB promised to loads", name,
                 (double)bytes / MIB, (double)budget / MIB, (double)held / MIB, (double)promised / MIB);
    advise(s, RV_HOST, bytes <= budget, "raise pool.budget", err);
    return -ENOSPC;
}

/* Promised to loads elsewhere that will take of the same memory. */
static uint64_t promised_beside(const struct rv_supervisor *s, int place)
{
    uint64_t bytes = 0;

    for (int i = RV_HOST; i < (int)s->state.device_count; i++)
        if (i != place && is_one_sum(s, place, i))
            bytes += rv_load_admitted_bytes(s, i);
    return bytes;
}

/* What is free where the model is to lie, and of a device's own budget. */
static int admit_by_place(const struct rv_supervisor *s, const char *name, int place, uint64_t bytes,
                          struct rv_error *err)
{
    const char *source, *where = rv_place_name(&s->state, place);
    uint64_t promised, held = rv_pool_device_bytes(s, place, &promised);
    uint64_t room = rv_devices_allocatable(s, place, &source), beside = promised_beside(s, place);
    char remedy[128];

    if (room == UINT64_MAX || (bytes <= room && beside <= room - bytes))
        return 0;
    rv_error_set(err, ENOSPC, RESVISOR__V1__ERROR_CODE__ERROR_OVER_BUDGET,
                 "%s needs %.1f MiB on %s; %.1f MiB may still be placed there (by %s): %.1f MiB are held and %.1f MiB "
                 "promised to loads",
                 name, (double)bytes / MIB, where, (double)(room > beside ? room - beside : 0) / MIB, source,
                 (double)held / MIB, (double)(promised + beside) / MIB);
    (void)snprintf(remedy, sizeof(remedy), "free memory of %s, or raise devices.%s.budget", where, where);
    advise(s, place, true, is_of_the_machine(s, place) ? "lower cuda.reserve, or end what takes memory" : remedy, err);
    return -ENOSPC;
}

int rv_policy_admit(const struct rv_supervisor *s, const struct rv_model *model, uint64_t arenas, uint64_t index,
                    struct rv_error *err)
{
    bool of_the_machine = is_of_the_machine(s, model->device);
    char name[NAME_SHOWN];
    int r;

    (void)rv_escape(name, sizeof(name), model->name, strlen(model->name));
    r = admit_by_budget(s, name, of_the_machine ? arenas + index : index, err);
    return r < 0 ? r : admit_by_place(s, name, model->device, of_the_machine ? arenas + index : arenas, err);
}
