/* What the parts of the configuration reader share. Private to common/config*.c. */
#ifndef RV_CONFIG_PRIVATE_H
#define RV_CONFIG_PRIVATE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "config.h"
#include "config_keys.h"

#define RV_CONFIG_FILE_MAX (1024u * 1024) /* bytes of a configuration file */
#define RV_CONFIG_DEPTH_MAX 8u            /* maps inside maps */
#define RV_CONFIG_NODES_MAX 65536u        /* values in one file */
#define RV_CONFIG_CHILDREN_MAX 4096u      /* elements of one map or list */
#define RV_CONFIG_PROBLEMS_MAX 50u

/* ---- the file as a tree ------------------------------------------------------------------------------------------ */

enum rv_node_kind { RV_NODE_SCALAR, RV_NODE_LIST, RV_NODE_MAP };

struct rv_node {
    enum rv_node_kind kind;
    unsigned line;
    bool plain;            /* a scalar without quotes */
    char *text;            /* scalar; no NUL inside */
    struct rv_node *key;   /* of a child of a map: its key, a scalar */
    struct rv_node *child; /* first */
    struct rv_node *last;
    struct rv_node *next;
    unsigned children;
};

/*
 * Parses YAML text. *ret_root is NULL for a file without content. -EINVAL: *ret_line and reason say what is wrong;
 * -ENOMEM. Aliases, several documents and tags that change the type are refused: the file says what it means in place.
 */
int rv_tree_parse(const char *text, size_t length, struct rv_node **ret_root, unsigned *ret_line, char *reason,
                  size_t size);
void rv_tree_destroy(struct rv_node *root);

/* ---- where values come from -------------------------------------------------------------------------------------- */

enum rv_source { RV_SOURCE_DEFAULT, RV_SOURCE_FILE, RV_SOURCE_ENVIRONMENT, RV_SOURCE_FLAG };

struct rv_origin {
    enum rv_source source;
    unsigned line; /* RV_SOURCE_FILE */
};

/* A model, type or device beside its struct in rv_config. */
struct rv_entity {
    struct rv_origin origin; /* of its first mention */
    struct rv_origin keys[RV_KEYS_PER_SCOPE];
};

/* rv_config is its first member: what rv_config_load returns can be cast back. */
struct rv_config_private {
    struct rv_config config;
    struct rv_origin keys[RV_KEYS_PER_SCOPE];
    struct rv_entity *entities[RV_SCOPE_COUNT]; /* none of RV_SCOPE_TOP */
    uint32_t room[RV_SCOPE_COUNT];
};

/* ---- one run of the loader --------------------------------------------------------------------------------------- */

struct rv_loader {
    struct rv_config_private *config;
    FILE *problems;
    unsigned problem_count;
    bool no_memory;
    const char *file;  /* as given; for messages */
    char *file_folder; /* absolute: relative paths of the file */
    char *work_folder; /* absolute: relative paths of flags and environment */
};

/* One problem: "FILE:LINE: KEY: …". key may be empty. */
void rv_loader_problem(struct rv_loader *loader, struct rv_origin origin, const char *key, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The base address that a key's offset counts from; `number` is the model's, type's or device's. */
void *rv_config_base(struct rv_config_private *config, enum rv_key_scope scope, uint32_t number);
struct rv_origin *rv_config_origin(struct rv_config_private *config, const struct rv_key *key, uint32_t number);

/* "types.*.queue" and "image" give "types.image.queue". */
void rv_key_shown(const struct rv_key *key, const char *name, char *buffer, size_t size);

/* Of one type of kind comfyui: its arguments, its warm-up, its prefix. */
void rv_config_check_comfyui(struct rv_loader *loader, uint32_t number);

/* What types of kind comfyui must not have in common, and which of them is the primary one. */
void rv_config_check_all_comfyui(struct rv_loader *loader);

/* Everything that is not about one value alone: groups, folders, executors, what refers to what. */
void rv_config_check(struct rv_loader *loader);

#endif
