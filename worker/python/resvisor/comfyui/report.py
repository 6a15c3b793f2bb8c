"""What the hooks did: for the supervisor's status and the worker's log."""

import os
import sys
import threading
import weakref
from typing import Any

FALLBACKS_LOGGED = 100  # lines; the number goes on counting


def log(text: str) -> None:
    """One line of the worker's log."""
    sys.stderr.write(f"resvisor: {text}\n")
    sys.stderr.flush()


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""


class Report:
    """Names that were patched, why others were not, and how often a hook let ComfyUI go its own way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.patched: list[str] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.fallbacks = 0
        self.pool_files = 0  # loads of a file from the pool
        self.own_files = 0  # loads by ComfyUI's own loader
        self.own_bytes = 0  # their sizes
        self._models: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def patch(self, name: str) -> None:
        self.patched.append(name)

    def problem(self, text: str) -> None:
        """A hook could not be installed: the worker is unpooled."""
        self.problems.append(text)
        log(f"unpooled: {text}")

    def note(self, text: str) -> None:
        """Worth showing beside what is pooled, and no reason to be unpooled."""
        self.notes.append(text)
        log(text)

    def fallback(self, what: str, reason: str) -> None:
        """ComfyUI goes its own way this time."""
        with self._lock:
            self.fallbacks += 1
            number = self.fallbacks
        if number <= FALLBACKS_LOGGED:
            log(f"not from the pool: {what}: {reason} (number {number})")

    def loaded(self, path: str, pooled: bool) -> None:
        """ComfyUI loaded a file of weights."""
        try:
            count = 0 if pooled else os.stat(path).st_size
        except OSError:
            count = 0
        with self._lock:
            self.pool_files += pooled
            self.own_files += not pooled
            self.own_bytes += count

    def filled(self, module: Any, shared: int, private: int) -> None:
        """A module has its weights: bytes in the pool's memory, and in its own."""
        with self._lock:
            self._models[module] = shared, private

    def held(self) -> tuple[int, int]:
        """Bytes of all modules that are alive: in the pool's memory, and in their own."""
        with self._lock:
            found = list(self._models.values())
        return sum(shared for shared, _ in found), sum(private for _, private in found)
