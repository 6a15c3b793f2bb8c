/* The body of one struct rv_hash_way, compiled once per vector unit. RV_HASH_WAY and RV_HASH_NAME name it. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "hash.h"

#define STATE_ALIGN 64 /* what XXH3_state_t asks for */

static struct rv_hash *way_create(void)
{
    size_t size = (sizeof(XXH3_state_t) + STATE_ALIGN - 1) / STATE_ALIGN * STATE_ALIGN;
    XXH3_state_t *state = aligned_alloc(STATE_ALIGN, size);

    if (state) {
        XXH3_INITSTATE(state);
        (void)XXH3_128bits_reset(state);
    }
    return (struct rv_hash *)state;
}

static void way_reset(struct rv_hash *hash)
{
    (void)XXH3_128bits_reset((XXH3_state_t *)hash);
}

static void way_update(struct rv_hash *hash, const void *data, size_t length)
{
    (void)XXH3_128bits_update((XXH3_state_t *)hash, data, length);
}

static void way_digest(const struct rv_hash *hash, uint8_t ret_digest[16])
{
    XXH128_canonical_t canonical;

    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest((const XXH3_state_t *)hash));
    memcpy(ret_digest, canonical.digest, sizeof(canonical.digest));
}

static void way_destroy(struct rv_hash *hash)
{
    free(hash);
}

const struct rv_hash_way RV_HASH_WAY = {RV_HASH_NAME, way_create, way_reset, way_update, way_digest, way_destroy};
