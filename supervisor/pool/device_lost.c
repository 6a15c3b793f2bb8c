/*
 * A device that is marked bad, and who has the word on that. What a loader, a holder or the self-test meets happens in
 * a context of our own making: some errors then mean that the device is gone. What a worker or a client meets is most
 * often its own fault, and sticks to its context only: then the self-test decides.
 */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "control/control.h"
#include "devices_private.h"
#include "log.h"
#include "pool.h"
#include "supervisor.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define SAME_XID_US (60 * RV_SEC) /* the same Xid is not logged again before: an application may cause thousands */
#define XID_LINES_MAX 16u         /* nor more of them within that time: several may come by turns */
#define RETEST_US (30 * RV_SEC)   /* at most one test of a device in use within so long, whoever complains */

/* ---- what an Xid means ------------------------------------------------------------------------------------------- */

/*
 * "Xid errors" of NVIDIA's documentation (docs.nvidia.com/deploy/xid-errors, the catalogue with its resolution
 * buckets). Fatal are those that only a reset, a reboot or another card mends. Those of the catalogue's bucket
 * RESTART_APP end the process that met them, and are told by it; they say nothing of the device.
 */
static const struct rv_xid xids[] = {
    {13, false, "graphics engine exception: an application's fault"},
    {31, false, "memory page fault: an application's fault"},
    {43, false, "an application's work was stopped"},
    {45, false, "an application's channels were torn down"},
    {46, true, "the GPU stopped processing"},
    {48, true, "double-bit memory error"},
    {61, true, "internal micro-controller breakpoint"},
    {62, true, "internal micro-controller halt"},
    {63, false, "a memory row will be remapped at the next reset"},
    {64, true, "a memory row could not be remapped"},
    {68, false, "video processor exception: an application's fault"},
    {69, false, "graphics engine class error: an application's fault"},
    {74, true, "NVLink error"},
    {79, true, "the GPU has fallen off the bus"},
    {92, false, "many single-bit memory errors, all corrected"},
    {94, false, "contained memory error: it ends the processes that it hit"},
    {95, true, "uncontained memory error"},
    {109, true, "context switch timeout"},
    {110, true, "security fault"},
    {119, true, "the GPU's system processor does not answer"},
    {120, true, "the GPU's system processor failed"},
    {121, false, "corrected error of the link between CPU and GPU"},
    {136, true, "link training failed"},
    {140, true, "unrecovered memory error"},
    {143, true, "the GPU could not be initialised"},
    {158, true, "fatal timeout of the GPU"},
};

const struct rv_xid *rv_xid_find(uint32_t number)
{
    for (unsigned i = 0; i < sizeof(xids) / sizeof(xids[0]); i++)
        if (xids[i].number == number)
            return &xids[i];
    return NULL;
}

/* ---- what an error of the driver means --------------------------------------------------------------------------- */

/* CUresult, by cuda.h. Want of memory, bad arguments and the like are no news of the device. */
static const int fatal_errors[] = {
    46,  /* DEVICE_UNAVAILABLE */
    214, /* ECC_UNCORRECTABLE */
    220, /* NVLINK_UNCORRECTABLE */
    702, /* LAUNCH_TIMEOUT */
    719, /* LAUNCH_FAILED */
    999, /* UNKNOWN */
};

/* Not even worth a test. */
static const int harmless_errors[] = {
    1,   /* INVALID_VALUE */
    2,   /* OUT_OF_MEMORY */
    801, /* NOT_SUPPORTED */
};

static bool is_among(int error, const int *errors, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (errors[i] == error)
            return true;
    return false;
}

bool rv_device_error_is_fatal(int error)
{
    return is_among(error, fatal_errors, sizeof(fatal_errors) / sizeof(fatal_errors[0]));
}

/* ---- lost -------------------------------------------------------------------------------------------------------- */

void rv_device_lose(struct rv_supervisor *s, int device, const char *reason)
{
    struct rv_device_record *d = &s->state.devices[device];
    struct rv_error err = {0};

    s->devices->extras[device].lost_us = rv_now_us();
    if (d->state == RV_DEVICE_LOST)
        return;
    if (reason != d->reason)
        (void)snprintf(d->reason, sizeof(d->reason), "%s", reason);
    (void)rv_text_mend(d->reason);
    rv_log_error("%s (%s) is LOST: %s; its models and the workers that use it go, the others stay; `resvisor devices "
                 "--test %s` tests it again",
                 d->name, d->product, d->reason, d->name);
    rv_error_set(&err, ENODEV, ERROR(DEVICE_LOST), "%s is lost: %.400s", d->name, d->reason);
    d->state = RV_DEVICE_LOST;
    s->devices->extras[device].suspected = false;
    rv_workers_device_lost(s, device, &err); /* first: it knows them by their leases */
    rv_pool_device_gone(s, device, &err);
    rv_holder_drop(s, device, &err);
    d->backend = RV_BACKEND_NONE;
}

