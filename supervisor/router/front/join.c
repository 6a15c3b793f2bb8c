#include "join.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "scan.h"

/* What is in the result already: spans of its own text, by hash. */
struct seen {
    uint32_t *places; /* + 1; 0 = empty */
    struct rv_span *spans;
    uint32_t room, count; /* room: a power of two */
};

struct joined {
    char *text;
    size_t length;
    struct seen seen;
};

static bool is_new(struct joined *out, const char *text, struct rv_span key)
{
    uint32_t i = (uint32_t)XXH3_64bits(text + key.at, key.length) & (out->seen.room - 1);

    while (out->seen.places[i]) {
        struct rv_span other = out->seen.spans[out->seen.places[i] - 1];

        if (other.length == key.length && memcmp(out->text + other.at, text + key.at, key.length) == 0)
            return false;
        i = (i + 1) & (out->seen.room - 1);
    }
    out->seen.places[i] = ++out->seen.count;
    return true;
}

static void append(struct joined *out, const char *text, size_t length)
{
    memcpy(out->text + out->length, text, length);
    out->length += length;
}

/* The members or items of one text that are not there yet. The result has room for all of them. */
static void add(struct joined *out, const char *text, struct rv_span container, bool objects)
{
    struct rv_span key, value;
    uint32_t at = 0;

    while (rv_scan_next(text, container, &at, &key, &value)) {
        struct rv_span name = objects ? key : value;

        if (!is_new(out, text, name))
            continue;
        if (out->length > 1)
            append(out, ",", 1);
        out->seen.spans[out->seen.count - 1] = (struct rv_span){(uint32_t)out->length, name.length};
        append(out, text + name.at, name.length);
        if (objects) {
            append(out, ":", 1);
            append(out, text + value.at, value.length);
        }
    }
}

static uint32_t count_of(const char *text, struct rv_span container)
{
    struct rv_span key, value;
    uint32_t at = 0, n = 0;

    while (rv_scan_next(text, container, &at, &key, &value))
        n++;
    return n;
}

static int make_room(struct joined *out, size_t size, uint32_t names)
{
    out->seen.room = 16;
    while (out->seen.room < 2 * names)
        out->seen.room *= 2;
    out->text = malloc(size);
    out->seen.places = calloc(out->seen.room, sizeof(uint32_t));
    out->seen.spans = calloc(names + 1, sizeof(struct rv_span));
    return out->text && out->seen.places && out->seen.spans ? 0 : -ENOMEM;
}

static int join(const struct rv_front_text *texts, unsigned count, bool objects, char **ret_text, size_t *ret_length)
{
    struct rv_span *roots = calloc(count + 1, sizeof(*roots));
    struct joined out = {0};
    size_t size = 8, where;
    uint32_t names = 0;
    bool any = false;
    int r = roots ? 0 : -ENOMEM;

    for (unsigned i = 0; i < count && r == 0; i++) {
        if (rv_scan_check(texts[i].text, texts[i].length, &roots[i], &where) < 0 ||
            !rv_scan_is(texts[i].text, roots[i], objects ? '{' : '[')) {
            roots[i].length = 0;
            continue;
        }
        any = true;
        size += (size_t)roots[i].length + 1;
        names += count_of(texts[i].text, roots[i]);
    }
    if (r == 0)
        r = any && size <= RV_SCAN_SIZE_MAX ? make_room(&out, size, names) : -EINVAL;
    if (r == 0) {
        append(&out, objects ? "{" : "[", 1);
        for (unsigned i = 0; i < count; i++)
            if (roots[i].length)
                add(&out, texts[i].text, roots[i], objects);
        append(&out, objects ? "}" : "]", 1);
        *ret_text = out.text;
        *ret_length = out.length;
        out.text = NULL;
    }
    free(out.text);
    free(out.seen.places);
    free(out.seen.spans);
    free(roots);
    return r;
}

int rv_front_join_objects(const struct rv_front_text *texts, unsigned count, char **ret_text, size_t *ret_length)
{
    return join(texts, count, true, ret_text, ret_length);
}

int rv_front_join_arrays(const struct rv_front_text *texts, unsigned count, char **ret_text, size_t *ret_length)
{
    return join(texts, count, false, ret_text, ret_length);
}
