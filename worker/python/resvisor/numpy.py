"""safetensors.numpy's load_file, from the pool: same signature, same results, no copy."""

from typing import Any, cast

import numpy

from ._codes import ErrorCode
from ._errors import make_error
from ._files import Fallback, FileName, attach_file
from ._lease import Tensor

Array = numpy.ndarray[Any, Any]

_DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
    "BF16": "bfloat16",  # numpy knows it once ml_dtypes is imported, as safetensors has it
    "BLOB": "u1",
}


def from_tensor(tensor: Tensor, *, copy: bool = False) -> Array:
    """A tensor of a lease as an array in place. Under a shared mapping it is not writable. copy: of a private copy."""
    try:
        dtype = numpy.dtype(_DTYPES[tensor.dtype])
    except (KeyError, TypeError):
        message = f"numpy has no dtype for {tensor.dtype} (tensor {tensor.name!r})"
        raise make_error(message, ErrorCode.UNSUPPORTED, "use resvisor.torch, or Tensor.memoryview()") from None
    return numpy.frombuffer(tensor._copy() if copy else tensor.memoryview(), dtype).reshape(tensor.shape)


def load_file(filename: FileName, *, backend: str = "mmap", fallback: Fallback = "error") -> dict[str, Array]:
    """All tensors of a file as numpy arrays in place, writable: a write copies the page for this process.

    backend is safetensors', for the fallback. fallback: what happens when the pool cannot serve the file: "error" raises
    resvisor.Error; "file" reads the file by safetensors, with a warning in the log "resvisor" and a count in
    resvisor.fallbacks().
    """
    lease = attach_file(filename, fallback)
    if lease is not None:
        with lease:
            return lease.numpy()
    from safetensors.numpy import load_file as load_from_file

    return cast("dict[str, Array]", load_from_file(filename, backend=backend))
