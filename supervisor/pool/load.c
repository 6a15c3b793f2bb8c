/*
 * Loads: one per model however many wait for it, each in a loader process of its own.
 *
 *   QUEUED -> STARTED (LoadStart sent) -> ADMITTED (LoadPlan was accepted) -> ENDED (waiters answered) -> loader exits
 *
 * With backend cuda-ipc, ALLOCATING stands before ADMITTED: the device's holder makes the arena that the loader fills.
 * It is the load's until the generation has it, and is given back when the loader, which has it open, is gone.
 *
 * A load that has ended no longer belongs to its model; its struct lives until the loader is gone.
 */
#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "children/children.h"
#include "clock.h"
#include "devices.h"
#include "log.h"
#include "paths.h"
#include "pool_private.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define LOADS_MAX 256u /* under way and queued */
#define ROUNDING (2u << 20)
/* bytes that an arena may be larger than planned: a huge page, the least granularity */

enum load_stage { LOAD_QUEUED, LOAD_STARTED, LOAD_ALLOCATING, LOAD_ADMITTED, LOAD_ENDED };

struct rv_wait {
    TAILQ_ENTRY(rv_wait) link;
    struct rv_load *load;
    struct rv_wait_options options;
    uint64_t since_us;
    struct event *timer; /* NULL = no deadline */
};

struct rv_load {
    struct rv_child child; /* first */
    struct rv_process process;
    TAILQ_ENTRY(rv_load) link;
    struct rv_supervisor *supervisor;
    struct rv_model *model; /* NULL once ENDED */
    enum load_stage stage;
    int file_fd;
    struct rv_file_identity identity;
    TAILQ_HEAD(, rv_wait) waits;
    struct event *timer;
    uint64_t started_us;
    int device;                             /* the model's: RV_HOST or a number */
    uint32_t backend;                       /* enum rv_backend_id, from the start of the loader on */
    uint64_t planned_arenas, planned_index; /* bytes */
    uint64_t admitted, admitted_index;      /* of these, what nobody else may have: of the device, and of the host */
    struct rv_arena arena;                  /* cuda-ipc, if allocated */
    uint64_t holder;                        /* the generation of the holder that has it */
    bool allocated;
    uint64_t done_bytes, total_bytes;
    bool holds_child; /* a process is or was started: freed by its exit */
};

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

static void wait_end(struct rv_wait *wait)
{
    struct rv_load *load = wait->load;

    TAILQ_REMOVE(&load->waits, wait, link);
    load->supervisor->pool->wait_count--;
    wait->options.session->wait_count--;
    if (wait->timer)
        event_free(wait->timer);
    free(wait);
}

static void on_deadline(int fd, short what, void *context)
{
    struct rv_wait *wait = context;
    struct rv_error err = {0};

    (void)fd;
    (void)what;
    rv_error_set(&err, ETIMEDOUT, ERROR(DEADLINE), "%s is still being loaded: %llu of %llu MiB; the load goes on",
                 wait->load->model->name, (unsigned long long)(wait->load->done_bytes >> 20),
                 (unsigned long long)(wait->load->total_bytes >> 20));
    rv_session_reply(wait->options.session, wait->options.id, &err);
    wait_end(wait);
}

int rv_pool_may_wait(const struct rv_supervisor *s, const struct rv_session *session, struct rv_error *err)
{
    if (s->pool->wait_count >= RV_POOL_WAITS_MAX || session->wait_count >= RV_SESSION_WAITS_MAX)
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "too many requests wait for loads");
    return 0;
}

static int wait_add(struct rv_load *load, const struct rv_wait_options *options, struct rv_error *err)
{
    struct rv_pool *pool = load->supervisor->pool;
    struct rv_wait *wait;

    if (!options->session)
        return 0;
    if (rv_pool_may_wait(load->supervisor, options->session, err) < 0)
        return -EBUSY;
    wait = calloc(1, sizeof(*wait));
    if (!wait)
        return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory to wait for a load");
    wait->load = load;
    wait->options = *options;
    wait->since_us = rv_now_us();
    if (options->deadline_us) {
        struct timeval tv = rv_timeval(options->deadline_us);

        wait->timer = event_new(load->supervisor->base, -1, 0, on_deadline, wait);
        if (!wait->timer || event_add(wait->timer, &tv) < 0) {
            if (wait->timer)
                event_free(wait->timer);
            free(wait);
            return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory to wait for a load");
        }
    }
    TAILQ_INSERT_TAIL(&load->waits, wait, link);
    pool->wait_count++;
    options->session->wait_count++;
    return 0;
}

