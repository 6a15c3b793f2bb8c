/* The command line's socket: the same requests as by nanomsg, in frames, from peers whose user is known. */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "log.h"
#include "router.h"

#define LOCAL_PEERS_MAX 64u
#define BACKLOG 16
#define OPERATOR_PLACES 8u /* of these, for operators only */
#define HELLO_TIMEOUT_S 10 /* a peer that says nothing gives its place back */

enum access { REFUSED, CLIENT, OPERATOR };

static enum access access_of(const struct rv_router *router, int socket)
{
    struct ucred who;
    socklen_t size = sizeof(who);

    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) < 0)
        return REFUSED;
    if (who.uid == geteuid() || who.uid == 0)
        return OPERATOR;
    if (rv_peer_user_in_group(socket, &who, router->setup->control_gid))
        return CLIENT;
    return REFUSED;
}

static void refuse(struct rv_peer *peer, uint64_t id, int code, const char *message)
{
    struct rv_error err = {0};

    (void)rv_error_set(&err, EACCES, code, "%s", message);
    (void)rv_peer_reply_error(peer, id, &err);
    rv_peer_drop(peer, message);
}

static void greet(struct rv_local_peer *local, const Rv__Frame *message)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;
    char instance[32];

    if (message->body_case != RV__FRAME__BODY_HELLO) {
        refuse(local->peer, message->id, RV_CODE(BAD_REQUEST), "the first frame must be Hello");
        return;
    }
    if (message->hello->version != RV_PROTOCOL_VERSION) {
        refuse(local->peer, message->id, RV_CODE(BAD_VERSION), "this router speaks another protocol version");
        return;
    }
    (void)snprintf(instance, sizeof(instance), "%llu", (unsigned long long)local->router->setup->epoch);
    reply.version = RV_PROTOCOL_VERSION;
    reply.pid = getpid();
    reply.instance = instance;
    reply.operator_ = local->is_operator;
    frame.id = message->id;
    frame.body_case = RV__FRAME__BODY_HELLO_REPLY;
    frame.hello_reply = &reply;
    local->greeted = true;
    (void)event_del(local->hello_timer);
    (void)rv_peer_send(local->peer, &frame, NULL, 0, RV_SEND_REPLY);
}

static void on_frame(struct rv_peer *peer, struct rv_frame *frame, void *context)
{
    struct rv_local_peer *local = context;
    const Rv__Frame *message = frame->message;
    struct rv_asker asker = {.local = true, .socket = -1, .peer = local, .frame_id = message->id};

    if (!local->greeted || message->body_case == RV__FRAME__BODY_HELLO)
        greet(local, message);
    else if (message->body_case == RV__FRAME__BODY_RPC_REQUEST)
        rv_rpc_request(local->router, &asker, message->rpc_request);
    else
        refuse(peer, message->id, RV_CODE(BAD_REQUEST), "only requests of rpc.proto may be sent here");
}

static void free_local(struct rv_local_peer *local)
{
    struct rv_router *router = local->router;

    rv_parked_peer_gone(router, local);
    TAILQ_REMOVE(&router->locals, local, link);
    router->local_count--;
    if (local->hello_timer)
        event_free(local->hello_timer);
    free(local);
}

static void on_hello_timeout(int socket, short what, void *context)
{
    (void)socket;
    (void)what;
    rv_peer_drop(((struct rv_local_peer *)context)->peer, "it did not say Hello in time");
}

static void on_close(struct rv_peer *peer, const char *why, void *context)
{
    (void)peer;
    (void)why;
    free_local(context);
}

/* Nothing is kept that could hold a place, and nothing waits for the peer to read it. */
static void say_full(int socket)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Error error;
    struct rv_error err = {0};

    (void)rv_error_set(&err, EBUSY, RV_CODE(LIMIT), "%u local clients are connected to the router already",
                       LOCAL_PEERS_MAX);
    rv_error_to_message(&err, &error);
    frame.body_case = RV__FRAME__BODY_ERROR;
    frame.error = &error;
    (void)rv_frame_send(socket, &frame, NULL, 0, 0);
    (void)close(socket);
}

