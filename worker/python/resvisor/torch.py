"""safetensors.torch's load_file and safetensors' safe_open, from the pool: same signatures, same results, no copy.

On a CUDA device too, in torch's own context, whatever its allocator is: torch gets the pointers by DLPack and allocates
nothing. torch.multiprocessing is not involved.
"""

from typing import Any, cast

import torch
import torch.utils.dlpack

from ._codes import ErrorCode
from ._dlpack import BYTES, capsule
from ._errors import Error, NoSuchDevice, make_error
from ._files import Fallback, FileName, Opened, attach_file, check_fallback, count_fallback
from ._lease import CPU, CUDA, Lease, Tensor

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
    """A tensor of a lease as a torch tensor in place, where the lease is, with a storage of its own size.

    torch has no read-only tensors: under a shared mapping a write is SIGSEGV, and on a device a fault that ends this
    process' use of it.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        message = f"this torch has no dtype for {tensor.dtype} (tensor {tensor.name!r})"
        raise make_error(message, ErrorCode.UNSUPPORTED, "use a newer torch, or Tensor.memoryview()")
    place = tensor._mapping.place
    if tensor.nbytes == 0:
        device = "cpu" if place.device_type == CPU else f"cuda:{place.device_id}"
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    if place.device_type != CPU:
        return _by_dlpack(tensor, dtype)
    # the array itself, not a read-only memoryview of it: torch would warn for each tensor
    return torch.frombuffer(tensor._array(), dtype=dtype).reshape(tensor.shape)


def _by_dlpack(tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As bytes, which every torch takes, and then by a view: its DLPack knows no 8-bit floats."""
    taken = torch.utils.dlpack.from_dlpack(capsule(tensor._mapping.pointer, tensor.name, BYTES))
    return taken.view(dtype).reshape(tensor.shape)


def _uuid(index: int) -> str:
    """The device that torch counts as number `index`, by the name that every process has for it."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        raise make_error(f"this torch does not tell the uuid of cuda:{index}", ErrorCode.UNSUPPORTED, "use torch 2.4 or newer")
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _attach(filename: FileName, device: Device, fallback: Fallback) -> tuple[Lease | None, Any]:
    """A lease, and what moves its tensors to where they are wanted. No lease: the caller reads the file."""
    check_fallback(fallback)
    target = torch.device(device)
    if target.type != "cuda":
        return attach_file(filename, fallback), _move_to(target)
    index = torch.cuda.current_device() if target.index is None else target.index
    try:
        lease = attach_file(filename, "error", device=_uuid(index))
    except (Error, ImportError) as error:
        if fallback == "error":
            if isinstance(error, NoSuchDevice):
                remedy = f'fallback="host" copies from the pool\'s host memory to {target}'
                raise make_error(error.message, error.code, remedy) from error
            raise
        if fallback == "file":
            count_fallback(filename, error)
            return None, _move_to(target)
        count_fallback(filename, error, "copied from the pool's host memory")
        return attach_file(filename, "error"), _move_to(target)
    assert lease is not None
    if (lease.device_type, lease.device_id) != (CUDA, index):
        lease.close()
        message = f"libresvisor counts the device of {target} as number {lease.device_id} of type {lease.device_type}"
        raise make_error(message, ErrorCode.DEVICE, "leave CUDA_VISIBLE_DEVICES as it was when the process started")
    return lease, _move_to(torch.device("cpu"))


def _move_to(target: torch.device) -> Any:
    return (lambda tensor: tensor) if target.type == "cpu" else (lambda tensor: tensor.to(target))


def load_file(
    filename: FileName, device: Device = "cpu", *, backend: str = "mmap", fallback: Fallback = "error"
) -> dict[str, torch.Tensor]:
    """All tensors of a file. On the CPU they lie in the pool, and a write copies the page for this process. On a CUDA device
    of the pool they lie there in the pool, and must not be written to.

    backend is safetensors', for the fallback. fallback: what happens when the pool cannot serve the file: "error" raises
    resvisor.Error; "file" reads the file by safetensors; "host", for a CUDA device that the pool does not have, copies from
    the pool's host memory. Both with a warning in the log "resvisor" and a count in resvisor.fallbacks().
    """
    lease, move = _attach(filename, device, fallback)
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
        lease, move = _attach(filename, device, fallback)
    elif framework in ("np", "numpy"):
        from .numpy import from_tensor as make

        lease, move = _attach(filename, "cpu", fallback)
    else:
        raise ValueError(f"framework is {framework!r}; allowed: pt, np")
    if lease is not None:
        return Opened(lease, make, move)
    from safetensors import safe_open as open_file

    return cast("Opened[Any]", open_file(filename, framework, device, backend=backend))
