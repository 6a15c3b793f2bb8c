"""ComfyUI's own server: the socket it serves on, its events, and requests to it."""

import asyncio
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
HTTP_FD = "RESVISOR_HTTP_FD"
ANSWER_MAX = 64 * 1024 * 1024  # bytes

Observer = Callable[[str, Any], None]


class ServerError(Exception):
    """ComfyUI's server did not answer, or not with 200. status 0 = no answer."""

    def __init__(self, status: int, body: bytes, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body


def inherited() -> socket.socket:
    """The listening socket that the supervisor keeps for this worker, so that nobody can take its port in between."""
    found = socket.socket(fileno=int(os.environ[HTTP_FD]))
    found.set_inheritable(False)  # not for the programs that nodes start
    found.setblocking(False)
    return found


class Server:
    """address: the one that ComfyUI is told to listen on."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.address: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self.serving = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None  # ComfyUI's, once it serves
        self.observer: Observer = lambda event, data: None
        self.watcher: Observer = lambda event, data: None  # of all prompts, for the worker's life
        self.prompt_server: Any = None
        self.problem = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

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
                server.loop = asyncio.get_running_loop()
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
                    server.watcher(event, data)
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
        return "127.0.0.1" if self.address == "0.0.0.0" else self.address
