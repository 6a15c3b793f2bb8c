/* Responses. Every one is made here, so that headers are the same everywhere. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../front/front.h"
#include "http.h"

#define NO_STORE "no-store" /* all of it is how things stand now */

void rv_http_add_header(struct rv_http_request *request, const char *name, const char *value)
{
    if (request->response)
        (void)MHD_add_response_header(request->response, name, value);
}

static void take_response(struct rv_http_request *request, unsigned status, const char *type,
                          struct MHD_Response *response)
{
    if (request->response)
        MHD_destroy_response(request->response);
    request->response = response;
    request->status = status;
    if (type)
        rv_http_add_header(request, "Content-Type", type);
    rv_http_add_header(request, "Cache-Control", NO_STORE);
    rv_http_add_header(request, "X-Content-Type-Options", "nosniff");
}

void rv_http_answer_text(struct rv_http_request *request, unsigned status, const char *type, char *text, size_t length)
{
    struct MHD_Response *response = text ? MHD_create_response_from_buffer(length, text, MHD_RESPMEM_MUST_FREE) : NULL;

    if (text && !response)
        free(text);
    take_response(request, status, type, response);
}

void rv_http_answer_json(struct rv_http_request *request, unsigned status, json_t *json)
{
    char *text = json ? json_dumps(json, JSON_COMPACT) : NULL;

    json_decref(json);
    rv_http_answer_text(request, status, "application/json", text, text ? strlen(text) : 0);
}

void rv_http_answer_error(struct rv_http_request *request, const struct rv_error *err, uint64_t retry_after_ms,
                          unsigned status)
{
    const struct rv_error_row *row = rv_error_row(err->code);
    char seconds[24];

    if (status == 0)
        status = row->http_status;
    if (request->front)
        rv_front_answer_rv_error(request, err, retry_after_ms, status);
    else
        rv_http_answer_json(request, status,
                            json_pack("{s:{s:s, s:s, s:s, s:I}}", "error", "code", row->name, "message", err->message,
                                      "remedy", err->remedy, "retry_after_ms", (json_int_t)retry_after_ms));
    if (!request->front && (row->retryable || retry_after_ms)) {
        (void)snprintf(seconds, sizeof(seconds), "%llu",
                       (unsigned long long)(retry_after_ms > 1000 ? (retry_after_ms + 999) / 1000 : 1));
        rv_http_add_header(request, "Retry-After", seconds);
    }
    if (status == 401)
        rv_http_add_header(request, "WWW-Authenticate", "Bearer realm=\"resvisor\"");
}

void rv_http_refuse(struct rv_http_request *request, unsigned status, int code, const char *format, ...)
{
    char text[RV_ERROR_TEXT_MAX];
    struct rv_error err = {0};
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    (void)rv_error_set(&err, 0, code, "%s", text);
    rv_http_answer_error(request, &err, 0, status);
}
