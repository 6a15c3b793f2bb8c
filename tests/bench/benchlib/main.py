"""Runs the rows, prints the table, writes it as JSON and into docs/performance.md."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys

from . import attach, comfyui, graph, http, idle, load, memory, proxy, report, restart, rpc
from .context import Context
from .measure import GIB, REPORTING, Row, mem_available, prefault, say

# The programs of tests/bench: their rows, and the versions that count for them.
PROGRAMS = {
    "run": {"attach": attach.attach, "touch": attach.touch, "load": load.load, "memory": memory.memory,
            "restart": restart.restart, "rpc": rpc.rpc, "http": http.http, "graph": graph.graph,
            "idle": idle.idle},
    "comfyui": {"switch": comfyui.switch, "bodies": comfyui.bodies, "comfyui-memory": comfyui.memory},
    "proxy": {"small": proxy.small, "prompt": proxy.prompt, "bodies": proxy.bodies},
}  # fmt: skip
LIBRARIES = {
    "run": ("libevent-core-2.1-7", "libprotobuf-c1", "libnanomsg5", "libxxhash0", "liburing2", "fio"),
    "comfyui": ("libevent-core-2.1-7",),
    "proxy": ("libevent-core-2.1-7", "libmicrohttpd12", "libcurl4", "nginx", "haproxy"),
}
PACKAGES = {
    "run": ("torch", "safetensors", "fastsafetensors", "tensorizer", "numpy"),
    "comfyui": ("torch", "safetensors", "numpy", "transformers"),
    "proxy": (),
}
QUICK_PREFAULT = 2 * GIB


def first_line(path, start, default="unknown"):
    for line in pathlib.Path(path).read_text().splitlines():
        if line.startswith(start):
            return line.split(":", 1)[1].strip()
    return default


def debian_version(package):
    result = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 and result.stdout.strip() else "not installed"


def python_version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def shared_memory_pages():
    path = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    text = path.read_text() if path.exists() else "[?]"
    return text[text.index("[") + 1 : text.index("]")]


def filesystem(folder):
    result = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True)
    return result.stdout.strip()


def version():
    result = subprocess.run([os.path.join(os.environ["RESVISOR_BUILD"], "bin", "resvisor"), "version"], capture_output=True,
                            text=True)  # fmt: skip
    return result.stdout.splitlines()[0] if result.stdout else "unknown"


def conditions(program, work, quick):
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load_now = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "resvisor": version() + (" (quick run: figures mean little)" if quick else ""),
        "kernel": f"{platform.system()} {platform.release()}",
        "CPU": f"{first_line('/proc/cpuinfo', 'model name')}, {os.cpu_count()} cores",
        "memory": f"{memory_bytes / GIB:.1f} GiB, {mem_available() / GIB:.1f} GiB available; shmem huge pages: {shared_memory_pages()}"
        + ("; the host takes free memory back (free page reporting)" if REPORTING.exists() else ""),
        "disk": f"{filesystem(work)}; load average before: {load_now}",
        "libraries": ", ".join(f"{name} {debian_version(name)}" for name in LIBRARIES[program]),
        "Python": "; ".join([platform.python_version(), *(f"{name} {python_version(name)}" for name in PACKAGES[program])]),
    }  # fmt: skip


def run_rows(context, rows_of, names):
    rows = []
    for name in names:
        say(f"row {name}")
        try:
            rows += rows_of[name](context)
        except (RuntimeError, AssertionError, OSError) as error:
            say(f"row {name} broke: {error}")
            rows.append(Row(name, "broke", None, "", met=False, note=" ".join(str(error).split())[:300]))
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=list(PROGRAMS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--work", default=str(pathlib.Path(os.environ["RESVISOR_BUILD"]).parent / "bench-work"))
    options = parser.parse_args()
    rows_of = PROGRAMS[options.program]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that what was started is ended
    context = Context(options.work, options.quick, options.rounds)
    try:
        facts = conditions(options.program, context.work, options.quick)
        if not REPORTING.exists():  # there the host takes it back at once; rows that need it do it themselves
            prefault(QUICK_PREFAULT if options.quick else sys.maxsize)
        rows = run_rows(context, rows_of, options.only or list(rows_of))
    finally:
        context.close()
    print(report.text(facts, rows))
    result = {"conditions": facts, "rows": [row.as_dict() for row in rows]}
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.markdown:
        report.write_markdown(options.program, facts, rows)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
