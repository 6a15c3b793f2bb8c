/* Reading the configuration: defaults, then file, environment, flags; then the checks. */
#include "config.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_private.h"

#define DEFAULT_FILE "/etc/resvisor/resvisor.yaml"
#define SHOWN_MAX 96u /* bytes of a wrong key that a message repeats */

/* ---- problems ---------------------------------------------------------------------------------------------------- */

void rv_loader_problem(struct rv_loader *loader, struct rv_origin origin, const char *key, const char *format, ...)
{
    static const char *const places[] = {
        [RV_SOURCE_DEFAULT] = "default", [RV_SOURCE_ENVIRONMENT] = "environment", [RV_SOURCE_FLAG] = "command line"};
    va_list ap;

    if (loader->problem_count++ >= RV_CONFIG_PROBLEMS_MAX)
        return;
    if (origin.source != RV_SOURCE_FILE)
        fprintf(loader->problems, "%s: ", places[origin.source]);
    else if (origin.line)
        fprintf(loader->problems, "%s:%u: ", loader->file, origin.line);
    else
        fprintf(loader->problems, "%s: ", loader->file);
    if (*key)
        fprintf(loader->problems, "%s: ", key);
    va_start(ap, format);
    (void)vfprintf(loader->problems, format, ap);
    va_end(ap);
    (void)fputc('\n', loader->problems);
}

static struct rv_origin at_line(unsigned line)
{
    return (struct rv_origin){RV_SOURCE_FILE, line};
}

/* ---- places ------------------------------------------------------------------------------------------------------ */

/* Models, types and devices: arrays of structs that begin with their name. */
static const struct collection {
    const char *section;                /* in the file */
    const char *prefix;                 /* of its rows' patterns */
    size_t struct_size, structs, count; /* the last two: offsets in rv_config */
    uint32_t limit;
} collections[RV_SCOPE_COUNT] = {
    [RV_SCOPE_MODEL] = {"models", "models.*.", sizeof(struct rv_config_model), offsetof(struct rv_config, models),
                        offsetof(struct rv_config, model_count), RV_MODELS_MAX},
    [RV_SCOPE_TYPE] = {"types", "types.*.", sizeof(struct rv_config_type), offsetof(struct rv_config, types),
                       offsetof(struct rv_config, type_count), RV_TYPES_MAX},
    [RV_SCOPE_DEVICE] = {"devices", "devices.*.", sizeof(struct rv_config_device), offsetof(struct rv_config, devices),
                         offsetof(struct rv_config, device_count), RV_DEVICES_MAX},
};
_Static_assert(offsetof(struct rv_config_model, name) == 0 && offsetof(struct rv_config_type, name) == 0 &&
                   offsetof(struct rv_config_device, name) == 0,
               "the name comes first");

static uint8_t *structs_of(const struct rv_config *c, enum rv_key_scope scope)
{
    uint8_t *structs;

    memcpy(&structs, (const uint8_t *)c + collections[scope].structs, sizeof(structs));
    return structs;
}

static uint32_t *count_of(struct rv_config *c, enum rv_key_scope scope)
{
    return (uint32_t *)(void *)((uint8_t *)c + collections[scope].count);
}

void *rv_config_base(struct rv_config_private *config, enum rv_key_scope scope, uint32_t number)
{
    if (scope == RV_SCOPE_TOP)
        return &config->config;
    return structs_of(&config->config, scope) + number * collections[scope].struct_size;
}

struct rv_origin *rv_config_origin(struct rv_config_private *config, const struct rv_key *key, uint32_t number)
{
    unsigned row = rv_key_number(key);

    return key->scope == RV_SCOPE_TOP ? &config->keys[row] : &config->entities[key->scope][number].keys[row];
}

