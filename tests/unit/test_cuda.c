/*
 * common/cuda on the driver's double (tests/fakecuda). A driver is what a process finds when it first looks, so each
 * case runs in a process of its own: this program again, with the case's name and the double's configuration.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "clock.h"
#include "cuda/driver.h"
#include "cuda/rv_cuda.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define MIB (UINT64_C(1) << 20)

/* In the process of a case: says what was not so, and ends it. */
#define CHECK(condition)                                                                                             \
    do {                                                                                                             \
        if (!(condition)) {                                                                                          \
            fprintf(stderr, "%s:%d: not so: %s\n    last error: %s\n", __FILE__, __LINE__, #condition, err.message); \
            exit(1);                                                                                                 \
        }                                                                                                            \
    } while (0)

static struct rv_error err;
static struct rv_cuda *cuda;
static struct rv_cuda_device *device;
static const char *self;

static bool says(const char *text)
{
    return strstr(err.message, text) != NULL;
}

/* ---- processes of cases ------------------------------------------------------------------------------------------ */

/* Runs `self NAME [ARGUMENT]` with the environment of this process and waits. Returns its wait status. */
static int run_case(const char *name, const char *argument)
{
    char *argv[] = {(char *)self, (char *)name, (char *)argument, NULL};
    extern char **environ;
    pid_t pid;
    int status = -1;

    if (posix_spawn(&pid, self, NULL, NULL, argv, environ) != 0 || waitpid(pid, &status, 0) != pid)
        return -1;
    return status;
}

static void open_device_of(uint32_t ordinal, struct rv_cuda_device **ret_device)
{
    struct rv_cuda_info info;

    CHECK(rv_cuda_device_info(cuda, ordinal, &info, &err) == 0);
    CHECK(rv_cuda_device_open(cuda, info.uuid, ret_device, &err) == 0);
}

static void open_device(void)
{
    CHECK(rv_cuda_open(&cuda, &err) == 0);
    open_device_of(0, &device);
}

static void close_device(void)
{
    rv_cuda_device_close(device);
    rv_cuda_close(cuda);
}

/* ---- finding the driver ------------------------------------------------------------------------------------------ */

static void case_no_library(const char *argument)
{
    (void)argument;
    CHECK(rv_cuda_open(&cuda, &err) == -ENOENT);
    CHECK(err.code == CODE(NO_SUCH_DEVICE) && says("no CUDA driver") && says("libcuda.so.1"));
    CHECK(rv_cuda_last_error() == 0);
}

static void case_open_fails(const char *wanted)
{
    int number = atoi(wanted);
    const char *text = strchr(wanted, ' ') + 1;

    CHECK(rv_cuda_open(&cuda, &err) == -number);
    CHECK(says(text) || strstr(err.remedy, text));
    CHECK(cuda == NULL);
}

/* wanted: which of vmm, fd_handles, integrated, pageable are so. */
static void case_facts(const char *wanted)
{
    struct rv_cuda_info info, again;
    char uuid[RV_DEVICE_UUID_TEXT];
    uint32_t count;

    CHECK(rv_cuda_open(&cuda, &err) == 0);
    CHECK(rv_cuda_driver_version(cuda) == 13000);
    count = rv_cuda_device_count(cuda);
    CHECK(count >= 1);
    CHECK(rv_cuda_device_info(cuda, 0, &info, &err) == 0);
    CHECK(info.vmm == (strstr(wanted, "vmm") != NULL));
    CHECK(info.fd_handles == (strstr(wanted, "fd") != NULL));
    CHECK(info.integrated == (strstr(wanted, "integrated") != NULL));
    CHECK(info.pageable == (strstr(wanted, "pageable") != NULL));
    CHECK((info.granularity == 2 * MIB) == (info.vmm && info.fd_handles));
    CHECK(info.total_bytes == 8ull << 30 && info.name[0] && info.pci[0] && info.major > 0);
    CHECK(info.attribute_count > 20 && info.attribute_count <= RV_CUDA_ATTRIBUTES_MAX);
    CHECK(strlen(rv_device_uuid_text(info.uuid, uuid)) == RV_DEVICE_UUID_TEXT - 1);
    CHECK(rv_cuda_device_info(cuda, count, &info, &err) == -ENODEV && err.code == CODE(NO_SUCH_DEVICE));
    for (uint32_t i = 0; i < count; i++)
        CHECK(rv_cuda_device_info(cuda, i, &again, &err) == 0 && again.ordinal == i);
    memset(info.uuid, 0xee, sizeof(info.uuid));
    CHECK(rv_cuda_device_open(cuda, info.uuid, &device, &err) == -ENODEV && says("GPU-eeeeeeee-eeee-"));
    rv_cuda_close(cuda);
}

/* An attribute that the driver does not know is left out; a name with control characters is written plainly. */
static void case_attributes(const char *argument)
{
    struct rv_cuda_info info;

    (void)argument;
    CHECK(rv_cuda_open(&cuda, &err) == 0);
    CHECK(rv_cuda_device_info(cuda, 0, &info, &err) == 0);
    for (uint32_t i = 0; i < info.attribute_count; i++)
        CHECK(info.attributes[i].number != 103 && info.attributes[i].name[0]);
    CHECK(info.vmm && !info.fd_handles);
    CHECK(strchr(info.name, '\033') == NULL && strstr(info.name, "x1b"));
    rv_cuda_close(cuda);
}

/* Without a function of one backend the other still works, and the reason is named. */
static void case_missing_vmm(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_cuda_info info;
    struct rv_arena arena;

    (void)argument;
    open_device();
    CHECK(rv_cuda_device_info(cuda, 0, &info, &err) == 0 && !info.vmm && !info.fd_handles);
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == -EOPNOTSUPP && says("cuMemSetAccess"));
    arena = (struct rv_arena){.size = 2 * MIB, .backend = RV_BACKEND_CUDA_VMM};
    CHECK(rv_cuda_vmm_import(device, 0, &arena, false, &memory, &err) == -EOPNOTSUPP && says("cuMemSetAccess"));
    CHECK(rv_cuda_last_error() == 0);
    CHECK(rv_cuda_ipc_create(device, 1, &memory, &arena, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

static void case_missing_ipc(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;

    (void)argument;
    open_device();
    CHECK(rv_cuda_ipc_create(device, 1, &memory, &arena, &err) == -EOPNOTSUPP && says("cuIpcOpenMemHandle"));
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

/* The device has the functions and does not do it: the call's own error. */
static void case_not_supported(const char *call)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;

    open_device();
    if (strstr(call, "Ipc"))
        CHECK(rv_cuda_ipc_create(device, 1, &memory, &arena, &err) == -EOPNOTSUPP);
    else
        CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == -EOPNOTSUPP);
    CHECK(says(call) && says("801 CUDA_ERROR_NOT_SUPPORTED") && err.code == CODE(DEVICE));
    CHECK(rv_cuda_last_error() == 801);
    close_device();
}

/* ---- arenas ------------------------------------------------------------------------------------------------------ */

static void pattern(uint8_t *bytes, uint64_t length, uint8_t seed)
{
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251 + seed);
}

static void check_pattern(uint64_t address, uint64_t length, uint8_t seed)
{
    uint8_t *wanted = malloc(length), *found = malloc(length);

    CHECK(wanted && found);
    pattern(wanted, length, seed);
    CHECK(rv_cuda_read(device, found, address, length, &err) == 0);
    CHECK(memcmp(wanted, found, length) == 0);
    free(wanted);
    free(found);
}

static void write_pattern(uint64_t address, uint64_t length, uint8_t seed)
{
    uint8_t *bytes = malloc(length);

    CHECK(bytes);
    pattern(bytes, length, seed);
    CHECK(rv_cuda_write(device, address, bytes, length, &err) == 0);
    free(bytes);
}

/* The loader's way: create, fill, export, exit; and the importer's, also in another process. */
static void case_vmm(const char *argument)
{
    struct rv_cuda_memory memory = {0}, second = {0};
    struct rv_arena arena;
    char text[32];
    int fd;

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 3 * MIB + 1, &memory, &arena, &err) == 0);
    CHECK(memory.address && memory.size == 4 * MIB && memory.backend == RV_BACKEND_CUDA_VMM);
    CHECK(arena.size == 4 * MIB && arena.page_size == 2 * MIB && arena.backend == RV_BACKEND_CUDA_VMM);
    CHECK(rv_cuda_fill(device, memory.address, 0x5a, memory.size, &err) == 0);
    write_pattern(memory.address + 100, 1000, 3);
    fd = rv_cuda_vmm_export(device, &memory, &err);
    CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
    CHECK(memory.address == 0 && memory.handle == 0);
    CHECK(rv_cuda_vmm_export(device, &memory, &err) == -EINVAL);
    rv_cuda_memory_close(device, &memory);
    CHECK(rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) == 0);
    CHECK(rv_cuda_vmm_import(device, fd, &arena, true, &second, &err) == 0);
    CHECK(memory.address && second.address && memory.address != second.address);
    check_pattern(memory.address + 100, 1000, 3);
    write_pattern(second.address + 2 * MIB, 1000, 4);
    check_pattern(memory.address + 2 * MIB, 1000, 4);
    rv_cuda_memory_close(device, &second);
    CHECK(second.address == 0);
    rv_cuda_memory_close(device, &second);
    check_pattern(memory.address + 100, 1000, 3);
    CHECK(fcntl(fd, F_SETFD, 0) == 0);
    (void)snprintf(text, sizeof(text), "%d", fd);
    CHECK(run_case("vmm_importer", text) == 0);
    rv_cuda_memory_close(device, &memory);
    CHECK(close(fd) == 0);
    close_device();
}

