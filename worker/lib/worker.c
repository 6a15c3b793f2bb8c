/* The worker: its start, its service thread, its end. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"

#define ENV_FD "RESVISOR_CONTROL_FD"
#define ENV_WORKER "RESVISOR_WORKER"
#define ENV_TYPE "RESVISOR_TYPE"

#define SERVICE_STACK (512u * 1024) /* bytes; thread-local memory of executors' libraries comes out of it */
#define HELLO_US (10 * RV_SEC)
#define FLUSH_US RV_SEC /* at the end: so long for the router to take the last results */
#define CONTROL_TURN 64u
#define DETAIL_MAX 1024 /* bytes of what a worker says of itself */

void rv_worker_wake(const struct rv_worker *w)
{
    uint64_t one = 1;

    (void)!write(w->event_fd, &one, sizeof(one)); /* can only fail when it is set already */
}

/* ---- control frames (called with the connection's lock held) ---------------------------------------------------- */

static void on_ping(struct rv_worker *w, struct rv_frame *frame)
{
    Rv__Frame answer = RV__FRAME__INIT;
    Rv__Pong pong = RV__PONG__INIT;
    char job_id[RV_NAME_MAX + 1] = "";
    const struct rv_job *job;

    if (!w->connection)
        return; /* a ping before the answer to Hello: not from an honest supervisor */
    (void)pthread_mutex_lock(&w->lock);
    job = rv_worker_job(w);
    if (job) {
        uint64_t now = rv_now_us(), alive = atomic_load_explicit(&job->alive_us, memory_order_relaxed);

        (void)snprintf(job_id, sizeof(job_id), "%s", job->submit->job_id);
        pong.quiet_ms = now > alive ? (now - alive) / RV_MSEC : 0;
    }
    (void)pthread_mutex_unlock(&w->lock);
    pong.sequence = frame->message->ping->sequence;
    pong.job_id = job_id;
    answer.id = frame->message->id;
    answer.body_case = RV__FRAME__BODY_PONG;
    answer.pong = &pong;
    (void)rv_frame_send(w->connection->socket, &answer, NULL, 0, 0);
}

static void on_drain(struct rv_worker *w, struct rv_frame *frame)
{
    (void)frame;
    (void)pthread_mutex_lock(&w->lock);
    w->draining = true;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->lock);
}

static void on_router_channel(struct rv_worker *w, struct rv_frame *frame)
{
    int socket = rv_frame_take_fd(frame, 0);

    if (socket >= 0)
        rv_channel_replace(w, socket, frame->message->router_channel);
}

static const struct {
    Rv__Frame__BodyCase body;
    void (*handle)(struct rv_worker *w, struct rv_frame *frame);
} handlers[] = {
    {RV__FRAME__BODY_PING, on_ping},
    {RV__FRAME__BODY_DRAIN, on_drain},
    {RV__FRAME__BODY_ROUTER_CHANNEL, on_router_channel},
};

static void on_frame(void *context, struct rv_frame *frame)
{
    for (unsigned i = 0; i < sizeof(handlers) / sizeof(handlers[0]); i++)
        if (handlers[i].body == frame->message->body_case)
            handlers[i].handle(context, frame);
}

static void on_alive(void *context)
{
    struct rv_worker *w = context;

    (void)pthread_mutex_lock(&w->lock);
    if (w->running)
        atomic_store_explicit(&w->running->alive_us, rv_now_us(), memory_order_relaxed);
    (void)pthread_mutex_unlock(&w->lock);
}

static const struct rv_connection_owner owner = {on_frame, on_alive};

void rv_worker_count_load(void *context, uint64_t load_us, uint64_t read_bytes)
{
    struct rv_worker *w = context;

    (void)pthread_mutex_lock(&w->lock);
    if (w->running) {
        w->running->load_us += load_us;
        w->running->read_bytes += read_bytes;
    }
    (void)pthread_mutex_unlock(&w->lock);
}

/* ---- the service thread ---------------------------------------------------------------------------------------- */

/* Without a supervisor there is nobody to work for: the job is told to stop, and rv_worker_next says goodbye. */
static void control_is_over(struct rv_worker *w)
{
    struct rv_job *job;

    (void)pthread_mutex_lock(&w->lock);
    w->ended = true;
    job = rv_worker_job(w);
    if (job)
        atomic_store_explicit(&job->cancelled, true, memory_order_relaxed);
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->lock);
}

/* How to wait for room in the router's channel: for POLLOUT, or by looking again, ever more rarely. */
static int how_to_wait(struct rv_worker *w, struct pollfd *router)
{
    int r, timeout = -1;

    r = rv_results_push(w);
    router->fd = w->router;
    router->events = POLLIN;
    if (r == -EAGAIN) {
        router->events |= POLLOUT;
    } else if (r == -EBUSY) {
        timeout = (int)w->router_wait_ms;
        w->router_wait_ms *= 2;
        if (w->router_wait_ms > RV_ROUTER_WAIT_MS_LAST)
            w->router_wait_ms = RV_ROUTER_WAIT_MS_LAST;
    } else {
        w->router_wait_ms = RV_ROUTER_WAIT_MS_FIRST;
    }
    return timeout;
}

