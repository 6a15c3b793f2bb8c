/* Storing the outputs of a job as files. */
#ifndef RV_CLI_SAVE_H
#define RV_CLI_SAVE_H

#include "job.h"

#define RV_SAVE_ALL (-1)

/*
 * Fetches one output of a job, or all (RV_SAVE_ALL), to `out`: a file, a folder (exists, or ends with '/'), "-" for
 * stdout, or NULL for the current folder. Several outputs need a folder; one that does not exist is made. A file is
 * complete or not there: it is written under another name and renamed; an existing one is replaced. The paths written
 * are appended to `files` (JSON texts), and said to stdout unless quiet.
 */
int rv_save_outputs(struct rv_router *router, const Resvisor__V1__Job *job, int number, const char *out, json_t *files,
                    bool quiet, struct rv_error *err);

/* Writes one output to an open file; path is for messages only. */
int rv_fetch_output(struct rv_router *router, const Resvisor__V1__Job *job, uint32_t number, int to, const char *path,
                    struct rv_error *err);

#endif
