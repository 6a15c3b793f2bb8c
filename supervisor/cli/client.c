#include "client.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "config.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

void rv_client_close(struct rv_client *client)
{
    if (client->socket >= 0)
        (void)close(client->socket);
    client->socket = -1;
}

static int connect_failed(const struct rv_client *client, int number, struct rv_error *err)
{
    if (number == ENOENT || number == ECONNREFUSED || number == ENOTDIR)
        return rv_error_set(err, number, CODE(NOT_RUNNING), "resvisor is not running: nothing listens at %s",
                            client->path);
    if (number == EACCES || number == EPERM)
        return rv_error_set(err, number, CODE(NOT_PERMITTED), "this user may not connect to %s", client->path);
    if (number == EAGAIN || number == EINPROGRESS)
        return rv_error_set(err, ETIMEDOUT, CODE(DEADLINE), "nobody answers at %s", client->path);
    return rv_error_set(err, number, CODE(NOT_RUNNING), "cannot connect to %s: %s", client->path, strerror(number));
}

static int open_socket(struct rv_client *client, uint64_t timeout_us, struct rv_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval tv = {.tv_sec = (time_t)(timeout_us / RV_SEC), .tv_usec = (suseconds_t)(timeout_us % RV_SEC)};
    int fd;

    if (strlen(client->path) >= sizeof(address.sun_path))
        return rv_error_set(err, ENAMETOOLONG, CODE(CONFIG), "the socket path %s is longer than %zu bytes",
                            client->path, sizeof(address.sun_path) - 1);
    memcpy(address.sun_path, client->path, strlen(client->path) + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return connect_failed(client, errno, err);
    /* connect() of a local socket waits for room in the listener's queue, as long as a send may wait */
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        int number = errno;

        (void)close(fd);
        return connect_failed(client, number, err);
    }
    client->socket = fd;
    return 0;
}

static int say_hello(struct rv_client *client, uint64_t timeout_us, struct rv_error *err)
{
    Rv__Hello hello = RV__HELLO__INIT;
    Rv__Frame request = RV__FRAME__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    int r;

    hello.version = RV_PROTOCOL_VERSION;
    hello.role = RV__ROLE__ROLE_CLIENT;
    hello.pid = getpid();
    hello.name = (char *)"resvisor";
    request.body_case = RV__FRAME__BODY_HELLO;
    request.hello = &hello;
    r = rv_client_request(client, &request, RV__FRAME__BODY_HELLO_REPLY, timeout_us, NULL, NULL, &answer, err);
    if (r < 0)
        return r;
    if (answer.message->hello_reply->version != RV_PROTOCOL_VERSION)
        r = rv_error_set(err, EPROTO, CODE(BAD_VERSION), "%s speaks protocol version %u, this program %u", client->path,
                         answer.message->hello_reply->version, RV_PROTOCOL_VERSION);
    client->peer_pid = answer.message->hello_reply->pid;
    client->operator= answer.message->hello_reply->operator_;
    rv_frame_fini(&answer);
    return r;
}

int rv_client_connect(struct rv_client *client, const char *runtime_dir, const char *suffix, uint64_t timeout_us,
                      struct rv_error *err)
{
    int r;

    rv_client_close(client);
    r = snprintf(client->path, sizeof(client->path), "%s/%s", runtime_dir, suffix);
    if (r < 0 || (size_t)r >= sizeof(client->path))
        return rv_error_set(err, ENAMETOOLONG, CODE(CONFIG), "the runtime directory's path is too long");
    r = open_socket(client, timeout_us, err);
    if (r < 0)
        return r;
    r = say_hello(client, timeout_us, err);
    if (r < 0)
        rv_client_close(client);
    return r;
}

/* Turns what rv_frame_wait and rv_frame_send return into words. */
static int transport_failed(struct rv_client *client, int r, uint64_t timeout_us, struct rv_error *err)
{
    rv_client_close(client); /* an answer that comes late must not be taken for the next one */
    if (r == -ETIMEDOUT || r == -EAGAIN)
        return rv_error_set(err, ETIMEDOUT, CODE(DEADLINE), "no answer from %s within %.1f s", client->path,
                            (double)timeout_us / 1e6);
    if (r == -EPROTO)
        return rv_error_set(err, EPROTO, CODE(BAD_VERSION), "%s sent what this program does not understand",
                            client->path);
    if (r == -ENOMEM)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory or descriptors for the answer");
    if (r == -EMSGSIZE)
        return rv_error_set(err, EMSGSIZE, CODE(TOO_LARGE), "the request is too large");
    return rv_error_set(err, EPIPE, CODE(NOT_RUNNING), "%s closed the connection", client->path);
}

