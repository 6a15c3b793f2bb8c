/* Between index.c and index_builder.c: the hash of a name that the layout fixes. */
#ifndef RV_INDEX_HASH_H
#define RV_INDEX_HASH_H

#include <stdint.h>

uint64_t rv_index_hash(const char *name, uint64_t length);

#endif
