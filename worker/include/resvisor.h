/*
 * libresvisor: use model weights that resvisor keeps in memory, and be a worker of it.
 *
 * A process connects, attaches a model (a lease), and reads its tensors in place: nothing is copied, and nothing is
 * read from disk when the model is resident. The lease ends with rv_detach, with rv_disconnect, or with the process,
 * however that ends.
 *
 * Ownership. What a function returns through a `ret_` pointer is the caller's and has its own ending function. Names,
 * shapes and pointers of a tensor belong to the lease and are valid until rv_detach.
 *
 * Errors. Functions return 0 or a negative errno, and fill *err (may be NULL) with a code of the error table
 * (docs/errors.md), what happened, and what to do. Nothing is written to ret_ arguments on failure. The library prints
 * nothing, installs no signal handler, and changes nothing of the process.
 *
 * Threads. One connection may be used by several threads; calls that talk to the supervisor wait for each other.
 * Reading tensors of a lease needs no lock. rv_detach and rv_disconnect must not run while another thread still uses
 * what they end. After fork without exec the child must not use a connection or a lease of its parent: calls return
 * -EPERM.
 */
#ifndef RESVISOR_H
#define RESVISOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RESVISOR_VERSION_MAJOR 0
#define RESVISOR_VERSION_MINOR 1
#define RESVISOR_VERSION_PATCH 0

#if defined(RV_BUILDING_LIBRARY)
#define RV_API __attribute__((visibility("default")))
#else
#define RV_API
#endif

struct rv_connection;
struct rv_lease;
struct rv_worker;
struct rv_job;

/* What went wrong. code is resvisor.v1.ErrorCode of rpc.proto; 0 = nothing. */
struct rv_failure {
    int code;
    char message[512]; /* what happened, to what */
    char remedy[256];  /* what to do; may be empty */
};

/* ---- connections ------------------------------------------------------------------------------------------------ */

/*
 * Connects to the supervisor's local socket. socket_path NULL = $RESVISOR_SOCKET, else
 * $RESVISOR_RUNTIME_DIR/control/resvisor.sock, else /run/resvisor/control/resvisor.sock as root, else
 * $XDG_RUNTIME_DIR/resvisor/control/resvisor.sock, else /tmp/resvisor-UID/control/resvisor.sock if that directory is
 * this user's and nobody else may write to it. timeout_ms: for the handshake; negative = no limit. -ECONNREFUSED /
 * -ENOENT = not running; -EACCES = not admitted; -ETIMEDOUT; -EPROTO = other version.
 */
RV_API int rv_connect(const char *socket_path, int timeout_ms, struct rv_connection **ret_connection,
                      struct rv_failure *err);

/* Ends the connection; its leases end with it (their memory stays mapped until rv_detach). NULL is fine. */
RV_API void rv_disconnect(struct rv_connection *connection);

/* The connection ends when nothing made with it is left: its leases, and what rv_tensor_dlpack made of them. Until then
 * the supervisor counts them as used. For the place of rv_disconnect; the pointer is dead afterwards. NULL is fine. */
RV_API void rv_connection_release(struct rv_connection *connection);

/* ---- leases ----------------------------------------------------------------------------------------------------- */

enum rv_mapping {
    RV_MAPPING_AUTO = 0,             /* PRIVATE, or SHARED_READ_ONLY where the model lies in huge pages */
    RV_MAPPING_PRIVATE = 1,          /* writable: a write makes a private copy of the page; the pool never changes */
    RV_MAPPING_SHARED_READ_ONLY = 2, /* a write is SIGSEGV */
};

