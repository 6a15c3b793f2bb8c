/*
 * Requests to workers: libcurl's multi interface in the router's loop. For proxy.c and call.c.
 *
 * A transfer is one request. libcurl calls back for bytes while it works; what follows from them (an answer to a
 * client, the end of the transfer) must not be done from within, so a transfer is marked by rv_front_touch, and its
 * `advance` is called when libcurl has returned. There it may be ended, and its memory freed.
 */
#ifndef RV_FRONT_UPSTREAM_H
#define RV_FRONT_UPSTREAM_H

#include <curl/curl.h>

#include "front.h"

#define RV_FRONT_TARGET_MAX (RV_HTTP_URI_MAX + 1u)

struct rv_front_transfer {
    TAILQ_ENTRY(rv_front_transfer) link, touched_link;
    struct rv_front *front;
    const struct rv_worker_entry *worker; /* only compared: it may be gone */
    CURL *easy;
    struct curl_slist *fields;
    char error[CURL_ERROR_SIZE];
    uint64_t moved_us; /* when a byte went either way, or when it last was not the worker that was waited for */
    uint64_t limit_us; /* as long may the worker be silent; with whole: as long may all of it take */
    bool whole;
    bool touched, running;
    bool done; /* with result */
    bool timed_out;
    CURLcode result;
    bool (*waits_for_client)(const struct rv_front_transfer *transfer); /* then the worker is not to blame. NULL = no */
    void (*advance)(struct rv_front_transfer *transfer);
};

TAILQ_HEAD(rv_front_transfer_list, rv_front_transfer);

/* A handle for a request to that worker: options that all have. -ENOMEM. */
int rv_front_transfer_init(struct rv_front_transfer *transfer, struct rv_front *front,
                           const struct rv_worker_entry *worker);

/* "Name: value" is copied; it is sent instead of what libcurl would send under that name. */
int rv_front_transfer_field(struct rv_front_transfer *transfer, const char *name, size_t name_length, const char *value,
                            size_t value_length);

/* Sends it. What comes of it at once is told (`advance`) before this returns. */
int rv_front_transfer_start(struct rv_front_transfer *transfer);

/* The same, in the loop's next turn: nothing is told before. */
int rv_front_transfer_queue(struct rv_front_transfer *transfer);
void rv_front_transfer_fini(struct rv_front_transfer *transfer);

void rv_front_touch(struct rv_front_transfer *transfer);

/* Calls `advance` of those that are touched. */
void rv_front_settle(struct rv_front *front);

/* What a failed transfer is called: a negative errno. */
int rv_front_transfer_errno(const struct rv_front_transfer *transfer);

#endif
