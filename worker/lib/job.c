/* Jobs: what the executor reads, and how it answers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "worker.h"

#define PROGRESS_TEXT_MAX 256

struct rv_job *rv_job_create(struct rv_worker *worker, struct rv_frame *frame)
{
    struct rv_job *job = calloc(1, sizeof(*job));

    if (!job)
        return NULL;
    job->magic = RV_JOB_MAGIC;
    job->worker = worker;
    job->frame = *frame;
    *frame = (struct rv_frame)RV_FRAME_INIT;
    job->start = job->frame.message->job_start;
    job->submit = job->start->submit;
    job->arrived_us = rv_now_us();
    atomic_init(&job->cancelled, false);
    atomic_init(&job->alive_us, job->arrived_us);
    return job;
}

static void output_destroy(struct rv_output *output)
{
    if (output && output->fd >= 0)
        (void)close(output->fd);
    free(output);
}

void rv_job_destroy(struct rv_job *job)
{
    if (!job)
        return;
    for (unsigned i = 0; i < job->output_count; i++)
        output_destroy(job->outputs[i]);
    rv_frame_fini(&job->frame);
    job->magic = 0;
    free(job);
}

const char *rv_job_id(const struct rv_job *job)
{
    return job->submit->job_id;
}

const char *rv_job_model(const struct rv_job *job)
{
    return job->submit->model;
}

uint32_t rv_job_param_count(const struct rv_job *job)
{
    return (uint32_t)job->submit->n_params;
}

void rv_job_param_at(const struct rv_job *job, uint32_t i, const char **ret_key, const char **ret_value)
{
    bool there = i < job->submit->n_params;

    if (ret_key)
        *ret_key = there ? job->submit->params[i]->key : "";
    if (ret_value)
        *ret_value = there ? job->submit->params[i]->value : "";
}

const char *rv_job_param(const struct rv_job *job, const char *key, const char *fallback)
{
    for (size_t i = 0; i < job->submit->n_params; i++)
        if (strcmp(job->submit->params[i]->key, key) == 0)
            return job->submit->params[i]->value;
    return fallback;
}

const void *rv_job_payload(const struct rv_job *job, size_t *ret_size)
{
    *ret_size = job->submit->payload.len;
    return job->submit->payload.data;
}

bool rv_job_cancelled(const struct rv_job *job)
{
    return atomic_load_explicit(&job->cancelled, memory_order_relaxed);
}

static void sign_of_life(struct rv_job *job)
{
    atomic_store_explicit(&job->alive_us, rv_now_us(), memory_order_relaxed);
}

/* Locked. A router that does not read gets no progress: a later one says more. Results go first. */
static void send_progress(struct rv_job *job, uint64_t done, uint64_t total, const char *text)
{
    Rv__Frame frame = RV__FRAME__INIT;
    Rv__JobProgress progress = RV__JOB_PROGRESS__INIT;
    char shown[PROGRESS_TEXT_MAX];

    progress.job_id = job->submit->job_id;
    progress.done = done;
    progress.total = total;
    if (text)
        progress.text = rv_escape(shown, sizeof(shown), text, strnlen(text, sizeof(shown)));
    frame.body_case = RV__FRAME__BODY_JOB_PROGRESS;
    frame.job_progress = &progress;
    (void)rv_frame_send(job->worker->router, &frame, NULL, 0, 0);
}

bool rv_job_progress(struct rv_job *job, uint64_t done, uint64_t total, const char *text)
{
    struct rv_worker *w = job->worker;
    uint64_t now = rv_now_us();

    atomic_store_explicit(&job->alive_us, now, memory_order_relaxed);
    (void)pthread_mutex_lock(&w->lock);
    if (now >= job->next_progress_us && w->router >= 0 && rv_results_unsent(w) == 0) {
        job->next_progress_us = now + RV_PROGRESS_SEND_US;
        send_progress(job, done, total, text);
    }
    (void)pthread_mutex_unlock(&w->lock);
    return !rv_job_cancelled(job);
}

