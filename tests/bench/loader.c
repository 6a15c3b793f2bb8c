/*
 * The loader by itself, with this program in the supervisor's place, and what it is measured against: filling memory.
 *
 *   load LOADER FILE DIRECT HUGE [UUID]  starts the loader, admits its plan, takes the descriptors; DIRECT and HUGE are
 * the numbers of enum rv_direct_mode and enum rv_huge_pages; UUID (GPU-…): onto that device, by cuda-vmm fill BYTES
 * write(2) into a fresh memfd of 4 KiB pages from a warm buffer Both print one JSON object with wall time (start of the
 * program to LoadDone) and the CPU time of the whole.
 */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "common.h"
#include "frame.h"
#include "memory.h"

#define CONTROL_FD 3
#define REPLY_US (600 * RV_SEC)
#define FILL_CHUNK (1u << 20)
#define FILL_SOURCE (32u << 20) /* larger than a core's cache, as what comes from a disk is */

extern char **environ;

static double seconds_of(const struct rusage *use)
{
    return (double)(use->ru_utime.tv_sec + use->ru_stime.tv_sec) +
           (double)(use->ru_utime.tv_usec + use->ru_stime.tv_usec) / 1e6;
}

static void send_or_fail(int socket, const Rv__Frame *frame, const int *fds, unsigned fd_count)
{
    int r = rv_frame_send(socket, frame, fds, fd_count, REPLY_US);

    if (r < 0)
        bench_fail("to the loader: %s", strerror(-r));
}

/* The next frame of this kind; progress on the way is skipped. */
static void expect(int socket, Rv__Frame__BodyCase kind, struct rv_frame *ret_frame)
{
    for (;;) {
        int r = rv_frame_wait(socket, ret_frame, REPLY_US);

        if (r != 1)
            bench_fail("the loader: %s", r == 0 ? "ended" : strerror(-r));
        if (ret_frame->message->body_case == kind)
            return;
        if (ret_frame->message->body_case == RV__FRAME__BODY_ERROR)
            bench_fail("the loader: %s", ret_frame->message->error->message);
        rv_frame_fini(ret_frame);
    }
}

