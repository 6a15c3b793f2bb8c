/* Reading, storing and printing the value of one configuration key. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "config_keys.h"

#define SHOWN_MAX 80u       /* bytes of a wrong value that a message repeats */
#define OWN_ENV "RESVISOR_" /* names of the environment through which supervisor and worker find each other */

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"B", 1}, {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
};
static const struct unit duration_units[] = {
    {"us", 1}, {"ms", 1000}, {"s", 1000000}, {"m", 60000000}, {"h", 3600000000}, {"d", 86400000000},
};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char *const type_names[] = {
    [RV_KEY_STRING] = "text",        [RV_KEY_PATH] = "path",           [RV_KEY_BOOL] = "true or false",
    [RV_KEY_UINT] = "number",        [RV_KEY_SIZE] = "size",           [RV_KEY_DURATION] = "duration",
    [RV_KEY_SHARE] = "size",         [RV_KEY_WORD] = "word",           [RV_KEY_CHOICE] = "word",
    [RV_KEY_LIST] = "list of texts", [RV_KEY_PATHS] = "list of paths", [RV_KEY_MAP] = "map of texts",
};
_Static_assert(COUNT(type_names) == RV_KEY_TYPES, "one name per type");

const char *rv_key_type_name(enum rv_key_type type)
{
    return type_names[type];
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

uint64_t rv_machine_memory(void)
{
    char line[128];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "MemTotal: %" SCNu64 " kB", &kib) == 1)
            break;
    (void)fclose(f);
    return kib * 1024;
}

/* Digits with an optional fraction of up to three digits: *ret_value in thousandths. Returns what follows, or NULL. */
static const char *parse_thousandths(const char *text, uint64_t *ret_value)
{
    uint64_t value = 0, scale = 100;

    if (!isdigit((unsigned char)*text))
        return NULL;
    for (; isdigit((unsigned char)*text); text++) {
        value = value * 10 + (uint64_t)(*text - '0');
        if (value > UINT64_MAX / 100000)
            return NULL;
    }
    value *= 1000;
    if (*text == '.') {
        if (!isdigit((unsigned char)*++text))
            return NULL;
        for (; isdigit((unsigned char)*text); text++, scale /= 10)
            value += (uint64_t)(*text - '0') * scale;
    }
    *ret_value = value;
    return text;
}

/* "1.5GiB" in terms of units[]. Returns NULL or what is wrong. */
static const char *parse_quantity(const char *text, const struct unit *units, unsigned count, bool bare,
                                  uint64_t *ret_value)
{
    uint64_t value;
    const char *rest = parse_thousandths(text, &value);

    if (!rest)
        return "is not a number with a unit";
    while (*rest == ' ')
        rest++;
    if (*rest == '\0') {
        if (!bare && value != 0)
            return "has no unit";
        *ret_value = value / 1000;
        return value % 1000 ? "is a fraction without a unit" : NULL;
    }
    for (unsigned i = 0; i < count; i++) {
        unsigned __int128 product;

        if (strcmp(rest, units[i].name) != 0)
            continue;
        product = (unsigned __int128)value * units[i].factor / 1000;
        if (product > UINT64_MAX)
            return "is too large";
        *ret_value = (uint64_t)product;
        return NULL;
    }
    return "has an unknown unit";
}

static const char *parse_percent(const char *text, uint64_t *ret_value)
{
    uint64_t thousandths, memory = rv_machine_memory();
    const char *rest = parse_thousandths(text, &thousandths);

    if (!rest || strcmp(rest, "%") != 0)
        return "is not a percentage";
    if (thousandths > 100000)
        return "is more than 100%";
    if (memory == 0)
        return "is a percentage, but /proc/meminfo does not tell the machine's memory";
    *ret_value = (uint64_t)((unsigned __int128)memory * thousandths / 100000);
    return NULL;
}

