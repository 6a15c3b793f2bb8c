"""ComfyUI as workers of resvisor, beside the same ComfyUI alone: after a switch, after a kill, after an edit of a node, and memory.

Each way is started, measured and ended in turn, so at most two ComfyUI processes are there at one time. Both ways run the same
prompts, each with a seed of its own, so that nothing but the models is kept between two of them.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from harness import procfs
from harness.http import free_port
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import BUILD, ROOT, Service

from .measure import MIB, Row, drop_cache, interleave, median, run_json, say, wait_until, warm_cache

sys.path.insert(0, str(ROOT / "deploy" / "comfyui"))

PROXY_BENCH = BUILD / "bench" / "bench_proxy"
COMFYUI = pathlib.Path(os.environ.get("RESVISOR_COMFYUI", ROOT / "build" / "comfyui"))
GIB_OF_MODELS, QUICK_GIB = 2.0, 0.1
START_S, JOB_S, STOP_S = 180, 300, 60
POLL_S = 0.005
SWITCH_GOAL, KILL_GOAL_S, EDIT_GOAL_S, MEMORY_GOAL_MIB = 1.05, 2.0, 1.5, 150
BODY_GOAL, VIEW_MIB, UPLOAD_MIB = 0.9, 512, 90  # ComfyUI takes 100 MiB in one upload
PACK = "resvisor_quickstart"
# Caches of ComfyUI 0.3.75; newer ones take two numbers after --cache-ram.
CACHES = {"default cache": [], "--cache-lru 200": ["--cache-lru", "200"], "--cache-ram 4": ["--cache-ram", "4"]}
PER_TYPE = "process per type"
DEFAULT = "default cache"


class Place:
    """Models, nodes and folders that all ways share."""

    def __init__(self, context):
        import tiny_models

        self.base = context.work / "comfyui"
        shutil.rmtree(self.base, ignore_errors=True)
        for name in ("input", "output", "web"):
            (self.base / name).mkdir(parents=True)
        (self.base / "web" / "index.html").write_text("<html></html>")
        self.node = self.base / "custom_nodes" / PACK / "__init__.py"
        shutil.copytree(ROOT / "deploy" / "comfyui" / "nodes", self.node.parent)
        say(f"makes models of {QUICK_GIB if context.quick else GIB_OF_MODELS} GiB together")
        tiny_models.write_large(self.base / "models", QUICK_GIB if context.quick else GIB_OF_MODELS)
        self.models = sorted((self.base / "models" / "diffusion_models").iterdir())
        self.arguments = ["--cpu", "--base-directory", self.base, "--front-end-root", self.base / "web", "--disable-api-nodes"]
        self.graphs = {"image": tiny_models.image, "video": tiny_models.video}
        self.seeds = itertools.count(1)
        self.edits = itertools.count(1)

    @property
    def model_mib(self):
        return self.models[0].stat().st_size / MIB

    def graph(self, kind):
        return self.graphs[kind](next(self.seeds))

    def edit_node(self):
        """Another word in the node's source; that word."""
        word = f"edit-{next(self.edits)}"
        lines = [f'WORD = "{word}"\n' if line.startswith("WORD = ") else line for line in self.node.read_text().splitlines(True)]
        self.node.write_text("".join(lines))
        return word


