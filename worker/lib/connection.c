/*
 * A connection to the supervisor: questions and answers on one socket for several threads.
 *
 * Answers are matched by id. On a plain connection the threads that wait read in turn, one at a time; on a worker's
 * connection its service thread reads. An answer that nobody waits for any more is thrown away; if it brought a lease,
 * the lease is given back.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "internal.h"

#define REPORT_MAX 512u /* bytes of what a device failed with */
#define LOOK_TURN 64u   /* frames that one look reads at most */

/* ---- its life -------------------------------------------------------------------------------------------------- */

static struct rv_connection *connection_new(int socket)
{
    struct rv_connection *c = calloc(1, sizeof(*c));
    pthread_condattr_t attributes;

    if (!c)
        return NULL;
    c->magic = RV_CONNECTION_MAGIC;
    c->fork_number = rv_fork_number();
    c->socket = socket;
    c->next_id = 1;
    atomic_init(&c->refs, 1);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&c->lock, NULL);
    (void)pthread_cond_init(&c->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    return c;
}

void rv_connection_unref(struct rv_connection *c)
{
    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (c->socket >= 0)
        (void)close(c->socket);
    (void)pthread_cond_destroy(&c->changed);
    (void)pthread_mutex_destroy(&c->lock);
    c->magic = 0;
    free(c);
}

static void kill_locked(struct rv_connection *c, int r, const char *why)
{
    if (!c->dead) {
        c->dead = r;
        c->dead_why = why;
    }
    (void)pthread_cond_broadcast(&c->changed);
}

void rv_connection_kill(struct rv_connection *c, int r, const char *why)
{
    (void)pthread_mutex_lock(&c->lock);
    kill_locked(c, r, why);
    (void)pthread_mutex_unlock(&c->lock);
}

void rv_disconnect(struct rv_connection *c)
{
    if (!c || c->magic != RV_CONNECTION_MAGIC || c->owner)
        return; /* a worker's connection ends with the worker */
    if (rv_fork_happened(c->fork_number)) {
        /* Only the child's own descriptor: the lock may be held by a thread that does not exist here. */
        (void)close(c->socket);
        c->socket = -1;
        return;
    }
    rv_connection_kill(c, -ENOTCONN, "the connection was closed by this program");
    (void)shutdown(c->socket, SHUT_RDWR); /* not closed: a tensor's deleter on another thread may be about to use it */
    rv_connection_unref(c);
}

void rv_connection_release(struct rv_connection *c)
{
    if (!c || c->magic != RV_CONNECTION_MAGIC || c->owner)
        return;
    if (rv_fork_happened(c->fork_number))
        rv_disconnect(c);
    else
        rv_connection_unref(c);
}

void rv_device_report(struct rv_connection *c, const struct rv_lease *lease, int error, const char *what)
{
    if (rv_connection_usable(c, NULL) == 0 && rv_lease_usable(lease) == 0 && lease->memory->has_device)
        rv_connection_report(c, lease->memory->uuid, error, what ? what : "");
}

int rv_connection_usable(const struct rv_connection *c, struct rv_error *err)
{
    if (!c || c->magic != RV_CONNECTION_MAGIC)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "this is not a connection");
    if (rv_fork_happened(c->fork_number)) {
        rv_error_set(err, EPERM, ERROR(NOT_PERMITTED), "a connection cannot be used in a child after fork");
        rv_error_remedy(err, "connect in the child");
        return -EPERM;
    }
    return 0;
}

static int say_dead(struct rv_error *err, int r, const char *why)
{
    rv_error_set(err, -r, r == -EPROTO ? ERROR(BAD_VERSION) : ERROR(NOT_RUNNING), "no connection to resvisor: %s", why);
    rv_error_remedy(err, r == -ENOTCONN ? "connect first" : "connect again; `resvisor status` says whether it runs");
    return r;
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

static int tell(struct rv_connection *c, Rv__Frame *frame, uint64_t timeout_us)
{
    frame->id = 0;
    return rv_frame_send(c->socket, frame, NULL, 0, timeout_us);
}

static int tell_detach(struct rv_connection *c, uint64_t lease_id, uint64_t timeout_us)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Detach detach = RV__DETACH__INIT;

    detach.lease_id = lease_id;
    frame.body_case = RV__FRAME__BODY_DETACH;
    frame.detach = &detach;
    return tell(c, &frame, timeout_us);
}