/* A share of what is known only later: a whole percentage from 1 to 100. */
static const char *parse_share(const char *text, uint32_t *ret_percent)
{
    uint64_t thousandths;
    const char *rest = parse_thousandths(text, &thousandths);

    if (!rest || strcmp(rest, "%") != 0)
        return "is not a percentage";
    if (thousandths > 100000)
        return "is more than 100%";
    if (thousandths == 0 || thousandths % 1000)
        return "is not a whole percentage from 1% to 100%";
    *ret_percent = (uint32_t)(thousandths / 1000);
    return NULL;
}

static const char *parse_uint(const char *text, uint64_t *ret_value)
{
    uint64_t value = 0;

    if (*text == '\0')
        return "is empty";
    for (; *text; text++) {
        if (!isdigit((unsigned char)*text))
            return "is not a whole number";
        value = value * 10 + (uint64_t)(*text - '0');
        if (value > UINT32_MAX)
            return "is too large";
    }
    *ret_value = value;
    return NULL;
}

static const char *parse_bool(const char *text, bool *ret_value)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on"};

    for (unsigned i = 0; i < COUNT(words); i++) {
        if (strcasecmp(text, words[i]) == 0) {
            *ret_value = i % 2;
            return NULL;
        }
    }
    return "is neither true nor false";
}

/* Number of text in "a|b|c", -1 = not there. */
static int word_number(const char *words, const char *text)
{
    int number = 0;

    while (*words) {
        size_t length = strcspn(words, "|");

        if (strlen(text) == length && strncmp(words, text, length) == 0)
            return number;
        words += length + (words[length] == '|');
        number++;
    }
    return -1;
}

/* ---- storing ---------------------------------------------------------------------------------------------------- */

static int wrong(const char *text, const char *what, char *reason, size_t size)
{
    char shown[SHOWN_MAX];

    (void)snprintf(reason, size, "\"%s\" %s", rv_escape(shown, sizeof(shown), text, strlen(text)), what);
    return -EINVAL;
}

static int store_number(const struct rv_key *key, uint8_t *place, const char *text, char *reason, size_t size)
{
    uint64_t value = 0;
    const char *what;

    if (key->type == RV_KEY_UINT)
        what = parse_uint(text, &value);
    else if (key->type == RV_KEY_DURATION)
        what = parse_quantity(text, duration_units, COUNT(duration_units), false, &value);
    else if (key->percent && strchr(text, '%'))
        what = parse_percent(text, &value);
    else
        what = parse_quantity(text, size_units, COUNT(size_units), true, &value);
    if (!what && value < key->min)
        what = "is too small";
    if (!what && value > key->max)
        what = "is too large";
    if (what)
        return wrong(text, what, reason, size);
    if (key->type == RV_KEY_UINT) {
        uint32_t small = (uint32_t)value;

        memcpy(place, &small, sizeof(small));
    } else {
        memcpy(place, &value, sizeof(value));
    }
    return 0;
}

static int store_share(const struct rv_key *key, uint8_t *base, const char *text, char *reason, size_t size)
{
    uint64_t bytes = 0;
    uint32_t percent = 0;
    const char *what;
    int r;

    if (strchr(text, '%')) {
        what = parse_share(text, &percent);
        if (what)
            return wrong(text, what, reason, size);
        memcpy(base + key->offset, &bytes, sizeof(bytes));
    } else {
        r = store_number(key, base + key->offset, text, reason, size);
        if (r < 0)
            return r;
    }
    memcpy(base + key->count_offset, &percent, sizeof(percent));
    return 0;
}

static char *text_at(const uint8_t *place)
{
    char *text;

    memcpy(&text, place, sizeof(text));
    return text;
}

static void text_put(uint8_t *place, char *text)
{
    memcpy(place, &text, sizeof(text));
}

