#include "safetensors.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "index.h"
#include "json_text.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

#define PREFIX_BYTES 8u                  /* the length before the header */
#define METADATA_KEYS_MAX (1024u * 1024) /* keys of __metadata__ */
#define SHOWN_NAME 160u                  /* bytes of a name in a message */
#define TENSORS_FIRST 64u                /* first size of the growing tables */

/* A name for the search for duplicates. */
struct name_key {
    uint64_t hash;
    const char *name;
    uint32_t length;
};

struct key_list {
    struct name_key *keys;
    uint32_t count, capacity;
};

struct scan {
    const uint8_t *bytes;
    uint64_t at, length;
    char *text; /* decoded strings; as long as the header, so it cannot overflow: quotes make room for the NUL */
    uint64_t text_used;
    struct rv_safetensor *tensors;
    uint32_t count, capacity;
    char *metadata;
    uint64_t metadata_length;
    struct rv_error *err;
};

/* ---- errors ---------------------------------------------------------------------------------------------------- */

/* Malformed JSON at header byte `at`; the message counts from the start of the file, as a hex editor does. */
static int __attribute__((format(printf, 3, 4))) bad_json(struct scan *s, uint64_t at, const char *format, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    return rv_error_set(s->err, EBADMSG, ERROR(MODEL_INVALID), "malformed header at byte %llu of the file: %s",
                        (unsigned long long)(at + PREFIX_BYTES), text);
}

static int __attribute__((format(printf, 4, 5)))
bad_tensor(struct rv_error *err, const char *name, uint32_t length, const char *format, ...)
{
    char text[256], shown[SHOWN_NAME];
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    return rv_error_set(err, EBADMSG, ERROR(MODEL_INVALID), "tensor \"%s\": %s",
                        rv_escape(shown, sizeof(shown), name, length), text);
}

static int no_memory(struct rv_error *err)
{
    return rv_error_set(err, ENOMEM, ERROR(NO_MEMORY), "no memory for the tables of the header");
}

/* ---- the scanner ----------------------------------------------------------------------------------------------- */

static void skip_space(struct scan *s)
{
    while (s->at < s->length &&
           (s->bytes[s->at] == ' ' || s->bytes[s->at] == '\n' || s->bytes[s->at] == '\r' || s->bytes[s->at] == '\t'))
        s->at++;
}

/* The next byte that is not space, not consumed; -1 = the header ends. */
static int peek(struct scan *s)
{
    skip_space(s);
    return s->at < s->length ? s->bytes[s->at] : -1;
}

static int expect(struct scan *s, char wanted)
{
    int c = peek(s);

    if (c == wanted) {
        s->at++;
        return 0;
    }
    if (c < 0)
        return bad_json(s, s->at, "it ends where '%c' should be", wanted);
    return bad_json(s, s->at, "'%c' should be here", wanted);
}

/* After an element: 1 = a comma, more follow; 0 = the closing character. */
static int more(struct scan *s, char closing)
{
    if (peek(s) == ',') {
        s->at++;
        return 1;
    }
    return expect(s, closing);
}

/* s->at is at the backslash. */
static int scan_escape(struct scan *s)
{
    unsigned n, written;
    char *out = s->text + s->text_used;
    const char *problem = rv_json_escape(s->bytes + s->at + 1, s->length - s->at - 1, out, &n, &written);

    if (problem)
        return bad_json(s, s->at + 1, "%s", problem);
    if (*out == '\0')
        return bad_json(s, s->at + 1, "a NUL in a text");
    s->text_used += written;
    s->at += 1 + n;
    return 0;
}

/* A JSON string, decoded into s->text with a NUL after it. */
static int scan_string(struct scan *s, const char **ret_text, uint32_t *ret_length)
{
    uint64_t start = s->text_used, opened;
    int r = expect(s, '"');

    if (r < 0)
        return r;
    opened = s->at - 1;
    while (s->at < s->length && s->bytes[s->at] != '"') {
        uint8_t c = s->bytes[s->at];
        unsigned n;

        if (c == '\\') {
            r = scan_escape(s);
            if (r < 0)
                return r;
            continue;
        }
        if (c < 0x20)
            return bad_json(s, s->at, "a control character in a text");
        n = c < 0x80 ? 1 : rv_utf8_sequence(s->bytes + s->at, s->length - s->at);
        if (n == 0)
            return bad_json(s, s->at, "a text that is not UTF-8");
        memcpy(s->text + s->text_used, s->bytes + s->at, n);
        s->text_used += n;
        s->at += n;
    }
    if (s->at >= s->length)
        return bad_json(s, opened, "a text without an end");
    s->at++;
    *ret_text = s->text + start;
    *ret_length = (uint32_t)(s->text_used - start); /* at most the header's 100 MB */
    s->text[s->text_used++] = '\0';
    return 0;
}

