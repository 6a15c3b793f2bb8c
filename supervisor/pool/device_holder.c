/*
 * Holders: one process for each device of backend cuda-ipc, which keeps the memory that others import. Its end ends
 * that memory under its importers' hands, so they are ended before it where that can be chosen, and with it where not.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "config.h"
#include "control/control.h"
#include "devices_private.h"
#include "log.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define PENDING_MAX 64u         /* allocations of one device that wait for an answer */
#define ARENAS_MAX 4096u        /* that one holder keeps */
#define ANSWER_US (60 * RV_SEC) /* to an allocation: to start, to make a context, to allocate */
#define SLACK (2ull << 20)      /* rounding up */
#define IDLE_US (30 * RV_SEC)   /* with nothing to keep; its context takes hundreds of MiB of the device */
#define DEATHS_MAX 5u           /* within DEATH_WINDOW_US: the device is not used any more */
#define DEATH_WINDOW_US (300 * RV_SEC)
#define STABLE_US (60 * RV_SEC)
#define BACKOFF_MAX_US (30 * RV_SEC)

struct pending {
    TAILQ_ENTRY(pending) link;
    uint64_t id, size, asked_us;
    bool sent;
    rv_holder_reply *reply;
    void *context; /* NULL = forgotten: what comes is given back */
};

struct rv_holder {
    struct rv_child child; /* first */
    struct rv_supervisor *supervisor;
    int device;
    bool ready; /* it has its work */
    bool idle;  /* it is being ended, since it has nothing to keep */
    TAILQ_HEAD(, pending) pending;
    uint32_t pending_count;
    uint64_t next_id;
    uint64_t *arenas; /* names of the allocations that it keeps for us */
    uint32_t arena_count;
    struct event *timer;     /* no process: the next start; else the oldest answer is overdue */
    struct event *end_timer; /* resvisor stops: it ends, whoever still imports */
};

static struct rv_device_record *record_of(const struct rv_holder *h)
{
    return &h->supervisor->state.devices[h->device];
}

/* ---- pending ----------------------------------------------------------------------------------------------------- */

static void pending_end(struct rv_holder *h, struct pending *p, const struct rv_arena *arena,
                        const struct rv_error *err)
{
    rv_holder_reply *reply = p->reply;
    void *context = p->context;

    TAILQ_REMOVE(&h->pending, p, link);
    h->pending_count--;
    free(p);
    if (context)
        reply(h->supervisor, context, arena, record_of(h)->holder.generation, err);
}

static struct pending *pending_by_id(struct rv_holder *h, uint64_t id)
{
    struct pending *p;

    TAILQ_FOREACH (p, &h->pending, link)
        if (p->id == id && p->sent)
            return p;
    return NULL;
}

static struct pending *first_pending(const struct rv_holder *h, bool only_sent)
{
    struct pending *p;

    TAILQ_FOREACH (p, &h->pending, link)
        if (p->sent || !only_sent)
            return p;
    return NULL;
}

/* Who is told may take others off the list. */
static void fail_pending(struct rv_holder *h, bool only_sent, const struct rv_error *err)
{
    struct pending *p;

    while ((p = first_pending(h, only_sent)))
        pending_end(h, p, NULL, err);
}

/* ---- what it is told --------------------------------------------------------------------------------------------- */

static void send_allocate(struct rv_holder *h, struct pending *p)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HolderAllocate allocate = RV__HOLDER_ALLOCATE__INIT;

    allocate.size = p->size;
    frame.id = p->id;
    frame.body_case = RV__FRAME__BODY_HOLDER_ALLOCATE;
    frame.holder_allocate = &allocate;
    p->sent = true;
    rv_device_send(&h->child, &frame);
}

static void send_free(struct rv_holder *h, uint64_t allocation)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__HolderFree message = RV__HOLDER_FREE__INIT;

    message.allocation = allocation;
    frame.id = h->next_id++;
    frame.body_case = RV__FRAME__BODY_HOLDER_FREE;
    frame.holder_free = &message;
    rv_device_send(&h->child, &frame);
}

