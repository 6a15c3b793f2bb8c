#include "selftest.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "actors.h"
#include "clock.h"
#include "memory.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define MIB (1024u * 1024)
#define TEST_BYTES (8u * MIB)
#define SPEED_BYTES (64u * MIB)
#define FREE_SHARE 8 /* at most this part of the free memory is used for measuring */
#define SEED UINT64_C(0x7265737669736f72)
#define PASSES 3 /* memory that is missing after each of them is lost; after one, another program has it */

#define NOT_SUPPORTED 801 /* CUDA_ERROR_NOT_SUPPORTED of cuda.h */
#define MPS_ENABLED 133   /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */

enum { SKIPPED = 1 }; /* beside 0 = ok and negative errnos */

struct test {
    const struct rv_cuda_info *device;
    uint64_t answer_us;
    rv_row_function *tell;
    void *context;
    uint32_t backend;
    struct rv_verdict verdict;
    struct rv_actor owner, importer;
    struct rv_arena arena;
    int fd; /* of the arena */
    uint64_t free_bytes;
    struct rv_row row; /* the one that is being made */
    struct rv_answer answer;
    struct rv_error err;
};

typedef int row_function(struct test *t);

/* ---- helpers ---------------------------------------------------------------------------------------------------- */

static uint64_t test_size(const struct test *t)
{
    uint64_t granularity = t->device->granularity ? t->device->granularity : 1;

    return (TEST_BYTES + granularity - 1) / granularity * granularity;
}

static uint64_t speed_size(const struct test *t)
{
    uint64_t size = SPEED_BYTES;

    while (t->free_bytes && size > TEST_BYTES && size > t->free_bytes / FREE_SHARE)
        size /= 2;
    return size > test_size(t) ? size : test_size(t);
}

static int start(struct test *t, struct rv_actor *actor, const char *label)
{
    return rv_actor_start(actor, label, t->device->uuid, t->answer_us, &t->err);
}

static int step_with(struct test *t, struct rv_actor *actor, enum rv_step step, uint32_t number, int *ret_fd)
{
    struct rv_call call = {.step = step,
                           .backend = t->backend,
                           .number = number,
                           .size = step == RV_STEP_SPEED ? speed_size(t) : test_size(t),
                           .seed = SEED,
                           .arena = t->arena};

    return rv_actor_do(actor, &call, step == RV_STEP_IMPORT ? t->fd : -1, &t->answer, ret_fd, &t->err);
}

static int step(struct test *t, struct rv_actor *actor, enum rv_step which)
{
    return step_with(t, actor, which, 0, NULL);
}

static void detail(struct test *t, const char *text)
{
    /* Texts of errors are longer than a row's: cut at its end, never inside a character. */
    (void)rv_escape(t->row.detail, sizeof(t->row.detail), text, strlen(text));
}

