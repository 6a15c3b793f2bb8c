#include "shape.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define ROOM_MIN 4096u
#define PREVIEW_TEXT_MAX 256u /* of a file name or a format that is looked at */

static const char *const secrets[] = {"auth_token_comfy_org", "api_key_comfy_org"};

/* ---- the buffer -------------------------------------------------------------------------------------------------- */

void rv_shape_put(struct rv_shape *shape, const char *bytes, size_t length)
{
    if (shape->failed)
        return;
    if (length > shape->room - shape->length) {
        size_t room = shape->room + shape->room / 2 + length + ROOM_MIN;
        char *grown = realloc(shape->bytes, room);

        if (!grown) {
            shape->failed = true;
            return;
        }
        shape->bytes = grown;
        shape->room = room;
    }
    memcpy(shape->bytes + shape->length, bytes, length);
    shape->length += length;
}

void rv_shape_text(struct rv_shape *shape, const char *text)
{
    rv_shape_put(shape, text, strlen(text));
}

void rv_shape_format(struct rv_shape *shape, const char *format, ...)
{
    char text[512];
    va_list ap;
    int n;

    va_start(ap, format);
    n = vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof(text))
        shape->failed = true;
    else
        rv_shape_put(shape, text, (size_t)n);
}

void rv_shape_string(struct rv_shape *shape, const char *text)
{
    rv_shape_text(shape, "\"");
    for (const char *p = text; *p;) {
        size_t n = 0;

        while ((unsigned char)p[n] >= 0x20 && p[n] != '"' && p[n] != '\\' && p[n] != 0x7f)
            n++;
        rv_shape_put(shape, p, n);
        p += n;
        if (*p)
            rv_shape_format(shape, "\\u%04x", (unsigned char)*p++);
    }
    rv_shape_text(shape, "\"");
}

void rv_shape_number(struct rv_shape *shape, double number)
{
    if (number == trunc(number) && fabs(number) < 1e15)
        rv_shape_format(shape, "%.0f", number);
    else
        rv_shape_format(shape, "%.17g", number);
}

void rv_shape_fini(struct rv_shape *shape)
{
    free(shape->bytes);
    *shape = (struct rv_shape){0};
}

static void put_span(struct rv_shape *shape, const char *text, struct rv_span span)
{
    rv_shape_put(shape, text + span.at, span.length);
}

static void put_comma(struct rv_shape *shape, bool *first)
{
    if (!*first)
        rv_shape_text(shape, ", ");
    *first = false;
}

static void put_member(struct rv_shape *shape, const char *text, struct rv_span key, struct rv_span value, bool *first)
{
    put_comma(shape, first);
    put_span(shape, text, key);
    rv_shape_text(shape, ": ");
    put_span(shape, text, value);
}

/* ---- the queue --------------------------------------------------------------------------------------------------- */

static bool is_left_out(const char *text, struct rv_span key)
{
    for (unsigned i = 0; i < sizeof(secrets) / sizeof(secrets[0]); i++)
        if (rv_scan_equals(text, key, secrets[i]))
            return true;
    return rv_scan_equals(text, key, "client_id") || rv_scan_equals(text, key, "create_time");
}

static void put_extra_data(struct rv_shape *shape, const struct rv_shape_prompt *prompt)
{
    struct rv_span key, value;
    uint32_t at = 0;
    bool first = true;

    rv_shape_text(shape, "{");
    while (rv_scan_next(prompt->text, prompt->extra_data, &at, &key, &value))
        if (!is_left_out(prompt->text, key))
            put_member(shape, prompt->text, key, value, &first);
    if (prompt->client_id) {
        put_comma(shape, &first);
        rv_shape_text(shape, "\"client_id\": ");
        rv_shape_string(shape, prompt->client_id);
    }
    put_comma(shape, &first);
    rv_shape_format(shape, "\"create_time\": %" PRIu64 "}", prompt->created_ms);
}

