/*
 * The self-test: one process finds all devices and tests them in sacrificial children of its own. Nobody waits for it
 * but loads onto devices. What it says is checked here, and what it does not say in time is the reason for what is
 * missing; the choice from it is made in device_choice.c.
 */
#include <errno.h>
#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "config.h"
#include "control/control.h"
#include "device_cache.h"
#include "device_choice.h"
#include "devices_private.h"
#include "log.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define LONGEST_TIMES 10u /* cuda.test_timeout: in all, however much it says */
#define WAITS_MAX 16u
#define LAST_WORDS_MAX 128u
#define WHY_MAX 160
#define CACHE_NAME "devices"

struct search_wait {
    struct rv_session *session;
    uint64_t id;
    int device; /* that is shown; -1 = all */
};

struct rv_device_search {
    struct rv_child child; /* first */
    struct rv_process process;
    struct event *timer;
    uint64_t started_us;
    int only;      /* a device's number, or -1 = all */
    bool spawned;  /* a process was there: what it did not say is news of the device */
    bool done;     /* DeviceDone has come */
    bool no_cache; /* results of earlier starts are not looked at */

    bool wanted[RV_DEVICES_MAX], wanted_all; /* the next ones */

    struct rv_device_record found[RV_DEVICES_MAX];
    uint32_t found_count;
    char reason[RV_ERROR_TEXT_MAX / 2], driver[16];
    char failure[RV_ERROR_TEXT_MAX / 2]; /* why it did not get to its end; empty = it did */

    struct rv_device_cache *cache; /* NULL = none that can be used */
    struct search_wait waits[WAITS_MAX];
    uint32_t wait_count;
};

static void start_next(struct rv_supervisor *s);

static void copy_text(char *to, size_t size, const char *from)
{
    (void)rv_escape(to, size, from, strlen(from));
}

/* ---- who waits -------------------------------------------------------------------------------------------------- */

int rv_device_search_wait(struct rv_supervisor *s, struct rv_session *session, uint64_t id, int device,
                          struct rv_error *err)
{
    struct rv_device_search *search = s->devices->search;

    if (search->wait_count >= WAITS_MAX)
        return rv_error_set(err, EBUSY, ERROR(LIMIT), "%u requests wait for a self-test already", WAITS_MAX);
    search->waits[search->wait_count++] = (struct search_wait){session, id, device};
    return 0;
}

void rv_devices_forget_session(struct rv_supervisor *s, struct rv_session *session)
{
    struct rv_device_search *search = s->devices ? s->devices->search : NULL;

    for (uint32_t i = 0; search && i < search->wait_count;) {
        if (search->waits[i].session == session)
            search->waits[i] = search->waits[--search->wait_count];
        else
            i++;
    }
}

static void answer_waits(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;

    while (search->wait_count) {
        struct search_wait wait = search->waits[--search->wait_count];

        rv_device_send_list(wait.session, wait.id, wait.device);
    }
}

/* ---- the cache -------------------------------------------------------------------------------------------------- */

static int cache_path(char *path, size_t size)
{
    int r = rv_state_dir_default(path, size);
    size_t length = r == 0 ? strlen(path) : 0;

    if (r == 0 && (size_t)snprintf(path + length, size - length, "/" CACHE_NAME) >= size - length)
        r = -ENAMETOOLONG;
    return r;
}

static void cache_load(struct rv_device_search *search)
{
    char path[RV_PATH_MAX], problem[128] = "";
    int r;

    search->cache = malloc(sizeof(*search->cache));
    r = search->cache ? cache_path(path, sizeof(path)) : -ENOMEM;
    if (r == 0)
        r = rv_device_cache_read(path, search->cache, problem, sizeof(problem));
    if (r == 0)
        return;
    free(search->cache);
    search->cache = NULL;
    if (r != -ENOENT)
        rv_log_debug("earlier results of self-tests are not used: %s", problem[0] ? problem : strerror(-r));
}

