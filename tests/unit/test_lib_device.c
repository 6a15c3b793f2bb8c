/* libresvisor on devices of the driver's double: where pointers point, what they refuse, how long they live. */
#include "device_double.h"

#include <signal.h>

#include "lib/dlpack.h"

static void check_tensors(const struct rv_lease *lease)
{
    uint8_t *bytes = model_bytes(), *copy = calloc(1, LARGE_BYTES);
    struct rv_tensor a, c;

    CHECK(copy && rv_tensor_count(lease) == 3);
    CHECK(rv_tensor_find(lease, "a", &a) == 0 && a.dtype == RV_F32 && a.length == 24);
    CHECK(rv_tensor_at(lease, 2, &c) == 0 && strcmp(c.name, "c") == 0);
    CHECK((uint8_t *)c.data - (uint8_t *)a.data == (ptrdiff_t)LARGE_OFFSET);
    CHECK(rv_tensor_read(lease, "a", 0, copy, 24, NULL) == 0 && memcmp(copy, bytes, 24) == 0);
    CHECK(rv_tensor_read(lease, "c", 3, copy, LARGE_BYTES - 3, NULL) == 0);
    CHECK(memcmp(copy, bytes + LARGE_OFFSET + 3, LARGE_BYTES - 3) == 0);
    free(bytes);
    free(copy);
}

/* Through the test's own handle on the driver: what a kernel of this process would see. */
static void check_pointer(const void *device_pointer, uint64_t offset, uint64_t length)
{
    uint8_t *bytes = model_bytes(), *copy = calloc(1, length);

    CHECK(copy && rv_cuda_read(test_device, copy, (uint64_t)(uintptr_t)device_pointer, length, NULL) == 0);
    CHECK(memcmp(copy, bytes + offset, length) == 0);
    free(bytes);
    free(copy);
}

/* ---- pointers ---- */

static void serve_private_then_one(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 10);
    double_expect_detach(socket, 10);
    send_device_lease(socket, 11);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(a_lease_on_a_device_has_its_pointers_and_facts)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_failure err;
    struct rv_lease *lease = NULL;
    struct rv_lease_info info;
    struct rv_tensor b;
    uint64_t copied = 9;
    pid_t child;
    int before;

    vmm_model_make(&on_device);
    double_start(&d, serve_private_then_one);
    connection = connect_to(&d);
    before = open_descriptors();
    options.mapping = RV_MAPPING_PRIVATE;
    CHECK(rv_attach(connection, "m", &options, &lease, &err) == -EOPNOTSUPP);
    CHECK(strstr(err.message, "cuda:0") && strstr(err.remedy, "host"));
    lease = attach_to(connection);
    info = lease_facts(lease);
    CHECK(strcmp(info.device, "cuda:0") == 0 && strcmp(info.backend, "cuda-vmm") == 0);
    CHECK(info.device_type == 2 && info.device_id == 0 && info.mapping == RV_MAPPING_SHARED_READ_ONLY);
    CHECK(info.bytes == MODEL_BYTES && info.tensors == 3);
    check_tensors(lease);
    CHECK(rv_tensor_find(lease, "b", &b) == 0 && (uintptr_t)b.data % 256 == 0);
    check_pointer(b.data, 4096, 300);
    CHECK(rv_lease_verify(lease, NULL) == 0);
    CHECK(rv_lease_copied_bytes(lease, &copied) == 0 && copied == 0);
    child = fork();
    if (child == 0) { /* the CPU has no business there */
        (void)signal(SIGSEGV, SIG_DFL);
        _exit(*(volatile uint8_t *)b.data == 0 ? 0 : 1);
    }
    CHECK(WIFSIGNALED(child_status(child)));
    rv_detach(lease);
    CHECK(open_descriptors() == before);
    rv_disconnect(connection);
    double_stop(&d);
}