void rv_key_shown(const struct rv_key *key, const char *name, char *buffer, size_t size)
{
    const char *star = strchr(key->pattern, '*');

    if (star)
        (void)snprintf(buffer, size, "%.*s%s%s", (int)(star - key->pattern), key->pattern, name, star + 1);
    else
        (void)snprintf(buffer, size, "%s", key->pattern);
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

static const char *folder_of(const struct rv_loader *loader, struct rv_origin origin)
{
    return origin.source == RV_SOURCE_FILE ? loader->file_folder : loader->work_folder;
}

/* Reports a value that was not stored. */
static void report(struct rv_loader *loader, struct rv_origin origin, const struct rv_key *key, const char *shown,
                   int r, const char *reason)
{
    char allowed[RV_KEY_REASON_MAX];

    if (r == -ENOMEM) {
        loader->no_memory = true;
    } else if (r < 0) {
        rv_key_allowed(key, allowed, sizeof(allowed));
        rv_loader_problem(loader, origin, shown, "%s; allowed: %s", reason, allowed);
    }
}

static void store(struct rv_loader *loader, struct rv_origin origin, const struct rv_key *key, uint32_t number,
                  const char *shown, const char *text)
{
    char reason[RV_KEY_REASON_MAX];
    int r = rv_key_store(key, rv_config_base(loader->config, key->scope, number), text, folder_of(loader, origin),
                         reason, sizeof(reason));

    if (r == 0)
        *rv_config_origin(loader->config, key, number) = origin;
    report(loader, origin, key, shown, r, reason);
}

/* Defaults of all keys of one scope. The table's defaults are right: a unit test reads every one of them. */
static int store_defaults(struct rv_config_private *config, enum rv_key_scope scope, uint32_t number)
{
    char reason[RV_KEY_REASON_MAX];

    for (unsigned i = 0; rv_key_at(i); i++) {
        const struct rv_key *key = rv_key_at(i);
        int r;

        if (key->scope != scope || key->type >= RV_KEY_LIST)
            continue;
        r = rv_key_store(key, rv_config_base(config, scope, number), key->fallback, "/", reason, sizeof(reason));
        if (r < 0)
            return r;
    }
    return 0;
}

/* ---- models, types and devices by name
 * ------------------------------------------------------------------------------------ */

/* `resvisor logs NAME` knows these beside the types. */
static bool name_is_ours(const char *name)
{
    static const char *const ours[] = {"router", "loader", "resvisor"};

    for (unsigned i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        if (strcmp(ours[i], name) == 0)
            return true;
    return false;
}

static bool name_is_valid(const char *name)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t n = strlen(name);

    return n > 0 && n <= RV_NAME_MAX && strspn(name, letters) == n;
}

/* Grows two arrays that go side by side. */
static int grow(struct rv_config_private *config, enum rv_key_scope scope)
{
    const struct collection *row = &collections[scope];
    uint32_t room = config->room[scope], wanted = room ? room * 2 : 8;
    uint8_t *structs = structs_of(&config->config, scope);
    struct rv_entity *entities = config->entities[scope];

    wanted = wanted > row->limit ? row->limit : wanted;
    structs = reallocarray(structs, wanted, row->struct_size);
    if (!structs)
        return -ENOMEM;
    memcpy((uint8_t *)&config->config + row->structs, &structs, sizeof(structs));
    entities = reallocarray(entities, wanted, sizeof(*entities));
    if (!entities)
        return -ENOMEM;
    config->entities[scope] = entities;
    memset(structs + room * row->struct_size, 0, (wanted - room) * row->struct_size);
    memset(entities + room, 0, (wanted - room) * sizeof(*entities));
    config->room[scope] = wanted;
    return 0;
}

static char *entity_name(struct rv_config_private *config, enum rv_key_scope scope, uint32_t number)
{
    char *name;

    memcpy(&name, rv_config_base(config, scope, number), sizeof(name));
    return name;
}

static int entity_add(struct rv_config_private *config, enum rv_key_scope scope, const char *name, uint32_t *ret_number)
{
    uint32_t *count = count_of(&config->config, scope);
    char *copy;

    if (*count == config->room[scope] && grow(config, scope) < 0)
        return -ENOMEM;
    copy = strdup(name);
    if (!copy)
        return -ENOMEM;
    *ret_number = (*count)++;
    memcpy(rv_config_base(config, scope, *ret_number), &copy, sizeof(copy));
    return store_defaults(config, scope, *ret_number);
}

/* False = reported. */
static bool name_is_allowed(struct rv_loader *loader, struct rv_origin origin, enum rv_key_scope scope,
                            const char *name)
{
    const char *section = collections[scope].section;
    char shown[SHOWN_MAX], reason[RV_KEY_REASON_MAX];

    (void)rv_escape(shown, sizeof(shown), name, strlen(name));
    if (scope == RV_SCOPE_DEVICE) {
        if (rv_config_is_device(name, reason, sizeof(reason)))
            return true;
        rv_loader_problem(loader, origin, section, "%s", reason);
        return false;
    }
    if (!name_is_valid(name)) {
        rv_loader_problem(loader, origin, section,
                          "\"%s\" is not a name; 1 to 64 letters, digits and . _ - are allowed", shown);
        return false;
    }
    if (scope == RV_SCOPE_TYPE && name_is_ours(name)) {
        rv_loader_problem(loader, origin, section,
                          "\"%s\" is the name of a log of resvisor itself; any other name is allowed", name);
        return false;
    }
    return true;
}

/* Finds or adds; false = reported. */
static bool entity_get(struct rv_loader *loader, struct rv_origin origin, enum rv_key_scope scope, const char *name,
                       uint32_t *ret_number)
{
    const struct collection *row = &collections[scope];
    uint32_t count = *count_of(&loader->config->config, scope);

    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(entity_name(loader->config, scope, i), name) == 0) {
            *ret_number = i;
            return true;
        }
    }
    if (!name_is_allowed(loader, origin, scope, name))
        return false;
    if (count >= row->limit) {
        rv_loader_problem(loader, origin, row->section, "too many; at most %u are allowed", row->limit);
        return false;
    }
    if (entity_add(loader->config, scope, name, ret_number) < 0) {
        loader->no_memory = true;
        return false;
    }
    loader->config->entities[scope][*ret_number].origin = origin;
    return true;
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static const char *const kind_names[] = {
    [RV_NODE_SCALAR] = "a single value", [RV_NODE_LIST] = "a list", [RV_NODE_MAP] = "a map"};

