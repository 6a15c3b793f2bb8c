/*
 * common/cuda when the driver fails: each call of each function fails once with each plausible error, on the driver's
 * double (tests/fakecuda). Whatever fails, the caller hears of it, nothing crashes or hangs, and when everything is
 * closed no descriptor, address range or context is left.
 *
 * The double reads what shall fail from a file, and writes a line when it did: so the test knows when it has been
 * through all calls of a function.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cuda/driver.h"
#include "cuda/rv_cuda.h"
#include "rpc.pb-c.h"

#define MIB (UINT64_C(1) << 20)
#define CALLS_MAX 60  /* of one function in the scenario; more would mean that the end is never reached */
#define RANGE_MIN MIB /* bytes of addresses that are a leak: less is the C library's */

static char folder[] = "/tmp/rv-test-cuda-faults-XXXXXX";
static struct rv_arena foreign; /* an arena of cuda-ipc that another process has */

/* What the double implements; the functions that give back, whose failure is a leak by itself, are apart. */
#define GIVES_BACK                                                                                         \
    "cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuMemFree", "cuMemFreeHost", "cuIpcCloseMemHandle", \
        "cuStreamDestroy", "cuEventDestroy", "cuDevicePrimaryCtxRelease"
static const char *const gives_back[] = {GIVES_BACK};
static const char *const functions[] = {
#define X(name, version, needed) "cu" #name,
    RV_CUDA_FUNCTIONS(X)
#undef X
};
static const int errors[] = {1, 2, 4, 201, 600, 719, 801};

/* ---- the scenario: everything that is done with a device --------------------------------------------------------- */

struct things {
    struct rv_cuda *cuda;
    struct rv_cuda_device *device;
    struct rv_cuda_copier *copier;
    struct rv_cuda_memory vmm, imported, ipc, opened;
    void *pinned;
    int fd;
};

static int use_vmm(struct things *t, struct rv_error *err)
{
    struct rv_arena arena;
    uint8_t bytes[100];
    uint64_t mark;
    int r;

    r = rv_cuda_vmm_create(t->device, 1, &t->vmm, &arena, err);
    if (r == 0)
        r = rv_cuda_fill(t->device, t->vmm.address, 1, t->vmm.size, err);
    if (r == 0)
        r = rv_cuda_copier_create(t->device, &t->copier, err);
    if (r == 0) {
        t->pinned = rv_cuda_host_alloc(t->device, 4096, err);
        r = t->pinned ? 0 : -EIO;
    }
    if (r == 0)
        r = rv_cuda_copier_put(t->copier, t->vmm.address, t->pinned, 4096, err);
    if (r == 0)
        r = rv_cuda_copier_zero(t->copier, t->vmm.address + 4096, 4096, err);
    if (r == 0)
        r = rv_cuda_copier_mark(t->copier, &mark, err);
    if (r == 0) {
        (void)rv_cuda_copier_reached(t->copier);
        r = rv_cuda_copier_wait(t->copier, mark, err);
    }
    if (r == 0)
        r = rv_cuda_write(t->device, t->vmm.address + 8192, bytes, sizeof(bytes), err);
    if (r == 0)
        r = t->fd = rv_cuda_vmm_export(t->device, &t->vmm, err);
    if (r >= 0)
        r = rv_cuda_vmm_import(t->device, t->fd, &arena, false, &t->imported, err);
    if (r == 0)
        r = rv_cuda_read(t->device, bytes, t->imported.address, sizeof(bytes), err);
    return r;
}

static int use_ipc(struct things *t, struct rv_error *err)
{
    struct rv_arena arena;
    uint8_t byte;
    int r = rv_cuda_ipc_create(t->device, 1, &t->ipc, &arena, err);

    if (r == 0)
        r = rv_cuda_ipc_open(t->device, &foreign, &t->opened, err);
    if (r == 0)
        r = rv_cuda_read(t->device, &byte, t->opened.address, 1, err);
    return r;
}

/* 0, or the first error. Always closes everything. */
static int scenario(struct rv_error *err)
{
    struct things t = {.fd = -1};
    struct rv_cuda_info info;
    int r = rv_cuda_open(&t.cuda, err);

    if (r == 0)
        r = rv_cuda_device_info(t.cuda, 0, &info, err);
    if (r == 0)
        r = rv_cuda_device_open(t.cuda, info.uuid, &t.device, err);
    if (r == 0)
        r = rv_cuda_device_check(t.device, err);
    if (r == 0)
        r = use_vmm(&t, err);
    if (r == 0)
        r = use_ipc(&t, err);
    if (t.device) {
        rv_cuda_copier_destroy(t.copier);
        rv_cuda_host_free(t.device, t.pinned);
        rv_cuda_memory_close(t.device, &t.vmm);
        rv_cuda_memory_close(t.device, &t.imported);
        rv_cuda_memory_close(t.device, &t.opened);
        rv_cuda_memory_close(t.device, &t.ipc);
    }
    if (t.fd >= 0)
        (void)close(t.fd);
    rv_cuda_device_close(t.device);
    rv_cuda_close(t.cuda);
    return r;
}

