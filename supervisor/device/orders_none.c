/* Built without the Toolkit's headers: rv_cuda_open has refused before anything of this can be asked for. */
#include <errno.h>

#include "actor.h"
#include "rpc.pb-c.h"

int rv_orders_vmm(struct rv_cuda *cuda, uint32_t ordinal, uint64_t size, struct rv_answer *answer, struct rv_error *err)
{
    (void)cuda;
    (void)ordinal;
    (void)size;
    (void)answer;
    return rv_error_set(err, EOPNOTSUPP, RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED,
                        "this resvisor was built without CUDA");
}

int rv_orders_close_ipc(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_memory *memory, struct rv_error *err)
{
    (void)cuda;
    (void)ordinal;
    (void)memory;
    return rv_error_set(err, EOPNOTSUPP, RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED,
                        "this resvisor was built without CUDA");
}

uint64_t rv_orders_free(struct rv_cuda *cuda, uint32_t ordinal)
{
    (void)cuda;
    (void)ordinal;
    return 0;
}