static bool is_empty(const struct rv_node *node)
{
    return node->kind == RV_NODE_SCALAR && node->plain && *node->text == '\0';
}

static void store_elements(struct rv_loader *loader, const struct rv_key *key, uint32_t number, const char *shown,
                           const struct rv_node *node)
{
    void *base = rv_config_base(loader->config, key->scope, number);

    rv_key_clear(key, base);
    *rv_config_origin(loader->config, key, number) = at_line(node->line);
    for (const struct rv_node *child = node->child; child; child = child->next) {
        char reason[RV_KEY_REASON_MAX];
        int r = -EINVAL;

        if (child->kind != RV_NODE_SCALAR)
            (void)snprintf(reason, sizeof(reason), "an element is %s, not a text", kind_names[child->kind]);
        else
            r = rv_key_append(key, base, child->key ? child->key->text : NULL, child->text, loader->file_folder, reason,
                              sizeof(reason));
        report(loader, at_line(child->line), key, shown, r, reason);
    }
}

static void store_node(struct rv_loader *loader, const struct rv_key *key, uint32_t number, const char *shown,
                       const struct rv_node *node)
{
    enum rv_node_kind wanted = key->type == RV_KEY_MAP    ? RV_NODE_MAP
                               : key->type >= RV_KEY_LIST ? RV_NODE_LIST
                                                          : RV_NODE_SCALAR;
    char reason[RV_KEY_REASON_MAX];

    if (is_empty(node) && wanted == RV_NODE_SCALAR)
        report(loader, at_line(node->line), key, shown, -EINVAL, "the value is missing");
    else if (is_empty(node))
        ; /* "env:" with everything under it commented out */
    else if (node->kind != wanted) {
        (void)snprintf(reason, sizeof(reason), "is %s", kind_names[node->kind]);
        report(loader, at_line(node->line), key, shown, -EINVAL, reason);
    } else if (wanted == RV_NODE_SCALAR)
        store(loader, at_line(node->line), key, number, shown, node->text);
    else
        store_elements(loader, key, number, shown, node);
}

