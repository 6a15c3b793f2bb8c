/* Finds the driver and its functions. */
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_private.h"

#define LIBRARY "libcuda.so.1"
#define FINDER "cuGetProcAddress_v2"
#define MISSING_TEXT 256 /* names of missing functions in a message; more are cut */

static const struct function {
    const char *name; /* as cuGetProcAddress wants it */
    size_t offset;
    bool needed;
} functions[] = {
#define X(name, version, needed) {"cu" #name, offsetof(struct rv_cuda_driver, name), needed},
    RV_CUDA_FUNCTIONS(X)
#undef X
};
#define FUNCTIONS (sizeof(functions) / sizeof(functions[0]))
_Static_assert(sizeof(struct rv_cuda_driver) == FUNCTIONS * sizeof(void *), "the table holds functions only");

/* The member of a table, as cuGetProcAddress writes it. */
static void **slot_of(struct rv_cuda_driver *driver, const struct function *function)
{
    return (void **)((char *)driver + function->offset);
}

/* Fills the table. On failure the names of what is missing are in err. */
static int find_functions(PFN_cuGetProcAddress_v12000 find, struct rv_cuda *cuda, struct rv_error *err)
{
    char missing[MISSING_TEXT] = "";
    size_t used = 0;

    for (unsigned i = 0; i < FUNCTIONS; i++) {
        CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        void **slot = slot_of(&cuda->driver, &functions[i]);
        CUresult result =
            find(functions[i].name, slot, RV_CUDA_REQUEST_VERSION, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);

        if (result == CUDA_SUCCESS && status == CU_GET_PROC_ADDRESS_SUCCESS && *slot)
            continue;
        *slot = NULL; /* a driver may leave anything in it */
        if (result == CUDA_ERROR_STUB_LIBRARY)
            return rv_cuda_failed(cuda, result, "cuGetProcAddress", err);
        if (functions[i].needed && used < sizeof(missing))
            used += (size_t)snprintf(missing + used, sizeof(missing) - used, " %s", functions[i].name);
    }
    if (missing[0]) {
        rv_cuda_refused(err, ENOSYS, RV_CUDA_ERROR(NO_SUCH_DEVICE), "the CUDA driver lacks%s", missing);
        rv_error_remedy(err, "install a driver of CUDA 12.0 or newer");
        return -ENOSYS;
    }
    return 0;
}

static int find_driver(struct rv_cuda *cuda, void **ret_library, struct rv_error *err)
{
    PFN_cuGetProcAddress_v12000 find;
    char why[RV_ERROR_TEXT_MAX / 2];
    const char *text;
    void *library;
    int r;

    library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        text = dlerror();
        text = text ? text : LIBRARY;
        rv_cuda_refused(err, ENOENT, RV_CUDA_ERROR(NO_SUCH_DEVICE), "no CUDA driver: %s",
                        rv_escape(why, sizeof(why), text, strlen(text)));
        rv_error_remedy(err, "install NVIDIA's driver, or in a container let its toolkit give libcuda.so.1");
        return -ENOENT;
    }
    *(void **)&find = dlsym(library, FINDER);
    if (!find) {
        r = rv_cuda_refused(err, ENOSYS, RV_CUDA_ERROR(NO_SUCH_DEVICE), "the CUDA driver lacks %s", FINDER);
        rv_error_remedy(err, "install a driver of CUDA 12.0 or newer");
    } else {
        r = find_functions(find, cuda, err);
    }
    if (r < 0)
        (void)dlclose(library); /* nothing of it was started */
    else
        *ret_library = library;
    return r;
}

/* Those that can wait. */
static void block_signals(sigset_t *ret_before)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t blocked;

    (void)sigfillset(&blocked);
    for (unsigned i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        (void)sigdelset(&blocked, faults[i]);
    (void)pthread_sigmask(SIG_BLOCK, &blocked, ret_before);
}

CUresult rv_cuda_start_quietly(CUresult (*start)(void *), void *argument)
{
    sigset_t before;
    CUresult result;

    block_signals(&before);
    result = start(argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return result;
}

static CUresult init(void *argument)
{
    const struct rv_cuda *cuda = argument;

    return cuda->driver.Init(0);
}

void rv_cuda_remedy_of_visible(struct rv_error *err)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char text[64];

    if (visible)
        rv_error_remedy(err, "CUDA_VISIBLE_DEVICES is '%s': it hides every device that it does not name",
                        rv_escape(text, sizeof(text), visible, strlen(visible)));
}