static bool is_waited_for(const struct rv_supervisor *s, const struct rv_wait_options *options)
{
    const struct rv_load *load;
    const struct rv_wait *wait;

    TAILQ_FOREACH (load, &s->pool->loads, link)
        TAILQ_FOREACH (wait, &load->waits, link)
            if (wait->options.session == options->session && wait->options.id == options->id)
                return true;
    return false;
}

/* One request may wait for loads onto several devices: the first failure or the last success is its answer. */
static void answer_model_request(struct rv_supervisor *s, const struct rv_wait_options *options,
                                 const struct rv_model *model, const struct rv_error *err)
{
    if (err) {
        rv_load_forget_request(s, options->session, options->id);
        rv_session_reply(options->session, options->id, err);
    } else if (!is_waited_for(s, options)) {
        rv_status_send_model(options->session, options->id, model);
    }
}

/* Answers all who wait: with the generation, or with err if it is NULL. */
static void waits_answer(struct rv_load *load, struct rv_model *model, struct rv_generation *generation,
                         const struct rv_error *err)
{
    struct rv_wait *wait;

    while ((wait = TAILQ_FIRST(&load->waits))) {
        struct rv_wait_options options = wait->options;
        uint64_t waited = rv_now_us() - wait->since_us;

        wait_end(wait);
        if (options.kind == RV_WAIT_MODEL)
            answer_model_request(load->supervisor, &options, model, generation ? NULL : err);
        else if (!generation)
            rv_session_reply(options.session, options.id, err);
        else
            rv_lease_grant(options.session, options.id, generation, options.user, true, waited);
    }
}

static void forget_waits(struct rv_supervisor *s, const struct rv_session *session, const uint64_t *id)
{
    struct rv_load *load;

    TAILQ_FOREACH (load, &s->pool->loads, link) {
        struct rv_wait *wait, *next;

        for (wait = TAILQ_FIRST(&load->waits); wait; wait = next) {
            next = TAILQ_NEXT(wait, link);
            if (wait->options.session == session &&
                (!id || (wait->options.id == *id && wait->options.kind == RV_WAIT_MODEL)))
                wait_end(wait);
        }
    }
}

void rv_load_forget_session(struct rv_supervisor *s, struct rv_session *session)
{
    if (!s->pool || session->wait_count == 0)
        return;
    forget_waits(s, session, NULL);
    rv_park_forget_session(s, session);
}

void rv_load_forget_request(struct rv_supervisor *s, struct rv_session *session, uint64_t id)
{
    forget_waits(s, session, &id);
}

bool rv_load_session_waits(const struct rv_supervisor *s, const struct rv_session *session)
{
    (void)s;
    return session->wait_count > 0;
}

/* ---- the end of a load ------------------------------------------------------------------------------------------ */

static void load_free(struct rv_load *load)
{
    struct rv_pool *pool = load->supervisor->pool;

    TAILQ_REMOVE(&pool->loads, load, link);
    pool->load_count--;
    if (load->timer)
        event_free(load->timer);
    if (load->file_fd >= 0)
        (void)close(load->file_fd);
    if (load->allocated)
        rv_holder_free(load->supervisor, load->device, load->holder, load->arena.allocation);
    free(load);
}

