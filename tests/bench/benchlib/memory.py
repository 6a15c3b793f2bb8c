"""Row 4: memory of several workers on one model."""

import contextlib
import uuid

from harness import procfs
from harness.protos import rpc_pb2

from .context import CLIENT, EXECUTOR
from .measure import MIB, Helper, Row, wait_until, warm_cache

GOAL = 1.01
WORKERS = (1, 2, 4, 8)
JOB_S = 120
ARENA = "memfd:resvisor-arena"


def arena_pss(pid):
    """(Pss, bytes copied by writing) of the mappings of arenas, in bytes."""
    pss = copied = 0
    inside = False
    for line in procfs.read(pid, "smaps").decode(errors="replace").splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            inside = ARENA in line
        elif inside and first == "Pss:":
            pss += int(line.split()[1]) * 1024
        elif inside and first == "Anonymous:":
            copied += int(line.split()[1]) * 1024
    return pss, copied


def touch_all(service, workers):
    """Jobs until each worker has read every byte of the model."""
    seen = set()
    with service.router_peer() as router:

        def ended(job_id):
            request = rpc_pb2.Request(wait=rpc_pb2.Wait(job_id=job_id, timeout_ms=JOB_S * 1000))
            job = router.rpc(request, timeout=JOB_S)[0].job
            if job.state != rpc_pb2.JOB_DONE:
                raise RuntimeError(f"job {job_id}: {job.error.message}")
            return job.worker

        def everybody():
            ids = [uuid.uuid4().hex for _ in range(workers)]
            for job_id in ids:
                submit = rpc_pb2.Submit(job_id=job_id, type="bench", params=[rpc_pb2.Param(key="touch", value="1")])
                router.rpc(rpc_pb2.Request(submit=submit))
            seen.update(ended(job_id) for job_id in ids)
            return len(seen) == workers

        wait_until(everybody, JOB_S, f"a job on each of {workers} workers")


def with_resvisor(context, path, workers):
    types = {"bench": {"executor": str(EXECUTOR), "models": ["m"], "workers": workers}}
    with context.service(models={"m": str(path)}, types=types) as service:
        touch_all(service, workers)
        pids = service.pids()
        arenas = [arena_pss(pid) for pid in pids.values()]
        everything = sum(procfs.pss(pid) for pid in pids.values())
    return sum(pss for pss, _ in arenas), sum(copied for _, copied in arenas), everything


def without_sharing(path, workers):
    with contextlib.ExitStack() as stack:
        helpers = [stack.enter_context(Helper([CLIENT, "copy", path])) for _ in range(workers)]
        return sum(procfs.pss(helper.pid) for helper in helpers)


def memory(context):
    size = (32 if context.quick else 512) * MIB
    path = context.model(size)
    warm_cache(path)
    rows = []
    for workers in WORKERS:
        pss, copied, everything = with_resvisor(context, path, workers)
        alone = without_sharing(path, workers)
        file_bytes = path.stat().st_size
        rows.append(
            Row("memory", f"weights of {workers} worker{'s' * (workers > 1)} on one model of {size // MIB} MiB", pss / MIB, "MiB",
                [("each its own copy", alone / MIB)], goal="<= 1.01 x the model", met=pss <= GOAL * file_bytes and copied == 0,
                note=f"{pss / file_bytes:.3f} x the model; copied by writing: {copied} bytes; all processes of resvisor "
                f"together: {everything / MIB:.0f} MiB")
        )  # fmt: skip
    return rows