static void serve_a_write(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    assert_int_not_equal(expect_event(socket), 0); /* the read that finds the broken context */
    send_device_lease(socket, 12);
    assert_int_not_equal(expect_event(socket), 0); /* the attach that does */
    double_expect_detach(socket, 12);
    assert_int_equal(expect_event(socket), 719);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(a_write_through_a_lease_is_refused_and_breaks_only_this_process)
{
    static const uint8_t bytes[16] = {1};
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *more = NULL;
    struct rv_failure err;
    struct rv_tensor a;
    uint8_t copy[16];
    pid_t reader;
    int status;

    vmm_model_make(&on_device);
    double_start(&d, serve_a_write);
    connection = connect_to(&d);
    lease = attach_to(connection);
    CHECK(rv_tensor_find(lease, "a", &a) == 0);
    CHECK(rv_cuda_write(test_device, (uint64_t)(uintptr_t)a.data, bytes, sizeof(bytes), NULL) < 0);
    CHECK(rv_tensor_read(lease, "a", 0, copy, sizeof(copy), &err) == -EIO);
    CHECK(err.code == RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST && err.message[0] && err.remedy[0]);
    CHECK(rv_attach(connection, "m", NULL, &more, &err) < 0 && !more);
    CHECK(err.code == RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST);
    rv_device_report(connection, lease, 719, "cuLaunchKernel");
    rv_device_report(connection, NULL, 719, "nothing is sent without a lease");
    rv_device_report(NULL, lease, 719, "or without a connection");
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    /* another process reads what was there before */
    reader = fork();
    if (reader == 0) {
        char fd[16], size[32];

        (void)snprintf(fd, sizeof(fd), "%d", dup(on_device.model.arena_fd));
        (void)snprintf(size, sizeof(size), "%llu", (unsigned long long)on_device.model.arena.size);
        (void)execl("/proc/self/exe", "reader", "--read", fd, size, (char *)NULL);
        _exit(127);
    }
    status = child_status(reader);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* --read FD SIZE: the arena behind the descriptor has the model's bytes. */
static int reader_main(char **argv)
{
    struct rv_arena arena = {.size = strtoull(argv[3], NULL, 10), .page_size = 2 * MIB, .backend = RV_BACKEND_CUDA_VMM};
    struct rv_cuda_memory memory;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];

    device_open(0, uuid);
    CHECK(rv_cuda_vmm_import(test_device, atoi(argv[2]), &arena, false, &memory, NULL) == 0);
    check_pointer((void *)(uintptr_t)memory.address, 0, MODEL_BYTES);
    return 0;
}

static void serve_three(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    send_device_lease(socket, 12);
    device_generation++;
    send_device_lease(socket, 13);
    double_expect_detach(socket, 11);
    double_expect_detach(socket, 12);
    double_expect_detach(socket, 13);
    double_expect_end(socket);
}

static void share(const char *backend)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *leases[3];
    struct rv_tensor t[3];

    double_start(&d, serve_three);
    connection = connect_to(&d);
    for (unsigned i = 0; i < 3; i++) {
        leases[i] = attach_to(connection);
        CHECK(strcmp(lease_facts(leases[i]).backend, backend) == 0);
        CHECK(rv_tensor_find(leases[i], "a", &t[i]) == 0);
    }
    CHECK(t[0].data == t[1].data);
    rv_detach(leases[0]);
    check_tensors(leases[1]);
    rv_detach(leases[1]);
    check_tensors(leases[2]);
    CHECK(rv_lease_verify(leases[2], NULL) == 0);
    rv_detach(leases[2]);
    CHECK(rv_cuda_read(test_device, &t, (uint64_t)(uintptr_t)t[0].data, 1, NULL) < 0); /* nothing is mapped any more */
    rv_disconnect(connection);
    double_stop(&d);
}

CASE(leases_of_one_generation_share_one_mapping)
{
    vmm_model_make(&on_device);
    share("cuda-vmm");
}

