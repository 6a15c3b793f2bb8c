/*
 * Device memory between processes, measured and tried with the functions that resvisor itself uses (common/cuda). For
 * tests/gpu/run.sh on a machine with a GPU; on the double of the driver it says the same without the silicon.
 *
 *   gpu-memory list                   devices: number, uuid, bytes, name
 *   gpu-memory times DEVICE MAX       import + map of another process' memory, by size up to MAX MiB: vmm and ipc, in
 * us gpu-memory survive DEVICE BACKEND whether memory is read the same after kill -9 of the process that made it
 *   gpu-memory read-only DEVICE       whether a store through a read-only mapping is refused (by the driver's memset)
 *   gpu-memory pinned DEVICE MIB      copy from pinned memory to the device, in bytes per second
 *   gpu-memory used DEVICE            bytes in use on the device, by NVML
 *
 * DEVICE is its number here. Results are words KEY=VALUE on standard output; exit status 0 = it was done, 1 = it was
 * not (a reason on standard error), 77 = there is no such thing here.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rpc.pb-c.h"
#include "rv_cuda.h"

#define EXIT_SKIPPED 77
#define PEER_FD 3
#define PATTERN 0x5a
#define CHECK_BYTES (1u << 20) /* read back at both ends of an arena */
#define MIB ((uint64_t)1 << 20)
#define READ_ONLY_BYTES (8 * MIB)
#define SURVIVE_BYTES (64 * MIB)
#define SLOT_BYTES (16 * MIB)
#define REPEATS 5
#define PASSES 8 /* of copies that are timed */

extern char **environ;

struct opened {
    struct rv_cuda *cuda;
    struct rv_cuda_device *device;
    struct rv_error err;
};

/* What a peer tells of the memory it has made; a descriptor may come with it. */
struct reply {
    int result;
    struct rv_arena arena;
    struct rv_error err;
};

static uint64_t now_us(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* A device that fails is a failure; one that is not there, or that has no such thing, is none. */
static int fail(const struct rv_error *err, int r)
{
    bool absent = r == -EOPNOTSUPP || r == -ENODEV || r == -ENOENT || r == -ENOSYS;

    (void)fprintf(stderr, "%s\n", err->message[0] ? err->message : strerror(-r));
    return absent && err->code != RESVISOR__V1__ERROR_CODE__ERROR_DEVICE_LOST ? EXIT_SKIPPED : 1;
}

static int device_open(struct opened *o, const char *number)
{
    struct rv_cuda_info info;
    int r = rv_cuda_open(&o->cuda, &o->err);

    if (r == 0)
        r = rv_cuda_device_info(o->cuda, (uint32_t)strtoul(number, NULL, 10), &info, &o->err);
    return r < 0 ? r : rv_cuda_device_open(o->cuda, info.uuid, &o->device, &o->err);
}

static void device_close(struct opened *o)
{
    rv_cuda_device_close(o->device);
    rv_cuda_close(o->cuda);
}

/* ---- the peer: makes memory, and keeps it until it is told to end or is killed ----------------------------------- */

static int arena_make(struct opened *o, bool vmm, uint64_t size, struct rv_cuda_memory *memory, struct reply *reply)
{
    int r = vmm ? rv_cuda_vmm_create(o->device, size, memory, &reply->arena, &reply->err)
                : rv_cuda_ipc_create(o->device, size, memory, &reply->arena, &reply->err);

    if (r == 0)
        r = rv_cuda_fill(o->device, memory->address, PATTERN, memory->size, &reply->err);
    if (r == 0 && vmm)
        r = rv_cuda_vmm_export(o->device, memory, &reply->err);
    return r;
}

static int peer_run(char **argv)
{
    struct opened o = {0};
    struct rv_cuda_memory memory = {0};
    struct reply reply = {0};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&reply, sizeof(reply)};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    bool vmm = strcmp(argv[3], "vmm") == 0;
    int fd = -1, r = device_open(&o, argv[2]);
    char end;

    reply.err = o.err;
    if (r == 0)
        r = arena_make(&o, vmm, strtoull(argv[4], NULL, 10), &memory, &reply);
    reply.result = r < 0 ? r : 0;
    fd = vmm && r >= 0 ? r : -1;
    if (fd >= 0) {
        struct cmsghdr *head;

        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        head = CMSG_FIRSTHDR(&message);
        *head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    }
    if (sendmsg(PEER_FD, &message, MSG_NOSIGNAL) < 0)
        return 1;
    while (read(PEER_FD, &end, 1) < 0 && errno == EINTR)
        ;
    if (fd >= 0)
        (void)close(fd);
    if (o.device)
        rv_cuda_memory_close(o.device, &memory);
    device_close(&o);
    return 0;
}

