#include "parse.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "frame.h"

#define STATUS_BAD 400u
#define STATUS_URI_TOO_LONG 414u
#define STATUS_HEAD_TOO_LARGE 431u
#define STATUS_NO_SUCH_CODING 501u
#define STATUS_NO_SUCH_VERSION 505u
#define LINE_END 2u /* CR LF */

static unsigned refuse(unsigned status, const char *text, const char **why)
{
    *why = text;
    return status;
}

static bool is_token(const char *text, size_t length)
{
    static const char others[] = "!#$%&'*+-.^_`|~";

    for (size_t i = 0; i < length; i++)
        if (!((text[i] | 0x20) >= 'a' && (text[i] | 0x20) <= 'z') && !(text[i] >= '0' && text[i] <= '9') &&
            (text[i] == '\0' || !strchr(others, text[i])))
            return false;
    return length > 0;
}

static bool is_field_text(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (((unsigned char)text[i] < 0x20 && text[i] != '\t') || text[i] == 0x7f)
            return false;
    return true;
}

static bool same_word(const char *text, size_t length, const char *word)
{
    return length == strlen(word) && strncasecmp(text, word, length) == 0;
}

const struct rv_http_field *rv_http_find(const struct rv_http_head *head, const char *name, unsigned *ret_count)
{
    const struct rv_http_field *found = NULL;
    unsigned count = 0;

    for (unsigned i = 0; i < head->field_count; i++) {
        if (!same_word(head->fields[i].name, head->fields[i].name_length, name))
            continue;
        if (count++ == 0)
            found = &head->fields[i];
    }
    if (ret_count)
        *ret_count = count;
    return found;
}

/*
 * libmicrohttpd (0.9.75) ends a line at CR LF, at a bare LF and at a bare CR, joins folded lines, and then nothing of
 * that is to be seen. But it cuts lines in place: so each field must begin exactly two bytes after the one before has
 * ended. What it has put elsewhere (folded lines) fails as well. Addresses are compared here, and no byte is read.
 */
static bool lines_end_properly(const struct rv_http_head *head)
{
    uintptr_t begin = (uintptr_t)head->method, at = (uintptr_t)head->version + strlen(head->version) + LINE_END;

    if ((uintptr_t)head->version != begin + strlen(head->method) + 1 + head->uri_length + 1)
        return false;
    for (unsigned i = 0; i < head->field_count; i++) {
        const struct rv_http_field *field = &head->fields[i];

        if ((uintptr_t)field->name != at || (uintptr_t)field->value < at + field->name_length + 1)
            return false;
        at = (uintptr_t)field->value + field->value_length + LINE_END;
    }
    return at + LINE_END == begin + head->size;
}

static unsigned check_fields(const struct rv_http_head *head, const char **why)
{
    if (head->too_many)
        return refuse(STATUS_HEAD_TOO_LARGE, "the request has more than 64 header fields", why);
    if (head->size > RV_HTTP_HEAD_MAX)
        return refuse(STATUS_HEAD_TOO_LARGE, "the request's head has more than 16 KiB", why);
    if (!lines_end_properly(head))
        return refuse(STATUS_BAD, "the head's lines must end with CR LF, be unfolded, and have single blanks", why);
    for (unsigned i = 0; i < head->field_count; i++) {
        if (!is_token(head->fields[i].name, head->fields[i].name_length))
            return refuse(STATUS_BAD, "the name of a header field is malformed", why);
        if (!is_field_text(head->fields[i].value, head->fields[i].value_length))
            return refuse(STATUS_BAD, "a header field has a control character", why);
    }
    return 0;
}

