"""ComfyUI's own server: the socket it serves on, its events, and requests to it."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import validate
from .imports import after_import
from .report import log

REQUEST_TIMEOUT_S = 60.0  # its event loop stands still while a node's code blocks it
ANSWER_MAX = 64 * 1024 * 1024  # bytes

Observer = Callable[[str, Any], None]


class ServerError(Exception):
    """ComfyUI's server did not answer, or not with 200. status 0 = no answer."""

    def __init__(self, status: int, body: bytes, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body


def listen(address: str, port: int) -> socket.socket:
    """A listening socket. It is made here and given to ComfyUI, so nobody can take the port in between."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, port))
        found.listen(128)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise SystemExit(f"cannot listen on {address} port {port}: {error.strerror}{_holder(port)}") from None
    return found


def _holder(port: int) -> str:
    """Who listens on a port, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                fields = [line.split() for line in list(lines)[1:]]
        except OSError:
            continue
        inodes |= {f[9] for f in fields if len(f) > 9 and f[3] == "0A" and int(f[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            if wanted & held:
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    text = command.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
                return f"; process {pid} has it: {text}"
        except OSError:
            continue
    return ""


class Server:
    """address: the one that ComfyUI is told to listen on."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.address: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.serving = threading.Event()
        self.observer: Observer = lambda event, data: None
        self.prompt_server: Any = None
        self.problem = ""

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"

    def install(self) -> None:
        after_import("server", self._patch)

    # ---- ComfyUI's side ----

    def _patch(self, module: ModuleType) -> None:
        try:
            self._give_socket(module)
            self._watch_events(module)
            validate.add_route(module)
        except Exception as error:
            self.problem = f"ComfyUI's server is not as expected: {type(error).__name__}: {error}"
            log(self.problem)
            self.serving.set()  # nobody shall wait for what cannot come

    def _give_socket(self, module: ModuleType) -> None:
        """The first site that ComfyUI opens at our address gets our socket; then everything is as before."""
        web = module.web
        original = web.TCPSite
        server = self

        class Site(web.SockSite):  # type: ignore[misc,name-defined]
            async def start(self) -> None:
                await super().start()
                server.serving.set()

        def tcp_site(runner: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
            if (host, port) != (server.address, server.port):
                return original(runner, host, port, **options)
            web.TCPSite = original
            return Site(runner, server.listener, ssl_context=options.get("ssl_context"))

        web.TCPSite = tcp_site

    def _watch_events(self, module: ModuleType) -> None:
        original = module.PromptServer.send_sync
        server = self

        def send_sync(self: Any, event: Any, data: Any, sid: Any = None) -> Any:
            server.prompt_server = self
            try:
                if isinstance(event, str):
                    server.observer(event, data)
            except Exception as error:
                log(f"event {event}: {type(error).__name__}: {error}")
            return original(self, event, data, sid)

        module.PromptServer.send_sync = send_sync

    # ---- our side ----

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The JSON that ComfyUI answers. ServerError."""
        data = None if body is None else json.dumps(body).encode()
        sent = {**({} if data is None else {"Content-Type": "application/json"}), **(headers or {})}
        connection = http.client.HTTPConnection(self._connect_to(), self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            text = answer.read(ANSWER_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(0, b"", f"ComfyUI's server does not answer {method} {path}: {reason}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerError(answer.status, text, f"{method} {path}: HTTP status {answer.status}")
        if len(text) > ANSWER_MAX:
            raise ServerError(answer.status, b"", f"{method} {path}: an answer of more than {ANSWER_MAX} bytes")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise ServerError(answer.status, text, f"{method} {path}: no JSON: {error}") from None

    def _connect_to(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
