#include "control.h"

#include <errno.h>
#include <stdint.h>

#include "child.h"
#include "clock.h"
#include "memory.h"

#define PROGRESS_US (100 * RV_MSEC)

int rv_control_start(int socket, struct rv_frame *ret_frame)
{
    struct rv_frame frame = RV_FRAME_INIT;
    int r = rv_child_wait(socket, RV__FRAME__BODY_LOAD_START, &frame);

    if (r < 0)
        return r;
    if (frame.fd_count != 1) {
        rv_frame_fini(&frame);
        return -EPROTO;
    }
    *ret_frame = frame;
    return 0;
}

int rv_control_plan(int socket, const struct rv_plan *plan, uint64_t arena_bytes)
{
    struct rv_frame frame = RV_FRAME_INIT;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__LoadPlan body = RV__LOAD_PLAN__INIT;
    int r;

    body.arena_bytes = arena_bytes;
    body.index_bytes = rv_index_builder_size(plan->builder, 1, plan->metadata_length);
    body.tensors = plan->count;
    body.header_digest.data = (uint8_t *)plan->header_digest;
    body.header_digest.len = sizeof(plan->header_digest);
    message.body_case = RV__FRAME__BODY_LOAD_PLAN;
    message.load_plan = &body;
    r = rv_child_send(socket, &message, NULL, 0);
    if (r == 0)
        r = rv_child_wait(socket, RV__FRAME__BODY_LOAD_ADMIT, &frame);
    rv_frame_fini(&frame);
    return r;
}

void rv_control_progress(int socket, uint64_t done, uint64_t total)
{
    static uint64_t last;
    uint64_t now = rv_now_us();
    Rv__Frame message = RV__FRAME__INIT;
    Rv__LoadProgress body = RV__LOAD_PROGRESS__INIT;

    if (now - last < PROGRESS_US)
        return;
    last = now;
    body.bytes_done = done;
    body.bytes_total = total;
    message.body_case = RV__FRAME__BODY_LOAD_PROGRESS;
    message.load_progress = &body;
    (void)rv_frame_send(socket, &message, NULL, 0, 0); /* lost when the supervisor is busy: the next one says more */
}

int rv_control_done(int socket, const struct rv_plan *plan, const struct rv_control_result *result)
{
    const int fds[] = {result->index_fd, result->arena_fd};
    struct rv_frame frame = RV_FRAME_INIT;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__LoadDone body = RV__LOAD_DONE__INIT;
    Rv__Arena arena = RV__ARENA__INIT, *arenas[] = {&arena};
    int r;

    arena.size = result->arena->size;
    arena.backend = result->arena->backend;
    arena.page_size = result->arena->page_size;
    body.n_arenas = 1;
    body.arenas = arenas;
    body.index_size = result->index_size;
    body.tensors = plan->count;
    body.read_bytes = result->read_bytes;
    body.disk_bytes = result->disk_bytes;
    body.load_us = result->load_us;
    body.header_digest.data = (uint8_t *)plan->header_digest;
    body.header_digest.len = sizeof(plan->header_digest);
    body.method = (char *)result->method;
    message.body_case = RV__FRAME__BODY_LOAD_DONE;
    message.load_done = &body;
    rv_child_finished();
    r = rv_child_send(socket, &message, fds, 2);
    if (r == 0)
        r = rv_child_wait(socket, RV__FRAME__BODY_DONE, &frame);
    rv_frame_fini(&frame);
    return r == -ECONNRESET || r == -EPIPE ? 0 : r;
}
