#include "json.h"

#include <endian.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_text.h"
#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define FEW 16u          /* names that are compared each with each; more are sorted */
#define SAFE_DIGITS 300u /* a number of fewer characters without an exponent is no more than a double holds */
#define FIRST_SHARE 12u  /* bytes per value that are reckoned with at first */
#define FIRST_ROOM 64u

struct reader {
    struct rv_json *json;
    const struct rv_json_limits *limits;
    const char *input; /* as it came; json->text is decoded on the way */
    uint8_t *text;
    size_t length, at;
    uint32_t open[RV_JSON_DEPTH_MAX]; /* the arrays and objects that are not closed yet */
    uint32_t last[RV_JSON_DEPTH_MAX]; /* the newest value in each; RV_JSON_NONE = none yet */
    uint32_t depth;
    uint32_t *names; /* members of an object, to be sorted */
    uint32_t names_room;
    struct rv_error *err;
};

/* ---- errors ------------------------------------------------------------------------------------------------------ */

static int __attribute__((format(printf, 3, 4))) bad(const struct reader *r, size_t at, const char *format, ...)
{
    unsigned line = 1, column = 1;
    char text[128];
    va_list ap;

    for (size_t i = 0; i < at && i < r->length; i++) {
        unsigned char c = (unsigned char)r->input[i];

        column += (c & 0xc0) != 0x80; /* characters, not bytes */
        if (c == '\n') {
            line++;
            column = 1;
        }
    }
    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    return rv_error_set(r->err, EINVAL, CODE(BAD_REQUEST), "line %u, column %u: %s", line, column, text);
}

static int no_memory(const struct reader *r)
{
    return rv_error_set(r->err, ENOMEM, CODE(NO_MEMORY), "no memory for %s", r->limits->what);
}

/* ---- characters -------------------------------------------------------------------------------------------------- */

/* The next byte that is no space, not taken; -1 = the text ends. */
static inline int peek(struct reader *r)
{
    while (r->at < r->length) {
        uint8_t c = r->text[r->at];

        if (c > ' ' || (c != ' ' && c != '\n' && c != '\r' && c != '\t'))
            return c;
        r->at++;
    }
    return -1;
}

static int unexpected(struct reader *r, const char *wanted)
{
    if (peek(r) < 0)
        return bad(r, r->at, "it ends where %s should be", wanted);
    return bad(r, r->at, "%s should be here", wanted);
}

/* How many of the 8 bytes at p come before a quote, a backslash, a control character, or what is no ASCII. */
static inline unsigned plain_bytes(const uint8_t *p)
{
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = UINT64_C(0x8080808080808080);
    uint64_t x, quotes, slashes, marks;

    memcpy(&x, p, sizeof(x));
    x = le64toh(x);
    quotes = x ^ (ones * '"');
    slashes = x ^ (ones * '\\');
    /* A borrow goes to later bytes only, so the first mark is a true one. */
    marks = ((x - ones * 0x20) | (quotes - ones) | (slashes - ones) | x) & tops;
    return marks ? (unsigned)__builtin_ctzll(marks) / 8 : 8;
}

/* What is special in a text: *to is where it is decoded to. 0 = went past it; 1 = the closing quote; else an error. */
static int read_special(struct reader *r, size_t *to)
{
    uint8_t c = r->text[r->at];
    unsigned n, written;
    const char *problem;

    if (c == '"')
        return 1;
    if (c == '\\') {
        char out[4];

        problem = rv_json_escape(r->text + r->at + 1, r->length - r->at - 1, out, &n, &written);
        if (problem)
            return bad(r, r->at, "%s", problem);
        memcpy(r->text + *to, out, written);
        *to += written;
        r->at += 1 + n;
        return 0;
    }
    if (c < 0x20)
        return bad(r, r->at, "a control character in a text");
    n = c < 0x80 ? 1 : rv_utf8_sequence(r->text + r->at, r->length - r->at);
    if (n == 0)
        return bad(r, r->at, "a text that is not UTF-8");
    memmove(r->text + *to, r->text + r->at, n);
    *to += n;
    r->at += n;
    return 0;
}