/* The load is over for its model and for those who wait. generation NULL = it failed with err. */
static void load_end(struct rv_load *load, struct rv_generation *generation, const struct rv_error *err)
{
    struct rv_supervisor *s = load->supervisor;
    struct rv_model *model = load->model;
    char place[32];

    if (load->stage == LOAD_ENDED)
        return;
    if (load->stage == LOAD_ALLOCATING)
        rv_holder_forget(s, load);
    load->stage = LOAD_ENDED;
    load->model = NULL;
    load->admitted = load->allocated ? load->arena.size : 0; /* the loader still has it open */
    load->admitted_index = 0;
    model->load = NULL;
    (void)event_del(load->timer);
    if (generation) {
        model->failure.code = 0;
    } else {
        s->state.counters.failed_loads++;
        model->failure = *err;
        model->failed_identity = load->identity;
        /* What another moment may mend is tried again at once; a bad file only when it changes, or after a while. */
        model->retry_at_us = rv_now_us() + (rv_error_row(err->code)->retryable ? 0 : s->config->load_retry_us);
        rv_log_warning("%s is not loaded%s: %s", model->name, rv_place_text(s, load->device, place), err->message);
    }
    waits_answer(load, model, generation, err);
    if (!load->holds_child)
        load_free(load);
    rv_workers_next_turn(s);
}

static void start_next(struct rv_supervisor *s);

static void give_log_back(struct rv_supervisor *s, const struct rv_log *log)
{
    for (uint32_t i = 0; i < s->config->max_loads; i++)
        if (log && s->pool->logs[i] == log)
            s->pool->log_used[i] = false;
}

static void on_exit_loader(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_load *load = (struct rv_load *)child;
    struct rv_error err = {0};

    give_log_back(s, child->log);
    s->pool->running--;
    load->holds_child = false;
    if (load->stage == LOAD_ENDED) {
        load_free(load);
    } else {
        rv_error_set(&err, EIO, report->oom ? ERROR(NO_MEMORY) : ERROR(INTERNAL),
                     "the loader of %s ended before its time: %s", load->model->name, report->text);
        load_end(load, NULL, &err);
    }
    start_next(s);
}

static void on_load_timeout(int fd, short what, void *context)
{
    struct rv_load *load = context;
    struct rv_error err = {0};

    (void)fd;
    (void)what;
    rv_error_set(&err, ETIMEDOUT, ERROR(DEADLINE), "loading took longer than %llu s (pool.load_timeout)",
                 (unsigned long long)(load->supervisor->config->load_timeout_us / RV_SEC));
    rv_child_kill(&load->child, "it took too long");
    load_end(load, NULL, &err);
}

void rv_load_cancel(struct rv_supervisor *s, struct rv_model *model, const struct rv_error *err)
{
    struct rv_load *load = model->load;

    (void)s;
    if (!load)
        return;
    rv_child_kill(&load->child, "its load was cancelled");
    load_end(load, NULL, err);
    model->failure.code = 0; /* nothing is wrong with the file */
}

void rv_load_cancel_all(struct rv_supervisor *s)
{
    struct rv_load *load, *next;
    struct rv_error err = {0};

    rv_error_set(&err, 0, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    rv_park_refuse_all(s, &err);
    for (load = TAILQ_FIRST(&s->pool->loads); load; load = next) {
        next = TAILQ_NEXT(load, link);
        rv_child_kill(&load->child, "resvisor is stopping");
        load_end(load, NULL, &err);
    }
}

/* ---- the start of a load ---------------------------------------------------------------------------------------- */

static struct rv_log *take_log(struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->config->max_loads; i++) {
        if (s->pool->log_used[i])
            continue;
        if (!s->pool->logs[i])
            s->pool->logs[i] = rv_log_create(s, "loader", "loader");
        s->pool->log_used[i] = s->pool->logs[i] != NULL;
        return s->pool->logs[i];
    }
    return NULL;
}

/* The kind of memory at the time when the loader starts. 0 = the device can have no models any more. */
static uint32_t backend_of(const struct rv_supervisor *s, int device)
{
    const struct rv_backend *backend = device == RV_HOST ? rv_backend_by_name(s->config->pool_backend)
                                                         : rv_backend_by_id(s->state.devices[device].backend);

    return backend && backend->on_device == (device != RV_HOST) ? (uint32_t)backend->id : RV_BACKEND_NONE;
}