static unsigned check_body(const struct rv_http_head *head, struct rv_http_framing *framing, const char **why)
{
    unsigned lengths, codings;
    const struct rv_http_field *length = rv_http_find(head, "Content-Length", &lengths);
    const struct rv_http_field *coding = rv_http_find(head, "Transfer-Encoding", &codings);

    if (lengths > 1)
        return refuse(STATUS_BAD, "the request has two Content-Length fields", why);
    if (length && coding)
        return refuse(STATUS_BAD, "the request has Content-Length and Transfer-Encoding", why);
    if (codings > 1)
        return refuse(STATUS_BAD, "the request has two Transfer-Encoding fields", why);
    if (coding && !framing->keep_alive)
        return refuse(STATUS_BAD, "Transfer-Encoding needs HTTP/1.1", why);
    if (coding && !same_word(coding->value, coding->value_length, "chunked"))
        return refuse(STATUS_NO_SUCH_CODING, "the only Transfer-Encoding that is understood is chunked", why);
    if (length && !rv_http_parse_number(length->value, length->value_length, &framing->length))
        return refuse(STATUS_BAD, "Content-Length is no number", why);
    framing->chunked = coding != NULL;
    framing->has_body = coding || framing->length > 0;
    return 0;
}

unsigned rv_http_check_head(const struct rv_http_head *head, struct rv_http_framing *ret_framing, const char **why)
{
    struct rv_http_framing framing = {0};
    unsigned hosts, status = check_fields(head, why);
    const struct rv_http_field *host;

    if (status)
        return status;
    if (strncmp(head->version, "HTTP/1.", 7) != 0 || !(head->version[7] == '0' || head->version[7] == '1') ||
        head->version[8])
        return refuse(STATUS_NO_SUCH_VERSION, "only HTTP/1.1 and HTTP/1.0 are understood", why);
    framing.keep_alive = head->version[7] == '1';
    status = check_body(head, &framing, why);
    if (status)
        return status;
    host = rv_http_find(head, "Host", &hosts);
    if (hosts > 1)
        return refuse(STATUS_BAD, "the request has two Host fields", why);
    if (!host && framing.keep_alive)
        return refuse(STATUS_BAD, "the request has no Host field", why);
    *ret_framing = framing;
    return 0;
}

/* ---- target ----------------------------------------------------------------------------------------------------- */

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;
}

bool rv_http_decode(char *text, bool plus_is_blank)
{
    char *to = text;

    for (const char *p = text; *p; p++) {
        if (*p == '%') {
            int high = digit_of(p[1]), low = high < 0 ? -1 : digit_of(p[2]);

            if (low < 0 || (high == 0 && low == 0))
                return false;
            *to++ = (char)(high * 16 + low);
            p += 2;
        } else {
            *to++ = *p == '+' && plus_is_blank ? ' ' : *p;
        }
    }
    *to = '\0';
    return rv_text_is_valid(text);
}

static unsigned split_path(char *path, struct rv_http_target *target, const char **why)
{
    char *rest = path + 1, *segment;

    if (*rest == '\0')
        return 0;
    while ((segment = strsep(&rest, "/"))) {
        if (target->segment_count == RV_HTTP_SEGMENTS_MAX)
            return 404;
        if (!rv_http_decode(segment, false))
            return refuse(STATUS_BAD, "the path has a bad escape, or is no UTF-8", why);
        if (*segment == '\0' || strcmp(segment, ".") == 0 || strcmp(segment, "..") == 0)
            return 404;
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
        if (target->query_count == RV_HTTP_QUERY_MAX)
            return refuse(STATUS_BAD, "the query has more than 8 parameters", why);
        if (value)
            *value++ = '\0';
        if (!rv_http_decode(pair, true) || (value && !rv_http_decode(value, true)))
            return refuse(STATUS_BAD, "the query has a bad escape, or is no UTF-8", why);
        if (rv_http_query(target, pair))
            return refuse(STATUS_BAD, "the query names a parameter twice", why);
        target->query[target->query_count].name = pair;
        target->query[target->query_count++].value = value ? value : "";
    }
    return 0;
}

unsigned rv_http_open_target(const char *uri, size_t length, struct rv_http_target *target, char **ret_query,
                             const char **why)
{
    if (length > RV_HTTP_URI_MAX)
        return refuse(STATUS_URI_TOO_LONG, "the request's target has more than 8 KiB", why);
    if (length == 0 || uri[0] != '/')
        return refuse(STATUS_BAD, "the request's target must begin with /", why);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)uri[i] <= ' ' || (unsigned char)uri[i] >= 0x7f || uri[i] == '#')
            return refuse(STATUS_BAD, "the request's target has a character that must be escaped", why);
    target->text = strndup(uri, length);
    if (!target->text)
        return refuse(503, "no memory for the request", why);
    *ret_query = strchr(target->text, '?');
    if (*ret_query)
        *(*ret_query)++ = '\0';
    return 0;
}

