/* libresvisor as a client of host memory: DLPack tensors and how long they live, copies, revoked leases, older callers.
 */
#include "supervisor_double.h"

#include <sys/wait.h>

#include "lib/dlpack.h"
#include "resvisor.h"

static struct double_model model;

static struct rv_connection *connect_ok(const struct double_server *d)
{
    struct rv_connection *connection = NULL;

    assert_int_equal(rv_connect(d->path, 20000, &connection, NULL), 0);
    return connection;
}

static bool is_mapped(const void *p)
{
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "re");

    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps)) {
        unsigned long from, to;

        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && (uintptr_t)p >= from && (uintptr_t)p < to)
            found = true;
    }
    (void)fclose(maps);
    return found;
}

static void serve_one(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

/* ---- DLPack ---- */

static void check_versioned(struct rv_dl_managed_versioned *a, uint64_t flags)
{
    assert_true(a->major == 1 && a->minor == 1 && a->flags == flags);
    assert_true(a->dl_tensor.device.device_type == 1 && a->dl_tensor.device.device_id == 0);
    assert_true(a->dl_tensor.ndim == 2 && a->dl_tensor.shape[0] == 2 && a->dl_tensor.shape[1] == 3);
    assert_true(a->dl_tensor.strides[0] == 3 && a->dl_tensor.strides[1] == 1 && a->dl_tensor.byte_offset == 0);
    assert_true(a->dl_tensor.dtype.code == 2 && a->dl_tensor.dtype.bits == 32 && a->dl_tensor.dtype.lanes == 1);
    assert_int_equal(((uint8_t *)a->dl_tensor.data)[3], 21);
}

static void a_dlpack_tensor_keeps_the_memory_and_the_lease(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed_versioned *a = NULL;
    struct rv_dl_managed *b = NULL;
    struct rv_dl_managed_versioned *bytes = NULL;
    void *none = NULL, *data;
    struct rv_failure err;

    (void)state;
    double_start(&d, serve_one);
    connection = connect_ok(&d);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, NULL), 0);
    assert_int_equal(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED, (void **)&a, &err), 0);
    assert_int_equal(err.code, 0);
    check_versioned(a, 0);
    assert_int_equal(rv_tensor_dlpack(lease, "b", 0, (void **)&b, NULL), 0);
    assert_true(b->dl_tensor.ndim == 1 && b->dl_tensor.shape[0] == 300 && b->dl_tensor.dtype.code == 1);
    assert_int_equal(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED | RV_DLPACK_BYTES, (void **)&bytes, NULL), 0);
    assert_true(bytes->dl_tensor.shape[0] == 2 && bytes->dl_tensor.shape[1] == 12 && bytes->dl_tensor.strides[0] == 12);
    assert_true(bytes->dl_tensor.dtype.code == 1 && bytes->dl_tensor.dtype.bits == 8);
    assert_int_equal(rv_tensor_dlpack(lease, "c", 0, &none, &err), -ENOENT);
    assert_int_equal(rv_tensor_dlpack(lease, "a", 4, &none, &err), -EINVAL);
    assert_int_equal(rv_tensor_dlpack(NULL, "a", 0, &none, &err), -EINVAL);
    assert_int_equal(rv_tensor_dlpack(lease, "a", 0, NULL, &err), -EINVAL);
    assert_null(none);

    data = a->dl_tensor.data;
    bytes->deleter(bytes);
    rv_detach(lease);
    assert_true(is_mapped(data));
    check_versioned(a, 0);
    a->deleter(a);
    assert_true(is_mapped(data)); /* b has it still */
    assert_int_equal(((uint8_t *)b->dl_tensor.data)[1], (uint8_t)(4097 * 7));
    b->deleter(b); /* only now the lease is given back: serve_one waits for that */
    assert_false(is_mapped(data));
    rv_disconnect(connection);
    double_stop(&d);
}

static void serve_one_and_lose_it(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    double_expect_end(socket);
}

static void *delete_it(void *tensor)
{
    struct rv_dl_managed_versioned *managed = tensor;

    managed->deleter(managed);
    return NULL;
}

