/* Frames over real sockets: descriptors, spilled bodies, and everything that no honest peer sends. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "frame.h"
#include "memory.h"

static int open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;

    assert_non_null(dir);
    while (readdir(dir))
        count++;
    (void)closedir(dir);
    return count;
}

struct fixture {
    int pair[2];
    int before;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    if (!f || rv_frame_pair(f->pair) < 0)
        return -1;
    f->before = open_descriptors();
    *state = f;
    return 0;
}

/* Every test must leave as many descriptors as it found. */
static int teardown(void **state)
{
    struct fixture *f = *state;
    int now = open_descriptors();
    int expected = f->before;

    for (int i = 0; i < 2; i++) {
        if (f->pair[i] >= 0)
            (void)close(f->pair[i]);
        else
            expected--;
    }
    free(f);
    return now == expected ? 0 : -1;
}

static void close_end(struct fixture *f, int end)
{
    (void)close(f->pair[end]);
    f->pair[end] = -1;
}

static void make_drain(Rv__Frame *frame, Rv__Drain *drain)
{
    rv__frame__init(frame);
    rv__drain__init(drain);
    frame->body_case = RV__FRAME__BODY_DRAIN;
    frame->drain = drain;
}

static void send_drain(int socket, uint64_t id)
{
    Rv__Frame frame;
    Rv__Drain drain;

    make_drain(&frame, &drain);
    frame.id = id;
    assert_int_equal(rv_frame_send(socket, &frame, NULL, 0, 0), 0);
}

/* Sends any bytes with any number of descriptors (copies of fd). */
static void send_raw(int socket, const void *bytes, size_t length, int fd, unsigned fd_count)
{
    char control[CMSG_SPACE(sizeof(int) * 64)] = {0};
    struct iovec iov = {(void *)bytes, length};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    assert_true(fd_count <= 64);
    if (fd_count) {
        struct cmsghdr *c;

        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        for (unsigned i = 0; i < fd_count; i++)
            memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(int));
    }
    assert_int_equal(sendmsg(socket, &msg, 0), (ssize_t)length);
}

static void a_frame_arrives_with_its_descriptors(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    Rv__Frame frame;
    Rv__Drain drain;
    int fds[RV_FRAME_FDS_MAX], taken;

    for (unsigned i = 0; i < RV_FRAME_FDS_MAX; i++)
        fds[i] = f->pair[0];
    make_drain(&frame, &drain);
    frame.id = UINT64_MAX;
    assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), -EAGAIN);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, fds, RV_FRAME_FDS_MAX, 0), 0);
    assert_int_equal(rv_frame_wait(f->pair[1], &got, 0), 1);
    assert_true(got.message->id == UINT64_MAX);
    assert_int_equal(got.message->body_case, RV__FRAME__BODY_DRAIN);
    assert_int_equal(got.fd_count, RV_FRAME_FDS_MAX);
    taken = rv_frame_take_fd(&got, 3);
    assert_true(taken >= 0 && (fcntl(taken, F_GETFD) & FD_CLOEXEC));
    assert_int_equal(rv_frame_take_fd(&got, 3), -1);
    assert_int_equal(rv_frame_take_fd(&got, RV_FRAME_FDS_MAX), -1);
    (void)close(taken);
    rv_frame_fini(&got);
    rv_frame_fini(&got);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, fds, RV_FRAME_FDS_MAX + 1, 0), -E2BIG);
}

static void a_large_body_travels_as_sealed_memory(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LogLines lines = RV__LOG_LINES__INIT;
    size_t sizes[] = {RV_FRAME_MAX - 100, RV_FRAME_MAX, 5 * 1024 * 1024};

    frame.body_case = RV__FRAME__BODY_LOG_LINES;
    frame.log_lines = &lines;
    for (unsigned i = 0; i < 3; i++) {
        lines.text.len = sizes[i];
        lines.text.data = malloc(sizes[i]);
        assert_non_null(lines.text.data);
        memset(lines.text.data, 'a' + (int)i, sizes[i]);
        frame.id = 7 + i;
        assert_int_equal(rv_frame_send(f->pair[0], &frame, &f->pair[0], 1, 0), 0);
        assert_int_equal(rv_frame_wait(f->pair[1], &got, 0), 1);
        assert_int_equal(got.fd_count, 1);
        assert_true(got.message->id == 7 + i);
        assert_true(got.message->log_lines->text.len == sizes[i]);
        assert_memory_equal(got.message->log_lines->text.data, lines.text.data, sizes[i]);
        rv_frame_fini(&got);
        free(lines.text.data);
    }
    lines.text.len = RV_BODY_MAX;
    lines.text.data = calloc(1, RV_BODY_MAX);
    assert_non_null(lines.text.data);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, NULL, 0, 0), -EMSGSIZE);
    free(lines.text.data);
}

