/* YAML to a small tree with line numbers, bounded in depth and size. The only file that knows libyaml. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "config_private.h"

struct builder {
    yaml_parser_t parser;
    struct rv_node *stack[RV_CONFIG_DEPTH_MAX];
    struct rv_node *pending_key[RV_CONFIG_DEPTH_MAX]; /* of the map at that depth, waiting for its value */
    unsigned depth, nodes, documents;
    struct rv_node *root;
    unsigned line;
    char *reason;
    size_t size;
};

void rv_tree_destroy(struct rv_node *root)
{
    struct rv_node *stack = root;

    /* Flattens instead of recursing: children are put in front of what is left. */
    while (stack) {
        struct rv_node *node = stack;

        stack = node->next;
        if (node->child) {
            node->last->next = stack;
            stack = node->child;
        }
        if (node->key) {
            free(node->key->text);
            free(node->key);
        }
        free(node->text);
        free(node);
    }
}

static int refuse(struct builder *b, unsigned line, const char *what)
{
    b->line = line;
    (void)snprintf(b->reason, b->size, "%s", what);
    return -EINVAL;
}

/* Where the value that comes next belongs; a map's scalar without a pending key is a key. */
static int attach(struct builder *b, struct rv_node *node)
{
    struct rv_node *parent = b->depth ? b->stack[b->depth - 1] : NULL;

    if (!parent) {
        b->root = node;
        return 0;
    }
    if (parent->kind == RV_NODE_MAP) {
        struct rv_node **key = &b->pending_key[b->depth - 1];

        if (!*key) {
            if (node->kind != RV_NODE_SCALAR) {
                unsigned line = node->line;

                rv_tree_destroy(node);
                return refuse(b, line, "a key must be a word");
            }
            *key = node;
            return 0;
        }
        node->key = *key;
        *key = NULL;
    }
    if (parent->last)
        parent->last->next = node;
    else
        parent->child = node;
    parent->last = node;
    if (++parent->children > RV_CONFIG_CHILDREN_MAX)
        return refuse(b, node->line, "too many elements in one place; at most 4096");
    return 0;
}

static int add(struct builder *b, const yaml_event_t *event, enum rv_node_kind kind)
{
    unsigned line = (unsigned)event->start_mark.line + 1;
    struct rv_node *node;
    int r;

    if (++b->nodes > RV_CONFIG_NODES_MAX)
        return refuse(b, line, "too many values; at most 65536");
    if (kind != RV_NODE_SCALAR && b->depth == RV_CONFIG_DEPTH_MAX)
        return refuse(b, line, "nested too deep; at most 8 levels");
    node = calloc(1, sizeof(*node));
    if (!node)
        return -ENOMEM;
    node->kind = kind;
    node->line = line;
    if (kind == RV_NODE_SCALAR) {
        const char *value = (const char *)event->data.scalar.value;
        size_t length = event->data.scalar.length;

        if (memchr(value, '\0', length)) {
            free(node);
            return refuse(b, line, "a text with a NUL byte");
        }
        node->plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
        node->text = strndup(value, length);
        if (!node->text) {
            free(node);
            return -ENOMEM;
        }
    }
    r = attach(b, node);
    if (r == 0 && kind != RV_NODE_SCALAR) {
        b->pending_key[b->depth] = NULL;
        b->stack[b->depth++] = node;
    }
    return r;
}

static int take_event(struct builder *b, const yaml_event_t *event)
{
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (b->documents++ > 0)
            return refuse(b, (unsigned)event->start_mark.line + 1,
                          "a second document; one file holds one configuration");
        return 0;
    case YAML_ALIAS_EVENT:
        return refuse(b, (unsigned)event->start_mark.line + 1,
                      "aliases (*name) are not supported; write the value here");
    case YAML_SCALAR_EVENT:
        return add(b, event, RV_NODE_SCALAR);
    case YAML_SEQUENCE_START_EVENT:
        return add(b, event, RV_NODE_LIST);
    case YAML_MAPPING_START_EVENT:
        return add(b, event, RV_NODE_MAP);
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        b->depth--;
        return 0;
    default:
        return 0;
    }
}

static int syntax_error(struct builder *b)
{
    const yaml_parser_t *p = &b->parser;

    if (p->error == YAML_MEMORY_ERROR)
        return -ENOMEM;
    b->line = (unsigned)p->problem_mark.line + 1;
    if (p->error == YAML_READER_ERROR) {
        (void)snprintf(b->reason, b->size, "not readable as text at byte %zu: %s; UTF-8 is allowed", p->problem_offset,
                       p->problem ? p->problem : "unknown");
        b->line = 1;
        return -EINVAL;
    }
    (void)snprintf(b->reason, b->size, "YAML syntax, column %zu: %s%s%s", p->problem_mark.column + 1,
                   p->context ? p->context : "", p->context ? ", " : "", p->problem ? p->problem : "unknown");
    return -EINVAL;
}

static int build(struct builder *b)
{
    for (;;) {
        yaml_event_t event;
        bool end;
        int r;

        if (!yaml_parser_parse(&b->parser, &event))
            return syntax_error(b);
        end = event.type == YAML_STREAM_END_EVENT;
        r = take_event(b, &event);
        yaml_event_delete(&event);
        if (r < 0 || end)
            return r;
    }
}

int rv_tree_parse(const char *text, size_t length, struct rv_node **ret_root, unsigned *ret_line, char *reason,
                  size_t size)
{
    struct builder b = {.reason = reason, .size = size};
    int r;

    if (!yaml_parser_initialize(&b.parser))
        return -ENOMEM;
    yaml_parser_set_input_string(&b.parser, (const unsigned char *)text, length);
    r = build(&b);
    yaml_parser_delete(&b.parser);
    for (unsigned i = 0; i < RV_CONFIG_DEPTH_MAX; i++)
        rv_tree_destroy(i < b.depth ? b.pending_key[i] : NULL);
    if (r < 0) {
        *ret_line = b.line;
        rv_tree_destroy(b.root);
        return r;
    }
    *ret_root = b.root;
    return 0;
}
