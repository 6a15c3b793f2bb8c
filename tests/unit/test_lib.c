/* libresvisor as a client: what it does with good answers, wrong answers, late answers, and none. */
#include "supervisor_double.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "resvisor.h"

static struct double_model model;

static void attach_ok(struct rv_connection *connection, struct rv_lease **ret_lease)
{
    struct rv_failure err;

    assert_int_equal(rv_attach(connection, "m", NULL, ret_lease, &err), 0);
    assert_int_equal(err.code, 0);
}

static struct rv_connection *connect_ok(const struct double_server *d)
{
    struct rv_connection *connection = NULL;
    struct rv_failure err;

    assert_int_equal(rv_connect(d->path, 20000, &connection, &err), 0);
    return connection;
}

/* ---- good answers ---- */

static void serve_two_leases(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    double_send_lease(socket, double_expect_attach(socket), 12, &model, NULL);
    double_expect_detach(socket, 11);
    double_expect_detach(socket, 12);
    double_expect_end(socket);
}

static void check_tensors(const struct rv_lease *lease)
{
    struct rv_tensor a, b, c;

    assert_int_equal(rv_tensor_find(lease, "a", &a), 0);
    assert_int_equal(rv_tensor_find(lease, "b", &b), 0);
    assert_int_equal(rv_tensor_find(lease, "c", &c), -ENOENT);
    assert_int_equal(rv_tensor_find(lease, "", &c), -ENOENT);
    assert_string_equal(a.name, "a");
    assert_int_equal(a.dtype, RV_F32);
    assert_int_equal(a.rank, 2);
    assert_true(a.shape[0] == 2 && a.shape[1] == 3 && a.length == 24);
    assert_true((uintptr_t)a.data % 256 == 0);
    assert_int_equal(((uint8_t *)a.data)[3], 21);
    assert_int_equal(((uint8_t *)b.data)[1], (uint8_t)(4097 * 7));
    assert_true(rv_tensor_count(lease) == 2);
    assert_int_equal(rv_tensor_at(lease, 1, &c), 0);
    assert_string_equal(c.name, "b");
    assert_int_equal(rv_tensor_at(lease, 2, &c), -ENOENT);
    assert_int_equal(rv_tensor_at(lease, UINT64_MAX, &c), -ENOENT);
    assert_string_equal(rv_lease_metadata(lease), "{\"k\":\"v\"}");
}

static void a_lease_shows_its_tensors_and_facts(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *shared;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_lease_info info = {.struct_size = sizeof(info)}, small = {.struct_size = 24};
    struct rv_tensor a, b;
    uint64_t copied = 99;

    (void)state;
    double_start(&d, serve_two_leases);
    connection = connect_ok(&d);
    attach_ok(connection, &lease);
    options.mapping = RV_MAPPING_SHARED_READ_ONLY;
    assert_int_equal(rv_attach(connection, "m", &options, &shared, NULL), 0);
    check_tensors(lease);
    check_tensors(shared);

    assert_int_equal(rv_lease_get_info(lease, &info), 0);
    assert_string_equal(info.model, "m");
    assert_true(info.lease_id == 11 && info.generation == 3 && info.bytes == 8192 && info.tensors == 2);
    assert_true(info.mapping == RV_MAPPING_PRIVATE && info.waited && info.load_us == 5 && info.read_bytes == 1000);
    small.tensors = 77;
    assert_int_equal(rv_lease_get_info(lease, &small), 0);
    assert_true(small.struct_size == 24 && small.lease_id == 11 && small.tensors == 77); /* an old caller's struct */
    small.struct_size = 0;
    assert_int_equal(rv_lease_get_info(lease, &small), -EINVAL);

    /* a write makes a copy of one page, the pool and the other lease do not see it */
    assert_int_equal(rv_lease_copied_bytes(lease, &copied), 0);
    assert_true(copied == 0);
    assert_int_equal(rv_tensor_find(lease, "b", &b), 0);
    ((uint8_t *)b.data)[0] ^= 0xff;
    assert_int_equal(rv_lease_copied_bytes(lease, &copied), 0);
    assert_true(copied == 4096);
    assert_int_equal(rv_tensor_find(shared, "b", &a), 0);
    assert_int_not_equal(((uint8_t *)a.data)[0], ((uint8_t *)b.data)[0]);
    assert_int_equal(rv_lease_verify(lease, NULL), 0);

    rv_detach(lease);
    rv_detach(shared);
    rv_detach(NULL);
    rv_disconnect(connection);
    rv_disconnect(NULL);
    double_stop(&d);
}

