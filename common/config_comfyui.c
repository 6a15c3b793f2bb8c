/* Checks of types of kind comfyui: what its arguments may hold, its warm-up, and what two types must not share. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_private.h"
#include "graph.h"

#define PORT_MAX 65535ul
#define WORKER_MARK "%worker%"

/* They would take away what a worker needs: plain HTTP at its port, and a server that stays. */
static const char *const refused_flags[] = {"--tls-keyfile", "--tls-certfile", "--quick-test-for-ci"};

/* Where a worker may listen: resvisor reaches it at 127.0.0.1. */
static const char *const allowed_addresses[] = {"127.0.0.1", "localhost", "0.0.0.0"};

const char *rv_config_type_argument(const struct rv_config_type *type, const char *flag)
{
    const char *found = NULL;
    size_t n = strlen(flag);

    for (uint32_t i = 0; i < type->arg_count; i++) {
        const char *arg = type->args[i];

        if (strncmp(arg, flag, n) != 0)
            continue;
        if (arg[n] == '=')
            found = arg + n + 1;
        else if (arg[n] == '\0')
            found = i + 1 < type->arg_count && strncmp(type->args[i + 1], "--", 2) != 0 ? type->args[i + 1] : "";
    }
    return found;
}

static void problem(struct rv_loader *loader, const char *pattern, uint32_t number, const char *text, const char *shown)
{
    const struct rv_key *row = rv_key_find(pattern);
    char key[RV_KEY_PATH_MAX];

    rv_key_shown(row, loader->config->config.types[number].name, key, sizeof(key));
    rv_loader_problem(loader, *rv_config_origin(loader->config, row, number), key, "%s%s", shown, text);
}

/* 0 = none is given, or any. */
static unsigned long port_of(const struct rv_config_type *type)
{
    const char *text = rv_config_type_argument(type, "--port");

    return text && isdigit((unsigned char)*text) && strlen(text) <= 5 ? strtoul(text, NULL, 10) : 0;
}

static void check_arguments(struct rv_loader *loader, uint32_t number)
{
    const struct rv_config_type *type = &loader->config->config.types[number];
    const char *port = rv_config_type_argument(type, "--port"), *address = rv_config_type_argument(type, "--listen");
    bool fits = !address;

    for (unsigned i = 0; i < sizeof(refused_flags) / sizeof(refused_flags[0]); i++)
        if (rv_config_type_argument(type, refused_flags[i]))
            problem(loader, "types.*.args", number, " does not work in a worker; allowed: to leave it out",
                    refused_flags[i]);
    if (port && (*port == '\0' || strspn(port, "0123456789") != strlen(port) || strlen(port) > 5 ||
                 port_of(type) + type->workers - 1 > PORT_MAX))
        problem(loader, "types.*.args", number,
                "--port: allowed: a number, from which each further worker counts on, up to 65535", "");
    for (unsigned i = 0; address && i < sizeof(allowed_addresses) / sizeof(allowed_addresses[0]); i++)
        fits |= strcmp(address, allowed_addresses[i]) == 0;
    if (!fits)
        problem(loader, "types.*.args", number,
                "--listen: allowed: 127.0.0.1 or 0.0.0.0, since resvisor reaches the worker at 127.0.0.1", "");
}

static void check_prefix(struct rv_loader *loader, uint32_t number)
{
    const struct rv_config_type *type = &loader->config->config.types[number];
    const char *text = type->output_prefix;

    if (*text == '/' || *text == '-' || strcmp(text, "..") == 0 || strncmp(text, "../", 3) == 0 ||
        strstr(text, "/../") || strchr(text, '\\'))
        problem(loader, "types.*.output_prefix", number, "allowed: a relative path that does not leave the folder", "");
    if (*text && type->workers > 1 && !strstr(text, WORKER_MARK))
        problem(loader, "types.*.output_prefix", number,
                "two workers would take the same file names; allowed: a text with " WORKER_MARK " in it", "");
}

/* The file's bytes; the caller frees them. NULL = it cannot be read, errno says why. */
static char *read_prompt(const char *path, size_t *ret_length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    struct stat st;
    char *text = NULL;
    size_t used = 0;
    ssize_t n = -1;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        errno = EINVAL;
    else if (st.st_size > RV_GRAPH_SIZE_MAX)
        errno = EFBIG;
    else
        text = malloc((size_t)st.st_size + 1);
    while (text && used < (size_t)st.st_size && (n = read(fd, text + used, (size_t)st.st_size - used)) > 0)
        used += (size_t)n;
    (void)close(fd);
    if (text)
        *ret_length = used;
    return text;
}

static void check_warmup(struct rv_loader *loader, uint32_t number)
{
    const char *path = loader->config->config.types[number].warmup;
    struct rv_graph *graph = NULL;
    struct rv_error err = {0};
    size_t length = 0;
    char *text;

    if (*path == '\0')
        return;
    text = read_prompt(path, &length);
    if (!text)
        problem(loader, "types.*.warmup", number, "; allowed: a workflow in API format", strerror(errno));
    else if (rv_graph_parse(text, length, &graph, &err) < 0)
        problem(loader, "types.*.warmup", number, "; allowed: a workflow in API format", err.message);
    else if (graph->format != RV_GRAPH_PROMPT)
        problem(loader, "types.*.warmup", number,
                "it is a saved workflow; allowed: one in API format (in ComfyUI: Workflow, Export (API))", "");
    rv_graph_destroy(graph);
    free(text);
}

void rv_config_check_comfyui(struct rv_loader *loader, uint32_t number)
{
    check_arguments(loader, number);
    check_prefix(loader, number);
    check_warmup(loader, number);
}

static bool is_comfyui(const struct rv_config_type *type)
{
    return strcmp(type->kind, "comfyui") == 0;
}

/* Each worker has a port of its own, and prefixes in one folder must differ. */
static void check_pair(struct rv_loader *loader, uint32_t first, uint32_t second)
{
    const struct rv_config_type *a = &loader->config->config.types[first], *b = &loader->config->config.types[second];
    unsigned long p = port_of(a), q = port_of(b);

    if (p && q && p < q + b->workers && q < p + a->workers)
        problem(loader, "types.*.args", second, ": a worker of this type has the same --port; allowed: another one",
                a->name);
    if (*b->output_prefix && strcmp(a->output_prefix, b->output_prefix) == 0 &&
        strcmp(a->directory, b->directory) == 0 && !rv_config_type_argument(b, "--output-directory"))
        problem(loader, "types.*.output_prefix", second, " has the same one; allowed: another one", a->name);
}

void rv_config_check_all_comfyui(struct rv_loader *loader)
{
    struct rv_config *c = &loader->config->config;
    uint32_t primary = c->type_count;

    for (uint32_t i = 0; i < c->type_count; i++) {
        if (!is_comfyui(&c->types[i]))
            continue;
        for (uint32_t k = 0; k < i; k++)
            if (is_comfyui(&c->types[k]))
                check_pair(loader, k, i);
        if (c->types[i].primary && primary < c->type_count)
            problem(loader, "types.*.primary", i, " is the primary type already; allowed: one", c->types[primary].name);
        if (c->types[i].primary)
            primary = i;
    }
    for (uint32_t i = 0; i < c->type_count && primary == c->type_count; i++) {
        if (is_comfyui(&c->types[i])) {
            primary = i;
            c->types[i].primary = true;
        }
    }
}