static void a_deleter_works_after_disconnect_and_on_any_thread(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_dl_managed_versioned *a = NULL, *b = NULL;
    pthread_t threads[2];
    void *data;
    int before = open_descriptors();

    (void)state;
    double_start(&d, serve_one_and_lose_it);
    connection = connect_ok(&d);
    options.mapping = RV_MAPPING_SHARED_READ_ONLY;
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), 0);
    assert_int_equal(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED, (void **)&a, NULL), 0);
    assert_int_equal(rv_tensor_dlpack(lease, "b", RV_DLPACK_VERSIONED, (void **)&b, NULL), 0);
    rv_disconnect(connection); /* the supervisor sees the end, though the tensors live on */
    double_stop(&d);
    check_versioned(a, 1);
    rv_detach(lease);
    data = a->dl_tensor.data;
    assert_int_equal(pthread_create(&threads[0], NULL, delete_it, a), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, delete_it, b), 0);
    assert_int_equal(pthread_join(threads[0], NULL), 0);
    assert_int_equal(pthread_join(threads[1], NULL), 0);
    assert_false(is_mapped(data));
    assert_int_equal(open_descriptors(), before);
}

static void serve_one_and_pause(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    double_pause();
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

static void a_forked_child_may_delete_its_copies(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_dl_managed_versioned *a = NULL;
    int status;
    pid_t child;

    (void)state;
    double_pauses_init();
    double_start(&d, serve_one_and_pause);
    connection = connect_ok(&d);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, NULL), 0);
    assert_int_equal(rv_tensor_dlpack(lease, "a", RV_DLPACK_VERSIONED, (void **)&a, NULL), 0);
    double_await_pause();
    child = fork();
    if (child == 0) {
        void *more = NULL;
        uint8_t byte;
        bool ok = rv_tensor_dlpack(lease, "a", 0, &more, NULL) == -EPERM && !more &&
                  rv_tensor_read(lease, "a", 0, &byte, 1, NULL) == -EPERM && !rv_lease_is_revoked(lease);

        rv_detach(lease);
        a->deleter(a);
        rv_disconnect(connection);
        _exit(ok ? 0 : 1);
    }
    double_go_on();
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_versioned(a, 0);
    rv_detach(lease);
    a->deleter(a);
    rv_disconnect(connection);
    double_stop(&d);
}

