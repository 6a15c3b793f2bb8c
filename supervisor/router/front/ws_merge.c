/*
 * The events of ComfyUI that the front door understands. ComfyUI writes `type` first, so the kind is read from the
 * first bytes; a text with another first member is parsed, unless it is large.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ws_parts.h"

static const struct {
    const char *name;
    enum rv_ws_kind kind;
} kinds[] = {
    {"status", RV_WS_STATUS},
    {"feature_flags", RV_WS_FEATURE_FLAGS},
    {"execution_start", RV_WS_EXECUTION_START},
    {"executing", RV_WS_EXECUTING},
    {"execution_success", RV_WS_EXECUTION_SUCCESS},
    {"execution_error", RV_WS_EXECUTION_ERROR},
    {"execution_interrupted", RV_WS_EXECUTION_INTERRUPTED},
};

static enum rv_ws_kind kind_of(const char *name, size_t length)
{
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strlen(kinds[i].name) == length && memcmp(kinds[i].name, name, length) == 0)
            return kinds[i].kind;
    return RV_WS_OTHER;
}

static const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'))
        at++;
    return at;
}

/* The string at `at`, if it has no escapes; its end, or NULL. */
static const char *read_string(const char *at, const char *end, const char **ret_begin)
{
    if (at >= end || *at != '"')
        return NULL;
    *ret_begin = ++at;
    while (at < end && *at != '"' && *at != '\\')
        at++;
    return at < end && *at == '"' ? at : NULL;
}

/* False = `type` is not the first member, or is written in a way that needs a parser. */
static bool read_first_member(const char *text, size_t length, enum rv_ws_kind *ret_kind)
{
    const char *at = text, *end = text + length, *begin, *stop;

    at = skip_blanks(at, end);
    if (at >= end || *at != '{')
        return false;
    stop = read_string(skip_blanks(at + 1, end), end, &begin);
    if (!stop || stop - begin != 4 || memcmp(begin, "type", 4) != 0)
        return false;
    at = skip_blanks(stop + 1, end);
    if (at >= end || *at != ':')
        return false;
    stop = read_string(skip_blanks(at + 1, end), end, &begin);
    if (!stop)
        return false;
    *ret_kind = kind_of(begin, (size_t)(stop - begin));
    return true;
}

static void copy_member(const json_t *data, const char *name, char *ret_text, size_t size)
{
    const char *text = json_string_value(json_object_get(data, name));

    if (text && strlen(text) < size)
        (void)snprintf(ret_text, size, "%s", text);
}

void rv_ws_read_event(const char *text, size_t length, struct rv_ws_event *ret_event)
{
    bool known = read_first_member(text, length, &ret_event->kind);
    const char *type;
    json_t *root, *data;

    ret_event->prompt_id[0] = ret_event->node[0] = '\0';
    if (!known)
        ret_event->kind = RV_WS_OTHER;
    if ((known && ret_event->kind < RV_WS_EXECUTION_START) || length > RV_WS_EVENT_MAX)
        return;
    root = json_loadb(text, length, 0, NULL);
    type = json_string_value(json_object_get(root, "type"));
    ret_event->kind = type ? kind_of(type, strlen(type)) : RV_WS_OTHER;
    if (ret_event->kind >= RV_WS_EXECUTION_START) {
        data = json_object_get(root, "data");
        copy_member(data, "prompt_id", ret_event->prompt_id, sizeof(ret_event->prompt_id));
        copy_member(data, ret_event->kind == RV_WS_EXECUTING ? "node" : "node_id", ret_event->node,
                    sizeof(ret_event->node));
    }
    json_decref(root);
}

static char *dump(json_t *root)
{
    char *text = root ? json_dumps(root, 0) : NULL;

    json_decref(root);
    return text;
}

char *rv_ws_status_text(uint64_t remaining, const char *sid)
{
    json_t *root = json_pack("{s:s, s:{s:{s:{s:I}}}}", "type", "status", "data", "status", "exec_info",
                             "queue_remaining", (json_int_t)remaining);

    if (root && sid)
        (void)json_object_set_new(json_object_get(root, "data"), "sid", json_string(sid));
    return dump(root);
}

char *rv_ws_merge_status(const char *text, size_t length, uint64_t remaining)
{
    json_t *root = length <= RV_WS_EVENT_MAX ? json_loadb(text, length, 0, NULL) : NULL;
    json_t *data = json_object_get(root, "data"), *status = json_object_get(data, "status");
    json_t *info = json_object_get(status, "exec_info");
    bool more;

    (void)json_object_del(data, "sid");
    more = json_object_size(root) > 2 || json_object_size(data) > 1 || json_object_size(status) > 1 ||
           json_object_size(info) > 1;
    if (!more) {
        json_decref(root);
        return NULL;
    }
    if (info)
        (void)json_object_set_new(info, "queue_remaining", json_integer((json_int_t)remaining));
    return dump(root);
}

char *rv_ws_verdict_text(const struct rv_ws_verdict *verdict)
{
    json_t *data = json_pack("{s:s, s:s, s:s, s:[]}", "prompt_id", verdict->prompt_id, "node_id", verdict->node,
                             "node_type", verdict->node_type, "executed");

    if (data && !verdict->interrupted) {
        (void)json_object_set_new(data, "exception_message", json_string(verdict->message));
        (void)json_object_set_new(data, "exception_type", json_string(verdict->exception_type));
        (void)json_object_set_new(data, "traceback", json_array());
        (void)json_object_set_new(data, "current_inputs", json_object());
        (void)json_object_set_new(data, "current_outputs", json_array());
    }
    return dump(json_pack("{s:s, s:o}", "type", verdict->interrupted ? "execution_interrupted" : "execution_error",
                          "data", data));
}
