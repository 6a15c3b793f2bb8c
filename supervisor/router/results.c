/* Outputs kept for fetching, bounded by age, number and bytes; and who may forget what. */
#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "clock.h"
#include "log.h"
#include "memory.h"
#include "router.h"

#define RESULT_COUNT_DEFAULT 256u
#define OTHER_FDS 512u /* descriptors for everything that is not a result: nanomsg spins when it gets none */

static void on_age(int socket, short what, void *context);

/* Raises the soft limit of descriptors, and keeps enough of them free. */
static uint32_t room_for_results(uint32_t wanted)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return wanted;
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
            (void)getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur != RLIM_INFINITY && wanted + OTHER_FDS > limit.rlim_cur) {
        uint32_t less =
            limit.rlim_cur > 2 * OTHER_FDS ? (uint32_t)limit.rlim_cur - OTHER_FDS : (uint32_t)limit.rlim_cur / 2;

        rv_log_warning("only %u results are kept instead of %u: the limit of open files is %llu", less, wanted,
                       (unsigned long long)limit.rlim_cur);
        return less;
    }
    return wanted;
}

int rv_results_init(struct rv_router *router)
{
    uint32_t count = router->setup->result_count;

    TAILQ_INIT(&router->kept);
    router->kept_limit = room_for_results(count ? count : RESULT_COUNT_DEFAULT);
    router->kept_timer = event_new(router->base, -1, 0, on_age, router);
    return router->kept_timer ? 0 : -ENOMEM;
}

void rv_results_fini(struct rv_router *router)
{
    if (router->kept_timer)
        event_free(router->kept_timer);
    router->kept_timer = NULL;
}

static void close_outputs(struct rv_job_record *job)
{
    for (uint32_t i = 0; i < job->output_count; i++) {
        if (job->outputs[i].fd >= 0)
            (void)close(job->outputs[i].fd);
        job->outputs[i].fd = -1;
    }
}

static bool name_is_plain(const char *name, bool slash_allowed)
{
    size_t length = strlen(name);

    if (length == 0 || length > RV_OUTPUT_NAME_MAX || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return false;
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f || (*p == '/' && !slash_allowed))
            return false;
    return true;
}

static int check_outputs(const Rv__JobResult *result, const struct rv_frame *frame, struct rv_error *err)
{
    if (result->n_outputs > RV_OUTPUTS_MAX || result->n_outputs != frame->fd_count)
        return rv_error_set(err, EPROTO, RV_CODE(INTERNAL), "the worker sent %zu outputs with %u descriptors",
                            result->n_outputs, frame->fd_count);
    for (size_t i = 0; i < result->n_outputs; i++) {
        const Resvisor__V1__Output *output = result->outputs[i];

        if (!name_is_plain(output->name, false) || !name_is_plain(output->content_type, true))
            return rv_error_set(err, EPROTO, RV_CODE(INTERNAL),
                                "output %zu of the worker has no plain file name or MIME type of 1 to %u bytes", i,
                                RV_OUTPUT_NAME_MAX);
        if (output->size > RV_OUTPUT_MAX || rv_sealed_check(frame->fds[i], output->size) < 0)
            return rv_error_set(err, EPROTO, RV_CODE(INTERNAL),
                                "output %zu of the worker is not sealed memory of %llu bytes", i,
                                (unsigned long long)output->size);
    }
    return 0;
}

int rv_results_take(struct rv_router *router, struct rv_job_record *job, struct rv_frame *frame, struct rv_error *err)
{
    const Rv__JobResult *result = frame->message->job_result;
    struct rv_output *outputs;
    uint64_t bytes = 0;
    int r = check_outputs(result, frame, err);

    if (r < 0 || result->n_outputs == 0)
        return r;
    for (size_t i = 0; i < result->n_outputs; i++)
        bytes += result->outputs[i]->size;
    if (router->setup->result_bytes && bytes > router->setup->result_bytes)
        return rv_error_set(err, EMSGSIZE, RV_CODE(TOO_LARGE),
                            "the outputs hold %llu bytes; rpc.result_bytes allows %llu for all results together",
                            (unsigned long long)bytes, (unsigned long long)router->setup->result_bytes);
    outputs = calloc(result->n_outputs, sizeof(*outputs));
    if (!outputs)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory to keep the job's result");
    for (size_t i = 0; i < result->n_outputs; i++) {
        (void)snprintf(outputs[i].name, sizeof(outputs[i].name), "%s", result->outputs[i]->name);
        (void)snprintf(outputs[i].content_type, sizeof(outputs[i].content_type), "%s",
                       result->outputs[i]->content_type);
        outputs[i].size = result->outputs[i]->size;
        outputs[i].fd = rv_frame_take_fd(frame, (unsigned)i);
    }
    job->outputs = outputs;
    job->output_count = (uint32_t)result->n_outputs;
    job->output_bytes = bytes;
    return 0;
}

