/*
 * Finds devices and tests each backend on them, in actors (actors.h): this process itself never loads the driver.
 */
#ifndef RV_DEVICE_SELFTEST_H
#define RV_DEVICE_SELFTEST_H

#include <stdint.h>

#include "rv_cuda.h"

#define RV_ROW_DETAIL_MAX 160

struct rv_found {
    struct rv_cuda_info devices[RV_DEVICES_MAX];
    uint32_t count;
    char driver[16];                /* version, such as 13.0; empty = none */
    char reason[RV_ERROR_TEXT_MAX]; /* why there are none */
};

/* One row of the result: DeviceTest of rpc.proto. */
struct rv_row {
    uint32_t backend; /* enum rv_backend_id */
    const char *name;
    const char *result; /* "ok", "failed", "skipped" */
    char detail[RV_ROW_DETAIL_MAX];
    uint64_t bytes_per_second, duration_us;
    bool no_memory; /* it failed for want of memory on the device */
};

typedef void rv_row_function(void *context, const struct rv_cuda_info *device, const struct rv_row *row);

/* answer_us: how long an actor may take for a step (RV_ANSWER_US). */
void rv_selftest_find(uint64_t answer_us, struct rv_found *ret_found);

struct rv_verdict {
    uint32_t failed; /* rows */
    uint32_t usable; /* backends: `create` is ok and no row failed */
};

/* Tests every backend of one device; rows are told as they come. */
struct rv_verdict rv_selftest_run(const struct rv_cuda_info *device, uint64_t answer_us, rv_row_function *tell,
                                  void *context);

/* "12.3 GB/s". Returns buffer. */
char *rv_speed_text(uint64_t bytes_per_second, char *buffer, uint64_t size);

#endif
