#include "request.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpc.pb-c.h"
#include "run.h"

#define ALLOWED_TEXT 160
#define SHOWN_TEXT 48 /* of a value or key in a message */

#define BAD_REQUEST RESVISOR__V1__ERROR_CODE__ERROR_BAD_REQUEST

/* Bytes of a client, made harmless for terminals and logs, and cut. */
static const char *shown(char *buffer, const char *text)
{
    size_t i;

    for (i = 0; i + 1 < SHOWN_TEXT && text[i]; i++)
        buffer[i] = text[i] >= ' ' && text[i] <= '~' && text[i] != '"' ? text[i] : '?';
    buffer[i] = '\0';
    return buffer;
}

static const char *allowed(char *buffer, const struct rv_param_rule *rules, unsigned rule_count)
{
    size_t used = (size_t)snprintf(buffer, ALLOWED_TEXT, "prompt");
    unsigned i;

    for (i = 0; i < rule_count && used < ALLOWED_TEXT; i++)
        used += (size_t)snprintf(buffer + used, ALLOWED_TEXT - used, ", %s", rules[i].name);
    if (used < ALLOWED_TEXT)
        (void)snprintf(buffer + used, ALLOWED_TEXT - used, ", fault");
    return buffer;
}

static int number_read(const struct rv_param_rule *rule, const char *text, struct rv_failure *err, uint64_t *ret_value)
{
    char show[SHOWN_TEXT], multiple[48] = "";
    uint64_t value;
    char *end;

    errno = 0;
    value = strtoull(text, &end, 10); /* it would take a sign and spaces: the first byte must be a digit */
    if (text[0] >= '0' && text[0] <= '9' && !*end && !errno && value >= rule->least && value <= rule->most &&
        value % rule->multiple == 0) {
        *ret_value = value;
        return 0;
    }
    if (rule->multiple > 1)
        (void)snprintf(multiple, sizeof(multiple), ", a multiple of %" PRIu64, rule->multiple);
    return rv_fail(err, EINVAL, BAD_REQUEST,
                   "parameter %s is \"%s\"; it must be a whole number from %" PRIu64 " to %" PRIu64 "%s", rule->name,
                   shown(show, text), rule->least, rule->most, multiple);
}

static int param_read(const char *key, const char *value, const struct rv_param_rule *rules, unsigned rule_count,
                      struct rv_failure *err, struct rv_request *request)
{
    char show[SHOWN_TEXT], list[ALLOWED_TEXT];
    unsigned i;

    if (strcmp(key, "prompt") == 0) {
        request->prompt = value;
        return 0;
    }
    if (strcmp(key, "fault") == 0) {
        if (rv_fault_parse(value, &request->fault) == 0)
            return 0;
        return rv_fail(err, EINVAL, BAD_REQUEST, "parameter fault is \"%s\"; it must be one of %s", shown(show, value),
                       RV_FAULT_LIST);
    }
    for (i = 0; i < rule_count; i++) {
        if (strcmp(key, rules[i].name) == 0)
            return number_read(&rules[i], value, err, &request->values[rules[i].id]);
    }
    return rv_fail(err, EINVAL, BAD_REQUEST, "unknown parameter \"%s\"; allowed are %s", shown(show, key),
                   allowed(list, rules, rule_count));
}

int rv_request_read(const struct rv_job *job, const struct rv_param_rule *rules, unsigned rule_count,
                    struct rv_failure *err, struct rv_request *ret_request)
{
    struct rv_request request = {.prompt = ""};
    uint32_t i, count = rv_job_param_count(job);
    const char *key, *value;
    int r;

    for (i = 0; i < rule_count; i++)
        request.values[rules[i].id] = rules[i].standard;
    for (i = 0; i < count; i++) {
        rv_job_param_at(job, i, &key, &value);
        if ((r = param_read(key, value, rules, rule_count, err, &request)) < 0)
            return r;
    }
    *ret_request = request;
    return 0;
}