struct rv_attach_options {
    size_t struct_size; /* sizeof(struct rv_attach_options) */
    enum rv_mapping mapping;
    int timeout_ms; /* for everything, loading included; negative = no limit; 0 = no limit too */
    int model_fd;   /* -1, or an open descriptor of the model file (read-only is enough): then `model` is only a
                       name for people, and the path rules of the supervisor do not apply. Stays the caller's. */
    /* Called now and then while the model is being loaded, on the calling thread. Return false to give up (-ECANCELED).
     * bytes_total is 0 while unknown. May be NULL. */
    bool (*progress)(uint64_t bytes_done, uint64_t bytes_total, void *context);
    void *context;
    /* Where the model shall lie: "host", "cuda:0" (resvisor's own name of the device, whatever CUDA_VISIBLE_DEVICES
     * makes of its number here), or "GPU-" and a uuid. NULL: in a worker its type's device, elsewhere "host". */
    const char *device;
};
#define RV_ATTACH_OPTIONS_INIT                                                      \
    {                                                                               \
        sizeof(struct rv_attach_options), RV_MAPPING_AUTO, -1, -1, NULL, NULL, NULL \
    }

/*
 * Takes a lease on a model and maps it. model: a configured name, or an absolute path inside a configured model folder.
 * Waits for the load if the model is not resident: one load however many ask. options NULL = the defaults.
 * -ENOENT no such model or file; -EACCES path not admitted; -EBADMSG malformed file; -ENOSPC over the budget; -ENOMEM;
 * -ETIMEDOUT; -ECANCELED; -EOPNOTSUPP private mapping of huge pages; -ECONNRESET supervisor gone; -ENODEV no such
 * device, none that this process sees, or one that is lost.
 *
 * On a device the lease is mapped in its primary context, which torch and the CUDA runtime use too, and is read-only
 * there where the backend can (cuda-vmm): a store by a kernel is then a fault that ends this process' context.
 * RV_MAPPING_PRIVATE is refused (-EOPNOTSUPP): a device has no copy on write. AUTO gives SHARED_READ_ONLY.
 */
RV_API int rv_attach(struct rv_connection *connection, const char *model, const struct rv_attach_options *options,
                     struct rv_lease **ret_lease, struct rv_failure *err);

/* Unmaps and gives the lease back, when the last DLPack tensor made from it is gone too. NULL is fine. The lease's own
 * pointers are dead afterwards. On a device: waits for its work, and is safe after the context or the driver has gone.
 */
RV_API void rv_detach(struct rv_lease *lease);

/* True = resvisor asked for the memory back (it is about to be freed), or memory that only lives with resvisor
 * (cuda-ipc) has lost it: detach as soon as nothing uses it. A client's call looks at what has come on the connection;
 * it does not wait. */
RV_API bool rv_lease_is_revoked(const struct rv_lease *lease);

struct rv_lease_info {
    size_t struct_size; /* set by the caller to sizeof(struct rv_lease_info) */
    const char *model;  /* name as the supervisor knows it */
    uint64_t lease_id;
    uint64_t generation;
    uint64_t bytes; /* mapped */
    uint64_t tensors;
    enum rv_mapping mapping;
    bool waited;         /* rv_attach waited for a load */
    uint64_t load_us;    /* how long, in microseconds */
    uint64_t read_bytes; /* what that load read from the file; 0 = the model was resident */
    const char *device;  /* "host", "cuda:0": resvisor's name */
    const char *backend; /* "memfd", "cuda-vmm", "cuda-ipc" */
    /* As DLPack has it: 1 = CPU, 2 = CUDA. With backend memfd on a device that shares the machine's memory it is 2, and
     * the same pointers serve both. */
    int32_t device_type;
    int32_t device_id; /* in this process; 0 for the CPU */
};
RV_API int rv_lease_get_info(const struct rv_lease *lease, struct rv_lease_info *info);

/*
 * Bytes of the lease's pages that this process has copied by writing to them (from `Anonymous:` in /proc/self/smaps).
 * Costs a walk over the page tables: for reports, not for loops. -EOPNOTSUPP where /proc is not mounted.
 */
RV_API int rv_lease_copied_bytes(const struct rv_lease *lease, uint64_t *ret_bytes);

/*
 * Computes the XXH3-128 of every tensor of the pool's own memory (not of private copies) and compares with the index.
 * 0 = all equal; -EBADMSG = *ret_tensor (may be NULL) is the first that differs. Reads every byte.
 */
RV_API int rv_lease_verify(const struct rv_lease *lease, const char **ret_tensor);

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

