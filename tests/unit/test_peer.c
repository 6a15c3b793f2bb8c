/* Peers on an event loop: a bad or slow one is dropped, nobody else notices, and nothing that was sent is lost. */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "peer.h"

struct fixture {
    struct event_base *base;
    struct rv_peer *peer;
    int other; /* the test's end */
    unsigned frames, closes;
    uint64_t last_id;
    char why[128];
    bool pause_at_frame, destroy_at_frame, destroy_at_close, drop_at_frame;
};

static void on_frame(struct rv_peer *peer, struct rv_frame *frame, void *context)
{
    struct fixture *f = context;

    f->frames++;
    f->last_id = frame->message->id;
    if (f->pause_at_frame)
        rv_peer_pause(peer, true);
    if (f->drop_at_frame) {
        struct rv_error err = {0};

        (void)rv_error_set(&err, EACCES, RESVISOR__V1__ERROR_CODE__ERROR_NOT_PERMITTED, "no");
        assert_int_equal(rv_peer_reply_error(peer, frame->message->id, &err), 0);
        rv_peer_drop(peer, "not admitted");
    }
    if (f->destroy_at_frame) {
        rv_peer_destroy(peer);
        f->peer = NULL;
    }
}

static void on_close(struct rv_peer *peer, const char *why, void *context)
{
    struct fixture *f = context;

    f->closes++;
    (void)strncpy(f->why, why, sizeof(f->why) - 1);
    if (f->destroy_at_close)
        rv_peer_destroy(peer);
    f->peer = NULL;
}

static const struct rv_peer_handlers handlers = {on_frame, on_close};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    int pair[2];

    if (!f || rv_frame_pair(pair) < 0)
        return -1;
    f->base = event_base_new();
    f->other = pair[1];
    f->peer = rv_peer_create(f->base, pair[0], &handlers, f);
    *state = f;
    return f->base && f->peer ? 0 : -1;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    rv_peer_destroy(f->peer);
    if (f->other >= 0)
        (void)close(f->other);
    event_base_free(f->base);
    free(f);
    return 0;
}

static void turn(struct fixture *f)
{
    (void)event_base_loop(f->base, EVLOOP_NONBLOCK);
}

static int send_ping(int socket, uint64_t id)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Ping ping = RV__PING__INIT;

    frame.id = id;
    frame.body_case = RV__FRAME__BODY_PING;
    frame.ping = &ping;
    return rv_frame_send(socket, &frame, NULL, 0, 0);
}

static int peer_ping(struct fixture *f, uint64_t id, const int *fds, unsigned fd_count, enum rv_send_kind kind)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Ping ping = RV__PING__INIT;

    frame.id = id;
    frame.body_case = RV__FRAME__BODY_PING;
    frame.ping = &ping;
    return rv_peer_send(f->peer, &frame, fds, fd_count, kind);
}

static void frames_go_both_ways(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;

    assert_int_equal(send_ping(f->other, 5), 0);
    turn(f);
    assert_int_equal(f->frames, 1);
    assert_true(f->last_id == 5);
    assert_int_equal(rv_peer_reply_error(f->peer, 5, NULL), 0);
    assert_int_equal(rv_frame_wait(f->other, &got, 0), 1);
    assert_int_equal(got.message->body_case, RV__FRAME__BODY_DONE);
    rv_frame_fini(&got);
    (void)close(f->other);
    f->other = -1;
    turn(f);
    turn(f);
    assert_int_equal(f->closes, 1);
    assert_string_equal(f->why, "it closed");
}

static void a_malformed_frame_drops_its_peer(void **state)
{
    struct fixture *f = *state;
    uint64_t before = rv_peer_bad_frames();

    assert_int_equal(send(f->other, "\xff\xff", 2, 0), 2);
    assert_int_equal(send_ping(f->other, 1), 0);
    turn(f);
    turn(f);
    assert_int_equal(f->closes, 1);
    assert_int_equal(f->frames, 0);
    assert_true(rv_peer_bad_frames() == before + 1);
}

static void the_reason_arrives_before_the_end(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;

    f->drop_at_frame = true;
    assert_int_equal(send_ping(f->other, 9), 0);
    assert_int_equal(send_ping(f->other, 10), 0);
    turn(f);
    turn(f);
    assert_int_equal(f->frames, 1);
    assert_int_equal(f->closes, 1);
    assert_string_equal(f->why, "not admitted");
    assert_int_equal(rv_frame_wait(f->other, &got, 0), 1);
    assert_int_equal(got.message->body_case, RV__FRAME__BODY_ERROR);
    rv_frame_fini(&got);
    assert_int_equal(rv_frame_wait(f->other, &got, 0), 0);
}

static void destroying_inside_a_callback_is_safe(void **state)
{
    struct fixture *f = *state;

    f->destroy_at_frame = true;
    assert_int_equal(send_ping(f->other, 1), 0);
    assert_int_equal(send_ping(f->other, 2), 0);
    turn(f);
    turn(f);
    assert_int_equal(f->frames, 1);
    assert_int_equal(f->closes, 0);
}

static void destroying_inside_on_close_is_safe(void **state)
{
    struct fixture *f = *state;

    f->destroy_at_close = true;
    (void)close(f->other);
    f->other = -1;
    turn(f);
    turn(f);
    assert_int_equal(f->closes, 1);
}

static void a_pause_stops_at_once(void **state)
{
    struct fixture *f = *state;

    f->pause_at_frame = true;
    for (uint64_t i = 1; i <= 3; i++)
        assert_int_equal(send_ping(f->other, i), 0);
    turn(f);
    turn(f);
    assert_int_equal(f->frames, 1);
    f->pause_at_frame = false;
    rv_peer_pause(f->peer, false);
    turn(f);
    assert_int_equal(f->frames, 3);
}

