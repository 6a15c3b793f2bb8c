/*
 * What tests/bench/proxy measures with: a backend that costs little, and clients of it, on loopback.
 *
 *   bench_proxy backend WHERE                              a server at a port, or fd:N; ends with its stdin
 *   bench_proxy latency PORT PATH ROUNDS                   one connection, GET, time of each
 *   bench_proxy rate PORT CONNECTIONS MS PATH [BODY-FILE]  GET, or POST of the file, by several at once
 *   bench_proxy download PORT PATH                         time of one large answer
 *   bench_proxy upload PORT PATH BYTES                     time of one large body
 *
 * The backend answers GET /…?bytes=N with N bytes, a POST (when its body has come) as a worker that finds a prompt
 * good, and else with 64 bytes.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common.h"

#define EVENTS 64
#define CONNECTIONS_MAX 256
#define HEAD_MAX 8192
#define PIECE (256 * 1024)
#define REQUEST_MAX (128 * 1024)
#define NS_PER_MS 1000000

static char piece[PIECE];

static int new_socket(const char *port, struct sockaddr_in *ret_address)
{
    int on = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (s < 0)
        bench_fail("socket: %s", strerror(errno));
    *ret_address = (struct sockaddr_in){.sin_family = AF_INET,
                                        .sin_port = htons((uint16_t)bench_number(port)),
                                        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    (void)setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    return s;
}

static int open_client(const char *port)
{
    struct sockaddr_in address;
    int s = new_socket(port, &address);

    if (connect(s, (const struct sockaddr *)&address, sizeof(address)) < 0)
        bench_fail("port %s: %s", port, strerror(errno));
    return s;
}

static void watch(int epoll, int operation, int fd, uint32_t events, void *owner)
{
    struct epoll_event event = {.events = events, .data.ptr = owner};

    if (epoll_ctl(epoll, operation, fd, &event) < 0)
        bench_fail("epoll: %s", strerror(errno));
}

/* The value of Content-Length in a head that ends with a NUL; -1 = there is none. */
static long long body_length(const char *head)
{
    const char *field = strcasestr(head, "\r\ncontent-length:");

    return field ? strtoll(field + 17, NULL, 10) : -1;
}

/* ---- one message ------------------------------------------------------------------------------------------------ */

/* A message as it comes: its head is kept, its body counted. */
struct message {
    char head[HEAD_MAX + 1];
    size_t head_length;
    bool has_head;
    long long rest; /* of the body, still to come */
};

/* Takes bytes of it, at most message_room(); true = it is whole. What follows a whole message is a fault of the peer.
 */
static bool message_take(struct message *m, const char *bytes, size_t length)
{
    char *end;
    size_t before = m->head_length;

    if (m->has_head) {
        m->rest -= (long long)length;
    } else {
        memcpy(m->head + before, bytes, length);
        m->head_length += length;
        m->head[m->head_length] = '\0';
        end = strstr(m->head, "\r\n\r\n");
        if (!end)
            return false;
        m->has_head = true;
        m->rest = body_length(m->head);
        if (m->rest < 0) {
            if (strcasestr(m->head, "\r\ntransfer-encoding:"))
                bench_fail("a body without a length: %.300s", m->head);
            m->rest = 0;
        }
        m->rest -= (long long)(m->head_length - (size_t)(end + 4 - m->head));
    }
    if (m->rest < 0)
        bench_fail("more bytes than were announced: %.300s", m->head);
    return m->rest == 0;
}

/* A read that leaves room for the head's limit until the head is there. */
static size_t message_room(const struct message *m)
{
    return m->has_head ? sizeof(piece) : HEAD_MAX - m->head_length;
}

static void message_clear(struct message *m)
{
    m->head_length = 0;
    m->has_head = false;
    m->rest = 0;
}

/* ---- backend ---------------------------------------------------------------------------------------------------- */

struct connection {
    int fd;
    struct message request;
    char answer[256];
    size_t answer_length, answer_sent;
    unsigned long long body; /* of `piece`, still to be sent */
};

static void prepare_answer(struct connection *c)
{
    static const char approval[] = "{\"node_errors\": {}, \"outputs_to_execute\": [\"101\"]}";
    static const char small[] = "{\"name\": \"bench\", \"value\": 12345678, \"padding\": \"----------\"}\n";
    const char *line_end = strstr(c->request.head, "\r\n"), *bytes = strstr(c->request.head, "bytes=");
    const char *text = strncmp(c->request.head, "POST", 4) == 0 ? approval : small;

    c->body = bytes && bytes < line_end ? strtoull(bytes + 6, NULL, 10) : 0;
    c->answer_length = (size_t)snprintf(c->answer, sizeof(c->answer),
                                        "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %llu\r\n\r\n%s",
                                        c->body ? "image/png" : "application/json",
                                        c->body ? c->body : (unsigned long long)strlen(text), c->body ? "" : text);
    c->answer_sent = 0;
}