unsigned rv_http_parse_target(const char *uri, size_t length, struct rv_http_target *ret_target, const char **why)
{
    struct rv_http_target target = {0};
    unsigned status;
    char *query;

    *why = "nothing is at this path";
    status = rv_http_open_target(uri, length, &target, &query, why);
    if (status)
        return status;
    status = split_path(target.text, &target, why);
    if (!status && query)
        status = split_query(query, &target, why);
    if (status)
        free(target.text);
    else
        *ret_target = target;
    return status;
}

const char *rv_http_query(const struct rv_http_target *target, const char *name)
{
    for (unsigned i = 0; i < target->query_count; i++)
        if (strcmp(target->query[i].name, name) == 0)
            return target->query[i].value;
    return NULL;
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

bool rv_http_parse_number(const char *text, size_t length, uint64_t *ret_number)
{
    uint64_t number = 0;

    for (size_t i = 0; i < length; i++) {
        unsigned digit = (unsigned)(text[i] - '0');

        if (text[i] < '0' || text[i] > '9' || number > (UINT64_MAX - digit) / 10)
            return false;
        number = number * 10 + digit;
    }
    if (length == 0)
        return false;
    *ret_number = number;
    return true;
}

enum rv_http_range rv_http_parse_range(const char *text, size_t length, uint64_t size, uint64_t *ret_first,
                                       uint64_t *ret_length)
{
    static const char unit[] = "bytes=";
    const char *begin = text + strlen(unit), *end = text + length, *dash;
    uint64_t first = 0, last = 0;

    if (length <= strlen(unit) || strncasecmp(text, unit, strlen(unit)) != 0)
        return RV_HTTP_RANGE_WHOLE;
    dash = memchr(begin, '-', (size_t)(end - begin));
    if (!dash)
        return RV_HTTP_RANGE_WHOLE;
    if (dash == begin) { /* the last bytes */
        if (!rv_http_parse_number(dash + 1, (size_t)(end - dash - 1), &last))
            return RV_HTTP_RANGE_WHOLE;
        if (last == 0 || size == 0)
            return RV_HTTP_RANGE_BEYOND;
        first = last < size ? size - last : 0;
        last = size - 1;
    } else {
        if (!rv_http_parse_number(begin, (size_t)(dash - begin), &first))
            return RV_HTTP_RANGE_WHOLE;
        if (dash + 1 == end)
            last = UINT64_MAX;
        else if (!rv_http_parse_number(dash + 1, (size_t)(end - dash - 1), &last) || last < first)
            return RV_HTTP_RANGE_WHOLE;
        if (first >= size)
            return RV_HTTP_RANGE_BEYOND;
        last = last < size ? last : size - 1;
    }
    *ret_first = first;
    *ret_length = last - first + 1;
    return RV_HTTP_RANGE_PART;
}

bool rv_http_host_is_local(const char *host, size_t length)
{
    char name[64];
    struct in_addr four;
    struct in6_addr six;
    const char *end;

    if (length == 0 || length >= sizeof(name))
        return false;
    (void)snprintf(name, sizeof(name), "%.*s", (int)length, host);
    if (name[0] == '[') {
        end = strchr(name, ']');
        if (!end || (end[1] != '\0' && end[1] != ':'))
            return false;
        name[end - name] = '\0';
        return inet_pton(AF_INET6, name + 1, &six) == 1;
    }
    name[strcspn(name, ":")] = '\0';
    return strcasecmp(name, "localhost") == 0 || inet_pton(AF_INET, name, &four) == 1;
}

bool rv_http_origin_matches(const char *origin, size_t origin_length, const char *host, size_t host_length)
{
    static const char *const schemes[] = {"http://", "https://"};

    for (unsigned i = 0; i < 2; i++) {
        size_t n = strlen(schemes[i]);

        if (origin_length == n + host_length && strncasecmp(origin, schemes[i], n) == 0 &&
            strncasecmp(origin + n, host, host_length) == 0)
            return true;
    }
    return false;
}
