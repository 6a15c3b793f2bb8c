#define RV_HASH_WAY rv_hash_baseline
#define RV_HASH_NAME "baseline"
#include "hash_way.inc"

const struct rv_hash_way *rv_hash_way(void)
{
#ifdef RV_HASH_AVX2
    if (__builtin_cpu_supports("avx2"))
        return &rv_hash_avx2;
#endif
    return &rv_hash_baseline;
}
