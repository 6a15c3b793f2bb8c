/*
 * What the files of libresvisor share. Nothing here is exported.
 *
 * Locks. Each connection has one, each worker has one. A connection's lock may be held when a worker's is taken, never
 * the other way round. No lock is held while a user's function runs, while memory is mapped, or while anything is
 * waited for; except that of device.c, under which the driver opens and closes, and no other lock is taken.
 */
#ifndef RV_LIB_INTERNAL_H
#define RV_LIB_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "frame.h"
#include "index.h"
#include "memory.h"
#include "resvisor.h"
#include "rv_cuda.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define RV_CONNECTION_MAGIC 0x636f6e6eu
#define RV_LEASE_MAGIC 0x6c656173u
#define RV_WORKER_MAGIC 0x776f726bu
#define RV_JOB_MAGIC 0x6a6f6221u

#define RV_PROGRESS_CALL_US (250 * RV_MSEC) /* a progress function runs at least so often, so that it can give up */
#define RV_REVOKED_MAX 64u                  /* revoked leases that are not attached yet */
#define RV_SEND_US RV_SEC                   /* a supervisor that takes no frame for so long is as good as gone */

/* ---- failures ---- */

/* Copies error to the caller's *err (may be NULL) and returns r. */
int rv_failure_from(struct rv_failure *err, const struct rv_error *error, int r);

/* Now + timeout; negative = never (UINT64_MAX). */
uint64_t rv_deadline_us(int timeout_ms);

/* ---- forks ---- */

/* A number that is another one in a child after fork. The first call starts the watch. */
unsigned rv_fork_number(void);
/* True in a child of the process that took `number`. No system call. */
bool rv_fork_happened(unsigned number);

/* ---- connections ---- */

/* One question that waits for its answer. Lies on the asker's stack, in the connection's list. */
struct rv_question {
    struct rv_question *next;
    uint64_t id;
    struct rv_frame answer; /* message NULL = not yet */
    bool progressed;        /* the two below are new */
    uint64_t bytes_done, bytes_total;
};

/* What a worker wants to know of its control connection. Called with the connection's lock held. */
struct rv_connection_owner {
    void (*on_frame)(void *context, struct rv_frame *frame); /* what is no answer; may take descriptors */
    void (*on_alive)(void *context);                         /* a load that somebody waits for goes on */
};

struct rv_connection {
    unsigned magic;
    unsigned fork_number;
    int socket;                              /* open until the last reference goes: deleters of tensors may use it */
    atomic_uint refs;                        /* the caller's, and one per lease's memory */
    const struct rv_connection_owner *owner; /* NULL = a plain client; constant once others know the connection */
    void *owner_context;

    pthread_mutex_t lock; /* all below */
    pthread_cond_t changed;
    bool reading;  /* one thread reads at a time; the others wait for `changed` */
    bool serviced; /* a service thread reads: askers never do */
    int dead;      /* negative errno once the connection is over */
    const char *dead_why;
    uint64_t next_id;
    struct rv_question *questions;
    struct rv_lease *leases;
    uint64_t revoked[RV_REVOKED_MAX]; /* ids of leases that were revoked before their attach had ended; the oldest are
                                         written over */
    unsigned revoked_count;
};

struct rv_wait {
    uint64_t until_us;
    bool (*progress)(uint64_t bytes_done, uint64_t bytes_total, void *context);
    void *context;
};

/* Takes over a connected socket (closed on failure too) and says Hello. */
int rv_connection_start(int socket, Rv__Role role, const char *instance, const struct rv_connection_owner *owner,
                        void *owner_context, uint64_t until_us, struct rv_connection **ret_connection,
                        struct rv_error *err);

/* 0, or why the connection cannot be used: -EINVAL, -EPERM after fork. */
int rv_connection_usable(const struct rv_connection *connection, struct rv_error *err);

/*
 * Sends a question and waits for its answer: 0 = *ret_answer is the caller's, and it is no Error. An Error becomes the
 * errno that fits it. Given up (time, progress function): the late answer is taken care of.
 */
int rv_connection_ask(struct rv_connection *connection, Rv__Frame *question, const int *fds, unsigned fd_count,
                      const struct rv_wait *wait, struct rv_frame *ret_answer, struct rv_error *err);

/* Sends a frame that wants no answer. */
int rv_connection_tell(struct rv_connection *connection, Rv__Frame *frame);

/* For the service thread: reads one frame that is there. 1 = go on, 0 = nothing there, negative = dead. */
int rv_connection_read(struct rv_connection *connection);

/* Marks it as over and wakes all who wait. */
void rv_connection_kill(struct rv_connection *connection, int r, const char *why);

void rv_connection_unref(struct rv_connection *connection);

/* Tells the supervisor that a lease is not used (any more). */
void rv_connection_detach(struct rv_connection *connection, uint64_t lease_id);

