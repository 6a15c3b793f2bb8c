#include "graph.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define MODE_NEVER 2 /* a workflow's node that is muted */
#define MODE_BYPASS 4

/* Who needs whom: from[node] is where the needed ones of `node` begin in `needs`, from[node + 1] where they end. */
struct rv_graph_links {
    uint32_t *from, *needs, *stack;
    uint32_t count, room;
};

/* ---- collecting nodes and files ---------------------------------------------------------------------------------- */

static const char *const model_suffixes[] = {".safetensors", ".sft", ".ckpt", ".gguf", ".pth", ".pt", ".bin", ".onnx"};

static bool is_model_file(const char *text)
{
    size_t n = strnlen(text, RV_GRAPH_NAME_MAX);
    const char *dot = n < RV_GRAPH_NAME_MAX ? memrchr(text, '.', n) : NULL;

    for (size_t i = 0; dot && dot > text && i < sizeof(model_suffixes) / sizeof(model_suffixes[0]); i++)
        if (strcasecmp(dot, model_suffixes[i]) == 0)
            return true;
    return false;
}

/* Takes the file names among a node's inputs or widget values. */
static void collect_files(struct rv_graph *graph, uint32_t values, uint32_t node)
{
    const struct rv_json *json = &graph->json;

    for (uint32_t i = rv_json_first(json, values); i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        const char *text = rv_json_string(json, rv_json_value_at(json, i), NULL);

        if (text && is_model_file(text) && graph->file_count < RV_GRAPH_FILES_MAX)
            graph->files[graph->file_count++] = (struct rv_graph_file){text, node};
    }
}

static int too_many_nodes(struct rv_error *err)
{
    return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "the graph has more than %u nodes", RV_GRAPH_NODES_MAX);
}

static int no_memory(struct rv_error *err)
{
    return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the graph");
}

static int bad_class(const char *id, struct rv_error *err)
{
    char shown[128];

    return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "node %s: its class is missing, or no text of 1 to %u bytes",
                        rv_escape(shown, sizeof(shown), id, strlen(id)), RV_GRAPH_NAME_MAX);
}

/* A class name; NULL = it is none. */
static const char *class_of(const struct rv_json *json, uint32_t node, const char *key)
{
    size_t n;
    const char *text = rv_json_string(json, rv_json_get(json, node, key), &n);

    return n > 0 && n <= RV_GRAPH_NAME_MAX ? text : NULL;
}

/* ---- the API format ---------------------------------------------------------------------------------------------- */