class Ours:
    """Workers of resvisor. measure: seconds and bytes read of one prompt."""

    def __init__(self, context, place, **types):
        self.place = place
        folder = context.work / "service"
        shutil.rmtree(folder, ignore_errors=True)
        keys = {
            "kind": "comfyui", "directory": str(COMFYUI), "python": sys.executable, "args": [str(a) for a in place.arguments],
            "start_timeout": f"{START_S}s", "env": {"HF_HUB_OFFLINE": "1"}, "state_folder": str(folder / "state"),
        }  # fmt: skip
        self.service = Service(folder, {"model_folders": [str(place.base / "models")], "pool": {"budget": "50%"}})
        self.port = free_port()
        self.service.config["http"] = {"listen": f"127.0.0.1:{self.port}"}
        self.service.config["types"] = {name: {**keys, **more} for name, more in (types or {"image": {}, "video": {}}).items()}
        self.jobs = Jobs(self.service)

    def __enter__(self):
        try:
            self.service.start(timeout=START_S)
            self.service.wait_ready(timeout=START_S)
        except BaseException:
            self.service.end()
            raise
        return self

    def __exit__(self, *_):
        self.jobs.close()
        self.service.end()

    def submit(self, kind, graph, **fields):
        return self.jobs.submit(kind, payload=json.dumps(graph).encode(), **fields).job_id

    def finish(self, job_id):
        job = self.jobs.wait(job_id, JOB_S)
        if job.state != rpc_pb2.JOB_DONE:
            raise RuntimeError(f"a prompt failed: {job.error.message}")
        return job

    def prompt(self, kind):
        start = time.perf_counter()
        job = self.finish(self.submit(kind, self.place.graph(kind)))
        return time.perf_counter() - start, job.read_bytes

    def how(self):
        """How the image worker's process was made, in its own words."""
        found = [part for part in self.service.worker("image").detail.split("; ") if part.startswith(("forked ", "started "))]
        return found[0] if found else "started from nothing"

    def kill(self):
        """From the kill to the picture: the prompt waits in the queue meanwhile, or is run again if the dead worker got it."""
        start = time.perf_counter()
        os.kill(self.service.worker("image").pid, signal.SIGKILL)
        job = self.finish(self.submit("image", self.place.graph("image"), retry_on_worker_death=True))
        if job.read_bytes:
            raise RuntimeError(f"{job.read_bytes} bytes were read after the kill")
        return time.perf_counter() - start

    def edit(self):
        """From the restart of an edited node to a worker that is ready with it."""
        word = self.place.edit_node()
        start = time.perf_counter()
        self.service.cli("restart", "image", timeout=START_S)
        elapsed = time.perf_counter() - start
        job = self.finish(self.submit("image", {"1": {"class_type": "TinyWord", "inputs": {}}}))
        if word.encode() not in [self.jobs.output(job, i) for i in range(len(job.outputs))]:
            raise RuntimeError("the edit of the node does not show")
        return elapsed


