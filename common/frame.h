/*
 * Frames: one protobuf Frame (proto/control.proto) per SOCK_SEQPACKET message, with descriptors.
 *
 * Used by every process on every local channel. Stateless; safe from several threads on different sockets. Nothing
 * here logs. A frame larger than RV_FRAME_MAX travels as a sealed memfd, hidden from both sides.
 */
#ifndef RV_FRAME_H
#define RV_FRAME_H

#include <stdbool.h>
#include <stdint.h>

#include "control.pb-c.h"
#include "error.h"
#include "rv_limits.h"

#define RV_FRAME_INIT \
    {                 \
        .fd_count = 0 \
    }

/* A received frame: owns its message's memory and the descriptors that nobody took. */
struct rv_frame {
    Rv__Frame *message; /* NULL = empty */
    int fds[RV_FRAME_FDS_MAX];
    unsigned fd_count;
    bool fds_lost; /* rv_frame_receive_partial only: it came with descriptors, and there was no room for them here */
    void *arena;   /* memory of message */
};

/*
 * Receives one frame without waiting (the socket may be blocking). Returns 1 = *ret_frame is filled and the caller's
 * to end by rv_frame_fini; 0 = the peer has closed, and everything that it sent before was read; -EAGAIN = nothing
 * there; -EPROTO = the peer sent what no honest peer sends (malformed, too large, truncated descriptors, bad text):
 * drop it; -ENOMEM = no memory or no descriptors left here, the frame is lost: drop it too; other negative errno = the
 * socket is dead. Every descriptor received is closed on failure. `why` (may be NULL) gets a static English reason with
 * -EPROTO and -ENOMEM. The body that body_case names is there (never NULL); messages inside it may be absent (NULL),
 * texts and bytes may be empty.
 */
int rv_frame_receive(int socket, struct rv_frame *ret_frame, const char **why);

/* The same with another limit than RV_BODY_MAX for the body of a spilled frame; beyond it is -EPROTO. 0 = none at all.
 */
int rv_frame_receive_limited(int socket, uint64_t body_max, struct rv_frame *ret_frame, const char **why);

/*
 * The same as rv_frame_receive, but a frame whose descriptors were lost because this process is at its limit is
 * delivered without any, and says so in fds_lost: for libresvisor, where only the one request must fail and the other
 * leases live on.
 */
int rv_frame_receive_partial(int socket, struct rv_frame *ret_frame, const char **why);

/* Closes descriptors left and frees the message. Safe on an empty frame and twice. */
void rv_frame_fini(struct rv_frame *frame);

/* Takes descriptor number i out of the frame: the caller's now. -1 = no such one, or taken. */
int rv_frame_take_fd(struct rv_frame *frame, unsigned i);

/*
 * Packs a message. On success *ret_bytes (free()) holds *ret_length <= RV_FRAME_MAX bytes; if the body was too large
 * for that, *ret_spill is a sealed memfd to send as the FIRST descriptor (the caller closes it), else -1.
 * -EMSGSIZE = larger than RV_BODY_MAX; -ENOMEM; other negative errno from creating the memfd.
 */
int rv_frame_pack(const Rv__Frame *message, uint8_t **ret_bytes, uint32_t *ret_length, int *ret_spill);

/* Sends packed bytes with descriptors, not waiting, no SIGPIPE. 0, -EAGAIN or a negative errno. */
int rv_frame_send_packed(int socket, const uint8_t *bytes, uint32_t length, const int *fds, unsigned fd_count);

/*
 * Packs and sends; descriptors stay the caller's. timeout_us 0 = do not wait; UINT64_MAX = as long as it takes.
 * 0, -EAGAIN, -ETIMEDOUT or a negative errno.
 */
int rv_frame_send(int socket, const Rv__Frame *message, const int *fds, unsigned fd_count, uint64_t timeout_us);

/* Waits for a frame up to timeout_us, then as rv_frame_receive; -ETIMEDOUT. For children and clients, not for loops. */
int rv_frame_wait(int socket, struct rv_frame *ret_frame, uint64_t timeout_us);

/* A pair of connected SOCK_SEQPACKET sockets, O_CLOEXEC, non-blocking off. 0 or negative errno. */
int rv_frame_pair(int ret_sockets[2]);

/*
 * Unpacks any protobuf message of an untrusted peer under a memory cap of `cap` bytes; checks text (UTF-8; a NUL cuts
 * it) and enum values of known fields in all nested messages, so handlers need not; forgets unknown fields, so that a
 * message can be passed on. NULL = refused. The result lies in *ret_arena: free(*ret_arena) ends it, never
 * protobuf_c_message_free_unpacked.
 */
ProtobufCMessage *rv_message_unpack(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes, size_t length,
                                    size_t cap, void **ret_arena, const char **why);

/* A cap for rv_message_unpack that honest messages of this length keep and hostile ones do not. */
size_t rv_message_cap(size_t length);

/* UTF-8. What is not must not be put into a message: the receiver would drop us for it. */
bool rv_text_is_valid(const char *text);

/* Fills an Error message that points into err (err must outlive it). */
void rv_error_to_message(const struct rv_error *err, Resvisor__V1__Error *ret_message);

/* Fills err from a message (texts are cut to size). NULL or code OK gives code 0. Returns a fitting negative errno. */
int rv_error_from_message(struct rv_error *err, const Resvisor__V1__Error *message);

#endif
