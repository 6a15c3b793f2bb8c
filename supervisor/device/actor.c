#include "actor.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "child.h"
#include "clock.h"
#include "memory.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define FILL_BYTE 0xa5
#define POKE_BYTE 0x5a
#define MIX UINT64_C(0x9e3779b97f4a7c15) /* odd: neighbouring words differ in most bits */

struct actor {
    struct rv_cuda *cuda;
    struct rv_cuda_device *device;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    uint64_t *stage; /* RV_PIECE bytes of pinned memory */
    struct rv_cuda_memory memory;
    void *host; /* memfd: its mapping, which is also what the device is given */
    uint64_t host_size;
    int fd; /* memfd, and what came with the step; -1 = none */
};

typedef int step_function(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err);

/* ---- the pattern ------------------------------------------------------------------------------------------------ */

static uint64_t pattern(uint64_t word, uint64_t seed)
{
    return (word + seed) * MIX ^ (word >> 5);
}

static void write_pattern(uint64_t *words, uint64_t offset, uint64_t length, uint64_t seed)
{
    for (uint64_t i = 0; i < length / 8; i++)
        words[i] = pattern(offset / 8 + i, seed);
}

static uint64_t address_of(const struct actor *a)
{
    return a->host ? (uint64_t)(uintptr_t)a->host : a->memory.address;
}

static uint64_t size_of(const struct actor *a)
{
    return a->host ? a->host_size : a->memory.size;
}

static uint64_t piece_at(const struct actor *a, uint64_t offset)
{
    uint64_t left = size_of(a) - offset;

    return left < RV_PIECE ? left : RV_PIECE;
}

static int differs(uint64_t offset, uint64_t found, uint64_t wanted, struct rv_error *err)
{
    return rv_error_set(err, EIO, ERROR(DEVICE), "byte %llu: %016llx was read where %016llx was written",
                        (unsigned long long)offset, (unsigned long long)found, (unsigned long long)wanted);
}

/* The device reads the whole arena; every word must be pattern(i, seed), or `word` where that is not NULL. */
static int compare(struct actor *a, uint64_t seed, const uint64_t *word, struct rv_error *err)
{
    if (size_of(a) == 0)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "nothing is open");
    for (uint64_t offset = 0; offset < size_of(a); offset += RV_PIECE) {
        uint64_t length = piece_at(a, offset);
        int r;

        memset(a->stage, 0, length);
        r = rv_cuda_read(a->device, a->stage, address_of(a) + offset, length, err);
        if (r < 0)
            return r;
        for (uint64_t i = 0; i < length / 8; i++) {
            uint64_t wanted = word ? *word : pattern(offset / 8 + i, seed);

            if (a->stage[i] != wanted)
                return differs(offset + 8 * i, a->stage[i], wanted, err);
        }
    }
    return 0;
}

static int enter(struct actor *a, struct rv_error *err)
{
    int r = rv_cuda_device_open(a->cuda, a->uuid, &a->device, err);

    if (r < 0)
        return r;
    a->stage = rv_cuda_host_alloc(a->device, RV_PIECE, err);
    return a->stage ? 0 : -ENOMEM;
}

static void leave(struct actor *a)
{
    rv_cuda_host_free(a->device, a->stage);
    rv_cuda_device_close(a->device);
    a->device = NULL;
    a->stage = NULL;
    a->memory = (struct rv_cuda_memory){0}; /* gone with the context */
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

static int step_find(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    int r = a->cuda ? 0 : rv_cuda_open(&a->cuda, err);

    (void)call;
    if (r < 0)
        return r;
    answer->number = rv_cuda_device_count(a->cuda);
    answer->values[0] = (uint64_t)rv_cuda_driver_version(a->cuda);
    return 0;
}

static int step_info(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    if (!a->cuda)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "the driver is not open");
    return rv_cuda_device_info(a->cuda, call->number, &answer->info, err);
}

static int step_open(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    int r = a->cuda ? 0 : rv_cuda_open(&a->cuda, err);

    (void)answer;
    memcpy(a->uuid, call->uuid, sizeof(a->uuid));
    return r < 0 ? r : enter(a, err);
}

static int create_host(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    uint64_t *words = malloc(call->size);
    int fd;

    if (!words)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for an arena of %llu bytes",
                            (unsigned long long)call->size);
    write_pattern(words, 0, call->size, call->seed);
    fd = rv_sealed_create("resvisor-test", words, call->size);
    free(words);
    if (fd < 0)
        return rv_error_set(err, -fd, ERROR(NO_MEMORY), "cannot make a memfd of %llu bytes: %s",
                            (unsigned long long)call->size, strerror(-fd));
    a->fd = fd;
    answer->arena = (struct rv_arena){.size = call->size, .page_size = 4096, .backend = RV_BACKEND_MEMFD};
    return 0;
}

