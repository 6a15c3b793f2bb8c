/* Primary contexts: one per device and process, counted; the current one is a thread's own. */
#include <stdlib.h>
#include <unistd.h>

#include "fake.h"

static _Thread_local struct CUctx_st *current;
static struct CUctx_st *all;
static struct CUctx_st *primary[FAKE_GPUS_MAX];
static struct CUctx_st *ended[FAKE_GPUS_MAX]; /* the last one, where a device has one handle for all of them */
static unsigned retained[FAKE_GPUS_MAX];

struct CUctx_st *fake_current(void)
{
    return current;
}

static CUresult context_create(unsigned gpu)
{
    const struct fake_gpu *facts = &fake_config()->gpus[gpu];
    struct CUctx_st *context = ended[gpu], *fresh = NULL;
    if (context == NULL)
        context = fresh = calloc(1, sizeof(*context));
    if (context == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t limit = facts->total < facts->oom_at ? facts->total : facts->oom_at;
    if (fake_state_charge(gpu, facts->context, limit, "context", &context->ledger) != 0) {
        free(fresh);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->gpu = gpu;
    context->alive = true;
    primary[gpu] = context;
    ended[gpu] = NULL;
    if (fresh != NULL) {
        context->next = all;
        all = context;
    }
    return CUDA_SUCCESS;
}

static void context_end(struct CUctx_st *context)
{
    fake_context_drain(context);
    fake_streams_end(context);
    fake_ranges_of_context_free(context);
    if (context->ledger >= 0)
        close(context->ledger);
    fake_state_uncharge(context->gpu, fake_config()->gpus[context->gpu].context);
    context->alive = false;
    primary[context->gpu] = NULL;
    ended[context->gpu] = fake_config()->gpus[context->gpu].one_handle ? context : NULL;
}

CUresult fake_DevicePrimaryCtxRetain(CUcontext *ret_context, CUdevice device)
{
    CUresult result = fake_enter(FN_DevicePrimaryCtxRetain, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    int gpu = fake_gpu_of(device);
    if (ret_context == NULL || gpu < 0)
        return fake_leave(gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    result = fake_gpu_health((unsigned)gpu);
    if (result == CUDA_SUCCESS && primary[gpu] == NULL)
        result = context_create((unsigned)gpu);
    if (result != CUDA_SUCCESS)
        return fake_leave(result);
    retained[gpu]++;
    *ret_context = primary[gpu];
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DevicePrimaryCtxRelease(CUdevice device)
{
    CUresult result = fake_enter(FN_DevicePrimaryCtxRelease, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    int gpu = fake_gpu_of(device);
    if (gpu < 0)
        return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    if (retained[gpu] == 0)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--retained[gpu] == 0)
        context_end(primary[gpu]);
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_DevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    CUresult result = fake_enter(FN_DevicePrimaryCtxGetState, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    int gpu = fake_gpu_of(device);
    if (gpu < 0 || flags == NULL || active == NULL)
        return fake_leave(gpu < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    *flags = 0;
    *active = primary[gpu] != NULL;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_CtxSetCurrent(CUcontext context)
{
    CUresult result = fake_enter(FN_CtxSetCurrent, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    const struct CUctx_st *known = all;
    while (known != NULL && known != context)
        known = known->next;
    if (context != NULL && known == NULL)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (context != NULL && !context->alive && !fake_config()->gpus[context->gpu].one_handle)
        return fake_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    current = context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_CtxGetCurrent(CUcontext *context)
{
    CUresult result = fake_enter(FN_CtxGetCurrent, FAKE_ANYTIME);
    if (result != CUDA_SUCCESS)
        return result;
    if (context == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *context = current;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_CtxSynchronize(void)
{
    CUresult result = fake_enter(FN_CtxSynchronize, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_context_drain(current);
    return fake_leave(fake_gpu_health(current->gpu));
}
