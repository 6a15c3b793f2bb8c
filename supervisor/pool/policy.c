/*
 * Who may have memory: the one place where that is decided. Now: a budget, and a refusal that says what could be given
 * back. Eviction and reservations will be decided here too.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "pool.h"
#include "supervisor.h"

#define MIB (1024.0 * 1024.0)

/* Names what `resvisor unload` would free: resident, not leased, not pinned. */
static void name_candidates(const struct rv_supervisor *s, char *text, size_t size)
{
    const struct rv_model *model;
    size_t used = 0;

    text[0] = '\0';
    TAILQ_FOREACH (model, &s->state.models, link) {
        const struct rv_generation *g = rv_model_current(model);
        char name[RV_NAME_MAX];
        int n;

        if (!g || g->lease_count || model->pinned || model->load)
            continue;
        n = snprintf(text + used, size - used, "%s%s (%.1f MiB)", used ? ", " : "",
                     rv_escape(name, sizeof(name), model->name, strlen(model->name)), (double)g->bytes / MIB);
        if (n < 0 || (size_t)n >= size - used) {
            text[used] = '\0';
            return;
        }
        used += (size_t)n;
    }
}

int rv_policy_admit(const struct rv_supervisor *s, const struct rv_model *model, uint64_t bytes, struct rv_error *err)
{
    uint64_t budget = s->config->pool_budget;
    uint64_t held = rv_state_pool_bytes(&s->state), promised = rv_load_admitted_bytes(s);
    char candidates[RV_ERROR_TEXT_MAX / 4], name[RV_NAME_MAX * 2];

    if (budget == 0 || (bytes <= budget && held + promised <= budget - bytes))
        return 0;
    (void)rv_escape(name, sizeof(name), model->name, strlen(model->name));
    rv_error_set(err, ENOSPC, RESVISOR__V1__ERROR_CODE__ERROR_OVER_BUDGET,
                 "%s needs %.1f MiB; of the budget of %.1f MiB, %.1f MiB are held and %.1f MiB promised to loads", name,
                 (double)bytes / MIB, (double)budget / MIB, (double)held / MIB, (double)promised / MIB);
    name_candidates(s, candidates, sizeof(candidates));
    if (candidates[0] && bytes <= budget)
        rv_error_remedy(err, "`resvisor unload` one of: %s; or raise pool.budget", candidates);
    else
        rv_error_remedy(err, "raise pool.budget");
    return -ENOSPC;
}
