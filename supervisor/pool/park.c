/*
 * Requests that name a device before the first search for devices has ended: kept as they came, and handled then as if
 * they came now. Bounded like waits for loads.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "pool_private.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

struct rv_parked {
    TAILQ_ENTRY(rv_parked) link;
    struct rv_session *session;
    uint64_t id;
    bool is_attach;
    int fd;               /* -1 = none */
    uint64_t deadline_us; /* 0 = none */
    struct event *timer;
    size_t size;
    uint8_t request[]; /* packed */
};

/* Off the list, out of the counts: what is left is the caller's to free. */
static void take(struct rv_parked *parked)
{
    struct rv_pool *pool = parked->session->supervisor->pool;

    TAILQ_REMOVE(&pool->parked, parked, link);
    pool->parked_count--;
    pool->wait_count--;
    parked->session->wait_count--;
    if (parked->timer)
        event_free(parked->timer);
    parked->timer = NULL;
}

static void parked_free(struct rv_parked *parked)
{
    if (parked->fd >= 0)
        (void)close(parked->fd);
    free(parked);
}

static void on_deadline(int fd, short what, void *context)
{
    struct rv_parked *parked = context;
    struct rv_error err = {0};

    (void)fd;
    (void)what;
    take(parked);
    rv_error_set(&err, ETIMEDOUT, ERROR(DEADLINE), "the devices are still being tested");
    rv_error_remedy(&err, "try again; `resvisor devices` shows how far the tests are");
    rv_session_reply(parked->session, parked->id, &err);
    parked_free(parked);
}

static int park(struct rv_session *session, uint64_t id, const ProtobufCMessage *request, int fd, uint64_t deadline_us,
                struct rv_error *err)
{
    struct rv_supervisor *s = session->supervisor;
    size_t size = protobuf_c_message_get_packed_size(request);
    struct rv_parked *parked;
    int r = rv_pool_may_wait(s, session, err);

    if (r < 0)
        return r;
    if (fd >= 0 && rv_fd_is_reserved(fd))
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "too many descriptors wait for the devices");
    parked = calloc(1, sizeof(*parked) + size);
    if (!parked)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory to wait for the devices");
    if (deadline_us) {
        struct timeval tv = rv_timeval(deadline_us);

        parked->timer = event_new(s->base, -1, 0, on_deadline, parked);
        if (!parked->timer || event_add(parked->timer, &tv) < 0) {
            if (parked->timer)
                event_free(parked->timer);
            free(parked);
            return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory to wait for the devices");
        }
        parked->deadline_us = rv_now_us() + deadline_us;
    }
    parked->session = session;
    parked->id = id;
    parked->is_attach = request->descriptor == &rv__attach__descriptor;
    parked->fd = fd;
    parked->size = protobuf_c_message_pack(request, parked->request);
    TAILQ_INSERT_TAIL(&s->pool->parked, parked, link);
    s->pool->parked_count++;
    s->pool->wait_count++;
    session->wait_count++;
    return 0;
}

/* What is kept is small: the longest path, the longest name. */
static int check_texts(const char *model, const char *device, struct rv_error *err)
{
    if (strlen(model) >= RV_PATH_MAX || strlen(device) >= RV_NAME_MAX)
        return rv_error_set(err, ENAMETOOLONG, ERROR(BAD_REQUEST),
                            "a path over %u bytes, or a device's name over %u bytes", RV_PATH_MAX, RV_NAME_MAX);
    return 0;
}

int rv_park_attach(struct rv_session *session, uint64_t id, const Rv__Attach *request, int fd, struct rv_error *err)
{
    int r = check_texts(request->model, request->device, err);

    return r < 0 ? r : park(session, id, &request->base, fd, rv_lease_deadline_us(request->deadline_ms), err);
}

int rv_park_model_request(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request,
                          struct rv_error *err)
{
    int r = check_texts(request->model, request->device, err);

    return r < 0 ? r : park(session, id, &request->base, -1, 0, err);
}

static void resume_attach(struct rv_parked *parked)
{
    Rv__Attach *request = rv__attach__unpack(NULL, parked->size, parked->request);
    struct rv_error err = {0};

    if (!request) {
        rv_error_set(&err, ENOMEM, ERROR(NO_MEMORY), "no memory for the request");
        rv_session_reply(parked->session, parked->id, &err);
        return;
    }
    if (parked->deadline_us) {
        uint64_t now = rv_now_us();

        request->deadline_ms = parked->deadline_us > now + RV_MSEC ? (parked->deadline_us - now) / RV_MSEC : 1;
    }
    rv_lease_attach(parked->session, parked->id, request, parked->fd);
    parked->fd = -1;
    rv__attach__free_unpacked(request, NULL);
}

static void resume_model_request(struct rv_parked *parked)
{
    Resvisor__V1__ModelRequest *request = resvisor__v1__model_request__unpack(NULL, parked->size, parked->request);
    struct rv_error err = {0};

    if (!request) {
        rv_error_set(&err, ENOMEM, ERROR(NO_MEMORY), "no memory for the request");
        rv_session_reply(parked->session, parked->id, &err);
        return;
    }
    rv_pool_model_request(parked->session, parked->id, request);
    resvisor__v1__model_request__free_unpacked(request, NULL);
}

void rv_park_resume_all(struct rv_supervisor *s)
{
    /* One whose device is being tested again is put at the end once more: it must not be met a second time now. */
    for (uint32_t n = s->pool->parked_count; n > 0; n--) {
        struct rv_parked *parked = TAILQ_FIRST(&s->pool->parked);

        if (!parked)
            return;
        take(parked);
        if (parked->is_attach)
            resume_attach(parked);
        else
            resume_model_request(parked);
        parked_free(parked);
    }
}

void rv_park_forget_session(struct rv_supervisor *s, const struct rv_session *session)
{
    struct rv_parked *parked, *next;

    for (parked = TAILQ_FIRST(&s->pool->parked); parked; parked = next) {
        next = TAILQ_NEXT(parked, link);
        if (parked->session == session) {
            take(parked);
            parked_free(parked);
        }
    }
}

void rv_park_refuse_all(struct rv_supervisor *s, const struct rv_error *err)
{
    struct rv_parked *parked;

    while ((parked = TAILQ_FIRST(&s->pool->parked))) {
        take(parked);
        rv_session_reply(parked->session, parked->id, err);
        parked_free(parked);
    }
}
