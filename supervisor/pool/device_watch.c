/* The watch: one process that tells what NVML says of all devices: memory, processes, Xids. Nothing needs it. */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "control/control.h"
#include "devices_private.h"
#include "log.h"
#include "supervisor.h"

#define INTERVAL_MS 1000u
#define FRESH_US (5 * RV_SEC)    /* older numbers are not used */
#define SILENCE_US (30 * RV_SEC) /* after it has spoken once: NVML may hang when a device does */
#define DEATHS_MAX 5u            /* within DEATH_WINDOW_US: given up */
#define DEATH_WINDOW_US (300 * RV_SEC)
#define BACKOFF_MAX_US (60 * RV_SEC)
#define STABLE_US (60 * RV_SEC)

struct rv_device_watch {
    struct rv_child child; /* first */
    struct rv_process process;
    struct rv_deaths deaths;
    struct event *timer; /* running: silence; else the next start */
    char reason[RV_ERROR_TEXT_MAX / 2];
    bool given_up;
};

bool rv_device_watch_knows(const struct rv_device_record *device)
{
    return !device->unified && device->seen_us && rv_now_us() - device->seen_us < FRESH_US;
}

static void give_up(struct rv_supervisor *s, const char *why)
{
    s->devices->watch->given_up = true;
    rv_log_info("memory of devices and their Xids are not watched: %s", why);
}

static void on_exit_watch(struct rv_supervisor *s, struct rv_child *child, const struct rv_exit_report *report)
{
    struct rv_device_watch *watch = (struct rv_device_watch *)child;
    const char *why = watch->reason[0] ? watch->reason : report->text;
    struct timeval tv;

    (void)event_del(watch->timer);
    for (uint32_t i = 0; i < s->state.device_count; i++)
        s->devices->extras[i].process_count = 0;
    if (s->stopping)
        return;
    if (report->uptime_us >= STABLE_US)
        watch->deaths.consecutive = 0;
    if (!report->signaled && report->status == 0) {
        give_up(s, watch->reason[0] ? watch->reason : "NVML tells nothing");
    } else if (rv_deaths_add(&watch->deaths, rv_now_us(), DEATH_WINDOW_US) >= DEATHS_MAX) {
        give_up(s, why);
    } else {
        uint64_t delay = rv_backoff_us(watch->deaths.consecutive, BACKOFF_MAX_US, rv_random32());

        rv_log_warning("the watch of devices %s; it restarts in %.1f s", why, (double)delay / (double)RV_SEC);
        tv = rv_timeval(delay);
        (void)event_add(watch->timer, &tv);
    }
}

void rv_device_watch_start(struct rv_supervisor *s)
{
    struct rv_device_watch *watch = s->devices->watch;
    struct rv_error err = {0};

    if (s->stopping || s->state.device_count == 0 || watch->given_up || watch->process.pid > 0 ||
        event_pending(watch->timer, EV_TIMEOUT, NULL))
        return;
    watch->reason[0] = '\0';
    if (rv_device_spawn(s, &watch->child, "the watch of devices", &err) < 0)
        give_up(s, err.message);
}

static void on_timer(int fd, short what, void *context)
{
    struct rv_supervisor *s = context;

    (void)fd;
    (void)what;
    if (s->devices->watch->process.pid > 0)
        rv_child_kill(&s->devices->watch->child, "it said nothing for too long");
    else
        rv_device_watch_start(s);
}

void rv_device_watch_on_hello(struct rv_supervisor *s)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__DeviceStart start = RV__DEVICE_START__INIT;

    start.work = RV__DEVICE_START__WORK__WORK_WATCH;
    start.watch_ms = INTERVAL_MS;
    frame.body_case = RV__FRAME__BODY_DEVICE_START;
    frame.device_start = &start;
    rv_device_send(&s->devices->watch->child, &frame);
}

static bool on_memory(struct rv_supervisor *s, const Rv__DeviceMemory *message)
{
    static const struct timeval silence = {SILENCE_US / RV_SEC, 0};
    int number = rv_devices_by_bytes(s, &message->uuid);
    struct rv_device_extra *extra;
    struct rv_device_record *d;

    (void)event_add(s->devices->watch->timer, &silence);
    if (number < 0)
        return message->uuid.len == RV_DEVICE_UUID_SIZE; /* one that the driver hides from us */
    d = &s->state.devices[number];
    extra = &s->devices->extras[number];
    d->used_bytes = message->used_bytes;
    d->free_bytes = message->free_bytes;
    d->nvml_total_bytes = message->total_bytes;
    d->seen_us = message->total_bytes ? rv_now_us() : 0;
    extra->process_count = 0;
    for (size_t i = 0; i < message->n_processes && extra->process_count < RV_DEVICE_PROCESSES_MAX; i++)
        extra->processes[extra->process_count++] =
            (struct rv_device_process){message->processes[i]->pid, message->processes[i]->bytes};
    return true;
}

bool rv_device_watch_on_frame(struct rv_supervisor *s, const Rv__Frame *frame)
{
    struct rv_device_watch *watch = s->devices->watch;
    struct rv_error err = {0};

    switch (frame->body_case) {
    case RV__FRAME__BODY_DEVICE_MEMORY:
        return on_memory(s, frame->device_memory);
    case RV__FRAME__BODY_DEVICE_EVENT:
        rv_device_on_event(s, watch->child.session, frame->device_event);
        return true;
    case RV__FRAME__BODY_ERROR:
        if (rv_error_from_message(&err, frame->error) != 0)
            (void)rv_escape(watch->reason, sizeof(watch->reason), err.message, strlen(err.message));
        return true;
    default:
        return false;
    }
}

bool rv_device_watch_is(const struct rv_supervisor *s, const struct rv_child *child)
{
    return &s->devices->watch->child == child;
}

int rv_device_watch_init(struct rv_supervisor *s)
{
    struct rv_device_watch *watch = calloc(1, sizeof(*watch));

    if (!watch)
        return -ENOMEM;
    s->devices->watch = watch;
    watch->process = (struct rv_process){.kind = RV_CHILD_DEVICE, .pidfd = -1};
    watch->child.process = &watch->process;
    watch->child.on_exit = on_exit_watch;
    watch->timer = event_new(s->base, -1, 0, on_timer, s);
    return watch->timer ? 0 : -ENOMEM;
}

void rv_device_watch_fini(struct rv_supervisor *s)
{
    if (s->devices->watch && s->devices->watch->timer)
        event_free(s->devices->watch->timer);
    free(s->devices->watch);
}

void rv_device_watch_stop(struct rv_supervisor *s)
{
    (void)event_del(s->devices->watch->timer);
    rv_child_kill(&s->devices->watch->child, "resvisor is stopping");
}