struct peer {
    pid_t pid;
    int socket, fd;
    struct reply reply;
};

static void peer_end(struct peer *peer, int signal)
{
    if (peer->pid > 0 && signal)
        (void)kill(peer->pid, signal);
    if (peer->socket >= 0)
        (void)close(peer->socket);
    if (peer->pid > 0)
        (void)waitpid(peer->pid, NULL, 0);
    peer->pid = 0;
    peer->socket = -1;
}

static void peer_forget(struct peer *peer)
{
    peer_end(peer, 0);
    if (peer->fd >= 0)
        (void)close(peer->fd);
    peer->fd = -1;
}

static int reply_receive(struct peer *peer)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&peer->reply, sizeof(peer->reply)};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *head;

    if (recvmsg(peer->socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof(peer->reply))
        return -ECONNRESET;
    head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_type == SCM_RIGHTS)
        memcpy(&peer->fd, CMSG_DATA(head), sizeof(peer->fd));
    return peer->reply.result;
}

/* Another process with `size` bytes of the device. By exec: CUDA does not survive a fork. */
static int peer_start(struct peer *peer, const char *device, const char *backend, uint64_t size)
{
    char bytes[32], program[] = "gpu-memory", command[] = "peer";
    char *argv[] = {program, command, (char *)device, (char *)backend, bytes, NULL};
    posix_spawn_file_actions_t actions;
    int sockets[2], r;

    *peer = (struct peer){.socket = -1, .fd = -1};
    (void)snprintf(bytes, sizeof(bytes), "%" PRIu64, size);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0)
        return -errno;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, sockets[1], PEER_FD);
    r = -posix_spawn(&peer->pid, "/proc/self/exe", &actions, NULL, argv, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(sockets[1]);
    peer->socket = sockets[0];
    return r < 0 ? r : reply_receive(peer);
}

static int import(struct opened *o, const struct peer *peer, bool vmm, bool writable, struct rv_cuda_memory *memory)
{
    return vmm ? rv_cuda_vmm_import(o->device, peer->fd, &peer->reply.arena, writable, memory, &o->err)
               : rv_cuda_ipc_open(o->device, &peer->reply.arena, memory, &o->err);
}

/* Both ends of it hold what the peer has written: 1 or 0, or a negative errno. */
static int is_same(struct opened *o, const struct rv_cuda_memory *memory)
{
    uint64_t length = memory->size < CHECK_BYTES ? memory->size : CHECK_BYTES, i;
    uint8_t *bytes = malloc(2 * length);
    int r = bytes ? 0 : -ENOMEM;

    if (r == 0)
        r = rv_cuda_read(o->device, bytes, memory->address, length, &o->err);
    if (r == 0)
        r = rv_cuda_read(o->device, bytes + length, memory->address + memory->size - length, length, &o->err);
    for (i = 0; r == 0 && i < 2 * length && bytes[i] == PATTERN;)
        i++;
    r = r == 0 ? i == 2 * length : r;
    free(bytes);
    return r;
}

/* ---- commands ------------------------------------------------------------------------------------------------------
 */

static int list(char **argv)
{
    struct opened o = {0};
    struct rv_cuda_info info;
    char uuid[RV_DEVICE_UUID_TEXT];
    uint32_t i;
    int r = rv_cuda_open(&o.cuda, &o.err);

    (void)argv;
    for (i = 0; r == 0 && i < rv_cuda_device_count(o.cuda); i++) {
        r = rv_cuda_device_info(o.cuda, i, &info, &o.err);
        if (r == 0)
            (void)printf("device=%u uuid=%s bytes=%" PRIu64 " integrated=%d capability=%u.%u driver=%d name=%s\n", i,
                         rv_device_uuid_text(info.uuid, uuid), info.total_bytes, info.integrated, info.major,
                         info.minor, rv_cuda_driver_version(o.cuda), info.name);
    }
    device_close(&o);
    return r < 0 ? fail(&o.err, r) : 0;
}