/* ---- under suspicion ----------------------------------------------------------------------------------------------
 */

static void on_retest(int fd, short what, void *context)
{
    struct rv_supervisor *s = context;

    (void)fd;
    (void)what;
    for (uint32_t i = 0; i < s->state.device_count; i++) {
        if (!s->devices->extras[i].suspected || s->state.devices[i].state != RV_DEVICE_READY)
            continue;
        s->devices->extras[i].retested_us = rv_now_us();
        rv_device_search_start(s, (int)i);
    }
}

void rv_device_suspect(struct rv_supervisor *s, int device, const char *suspicion)
{
    struct rv_device_extra *extra = &s->devices->extras[device];
    uint64_t since = rv_now_us() - extra->retested_us;
    struct timeval tv;

    if (s->state.devices[device].state != RV_DEVICE_READY || s->stopping)
        return;
    if (extra->suspected) /* a test is under way or will be */
        return;
    (void)snprintf(extra->suspicion, sizeof(extra->suspicion), "%s", suspicion);
    extra->suspected = true;
    if (extra->retested_us == 0 || since >= RETEST_US) {
        rv_log_warning("%s is tested again: %s", s->state.devices[device].name, suspicion);
        extra->retested_us = rv_now_us();
        rv_device_search_start(s, device);
        return;
    }
    tv = rv_timeval(RETEST_US - since);
    rv_log_warning("%s is tested again in %.1f s: %s", s->state.devices[device].name,
                   (double)(RETEST_US - since) / (double)RV_SEC, suspicion);
    if (!event_pending(s->devices->retest, EV_TIMEOUT, NULL))
        (void)event_add(s->devices->retest, &tv);
}

/* ---- who says so --------------------------------------------------------------------------------------------------
 */

static void on_xid(struct rv_supervisor *s, int device, uint32_t number)
{
    const struct rv_xid *xid = rv_xid_find(number);
    struct rv_device_extra *extra = &s->devices->extras[device];
    uint64_t now = rv_now_us();
    char reason[256];

    (void)snprintf(reason, sizeof(reason), "the kernel driver says Xid %u: %s", number,
                   xid ? xid->what : "not known here");
    if (xid && xid->fatal) {
        rv_device_lose(s, device, reason);
        return;
    }
    if (now - extra->xid_us >= SAME_XID_US) {
        extra->xid = extra->xid_lines = 0;
        extra->xid_us = now;
    }
    if (extra->xid != number && extra->xid_lines < XID_LINES_MAX) {
        extra->xid = number;
        extra->xid_lines++;
        rv_log_warning("%s: %s", s->state.devices[device].name, reason);
    }
}

/* Has it a context of our own making there? Of other devices it knows nothing. */
static bool has_the_word(const struct rv_supervisor *s, const struct rv_session *session, int device)
{
    if (session->role == RV__ROLE__ROLE_LOADER)
        return rv_load_device(session->child) == device;
    return session->role == RV__ROLE__ROLE_DEVICE && rv_holder_of_child(s, session->child) == device;
}

void rv_device_on_event(struct rv_supervisor *s, struct rv_session *session, const Rv__DeviceEvent *event)
{
    int device = rv_devices_by_bytes(s, &event->uuid);
    char what[96], reason[256];

    if (device < 0)
        return; /* it is none of ours: nothing can follow from it */
    if (event->xid && session->role == RV__ROLE__ROLE_DEVICE) {
        on_xid(s, device, event->xid);
        return;
    }
    (void)snprintf(reason, sizeof(reason), "%.100s met error %d in %s", rv_session_describe(session), event->error,
                   rv_escape(what, sizeof(what), event->what, strlen(event->what)));
    if (has_the_word(s, session, device) && rv_device_error_is_fatal(event->error))
        rv_device_lose(s, device, reason);
    else if (!is_among(event->error, harmless_errors, sizeof(harmless_errors) / sizeof(harmless_errors[0])))
        rv_device_suspect(s, device, reason);
}

int rv_device_lost_init(struct rv_supervisor *s)
{
    s->devices->retest = event_new(s->base, -1, 0, on_retest, s);
    return s->devices->retest ? 0 : -ENOMEM;
}

void rv_device_lost_fini(struct rv_supervisor *s)
{
    if (s->devices->retest)
        event_free(s->devices->retest);
}
