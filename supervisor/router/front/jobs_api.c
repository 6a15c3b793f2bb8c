/* /api/jobs of newer ComfyUIs: queue and history as one list, filtered, sorted and paged. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "prompts.h"

#define WORKFLOW_ID_MAX 128u
#define CANCEL_MAX 1000u /* jobs of one request */

enum { PENDING, IN_PROGRESS, COMPLETED, FAILED, CANCELLED, STATES };

static const char *const states[STATES] = {"pending", "in_progress", "completed", "failed", "cancelled"};

struct query {
    unsigned wanted; /* bits of states */
    char workflow[WORKFLOW_ID_MAX]; /* "" = any */
    bool by_duration, ascending;
    uint64_t limit, offset; /* UINT64_MAX = no limit */
};

struct row {
    struct rv_job_record *job;
    uint64_t key;
    uint32_t order; /* among equal keys */
};

static void refuse(struct rv_http_request *request, unsigned status, const char *text)
{
    rv_front_answer_json(request, status, json_pack("{s:s}", "error", text));
}

/* ---- one job ----------------------------------------------------------------------------------------------------- */

/* STATES = it is not in the list. */
static unsigned state_of(const struct rv_job_record *job)
{
    if (!rv_prompt_is_one(job))
        return STATES;
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_QUEUED)
        return PENDING;
    if (job->state == RESVISOR__V1__JOB_STATE__JOB_RUNNING)
        return IN_PROGRESS;
    if (!rv_history_has(job))
        return STATES;
    return job->state == RESVISOR__V1__JOB_STATE__JOB_DONE        ? COMPLETED
           : job->state == RESVISOR__V1__JOB_STATE__JOB_CANCELLED ? CANCELLED
                                                                  : FAILED;
}

/* What a job's id of a workflow is read from: its payload, or its history. */
struct source {
    char *owned; /* free() */
    const char *text;
    struct rv_span entry, prompt, extra_data;
};

static int open_source(struct rv_job_record *job, struct source *source)
{
    struct rv_shape_prompt prompt;
    int r;

    *source = (struct source){0};
    if (!rv_jobs_has_ended(job)) {
        if (!rv_prompt_shape(job, &prompt))
            return -ENOMEM;
        source->text = prompt.text;
        source->prompt = prompt.prompt;
        source->extra_data = prompt.extra_data;
        return 0;
    }
    r = rv_history_read(job, &source->owned, &source->entry);
    if (r < 0)
        return r;
    source->text = source->owned;
    source->prompt = rv_shape_prompt_item(source->text, source->entry, 2);
    source->extra_data = rv_shape_prompt_item(source->text, source->entry, 3);
    return 0;
}

static void put_head(struct rv_shape *shape, const struct rv_job_record *job, unsigned state,
                     const struct source *source)
{
    char workflow[WORKFLOW_ID_MAX];

    rv_shape_text(shape, "{\"id\": ");
    rv_shape_string(shape, job->id);
    rv_shape_format(shape, ", \"status\": \"%s\", \"priority\": ", states[state]);
    rv_shape_number(shape, job->number);
    rv_shape_format(shape, ", \"create_time\": %" PRIu64 ", ", job->submitted_ms);
    if (rv_jobs_has_ended(job))
        rv_shape_summary(shape, source->text, source->entry);
    else
        rv_shape_text(shape, "\"outputs_count\": 0");
    if (rv_shape_workflow_id(source->text, source->extra_data, workflow, sizeof(workflow)) == 0) {
        rv_shape_text(shape, ", \"workflow_id\": ");
        rv_shape_string(shape, workflow);
    }
}

static void put_or(struct rv_shape *shape, const char *text, struct rv_span value, const char *otherwise)
{
    if (value.length)
        rv_shape_put(shape, text + value.at, value.length);
    else
        rv_shape_text(shape, otherwise);
}

/* outputs, execution_status and workflow: of one job that is asked for alone. */
static void put_details(struct rv_shape *shape, const struct source *source)
{
    struct rv_span outputs = {0}, status = {0};

    (void)rv_scan_find(source->text, source->entry, "outputs", &outputs);
    (void)rv_scan_find(source->text, source->entry, "status", &status);
    rv_shape_text(shape, ", \"outputs\": ");
    put_or(shape, source->text, outputs, "{}");
    rv_shape_text(shape, ", \"execution_status\": ");
    put_or(shape, source->text, status, "null");
    rv_shape_text(shape, ", \"workflow\": {\"prompt\": ");
    put_or(shape, source->text, source->prompt, "{}");
    rv_shape_text(shape, ", \"extra_data\": ");
    put_or(shape, source->text, source->extra_data, "{}");
    rv_shape_text(shape, "}");
}