/* Sends what is left; 1 = all is sent, 0 = the socket is full, -1 = the peer has gone. */
static int send_answer(struct connection *c)
{
    while (c->answer_sent < c->answer_length) {
        ssize_t n = send(c->fd, c->answer + c->answer_sent, c->answer_length - c->answer_sent, MSG_NOSIGNAL);

        if (n < 0)
            return errno == EAGAIN ? 0 : -1;
        c->answer_sent += (size_t)n;
    }
    while (c->body > 0) {
        ssize_t n = send(c->fd, piece, c->body < PIECE ? (size_t)c->body : PIECE, MSG_NOSIGNAL);

        if (n < 0)
            return errno == EAGAIN ? 0 : -1;
        c->body -= (unsigned long long)n;
    }
    return 1;
}

static void serve(int epoll, struct connection *c, uint32_t events)
{
    static char waste[PIECE];
    int r = 1;

    if (events & EPOLLOUT) {
        r = send_answer(c);
        if (r == 1)
            watch(epoll, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
    } else {
        ssize_t n = recv(c->fd, waste, message_room(&c->request), 0);

        if (n == 0 || (n < 0 && errno != EAGAIN))
            r = -1;
        if (n > 0 && message_take(&c->request, waste, (size_t)n)) {
            prepare_answer(c);
            message_clear(&c->request);
            r = send_answer(c);
            if (r == 0)
                watch(epoll, EPOLL_CTL_MOD, c->fd, EPOLLOUT, c);
        }
    }
    if (r < 0) {
        (void)close(c->fd);
        free(c);
    }
}

static int open_listener(const char *where)
{
    struct sockaddr_in address;
    int s;

    if (strncmp(where, "fd:", 3) == 0)
        return (int)bench_number(where + 3);
    s = new_socket(where, &address);
    if (bind(s, (const struct sockaddr *)&address, sizeof(address)) < 0 || listen(s, 256) < 0)
        bench_fail("port %s: %s", where, strerror(errno));
    return s;
}

static int command_backend(int count, char **args)
{
    int listener = open_listener(args[0]), epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event events[EVENTS];
    char end;

    (void)count;
    watch(epoll, EPOLL_CTL_ADD, listener, EPOLLIN, &listener);
    watch(epoll, EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN, &end);
    (void)printf("{\"ready\": true}\n");
    (void)fflush(stdout);
    for (;;) {
        int n = epoll_wait(epoll, events, EVENTS, -1);

        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &end)
                return 0;
            if (events[i].data.ptr == &listener) {
                struct connection *c = calloc(1, sizeof(*c));
                int on = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

                if (fd < 0 && errno == EAGAIN) {
                    free(c);
                    continue;
                }
                if (!c || fd < 0)
                    bench_fail("accept: %s", strerror(errno));
                (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
                c->fd = fd;
                watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN, c);
            } else {
                serve(epoll, events[i].data.ptr, events[i].events);
            }
        }
    }
}

/* ---- clients ---------------------------------------------------------------------------------------------------- */

struct request {
    char *bytes;
    size_t length;
};

static struct request make_request(const char *path, const char *body_file)
{
    struct request request = {.bytes = malloc(REQUEST_MAX)};
    size_t body = 0;
    FILE *file = body_file ? fopen(body_file, "rb") : NULL;

    if (!request.bytes || (body_file && !file))
        bench_fail("%s: %s", body_file ? body_file : path, strerror(errno));
    if (file) {
        (void)fseek(file, 0, SEEK_END);
        body = (size_t)ftell(file);
        rewind(file);
    }
    if (body + 1024 > REQUEST_MAX)
        bench_fail("%s is too large", body_file);
    request.length = (size_t)snprintf(request.bytes, 1024,
                                      file ? "POST %.500s HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                                             "application/json\r\nContent-Length: %zu\r\n\r\n"
                                           : "GET %.500s HTTP/1.1\r\nHost: localhost\r\n\r\n",
                                      path, body);
    if (file && fread(request.bytes + request.length, 1, body, file) != body)
        bench_fail("%s cannot be read", body_file);
    request.length += body;
    if (file)
        (void)fclose(file);
    return request;
}

static void check_status(const struct message *answer)
{
    if (strncmp(answer->head, "HTTP/1.1 200", 12) != 0)
        bench_fail("an answer that is not as expected: %.400s", answer->head);
}

static void send_all(int s, const char *bytes, size_t length)
{
    for (ssize_t n; length > 0; bytes += n, length -= (size_t)n) {
        n = send(s, bytes, length, MSG_NOSIGNAL);
        if (n < 0)
            bench_fail("send: %s", strerror(errno));
    }
}

static void receive_answer(int s)
{
    static struct message answer;
    ssize_t n;

    message_clear(&answer);
    do {
        n = recv(s, piece, message_room(&answer), 0);
        if (n <= 0)
            bench_fail("receive: %s", n < 0 ? strerror(errno) : "the connection was closed");
    } while (!message_take(&answer, piece, (size_t)n));
    check_status(&answer);
}

