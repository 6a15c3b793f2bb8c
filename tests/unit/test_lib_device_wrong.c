/* libresvisor on devices, when something is wrong: answers of the supervisor, the device, the driver. */
#include "device_double.h"

#include <fcntl.h>

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* ---- wrong answers: each fails one attach, gives the lease back, and leaves nothing behind ---- */

static void no_device(struct double_reply *r)
{
    r->body.device = NULL;
}

static void short_uuid(struct double_reply *r)
{
    r->body.device->uuid.len = 15;
}

static void long_uuid(struct double_reply *r)
{
    static uint8_t uuid[17];

    r->body.device->uuid = (ProtobufCBinaryData){sizeof(uuid), uuid};
}

static void no_name(struct double_reply *r)
{
    r->body.device->name = (char *)"";
}

static void long_name(struct double_reply *r)
{
    static char name[RV_NAME_MAX + 2];

    memset(name, 'n', sizeof(name) - 1);
    r->body.device->name = name;
}

static void other_uuid(struct double_reply *r)
{
    static uint8_t uuid[RV_DEVICE_UUID_SIZE] = {1};

    r->body.device->uuid.data = uuid;
}

static void no_arena_descriptor(struct double_reply *r)
{
    r->fd_count--;
}

static void one_descriptor_more(struct double_reply *r)
{
    r->fds[r->fd_count++] = 0;
}

static void the_index_again(struct double_reply *r)
{
    r->fds[1] = r->fds[0];
}

static void standard_input(struct double_reply *r)
{
    r->fds[1] = 0;
}

static void handle_where_none_is_due(struct double_reply *r)
{
    static uint8_t handle[RV_IPC_HANDLE_SIZE] = {1};

    r->arenas[0].handle = (ProtobufCBinaryData){sizeof(handle), handle};
}

static void larger_than_it_is(struct double_reply *r)
{
    r->arenas[0].size *= 4;
}

static void no_whole_blocks(struct double_reply *r)
{
    r->arenas[0].size -= 4096;
}

static void nothing_at_all(struct double_reply *r)
{
    r->arenas[0].size = 0;
}

static void beyond_any_memory(struct double_reply *r)
{
    r->arenas[0].size = UINT64_MAX / r->arenas[0].page_size * r->arenas[0].page_size;
}

static void no_pages(struct double_reply *r)
{
    r->arenas[0].page_size = 0;
}

static void said_to_be_host_memory(struct double_reply *r)
{
    r->arenas[0].backend = RV_BACKEND_MEMFD;
}

static void said_to_have_a_handle(struct double_reply *r)
{
    r->arenas[0].backend = RV_BACKEND_CUDA_IPC;
}

static void of_two_kinds(struct double_reply *r)
{
    r->body.n_arenas = 2;
    r->arenas[1].backend = RV_BACKEND_MEMFD;
    r->fds[2] = r->fds[1];
    r->fd_count = 3;
}

static void of_no_kind(struct double_reply *r)
{
    r->arenas[0].backend = 4;
}

static void (*const vmm_spoilers[])(struct double_reply *r) = {
    no_device,
    short_uuid,
    long_uuid,
    no_name,
    long_name,
    other_uuid,
    no_arena_descriptor,
    one_descriptor_more,
    the_index_again,
    standard_input,
    handle_where_none_is_due,
    larger_than_it_is,
    no_whole_blocks,
    nothing_at_all,
    beyond_any_memory,
    no_pages,
    said_to_be_host_memory,
    said_to_have_a_handle,
    of_two_kinds,
    of_no_kind,
};

static void short_handle(struct double_reply *r)
{
    r->arenas[0].handle.len = RV_IPC_HANDLE_SIZE - 1;
}

static void long_handle(struct double_reply *r)
{
    static uint8_t handle[RV_IPC_HANDLE_SIZE + 1] = {1};

    r->arenas[0].handle = (ProtobufCBinaryData){sizeof(handle), handle};
}

static void no_handle(struct double_reply *r)
{
    r->arenas[0].handle.len = 0;
}

static void handle_of_zeros(struct double_reply *r)
{
    static uint8_t handle[RV_IPC_HANDLE_SIZE];

    r->arenas[0].handle.data = handle;
}

static void handle_of_nobody(struct double_reply *r)
{
    static uint8_t handle[RV_IPC_HANDLE_SIZE];

    memset(handle, 0xa5, sizeof(handle));
    r->arenas[0].handle.data = handle;
}

