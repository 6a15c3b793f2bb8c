/*
 * A peer: one SEQPACKET connection on a libevent loop, with a bounded queue of frames to send.
 *
 * Used by the supervisor and the router for every channel. The peer owns its socket. A peer that sends what no honest
 * peer sends, or does not read until its queue is full, is dropped: `on_close` is called once, and nobody else notices.
 * One thread (the loop's).
 */
#ifndef RV_PEER_H
#define RV_PEER_H

#include <stdbool.h>
#include <stdint.h>

#include "frame.h"

#define RV_PEER_QUEUE_FRAMES 256u          /* frames waiting for a slow reader */
#define RV_PEER_QUEUE_BYTES (1024u * 1024) /* their bytes */
#define RV_PEER_QUEUE_FDS 64u              /* their descriptors */
#define RV_PEER_BODY_MAX (1024u * 1024)    /* of a spilled frame: a request of RV_RPC_FRAME_MAX, and room */
#define RV_PEER_TURN 32u                   /* frames read from one peer before others get their turn */

struct event_base;
struct rv_peer;

enum rv_send_kind {
    RV_SEND_REPLY,    /* never dropped: a full queue ends the peer */
    RV_SEND_PROGRESS, /* dropped when anything is already waiting */
};

struct rv_peer_handlers {
    /* A valid frame; it may take descriptors from it. May call rv_peer_drop. The frame ends after the call. */
    void (*on_frame)(struct rv_peer *peer, struct rv_frame *frame, void *context);
    /* The connection is over; `why` says how, in words. The peer is freed after the call. Not called by _destroy. */
    void (*on_close)(struct rv_peer *peer, const char *why, void *context);
};

/*
 * Takes over `socket` (made non-blocking; closed by the peer, also when creation fails). handlers must outlive it.
 * NULL = no memory.
 */
struct rv_peer *rv_peer_create(struct event_base *base, int socket, const struct rv_peer_handlers *handlers,
                               void *context);

/* Ends it at once: queue dropped, socket closed, no callback. NULL is fine. Safe inside the peer's own callbacks. */
void rv_peer_destroy(struct rv_peer *peer);

/*
 * Queues a frame and sends what the socket takes. The descriptors are duplicated only if they must wait, and stay the
 * caller's. On failure (no memory, queue full, dead socket) the peer is dropped from the loop's next turn on for
 * RV_SEND_REPLY, and a negative errno is returned. One frame with descriptors is on its way at a time: the next waits
 * until the reader took it.
 */
int rv_peer_send(struct rv_peer *peer, const Rv__Frame *message, const int *fds, unsigned fd_count,
                 enum rv_send_kind kind);

/* Answers request `id` with an error, or with Done if err is NULL or its code is OK. */
int rv_peer_reply_error(struct rv_peer *peer, uint64_t id, const struct rv_error *err);

/* Drops the peer soon: what is queued is still tried once; on_close gets `why` (a static string). */
void rv_peer_drop(struct rv_peer *peer, const char *why);

/*
 * Largest body of a spilled frame that is read from it, in bytes; RV_PEER_BODY_MAX at first, 0 = none. To unpack
 * RV_BODY_MAX takes up to 50 ms and 256 MiB: a peer whose honest frames are smaller must not ask that of the loop.
 */
void rv_peer_limit_bodies(struct rv_peer *peer, uint64_t max);

/* Stops and resumes reading: back-pressure, or a drain before the end. */
void rv_peer_pause(struct rv_peer *peer, bool paused);

/* Reads everything that has already arrived, calling on_frame; for a peer whose process is known to be dead. */
void rv_peer_drain(struct rv_peer *peer);

/* True = the process at the other end of an AF_UNIX socket, `who` by SO_PEERCRED, is in that group; -1 = nobody is. */
struct ucred;
bool rv_peer_user_in_group(int socket, const struct ucred *who, int gid);

void *rv_peer_context(const struct rv_peer *peer);
void rv_peer_set_context(struct rv_peer *peer, void *context);
int rv_peer_socket(const struct rv_peer *peer);
bool rv_peer_is_idle(const struct rv_peer *peer); /* nothing is waiting to be sent */

/*
 * True = descriptor `fd` lies in the last part of the table, which is kept for what this process must be able to do:
 * start children, connect them, answer. What strangers cause (their connections, frames that wait for them) must not
 * stay there, or a flood of them would keep a dead worker dead.
 */
bool rv_fd_is_reserved(int fd);

/* Frames refused as malformed since the start, all peers of this process. */
uint64_t rv_peer_bad_frames(void);

#endif
