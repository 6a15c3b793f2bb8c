/* XXH3-128 of a stream, with the widest vectors that this processor has. Loader only; one stream = one thread. */
#ifndef RV_LOADER_HASH_H
#define RV_LOADER_HASH_H

#include <stddef.h>
#include <stdint.h>

struct rv_hash; /* one running hash */

struct rv_hash_way {
    const char *name;                /* "avx2", "baseline" */
    struct rv_hash *(*create)(void); /* NULL = no memory */
    void (*reset)(struct rv_hash *hash);
    void (*update)(struct rv_hash *hash, const void *data, size_t length);
    void (*digest)(const struct rv_hash *hash, uint8_t ret_digest[16]); /* canonical: big endian */
    void (*destroy)(struct rv_hash *hash);
};

extern const struct rv_hash_way rv_hash_baseline;
extern const struct rv_hash_way rv_hash_avx2; /* exists with RV_HASH_AVX2 */

/* The best one for this machine. */
const struct rv_hash_way *rv_hash_way(void);

#endif
