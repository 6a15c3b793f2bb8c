/* A Submit: every field is checked, its content gets a digest, and it is kept packed until a worker takes it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "clock.h"
#include "router.h"

#define PRIORITY_LIMIT 1000
#define SUBMIT_BYTES_MAX (256ull << 20) /* packed Submits of all unfinished jobs together */
#define QUEUE_RETRY_MS 1000u            /* a queue has moved by then */

_Static_assert(RV_DIGEST_SIZE == sizeof(XXH128_canonical_t), "XXH3-128");

static int bad(struct rv_error *err, const char *field, const char *what)
{
    return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "%s %s", field, what);
}

int rv_submit_check_id(const char *id, struct rv_error *err)
{
    size_t length = strlen(id);

    if (length == 0 || length > RV_NAME_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "job_id has %zu bytes; 1 to %u are allowed", length,
                            RV_NAME_MAX);
    for (const char *p = id; *p; p++)
        if (!(*p >= 'A' && *p <= 'Z') && !(*p >= 'a' && *p <= 'z') && !(*p >= '0' && *p <= '9') && !strchr("._:-", *p))
            return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST),
                                "job_id has a character that is not allowed at position %zu; allowed are letters, "
                                "digits, and . _ : -",
                                (size_t)(p - id));
    return 0;
}

static int check_params(const Resvisor__V1__Submit *submit, struct rv_error *err)
{
    if (submit->n_params > RV_PARAMS_MAX)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "params has %zu entries; at most %u are allowed",
                            submit->n_params, RV_PARAMS_MAX);
    for (size_t i = 0; i < submit->n_params; i++) {
        size_t key = strlen(submit->params[i]->key), value = strlen(submit->params[i]->value);

        if (key == 0 || key > RV_NAME_MAX)
            return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "params[%zu].key has %zu bytes; 1 to %u are allowed",
                                i, key, RV_NAME_MAX);
        if (value > RV_PARAM_VALUE_MAX)
            return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST),
                                "params[%zu].value has %zu bytes; at most %u are allowed", i, value,
                                RV_PARAM_VALUE_MAX);
    }
    return 0;
}

static int check(const Resvisor__V1__Submit *submit, uint32_t payload_max, struct rv_error *err)
{
    int r = rv_submit_check_id(submit->job_id, err);

    if (r < 0)
        return r;
    if (submit->type[0] == '\0')
        return bad(err, "type", "is missing");
    if (strlen(submit->type) > RV_NAME_MAX)
        return bad(err, "type", "is longer than 64 bytes");
    if (strlen(submit->model) > RV_NAME_MAX)
        return bad(err, "model", "is longer than 64 bytes");
    if (submit->payload.len > payload_max)
        return rv_error_set(err, EMSGSIZE, RV_CODE(TOO_LARGE), "payload has %zu bytes; at most %u KiB are allowed",
                            submit->payload.len, payload_max / 1024);
    if (submit->priority < -PRIORITY_LIMIT || submit->priority > PRIORITY_LIMIT)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "priority is %d; -%d to %d are allowed",
                            submit->priority, PRIORITY_LIMIT, PRIORITY_LIMIT);
    if (submit->wait_ms > RV_WAIT_MAX_MS)
        return rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), "wait_ms is %llu; at most %llu are allowed",
                            (unsigned long long)submit->wait_ms, (unsigned long long)RV_WAIT_MAX_MS);
    return check_params(submit, err);
}

/*
 * Packs what the job is, and nothing of how it was sent. *ret_payload_at is where the payload's bytes begin: fields are
 * packed in the order of their numbers, so what is before it is known from the size without it.
 */
static int pack(const Resvisor__V1__Submit *from, const char *model, uint8_t **ret_bytes, uint32_t *ret_length,
                uint32_t *ret_payload_at)
{
    Resvisor__V1__Submit submit = RESVISOR__V1__SUBMIT__INIT;
    uint32_t tail;

    submit.job_id = from->job_id;
    submit.type = from->type;
    submit.model = (char *)model;
    submit.n_params = from->n_params;
    submit.params = from->params;
    submit.payload = from->payload;
    *ret_length = (uint32_t)resvisor__v1__submit__get_packed_size(&submit);
    submit.priority = from->priority;
    submit.retry_on_worker_death = from->retry_on_worker_death;
    tail = (uint32_t)resvisor__v1__submit__get_packed_size(&submit) - *ret_length;
    *ret_payload_at = *ret_length - (uint32_t)from->payload.len;
    *ret_length += tail;
    *ret_bytes = malloc(*ret_length ? *ret_length : 1);
    if (!*ret_bytes)
        return -ENOMEM;
    (void)resvisor__v1__submit__pack(&submit, *ret_bytes);
    return 0;
}

/* Texts are told apart by their NUL. */
static void digest_text(XXH3_state_t *state, const char *text)
{
    (void)XXH3_128bits_update(state, text, strlen(text) + 1);
}