/* Announces `size` bytes in a memfd. */
static void send_spill(int socket, uint64_t size, int fd)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Spill spill = RV__SPILL__INIT;

    spill.size = size;
    frame.body_case = RV__FRAME__BODY_SPILL;
    frame.spill = &spill;
    assert_int_equal(rv_frame_send(socket, &frame, fd < 0 ? NULL : &fd, fd < 0 ? 0 : 1, 0), 0);
}

static void expect_refused(struct fixture *f)
{
    struct rv_frame got = RV_FRAME_INIT;
    const char *why = NULL;

    assert_int_equal(rv_frame_receive(f->pair[1], &got, &why), -EPROTO);
    assert_true(why && *why);
    assert_null(got.message);
    /* what came after it is not harmed: dropping the peer is the caller's decision */
    send_drain(f->pair[0], 1);
    assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), 1);
    rv_frame_fini(&got);
}

static void a_body_over_the_receivers_limit_is_refused(void **state)
{
    struct fixture *f = *state;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LogLines lines = RV__LOG_LINES__INIT;
    struct rv_frame got = RV_FRAME_INIT;
    const char *why = NULL;

    lines.text.len = RV_FRAME_MAX;
    lines.text.data = calloc(1, lines.text.len);
    assert_non_null(lines.text.data);
    frame.body_case = RV__FRAME__BODY_LOG_LINES;
    frame.log_lines = &lines;
    for (unsigned i = 0; i < 2; i++)
        assert_int_equal(rv_frame_send(f->pair[0], &frame, NULL, 0, 0), 0);
    assert_int_equal(rv_frame_receive_limited(f->pair[1], 0, &got, &why), -EPROTO);
    assert_string_equal(why, "a larger body than anybody sends here");
    assert_int_equal(rv_frame_receive_limited(f->pair[1], 2 * RV_FRAME_MAX, &got, NULL), 1);
    rv_frame_fini(&got);
    send_drain(f->pair[0], 1); /* what needs no memory of its own passes any limit */
    assert_int_equal(rv_frame_receive_limited(f->pair[1], 0, &got, NULL), 1);
    rv_frame_fini(&got);
    free(lines.text.data);
}

static void false_spills_are_refused(void **state)
{
    struct fixture *f = *state;
    uint8_t bytes[64];
    Rv__Frame inner = RV__FRAME__INIT;
    Rv__Spill spill = RV__SPILL__INIT;
    size_t length;
    int fd;

    send_spill(f->pair[0], 100, -1); /* no memory */
    expect_refused(f);
    fd = rv_memfd_create("unsealed", 0);
    assert_int_equal(ftruncate(fd, 100), 0);
    send_spill(f->pair[0], 100, fd);
    expect_refused(f);
    assert_int_equal(rv_memfd_seal(fd), 0);
    send_spill(f->pair[0], 101, fd); /* another size */
    expect_refused(f);
    send_spill(f->pair[0], 0, fd);
    expect_refused(f);
    send_spill(f->pair[0], UINT64_MAX, fd);
    expect_refused(f);
    send_spill(f->pair[0], 100, fd); /* a hole: 100 zero bytes are no frame */
    expect_refused(f);
    (void)close(fd);
    send_spill(f->pair[0], 100, f->pair[0]); /* no memory at all but a socket */
    expect_refused(f);

    spill.size = 10;
    inner.body_case = RV__FRAME__BODY_SPILL;
    inner.spill = &spill;
    length = rv__frame__pack(&inner, bytes);
    fd = rv_sealed_create("nested", bytes, length);
    assert_true(fd >= 0);
    send_spill(f->pair[0], length, fd);
    expect_refused(f);
    (void)close(fd);
}

