"""Faults on demand. tests/harness/fake_comfyui.py writes the rules into control/faults.json; its words are explained there."""

import asyncio
import fnmatch
import json
import os
import pathlib
import socket
import struct

FOLDER = pathlib.Path(__file__).resolve().parent / "control"
TURN_S = 0.02
PIECE = 64 * 1024


class Rules:
    def __init__(self):
        self.used = {}  # id of a rule: how often it has struck in this process

    @staticmethod
    def all():
        try:
            return json.loads((FOLDER / "faults.json").read_text())
        except FileNotFoundError:
            return []

    def find(self, method, path):
        """The rule for a request, or None; the pattern is without /api."""
        names = {f"{method} {path}", f"{method} {path.removeprefix('/api')}"}
        for rule in self.all():
            if rule.get("pid") not in (None, os.getpid()):
                continue
            if not any(fnmatch.fnmatchcase(name, rule["match"]) for name in names):
                continue
            if rule.get("times") is not None and self.used.get(rule["id"], 0) >= rule["times"]:
                continue
            self.used[rule["id"]] = self.used.get(rule["id"], 0) + 1
            return rule
        return None

    def is_there(self, rule):
        return any(found["id"] == rule["id"] for found in self.all())


rules = Rules()


def note(**entry):
    """One line of control/requests.jsonl; lines of several processes do not mix."""
    with open(FOLDER / "requests.jsonl", "ab", buffering=0) as log:
        log.write(json.dumps({"pid": os.getpid(), **entry}).encode() + b"\n")