/* Microseconds of the median import of one size; the reason on stdout when it does not work. */
static bool time_one(struct opened *o, const char *device, const char *backend, uint64_t size)
{
    uint64_t took[REPEATS] = {0}, begin;
    bool vmm = strcmp(backend, "vmm") == 0;
    struct peer peer;
    int r = peer_start(&peer, device, backend, size), i, j;

    if (r < 0) {
        (void)printf(" %s=-", backend);
        (void)fprintf(stderr, "%s, %" PRIu64 " MiB: %s\n", backend, size / MIB,
                      peer.reply.err.message[0] ? peer.reply.err.message : strerror(-r));
    }
    for (i = 0; r >= 0 && i < REPEATS; i++) {
        struct rv_cuda_memory memory = {0};

        begin = now_us();
        r = import(o, &peer, vmm, false, &memory);
        begin = now_us() - begin;
        for (j = i; j > 0 && took[j - 1] > begin; j--)
            took[j] = took[j - 1];
        took[j] = begin;
        if (r == 0 && i == 0 && is_same(o, &memory) != 1)
            r = -EBADMSG;
        rv_cuda_memory_close(o->device, &memory);
        if (r < 0)
            (void)printf(" %s=failed", backend);
    }
    if (r >= 0)
        (void)printf(" %s=%" PRIu64, backend, took[REPEATS / 2]);
    peer_forget(&peer);
    return r >= 0;
}

static int times(char **argv)
{
    uint64_t limit = strtoull(argv[3], NULL, 10) * MIB, size;
    struct opened o = {0};
    int r = device_open(&o, argv[2]);
    bool any = false;

    for (size = MIB; r == 0 && size <= limit; size *= 4) {
        bool vmm, ipc;

        (void)printf("mib=%" PRIu64, size / MIB);
        vmm = time_one(&o, argv[2], "vmm", size);
        ipc = time_one(&o, argv[2], "ipc", size);
        (void)printf("\n");
        any = any || vmm || ipc;
        if (!vmm && !ipc)
            break;
    }
    device_close(&o);
    return r < 0 ? fail(&o.err, r) : any ? 0 : EXIT_SKIPPED;
}

static int survive(char **argv)
{
    bool vmm = strcmp(argv[3], "vmm") == 0;
    struct rv_cuda_memory memory = {0}, again = {0};
    struct opened o = {0};
    struct peer peer = {.socket = -1, .fd = -1};
    int r = device_open(&o, argv[2]), before = 0, after = 0, later = 0;

    if (r == 0 && (r = peer_start(&peer, argv[2], argv[3], SURVIVE_BYTES)) < 0)
        o.err = peer.reply.err;
    if (r == 0 && (r = import(&o, &peer, vmm, false, &memory)) == 0) {
        before = is_same(&o, &memory);
        peer_end(&peer, SIGKILL);
        after = is_same(&o, &memory);
        rv_cuda_memory_close(o.device, &memory);
        if (vmm && import(&o, &peer, vmm, false, &again) == 0) {
            later = is_same(&o, &again);
            rv_cuda_memory_close(o.device, &again);
        }
        (void)printf("before=%d after=%d imported_later=%d\n", before, after, later);
    }
    peer_forget(&peer);
    device_close(&o);
    return r < 0 ? fail(&o.err, r) : 0;
}

static int read_only(char **argv)
{
    struct rv_cuda_memory memory = {0};
    struct opened o = {0};
    struct peer peer = {.socket = -1, .fd = -1};
    int r = device_open(&o, argv[2]), stored;

    if (r == 0 && (r = peer_start(&peer, argv[2], "vmm", READ_ONLY_BYTES)) < 0)
        o.err = peer.reply.err;
    if (r == 0 && (r = import(&o, &peer, true, false, &memory)) == 0) {
        stored = rv_cuda_fill(o.device, memory.address, 0, memory.size, &o.err);
        (void)printf("refused=%d error=%d\n", stored < 0, rv_cuda_last_error());
    }
    peer_forget(&peer);
    device_close(&o);
    return r < 0 ? fail(&o.err, r) : 0;
}

/* One after the other through two slots, as the loader's ring does. */
static int copy_all(struct opened *o, struct rv_cuda_copier *copier, uint64_t address, uint8_t *slots, uint64_t size)
{
    uint64_t at, mark = 0;
    int r = 0;

    for (at = 0; r == 0 && at + SLOT_BYTES <= size; at += SLOT_BYTES)
        r = rv_cuda_copier_put(copier, address + at, slots + at % (2 * SLOT_BYTES), SLOT_BYTES, &o->err);
    if (r == 0)
        r = rv_cuda_copier_mark(copier, &mark, &o->err);
    return r < 0 ? r : rv_cuda_copier_wait(copier, mark, &o->err);
}

