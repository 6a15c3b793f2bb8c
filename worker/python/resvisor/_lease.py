"""Connections, leases and tensors.

Lifetime. Everything that shows the pool's memory (memoryview, numpy array, torch tensor, DLPack) keeps a ctypes array
alive, and that keeps a _Mapping alive; the lease is given back and the memory unmapped when the _Mapping dies. So memory
is valid as long as anything made from it lives, whoever holds that, and nobody has to close in the right order. The frees
are numpy's and torch's own C functions: a ctypes callback as a DLPack deleter would be called after the interpreter is
gone. What shows a device's memory is DLPack of libresvisor, which keeps the memory itself; there the _Mapping may go first.
"""

import ctypes
import errno
import json
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ._codes import ErrorCode
from ._dlpack import RETAGGED, VERSIONED, capsule, retag
from ._errors import Error, check, make_error
from ._library import AttachOptions, Failure, LeaseInfo, ProgressFunction, RawTensor, library

if TYPE_CHECKING:
    import numpy
    import torch

MappingMode = Literal["auto", "private", "shared"]
Progress = Callable[[int, int], "bool | None"]

_MAPPINGS: dict[str, int] = {"auto": 0, "private": 1, "shared": 2}
_MAPPING_NAMES: dict[int, MappingMode] = {1: "private", 2: "shared"}
_NO_LIMIT = -1
CPU, CUDA = 1, 2  # DLDeviceType of DLPack
_TIMEOUT_MS_MAX = 2**31 - 1


def _timeout_ms(timeout: float | None) -> int:
    """Seconds as rv_… functions take them; None = no limit. 0 is the shortest limit, not none."""
    if timeout is None:
        return _NO_LIMIT
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"a timeout of {timeout} s; allowed: 0 or more, or None for no limit")
    return max(1, min(_TIMEOUT_MS_MAX, math.ceil(timeout * 1000))) if timeout < _TIMEOUT_MS_MAX else _TIMEOUT_MS_MAX


def _at_end(owner: object, function: Callable[..., object], *arguments: object) -> None:
    """Calls function when owner is gone, but not when the interpreter ends: arrays may outlive everything then."""
    weakref.finalize(owner, function, *arguments).atexit = False


class _Handle:
    """A connection's pointer. It ends when the Connection is closed and the last lease is gone."""

    __slots__ = ("pointer", "__weakref__")

    def __init__(self, pointer: int, owned: bool) -> None:
        self.pointer = pointer
        if owned:
            _at_end(self, library().rv_connection_release, pointer)


@dataclass(frozen=True)
class Place:
    """Where a lease's memory lies."""

    device: str = "host"
    backend: str = "memfd"
    device_type: int = CPU
    device_id: int = 0  # in this process

    @property
    def readable(self) -> bool:
        """The CPU can read it: a device that shares the machine's memory has it there."""
        return self.backend == "memfd"


class _Mapping:
    """A lease's pointer, kept by everything that shows its memory."""

    __slots__ = ("pointer", "place", "__weakref__")

    def __init__(self, pointer: int, handle: _Handle) -> None:
        self.pointer = pointer
        self.place = Place()
        _at_end(self, _detach, pointer, handle)


def _detach(pointer: int, handle: _Handle) -> None:
    """handle is here so that the connection ends after its leases."""
    library().rv_detach(pointer)