char *rv_speed_text(uint64_t bytes_per_second, char *buffer, uint64_t size)
{
    double speed = (double)bytes_per_second;

    if (speed >= 1e12)
        (void)snprintf(buffer, size, "%.2f TB/s", speed / 1e12);
    else if (speed >= 1e9)
        (void)snprintf(buffer, size, "%.1f GB/s", speed / 1e9);
    else
        (void)snprintf(buffer, size, "%.0f MB/s", speed / 1e6);
    return buffer;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static int row_create(struct test *t)
{
    int r = start(t, &t->owner, "owner");

    if (r == 0)
        r = start(t, &t->importer, "importer"); /* both make their contexts at the same time */
    if (r == 0)
        r = step(t, &t->owner, RV_STEP_FREE);
    if (r < 0)
        return r;
    t->free_bytes = t->answer.values[0];
    r = step(t, &t->owner, RV_STEP_CREATE);
    if (r < 0 && t->answer.cuda_error == NOT_SUPPORTED) {
        detail(t, t->err.message);
        return SKIPPED;
    }
    if (r < 0)
        return r;
    t->arena = t->answer.arena;
    (void)snprintf(t->row.detail, sizeof(t->row.detail), "%" PRIu64 " MiB, pages of %u KiB", t->arena.size / MIB,
                   t->arena.page_size / 1024);
    return 0;
}

static int row_copy(struct test *t)
{
    return step(t, &t->owner, RV_STEP_COPY);
}

static int row_import(struct test *t)
{
    int r = step_with(t, &t->owner, RV_STEP_EXPORT, 0, &t->fd);

    if (r < 0)
        return r;
    if (rv_backend_by_id(t->backend)->has_descriptor != (t->fd >= 0))
        return rv_error_set(&t->err, EPROTO, ERROR(DEVICE), "the export gave %s descriptor", t->fd < 0 ? "no" : "a");
    return step(t, &t->importer, RV_STEP_IMPORT);
}

static int row_compare(struct test *t)
{
    return step(t, &t->importer, RV_STEP_COMPARE);
}

/* A fault of one program of MPS ends them all. */
static bool shares_its_faults(const struct rv_cuda_info *device)
{
    for (uint32_t i = 0; i < device->attribute_count; i++)
        if (device->attributes[i].number == MPS_ENABLED)
            return device->attributes[i].value != 0;
    return false;
}

/* The machine's memory: a driver may let the processor do the writing, and then it is the processor that refuses. */
static bool refused_by_processor(const struct test *t, const struct rv_actor *actor)
{
    return t->backend == RV_BACKEND_MEMFD && (actor->signal == SIGSEGV || actor->signal == SIGBUS);
}

/* Each write takes an actor along: the error stays with its context. */
static int poke(struct test *t, struct rv_actor *actor, enum rv_poke how)
{
    static const char *const names[] = {[RV_POKE_FILL] = "memset", [RV_POKE_COPY] = "copy"};
    size_t used = strlen(t->row.detail);
    int r = step(t, actor, RV_STEP_IMPORT);

    if (r < 0)
        return r;
    r = step_with(t, actor, RV_STEP_POKE, how, NULL);
    if (r == 0)
        return rv_error_set(&t->err, EPERM, ERROR(DEVICE), "a %s through a read-only mapping was carried out",
                            names[how]);
    if (r == -ETIMEDOUT || (r == -ECHILD && !refused_by_processor(t, actor)) ||
        (r != -ECHILD && t->answer.cuda_error == 0))
        return r;
    (void)snprintf(t->row.detail + used, sizeof(t->row.detail) - used, "%s%s: %s", used ? "; " : "", names[how],
                   t->err.message);
    return 0;
}

static int row_read_only(struct test *t)
{
    struct rv_actor actors[RV_POKE_COUNT] = {RV_ACTOR_INIT, RV_ACTOR_INIT};
    int r = 0;

    if (t->backend == RV_BACKEND_CUDA_IPC) {
        detail(t, "not possible: CUDA IPC has no read-only mapping");
        return SKIPPED;
    }
    if (shares_its_faults(t->device)) {
        detail(t, "not tried: with MPS (attribute 133) the fault would end all programs on this device");
        return SKIPPED;
    }
    for (int i = 0; r == 0 && i < RV_POKE_COUNT; i++)
        r = start(t, &actors[i], "writer");
    for (int i = 0; r == 0 && i < RV_POKE_COUNT; i++)
        r = poke(t, &actors[i], (enum rv_poke)i);
    for (int i = 0; i < RV_POKE_COUNT; i++)
        rv_actor_kill(&actors[i]);
    return r < 0 ? r : step(t, &t->importer, RV_STEP_COMPARE); /* nobody else has noticed */
}

static int lost(struct test *t, uint64_t bytes)
{
    return rv_error_set(&t->err, EIO, ERROR(DEVICE), "%" PRIu64 " KiB of the device did not come back", bytes / 1024);
}

/* An importer closes; or ends its context; or is killed; then the owner frees. */
static int ipc_ways(struct test *t, struct rv_actor *owner)
{
    static const enum rv_step ends[] = {RV_STEP_CLOSE, RV_STEP_LEAVE, RV_STEP_COUNT};
    struct rv_actor importer = RV_ACTOR_INIT;
    struct rv_arena kept = t->arena;
    int r = start(t, &importer, "closing-importer");

    for (int i = 0; r == 0 && i < 3; i++) {
        r = step(t, owner, RV_STEP_CREATE);
        t->arena = r == 0 ? t->answer.arena : kept;
        if (r == 0)
            r = step(t, &importer, RV_STEP_IMPORT);
        if (r == 0 && ends[i] == RV_STEP_COUNT)
            rv_actor_kill(&importer);
        else if (r == 0)
            r = step(t, &importer, ends[i]);
        if (r == 0)
            r = step(t, owner, RV_STEP_CLOSE);
    }
    rv_actor_kill(&importer);
    t->arena = kept;
    return r;
}

static int close_ipc(struct test *t, struct rv_actor *owner)
{
    uint64_t missing = UINT64_MAX;
    int r = 0;

    for (int pass = 0; r == 0 && pass < PASSES && missing >= test_size(t); pass++) {
        uint64_t before;

        r = step(t, owner, RV_STEP_FREE);
        before = t->answer.values[0];
        if (r == 0)
            r = ipc_ways(t, owner);
        if (r == 0)
            r = step(t, owner, RV_STEP_FREE);
        if (r == 0) {
            uint64_t now = t->answer.values[0] < before ? before - t->answer.values[0] : 0;

            missing = now < missing ? now : missing;
        }
    }
    detail(t, "3 ways to end an importer");
    return r == 0 && missing >= test_size(t) ? lost(t, missing) : r;
}

static int row_close_order(struct test *t)
{
    struct rv_actor actor = RV_ACTOR_INIT;
    char text[RV_ERROR_TEXT_MAX];
    int r = start(t, &actor, "closer");

    if (r == 0 && t->backend == RV_BACKEND_CUDA_IPC) {
        r = close_ipc(t, &actor);
    } else if (r == 0) {
        r = step(t, &actor, RV_STEP_ORDERS);
        if (r == 0) {
            (void)snprintf(text, sizeof(text), "%u orders%s%s%.400s", t->answer.number,
                           t->free_bytes ? ", all memory came back" : "", t->answer.text[0] ? "; " : "",
                           t->answer.text);
            detail(t, text);
            if (t->answer.values[0] > 0)
                r = lost(t, t->answer.values[0]);
        }
    }
    rv_actor_kill(&actor);
    return r;
}

/* Want of memory says nothing against a backend. */
static int measure(struct test *t)
{
    int r = step(t, &t->owner, RV_STEP_SPEED);

    if (r >= 0 || t->err.code != ERROR(NO_MEMORY))
        return r;
    detail(t, t->err.message);
    return SKIPPED;
}

static int row_bandwidth(struct test *t)
{
    char up[32], fill[32];
    int r;

    if (t->backend == RV_BACKEND_MEMFD) {
        detail(t, "nothing is copied to the device: it reads the machine's memory");
        return SKIPPED;
    }
    r = measure(t);
    if (r != 0)
        return r;
    t->row.bytes_per_second = t->answer.values[RV_SPEED_UP];
    (void)snprintf(t->row.detail, sizeof(t->row.detail), "%s from pinned memory; memset %s",
                   rv_speed_text(t->answer.values[RV_SPEED_UP], up, sizeof(up)),
                   rv_speed_text(t->answer.values[RV_SPEED_FILL], fill, sizeof(fill)));
    return 0;
}

static int row_read_bandwidth(struct test *t)
{
    char text[32];
    int r = 0;

    if (t->backend == RV_BACKEND_MEMFD || t->answer.values[RV_SPEED_READ] == 0)
        r = measure(t);
    if (r != 0)
        return r;
    t->row.bytes_per_second = t->answer.values[RV_SPEED_READ];
    (void)snprintf(t->row.detail, sizeof(t->row.detail), "%s to pinned memory",
                   rv_speed_text(t->answer.values[RV_SPEED_READ], text, sizeof(text)));
    return 0;
}

static int row_exporter_death(struct test *t)
{
    char text[RV_ERROR_TEXT_MAX];
    int r;

    if (!rv_actor_is_there(&t->importer)) {
        detail(t, "the importer is gone already");
        return SKIPPED;
    }
    rv_actor_kill(&t->owner);
    r = step(t, &t->importer, RV_STEP_COMPARE);
    if (t->backend != RV_BACKEND_CUDA_IPC)
        return r;
    /* Promised by nobody (cuda.h, cuIpcOpenMemHandle): resvisor ends importers first. For people. */
    (void)snprintf(text, sizeof(text), "not promised, and not so here: %.400s", t->err.message);
    detail(t, r < 0 ? text : "the importer still reads; CUDA does not promise that");
    return r < 0 ? SKIPPED : 0;
}

/* The descriptor alone keeps the memory. */
static int row_after_exit(struct test *t)
{
    struct rv_actor actor = RV_ACTOR_INIT;
    uint64_t before = 0;
    int r;

    if (t->fd < 0) {
        detail(t, "not possible: CUDA IPC has no descriptor");
        return SKIPPED;
    }
    rv_actor_kill(&t->owner);
    rv_actor_kill(&t->importer);
    r = start(t, &actor, "heir");
    if (r == 0)
        r = step(t, &actor, RV_STEP_IMPORT);
    if (r == 0)
        r = step(t, &actor, RV_STEP_COMPARE);
    if (r == 0)
        r = step(t, &actor, RV_STEP_CLOSE);
    if (r == 0)
        r = step(t, &actor, RV_STEP_FREE);
    if (r == 0) {
        before = t->answer.values[0];
        (void)close(t->fd);
        t->fd = -1;
        r = step(t, &actor, RV_STEP_FREE);
    }
    if (r == 0)
        detail(t, before && t->answer.values[0] >= before + t->arena.size
                      ? "a descriptor alone kept it; closing that gave it back"
                      : "a descriptor alone kept it");
    rv_actor_kill(&actor);
    return r;
}

static const struct {
    const char *name;
    row_function *run;
    bool essential; /* without it the rows after it make no sense */
} rows[] = {
    {"create", row_create, true},
    {"copy", row_copy, true},
    {"import", row_import, true},
    {"compare", row_compare, true},
    {"read-only", row_read_only, false},
    {"close-order", row_close_order, false},
    {"bandwidth", row_bandwidth, false},
    {"read-bandwidth", row_read_bandwidth, false},
    {"exporter-death", row_exporter_death, false},
    {"after-exit", row_after_exit, false},
};

/* ---- all of it -------------------------------------------------------------------------------------------------- */

static void tell(struct test *t, const char *name, const char *result, uint64_t started_us)
{
    t->row.backend = t->backend;
    t->row.name = name;
    t->row.result = result;
    t->row.duration_us = started_us ? rv_now_us() - started_us : 0;
    t->tell(t->context, t->device, &t->row);
}

static void test_backend(struct test *t)
{
    uint32_t failed_before = t->verdict.failed;
    const char *broken = NULL;
    bool exists = true;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        uint64_t started = rv_now_us();
        int r;

        t->row = (struct rv_row){0};
        t->err = (struct rv_error){0};
        if (broken) {
            (void)snprintf(t->row.detail, sizeof(t->row.detail), "`%s` failed", broken);
            tell(t, rows[i].name, "skipped", 0);
            continue;
        }
        r = rows[i].run(t);
        if (r < 0) {
            t->verdict.failed++;
            t->row.bytes_per_second = 0;
            t->row.no_memory = t->err.code == ERROR(NO_MEMORY);
            detail(t, t->err.message);
        }
        tell(t, rows[i].name, r < 0 ? "failed" : r == SKIPPED ? "skipped" : "ok", started);
        if (r < 0 && rows[i].essential)
            broken = rows[i].name;
        exists = r != SKIPPED || !rows[i].essential;
        if (!exists)
            break; /* the device does not have this backend */
    }
    if (exists && t->verdict.failed == failed_before)
        t->verdict.usable++;
    rv_actor_kill(&t->owner);
    rv_actor_kill(&t->importer);
    if (t->fd >= 0)
        (void)close(t->fd);
    t->fd = -1;
    t->arena = (struct rv_arena){0};
}

