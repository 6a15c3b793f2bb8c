/*
 * Models on devices of the double of the driver, and the supervisor's answers about them, for tests of libresvisor.
 *
 * Each case runs in a child process of its own: configuration and driver belong to a process, and neither lives through
 * a fork. The program runs itself again with the double's folder in LD_LIBRARY_PATH (device_double_main).
 */
#ifndef RV_TEST_DEVICE_DOUBLE_H
#define RV_TEST_DEVICE_DOUBLE_H

#include "supervisor_double.h"

#include <fcntl.h>

#include <sys/wait.h>

#include "resvisor.h"
#include "rv_cuda.h"

#define MIB (1u << 20)
#define CASE_SECONDS 100
#define MODEL_BYTES (12 * MIB)
#define LARGE_OFFSET MIB
#define LARGE_BYTES (9 * MIB + 5) /* more than one chunk of rv_lease_verify */

/* Ends the case. cmocka's assertions jump to the parent's test, which a case in a child has left behind. */
#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            (void)fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                            \
        }                                                                                        \
    } while (0)

#define CASE(name)                 \
    static void name##_body(void); \
    static void name(void **state) \
    {                              \
        (void)state;               \
        case_run(name##_body);     \
    }                              \
    static void name##_body(void)

static inline int child_status(pid_t child)
{
    int status = 0;

    while (waitpid(child, &status, 0) != child)
        ;
    return status;
}

static inline void case_run(void (*body)(void))
{
    pid_t child;

    (void)fflush(NULL);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        (void)alarm(CASE_SECONDS);
        body();
        exit(0);
    }
    assert_int_equal(child_status(child), 0);
}

/* ---- a model on a device: as the one of supervisor_double.h, and a large tensor "c" ---- */

struct device_model {
    struct double_model model; /* arena_fd -1 with cuda-ipc */
    struct rv_cuda_memory memory;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
};

/* The test's own handle on the driver, beside the library's. */
static struct rv_cuda *test_cuda;
static struct rv_cuda_device *test_device;

static inline void device_open(uint32_t number, uint8_t ret_uuid[RV_DEVICE_UUID_SIZE])
{
    struct rv_cuda_info info;
    struct rv_error err = {0};

    if ((!test_cuda && rv_cuda_open(&test_cuda, &err) < 0) || rv_cuda_device_info(test_cuda, number, &info, &err) < 0 ||
        (!test_device && rv_cuda_device_open(test_cuda, info.uuid, &test_device, &err) < 0)) {
        (void)fprintf(stderr, "the double: %s\n", err.message);
        _exit(1);
    }
    memcpy(ret_uuid, info.uuid, sizeof(info.uuid));
}

static inline uint8_t *model_bytes(void)
{
    uint8_t *bytes = calloc(1, MODEL_BYTES);

    CHECK(bytes);
    for (size_t i = 0; i < MODEL_BYTES; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 4096);
    return bytes;
}

static inline void index_make(struct double_model *model, const uint8_t *bytes)
{
    struct rv_index_builder *builder = rv_index_builder_create(3, 16);
    struct rv_index_arena arena = {model->arena.size, model->arena.backend, model->arena.page_size};
    uint8_t nothing[16] = {0};

    CHECK(builder);
    add_tensor(builder, "a", RV_INDEX_F32, 0, bytes, 24, 2, 2, 3);
    add_tensor(builder, "b", RV_INDEX_U8, 4096, bytes, 300, 1, 300, 0);
    add_tensor(builder, "c", RV_INDEX_U8, LARGE_OFFSET, bytes, LARGE_BYTES, 1, LARGE_BYTES, 0);
    model->index_fd = rv_index_builder_write(builder, &arena, 1, NULL, 0, nothing, &model->index_size);
    CHECK(model->index_fd >= 0);
    rv_index_builder_destroy(builder);
}

static inline void vmm_model_make(struct device_model *model)
{
    uint8_t *bytes = model_bytes();
    struct rv_error err = {0};

    device_open(0, model->uuid);
    CHECK(rv_cuda_vmm_create(test_device, MODEL_BYTES, &model->memory, &model->model.arena, &err) == 0);
    CHECK(rv_cuda_write(test_device, model->memory.address, bytes, MODEL_BYTES, &err) == 0);
    model->model.arena_fd = rv_cuda_vmm_export(test_device, &model->memory, &err);
    CHECK(model->model.arena_fd >= 0);
    index_make(&model->model, bytes);
    free(bytes);
}

/* ---- a holder of cuda-ipc memory: this program in another process ---- */

struct holder {
    pid_t pid;
    int to, from;
};

