/* What worker.c and worker_device.c share: a worker's place, of which worker.c is the owner. */
#ifndef RV_WORKER_PRIVATE_H
#define RV_WORKER_PRIVATE_H

#include "children_private.h"

struct rv_worker {
    struct rv_child child; /* first: on_exit finds the worker by it */
    struct rv_supervisor *supervisor;
    const struct rv_config_type *type;
    const struct rv_worker_kind *kind;
    unsigned number;                 /* among those of its type */
    struct rv_worker_record *record; /* in the state */
    struct event *timer;             /* what it means depends on the state: see timers[] */
    int turn_fd;                     /* its process waits at the other end for its turn to warm up; -1 = it does not */
    bool has_turn;                   /* it warms up */
    unsigned stop_step;              /* how many of the kind's steps were made; RV_WORKER_DRAINING */
    uint64_t stop_us;                /* how long it was given so far */

    uint64_t ping_sequence, ping_sent_us, tick_us;
    bool ping_unanswered;
    unsigned empty_pongs;

    bool waits;         /* for its template; there is no process yet */
    bool renewed;       /* in this start its template was made anew once already */
    char long_way[192]; /* why the next start does without a template; empty = it may use one */

    int lost_code;  /* it is ended since its device or what lay there is gone; 0 = it is not */
    bool no_device; /* FAILED until its device is back */
};

/* worker_device.c: can the device that its type's models are to lie on not be used? *err says why. Not known yet = it
 * can: the worker's attach waits. */
bool rv_worker_lacks_device(const struct rv_worker *w, struct rv_error *err);

/* worker.c: what it waited for is there. */
void rv_worker_start_again(struct rv_worker *w);

#endif
