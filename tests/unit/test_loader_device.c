/*
 * The real resvisor-loader onto devices of the double of libcuda: what it hands over is read back through the driver in
 * this process, after the loader has exited.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "driver.h"
#include "index.h"
#include "loader_drive.h"
#include "memory.h"
#include "rv_cuda.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* Three devices, the same in all processes. 0: cuda-vmm. 1: only cuda-ipc. 2: unified. */
#define DEVICES "device discrete memory=1GiB; device no-vmm memory=1GiB; device unified memory=1GiB;"
#define GARBAGE 0xaa
#define BLOCK (2u * 1024 * 1024)

static char state_directory[] = "/tmp/test_loader_device_XXXXXX"; /* of the double */
static struct rv_cuda *cuda;
static struct {
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    struct rv_cuda_device *device;
    uint64_t idle; /* bytes in use when there is no arena */
} devices[3];

/* For the loaders that are started next; NULL = nothing special. */
static void set_faults(const char *faults)
{
    char text[512];

    (void)snprintf(text, sizeof(text), DEVICES " %s", faults ? faults : "");
    assert_int_equal(setenv("FAKECUDA", text, 1), 0);
}

static uint64_t bytes_in_use(unsigned device)
{
    const struct rv_cuda_driver *driver = rv_cuda_driver_of(cuda);
    size_t free_bytes = 0, total = 0;
    CUcontext context = NULL;
    CUdevice_v1 ordinal = (CUdevice_v1)rv_cuda_device_ordinal(devices[device].device);

    assert_int_equal(driver->DevicePrimaryCtxRetain(&context, ordinal), 0);
    assert_int_equal(driver->CtxSetCurrent(context), 0);
    assert_int_equal(driver->MemGetInfo(&free_bytes, &total), 0);
    assert_int_equal(driver->CtxSetCurrent(NULL), 0);
    assert_int_equal(driver->DevicePrimaryCtxRelease(ordinal), 0);
    return total - free_bytes;
}

/* Nothing is left on any device but what was there at the start. */
static void check_nothing_left(void)
{
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(bytes_in_use(i), devices[i].idle);
}

/* ---- a load --------------------------------------------------------------------------------------------------------
 */

struct wish {
    unsigned device;
    uint32_t backend;
    const char *way; /* to read */
    uint32_t direct;
    const struct rv_arena *given;
};

static const struct wish to_vmm = {0, RV_BACKEND_CUDA_VMM, NULL, 0, NULL};

static void send_start(const struct drive *l, int file, const struct wish *w)
{
    Rv__LoadStart start = RV__LOAD_START__INIT;
    Rv__Device device = RV__DEVICE__INIT;

    device.name = (char *)"cuda:0";
    device.uuid.data = devices[w->device].uuid;
    device.uuid.len = RV_DEVICE_UUID_SIZE;
    start.path = drive_path;
    start.format = (char *)"auto";
    start.direct = w->direct;
    start.backend = w->backend;
    start.device = &device;
    drive_send_start(l, file, &start);
}

static void send_admit(const struct drive *l, const struct rv_arena *given)
{
    Rv__LoadAdmit admit = RV__LOAD_ADMIT__INIT;
    Rv__Arena arena = RV__ARENA__INIT, *arenas[] = {&arena};

    if (given) {
        arena.size = given->size;
        arena.backend = given->backend;
        arena.page_size = given->page_size;
        arena.allocation = given->allocation;
        arena.handle.data = (uint8_t *)given->handle;
        arena.handle.len = sizeof(given->handle);
        admit.n_arenas = 1;
        admit.arenas = arenas;
    }
    drive_send_admit(l, &admit);
}

/* Up to the admission. Returns the arena's planned bytes. */
static uint64_t begin_load(struct drive *l, int file, const struct wish *w)
{
    struct rv_frame frame;
    uint64_t planned;

    *l = drive_start_loader(w->way);
    drive_greet(l);
    send_start(l, file, w);
    frame = drive_receive(l);
    if (frame.message->body_case == RV__FRAME__BODY_ERROR)
        fail_msg("%s", frame.message->error->message);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PLAN);
    planned = frame.message->load_plan->arena_bytes;
    rv_frame_fini(&frame);
    send_admit(l, w->given);
    return planned;
}

