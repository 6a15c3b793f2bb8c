/*
 * Frames as a hostile peer sends them: any bytes, any number of descriptors, any spilled body.
 *
 * First byte: how many descriptors (low five bits; more than 16 are possible), whether the first is a memfd that holds
 * the rest of the input (bit 5), and whether that is sealed (bit 6). Bit 7: the frame itself is an honest Spill of that
 * memfd.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "frame.h"
#include "memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FDS_MAX 32

static int make_memory(const uint8_t *data, size_t size, int sealed)
{
    int fd;

    if (sealed)
        return rv_sealed_create("fuzz", data, size);
    fd = rv_memfd_create("fuzz", 0);
    if (fd >= 0 && size > 0 && write(fd, data, size) < 0)
        abort();
    return fd;
}

static void send_message(int socket, const uint8_t *data, size_t size, const int *fds, unsigned fd_count)
{
    char control[CMSG_SPACE(sizeof(int) * FDS_MAX)] = {0};
    struct iovec iov = {(void *)data, size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    if (fd_count) {
        struct cmsghdr *c;

        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
    }
    (void)!sendmsg(socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* What was accepted must pack again, and what was packed must arrive. */
static void send_again(int pair[2], const struct rv_frame *frame)
{
    struct rv_frame again = RV_FRAME_INIT;

    if (rv_frame_send(pair[1], frame->message, frame->fds, 0, 0) < 0)
        return;
    if (rv_frame_receive(pair[0], &again, NULL) != 1 || again.message->body_case != frame->message->body_case)
        abort();
    rv_frame_fini(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int pair[2] = {-1, -1};
    struct rv_frame frame = RV_FRAME_INIT;
    int fds[FDS_MAX], memory = -1;
    unsigned fd_count = 0, shape;
    const char *why = "";
    uint8_t outer[64];

    if (pair[0] < 0 && rv_frame_pair(pair) < 0)
        abort();
    if (size < 1)
        return 0;
    shape = *data++;
    size--;
    if (shape & 0x20)
        memory = make_memory(data, size, shape & 0x40);
    for (; fd_count < (shape & 0x1f); fd_count++)
        fds[fd_count] = fd_count == 0 && memory >= 0 ? memory : pair[0];
    if (shape & 0x80) {
        Rv__Frame spilled = RV__FRAME__INIT;
        Rv__Spill spill = RV__SPILL__INIT;

        spill.size = size;
        spilled.body_case = RV__FRAME__BODY_SPILL;
        spilled.spill = &spill;
        send_message(pair[0], outer, rv__frame__pack(&spilled, outer), fds, fd_count);
    } else {
        send_message(pair[0], data, size, fds, fd_count);
    }
    if (rv_frame_receive(pair[1], &frame, &why) == 1) {
        int taken = rv_frame_take_fd(&frame, frame.fd_count / 2);

        if (taken >= 0)
            (void)close(taken);
        send_again(pair, &frame);
        rv_frame_fini(&frame);
    }
    if (memory >= 0)
        (void)close(memory);
    return 0;
}
