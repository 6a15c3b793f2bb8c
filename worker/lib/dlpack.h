/*
 * The structs of DLPack 1.1 that this library makes, declared here afresh: layout, field names and numbers are those of
 * include/dlpack/dlpack.h in github.com/dmlc/dlpack. The taker of a tensor has its own declaration of the same.
 */
#ifndef RV_LIB_DLPACK_H
#define RV_LIB_DLPACK_H

#include <stddef.h>
#include <stdint.h>

#define RV_DLPACK_MAJOR 1u
#define RV_DLPACK_MINOR 1u

enum { RV_DLPACK_CPU = 1, RV_DLPACK_CUDA = 2 }; /* DLDeviceType */

/* Names of capsules that nobody has taken yet, by the Python specification of DLPack. */
#define RV_DLPACK_CAPSULE "dltensor"
#define RV_DLPACK_CAPSULE_VERSIONED "dltensor_versioned"

#define RV_DLPACK_READ_ONLY 1u /* DLPACK_FLAG_BITMASK_READ_ONLY */

/* DLDataTypeCode; those that a tensor file can have. */
enum rv_dlpack_code {
    RV_DLPACK_INT = 0,
    RV_DLPACK_UINT = 1,
    RV_DLPACK_FLOAT = 2,
    RV_DLPACK_BFLOAT = 4,
    RV_DLPACK_COMPLEX = 5,
    RV_DLPACK_BOOL = 6,
    RV_DLPACK_F8_E4M3FN = 10,
    RV_DLPACK_F8_E4M3FNUZ = 11,
    RV_DLPACK_F8_E5M2 = 12,
    RV_DLPACK_F8_E5M2FNUZ = 13,
    RV_DLPACK_F8_E8M0FNU = 14,
};

struct rv_dl_device {
    int32_t device_type;
    int32_t device_id;
};

struct rv_dl_data_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct rv_dl_tensor {
    void *data;
    struct rv_dl_device device;
    int32_t ndim;
    struct rv_dl_data_type dtype;
    int64_t *shape;   /* ndim numbers of elements */
    int64_t *strides; /* ndim numbers of elements; since 1.2 not NULL */
    uint64_t byte_offset;
};

struct rv_dl_managed {
    struct rv_dl_tensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct rv_dl_managed *self);
};

struct rv_dl_managed_versioned {
    uint32_t major, minor;
    void *manager_ctx;
    void (*deleter)(struct rv_dl_managed_versioned *self);
    uint64_t flags;
    struct rv_dl_tensor dl_tensor;
};

#if UINTPTR_MAX == UINT64_MAX
_Static_assert(offsetof(struct rv_dl_tensor, dtype) == 20 && offsetof(struct rv_dl_tensor, shape) == 24 &&
                   sizeof(struct rv_dl_tensor) == 48 && sizeof(struct rv_dl_managed) == 64 &&
                   offsetof(struct rv_dl_managed_versioned, flags) == 24 &&
                   offsetof(struct rv_dl_managed_versioned, dl_tensor) == 32,
               "the layout is DLPack's");
#endif

#endif
