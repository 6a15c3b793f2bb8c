#include "gather.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_gather(struct rv_front_gather *gather)
{
    for (unsigned i = 0; i < gather->count; i++) {
        if (gather->parts[i].call)
            rv_front_call_cancel(gather->parts[i].call);
        free(gather->parts[i].text);
    }
    free(gather);
}

static void on_gone(void *context)
{
    free_gather(context);
}

static void finish(struct rv_front_gather *gather)
{
    struct rv_http_request *request = gather->request;

    for (unsigned i = 0; i < gather->count; i++) { /* those that are not needed */
        if (gather->parts[i].call)
            rv_front_call_cancel(gather->parts[i].call);
        gather->parts[i].call = NULL;
    }
    request->front_gone = NULL; /* this ends here, whatever becomes of the client */
    gather->done(gather);
    if (!request->exchange && !request->render)
        rv_front_answered(request);
    free_gather(gather);
}

static void on_answer(void *context, int r, unsigned status, const char *body, size_t length)
{
    struct rv_front_part *part = context;
    struct rv_front_gather *gather = part->gather;

    part->call = NULL;
    part->r = r;
    part->status = status;
    if (r == 0 && (part->text = malloc(length + 1))) {
        memcpy(part->text, body, length);
        part->text[length] = '\0';
        part->length = length;
    } else if (r == 0) {
        part->r = -ENOMEM;
    }
    if (--gather->left == 0 || (gather->enough && gather->enough(part)))
        finish(gather);
}

struct rv_front_gather *rv_front_gather_create(struct rv_http_request *request,
                                               void (*done)(struct rv_front_gather *gather))
{
    struct rv_front_gather *gather = calloc(1, sizeof(*gather));

    if (!gather) {
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory for the request");
        return NULL;
    }
    gather->front = request->http->router->front;
    gather->request = request;
    gather->done = done;
    return gather;
}

static void add(struct rv_front_gather *gather, const struct rv_worker_entry *worker)
{
    struct rv_front_part *part = &gather->parts[gather->count];

    if (!worker || gather->count == RV_FRONT_PARTS_MAX)
        return;
    for (unsigned i = 0; i < gather->count; i++)
        if (strcmp(gather->parts[i].worker, worker->name) == 0)
            return;
    gather->count++;
    part->gather = gather;
    part->type = worker->type;
    part->incarnation = worker->incarnation;
    (void)snprintf(part->worker, sizeof(part->worker), "%s", worker->name);
}

void rv_front_gather_types(struct rv_front_gather *gather)
{
    struct rv_router *router = gather->front->router;

    add(gather, rv_front_any(gather->front, gather->front->primary));
    for (unsigned i = 0; i < router->type_count; i++)
        if (router->types[i].is_comfyui && &router->types[i] != gather->front->primary)
            add(gather, rv_front_any(gather->front, &router->types[i]));
}

void rv_front_gather_all(struct rv_front_gather *gather)
{
    struct rv_worker_entry *worker = NULL;

    add(gather, rv_front_primary(gather->front));
    while ((worker = rv_front_next(gather->front, worker)))
        add(gather, worker);
}

void rv_front_gather_start(struct rv_front_gather *gather, const struct rv_front_call_options *options,
                           uint64_t first_us, uint64_t other_us)
{
    struct rv_http_request *request = gather->request;

    for (unsigned i = 0; i < gather->count; i++) {
        struct rv_front_part *part = &gather->parts[i];
        struct rv_worker_entry *worker = rv_front_find(gather->front, part->worker, part->incarnation);
        struct rv_front_call_options own = *options;

        own.timeout_us = i == 0 ? first_us : other_us;
        part->r = worker ? rv_front_call(gather->front, worker, &own, on_answer, part, &part->call) : -ECONNREFUSED;
        if (part->r == 0)
            gather->left++;
        else
            part->call = NULL;
    }
    if (gather->left > 0) {
        rv_front_wait(request, on_gone, gather);
        return;
    }
    rv_front_answer_not_ready(request, NULL);
    free_gather(gather);
}