static int add_need(struct rv_graph_links *links, uint32_t node)
{
    if (links->count == links->room) {
        uint32_t room = links->room ? 2 * links->room : 256; /* bounded by RV_GRAPH_VALUES_MAX */
        uint32_t *grown = reallocarray(links->needs, room, sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        links->needs = grown;
        links->room = room;
    }
    links->needs[links->count++] = node;
    return 0;
}

/* The ids of a prompt in order, so that links find them: sorted, since a hash could be made slow by chosen ids. */
struct id {
    const char *text;
    uint32_t length, node;
};

static int compare_ids(const void *a, const void *b)
{
    const struct id *x = a, *y = b;

    if (x->length != y->length)
        return x->length < y->length ? -1 : 1;
    return memcmp(x->text, y->text, x->length);
}

/* Links are inputs of the form [id, slot]. ids: those of all nodes. */
static int link_node(struct rv_graph *graph, uint32_t node, uint32_t inputs, const struct id *ids)
{
    const struct rv_json *json = &graph->json;

    graph->links->from[node] = graph->links->count;
    for (uint32_t i = rv_json_first(json, inputs); i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        uint32_t value = rv_json_value_at(json, i), first = rv_json_first(json, value);
        const struct id *found = NULL;
        struct id wanted = {NULL, 0, 0};
        size_t n;

        if (!rv_json_is(json, value, RV_JSON_ARRAY) || json->values[value].length != 2)
            continue;
        wanted.text = rv_json_string(json, first, &n);
        wanted.length = (uint32_t)n;
        if (wanted.text && rv_json_is(json, rv_json_next(json, first), RV_JSON_NUMBER))
            found = bsearch(&wanted, ids, graph->node_count, sizeof(*ids), compare_ids);
        if (!found)
            continue;
        graph->nodes[found->node].used = true;
        if (add_need(graph->links, found->node) < 0)
            return -ENOMEM;
    }
    graph->links->from[node + 1] = graph->links->count;
    return 0;
}

static int make_links(struct rv_graph *graph, size_t count)
{
    graph->nodes = calloc(count + 1, sizeof(*graph->nodes));
    graph->links = calloc(1, sizeof(*graph->links));
    if (!graph->nodes || !graph->links)
        return -ENOMEM;
    graph->links->from = calloc(count + 1, sizeof(*graph->links->from));
    graph->links->stack = calloc(count + 1, sizeof(*graph->links->stack));
    return graph->links->from && graph->links->stack ? 0 : -ENOMEM;
}

/* Marks the nodes of partial_execution_targets. */
static void mark_targets(struct rv_graph *graph, const struct id *ids)
{
    const struct rv_json *json = &graph->json;

    for (uint32_t i = rv_json_first(json, graph->members[RV_GRAPH_MEMBER_TARGETS]);
         graph->is_partial && i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        size_t n;
        const char *text = rv_json_string(json, i, &n);
        struct id wanted = {text, (uint32_t)n, 0};
        const struct id *found = text ? bsearch(&wanted, ids, graph->node_count, sizeof(*ids), compare_ids) : NULL;

        if (found)
            graph->nodes[found->node].wanted = true;
    }
}

static int read_prompt(struct rv_graph *graph, uint32_t prompt, struct rv_error *err)
{
    const struct rv_json *json = &graph->json;
    uint32_t count = rv_json_size(json, prompt), node = 0;
    struct id *ids = NULL;
    bool is_sorted = true; /* as ComfyUI's own ids mostly are */
    int r = 0;

    if (count > RV_GRAPH_NODES_MAX)
        return too_many_nodes(err);
    ids = calloc((size_t)count + 1, sizeof(*ids));
    if (!ids || make_links(graph, count) < 0) {
        r = no_memory(err);
        goto out;
    }
    for (uint32_t i = rv_json_first(json, prompt); i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        uint32_t value = rv_json_value_at(json, i);
        const char *id = rv_json_key(json, i), *class_type = class_of(json, value, "class_type");

        if (!class_type) {
            r = bad_class(id, err);
            goto out;
        }
        ids[graph->node_count] = (struct id){id, json->values[i].key_length, graph->node_count};
        if (graph->node_count > 0)
            is_sorted &= compare_ids(&ids[graph->node_count - 1], &ids[graph->node_count]) < 0;
        graph->nodes[graph->node_count] = (struct rv_graph_node){.id = id, .class_type = class_type};
        collect_files(graph, rv_json_get(json, value, "inputs"), graph->node_count++);
    }
    if (!is_sorted)
        qsort(ids, graph->node_count, sizeof(*ids), compare_ids);
    mark_targets(graph, ids);
    for (uint32_t i = rv_json_first(json, prompt); r == 0 && i != RV_JSON_NONE; i = rv_json_next(json, i))
        if (link_node(graph, node++, rv_json_get(json, rv_json_value_at(json, i), "inputs"), ids) < 0)
            r = no_memory(err);
out:
    free(ids);
    return r;
}

/* ---- saved workflows --------------------------------------------------------------------------------------------- */

/* One list of nodes that runs: the workflow's own, a subgraph's, or a group node's (how subgraphs were stored before).
 */
struct level {
    uint32_t graph;
    const char *name; /* the class of the node that stands for it; "" for the workflow's own */
};

/* What a node of this class stands for. */
struct subgraph {
    char *class_type; /* of the node; owned */
    uint32_t graph, number;
    bool listed;
};

/* The levels that run: each subgraph once, however often it is used, so that nesting cannot multiply. */
struct levels {
    struct level *list;
    uint32_t count;
    struct subgraph *subgraphs; /* sorted by class */
    uint32_t subgraph_count;
};

static bool is_running(const struct rv_json *json, uint32_t node)
{
    double mode = rv_json_number(json, rv_json_get(json, node, "mode"));

    return mode != MODE_NEVER && mode != MODE_BYPASS;
}

/* The text of a node's id, which is a number or a text. Kept in graph->ids. NULL = no memory. */
static const char *make_id(struct rv_graph *graph, const char *level, uint32_t id)
{
    const char *given = rv_json_string(&graph->json, id, NULL);
    char *text;
    int n = given ? asprintf(&text, "%s%s%s", level, *level ? ":" : "", given)
                  : asprintf(&text, "%s%s%.0f", level, *level ? ":" : "", rv_json_number(&graph->json, id));

    if (n < 0)
        return NULL;
    graph->ids[graph->id_count++] = text;
    return text;
}

static bool is_used(const struct rv_json *json, uint32_t node)
{
    uint32_t outputs = rv_json_get(json, node, "outputs");

    if (!rv_json_is(json, outputs, RV_JSON_ARRAY))
        return false;
    for (uint32_t i = rv_json_first(json, outputs); i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        uint32_t links = rv_json_get(json, i, "links");

        if (rv_json_is(json, links, RV_JSON_ARRAY) && json->values[links].length > 0)
            return true;
    }
    return false;
}

static int add_workflow_node(struct rv_graph *graph, const struct level *level, uint32_t node, struct rv_error *err)
{
    const struct rv_json *json = &graph->json;
    const char *class_type = class_of(json, node, "type"), *id;
    uint32_t given = rv_json_get(json, node, "id");

    if (graph->node_count == RV_GRAPH_NODES_MAX)
        return too_many_nodes(err);
    id = make_id(graph, level->name, given != RV_JSON_NONE ? given : rv_json_get(json, node, "index"));
    if (!id)
        return no_memory(err);
    if (!class_type)
        return bad_class(id, err);
    graph->nodes[graph->node_count] =
        (struct rv_graph_node){.id = id, .class_type = class_type, .used = is_used(json, node)};
    collect_files(graph, rv_json_get(json, node, "widgets_values"), graph->node_count++);
    return 0;
}

static int compare_classes(const void *a, const void *b)
{
    const struct subgraph *x = a, *y = b;

    return strcmp(x->class_type, y->class_type);
}

/* Reads one level; subgraphs that it uses are added to the end of the list. */
static int read_level(struct rv_graph *graph, struct levels *levels, uint32_t number, struct rv_error *err)
{
    const struct level *level = &levels->list[number];
    const struct rv_json *json = &graph->json;
    uint32_t nodes = rv_json_get(json, level->graph, "nodes");
    int r;

    if (!rv_json_is(json, nodes, RV_JSON_ARRAY))
        return 0;
    for (uint32_t i = rv_json_first(json, nodes); i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        const char *class_type = class_of(json, i, "type");
        struct subgraph wanted = {.class_type = (char *)class_type}, *subgraph = NULL;

        if (class_type && levels->subgraph_count > 0)
            subgraph = bsearch(&wanted, levels->subgraphs, levels->subgraph_count, sizeof(wanted), compare_classes);
        if (!rv_json_is(json, i, RV_JSON_OBJECT))
            return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "a node of the workflow is no object");
        if (!is_running(json, i))
            continue;
        if (!subgraph) {
            r = add_workflow_node(graph, level, i, err);
            if (r < 0)
                return r;
            continue;
        }
        if (!subgraph->listed)
            levels->list[levels->count++] = (struct level){subgraph->graph, class_type};
        subgraph->listed = true;
    }
    return 0;
}