void rv_shape_queue_item(struct rv_shape *shape, const struct rv_shape_prompt *prompt)
{
    rv_shape_text(shape, "[");
    rv_shape_number(shape, prompt->number);
    rv_shape_text(shape, ", ");
    rv_shape_string(shape, prompt->id);
    rv_shape_text(shape, ", ");
    if (prompt->prompt.length)
        put_span(shape, prompt->text, prompt->prompt);
    else
        rv_shape_text(shape, "{}");
    rv_shape_text(shape, ", ");
    put_extra_data(shape, prompt);
    rv_shape_text(shape, ", ");
    rv_shape_text(shape, prompt->outputs ? prompt->outputs : "[]");
    rv_shape_text(shape, "]");
}

/* ---- the history ------------------------------------------------------------------------------------------------- */

static void put_run(struct rv_shape *shape, const struct rv_shape_run *run, bool *first)
{
    put_comma(shape, first);
    rv_shape_text(shape, "\"resvisor\": {\"type\": ");
    rv_shape_string(shape, run->type);
    rv_shape_text(shape, ", \"worker\": ");
    rv_shape_string(shape, run->worker);
    rv_shape_format(shape, ", \"wait_ms\": %.3f, \"load_ms\": %.3f, \"run_ms\": %.3f", (double)run->wait_us / 1000,
                    (double)run->load_us / 1000, (double)run->run_us / 1000);
    rv_shape_format(shape, ", \"read_bytes\": %" PRIu64 ", \"cold\": %s}", run->read_bytes,
                    run->read_bytes ? "true" : "false");
}

static void put_status(struct rv_shape *shape, const char *text, struct rv_span status, const struct rv_shape_run *run)
{
    struct rv_span key, value;
    uint32_t at = 0;
    bool first = true;

    rv_shape_text(shape, "{");
    while (rv_scan_next(text, rv_scan_is(text, status, '{') ? status : (struct rv_span){0}, &at, &key, &value))
        put_member(shape, text, key, value, &first);
    put_run(shape, run, &first);
    rv_shape_text(shape, "}");
}

/* The list that an entry calls its prompt, with the number and the id that the client knows. */
static void put_prompt(struct rv_shape *shape, const char *text, struct rv_span prompt, const char *id,
                       const struct rv_shape_run *run)
{
    struct rv_span item;
    uint32_t at = 0;
    bool first = true;

    rv_shape_text(shape, "[");
    for (unsigned i = 0; rv_scan_next(text, prompt, &at, NULL, &item); i++) {
        put_comma(shape, &first);
        if (i == 0 && run->has_number)
            rv_shape_number(shape, run->number);
        else if (i == 1)
            rv_shape_string(shape, id);
        else
            put_span(shape, text, item);
    }
    rv_shape_text(shape, "]");
}

int rv_shape_history(struct rv_shape *shape, const char *text, struct rv_span entry, const char *id,
                     const struct rv_shape_run *run)
{
    struct rv_span key, value, prompt;
    uint32_t at = 0;
    bool first = true, has_status = false;

    if (!rv_scan_find(text, entry, "prompt", &prompt) || !rv_scan_is(text, prompt, '['))
        return -EINVAL;
    rv_shape_text(shape, "{");
    while (rv_scan_next(text, entry, &at, &key, &value)) {
        bool is_prompt = rv_scan_equals(text, key, "prompt"), is_status = rv_scan_equals(text, key, "status");

        put_comma(shape, &first);
        put_span(shape, text, key);
        rv_shape_text(shape, ": ");
        if (is_prompt && rv_scan_is(text, value, '['))
            put_prompt(shape, text, value, id, run);
        else if (is_status)
            put_status(shape, text, value, run);
        else
            put_span(shape, text, value);
        has_status = has_status || is_status;
    }
    if (!has_status) {
        put_comma(shape, &first);
        rv_shape_text(shape, "\"status\": ");
        put_status(shape, text, (struct rv_span){0}, run);
    }
    rv_shape_text(shape, "}");
    return 0;
}

