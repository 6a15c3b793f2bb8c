#include "frame.h"

#include <errno.h>
#include <poll.h>
#include <stdalign.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "memory.h"

#define FDS_SPACE CMSG_SPACE(sizeof(int) * RV_FRAME_FDS_MAX)

/* ---- unpacking under a cap ------------------------------------------------------------------------------------- */

/* A bump allocator: protobuf-c has no limit of its own, so 64 KiB of empty repeated messages would become megabytes. */
struct arena {
    size_t used, size;
    alignas(max_align_t) uint8_t bytes[];
};

static void *arena_alloc(void *data, size_t size)
{
    struct arena *a = data;
    size_t rounded = (size + alignof(max_align_t) - 1) / alignof(max_align_t) * alignof(max_align_t);

    if (rounded < size || rounded > a->size - a->used)
        return NULL;
    a->used += rounded;
    return a->bytes + a->used - rounded;
}

static void arena_free(void *data, void *pointer)
{
    (void)data;
    (void)pointer; /* the arena goes as a whole */
}

bool rv_text_is_valid(const char *text)
{
    /* protobuf-c ends strings at the wire length with a NUL of its own, so an inner NUL only cuts the text. The escape
     * function knows UTF-8: text is valid when nothing but control characters had to be escaped. */
    const unsigned char *p = (const unsigned char *)text;
    char out[16];

    while (*p) {
        size_t n = *p < 0x80 ? 1 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : 4;

        if (n > 1) {
            if (strnlen((const char *)p, n) < n)
                return false;
            rv_escape(out, sizeof(out), p, n);
            if (memcmp(out, p, n) != 0)
                return false;
        }
        p += n;
    }
    return true;
}

static bool enum_is_known(const ProtobufCEnumDescriptor *descriptor, int value)
{
    return protobuf_c_enum_descriptor_get_value(descriptor, value) != NULL;
}

static bool message_is_valid(ProtobufCMessage *message, const char **why);

static bool value_is_valid(const ProtobufCFieldDescriptor *field, const void *member, const char **why)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING:
        if (rv_text_is_valid(*(char *const *)member))
            return true;
        *why = "text is not UTF-8";
        return false;
    case PROTOBUF_C_TYPE_ENUM:
        if (enum_is_known(field->descriptor, *(const int *)member))
            return true;
        *why = "unknown enum value";
        return false;
    case PROTOBUF_C_TYPE_MESSAGE: {
        ProtobufCMessage *sub = *(ProtobufCMessage *const *)member;

        return !sub || message_is_valid(sub, why);
    }
    default:
        return true;
    }
}

static size_t element_size(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_ENUM:
        return sizeof(int);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    default:
        return 0; /* nothing to check in these */
    }
}

/*
 * Depth is bounded: no message of ours contains itself (a unit test walks the descriptors). Unknown fields are
 * forgotten: protobuf-c would pack them again, and not always to what it accepts itself, so that whoever passes a
 * client's message on would be dropped for it.
 */
static bool message_is_valid(ProtobufCMessage *message, const char **why)
{
    const ProtobufCMessageDescriptor *d = message->descriptor;

    message->n_unknown_fields = 0;
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &d->fields[i];
        const uint8_t *member = (const uint8_t *)message + field->offset;
        size_t size = element_size(field->type);

        if (size == 0)
            continue;
        if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
            uint32_t chosen;

            memcpy(&chosen, (const uint8_t *)message + field->quantifier_offset, sizeof(chosen));
            if (chosen != field->id)
                continue;
        }
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t count;
            const uint8_t *elements;

            memcpy(&count, (const uint8_t *)message + field->quantifier_offset, sizeof(count));
            memcpy(&elements, member, sizeof(elements));
            for (size_t k = 0; k < count; k++)
                if (!value_is_valid(field, elements + k * size, why))
                    return false;
        } else if (!value_is_valid(field, member, why)) {
            return false;
        }
    }
    return true;
}

