#include "state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "clock.h"

static const char *const worker_states[] = {
    [RV_WORKER_STOPPED] = "STOPPED",   [RV_WORKER_STARTING] = "STARTING", [RV_WORKER_READY] = "READY",
    [RV_WORKER_DRAINING] = "DRAINING", [RV_WORKER_BACKOFF] = "BACKOFF",   [RV_WORKER_FAILED] = "FAILED",
};
_Static_assert(sizeof(worker_states) / sizeof(worker_states[0]) == RV_WORKER_STATE_COUNT, "one name per state");

static const char *const model_states[] = {
    [RV_MODEL_ABSENT] = "ABSENT",
    [RV_MODEL_LOADING] = "LOADING",
    [RV_MODEL_RESIDENT] = "RESIDENT",
    [RV_MODEL_FAILED] = "FAILED",
};

const char *rv_worker_state_name(enum rv_worker_state state)
{
    return worker_states[state];
}

static const char *const device_states[] = {
    [RV_DEVICE_UNTESTED] = "UNTESTED", [RV_DEVICE_TESTING] = "TESTING", [RV_DEVICE_READY] = "READY",
    [RV_DEVICE_UNUSABLE] = "UNUSABLE", [RV_DEVICE_LOST] = "LOST",
};
_Static_assert(sizeof(device_states) / sizeof(device_states[0]) == RV_DEVICE_STATE_COUNT, "one name for each state");

const char *rv_device_state_name(enum rv_device_state state)
{
    return device_states[state];
}

const char *rv_model_state_name(enum rv_model_state state)
{
    return model_states[state];
}

const char *rv_place_name(const struct rv_state *state, int device)
{
    return device >= 0 && (uint32_t)device < state->device_count ? state->devices[device].name : "host";
}

int rv_state_init(struct rv_state *state)
{
    uint8_t random[16] = {0};

    *state = (struct rv_state){.counters = {.started_us = rv_now_us(), .next_incarnation = 1, .next_lease = 1}};
    TAILQ_INIT(&state->models);
    TAILQ_INIT(&state->leases);
    state->router.process = (struct rv_process){.kind = RV_CHILD_ROUTER, .pidfd = -1};
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return -EIO;
    for (unsigned i = 0; i < sizeof(random); i++)
        (void)snprintf(state->instance + 2 * i, 3, "%02x", random[i]);
    state->ledger.entries = calloc(RV_JOB_LEDGER_MAX, sizeof(*state->ledger.entries));
    return state->ledger.entries ? 0 : -ENOMEM;
}

int rv_state_place_workers(struct rv_state *state, uint32_t count)
{
    state->workers = calloc(count ? count : 1, sizeof(*state->workers));
    if (!state->workers)
        return -ENOMEM;
    state->worker_count = count;
    for (uint32_t i = 0; i < count; i++)
        state->workers[i].process = (struct rv_process){.kind = RV_CHILD_WORKER, .pidfd = -1};
    return 0;
}

int rv_state_place_templates(struct rv_state *state, uint32_t count)
{
    state->templates = calloc(count ? count : 1, sizeof(*state->templates));
    if (!state->templates)
        return -ENOMEM;
    state->template_count = count;
    for (uint32_t i = 0; i < count; i++)
        state->templates[i].process = (struct rv_process){.kind = RV_CHILD_TEMPLATE, .pidfd = -1};
    return 0;
}

static void model_free(struct rv_state *state, struct rv_model *model)
{
    struct rv_generation *generation;

    while ((generation = TAILQ_FIRST(&model->generations)))
        rv_generation_destroy(generation);
    TAILQ_REMOVE(&state->models, model, link);
    state->model_count--;
    free(model->name);
    free(model->path);
    free(model->source);
    free(model->format);
    free(model);
}

void rv_state_fini(struct rv_state *state)
{
    struct rv_model *model;

    while ((model = TAILQ_FIRST(&state->models)))
        model_free(state, model);
    free(state->workers);
    free(state->templates);
    state->workers = NULL;
    free(state->ledger.entries);
    state->ledger.entries = NULL;
}