static int put_job(struct rv_shape *shape, struct rv_job_record *job, bool alone)
{
    struct source source;
    int r = open_source(job, &source);

    if (r < 0)
        return r;
    put_head(shape, job, state_of(job), &source);
    if (alone && rv_jobs_has_ended(job))
        put_details(shape, &source);
    rv_shape_text(shape, "}");
    free(source.owned);
    return 0;
}

/* ---- the list ---------------------------------------------------------------------------------------------------- */

static bool read_states(struct rv_http_request *request, const char *text, unsigned *ret_wanted)
{
    unsigned wanted = 0;

    while (*text) {
        size_t n = strcspn(text, ","), blanks = strspn(text, " "), word;
        unsigned i = 0;

        word = n > blanks ? n - blanks : 0;
        while (word > 0 && text[blanks + word - 1] == ' ')
            word--;
        while (i < STATES && !(strlen(states[i]) == word && strncasecmp(states[i], text + blanks, word) == 0))
            i++;
        if (word > 0 && i == STATES) {
            refuse(request, 400, "Invalid status value(s). Valid values: pending, in_progress, completed, failed, "
                                 "cancelled");
            return false;
        }
        if (word > 0)
            wanted |= 1u << i;
        text += n + (text[n] == ',');
    }
    *ret_wanted = wanted ? wanted : ~0u;
    return true;
}

/* One of two words; the first is usual. */
static bool read_choice(struct rv_http_request *request, const char *name, const char *first, const char *second,
                        bool *ret_second, const char *otherwise)
{
    const char *text = rv_http_query(&request->target, name);

    *ret_second = text && strcasecmp(text, second) == 0;
    if (!text || *ret_second || strcasecmp(text, first) == 0)
        return true;
    refuse(request, 400, otherwise);
    return false;
}

static bool read_query(struct rv_http_request *request, struct query *query)
{
    const char *status = rv_http_query(&request->target, "status"), *text;

    *query = (struct query){.limit = UINT64_MAX};
    if (!read_states(request, status ? status : "", &query->wanted) ||
        !read_choice(request, "sort_by", "created_at", "execution_duration", &query->by_duration,
                     "sort_by must be 'created_at' or 'execution_duration'") ||
        !read_choice(request, "sort_order", "desc", "asc", &query->ascending, "sort_order must be 'asc' or 'desc'"))
        return false;
    text = rv_http_query(&request->target, "limit");
    if (text && (!rv_http_parse_number(text, strlen(text), &query->limit) || query->limit == 0)) {
        refuse(request, 400, "limit must be a positive integer");
        return false;
    }
    text = rv_http_query(&request->target, "offset");
    if (text && !rv_http_parse_number(text, strlen(text), &query->offset)) {
        refuse(request, 400, "offset must be a whole number, 0 or more");
        return false;
    }
    text = rv_http_query(&request->target, "workflow_id");
    if (text && strlen(text) >= sizeof(query->workflow)) {
        refuse(request, 400, "workflow_id is too long");
        return false;
    }
    if (text)
        memcpy(query->workflow, text, strlen(text) + 1);
    return true;
}

static bool is_of_workflow(struct rv_job_record *job, const char *wanted)
{
    char id[WORKFLOW_ID_MAX];
    struct source source;
    bool same;

    if (open_source(job, &source) < 0)
        return false;
    same = rv_shape_workflow_id(source.text, source.extra_data, id, sizeof(id)) == 0 && strcmp(id, wanted) == 0;
    free(source.owned);
    return same;
}

/* Those that are wanted, in the order of the job table. NULL = no memory. */
static struct row *collect(struct rv_router *router, const struct query *query, uint32_t *ret_count)
{
    struct row *rows = calloc((size_t)router->job_count + 1, sizeof(*rows));
    struct rv_job_record *job;
    uint32_t count = 0;

    if (!rows)
        return NULL;
    TAILQ_FOREACH (job, &router->all, all_link) {
        unsigned state = state_of(job);

        if (state == STATES || !(query->wanted & 1u << state) ||
            (query->workflow[0] && !is_of_workflow(job, query->workflow)))
            continue;
        rows[count] = (struct row){job, query->by_duration ? job->run_us : job->submitted_ms, count};
        count++;
    }
    *ret_count = count;
    return rows;
}

