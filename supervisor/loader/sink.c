#include "sink.h"

#include <errno.h>

#include "rpc.pb-c.h"
#include "sink_kind.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

int rv_sink_create(const struct rv_sink_wish *wish, struct rv_sink **ret_sink, struct rv_error *err)
{
    const struct rv_sink_kind *kind = wish->backend->on_device ? &rv_sink_device : &rv_sink_host;
    struct rv_sink *sink = NULL;
    int r = kind->create(wish, &sink, err);

    if (r < 0)
        return r;
    sink->kind = kind;
    sink->backend = wish->backend;
    *ret_sink = sink;
    return 0;
}

int rv_sink_plan(struct rv_sink *sink, uint64_t used, uint64_t *ret_bytes, struct rv_error *err)
{
    return sink->kind->plan(sink, used, ret_bytes, err);
}

int rv_sink_begin(struct rv_sink *sink, uint64_t used, const struct rv_arena *given, struct rv_error *err)
{
    if (given ? sink->backend->has_descriptor || given->backend != (uint32_t)sink->backend->id
              : !sink->backend->has_descriptor)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the arena for a load of backend %s is %s",
                            sink->backend->name, given ? "not of that backend" : "missing");
    return sink->kind->begin(sink, used, given, err);
}

const struct rv_reader_memory *rv_sink_memory(struct rv_sink *sink)
{
    return sink->memory.allocate ? &sink->memory : NULL;
}

int rv_sink_put(struct rv_sink *sink, uint64_t offset, const uint8_t *data, uint64_t length, struct rv_error *err)
{
    if (offset > sink->arena.size || length > sink->arena.size - offset)
        return rv_error_set(err, EINVAL, ERROR(INTERNAL), "a write at byte %llu of an arena of %llu bytes",
                            (unsigned long long)offset, (unsigned long long)sink->arena.size);
    return sink->kind->put(sink, offset, data, length, err);
}

int rv_sink_mark(struct rv_sink *sink, uint64_t *ret_mark, struct rv_error *err)
{
    if (sink->kind->mark)
        return sink->kind->mark(sink, ret_mark, err);
    *ret_mark = 0;
    return 0;
}

uint64_t rv_sink_reached(struct rv_sink *sink)
{
    return sink->kind->mark ? sink->kind->reached(sink) : 0;
}

int rv_sink_wait(struct rv_sink *sink, uint64_t mark, struct rv_error *err)
{
    return sink->kind->mark ? sink->kind->wait(sink, mark, err) : 0;
}

int rv_sink_finish(struct rv_sink *sink, struct rv_error *err)
{
    return sink->kind->finish(sink, err);
}

void rv_sink_stop(struct rv_sink *sink)
{
    if (sink->kind->stop)
        sink->kind->stop(sink);
}

int rv_sink_hand_over(struct rv_sink *sink, struct rv_arena *ret_arena, int *ret_fd, struct rv_error *err)
{
    int fd = -1;
    int r = sink->kind->hand_over(sink, &fd, err);

    if (r < 0)
        return r;
    *ret_arena = sink->arena;
    *ret_fd = fd;
    return 0;
}

const char *rv_sink_note(const struct rv_sink *sink)
{
    return sink->note;
}

int rv_sink_fault(const struct rv_sink *sink, const char **ret_what)
{
    *ret_what = sink->fault_what;
    return sink->fault;
}

void rv_sink_destroy(struct rv_sink *sink)
{
    if (sink)
        sink->kind->destroy(sink);
}
