#include "device_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device_choice.h"

#define FORMAT "resvisor-devices 1 " RV_VERSION
#define LINE_MAX_BYTES 1024u

/* ---- facts ------------------------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t digest, const void *data, size_t length)
{
    const uint8_t *p = data;

    for (size_t i = 0; i < length; i++) /* FNV-1a: against mistakes, not against an enemy */
        digest = (digest ^ p[i]) * UINT64_C(0x100000001b3);
    return digest;
}

uint64_t rv_device_attributes_digest(const struct rv_device_record *d)
{
    uint64_t digest = UINT64_C(0xcbf29ce484222325);
    uint8_t flags = (uint8_t)(d->unified | d->pageable << 1);

    digest = mix(digest, d->product, strlen(d->product));
    digest = mix(digest, d->capability, strlen(d->capability));
    digest = mix(digest, &flags, sizeof(flags));
    digest = mix(digest, &d->granularity, sizeof(d->granularity));
    digest = mix(digest, &d->total_bytes, sizeof(d->total_bytes));
    for (uint32_t i = 0; i < d->attribute_count; i++) {
        digest = mix(digest, &d->attributes[i].number, sizeof(d->attributes[i].number));
        digest = mix(digest, &d->attributes[i].value, sizeof(d->attributes[i].value));
    }
    return digest;
}

bool rv_device_test_is_valid(const struct rv_device_test *test)
{
    static const char *const results[] = {"ok", "failed", "skipped"};
    const struct rv_backend *backend = rv_backend_by_id(test->backend);
    size_t length = strlen(test->name);
    bool known = false;

    for (unsigned i = 0; i < sizeof(results) / sizeof(results[0]); i++)
        known |= strcmp(results[i], test->result) == 0;
    return backend && known && length > 0 && strspn(test->name, "abcdefghijklmnopqrstuvwxyz0123456789-") == length;
}

