"""Row 3: a cold load against the disk, against memory, and against other loaders of the same file."""

import contextlib
import json
import shutil
import time

from .context import CLIENT, LOADER, LOADER_BENCH
from .measure import FRESH, GIB, MIB, REPORTING, Row, drop_cache, interleave, medians, prefault, run, run_json, say

SPEED_GOAL = 0.95
NOT_SLOWER = 1.05
BLOCK = "4M"  # the loader's own block
QUEUE_DEPTH = 8
RETURN_S = 4  # free page reporting takes free memory back after 2 s
OTHERS = ("load_file", "fastsafetensors", "tensorizer")


def fio(path):
    if not shutil.which("fio"):
        return None

    def once():
        out, _, _ = run(["fio", "--name=read", f"--filename={path}", "--rw=read", f"--bs={BLOCK}", "--direct=1", "--readonly",
                         "--ioengine=io_uring", f"--iodepth={QUEUE_DEPTH}", "--output-format=json"])  # fmt: skip
        job = json.loads(out[out.index("{") :])["jobs"][0]
        wall_s = job["read"]["runtime"] / 1e3
        return {"us": wall_s * 1e6, "cpu_s": (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall_s}

    return once


def dd(path):
    _, wall, cpu = run(["dd", f"if={path}", "of=/dev/null", "iflag=direct", "bs=16M"])
    return {"us": wall * 1e6, "cpu_s": cpu}


def product(context, service, path, touch):
    """Through the whole product: a client that attaches an absent model (and reads every byte), and all that works for it."""

    def once():
        cpu = context.service_cpu(service)
        if touch:
            found = run_json([CLIENT, "touch", context.socket(service), path])
            us, client_cpu = found["us"], found["cpu_s"]
        else:
            start = time.perf_counter()
            context.load(service, path)
            us, client_cpu = (time.perf_counter() - start) * 1e6, 0.0
        cpu = context.service_cpu(service) - cpu + client_cpu
        context.unload(service, path)
        return {"us": us, "cpu_s": cpu}

    return once


def measure(context, path, rounds):
    with context.service() as service, contextlib.ExitStack() as stack:
        file_bytes = path.stat().st_size
        ways = {
            "loader": lambda: run_json([LOADER_BENCH, "load", LOADER, path, 0, 0]),
            "fio": fio(path),
            "dd": lambda: dd(path),
            "fill": lambda: run_json([LOADER_BENCH, "fill", file_bytes]),
            "product": product(context, service, path, touch=False),
            "product, touched": product(context, service, path, touch=True),
        }
        if not ways["fio"]:
            context.missing["fio"] = "not installed"
            del ways["fio"]
        files = [path]
        for name in OTHERS:
            helper = context.alternative(name, path)
            if helper:
                stack.enter_context(helper)
                files.append(helper.first["path"])
                ways[name] = helper.ask

        def cold():
            for file in set(files):
                drop_cache(file)
            prefault(int(file_bytes * FRESH))

        found = interleave(ways, rounds, before=cold)
    methods = {result["method"] for result in found["loader"]}
    return medians(found, "us"), medians(found, "cpu_s"), methods


def not_backed(path, rounds):
    """The same where the host has taken the free memory back: what the first load after a pause can cost."""

    def pause():
        drop_cache(path)
        time.sleep(RETURN_S)

    ways = {
        "loader": lambda: run_json([LOADER_BENCH, "load", LOADER, path, 0, 0]),
        "fill": lambda: run_json([LOADER_BENCH, "fill", path.stat().st_size]),
    }
    return medians(interleave(ways, rounds, before=pause), "us")


def load(context):
    size, rounds = (256 * MIB, 2) if context.quick else (2 * GIB, 5)
    path = context.model(size)
    us, cpu, methods = measure(context, path, rounds)
    gib = path.stat().st_size / GIB
    speed = {name: gib / (value / 1e6) for name, value in us.items()}
    say("cold, GiB/s: " + ", ".join(f"{name} {value:.2f}" for name, value in speed.items()))
    bounds = [(name, speed[name]) for name in ("fio", "fill") if name in speed]
    slower = min(bounds, key=lambda bound: bound[1])
    rows = []
    for way, what in (("loader", "cold load, the loader alone"), ("product", "cold load, as `resvisor load`")):
        rows.append(
            Row("load", f"{what}, {gib:.1f} GiB", speed[way], "GiB/s",
                [slower, *[bound for bound in bounds if bound is not slower], ("dd", speed["dd"])],
                goal=f">= {SPEED_GOAL} x the slower of fio and fill", met=speed[way] >= SPEED_GOAL * slower[1],
                note=f"fio: io_uring, depth {QUEUE_DEPTH}, {BLOCK}; fill: write(2) into a fresh memfd of 4 KiB pages; "
                f"loader: {', '.join(sorted(methods))}" if way == "loader" else "")
        )  # fmt: skip
    for name in OTHERS:
        if name not in us:
            rows.append(Row("load", f"cold against {name}", None, "s", note=f"left out: {context.missing.get(name, '')}"))
            continue
        ours = us["product, touched"]
        rows.append(
            Row("load", f"cold attach and read every byte, {gib:.1f} GiB", ours / 1e6, "s", [(name, us[name] / 1e6)],
                goal="not slower (<= 1.05 x)", met=ours <= NOT_SLOWER * us[name],
                note="its own format, converted before" if name == "tensorizer" else "")
        )  # fmt: skip
    if REPORTING.exists():
        idle_us = not_backed(path, max(1, rounds // 2))
        rows.append(
            Row("load", "the same after a pause in which the host takes free memory back", gib / (idle_us["loader"] / 1e6),
                "GiB/s", [("fill", gib / (idle_us["fill"] / 1e6))], note="free page reporting; only virtual machines have it")
        )  # fmt: skip
    others = [(name, cpu[name] / gib) for name in (*OTHERS, "fio", "dd", "fill") if name in cpu]
    rows.append(Row("load", "CPU of a cold load, the loader alone", cpu["loader"] / gib, "CPU s/GiB", others,
                    note="ours includes a digest of every tensor and a copy into sealed memory; the first three read every "
                    "byte, fio and dd only fetch"))  # fmt: skip
    rows.append(Row("load", "CPU of a cold attach and reading every byte, everything", cpu["product, touched"] / gib,
                    "CPU s/GiB", others[: len([name for name in OTHERS if name in cpu])],
                    note="keeper, supervisor, loader and client"))  # fmt: skip
    return rows