/* Locked. */
static void mark_revoked(struct rv_connection *c, uint64_t lease_id)
{
    for (struct rv_lease *lease = c->leases; lease; lease = lease->next) {
        if (lease->id == lease_id) {
            atomic_store_explicit(&lease->revoked, true, memory_order_relaxed);
            return;
        }
    }
    c->revoked[c->revoked_count++ % RV_REVOKED_MAX] = lease_id; /* its attach is still at work, or it is gone */
}

/* Gives a frame to who waits for it. Takes over the frame. Locked. */
static void dispatch(struct rv_connection *c, struct rv_frame *frame)
{
    const Rv__Frame *m = frame->message;
    struct rv_question *q = c->questions;

    while (q && (q->id != m->id || q->answer.message))
        q = q->next;
    if (m->body_case == RV__FRAME__BODY_LOAD_PROGRESS) {
        if (q) {
            q->progressed = true;
            q->bytes_done = m->load_progress->bytes_done;
            q->bytes_total = m->load_progress->bytes_total;
            if (c->owner)
                c->owner->on_alive(c->owner_context);
        }
    } else if (q) {
        q->answer = *frame;
        *frame = (struct rv_frame)RV_FRAME_INIT;
    } else if (m->body_case == RV__FRAME__BODY_ATTACH_REPLY) {
        (void)tell_detach(c, m->attach_reply->lease_id, 0); /* its asker gave up */
    } else if (m->body_case == RV__FRAME__BODY_LEASE_REVOKE) {
        mark_revoked(c, m->lease_revoke->lease_id);
    } else if (c->owner) {
        c->owner->on_frame(c->owner_context, frame);
    }
    rv_frame_fini(frame);
}

/* Reads one frame if it is there. Locked only to give it away. */
int rv_connection_read(struct rv_connection *c)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r = rv_frame_receive_partial(c->socket, &frame, NULL);

    if (r == -EAGAIN)
        return 0;
    (void)pthread_mutex_lock(&c->lock);
    if (r == 1)
        dispatch(c, &frame);
    else if (r == -EPROTO)
        kill_locked(c, -EPROTO, "the other side sent what is no frame of ours");
    else if (r == -ENOMEM)
        kill_locked(c, -ENOMEM, "no memory for a frame of it");
    else
        kill_locked(c, -ECONNRESET, "resvisor has ended, or dropped this client");
    r = c->dead ? c->dead : 1;
    (void)pthread_cond_broadcast(&c->changed);
    (void)pthread_mutex_unlock(&c->lock);
    return r;
}

void rv_connection_look(struct rv_connection *c)
{
    bool mine;

    (void)pthread_mutex_lock(&c->lock);
    mine = !c->serviced && !c->reading && !c->dead;
    if (mine)
        c->reading = true;
    (void)pthread_mutex_unlock(&c->lock);
    if (!mine)
        return;
    for (unsigned i = 0; i < LOOK_TURN; i++)
        if (rv_connection_read(c) != 1)
            break;
    (void)pthread_mutex_lock(&c->lock);
    c->reading = false;
    (void)pthread_cond_broadcast(&c->changed);
    (void)pthread_mutex_unlock(&c->lock);
}

static struct timespec to_timespec(uint64_t us)
{
    return (struct timespec){.tv_sec = (time_t)(us / RV_SEC), .tv_nsec = (long)(us % RV_SEC) * 1000};
}