const struct rv_cached_device *rv_device_cache_find(const struct rv_device_cache *cache, const uint8_t *uuid)
{
    for (uint32_t i = 0; i < cache->count; i++)
        if (memcmp(cache->devices[i].uuid, uuid, RV_DEVICE_UUID_SIZE) == 0)
            return &cache->devices[i];
    return NULL;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

struct parser {
    const char *next, *end;
    char line[LINE_MAX_BYTES];
    unsigned number; /* of the line, from 1 */
    bool ended;
    struct rv_device_cache *cache;
};

/* 1 = a line is in p->line; 0 = the end; -EINVAL. */
static int next_line(struct parser *p)
{
    const char *newline;
    size_t length;

    if (p->next == p->end)
        return 0;
    newline = memchr(p->next, '\n', (size_t)(p->end - p->next));
    length = newline ? (size_t)(newline - p->next) : 0;
    p->number++;
    if (!newline || length >= sizeof(p->line) || memchr(p->next, '\0', length))
        return -EINVAL;
    memcpy(p->line, p->next, length);
    p->line[length] = '\0';
    p->next = newline + 1;
    return 1;
}

/* Cuts the next word off *text, at one space. False = it has none, or one longer than the buffer. */
static bool take_word(char **text, char *word, size_t size)
{
    size_t length = strcspn(*text, " ");

    if (length == 0 || length >= size)
        return false;
    memcpy(word, *text, length);
    word[length] = '\0';
    *text += length;
    if (**text == ' ')
        (*text)++;
    return true;
}

static bool take_number(char **text, uint64_t *ret_number)
{
    char word[24], *end;

    if (!take_word(text, word, sizeof(word)) || strspn(word, "0123456789") != strlen(word) || strlen(word) > 19)
        return false;
    *ret_number = strtoull(word, &end, 10);
    return true;
}

static bool take_hex(char **text, uint8_t *bytes, size_t count)
{
    char word[2 * RV_DEVICE_UUID_SIZE + 1];

    if (!take_word(text, word, sizeof(word)) || strlen(word) != 2 * count ||
        strspn(word, "0123456789abcdef") != 2 * count)
        return false;
    for (size_t i = 0; i < count; i++) {
        char pair[3] = {word[2 * i], word[2 * i + 1], '\0'};

        bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    return true;
}

static bool on_driver(struct parser *p, char *text)
{
    size_t length = strlen(text);

    if (p->cache->driver[0] || length == 0 || length >= sizeof(p->cache->driver) ||
        strspn(text, "0123456789.") != length)
        return false;
    memcpy(p->cache->driver, text, length + 1);
    return true;
}

static bool on_device(struct parser *p, char *text)
{
    struct rv_cached_device *d = &p->cache->devices[p->cache->count];
    uint8_t digest[sizeof(d->attributes)];

    if (!p->cache->driver[0] || p->cache->count >= RV_DEVICES_MAX)
        return false;
    *d = (struct rv_cached_device){0};
    if (!take_hex(&text, d->uuid, sizeof(d->uuid)) || !take_hex(&text, digest, sizeof(digest)) || *text ||
        rv_device_cache_find(p->cache, d->uuid))
        return false;
    for (unsigned i = 0; i < sizeof(digest); i++)
        d->attributes = d->attributes << 8 | digest[i];
    p->cache->count++;
    return true;
}

static bool on_test(struct parser *p, char *text)
{
    struct rv_cached_device *d = p->cache->count ? &p->cache->devices[p->cache->count - 1] : NULL;
    struct rv_device_test test = {0};
    const struct rv_backend *backend;
    char word[16], shown[sizeof(test.detail)];

    if (!d || d->test_count >= RV_DEVICE_TESTS_MAX || !take_word(&text, word, sizeof(word)))
        return false;
    backend = rv_backend_by_name(word);
    test.backend = backend ? backend->id : RV_BACKEND_NONE;
    if (!take_word(&text, test.name, sizeof(test.name)) || !take_word(&text, test.result, sizeof(test.result)) ||
        !take_number(&text, &test.bytes_per_second) || !take_number(&text, &test.duration_us) ||
        !rv_device_test_is_valid(&test) || strlen(text) >= sizeof(test.detail) ||
        strcmp(rv_escape(shown, sizeof(shown), text, strlen(text)), text) != 0)
        return false;
    for (uint32_t i = 0; i < d->test_count; i++)
        if (d->tests[i].backend == test.backend && strcmp(d->tests[i].name, test.name) == 0)
            return false;
    memcpy(test.detail, text, strlen(text) + 1);
    d->tests[d->test_count++] = test;
    return true;
}

static bool on_end(struct parser *p, char *text)
{
    (void)text;
    p->ended = true;
    return p->next == p->end;
}

static const struct {
    const char *word;
    bool (*handle)(struct parser *p, char *text);
} lines[] = {
    {"driver ", on_driver},
    {"device ", on_device},
    {"test ", on_test},
    {"end", on_end},
};

static bool on_line(struct parser *p)
{
    if (p->ended)
        return false;
    if (p->number == 1)
        return strcmp(p->line, FORMAT) == 0;
    for (unsigned i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        size_t length = strlen(lines[i].word);

        if (strncmp(p->line, lines[i].word, length) == 0)
            return lines[i].handle(p, p->line + length);
    }
    return false;
}

int rv_device_cache_parse(const char *text, size_t length, struct rv_device_cache *ret_cache, char *problem,
                          size_t problem_size)
{
    struct parser p = {.next = text, .end = text + length, .cache = ret_cache};
    int r;

    ret_cache->count = 0;
    ret_cache->driver[0] = '\0';
    while ((r = next_line(&p)) == 1)
        if (!on_line(&p))
            break;
    if (r == 0 && p.ended)
        return 0;
    (void)snprintf(problem, problem_size,
                   p.number <= 1 ? "it is of another version of resvisor, or none of its files"
                                 : "line %u is damaged or missing",
                   p.number);
    return -EINVAL;
}

int rv_device_cache_read(const char *path, struct rv_device_cache *ret_cache, char *problem, size_t problem_size)
{
    char *text = malloc(RV_DEVICE_CACHE_BYTES_MAX);
    size_t length = 0;
    ssize_t n = 1;
    int r = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

    if (!text || fd < 0)
        r = text ? -errno : -ENOMEM;
    while (r == 0 && n > 0 && length < RV_DEVICE_CACHE_BYTES_MAX) {
        n = read(fd, text + length, RV_DEVICE_CACHE_BYTES_MAX - length);
        if (n < 0 && errno != EINTR)
            r = -errno;
        length += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0)
        (void)close(fd);
    if (r < 0)
        (void)snprintf(problem, problem_size, "%s", strerror(-r));
    else
        r = rv_device_cache_parse(text, length, ret_cache, problem, problem_size);
    free(text);
    return r;
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static void write_device(FILE *f, const struct rv_device_record *d)
{
    (void)fprintf(f, "device ");
    for (unsigned i = 0; i < RV_DEVICE_UUID_SIZE; i++)
        (void)fprintf(f, "%02x", d->uuid[i]);
    (void)fprintf(f, " %016" PRIx64 "\n", rv_device_attributes_digest(d));
    for (uint32_t i = 0; i < d->test_count; i++)
        (void)fprintf(f, "test %s %s %s %" PRIu64 " %" PRIu64 " %s\n", rv_backend_by_id(d->tests[i].backend)->name,
                      d->tests[i].name, d->tests[i].result, d->tests[i].bytes_per_second, d->tests[i].duration_us,
                      d->tests[i].detail);
}

static void make_folders(const char *path)
{
    char folder[RV_PATH_MAX];

    (void)snprintf(folder, sizeof(folder), "%s", path);
    for (char *p = strchr(folder + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        (void)mkdir(folder, 0700); /* what cannot be made is said by the open that follows */
        *p = '/';
    }
}

int rv_device_cache_write(const char *path, const char *driver, const struct rv_device_record *devices, uint32_t count)
{
    char next[RV_PATH_MAX + 16], why[160];
    FILE *f = NULL;
    int r = 0, fd;

    make_folders(path);
    if ((size_t)snprintf(next, sizeof(next), "%s.XXXXXX", path) >= sizeof(next))
        return -ENAMETOOLONG;
    fd = mkostemp(next, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    f = fdopen(fd, "w");
    if (!f) {
        r = -errno;
        (void)close(fd);
        goto out;
    }
    (void)fprintf(f, FORMAT "\ndriver %s\n", driver);
    for (uint32_t i = 0; i < count; i++) {
        const struct rv_device_record *d = &devices[i];

        /* One that was tested in use may have failed for want of memory: the next start shall test it. */
        if (d->state == RV_DEVICE_READY && strcmp(d->driver, driver) == 0 &&
            rv_device_backend_works(d, d->backend, "", why, sizeof(why)))
            write_device(f, d);
    }
    (void)fprintf(f, "end\n");
    if (ferror(f))
        r = -EIO;
    if (fclose(f) != 0 && r == 0)
        r = -errno;
    if (r == 0 && rename(next, path) < 0)
        r = -errno;
out:
    if (r < 0)
        (void)unlink(next);
    return r;
}
