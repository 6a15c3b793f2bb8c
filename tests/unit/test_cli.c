/* The command line's own parts: reading arguments, and a connection to a peer that does not behave. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/client.h"
#include "cli/options.h"
#include "cli/output.h"
#include "clock.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static const struct rv_option options[] = {
    {"flag", 'f', NULL, "A flag."},
    {"value", 'v', "TEXT", "A value."},
    {0},
};
static const struct rv_command command = {
    .name = "test",
    .arguments = "ONE [TWO]",
    .summary = "",
    .text = "",
    .common = RV_COMMON_CONFIG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 2,
    .options = options,
};
const struct rv_command *const rv_commands[] = {&command, NULL};

/* Reads a line of words; "f" for each flag and "v=TEXT;" for each value land in `seen`. */
static int read_line(struct rv_args *args, char *line, char *seen, size_t size)
{
    static char *argv[32];
    const char *value;
    int argc = 0, i;

    for (char *word; (word = strsep(&line, " "));)
        argv[argc++] = word;
    seen[0] = '\0';
    rv_args_init(args, &command, argc, argv);
    while ((i = rv_args_next(args, &value)) >= 0)
        (void)snprintf(seen + strlen(seen), size - strlen(seen), i == 0 ? "f" : "v=%s;", value);
    return i;
}

static void test_arguments_are_read_in_every_form(void **state)
{
    char seen[128];
    char line[] = "test -fv1 --value=2 one --value 3 -v 4 -ff --set a=b --runtime-dir /x -c file -- --flag";
    struct rv_config_sources sources;
    struct rv_args args;

    (void)state;
    assert_int_equal(read_line(&args, line, seen, sizeof(seen)), RV_ARGS_END);
    assert_string_equal(seen, "fv=1;v=2;v=3;v=4;ff");
    assert_int_equal(args.count, 2);
    assert_string_equal(args.arguments[0], "one");
    assert_string_equal(args.arguments[1], "--flag");
    rv_args_sources(&args, &sources);
    assert_string_equal(sources.file, "file");
    assert_string_equal(sources.sets[0], "a=b");
    assert_string_equal(sources.sets[1], "runtime_dir=/x");
    assert_null(sources.sets[2]);
    assert_false(args.json);
    rv_args_fini(&args);
}

static void test_wrong_arguments_are_refused(void **state)
{
    static const char *const lines[] = {
        "test",       "test a b c",      "test a -x",  "test a --valu 1", "test a --value",
        "test a -v",  "test a --flag=1", "test a -fx", "test a --set",    "test a --log-level=x",
        "test a -f=1"};
    char seen[128], line[64];
    struct rv_args args;

    (void)state;
    for (unsigned i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        (void)snprintf(line, sizeof(line), "%s", lines[i]);
        if (read_line(&args, line, seen, sizeof(seen)) != RV_ARGS_ERROR)
            fail_msg("accepted: %s", lines[i]);
        assert_int_equal(rv_args_exit(&args, RV_ARGS_ERROR), RV_EXIT_USAGE);
    }
}

