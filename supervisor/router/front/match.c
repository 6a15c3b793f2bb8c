/* Paths and fields: pure functions on bytes of a stranger. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "match.h"

#include "frame.h"

#define STATUS_BAD 400u

bool rv_front_path_matches(const char *const *segments, unsigned count, const char *pattern)
{
    unsigned i = 0;

    for (;; i++) {
        size_t n = strcspn(pattern, "/");

        if (n == 2 && strncmp(pattern, "**", 2) == 0)
            return true;
        if (n == 0)
            return i == count;
        if (i == count ||
            (!(n == 1 && *pattern == '*') && (strlen(segments[i]) != n || strncmp(segments[i], pattern, n) != 0)))
            return false;
        pattern += n;
        if (*pattern == '/')
            pattern++;
    }
}

/* ---- targets ---------------------------------------------------------------------------------------------------- */

static unsigned split_path(char *path, struct rv_http_target *target, const char **why)
{
    char *rest = path + 1, *segment;

    if (*rest == '\0')
        return 0;
    while ((segment = strsep(&rest, "/"))) {
        if (!rv_http_decode(segment, false)) {
            *why = "the path has a bad escape, or is no UTF-8";
            return STATUS_BAD;
        }
        if (strcmp(segment, ".") == 0 || strcmp(segment, "..") == 0) {
            *why = "the path has . or .. in it";
            return STATUS_BAD;
        }
        if (target->segment_count < RV_HTTP_SEGMENTS_MAX)
            target->segments[target->segment_count++] = segment;
    }
    return 0;
}

static unsigned split_query(char *query, struct rv_http_target *target, const char **why)
{
    char *pair;

    while ((pair = strsep(&query, "&"))) {
        char *value = strchr(pair, '=');

        if (*pair == '\0')
            continue;
        if (value)
            *value++ = '\0';
        if (!rv_http_decode(pair, true) || (value && !rv_http_decode(value, true))) {
            *why = "the query has a bad escape, or is no UTF-8";
            return STATUS_BAD;
        }
        if (target->query_count == RV_HTTP_QUERY_MAX || rv_http_query(target, pair))
            continue;
        target->query[target->query_count].name = pair;
        target->query[target->query_count++].value = value ? value : "";
    }
    return 0;
}

static bool strip_api(struct rv_http_target *target)
{
    if (target->segment_count == 0 || strcmp(target->segments[0], "api") != 0)
        return false;
    target->segment_count--;
    memmove(target->segments, target->segments + 1, target->segment_count * sizeof(target->segments[0]));
    return true;
}

unsigned rv_front_parse_target(const char *uri, size_t length, struct rv_http_target *ret_target, bool *ret_api,
                               const char **why)
{
    struct rv_http_target target = {0};
    unsigned status;
    char *query;

    *why = "";
    status = rv_http_open_target(uri, length, &target, &query, why);
    if (status)
        return status;
    status = split_path(target.text, &target, why);
    if (!status && query)
        status = split_query(query, &target, why);
    if (status) {
        free(target.text);
        return status;
    }
    *ret_api = strip_api(&target);
    *ret_target = target;
    return 0;
}

/* ---- fields ----------------------------------------------------------------------------------------------------- */

static bool same_word(const char *text, size_t length, const char *word)
{
    return length == strlen(word) && strncasecmp(text, word, length) == 0;
}

/* `Connection` names further fields that are for the next neighbour only. */
static bool is_listed(const char *name, size_t length, const char *list, size_t list_length)
{
    size_t at = 0;

    while (at < list_length) {
        size_t begin = at, end;

        while (at < list_length && list[at] != ',')
            at++;
        end = at++;
        while (begin < end && (list[begin] == ' ' || list[begin] == '\t'))
            begin++;
        while (end > begin && (list[end - 1] == ' ' || list[end - 1] == '\t'))
            end--;
        if (length > 0 && end - begin == length && strncasecmp(list + begin, name, length) == 0)
            return true;
    }
    return false;
}

bool rv_front_field_is_hop(const char *name, size_t length, const char *connection, size_t connection_length)
{
    static const char *const hops[] = {
        "Connection", "Keep-Alive",         "Proxy-Connection",   "TE", "Trailer", "Transfer-Encoding",
        "Upgrade",    "Proxy-Authenticate", "Proxy-Authorization"};

    for (unsigned i = 0; i < sizeof(hops) / sizeof(hops[0]); i++)
        if (same_word(name, length, hops[i]))
            return true;
    return is_listed(name, length, connection, connection_length);
}

/* ---- cookies ---------------------------------------------------------------------------------------------------- */

struct cookie {
    const char *begin, *end, *value; /* begin: of the name; value: behind the first `=` */
};

/* The next one of "a=b; c=d". False = no more. */
static bool next_cookie(const char **at, const char *end, struct cookie *ret)
{
    const char *p = *at, *stop;

    while (p < end && (*p == ' ' || *p == ';' || *p == '\t'))
        p++;
    if (p == end)
        return false;
    stop = memchr(p, ';', (size_t)(end - p));
    ret->begin = p;
    ret->end = stop ? stop : end;
    while (ret->end > p && (ret->end[-1] == ' ' || ret->end[-1] == '\t'))
        ret->end--;
    ret->value = memchr(p, '=', (size_t)(ret->end - p));
    ret->value = ret->value ? ret->value + 1 : ret->end;
    *at = stop ? stop : end;
    return true;
}

static bool is_called(const struct cookie *cookie, const char *name)
{
    size_t n = strlen(name);

    return (size_t)(cookie->value - cookie->begin) == n + 1 && memcmp(cookie->begin, name, n) == 0 &&
           cookie->begin[n] == '=';
}

const char *rv_front_find_cookie(const char *field, size_t length, const char *name, size_t *ret_length)
{
    const char *at = field;
    struct cookie cookie;

    while (next_cookie(&at, field + length, &cookie)) {
        if (!is_called(&cookie, name))
            continue;
        *ret_length = (size_t)(cookie.end - cookie.value);
        return cookie.value;
    }
    return NULL;
}

size_t rv_front_strip_cookie(const char *field, size_t length, const char *name, char *to)
{
    const char *at = field;
    struct cookie cookie;
    size_t n = 0;

    while (next_cookie(&at, field + length, &cookie)) {
        if (is_called(&cookie, name))
            continue;
        if (n) /* a blank may have been missing, and there is no room for more than there was */
            to[n++] = ';';
        if (n > 1 && to[n - 1] == ';' && cookie.begin[-1] == ' ')
            to[n++] = ' ';
        memcpy(to + n, cookie.begin, (size_t)(cookie.end - cookie.begin));
        n += (size_t)(cookie.end - cookie.begin);
    }
    return n;
}

bool rv_front_is_cookie_value(const char *text)
{
    for (const char *p = text; *p; p++)
        if (*p <= ' ' || *p >= 0x7f || strchr("\",;\\", *p))
            return false;
    return *text != '\0';
}
