/* A lease's memory: what an AttachReply brings is checked here, and mapped where it lies. The supervisor is trusted no
 * more than any peer. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "internal.h"

#define SMALL_PAGE 4096u

/* ---- its life -------------------------------------------------------------------------------------------------- */

void rv_lease_memory_ref(struct rv_lease_memory *memory)
{
    (void)atomic_fetch_add_explicit(&memory->refs, 1, memory_order_relaxed);
}

/* A device's mappings are not the child's: the driver did not survive the fork. */
static void unmap(struct rv_lease_memory *memory, bool here)
{
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        struct rv_mapped_arena *a = &memory->arenas[i];

        if (a->import) {
            if (here)
                rv_gpu_unimport(memory->gpu, a->import);
        } else if (a->address) {
            (void)munmap(a->address, a->arena.size);
        }
        if (a->fd >= 0)
            (void)close(a->fd);
    }
    if (here)
        rv_gpu_release(memory->gpu);
}

void rv_lease_memory_unref(struct rv_lease_memory *memory)
{
    bool here;

    if (!memory || atomic_fetch_sub_explicit(&memory->refs, 1, memory_order_acq_rel) != 1)
        return;
    here = !rv_fork_happened(memory->fork_number);
    unmap(memory, here); /* before the supervisor hears of it: what it frees must be free */
    if (here && memory->connection) {
        rv_connection_detach(memory->connection, memory->lease_id);
        rv_connection_unref(memory->connection);
    }
    free(memory);
}

bool rv_lease_memory_is_remote(const struct rv_lease_memory *memory)
{
    return memory->backend && memory->backend->on_device;
}

int rv_lease_memory_read(const struct rv_lease_memory *memory, void *host, uint64_t address, uint64_t length,
                         struct rv_error *err)
{
    struct rv_error error = {0};
    int r = rv_gpu_read(memory->gpu, host, address, length, &error);

    if (r == 0)
        return 0;
    if (error.code == ERROR(DEVICE_LOST))
        rv_connection_report(memory->connection, memory->uuid, rv_gpu_last_error(), error.message);
    if (err)
        *err = error;
    return r == -EPERM ? r : -EIO;
}

/* ---- checks ---------------------------------------------------------------------------------------------------- */

static int say_bad(struct rv_error *err, const char *what)
{
    return rv_error_set(err, EPROTO, ERROR(INTERNAL), "resvisor's answer is wrong: %s", what);
}

/* The backend of all arenas: a model lies in one kind of memory. */
static int find_backend(const Rv__AttachReply *m, const struct rv_backend **ret_backend, struct rv_error *err)
{
    const struct rv_backend *backend = NULL;

    if (m->n_arenas > RV_ARENAS_MAX)
        return say_bad(err, "it has too many arenas");
    for (size_t i = 0; i < m->n_arenas; i++) {
        const struct rv_backend *one = rv_backend_by_id(m->arenas[i]->backend);

        if (!one)
            return rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED),
                                "the model lies in memory of a kind (%u) that this library does not know",
                                m->arenas[i]->backend);
        if (backend && one != backend)
            return say_bad(err, "its arenas are of different kinds");
        backend = one;
    }
    *ret_backend = backend;
    return 0;
}

static int check_device(const Rv__AttachReply *m, const struct rv_backend *backend, struct rv_error *err)
{
    size_t length;

    if (!m->device)
        return backend && backend->on_device ? say_bad(err, "it does not name the device that the model lies on") : 0;
    length = strlen(m->device->name);
    if (m->device->uuid.len != RV_DEVICE_UUID_SIZE)
        return say_bad(err, "the device's uuid has not 16 bytes");
    if (length == 0 || length > RV_NAME_MAX)
        return say_bad(err, "the device's name is too long, or empty");
    return 0;
}

static int check_reply(const struct rv_frame *reply, const struct rv_backend **ret_backend, struct rv_error *err)
{
    struct rlimit limit = {0};
    const Rv__AttachReply *m;
    unsigned wanted;
    int r;

    if (reply->message->body_case != RV__FRAME__BODY_ATTACH_REPLY)
        return say_bad(err, "it is no lease");
    if (reply->fds_lost) {
        (void)getrlimit(RLIMIT_NOFILE, &limit);
        rv_error_set(err, EMFILE, ERROR(LIMIT), "this process has no descriptor left for the lease (its limit is %llu)",
                     (unsigned long long)limit.rlim_cur);
        rv_error_remedy(err, "detach other leases, or raise the limit (ulimit -n)");
        return -EMFILE;
    }
    m = reply->message->attach_reply;
    r = find_backend(m, ret_backend, err);
    if (r < 0)
        return r;
    wanted = 1 + (*ret_backend && (*ret_backend)->has_descriptor ? (unsigned)m->n_arenas : 0);
    if (reply->fd_count != wanted)
        return say_bad(err, "the number of descriptors is not one for the index and one per arena that has any");
    return check_device(m, *ret_backend, err);
}