/* Until the oldest question is overdue; or, when there is nothing to ask and nothing to keep, until it ends. */
static void watch_answers(struct rv_holder *h)
{
    const struct pending *oldest = TAILQ_FIRST(&h->pending);
    uint64_t since = oldest ? rv_now_us() - oldest->asked_us : 0;
    struct timeval tv = rv_timeval(!oldest ? IDLE_US : since < ANSWER_US ? ANSWER_US - since : 1);

    if (h->child.process->pid <= 0)
        return;
    (void)event_del(h->timer);
    if (oldest || h->arena_count == 0)
        (void)event_add(h->timer, &tv);
}

/* ---- death ------------------------------------------------------------------------------------------------------- */

/* Its memory is gone: whoever has it open is ended, and what it was is forgotten. */
static void memory_is_gone(struct rv_holder *h, const char *why)
{
    struct rv_supervisor *s = h->supervisor;
    struct rv_error err = {0};

    h->arena_count = 0;
    rv_error_set(&err, EIO, ERROR(DEVICE), "the holder of %s ended, and its memory with it: %.300s", record_of(h)->name,
                 why);
    rv_workers_memory_lost(s, h->device, &err);
    rv_pool_device_gone(s, h->device, &err);
}

static void start(struct rv_holder *h);

/* Starts again now, later, or never. */
static void go_on(struct rv_holder *h, const struct rv_exit_report *report, const char *why)
{
    struct rv_device_record *d = record_of(h);
    struct rv_error err = {0};
    struct timeval tv;
    uint32_t within;
    uint64_t delay;

    if (report && report->uptime_us >= STABLE_US)
        d->holder.deaths.consecutive = 0;
    within = rv_deaths_add(&d->holder.deaths, rv_now_us(), DEATH_WINDOW_US);
    if (within >= DEATHS_MAX && d->state == RV_DEVICE_READY) {
        d->state = RV_DEVICE_UNUSABLE;
        d->backend = RV_BACKEND_NONE;
        rv_error_set(&err, EIO, ERROR(DEVICE),
                     "its holder died %u times within %llu s, the last time: %.300s; `resvisor devices --test %s` "
                     "gives it another chance",
                     within, (unsigned long long)(DEATH_WINDOW_US / RV_SEC), why, d->name);
        (void)snprintf(d->reason, sizeof(d->reason), "%s", err.message);
        rv_log_error("%s is UNUSABLE: %s", d->name, d->reason);
        d->holder.deaths = (struct rv_deaths){0};
    }
    if (d->state != RV_DEVICE_READY) {
        rv_error_set(&err, EIO, ERROR(DEVICE), "%s cannot be used: %.400s", d->name, d->reason);
        fail_pending(h, false, &err);
        return;
    }
    if (TAILQ_EMPTY(&h->pending))
        return; /* the next allocation starts it */
    delay = rv_backoff_us(d->holder.deaths.consecutive, BACKOFF_MAX_US, rv_random32());
    tv = rv_timeval(delay);
    (void)event_add(h->timer, &tv);
}

static void on_exit_holder(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_holder *h = (struct rv_holder *)child;
    struct rv_error err = {0};

    (void)event_del(h->timer);
    (void)event_del(h->end_timer);
    h->ready = false;
    if (h->idle && !s->stopping) {
        h->idle = false;
        rv_log_debug("the holder of %s has ended: it had nothing to keep", record_of(h)->name);
        if (!TAILQ_EMPTY(&h->pending))
            start(h);
        return;
    }
    rv_error_set(&err, EIO, s->stopping ? ERROR(SHUTTING_DOWN) : ERROR(DEVICE), "the holder of %s ended: %s",
                 record_of(h)->name, report->text);
    fail_pending(h, !s->stopping, &err);
    if (s->stopping)
        return;
    rv_log_warning("the holder of %s %s; what it kept is gone: %u arenas", record_of(h)->name, report->text,
                   h->arena_count);
    if (record_of(h)->state != RV_DEVICE_LOST) /* else that was done when it was lost */
        memory_is_gone(h, report->text);
    go_on(h, report, report->text);
}

/* ---- the start --------------------------------------------------------------------------------------------------- */

