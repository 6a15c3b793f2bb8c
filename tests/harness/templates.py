"""The workflow templates that ComfyUI ships (a package of tests/requirements.txt), and what their index says they make."""

import importlib.util
import json
import pathlib
import re
from typing import NamedTuple

PACKAGE = "comfyui_workflow_templates_json"

# Categories of the index that are one kind. The others hold pictures, and clips made from them.
KIND_OF_CATEGORY = {
    "Video": "video", "Video Tools": "video", "Audio": "audio", "3D Model": "3d", "LLM": "text",
    "Image": "image", "Image Tools": "image", "Vector": "image", "Node Basics": "image",
}  # fmt: skip
VIDEO_TAGS = {"Video", "Image to Video", "Text to Video", "FLF2V"}
OUTPUT_CLASS = re.compile(r"(Save|Preview|MaskPreview|ImageCompare)")


class Template(NamedTuple):
    name: str
    path: pathlib.Path
    kind: str  # as the index says


def kind_of(category, entry):
    outputs = {output["mediaType"] for output in entry.get("io", {}).get("outputs", [])}
    if category in KIND_OF_CATEGORY:
        return KIND_OF_CATEGORY[category]
    is_video = "video" in outputs or not outputs and VIDEO_TAGS & set(entry.get("tags", []))
    return "video" if is_video else "image"


def templates():
    spec = importlib.util.find_spec(PACKAGE)
    folder = pathlib.Path(spec.submodule_search_locations[0]) / "templates"
    return [
        Template(entry["name"], folder / f"{entry['name']}.json", kind_of(category["title"], entry))
        for category in json.loads((folder / "index.json").read_text())
        for entry in category["templates"]
    ]


def without_output_nodes(value):
    """The workflow with a class that nobody knows in place of each output node: what a node pack's own sink looks like."""
    if isinstance(value, list):
        return [without_output_nodes(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "SinkOfSomePack" if key == "type" and isinstance(element, str) and OUTPUT_CLASS.match(element) else without_output_nodes(element)
        for key, element in value.items()
    }  # fmt: skip