uint32_t rv_random32(void)
{
    uint32_t random;

    /* Only spreads restarts over time: where the kernel gives none, the clock is random enough. */
    return getrandom(&random, sizeof(random), 0) == (ssize_t)sizeof(random) ? random : (uint32_t)rv_now_us();
}

bool rv_identity_equal(const struct rv_file_identity *a, const struct rv_file_identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size && a->mtime_sec == b->mtime_sec &&
           a->mtime_nsec == b->mtime_nsec;
}

static bool is_at(const struct rv_model *model, int device)
{
    return device == RV_ANYWHERE || model->device == device;
}

struct rv_model *rv_model_by_name(struct rv_state *state, const char *name, int device)
{
    struct rv_model *model;

    TAILQ_FOREACH (model, &state->models, link)
        if (is_at(model, device) && strcmp(model->name, name) == 0)
            return model;
    return NULL;
}

struct rv_model *rv_model_by_path(struct rv_state *state, const char *path, int device)
{
    struct rv_model *model, *first = NULL;

    /* Several names of one file have one entry that is at work: what is loaded is loaded once. */
    TAILQ_FOREACH (model, &state->models, link) {
        if (!is_at(model, device) || strcmp(model->path, path) != 0)
            continue;
        if (model->load || !TAILQ_EMPTY(&model->generations))
            return model;
        if (!first)
            first = model;
    }
    return first;
}

/* Entries by path or on a device are made for whoever asks; when the table is full the one unused for longest makes
 * room. */
static bool forget_one(struct rv_state *state)
{
    struct rv_model *model, *oldest = NULL;

    TAILQ_FOREACH (model, &state->models, link)
        if ((!model->configured || model->device != RV_HOST) && !model->pinned && !model->load &&
            TAILQ_EMPTY(&model->generations) && (!oldest || model->last_use_us < oldest->last_use_us))
            oldest = model;
    if (!oldest)
        return false;
    model_free(state, oldest);
    return true;
}

struct rv_model *rv_model_add(struct rv_state *state, const char *name, const char *path, const char *format,
                              bool configured, int device)
{
    struct rv_model *model = calloc(1, sizeof(*model));

    if (!model)
        return NULL;
    model->name = strdup(name);
    model->path = strdup(path);
    model->source = strdup(path);
    model->format = strdup(format);
    /* The texts first: they may be those of the entry that is forgotten. */
    if (!model->name || !model->path || !model->source || !model->format ||
        (state->model_count >= RV_MODELS_MAX && !forget_one(state))) {
        free(model->name);
        free(model->path);
        free(model->source);
        free(model->format);
        free(model);
        return NULL;
    }
    model->configured = configured;
    model->device = device;
    model->last_use_us = rv_now_us();
    TAILQ_INIT(&model->generations);
    TAILQ_INSERT_TAIL(&state->models, model, link);
    state->model_count++;
    return model;
}

