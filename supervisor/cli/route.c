/* `route`: what a ComfyUI graph makes, which workflow type would run it, and why. Needs no running supervisor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "graph_file.h"
#include "output.h"

#define SHOWN_EVIDENCE_MAX 8u /* lines for people; --json has all that the decision kept */

static const struct rv_option options[] = {
    {"type", 't', "TYPE", "Decide as if the request's header X-Resvisor-Type named this type."},
    {0},
};
enum { ROUTE_TYPE };

/* ---- printing ---------------------------------------------------------------------------------------------------- */

static json_t *evidence_json(const struct rv_graph *graph, const struct rv_evidence *evidence)
{
    const struct rv_graph_node *node = &graph->nodes[evidence->node];
    json_t *row = json_object();

    (void)json_object_set_new(row, "node", rv_json_text(node->id));
    (void)json_object_set_new(row, "class_type", rv_json_text(node->class_type));
    (void)json_object_set_new(row, "role", json_string(rv_role_name(evidence->role)));
    (void)json_object_set_new(row, "kind", json_string(rv_medium_name(evidence->medium)));
    (void)json_object_set_new(row, "file", evidence->file ? rv_json_text(evidence->file) : json_null());
    return row;
}

static json_t *candidates_json(const struct rv_route *route)
{
    json_t *array = json_array();

    for (unsigned i = RV_MEDIA; i-- > 0;) {
        json_t *row = json_object();
        uint32_t all = 0;

        (void)json_object_set_new(row, "kind", json_string(rv_medium_name((enum rv_medium)i)));
        for (unsigned k = RV_ROLE_MAKE; k < RV_ROLES; k++) {
            (void)json_object_set_new(row, rv_role_name((enum rv_role)k), json_integer(route->votes[i][k]));
            all += route->votes[i][k];
        }
        if (all > 0)
            (void)json_array_append_new(array, row);
        else
            json_decref(row);
    }
    return array;
}

static void print_json(const struct rv_graph *graph, const struct rv_route *route, const struct rv_cli_types *types,
                       const struct rv_error *err)
{
    json_t *root = json_object(), *array = json_array();
    bool has_type = route->type != RV_ROUTE_NO_TYPE;

    for (uint32_t i = 0; i < route->evidence_count; i++)
        (void)json_array_append_new(array, evidence_json(graph, &route->evidence[i]));
    (void)json_object_set_new(root, "kind", json_string(rv_medium_name(route->medium)));
    (void)json_object_set_new(root, "rule", json_string(rv_route_rule_name(route->rule)));
    (void)json_object_set_new(root, "type", has_type ? rv_json_text(types->list[route->type].name) : json_null());
    (void)json_object_set_new(root, "format", json_string(graph->format == RV_GRAPH_PROMPT ? "prompt" : "workflow"));
    (void)json_object_set_new(root, "nodes", json_integer(graph->node_count));
    (void)json_object_set_new(root, "candidates", candidates_json(route));
    (void)json_object_set_new(root, "evidence", array);
    if (err->code)
        (void)json_object_set_new(root, "error", rv_json_error(err->code, err->message, err->remedy));
    rv_json_print(root);
}

static const char *const rule_texts[] = {
    [RV_RULE_EXPLICIT] = "the request names it",
    [RV_RULE_OUTPUT] = "the strongest of what its output nodes are for",
    [RV_RULE_MODEL] = "the models that must be resident say more than the outputs",
    [RV_RULE_AFFINITY] = "no node is known, and the type holds its model files",
    [RV_RULE_DEFAULT] = "nothing is known about its nodes",
};
_Static_assert(sizeof(rule_texts) / sizeof(rule_texts[0]) == RV_RULES, "a text per rule");

