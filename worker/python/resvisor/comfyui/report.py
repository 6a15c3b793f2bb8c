"""What the hooks did: for the supervisor's status and the worker's log."""

import sys
import threading

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