static int check_output(const struct rv_job *job, const char *name, const char *content_type, const void *data,
                        uint64_t size, struct rv_error *err)
{
    size_t length = name ? strlen(name) : 0;

    if (length == 0 || length > RV_OUTPUT_NAME_MAX || strchr(name, '/') || strcmp(name, ".") == 0 ||
        strcmp(name, "..") == 0 || !rv_text_is_valid(name))
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "an output's name must be a file name of 1 to %u bytes",
                            RV_OUTPUT_NAME_MAX);
    if (!content_type || strlen(content_type) > RV_CONTENT_TYPE_MAX || !rv_text_is_valid(content_type))
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "an output's content type must have up to %u bytes",
                            RV_CONTENT_TYPE_MAX);
    if (!data && size > 0)
        return rv_error_set(err, EINVAL, ERROR(BAD_REQUEST), "an output without data");
    if (size > RV_OUTPUT_MAX)
        return rv_error_set(err, EMSGSIZE, ERROR(TOO_LARGE), "an output of %llu bytes; at most %llu are allowed",
                            (unsigned long long)size, RV_OUTPUT_MAX);
    if (job->output_count >= RV_OUTPUTS_MAX)
        return rv_error_set(err, E2BIG, ERROR(LIMIT), "more than %u outputs of one job", RV_OUTPUTS_MAX);
    return 0;
}

int rv_job_add_output(struct rv_job *job, const char *name, const char *content_type, const void *data, uint64_t size,
                      struct rv_failure *err)
{
    struct rv_error error = {0};
    struct rv_output *output = NULL;
    int r = check_output(job, name, content_type, data, size, &error);

    sign_of_life(job);
    if (r == 0 && !(output = calloc(1, sizeof(*output))))
        r = rv_error_set(&error, ENOMEM, ERROR(NO_MEMORY), "no memory for an output");
    if (r < 0)
        return rv_failure_from(err, &error, r);
    memcpy(output->name, name, strlen(name));
    memcpy(output->content_type, content_type, strlen(content_type));
    output->size = size;
    output->fd = rv_sealed_create("resvisor-output", data, size);
    if (output->fd < 0) {
        r = output->fd == -ENOMEM ? -ENOSPC : output->fd;
        rv_error_set(&error, -r, r == -EMFILE || r == -ENFILE ? ERROR(LIMIT) : ERROR(NO_MEMORY),
                     "cannot keep an output of %llu bytes: %s", (unsigned long long)size, strerror(-output->fd));
        goto out;
    }
    sign_of_life(job);
    (void)pthread_mutex_lock(&job->worker->lock);
    r = job->output_count < RV_OUTPUTS_MAX ? 0 : -E2BIG; /* another thread of the job may have added some */
    if (r == 0) {
        job->outputs[job->output_count++] = output;
        output = NULL;
    }
    (void)pthread_mutex_unlock(&job->worker->lock);
    if (r < 0)
        rv_error_set(&error, E2BIG, ERROR(LIMIT), "more than %u outputs of one job", RV_OUTPUTS_MAX);
out:
    output_destroy(output);
    return rv_failure_from(err, &error, r);
}

void rv_job_count_load(struct rv_job *job, uint64_t load_us, uint64_t read_bytes)
{
    (void)pthread_mutex_lock(&job->worker->lock);
    job->load_us += load_us;
    job->read_bytes += read_bytes;
    (void)pthread_mutex_unlock(&job->worker->lock);
}

/* On failure the job lives on: its end could not be written down. */
static int end_job(struct rv_job *job, int code, const char *message)
{
    struct rv_worker *w = job->worker;
    struct rv_result *result = NULL;
    int r;

    if (rv_fork_happened(w->fork_number))
        return -EPERM;
    (void)pthread_mutex_lock(&w->lock);
    r = rv_result_create(job, code, message, &result);
    if (r == 0) {
        w->running = NULL;
        rv_results_add(w, result);
    }
    (void)pthread_mutex_unlock(&w->lock);
    if (r == 0)
        rv_job_destroy(job);
    return r;
}

int rv_job_finish(struct rv_job *job)
{
    if (!job || job->magic != RV_JOB_MAGIC)
        return -EINVAL;
    return end_job(job, ERROR(OK), "");
}

int rv_job_fail(struct rv_job *job, int code, const char *message)
{
    char shown[RV_ERROR_TEXT_MAX];

    if (!job || job->magic != RV_JOB_MAGIC)
        return -EINVAL;
    /* ERROR_SHUTTING_DOWN is the library's own word for a job that it did not start: the router gives it to another
     * worker. */
    if (code <= 0 || code >= rv_error_count() || code == ERROR(SHUTTING_DOWN))
        code = rv_job_cancelled(job) ? ERROR(CANCELLED) : ERROR(JOB_FAILED);
    if (!message || !*message)
        message = rv_error_row(code)->text;
    return end_job(job, code, rv_escape(shown, sizeof(shown), message, strlen(message)));
}
