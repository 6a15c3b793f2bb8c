/*
 * A gateway, measured from inside. Every command prints one JSON object.
 *
 *   get ADDRESS JOB ROUNDS            one Get after the other
 *   job ADDRESS TYPE PREFIX ROUNDS    one job after the other: Submit, answered at the job's end
 *   rate ADDRESS JOB CLIENTS MS       Gets of so many clients at once, each waiting for its answer
 *   echo ADDRESS                      sends every message back until the end of stdin: what nanomsg alone costs
 * Answers of the echo server are requests: a get or rate told "echo" as JOB does not look into them.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>

#include "common.h"
#include "rpc.pb-c.h"

#define MESSAGE_MAX 4096
#define CLIENTS_MAX 64
#define TIMEOUT_MS 60000
#define NS_PER_MS 1000000u

static int open_request_socket(const char *address)
{
    int timeout = TIMEOUT_MS, s = nn_socket(AF_SP, NN_REQ);

    if (s < 0 || nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
        nn_connect(s, address) < 0)
        bench_fail("%s: %s", address, nn_strerror(errno));
    return s;
}

/* Sends the request and checks the answer, unless it comes from the echo server. */
static void ask(int s, const Resvisor__V1__Request *request, bool echo, Resvisor__V1__JobState wanted)
{
    uint8_t bytes[MESSAGE_MAX];
    size_t length = resvisor__v1__request__get_packed_size(request);
    Resvisor__V1__Reply *reply;
    void *answer = NULL;
    int n;

    if (length > sizeof(bytes))
        bench_fail("the request is too large");
    (void)resvisor__v1__request__pack(request, bytes);
    if (nn_send(s, bytes, length, 0) < 0)
        bench_fail("send: %s", nn_strerror(errno));
    n = nn_recv(s, &answer, NN_MSG, 0);
    if (n < 0)
        bench_fail("receive: %s", nn_strerror(errno));
    if (!echo) {
        reply = resvisor__v1__reply__unpack(NULL, (size_t)n, answer);
        if (!reply || reply->body_case != RESVISOR__V1__REPLY__BODY_JOB)
            bench_fail("the router: %s", reply && reply->error ? reply->error->message : "not an answer");
        if (wanted != RESVISOR__V1__JOB_STATE__JOB_UNKNOWN && reply->job->state != wanted)
            bench_fail("job %s is in state %d", reply->job->job_id, (int)reply->job->state);
        resvisor__v1__reply__free_unpacked(reply, NULL);
    }
    (void)nn_freemsg(answer);
}

static void ask_get(int s, const char *job, uint64_t id)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Get get = RESVISOR__V1__GET__INIT;

    get.job_id = (char *)job;
    request.version = 1;
    request.id = id;
    request.body_case = RESVISOR__V1__REQUEST__BODY_GET;
    request.get = &get;
    ask(s, &request, strcmp(job, "echo") == 0, RESVISOR__V1__JOB_STATE__JOB_UNKNOWN);
}

static int command_get(char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[2]));
    int s = open_request_socket(args[0]);

    ask_get(s, args[1], 1); /* the connection is made here, and is not part of the figures */
    for (uint64_t i = 0; i < samples.capacity; i++) {
        uint64_t start = bench_now_ns();

        ask_get(s, args[1], i + 2);
        bench_sample(&samples, start);
    }
    (void)nn_close(s);
    (void)printf("{");
    bench_samples_print("get", &samples);
    (void)printf("}\n");
    bench_samples_free(&samples);
    return 0;
}

static void run_job(int s, char *type, const char *prefix, uint64_t number)
{
    Resvisor__V1__Request request = RESVISOR__V1__REQUEST__INIT;
    Resvisor__V1__Submit submit = RESVISOR__V1__SUBMIT__INIT;
    char id[64];

    (void)snprintf(id, sizeof(id), "%.40s-%llu", prefix, (unsigned long long)number);
    submit.job_id = id;
    submit.type = type;
    submit.wait_ms = TIMEOUT_MS;
    request.version = 1;
    request.id = number + 1;
    request.body_case = RESVISOR__V1__REQUEST__BODY_SUBMIT;
    request.submit = &submit;
    ask(s, &request, false, RESVISOR__V1__JOB_STATE__JOB_DONE);
}

