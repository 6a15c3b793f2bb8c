"""The workflow that a worker runs before it is ready, when the supervisor gives it its turn."""

import os
import time
from typing import cast

from ..worker import Job
from .jobs import JobError, Jobs, parse
from .report import log
from .server import ServerError

TURN_FD = "RESVISOR_TURN_FD"
_ID = "warm-up"


class _NoJob:
    """What a run asks of its job. It is none: nobody waits for it, and it is not counted."""

    id = _ID
    cancelled = False
    params: dict[str, str] = {}

    def progress(self, done: int, total: int = 0, text: str = "") -> None:
        pass


def wait_for_turn() -> None:
    """Workers warm up one after another: a byte comes when it is this one's turn."""
    text = os.environ.pop(TURN_FD, "")
    if not text:
        return
    began = time.monotonic()
    fd = int(text)
    os.set_inheritable(fd, False)
    os.read(fd, 1)
    os.close(fd)
    log(f"its turn to warm up came after {time.monotonic() - began:.1f} s")


def run(jobs: Jobs, path: str) -> str:
    """Why it failed; "" = it did not. PromptThreadDied."""
    began = time.monotonic()
    try:
        with open(path, "rb") as file:
            body = parse(file.read())
        jobs._execute(cast(Job, _NoJob()), body)
    except (JobError, ServerError, OSError) as error:
        log(f"the warm-up with {path} failed: {error}")
        return str(error)
    log(f"warmed up with {path} in {time.monotonic() - began:.2f} s")
    return ""
