#include "control.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

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

/* -EPROTO = not what an arena for one load looks like. */
static int read_admit(const Rv__LoadAdmit *admit, struct rv_arena *ret_given)
{
    struct rv_arena given = {0};
    const Rv__Arena *arena;

    if (admit->n_arenas > 1)
        return -EPROTO;
    if (admit->n_arenas == 1) {
        arena = admit->arenas[0];
        if (arena->handle.len != RV_IPC_HANDLE_SIZE || arena->backend == RV_BACKEND_NONE)
            return -EPROTO;
        given = (struct rv_arena){.size = arena->size,
                                  .page_size = arena->page_size,
                                  .backend = arena->backend,
                                  .allocation = arena->allocation};
        memcpy(given.handle, arena->handle.data, sizeof(given.handle));
    }
    *ret_given = given;
    return 0;
}

int rv_control_plan(int socket, const struct rv_plan *plan, uint64_t arena_bytes, struct rv_arena *ret_given)
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
    if (r == 0)
        r = read_admit(frame.message->load_admit, ret_given);
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
    if (result->arena_fd < 0) {
        arena.allocation = result->arena->allocation;
        arena.handle.data = (uint8_t *)result->arena->handle;
        arena.handle.len = sizeof(result->arena->handle);
    }
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
    r = rv_child_send(socket, &message, fds, result->arena_fd < 0 ? 1 : 2);
    if (r == 0)
        r = rv_child_wait(socket, RV__FRAME__BODY_DONE, &frame);
    rv_frame_fini(&frame);
    return r == -ECONNRESET || r == -EPIPE ? 0 : r;
}

void rv_control_fault(int socket, const uint8_t *uuid, int number, const char *what)
{
    Rv__Frame message = RV__FRAME__INIT;
    Rv__DeviceEvent body = RV__DEVICE_EVENT__INIT;

    body.uuid.data = (uint8_t *)uuid;
    body.uuid.len = RV_DEVICE_UUID_SIZE;
    body.error = number;
    body.what = (char *)what;
    message.body_case = RV__FRAME__BODY_DEVICE_EVENT;
    message.device_event = &body;
    (void)rv_child_send(socket, &message, NULL, 0);
}
