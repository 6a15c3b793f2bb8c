/*
 * POST /prompt: the body is read once, its type decided, a ready worker of the type asked whether ComfyUI would take
 * it, and then it is a job like any other.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "clock.h"
#include "log.h"
#include "memory.h"
#include "prompts.h"

#define VALIDATE_PATH "/resvisor/validate"
#define VALIDATE_US (10 * RV_SEC) /* a worker that is asked whether a prompt is good; then it is taken as it is */
#define VALIDATE_ANSWER_MAX (8u * 1024 * 1024)
#define NODE_ERRORS_KEPT (64u * 1024) /* bytes of them, of a prompt that has ended */
#define SETTLE_RETRY_MS 1000u

struct rv_front_posting {
    TAILQ_ENTRY(rv_front_posting) link;
    struct rv_front *front;
    struct rv_http_request *request;
    struct rv_front_call *call;
    struct rv_prompt_body body;
    struct rv_type *type;
    bool is_validated;
    bool is_bad; /* no graph: only a worker knows ComfyUI's words for it */
    struct rv_error why;
    char *outputs, *node_errors;
};

int rv_front_prompts_init(struct rv_front *front)
{
    struct rv_front_prompts *prompts = calloc(1, sizeof(*prompts));

    if (!prompts)
        return -ENOMEM;
    TAILQ_INIT(&prompts->postings);
    for (unsigned i = 0; i < front->router->type_count; i++) {
        struct rv_type *type = &front->router->types[i];

        if (!type->is_comfyui)
            continue;
        prompts->type_of[prompts->type_count] = type;
        prompts->types[prompts->type_count++] =
            (struct rv_route_type){type->name, type->accepts, type->files, type->file_count};
    }
    front->prompts = prompts;
    return 0;
}

void rv_front_prompts_fini(struct rv_front *front)
{
    if (!front->prompts)
        return;
    assert(TAILQ_EMPTY(&front->prompts->postings));
    free(front->prompts);
    front->prompts = NULL;
}

/* ---- a job as a prompt ------------------------------------------------------------------------------------------- */

bool rv_prompt_is_one(const struct rv_job_record *job)
{
    return job->type && job->type->is_comfyui;
}

static const char *payload_of(const struct rv_job_record *job)
{
    return job->submit ? (const char *)job->submit + job->payload_at : NULL;
}

/* A payload that came by RPC: the body of POST /prompt, or a graph alone, or anything. */
static void read_payload(const struct rv_job_record *job, struct rv_front_prompt *prompt)
{
    const char *text = payload_of(job);
    struct rv_prompt_body body;
    struct rv_prompt_fault fault;
    struct rv_span whole;
    size_t where;

    if (!text)
        return;
    if (rv_prompt_body_read(text, job->payload_length, &body, &fault) == 0) {
        prompt->prompt = body.prompt;
        prompt->extra_data = body.extra_data;
        prompt->has_client = body.has_client_id;
        memcpy(prompt->client_id, body.client_id, sizeof(prompt->client_id));
    } else if (rv_scan_check(text, job->payload_length, &whole, &where) == 0 && rv_scan_is(text, whole, '{')) {
        prompt->prompt = whole;
    }
}

bool rv_prompt_shape(struct rv_job_record *job, struct rv_shape_prompt *ret_prompt)
{
    struct rv_front_prompt *prompt = job->prompt;

    if (!prompt) {
        prompt = job->prompt = calloc(1, sizeof(*prompt));
        if (!prompt)
            return false;
        read_payload(job, prompt);
    }
    *ret_prompt = (struct rv_shape_prompt){
        .text = payload_of(job),
        .id = job->id,
        .client_id = prompt->has_client ? prompt->client_id : NULL,
        .outputs = prompt->outputs,
        .number = job->number,
        .created_ms = job->submitted_ms,
    };
    if (ret_prompt->text) {
        ret_prompt->prompt = prompt->prompt;
        ret_prompt->extra_data = prompt->extra_data;
    }
    return true;
}

