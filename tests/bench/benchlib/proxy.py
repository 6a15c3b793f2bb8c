"""The front door as a proxy: small requests, prompts and large bodies, beside nginx, HAProxy and the backend itself."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request

from harness import procfs
from harness.http import free_port
from harness.service import BUILD, Service

from .measure import GIB, HERE, MIB, Helper, Row, interleave, median, run_json, say, wait_until

PROGRAM = BUILD / "bench" / "bench_proxy"
SMALL = "/bench/small"  # no path that the front door knows: passed on
LATENCY_GOAL_US, RATE_GOAL, PROMPT_GOAL, BODY_GOAL = 100, 15000, 5000, 0.9
CONNECTIONS = 32
READY_S = 20
QUEUE = 100000
PROXIES = ("resvisor", "nginx", "HAProxy")

NGINX = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000; client_max_body_size 0; proxy_request_buffering off; proxy_max_temp_file_size 0;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; scgi_temp_path {folder}/s;
  uwsgi_temp_path {folder}/u;
  upstream backend {{ server 127.0.0.1:{backend}; keepalive 64; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""
HAPROXY = """global
  nbthread 1
defaults
  mode http
  timeout connect 10s
  timeout client 60s
  timeout server 60s
  http-reuse always
listen bench
  bind 127.0.0.1:{port}
  server backend 127.0.0.1:{backend}
