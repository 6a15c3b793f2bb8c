"""The few messages between a template and the supervisor: protobuf by hand, since the package has no compiled part.

Numbers are those of proto/control.proto; a test compares them with protobuf's own encoding.
"""

import array
import os
import socket
from collections.abc import Iterable

VERSION = 1  # RV_PROTOCOL_VERSION
ROLE_TEMPLATE = 6
ERROR_INTERNAL = 1
ERROR_NOT_READY = 29

FRAME_ID = 1
SPILL, HELLO, ERROR = 2, 3, 5
TEMPLATE_READY, TEMPLATE_FORK, WORKER_BORN = 80, 81, 82

FRAME_MAX = 64 * 1024  # bytes of one message
BODY_MAX = 16 * 1024 * 1024  # of one that came as a file in memory
FDS_MAX = 16

Value = int | bytes
Fields = dict[int, list[Value]]


class Malformed(Exception):
    pass


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def encode(fields: Iterable[tuple[int, Value | str]]) -> bytes:
    """Whole numbers that are not negative, texts, bytes."""
    found = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            found += _varint(number << 3) + _varint(value)
            continue
        data = value.encode(errors="replace") if isinstance(value, str) else value
        found += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Malformed("a number that does not end")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


def decode(data: bytes) -> Fields:
    """Fields by number; each value a whole number, or bytes."""
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        value: Value
        if key & 7 == 0:
            value, at = _read_varint(data, at)
        elif key & 7 == 2:
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
            if at > len(data):
                raise Malformed("a field that is longer than its message")
        else:
            raise Malformed(f"a field of wire type {key & 7}")
        found.setdefault(key >> 3, []).append(value)
    return found


def number(fields: Fields, field: int) -> int:
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int):
        raise Malformed(f"field {field} is no number")
    return value


def texts(fields: Fields, field: int) -> list[bytes]:
    found = []
    for value in fields.get(field, []):
        if not isinstance(value, bytes):
            raise Malformed(f"field {field} is no text")
        found.append(value)
    return found


def send(connection: socket.socket, body: int, fields: Iterable[tuple[int, Value | str]], request: int = 0, fds: Iterable[int] = ()) -> None:
    """One frame. OSError."""
    frame = encode([(FRAME_ID, request)] if request else []) + encode([(body, encode(fields))])
    rights = array.array("i", fds)
    connection.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])


def receive(connection: socket.socket) -> tuple[Fields, list[int]] | None:
    """The next frame and its descriptors; None = the other side has closed. Malformed, OSError."""
    rights = array.array("i")
    data, ancillary, flags, _ = connection.recvmsg(FRAME_MAX, socket.CMSG_SPACE(FDS_MAX * rights.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
    fds = list(rights)
    if not data:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Malformed("a frame that was cut")
        fields = decode(data)
        if SPILL in fields:
            fields = decode(_spilled(fields, fds))
        return fields, fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _spilled(fields: Fields, fds: list[int]) -> bytes:
    """A body that is too large for a message comes as a file in memory, before the other descriptors."""
    size = number(decode(texts(fields, SPILL)[-1]), 1)
    if not fds or size > BODY_MAX:
        raise Malformed("a body that is not there, or too large")
    file = fds.pop(0)
    try:
        return os.pread(file, size, 0)
    finally:
        os.close(file)
