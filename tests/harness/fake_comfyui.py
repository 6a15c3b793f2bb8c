"""A fake ComfyUI as a worker of kind `comfyui`: small, without torch, and with faults on demand that a real one will not show.

    fake = FakeComfyUI(tmp_path / "fake")                  # an installation directory; its source is tests/programs/fake_comfyui
    service.config["types"]["image"] = fake.type(workers=2)
    …
    fake.fault("GET /object_info", "hang")                 # from now on, in all its workers
    fake.fault("GET /view*", "half_body", times=1)
    fake.clear()

It runs below the real launcher, so jobs, events and the handshake are those of a real worker. Two types that shall differ need
two FakeComfyUI. Workers are told apart by their pid (service.worker("image").pid).

Faults of HTTP (match is METHOD and path, with * and ?, and counts for /api too; pid= only in that worker, times= only so often,
after="body": the request's body is read first; reset=True: RST instead of FIN at the end):
    hang            no answer until the client goes or the fault is cleared
    stall_unread    the same, and the request's body is not read: back-pressure
    slow_head       the head byte by byte (step_ms=5 between two), then `{}`
    half_head       half of the head, then the end
    close           the end, without a byte
    status          an answer of status=500, body="…", content_type="text/plain"
    long_length     Content-Length 1000, 500 bytes, the end
    half_body       the same, and it stands still instead
    short_length    Content-Length 2, and what looks like a second answer behind it
    bad_length      Content-Length: value="-5"
    two_lengths     two Content-Length that differ
    cut_chunk       a chunked body that ends within a chunk
    bad_chunk       a chunk whose size is no number
    garbage         no HTTP at all
    huge_head       a head of kib=2048 KiB
    endless         a body without an end
    no_json         half a JSON document, well framed
    early           a chunked answer of status=200 that is complete before a byte of the request's body is read, which is then noted
    switch          101, and bytes without an end
    folded          a good answer, but a field of its head goes on in the next line
`GET /ws` is a request too. Frames of WebSockets: fake.push(pid, client, kind, …), then="end" or "reset" to end the connection:
    text (text=), binary (bytes=, count=; a preview of type 1), fragments (text=), pings (count=), close (code=1001), end, reset,
    and broken ones: half_frame (bytes=), half_head, masked, reserved, unknown_opcode, bad_utf8, huge_length, lone_continuation,
    long_ping

Graphs: fake nodes in a row before a sink; see graph(). Classes: FakeGate(path), FakeSteps(steps, preview, bytes, path),
FakeText(text), FakeRaise(text), FakeExit(code), FakeKill(signal, mark), FakeHangLoop(path), FakeLog(lines), EmptyImage; sinks
SaveImage, PreviewImage (a temp file), SaveAnimatedWEBP (a video), SaveAudio, with filename_prefix and bytes (size of the file).
A path is that of the fixture `make_gate`'s Gate: the prompt stands there until the test opens it. A preview's bytes begin with
its prompt's id.
"""

import json
import os
import shutil
import socket
import sys

from . import procfs
from .service import ROOT

SOURCE = ROOT / "tests" / "programs" / "fake_comfyui"
START_S = 60
TIMEOUT_S = 20


def graph(*nodes, sink="SaveImage", **sink_inputs):
    """A prompt: nodes are (class, inputs) or a class; each waits for the one before, and the sink (number "9") for the last."""
    found, last = {}, None
    for number, node in enumerate(nodes or ["EmptyImage"], 1):
        kind, inputs = (node, {}) if isinstance(node, str) else node
        defaults = {"width": 8, "height": 8, "color": 0} if kind == "EmptyImage" else {}
        inputs = {**defaults, **{name: str(v) if hasattr(v, "__fspath__") else v for name, v in inputs.items()}}
        found[str(number)] = {"class_type": kind, "inputs": {**inputs, **({"images": [last, 0]} if last else {})}}
        last = str(number)
    found["9"] = {"class_type": sink, "inputs": {"images": [last, 0], "filename_prefix": "fake", **sink_inputs}}
    return found