static void a_shared_lease_faults_on_a_write(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *other;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_tensor a;
    int status;
    pid_t child;

    (void)state;
    double_start(&d, serve_two_leases);
    connection = connect_ok(&d);
    options.mapping = RV_MAPPING_SHARED_READ_ONLY;
    assert_int_equal(rv_attach(connection, "m", &options, &lease, NULL), 0);
    attach_ok(connection, &other);
    assert_int_equal(rv_tensor_find(lease, "a", &a), 0);
    child = fork();
    if (child == 0) {
        (void)signal(SIGSEGV, SIG_DFL);
        *(volatile uint8_t *)a.data = 1;
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    rv_detach(lease);
    rv_detach(other);
    rv_disconnect(connection);
    double_stop(&d);
}

static void a_child_after_fork_is_refused(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *other;
    int status;
    pid_t child;

    (void)state;
    double_start(&d, serve_two_leases);
    connection = connect_ok(&d);
    attach_ok(connection, &lease);
    attach_ok(connection, &other);
    child = fork();
    if (child == 0) {
        struct rv_tensor t;
        struct rv_lease *more = NULL;
        bool ok = rv_attach(connection, "m", NULL, &more, NULL) == -EPERM && !more &&
                  rv_tensor_find(lease, "a", &t) == -EPERM && rv_tensor_count(lease) == 0;

        rv_detach(lease); /* must not end the parent's */
        rv_disconnect(connection);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_tensors(lease);
    rv_detach(lease);
    rv_detach(other);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- nobody, or somebody else ---- */

static void nobody_listens_says_where_and_what_to_do(void **state)
{
    struct rv_connection *connection = (void *)1;
    struct rv_failure err;
    char long_path[200];

    (void)state;
    assert_int_equal(rv_connect("/nonexistent/socket", 1000, &connection, &err), -ENOENT);
    assert_int_equal(err.code, RESVISOR__V1__ERROR_CODE__ERROR_NOT_RUNNING);
    assert_non_null(strstr(err.message, "/nonexistent/socket"));
    assert_non_null(strstr(err.remedy, "resvisor start"));
    assert_ptr_equal(connection, (void *)1);
    memset(long_path, 'x', sizeof(long_path) - 1);
    long_path[sizeof(long_path) - 1] = '\0';
    assert_int_equal(rv_connect(long_path, 1000, &connection, &err), -ENAMETOOLONG);
    assert_int_equal(rv_connect("", 1000, &connection, &err), -EINVAL);
    (void)setenv("RESVISOR_SOCKET", "/nonexistent/by-environment", 1);
    assert_int_equal(rv_connect(NULL, 1000, &connection, &err), -ENOENT);
    assert_non_null(strstr(err.message, "/nonexistent/by-environment"));
    (void)unsetenv("RESVISOR_SOCKET");
    (void)setenv("RESVISOR_RUNTIME_DIR", "/nonexistent/dir", 1);
    assert_int_equal(rv_connect(NULL, 1000, &connection, &err), -ENOENT);
    assert_non_null(strstr(err.message, "/nonexistent/dir/control/resvisor.sock"));
    (void)unsetenv("RESVISOR_RUNTIME_DIR");
}

static void serve_other_version(int socket)
{
    double_hello(socket, 99);
}

static void serve_refusal(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;

    double_expect(socket, RV__FRAME__BODY_HELLO, &got);
    double_send_error(socket, got.message->id, RESVISOR__V1__ERROR_CODE__ERROR_NOT_PERMITTED, "not in the group");
    rv_frame_fini(&got);
}

static void serve_refusal_without_reading(int socket)
{
    double_send_error(socket, 1, RESVISOR__V1__ERROR_CODE__ERROR_LIMIT, "too many clients");
}

static void serve_close(int socket)
{
    (void)socket;
}

static void serve_garbage(int socket)
{
    assert_int_equal(send(socket, "HTTP/1.1 200", 12, 0), 12);
}

static void serve_wrong_body(int socket)
{
    double_send_progress(socket, 1, 1, 2);
    double_send_lease(socket, 1, 1, &model, NULL);
}

static void serve_silence(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;

    double_expect(socket, RV__FRAME__BODY_HELLO, &got);
    rv_frame_fini(&got);
    double_expect_end(socket);
}

static const struct {
    void (*script)(int socket);
    int timeout_ms, result, code;
} handshakes[] = {
    {serve_other_version, 20000, -EPROTO, RESVISOR__V1__ERROR_CODE__ERROR_BAD_VERSION},
    {serve_refusal, 20000, -EACCES, RESVISOR__V1__ERROR_CODE__ERROR_NOT_PERMITTED},
    {serve_refusal_without_reading, 20000, -EBUSY, RESVISOR__V1__ERROR_CODE__ERROR_LIMIT},
    {serve_close, 20000, -ECONNRESET, RESVISOR__V1__ERROR_CODE__ERROR_NOT_RUNNING},
    {serve_garbage, 20000, -EPROTO, RESVISOR__V1__ERROR_CODE__ERROR_BAD_VERSION},
    {serve_wrong_body, 20000, -EPROTO, RESVISOR__V1__ERROR_CODE__ERROR_BAD_VERSION},
    {serve_silence, 20, -ETIMEDOUT, RESVISOR__V1__ERROR_CODE__ERROR_DEADLINE},
};

static void a_handshake_that_fails_says_why(void **state)
{
    int before = open_descriptors();

    (void)state;
    for (unsigned i = 0; i < sizeof(handshakes) / sizeof(handshakes[0]); i++) {
        struct double_server d;
        struct rv_connection *connection = NULL;
        struct rv_failure err = {0};

        double_start(&d, handshakes[i].script);
        assert_int_equal(rv_connect(d.path, handshakes[i].timeout_ms, &connection, &err), handshakes[i].result);
        assert_int_equal(err.code, handshakes[i].code);
        assert_true(err.message[0] != '\0');
        assert_null(connection);
        double_stop(&d);
    }
    assert_int_equal(open_descriptors(), before);
}

/* ---- wrong answers ---- */

static struct double_model unsealed;

static void no_descriptor(struct double_reply *r)
{
    r->fd_count = 0;
}

static void one_descriptor(struct double_reply *r)
{
    r->fd_count = 1;
}

static void three_descriptors(struct double_reply *r)
{
    r->fds[2] = r->fds[1];
    r->fd_count = 3;
}

static void too_many_arenas(struct double_reply *r)
{
    r->body.n_arenas = RV_ARENAS_MAX + 1;
    for (unsigned i = 1; i < RV_ARENAS_MAX + 2; i++)
        r->fds[i] = r->fds[1];
    r->fd_count = RV_ARENAS_MAX + 2;
}

static void two_arenas_where_the_index_names_one(struct double_reply *r)
{
    r->body.n_arenas = 2;
    r->fds[2] = r->fds[1];
    r->fd_count = 3;
}

static void swapped(struct double_reply *r)
{
    int fd = r->fds[0];

    r->fds[0] = r->fds[1];
    r->fds[1] = fd;
}

static void unsealed_arena(struct double_reply *r)
{
    r->fds[1] = unsealed.arena_fd;
}

static void unsealed_index(struct double_reply *r)
{
    r->fds[0] = unsealed.arena_fd;
    r->body.index_size = unsealed.arena.size;
}

static void arena_as_index(struct double_reply *r)
{
    r->fds[0] = r->fds[1];
    r->body.index_size = r->arenas[0].size;
}

static void false_index_size(struct double_reply *r)
{
    r->body.index_size++;
}

static void larger_arena(struct double_reply *r)
{
    r->arenas[0].size += 4096;
}

static void false_page_size(struct double_reply *r)
{
    r->arenas[0].page_size = 2 * 1024 * 1024;
}

static void unknown_backend(struct double_reply *r)
{
    r->arenas[0].backend = 77;
}

static void sockets_for_memory(struct double_reply *r)
{
    r->fds[0] = r->fds[1] = 0;
}

static void (*const spoilers[])(struct double_reply *r) = {
    no_descriptor, one_descriptor,  three_descriptors, too_many_arenas,    two_arenas_where_the_index_names_one,
    swapped,       unsealed_arena,  unsealed_index,    arena_as_index,     false_index_size,
    larger_arena,  false_page_size, unknown_backend,   sockets_for_memory,
};
#define SPOILERS (sizeof(spoilers) / sizeof(spoilers[0]))

static void serve_spoiled(int socket)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Done done = RV__DONE__INIT;

    double_hello(socket, RV_PROTOCOL_VERSION);
    for (unsigned i = 0; i < SPOILERS; i++) {
        double_send_lease(socket, double_expect_attach(socket), 100 + i, &model, spoilers[i]);
        double_expect_detach(socket, 100 + i); /* the lease of a refused answer is given back */
    }
    frame.body_case = RV__FRAME__BODY_DONE;
    frame.done = &done;
    double_send(socket, double_expect_attach(socket), &frame, NULL, 0);
    double_send_error(socket, double_expect_attach(socket), RESVISOR__V1__ERROR_CODE__ERROR_OK,
                      "an error that is none");
    double_send_error(socket, double_expect_attach(socket), RESVISOR__V1__ERROR_CODE__ERROR_OVER_BUDGET, "too large");
    double_send_lease(socket, double_expect_attach(socket), 1, &model, NULL);
    double_expect_detach(socket, 1);
    double_expect_end(socket);
}

static void a_wrong_answer_fails_one_request_and_leaks_nothing(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease = NULL;
    struct rv_failure err;
    int before;

    (void)state;
    double_model_make(&unsealed, false);
    double_start(&d, serve_spoiled);
    connection = connect_ok(&d);
    before = open_descriptors();
    for (unsigned i = 0; i < SPOILERS; i++) {
        assert_true(rv_attach(connection, "m", NULL, &lease, &err) < 0);
        assert_true(err.code != 0 && err.message[0]);
        assert_null(lease);
    }
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, &err), -EPROTO);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, &err), -EPROTO);
    assert_int_equal(rv_attach(connection, "m", NULL, &lease, &err), -ENOSPC);
    assert_int_equal(err.code, RESVISOR__V1__ERROR_CODE__ERROR_OVER_BUDGET);
    assert_string_equal(err.message, "too large");
    assert_null(lease);
    assert_int_equal(open_descriptors(), before);
    attach_ok(connection, &lease);
    check_tensors(lease);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    double_model_close(&unsealed);
}