struct loaded {
    struct rv_index index;
    struct rv_arena arena;
    int fd; /* of the arena; -1 = none */
    char method[256];
};

static void read_done(const struct rv_frame *frame, const struct wish *w, struct loaded *ret)
{
    const Rv__LoadDone *done = frame->message->load_done;
    const struct rv_backend *backend = rv_backend_by_id(w->backend);
    struct rv_error err = {0};

    assert_int_equal(frame->message->body_case, RV__FRAME__BODY_LOAD_DONE);
    assert_int_equal(done->n_arenas, 1);
    assert_int_equal(frame->fd_count, backend->has_descriptor ? 2 : 1);
    ret->arena = (struct rv_arena){.size = done->arenas[0]->size,
                                   .page_size = done->arenas[0]->page_size,
                                   .backend = done->arenas[0]->backend,
                                   .allocation = done->arenas[0]->allocation};
    if (done->arenas[0]->handle.len == sizeof(ret->arena.handle))
        memcpy(ret->arena.handle, done->arenas[0]->handle.data, sizeof(ret->arena.handle));
    assert_int_equal(ret->arena.backend, w->backend);
    ret->fd = backend->has_descriptor ? fcntl(frame->fds[1], F_DUPFD_CLOEXEC, 0) : -1;
    if (backend->check(ret->fd, &ret->arena, &err) < 0)
        fail_msg("%s (fd %d, size %llu, pages of %u)", err.message, ret->fd, (unsigned long long)ret->arena.size,
                 ret->arena.page_size);
    assert_int_equal(rv_sealed_check(frame->fds[0], done->index_size), 0);
    assert_int_equal(rv_index_open(&ret->index, frame->fds[0], &ret->arena.size, 1, &err), 0);
    assert_int_equal(rv_index_count(&ret->index), done->tensors);
    (void)snprintf(ret->method, sizeof(ret->method), "%s", done->method);
}

static struct loaded load_good(int file, const struct wish *w)
{
    struct loaded ret = {.fd = -1};
    struct rv_frame frame;
    struct drive l;
    uint64_t planned = begin_load(&l, file, w);

    frame = drive_receive(&l);
    if (frame.message->body_case == RV__FRAME__BODY_ERROR)
        fail_msg("%s", frame.message->error->message);
    if (frame.message->body_case == RV__FRAME__BODY_DEVICE_EVENT)
        fail_msg("%s", frame.message->device_event->what);
    read_done(&frame, w, &ret);
    assert_int_equal(ret.arena.size, planned);
    rv_frame_fini(&frame);
    drive_end_loader(&l, 0);
    (void)close(file);
    return ret;
}

/* An arena's bytes: each tensor's pattern and digest, and zeros everywhere else. */
static void check_bytes(const struct loaded *l, const uint8_t *bytes)
{
    uint64_t at = 0, data = 0;

    for (uint32_t i = 0; i < rv_index_count(&l->index); i++) {
        const char *name;
        const struct rv_index_entry *e = rv_index_at(&l->index, i, &name);
        XXH128_canonical_t digest;

        assert_non_null(e);
        assert_int_equal(e->offset % RV_TENSOR_ALIGN, 0);
        for (; at < e->offset; at++)
            if (bytes[at] != 0)
                fail_msg("byte %llu before tensor %u is not 0", (unsigned long long)at, i);
        for (uint64_t k = 0; k < e->length; k++)
            if (bytes[at + k] != drive_pattern(data + k))
                fail_msg("tensor %u differs at byte %llu", i, (unsigned long long)k);
        XXH128_canonicalFromHash(&digest, XXH3_128bits(e->length ? bytes + at : NULL, e->length));
        assert_memory_equal(digest.digest, e->digest, 16);
        at += e->length;
        data += e->length;
    }
    for (; at < l->arena.size; at++)
        if (bytes[at] != 0)
            fail_msg("byte %llu of the tail is not 0", (unsigned long long)at);
}

