/* Built with -DRESVISOR_CUDA=OFF, or without the Toolkit's headers: there is no driver, and so no device to use. */
#include <errno.h>

#include "rpc.pb-c.h"
#include "rv_cuda.h"

int rv_cuda_open(struct rv_cuda **ret_cuda, struct rv_error *err)
{
    (void)ret_cuda;
    rv_error_set(err, EOPNOTSUPP, RESVISOR__V1__ERROR_CODE__ERROR_UNSUPPORTED, "this resvisor was built without CUDA");
    rv_error_remedy(err, "build it where the CUDA Toolkit's headers are installed");
    return -EOPNOTSUPP;
}