static void wrong_arguments_are_refused_before_anything_is_sent(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *other;
    struct rv_failure err;
    struct {
        struct rv_attach_options now;
        uint64_t later;
    } options = {RV_ATTACH_OPTIONS_INIT, 0};
    char *long_name = calloc(1, RV_PATH_MAX + 1);

    (void)state;
    assert_non_null(long_name);
    memset(long_name, 'a', RV_PATH_MAX);
    double_start(&d, serve_two_leases);
    connection = connect_ok(&d);
    assert_int_equal(rv_attach(NULL, "m", NULL, &lease, &err), -EINVAL);
    assert_int_equal(rv_attach(connection, NULL, NULL, &lease, &err), -EINVAL);
    assert_int_equal(rv_attach(connection, "", NULL, &lease, &err), -EINVAL);
    assert_int_equal(rv_attach(connection, long_name, NULL, &lease, &err), -EINVAL);
    assert_int_equal(rv_attach(connection, "\xff", NULL, &lease, &err), -EINVAL);
    assert_int_equal(rv_attach(connection, "m", NULL, NULL, &err), -EINVAL);
    options.now.mapping = (enum rv_mapping)9;
    assert_int_equal(rv_attach(connection, "m", &options.now, &lease, &err), -EINVAL);
    options.now.mapping = RV_MAPPING_AUTO;
    options.now.struct_size = 8;
    assert_int_equal(rv_attach(connection, "m", &options.now, &lease, &err), -EINVAL);
    options.now.struct_size = sizeof(options); /* a newer caller that asks for something unknown */
    options.later = 1;
    assert_int_equal(rv_attach(connection, "m", &options.now, &lease, &err), -EOPNOTSUPP);
    options.later = 0; /* … and one that does not */
    assert_int_equal(rv_attach(connection, "m", &options.now, &lease, &err), 0);
    attach_ok(connection, &other);
    rv_detach(lease);
    rv_detach(other);
    rv_disconnect(connection);
    double_stop(&d);
    free(long_name);
}

