#include "peer.h"

#include <assert.h>
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define PEER_MAGIC 0x70656572u
#define PUSH_MS_FIRST 2u /* first look whether a reader took its descriptors */
#define PUSH_MS_LAST 250u
#define GROUPS_MAX 65536u     /* of one user: the kernel's limit */
#define FDS_RESERVED_MAX 128u /* descriptors kept for this process itself: at most so many, */
#define FDS_RESERVED_PART 3u  /* and at most this part of all */
#define DRAIN_FRAMES                                                                                 \
    4096u /* a full socket holds 278 small frames; somebody may hold the other end and go on sending \
           */

struct out_frame {
    STAILQ_ENTRY(out_frame) link;
    uint8_t *bytes;
    uint32_t length;
    unsigned fd_count;
    int fds[RV_FRAME_FDS_MAX];
};

STAILQ_HEAD(out_queue, out_frame);

struct rv_peer {
    unsigned magic;
    int socket;
    struct event *read_event, *write_event;
    struct event *timer_event; /* sends again when the reader of a descriptor was slow */
    unsigned timer_ms;         /* the next wait: doubles while the reader does not read */
    struct event *close_event; /* ends the peer on the next turn */
    const struct rv_peer_handlers *handlers;
    void *context;
    struct out_queue queue;
    unsigned queued_frames, queued_fds;
    uint32_t queued_bytes;
    uint64_t body_max;       /* of a spilled frame from it */
    const char *drop_reason; /* not NULL: ends on the next turn of the loop */
    bool malformed;          /* nothing more is read from it */
    bool paused;             /* the owner wants no frames for now */
    bool send_dead;          /* it has closed: nothing can be sent, but what it sent before may still lie unread */
    unsigned depth;          /* callbacks of this peer on the stack */
    bool destroyed;          /* free it when depth is 0 */
};

static uint64_t bad_frames;

uint64_t rv_peer_bad_frames(void)
{
    return bad_frames;
}

bool rv_fd_is_reserved(int fd)
{
    struct rlimit limit;
    rlim_t kept;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
        return false;
    kept =
        limit.rlim_cur / FDS_RESERVED_PART < FDS_RESERVED_MAX ? limit.rlim_cur / FDS_RESERVED_PART : FDS_RESERVED_MAX;
    return (rlim_t)fd >= limit.rlim_cur - kept;
}

static void out_frame_free(struct out_frame *out)
{
    for (unsigned i = 0; i < out->fd_count; i++)
        (void)close(out->fds[i]);
    free(out->bytes);
    free(out);
}

static void queue_pop(struct rv_peer *peer)
{
    struct out_frame *out = STAILQ_FIRST(&peer->queue);

    STAILQ_REMOVE_HEAD(&peer->queue, link);
    peer->queued_frames--;
    peer->queued_bytes -= out->length;
    peer->queued_fds -= out->fd_count;
    out_frame_free(out);
}

static void peer_free(struct rv_peer *peer)
{
    while (!STAILQ_EMPTY(&peer->queue))
        queue_pop(peer);
    if (peer->read_event)
        event_free(peer->read_event);
    if (peer->write_event)
        event_free(peer->write_event);
    if (peer->timer_event)
        event_free(peer->timer_event);
    if (peer->close_event)
        event_free(peer->close_event);
    if (peer->socket >= 0)
        (void)close(peer->socket);
    peer->magic = 0;
    free(peer);
}

static void peer_leave(struct rv_peer *peer)
{
    if (--peer->depth == 0 && peer->destroyed)
        peer_free(peer);
}

void rv_peer_destroy(struct rv_peer *peer)
{
    if (!peer)
        return;
    assert(peer->magic == PEER_MAGIC);
    if (peer->destroyed)
        return;
    peer->destroyed = true;
    (void)event_del(peer->read_event);
    (void)event_del(peer->write_event);
    (void)event_del(peer->timer_event);
    (void)event_del(peer->close_event);
    if (peer->depth == 0)
        peer_free(peer);
}

/*
 * Sends one frame. -EAGAIN = the socket is full; -EBUSY = the reader must first take what was sent: descriptors in
 * flight count against a limit of the whole user, so there is one frame of them at a time per peer.
 */
static int send_one(struct rv_peer *peer, const uint8_t *bytes, uint32_t length, const int *fds, unsigned fd_count)
{
    int unread = 0, r;

    if (fd_count && ioctl(peer->socket, SIOCOUTQ, &unread) == 0 && unread > 0)
        return -EBUSY;
    r = rv_frame_send_packed(peer->socket, bytes, length, fds, fd_count);
    return r == -ETOOMANYREFS || r == -ENOBUFS ? -EBUSY
                                               : r; /* others' descriptors, others' memory: not this peer's fault */
}

static int send_queue(struct rv_peer *peer)
{
    struct out_frame *out;

    while ((out = STAILQ_FIRST(&peer->queue))) {
        int r = send_one(peer, out->bytes, out->length, out->fds, out->fd_count);

        if (r < 0)
            return r;
        queue_pop(peer);
        peer->timer_ms = PUSH_MS_FIRST;
    }
    return 0;
}