static void print_text(const struct rv_graph *graph, const struct rv_route *route, const struct rv_cli_types *types)
{
    static const char *const titles[] = {"NODE", "CLASS", "ROLE", "KIND", "FILE", NULL};
    struct rv_table table;
    char name[2 * RV_NAME_MAX];

    printf("kind: %s\nrule: %s (%s)\n", rv_medium_name(route->medium), rv_route_rule_name(route->rule),
           rule_texts[route->rule]);
    if (route->type != RV_ROUTE_NO_TYPE)
        printf("type: %s\n",
               rv_escape(name, sizeof(name), types->list[route->type].name, strlen(types->list[route->type].name)));
    else
        printf("type: none (%s)\n", types->count > 0 ? "no type accepts it" : "no types are configured");
    if (route->evidence_count == 0)
        return;
    printf("\n");
    rv_table_init(&table, titles);
    for (uint32_t i = 0; i < route->evidence_count && i < SHOWN_EVIDENCE_MAX; i++) {
        const struct rv_evidence *evidence = &route->evidence[i];

        rv_table_add(&table, "%s", graph->nodes[evidence->node].id);
        rv_table_add(&table, "%s", graph->nodes[evidence->node].class_type);
        rv_table_add(&table, "%s", rv_role_name(evidence->role));
        rv_table_add(&table, "%s", rv_medium_name(evidence->medium));
        rv_table_add(&table, "%s", evidence->file ? evidence->file : "-");
    }
    rv_table_print(&table);
    if (route->evidence_count > SHOWN_EVIDENCE_MAX)
        printf("and %u more; --json shows them\n", route->evidence_count - SHOWN_EVIDENCE_MAX);
}

/* ---- the command ------------------------------------------------------------------------------------------------- */

static int parse_file(const char *path, struct rv_graph **ret_graph, struct rv_error *err)
{
    char *text = NULL;
    size_t length = 0;
    int r = rv_cli_read_file(path, &text, &length, err);

    if (r == 0)
        r = rv_cli_parse_graph(path, text, length, ret_graph, err);
    free(text);
    return r;
}

static int route_file(const struct rv_args *args, const char *header)
{
    static struct rv_cli_types types; /* large */
    struct rv_graph *graph = NULL;
    struct rv_route route = {.type = RV_ROUTE_NO_TYPE};
    struct rv_error err = {0};
    bool decided = false;
    int r = rv_cli_types_read(args, &types, &err);

    if (r == 0)
        r = parse_file(args->arguments[0], &graph, &err);
    if (r == 0) {
        route.medium = RV_MEDIA;
        r = rv_graph_route(graph, header, types.list, types.count, &route, &err);
        decided = r == 0 || route.medium != RV_MEDIA;
    }
    if (decided && args->json)
        print_json(graph, &route, &types, &err);
    else if (decided)
        print_text(graph, &route, &types);
    if (r < 0 && decided && args->json)
        r = rv_error_row(err.code)->exit_code;
    else if (r < 0)
        r = rv_say_error(&err, args->json);
    rv_graph_destroy(graph);
    rv_cli_types_fini(&types);
    return r;
}

static int run_route(int argc, char **argv)
{
    const char *value, *header = NULL;
    struct rv_args args;
    int i;

    rv_args_init(&args, &rv_command_route, argc, argv);
    while ((i = rv_args_next(&args, &value)) >= 0)
        header = value;
    if (i != RV_ARGS_END)
        return rv_args_exit(&args, i);
    i = route_file(&args, header);
    rv_args_fini(&args);
    return i;
}

const struct rv_command rv_command_route = {
    .name = "route",
    .arguments = "FILE [-t TYPE] [-c FILE] [--json]",
    .summary = "Explain which workflow type a ComfyUI graph belongs to.",
    .text =
        "FILE holds a graph in ComfyUI's API format, the body of a POST /prompt, or a saved workflow; - is standard "
        "input. Printed are the kind of the graph, the rule that decided, the nodes and model files that the rule "
        "looked at, and the configured type that accepts the kind: see types.NAME.accepts.\n\n"
        "Nothing is started or asked. Exit code 6 if no type accepts the graph.",
    .common = RV_COMMON_CONFIG | RV_COMMON_LOG | RV_COMMON_JSON,
    .min_arguments = 1,
    .max_arguments = 1,
    .options = options,
    .run = run_route,
};
