/*
 * The pool: which models are in memory, who has them, and how they get there.
 *
 * catalog.c finds the model of a request and says which file it is; place.c says on which devices it is wanted; load.c
 * runs loaders, one per model and place however many wait; lease.c gives and takes leases; policy.c decides who may
 * have memory; park.c keeps requests until the devices are known; revoke.c clears a device that is gone. One thread,
 * the supervisor's. Model files are never read here, arenas never mapped.
 *
 * A place is RV_HOST or a device's number. A file may lie in several: each has an entry of its own in the catalogue.
 */
#ifndef RV_POOL_H
#define RV_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "control/control.h"
#include "state.h"

struct rv_supervisor;

int rv_pool_init(struct rv_supervisor *s);
void rv_pool_fini(struct rv_supervisor *s);

/* Starts loading what the configuration says to preload. */
void rv_pool_preload(struct rv_supervisor *s);

/* Is one of these still being loaded? */
bool rv_pool_is_preloading(const struct rv_supervisor *s);

/* ---- catalog.c ---- */

/*
 * Finds or makes the catalogue entry of a configured name or an absolute path on a device, and opens its file by
 * O_PATH. On success *ret_fd is the caller's, or -1 when the resident generation serves: the file is unchanged, or
 * gone. Errors: NO_SUCH_MODEL, NOT_PERMITTED, FILE, LIMIT.
 */
int rv_catalog_find(struct rv_supervisor *s, const char *name_or_path, int device, struct rv_model **ret_model,
                    int *ret_fd, struct rv_file_identity *ret_identity, struct rv_error *err);

/* The same for a client's own descriptor, which must be a readable regular file; it stays the caller's. */
int rv_catalog_find_by_fd(struct rv_supervisor *s, int fd, int device, struct rv_model **ret_model,
                          struct rv_file_identity *ret_identity, struct rv_error *err);

/* ---- lease.c ---- */

/* Handles Attach: answers at once, or when the load is done or the deadline passed. Takes the frame's descriptor. */
void rv_lease_attach(struct rv_session *session, uint64_t id, const Rv__Attach *request, int file_fd);
void rv_lease_detach(struct rv_session *session, uint64_t lease_id);
void rv_lease_release_all(struct rv_session *session);

/* Answers an attach whose generation is there; for load.c. user: the device that will read it, which has memory of its
 * own or reads the host's; RV_HOST = none. */
struct rv_wait;
void rv_lease_grant(struct rv_session *session, uint64_t id, struct rv_generation *generation, int user, bool waited,
                    uint64_t load_us);

/* A client's deadline in microseconds, within reason. */
uint64_t rv_lease_deadline_us(uint64_t ms);

/* For AttachReply and LoadAdmit; points into the arena. */
void rv_lease_fill_arena(const struct rv_arena *arena, Rv__Arena *ret_message);

/* Gives the memory of a generation without leases back, to the kernel or the device's holder. */
void rv_generation_free(struct rv_supervisor *s, struct rv_generation *generation);

/* The same for a superseded generation, if it has no leases. */
void rv_generation_release_if_unused(struct rv_supervisor *s, struct rv_generation *generation);

/* Who holds leases on a generation, for messages: "image/0 (pid 12), 2 others". */
void rv_lease_holders(struct rv_supervisor *s, const struct rv_generation *generation, char *buffer, uint64_t size);

/* ---- load.c ---- */

enum rv_wait_kind { RV_WAIT_ATTACH, RV_WAIT_MODEL };

struct rv_wait_options {
    struct rv_session *session; /* NULL = nobody waits (preload) */
    uint64_t id;
    enum rv_wait_kind kind;
    int user; /* RV_WAIT_ATTACH: as in rv_lease_grant */
    bool progress;
    uint64_t deadline_us; /* relative; 0 = none */
};

/*
 * Joins the load of that model, or starts one of file_fd (read or O_PATH descriptor; taken over, also on failure). The
 * waiter is answered when it ends. Errors: what the last load failed with (until its retry time), MODEL_CHANGED while
 * another content of the file is being loaded, LIMIT, NO_MEMORY.
 */
int rv_load_join(struct rv_supervisor *s, struct rv_model *model, int file_fd, const struct rv_file_identity *identity,
                 const struct rv_wait_options *wait, struct rv_error *err);

/* The session is gone: it no longer waits. The loads go on. */
void rv_load_forget_session(struct rv_supervisor *s, struct rv_session *session);

/* The session's model request `id` no longer waits: it has been answered. */
void rv_load_forget_request(struct rv_supervisor *s, struct rv_session *session, uint64_t id);

/* Ends the load of a model, if any, with that error. */
void rv_load_cancel(struct rv_supervisor *s, struct rv_model *model, const struct rv_error *err);
void rv_load_cancel_all(struct rv_supervisor *s);

/* Bytes granted to loads that are under way: of a device, or of the host (with the indexes of all). */
uint64_t rv_load_admitted_bytes(const struct rv_supervisor *s, int device);
void rv_load_progress_of(const struct rv_model *model, uint64_t *ret_done, uint64_t *ret_total);
bool rv_load_session_waits(const struct rv_supervisor *s, const struct rv_session *session);

/* Is there a load onto that device: queued, under way, or ended with its loader still there? */
bool rv_load_is_at(const struct rv_supervisor *s, int device);

/* From the loader. */
struct rv_child;
int rv_load_device(const struct rv_child *loader); /* that it fills; RV_HOST = none */
void rv_load_on_hello(struct rv_supervisor *s, struct rv_child *child);
void rv_load_on_plan(struct rv_supervisor *s, struct rv_child *child, const Rv__LoadPlan *plan);
void rv_load_on_progress(struct rv_supervisor *s, struct rv_child *child, const Rv__LoadProgress *progress);
void rv_load_on_done(struct rv_supervisor *s, struct rv_child *child, struct rv_frame *frame);
void rv_load_on_error(struct rv_supervisor *s, struct rv_child *child, const Resvisor__V1__Error *error);

/* ---- model_requests.c: load, unload, pin, unpin, show ---- */
void rv_pool_model_request(struct rv_session *session, uint64_t id, const Resvisor__V1__ModelRequest *request);

/* ---- policy.c ---- */

/*
 * May so many bytes more be allocated where this model lies, and for its index on the host? 0, or -ENOSPC with the
 * reason and what could be done about it.
 */
int rv_policy_admit(const struct rv_supervisor *s, const struct rv_model *model, uint64_t arenas, uint64_t index,
                    struct rv_error *err);

#endif
