/* The image executor: a prompt becomes a PNG picture. Also the shortest example of an executor: rv_image_run is its
 * job.
 */
#include "image_job.h"
#include "run.h"

static int image_run(struct rv_execution *execution, struct rv_failure *err)
{
    return rv_image_run(execution, NULL, NULL, err);
}

extern const struct rv_executor resvisor_executor;
__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = RV_EXECUTOR_ABI_VERSION,
    .struct_size = sizeof(struct rv_executor),
    .name = "image",
    .version = RV_VERSION,
    .start = rv_executor_start,
    .run = image_run,
};