#define ATTRIBUTE_VMM 102
#define ATTRIBUTE_FD_HANDLES 103
static bool says_yes(const struct rv_cuda_info *device, uint32_t number)
{
    for (uint32_t i = 0; i < device->attribute_count; i++) {
        if (device->attributes[i].number == number)
            return device->attributes[i].value != 0;
    }
    return false;
}

/* What the device itself says that it cannot; NULL = try. That it says it can proves nothing. By its attributes, not by
 * device->vmm: where the driver lacks a function, the try says which. */
static const char *says_no(const struct rv_cuda_info *device, uint32_t backend)
{
    if (backend == RV_BACKEND_CUDA_VMM && !says_yes(device, ATTRIBUTE_VMM))
        return "the device has no virtual memory management (attribute 102)";
    if (backend == RV_BACKEND_CUDA_VMM && !says_yes(device, ATTRIBUTE_FD_HANDLES))
        return "the device gives no descriptors of its memory (attribute 103)";
    if (backend == RV_BACKEND_MEMFD && !device->pageable)
        return "the device does not read the machine's memory through the host's page tables (attributes 88 and 100)";
    return NULL;
}

struct rv_verdict rv_selftest_run(const struct rv_cuda_info *device, uint64_t answer_us, rv_row_function *tell_row,
                                  void *context)
{
    static const uint32_t backends[] = {RV_BACKEND_CUDA_VMM, RV_BACKEND_CUDA_IPC, RV_BACKEND_MEMFD};
    struct test t = {.device = device,
                     .answer_us = answer_us,
                     .tell = tell_row,
                     .context = context,
                     .owner = RV_ACTOR_INIT,
                     .importer = RV_ACTOR_INIT,
                     .fd = -1};

    for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++) {
        const char *reason = says_no(device, backends[i]);

        t.backend = backends[i];
        if (!reason) {
            test_backend(&t);
            continue;
        }
        t.row = (struct rv_row){0};
        detail(&t, reason);
        tell(&t, rows[0].name, "skipped", 0);
    }
    return t.verdict;
}

