/* Leases: given with an attach, taken back by a detach or the end of the connection, however that ends. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children/children.h"
#include "clock.h"
#include "devices.h"
#include "pool_private.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

/* ---- the end of a lease ----------------------------------------------------------------------------------------- */

void rv_generation_free(struct rv_supervisor *s, struct rv_generation *generation)
{
    for (uint32_t i = 0; i < generation->arena_count; i++)
        if (generation->arenas[i].backend == RV_BACKEND_CUDA_IPC)
            rv_holder_free(s, generation->model->device, generation->holder, generation->arenas[i].allocation);
    rv_generation_destroy(generation);
}

void rv_generation_release_if_unused(struct rv_supervisor *s, struct rv_generation *generation)
{
    if (generation->lease_count == 0 && generation != rv_model_current(generation->model))
        rv_generation_free(s, generation);
}

static void lease_end(struct rv_session *session, struct rv_lease *lease)
{
    TAILQ_REMOVE(&session->leases, lease, link);
    TAILQ_REMOVE(&session->supervisor->state.leases, lease, all_link);
    session->lease_count--;
    session->supervisor->state.counters.leases--;
    if (lease->generation) {
        lease->generation->lease_count--;
        rv_generation_release_if_unused(session->supervisor, lease->generation);
    } else {
        rv_holder_let_go(session->supervisor, lease->device);
    }
    free(lease);
}

void rv_lease_detach(struct rv_session *session, uint64_t lease_id)
{
    struct rv_lease *lease;

    TAILQ_FOREACH (lease, &session->leases, link) {
        if (lease->id == lease_id) {
            lease_end(session, lease);
            return;
        }
    }
}

void rv_lease_release_all(struct rv_session *session)
{
    struct rv_lease *lease;

    while ((lease = TAILQ_FIRST(&session->leases)))
        lease_end(session, lease);
}

void rv_lease_holders(struct rv_supervisor *s, const struct rv_generation *generation, char *buffer, uint64_t size)
{
    const struct rv_session *session;
    const struct rv_lease *lease;
    uint64_t used = 0;

    buffer[0] = '\0';
    TAILQ_FOREACH (session, rv_control_sessions(s), link) {
        TAILQ_FOREACH (lease, &session->leases, link) {
            int n;

            if (lease->generation != generation)
                continue;
            n = snprintf(buffer + used, size - used, "%s%s", used ? ", " : "", rv_session_describe(session));
            if (n < 0 || (uint64_t)n >= size - used) {
                buffer[used] = '\0';
                return;
            }
            used += (uint64_t)n;
            break;
        }
    }
}

/* ---- the start of a lease --------------------------------------------------------------------------------------- */

static struct rv_lease *lease_create(struct rv_session *session, struct rv_generation *generation, struct rv_error *err)
{
    struct rv_counters *counters = &session->supervisor->state.counters;
    struct rv_lease *lease;

    if (session->lease_count >= RV_SESSION_LEASES_MAX || counters->leases >= session->supervisor->config->max_leases) {
        rv_error_set(err, EBUSY, ERROR(LIMIT), "too many leases: %u on this connection, %u in all",
                     session->lease_count, counters->leases);
        return NULL;
    }
    lease = calloc(1, sizeof(*lease));
    if (!lease) {
        rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for a lease");
        return NULL;
    }
    lease->id = counters->next_lease++;
    lease->generation = generation;
    lease->device = generation->model->device;
    generation->lease_count++;
    generation->model->last_use_us = rv_now_us();
    lease->pid = session->pid;
    lease->incarnation = rv_worker_of_child(session->child) ? session->child->process->incarnation : 0;
    TAILQ_INSERT_TAIL(&session->leases, lease, link);
    TAILQ_INSERT_TAIL(&session->supervisor->state.leases, lease, all_link);
    session->lease_count++;
    counters->leases++;
    return lease;
}

void rv_lease_fill_arena(const struct rv_arena *arena, Rv__Arena *ret_message)
{
    const struct rv_backend *backend = rv_backend_by_id(arena->backend);

    rv__arena__init(ret_message);
    ret_message->size = arena->size;
    ret_message->backend = arena->backend;
    ret_message->page_size = arena->page_size;
    if (backend && !backend->has_descriptor) {
        ret_message->handle = (ProtobufCBinaryData){sizeof(arena->handle), (uint8_t *)arena->handle};
        ret_message->allocation = arena->allocation;
    }
}