/* A whole number from 0 to 2^64 - 1, as JSON writes it. */
static int scan_number(struct scan *s, uint64_t *ret_number)
{
    uint64_t number = 0, start;
    int c = peek(s);

    start = s->at;
    if (c < '0' || c > '9')
        return bad_json(s, start, "a whole number from 0 should be here");
    while (s->at < s->length && s->bytes[s->at] >= '0' && s->bytes[s->at] <= '9') {
        if (__builtin_mul_overflow(number, (uint64_t)10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(s->bytes[s->at] - '0'), &number))
            return bad_json(s, start, "a number over 2^64");
        s->at++;
    }
    if (s->at - start > 1 && s->bytes[start] == '0')
        return bad_json(s, start, "a number with a zero in front");
    if (s->at < s->length && (s->bytes[s->at] == '.' || s->bytes[s->at] == 'e' || s->bytes[s->at] == 'E'))
        return bad_json(s, start, "a whole number should be here, without a point or exponent");
    *ret_number = number;
    return 0;
}

/* An array of at most max numbers. */
static int scan_numbers(struct scan *s, uint64_t *numbers, uint32_t max, uint32_t *ret_count)
{
    uint32_t count = 0;
    uint64_t start;
    int r = expect(s, '[');

    if (r < 0)
        return r;
    start = s->at - 1;
    if (peek(s) == ']') {
        s->at++;
        *ret_count = 0;
        return 0;
    }
    do {
        if (count == max)
            return bad_json(s, start, "more than %u numbers", max);
        r = scan_number(s, &numbers[count]);
        if (r < 0)
            return r;
        count++;
        r = more(s, ']');
    } while (r == 1);
    *ret_count = count;
    return r;
}

/* ---- duplicate names ------------------------------------------------------------------------------------------- */

static int compare_keys(const void *a, const void *b)
{
    const struct name_key *x = a, *y = b;

    if (x->hash != y->hash)
        return x->hash < y->hash ? -1 : 1;
    if (x->length != y->length)
        return x->length < y->length ? -1 : 1;
    return memcmp(x->name, y->name, x->length);
}

static void key_set(struct name_key *key, const char *name, uint32_t length)
{
    key->hash = XXH3_64bits(name, length);
    key->name = name;
    key->length = length;
}

/* Sorting, not a hash table: chosen names cannot make it slow. NULL = all differ. */
static const struct name_key *find_duplicate(struct name_key *keys, uint32_t count)
{
    if (count < 2)
        return NULL;
    qsort(keys, count, sizeof(*keys), compare_keys);
    for (uint32_t i = 1; i < count; i++)
        if (compare_keys(&keys[i - 1], &keys[i]) == 0)
            return &keys[i];
    return NULL;
}

/* Makes room for one more element of a table that doubles. */
static int grow(void *table_pointer, uint32_t count, uint32_t *capacity, size_t size)
{
    uint32_t wanted = *capacity ? *capacity * 2 : TENSORS_FIRST;
    void *table;

    if (count < *capacity)
        return 0;
    memcpy(&table, table_pointer, sizeof(table));
    table = realloc(table, (size_t)wanted * size);
    if (!table)
        return -ENOMEM;
    memcpy(table_pointer, &table, sizeof(table));
    *capacity = wanted;
    return 0;
}

/* ---- __metadata__ ---------------------------------------------------------------------------------------------- */

/* Appends the raw token [from, s->at): it is valid JSON as it stands. */
static void metadata_put(struct scan *s, uint64_t from)
{
    memcpy(s->metadata + s->metadata_length, s->bytes + from, s->at - from);
    s->metadata_length += s->at - from;
}

