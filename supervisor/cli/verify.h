/*
 * What the parts of `verify` share. verify.c reads the command line and says what happens when; verify_job.c runs one
 * workflow as a job; verify_plain.c runs all of them on a plain ComfyUI, by a helper in Python; verify_show.c compares,
 * prints and judges.
 */
#ifndef RV_CLI_VERIFY_H
#define RV_CLI_VERIFY_H

#include "graph_file.h"
#include "job.h"

#define RV_VERIFY_FILES_MAX RV_ARGS_POSITIONAL_MAX
#define RV_VERIFY_RUNS_MAX 64u

struct rv_verify_file {
    const char *path;
    char *text;
    size_t length;
    const char *wanted; /* --type; NULL = the graph decides */
    uint32_t type;      /* number in types */
};

struct rv_verify_run {
    unsigned file;
    uint64_t seed_offset;
    char worker[2 * RV_NAME_MAX];
    uint64_t wait_us, load_us, run_us, read_bytes;
    json_t *report; /* what the worker says of it (trace.py) */
    json_t *plain;  /* the same run on the plain ComfyUI (baseline.py); NULL = none */
};

struct rv_verify {
    struct rv_args args;
    struct rv_cli_types types;
    struct rv_verify_file files[RV_VERIFY_FILES_MAX];
    unsigned file_count;
    struct rv_verify_run runs[RV_VERIFY_RUNS_MAX];
    unsigned run_count;
    double factor; /* a run after a switch may take so many times a warm one */
    bool same_seed, baseline;
    uint64_t plain_ready_us; /* until the plain ComfyUI answered */
    bool job_failed;         /* the error is a job's */
};

/* Ctrl-C was pressed. */
bool rv_verify_interrupted(void);

/* Runs number `number` as a job, and waits for its end; its fields are filled. Interrupted, it cancels the job. */
int rv_verify_job(struct rv_verify *verify, struct rv_router *router, unsigned number, struct rv_error *err);

/* Runs all of them, in their order, on one plain ComfyUI process, which is ended in any case. Fills `plain`. */
int rv_verify_plain(struct rv_verify *verify, struct rv_error *err);

/* The number of a JSON object's member; 0 = there is none. */
uint64_t rv_verify_number(const json_t *object, const char *name);

/* Prints all, and the verdict: RV_EXIT_DONE, or 1. */
int rv_verify_show(const struct rv_verify *verify);

#endif