static int command_latency(int count, char **args)
{
    struct bench_samples samples = bench_samples_make(bench_number(args[2]));
    struct request request = make_request(args[1], NULL);
    int s = open_client(args[0]);

    (void)count;
    for (uint64_t i = 0; i < samples.capacity + samples.capacity / 10; i++) {
        uint64_t start = bench_now_ns();

        send_all(s, request.bytes, request.length);
        receive_answer(s);
        if (i >= samples.capacity / 10) /* the first ones warm it up */
            bench_sample(&samples, start);
    }
    (void)printf("{");
    bench_samples_print("latency", &samples);
    (void)printf("}\n");
    bench_samples_free(&samples);
    free(request.bytes);
    return 0;
}

struct client {
    int fd;
    struct message answer;
};

static int command_rate(int count, char **args)
{
    static struct client clients[CONNECTIONS_MAX];
    uint64_t connections = bench_number(args[1]), limit = bench_number(args[2]) * NS_PER_MS, answers = 0, start;
    struct request request = make_request(args[3], count > 4 ? args[4] : NULL);
    struct epoll_event events[EVENTS];
    int epoll = epoll_create1(EPOLL_CLOEXEC);

    if (connections > CONNECTIONS_MAX)
        bench_fail("at most %d connections", CONNECTIONS_MAX);
    for (uint64_t i = 0; i < connections; i++) {
        clients[i].fd = open_client(args[0]);
        watch(epoll, EPOLL_CTL_ADD, clients[i].fd, EPOLLIN, &clients[i]);
    }
    start = bench_now_ns();
    for (uint64_t i = 0; i < connections; i++)
        send_all(clients[i].fd, request.bytes, request.length);
    while (bench_now_ns() - start < limit) {
        int n = epoll_wait(epoll, events, EVENTS, 1000);

        for (int i = 0; i < n; i++) {
            struct client *client = events[i].data.ptr;
            ssize_t got = recv(client->fd, piece, message_room(&client->answer), 0);

            if (got <= 0)
                bench_fail("receive: %s", got < 0 ? strerror(errno) : "the connection was closed");
            if (!message_take(&client->answer, piece, (size_t)got))
                continue;
            check_status(&client->answer);
            message_clear(&client->answer);
            answers++;
            send_all(client->fd, request.bytes, request.length);
        }
    }
    (void)printf("{\"connections\": %llu, \"per_second\": %.0f}\n", (unsigned long long)connections,
                 (double)answers * 1e9 / (double)(bench_now_ns() - start));
    free(request.bytes);
    return 0;
}

static int command_download(int count, char **args)
{
    struct request request = make_request(args[1], NULL);
    int s = open_client(args[0]);
    uint64_t start = bench_now_ns();

    (void)count;
    send_all(s, request.bytes, request.length);
    receive_answer(s);
    (void)printf("{\"seconds\": %.6f}\n", (double)(bench_now_ns() - start) / 1e9);
    free(request.bytes);
    return 0;
}

/* A form with one file, as ComfyUI's frontend sends it. */
static int command_upload(int count, char **args)
{
    static const char begin[] = "--bench\r\nContent-Disposition: form-data; name=\"overwrite\"\r\n\r\ntrue\r\n"
                                "--bench\r\nContent-Disposition: form-data; name=\"image\"; filename=\"bench.png\"\r\n"
                                "Content-Type: image/png\r\n\r\n";
    static const char end[] = "\r\n--bench--\r\n";
    uint64_t bytes = bench_number(args[2]), start;
    char head[512];
    int s = open_client(args[0]);

    (void)count;
    (void)snprintf(head, sizeof(head),
                   "POST %.200s HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=bench\r\n"
                   "Content-Length: %llu\r\n\r\n%s",
                   args[1], (unsigned long long)(bytes + sizeof(begin) + sizeof(end) - 2), begin);
    start = bench_now_ns();
    send_all(s, head, strlen(head));
    for (uint64_t left = bytes; left > 0; left -= left < PIECE ? left : PIECE)
        send_all(s, piece, left < PIECE ? (size_t)left : PIECE);
    send_all(s, end, strlen(end));
    receive_answer(s);
    (void)printf("{\"seconds\": %.6f}\n", (double)(bench_now_ns() - start) / 1e9);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int least, most;
        int (*run)(int count, char **args);
    } commands[] = {{"backend", 1, 1, command_backend},
                    {"latency", 3, 3, command_latency},
                    {"rate", 4, 5, command_rate},
                    {"download", 2, 2, command_download},
                    {"upload", 3, 3, command_upload}};

    for (size_t i = 0; argc > 1 && i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[1], commands[i].name) == 0 && argc - 2 >= commands[i].least && argc - 2 <= commands[i].most)
            return commands[i].run(argc - 2, argv + 2);
    (void)fprintf(stderr,
                  "usage: bench_proxy backend PORT|fd:N | latency PORT PATH ROUNDS | rate PORT CONNECTIONS MS PATH "
                  "[BODY-FILE] | download PORT PATH | upload PORT PATH BYTES\n");
    return 2;
}
