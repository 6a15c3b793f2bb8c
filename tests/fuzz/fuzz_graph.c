/* Any bytes as a graph: a verdict, never a fault; what is accepted is decided, with types and without. */
#include <stdlib.h>
#include <string.h>

#include "graph_route.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)   \
    do {                  \
        if (!(condition)) \
            abort();      \
    } while (0)

static void check(struct rv_graph *graph, const struct rv_route *route, uint32_t type_count)
{
    MUST(route->type == RV_ROUTE_NO_TYPE || route->type < type_count);
    MUST(route->medium <= RV_MEDIA && route->rule < RV_RULES && route->evidence_count <= RV_ROUTE_EVIDENCE_MAX);
    for (uint32_t i = 0; i < route->evidence_count; i++) {
        const struct rv_evidence *evidence = &route->evidence[i];

        MUST(evidence->node < graph->node_count && strlen(graph->nodes[evidence->node].class_type) > 0);
        MUST(strlen(graph->nodes[evidence->node].id) <= RV_GRAPH_SIZE_MAX);
        MUST(!evidence->file || strlen(evidence->file) < RV_GRAPH_NAME_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const files[] = {"a.safetensors"};
    static const struct rv_route_type types[] = {
        {"image", 0, NULL, 0}, {"b", 1u << RV_MEDIUM_VIDEO, files, 1}, {"c", RV_ROUTE_ANY, files, 1}};
    struct rv_graph *graph = NULL;
    struct rv_route route = {.type = RV_ROUTE_NO_TYPE};
    struct rv_error err = {0};

    if (rv_graph_parse((const char *)data, size, &graph, &err) < 0) {
        MUST(err.code != 0 && *err.message);
        return 0;
    }
    MUST(graph->node_count > 0 && graph->node_count <= RV_GRAPH_NODES_MAX);
    for (uint32_t count = 0; count <= 3; count += 3)
        if (rv_graph_route(graph, NULL, types, count, &route, &err) == 0)
            check(graph, &route, count);
    rv_graph_destroy(graph);
    return 0;
}
