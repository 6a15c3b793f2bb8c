/*
 * The table of driver functions, found at run time. Private to common/cuda and resvisor-device; needs the Toolkit's
 * headers (12.x or 13.x).
 *
 * Only cuGetProcAddress_v2 is taken by dlsym (absent: the driver is older than 12.0); the others come from it by their
 * base names, request version 12000, legacy stream, so that the ABI is the same with every later driver. Types are the
 * versioned PFN_… of cudaTypedefs.h: the plain names are macros that differ between Toolkit 12 and 13.
 */
#ifndef RV_CUDA_DRIVER_H
#define RV_CUDA_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>

#define RV_CUDA_REQUEST_VERSION 12000

/* X(base name without "cu", version of its type, needed): needed 1 = without it there is no CUDA for us. */
#define RV_CUDA_FUNCTIONS(X)                  \
    X(Init, 2000, 1)                          \
    X(DriverGetVersion, 2020, 1)              \
    X(GetErrorName, 6000, 1)                  \
    X(GetErrorString, 6000, 1)                \
    X(DeviceGet, 2000, 1)                     \
    X(DeviceGetCount, 2000, 1)                \
    X(DeviceGetName, 2000, 1)                 \
    X(DeviceGetAttribute, 2000, 1)            \
    X(DeviceTotalMem, 3020, 1)                \
    X(DeviceGetUuid, 11040, 1)                \
    X(DeviceGetPCIBusId, 4010, 1)             \
    X(DevicePrimaryCtxRetain, 7000, 1)        \
    X(DevicePrimaryCtxGetState, 7000, 1)      \
    X(DevicePrimaryCtxRelease, 11000, 1)      \
    X(CtxSetCurrent, 4000, 1)                 \
    X(CtxGetCurrent, 4000, 1)                 \
    X(CtxSynchronize, 2000, 1)                \
    X(MemGetAllocationGranularity, 10020, 0)  \
    X(MemAddressReserve, 10020, 0)            \
    X(MemAddressFree, 10020, 0)               \
    X(MemCreate, 10020, 0)                    \
    X(MemRelease, 10020, 0)                   \
    X(MemMap, 10020, 0)                       \
    X(MemUnmap, 10020, 0)                     \
    X(MemSetAccess, 10020, 0)                 \
    X(MemExportToShareableHandle, 10020, 0)   \
    X(MemImportFromShareableHandle, 10020, 0) \
    X(IpcGetMemHandle, 4010, 0)               \
    X(IpcOpenMemHandle, 11000, 0)             \
    X(IpcCloseMemHandle, 4010, 0)             \
    X(MemAlloc, 3020, 1)                      \
    X(MemFree, 3020, 1)                       \
    X(MemHostAlloc, 2020, 1)                  \
    X(MemFreeHost, 2000, 1)                   \
    X(MemcpyHtoDAsync, 3020, 1)               \
    X(MemcpyDtoHAsync, 3020, 1)               \
    X(MemsetD8Async, 3020, 1)                 \
    X(MemGetInfo, 3020, 1)                    \
    X(StreamCreate, 2000, 1)                  \
    X(StreamQuery, 2000, 1)                   \
    X(StreamSynchronize, 2000, 1)             \
    X(StreamDestroy, 4000, 1)                 \
    X(EventCreate, 2000, 1)                   \
    X(EventRecord, 2000, 1)                   \
    X(EventQuery, 2000, 1)                    \
    X(EventSynchronize, 2000, 1)              \
    X(EventDestroy, 4000, 1)                  \
    X(PointerGetAttribute, 4000, 0)

struct rv_cuda_driver {
#define X(name, version, needed) PFN_cu##name##_v##version name;
    RV_CUDA_FUNCTIONS(X)
#undef X
};

struct rv_cuda;
/* NULL members: functions that this driver lacks and that are not needed. */
const struct rv_cuda_driver *rv_cuda_driver_of(const struct rv_cuda *cuda);

#endif