static void put_message(struct rv_shape *shape, const char *name, const char *id, uint64_t ms)
{
    rv_shape_format(shape, "[\"%s\", {\"prompt_id\": ", name);
    rv_shape_string(shape, id);
    rv_shape_format(shape, ", \"timestamp\": %" PRIu64, ms);
}

void rv_shape_failed(struct rv_shape *shape, const struct rv_shape_prompt *prompt,
                     const struct rv_shape_failure *failure)
{
    rv_shape_text(shape, "{\"prompt\": ");
    rv_shape_queue_item(shape, prompt);
    rv_shape_text(shape, ", \"outputs\": {}, \"status\": {\"status_str\": \"error\", \"completed\": false, "
                         "\"messages\": [");
    put_message(shape, "execution_start", prompt->id, failure->started_ms);
    rv_shape_text(shape, "}], ");
    put_message(shape, failure->interrupted ? "execution_interrupted" : "execution_error", prompt->id,
                failure->ended_ms);
    rv_shape_text(shape, ", \"node_id\": null, \"node_type\": null, \"executed\": []");
    if (!failure->interrupted) {
        rv_shape_text(shape, ", \"exception_message\": ");
        rv_shape_string(shape, failure->message);
        rv_shape_text(shape, ", \"exception_type\": ");
        rv_shape_string(shape, failure->type);
        rv_shape_text(shape, ", \"traceback\": [], \"current_inputs\": {}, \"current_outputs\": []");
    }
    rv_shape_text(shape, "}]]}, \"meta\": {}}");
}

struct rv_span rv_shape_prompt_item(const char *text, struct rv_span entry, unsigned number)
{
    struct rv_span prompt, item;
    uint32_t at = 0;

    if (!rv_scan_find(text, entry, "prompt", &prompt) || !rv_scan_is(text, prompt, '['))
        return (struct rv_span){0};
    for (unsigned i = 0; rv_scan_next(text, prompt, &at, NULL, &item); i++)
        if (i == number)
            return item;
    return (struct rv_span){0};
}

/* ---- the jobs API ------------------------------------------------------------------------------------------------ */

int rv_shape_workflow_id(const char *text, struct rv_span extra_data, char *to, size_t size)
{
    struct rv_span info, workflow, id;

    if (!rv_scan_find(text, extra_data, "extra_pnginfo", &info) || !rv_scan_find(text, info, "workflow", &workflow) ||
        !rv_scan_find(text, workflow, "id", &id) || rv_scan_copy(text, id, to, size) < 0)
        return -ENOENT;
    return 0;
}

static bool member_text(const char *text, struct rv_span object, const char *name, char to[PREVIEW_TEXT_MAX])
{
    struct rv_span value;

    return rv_scan_find(text, object, name, &value) && rv_scan_copy(text, value, to, PREVIEW_TEXT_MAX) == 0;
}