/* ---- what is left ------------------------------------------------------------------------------------------------ */

struct left {
    unsigned descriptors;
    uint64_t reserved; /* bytes of addresses that nobody may touch: the double's device addresses */
};

static struct left count_left(void)
{
    struct left left = {0};
    DIR *directory = opendir("/proc/self/fd");
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[8];
    unsigned long long begin, end;

    assert_true(directory && maps);
    while (readdir(directory))
        left.descriptors++;
    while (fgets(line, sizeof(line), maps))
        if (sscanf(line, "%llx-%llx %7s", &begin, &end, rights) == 3 && strcmp(rights, "---p") == 0)
            left.reserved += end - begin;
    (void)fclose(maps);
    (void)closedir(directory);
    return left;
}

static bool context_is_alive(void)
{
    struct rv_cuda *cuda = NULL;
    struct rv_error err = {0};
    unsigned flags;
    int active = 1;

    assert_int_equal(rv_cuda_open(&cuda, &err), 0);
    assert_int_equal(rv_cuda_driver_of(cuda)->DevicePrimaryCtxGetState(0, &flags, &active), CUDA_SUCCESS);
    rv_cuda_close(cuda);
    return active;
}

/* ---- failing calls ----------------------------------------------------------------------------------------------- */

static void path_of(char path[128], const char *name)
{
    (void)snprintf(path, 128, "%s/%s", folder, name);
}

/* The next statement; the double takes it for new when the file has another size or time, so the size always changes.
 */
static void set_fault(const char *function, unsigned nth, bool onwards, int error)
{
    static unsigned turn;
    char path[128], new[128], events[128];
    FILE *file;

    path_of(path, "faults");
    path_of(new, "faults.new");
    path_of(events, "xid");
    file = fopen(new, "we");
    assert_non_null(file);
    if (function)
        fprintf(file, "fault %s nth=%u%s error=%d xid=0:13\n", function, nth, onwards ? "+" : "", error);
    fprintf(file, "#%*s\n", 1 + (int)(turn++ % 500), "");
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(new, path), 0);
    assert_true(unlink(events) == 0 || errno == ENOENT);
}

static bool fault_happened(void)
{
    struct stat st;
    char path[128];

    path_of(path, "xid");
    return stat(path, &st) == 0;
}

static bool is_of(const char *name, const char *const *names, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}
#define IS_OF(name, names) is_of(name, names, sizeof(names) / sizeof((names)[0]))

/* Errors that are no failure: what they say is what was asked for, or they are met only where nothing more is wanted.
 */
static bool is_forgiven(const char *function, int error, int r)
{
    static const char *const questions[] = {"cuDeviceGetAttribute", "cuMemGetAllocationGranularity",
                                            "cuEventQuery",         "cuGetErrorName",
                                            "cuGetErrorString",     "cuPointerGetAttribute"};

    if (r < 0 || IS_OF(function, gives_back) || IS_OF(function, questions))
        return true;
    /* Closing goes on without them. */
    if (strcmp(function, "cuCtxSynchronize") == 0 || strncmp(function, "cuCtx", 5) == 0 ||
        strcmp(function, "cuStreamSynchronize") == 0)
        return true;
    /* An allocation is tried again, and a stream may be busy. */
    return (error == 2 && (strcmp(function, "cuMemCreate") == 0 || strcmp(function, "cuMemAlloc") == 0)) ||
           (error == 600 && strcmp(function, "cuStreamQuery") == 0);
}

/* Without a current context cuda-ipc cannot be closed, nor a stream be destroyed: their context's end does it. */
static bool may_leave_something(const char *function, int r)
{
    return IS_OF(function, gives_back) || (r == 0 && strncmp(function, "cuCtx", 5) == 0);
}

/* *end: the first call that the scenario does not make; 0 = not known yet. */
static void fail_every_call(const char *function, int error, unsigned *end)
{
    for (unsigned nth = 1; *end == 0 || nth < *end; nth++) {
        struct left before = count_left(), after;
        struct rv_error err = {0};
        int r;

        set_fault(function, nth, false, error);
        r = scenario(&err);
        if (!fault_happened()) {
            assert_int_equal(r, 0);
            *end = nth;
            return;
        }
        after = count_left();
        if (!is_forgiven(function, error, r))
            fail_msg("call %u of %s failed with %d, and nobody heard of it", nth, function, error);
        if (r < 0 && (err.code == 0 || !err.message[0]))
            fail_msg("call %u of %s failed with %d: %d without a message", nth, function, error, r);
        if (!may_leave_something(function, r) &&
            (after.descriptors != before.descriptors || after.reserved >= before.reserved + RANGE_MIN))
            fail_msg("call %u of %s failed with %d (%s): %u descriptors and %llu bytes of addresses before, %u and "
                     "%llu after",
                     nth, function, error, err.message, before.descriptors, (unsigned long long)before.reserved,
                     after.descriptors, (unsigned long long)after.reserved);
        set_fault(NULL, 0, false, 0);
        if (!IS_OF(function, gives_back) && context_is_alive())
            fail_msg("call %u of %s failed with %d (%s): the context is still there", nth, function, error,
                     err.message);
        assert_true(nth < CALLS_MAX);
    }
}

