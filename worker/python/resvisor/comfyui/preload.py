"""What a template imports before workers are forked from it, and what a forked worker must set anew.

With --cpu these are all modules that ComfyUI's main.py imports, in its order, and ComfyUI's own nodes. Without it, importing
ComfyUI's modules would open the device, which does not survive a fork: then only the packages of requirements.txt.
"""

import ast
import asyncio
import ctypes
import importlib
import inspect
import logging
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from . import imports
from .hooks import Hooks
from .report import Report, log

# Modules of packages whose names differ, as ComfyUI's requirements.txt has them.
_MODULES = {"pillow": "PIL", "pyyaml": "yaml", "comfyui-frontend-package": "", "comfyui-workflow-templates": "", "comfyui-embedded-docs": ""}
CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h
CUDA_VERSION = 12000
_NODE_LISTS = ("init_builtin_extra_nodes", "init_builtin_api_nodes")


class Unfit(Exception):
    """No worker may be forked from this process; the text says why."""


def _imports(main: pathlib.Path) -> Iterator[str]:
    """The modules that main.py imports at its top level, in its order; then those of its package `app` in functions."""
    tree = ast.parse(main.read_text())
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("app.")]
    for statement in [*tree.body, *inner]:
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
            # a name may be a module of the package
            yield from (f"{statement.module}.{name.name}" for name in statement.names if name.name.islower())


def _packages(requirements: pathlib.Path) -> Iterator[str]:
    for line in requirements.read_text(errors="replace").splitlines():
        found = re.match(r"[A-Za-z0-9_.-]+", line.strip())
        name = found.group(0).lower() if found else ""
        module = _MODULES.get(name, name.replace("-", "_"))
        if module:
            yield module