static void descriptor_and_handle(struct double_reply *r)
{
    r->fds[r->fd_count++] = r->fds[0];
}

static void (*const ipc_spoilers[])(struct double_reply *r) = {
    no_device,  short_uuid,      other_uuid,       short_handle,          long_handle,
    no_handle,  handle_of_zeros, handle_of_nobody, descriptor_and_handle, nothing_at_all,
    of_no_kind,
};

static void (*const *spoilers)(struct double_reply *r);
static unsigned spoiler_count;

/* A lease of an earlier generation is alive meanwhile: its mapping must neither serve the wrong answers nor suffer. */
static void serve_spoiled(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 1);
    device_generation++;
    for (unsigned i = 0; i < spoiler_count; i++) {
        device_spoil = spoilers[i];
        send_device_lease(socket, 100 + i);
        double_expect_detach(socket, 100 + i);
    }
    device_spoil = NULL;
    send_device_lease(socket, 2);
    double_expect_detach(socket, 2);
    double_expect_detach(socket, 1);
    double_expect_end(socket);
}

static void attach_spoiled(void)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *first, *lease = NULL;
    struct rv_failure err;
    int before;

    double_start(&d, serve_spoiled);
    connection = connect_to(&d);
    first = attach_to(connection);
    before = open_descriptors();
    for (unsigned i = 0; i < spoiler_count; i++) {
        int r = rv_attach(connection, "m", NULL, &lease, &err);

        if (r >= 0 || lease || err.code == 0 || !err.message[0]) {
            (void)fprintf(stderr, "wrong answer %u: %d %s\n", i, r, err.message);
            _exit(1);
        }
    }
    CHECK(open_descriptors() == before);
    lease = attach_to(connection);
    CHECK(rv_lease_verify(lease, NULL) == 0);
    rv_detach(lease);
    rv_detach(first);
    rv_disconnect(connection);
    double_stop(&d);
}

CASE(wrong_answers_about_descriptors_fail_one_attach_each)
{
    vmm_model_make(&on_device);
    spoilers = vmm_spoilers;
    spoiler_count = sizeof(vmm_spoilers) / sizeof(vmm_spoilers[0]);
    attach_spoiled();
}

CASE(wrong_answers_about_handles_fail_one_attach_each)
{
    struct holder holder;

    (void)setenv("FAKECUDA", "device no-vmm", 1);
    ipc_model_make(&on_device, &holder);
    spoilers = ipc_spoilers;
    spoiler_count = sizeof(ipc_spoilers) / sizeof(ipc_spoilers[0]);
    attach_spoiled();
    holder_end(&holder);
}

/* ---- devices and drivers that are not there ---- */

static void serve_one_refused(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

static void attach_refused(struct rv_failure *ret_err)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease = NULL;

    double_start(&d, serve_one_refused);
    connection = connect_to(&d);
    CHECK(rv_attach(connection, "m", NULL, &lease, ret_err) == -ENODEV && !lease);
    rv_disconnect(connection);
    double_stop(&d);
}

CASE(a_device_that_this_process_does_not_see_is_named_with_what_hides_it)
{
    struct rv_failure err;
    struct rv_cuda_info info;

    (void)setenv("FAKECUDA", "device discrete count=2", 1);
    (void)setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    vmm_model_make(&on_device);
    CHECK(rv_cuda_device_count(test_cuda) == 1 && rv_cuda_device_info(test_cuda, 0, &info, NULL) == 0);
    on_device.uuid[15] ^= 1; /* the double's second device */
    device_name = "cuda:1";
    attach_refused(&err);
    CHECK(err.code == CODE(NO_SUCH_DEVICE) && strstr(err.message, "cuda:1") && strstr(err.message, "GPU-"));
    CHECK(strstr(err.remedy, "CUDA_VISIBLE_DEVICES"));
}

CASE(a_device_has_the_number_that_this_process_knows_it_by)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;

    (void)setenv("FAKECUDA", "device discrete count=2", 1);
    (void)setenv("CUDA_VISIBLE_DEVICES", "1,0", 1);
    device_open(0, on_device.uuid);
    vmm_model_make(&on_device);
    device_name = "cuda:1"; /* resvisor's own name of what is number 0 here */
    double_start(&d, serve_one_refused);
    connection = connect_to(&d);
    lease = attach_to(connection);
    CHECK(lease_facts(lease).device_id == 0 && strcmp(lease_facts(lease).device, "cuda:1") == 0);
    CHECK(rv_lease_verify(lease, NULL) == 0);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
}