/* With what to do, where that is more than what is said of every such error. */
static void tell_reason(const struct rv_error *err, char *buffer, size_t size)
{
    bool own = err->remedy[0] && strcmp(err->remedy, rv_error_row(err->code)->remedy) != 0;

    (void)snprintf(buffer, size, "%.250s%s%.250s", err->message, own ? "; " : "", own ? err->remedy : "");
}

void rv_selftest_find(uint64_t answer_us, struct rv_found *ret_found)
{
    struct rv_call call = {.step = RV_STEP_FIND};
    struct rv_actor actor = RV_ACTOR_INIT;
    struct rv_error err = {0};
    struct rv_answer answer;
    uint32_t count;
    int r = rv_actor_start(&actor, "finder", NULL, answer_us, &err);

    *ret_found = (struct rv_found){0};
    if (r == 0)
        r = rv_actor_do(&actor, &call, -1, &answer, NULL, &err);
    count = r == 0 ? answer.number : 0;
    if (r == 0)
        (void)snprintf(ret_found->driver, sizeof(ret_found->driver), "%d.%d", (int)answer.values[0] / 1000,
                       (int)answer.values[0] % 1000 / 10);
    if (r == 0 && count == 0)
        rv_error_set(&err, ENODEV, ERROR(NO_SUCH_DEVICE), "the driver sees no device");
    call.step = RV_STEP_INFO;
    for (call.number = 0; call.number < count && ret_found->count < RV_DEVICES_MAX; call.number++) {
        r = rv_actor_do(&actor, &call, -1, &answer, NULL, &err);
        if (r == 0)
            ret_found->devices[ret_found->count++] = answer.info;
        else
            (void)fprintf(stderr, "resvisor-device: cuda:%u is left out: %s\n", call.number, err.message);
    }
    rv_actor_kill(&actor);
    if (ret_found->count == 0)
        tell_reason(&err, ret_found->reason, sizeof(ret_found->reason));
}