static void start(struct rv_holder *h)
{
    struct rv_device_record *d = record_of(h);
    struct rv_error err = {0};
    char name[48];

    (void)snprintf(name, sizeof(name), "the holder of %s", d->name);
    h->ready = h->idle = false;
    h->arena_count = 0;
    if (rv_device_spawn(h->supervisor, &h->child, name, &err) < 0) {
        fail_pending(h, false, &err);
        return;
    }
    d->holder.generation++;
    rv_log_info("the holder of %s started, pid %d", d->name, (int)h->child.process->pid);
    watch_answers(h);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_holder *h = context;

    (void)fd;
    (void)what;
    if (h->child.process->pid > 0) {
        h->idle = TAILQ_EMPTY(&h->pending);
        rv_child_kill(&h->child, h->idle ? "it has nothing to keep" : "it did not answer in time");
    } else if (!h->supervisor->stopping && record_of(h)->state == RV_DEVICE_READY)
        start(h);
}

static void on_end_timer(int fd, short what, void *context)
{
    struct rv_holder *h = context;

    (void)fd;
    (void)what;
    rv_log_warning("the holder of %s is ended: clients have not let go of its memory within cuda.revoke_timeout",
                   record_of(h)->name);
    rv_child_kill(&h->child, "resvisor is stopping, and clients have not let go of its memory");
}

void rv_holder_on_hello(struct rv_supervisor *s, int device)
{
    struct rv_holder *h = &s->devices->holders[device];
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__DeviceStart message = RV__DEVICE_START__INIT;
    Rv__Device which = RV__DEVICE__INIT;
    struct pending *p;

    rv_devices_fill(s, device, &which);
    message.work = RV__DEVICE_START__WORK__WORK_HOLD;
    message.device = &which;
    frame.body_case = RV__FRAME__BODY_DEVICE_START;
    frame.device_start = &message;
    rv_device_send(&h->child, &frame);
    h->ready = true;
    TAILQ_FOREACH (p, &h->pending, link)
        if (!p->sent)
            send_allocate(h, p);
}

/* ---- what it says ------------------------------------------------------------------------------------------------ */

static bool keeps(const struct rv_holder *h, uint64_t allocation)
{
    for (uint32_t i = 0; i < h->arena_count; i++)
        if (h->arenas[i] == allocation)
            return true;
    return false;
}

/* NULL = honest. */
static const char *check(const struct rv_holder *h, const struct pending *p, const Rv__Arena *m, struct rv_arena *ret)
{
    struct rv_error err = {0};

    if (!p)
        return "it answered what nobody asked";
    if (!m || m->backend != RV_BACKEND_CUDA_IPC || m->handle.len != RV_IPC_HANDLE_SIZE || m->allocation == 0 ||
        m->size < p->size || m->size - p->size > SLACK)
        return "what it allocated is not what was asked for";
    if (keeps(h, m->allocation))
        return "it gave two arenas one name";
    *ret = (struct rv_arena){
        .size = m->size, .page_size = m->page_size, .backend = m->backend, .allocation = m->allocation};
    memcpy(ret->handle, m->handle.data, sizeof(ret->handle));
    if (rv_backend_by_id(ret->backend)->check(-1, ret, &err) < 0)
        return "it gave a handle that is none";
    return NULL;
}

static void on_allocated(struct rv_holder *h, const Rv__Frame *frame)
{
    struct pending *p = pending_by_id(h, frame->id);
    struct rv_arena arena;
    const char *lie = check(h, p, frame->holder_allocated->arena, &arena);

    if (!lie && h->arena_count >= ARENAS_MAX)
        lie = "it keeps more arenas than there can be";
    if (lie) {
        rv_child_kill(&h->child, lie);
        return;
    }
    if (!p->context || h->supervisor->stopping) {
        send_free(h, arena.allocation);
        pending_end(h, p, NULL, NULL);
    } else {
        h->arenas[h->arena_count++] = arena.allocation;
        pending_end(h, p, &arena, NULL);
    }
    watch_answers(h);
}