/* Waits for a change, or makes one by reading, until `until_us`. Called and left locked. */
static void wait_or_read(struct rv_connection *c, uint64_t until_us)
{
    struct timespec ts;

    if (c->serviced || c->reading) {
        ts = to_timespec(until_us);
        if (until_us == UINT64_MAX)
            (void)pthread_cond_wait(&c->changed, &c->lock);
        else
            (void)pthread_cond_timedwait(&c->changed, &c->lock, &ts);
        return;
    }
    c->reading = true;
    (void)pthread_mutex_unlock(&c->lock);
    {
        struct pollfd pfd = {.fd = c->socket, .events = POLLIN};
        uint64_t now = rv_now_us();

        ts = to_timespec(until_us > now ? until_us - now : 0);
        if (ppoll(&pfd, 1, until_us == UINT64_MAX ? NULL : &ts, NULL) == 1)
            (void)rv_connection_read(c);
    }
    (void)pthread_mutex_lock(&c->lock);
    c->reading = false;
    (void)pthread_cond_broadcast(&c->changed); /* somebody else may have to read now */
}

/* ---- asking ---------------------------------------------------------------------------------------------------- */

static void question_remove(struct rv_connection *c, struct rv_question *q)
{
    struct rv_question **link = &c->questions;

    while (*link != q)
        link = &(*link)->next;
    *link = q->next;
}

/* Called and left locked; unlocked while the user's function runs. */
static int await(struct rv_connection *c, struct rv_question *q, const struct rv_wait *wait, struct rv_error *err)
{
    uint64_t call_at = wait->progress ? rv_now_us() + RV_PROGRESS_CALL_US : UINT64_MAX;

    for (;;) {
        uint64_t now;

        if (q->answer.message)
            return 0;
        if (c->dead)
            return say_dead(err, c->dead, c->dead_why);
        now = rv_now_us();
        if (now >= wait->until_us)
            return rv_error_set(err, ETIMEDOUT, ERROR(DEADLINE), "resvisor did not answer within the time limit");
        if (wait->progress && (q->progressed || now >= call_at)) {
            bool go_on;
            uint64_t done = q->bytes_done, total = q->bytes_total;

            q->progressed = false;
            (void)pthread_mutex_unlock(&c->lock);
            go_on = wait->progress(done, total, wait->context);
            (void)pthread_mutex_lock(&c->lock);
            if (!go_on)
                return rv_error_set(err, ECANCELED, ERROR(CANCELLED), "given up by the caller's progress function");
            call_at = rv_now_us() + RV_PROGRESS_CALL_US;
            continue;
        }
        wait_or_read(c, wait->until_us < call_at ? wait->until_us : call_at);
    }
}

int rv_connection_ask(struct rv_connection *c, Rv__Frame *question, const int *fds, unsigned fd_count,
                      const struct rv_wait *wait, struct rv_frame *ret_answer, struct rv_error *err)
{
    struct rv_question q = {.answer = RV_FRAME_INIT};
    uint64_t now = rv_now_us(), left = wait->until_us == UINT64_MAX ? UINT64_MAX : 0;
    int r;

    if (left == 0 && wait->until_us > now)
        left = wait->until_us - now;
    (void)pthread_mutex_lock(&c->lock);
    if (c->dead) {
        r = say_dead(err, c->dead, c->dead_why);
        (void)pthread_mutex_unlock(&c->lock);
        return r;
    }
    q.id = question->id = c->next_id++;
    q.next = c->questions;
    c->questions = &q;
    (void)pthread_mutex_unlock(&c->lock);

    r = rv_frame_send(c->socket, question, fds, fd_count, left);
    (void)pthread_mutex_lock(&c->lock);
    if (r == -EAGAIN || r == -ETIMEDOUT)
        r = rv_error_set(err, ETIMEDOUT, ERROR(DEADLINE), "resvisor does not take requests within the time limit");
    else if (r == -EPIPE || r == -ECONNRESET)
        r = 0; /* the reading side finds the end, and perhaps a last word that says why */
    else if (r < 0)
        rv_error_set(err, -r, ERROR(INTERNAL), "cannot send to resvisor: %s", strerror(-r));
    if (r == 0)
        r = await(c, &q, wait, err);
    question_remove(c, &q);
    (void)pthread_mutex_unlock(&c->lock);
    if (r == 0 && q.answer.message->body_case == RV__FRAME__BODY_ERROR) {
        r = rv_error_from_message(err, q.answer.message->error);
        if (r == 0)
            r = rv_error_set(err, EPROTO, ERROR(BAD_VERSION), "resvisor answered with an error without a code");
    }
    if (r == 0) {
        *ret_answer = q.answer;
        return 0;
    }
    if (q.answer.message && q.answer.message->body_case == RV__FRAME__BODY_ATTACH_REPLY)
        rv_connection_detach(c, q.answer.message->attach_reply->lease_id); /* came while the asker gave up */
    rv_frame_fini(&q.answer);
    return r;
}