static int command_job(char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[3]));
    int s = open_request_socket(args[0]);

    run_job(s, args[1], args[2], 0);
    for (uint64_t i = 0; i < samples.capacity; i++) {
        uint64_t start = bench_now_ns();

        run_job(s, args[1], args[2], i + 1);
        bench_sample(&samples, start);
    }
    (void)nn_close(s);
    (void)printf("{");
    bench_samples_print("job", &samples);
    (void)printf("}\n");
    bench_samples_free(&samples);
    return 0;
}

/* ---- rate ---------------------------------------------------------------------------------------------------------
 */

struct client {
    pthread_t thread;
    const char *job;
    int socket;
    uint64_t answers;
};

static atomic_bool measuring, finished;

static void *run_client(void *context)
{
    struct client *client = context;
    uint64_t id = 1;

    while (!atomic_load(&finished)) {
        ask_get(client->socket, client->job, id++);
        if (atomic_load(&measuring))
            client->answers++;
    }
    return NULL;
}

static int command_rate(char **args)
{
    static struct client clients[CLIENTS_MAX];
    uint64_t count = bench_number(args[2]), ms = bench_number(args[3]), start, total = 0;

    if (count > CLIENTS_MAX)
        bench_fail("at most %d clients", CLIENTS_MAX);
    for (uint64_t i = 0; i < count; i++) {
        clients[i].job = args[1];
        clients[i].socket = open_request_socket(args[0]);
        ask_get(clients[i].socket, args[1], 1); /* connected */
    }
    for (uint64_t i = 0; i < count; i++)
        if (pthread_create(&clients[i].thread, NULL, run_client, &clients[i]) != 0)
            bench_fail("no thread");
    start = bench_now_ns();
    atomic_store(&measuring, true);
    (void)poll(NULL, 0, (int)ms); /* the time that is measured; nothing is waited for */
    atomic_store(&measuring, false);
    ms = (bench_now_ns() - start) / NS_PER_MS;
    atomic_store(&finished, true);
    for (uint64_t i = 0; i < count; i++) {
        (void)pthread_join(clients[i].thread, NULL);
        (void)nn_close(clients[i].socket);
        total += clients[i].answers;
    }
    (void)printf("{\"clients\": %llu, \"per_second\": %.0f}\n", (unsigned long long)count,
                 (double)total * 1000 / (double)ms);
    return 0;
}

/* ---- echo ---------------------------------------------------------------------------------------------------------
 */

static int command_echo(char **args)
{
    int s = nn_socket(AF_SP_RAW, NN_REP), fd;
    size_t size = sizeof(fd);

    if (s < 0 || nn_bind(s, args[0]) < 0 || nn_getsockopt(s, NN_SOL_SOCKET, NN_RCVFD, &fd, &size) < 0)
        bench_fail("%s: %s", args[0], nn_strerror(errno));
    (void)printf("{\"ready\": true}\n");
    (void)fflush(stdout);
    for (;;) {
        struct pollfd fds[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
        struct nn_msghdr header = {0};
        struct nn_iovec vector;
        void *body = NULL, *control = NULL;

        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            bench_fail("poll: %s", strerror(errno));
        if (fds[0].revents)
            break;
        if (!fds[1].revents)
            continue;
        vector = (struct nn_iovec){&body, NN_MSG};
        header = (struct nn_msghdr){&vector, 1, &control, NN_MSG};
        if (nn_recvmsg(s, &header, NN_DONTWAIT) >= 0 && nn_sendmsg(s, &header, 0) < 0)
            bench_fail("send: %s", nn_strerror(errno));
    }
    (void)nn_close(s);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int arguments;
        int (*run)(char **args);
    } commands[] = {
        {"get", 3, command_get}, {"job", 4, command_job}, {"rate", 4, command_rate}, {"echo", 1, command_echo}};

    for (size_t i = 0; argc > 1 && i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[1], commands[i].name) == 0 && argc - 2 == commands[i].arguments)
            return commands[i].run(argv + 2);
    (void)fprintf(stderr, "usage: bench_rpc get ADDRESS JOB ROUNDS | job ADDRESS TYPE PREFIX ROUNDS | "
                          "rate ADDRESS JOB CLIENTS MS | echo ADDRESS\n");
    return 2;
}