/* No context was made, so none is broken, whatever the number says: most often the machine is not set up for it. */
static void judge_start(CUresult result, struct rv_error *err)
{
    if (result == CUDA_ERROR_NO_DEVICE)
        rv_cuda_remedy_of_visible(err);
    if (rv_cuda_is_sticky(result)) {
        rv_cuda_remember(CUDA_ERROR_NOT_INITIALIZED);
        if (err)
            err->code = RV_CUDA_ERROR(DEVICE);
    }
    if (rv_cuda_is_sticky(result) || result == CUDA_ERROR_OPERATING_SYSTEM)
        rv_error_remedy(err,
                        "see that /dev/nvidia-uvm is there and may be opened: `nvidia-modprobe -u -c 0` as root makes "
                        "it, and a container must be given it; the kernel's log may say more");
}

static int start_driver(struct rv_cuda *cuda, struct rv_error *err)
{
    const char *call = "cuInit";
    CUresult result = rv_cuda_start_quietly(init, cuda);
    int count = 0;

    if (result == CUDA_SUCCESS) {
        call = "cuDriverGetVersion";
        result = cuda->driver.DriverGetVersion(&cuda->version);
    }
    if (result == CUDA_SUCCESS) {
        call = "cuDeviceGetCount";
        result = cuda->driver.DeviceGetCount(&count);
    }
    if (result == CUDA_SUCCESS && count <= 0) {
        call = "cuDeviceGetCount gave 0";
        result = CUDA_ERROR_NO_DEVICE;
    }
    if (result != CUDA_SUCCESS) {
        rv_cuda_failed(cuda, result, call, err);
        judge_start(result, err);
        return -ENODEV;
    }
    cuda->count = (uint32_t)count < RV_DEVICES_MAX ? (uint32_t)count : RV_DEVICES_MAX;
    return 0;
}

int rv_cuda_open(struct rv_cuda **ret_cuda, struct rv_error *err)
{
    struct rv_cuda *cuda = calloc(1, sizeof(*cuda));
    void *library = NULL;
    int r;

    if (!cuda)
        return rv_cuda_refused(err, ENOMEM, RV_CUDA_ERROR(NO_MEMORY), "no memory for the driver's table");
    cuda->owner = getpid();
    r = find_driver(cuda, &library, err);
    if (r == 0) /* from here on the library stays: cuInit may have started threads, also when it failed */
        r = start_driver(cuda, err);
    if (r < 0) {
        free(cuda);
        return r;
    }
    *ret_cuda = cuda;
    return 0;
}

void rv_cuda_close(struct rv_cuda *cuda)
{
    free(cuda);
}

int rv_cuda_driver_version(const struct rv_cuda *cuda)
{
    return cuda->version;
}

uint32_t rv_cuda_device_count(const struct rv_cuda *cuda)
{
    return cuda->count;
}

const struct rv_cuda_driver *rv_cuda_driver_of(const struct rv_cuda *cuda)
{
    return &cuda->driver;
}

struct need {
    const char *name;
    size_t offset;
};
#define NEED(name)                                        \
    {                                                     \
        "cu" #name, offsetof(struct rv_cuda_driver, name) \
    }

static int need(const struct rv_cuda *cuda, const struct need *needs, unsigned count, const char *backend,
                struct rv_error *err)
{
    for (unsigned i = 0; i < count; i++) {
        void *const *slot = (void *const *)((const char *)&cuda->driver + needs[i].offset);

        if (!*slot)
            return rv_cuda_refused(err, EOPNOTSUPP, RV_CUDA_ERROR(DEVICE), "%s: the CUDA driver lacks %s", backend,
                                   needs[i].name);
    }
    return 0;
}

int rv_cuda_need_vmm(const struct rv_cuda *cuda, struct rv_error *err)
{
    static const struct need needs[] = {
        NEED(MemGetAllocationGranularity),
        NEED(MemAddressReserve),
        NEED(MemAddressFree),
        NEED(MemCreate),
        NEED(MemRelease),
        NEED(MemMap),
        NEED(MemUnmap),
        NEED(MemSetAccess),
        NEED(MemExportToShareableHandle),
        NEED(MemImportFromShareableHandle),
    };

    return need(cuda, needs, sizeof(needs) / sizeof(needs[0]), "cuda-vmm", err);
}

int rv_cuda_need_ipc(const struct rv_cuda *cuda, struct rv_error *err)
{
    static const struct need needs[] = {NEED(IpcGetMemHandle), NEED(IpcOpenMemHandle), NEED(IpcCloseMemHandle)};

    return need(cuda, needs, sizeof(needs) / sizeof(needs[0]), "cuda-ipc", err);
}
