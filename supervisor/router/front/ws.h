/*
 * The WebSocket of the front door, inside. A client has one socket here, and one of ours to each ready worker with its
 * own id (ComfyUI finds the receiver of an event by that id, and some of its frames name no prompt, so clients cannot
 * share one). Router only, one thread (the loop's).
 *
 *   ws.c           clients, and what is sent to all of them     ws_upstream.c  our sockets to workers
 *   ws_verdict.c   how prompts ended that no worker tells about  ws_link.c      one connection: framing, its end
 *   ws_handshake.c, ws_merge.c  pure functions (ws_parts.h)
 */
#ifndef RV_WS_H
#define RV_WS_H

#include "front.h"
#include "ws_link.h"
#include "ws_parts.h"

#define RV_WS_CLIENT_MESSAGE_MAX (4u * 1024 * 1024)  /* bytes of a client's message, as in ComfyUI */
#define RV_WS_WORKER_MESSAGE_MAX (64u * 1024 * 1024) /* of a worker's: pictures come this way */
#define RV_WS_UNSENT_HIGH (4u * 1024 * 1024) /* bytes that wait for a client: from then on its workers are not read */
#define RV_WS_UNSENT_TOTAL (256u * 1024 * 1024)  /* that wait for all clients: who would get more is dropped */
#define RV_WS_CHOKED_US (60 * UINT64_C(1000000)) /* by then it must be read: the workers wait with it */
#define RV_WS_UNSENT_WORKER (8u * 1024 * 1024)   /* that wait for a worker, of one client */
#define RV_WS_UNSENT_WORKERS (64u * 1024 * 1024) /* that wait for all workers, of all clients */
#define RV_WS_COUNTED_FROM (64u * 1024)          /* what a socket has less is not looked at for the totals */
#define RV_WS_FLAGS_MAX (64u * 1024)             /* of a feature_flags message that is kept for replaying */
#define RV_WS_UPSTREAMS_MAX 2048u                /* our sockets to workers */
#define RV_WS_PROMPTS_KEPT 32u                   /* per client: prompts whose start or end it was told */
#define RV_WS_VERDICTS_MAX 64u                   /* per client: prompts that failed, and nobody has told it yet */
#define RV_WS_VERDICT_US (2 * UINT64_C(1000000)) /* how long a worker that lives may take to tell of a prompt's end */
#define RV_WS_HOST_MAX 300u                      /* bytes of a client's Host field, which its workers get */
#define RV_WS_CONNECT_US (10 * UINT64_C(1000000))
#define RV_WS_LEAVE_US (10 * UINT64_C(1000000)) /* how long a worker may take to answer when nobody waits for that */
#define RV_WS_REST_US UINT64_C(1000000)         /* before a worker is tried again; doubles up to the next */
#define RV_WS_WARN_US (10 * UINT64_C(1000000))  /* between two lines in the log about sockets to workers */
#define RV_WS_REST_MAX_US (30 * UINT64_C(1000000))

struct MHD_UpgradeResponseHandle;

/* A prompt as the client knows it. */
struct rv_ws_prompt {
    char id[RV_WS_PROMPT_ID_MAX + 1], node[RV_WS_NODE_MAX + 1];
    bool ended;
};

struct rv_ws_verdict_entry {
    TAILQ_ENTRY(rv_ws_verdict_entry) link;
    char prompt_id[RV_WS_PROMPT_ID_MAX + 1], worker[RV_WORKER_NAME_MAX + 1];
    const char *type; /* static */
    char node[RV_WS_NODE_MAX + 1], node_type[RV_WS_NODE_MAX + 1];
    char *message;
    bool interrupted;
};

TAILQ_HEAD(rv_ws_verdict_list, rv_ws_verdict_entry);
TAILQ_HEAD(rv_ws_upstream_list, rv_ws_upstream);
TAILQ_HEAD(rv_ws_client_list, rv_ws_client);

