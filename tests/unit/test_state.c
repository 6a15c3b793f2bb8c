/* The supervisor's facts: restart delays, death windows, the ledger of dispatched jobs, the catalogue's bounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_restart_is_at_once_then_1_2_4_up_to_60_seconds),
        cmocka_unit_test(only_deaths_within_the_window_count),
        cmocka_unit_test(the_ledger_remembers_the_last_jobs_and_forgets_the_oldest),
        cmocka_unit_test(entries_by_path_make_room_for_each_other_but_configured_ones_stay),
        cmocka_unit_test(a_full_catalogue_of_configured_models_refuses),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
