/*
 * Every fact that a successor of the supervisor would need, as plain data: catalogue, leases, children, the ledger of
 * dispatched jobs, counters. Handles of the running process (peers, timers, log buffers) live in the modules that use
 * them and point here. Loads under way are no such facts: a loader dies with its supervisor, and the load is done
 * again.
 *
 * Owned by the supervisor, one thread. Nothing here logs, waits or calls another module. Texts in fixed arrays are
 * NUL-terminated; descriptors are O_CLOEXEC and owned by the struct that holds them. Times: monotonic microseconds.
 */
#ifndef RV_STATE_H
#define RV_STATE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "error.h"
#include "memory.h"
#include "rv_limits.h"

#define RV_WORKER_ID_MAX (RV_NAME_MAX + 8)
#define RV_EXIT_TEXT_MAX 256
#define RV_LAST_EXIT_MAX 768 /* of a worker, with its job and its last words */

struct rv_lease;
struct rv_load;
struct rv_model;

/* ---- catalogue -------------------------------------------------------------------------------------------------- */

#define RV_HOST (-1)     /* in place of a device's number: the machine's own memory */
#define RV_ANYWHERE (-2) /* in look-ups: wherever it lies, the host first */

/* Which content of which file: a load of one identity gives one generation. Compared field by field. */
struct rv_file_identity {
    uint64_t device, inode, size;
    int64_t mtime_sec, mtime_nsec;
};

/* A loaded version of a model: the descriptors are the memory. */
struct rv_generation {
    TAILQ_ENTRY(rv_generation) link;
    struct rv_model *model;
    uint64_t number; /* counts from 1 per model */
    uint64_t holder; /* cuda-ipc: the holder's generation that its arenas are of */
    struct rv_file_identity identity;
    uint8_t header_digest[16];
    int index_fd;
    uint64_t index_size;
    uint32_t arena_count;
    struct rv_arena arenas[RV_ARENAS_MAX];
    int arena_fds[RV_ARENAS_MAX]; /* -1 for arenas without a descriptor */
    uint64_t bytes;               /* arenas and index */
    uint64_t tensors;
    uint32_t lease_count;
    uint64_t load_us;
    uint64_t read_bytes;
};
TAILQ_HEAD(rv_generation_list, rv_generation);

enum rv_model_state { RV_MODEL_ABSENT, RV_MODEL_LOADING, RV_MODEL_RESIDENT, RV_MODEL_FAILED };

struct rv_model {
    TAILQ_ENTRY(rv_model) link;
    char *name;   /* configured name, or the path */
    char *path;   /* as configured until the file was first found, then the real path */
    char *source; /* as configured: what is opened, since links on the way may be changed */
    char *format;
    int device; /* RV_HOST, or the number of a device: each place that a file lies in has an entry of its own */
    bool configured;
    bool pinned;
    struct rv_generation_list generations; /* newest first; only the first can be current */
    uint64_t generation_count;
    uint32_t loads;
    uint64_t read_bytes;
    uint64_t last_load_us;
    uint64_t last_use_us;

    struct rv_error failure; /* code 0 = the last load did not fail */
    struct rv_file_identity failed_identity;
    uint64_t retry_at_us;

    struct rv_load *load; /* under way; NULL = none. Its struct lives in pool/load.c */
};
TAILQ_HEAD(rv_model_list, rv_model);

/* The right of one connection to use one generation. */
struct rv_lease {
    TAILQ_ENTRY(rv_lease) link;     /* in its session */
    TAILQ_ENTRY(rv_lease) all_link; /* in rv_state.leases */
    uint64_t id;
    struct rv_generation *generation; /* NULL: it was taken away, since the device's memory is gone */
    int device;                       /* where that memory lies or lay: RV_HOST or a number */
    uint64_t revoked_us;              /* when it was taken away; 0 = it was not */
    bool told;                        /* that it was */
    pid_t pid;                        /* who holds it */
    uint64_t incarnation;             /* if that is a worker; 0 = a client */
};
TAILQ_HEAD(rv_lease_list, rv_lease);

/* ---- children --------------------------------------------------------------------------------------------------- */

enum rv_child_kind { RV_CHILD_WORKER, RV_CHILD_LOADER, RV_CHILD_ROUTER, RV_CHILD_TEMPLATE, RV_CHILD_DEVICE };

enum rv_worker_state {
    RV_WORKER_STOPPED,
    RV_WORKER_STARTING,
    RV_WORKER_READY,
    RV_WORKER_DRAINING,
    RV_WORKER_BACKOFF,
    RV_WORKER_FAILED,
    RV_WORKER_STATE_COUNT
};

