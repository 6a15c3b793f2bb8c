#include "graph_route.h"

#include <errno.h>
#include <string.h>

#include "rpc.pb-c.h"

#define CODE(name) RESVISOR__V1__ERROR_CODE__ERROR_##name

static const char *const medium_names[] = {
    [RV_MEDIUM_TEXT] = "text",   [RV_MEDIUM_IMAGE] = "image", [RV_MEDIUM_3D] = "3d",
    [RV_MEDIUM_AUDIO] = "audio", [RV_MEDIUM_VIDEO] = "video", [RV_MEDIA] = "any",
};
static const char *const role_names[] = {
    [RV_ROLE_NONE] = "none",  [RV_ROLE_MAKE] = "makes",  [RV_ROLE_SHOW] = "shows",
    [RV_ROLE_SAVE] = "saves", [RV_ROLE_MODEL] = "model",
};
static const char *const rule_names[] = {
    [RV_RULE_EXPLICIT] = "explicit", [RV_RULE_OUTPUT] = "output",   [RV_RULE_MODEL] = "model",
    [RV_RULE_AFFINITY] = "affinity", [RV_RULE_DEFAULT] = "default",
};
_Static_assert(sizeof(medium_names) / sizeof(medium_names[0]) == RV_MEDIA + 1, "a name per medium");
_Static_assert(sizeof(role_names) / sizeof(role_names[0]) == RV_ROLES, "a name per role");
_Static_assert(sizeof(rule_names) / sizeof(rule_names[0]) == RV_RULES, "a name per rule");

const char *rv_medium_name(enum rv_medium medium)
{
    return medium_names[medium];
}

const char *rv_role_name(enum rv_role role)
{
    return role_names[role];
}

const char *rv_route_rule_name(enum rv_route_rule rule)
{
    return rule_names[rule];
}

unsigned rv_route_accepts(const char *word)
{
    for (unsigned i = 0; i <= RV_MEDIA; i++)
        if (strcmp(word, medium_names[i]) == 0)
            return 1u << i; /* the last one is RV_ROUTE_ANY */
    return 0;
}

/* ---- types ------------------------------------------------------------------------------------------------------- */

static unsigned accepted_by(const struct rv_route_type *type)
{
    return type->accepts ? type->accepts : rv_route_accepts(type->name);
}

/* The one medium that a type accepts; RV_MEDIA = none, or several. */
static enum rv_medium only_medium(const struct rv_route_type *type)
{
    unsigned accepts = accepted_by(type);

    for (unsigned i = 0; i < RV_MEDIA; i++)
        if (accepts == 1u << i)
            return (enum rv_medium)i;
    return RV_MEDIA;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/'), *backslash = strrchr(slash ? slash : path, '\\');

    return backslash ? backslash + 1 : slash ? slash + 1 : path;
}

/* How many of the graph's model files the type holds. */
static uint32_t affinity(const struct rv_graph *graph, const struct rv_route_type *type)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < graph->file_count; i++) {
        const char *name = last_part(graph->files[i].name);

        for (uint32_t k = 0; k < type->file_count; k++) {
            if (strcmp(name, last_part(type->files[k])) == 0) {
                count++;
                break;
            }
        }
    }
    return count;
}

/* The type that accepts any of the bits (~0: every type) and holds most of the files, the first one if several do. */
static uint32_t best_type(const struct rv_graph *graph, const struct rv_route_type *types, uint32_t type_count,
                          unsigned bits, uint32_t min_affinity)
{
    uint32_t best = RV_ROUTE_NO_TYPE, best_count = 0;

    for (uint32_t i = 0; i < type_count; i++) {
        uint32_t count;

        if (bits != ~0u && (accepted_by(&types[i]) & bits) == 0)
            continue;
        count = affinity(graph, &types[i]);
        if (count >= min_affinity && (best == RV_ROUTE_NO_TYPE || count > best_count)) {
            best = i;
            best_count = count;
        }
    }
    return best;
}

static int route_explicit(const char *wanted, const struct rv_route_type *types, uint32_t type_count,
                          struct rv_route *route, struct rv_error *err)
{
    char shown[128];

    route->rule = RV_RULE_EXPLICIT;
    for (uint32_t i = 0; i < type_count; i++) {
        if (strcmp(types[i].name, wanted) == 0) {
            route->type = i;
            route->medium = only_medium(&types[i]);
            return 0;
        }
    }
    for (unsigned i = 0; type_count == 0 && i < RV_MEDIA; i++) {
        if (strcmp(medium_names[i], wanted) == 0) {
            route->medium = (enum rv_medium)i;
            return 0;
        }
    }
    rv_escape(shown, sizeof(shown), wanted, strlen(wanted));
    (void)rv_error_set(err, ENOENT, CODE(NO_SUCH_TYPE), "the request names the type \"%s\", and there is none", shown);
    rv_error_remedy(err, "name a configured type, or none and let the graph decide");
    return -ENOENT;
}

/* ---- the nodes --------------------------------------------------------------------------------------------------- */

static bool is_output(const struct rv_graph *graph, const struct rv_graph_node *node)
{
    return (node->role == RV_ROLE_SAVE || node->role == RV_ROLE_SHOW) && (!graph->is_partial || node->wanted);
}

