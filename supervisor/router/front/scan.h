/*
 * JSON of strangers, read where it lies: checked strictly (RFC 8259, UTF-8), walked member by member, and copied as it
 * is. No tree is built and no memory is taken, so a prompt of 16 MiB costs one pass.
 *
 * Pure functions, any thread. A span is a piece of the text that was checked; of a text it includes the quotes.
 */
#ifndef RV_SCAN_H
#define RV_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RV_SCAN_SIZE_MAX (64u * 1024 * 1024) /* bytes: spans have 32 bits */
#define RV_SCAN_DEPTH_MAX 64u                /* objects and arrays inside each other */

struct rv_span {
    uint32_t at, length; /* length 0 = not there: no JSON value is empty */
};

/* One value, with blanks around it. -EINVAL, -E2BIG = too large or too deep; *ret_where is the place of the fault. */
int rv_scan_check(const char *text, size_t length, struct rv_span *ret_value, size_t *ret_where);

/* ---- of text that was checked ------------------------------------------------------------------------------------ */

/* The next member of an object, or item of an array (key may be NULL). *at is 0 at first. False = no more. */
bool rv_scan_next(const char *text, struct rv_span container, uint32_t *at, struct rv_span *ret_key,
                  struct rv_span *ret_value);

/* The last member of that name, as Python's parser takes it. False = none, or it is no object. */
bool rv_scan_find(const char *text, struct rv_span object, const char *name, struct rv_span *ret_value);

/* The text says that, in whatever way it is escaped. */
bool rv_scan_equals(const char *text, struct rv_span span, const char *word);

/* The text without its escapes, with a NUL. -EINVAL = no text, -E2BIG = longer than size - 1 bytes, or with a NUL. */
int rv_scan_copy(const char *text, struct rv_span span, char *to, size_t size);

bool rv_scan_is(const char *text, struct rv_span span, char first); /* '{', '[', '"', 't', 'f', 'n' */
bool rv_scan_number(const char *text, struct rv_span span, double *ret_number);

/* What Python takes for true. */
bool rv_scan_is_true(const char *text, struct rv_span span);

#endif