static int make_text(const struct rv_key *key, const char *text, const char *base_folder, char **ret_text, char *reason,
                     size_t size)
{
    bool is_path = key->type == RV_KEY_PATH || key->type == RV_KEY_PATHS;
    char *copy = NULL;

    if (strlen(text) >= RV_KEY_VALUE_MAX)
        return wrong(text, "is longer than 4095 bytes", reason, size);
    if (is_path && *text && *text != '/') {
        if (asprintf(&copy, "%s/%s", base_folder, text) < 0)
            return -ENOMEM;
    } else {
        copy = strdup(text);
    }
    if (!copy)
        return -ENOMEM;
    *ret_text = copy;
    return 0;
}

static int store_text(const struct rv_key *key, uint8_t *place, const char *text, const char *base_folder, char *reason,
                      size_t size)
{
    char *copy;
    int r = make_text(key, text, base_folder, &copy, reason, size);

    if (r < 0)
        return r;
    free(text_at(place));
    text_put(place, copy);
    return 0;
}

/* The number of a word; -EINVAL and the reason. */
static int find_word(const char *words, const char *text, char *reason, size_t size)
{
    int number = word_number(words, text);
    char guess[RV_KEY_PATH_MAX];

    if (number >= 0)
        return number;
    (void)wrong(text, "is not known", reason, size);
    if (rv_word_suggest(words, text, guess, sizeof(guess))) {
        size_t n = strlen(reason);

        (void)snprintf(reason + n, size - n, ", did you mean \"%s\"?", guess);
    }
    return -EINVAL;
}

static int store_word(const struct rv_key *key, uint8_t *place, const char *text, char *reason, size_t size)
{
    int number = find_word(key->words, text, reason, size);

    if (number < 0)
        return number;
    if (key->type == RV_KEY_WORD)
        return store_text(key, place, text, "", reason, size);
    memcpy(place, &number, sizeof(number)); /* an enum of int size */
    return 0;
}

int rv_key_store(const struct rv_key *key, void *base, const char *text, const char *base_folder, char *reason,
                 size_t size)
{
    uint8_t *place = (uint8_t *)base + key->offset;
    const char *what;
    bool flag;

    switch (key->type) {
    case RV_KEY_STRING:
    case RV_KEY_PATH:
        return store_text(key, place, text, base_folder, reason, size);
    case RV_KEY_WORD:
    case RV_KEY_CHOICE:
        return store_word(key, place, text, reason, size);
    case RV_KEY_BOOL:
        what = parse_bool(text, &flag);
        if (what)
            return wrong(text, what, reason, size);
        memcpy(place, &flag, sizeof(flag));
        return 0;
    case RV_KEY_SHARE:
        return store_share(key, base, text, reason, size);
    default:
        return store_number(key, place, text, reason, size);
    }
}

static uint32_t *count_at(const struct rv_key *key, const void *base)
{
    return (uint32_t *)((uint8_t *)base + key->count_offset);
}

static int append_pair(const struct rv_key *key, uint8_t *place, uint32_t *count, const char *name, const char *text,
                       char *reason, size_t size)
{
    struct rv_config_pair pair = {strdup(name), strdup(text)};
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
    int r = 0;

    (void)key;
    if (*name == '\0' || isdigit((unsigned char)*name) || name[strspn(name, letters)] != '\0')
        r = wrong(name, "is not the name of an environment variable; letters, digits and _ are allowed", reason, size);
    else if (strncmp(name, OWN_ENV, sizeof(OWN_ENV) - 1) == 0)
        r = wrong(name, "is set by resvisor itself; names that do not start with " OWN_ENV " are allowed", reason,
                  size);
    else if (!pair.key || !pair.value)
        r = -ENOMEM;
    if (r < 0) {
        free(pair.key);
        free(pair.value);
        return r;
    }
    memcpy(place + *count * sizeof(pair), &pair, sizeof(pair));
    (*count)++;
    return 0;
}

