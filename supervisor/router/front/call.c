/* Small requests of our own to a worker: sent and read whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "upstream.h"

#define CALL_US (60 * RV_SEC)

struct rv_front_call {
    struct rv_front_transfer transfer;
    rv_front_called *done;
    void *context;
    char *body; /* of the request */
    char *answer;
    size_t length, room;
    uint64_t answer_max;
    bool too_large, no_memory;
};

static void free_call(struct rv_front_call *call)
{
    if (call->transfer.front)
        rv_front_transfer_fini(&call->transfer);
    free(call->body);
    free(call->answer);
    free(call);
}

static size_t on_body(char *data, size_t size, size_t count, void *context)
{
    struct rv_front_call *call = context;
    size_t length = size * count, wanted = call->length + length + 1;

    if (wanted - 1 > call->answer_max) {
        call->too_large = true;
        return 0;
    }
    if (wanted > call->room) {
        char *grown = realloc(call->answer, 2 * wanted);

        if (!grown) {
            call->no_memory = true;
            return 0;
        }
        call->answer = grown;
        call->room = 2 * wanted;
    }
    memcpy(call->answer + call->length, data, length);
    call->length += length;
    call->answer[call->length] = '\0';
    return length;
}

static void advance(struct rv_front_transfer *transfer)
{
    struct rv_front_call *call = (struct rv_front_call *)transfer; /* its first member */
    long status = 0;
    int r;

    if (!transfer->done)
        return;
    r = call->too_large ? -EMSGSIZE : call->no_memory ? -ENOMEM : rv_front_transfer_errno(transfer);
    if (r == 0)
        (void)curl_easy_getinfo(transfer->easy, CURLINFO_RESPONSE_CODE, &status);
    rv_front_transfer_fini(transfer);
    call->done(call->context, r, (unsigned)status, call->answer ? call->answer : "", call->length);
    free_call(call);
}

static int prepare(struct rv_front_call *call, struct rv_front *front, struct rv_worker_entry *worker,
                   const struct rv_front_call_options *options)
{
    static const char type[] = "Content-Type", host[] = "Host", local[] = "127.0.0.1";
    const char *content = options->content_type ? options->content_type : "application/json";
    int r = rv_front_transfer_init(&call->transfer, front, worker);
    CURL *easy = call->transfer.easy;

    if (r < 0)
        return r;
    call->transfer.advance = advance;
    call->transfer.whole = true;
    call->transfer.limit_us = options->timeout_us ? options->timeout_us : CALL_US;
    call->answer_max = options->answer_max ? options->answer_max : RV_FRONT_ANSWER_MAX;
    if (options->body) {
        call->body = malloc(options->length + 1);
        if (!call->body)
            return -ENOMEM;
        memcpy(call->body, options->body, options->length);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, call->body);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)options->length);
        r = rv_front_transfer_field(&call->transfer, type, strlen(type), content, strlen(content));
    } else if (strcmp(options->method, "HEAD") == 0) {
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    } else if (strcmp(options->method, "POST") == 0) {
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE, 0L);
    }
    if (r == 0)
        r = rv_front_transfer_field(&call->transfer, host, strlen(host), local, strlen(local));
    if (r == 0) {
        struct curl_slist *longer = curl_slist_append(call->transfer.fields, "Expect:");

        call->transfer.fields = longer ? longer : call->transfer.fields;
        r = longer ? 0 : -ENOMEM;
    }
    curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, options->method);
    curl_easy_setopt(easy, CURLOPT_REQUEST_TARGET, options->path);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, call);
    return r;
}

int rv_front_call(struct rv_front *front, struct rv_worker_entry *worker, const struct rv_front_call_options *options,
                  rv_front_called *done, void *context, struct rv_front_call **ret_call)
{
    struct rv_front_call *call = calloc(1, sizeof(*call));
    int r = call ? prepare(call, front, worker, options) : -ENOMEM;

    if (r < 0) {
        if (call)
            free_call(call);
        return r;
    }
    call->done = done;
    call->context = context;
    *ret_call = call;
    r = rv_front_transfer_queue(&call->transfer);
    if (r < 0)
        free_call(call);
    return r;
}

void rv_front_call_cancel(struct rv_front_call *call)
{
    free_call(call);
}
