/* Printing the configuration: effective values with their origin, and the reference of all keys. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config_private.h"

#define VALUE_COLUMN 34

static void format_origin(const struct rv_config *config, const struct rv_key *key, const struct rv_origin *origin,
                          char *buffer, size_t size)
{
    char name[RV_KEY_PATH_MAX];

    switch (origin->source) {
    case RV_SOURCE_FILE:
        (void)snprintf(buffer, size, "%s:%u", config->file, origin->line);
        break;
    case RV_SOURCE_ENVIRONMENT:
        (void)snprintf(buffer, size, "environment %s", rv_key_environment(key, name, sizeof(name)) ? name : "");
        break;
    case RV_SOURCE_FLAG:
        (void)snprintf(buffer, size, "command line");
        break;
    default:
        (void)snprintf(buffer, size, "default");
        break;
    }
}

static json_t *text_json(const char *text)
{
    json_t *value = text ? json_string(text) : NULL;

    return value ? value : json_string(""); /* NULL, or bytes that are no UTF-8 */
}

static json_t *list_json(const struct rv_key *key, const uint8_t *base)
{
    uint32_t count;
    json_t *value = key->type == RV_KEY_MAP ? json_object() : json_array();

    memcpy(&count, base + key->count_offset, sizeof(count));
    for (uint32_t i = 0; i < count; i++) {
        if (key->type == RV_KEY_MAP) {
            const struct rv_config_pair *pair = (const void *)(base + key->offset);

            (void)json_object_set_new(value, pair[i].key, text_json(pair[i].value));
        } else {
            char *const *texts = (const void *)(base + key->offset);

            (void)json_array_append_new(value, text_json(texts[i]));
        }
    }
    return value;
}

static json_t *value_json(const struct rv_key *key, const void *base)
{
    const uint8_t *place = (const uint8_t *)base + key->offset;
    char text[RV_KEY_VALUE_MAX];
    uint64_t wide;
    uint32_t number;

    switch (key->type) {
    case RV_KEY_BOOL:
        return json_boolean(*(const bool *)place);
    case RV_KEY_UINT:
        memcpy(&number, place, sizeof(number));
        return json_integer(number);
    case RV_KEY_SHARE:
        memcpy(&number, (const uint8_t *)base + key->count_offset, sizeof(number));
        if (number) {
            rv_key_format(key, base, text, sizeof(text));
            return text_json(text);
        }
        /* fall through */
    case RV_KEY_SIZE:
    case RV_KEY_DURATION:
        memcpy(&wide, place, sizeof(wide));
        return json_integer((json_int_t)(key->type == RV_KEY_DURATION ? wide / 1000 : wide));
    case RV_KEY_LIST:
    case RV_KEY_PATHS:
    case RV_KEY_MAP:
        return list_json(key, base);
    default:
        rv_key_format(key, base, text, sizeof(text));
        return text_json(text);
    }
}

static const char *json_unit(const struct rv_key *key, const json_t *value)
{
    if (key->type == RV_KEY_DURATION)
        return "ms";
    /* a share of what is not known yet is a text with its own unit */
    return (key->type == RV_KEY_SIZE || key->type == RV_KEY_SHARE) && json_is_integer(value) ? "bytes" : "";
}

struct printer {
    struct rv_config_private *config;
    FILE *out;
    json_t *array; /* NULL = text */
};

static void show_key(struct printer *printer, const struct rv_key *key, uint32_t number, const char *name)
{
    const void *base = rv_config_base(printer->config, key->scope, number);
    const struct rv_origin *origin = rv_config_origin(printer->config, key, number);
    char shown[RV_KEY_PATH_MAX], value[RV_KEY_VALUE_MAX], where[RV_KEY_VALUE_MAX + 64];

    rv_key_shown(key, name, shown, sizeof(shown));
    format_origin(&printer->config->config, key, origin, where, sizeof(where));
    if (printer->array) {
        json_t *row = json_object(), *data = value_json(key, base);
        const char *unit = json_unit(key, data);

        (void)json_object_set_new(row, "key", text_json(shown));
        (void)json_object_set_new(row, "value", data);
        (void)json_object_set_new(row, "unit", json_string(unit));
        (void)json_object_set_new(row, "origin", text_json(where));
        (void)json_array_append_new(printer->array, row);
        return;
    }
    rv_key_format(key, base, value, sizeof(value));
    fprintf(printer->out, "%-*s %-28s # %s\n", VALUE_COLUMN, shown, *value ? value : "(empty)", where);
}