static int check_answer(struct rv_client *client, struct rv_frame *answer, Rv__Frame__BodyCase wanted,
                        struct rv_error *err)
{
    int r;

    if (answer->message->body_case == wanted)
        return 0;
    if (answer->message->body_case == RV__FRAME__BODY_ERROR &&
        answer->message->error->code != RESVISOR__V1__ERROR_CODE__ERROR_OK)
        r = rv_error_from_message(err, answer->message->error);
    else
        r = rv_error_set(err, EPROTO, CODE(BAD_VERSION), "%s gave an answer to another question", client->path);
    rv_frame_fini(answer);
    return r;
}

int rv_client_request(struct rv_client *client, Rv__Frame *request, Rv__Frame__BodyCase wanted, uint64_t timeout_us,
                      rv_client_progress on_progress, void *context, struct rv_frame *ret_answer, struct rv_error *err)
{
    uint64_t start = rv_now_us();
    int r;

    if (client->socket < 0)
        return rv_error_set(err, ENOTCONN, CODE(NOT_RUNNING), "%s closed the connection", client->path);
    request->id = ++client->last_id;
    r = rv_frame_send(client->socket, request, NULL, 0, timeout_us);
    if (r == -EMSGSIZE || r == -ENOMEM)
        return transport_failed(client, r, timeout_us, err);
    /* A peer that refuses us answers with the reason and closes, perhaps before we have sent: so read in any case. */
    for (;;) {
        struct rv_frame answer = RV_FRAME_INIT;
        uint64_t spent = rv_now_us() - start;
        uint64_t left = timeout_us == UINT64_MAX ? UINT64_MAX : spent < timeout_us ? timeout_us - spent : 0;

        r = rv_frame_wait(client->socket, &answer, left);
        if (r <= 0)
            return transport_failed(client, r == 0 ? -EPIPE : r, timeout_us, err);
        if (answer.message->body_case == RV__FRAME__BODY_LOAD_PROGRESS) {
            if (on_progress)
                on_progress(answer.message->load_progress, context);
        } else if (answer.message->id == request->id ||
                   (answer.message->id == 0 && answer.message->body_case == RV__FRAME__BODY_ERROR)) {
            *ret_answer = answer;
            return check_answer(client, ret_answer, wanted, err);
        }
        rv_frame_fini(&answer);
    }
}

int rv_client_rpc(struct rv_client *client, Resvisor__V1__Request *request, uint64_t timeout_us,
                  struct rv_frame *ret_answer, struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    int r;

    request->version = 1;
    request->id = client->last_id + 1;
    frame.body_case = RV__FRAME__BODY_RPC_REQUEST;
    frame.rpc_request = request;
    r = rv_client_request(client, &frame, RV__FRAME__BODY_RPC_REPLY, timeout_us, NULL, NULL, ret_answer, err);
    if (r < 0)
        return r;
    r = rv_error_from_message(err, ret_answer->message->rpc_reply->error);
    if (err->code != CODE(OK)) {
        rv_frame_fini(ret_answer);
        return r < 0 ? r : -EIO;
    }
    return 0;
}

bool rv_client_may_repeat(int r, const struct rv_error *err)
{
    return r < 0 && (err->code == CODE(NOT_READY) || err->code == CODE(NOT_RUNNING));
}

int rv_cli_runtime_dir(const struct rv_args *args, char *buffer, size_t size, struct rv_error *err)
{
    struct rv_config_sources sources;
    char problem[RV_ERROR_TEXT_MAX];
    int r;

    rv_args_sources(args, &sources);
    r = rv_config_find_runtime_dir(&sources, buffer, size, problem, sizeof(problem));
    return r < 0 ? rv_error_set(err, -r, CODE(CONFIG), "%s", problem) : 0;
}

int rv_cli_connect(struct rv_client *client, const struct rv_args *args, const char *suffix, struct rv_error *err)
{
    char runtime_dir[PATH_MAX];
    int r = rv_cli_runtime_dir(args, runtime_dir, sizeof(runtime_dir), err);

    return r < 0 ? r : rv_client_connect(client, runtime_dir, suffix, RV_CLIENT_TIMEOUT_US, err);
}