static void add_peer(struct rv_router *router, int socket)
{
    static const struct rv_peer_handlers handlers = {on_frame, on_close};
    static const struct timeval hello = {HELLO_TIMEOUT_S, 0};
    enum access access = access_of(router, socket);
    struct rv_local_peer *local = NULL;

    if (router->local_count < (access == OPERATOR ? LOCAL_PEERS_MAX : LOCAL_PEERS_MAX - OPERATOR_PLACES))
        local = calloc(1, sizeof(*local));
    if (!local) {
        say_full(socket);
        return;
    }
    local->router = router;
    local->is_operator = access == OPERATOR;
    TAILQ_INSERT_TAIL(&router->locals, local, link);
    router->local_count++;
    local->hello_timer = event_new(router->base, -1, 0, on_hello_timeout, local);
    local->peer = rv_peer_create(router->base, socket, &handlers, local);
    if (!local->peer || !local->hello_timer || event_add(local->hello_timer, &hello) < 0) {
        rv_peer_destroy(local->peer);
        free_local(local);
    } else if (access == REFUSED) {
        refuse(local->peer, 0, RV_CODE(NOT_PERMITTED),
               "only the owner of resvisor, root and members of clients.group "
               "are admitted");
    }
}

static void on_pause_end(int socket, short what, void *context)
{
    struct rv_router *router = context;

    (void)socket;
    (void)what;
    (void)event_add(router->listen_event, NULL);
}

static void on_connection(int listener, short what, void *context)
{
    static const struct timeval pause = {1, 0};
    struct rv_router *router = context;
    int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    (void)what;
    if (socket >= 0) {
        add_peer(router, socket);
        return;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        /* The connection stays in the backlog, so the loop would spin: look away for a moment. */
        rv_log_warning("cannot accept a connection: %s; trying again in 1 s", strerror(errno));
        (void)event_del(router->listen_event);
        (void)event_add(router->listen_pause, &pause);
    }
}

int rv_local_open(struct rv_router *router, struct rv_error *err)
{
    const char *path = router->setup->control_path;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    mode_t before;
    int r;

    if (path[0] == '\0')
        return 0;
    r = rv_socket_claim(path, err);
    if (r < 0)
        return r;
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    router->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (router->listener < 0)
        return rv_error_set(err, errno, RV_CODE(INTERNAL), "cannot make a socket: %s", strerror(errno));
    before = umask(077);
    r = bind(router->listener, (const struct sockaddr *)&address, sizeof(address)) < 0 ? errno : 0;
    (void)umask(before);
    if (r == 0)
        r = listen(router->listener, BACKLOG) < 0 ? errno : 0;
    if (r > 0)
        return rv_error_set(err, r, RV_CODE(FILE), "cannot listen at %s: %s", path, strerror(r));
    r = rv_socket_adopt(&router->local_file, path, router->setup->control_gid, err);
    if (r < 0)
        return r;
    router->listen_event = event_new(router->base, router->listener, EV_READ | EV_PERSIST, on_connection, router);
    router->listen_pause = event_new(router->base, -1, 0, on_pause_end, router);
    if (!router->listen_event || !router->listen_pause || event_add(router->listen_event, NULL) < 0)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory to listen at %s", path);
    return 0;
}

void rv_local_close(struct rv_router *router)
{
    struct rv_local_peer *local;

    while ((local = TAILQ_FIRST(&router->locals))) {
        rv_peer_destroy(local->peer);
        free_local(local);
    }
    if (router->listen_event)
        event_free(router->listen_event);
    if (router->listen_pause)
        event_free(router->listen_pause);
    if (router->listener >= 0)
        (void)close(router->listener);
    router->listener = -1;
    rv_socket_release(&router->local_file);
}