static int add_subgraph(struct levels *levels, const char *before, const char *name, uint32_t graph)
{
    struct subgraph *subgraph = &levels->subgraphs[levels->subgraph_count];

    if (strlen(before) + strlen(name) > RV_GRAPH_NAME_MAX)
        return 0; /* no class is so long */
    if (asprintf(&subgraph->class_type, "%s%s", before, name) < 0) {
        subgraph->class_type = NULL;
        return -ENOMEM;
    }
    subgraph->graph = graph;
    subgraph->number = levels->subgraph_count++;
    return 0;
}

static int compare_subgraphs(const void *a, const void *b)
{
    const struct subgraph *x = a, *y = b;
    int order = compare_classes(a, b);

    return order ? order : (x->number < y->number) - (x->number > y->number); /* the last one of a name first */
}

/* A subgraph is stood for by a node with its id as class, a group by "workflow>NAME", or "workflow/NAME". */
static int find_subgraphs(const struct rv_json *json, struct levels *levels, uint32_t definitions, uint32_t groups)
{
    uint32_t kept = 0;
    int r = 0;

    for (uint32_t i = rv_json_first(json, definitions); r == 0 && i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        const char *id = class_of(json, i, "id");

        if (id)
            r = add_subgraph(levels, "", id, i);
    }
    for (uint32_t i = rv_json_first(json, groups); r == 0 && i != RV_JSON_NONE; i = rv_json_next(json, i)) {
        r = add_subgraph(levels, "workflow>", rv_json_key(json, i), rv_json_value_at(json, i));
        if (r == 0)
            r = add_subgraph(levels, "workflow/", rv_json_key(json, i), rv_json_value_at(json, i));
    }
    if (r < 0)
        return r;
    qsort(levels->subgraphs, levels->subgraph_count, sizeof(*levels->subgraphs), compare_subgraphs);
    for (uint32_t i = 0; i < levels->subgraph_count; i++) {
        if (kept > 0 && compare_classes(&levels->subgraphs[kept - 1], &levels->subgraphs[i]) == 0)
            free(levels->subgraphs[i].class_type);
        else
            levels->subgraphs[kept++] = levels->subgraphs[i];
    }
    levels->subgraph_count = kept;
    return 0;
}

