/* The supervisor's facts: restart delays, death windows, the ledger of dispatched jobs, the catalogue's bounds and places. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clock.h"
#include "state.h"

static void first_restart_is_at_once_then_1_2_4_up_to_60_seconds(void **unused)
{
    static const uint64_t seconds[] = {0, 0, 1, 2, 4, 8, 16, 32, 60, 60};

    (void)unused;
    for (uint32_t deaths = 0; deaths < sizeof(seconds) / sizeof(seconds[0]); deaths++) {
        uint64_t base = seconds[deaths] * RV_SEC;

        for (uint32_t random = 0; random < 100; random++) {
            uint64_t delay = rv_backoff_us(deaths, 60 * RV_SEC, random * 40503u);

            assert_true(delay >= base - base / 5 && delay <= base + base / 5);
        }
    }
    assert_true(rv_backoff_us(4000000000u, 5 * RV_SEC, 7) <= 6 * RV_SEC);
}

static void only_deaths_within_the_window_count(void **unused)
{
    struct rv_deaths deaths = {0};

    (void)unused;
    assert_int_equal(rv_deaths_add(&deaths, 100 * RV_SEC, 60 * RV_SEC), 1);
    assert_int_equal(rv_deaths_add(&deaths, 130 * RV_SEC, 60 * RV_SEC), 2);
    assert_int_equal(rv_deaths_add(&deaths, 161 * RV_SEC, 60 * RV_SEC), 2);
    assert_int_equal(deaths.consecutive, 3);
    for (unsigned i = 0; i < 3 * RV_DEATHS_MAX; i++)
        (void)rv_deaths_add(&deaths, 200 * RV_SEC, 60 * RV_SEC);
    assert_int_equal(deaths.count, RV_DEATHS_MAX);
}

static void the_ledger_remembers_the_last_jobs_and_forgets_the_oldest(void **unused)
{
    struct rv_state state;
    struct rv_ledger_entry mark = {.job_id = "a", .type = "image", .digest = {1}, .attempts = 1};

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    rv_ledger_mark(&state.ledger, &mark);
    mark.ended = true;
    rv_ledger_mark(&state.ledger, &mark);
    assert_int_equal(state.ledger.used, 1);
    assert_true(state.ledger.entries[0].ended);
    for (unsigned i = 0; i < RV_JOB_LEDGER_MAX; i++) {
        (void)snprintf(mark.job_id, sizeof(mark.job_id), "job-%u", i);
        rv_ledger_mark(&state.ledger, &mark);
    }
    assert_int_equal(state.ledger.used, RV_JOB_LEDGER_MAX);
    for (unsigned i = 0; i < state.ledger.used; i++)
        assert_string_not_equal(state.ledger.entries[i].job_id, "a");
    rv_state_fini(&state);
}

static void entries_by_path_make_room_for_each_other_but_configured_ones_stay(void **unused)
{
    struct rv_state state;
    char path[32];

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    assert_non_null(rv_model_add(&state, "named", "/m/named", "auto", true, RV_HOST));
    for (unsigned i = 0; i < 2 * RV_MODELS_MAX; i++) {
        (void)snprintf(path, sizeof(path), "/m/%u", i);
        assert_non_null(rv_model_add(&state, path, path, "auto", false, RV_HOST));
    }
    assert_int_equal(state.model_count, RV_MODELS_MAX);
    assert_non_null(rv_model_by_name(&state, "named", RV_HOST));
    assert_null(rv_model_by_path(&state, "/m/0", RV_HOST));
    assert_non_null(rv_model_by_path(&state, path, RV_HOST));
    rv_state_fini(&state);
}

static void a_full_catalogue_of_configured_models_refuses(void **unused)
{
    struct rv_state state;
    char name[32];

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    for (unsigned i = 0; i < RV_MODELS_MAX; i++) {
        (void)snprintf(name, sizeof(name), "%u", i);
        assert_non_null(rv_model_add(&state, name, name, "auto", true, RV_HOST));
    }
    assert_null(rv_model_add(&state, "one more", "/m/x", "auto", false, RV_HOST));
    rv_state_fini(&state);
}

/* ---- places ---- */

static struct rv_generation *add_generation(struct rv_model *model, uint64_t arena, uint64_t index)
{
    struct rv_generation *g = calloc(1, sizeof(*g));

    assert_non_null(g);
    g->model = model;
    g->index_fd = -1;
    g->arena_count = 1;
    g->arena_fds[0] = -1; /* as of a device whose arenas have none */
    g->index_size = index;
    g->bytes = arena + index;
    TAILQ_INSERT_HEAD(&model->generations, g, link);
    return g;
}