static int map_host(struct actor *a, const struct rv_arena *arena, struct rv_error *err)
{
    int r = rv_backend_by_id(RV_BACKEND_MEMFD)->map(a->fd, arena, RV_MAP_SHARED, &a->host, err);

    if (r == 0)
        a->host_size = arena->size;
    return r;
}

static int step_create(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    int r;

    if (call->backend == RV_BACKEND_CUDA_VMM)
        return rv_cuda_vmm_create(a->device, call->size, &a->memory, &answer->arena, err);
    if (call->backend == RV_BACKEND_CUDA_IPC)
        return rv_cuda_ipc_create(a->device, call->size, &a->memory, &answer->arena, err);
    r = create_host(a, call, answer, err);
    return r < 0 ? r : map_host(a, &answer->arena, err);
}

/* The pattern through the copier, as a load does it. */
static int copy_pattern(struct actor *a, struct rv_cuda_copier *copier, uint64_t seed, struct rv_error *err)
{
    uint64_t mark;
    int r = 0;

    for (uint64_t offset = 0; r == 0 && offset < size_of(a); offset += RV_PIECE) {
        write_pattern(a->stage, offset, piece_at(a, offset), seed);
        r = rv_cuda_copier_put(copier, address_of(a) + offset, a->stage, piece_at(a, offset), err);
        if (r == 0)
            r = rv_cuda_copier_mark(copier, &mark, err);
        if (r == 0)
            r = rv_cuda_copier_wait(copier, mark, err);
    }
    return r;
}

static int zero_all(struct actor *a, struct rv_cuda_copier *copier, struct rv_error *err)
{
    uint64_t mark;
    int r = rv_cuda_copier_zero(copier, address_of(a), size_of(a), err);

    if (r == 0)
        r = rv_cuda_copier_mark(copier, &mark, err);
    if (r == 0)
        r = rv_cuda_copier_wait(copier, mark, err);
    return r;
}

static int step_copy(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    static const uint64_t zero = 0;
    struct rv_cuda_copier *copier = NULL;
    uint64_t filled;
    int r;

    (void)answer;
    memset(&filled, FILL_BYTE, sizeof(filled));
    if (a->host) /* it is written by the CPU; the device only reads */
        return compare(a, call->seed, NULL, err);
    r = rv_cuda_fill(a->device, address_of(a), FILL_BYTE, size_of(a), err);
    if (r == 0)
        r = compare(a, 0, &filled, err);
    if (r == 0)
        r = rv_cuda_copier_create(a->device, &copier, err);
    if (r == 0)
        r = zero_all(a, copier, err);
    if (r == 0)
        r = compare(a, 0, &zero, err);
    if (r == 0)
        r = copy_pattern(a, copier, call->seed, err);
    rv_cuda_copier_destroy(copier);
    return r < 0 ? r : compare(a, call->seed, NULL, err);
}

/* memfd, cuda-ipc: nothing has to be done. The descriptor is sent by the caller of this. */
static int step_export(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    int r;

    (void)answer;
    if (call->backend != RV_BACKEND_CUDA_VMM)
        return 0;
    r = rv_cuda_vmm_export(a->device, &a->memory, err);
    if (r < 0)
        return r;
    a->fd = r;
    return 0;
}

static int step_import(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    (void)answer;
    if (call->backend == RV_BACKEND_CUDA_VMM)
        return rv_cuda_vmm_import(a->device, a->fd, &call->arena, false, &a->memory, err);
    if (call->backend == RV_BACKEND_CUDA_IPC)
        return rv_cuda_ipc_open(a->device, &call->arena, &a->memory, err);
    return map_host(a, &call->arena, err);
}

static int step_compare(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    (void)answer;
    return compare(a, call->seed, NULL, err);
}

static int step_poke(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    (void)answer;
    if (call->number == RV_POKE_FILL)
        return rv_cuda_fill(a->device, address_of(a), POKE_BYTE, RV_PIECE, err);
    memset(a->stage, POKE_BYTE, RV_PIECE);
    return rv_cuda_write(a->device, address_of(a), a->stage, RV_PIECE, err);
}

static int step_close(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    int r = 0;

    (void)call;
    (void)answer;
    if (a->host) {
        (void)munmap(a->host, a->host_size);
        a->host = NULL;
        a->host_size = 0;
    }
    if (a->memory.backend == RV_BACKEND_CUDA_IPC)
        r = rv_orders_close_ipc(a->cuda, rv_cuda_device_ordinal(a->device), &a->memory, err);
    else
        rv_cuda_memory_close(a->device, &a->memory);
    a->memory = (struct rv_cuda_memory){0};
    if (r < 0)
        return r;
    return rv_cuda_device_check(a->device, err); /* closing says nothing of its own: a broken context does */
}

static int step_leave(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    (void)call;
    (void)answer;
    leave(a);
    return enter(a, err);
}