static void *serve(void *context)
{
    struct rv_worker *w = context;
    struct pollfd fds[3] = {{.fd = w->event_fd, .events = POLLIN}, {.fd = w->connection->socket, .events = POLLIN}};

    for (;;) {
        bool closing;
        int timeout;

        (void)pthread_mutex_lock(&w->lock);
        closing = w->closing;
        timeout = how_to_wait(w, &fds[2]);
        (void)pthread_mutex_unlock(&w->lock);
        if (closing)
            return NULL;
        if (poll(fds, 3, timeout) < 0)
            continue;
        if (fds[0].revents) {
            uint64_t count;

            (void)!read(w->event_fd, &count, sizeof(count));
        }
        if (fds[1].revents) {
            int r = 1;

            for (unsigned i = 0; i < CONTROL_TURN && r > 0; i++)
                r = rv_connection_read(w->connection);
            if (r < 0) {
                fds[1].fd = -1;
                control_is_over(w);
            }
        }
        if (fds[2].revents)
            rv_channel_read(w);
    }
}

static int start_thread(struct rv_worker *w)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    int r;

    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, SERVICE_STACK);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's own threads' business */
    r = pthread_create(&w->thread, &attributes, serve, w);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return -r;
}

/* ---- open and close -------------------------------------------------------------------------------------------- */

/* The control descriptor from the environment, made O_CLOEXEC. */
static int control_socket(struct rv_error *err)
{
    const char *text = getenv(ENV_FD);
    char *end = NULL;
    int type = 0, flags;
    socklen_t size = sizeof(type);
    long fd;

    if (!text || !*text) {
        rv_error_set(err, ENOTCONN, ERROR(USAGE), "%s is not set: this program was not started by resvisor", ENV_FD);
        rv_error_remedy(err, "name it in the configuration (types.NAME) and run `resvisor start`");
        return -ENOTCONN;
    }
    errno = 0;
    fd = strtol(text, &end, 10);
    if (errno || *end || fd < 0 || fd > INT_MAX)
        return rv_error_set(err, EINVAL, ERROR(USAGE), "%s is no descriptor number", ENV_FD);
    if (getsockopt((int)fd, SOL_SOCKET, SO_TYPE, &type, &size) < 0 || type != SOCK_SEQPACKET)
        return rv_error_set(err, EINVAL, ERROR(USAGE), "descriptor %ld of %s is not resvisor's socket", fd, ENV_FD);
    flags = fcntl((int)fd, F_GETFD);
    if (flags < 0 || fcntl((int)fd, F_SETFD, flags | FD_CLOEXEC) < 0)
        return rv_error_set(err, errno, ERROR(INTERNAL), "cannot set up descriptor %ld: %s", fd, strerror(errno));
    return (int)fd;
}

static char *environment_text(const char *name)
{
    const char *text = getenv(name);

    return strdup(text && rv_text_is_valid(text) ? text : "");
}

static void worker_free(struct rv_worker *w)
{
    rv_results_fini(w);
    rv_job_destroy(w->pending);
    if (w->router >= 0)
        (void)close(w->router);
    if (w->event_fd >= 0)
        (void)close(w->event_fd);
    (void)pthread_cond_destroy(&w->changed);
    (void)pthread_mutex_destroy(&w->lock);
    free(w->id);
    free(w->type);
    w->magic = 0;
    free(w);
}

static struct rv_worker *worker_new(void)
{
    struct rv_worker *w = calloc(1, sizeof(*w));
    pthread_condattr_t attributes;

    if (!w)
        return NULL;
    w->magic = RV_WORKER_MAGIC;
    w->fork_number = rv_fork_number();
    w->router = -1;
    w->router_wait_ms = RV_ROUTER_WAIT_MS_FIRST;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&w->lock, NULL);
    (void)pthread_cond_init(&w->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    w->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->id = environment_text(ENV_WORKER);
    w->type = environment_text(ENV_TYPE);
    if (w->event_fd < 0 || !w->id || !w->type) {
        worker_free(w);
        return NULL;
    }
    return w;
}

/* A worker's connection has an owner, so rv_disconnect leaves it alone: it ends here. */
static void end_connection(struct rv_connection *c)
{
    (void)pthread_mutex_lock(&c->lock);
    if (!c->dead) {
        c->dead = -ENOTCONN;
        c->dead_why = "the worker was closed";
    }
    (void)pthread_cond_broadcast(&c->changed);
    (void)pthread_mutex_unlock(&c->lock);
    (void)shutdown(c->socket, SHUT_RDWR); /* not closed: a tensor's deleter on another thread may be about to use it */
    rv_connection_unref(c);
}

