/* What the driver's errors mean to us. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "device_private.h"

enum kind {
    KIND_CALL,   /* this call failed, others may not */
    KIND_STICKY, /* the context is broken: every further call in it fails the same way */
};

/* Numbers, since Toolkit 12.0 has not all of these names. Those of KIND_STICKY are the ones that cuda.h describes by
 * "leaves the process in an inconsistent state", and the uncorrectable faults of the hardware. */
static const struct {
    uint16_t result;
    const char *name; /* for when the driver cannot be asked */
    uint8_t kind;
    int err_number;
    int code;
    const char *remedy; /* NULL = the code's own */
} rows[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", KIND_CALL, EINVAL, RV_CUDA_ERROR(DEVICE), NULL},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", KIND_CALL, ENOMEM, RV_CUDA_ERROR(NO_MEMORY), NULL},
    {3, "CUDA_ERROR_NOT_INITIALIZED", KIND_CALL, ESHUTDOWN, RV_CUDA_ERROR(DEVICE), NULL},
    {4, "CUDA_ERROR_DEINITIALIZED", KIND_CALL, ESHUTDOWN, RV_CUDA_ERROR(DEVICE), NULL},
    {34, "CUDA_ERROR_STUB_LIBRARY", KIND_CALL, ENODEV, RV_CUDA_ERROR(NO_SUCH_DEVICE),
     "this libcuda.so.1 is the Toolkit's stub for linking: take its folder out of LD_LIBRARY_PATH"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", KIND_CALL, EBUSY, RV_CUDA_ERROR(DEVICE),
     "the device is in an exclusive compute mode: `nvidia-smi -c DEFAULT`"},
    {100, "CUDA_ERROR_NO_DEVICE", KIND_CALL, ENODEV, RV_CUDA_ERROR(NO_SUCH_DEVICE), NULL},
    {101, "CUDA_ERROR_INVALID_DEVICE", KIND_CALL, ENODEV, RV_CUDA_ERROR(NO_SUCH_DEVICE), NULL},
    {201, "CUDA_ERROR_INVALID_CONTEXT", KIND_CALL, EINVAL, RV_CUDA_ERROR(DEVICE), NULL},
    {205, "CUDA_ERROR_MAP_FAILED", KIND_CALL, EIO, RV_CUDA_ERROR(DEVICE), NULL},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {226, "CUDA_ERROR_CONTAINED", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", KIND_CALL, EIO, RV_CUDA_ERROR(DEVICE), NULL},
    {400, "CUDA_ERROR_INVALID_HANDLE", KIND_CALL, EINVAL, RV_CUDA_ERROR(DEVICE), NULL},
    {600, "CUDA_ERROR_NOT_READY", KIND_CALL, EAGAIN, RV_CUDA_ERROR(DEVICE), NULL},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", KIND_CALL, ESTALE, RV_CUDA_ERROR(DEVICE), NULL},
    {710, "CUDA_ERROR_ASSERT", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {718, "CUDA_ERROR_INVALID_PC", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {719, "CUDA_ERROR_LAUNCH_FAILED", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {800, "CUDA_ERROR_NOT_PERMITTED", KIND_CALL, EACCES, RV_CUDA_ERROR(DEVICE), NULL},
    {801, "CUDA_ERROR_NOT_SUPPORTED", KIND_CALL, EOPNOTSUPP, RV_CUDA_ERROR(DEVICE), NULL},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", KIND_CALL, EAGAIN, RV_CUDA_ERROR(DEVICE),
     "start what the machine needs first, such as nvidia-fabricmanager"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", KIND_CALL, ENODEV, RV_CUDA_ERROR(DEVICE),
     "libcuda and the kernel's module are of different versions: load the module anew, or restart the machine"},
    {909, "CUDA_ERROR_TIMEOUT", KIND_CALL, ETIMEDOUT, RV_CUDA_ERROR(DEVICE), NULL},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
    {999, "CUDA_ERROR_UNKNOWN", KIND_STICKY, ENODEV, RV_CUDA_ERROR(DEVICE_LOST), NULL},
};

static _Thread_local int last_error;

int rv_cuda_last_error(void)
{
    return last_error;
}

void rv_cuda_remember(CUresult result)
{
    last_error = (int)result;
}

static int row_of(CUresult result)
{
    for (unsigned i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (rows[i].result == (unsigned)result)
            return (int)i;
    return -1;
}

bool rv_cuda_is_sticky(CUresult result)
{
    int row = row_of(result);

    return row >= 0 && rows[row].kind == KIND_STICKY;
}

static const char *name_of(const struct rv_cuda *cuda, CUresult result, int row)
{
    const char *name = NULL;

    if (cuda->driver.GetErrorName && cuda->driver.GetErrorName(result, &name) == CUDA_SUCCESS && name)
        return name;
    return row >= 0 ? rows[row].name : "of no known name";
}

static int fill(const struct rv_cuda *cuda, CUresult result, const char *call, const char *more, struct rv_error *err)
{
    int row = row_of(result);
    int code = row >= 0 ? rows[row].code : RV_CUDA_ERROR(DEVICE);

    rv_cuda_remember(result);
    rv_error_set(err, EIO, code, "%s: %d %.64s%s", call, (int)result, name_of(cuda, result, row), more);
    if (row >= 0 && rows[row].remedy)
        rv_error_remedy(err, "%s", rows[row].remedy);
    return row >= 0 ? -rows[row].err_number : -EIO;
}

int rv_cuda_failed(const struct rv_cuda *cuda, CUresult result, const char *call, struct rv_error *err)
{
    return fill(cuda, result, call, "", err);
}

int rv_cuda_failed_of(const struct rv_cuda *cuda, CUresult result, const char *call, uint64_t size,
                      struct rv_error *err)
{
    char more[48];

    (void)snprintf(more, sizeof(more), ", for %llu bytes", (unsigned long long)size);
    return fill(cuda, result, call, more, err);
}

int rv_cuda_refused(struct rv_error *err, int err_number, int code, const char *format, ...)
{
    char text[RV_ERROR_TEXT_MAX];
    va_list ap;

    rv_cuda_remember(CUDA_SUCCESS);
    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    return rv_error_set(err, err_number, code, "%s", text);
}

bool rv_cuda_is_forked(const struct rv_cuda *cuda)
{
    return cuda->owner != getpid();
}

int rv_cuda_refuse_fork(struct rv_error *err)
{
    rv_cuda_refused(err, EPERM, RV_CUDA_ERROR(UNSUPPORTED), "CUDA was begun in the parent of this forked process");
    rv_error_remedy(err, "the driver does not live through a fork: start a new program, or fork before CUDA is used");
    return -EPERM;
}