static void cache_save(struct rv_supervisor *s)
{
    const char *driver = s->devices->search->driver;
    char path[RV_PATH_MAX];
    int r = cache_path(path, sizeof(path));

    if (driver[0] == '\0' || strspn(driver, "0123456789.") != strlen(driver))
        return;
    if (r == 0)
        r = rv_device_cache_write(path, driver, s->state.devices, s->state.device_count);
    if (r < 0)
        rv_log_info("the results of the self-test are not kept for the next start: %s: %s", path, strerror(-r));
}

static const struct rv_cached_device *cache_fits(const struct rv_device_search *search,
                                                 const struct rv_device_record *d)
{
    const struct rv_cached_device *cached = search->cache ? rv_device_cache_find(search->cache, d->uuid) : NULL;

    return cached && strcmp(search->cache->driver, d->driver) == 0 &&
                   cached->attributes == rv_device_attributes_digest(d)
               ? cached
               : NULL;
}

/* A device without tests of this run: takes those of an earlier start, if they are of the same. */
static void cache_fill(const struct rv_device_search *search, struct rv_device_record *d)
{
    const struct rv_cached_device *cached = cache_fits(search, d);

    if (!cached)
        return;
    memcpy(d->tests, cached->tests, sizeof(d->tests));
    d->test_count = cached->test_count;
    d->cached = true;
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

/* The place in the table for a device that was found; NULL = there is no room. */
static struct rv_device_record *place_of(struct rv_supervisor *s, const struct rv_device_record *found)
{
    int i = rv_devices_by_uuid(s, found->uuid);

    if (i >= 0)
        return &s->state.devices[i];
    if (s->state.device_count >= RV_DEVICES_MAX)
        return NULL;
    i = (int)s->state.device_count++;
    s->state.devices[i] = (struct rv_device_record){.holder = {.process = {.kind = RV_CHILD_DEVICE, .pidfd = -1}}};
    (void)snprintf(s->state.devices[i].name, sizeof(s->state.devices[i].name), "cuda:%d", i);
    return &s->state.devices[i];
}

/* Takes what the test says of a device, and keeps what it knows nothing of. */
static void take_facts(struct rv_device_record *to, const struct rv_device_record *from)
{
    struct rv_device_record old = *to;

    *to = *from;
    memcpy(to->name, old.name, sizeof(to->name));
    to->state = old.state;
    to->backend = old.backend;
    memcpy(to->reason, old.reason, sizeof(to->reason));
    to->budget_bytes = old.budget_bytes;
    to->seen_us = old.seen_us;
    to->used_bytes = old.used_bytes;
    to->free_bytes = old.free_bytes;
    to->nvml_total_bytes = old.nvml_total_bytes;
    to->holder = old.holder;
}

/* It is in use, and somebody suspects it: what lies there must stay usable. */
static void judge_in_use(struct rv_supervisor *s, struct rv_device_record *d, const char *missing)
{
    int number = (int)(d - s->state.devices);
    char why[WHY_MAX], reason[sizeof(d->reason)];

    if (rv_device_answers(d, d->backend, missing, why, sizeof(why))) {
        rv_log_info("%s has passed its self-test: it stays in use", d->name);
        return;
    }
    (void)snprintf(reason, sizeof(reason), "%.200s; the self-test after that: %s", s->devices->extras[number].suspicion,
                   why);
    rv_device_lose(s, number, reason);
}

static void judge(struct rv_supervisor *s, struct rv_device_record *d, const char *missing)
{
    enum rv_device_state before = d->state;

    rv_device_choose(d, rv_device_configured(s, d, &d->budget_bytes), missing);
    if (before == RV_DEVICE_LOST && d->state != RV_DEVICE_READY)
        d->state = RV_DEVICE_LOST; /* still */
    rv_log(d->state == RV_DEVICE_READY ? RV_LOG_INFO : RV_LOG_WARNING, "%s (%s) is %s: %s", d->name, d->product,
           rv_device_state_name(d->state), d->reason);
    if (d->state == RV_DEVICE_READY)
        rv_workers_device_back(s, (int)(d - s->state.devices));
}

/* A device that was to be tested and was not found. */
static void judge_missing(struct rv_supervisor *s, int number)
{
    const struct rv_device_search *search = s->devices->search;
    struct rv_device_record *d = &s->state.devices[number];
    const char *why = search->failure;

    if (!why[0])
        why = search->reason[0] ? search->reason : "the driver does not list it any more";
    if (d->state == RV_DEVICE_READY && search->spawned) {
        rv_device_lose(s, number, why);
    } else if (d->state == RV_DEVICE_READY) {
        rv_log_warning("%s stays in use, untested: %s", d->name, why);
    } else {
        if (d->state == RV_DEVICE_TESTING) /* nothing of ours is there */
            d->state = search->failure[0] ? RV_DEVICE_UNUSABLE : RV_DEVICE_LOST;
        (void)snprintf(d->reason, sizeof(d->reason), "%s", why);
        (void)rv_text_mend(d->reason);
        d->backend = RV_BACKEND_NONE;
        rv_log_warning("%s is %s: %s", d->name, rv_device_state_name(d->state), d->reason);
    }
    s->devices->extras[number].suspected = false;
}

static void take_result(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    const char *missing = search->failure[0] ? search->failure : "the self-test did not report it";
    uint32_t known = s->state.device_count;
    bool seen[RV_DEVICES_MAX] = {false};

    for (uint32_t i = 0; i < search->found_count; i++) {
        struct rv_device_record *d;

        if (search->found[i].test_count == 0)
            cache_fill(search, &search->found[i]);
        d = place_of(s, &search->found[i]);
        if (!d)
            continue;
        seen[d - s->state.devices] = true;
        take_facts(d, &search->found[i]);
        if (d->state == RV_DEVICE_LOST && s->devices->extras[d - s->state.devices].lost_us >= search->started_us)
            rv_log_warning("%s stays LOST: it was lost while it was tested", d->name);
        else if (d->state == RV_DEVICE_READY && !search->spawned)
            rv_log_warning("%s stays in use, not tested to the end: %s", d->name, missing);
        else if (d->state == RV_DEVICE_READY)
            judge_in_use(s, d, missing);
        else
            judge(s, d, missing);
        s->devices->extras[d - s->state.devices].suspected = false;
    }
    for (uint32_t i = 0; i < known; i++)
        if (!seen[i] && (search->only < 0 || search->only == (int)i))
            judge_missing(s, (int)i);
    s->state.devices_reason[0] = '\0';
    if (s->state.device_count == 0)
        (void)snprintf(s->state.devices_reason, sizeof(s->state.devices_reason), "%s",
                       search->failure[0]  ? search->failure
                       : search->reason[0] ? search->reason
                                           : "the driver lists none");
    (void)rv_text_mend(s->state.devices_reason);
}

/* Was a device left out for the sake of an earlier result that then did not fit? */
static bool must_repeat(const struct rv_device_search *search)
{
    for (uint32_t i = 0; i < search->found_count && search->cache && !search->failure[0]; i++) {
        const struct rv_device_record *d = &search->found[i];

        if (d->test_count == 0 && rv_device_cache_find(search->cache, d->uuid) && !cache_fits(search, d))
            return true;
    }
    return false;
}

/* Who configured a device wants to know that it is not there. */
static void warn_of_absent(const struct rv_supervisor *s)
{
    for (uint32_t i = 0; i < s->config->device_count; i++)
        if (rv_devices_by_name(s, s->config->devices[i].name) < 0)
            rv_log_warning("devices.%s is configured, and there is no such device%s%s", s->config->devices[i].name,
                           s->state.device_count ? "" : ": ", s->state.devices_reason);
}

static void finish(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    bool first = !s->state.devices_known;

    (void)event_del(search->timer);
    if (s->stopping)
        return;
    if (must_repeat(search)) {
        rv_log_debug("earlier results of self-tests are of a device with other attributes: all are tested anew");
        search->wanted_all = true;
        search->no_cache = true;
    } else {
        take_result(s);
        cache_save(s);
        s->state.devices_known = true;
        if (first && s->state.device_count == 0)
            rv_log_info("no devices: %s", s->state.devices_reason);
        if (first)
            warn_of_absent(s);
        rv_pool_devices_known(s);
        rv_device_watch_start(s);
    }
    free(search->cache);
    search->cache = NULL;
    start_next(s);
    if (search->process.pid <= 0)
        answer_waits(s);
}

static void on_exit_search(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_device_search *search = (struct rv_device_search *)child;

    char words[LAST_WORDS_MAX] = "";

    if (!report->signaled && report->status != 0 && child->log) /* it chose to end, so it has most likely said why */
        copy_text(words, sizeof(words), rv_log_last_line(child->log));
    if (!search->done && !search->failure[0])
        (void)snprintf(search->failure, sizeof(search->failure), "the self-test ended before its time: %.80s%s%s",
                       report->text, words[0] ? ": " : "", words);
    if (report->signaled && report->status == SIGKILL && !child->killed_by_us)
        search->spawned = false; /* by the kernel for want of memory, or by a person: no news of any device */
    finish(s);
}

/* It lies, or takes too long: what it has said so far counts, if it was no lie. */
static void fail(struct rv_supervisor *s, const char *what)
{
    struct rv_device_search *search = s->devices->search;

    if (!search->failure[0])
        (void)snprintf(search->failure, sizeof(search->failure), "the self-test %s", what);
    rv_child_kill(&search->child, what);
}

static void fail_as_liar(struct rv_supervisor *s, const char *what)
{
    s->devices->search->found_count = 0; /* nothing of it can be believed */
    fail(s, what);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_supervisor *s = context;

    (void)fd;
    (void)what;
    fail(s, s->devices->search->done ? "did not end after its report"
                                     : "said nothing for as long as cuda.test_timeout allows");
}

static void arm(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    uint64_t silence = s->config->cuda_test_timeout_us, longest = LONGEST_TIMES * silence;
    uint64_t spent = rv_now_us() - search->started_us, left = spent < longest ? longest - spent : 1;
    struct timeval tv = rv_timeval(left < silence ? left : silence);

    (void)event_add(search->timer, &tv);
}

/* ---- the start -------------------------------------------------------------------------------------------------- */

static void begin(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    struct rv_error err = {0};

    search->started_us = rv_now_us();
    search->done = search->spawned = false;
    search->found_count = 0;
    search->reason[0] = search->driver[0] = search->failure[0] = '\0';
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        struct rv_device_record *d = &s->state.devices[i];

        if (search->only >= 0 && search->only != (int)i)
            continue;
        if (d->state == RV_DEVICE_READY && s->devices->extras[i].suspected)
            continue;
        if (d->state == RV_DEVICE_READY && rv_device_in_use(s, (int)i)) {
            s->devices->extras[i].suspected = true;
            (void)snprintf(s->devices->extras[i].suspicion, sizeof(s->devices->extras[i].suspicion),
                           "it was used before the test that was asked for could begin");
        } else if (d->state != RV_DEVICE_LOST) { /* that it stays until it is mended */
            d->state = RV_DEVICE_TESTING;
        }
    }
    if (!search->no_cache)
        cache_load(search);
    search->no_cache = true; /* it is for the first search: who tests again wants to know */
    if (rv_device_spawn(s, &search->child, "the self-test of devices", &err) < 0) {
        (void)snprintf(search->failure, sizeof(search->failure), "%.250s", err.message);
        finish(s);
        return;
    }
    search->spawned = true;
    arm(s);
}

