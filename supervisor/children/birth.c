/*
 * Births: a worker that a template forks, from the request to the moment when its process is a child like the others.
 *
 *   we ask          TemplateFork with the worker's control channel and log
 *   template        forks a middle, which forks the worker and exits: so the worker becomes the keeper's child. The
 *                   template has waited for the middle before it lets the worker go
 *   worker          checks that the keeper is its parent, and sends its pidfd as the first message on its channel
 *   we look         whose pidfd it is, by /proc; who sent it, by the kernel's credentials; whose child it is
 *
 * Whatever dies on the way closes the worker's channel or lets the time run out; both end the birth as failed. A
 * process that comes to life after that finds its channel closed, and ends.
 */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "children_private.h"
#include "clock.h"
#include "control/control.h"
#include "log.h"
#include "supervisor.h"

#define FORK_US (10 * RV_SEC) /* without a worker's first message: a fork takes some ms, unless the machine swaps */
#define BORN_BYTES_MAX 256u
#define BORN_CAP (16u * 1024) /* memory of the unpacked message */

struct birth {
    TAILQ_ENTRY(birth) link;
    struct rv_supervisor *supervisor;
    struct rv_template *template;
    struct rv_child *child;
    uint64_t id, incarnation, asked_us;
    int socket; /* our end of the worker's control channel */
    struct event *event;
    void (*done)(struct rv_supervisor *s, struct rv_child *child, enum rv_fork_end end, const char *why);
};

struct rv_birth_list {
    TAILQ_HEAD(, birth) all; /* at most one per worker */
    uint64_t next_id;
};

static void birth_free(struct birth *b)
{
    static const struct timeval limit = {FORK_US / RV_SEC, 0};
    struct birth *other;

    TAILQ_REMOVE(&b->supervisor->children->births->all, b, link);
    TAILQ_FOREACH (other, &b->supervisor->children->births->all, link) /* it does one after the other */
        if (other->template == b->template)
            (void)event_add(other->event, &limit);
    if (b->event)
        event_free(b->event);
    if (b->socket >= 0)
        (void)close(b->socket);
    free(b);
}

static void fail(struct birth *b, enum rv_fork_end end, const char *why)
{
    struct rv_supervisor *s = b->supervisor;
    struct rv_child *child = b->child;
    void (*done)(struct rv_supervisor *, struct rv_child *, enum rv_fork_end, const char *) = b->done;

    birth_free(b);
    done(s, child, end, why);
}

/* ---- the first message ------------------------------------------------------------------------------------------ */

/* A number in a file of /proc behind "KEY:"; -1 = not there. */
static long proc_number(const char *path, const char *key)
{
    char line[256];
    size_t n = strlen(key);
    long value = -1;
    FILE *f = fopen(path, "re");

    while (f && value < 0 && fgets(line, sizeof(line), f))
        if (strncmp(line, key, n) == 0 && line[n] == ':')
            value = strtol(line + n + 1, NULL, 10);
    if (f)
        (void)fclose(f);
    return value;
}

/* NULL = it is who it says, and the keeper's child; else what is wrong. */
static const char *check_identity(const struct rv_supervisor *s, int pidfd, const struct ucred *cred)
{
    char path[64];

    (void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
    if (cred->pid <= 0 || proc_number(path, "Pid") != cred->pid)
        return "its pidfd is not its own";
    if (cred->uid != geteuid())
        return "it has another user";
    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)cred->pid);
    if (proc_number(path, "PPid") != s->keeper_pid)
        return "it is not the keeper's child";
    return NULL;
}

static bool is_born_message(const uint8_t *bytes, size_t length)
{
    void *arena = NULL;
    const char *why;
    ProtobufCMessage *message = rv_message_unpack(&rv__frame__descriptor, bytes, length, BORN_CAP, &arena, &why);
    bool born = message && ((Rv__Frame *)message)->body_case == RV__FRAME__BODY_WORKER_BORN;

    free(arena);
    return born;
}

/* Takes descriptors and credentials out of a received message. The number of descriptors; only the first is kept. */
static unsigned take_ancillary(struct msghdr *header, int *ret_fd, struct ucred *ret_cred)
{
    unsigned count = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS)
            memcpy(ret_cred, CMSG_DATA(c), sizeof(*ret_cred));
        for (size_t at = 0; c->cmsg_type == SCM_RIGHTS && at < c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + at, sizeof(fd));
            if (count++ == 0)
                *ret_fd = fd;
            else
                (void)close(fd);
        }
    }
    return count;
}

/* The worker's first message. 1 = *ret_pidfd and *ret_pid are filled; -EAGAIN = nothing yet; 0 = no, and why. */
static int receive(const struct birth *b, int *ret_pidfd, pid_t *ret_pid, const char **ret_why)
{
    uint8_t bytes[BORN_BYTES_MAX];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(4 * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec iov = {bytes, sizeof(bytes)};
    struct msghdr header = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control)};
    struct ucred cred = {0};
    int fd = -1;
    ssize_t n = recvmsg(b->socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    unsigned fds;

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return -EAGAIN;
    fds = n > 0 ? take_ancillary(&header, &fd, &cred) : 0;
    if (n <= 0)
        *ret_why = "it ended before it had said who it is";
    else if (fds != 1 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || !is_born_message(bytes, (size_t)n))
        *ret_why = "its first message is not the expected one";
    else
        *ret_why = check_identity(b->supervisor, fd, &cred);
    if (*ret_why) {
        if (fd >= 0)
            (void)close(fd);
        return 0;
    }
    *ret_pidfd = fd;
    *ret_pid = cred.pid;
    return 1;
}