int rv_connection_tell(struct rv_connection *c, Rv__Frame *frame)
{
    int dead;

    (void)pthread_mutex_lock(&c->lock);
    dead = c->dead;
    (void)pthread_mutex_unlock(&c->lock);
    return dead ? dead : tell(c, frame, RV_SEND_US);
}

void rv_connection_detach(struct rv_connection *c, uint64_t lease_id)
{
    int dead;

    (void)pthread_mutex_lock(&c->lock);
    dead = c->dead;
    (void)pthread_mutex_unlock(&c->lock);
    if (!dead && tell_detach(c, lease_id, RV_SEND_US) == -ETIMEDOUT)
        rv_connection_kill(c, -ECONNRESET, "resvisor takes no requests");
}

void rv_connection_report(struct rv_connection *c, const uint8_t uuid[RV_DEVICE_UUID_SIZE], int error, const char *what)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__DeviceEvent event = RV__DEVICE_EVENT__INIT;
    char shown[REPORT_MAX];
    int dead;

    event.uuid = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, (uint8_t *)uuid};
    event.error = error;
    event.what = rv_escape(shown, sizeof(shown), what, strlen(what));
    frame.body_case = RV__FRAME__BODY_DEVICE_EVENT;
    frame.device_event = &event;
    (void)pthread_mutex_lock(&c->lock);
    dead = c->dead;
    (void)pthread_mutex_unlock(&c->lock);
    if (!dead)
        (void)tell(c, &frame, 0);
}

/* ---- hello ----------------------------------------------------------------------------------------------------- */

static int say_hello(struct rv_connection *c, Rv__Role role, const char *instance, uint64_t until_us,
                     struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Hello hello = RV__HELLO__INIT;
    struct rv_frame answer = RV_FRAME_INIT;
    struct rv_wait wait = {.until_us = until_us};
    char name[RV_NAME_MAX];
    int r;

    hello.version = RV_PROTOCOL_VERSION;
    hello.role = role;
    hello.pid = (int32_t)getpid();
    hello.name = rv_escape(name, sizeof(name), program_invocation_short_name, strlen(program_invocation_short_name));
    hello.instance = (char *)instance;
    frame.body_case = RV__FRAME__BODY_HELLO;
    frame.hello = &hello;
    r = rv_connection_ask(c, &frame, NULL, 0, &wait, &answer, err);
    if (r < 0)
        return r;
    if (answer.message->body_case != RV__FRAME__BODY_HELLO_REPLY)
        r = rv_error_set(err, EPROTO, ERROR(BAD_VERSION), "the other side does not speak resvisor's protocol");
    else if (answer.message->hello_reply->version != RV_PROTOCOL_VERSION)
        r = rv_error_set(err, EPROTO, ERROR(BAD_VERSION), "resvisor speaks protocol version %u, this library %u",
                         answer.message->hello_reply->version, RV_PROTOCOL_VERSION);
    rv_frame_fini(&answer);
    return r;
}

int rv_connection_start(int socket, Rv__Role role, const char *instance, const struct rv_connection_owner *owner,
                        void *owner_context, uint64_t until_us, struct rv_connection **ret_connection,
                        struct rv_error *err)
{
    struct rv_connection *c = connection_new(socket);
    int r;

    if (!c) {
        (void)close(socket);
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a connection");
    }
    c->owner = owner;
    c->owner_context = owner_context;
    r = say_hello(c, role, instance, until_us, err);
    if (r < 0) {
        rv_connection_unref(c);
        return r;
    }
    *ret_connection = c;
    return 0;
}