void rv_lease_grant(struct rv_session *session, uint64_t id, struct rv_generation *generation, int user, bool waited,
                    uint64_t load_us)
{
    struct rv_error err = {0};
    struct rv_lease *lease = lease_create(session, generation, &err);
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__AttachReply reply = RV__ATTACH_REPLY__INIT;
    Rv__Arena arenas[RV_ARENAS_MAX], *pointers[RV_ARENAS_MAX];
    Rv__Device device = RV__DEVICE__INIT;
    int fds[RV_ARENAS_MAX + 1];
    unsigned fd_count = 0;

    if (!lease) {
        rv_session_reply(session, id, &err);
        return;
    }
    fds[fd_count++] = generation->index_fd;
    for (uint32_t i = 0; i < generation->arena_count; i++) {
        rv_lease_fill_arena(&generation->arenas[i], &arenas[i]);
        pointers[i] = &arenas[i];
        if (generation->arena_fds[i] >= 0)
            fds[fd_count++] = generation->arena_fds[i];
    }
    if (user != RV_HOST) {
        rv_devices_fill(session->supervisor, user, &device);
        reply.device = &device;
    }
    reply.lease_id = lease->id;
    reply.generation = generation->number;
    reply.model = generation->model->name;
    reply.n_arenas = generation->arena_count;
    reply.arenas = pointers;
    reply.index_size = generation->index_size;
    reply.waited = waited;
    reply.load_us = load_us;
    reply.read_bytes = waited ? generation->read_bytes : 0;
    frame.id = id;
    frame.body_case = RV__FRAME__BODY_ATTACH_REPLY;
    frame.attach_reply = &reply;
    session->supervisor->state.counters.attaches++;
    if (!waited) {
        session->supervisor->state.counters.warm_attaches++;
        session->supervisor->state.counters.warm_bytes += generation->bytes;
        session->supervisor->state.counters.saved_us += generation->load_us;
    }
    rv_session_send(session, &frame, fds, fd_count);
}

/* What a client cannot wait for is as good as a year, and is no number that wraps. */
uint64_t rv_lease_deadline_us(uint64_t ms)
{
    const uint64_t year_ms = 365ull * 24 * 3600 * 1000;

    return (ms < year_ms ? ms : year_ms) * RV_MSEC;
}

/* What an attach that names no device means: a worker's own type says, others have the host. */
static const char *device_asked(const struct rv_session *session, const Rv__Attach *request)
{
    const struct rv_config *config = session->supervisor->config;
    const struct rv_worker *worker = rv_worker_of_child(session->child);
    struct rv_worker_facts facts;

    if (request->device[0])
        return request->device;
    if (worker) {
        rv_worker_get_facts(worker, &facts);
        for (uint32_t i = 0; i < config->type_count; i++)
            if (strcmp(config->types[i].name, facts.type) == 0)
                return rv_devices_of_type(&config->types[i]);
    }
    return "host";
}

void rv_lease_attach(struct rv_session *session, uint64_t id, const Rv__Attach *request, int file_fd)
{
    struct rv_supervisor *s = session->supervisor;
    struct rv_file_identity identity;
    struct rv_generation *current;
    struct rv_model *model = NULL;
    struct rv_error err = {0};
    int r, device, user;

    if (s->stopping) {
        r = rv_error_set(&err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
        goto out;
    }
    if (!request->by_descriptor && file_fd >= 0) {
        (void)close(file_fd);
        file_fd = -1;
    }
    r = rv_devices_find(s, device_asked(session, request), &device, &user, &err);
    if (r == -EAGAIN) {
        r = rv_park_attach(session, id, request, file_fd, &err);
        if (r == 0)
            file_fd = -1;
    } else if (r == 0 && request->by_descriptor) {
        r = file_fd < 0 ? rv_error_set(&err, EBADF, ERROR(BAD_REQUEST), "an attach by descriptor came without one")
                        : rv_catalog_find_by_fd(s, file_fd, device, &model, &identity, &err);
    } else if (r == 0) {
        r = rv_catalog_find(s, request->model, device, &model, &file_fd, &identity, &err);
    }
    if (r < 0 || !model)
        goto out;
    current = rv_model_current(model);
    if (current && rv_identity_equal(&current->identity, &identity)) {
        model->failure.code = 0; /* a changed file that could not be loaded is back as it was */
        rv_lease_grant(session, id, current, user, false, 0);
        goto out;
    }
    r = rv_load_join(s, model, file_fd, &identity,
                     &(struct rv_wait_options){.session = session,
                                               .id = id,
                                               .kind = RV_WAIT_ATTACH,
                                               .user = user,
                                               .progress = request->want_progress,
                                               .deadline_us = rv_lease_deadline_us(request->deadline_ms)},
                     &err);
    file_fd = -1;
out:
    if (file_fd >= 0)
        (void)close(file_fd);
    if (r < 0)
        rv_session_reply(session, id, &err);
}
