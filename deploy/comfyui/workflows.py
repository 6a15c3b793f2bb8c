"""Workflows that an installation of ComfyUI has run: its pictures and animations carry theirs, in API format."""

import json
import struct

PNG = b"\x89PNG\r\n\x1a\n"
FILES_MAX = 300  # the newest of them are looked at
GRAPH_MAX = 16 * 2**20


def is_graph(value):
    return isinstance(value, dict) and bool(value) and all(isinstance(node, dict) and "class_type" in node for node in value.values())


def parse(text):
    """A graph in API format, bare or as the body of POST /prompt, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and "class_type" not in value and is_graph(value.get("prompt")):
        value = value["prompt"]
    return value if is_graph(value) else None


def _png_text(file):
    """The text chunk `prompt` of a PNG file."""
    if file.read(len(PNG)) != PNG:
        return None
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"tEXt" and length <= GRAPH_MAX:
            name, _, text = file.read(length).partition(b"\0")
            if name == b"prompt":
                return text.decode("latin-1")
            file.seek(4, 1)
        elif kind in (b"IDAT", b"IEND"):
            return None
        else:
            file.seek(length + 4, 1)
    return None


def _webp_text(file):
    """ComfyUI writes `prompt:{…}` into the EXIF part of an animation, which ends the text with a NUL."""
    _, found, text = file.read(GRAPH_MAX).rpartition(b"prompt:{")
    return (b"{" + text.split(b"\0", 1)[0]).decode("utf-8", "replace") if found else None


READERS = {".png": _png_text, ".webp": _webp_text}


def in_file(path):
    """The graph of a JSON file, a picture or an animation, or None."""
    with open(path, "rb") as file:
        reader = READERS.get(path.suffix.lower())
        text = reader(file) if reader else file.read(GRAPH_MAX).decode("utf-8", "replace")
    return parse(text) if text else None


def made_by(directory):
    """(path, graph) of what lies in an installation's output folder, the newest first."""
    files = [path for path in (directory / "output").rglob("*") if path.suffix.lower() in READERS and path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:FILES_MAX]:
        try:
            graph = in_file(path)
        except OSError:
            continue
        if graph:
            yield path, graph


def seeded(graph, seed):
    """A copy whose samplers and noises have this seed: another seed makes ComfyUI compute, the same one the same picture."""
    graph = json.loads(json.dumps(graph))
    for node in graph.values():
        for name in ("seed", "noise_seed"):
            if isinstance(node.get("inputs", {}).get(name), int):
                node["inputs"][name] = seed
    return graph
