/* Devices without processes: which backend is chosen and why, the cache of self-tests, the tables of errors. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "pool/device_cache.h"
#include "pool/device_choice.h"

static struct rv_device_record device;

static void reset(void)
{
    device = (struct rv_device_record){.state = RV_DEVICE_TESTING, .granularity = 2u << 20, .total_bytes = 1ull << 34};
    memcpy(device.uuid, "0123456789abcdef", RV_DEVICE_UUID_SIZE);
    (void)snprintf(device.driver, sizeof(device.driver), "13.0");
    (void)snprintf(device.product, sizeof(device.product), "Double");
}

static struct rv_device_test *add(uint32_t backend, const char *name, const char *result, const char *detail)
{
    struct rv_device_test *t = &device.tests[device.test_count++];

    *t = (struct rv_device_test){.backend = backend};
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
    (void)snprintf(t->result, sizeof(t->result), "%s", result);
    (void)snprintf(t->detail, sizeof(t->detail), "%s", detail);
    return t;
}

static void add_all(uint32_t backend, const char *except, uint64_t speed)
{
    static const char *const names[] = {"create",      "copy",           "import",     "compare",
                                        "close-order", "exporter-death", "after-exit", "read-only"};

    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!except || strcmp(except, names[i]) != 0)
            (void)add(backend, names[i], "ok", "");
    if (speed)
        add(backend, "read-bandwidth", "ok", "")->bytes_per_second = speed;
}

static void choose(uint32_t wish)
{
    rv_device_choose(&device, wish, "the self-test ended: killed");
}

static void test_vmm_is_taken_when_all_that_it_needs_works(void **state)
{
    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, NULL, 412000000000);
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.state, RV_DEVICE_READY);
    assert_int_equal(device.backend, RV_BACKEND_CUDA_VMM);
    assert_string_equal(device.reason,
                        "cuda-vmm: all 9 tests passed, 412 GB/s; memfd is not possible: not a unified device");
}

static void test_ipc_is_taken_when_vmm_fails_and_the_reason_says_so(void **state)
{
    (void)state;
    reset();
    (void)add(RV_BACKEND_CUDA_VMM, "create", "failed", "cuMemCreate: 801 CUDA_ERROR_NOT_SUPPORTED");
    add_all(RV_BACKEND_CUDA_IPC, NULL, 0);
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.backend, RV_BACKEND_CUDA_IPC);
    assert_non_null(strstr(device.reason, "cuda-vmm is not possible: create failed: cuMemCreate: 801"));
}

static void test_memfd_must_win_by_a_margin(void **state)
{
    (void)state;
    reset();
    device.unified = device.pageable = true;
    add_all(RV_BACKEND_CUDA_VMM, NULL, 200000000000);
    add_all(RV_BACKEND_MEMFD, NULL, 205000000000);
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.backend, RV_BACKEND_CUDA_VMM);
    assert_non_null(strstr(device.reason, "memfd has 205 GB/s"));
    reset();
    device.unified = device.pageable = true;
    add_all(RV_BACKEND_CUDA_VMM, NULL, 200000000000);
    add_all(RV_BACKEND_MEMFD, NULL, 230000000000);
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.backend, RV_BACKEND_MEMFD);
    reset();
    device.unified = true; /* but it does not read through the host's page tables */
    add_all(RV_BACKEND_CUDA_VMM, "compare", 200000000000);
    add_all(RV_BACKEND_MEMFD, NULL, 230000000000);
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.state, RV_DEVICE_UNUSABLE);
    assert_non_null(strstr(device.reason, "page tables"));
}

static void test_a_wish_is_fulfilled_or_refused_and_never_replaced(void **state)
{
    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, NULL, 0);
    add_all(RV_BACKEND_CUDA_IPC, "import", 0);
    (void)add(RV_BACKEND_CUDA_IPC, "import", "failed", "201");
    choose(RV_BACKEND_CUDA_IPC);
    assert_int_equal(device.state, RV_DEVICE_UNUSABLE);
    assert_int_equal(device.backend, RV_BACKEND_NONE);
    assert_string_equal(device.reason, "cuda-ipc is configured and does not work: import failed: 201");
    choose(RV_BACKEND_CUDA_VMM);
    assert_int_equal(device.state, RV_DEVICE_READY);
    assert_non_null(strstr(device.reason, "cuda-vmm as configured"));
    choose(RV_BACKEND_MEMFD);
    assert_non_null(strstr(device.reason, "not a unified device"));
}

static void test_a_missing_row_is_no_success(void **state)
{
    static const char *const needed[] = {"create",      "copy",           "import",    "compare",
                                         "close-order", "exporter-death", "after-exit"};
    char wanted[128];

    (void)state;
    for (unsigned i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        reset();
        add_all(RV_BACKEND_CUDA_VMM, needed[i], 0);
        choose(RV_BACKEND_CUDA_VMM);
        assert_int_equal(device.state, RV_DEVICE_UNUSABLE);
        (void)snprintf(wanted, sizeof(wanted), "%s was not tested: the self-test ended: killed", needed[i]);
        assert_non_null(strstr(device.reason, wanted));
    }
}