/* A dead socket is no reason to forget what lies in it: the reading side finds the end in its own time. */
static int send_failed(struct rv_peer *peer, int r)
{
    if (r != -EPIPE && r != -ECONNRESET) {
        rv_peer_drop(peer, "sending to it failed");
        return r;
    }
    peer->send_dead = true;
    while (!STAILQ_EMPTY(&peer->queue))
        queue_pop(peer);
    return -ENOTCONN;
}

/* Sends what can be sent and arms what has to be waited for. */
static int push(struct rv_peer *peer)
{
    int r = send_queue(peer), armed = 0;

    if (r == -EAGAIN) {
        armed = event_add(peer->write_event, NULL);
    } else if (r == -EBUSY) { /* a reader's taking is no event here: look again, ever more rarely */
        struct timeval again = {0, (suseconds_t)peer->timer_ms * 1000};

        armed = event_add(peer->timer_event, &again);
        peer->timer_ms = peer->timer_ms * 2 > PUSH_MS_LAST ? PUSH_MS_LAST : peer->timer_ms * 2;
    } else if (r < 0) {
        return send_failed(peer, r);
    }
    return armed < 0 ? send_failed(peer, -ENOMEM) : 0;
}

static void on_push(int socket, short what, void *context)
{
    (void)socket;
    (void)what;
    (void)push(context);
}

static void on_close(int socket, short what, void *context)
{
    struct rv_peer *peer = context;

    (void)socket;
    (void)what;
    peer->depth++;
    if (!peer->destroyed) {
        (void)send_queue(peer); /* the reason for the drop is often a reply that waits here */
        peer->handlers->on_close(peer, peer->drop_reason ? peer->drop_reason : "it closed", peer->context);
        rv_peer_destroy(peer);
    }
    peer_leave(peer);
}

void rv_peer_drop(struct rv_peer *peer, const char *why)
{
    if (peer->destroyed || peer->drop_reason)
        return;
    peer->drop_reason = why;
    (void)event_del(peer->read_event);
    (void)event_del(peer->write_event);
    (void)event_del(peer->timer_event);
    event_active(peer->close_event, EV_TIMEOUT, 1); /* unlike event_add it needs no memory */
}

/* One frame in. false = no more for now. */
static bool receive_one(struct rv_peer *peer)
{
    struct rv_frame frame = RV_FRAME_INIT;
    const char *why = "";
    int r = rv_frame_receive_limited(peer->socket, peer->body_max, &frame, &why);

    if (r == -EAGAIN)
        return false;
    if (r == 1) {
        peer->handlers->on_frame(peer, &frame, peer->context);
        rv_frame_fini(&frame);
        return true;
    }
    if (r == -EPROTO)
        bad_frames++;
    peer->malformed = r == -EPROTO;
    rv_peer_drop(peer, r == 0 ? "it closed" : r == -EPROTO || r == -ENOMEM ? why : "its socket is dead");
    return false;
}

static void on_read(int socket, short what, void *context)
{
    struct rv_peer *peer = context;

    (void)socket;
    (void)what;
    assert(peer->magic == PEER_MAGIC);
    peer->depth++;
    for (unsigned i = 0; i < RV_PEER_TURN && !peer->paused && !peer->destroyed && !peer->drop_reason; i++)
        if (!receive_one(peer))
            break;
    peer_leave(peer);
}

void rv_peer_drain(struct rv_peer *peer)
{
    assert(peer->magic == PEER_MAGIC);
    peer->depth++;
    for (unsigned i = 0; i < DRAIN_FRAMES && !peer->destroyed && !peer->malformed; i++)
        if (!receive_one(peer))
            break;
    peer_leave(peer);
}

struct rv_peer *rv_peer_create(struct event_base *base, int socket, const struct rv_peer_handlers *handlers,
                               void *context)
{
    struct rv_peer *peer = calloc(1, sizeof(*peer));
    int flags = fcntl(socket, F_GETFL);

    if (!peer) {
        (void)close(socket);
        return NULL;
    }
    *peer = (struct rv_peer){.magic = PEER_MAGIC,
                             .socket = socket,
                             .handlers = handlers,
                             .context = context,
                             .timer_ms = PUSH_MS_FIRST,
                             .body_max = RV_PEER_BODY_MAX};
    STAILQ_INIT(&peer->queue);
    peer->read_event = event_new(base, socket, EV_READ | EV_PERSIST, on_read, peer);
    peer->write_event = event_new(base, socket, EV_WRITE, on_push, peer);
    peer->timer_event = event_new(base, -1, 0, on_push, peer);
    peer->close_event = event_new(base, -1, 0, on_close, peer);
    if (flags < 0 || fcntl(socket, F_SETFL, flags | O_NONBLOCK) < 0 || !peer->read_event || !peer->write_event ||
        !peer->timer_event || !peer->close_event || event_add(peer->read_event, NULL) < 0) {
        peer_free(peer);
        return NULL;
    }
    return peer;
}