static void fail_every_function(bool that_gives_back)
{
    for (unsigned f = 0; f < sizeof(functions) / sizeof(functions[0]); f++) {
        unsigned end = 0;

        for (unsigned e = 0; e < sizeof(errors) / sizeof(errors[0]); e++)
            if (IS_OF(functions[f], gives_back) == that_gives_back)
                fail_every_call(functions[f], errors[e], &end);
    }
}

static void every_call_may_fail(void **state)
{
    (void)state;
    fail_every_function(false);
}

/* Last, since what is not given back stays. */
static void every_giving_back_may_fail(void **state)
{
    (void)state;
    fail_every_function(true);
}

/* A function that always fails is no endless loop. */
static void a_driver_that_always_fails_ends(void **state)
{
    (void)state;
    for (unsigned f = 0; f < sizeof(functions) / sizeof(functions[0]); f++) {
        struct rv_error err = {0};

        if (IS_OF(functions[f], gives_back)) /* what is never given back would disturb the other tests */
            continue;
        set_fault(functions[f], 1, true, 999);
        (void)scenario(&err);
    }
    set_fault(NULL, 0, false, 0);
    assert_int_equal(scenario(&(struct rv_error){0}), 0);
}

/* ---- the other process ------------------------------------------------------------------------------------------- */

/* `self hold`: has an arena of cuda-ipc, writes its handle to standard output, and stays until standard input ends. */
static int hold(void)
{
    struct rv_cuda_device *device = NULL;
    struct rv_cuda_memory memory = {0};
    struct rv_cuda *cuda = NULL;
    struct rv_error err = {0};
    struct rv_cuda_info info;
    struct rv_arena arena;
    char byte;

    if (rv_cuda_open(&cuda, &err) < 0 || rv_cuda_device_info(cuda, 0, &info, &err) < 0 ||
        rv_cuda_device_open(cuda, info.uuid, &device, &err) < 0 ||
        rv_cuda_ipc_create(device, 1, &memory, &arena, &err) < 0 ||
        write(1, arena.handle, sizeof(arena.handle)) != sizeof(arena.handle)) {
        fprintf(stderr, "hold: %s\n", err.message);
        return 1;
    }
    (void)!read(0, &byte, 1);
    rv_cuda_memory_close(device, &memory);
    rv_cuda_device_close(device);
    rv_cuda_close(cuda);
    return 0;
}

static pid_t holder;
static int holder_input;

static int start_holder(void **state)
{
    char *argv[] = {(char *)"/proc/self/exe", (char *)"hold", NULL};
    posix_spawn_file_actions_t actions;
    int to[2], from[2];
    extern char **environ;

    (void)state;
    assert_int_equal(pipe2(to, O_CLOEXEC) | pipe2(from, O_CLOEXEC), 0);
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, to[0], 0);
    (void)posix_spawn_file_actions_adddup2(&actions, from[1], 1);
    assert_int_equal(posix_spawn(&holder, argv[0], &actions, NULL, argv, environ), 0);
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(to[0]);
    (void)close(from[1]);
    holder_input = to[1];
    foreign = (struct rv_arena){.size = 2 * MIB, .page_size = 2 * MIB, .backend = RV_BACKEND_CUDA_IPC};
    assert_int_equal(read(from[0], foreign.handle, sizeof(foreign.handle)), (int)sizeof(foreign.handle));
    (void)close(from[0]);
    return scenario(&(struct rv_error){0}); /* once, for what the C library keeps */
}

static int end_holder(void **state)
{
    int status = -1;
    char command[64];

    (void)state;
    (void)close(holder_input);
    assert_true(waitpid(holder, &status, 0) == holder && status == 0);
    (void)snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_may_fail),
        cmocka_unit_test(a_driver_that_always_fails_ends),
        cmocka_unit_test(every_giving_back_may_fail),
    };

    if (argc > 1 && strcmp(argv[1], "hold") == 0)
        return hold();
    if (argc > 1) { /* started anew with the environment in which the double is found */
        (void)strcpy(folder, argv[1]);
        return cmocka_run_group_tests(tests, start_holder, end_holder);
    }
    if (!mkdtemp(folder) || unsetenv("CUDA_VISIBLE_DEVICES") || setenv("LD_LIBRARY_PATH", RV_FAKECUDA, 1) ||
        setenv("FAKECUDA", "late 0", 1) || setenv("FAKECUDA_STATE", folder, 1) || setenv("MALLOC_ARENA_MAX", "1", 1))
        return 1;
    (void)execl("/proc/self/exe", argv[0], folder, (char *)NULL);
    return 1;
}
