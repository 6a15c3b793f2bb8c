/*
 * A client of resvisor, measured from inside. Every command prints one JSON object.
 *
 *   lease SOCKET MODEL ROUNDS      connect, attach, find the last tensor, detach (libresvisor); then the bare lease RPC
 *   touch SOCKET MODEL             attach and read every byte of every tensor
 *   mmap FILE                      map the file and read every byte of it
 *   copy FILE                      read the file into memory of its own, say so, wait for the end of stdin
 *   spawn ROUNDS PROGRAM ARGS…     start the program and wait for its end, whatever its exit code
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "common.h"
#include "frame.h"
#include "resvisor.h"
#include "touch.h"

#define REPLY_US (60 * RV_SEC)
#define READ_BYTES (8u << 20)

extern char **environ;

static struct rv_connection *connect_to(const char *socket_path)
{
    struct rv_connection *connection = NULL;
    struct rv_failure err = {0};

    if (rv_connect(socket_path, -1, &connection, &err) < 0)
        bench_fail("connect: %s", err.message);
    return connection;
}

static struct rv_lease *attach(struct rv_connection *connection, const char *model)
{
    struct rv_lease *lease = NULL;
    struct rv_failure err = {0};

    if (rv_attach(connection, model, NULL, &lease, &err) < 0)
        bench_fail("attach: %s", err.message);
    return lease;
}

/* ---- lease ------------------------------------------------------------------------------------------------------- */

struct lease_times {
    struct bench_samples whole, attach, detach;
};

/* As a program would do it: from nothing to the first tensor. */
static void lease_round(const char *socket_path, const char *model, const char *tensor_name, struct lease_times *times)
{
    uint64_t start = bench_now_ns(), middle;
    struct rv_connection *connection = connect_to(socket_path);
    struct rv_lease *lease;
    struct rv_tensor tensor;

    middle = bench_now_ns();
    lease = attach(connection, model);
    bench_sample(&times->attach, middle);
    if (rv_tensor_find(lease, tensor_name, &tensor) < 0 || !tensor.data)
        bench_fail("no tensor %s", tensor_name);
    bench_sample(&times->whole, start);
    start = bench_now_ns();
    rv_detach(lease);
    bench_sample(&times->detach, start);
    rv_disconnect(connection);
}

static uint64_t last_tensor(const char *socket_path, const char *model, char *name, size_t size)
{
    struct rv_connection *connection = connect_to(socket_path);
    struct rv_lease *lease = attach(connection, model);
    struct rv_tensor tensor;
    uint64_t count = rv_tensor_count(lease);

    if (count == 0 || rv_tensor_at(lease, count - 1, &tensor) < 0)
        bench_fail("%s has no tensors", model);
    (void)snprintf(name, size, "%s", tensor.name);
    rv_detach(lease);
    rv_disconnect(connection);
    return count;
}

/* One request and its answer, nothing else: what the supervisor itself takes, and two wake-ups. */
static void ask(int socket, const Rv__Frame *question, Rv__Frame__BodyCase wanted, struct rv_frame *ret_answer)
{
    int r = rv_frame_send(socket, question, NULL, 0, UINT64_MAX);

    if (r == 0)
        r = rv_frame_wait(socket, ret_answer, REPLY_US);
    if (r != 1)
        bench_fail("lease RPC: %s", r == 0 ? "the supervisor has gone" : strerror(-r));
    if (ret_answer->message->body_case != wanted)
        bench_fail("lease RPC: another answer than expected");
}

static int open_bare(const char *socket_path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct rv_frame answer = RV_FRAME_INIT;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket_path);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
        bench_fail("%s: %s", socket_path, strerror(errno));
    hello.version = RV_PROTOCOL_VERSION;
    hello.role = RV__ROLE__ROLE_CLIENT;
    hello.pid = (int32_t)getpid();
    hello.name = (char *)"bench";
    hello.instance = (char *)"bench";
    frame.id = 1;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    ask(fd, &frame, RV__FRAME__BODY_HELLO_REPLY, &answer);
    rv_frame_fini(&answer);
    return fd;
}

