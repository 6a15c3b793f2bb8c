/*
 * resvisor-loader: reads one model file into sealed memory or a device's, hands the descriptors to the supervisor, and
 * exits.
 *
 * Model files are untrusted: they are parsed here, in a process that holds nothing else. Descriptor RESVISOR_CONTROL_FD
 * (3) is the channel to the supervisor; when that closes, this process ends at once.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "child.h"
#include "clock.h"
#include "control.h"
#include "fill.h"
#include "memory.h"
#include "plan.h"
#include "reader.h"
#include "sink.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define METHOD_MAX 160u

struct load {
    int socket;
    int file;
    const Rv__LoadStart *start; /* belongs to the frame */
    struct stat before;
    uint64_t started_us, disk_before;
    struct rv_plan plan;
    const uint8_t *uuid;   /* of the device; NULL = host */
    struct rv_sink *sink;  /* NULL = not created */
    struct rv_arena given; /* backend RV_BACKEND_NONE = the sink makes its own */
    struct rv_arena arena;
    int arena_fd, index_fd;
    uint64_t index_size;
    char method[METHOD_MAX];
    struct rv_error err;
};

/* Bytes that this process has read from disks; 0 = not known. */
static uint64_t disk_bytes(void)
{
    FILE *io = fopen("/proc/self/io", "re");
    unsigned long long bytes = 0;
    char line[128];

    while (io && fgets(line, sizeof(line), io))
        if (sscanf(line, "read_bytes: %llu", &bytes) == 1)
            break;
    if (io)
        (void)fclose(io);
    return bytes;
}

static int check_unchanged(struct load *l)
{
    struct stat now;

    if (fstat(l->file, &now) < 0)
        return rv_error_set(&l->err, errno, ERROR(FILE), "cannot examine the file: %s", strerror(errno));
    if (now.st_size == l->before.st_size && now.st_ino == l->before.st_ino && now.st_dev == l->before.st_dev &&
        now.st_mtim.tv_sec == l->before.st_mtim.tv_sec && now.st_mtim.tv_nsec == l->before.st_mtim.tv_nsec &&
        now.st_ctim.tv_sec == l->before.st_ctim.tv_sec && now.st_ctim.tv_nsec == l->before.st_ctim.tv_nsec)
        return 0;
    return rv_error_set(&l->err, ESTALE, ERROR(MODEL_CHANGED), "the file changed while it was read");
}

static int make_sink(struct load *l)
{
    const Rv__Device *device = l->start->device;
    struct rv_sink_wish wish = {.backend = rv_backend_by_id(l->start->backend),
                                .huge_pages = (enum rv_huge_pages)l->start->huge_pages};

    if (!wish.backend)
        return rv_error_set(&l->err, EOPNOTSUPP, ERROR(UNSUPPORTED), "no memory backend has the number %u",
                            l->start->backend);
    if (wish.backend->on_device && device && device->uuid.len == RV_DEVICE_UUID_SIZE)
        wish.uuid = l->uuid = device->uuid.data;
    return rv_sink_create(&wish, &l->sink, &l->err);
}

static int make_plan(struct load *l, uint64_t *ret_bytes)
{
    int r;

    l->started_us = rv_now_us();
    l->disk_before = disk_bytes();
    if (fstat(l->file, &l->before) < 0)
        return rv_error_set(&l->err, errno, ERROR(FILE), "cannot examine the file: %s", strerror(errno));
    if (!S_ISREG(l->before.st_mode))
        return rv_error_set(&l->err, EINVAL, ERROR(FILE), "this is not a regular file");
    r = make_sink(l);
    if (r < 0)
        return r;
    r = rv_plan_make(l->file, (uint64_t)l->before.st_size, l->start->path, l->start->format, &l->plan, &l->err);
    /* A file that changes under the parser looks malformed: say what is true. */
    if (r < 0 && check_unchanged(l) < 0)
        r = -ESTALE;
    return r < 0 ? r : rv_sink_plan(l->sink, l->plan.arena_used, ret_bytes, &l->err);
}

static void on_progress(void *context, uint64_t bytes_done)
{
    const struct load *l = context;

    rv_control_progress(l->socket, bytes_done, l->plan.data_length);
}

