/*
 * Devices: what there is, which backend each one uses and why, and the children that touch them. The supervisor itself
 * never loads libcuda or NVML: resvisor-device does, in processes of its own (self-test, holder, watch).
 *
 *   devices.c         the table: from the self-test's report, cache and configuration to a choice with its reason
 *   device_test.c     the self-test's child, and the cache of its results by driver version and uuid
 *   device_holder.c   one holder per device with backend cuda-ipc: allocations, its death
 *   device_watch.c    NVML's numbers and Xids
 *   device_lost.c     a device that is marked bad
 *
 * Facts are in state.h (struct rv_device_record). One thread, the supervisor's.
 */
#ifndef RV_DEVICES_H
#define RV_DEVICES_H

#include <stdbool.h>
#include <stdint.h>

#include "control.pb-c.h"
#include "state.h"

/* Processes of resvisor-device that may be alive at once: self-test, watch, one holder for each device. */
#define RV_DEVICE_CHILDREN_MAX (2u + RV_DEVICES_MAX)

struct rv_child;
struct rv_session;
struct rv_supervisor;
struct rv_config_type;

int rv_devices_init(struct rv_supervisor *s);
void rv_devices_fini(struct rv_supervisor *s);

/* Starts the self-test (unless cuda is off). Loads onto devices wait until it has ended: rv_pool_devices_known. */
void rv_devices_start(struct rv_supervisor *s);
/* Resvisor stops: SIGKILL to self-test and watch; holders when nobody imports from them any more, or now. */
void rv_devices_stop(struct rv_supervisor *s, bool now);

/*
 * What an Attach, a type or an operator calls a device: "host", "cuda:0", "GPU-uuid". *ret_device is RV_HOST or a
 * number. A device with backend memfd gives RV_HOST in *ret_device: its models lie in the machine's memory; *ret_user
 * is its number for the reply. -EAGAIN = not known yet (the search goes on); NO_SUCH_DEVICE, DEVICE_LOST with reasons.
 */
int rv_devices_find(struct rv_supervisor *s, const char *name, int *ret_device, int *ret_user, struct rv_error *err);

/* The number of that name or uuid, whatever its state; -1 = there is none. */
int rv_devices_by_name(const struct rv_supervisor *s, const char *name);

/* Where a type's models lie: its `device`, with auto resolved ("host", or ComfyUI's --gpu-only device). */
const char *rv_devices_of_type(const struct rv_config_type *type);

/* Bytes that may still be placed there by budget, NVML or MemAvailable - cuda.reserve. UINT64_MAX = nothing limits it.
 * *ret_source says what decided, for messages. */
uint64_t rv_devices_allocatable(const struct rv_supervisor *s, int device, const char **ret_source);

/* For LoadStart and AttachReply. Texts belong to the record. */
void rv_devices_fill(const struct rv_supervisor *s, int device, Rv__Device *ret_message);

/* Our bytes on the device: arenas of all generations; promised: to loads. (pool/load.c) */
uint64_t rv_pool_device_bytes(const struct rv_supervisor *s, int device, uint64_t *ret_promised);

/* ---- the self-test's end, for pool/load.c and waiting attaches ---- */

/* pool: the first search has ended (also when there are none): what waited for devices goes on. */
void rv_pool_devices_known(struct rv_supervisor *s);

/* pool: everything on the device is gone: generations are destroyed, loads end with *err. Leases of clients are told
 * (LeaseRevoke) and their sessions cut off after cuda.revoke_timeout; workers are ended by rv_workers_device_lost. */
void rv_pool_device_gone(struct rv_supervisor *s, int device, const struct rv_error *err);

/* pool: does a client still have a lease that was taken away there? */
bool rv_pool_device_is_held(struct rv_supervisor *s, int device);

/* children/worker.c: workers that use the device: their jobs fail with *err, their processes end, and no new ones come
 * until it is back. */
void rv_workers_device_lost(struct rv_supervisor *s, int device, const struct rv_error *err);
/* Workers that have leases there: the same, but they start again. */
void rv_workers_memory_lost(struct rv_supervisor *s, int device, const struct rv_error *err);
/* The device can be used again: workers that ended with it start. */
void rv_workers_device_back(struct rv_supervisor *s, int device);

/* ---- holder ---- */

typedef void rv_holder_reply(struct rv_supervisor *s, void *context, const struct rv_arena *arena, uint64_t holder,
                             const struct rv_error *err);

/* Asks for an arena of backend cuda-ipc; starts the holder if there is none. The reply comes later, or never if
 * rv_holder_forget(context) came first (the arena is then freed). */
int rv_holder_allocate(struct rv_supervisor *s, int device, uint64_t size, rv_holder_reply *reply, void *context,
                       struct rv_error *err);
void rv_holder_forget(struct rv_supervisor *s, void *context);

/* No importer has it open any more. An arena of an earlier holder is gone already: nothing happens. */
void rv_holder_free(struct rv_supervisor *s, int device, uint64_t holder, uint64_t allocation);
/* A client has let go of what it was told to give back. */
void rv_holder_let_go(struct rv_supervisor *s, int device);

/* ---- from the children and clients ---- */

void rv_device_on_hello(struct rv_supervisor *s, struct rv_child *child);
/* Any frame of kind 91 to 98 of a resvisor-device. False = it has no right to say that: drop it. */
bool rv_device_on_frame(struct rv_supervisor *s, struct rv_child *child, const Rv__Frame *frame);
/* A loader, worker or client says that a device failed it. */
void rv_device_on_event(struct rv_supervisor *s, struct rv_session *session, const Rv__DeviceEvent *event);

/* The session is gone: it no longer waits for a self-test. */
void rv_devices_forget_session(struct rv_supervisor *s, struct rv_session *session);

/* `resvisor devices`, RPC and HTTP. */
void rv_device_request(struct rv_session *session, uint64_t id, const Resvisor__V1__DeviceRequest *request);

/* The rows of Status and DeviceList; arena is freed by the caller in one piece. NULL = no memory. */
Resvisor__V1__DeviceStatus **rv_devices_status(const struct rv_supervisor *s, size_t *ret_count, void **ret_arena);

#endif