/* A string whose opening quote is at r->at. It is decoded in place, which never makes it longer. */
static int read_string(struct reader *r, uint32_t *ret_at, uint32_t *ret_length)
{
    size_t opened = r->at++, start = r->at, to = r->at;

    while (r->at < r->length) {
        unsigned n = r->at + 8 <= r->length ? plain_bytes(r->text + r->at) : 0;
        int special;

        if (n > 0) {
            if (to != r->at)
                memmove(r->text + to, r->text + r->at, n);
            to += n;
            r->at += n;
            if (n == 8)
                continue;
        }
        special = read_special(r, &to);
        if (special < 0)
            return special;
        if (special == 0)
            continue;
        r->text[to] = '\0'; /* at the closing quote, or before it */
        r->at++;
        *ret_at = (uint32_t)start;
        *ret_length = (uint32_t)(to - start);
        return 0;
    }
    return bad(r, opened, "a text without an end");
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static int grow(struct reader *r)
{
    uint32_t room = r->json->room ? 2 * r->json->room : (uint32_t)(r->length / FIRST_SHARE) + FIRST_ROOM;
    struct rv_json_value *values = reallocarray(r->json->values, room, sizeof(*values));

    if (!values)
        return no_memory(r);
    r->json->values = values;
    r->json->room = room;
    return 0;
}

/* A new value at r->at, in the array or object that is open. */
static int add_value(struct reader *r, enum rv_json_kind kind, uint32_t key, uint32_t key_length, uint32_t *ret_number)
{
    uint32_t number = r->json->count;

    if (number >= r->limits->values)
        return rv_error_set(r->err, E2BIG, CODE(TOO_LARGE), "%s has more than %u values", r->limits->what,
                            r->limits->values);
    if (number == r->json->room && grow(r) < 0)
        return -ENOMEM;
    r->json->values[number] = (struct rv_json_value){
        .key = key, .key_length = key_length, .begin = (uint32_t)r->at, .next = RV_JSON_NONE, .kind = kind};
    r->json->count++;
    if (r->depth > 0) {
        uint32_t *last = &r->last[r->depth - 1];

        if (*last != RV_JSON_NONE)
            r->json->values[*last].next = number;
        *last = number;
        r->json->values[r->open[r->depth - 1]].length++;
    }
    *ret_number = number;
    return 0;
}

static size_t skip_digits(const struct reader *r, size_t at)
{
    while (at < r->length && r->text[at] >= '0' && r->text[at] <= '9')
        at++;
    return at;
}

static int read_number(struct reader *r)
{
    size_t start = r->at, at = start + (r->text[start] == '-'), digits = at;
    bool exponent = false;

    at = skip_digits(r, at);
    if (at == digits || (at - digits > 1 && r->text[digits] == '0'))
        return bad(r, start, "this is no number");
    if (at < r->length && r->text[at] == '.') {
        digits = ++at;
        at = skip_digits(r, at);
        if (at == digits)
            return bad(r, start, "this is no number");
    }
    if (at < r->length && (r->text[at] == 'e' || r->text[at] == 'E')) {
        exponent = true;
        at++;
        at += at < r->length && (r->text[at] == '+' || r->text[at] == '-');
        digits = at;
        at = skip_digits(r, at);
        if (at == digits)
            return bad(r, start, "this is no number");
    }
    /* strtod stops at what stands behind the number, at the latest at the NUL behind the text */
    if ((exponent || at - start >= SAFE_DIGITS) && isinf(strtod((const char *)r->text + start, NULL)))
        return bad(r, start, "a number that is too large");
    r->at = at;
    return 0;
}

static int read_word(struct reader *r, const char *word)
{
    size_t n = strlen(word);

    if (r->length - r->at < n || memcmp(r->text + r->at, word, n) != 0)
        return unexpected(r, "a value");
    r->at += n;
    return 0;
}

static int open_container(struct reader *r, uint32_t number)
{
    if (r->depth == r->limits->depth)
        return rv_error_set(r->err, E2BIG, CODE(TOO_LARGE), "%s is nested deeper than %u levels", r->limits->what,
                            r->limits->depth);
    r->open[r->depth] = number;
    r->last[r->depth++] = RV_JSON_NONE;
    r->at++;
    return 0;
}

static enum rv_json_kind kind_of(int c)
{
    switch (c) {
    case '{':
        return RV_JSON_OBJECT;
    case '[':
        return RV_JSON_ARRAY;
    case '"':
        return RV_JSON_STRING;
    case 't':
        return RV_JSON_TRUE;
    case 'f':
        return RV_JSON_FALSE;
    case 'n':
        return RV_JSON_NULL;
    default:
        return RV_JSON_NUMBER;
    }
}

/* A value that begins at r->at; of an array or object only its opening. */
static int read_value(struct reader *r, uint32_t key, uint32_t key_length)
{
    static const char *const words[] = {[RV_JSON_NULL] = "null", [RV_JSON_FALSE] = "false", [RV_JSON_TRUE] = "true"};
    int c = peek(r), result;
    enum rv_json_kind kind = kind_of(c);
    struct rv_json_value *value;
    uint32_t number = 0, at = 0, length = 0;

    if (c < 0 || (kind == RV_JSON_NUMBER && c != '-' && (c < '0' || c > '9')))
        return unexpected(r, "a value");
    result = add_value(r, kind, key, key_length, &number);
    if (result < 0)
        return result;
    if (kind >= RV_JSON_ARRAY)
        return open_container(r, number);
    if (kind == RV_JSON_STRING)
        result = read_string(r, &at, &length);
    else
        result = kind == RV_JSON_NUMBER ? read_number(r) : read_word(r, words[kind]);
    value = &r->json->values[number];
    value->at = at;
    value->length = length;
    value->end = (uint32_t)r->at;
    return result;
}

static int read_member(struct reader *r)
{
    uint32_t key, length;
    int result;

    if (peek(r) != '"')
        return unexpected(r, "a name in quotes");
    result = read_string(r, &key, &length);
    if (result < 0)
        return result;
    if (memchr(r->text + key, '\0', length))
        return bad(r, r->at, "a NUL in a name");
    if (peek(r) != ':')
        return unexpected(r, "':'");
    r->at++;
    return read_value(r, key, length);
}

/* ---- members of one name ----------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b, void *context)
{
    const struct rv_json *json = context;
    uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    const struct rv_json_value *x = &json->values[i], *y = &json->values[k];
    int order;

    if (x->key_length != y->key_length)
        return x->key_length < y->key_length ? -1 : 1;
    order = memcmp(json->text + x->key, json->text + y->key, x->key_length);
    return order ? order : (i > k) - (i < k);
}

static bool same_name(const struct rv_json *json, uint32_t a, uint32_t b)
{
    const struct rv_json_value *x = &json->values[a], *y = &json->values[b];

    return x->key_length == y->key_length && memcmp(json->text + x->key, json->text + y->key, x->key_length) == 0;
}

/* `later` counts in the place of `first`. */
static void replace(struct rv_json *json, uint32_t first, uint32_t later)
{
    json->values[first].same = later - first;
    json->values[later].hidden = 1;
}

/* Sorting, not hashing: nobody can choose names that make it slow. */
static int find_same_sorted(struct reader *r, const struct rv_json_value *object, uint32_t first)
{
    uint32_t n = 0, begin = 0, previous = first, i;

    /* Ids of nodes mostly rise: then there is nothing to sort, and no name comes twice. */
    for (i = r->json->values[first].next; i != RV_JSON_NONE; previous = i, i = r->json->values[i].next)
        if (compare_names(&previous, &i, r->json) > 0 || same_name(r->json, previous, i))
            break;
    if (i == RV_JSON_NONE)
        return 0;
    if (object->length > r->names_room) {
        uint32_t *names = reallocarray(r->names, object->length, sizeof(*names));

        if (!names)
            return no_memory(r);
        r->names = names;
        r->names_room = object->length;
    }
    for (i = first; i != RV_JSON_NONE; i = r->json->values[i].next)
        r->names[n++] = i;
    qsort_r(r->names, n, sizeof(*r->names), compare_names, r->json);
    for (i = 1; i < n; i++) {
        if (same_name(r->json, r->names[begin], r->names[i]))
            replace(r->json, r->names[begin], r->names[i]);
        else
            begin = i;
    }
    return 0;
}

static int find_same(struct reader *r, uint32_t number)
{
    const struct rv_json_value *object = &r->json->values[number];
    uint32_t first = number + 1;

    if (object->length < 2)
        return 0;
    if (object->length > FEW)
        return find_same_sorted(r, object, first);
    for (uint32_t i = first; i != RV_JSON_NONE; i = r->json->values[i].next)
        for (uint32_t k = r->json->values[i].next; !r->json->values[i].hidden && k != RV_JSON_NONE;
             k = r->json->values[k].next)
            if (same_name(r->json, i, k))
                replace(r->json, i, k);
    return 0;
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

static int close_container(struct reader *r, uint32_t number)
{
    r->at++;
    r->depth--;
    r->json->values[number].end = (uint32_t)r->at;
    return r->json->values[number].kind == RV_JSON_OBJECT ? find_same(r, number) : 0;
}

static int read_all(struct reader *r)
{
    int c = peek(r), result;

    if (c != '{' && c != '[')
        return unexpected(r, "'{' or '['");
    result = read_value(r, 0, 0);
    while (result == 0 && r->depth > 0) {
        uint32_t number = r->open[r->depth - 1];
        bool is_object = r->json->values[number].kind == RV_JSON_OBJECT;

        c = peek(r);
        if (c == (is_object ? '}' : ']')) {
            result = close_container(r, number);
            continue;
        }
        if (r->last[r->depth - 1] != RV_JSON_NONE) {
            if (c != ',')
                return unexpected(r, is_object ? "',' or '}'" : "',' or ']'");
            r->at++;
        }
        result = is_object ? read_member(r) : read_value(r, 0, 0);
    }
    if (result == 0 && peek(r) >= 0)
        return bad(r, r->at, "more behind the end");
    return result;
}

int rv_json_parse(struct rv_json *json, const char *text, size_t length, const struct rv_json_limits *limits,
                  struct rv_error *err)
{
    struct reader reader = {.json = json, .limits = limits, .input = text, .length = length, .err = err};
    int r;

    *json = (struct rv_json){.length = length};
    if (length > RV_JSON_TEXT_MAX)
        return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "%s is larger than %u MiB", limits->what,
                            RV_JSON_TEXT_MAX / 1024 / 1024);
    json->text = malloc(length + 1);
    if (!json->text)
        return no_memory(&reader);
    if (length > 0)
        memcpy(json->text, text, length);
    json->text[length] = '\0';
    reader.text = (uint8_t *)json->text;
    r = read_all(&reader);
    free(reader.names);
    return r;
}

void rv_json_fini(struct rv_json *json)
{
    free(json->values);
    free(json->text);
    *json = (struct rv_json){0};
}

/* ---- reading it -------------------------------------------------------------------------------------------------- */

bool rv_json_is(const struct rv_json *json, uint32_t value, enum rv_json_kind kind)
{
    return value != RV_JSON_NONE && json->values[value].kind == (unsigned)kind;
}

uint32_t rv_json_value_at(const struct rv_json *json, uint32_t place)
{
    return place == RV_JSON_NONE ? place : place + json->values[place].same;
}

uint32_t rv_json_get(const struct rv_json *json, uint32_t object, const char *name)
{
    size_t n = strlen(name);

    if (!rv_json_is(json, object, RV_JSON_OBJECT) || json->values[object].length == 0)
        return RV_JSON_NONE;
    for (uint32_t i = object + 1; i != RV_JSON_NONE; i = json->values[i].next)
        if (json->values[i].key_length == n && memcmp(json->text + json->values[i].key, name, n) == 0)
            return rv_json_value_at(json, i);
    return RV_JSON_NONE;
}

const char *rv_json_string(const struct rv_json *json, uint32_t value, size_t *ret_length)
{
    if (ret_length)
        *ret_length = 0;
    if (!rv_json_is(json, value, RV_JSON_STRING))
        return NULL;
    if (ret_length)
        *ret_length = json->values[value].length;
    return json->text + json->values[value].at;
}

double rv_json_number(const struct rv_json *json, uint32_t value)
{
    return rv_json_is(json, value, RV_JSON_NUMBER) ? strtod(json->text + json->values[value].begin, NULL) : 0;
}

uint32_t rv_json_first(const struct rv_json *json, uint32_t value)
{
    return value != RV_JSON_NONE && json->values[value].kind >= RV_JSON_ARRAY && json->values[value].length > 0
               ? value + 1
               : RV_JSON_NONE;
}

uint32_t rv_json_next(const struct rv_json *json, uint32_t place)
{
    do {
        place = json->values[place].next;
    } while (place != RV_JSON_NONE && json->values[place].hidden);
    return place;
}

uint32_t rv_json_size(const struct rv_json *json, uint32_t value)
{
    uint32_t n = 0;

    for (uint32_t i = rv_json_first(json, value); i != RV_JSON_NONE; i = rv_json_next(json, i))
        n++;
    return n;
}

const char *rv_json_key(const struct rv_json *json, uint32_t place)
{
    return json->text + json->values[place].key;
}