int rv_worker_open(struct rv_worker **ret_worker, struct rv_failure *err)
{
    struct rv_error error = {0};
    struct rv_worker *w = NULL;
    int r, fd;

    if (!ret_worker)
        return rv_failure_from(err, &error, -EINVAL);
    fd = control_socket(&error);
    if (fd < 0)
        return rv_failure_from(err, &error, fd);
    w = worker_new();
    if (!w) {
        r = rv_error_set(&error, ENOMEM, ERROR(NO_MEMORY), "no memory or descriptors for a worker");
        return rv_failure_from(err, &error, r);
    }
    r = rv_connection_start(fd, RV__ROLE__ROLE_WORKER, w->id, &owner, w, rv_now_us() + HELLO_US, &w->connection,
                            &error);
    if (r < 0)
        goto out;
    w->connection->serviced = true;
    r = start_thread(w);
    if (r < 0) {
        rv_error_set(&error, -r, ERROR(NO_MEMORY), "cannot start the service thread: %s", strerror(-r));
        end_connection(w->connection);
        goto out;
    }
    *ret_worker = w;
    w = NULL;
out:
    if (w)
        worker_free(w);
    return rv_failure_from(err, &error, r);
}

static int worker_usable(const struct rv_worker *w)
{
    if (!w || w->magic != RV_WORKER_MAGIC)
        return -EINVAL;
    return rv_fork_happened(w->fork_number) ? -EPERM : 0;
}

/* Gives the router a moment to take the last results. Locked. */
static void flush(struct rv_worker *w)
{
    uint64_t until = rv_now_us() + FLUSH_US;
    struct timespec ts = {.tv_sec = (time_t)(until / RV_SEC), .tv_nsec = (long)(until % RV_SEC) * 1000};

    while (w->router >= 0 && rv_results_unsent(w) > 0)
        if (pthread_cond_timedwait(&w->changed, &w->lock, &ts) != 0)
            break;
}

void rv_worker_close(struct rv_worker *w)
{
    if (worker_usable(w) < 0)
        return;
    (void)pthread_mutex_lock(&w->lock);
    w->left = true;
    flush(w);
    w->closing = true;
    (void)pthread_mutex_unlock(&w->lock);
    rv_worker_wake(w);
    (void)pthread_join(w->thread, NULL);
    end_connection(w->connection);
    rv_job_destroy(w->running);
    worker_free(w);
}

struct rv_connection *rv_worker_connection(struct rv_worker *w)
{
    return w->connection;
}

const char *rv_worker_id(const struct rv_worker *w)
{
    return w->id;
}

const char *rv_worker_type(const struct rv_worker *w)
{
    return w->type;
}

/* ---- ready and next -------------------------------------------------------------------------------------------- */

/* The names of all leases, at most `max`. The leases must stay: the caller's thread is the one that detaches. */
static size_t lease_names(struct rv_connection *c, char **names, size_t max)
{
    size_t count = 0;

    (void)pthread_mutex_lock(&c->lock);
    for (struct rv_lease *lease = c->leases; lease && count < max; lease = lease->next)
        names[count++] = lease->model;
    (void)pthread_mutex_unlock(&c->lock);
    return count;
}

int rv_worker_ready(struct rv_worker *w, const char *detail, struct rv_failure *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__WorkerReady ready = RV__WORKER_READY__INIT;
    char *names[RV_TYPE_MODELS_MAX], shown[DETAIL_MAX];
    struct rv_error error = {0};
    int r = worker_usable(w);

    if (r < 0) {
        rv_error_set(&error, -r, ERROR(NOT_PERMITTED), "this is not a worker of this process");
        return rv_failure_from(err, &error, r);
    }
    if (detail)
        ready.detail = rv_escape(shown, sizeof(shown), detail, strlen(detail));
    ready.models = names;
    ready.n_models = lease_names(w->connection, names, RV_TYPE_MODELS_MAX);
    frame.body_case = RV__FRAME__BODY_WORKER_READY;
    frame.worker_ready = &ready;
    r = rv_connection_tell(w->connection, &frame);
    if (r < 0)
        rv_error_set(&error, -r, ERROR(NOT_RUNNING), "cannot tell resvisor that the worker is ready: %s", strerror(-r));
    return rv_failure_from(err, &error, r);
}

int rv_worker_next(struct rv_worker *w, struct rv_job **ret_job)
{
    int r = worker_usable(w);

    if (r < 0)
        return r;
    (void)pthread_mutex_lock(&w->lock);
    while (!w->running && !w->pending && !w->draining && !w->ended)
        (void)pthread_cond_wait(&w->changed, &w->lock);
    if (w->running) {
        r = -EBUSY; /* the last job was neither finished nor failed */
    } else if (w->pending && !w->ended) {
        w->running = w->pending;
        w->pending = NULL;
        *ret_job = w->running;
        r = 1;
    } else {
        w->left = true;
        r = 0;
    }
    (void)pthread_mutex_unlock(&w->lock);
    return r;
}
