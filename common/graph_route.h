/*
 * What a graph makes (image, video, audio, 3d, text), and which configured workflow type runs it. docs/routing.md
 * explains the rules for users. The words are in one table, graph_table.c; the order of the rules is here:
 *
 *   explicit  the request names a type: the header, else extra_data.resvisor.type
 *   output    the strongest medium among the nodes that save; else among those that show; else among those that make
 *   model     the outputs say image or text, or nothing: but a video, audio or 3d model must be resident
 *   affinity  nothing is known about the nodes: the type that already holds the graph's model files
 *   default   image
 *
 * Pure functions, any thread. They allocate nothing.
 */
#ifndef RV_GRAPH_ROUTE_H
#define RV_GRAPH_ROUTE_H

#include "graph.h"

/* In the order of strength, weakest first. */
enum rv_medium {
    RV_MEDIUM_TEXT,
    RV_MEDIUM_IMAGE,
    RV_MEDIUM_3D,
    RV_MEDIUM_AUDIO,
    RV_MEDIUM_VIDEO,
    RV_MEDIA,
};

/* What a node does with its medium, weakest first. */
enum rv_role {
    RV_ROLE_NONE,
    RV_ROLE_MAKE,  /* makes it: counts where no output node is known */
    RV_ROLE_SHOW,  /* a preview */
    RV_ROLE_SAVE,  /* stores it */
    RV_ROLE_MODEL, /* its weights must be resident for this medium */
    RV_ROLES,
};

enum rv_route_rule {
    RV_RULE_EXPLICIT,
    RV_RULE_OUTPUT,
    RV_RULE_MODEL,
    RV_RULE_AFFINITY,
    RV_RULE_DEFAULT,
    RV_RULES,
};

#define RV_ROUTE_EVIDENCE_MAX 64u /* the strongest of each kind come first; what is over it is not shown */
#define RV_ROUTE_NO_TYPE UINT32_MAX
#define RV_ROUTE_ANY (1u << RV_MEDIA) /* in `accepts`: what no other type accepts */

/* A configured type, as far as it matters here. */
struct rv_route_type {
    const char *name;
    unsigned accepts; /* bits 1 << enum rv_medium, RV_ROUTE_ANY; 0 = the medium that is called like the type */
    const char *const *files;
    uint32_t file_count; /* names or paths of its models; only their last parts are compared */
};

struct rv_evidence {
    uint32_t node;
    enum rv_role role;
    enum rv_medium medium;
    const char *file; /* the model file that says so; NULL = the node's class does */
};

struct rv_route {
    enum rv_route_rule rule;
    enum rv_medium medium; /* RV_RULE_EXPLICIT and RV_RULE_AFFINITY: RV_MEDIA if the type is not of one medium */
    uint32_t type;         /* number in `types`, RV_ROUTE_NO_TYPE = none fits */
    uint32_t votes[RV_MEDIA][RV_ROLES];
    struct rv_evidence evidence[RV_ROUTE_EVIDENCE_MAX];
    uint32_t evidence_count;
};

const char *rv_medium_name(enum rv_medium medium); /* RV_MEDIA: "any" */
const char *rv_role_name(enum rv_role role);
const char *rv_route_rule_name(enum rv_route_rule rule);

/* The bit of "image" and so on, RV_ROUTE_ANY for "any"; 0 = no such word. */
unsigned rv_route_accepts(const char *word);

/*
 * Decides. header (NULL = none) is what the request's own X-Resvisor-Type says. types may be empty: then only the
 * medium is decided, and an explicit type must be the name of a medium. -ENOENT and ERROR_NO_SUCH_TYPE if an explicit
 * type does not exist (*ret_route is not written), or if no type accepts the medium (it is written, with
 * RV_ROUTE_NO_TYPE).
 */
int rv_graph_route(struct rv_graph *graph, const char *header, const struct rv_route_type *types, uint32_t type_count,
                   struct rv_route *ret_route, struct rv_error *err);

/* ---- the table (graph_table.c) ----------------------------------------------------------------------------------- */

/* The first row of the table that matches a class; RV_ROLE_NONE = none. */
enum rv_role rv_table_class(const char *class_type, enum rv_medium *ret_medium);

/* True if a class with this name loads what the model rule looks at: not a VAE, a text encoder, a LoRA. */
bool rv_table_loads_main_model(const char *class_type);

/* The medium of a main model's file by its name; false = the name says nothing. */
bool rv_table_file(const char *name, enum rv_medium *ret_medium);

#endif
