/* Initialisation, the way into every call, names of errors, and the search for functions. */
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"
#include "fakecuda.h"

#define EXPORT __attribute__((visibility("default")))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct fake_config config;
static bool ready, ended;
static _Thread_local bool damaged;
static pid_t owner; /* the process that called cuInit; read before the lock, so set atomically */

/* The file faults of the state folder, as it was when last read. */
static struct fake_fault late_faults[FAKE_FAULTS_MAX];
static unsigned late_fault_count;
static struct stat late_stat;

static const struct rv_cuda_driver functions = {
#define X(name, version, needed) .name = fake_##name,
    RV_CUDA_FUNCTIONS(X)
#undef X
};

static const struct {
    const char *name;
    int version;
    size_t offset;
} table[] = {
#define X(name, version, needed) {"cu" #name, version, offsetof(struct rv_cuda_driver, name)},
    RV_CUDA_FUNCTIONS(X)
#undef X
};
_Static_assert(sizeof(table) / sizeof(table[0]) == FN_COUNT, "a row per function");

static void config_open(void)
{
    fake_config_read(getenv(FAKECUDA_ENVIRONMENT), &config);
}

const struct fake_config *fake_config(void)
{
    pthread_once(&once, config_open);
    return &config;
}

void fake_lock(void)
{
    pthread_mutex_lock(&mutex);
}

void fake_unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

void fake_wait(void)
{
    pthread_cond_wait(&changed, &mutex);
}

void fake_changed(void)
{
    pthread_cond_broadcast(&changed);
}

/* Does the file of faults say something new? Counting begins again then. */
static void late_faults_read(void)
{
    struct stat now;
    if (!fake_state_exists())
        return;
    int fd = openat(fake_state_folder(), "faults", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        late_fault_count = 0;
        memset(&late_stat, 0, sizeof(late_stat));
        return;
    }
    if (fstat(fd, &now) == 0 &&
        (now.st_ino != late_stat.st_ino || now.st_size != late_stat.st_size ||
         now.st_mtim.tv_sec != late_stat.st_mtim.tv_sec || now.st_mtim.tv_nsec != late_stat.st_mtim.tv_nsec)) {
        char text[4096];
        ssize_t length = read(fd, text, sizeof(text) - 1);
        text[length > 0 ? length : 0] = '\0';
        late_fault_count = fake_faults_read(text, late_faults);
        late_stat = now;
    }
    close(fd);
}

/* Is this the program that a fault is meant for? Its command line holds the text, words joined by blanks. */
static bool program_is(const char *wanted)
{
    static char line[4096]; /* guarded by the mutex */
    static ssize_t length;
    if (*wanted == '\0')
        return true;
    if (length == 0) {
        int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
        length = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
        for (ssize_t i = 0; i + 1 < length; i++)
            line[i] = line[i] == '\0' ? ' ' : line[i];
        if (fd >= 0)
            close(fd);
    }
    return length > 0 && strstr(line, wanted) != NULL;
}

static CUresult fault_apply(struct fake_fault *faults, unsigned count, const char *name, unsigned *delay_ms)
{
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count; i++) {
        struct fake_fault *fault = &faults[i];
        if ((strcmp(fault->function, name) != 0 && strcmp(fault->function, "*") != 0) || !program_is(fault->program))
            continue;
        fault->calls++;
        if (fault->calls < fault->nth || (fault->calls > fault->nth && !fault->onwards))
            continue;
        *delay_ms += fault->delay_ms;
        damaged = damaged || fault->damage;
        if (fault->lose >= 0 && fault->lose < (int)config.gpu_count) {
            int error = fault->error != 0 ? fault->error : CUDA_ERROR_LAUNCH_FAILED;
            fake_gpu_poison((unsigned)fault->lose, (CUresult)error);
            fake_state_lose((unsigned)fault->lose, error);
        }
        if (fault->poison >= 0 && fault->poison < (int)config.gpu_count)
            fake_gpu_poison((unsigned)fault->poison, (CUresult)(fault->error != 0 ? fault->error : 719));
        if (fault->xid != 0)
            fake_state_xid((unsigned)fault->xid_gpu, fault->xid);
        if (result == CUDA_SUCCESS)
            result = (CUresult)fault->error;
    }
    return result;
}

/* The driver takes itself down when the process ends; what was registered before cuInit runs after that. */
static void driver_end(void)
{
    if (__atomic_load_n(&owner, __ATOMIC_ACQUIRE) != getpid())
        return; /* a child by fork, to which the lock may be lost */
    fake_lock();
    ended = true;
    fake_unlock();
}

static CUresult allowed(int needs)
{
    if (ended)
        return CUDA_ERROR_DEINITIALIZED;
    if (!(needs & FAKE_UNREADY) && !ready)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (needs & FAKE_CONTEXT) {
        const struct CUctx_st *context = fake_current();
        if (context == NULL)
            return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->alive)
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        return fake_gpu_health(context->gpu);
    }
    return CUDA_SUCCESS;
}

CUresult fake_enter(enum fake_function function, int needs)
{
    unsigned delay_ms = 0;
    fake_config();
    pid_t initialised = __atomic_load_n(&owner, __ATOMIC_ACQUIRE);
    if (initialised != 0 && initialised != getpid())
        return CUDA_ERROR_NOT_INITIALIZED;
    fake_lock();
    damaged = false;
    late_faults_read();
    CUresult result = fault_apply(config.faults, config.fault_count, table[function].name, &delay_ms);
    if (result == CUDA_SUCCESS)
        result = fault_apply(late_faults, late_fault_count, table[function].name, &delay_ms);
    if (delay_ms > 0) {
        fake_unlock();
        nanosleep(&(struct timespec){delay_ms / 1000, delay_ms % 1000 * 1000000l}, NULL);
        fake_lock();
    }
    if (result == CUDA_SUCCESS)
        result = allowed(needs);
    if (result != CUDA_SUCCESS)
        fake_unlock();
    return result;
}