static void load_start(struct rv_load *load)
{
    struct rv_supervisor *s = load->supervisor;
    const char *argv[] = {"resvisor-loader", NULL}, *env[] = {"RESVISOR_CONTROL_FD=3", NULL};
    uint64_t timeout = s->config->load_timeout_us;
    struct timeval tv = rv_timeval(timeout);
    char path[RV_PATH_MAX];
    struct rv_error err = {0};
    int r = rv_installed_path(RV_LIBEXEC, "resvisor-loader", path, sizeof(path));

    if (r < 0) {
        rv_error_set(&err, -r, ERROR(INTERNAL), "resvisor-loader is not found: %s", strerror(-r));
        load_end(load, NULL, &err);
        return;
    }
    load->backend = backend_of(s, load->device);
    if (load->backend == RV_BACKEND_NONE) {
        rv_error_set(&err, ENODEV, ERROR(DEVICE), "%s has no memory for models any more",
                     rv_place_name(&s->state, load->device));
        load_end(load, NULL, &err);
        return;
    }
    load->child.log = take_log(s);
    load->child.on_exit = on_exit_loader;
    r = rv_child_spawn(s, &load->child,
                       &(struct rv_spawn_options){RV_CHILD_LOADER, "a loader", path, argv, env, NULL, NULL, 0}, &err);
    if (r < 0) {
        give_log_back(s, load->child.log);
        load_end(load, NULL, &err);
        return;
    }
    load->holds_child = true;
    load->stage = LOAD_STARTED;
    load->started_us = rv_now_us();
    s->pool->running++;
    if (timeout)
        (void)event_add(load->timer, &tv);
}

static void start_next(struct rv_supervisor *s)
{
    struct rv_load *load, *next;

    for (load = TAILQ_FIRST(&s->pool->loads); load && s->pool->running < s->config->max_loads; load = next) {
        next = TAILQ_NEXT(load, link);
        if (load->stage == LOAD_QUEUED)
            load_start(load);
    }
}

static struct rv_load *load_create(struct rv_supervisor *s, struct rv_model *model, int file_fd,
                                   const struct rv_file_identity *identity)
{
    struct rv_load *load = calloc(1, sizeof(*load));

    if (!load)
        return NULL;
    load->timer = event_new(s->base, -1, 0, on_load_timeout, load);
    if (!load->timer) {
        free(load);
        return NULL;
    }
    load->supervisor = s;
    load->model = model;
    load->device = model->device;
    load->file_fd = file_fd;
    load->identity = *identity;
    load->total_bytes = identity->size;
    load->process.pidfd = -1;
    load->child.process = &load->process;
    TAILQ_INIT(&load->waits);
    TAILQ_INSERT_TAIL(&s->pool->loads, load, link);
    s->pool->load_count++;
    model->load = load;
    return load;
}

/* An O_PATH descriptor becomes one that can be read. Takes fd over; a new descriptor or a negative errno. */
static int readable(int fd, const char *path, struct rv_error *err)
{
    char link[64], shown[RV_ERROR_TEXT_MAX / 2];
    int flags = fcntl(fd, F_GETFL), opened;

    if (flags >= 0 && !(flags & O_PATH))
        return fd;
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    opened = open(link, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (opened < 0) {
        int number = errno;

        (void)close(fd);
        rv_error_set(err, number, number == EMFILE || number == ENFILE ? ERROR(LIMIT) : ERROR(FILE),
                     "%s cannot be opened: %s", rv_escape(shown, sizeof(shown), path, strlen(path)), strerror(number));
        if (number == EACCES)
            rv_error_remedy(err, "make it readable for the user that runs resvisor");
        return -number;
    }
    (void)close(fd);
    return opened;
}

int rv_load_join(struct rv_supervisor *s, struct rv_model *model, int file_fd, const struct rv_file_identity *identity,
                 const struct rv_wait_options *wait, struct rv_error *err)
{
    int r;

    if (model->load) { /* single flight: what it loads is what those who come now get */
        if (file_fd >= 0)
            (void)close(file_fd);
        if (!rv_identity_equal(&model->load->identity, identity)) {
            rv_error_set(err, ESTALE, ERROR(MODEL_CHANGED),
                         "the file of %s has changed, and its earlier content is still being loaded", model->name);
            rv_error_remedy(err, "try again when that load has ended");
            return -ESTALE;
        }
        return wait_add(model->load, wait, err);
    }
    if (model->failure.code && rv_now_us() < model->retry_at_us &&
        rv_identity_equal(&model->failed_identity, identity)) {
        if (file_fd >= 0)
            (void)close(file_fd);
        *err = model->failure;
        return -EIO;
    }
    if (file_fd < 0)
        return rv_error_set(err, ENOENT, ERROR(NO_SUCH_MODEL), "the file of %s is gone", model->name);
    file_fd = readable(file_fd, model->path, err);
    if (file_fd < 0)
        return file_fd;
    if (s->pool->load_count >= LOADS_MAX || (s->pool->load_count && rv_fd_is_reserved(file_fd)) ||
        !load_create(s, model, file_fd, identity)) {
        (void)close(file_fd);
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "%u loads are under way or queued", s->pool->load_count);
    }
    r = wait_add(model->load, wait, err);
    start_next(s); /* may end the load at once and answer the waiter */
    return r;
}

