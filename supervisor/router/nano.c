/*
 * nanomsg: REP sockets for requests, one for ipc and one for tcp (only the latter asks for a token), and PUB for
 * events.
 *
 * Raw REP, so that replies may come late and in any order: the way back travels as the message's control data, which is
 * kept until then. NN_RCVFD is readable while a message waits; it is never read here, and one message is taken per
 * turn. A reply to a client that has gone, or that does not read, is dropped by nanomsg: clients repeat their request.
 */
#include <errno.h>
#include <event2/event.h>
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <nanomsg/reqrep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "router.h"

#define IPC "ipc://"
#define RECEIVE_MAX                                                                                      \
    (int)(RV_RPC_FRAME_MAX + RV_RPC_FRAME_MAX / 2) /* above the limit: somewhat more gets an answer that \
                                                     says so; beyond, nanomsg closes without a word */
#define PUBLISH_BUFFER (1024 * 1024)               /* bytes of events per subscriber that reads slowly */
#define UNPACK_SLACK (16u * 1024)                  /* structs of a small message take more than four times its bytes */

void rv_asker_fini(struct rv_asker *asker)
{
    if (asker->control)
        (void)nn_freemsg(asker->control);
    asker->control = NULL;
}

static size_t way_back(const struct rv_asker *asker, const void **ret_data)
{
    void *control = asker->control;
    struct nn_msghdr header = {.msg_control = &control, .msg_controllen = NN_MSG};
    struct nn_cmsghdr *c = control ? NN_CMSG_FIRSTHDR(&header) : NULL;

    if (!c)
        return 0;
    *ret_data = NN_CMSG_DATA(c);
    return c->cmsg_len;
}

bool rv_nano_same(const struct rv_asker *a, const struct rv_asker *b)
{
    const void *data_a = NULL, *data_b = NULL;
    size_t length = way_back(a, &data_a);

    return a->socket == b->socket && length > sizeof(struct nn_cmsghdr) && length == way_back(b, &data_b) &&
           memcmp(data_a, data_b, length - sizeof(struct nn_cmsghdr)) == 0;
}

static void handle(struct rv_router *router, struct rv_asker *asker, const uint8_t *bytes, size_t length)
{
    struct rv_error err = {0};
    Resvisor__V1__Request *request = NULL;
    void *arena = NULL;
    const char *why = "";

    if (length > RV_RPC_FRAME_MAX) {
        (void)rv_error_set(&err, EMSGSIZE, RV_CODE(TOO_LARGE), "the request has %zu bytes; at most %u KiB are allowed",
                           length, RV_RPC_FRAME_MAX / 1024);
    } else {
        request = (Resvisor__V1__Request *)rv_message_unpack(&resvisor__v1__request__descriptor, bytes, length,
                                                             4 * length + UNPACK_SLACK, &arena, &why);
        if (!request)
            (void)rv_error_set(&err, EINVAL, RV_CODE(BAD_REQUEST), "the request cannot be read: %s", why);
    }
    if (request)
        rv_rpc_request(router, asker, request);
    else
        rv_rpc_reply_error(router, asker, &err, 0);
    free(arena);
}

static void on_readable(int fd, short what, void *context)
{
    struct rv_router *router = context;
    unsigned i = router->rep_events[0] && event_get_fd(router->rep_events[0]) == fd ? 0 : 1;
    void *body = NULL, *control = NULL;
    struct nn_iovec iov = {&body, NN_MSG};
    struct nn_msghdr header = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = NN_MSG};
    struct rv_asker asker = {.socket = router->rep[i], .tcp = i == 1};
    int n = nn_recvmsg(router->rep[i], &header, NN_DONTWAIT);

    (void)what;
    if (n < 0)
        return; /* EAGAIN, also for a message without a way back */
    asker.control = control;
    handle(router, &asker, body, (size_t)n);
    (void)nn_freemsg(body);
}

void rv_nano_reply(struct rv_asker *asker, const Resvisor__V1__Reply *reply, size_t size)
{
    void *body = nn_allocmsg(size ? size : 1, 0);
    struct nn_iovec iov = {&body, NN_MSG};
    struct nn_msghdr header = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &asker->control, .msg_controllen = NN_MSG};

    if (!body)
        return; /* the client's repeat may find more memory */
    (void)resvisor__v1__reply__pack(reply, body);
    if (nn_sendmsg(asker->socket, &header, NN_DONTWAIT) < 0)
        (void)nn_freemsg(body);
    else
        asker->control = NULL; /* went with the message */
}

void rv_nano_publish(struct rv_router *router, const uint8_t *bytes, uint32_t length)
{
    if (router->pub >= 0)
        (void)nn_send(router->pub, bytes, length, NN_DONTWAIT);
}

