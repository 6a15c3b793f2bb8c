/*
 * The holder: cuda-ipc memory lives as long as the process that allocated it (cuda.h, cuIpcOpenMemHandle), and loaders
 * are short. It frees nothing by itself: the supervisor alone knows who imports.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "child.h"
#include "rv_cuda.h"
#include "works.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define ALLOCATIONS_MAX 2048u /* twice the catalogue: each model's generation, and an old one that is still lent */

struct allocation {
    uint64_t id; /* 0 = free place */
    struct rv_cuda_memory memory;
};

struct hold {
    int socket;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    struct rv_cuda *cuda;
    struct rv_cuda_device *device;
    uint64_t last_id;
    struct allocation *allocations; /* ALLOCATIONS_MAX */
    bool reported;                  /* that its context is broken; once */
};

static struct allocation *find(struct hold *h, uint64_t id)
{
    for (uint32_t i = 0; i < ALLOCATIONS_MAX; i++)
        if (h->allocations[i].id == id)
            return &h->allocations[i];
    return NULL;
}

/* After a failure: is it this call, or the device? */
static void report_if_lost(struct hold *h, const struct rv_error *failure)
{
    int number = rv_cuda_last_error();
    struct rv_error err = *failure;

    if (h->reported || (err.code != ERROR(DEVICE_LOST) && rv_cuda_device_check(h->device, &err) == 0))
        return;
    h->reported = true;
    rv_tell_event(h->socket, h->uuid, number, 0, err.message);
}

static int allocate(struct hold *h, uint64_t id, const Rv__HolderAllocate *request, struct rv_error *err)
{
    struct allocation *place = find(h, 0);
    Rv__HolderAllocated body = RV__HOLDER_ALLOCATED__INIT;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__Arena arena = RV__ARENA__INIT;
    struct rv_arena made = {0};
    int r;

    if (!place)
        return rv_error_set(err, ENOSPC, ERROR(LIMIT), "the holder's table of %u allocations is full", ALLOCATIONS_MAX);
    if (request->size == 0)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "an arena of 0 bytes cannot be allocated");
    r = rv_cuda_ipc_create(h->device, request->size, &place->memory, &made, err);
    if (r < 0)
        return r;
    place->id = ++h->last_id;
    arena.size = made.size;
    arena.backend = made.backend;
    arena.page_size = made.page_size;
    arena.handle = (ProtobufCBinaryData){RV_IPC_HANDLE_SIZE, made.handle};
    arena.allocation = place->id;
    body.arena = &arena;
    message.id = id;
    message.body_case = RV__FRAME__BODY_HOLDER_ALLOCATED;
    message.holder_allocated = &body;
    return rv_child_send(h->socket, &message, NULL, 0);
}

static int release(struct hold *h, uint64_t id, const Rv__HolderFree *request, struct rv_error *err)
{
    struct allocation *place = request->allocation ? find(h, request->allocation) : NULL;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__Done done = RV__DONE__INIT;
    int r;

    if (!place)
        return rv_error_set(err, ENOENT, ERROR(BAD_REQUEST), "the holder has no allocation %llu",
                            (unsigned long long)request->allocation);
    rv_cuda_memory_close(h->device, &place->memory);
    *place = (struct allocation){0};
    r = rv_cuda_device_check(h->device, err);
    if (r < 0)
        return r;
    message.id = id;
    message.body_case = RV__FRAME__BODY_DONE;
    message.done = &done;
    return rv_child_send(h->socket, &message, NULL, 0);
}

/* 0 = go on. */
static int serve(struct hold *h, const Rv__Frame *frame)
{
    struct rv_error err = {0};
    int r;

    if (frame->body_case == RV__FRAME__BODY_HOLDER_ALLOCATE)
        r = allocate(h, frame->id, frame->holder_allocate, &err);
    else if (frame->body_case == RV__FRAME__BODY_HOLDER_FREE)
        r = release(h, frame->id, frame->holder_free, &err);
    else
        return -EPROTO;
    if (r < 0 && err.code == 0)
        return r; /* the channel */
    if (r < 0) {
        report_if_lost(h, &err);
        rv_child_error(h->socket, frame->id, &err);
    }
    return 0;
}

static int open_device(struct hold *h, const Rv__DeviceStart *start, struct rv_error *err)
{
    int r;

    if (!start->device || start->device->uuid.len != RV_DEVICE_UUID_SIZE)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "a holder needs the uuid of its device");
    memcpy(h->uuid, start->device->uuid.data, RV_DEVICE_UUID_SIZE);
    h->allocations = calloc(ALLOCATIONS_MAX, sizeof(*h->allocations));
    if (!h->allocations)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the holder's table");
    r = rv_cuda_open(&h->cuda, err);
    return r < 0 ? r : rv_cuda_device_open(h->cuda, h->uuid, &h->device, err);
}

int rv_work_hold(int socket, const Rv__DeviceStart *start)
{
    struct hold h = {.socket = socket};
    struct rv_error err = {0};
    int r = open_device(&h, start, &err);

    if (r < 0) {
        if (err.code == ERROR(DEVICE_LOST))
            rv_tell_event(socket, h.uuid, rv_cuda_last_error(), 0, err.message);
        rv_child_error(socket, 0, &err);
    }
    rv_child_finished(); /* the regular end: the supervisor closes */
    while (r == 0) {
        struct rv_frame frame = RV_FRAME_INIT;

        r = rv_frame_wait(socket, &frame, UINT64_MAX);
        if (r == 0)
            break;
        if (r > 0)
            r = serve(&h, frame.message);
        rv_frame_fini(&frame);
    }
    free(h.allocations); /* the memory behind it goes with the process */
    return r == 0 ? 0 : 1;
}