static void bare_round(int socket, const char *model, struct lease_times *times)
{
    struct rv_frame answer = RV_FRAME_INIT;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Attach request = RV__ATTACH__INIT;
    Rv__Detach end = RV__DETACH__INIT;
    uint64_t start = bench_now_ns();

    request.model = (char *)model;
    frame.id = 2;
    frame.body_case = RV__FRAME__BODY_ATTACH;
    frame.attach = &request;
    ask(socket, &frame, RV__FRAME__BODY_ATTACH_REPLY, &answer);
    bench_sample(&times->attach, start);
    end.lease_id = answer.message->attach_reply->lease_id;
    rv_frame_fini(&answer);
    frame.id = 3;
    frame.body_case = RV__FRAME__BODY_DETACH;
    frame.detach = &end;
    start = bench_now_ns();
    ask(socket, &frame, RV__FRAME__BODY_DONE, &answer);
    bench_sample(&times->detach, start);
    rv_frame_fini(&answer);
}

/* Answers each message with two descriptors and says nothing else: what two wake-ups cost without resvisor. */
__attribute__((noreturn)) static void echo(int socket)
{
    uint8_t bytes[128];
    const int fds[2] = {STDIN_FILENO, STDOUT_FILENO};
    ssize_t n;

    while ((n = recv(socket, bytes, sizeof(bytes), 0)) > 0)
        if (rv_frame_send_packed(socket, bytes, (uint32_t)n, fds, 2) < 0)
            break;
    _exit(0);
}

static void echo_rounds(struct bench_samples *samples)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Done done = RV__DONE__INIT;
    int pair[2];
    pid_t pid;

    if (rv_frame_pair(pair) < 0 || (pid = fork()) < 0)
        bench_fail("no echo process: %s", strerror(errno));
    if (pid == 0) {
        (void)close(pair[0]);
        echo(pair[1]);
    }
    (void)close(pair[1]);
    frame.id = 1;
    frame.body_case = RV__FRAME__BODY_DONE;
    frame.done = &done;
    while (samples->count < samples->capacity) {
        struct rv_frame answer = RV_FRAME_INIT;
        uint64_t start = bench_now_ns();

        ask(pair[0], &frame, RV__FRAME__BODY_DONE, &answer);
        bench_sample(samples, start);
        rv_frame_fini(&answer);
    }
    (void)close(pair[0]);
    (void)waitpid(pid, NULL, 0);
}

static int command_lease(char **args)
{
    uint64_t rounds = bench_number(args[2]), tensors;
    struct bench_samples bare_echo = bench_samples_make(rounds);
    struct lease_times library = {bench_samples_make(rounds), bench_samples_make(rounds), bench_samples_make(rounds)};
    struct lease_times bare = {.attach = bench_samples_make(rounds), .detach = bench_samples_make(rounds)};
    char name[256];
    int fd;

    tensors = last_tensor(args[0], args[1], name, sizeof(name));
    for (uint64_t i = 0; i < rounds; i++)
        lease_round(args[0], args[1], name, &library);
    fd = open_bare(args[0]);
    for (uint64_t i = 0; i < rounds; i++)
        bare_round(fd, args[1], &bare);
    (void)close(fd);
    echo_rounds(&bare_echo);
    (void)printf("{\"tensors\": %llu, ", (unsigned long long)tensors);
    bench_samples_print("echo", &bare_echo);
    (void)printf(", ");
    bench_samples_free(&bare_echo);
    bench_samples_print("whole", &library.whole);
    (void)printf(", ");
    bench_samples_print("attach", &library.attach);
    (void)printf(", ");
    bench_samples_print("detach", &library.detach);
    (void)printf(", ");
    bench_samples_print("rpc_attach", &bare.attach);
    (void)printf(", ");
    bench_samples_print("rpc_detach", &bare.detach);
    (void)printf("}\n");
    bench_samples_free(&library.whole);
    bench_samples_free(&library.attach);
    bench_samples_free(&library.detach);
    bench_samples_free(&bare.attach);
    bench_samples_free(&bare.detach);
    return 0;
}

/* ---- every byte ---------------------------------------------------------------------------------------------------
 */

