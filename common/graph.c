#include "graph.h"

#include <errno.h>
#include <jansson.h>
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

/* ---- before the parser ------------------------------------------------------------------------------------------- */

/*
 * The parser goes down one stack frame per level and takes a hundred bytes for an empty object, so depth and number of
 * values are counted before it sees the text. Malformed text may be miscounted; then the parser refuses it.
 */
static int check_limits(const char *text, size_t length, struct rv_error *err)
{
    uint32_t depth = 0, values = 1;
    bool quoted = false;

    if (length > RV_GRAPH_SIZE_MAX)
        return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "the graph is larger than %u MiB",
                            RV_GRAPH_SIZE_MAX / 1024 / 1024);
    for (size_t i = 0; i < length; i++) {
        char c = text[i];

        if (quoted) {
            if (c == '\\')
                i++;
            quoted = c != '"';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            values++;
            if (++depth > RV_GRAPH_DEPTH_MAX)
                return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "the graph is nested deeper than %u levels",
                                    RV_GRAPH_DEPTH_MAX);
        } else if (c == '}' || c == ']') {
            depth -= depth > 0;
        } else if (c == ',') {
            values++;
        }
        if (values > RV_GRAPH_VALUES_MAX)
            return rv_error_set(err, E2BIG, CODE(TOO_LARGE), "the graph has more than %u values", RV_GRAPH_VALUES_MAX);
    }
    return 0;
}

static int parse_json(const char *text, size_t length, json_t **ret_root, struct rv_error *err)
{
    /* Seeds go up to 2^64 - 1, which the parser's integers do not hold: all numbers become reals. */
    const size_t flags = JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL;
    json_error_t problem;
    char shown[RV_ERROR_TEXT_MAX / 2];
    int r = check_limits(text, length, err);

    if (r < 0)
        return r;
    *ret_root = json_loadb(text, length, flags, &problem);
    if (*ret_root)
        return 0;
    if (json_error_code(&problem) == json_error_out_of_memory)
        return rv_error_set(err, ENOMEM, CODE(NO_MEMORY), "no memory for the graph");
    return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "line %d, column %d: %s", problem.line, problem.column,
                        rv_escape(shown, sizeof(shown), problem.text, strlen(problem.text)));
}

/* ---- collecting nodes and files ---------------------------------------------------------------------------------- */

static const char *const model_suffixes[] = {".safetensors", ".sft", ".ckpt", ".gguf", ".pth", ".pt", ".bin", ".onnx"};

static bool is_model_file(const char *text)
{
    size_t n = strnlen(text, RV_GRAPH_NAME_MAX);

    for (size_t i = 0; n < RV_GRAPH_NAME_MAX && i < sizeof(model_suffixes) / sizeof(model_suffixes[0]); i++) {
        size_t k = strlen(model_suffixes[i]);

        if (n > k && strcasecmp(text + n - k, model_suffixes[i]) == 0)
            return true;
    }
    return false;
}

static void take_file(struct rv_graph *graph, json_t *value, uint32_t node)
{
    if (json_is_string(value) && is_model_file(json_string_value(value)) && graph->file_count < RV_GRAPH_FILES_MAX)
        graph->files[graph->file_count++] = (struct rv_graph_file){json_string_value(value), node};
}

