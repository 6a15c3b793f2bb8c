#include "body.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

#define PRIORITY_LIMIT 1000

struct reading {
    const char *text;
    struct rv_prompt_body *body;
    struct rv_prompt_fault *fault;
};

static int refuse(struct reading *r, const char *type, const char *message, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(struct reading *r, const char *type, const char *message, const char *format, ...)
{
    va_list ap;

    r->fault->type = type;
    r->fault->message = message;
    va_start(ap, format);
    (void)vsnprintf(r->fault->details, sizeof(r->fault->details), format, ap);
    va_end(ap);
    return -EINVAL;
}

static int bad_field(struct reading *r, const char *field, const char *what)
{
    return refuse(r, "invalid_request", "A field of the request is wrong", "%s %s", field, what);
}

static bool is_null(struct reading *r, struct rv_span value)
{
    return rv_scan_is(r->text, value, 'n');
}

/* ---- the fields -------------------------------------------------------------------------------------------------- */

static int take_prompt(struct reading *r, struct rv_span value)
{
    r->body->prompt = value;
    return rv_scan_is(r->text, value, '{') ? 0 : bad_field(r, "prompt", "is no object");
}

static int take_client_id(struct reading *r, struct rv_span value)
{
    r->body->has_client_id = !is_null(r, value);
    if (!r->body->has_client_id)
        return 0;
    return rv_scan_copy(r->text, value, r->body->client_id, sizeof(r->body->client_id)) == 0
               ? 0
               : bad_field(r, "client_id", "is no text of at most 128 bytes");
}

static int take_prompt_id(struct reading *r, struct rv_span value)
{
    char *id = r->body->prompt_id;

    id[0] = '\0';
    if (is_null(r, value) ||
        (rv_scan_copy(r->text, value, id, sizeof(r->body->prompt_id)) == 0 && rv_uuid_is_canonical(id)))
        return 0;
    return refuse(r, "invalid_prompt_id", "prompt_id must be a valid UUID",
                  "prompt_id must be a canonical UUID: lower-case, with hyphens");
}

static int take_number(struct reading *r, struct rv_span value)
{
    r->body->has_number = rv_scan_number(r->text, value, &r->body->number);
    return r->body->has_number ? 0 : bad_field(r, "number", "is no number");
}

static int take_front(struct reading *r, struct rv_span value)
{
    r->body->front = rv_scan_is_true(r->text, value);
    return 0;
}

static int take_targets(struct reading *r, struct rv_span value)
{
    struct rv_span item;
    uint32_t at = 0;

    if (is_null(r, value))
        return 0;
    if (!rv_scan_is(r->text, value, '['))
        return bad_field(r, "partial_execution_targets", "is no list");
    while (rv_scan_next(r->text, value, &at, NULL, &item))
        if (!rv_scan_is(r->text, item, '"'))
            return bad_field(r, "partial_execution_targets", "is no list of node ids");
    return 0;
}

/* ---- extra_data.resvisor ----------------------------------------------------------------------------------------- */

static int take_type(struct reading *r, struct rv_span value)
{
    if (is_null(r, value))
        return 0;
    return rv_scan_copy(r->text, value, r->body->type, sizeof(r->body->type)) == 0
               ? 0
               : bad_field(r, "extra_data.resvisor.type", "is no name of a workflow type");
}

static int take_priority(struct reading *r, struct rv_span value)
{
    double number;

    if (!rv_scan_number(r->text, value, &number) || number < -PRIORITY_LIMIT || number > PRIORITY_LIMIT ||
        number != (double)(int32_t)number)
        return bad_field(r, "extra_data.resvisor.priority", "is no whole number from -1000 to 1000");
    r->body->priority = (int32_t)number;
    return 0;
}

static int take_retry(struct reading *r, struct rv_span value)
{
    r->body->retry = rv_scan_is(r->text, value, 't');
    return r->body->retry || rv_scan_is(r->text, value, 'f')
               ? 0
               : bad_field(r, "extra_data.resvisor.retry", "is neither true nor false");
}

struct field {
    const char *name;
    int (*take)(struct reading *r, struct rv_span value);
};

static int take_fields(struct reading *r, struct rv_span object, const struct field *fields, unsigned count)
{
    struct rv_span key, value;
    uint32_t at = 0;
    int result = 0;

    while (result == 0 && rv_scan_next(r->text, object, &at, &key, &value))
        for (unsigned i = 0; i < count && result == 0; i++)
            if (rv_scan_equals(r->text, key, fields[i].name))
                result = fields[i].take(r, value);
    return result;
}

static int take_extra_data(struct reading *r, struct rv_span value)
{
    static const struct field fields[] = {{"type", take_type}, {"priority", take_priority}, {"retry", take_retry}};
    struct rv_span ours;

    if (!rv_scan_is(r->text, value, '{'))
        return bad_field(r, "extra_data", "is no object");
    r->body->extra_data = value;
    if (!rv_scan_find(r->text, value, "resvisor", &ours))
        return 0;
    if (!rv_scan_is(r->text, ours, '{'))
        return bad_field(r, "extra_data.resvisor", "is no object");
    return take_fields(r, ours, fields, sizeof(fields) / sizeof(fields[0]));
}

int rv_prompt_body_read(const char *text, size_t length, struct rv_prompt_body *body, struct rv_prompt_fault *fault)
{
    static const struct field fields[] = {
        {"prompt", take_prompt}, {"client_id", take_client_id},   {"prompt_id", take_prompt_id},
        {"number", take_number}, {"front", take_front},           {"partial_execution_targets", take_targets},
        {"extra_data", take_extra_data},
    };
    struct reading r = {text, body, fault};
    struct rv_span whole;
    size_t where = 0;
    int result = rv_scan_check(text, length, &whole, &where);

    *body = (struct rv_prompt_body){0};
    if (result == -E2BIG)
        return refuse(&r, "invalid_json", "The request is no JSON that can be taken",
                      "at byte %zu it is nested deeper than %u levels, or it is too large", where, RV_SCAN_DEPTH_MAX);
    if (result < 0)
        return refuse(&r, "invalid_json", "The request is no JSON", "the fault is at byte %zu", where);
    if (!rv_scan_is(text, whole, '{'))
        return refuse(&r, "no_prompt", "No prompt provided", "No prompt provided");
    result = take_fields(&r, whole, fields, sizeof(fields) / sizeof(fields[0]));
    if (result == 0 && body->prompt.length == 0)
        return refuse(&r, "no_prompt", "No prompt provided", "No prompt provided");
    return result;
}

/* ---- ids --------------------------------------------------------------------------------------------------------- */

bool rv_uuid_is_canonical(const char *text)
{
    for (unsigned i = 0; i < RV_UUID_SIZE - 1; i++) {
        bool hyphen = i == 8 || i == 13 || i == 18 || i == 23;

        if (hyphen ? text[i] != '-' : !((text[i] >= '0' && text[i] <= '9') || (text[i] >= 'a' && text[i] <= 'f')))
            return false;
    }
    return text[RV_UUID_SIZE - 1] == '\0';
}

void rv_uuid_write(const uint8_t random[16], char text[RV_UUID_SIZE])
{
    static const char digits[] = "0123456789abcdef";
    unsigned used = 0;

    for (unsigned i = 0; i < 16; i++) {
        unsigned byte = i == 6 ? (random[i] & 0x0fu) | 0x40u : i == 8 ? (random[i] & 0x3fu) | 0x80u : random[i];

        if (i == 4 || i == 6 || i == 8 || i == 10)
            text[used++] = '-';
        text[used++] = digits[byte >> 4];
        text[used++] = digits[byte & 15];
    }
    text[used] = '\0';
}
