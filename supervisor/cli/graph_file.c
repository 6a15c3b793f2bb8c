#include "graph_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

int rv_cli_read_file(const char *path, char **ret_text, size_t *ret_length, struct rv_error *err)
{
    int fd = strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    char *text = NULL;
    size_t length = 0;
    ssize_t n = 0;
    int r = 0;

    if (fd < 0)
        return rv_error_set(err, errno, CODE(FILE), "%s cannot be read: %s", path, strerror(errno));
    text = malloc(RV_GRAPH_SIZE_MAX + 1);
    while (text && length <= RV_GRAPH_SIZE_MAX) {
        n = read(fd, text + length, RV_GRAPH_SIZE_MAX + 1 - length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        length += (size_t)n;
    }
    if (!text)
        r = rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the graph");
    else if (n < 0)
        r = rv_error_set(err, errno, CODE(FILE), "%s cannot be read: %s", path, strerror(errno));
    if (fd != STDIN_FILENO)
        (void)close(fd);
    if (r < 0) {
        free(text);
        return r;
    }
    *ret_text = text;
    *ret_length = length;
    return 0;
}

int rv_cli_parse_graph(const char *path, const char *text, size_t length, struct rv_graph **ret_graph,
                       struct rv_error *err)
{
    struct rv_error inner = {0};
    int r = rv_graph_parse(text, length, ret_graph, &inner);

    return r < 0 ? rv_error_set(err, -r, inner.code, "%s: %s", path, inner.message) : 0;
}

static const char *model_path(const struct rv_config *config, const char *name)
{
    for (uint32_t i = 0; i < config->model_count; i++)
        if (strcmp(config->models[i].name, name) == 0)
            return config->models[i].path;
    return name;
}

int rv_cli_types_read(const struct rv_args *args, struct rv_cli_types *types, struct rv_error *err)
{
    struct rv_config_sources sources;
    char *problems = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&problems, &length);
    int r;

    if (!out)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the configuration");
    rv_args_sources(args, &sources);
    r = rv_config_load(&sources, out, &types->config);
    (void)fclose(out);
    if (r < 0)
        (void)rv_error_set(err, -r, CODE(CONFIG), "%.*s", (int)strcspn(problems, "\n"), problems);
    free(problems);
    for (uint32_t i = 0; r == 0 && i < types->config->type_count; i++) {
        const struct rv_config_type *type = &types->config->types[i];
        struct rv_route_type *row = &types->list[types->count++];

        *row = (struct rv_route_type){.name = type->name, .files = types->files[i], .file_count = type->model_count};
        for (uint32_t k = 0; k < type->accept_count; k++)
            row->accepts |= rv_route_accepts(type->accepts[k]);
        for (uint32_t k = 0; k < type->model_count; k++)
            types->files[i][k] = model_path(types->config, type->models[k]);
    }
    return r;
}

void rv_cli_types_fini(struct rv_cli_types *types)
{
    rv_config_destroy(types->config);
    types->config = NULL;
}