static void start_next(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;

    if (search->process.pid > 0 || s->stopping)
        return;
    search->only = -1;
    for (uint32_t i = 0; i < RV_DEVICES_MAX && search->only < 0 && !search->wanted_all; i++)
        if (search->wanted[i])
            search->only = (int)i;
    if (search->only < 0 && !search->wanted_all)
        return;
    if (search->only >= 0) {
        search->wanted[search->only] = false;
    } else {
        memset(search->wanted, 0, sizeof(search->wanted));
        search->wanted_all = false;
    }
    begin(s);
}

void rv_device_search_start(struct rv_supervisor *s, int device)
{
    struct rv_device_search *search = s->devices->search;

    if (device < 0)
        search->wanted_all = true;
    else
        search->wanted[device] = true;
    start_next(s);
}

bool rv_device_search_runs(const struct rv_supervisor *s)
{
    return s->devices->search->process.pid > 0;
}

void rv_device_search_on_hello(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__DeviceStart start = RV__DEVICE_START__INIT;
    Rv__Device device = RV__DEVICE__INIT;
    ProtobufCBinaryData known[RV_DEVICES_MAX];

    start.work = RV__DEVICE_START__WORK__WORK_TEST;
    if (search->only >= 0) {
        rv_devices_fill(s, search->only, &device);
        start.device = &device;
    }
    for (uint32_t i = 0; search->cache && i < search->cache->count; i++)
        known[start.n_known++] = (ProtobufCBinaryData){RV_DEVICE_UUID_SIZE, search->cache->devices[i].uuid};
    start.known = known;
    if (search->cache)
        start.known_driver = search->cache->driver;
    frame.body_case = RV__FRAME__BODY_DEVICE_START;
    frame.device_start = &start;
    rv_device_send(&search->child, &frame);
}

