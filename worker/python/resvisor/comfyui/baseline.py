"""Runs prompts on one plain ComfyUI process, without the pool: `resvisor verify --baseline` starts it for comparison.

    python -m resvisor.comfyui.baseline

Standard input is one line of JSON: {"directory", "args", "start_timeout_us", "graphs": [TEXT], "runs": [{"graph", "seed_offset"}]}.
Each answer is one line of JSON on standard output: {"ready_us"}, then for each run {"run_us", "executed", "loaders",
"disk_bytes"}, or {"error"} as the last one. When standard input ends, everything ends.

The process has folders, a database and a port of its own, and is gone when this one is. It needs aiohttp, as ComfyUI does.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from .. import Error
from .folders import take
from .jobs import JobError, parse, validation_text
from .trace import classes, loaders, vary

POLL_S = 0.1  # how often a ComfyUI that starts is asked
STOP_S = 10.0  # after SIGINT; then it is killed
LOG_SHOWN = 300  # bytes of its log's end, when it ends by itself
MESSAGE_MAX = 64 * 1024 * 1024  # bytes of one event: previews
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    pass


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def arguments(directory: pathlib.Path, given: list[str], folder: pathlib.Path, port: int) -> list[str]:
    """The type's own arguments, then ours, which win. A flag that this ComfyUI does not know is left out."""
    known = (directory / "comfy" / "cli_args.py").read_text(errors="replace")
    given = list(given)
    take(given, "--listen")
    take(given, "--port")
    ours = {
        "--temp-directory": str(folder / "temporary"),
        "--user-directory": str(folder / "user"),
        "--output-directory": str(folder / "output"),
        "--database-url": f"sqlite:///{folder / 'comfyui.db'}",
    }
    for name in ("temporary", "user", "output"):
        (folder / name).mkdir()
    added = [part for flag, value in ours.items() if f'"{flag}"' in known for part in (flag, value)]
    return [*given, *added, "--listen", "127.0.0.1", "--port", str(port)]


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Plain:
    """One ComfyUI process."""

    def __init__(self, session: aiohttp.ClientSession, process: asyncio.subprocess.Process, port: int, log: Any) -> None:
        self.session = session
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.client = uuid.uuid4().hex

    def last_words(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_SHOWN))
        return " ".join(self.log.read().decode(errors="replace").split())

    def check(self) -> None:
        if self.process.returncode is not None:
            code = self.process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise Failed(f"the plain ComfyUI ended with {how}; its log ends with: {self.last_words()}")

    async def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with self.session.get(f"{self.url}/prompt") as answer:
                    if answer.status == 200:
                        return
            if time.monotonic() >= deadline:
                raise Failed(f"the plain ComfyUI was not ready within {timeout_s:.0f} s; its log ends with: {self.last_words()}")
            await asyncio.sleep(POLL_S)

    def disk_bytes(self) -> int:
        """What it has read from disks so far. Files in the page cache do not count."""
        with open(f"/proc/{self.process.pid}/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))

    async def run(self, text: str, offset: int) -> dict[str, Any]:
        graph = parse(text.encode())["prompt"]
        vary(graph, offset)
        before = self.disk_bytes()
        async with self.session.ws_connect(f"{self.url}/ws?clientId={self.client}", max_msg_size=MESSAGE_MAX) as events:
            began = time.monotonic()
            body = {"prompt": graph, "client_id": self.client}
            async with self.session.post(f"{self.url}/prompt", json=body) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise Failed(f"the plain ComfyUI refuses the prompt: {validation_text(data)}")
            executed = await self._follow(events, json.loads(data)["prompt_id"])
            took = time.monotonic() - began
        ran = classes(graph, executed)
        return {
            "run_us": int(took * 1e6), "executed": ran, "loaders": loaders(ran), "disk_bytes": self.disk_bytes() - before
        }  # fmt: skip

    async def _follow(self, events: Any, prompt: str) -> list[str]:
        """The nodes that ran, to the end of the prompt."""
        executed: list[str] = []
        async for message in events:
            if message.type != aiohttp.WSMsgType.TEXT:
                continue
            event = json.loads(message.data)
            data = event.get("data") or {}
            if data.get("prompt_id") != prompt:
                continue
            if event["type"] == "execution_error":
                raise Failed(
                    f"plain ComfyUI: node {data.get('node_id')} ({data.get('node_type')}): "
                    f"{data.get('exception_type')}: {' '.join(str(data.get('exception_message')).split())}"
                )
            if event["type"] == "execution_interrupted":
                raise Failed("plain ComfyUI: the prompt was interrupted")
            if event["type"] == "executing" and data.get("node") is None:
                return executed
            if event["type"] == "executing":
                executed.append(str(data["node"]))
        with contextlib.suppress(asyncio.TimeoutError):  # its server has closed the connection; mostly it ends
            await asyncio.wait_for(self.process.wait(), STOP_S)
        self.check()
        raise Failed("the plain ComfyUI closed the connection")

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
            except asyncio.TimeoutError:
                pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and what its nodes have started
        await self.process.wait()


@contextlib.asynccontextmanager
async def plain(order: dict[str, Any]) -> AsyncIterator[Plain]:
    directory = pathlib.Path(order["directory"])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="resvisor-baseline-"))
    try:
        port = free_port()
        command = [sys.executable, "main.py", *arguments(directory, order["args"], folder, port)]
        with open(folder / "log", "w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=directory, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_end_with_parent,
            )  # fmt: skip
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                found = Plain(session, process, port, log)
                try:
                    yield found
                finally:
                    await found.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def run(order: dict[str, Any]) -> None:
    began = time.monotonic()
    async with plain(order) as comfyui:
        await comfyui.wait_ready(order["start_timeout_us"] / 1e6)
        say({"ready_us": int((time.monotonic() - began) * 1e6)})
        for one in order["runs"]:
            say(await comfyui.run(order["graphs"][one["graph"]], one["seed_offset"]))


async def serve() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MESSAGE_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    order = json.loads(await reader.readline())
    work = asyncio.ensure_future(run(order))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    left = asyncio.ensure_future(reader.read())
    left.add_done_callback(lambda _: work.cancel())  # nobody wants the answers any more
    try:
        await work
    except asyncio.CancelledError:
        return 130
    except (Failed, JobError, Error, OSError, aiohttp.ClientError) as error:
        say({"error": str(error) or type(error).__name__})
        return 1
    finally:
        left.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))
