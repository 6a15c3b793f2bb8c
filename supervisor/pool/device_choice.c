#include "device_choice.h"

#include <stdio.h>
#include <string.h>

/* Unified memory is taken when it is at least so much faster than cuda-vmm: below that, the protection of a read-only
 * mapping on the device is worth more than the difference. */
#define MEMFD_MARGIN_PERCENT 10u

#define WHY_MAX 144
#define TESTS_MAX 8u /* that a backend needs */

/* What must be ok before a backend is used. The others may be missing or skipped; if they failed, it is not used
 * either. The one exception is read-only: what a device does not protect there, cuda-ipc would not protect at all. */
static const struct needs {
    uint32_t backend;
    const char *tests[TESTS_MAX]; /* NULL ends them, or the array */
} needs[] = {
    {RV_BACKEND_CUDA_VMM, {"create", "copy", "import", "compare", "close-order", "exporter-death", "after-exit"}},
    {RV_BACKEND_CUDA_IPC, {"create", "copy", "import", "compare", "close-order", NULL}},
    {RV_BACKEND_MEMFD, {"import", "compare", NULL}},
};

static const struct rv_device_test *row_of(const struct rv_device_record *device, uint32_t backend, const char *name)
{
    for (uint32_t i = 0; i < device->test_count; i++)
        if (device->tests[i].backend == backend && strcmp(device->tests[i].name, name) == 0)
            return &device->tests[i];
    return NULL;
}

static bool is(const struct rv_device_test *row, const char *result)
{
    return row && strcmp(row->result, result) == 0;
}

static const struct needs *needs_of(uint32_t backend)
{
    for (unsigned i = 0; i < sizeof(needs) / sizeof(needs[0]); i++)
        if (needs[i].backend == backend)
            return &needs[i];
    return NULL;
}

bool rv_device_backend_works(const struct rv_device_record *device, uint32_t backend, const char *missing, char *why,
                             size_t size)
{
    const struct needs *n = needs_of(backend);

    if (!n) {
        (void)snprintf(why, size, "not a backend for devices");
        return false;
    }
    if (backend == RV_BACKEND_MEMFD && !device->unified) {
        (void)snprintf(why, size, "not a unified device");
        return false;
    }
    if (backend == RV_BACKEND_MEMFD && !device->pageable) {
        (void)snprintf(why, size, "the device does not read the machine's memory through the host's page tables");
        return false;
    }
    for (uint32_t i = 0; i < device->test_count; i++) {
        const struct rv_device_test *row = &device->tests[i];

        if (row->backend != backend || !is(row, "failed") || strcmp(row->name, "read-only") == 0)
            continue;
        (void)snprintf(why, size, "%s failed: %.120s", row->name, row->detail);
        return false;
    }
    for (unsigned i = 0; i < TESTS_MAX && n->tests[i]; i++) {
        const struct rv_device_test *row = row_of(device, backend, n->tests[i]);

        if (is(row, "ok"))
            continue;
        if (!row)
            (void)snprintf(why, size, "%s was not tested: %.100s", n->tests[i], missing);
        else
            (void)snprintf(why, size, "%s %s: %.100s", row->name, row->result, row->detail);
        return false;
    }
    return true;
}

bool rv_device_answers(const struct rv_device_record *device, uint32_t backend, const char *missing, char *why,
                       size_t size)
{
    static const char *const names[] = {"create", "copy", "import", "compare"};

    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const struct rv_device_test *row = row_of(device, backend, names[i]);

        if (is(row, "ok"))
            continue;
        if (row && row->no_memory)
            return true; /* the driver said so, and so it answers */
        if (row)
            (void)snprintf(why, size, "%s %s: %.120s", row->name, row->result, row->detail);
        else
            (void)snprintf(why, size, "%s was not tested: %.100s", names[i], missing);
        return false;
    }
    return true;
}

static uint64_t speed_of(const struct rv_device_record *device, uint32_t backend)
{
    const struct rv_device_test *row = row_of(device, backend, "read-bandwidth"); /* what computing needs */

    return is(row, "ok") ? row->bytes_per_second : 0;
}

static const char *name_of(uint32_t backend)
{
    return rv_backend_by_id(backend)->name;
}