static void case_vmm_importer(const char *fd)
{
    struct rv_arena arena = {.size = 4 * MIB, .page_size = 2 * MIB, .backend = RV_BACKEND_CUDA_VMM};
    struct rv_cuda_memory memory = {0};

    open_device();
    CHECK(rv_cuda_vmm_import(device, atoi(fd), &arena, false, &memory, &err) == 0);
    check_pattern(memory.address + 100, 1000, 3);
    check_pattern(memory.address + 2 * MIB, 1000, 4);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

/* What is no arena is refused, by us or by the driver, and nothing is left of it. */
static void case_vmm_wrong(const char *argument)
{
    struct rv_arena arena = {.size = 4 * MIB, .page_size = 2 * MIB, .backend = RV_BACKEND_CUDA_VMM}, other;
    struct rv_cuda_memory memory = {0};
    int fd, null = open("/dev/null", O_RDONLY | O_CLOEXEC);

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_import(device, null, &arena, false, &memory, &err) < 0 && says("cuMemImportFromShareableHandle"));
    CHECK(rv_cuda_vmm_import(device, -1, &arena, false, &memory, &err) == -EINVAL);
    CHECK(rv_cuda_vmm_create(device, UINT64_MAX, &memory, &other, &err) == -EFBIG && err.code == CODE(TOO_LARGE));
    CHECK(rv_cuda_vmm_create(device, 0, &memory, &other, &err) == 0 && memory.size == 2 * MIB);
    fd = rv_cuda_vmm_export(device, &memory, &err);
    CHECK(fd >= 0);
    CHECK(rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) < 0); /* it is smaller than is said */
    arena.size = 2 * MIB + 4096;
    CHECK(rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) == -EINVAL);
    arena.size = 2 * MIB;
    arena.backend = RV_BACKEND_CUDA_IPC;
    CHECK(rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) == -EINVAL);
    CHECK(memory.address == 0);
    CHECK(close(fd) == 0 && close(null) == 0);
    close_device();
}

