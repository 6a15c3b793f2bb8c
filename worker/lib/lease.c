/* Leases: attach, detach, and what there is to know of them. memory.c checks and maps. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "dlpack.h"
#include "internal.h"

/* ---- the lease itself ------------------------------------------------------------------------------------------ */

/* Frees the lease; its memory stays as long as tensors need it. */
static void lease_destroy(struct rv_lease *lease)
{
    rv_index_close(&lease->index);
    rv_lease_memory_unref(lease->memory);
    free(lease->model);
    lease->magic = 0;
    free(lease);
}

static int open_index(struct rv_lease *lease, struct rv_frame *reply, struct rv_error *err)
{
    const struct rv_lease_memory *memory = lease->memory;
    uint64_t sizes[RV_ARENAS_MAX] = {0};
    int r, fd = rv_frame_take_fd(reply, 0);

    for (uint32_t i = 0; i < memory->arena_count; i++)
        sizes[i] = memory->arenas[i].arena.size;
    if (rv_sealed_check(fd, reply->message->attach_reply->index_size) < 0)
        r = rv_error_set(err, EPROTO, ERROR(INTERNAL),
                         "resvisor's answer is wrong: the index is not sealed, or not of the announced size");
    else
        r = rv_index_open(&lease->index, fd, sizes, memory->arena_count, err);
    (void)close(fd);
    return r;
}

/* Checks and maps what an AttachReply brought. Takes descriptors out of the frame. The lease is in no list yet. */
static int lease_create(struct rv_frame *reply, enum rv_mapping mapping, struct rv_lease **ret_lease,
                        struct rv_error *err)
{
    struct rv_lease_memory *memory = NULL;
    const Rv__AttachReply *m;
    struct rv_lease *lease;
    int r = rv_lease_memory_create(reply, &memory, err);

    if (r < 0)
        return r;
    m = reply->message->attach_reply;
    lease = calloc(1, sizeof(*lease));
    if (!lease || !(lease->model = strdup(m->model))) {
        free(lease);
        rv_lease_memory_unref(memory);
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a lease");
    }
    lease->magic = RV_LEASE_MAGIC;
    lease->fork_number = rv_fork_number();
    lease->memory = memory;
    lease->id = m->lease_id;
    lease->generation = m->generation;
    lease->mapping = mapping;
    lease->waited = m->waited;
    lease->load_us = m->load_us;
    lease->read_bytes = m->read_bytes;
    r = open_index(lease, reply, err);
    if (r == 0)
        r = rv_lease_memory_map(memory, &lease->index, lease->generation, &lease->mapping, err);
    if (r < 0) {
        lease_destroy(lease);
        return r;
    }
    *ret_lease = lease;
    return 0;
}

/* ---- attach ---------------------------------------------------------------------------------------------------- */

/* Sizes of the struct's versions; later ones only add at the end. */
#define OPTIONS_SIZE_FIRST offsetof(struct rv_attach_options, device)

static bool text_is_good(const char *text, size_t max)
{
    size_t length = strlen(text);

    return length > 0 && length <= max && rv_text_is_valid(text);
}

/* Reads what the caller's version of the struct has. -EOPNOTSUPP = it asks for what only a newer library knows. */
static int read_options(const struct rv_attach_options *given, struct rv_attach_options *ret_options,
                        struct rv_error *err)
{
    static const struct rv_attach_options defaults = RV_ATTACH_OPTIONS_INIT;

    *ret_options = defaults;
    if (!given)
        return 0;
    if (given->struct_size < OPTIONS_SIZE_FIRST)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "rv_attach_options.struct_size is not set");
    for (size_t i = sizeof(*ret_options); i < given->struct_size; i++)
        if (((const unsigned char *)given)[i] != 0)
            return rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED),
                                "an attach option of a newer libresvisor is set; this one does not know it");
    /* A size between two versions is the older one's: what follows its fields is not the caller's to read. */
    memcpy(ret_options, given, given->struct_size < sizeof(*ret_options) ? OPTIONS_SIZE_FIRST : sizeof(*ret_options));
    if ((unsigned)ret_options->mapping > RV_MAPPING_SHARED_READ_ONLY)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "no such mapping: %d", (int)ret_options->mapping);
    if (ret_options->device && !text_is_good(ret_options->device, RV_NAME_MAX))
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST),
                            "a device is \"host\", \"cuda:0\", or \"GPU-\" and a uuid");
    if (ret_options->timeout_ms == 0)
        ret_options->timeout_ms = -1;
    return 0;
}

