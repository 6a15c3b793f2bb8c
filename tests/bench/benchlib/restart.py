"""Row 5: from kill -9 of a worker to a ready worker with its weights mapped."""

import os
import signal
import time

from harness import procfs

from .context import BUILD, CLIENT, EXECUTOR, WORKER
from .measure import FRESH, GIB, MIB, Row, median, prefault, run_json, say, warm_cache

GOAL_EXTRA_MS = 50
POLL_S = 0.0005  # the supervisor has to do other things than answer
LIMIT_S = 30
IMAGE = BUILD / "lib" / "resvisor" / "executors" / "image.so"


def kill_and_wait(service, type_name):
    """Milliseconds from the kill to READY of the next incarnation, as the supervisor sees it."""
    before = service.worker(type_name)
    start = time.perf_counter()
    os.kill(before.pid, signal.SIGKILL)
    while True:
        worker = service.worker(type_name)
        if worker.state == "READY" and worker.starts > before.starts:
            break
        if time.perf_counter() - start > LIMIT_S:
            raise RuntimeError(f"{worker.id} is {worker.state} after {LIMIT_S} s")
        time.sleep(POLL_S)
    elapsed = (time.perf_counter() - start) * 1000
    if b"resvisor-arena" not in procfs.read(worker.pid, "maps"):
        raise RuntimeError(f"{worker.id} is ready without its weights mapped")
    return elapsed


def measure(context, executor, path, rounds):
    """One type per round: a worker that dies for the second time has to wait, by the restart policy."""
    types = {f"t{i}": {"executor": str(executor), "models": ["m"]} for i in range(rounds)}
    with context.service(models={"m": str(path)}, types=types) as service:
        before = service.model("m")
        times = [kill_and_wait(service, name) for name in types]
        after = service.model("m")
    return median(times), max(times), after.read_bytes - before.read_bytes, after.loads - before.loads


def restart(context):
    size, rounds = (64 * MIB, 3) if context.quick else (GIB, 9)
    rows = []
    for label, executor, path in (
        ("an executor without libraries", EXECUTOR, context.model(size)),
        ("the image executor (OpenBLAS)", IMAGE, context.model(size, "image")),
    ):
        warm_cache(path)
        start_ms = run_json([CLIENT, "spawn", 20, WORKER, "--executor", executor])["spawn"]["p50"] / 1000
        copies = []
        for _ in range(3):
            prefault(int(size * FRESH))
            copies.append(run_json([CLIENT, "copy", path])["wall_s"] * 1000)
        copy_ms = start_ms + median(copies)
        ready_ms, worst_ms, read_bytes, loads = measure(context, executor, path, rounds)
        say(f"restart, {label}: start {start_ms:.1f} ms, ready {ready_ms:.1f} ms")
        rows.append(
            Row("restart", f"kill -9 to READY with {size / MIB:.0f} MiB mapped, {label}", ready_ms, "ms",
                [("start and read the file again (cached)", copy_ms)],
                goal=f"<= {start_ms:.1f} (process start) + {GOAL_EXTRA_MS} ms, 0 bytes read",
                met=ready_ms <= start_ms + GOAL_EXTRA_MS and read_bytes == 0 and loads == 0,
                note=f"{read_bytes} bytes read; slowest of {rounds}: {worst_ms:.1f} ms")
        )  # fmt: skip
    return rows
