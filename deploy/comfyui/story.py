"""The main job of resvisor on a real ComfyUI; deploy/quickstart.sh --comfyui calls it.

    story.py --resvisor PROGRAM --comfyui DIR --out DIR [--python PYTHON] [--tiny GIB] [IMAGE VIDEO]

Image, video, image; kill -9 of the image worker in a prompt, and the image again; an edit of a custom node, and a restart; the same by one address.
IMAGE and VIDEO are workflows in API format, or pictures that carry theirs; without them the installation's output folder is
searched. --tiny makes models instead, and then needs numpy and safetensors. Nothing is written into DIR.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import workflows

HERE = pathlib.Path(__file__).resolve().parent
START_S = 300
JOB_S = 1800
STOP_S = 60
MIB = 1 << 20
TYPES = ("image", "video")
PACK = "resvisor_quickstart"
GIVE = """Give a workflow for an image and one for a video, both in API format (in ComfyUI: Workflow, Export (API)):
  sh deploy/quickstart.sh --comfyui {directory} image.json video.json
Pictures (PNG) and animations (WebP) that ComfyUI saved carry theirs, and will do too."""


class Failed(Exception):
    """help: what is said before the last line."""

    def __init__(self, text, help=""):
        super().__init__(text)
        self.help = help


def title(text):
    print(f"\n== {text}", flush=True)


def say(text):
    print(f"  {text}", flush=True)


def mib(size):
    return f"{size / MIB:.1f} MiB"


def wait_for(predicate, timeout, what):
    deadline = time.monotonic() + timeout
    while not (found := predicate()):
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {timeout} s")
        time.sleep(0.02)
    return found


def drop_cache(path):
    """Out of the page cache, so that the first load really reads the disk."""
    with open(path, "rb") as file:
        os.fdatasync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Run:
    """What one job did and cost."""

    def __init__(self, folder, job, wall_s, read_bytes):
        self.job, self.wall_s, self.read_bytes = job, wall_s, read_bytes
        self.files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]

    def named(self, suffix):
        return [path.read_bytes() for path in self.files if path.suffix == suffix]

    def pictures(self):
        return [path.read_bytes() for path in self.files if path.suffix in (".png", ".webp", ".jpg", ".latent")]


class Story:
    def __init__(self, options):
        self.options = options
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="resvisor-quickstart."))
        self.out = pathlib.Path(options.out).resolve()
        self.log = self.work / "log"
        (self.work / "tmp").mkdir()  # torch leaves folders there
        self.env = {**os.environ, "RESVISOR_RUNTIME_DIR": str(self.work / "run"), "TMPDIR": str(self.work / "tmp"), "HF_HUB_OFFLINE": "1"}
        self.env.pop("RESVISOR_CONFIG", None)
        self.process = None
        self.runs = 0

    # ---- resvisor ----

    def command(self, *arguments, check=True):
        result = subprocess.run([self.options.resvisor, *map(str, arguments)], env=self.env, capture_output=True, text=True,
                                stdin=subprocess.DEVNULL)  # fmt: skip
        if check and result.returncode != 0:
            raise Failed(f"resvisor {arguments[0]} ended with {result.returncode}: {(result.stderr or result.stdout).strip()[-1500:]}")
        return result

    def asked(self, *arguments):
        return json.loads(self.command(*arguments, "--json").stdout)

    def worker(self, name):
        types = self.asked("status")["types"]
        return next(found for found in types if found["name"] == name)["workers"][0]

    def read_so_far(self):
        return sum(model["read_bytes"] for model in self.asked("models")["models"])

    def wait_started(self, name, starts):
        """Waits for a start with this number; the worker."""

        def ready():
            found = self.worker(name)
            if found["state"] == "FAILED":
                raise Failed(f"worker {name}/0 failed: {found}")
            return found if found["state"] == "READY" and found["starts"] >= starts else None

        return wait_for(ready, START_S, f"worker {name}/0 ready")

    # ---- prompts ----

    def payload(self, graph):
        path = self.work / "prompt.json"
        path.write_text(json.dumps(graph))
        return path

    def run(self, label, name, graph):
        """One prompt, one row of the table."""
        self.runs += 1
        folder = self.work / "results" / f"{self.runs}-{name}"
        folder.mkdir(parents=True)
        before, start = self.read_so_far(), time.monotonic()
        result = self.command("submit", name, "--payload", self.payload(graph), "--out", folder, "--json", "--timeout", JOB_S, check=False)
        if result.returncode != 0:
            raise Failed(f"the prompt '{label}' failed: {(result.stdout + result.stderr).strip()[-1500:]}")
        wall_s = time.monotonic() - start
        found = Run(folder, json.loads(result.stdout), wall_s, self.read_so_far() - before)
        print(f"  {label:<34}{wall_s:>8.2f} s {found.read_bytes / MIB:>12.1f} MiB", flush=True)
        return found

    @staticmethod
    def header():
        print(f"  {'prompt':<34}{'in all':>10} {'read from file':>16}")

    # ---- the parts ----

    def prepare(self):
        """The configuration that `resvisor init comfyui` finds, and what the quick start adds to it."""
        options, directory = self.options, pathlib.Path(self.options.comfyui).resolve()
        title(f"The installation {directory}")
        python = ["--python", options.python] if options.python else []
        self.config = self.work / "resvisor.yaml"
        found = self.asked("init", "comfyui", directory, "-o", self.config, *python)
        args = ["--gpu-only"] if options.gpu_only else [] if found["gpu"] != "none" else ["--cpu"]
        say(f"ComfyUI {found['version']}, {found['python']}, GPU: {found['gpu']}; `resvisor init comfyui` wrote its configuration")
        pack = self.work / "packs" / PACK
        shutil.copytree(HERE / "nodes", pack)
        self.node_file = pack / "__init__.py"
        extra = self.work / "extra.yaml"
        extra.write_text(json.dumps({"resvisor": {"base_path": str(self.work), "custom_nodes": "packs"}}))
        self.port = free_port()
        self.sets, args = [f"http.listen=127.0.0.1:{self.port}"], args + ["--extra-model-paths-config", str(extra)]
        if options.tiny:
            base = self.tiny()
            self.sets.append(f"model_folders={base / 'models'}")
            args += ["--base-directory", str(base), "--front-end-root", str(base / "web")]
        output = self.work / "output"  # of both types; each worker's name stands before those of its files
        output.mkdir()
        args += ["--output-directory", str(output)]
        for name in TYPES:
            self.sets += [f"types.{name}.args={','.join(args)}", f"types.{name}.state_folder={self.work / 'state'}",
                          f"types.{name}.start_timeout={START_S}s"]  # fmt: skip
        self.graphs = self.find_graphs(directory)

    def tiny(self):
        """Models with random weights, in a base folder of their own."""
        import tiny_models

        base = self.work / "base"
        for name in ("input", "custom_nodes", "web"):
            (base / name).mkdir(parents=True)
        (base / "web" / "index.html").write_text("<html></html>")
        tiny_models.write_large(base / "models", float(self.options.tiny))
        files = sorted((base / "models" / "diffusion_models").iterdir())
        for path in files:
            drop_cache(path)
        say("models with random weights: " + ", ".join(f"{path.name} {mib(path.stat().st_size)}" for path in files))
        return base

    def find_graphs(self, directory):
        if self.options.tiny:
            import tiny_models

            return {"image": tiny_models.image(), "video": tiny_models.video()}
        graphs, given = {}, self.options.workflows
        if given:
            for name, path in zip(TYPES, map(pathlib.Path, given)):
                graphs[name] = workflows.in_file(path)
                if not graphs[name]:
                    raise Failed(f"{path} holds no workflow in API format", GIVE.format(directory=directory))
                say(f"{name}: {path}")
            return graphs
        for path, graph in workflows.made_by(directory):
            answer = self.command("route", "-c", self.config, "--json", self.payload(graph), check=False)
            name = json.loads(answer.stdout).get("type") if answer.returncode == 0 else None
            if name in TYPES and name not in graphs:
                graphs[name] = graph
                say(f"{name}: the workflow of {path}")
        missing = [name for name in TYPES if name not in graphs]
        if missing:
            kinds = " and ".join(missing)
            raise Failed(f"nothing in {directory}/output carries a workflow for {kinds}", GIVE.format(directory=directory))
        return graphs

    def start(self):
        title("Start")
        ready, tell = os.pipe()
        os.set_inheritable(tell, True)
        sets = [part for value in self.sets for part in ("--set", value)]
        start = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([self.options.resvisor, "start", "-c", self.config, *sets, "--ready-fd", str(tell)],
                                            env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[tell])  # fmt: skip
        os.close(tell)
        with os.fdopen(ready, "rb") as pipe:
            if pipe.readline() != b"ready\n":
                raise Failed("resvisor did not start")
        workers = [self.wait_started(name, 1) for name in TYPES]
        say(f"two ComfyUI processes are ready after {time.monotonic() - start:.1f} s, image and video")
        for worker in workers:
            say(f"{worker['id']}: {worker.get('detail', '')}")

    def image(self, label, seed=7, extra=None):
        return self.run(label, "image", {**workflows.seeded(self.graphs["image"], seed), **(extra or {})})

    def same(self, found, when):
        """The picture of the same seed. Only the models made here promise it bit by bit: a node may do as it likes."""
        if found.pictures() == self.first.pictures():
            return "the same picture bit for bit"
        if self.options.tiny:
            raise Failed(f"the picture {when} is another one")
        return "not the same bits, which workflows need not give"

    def switch(self):
        title("1. Image, video, image")
        self.header()
        self.first = self.image("image, for the first time")
        self.warm = self.image("image again, another seed", seed=8)
        self.run("video", "video", workflows.seeded(self.graphs["video"], 7))
        self.after = self.image("image after the video")
        if not self.first.pictures():
            raise Failed("the image workflow saves no picture; a node such as SaveImage is needed")
        if self.first.read_bytes == 0:
            raise Failed("nothing was loaded through the pool: the log below says why, docs/comfyui.md what to do")
        elsewhere = [model["name"] for model in self.asked("models")["models"] if model["device"] == "host"]
        if self.options.gpu_only and elsewhere:
            raise Failed(f"with --gpu-only these models lie on the host: {', '.join(elsewhere)}")
        if self.after.read_bytes != 0:
            raise Failed(f"the image after the video read {self.after.read_bytes} bytes; 0 were expected")
        say(f"the last image read 0 bytes, took {self.after.wall_s:.2f} s (warm {self.warm.wall_s:.2f}, first {self.first.wall_s:.2f}), "
            f"{self.same(self.after, 'after the video')}")  # fmt: skip

    def kill(self):
        title("2. kill -9 of the image worker in a prompt")
        mark, victim, video = self.work / "begun", self.worker("image"), self.worker("video")
        graph = {**workflows.seeded(self.graphs["image"], 9), "resvisor-wait": {"class_type": "TinyWait", "inputs": {"mark": str(mark)}}}
        self.command("submit", "image", "--payload", self.payload(graph), "--id", "quickstart-victim")
        wait_for(mark.exists, START_S, "the prompt that is to be killed began")
        start = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        worker = self.wait_started("image", victim["starts"] + 1)
        ready_s = time.monotonic() - start
        say(f"the prompt's end:  {self.asked('job', 'quickstart-victim')['error']['message']}")
        say(f"worker image/0:    process {victim['pid']} is gone, process {worker['pid']} is ready after {ready_s:.2f} s{how(worker)}")
        self.header()
        again = self.image("image after the kill")
        self.kill_s = time.monotonic() - start
        if again.read_bytes != 0:
            raise Failed(f"after the kill {again.read_bytes} bytes were read from model files; 0 were expected")
        if self.worker("video")["pid"] != video["pid"]:
            raise Failed("the video worker was restarted too")
        say(f"{self.kill_s:.2f} s from the kill to the picture, 0 bytes read, {self.same(again, 'after the kill')}; video kept its process")

    def edit(self):
        title("3. A custom node is edited, and the image worker restarted")
        word = {"resvisor-word": {"class_type": "TinyWord", "inputs": {}}}
        self.header()
        before = self.image("image and the node's word", extra=word)
        self.node_file.write_text(self.node_file.read_text().replace('WORD = "first"', 'WORD = "second"'))
        starts, start = self.worker("image")["starts"], time.monotonic()
        self.command("restart", "image")
        worker = self.wait_started("image", starts + 1)
        self.edit_s = time.monotonic() - start
        after = self.image("the same after the restart", extra=word)
        words = [[data.decode() for data in run.named(".txt")] for run in (before, after)]
        if "first" not in words[0] or "second" not in words[1]:
            raise Failed(f"the edit does not show: {words}")
        if after.read_bytes != 0:
            raise Failed(f"after the restart {after.read_bytes} bytes were read from model files; 0 were expected")
        say(f"ready {self.edit_s:.2f} s after `resvisor restart image`{how(worker)}, 0 bytes read; the node said 'first' before, 'second' now")

    def address(self):
        title("4. One address, ComfyUI's own interface")
        say(f"http://127.0.0.1:{self.port} stands for both processes; the graph says which one a prompt is for")
        for name in TYPES:
            started = self.ask("/prompt", {"prompt": workflows.seeded(self.graphs[name], 11)})
            entry = wait_for(lambda: self.ask(f"/history/{started['prompt_id']}").get(started["prompt_id"]), JOB_S, "the prompt's history")
            cost = entry["status"].get("resvisor", {})
            if entry["status"]["status_str"] != "success":
                raise Failed(f"a prompt posted to the front door failed: {entry['status']}")
            if cost.get("type") != name or cost.get("read_bytes") != 0:
                raise Failed(f"the {name} prompt posted to the front door went to {cost}")
            say(f"POST /prompt, {name}: ran on {cost['worker']} in {cost['run_ms'] / 1000:.2f} s, {cost['read_bytes']} bytes read")

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"} if data else {})
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise Failed(f"{path}: HTTP {error.code}: {error.read(1000).decode(errors='replace')}") from None

    def costs(self):
        title("5. Memory and files")
        status = self.asked("status")
        pids = [self.process.pid, status["supervisor"]["pid"], status["router"]["pid"]]
        pids += [worker["pid"] for found in status["types"] for worker in found["workers"]]
        for template in status.get("templates", []):
            pids.append(template["pid"])
            say(f"template: {mib(pss(template['pid']))} (PSS), imported once, workers are forked from it")
        for found in status["types"]:
            worker = found["workers"][0]
            say(f"{worker['id']}: {mib(pss(worker['pid']))} (PSS)")
        models = self.asked("models")["models"]
        say(f"models, once each: {mib(sum(model['bytes'] for model in models))}; all processes: {mib(sum(map(pss, pids)))} (PSS)")
        self.out.mkdir(parents=True, exist_ok=True)
        for folder in sorted((self.work / "results").iterdir())[:3:2]:
            for path in sorted(folder.iterdir()):
                if path.suffix not in (".latent", ".json"):
                    target = self.out / f"comfyui-{folder.name.split('-')[1]}{path.suffix}"
                    shutil.copyfile(path, target)
                    say(f"{target} ({target.stat().st_size} bytes)")

    def stop(self):
        title("Stop")
        self.command("stop")
        code = self.process.wait(STOP_S)
        self.process = None
        if code != 0:
            raise Failed(f"resvisor ended with {code}")
        say("all its processes have ended; what is left of it are the produced files")

    def close(self, failure):
        if self.process and self.process.poll() is None:
            self.process.terminate()  # the keeper passes it on, and ends everything that does not end by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        if failure and self.log.exists():
            print("--- the end of resvisor's log", *self.log.read_text(errors="replace").splitlines()[-40:], sep="\n", file=sys.stderr)
        shutil.rmtree(self.work, ignore_errors=True)
        if failure:
            print(*([failure.help] if failure.help else []), f"\nquickstart: FAILED: {failure}", sep="\n", file=sys.stderr)


def how(worker):
    """What its launcher says of how the process was made, if it does."""
    found = [part for part in worker.get("detail", "").split("; ") if part.startswith(("forked ", "started "))]
    return f", {found[0]}" if found else ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pss(pid):
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("resvisor", "comfyui", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--python")
    parser.add_argument("--tiny", metavar="GIB")
    parser.add_argument("--gpu-only", action="store_true", help="models lie and stay on the GPU, in the pool")
    parser.add_argument("--begin", type=float, default=time.time())
    parser.add_argument("workflows", nargs="*")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    story, failure = Story(options), Failed("it was interrupted")
    try:
        for part in (story.prepare, story.start, story.switch, story.kill, story.edit, story.address, story.costs, story.stop):
            part()
        failure = None
    except Failed as error:
        failure = error
    except Exception as error:  # a fault here, or something that the machine lacks: the same clear end
        failure = Failed(f"{type(error).__name__}: {error}")
    finally:
        story.close(failure)
    if failure:
        return 1
    print(f"\nquickstart: ok in {time.time() - options.begin:.0f} s; image after video {story.after.wall_s:.2f} s with 0 bytes read, "
          f"picture {story.kill_s:.2f} s after kill -9, edited node ready after {story.edit_s:.2f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
