"""Starts ComfyUI's main.py in this process, as a worker.

The main thread is ComfyUI's. A thread of ours waits until its server answers, says that the worker is ready, and runs
jobs one after another. When resvisor wants the worker to end, that thread sends SIGINT to the process: ComfyUI's own way
to stop.
"""

import argparse
import faulthandler
import os
import pathlib
import re
import runpy
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from .. import Error, ErrorCode
from ..worker import Worker
from .hooks import Hooks
from .jobs import Jobs, PromptThreadDied
from .pool import Pool
from .report import Report, log
from .server import Server, ServerError, listen

if TYPE_CHECKING:
    from .preload import Preloaded

EXIT_CONFIG = 78  # the supervisor does not start such a worker again by itself
START_S = 24 * 3600.0  # the supervisor's start_timeout comes long before


class Usage(Exception):
    pass


def _given(arguments: list[str], flag: str) -> bool:
    return any(argument == flag or argument.startswith(flag + "=") for argument in arguments)


def _take(arguments: list[str], flag: str) -> str | None:
    """Takes `--flag VALUE` or `--flag=VALUE` out of the arguments; the last one counts."""
    value = None
    i = 0
    while i < len(arguments):
        if arguments[i].startswith(flag + "="):
            value = arguments.pop(i).partition("=")[2]
        elif arguments[i] == flag and i + 1 < len(arguments) and not arguments[i + 1].startswith("--"):
            value = arguments[i + 1]
            del arguments[i : i + 2]
        elif arguments[i] == flag:
            raise Usage(f"{flag} needs a value")
        else:
            i += 1
    return value


def default_state_folder() -> str:
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return given
    if os.geteuid() == 0:
        return "/var/lib/resvisor"
    return os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "resvisor")


class Folders:
    """What two ComfyUI processes must not share: each worker has its own, below one folder."""

    def __init__(self, root: str, worker: str) -> None:
        self.name = worker.replace("/", "-")
        self.own = pathlib.Path(root or default_state_folder()) / "comfyui" / self.name

    def arguments(self, directory: pathlib.Path, arguments: list[str]) -> list[str]:
        """The flags that are not given. A flag that this ComfyUI does not know is left out."""
        try:
            known = (directory / "comfy" / "cli_args.py").read_text(errors="replace")
        except OSError:
            known = ""
        base = pathlib.Path(_peek(arguments, "--base-directory") or directory)
        user, temp = self.own / "user", self.own / "temporary"
        for folder in (user, temp):
            folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            "--temp-directory": str(temp),  # ComfyUI empties DIR/temp at its start and end
            "--user-directory": str(user),
            "--database-url": f"sqlite:///{self.own / 'comfyui.db'}",  # one process may have it open
            # Counters in file names are found by looking: two processes in one folder would overwrite each other's.
            "--output-directory": str(base / "output" / self.name),
        }
        added = []
        for flag, value in wanted.items():
            if _given(arguments, flag):
                continue
            if f'"{flag}"' not in known:
                log(f"this ComfyUI has no {flag}")
                continue
            added += [flag, value]
        return added


def _peek(arguments: list[str], flag: str) -> str | None:
    return _take(list(arguments), flag)


def _version(directory: pathlib.Path) -> str:
    try:
        text = (directory / "comfyui_version.py").read_text(errors="replace")
    except OSError:
        return "of unknown version"
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return found.group(1) if found else "of unknown version"


def _port(arguments: list[str], worker: str) -> int:
    """The one that is given is the first worker's, the next worker's is one more. 0 = any."""
    given = _take(arguments, "--port")
    if given is None or given == "0":
        return 0
    number = worker.rpartition("/")[2]
    port = int(given) + int(number) if given.isdigit() and number.isdigit() else -1
    if not 1 <= port <= 65535:
        raise Usage(f"--port {given} is no port for {worker}")
    return port


def own_arguments(arguments: list[str]) -> list[str]:
    """Those of the configuration that ComfyUI itself gets: address and port are the launcher's. Usage."""
    found = list(arguments)
    for flag in ("--port", "--listen"):
        _take(found, flag)
    return found


