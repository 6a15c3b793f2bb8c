/* Results of self-tests of an earlier start: whatever is in the file, what it gives is valid, and comes out as it went
 * in. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool/device_cache.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct rv_device_cache cache;
    char problem[128] = "";

    if (rv_device_cache_parse((const char *)data, size, &cache, problem, sizeof(problem)) < 0) {
        if (!problem[0])
            abort();
        return 0;
    }
    if (cache.count > RV_DEVICES_MAX)
        abort();
    for (uint32_t i = 0; i < cache.count; i++) {
        const struct rv_cached_device *d = &cache.devices[i];

        if (d->test_count > RV_DEVICE_TESTS_MAX || rv_device_cache_find(&cache, d->uuid) != d)
            abort();
        for (uint32_t t = 0; t < d->test_count; t++)
            if (!rv_device_test_is_valid(&d->tests[t]) || strlen(d->tests[t].detail) >= sizeof(d->tests[t].detail))
                abort();
    }
    return 0;
}