enum rv_dtype {
    RV_DTYPE_NONE = 0,
    RV_BOOL = 1,
    RV_U8 = 2,
    RV_I8 = 3,
    RV_F8_E4M3 = 4,
    RV_F8_E5M2 = 5,
    RV_U16 = 6,
    RV_I16 = 7,
    RV_F16 = 8,
    RV_BF16 = 9,
    RV_U32 = 10,
    RV_I32 = 11,
    RV_F32 = 12,
    RV_U64 = 13,
    RV_I64 = 14,
    RV_F64 = 15,
    RV_C64 = 16,
    RV_F8_E8M0 = 17,
    RV_F8_E4M3FNUZ = 18,
    RV_F8_E5M2FNUZ = 19,
    RV_BLOB = 20 /* a file of another format, whole: shape = {bytes} */
};

#define RV_MAX_RANK 8

struct rv_tensor {
    const char *name;
    enum rv_dtype dtype;
    uint32_t rank;         /* 0 = scalar */
    const uint64_t *shape; /* rank numbers of elements, outermost first; row-major, contiguous */
    void *data;            /* 256-byte aligned; writable only under RV_MAPPING_PRIVATE. A device pointer, which the CPU
                              cannot read, if the lease's backend is cuda-vmm or cuda-ipc */
    uint64_t length;       /* bytes */
    const uint8_t *digest; /* 16 bytes, XXH3-128 in canonical (big endian) form */
};

/* Fills *ret_tensor. -ENOENT = no tensor of that name. No scan: cost does not depend on the number of tensors. */
RV_API int rv_tensor_find(const struct rv_lease *lease, const char *name, struct rv_tensor *ret_tensor);

RV_API uint64_t rv_tensor_count(const struct rv_lease *lease);

/* Tensor i, 0 <= i < rv_tensor_count, in the order of the file's data. -ENOENT = out of range. */
RV_API int rv_tensor_at(const struct rv_lease *lease, uint64_t i, struct rv_tensor *ret_tensor);

/*
 * Copies bytes of a tensor to ordinary memory, wherever it lies: for buffers and small tensors that the CPU needs.
 * offset + length must lie within the tensor. -ENOENT; -ERANGE; -EIO the device's driver failed.
 */
RV_API int rv_tensor_read(const struct rv_lease *lease, const char *name, uint64_t offset, void *buffer,
                          uint64_t length, struct rv_failure *err);

#define RV_DLPACK_VERSIONED 1u /* DLManagedTensorVersioned of DLPack 1.1; otherwise DLManagedTensor */
#define RV_DLPACK_BYTES                                                                      \
    2u /* dtype uint8, with the last dimension times the element's size: for 8-bit floats. A \
          scalar of several bytes gets one dimension */

/*
 * The tensor for other libraries: *ret_managed is a DLManagedTensor or DLManagedTensorVersioned of dlpack.h, in place,
 * which the taker ends by its own `deleter` (a C function of this library, any thread). It keeps the lease's memory.
 * The versioned form has the read-only flag unless the mapping is private: a write would fault, or (cuda-ipc) be seen
 * by everybody. -ENOENT; -EOPNOTSUPP: DLPack has no such dtype.
 */
RV_API int rv_tensor_dlpack(struct rv_lease *lease, const char *name, unsigned flags, void **ret_managed,
                            struct rv_failure *err);

/* How many tensors that rv_tensor_dlpack made of this lease are alive: after rv_detach, they are what keeps it. */
RV_API uint64_t rv_lease_dlpack_count(const struct rv_lease *lease);

/* Bytes of one element; 0 = unknown. */
RV_API uint32_t rv_dtype_bytes(enum rv_dtype dtype);

/* The name in safetensors files, such as "BF16"; NULL = unknown. Static. */
RV_API const char *rv_dtype_text(enum rv_dtype dtype);

/* The file's __metadata__ as JSON text, NUL-terminated; NULL = none. Belongs to the lease. */
RV_API const char *rv_lease_metadata(const struct rv_lease *lease);

/* ---- devices ---------------------------------------------------------------------------------------------------- */

/*
 * A worker or client tells the supervisor that a device failed it: error is a CUresult (or cudaError_t) such as 719,
 * what the call. The supervisor looks at the device itself and marks it as lost if that fails too. Never blocks. lease:
 * one on that device. (rv_attach, rv_tensor_read and rv_lease_verify report by themselves what they fail with.)
 */
