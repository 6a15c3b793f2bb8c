"""Row 6: requests and jobs through the router, by a C client over nanomsg."""

import uuid

from .context import CLIENT, EXECUTOR, RPC_BENCH, WORKER
from .measure import Helper, MIB, Row, interleave, medians, run_json

CLIENTS = 8
JOBS = 100000  # records of ended jobs: the one that Get asks for must not be the oldest that goes


def rpc(context):
    rounds, ms, repeats = (300, 500, 1) if context.quick else (5000, 3000, 3)
    path = context.model(32 * MIB)
    prefix, job = uuid.uuid4().hex[:12], uuid.uuid4().hex
    types = {"bench": {"executor": str(EXECUTOR), "models": ["m"]}}
    with context.service(models={"m": str(path)}, types=types, rpc={"jobs": JOBS}) as service:
        address, echo_address = context.rpc_address(service), f"ipc://{service.runtime / 'echo.ipc'}"
        run_json([RPC_BENCH, "job", address, "bench", prefix, 1])
        job = f"{prefix}-0"
        numbers = iter(range(1000))

        def one(kind, command):
            def once():
                found = run_json(command())
                return found[kind] if kind else found

            return once

        with Helper([RPC_BENCH, "echo", echo_address]):
            found = interleave({
                "get": one("get", lambda: [RPC_BENCH, "get", address, job, rounds]),
                "echo": one("get", lambda: [RPC_BENCH, "get", echo_address, "echo", rounds]),
                "rate": one(None, lambda: [RPC_BENCH, "rate", address, job, CLIENTS, ms]),
                "echo rate": one(None, lambda: [RPC_BENCH, "rate", echo_address, "echo", CLIENTS, ms]),
                "job": one("job", lambda: [RPC_BENCH, "job", address, "bench", f"{prefix}-{next(numbers)}", rounds // 2]),
                "spawn": one("spawn", lambda: [CLIENT, "spawn", 50, WORKER, "--executor", EXECUTOR]),
            }, repeats)  # fmt: skip
        (service.runtime / "echo.ipc").unlink(missing_ok=True)
    timed = {name: found[name] for name in ("get", "echo", "job", "spawn")}
    p50, p99 = medians(timed, "p50"), medians(timed, "p99")
    rate = medians({name: found[name] for name in ("rate", "echo rate")}, "per_second")
    return [
        Row("rpc", "Get, one client, p50", p50["get"], "us", [("nanomsg echo", p50["echo"])]),
        Row("rpc", "Get, one client, p99", p99["get"], "us", [("nanomsg echo", p99["echo"])]),
        Row("rpc", f"Get, {CLIENTS} clients at once", rate["rate"], "1/s", [("nanomsg echo", rate["echo rate"])]),
        Row("rpc", "job that does nothing: Submit to its end, p50", p50["job"], "us", [("a process per job", p50["spawn"])],
            note="router, worker, the supervisor's ledger, and back"),
        Row("rpc", "job that does nothing: Submit to its end, p99", p99["job"], "us", [("a process per job", p99["spawn"])]),
    ]  # fmt: skip