/* The arena is mapped at address in this process. */
static void check_on_device(const struct loaded *l, unsigned device, uint64_t address)
{
    uint8_t *bytes = malloc(l->arena.size);
    struct rv_error err = {0};

    assert_non_null(bytes);
    if (rv_cuda_read(devices[device].device, bytes, address, l->arena.size, &err) < 0)
        fail_msg("%s", err.message);
    check_bytes(l, bytes);
    free(bytes);
}

static void loaded_fini(struct loaded *l)
{
    rv_index_close(&l->index);
    if (l->fd >= 0)
        (void)close(l->fd);
}

/* Loads, imports what came, compares, gives it back. Returns the method. */
static const char *load_and_check_vmm(int file, const struct wish *w)
{
    static char method[256];
    struct loaded l = load_good(file, w);
    struct rv_cuda_memory memory = {0};
    struct rv_error err = {0};

    if (rv_cuda_vmm_import(devices[w->device].device, l.fd, &l.arena, false, &memory, &err) < 0)
        fail_msg("%s", err.message);
    check_on_device(&l, w->device, memory.address);
    rv_cuda_memory_close(devices[w->device].device, &memory);
    (void)snprintf(method, sizeof(method), "%s", l.method);
    loaded_fini(&l);
    return method;
}

/* A file of tensors with these ends of their data. */
static int make_tensors(const char *name, const uint64_t *ends, unsigned count)
{
    char *header = malloc(128 * (size_t)count + 16), *p = header;
    uint64_t at = 0;
    int file;

    assert_non_null(header);
    p += sprintf(p, "{");
    for (unsigned i = 0; i < count; i++) {
        p += sprintf(p, "%s\"%u\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}", i ? "," : "", i,
                     (unsigned long long)(ends[i] - at), (unsigned long long)at, (unsigned long long)ends[i]);
        at = ends[i];
    }
    (void)sprintf(p, "}%*s", (int)(1 + count % 7), ""); /* so that the data starts at odd places */
    file = drive_make_file(name, 0, header, at);
    free(header);
    return file;
}

/* Over several blocks: empty ones, small ones, some just around what is copied by itself, one over many blocks. */
static int make_mixed(void)
{
    static const uint64_t ends[] = {1,       4096,    4096,    70000,    332144,   594288,  856433,
                                    4194304, 4194305, 4194305, 13000001, 21000000, 21000000};

    return make_tensors("mixed.safetensors", ends, sizeof(ends) / sizeof(ends[0]));
}

static int make_small(void)
{
    static uint64_t ends[3000];

    for (unsigned i = 0; i < 3000; i++)
        ends[i] = (i ? ends[i - 1] : 0) + (uint64_t)i * 7 % 4000 / 8 * 8;
    return make_tensors("small.safetensors", ends, 3000);
}

/* ---- good loads ----------------------------------------------------------------------------------------------------
 */

static const struct {
    const char *way, *method;
    uint32_t direct;
    bool drop; /* from the page cache first */
} ways[] = {
    {"io_uring", "io_uring, pinned", 0, true},
    {"threads", "threads, pinned", 0, true},
    {"cache", "page cache, pinned", 0, false},
    {NULL, "io_uring, pinned", 1, true},
};

static void test_every_way_to_read(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        const struct wish w = {0, RV_BACKEND_CUDA_VMM, ways[i].way, ways[i].direct, NULL};
        int file = make_mixed();
        const char *method;

        if (ways[i].drop)
            assert_int_equal(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
        method = load_and_check_vmm(file, &w);
        if (strcmp(method, ways[i].method) != 0) /* a container may forbid io_uring, a filesystem O_DIRECT */
            print_message("way %u: %s instead of %s\n", i, method, ways[i].method);
        assert_non_null(strstr(method, ", pinned"));
        check_nothing_left();
    }
}