class Tensor:
    """One tensor of a lease: facts, and views of its memory. Nothing here copies, but tobytes and numpy(copy=True)."""

    __slots__ = ("name", "dtype", "shape", "nbytes", "address", "digest", "writable", "_mapping")

    name: str
    dtype: str  #: as in safetensors files: "F32", "BF16"; "BLOB" = a file of another format
    shape: tuple[int, ...]
    nbytes: int
    address: int  #: on a device, a pointer that the CPU cannot read
    digest: str  #: XXH3-128 in hexadecimal
    writable: bool  #: a write makes a private copy of the page; the pool never changes

    def __init__(self, raw: RawTensor, mapping: _Mapping, writable: bool) -> None:
        self.name = raw.name.decode()
        self.dtype = _dtype_name(raw.dtype)
        self.shape = tuple(raw.shape[0 : raw.rank]) if raw.rank else ()
        self.nbytes = raw.length
        self.address = raw.data or 0
        self.digest = bytes(raw.digest[0:16]).hex()
        self.writable = writable
        self._mapping = mapping

    def __repr__(self) -> str:
        return f"<resvisor.Tensor {self.name!r} {self.dtype} {list(self.shape)}>"

    @property
    def device(self) -> str:
        """Where it lies: "host", "cuda:0" (resvisor's name)."""
        return self._mapping.place.device

    def _array(self) -> "ctypes.Array[ctypes.c_ubyte]":
        """The memory as a ctypes array that keeps it mapped."""
        if not self._mapping.place.readable:
            message = f"tensor {self.name!r} lies on {self.device}, which the CPU cannot read"
            remedy = "copy it by .numpy(copy=True) or .tobytes(), or use it there by .torch() or DLPack"
            raise make_error(message, ErrorCode.UNSUPPORTED, remedy)
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address) if self.nbytes else (ctypes.c_ubyte * 0)()
        array._resvisor_mapping = self._mapping  # type: ignore[attr-defined]
        return array

    def memoryview(self) -> memoryview:
        """The bytes in place. Read-only under a shared mapping. Unsupported on a device."""
        view = memoryview(self._array()).cast("B")
        return view if self.writable else view.toreadonly()

    def tobytes(self) -> bytes:
        """A copy of the bytes, from wherever they lie."""
        return bytes(self.memoryview()) if self._mapping.place.readable else bytes(self._copy())

    def _copy(self) -> bytearray:
        """A private copy in this process' memory."""
        copy = bytearray(self.nbytes)
        if self._mapping.place.readable:
            copy[:] = self.memoryview()
        elif copy:
            failure, buffer = Failure(), (ctypes.c_ubyte * self.nbytes).from_buffer(copy)
            read = library().rv_tensor_read(self._mapping.pointer, self.name.encode(), 0, buffer, self.nbytes, failure)
            check(read, failure, f"tensor {self.name!r}")
        return copy

    def numpy(self, *, copy: bool = False) -> "numpy.ndarray[Any, Any]":
        """A numpy array in place, or of a copy, which is the only way on a device. Unsupported for dtypes that numpy does not
        have."""
        from . import numpy as module

        return module.from_tensor(self, copy=copy)

    def torch(self) -> "torch.Tensor":
        """A torch tensor in place, on the device where the lease is."""
        from . import torch as module

        return module.from_tensor(self)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """For torch, CuPy, JAX and others, as the array API has it: a capsule of the memory in place.

        On a device it is libresvisor's, read-only (which only the versioned form can say), and a copy is the taker's to
        make. Nothing is under way on any stream, so stream changes nothing. On the host it is numpy's own.
        """
        place = self._mapping.place
        if place.device_type == CPU or (place.readable and dl_device == (CPU, 0)):
            options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
            return self._numpy_dlpack({name: value for name, value in options.items() if value is not None})
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"tensor {self.name!r} lies on {self.device}, DLPack device {self.__dlpack_device__()}, not {dl_device}")
        if copy:
            raise BufferError(f"tensor {self.name!r} is lent in place; copy what comes of it")
        if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream < -1 or stream == 0):
            raise ValueError(f"stream is {stream!r}; on CUDA: None, -1, 1, 2 or the number of a stream")
        flags = VERSIONED if max_version is not None and max_version[0] >= 1 else 0
        return capsule(self._mapping.pointer, self.name, flags)

    def _numpy_dlpack(self, options: dict[str, Any]) -> Any:
        if self.dtype not in RETAGGED:
            return self.numpy().__dlpack__(**options)
        import numpy

        base, code, bits = RETAGGED[self.dtype]
        array = numpy.frombuffer(self.memoryview(), base).reshape(self.shape)
        return retag(array.__dlpack__(**options), code, bits)

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0) = the CPU, (2, number) = CUDA"""
        return (self._mapping.place.device_type, self._mapping.place.device_id)


def _dtype_name(dtype: int) -> str:
    text = library().rv_dtype_text(dtype)
    return text.decode() if text else f"dtype {dtype}"


class Lease(Mapping[str, Tensor]):
    """A model of the pool, mapped: a mapping from tensor names to tensors, in the order of the file's data.

    `with` or close() ends the use of this object. The lease itself, and the memory, stay until the last array, tensor or
    memoryview that was made from it is gone too.
    """

    model: str
    lease_id: int
    generation: int
    bytes: int  #: mapped
    mapping: MappingMode
    waited: bool  #: attach waited for a load
    load_us: int
    read_bytes: int  #: what that load read from the file; 0 = the model was resident
    device: str  #: where the model lies: "host", "cuda:0" (resvisor's name)
    backend: str  #: "memfd", "cuda-vmm", "cuda-ipc"
    device_type: int  #: as DLPack has it: 1 = CPU, 2 = CUDA. With memfd and 2 the pointers serve both.
    device_id: int  #: the device's number in this process

    def __init__(self, pointer: int, handle: _Handle) -> None:
        self._mapping: _Mapping | None = _Mapping(pointer, handle)
        info = LeaseInfo(struct_size=ctypes.sizeof(LeaseInfo))
        check(library().rv_lease_get_info(pointer, info), what="a lease")
        self.model = info.model.decode()
        self.lease_id = info.lease_id
        self.generation = info.generation
        self.bytes = info.bytes
        self.mapping = _MAPPING_NAMES[info.mapping]
        self.device = info.device.decode() if info.device else "host"
        self.backend = info.backend.decode() if info.backend else "memfd"
        self.device_type = info.device_type or CPU
        self.device_id = info.device_id
        self._mapping.place = Place(self.device, self.backend, self.device_type, self.device_id)
        self.waited = info.waited
        self.load_us = info.load_us
        self.read_bytes = info.read_bytes
        self._count: int = info.tensors

    def __repr__(self) -> str:
        state = "" if self._mapping else ", closed"
        return f"<resvisor.Lease {self.model!r} generation {self.generation}, {self._count} tensors{state}>"

    def _held(self) -> _Mapping:
        """What keeps the memory; a caller's own reference makes a close() in another thread harmless."""
        mapping = self._mapping
        if mapping is None:
            raise ValueError(f"the lease of {self.model} is closed")
        return mapping

    def close(self) -> None:
        """Ends the use of this object; again is fine."""
        self._mapping = None

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def __enter__(self) -> "Lease":
        self._held()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        for tensor in self.tensors():
            yield tensor.name

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[name] is not None
        except KeyError:
            return False

    def __getitem__(self, name: str) -> Tensor:
        held, raw = self._held(), RawTensor()
        text = name.encode()
        result = -errno.ENOENT if b"\0" in text else library().rv_tensor_find(held.pointer, text, raw)
        if result == -errno.ENOENT:
            raise KeyError(name)
        check(result, what=f"tensor {name!r} of {self.model}")
        return Tensor(raw, held, self.mapping == "private")

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the file's data."""
        held, raw, find = self._held(), RawTensor(), library().rv_tensor_at
        writable = self.mapping == "private"
        for i in range(self._count):
            check(find(held.pointer, i, raw), what=f"tensor {i} of {self.model}")
            yield Tensor(raw, held, writable)

    @property
    def metadata(self) -> dict[str, str]:
        """The file's __metadata__; empty if it has none."""
        held = self._held()
        text = library().rv_lease_metadata(held.pointer)
        found: dict[str, str] = json.loads(text) if text else {}
        return found

    @property
    def revoked(self) -> bool:
        """resvisor wants the memory back: let go of everything that was made from this lease."""
        return bool(library().rv_lease_is_revoked(self._held().pointer))

    def numpy(self, *, copy: bool = False) -> "dict[str, numpy.ndarray[Any, Any]]":
        """All tensors as numpy arrays in place, or as copies."""
        return {tensor.name: tensor.numpy(copy=copy) for tensor in self.tensors()}

    def torch(self) -> "dict[str, torch.Tensor]":
        """All tensors as torch tensors in place."""
        return {tensor.name: tensor.torch() for tensor in self.tensors()}

    def copied_bytes(self) -> int:
        """Bytes of pages that this process has copied by writing to them. Walks the page tables: for reports."""
        held, found = self._held(), ctypes.c_uint64()
        check(library().rv_lease_copied_bytes(held.pointer, found), what="copied bytes")
        return found.value

    def verify(self) -> None:
        """Compares the pool's own bytes with their digests; ModelInvalid names the first tensor that differs."""
        held, name = self._held(), ctypes.c_char_p()
        result = library().rv_lease_verify(held.pointer, name)
        check(result, what=f"tensor {(name.value or b'').decode()!r} of {self.model} differs from its digest")


