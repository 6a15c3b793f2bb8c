/*
 * What the front door reads of clients and workers: targets, cookies, fields, and JSON that is joined. The first byte
 * chooses. What is accepted must hold what its reader relies on.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "router/front/join.h"
#include "router/front/match.h"
#include "router/front/scan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void target(const char *text, size_t size)
{
    struct rv_http_target found;
    const char *why = NULL;
    bool api;
    unsigned status = rv_front_parse_target(text, size, &found, &api, &why);

    if (status) {
        if (status < 400 || !why || !*why)
            abort();
        return;
    }
    for (unsigned i = 0; i < found.segment_count; i++)
        if (strcmp(found.segments[i], "..") == 0 || strcmp(found.segments[i], ".") == 0 ||
            !rv_text_is_valid(found.segments[i]))
            abort();
    for (unsigned i = 0; i < found.query_count; i++)
        if (!rv_text_is_valid(found.query[i].name) || !rv_text_is_valid(found.query[i].value))
            abort();
    if (!rv_front_path_matches(found.segments, found.segment_count, "**"))
        abort();
    (void)rv_front_path_matches(found.segments, found.segment_count, "a/*/b");
    free(found.text);
}

/* Of what is left nothing has that name, and stripping again changes nothing. */
static void cookies(const char *text, size_t size)
{
    char *once = malloc(size + 1), *twice = malloc(size + 1);
    size_t n = rv_front_strip_cookie(text, size, "t", once), length;

    if (n > size || rv_front_find_cookie(once, n, "t", &length))
        abort();
    if (rv_front_strip_cookie(once, n, "t", twice) > n)
        abort();
    free(once);
    free(twice);
}

static void fields(const char *text, size_t size)
{
    size_t half = size / 2;

    (void)rv_front_field_is_hop(text, half, text + half, size - half);
}

/* Two texts, parted by a NUL: what is joined is JSON, and joining it with itself changes nothing. */
static void join(const char *text, size_t size, int (*how)(const struct rv_front_text *, unsigned, char **, size_t *))
{
    const char *nul = memchr(text, '\0', size), *rest = nul ? nul + 1 : text + size;
    struct rv_front_text texts[2] = {{text, (size_t)((nul ? nul : rest) - text)}, {rest, (size_t)(text + size - rest)}};
    char *first, *second;
    size_t length, again, where;
    struct rv_span root;

    if (how(texts, 2, &first, &length) < 0)
        return;
    if (rv_scan_check(first, length, &root, &where) < 0 || root.length != length)
        abort();
    texts[0] = texts[1] = (struct rv_front_text){first, length};
    if (how(texts, 2, &second, &again) < 0 || again != length || memcmp(first, second, length) != 0)
        abort();
    free(first);
    free(second);
}

static void objects(const char *text, size_t size)
{
    join(text, size, rv_front_join_objects);
}

static void arrays(const char *text, size_t size)
{
    join(text, size, rv_front_join_arrays);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const parts[])(const char *, size_t) = {target, cookies, fields, objects, arrays};
    char *text;

    if (size < 1)
        return 0;
    text = malloc(size); /* exactly as long */
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    parts[data[0] % 5](text, size - 1);
    free(text);
    return 0;
}
