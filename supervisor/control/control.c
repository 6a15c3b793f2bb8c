/* The listener, and what a session is. */
#include "control.h"

#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "children/children.h"
#include "clock.h"
#include "config.h"
#include "log.h"
#include "pool/devices.h"
#include "pool/pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define BACKLOG 128
#define ACCEPTS_PER_TURN 16
#define ACCEPT_PAUSE_US RV_SEC /* when no descriptor is left */
#define OPERATORS_PART 8u      /* of all places, one in so many is for operators only: they must be able to stop us */

struct rv_control {
    int listener; /* -1 = closed */
    struct event *accept_event, *resume_event;
    struct rv_session_list sessions;
    bool paused_logged;
};

/* ---- sessions --------------------------------------------------------------------------------------------------- */

static void on_frame(struct rv_peer *peer, struct rv_frame *frame, void *context)
{
    (void)peer;
    rv_request_dispatch(context, frame);
}

static void on_peer_close(struct rv_peer *peer, const char *why, void *context)
{
    struct rv_session *session = context;

    (void)peer;
    if (strcmp(why, "it closed") != 0)
        rv_log_warning("%s is dropped: %s", rv_session_describe(session), why);
    if (session->child)
        rv_child_cut_off(session->supervisor, session->child);
    rv_session_destroy(session);
}

static const struct rv_peer_handlers handlers = {on_frame, on_peer_close};

static void on_hello_timeout(int fd, short what, void *context)
{
    (void)fd;
    (void)what;
    rv_peer_drop(((struct rv_session *)context)->peer, "it did not say Hello in time");
}

struct rv_session *rv_session_create(struct rv_supervisor *s, int socket, Rv__Role role, struct rv_child *child)
{
    struct rv_session *session = calloc(1, sizeof(*session));

    if (!session) {
        (void)close(socket);
        return NULL;
    }
    session->supervisor = s;
    session->role = role;
    session->child = child;
    session->uid = geteuid();
    session->pid = child ? child->process->pid : 0;
    TAILQ_INIT(&session->leases);
    session->peer = rv_peer_create(s->base, socket, &handlers, session);
    if (!session->peer) {
        free(session);
        return NULL;
    }
    rv_peer_limit_bodies(session->peer, 0); /* paths and numbers: nobody has more to say to us */
    TAILQ_INSERT_TAIL(&s->control->sessions, session, link);
    return session;
}

void rv_session_destroy(struct rv_session *session)
{
    struct rv_supervisor *s;

    if (!session)
        return;
    s = session->supervisor;
    rv_load_forget_session(s, session);
    rv_logs_forget_session(s, session);
    rv_workers_forget_session(s, session);
    rv_devices_forget_session(s, session);
    rv_lease_release_all(session);
    if (!session->child)
        s->state.counters.clients--;
    if (session->child && session->child->session == session)
        session->child->session = NULL;
    if (session->hello_timer)
        event_free(session->hello_timer);
    TAILQ_REMOVE(&s->control->sessions, session, link);
    rv_peer_destroy(session->peer);
    free(session);
}

const char *rv_session_describe(const struct rv_session *session)
{
    static const char *const children[] = {[RV_CHILD_WORKER] = "worker",
                                           [RV_CHILD_LOADER] = "loader",
                                           [RV_CHILD_ROUTER] = "router",
                                           [RV_CHILD_TEMPLATE] = "template",
                                           [RV_CHILD_DEVICE] = "process for devices"};
    static char text[RV_NAME_MAX + RV_WORKER_ID_MAX + 64];
    struct rv_worker *worker = rv_worker_of_child(session->child);

    if (worker)
        (void)snprintf(text, sizeof(text), "worker %s (pid %d)", rv_worker_name(worker), (int)session->pid);
    else if (rv_template_of_child(session->child))
        (void)snprintf(text, sizeof(text), "%s (pid %d)", rv_template_name(rv_template_of_child(session->child)),
                       (int)session->pid);
    else if (session->child)
        (void)snprintf(text, sizeof(text), "the %s (pid %d)", children[session->child->process->kind],
                       (int)session->pid);
    else
        (void)snprintf(text, sizeof(text), "client %s (pid %d, uid %d)", session->name[0] ? session->name : "?",
                       (int)session->pid, (int)session->uid);
    return text;
}

void rv_session_send(struct rv_session *session, const Rv__Frame *frame, const int *fds, unsigned fd_count)
{
    (void)rv_peer_send(session->peer, frame, fds, fd_count, RV_SEND_REPLY); /* failure drops the peer: nothing to add */
}

void rv_session_progress(struct rv_session *session, const Rv__Frame *frame)
{
    (void)rv_peer_send(session->peer, frame, NULL, 0, RV_SEND_PROGRESS);
}

void rv_session_reply(struct rv_session *session, uint64_t id, const struct rv_error *err)
{
    (void)rv_peer_reply_error(session->peer, id, err);
}

struct rv_session_list *rv_control_sessions(struct rv_supervisor *s)
{
    return &s->control->sessions;
}