struct rv_ws_client {
    TAILQ_ENTRY(rv_ws_client) link;
    struct rv_front_ws *ws;
    struct MHD_UpgradeResponseHandle *handle;
    struct rv_ws_link socket;
    char id[RV_WS_CLIENT_ID_MAX + 1];
    char *target, *host; /* for workers */
    bool superseded;     /* another socket came with the same id: this one gets no events, as in ComfyUI */
    bool choked;         /* its workers are not read */
    bool status_due;
    char *flags; /* its feature_flags, for each new worker */
    size_t flags_length;
    bool flags_answered;
    struct rv_ws_prompt prompts[RV_WS_PROMPTS_KEPT];
    unsigned next_prompt;
    struct rv_ws_verdict_list verdicts;
    unsigned verdict_count;
    struct event *verdict_timer, *choke_timer;
};

enum rv_ws_upstream_state {
    RV_WS_WAITING,    /* for the end of an older socket with the same id at the same worker */
    RV_WS_CONNECTING, /* nothing was sent */
    RV_WS_HANDSHAKE,
    RV_WS_OPEN,
    RV_WS_RESTING, /* it failed, and is tried again */
};

struct rv_ws_upstream {
    TAILQ_ENTRY(rv_ws_upstream) link;
    struct rv_front_ws *ws;
    struct rv_ws_client *client; /* NULL = it has left: only the end is waited for */
    char id[RV_WS_CLIENT_ID_MAX + 1];
    char worker[RV_WORKER_NAME_MAX + 1];
    uint64_t incarnation;
    enum rv_ws_upstream_state state;
    int fd;
    struct rv_ws_link socket;
    struct event *event; /* of the state: connected, readable, or a timer */
    char accept[RV_WS_ACCEPT_LENGTH + 1];
    char *head; /* of its answer, RV_WS_RESPONSE_MAX */
    size_t head_length;
    unsigned failures;
};

struct rv_front_ws {
    struct rv_front *front;
    struct rv_ws_client_list clients;
    struct rv_ws_upstream_list upstreams;
    unsigned client_count, upstream_count;
    bool stopping;
    uint64_t quiet_until; /* no line in the log before */
    struct event *status_event, *wake_event;
};

/* ---- ws.c ------------------------------------------------------------------------------------------------------- */

/* A message for a client. May drop it, in a later turn. */
void rv_ws_client_send(struct rv_ws_client *client, bool text, const void *bytes, size_t length);
void rv_ws_client_send_status(struct rv_ws_client *client, const char *sid);

/* Prompts that wait or run at all workers. */
uint64_t rv_ws_remaining(const struct rv_front_ws *ws);

/* ---- ws_upstream.c ---------------------------------------------------------------------------------------------- */

int rv_ws_upstreams_init(struct rv_front_ws *ws);
void rv_ws_upstreams_fini(struct rv_front_ws *ws);

/* Opens a socket to that worker for the client, as soon as none with the same id is left there. */
void rv_ws_upstream_add(struct rv_ws_client *client, const struct rv_worker_entry *worker);

/* The client is leaving, or gets no events any more: all its sockets to workers are closed, in good order. */
void rv_ws_upstreams_leave(struct rv_ws_client *client);
void rv_ws_upstreams_send(struct rv_ws_client *client, bool text, const uint8_t *bytes, size_t length);
void rv_ws_upstreams_pause(struct rv_ws_client *client, bool paused);

/* True = an open socket to a worker of that name: what it sent before its end will be read. */
bool rv_ws_upstreams_has(const struct rv_ws_client *client, const char *worker);
void rv_ws_upstreams_worker_gone(struct rv_front_ws *ws, const struct rv_worker_entry *worker);
void rv_ws_upstreams_destroy(struct rv_front_ws *ws);

/* ---- ws_verdict.c ----------------------------------------------------------------------------------------------- */

int rv_ws_verdicts_init(struct rv_ws_client *client);
void rv_ws_verdicts_fini(struct rv_ws_client *client);

/* An event about a prompt is on its way to the client. prompt_id "" in an end: all that it knows to be running. */
void rv_ws_verdicts_note(struct rv_ws_client *client, const struct rv_ws_event *event);

/* A worker's socket has ended: what it has not told by now it will not tell. */
void rv_ws_verdicts_worker_ended(struct rv_ws_client *client, const char *worker);

/* A prompt of that client ended badly. */
void rv_ws_verdicts_job(struct rv_ws_client *client, const struct rv_job_record *job);

#endif
