"""A WebSocket client for tests: whole messages, or byte by byte."""

import base64
import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import time

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
TIMEOUT_S = 20
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Refused(Exception):
    """The server answers the handshake with something else than 101."""

    def __init__(self, status, head, body):
        super().__init__(f"HTTP status {status}: {body[:300]!r}")
        self.status, self.head, self.body = status, head, body


class Closed(Exception):
    """The other side has ended the connection; code is None without a close frame."""

    def __init__(self, code, reason=""):
        super().__init__(f"closed with {code} {reason}")
        self.code, self.reason = code, reason


def mask_bytes(data, mask):
    wide = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(wide, "big")).to_bytes(len(data), "big")


def frame(opcode, data=b"", final=True, mask=None):
    """A client's frame. mask: four bytes; b"" = none, which is against the rules."""
    mask = os.urandom(4) if mask is None else mask
    bit = 0x80 if mask else 0
    if len(data) < 126:
        head = bytes([final << 7 | opcode, bit | len(data)])
    elif len(data) < 65536:
        head = bytes([final << 7 | opcode, bit | 126]) + struct.pack(">H", len(data))
    else:
        head = bytes([final << 7 | opcode, bit | 127]) + struct.pack(">Q", len(data))
    return head + mask + (mask_bytes(data, mask) if mask else data)


class WebSocket:
    """Connects and shakes hands. headers: more of them; key and version may be spoiled."""

    def __init__(self, port, path="/ws", headers=None, timeout=TIMEOUT_S, receive_buffer=None, host="127.0.0.1"):
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout)
        self.buffer = b""
        self.seen = []  # events that wait_event has passed over, and those it has found
        try:
            self.sock.connect((host, port))
            self._shake_hands(f"{host}:{port}", path, headers or {})
        except BaseException:
            self.sock.close()
            raise

    def _shake_hands(self, host, path, headers):
        key = base64.b64encode(os.urandom(16)).decode()
        wanted = {
            "Host": host, "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key,
            **headers,
        }  # fmt: skip
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in wanted.items() if value is not None), "", ""]
        self.sock.sendall("\r\n".join(lines).encode())
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        self.head = head.decode("latin-1")
        status = int(self.head.split(" ", 2)[1])
        if status != 101:
            with contextlib.suppress(Closed, OSError):
                while True:
                    self._more()
            raise Refused(status, self.head, self.buffer)
        accept = base64.b64encode(hashlib.sha1((wanted["Sec-WebSocket-Key"] + GUID).encode()).digest()).decode()
        assert accept in self.head, self.head

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    # ---- sending ----

    def send(self, data):
        """Text, bytes, or something for JSON."""
        if isinstance(data, bytes):
            self.sock.sendall(frame(BINARY, data))
        else:
            self.sock.sendall(frame(TEXT, (data if isinstance(data, str) else json.dumps(data)).encode()))

    def send_raw(self, data):
        self.sock.sendall(data)

    def close(self, code=1000):
        """An orderly end; the code of the answer."""
        self.sock.sendall(frame(CLOSE, struct.pack(">H", code)))
        try:
            while True:
                self.receive()
        except Closed as closed:
            return closed.code
        finally:
            self.sock.close()

    # ---- receiving ----

    def _read(self, most=1 << 20):
        try:
            data = self.sock.recv(most)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Closed(None)
        return data

    def _more(self):
        self.buffer += self._read()

    def _take(self, count):
        while len(self.buffer) < count:
            self._more()
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def receive_frame(self):
        """(final, opcode, data) of the next frame."""
        first, second = self._take(2)
        size = second & 0x7F
        if size > 125:
            size = struct.unpack(">H" if size == 126 else ">Q", self._take(2 if size == 126 else 8))[0]
        assert not second & 0x80, "a server's frame is masked"
        assert not first & 0x70, "reserved bits are set"
        parts = [self.buffer[:size]]
        self.buffer = self.buffer[size:]
        missing = size - len(parts[0])
        while missing:
            parts.append(self._read(min(missing, 1 << 20)))
            missing -= len(parts[-1])
        return bool(first & 0x80), first & 15, b"".join(parts)

    def receive(self):
        """The next message: str or bytes. Pings are answered. Closed at the end."""
        message, kind = b"", 0
        while True:
            final, opcode, data = self.receive_frame()
            if opcode == CLOSE:
                raise Closed(struct.unpack(">H", data[:2])[0] if data else 1005, data[2:].decode())
            if opcode == PING:
                self.sock.sendall(frame(PONG, data))
            elif opcode != PONG:
                kind, message = opcode or kind, message + data
                if final:
                    return message.decode() if kind == TEXT else message

    def event(self):
        """The next message as {"type", "data"}; a binary one is {"type": its number, "data": the rest}."""
        message = self.receive()
        found = json.loads(message) if isinstance(message, str) else {"type": struct.unpack(">I", message[:4])[0], "data": message[4:]}
        self.seen.append(found)
        return found

    def wait_event(self, kind, timeout=TIMEOUT_S, **wanted):
        """The next event of that type whose data has these values. What comes before it lies in self.seen too."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not (self.buffer or select.select([self.sock], [], [], left)[0]):
                raise AssertionError(f"no event {kind} {wanted} within {timeout} s; seen {[e['type'] for e in self.seen][-40:]}")
            found = self.event()
            if found["type"] == kind and all(found["data"].get(name) == value for name, value in wanted.items()):
                return found["data"]

    def wait_prompt(self, prompt_id, timeout=TIMEOUT_S):
        """The events of a prompt up to its end (success, error or interrupted), all of those that came."""
        begin = len(self.seen)
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not (self.buffer or select.select([self.sock], [], [], left)[0]):
                raise AssertionError(f"{prompt_id} did not end within {timeout} s; seen {self.seen[-20:]}")
            found = self.event()
            ends = ("execution_success", "execution_error", "execution_interrupted")
            if found["type"] in ends and found["data"].get("prompt_id") == prompt_id:
                return self.seen[begin:]

    def quiet(self, seconds):
        """True if nothing comes for that long."""
        return not self.buffer and not select.select([self.sock], [], [], seconds)[0]
