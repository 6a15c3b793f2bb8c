/* Answers in ComfyUI's shape, and waiting for them. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "front.h"

void rv_front_answer_text(struct rv_http_request *request, unsigned status, char *text, size_t length)
{
    rv_http_answer_text(request, status, "application/json; charset=utf-8", text, length);
}

void rv_front_answer_json(struct rv_http_request *request, unsigned status, json_t *json)
{
    char *text = json ? json_dumps(json, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;

    json_decref(json);
    rv_front_answer_text(request, status, text, text ? strlen(text) : 0);
}

static void answer(struct rv_http_request *request, unsigned status, const char *type, const char *message,
                   const char *details, uint64_t retry_after_ms)
{
    char seconds[24];

    rv_front_answer_json(request, status,
                         json_pack("{s:{s:s, s:s, s:s, s:{}}, s:{}}", "error", "type", type, "message", message,
                                   "details", details, "extra_info", "node_errors"));
    if (retry_after_ms) {
        (void)snprintf(seconds, sizeof(seconds), "%llu", (unsigned long long)((retry_after_ms + 999) / 1000));
        rv_http_add_header(request, "Retry-After", seconds);
    }
}

void rv_front_answer_error(struct rv_http_request *request, unsigned status, const char *type, const char *details,
                           uint64_t retry_after_ms, const char *format, ...)
{
    char text[RV_ERROR_TEXT_MAX];
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    answer(request, status, type, text, details, retry_after_ms);
}

void rv_front_answer_rv_error(struct rv_http_request *request, const struct rv_error *err, uint64_t retry_after_ms,
                              unsigned status)
{
    const struct rv_error_row *row = rv_error_row(err->code);

    answer(request, status ? status : row->http_status, row->name, err->message, err->remedy,
           row->retryable && !retry_after_ms ? RV_FRONT_RETRY_MS : retry_after_ms);
}

void rv_front_answer_not_ready(struct rv_http_request *request, const struct rv_type *type)
{
    const struct rv_front *front = request->http->router->front;
    const struct rv_type *of = type ? type : front->primary;

    if (of->failed) {
        char details[2 * RV_NAME_MAX + 96];

        (void)snprintf(details, sizeof(details), "`resvisor logs %s` says more; `resvisor restart %s` starts it again",
                       of->name, of->name);
        rv_front_answer_error(request, 503, "worker_failed", details, RV_FRONT_RETRY_MS, "type %s has failed: %s",
                              of->name, of->detail);
    } else
        rv_front_answer_error(request, 503, "worker_not_ready", "try again in a moment", RV_FRONT_RETRY_MS,
                              "no worker of type %s is ready: it is starting or restarting", of->name);
}

void rv_front_answer_failure(struct rv_http_request *request, const char *worker, int r)
{
    if (r == -ECONNREFUSED)
        rv_front_answer_error(request, 503, "worker_not_ready", "try again in a moment", RV_FRONT_RETRY_MS,
                              "worker %s cannot be reached: it is restarting, or its server has ended", worker);
    else if (r == -ETIMEDOUT)
        rv_front_answer_error(request, 504, "worker_timeout", "`resvisor status` says what it does", 0,
                              "worker %s does not answer: it was silent for too long", worker);
    else if (r == -ECONNRESET || r == 0)
        rv_front_answer_error(request, 502, "worker_died", "`resvisor status` and `resvisor logs` say more",
                              RV_FRONT_RETRY_MS, "worker %s closed the connection before its answer was there", worker);
    else if (r == -ENOMEM)
        rv_http_refuse(request, 0, RV_CODE(NO_MEMORY), "no memory for the answer of worker %s", worker);
    else
        rv_front_answer_error(request, 502, "worker_answer_invalid", "", 0,
                              "worker %s's answer is too large, or is not HTTP as it should be", worker);
}

void rv_front_wait(struct rv_http_request *request, void (*gone)(void *context), void *context)
{
    request->waiting = true;
    request->front_gone = gone;
    request->front_context = context;
}

void rv_front_answered(struct rv_http_request *request)
{
    request->waiting = false;
    request->front_gone = NULL;
    rv_http_resume(request);
}