bool fake_damaged(void)
{
    return damaged;
}

CUresult fake_leave(CUresult result)
{
    fake_unlock();
    return result;
}

CUresult fake_Init(unsigned int flags)
{
    CUresult result = fake_enter(FN_Init, FAKE_UNREADY);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != 0)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (config.init_error != 0)
        result = (CUresult)config.init_error;
    else if (!fake_device_init())
        result = CUDA_ERROR_NO_DEVICE;
    if (result == CUDA_SUCCESS && !ready) {
        ready = true;
        atexit(driver_end);
        __atomic_store_n(&owner, getpid(), __ATOMIC_RELEASE);
    }
    return fake_leave(result);
}

CUresult fake_DriverGetVersion(int *version)
{
    CUresult result = fake_enter(FN_DriverGetVersion, FAKE_UNREADY);
    if (result != CUDA_SUCCESS)
        return result;
    if (version == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *version = config.driver;
    return fake_leave(CUDA_SUCCESS);
}

/* Every error of cuda.h 13.0 that anything here answers or that a test may inject. */
static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define E(code, text) {code, #code, text},
    E(CUDA_SUCCESS, "no error") E(CUDA_ERROR_INVALID_VALUE, "invalid argument") E(
        CUDA_ERROR_OUT_OF_MEMORY, "out of memory") E(CUDA_ERROR_NOT_INITIALIZED, "initialization error")
        E(CUDA_ERROR_DEINITIALIZED, "driver shutting down") E(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")
            E(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable") E(
                CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected") E(CUDA_ERROR_INVALID_DEVICE,
                                                                              "invalid device ordinal")
                E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context") E(
                    CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed") E(CUDA_ERROR_UNMAP_FAILED,
                                                                                "unmapping of buffer object failed")
                    E(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped") E(
                        CUDA_ERROR_NOT_MAPPED, "resource not mapped") E(CUDA_ERROR_ECC_UNCORRECTABLE,
                                                                        "uncorrectable ECC error encountered")
                        E(CUDA_ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error detected") E(
                            CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported")
                            E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle") E(
                                CUDA_ERROR_ILLEGAL_STATE,
                                "illegal state") E(CUDA_ERROR_NOT_FOUND,
                                                   "named symbol not found") E(CUDA_ERROR_NOT_READY, "device not ready")
                                E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered") E(
                                    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")
                                    E(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated") E(
                                        CUDA_ERROR_CONTEXT_IS_DESTROYED,
                                        "context is destroyed") E(CUDA_ERROR_ASSERT, "device-side assert triggered")
                                        E(CUDA_ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted") E(
                                            CUDA_ERROR_HARDWARE_STACK_ERROR,
                                            "hardware stack error") E(CUDA_ERROR_MISALIGNED_ADDRESS,
                                                                      "misaligned address")
                                            E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure") E(
                                                CUDA_ERROR_NOT_PERMITTED,
                                                "operation not permitted") E(CUDA_ERROR_NOT_SUPPORTED,
                                                                             "operation not supported")
                                                E(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized") E(
                                                    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
                                                    "system has unsupported display driver / cuda driver combination")
                                                    E(CUDA_ERROR_TIMEOUT, "wait operation timed out") E(
                                                        CUDA_ERROR_EXTERNAL_DEVICE,
                                                        "an async error has occured in external entity outside of CUDA")
                                                        E(CUDA_ERROR_UNKNOWN, "unknown error")
    /* Newer than the oldest Toolkit that this is built with. */
    {(CUresult)226, "CUDA_ERROR_CONTAINED", "contained error"},
#undef E
};

static CUresult error_text(enum fake_function function, CUresult error, bool name, const char **ret_text)
{
    CUresult result = fake_enter(function, FAKE_UNREADY);
    if (result != CUDA_SUCCESS)
        return result;
    if (ret_text == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == error) {
            *ret_text = name ? errors[i].name : errors[i].text;
            return fake_leave(CUDA_SUCCESS);
        }
    *ret_text = NULL;
    return fake_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult fake_GetErrorName(CUresult error, const char **text)
{
    return error_text(FN_GetErrorName, error, true, text);
}

CUresult fake_GetErrorString(CUresult error, const char **text)
{
    return error_text(FN_GetErrorString, error, false, text);
}

static bool lacks(const char *symbol)
{
    for (unsigned i = 0; i < config.missing_count; i++)
        if (strcmp(config.missing[i], symbol) == 0)
            return true;
    return false;
}

/* cuGetProcAddress_v2 is what a program takes by dlsym, and also what the search finds under its base name. */
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status);

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    fake_config();
    if (symbol == NULL || *symbol == '\0' || pfn == NULL || flags > 2 || version > config.driver)
        return CUDA_ERROR_INVALID_VALUE;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *pfn = NULL;
    if (strcmp(symbol, "cuGetProcAddress") == 0 && version >= 12000) {
        *pfn = (void *)(uintptr_t)cuGetProcAddress_v2;
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    for (size_t i = 0; i < FN_COUNT; i++) {
        if (strcmp(table[i].name, symbol) != 0 || lacks(symbol))
            continue;
        found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        /* From 13.0 on cuCtxSynchronize is another function, with an argument: PFN_cuCtxSynchronize_v13000. */
        if (version < table[i].version || (i == FN_CtxSynchronize && version >= 13000))
            continue;
        memcpy(pfn, (const char *)&functions + table[i].offset, sizeof(*pfn));
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    if (status != NULL)
        *status = found;
    return CUDA_SUCCESS;
}
