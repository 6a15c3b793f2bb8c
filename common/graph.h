/*
 * A ComfyUI graph, read from JSON that nobody vouches for: the API format (`id -> {class_type, inputs}`, alone or in
 * the body of POST /prompt) and the format of saved workflows (`nodes`, `links`, `definitions.subgraphs`). It becomes a
 * flat list of the nodes that would run, each with its class and the model files that it names. graph_route.h decides
 * what it is.
 *
 * No process state, any thread. Every limit is named here. What is over a limit is refused, never cut.
 */
#ifndef RV_GRAPH_H
#define RV_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"
#include "json.h"

#define RV_GRAPH_SIZE_MAX (16u * 1024 * 1024) /* bytes of JSON */
#define RV_GRAPH_DEPTH_MAX 64u                /* objects and arrays inside each other; real workflows have 10 */
#define RV_GRAPH_VALUES_MAX 262144u           /* values in all: bounds the memory of the parsed tree */
#define RV_GRAPH_NODES_MAX 16384u
#define RV_GRAPH_FILES_MAX 256u /* model files named by all nodes together; further ones do not count */
#define RV_GRAPH_NAME_MAX                                                                      \
    512u /* bytes of a class or file name; a longer class is refused, a longer text is no file \
          */

enum rv_graph_format {
    RV_GRAPH_PROMPT,   /* the API format */
    RV_GRAPH_WORKFLOW, /* a saved workflow */
};

/* All texts point into the graph. */
struct rv_graph_node {
    const char *id; /* as in the file; nodes of a subgraph are "SUBGRAPH:ID" */
    const char *class_type;
    bool used;    /* another node takes its output */
    bool wanted;  /* in partial_execution_targets */
    bool reached; /* an output node needs it: rv_graph_reach */
    uint8_t role; /* enum rv_role, enum rv_medium: for rv_graph_route */
    uint8_t medium;
};

/* What may stand beside the graph in the body of POST /prompt. */
enum rv_graph_member {
    RV_GRAPH_MEMBER_PROMPT,
    RV_GRAPH_MEMBER_CLIENT_ID,
    RV_GRAPH_MEMBER_PROMPT_ID,
    RV_GRAPH_MEMBER_NUMBER,
    RV_GRAPH_MEMBER_FRONT,
    RV_GRAPH_MEMBER_EXTRA_DATA,
    RV_GRAPH_MEMBER_TARGETS, /* partial_execution_targets */
    RV_GRAPH_MEMBERS,
};

struct rv_graph_file {
    const char *name; /* "wan/wan2.2_t2v.safetensors" */
    uint32_t node;    /* that names it */
};

struct rv_graph {
    enum rv_graph_format format;
    struct rv_graph_node *nodes;
    uint32_t node_count;
    struct rv_graph_file files[RV_GRAPH_FILES_MAX];
    uint32_t file_count;
    bool is_partial;         /* only the wanted nodes are outputs */
    const char *wanted_type; /* extra_data.resvisor.type; NULL = none */

    /*
     * All that was read, for whoever needs more of the body than the graph: `members` are values of it (json.h), of
     * which RV_JSON_NONE is not there, and json.values[i].begin and .end say where they stand in the text.
     */
    struct rv_json json;
    bool is_body; /* the text is a body of POST /prompt, not the graph alone */
    uint32_t members[RV_GRAPH_MEMBERS];

    struct rv_graph_links *links; /* private */
    char **ids;                   /* texts made for ids, private */
    uint32_t id_count;
};

/*
 * Reads `length` bytes of JSON. Fails with -EINVAL and ERROR_BAD_REQUEST (no graph, or malformed), -E2BIG and
 * ERROR_TOO_LARGE (over a limit), -ENOMEM. Links to nodes that do not exist, and cycles, are no faults here: ComfyUI
 * has its own words for them.
 */
int rv_graph_parse(const char *text, size_t length, struct rv_graph **ret_graph, struct rv_error *err);
void rv_graph_destroy(struct rv_graph *graph);

/* Marks as reached `node` and every node that it needs. In a saved workflow that is every node that would run. */
void rv_graph_reach(struct rv_graph *graph, uint32_t node);

#endif
