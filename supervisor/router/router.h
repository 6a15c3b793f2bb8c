/*
 * The router: queues, jobs, results, RPC. One process, one event loop, one thread (nanomsg runs one of its own).
 *
 * It reads no file and has no state that outlives it: the supervisor tells it everything by RouterSetup, and after a
 * restart the workers tell it what they run. One struct rv_router holds all; each part of it belongs to one file:
 *
 *   main.c     start, the supervisor's frames, end          jobs.c     job table, queues, idempotency
 *   workers.c  worker channels, dispatch, death             results.c  outputs kept for fetching
 *   rpc.c      the table of requests, and replies           parked.c   replies that wait for something
 *   nano.c     nanomsg sockets                              local.c    the command line's socket
 *   events.c   PUB events and their ring                    sockets.c  who may have a socket path
 *   ask.c      requests that the supervisor answers         submit.c   checking and keeping a Submit
 *   http/      the HTTP front: the same requests again        front/     ComfyUI's own address, on http/
 */
#ifndef RV_ROUTER_H
#define RV_ROUTER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "control.pb-c.h"
#include "error.h"
#include "frame.h"
#include "peer.h"
#include "rv_limits.h"

#define RV_WORKER_NAME_MAX 80u        /* "type/number" */
#define RV_PROGRESS_TEXT_MAX 128u     /* longer texts are cut */
#define RV_OUTPUT_NAME_MAX 128u       /* file name, and MIME type too */
#define RV_DIGEST_SIZE 16u            /* XXH3-128, canonical */
#define RV_SETTLE_US (5 * 1000000ull) /* how long a new router waits for the workers' reports */
#define RV_PARKED_MAX 1024u           /* requests whose reply waits for something */
#define RV_WAIT_MAX_MS 3600000ull     /* Wait.timeout_ms, Submit.wait_ms */
#define RV_OUTCOMES_MAX 64u           /* more than there are error codes */

#define RV_CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

struct event;
struct event_base;
struct rv_front;
struct rv_front_prompt;
struct rv_http;
struct rv_http_request;
struct rv_job_record;
struct rv_worker_entry;
struct rv_local_peer;
struct rv_parked;
struct rv_router;

TAILQ_HEAD(rv_job_list, rv_job_record);
TAILQ_HEAD(rv_worker_list, rv_worker_entry);
TAILQ_HEAD(rv_parked_list, rv_parked);
TAILQ_HEAD(rv_local_list, rv_local_peer);

struct rv_type {
    char name[RV_NAME_MAX + 1];
    uint32_t queue_limit;
    uint64_t job_timeout_us, cancel_timeout_us; /* 0 = no job timeout */
    char first_model[RV_NAME_MAX + 1];          /* "" = the type has none */
    bool is_comfyui, is_primary;
    unsigned accepts; /* graph_route.h */
    const char *const *files;
    uint32_t file_count;
    bool failed;
    char detail[RV_ERROR_TEXT_MAX / 2]; /* why it failed */
    struct rv_job_list queue;           /* highest priority first, oldest first inside */
    uint32_t queued, running;
    uint64_t outcomes[RV_OUTCOMES_MAX]; /* jobs that ended, by error code; 0 = done */
    uint64_t warm_runs, cold_runs;      /* of those that are done: nothing, or something, was read for them */
};

struct rv_output {
    char name[RV_OUTPUT_NAME_MAX + 1], content_type[RV_OUTPUT_NAME_MAX + 1];
    uint64_t size;
    int fd; /* sealed memfd; -1 = dropped */
};