size_t rv_message_cap(size_t length)
{
    return RV_UNPACK_BASE + RV_UNPACK_FACTOR * length;
}

ProtobufCMessage *rv_message_unpack(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes, size_t length,
                                    size_t cap, void **ret_arena, const char **why)
{
    struct arena *arena = malloc(sizeof(*arena) + cap);
    ProtobufCAllocator allocator = {arena_alloc, arena_free, arena};
    ProtobufCMessage *message;
    const char *reason = "malformed protobuf, or too much of it";

    if (!arena) {
        if (why)
            *why = "no memory";
        return NULL;
    }
    arena->used = 0;
    arena->size = cap;
    message = protobuf_c_message_unpack(descriptor, &allocator, length, bytes);
    if (!message || !message_is_valid(message, &reason)) {
        if (why)
            *why = reason;
        free(arena);
        return NULL;
    }
    *ret_arena = arena;
    return message;
}

/* ---- receiving ------------------------------------------------------------------------------------------------- */

/* Collects the descriptors of a message. false = the kernel had to drop some, or there are too many. */
static bool take_descriptors(struct msghdr *msg, int *fds, unsigned *ret_count)
{
    unsigned count = 0;
    bool ok = !(msg->msg_flags & MSG_CTRUNC);

    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t n;

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            if (count < RV_FRAME_FDS_MAX) {
                fds[count++] = fd;
            } else {
                (void)close(fd);
                ok = false;
            }
        }
    }
    *ret_count = count;
    return ok;
}

static Rv__Frame *unpack(const uint8_t *bytes, size_t length, void **ret_arena, const char **why)
{
    Rv__Frame *frame =
        (Rv__Frame *)rv_message_unpack(&rv__frame__descriptor, bytes, length, rv_message_cap(length), ret_arena, why);

    if (frame && frame->body_case == RV__FRAME__BODY__NOT_SET) {
        *why = "a frame without a body";
        free(*ret_arena);
        *ret_arena = NULL;
        return NULL;
    }
    return frame;
}

