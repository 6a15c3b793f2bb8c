/* What the files about prompts know of each other: prompt.c, listing.c, queue.c, history.c, jobs_api.c. */
#ifndef RV_PROMPTS_H
#define RV_PROMPTS_H

#include "body.h"
#include "front.h"
#include "graph_route.h"
#include "shape.h"

#define RV_HISTORY_NAME "history.json"       /* the output that is a job's history; worker/python writes it */
#define RV_HISTORY_MAX (33ull * 1024 * 1024) /* bytes of it; a larger one is not shown */
#define RV_HISTORY_TYPE "application/json"

/* How a job is a prompt. Made when it comes as one, or when one that came by RPC is shown for the first time. */
struct rv_front_prompt {
    struct rv_span prompt, extra_data; /* in the job's payload */
    bool came_here;                    /* by POST /prompt */
    bool has_client;
    char client_id[RV_CLIENT_ID_MAX + 1];
    char *outputs, *node_errors; /* JSON, of its validation; NULL = it was not validated */
};

struct rv_front_posting;
TAILQ_HEAD(rv_front_postings, rv_front_posting);

struct rv_front_prompts {
    struct rv_route_type types[RV_TYPES_MAX]; /* of kind comfyui */
    struct rv_type *type_of[RV_TYPES_MAX];
    uint32_t type_count;
    struct rv_front_postings postings; /* they wait for a worker's judgement */
    uint64_t taken, refused, unvalidated;
};

/* ---- prompt.c --------------------------------------------------------------------------------------------------- */

/* What an error is called where ComfyUI names an exception: the same in the history and in events. */
const char *rv_prompt_failure_type(int code);

/* A job of a comfyui type, whoever sent it. */
bool rv_prompt_is_one(const struct rv_job_record *job);

/* Fills in what is known; false = no memory. Its text is NULL once the job has ended. */
bool rv_prompt_shape(struct rv_job_record *job, struct rv_shape_prompt *ret_prompt);

/* A body that is JSON and an object; else the answer says so. */
bool rv_prompt_read_object(struct rv_http_request *request, struct rv_span *ret_object);

/* 503 while the router has just started, and does not know yet what the workers run. */
bool rv_prompt_is_settled(struct rv_http_request *request);

/* ---- history.c -------------------------------------------------------------------------------------------------- */

/* It has ended, and has a history that nobody has deleted. */
bool rv_history_has(const struct rv_job_record *job);

/* Its entry, as its worker or the router wrote it: *ret_text is to be freed. -ENOENT, -EINVAL, -ENOMEM or -EIO. */
int rv_history_read(const struct rv_job_record *job, char **ret_text, struct rv_span *ret_entry);

/* The entry with what the router knows of the job. */
int rv_history_write(struct rv_shape *shape, const struct rv_job_record *job);

/* ---- listing.c -------------------------------------------------------------------------------------------------- */

/*
 * A list of jobs as an answer: what is long is made piece by piece as the client reads it, so that it costs the memory
 * of one job. A job that has gone in the meantime is left out.
 */
struct rv_listing;

/* Writes one job; `first` = nothing was written before it. Returns false if it wrote nothing. */
typedef bool rv_listing_write(struct rv_shape *shape, struct rv_job_record *job, unsigned section, bool first);

/* between: the text before section 1, if there are two. NULL = no memory. */
struct rv_listing *rv_listing_create(struct rv_router *router, rv_listing_write *write, const char *head,
                                     const char *between, const char *tail);
int rv_listing_add(struct rv_listing *listing, const struct rv_job_record *job, unsigned section);
void rv_listing_destroy(struct rv_listing *listing);

/* Takes it over. */
void rv_listing_answer(struct rv_http_request *request, struct rv_listing *listing);

#endif