/* The reply of a device's lease without a driver of the test's own: a sealed memfd stands for the arena. */
static void fake_reply_make(void)
{
    double_model_make(&on_device.model, true);
    on_device.model.arena.backend = RV_BACKEND_CUDA_VMM;
    on_device.model.arena.page_size = 4096;
}

CASE(a_driver_without_devices_says_so)
{
    struct rv_failure err;

    (void)setenv("FAKECUDA", "devices none", 1);
    fake_reply_make();
    attach_refused(&err);
    CHECK(err.code == CODE(NO_SUCH_DEVICE) && strstr(err.message, "cuInit") && err.remedy[0]);
}

CASE(a_driver_that_is_too_old_says_what_it_lacks)
{
    struct rv_failure err;

    (void)setenv("FAKECUDA", "missing cuCtxSetCurrent", 1);
    fake_reply_make();
    attach_refused(&err);
    CHECK(strstr(err.message, "cuCtxSetCurrent") && err.remedy[0]);
}

/* Run by --no-driver, in an environment without the double. */
static int without_a_driver(void)
{
    struct rv_failure err;

    fake_reply_make();
    attach_refused(&err);
    CHECK(err.code == CODE(NO_SUCH_DEVICE) && err.message[0] && err.remedy[0]);
    return 0;
}

CASE(a_process_without_a_driver_says_so)
{
    (void)unsetenv("LD_LIBRARY_PATH");
    (void)execl("/proc/self/exe", "test", "--no-driver", (char *)NULL);
    _exit(127);
}

/* ---- devices that go away ---- */

static void serve_a_lost_device(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    send_device_lease(socket, 11);
    assert_int_equal(expect_event(socket), 719);
    assert_int_equal(expect_event(socket), 719);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

CASE(a_lost_device_is_reported_and_its_leases_can_end)
{
    char folder[] = "/tmp/rv-test-XXXXXX", path[128], command[64];
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_failure err;
    uint8_t byte;
    int fd;

    CHECK(mkdtemp(folder));
    (void)setenv("FAKECUDA_STATE", folder, 1);
    vmm_model_make(&on_device);
    double_start(&d, serve_a_lost_device);
    connection = connect_to(&d);
    lease = attach_to(connection);
    (void)snprintf(path, sizeof(path), "%s/lost0", folder);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    CHECK(rv_tensor_read(lease, "a", 0, &byte, 1, &err) == -EIO && err.code == CODE(DEVICE_LOST));
    CHECK(rv_lease_verify(lease, NULL) == -EIO);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    (void)snprintf(command, sizeof(command), "rm -r '%s'", folder);
    CHECK(system(command) == 0);
}

/* ---- a child of a process that has no device open ---- */

CASE(a_child_may_use_devices_if_its_parent_has_not)
{
    pid_t child = fork();

    if (child == 0) {
        struct double_server d;
        struct rv_connection *connection;
        struct rv_lease *lease;

        vmm_model_make(&on_device);
        double_start(&d, serve_one_refused);
        connection = connect_to(&d);
        lease = attach_to(connection);
        CHECK(rv_lease_verify(lease, NULL) == 0);
        rv_detach(lease);
        rv_disconnect(connection);
        double_stop(&d);
        _exit(0);
    }
    CHECK(child_status(child) == 0);
}

static int run(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_answers_about_descriptors_fail_one_attach_each),
        cmocka_unit_test(wrong_answers_about_handles_fail_one_attach_each),
        cmocka_unit_test(a_device_that_this_process_does_not_see_is_named_with_what_hides_it),
        cmocka_unit_test(a_device_has_the_number_that_this_process_knows_it_by),
        cmocka_unit_test(a_driver_without_devices_says_so),
        cmocka_unit_test(a_driver_that_is_too_old_says_what_it_lacks),
        cmocka_unit_test(a_process_without_a_driver_says_so),
        cmocka_unit_test(a_lost_device_is_reported_and_its_leases_can_end),
        cmocka_unit_test(a_child_may_use_devices_if_its_parent_has_not),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--no-driver") == 0)
        return without_a_driver();
    return device_double_main(argc, argv, run);
}
