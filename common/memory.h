/*
 * Memory backends: where arenas lie and how they are shared. One row per backend; the rest of resvisor knows
 * only the row: memfd, cuda-vmm, cuda-ipc.
 *
 * An arena is one allocation behind one descriptor. The loader creates, fills and seals it; the supervisor checks
 * and holds the descriptor and never maps it; clients map it. Nothing here logs. Thread-safe: no shared state.
 */
#ifndef RV_MEMORY_H
#define RV_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "error.h"

enum rv_backend_id { RV_BACKEND_NONE = 0, RV_BACKEND_MEMFD = 1, RV_BACKEND_CUDA_VMM = 2, RV_BACKEND_CUDA_IPC = 3 };

#define RV_IPC_HANDLE_SIZE 64u  /* CU_IPC_HANDLE_SIZE of cuda.h */
#define RV_DEVICE_UUID_SIZE 16u /* CUuuid of cuda.h */
#define RV_DEVICE_UUID_TEXT 41  /* "GPU-" and 36 characters, NUL */

enum rv_huge_pages { RV_HUGE_OFF = 0, RV_HUGE_AUTO = 1, RV_HUGE_ONLY = 2 };

enum rv_map_mode {
    RV_MAP_PRIVATE = 0, /* copy on write: writes are the process' own copies of the pages */
    RV_MAP_SHARED = 1,  /* read-only: a write faults */
};

/* What a holder knows of an arena; the descriptor travels beside it. */
struct rv_arena {
    uint64_t size;                      /* bytes, a multiple of page_size */
    uint32_t page_size;                 /* bytes: 4096, the huge page's, or the device's granularity */
    uint32_t backend;                   /* enum rv_backend_id */
    uint64_t allocation;                /* cuda-ipc: the holder's name for it */
    uint8_t handle[RV_IPC_HANDLE_SIZE]; /* cuda-ipc: what importers open; it has no descriptor */
};

/*
 * The functions that touch a device's memory are not here: common/cuda/rv_cuda.h, for the loader, resvisor-device and
 * libresvisor. So create, seal and map are NULL for the cuda backends.
 */
struct rv_backend {
    const char *name;
    enum rv_backend_id id;
    bool has_descriptor; /* one descriptor per arena travels; else arena->handle */
    bool on_device;      /* its bytes cannot be read by the CPU */

    /*
     * Loader: creates an empty arena of `size` bytes (rounded up to pages) with nothing allocated yet. On success
     * *ret_arena is filled and the descriptor (O_CLOEXEC, the caller's) is returned; else a negative errno.
     */
    int (*create)(const char *label, uint64_t size, enum rv_huge_pages huge, struct rv_arena *ret_arena,
                  struct rv_error *err);

    /* Loader: makes it immutable for everybody and for ever. No mapping may exist. -EBUSY = something still does. */
    int (*seal)(int fd, struct rv_error *err);

    /* Receiver: the descriptor really is a sealed arena of that description. Trusts nothing. 0 or negative errno. For
     * the cuda backends only what can be said without the driver: fd is a descriptor of a device (cuda-vmm), or -1 with
     * a handle that is not all zeros (cuda-ipc). */
    int (*check)(int fd, const struct rv_arena *arena, struct rv_error *err);

    /*
     * Client: maps the whole arena. RV_MAP_PRIVATE is refused for huge pages (-EOPNOTSUPP): a copy of a page without
     * a free huge page would be SIGBUS. The mapping is the caller's; munmap(address, arena->size) ends it.
     */
    int (*map)(int fd, const struct rv_arena *arena, enum rv_map_mode mode, void **ret_address, struct rv_error *err);
};

/* NULL = unknown id. */
const struct rv_backend *rv_backend_by_id(uint32_t id);

/* NULL = unknown name. */
const struct rv_backend *rv_backend_by_name(const char *name);

/* A sealed memfd with a copy of data (a spilled frame, an index): descriptor or negative errno. */
int rv_sealed_create(const char *label, const void *data, uint64_t size);

/* Like check of the memfd backend for any sealed memfd of exactly `size` bytes (page rounding not needed). */
int rv_sealed_check(int fd, uint64_t size);

/* memfd_create with MFD_CLOEXEC|MFD_ALLOW_SEALING, MFD_NOEXEC_SEAL where the kernel knows it, and extra flags. */
int rv_memfd_create(const char *label, unsigned extra_flags);

/* Adds WRITE|SHRINK|GROW|SEAL, waiting up to 1 s for the last reference of a finished transfer (EBUSY). */
int rv_memfd_seal(int fd);

/* "GPU-xxxxxxxx-xxxx-…" as nvidia-smi writes it. Returns buffer. */
char *rv_device_uuid_text(const uint8_t uuid[RV_DEVICE_UUID_SIZE], char buffer[RV_DEVICE_UUID_TEXT]);

#endif
