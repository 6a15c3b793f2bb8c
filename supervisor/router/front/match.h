/*
 * Paths and header fields of requests that a worker shall get: pure functions on bytes of a stranger, for the files of
 * front/, unit tests and a fuzz target. No state; nothing is allocated unless said.
 */
#ifndef RV_FRONT_MATCH_H
#define RV_FRONT_MATCH_H

#include "../http/parse.h"

/* Decoded segments against a pattern: "a/b", a segment `*` stands for anything, `**` at the end for the rest. */
bool rv_front_path_matches(const char *const *segments, unsigned count, const char *pattern);

/*
 * The front's view of a target: segments (a leading "api" is taken away, *ret_api tells) and query parameters, decoded;
 * more of them than the tables hold are left out, and of a parameter that is there twice the first counts.
 * ret_target->text is to be freed. 0, or the HTTP status to refuse with: a path with . or .. could mean another one to
 * a worker than it does here.
 */
unsigned rv_front_parse_target(const char *uri, size_t length, struct rv_http_target *ret_target, bool *ret_api,
                               const char **why);

/* Fields that are between two neighbours only, and those that `Connection` names. */
bool rv_front_field_is_hop(const char *name, size_t length, const char *connection, size_t connection_length);

/* The value of a cookie in a Cookie field; NULL = it is not there. Not ended by a NUL. */
const char *rv_front_find_cookie(const char *field, size_t length, const char *name, size_t *ret_length);

/* The field without all cookies of that name; `to` has room for `length` bytes. The new length; 0 = none is left. */
size_t rv_front_strip_cookie(const char *field, size_t length, const char *name, char *to);

/* Whether a text can be the value of a cookie as it is (RFC 6265). */
bool rv_front_is_cookie_value(const char *text);

#endif
