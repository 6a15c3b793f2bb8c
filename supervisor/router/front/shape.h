/*
 * Prompts in the shapes of ComfyUI's API: items of the queue, entries of the history, jobs. Pieces of a prompt are
 * copied as the client wrote them; nothing is parsed into a tree.
 *
 * Pure functions, any thread. A buffer that found no memory stays `failed` and takes nothing more.
 */
#ifndef RV_SHAPE_H
#define RV_SHAPE_H

#include "scan.h"

struct rv_shape {
    char *bytes; /* free() */
    size_t length, room;
    bool failed;
};

void rv_shape_put(struct rv_shape *shape, const char *bytes, size_t length);
void rv_shape_text(struct rv_shape *shape, const char *text);
void rv_shape_format(struct rv_shape *shape, const char *format, ...) __attribute__((format(printf, 2, 3)));
void rv_shape_string(struct rv_shape *shape, const char *text); /* quoted and escaped */
void rv_shape_number(struct rv_shape *shape, double number);
void rv_shape_fini(struct rv_shape *shape);

/* A prompt that a client has sent. text was checked. */
struct rv_shape_prompt {
    const char *text;
    struct rv_span prompt, extra_data; /* length 0 = none */
    const char *id, *client_id;        /* client_id: NULL = none */
    const char *outputs;               /* JSON, the nodes that will run; NULL = not known */
    double number;
    uint64_t created_ms; /* wall clock */
};

/* [number, id, prompt, extra_data, outputs], without the secrets. */
void rv_shape_queue_item(struct rv_shape *shape, const struct rv_shape_prompt *prompt);

/* How it ran. */
struct rv_shape_run {
    const char *type, *worker;
    uint64_t wait_us, load_us, run_us, read_bytes;
    bool has_number; /* of the prompt; else the entry's own is kept */
    double number;
};

/*
 * An entry of a worker's history, with `resvisor` in its status. -EINVAL = it is none (nothing is written then). `entry`
 * is where it lies in checked text.
 */
int rv_shape_history(struct rv_shape *shape, const char *text, struct rv_span entry, const char *id,
                     const struct rv_shape_run *run);

/* Why a prompt did not come to its end, where no worker could say. */
struct rv_shape_failure {
    bool interrupted;          /* by a client */
    const char *type, *message; /* "resvisor.WorkerDied" */
    uint64_t started_ms, ended_ms; /* wall clock */
};

/* An entry of the history for it. */
void rv_shape_failed(struct rv_shape *shape, const struct rv_shape_prompt *prompt,
                     const struct rv_shape_failure *failure);

/* What the jobs API says of an entry of the history, without braces: outputs_count, times, preview and error. */
void rv_shape_summary(struct rv_shape *shape, const char *text, struct rv_span entry);

/* extra_data.extra_pnginfo.workflow.id; -ENOENT. */
int rv_shape_workflow_id(const char *text, struct rv_span extra_data, char *to, size_t size);

/* The item of the entry's prompt with that number: 2 = prompt, 3 = extra_data. Length 0 = none. */
struct rv_span rv_shape_prompt_item(const char *text, struct rv_span entry, unsigned number);

#endif