/* ---- accepting -------------------------------------------------------------------------------------------------- */

/* Says why and closes. The peer may never read it: nothing waits for that. */
static void refuse(int socket, int code, const char *message)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Error error;
    struct rv_error err = {0};

    rv_error_set(&err, 0, code, "%s", message);
    rv_error_to_message(&err, &error);
    frame.body_case = RV__FRAME__BODY_ERROR;
    frame.error = &error;
    (void)rv_frame_send(socket, &frame, NULL, 0, 0);
    (void)close(socket);
}

static void admit(struct rv_supervisor *s, int socket)
{
    static const struct timeval hello = {RV_HELLO_TIMEOUT_US / RV_SEC, 0};
    struct ucred cred;
    socklen_t length = sizeof(cred);
    struct rv_session *session;
    uint32_t places = s->config->max_clients;
    bool is_operator;

    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &cred, &length) < 0) {
        (void)close(socket);
        return;
    }
    is_operator = cred.uid == geteuid() || cred.uid == 0;
    if (!is_operator && !rv_peer_user_in_group(socket, &cred, s->config->clients_gid)) {
        refuse(socket, ERROR(NOT_PERMITTED), "this user is not admitted");
        return;
    }
    if (rv_fd_is_reserved(socket)) {
        refuse(socket, ERROR(LIMIT), "too many clients are connected (limit of open files)");
        return;
    }
    if (!is_operator)
        places -= places / OPERATORS_PART;
    if (s->state.counters.clients >= places) {
        refuse(socket, ERROR(LIMIT), "too many clients are connected (clients.max)");
        return;
    }
    session = rv_session_create(s, socket, RV__ROLE__ROLE_CLIENT, NULL);
    if (!session)
        return;
    s->state.counters.clients++;
    session->pid = cred.pid;
    session->uid = cred.uid;
    session->is_operator = is_operator;
    session->hello_timer = event_new(s->base, -1, 0, on_hello_timeout, session);
    if (!session->hello_timer || event_add(session->hello_timer, &hello) < 0)
        rv_session_destroy(session);
}

static void on_accept(int listener, short what, void *context)
{
    static const struct timeval pause_time = {ACCEPT_PAUSE_US / RV_SEC, 0};
    struct rv_supervisor *s = context;

    (void)what;
    for (unsigned i = 0; i < ACCEPTS_PER_TURN; i++) {
        int socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (socket >= 0) {
            admit(s, socket);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            /* The listener stays readable: without a pause this would spin. */
            if (!s->control->paused_logged)
                rv_log_warning("no new client can be accepted: %m; tried again each second");
            s->control->paused_logged = true;
            (void)event_del(s->control->accept_event);
            (void)event_add(s->control->resume_event, &pause_time);
        }
        return;
    }
}

static void on_resume(int fd, short what, void *context)
{
    struct rv_supervisor *s = context;

    (void)fd;
    (void)what;
    s->control->paused_logged = false;
    (void)event_add(s->control->accept_event, NULL);
}

static int listen_at(const char *path, int gid)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int r, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return -errno;
    if (strlen(path) >= sizeof(address.sun_path)) {
        (void)close(fd);
        return -ENAMETOOLONG;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || chmod(path, gid >= 0 ? 0660 : 0600) < 0 ||
        (gid >= 0 && chown(path, (uid_t)-1, (gid_t)gid) < 0) || listen(fd, BACKLOG) < 0) {
        r = -errno;
        (void)close(fd);
        return r;
    }
    return fd;
}

int rv_control_init(struct rv_supervisor *s)
{
    char path[RV_PATH_MAX + 64];
    struct rv_control *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    s->control = c;
    TAILQ_INIT(&c->sessions);
    (void)snprintf(path, sizeof(path), "%s/" RV_SOCKET_CONTROL, s->config->runtime_dir);
    c->listener = listen_at(path, s->config->clients_gid);
    if (c->listener < 0) {
        rv_log_error("cannot listen at %s: %s", path, strerror(-c->listener));
        return c->listener;
    }
    c->accept_event = event_new(s->base, c->listener, EV_READ | EV_PERSIST, on_accept, s);
    c->resume_event = event_new(s->base, -1, 0, on_resume, s);
    if (!c->accept_event || !c->resume_event || event_add(c->accept_event, NULL) < 0)
        return -ENOMEM;
    return 0;
}

static void close_listener(struct rv_supervisor *s)
{
    struct rv_control *c = s->control;

    if (!c || c->listener < 0)
        return;
    if (c->accept_event)
        event_free(c->accept_event);
    if (c->resume_event)
        event_free(c->resume_event);
    c->accept_event = c->resume_event = NULL;
    (void)close(c->listener);
    c->listener = -1;
}

void rv_control_fini(struct rv_supervisor *s)
{
    struct rv_session *session;

    if (!s->control)
        return;
    close_listener(s);
    while ((session = TAILQ_FIRST(&s->control->sessions)))
        rv_session_destroy(session);
    free(s->control);
    s->control = NULL;
}