const char *rv_worker_state_name(enum rv_worker_state state);
const char *rv_model_state_name(enum rv_model_state state);

/* A process of ours. pid 0 = none; the pid is ours until the keeper was told to reap it. */
struct rv_process {
    enum rv_child_kind kind;
    pid_t pid;
    int pidfd;            /* -1 = none */
    uint64_t incarnation; /* unique over the supervisor's life */
    uint64_t started_us;
};

/* When it died, for the restart policy: the last deaths, newest first. */
struct rv_deaths {
    uint64_t at_us[RV_DEATHS_MAX];
    uint32_t count;       /* entries used */
    uint32_t consecutive; /* since it last stayed ready for RV_STABLE_US */
};

/* Where a worker serves HTTP. The socket is kept over its restarts. */
struct rv_http_port {
    int fd;          /* listens; -1 = none */
    unsigned number; /* 0 = none yet; stays when the socket is given up */
};

#define RV_DETAIL_MAX 1024

/* One worker of a type. Its place is its own for the supervisor's life; its processes come and go. */
struct rv_worker_record {
    char id[RV_WORKER_ID_MAX + 8];
    char type[RV_NAME_MAX + 1];
    struct rv_process process;
    enum rv_worker_state state;
    uint32_t starts;
    struct rv_deaths deaths;
    uint64_t ready_us; /* when it became ready; 0 = not yet */
    char last_exit[RV_LAST_EXIT_MAX];
    char job[RV_NAME_MAX + 1];  /* what the router gave it */
    char detail[RV_DETAIL_MAX]; /* what it says of itself since it is ready; empty = it is not */
    struct rv_http_port port;   /* of a kind that serves HTTP */
    char start_way[256]; /* "forked from template 12", "started the long way: REASON"; empty = there is one way */
    bool start_again;    /* after draining */
};

/* A process that has imported what the workers of some types need, and from which they are forked. */
struct rv_template_record {
    char id[32];
    struct rv_process process;
    enum rv_worker_state state; /* DRAINING: it ends because its files have changed, and a new one follows */
    uint32_t starts;
    struct rv_deaths deaths;
    uint64_t ready_us; /* 0 = not yet */
    uint64_t forks;    /* workers that it made, all its processes together */
    char last_exit[2 * RV_EXIT_TEXT_MAX + 32];
    char detail[256]; /* what it said when it became ready */
};

struct rv_router_record {
    struct rv_process process;
    struct rv_deaths deaths;
    uint64_t ready_us, epoch;
};

/* ---- devices ----------------------------------------------------------------------------------------------------- */

enum rv_device_state {
    RV_DEVICE_UNTESTED,
    RV_DEVICE_TESTING,
    RV_DEVICE_READY,    /* backend is chosen */
    RV_DEVICE_UNUSABLE, /* reason says why */
    RV_DEVICE_LOST,     /* marked bad; only a new test can mend that */
    RV_DEVICE_STATE_COUNT
};

const char *rv_device_state_name(enum rv_device_state state);

#define RV_DEVICE_TESTS_MAX 32u
#define RV_DEVICE_ATTRIBUTES_MAX 32u

struct rv_device_test {
    uint32_t backend; /* enum rv_backend_id */
    char name[24];
    char result[12]; /* "ok", "failed", "skipped" */
    char detail[160];
    uint64_t bytes_per_second, duration_us;
    bool no_memory; /* it failed for want of it: that says nothing of the device */
};

struct rv_device_attribute {
    uint32_t number;
    char name[48];
    int32_t value;
};

/* Keeps the exports of backend cuda-ipc. Its end ends the memory, so its importers end with it. */
struct rv_holder_record {
    struct rv_process process;
    struct rv_deaths deaths;
    uint64_t generation; /* of the holder: counts its starts; an arena of an earlier one is gone */
};

/* A device. Its number is its place in rv_state.devices, for the supervisor's life. */
struct rv_device_record {
    char name[16]; /* "cuda:0" */
    uint8_t uuid[RV_DEVICE_UUID_SIZE];
    char product[128], driver[16], capability[16], pci[32];
    enum rv_device_state state;
    uint32_t backend; /* enum rv_backend_id, chosen; RV_BACKEND_MEMFD: its models lie in the machine's memory */
    char reason[512]; /* of the choice, or of the state */
    bool unified, pageable, cached;
    uint32_t granularity; /* bytes, cuda-vmm */
    uint64_t total_bytes, budget_bytes;
    struct rv_device_test tests[RV_DEVICE_TESTS_MAX];
    uint32_t test_count;
    struct rv_device_attribute attributes[RV_DEVICE_ATTRIBUTES_MAX];
    uint32_t attribute_count;
    uint64_t seen_us; /* when NVML last said the three below; 0 = never */
    uint64_t used_bytes, free_bytes, nvml_total_bytes;
    struct rv_holder_record holder;
};