/* One "key": "value". The key's text stays for the search for duplicates. */
static int scan_metadata_pair(struct scan *s, struct key_list *list)
{
    const char *key, *value;
    uint32_t length, value_length;
    uint64_t used, from;
    int r;

    if (list->count == METADATA_KEYS_MAX)
        return bad_json(s, s->at, "more than %u keys in __metadata__", METADATA_KEYS_MAX);
    if (grow(&list->keys, list->count, &list->capacity, sizeof(*list->keys)) < 0)
        return no_memory(s->err);
    (void)peek(s);
    from = s->at;
    r = scan_string(s, &key, &length);
    if (r < 0)
        return r;
    metadata_put(s, from);
    key_set(&list->keys[list->count++], key, length);
    r = expect(s, ':');
    if (r < 0)
        return r;
    s->metadata[s->metadata_length++] = ':';
    if (peek(s) != '"')
        return bad_json(s, s->at, "values in __metadata__ are texts");
    used = s->text_used;
    from = s->at;
    r = scan_string(s, &value, &value_length);
    if (r < 0)
        return r;
    s->text_used = used;
    metadata_put(s, from);
    return 0;
}

static int scan_metadata(struct scan *s)
{
    struct key_list list = {0};
    const struct name_key *twice;
    char shown[SHOWN_NAME];
    uint64_t start;
    int r = expect(s, '{');

    if (r < 0)
        return r;
    start = s->at - 1;
    s->metadata = malloc(s->length - start + 1); /* compact text is never longer than what it comes from */
    if (!s->metadata)
        return no_memory(s->err);
    s->metadata[s->metadata_length++] = '{';
    if (peek(s) == '}') {
        s->at++;
    } else {
        do {
            if (list.count > 0)
                s->metadata[s->metadata_length++] = ',';
            r = scan_metadata_pair(s, &list);
            if (r < 0)
                goto out;
            r = more(s, '}');
        } while (r == 1);
        if (r < 0)
            goto out;
    }
    s->metadata[s->metadata_length++] = '}';
    s->metadata[s->metadata_length] = '\0';
    twice = find_duplicate(list.keys, list.count);
    if (twice)
        r = bad_json(s, start, "the key \"%s\" is there twice",
                     rv_escape(shown, sizeof(shown), twice->name, twice->length));
out:
    free(list.keys);
    return r;
}

/* ---- tensors --------------------------------------------------------------------------------------------------- */

static int scan_dtype(struct scan *s, struct rv_safetensor *t)
{
    static const char *const sub_byte[] = {"F4", "F6_E2M3", "F6_E3M2", "I4", "U4", "I2", "U2", "I1", "U1", "F4_E2M1"};
    uint64_t used = s->text_used;
    char shown[64], shown_name[SHOWN_NAME];
    const char *text;
    uint32_t length;
    int r = scan_string(s, &text, &length);

    if (r < 0)
        return r;
    s->text_used = used;
    t->dtype = (uint16_t)rv_dtype_by_name(text, length);
    if (t->dtype != RV_INDEX_DTYPE_NONE && t->dtype != RV_INDEX_BLOB) /* BLOB is our word, not the format's */
        return 0;
    (void)rv_escape(shown, sizeof(shown), text, length);
    for (unsigned i = 0; i < sizeof(sub_byte) / sizeof(sub_byte[0]); i++) {
        if (strcmp(sub_byte[i], text) != 0)
            continue;
        rv_error_set(s->err, EOPNOTSUPP, ERROR(UNSUPPORTED),
                     "tensor \"%s\" has the dtype %s: elements smaller than a byte are not supported",
                     rv_escape(shown_name, sizeof(shown_name), t->name, t->name_length), shown);
        rv_error_remedy(s->err, "store the tensor as U8 or in a larger type");
        return -EOPNOTSUPP;
    }
    return bad_tensor(s->err, t->name, t->name_length, "unknown dtype \"%s\"", shown);
}

static int scan_shape(struct scan *s, struct rv_safetensor *t)
{
    uint32_t rank = 0;
    int r = scan_numbers(s, t->shape, RV_RANK_MAX, &rank);

    if (r == 0)
        t->rank = (uint8_t)rank;
    return r;
}

static int scan_offsets(struct scan *s, struct rv_safetensor *t)
{
    uint64_t start, offsets[2] = {0};
    uint32_t count = 0;
    int r;

    (void)peek(s);
    start = s->at;
    r = scan_numbers(s, offsets, 2, &count);
    if (r < 0)
        return r;
    if (count != 2)
        return bad_json(s, start, "data_offsets are two numbers");
    t->begin = offsets[0];
    t->end = offsets[1];
    return 0;
}