/* Takes the file names among a node's inputs or widget values. */
static void collect_files(struct rv_graph *graph, json_t *values, uint32_t node)
{
    json_t *value;
    const char *key;
    size_t i;

    json_array_foreach (values, i, value)
        take_file(graph, value, node);
    json_object_foreach (values, key, value)
        take_file(graph, value, node);
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
static const char *class_of(json_t *node, const char *key)
{
    json_t *value = json_object_get(node, key);
    size_t n = json_string_length(value);

    return n > 0 && n <= RV_GRAPH_NAME_MAX ? json_string_value(value) : NULL;
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

/* Links are inputs of the form [id, slot]. numbers: id -> number of the node. */
static int link_node(struct rv_graph *graph, uint32_t node, json_t *inputs, json_t *numbers)
{
    const char *key;
    json_t *value;

    graph->links->from[node] = graph->links->count;
    json_object_foreach (inputs, key, value) {
        json_t *id = json_is_array(value) && json_array_size(value) == 2 ? json_array_get(value, 0) : NULL;
        json_t *number =
            json_is_string(id) ? json_object_getn(numbers, json_string_value(id), json_string_length(id)) : NULL;

        if (!number || !json_is_number(json_array_get(value, 1)))
            continue;
        graph->nodes[json_integer_value(number)].used = true;
        if (add_need(graph->links, (uint32_t)json_integer_value(number)) < 0)
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

/* targets: the ids of partial_execution_targets as keys, may be NULL. */
static int read_prompt(struct rv_graph *graph, json_t *prompt, json_t *targets, struct rv_error *err)
{
    size_t count = json_object_size(prompt);
    json_t *numbers = json_object(), *value;
    const char *id;
    uint32_t i = 0;
    int r = 0;

    if (count > RV_GRAPH_NODES_MAX)
        r = too_many_nodes(err);
    else if (!numbers || make_links(graph, count) < 0)
        r = no_memory(err);
    if (r < 0)
        goto out;
    json_object_foreach (prompt, id, value) {
        const char *class_type = class_of(value, "class_type");

        if (!class_type) {
            r = bad_class(id, err);
            goto out;
        }
        graph->nodes[graph->node_count] =
            (struct rv_graph_node){.id = id, .class_type = class_type, .wanted = json_object_get(targets, id) != NULL};
        collect_files(graph, json_object_get(value, "inputs"), graph->node_count);
        if (json_object_set_new(numbers, id, json_integer(graph->node_count++)) < 0) {
            r = no_memory(err);
            goto out;
        }
    }
    json_object_foreach (prompt, id, value) {
        if (link_node(graph, i++, json_object_get(value, "inputs"), numbers) < 0) {
            r = no_memory(err);
            goto out;
        }
    }
out:
    json_decref(numbers);
    return r;
}

/* ---- saved workflows --------------------------------------------------------------------------------------------- */

/* One list of nodes that runs: the workflow's own, a subgraph's, or a group node's (how subgraphs were stored before).
 */
struct level {
    json_t *graph;
    const char *name; /* the class of the node that stands for it; "" for the workflow's own */
};

/* The levels that run: each subgraph once, however often it is used, so that nesting cannot multiply. */
struct levels {
    struct level *list;
    uint32_t count;
    json_t *subgraphs; /* class of the node that stands for it -> its definition */
    json_t *waiting;   /* the same, of those that are not in the list yet */
};

static bool is_running(json_t *node)
{
    double mode = json_number_value(json_object_get(node, "mode"));

    return mode != MODE_NEVER && mode != MODE_BYPASS;
}

/* The text of a node's id, which is a number or a text. Kept in graph->ids. NULL = no memory. */
static const char *make_id(struct rv_graph *graph, const char *level, json_t *id)
{
    char *text;
    int n = json_is_string(id) ? asprintf(&text, "%s%s%s", level, *level ? ":" : "", json_string_value(id))
                               : asprintf(&text, "%s%s%.0f", level, *level ? ":" : "", json_number_value(id));

    if (n < 0)
        return NULL;
    graph->ids[graph->id_count++] = text;
    return text;
}

static bool is_used(json_t *node)
{
    json_t *outputs = json_object_get(node, "outputs"), *output;
    size_t i;

    json_array_foreach (outputs, i, output)
        if (json_array_size(json_object_get(output, "links")) > 0)
            return true;
    return false;
}

static int add_workflow_node(struct rv_graph *graph, const struct level *level, json_t *node, struct rv_error *err)
{
    const char *class_type = class_of(node, "type");
    const char *id;

    if (graph->node_count == RV_GRAPH_NODES_MAX)
        return too_many_nodes(err);
    id = make_id(graph, level->name, json_object_get(node, json_object_get(node, "id") ? "id" : "index"));
    if (!id)
        return no_memory(err);
    if (!class_type)
        return bad_class(id, err);
    graph->nodes[graph->node_count] = (struct rv_graph_node){.id = id, .class_type = class_type, .used = is_used(node)};
    collect_files(graph, json_object_get(node, "widgets_values"), graph->node_count++);
    return 0;
}

/* Reads one level; subgraphs that it uses are added to the end of the list. */
static int read_level(struct rv_graph *graph, struct levels *levels, uint32_t number, struct rv_error *err)
{
    const struct level *level = &levels->list[number];
    json_t *nodes = json_object_get(level->graph, "nodes"), *node;
    size_t i;
    int r;

    json_array_foreach (nodes, i, node) {
        const char *class_type = class_of(node, "type");
        json_t *subgraph = class_type ? json_object_get(levels->subgraphs, class_type) : NULL;

        if (!json_is_object(node))
            return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "a node of the workflow is no object");
        if (!is_running(node))
            continue;
        if (!subgraph) {
            r = add_workflow_node(graph, level, node, err);
            if (r < 0)
                return r;
            continue;
        }
        if (json_object_del(levels->waiting, class_type) == 0) /* the root still holds the definition */
            levels->list[levels->count++] = (struct level){subgraph, class_type};
    }
    return 0;
}

/* A subgraph is stood for by a node with its id as class, a group by "workflow>NAME", or "workflow/NAME". */
static int find_subgraphs(json_t *subgraphs, json_t *definitions, json_t *groups)
{
    json_t *subgraph;
    const char *name;
    size_t i;

    json_array_foreach (definitions, i, subgraph) {
        const char *id = class_of(subgraph, "id");

        if (id && json_object_set(subgraphs, id, subgraph) < 0)
            return -ENOMEM;
    }
    json_object_foreach (groups, name, subgraph) {
        char class_type[RV_GRAPH_NAME_MAX + 1];

        for (const char *mark = ">/"; *mark; mark++) {
            int n = snprintf(class_type, sizeof(class_type), "workflow%c%s", *mark, name);

            if (n > 0 && (size_t)n < sizeof(class_type) && json_object_set(subgraphs, class_type, subgraph) < 0)
                return -ENOMEM;
        }
    }
    return 0;
}

static int read_workflow(struct rv_graph *graph, json_t *root, struct rv_error *err)
{
    json_t *definitions = json_object_get(json_object_get(root, "definitions"), "subgraphs");
    json_t *groups = json_object_get(json_object_get(root, "extra"), "groupNodes");
    size_t count = json_array_size(definitions) + 2 * json_object_size(groups);
    struct levels levels = {calloc(count + 1, sizeof(*levels.list)), 1, json_object(), NULL};
    int r = 0;

    graph->nodes = calloc(RV_GRAPH_NODES_MAX, sizeof(*graph->nodes));
    graph->ids = calloc(RV_GRAPH_NODES_MAX, sizeof(*graph->ids));
    if (!levels.list || !levels.subgraphs || !graph->nodes || !graph->ids) {
        r = no_memory(err);
        goto out;
    }
    if (find_subgraphs(levels.subgraphs, definitions, groups) < 0) {
        r = no_memory(err);
        goto out;
    }
    levels.waiting = json_copy(levels.subgraphs);
    if (!levels.waiting) {
        r = no_memory(err);
        goto out;
    }
    levels.list[0] = (struct level){root, ""};
    for (uint32_t k = 0; r == 0 && k < levels.count; k++)
        r = read_level(graph, &levels, k, err);
out:
    json_decref(levels.subgraphs);
    json_decref(levels.waiting);
    free(levels.list);
    return r;
}

/* ---- both -------------------------------------------------------------------------------------------------------- */

/* What stands beside the graph in the body of POST /prompt. *ret_targets: an object with the wanted ids, or NULL. */
static int read_request(struct rv_graph *graph, json_t *root, json_t **ret_targets, struct rv_error *err)
{
    json_t *marks = json_object_get(json_object_get(root, "extra_data"), "resvisor");
    json_t *list = json_object_get(root, "partial_execution_targets"), *id;
    size_t i;

    graph->wanted_type = class_of(marks, "type");
    if (json_object_get(marks, "type") && !graph->wanted_type)
        return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "extra_data.resvisor.type is no text of 1 to %u bytes",
                            RV_GRAPH_NAME_MAX);
    if (json_array_size(list) == 0)
        return 0;
    graph->is_partial = true;
    *ret_targets = json_object();
    json_array_foreach (list, i, id)
        if (json_is_string(id) && json_object_set(*ret_targets, json_string_value(id), id) < 0)
            return no_memory(err);
    return 0;
}

static int read_graph(struct rv_graph *graph, json_t *root, struct rv_error *err)
{
    json_t *prompt = json_object_get(root, "prompt"), *targets = NULL;
    int r = 0;

    if (!json_is_object(root))
        return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "this is no graph: a JSON object is expected");
    if (json_is_array(json_object_get(root, "nodes"))) {
        graph->format = RV_GRAPH_WORKFLOW;
        return read_workflow(graph, root, err);
    }
    if (prompt && !json_object_get(prompt, "class_type")) { /* a node may be called "prompt" */
        if (!json_is_object(prompt))
            return rv_error_set(err, EINVAL, CODE(BAD_REQUEST), "`prompt` is no graph: a JSON object is expected");
        r = read_request(graph, root, &targets, err);
        root = prompt;
    }
    if (r == 0)
        r = read_prompt(graph, root, targets, err);
    json_decref(targets);
    return r;
}

int rv_graph_parse(const char *text, size_t length, struct rv_graph **ret_graph, struct rv_error *err)
{
    struct rv_graph *graph = calloc(1, sizeof(*graph));
    json_t *root = NULL;
    int r;

    if (!graph)
        return no_memory(err);
    r = parse_json(text, length, &root, err);
    graph->root = root;
    if (r == 0)
        r = read_graph(graph, root, err);
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
    json_decref(graph->root);
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