static int open_socket(int protocol, int domain, struct rv_error *err)
{
    int value = RECEIVE_MAX, s = nn_socket(domain, protocol);

    if (s < 0)
        return rv_error_set(err, EIO, RV_CODE(INTERNAL), "nanomsg gives no socket: %s", nn_strerror(nn_errno()));
    if (protocol == NN_REP)
        (void)nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVMAXSIZE, &value, sizeof(value));
    value = PUBLISH_BUFFER;
    (void)nn_setsockopt(s, NN_SOL_SOCKET, NN_SNDBUF, &value, sizeof(value));
    value = 0;
    (void)nn_setsockopt(s, NN_SOL_SOCKET, NN_LINGER, &value, sizeof(value));
    return s;
}

/* nanomsg would delete a regular file at the path, abort on a long one, and make the socket world-writable. */
static int bind_ipc(int s, const char *address, int gid, struct rv_socket_file *file, struct rv_error *err)
{
    const char *path = address + strlen(IPC);
    mode_t before;
    int r;

    if (strncmp(address, IPC, strlen(IPC)) != 0 || path[0] != '/')
        return rv_error_set(err, EINVAL, RV_CODE(CONFIG), "%s is no ipc:// address with an absolute path", address);
    r = rv_socket_claim(path, err);
    if (r < 0)
        return r;
    before = umask(077);
    r = nn_bind(s, address);
    (void)umask(before);
    if (r < 0)
        return rv_error_set(err, EIO, RV_CODE(FILE), "cannot listen at %s: %s", address, nn_strerror(nn_errno()));
    return rv_socket_adopt(file, path, gid, err);
}

static int bind_tcp(int s, const char *host_port, struct rv_error *err)
{
    char address[RV_PATH_MAX];

    if (snprintf(address, sizeof(address), "tcp://%s", host_port) >= (int)sizeof(address))
        return rv_error_set(err, EINVAL, RV_CODE(CONFIG), "the tcp address is too long");
    if (nn_bind(s, address) < 0) {
        (void)rv_error_set(err, EIO, RV_CODE(CONFIG), "cannot listen at %s: %s", address, nn_strerror(nn_errno()));
        rv_error_remedy(err, "give an address of this machine as numbers, such as 127.0.0.1:7000, and a free port");
        return -EIO;
    }
    return 0;
}

static int open_rep(struct rv_router *router, unsigned i, struct rv_error *err)
{
    const Rv__RouterSetup *setup = router->setup;
    int r, fd = -1;
    size_t size = sizeof(fd);

    router->rep[i] = open_socket(NN_REP, AF_SP_RAW, err);
    if (router->rep[i] < 0)
        return router->rep[i];
    r = i == 0 ? bind_ipc(router->rep[i], setup->rpc_address, setup->rpc_gid, &router->rpc_file, err)
               : bind_tcp(router->rep[i], setup->rpc_tcp, err);
    if (r < 0)
        return r;
    if (nn_getsockopt(router->rep[i], NN_SOL_SOCKET, NN_RCVFD, &fd, &size) < 0)
        return rv_error_set(err, EIO, RV_CODE(INTERNAL), "nanomsg gives no descriptor to wait for");
    router->rep_events[i] = event_new(router->base, fd, EV_READ | EV_PERSIST, on_readable, router);
    if (!router->rep_events[i] || event_add(router->rep_events[i], NULL) < 0)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for the RPC socket");
    return 0;
}

int rv_nano_open(struct rv_router *router, struct rv_error *err)
{
    const Rv__RouterSetup *setup = router->setup;
    int r = 0;

    if (setup->rpc_tcp[0] && !setup->token[0])
        return rv_error_set(err, EINVAL, RV_CODE(CONFIG), "rpc.tcp is set, and there is no token for it");
    if (setup->rpc_address[0])
        r = open_rep(router, 0, err);
    if (r == 0 && setup->rpc_tcp[0])
        r = open_rep(router, 1, err);
    if (r < 0 || (!setup->events_address[0] && !setup->events_tcp[0]))
        return r;
    router->pub = open_socket(NN_PUB, AF_SP, err);
    if (router->pub < 0)
        return router->pub;
    if (setup->events_address[0])
        r = bind_ipc(router->pub, setup->events_address, setup->rpc_gid, &router->events_file, err);
    if (r == 0 && setup->events_tcp[0])
        r = bind_tcp(router->pub, setup->events_tcp, err);
    return r;
}

void rv_nano_close(struct rv_router *router)
{
    /* nn_close unlinks the path even if a newer router owns it, and may wait: the process' end closes better. */
    for (unsigned i = 0; i < 2; i++) {
        if (router->rep_events[i])
            event_free(router->rep_events[i]);
        router->rep_events[i] = NULL;
    }
    rv_socket_release(&router->rpc_file);
    rv_socket_release(&router->events_file);
}