static void on_error(struct rv_holder *h, const Rv__Frame *frame)
{
    struct pending *p = pending_by_id(h, frame->id);
    struct rv_error err = {0};
    char text[RV_ERROR_TEXT_MAX];

    if (rv_error_from_message(&err, frame->error) == 0)
        rv_error_set(&err, EPROTO, ERROR(INTERNAL), "the holder failed without a reason");
    (void)rv_escape(text, sizeof(text), err.message, strlen(err.message));
    memcpy(err.message, text, sizeof(text));
    if (p)
        pending_end(h, p, NULL, &err);
    else
        rv_log_warning("the holder of %s: %s", record_of(h)->name, err.message);
    watch_answers(h);
}

bool rv_holder_on_frame(struct rv_supervisor *s, int device, const Rv__Frame *frame)
{
    struct rv_holder *h = &s->devices->holders[device];

    switch (frame->body_case) {
    case RV__FRAME__BODY_HOLDER_ALLOCATED:
        on_allocated(h, frame);
        return true;
    case RV__FRAME__BODY_ERROR:
        on_error(h, frame);
        return true;
    case RV__FRAME__BODY_DONE: /* of a HolderFree */
        return true;
    case RV__FRAME__BODY_DEVICE_EVENT:
        rv_device_on_event(s, h->child.session, frame->device_event);
        if (rv_devices_by_bytes(s, &frame->device_event->uuid) == device && record_of(h)->state == RV_DEVICE_READY)
            /* it says so when its context is of no use any more */
            rv_child_kill(&h->child, "its context on the device failed");
        return true;
    default:
        return false;
    }
}

/* ---- for the pool ------------------------------------------------------------------------------------------------ */

int rv_holder_allocate(struct rv_supervisor *s, int device, uint64_t size, rv_holder_reply *reply, void *context,
                       struct rv_error *err)
{
    struct rv_holder *h;
    struct pending *p;

    if (device < 0 || (uint32_t)device >= s->state.device_count || !context ||
        s->state.devices[device].backend != RV_BACKEND_CUDA_IPC)
        return rv_error_set(err, ENODEV, ERROR(NO_SUCH_DEVICE), "no device of that number has backend cuda-ipc");
    if (s->state.devices[device].state != RV_DEVICE_READY)
        return rv_error_set(err, EIO, ERROR(DEVICE), "%s cannot be used: %.400s", s->state.devices[device].name,
                            s->state.devices[device].reason);
    h = &s->devices->holders[device];
    if (s->stopping)
        return rv_error_set(err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    if (h->pending_count >= PENDING_MAX || h->arena_count + h->pending_count >= ARENAS_MAX)
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "%u allocations wait for the holder of %s, which keeps %u",
                            h->pending_count, record_of(h)->name, h->arena_count);
    p = calloc(1, sizeof(*p));
    if (!p)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory to ask a holder");
    *p = (struct pending){.id = h->next_id++, .size = size, .reply = reply, .context = context};
    p->asked_us = rv_now_us();
    TAILQ_INSERT_TAIL(&h->pending, p, link);
    h->pending_count++;
    if (h->ready && h->child.session && !h->idle)
        send_allocate(h, p);
    else if (h->child.process->pid <= 0 && !event_pending(h->timer, EV_TIMEOUT, NULL)) {
        static const struct timeval at_once = {0, 0};

        (void)event_add(h->timer, &at_once); /* from the loop: a start that fails answers, and not before we return */
        return 0;
    }
    watch_answers(h);
    return 0;
}

void rv_holder_forget(struct rv_supervisor *s, void *context)
{
    struct pending *p, *next;

    for (uint32_t i = 0; s->devices && i < s->state.device_count; i++) {
        struct rv_holder *h = &s->devices->holders[i];

        for (p = TAILQ_FIRST(&h->pending); p; p = next) {
            next = TAILQ_NEXT(p, link);
            if (p->context != context)
                continue;
            p->context = NULL;
            if (!p->sent)
                pending_end(h, p, NULL, NULL);
        }
    }
}

/* Then nothing is freed any more: its memory goes with it, and it goes when nobody has that open. */
static void end_if_stopping(struct rv_holder *h)
{
    if (h->supervisor->stopping && h->arena_count == 0 && !rv_pool_device_is_held(h->supervisor, h->device))
        rv_child_kill(&h->child, "resvisor is stopping");
}