static void report_duplicates(struct rv_loader *loader, const struct rv_node *map, const char *shown_prefix)
{
    char word[SHOWN_MAX];

    for (const struct rv_node *a = map->child; a; a = a->next) {
        for (const struct rv_node *b = map->child; b != a; b = b->next) {
            if (strcmp(a->key->text, b->key->text) != 0)
                continue;
            rv_escape(word, sizeof(word), a->key->text, strlen(a->key->text));
            rv_loader_problem(loader, at_line(a->key->line), "",
                              "%s%s: is here twice, first in line %u; once is allowed", shown_prefix, word,
                              b->key->line);
            break;
        }
    }
}

static void report_unknown(struct rv_loader *loader, struct rv_origin origin, const char *prefix,
                           const char *shown_prefix, const char *word)
{
    char shown[SHOWN_MAX], guess[RV_KEY_PATH_MAX];

    rv_escape(shown, sizeof(shown), word, strlen(word));
    if (rv_key_suggest(prefix, word, guess, sizeof(guess)))
        rv_loader_problem(loader, origin, "", "%s%s: unknown key, did you mean \"%s\"?", shown_prefix, shown, guess);
    else
        rv_loader_problem(loader, origin, "", "%s%s: unknown key; `resvisor check --reference` lists all keys",
                          shown_prefix, shown);
}

static void walk_names(struct rv_loader *loader, const struct rv_node *map, enum rv_key_scope scope);

/* What a section's words name; RV_SCOPE_TOP = they are keys. */
static enum rv_key_scope scope_of(const char *section)
{
    for (unsigned i = 0; i < RV_SCOPE_COUNT; i++)
        if (collections[i].section && strcmp(collections[i].section, section) == 0)
            return (enum rv_key_scope)i;
    return RV_SCOPE_TOP;
}

/* prefix: "" or "pool." or "types.*."; shown_prefix the same with the name in it. */
static void walk_section(struct rv_loader *loader, const struct rv_node *map, const char *prefix,
                         const char *shown_prefix, uint32_t number)
{
    report_duplicates(loader, map, shown_prefix);
    for (const struct rv_node *node = map->child; node; node = node->next) {
        const char *word = node->key->text;
        char pattern[RV_KEY_PATH_MAX], shown[RV_KEY_PATH_MAX];
        const struct rv_key *key = NULL;
        /* "types.*.queue" in quotes is no key, although it is a row's pattern */
        bool possible = strlen(word) < RV_NAME_MAX && *word && !strpbrk(word, ".*");

        if (possible) {
            (void)snprintf(pattern, sizeof(pattern), "%s%s", prefix, word);
            (void)snprintf(shown, sizeof(shown), "%s%s", shown_prefix, word);
            key = rv_key_find(pattern);
        }
        if (key) {
            store_node(loader, key, number, shown, node);
        } else if (!possible || !rv_key_is_section(pattern)) {
            report_unknown(loader, at_line(node->key->line), prefix, shown_prefix, word);
        } else if (node->kind != RV_NODE_MAP && !is_empty(node)) {
            rv_loader_problem(loader, at_line(node->line), shown, "is %s; allowed: a map", kind_names[node->kind]);
        } else if (scope_of(pattern) != RV_SCOPE_TOP) {
            walk_names(loader, node, scope_of(pattern));
        } else {
            char deeper[RV_KEY_PATH_MAX];

            (void)snprintf(deeper, sizeof(deeper), "%.*s.", (int)sizeof(deeper) - 2, pattern);
            walk_section(loader, node, deeper, deeper, 0);
        }
    }
}

