"""DLPack capsules: of host memory those that numpy does not export, bfloat16 and the 8-bit floats; of a device's memory, all.

Of host memory numpy makes the capsule, over unsigned integers of the same size, so that its deleter is numpy's own C function;
then the dtype in it is set. Of a device's memory libresvisor makes the tensor, and a C function of it ends a capsule that
nobody took: a function of Python's could be called when the interpreter is half gone.

Source of the layout and the codes: dlpack.h of DLPack 1.1 (DLManagedTensor, DLManagedTensorVersioned, DLDataTypeCode).
"""

import ctypes
import functools
from typing import Any

from ._errors import check
from ._library import Failure, library

VERSIONED, BYTES = 1, 2  # RV_DLPACK_… of resvisor.h

#: dtype in safetensors files -> (numpy's dtype of that size, DLDataTypeCode, bits)
RETAGGED = {
    "BF16": ("<u2", 4, 16),  # kDLBfloat
    "F8_E4M3": ("u1", 10, 8),  # kDLFloat8_e4m3fn
    "F8_E4M3FNUZ": ("u1", 11, 8),
    "F8_E5M2": ("u1", 12, 8),
    "F8_E5M2FNUZ": ("u1", 13, 8),
    "F8_E8M0": ("u1", 14, 8),
}

# In DLTensor: void *data; int32 device_type, device_id; int32 ndim; then { uint8 code; uint8 bits; uint16 lanes; }
_DTYPE_OFFSET = 20
# What lies before the DLTensor: nothing, or version (2 x uint32), manager_ctx, deleter, flags (uint64).
_HEADS = {b"dltensor": 0, b"dltensor_versioned": 32}

_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def retag(capsule: Any, code: int, bits: int) -> Any:
    """The same capsule, which nobody has taken yet, with another dtype of the same size. BufferError = an unknown kind of capsule."""
    name = _name(capsule)
    if name not in _HEADS:
        raise BufferError(f"numpy made a DLPack capsule of an unknown kind, {name!r}")
    at = _pointer(capsule, name) + _HEADS[name] + _DTYPE_OFFSET
    ctypes.c_uint8.from_address(at).value = code
    ctypes.c_uint8.from_address(at + 1).value = bits
    return capsule


# Kept for ever, beyond the end of the interpreter's modules: a capsule refers to its name, and does not keep it.
_names = {flags: ctypes.create_string_buffer(name) for flags, name in ((0, b"dltensor"), (VERSIONED, b"dltensor_versioned"))}
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_names))

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


@functools.lru_cache(maxsize=None)
def _destructor() -> int:
    """The address of the C function that ends a capsule that nobody took."""
    python = ctypes.pythonapi
    is_valid, pointer = (ctypes.cast(f, ctypes.c_void_p) for f in (python.PyCapsule_IsValid, python.PyCapsule_GetPointer))
    library().rv_capsule_setup(is_valid, pointer)
    address = ctypes.cast(library().rv_capsule_end, ctypes.c_void_p).value
    assert address is not None
    return address


def capsule(lease: int, name: str, flags: int) -> Any:
    """A tensor of the lease in place, for one taker. It keeps the memory, not the lease object."""
    failure, managed = Failure(), ctypes.c_void_p()
    destructor = _destructor()
    check(library().rv_tensor_dlpack(lease, name.encode(), flags, managed, failure), failure, f"tensor {name!r}")
    try:
        return _new(managed, ctypes.addressof(_names[flags & VERSIONED]), destructor)
    except BaseException:
        library().rv_capsule_drop(managed, flags)
        raise