CASE(a_handle_is_opened_once_and_closed_by_the_last_lease)
{
    struct holder holder;

    (void)setenv("FAKECUDA", "device no-vmm", 1);
    ipc_model_make(&on_device, &holder);
    share("cuda-ipc");
    holder_end(&holder);
}

/* ---- the holder's memory goes with it ---- */

static void serve_one_and_go(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
}

CASE(a_lease_without_a_descriptor_is_revoked_when_resvisor_is_gone)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed_versioned *managed = NULL;
    struct holder holder;
    uint8_t byte;

    (void)setenv("FAKECUDA", "device no-vmm", 1);
    ipc_model_make(&on_device, &holder);
    double_start(&d, serve_one_and_go);
    connection = connect_to(&d);
    lease = attach_to(connection);
    CHECK(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED, (void **)&managed, NULL) == 0);
    CHECK(managed->flags == RV_DLPACK_READ_ONLY); /* a write would be everybody's */
    double_stop(&d);
    CHECK(rv_lease_is_revoked(lease));
    holder_end(&holder);
    CHECK(rv_tensor_read(lease, "a", 0, &byte, 1, NULL) == -EIO);
    CHECK(rv_lease_verify(lease, NULL) == -EIO);
    rv_detach(lease);
    managed->deleter(managed);
    rv_disconnect(connection);
}

/* ---- unified memory ---- */

static void serve_unified(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(on_unified_memory_the_machines_pointers_are_the_devices)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_lease_info info;
    struct rv_tensor b;
    struct rv_dl_managed_versioned *managed = NULL;
    uint64_t copied = 0;
    uint8_t byte = 0;

    (void)setenv("FAKECUDA", "device unified", 1);
    device_open(0, on_device.uuid);
    double_model_make(&on_device.model, true);
    double_start(&d, serve_unified);
    connection = connect_to(&d);
    lease = attach_to(connection);
    info = lease_facts(lease);
    CHECK(strcmp(info.device, "cuda:0") == 0 && strcmp(info.backend, "memfd") == 0);
    CHECK(info.device_type == 2 && info.device_id == 0 && info.mapping == RV_MAPPING_PRIVATE);
    CHECK(rv_tensor_find(lease, "b", &b) == 0 && ((uint8_t *)b.data)[1] == (uint8_t)(4097 * 7));
    CHECK(rv_cuda_read(test_device, &byte, (uint64_t)(uintptr_t)b.data + 1, 1, NULL) == 0 &&
          byte == (uint8_t)(4097 * 7));
    CHECK(rv_tensor_dlpack(lease, "b", RV_DLPACK_VERSIONED, (void **)&managed, NULL) == 0);
    CHECK(managed->dl_tensor.device.device_type == 2 && managed->flags == 0 && managed->dl_tensor.data == b.data);
    ((uint8_t *)b.data)[0] ^= 0xff;
    CHECK(rv_lease_copied_bytes(lease, &copied) == 0 && copied == 4096);
    CHECK(rv_lease_verify(lease, NULL) == 0);
    rv_detach(lease);
    managed->deleter(managed);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- life ---- */

static void serve_one(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(a_dlpack_tensor_of_a_device_keeps_its_memory)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed_versioned *a = NULL;
    struct rv_dl_managed *c = NULL;

    vmm_model_make(&on_device);
    double_start(&d, serve_one);
    connection = connect_to(&d);
    lease = attach_to(connection);
    CHECK(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED, (void **)&a, NULL) == 0);
    CHECK(rv_tensor_dlpack(lease, "c", 0, (void **)&c, NULL) == 0);
    CHECK(a->flags == RV_DLPACK_READ_ONLY && a->dl_tensor.device.device_type == 2);
    CHECK(c->dl_tensor.device.device_type == 2 && c->dl_tensor.shape[0] == LARGE_BYTES);
    rv_detach(lease);
    check_pointer(a->dl_tensor.data, 0, 24);
    check_pointer(c->dl_tensor.data, LARGE_OFFSET, LARGE_BYTES);
    a->deleter(a);
    check_pointer(c->dl_tensor.data, LARGE_OFFSET, LARGE_BYTES);
    c->deleter(c); /* the lease is given back now: serve_one waits for that */
    rv_disconnect(connection);
    double_stop(&d);
}