static void walk_names(struct rv_loader *loader, const struct rv_node *map, enum rv_key_scope scope)
{
    bool is_model = scope == RV_SCOPE_MODEL;
    char section[RV_NAME_MAX];

    (void)snprintf(section, sizeof(section), "%s.", collections[scope].section);
    report_duplicates(loader, map, section);
    for (const struct rv_node *node = map->child; node; node = node->next) {
        char shown[RV_KEY_PATH_MAX];
        uint32_t number;

        if (!entity_get(loader, at_line(node->key->line), scope, node->key->text, &number))
            continue;
        (void)snprintf(shown, sizeof(shown), "%s%s", section, node->key->text);
        if (is_model && node->kind == RV_NODE_SCALAR && !is_empty(node)) {
            store(loader, at_line(node->line), rv_key_find("models.*.path"), number, shown, node->text);
        } else if (node->kind == RV_NODE_MAP) {
            (void)snprintf(shown, sizeof(shown), "%s%s.", section, node->key->text);
            walk_section(loader, node, collections[scope].prefix, shown, number);
        } else if (!is_empty(node)) {
            rv_loader_problem(loader, at_line(node->line), shown, "is %s; allowed: a map%s", kind_names[node->kind],
                              is_model ? " or the path of a file" : "");
        }
    }
}