static const struct {
    const char *key;
    int (*scan)(struct scan *s, struct rv_safetensor *t);
} tensor_keys[] = {{"dtype", scan_dtype}, {"shape", scan_shape}, {"data_offsets", scan_offsets}};
#define TENSOR_KEYS (sizeof(tensor_keys) / sizeof(tensor_keys[0]))

/* One "key": value of a tensor. */
static int scan_tensor_pair(struct scan *s, struct rv_safetensor *t, unsigned *seen)
{
    uint64_t used = s->text_used, start;
    const char *key;
    uint32_t length;
    char shown[64];
    int r;

    (void)peek(s);
    start = s->at;
    r = scan_string(s, &key, &length);
    if (r < 0)
        return r;
    s->text_used = used;
    for (unsigned i = 0; i < TENSOR_KEYS; i++) {
        if (strcmp(tensor_keys[i].key, key) != 0)
            continue;
        if (*seen & 1u << i)
            return bad_json(s, start, "the key \"%s\" is there twice", tensor_keys[i].key);
        *seen |= 1u << i;
        r = expect(s, ':');
        return r < 0 ? r : tensor_keys[i].scan(s, t);
    }
    return bad_json(s, start, "the unknown key \"%s\"; a tensor has dtype, shape and data_offsets",
                    rv_escape(shown, sizeof(shown), key, length));
}

/* What can be said of a tensor alone. */
static int check_tensor(struct scan *s, const struct rv_safetensor *t)
{
    uint64_t bytes;

    if (!rv_shape_bytes(t->dtype, t->shape, t->rank, &bytes))
        return bad_tensor(s->err, t->name, t->name_length, "its shape is larger than 2^64 bytes");
    if (t->begin > t->end || t->end - t->begin != bytes)
        return bad_tensor(s->err, t->name, t->name_length,
                          "its shape takes %llu bytes, its data_offsets are [%llu, %llu)", (unsigned long long)bytes,
                          (unsigned long long)t->begin, (unsigned long long)t->end);
    return 0;
}

static int scan_tensor(struct scan *s, const char *name, uint32_t name_length)
{
    struct rv_safetensor t = {.name = name, .name_length = name_length};
    unsigned seen = 0;
    int r;

    if (name_length > RV_TENSOR_NAME_MAX)
        return bad_tensor(s->err, name, name_length, "a name over %u bytes", RV_TENSOR_NAME_MAX);
    if (s->count == RV_TENSORS_MAX)
        return bad_json(s, s->at, "more than %u tensors", RV_TENSORS_MAX);
    r = expect(s, '{');
    if (r < 0)
        return r;
    if (peek(s) == '}') {
        s->at++;
    } else {
        do {
            r = scan_tensor_pair(s, &t, &seen);
            if (r < 0)
                return r;
            r = more(s, '}');
        } while (r == 1);
        if (r < 0)
            return r;
    }
    for (unsigned i = 0; i < TENSOR_KEYS; i++)
        if (!(seen & 1u << i))
            return bad_tensor(s->err, name, name_length, "it has no %s", tensor_keys[i].key);
    r = check_tensor(s, &t);
    if (r < 0)
        return r;
    if (grow(&s->tensors, s->count, &s->capacity, sizeof(t)) < 0)
        return no_memory(s->err);
    s->tensors[s->count++] = t;
    return 0;
}

static int scan_header(struct scan *s)
{
    const char *name;
    uint32_t length;
    int r;

    if (s->length == 0 || s->bytes[0] != '{')
        return bad_json(s, 0, "'{' should be here: this is not a safetensors header");
    s->at = 1;
    if (peek(s) == '}') {
        s->at++;
        r = 0;
    } else {
        do {
            uint64_t start;

            (void)peek(s);
            start = s->at;
            r = scan_string(s, &name, &length);
            if (r == 0)
                r = expect(s, ':');
            if (r < 0)
                return r;
            if (strcmp(name, "__metadata__") == 0)
                r = s->metadata ? bad_json(s, start, "__metadata__ is there twice") : scan_metadata(s);
            else
                r = scan_tensor(s, name, length);
            if (r < 0)
                return r;
            r = more(s, '}');
        } while (r == 1);
    }
    if (r == 0 && peek(s) >= 0)
        r = bad_json(s, s->at, "something follows the closing '}'");
    return r;
}

/* ---- the tensors together -------------------------------------------------------------------------------------- */