/* ---- the end in the middle ---- */

static void serve_one_then_die(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 1, &model, NULL);
    (void)double_expect_attach(socket);
}

static void serve_one_then_garbage(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 1, &model, NULL);
    (void)double_expect_attach(socket);
    assert_int_equal(send(socket, "\xff\xff\xff", 3, 0), 3);
    double_expect_end(socket);
}

static void leases_outlive_the_supervisor(void **state)
{
    void (*const scripts[])(int) = {serve_one_then_die, serve_one_then_garbage};
    const int results[] = {-ECONNRESET, -EPROTO};

    (void)state;
    for (unsigned i = 0; i < 2; i++) {
        struct double_server d;
        struct rv_connection *connection;
        struct rv_lease *lease, *more = NULL;
        struct rv_failure err;

        double_start(&d, scripts[i]);
        connection = connect_ok(&d);
        attach_ok(connection, &lease);
        assert_int_equal(rv_attach(connection, "m", NULL, &more, &err), results[i]);
        assert_true(err.message[0] && err.remedy[0]);
        assert_int_equal(rv_attach(connection, "m", NULL, &more, &err), results[i]);
        check_tensors(lease);
        assert_int_equal(rv_lease_verify(lease, NULL), 0);
        rv_disconnect(connection);
        check_tensors(lease);
        rv_detach(lease);
        double_stop(&d);
    }
}