/* memfd: the mapping, the descriptor and the context end in every order. */
static int orders_host(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    static const char *const orders[] = {"mfc", "mcf", "fmc", "fcm", "cmf", "cfm"};
    int r = 0;

    for (size_t i = 0; r == 0 && i < sizeof(orders) / sizeof(orders[0]); i++) {
        r = create_host(a, call, answer, err);
        if (r == 0)
            r = map_host(a, &answer->arena, err);
        if (r == 0)
            r = compare(a, call->seed, NULL, err);
        for (const char *p = orders[i]; r == 0 && *p; p++) {
            if (*p == 'm') {
                (void)munmap(a->host, a->host_size);
                a->host = NULL;
            } else if (*p == 'f') {
                (void)close(a->fd);
                a->fd = -1;
            } else {
                r = step_leave(a, call, answer, err);
            }
        }
        if (r == 0)
            r = rv_cuda_device_check(a->device, err);
        answer->number++;
    }
    return r;
}

static int step_orders(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    uint32_t ordinal = rv_cuda_device_ordinal(a->device);
    int r;

    if (call->backend == RV_BACKEND_MEMFD)
        return orders_host(a, call, answer, err);
    if (call->backend != RV_BACKEND_CUDA_VMM)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "cuda-ipc is closed by two processes");
    leave(a); /* so that the context really ends where the order says so */
    r = rv_orders_vmm(a->cuda, ordinal, call->size, answer, err);
    return r < 0 ? r : enter(a, err);
}

static int step_free(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    (void)call;
    (void)err;
    answer->values[0] = rv_orders_free(a->cuda, rv_cuda_device_ordinal(a->device));
    return 0;
}

static int step_speed(struct actor *a, const struct rv_call *call, struct rv_answer *answer, struct rv_error *err)
{
    return rv_speed_measure(a->device, call->backend, call->size, answer, err);
}

static const struct {
    step_function *run;
    bool needs_device;
} steps[] = {
    [RV_STEP_FIND] = {step_find, false},    [RV_STEP_INFO] = {step_info, false},
    [RV_STEP_OPEN] = {step_open, false},    [RV_STEP_CREATE] = {step_create, true},
    [RV_STEP_COPY] = {step_copy, true},     [RV_STEP_EXPORT] = {step_export, true},
    [RV_STEP_IMPORT] = {step_import, true}, [RV_STEP_COMPARE] = {step_compare, true},
    [RV_STEP_POKE] = {step_poke, true},     [RV_STEP_CLOSE] = {step_close, true},
    [RV_STEP_LEAVE] = {step_leave, true},   [RV_STEP_ORDERS] = {step_orders, true},
    [RV_STEP_FREE] = {step_free, true},     [RV_STEP_SPEED] = {step_speed, true},
};
_Static_assert(sizeof(steps) / sizeof(steps[0]) == RV_STEP_COUNT, "one row per step");

/* ---- the process ------------------------------------------------------------------------------------------------ */

static void serve(struct actor *a, const struct rv_call *call, struct rv_answer *answer)
{
    struct rv_error err = {0};
    int r;

    if (call->step >= RV_STEP_COUNT || (steps[call->step].needs_device && !a->stage))
        r = rv_error_set(&err, EINVAL, ERROR(INTERNAL), "step %u is not possible now", call->step);
    else
        r = steps[call->step].run(a, call, answer, &err);
    answer->result = r;
    if (r >= 0)
        return;
    answer->code = err.code;
    answer->cuda_error = rv_cuda_last_error();
    memcpy(answer->text, err.message, sizeof(answer->text));
    memcpy(answer->remedy, err.remedy, sizeof(answer->remedy));
}

int rv_actor_main(int parent)
{
    struct actor a = {.fd = -1};
    struct rv_answer answer;
    struct rv_call call;
    int fd, r;

    rv_child_set_up();
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || rv_child_watch(RV_ACTOR_FD) < 0)
        return 1;
    for (;;) {
        if (rv_link_receive(RV_ACTOR_FD, &call, sizeof(call), &fd, UINT64_MAX) < 0)
            return 1;
        if (fd >= 0) {
            if (a.fd >= 0)
                (void)close(a.fd);
            a.fd = fd;
        }
        memset(&answer, 0, sizeof(answer));
        serve(&a, &call, &answer);
        fd = call.step == RV_STEP_EXPORT && answer.result == 0 ? a.fd : -1;
        r = rv_link_send(RV_ACTOR_FD, &answer, sizeof(answer), fd);
        if (r < 0)
            return 1;
        if (fd >= 0) { /* the self-test's now: it alone says how long the memory lives */
            (void)close(a.fd);
            a.fd = -1;
        }
        if (call.step == RV_STEP_IMPORT && a.fd >= 0) {
            (void)close(a.fd);
            a.fd = -1;
        }
    }
}
