/*
 * What the commands print: tables, JSON, progress. Escape codes go to terminals only, and never with NO_COLOR set.
 * Texts from peers are escaped here.
 */
#ifndef RV_CLI_OUTPUT_H
#define RV_CLI_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "rpc.pb-c.h"

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

/* {"code","name","message","remedy"}; empty texts come from the error table. */
json_t *rv_json_error(int code, const char *message, const char *remedy);

/* A text, "" for NULL or bytes that are no UTF-8. */
json_t *rv_json_text(const char *text);

/* Adds a member to an object. Without memory the member is left out. */
void rv_json_set_text(json_t *object, const char *name, const char *value);
void rv_json_set_integer(json_t *object, const char *name, uint64_t value);

/* One model, as in `status --json`. */
json_t *rv_model_json(const Resvisor__V1__ModelStatus *model);

/* Prints to stdout with a newline and frees it. NULL (no memory) prints an error. */
void rv_json_print(json_t *root);

/* ---- tables ------------------------------------------------------------------------------------------------------ */

#define RV_TABLE_COLUMNS_MAX 12u

struct rv_table {
    unsigned columns;
    const char *titles[RV_TABLE_COLUMNS_MAX]; /* '>' in front: the column is aligned to the right */
    char **cells;                             /* row by row */
    unsigned count, room;
    bool no_memory;
};

/* titles: ended by NULL, static texts. */
void rv_table_init(struct rv_table *table, const char *const *titles);

/* Adds the next cell, left to right, row by row; the text is escaped. */
void rv_table_add(struct rv_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints to stdout and frees. Words that name a state are coloured on a terminal. */
void rv_table_print(struct rv_table *table);

/* Colours if the stream is a terminal: "" or an escape code. `state` is a word such as READY or FAILED. */
const char *rv_color_of_state(const char *state, bool terminal);
bool rv_is_color_terminal(int fd);

/* ---- progress ---------------------------------------------------------------------------------------------------- */

/* On a terminal one line that is drawn again; otherwise a line at each tenth at most. Goes to stderr. */
struct rv_progress {
    bool terminal, quiet, drawn;
    bool bytes; /* done and total are bytes */
    unsigned last_tenth;
    uint64_t start_us, last_us;
    char last_text[128]; /* plain lines: what was said last */
};

void rv_progress_init(struct rv_progress *progress, bool bytes, bool quiet);

/* total 0 = not known. */
void rv_progress_show(struct rv_progress *progress, const char *what, uint64_t done, uint64_t total, const char *text);

/* Takes the line away. */
void rv_progress_end(struct rv_progress *progress);

/* ---- words ------------------------------------------------------------------------------------------------------- */

/* "QUEUED", "DONE" … */
const char *rv_job_state_name(Resvisor__V1__JobState state);

#endif