static void nonsense_is_refused_and_its_descriptors_closed(void **state)
{
    struct fixture *f = *state;
    uint8_t *large = calloc(1, RV_FRAME_MAX + 1);
    uint8_t unset[] = {0x08, 0x05}; /* an id and no body */

    assert_non_null(large);
    send_raw(f->pair[0], "\xff\xff\xff\xff garbage", 12, f->pair[0], 3);
    expect_refused(f);
    send_raw(f->pair[0], unset, sizeof(unset), -1, 0);
    expect_refused(f);
    send_raw(f->pair[0], large, RV_FRAME_MAX + 1, f->pair[0], 1);
    expect_refused(f);
    send_raw(f->pair[0], unset, sizeof(unset), f->pair[0], 17);
    expect_refused(f);
    send_raw(f->pair[0], unset, sizeof(unset), f->pair[0], 64);
    expect_refused(f);
    send_raw(f->pair[0], "", 0, f->pair[0], 1); /* empty, but with a descriptor */
    expect_refused(f);
    free(large);
}

static void too_many_descriptors_are_refused_even_with_a_good_frame(void **state)
{
    struct fixture *f = *state;
    uint8_t bytes[16];
    Rv__Frame frame;
    Rv__Drain drain;

    make_drain(&frame, &drain);
    send_raw(f->pair[0], bytes, rv__frame__pack(&frame, bytes), f->pair[0], RV_FRAME_FDS_MAX + 1);
    expect_refused(f);
}

static void the_end_and_an_empty_message_look_the_same(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;

    send_raw(f->pair[0], "", 0, -1, 0);
    assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), 0);
    close_end(f, 0);
    assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), 0);
    assert_int_equal(rv_frame_wait(f->pair[1], &got, UINT64_MAX), 0);
}

/* The kernel reports the reset before the frames: a dead worker's last results were lost by this. */
static void what_a_peer_sent_is_read_although_it_died_with_unread_frames(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;

    send_drain(f->pair[1], 1); /* never read */
    send_drain(f->pair[0], 2);
    send_drain(f->pair[0], 3);
    close_end(f, 0);
    for (uint64_t id = 2; id <= 3; id++) {
        assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), 1);
        assert_true(got.message->id == id);
        rv_frame_fini(&got);
    }
    assert_int_equal(rv_frame_receive(f->pair[1], &got, NULL), 0);
}

static void at_the_descriptor_limit_the_frame_says_so(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    struct rlimit before, tight;
    Rv__Frame frame;
    Rv__Drain drain;
    int fds[4], highest = dup(0), r;
    const char *why = NULL;

    for (unsigned i = 0; i < 4; i++)
        fds[i] = f->pair[0];
    make_drain(&frame, &drain);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, fds, 4, 0), 0);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, fds, 4, 0), 0);
    (void)close(highest);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    tight = before;
    tight.rlim_cur = (rlim_t)highest + 2; /* room for two of the four */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    r = rv_frame_receive(f->pair[1], &got, &why);
    assert_int_equal(r, -ENOMEM);
    assert_non_null(why);
    r = rv_frame_receive_partial(f->pair[1], &got, NULL);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(r, 1);
    assert_true(got.fds_lost);
    assert_int_equal(got.fd_count, 0);
    rv_frame_fini(&got);
}

static void waiting_ends_in_time(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    Rv__Frame frame;
    Rv__Drain drain;
    int r;

    assert_int_equal(rv_frame_wait(f->pair[1], &got, 0), -ETIMEDOUT);
    assert_int_equal(rv_frame_wait(f->pair[1], &got, 1500), -ETIMEDOUT);
    make_drain(&frame, &drain);
    while ((r = rv_frame_send(f->pair[0], &frame, NULL, 0, 0)) == 0)
        ; /* nobody reads */
    assert_int_equal(r, -EAGAIN);
    assert_int_equal(rv_frame_send(f->pair[0], &frame, NULL, 0, 1500), -ETIMEDOUT);
    close_end(f, 1);
    r = rv_frame_send(f->pair[0], &frame, NULL, 0, UINT64_MAX); /* no SIGPIPE */
    if (r == -ECONNRESET)
        r = rv_frame_send(f->pair[0], &frame, NULL, 0, UINT64_MAX);
    assert_int_equal(r, -EPIPE);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_frame_arrives_with_its_descriptors),
        TEST(a_large_body_travels_as_sealed_memory),
        TEST(false_spills_are_refused),
        TEST(a_body_over_the_receivers_limit_is_refused),
        TEST(nonsense_is_refused_and_its_descriptors_closed),
        TEST(too_many_descriptors_are_refused_even_with_a_good_frame),
        TEST(the_end_and_an_empty_message_look_the_same),
        TEST(what_a_peer_sent_is_read_although_it_died_with_unread_frames),
        TEST(at_the_descriptor_limit_the_frame_says_so),
        TEST(waiting_ends_in_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
