/*
 * One JSON document out of several workers': pure functions on texts, for merge.c and unit tests. Nothing is parsed
 * into trees: what object_info says of a node is copied as it is.
 */
#ifndef RV_FRONT_JOIN_H
#define RV_FRONT_JOIN_H

#include <stddef.h>

struct rv_front_text {
    const char *text;
    size_t length;
};

/*
 * The members of all objects; of a name that several have, the first text's. A text that is no object counts as {}; if
 * none of them is one: -EINVAL. *ret_text is to be freed.
 */
int rv_front_join_objects(const struct rv_front_text *texts, unsigned count, char **ret_text, size_t *ret_length);

/* The items of all arrays, each once, in the order of the texts. As above. */
int rv_front_join_arrays(const struct rv_front_text *texts, unsigned count, char **ret_text, size_t *ret_length);

#endif