struct rv_job_record {
    TAILQ_ENTRY(rv_job_record) all_link, queue_link, ended_link, kept_link;
    struct rv_job_record *hash_next;
    char id[RV_NAME_MAX + 1];
    struct rv_type *type; /* NULL = its type is not configured any more */
    char type_name[RV_NAME_MAX + 1], model[RV_NAME_MAX + 1];
    Resvisor__V1__JobState state;
    bool pending;       /* of the ledger; no worker has said what became of it */
    bool marked_ended;  /* the supervisor's ledger knows that it ended */
    int marked_outcome; /* with that: its error code, 0 = done */
    bool recalled;      /* its end is known from the ledger only */
    bool retry;         /* may run once more if its worker dies */
    bool cancelled;     /* a client asked for its end */
    bool overdue;       /* it ran longer than job_timeout */
    bool kept;          /* in router->kept: its result takes room here or in a worker */
    bool told;          /* a client has been told of its end */
    bool has_digest;
    uint8_t digest[RV_DIGEST_SIZE];
    int32_t priority;
    uint32_t attempts;
    double number;                                      /* order among equal priorities: the lower one is first */
    bool hidden;                                        /* a client has deleted it from the history */
    uint8_t *submit;                                    /* packed, for the worker; NULL once it has ended */
    uint32_t submit_length, payload_at, payload_length; /* the payload inside it */
    struct rv_worker_entry *worker;                     /* runs it */
    struct rv_worker_entry *holder;                     /* keeps its result until JobAck */
    char worker_name[RV_WORKER_NAME_MAX + 1];
    int error_code;
    char *error_message, *error_remedy; /* NULL = the table's */
    uint64_t progress_done, progress_total;
    char progress_text[RV_PROGRESS_TEXT_MAX + 1];
    uint64_t queued_us, started_us, ended_us; /* monotonic */
    uint64_t wait_us, run_us, load_us, read_bytes, submitted_ms;
    uint64_t event_us; /* last event */
    bool event_due;    /* progress that no event has told yet */
    struct rv_output *outputs;
    uint32_t output_count;
    uint64_t output_bytes;
    struct event *timer; /* of a running job: its timeout, then the cancel timeout */
    struct rv_parked_list waiters;
    struct rv_front_prompt *prompt; /* of front/: how it came as a prompt; NULL = it did not */
};

enum rv_worker_state {
    RV_WORKER_SILENT,    /* has a channel, has not reported */
    RV_WORKER_REPORTING, /* its unacknowledged results are arriving */
    RV_WORKER_READY,
    RV_WORKER_CUT_OFF, /* its channel is gone; WorkerGone follows */
};

struct rv_worker_entry {
    TAILQ_ENTRY(rv_worker_entry) link;
    struct rv_router *router;
    char name[RV_WORKER_NAME_MAX + 1];
    struct rv_type *type;
    uint64_t incarnation;
    uint16_t http_port; /* on loopback; 0 = it serves no HTTP */
    enum rv_worker_state state;
    uint32_t results_due; /* in REPORTING */
    bool draining;
    bool held; /* its job is marked, and JobStart waits until the mark has left this process */
    struct rv_peer *peer;
    struct rv_job_record *job;
    char foreign_job[RV_NAME_MAX + 1]; /* it runs a job whose end a client has been told already; "" = none */
    struct event *timer;               /* cut off, and no WorkerGone yet */
};

/* Who asked, and where the reply goes. Moved, never copied: it owns `control`. */
struct rv_asker {
    uint64_t request_id;
    bool local;                   /* this machine's own: nothing limits a reply's size, and descriptors can be passed */
    struct rv_http_request *http; /* with local: it came by HTTP, not from a peer */
    bool tcp;                     /* must show the token */
    int socket;                   /* nanomsg */
    void *control;                /* nanomsg: the way back; nn_freemsg */
    struct rv_local_peer *peer;   /* local */
    uint64_t frame_id;            /* local */
};

struct rv_local_peer {
    TAILQ_ENTRY(rv_local_peer) link;
    struct rv_router *router;
    struct rv_peer *peer;
    struct event *hello_timer;
    bool greeted, is_operator;
    uint32_t parked;
};

/* A reply that waits: for the end of a job, or for the supervisor. */
struct rv_parked {
    TAILQ_ENTRY(rv_parked) link, job_link;
    struct rv_router *router;
    struct rv_asker asker;
    struct rv_job_record *job; /* NULL = waits for the supervisor */
    uint64_t ask_id;           /* 0 = for the next status that is asked for */
    struct event *timer;
};

/* A bound socket file: what must be there for us to remove it at the end. */
struct rv_socket_file {
    char path[RV_SOCKET_PATH_MAX + 32];
    dev_t dev;
    ino_t ino;
    bool bound;
};

#define RV_EVENTS_KEPT 1024u

struct rv_event_slot {
    uint8_t *bytes;
    uint32_t length;
};