/* Every dtype, a scalar, an empty tensor, one that DLPack cannot say, and a whole file. */
static const struct {
    const char *name;
    uint16_t dtype;
    uint8_t rank;
    uint64_t shape[2];
    uint8_t code, bits;
} rows[] = {
    {"bool", RV_INDEX_BOOL, 1, {4}, 6, 8},
    {"u8", RV_INDEX_U8, 1, {4}, 1, 8},
    {"i8", RV_INDEX_I8, 1, {4}, 0, 8},
    {"e4m3", RV_INDEX_F8_E4M3, 1, {4}, 10, 8},
    {"e5m2", RV_INDEX_F8_E5M2, 1, {4}, 12, 8},
    {"u16", RV_INDEX_U16, 1, {4}, 1, 16},
    {"i16", RV_INDEX_I16, 1, {4}, 0, 16},
    {"f16", RV_INDEX_F16, 1, {4}, 2, 16},
    {"bf16", RV_INDEX_BF16, 1, {4}, 4, 16},
    {"u32", RV_INDEX_U32, 1, {4}, 1, 32},
    {"i32", RV_INDEX_I32, 1, {4}, 0, 32},
    {"f32", RV_INDEX_F32, 1, {4}, 2, 32},
    {"u64", RV_INDEX_U64, 1, {4}, 1, 64},
    {"i64", RV_INDEX_I64, 1, {4}, 0, 64},
    {"f64", RV_INDEX_F64, 1, {4}, 2, 64},
    {"c64", RV_INDEX_C64, 1, {4}, 5, 64},
    {"e8m0", RV_INDEX_F8_E8M0, 1, {4}, 14, 8},
    {"e4m3z", RV_INDEX_F8_E4M3FNUZ, 1, {4}, 11, 8},
    {"e5m2z", RV_INDEX_F8_E5M2FNUZ, 1, {4}, 13, 8},
    {"blob", RV_INDEX_BLOB, 1, {4}, 1, 8},
    {"scalar", RV_INDEX_F32, 0, {0}, 2, 32},
    {"empty", RV_INDEX_F32, 2, {0, 5}, 2, 32},
    {"huge", RV_INDEX_U8, 2, {1ull << 63, 0}, 0, 0},
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

static struct double_model all_dtypes;

static void make_all_dtypes(void)
{
    const struct rv_backend *backend = rv_backend_by_id(RV_BACKEND_MEMFD);
    struct rv_index_builder *builder = rv_index_builder_create(ROWS, 1024);
    struct rv_index_arena in_index;
    uint8_t nothing[16] = {0};

    all_dtypes.arena_fd = backend->create("test", 256 * ROWS, RV_HUGE_OFF, &all_dtypes.arena, NULL);
    assert_true(all_dtypes.arena_fd >= 0);
    assert_int_equal(backend->seal(all_dtypes.arena_fd, NULL), 0);
    for (unsigned i = 0; i < ROWS; i++) {
        struct rv_index_entry entry = {.dtype = rows[i].dtype, .rank = rows[i].rank, .offset = 256u * i};

        memcpy(entry.shape, rows[i].shape, sizeof(rows[i].shape));
        assert_true(rv_shape_bytes(entry.dtype, entry.shape, entry.rank, &entry.length));
        assert_int_equal(rv_index_builder_add(builder, rows[i].name, (uint32_t)strlen(rows[i].name), &entry), 0);
    }
    in_index = (struct rv_index_arena){all_dtypes.arena.size, all_dtypes.arena.backend, all_dtypes.arena.page_size};
    all_dtypes.index_fd = rv_index_builder_write(builder, &in_index, 1, NULL, 0, nothing, &all_dtypes.index_size);
    assert_true(all_dtypes.index_fd >= 0);
    rv_index_builder_destroy(builder);
}

static void serve_all_dtypes(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &all_dtypes, NULL);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

static void every_dtype_has_its_dlpack_type(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_failure err;

    (void)state;
    make_all_dtypes();
    double_start(&d, serve_all_dtypes);
    connection = connect_ok(&d);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, NULL), 0);
    for (unsigned i = 0; i < ROWS; i++) {
        struct rv_dl_managed *one = NULL, *bytes = NULL;
        int r = rv_tensor_dlpack(lease, rows[i].name, 0, (void **)&one, &err);

        if (rows[i].bits == 0) {
            assert_int_equal(r, -EOPNOTSUPP);
            assert_true(err.code == RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED && strstr(err.message, "huge"));
            continue;
        }
        assert_int_equal(r, 0);
        assert_true(one->dl_tensor.dtype.code == rows[i].code && one->dl_tensor.dtype.bits == rows[i].bits);
        assert_true(one->dl_tensor.ndim == rows[i].rank);
        assert_true(strcmp(rows[i].name, "empty") != 0 || !one->dl_tensor.data);
        assert_int_equal(rv_tensor_dlpack(lease, rows[i].name, RV_DLPACK_BYTES, (void **)&bytes, NULL), 0);
        assert_true(bytes->dl_tensor.dtype.code == 1 && bytes->dl_tensor.dtype.bits == 8);
        if (rows[i].rank == 0)
            assert_true(bytes->dl_tensor.ndim == 1 && bytes->dl_tensor.shape[0] == rows[i].bits / 8);
        one->deleter(one);
        bytes->deleter(bytes);
    }
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    double_model_close(&all_dtypes);
}

/* ---- copies ---- */

static void a_read_copies_bytes_within_the_tensor(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease;
    struct rv_failure err;
    uint8_t bytes[300] = {0};

    (void)state;
    double_start(&d, serve_one);
    connection = connect_ok(&d);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, NULL), 0);
    assert_int_equal(rv_tensor_read(lease, "b", 10, bytes, 290, &err), 0);
    for (unsigned i = 0; i < 290; i++)
        assert_int_equal(bytes[i], (uint8_t)((4106 + i) * 7));
    assert_int_equal(rv_tensor_read(lease, "b", 300, NULL, 0, &err), 0);
    assert_int_equal(rv_tensor_read(lease, "b", 301, bytes, 0, &err), -ERANGE);
    assert_int_equal(rv_tensor_read(lease, "b", 1, bytes, 300, &err), -ERANGE);
    assert_true(strstr(err.message, "300 bytes from byte 1 ") != NULL);
    assert_int_equal(rv_tensor_read(lease, "b", UINT64_MAX, bytes, 2, &err), -ERANGE);
    assert_int_equal(rv_tensor_read(lease, "b", 2, bytes, UINT64_MAX, &err), -ERANGE);
    assert_int_equal(rv_tensor_read(lease, "x", 0, bytes, 1, &err), -ENOENT);
    assert_int_equal(rv_tensor_read(lease, "b", 0, NULL, 1, &err), -EINVAL);
    assert_int_equal(rv_tensor_read(NULL, "b", 0, bytes, 1, &err), -EINVAL);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- revoked ---- */

static pthread_barrier_t told;

static void send_revoke(int socket, uint64_t lease_id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LeaseRevoke revoke = RV__LEASE_REVOKE__INIT;

    revoke.lease_id = lease_id;
    revoke.reason = (char *)"the device is lost";
    frame.body_case = RV__FRAME__BODY_LEASE_REVOKE;
    frame.lease_revoke = &revoke;
    double_send(socket, 0, &frame, NULL, 0);
}

