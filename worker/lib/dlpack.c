/* Tensors for other libraries: a struct of DLPack that keeps the lease's memory until its taker calls the deleter. */
#include "dlpack.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct package {
    union {
        struct rv_dl_managed plain;
        struct rv_dl_managed_versioned versioned;
    } managed; /* first: what the taker gets is this struct's address */
    struct rv_lease_memory *memory;
    int64_t shape[RV_RANK_MAX], strides[RV_RANK_MAX];
};

/* The bits are rv_dtype_bytes x 8. */
static const struct {
    bool known;
    uint8_t code;
} types[] = {
    [RV_BOOL] = {true, RV_DLPACK_BOOL},
    [RV_U8] = {true, RV_DLPACK_UINT},
    [RV_I8] = {true, RV_DLPACK_INT},
    [RV_F8_E4M3] = {true, RV_DLPACK_F8_E4M3FN},
    [RV_F8_E5M2] = {true, RV_DLPACK_F8_E5M2},
    [RV_U16] = {true, RV_DLPACK_UINT},
    [RV_I16] = {true, RV_DLPACK_INT},
    [RV_F16] = {true, RV_DLPACK_FLOAT},
    [RV_BF16] = {true, RV_DLPACK_BFLOAT},
    [RV_U32] = {true, RV_DLPACK_UINT},
    [RV_I32] = {true, RV_DLPACK_INT},
    [RV_F32] = {true, RV_DLPACK_FLOAT},
    [RV_U64] = {true, RV_DLPACK_UINT},
    [RV_I64] = {true, RV_DLPACK_INT},
    [RV_F64] = {true, RV_DLPACK_FLOAT},
    [RV_C64] = {true, RV_DLPACK_COMPLEX},
    [RV_F8_E8M0] = {true, RV_DLPACK_F8_E8M0FNU},
    [RV_F8_E4M3FNUZ] = {true, RV_DLPACK_F8_E4M3FNUZ},
    [RV_F8_E5M2FNUZ] = {true, RV_DLPACK_F8_E5M2FNUZ},
    [RV_BLOB] = {true, RV_DLPACK_UINT},
};
_Static_assert(sizeof(types) / sizeof(types[0]) == RV_INDEX_DTYPE_COUNT, "every dtype has its row");

/* Any thread, any time: also after rv_detach, after rv_disconnect, and in a child after fork. */
static void delete_package(struct package *package)
{
    rv_lease_memory_unref(package->memory);
    free(package);
}

static void delete_plain(struct rv_dl_managed *self)
{
    if (self)
        delete_package(self->manager_ctx);
}

static void delete_versioned(struct rv_dl_managed_versioned *self)
{
    if (self)
        delete_package(self->manager_ctx);
}

static int find_type(const struct rv_tensor *tensor, unsigned flags, struct rv_dl_data_type *ret_type,
                     struct rv_error *err)
{
    uint32_t dtype = (uint32_t)tensor->dtype;

    *ret_type = (struct rv_dl_data_type){.code = RV_DLPACK_UINT, .bits = 8, .lanes = 1};
    if (flags & RV_DLPACK_BYTES)
        return 0;
    if (dtype >= sizeof(types) / sizeof(types[0]) || !types[dtype].known)
        return rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED), "DLPack has no dtype for the tensor %.128s",
                            tensor->name);
    ret_type->code = types[dtype].code;
    ret_type->bits = (uint8_t)(rv_dtype_bytes(tensor->dtype) * 8);
    return 0;
}

/* Shape and strides, row-major. As bytes, the last dimension has them all; a scalar of several bytes gets one. */
static int fill_shape(struct package *package, const struct rv_tensor *tensor, unsigned flags,
                      struct rv_dl_tensor *tensor_out, struct rv_error *err)
{
    uint64_t size = flags & RV_DLPACK_BYTES ? rv_dtype_bytes(tensor->dtype) : 1, stride = 1;
    uint32_t rank = tensor->rank;

