/*
 * An executor that does nothing, so that a job costs what resvisor costs. With the parameter touch=1 it reads every
 * byte of every model first.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "resvisor-executor.h"
#include "touch.h"

static int run(struct rv_execution *execution, struct rv_failure *err)
{
    uint64_t sum = 0;
    struct rv_tensor tensor;
    char text[64];

    if (strcmp(rv_job_param(execution->job, "touch", "0"), "1") != 0)
        return 0;
    for (uint32_t l = 0; l < execution->lease_count; l++)
        for (uint64_t i = 0; rv_tensor_at(execution->leases[l], i, &tensor) == 0; i++)
            sum += bench_touch(tensor.data, tensor.length);
    (void)snprintf(text, sizeof(text), "%llu\n", (unsigned long long)sum);
    return rv_job_add_output(execution->job, "sum.txt", "text/plain", text, strlen(text), err);
}

__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "bench",
    .version = RV_VERSION,
    .start = NULL,
    .run = run,
    .stop = NULL,
};