/* ---- what it says ----------------------------------------------------------------------------------------------- */

static struct rv_device_record *found_of(struct rv_device_search *search, const ProtobufCBinaryData *uuid)
{
    for (uint32_t i = 0; i < search->found_count && uuid->len == RV_DEVICE_UUID_SIZE; i++)
        if (memcmp(search->found[i].uuid, uuid->data, RV_DEVICE_UUID_SIZE) == 0)
            return &search->found[i];
    return NULL;
}

static const char *on_found(struct rv_supervisor *s, const Rv__DeviceFound *message)
{
    struct rv_device_search *search = s->devices->search;
    const Resvisor__V1__DeviceStatus *m = message->device;
    struct rv_device_record *d = &search->found[search->found_count];

    if (!m || message->uuid.len != RV_DEVICE_UUID_SIZE || search->found_count >= RV_DEVICES_MAX)
        return "named a device without uuid, or too many";
    if (found_of(search, &message->uuid))
        return "named a device twice";
    if (search->only >= 0 && memcmp(message->uuid.data, s->state.devices[search->only].uuid, RV_DEVICE_UUID_SIZE) != 0)
        return "named a device that it was not asked for";
    if ((message->granularity & (message->granularity - 1)) || m->n_attributes > RV_DEVICE_ATTRIBUTES_MAX)
        return "said something impossible of a device";
    *d = (struct rv_device_record){.unified = m->unified,
                                   .pageable = message->pageable,
                                   .granularity = message->granularity,
                                   .total_bytes = m->total_bytes};
    memcpy(d->uuid, message->uuid.data, sizeof(d->uuid));
    copy_text(d->product, sizeof(d->product), m->product);
    copy_text(d->driver, sizeof(d->driver), m->driver);
    copy_text(d->capability, sizeof(d->capability), m->capability);
    for (size_t i = 0; i < m->n_attributes; i++) {
        struct rv_device_attribute *a = &d->attributes[d->attribute_count++];

        a->number = m->attributes[i]->number;
        a->value = m->attributes[i]->value;
        copy_text(a->name, sizeof(a->name), m->attributes[i]->name);
    }
    search->found_count++;
    return NULL;
}