/* As json_get, of an object or array only. */
static uint32_t get_kind(const struct rv_json *json, uint32_t object, const char *name, enum rv_json_kind kind)
{
    uint32_t value = rv_json_get(json, object, name);

    return rv_json_is(json, value, kind) ? value : RV_JSON_NONE;
}

static int read_workflow(struct rv_graph *graph, struct rv_error *err)
{
    const struct rv_json *json = &graph->json;
    uint32_t definitions = get_kind(json, rv_json_get(json, 0, "definitions"), "subgraphs", RV_JSON_ARRAY);
    uint32_t groups = get_kind(json, rv_json_get(json, 0, "extra"), "groupNodes", RV_JSON_OBJECT);
    size_t count = (size_t)rv_json_size(json, definitions) + 2 * (size_t)rv_json_size(json, groups);
    struct levels levels = {.list = calloc(count + 1, sizeof(*levels.list)),
                            .count = 1,
                            .subgraphs = calloc(count + 1, sizeof(*levels.subgraphs))};
    int r = 0;

    graph->nodes = calloc(RV_GRAPH_NODES_MAX, sizeof(*graph->nodes));
    graph->ids = calloc(RV_GRAPH_NODES_MAX, sizeof(*graph->ids));
    if (!levels.list || !levels.subgraphs || !graph->nodes || !graph->ids ||
        find_subgraphs(json, &levels, definitions, groups) < 0) {
        r = no_memory(err);
        goto out;
    }
    levels.list[0] = (struct level){0, ""};
    for (uint32_t k = 0; r == 0 && k < levels.count; k++)
        r = read_level(graph, &levels, k, err);
out:
    for (uint32_t i = 0; levels.subgraphs && i < levels.subgraph_count; i++)
        free(levels.subgraphs[i].class_type);
    free(levels.subgraphs);
    free(levels.list);
    return r;
}

/* ---- both -------------------------------------------------------------------------------------------------------- */

static const char *const member_names[] = {
    [RV_GRAPH_MEMBER_PROMPT] = "prompt",
    [RV_GRAPH_MEMBER_CLIENT_ID] = "client_id",
    [RV_GRAPH_MEMBER_PROMPT_ID] = "prompt_id",
    [RV_GRAPH_MEMBER_NUMBER] = "number",
    [RV_GRAPH_MEMBER_FRONT] = "front",
    [RV_GRAPH_MEMBER_EXTRA_DATA] = "extra_data",
    [RV_GRAPH_MEMBER_TARGETS] = "partial_execution_targets",
};
_Static_assert(sizeof(member_names) / sizeof(member_names[0]) == RV_GRAPH_MEMBERS, "a name per member");

