"""Which folders a worker has of its own, and what stands before the names of the files that it saves.

Models, input and output are shared by all workers. Temporary files and the database are each worker's own; the users'
folder is the primary worker's, and the others have one of their own that nobody sees.
"""

import functools
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

from .imports import after_import
from .report import Report, log

USERS = "users"  # no worker is called so: their folders are TYPE-NUMBER
_SAVE = ["filename_prefix", "output_dir", "image_width", "image_height"]


def given(arguments: list[str], flag: str) -> bool:
    return any(argument == flag or argument.startswith(flag + "=") for argument in arguments)


def take(arguments: list[str], flag: str) -> str | None:
    """Takes `--flag VALUE` or `--flag=VALUE` out of the arguments; the last one counts. Without a value it stays."""
    value = None
    i = 0
    while i < len(arguments):
        if arguments[i].startswith(flag + "="):
            value = arguments.pop(i).partition("=")[2]
        elif arguments[i] == flag and i + 1 < len(arguments) and not arguments[i + 1].startswith("--"):
            value = arguments[i + 1]
            del arguments[i : i + 2]
        else:
            i += 1
    return value


def peek(arguments: list[str], flag: str) -> str | None:
    return take(list(arguments), flag)


def default_state_folder() -> str:
    found = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if found:
        return found
    if os.geteuid() == 0:
        return "/var/lib/resvisor"
    return os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "resvisor")


class Folders:
    """What two ComfyUI processes must not share."""

    def __init__(self, root: str, worker: str, primary: bool, directory: pathlib.Path, arguments: list[str]) -> None:
        self.name = worker.replace("/", "-")
        self.directory = directory
        self.base = directory / (peek(arguments, "--base-directory") or "")  # it runs in its folder
        state = pathlib.Path(root or default_state_folder()) / "comfyui"
        self.own = state / self.name
        users = state / USERS if primary and worker.endswith("/0") else self.own / "user"
        self.user = directory / (peek(arguments, "--user-directory") or users)
        self.good = (state if self.user == state / USERS else self.own) / "good-copies"
        self.own_output = self.base / "output" / self.name

    def arguments(self, arguments: list[str]) -> list[str]:
        """The flags that are not given. A flag that this ComfyUI does not know is left out."""
        try:
            known = (self.directory / "comfy" / "cli_args.py").read_text(errors="replace")
        except OSError:
            known = ""
        temporary = self.own / "temporary"
        for folder in (self.user, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            "--temp-directory": str(temporary),  # ComfyUI empties DIR/temp at its start and end
            "--user-directory": str(self.user),
            "--database-url": f"sqlite:///{self.own / 'comfyui.db'}",  # one process may have it open
        }
        added = []
        for flag, value in wanted.items():
            if given(arguments, flag):
                continue
            if f'"{flag}"' not in known:
                log(f"this ComfyUI has no {flag}")
                continue
            added += [flag, value]
        return added


class Prefix:
    """Counters in file names are found by looking: without this two processes would overwrite each other's files."""

    def __init__(self, text: str, worker: str, report: Report) -> None:
        kind, _, number = worker.rpartition("/")
        self.text = text.replace("%worker%", number) if text else f"{kind}-{number}/"
        self.report = report
        self.problem = "folder_paths was never imported"

    def install(self) -> None:
        after_import("folder_paths", self._patch)

    def _patch(self, module: Any) -> None:
        try:
            original: Callable[..., Any] = module.get_save_image_path
            found = list(inspect.signature(original).parameters)
        except (AttributeError, TypeError, ValueError) as error:
            self.problem = f"folder_paths.get_save_image_path: {error}"
            return
        if found[: len(_SAVE)] != _SAVE:
            self.problem = f"folder_paths.get_save_image_path takes ({', '.join(found)})"
            return

        @functools.wraps(original)
        def get_save_image_path(filename_prefix: Any, output_dir: Any, *more: Any, **named: Any) -> Any:
            return original(self._name(module, filename_prefix, output_dir), output_dir, *more, **named)

        module.get_save_image_path = get_save_image_path
        self.problem = ""

    def _name(self, module: Any, name: Any, folder: Any) -> Any:
        if not isinstance(name, str) or os.path.isabs(name):
            return name
        if os.path.realpath(folder) != os.path.realpath(module.get_output_directory()):
            return name  # a preview, in the worker's own temporary folder
        return self.text + name

    def verify(self, folders: Folders, arguments: list[str]) -> None:
        """Without the prefix the worker gets an output folder of its own, whose files the other workers do not see."""
        import sys

        if not self.problem:
            return
        self.report.note(f"saved files have no prefix: {self.problem}")
        change = getattr(sys.modules.get("folder_paths"), "set_output_directory", None)
        if not given(arguments, "--output-directory") and change is not None:
            folders.own_output.mkdir(parents=True, exist_ok=True)
            change(str(folders.own_output))