void rv_holder_let_go(struct rv_supervisor *s, int device)
{
    if (s->stopping && s->devices && device >= 0 &&
        event_pending(s->devices->holders[device].end_timer, EV_TIMEOUT, NULL))
        end_if_stopping(&s->devices->holders[device]);
}

void rv_holder_free(struct rv_supervisor *s, int device, uint64_t holder, uint64_t allocation)
{
    struct rv_holder *h;

    if (!s->devices || device < 0 || (uint32_t)device >= s->state.device_count)
        return;
    h = &s->devices->holders[device];
    if (record_of(h)->holder.generation != holder || h->child.process->pid <= 0)
        return;
    for (uint32_t i = 0; i < h->arena_count; i++) {
        if (h->arenas[i] != allocation)
            continue;
        h->arenas[i] = h->arenas[--h->arena_count];
        if (!s->stopping)
            send_free(h, allocation);
        break;
    }
    if (!s->stopping)
        watch_answers(h);
    end_if_stopping(h);
}

void rv_holder_drop(struct rv_supervisor *s, int device, const struct rv_error *err)
{
    struct rv_holder *h = &s->devices->holders[device];

    fail_pending(h, false, err);
    h->arena_count = 0;
    (void)event_del(h->timer);
    rv_child_kill(&h->child, "its device is lost");
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

int rv_holder_of_child(const struct rv_supervisor *s, const struct rv_child *child)
{
    for (int i = 0; i < (int)RV_DEVICES_MAX; i++)
        if (&s->devices->holders[i].child == child)
            return i;
    return -1;
}

int rv_holders_init(struct rv_supervisor *s)
{
    s->devices->holders = calloc(RV_DEVICES_MAX, sizeof(struct rv_holder));
    if (!s->devices->holders)
        return -ENOMEM;
    for (int i = 0; i < (int)RV_DEVICES_MAX; i++)
        TAILQ_INIT(&s->devices->holders[i].pending);
    for (int i = 0; i < (int)RV_DEVICES_MAX; i++) {
        struct rv_holder *h = &s->devices->holders[i];

        h->supervisor = s;
        h->device = i;
        h->next_id = 1;
        s->state.devices[i].holder.process = (struct rv_process){.kind = RV_CHILD_DEVICE, .pidfd = -1};
        h->child.process = &s->state.devices[i].holder.process;
        h->child.on_exit = on_exit_holder;
        h->timer = event_new(s->base, -1, 0, on_timer, h);
        h->end_timer = event_new(s->base, -1, 0, on_end_timer, h);
        h->arenas = calloc(ARENAS_MAX, sizeof(*h->arenas));
        if (!h->timer || !h->end_timer || !h->arenas)
            return -ENOMEM;
    }
    return 0;
}

void rv_holders_fini(struct rv_supervisor *s)
{
    for (unsigned i = 0; s->devices->holders && i < RV_DEVICES_MAX; i++) {
        struct rv_holder *h = &s->devices->holders[i];
        struct pending *p;

        while ((p = TAILQ_FIRST(&h->pending))) {
            TAILQ_REMOVE(&h->pending, p, link);
            free(p);
        }
        if (h->timer)
            event_free(h->timer);
        if (h->end_timer)
            event_free(h->end_timer);
        free(h->arenas);
    }
    free(s->devices->holders);
}

void rv_holders_stop(struct rv_supervisor *s, bool now)
{
    struct timeval tv = rv_timeval(s->config->revoke_timeout_us);
    struct rv_error err = {0};

    rv_error_set(&err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        struct rv_holder *h = &s->devices->holders[i];

        if (h->child.process->pid <= 0)
            continue;
        if (now) {
            rv_child_kill(&h->child, "resvisor stops at once");
        } else if (!event_pending(h->end_timer, EV_TIMEOUT, NULL)) {
            (void)event_add(h->end_timer, &tv);
            (void)event_del(h->timer);
            rv_pool_device_gone(s, (int)i, &err); /* clients are told, and let go of it */
            end_if_stopping(h);
        }
    }
}
