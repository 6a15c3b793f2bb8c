/*
 * The same question to several workers, and one answer to the client. For merge.c and owner.c.
 *
 * A gathering belongs to its request: it ends when `done` has answered, or when the client leaves.
 */
#ifndef RV_FRONT_GATHER_H
#define RV_FRONT_GATHER_H

#include "front.h"

#define RV_FRONT_PARTS_MAX 64u /* workers that are asked at once */

struct rv_front_gather;

struct rv_front_part {
    struct rv_front_gather *gather;
    struct rv_front_call *call; /* NULL = it is over, or could not begin */
    struct rv_type *type;
    char worker[RV_WORKER_NAME_MAX + 1];
    uint64_t incarnation;
    uint64_t limit_us; /* how long it may take */
    int r;
    unsigned status;
    char *text; /* of its answer; NULL = none */
    size_t length;
};

struct rv_front_gather {
    struct rv_front *front;
    struct rv_http_request *request;
    struct rv_front_part parts[RV_FRONT_PARTS_MAX];
    unsigned count, left;
    /* After each answer; true = no more is needed. NULL = all are. */
    bool (*enough)(const struct rv_front_part *part);
    void (*done)(struct rv_front_gather *gather); /* answers, or passes on */
};

/* NULL = no memory; the request is answered then. */
struct rv_front_gather *rv_front_gather_create(struct rv_http_request *request,
                                               void (*done)(struct rv_front_gather *gather));

/* One worker of each type, the primary first. */
void rv_front_gather_types(struct rv_front_gather *gather);

/* Each ready worker, the primary first. */
void rv_front_gather_all(struct rv_front_gather *gather);

/* How long they may take: the first, and each of the others. */
void rv_front_gather_limit(struct rv_front_gather *gather, uint64_t first_us, uint64_t other_us);

/* Asks them. With nobody to ask the request is answered "not ready". */
void rv_front_gather_start(struct rv_front_gather *gather, const struct rv_front_call_options *options);

#endif
