"""ComfyUI's address in front of two types of fake workers, and the proof that a fault has left nothing behind."""

import contextlib
import json
import os
import uuid

from . import http, models, procfs
from .fake_comfyui import FakeComfyUI, graph
from .service import Service
from .websocket import WebSocket

TYPES = ("image", "video")
SINKS = {"image": "SaveImage", "video": "SaveAnimatedWEBP"}
KEPT_MAX = 8  # connections to one worker that are kept for the next request
FINAL = ("success", "error")
TIMEOUT_S = 30


class Front:
    """A running service with HTTP; types image (the primary) and video, one worker each, each with a FakeComfyUI of its own."""

    def __init__(self, folder, **keys):
        self.service = http.listen(Service(folder / "service"))
        self.fakes = {name: FakeComfyUI(folder / name) for name in TYPES}
        shared = ["--input-directory", str(folder / "input"), "--output-directory", str(folder / "output")]
        self.service.config["types"] = {
            name: fake.type(args=shared, max_deaths=1000, **keys) for name, fake in self.fakes.items()
        }
        models.write_plain(self.service.models / "bystander.safetensors", mib=1)
        self.service.start()
        self.service.wait_ready()
        for name in TYPES:
            self._wait_known(name)

    def end(self):
        self.service.end()

    @property
    def port(self):
        return self.service.http_port

    def pid(self, name="image"):
        return self.service.worker(name).pid

    def kill(self, name="image", signal=9):
        """Ends a worker, and sees to its next start; the number of starts that it then has at least."""
        worker = self.service.worker(name)
        os.kill(worker.pid, signal)
        procfs.wait_until(lambda: self.service.worker(name).pid != worker.pid, TIMEOUT_S, "the end of the worker")
        self._hurry(name)
        return worker.starts + 1

    def _hurry(self, name):
        """One that died before is started after a delay, but at once by command; then its deaths are forgotten too."""
        if self.service.worker(name).state == "BACKOFF":
            self.service.cli("restart", name)

    def wait_restart(self, starts, name="image"):
        def reached():
            self._hurry(name)
            worker = self.service.worker(name)
            return worker.state == "READY" and worker.starts >= starts

        procfs.wait_until(reached, 60, f"start {starts} of {name}")
        self._wait_known(name)

    def _wait_known(self, name):
        """The router hears a moment after the supervisor that a worker is ready: then it opens clients' sockets to it."""
        with self.socket(uuid.uuid4().hex, wait=[name]):
            pass

    def clear(self):
        for fake in self.fakes.values():
            fake.clear()

    # ---- a client ----

    def request(self, method, path, body=None, **kwargs):
        with http.Client(self.service) as client:
            return client.request(method, path, body, **kwargs)

    def get(self, path, **kwargs):
        return self.request("GET", path, **kwargs)

    def body(self, *nodes, name="image", client=None, **fields):
        """A body of POST /prompt whose sink decides for that type."""
        found = {"prompt": graph(*nodes, sink=SINKS[name]), "prompt_id": str(uuid.uuid4()), **fields}
        return {**found, "client_id": client} if client else found

    def queue(self, *nodes, **fields):
        """Queues a prompt; its id."""
        answer = self.request("POST", "/prompt", self.body(*nodes, **fields))
        assert answer.status == 200, answer
        return answer.json["prompt_id"]

    def history(self, prompt_id, timeout=TIMEOUT_S):
        """Waits for a prompt's end; its entry of the history."""

        def ended():
            entry = self.get(f"/history/{prompt_id}").json.get(prompt_id)
            return entry if entry and entry["status"]["status_str"] in FINAL else None

        return procfs.wait_until(ended, timeout, f"the end of {prompt_id}")

    def socket(self, client, wait=TYPES, **kwargs):
        """A WebSocket that has its first status; wait: types at whose workers it is waited for."""
        found = WebSocket(self.port, f"/ws?clientId={client}", **kwargs)
        try:
            found.wait_event("status")
            for name in wait:
                self.fakes[name].wait_socket(self.pid(name), client)
        except BaseException:
            found.sock.close()
            raise
        return found

    # ---- proofs ----

    def is_served(self, name="image"):
        """Another client is served by that type's worker, from the prompt to the picture."""
        entry = self.history(self.queue(name=name))
        assert entry["status"]["status_str"] == "success", entry
        file = next(iter(entry["outputs"]["9"].values()))[0]
        answer = self.get(f"/api/view?filename={file['filename']}&subfolder={file['subfolder']}&type={file['type']}")
        assert answer.status == 200 and answer.body.startswith(b"\x89PNG"), answer

    def connections(self):
        """Open connections to the workers, as these see them."""
        return {name: fake.state(self.pid(name))["connections"] for name, fake in self.fakes.items()}

    def sockets(self):
        return {name: fake.state(self.pid(name))["sockets"] for name, fake in self.fakes.items()}

    def _rest(self):
        """Descriptors: of the router, beside its connections to workers, and of the supervisor and the keeper."""
        held = self.service.holdings()
        return held["router"][0] - self._kept(), sum(held["supervisor"]), sum(held["keeper"])

    def _kept(self):
        """The router's connections to workers, as the kernel has them: a fake may hold its end for longer."""
        ports = {int(self.service.worker(name).detail.split("127.0.0.1:")[1].split(";")[0]) for name in TYPES}
        ours = set(procfs.descriptors(self.service.status().router_pid).values())
        with open("/proc/net/tcp") as lines:
            rows = [line.split() for line in list(lines)[1:]]
        return sum(int(row[2].rpartition(":")[2], 16) in ports and f"socket:[{row[9]}]" in ours for row in rows)

    @contextlib.contextmanager
    def watched(self):
        """A block after which the router is the same process and holds what it held, and clients of both types are served."""
        self.service.wait_quiet()
        router = self.service.status().router_pid
        before = self._settled()
        yield
        self.clear()
        for name in TYPES:
            self.service.wait_worker(name, timeout=60)
            self.is_served(name)
        assert self.service.status().router_pid == router, f"the router has ended\n{self.service.log()}"
        self.service.assert_healthy()
        procfs.wait_until(lambda: not any(self.sockets().values()), TIMEOUT_S, "no client's socket at a worker")
        procfs.wait_until(lambda: max(self.connections().values()) <= KEPT_MAX, TIMEOUT_S, "few connections to workers")
        try:
            procfs.wait_until(lambda: all(now <= then for now, then in zip(self._rest(), before, strict=True)), TIMEOUT_S)
        except AssertionError:
            pid = self.service.status().router_pid
            raise AssertionError(f"{self._rest()}, were {before}; {procfs.descriptors(pid)}\n{self.service.log()}") from None

    def _settled(self):
        """The same twice in a row: nothing is under way any more."""
        last = []

        def same():
            last.append(self._rest())
            return len(last) > 1 and last[-1] == last[-2]

        procfs.wait_until(same, TIMEOUT_S, "holdings at rest")
        return last[-1]


def raw_prompt(port, body):
    """The bytes of a POST /prompt."""
    data = json.dumps(body).encode()
    head = f"POST /prompt HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
