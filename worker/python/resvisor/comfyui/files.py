"""What a prompt made: the files and texts that its history names, as outputs of the job."""

import io
import mimetypes
import mmap
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..worker import Job
from . import history

OUTPUTS_MAX = 7  # of one job, beside its history; more go into one archive
NAME_MAX = 200  # bytes of an output's name
ARCHIVE = "outputs.zip"

# mimetypes knows what the system's tables know, and these are not everywhere
_TYPES = {".webp": "image/webp", ".webm": "video/webm", ".flac": "audio/flac", ".opus": "audio/ogg", ".glb": "model/gltf-binary"}


class Missing(Exception):
    """A file that the history names cannot be had; the text says why."""


@dataclass
class Output:
    name: str
    content_type: str
    path: str = ""
    text: str = ""


def content_type(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower()
    return _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"


def _entries(outputs: Any) -> Iterator[tuple[str, Any]]:
    """(node, file entry or text) in the order of the history."""
    for node, values in (outputs or {}).items():
        for key, items in (values or {}).items():
            for item in items if isinstance(items, list) else []:
                if isinstance(item, dict) and isinstance(item.get("filename"), str):
                    yield node, item
                elif key == "text" and isinstance(item, str):
                    yield node, item


def _find(entry: dict[str, Any]) -> str:
    """The path of a file of ComfyUI's output or temp folder."""
    folder_paths: Any = sys.modules["folder_paths"]
    kind = entry.get("type", "output")
    folder = folder_paths.get_directory_by_type(kind)
    if folder is None:
        raise Missing(f"{entry['filename']}: ComfyUI has no folder {kind!r}")
    folder = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(folder, str(entry.get("subfolder") or ""), entry["filename"]))
    if os.path.commonpath((folder, path)) != folder:
        raise Missing(f"{entry['filename']}: it lies outside ComfyUI's {kind} folder")
    if not os.path.isfile(path):
        raise Missing(f"{path}: it is not there any more; a cached result names a file that was removed")
    return path


def _unique(name: str, taken: set[str]) -> str:
    stem, suffix = os.path.splitext(name.encode(errors="replace").decode())  # files may have bytes that are no text
    number = 1
    while True:
        extra = "" if number == 1 else f"-{number}"
        room = NAME_MAX - len((extra + suffix).encode())
        candidate = stem.encode()[: max(room, 1)].decode(errors="ignore") + extra + suffix
        if candidate not in taken:
            taken.add(candidate)
            return candidate
        number += 1


def find_outputs(outputs: Any) -> list[Output]:
    """Saved files first, then previews, then texts. Missing."""
    found: list[tuple[int, Output]] = []
    taken = {history.NAME}
    seen: set[str] = set()
    for node, item in _entries(outputs):
        if isinstance(item, str):
            name = _unique(f"node-{node.replace('/', '-').replace(':', '-')}.txt", taken)
            found.append((2, Output(name, "text/plain; charset=utf-8", text=item)))
            continue
        if item.get("type") == "input":
            continue  # a node that shows what it was given
        path = _find(item)
        if path not in seen:
            seen.add(path)
            name = _unique(os.path.basename(path), taken)
            found.append((1 if item.get("type") == "temp" else 0, Output(name, content_type(name), path)))
    return [output for _, output in sorted(found, key=lambda pair: pair[0])]


def attach(job: Job, found: list[Output]) -> None:
    """Adds them to the job; more than a job may have go into one archive, uncompressed."""
    if len(found) > OUTPUTS_MAX:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as pack:
            for output in found:
                if output.path:
                    pack.write(output.path, output.name)
                else:
                    pack.writestr(output.name, output.text.encode(errors="replace"))
        job.add_output(ARCHIVE, archive.getbuffer(), "application/zip")
        return
    for output in found:
        if not output.path:
            job.add_output(output.name, output.text.encode(errors="replace"), output.content_type)
            continue
        with open(output.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                job.add_output(output.name, b"", output.content_type)
                continue
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as data:
                job.add_output(output.name, memoryview(data), output.content_type)
