/* Leases: attach, check, map, give back. The supervisor is trusted no more than any peer: everything it sends is
 * checked. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "clock.h"
#include "internal.h"

#define SMALL_PAGE 4096u

/* ---- the lease itself ------------------------------------------------------------------------------------------ */

void rv_lease_destroy(struct rv_lease *lease)
{
    if (!lease)
        return;
    for (uint32_t i = 0; i < lease->arena_count; i++) {
        struct rv_mapped_arena *a = &lease->arenas[i];

        if (a->address)
            (void)munmap(a->address, a->arena.size);
        if (a->fd >= 0)
            (void)close(a->fd);
    }
    rv_index_close(&lease->index);
    free(lease->model);
    lease->magic = 0;
    free(lease);
}

static int say_bad(struct rv_error *err, const char *what)
{
    return rv_error_set(err, EPROTO, ERROR(INTERNAL), "resvisor's answer is wrong: %s", what);
}

static int check_counts(const struct rv_frame *reply, struct rv_error *err)
{
    struct rlimit limit = {0};

    if (reply->message->body_case != RV__FRAME__BODY_ATTACH_REPLY)
        return say_bad(err, "it is no lease");
    if (reply->fds_lost) {
        (void)getrlimit(RLIMIT_NOFILE, &limit);
        rv_error_set(err, EMFILE, ERROR(LIMIT), "this process has no descriptor left for the lease (its limit is %llu)",
                     (unsigned long long)limit.rlim_cur);
        rv_error_remedy(err, "detach other leases, or raise the limit (ulimit -n)");
        return -EMFILE;
    }
    if (reply->message->attach_reply->n_arenas > RV_ARENAS_MAX)
        return say_bad(err, "it has too many arenas");
    if (reply->fd_count != 1 + reply->message->attach_reply->n_arenas)
        return say_bad(err, "the number of descriptors is not one for the index and one per arena");
    return 0;
}

/* Takes and checks the arena descriptors. */
static int take_arenas(struct rv_lease *lease, struct rv_frame *reply, struct rv_error *err)
{
    const Rv__AttachReply *m = reply->message->attach_reply;

    for (uint32_t i = 0; i < m->n_arenas; i++) {
        struct rv_mapped_arena *a = &lease->arenas[lease->arena_count];
        const struct rv_backend *backend = rv_backend_by_id(m->arenas[i]->backend);
        int r;

        if (!backend)
            return rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED),
                                "the model lies in memory of a kind (%u) that this library does not know",
                                m->arenas[i]->backend);
        *a = (struct rv_mapped_arena){.arena = {m->arenas[i]->size, m->arenas[i]->page_size, m->arenas[i]->backend}};
        a->fd = rv_frame_take_fd(reply, i + 1);
        lease->arena_count++;
        r = backend->check(a->fd, &a->arena, err);
        if (r < 0)
            return r;
        if (__builtin_add_overflow(lease->bytes, a->arena.size, &lease->bytes))
            return say_bad(err, "its arenas are larger than any memory");
    }
    return 0;
}

static int open_index(struct rv_lease *lease, struct rv_frame *reply, struct rv_error *err)
{
    uint64_t sizes[RV_ARENAS_MAX] = {0};
    int r, fd = rv_frame_take_fd(reply, 0);

    for (uint32_t i = 0; i < lease->arena_count; i++)
        sizes[i] = lease->arenas[i].arena.size;
    if (rv_sealed_check(fd, reply->message->attach_reply->index_size) < 0)
        r = say_bad(err, "the index is not sealed, or not of the announced size");
    else
        r = rv_index_open(&lease->index, fd, sizes, lease->arena_count, err);
    (void)close(fd);
    return r;
}

static int map_arenas(struct rv_lease *lease, enum rv_mapping mapping, struct rv_error *err)
{
    enum rv_map_mode mode;

    if (mapping == RV_MAPPING_AUTO) {
        mapping = RV_MAPPING_PRIVATE;
        for (uint32_t i = 0; i < lease->arena_count; i++)
            if (lease->arenas[i].arena.page_size != SMALL_PAGE)
                mapping = RV_MAPPING_SHARED_READ_ONLY;
    }
    mode = mapping == RV_MAPPING_PRIVATE ? RV_MAP_PRIVATE : RV_MAP_SHARED;
    for (uint32_t i = 0; i < lease->arena_count; i++) {
        struct rv_mapped_arena *a = &lease->arenas[i];
        int r = rv_backend_by_id(a->arena.backend)->map(a->fd, &a->arena, mode, &a->address, err);

        if (r < 0)
            return r;
    }
    lease->mapping = mapping;
    return 0;
}

