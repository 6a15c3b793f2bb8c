/*
 * Faults on request: the parameter `fault` makes an executor misbehave in the middle of a job, so that what resvisor
 * promises about broken executors is tried with the executors that ship. docs/executors.md lists them.
 */
#ifndef RV_EXECUTOR_FAULT_H
#define RV_EXECUTOR_FAULT_H

#include <stdint.h>

struct rv_run;

enum rv_fault_kind {
    RV_FAULT_NONE,
    RV_FAULT_CRASH,
    RV_FAULT_ABORT,
    RV_FAULT_EXIT,
    RV_FAULT_HANG,
    RV_FAULT_HANG_QUIETLY,
    RV_FAULT_IGNORE_CANCEL,
    RV_FAULT_IGNORE_TERM,
    RV_FAULT_WRITE_WEIGHTS,
    RV_FAULT_FAIL,
    RV_FAULT_FORK_GRANDCHILD,
    RV_FAULT_SLOW,
    RV_FAULT_KINDS,
};

struct rv_fault {
    enum rv_fault_kind kind;
    uint32_t milliseconds; /* of RV_FAULT_SLOW, per step */
};

#define RV_FAULT_LIST                                                                                            \
    "crash, abort, exit, hang, hang-quietly, ignore-cancel, ignore-term, write-weights, fail, fork-grandchild, " \
    "slow:MS"

/* Reads a name of RV_FAULT_LIST. -EINVAL = no such fault, or a number of ms over one hour. */
int rv_fault_parse(const char *text, struct rv_fault *ret_fault);

/*
 * Called at the start of each denoising step: does what the job's fault says, once, at the second step (at the first,
 * if there is only one), `slow` at each. 0 = go on. Otherwise the job has failed, with err filled, or this never
 * returns.
 */
int rv_fault_step(struct rv_run *run, uint32_t step, uint32_t steps);

#endif
