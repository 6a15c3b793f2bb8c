#include "link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"

static const char *const names[] = {
    [RV_STEP_FIND] = "finding devices",
    [RV_STEP_INFO] = "asking for attributes",
    [RV_STEP_OPEN] = "making a context",
    [RV_STEP_CREATE] = "creating an arena",
    [RV_STEP_COPY] = "copying",
    [RV_STEP_EXPORT] = "exporting",
    [RV_STEP_IMPORT] = "importing",
    [RV_STEP_COMPARE] = "comparing",
    [RV_STEP_POKE] = "writing to a read-only mapping",
    [RV_STEP_CLOSE] = "closing",
    [RV_STEP_LEAVE] = "ending a context",
    [RV_STEP_ORDERS] = "closing in every order",
    [RV_STEP_FREE] = "asking for free memory",
    [RV_STEP_SPEED] = "measuring",
};
_Static_assert(sizeof(names) / sizeof(names[0]) == RV_STEP_COUNT, "one name per step");

const char *rv_step_name(uint32_t step)
{
    return step < RV_STEP_COUNT ? names[step] : "?";
}

union control {
    struct cmsghdr header;
    char space[CMSG_SPACE(sizeof(int))];
};

int rv_link_send(int socket, const void *message, uint32_t size, int fd)
{
    union control control = {0};
    struct iovec part = {.iov_base = (void *)message, .iov_len = size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    struct cmsghdr *c;
    ssize_t n;

    if (fd >= 0) {
        m.msg_control = &control;
        m.msg_controllen = sizeof(control.space);
        c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    }
    do
        n = sendmsg(socket, &m, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : 0;
}

static int wait_readable(int socket, uint64_t timeout_us)
{
    uint64_t started = rv_now_us(), passed = 0;
    struct pollfd pfd = {.fd = socket, .events = POLLIN};
    int r;

    do {
        int ms = timeout_us == UINT64_MAX ? -1 : (int)((timeout_us - passed + RV_MSEC - 1) / RV_MSEC);

        r = poll(&pfd, 1, ms);
        if (r < 0 && errno != EINTR)
            return -errno;
        passed = rv_now_us() - started;
    } while (r <= 0 && passed < timeout_us);
    return r > 0 ? 0 : -ETIMEDOUT;
}

int rv_link_receive(int socket, void *ret_message, uint32_t size, int *ret_fd, uint64_t timeout_us)
{
    union control control = {0};
    struct iovec part = {.iov_base = ret_message, .iov_len = size};
    struct msghdr m = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.space)};
    int fd = -1, r = wait_readable(socket, timeout_us);
    ssize_t n;

    if (r < 0)
        return r;
    do
        n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n < 0 ? -errno : -ECONNRESET;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(int)))
            memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    if ((size_t)n != size || (m.msg_flags & MSG_TRUNC)) {
        if (fd >= 0)
            (void)close(fd);
        return -EPROTO;
    }
    *ret_fd = fd;
    return 0;
}