static void adopt(struct birth *b, pid_t pid, int pidfd)
{
    struct rv_supervisor *s = b->supervisor;
    struct rv_child *child = b->child;
    void (*done)(struct rv_supervisor *, struct rv_child *, enum rv_fork_end, const char *) = b->done;
    int off = 0, socket = b->socket;
    char way[128];

    (void)setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &off, sizeof(off));
    (void)snprintf(way, sizeof(way), "forked from %s in %.3f s", rv_template_name(b->template),
                   (double)(rv_now_us() - b->asked_us) / (double)RV_SEC);
    rv_template_counts_fork(b->template);
    b->socket = -1;
    rv_child_adopt(s, child,
                   &(struct rv_process){
                       .kind = RV_CHILD_WORKER,
                       .pid = pid,
                       .pidfd = pidfd,
                       .incarnation = b->incarnation,
                       .started_us = b->asked_us,
                   },
                   socket);
    birth_free(b);
    done(s, child, RV_FORK_BORN, way);
}

static struct birth *find(const struct rv_supervisor *s, uint64_t id)
{
    struct birth *b;

    TAILQ_FOREACH (b, &s->children->births->all, link)
        if (b->id == id)
            return b;
    return NULL;
}

static void look(struct birth *b)
{
    struct rv_supervisor *s = b->supervisor;
    const char *why = NULL;
    uint64_t id = b->id;
    int pidfd = -1, r;
    pid_t pid = 0;

    r = receive(b, &pidfd, &pid, &why);
    if (r == 0) { /* a template that refused has said why, and then closed its copy of the channel */
        rv_template_listen(b->template);
        b = find(s, id);
        if (!b)
            return;
    }
    if (r == -EAGAIN)
        return;
    if (r == 1) {
        adopt(b, pid, pidfd);
        return;
    }
    /* One that ends for its changed files has left the further requests unread: those go to the new one. */
    if (rv_template_is_leaving(b->template)) {
        fail(b, RV_FORK_RENEWED, why);
        return;
    }
    rv_log_warning("a worker that %s forked is not taken: %s", rv_template_name(b->template), why);
    fail(b, RV_FORK_FAILED, why);
}

static void on_event(int socket, short what, void *context)
{
    struct birth *b = context;
    struct rv_template *template = b->template;
    char reason[128];

    (void)socket;
    if (!(what & EV_TIMEOUT)) {
        look(b);
        return;
    }
    (void)snprintf(reason, sizeof(reason), "%s made no worker within %.0f s", rv_template_name(template),
                   (double)FORK_US / (double)RV_SEC);
    rv_template_is_hung(template, reason);
    fail(b, RV_FORK_FAILED, reason);
}

void rv_births_read(struct rv_supervisor *s)
{
    uint64_t last = s->children->births->next_id;

    /* By number: to look at one may end others, and start new ones. */
    for (uint64_t id = 0; id < last;) {
        struct birth *b = TAILQ_FIRST(&s->children->births->all);

        while (b && b->id <= id)
            b = TAILQ_NEXT(b, link);
        if (!b || b->id > last)
            return;
        id = b->id;
        look(b);
    }
}

bool rv_birth_is_expected(const struct rv_children *c, uint64_t incarnation)
{
    const struct birth *b;

    TAILQ_FOREACH (b, &c->births->all, link)
        if (b->incarnation == incarnation)
            return true;
    return false;
}

/* ---- the request ------------------------------------------------------------------------------------------------ */

struct request {
    Rv__TemplateFork message;
    Rv__ResourceLimit limits[RLIM_NLIMITS], *limit_pointers[RLIM_NLIMITS];
    ProtobufCBinaryData *arguments, *environment;
    const char **env;
    char directory[RV_PATH_MAX];
};

static ProtobufCBinaryData bytes_of(const char *text)
{
    return (ProtobufCBinaryData){.len = strlen(text), .data = (uint8_t *)(uintptr_t)text};
}

static ProtobufCBinaryData *list_create(const char *const *texts, size_t *ret_count)
{
    size_t n = 0;
    ProtobufCBinaryData *list;

    while (texts[n])
        n++;
    list = calloc(n + 1, sizeof(*list));
    for (size_t i = 0; list && i < n; i++)
        list[i] = bytes_of(texts[i]);
    *ret_count = n;
    return list;
}

static void request_free(struct request *r)
{
    if (!r)
        return;
    free(r->arguments);
    free(r->environment);
    free(r->env);
    free(r);
}