RV_API void rv_device_report(struct rv_connection *connection, const struct rv_lease *lease, int error,
                             const char *what);

/* ---- workers ---------------------------------------------------------------------------------------------------- */

/*
 * A worker is started by the supervisor (RESVISOR_CONTROL_FD in its environment). rv_worker_open starts one service
 * thread that answers pings and receives jobs and cancels; the caller's thread runs the jobs.
 *
 *     rv_worker_open(&worker, &err);
 *     rv_attach(rv_worker_connection(worker), ...);   // weights first
 *     rv_worker_ready(worker, "...");                 // from now on jobs arrive
 *     while (rv_worker_next(worker, &job) > 0) { ...; rv_job_finish(job) or rv_job_fail(job, ...); }
 *     rv_worker_close(worker);
 */
RV_API int rv_worker_open(struct rv_worker **ret_worker, struct rv_failure *err);
RV_API void rv_worker_close(struct rv_worker *worker);

/* For rv_attach. Belongs to the worker; never rv_disconnect it. */
RV_API struct rv_connection *rv_worker_connection(struct rv_worker *worker);

/* This worker's id ("image/0") and workflow type ("image"). Belong to the worker. */
RV_API const char *rv_worker_id(const struct rv_worker *worker);
RV_API const char *rv_worker_type(const struct rv_worker *worker);

/* Says that the worker can take jobs. detail: for people, may be NULL; at most 1,023 bytes are shown. Again: the detail
 * has changed, nothing else. */
RV_API int rv_worker_ready(struct rv_worker *worker, const char *detail, struct rv_failure *err);

/* Waits for the next job: 1 = *ret_job is there; 0 = drain or stop: leave the loop and exit 0; negative errno. */
RV_API int rv_worker_next(struct rv_worker *worker, struct rv_job **ret_job);

/* Texts belong to the job. Any thread, until rv_job_finish or rv_job_fail. */
RV_API const char *rv_job_id(const struct rv_job *job);
RV_API const char *rv_job_model(const struct rv_job *job); /* may be empty */
RV_API const char *rv_job_param(const struct rv_job *job, const char *key, const char *fallback);
RV_API uint32_t rv_job_param_count(const struct rv_job *job);
RV_API void rv_job_param_at(const struct rv_job *job, uint32_t i, const char **ret_key, const char **ret_value);
RV_API const void *rv_job_payload(const struct rv_job *job, size_t *ret_size);

/*
 * Says how far the job is; also the sign of life that `stall_timeout` waits for. Cheap: at most one message per 50 ms
 * is sent. total 0 = unknown; text may be NULL. Returns false when the job was cancelled: then stop and call
 * rv_job_fail.
 */
RV_API bool rv_job_progress(struct rv_job *job, uint64_t done, uint64_t total, const char *text);
RV_API bool rv_job_cancelled(const struct rv_job *job);

/*
 * Adds an output (at most 8). data is copied into sealed memory, size <= 4 GiB. name: a file name, content_type: a MIME
 * type. -ENOSPC when memory is full.
 */
RV_API int rv_job_add_output(struct rv_job *job, const char *name, const char *content_type, const void *data,
                             uint64_t size, struct rv_failure *err);

/* Reports what this job waited for weights and read from files, in addition to what rv_attach counted itself. */
RV_API void rv_job_count_load(struct rv_job *job, uint64_t load_us, uint64_t read_bytes);

/*
 * End the job and free it. The result is kept in this process until the router acknowledges it (64 results and 2 GiB of
 * outputs at most; the oldest go first). -ENOMEM = the end could not be written down: the job lives on.
 */
RV_API int rv_job_finish(struct rv_job *job);
/*
 * code 0 = ERROR_JOB_FAILED, or ERROR_CANCELLED if the job was cancelled; ERROR_SHUTTING_DOWN is taken as 0. Outputs
 * that were added before are the failed job's.
 */
RV_API int rv_job_fail(struct rv_job *job, int code, const char *message);

#ifdef __cplusplus
}
#endif
#endif
