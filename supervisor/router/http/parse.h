/*
 * What the HTTP front reads itself: the shape of a request's head, its target, Range, and the names of hosts. Pure
 * functions on bytes of a stranger: no state, no library of HTTP, nothing allocated unless said. Unit tests and a fuzz
 * target call them as they are.
 */
#ifndef RV_HTTP_PARSE_H
#define RV_HTTP_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RV_HTTP_FIELDS_MAX 64u  /* header fields of a request */
#define RV_HTTP_HEAD_MAX 16384u /* bytes of a request's head */
#define RV_HTTP_URI_MAX 8192u   /* bytes of a target */
#define RV_HTTP_SEGMENTS_MAX 8u
#define RV_HTTP_QUERY_MAX 8u

struct rv_http_field {
    const char *name, *value;
    size_t name_length, value_length;
};

/* A head as the library left it: pointers into the place where it was received, so that gaps between them show its
 * bytes. */
struct rv_http_head {
    const char *method, *version;
    size_t uri_length;
    size_t size; /* of the whole head, the empty line included */
    struct rv_http_field fields[RV_HTTP_FIELDS_MAX];
    unsigned field_count;
    bool too_many;
};

struct rv_http_framing {
    bool has_body, chunked;
    bool keep_alive; /* HTTP/1.1 */
    uint64_t length; /* of the body, unless chunked */
};

/* 0, or the HTTP status to refuse with; *why is a static text. */
unsigned rv_http_check_head(const struct rv_http_head *head, struct rv_http_framing *ret_framing, const char **why);

/* The value of a field that must not be there twice: NULL = it is not there. */
const struct rv_http_field *rv_http_find(const struct rv_http_head *head, const char *name, unsigned *ret_count);

struct rv_http_target {
    char *text; /* owns what the pointers point to; free() */
    const char *segments[RV_HTTP_SEGMENTS_MAX];
    unsigned segment_count;
    struct {
        const char *name, *value;
    } query[RV_HTTP_QUERY_MAX];
    unsigned query_count;
};

/*
 * Takes a target in origin form apart: "/a/b%2Fc?d=e". Segments and values are decoded, valid UTF-8, and without NUL.
 * 0, or the HTTP status to refuse with.
 */
unsigned rv_http_parse_target(const char *uri, size_t length, struct rv_http_target *ret_target, const char **why);

/*
 * What every target must satisfy: its length, its first character, nothing that must be escaped. target->text gets the
 * path (free()), *ret_query what is behind "?" (NULL = nothing), neither taken apart. 0, or the status to refuse with.
 */
unsigned rv_http_open_target(const char *uri, size_t length, struct rv_http_target *target, char **ret_query,
                             const char **why);

/* Takes %XX away in place; with plus_is_blank, as in a query, + too. False = a bad escape, a NUL, or no UTF-8. */
bool rv_http_decode(char *text, bool plus_is_blank);

/* NULL = it is not there. */
const char *rv_http_query(const struct rv_http_target *target, const char *name);

/* Digits only, no overflow. */
bool rv_http_parse_number(const char *text, size_t length, uint64_t *ret_number);

enum rv_http_range { RV_HTTP_RANGE_WHOLE, RV_HTTP_RANGE_PART, RV_HTTP_RANGE_BEYOND };

/* A Range field for something of `size` bytes. Several ranges, or another unit, are answered with the whole, as they
 * may be. */
enum rv_http_range rv_http_parse_range(const char *text, size_t length, uint64_t size, uint64_t *ret_first,
                                       uint64_t *ret_length);

/* Host names that no foreign name server can make point here: localhost and addresses as numbers. */
bool rv_http_host_is_local(const char *host, size_t length);

/* "Origin: http://HOST" belongs to "Host: HOST". */
bool rv_http_origin_matches(const char *origin, size_t origin_length, const char *host, size_t host_length);

#endif