/* "cuda-vmm: all 9 tests passed, 412 GB/s" */
static size_t praise(const struct rv_device_record *device, uint32_t backend, const char *how, char *text, size_t size)
{
    const struct rv_device_test *read_only = row_of(device, backend, "read-only");
    uint32_t ok = 0, failed = 0; /* what could not be tried is neither */
    uint64_t speed = speed_of(device, backend);
    char count[48], figure[48] = "";

    for (uint32_t i = 0; i < device->test_count; i++) {
        if (device->tests[i].backend != backend)
            continue;
        if (strcmp(device->tests[i].result, "ok") == 0)
            ok++;
        else if (strcmp(device->tests[i].result, "failed") == 0)
            failed++;
    }
    if (failed)
        (void)snprintf(count, sizeof(count), "%u of %u tests passed", ok, ok + failed);
    else
        (void)snprintf(count, sizeof(count), "all %u tests passed", ok);
    if (speed)
        (void)snprintf(figure, sizeof(figure), ", %.3g GB/s", (double)speed / 1e9);
    return (size_t)snprintf(text, size, "%s%s: %s%s%s", name_of(backend), how, count, figure,
                            is(read_only, "failed") ? ", but a store through a read-only mapping is not refused" : "");
}

static void set_unusable(struct rv_device_record *device)
{
    device->state = RV_DEVICE_UNUSABLE;
    device->backend = RV_BACKEND_NONE;
}

static void choose_wish(struct rv_device_record *device, uint32_t wish, const char *missing)
{
    char why[WHY_MAX];

    if (rv_device_backend_works(device, wish, missing, why, sizeof(why))) {
        device->state = RV_DEVICE_READY;
        device->backend = wish;
        (void)praise(device, wish, " as configured", device->reason, sizeof(device->reason));
        return;
    }
    set_unusable(device);
    (void)snprintf(device->reason, sizeof(device->reason), "%s is configured and does not work: %s", name_of(wish),
                   why);
}

/* Adds why another backend was not taken. */
static void add_other(struct rv_device_record *device, size_t used, uint32_t backend, bool works, const char *why)
{
    char *text = device->reason + used;
    size_t size = sizeof(device->reason) - used;

    if (used >= sizeof(device->reason))
        return;
    if (!works)
        (void)snprintf(text, size, "; %s is not possible: %s", name_of(backend), why);
    else if (speed_of(device, backend))
        (void)snprintf(text, size, "; %s has %.3g GB/s", name_of(backend), (double)speed_of(device, backend) / 1e9);
    else
        (void)snprintf(text, size, "; %s works too, with its bandwidth unknown", name_of(backend));
}

static void choose_best(struct rv_device_record *device, const char *missing)
{
    char no_vmm[WHY_MAX] = "", no_ipc[WHY_MAX] = "", no_memfd[WHY_MAX] = "";
    bool vmm = rv_device_backend_works(device, RV_BACKEND_CUDA_VMM, missing, no_vmm, sizeof(no_vmm));
    bool ipc = rv_device_backend_works(device, RV_BACKEND_CUDA_IPC, missing, no_ipc, sizeof(no_ipc));
    bool memfd = rv_device_backend_works(device, RV_BACKEND_MEMFD, missing, no_memfd, sizeof(no_memfd));
    uint64_t vmm_speed = speed_of(device, RV_BACKEND_CUDA_VMM), memfd_speed = speed_of(device, RV_BACKEND_MEMFD);
    bool faster = vmm_speed && memfd_speed / (100 + MEMFD_MARGIN_PERCENT) >= vmm_speed / 100;
    size_t used;

    if (!vmm && !ipc && !memfd) {
        set_unusable(device);
        (void)snprintf(device->reason, sizeof(device->reason),
                       "no backend works: cuda-vmm: %.140s; cuda-ipc: %.140s; memfd: %.140s", no_vmm, no_ipc, no_memfd);
        return;
    }
    device->state = RV_DEVICE_READY;
    if (memfd && (!vmm || faster))
        device->backend = RV_BACKEND_MEMFD;
    else
        device->backend = vmm ? RV_BACKEND_CUDA_VMM : RV_BACKEND_CUDA_IPC;
    used = praise(device, device->backend, "", device->reason, sizeof(device->reason));
    if (device->backend == RV_BACKEND_CUDA_VMM)
        add_other(device, used, RV_BACKEND_MEMFD, memfd, no_memfd);
    else
        add_other(device, used, RV_BACKEND_CUDA_VMM, vmm, no_vmm);
}

void rv_device_choose(struct rv_device_record *device, uint32_t wish, const char *missing)
{
    if (wish)
        choose_wish(device, wish, missing);
    else
        choose_best(device, missing);
    (void)rv_text_mend(device->reason); /* details of tests are cut for it */
}