static int take_arena(struct rv_lease_memory *memory, struct rv_frame *reply, uint32_t i, struct rv_error *err)
{
    const Rv__Arena *m = reply->message->attach_reply->arenas[i];
    struct rv_mapped_arena *a = &memory->arenas[i];
    bool has_descriptor = memory->backend->has_descriptor;
    int r;

    *a = (struct rv_mapped_arena){.fd = -1};
    a->arena.size = m->size;
    a->arena.page_size = m->page_size;
    a->arena.backend = m->backend;
    a->arena.allocation = m->allocation;
    if (has_descriptor)
        a->fd = rv_frame_take_fd(reply, i + 1);
    memory->arena_count++;
    if (m->handle.len != (has_descriptor ? 0 : RV_IPC_HANDLE_SIZE))
        return say_bad(err, "an arena's handle has a wrong length");
    if (m->handle.len > 0)
        memcpy(a->arena.handle, m->handle.data, RV_IPC_HANDLE_SIZE);
    r = memory->backend->check(a->fd, &a->arena, err);
    if (r < 0)
        return r;
    if (__builtin_add_overflow(memory->bytes, a->arena.size, &memory->bytes))
        return say_bad(err, "its arenas are larger than any memory");
    return 0;
}

int rv_lease_memory_create(struct rv_frame *reply, struct rv_lease_memory **ret_memory, struct rv_error *err)
{
    const struct rv_backend *backend = NULL;
    struct rv_lease_memory *memory;
    const Rv__AttachReply *m;
    int r = check_reply(reply, &backend, err);

    if (r < 0)
        return r;
    memory = calloc(1, sizeof(*memory));
    if (!memory)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a lease");
    m = reply->message->attach_reply;
    atomic_init(&memory->refs, 1);
    memory->fork_number = rv_fork_number();
    memory->lease_id = m->lease_id;
    memory->backend = backend;
    memory->has_device = m->device != NULL;
    if (m->device) {
        memcpy(memory->uuid, m->device->uuid.data, sizeof(memory->uuid));
        (void)rv_escape(memory->device, sizeof(memory->device), m->device->name, strlen(m->device->name));
    }
    for (uint32_t i = 0; r == 0 && i < m->n_arenas; i++)
        r = take_arena(memory, reply, i, err);
    if (r < 0) {
        rv_lease_memory_unref(memory);
        return r;
    }
    *ret_memory = memory;
    return 0;
}

/* ---- mapping --------------------------------------------------------------------------------------------------- */

static int map_host(struct rv_lease_memory *memory, enum rv_mapping *mapping, struct rv_error *err)
{
    enum rv_map_mode mode;

    if (*mapping == RV_MAPPING_AUTO) {
        *mapping = RV_MAPPING_PRIVATE;
        for (uint32_t i = 0; i < memory->arena_count; i++)
            if (memory->arenas[i].arena.page_size != SMALL_PAGE)
                *mapping = RV_MAPPING_SHARED_READ_ONLY;
    }
    mode = *mapping == RV_MAPPING_PRIVATE ? RV_MAP_PRIVATE : RV_MAP_SHARED;
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        struct rv_mapped_arena *a = &memory->arenas[i];
        int r = memory->backend->map(a->fd, &a->arena, mode, &a->address, err);

        if (r < 0)
            return r;
    }
    return 0;
}

static int map_device(struct rv_lease_memory *memory, const struct rv_index *index, uint64_t generation,
                      struct rv_error *err)
{
    struct rv_import_key key = {.generation = generation};
    XXH128_hash_t hash = XXH3_128bits(index->map, index->size);

    key.index_hash[0] = hash.low64;
    key.index_hash[1] = hash.high64;
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        struct rv_mapped_arena *a = &memory->arenas[i];
        uint64_t address = 0;
        int r;

        key.arena = a->arena;
        key.number = i;
        r = rv_gpu_import(memory->gpu, &key, a->fd, &a->import, &address, err);
        if (r < 0)
            return r;
        a->address = (void *)(uintptr_t)address;
        if (a->fd >= 0) /* the mapping keeps the memory */
            (void)close(a->fd);
        a->fd = -1;
    }
    return 0;
}

int rv_lease_memory_map(struct rv_lease_memory *memory, const struct rv_index *index, uint64_t generation,
                        enum rv_mapping *mapping, struct rv_error *err)
{
    bool remote = rv_lease_memory_is_remote(memory);
    int r;

    if (remote && *mapping == RV_MAPPING_PRIVATE) {
        rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED), "a model on the device %s cannot be mapped copy-on-write",
                     memory->device);
        rv_error_remedy(err, "ask for the shared read-only mapping, or attach on the device \"host\"");
        return -EOPNOTSUPP;
    }
    if (memory->has_device) {
        r = rv_gpu_acquire(memory->uuid, memory->device, &memory->gpu, err);
        if (r < 0)
            return r;
    }
    if (!remote)
        return map_host(memory, mapping, err);
    *mapping = RV_MAPPING_SHARED_READ_ONLY;
    return map_device(memory, index, generation, err);
}
