/*
 * Cases on the double of libcuda. A case runs in a child process of its own, because configuration and driver belong
 * to a process: it sets FAKECUDA, loads the double, takes its functions and calls cuInit.
 */
#ifndef FAKECUDA_CASE_H
#define FAKECUDA_CASE_H

#include <dlfcn.h>
#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "cuda/driver.h"

#define MIB (1ull << 20)
#define CASE_SECONDS 60

/* Ends the case when the condition does not hold. */
#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                      \
        }                                                                                  \
    } while (0)

#define WANT(call, wanted)                                                                                   \
    do {                                                                                                     \
        int got_ = (int)(call);                                                                              \
        if (got_ != (int)(wanted)) {                                                                         \
            fprintf(stderr, "%s:%d: %s is %d, wanted %d\n", __FILE__, __LINE__, #call, got_, (int)(wanted)); \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

#define OK(call) WANT(call, CUDA_SUCCESS)

#ifndef RV_FAKECUDA
#define RV_FAKECUDA "" /* the folder of the double, from CMake; only a header that is compiled alone has none */
#endif

static struct rv_cuda_driver cu;
static PFN_cuGetProcAddress_v12000 search;

static inline void driver_load(const char *configuration)
{
    if (configuration != NULL)
        setenv("FAKECUDA", configuration, 1);
    void *library = dlopen(RV_FAKECUDA "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&search = dlsym(library, "cuGetProcAddress_v2");
    CHECK(search != NULL);
#define X(name, version, needed) OK(search("cu" #name, (void **)&cu.name, RV_CUDA_REQUEST_VERSION, 1, NULL));
    RV_CUDA_FUNCTIONS(X)
#undef X
}

/* Loaded, initialised, and the first device's primary context is current. */
static inline CUcontext driver_start(const char *configuration)
{
    CUcontext context;
    driver_load(configuration);
    OK(cu.Init(0));
    OK(cu.DevicePrimaryCtxRetain(&context, 0));
    OK(cu.CtxSetCurrent(context));
    return context;
}

static inline int child_wait(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) != child)
        ;
    return status;
}

/* Runs a case in a child and wants it to end well. */
static inline void case_run(void (*body)(void))
{
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(CASE_SECONDS);
        body();
        exit(0);
    }
    assert_int_equal(child_wait(child), 0);
}

/* A second process of the same machine, made before this one loads the driver. Its body gets one end of a socket. */
struct peer {
    pid_t pid;
    int socket;
};

static inline struct peer peer_start(void (*body)(int socket))
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    struct peer peer = {.pid = fork(), .socket = pair[0]};
    CHECK(peer.pid >= 0);
    if (peer.pid == 0) {
        alarm(CASE_SECONDS);
        close(pair[0]);
        body(pair[1]);
        exit(0);
    }
    close(pair[1]);
    return peer;
}

static inline void peer_end(struct peer *peer)
{
    close(peer->socket);
    WANT(child_wait(peer->pid), 0);
}

/* The exit status of one that is killed is not looked at. */
static inline void peer_kill(struct peer *peer)
{
    kill(peer->pid, SIGKILL);
    child_wait(peer->pid);
    close(peer->socket);
}

/* Sends bytes, and a descriptor if it is not -1. */
static inline void tell(int socket, const void *bytes, size_t size, int fd)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(fd))] = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof(control);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(fd));
        memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    CHECK(sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)size);
}

/* Waits for bytes; the descriptor that came with them, or -1. */
static inline int hear(int socket, void *bytes, size_t size)
{
    int fd = -1;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(fd))] = {0};
    struct iovec part = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == (ssize_t)size);
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL)
        memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    return fd;
}

/* ---- the state folder ------------------------------------------------------------------------------------------- */

static char state_folder[64];

static inline void state_make(void)
{
    snprintf(state_folder, sizeof(state_folder),
             "/tmp/fakecuda-XX"
             "XXXX");
    CHECK(mkdtemp(state_folder) != NULL);
    setenv("FAKECUDA_STATE", state_folder, 1);
}

static inline void state_write(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", state_folder, name);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static inline void state_clear(const char *name)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", state_folder, name);
    unlink(path);
}

static inline int state_unlink(const char *path, const struct stat *status, int type, struct FTW *place)
{
    (void)status, (void)type, (void)place;
    return remove(path);
}

static inline void state_remove(void)
{
    nftw(state_folder, state_unlink, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- virtual memory management ---------------------------------------------------------------------------------- */

#define FD_HANDLE CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

static inline CUmemAllocationProp properties(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = FD_HANDLE;
    return prop;
}

static inline CUmemGenericAllocationHandle create(size_t size)
{
    const CUmemAllocationProp prop = properties();
    CUmemGenericAllocationHandle handle;
    OK(cu.MemCreate(&handle, size, &prop, 0));
    return handle;
}

static inline CUresult access_set(CUdeviceptr at, size_t size, CUmemAccess_flags flags)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}, .flags = flags};
    return cu.MemSetAccess(at, size, &access, 1);
}

static inline CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t size, CUmemAccess_flags flags)
{
    CUdeviceptr at;
    OK(cu.MemAddressReserve(&at, size, 0, 0, 0));
    OK(cu.MemMap(at, size, 0, handle, 0));
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
        OK(access_set(at, size, flags));
    return at;
}

static inline int export_fd(CUmemGenericAllocationHandle handle)
{
    int fd = -1;
    OK(cu.MemExportToShareableHandle(&fd, handle, FD_HANDLE, 0));
    CHECK(fd >= 0);
    return fd;
}

static inline CUresult import_fd(CUmemGenericAllocationHandle *handle, int fd)
{
    return cu.MemImportFromShareableHandle(handle, (void *)(intptr_t)fd, FD_HANDLE);
}

static inline uint64_t used_bytes(void)
{
    size_t free_bytes, total;
    OK(cu.MemGetInfo(&free_bytes, &total));
    return total - free_bytes;
}

#define CASE(name)                 \
    static void name##_body(void); \
    static void name(void **state) \
    {                              \
        (void)state;               \
        case_run(name##_body);     \
    }                              \
    static void name##_body(void)

#endif