static void print_touched(uint64_t start_ns, uint64_t bytes, uint64_t sum)
{
    (void)printf("{\"us\": %.1f, \"bytes\": %llu, \"sum\": %llu}\n", (double)(bench_now_ns() - start_ns) / 1e3,
                 (unsigned long long)bytes, (unsigned long long)sum);
}

static int command_touch(char **args)
{
    uint64_t start = bench_now_ns(), sum = 0, bytes = 0;
    struct rv_connection *connection = connect_to(args[0]);
    struct rv_lease *lease = attach(connection, args[1]);
    struct rv_tensor tensor;

    for (uint64_t i = 0; rv_tensor_at(lease, i, &tensor) == 0; i++) {
        sum += bench_touch(tensor.data, tensor.length);
        bytes += tensor.length;
    }
    print_touched(start, bytes, sum);
    rv_detach(lease);
    rv_disconnect(connection);
    return 0;
}

static int command_mmap(char **args)
{
    uint64_t start = bench_now_ns(), sum;
    int fd = open(args[0], O_RDONLY | O_CLOEXEC);
    struct stat st;
    void *map;

    if (fd < 0 || fstat(fd, &st) < 0)
        bench_fail("%s: %s", args[0], strerror(errno));
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED)
        bench_fail("mmap: %s", strerror(errno));
    sum = bench_touch(map, (uint64_t)st.st_size);
    print_touched(start, (uint64_t)st.st_size, sum);
    (void)munmap(map, (size_t)st.st_size);
    (void)close(fd);
    return 0;
}

/* A program without resvisor: its own copy of the weights. */
static int command_copy(char **args)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    int fd = open(args[0], O_RDONLY | O_CLOEXEC);
    struct stat st;
    uint8_t *copy;
    uint64_t at = 0;

    if (fd < 0 || fstat(fd, &st) < 0)
        bench_fail("%s: %s", args[0], strerror(errno));
    copy = malloc((size_t)st.st_size);
    while (copy && at < (uint64_t)st.st_size) {
        ssize_t n =
            read(fd, copy + at, READ_BYTES < (uint64_t)st.st_size - at ? READ_BYTES : (uint64_t)st.st_size - at);

        if (n <= 0)
            bench_fail("%s: %s", args[0], n < 0 ? strerror(errno) : "shorter than it was");
        at += (uint64_t)n;
    }
    (void)close(fd);
    (void)printf("{\"bytes\": %llu}\n", (unsigned long long)at);
    (void)fflush(stdout);
    while (poll(&input, 1, -1) < 0 && errno == EINTR)
        ;
    free(copy);
    return 0;
}

/* ---- start of a process -------------------------------------------------------------------------------------------
 */

static int command_spawn(char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[0]));
    posix_spawn_file_actions_t actions;
    int status = 0;

    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    (void)posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    while (samples.count < samples.capacity) {
        uint64_t start = bench_now_ns();
        pid_t pid;
        int r = posix_spawn(&pid, args[1], &actions, NULL, args + 1, environ);

        if (r != 0)
            bench_fail("%s: %s", args[1], strerror(r));
        if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) == 127)
            bench_fail("%s did not run", args[1]);
        bench_sample(&samples, start);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)printf("{\"exit_code\": %d, ", WEXITSTATUS(status));
    bench_samples_print("spawn", &samples);
    (void)printf("}\n");
    bench_samples_free(&samples);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int arguments;
        int (*run)(char **args);
    } commands[] = {{"lease", 3, command_lease},
                    {"touch", 2, command_touch},
                    {"mmap", 1, command_mmap},
                    {"copy", 1, command_copy},
                    {"spawn", 2, command_spawn}};

    for (size_t i = 0; argc > 1 && i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[1], commands[i].name) == 0 && argc - 2 >= commands[i].arguments)
            return commands[i].run(argv + 2);
    (void)fprintf(stderr,
                  "usage: bench_client lease SOCKET MODEL ROUNDS | touch SOCKET MODEL | mmap FILE | copy FILE | "
                  "spawn ROUNDS PROGRAM ARGS...\n");
    return 2;
}