/* ---- from the loader -------------------------------------------------------------------------------------------- */

static void fail_and_kill(struct rv_load *load, const char *what)
{
    struct rv_error err = {0};

    rv_error_set(&err, EPROTO, ERROR(INTERNAL), "the loader %s", what);
    rv_child_kill(&load->child, what);
    load_end(load, NULL, &err);
}

void rv_load_on_hello(struct rv_supervisor *s, struct rv_child *child)
{
    struct rv_load *load = (struct rv_load *)child;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LoadStart start = RV__LOAD_START__INIT;
    Rv__Device device = RV__DEVICE__INIT;
    const char *direct = s->config->pool_direct;

    if (load->stage != LOAD_STARTED || load->file_fd < 0)
        return;
    start.path = load->model->path;
    start.format = load->model->format;
    start.backend = load->backend;
    start.huge_pages = s->config->huge_pages;
    start.direct = strcmp(direct, "always") == 0 ? 1 : strcmp(direct, "never") == 0 ? 2 : 0;
    if (load->device != RV_HOST) {
        rv_devices_fill(s, load->device, &device);
        start.device = &device;
    }
    frame.body_case = RV__FRAME__BODY_LOAD_START;
    frame.load_start = &start;
    rv_session_send(child->session, &frame, &load->file_fd, 1);
    (void)close(load->file_fd);
    load->file_fd = -1;
}

/* The granularity of a device's memory; 1 = bytes. */
static uint64_t granularity_of(const struct rv_load *load)
{
    const struct rv_device_record *d = load->device == RV_HOST ? NULL : &load->supervisor->state.devices[load->device];

    return d && d->granularity ? d->granularity : 1;
}

static uint64_t slack_of(const struct rv_load *load)
{
    return granularity_of(load) > ROUNDING ? granularity_of(load) : ROUNDING;
}

static void refuse(struct rv_load *load, const struct rv_error *err)
{
    if (load->child.session)
        rv_session_reply(load->child.session, 0, err);
    load_end(load, NULL, err);
}

static void admit(struct rv_load *load)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__LoadAdmit admitted = RV__LOAD_ADMIT__INIT;
    Rv__Arena arena = RV__ARENA__INIT, *arenas[] = {&arena};

    load->stage = LOAD_ADMITTED;
    if (load->allocated) {
        rv_lease_fill_arena(&load->arena, &arena);
        admitted.arenas = arenas;
        admitted.n_arenas = 1;
    }
    frame.body_case = RV__FRAME__BODY_LOAD_ADMIT;
    frame.load_admit = &admitted;
    if (load->child.session) /* else its exit is about to be reported */
        rv_session_send(load->child.session, &frame, NULL, 0);
}

/* The load waits for it: load_end would have said so otherwise. */
static void on_allocated(struct rv_supervisor *s, void *context, const struct rv_arena *arena, uint64_t holder,
                         const struct rv_error *err)
{
    struct rv_load *load = context;
    struct rv_error wrong = {0};

    (void)s;
    if (!arena) {
        load->stage = LOAD_STARTED; /* there is nothing to forget */
        refuse(load, err);
        return;
    }
    load->arena = *arena;
    load->holder = holder;
    load->allocated = true;
    if (arena->backend != RV_BACKEND_CUDA_IPC || rv_backend_by_id(arena->backend)->check(-1, arena, &wrong) < 0 ||
        arena->size < load->planned_arenas || arena->size - load->planned_arenas > slack_of(load)) {
        load->stage = LOAD_STARTED;
        if (!wrong.code)
            rv_error_set(&wrong, EPROTO, ERROR(INTERNAL), "the holder's arena of %llu bytes is not as planned",
                         (unsigned long long)arena->size);
        refuse(load, &wrong);
        return;
    }
    load->admitted = arena->size;
    admit(load);
}

