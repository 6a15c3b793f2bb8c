"""A foreign reader of the index layout (common/index.h), written from its description alone: struct and mmap."""

import fcntl
import mmap
import os
import struct
from typing import NamedTuple

import xxhash

from . import placement

MAGIC = b"RVINDEX\n"
VERSION = 1
BYTE_ORDER = 0x01020304
HEADER = struct.Struct("<8sIIQIIIIQQQQQQQ16sQ72x")
ARENA = struct.Struct("<QII")
ENTRY = struct.Struct("<QIHBBIIQQ8Q16s")
F_GET_SEALS = 1034
SEALS_WANTED = 0x1 | 0x2 | 0x4 | 0x8  # SEAL, SHRINK, GROW, WRITE
DTYPES = (
    "NONE BOOL U8 I8 F8_E4M3 F8_E5M2 U16 I16 F16 BF16 U32 I32 F32 U64 I64 F64 C64 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ BLOB"
).split()
ALIGNMENT = 256
MEMFD = 1  # enum rv_backend_id

assert HEADER.size == 192 and ARENA.size == 16 and ENTRY.size == 120


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple
    arena: int
    offset: int
    length: int
    digest: bytes


class Index:
    """Maps index and arenas read-only. Owns neither descriptor; close() ends the maps.

    reply: the AttachReply, for models that may lie on a device; then the driver maps the arenas.
    """

    def __init__(self, index_fd, arena_fds, reply=None):
        on_device = reply is not None and any(arena.backend != MEMFD for arena in reply.arenas)
        for fd in [index_fd] if on_device else [index_fd, *arena_fds]:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            assert seals & SEALS_WANTED == SEALS_WANTED, f"seals are {seals:#x}"
        self.map = mmap.mmap(index_fd, os.fstat(index_fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        self.arenas = (
            placement.open_arenas(reply, arena_fds)
            if on_device
            else [
                mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) if os.fstat(fd).st_size else b""
                for fd in arena_fds
            ]
        )
        (
            magic, version, order, self.total_size, self.tensor_count, self.slot_count, self.arena_count, self.flags,
            self.arenas_offset, self.slots_offset, self.entries_offset, self.names_offset, self.names_length,
            self.metadata_offset, self.metadata_length, self.header_digest, self.tensor_bytes,
        ) = HEADER.unpack_from(self.map, 0)  # fmt: skip
        assert (magic, version, order) == (MAGIC, VERSION, BYTE_ORDER)
        assert self.total_size <= len(self.map)
        assert self.arena_count == len(self.arenas)
        assert self.slot_count >= 2 and self.slot_count & (self.slot_count - 1) == 0
        assert self.slot_count >= 2 * self.tensor_count

    def close(self):
        self.map.close()
        for arena in self.arenas:
            if arena:
                arena.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def at(self, i):
        fields = ENTRY.unpack_from(self.map, self.entries_offset + i * ENTRY.size)
        name_offset, name_length, dtype, rank, _, arena, _, offset, length = fields[:9]
        start = self.names_offset + name_offset
        assert self.map[start + name_length] == 0, "names end with a NUL"
        return Tensor(
            self.map[start : start + name_length].decode(),
            DTYPES[dtype], tuple(fields[9 : 9 + rank]), arena, offset, length, fields[17],
        )  # fmt: skip

    def find(self, name):
        """By the hash table, as a client does; None = not there."""
        slot = xxhash.xxh3_64_intdigest(name.encode(), seed=0) & (self.slot_count - 1)
        for _ in range(self.slot_count):
            (number,) = struct.unpack_from("<I", self.map, self.slots_offset + 4 * slot)
            if number == 0:
                return None
            found = self.at(number - 1)
            if found.name == name:
                return found
            slot = (slot + 1) & (self.slot_count - 1)
        return None

    def __iter__(self):
        return (self.at(i) for i in range(self.tensor_count))

    def bytes_of(self, tensor):
        assert tensor.offset % ALIGNMENT == 0
        return self.arenas[tensor.arena][tensor.offset : tensor.offset + tensor.length]

    def metadata(self):
        if self.metadata_length == 0:
            return None
        return self.map[self.metadata_offset : self.metadata_offset + self.metadata_length].decode().rstrip("\0")