struct rv_router {
    struct event_base *base;
    struct rv_peer *supervisor;
    struct rv_frame setup_frame; /* owns the texts of setup */
    const Rv__RouterSetup *setup;
    bool open;     /* all its sockets are there */
    bool stopping; /* no new jobs */
    int exit_code;

    struct rv_type types[RV_TYPES_MAX];
    unsigned type_count;

    struct rv_job_record **buckets; /* bucket_count, a power of two */
    uint32_t bucket_count, job_count, jobs_limit;
    uint64_t hash_seed, submit_bytes;
    uint64_t next_number;
    struct rv_job_list all;   /* oldest first */
    struct rv_job_list ended; /* oldest end first */
    struct rv_job_list kept;  /* results, oldest first */
    uint64_t kept_bytes;
    uint32_t kept_count, kept_limit;
    struct event *kept_timer;

    struct rv_worker_list workers;
    bool settling;       /* not all workers have reported */
    bool *expected_done; /* one for each of setup->workers */
    struct event *settle_timer, *held_timer;

    struct rv_parked_list parked;
    uint32_t parked_count;
    uint64_t next_ask;
    uint64_t status_ask; /* under way; 0 = none */

    int rep[2], pub; /* nanomsg: ipc and tcp; -1 = off */
    struct event *rep_events[2];
    struct rv_socket_file rpc_file, events_file, local_file;

    int listener;
    struct event *listen_event, *listen_pause;
    struct rv_local_list locals;
    uint32_t local_count;

    struct rv_event_slot events[RV_EVENTS_KEPT]; /* sequence number s is in slot s % RV_EVENTS_KEPT */
    uint64_t event_sequence;
    struct event *progress_timer;

    uint64_t log_ask; /* the request for logs that is under way; 0 = none */
    uint64_t rpc_requests, rpc_refusals;
    struct rv_http *http;   /* NULL = off */
    struct rv_front *front; /* NULL = off, or no type is of kind comfyui */
};

/* ---- main.c ----------------------------------------------------------------------------------------------------- */

/* Once, when the sockets are open and all workers have reported: until then jobs are refused. */
void rv_router_say_ready(struct rv_router *router);

/* ---- jobs.c ----------------------------------------------------------------------------------------------------- */

int rv_jobs_init(struct rv_router *router);
void rv_jobs_fini(struct rv_router *router);
struct rv_type *rv_types_find(struct rv_router *router, const char *name);
struct rv_job_record *rv_jobs_find(struct rv_router *router, const char *id);

/* Makes an empty record in the table; old ended ones make room. NULL with err filled. */
struct rv_job_record *rv_jobs_add(struct rv_router *router, const char *id, const char *type, struct rv_error *err);
void rv_jobs_remove(struct rv_router *router, struct rv_job_record *job);

/* Puts it into its type's queue by priority and number; first = before all that are not more important. */
void rv_jobs_enqueue(struct rv_router *router, struct rv_job_record *job, bool first);
void rv_jobs_dequeue(struct rv_job_record *job);
bool rv_jobs_has_ended(const struct rv_job_record *job);

/* Ends a job: leaves queue and worker, tells the ledger, waiters and subscribers. err: code 0 = done. */
void rv_jobs_end(struct rv_router *router, struct rv_job_record *job, const struct rv_error *err);

/* Tells the supervisor's ledger how the job stands. */
void rv_jobs_mark(struct rv_router *router, struct rv_job_record *job, bool ended);

/* A queued job ends at once; a running one is asked to, and its worker ends if it does not. */
void rv_jobs_cancel(struct rv_router *router, struct rv_job_record *job);

/* Resvisor is stopping: queued jobs will not run, and those who wait for them are told. */
void rv_jobs_end_queued(struct rv_router *router);

/* Starts or replaces the timer of a running job; 0 = none. */
void rv_jobs_arm(struct rv_router *router, struct rv_job_record *job, uint64_t us);

/* A Job message that points into the record and into itself: do not copy, do not keep. */
struct rv_job_view {
    Resvisor__V1__Job job;
    Resvisor__V1__Error error;
    Resvisor__V1__Output outputs[RV_OUTPUTS_MAX], *output_list[RV_OUTPUTS_MAX];
};
void rv_jobs_view(const struct rv_job_record *job, struct rv_job_view *ret_view);

/* ---- submit.c --------------------------------------------------------------------------------------------------- */

/* The job's id is well formed; else err. */
int rv_submit_check_id(const char *id, struct rv_error *err);