void rv_load_on_plan(struct rv_supervisor *s, struct rv_child *child, const Rv__LoadPlan *plan)
{
    struct rv_load *load = (struct rv_load *)child;
    struct rv_generation *old;
    struct rv_error err = {0};
    uint64_t grain = granularity_of(load), bytes;

    if (load->stage != LOAD_STARTED)
        return;
    if (plan->arena_bytes > INT64_MAX / 2 || plan->index_bytes > INT64_MAX / 2) {
        fail_and_kill(load, "planned an impossible size");
        return;
    }
    bytes = (plan->arena_bytes + grain - 1) / grain * grain;
    /* An older version that nobody uses cannot serve anybody any more: its file has changed. */
    old = rv_model_current(load->model);
    if (old && old->lease_count == 0)
        rv_generation_free(s, old);
    if (rv_policy_admit(s, load->model, bytes, plan->index_bytes, &err) < 0) {
        refuse(load, &err);
        return;
    }
    load->planned_arenas = plan->arena_bytes;
    load->planned_index = plan->index_bytes;
    load->admitted = bytes;
    load->admitted_index = plan->index_bytes;
    load->total_bytes = plan->arena_bytes;
    if (load->backend != RV_BACKEND_CUDA_IPC || plan->arena_bytes == 0) {
        admit(load);
        return;
    }
    load->stage = LOAD_ALLOCATING;
    if (rv_holder_allocate(s, load->device, bytes, on_allocated, load, &err) < 0) {
        load->stage = LOAD_STARTED;
        refuse(load, &err);
    }
}

void rv_load_on_progress(struct rv_supervisor *s, struct rv_child *child, const Rv__LoadProgress *progress)
{
    struct rv_load *load = (struct rv_load *)child;
    struct rv_wait *wait;

    (void)s;
    if (load->stage != LOAD_ADMITTED)
        return;
    load->done_bytes = progress->bytes_done;
    load->total_bytes = progress->bytes_total;
    TAILQ_FOREACH (wait, &load->waits, link) {
        Rv__Frame frame = RV__FRAME__INIT;

        if (!wait->options.progress)
            continue;
        frame.id = wait->options.id;
        frame.body_case = RV__FRAME__BODY_LOAD_PROGRESS;
        frame.load_progress = (Rv__LoadProgress *)progress;
        rv_session_progress(wait->options.session, &frame);
    }
}

/* An arena with a descriptor, of the kind that was asked for, and sealed if it is of the kind that can be. */
static int take_described(const struct rv_load *load, const Rv__Arena *message, int fd, struct rv_arena *ret_arena,
                          struct rv_error *err)
{
    const struct rv_backend *backend = rv_backend_by_id(load->backend);

    *ret_arena = (struct rv_arena){.size = message->size, .page_size = message->page_size, .backend = message->backend};
    if (message->backend != load->backend)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the loader handed over an arena of another kind");
    return backend->check(fd, ret_arena, err);
}

/* What the loader names is what the holder gave it for this. */
static int take_allocated(const struct rv_load *load, const Rv__Arena *message, struct rv_arena *ret_arena,
                          struct rv_error *err)
{
    if (!load->allocated || message->backend != load->backend || message->size != load->arena.size ||
        message->allocation != load->arena.allocation)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the loader handed over an arena that it was not given");
    *ret_arena = load->arena;
    return 0;
}

/* Trusts nothing: number of descriptors, seals, sizes against the plan. 0; err is filled else. */
static int take_arenas(const struct rv_load *load, const struct rv_frame *frame, struct rv_generation *g,
                       struct rv_error *err)
{
    const Rv__LoadDone *done = frame->message->load_done;
    bool described = rv_backend_by_id(load->backend)->has_descriptor;
    size_t most = described ? RV_ARENAS_MAX : load->allocated, fds = 1 + (described ? done->n_arenas : 0);
    /* rounded up: on the host all together as ever, on a device each by itself */
    uint64_t bytes = 0, limit = load->planned_arenas + slack_of(load) * (load->device == RV_HOST ? 1 : most);
    int r = 0;