/* ---- jobs that were given to a worker --------------------------------------------------------------------------- */

struct rv_ledger_entry {
    char job_id[RV_NAME_MAX + 1];
    char type[RV_NAME_MAX + 1];
    uint8_t digest[16];
    uint16_t attempts;
    bool ended;
    uint8_t outcome; /* if ended: error code, 0 = done */
};

struct rv_ledger {
    struct rv_ledger_entry *entries; /* ring of RV_JOB_LEDGER_MAX */
    uint32_t used, next;
};

/* ---- all of it -------------------------------------------------------------------------------------------------- */

struct rv_counters {
    uint64_t started_us;
    uint64_t next_incarnation, next_lease;
    uint64_t loads, failed_loads, read_bytes, disk_bytes;
    uint64_t attaches, warm_attaches, warm_bytes, saved_us, load_us;
    uint64_t worker_deaths, router_deaths;
    uint32_t clients, leases;
};

struct rv_state {
    char instance[33]; /* of this supervisor: 32 hexadecimal digits */
    struct rv_model_list models;
    uint32_t model_count;
    TAILQ_HEAD(, rv_lease) leases;    /* of all sessions, oldest first */
    struct rv_worker_record *workers; /* of all types, in the order of the configuration */
    uint32_t worker_count;
    struct rv_template_record *templates; /* one per group of types */
    uint32_t template_count;
    struct rv_device_record devices[RV_DEVICES_MAX];
    uint32_t device_count;
    char devices_reason[RV_ERROR_TEXT_MAX]; /* why there are none */
    bool devices_known;                     /* the first search has ended */
    struct rv_router_record router;
    struct rv_ledger ledger;
    struct rv_counters counters;
};

/* 0 or -ENOMEM. */
int rv_state_init(struct rv_state *state);
void rv_state_fini(struct rv_state *state);

/* Makes the places of `count` workers, empty and STOPPED; once. 0 or -ENOMEM. */
int rv_state_place_workers(struct rv_state *state, uint32_t count);

/* The same for templates. */
int rv_state_place_templates(struct rv_state *state, uint32_t count);

bool rv_identity_equal(const struct rv_file_identity *a, const struct rv_file_identity *b);

/* The entry of that name or file on that device; RV_ANYWHERE: any. NULL = none. */
struct rv_model *rv_model_by_name(struct rv_state *state, const char *name, int device);
struct rv_model *rv_model_by_path(struct rv_state *state, const char *path, int device);

/* Adds an entry (the texts are copied; path is the source too). NULL = no memory or RV_MODELS_MAX reached with nothing
 * to forget. */
struct rv_model *rv_model_add(struct rv_state *state, const char *name, const char *path, const char *format,
                              bool configured, int device);

/* Adds the entry of the same file on another device, beside the one that is there. NULL as above. */
struct rv_model *rv_model_place(struct rv_state *state, const struct rv_model *model, int device);

/* A configured model has an entry for the host, also if it lies on devices only: true = this is such a one, with
 * nothing to tell. */
bool rv_model_is_elsewhere(const struct rv_state *state, const struct rv_model *model);

/* Replaces the path. 0 or -ENOMEM. */
int rv_model_set_path(struct rv_model *model, const char *path);

/* The generation that serves new leases; NULL = none. */
struct rv_generation *rv_model_current(const struct rv_model *model);
enum rv_model_state rv_model_state_of(const struct rv_model *model);

/* "host", "cuda:0": for people. */
const char *rv_place_name(const struct rv_state *state, int device);

/* Bytes of memory of all generations of all models: on a device their arenas, on the host also the indexes of all. */
uint64_t rv_state_pool_bytes(const struct rv_state *state, int device);

/* Closes the descriptors and forgets the generation; it must have no leases. */
void rv_generation_destroy(struct rv_generation *generation);

/* Remembers what the router marked: adds or changes the entry of that id. The oldest is forgotten when full. */
void rv_ledger_mark(struct rv_ledger *ledger, const struct rv_ledger_entry *mark);

/* Adds a death and says how many lie within the window. */
uint32_t rv_deaths_add(struct rv_deaths *deaths, uint64_t now_us, uint64_t window_us);

/* For jitter. */
uint32_t rv_random32(void);

/* Delay before the next start: at once, then 1, 2, 4 … up to max seconds, +-20 % by `random`. */
uint64_t rv_backoff_us(uint32_t consecutive_deaths, uint64_t max_us, uint32_t random);

#endif