static void test_numbers_have_ranges(void **state)
{
    static const char *const wrong[] = {"", "x", "1x", "11", "-1", "99999999999999999999"};
    static const char *const wrong_seconds[] = {"", "x", "-1", "nan", "inf", "1e300", "1 s"};
    struct rv_args args;
    uint64_t us = 0;
    int64_t n = 0;

    (void)state;
    rv_args_init(&args, &command, 0, NULL);
    for (unsigned i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(rv_args_number(&args, "n", wrong[i], 0, 10, &n));
    for (unsigned i = 0; i < sizeof(wrong_seconds) / sizeof(wrong_seconds[0]); i++)
        assert_false(rv_args_seconds(&args, "s", wrong_seconds[i], &us));
    assert_true(rv_args_number(&args, "n", "10", 0, 10, &n));
    assert_int_equal(n, 10);
    assert_true(rv_args_seconds(&args, "s", "0.5", &us));
    assert_int_equal(us, 500000);
}

/* ---- a peer that does not behave --------------------------------------------------------------------------------- */

enum behaviour {
    CLOSES_AT_ONCE,
    SAYS_NOTHING,
    SAYS_GARBAGE,
    OTHER_VERSION,
    REFUSES,
    ANSWERS_SOMETHING_ELSE,
    ANSWERS_LATE_IDS, /* frames for nobody, then progress, then the answer */
    CLOSES_AFTER_HELLO,
};

struct server {
    char folder[64];
    char path[128];
    int listener;
    enum behaviour behaviour;
    pthread_t thread;
};

static void send_hello_reply(int socket, uint64_t id, uint32_t version)
{
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    reply.version = version;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_HELLO_REPLY;
    frame.hello_reply = &reply;
    (void)rv_frame_send(socket, &frame, NULL, 0, RV_SEC);
}

static void send_error(int socket, uint64_t id)
{
    Resvisor__V1__Error error = RESVISOR__V1__ERROR__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    error.code = CODE(LIMIT);
    error.message = (char *)"too many clients";
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_ERROR;
    frame.error = &error;
    (void)rv_frame_send(socket, &frame, NULL, 0, RV_SEC);
}

static void send_done(int socket, uint64_t id)
{
    Rv__Done done = RV__DONE__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    frame.id = id;
    frame.body_case = RV__FRAME__BODY_DONE;
    frame.done = &done;
    (void)rv_frame_send(socket, &frame, NULL, 0, RV_SEC);
}

static void send_progress(int socket, uint64_t id)
{
    Rv__LoadProgress progress = RV__LOAD_PROGRESS__INIT;
    Rv__Frame frame = RV__FRAME__INIT;

    progress.bytes_done = 7;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_LOAD_PROGRESS;
    frame.load_progress = &progress;
    (void)rv_frame_send(socket, &frame, NULL, 0, RV_SEC);
}

static void answer_request(const struct server *server, int socket, uint64_t id)
{
    switch (server->behaviour) {
    case ANSWERS_SOMETHING_ELSE:
        send_hello_reply(socket, id, RV_PROTOCOL_VERSION);
        break;
    case ANSWERS_LATE_IDS:
        send_done(socket, id + 1000);
        send_progress(socket, id);
        send_done(socket, id);
        break;
    default:
        break;
    }
}

/* One connection, one Hello, at most one request; ends when the client closes. */
static void *serve(void *argument)
{
    const struct server *server = argument;
    int socket = accept(server->listener, NULL, NULL);
    struct rv_frame frame = RV_FRAME_INIT;

    if (socket < 0)
        return NULL;
    if (server->behaviour == SAYS_GARBAGE)
        (void)send(socket, "\xff\xff\xff garbage", 11, MSG_NOSIGNAL);
    if (server->behaviour != CLOSES_AT_ONCE && rv_frame_wait(socket, &frame, 5 * RV_SEC) == 1) {
        uint64_t id = frame.message->id;

        rv_frame_fini(&frame);
        if (server->behaviour == REFUSES)
            send_error(socket, id);
        else if (server->behaviour != SAYS_NOTHING && server->behaviour != SAYS_GARBAGE)
            send_hello_reply(socket, id, RV_PROTOCOL_VERSION + (server->behaviour == OTHER_VERSION));
        if (server->behaviour != CLOSES_AFTER_HELLO && rv_frame_wait(socket, &frame, 5 * RV_SEC) == 1) {
            id = frame.message->id;
            rv_frame_fini(&frame);
            answer_request(server, socket, id);
            (void)rv_frame_wait(socket, &frame, 5 * RV_SEC);
        }
    }
    rv_frame_fini(&frame);
    (void)close(socket);
    return NULL;
}

static void server_start(struct server *server, enum behaviour behaviour)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    memset(server, 0, sizeof(*server));
    server->behaviour = behaviour;
    (void)strcpy(server->folder, "/tmp/rv-cli-XXXXXX");
    assert_non_null(mkdtemp(server->folder));
    (void)snprintf(server->path, sizeof(server->path), "%s/control", server->folder);
    assert_int_equal(mkdir(server->path, 0700), 0);
    (void)snprintf(server->path, sizeof(server->path), "%s/%s", server->folder, RV_SOCKET_CONTROL);
    (void)strcpy(address.sun_path, server->path);
    server->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(server->listener >= 0);
    assert_int_equal(bind(server->listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(server->listener, 4), 0);
    assert_int_equal(pthread_create(&server->thread, NULL, serve, server), 0);
}

static void server_end(struct server *server)
{
    assert_int_equal(pthread_join(server->thread, NULL), 0);
    (void)close(server->listener);
    (void)unlink(server->path);
    *strrchr(server->path, '/') = '\0';
    (void)rmdir(server->path);
    assert_int_equal(rmdir(server->folder), 0);
}

static void count_progress(const Rv__LoadProgress *progress, void *context)
{
    *(uint64_t *)context += progress->bytes_done;
}

/* Connects and asks once. Returns the error's code, 0 = an answer came. */
static int ask(struct server *server, uint64_t timeout_us, uint64_t *progress)
{
    struct rv_client client = RV_CLIENT_INIT;
    Rv__Stop stop = RV__STOP__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_error err = {0};
    int r = rv_client_connect(&client, server->folder, RV_SOCKET_CONTROL, timeout_us, &err);

    request.body_case = RV__FRAME__BODY_STOP;
    request.stop = &stop;
    if (r == 0)
        r = rv_client_request(&client, &request, RV__FRAME__BODY_DONE, timeout_us, count_progress, progress, &answer,
                              &err);
    rv_frame_fini(&answer);
    rv_client_close(&client);
    assert_true(r == 0 ? err.code == 0 : err.code != 0 && *err.message);
    return err.code;
}

static void test_a_peer_that_does_not_behave_is_named(void **state)
{
    static const struct {
        enum behaviour behaviour;
        int code;
        uint64_t timeout_us;
    } rows[] = {
        {CLOSES_AT_ONCE, CODE(NOT_RUNNING), 5 * RV_SEC},
        {SAYS_NOTHING, CODE(DEADLINE), RV_SEC / 20},
        {SAYS_GARBAGE, CODE(BAD_VERSION), 5 * RV_SEC},
        {OTHER_VERSION, CODE(BAD_VERSION), 5 * RV_SEC},
        {REFUSES, CODE(LIMIT), 5 * RV_SEC},
        {ANSWERS_SOMETHING_ELSE, CODE(BAD_VERSION), 5 * RV_SEC},
        {CLOSES_AFTER_HELLO, CODE(NOT_RUNNING), 5 * RV_SEC},
        {ANSWERS_LATE_IDS, CODE(OK), 5 * RV_SEC},
    };

    (void)state;
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct server server;
        uint64_t progress = 0;

        server_start(&server, rows[i].behaviour);
        assert_int_equal(ask(&server, rows[i].timeout_us, &progress), rows[i].code);
        assert_int_equal(progress, rows[i].behaviour == ANSWERS_LATE_IDS ? 7 : 0);
        server_end(&server);
    }
}

static void test_no_socket_means_not_running(void **state)
{
    struct rv_client client = RV_CLIENT_INIT;
    struct rv_error err = {0};
    char longer[200];

    (void)state;
    assert_true(rv_client_connect(&client, "/nonexistent", RV_SOCKET_CONTROL, RV_SEC, &err) < 0);
    assert_int_equal(err.code, CODE(NOT_RUNNING));
    assert_non_null(strstr(err.message, "/nonexistent/" RV_SOCKET_CONTROL));
    memset(longer, 'a', sizeof(longer));
    longer[0] = '/';
    longer[sizeof(longer) - 1] = '\0';
    assert_true(rv_client_connect(&client, longer, RV_SOCKET_CONTROL, RV_SEC, &err) < 0);
    assert_int_equal(err.code, CODE(CONFIG));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arguments_are_read_in_every_form),
        cmocka_unit_test(test_wrong_arguments_are_refused),
        cmocka_unit_test(test_numbers_have_ranges),
        cmocka_unit_test(test_a_peer_that_does_not_behave_is_named),
        cmocka_unit_test(test_no_socket_means_not_running),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