class _Attach:
    """One call of rv_attach, with the caller's progress function.

    A signal's handler runs in the main thread only, and only between bytecodes: so the main thread waits in Python and a
    thread of ours calls the library. Progress still runs on the caller's thread.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._error: BaseException | None = None
        self._stop = False
        self._events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.failure = Failure()
        self.pointer = ctypes.c_void_p()
        self.result = 0

    def run(self, handle: _Handle, name: bytes, mapping: int, timeout_ms: int, fd: int, device: bytes | None) -> None:
        """Sets result, failure and pointer; raises what progress or a signal's handler raised."""
        if threading.current_thread() is not threading.main_thread():
            self._call(handle, name, mapping, timeout_ms, fd, device, self._here)
            if self._error is not None:
                self._undo()
                raise self._error
            return
        try:
            arguments = (handle, name, mapping, timeout_ms, fd, device)
            threading.Thread(target=self._serve, args=arguments, name="resvisor-attach", daemon=True).start()
            while (event := self._events.get()) is not None:
                self._answers.put(self._progress is None or self._progress(*event) is not False)
        except BaseException:
            self._stop = True  # seen within 250 ms; a lease that comes in spite of it is given back there
            self._answers.put(False)
            while self._events.get() is not None:
                self._answers.put(False)
            raise

    def _call(self, handle: _Handle, name: bytes, mapping: int, timeout_ms: int, fd: int, device: bytes | None, progress: Any) -> None:
        size = ctypes.sizeof(AttachOptions)
        options = AttachOptions(size, mapping, timeout_ms, fd, ProgressFunction(progress), None, device)
        self.result = library().rv_attach(handle.pointer, name, options, self.pointer, self.failure)

    def _undo(self) -> None:
        if self.result >= 0:
            library().rv_detach(self.pointer)

    def _here(self, done: int, total: int, context: object) -> bool:
        try:
            return self._progress is None or self._progress(done, total) is not False
        except BaseException as error:  # an exception cannot cross C: raised again by run
            self._error = error
            return False

    def _serve(self, handle: _Handle, name: bytes, mapping: int, timeout_ms: int, fd: int, device: bytes | None) -> None:
        try:
            self._call(handle, name, mapping, timeout_ms, fd, device, self._there)
            if self._stop:
                self._undo()
        finally:
            self._events.put(None)

    def _there(self, done: int, total: int, context: object) -> bool:
        if self._stop or self._progress is None:
            return not self._stop
        self._events.put((done, total))
        return self._answers.get()