/* Tells the supervisor that a device failed with a CUresult. Does not wait. */
void rv_connection_report(struct rv_connection *connection, const uint8_t uuid[RV_DEVICE_UUID_SIZE], int error,
                          const char *what);

/* Reads what has come, unless another thread does that. */
void rv_connection_look(struct rv_connection *connection);

/* ---- devices (device.c) ---- */

struct rv_gpu;    /* one device as this process sees it, with its primary context; shared by all leases there */
struct rv_import; /* one arena, mapped there once; shared by the leases of one generation */

/* What an arena is known by in this process. A generation's number alone is not enough: it is its model's. */
struct rv_import_key {
    struct rv_arena arena;
    uint64_t generation;
    uint32_t number;        /* of the arena in its model */
    uint64_t index_hash[2]; /* of the whole index, which has the digest of each tensor */
};

/* Finds the device by uuid; name is for messages. The first call of a process loads the driver. -ENODEV = this process
 * does not see it, or has no driver; -EOPNOTSUPP = built without CUDA; -EPERM = after fork. */
int rv_gpu_acquire(const uint8_t uuid[RV_DEVICE_UUID_SIZE], const char *name, struct rv_gpu **ret_gpu,
                   struct rv_error *err);
void rv_gpu_release(struct rv_gpu *gpu); /* NULL is fine */
int32_t rv_gpu_ordinal(const struct rv_gpu *gpu);

/* The driver's last CUresult on this thread. */
int rv_gpu_last_error(void);

/* Maps an arena, or takes one more reference on what is mapped already. fd stays the caller's. */
int rv_gpu_import(struct rv_gpu *gpu, const struct rv_import_key *key, int fd, struct rv_import **ret_import,
                  uint64_t *ret_address, struct rv_error *err);
void rv_gpu_unimport(struct rv_gpu *gpu, struct rv_import *import); /* NULL is fine */

int rv_gpu_read(struct rv_gpu *gpu, void *host, uint64_t address, uint64_t length, struct rv_error *err);

/* ---- a lease's memory (memory.c): lives as long as the lease or a DLPack tensor of it ---- */

struct rv_mapped_arena {
    struct rv_arena arena;
    int fd;        /* host: kept, since rv_lease_verify maps the pool's own memory; -1 once a device has imported it */
    void *address; /* a device pointer, if import is not NULL */
    struct rv_import *import; /* NULL = in the machine's memory */
};

struct rv_lease_memory {
    atomic_uint refs;
    unsigned fork_number;
    struct rv_connection *connection; /* NULL = the lease was never linked */
    uint64_t lease_id;
    const struct rv_backend *backend; /* of all arenas; NULL = there are none */
    bool has_device;
    char device[RV_NAME_MAX + 1]; /* resvisor's name */
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    struct rv_gpu *gpu; /* NULL = host */
    uint64_t bytes;
    struct rv_mapped_arena arenas[RV_ARENAS_MAX];
    uint32_t arena_count;
};

/* Checks an AttachReply and takes the arenas' descriptors out of the frame. Nothing is mapped yet. */
int rv_lease_memory_create(struct rv_frame *reply, struct rv_lease_memory **ret_memory, struct rv_error *err);

/* Maps all arenas where they lie. *mapping AUTO becomes what it is. */
int rv_lease_memory_map(struct rv_lease_memory *memory, const struct rv_index *index, uint64_t generation,
                        enum rv_mapping *mapping, struct rv_error *err);

void rv_lease_memory_ref(struct rv_lease_memory *memory);

/* The last one unmaps, and gives the lease back. Any thread; in a child after fork it frees what is the child's. */
void rv_lease_memory_unref(struct rv_lease_memory *memory);

/* Copies from its device and waits for it. -EIO, -EPERM. A device that seems to be lost is reported. */
int rv_lease_memory_read(const struct rv_lease_memory *memory, void *host, uint64_t address, uint64_t length,
                         struct rv_error *err);

/* True = its bytes are not the CPU's to read. */
bool rv_lease_memory_is_remote(const struct rv_lease_memory *memory);

/* ---- leases ---- */

struct rv_lease {
    unsigned magic;
    unsigned fork_number;
    struct rv_lease *next, **link; /* in the connection's list */
    char *model;
    uint64_t id, generation;
    enum rv_mapping mapping;
    bool waited;
    uint64_t load_us, read_bytes;
    atomic_bool revoked;
    struct rv_index index;
    struct rv_lease_memory *memory;
};

/* 0, -EINVAL, or -EPERM after fork. */
int rv_lease_usable(const struct rv_lease *lease);

/* ---- workers ---- */

/* rv_attach on a worker's connection: what the running job waited for. */
void rv_worker_count_load(void *worker, uint64_t load_us, uint64_t read_bytes);

#endif
