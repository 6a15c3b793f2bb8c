/* resvisor-router: started by the supervisor with descriptor 3; see router.h. */
#include <errno.h>
#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "front/front.h"
#include "log.h"
#include "router.h"

#define CONTROL_FD 3
#define HANDSHAKE_US (10 * RV_SEC)
#define EXIT_FAILED 1

/* ---- frames of the supervisor ----------------------------------------------------------------------------------- */

static void on_channel(struct rv_router *router, struct rv_frame *frame)
{
    rv_workers_channel(router, frame);
}

static void on_gone(struct rv_router *router, struct rv_frame *frame)
{
    rv_workers_gone(router, frame->message->worker_gone);
}

static void on_worker_drain(struct rv_router *router, struct rv_frame *frame)
{
    rv_workers_drain(router, frame->message->worker_drain);
}

static void on_type_state(struct rv_router *router, struct rv_frame *frame)
{
    const Rv__TypeState *state = frame->message->type_state;
    struct rv_type *type = rv_types_find(router, state->type);

    if (!type)
        return;
    type->failed = strcmp(state->state, "FAILED") == 0;
    (void)rv_escape(type->detail, sizeof(type->detail), state->detail, strlen(state->detail));
    rv_workers_dispatch(router, type);
}

static void on_drain(struct rv_router *router, struct rv_frame *frame)
{
    (void)frame;
    router->stopping = true;
    rv_jobs_end_queued(router);
}

static void on_answer(struct rv_router *router, struct rv_frame *frame)
{
    rv_ask_answered(router, frame->message);
}

static void on_log_lines(struct rv_router *router, struct rv_frame *frame)
{
    rv_ask_log_lines(router, frame->message);
}

static void on_nothing(struct rv_router *router, struct rv_frame *frame)
{
    (void)router;
    (void)frame;
}

static const struct {
    Rv__Frame__BodyCase body;
    void (*handle)(struct rv_router *router, struct rv_frame *frame);
} frames[] = {
    {RV__FRAME__BODY_ROUTER_CHANNEL, on_channel},
    {RV__FRAME__BODY_WORKER_GONE, on_gone},
    {RV__FRAME__BODY_WORKER_DRAIN, on_worker_drain},
    {RV__FRAME__BODY_TYPE_STATE, on_type_state},
    {RV__FRAME__BODY_DRAIN, on_drain},
    {RV__FRAME__BODY_STATUS, on_answer},
    {RV__FRAME__BODY_MODEL_STATUS, on_answer},
    {RV__FRAME__BODY_DEVICE_LIST, on_answer},
    {RV__FRAME__BODY_ERROR, on_answer},
    {RV__FRAME__BODY_DONE, on_answer},
    {RV__FRAME__BODY_LOG_LINES, on_log_lines},
    {RV__FRAME__BODY_LOAD_PROGRESS, on_nothing},
};

static void on_frame(struct rv_peer *peer, struct rv_frame *frame, void *context)
{
    (void)peer;
    for (unsigned i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
        if (frames[i].body == frame->message->body_case) {
            frames[i].handle(context, frame);
            return;
        }
    }
    rv_log_warning("the supervisor sent frame %d, which the router does not know", (int)frame->message->body_case);
}

static void on_close(struct rv_peer *peer, const char *why, void *context)
{
    struct rv_router *router = context;

    (void)peer;
    router->supervisor = NULL;
    if (strcmp(why, "it closed") != 0) {
        rv_log_error("the supervisor's connection ended: %s; exiting", why);
        router->exit_code = EXIT_FAILED;
    }
    (void)event_base_loopbreak(router->base);
}

static void on_term(int number, short what, void *context)
{
    struct rv_router *router = context;

    (void)number;
    (void)what;
    (void)event_base_loopbreak(router->base);
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

static int control_descriptor(void)
{
    const char *text = getenv("RESVISOR_CONTROL_FD");
    int type, fd = text ? atoi(text) : CONTROL_FD;
    socklen_t size = sizeof(type);

    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) < 0 || type != SOCK_SEQPACKET)
        return -ENOTSOCK;
    return fd;
}

