/*
 * HTTP clients on loopback, one connection each that is kept:
 *
 *   bench_http get PORT ROUNDS              GET /healthz, time of each
 *   bench_http job PORT TYPE PREFIX ROUNDS  submit a job and wait for its end in one request
 *   bench_http rate PORT CLIENTS MS         GET /healthz by several clients at once
 *   bench_http echo PORT                    a server that answers at once with fixed bytes: what loopback itself costs
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common.h"

#define CLIENTS_MAX 64
#define MESSAGE_MAX 65536
#define NS_PER_MS 1000000

static const char health[] = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";

static struct sockaddr_in address_of(const char *port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)bench_number(port)),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static int open_client(const char *port)
{
    struct sockaddr_in address = address_of(port);
    int on = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (s < 0 || connect(s, (const struct sockaddr *)&address, sizeof(address)) < 0)
        bench_fail("port %s: %s", port, strerror(errno));
    (void)setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return s;
}

/* One request and all of its answer, which must have a Content-Length and the status 200. */
static void exchange(int s, const char *request, size_t length)
{
    char answer[MESSAGE_MAX + 1];
    size_t have = 0, whole = 0;

    if (send(s, request, length, MSG_NOSIGNAL) != (ssize_t)length)
        bench_fail("send: %s", strerror(errno));
    while (whole == 0 || have < whole) {
        ssize_t n = recv(s, answer + have, MESSAGE_MAX - have, 0);
        char *end, *field;

        if (n <= 0)
            bench_fail("receive: %s", n < 0 ? strerror(errno) : "the connection was closed");
        have += (size_t)n;
        answer[have] = '\0';
        end = whole ? NULL : strstr(answer, "\r\n\r\n");
        field = end ? strstr(answer, "Content-Length: ") : NULL;
        if (end && (!field || strncmp(answer, "HTTP/1.1 200", 12) != 0))
            bench_fail("an answer that is not as expected: %.200s", answer);
        if (end)
            whole = (size_t)(end + 4 - answer) + strtoul(field + 16, NULL, 10);
    }
}

static void print_samples(const char *name, struct bench_samples *samples)
{
    (void)printf("{");
    bench_samples_print(name, samples);
    (void)printf("}\n");
    bench_samples_free(samples);
}

static int command_get(char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[1]));
    int s = open_client(args[0]);

    exchange(s, health, strlen(health));
    for (uint64_t i = 0; i < samples.capacity; i++) {
        uint64_t start = bench_now_ns();

        exchange(s, health, strlen(health));
        bench_sample(&samples, start);
    }
    (void)close(s);
    print_samples("get", &samples);
    return 0;
}

static int command_job(char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[3]));
    int s = open_client(args[0]);

    for (uint64_t i = 0; i <= samples.capacity; i++) {
        char body[512], request[1024];
        int length = snprintf(body, sizeof(body), "{\"job_id\":\"%.64s-%llu\",\"type\":\"%.64s\",\"wait_ms\":60000}",
                              args[2], (unsigned long long)i, args[1]);
        uint64_t start;

        length = snprintf(request, sizeof(request),
                          "POST /resvisor/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                          "Content-Length: %d\r\n\r\n%s",
                          length, body);
        start = bench_now_ns();
        exchange(s, request, (size_t)length);
        if (i > 0) /* the first one may wait for a worker */
            bench_sample(&samples, start);
    }
    (void)close(s);
    print_samples("job", &samples);
    return 0;
}

/* ---- several at once -------------------------------------------------------------------------------------------- */

struct client {
    pthread_t thread;
    int socket;
    uint64_t answers;
};

static atomic_bool measuring, finished;

static void *run_client(void *context)
{
    struct client *client = context;

    while (!atomic_load(&finished)) {
        exchange(client->socket, health, strlen(health));
        if (atomic_load(&measuring))
            client->answers++;
    }
    return NULL;
}

static int command_rate(char **args)
{
    static struct client clients[CLIENTS_MAX];
    uint64_t count = bench_number(args[1]), ms = bench_number(args[2]), start, total = 0;

    if (count > CLIENTS_MAX)
        bench_fail("at most %d clients", CLIENTS_MAX);
    for (uint64_t i = 0; i < count; i++) {
        clients[i].socket = open_client(args[0]);
        if (pthread_create(&clients[i].thread, NULL, run_client, &clients[i]) != 0)
            bench_fail("no thread");
    }
    start = bench_now_ns();
    atomic_store(&measuring, true);
    (void)poll(NULL, 0, (int)ms); /* the time that is measured; nothing is waited for */
    atomic_store(&measuring, false);
    ms = (bench_now_ns() - start) / NS_PER_MS;
    atomic_store(&finished, true);
    for (uint64_t i = 0; i < count; i++) {
        (void)pthread_join(clients[i].thread, NULL);
        (void)close(clients[i].socket);
        total += clients[i].answers;
    }
    (void)printf("{\"clients\": %llu, \"per_second\": %.0f}\n", (unsigned long long)count,
                 (double)total * 1000 / (double)ms);
    return 0;
}

/* ---- loopback itself -------------------------------------------------------------------------------------------- */

static int command_echo(char **args)
{
    static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{\"status\":\"ok\"}";
    struct sockaddr_in address = address_of(args[0]);
    struct pollfd fds[CLIENTS_MAX + 2] = {{.fd = STDIN_FILENO, .events = POLLIN}};
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    nfds_t count = 2;
    char waste[4096];

    (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (listener < 0 || bind(listener, (const struct sockaddr *)&address, sizeof(address)) < 0 ||
        listen(listener, 64) < 0)
        bench_fail("port %s: %s", args[0], strerror(errno));
    fds[1] = (struct pollfd){.fd = listener, .events = POLLIN};
    (void)printf("{\"ready\": true}\n");
    (void)fflush(stdout);
    while (poll(fds, count, -1) >= 0 && !fds[0].revents) {
        if (fds[1].revents && count < CLIENTS_MAX + 2)
            fds[count++] = (struct pollfd){.fd = accept(listener, NULL, NULL), .events = POLLIN};
        for (nfds_t i = 2; i < count; i++) {
            if (!fds[i].revents)
                continue;
            if (recv(fds[i].fd, waste, sizeof(waste), 0) > 0 &&
                send(fds[i].fd, answer, sizeof(answer) - 1, MSG_NOSIGNAL) > 0)
                continue;
            (void)close(fds[i].fd);
            fds[i--] = fds[--count];
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int arguments;
        int (*run)(char **args);
    } commands[] = {
        {"get", 2, command_get}, {"job", 4, command_job}, {"rate", 3, command_rate}, {"echo", 1, command_echo}};

    for (size_t i = 0; argc > 1 && i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[1], commands[i].name) == 0 && argc - 2 == commands[i].arguments)
            return commands[i].run(argv + 2);
    (void)fprintf(
        stderr, "usage: bench_http get PORT ROUNDS | job PORT TYPE PREFIX ROUNDS | rate PORT CLIENTS MS | echo PORT\n");
    return 2;
}
