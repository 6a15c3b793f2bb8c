/* The self-test's side of link.h: starts actors, tells them what to do, waits for an answer no longer than it should,
 * and gets rid of them. */
#ifndef RV_DEVICE_ACTORS_H
#define RV_DEVICE_ACTORS_H

#include <sys/types.h>

#include "link.h"

/* One step of an actor. A context may be the first on a device that is asleep: that takes seconds. */
#define RV_ANSWER_US (10u * 1000000u)
#define RV_CONTEXT_FACTOR 3u

struct rv_actor {
    pid_t pid; /* 0 = none */
    int pidfd, socket;
    bool opening; /* the answer to RV_STEP_OPEN is still to come */
    uint64_t answer_us;
    int signal; /* that it died of while it was asked for something; 0 = none */
};
#define RV_ACTOR_INIT             \
    {                             \
        .pidfd = -1, .socket = -1 \
    }

/*
 * Starts one; label is its last argument, for people. Unless uuid is NULL, it makes a context on that device; the
 * first step waits for that, so several start at the same time. answer_us: how long each step may take; opening and
 * finding RV_CONTEXT_FACTOR times that.
 */
int rv_actor_start(struct rv_actor *actor, const char *label, const uint8_t *uuid, uint64_t answer_us,
                   struct rv_error *err);

/*
 * One step. fd >= 0 goes along and stays the caller's; *ret_fd (may be NULL) is the caller's. Returns the answer's
 * result; with a negative one *err says what went wrong: of the call, that it hangs (-ETIMEDOUT; the actor is dead
 * then), or how the actor died (-ECHILD).
 */
int rv_actor_do(struct rv_actor *actor, const struct rv_call *call, int fd, struct rv_answer *ret_answer, int *ret_fd,
                struct rv_error *err);

/* SIGKILL; waits until the kernel has taken it away, or for a while if it is stuck there. Safe when there is none. */
void rv_actor_kill(struct rv_actor *actor);

static inline bool rv_actor_is_there(const struct rv_actor *actor)
{
    return actor->pid > 0;
}

#endif