"""


def cores():
    """(the proxy's own, those of backend and clients)."""
    found = sorted(os.sched_getaffinity(0))
    return {found[0]}, set(found[1:] or found)


def pin(pid, where):
    """All threads of a process to these cores."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), where)


def cpu_seconds(pid):
    """Of a process with all its threads and children."""
    total = 0
    for each in {pid, *procfs.descendants(pid)}:
        for task in os.listdir(f"/proc/{each}/task"):
            with open(f"/proc/{each}/task/{task}/schedstat") as line:
                total += int(line.read().split()[0])
    return total / 1e9


def answers(port):
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}{SMALL}", timeout=READY_S).read()
        return True
    return False


@contextlib.contextmanager
def other(name, context, backend, pinned):
    """nginx or HAProxy in front of the backend: (port, pid)."""
    folder, port = context.work / name, free_port()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "config"
    config.write_text((NGINX if name == "nginx" else HAPROXY).format(folder=folder, port=port, backend=backend))
    path = f"{os.environ['PATH']}:/usr/sbin"
    command = {"nginx": ["nginx", "-c", config, "-e", folder / "nginx.log"], "HAProxy": ["haproxy", "-db", "-f", config]}[name]
    command[0] = shutil.which(command[0], path=path) or command[0]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                   preexec_fn=lambda: os.sched_setaffinity(0, cores()[0]) if pinned else None)  # fmt: skip
    try:
        wait_until(lambda: answers(port) or process.poll() is not None, READY_S, f"{name} answers")
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended: {(folder / 'log').read_text()[-400:]}")
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(READY_S)


@contextlib.contextmanager
def front(context, pinned):
    """resvisor with one worker of kind comfyui that is the backend: (service, (port, pid) of the front door, port of the backend)."""
    folder = context.work / "service"
    shutil.rmtree(folder, ignore_errors=True)
    service, port, backend = Service(folder), free_port(), free_port()
    (folder / "comfyui").mkdir()
    (folder / "comfyui" / "main.py").touch()
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{HERE / 'benchlib' / 'stand_in.py'}' '{PROGRAM}' {backend}\n")
    script.chmod(0o755)
    service.config.update({
        "http": {"listen": f"127.0.0.1:{port}"}, "rpc": {"jobs": QUEUE},
        "types": {"image": {"kind": "comfyui", "directory": str(folder / "comfyui"), "python": str(script), "queue": QUEUE,
                            "state_folder": str(folder / "state")}},
    })  # fmt: skip
    try:
        service.start()
        service.wait_ready()
        wait_until(lambda: answers(port), READY_S, "the front door answers")
        detail = service.worker("image").detail
        backend = int(detail.split("127.0.0.1:")[1].split(";")[0])
        status = service.status()
        if pinned:
            pin(status.router_pid, cores()[0])
            for pid in {worker.pid for worker in service.type("image").workers}:
                for each in {pid, *procfs.descendants(pid)}:
                    pin(each, cores()[1])
        yield service, (port, status.router_pid), backend
    finally:
        service.end()


def client(*arguments, pinned):
    command = [PROGRAM, *arguments]
    return run_json(["taskset", "-c", ",".join(map(str, cores()[1])), *command] if pinned else command)


@contextlib.contextmanager
def everything(context, pinned):
    """{way: (port, pid)} with the three proxies and the backend itself, whose pid is None."""
    with contextlib.ExitStack() as stack:
        _, door, backend = stack.enter_context(front(context, pinned))
        ports = {"direct": (backend, None), "resvisor": door}
        for name in PROXIES[1:]:
            try:
                ports[name] = stack.enter_context(other(name, context, backend, pinned))
            except (OSError, RuntimeError) as error:
                say(f"{name} is left out: {error}")
        yield ports


def small(context):
    rounds, ms, repeats = (500, 300, 1) if context.quick else (10000, 2000, 7)
    with everything(context, True) as ports:

        def timed(port, pid):
            before = cpu_seconds(pid) if pid else 0
            found = client("rate", port, CONNECTIONS, ms, SMALL, pinned=True)
            cpu = (cpu_seconds(pid) - before) if pid else 0
            return {**found, "cpu_us": cpu * 1e6 / (found["per_second"] * ms / 1000)}

        latency = interleave({name: lambda port=port: client("latency", port, SMALL, rounds, pinned=True)["latency"]
                              for name, (port, _) in ports.items()}, repeats)  # fmt: skip
        rate = interleave({name: lambda where=where: timed(*where) for name, where in ports.items()}, repeats)
    added = {name: median([found["p50"] - direct["p50"] for found, direct in zip(latency[name], latency["direct"])])
             for name in ports if name != "direct"}  # fmt: skip
    p99 = {name: median([found["p99"] for found in latency[name]]) for name in ports}
    per_second = {name: median([found["per_second"] for found in rate[name]]) for name in ports}
    cpu_us = {name: median([found["cpu_us"] for found in rate[name]]) for name in ports}
    others = [name for name in PROXIES[1:] if name in ports]
    direct_us = median([found["p50"] for found in latency["direct"]])
    return [
        Row("small", "added by the proxy to a small request, p50", added["resvisor"], "us", [(name, added[name]) for name in others],
            goal=f"<= {LATENCY_GOAL_US} us", met=added["resvisor"] <= LATENCY_GOAL_US,
            note=f"one connection; direct: {direct_us:.0f} us; proxy on one core, backend and client on the other"),
        Row("small", "small request, p99", p99["resvisor"], "us", [(name, p99[name]) for name in (*others, "direct")]),
        Row("small", f"small requests, {CONNECTIONS} connections, proxy on one core", per_second["resvisor"], "1/s",
            [(name, per_second[name]) for name in (*others, "direct")], goal=f">= {RATE_GOAL:,} 1/s",
            met=per_second["resvisor"] >= RATE_GOAL),
        Row("small", "CPU time of the proxy per small request", cpu_us["resvisor"], "us", [(name, cpu_us[name]) for name in others]),
    ]  # fmt: skip


# ---- prompts -------------------------------------------------------------------------------------------------------------


def graph(nodes=28):
    """A prompt of the size of a usual one: 7.7 KB of a picture's graph with many text nodes."""
    made = {}
    for i in range(nodes):
        text = f"a photograph of number {i}, in the morning, with soft light, wide angle, many small details, calm sea, no people"
        made[str(i)] = {"inputs": {"text": text, "clip": ["100", 1], "strength": 0.75, "enabled": True}, "class_type": "CLIPTextEncode",
                        "_meta": {"title": "CLIP Text Encode"}}  # fmt: skip
    made["100"] = {"inputs": {"ckpt_name": "model.safetensors"}, "class_type": "CheckpointLoaderSimple"}
    made["101"] = {"inputs": {"images": ["102", 0], "filename_prefix": "bench"}, "class_type": "SaveImage"}
    made["102"] = {"inputs": {"samples": ["0", 0], "vae": ["100", 2]}, "class_type": "VAEDecode"}
    return made


def clear(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/queue", json.dumps({"clear": True}).encode())
    urllib.request.urlopen(request, timeout=READY_S).read()


def prompt(context):
    ms, repeats = (300, 1) if context.quick else (1500, 5)
    body = context.work / "prompt.json"
    body.write_text(json.dumps({"prompt": graph(), "client_id": "bench"}))
    with front(context, True) as (_, (port, pid), backend):

        def one(where):
            before = cpu_seconds(pid)
            found = client("rate", where, 16, ms, "/prompt", body, pinned=True)
            found["cpu_us"] = (cpu_seconds(pid) - before) * 1e6 / (found["per_second"] * ms / 1000)
            if where == port:
                clear(port)
            return found

        found = interleave({"resvisor": lambda: one(port), "direct": lambda: one(backend)}, repeats)
    rate = {name: median([result["per_second"] for result in results]) for name, results in found.items()}
    cpu_us = median([result["cpu_us"] for result in found["resvisor"]])
    return [Row("prompt", f"POST /prompt of {body.stat().st_size / 1000:.1f} kB, classified and queued", rate["resvisor"], "1/s",
                [("the backend alone, which reads nothing of it", rate["direct"])], goal=f">= {PROMPT_GOAL:,} 1/s",
                met=rate["resvisor"] >= PROMPT_GOAL,
                note=f"16 connections, router on one core, {cpu_us:.0f} us of its time each; the worker's validation is part of it")]  # fmt: skip


# ---- large bodies --------------------------------------------------------------------------------------------------------


def bodies(context):
    size, repeats = (64 * MIB, 1) if context.quick else (GIB, 5)
    path = f"/view?filename=bench.png&bytes={size}"
    rows = []
    with everything(context, False) as ports:
        for what, arguments in (("view", ("download", path)), ("upload", ("upload", "/upload/image", size))):
            ways = {name: lambda port=port, a=arguments: client(a[0], port, *a[1:], pinned=False) for name, (port, _) in ports.items()}
            found = interleave(ways, repeats)
            rate = {name: size / MIB / median([result["seconds"] for result in results]) for name, results in found.items()}
            names = ["direct", *(name for name in PROXIES[1:] if name in ports)]
            rows.append(
                Row("bodies", f"{what} of {size // MIB:,} MiB", rate["resvisor"], "MiB/s", [(name, rate[name]) for name in names],
                    goal=f">= {BODY_GOAL} of direct", met=rate["resvisor"] >= BODY_GOAL * rate["direct"],
                    note="direct: client and backend have two cores; with a proxy three processes share them")
            )  # fmt: skip
    return rows