/* A detach may come, or not. */
static void serve_one_to_the_end(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;

    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    while (rv_frame_wait(socket, &got, DOUBLE_WAIT_US) == 1)
        rv_frame_fini(&got);
}

struct user {
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed *managed;
};
static struct user user; /* not on a stack: what is never ended must not look like a leak */

/* end: ends the connection, the lease and a tensor of it in some order; true = the connection is over. */
static void end_in_some_order(bool (*end)(void))
{
    struct double_server d;

    vmm_model_make(&on_device);
    double_start(&d, serve_one_to_the_end);
    user.connection = connect_to(&d);
    user.lease = attach_to(user.connection);
    CHECK(rv_tensor_dlpack(user.lease, "a", 0, (void **)&user.managed, NULL) == 0);
    if (end())
        double_stop(&d);
}

static bool tensor_last(void)
{
    rv_disconnect(user.connection);
    rv_detach(user.lease);
    rv_cuda_device_close(test_device); /* the library has a reference of its own on the context */
    user.managed->deleter(user.managed);
    return true;
}

static bool nothing(void)
{
    return false;
}

static void end_late(void)
{
    rv_detach(user.lease);
    user.managed->deleter(user.managed);
}

static bool at_exit(void)
{
    CHECK(atexit(end_late) == 0);
    return false;
}

/* What the driver answers when its own end has come first. */
static bool say_deinitialised(void)
{
    char path[128];
    FILE *faults;

    (void)snprintf(path, sizeof(path), "%s/faults", getenv("FAKECUDA_STATE"));
    faults = fopen(path, "we");
    CHECK(faults && fputs("fault * nth=1+ error=4\n", faults) > 0 && fclose(faults) == 0);
    rv_detach(user.lease);
    user.managed->deleter(user.managed);
    rv_disconnect(user.connection);
    (void)unlink(path);
    return true;
}

CASE(a_tensor_may_be_the_last_after_lease_connection_and_context)
{
    end_in_some_order(tensor_last);
}

CASE(a_process_may_end_with_leases_and_tensors)
{
    end_in_some_order(nothing);
}

CASE(leases_and_tensors_may_end_at_exit)
{
    end_in_some_order(at_exit);
}

CASE(leases_and_tensors_may_end_after_the_driver)
{
    char folder[] = "/tmp/rv-test-XXXXXX", memory[64];

    CHECK(mkdtemp(folder));
    (void)setenv("FAKECUDA_STATE", folder, 1);
    end_in_some_order(say_deinitialised);
    (void)snprintf(memory, sizeof(memory), "rm -r '%s'", folder);
    CHECK(system(memory) == 0);
}

/* ---- threads ---- */

enum { THREADS = 3, ROUNDS = 8 };

static void serve_many(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;
    uint64_t lease = 0;
    unsigned detached = 0;

    double_hello(socket, RV_PROTOCOL_VERSION);
    while (detached < THREADS * ROUNDS) {
        assert_int_equal(rv_frame_wait(socket, &got, DOUBLE_WAIT_US), 1);
        if (got.message->body_case == RV__FRAME__BODY_DETACH)
            detached++;
        else
            double_send_lease(socket, got.message->id, ++lease, &on_device.model, device_reply);
        rv_frame_fini(&got);
    }
    double_expect_end(socket);
}

static void *use_and_give_back(void *connection)
{
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct rv_dl_managed *managed = NULL;
        struct rv_lease *lease = attach_to(connection);
        uint8_t bytes[300];

        CHECK(rv_tensor_read(lease, "b", 0, bytes, sizeof(bytes), NULL) == 0);
        CHECK(bytes[1] == (uint8_t)(4097 * 7 + 1));
        CHECK(rv_tensor_dlpack(lease, "b", 0, (void **)&managed, NULL) == 0);
        rv_detach(lease);
        managed->deleter(managed);
    }
    return NULL;
}