static void describe_method(struct load *l, const struct rv_reader *reader)
{
    const char *note = rv_sink_note(l->sink);

    (void)snprintf(l->method, sizeof(l->method), "%s%s%s", rv_reader_method(reader), *note ? ", " : "", note);
}

static int fill_arena(struct load *l)
{
    const struct rv_arena *given = l->given.backend == RV_BACKEND_NONE ? NULL : &l->given;
    struct rv_reader *reader = NULL;
    int r = rv_sink_begin(l->sink, l->plan.arena_used, given, &l->err);

    if (r < 0)
        return r;
    r = rv_reader_open(l->file, l->plan.data_start, l->plan.data_start + l->plan.data_length,
                       (enum rv_direct_mode)l->start->direct, getenv("RESVISOR_LOADER_READER"), rv_sink_memory(l->sink),
                       &reader, &l->err);
    if (r == 0)
        r = rv_fill(&l->plan, reader, l->sink, on_progress, l, &l->err);
    if (reader)
        describe_method(l, reader);
    rv_reader_close(reader);
    if (check_unchanged(l) < 0) /* more to the point than a read that failed because of it */
        r = -ESTALE;
    return r;
}

static int make_index(struct load *l)
{
    const struct rv_index_arena row = {l->arena.size, l->arena.backend, l->arena.page_size};
    int r = rv_index_builder_write(l->plan.builder, &row, 1, l->plan.metadata, l->plan.metadata_length,
                                   l->plan.header_digest, &l->index_size);

    if (r < 0)
        return rv_error_set(&l->err, -r, ERROR(NO_MEMORY), "cannot write the index: %s", strerror(-r));
    l->index_fd = r;
    return 0;
}

static int hand_over(const struct load *l)
{
    uint64_t disk = disk_bytes();
    struct rv_control_result result = {.arena = &l->arena,
                                       .arena_fd = l->arena_fd,
                                       .index_fd = l->index_fd,
                                       .index_size = l->index_size,
                                       .read_bytes = l->plan.data_start + l->plan.data_length,
                                       .disk_bytes = disk > l->disk_before ? disk - l->disk_before : 0,
                                       .load_us = rv_now_us() - l->started_us,
                                       .method = l->method};

    return rv_control_done(l->socket, &l->plan, &result);
}

static void report(const struct load *l)
{
    const char *what = "";
    int fault = l->sink ? rv_sink_fault(l->sink, &what) : 0;

    if (fault)
        rv_control_fault(l->socket, l->uuid, fault, what);
    rv_child_error(l->socket, 0, &l->err);
}

/* 0 = handed over, or refused; negative errno = l->err was reported, or the supervisor is gone. */
static int run_load(struct load *l)
{
    uint64_t bytes = 0;
    int r = make_plan(l, &bytes);

    if (r == 0) {
        r = rv_control_plan(l->socket, &l->plan, bytes, &l->given);
        if (r < 0)
            return r == -ECANCELED ? 0 : r; /* refused: the supervisor knows why */
        r = fill_arena(l);
    }
    if (r == 0)
        r = rv_sink_hand_over(l->sink, &l->arena, &l->arena_fd, &l->err);
    if (r == 0)
        r = make_index(l);
    if (r == 0)
        return hand_over(l);
    report(l);
    return r;
}

int main(void)
{
    struct rv_frame frame = RV_FRAME_INIT;
    struct load l = {.socket = rv_child_socket(), .arena_fd = -1, .index_fd = -1};
    int r = -EPROTO;

    rv_child_set_up();
    rv_child_no_new_privileges();
    if (l.socket < 0) {
        (void)fprintf(stderr, "resvisor-loader is started by resvisor, not by hand\n");
        return 2;
    }
    if (rv_child_hello(l.socket, RV__ROLE__ROLE_LOADER, "resvisor-loader") == 0 && rv_child_watch(l.socket) == 0 &&
        rv_control_start(l.socket, &frame) == 0) {
        l.start = frame.message->load_start;
        l.file = rv_frame_take_fd(&frame, 0);
        r = run_load(&l);
        (void)close(l.file);
    }
    rv_sink_destroy(l.sink);
    if (l.arena_fd >= 0)
        (void)close(l.arena_fd);
    if (l.index_fd >= 0)
        (void)close(l.index_fd);
    rv_plan_fini(&l.plan);
    rv_frame_fini(&frame);
    return r == 0 ? 0 : 1;
}