static int compare_up(const void *a, const void *b)
{
    const struct row *one = a, *other = b;

    if (one->key != other->key)
        return one->key < other->key ? -1 : 1;
    return one->order < other->order ? -1 : 1;
}

/* Of two that came in the same millisecond, the later one is the newer. */
static int compare_down(const void *a, const void *b)
{
    return -compare_up(a, b);
}

static void put_pagination(struct rv_shape *shape, const struct query *query, uint32_t total, uint64_t shown)
{
    rv_shape_format(shape, "], \"pagination\": {\"offset\": %" PRIu64 ", \"limit\": ", query->offset);
    if (query->limit == UINT64_MAX)
        rv_shape_text(shape, "null");
    else
        rv_shape_format(shape, "%" PRIu64, query->limit);
    rv_shape_format(shape, ", \"total\": %u, \"has_more\": %s}}", total,
                    query->offset + shown < total ? "true" : "false");
}

void rv_front_jobs_list(struct rv_http_request *request)
{
    struct rv_shape shape = {0};
    struct query query;
    struct row *rows;
    uint32_t total = 0;
    uint64_t shown = 0;

    if (!rv_prompt_is_settled(request) || !read_query(request, &query))
        return;
    rows = collect(request->http->router, &query, &total);
    if (!rows) {
        refuse(request, 503, "no memory for the list");
        return;
    }
    qsort(rows, total, sizeof(*rows), query.ascending ? compare_up : compare_down);
    rv_shape_text(&shape, "{\"jobs\": [");
    for (uint64_t i = query.offset; i < total && shown < query.limit; i++, shown++) {
        size_t before = shape.length;

        if (shown > 0)
            rv_shape_text(&shape, ", ");
        if (put_job(&shape, rows[i].job, false) < 0 && !shape.failed) {
            shape.length = before; /* its entry is broken: it is counted, and not shown */
            if (shown == 0)
                rv_shape_text(&shape, "{}");
            else
                rv_shape_text(&shape, ", {}");
        }
    }
    put_pagination(&shape, &query, total, shown);
    free(rows);
    if (shape.failed) {
        rv_shape_fini(&shape);
        refuse(request, 503, "no memory for the list");
        return;
    }
    rv_front_answer_text(request, 200, shape.bytes, shape.length);
}

void rv_front_jobs_get(struct rv_http_request *request)
{
    struct rv_job_record *job;
    struct rv_shape shape = {0};

    if (!rv_prompt_is_settled(request))
        return;
    job = rv_jobs_find(request->http->router, request->target.segments[1]);
    if (!job || state_of(job) == STATES || put_job(&shape, job, true) < 0 || shape.failed) {
        rv_shape_fini(&shape);
        refuse(request, 404, "Job not found");
        return;
    }
    rv_front_answer_text(request, 200, shape.bytes, shape.length);
}

/* ---- cancelling -------------------------------------------------------------------------------------------------- */

static bool cancel(struct rv_router *router, struct rv_job_record *job)
{
    if (!job || !rv_prompt_is_one(job) || rv_jobs_has_ended(job))
        return false;
    rv_jobs_cancel(router, job);
    return true;
}

static void answer_cancelled(struct rv_http_request *request, bool cancelled)
{
    rv_front_answer_json(request, 200, json_pack("{s:b}", "cancelled", cancelled));
}

void rv_front_jobs_cancel(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_job_record *job;

    if (!rv_prompt_is_settled(request))
        return;
    job = rv_jobs_find(router, request->target.segments[1]);
    if (!job || state_of(job) == STATES)
        refuse(request, 404, "Job not found");
    else
        answer_cancelled(request, cancel(router, job));
}

void rv_front_jobs_cancel_many(struct rv_http_request *request)
{
    struct rv_router *router = request->http->router;
    struct rv_span body, ids, name;
    uint32_t at = 0;
    bool any = false;

    if (!rv_prompt_is_settled(request) || !rv_prompt_read_object(request, &body))
        return;
    if (!rv_scan_find(request->body, body, "job_ids", &ids) || !rv_scan_is(request->body, ids, '[')) {
        refuse(request, 400, "job_ids must be a list of ids");
        return;
    }
    for (unsigned i = 0; i < CANCEL_MAX && rv_scan_next(request->body, ids, &at, NULL, &name); i++) {
        char id[RV_NAME_MAX + 1];

        if (rv_scan_copy(request->body, name, id, sizeof(id)) == 0 && cancel(router, rv_jobs_find(router, id)))
            any = true;
    }
    answer_cancelled(request, any);
}