static void show_scope(struct printer *printer, enum rv_key_scope scope, uint32_t number, const char *name,
                       const char *kind)
{
    for (unsigned i = 0; rv_key_at(i); i++)
        if (rv_key_at(i)->scope == scope && rv_key_is_of_kind(rv_key_at(i), kind))
            show_key(printer, rv_key_at(i), number, name);
}

void rv_config_show(const struct rv_config *config, FILE *out, bool json)
{
    struct printer printer = {(struct rv_config_private *)(uintptr_t)config, out, json ? json_array() : NULL};

    show_scope(&printer, RV_SCOPE_TOP, 0, "", "");
    for (uint32_t i = 0; i < config->model_count; i++)
        show_scope(&printer, RV_SCOPE_MODEL, i, config->models[i].name, "");
    for (uint32_t i = 0; i < config->type_count; i++)
        show_scope(&printer, RV_SCOPE_TYPE, i, config->types[i].name, config->types[i].kind);
    for (uint32_t i = 0; i < config->device_count; i++)
        show_scope(&printer, RV_SCOPE_DEVICE, i, config->devices[i].name, "");
    if (printer.array) {
        (void)json_dumpf(printer.array, out, JSON_INDENT(2));
        (void)fputc('\n', out);
        json_decref(printer.array);
    }
}

/* ---- reference --------------------------------------------------------------------------------------------------- */

static const char reference_head[] =
    "# Configuration\n"
    "\n"
    "<!-- Written by `resvisor check --reference` from the table that reads the file. Change the table, not this file. "
    "-->\n"
    "\n"
    "One YAML file: `-c FILE`, else the file named by `RESVISOR_CONFIG`, else `/etc/resvisor/resvisor.yaml` if there "
    "is\n"
    "one, else defaults only. `resvisor check -c FILE` names every problem with its line; `resvisor check --show` "
    "prints\n"
    "each effective value and where it comes from. A wrong configuration starts nothing and changes nothing.\n"
    "\n"
    "For each value the first of these counts: command line, environment, file, default. `--set KEY=VALUE` sets any "
    "key\n"
    "(`--set pool.budget=16GiB`, `--set types.image.queue=5`, `--set types.image.env.HOME=/tmp`; elements of a list "
    "are\n"
    "separated by commas). Keys without a NAME can be set by an environment variable: `RESVISOR_` and the key in "
    "capitals\n"
    "with `_` for each dot, such as `RESVISOR_POOL_BUDGET`. An empty variable counts as not set.\n"
    "\n"
    "| value | how it is written |\n"
    "| --- | --- |\n"
    "| size | `512MiB`, `1.5GiB`; units B, KiB, MiB, GiB, TiB; a number alone is bytes |\n"
    "| duration | `500ms`, `10s`, `2m`; units us, ms, s, m, h, d; a number alone is refused, except 0 |\n"
    "| name | 1 to 64 letters, digits and `.` `_` `-` |\n"
    "| device | `cuda:0` and the like, or `GPU-` and the uuid as `nvidia-smi -L` shows it |\n"
    "| path | a relative one in the file is relative to the file's folder |\n"
    "\n"
    "The file may be at most 1 MiB. YAML aliases, several documents in one file and keys that occur twice are "
    "refused.\n";

static void write_row(FILE *out, const struct rv_key *key)
{
    char shown[RV_KEY_PATH_MAX], allowed[RV_KEY_REASON_MAX], variable[RV_KEY_PATH_MAX];

    rv_key_shown(key, "NAME", shown, sizeof(shown));
    rv_key_allowed(key, allowed, sizeof(allowed));
    fprintf(out, "\n### `%s`\n\n%s\n\n", shown, key->help);
    fprintf(out, "Allowed: %s. Default: ", allowed);
    fprintf(out, *key->fallback ? "`%s`." : "empty.", key->fallback);
    if (rv_key_environment(key, variable, sizeof(variable)))
        fprintf(out, " Environment: `%s`.", variable);
    (void)fputc('\n', out);
}

void rv_config_write_reference(FILE *out)
{
    static const char *const titles[] = {[RV_SCOPE_TOP] = "Keys",
                                         [RV_SCOPE_MODEL] = "Models, by name",
                                         [RV_SCOPE_TYPE] = "Workflow types, by name",
                                         [RV_SCOPE_DEVICE] = "Devices, by name"};

    (void)fputs(reference_head, out);
    for (unsigned scope = 0; scope < sizeof(titles) / sizeof(titles[0]); scope++) {
        fprintf(out, "\n## %s\n", titles[scope]);
        for (unsigned i = 0; rv_key_at(i); i++)
            if (rv_key_at(i)->scope == (enum rv_key_scope)scope)
                write_row(out, rv_key_at(i));
    }
}