struct rv_model *rv_model_place(struct rv_state *state, const struct rv_model *model, int device)
{
    struct rv_model *place, *after, *i;
    char path[RV_PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s", model->path);

    if (n < 0 || (size_t)n >= sizeof(path))
        return NULL;
    /* That makes room for itself, if need be by forgetting `model`, which is not used any more. */
    place = rv_model_add(state, model->name, model->source, model->format, model->configured, device);
    if (!place || rv_model_set_path(place, path) < 0)
        return place;
    after = NULL;
    TAILQ_FOREACH (i, &state->models, link)
        if (i != place && strcmp(i->name, place->name) == 0)
            after = i;
    if (after) { /* people read the places of a model one below the other */
        TAILQ_REMOVE(&state->models, place, link);
        TAILQ_INSERT_AFTER(&state->models, after, place, link);
    }
    return place;
}

bool rv_model_is_elsewhere(const struct rv_state *state, const struct rv_model *model)
{
    const struct rv_model *other;

    if (model->device != RV_HOST || model->pinned || model->loads || model->failure.code ||
        rv_model_state_of(model) != RV_MODEL_ABSENT)
        return false;
    TAILQ_FOREACH (other, &state->models, link)
        if (other->device != RV_HOST && strcmp(other->name, model->name) == 0)
            return true;
    return false;
}

int rv_model_set_path(struct rv_model *model, const char *path)
{
    char *copy;

    if (strcmp(model->path, path) == 0)
        return 0;
    copy = strdup(path);
    if (!copy)
        return -ENOMEM;
    free(model->path);
    model->path = copy;
    return 0;
}

struct rv_generation *rv_model_current(const struct rv_model *model)
{
    return TAILQ_FIRST(&model->generations);
}

enum rv_model_state rv_model_state_of(const struct rv_model *model)
{
    if (model->load)
        return RV_MODEL_LOADING;
    if (model->failure.code)
        return RV_MODEL_FAILED;
    return rv_model_current(model) ? RV_MODEL_RESIDENT : RV_MODEL_ABSENT;
}

uint64_t rv_state_pool_bytes(const struct rv_state *state, int device)
{
    const struct rv_model *model;
    const struct rv_generation *generation;
    uint64_t bytes = 0;

    TAILQ_FOREACH (model, &state->models, link) {
        TAILQ_FOREACH (generation, &model->generations, link) {
            if (model->device == device)
                bytes += generation->bytes - generation->index_size;
            if (device == RV_HOST)
                bytes += generation->index_size;
        }
    }
    return bytes;
}

void rv_generation_destroy(struct rv_generation *generation)
{
    TAILQ_REMOVE(&generation->model->generations, generation, link);
    for (uint32_t i = 0; i < generation->arena_count; i++)
        if (generation->arena_fds[i] >= 0)
            (void)close(generation->arena_fds[i]);
    (void)close(generation->index_fd);
    free(generation);
}

void rv_ledger_mark(struct rv_ledger *ledger, const struct rv_ledger_entry *mark)
{
    struct rv_ledger_entry *entry = NULL;

    /* Newest first: a job that ends was marked a moment ago. */
    for (uint32_t i = 0; i < ledger->used && !entry; i++) {
        struct rv_ledger_entry *e = &ledger->entries[(ledger->next + RV_JOB_LEDGER_MAX - 1 - i) % RV_JOB_LEDGER_MAX];

        if (strcmp(e->job_id, mark->job_id) == 0)
            entry = e;
    }
    if (!entry) {
        entry = &ledger->entries[ledger->next];
        ledger->next = (ledger->next + 1) % RV_JOB_LEDGER_MAX;
        if (ledger->used < RV_JOB_LEDGER_MAX)
            ledger->used++;
    }
    *entry = *mark;
}

uint32_t rv_deaths_add(struct rv_deaths *deaths, uint64_t now_us, uint64_t window_us)
{
    uint32_t within = 0;

    memmove(deaths->at_us + 1, deaths->at_us, (RV_DEATHS_MAX - 1) * sizeof(deaths->at_us[0]));
    deaths->at_us[0] = now_us;
    if (deaths->count < RV_DEATHS_MAX)
        deaths->count++;
    for (uint32_t i = 0; i < deaths->count; i++)
        if (now_us - deaths->at_us[i] <= window_us)
            within++;
    deaths->consecutive++;
    return within;
}

uint64_t rv_backoff_us(uint32_t consecutive_deaths, uint64_t max_us, uint32_t random)
{
    uint64_t delay;

    if (consecutive_deaths <= 1)
        return 0;
    delay = consecutive_deaths - 2 >= 6 ? 60 * RV_SEC : RV_SEC << (consecutive_deaths - 2);
    if (delay > max_us)
        delay = max_us;
    return delay - delay / 5 + (uint64_t)random % (2 * delay / 5 + 1);
}