/* ---- progress, giving up, late answers ---- */

static pthread_barrier_t gave_up;

static void serve_late(int socket)
{
    uint64_t id;

    double_hello(socket, RV_PROTOCOL_VERSION);
    id = double_expect_attach(socket);
    double_send_progress(socket, id, 10, 100);
    double_send_progress(socket, id, 20, 100);
    (void)pthread_barrier_wait(&gave_up);
    double_send_progress(socket, id, 30, 100);
    double_send_lease(socket, id, 55, &model, NULL); /* nobody waits for it */
    id = double_expect_attach(socket);
    double_send_lease(socket, id, 56, &model, NULL);
    double_expect_detach(socket, 55);
    double_expect_detach(socket, 56);
    double_expect_end(socket);
}

static bool stop_at_20(uint64_t done, uint64_t total, void *context)
{
    unsigned *calls = context;

    assert_true(total == 100 || (done == 0 && total == 0));
    (*calls)++;
    return done < 20;
}

static void give_up_and_go_on(int timeout_ms, unsigned *calls, int expected)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease = NULL;
    struct rv_attach_options options = RV_ATTACH_OPTIONS_INIT;
    struct rv_failure err;
    int before;

    assert_int_equal(pthread_barrier_init(&gave_up, NULL, 2), 0);
    double_start(&d, serve_late);
    connection = connect_ok(&d);
    before = open_descriptors();
    options.timeout_ms = timeout_ms;
    if (calls) {
        options.progress = stop_at_20;
        options.context = calls;
    }
    assert_int_equal(rv_attach(connection, "m", &options, &lease, &err), expected);
    assert_null(lease);
    (void)pthread_barrier_wait(&gave_up);
    attach_ok(connection, &lease);
    check_tensors(lease);
    assert_int_equal(open_descriptors(), before + 1); /* the arena of the second, nothing of the first */
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
    (void)pthread_barrier_destroy(&gave_up);
}

static void a_progress_function_can_give_up(void **state)
{
    unsigned calls = 0;

    (void)state;
    give_up_and_go_on(-1, &calls, -ECANCELED);
    assert_true(calls >= 1);
}

static void a_time_limit_ends_an_attach(void **state)
{
    (void)state;
    give_up_and_go_on(30, NULL, -ETIMEDOUT);
}

/* ---- several threads ---- */

enum { THREADS = 6, ROUNDS = 40 };

