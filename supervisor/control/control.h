/*
 * Sessions: every connection of the supervisor, accepted ones and those of its children, and the table that says which
 * role may send which frame and who handles it (requests.c).
 *
 * What a peer sends costs at most that peer. A session ends when its connection does; its leases, its waiting requests
 * and its log subscription end with it. One thread.
 */
#ifndef RV_CONTROL_H
#define RV_CONTROL_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "frame.h"
#include "peer.h"
#include "state.h"

struct event;
struct rv_child;
struct rv_supervisor;

#define RV_HELLO_TIMEOUT_US (10 * RV_SEC) /* an accepted connection that says nothing is dropped */
#define RV_SESSION_LEASES_MAX 1024u
#define RV_SESSION_WAITS_MAX 64u /* unanswered requests of one session */

struct rv_session {
    TAILQ_ENTRY(rv_session) link;
    struct rv_supervisor *supervisor;
    struct rv_peer *peer;
    struct rv_child *child; /* NULL = an accepted client */
    Rv__Role role;          /* what it may be; decided by us, not by it */
    pid_t pid;
    uid_t uid;
    bool is_operator; /* owner or root: may use operator requests */
    bool greeted;     /* it said Hello */
    char name[RV_NAME_MAX];
    struct event *hello_timer;
    struct rv_lease_list leases;
    uint32_t lease_count, wait_count;
};
TAILQ_HEAD(rv_session_list, rv_session);

/* Opens the listening socket. 0, or a negative errno that was logged. */
int rv_control_init(struct rv_supervisor *s);
void rv_control_fini(struct rv_supervisor *s);

/* A session for a child's connection; takes over the socket, also on failure. NULL = no memory. */
struct rv_session *rv_session_create(struct rv_supervisor *s, int socket, Rv__Role role, struct rv_child *child);

/* Ends it: leases, waits and subscriptions are gone, the connection is closed. NULL is fine. */
void rv_session_destroy(struct rv_session *session);

/* Who it is, for messages: "image/0 (pid 12)". Static buffer, until the next call. */
const char *rv_session_describe(const struct rv_session *session);

/* Sends a frame; a session that does not read is dropped soon. */
void rv_session_send(struct rv_session *session, const Rv__Frame *frame, const int *fds, unsigned fd_count);
void rv_session_progress(struct rv_session *session, const Rv__Frame *frame);
void rv_session_reply(struct rv_session *session, uint64_t id, const struct rv_error *err); /* NULL or code 0 = Done */

struct rv_session_list *rv_control_sessions(struct rv_supervisor *s);

/* requests.c: the frame is handled, or the session is dropped for it. */
void rv_request_dispatch(struct rv_session *session, struct rv_frame *frame);

/* status.c: answers a StatusRequest, and fills one ModelStatus that points into the model. */
void rv_status_send(struct rv_session *session, uint64_t id);
void rv_status_send_model(struct rv_session *session, uint64_t id, const struct rv_model *model);
/* The same of a device that the model has no entry for. */
void rv_status_send_absent_model(struct rv_session *session, uint64_t id, const struct rv_model *model, int device);
void rv_status_fill_model(const struct rv_state *state, const struct rv_model *model,
                          Resvisor__V1__ModelStatus *ret_status, Resvisor__V1__Error *ret_error);

#endif