static void test_shapes_of_models(void **state)
{
    static const uint64_t blobs[] = {0, 1, 9, BLOCK - 1, BLOCK, 3 * BLOCK + 8};

    (void)state;
    (void)load_and_check_vmm(make_small(), &to_vmm);
    (void)load_and_check_vmm(drive_make_file("none.safetensors", 0, "{}", 0), &to_vmm);
    (void)load_and_check_vmm(drive_make_file("only-empty.safetensors", 0,
                                             "{\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}", 0),
                             &to_vmm);
    for (unsigned i = 0; i < sizeof(blobs) / sizeof(blobs[0]); i++)
        (void)load_and_check_vmm(drive_make_blob("some.gguf", blobs[i]), &to_vmm);
    check_nothing_left();
}

/* Copies that end long after they were asked for: a block must not be read into again before. */
static void test_late_copies(void **state)
{
    (void)state;
    set_faults("late 20000");
    for (unsigned i = 0; i < 3; i++) {
        const struct wish w = {0, RV_BACKEND_CUDA_VMM, ways[i].way, 0, NULL};

        (void)load_and_check_vmm(make_mixed(), &w);
    }
    (void)load_and_check_vmm(make_small(), &to_vmm);
    set_faults(NULL);
    check_nothing_left();
}

static void test_without_pinned_memory(void **state)
{
    static const char *const faults[] = {"fault cuMemHostAlloc nth=1+ error=2", "fault cuMemHostAlloc nth=2+ error=2"};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        set_faults(faults[i]);
        assert_non_null(strstr(load_and_check_vmm(make_mixed(), &to_vmm), ", not pinned: cuMemHostAlloc: 2"));
    }
    set_faults(NULL);
    check_nothing_left();
}

/* A unified device's models lie in the machine's memory: no driver is touched, and so it need not even work. */
static void test_unified_memory_is_the_machines(void **state)
{
    const struct wish w = {2, RV_BACKEND_MEMFD, NULL, 0, NULL};
    struct rv_error err = {0};
    struct loaded l;
    void *p;

    (void)state;
    set_faults("init 999");
    l = load_good(make_mixed(), &w);
    set_faults(NULL);
    assert_null(strstr(l.method, "pinned"));
    assert_int_equal(rv_backend_by_id(RV_BACKEND_MEMFD)->map(l.fd, &l.arena, RV_MAP_SHARED, &p, &err), 0);
    check_bytes(&l, p);
    assert_int_equal(munmap(p, l.arena.size), 0);
    loaded_fini(&l);
}

/* ---- cuda-ipc: this process is the holder --------------------------------------------------------------------------
 */

struct held {
    struct rv_cuda_memory memory;
    struct rv_arena arena;
};

/* With garbage in it, as memory that somebody else had. */
static struct held hold(uint64_t size)
{
    struct held h = {0};
    struct rv_error err = {0};

    if (rv_cuda_ipc_create(devices[1].device, size, &h.memory, &h.arena, &err) < 0)
        fail_msg("%s", err.message);
    h.arena.allocation = 77;
    assert_int_equal(rv_cuda_fill(devices[1].device, h.memory.address, GARBAGE, h.arena.size, &err), 0);
    return h;
}

static void let_go(struct held *h)
{
    rv_cuda_memory_close(devices[1].device, &h->memory);
}

static void test_an_arena_of_a_holder(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        struct held h = hold(22 * 1024 * 1024);
        const struct wish w = {1, RV_BACKEND_CUDA_IPC, ways[i].way, 0, &h.arena};
        struct loaded l = load_good(make_mixed(), &w);

        assert_int_equal(l.arena.size, h.arena.size);
        assert_int_equal(l.arena.allocation, 77);
        assert_memory_equal(l.arena.handle, h.arena.handle, RV_IPC_HANDLE_SIZE);
        check_on_device(&l, 1, h.memory.address);
        loaded_fini(&l);
        let_go(&h);
        check_nothing_left();
    }
}

/* ---- loads that fail -----------------------------------------------------------------------------------------------
 */

struct failure {
    int event; /* CUresult of the DeviceEvent that must come first; 0 = none may */
    int code;
    const char *words; /* in the message */
};

