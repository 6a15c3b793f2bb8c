/*
 * The devices of this process: the driver, opened by the first lease on a device and never before; one handle per
 * device; and each arena mapped once, however many leases use it (a cuda-ipc handle may be opened by one context of a
 * process only). A process that uses host memory never loads libcuda.
 *
 * One lock, over opening and closing. It is the innermost: nothing else is locked under it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct rv_import {
    struct rv_import *next;
    unsigned refs;
    struct rv_import_key key;
    struct rv_cuda_memory memory;
};

struct rv_gpu {
    struct rv_gpu *next;
    unsigned refs;
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    struct rv_cuda_device *device;
    struct rv_import *imports;
};

#define UNUSED 0u
static atomic_uint owner = UNUSED; /* fork number + 1 of the process that has touched the driver */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* all below */
static struct rv_cuda *cuda; /* kept for the life of the process: unloading a driver gains nothing */
static struct rv_gpu *gpus;

/* CUDA does not survive a fork, and the lock may be held by a thread that does not exist in the child. */
static int check_fork(struct rv_error *err)
{
    unsigned mine = rv_fork_number() + 1, found = UNUSED;

    if (atomic_compare_exchange_strong(&owner, &found, mine) || found == mine)
        return 0;
    rv_error_set(err, EPERM, ERROR(NOT_PERMITTED), "CUDA cannot be used in a child after fork");
    rv_error_remedy(err, "start the child by exec, or attach on a device only in the child");
    return -EPERM;
}

/* One errno for all the reasons why a driver is no use; err keeps the reason and what to do. */
static int no_driver(int r, struct rv_error *err)
{
    struct rv_error reason;

    if (r == -EPERM || r == -ENOMEM || r == -EOPNOTSUPP)
        return r;
    if (err) {
        reason = *err;
        rv_error_set(err, ENODEV, (int)reason.code, "this process cannot use devices: %.400s", reason.message);
        rv_error_remedy(err, "%s", reason.remedy);
    }
    return -ENODEV;
}

/* rv_cuda knows the uuid alone; people know the name. */
static int hidden(int r, const char *name, const uint8_t *uuid, struct rv_error *err)
{
    char text[RV_DEVICE_UUID_TEXT], remedy[sizeof(err->remedy)];

    if (!err || err->code != ERROR(NO_SUCH_DEVICE))
        return r;
    memcpy(remedy, err->remedy, sizeof(remedy));
    rv_error_set(err, -r, ERROR(NO_SUCH_DEVICE), "this process does not see the device %s (%s)", name,
                 rv_device_uuid_text(uuid, text));
    rv_error_remedy(err, "%s",
                    getenv("CUDA_VISIBLE_DEVICES") && remedy[0]
                        ? remedy
                        : "let this process see it (in a container: the NVIDIA runtime), or attach on \"host\"");
    return r;
}

/* Locked. */
static int gpu_open(const uint8_t *uuid, const char *name, struct rv_gpu **ret_gpu, struct rv_error *err)
{
    struct rv_gpu *gpu;
    int r;

    if (!cuda) {
        atomic_store(&owner, rv_fork_number() + 1);
        r = rv_cuda_open(&cuda, err);
        if (r < 0) {
            atomic_store(&owner, UNUSED);
            return no_driver(r, err);
        }
    }
    gpu = calloc(1, sizeof(*gpu));
    if (!gpu)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a device");
    r = rv_cuda_device_open(cuda, uuid, &gpu->device, err);
    if (r < 0) {
        free(gpu);
        return hidden(r, name, uuid, err);
    }
    memcpy(gpu->uuid, uuid, sizeof(gpu->uuid));
    gpu->next = gpus;
    gpus = gpu;
    *ret_gpu = gpu;
    return 0;
}

int rv_gpu_acquire(const uint8_t uuid[RV_DEVICE_UUID_SIZE], const char *name, struct rv_gpu **ret_gpu,
                   struct rv_error *err)
{
    struct rv_gpu *gpu;
    int r = check_fork(err);