static int pinned(char **argv)
{
    uint64_t size = strtoull(argv[3], NULL, 10) * MIB, begin, took;
    struct rv_cuda_memory memory = {0};
    struct rv_cuda_copier *copier = NULL;
    struct rv_arena arena;
    struct opened o = {0};
    uint8_t *slots = NULL;
    int i, r = device_open(&o, argv[2]);

    if (r == 0 && !(slots = rv_cuda_host_alloc(o.device, 2 * SLOT_BYTES, &o.err)))
        r = -ENOMEM;
    if (r == 0)
        memset(slots, PATTERN, 2 * SLOT_BYTES);
    if (r == 0 && (r = rv_cuda_vmm_create(o.device, size, &memory, &arena, &o.err)) == -EOPNOTSUPP)
        r = rv_cuda_ipc_create(o.device, size, &memory, &arena, &o.err);
    if (r == 0 && (r = rv_cuda_copier_create(o.device, &copier, &o.err)) == 0 &&
        (r = copy_all(&o, copier, memory.address, slots, size)) == 0) {
        begin = now_us();
        for (i = 0; r == 0 && i < PASSES; i++)
            r = copy_all(&o, copier, memory.address, slots, size);
        took = now_us() - begin;
        if (r == 0)
            (void)printf("bytes_per_second=%.0f same=%d\n", PASSES * (double)size * 1e6 / (double)(took ? took : 1),
                         is_same(&o, &memory));
    }
    if (copier)
        rv_cuda_copier_destroy(copier);
    if (o.device) {
        rv_cuda_memory_close(o.device, &memory);
        rv_cuda_host_free(o.device, slots);
    }
    device_close(&o);
    return r < 0 ? fail(&o.err, r) : 0;
}

/* nvml.h: nvmlMemory_t of nvmlDeviceGetMemoryInfo */
struct nvml_memory {
    unsigned long long total, free, used;
};

static int used(char **argv)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL), *handle = NULL;
    struct opened o = {0};
    struct rv_cuda_info info;
    struct nvml_memory memory = {0};
    char uuid[RV_DEVICE_UUID_TEXT];
    int (*init)(void) = NULL, (*by_uuid)(const char *, void **) = NULL, (*ask)(void *, struct nvml_memory *) = NULL;
    int r = rv_cuda_open(&o.cuda, &o.err);

    if (r == 0)
        r = rv_cuda_device_info(o.cuda, (uint32_t)strtoul(argv[2], NULL, 10), &info, &o.err);
    rv_cuda_close(o.cuda);
    if (r < 0)
        return fail(&o.err, r);
    if (library) {
        *(void **)&init = dlsym(library, "nvmlInit_v2");
        *(void **)&by_uuid = dlsym(library, "nvmlDeviceGetHandleByUUID");
        *(void **)&ask = dlsym(library, "nvmlDeviceGetMemoryInfo");
    }
    if (!init || !by_uuid || !ask) {
        (void)fprintf(stderr, "libnvidia-ml.so.1 is not there\n");
        return EXIT_SKIPPED;
    }
    if ((r = init()) != 0 || (r = by_uuid(rv_device_uuid_text(info.uuid, uuid), &handle)) != 0 ||
        (r = ask(handle, &memory)) != 0) {
        (void)fprintf(stderr, "NVML does not tell: error %d\n", r);
        return EXIT_SKIPPED;
    }
    (void)printf("used=%llu total=%llu\n", memory.used, memory.total);
    return 0;
}

static const struct {
    const char *name;
    int arguments;
    int (*run)(char **argv);
} commands[] = {
    {"list", 0, list},     {"times", 2, times}, {"survive", 2, survive}, {"read-only", 1, read_only},
    {"pinned", 2, pinned}, {"used", 1, used},   {"peer", 3, peer_run},
};

int main(int argc, char **argv)
{
    size_t i;

    for (i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
        if (argc == commands[i].arguments + 2 && strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argv);
    }
    (void)fprintf(stderr,
                  "Usage: gpu-memory list | times DEVICE MAX_MIB | survive DEVICE vmm|ipc | read-only DEVICE |\n"
                  "       pinned DEVICE MIB | used DEVICE\n");
    return 2;
}
