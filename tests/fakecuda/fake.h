/*
 * What the files of the double share. Rules and configuration: fakecuda.h.
 *
 * One mutex, taken by fake_enter and given back by fake_leave, guards everything; workers of streams drop it while
 * they move bytes. Nothing of a process survives fork: there every call answers CUDA_ERROR_NOT_INITIALIZED.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config.h"
#include "cuda/driver.h"
#include "state.h"

#define FAKE_GRANULARITY (2ull << 20) /* bytes; cuda.md 2.2 */
#define FAKE_PAGE 4096ull
#define FAKE_CHUNK 512ull           /* bytes; small allocations begin at multiples */
#define FAKE_SMALL_MAX (1ull << 20) /* bytes; up to here cuMemAlloc puts several into one block */

enum fake_function {
#define X(name, version, needed) FN_##name,
    RV_CUDA_FUNCTIONS(X)
#undef X
        FN_COUNT
};

/* The implementations: fake_Init and so on, with the types of cudaTypedefs.h. */
#define X(name, version, needed) __typeof__(*(PFN_cu##name##_v##version)0) fake_##name;
RV_CUDA_FUNCTIONS(X)
#undef X

/* ---- core.c ----------------------------------------------------------------------------------------------------- */

#define FAKE_ANYTIME 0x0 /* needs only cuInit */
#define FAKE_UNREADY 0x1 /* works before cuInit too */
#define FAKE_CONTEXT 0x2 /* needs a healthy current context */

/* Locks when it returns CUDA_SUCCESS; then fake_leave must follow. */
CUresult fake_enter(enum fake_function function, int needs);
CUresult fake_leave(CUresult result); /* returns result */
bool fake_damaged(void); /* a fault damages the copy of the call that this thread is in */
void fake_wait(void);                 /* until something changes; the lock is held again afterwards */
void fake_changed(void);
void fake_lock(void);
void fake_unlock(void);
const struct fake_config *fake_config(void);

/* ---- device.c --------------------------------------------------------------------------------------------------- */

/* Ordinal of this process (CUDA_VISIBLE_DEVICES) -> index into the configuration, or -1. */
int fake_gpu_of(CUdevice device);
int fake_ordinal_of(unsigned gpu); /* -1 = not visible here */
int fake_gpu_by_uuid(const uint8_t uuid[16]);
bool fake_device_init(void); /* false = no device is visible */
/* CUDA_SUCCESS, or the error that sticks to this device in this process. */
CUresult fake_gpu_health(unsigned gpu);
void fake_gpu_poison(unsigned gpu, CUresult error);
bool fake_gpu_attribute(unsigned gpu, int attribute);

/* ---- context.c -------------------------------------------------------------------------------------------------- */

struct CUctx_st {
    unsigned gpu;
    bool alive;
    uint64_t sequence; /* of operations, over all streams */
    struct CUstream_st *streams;
    struct CUstream_st *standard; /* the legacy default stream; made when first used */
    struct CUevent_st *events;
    int ledger;
    struct CUctx_st *next; /* all that there ever were: handles of dead ones are recognised */
};
struct CUctx_st *fake_current(void);

/* ---- memory.c --------------------------------------------------------------------------------------------------- */

enum fake_kind { FAKE_VMM, FAKE_ALLOC, FAKE_IPC };

/* Physical memory: a memfd whose last page is the control page. */
struct fake_memory {
    unsigned refs;
    int fd, ledger; /* ledger: its record in the state folder, locked while any descriptor of it lives; -1 = none */
    enum fake_kind kind;
    unsigned gpu;
    uint64_t token, size;
    uint64_t handle_types;
    int exporter; /* pidfd of the process whose end ends this memory; -1 = none */
    bool charged; /* without a state folder: counted as in use */
    bool small;   /* FAKE_ALLOC: a block of small allocations */
};

/* Last page of every memfd. */
struct fake_control {
    uint64_t magic, token;
    uint64_t freed; /* the exporter has freed it */
};
#define FAKE_MAGIC 0x3141434543414bull

/* An address that cuIpcOpenMemHandle has given, and how often. */
struct fake_open {
    uint64_t address;
    unsigned count;
    struct fake_open *next;
};

/* A mapped range of device addresses. */
struct fake_range {
    uint64_t address, size;
    struct fake_memory *memory;
    uint64_t offset; /* into memory */
    uint8_t access[FAKE_GPUS_MAX];
    struct CUctx_st *context; /* FAKE_ALLOC, FAKE_IPC: whose it is */
    struct fake_open *opens;  /* FAKE_IPC */
    struct fake_range *next;
};

CUresult fake_memory_create(unsigned gpu, uint64_t size, enum fake_kind kind, struct fake_memory **ret_memory);
struct fake_memory *fake_memory_ref(struct fake_memory *memory);
void fake_memory_unref(struct fake_memory *memory);
bool fake_memory_gone(const struct fake_memory *memory); /* IPC: exporter dead, or freed there */
void fake_memory_mark_freed(struct fake_memory *memory);

/* Addresses that nobody can dereference; 0 = none. alignment is a power of two. */
uint64_t fake_address_reserve(uint64_t size, uint64_t alignment, uint64_t hint);
void fake_address_free(uint64_t address, uint64_t size);

/* Takes over the caller's reference to memory. NULL = no memory left. */
struct fake_range *fake_range_add(uint64_t address, uint64_t size, struct fake_memory *memory, uint64_t offset);
void fake_range_remove(struct fake_range *range);
void fake_range_free(struct fake_range *range);        /* and its addresses */
struct fake_range *fake_range_find(uint64_t address);  /* the range that holds address */
struct fake_range *fake_range_first(uint64_t address); /* the first that ends after address */
void fake_ranges_of_context_free(struct CUctx_st *context);
bool fake_host_pinned(const void *host, uint64_t size);

/* Is this a range that a copy of that length may name? Only what the driver knows at the time of the call. */
CUresult fake_copy_check(const struct CUctx_st *context, uint64_t address, uint64_t length);
/* Moves bytes; called with the lock held, which is dropped meanwhile. host NULL: set to byte. */
enum fake_way { FAKE_TO_DEVICE, FAKE_TO_HOST, FAKE_SET };
CUresult fake_copy(struct CUctx_st *context, enum fake_way way, uint64_t address, void *host, uint8_t byte,
                   uint64_t length);

/* ---- stream.c --------------------------------------------------------------------------------------------------- */

/* Waits until nothing of the context is under way. */
void fake_context_drain(struct CUctx_st *context);
void fake_streams_end(struct CUctx_st *context);

#endif
