/*
 * For the Python package only, and not in resvisor.h: the destructor of its DLPack capsules. It must be C, since it may
 * run when the interpreter's own functions for callbacks are gone, and this library links with no Python: so the
 * package hands over the two functions of the interpreter that it needs.
 *
 * The interpreter calls it with its lock held. A capsule that was taken has another name by then, and its taker calls
 * the deleter; one that nobody took is ended here.
 */
#include <stddef.h>

#include "dlpack.h"
#include "internal.h"

static int (*capsule_is_valid)(void *capsule, const char *name);  /* PyCapsule_IsValid */
static void *(*capsule_pointer)(void *capsule, const char *name); /* PyCapsule_GetPointer */

RV_API void rv_capsule_setup(int (*is_valid)(void *, const char *), void *(*get_pointer)(void *, const char *));
RV_API void rv_capsule_end(void *capsule);
RV_API void rv_capsule_drop(void *managed, unsigned flags);

/* Before the first capsule. Again is fine: it is the same interpreter. */
void rv_capsule_setup(int (*is_valid)(void *, const char *), void *(*get_pointer)(void *, const char *))
{
    capsule_is_valid = is_valid;
    capsule_pointer = get_pointer;
}

/* Ends a tensor that no capsule could be made for. flags: as for rv_tensor_dlpack. */
void rv_capsule_drop(void *managed, unsigned flags)
{
    struct rv_dl_managed_versioned *versioned = managed;
    struct rv_dl_managed *plain = managed;

    if (flags & RV_DLPACK_VERSIONED)
        versioned->deleter(versioned);
    else
        plain->deleter(plain);
}

void rv_capsule_end(void *capsule)
{
    if (capsule_is_valid(capsule, RV_DLPACK_CAPSULE_VERSIONED))
        rv_capsule_drop(capsule_pointer(capsule, RV_DLPACK_CAPSULE_VERSIONED), RV_DLPACK_VERSIONED);
    else if (capsule_is_valid(capsule, RV_DLPACK_CAPSULE))
        rv_capsule_drop(capsule_pointer(capsule, RV_DLPACK_CAPSULE), 0);
}
