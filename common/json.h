/*
 * JSON that nobody vouches for, read once into a flat list of values: for requests, where a tree of objects would cost
 * more than all that is done with it. Strict (RFC 8259, UTF-8, whole surrogate pairs), with named limits.
 *
 * One block of memory holds a copy of the text, in which strings are decoded in place, and another one the values in
 * the order of the text. Values are named by their numbers; 0 is the root. Of members with one name the last one
 * counts, at the place of the first, as in Python. No process state, any thread.
 */
#ifndef RV_JSON_H
#define RV_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

#define RV_JSON_NONE UINT32_MAX
#define RV_JSON_TEXT_MAX (64u * 1024 * 1024) /* bytes */
#define RV_JSON_DEPTH_MAX 256u               /* what a caller may allow */

enum rv_json_kind {
    RV_JSON_NULL,
    RV_JSON_FALSE,
    RV_JSON_TRUE,
    RV_JSON_NUMBER,
    RV_JSON_STRING,
    RV_JSON_ARRAY,
    RV_JSON_OBJECT,
};

struct rv_json_value {
    uint32_t key, key_length; /* in `text`, decoded, a NUL behind it; 0 and 0 in an array */
    uint32_t at;              /* strings: in `text`, decoded, a NUL behind it */
    uint32_t length;          /* strings: bytes; arrays and objects: values in it, those of one name counted each */
    uint32_t begin, end;      /* where it stands in the input */
    uint32_t next;            /* the next one in the same array or object; RV_JSON_NONE = it is the last one */
    uint32_t same : 27;       /* the member of the same name that counts instead: its distance; 0 = this one does */
    uint32_t hidden : 1;      /* an earlier member has its name */
    uint32_t kind : 4;        /* enum rv_json_kind */
};

struct rv_json {
    struct rv_json_value *values;
    uint32_t count, room;
    char *text;
    size_t length;
};

struct rv_json_limits {
    uint32_t depth;   /* arrays and objects inside each other, at most RV_JSON_DEPTH_MAX */
    uint32_t values;  /* in all */
    const char *what; /* "the graph": for messages */
};

/*
 * Reads `length` bytes, at most RV_JSON_TEXT_MAX, whose root is an array or an object. -EINVAL and ERROR_BAD_REQUEST
 * (with line and column), -E2BIG and ERROR_TOO_LARGE, -ENOMEM. Ended by rv_json_fini in any case.
 */
int rv_json_parse(struct rv_json *json, const char *text, size_t length, const struct rv_json_limits *limits,
                  struct rv_error *err);
void rv_json_fini(struct rv_json *json);

/* All of these take RV_JSON_NONE, and values of another kind, for nothing there. */
bool rv_json_is(const struct rv_json *json, uint32_t value, enum rv_json_kind kind);

/* The member of an object; RV_JSON_NONE = there is none. */
uint32_t rv_json_get(const struct rv_json *json, uint32_t object, const char *name);

/* A string, which may have NULs in it; NULL = it is none. ret_length may be NULL. */
const char *rv_json_string(const struct rv_json *json, uint32_t value, size_t *ret_length);

/* A number; 0 = it is none. */
double rv_json_number(const struct rv_json *json, uint32_t value);

/* Members of an object, elements of an array: how many there are. */
uint32_t rv_json_size(const struct rv_json *json, uint32_t value);

/*
 * Goes through them: `for (uint32_t i = rv_json_first(json, v); i != RV_JSON_NONE; i = rv_json_next(json, i))`. i names
 * the place, with the key; rv_json_value_at gives the value that counts there.
 */
uint32_t rv_json_first(const struct rv_json *json, uint32_t value);
uint32_t rv_json_next(const struct rv_json *json, uint32_t place);
uint32_t rv_json_value_at(const struct rv_json *json, uint32_t place);
const char *rv_json_key(const struct rv_json *json, uint32_t place);

#endif