static void expect_failure(struct drive *l, unsigned device, const struct failure *expected)
{
    struct rv_frame frame = drive_receive(l);

    if (frame.message->body_case == RV__FRAME__BODY_LOAD_PLAN) {
        rv_frame_fini(&frame);
        send_admit(l, NULL);
        frame = drive_receive(l);
    }
    if (expected->event) {
        const Rv__DeviceEvent *event = frame.message->device_event;

        if (frame.message->body_case == RV__FRAME__BODY_ERROR)
            fail_msg("no event before: %s", frame.message->error->message);
        if (frame.message->body_case != RV__FRAME__BODY_DEVICE_EVENT)
            fail_msg("frame %d instead of \"%s\"", (int)frame.message->body_case, expected->words);
        if (event->error != expected->event)
            fail_msg("%d instead of %d: %s", event->error, expected->event, event->what);
        assert_int_equal(event->uuid.len, RV_DEVICE_UUID_SIZE);
        assert_memory_equal(event->uuid.data, devices[device].uuid, RV_DEVICE_UUID_SIZE);
        if (!strstr(event->what, expected->words))
            fail_msg("not \"%s\": %s", expected->words, event->what);
        rv_frame_fini(&frame);
        frame = drive_receive(l);
    }
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_ERROR);
    if (frame.message->error->code != (Resvisor__V1__ErrorCode)expected->code ||
        !strstr(frame.message->error->message, expected->words))
        fail_msg("code %d: %s", frame.message->error->code, frame.message->error->message);
    rv_frame_fini(&frame);
    drive_end_loader(l, 1);
}

static void load_bad(int file, const struct wish *w, const struct failure *expected)
{
    struct drive l = drive_start_loader(w->way);

    drive_greet(&l);
    send_start(&l, file, w);
    expect_failure(&l, w->device, expected);
    (void)close(file);
}

static const struct {
    const char *faults;
    struct failure failure;
} failing[] = {
    {"init 999", {3, ERROR(DEVICE), "cuInit: 999"}},
    {"devices none", {100, ERROR(NO_SUCH_DEVICE), "cuInit: 100"}},
    {"fault cuDevicePrimaryCtxRetain error=46", {46, ERROR(DEVICE), "cuDevicePrimaryCtxRetain: 46"}},
    {"fault cuMemCreate error=999 lose=0", {999, ERROR(DEVICE_LOST), "cuMemCreate: 999"}},
    {"fault cuMemMap error=205", {205, ERROR(DEVICE), "cuMemMap: 205"}},
    {"fault cuMemSetAccess error=1", {1, ERROR(DEVICE), "cuMemSetAccess: 1"}},
    {"fault cuStreamCreate error=2", {2, ERROR(NO_MEMORY), "cuStreamCreate: 2"}},
    {"fault cuMemcpyHtoDAsync error=719 lose=0", {719, ERROR(DEVICE_LOST), ": 719"}},
    {"fault cuMemcpyHtoDAsync nth=4 error=719 lose=0", {719, ERROR(DEVICE_LOST), ": 719"}},
    {"fault cuEventRecord nth=3 error=700 lose=0", {700, ERROR(DEVICE_LOST), ": 700"}},
    {"late 20000; fault cuEventSynchronize nth=2 error=719 lose=0", {719, ERROR(DEVICE_LOST), ": 719"}},
    {"fault cuMemExportToShareableHandle error=801", {801, ERROR(DEVICE), "cuMemExportToShareableHandle: 801"}},
};

#define LIVING_SECONDS 60

/* Waits until no allocation and no context lives in the machine of that state folder (fakecuda.h says what it holds):
 * the kernel may drop the last lock of a process that has ended a little later. SIGALRM fails the test. */
static void wait_for_no_memory(const char *folder)
{
    char name[300];
    struct dirent *entry;
    DIR *dir;

    (void)snprintf(name, sizeof(name), "%s/memory", folder);
    (void)alarm(LIVING_SECONDS);
    dir = opendir(name);
    while (dir && (entry = readdir(dir)) != NULL) {
        int fd = entry->d_name[0] == '.' ? -1 : openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC);

        if (fd >= 0) {
            assert_int_equal(flock(fd, LOCK_EX), 0);
            (void)close(fd);
        }
    }
    if (dir)
        (void)closedir(dir);
    (void)alarm(0);
}

