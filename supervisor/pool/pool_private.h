/* What the files of supervisor/pool/ that let requests wait share among themselves. */
#ifndef RV_POOL_PRIVATE_H
#define RV_POOL_PRIVATE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "pool.h"

#define RV_POOL_WAITS_MAX 4096u /* requests of all sessions that wait for a load, or for the devices */

struct event;
struct rv_log;
struct rv_parked;
struct rv_config;

TAILQ_HEAD(rv_load_list, rv_load);
TAILQ_HEAD(rv_parked_list, rv_parked);

struct rv_pool {
    struct rv_load_list loads;
    uint32_t load_count, running, wait_count;
    struct rv_log **logs; /* one per loader that may run at once */
    bool *log_used;
    struct rv_parked_list parked;
    uint32_t parked_count;
    bool preload_waits;         /* some models to preload go to devices that are not known yet */
    struct event *revoke_timer; /* the next client that keeps what it was told to give back */
    struct event *tell_timer;   /* clients have not read yet what they are told */
    char revoke_reasons[RV_DEVICES_MAX][RV_ERROR_TEXT_MAX]; /* what they are told, by device */
};

/* The session may wait for one request more, or LIMIT. */
int rv_pool_may_wait(const struct rv_supervisor *s, const struct rv_session *session, struct rv_error *err);

/* Is a model being loaded that the configuration wants preloaded? */
bool rv_load_is_preload(const struct rv_supervisor *s);

/* revoke.c: cuda.revoke_timeout has passed for some client. The context is the supervisor. */
void rv_pool_on_revoke_timer(int fd, short what, void *context);
/* A client may have read by now. */
void rv_pool_on_tell_timer(int fd, short what, void *context);

/* ---- park.c: requests that wait until the devices are known ---- */

/*
 * Keeps a copy of the request and answers it when rv_pool_devices_known is called, or its deadline has passed. Takes fd
 * over on success. LIMIT, NO_MEMORY, BAD_REQUEST.
 */
int rv_park_attach(struct rv_session *session, uint64_t id, const Rv__Attach *request, int fd, struct rv_error *err);
int rv_park_model_request(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request,
                          struct rv_error *err);
void rv_park_resume_all(struct rv_supervisor *s);
void rv_park_forget_session(struct rv_supervisor *s, const struct rv_session *session);
/* All are answered with that error. */
void rv_park_refuse_all(struct rv_supervisor *s, const struct rv_error *err);

/* ---- place.c ---- */

struct rv_places {
    int device[RV_DEVICES_MAX + 1];
    unsigned count;
};

/*
 * Where the types that list this model want it; the host if none does. -EAGAIN = devices are not known yet; else what
 * rv_devices_find says.
 */
int rv_places_of(struct rv_supervisor *s, const char *name, struct rv_places *ret_places, struct rv_error *err);

/* Does a type that lists this model, or nobody, want it on the host? */
bool rv_places_host_is_wanted(const struct rv_config *config, const char *name);

/* " on cuda:0", empty for the host: for messages. */
const char *rv_place_text(const struct rv_supervisor *s, int device, char buffer[32]);

#endif