static const char *add_test(struct rv_device_record *d, const Resvisor__V1__DeviceTest *m)
{
    const struct rv_backend *backend = rv_backend_by_name(m->backend);
    struct rv_device_test *test = &d->tests[d->test_count];

    if (d->test_count >= RV_DEVICE_TESTS_MAX || !backend || strlen(m->name) >= sizeof(test->name) ||
        strlen(m->result) >= sizeof(test->result))
        return "reported a test that there is not";
    *test = (struct rv_device_test){.backend = backend->id,
                                    .bytes_per_second = m->bytes_per_second,
                                    .duration_us = m->duration_us,
                                    .no_memory = m->no_memory};
    copy_text(test->name, sizeof(test->name), m->name);
    copy_text(test->result, sizeof(test->result), m->result);
    copy_text(test->detail, sizeof(test->detail), m->detail);
    if (!rv_device_test_is_valid(test))
        return "reported a test that there is not";
    for (uint32_t i = 0; i < d->test_count; i++)
        if (d->tests[i].backend == test->backend && strcmp(d->tests[i].name, test->name) == 0)
            return "reported a test twice";
    d->test_count++;
    return NULL;
}

static const char *on_tests(struct rv_supervisor *s, const Rv__DeviceTests *message)
{
    struct rv_device_record *d = found_of(s->devices->search, &message->uuid);
    const char *lie = d ? NULL : "reported tests of a device that it did not find";

    for (size_t i = 0; i < message->n_tests && !lie; i++)
        lie = add_test(d, message->tests[i]);
    return lie;
}