/* How a job came, if not by RPC. */
struct rv_submit_options {
    uint32_t payload_max;                                    /* bytes */
    bool front;                                              /* before its equals */
    bool has_number;                                         /* else one is minted */
    double number;                                           /* of equal priorities the lower number is first */
    void (*added)(struct rv_job_record *job, void *context); /* it is new, and in no queue yet; may be NULL */
    void *context;
};

/*
 * Checks a Submit and queues it, or finds the job that it repeats. 0 and *ret_job, or err; *ret_retry_ms may be set.
 * options: NULL = by RPC. *ret_job may have ended already.
 */
int rv_submit_accept(struct rv_router *router, const Resvisor__V1__Submit *submit,
                     const struct rv_submit_options *options, struct rv_job_record **ret_job, struct rv_error *err,
                     uint64_t *ret_retry_ms);

/* A new job of that type would be taken now. */
int rv_submit_check_type(struct rv_router *router, const char *type, struct rv_error *err, uint64_t *ret_retry_ms);

/* ---- results.c -------------------------------------------------------------------------------------------------- */

int rv_results_init(struct rv_router *router);
void rv_results_fini(struct rv_router *router);

/* Checks a result's outputs and takes their descriptors into the record. -EPROTO = the worker broke the contract. */
int rv_results_take(struct rv_router *router, struct rv_job_record *job, struct rv_frame *frame, struct rv_error *err);

/* Gives a job without outputs one of the router's own: a sealed memfd, taken over. ended_us must be set. */
int rv_results_add(struct rv_router *router, struct rv_job_record *job, const char *name, const char *content_type,
                   int fd, uint64_t size);

/* From now on the job's result counts against the limits; `holder` (may be NULL) gets a JobAck in time. */
void rv_results_keep(struct rv_router *router, struct rv_job_record *job, struct rv_worker_entry *holder);

/* Closes the outputs and lets the worker forget. */
void rv_results_drop(struct rv_router *router, struct rv_job_record *job);

/* A client has been told how the job ended: its worker may forget it, unless outputs can still be fetched. Nothing for
 * a job that goes on. */
void rv_results_told(struct rv_router *router, struct rv_job_record *job);

/* ---- workers.c -------------------------------------------------------------------------------------------------- */

int rv_workers_init(struct rv_router *router);
void rv_workers_fini(struct rv_router *router);
void rv_workers_channel(struct rv_router *router, struct rv_frame *frame);
void rv_workers_gone(struct rv_router *router, const Rv__WorkerGone *gone);
void rv_workers_drain(struct rv_router *router, const Rv__WorkerDrain *drain);
void rv_workers_dispatch(struct rv_router *router, struct rv_type *type);
void rv_workers_kill(struct rv_worker_entry *worker, const char *reason);
void rv_workers_send_cancel(struct rv_worker_entry *worker, const char *job_id);
void rv_workers_send_ack(struct rv_worker_entry *worker, const char *job_id);

/* ---- ledger.c: what a new router learns ------------------------------------------------------------------------- */

int rv_ledger_init(struct rv_router *router);
void rv_ledger_fini(struct rv_router *router);

/* That worker has said all it knows, or is gone. The last one ends the settling. */
void rv_ledger_heard(struct rv_router *router, const char *worker);

/* A reported job, made if the ledger did not have it. NULL = it is another job of that id, or its end was told. */
struct rv_job_record *rv_ledger_adopt(struct rv_router *router, struct rv_worker_entry *worker, const char *job_id,
                                      ProtobufCBinaryData digest);

/* ---- parked.c --------------------------------------------------------------------------------------------------- */

/* Takes the asker over. timeout_ms counts for job only. -EBUSY with err = too many wait already. */
int rv_parked_add(struct rv_router *router, struct rv_asker *asker, struct rv_job_record *job, uint64_t timeout_ms,
                  uint64_t *ret_ask_id, struct rv_error *err);
/* The first that waits for that answer of the supervisor; NULL = none. */
struct rv_parked *rv_parked_find(struct rv_router *router, uint64_t ask_id);