int rv_results_add(struct rv_router *router, struct rv_job_record *job, const char *name, const char *content_type,
                   int fd, uint64_t size)
{
    struct rv_output *output = job->output_count == 0 ? calloc(1, sizeof(*output)) : NULL;

    if (!output) {
        (void)close(fd);
        return job->output_count ? -EEXIST : -ENOMEM;
    }
    (void)snprintf(output->name, sizeof(output->name), "%s", name);
    (void)snprintf(output->content_type, sizeof(output->content_type), "%s", content_type);
    output->fd = fd;
    output->size = size;
    free(job->outputs);
    job->outputs = output;
    job->output_count = 1; /* its weight stays 1 */
    job->output_bytes = size;
    if (job->kept)
        router->kept_bytes += size;
    else
        rv_results_keep(router, job, job->holder);
    return 0;
}

/* A result without outputs counts too: its worker keeps it until it is acknowledged. */
static uint32_t weight(const struct rv_job_record *job)
{
    return job->output_count ? job->output_count : 1;
}

static void acknowledge(struct rv_job_record *job)
{
    struct rv_worker_entry *holder = job->holder;

    job->holder = NULL;
    if (holder)
        rv_workers_send_ack(holder, job->id);
}

static void arm(struct rv_router *router)
{
    struct rv_job_record *oldest = TAILQ_FIRST(&router->kept);
    uint64_t age_us = router->setup->result_age_ms * RV_MSEC, now = rv_now_us(), left = 1;
    struct timeval tv;

    (void)event_del(router->kept_timer);
    if (!oldest || age_us == 0)
        return;
    if (oldest->ended_us + age_us > now)
        left = oldest->ended_us + age_us - now;
    tv = rv_timeval(left);
    (void)event_add(router->kept_timer, &tv);
}

void rv_results_drop(struct rv_router *router, struct rv_job_record *job)
{
    bool was_first = job == TAILQ_FIRST(&router->kept);

    close_outputs(job);
    acknowledge(job);
    if (!job->kept)
        return;
    job->kept = false;
    TAILQ_REMOVE(&router->kept, job, kept_link);
    router->kept_bytes -= job->output_bytes;
    router->kept_count -= weight(job);
    if (was_first)
        arm(router);
}

static void on_age(int socket, short what, void *context)
{
    struct rv_router *router = context;
    uint64_t age_us = router->setup->result_age_ms * RV_MSEC, now = rv_now_us();
    struct rv_job_record *oldest;

    (void)socket;
    (void)what;
    while ((oldest = TAILQ_FIRST(&router->kept)) && oldest->ended_us + age_us <= now)
        rv_results_drop(router, oldest);
    arm(router);
}

void rv_results_keep(struct rv_router *router, struct rv_job_record *job, struct rv_worker_entry *holder)
{
    uint64_t limit = router->setup->result_bytes ? router->setup->result_bytes : UINT64_MAX;

    job->holder = holder;
    job->kept = true;
    router->kept_bytes += job->output_bytes;
    router->kept_count += weight(job);
    TAILQ_INSERT_TAIL(&router->kept, job, kept_link);
    while (TAILQ_FIRST(&router->kept) != job && (router->kept_bytes > limit || router->kept_count > router->kept_limit))
        rv_results_drop(router, TAILQ_FIRST(&router->kept));
    if (TAILQ_FIRST(&router->kept) == job)
        arm(router);
}

void rv_results_told(struct rv_router *router, struct rv_job_record *job)
{
    if (!rv_jobs_has_ended(job))
        return;
    job->told = true;
    /* Outputs that can still be fetched stay with the worker too (the same memory, so at no cost): should this router
     * die, the next one has them again. They are acknowledged when they are dropped here. */
    if (job->output_count == 0) {
        acknowledge(job);
        rv_results_drop(router, job);
    }
}