const char *rv_front_prompt_client(const struct rv_job_record *job)
{
    return job->prompt && job->prompt->has_client ? job->prompt->client_id : NULL;
}

void rv_front_prompt_counts(const struct rv_front *front, uint64_t *ret_taken, uint64_t *ret_refused,
                            uint64_t *ret_unvalidated)
{
    const struct rv_front_prompts *prompts = front ? front->prompts : NULL;

    *ret_taken = prompts ? prompts->taken : 0;
    *ret_refused = prompts ? prompts->refused : 0;
    *ret_unvalidated = prompts ? prompts->unvalidated : 0;
}

uint32_t rv_front_queue_remaining(const struct rv_front *front)
{
    uint32_t count = 0;

    for (unsigned i = 0; i < front->router->type_count; i++)
        if (front->router->types[i].is_comfyui)
            count += front->router->types[i].queued + front->router->types[i].running;
    return count;
}

void rv_front_prompts_job_removed(struct rv_front *front, struct rv_job_record *job)
{
    (void)front;
    free(job->prompt->outputs);
    free(job->prompt->node_errors);
    free(job->prompt);
    job->prompt = NULL;
}

/* ---- a prompt that failed where no worker could say so ----------------------------------------------------------- */

const char *rv_prompt_failure_type(int code)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {
        {RV_CODE(WORKER_DIED), "resvisor.WorkerDied"},
        {RV_CODE(QUARANTINED), "resvisor.WorkerDied"},
        {RV_CODE(BAD_REQUEST), "resvisor.PromptRefused"},
        {RV_CODE(DEADLINE), "resvisor.Deadline"},
    };

    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].code == code)
            return names[i].name;
    return "resvisor.JobFailed";
}

/* One that was taken out of the queue leaves no trace, as in ComfyUI. */
static bool is_worth_an_entry(const struct rv_job_record *job)
{
    return rv_prompt_is_one(job) && job->error_code != 0 && job->output_count == 0 && job->submit &&
           (job->attempts > 0 || (job->error_code != RV_CODE(CANCELLED) && job->error_code != RV_CODE(SHUTTING_DOWN)));
}

/* What its validation said is for the queue, and for who sends the same prompt again: thousands of records stay. */
static void forget_validation(struct rv_front_prompt *prompt)
{
    free(prompt->outputs);
    prompt->outputs = NULL;
    if (!prompt->node_errors || strlen(prompt->node_errors) <= NODE_ERRORS_KEPT)
        return;
    free(prompt->node_errors);
    prompt->node_errors = NULL;
}

static void add_entry(struct rv_front *front, struct rv_job_record *job)
{
    struct rv_shape shape = {0};
    struct rv_shape_prompt prompt;
    struct rv_shape_failure failure;
    int fd;

    if (!is_worth_an_entry(job) || !rv_prompt_shape(job, &prompt))
        return;
    failure = (struct rv_shape_failure){
        .interrupted = job->error_code == RV_CODE(CANCELLED),
        .type = rv_prompt_failure_type(job->error_code),
        .message = job->error_message ? job->error_message : rv_error_row(job->error_code)->text,
        .ended_ms = rv_wall_ms(),
    };
    failure.started_ms = failure.ended_ms - job->run_us / 1000;
    rv_shape_failed(&shape, &prompt, &failure);
    fd = shape.failed ? -ENOMEM : rv_sealed_create("resvisor-output", shape.bytes, shape.length);
    if (fd < 0 || rv_results_add(front->router, job, RV_HISTORY_NAME, RV_HISTORY_TYPE, fd, shape.length) < 0)
        rv_log_warning("job %s failed, and there is no memory for its entry of the history", job->id);
    rv_shape_fini(&shape);
}

