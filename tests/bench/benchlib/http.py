"""Row 8: the same small requests and jobs by HTTP, beside a server that answers with fixed bytes: what loopback itself costs."""

import uuid

from harness.http import free_port

from .context import EXECUTOR, HTTP_BENCH
from .measure import Helper, MIB, Row, interleave, medians, run_json

CLIENTS = 8
JOBS = 100000


def http(context):
    rounds, ms, repeats = (300, 500, 1) if context.quick else (5000, 3000, 3)
    types = {"bench": {"executor": str(EXECUTOR), "models": ["m"]}}
    port, echo_port, prefix = free_port(), free_port(), uuid.uuid4().hex[:12]
    front = {"listen": f"127.0.0.1:{port}"}
    models = {"m": str(context.model(32 * MIB))}
    with context.service(models=models, types=types, rpc={"jobs": JOBS}, http=front):
        numbers = iter(range(1000))

        def one(kind, *command):
            def once():
                found = run_json([HTTP_BENCH, *(part() if callable(part) else part for part in command)])
                return found[kind] if kind else found

            return once

        with Helper([HTTP_BENCH, "echo", echo_port]):
            found = interleave({
                "get": one("get", "get", port, rounds),
                "echo": one("get", "get", echo_port, rounds),
                "rate": one(None, "rate", port, CLIENTS, ms),
                "echo rate": one(None, "rate", echo_port, CLIENTS, ms),
                "job": one("job", "job", port, "bench", lambda: f"{prefix}-{next(numbers)}", rounds // 2),
            }, repeats)  # fmt: skip
    timed = {name: found[name] for name in ("get", "echo", "job")}
    p50, p99 = medians(timed, "p50"), medians(timed, "p99")
    rate = medians({name: found[name] for name in ("rate", "echo rate")}, "per_second")
    return [
        Row("http", "GET /healthz, one client, p50", p50["get"], "us", [("fixed bytes", p50["echo"])]),
        Row("http", "GET /healthz, one client, p99", p99["get"], "us", [("fixed bytes", p99["echo"])]),
        Row("http", f"GET /healthz, {CLIENTS} clients at once", rate["rate"], "1/s", [("fixed bytes", rate["echo rate"])],
            note="clients and router share the cores"),
        Row("http", "job that does nothing: submit to its end, p50", p50["job"], "us", note="one POST with wait_ms"),
        Row("http", "job that does nothing: submit to its end, p99", p99["job"], "us"),
    ]  # fmt: skip
