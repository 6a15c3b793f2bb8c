"""What a prompt did to models, for `resvisor verify`: two parameters of a job ask for it.

`outputs=report`: the job has one output, report.json, instead of what the prompt made. `seed_offset=N`: every seed of the
graph is changed by N, so that a prompt which was run before is computed again instead of being answered from ComfyUI's cache.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from .. import Error, ErrorCode
from ..worker import Job
from .report import Report

NAME = "report.json"
OFFSET_MAX = 2**31
_LOADER = re.compile(r"loader|load_?(checkpoint|diffusion|model|unet|vae|clip|lora)", re.IGNORECASE)


def vary(graph: dict[str, Any], offset: int) -> int:
    """Changes every seed in place; how many there were. A large one goes down, since nodes have an upper limit for it."""
    changed = 0
    for node in graph.values():
        inputs = node.get("inputs", {})
        for name, value in inputs.items():
            if name.lower().endswith("seed") and isinstance(value, int) and not isinstance(value, bool):
                inputs[name] = value + offset if value < OFFSET_MAX else value - offset
                changed += 1
    return changed


def classes(graph: dict[str, Any], nodes: Iterable[str]) -> list[str]:
    """The classes of nodes. One that was made while the prompt ran, by a node that expands, has no entry of its own."""
    return [graph[node]["class_type"] if node in graph else "(expanded)" for node in nodes]


def loaders(found: Iterable[str]) -> list[str]:
    """Those of the classes that load models, by their names."""
    return [name for name in found if _LOADER.search(name)]


class Trace:
    """What is counted from here to `attach`."""

    def __init__(self, params: dict[str, str], graph: dict[str, Any], report: Report) -> None:
        self.wanted = params.get("outputs") == "report"
        self.graph = graph
        self.report = report
        self.before = report.pool_files, report.own_files, report.own_bytes
        offset = params.get("seed_offset", "0")
        if not offset.isascii() or not offset.isdigit() or int(offset) >= OFFSET_MAX:
            raise Error(f"seed_offset is {offset!r}; a whole number below {OFFSET_MAX} is expected", ErrorCode.BAD_REQUEST)
        self.seeds = vary(graph, int(offset))

    def attach(self, job: Job, executed: list[str]) -> None:
        """Adds the report to the job."""
        ran = classes(self.graph, executed)
        shared, private = self.report.held()
        pool_files, own_files, own_bytes = (
            now - then
            for now, then in zip((self.report.pool_files, self.report.own_files, self.report.own_bytes), self.before)
        )
        job.add_output(
            NAME,
            json.dumps(
                {
                    "pooled": bool(self.report.patched) and not self.report.problems,
                    "problems": self.report.problems,
                    "nodes": len(self.graph),
                    "executed": ran,
                    "loaders": loaders(ran),
                    "seeds": self.seeds,
                    "pool_files": pool_files,
                    "own_files": own_files,
                    "own_bytes": own_bytes,
                    "aliased_bytes": shared,
                    "private_bytes": private,
                }
            ),
            "application/json",
        )