    if (r < 0)
        return r;
    (void)pthread_mutex_lock(&lock);
    for (gpu = gpus; gpu && memcmp(gpu->uuid, uuid, sizeof(gpu->uuid)) != 0;)
        gpu = gpu->next;
    if (!gpu)
        r = gpu_open(uuid, name, &gpu, err);
    if (r == 0) {
        gpu->refs++;
        *ret_gpu = gpu;
    }
    (void)pthread_mutex_unlock(&lock);
    return r;
}

void rv_gpu_release(struct rv_gpu *gpu)
{
    struct rv_gpu **link = &gpus;

    if (!gpu)
        return;
    (void)pthread_mutex_lock(&lock);
    if (--gpu->refs == 0) {
        while (*link != gpu)
            link = &(*link)->next;
        *link = gpu->next;
        rv_cuda_device_close(gpu->device);
        free(gpu);
    }
    (void)pthread_mutex_unlock(&lock);
}

int32_t rv_gpu_ordinal(const struct rv_gpu *gpu)
{
    return (int32_t)rv_cuda_device_ordinal(gpu->device);
}

int rv_gpu_last_error(void)
{
    return rv_cuda_last_error();
}

/* ---- arenas ---------------------------------------------------------------------------------------------------- */

static bool same_key(const struct rv_import_key *a, const struct rv_import_key *b)
{
    return a->generation == b->generation && a->number == b->number && a->index_hash[0] == b->index_hash[0] &&
           a->index_hash[1] == b->index_hash[1] && a->arena.backend == b->arena.backend &&
           a->arena.size == b->arena.size && a->arena.page_size == b->arena.page_size &&
           a->arena.allocation == b->arena.allocation &&
           memcmp(a->arena.handle, b->arena.handle, sizeof(a->arena.handle)) == 0;
}

/* Locked. */
static int import_open(struct rv_gpu *gpu, const struct rv_import_key *key, int fd, struct rv_import **ret_import,
                       struct rv_error *err)
{
    struct rv_import *import = calloc(1, sizeof(*import));
    int r;

    if (!import)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for an arena");
    import->key = *key;
    if (key->arena.backend == RV_BACKEND_CUDA_VMM)
        r = rv_cuda_vmm_import(gpu->device, fd, &key->arena, false, &import->memory, err);
    else
        r = rv_cuda_ipc_open(gpu->device, &key->arena, &import->memory, err);
    if (r < 0) {
        free(import);
        return r;
    }
    import->next = gpu->imports;
    gpu->imports = import;
    *ret_import = import;
    return 0;
}

int rv_gpu_import(struct rv_gpu *gpu, const struct rv_import_key *key, int fd, struct rv_import **ret_import,
                  uint64_t *ret_address, struct rv_error *err)
{
    struct rv_error error = {0};
    struct rv_import *import;
    bool opened = false;
    int r = 0;

    (void)pthread_mutex_lock(&lock);
    for (import = gpu->imports; import && !same_key(&import->key, key);)
        import = import->next;
    if (!import) {
        r = import_open(gpu, key, fd, &import, err);
        opened = true;
    }
    if (r == 0)
        import->refs++;
    (void)pthread_mutex_unlock(&lock);
    if (r < 0)
        return r;
    /* What is mapped already says nothing of a context that has broken since. Other failures of the check, such as a
     * device that is full, are none of an attach that needs nothing. */
    if (!opened && (r = rv_cuda_device_check(gpu->device, &error)) < 0 && error.code == ERROR(DEVICE_LOST)) {
        rv_gpu_unimport(gpu, import);
        if (err)
            *err = error;
        return r;
    }
    *ret_import = import;
    *ret_address = import->memory.address;
    return 0;
}

void rv_gpu_unimport(struct rv_gpu *gpu, struct rv_import *import)
{
    struct rv_import **link = &gpu->imports;

    if (!import)
        return;
    (void)pthread_mutex_lock(&lock);
    if (--import->refs == 0) {
        while (*link != import)
            link = &(*link)->next;
        *link = import->next;
        rv_cuda_memory_close(gpu->device, &import->memory); /* waits for the device's work */
        free(import);
    }
    (void)pthread_mutex_unlock(&lock);
}

int rv_gpu_read(struct rv_gpu *gpu, void *host, uint64_t address, uint64_t length, struct rv_error *err)
{
    return rv_cuda_read(gpu->device, host, address, length, err);
}