/* The pages show pictures, videos, sounds and 3D objects. */
static bool can_be_shown(const char *text, struct rv_span kind, struct rv_span item)
{
    static const char *const kinds[] = {"images", "video", "audio"}, *const formats[] = {"video/", "audio/"},
                             *const suffixes[] = {".obj", ".fbx", ".gltf", ".glb"};
    char word[PREVIEW_TEXT_MAX];

    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (rv_scan_equals(text, kind, kinds[i]))
            return true;
    if (member_text(text, item, "format", word))
        for (unsigned i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
            if (strncmp(word, formats[i], strlen(formats[i])) == 0)
                return true;
    if (!member_text(text, item, "filename", word))
        return false;
    for (unsigned i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++)
        if (strlen(word) >= strlen(suffixes[i]) &&
            strcasecmp(word + strlen(word) - strlen(suffixes[i]), suffixes[i]) == 0)
            return true;
    return false;
}

struct preview {
    struct rv_span node, kind, item;
    unsigned rank; /* 0 = none, 1 = something, 2 = an output */
};

static unsigned count_items(const char *text, struct rv_span node, struct rv_span kind, struct rv_span items,
                            struct preview *best)
{
    struct rv_span item;
    uint32_t at = 0;
    unsigned count = 0;
    char type[PREVIEW_TEXT_MAX];

    if (!rv_scan_is(text, items, '[') || rv_scan_equals(text, kind, "animated"))
        return 0;
    while (rv_scan_next(text, items, &at, NULL, &item)) {
        unsigned rank;

        if (!rv_scan_is(text, item, '{'))
            continue;
        count++;
        if (best->rank == 2 || !can_be_shown(text, kind, item))
            continue;
        rank = member_text(text, item, "type", type) && strcmp(type, "output") == 0 ? 2 : 1;
        if (rank > best->rank)
            *best = (struct preview){node, kind, item, rank};
    }
    return count;
}

static void put_preview(struct rv_shape *shape, const char *text, const struct preview *preview)
{
    struct rv_span key, value;
    uint32_t at = 0;
    bool first = true;

    rv_shape_text(shape, ", \"preview_output\": {");
    while (rv_scan_next(text, preview->item, &at, &key, &value))
        put_member(shape, text, key, value, &first);
    put_comma(shape, &first);
    rv_shape_text(shape, "\"nodeId\": ");
    put_span(shape, text, preview->node);
    rv_shape_text(shape, ", \"mediaType\": ");
    put_span(shape, text, preview->kind);
    rv_shape_text(shape, "}");
}

static void put_outputs(struct rv_shape *shape, const char *text, struct rv_span outputs)
{
    struct rv_span node, kinds, kind, items;
    struct preview best = {0};
    uint32_t at = 0;
    unsigned count = 0;

    while (rv_scan_next(text, outputs, &at, &node, &kinds)) {
        uint32_t inner = 0;

        while (rv_scan_is(text, kinds, '{') && rv_scan_next(text, kinds, &inner, &kind, &items))
            count += count_items(text, node, kind, items, &best);
    }
    rv_shape_format(shape, "\"outputs_count\": %u", count);
    if (best.rank)
        put_preview(shape, text, &best);
}

struct times {
    struct rv_span start, end, error;
};

static void take_message(const char *text, struct rv_span message, struct times *times)
{
    struct rv_span name, data, timestamp;
    uint32_t at = 0;

    if (!rv_scan_is(text, message, '[') || !rv_scan_next(text, message, &at, NULL, &name) ||
        !rv_scan_next(text, message, &at, NULL, &data) || !rv_scan_is(text, data, '{'))
        return;
    if (!rv_scan_find(text, data, "timestamp", &timestamp))
        timestamp = (struct rv_span){0};
    if (rv_scan_equals(text, name, "execution_start")) {
        times->start = timestamp;
    } else if (rv_scan_equals(text, name, "execution_success") || rv_scan_equals(text, name, "execution_interrupted")) {
        times->end = timestamp;
    } else if (rv_scan_equals(text, name, "execution_error")) {
        times->end = timestamp;
        times->error = data;
    }
}

static void put_named(struct rv_shape *shape, const char *name, const char *text, struct rv_span value)
{
    if (value.length == 0 || rv_scan_is(text, value, 'n'))
        return;
    rv_shape_format(shape, ", \"%s\": ", name);
    put_span(shape, text, value);
}

void rv_shape_summary(struct rv_shape *shape, const char *text, struct rv_span entry)
{
    struct rv_span outputs = {0}, status = {0}, messages = {0}, message;
    struct times times = {0};
    uint32_t at = 0;

    (void)rv_scan_find(text, entry, "outputs", &outputs);
    put_outputs(shape, text, rv_scan_is(text, outputs, '{') ? outputs : (struct rv_span){0});
    if (rv_scan_find(text, entry, "status", &status) && rv_scan_find(text, status, "messages", &messages) &&
        rv_scan_is(text, messages, '['))
        while (rv_scan_next(text, messages, &at, NULL, &message))
            take_message(text, message, &times);
    put_named(shape, "execution_start_time", text, times.start);
    put_named(shape, "execution_end_time", text, times.end);
    put_named(shape, "execution_error", text, times.error);
}