static void test_a_store_that_is_not_refused_is_told_and_tolerated(void **state)
{
    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, "read-only", 0);
    (void)add(RV_BACKEND_CUDA_VMM, "read-only", "failed", "the byte has changed");
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.backend, RV_BACKEND_CUDA_VMM);
    assert_non_null(strstr(device.reason, "a store through a read-only mapping is not refused"));
    (void)add(RV_BACKEND_CUDA_VMM, "bandwidth", "failed", "719"); /* any other failure counts */
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.state, RV_DEVICE_UNUSABLE);
}

static void test_without_any_backend_all_reasons_are_told(void **state)
{
    (void)state;
    reset();
    choose(RV_BACKEND_NONE);
    assert_int_equal(device.state, RV_DEVICE_UNUSABLE);
    assert_non_null(strstr(device.reason, "cuda-vmm: create was not tested"));
    assert_non_null(strstr(device.reason, "cuda-ipc: create was not tested"));
    assert_non_null(strstr(device.reason, "memfd: not a unified device"));
}

static void test_a_device_in_use_is_judged_by_what_shows_that_it_answers(void **state)
{
    char why[160] = "";

    (void)state;
    reset();
    assert_false(rv_device_answers(&device, RV_BACKEND_CUDA_VMM, "it hung", why, sizeof(why)));
    assert_string_equal(why, "create was not tested: it hung");
    add(RV_BACKEND_CUDA_VMM, "create", "failed", "cuMemCreate: 2")->no_memory = true;
    assert_true(rv_device_answers(&device, RV_BACKEND_CUDA_VMM, "", why, sizeof(why)));
    assert_false(rv_device_backend_works(&device, RV_BACKEND_CUDA_VMM, "", why, sizeof(why)));
    reset();
    add_all(RV_BACKEND_CUDA_VMM, "close-order", 0);
    (void)add(RV_BACKEND_CUDA_VMM, "close-order", "failed", "2048 KiB did not come back"); /* others took it */
    assert_true(rv_device_answers(&device, RV_BACKEND_CUDA_VMM, "", why, sizeof(why)));
    reset();
    add_all(RV_BACKEND_CUDA_VMM, "compare", 0);
    (void)add(RV_BACKEND_CUDA_VMM, "compare", "failed", "719");
    assert_false(rv_device_answers(&device, RV_BACKEND_CUDA_VMM, "", why, sizeof(why)));
    assert_string_equal(why, "compare failed: 719");
}

/* ---- cache ------------------------------------------------------------------------------------------------------- */

static struct rv_device_cache cache;
static char problem[128];

static char *written(const char *driver, size_t *ret_length)
{
    char folder[] = "/tmp/rv-devices-XXXXXX", path[64], *text = calloc(1, RV_DEVICE_CACHE_BYTES_MAX);
    FILE *f;

    assert_non_null(mkdtemp(folder));
    (void)snprintf(path, sizeof(path), "%s/a/b/devices", folder);
    assert_int_equal(rv_device_cache_write(path, driver, &device, 1), 0);
    assert_int_equal(rv_device_cache_read(path, &cache, problem, sizeof(problem)), 0);
    f = fopen(path, "r");
    assert_non_null(f);
    *ret_length = fread(text, 1, RV_DEVICE_CACHE_BYTES_MAX - 1, f);
    (void)fclose(f);
    (void)unlink(path);
    (void)snprintf(path, sizeof(path), "%s/a/b", folder);
    assert_int_equal(rmdir(path), 0); /* and so no other file is left there */
    (void)snprintf(path, sizeof(path), "%s/a", folder);
    (void)rmdir(path);
    (void)rmdir(folder);
    return text;
}

static void test_what_is_written_is_read_back(void **state)
{
    size_t length;
    char *text;
    const struct rv_cached_device *found;

    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, NULL, 412000000000);
    (void)add(RV_BACKEND_CUDA_IPC, "create", "failed", "two  spaces, 100 % and ünicode ");
    choose(RV_BACKEND_NONE);
    text = written("13.0", &length);
    free(text);
    assert_string_equal(cache.driver, "13.0");
    assert_int_equal(cache.count, 1);
    found = rv_device_cache_find(&cache, device.uuid);
    assert_non_null(found);
    assert_true(found->attributes == rv_device_attributes_digest(&device));
    assert_int_equal(found->test_count, device.test_count);
    for (uint32_t i = 0; i < device.test_count; i++) {
        assert_int_equal(found->tests[i].backend, device.tests[i].backend);
        assert_string_equal(found->tests[i].name, device.tests[i].name);
        assert_string_equal(found->tests[i].result, device.tests[i].result);
        assert_string_equal(found->tests[i].detail, device.tests[i].detail);
        assert_true(found->tests[i].bytes_per_second == device.tests[i].bytes_per_second);
    }
    device.pageable = true;
    assert_true(found->attributes != rv_device_attributes_digest(&device));
}