static void serve_many(int socket)
{
    struct rv_frame got = RV_FRAME_INIT;
    uint64_t lease = 0, waiting[3];
    unsigned count = 0, detached = 0;

    double_hello(socket, RV_PROTOCOL_VERSION);
    while (detached < THREADS * ROUNDS) {
        int r = rv_frame_receive(socket, &got, NULL);

        /* as many as have come, and backwards: answers come in another order than questions */
        if (r == -EAGAIN || count == 3)
            while (count > 0)
                double_send_lease(socket, waiting[--count], ++lease, &model, NULL);
        if (r == -EAGAIN)
            r = rv_frame_wait(socket, &got, DOUBLE_WAIT_US);
        assert_int_equal(r, 1);
        if (got.message->body_case == RV__FRAME__BODY_DETACH) {
            detached++;
        } else {
            assert_int_equal(got.message->body_case, RV__FRAME__BODY_ATTACH);
            waiting[count++] = got.message->id;
        }
        rv_frame_fini(&got);
    }
    double_expect_end(socket);
}

static void *attach_and_detach(void *connection)
{
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct rv_lease *lease = NULL;
        struct rv_tensor t;

        if (rv_attach(connection, "m", NULL, &lease, NULL) < 0 || rv_tensor_find(lease, "b", &t) < 0)
            abort();
        rv_detach(lease);
    }
    return NULL;
}

static void several_threads_share_a_connection(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    pthread_t threads[THREADS];

    (void)state;
    double_start(&d, serve_many);
    connection = connect_ok(&d);
    for (unsigned i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, attach_and_detach, connection), 0);
    for (unsigned i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- no descriptors left ---- */

static void serve_two_and_give_back_the_second_first(int socket)
{
    double_hello(socket, RV_PROTOCOL_VERSION);
    double_send_lease(socket, double_expect_attach(socket), 11, &model, NULL);
    double_send_lease(socket, double_expect_attach(socket), 12, &model, NULL);
    double_expect_detach(socket, 12);
    double_expect_detach(socket, 11);
    double_expect_end(socket);
}

static void at_the_descriptor_limit_one_attach_fails(void **state)
{
    struct double_server d;
    struct rv_connection *connection;
    struct rv_lease *lease, *more = NULL;
    struct rv_failure err;
    struct rlimit before, tight;
    int highest, r;

    (void)state;
    double_start(&d, serve_two_and_give_back_the_second_first);
    connection = connect_ok(&d);
    attach_ok(connection, &lease);
    highest = dup(0);
    (void)close(highest);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    tight = before;
    tight.rlim_cur = (rlim_t)highest + 1; /* room for one of two */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    r = rv_attach(connection, "m", NULL, &more, &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(r, -EMFILE);
    assert_int_equal(err.code, RESVISOR__V1__ERROR_CODE__ERROR_LIMIT);
    assert_null(more);
    check_tensors(lease);
    rv_detach(lease);
    rv_disconnect(connection);
    double_stop(&d);
}

/* ---- numbers ---- */

static void dtypes_have_names_and_sizes(void **state)
{
    (void)state;
    assert_string_equal(rv_dtype_text(RV_BF16), "BF16");
    assert_int_equal(rv_dtype_bytes(RV_BF16), 2);
    assert_int_equal(rv_dtype_bytes(RV_C64), 8);
    assert_null(rv_dtype_text((enum rv_dtype)1000));
    assert_int_equal(rv_dtype_bytes((enum rv_dtype) - 1), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lease_shows_its_tensors_and_facts),
        cmocka_unit_test(a_shared_lease_faults_on_a_write),
        cmocka_unit_test(a_child_after_fork_is_refused),
        cmocka_unit_test(nobody_listens_says_where_and_what_to_do),
        cmocka_unit_test(a_handshake_that_fails_says_why),
        cmocka_unit_test(a_wrong_answer_fails_one_request_and_leaks_nothing),
        cmocka_unit_test(wrong_arguments_are_refused_before_anything_is_sent),
        cmocka_unit_test(leases_outlive_the_supervisor),
        cmocka_unit_test(a_progress_function_can_give_up),
        cmocka_unit_test(a_time_limit_ends_an_attach),
        cmocka_unit_test(several_threads_share_a_connection),
        cmocka_unit_test(at_the_descriptor_limit_one_attach_fails),
        cmocka_unit_test(dtypes_have_names_and_sizes),
    };
    int r;

    double_model_make(&model, true);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    double_model_close(&model);
    return r;
}
