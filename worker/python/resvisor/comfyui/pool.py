"""The pool's tensors in this process: one mapping per file for as long as ComfyUI holds anything of it.

On the host the tensors keep the mapping, and its end is noticed. On a device they are DLPack of libresvisor and keep only the
memory: there the mapping is kept here, and looked at now and then (sweep) whether any tensor of it is left.
"""

import ctypes
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from .. import Connection, Lease
from .._lease import CPU
from .._library import library
from .report import log, size

if TYPE_CHECKING:
    import torch

# Smaller ones are copied: ComfyUI changes markers, counters and scales in place, and a page would be copied for each.
PRIVATE_BELOW = 16 * 1024  # bytes

_Identity = tuple[int, int, int, int, int]


class _Held:
    """A lease of which tensors may be alive. The Lease object is closed, so that only they keep the mapping."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.bytes = lease.bytes
        mapping = lease._held()
        self.mapping = weakref.ref(mapping)
        self.kept = None if lease.device_type == CPU else mapping
        lease.close()

    def reopen(self) -> bool:
        mapping = self.mapping()
        self.lease._mapping = mapping
        return mapping is not None


class Pool:
    """Loads files as dicts of torch tensors, and knows which tensors are the pool's memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # a mapping may die in any thread at any moment, also inside
        self.device: str | None = None  # of all leases; None = the type's
        self._held: dict[_Identity, _Held] = {}
        self._owners: dict[int, tuple[str, Any]] = {}  # address of a tensor: file, weak reference to its mapping

    def owner(self, tensor: "torch.Tensor") -> str | None:
        """The file whose pool memory this is, also for views of a tensor; None = private memory."""
        if tensor.device.type not in ("cpu", "cuda"):
            return None
        found = self._owners.get(tensor.untyped_storage().data_ptr())
        return found[0] if found is not None and found[1]() is not None else None

    def sweep(self) -> None:
        """Gives back what lies on a device and nobody uses any more."""
        with self._lock:
            done = [held for held in self._held.values() if held.kept and not library().rv_lease_dlpack_count(held.kept.pointer)]
            for held in done:
                held.kept = None  # its mapping's end does the rest, unless a load has just taken it

    def usage(self) -> tuple[int, int]:
        """Bytes of files that are mapped now, and how many of these this process has copied by writing to them."""
        shared = copied = 0
        with self._lock:
            for held in list(self._held.values()):
                mapping, found = held.mapping(), ctypes.c_uint64()  # not by the lease: a load may be using it now
                if mapping is not None:
                    shared += held.bytes
                    if held.kept is None and library().rv_lease_copied_bytes(mapping.pointer, found) == 0:
                        copied += found.value
        return shared, copied

    def load(self, path: str) -> "tuple[dict[str, torch.Tensor], dict[str, str] | None]":
        """The tensors of a safetensors file, and its metadata. Raises what the pool says."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            st = os.fstat(fd)
            identity = (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
            self.sweep()
            with self._lock:
                lease = self._reuse(identity)
            if lease is None:
                # Our own descriptor: ComfyUI may read the file anyway, whichever folder it is in.
                lease = self._connection.attach(path, fd=fd, device=self.device)
                how = f"{size(lease.read_bytes)} read" if lease.read_bytes else "it was resident, 0 B read"
                log(f"attached {path}: {size(lease.bytes)} on {lease.device}, {how}")
        finally:
            os.close(fd)
        return self._tensors(lease, identity, path)

    def _reuse(self, identity: _Identity) -> Lease | None:
        held = self._held.get(identity)
        if held is None or not held.reopen():
            return None
        if held.lease.device_type != CPU or held.lease.copied_bytes() == 0:  # a device has no copies on write
            return held.lease
        # Somebody wrote into his copy of the pages: whoever loads now wants the file's content.
        held.lease.close()
        del self._held[identity]
        return None

    def _tensors(
        self, lease: Lease, identity: _Identity, path: str
    ) -> "tuple[dict[str, torch.Tensor], dict[str, str] | None]":
        found = {}
        mapping = weakref.ref(lease._held())
        names = []
        # safetensors gives names in sorted order, and ComfyUI's detection goes through them in order.
        for tensor in sorted(lease.tensors(), key=lambda tensor: tensor.name):
            value = tensor.torch()
            if tensor.nbytes < PRIVATE_BELOW:
                value = value.clone()
            else:
                self._owners[tensor.address] = (path, mapping)
                names.append(tensor.address)
            found[tensor.name] = value
        metadata = lease.metadata or None
        with self._lock:
            if identity not in self._held or self._held[identity].mapping() is not lease._held():
                weakref.finalize(lease._held(), self._forget, identity, names, mapping).atexit = False
                self._held[identity] = _Held(lease)
            else:
                held = self._held[identity]
                held.kept = None if lease.device_type == CPU else lease._held()  # a sweep may have let it go meanwhile
                lease.close()
        return found, metadata

    def _forget(self, identity: _Identity, addresses: list[int], mapping: Any) -> None:
        """The mapping is gone. Its addresses may be another mapping's by now: only its own entries go."""
        with self._lock:
            for address in addresses:
                if self._owners.get(address, (None, None))[1] is mapping:
                    del self._owners[address]
            held = self._held.get(identity)
            if held is not None and held.mapping() is None:
                del self._held[identity]
