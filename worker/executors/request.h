/*
 * The parameters of a job: each executor lists what it takes, everything else is an error that names what is allowed.
 */
#ifndef RV_EXECUTOR_REQUEST_H
#define RV_EXECUTOR_REQUEST_H

#include "fault.h"
#include "resvisor-executor.h"

enum rv_param_id {
    RV_PARAM_SEED,
    RV_PARAM_STEPS,
    RV_PARAM_WIDTH,
    RV_PARAM_HEIGHT,
    RV_PARAM_FRAMES,
    RV_PARAM_FPS,
    RV_PARAM_SECONDS,
    RV_PARAM_IDS,
};

/* A whole number from least to most, a multiple of `multiple` (1 = any). */
struct rv_param_rule {
    enum rv_param_id id;
    const char *name;
    uint64_t least, most, multiple, standard;
};

#define RV_PARAM_RULES_COMMON                     \
    {RV_PARAM_SEED, "seed", 0, UINT64_MAX, 1, 0}, \
    {                                             \
        RV_PARAM_STEPS, "steps", 1, 100, 1, 4     \
    }

struct rv_request {
    const char *prompt; /* the job's */
    struct rv_fault fault;
    uint64_t values[RV_PARAM_IDS];
};

/* -EINVAL with err filled (ERROR_BAD_REQUEST): unknown parameter, no number, out of range. */
int rv_request_read(const struct rv_job *job, const struct rv_param_rule *rules, unsigned rule_count,
                    struct rv_failure *err, struct rv_request *ret_request);

#endif