static int check_model(const char *model, struct rv_error *err)
{
    size_t length = model ? strlen(model) : 0;

    if (length == 0 || length >= RV_PATH_MAX)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "a model's name or path must have 1 to %u bytes",
                            RV_PATH_MAX - 1);
    if (!rv_text_is_valid(model))
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "a model's name or path must be UTF-8");
    return 0;
}

static void lease_link(struct rv_connection *c, struct rv_lease *lease)
{
    lease->memory->connection = c;
    (void)atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    (void)pthread_mutex_lock(&c->lock);
    for (unsigned i = 0; i < RV_REVOKED_MAX && i < c->revoked_count; i++)
        if (c->revoked[i] == lease->id)
            atomic_store_explicit(&lease->revoked, true, memory_order_relaxed);
    lease->next = c->leases;
    lease->link = &c->leases;
    if (lease->next)
        lease->next->link = &lease->next;
    c->leases = lease;
    (void)pthread_mutex_unlock(&c->lock);
}

static int ask_attach(struct rv_connection *c, const char *model, const struct rv_attach_options *o,
                      struct rv_frame *ret_reply, struct rv_error *err)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__Attach attach = RV__ATTACH__INIT;
    struct rv_wait wait = {rv_deadline_us(o->timeout_ms), o->progress, o->context};

    attach.model = (char *)model;
    if (o->device)
        attach.device = (char *)o->device;
    attach.by_descriptor = o->model_fd >= 0;
    attach.deadline_ms = o->timeout_ms > 0 ? (uint64_t)o->timeout_ms : 0;
    attach.want_progress = o->progress != NULL || c->owner != NULL; /* a worker that loads shows that it lives */
    frame.body_case = RV__FRAME__BODY_ATTACH;
    frame.attach = &attach;
    return rv_connection_ask(c, &frame, &o->model_fd, attach.by_descriptor ? 1 : 0, &wait, ret_reply, err);
}

/* The lease is given back; a device that failed like one that is lost is reported, so that somebody looks at it. */
static void attach_failed(struct rv_connection *c, const Rv__Frame *reply, const struct rv_error *error)
{
    const Rv__AttachReply *m;

    if (reply->body_case != RV__FRAME__BODY_ATTACH_REPLY)
        return;
    m = reply->attach_reply;
    if (error->code == ERROR(DEVICE_LOST) && m->device && m->device->uuid.len == RV_DEVICE_UUID_SIZE)
        rv_connection_report(c, m->device->uuid.data, rv_gpu_last_error(), error->message);
    rv_connection_detach(c, m->lease_id);
}

int rv_attach(struct rv_connection *c, const char *model, const struct rv_attach_options *options,
              struct rv_lease **ret_lease, struct rv_failure *err)
{
    struct rv_error error = {0};
    struct rv_attach_options o;
    struct rv_frame reply = RV_FRAME_INIT;
    struct rv_lease *lease = NULL;
    int r = rv_connection_usable(c, &error);

    if (r == 0 && !ret_lease)
        r = rv_error_set(&error, EINVAL, ERROR(BAD_REQUEST), "rv_attach needs a place for the lease");
    if (r == 0)
        r = check_model(model, &error);
    if (r == 0)
        r = read_options(options, &o, &error);
    if (r == 0)
        r = ask_attach(c, model, &o, &reply, &error);
    if (r < 0)
        return rv_failure_from(err, &error, r);
    r = lease_create(&reply, o.mapping, &lease, &error);
    if (r == 0) {
        lease_link(c, lease);
        if (c->owner)
            rv_worker_count_load(c->owner_context, lease->load_us, lease->read_bytes);
        *ret_lease = lease;
    } else {
        attach_failed(c, reply.message, &error);
    }
    rv_frame_fini(&reply);
    return rv_failure_from(err, &error, r);
}

