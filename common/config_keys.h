/*
 * The table of configuration keys, and reading and printing values by it. Private to common/config_*.c and its test.
 *
 * One row says everything about a key: where it stands in the file, what it may hold, where it goes in struct
 * rv_config. Parsing, messages, environment names, `check --show` and docs/configuration.md all come from these rows.
 */
#ifndef RV_CONFIG_KEYS_H
#define RV_CONFIG_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RV_KEY_PATH_MAX 192u   /* "types.NAME.cancel_timeout" and the like, as text */
#define RV_KEY_VALUE_MAX 4096u /* one value as text, in the file and elsewhere */
#define RV_KEY_REASON_MAX 384u

enum rv_key_type {
    RV_KEY_STRING,
    RV_KEY_PATH, /* stored absolute */
    RV_KEY_BOOL,
    RV_KEY_UINT,     /* uint32_t */
    RV_KEY_SIZE,     /* uint64_t bytes */
    RV_KEY_SHARE,    /* uint64_t bytes, or a uint32_t percentage of what is not known yet; the other is 0 */
    RV_KEY_DURATION, /* uint64_t microseconds */
    RV_KEY_WORD,     /* one of `words`, stored as text */
    RV_KEY_CHOICE,   /* one of `words`, stored as its number in an enum */
    RV_KEY_LIST,     /* char *[] */
    RV_KEY_PATHS,    /* char *[], stored absolute */
    RV_KEY_MAP,      /* struct rv_config_pair[] */
    RV_KEY_TYPES,    /* number of the above */
};

enum rv_key_scope { RV_SCOPE_TOP, RV_SCOPE_MODEL, RV_SCOPE_TYPE, RV_SCOPE_DEVICE, RV_SCOPE_COUNT };

struct rv_key {
    const char *pattern; /* "pool.budget", "types.*.queue" */
    enum rv_key_type type;
    enum rv_key_scope scope;
    size_t offset;        /* in rv_config, rv_config_model, rv_config_type or rv_config_device */
    size_t count_offset;  /* of a uint32_t: the count of lists and maps, the percentage of a share */
    uint64_t min, max;    /* numbers: range; lists and maps: max is the number of elements */
    bool percent;         /* a size that may be a share of the machine's memory */
    const char *words;    /* "auto|always|never" */
    const char *fallback; /* the default, as one would write it; "" = empty */
    const char *help;
};

#define RV_KEYS_PER_SCOPE 48u /* rows of one scope; a unit test guards it */

/* Row i, NULL after the last. */
const struct rv_key *rv_key_at(unsigned i);

/* NULL = no such key. */
const struct rv_key *rv_key_find(const char *pattern);

/* Number of the row among those of its scope. */
unsigned rv_key_number(const struct rv_key *key);

/* "native|python": the kinds of worker that have this key of a type; NULL = all. */
const char *rv_key_kinds(const struct rv_key *key);
bool rv_key_is_of_kind(const struct rv_key *key, const char *kind);

/* True if rows lie below: "pool", "types", "types.*". */
bool rv_key_is_section(const char *pattern);

/*
 * The key that was probably meant: the next segment of a row or section below `prefix` ("pool.", "") that is closest to
 * `word`. Fills buffer; false = nothing is close.
 */
bool rv_key_suggest(const char *prefix, const char *word, char *buffer, size_t size);

/* Closest of "a|b|c" to word, as above. */
bool rv_word_suggest(const char *words, const char *word, char *buffer, size_t size);

/* "a whole number from 1 to 16", "a duration such as 500ms, 10s, 2m or 1h, from 1 s to 1 h": what is allowed. */
void rv_key_allowed(const struct rv_key *key, char *buffer, size_t size);

/* What a value of this kind is, in one or two words, for the reference. */
const char *rv_key_type_name(enum rv_key_type type);

/* The environment variable of a scalar top-level key; false = it has none. */
bool rv_key_environment(const struct rv_key *key, char *buffer, size_t size);

/*
 * Stores one scalar into base + offset. Texts replace and free the old one. base_folder: what a relative path is
 * relative to. 0; -EINVAL with `reason` saying what is wrong (without what is allowed); -ENOMEM.
 */
int rv_key_store(const struct rv_key *key, void *base, const char *text, const char *base_folder, char *reason,
                 size_t size);

/* Adds one element to a list, or one pair to a map (`name` is its key, else NULL). As rv_key_store. */
int rv_key_append(const struct rv_key *key, void *base, const char *name, const char *text, const char *base_folder,
                  char *reason, size_t size);

/* Frees what the value holds and makes it empty: lists, maps and texts. */
void rv_key_clear(const struct rv_key *key, void *base);

/* The value as one would write it, for people: "16 GiB", "10 s", "a, b". */
void rv_key_format(const struct rv_key *key, const void *base, char *buffer, size_t size);

/* Bytes and microseconds for people. Used by the command line too. */
void rv_format_size(uint64_t bytes, char *buffer, size_t size);
void rv_format_duration(uint64_t us, char *buffer, size_t size);

/* MemTotal in bytes; 0 = not known. */
uint64_t rv_machine_memory(void);

#endif