class Plain:
    """One process of ComfyUI alone."""

    def __init__(self, place, arguments=(), name="plain"):
        self.place, self.arguments, self.name = place, list(arguments), name
        self.port = free_port()
        self.process = None

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.end(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def start(self):
        folders = {option: self.place.base / f"{option}-{self.name}-{self.port}" for option in ("output", "user", "temp")}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        command = [sys.executable, COMFYUI / "main.py", *self.place.arguments, *self.arguments, "--port", self.port,
                   "--database-url", f"sqlite:///{folders['user']}/comfyui.db"]  # fmt: skip
        command += [part for option, folder in folders.items() for part in (f"--{option}-directory", folder)]
        with open(self.place.base / f"plain-{self.port}.log", "ab") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=COMFYUI,
                                            env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.ask("/system_stats")
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ComfyUI alone did not start, see {log.name}")
            time.sleep(POLL_S)

    def end(self, number=signal.SIGINT):
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data), timeout=JOB_S) as answer:
            return json.load(answer)

    def prompt(self, kind):
        start = time.perf_counter()
        prompt_id = self.ask("/prompt", {"prompt": self.place.graph(kind)})["prompt_id"]
        deadline = time.monotonic() + JOB_S
        while not (found := self.ask(f"/history/{prompt_id}")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a prompt did not end within {JOB_S} s")
            time.sleep(POLL_S)
        if found[prompt_id]["status"]["status_str"] != "success":
            raise RuntimeError(f"a prompt failed: {found[prompt_id]['status']}")
        return time.perf_counter() - start, None

    def kill(self, cold=False):
        start = time.perf_counter()
        self.end(signal.SIGKILL)
        if cold:
            for path in self.place.models:
                drop_cache(path)
        self.start()
        self.prompt("image")
        return time.perf_counter() - start

    def edit(self):
        self.place.edit_node()
        start = time.perf_counter()
        self.end()
        self.start()
        return time.perf_counter() - start


class PerType:
    """A plain process for each type."""

    def __init__(self, place):
        self.of = {kind: Plain(place, name=kind) for kind in ("image", "video")}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for process in self.of.values():
                stack.enter_context(process)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def prompt(self, kind):
        return self.of[kind].prompt(kind)


# ---- image after video, kill, edit -------------------------------------------------------------------------------------


def session(way, place, switches, faults):
    """One life of a way, from models that are out of the page cache: medians of its prompts."""
    for path in place.models:
        drop_cache(path)
    found, warm, after, read = {}, [], [], 0
    with way as running:
        found["first"], _ = running.prompt("image")
        for _ in range(switches):
            warm.append(running.prompt("image")[0])
        running.prompt("video")
        for _ in range(switches):
            seconds, read_bytes = running.prompt("image")
            after.append(seconds)
            read += read_bytes or 0
            warm.append(running.prompt("image")[0])
            running.prompt("video")
        found.update(warm=median(warm), after=median(after), read=read)
        for name, measure in faults(running).items():
            found[name] = measure()
            if isinstance(running, Ours):
                found[f"{name} how"] = running.how()
    return found


def faults_of_ours(running):
    return {"kill": running.kill, "edit": running.edit}


def faults_of_plain(running):
    return {"kill": running.kill, "kill cold": lambda: running.kill(cold=True), "edit": running.edit}


def nothing(_):
    return {}


def switch(context):
    place, switches = Place(context), 1 if context.quick else 3
    rounds = context.rounds or (1 if context.quick else 3)
    ways = {"ours": lambda: session(Ours(context, place), place, switches, faults_of_ours)}
    for name, arguments in CACHES.items():
        faults = faults_of_plain if name == DEFAULT else nothing
        ways[name] = lambda arguments=arguments, faults=faults: session(Plain(place, arguments), place, switches, faults)
    ways[PER_TYPE] = lambda: session(PerType(place), place, switches, nothing)
    found = interleave(ways, rounds, uncounted=0)  # each is a whole life of its processes, and warms itself up

    def seconds(way, key):
        return median([result[key] for result in found[way]])

    ours = {key: seconds("ours", key) for key in ("first", "warm", "after", "kill", "edit")}
    ours.update({key: found["ours"][-1][key] for key in ("kill how", "edit how")})
    read = sum(result["read"] for result in found["ours"])
    plain = [*CACHES, PER_TYPE]
    size = f"two models of {place.model_mib:.0f} MiB"
    return [
        Row("switch", "first image, file not in the page cache", ours["first"], "s", [(name, seconds(name, "first")) for name in plain],
            note=f"F32, {size}; a worker that is ready; {rounds} lives of each way"),
        Row("switch", "image again (warm)", ours["warm"], "s", [(name, seconds(name, "warm")) for name in plain]),
        Row("switch", "image after video", ours["after"], "s",
            [("warm", ours["warm"])] + [(name, seconds(name, "after")) for name in plain],
            goal=f"<= {SWITCH_GOAL} x warm, 0 bytes read", met=ours["after"] <= SWITCH_GOAL * ours["warm"] and read == 0,
            note=f"{read} bytes read; both ways with the files in the page cache"),
        Row("switch", "picture after kill -9", ours["kill"], "s",
            [(f"{DEFAULT}, files in the page cache", seconds(DEFAULT, "kill")), ("files not in it", seconds(DEFAULT, "kill cold"))],
            goal=f"<= {KILL_GOAL_S:.0f} s with the template", met=ours["kill"] <= KILL_GOAL_S,
            note=f"from the kill to the picture; 0 bytes read by ours; the new worker: {ours['kill how']}"),
        Row("switch", "restart after an edit of a custom node, until ready", ours["edit"], "s", [(DEFAULT, seconds(DEFAULT, "edit"))],
            goal=f"<= {EDIT_GOAL_S} s with the template", met=ours["edit"] <= EDIT_GOAL_S,
            note=f"the end of the old process is part of it; the new worker: {ours['edit how']}"),
    ]  # fmt: skip


# ---- large bodies --------------------------------------------------------------------------------------------------------


def answers(port):
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/view?filename=large.png&type=input", timeout=START_S).close()
        return True
    return False


def bodies(context):
    """What the front door costs to ComfyUI's own uploads and views."""
    place, repeats = Place(context), 2 if context.quick else 9
    (place.base / "input" / "large.png").write_bytes(os.urandom(VIEW_MIB * MIB))
    view = ("download", "/view?filename=large.png&type=input")
    rows = []
    with Ours(context, place, image={}) as running:
        wait_until(lambda: answers(running.port), START_S, "the front door has its worker")
        direct = int(running.service.worker("image").detail.split("127.0.0.1:")[1].split(";")[0])
        for what, size, (command, *arguments) in (("view", VIEW_MIB, view), ("upload", UPLOAD_MIB, ("upload", "/upload/image", UPLOAD_MIB * MIB))):
            found = interleave({name: lambda port=port: run_json([PROXY_BENCH, command, port, *arguments])
                                for name, port in (("door", running.port), ("direct", direct))}, repeats)  # fmt: skip
            door, alone = (size / median([result["seconds"] for result in found[name]]) for name in ("door", "direct"))
            rows.append(Row("bodies", f"{what} of {size} MiB through the front door", door, "MiB/s", [("direct to ComfyUI", alone)],
                            goal=f">= {BODY_GOAL} of direct", met=door >= BODY_GOAL * alone, note="client, router and ComfyUI share 2 cores"))  # fmt: skip
    return rows


# ---- memory --------------------------------------------------------------------------------------------------------------


def both_hold(running, workers, model):
    """Prompts until each worker has the model."""
    deadline = time.monotonic() + JOB_S
    while running.service.model(model).leases < workers:
        for job_id in [running.submit("image", running.place.graph("image")) for _ in range(workers)]:
            running.finish(job_id)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{workers} workers did not all get the model")


def ours_pss(context, place, workers):
    """Of the workers, and of the template that they are forked from."""
    model = place.base / "models" / "diffusion_models" / "image.safetensors"
    with Ours(context, place, image={"workers": workers}) as running:
        running.prompt("image")
        both_hold(running, workers, model)
        pids = [worker.pid for worker in running.service.type("image").workers]
        pids += [template.pid for template in running.service.status().templates]
        return sum(map(procfs.pss, pids)) / MIB


def plain_pss(place, count):
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(Plain(place, name=f"memory-{i}")) for i in range(count)]
        for process in processes:
            for _ in range(2):
                process.prompt("image")
        return sum(procfs.pss(process.process.pid) for process in processes) / MIB


def memory(context):
    place = Place(context)
    for path in place.models:
        warm_cache(path)
    ours = [ours_pss(context, place, count) for count in (1, 2)]
    plain = [plain_pss(place, count) for count in (1, 2)]
    more = ours[1] - ours[0]
    return [
        Row("comfyui-memory", f"PSS of one worker with a model of {place.model_mib:.0f} MiB, and of its template", ours[0], "MiB", [("plain", plain[0])]),
        Row("comfyui-memory", "PSS of two workers with the same model, and of their template", ours[1], "MiB", [("plain", plain[1])],
            goal=f"<= one + {MEMORY_GOAL_MIB} MiB with the template", met=more <= MEMORY_GOAL_MIB,
            note=f"the second one costs {more:.0f} MiB; plain: {plain[1] - plain[0]:.0f} MiB"),
    ]  # fmt: skip
