"""What HTTP does not show of a ComfyUI: whether its event loop turns, which node runs since when, what lies in the pool.

A thread asks the event loop for a sign of life, seldom while nothing runs. What it finds becomes the worker's detail in
`resvisor status`; a loop that stands still for too long ends the worker.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from .pool import Pool
from .report import log, size
from .server import Server

BUSY_S = 5.0  # between two questions while a prompt runs
IDLE_S = 30.0
STUCK_S = 10.0  # without an answer: shown
NODE_S = 10.0  # a node that runs for so long is shown
USED_S = 3.0  # after a prompt, if no other has come: then the pool is looked at
LATE_S = 1.0  # this thread woke up so much too late: then nobody's turn came, and it says nothing of the loop


class Monitor:
    def __init__(self, server: Server, pool: Pool, limit_s: float) -> None:
        self.server = server
        self.pool = pool
        self.limit_s = limit_s  # 0 = a loop that stands still is only shown
        self.say: Callable[[], None] = lambda: None  # the detail has changed
        self.end: Callable[[str], None] = lambda reason: None
        self._lock = threading.Lock()
        self._asked_at = 0.0  # 0 = nothing is asked
        self._node: tuple[str, float, float] | None = None  # title, monotonic and wall time of its start
        # Something ran since the pool was looked at. That walks the page tables of all models: between two prompts in a row it
        # would take the second one's processor (0.1 s for 1 GiB).
        self._used = False
        self._idle_at = 0.0
        self._in_pool = ""
        self._shown: list[str] = []
        self._wake = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="resvisor-monitor", daemon=True).start()

    # ---- told by others ----

    def on_event(self, event: str, data: Any) -> None:
        """Every event of ComfyUI, from its own threads."""
        if event != "executing" or not isinstance(data, dict):
            return
        node = data.get("node")
        with self._lock:
            changed = (node is None) != (self._node is None)
            self._node = None if node is None else (f"node {node}", time.monotonic(), time.time())
            self._used = True
            if node is None:
                self._idle_at = time.monotonic()
        if changed:
            self._wake.set()

    # ---- our thread ----

    def _watch(self) -> None:
        stuck = False
        while True:
            with self._lock:
                busy = self._node is not None or self._asked_at > 0
                pause_s = BUSY_S if busy else USED_S if self._used else IDLE_S
            began = time.monotonic()
            self._wake.wait(pause_s)
            self._wake.clear()
            self._woke_late(time.monotonic() - began - pause_s)
            self._ask()
            self.pool.sweep()
            stuck_s = self.stuck_s()
            if self.limit_s and stuck_s >= self.limit_s:
                self.end(f"ComfyUI's event loop stands still for {stuck_s:.0f} s (types.NAME.loop_timeout); {self.where()}")
                return
            shown = self.describe()
            if shown != self._shown:
                self._shown = shown
                self.say()
            if (stuck_s >= STUCK_S) != stuck:
                stuck = not stuck
                if stuck:
                    log(f"ComfyUI's event loop stands still; {self.where()}")

    def _woke_late(self, late_s: float) -> None:
        """The process was stopped, or a library that reads a model kept Python's lock: the loop could not have answered."""
        with self._lock:
            if late_s >= LATE_S and self._asked_at:
                self._asked_at += late_s

    def _ask(self) -> None:
        loop = self.server.loop
        with self._lock:
            if loop is None or self._asked_at:
                return
            self._asked_at = time.monotonic()
        try:
            loop.call_soon_threadsafe(self._answered)
        except RuntimeError:  # it is closed: ComfyUI ends
            self._answered()

    def _answered(self) -> None:
        with self._lock:
            stuck_s, self._asked_at = time.monotonic() - self._asked_at, 0.0
        if stuck_s >= STUCK_S:
            log(f"ComfyUI's event loop turns again, after {stuck_s:.0f} s")
            self._wake.set()

    # ---- what is shown ----

    def stuck_s(self) -> float:
        with self._lock:
            return time.monotonic() - self._asked_at if self._asked_at else 0.0

    def where(self) -> str:
        with self._lock:
            node = self._node
        return "no node runs" if node is None else f"{node[0]} runs since {time.strftime('%H:%M:%S', time.localtime(node[2]))}"

    def describe(self) -> list[str]:
        found = []
        stuck_s = self.stuck_s()
        if stuck_s >= STUCK_S:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - stuck_s))
            found.append(f"its event loop stands still since {since}")
        with self._lock:
            node = self._node
            due = self._used and node is None and time.monotonic() - self._idle_at >= USED_S
        if node is not None and time.monotonic() - node[1] >= NODE_S:
            found.append(self.where())
        if due:
            self._used = False
            shared, copied = self.pool.usage()
            self._in_pool = f"{size(shared)} of the pool in place, {size(copied)} of it copied on write" if shared else ""
        return [*found, self._in_pool] if self._in_pool else found