class Connection:
    """A connection to the supervisor. Threads may share it; after a fork the child makes its own.

    `with` or close() ends it for new leases. The socket closes when the last lease is gone, so that the supervisor counts
    what is in use.
    """

    def __init__(self, handle: _Handle) -> None:
        self._handle: _Handle | None = handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Again is fine."""
        self._handle = None

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attach(
        self,
        model: "str | os.PathLike[str]",
        *,
        mapping: MappingMode = "auto",
        timeout: float | None = None,
        fd: int | None = None,
        progress: Progress | None = None,
        device: str | None = None,
    ) -> Lease:
        """Takes a lease on a model: a configured name, or an absolute path inside a configured model folder.

        Waits for the load if the model is not resident. mapping: "private" = a write copies the page for this process,
        "shared" = read-only, "auto" = private, or shared where the model lies in huge pages. timeout: seconds for
        everything. fd: an open descriptor of the model file; then model is only a name for people. progress(done, total):
        bytes, called on this thread while the model is loaded (total is 0 while unknown); False gives up, and so does an
        exception, which comes out of attach. device: where the model shall lie: "host", "cuda:0" (resvisor's own name of
        the device), or "GPU-" and a uuid; None = in a worker its type's device, elsewhere the host. A device has no private
        mapping, and its memory is read-only there.
        """
        handle = self._handle
        if handle is None:
            raise ValueError("the connection is closed")
        if mapping not in _MAPPINGS:
            raise ValueError(f"no mapping {mapping!r}; allowed: auto, private, shared")
        name = os.fsencode(model)
        if b"\0" in name:
            raise ValueError("a model's name has no NUL")
        attach = _Attach(progress)
        place = None if device is None else device.encode()
        attach.run(handle, name, _MAPPINGS[mapping], _timeout_ms(timeout), -1 if fd is None else fd, place)
        check(attach.result, attach.failure, f"attach of {os.fsdecode(name)}")
        assert attach.pointer.value is not None
        return Lease(attach.pointer.value, handle)


def connect(socket: "str | os.PathLike[str] | None" = None, *, timeout: float | None = 5.0) -> Connection:
    """Connects to the supervisor. socket None = found as docs/libresvisor.md says; timeout: seconds, None = no limit."""
    failure, pointer = Failure(), ctypes.c_void_p()
    path = None if socket is None else os.fsencode(socket)
    check(library().rv_connect(path, _timeout_ms(timeout), pointer, failure), failure, "connect")
    assert pointer.value is not None
    return Connection(_Handle(pointer.value, owned=True))


# ---- the connection that load_file and safe_open share ------------------------------------------------------------

_lock = threading.Lock()
_shared: tuple[int, Connection] | None = None  # with the process that made it


def _reset_lock() -> None:
    """In the child of a fork: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def set_default_connection(connection: Connection) -> None:
    """The connection that load_file and safe_open use in this process. A worker sets its own."""
    global _shared
    with _lock:
        _shared = (os.getpid(), connection)


def default_connection() -> Connection:
    """The connection of this process that load_file and safe_open use: made when needed."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid() or _shared[1].closed:
            _shared = (os.getpid(), connect())
        return _shared[1]


def attach_default(model: str, **options: Any) -> Lease:
    """Attaches by the default connection; one that has died is made again once."""
    connection = default_connection()
    try:
        return connection.attach(model, **options)
    except Error as error:
        if error.code is not ErrorCode.NOT_RUNNING:
            raise
    connection.close()
    return default_connection().attach(model, **options)
