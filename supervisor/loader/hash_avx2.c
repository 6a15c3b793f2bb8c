#define RV_HASH_WAY rv_hash_avx2
#define RV_HASH_NAME "avx2"
#include "hash_way.inc"
