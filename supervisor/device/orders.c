#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "actor.h"
#include "driver.h"
#include "rpc.pb-c.h"

#define ERROR(name) RESVISOR__V1__ERROR_CODE__ERROR_##name
#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

#define PASSES 3 /* memory that is missing after each of them is lost; after one, another program has it */

/*
 * u unmap, r release, f close the descriptor, a free the address, c end the context. All orders in which the address is
 * freed after it was unmapped (cuda.h: cuMemAddressFree wants an unmapped range), and some in which the context goes
 * first: a context takes a tenth of a second and more.
 */
static const char *const orders[] = {
    "urfa", "uraf", "ufra", "ufar", "uarf",  "uafr",  "rufa",  "ruaf",
    "rfua", "fura", "fuar", "frua", "curfa", "ucraf", "rfcua",
};

static const struct {
    char letter;
    const char *call, *word;
} letters[] = {
    {'u', "cuMemUnmap", "unmap"},
    {'r', "cuMemRelease", "release"},
    {'f', "close", "close descriptor"},
    {'a', "cuMemAddressFree", "free address"},
    {'c', "cuDevicePrimaryCtxRelease", "end context"},
};

struct round {
    const struct rv_cuda_driver *driver;
    CUdevice device;
    const char *order;
    size_t size;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    int fd;
    bool context;         /* is retained and current */
    struct rv_error note; /* what a call said after the context's end */
};

static int failed(const struct round *round, const char *call, CUresult result, struct rv_error *err)
{
    const char *name = NULL;
    char words[96] = "";
    size_t used = 0;

    (void)round->driver->GetErrorName(result, &name);
    for (const char *p = round->order; *p; p++)
        for (size_t i = 0; i < COUNT(letters); i++)
            if (letters[i].letter == *p && used < sizeof(words))
                used += (size_t)snprintf(words + used, sizeof(words) - used, "%s%s", used ? ", " : "", letters[i].word);
    return rv_error_set(err, EIO, ERROR(DEVICE), "%s: %d %s%s%s", call, (int)result, name ? name : "?",
                        *words ? ", in the order " : "", words);
}

static int context_make(struct round *round, struct rv_error *err)
{
    CUcontext context;
    CUresult result;

    if (round->context)
        return 0;
    result = round->driver->DevicePrimaryCtxRetain(&context, round->device);
    if (result != CUDA_SUCCESS)
        return failed(round, "cuDevicePrimaryCtxRetain", result, err);
    result = round->driver->CtxSetCurrent(context);
    if (result != CUDA_SUCCESS)
        return failed(round, "cuCtxSetCurrent", result, err);
    round->context = true;
    return 0;
}