void rv_front_prompts_job_ending(struct rv_front *front, struct rv_job_record *job)
{
    add_entry(front, job);
    if (job->prompt)
        forget_validation(job->prompt);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

bool rv_prompt_is_settled(struct rv_http_request *request)
{
    if (!request->http->router->settling)
        return true;
    rv_front_answer_error(request, 503, "not_ready", "try again in a moment", SETTLE_RETRY_MS,
                          "the router has just started and waits for the workers' reports");
    return false;
}

bool rv_prompt_read_object(struct rv_http_request *request, struct rv_span *ret_object)
{
    size_t where = 0;

    if (request->body && rv_scan_check(request->body, request->body_length, ret_object, &where) == 0 &&
        rv_scan_is(request->body, *ret_object, '{'))
        return true;
    rv_front_answer_error(request, 400, "invalid_json", "", 0, "the request's body must be a JSON object");
    return false;
}

/* Everything that another moment can mend is 503 with Retry-After. */
static void refuse(struct rv_http_request *request, const struct rv_error *err, uint64_t retry_ms)
{
    const struct rv_error_row *row = rv_error_row(err->code);
    bool later = row->retryable || retry_ms > 0 || err->code == RV_CODE(TYPE_FAILED);
    unsigned status = later ? 503 : err->code == RV_CODE(TOO_LARGE) ? 413 : err->code == RV_CODE(NO_MEMORY) ? 503 : 400;

    request->http->router->front->prompts->refused++;
    rv_front_answer_error(request, status, row->name, err->remedy,
                          status != 503 ? 0
                          : retry_ms    ? retry_ms
                                        : RV_FRONT_RETRY_MS,
                          "%s", err->message);
}

static void refuse_bad(struct rv_front_posting *p)
{
    p->front->prompts->refused++;
    rv_front_answer_error(p->request, 400, "invalid_prompt", p->why.message, 0,
                          "Cannot execute because it is no prompt");
}

/* ---- taking it --------------------------------------------------------------------------------------------------- */

static void on_added(struct rv_job_record *job, void *context)
{
    struct rv_front_posting *p = context;
    struct rv_front_prompt *prompt = calloc(1, sizeof(*prompt));

    if (!prompt) /* read from its payload when it is shown; its client's id is in that, too */
        return;
    prompt->came_here = true;
    prompt->prompt = p->body.prompt;
    prompt->extra_data = p->body.extra_data;
    prompt->has_client = p->body.has_client_id;
    memcpy(prompt->client_id, p->body.client_id, sizeof(prompt->client_id));
    prompt->outputs = p->outputs;
    prompt->node_errors = p->node_errors;
    p->outputs = p->node_errors = NULL;
    job->prompt = prompt;
}

static void answer_taken(struct rv_http_request *request, const struct rv_job_record *job)
{
    struct rv_shape shape = {0};

    rv_shape_text(&shape, "{\"prompt_id\": ");
    rv_shape_string(&shape, job->id);
    rv_shape_text(&shape, ", \"number\": ");
    rv_shape_number(&shape, job->number);
    rv_shape_text(&shape, ", \"node_errors\": ");
    rv_shape_text(&shape, job->prompt && job->prompt->node_errors ? job->prompt->node_errors : "{}");
    rv_shape_text(&shape, "}");
    if (shape.failed) {
        rv_shape_fini(&shape);
        shape.length = 0;
    }
    rv_front_answer_text(request, 200, shape.bytes, shape.length);
}

static void take(struct rv_front_posting *p)
{
    Resvisor__V1__Submit submit = RESVISOR__V1__SUBMIT__INIT;
    Resvisor__V1__Param params[2], *list[2] = {&params[0], &params[1]};
    const char *source = MHD_lookup_connection_value(p->request->connection, MHD_HEADER_KIND, "Comfy-Usage-Source");
    struct rv_submit_options options = {.payload_max = RV_FRONT_PROMPT_MAX,
                                        .front = p->body.front,
                                        .has_number = p->body.has_number,
                                        .number = p->body.number,
                                        .added = on_added,
                                        .context = p};
    struct rv_job_record *job = NULL;
    struct rv_error err = {0};
    uint64_t retry_ms = 0;

    resvisor__v1__param__init(&params[0]);
    resvisor__v1__param__init(&params[1]);
    params[0].key = "outputs"; /* the files are in the shared folder: nobody needs them a second time */
    params[0].value = "history";
    params[1].key = "usage_source";
    params[1].value = (char *)source;
    submit.job_id = p->body.prompt_id;
    submit.type = p->type->name;
    submit.n_params = source && strlen(source) <= RV_NAME_MAX && rv_text_is_valid(source) ? 2 : 1;
    submit.params = list;
    submit.payload.data = (uint8_t *)p->request->body;
    submit.payload.len = p->request->body_length;
    submit.priority = p->body.priority;
    submit.retry_on_worker_death = p->body.retry;
    if (rv_submit_accept(p->front->router, &submit, &options, &job, &err, &retry_ms) < 0) {
        refuse(p->request, &err, retry_ms);
        return;
    }
    p->front->prompts->taken++;
    if (!p->is_validated)
        p->front->prompts->unvalidated++;
    answer_taken(p->request, job);
}

/* ---- asking a worker --------------------------------------------------------------------------------------------- */

static void end(struct rv_front_posting *p)
{
    TAILQ_REMOVE(&p->front->prompts->postings, p, link);
    free(p->outputs);
    free(p->node_errors);
    free(p);
}

static void on_gone(void *context)
{
    struct rv_front_posting *p = context;

    if (p->call)
        rv_front_call_cancel(p->call);
    end(p);
}

static char *copy_span(const char *text, struct rv_span span)
{
    return strndup(text + span.at, span.length);
}

/* A worker's answer: true = it is one of this kind, and is used. */
static bool take_refusal(struct rv_front_posting *p, const char *body, size_t length)
{
    struct rv_span whole, error;
    size_t where;

    if (rv_scan_check(body, length, &whole, &where) < 0 || !rv_scan_find(body, whole, "error", &error))
        return false;
    p->front->prompts->refused++;
    rv_front_answer_text(p->request, 400, copy_span(body, whole), whole.length);
    return true;
}

static bool take_approval(struct rv_front_posting *p, const char *body, size_t length)
{
    struct rv_span whole, errors, outputs;
    size_t where;

    if (rv_scan_check(body, length, &whole, &where) < 0 || !rv_scan_find(body, whole, "node_errors", &errors) ||
        !rv_scan_find(body, whole, "outputs_to_execute", &outputs) || !rv_scan_is(body, errors, '{') ||
        !rv_scan_is(body, outputs, '['))
        return false;
    p->node_errors = copy_span(body, errors);
    p->outputs = copy_span(body, outputs);
    return true;
}

static void on_judged(void *context, int r, unsigned status, const char *body, size_t length)
{
    struct rv_front_posting *p = context;
    struct rv_http_request *request = p->request;
    bool refused = r == 0 && status == 400 && take_refusal(p, body, length);

    p->call = NULL;
    p->is_validated = r == 0 && status == 200 && take_approval(p, body, length);
    if (!refused && !p->is_validated)
        rv_log_debug("prompt %s is not validated: %s, HTTP status %u", p->body.prompt_id, strerror(-r), status);
    if (!refused && p->is_bad)
        refuse_bad(p);
    else if (!refused)
        take(p);
    end(p);
    rv_front_answered(request);
}

/* One that does nothing else, if there is one. */
static struct rv_worker_entry *find_judge(const struct rv_front *front, const struct rv_type *type)
{
    struct rv_worker_entry *worker = NULL, *found = NULL;

    while ((worker = rv_front_next(front, worker)))
        if (worker->type == type && (!found || (found->job && !worker->job)))
            found = worker;
    return found;
}

/* False = nobody can be asked. */
static bool ask_worker(struct rv_front_posting *p)
{
    struct rv_worker_entry *worker = find_judge(p->front, p->type);
    struct rv_front_call_options options = {.method = "POST",
                                            .path = VALIDATE_PATH,
                                            .body = p->request->body,
                                            .length = p->request->body_length,
                                            .timeout_us = VALIDATE_US,
                                            .answer_max = VALIDATE_ANSWER_MAX};

    if (!worker || rv_front_call(p->front, worker, &options, on_judged, p, &p->call) < 0) {
        p->call = NULL;
        return false;
    }
    rv_front_wait(p->request, on_gone, p);
    return true;
}

/* ---- the beginning ----------------------------------------------------------------------------------------------- */

/* Which type it is for; false = the answer says why not. */
static bool decide(struct rv_front_posting *p)
{
    const struct rv_front_prompts *prompts = p->front->prompts;
    const char *wanted = MHD_lookup_connection_value(p->request->connection, MHD_HEADER_KIND, RV_FRONT_TYPE_FIELD);
    struct rv_graph *graph = NULL;
    struct rv_route route;
    struct rv_error err = {0};
    int r = rv_graph_parse(p->request->body, p->request->body_length, &graph, &p->why);

    if (!wanted)
        wanted = rv_http_query(&p->request->target, "type");
    p->is_bad = r == -EINVAL;
    p->type = p->front->primary;
    if (r < 0) {
        if (!p->is_bad)
            refuse(p->request, &p->why, 0);
        return p->is_bad;
    }
    r = rv_graph_route(graph, wanted, prompts->types, prompts->type_count, &route, &err);
    rv_graph_destroy(graph);
    if (r < 0) {
        refuse(p->request, &err, 0);
        return false;
    }
    p->type = prompts->type_of[route.type];
    return true;
}

static bool mint_id(struct rv_front_posting *p)
{
    uint8_t random[16];

    if (p->body.prompt_id[0])
        return true;
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        rv_front_answer_error(p->request, 500, "internal", "", 0, "the kernel gives no random bytes");
        return false;
    }
    rv_uuid_write(random, p->body.prompt_id);
    return true;
}