/* Queues packed bytes (taken over on success) with duplicates of the descriptors. */
static int enqueue(struct rv_peer *peer, uint8_t *bytes, uint32_t length, const int *fds, unsigned fd_count)
{
    struct out_frame *out;

    if (peer->queued_frames >= RV_PEER_QUEUE_FRAMES || peer->queued_bytes + length > RV_PEER_QUEUE_BYTES ||
        peer->queued_fds + fd_count > RV_PEER_QUEUE_FDS)
        return -EXFULL;
    out = calloc(1, sizeof(*out));
    if (!out)
        return -ENOMEM;
    for (unsigned i = 0; i < fd_count; i++) {
        int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);

        if (fd < 0 || rv_fd_is_reserved(fd)) {
            if (fd >= 0)
                (void)close(fd);
            out_frame_free(out);
            return -EXFULL; /* also with EMFILE: that it does not read is why it costs one */
        }
        out->fds[out->fd_count++] = fd;
    }
    out->bytes = bytes;
    out->length = length;
    STAILQ_INSERT_TAIL(&peer->queue, out, link);
    peer->queued_frames++;
    peer->queued_bytes += length;
    peer->queued_fds += fd_count;
    return 0;
}

int rv_peer_send(struct rv_peer *peer, const Rv__Frame *message, const int *fds, unsigned fd_count,
                 enum rv_send_kind kind)
{
    int all[RV_FRAME_FDS_MAX], spill = -1, r;
    unsigned count = 0;
    uint8_t *bytes = NULL;
    uint32_t length = 0;

    if (peer->destroyed || peer->drop_reason || peer->send_dead)
        return -ENOTCONN;
    if (kind == RV_SEND_PROGRESS && !STAILQ_EMPTY(&peer->queue))
        return 0;
    r = rv_frame_pack(message, &bytes, &length, &spill);
    if (r == 0 && fd_count + (spill >= 0) > RV_FRAME_FDS_MAX)
        r = -E2BIG;
    if (r < 0)
        goto out;
    if (spill >= 0)
        all[count++] = spill;
    if (fd_count)
        memcpy(all + count, fds, fd_count * sizeof(int));
    count += fd_count;
    r = -EAGAIN;
    if (STAILQ_EMPTY(&peer->queue)) /* the common case costs no queue entry and no duplicates */
        r = send_one(peer, bytes, length, all, count);
    if (r != -EAGAIN && r != -EBUSY)
        goto out;
    if (kind == RV_SEND_PROGRESS) {
        r = 0;
        goto out;
    }
    r = enqueue(peer, bytes, length, all, count);
    if (r == 0) {
        bytes = NULL;
        r = push(peer);
        if (r == -ENOTCONN)
            goto closed;
    }
out:
    if (r == -EXFULL)
        rv_peer_drop(peer, "it does not read");
    else if (r < 0 && (kind == RV_SEND_REPLY || r != -ENOMEM))
        r = send_failed(peer, r);
closed:
    if (spill >= 0)
        (void)close(spill);
    free(bytes);
    return r;
}

int rv_peer_reply_error(struct rv_peer *peer, uint64_t id, const struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Resvisor__V1__Error error;
    Rv__Done done = RV__DONE__INIT;

    frame.id = id;
    if (err && err->code) {
        rv_error_to_message(err, &error);
        frame.body_case = RV__FRAME__BODY_ERROR;
        frame.error = &error;
    } else {
        frame.body_case = RV__FRAME__BODY_DONE;
        frame.done = &done;
    }
    return rv_peer_send(peer, &frame, NULL, 0, RV_SEND_REPLY);
}

void rv_peer_pause(struct rv_peer *peer, bool paused)
{
    if (peer->destroyed || peer->drop_reason)
        return;
    peer->paused = paused;
    if (paused)
        (void)event_del(peer->read_event);
    else if (event_add(peer->read_event, NULL) < 0)
        rv_peer_drop(peer, "no memory");
}

void rv_peer_limit_bodies(struct rv_peer *peer, uint64_t max)
{
    peer->body_max = max;
}

bool rv_peer_user_in_group(int socket, const struct ucred *who, int gid)
{
    gid_t *groups;
    socklen_t size = 0;
    bool found = false;

    if (gid < 0)
        return false;
    if (who->gid == (gid_t)gid)
        return true;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, NULL, &size) == 0 || errno != ERANGE ||
        size > GROUPS_MAX * sizeof(gid_t))
        return false;
    groups = malloc(size);
    if (groups && getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups, &size) == 0)
        for (unsigned i = 0; i < size / sizeof(gid_t) && !found; i++)
            found = groups[i] == (gid_t)gid;
    free(groups);
    return found;
}

void *rv_peer_context(const struct rv_peer *peer)
{
    return peer->context;
}

void rv_peer_set_context(struct rv_peer *peer, void *context)
{
    peer->context = context;
}

int rv_peer_socket(const struct rv_peer *peer)
{
    return peer->socket;
}

bool rv_peer_is_idle(const struct rv_peer *peer)
{
    return STAILQ_EMPTY(&peer->queue);
}
