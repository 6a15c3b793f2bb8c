"""What resvisor.numpy and resvisor.torch share: a file becomes a lease, or visibly does not."""

import collections
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ._codes import ErrorCode
from ._errors import Error, make_error
from ._lease import Lease, Tensor, attach_default

if TYPE_CHECKING:
    from types import TracebackType

Fallback = Literal["error", "file", "host"]
FileName = str | os.PathLike[str]
T = TypeVar("T")

_log = logging.getLogger("resvisor")
_lock = threading.Lock()
_fallbacks: collections.Counter[str] = collections.Counter()


def _reset_lock() -> None:
    """In the child of a fork: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def fallbacks() -> dict[str, int]:
    """How often this process read a file itself because the pool could not serve it, by the reason's code."""
    with _lock:
        return dict(_fallbacks)


def check_fallback(fallback: str) -> None:
    if fallback not in ("error", "file", "host"):
        raise ValueError(f'fallback is {fallback!r}; allowed: "error", "file", "host"')


def count_fallback(filename: FileName, error: Exception, instead: str = "read from the file, not from the pool") -> None:
    """Never silent: a warning with the reason, and the counter."""
    code = error.code.name if isinstance(error, Error) else "LIBRARY"
    with _lock:
        _fallbacks[code] += 1
    _log.warning("resvisor: %s is %s: %s", os.fspath(filename), instead, error)


def attach_file(filename: FileName, fallback: str, device: str = "host") -> Lease | None:
    """A lease on the file; None = the caller reads the file itself, as fallback="file" allows.

    The file is opened here and handed over: what this process may read it may have, wherever it lies. So a file that is
    missing or forbidden is the same OSError as without the pool.
    """
    check_fallback(fallback)
    path = os.path.abspath(os.fspath(filename))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lease = attach_default(path, fd=fd, device=device)
        if len(lease) == 1 and next(lease.tensors()).dtype == "BLOB":
            raise make_error(f"{path} is no safetensors file", ErrorCode.MODEL_INVALID)
        return lease
    except (Error, ImportError) as error:
        if fallback != "file":
            raise
        count_fallback(filename, error)
        return None
    finally:
        os.close(fd)


class Slice(Generic[T]):
    """What safe_open.get_slice returns: indexing gives a part of the tensor, in place."""

    def __init__(self, tensor: Tensor, make: Callable[[Tensor], Any], move: Callable[[Any], Any]) -> None:
        self._tensor = tensor
        self._make = make
        self._move = move

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> T:
        part: T = self._move(self._make(self._tensor)[index])
        return part


class Opened(Generic[T]):
    """safetensors' safe_open on a lease."""

    def __init__(self, lease: Lease, make: Callable[[Tensor], Any], move: Callable[[Any], Any]) -> None:
        self._lease = lease
        self._make = make
        self._move = move

    def __enter__(self) -> "Opened[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._lease.close()

    @property
    def lease(self) -> Lease:
        return self._lease

    def keys(self) -> list[str]:
        return sorted(self._lease)

    def offset_keys(self) -> list[str]:
        return list(self._lease)

    def metadata(self) -> dict[str, str] | None:
        return self._lease.metadata or None

    def get_tensor(self, name: str) -> T:
        tensor: T = self._move(self._make(self._lease[name]))
        return tensor

    def get_tensors(self) -> dict[str, T]:
        return {tensor.name: self._move(self._make(tensor)) for tensor in self._lease.tensors()}

    def get_slice(self, name: str) -> Slice[T]:
        return Slice(self._lease[name], self._make, self._move)