int rv_key_append(const struct rv_key *key, void *base, const char *name, const char *text, const char *base_folder,
                  char *reason, size_t size)
{
    uint32_t *count = count_at(key, base);
    uint8_t *place = (uint8_t *)base + key->offset;
    char *copy;
    int r;

    if (*count >= key->max) {
        (void)snprintf(reason, size, "more than %" PRIu64 " elements", key->max);
        return -EINVAL;
    }
    if (key->type == RV_KEY_MAP)
        return append_pair(key, place, count, name, text, reason, size);
    if (*text == '\0') {
        (void)snprintf(reason, size, "an element is empty");
        return -EINVAL;
    }
    if (key->words && find_word(key->words, text, reason, size) < 0)
        return -EINVAL;
    r = make_text(key, text, base_folder, &copy, reason, size);
    if (r < 0)
        return r;
    text_put(place + *count * sizeof(copy), copy);
    (*count)++;
    return 0;
}

void rv_key_clear(const struct rv_key *key, void *base)
{
    uint8_t *place = (uint8_t *)base + key->offset;
    /* a pair is two texts, and lies as such in memory */
    uint32_t texts = key->type == RV_KEY_MAP ? 2 : 1;

    switch (key->type) {
    case RV_KEY_STRING:
    case RV_KEY_PATH:
    case RV_KEY_WORD:
        free(text_at(place));
        text_put(place, NULL);
        break;
    case RV_KEY_LIST:
    case RV_KEY_PATHS:
    case RV_KEY_MAP:
        for (uint32_t i = 0; i < *count_at(key, base) * texts; i++)
            free(text_at(place + i * sizeof(char *)));
        *count_at(key, base) = 0;
        break;
    default:
        break;
    }
}

/* ---- printing --------------------------------------------------------------------------------------------------- */

/* The largest unit of which the value holds at least one, with at most one digit after the point. */
static void format_quantity(uint64_t value, const struct unit *units, unsigned count, char *buffer, size_t size)
{
    unsigned i = count - 1;
    uint64_t whole, tenth;

    while (i > 0 && value < units[i].factor)
        i--;
    whole = value / units[i].factor;
    tenth = (uint64_t)((unsigned __int128)(value % units[i].factor) * 10 / units[i].factor);
    if (tenth)
        (void)snprintf(buffer, size, "%" PRIu64 ".%" PRIu64 " %s", whole, tenth, units[i].name);
    else
        (void)snprintf(buffer, size, "%" PRIu64 " %s", whole, units[i].name);
}

void rv_format_size(uint64_t bytes, char *buffer, size_t size)
{
    format_quantity(bytes, size_units, COUNT(size_units), buffer, size);
}

void rv_format_duration(uint64_t us, char *buffer, size_t size)
{
    if (us == 0)
        (void)snprintf(buffer, size, "0 s");
    else
        format_quantity(us, duration_units, COUNT(duration_units), buffer, size);
}

/* "one of a, b, c" */
static void list_words(const char *words, const char *before, char *buffer, size_t size)
{
    size_t out = (size_t)snprintf(buffer, size, "%s", before);

    for (const char *p = words; *p && out + 3 < size; p++) {
        buffer[out++] = *p == '|' ? ',' : *p;
        if (*p == '|')
            buffer[out++] = ' ';
    }
    buffer[out] = '\0';
}

void rv_key_allowed(const struct rv_key *key, char *buffer, size_t size)
{
    char low[32], high[32];

    switch (key->type) {
    case RV_KEY_UINT:
        (void)snprintf(buffer, size, "a whole number from %" PRIu64 " to %" PRIu64, key->min, key->max);
        break;
    case RV_KEY_SIZE:
    case RV_KEY_SHARE:
        rv_format_size(key->min, low, sizeof(low));
        rv_format_size(key->max, high, sizeof(high));
        (void)snprintf(buffer, size, "a size such as 512MiB or 16GiB%s, from %s to %s",
                       key->percent ? " or a percentage such as 60%" : "", key->min ? low : "0", high);
        break;
    case RV_KEY_DURATION:
        rv_format_duration(key->min, low, sizeof(low));
        rv_format_duration(key->max, high, sizeof(high));
        (void)snprintf(buffer, size, "a duration such as 500ms, 10s, 2m or 1h, from %s to %s", key->min ? low : "0",
                       high);
        break;
    case RV_KEY_WORD:
    case RV_KEY_CHOICE:
        list_words(key->words, strchr(key->words, '|') ? "one of " : "", buffer, size);
        break;
    case RV_KEY_LIST:
        if (key->words) {
            list_words(key->words, "a list of these: ", buffer, size);
            break;
        }
        (void)snprintf(buffer, size, "a %s, at most %" PRIu64, type_names[key->type], key->max);
        break;
    case RV_KEY_PATHS:
    case RV_KEY_MAP:
        (void)snprintf(buffer, size, "a %s, at most %" PRIu64, type_names[key->type], key->max);
        break;
    default:
        (void)snprintf(buffer, size, key->type == RV_KEY_BOOL ? "%s" : "a %s", type_names[key->type]);
        break;
    }
}

