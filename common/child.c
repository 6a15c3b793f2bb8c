#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define CONTROL_FD_DEFAULT 3
#define OOM_SCORE "500" /* before the supervisor, whose end would cost every model */
#define WATCH_STACK (64u * 1024)

static atomic_bool finished;
static int watched_socket;

void rv_child_set_up(void)
{
    static const struct rlimit no_core = {0, 0};
    int fd;

    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGXFSZ, SIG_IGN); /* a `ulimit -f` counts for arenas too: an error, not a death */
    (void)setrlimit(RLIMIT_CORE, &no_core);
    fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = write(fd, OOM_SCORE, sizeof(OOM_SCORE) - 1);

        (void)n; /* where it is not allowed, the kernel chooses as it likes */
        (void)close(fd);
    }
}

void rv_child_no_new_privileges(void)
{
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

int rv_child_socket(void)
{
    const char *text = getenv("RESVISOR_CONTROL_FD");
    int fd = text ? atoi(text) : CONTROL_FD_DEFAULT;

    return fd > 2 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 ? fd : -1;
}

/* A thread of its own: the main thread may be inside a call that lasts. */
static void *watch(void *context)
{
    struct pollfd pfd = {.fd = watched_socket, .events = POLLRDHUP};

    (void)context;
    while (poll(&pfd, 1, -1) < 0 && errno == EINTR)
        ;
    _exit(atomic_load(&finished) ? 0 : 1);
}

int rv_child_watch(int socket)
{
    pthread_attr_t attributes;
    pthread_t thread;
    int r;

    watched_socket = socket;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, WATCH_STACK);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    r = pthread_create(&thread, &attributes, watch, NULL);
    (void)pthread_attr_destroy(&attributes);
    return -r;
}

void rv_child_finished(void)
{
    atomic_store(&finished, true);
}

int rv_child_send(int socket, const Rv__Frame *message, const int *fds, unsigned fd_count)
{
    return rv_frame_send(socket, message, fds, fd_count, UINT64_MAX);
}

int rv_child_wait(int socket, Rv__Frame__BodyCase kind, struct rv_frame *ret_frame)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r = rv_frame_wait(socket, &frame, UINT64_MAX);

    if (r == 0)
        return -ECONNRESET;
    if (r < 0)
        return r;
    if (frame.message->body_case != kind) {
        rv_frame_fini(&frame);
        return -ECANCELED;
    }
    *ret_frame = frame;
    return 0;
}

int rv_child_hello(int socket, Rv__Role role, const char *name)
{
    struct rv_frame frame = RV_FRAME_INIT;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    int r;

    hello.version = RV_PROTOCOL_VERSION;
    hello.role = role;
    hello.pid = (int32_t)getpid();
    hello.name = (char *)name;
    message.body_case = RV__FRAME__BODY_HELLO;
    message.hello = &hello;
    message.id = 1;
    r = rv_child_send(socket, &message, NULL, 0);
    if (r < 0)
        return r;
    r = rv_child_wait(socket, RV__FRAME__BODY_HELLO_REPLY, &frame);
    if (r < 0)
        return r;
    r = frame.message->hello_reply->version == RV_PROTOCOL_VERSION ? 0 : -EPROTO;
    rv_frame_fini(&frame);
    return r;
}

void rv_child_error(int socket, uint64_t id, const struct rv_error *err)
{
    Rv__Frame message = RV__FRAME__INIT;
    Resvisor__V1__Error body;

    rv_error_to_message(err, &body);
    message.id = id;
    message.body_case = RV__FRAME__BODY_ERROR;
    message.error = &body;
    (void)rv_child_send(socket, &message, NULL, 0);
}