static void one_peer_does_not_take_the_whole_turn(void **state)
{
    struct fixture *f = *state;

    for (uint64_t i = 0; i < RV_PEER_TURN + 8; i++)
        assert_int_equal(send_ping(f->other, i), 0);
    (void)event_base_loop(f->base, EVLOOP_ONCE | EVLOOP_NONBLOCK);
    assert_int_equal(f->frames, RV_PEER_TURN);
    (void)event_base_loop(f->base, EVLOOP_ONCE | EVLOOP_NONBLOCK);
    assert_int_equal(f->frames, RV_PEER_TURN + 8);
}

/* It died with frames of ours unread, and our next frame to it fails: what it sent before must still be read. */
static void a_failed_send_does_not_lose_what_the_dead_peer_sent(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(peer_ping(f, 1, NULL, 0, RV_SEND_REPLY), 0); /* never read */
    assert_int_equal(send_ping(f->other, 41), 0);
    assert_int_equal(send_ping(f->other, 42), 0);
    (void)close(f->other);
    f->other = -1;
    assert_true(peer_ping(f, 2, NULL, 0, RV_SEND_REPLY) < 0);
    assert_true(peer_ping(f, 3, NULL, 0, RV_SEND_REPLY) < 0);
    assert_int_equal(f->closes, 0);
    turn(f);
    assert_int_equal(f->frames, 2);
    assert_true(f->last_id == 42);
    turn(f);
    assert_int_equal(f->closes, 1);
}

static void drain_reads_everything_of_a_dead_peer(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(peer_ping(f, 1, NULL, 0, RV_SEND_REPLY), 0);
    for (uint64_t i = 1; i <= RV_PEER_TURN * 2; i++)
        assert_int_equal(send_ping(f->other, i), 0);
    (void)close(f->other);
    f->other = -1;
    rv_peer_drop(f->peer, "its process ended"); /* even after that */
    rv_peer_drain(f->peer);
    assert_int_equal(f->frames, RV_PEER_TURN * 2);
    assert_int_equal(f->closes, 0);
    turn(f);
    assert_int_equal(f->closes, 1);
    assert_string_equal(f->why, "its process ended");
}

static void a_peer_that_never_reads_is_dropped_at_its_limit(void **state)
{
    struct fixture *f = *state;
    unsigned sent = 0;

    while (f->peer && sent < 100000) {
        if (peer_ping(f, sent, NULL, 0, RV_SEND_REPLY) < 0)
            break;
        sent++;
    }
    assert_true(sent > RV_PEER_QUEUE_FRAMES && sent < 10000);
    turn(f);
    assert_int_equal(f->closes, 1);
    assert_string_equal(f->why, "it does not read");
}

static void progress_to_a_slow_peer_is_dropped_and_replies_are_not(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    unsigned received = 0;
    uint64_t last = 0;

    for (uint64_t i = 1; i < 2000; i++)
        assert_int_equal(peer_ping(f, i, NULL, 0, RV_SEND_PROGRESS), 0);
    assert_int_equal(peer_ping(f, 5000, NULL, 0, RV_SEND_REPLY), 0);
    while (received < 2000 && last != 5000) {
        int r = rv_frame_receive(f->other, &got, NULL);

        if (r == -EAGAIN) {
            turn(f);
            continue;
        }
        assert_int_equal(r, 1);
        last = got.message->id;
        received++;
        rv_frame_fini(&got);
    }
    assert_true(last == 5000);
    assert_true(received < 1000);
}

static void one_frame_with_descriptors_is_on_its_way_at_a_time(void **state)
{
    struct fixture *f = *state;
    struct rv_frame got = RV_FRAME_INIT;
    int fds[2] = {f->other, f->other};

    for (uint64_t i = 1; i <= 3; i++)
        assert_int_equal(peer_ping(f, i, fds, 2, RV_SEND_REPLY), 0);
    assert_int_equal(peer_ping(f, 4, NULL, 0, RV_SEND_REPLY), 0); /* keeps its place */
    for (uint64_t i = 1; i <= 4; i++) {
        int r;

        while ((r = rv_frame_receive(f->other, &got, NULL)) == -EAGAIN)
            (void)event_base_loop(f->base, EVLOOP_ONCE); /* its timer */
        assert_int_equal(r, 1);
        assert_true(got.message->id == i);
        assert_int_equal(got.fd_count, i < 4 ? 2 : 0);
        rv_frame_fini(&got);
        if (i < 3)
            assert_int_equal(rv_frame_receive(f->other, &got, NULL), -EAGAIN);
    }
    assert_true(rv_peer_is_idle(f->peer));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(frames_go_both_ways),
        TEST(a_malformed_frame_drops_its_peer),
        TEST(the_reason_arrives_before_the_end),
        TEST(destroying_inside_a_callback_is_safe),
        TEST(destroying_inside_on_close_is_safe),
        TEST(a_pause_stops_at_once),
        TEST(one_peer_does_not_take_the_whole_turn),
        TEST(a_failed_send_does_not_lose_what_the_dead_peer_sent),
        TEST(drain_reads_everything_of_a_dead_peer),
        TEST(a_peer_that_never_reads_is_dropped_at_its_limit),
        TEST(progress_to_a_slow_peer_is_dropped_and_replies_are_not),
        TEST(one_frame_with_descriptors_is_on_its_way_at_a_time),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