/* True = it is answered. */
static bool post(struct rv_front_posting *p)
{
    struct rv_http_request *request = p->request;
    struct rv_prompt_fault fault = {0};
    struct rv_error err = {0};
    uint64_t retry_ms = 0;
    bool again;

    if (!rv_prompt_is_settled(request))
        return true;
    if (rv_prompt_body_read(request->body ? request->body : "", request->body_length, &p->body, &fault) < 0) {
        p->front->prompts->refused++;
        rv_front_answer_error(request, 400, fault.type, fault.details, 0, "%s", fault.message);
        return true;
    }
    again = p->body.prompt_id[0] && rv_jobs_find(p->front->router, p->body.prompt_id);
    if (!decide(p) || !mint_id(p))
        return true;
    if (!again && rv_submit_check_type(p->front->router, p->type->name, &err, &retry_ms) < 0) {
        refuse(request, &err, retry_ms);
        return true;
    }
    if (!again && ask_worker(p))
        return false;
    p->is_validated = again;
    if (p->is_bad)
        refuse_bad(p);
    else
        take(p);
    return true;
}

void rv_front_prompt_post(struct rv_http_request *request)
{
    struct rv_front *front = request->http->router->front;
    struct rv_front_posting *p = calloc(1, sizeof(*p));

    if (!p) {
        rv_front_answer_error(request, 503, "no_memory", "", RV_FRONT_RETRY_MS, "no memory for the prompt");
        return;
    }
    p->front = front;
    p->request = request;
    TAILQ_INSERT_TAIL(&front->prompts->postings, p, link);
    if (post(p))
        end(p);
}

void rv_front_prompt_get(struct rv_http_request *request)
{
    struct rv_shape shape = {0};

    rv_shape_format(&shape, "{\"exec_info\": {\"queue_remaining\": %u}}",
                    rv_front_queue_remaining(request->http->router->front));
    rv_front_answer_text(request, 200, shape.bytes, shape.length);
}
