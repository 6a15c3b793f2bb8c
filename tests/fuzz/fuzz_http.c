/*
 * What the HTTP front reads itself: targets, ranges, hosts, jobs in JSON. The first byte chooses. What is accepted must
 * hold what its reader relies on.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "router/http/http.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void target(const char *text, size_t size)
{
    struct rv_http_target found;
    const char *why = NULL;
    unsigned status = rv_http_parse_target(text, size, &found, &why);

    if (status) {
        if (status < 400 || !why)
            abort();
        return;
    }
    for (unsigned i = 0; i < found.segment_count; i++)
        if (!*found.segments[i] || strcmp(found.segments[i], "..") == 0 || !rv_text_is_valid(found.segments[i]))
            abort();
    for (unsigned i = 0; i < found.query_count; i++)
        if (!rv_text_is_valid(found.query[i].name) || !rv_text_is_valid(found.query[i].value))
            abort();
    free(found.text);
}

static void range(const char *text, size_t size)
{
    static const uint64_t sizes[] = {0, 1, 1000, UINT64_MAX};

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint64_t first, length;

        if (rv_http_parse_range(text, size, sizes[i], &first, &length) == RV_HTTP_RANGE_PART &&
            (length == 0 || first >= sizes[i] || length > sizes[i] - first))
            abort();
    }
}

static void host(const char *text, size_t size)
{
    (void)rv_http_host_is_local(text, size);
    (void)rv_http_origin_matches(text, size, text, size / 2);
}

static void submit(const char *text, size_t size)
{
    static struct rv_http_submit s;
    struct rv_error err = {0};

    memset(&s, 0, sizeof(s));
    if (rv_http_submit_parse(text, size, &s, &err) < 0) {
        if (!err.code || !rv_text_is_valid(err.message))
            abort();
    } else {
        free(malloc(resvisor__v1__submit__get_packed_size(&s.submit)));
    }
    rv_http_submit_fini(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const parts[])(const char *, size_t) = {target, range, host, submit};
    char *text;

    if (size < 1)
        return 0;
    text = malloc(size); /* exactly as long, and with a NUL where some readers want one */
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    parts[data[0] % 4](text, size - 1);
    free(text);
    return 0;
}
