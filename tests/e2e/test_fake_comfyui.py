"""The fake ComfyUI keeps what it promises: below the real launcher, a prompt runs, and a fault strikes as often as it was asked for."""

import http.client
import json

import pytest
from harness.fake_comfyui import FakeComfyUI, graph
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import SANITIZED
from harness.websocket import Closed, WebSocket

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")


@pytest.fixture
def fake(tmp_path):
    return FakeComfyUI(tmp_path / "fake")


@pytest.fixture
def running(make_service, fake):
    """(service, its worker, the worker's port)"""
    service = make_service()
    service.config["types"] = {"image": fake.type()}
    service.start()
    service.wait_ready()
    worker = service.worker("image")
    return service, worker, int(worker.detail.split("127.0.0.1:")[1].split(";")[0])


def test_a_prompt_and_a_fault(fake, running, gate):
    service, worker, port = running
    with Jobs(service) as jobs:
        job = jobs.submit("image", payload=json.dumps(graph(("FakeGate", {"path": gate.path}), ("FakeSteps", {"preview": 4}))).encode())
        gate.open()
        job = jobs.wait(job.job_id)
        assert job.state == rpc_pb2.JOB_DONE, job
        assert jobs.output(job).startswith(b"\x89PNG")
        job = jobs.run("image", payload=json.dumps(graph(("FakeRaise", {"text": "a reason"}))).encode())
        assert job.error.message == "node 1 (FakeRaise): ValueError: a reason"
        job = jobs.run("image", payload=json.dumps(graph("FakeNothing")).encode())
        assert "node FakeNothing does not exist" in job.error.message
    assert [entry["pid"] for entry in fake.requests("/prompt", "POST")] == [worker.pid] * 3

    def get(path):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()

    fake.fault("GET /object_info*", "status", status=502, times=1)
    assert [get("/api/object_info")[0], get("/object_info")[0]] == [502, 200]
    fake.fault("GET /object_info", "long_length")
    with pytest.raises(http.client.IncompleteRead):
        get("/object_info")
    fake.clear()
    assert "SaveImage" in json.loads(get("/object_info/SaveImage")[1])
    assert fake.state(worker.pid)["sockets"] == []


def test_events_and_broken_frames(fake, running):
    _, worker, port = running
    with WebSocket(port, "/ws?clientId=me") as socket:
        assert socket.wait_event("status")["sid"] == "me"
        socket.send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        socket.wait_event("feature_flags")
        assert fake.state(worker.pid)["feature_flags"] == {"me": {"supports_preview_metadata": True}}
        body = {"prompt": graph(("FakeSteps", {"steps": 2, "preview": 1}), "FakeText"), "client_id": "me", "prompt_id": "p"}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/prompt", json.dumps(body))
        assert json.loads(connection.getresponse().read())["prompt_id"] == "p"
        kinds = [event["type"] for event in socket.wait_prompt("p")]
        assert [kind for kind in kinds if kind not in ("status", "executing")] == [
            "execution_start", "execution_cached", "progress", 1, "progress", 1, 3, "executed", "execution_success"
        ]  # fmt: skip
        socket.send(b"x" * 100_000)
        fake.push(worker.pid, "me", "binary", bytes=10_000_000)
        fake.push(worker.pid, "me", "half_frame", then="reset")
        with pytest.raises(Closed):
            while True:
                socket.receive()
    fake.wait_no_socket(worker.pid, "me")