/* Whatever call of the driver fails: an event and an error with the call's name, and nothing is left on the device. On
 * a machine of its own each time, since some of these devices are lost. */
static void test_a_driver_that_fails(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof(failing) / sizeof(failing[0]); i++) {
        char folder[64];

        (void)snprintf(folder, sizeof(folder), "%s/failing%u", state_directory, i);
        assert_int_equal(mkdir(folder, 0700), 0);
        assert_int_equal(setenv("FAKECUDA_STATE", folder, 1), 0);
        set_faults(failing[i].faults);
        load_bad(make_mixed(), &to_vmm, &failing[i].failure);
        wait_for_no_memory(folder);
        set_faults(NULL);
        assert_int_equal(setenv("FAKECUDA_STATE", state_directory, 1), 0);
    }
}

/* More than the device has, and more than is left of it. */
static void test_out_of_device_memory(void **state)
{
    static const char *const small[] = {"memory=16MiB", "memory=1GiB oom=16MiB"};
    static const struct failure full = {2, ERROR(NO_MEMORY), "cuMemCreate: 2"};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        char text[64];

        (void)snprintf(text, sizeof(text), "device discrete %s", small[i]);
        assert_int_equal(setenv("FAKECUDA", text, 1), 0);
        load_bad(make_mixed(), &to_vmm, &full);
    }
    set_faults(NULL);
    check_nothing_left();
}

static void test_an_arena_that_does_not_fit_the_load(void **state)
{
    static const struct failure missing = {0, ERROR(INTERNAL), "cuda-ipc is missing"},
                                small = {0, ERROR(INTERNAL), "too small"},
                                other = {0, ERROR(INTERNAL), "not of that backend"};
    struct held h = hold(BLOCK);
    const struct wish ipc = {1, RV_BACKEND_CUDA_IPC, NULL, 0, &h.arena};
    const struct wish vmm = {0, RV_BACKEND_CUDA_VMM, NULL, 0, &h.arena};
    int file = make_mixed();
    struct drive l;

    (void)state;
    load_bad(make_mixed(), &ipc, &missing); /* load_bad admits without an arena */
    (void)begin_load(&l, file, &ipc);
    expect_failure(&l, 1, &small);
    (void)begin_load(&l, file, &vmm);
    expect_failure(&l, 0, &other);
    (void)close(file);
    let_go(&h);
    check_nothing_left();
}

static void test_file_changed_while_loading(void **state)
{
    static const struct failure changed = {0, ERROR(MODEL_CHANGED), "changed"};
    int file = make_mixed(), writer = open(drive_path, O_WRONLY | O_CLOEXEC);
    struct drive l;

    (void)state;
    assert_true(writer >= 0);
    l = drive_start_loader(NULL);
    drive_greet(&l);
    send_start(&l, file, &to_vmm);
    {
        struct rv_frame frame = drive_receive(&l);

        assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PLAN);
        rv_frame_fini(&frame);
    }
    assert_int_equal(pwrite(writer, "x", 1, 5000), 1);
    send_admit(&l, NULL);
    expect_failure(&l, 0, &changed);
    (void)close(writer);
    (void)close(file);
    check_nothing_left();
}

/* ---- ends in the middle --------------------------------------------------------------------------------------------
 */

/* A load that lasts, in the middle of its copies. */
static struct drive load_halfway(int file, const struct wish *w)
{
    struct rv_frame frame;
    struct drive l;

    set_faults("late 500000");
    (void)begin_load(&l, file, w);
    set_faults(NULL);
    assert_int_equal(rv_frame_wait(l.socket, &frame, DRIVE_WAIT_US), 1);
    assert_int_equal(frame.message->body_case, RV__FRAME__BODY_LOAD_PROGRESS);
    rv_frame_fini(&frame);
    return l;
}

static void kill_loader(struct drive *l)
{
    int status;

    assert_int_equal(kill(l->pid, SIGKILL), 0);
    assert_int_equal(waitpid(l->pid, &status, 0), l->pid);
    assert_true(WIFSIGNALED(status));
    (void)close(l->socket);
}