static void a_file_has_an_entry_for_each_place(void **unused)
{
    struct rv_state state;
    struct rv_model *host, *first, *second, *other;

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    host = rv_model_add(&state, "m", "/links/m", "blob", true, RV_HOST);
    other = rv_model_add(&state, "n", "/m/n", "auto", true, RV_HOST);
    assert_int_equal(rv_model_set_path(host, "/m/real"), 0);
    assert_false(rv_model_is_elsewhere(&state, host));
    second = rv_model_place(&state, host, 1);
    first = rv_model_place(&state, host, 0);
    assert_true(first && second && first->configured && first->device == 0 && second->device == 1);
    assert_string_equal(first->path, "/m/real");
    assert_string_equal(first->source, "/links/m");
    assert_string_equal(first->format, "blob");
    assert_ptr_equal(rv_model_by_name(&state, "m", RV_ANYWHERE), host);
    assert_ptr_equal(rv_model_by_name(&state, "m", RV_HOST), host);
    assert_ptr_equal(rv_model_by_name(&state, "m", 0), first);
    assert_ptr_equal(rv_model_by_path(&state, "/m/real", 1), second);
    assert_null(rv_model_by_path(&state, "/m/real", 2));
    assert_null(rv_model_by_name(&state, "n", 0));
    /* people read places of one model one below the other */
    assert_ptr_equal(TAILQ_NEXT(host, link), second);
    assert_ptr_equal(TAILQ_NEXT(second, link), first);
    assert_ptr_equal(TAILQ_NEXT(first, link), other);
    assert_true(rv_model_is_elsewhere(&state, host));
    assert_false(rv_model_is_elsewhere(&state, first));
    assert_false(rv_model_is_elsewhere(&state, other));
    host->pinned = true;
    assert_false(rv_model_is_elsewhere(&state, host));
    rv_state_fini(&state);
}

static void memory_counts_where_it_lies_and_indexes_on_the_host(void **unused)
{
    struct rv_state state;
    struct rv_model *host, *device;
    struct rv_generation *old;

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    state.device_count = 2;
    (void)snprintf(state.devices[1].name, sizeof(state.devices[1].name), "cuda:1");
    host = rv_model_add(&state, "m", "/m", "auto", true, RV_HOST);
    device = rv_model_place(&state, host, 1);
    (void)add_generation(host, 1000, 10);
    old = add_generation(device, 5000, 30);
    (void)add_generation(device, 7000, 40);
    assert_int_equal(rv_state_pool_bytes(&state, RV_HOST), 1000 + 10 + 30 + 40);
    assert_int_equal(rv_state_pool_bytes(&state, 1), 12000);
    assert_int_equal(rv_state_pool_bytes(&state, 0), 0);
    rv_generation_destroy(old);
    assert_int_equal(rv_state_pool_bytes(&state, 1), 7000);
    assert_string_equal(rv_place_name(&state, 1), "cuda:1");
    assert_string_equal(rv_place_name(&state, RV_HOST), "host");
    assert_string_equal(rv_place_name(&state, 7), "host");
    rv_state_fini(&state);
}

static void places_make_room_for_each_other_also_when_their_own_model_goes(void **unused)
{
    struct rv_state state;
    struct rv_model *model, *place;
    char name[32];

    (void)unused;
    assert_int_equal(rv_state_init(&state), 0);
    for (unsigned i = 0; i + 1 < RV_MODELS_MAX; i++) {
        (void)snprintf(name, sizeof(name), "%u", i);
        assert_non_null(rv_model_add(&state, name, name, "auto", true, RV_HOST));
    }
    model = rv_model_add(&state, "/m/path", "/m/path", "auto", false, RV_HOST);
    place = rv_model_place(&state, model, 3); /* the only one that can go is `model` */
    assert_non_null(place);
    assert_string_equal(place->name, "/m/path");
    assert_string_equal(place->path, "/m/path");
    assert_null(rv_model_by_name(&state, "/m/path", RV_HOST));
    assert_int_equal(state.model_count, RV_MODELS_MAX);
    model = rv_model_place(&state, rv_model_by_name(&state, "7", RV_HOST), 0);
    assert_non_null(model); /* in the place of that one */
    assert_null(rv_model_by_name(&state, "/m/path", RV_ANYWHERE));
    model->pinned = true;
    assert_null(rv_model_place(&state, model, 1));
    rv_state_fini(&state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_restart_is_at_once_then_1_2_4_up_to_60_seconds),
        cmocka_unit_test(only_deaths_within_the_window_count),
        cmocka_unit_test(the_ledger_remembers_the_last_jobs_and_forgets_the_oldest),
        cmocka_unit_test(entries_by_path_make_room_for_each_other_but_configured_ones_stay),
        cmocka_unit_test(a_full_catalogue_of_configured_models_refuses),
        cmocka_unit_test(a_file_has_an_entry_for_each_place),
        cmocka_unit_test(memory_counts_where_it_lies_and_indexes_on_the_host),
        cmocka_unit_test(places_make_room_for_each_other_also_when_their_own_model_goes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