def _import(name: str) -> None:
    """A module that cannot be imported is ComfyUI's to complain about, in each worker."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        if error.name != name:  # not a mere name in a module
            log(f"template: {name}: {error}")
    except Exception as error:
        log(f"template: {name}: {type(error).__name__}: {error}")


def identity(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Files:
    """The files that were imported, and which packages are installed: compared whenever a worker is to be forked."""

    def __init__(self, begun_ns: int) -> None:
        paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        paths |= {sys.executable, os.path.realpath(sys.executable)}
        self.known = {path: identity(path) for path in paths if isinstance(path, str) and os.path.isabs(path)}
        self.folders = [path for path in dict.fromkeys(sys.path) if os.path.basename(path) in ("site-packages", "dist-packages")]
        self.installed = self._installed()
        # What was written while it was imported may be known by its old content. Times ahead of the clock mean nothing.
        now = time.time_ns()
        self.doubtful = next((path for path, found in self.known.items() if found and begun_ns <= found[3] <= now), "")

    def _installed(self) -> set[tuple[str, tuple[int, ...] | None]]:
        found = set()
        for folder in self.folders:
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            found |= {(os.path.join(folder, name), identity(os.path.join(folder, name))) for name in names if name.endswith((".dist-info", ".pth", ".egg-link"))}
        return found

    def changed(self) -> str:
        """What is not as it was when it was imported; empty = nothing."""
        if self.doubtful:
            return f"{self.doubtful} was changed while it was imported"
        for path, known in self.known.items():
            if identity(path) != known:
                return f"{path} has changed"
        other = self._installed() ^ self.installed
        return f"{min(path for path, _ in other)} has changed" if other else ""


class Preloaded:
    """What this process has imported for its workers."""

    def __init__(self, directory: pathlib.Path, arguments: list[str], pooling: str) -> None:
        self.directory = directory
        self.arguments = arguments
        self.whole = "--cpu" in arguments
        self.report = Report()
        self.hooks = Hooks(None, self.report) if self.whole and pooling != "off" else None
        self.threads = 0
        self.seed: int | None = None
        begun = time.time_ns()
        os.chdir(directory)
        sys.path[0] = str(directory)  # `python -m` has put the working folder there
        self._torch()
        if self.whole:
            self._comfyui()
        else:
            self._others()
        self.files = Files(begun)

    def __str__(self) -> str:
        torch = sys.modules.get("torch")
        what = "ComfyUI's own among them" if self.whole else "none of ComfyUI's own, since these would open the device"
        return f"torch {getattr(torch, '__version__', 'is not there')}; {len(sys.modules)} modules, {what}"

    # ---- importing ----

    def _torch(self) -> None:
        if not self.whole:
            # It chooses the GPU's allocator, which must be known when torch is imported.
            self._parse_arguments()
            _import("cuda_malloc")
        _import("torch")
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        # The number that this process would have computed with, by its own rules. Until there is a worker it makes no
        # threads: one thread is all that a fork takes along.
        self.threads = torch.get_num_threads()
        self.seed = torch.initial_seed()
        torch.set_num_threads(1)

    def _parse_arguments(self) -> None:
        sys.argv = [str(self.directory / "main.py"), *self.arguments]
        options = importlib.import_module("comfy.options")
        options.enable_args_parsing()
        importlib.import_module("comfy.cli_args")

    def _comfyui(self) -> None:
        self._parse_arguments()
        if self.hooks is not None:
            self.hooks.install()
        for name in _imports(self.directory / "main.py"):
            if name != "cuda_malloc":  # of a device
                _import(name)
        nodes = sys.modules.get("nodes")
        for name in _NODE_LISTS:
            if nodes is not None and not (name == "init_builtin_api_nodes" and "--disable-api-nodes" in self.arguments):
                self._nodes(nodes, name)

    @staticmethod
    def _nodes(nodes: ModuleType, name: str) -> None:
        """Makes one of ComfyUI's own lists of nodes here. Asked for again in a worker it is there."""
        original = getattr(nodes, name, None)
        if not inspect.iscoroutinefunction(original) or inspect.signature(original).parameters:
            return
        try:
            failed = asyncio.run(original())
        except Exception as error:
            log(f"template: nodes.{name}: {type(error).__name__}: {error}")
            return

        async def made_already() -> Any:
            setattr(nodes, name, original)
            return failed

        setattr(nodes, name, made_already)

    def _others(self) -> None:
        try:
            names = list(_packages(self.directory / "requirements.txt"))
        except OSError as error:
            log(f"template: {error.filename}: {error.strerror}")
            return
        for name in names:
            _import(name)

    # ---- forking ----

    def check(self) -> None:
        """Raises Unfit: a fork would give a worker that hangs, or whose device does not work."""
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise Unfit(f"it has {threads} threads, of which a fork would take one along")
        if _driver_is_used():
            raise Unfit("the CUDA driver is initialised, which does not survive a fork")
        torch: Any = sys.modules.get("torch")
        for name in ("cuda", "xpu"):
            if getattr(getattr(torch, name, None), "is_initialized", bool)():
                raise Unfit(f"torch.{name} is initialised, which does not survive a fork")
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/")):
                raise Unfit(f"it has opened {target}, which does not survive a fork")

    def renew(self) -> None:
        """In the worker: what was computed from the template's threads, random numbers and names."""
        imports.allow_late()
        torch: Any = sys.modules.get("torch")
        if torch is not None and self.threads:
            torch.set_num_threads(self.threads)
            if self.seed is not None:
                torch.default_generator.manual_seed(self.seed)
        _openblas_threads()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()
        tempfile: Any = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.tempdir = tempfile._name_sequence = None
        logging.root.handlers.clear()  # a line that was logged while importing has made one
        logging.root.setLevel(logging.WARNING)
        logging.root.addFilter(_is_news)

    def set_arguments(self, arguments: list[str]) -> None:
        """In the worker: ComfyUI's arguments were parsed with the template's; what differs is set anew."""
        module: Any = sys.modules.get("comfy.cli_args")
        if module is None:
            return
        before, now = module.parser.parse_args(self.arguments), module.parser.parse_args(arguments)
        for name, value in vars(now).items():
            if value != getattr(before, name, None):
                setattr(module.args, name, value)


def _driver_is_used() -> bool:
    """Has anything in this process called cuInit? Asked of the driver itself, which is not loaded for this."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
    except OSError:
        return False
    ask: Any = ctypes.c_void_p()
    try:
        find = driver.cuGetProcAddress_v2
        if find(b"cuDeviceGetCount", ctypes.byref(ask), CUDA_VERSION, ctypes.c_uint64(1), None) or not ask:
            return True  # a driver that does not even tell this has been told something
        ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(ask.value)
    except AttributeError:  # a driver before 12.0
        ask = driver.cuDeviceGetCount
    return bool(ask(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


def _is_news(record: logging.LogRecord) -> bool:
    """ComfyUI's main.py warns of a torch that was imported before it: here that is so on purpose."""
    return "Torch already imported" not in str(record.msg)


def _openblas_threads() -> None:
    """OpenBLAS makes its threads when it is loaded, so it was told to have one; now as many as its rules give."""
    wanted = next((os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if os.environ.get(name)), "")
    count = int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_", "_64"):
                function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if function is not None:
                    function(ctypes.c_int(count))
