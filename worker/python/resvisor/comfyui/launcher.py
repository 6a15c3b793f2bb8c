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
from .folders import Folders, Prefix, take
from .hooks import Hooks
from .jobs import Jobs, PromptThreadDied
from .monitor import Monitor
from .packs import Packs
from .pool import Pool
from .report import Report, log
from .server import Server, ServerError, inherited
from .settings import Settings
from .warmup import run as run_warmup
from .warmup import wait_for_turn

if TYPE_CHECKING:
    from .preload import Preloaded

EXIT_CONFIG = 78  # the supervisor does not start such a worker again by itself
START_S = 24 * 3600.0  # the supervisor's start_timeout comes long before
LOOP_TIMEOUT = "RESVISOR_LOOP_TIMEOUT_MS"
REASON_MAX = 300  # characters of a failed warm-up in the detail; the log has all


def _version(directory: pathlib.Path) -> str:
    try:
        text = (directory / "comfyui_version.py").read_text(errors="replace")
    except OSError:
        return "of unknown version"
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", text)
    return found.group(1) if found else "of unknown version"


def own_arguments(arguments: list[str]) -> list[str]:
    """Those of the configuration that ComfyUI itself gets: address and port are the launcher's."""
    found = list(arguments)
    for flag in ("--listen", "--port"):
        take(found, flag)
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
        self.warmup: str = options.warmup
        self.warmup_must_work = options.warmup_failure == "fail"
        self.arguments = own_arguments(options.arguments)
        self.preloaded = preloaded
        self.report = preloaded.report if preloaded else Report()
        self.pool = Pool(worker.connection)
        self.hooks = Hooks(self.pool, self.report)
        if preloaded and preloaded.hooks:  # installed there, before others could take names
            self.hooks = preloaded.hooks
            self.hooks.pool = self.pool
        self.packs = Packs(self.report)
        self.prefix = Prefix(options.output_prefix, worker.id, self.report)
        self.server = Server(inherited())
        self.monitor = Monitor(self.server, self.pool, float(os.environ.get(LOOP_TIMEOUT, "0")) / 1000)
        self.monitor.say, self.monitor.end = self._say, self._end
        self.arguments += ["--listen", self.server.address, "--port", str(self.server.port)]
        self.folders = Folders(options.state, worker.id, options.primary, self.directory, self.arguments)
        self.arguments += self.folders.arguments(self.arguments)
        self.settings = Settings(self.folders, self.arguments)
        self.detail = ""  # what stays the same once the worker is ready

    def run(self) -> int:
        damaged = self.settings.look()
        if damaged:
            for damage in damaged:
                log(f"file_damaged: {damage}; {self.settings.advice(damage, self.worker.type)}")
            self.worker.close()
            return EXIT_CONFIG
        if self.pooling == "off":
            self.report.problem(f"types.{self.worker.type}.pooling is off")
        elif not (self.preloaded and self.preloaded.hooks):
            self.hooks.install()
        self.server.install()
        self.packs.install()
        self.prefix.install()
        threading.Thread(target=self._serve, name="resvisor-jobs", daemon=True).start()
        os.chdir(self.directory)
        sys.argv = [str(self.main), *self.arguments]
        if self.preloaded:
            self.preloaded.set_arguments(self.arguments)
        else:
            sys.path[0] = str(self.directory)  # `python -m` has put the working folder there
        runpy.run_path(str(self.main), run_name="__main__")
        self.settings.look()  # ComfyUI has ended in order: what people have set is worth a copy
        return 0

    # ---- our thread ----

    def _serve(self) -> None:
        try:
            self.server.serving.wait(START_S)
            jobs = Jobs(self.server, self._prompt_thread(), self.report)
            self.detail = self._handshake()
            self._warm_up(jobs)
            self._say()
            self.server.watcher = self.monitor.on_event
            self.monitor.start()
            while (job := self.worker.next()) is not None:
                jobs.run(job)
            os.kill(os.getpid(), signal.SIGINT)
        except PromptThreadDied as error:
            self._end(str(error))  # its last line, which becomes the reason of the job's end
        except SystemExit as error:
            log(str(error))
            self._leave(EXIT_CONFIG)
        except BaseException:
            traceback.print_exc()
            self._leave(1)

    def _warm_up(self, jobs: Jobs) -> None:
        """SystemExit when it fails and must not."""
        if not self.warmup:
            return
        wait_for_turn()
        reason = run_warmup(jobs, self.warmup)
        if reason and self.warmup_must_work:
            log(f"the warm-up failed: {reason}; types.{self.worker.type}.warmup_failure is fail")
            self._leave(1)
        if reason:
            self.detail += f"; the warm-up failed: {reason[:REASON_MAX]}"

    def _say(self) -> None:
        """Tells the supervisor what the worker is like; the first time it is thereby ready."""
        try:
            self.worker.ready("; ".join([self.detail, *self.monitor.describe()]))
        except (Error, ValueError) as error:
            log(f"the supervisor is not told: {error}")

    def _end(self, reason: str) -> None:
        log(reason.replace("types.NAME", f"types.{self.worker.type}"))
        os._exit(1)  # the thread of the jobs may be in the library: nothing is closed under it

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
        self.prefix.verify(self.folders, self.arguments)
        text = f"ComfyUI {_version(self.directory)} at {self.server.url}"
        reason = "; ".join(self.report.problems)
        if reason and self.pooling == "required":
            raise SystemExit(f"unpooled: {reason}; types.{self.worker.type}.pooling is required")
        pool = f"unpooled: {reason}" if reason else f"pooled: {', '.join(self.report.patched)}"
        return "; ".join([text, pool, *self.packs.describe(), *self.report.notes])

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
    parser.add_argument("--primary", action="store_true", help="its first worker has the users' folder")
    parser.add_argument("--not-primary", action="store_false", dest="primary", help="the other way round; the default")
    parser.add_argument("--output-prefix", default="", metavar="TEXT", help="before the name of each saved file")
    parser.add_argument("--warmup", default="", metavar="FILE", help="a prompt that is run before the worker is ready")
    parser.add_argument("--warmup-failure", default="continue", choices=("continue", "fail"), help="what follows if it fails")
    parser.add_argument("--restore", default="", metavar="TYPE/NUMBER", help="put good copies of damaged settings back, and end")
    parser.add_argument("main", metavar="MAIN.PY", help="ComfyUI's main.py, or its folder")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return parser.parse_args(arguments)


def restore(options: argparse.Namespace) -> int:
    """For `resvisor restore-config`: of one worker, which need not run."""
    directory = pathlib.Path(os.path.abspath(options.main))
    folders = Folders(options.state, options.restore, options.primary, directory, options.arguments)
    left = found = 0
    try:
        for good, line in Settings(folders, options.arguments).restore():
            found, left = found + 1, left + (not good)
            print(f"{options.restore}: {line}", flush=True)
    except OSError as error:
        print(f"resvisor: {options.restore}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if not found:
        print(f"{options.restore}: no settings file is damaged")
    return 1 if left else 0


def main(arguments: list[str], preloaded: "Preloaded | None" = None) -> int:
    options = parse(arguments)
    if options.restore:
        return restore(options)
    faulthandler.enable()
    try:
        worker = Worker.open(models=())
        launcher = Launcher(worker, options, preloaded)
    except Error as error:
        print(f"resvisor.comfyui: {error}", file=sys.stderr)
        return 2 if error.code is ErrorCode.USAGE else 1
    except OSError as error:
        log(f"{error.filename or ''}: {error.strerror}")
        return 1
    return launcher.run()
