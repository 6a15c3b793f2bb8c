"""safetensors.torch's load_file and safetensors' safe_open, from the pool: same signatures, same results, no copy."""

from typing import Any, cast

import torch

from ._codes import ErrorCode
from ._errors import make_error
from ._files import Fallback, FileName, Opened, attach_file
from ._lease import Tensor

Device = str | int | torch.device

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "BLOB": "uint8",
}
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _NAMES.items() if hasattr(torch, attribute)
}


def from_tensor(tensor: Tensor) -> torch.Tensor:
    """A tensor of a lease as a torch tensor in place, on the CPU, with a storage of its own size.

    torch has no read-only tensors: under a shared mapping a write is SIGSEGV.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        message = f"this torch has no dtype for {tensor.dtype} (tensor {tensor.name!r})"
        raise make_error(message, ErrorCode.UNSUPPORTED, "use a newer torch, or Tensor.memoryview()")
    if tensor.nbytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    # the array itself, not a read-only memoryview of it: torch would warn for each tensor
    return torch.frombuffer(tensor._array(), dtype=dtype).reshape(tensor.shape)


def _move_to(device: Device) -> Any:
    target = torch.device(device)
    return (lambda tensor: tensor) if target.type == "cpu" else (lambda tensor: tensor.to(target))


def load_file(
    filename: FileName, device: Device = "cpu", *, backend: str = "mmap", fallback: Fallback = "error"
) -> dict[str, torch.Tensor]:
    """All tensors of a file. On the CPU they lie in the pool, and a write copies the page for this process.

    backend is safetensors', for the fallback. fallback: what happens when the pool cannot serve the file: "error" raises
    resvisor.Error; "file" reads the file by safetensors, with a warning in the log "resvisor" and a count in
    resvisor.fallbacks().
    """
    move = _move_to(device)
    lease = attach_file(filename, fallback)
    if lease is not None:
        with lease:
            return {tensor.name: move(from_tensor(tensor)) for tensor in lease.tensors()}
    from safetensors.torch import load_file as load_from_file

    # safetensors' own annotation is narrower than what it takes
    return load_from_file(filename, device=cast("str", device), backend=backend)


def safe_open(
    filename: FileName,
    framework: str = "pt",
    device: Device = "cpu",
    *,
    backend: str = "mmap",
    fallback: Fallback = "error",
) -> Opened[Any]:
    """safetensors' safe_open from the pool: keys, metadata, get_tensor, get_slice and so on, for "pt" and "np".

    fallback: as load_file; with "file" the object may be safetensors' own.
    """
    if framework in ("pt", "torch", "pytorch"):
        make: Any = from_tensor
        move = _move_to(device)
    elif framework in ("np", "numpy"):
        from .numpy import from_tensor as make

        move = _move_to("cpu")
    else:
        raise ValueError(f"framework is {framework!r}; allowed: pt, np")
    lease = attach_file(filename, fallback)
    if lease is not None:
        return Opened(lease, make, move)
    from safetensors import safe_open as open_file

    return cast("Opened[Any]", open_file(filename, framework, device, backend=backend))
