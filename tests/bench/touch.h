/* Reads every byte of a range; used by every row that says "touched", ours and the alternatives alike. */
#ifndef BENCH_TOUCH_H
#define BENCH_TOUCH_H

#include <stdint.h>

/* The sum of all 8-byte words (and of the bytes at the end), so that no compiler can leave the reads out. */
__attribute__((visibility("default"))) uint64_t bench_touch(const void *data, uint64_t length);

#endif