static pid_t start_loader(const char *program, int socket)
{
    char *const args[] = {(char *)program, NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int r;

    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, socket, CONTROL_FD);
    r = posix_spawn(&pid, program, &actions, NULL, args, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    if (r != 0)
        bench_fail("%s: %s", program, strerror(r));
    return pid;
}

/* "GPU-" and 32 hexadecimal digits with dashes between them. */
static void read_uuid(const char *text, uint8_t ret_uuid[RV_DEVICE_UUID_SIZE])
{
    const char *at = text + (strncmp(text, "GPU-", 4) == 0 ? 4 : 0);

    for (unsigned i = 0; i < RV_DEVICE_UUID_SIZE; i++, at += 2) {
        at += *at == '-';
        if (sscanf(at, "%2hhx", &ret_uuid[i]) != 1 || at[1] == '\0')
            bench_fail("%s is no uuid of a device", text);
    }
}

static void begin_load(int socket, const char *path, int file, char **args)
{
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    Rv__Device device = RV__DEVICE__INIT;
    struct rv_frame frame = RV_FRAME_INIT;
    Rv__Frame message = RV__FRAME__INIT;
    Rv__HelloReply reply = RV__HELLO_REPLY__INIT;
    Rv__LoadStart start = RV__LOAD_START__INIT;
    Rv__LoadAdmit admit = RV__LOAD_ADMIT__INIT;

    expect(socket, RV__FRAME__BODY_HELLO, &frame);
    reply.version = RV_PROTOCOL_VERSION;
    message.id = frame.message->id;
    message.body_case = RV__FRAME__BODY_HELLO_REPLY;
    message.hello_reply = &reply;
    rv_frame_fini(&frame);
    send_or_fail(socket, &message, NULL, 0);
    start.path = (char *)path;
    start.direct = (uint32_t)atoi(args[0]);
    start.huge_pages = (uint32_t)atoi(args[1]);
    start.backend = RV_BACKEND_MEMFD;
    if (args[2]) {
        read_uuid(args[2], uuid);
        device.uuid.data = uuid;
        device.uuid.len = sizeof(uuid);
        start.device = &device;
        start.backend = RV_BACKEND_CUDA_VMM;
    }
    start.format = (char *)"auto";
    message.id = 0;
    message.body_case = RV__FRAME__BODY_LOAD_START;
    message.load_start = &start;
    send_or_fail(socket, &message, &file, 1);
    expect(socket, RV__FRAME__BODY_LOAD_PLAN, &frame);
    rv_frame_fini(&frame);
    message.body_case = RV__FRAME__BODY_LOAD_ADMIT;
    message.load_admit = &admit;
    send_or_fail(socket, &message, NULL, 0);
}

static int command_load(char **args)
{
    struct rv_frame frame = RV_FRAME_INIT;
    const Rv__LoadDone *done;
    struct rusage use = {0};
    int file = open(args[1], O_RDONLY | O_CLOEXEC), pair[2], status;
    uint64_t start, wall;
    pid_t pid;

    if (file < 0)
        bench_fail("%s: %s", args[1], strerror(errno));
    if (rv_frame_pair(pair) < 0 || fcntl(pair[1], F_DUPFD_CLOEXEC, CONTROL_FD + 1) < 0)
        bench_fail("no socket pair");
    start = bench_now_ns();
    pid = start_loader(args[0], pair[1]);
    (void)close(pair[1]);
    begin_load(pair[0], args[1], file, args + 2);
    expect(pair[0], RV__FRAME__BODY_LOAD_DONE, &frame);
    wall = bench_now_ns() - start;
    done = frame.message->load_done;
    (void)close(pair[0]);
    if (wait4(pid, &status, 0, &use) != pid)
        bench_fail("wait4: %s", strerror(errno));
    (void)printf("{\"us\": %.1f, \"cpu_s\": %.4f, \"load_us\": %llu, \"disk_bytes\": %llu, \"bytes\": %llu, "
                 "\"page_size\": %u, \"method\": \"%s\"}\n",
                 (double)wall / 1e3, seconds_of(&use), (unsigned long long)done->load_us,
                 (unsigned long long)done->disk_bytes, (unsigned long long)done->read_bytes,
                 done->n_arenas ? done->arenas[0]->page_size : 0, done->method);
    rv_frame_fini(&frame);
    (void)close(file);
    return 0;
}

static int command_fill(char **args)
{
    uint64_t size = bench_number(args[0]), start, wall;
    uint8_t *source = malloc(FILL_SOURCE);
    struct rusage before = {0}, after = {0};
    int fd = memfd_create("bench-fill", MFD_CLOEXEC);

    if (!source || fd < 0)
        bench_fail("no memory");
    for (uint32_t i = 0; i < FILL_SOURCE; i++)
        source[i] = (uint8_t)(i * 2654435761u >> 24);
    (void)getrusage(RUSAGE_SELF, &before);
    start = bench_now_ns();
    for (uint64_t at = 0; at < size;) {
        uint64_t length = size - at < FILL_CHUNK ? size - at : FILL_CHUNK;
        ssize_t n = pwrite(fd, source + at % FILL_SOURCE, (size_t)length, (off_t)at);

        if (n <= 0)
            bench_fail("fill: %s", n < 0 ? strerror(errno) : "no progress");
        at += (uint64_t)n;
    }
    wall = bench_now_ns() - start;
    (void)getrusage(RUSAGE_SELF, &after);
    (void)printf("{\"us\": %.1f, \"cpu_s\": %.4f, \"bytes\": %llu}\n", (double)wall / 1e3,
                 seconds_of(&after) - seconds_of(&before), (unsigned long long)size);
    free(source);
    (void)close(fd);
    return 0;
}

int main(int argc, char **argv)
{
    if ((argc == 6 || argc == 7) && strcmp(argv[1], "load") == 0)
        return command_load(argv + 2);
    if (argc == 3 && strcmp(argv[1], "fill") == 0)
        return command_fill(argv + 2);
    (void)fprintf(stderr, "usage: bench_loader load LOADER FILE DIRECT HUGE [UUID] | fill BYTES\n");
    return 2;
}