    if (done->n_arenas > most || (load->allocated && done->n_arenas != 1) || frame->fd_count != fds)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the loader handed over %zu arenas and %u descriptors",
                            done->n_arenas, frame->fd_count);
    if (done->index_size > load->planned_index || rv_sealed_check(frame->fds[0], done->index_size) < 0)
        return rv_error_set(err, EPROTO, ERROR(INTERNAL), "the loader handed over an index that is not as planned");
    for (size_t i = 0; i < done->n_arenas && r == 0; i++) {
        r = described ? take_described(load, done->arenas[i], frame->fds[i + 1], &g->arenas[i], err)
                      : take_allocated(load, done->arenas[i], &g->arenas[i], err);
        if (r == 0 && g->arenas[i].size > limit - bytes)
            r = -EPROTO;
        if (r == 0)
            bytes += g->arenas[i].size;
    }
    if (r < 0 && !err->code)
        rv_error_set(err, EPROTO, ERROR(INTERNAL), "the loader handed over an arena that is not as planned");
    g->bytes = bytes + done->index_size;
    return r;
}

/* Takes the descriptors on success. */
static struct rv_generation *generation_create(struct rv_load *load, struct rv_frame *frame, struct rv_error *err)
{
    const Rv__LoadDone *done = frame->message->load_done;
    struct rv_generation *g = calloc(1, sizeof(*g));

    if (!g) {
        rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the catalogue");
        return NULL;
    }
    if (take_arenas(load, frame, g, err) < 0) {
        free(g);
        return NULL;
    }
    g->index_fd = rv_frame_take_fd(frame, 0);
    for (size_t i = 0; i < done->n_arenas; i++)
        g->arena_fds[i] = load->allocated ? -1 : rv_frame_take_fd(frame, (unsigned)i + 1);
    g->holder = load->allocated ? load->holder : 0;
    load->allocated = false; /* it is the generation's now */
    g->arena_count = (uint32_t)done->n_arenas;
    g->index_size = done->index_size;
    g->tensors = done->tensors;
    g->read_bytes = done->read_bytes;
    g->load_us = done->load_us;
    g->identity = load->identity;
    if (done->header_digest.len == sizeof(g->header_digest))
        memcpy(g->header_digest, done->header_digest.data, sizeof(g->header_digest));
    return g;
}

void rv_load_on_done(struct rv_supervisor *s, struct rv_child *child, struct rv_frame *frame)
{
    struct rv_load *load = (struct rv_load *)child;
    struct rv_model *model = load->model;
    struct rv_generation *g, *old;
    struct rv_error err = {0};
    uint64_t disk = frame->message->load_done->disk_bytes;
    char method[64], place[32];

    if (load->stage != LOAD_ADMITTED)
        return;
    g = generation_create(load, frame, &err);
    if (!g) {
        rv_child_kill(child, "what it handed over is not as planned");
        load_end(load, NULL, &err);
        return;
    }
    rv_session_reply(child->session, 0, NULL); /* taken: it may go */
    old = rv_model_current(model);
    g->model = model;
    g->number = ++model->generation_count;
    TAILQ_INSERT_HEAD(&model->generations, g, link);
    model->loads++;
    model->read_bytes += g->read_bytes;
    model->last_load_us = rv_now_us() - load->started_us;
    s->state.counters.loads++;
    s->state.counters.load_us += model->last_load_us;
    s->state.counters.read_bytes += g->read_bytes;
    s->state.counters.disk_bytes += disk;
    (void)rv_escape(method, sizeof(method), frame->message->load_done->method,
                    strlen(frame->message->load_done->method));
    rv_log_info("%s is resident%s: generation %llu, %llu tensors, %.1f MiB in %.2f s (%s, %.1f MiB from the disk)",
                model->name, rv_place_text(s, load->device, place), (unsigned long long)g->number,
                (unsigned long long)g->tensors, (double)g->bytes / (1 << 20),
                (double)model->last_load_us / (double)RV_SEC, method, (double)disk / (1 << 20));
    load_end(load, g, NULL);
    if (old)
        rv_generation_release_if_unused(s, old);
}