bool rv_key_environment(const struct rv_key *key, char *buffer, size_t size)
{
    int n;

    if (key->scope != RV_SCOPE_TOP || key->type >= RV_KEY_LIST)
        return false;
    n = snprintf(buffer, size, "RESVISOR_%s", key->pattern);
    if (n < 0 || (size_t)n >= size)
        return false;
    for (char *p = buffer; *p; p++)
        *p = *p == '.' ? '_' : (char)toupper((unsigned char)*p);
    return true;
}

static void format_list(const struct rv_key *key, const void *base, char *buffer, size_t size)
{
    const uint8_t *place = (const uint8_t *)base + key->offset;
    uint32_t count = *count_at(key, base);
    size_t out = 0;

    buffer[0] = '\0';
    for (uint32_t i = 0; i < count && out < size; i++) {
        const char *comma = i ? ", " : "";
        int n;

        if (key->type == RV_KEY_MAP) {
            struct rv_config_pair pair;

            memcpy(&pair, place + i * sizeof(pair), sizeof(pair));
            n = snprintf(buffer + out, size - out, "%s%s=%s", comma, pair.key, pair.value);
        } else {
            n = snprintf(buffer + out, size - out, "%s%s", comma, text_at(place + i * sizeof(char *)));
        }
        out += n > 0 ? (size_t)n : 0;
    }
}

void rv_key_format(const struct rv_key *key, const void *base, char *buffer, size_t size)
{
    const uint8_t *place = (const uint8_t *)base + key->offset;
    uint64_t wide;
    uint32_t number;

    switch (key->type) {
    case RV_KEY_BOOL:
        (void)snprintf(buffer, size, "%s", *(const bool *)place ? "true" : "false");
        break;
    case RV_KEY_UINT:
        memcpy(&number, place, sizeof(number));
        (void)snprintf(buffer, size, "%" PRIu32, number);
        break;
    case RV_KEY_SHARE:
        memcpy(&number, (const uint8_t *)base + key->count_offset, sizeof(number));
        if (number) {
            (void)snprintf(buffer, size, "%" PRIu32 "%%", number);
            break;
        }
        /* fall through */
    case RV_KEY_SIZE:
        memcpy(&wide, place, sizeof(wide));
        rv_format_size(wide, buffer, size);
        break;
    case RV_KEY_DURATION:
        memcpy(&wide, place, sizeof(wide));
        rv_format_duration(wide, buffer, size);
        break;
    case RV_KEY_CHOICE: {
        const char *word = key->words;

        memcpy(&number, place, sizeof(number));
        for (; number > 0 && strchr(word, '|'); number--)
            word = strchr(word, '|') + 1;
        (void)snprintf(buffer, size, "%.*s", (int)strcspn(word, "|"), word);
        break;
    }
    case RV_KEY_LIST:
    case RV_KEY_PATHS:
    case RV_KEY_MAP:
        format_list(key, base, buffer, size);
        break;
    default:
        (void)snprintf(buffer, size, "%s", text_at(place) ? text_at(place) : "");
        break;
    }
}