/* What stands beside the graph in the body of POST /prompt. */
static int read_request(struct rv_graph *graph, struct rv_error *err)
{
    const struct rv_json *json = &graph->json;
    uint32_t marks, targets;

    graph->is_body = true;
    for (unsigned i = 0; i < RV_GRAPH_MEMBERS; i++)
        graph->members[i] = rv_json_get(json, 0, member_names[i]);
    marks = rv_json_get(json, graph->members[RV_GRAPH_MEMBER_EXTRA_DATA], "resvisor");
    graph->wanted_type = class_of(json, marks, "type");
    if (rv_json_get(json, marks, "type") != RV_JSON_NONE && !graph->wanted_type)
        return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "extra_data.resvisor.type is no text of 1 to %u bytes",
                            RV_GRAPH_NAME_MAX);
    targets = graph->members[RV_GRAPH_MEMBER_TARGETS];
    graph->is_partial = rv_json_is(json, targets, RV_JSON_ARRAY) && json->values[targets].length > 0;
    return 0;
}

static int read_graph(struct rv_graph *graph, struct rv_error *err)
{
    const struct rv_json *json = &graph->json;
    uint32_t prompt = rv_json_get(json, 0, "prompt");
    int r;

    if (!rv_json_is(json, 0, RV_JSON_OBJECT))
        return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "this is no graph: a JSON object is expected");
    if (rv_json_is(json, rv_json_get(json, 0, "nodes"), RV_JSON_ARRAY)) {
        graph->format = RV_GRAPH_WORKFLOW;
        return read_workflow(graph, err);
    }
    /* a node may be called "prompt" */
    if (prompt == RV_JSON_NONE || rv_json_get(json, prompt, "class_type") != RV_JSON_NONE)
        return read_prompt(graph, 0, err);
    if (!rv_json_is(json, prompt, RV_JSON_OBJECT))
        return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "`prompt` is no graph: a JSON object is expected");
    r = read_request(graph, err);
    return r < 0 ? r : read_prompt(graph, prompt, err);
}

int rv_graph_parse(const char *text, size_t length, struct rv_graph **ret_graph, struct rv_error *err)
{
    static const struct rv_json_limits limits = {RV_GRAPH_DEPTH_MAX, RV_GRAPH_VALUES_MAX, "the graph"};
    struct rv_graph *graph;
    int r;

    if (length > RV_GRAPH_SIZE_MAX)
        return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "the graph is larger than %u MiB",
                            RV_GRAPH_SIZE_MAX / 1024 / 1024);
    graph = calloc(1, sizeof(*graph));
    if (!graph)
        return no_memory(err);
    for (unsigned i = 0; i < RV_GRAPH_MEMBERS; i++)
        graph->members[i] = RV_JSON_NONE;
    r = rv_json_parse(&graph->json, text, length, &limits, err);
    if (r == 0)
        r = read_graph(graph, err);
    if (r == 0 && graph->node_count == 0)
        r = rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "the graph has no node that would run");
    if (r < 0)
        rv_graph_destroy(graph);
    else
        *ret_graph = graph;
    return r;
}

void rv_graph_destroy(struct rv_graph *graph)
{
    if (!graph)
        return;
    for (uint32_t i = 0; i < graph->id_count; i++)
        free(graph->ids[i]);
    free(graph->ids);
    if (graph->links) {
        free(graph->links->from);
        free(graph->links->needs);
        free(graph->links->stack);
        free(graph->links);
    }
    free(graph->nodes);
    rv_json_fini(&graph->json);
    free(graph);
}

void rv_graph_reach(struct rv_graph *graph, uint32_t node)
{
    struct rv_graph_links *links = graph->links;
    uint32_t depth = 0;

    if (!links) {
        for (uint32_t i = 0; i < graph->node_count; i++)
            graph->nodes[i].reached = true;
        return;
    }
    if (graph->nodes[node].reached)
        return;
    graph->nodes[node].reached = true;
    links->stack[depth++] = node; /* each node is put there once: it never holds more than there are nodes */
    while (depth > 0) {
        uint32_t top = links->stack[--depth];

        for (uint32_t i = links->from[top]; i < links->from[top + 1]; i++) {
            struct rv_graph_node *needed = &graph->nodes[links->needs[i]];

            if (!needed->reached) {
                needed->reached = true;
                links->stack[depth++] = links->needs[i];
            }
        }
    }
}