/* Copies sealed memory. Not a mapping: to touch a hole of a peer's memfd would allocate the page in our name. */
static int read_sealed(int fd, uint8_t *buffer, uint64_t size)
{
    uint64_t done = 0;

    while (done < size) {
        ssize_t n = pread(fd, buffer + done, size - done, (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        done += (uint64_t)n;
    }
    return 0;
}

/* Replaces a Spill frame by the frame in its memfd, the first descriptor. */
static int unspill(struct rv_frame *frame, uint64_t body_max, const char **why)
{
    uint64_t size = frame->message->spill->size;
    void *arena = NULL;
    uint8_t *bytes;
    Rv__Frame *inner;

    if (size > body_max) {
        *why = "a larger body than anybody sends here";
        return -EPROTO;
    }
    if (frame->fd_count == 0 || size == 0 || rv_sealed_check(frame->fds[0], size) < 0) {
        *why = "a spilled frame without its sealed memory";
        return -EPROTO;
    }
    bytes = malloc(size);
    if (!bytes || read_sealed(frame->fds[0], bytes, size) < 0) {
        free(bytes);
        *why = "no memory for a spilled frame";
        return -ENOMEM;
    }
    inner = unpack(bytes, size, &arena, why);
    free(bytes);
    if (inner && inner->body_case == RV__FRAME__BODY_SPILL) {
        *why = "a spilled frame inside a spilled frame";
        free(arena);
        inner = NULL;
    }
    if (!inner)
        return -EPROTO;
    (void)close(frame->fds[0]);
    frame->fd_count--;
    memmove(frame->fds, frame->fds + 1, frame->fd_count * sizeof(int));
    free(frame->arena);
    frame->arena = arena;
    frame->message = inner;
    return 0;
}

/*
 * recvmsg, not waiting. A peer that closed with unread data of ours leaves ECONNRESET, which the kernel reports before
 * what the peer had sent, and once only. Its last frames count (a dead worker's results), so ask again.
 */
static ssize_t receive_message(int socket, struct msghdr *msg)
{
    size_t control_size = msg->msg_controllen;
    bool reset = false;

    for (;;) {
        ssize_t n = recvmsg(socket, msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

        if (n >= 0)
            return n;
        if (errno == ECONNRESET && !reset)
            reset = true;
        else if (errno != EINTR)
            return errno == EWOULDBLOCK ? -EAGAIN : -errno;
        msg->msg_controllen = control_size;
    }
}

/* What a received message is: 0, or why it is not one of ours. */
static int judge(struct rv_frame *frame, const struct msghdr *msg, const uint8_t *bytes, size_t length,
                 uint64_t body_max, const char **why)
{
    if (frame->fds_lost && frame->fd_count >= RV_FRAME_FDS_MAX) {
        *why = "more than 16 descriptors in one frame";
        return -EPROTO;
    }
    if ((msg->msg_flags & MSG_TRUNC) || length > RV_FRAME_MAX) {
        *why = "a frame over 64 KiB";
        return -EPROTO;
    }
    frame->message = unpack(bytes, length, &frame->arena, why);
    if (!frame->message)
        return -EPROTO;
    if (frame->message->body_case != RV__FRAME__BODY_SPILL)
        return 0;
    if (frame->fds_lost) {
        *why = "the descriptors of a spilled frame were lost: this process is at its limit";
        return -ENOMEM;
    }
    return unspill(frame, body_max, why);
}

static int receive(int socket, uint64_t body_max, struct rv_frame *ret_frame, const char **why)
{
    alignas(struct cmsghdr) char control[FDS_SPACE];
    /* Not on the stack and not thread-local: libresvisor runs on other people's threads, whose stacks may be small. */
    uint8_t *buffer = malloc(RV_FRAME_MAX + 1);
    struct iovec iov = {buffer, RV_FRAME_MAX + 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct rv_frame frame = RV_FRAME_INIT;
    const char *reason = "";
    ssize_t n;
    int r = 0;

    if (!buffer) {
        if (why)
            *why = "no memory";
        return -ENOMEM;
    }
    n = receive_message(socket, &msg);
    if (n < 0) {
        r = (int)n;
        goto out;
    }
    frame.fds_lost = !take_descriptors(&msg, frame.fds, &frame.fd_count);
    if (n == 0 && frame.fd_count == 0 && !frame.fds_lost)
        goto out; /* closed; an empty message looks the same and ends the peer as well */
    r = judge(&frame, &msg, buffer, (size_t)n, body_max, &reason);
    if (r < 0) {
        rv_frame_fini(&frame);
        if (why)
            *why = reason;
        goto out;
    }
    if (frame.fds_lost) { /* an incomplete list is worse than none */
        for (unsigned i = 0; i < frame.fd_count; i++)
            (void)close(frame.fds[i]);
        frame.fd_count = 0;
    }
    *ret_frame = frame;
    r = 1;
out:
    free(buffer);
    return r;
}

int rv_frame_receive_partial(int socket, struct rv_frame *ret_frame, const char **why)
{
    return receive(socket, RV_BODY_MAX, ret_frame, why);
}

int rv_frame_receive(int socket, struct rv_frame *ret_frame, const char **why)
{
    return rv_frame_receive_limited(socket, RV_BODY_MAX, ret_frame, why);
}

int rv_frame_receive_limited(int socket, uint64_t body_max, struct rv_frame *ret_frame, const char **why)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r = receive(socket, body_max, &frame, why);

    if (r == 1 && frame.fds_lost) {
        rv_frame_fini(&frame);
        if (why)
            *why = "descriptors were lost: this process is at its limit";
        return -ENOMEM;
    }
    if (r == 1)
        *ret_frame = frame;
    return r;
}

void rv_frame_fini(struct rv_frame *frame)
{
    for (unsigned i = 0; i < frame->fd_count; i++)
        if (frame->fds[i] >= 0)
            (void)close(frame->fds[i]);
    frame->fd_count = 0;
    free(frame->arena);
    frame->arena = NULL;
    frame->message = NULL;
}

int rv_frame_take_fd(struct rv_frame *frame, unsigned i)
{
    int fd;

    if (i >= frame->fd_count)
        return -1;
    fd = frame->fds[i];
    frame->fds[i] = -1;
    return fd;
}

/* Waits until the socket is ready, an error of it included, or the time is over: -ETIMEDOUT. */
static int wait_for(int socket, short events, uint64_t start, uint64_t timeout_us)
{
    struct pollfd pfd = {.fd = socket, .events = events};
    uint64_t spent = rv_now_us() - start;
    struct timespec ts = {0};

    if (timeout_us != UINT64_MAX) {
        if (spent >= timeout_us)
            return -ETIMEDOUT;
        ts.tv_sec = (time_t)((timeout_us - spent) / RV_SEC);
        ts.tv_nsec = (long)((timeout_us - spent) % RV_SEC) * 1000;
    }
    if (ppoll(&pfd, 1, timeout_us == UINT64_MAX ? NULL : &ts, NULL) < 0 && errno != EINTR)
        return -errno;
    return 0;
}

int rv_frame_wait(int socket, struct rv_frame *ret_frame, uint64_t timeout_us)
{
    uint64_t start = rv_now_us();

    for (;;) {
        int r = rv_frame_receive(socket, ret_frame, NULL);

        if (r != -EAGAIN)
            return r;
        r = wait_for(socket, POLLIN, start, timeout_us);
        if (r < 0)
            return r;
    }
}

/* ---- sending --------------------------------------------------------------------------------------------------- */

int rv_frame_pack(const Rv__Frame *message, uint8_t **ret_bytes, uint32_t *ret_length, int *ret_spill)
{
    size_t size = rv__frame__get_packed_size(message);
    int spill = -1;
    uint8_t *bytes;

    if (size > RV_BODY_MAX)
        return -EMSGSIZE;
    bytes = malloc(size ? size : 1);
    if (!bytes)
        return -ENOMEM;
    rv__frame__pack(message, bytes);
    if (size > RV_FRAME_MAX) {
        Rv__Spill body = RV__SPILL__INIT;
        Rv__Frame outer = RV__FRAME__INIT;

        spill = rv_sealed_create("resvisor-frame", bytes, size);
        if (spill < 0) {
            free(bytes);
            return spill;
        }
        body.size = size;
        outer.id = message->id;
        outer.body_case = RV__FRAME__BODY_SPILL;
        outer.spill = &body;
        size = rv__frame__pack(&outer, bytes);
    }
    *ret_bytes = bytes;
    *ret_length = (uint32_t)size;
    *ret_spill = spill;
    return 0;
}

int rv_frame_send_packed(int socket, const uint8_t *bytes, uint32_t length, const int *fds, unsigned fd_count)
{
    alignas(struct cmsghdr) char control[FDS_SPACE];
    struct iovec iov = {(void *)bytes, length};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t n;

    if (fd_count > RV_FRAME_FDS_MAX)
        return -E2BIG;
    if (fd_count > 0) {
        struct cmsghdr *c;

        memset(control, 0, sizeof(control));
        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    }
    do {
        n = sendmsg(socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EWOULDBLOCK ? -EAGAIN : -errno;
    return 0;
}

int rv_frame_send(int socket, const Rv__Frame *message, const int *fds, unsigned fd_count, uint64_t timeout_us)
{
    int all[RV_FRAME_FDS_MAX], spill = -1, r;
    unsigned count = 0;
    uint8_t *bytes = NULL;
    uint32_t length = 0;
    uint64_t start = rv_now_us();

    r = rv_frame_pack(message, &bytes, &length, &spill);
    if (r < 0)
        return r;
    if (fd_count + (spill >= 0) > RV_FRAME_FDS_MAX) {
        r = -E2BIG;
        goto out;
    }
    if (spill >= 0)
        all[count++] = spill;
    if (fd_count)
        memcpy(all + count, fds, fd_count * sizeof(int));
    count += fd_count;
    while ((r = rv_frame_send_packed(socket, bytes, length, all, count)) == -EAGAIN && timeout_us > 0) {
        r = wait_for(socket, POLLOUT, start, timeout_us);
        if (r < 0)
            break;
    }
out:
    if (spill >= 0)
        (void)close(spill);
    free(bytes);
    return r;
}

int rv_frame_pair(int ret_sockets[2])
{
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ret_sockets) < 0 ? -errno : 0;
}

/* ---- errors ---------------------------------------------------------------------------------------------------- */

void rv_error_to_message(const struct rv_error *err, Resvisor__V1__Error *ret_message)
{
    resvisor__v1__error__init(ret_message);
    ret_message->code = (Resvisor__V1__ErrorCode)err->code;
    ret_message->message = (char *)err->message;
    ret_message->remedy = (char *)err->remedy;
}

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* The errno that says most; -EIO for those without a row. */
static const struct {
    int code, number;
} errno_of[] = {
    {CODE(BAD_REQUEST), EINVAL},
    {CODE(BAD_VERSION), EPROTO},
    {CODE(UNAUTHENTICATED), EACCES},
    {CODE(NOT_PERMITTED), EACCES},
    {CODE(NO_SUCH_MODEL), ENOENT},
    {CODE(NO_SUCH_TYPE), ENOENT},
    {CODE(NO_SUCH_JOB), ENOENT},
    {CODE(NO_SUCH_RESULT), ENOENT},
    {CODE(JOB_EXISTS), EEXIST},
    {CODE(QUEUE_FULL), EBUSY},
    {CODE(DEADLINE), ETIMEDOUT},
    {CODE(CANCELLED), ECANCELED},
    {CODE(MODEL_INVALID), EBADMSG},
    {CODE(MODEL_CHANGED), ESTALE},
    {CODE(MODEL_IN_USE), EBUSY},
    {CODE(MODEL_PINNED), EBUSY},
    {CODE(FILE), ENOENT},
    {CODE(OVER_BUDGET), ENOSPC},
    {CODE(NO_MEMORY), ENOMEM},
    {CODE(TOO_LARGE), EMSGSIZE},
    {CODE(LIMIT), EBUSY},
    {CODE(SHUTTING_DOWN), ESHUTDOWN},
    {CODE(NOT_READY), EBUSY},
    {CODE(NOT_RUNNING), ECONNREFUSED},
    {CODE(ALREADY_RUNNING), EEXIST},
    {CODE(UNSUPPORTED), EOPNOTSUPP},
    {CODE(CONFIG), EINVAL},
    {CODE(USAGE), EINVAL},
    {CODE(PORT_TAKEN), EADDRINUSE},
    {CODE(FILE_DAMAGED), EBADMSG},
    {CODE(NO_SUCH_DEVICE), ENODEV},
    {CODE(DEVICE), EIO},
    {CODE(DEVICE_LOST), ENODEV},
};

int rv_error_from_message(struct rv_error *err, const Resvisor__V1__Error *message)
{
    if (!message || message->code == RESVISOR__V1__ERROR_CODE__ERROR_OK) {
        *err = (struct rv_error){0};
        return 0;
    }
    err->code = (int)message->code;
    /* Cut between characters: half of one would make our own next message malformed. */
    (void)rv_escape(err->message, sizeof(err->message), message->message, strlen(message->message));
    (void)rv_escape(err->remedy, sizeof(err->remedy), message->remedy, strlen(message->remedy));
    for (unsigned i = 0; i < sizeof(errno_of) / sizeof(errno_of[0]); i++)
        if (errno_of[i].code == err->code)
            return -errno_of[i].number;
    return -EIO;
}
