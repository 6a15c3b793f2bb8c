#include "copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define PAGE 4096u

/* A short run is topped up from a long one, or takes it in whole if too little of it would be left. */
_Static_assert(RV_COPY_STAGE >= 3 * RV_COPY_MIN, "two short runs and a rest fit into a stage");

int rv_copy_init(struct rv_copy *copy, struct rv_cuda_device *device, uint64_t address, uint64_t size,
                 struct rv_error *err)
{
    int r;

    *copy = (struct rv_copy){.device = device, .address = address, .size = size};
    r = rv_cuda_copier_create(device, &copy->copier, err);
    if (r < 0)
        return r;
    copy->memory = rv_cuda_host_alloc(device, (uint64_t)RV_COPY_STAGE * RV_COPY_STAGES, err);
    copy->memory_pinned = copy->pinned = copy->memory != NULL;
    if (!copy->memory)
        copy->memory = aligned_alloc(PAGE, (size_t)RV_COPY_STAGE * RV_COPY_STAGES);
    return copy->memory ? 0 : rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the loader's buffers");
}

/* From `from` to the arena's [position, position + length). */
static int send(struct rv_copy *copy, uint64_t position, const uint8_t *from, uint64_t length, struct rv_error *err)
{
    if (copy->pinned)
        return rv_cuda_copier_put(copy->copier, copy->address + position, from, length, err);
    return rv_cuda_write(copy->device, copy->address + position, from, length, err);
}

/* Sends the stage off and goes on in the next one, once that is free. */
static int flush(struct rv_copy *copy, struct rv_error *err)
{
    uint64_t *mark;
    int r;

    if (copy->staged == 0)
        return 0;
    r = send(copy, copy->position - copy->staged, copy->memory + (uint64_t)copy->stage * RV_COPY_STAGE, copy->staged,
             err);
    if (r == 0)
        r = rv_cuda_copier_mark(copy->copier, &copy->stage_marks[copy->stage], err);
    if (r < 0)
        return r;
    copy->staged = 0;
    copy->stage = (copy->stage + 1) % RV_COPY_STAGES;
    mark = &copy->stage_marks[copy->stage];
    r = *mark ? rv_cuda_copier_wait(copy->copier, *mark, err) : 0;
    *mark = 0;
    return r;
}

/* At most what fits into the stage; data NULL = zeros. */
static int gather(struct rv_copy *copy, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    uint8_t *to = copy->memory + (uint64_t)copy->stage * RV_COPY_STAGE + copy->staged;

    if (data)
        memcpy(to, data, length);
    else
        memset(to, 0, length);
    copy->staged += (uint32_t)length;
    copy->position += length;
    return copy->staged == RV_COPY_STAGE ? flush(copy, err) : 0;
}

/* How much of the run goes into the stage; 0 = none: the stage is large enough to go by itself. */
static uint64_t share_of_stage(const struct rv_copy *copy)
{
    uint64_t room = RV_COPY_STAGE - copy->staged, rest;

    if (copy->run_length < RV_COPY_MIN)
        return copy->run_length < room ? copy->run_length : room;
    if (copy->staged >= RV_COPY_MIN)
        return 0;
    rest = copy->run_length - (RV_COPY_MIN - copy->staged);
    return rest < RV_COPY_MIN ? copy->run_length : RV_COPY_MIN - copy->staged;
}

/* Sends the run off or takes it into the stage: its memory is not needed after the next mark. */
static int settle(struct rv_copy *copy, struct rv_error *err)
{
    int r = 0;

    while (copy->run_length > 0 && r == 0) {
        uint64_t n = copy->run_length;

        if (copy->staged == 0 && n >= RV_COPY_MIN) {
            r = send(copy, copy->position, copy->run, n, err);
            copy->position += n;
        } else {
            n = share_of_stage(copy);
            r = n ? gather(copy, copy->run, n, err) : flush(copy, err);
        }
        copy->run += n;
        copy->run_length -= n;
    }
    return r;
}

static int put_zeros(struct rv_copy *copy, uint64_t length, struct rv_error *err)
{
    int r = 0;

    while (length > 0 && length < RV_COPY_MIN && r == 0) {
        uint64_t room = RV_COPY_STAGE - copy->staged, n = length < room ? length : room;

        r = gather(copy, NULL, n, err);
        length -= n;
    }
    if (length == 0 || r < 0)
        return r;
    r = flush(copy, err);
    if (r == 0)
        r = rv_cuda_copier_zero(copy->copier, copy->address + copy->position, length, err);
    copy->position += length;
    return r;
}

int rv_copy_put(struct rv_copy *copy, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    uint64_t end = copy->position + copy->run_length;
    int r = 0;

    if (offset < end || offset > copy->size || length > copy->size - offset)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "a write at byte %llu after byte %llu of %llu",
                            (unsigned long long)offset, (unsigned long long)end, (unsigned long long)copy->size);
    if (copy->run_length > 0 && (offset != end || data != copy->run + copy->run_length))
        r = settle(copy, err);
    if (r == 0)
        r = put_zeros(copy, offset - end, err);
    if (r < 0)
        return r;
    if (copy->run_length == 0)
        copy->run = data;
    copy->run_length += length;
    return 0;
}

int rv_copy_mark(struct rv_copy *copy, uint64_t *ret_mark, struct rv_error *err)
{
    int r = settle(copy, err);

    return r < 0 ? r : rv_cuda_copier_mark(copy->copier, ret_mark, err);
}

uint64_t rv_copy_reached(struct rv_copy *copy)
{
    return rv_cuda_copier_reached(copy->copier);
}

int rv_copy_wait(struct rv_copy *copy, uint64_t mark, struct rv_error *err)
{
    return rv_cuda_copier_wait(copy->copier, mark, err);
}

int rv_copy_finish(struct rv_copy *copy, struct rv_error *err)
{
    uint64_t mark = 0;
    int r = settle(copy, err);

    if (r == 0)
        r = put_zeros(copy, copy->size - copy->position, err);
    if (r == 0)
        r = flush(copy, err);
    if (r == 0)
        r = rv_cuda_copier_mark(copy->copier, &mark, err);
    return r == 0 ? rv_cuda_copier_wait(copy->copier, mark, err) : r;
}

void rv_copy_fini(struct rv_copy *copy)
{
    if (copy->copier)
        rv_cuda_copier_destroy(copy->copier);
    if (copy->memory_pinned)
        rv_cuda_host_free(copy->device, copy->memory);
    else
        free(copy->memory);
    *copy = (struct rv_copy){0};
}
