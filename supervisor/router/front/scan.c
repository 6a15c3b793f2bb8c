#include "scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- checking ---------------------------------------------------------------------------------------------------- */

static const char *blanks(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r'))
        p++;
    return p;
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

static bool is_digit(const char *p, const char *end)
{
    return p < end && *p >= '0' && *p <= '9';
}

/* The length of a character of several bytes; 0 = no UTF-8. */
static unsigned utf8(const unsigned char *p, const unsigned char *end)
{
    unsigned n = p[0] >= 0xc2 && p[0] < 0xe0   ? 2
                 : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
                 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                               : 0;

    if (n == 0 || (size_t)(end - p) < n)
        return 0;
    for (unsigned i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] >= 0xa0) || (p[0] == 0xf0 && p[1] < 0x90) ||
        (p[0] == 0xf4 && p[1] >= 0x90))
        return 0;
    return n;
}

/* Eight bytes at once, as long as none of them needs a look: images in workflows are texts of megabytes. */
static const char *plain(const char *p, const char *end)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;

    while (end - p >= 8) {
        uint64_t w, quotes, escapes;

        memcpy(&w, p, sizeof(w));
        quotes = w ^ (ones * '"');
        escapes = w ^ (ones * '\\');
        if ((w | (w - ones * 0x20) | ((quotes - ones) & ~quotes) | ((escapes - ones) & ~escapes)) & tops)
            break;
        p += 8;
    }
    return p;
}

/* p is behind the opening quote. Gives the place behind the closing one; NULL = faulty, at *where. */
static const char *check_text(const char *p, const char *end, const char **where)
{
    for (;;) {
        p = plain(p, end);
        *where = p;
        if (p == end || (unsigned char)*p < 0x20)
            return NULL;
        if (*p == '"')
            return p + 1;
        if ((unsigned char)*p >= 0x80) {
            unsigned n = utf8((const unsigned char *)p, (const unsigned char *)end);

            if (n == 0)
                return NULL;
            p += n;
        } else if (*p == '\\') {
            if (end - p < 2 || p[1] == '\0' || !strchr("\"\\/bfnrtu", p[1]))
                return NULL;
            if (p[1] == 'u' && (end - p < 6 || !is_hex(p[2]) || !is_hex(p[3]) || !is_hex(p[4]) || !is_hex(p[5])))
                return NULL;
            p += p[1] == 'u' ? 6 : 2;
        } else {
            p++;
        }
    }
}

static const char *check_number(const char *p, const char *end)
{
    if (*p == '-')
        p++;
    if (!is_digit(p, end))
        return NULL;
    if (*p++ != '0')
        while (is_digit(p, end))
            p++;
    if (p < end && *p == '.') {
        if (!is_digit(++p, end))
            return NULL;
        while (is_digit(p, end))
            p++;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-'))
            p++;
        if (!is_digit(p, end))
            return NULL;
        while (is_digit(p, end))
            p++;
    }
    return p;
}

