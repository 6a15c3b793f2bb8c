"""libresvisor.so.1 by ctypes: finding it, its structs, its functions. Nothing here is public."""

import ctypes
import functools
import os
import pathlib

LIBRARY = "libresvisor.so.1"
ENVIRONMENT = "RESVISOR_LIBRARY"
MESSAGE_BYTES = 512
REMEDY_BYTES = 256


class Failure(ctypes.Structure):
    """struct rv_failure"""

    _fields_ = [
        ("code", ctypes.c_int),
        ("message", ctypes.c_char * MESSAGE_BYTES),
        ("remedy", ctypes.c_char * REMEDY_BYTES),
    ]


ProgressFunction = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)


class AttachOptions(ctypes.Structure):
    """struct rv_attach_options"""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("mapping", ctypes.c_int),
        ("timeout_ms", ctypes.c_int),
        ("model_fd", ctypes.c_int),
        ("progress", ProgressFunction),
        ("context", ctypes.c_void_p),
        ("device", ctypes.c_char_p),
    ]


class LeaseInfo(ctypes.Structure):
    """struct rv_lease_info"""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("model", ctypes.c_char_p),
        ("lease_id", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("tensors", ctypes.c_uint64),
        ("mapping", ctypes.c_int),
        ("waited", ctypes.c_bool),
        ("load_us", ctypes.c_uint64),
        ("read_bytes", ctypes.c_uint64),
        ("device", ctypes.c_char_p),
        ("backend", ctypes.c_char_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    ]


class RawTensor(ctypes.Structure):
    """struct rv_tensor"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_uint64),
        ("digest", ctypes.POINTER(ctypes.c_uint8)),
    ]


_p = ctypes.c_void_p
_text = ctypes.c_char_p
_out = ctypes.POINTER(ctypes.c_void_p)
_failure = ctypes.POINTER(Failure)
_u64 = ctypes.c_uint64

# name: (result, arguments), as resvisor.h declares them
_FUNCTIONS = {
    "rv_connect": (ctypes.c_int, [_text, ctypes.c_int, _out, _failure]),
    "rv_connection_release": (None, [_p]),
    "rv_attach": (ctypes.c_int, [_p, _text, ctypes.POINTER(AttachOptions), _out, _failure]),
    "rv_detach": (None, [_p]),
    "rv_lease_get_info": (ctypes.c_int, [_p, ctypes.POINTER(LeaseInfo)]),
    "rv_lease_copied_bytes": (ctypes.c_int, [_p, ctypes.POINTER(_u64)]),
    "rv_lease_verify": (ctypes.c_int, [_p, ctypes.POINTER(_text)]),
    "rv_lease_metadata": (_text, [_p]),
    "rv_tensor_find": (ctypes.c_int, [_p, _text, ctypes.POINTER(RawTensor)]),
    "rv_tensor_count": (_u64, [_p]),
    "rv_tensor_at": (ctypes.c_int, [_p, _u64, ctypes.POINTER(RawTensor)]),
    "rv_tensor_read": (ctypes.c_int, [_p, _text, _u64, _p, _u64, _failure]),
    "rv_tensor_dlpack": (ctypes.c_int, [_p, _text, ctypes.c_uint, _out, _failure]),
    "rv_lease_dlpack_count": (_u64, [_p]),
    "rv_lease_is_revoked": (ctypes.c_bool, [_p]),
    "rv_device_report": (None, [_p, _p, ctypes.c_int, _text]),
    "rv_capsule_setup": (None, [_p, _p]),
    "rv_capsule_drop": (None, [_p, ctypes.c_uint]),
    "rv_capsule_end": (None, [_p]),
    "rv_dtype_text": (_text, [ctypes.c_int]),
    "rv_worker_open": (ctypes.c_int, [_out, _failure]),
    "rv_worker_close": (None, [_p]),
    "rv_worker_connection": (_p, [_p]),
    "rv_worker_id": (_text, [_p]),
    "rv_worker_type": (_text, [_p]),
    "rv_worker_ready": (ctypes.c_int, [_p, _text, _failure]),
    "rv_worker_next": (ctypes.c_int, [_p, _out]),
    "rv_job_id": (_text, [_p]),
    "rv_job_model": (_text, [_p]),
    "rv_job_param_count": (ctypes.c_uint32, [_p]),
    "rv_job_param_at": (None, [_p, ctypes.c_uint32, ctypes.POINTER(_text), ctypes.POINTER(_text)]),
    "rv_job_payload": (_p, [_p, ctypes.POINTER(ctypes.c_size_t)]),
    "rv_job_progress": (ctypes.c_bool, [_p, _u64, _u64, _text]),
    "rv_job_cancelled": (ctypes.c_bool, [_p]),
    "rv_job_add_output": (ctypes.c_int, [_p, _text, _text, _p, _u64, _failure]),
    "rv_job_count_load": (None, [_p, _u64, _u64]),
    "rv_job_finish": (ctypes.c_int, [_p]),
    "rv_job_fail": (ctypes.c_int, [_p, ctypes.c_int, _text]),
}


def candidates() -> list[str]:
    """Where the library is looked for, in this order."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        return [given]  # who names one does not want another
    package = pathlib.Path(os.path.abspath(__file__)).parent
    # PREFIX/lib/resvisor/python/resvisor and PREFIX/lib/libresvisor.so.1; last, what ldconfig and LD_LIBRARY_PATH know
    return [str(package.parents[2] / LIBRARY), LIBRARY]


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The library, loaded once. ImportError says where it was looked for."""
    reasons = []
    for path in candidates():
        if "/" in path and not os.path.exists(path):
            reasons.append(f"{path}: not there")
            continue
        try:
            found = ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
            continue
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(found, name)
            except AttributeError:
                raise ImportError(f"{path} has no {name}: it is no libresvisor, or an older one than this package") from None
            function.restype = result
            function.argtypes = arguments
        return found
    raise ImportError(
        f"{LIBRARY} is not found ({'; '.join(reasons)}); install resvisor, or set {ENVIRONMENT} to the file's path"
    )