/* Hello, HelloReply, RouterSetup. */
static int handshake(struct rv_router *router, int fd)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    char instance[32];
    int r;

    (void)snprintf(instance, sizeof(instance), "router-%d", getpid());
    hello.version = RV_PROTOCOL_VERSION;
    hello.role = RV__ROLE__ROLE_ROUTER;
    hello.pid = getpid();
    hello.name = "resvisor-router";
    hello.instance = instance;
    frame.id = 1;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    r = rv_frame_send(fd, &frame, NULL, 0, HANDSHAKE_US);
    if (r == 0)
        r = rv_frame_wait(fd, &answer, HANDSHAKE_US);
    if (r <= 0)
        return r == 0 ? -ECONNRESET : r;
    r = answer.message->body_case == RV__FRAME__BODY_HELLO_REPLY &&
                answer.message->hello_reply->version == RV_PROTOCOL_VERSION
            ? 0
            : -EPROTO;
    rv_frame_fini(&answer);
    if (r < 0)
        return r;
    r = rv_frame_wait(fd, &router->setup_frame, HANDSHAKE_US);
    if (r <= 0)
        return r == 0 ? -ECONNRESET : r;
    if (router->setup_frame.message->body_case != RV__FRAME__BODY_ROUTER_SETUP)
        return -EPROTO;
    router->setup = router->setup_frame.message->router_setup;
    return 0;
}

static int start_parts(struct rv_router *router, struct rv_error *err)
{
    static int (*const parts[])(struct rv_router *) = {rv_events_init, rv_results_init, rv_workers_init, rv_jobs_init,
                                                       rv_ledger_init};
    int r = 0;

    rv_peer_limit_bodies(router->supervisor, RV_BODY_MAX); /* its status names every model */
    for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]) && r == 0; i++)
        r = parts[i](router);
    if (r < 0)
        return rv_error_set(err, -r, RV_CODE(INTERNAL), "cannot set up: %s", strerror(-r));
    r = rv_local_open(router, err);
    if (r == 0)
        r = rv_nano_open(router, err);
    if (r == 0)
        r = rv_http_open(router, err);
    return r < 0 ? r : rv_front_open(router, err);
}

static void stop_parts(struct rv_router *router)
{
    struct rv_parked *parked;

    rv_front_stop(router);
    rv_http_close(router);
    rv_nano_close(router);
    rv_local_close(router);
    while ((parked = TAILQ_FIRST(&router->parked)))
        rv_parked_free(parked);
    rv_workers_fini(router);
    if (router->buckets)
        rv_jobs_fini(router);
    rv_front_close(router); /* jobs and workers have left it */
    rv_results_fini(router);
    rv_events_fini(router);
    rv_ledger_fini(router);
    rv_peer_destroy(router->supervisor);
}

void rv_router_say_ready(struct rv_router *router)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__RouterReady ready = RV__ROUTER_READY__INIT;

    frame.body_case = RV__FRAME__BODY_ROUTER_READY;
    frame.router_ready = &ready;
    (void)rv_peer_send(router->supervisor, &frame, NULL, 0, RV_SEND_REPLY);
}

static int run(struct rv_router *router, int fd)
{
    static const struct rv_peer_handlers handlers = {on_frame, on_close};
    struct event *term = evsignal_new(router->base, SIGTERM, on_term, router);
    struct rv_error err = {0};

    router->supervisor = rv_peer_create(router->base, fd, &handlers, router);
    if (!term || event_add(term, NULL) < 0 || !router->supervisor) {
        rv_log_error("no memory to start");
        router->exit_code = EXIT_FAILED;
    } else if (start_parts(router, &err) < 0) {
        rv_log_error("cannot start: %s%s%s", err.message, err.remedy[0] ? "; " : "", err.remedy);
        router->exit_code = EXIT_FAILED;
    } else {
        router->open = true;
        if (!router->settling)
            rv_router_say_ready(router);
        (void)event_base_dispatch(router->base);
    }
    stop_parts(router);
    if (term)
        event_free(term);
    return router->exit_code;
}

int main(void)
{
    static struct rv_router router = {.rep = {-1, -1}, .pub = -1, .listener = -1};
    int r, fd;

    rv_log_init("router", RV_LOG_INFO);
    (void)signal(SIGPIPE, SIG_IGN);
    TAILQ_INIT(&router.all);
    TAILQ_INIT(&router.ended);
    TAILQ_INIT(&router.kept);
    TAILQ_INIT(&router.workers);
    TAILQ_INIT(&router.parked);
    TAILQ_INIT(&router.locals);
    fd = control_descriptor();
    if (fd < 0) {
        rv_log_error("this program is started by `resvisor start`, with a control socket as descriptor %d", CONTROL_FD);
        return EXIT_FAILED;
    }
    r = handshake(&router, fd);
    router.base = r == 0 ? event_base_new() : NULL;
    if (router.base) {
        r = run(&router, fd);
        event_base_free(router.base);
    } else {
        rv_log_error("the supervisor's greeting failed: %s", strerror(r < 0 ? -r : ENOMEM));
        r = EXIT_FAILED;
    }
    rv_frame_fini(&router.setup_frame);
    return r;
}