/* Of what the job is: not of its priority, nor of fields that this version does not know. */
static void digest_of(const Resvisor__V1__Submit *submit, uint8_t digest[RV_DIGEST_SIZE])
{
    uint64_t numbers[] = {submit->n_params, submit->payload.len, submit->retry_on_worker_death != 0};
    XXH128_canonical_t canonical;
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    (void)XXH3_128bits_reset(&state);
    (void)XXH3_128bits_update(&state, numbers, sizeof(numbers));
    digest_text(&state, submit->job_id);
    digest_text(&state, submit->type);
    digest_text(&state, submit->model);
    for (size_t i = 0; i < submit->n_params; i++) {
        digest_text(&state, submit->params[i]->key);
        digest_text(&state, submit->params[i]->value);
    }
    if (submit->payload.len > 0)
        (void)XXH3_128bits_update(&state, submit->payload.data, submit->payload.len);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    memcpy(digest, &canonical, RV_DIGEST_SIZE);
}

static int check_type(struct rv_router *router, const char *wanted, struct rv_error *err, uint64_t *ret_retry_ms)
{
    struct rv_type *type = rv_types_find(router, wanted);
    char name[4 * RV_NAME_MAX + 8];

    if (!type)
        return rv_error_set(err, ENOENT, RV_CODE(NO_SUCH_TYPE), "no workflow type is named '%s'",
                            rv_escape(name, sizeof(name), wanted, strlen(wanted)));
    if (type->failed)
        return rv_error_set(err, EIO, RV_CODE(TYPE_FAILED), "type %s has failed%s%s", type->name,
                            type->detail[0] ? ": " : "", type->detail);
    if (type->queued >= type->queue_limit) {
        *ret_retry_ms = QUEUE_RETRY_MS;
        return rv_error_set(err, EBUSY, RV_CODE(QUEUE_FULL), "the queue of %s holds %u jobs, as many as it may",
                            type->name, type->queued);
    }
    return 0;
}

/* Numbers order equal priorities, as in ComfyUI: the lower one is first. Those of `front` are negative. */
static double number_of(struct rv_router *router, const struct rv_submit_options *options)
{
    double minted = (double)router->next_number++;

    return options->has_number ? options->number : options->front ? -minted : minted;
}

/* Makes the record and puts it into its queue; takes `bytes` over. */
static int add(struct rv_router *router, const Resvisor__V1__Submit *submit, const struct rv_submit_options *options,
               const char *model, uint8_t *bytes, struct rv_job_record **ret_job, struct rv_error *err)
{
    struct rv_job_record *job = rv_jobs_add(router, submit->job_id, submit->type, err);

    if (!job) {
        free(bytes);
        return -EBUSY;
    }
    (void)snprintf(job->model, sizeof(job->model), "%s", model);
    job->submit = bytes;
    job->priority = submit->priority;
    job->retry = submit->retry_on_worker_death;
    job->submitted_ms = rv_wall_ms();
    job->number = number_of(router, options);
    *ret_job = job;
    return 0;
}

int rv_submit_check_type(struct rv_router *router, const char *type, struct rv_error *err, uint64_t *ret_retry_ms)
{
    if (router->stopping)
        return rv_error_set(err, ESHUTDOWN, RV_CODE(SHUTTING_DOWN), "resvisor is stopping and takes no new jobs");
    return check_type(router, type, err, ret_retry_ms);
}

int rv_submit_accept(struct rv_router *router, const Resvisor__V1__Submit *submit,
                     const struct rv_submit_options *options, struct rv_job_record **ret_job, struct rv_error *err,
                     uint64_t *ret_retry_ms)
{
    static const struct rv_submit_options usual = {.payload_max = RV_PAYLOAD_MAX};
    uint8_t digest[RV_DIGEST_SIZE], *bytes = NULL;
    uint32_t length = 0, payload_at = 0;
    struct rv_job_record *job;
    struct rv_type *type;
    const char *model;
    int r;

    options = options ? options : &usual;
    r = check(submit, options->payload_max, err);
    if (r < 0)
        return r;
    digest_of(submit, digest);
    job = rv_jobs_find(router, submit->job_id);
    if (job) {
        if (job->has_digest && memcmp(job->digest, digest, RV_DIGEST_SIZE) != 0)
            return rv_error_set(err, EEXIST, RV_CODE(JOB_EXISTS), "job %s exists with other content", job->id);
        *ret_job = job;
        return 0;
    }
    r = rv_submit_check_type(router, submit->type, err, ret_retry_ms);
    if (r < 0)
        return r;
    type = rv_types_find(router, submit->type);
    model = submit->model[0] ? submit->model : type->first_model;
    r = pack(submit, model, &bytes, &length, &payload_at);
    if (r < 0)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for a job of %u bytes", length);
    if (router->submit_bytes + length > SUBMIT_BYTES_MAX) {
        free(bytes);
        *ret_retry_ms = QUEUE_RETRY_MS;
        return rv_error_set(err, EBUSY, RV_CODE(LIMIT), "unfinished jobs hold %llu MiB, as much as they may",
                            SUBMIT_BYTES_MAX >> 20);
    }
    r = add(router, submit, options, model, bytes, &job, err);
    if (r < 0)
        return r;
    memcpy(job->digest, digest, RV_DIGEST_SIZE);
    job->has_digest = true;
    job->submit_length = length;
    job->payload_at = payload_at;
    job->payload_length = (uint32_t)submit->payload.len;
    router->submit_bytes += length;
    if (options->added)
        options->added(job, options->context);
    rv_jobs_enqueue(router, job, false);
    rv_events_job(router, job);
    rv_workers_dispatch(router, type);
    *ret_job = job;
    return 0;
}
