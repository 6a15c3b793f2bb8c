"""A small HTTP/1.1 and WebSocket server with aiohttp's names. `faults.hook` sees each request first, with the bare streams."""

import asyncio
import base64
import hashlib
import json
import mimetypes
import os
import re
import struct
import urllib.parse
from email.parser import BytesHeaderParser, BytesParser

HEAD_MAX = 256 * 1024
PIECE = 256 * 1024


class Headers(dict):
    """Names in any case; a name that came twice has its last value."""

    def __init__(self, pairs=()):
        super().__init__()
        self.pairs = list(pairs)
        for name, value in self.pairs:
            self[name] = value

    def __setitem__(self, name, value):
        super().__setitem__(name.lower(), value)

    def __getitem__(self, name):
        return super().__getitem__(name.lower())

    def get(self, name, default=None):
        return super().get(name.lower(), default)

    def __contains__(self, name):
        return super().__contains__(name.lower())


class URL:
    def __init__(self, target):
        parts = urllib.parse.urlsplit(target)
        self.raw_path, self.path = parts.path, urllib.parse.unquote(parts.path)
        self.query_string = parts.query
        self.query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))


class Field:
    """A part of a form: its text, or a file."""

    def __init__(self, name, filename, data):
        self.name, self.filename, self.data = name, filename, data


class Request:
    def __init__(self, method, target, headers, reader, writer, app):
        self.method, self.target, self.headers = method, target, headers
        self.rel_url = URL(target)
        self.path, self.query, self.match_info = self.rel_url.path, self.rel_url.query, {}
        self.reader, self.writer, self.app = reader, writer, app
        self.remote = "127.0.0.1"
        self._body = None
        self.taken = False  # somebody has the connection: it is not for another request

    async def pieces(self):
        """The body as it comes."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while True:
                size = int((await self.reader.readline()).split(b";")[0], 16)
                data = await self.reader.readexactly(size)
                await self.reader.readline()
                if size == 0:
                    return
                yield data
        left = int(self.headers.get("Content-Length", 0))
        while left:
            data = await self.reader.read(min(left, PIECE))
            if not data:
                raise ConnectionResetError("the body ended early")
            left -= len(data)
            yield data

    async def read(self):
        if self._body is None:
            self._body = b"".join([piece async for piece in self.pieces()])
        return self._body

    async def text(self):
        return (await self.read()).decode()

    async def json(self):
        return json.loads(await self.read())

    async def post(self):
        head = f"Content-Type: {self.headers.get('Content-Type', '')}\r\n\r\n".encode()
        form = {}
        for part in BytesParser().parsebytes(head + await self.read()).walk():
            name = part.get_param("name", header="Content-Disposition")
            if name:
                data, filename = part.get_payload(decode=True), part.get_filename()
                form[name] = Field(name, filename, data) if filename is not None else data.decode()
        return form


class Response:
    def __init__(self, *, body=b"", text=None, status=200, headers=None, content_type=None):
        self.body = text.encode() if text is not None else body
        self.status, self.headers = status, dict(headers or {})
        if content_type or text is not None:
            self.headers.setdefault("Content-Type", content_type or "text/plain; charset=utf-8")

    async def send(self, request):
        await send_head(request.writer, self.status, self.headers, len(self.body))
        if request.method != "HEAD":
            request.writer.write(self.body)
            await request.writer.drain()


class FileResponse(Response):
    """A file, whole or the range that is asked for."""

    def __init__(self, path, headers=None):
        super().__init__(headers=headers)
        self.path = path

    async def send(self, request):
        size = os.path.getsize(self.path)
        first, last = 0, size - 1
        self.headers.setdefault("Content-Type", mimetypes.guess_type(self.path)[0] or "application/octet-stream")
        self.headers["Accept-Ranges"] = "bytes"
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if wanted and (wanted[1] or wanted[2]):
            first = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
            last = min(int(wanted[2]) if wanted[1] and wanted[2] else last, last)
            if first > last:
                await send_head(request.writer, 416, {"Content-Range": f"bytes */{size}"}, 0)
                return
            self.status = 206
            self.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        await send_head(request.writer, self.status, self.headers, last - first + 1)
        if request.method == "HEAD":
            return
        with open(self.path, "rb") as file:
            file.seek(first)
            left = last - first + 1
            while left:
                data = file.read(min(left, PIECE))
                left -= len(data)
                request.writer.write(data)
                await request.writer.drain()


def json_response(data=None, *, status=200, headers=None, text=None):
    body = json.dumps(data).encode() if text is None else text.encode()
    return Response(body=body, status=status, headers={"Content-Type": "application/json; charset=utf-8", **(headers or {})})


async def send_head(writer, status, headers, length):
    reason = {200: "OK", 206: "Partial Content", 400: "Bad Request", 404: "Not Found"}.get(status, "Status")
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode())
    await writer.drain()


# ---- WebSocket ----

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10


def frame(opcode, data, final=True):
    """A server's frame."""
    head = bytes([final << 7 | opcode])
    if len(data) < 126:
        head += bytes([len(data)])
    elif len(data) < 65536:
        head += struct.pack(">BH", 126, len(data))
    else:
        head += struct.pack(">BQ", 127, len(data))
    return head + data


