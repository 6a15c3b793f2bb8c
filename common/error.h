/*
 * The one error table: what an RPC client, the command line and libresvisor call a failure.
 *
 * The codes are those of proto/rpc.proto (resvisor.v1.ErrorCode); this table adds the name, the exit code of the
 * command line, the HTTP status and a default remedy. Any process, any thread; nothing here allocates.
 */
#ifndef RV_ERROR_H
#define RV_ERROR_H

#include <stdbool.h>
#include <stdint.h>

#define RV_ERROR_TEXT_MAX 512

enum rv_exit {
    RV_EXIT_DONE = 0,
    RV_EXIT_INTERNAL = 1,
    RV_EXIT_USAGE = 2, /* command line or configuration */
    RV_EXIT_NOT_RUNNING = 3,
    RV_EXIT_REFUSED = 4,
    RV_EXIT_JOB_FAILED = 5,
    RV_EXIT_NOT_FOUND = 6,
    RV_EXIT_NO_ROOM = 7, /* memory, budget, queue or table full */
    RV_EXIT_DEADLINE = 8,
    RV_EXIT_CANCELLED = 9,
    RV_EXIT_ALREADY_RUNNING = 10,
    RV_EXIT_SUPERVISOR_DIED = 11, /* only from `resvisor start`: a signal ended the supervisor */
};

struct rv_error_row {
    const char *name;   /* such as "queue_full": stable, for --json and metrics */
    const char *text;   /* what happened, when there is no better message */
    const char *remedy; /* what to do; "" = nothing general */
    uint8_t exit_code;  /* enum rv_exit */
    uint16_t http_status;
    bool retryable; /* the same request can succeed later */
};

/* A failure with its words, filled by the function that decided it. code 0 = none. Embedded, never allocated. */
struct rv_error {
    int code; /* Resvisor__V1__ErrorCode */
    char message[RV_ERROR_TEXT_MAX];
    char remedy[RV_ERROR_TEXT_MAX / 2];
};

/* The row of a code; an unknown code gives the row of ERROR_INTERNAL. */
const struct rv_error_row *rv_error_row(int code);

/* Number of codes; they run from 0 to this - 1. */
int rv_error_count(void);

/*
 * Fills *err (may be NULL) with code and a formatted message and the table's remedy. Bytes that are not printable
 * ASCII or valid UTF-8 must have been escaped by the caller (rv_escape). Returns -err_number: a negative errno that
 * callers pass on, so that `return rv_error_set(err, EINVAL, CODE, "…")` reads well.
 */
int rv_error_set(struct rv_error *err, int err_number, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Replaces the remedy. */
void rv_error_remedy(struct rv_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * Copies at most size - 1 bytes of text, with control characters, quotes' backslashes and bytes that are no UTF-8
 * written as \xNN, and "..." at the end when it had to be cut. Returns buffer. For bytes that came from a peer or a
 * file.
 */
char *rv_escape(char *buffer, uint64_t size, const void *text, uint64_t length);

/*
 * Writes "?" over what is no UTF-8: half a character where a text was cut by "%.100s". For what goes into a message,
 * which its receiver would refuse as a whole. Returns text.
 */
char *rv_text_mend(char *text);

#endif