CASE(several_threads_attach_read_and_detach_on_one_device)
{
    struct double_server d;
    struct rv_connection *connection;
    pthread_t threads[THREADS];

    vmm_model_make(&on_device);
    double_start(&d, serve_many);
    connection = connect_to(&d);
    for (unsigned i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, use_and_give_back, connection) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- forks ---- */

/* other: where the path of another supervisor comes from. */
static void child_of_a_user(int other, struct rv_connection *connection, struct rv_lease *lease,
                            struct rv_dl_managed *managed)
{
    struct rv_lease *more = NULL;
    struct rv_connection *own = NULL;
    struct double_server server = {0};
    struct rv_failure err;
    struct rv_tensor t;
    uint8_t byte;

    CHECK(read(other, server.path, sizeof(server.path)) == (ssize_t)sizeof(server.path));
    own = connect_to(&server);
    CHECK(rv_tensor_find(lease, "a", &t) == -EPERM && rv_tensor_read(lease, "a", 0, &byte, 1, &err) == -EPERM);
    CHECK(rv_lease_verify(lease, NULL) == -EPERM);
    CHECK(rv_attach(own, "m", NULL, &more, &err) == -EPERM && !more); /* a connection of its own does not help */
    CHECK(strstr(err.message, "fork") && err.remedy[0]);
    managed->deleter(managed);
    rv_detach(lease);
    rv_disconnect(connection);
    rv_disconnect(own);
}

static void serve_refused(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 21);
    double_expect_detach(socket, 21);
    double_expect_end(socket);
}

static void serve_one_and_pause(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    double_pause();
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(after_a_fork_the_child_is_refused_and_harms_nothing)
{
    struct double_server d, other;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed *managed = NULL;
    pid_t child;
    int path[2];

    CHECK(pipe2(path, O_CLOEXEC) == 0);
    double_pauses_init();
    vmm_model_make(&on_device);
    double_start(&d, serve_one_and_pause);
    connection = connect_to(&d);
    lease = attach_to(connection);
    CHECK(rv_tensor_dlpack(lease, "a", 0, (void **)&managed, NULL) == 0);
    double_await_pause();
    child = fork();
    if (child == 0) {
        child_of_a_user(path[0], connection, lease, managed);
        _exit(0);
    }
    double_go_on();
    double_start(&other, serve_refused);
    CHECK(write(path[1], other.path, sizeof(other.path)) == (ssize_t)sizeof(other.path));
    CHECK(child_status(child) == 0);
    check_tensors(lease);
    managed->deleter(managed);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    double_stop(&other);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lease_on_a_device_has_its_pointers_and_facts),
        cmocka_unit_test(a_write_through_a_lease_is_refused_and_breaks_only_this_process),
        cmocka_unit_test(leases_of_one_generation_share_one_mapping),
        cmocka_unit_test(a_handle_is_opened_once_and_closed_by_the_last_lease),
        cmocka_unit_test(a_lease_without_a_descriptor_is_revoked_when_resvisor_is_gone),
        cmocka_unit_test(on_unified_memory_the_machines_pointers_are_the_devices),
        cmocka_unit_test(a_dlpack_tensor_of_a_device_keeps_its_memory),
        cmocka_unit_test(a_tensor_may_be_the_last_after_lease_connection_and_context),
        cmocka_unit_test(a_process_may_end_with_leases_and_tensors),
        cmocka_unit_test(leases_and_tensors_may_end_at_exit),
        cmocka_unit_test(leases_and_tensors_may_end_after_the_driver),
        cmocka_unit_test(several_threads_attach_read_and_detach_on_one_device),
        cmocka_unit_test(after_a_fork_the_child_is_refused_and_harms_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--read") == 0)
        return reader_main(argv);
    return device_double_main(argc, argv, run);
}