void rv_load_on_error(struct rv_supervisor *s, struct rv_child *child, const Resvisor__V1__Error *error)
{
    struct rv_load *load = (struct rv_load *)child;
    struct rv_error err;

    (void)s;
    if (load->stage == LOAD_ENDED)
        return;
    if (rv_error_from_message(&err, error) == 0)
        rv_error_set(&err, EPROTO, ERROR(INTERNAL), "the loader failed without a reason");
    load_end(load, NULL, &err);
}

/* ---- the pool --------------------------------------------------------------------------------------------------- */

uint64_t rv_load_admitted_bytes(const struct rv_supervisor *s, int device)
{
    const struct rv_load *load;
    uint64_t bytes = 0;

    TAILQ_FOREACH (load, &s->pool->loads, link) {
        if (load->device == device)
            bytes += load->admitted;
        if (device == RV_HOST)
            bytes += load->admitted_index;
    }
    return bytes;
}

bool rv_load_is_at(const struct rv_supervisor *s, int device)
{
    const struct rv_load *load;

    TAILQ_FOREACH (load, &s->pool->loads, link)
        if (load->device == device && load->stage != LOAD_ENDED) /* an ended one waits for its loader's exit only */
            return true;
    return false;
}

int rv_load_device(const struct rv_child *loader)
{
    return ((const struct rv_load *)loader)->device;
}

uint64_t rv_pool_device_bytes(const struct rv_supervisor *s, int device, uint64_t *ret_promised)
{
    *ret_promised = rv_load_admitted_bytes(s, device);
    return rv_state_pool_bytes(&s->state, device);
}

bool rv_load_is_preload(const struct rv_supervisor *s)
{
    const struct rv_load *load;

    TAILQ_FOREACH (load, &s->pool->loads, link) {
        for (uint32_t i = 0; load->model && i < s->config->model_count; i++) {
            const struct rv_config_model *c = &s->config->models[i];

            if ((c->preload || c->pin) && strcmp(c->name, load->model->name) == 0)
                return true;
        }
    }
    return false;
}

void rv_load_progress_of(const struct rv_model *model, uint64_t *ret_done, uint64_t *ret_total)
{
    *ret_done = model->load ? model->load->done_bytes : 0;
    *ret_total = model->load ? model->load->total_bytes : 0;
}

int rv_pool_init(struct rv_supervisor *s)
{
    struct rv_pool *pool = calloc(1, sizeof(*pool));

    if (!pool)
        return -ENOMEM;
    s->pool = pool;
    TAILQ_INIT(&pool->loads);
    TAILQ_INIT(&pool->parked);
    pool->revoke_timer = event_new(s->base, -1, 0, rv_pool_on_revoke_timer, s);
    pool->tell_timer = event_new(s->base, -1, 0, rv_pool_on_tell_timer, s);
    pool->logs = calloc(s->config->max_loads, sizeof(struct rv_log *));
    pool->log_used = calloc(s->config->max_loads, sizeof(*pool->log_used));
    if (!pool->logs || !pool->log_used || !pool->revoke_timer || !pool->tell_timer)
        return -ENOMEM;
    for (uint32_t i = 0; i < s->config->model_count; i++) {
        const struct rv_config_model *c = &s->config->models[i];
        struct rv_model *model = rv_model_add(&s->state, c->name, c->path, c->format, true, RV_HOST);

        if (!model)
            return -ENOMEM;
        model->pinned = c->pin && rv_places_host_is_wanted(s->config, c->name);
    }
    return 0;
}

void rv_pool_fini(struct rv_supervisor *s)
{
    struct rv_load *load;

    if (!s->pool)
        return;
    while ((load = TAILQ_FIRST(&s->pool->loads))) {
        load->allocated = false; /* the holders have ended */
        load_free(load);
    }
    if (s->pool->revoke_timer)
        event_free(s->pool->revoke_timer);
    if (s->pool->tell_timer)
        event_free(s->pool->tell_timer);
    free(s->pool->logs);
    free(s->pool->log_used);
    free(s->pool);
    s->pool = NULL;
}
