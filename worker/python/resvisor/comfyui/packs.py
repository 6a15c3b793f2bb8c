"""Packs of custom nodes as they are registered: which node names two of them define, and which could not be imported.

ComfyUI says nothing about the first: the pack that comes last in the unsorted order of the folder wins.
"""

import functools
import inspect
import logging
import os
from typing import Any

from .imports import after_import
from .report import Report, log

SHOWN_MAX = 3  # of each kind in the worker's detail; the log has all
_LOAD = ["module_path", "ignore", "module_parent"]


class _Words(logging.Handler):
    """What ComfyUI says of the pack that is imported; the last line has the reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.last = " ".join(record.getMessage().split())
        except Exception:
            self.last = ""


class Packs:
    def __init__(self, report: Report) -> None:
        self.report = report
        self.owners: dict[str, str] = {}  # node name: pack
        self.doubles: list[str] = []
        self.failures: list[str] = []

    def install(self) -> None:
        after_import("nodes", self._patch)

    def _patch(self, module: Any) -> None:
        try:
            original = module.load_custom_node
            found = list(inspect.signature(original).parameters)
            if found[: len(_LOAD)] != _LOAD or not inspect.iscoroutinefunction(original):
                raise TypeError(f"it takes ({', '.join(found)})")
            table: dict[str, Any] = module.NODE_CLASS_MAPPINGS
        except (AttributeError, TypeError, ValueError) as error:
            self.report.note(f"node names of two packs are not looked for: nodes.load_custom_node: {error}")
            return

        @functools.wraps(original)
        async def load_custom_node(module_path: Any, *more: Any, **named: Any) -> Any:
            words, before = _Words(), dict(table)
            logging.getLogger().addHandler(words)
            try:
                result = await original(module_path, *more, **named)
            finally:
                logging.getLogger().removeHandler(words)
            self._registered(str(module_path), before, table)
            parent = named.get("module_parent", more[1] if len(more) > 1 else "custom_nodes")
            if not result and parent == "custom_nodes":
                self._failed(str(module_path), words.last)
            return result

        module.load_custom_node = load_custom_node

    def _registered(self, path: str, before: dict[str, Any], table: dict[str, Any]) -> None:
        pack = os.path.basename(path)
        for name, node in table.items():
            if name in before and before[name] is node:
                continue
            if name in before:
                text = f"{name!r} of {self.owners.get(name, 'ComfyUI')} is replaced by that of {pack}"
                self.doubles.append(text)
                log(f"node {text}; ComfyUI uses the one that comes last")
            self.owners[name] = pack

    def _failed(self, path: str, reason: str) -> None:
        reason = reason.removeprefix(f"Cannot import {path} module for custom nodes: ")
        self.failures.append(f"{os.path.basename(path)}: {reason}" if reason else os.path.basename(path))
        log(f"custom nodes of {path} are missing: {reason or 'ComfyUI does not say why'}")

    def describe(self) -> list[str]:
        """For the worker's detail."""
        found = []
        for what, lines in (("not imported: ", self.failures), ("node ", self.doubles)):
            if lines:
                more = f" and {len(lines) - SHOWN_MAX} more" if len(lines) > SHOWN_MAX else ""
                found.append(what + ", ".join(line[:120] for line in lines[:SHOWN_MAX]) + more)
        return found
