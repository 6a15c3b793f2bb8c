#include "touch.h"

#include <string.h>

#define LANES 8u

uint64_t bench_touch(const void *data, uint64_t length)
{
    const uint8_t *p = data;
    uint64_t sums[LANES] = {0}, sum = 0;

    for (; length >= sizeof(sums); length -= sizeof(sums), p += sizeof(sums)) {
        uint64_t words[LANES];

        memcpy(words, p, sizeof(words));
        for (unsigned i = 0; i < LANES; i++)
            sums[i] += words[i];
    }
    for (unsigned i = 0; i < LANES; i++)
        sum += sums[i];
    for (; length > 0; length--, p++)
        sum += *p;
    return sum;
}