/* The holder's side: a filled arena, its description on standard output, until standard input ends. */
static inline int holder_main(void)
{
    struct rv_cuda_memory memory;
    struct rv_arena arena;
    struct rv_error err = {0};
    uint8_t uuid[RV_DEVICE_UUID_SIZE], *bytes = model_bytes(), end;

    device_open(0, uuid);
    CHECK(rv_cuda_ipc_create(test_device, MODEL_BYTES, &memory, &arena, &err) == 0);
    CHECK(rv_cuda_write(test_device, memory.address, bytes, MODEL_BYTES, &err) == 0);
    arena.allocation = 77;
    CHECK(write(STDOUT_FILENO, &arena, sizeof(arena)) == (ssize_t)sizeof(arena));
    (void)!read(STDIN_FILENO, &end, 1);
    free(bytes);
    return 0;
}

static inline void ipc_model_make(struct device_model *model, struct holder *holder)
{
    uint8_t *bytes = model_bytes();
    int in[2], out[2];

    CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    holder->pid = fork();
    CHECK(holder->pid >= 0);
    if (holder->pid == 0) {
        (void)dup2(in[0], STDIN_FILENO);
        (void)dup2(out[1], STDOUT_FILENO);
        (void)execl("/proc/self/exe", "holder", "--hold", (char *)NULL);
        _exit(127);
    }
    (void)close(in[0]);
    (void)close(out[1]);
    holder->to = in[1];
    holder->from = out[0];
    CHECK(read(holder->from, &model->model.arena, sizeof(model->model.arena)) == (ssize_t)sizeof(model->model.arena));
    device_open(0, model->uuid);
    model->model.arena_fd = -1;
    index_make(&model->model, bytes);
    free(bytes);
}

static inline void holder_end(const struct holder *holder)
{
    (void)close(holder->to);
    (void)close(holder->from);
    CHECK(child_status(holder->pid) == 0);
}

/* ---- the supervisor's answers ---- */

static struct device_model on_device; /* what the scripts of a case speak of */
static const char *device_name = "cuda:0";
static uint64_t device_generation = 3;
static void (*device_spoil)(struct double_reply *reply); /* on top of a right answer */
static Rv__Device device_message;

static inline void device_reply(struct double_reply *reply)
{
    rv__device__init(&device_message);
    device_message.name = (char *)device_name;
    device_message.uuid = (ProtobufCBinaryData){sizeof(on_device.uuid), on_device.uuid};
    reply->body.device = &device_message;
    reply->body.generation = device_generation;
    if (on_device.model.arena_fd < 0) {
        reply->fd_count = 1;
        for (unsigned i = 0; i < 16; i++) {
            reply->arenas[i].handle = (ProtobufCBinaryData){RV_IPC_HANDLE_SIZE, on_device.model.arena.handle};
            reply->arenas[i].allocation = on_device.model.arena.allocation;
        }
    }
    if (device_spoil)
        device_spoil(reply);
}

static inline void send_device_lease(int socket, uint64_t lease_id)
{
    double_send_lease(socket, double_expect_attach(socket), lease_id, &on_device.model, device_reply);
}

/* A DeviceEvent about the model's device; its error. */
static inline int expect_event(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;
    int error;

    double_expect(socket, RV__FRAME__BODY_DEVICE_EVENT, &got);
    assert_int_equal(got.message->device_event->uuid.len, sizeof(on_device.uuid));
    assert_memory_equal(got.message->device_event->uuid.data, on_device.uuid, sizeof(on_device.uuid));
    assert_true(got.message->device_event->what[0] != '\0');
    error = got.message->device_event->error;
    rv_frame_fini(&got);
    return error;
}

static inline struct rv_connection *connect_to(const struct double_server *d)
{
    struct rv_connection *connection = NULL;

    CHECK(rv_connect(d->path, 20000, &connection, NULL) == 0);
    return connection;
}

static inline struct rv_lease *attach_to(struct rv_connection *connection)
{
    struct rv_failure err = {0};
    struct rv_lease *lease = NULL;

    if (rv_attach(connection, "m", NULL, &lease, &err) < 0) {
        (void)fprintf(stderr, "attach: %s; %s\n", err.message, err.remedy);
        _exit(1);
    }
    return lease;
}

static inline struct rv_lease_info lease_facts(const struct rv_lease *lease)
{
    struct rv_lease_info info = {.struct_size = sizeof(info)};

    CHECK(rv_lease_get_info(lease, &info) == 0);
    return info;
}

#ifndef RV_FAKECUDA
#define RV_FAKECUDA "" /* the folder of the double, from CMake; only a header that is compiled alone has none */
#endif

/* Runs the tests with the double in sight of dlopen, which looks at the environment that a program starts with. */
static inline int device_double_main(int argc, char **argv, int (*run)(void))
{
    const char *path = getenv("LD_LIBRARY_PATH");
    char more[4096];

    if (argc > 1 && strcmp(argv[1], "--hold") == 0)
        return holder_main();
    if (path && strstr(path, RV_FAKECUDA))
        return run();
    (void)snprintf(more, sizeof(more), "%s%s%s", RV_FAKECUDA, path ? ":" : "", path ? path : "");
    (void)setenv("LD_LIBRARY_PATH", more, 1);
    (void)execv("/proc/self/exe", argv);
    return 127;
}

#endif