static void serve_revokes(int socket)
{
    uint64_t id;

    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    id = double_expect_attach(socket);
    send_revoke(socket, 12); /* before its client can know it */
    send_revoke(socket, 999);
    double_send_lease(socket, id, 12, &model, NULL);
    double_send_lease(socket, double_expect_attach(socket), 13, &model, NULL);
    (void)pthread_barrier_wait(&told);
    send_revoke(socket, 11);
    (void)pthread_barrier_wait(&told);
    double_expect_detach(socket, 11);
    double_expect_detach(socket, 12);
    double_expect_detach(socket, 13);
    double_expect_end(socket);
}

static void a_revoked_lease_is_known_without_another_request(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *leases[3];

    (void)state;
    assert_int_equal(pthread_barrier_init(&told, NULL, 2), 0);
    double_start(&d, serve_revokes);
    connection = connect_ok(&d);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(rv_attach(connection, "m", NULL, &leases[i], NULL), 0);
    assert_false(rv_lease_is_revoked(leases[0]));
    assert_true(rv_lease_is_revoked(leases[1]));
    assert_false(rv_lease_is_revoked(NULL));
    (void)pthread_barrier_wait(&told);
    (void)pthread_barrier_wait(&told);
    assert_true(rv_lease_is_revoked(leases[0]));
    assert_false(rv_lease_is_revoked(leases[2]));
    for (unsigned i = 0; i < 3; i++)
        rv_detach(leases[i]);
    rv_disconnect(connection);
    double_stop(&d);
    (void)pthread_barrier_destroy(&told);
}

/* ---- older callers, and what is asked ---- */

static char asked[3][128];

static void serve_and_note_devices(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    for (unsigned i = 0; i < 3; i++) {
        struct rv_frame got = RV_FRAME_INIT;

        double_expect(socket, RV__FRAME__BODY_ATTACH, &got);
        (void)snprintf(asked[i], sizeof(asked[i]), "%s", got.message->attach->device);
        double_send_lease(socket, got.message->id, 20 + i, &model, NULL);
        rv_frame_fini(&got);
        double_expect_detach(socket, 20 + i);
    }
    double_expect_end(socket);
}

static void a_caller_of_the_older_struct_asks_for_no_device(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_lease_info info = {.struct_size = offsetof(struct rv_lease_info, device), .device = "untouched"};
    struct rv_lease *lease;

    (void)state;
    double_start(&d, serve_and_note_devices);
    connection = connect_ok(&d);
    options.device = "";
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), -EINVAL);
    options.device = "\xff";
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), -EINVAL);
    options.device = "cuda:7";
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), 0);
    rv_detach(lease);
    options.struct_size = offsetof(struct rv_attach_options, device);
    options.device = (const char *)1; /* not the caller's: must not be looked at */
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), 0);
    assert_int_equal(rv_lease_get_info(lease, &info), 0);
    assert_true(info.bytes == 8192 && strcmp(info.device, "untouched") == 0);
    info.struct_size = sizeof(info);
    assert_int_equal(rv_lease_get_info(lease, &info), 0);
    assert_string_equal(info.device, "host");
    assert_string_equal(info.backend, "memfd");
    assert_true(info.device_type == 1 && info.device_id == 0);
    rv_detach(lease);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, NULL), 0);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    assert_string_equal(asked[0], "cuda:7");
    assert_string_equal(asked[1], "");
    assert_string_equal(asked[2], "");
}

/* Runs last: nothing above may have loaded a driver. */
static void a_process_that_uses_host_memory_never_loads_a_driver(void **state)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");

    (void)state;
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps))
        assert_null(strstr(line, "libcuda"));
    (void)fclose(maps);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_dlpack_tensor_keeps_the_memory_and_the_lease),
        cmocka_unit_test(a_deleter_works_after_disconnect_and_on_any_thread),
        cmocka_unit_test(a_forked_child_may_delete_its_copies),
        cmocka_unit_test(every_dtype_has_its_dlpack_type),
        cmocka_unit_test(a_read_copies_bytes_within_the_tensor),
        cmocka_unit_test(a_revoked_lease_is_known_without_another_request),
        cmocka_unit_test(a_caller_of_the_older_struct_asks_for_no_device),
        cmocka_unit_test(a_process_that_uses_host_memory_never_loads_a_driver),
    };
    int r;

    double_model_make(&model, true);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    double_model_close(&model);
    return r;
}