void rv_detach(struct rv_lease *lease)
{
    struct rv_connection *c;

    if (!lease || lease->magic != RV_LEASE_MAGIC)
        return;
    if (!rv_fork_happened(lease->fork_number)) {
        c = lease->memory->connection;
        (void)pthread_mutex_lock(&c->lock);
        *lease->link = lease->next;
        if (lease->next)
            lease->next->link = lease->link;
        (void)pthread_mutex_unlock(&c->lock);
    }
    lease_destroy(lease);
}

/* ---- facts ----------------------------------------------------------------------------------------------------- */

int rv_lease_usable(const struct rv_lease *lease)
{
    if (!lease || lease->magic != RV_LEASE_MAGIC)
        return -EINVAL;
    return rv_fork_happened(lease->fork_number) ? -EPERM : 0;
}

bool rv_lease_is_revoked(const struct rv_lease *lease)
{
    struct rv_connection *c;
    bool over;

    if (rv_lease_usable(lease) < 0)
        return false;
    c = lease->memory->connection;
    rv_connection_look(c);
    if (atomic_load_explicit(&lease->revoked, memory_order_relaxed))
        return true;
    if (!rv_lease_memory_is_remote(lease->memory) || lease->memory->backend->has_descriptor)
        return false;
    /* Memory without a descriptor is kept by a process of resvisor, which ends with it. */
    (void)pthread_mutex_lock(&c->lock);
    over = c->dead != 0 && c->dead != -ENOTCONN;
    (void)pthread_mutex_unlock(&c->lock);
    return over;
}

int rv_lease_get_info(const struct rv_lease *lease, struct rv_lease_info *info)
{
    struct rv_lease_info all = {0};
    size_t size = info ? info->struct_size : 0;
    int r = rv_lease_usable(lease);

    if (r < 0)
        return r;
    if (size < sizeof(info->struct_size))
        return -EINVAL;
    all.model = lease->model;
    all.lease_id = lease->id;
    all.generation = lease->generation;
    all.bytes = lease->memory->bytes;
    all.tensors = rv_index_count(&lease->index);
    all.mapping = lease->mapping;
    all.waited = lease->waited;
    all.load_us = lease->load_us;
    all.read_bytes = lease->read_bytes;
    all.device = lease->memory->has_device ? lease->memory->device : "host";
    all.backend = lease->memory->backend ? lease->memory->backend->name : "memfd";
    all.device_type = lease->memory->gpu ? RV_DLPACK_CUDA : RV_DLPACK_CPU;
    all.device_id = lease->memory->gpu ? rv_gpu_ordinal(lease->memory->gpu) : 0;
    all.struct_size = size < sizeof(all) ? size : sizeof(all); /* how much of it was filled */
    memcpy(info, &all, all.struct_size);
    return 0;
}

static bool overlaps(const struct rv_lease_memory *memory, uintptr_t from, uintptr_t to)
{
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        uintptr_t start = (uintptr_t)memory->arenas[i].address;

        if (start && from < start + memory->arenas[i].arena.size && to > start)
            return true;
    }
    return false;
}

int rv_lease_copied_bytes(const struct rv_lease *lease, uint64_t *ret_bytes)
{
    uint64_t bytes = 0;
    bool ours = false;
    char *line = NULL;
    size_t size = 0;
    FILE *smaps;
    int r = rv_lease_usable(lease);

    if (r < 0)
        return r;
    if (rv_lease_memory_is_remote(lease->memory)) { /* a device has no copy on write */
        *ret_bytes = 0;
        return 0;
    }
    smaps = fopen("/proc/self/smaps", "re");
    if (!smaps)
        return errno == ENOENT ? -EOPNOTSUPP : -errno;
    while (getline(&line, &size, smaps) > 0) {
        unsigned long long from, to, kib;

        if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
            ours = overlaps(lease->memory, (uintptr_t)from, (uintptr_t)to);
        else if (ours && sscanf(line, "Anonymous: %llu kB", &kib) == 1)
            bytes += kib * 1024;
    }
    r = ferror(smaps) ? -EIO : 0;
    free(line);
    (void)fclose(smaps);
    if (r == 0)
        *ret_bytes = bytes;
    return r;
}
