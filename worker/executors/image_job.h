/* The job of the image executors: a prompt becomes a PNG picture, by the CPU or by run->compute. */
#ifndef RV_EXECUTOR_IMAGE_JOB_H
#define RV_EXECUTOR_IMAGE_JOB_H

#include "resvisor-executor.h"

struct rv_compute;

/* For struct rv_executor's run. compute NULL = the CPU; device is the compute's own. */
int rv_image_run(struct rv_execution *execution, const struct rv_compute *compute, void *device,
                 struct rv_failure *err);

#endif