/* A write through a read-only mapping breaks the context: said so from then on, and everything still closes. */
static void case_read_only(const char *argument)
{
    struct rv_cuda_memory memory = {0}, other = {0};
    struct rv_arena arena, more;
    int fd;

    (void)argument;
    open_device();
    CHECK(rv_cuda_device_check(device, &err) == 0);
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    fd = rv_cuda_vmm_export(device, &memory, &err);
    CHECK(fd >= 0 && rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) == 0);
    CHECK(rv_cuda_ipc_create(device, 1, &other, &more, &err) == 0);
    CHECK(rv_cuda_fill(device, memory.address, 1, 4096, &err) == -ENODEV);
    CHECK(err.code == CODE(DEVICE_LOST) && rv_cuda_last_error() > 0);
    CHECK(rv_cuda_device_check(device, &err) == -ENODEV && err.code == CODE(DEVICE_LOST));
    CHECK(rv_cuda_read(device, &(uint8_t){0}, other.address, 1, &err) == -ENODEV);
    rv_cuda_memory_close(device, &memory);
    rv_cuda_memory_close(device, &other);
    CHECK(close(fd) == 0);
    close_device();
}

static void case_ipc(const char *argument)
{
    struct rv_cuda_memory memory = {0}, other = {0};
    char text[RV_IPC_HANDLE_SIZE * 2 + 1];
    struct rv_arena arena;

    (void)argument;
    open_device();
    CHECK(rv_cuda_ipc_create(device, 5 * MIB, &memory, &arena, &err) == 0);
    CHECK(arena.size == 6 * MIB && memory.size == 6 * MIB && memory.owned && arena.backend == RV_BACKEND_CUDA_IPC);
    write_pattern(memory.address + 17, 5000, 9);
    CHECK(rv_cuda_ipc_open(device, &arena, &other, &err) < 0); /* one's own handle cannot be opened */
    for (unsigned i = 0; i < RV_IPC_HANDLE_SIZE; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", arena.handle[i]);
    CHECK(run_case("ipc_importer", text) == 0);
    check_pattern(memory.address + 17, 5000, 10); /* IPC cannot be read-only */
    rv_cuda_memory_close(device, &memory);
    CHECK(memory.address == 0);
    close_device();
}

static void case_ipc_importer(const char *text)
{
    struct rv_arena arena = {.size = 6 * MIB, .page_size = 2 * MIB, .backend = RV_BACKEND_CUDA_IPC};
    struct rv_cuda_memory memory = {0};

    for (unsigned i = 0; i < RV_IPC_HANDLE_SIZE; i++) {
        unsigned byte = 0;

        CHECK(sscanf(text + 2 * i, "%2x", &byte) == 1);
        arena.handle[i] = (uint8_t)byte;
    }
    open_device();
    CHECK(rv_cuda_ipc_open(device, &arena, &memory, &err) == 0 && !memory.owned && memory.size == 6 * MIB);
    check_pattern(memory.address + 17, 5000, 9);
    write_pattern(memory.address + 17, 5000, 10);
    rv_cuda_memory_close(device, &memory);
    CHECK(memory.address == 0);
    arena.size = 8 * MIB; /* more than it has */
    CHECK(rv_cuda_ipc_open(device, &arena, &memory, &err) == -EINVAL && says("6291456 bytes"));
    arena.size = 6 * MIB;
    CHECK(rv_cuda_ipc_open(device, &arena, &memory, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    arena.handle[3] ^= 0xff;
    arena.handle[9] ^= 0xff;
    CHECK(rv_cuda_ipc_open(device, &arena, &memory, &err) < 0 && says("cuIpcOpenMemHandle"));
    close_device();
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

static void case_copier(const char *argument)
{
    enum { SLOTS = 4, CHUNK = 64 * 1024, CHUNKS = 48 };
    struct rv_cuda_copier *copier = NULL;
    struct rv_cuda_memory memory = {0};
    uint64_t marks[SLOTS] = {0}, last = 0, reached = 0;
    struct rv_arena arena;
    uint8_t *ring, *all = malloc((size_t)CHUNK * CHUNKS), *found = malloc((size_t)CHUNK * CHUNKS);

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, (uint64_t)CHUNK * (CHUNKS + 2), &memory, &arena, &err) == 0);
    ring = rv_cuda_host_alloc(device, (uint64_t)SLOTS * CHUNK, &err);
    CHECK(ring && (uintptr_t)ring % 4096 == 0 && all && found);
    CHECK(rv_cuda_fill(device, memory.address, 0xff, memory.size, &err) == 0);
    CHECK(rv_cuda_copier_create(device, &copier, &err) == 0);
    CHECK(rv_cuda_copier_reached(copier) == 0);
    for (unsigned i = 0; i < CHUNKS; i++) {
        CHECK(rv_cuda_copier_wait(copier, marks[i % SLOTS], &err) == 0);
        pattern(ring + i % SLOTS * CHUNK, CHUNK, (uint8_t)i);
        memcpy(all + (size_t)i * CHUNK, ring + i % SLOTS * CHUNK, CHUNK);
        CHECK(rv_cuda_copier_put(copier, memory.address + (uint64_t)i * CHUNK, ring + i % SLOTS * CHUNK, CHUNK, &err) ==
              0);
        CHECK(rv_cuda_copier_mark(copier, &marks[i % SLOTS], &err) == 0);
        CHECK(marks[i % SLOTS] == i + 1);
        CHECK(rv_cuda_copier_reached(copier) >= reached);
        reached = rv_cuda_copier_reached(copier);
        CHECK(reached <= i + 1);
    }
    CHECK(rv_cuda_copier_zero(copier, memory.address + (uint64_t)CHUNK * CHUNKS, 2 * CHUNK, &err) == 0);
    for (unsigned i = 0; i < 3 * RV_CUDA_MARKS_MAX; i++) /* more than fit: the oldest is waited for */
        CHECK(rv_cuda_copier_mark(copier, &last, &err) == 0);
    CHECK(last == CHUNKS + 3 * RV_CUDA_MARKS_MAX);
    CHECK(rv_cuda_copier_wait(copier, last, &err) == 0 && rv_cuda_copier_reached(copier) == last);
    CHECK(rv_cuda_copier_wait(copier, last + 1, &err) == -EINVAL);
    CHECK(rv_cuda_copier_put(copier, memory.address, ring, 0, &err) == 0);
    rv_cuda_copier_destroy(copier);
    CHECK(rv_cuda_read(device, found, memory.address, (uint64_t)CHUNK * CHUNKS, &err) == 0);
    CHECK(memcmp(all, found, (size_t)CHUNK * CHUNKS) == 0);
    CHECK(rv_cuda_read(device, found, memory.address + (uint64_t)CHUNK * CHUNKS, 2 * CHUNK, &err) == 0);
    for (unsigned i = 0; i < 2 * CHUNK; i++)
        CHECK(found[i] == 0);
    rv_cuda_host_free(device, ring);
    rv_cuda_host_free(device, NULL);
    rv_cuda_copier_destroy(NULL);
    rv_cuda_memory_close(device, &memory);
    free(all);
    free(found);
    close_device();
}

/* A copy to or from addresses that are nobody's is an error of that call. */
static void case_wrong_address(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;
    uint8_t bytes[64] = {0};

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    CHECK(rv_cuda_read(device, bytes, memory.address, 0, &err) == 0);
    CHECK(rv_cuda_read(device, bytes, memory.address + memory.size, sizeof(bytes), &err) < 0);
    CHECK(says("cuMemcpyDtoHAsync") && rv_cuda_last_error() == 1);
    CHECK(rv_cuda_write(device, memory.address + memory.size - 1, bytes, sizeof(bytes), &err) < 0);
    CHECK(rv_cuda_device_check(device, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

/* ---- contexts, threads, fork ------------------------------------------------------------------------------------- */

/* Whatever was current before a call is current after it. */
static void case_contexts(const char *argument)
{
    struct rv_cuda_copier *copier = NULL;
    struct rv_cuda_memory memory = {0};
    const struct rv_cuda_driver *driver;
    struct rv_cuda_device *other;
    CUcontext mine = NULL, now = NULL;
    struct rv_arena arena;
    uint64_t mark = 0;
    int fd;

    (void)argument;
    open_device();
    open_device_of(1, &other);
    CHECK(rv_cuda_device_ordinal(device) == 0 && rv_cuda_device_ordinal(other) == 1);
    driver = rv_cuda_driver_of(cuda);
    CHECK(driver->CtxGetCurrent(&now) == CUDA_SUCCESS && now == NULL);
    CHECK(driver->DevicePrimaryCtxRetain(&mine, 1) == CUDA_SUCCESS && driver->CtxSetCurrent(mine) == CUDA_SUCCESS);
#define SAME() CHECK(driver->CtxGetCurrent(&now) == CUDA_SUCCESS && now == mine)
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    SAME();
    write_pattern(memory.address, 100, 1);
    SAME();
    CHECK(rv_cuda_copier_create(device, &copier, &err) == 0);
    SAME();
    CHECK(rv_cuda_copier_zero(copier, memory.address, 100, &err) == 0);
    CHECK(rv_cuda_copier_mark(copier, &mark, &err) == 0 && rv_cuda_copier_wait(copier, mark, &err) == 0);
    SAME();
    rv_cuda_copier_destroy(copier);
    SAME();
    fd = rv_cuda_vmm_export(device, &memory, &err);
    CHECK(fd >= 0);
    SAME();
    CHECK(rv_cuda_vmm_import(device, fd, &arena, false, &memory, &err) == 0);
    CHECK(rv_cuda_device_check(device, &err) == 0);
    SAME();
    rv_cuda_memory_close(device, &memory);
    SAME();
    rv_cuda_device_close(device);
    SAME();
    rv_cuda_device_close(other);
    SAME();
    CHECK(driver->DevicePrimaryCtxRelease(1) == CUDA_SUCCESS && close(fd) == 0);
    rv_cuda_close(cuda);
}

/* A thread whose current context was destroyed: ours works all the same, and does not stay in the other's place. */
static void case_caller_gone(const char *argument)
{
    const struct rv_cuda_driver *driver;
    CUcontext mine = NULL, now = NULL;

    (void)argument;
    open_device();
    driver = rv_cuda_driver_of(cuda);
    for (int i = 0; i < 2; i++) { /* the driver says so when it is asked; then: it names the context that is no more */
        CHECK(driver->DevicePrimaryCtxRetain(&mine, 1) == CUDA_SUCCESS && driver->CtxSetCurrent(mine) == CUDA_SUCCESS);
        CHECK(driver->DevicePrimaryCtxRelease(1) == CUDA_SUCCESS);
        CHECK(rv_cuda_device_check(device, &err) == 0);
        CHECK(driver->CtxGetCurrent(&now) == CUDA_SUCCESS && now == NULL);
    }
    close_device();
}

/* The application resets the device and goes on: the driver gives the new context the old one's handle. */
static void case_context_again(const char *argument)
{
    struct rv_cuda_memory memory = {0}, ipc = {0};
    struct rv_cuda_copier *copier = NULL;
    const struct rv_cuda_driver *driver;
    CUcontext before = NULL, again = NULL;
    struct rv_arena arena;

    (void)argument;
    open_device();
    driver = rv_cuda_driver_of(cuda);
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    CHECK(rv_cuda_ipc_create(device, 1, &ipc, &arena, &err) == 0);
    CHECK(rv_cuda_copier_create(device, &copier, &err) == 0);
    CHECK(driver->DevicePrimaryCtxRetain(&before, 0) == CUDA_SUCCESS && driver->CtxSetCurrent(before) == CUDA_SUCCESS);
    write_pattern(memory.address, 100, 1);
    CHECK(driver->DevicePrimaryCtxRelease(0) == CUDA_SUCCESS && driver->DevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    CHECK(rv_cuda_fill(device, memory.address, 1, 1, &err) == -ESTALE); /* between the two contexts */
    CHECK(driver->DevicePrimaryCtxRetain(&again, 0) == CUDA_SUCCESS && again == before);
    CHECK(rv_cuda_copier_zero(copier, memory.address, 1, &err) < 0);
    (void)rv_cuda_fill(device, memory.address, 1, 1, &err); /* the stream that was kept has ended with the context */
    CHECK(rv_cuda_fill(device, memory.address, 1, 1, &err) == 0);
    rv_cuda_copier_destroy(copier);
    rv_cuda_memory_close(device, &memory);
    rv_cuda_memory_close(device, &ipc);
    close_device();
}

/* Everything closes in any order with the end of the context, as when the application resets its device. */
static void case_context_gone(const char *argument)
{
    struct rv_cuda_memory vmm = {0}, ipc = {0};
    struct rv_cuda_copier *copier = NULL;
    const struct rv_cuda_driver *driver;
    struct rv_arena arena;
    void *pinned;
    int active = 1;
    unsigned flags = 0;

    (void)argument;
    open_device();
    driver = rv_cuda_driver_of(cuda);
    CHECK(rv_cuda_vmm_create(device, 1, &vmm, &arena, &err) == 0);
    CHECK(rv_cuda_ipc_create(device, 1, &ipc, &arena, &err) == 0);
    CHECK(rv_cuda_copier_create(device, &copier, &err) == 0);
    pinned = rv_cuda_host_alloc(device, 4096, &err);
    write_pattern(vmm.address, 100, 1);
    CHECK(driver->DevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    CHECK(driver->DevicePrimaryCtxGetState(0, &flags, &active) == CUDA_SUCCESS && !active);
    CHECK(rv_cuda_fill(device, vmm.address, 1, 1, &err) == -ESTALE && err.code == CODE(DEVICE));
    CHECK(rv_cuda_copier_zero(copier, vmm.address, 1, &err) == -ESTALE);
    CHECK(rv_cuda_copier_reached(copier) == 0);
    rv_cuda_host_free(device, pinned);
    rv_cuda_copier_destroy(copier);
    rv_cuda_memory_close(device, &vmm);
    rv_cuda_memory_close(device, &ipc);
    CHECK(vmm.address == 0 && ipc.address == 0);
    close_device();
}

static void in_child(struct rv_cuda_copier *copier, struct rv_cuda_memory *memory)
{
    struct rv_cuda_info info;
    struct rv_arena arena = {.size = 2 * MIB, .backend = RV_BACKEND_CUDA_VMM};
    struct rv_cuda_memory other = {0};
    struct rv_cuda_device *second = NULL;
    uint64_t address = memory->address, mark;
    uint8_t byte = 0;

    CHECK(rv_cuda_device_info(cuda, 0, &info, &err) == -EPERM && says("fork"));
    CHECK(rv_cuda_device_open(cuda, info.uuid, &second, &err) == -EPERM);
    CHECK(rv_cuda_device_check(device, &err) == -EPERM);
    CHECK(rv_cuda_vmm_create(device, 1, &other, &arena, &err) == -EPERM);
    CHECK(rv_cuda_vmm_export(device, memory, &err) == -EPERM);
    CHECK(rv_cuda_vmm_import(device, 0, &arena, false, &other, &err) == -EPERM);
    CHECK(rv_cuda_ipc_create(device, 1, &other, &arena, &err) == -EPERM);
    arena.backend = RV_BACKEND_CUDA_IPC;
    CHECK(rv_cuda_ipc_open(device, &arena, &other, &err) == -EPERM);
    CHECK(rv_cuda_read(device, &byte, address, 1, &err) == -EPERM);
    CHECK(rv_cuda_write(device, address, &byte, 1, &err) == -EPERM);
    CHECK(rv_cuda_fill(device, address, 0, 1, &err) == -EPERM);
    CHECK(rv_cuda_read(device, &byte, address, 0, &err) == -EPERM);
    CHECK(rv_cuda_host_alloc(device, 1, &err) == NULL && says("fork"));
    CHECK(rv_cuda_copier_put(copier, address, &byte, 1, &err) == -EPERM);
    CHECK(rv_cuda_copier_zero(copier, address, 1, &err) == -EPERM);
    CHECK(rv_cuda_copier_mark(copier, &mark, &err) == -EPERM);
    CHECK(rv_cuda_copier_wait(copier, 1, &err) == -EPERM);
    CHECK(rv_cuda_copier_reached(copier) == 0);
    CHECK(err.code == CODE(UNSUPPORTED) && rv_cuda_last_error() == 0);
    rv_cuda_copier_destroy(copier);
    rv_cuda_memory_close(device, memory);
    CHECK(memory->address == 0);
    rv_cuda_host_free(device, &byte); /* not freed: nothing is called */
    close_device();
    _exit(0);
}

static void case_fork(const char *argument)
{
    struct rv_cuda_copier *copier = NULL;
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;
    int status = -1;
    pid_t pid;

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    CHECK(rv_cuda_copier_create(device, &copier, &err) == 0);
    write_pattern(memory.address, 1000, 1);
    pid = fork();
    if (pid == 0)
        in_child(copier, &memory);
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
    check_pattern(memory.address, 1000, 1);
    rv_cuda_copier_destroy(copier);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

static void *read_often(void *argument)
{
    const struct rv_cuda_memory *memory = argument;

    for (unsigned i = 0; i < 50; i++)
        check_pattern(memory->address, 4000, 1);
    return NULL;
}

static void case_threads(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;
    pthread_t threads[4];

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    write_pattern(memory.address, 4000, 1);
    for (unsigned i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, read_often, &memory) == 0);
    for (unsigned i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

/* ---- want of memory ---------------------------------------------------------------------------------------------- */

/* The memory of a killed process comes back late: the first tries fail, and nobody hears of it. */
static void case_memory_late(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 1, &memory, &arena, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    CHECK(rv_cuda_ipc_create(device, 1, &memory, &arena, &err) == 0);
    rv_cuda_memory_close(device, &memory);
    close_device();
}

/* More than the device has is refused at once: the second call, which would fail otherwise, is not made. */
static void case_memory_never(const char *argument)
{
    struct rv_cuda_memory memory = {0};
    struct rv_arena arena;

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 9ull << 30, &memory, &arena, &err) == -ENOMEM);
    CHECK(err.code == CODE(NO_MEMORY) && says("cuMemCreate: 2 CUDA_ERROR_OUT_OF_MEMORY") && says("9663676416 bytes"));
    CHECK(rv_cuda_last_error() == 2);
    CHECK(rv_cuda_ipc_create(device, 9ull << 30, &memory, &arena, &err) == -ENOMEM && says("cuMemAlloc: 2 "));
    close_device();
}

/* What others hold is waited for, for a limited time. */
static void case_memory_taken(const char *argument)
{
    struct rv_cuda_memory memory = {0}, more = {0};
    struct rv_arena arena;
    uint64_t begin;

    (void)argument;
    open_device();
    CHECK(rv_cuda_vmm_create(device, 48 * MIB, &memory, &arena, &err) == 0);
    begin = rv_now_us();
    CHECK(rv_cuda_vmm_create(device, 48 * MIB, &more, &arena, &err) == -ENOMEM && err.code == CODE(NO_MEMORY));
    CHECK(rv_now_us() - begin >= RV_SEC);
    CHECK(more.address == 0);
    rv_cuda_memory_close(device, &memory);
    CHECK(rv_cuda_vmm_create(device, 48 * MIB, &more, &arena, &err) == 0);
    rv_cuda_memory_close(device, &more);
    close_device();
}

/* ---- the program ------------------------------------------------------------------------------------------------- */

struct test_case {
    const char *name;
    void (*run)(const char *argument);
};
static const struct test_case cases[] = {
    {"no_library", case_no_library},
    {"open_fails", case_open_fails},
    {"facts", case_facts},
    {"attributes", case_attributes},
    {"missing_vmm", case_missing_vmm},
    {"missing_ipc", case_missing_ipc},
    {"not_supported", case_not_supported},
    {"vmm", case_vmm},
    {"vmm_importer", case_vmm_importer},
    {"vmm_wrong", case_vmm_wrong},
    {"read_only", case_read_only},
    {"ipc", case_ipc},
    {"ipc_importer", case_ipc_importer},
    {"copier", case_copier},
    {"wrong_address", case_wrong_address},
    {"contexts", case_contexts},
    {"caller_gone", case_caller_gone},
    {"context_again", case_context_again},
    {"context_gone", case_context_gone},
    {"fork", case_fork},
    {"threads", case_threads},
    {"memory_late", case_memory_late},
    {"memory_never", case_memory_never},
    {"memory_taken", case_memory_taken},
};

static int run_named(const char *name, const char *argument)
{
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (strcmp(cases[i].name, name) == 0) {
            cases[i].run(argument);
            return 0;
        }
    fprintf(stderr, "no case %s\n", name);
    return 2;
}

/* Runs a case with FAKECUDA set, and a further variable unless it is NULL. */
static void expect_with(const char *name, const char *argument, const char *config, const char *variable,
                        const char *value)
{
    int status;

    assert_int_equal(setenv("FAKECUDA", config, 1), 0);
    if (variable)
        assert_int_equal(setenv(variable, value, 1), 0);
    status = run_case(name, argument);
    if (variable)
        assert_int_equal(unsetenv(variable), 0);
    if (status != 0)
        fail_msg("case %s %s with FAKECUDA='%s': wait status %d", name, argument ? argument : "", config, status);
}

static void expect(const char *name, const char *argument, const char *config)
{
    expect_with(name, argument, config, NULL, NULL);
}

static void finds_the_driver_or_says_why(void **state)
{
    char folder[] = "/tmp/rv-test-cuda-XXXXXX", file[64];
    const char *libraries = getenv("LD_LIBRARY_PATH");
    char *before = strdup(libraries ? libraries : "");
    int fd;

    (void)state;
    assert_non_null(mkdtemp(folder));
    (void)snprintf(file, sizeof(file), "%s/libcuda.so.1", folder);
    fd = open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0755); /* not a library: also where there is a driver */
    assert_true(fd >= 0 && close(fd) == 0);
    assert_int_equal(setenv("LD_LIBRARY_PATH", folder, 1), 0);
    expect("no_library", NULL, "");
    assert_int_equal(unlink(file), 0);
#ifdef RV_CUDA_STUB
    assert_int_equal(symlink(RV_CUDA_STUB, file), 0);
    expect("open_fails", "19 34 CUDA_ERROR_STUB_LIBRARY", "");
    assert_int_equal(unlink(file), 0);
#endif
    assert_int_equal(setenv("LD_LIBRARY_PATH", before, 1), 0);
    assert_int_equal(rmdir(folder), 0);
    free(before);
    expect("open_fails", "38 cuInit", "driver 11080");
    expect("open_fails", "38 lacks cuStreamCreate cuEventQuery", "missing cuStreamCreate; missing cuEventQuery");
    expect("open_fails", "19 cuInit: 999 CUDA_ERROR_UNKNOWN", "init 999");
    expect("open_fails", "19 nvidia-modprobe -u", "init 999");
    expect("open_fails", "19 nvidia-modprobe -u", "init 304");
    expect("open_fails", "19 kernel's module", "init 803");
    expect("open_fails", "19 cuInit: 100 CUDA_ERROR_NO_DEVICE", "devices none");
    expect_with("open_fails", "19 CUDA_VISIBLE_DEVICES is ''", "", "CUDA_VISIBLE_DEVICES", "");
}

static void tells_what_a_device_can(void **state)
{
    (void)state;
    expect("facts", "vmm fd", "");
    expect("facts", "vmm fd", "device discrete count=3; device unified");
    expect("facts", "vmm fd integrated pageable", "device unified");
    expect("facts", "vmm", "device no-fd");
    expect("facts", "", "device no-vmm");
    expect_with("facts", "vmm fd integrated pageable", "device discrete; device unified", "CUDA_VISIBLE_DEVICES", "1");
    expect("attributes", NULL, "device discrete attr.103=none name=bad\033name");
}

static void a_missing_function_takes_one_backend_away(void **state)
{
    (void)state;
    expect("missing_vmm", NULL, "missing cuMemSetAccess");
    expect("missing_ipc", NULL, "missing cuIpcOpenMemHandle");
}

static void a_device_that_cannot_says_so(void **state)
{
    (void)state;
    expect("not_supported", "cuMemCreate", "device wsl");
    expect("not_supported", "cuIpcGetMemHandle", "device no-ipc");
}

#define TEST_CASE(test, config)           \
    static void test_##test(void **state) \
    {                                     \
        (void)state;                      \
        expect(#test, NULL, config);      \
    }
TEST_CASE(vmm, "late 2000")
TEST_CASE(vmm_wrong, "")
TEST_CASE(read_only, "")
TEST_CASE(ipc, "")
TEST_CASE(copier, "late 300")
TEST_CASE(wrong_address, "")
TEST_CASE(contexts, "device discrete count=2")
TEST_CASE(caller_gone, "device discrete count=2; fault cuCtxGetCurrent error=709")
TEST_CASE(context_again, "device discrete handle=1")
TEST_CASE(context_gone, "")
TEST_CASE(fork, "")
TEST_CASE(threads, "late 0")
TEST_CASE(memory_late, "fault cuMemCreate nth=1 error=2; fault cuMemCreate nth=2 error=2; fault cuMemAlloc error=2")
TEST_CASE(memory_never, "fault cuMemCreate nth=2 error=999; fault cuMemAlloc nth=2 error=999")
TEST_CASE(memory_taken, "device discrete oom=64MiB")

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_the_driver_or_says_why),
        cmocka_unit_test(tells_what_a_device_can),
        cmocka_unit_test(a_missing_function_takes_one_backend_away),
        cmocka_unit_test(a_device_that_cannot_says_so),
        cmocka_unit_test(test_vmm),
        cmocka_unit_test(test_vmm_wrong),
        cmocka_unit_test(test_read_only),
        cmocka_unit_test(test_ipc),
        cmocka_unit_test(test_copier),
        cmocka_unit_test(test_wrong_address),
        cmocka_unit_test(test_contexts),
        cmocka_unit_test(test_caller_gone),
        cmocka_unit_test(test_context_again),
        cmocka_unit_test(test_context_gone),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_memory_late),
        cmocka_unit_test(test_memory_never),
        cmocka_unit_test(test_memory_taken),
    };

    self = "/proc/self/exe";
    if (argc > 1)
        return run_named(argv[1], argc > 2 ? argv[2] : NULL);
    (void)unsetenv("CUDA_VISIBLE_DEVICES");
    if (setenv("LD_LIBRARY_PATH", RV_FAKECUDA, 1) != 0) /* the double is found before any driver */
        return 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