    for (uint32_t i = 0; i < rank; i++) {
        uint64_t n = tensor->shape[i];

        if ((i + 1 == rank && __builtin_mul_overflow(n, size, &n)) || n > INT64_MAX)
            return rv_error_set(err, EOPNOTSUPP, ERROR(UNSUPPORTED),
                                "a dimension of the tensor %.128s is beyond DLPack's 63 bits", tensor->name);
        package->shape[i] = (int64_t)n;
    }
    if (rank == 0 && size > 1)
        package->shape[rank++] = (int64_t)size;
    for (uint32_t i = rank; i-- > 0;) { /* of an empty tensor they may be cut: nobody steps by them */
        package->strides[i] = (int64_t)stride;
        if (package->shape[i] > 0 &&
            (__builtin_mul_overflow(stride, (uint64_t)package->shape[i], &stride) || stride > INT64_MAX))
            stride = INT64_MAX;
    }
    tensor_out->ndim = (int32_t)rank;
    tensor_out->shape = package->shape;
    tensor_out->strides = package->strides;
    return 0;
}

static int fill(struct package *package, const struct rv_lease *lease, const struct rv_tensor *tensor, unsigned flags,
                struct rv_error *err)
{
    bool is_versioned = flags & RV_DLPACK_VERSIONED;
    struct rv_dl_tensor *out;
    int r;

    if (is_versioned) {
        struct rv_dl_managed_versioned *managed = &package->managed.versioned;

        managed->major = RV_DLPACK_MAJOR;
        managed->minor = RV_DLPACK_MINOR;
        managed->manager_ctx = package;
        managed->deleter = delete_versioned;
        managed->flags = lease->mapping == RV_MAPPING_PRIVATE ? 0 : RV_DLPACK_READ_ONLY;
        out = &managed->dl_tensor;
    } else {
        package->managed.plain.manager_ctx = package;
        package->managed.plain.deleter = delete_plain;
        out = &package->managed.plain.dl_tensor;
    }
    out->data = tensor->length > 0 ? tensor->data : NULL;
    out->device.device_type = lease->memory->gpu ? RV_DLPACK_CUDA : RV_DLPACK_CPU;
    out->device.device_id = lease->memory->gpu ? rv_gpu_ordinal(lease->memory->gpu) : 0;
    r = find_type(tensor, flags, &out->dtype, err);
    return r < 0 ? r : fill_shape(package, tensor, flags, out, err);
}

int rv_tensor_dlpack(struct rv_lease *lease, const char *name, unsigned flags, void **ret_managed,
                     struct rv_failure *err)
{
    struct rv_error error = {0};
    struct package *package = NULL;
    struct rv_tensor tensor;
    int r = ret_managed && (flags & ~(RV_DLPACK_VERSIONED | RV_DLPACK_BYTES)) == 0
                ? rv_tensor_find(lease, name, &tensor)
                : -EINVAL;

    if (r == -ENOENT)
        rv_error_set(&error, ENOENT, ERROR(BAD_REQUEST), "the model %.128s has no tensor of that name", lease->model);
    else if (r == -EPERM)
        rv_error_set(&error, EPERM, ERROR(NOT_PERMITTED), "a lease cannot be used in a child after fork");
    else if (r < 0)
        rv_error_set(&error, EINVAL, ERROR(BAD_REQUEST), "rv_tensor_dlpack: no lease, no name, or unknown flags");
    if (r < 0)
        return rv_failure_from(err, &error, r);
    package = calloc(1, sizeof(*package));
    if (!package)
        r = rv_error_set(&error, ENOMEM, ERROR(NO_MEMORY), "no memory for a DLPack tensor");
    else
        r = fill(package, lease, &tensor, flags, &error);
    if (r < 0) {
        free(package);
        return rv_failure_from(err, &error, r);
    }
    rv_lease_memory_ref(lease->memory);
    package->memory = lease->memory;
    *ret_managed = &package->managed;
    return rv_failure_from(err, &error, 0);
}

uint64_t rv_lease_dlpack_count(const struct rv_lease *lease)
{
    return rv_lease_usable(lease) == 0 ? atomic_load(&lease->memory->refs) - 1 : 0; /* one is the lease's own */
}