#define CALL(name, ...)                                      \
    do {                                                     \
        CUresult result_ = round->driver->name(__VA_ARGS__); \
        if (result_ != CUDA_SUCCESS)                         \
            return failed(round, "cu" #name, result_, err);  \
    } while (0)

/* An arena, mapped, exported and written to; imported: by the handle that its own descriptor gives. */
static int make(struct round *round, bool imported, struct rv_error *err)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)round->device}};
    CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    int r = context_make(round, err);

    if (r < 0)
        return r;
    CALL(MemCreate, &round->handle, round->size, &properties, 0);
    CALL(MemExportToShareableHandle, &round->fd, round->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (imported) {
        CUmemGenericAllocationHandle first = round->handle;

        CALL(MemImportFromShareableHandle, &round->handle, (void *)(uintptr_t)round->fd,
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        CALL(MemRelease, first);
    }
    CALL(MemAddressReserve, &round->address, round->size, 0, 0, 0);
    CALL(MemMap, round->address, round->size, 0, round->handle, 0);
    CALL(MemSetAccess, round->address, round->size, &access, 1);
    CALL(MemsetD8Async, round->address, 0x11, round->size, NULL);
    CALL(CtxSynchronize);
    return 0;
}

/* A context that has ended may have taken the mapping along: no document says so, and none says that it must not. Then
 * the calls may find nothing; whether the memory comes back is what counts. */
static bool is_gone(const struct round *round, CUresult result)
{
    static const CUresult gone[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_CONTEXT,
                                    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_CONTEXT_IS_DESTROYED};

    for (size_t i = 0; i < COUNT(gone); i++)
        if (!round->context && result == gone[i])
            return true;
    return false;
}

static const char *call_of(char letter)
{
    for (size_t i = 0; i < COUNT(letters); i++)
        if (letters[i].letter == letter)
            return letters[i].call;
    return "?";
}

static CUresult give_back(struct round *round, char letter)
{
    CUresult result = CUDA_SUCCESS;

    switch (letter) {
    case 'u':
        return round->driver->MemUnmap(round->address, round->size);
    case 'r':
        return round->driver->MemRelease(round->handle);
    case 'a':
        return round->driver->MemAddressFree(round->address, round->size);
    case 'c':
        result = round->driver->CtxSetCurrent(NULL);
        round->context = false;
        if (result == CUDA_SUCCESS)
            result = round->driver->DevicePrimaryCtxRelease(round->device);
        return result;
    default:
        (void)close(round->fd);
        return CUDA_SUCCESS;
    }
}

static int play(struct round *round, const char *order, bool imported, struct rv_error *err)
{
    int r;

    round->order = order;
    r = make(round, imported, err);
    for (const char *p = order; r == 0 && *p; p++) {
        CUresult result = give_back(round, *p);

        if (result == CUDA_SUCCESS)
            continue;
        r = failed(round, call_of(*p), result, err);
        if (is_gone(round, result)) {
            round->note = *err;
            r = 0;
        }
    }
    return r;
}

/* Leaves the context current. 0 = not known. */
static uint64_t free_bytes(struct round *round)
{
    size_t bytes = 0, total = 0;
    struct rv_error err;
    int integrated = 1;

    if (round->driver->DeviceGetAttribute(&integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, round->device) != CUDA_SUCCESS ||
        integrated || context_make(round, &err) < 0) /* integrated: it is MemFree, which others move */
        return 0;
    return round->driver->MemGetInfo(&bytes, &total) == CUDA_SUCCESS ? bytes : 0;
}

uint64_t rv_orders_free(struct rv_cuda *cuda, uint32_t ordinal)
{
    struct round round = {.driver = rv_cuda_driver_of(cuda), .order = ""};
    uint64_t bytes;

    if (round.driver->DeviceGet(&round.device, (int)ordinal) != CUDA_SUCCESS)
        return 0;
    bytes = free_bytes(&round);
    if (round.context)
        (void)give_back(&round, 'c');
    return bytes;
}

static int check_functions(const struct rv_cuda_driver *driver, struct rv_error *err)
{
    if (driver->MemAddressReserve && driver->MemAddressFree && driver->MemCreate && driver->MemRelease &&
        driver->MemMap && driver->MemUnmap && driver->MemSetAccess && driver->MemExportToShareableHandle &&
        driver->MemImportFromShareableHandle)
        return 0;
    return rv_error_set(err, ENOSYS, ERROR(UNSUPPORTED), "the driver lacks functions of virtual memory management");
}

/* Every order once. Imported handles are not tried with the context's end: contexts take their time. */
static int play_all(struct round *round, uint32_t *ret_count, struct rv_error *err)
{
    uint32_t count = 0;
    int r = 0;

    for (size_t i = 0; r == 0 && i < COUNT(orders); i++) {
        for (int imported = 0; r == 0 && imported < (strchr(orders[i], 'c') ? 1 : 2); imported++) {
            r = play(round, orders[i], imported, err);
            count++;
        }
    }
    *ret_count = count;
    return r;
}

int rv_orders_vmm(struct rv_cuda *cuda, uint32_t ordinal, uint64_t size, struct rv_answer *answer, struct rv_error *err)
{
    struct round round = {.driver = rv_cuda_driver_of(cuda), .size = (size_t)size, .order = "", .fd = -1};
    uint64_t lost = UINT64_MAX;
    CUresult result;
    int r = check_functions(round.driver, err);

    if (r < 0)
        return r;
    result = round.driver->DeviceGet(&round.device, (int)ordinal);
    if (result != CUDA_SUCCESS)
        return failed(&round, "cuDeviceGet", result, err);
    r = play(&round, orders[0], false, err); /* what the driver makes once is there from now on */
    for (int pass = 0; r == 0 && pass < PASSES && lost >= size; pass++) {
        uint64_t before = free_bytes(&round), after, missing;

        r = play_all(&round, &answer->number, err);
        after = free_bytes(&round);
        missing = after < before ? before - after : 0;
        lost = missing < lost ? missing : lost;
    }
    if (round.context && r == 0) {
        result = give_back(&round, 'c');
        r = result == CUDA_SUCCESS ? 0 : failed(&round, "cuDevicePrimaryCtxRelease", result, err);
    }
    answer->values[0] = lost >= size ? lost : 0;
    memcpy(answer->text, round.note.message, sizeof(answer->text));
    return r;
}

static int close_ipc(struct round *round, struct rv_cuda_memory *memory, struct rv_error *err)
{
    if (memory->owned)
        CALL(MemFree, memory->address);
    else
        CALL(IpcCloseMemHandle, memory->address);
    memory->address = 0;
    CALL(CtxSynchronize);
    return 0;
}

int rv_orders_close_ipc(struct rv_cuda *cuda, uint32_t ordinal, struct rv_cuda_memory *memory, struct rv_error *err)
{
    struct round round = {.driver = rv_cuda_driver_of(cuda), .order = ""};
    CUresult result = round.driver->DeviceGet(&round.device, (int)ordinal);
    int r;

    if (result != CUDA_SUCCESS)
        return failed(&round, "cuDeviceGet", result, err);
    r = context_make(&round, err); /* the process' one, which is open already */
    if (r == 0)
        r = close_ipc(&round, memory, err);
    if (round.context)
        (void)give_back(&round, 'c');
    return r;
}