/* Everything but objects and arrays. NULL = faulty, at *where. */
static const char *check_scalar(const char *p, const char *end, const char **where)
{
    static const char *const words[] = {"true", "false", "null"};

    *where = p;
    if (*p == '"')
        return check_text(p + 1, end, where);
    for (unsigned i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if ((size_t)(end - p) >= strlen(words[i]) && memcmp(p, words[i], strlen(words[i])) == 0)
            return p + strlen(words[i]);
    return check_number(p, end);
}

/* A member's name and its colon. Gives the place of the value. */
static const char *check_name(const char *p, const char *end, const char **where)
{
    *where = p;
    if (p == end || *p != '"')
        return NULL;
    p = check_text(p + 1, end, where);
    if (!p)
        return NULL;
    p = blanks(p, end);
    *where = p;
    return p < end && *p == ':' ? blanks(p + 1, end) : NULL;
}

struct walk {
    const char *p, *end, *where;
    uint64_t objects; /* bit 0 = the innermost container is an object */
    unsigned depth;
};

/* One value's beginning, or all of it. 1 = a container was entered and has a first item; 0 = a value is complete. */
static int begin_value(struct walk *w)
{
    bool object;

    w->where = w->p;
    if (w->p == w->end)
        return -EINVAL;
    if (*w->p != '{' && *w->p != '[') {
        const char *next = check_scalar(w->p, w->end, &w->where);

        w->p = next ? next : w->p;
        return next ? 0 : -EINVAL;
    }
    if (w->depth == RV_SCAN_DEPTH_MAX)
        return -E2BIG;
    object = *w->p == '{';
    w->p = blanks(w->p + 1, w->end);
    if (w->p < w->end && *w->p == (object ? '}' : ']')) {
        w->p++;
        return 0;
    }
    w->objects = w->objects << 1 | object;
    w->depth++;
    w->where = w->p;
    if (object && !(w->p = check_name(w->p, w->end, &w->where)))
        return -EINVAL;
    return 1;
}

/* Behind a complete value: leaves what ends here. 1 = another item follows; 0 = the outermost value is complete. */
static int end_value(struct walk *w)
{
    while (w->depth > 0) {
        bool object = w->objects & 1;

        w->p = blanks(w->p, w->end);
        w->where = w->p;
        if (w->p == w->end)
            return -EINVAL;
        if (*w->p == ',') {
            w->p = blanks(w->p + 1, w->end);
            if (object && !(w->p = check_name(w->p, w->end, &w->where)))
                return -EINVAL;
            return 1;
        }
        if (*w->p != (object ? '}' : ']'))
            return -EINVAL;
        w->p++;
        w->depth--;
        w->objects >>= 1;
    }
    return 0;
}

int rv_scan_check(const char *text, size_t length, struct rv_span *ret_value, size_t *ret_where)
{
    struct walk w = {.p = text, .end = text + length, .where = text};
    const char *begin;
    int r = length > RV_SCAN_SIZE_MAX ? -E2BIG : 1;

    w.p = begin = blanks(text, w.end);
    while (r == 1) {
        r = begin_value(&w);
        if (r == 0)
            r = end_value(&w);
    }
    if (r == 0) {
        *ret_value = (struct rv_span){(uint32_t)(begin - text), (uint32_t)(w.p - begin)};
        w.where = blanks(w.p, w.end);
        if (w.where != w.end)
            r = -EINVAL;
    }
    *ret_where = (size_t)(w.where - text);
    return r;
}

/* ---- walking ----------------------------------------------------------------------------------------------------- */

/* p is behind the opening quote, and the text is good. */
static const char *skip_text(const char *p, const char *end)
{
    for (;; p++) {
        p = plain(p, end);
        if (*p == '\\')
            p++;
        else if (*p == '"')
            return p + 1;
    }
}

static const char *skip_value(const char *p, const char *end)
{
    unsigned depth = 0;

    do {
        if (*p == '"') {
            p = skip_text(p + 1, end);
            continue;
        }
        if (*p == '{' || *p == '[')
            depth++;
        else if (*p == '}' || *p == ']')
            depth--;
        p++;
    } while (p < end && (depth > 0 || !strchr(",]} \n\t\r", *p)));
    return p;
}

static struct rv_span between(const char *text, const char *from, const char *to)
{
    return (struct rv_span){(uint32_t)(from - text), (uint32_t)(to - from)};
}

bool rv_scan_next(const char *text, struct rv_span container, uint32_t *at, struct rv_span *ret_key,
                  struct rv_span *ret_value)
{
    const char *end, *p, *from;

    if (!rv_scan_is(text, container, '{') && !rv_scan_is(text, container, '['))
        return false;
    end = text + container.at + container.length - 1; /* the closing bracket */
    p = blanks(text + (*at ? *at : container.at + 1), end);
    if (*at && p < end)
        p = blanks(p + 1, end); /* the comma */
    if (p >= end)
        return false;
    if (text[container.at] == '{') {
        from = p;
        p = skip_text(p + 1, end);
        if (ret_key)
            *ret_key = between(text, from, p);
        p = blanks(blanks(p, end) + 1, end);
    }
    from = p;
    p = skip_value(p, end);
    *ret_value = between(text, from, p);
    *at = (uint32_t)(p - text);
    return true;
}

bool rv_scan_find(const char *text, struct rv_span object, const char *name, struct rv_span *ret_value)
{
    struct rv_span key, value;
    uint32_t at = 0;
    bool found = false;

    if (!rv_scan_is(text, object, '{'))
        return false;
    while (rv_scan_next(text, object, &at, &key, &value)) {
        if (!rv_scan_equals(text, key, name))
            continue;
        *ret_value = value;
        found = true;
    }
    return found;
}

/* ---- single values ----------------------------------------------------------------------------------------------- */

bool rv_scan_is(const char *text, struct rv_span span, char first)
{
    return span.length > 0 && text[span.at] == first;
}

static unsigned hex4(const char *p)
{
    unsigned value = 0;

    for (unsigned i = 0; i < 4; i++)
        value = value << 4 | (unsigned)(p[i] <= '9' ? p[i] - '0' : (p[i] | 0x20) - 'a' + 10);
    return value;
}

static unsigned encode(uint32_t code, char *to)
{
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (char)(0xc0 | code >> 6);
        to[1] = (char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        to[0] = (char)(0xe0 | code >> 12);
        to[1] = (char)(0x80 | (code >> 6 & 0x3f));
        to[2] = (char)(0x80 | (code & 0x3f));
        return 3;
    }
    to[0] = (char)(0xf0 | code >> 18);
    to[1] = (char)(0x80 | (code >> 12 & 0x3f));
    to[2] = (char)(0x80 | (code >> 6 & 0x3f));
    to[3] = (char)(0x80 | (code & 0x3f));
    return 4;
}

/* One character of a text: its bytes, and how many of the source it takes. A half of a pair becomes U+FFFD. */
static unsigned take_character(const char *p, const char *end, char to[4], unsigned *ret_bytes)
{
    static const char from[] = "bfnrt", what[] = "\b\f\n\r\t";
    const char *found;
    uint32_t code;

    *ret_bytes = 1;
    to[0] = *p;
    if (*p != '\\')
        return 1;
    if (p[1] != 'u') {
        found = strchr(from, p[1]);
        to[0] = found ? what[found - from] : p[1];
        return 2;
    }
    code = hex4(p + 2);
    if (code >= 0xd800 && code < 0xdc00 && end - p >= 12 && p[6] == '\\' && p[7] == 'u' && hex4(p + 8) >= 0xdc00 &&
        hex4(p + 8) < 0xe000) {
        *ret_bytes = encode(0x10000 + ((code - 0xd800) << 10) + (hex4(p + 8) - 0xdc00), to);
        return 12;
    }
    *ret_bytes = encode(code >= 0xd800 && code < 0xe000 ? 0xfffd : code, to);
    return 6;
}

bool rv_scan_equals(const char *text, struct rv_span span, const char *word)
{
    const char *p, *end;

    if (!rv_scan_is(text, span, '"'))
        return false;
    p = text + span.at + 1;
    end = text + span.at + span.length - 1;
    while (p < end) {
        char bytes[4];
        unsigned n;

        p += take_character(p, end, bytes, &n);
        if (strncmp(word, bytes, n) != 0 || bytes[0] == '\0')
            return false;
        word += n;
    }
    return *word == '\0';
}

int rv_scan_copy(const char *text, struct rv_span span, char *to, size_t size)
{
    const char *p, *end;
    size_t used = 0;

    if (!rv_scan_is(text, span, '"'))
        return -EINVAL;
    p = text + span.at + 1;
    end = text + span.at + span.length - 1;
    while (p < end) {
        char bytes[4];
        unsigned n;

        p += take_character(p, end, bytes, &n);
        if (bytes[0] == '\0' || used + n >= size)
            return -E2BIG;
        memcpy(to + used, bytes, n);
        used += n;
    }
    to[used] = '\0';
    return 0;
}

bool rv_scan_number(const char *text, struct rv_span span, double *ret_number)
{
    char digits[64];

    if (span.length == 0 || span.length >= sizeof(digits) ||
        (text[span.at] != '-' && !is_digit(text + span.at, text + span.at + 1)))
        return false;
    memcpy(digits, text + span.at, span.length);
    digits[span.length] = '\0';
    *ret_number = strtod(digits, NULL);
    return *ret_number - *ret_number == 0; /* not infinite */
}

bool rv_scan_is_true(const char *text, struct rv_span span)
{
    struct rv_span value;
    uint32_t at = 0;
    double number;

    if (span.length == 0 || strchr("fn", text[span.at]))
        return false;
    if (text[span.at] == '"')
        return span.length > 2;
    if (text[span.at] == '{' || text[span.at] == '[')
        return rv_scan_next(text, span, &at, NULL, &value);
    return !rv_scan_number(text, span, &number) || number != 0;
}