int rv_lease_create(struct rv_frame *reply, enum rv_mapping mapping, struct rv_lease **ret_lease, struct rv_error *err)
{
    const Rv__AttachReply *m;
    struct rv_lease *lease;
    int r = check_counts(reply, err);

    if (r < 0)
        return r;
    m = reply->message->attach_reply;
    lease = calloc(1, sizeof(*lease));
    if (!lease || !(lease->model = strdup(m->model))) {
        free(lease);
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a lease");
    }
    lease->magic = RV_LEASE_MAGIC;
    lease->fork_number = rv_fork_number();
    lease->id = m->lease_id;
    lease->generation = m->generation;
    lease->waited = m->waited;
    lease->load_us = m->load_us;
    lease->read_bytes = m->read_bytes;
    r = take_arenas(lease, reply, err);
    if (r == 0)
        r = open_index(lease, reply, err);
    if (r == 0)
        r = map_arenas(lease, mapping, err);
    if (r < 0) {
        rv_lease_destroy(lease);
        return r;
    }
    *ret_lease = lease;
    return 0;
}

/* ---- attach ---------------------------------------------------------------------------------------------------- */

#define OPTIONS_SIZE_FIRST sizeof(struct rv_attach_options) /* of the first version; later ones only add at the end */

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
    memcpy(ret_options, given, sizeof(*ret_options));
    if ((unsigned)ret_options->mapping > RV_MAPPING_SHARED_READ_ONLY)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "no such mapping: %d", (int)ret_options->mapping);
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
    lease->connection = c;
    (void)atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    (void)pthread_mutex_lock(&c->lock);
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
    attach.by_descriptor = o->model_fd >= 0;
    attach.deadline_ms = o->timeout_ms > 0 ? (uint64_t)o->timeout_ms : 0;
    attach.want_progress = o->progress != NULL || c->owner != NULL; /* a worker that loads shows that it lives */
    frame.body_case = RV__FRAME__BODY_ATTACH;
    frame.attach = &attach;
    return rv_connection_ask(c, &frame, &o->model_fd, attach.by_descriptor ? 1 : 0, &wait, ret_reply, err);
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
    r = rv_lease_create(&reply, o.mapping, &lease, &error);
    if (r == 0) {
        lease_link(c, lease);
        if (c->owner)
            rv_worker_count_load(c->owner_context, lease->load_us, lease->read_bytes);
        *ret_lease = lease;
    } else if (reply.message->body_case == RV__FRAME__BODY_ATTACH_REPLY) {
        rv_connection_detach(c, reply.message->attach_reply->lease_id);
    }
    rv_frame_fini(&reply);
    return rv_failure_from(err, &error, r);
}

void rv_detach(struct rv_lease *lease)
{
    struct rv_connection *c;
    uint64_t id;
    bool here;

    if (!lease || lease->magic != RV_LEASE_MAGIC)
        return;
    c = lease->connection;
    id = lease->id;
    here = !rv_fork_happened(lease->fork_number);
    if (here) {
        (void)pthread_mutex_lock(&c->lock);
        *lease->link = lease->next;
        if (lease->next)
            lease->next->link = lease->link;
        (void)pthread_mutex_unlock(&c->lock);
    }
    rv_lease_destroy(lease); /* before the supervisor hears of it: what it frees must be free */
    if (here) {
        rv_connection_detach(c, id);
        rv_connection_unref(c);
    }
}

/* ---- facts ----------------------------------------------------------------------------------------------------- */

static int lease_usable(const struct rv_lease *lease)
{
    if (!lease || lease->magic != RV_LEASE_MAGIC)
        return -EINVAL;
    return rv_fork_happened(lease->fork_number) ? -EPERM : 0;
}

int rv_lease_get_info(const struct rv_lease *lease, struct rv_lease_info *info)
{
    struct rv_lease_info all = {0};
    size_t size = info ? info->struct_size : 0;
    int r = lease_usable(lease);

    if (r < 0)
        return r;
    if (size < sizeof(info->struct_size))
        return -EINVAL;
    all.model = lease->model;
    all.lease_id = lease->id;
    all.generation = lease->generation;
    all.bytes = lease->bytes;
    all.tensors = rv_index_count(&lease->index);
    all.mapping = lease->mapping;
    all.waited = lease->waited;
    all.load_us = lease->load_us;
    all.read_bytes = lease->read_bytes;
    all.struct_size = size < sizeof(all) ? size : sizeof(all); /* how much of it was filled */
    memcpy(info, &all, all.struct_size);
    return 0;
}

static bool overlaps(const struct rv_lease *lease, uintptr_t from, uintptr_t to)
{
    for (uint32_t i = 0; i < lease->arena_count; i++) {
        uintptr_t start = (uintptr_t)lease->arenas[i].address;

        if (start && from < start + lease->arenas[i].arena.size && to > start)
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
    int r = lease_usable(lease);

    if (r < 0)
        return r;
    smaps = fopen("/proc/self/smaps", "re");
    if (!smaps)
        return errno == ENOENT ? -EOPNOTSUPP : -errno;
    while (getline(&line, &size, smaps) > 0) {
        unsigned long long from, to, kib;

        if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
            ours = overlaps(lease, (uintptr_t)from, (uintptr_t)to);
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
