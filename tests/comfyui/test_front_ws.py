"""The WebSocket of ComfyUI's address in front of two real ComfyUIs."""

import json
import os
import signal
import struct
import uuid

import pytest
import tiny
from conftest import START_S, comfy_type, wait_for
from harness.http import Client, listen
from harness.service import Service
from harness.websocket import WebSocket

pytestmark = pytest.mark.timeout(240)

WAIT_S = 90
FLAGS = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
PREVIEW, PREVIEW_WITH_METADATA = 1, 4


@pytest.fixture(scope="module")
def service(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("front-ws")
    service = listen(Service(folder, {"model_folders": [str(base / "models")]}))
    keys = comfy_type(base, state_folder=str(folder / "state"), accepts=["any"], workers=2)
    service.config["types"] = {"image": {**keys, "args": [*keys["args"], "--preview-method", "latent2rgb"]}}
    service.start()
    service.wait_ready(timeout=START_S)
    yield service
    service.end()


class Page(WebSocket):
    """What ComfyUI's page does: a socket with an id of its own, and prompts with that id."""

    def __init__(self, service, flags=None, client=None):
        self.client = client or uuid.uuid4().hex
        self.service = service
        self.prompts = []
        super().__init__(service.http_port, f"/ws?clientId={self.client}", timeout=WAIT_S)
        assert self.wait_event("status")["sid"] == self.client
        if flags:
            self.send(flags)
            assert self.wait_event("feature_flags", WAIT_S)["supports_preview_metadata"]

    def submit(self, nodes):
        with Client(self.service) as web:
            answer = web.post("/prompt", {"prompt": nodes, "client_id": self.client})
        assert answer.status == 200, answer
        self.prompts.append(answer.json["prompt_id"])
        return self.prompts[-1]

    def run(self, nodes):
        return self.wait_prompt(self.submit(nodes), WAIT_S)


def previews(events):
    return [(e["type"], e["data"]) for e in events if isinstance(e["type"], int)]


def test_two_pages_with_previews(service):
    """One has said that it takes previews with metadata, one has not: each gets its own, in its own form."""
    with Page(service, FLAGS) as a, Page(service) as b:
        for page in (a, b):  # warm, and all sockets are open
            page.run(tiny.image(prefix="ws-warm"))
        graphs = [tiny.image(seed=11, steps=3, prefix="ws-a"), tiny.image(seed=12, steps=3, prefix="ws-b")]
        prompts = [page.submit(graph) for page, graph in zip((a, b), graphs, strict=True)]
        for page, prompt, kind in zip((a, b), prompts, (PREVIEW_WITH_METADATA, PREVIEW), strict=True):
            events = page.wait_prompt(prompt, WAIT_S)
            assert events[-1]["type"] == "execution_success"
            found = previews(events)
            assert found and {k for k, _ in found} == {kind}
            if kind == PREVIEW_WITH_METADATA:
                for _, data in found:
                    (size,) = struct.unpack(">I", data[:4])
                    assert json.loads(data[4 : 4 + size])["prompt_id"] == prompt
            steps = [e["data"]["value"] for e in events if e["type"] == "progress"]
            assert steps[-1] == 3
            assert {e["data"].get("prompt_id") for e in page.seen if isinstance(e["data"], dict)} <= {*page.prompts, None}
        sids = [e["data"].get("sid") for page in (a, b) for e in page.seen if e["type"] == "status"]
        assert [sid for sid in sids if sid] == [a.client, b.client]


def test_a_page_that_is_loaded_anew(service):
    """ComfyUI forgets the newer of two sockets with one id when the older one ends; here it gets its events each time."""
    old = Page(service, FLAGS)
    for turn in range(4):
        new = Page(service, FLAGS, client=old.client)
        if turn % 2:
            old.close()
        events = new.run(tiny.image(seed=20 + turn, prefix="ws-again"))
        assert {"execution_start", "executing", "executed", "execution_success"} <= {e["type"] for e in events}
        if not turn % 2:
            assert not [e for e in drain(old) if isinstance(e["data"], dict) and e["data"].get("prompt_id") == new.prompts[-1]]
            old.sock.close()
        old = new
    old.close()


def drain(page):
    found = []
    while not page.quiet(0):
        found.append(page.event())
    return found


def test_a_worker_that_dies_in_a_prompt(service, tmp_path):
    mark = tmp_path / "begun"
    with Page(service, FLAGS) as page:
        before = [worker.starts for worker in service.type("image").workers]
        prompt = page.submit(tiny.node("TestWait", mark=str(mark)))
        page.wait_event("executing", WAIT_S, node="1")
        wait_for(mark)
        with Client(service) as web:
            number = int(web.get(f"/resvisor/v1/jobs/{prompt}").json["worker"].removeprefix("image/"))
        os.kill(service.worker("image", number).pid, signal.SIGKILL)
        end = page.wait_prompt(prompt, WAIT_S)[-1]
        error = end["data"]
        assert end["type"] == "execution_error"
        assert (error["node_id"], error["node_type"], error["exception_type"]) == ("1", "TestWait", "resvisor.WorkerDied")
        assert "SIGKILL" in error["exception_message"]
        page.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
        service.wait_ready(timeout=START_S)
        assert sum(worker.starts for worker in service.type("image").workers) == sum(before) + 1
        ends = {page.run(tiny.image(seed=seed, prefix="ws-after"))[-1]["type"] for seed in (31, 32, 33)}
        assert ends == {"execution_success"}
        assert [e["type"] for e in page.seen].count("feature_flags") == 1
        assert [e["type"] for e in page.seen].count("execution_error") == 1


def test_an_interrupt(service, tmp_path):
    mark = tmp_path / "begun"
    with Page(service) as page:
        prompt = page.submit(tiny.node("TestWait", mark=str(mark)))
        wait_for(mark)
        with Client(service) as web:
            assert web.post("/interrupt", {"prompt_id": prompt}).status == 200
        assert page.wait_prompt(prompt, WAIT_S)[-1]["type"] == "execution_interrupted"
        assert page.run(tiny.image(seed=5, prefix="ws-on"))[-1]["type"] == "execution_success"
        assert [e["type"] for e in page.seen].count("execution_interrupted") == 1
