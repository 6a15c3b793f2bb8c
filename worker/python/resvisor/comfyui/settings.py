"""The settings files that ComfyUI will read, looked at before it starts.

ComfyUI takes a truncated settings file for an empty one, and overwrites it with the next key that somebody changes. So a
damaged file keeps the worker from starting, with the place of the damage; the last good copy of each file is kept, and
`resvisor restore-config TYPE` puts it back. Nothing is restored by itself.
"""

import hashlib
import importlib
import json
import os
import pathlib
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .folders import Folders
from .report import log

FILE_MAX = 16 * 1024 * 1024  # bytes; nobody's settings are larger
USERS_MAX = 1000  # folders of users that are looked at
_CONFIG = "--extra-model-paths-config"


@dataclass
class Damage:
    path: pathlib.Path
    line: int  # 0 = the file as a whole
    column: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}:{self.column}" if self.line else str(self.path)
        return f"{where}: {self.reason}"


def extra_configs(arguments: list[str]) -> Iterator[str]:
    """`--extra-model-paths-config A B`, any number of times."""
    taking = False
    for argument in arguments:
        if argument.startswith("--"):
            taking = argument == _CONFIG
            if argument.startswith(_CONFIG + "="):
                yield argument.partition("=")[2]
        elif taking:
            yield argument


def files(folders: Folders, arguments: list[str]) -> Iterator[tuple[pathlib.Path, bool]]:
    """(file, must it be there) of everything that ComfyUI reads by itself."""
    yield folders.directory / "extra_model_paths.yaml", False
    for name in extra_configs(arguments):
        yield folders.directory / name, True
    yield folders.user / "users.json", False
    try:
        users = sorted(entry.path for entry in os.scandir(folders.user) if entry.is_dir())[:USERS_MAX]
    except OSError:
        users = []
    for user in users:
        yield pathlib.Path(user) / "comfy.settings.json", False
        yield pathlib.Path(user) / "workflows" / ".index.json", False


def _read(path: pathlib.Path) -> bytes:
    """OSError; also for what is no plain file, which could block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is no plain file")
        data = file.read(FILE_MAX + 1)
    if len(data) > FILE_MAX:
        raise OSError(0, f"it has more than {FILE_MAX // 2**20} MiB")
    return data


def _json(path: pathlib.Path, text: str) -> Damage | None:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return Damage(path, error.lineno, error.colno, f"no JSON: {error.msg}")
    except RecursionError:
        return Damage(path, 1, 1, "no JSON: too deep")
    except ValueError as error:  # a number of thousands of digits
        return Damage(path, 1, 1, f"no JSON: {error}")
    if not isinstance(found, dict):
        return Damage(path, 1, 1, "no JSON object")
    return None


def _yaml(path: pathlib.Path, text: str) -> Damage | None:
    try:
        yaml = importlib.import_module("yaml")  # ComfyUI's Python has it
    except ImportError:
        log(f"{path} is not checked: there is no module yaml")
        return None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        return Damage(path, mark.line + 1 if mark else 1, mark.column + 1 if mark else 1, f"no YAML: {reason}")
    except RecursionError:
        return Damage(path, 1, 1, "no YAML: too deep")
    except (ValueError, TypeError, OverflowError) as error:  # what looks like a date or a number, and is none
        return Damage(path, 1, 1, f"no YAML: {error}")
    if not isinstance(found, dict):
        return Damage(path, 1, 1, "it is empty" if found is None else "it must be a map of names to folders")
    for name, entry in found.items():
        if entry is not None and not isinstance(entry, dict):
            return Damage(path, *_line_of(text, name), f"{name} must be a map of folders")
        for key, value in (entry or {}).items():
            if not isinstance(value, str) and key != "is_default":
                return Damage(path, *_line_of(text, key), f"{key} of {name} must be a text")
    return None


def _line_of(text: str, key: object) -> tuple[int, int]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(f"{key}:"):
            return number, len(line) - len(line.lstrip()) + 1
    return 1, 1


def check(path: pathlib.Path, data: bytes) -> Damage | None:
    try:
        text = data.decode("utf-8-sig" if path.suffix != ".json" else "utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        return Damage(path, before.count(b"\n") + 1, error.start - before.rfind(b"\n"), f"no UTF-8: {error.reason}")
    return _json(path, text) if path.suffix == ".json" else _yaml(path, text)


class Settings:
    """A worker's settings files and their good copies."""

    def __init__(self, folders: Folders, arguments: list[str]) -> None:
        self.folders = folders
        self.arguments = arguments

    def copy_of(self, path: pathlib.Path) -> pathlib.Path:
        path = pathlib.Path(os.path.abspath(path))
        return self.folders.good / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}-{path.name}"

    def look(self) -> list[Damage]:
        """Every damaged file; of each good one a copy is kept."""
        found = []
        for path, needed in files(self.folders, self.arguments):
            try:
                data = _read(path)
            except FileNotFoundError as error:
                if needed:
                    found.append(Damage(path, 0, 0, f"cannot be read: {error.strerror}"))
                continue
            except OSError as error:
                found.append(Damage(path, 0, 0, f"cannot be read: {error.strerror}"))
                continue
            damage = check(path, data)
            if damage is not None:
                found.append(damage)
            else:
                self._keep(path, data)
        return found

    def _keep(self, path: pathlib.Path, data: bytes) -> None:
        copy = self.copy_of(path)
        try:
            if copy.exists() and copy.read_bytes() == data:
                return
            copy.parent.mkdir(parents=True, exist_ok=True)
            _write(copy, data, os.stat(path))
        except OSError as error:
            log(f"no copy of {path} is kept: {copy}: {error.strerror}")

    def advice(self, damage: Damage, type_name: str) -> str:
        """What to do about it."""
        copy = self.copy_of(damage.path)
        if not copy.exists():
            return f"mend it, or take it away; then `resvisor restart {type_name}`"
        kept = time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.stat().st_mtime))
        return (
            f"mend it, or take back the copy of {kept} by `resvisor restore-config {type_name}`; "
            f"then `resvisor restart {type_name}`"
        )

    def restore(self) -> Iterator[tuple[bool, str]]:
        """Puts the good copies of damaged files back, and says for each: is it good now, and what was done. OSError."""
        for damage in self.look():
            copy = self.copy_of(damage.path)
            if not copy.exists():
                yield False, f"{damage}; no good copy is kept of it"
                continue
            path = pathlib.Path(os.path.realpath(damage.path))  # a link stays one
            aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
            owner = os.stat(path if path.exists() else copy)
            if path.exists():
                os.replace(path, aside)
            _write(path, copy.read_bytes(), owner)
            yield True, f"{damage}; restored from {copy}; the damaged one is {aside.name} now"


def _write(path: pathlib.Path, data: bytes, like: os.stat_result) -> None:
    """All of it or nothing, also when the machine stops in between. like: who may read and write it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)  # of a process that died
    try:
        # Whoever may write to the folder must not have us write elsewhere by a link.
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if os.geteuid() == 0:
                os.fchown(fd, like.st_uid, like.st_gid)
            os.fchmod(fd, like.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
