/* Executors that the host must refuse: which mistake is chosen by the build (WRONG). */
#include "resvisor-executor.h"

#define WRONG_ABI 1
#define WRONG_SIZE 2
#define WRONG_NO_RUN 3

static int run(struct rv_execution *execution, struct rv_failure *err)
{
    (void)execution;
    (void)err;
    return 0;
}

extern const struct rv_executor resvisor_executor;

__attribute__((visibility("default"))) const struct rv_executor resvisor_executor = {
    .abi_version = WRONG == WRONG_ABI ? RV_EXECUTOR_ABI_VERSION + 1 : RV_EXECUTOR_ABI_VERSION,
    .struct_size = WRONG == WRONG_SIZE ? 8 : sizeof(struct rv_executor),
    .name = "wrong",
    .version = "1",
    .run = WRONG == WRONG_NO_RUN ? 0 : run,
};
