/* A Submit from JSON. What the fields may hold is checked where the RPC's are: here it is only their kind. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http.h"

#define BAD(...) rv_error_set(err, EINVAL, RV_CODE(BAD_REQUEST), __VA_ARGS__)

static int take_text(json_t *value, const char *name, char **place, struct rv_error *err)
{
    if (!json_is_string(value))
        return BAD("%s must be a text", name);
    *place = (char *)json_string_value(value);
    return 0;
}

static int take_job_id(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    return take_text(value, "job_id", &s->submit.job_id, err);
}

static int take_type(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    return take_text(value, "type", &s->submit.type, err);
}

static int take_model(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    return take_text(value, "model", &s->submit.model, err);
}

static int take_params(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    const char *key;
    json_t *item;

    if (!json_is_object(value))
        return BAD("params must be an object");
    if (json_object_size(value) > RV_PARAMS_MAX)
        return BAD("params has %zu entries; at most %u are allowed", json_object_size(value), RV_PARAMS_MAX);
    json_object_foreach (value, key, item) {
        Resvisor__V1__Param *param = &s->params[s->submit.n_params];
        char *number = s->values[s->submit.n_params];

        resvisor__v1__param__init(param);
        param->key = (char *)key;
        if (json_is_string(item))
            param->value = (char *)json_string_value(item);
        else if (json_is_boolean(item))
            param->value = (char *)(json_is_true(item) ? "true" : "false");
        else if (json_is_number(item))
            param->value = number;
        else
            return BAD("params: each value must be a text, a number, true or false");
        if (json_is_integer(item))
            (void)snprintf(number, sizeof(s->values[0]), "%lld", (long long)json_integer_value(item));
        else if (json_is_real(item))
            (void)snprintf(number, sizeof(s->values[0]), "%.17g", json_real_value(item));
        s->list[s->submit.n_params++] = param;
    }
    s->submit.params = s->list;
    return 0;
}

static int take_payload(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    if (!json_is_string(value))
        return BAD("payload must be a text");
    if (s->submit.payload.data)
        return BAD("payload and payload_base64 cannot both be given");
    s->submit.payload.data = (uint8_t *)json_string_value(value);
    s->submit.payload.len = json_string_length(value);
    return 0;
}

static int sextet(char c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

/* Strict: four characters for three bytes, filled up with `=`. False = it is no base64. */
static bool decode(const char *text, size_t length, uint8_t *to, size_t *ret_length)
{
    size_t n = 0, fill = length > 0 && text[length - 1] == '=' ? 1 + (length > 1 && text[length - 2] == '=') : 0;
    uint32_t bits = 0;

    if (length % 4 != 0)
        return false;
    for (size_t i = 0; i < length; i++) {
        int value = i >= length - fill ? 0 : sextet(text[i]);

        if (value < 0)
            return false;
        bits = bits << 6 | (uint32_t)value;
        if (i % 4 != 3)
            continue;
        to[n++] = (uint8_t)(bits >> 16);
        to[n++] = (uint8_t)(bits >> 8);
        to[n++] = (uint8_t)bits;
    }
    *ret_length = n - fill;
    return true;
}

static int take_payload_base64(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    if (!json_is_string(value))
        return BAD("payload_base64 must be a text");
    if (s->submit.payload.data)
        return BAD("payload and payload_base64 cannot both be given");
    s->payload = malloc(json_string_length(value) + 1);
    if (!s->payload)
        return rv_error_set(err, ENOMEM, RV_CODE(NO_MEMORY), "no memory for the payload");
    if (!decode(json_string_value(value), json_string_length(value), s->payload, &s->submit.payload.len))
        return BAD("payload_base64 is no base64");
    s->submit.payload.data = s->payload;
    return 0;
}

static int take_priority(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    json_int_t number = json_integer_value(value);

    if (!json_is_integer(value) || number < INT32_MIN || number > INT32_MAX)
        return BAD("priority must be a whole number from -1000 to 1000");
    s->submit.priority = (int32_t)number;
    return 0;
}

static int take_retry(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    if (!json_is_boolean(value))
        return BAD("retry_on_worker_death must be true or false");
    s->submit.retry_on_worker_death = json_is_true(value);
    return 0;
}

static int take_wait(struct rv_http_submit *s, json_t *value, struct rv_error *err)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return BAD("wait_ms must be a whole number, 0 or more");
    s->submit.wait_ms = (uint64_t)json_integer_value(value);
    return 0;
}

static const struct {
    const char *name;
    int (*take)(struct rv_http_submit *s, json_t *value, struct rv_error *err);
} fields[] = {
    {"job_id", take_job_id},     {"type", take_type},
    {"model", take_model},       {"params", take_params},
    {"payload", take_payload},   {"payload_base64", take_payload_base64},
    {"priority", take_priority}, {"retry_on_worker_death", take_retry},
    {"wait_ms", take_wait},
};

#define FIELD_COUNT (sizeof(fields) / sizeof(fields[0]))

int rv_http_submit_parse(const char *body, size_t length, struct rv_http_submit *ret_submit, struct rv_error *err)
{
    char shown[RV_NAME_MAX];
    json_error_t where;
    const char *key;
    json_t *value;

    resvisor__v1__submit__init(&ret_submit->submit);
    ret_submit->root = json_loadb(body, length, JSON_REJECT_DUPLICATES, &where);
    if (!ret_submit->root)
        return BAD("the body is no JSON: line %d, column %d: %s", where.line, where.column,
                   rv_escape(shown, sizeof(shown), where.text, strlen(where.text)));
    if (!json_is_object(ret_submit->root))
        return BAD("the body must be a JSON object");
    json_object_foreach (ret_submit->root, key, value) {
        unsigned i = 0;
        int r;

        while (i < FIELD_COUNT && strcmp(fields[i].name, key) != 0)
            i++;
        if (i == FIELD_COUNT)
            return BAD("a job has no field \"%s\"", rv_escape(shown, sizeof(shown), key, strlen(key)));
        r = fields[i].take(ret_submit, value, err);
        if (r < 0)
            return r;
    }
    return 0;
}

void rv_http_submit_fini(struct rv_http_submit *submit)
{
    free(submit->payload);
    json_decref(submit->root);
    submit->payload = NULL;
    submit->root = NULL;
}