def reset(writer):
    """The connection ends with RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def stand(request, rule):
    """Until the other side has gone, or the rule is taken away."""
    while not request.reader.at_eof() and rules.is_there(rule):
        try:
            await asyncio.wait_for(request.reader.read(PIECE), TURN_S)
        except TimeoutError:
            pass
        except OSError:
            return


def head(rule, *lines, status=200):
    return "\r\n".join([f"HTTP/1.1 {rule.get('status', status)} Fake", *lines, "", ""]).encode()


async def hang(request, rule):
    await stand(request, rule)


async def stall_unread(request, rule):
    """Does not read what is sent."""
    while rules.is_there(rule) and not request.writer.transport.is_closing():
        await asyncio.sleep(TURN_S)


async def slow_head(request, rule):
    """One byte of the head per step, and then a good answer."""
    for byte in head(rule, "Content-Type: application/json", "Content-Length: 2", "Connection: close"):
        request.writer.write(bytes([byte]))
        await request.writer.drain()
        await asyncio.sleep(rule.get("step_ms", 5) / 1000)
    request.writer.write(b"{}")


async def half_head(request, rule):
    request.writer.write(b"HTTP/1.1 200 OK\r\nContent-Ty")
    await finish(request, rule)


async def close(request, rule):
    """Not a byte."""
    await finish(request, rule)


async def status(request, rule):
    body = rule.get("body", "500 Internal Server Error").encode()
    kind = rule.get("content_type", "text/plain")
    request.writer.write(head(rule, f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close", status=500) + body)


async def long_length(request, rule):
    """Promises more than comes."""
    request.writer.write(head(rule, "Content-Length: 1000") + b"x" * 500)
    await finish(request, rule)


async def short_length(request, rule):
    """More comes than was promised: it looks like a second answer."""
    request.writer.write(head(rule, "Content-Length: 2") + b"{}HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nEXTRA!")
    await finish(request, rule)


async def bad_length(request, rule):
    request.writer.write(head(rule, f"Content-Length: {rule.get('value', '-5')}") + b"xxxxx")
    await finish(request, rule)


async def two_lengths(request, rule):
    request.writer.write(head(rule, "Content-Length: 5", "Content-Length: 50") + b"x" * 5)
    await finish(request, rule)


async def cut_chunk(request, rule):
    request.writer.write(head(rule, "Transfer-Encoding: chunked") + b"5\r\nhello\r\n100\r\nhalf")
    await finish(request, rule)


async def bad_chunk(request, rule):
    request.writer.write(head(rule, "Transfer-Encoding: chunked") + b"5\r\nhello\r\nzz\r\nno size\r\n0\r\n\r\n")
    await finish(request, rule)


async def half_body(request, rule):
    """Half of the body, and then nothing."""
    request.writer.write(head(rule, "Content-Length: 1000") + b"x" * 500)
    await stand(request, rule)


async def garbage(request, rule):
    request.writer.write(bytes(range(256)) * 4)
    await finish(request, rule)


async def huge_head(request, rule):
    request.writer.write(head(rule, *(f"X-Fill-{i}: {'x' * 1000}" for i in range(rule.get("kib", 2048))), "Content-Length: 0"))
    await finish(request, rule)


async def endless(request, rule):
    """A body without an end, as fast as it is read."""
    request.writer.write(head(rule, "Transfer-Encoding: chunked"))
    while rules.is_there(rule):
        request.writer.write(b"10000\r\n" + b"x" * PIECE + b"\r\n")
        await request.writer.drain()


async def no_json(request, rule):
    request.writer.write(head(rule, "Content-Type: application/json", "Content-Length: 9", "Connection: close") + b'{"half": ')


async def early(request, rule):
    """Answers, and only then reads the body."""
    request.writer.write(head(rule, "Transfer-Encoding: chunked") + b"5\r\nearly\r\n0\r\n\r\n")
    await request.writer.drain()
    note(read=len(await request.read()), target=request.target)


async def switch(request, rule):
    """Another protocol, which nobody asked for."""
    request.writer.write(b"HTTP/1.1 101 Fake\r\nUpgrade: other\r\nConnection: Upgrade\r\n\r\n")
    while rules.is_there(rule):
        request.writer.write(b"x" * PIECE)
        await request.writer.drain()


async def folded(request, rule):
    request.writer.write(head(rule, "X-Own: a", " Set-Cookie: b=c", "Content-Length: 2", "Connection: close") + b"{}")


async def finish(request, rule):
    """The end of a fault: FIN, or RST when the rule says so."""
    try:
        await request.writer.drain()
    finally:
        if rule.get("reset"):
            reset(request.writer)
        else:
            request.writer.close()


KINDS = {
    f.__name__: f
    for f in (
        hang, stall_unread, slow_head, half_head, close, status, long_length, short_length, bad_length, two_lengths, cut_chunk,
        bad_chunk, half_body, garbage, huge_head, endless, no_json, early, switch, folded,
    )  # fmt: skip
}


async def first(request):
    """Looks at each request before its handler. True = it is dealt with, and the connection with it."""
    note(method=request.method, target=request.target, headers=request.headers.pairs)
    rule = rules.find(request.method, request.rel_url.raw_path)
    if rule is None:
        return False
    if rule.get("after") == "body":
        await request.read()
    await KINDS[rule["kind"]](request, rule)
    try:
        await request.writer.drain()
    except OSError:
        pass
    note(fault=rule["kind"], target=request.target)
    return True


# ---- on WebSockets: one push per name, to one socket ----


async def push(socket_, kind, parameters):
    """Sends a frame, or breaks one. socket_: a WebSocketResponse."""
    from aiohttp.web import BINARY, TEXT, frame

    writer, size = socket_.writer, parameters.get("bytes", 100_000)
    broken = {
        "half_frame": frame(BINARY, b"x" * size)[: size // 2],
        "half_head": b"\x82\x7f\0\0",
        "masked": b"\x81\x82\x01\x02\x03\x04ab",
        "reserved": b"\xf1\x01a",
        "unknown_opcode": b"\x83\x01a",
        "bad_utf8": b"\x81\x02\xff\xfe",
        "huge_length": b"\x82\x7f" + struct.pack(">Q", 1 << 62) + b"x" * 1000,
        "lone_continuation": b"\x80\x01a",
        "long_ping": b"\x89\x7e\x00\xff" + b"p" * 255,
    }
    if kind in broken:
        writer.write(broken[kind])
    elif kind == "text":
        writer.write(frame(TEXT, parameters["text"].encode()))
    elif kind == "binary":
        for _ in range(parameters.get("count", 1)):
            writer.write(frame(BINARY, struct.pack(">II", 1, 1) + b"x" * (size - 8)))
            await writer.drain()
    elif kind == "fragments":
        text = parameters["text"].encode()
        for i, byte in enumerate(text):
            writer.write(frame(TEXT if i == 0 else 0, bytes([byte]), i == len(text) - 1))
    elif kind == "pings":
        writer.write(frame(9, b"p") * parameters.get("count", 1000))
    elif kind == "close":
        writer.write(frame(8, struct.pack(">H", parameters.get("code", 1001))))
    elif kind not in ("end", "reset"):
        raise ValueError(kind)
    if kind == "reset" or parameters.get("then") == "reset":
        reset(writer)
        return
    await writer.drain()
    if kind in ("end", "close") or parameters.get("then") == "end":
        writer.close()
