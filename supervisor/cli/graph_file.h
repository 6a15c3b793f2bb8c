/* What `route` and `verify` share: graphs in files, and the configured types as the router sees them. */
#ifndef RV_CLI_GRAPH_FILE_H
#define RV_CLI_GRAPH_FILE_H

#include "config.h"
#include "graph_route.h"
#include "options.h"

/* files: RV_TYPE_MODELS_MAX for each type. list and config->types have the same order. */
struct rv_cli_types {
    struct rv_config *config;
    struct rv_route_type list[RV_TYPES_MAX];
    const char *files[RV_TYPES_MAX][RV_TYPE_MODELS_MAX];
    uint32_t count;
};

/* Reads a file, "-" = standard input, up to one byte over RV_GRAPH_SIZE_MAX. *ret_text is the caller's to free. */
int rv_cli_read_file(const char *path, char **ret_text, size_t *ret_length, struct rv_error *err);

/* rv_graph_parse, with the path in front of what it says. */
int rv_cli_parse_graph(const char *path, const char *text, size_t length, struct rv_graph **ret_graph,
                       struct rv_error *err);

/* Reads the configuration that the arguments name. In any case the caller ends it by rv_cli_types_fini. */
int rv_cli_types_read(const struct rv_args *args, struct rv_cli_types *types, struct rv_error *err);
void rv_cli_types_fini(struct rv_cli_types *types);

#endif
