/*
 * The worker side of libresvisor: what its files share. Nothing here is exported.
 *
 * Two kinds of threads: the service thread, which reads the control connection and the router's channel, and the
 * threads of the job. Results go to the router from whichever comes first; what the socket does not take is sent by the
 * service thread.
 */
#ifndef RV_LIB_WORKER_H
#define RV_LIB_WORKER_H

#include "internal.h"

#define RV_PROGRESS_SEND_US (50 * RV_MSEC) /* one JobProgress per so long */
#define RV_RESULTS_MAX 64u                 /* finished jobs kept until the router acknowledges them */
#define RV_RESULTS_BYTES_MAX (2ull << 30)  /* bytes of their outputs; the newest is kept whatever its size */
#define RV_ROUTER_WAIT_MS_FIRST 2u         /* first look whether the router took its descriptors; doubles … */
#define RV_ROUTER_WAIT_MS_LAST 250u        /* … up to this while it does not read */
#define RV_OUTPUT_NAME_MAX 255u
#define RV_CONTENT_TYPE_MAX 127u

struct rv_output {
    char name[RV_OUTPUT_NAME_MAX + 1];
    char content_type[RV_CONTENT_TYPE_MAX + 1];
    uint64_t size;
    int fd; /* sealed memfd */
};

struct rv_job {
    unsigned magic;
    struct rv_worker *worker;
    struct rv_frame frame; /* the JobStart that brought it; owns all texts and the payload */
    const Rv__JobStart *start;
    const Resvisor__V1__Submit *submit;
    uint64_t arrived_us;
    atomic_bool cancelled;
    atomic_uint_least64_t alive_us; /* last sign of life */

    uint64_t next_progress_us; /* these under the worker's lock */
    uint64_t load_us, read_bytes;
    struct rv_output *outputs[RV_OUTPUTS_MAX];
    unsigned output_count;
};

/* A finished job, packed: it is sent as often as a router asks for it, until one acknowledges it. */
struct rv_result {
    struct rv_result *next;
    char job_id[RV_NAME_MAX + 1];
    uint8_t *bytes;
    uint32_t length;
    int fds[RV_OUTPUTS_MAX];
    unsigned fd_count;
    uint64_t size;
    bool sent; /* on the present channel */
};

struct rv_worker {
    unsigned magic;
    unsigned fork_number;
    struct rv_connection *connection;
    char *id, *type;
    pthread_t thread;
    int event_fd; /* wakes the service thread */

    pthread_mutex_t lock; /* all below */
    pthread_cond_t changed;
    int router;              /* -1 = none */
    unsigned router_wait_ms; /* until the next look whether the router took its descriptors */
    struct rv_job *pending;  /* arrived, not yet fetched by rv_worker_next */
    struct rv_job *running;
    bool draining;             /* no more jobs are wanted */
    bool ended;                /* the control connection is over */
    bool left;                 /* rv_worker_next has said so */
    bool closing;              /* the service thread must end */
    struct rv_result *results; /* oldest first */
    unsigned result_count;
    uint64_t result_bytes;
    uint64_t results_dropped;
};

/* ---- channel.c: the router's channel; service thread, unless stated otherwise ---- */

/* A new channel takes the place of the old: first says what runs and what is unacknowledged. Takes over the socket. */
void rv_channel_replace(struct rv_worker *worker, int socket, const Rv__RouterChannel *message);

/* Reads what the router sent. */
void rv_channel_read(struct rv_worker *worker);

/* The job of this worker, fetched or not. Locked. */
struct rv_job *rv_worker_job(const struct rv_worker *worker);

/* ---- job.c ---- */

/* Takes over the frame on success. NULL = no memory. */
struct rv_job *rv_job_create(struct rv_worker *worker, struct rv_frame *frame);
void rv_job_destroy(struct rv_job *job);

/* ---- results.c; all locked ---- */

/* Packs the end of a job; the outputs' descriptors move into the result. code ERROR_OK = done. */
int rv_result_create(const struct rv_job *job, int code, const char *message, struct rv_result **ret_result);
void rv_result_destroy(struct rv_result *result);

/* Keeps it and tries to send it. The oldest go when there are too many. */
void rv_results_add(struct rv_worker *worker, struct rv_result *result);
struct rv_result *rv_results_find(const struct rv_worker *worker, const char *job_id);
void rv_results_forget(struct rv_worker *worker, const char *job_id);
void rv_results_fini(struct rv_worker *worker);
unsigned rv_results_unsent(const struct rv_worker *worker);

/* Sends what is unsent: 0 = all is sent or there is no channel; -EAGAIN, -EBUSY (see send_one) = try again later. A
 * dead channel is left to its reader. */
int rv_results_push(struct rv_worker *worker);

/* Wakes the service thread. Any thread. */
void rv_worker_wake(const struct rv_worker *worker);

#endif