/* Reads at most RV_CONFIG_FILE_MAX bytes of a regular file. */
static int read_file(struct rv_loader *loader, char **ret_text, size_t *ret_length)
{
    int fd = open(loader->file, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hold us up */
    struct stat st;
    char *text = NULL;
    size_t length = 0;
    ssize_t n = 1;

    if (fd < 0 || fstat(fd, &st) < 0) {
        rv_loader_problem(loader, at_line(0), "", "cannot be read: %s", strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rv_loader_problem(loader, at_line(0), "", "is not a regular file");
    } else if ((uint64_t)st.st_size > RV_CONFIG_FILE_MAX) {
        rv_loader_problem(loader, at_line(0), "", "is larger than 1 MiB; a configuration is smaller");
    } else {
        text = malloc(RV_CONFIG_FILE_MAX);
        loader->no_memory = !text;
        while (text && length < RV_CONFIG_FILE_MAX && (n = read(fd, text + length, RV_CONFIG_FILE_MAX - length)) > 0)
            length += (size_t)n;
        if (n < 0)
            rv_loader_problem(loader, at_line(0), "", "cannot be read: %s", strerror(errno));
    }
    if (fd >= 0)
        (void)close(fd);
    if (!text || n < 0) {
        free(text);
        return -EINVAL;
    }
    *ret_text = text;
    *ret_length = length;
    return 0;
}

/* NULL = an empty file, or a problem that was reported. */
static struct rv_node *read_tree(struct rv_loader *loader)
{
    struct rv_node *root = NULL;
    char reason[RV_KEY_REASON_MAX] = "";
    unsigned line = 0;
    char *text = NULL;
    size_t length = 0;
    int r;

    if (read_file(loader, &text, &length) < 0)
        return NULL;
    r = rv_tree_parse(text, length, &root, &line, reason, sizeof(reason));
    free(text);
    if (r == -ENOMEM)
        loader->no_memory = true;
    else if (r < 0)
        rv_loader_problem(loader, at_line(line), "", "%s", reason);
    return r < 0 ? NULL : root;
}

static void load_file(struct rv_loader *loader)
{
    struct rv_node *root = read_tree(loader);

    if (root && root->kind == RV_NODE_MAP)
        walk_section(loader, root, "", "", 0);
    else if (root && !is_empty(root))
        rv_loader_problem(loader, at_line(root->line), "", "the file holds %s; allowed: a map of keys",
                          kind_names[root->kind]);
    rv_tree_destroy(root);
}

/* ---- environment and flags --------------------------------------------------------------------------------------- */

static void load_environment(struct rv_loader *loader)
{
    char name[RV_KEY_PATH_MAX];

    for (unsigned i = 0; rv_key_at(i); i++) {
        const struct rv_key *key = rv_key_at(i);
        const char *value;

        if (rv_key_environment(key, name, sizeof(name)) && (value = getenv(name)) && *value)
            store(loader, (struct rv_origin){RV_SOURCE_ENVIRONMENT, 0}, key, 0, name, value);
    }
}

/* Splits "types.NAME.queue" at the first and at the last dot, since names may hold dots. `env` takes one more segment:
 * "types.NAME.env.HOME". NULL = no such key. */
static const struct rv_key *find_by_path(const char *path, char *name, size_t size, const char **ret_variable)
{
    const struct rv_key *key = rv_key_find(path);
    const char *first = strchr(path, '.'), *env = strstr(path, ".env."), *last = env ? env : strrchr(path, '.');
    char pattern[RV_KEY_PATH_MAX];

    name[0] = '\0';
    *ret_variable = NULL;
    if ((key && key->scope == RV_SCOPE_TOP) || !first || !last || last <= first)
        return key && key->scope == RV_SCOPE_TOP ? key : NULL;
    if ((size_t)(last - first) > size || strlen(path) >= sizeof(pattern))
        return NULL;
    (void)snprintf(name, size, "%.*s", (int)(last - first - 1), first + 1);
    (void)snprintf(pattern, sizeof(pattern), "%.*s.*%s", (int)(first - path), path, env ? ".env" : last);
    if (env)
        *ret_variable = env + 5;
    return rv_key_find(pattern);
}

/* A list or map by flag replaces what the file says; elements are separated by commas. */
static void set_elements(struct rv_loader *loader, const struct rv_key *key, uint32_t number, const char *shown,
                         char *value)
{
    void *base = rv_config_base(loader->config, key->scope, number);
    struct rv_origin origin = {RV_SOURCE_FLAG, 0};
    char *rest = value, *element;

    rv_key_clear(key, base);
    *rv_config_origin(loader->config, key, number) = origin;
    while ((element = strsep(&rest, ",")) && (*element || rest)) {
        char reason[RV_KEY_REASON_MAX];
        char *text = element;

        if (key->type == RV_KEY_MAP)
            (void)strsep(&text, "=");
        report(loader, origin, key, shown,
               rv_key_append(key, base, element, text ? text : "", loader->work_folder, reason, sizeof(reason)),
               reason);
    }
}

/* types.NAME.env.HOME=/x: one variable, the others stay. */
static void set_variable(struct rv_loader *loader, const struct rv_key *key, uint32_t number, const char *shown,
                         const char *variable, const char *value)
{
    struct rv_config_type *type = rv_config_base(loader->config, key->scope, number);
    struct rv_origin origin = {RV_SOURCE_FLAG, 0};
    char reason[RV_KEY_REASON_MAX];

    *rv_config_origin(loader->config, key, number) = origin;
    for (uint32_t i = 0; i < type->env_count; i++) {
        char *copy;

        if (strcmp(type->env[i].key, variable) != 0)
            continue;
        copy = strdup(value);
        loader->no_memory |= !copy;
        if (copy) {
            free(type->env[i].value);
            type->env[i].value = copy;
        }
        return;
    }
    report(loader, origin, key, shown, rv_key_append(key, type, variable, value, "", reason, sizeof(reason)), reason);
}

static void load_flag(struct rv_loader *loader, const char *set)
{
    struct rv_origin origin = {RV_SOURCE_FLAG, 0};
    char name[RV_NAME_MAX + 1], shown[SHOWN_MAX];
    const struct rv_key *key;
    const char *variable;
    char *copy = strdup(set), *value;
    uint32_t number = 0;

    if (!copy) {
        loader->no_memory = true;
        return;
    }
    value = strchr(copy, '=');
    rv_escape(shown, sizeof(shown), copy, value ? (size_t)(value - copy) : strlen(copy));
    if (!value) {
        rv_loader_problem(loader, origin, shown, "has no value; allowed: --set KEY=VALUE");
        goto out;
    }
    *value++ = '\0';
    key = find_by_path(copy, name, sizeof(name), &variable);
    if (!key) {
        char *dot = strrchr(copy, '.');
        char prefix[RV_KEY_PATH_MAX] = "";

        if (dot && strchr(copy, '.') != dot) /* types.NAME.KEY */
            (void)snprintf(prefix, sizeof(prefix), "%.*s.*.", (int)(strcspn(copy, ".") % 64), copy);
        else if (dot)
            (void)snprintf(prefix, sizeof(prefix), "%.*s.", (int)((dot - copy) % 64), copy);
        shown[dot ? (size_t)(dot + 1 - copy) % sizeof(shown) : 0] = '\0';
        report_unknown(loader, origin, prefix, shown, dot ? dot + 1 : copy);
        goto out;
    }
    if (key->scope != RV_SCOPE_TOP && !entity_get(loader, origin, key->scope, name, &number))
        goto out;
    if (variable)
        set_variable(loader, key, number, shown, variable, value);
    else if (key->type >= RV_KEY_LIST)
        set_elements(loader, key, number, shown, value);
    else
        store(loader, origin, key, number, shown, value);
out:
    free(copy);
}

/* ---- all together ------------------------------------------------------------------------------------------------ */

static int find_folders(struct rv_loader *loader)
{
    char *real;

    loader->work_folder = getcwd(NULL, 0);
    if (!loader->work_folder)
        loader->work_folder = strdup("/");
    if (loader->file && (real = realpath(loader->file, NULL))) {
        char *slash = strrchr(real, '/');

        slash[slash == real] = '\0'; /* "/x.yaml" lies in "/" */
        loader->file_folder = real;
    } else {
        loader->file_folder = strdup("/");
    }
    return loader->work_folder && loader->file_folder ? 0 : -ENOMEM;
}

static const char *find_file(const struct rv_config_sources *sources)
{
    const char *file = sources->file ? sources->file : getenv("RESVISOR_CONFIG");

    if (file && *file)
        return file;
    return access(DEFAULT_FILE, F_OK) == 0 ? DEFAULT_FILE : NULL;
}

static void load_all(struct rv_loader *loader, const struct rv_config_sources *sources)
{
    if (loader->file)
        load_file(loader);
    load_environment(loader);
    for (unsigned i = 0; sources->sets && sources->sets[i]; i++)
        load_flag(loader, sources->sets[i]);
    if (!loader->no_memory)
        rv_config_check(loader);
    if (loader->problem_count > RV_CONFIG_PROBLEMS_MAX)
        fprintf(loader->problems, "and %u problems more\n", loader->problem_count - RV_CONFIG_PROBLEMS_MAX);
}

int rv_config_load(const struct rv_config_sources *sources, FILE *problems, struct rv_config **ret_config)
{
    struct rv_loader loader = {.problems = problems};
    int r = -ENOMEM;

    loader.config = calloc(1, sizeof(*loader.config));
    if (!loader.config)
        return -ENOMEM;
    loader.config->config.clients_gid = loader.config->config.rpc_gid = -1;
    loader.file = find_file(sources);
    if (find_folders(&loader) < 0 || store_defaults(loader.config, RV_SCOPE_TOP, 0) < 0)
        goto out;
    if (loader.file && !(loader.config->config.file = strdup(loader.file)))
        goto out;
    load_all(&loader, sources);
    r = loader.no_memory ? -ENOMEM : loader.problem_count ? -EINVAL : 0;
out:
    free(loader.file_folder);
    free(loader.work_folder);
    if (r == -ENOMEM)
        fprintf(problems, "no memory to read the configuration\n");
    if (r < 0)
        rv_config_destroy(&loader.config->config);
    else
        *ret_config = &loader.config->config;
    return r;
}

/* runtime_dir in the file; "" = not there. */
static int runtime_dir_of_file(struct rv_loader *loader, char *buffer, size_t size)
{
    struct rv_node *root = read_tree(loader);
    const char *text = "";
    int n;

    for (const struct rv_node *node = root && root->kind == RV_NODE_MAP ? root->child : NULL; node; node = node->next)
        if (strcmp(node->key->text, "runtime_dir") == 0 && node->kind == RV_NODE_SCALAR)
            text = node->text;
    n = snprintf(buffer, size, "%s%s%s", *text && *text != '/' ? loader->file_folder : "",
                 *text && *text != '/' ? "/" : "", text);
    rv_tree_destroy(root);
    if (loader->no_memory)
        return -ENOMEM;
    return loader->problem_count ? -EINVAL : n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

/* The last runtime_dir=… among the flags, else the environment's. NULL = neither. */
static const char *runtime_dir_given(const struct rv_config_sources *sources)
{
    static const char key[] = "runtime_dir=";
    const char *given = getenv("RESVISOR_RUNTIME_DIR");

    for (unsigned i = 0; sources->sets && sources->sets[i]; i++)
        if (strncmp(sources->sets[i], key, sizeof(key) - 1) == 0)
            given = sources->sets[i] + sizeof(key) - 1;
    return given && *given ? given : NULL;
}

int rv_config_find_runtime_dir(const struct rv_config_sources *sources, char *buffer, size_t size, char *problem,
                               size_t problem_size)
{
    struct rv_loader loader = {.problems = NULL};
    const char *given = runtime_dir_given(sources);
    int r = -ENOMEM;

    problem[0] = '\0';
    loader.problems = fmemopen(problem, problem_size, "w");
    loader.file = find_file(sources);
    if (!loader.problems || find_folders(&loader) < 0)
        goto out;
    buffer[0] = '\0';
    if (given) {
        int n =
            snprintf(buffer, size, "%s%s%s", *given == '/' ? "" : loader.work_folder, *given == '/' ? "" : "/", given);

        r = n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
    } else {
        r = loader.file ? runtime_dir_of_file(&loader, buffer, size) : 0;
    }
    if (r == 0 && *buffer == '\0')
        r = rv_runtime_dir_default(buffer, size);
    if (r == -EACCES)
        fprintf(loader.problems, "%s belongs to somebody else or is open to others", buffer);
out:
    if (loader.problems)
        (void)fclose(loader.problems);
    problem[strcspn(problem, "\n")] = '\0';
    if (r < 0 && *problem == '\0')
        (void)snprintf(problem, problem_size, "no memory, or the path of the runtime directory is too long");
    free(loader.file_folder);
    free(loader.work_folder);
    return r;
}

static void clear_scope(struct rv_config_private *config, enum rv_key_scope scope, uint32_t number)
{
    for (unsigned i = 0; rv_key_at(i); i++)
        if (rv_key_at(i)->scope == scope)
            rv_key_clear(rv_key_at(i), rv_config_base(config, scope, number));
}

void rv_config_destroy(struct rv_config *config)
{
    struct rv_config_private *all = (struct rv_config_private *)config;

    if (!config)
        return;
    for (unsigned scope = RV_SCOPE_TOP + 1; scope < RV_SCOPE_COUNT; scope++) {
        for (uint32_t i = 0; i < *count_of(config, scope); i++) {
            clear_scope(all, scope, i);
            free(entity_name(all, scope, i));
        }
        free(structs_of(config, scope));
        free(all->entities[scope]);
    }
    clear_scope(all, RV_SCOPE_TOP, 0);
    free(config->file);
    free(all);
}