static void test_a_device_that_does_not_work_is_not_kept(void **state)
{
    size_t length;

    (void)state;
    reset();
    choose(RV_BACKEND_NONE);
    free(written("13.0", &length));
    assert_int_equal(cache.count, 0);
    add(RV_BACKEND_CUDA_VMM, "create", "failed", "cuMemCreate: 2")->no_memory = true; /* tested in use */
    device.state = RV_DEVICE_READY;
    device.backend = RV_BACKEND_CUDA_VMM;
    free(written("13.0", &length));
    assert_int_equal(cache.count, 0);
}

static void test_every_cut_of_the_file_is_refused(void **state)
{
    size_t length;
    char *text;

    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, NULL, 1);
    choose(RV_BACKEND_NONE);
    text = written("13.0", &length);
    for (size_t n = 0; n < length; n++) {
        char *copy = malloc(n + 1); /* exactly so long: what is read beyond is found */

        memcpy(copy, text, n);
        assert_int_equal(rv_device_cache_parse(copy, n, &cache, problem, sizeof(problem)), -EINVAL);
        assert_true(problem[0]);
        free(copy);
    }
    free(text);
}

static void test_damage_gives_a_refusal_or_a_valid_cache(void **state)
{
    unsigned seed = 20261130;
    size_t length;
    char *text;

    (void)state;
    reset();
    add_all(RV_BACKEND_CUDA_VMM, NULL, 1);
    choose(RV_BACKEND_NONE);
    text = written("13.0", &length);
    for (unsigned round = 0; round < 20000; round++) {
        char *copy = malloc(length);

        memcpy(copy, text, length);
        for (unsigned k = 0; k <= round % 3; k++) {
            seed = seed * 1103515245u + 12345u;
            copy[(seed >> 8) % length] = (char)(seed >> 24);
        }
        if (rv_device_cache_parse(copy, length, &cache, problem, sizeof(problem)) == 0) {
            assert_true(cache.count <= RV_DEVICES_MAX);
            for (uint32_t i = 0; i < cache.count; i++)
                for (uint32_t t = 0; t < cache.devices[i].test_count; t++)
                    assert_true(rv_device_test_is_valid(&cache.devices[i].tests[t]));
        }
        free(copy);
    }
    free(text);
}

static void refused(const char *text)
{
    assert_int_equal(rv_device_cache_parse(text, strlen(text), &cache, problem, sizeof(problem)), -EINVAL);
}

#define HEAD "resvisor-devices 1 " RV_VERSION "\n"
#define DRIVER "driver 13.0\n"
#define DEVICE "device 00112233445566778899aabbccddeeff 0011223344556677\n"

static void test_what_no_writer_writes_is_refused(void **state)
{
    const char *honest = HEAD DRIVER DEVICE "test cuda-vmm create ok 0 1 \nend\n";

    (void)state;
    assert_int_equal(rv_device_cache_parse(honest, strlen(honest), &cache, problem, sizeof(problem)), 0);
    refused("");
    refused("resvisor-devices 1 0.0.0-other\n" DRIVER "end\n");
    refused(HEAD DEVICE "end\n");                               /* no driver */
    refused(HEAD DRIVER DRIVER "end\n");                        /* two */
    refused(HEAD DRIVER DEVICE DEVICE "end\n");                 /* one twice */
    refused(HEAD DRIVER "test cuda-vmm create ok 0 1 \nend\n"); /* of nobody */
    refused(HEAD DRIVER DEVICE "test cuda-vmm create ok 0 1 \ntest cuda-vmm create ok 0 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test magic create ok 0 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test cuda-vmm Create ok 0 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test cuda-vmm create fine 0 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test cuda-vmm create ok -1 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test cuda-vmm create ok 99999999999999999999 1 \nend\n");
    refused(HEAD DRIVER DEVICE "test cuda-vmm create ok 0 1 \x1b[0m\nend\n");
    refused(HEAD DRIVER "device 00112233445566778899aabbccddeefg 0011223344556677\nend\n");
    refused(HEAD DRIVER DEVICE "end\nend\n");
    refused(HEAD DRIVER DEVICE "end\n\n");
    refused(HEAD DRIVER DEVICE "nonsense\nend\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vmm_is_taken_when_all_that_it_needs_works),
        cmocka_unit_test(test_ipc_is_taken_when_vmm_fails_and_the_reason_says_so),
        cmocka_unit_test(test_memfd_must_win_by_a_margin),
        cmocka_unit_test(test_a_wish_is_fulfilled_or_refused_and_never_replaced),
        cmocka_unit_test(test_a_missing_row_is_no_success),
        cmocka_unit_test(test_a_store_that_is_not_refused_is_told_and_tolerated),
        cmocka_unit_test(test_without_any_backend_all_reasons_are_told),
        cmocka_unit_test(test_a_device_in_use_is_judged_by_what_shows_that_it_answers),
        cmocka_unit_test(test_what_is_written_is_read_back),
        cmocka_unit_test(test_a_device_that_does_not_work_is_not_kept),
        cmocka_unit_test(test_every_cut_of_the_file_is_refused),
        cmocka_unit_test(test_damage_gives_a_refusal_or_a_valid_cache),
        cmocka_unit_test(test_what_no_writer_writes_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