class FakeComfyUI:
    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        self.control = folder / "control"
        self.control.mkdir()
        self._faults = []
        self._number = 0

    def type(self, args=(), **keys):
        """The configuration of a type. Its state folder lies in the fake's."""
        return {
            "kind": "comfyui", "directory": str(self.folder), "python": sys.executable, "args": list(args), "pooling": "off",
            "fast_start": "off", "state_folder": str(self.folder / "state"), "start_timeout": f"{START_S}s", "stop_timeout": "10s", **keys,
        }  # fmt: skip

    # ---- faults ----

    def fault(self, match, kind, **parameters):
        """Adds a fault; the newest that fits strikes. Its id, for clear()."""
        self._number += 1
        self._faults.insert(0, {"id": self._number, "match": match, "kind": kind, **parameters})
        self._write()
        return self._number

    def clear(self, number=None):
        """Takes one fault away, or all."""
        self._faults = [rule for rule in self._faults if number is not None and rule["id"] != number]
        self._write()

    def _write(self):
        new = self.control / "faults.new"
        new.write_text(json.dumps(self._faults))
        os.replace(new, self.control / "faults.json")

    # ---- what it saw ----

    def requests(self, path=None, method=None, pid=None):
        """What came, oldest first: {pid, method, target, headers}; also {pid, fault, target} when a fault has ended, {pid, ws, text}
        for a client's message, {pid, ws, gone} and {pid, upload, sha256}. path: only requests of that path, /api or not."""
        file = self.control / "requests.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if path is not None:
            found = [e for e in found if "method" in e and e["target"].partition("?")[0].removeprefix("/api") == path]
        return [e for e in found if (method is None or e.get("method") == method) and (pid is None or e["pid"] == pid)]

    def wait_request(self, path, count=1, timeout=TIMEOUT_S):
        """Waits until that path was asked for so often."""
        procfs.wait_until(lambda: len(self.requests(path)) >= count, timeout, f"{count} requests of {path} at the fake")

    def wait_fault_ended(self, kind, count=1, timeout=TIMEOUT_S):
        """Waits until a fault is over, as `hang` is when the other side has gone."""
        procfs.wait_until(lambda: sum(e.get("fault") == kind for e in self.requests()) >= count, timeout, f"the end of {kind}")

    # ---- asked of one worker ----

    def ask(self, pid, do, **parameters):
        folder = os.open(self.control, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(TIMEOUT_S)
                sock.connect(f"/proc/self/fd/{folder}/{pid}.sock")
                sock.sendall(json.dumps({"do": do, **parameters}).encode() + b"\n")
                answer = json.loads(sock.makefile().readline())
        finally:
            os.close(folder)
        assert "error" not in answer, answer
        return answer

    def state(self, pid):
        """{sockets: client ids, feature_flags: {client: {}}, connections: open ones, WebSockets included}"""
        return self.ask(pid, "state")

    def push(self, pid, client, kind, **parameters):
        """Sends a frame to a client's socket, or breaks one. It does not wait for its arrival; pushes keep their order."""
        self.ask(pid, "push", client=client, kind=kind, **parameters)

    def event(self, pid, event, data, client=None):
        """An event as a pack may send it; to all sockets without a client."""
        self.ask(pid, "event", event=event, data=data, client=client)

    def wait_socket(self, pid, client, timeout=TIMEOUT_S):
        """Waits until a client's socket is open at that worker."""
        procfs.wait_until(lambda: client in self.state(pid)["sockets"], timeout, f"the socket of {client}")

    def wait_no_socket(self, pid, client, timeout=TIMEOUT_S):
        procfs.wait_until(lambda: client not in self.state(pid)["sockets"], timeout, f"no socket of {client}")