static const char *on_done(struct rv_supervisor *s, const Rv__DeviceDone *message)
{
    struct rv_device_search *search = s->devices->search;

    if (message->reason[0] && search->found_count)
        return "said that there are no devices after it had named some";
    search->done = true;
    copy_text(search->reason, sizeof(search->reason), message->reason);
    copy_text(search->driver, sizeof(search->driver), message->driver);
    return NULL;
}

bool rv_device_search_on_frame(struct rv_supervisor *s, const Rv__Frame *frame)
{
    struct rv_device_search *search = s->devices->search;
    struct rv_error err = {0};
    const char *lie = NULL;

    if (search->failure[0])
        return true; /* it is being killed */
    if (search->done)
        return false;
    arm(s);
    switch (frame->body_case) {
    case RV__FRAME__BODY_DEVICE_FOUND:
        lie = on_found(s, frame->device_found);
        break;
    case RV__FRAME__BODY_DEVICE_TESTS:
        lie = on_tests(s, frame->device_tests);
        break;
    case RV__FRAME__BODY_DEVICE_DONE:
        lie = on_done(s, frame->device_done);
        break;
    case RV__FRAME__BODY_DEVICE_EVENT: /* its rows say what failed */
        break;
    case RV__FRAME__BODY_ERROR:
        if (rv_error_from_message(&err, frame->error) != 0)
            (void)snprintf(search->failure, sizeof(search->failure), "the self-test failed: %.200s", err.message);
        break;
    default:
        return false;
    }
    if (lie)
        fail_as_liar(s, lie);
    return true;
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

bool rv_device_search_is(const struct rv_supervisor *s, const struct rv_child *child)
{
    return &s->devices->search->child == child;
}

int rv_device_search_init(struct rv_supervisor *s)
{
    struct rv_device_search *search = calloc(1, sizeof(*search));

    if (!search)
        return -ENOMEM;
    s->devices->search = search;
    search->process = (struct rv_process){.kind = RV_CHILD_DEVICE, .pidfd = -1};
    search->child.process = &search->process;
    search->child.on_exit = on_exit_search;
    search->only = -1;
    search->timer = event_new(s->base, -1, 0, on_timer, s);
    return search->timer ? 0 : -ENOMEM;
}

void rv_device_search_fini(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;

    if (!search)
        return;
    if (search->timer)
        event_free(search->timer);
    free(search->cache);
    free(search);
}

void rv_device_search_stop(struct rv_supervisor *s)
{
    struct rv_device_search *search = s->devices->search;
    struct rv_error err = {0};

    (void)event_del(search->timer);
    rv_child_kill(&search->child, "resvisor is stopping");
    rv_error_set(&err, EBUSY, ERROR(SHUTTING_DOWN), "resvisor is stopping");
    while (search->wait_count) {
        struct search_wait wait = search->waits[--search->wait_count];

        rv_session_reply(wait.session, wait.id, &err);
    }
}