/* Marks what would run: what the outputs need. Without any, what the nodes need that nobody uses; else everything. */
static void reach(struct rv_graph *graph)
{
    bool found = false;

    for (uint32_t i = 0; i < graph->node_count; i++) {
        struct rv_graph_node *node = &graph->nodes[i];
        enum rv_medium medium = RV_MEDIUM_TEXT;

        node->role = (uint8_t)rv_table_class(node->class_type, &medium);
        node->medium = (uint8_t)medium;
        node->reached = false;
    }
    for (uint32_t i = 0; i < graph->node_count; i++) {
        if (is_output(graph, &graph->nodes[i]) || graph->nodes[i].wanted) {
            rv_graph_reach(graph, i);
            found = true;
        }
    }
    for (uint32_t i = 0; !found && i < graph->node_count; i++)
        if (!graph->nodes[i].used)
            rv_graph_reach(graph, i);
    for (uint32_t i = 0; i < graph->node_count; i++)
        if (graph->nodes[i].reached)
            return;
    for (uint32_t i = 0; i < graph->node_count; i++)
        rv_graph_reach(graph, i);
}

static void add_evidence(struct rv_route *route, struct rv_evidence evidence)
{
    route->votes[evidence.medium][evidence.role]++;
    if (route->evidence_count < RV_ROUTE_EVIDENCE_MAX)
        route->evidence[route->evidence_count++] = evidence;
}

static void collect_evidence(const struct rv_graph *graph, struct rv_route *route)
{
    static const enum rv_role order[] = {RV_ROLE_SAVE, RV_ROLE_SHOW, RV_ROLE_MODEL, RV_ROLE_MAKE};

    for (unsigned k = 0; k < sizeof(order) / sizeof(order[0]); k++) {
        for (uint32_t i = 0; i < graph->node_count; i++) {
            const struct rv_graph_node *node = &graph->nodes[i];
            bool is_sink = node->role == RV_ROLE_SAVE || node->role == RV_ROLE_SHOW;

            if (node->role == order[k] && node->reached && (!is_sink || is_output(graph, node)))
                add_evidence(route, (struct rv_evidence){i, order[k], (enum rv_medium)node->medium, NULL});
        }
        for (uint32_t i = 0; order[k] == RV_ROLE_MODEL && i < graph->file_count; i++) {
            const struct rv_graph_file *file = &graph->files[i];
            const struct rv_graph_node *node = &graph->nodes[file->node];
            enum rv_medium medium;

            if (node->reached && rv_table_loads_main_model(node->class_type) && rv_table_file(file->name, &medium))
                add_evidence(route, (struct rv_evidence){file->node, RV_ROLE_MODEL, medium, file->name});
        }
    }
}

/* The strongest medium that has votes in a role; RV_MEDIA = none has. */
static enum rv_medium strongest(const struct rv_route *route, enum rv_role role)
{
    for (unsigned i = RV_MEDIA; i-- > 0;)
        if (route->votes[i][role] > 0)
            return (enum rv_medium)i;
    return RV_MEDIA;
}

/* The rules from `output` to `default`, without types. */
static void decide_medium(const struct rv_graph *graph, struct rv_route *route)
{
    static const enum rv_role order[] = {RV_ROLE_SAVE, RV_ROLE_SHOW, RV_ROLE_MAKE};
    enum rv_medium model;

    collect_evidence(graph, route);
    route->rule = RV_RULE_DEFAULT;
    route->medium = RV_MEDIUM_IMAGE;
    for (unsigned k = 0; k < sizeof(order) / sizeof(order[0]); k++) {
        enum rv_medium medium = strongest(route, order[k]);

        if (medium != RV_MEDIA) {
            route->rule = RV_RULE_OUTPUT;
            route->medium = medium;
            break;
        }
    }
    model = strongest(route, RV_ROLE_MODEL);
    if (route->medium <= RV_MEDIUM_IMAGE && model != RV_MEDIA && model > RV_MEDIUM_IMAGE) {
        route->rule = RV_RULE_MODEL;
        route->medium = model;
    }
}

static int choose_type(const struct rv_graph *graph, const struct rv_route_type *types, uint32_t type_count,
                       struct rv_route *route, struct rv_error *err)
{
    if (type_count == 0)
        return 0;
    if (route->rule == RV_RULE_DEFAULT) {
        route->type = best_type(graph, types, type_count, ~0u, 1);
        if (route->type != RV_ROUTE_NO_TYPE) {
            route->rule = RV_RULE_AFFINITY;
            route->medium = only_medium(&types[route->type]);
            return 0;
        }
    }
    route->type = best_type(graph, types, type_count, 1u << route->medium, 0);
    if (route->type == RV_ROUTE_NO_TYPE)
        route->type = best_type(graph, types, type_count, RV_ROUTE_ANY, 0);
    if (route->type != RV_ROUTE_NO_TYPE)
        return 0;
    (void)rv_error_set(err, ENOENT, CODE(NO_SUCH_TYPE), "the graph is of kind %s, and no type accepts that",
                       medium_names[route->medium]);
    rv_error_remedy(err, "add %s, or any, to a type's accepts", medium_names[route->medium]);
    return -ENOENT;
}

int rv_graph_route(struct rv_graph *graph, const char *header, const struct rv_route_type *types, uint32_t type_count,
                   struct rv_route *ret_route, struct rv_error *err)
{
    const char *wanted = header ? header : graph->wanted_type;
    struct rv_route route = {.type = RV_ROUTE_NO_TYPE, .medium = RV_MEDIA};
    int r;

    reach(graph);
    if (wanted) {
        r = route_explicit(wanted, types, type_count, &route, err);
        if (r < 0)
            return r;
    } else {
        decide_medium(graph, &route);
        r = choose_type(graph, types, type_count, &route, err);
    }
    *ret_route = route;
    return r;
}
