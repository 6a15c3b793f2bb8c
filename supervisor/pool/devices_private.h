/* What the files of supervisor/pool/device*.c share among themselves. */
#ifndef RV_DEVICES_PRIVATE_H
#define RV_DEVICES_PRIVATE_H

#include "children/children.h"
#include "devices.h"

struct event;
struct rv_device_search;
struct rv_device_watch;
struct rv_holder;

#define RV_DEVICE_PROCESSES_MAX 64u /* of one device that are shown */

struct rv_device_process {
    pid_t pid;
    uint64_t bytes;
};

/* What is not a fact that a successor would need. */
struct rv_device_extra {
    struct rv_device_process processes[RV_DEVICE_PROCESSES_MAX]; /* by NVML */
    uint32_t process_count;
    uint64_t retested_us; /* when it was last tested for a suspicion; 0 = never */
    uint64_t lost_us;     /* when somebody last said that it is gone; 0 = never */
    uint32_t xid;         /* the last one that was logged, */
    uint32_t xid_lines;   /* of so many in the time that began */
    uint64_t xid_us;      /* then; 0 = none yet */
    char suspicion[256];  /* who says that it failed, and what failed */
    bool suspected;       /* it is tested, or is to be, while it is in use: only a failure has consequences */
};

/* The running side of all devices; their facts are in the state. */
struct rv_devices {
    struct rv_supervisor *supervisor;
    struct rv_device_extra extras[RV_DEVICES_MAX];
    struct rv_device_search *search; /* device_test.c */
    struct rv_device_watch *watch;   /* device_watch.c */
    struct rv_holder *holders;       /* device_holder.c: RV_DEVICES_MAX, by the device's number */
    struct event *retest;            /* devices under suspicion whose last test was a moment ago */
};

/* ---- devices.c ---- */

/* Starts resvisor-device. `name` is for messages. 0 or a negative errno with err. */
int rv_device_spawn(struct rv_supervisor *s, struct rv_child *child, const char *name, struct rv_error *err);
void rv_device_send(struct rv_child *child, Rv__Frame *frame);

/* The device of that uuid; -1 = none, or no uuid. */
int rv_devices_by_uuid(const struct rv_supervisor *s, const uint8_t *uuid);
int rv_devices_by_bytes(const struct rv_supervisor *s, const ProtobufCBinaryData *uuid);

/* What the configuration says of it: budget, and enum rv_backend_id; RV_BACKEND_NONE = auto. */
uint32_t rv_device_configured(const struct rv_supervisor *s, const struct rv_device_record *device,
                              uint64_t *ret_budget);

/* Does it hold models, or is one being loaded there? */
bool rv_device_in_use(const struct rv_supervisor *s, int device);

/* ---- device_test.c ---- */

int rv_device_search_init(struct rv_supervisor *s);
void rv_device_search_fini(struct rv_supervisor *s);
void rv_device_search_stop(struct rv_supervisor *s);

/* Tests one device, or all (-1), now or when the test that runs has ended. One that is in use stays so meanwhile. */
void rv_device_search_start(struct rv_supervisor *s, int device);
bool rv_device_search_runs(const struct rv_supervisor *s);
bool rv_device_search_is(const struct rv_supervisor *s, const struct rv_child *child);
void rv_device_search_on_hello(struct rv_supervisor *s);
bool rv_device_search_on_frame(struct rv_supervisor *s, const Rv__Frame *frame);

/* Answers that request with the list of devices when all tests that were asked for have ended. */
int rv_device_search_wait(struct rv_supervisor *s, struct rv_session *session, uint64_t id, int device,
                          struct rv_error *err);
void rv_device_send_list(struct rv_session *session, uint64_t id, int only); /* -1 = all */

/* ---- device_watch.c ---- */

int rv_device_watch_init(struct rv_supervisor *s);
void rv_device_watch_fini(struct rv_supervisor *s);
void rv_device_watch_start(struct rv_supervisor *s); /* unless it runs, or there is nothing to watch */
void rv_device_watch_stop(struct rv_supervisor *s);
bool rv_device_watch_is(const struct rv_supervisor *s, const struct rv_child *child);
void rv_device_watch_on_hello(struct rv_supervisor *s);
bool rv_device_watch_on_frame(struct rv_supervisor *s, const Rv__Frame *frame);

/* Are NVML's numbers of the device fresh enough to be used? Never on unified memory. */
bool rv_device_watch_knows(const struct rv_device_record *device);

/* ---- device_holder.c ---- */

int rv_holders_init(struct rv_supervisor *s);
void rv_holders_fini(struct rv_supervisor *s);
void rv_holders_stop(struct rv_supervisor *s, bool now);
int rv_holder_of_child(const struct rv_supervisor *s, const struct rv_child *child); /* device; -1 = none */
void rv_holder_on_hello(struct rv_supervisor *s, int device);
bool rv_holder_on_frame(struct rv_supervisor *s, int device, const Rv__Frame *frame);

/* The device is lost: the holder is killed, who waits is told *err. */
void rv_holder_drop(struct rv_supervisor *s, int device, const struct rv_error *err);

/* ---- device_lost.c ---- */

/* Marks it LOST with that reason, and draws the consequences. A device that is lost already stays as it is. */
void rv_device_lose(struct rv_supervisor *s, int device, const char *reason);

/* What such an Xid means for the device. */
struct rv_xid {
    uint32_t number;
    bool fatal;
    const char *what;
};
const struct rv_xid *rv_xid_find(uint32_t number); /* NULL = not in the table: said, and nothing more */

/* Tests it again while it is in use, now or soon; `suspicion` says why. */
void rv_device_suspect(struct rv_supervisor *s, int device, const char *suspicion);

int rv_device_lost_init(struct rv_supervisor *s);
void rv_device_lost_fini(struct rv_supervisor *s);

/* An error of a call whose context was fresh: does it mean that the device is gone? */
bool rv_device_error_is_fatal(int error);

#endif