static void test_a_killed_loader_leaves_nothing(void **state)
{
    static uint8_t bytes[BLOCK];
    struct held h = hold(22 * 1024 * 1024);
    const struct wish ipc = {1, RV_BACKEND_CUDA_IPC, NULL, 0, &h.arena};
    struct rv_error err = {0};
    struct drive l;
    int file = make_mixed();

    (void)state;
    l = load_halfway(file, &to_vmm);
    assert_true(bytes_in_use(0) >= devices[0].idle + 21000000);
    kill_loader(&l);
    l = load_halfway(file, &ipc);
    kill_loader(&l);
    assert_int_equal(rv_cuda_read(devices[1].device, bytes, h.memory.address, sizeof(bytes), &err), 0);
    let_go(&h);
    check_nothing_left();
    (void)close(file);
}

static void test_a_closed_channel_ends_it_at_once(void **state)
{
    struct drive l;
    int file = make_mixed();
    uint64_t start;

    (void)state;
    l = load_halfway(file, &to_vmm);
    start = rv_now_us();
    drive_end_loader(&l, 1);
    assert_true(rv_now_us() - start < 2 * RV_SEC);
    check_nothing_left();
    (void)close(file);
}

/* ---- the group -----------------------------------------------------------------------------------------------------
 */

/* Before each test: an earlier one may have failed in the middle. */
static int start_afresh(void **state)
{
    (void)state;
    set_faults(NULL);
    return setenv("FAKECUDA_STATE", state_directory, 1);
}

static int set_up(void **state)
{
    struct rv_error err = {0};

    if (!mkdtemp(state_directory))
        return -1;
    assert_int_equal(start_afresh(state), 0);
    if (rv_cuda_open(&cuda, &err) < 0)
        fail_msg("%s", err.message);
    for (unsigned i = 0; i < 3; i++) {
        struct rv_cuda_info info;

        assert_int_equal(rv_cuda_device_info(cuda, i, &info, &err), 0);
        memcpy(devices[i].uuid, info.uuid, sizeof(info.uuid));
        assert_int_equal(rv_cuda_device_open(cuda, info.uuid, &devices[i].device, &err), 0);
        devices[i].idle = bytes_in_use(i);
    }
    return drive_set_up(state);
}

static int tear_down(void **state)
{
    char command[128];

    for (unsigned i = 0; i < 3; i++)
        rv_cuda_device_close(devices[i].device);
    rv_cuda_close(cuda);
    (void)snprintf(command, sizeof(command), "rm -rf %s", state_directory);
    return system(command) == 0 ? drive_tear_down(state) : -1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_every_way_to_read, start_afresh),
        cmocka_unit_test_setup(test_shapes_of_models, start_afresh),
        cmocka_unit_test_setup(test_late_copies, start_afresh),
        cmocka_unit_test_setup(test_without_pinned_memory, start_afresh),
        cmocka_unit_test_setup(test_unified_memory_is_the_machines, start_afresh),
        cmocka_unit_test_setup(test_an_arena_of_a_holder, start_afresh),
        cmocka_unit_test_setup(test_a_driver_that_fails, start_afresh),
        cmocka_unit_test_setup(test_out_of_device_memory, start_afresh),
        cmocka_unit_test_setup(test_an_arena_that_does_not_fit_the_load, start_afresh),
        cmocka_unit_test_setup(test_file_changed_while_loading, start_afresh),
        cmocka_unit_test_setup(test_a_killed_loader_leaves_nothing, start_afresh),
        cmocka_unit_test_setup(test_a_closed_channel_ends_it_at_once, start_afresh),
    };
    const char *folders = getenv("LD_LIBRARY_PATH");

    (void)argc;
    if (!folders || strncmp(folders, RV_FAKECUDA, strlen(RV_FAKECUDA)) != 0) { /* the double comes before any driver */
        assert_int_equal(setenv("LD_LIBRARY_PATH", RV_FAKECUDA, 1), 0);
        (void)execv("/proc/self/exe", argv);
        return 1;
    }
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