/* Takes the asker out and ends the rest. */
void rv_parked_release(struct rv_parked *parked, struct rv_asker *ret_asker);
void rv_parked_free(struct rv_parked *parked);
void rv_parked_job_ended(struct rv_router *router, struct rv_job_record *job);
void rv_parked_peer_gone(struct rv_router *router, struct rv_local_peer *peer);
void rv_parked_http_gone(struct rv_router *router, const struct rv_http_request *request);

/* ---- ask.c ------------------------------------------------------------------------------------------------------ */

/* Sends a request on to the supervisor and parks the asker. However many ask, few requests are under way at a time. */
int rv_ask_status(struct rv_router *router, struct rv_asker *asker, struct rv_error *err);
int rv_ask_device(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__DeviceRequest *request,
                  struct rv_error *err);
int rv_ask_model(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__ModelRequest *request,
                 struct rv_error *err);

/* By HTTP only. Answered by a Reply without a body; of logs, the lines come to rv_http_log_lines before. */
int rv_ask_restart(struct rv_router *router, struct rv_asker *asker, const char *type, struct rv_error *err);
int rv_ask_logs(struct rv_router *router, struct rv_asker *asker, const char *type, struct rv_error *err);

/* An answer of the supervisor: Status, ModelStatus, LogLines, Error or Done. */
void rv_ask_answered(struct rv_router *router, Rv__Frame *message);
void rv_ask_log_lines(struct rv_router *router, const Rv__Frame *message);

/* ---- rpc.c ------------------------------------------------------------------------------------------------------ */

/* Handles one request and answers it now or later; takes the asker over. */
void rv_rpc_request(struct rv_router *router, struct rv_asker *asker, const Resvisor__V1__Request *request);

/* Sends a reply (version and id are filled in) and ends the asker. fd: -1, or for a local asker. */
void rv_rpc_reply(struct rv_router *router, struct rv_asker *asker, Resvisor__V1__Reply *reply, int fd);
void rv_rpc_reply_error(struct rv_router *router, struct rv_asker *asker, const struct rv_error *err,
                        uint64_t retry_after_ms);
void rv_rpc_reply_job(struct rv_router *router, struct rv_asker *asker, struct rv_job_record *job);

/* ---- nano.c ----------------------------------------------------------------------------------------------------- */

int rv_nano_open(struct rv_router *router, struct rv_error *err);
void rv_nano_close(struct rv_router *router);
void rv_nano_publish(struct rv_router *router, const uint8_t *bytes, uint32_t length);
void rv_nano_reply(struct rv_asker *asker, const Resvisor__V1__Reply *reply, size_t size);
bool rv_nano_same(const struct rv_asker *a, const struct rv_asker *b);
void rv_asker_fini(struct rv_asker *asker);

/* ---- local.c ---------------------------------------------------------------------------------------------------- */

int rv_local_open(struct rv_router *router, struct rv_error *err);
void rv_local_close(struct rv_router *router);

/* ---- http/server.c ---------------------------------------------------------------------------------------------- */

/* Nothing is opened when http_listen is empty. */
int rv_http_open(struct rv_router *router, struct rv_error *err);
void rv_http_close(struct rv_router *router);

/* The answer to a request; fd (-1 = none) is the whole output that a Fetch asked for, and stays the caller's. */
void rv_http_reply(struct rv_http_request *request, const Resvisor__V1__Reply *reply, int fd);
void rv_http_log_lines(struct rv_http_request *request, const uint8_t *text, size_t length);

/* There is a new event in the ring. */
void rv_http_event(struct rv_router *router);

/* ---- events.c --------------------------------------------------------------------------------------------------- */

int rv_events_init(struct rv_router *router);
void rv_events_fini(struct rv_router *router);
void rv_events_job(struct rv_router *router, struct rv_job_record *job);
void rv_events_progress(struct rv_router *router, struct rv_job_record *job);
uint64_t rv_events_oldest(const struct rv_router *router);

/* ---- sockets.c -------------------------------------------------------------------------------------------------- */

/*
 * Makes sure that nothing is at `path`: only a socket of our own user that nobody listens at is removed. Anything else
 * stays and is an error.
 */
int rv_socket_claim(const char *path, struct rv_error *err);

/* Sets owner and mode of what was just bound, and remembers it. gid -1 = nobody but the owner. */
int rv_socket_adopt(struct rv_socket_file *file, const char *path, int gid, struct rv_error *err);
void rv_socket_release(struct rv_socket_file *file);

#endif