static int compare_places(const void *a, const void *b)
{
    const struct rv_safetensor *x = a, *y = b;
    uint32_t shorter = x->name_length < y->name_length ? x->name_length : y->name_length;
    int r;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    r = memcmp(x->name, y->name, shorter);
    return r ? r : x->name_length < y->name_length ? -1 : x->name_length > y->name_length;
}

static int check_names(const struct scan *s)
{
    const struct name_key *twice;
    struct name_key *keys;
    int r = 0;

    if (s->count == 0)
        return 0;
    keys = malloc(s->count * sizeof(*keys));
    if (!keys)
        return no_memory(s->err);
    for (uint32_t i = 0; i < s->count; i++)
        key_set(&keys[i], s->tensors[i].name, s->tensors[i].name_length);
    twice = find_duplicate(keys, s->count);
    if (twice)
        r = bad_tensor(s->err, twice->name, twice->length, "this name is there twice");
    free(keys);
    return r;
}

/* Sorts by place; every byte of the data section must belong to exactly one tensor. */
static int check_places(struct scan *s, uint64_t data_length)
{
    uint64_t expected = 0;
    bool sorted = true;

    for (uint32_t i = 1; i < s->count && sorted; i++)
        sorted = compare_places(&s->tensors[i - 1], &s->tensors[i]) <= 0;
    if (!sorted)
        qsort(s->tensors, s->count, sizeof(*s->tensors), compare_places);
    for (uint32_t i = 0; i < s->count; i++) {
        const struct rv_safetensor *t = &s->tensors[i];

        if (t->end > data_length)
            return bad_tensor(s->err, t->name, t->name_length,
                              "it ends at data byte %llu, but the file has only %llu: it is truncated",
                              (unsigned long long)t->end, (unsigned long long)data_length);
        if (t->begin != expected)
            return bad_tensor(s->err, t->name, t->name_length, "it starts at data byte %llu, %s %llu",
                              (unsigned long long)t->begin,
                              t->begin < expected ? "inside the tensor before it, which ends at"
                                                  : "leaving a gap after the one before it, which ends at",
                              (unsigned long long)expected);
        expected = t->end;
    }
    if (expected != data_length)
        return rv_error_set(s->err, EBADMSG, ERROR(MODEL_INVALID),
                            "%llu bytes follow the last tensor, which ends at data byte %llu",
                            (unsigned long long)(data_length - expected), (unsigned long long)expected);
    return 0;
}

int rv_safetensors_parse(const uint8_t *header, uint64_t header_length, uint64_t file_size,
                         struct rv_safetensors *ret_file, struct rv_error *err)
{
    struct scan s = {.bytes = header, .length = header_length, .err = err};
    XXH128_canonical_t digest;
    int r;

    if (header_length > RV_SAFETENSORS_HEADER_MAX)
        return rv_error_set(err, EBADMSG, ERROR(MODEL_INVALID), "a header of %llu bytes: the format allows %u",
                            (unsigned long long)header_length, RV_SAFETENSORS_HEADER_MAX);
    if (file_size < PREFIX_BYTES || header_length > file_size - PREFIX_BYTES)
        return rv_error_set(err, EBADMSG, ERROR(MODEL_INVALID),
                            "a header of %llu bytes in a file of %llu bytes: it is truncated, or no safetensors file",
                            (unsigned long long)header_length, (unsigned long long)file_size);
    s.text = malloc(header_length + 1);
    if (!s.text)
        return no_memory(err);
    r = scan_header(&s);
    if (r == 0)
        r = check_names(&s);
    if (r == 0)
        r = check_places(&s, file_size - PREFIX_BYTES - header_length);
    if (r < 0) {
        free(s.text);
        free(s.tensors);
        free(s.metadata);
        return r;
    }
    *ret_file = (struct rv_safetensors){.tensors = s.tensors,
                                        .count = s.count,
                                        .data_start = PREFIX_BYTES + header_length,
                                        .data_length = file_size - PREFIX_BYTES - header_length,
                                        .metadata = s.metadata,
                                        .metadata_length = s.metadata_length,
                                        .memory = s.text};
    XXH128_canonicalFromHash(&digest, XXH3_128bits(header, header_length));
    memcpy(ret_file->header_digest, digest.digest, sizeof(ret_file->header_digest));
    return 0;
}

void rv_safetensors_fini(struct rv_safetensors *file)
{
    free(file->tensors);
    free(file->metadata);
    free(file->memory);
    *file = (struct rv_safetensors){0};
}