class Launcher:
    """preloaded: what the template that this process was forked from has imported already."""

    def __init__(self, worker: Worker, options: argparse.Namespace, preloaded: "Preloaded | None" = None) -> None:
        self.worker = worker
        self.main = pathlib.Path(os.path.abspath(options.main))
        if self.main.is_dir():
            self.main /= "main.py"
        self.directory = self.main.parent
        self.pooling: str = options.pooling
        self.arguments: list[str] = list(options.arguments)
        self.preloaded = preloaded
        self.report = preloaded.report if preloaded else Report()
        self.pool = Pool(worker.connection)
        self.hooks = Hooks(self.pool, self.report)
        if preloaded and preloaded.hooks:  # installed there, before others could take names
            self.hooks = preloaded.hooks
            self.hooks.pool = self.pool
        for flag in ("--tls-keyfile", "--tls-certfile", "--quick-test-for-ci"):
            if _given(self.arguments, flag):
                raise Usage(f"{flag} does not work in a worker; take it out of types.{worker.type}.args")
        port = _port(self.arguments, worker.id)
        self.server = Server(listen(_take(self.arguments, "--listen") or "127.0.0.1", port))
        self.arguments += ["--listen", self.server.address, "--port", str(self.server.port)]
        self.arguments += Folders(options.state, worker.id).arguments(self.directory, self.arguments)

    def run(self) -> int:
        if self.pooling == "off":
            self.report.problem(f"types.{self.worker.type}.pooling is off")
        elif not (self.preloaded and self.preloaded.hooks):
            self.hooks.install()
        self.server.install()
        threading.Thread(target=self._serve, name="resvisor-jobs", daemon=True).start()
        os.chdir(self.directory)
        sys.argv = [str(self.main), *self.arguments]
        if self.preloaded:
            self.preloaded.set_arguments(self.arguments)
        else:
            sys.path[0] = str(self.directory)  # `python -m` has put the working folder there
        runpy.run_path(str(self.main), run_name="__main__")
        return 0

    # ---- our thread ----

    def _serve(self) -> None:
        try:
            self.server.serving.wait(START_S)
            jobs = Jobs(self.server, self._prompt_thread())
            self.worker.ready(self._handshake())
            while (job := self.worker.next()) is not None:
                jobs.run(job)
            os.kill(os.getpid(), signal.SIGINT)
        except PromptThreadDied as error:
            log(f"{error}")
            self._leave(1)
        except SystemExit as error:
            log(str(error))
            self._leave(EXIT_CONFIG)
        except BaseException:
            traceback.print_exc()
            self._leave(1)

    def _leave(self, code: int) -> None:
        """ComfyUI's threads cannot be waited for: one may stand in a node for ever."""
        self.worker.close()
        sys.stderr.flush()
        os._exit(code)

    def _handshake(self) -> str:
        """What the worker says of itself. SystemExit when the pool is required and not there."""
        if self.server.problem:
            raise SystemExit(self.server.problem)
        try:
            self.server.request("GET", "/prompt")
        except ServerError as error:
            raise SystemExit(str(error)) from None
        if self.pooling != "off":
            self.hooks.verify()
        text = f"ComfyUI {_version(self.directory)} at {self.server.url}"
        if not self.report.problems:
            return f"{text}; pooled: {', '.join(self.report.patched)}"
        reason = "; ".join(self.report.problems)
        if self.pooling == "required":
            raise SystemExit(f"unpooled: {reason}; types.{self.worker.type}.pooling is required")
        return f"{text}; unpooled: {reason}"

    def _prompt_thread(self) -> threading.Thread | None:
        """ComfyUI's thread that runs prompts, by the name that Python gives it."""
        for thread in threading.enumerate():
            if "(prompt_worker)" in thread.name:
                return thread
        log("ComfyUI's prompt thread is not found; a node that calls sys.exit() will not be noticed")
        return None


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m resvisor.comfyui", description="Runs ComfyUI as a worker of resvisor; resvisor starts it."
    )
    parser.add_argument("--state", default="", metavar="DIR", help="below it each worker has folders of its own")
    parser.add_argument("--pooling", default="preferred", choices=("preferred", "required", "off"))
    parser.add_argument("main", metavar="MAIN.PY", help="ComfyUI's main.py, or its folder")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser.parse_args(arguments)


def main(arguments: list[str], preloaded: "Preloaded | None" = None) -> int:
    options = parse(arguments)
    faulthandler.enable()
    try:
        worker = Worker.open(models=())
        launcher = Launcher(worker, options, preloaded)
    except Error as error:
        print(f"resvisor.comfyui: {error}", file=sys.stderr)
        return 2 if error.code is ErrorCode.USAGE else 1
    except Usage as error:
        log(str(error))
        return EXIT_CONFIG
    except OSError as error:
        log(f"{error.filename or ''}: {error.strerror}")
        return 1
    return launcher.run()