/* All that a process which is cloned and executed has from us. */
static struct request *request_create(const struct rv_supervisor *s, const struct rv_fork_request *asked,
                                      uint64_t incarnation)
{
    struct request *r = calloc(1, sizeof(*r));
    Rv__TemplateFork *m;
    mode_t mask = umask(077);

    (void)umask(mask);
    if (!r)
        return NULL;
    m = &r->message;
    rv__template_fork__init(m);
    r->env = rv_child_environment_create(asked->env);
    r->arguments = list_create(asked->arguments, &m->n_arguments);
    r->environment = r->env ? list_create(r->env, &m->n_environment) : NULL;
    if (!r->arguments || !r->environment || !getcwd(r->directory, sizeof(r->directory))) {
        request_free(r);
        return NULL;
    }
    m->worker = (char *)(uintptr_t)asked->name;
    m->keeper_pid = s->keeper_pid;
    m->incarnation = incarnation;
    m->arguments = r->arguments;
    m->environment = r->environment;
    m->directory = bytes_of(r->directory);
    m->umask = mask;
    m->n_fd_variables = asked->fd_count;
    m->fd_variables = (char **)(uintptr_t)asked->fd_names;
    m->limits = r->limit_pointers;
    for (unsigned i = 0; i < RLIM_NLIMITS; i++) {
        Rv__ResourceLimit *limit = &r->limits[m->n_limits];
        struct rlimit value;

        rv__resource_limit__init(limit);
        if (getrlimit((__rlimit_resource_t)i, &value) < 0)
            continue;
        limit->resource = i;
        limit->soft = value.rlim_cur;
        limit->hard = value.rlim_max;
        r->limit_pointers[m->n_limits++] = limit;
    }
    return r;
}

int rv_birth_begin(struct rv_supervisor *s, struct rv_template *t, struct rv_session *session,
                   const struct rv_fork_request *asked)
{
    static const struct timeval limit = {FORK_US / RV_SEC, 0};
    struct rv_birth_list *list = s->children->births;
    uint64_t incarnation = s->state.counters.next_incarnation;
    struct request *request = request_create(s, asked, incarnation);
    int control[2] = {-1, -1}, log[2] = {-1, -1}, on = 1, fds[4], r = 0;
    struct birth *b = calloc(1, sizeof(*b));
    Rv__Frame frame = RV__FRAME__INIT;

    if (!request || !b)
        r = -ENOMEM;
    if (r == 0)
        r = rv_frame_pair(control);
    if (r == 0 && (pipe2(log, O_CLOEXEC) < 0 || setsockopt(control[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0))
        r = -errno;
    if (r < 0)
        goto out;
    *b = (struct birth){.supervisor = s,
                        .template = t,
                        .child = asked->child,
                        .id = ++list->next_id,
                        .incarnation = incarnation,
                        .asked_us = rv_now_us(),
                        .socket = control[0],
                        .done = asked->done};
    b->event = event_new(s->base, b->socket, EV_READ | EV_PERSIST, on_event, b);
    if (!b->event || event_add(b->event, &limit) < 0) {
        if (b->event)
            event_free(b->event);
        r = -ENOMEM;
        goto out;
    }
    s->state.counters.next_incarnation++;
    TAILQ_INSERT_TAIL(&list->all, b, link);
    b = NULL;
    control[0] = -1;
    if (asked->child->log && rv_log_open_pipe(asked->child->log, log[0]) == 0)
        log[0] = -1;
    frame.id = list->next_id;
    frame.body_case = RV__FRAME__BODY_TEMPLATE_FORK;
    frame.template_fork = &request->message;
    fds[0] = control[1];
    fds[1] = log[1];
    for (unsigned i = 0; i < asked->fd_count && i + 2 < sizeof(fds) / sizeof(fds[0]); i++)
        fds[i + 2] = asked->fds[i];
    rv_session_send(session, &frame, fds, 2 + asked->fd_count); /* a dead one closes them: the birth fails */
out:
    for (int i = 0; i < 2; i++) {
        if (control[i] >= 0)
            (void)close(control[i]);
        if (log[i] >= 0)
            (void)close(log[i]);
    }
    request_free(request);
    free(b);
    return r;
}

void rv_birth_refused(struct rv_supervisor *s, uint64_t id, bool renewed, const char *why)
{
    struct birth *b = find(s, id);

    if (b)
        fail(b, renewed ? RV_FORK_RENEWED : RV_FORK_FAILED, why);
}

void rv_births_forget(struct rv_supervisor *s, const struct rv_child *child)
{
    struct birth *b;

    TAILQ_FOREACH (b, &s->children->births->all, link) {
        if (b->child != child)
            continue;
        birth_free(b);
        return;
    }
}

int rv_births_init(struct rv_supervisor *s)
{
    struct rv_birth_list *list = calloc(1, sizeof(*list));

    if (!list)
        return -ENOMEM;
    TAILQ_INIT(&list->all);
    s->children->births = list;
    return 0;
}

void rv_births_fini(struct rv_supervisor *s)
{
    struct rv_birth_list *list = s->children->births;
    struct birth *b;

    while (list && (b = TAILQ_FIRST(&list->all)))
        birth_free(b);
    free(list);
    s->children->births = NULL;
}