def unmask(data, mask):
    """All bytes at once, as one number."""
    wide = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(wide, "big")).to_bytes(len(data), "big")


class WebSocketResponse:
    def __init__(self, **_):
        self.closed = False
        self.writer = self.reader = None

    async def prepare(self, request):
        request.taken = True
        self.reader, self.writer = request.reader, request.writer
        key = request.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
            + f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
        )
        await self.writer.drain()

    async def send(self, opcode, data, final=True):
        self.writer.write(frame(opcode, data, final))
        await self.writer.drain()

    async def send_str(self, text):
        await self.send(TEXT, text.encode())

    async def send_json(self, data):
        await self.send_str(json.dumps(data))

    async def send_bytes(self, data):
        await self.send(BINARY, data)

    async def receive(self):
        """(opcode, data) of the next message; None at the end. Pings are answered."""
        message, kind = b"", 0
        while True:
            try:
                first, second = await self.reader.readexactly(2)
                size = second & 0x7F
                if size == 126:
                    (size,) = struct.unpack(">H", await self.reader.readexactly(2))
                elif size == 127:
                    (size,) = struct.unpack(">Q", await self.reader.readexactly(8))
                mask = await self.reader.readexactly(4) if second & 0x80 else b"\0\0\0\0"
                data = await self.reader.readexactly(size)
            except (asyncio.IncompleteReadError, OSError):
                return None
            data = unmask(data, mask)
            opcode = first & 15
            if opcode == CLOSE:
                self.writer.write(frame(CLOSE, data[:2]))
                return None
            if opcode == PING:
                await self.send(PONG, data)
            elif opcode in (0, TEXT, BINARY):
                kind, message = opcode or kind, message + data
                if first & 0x80:
                    return kind, message

    async def close(self, code=1000):
        self.closed = True
        self.writer.write(frame(CLOSE, struct.pack(">H", code)))
        await self.writer.drain()


# ---- application ----


class RouteTableDef(list):
    def route(self, method, path):
        def add(handler):
            self.append((method, path, handler))
            return handler

        return add

    def get(self, path):
        return self.route("GET", path)

    def post(self, path):
        return self.route("POST", path)

    def put(self, path):
        return self.route("PUT", path)

    def patch(self, path):
        return self.route("PATCH", path)

    def delete(self, path):
        return self.route("DELETE", path)


class Router:
    def __init__(self):
        self.table = []

    def add_route(self, method, path, handler):
        names = re.sub(r"\\?\{(\w+)(?::([^}]*))?\\?\}", lambda m: f"(?P<{m[1]}>{m[2] or '[^/]+'})", path)
        self.table.append((method, re.compile(names), handler))

    def find(self, method, path):
        for known, pattern, handler in self.table:
            match = pattern.fullmatch(path)
            if match and (known == method or (known, method) == ("GET", "HEAD")):
                return handler, match.groupdict()
        return None, {}


class Application(dict):
    def __init__(self, **_):
        super().__init__()
        self.router = Router()
        self.first = None  # an async function that may take a request: True = it has dealt with it

    def add_routes(self, routes):
        for method, path, handler in routes:
            self.router.add_route(method, path, handler)


class AppRunner:
    def __init__(self, app, **_):
        self.app = app
        self.connections = 0
        app["runner"] = self

    async def setup(self):
        pass

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            self.connections -= 1
            writer.close()

    async def _request(self, reader, writer):
        """One request; False = the connection is done with."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = line.decode("latin-1").split(" ")
        headers = Headers(BytesHeaderParser().parsebytes(rest).items())
        request = Request(method, target, headers, reader, writer, self.app)
        if self.app.first is not None and await self.app.first(request):
            return False
        handler, request.match_info = self.app.router.find(method, request.rel_url.raw_path)
        request.match_info = {name: urllib.parse.unquote(value) for name, value in request.match_info.items()}
        if handler is None:
            answer = Response(status=404, text="404: Not Found")
        else:
            try:
                answer = await handler(request)
            except (OSError, asyncio.IncompleteReadError):
                raise
            except Exception as error:
                answer = Response(status=500, text=f"{type(error).__name__}: {error}")
        if request.taken:
            return False
        await answer.send(request)
        await request.read()
        return headers.get("Connection", "").lower() != "close"


class SockSite:
    def __init__(self, runner, sock, **_):
        self.runner, self.sock, self.server = runner, sock, None

    async def start(self):
        self.server = await asyncio.start_server(self.runner.serve, sock=self.sock, limit=HEAD_MAX)


class TCPSite(SockSite):
    def __init__(self, runner, host=None, port=None, **_):
        super().__init__(runner, None)
        self.host, self.port = host, port

    async def start(self):
        self.server = await asyncio.start_server(self.runner.serve, self.host, self.port, limit=HEAD_MAX)
