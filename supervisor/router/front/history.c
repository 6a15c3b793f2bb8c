/* /history: of every prompt the entry that its worker wrote, out of the store of results. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "prompts.h"

static const struct rv_output *find_output(const struct rv_job_record *job)
{
    for (uint32_t i = 0; i < job->output_count; i++)
        if (job->outputs[i].fd >= 0 && strcmp(job->outputs[i].name, RV_HISTORY_NAME) == 0)
            return &job->outputs[i];
    return NULL;
}

bool rv_history_has(const struct rv_job_record *job)
{
    return rv_prompt_is_one(job) && rv_jobs_has_ended(job) && !job->hidden && find_output(job);
}

static int read_all(int fd, char *to, size_t size)
{
    size_t done = 0;

    while (done < size) {
        ssize_t n = pread(fd, to + done, size - done, (off_t)done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EIO;
        done += (size_t)n;
    }
    return 0;
}

int rv_history_read(const struct rv_job_record *job, char **ret_text, struct rv_span *ret_entry)
{
    const struct rv_output *output = find_output(job);
    char *text;
    size_t where;
    int r;

    if (!output || output->size > RV_HISTORY_MAX)
        return output ? -EMSGSIZE : -ENOENT;
    text = malloc((size_t)output->size + 1);
    if (!text)
        return -ENOMEM;
    r = read_all(output->fd, text, (size_t)output->size);
    if (r == 0) /* of a worker, where anybody's nodes run */
        r = rv_scan_check(text, (size_t)output->size, ret_entry, &where);
    if (r < 0) {
        free(text);
        return r;
    }
    *ret_text = text;
    return 0;
}

int rv_history_write(struct rv_shape *shape, const struct rv_job_record *job)
{
    struct rv_shape_run run = {
        .type = job->type_name,
        .worker = job->worker_name,
        .wait_us = job->wait_us,
        .load_us = job->load_us,
        .run_us = job->run_us,
        .read_bytes = job->read_bytes,
        .has_number = job->prompt && job->prompt->came_here,
        .number = job->number,
    };
    struct rv_span entry;
    char *text = NULL;
    int r = rv_history_read(job, &text, &entry);

    if (r < 0)
        return r;
    r = rv_shape_history(shape, text, entry, job->id, &run);
    free(text);
    return r;
}

static bool write_entry(struct rv_shape *shape, struct rv_job_record *job, unsigned section, bool first)
{
    size_t before = shape->length;

    (void)section;
    if (!rv_history_has(job))
        return false;
    if (!first)
        rv_shape_text(shape, ", ");
    rv_shape_string(shape, job->id);
    rv_shape_text(shape, ": ");
    if (rv_history_write(shape, job) == 0)
        return true;
    shape->length = before < shape->length ? before : shape->length;
    return false;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

/* -ENOENT = it is not there, -EINVAL = no number. */
static int read_number(const struct rv_http_request *request, const char *name, long long *number)
{
    const char *text = rv_http_query(&request->target, name);
    char *end;

    if (!text)
        return -ENOENT;
    errno = 0;
    *number = strtoll(text, &end, 10);
    return end == text || *end || errno ? -EINVAL : 0;
}

/* As ComfyUI counts: without an offset the newest ones. */
static bool read_page(struct rv_http_request *request, long long total, long long *ret_from, long long *ret_to)
{
    long long limit = 0, offset = -1;
    int has_limit = read_number(request, "max_items", &limit), has_offset = read_number(request, "offset", &offset);

    if (has_limit == -EINVAL || has_offset == -EINVAL) {
        rv_front_answer_error(request, 400, "invalid_request", "", 0, "max_items and offset must be whole numbers");
        return false;
    }
    if (offset < 0 && has_limit == 0)
        offset = limit < total ? total - (limit > 0 ? limit : 0) : 0;
    *ret_from = offset > 0 ? offset : 0;
    *ret_to = total;
    if (has_limit == 0 && *ret_from < total && limit < total - *ret_from)
        *ret_to = *ret_from + (limit > 1 ? limit : 1);
    return true;
}

static int add_page(struct rv_listing *listing, const struct rv_router *router, long long from, long long to)
{
    const struct rv_job_record *job;
    long long i = 0;
    int r = 0;

    TAILQ_FOREACH (job, &router->ended, ended_link) {
        if (r < 0 || i >= to)
            break;
        if (rv_history_has(job) && i++ >= from)
            r = rv_listing_add(listing, job, 0);
    }
    return r;
}

static void no_memory(struct rv_http_request *request)
{
    rv_front_answer_error(request, 503, "no_memory", "", RV_FRONT_RETRY_MS, "no memory for the history");
}

void rv_front_history_get(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    const struct rv_job_record *job;
    struct rv_listing *listing;
    long long total = 0, from, to;

    if (!rv_prompt_is_settled(request))
        return;
    TAILQ_FOREACH (job, &router->ended, ended_link)
        total += rv_history_has(job);
    if (!read_page(request, total, &from, &to))
        return;
    listing = rv_listing_create(router, write_entry, "{", NULL, "}");
    if (listing && add_page(listing, router, from, to) == 0) {
        rv_listing_answer(request, listing);
        return;
    }
    rv_listing_destroy(listing);
    no_memory(request);
}

void rv_front_history_get_one(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_job_record *job;
    struct rv_listing *listing;

    if (!rv_prompt_is_settled(request))
        return;
    job = rv_jobs_find(router, request->target.segments[1]);
    listing = rv_listing_create(router, write_entry, "{", NULL, "}");
    if (listing && (!job || rv_listing_add(listing, job, 0) == 0)) {
        rv_listing_answer(request, listing);
        return;
    }
    rv_listing_destroy(listing);
    no_memory(request);
}

/* ---- deleting ---------------------------------------------------------------------------------------------------- */

/* The record stays, so that its id starts nothing a second time; files that came by RPC stay for who asked for them. */
static void hide(struct rv_router *router, struct rv_job_record *job)
{
    if (!rv_history_has(job))
        return;
    job->hidden = true;
    if (job->prompt && job->prompt->came_here)
        rv_results_drop(router, job);
}

void rv_front_history_post(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_job_record *job;
    struct rv_span body, value, name;
    uint32_t at = 0;

    if (!rv_prompt_is_settled(request) || !rv_prompt_read_object(request, &body))
        return;
    if (rv_scan_find(request->body, body, "clear", &value) && rv_scan_is_true(request->body, value))
        TAILQ_FOREACH (job, &router->ended, ended_link)
            hide(router, job);
    if (rv_scan_find(request->body, body, "delete", &value) && rv_scan_is(request->body, value, '[')) {
        while (rv_scan_next(request->body, value, &at, NULL, &name)) {
            char id[RV_NAME_MAX + 1];

            job = rv_scan_copy(request->body, name, id, sizeof(id)) == 0 ? rv_jobs_find(router, id) : NULL;
            if (job)
                hide(router, job);
        }
    }
    rv_http_answer_text(request, 200, NULL, strdup(""), 0);
}
