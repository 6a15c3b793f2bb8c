/* What submit, jobs, job, fetch and cancel share: asking the router, and a job in words and JSON. */
#ifndef RV_CLI_JOB_H
#define RV_CLI_JOB_H

#include <jansson.h>

#include "client.h"
#include "output.h"

#define RV_ROUTER_PATIENCE_US UINT64_C(20000000) /* a router that was killed is back within seconds */

/* The router may be killed and come back at any moment, and every request may be repeated: so we connect again. */
struct rv_router {
    struct rv_client client;
    char runtime_dir[RV_CLIENT_PATH_MAX];
    unsigned connections; /* made so far; a change says that it may be a new router */
};

/* Finds the runtime directory; connects with the first request. */
int rv_router_init(struct rv_router *router, const struct rv_args *args, struct rv_error *err);
void rv_router_fini(struct rv_router *router);

/*
 * Asks; while the supervisor lives and the router does not answer or is not ready, asks again, up to patience_us.
 * timeout_us is for one try. The answer's rpc_reply is a success that holds a body.
 */
int rv_router_ask(struct rv_router *router, Resvisor__V1__Request *request, uint64_t timeout_us, uint64_t patience_us,
                  struct rv_frame *ret_answer, struct rv_error *err);

/* The job in an answer; NULL with *err filled = the answer has none, and the frame is ended. */
const Resvisor__V1__Job *rv_answer_job(struct rv_frame *answer, struct rv_error *err);

bool rv_job_has_ended(const Resvisor__V1__Job *job);

/* 0 for DONE, QUEUED and RUNNING; else by the job's error. */
int rv_job_exit_code(const Resvisor__V1__Job *job);

json_t *rv_job_json(const Resvisor__V1__Job *job);

/* Some lines for people, to stdout. */
void rv_job_print(const Resvisor__V1__Job *job);

#endif
