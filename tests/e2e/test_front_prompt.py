"""Prompts at ComfyUI's own address: each is a job of resvisor; queue, history and jobs are those of all workers together."""

import json
import os
import signal
import uuid

import pytest
from harness import procfs
from harness.fake_comfyui import FakeComfyUI, graph
from harness.http import Client, exchange, listen, raw, read_all
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import SANITIZED, Service

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")

WAIT_S = 30


class Front(Client):
    """A client of the front door."""

    def prompt(self, nodes=None, **fields):
        """The Answer to POST /prompt."""
        return self.post("/prompt", {"prompt": graph() if nodes is None else nodes, **fields})

    def id(self, nodes=None, **fields):
        """The id of a prompt that was taken."""
        answer = self.prompt(nodes, **fields)
        assert answer.status == 200, answer
        return answer.json["prompt_id"]

    def entry(self, prompt_id):
        """The entry of the history, once it is there."""
        return procfs.wait_until(lambda: self.get(f"/history/{prompt_id}").json.get(prompt_id), WAIT_S, f"history of {prompt_id}")

    def run(self, nodes=None, **fields):
        return self.entry(self.id(nodes, **fields))

    def queue(self):
        found = self.get("/queue").json
        return [item[1] for item in found["queue_running"]], [item[1] for item in found["queue_pending"]]


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return FakeComfyUI(tmp_path_factory.mktemp("fake") / "comfyui")


@pytest.fixture(scope="module")
def service(tmp_path_factory, fake):
    """Two types of one worker each; the queue of `video` holds two."""
    service = listen(Service(tmp_path_factory.mktemp("service")))
    service.config["types"] = {"image": fake.type(), "video": fake.type(queue=2)}
    service.start()
    service.wait_ready(60)
    yield service
    service.end()


@pytest.fixture
def front(service, fake):
    with Front(service) as client:
        yield client
        fake.clear()
        client.post("/queue", {"clear": True})
        client.post("/interrupt", {})
        procfs.wait_until(lambda: client.queue() == ([], []), WAIT_S, "an empty queue")
        service.wait_ready(60)


def error_of(answer, status=400):
    assert answer.status == status, answer
    found = answer.json
    assert set(found) == {"error", "node_errors"}, found
    assert set(found["error"]) == {"type", "message", "details", "extra_info"}, found
    return found["error"]


def gated(gate):
    return graph(("FakeGate", {"path": gate.path}))


def test_a_prompt_runs_and_has_a_history(front, service):
    prompt_id = str(uuid.uuid4())
    answer = front.prompt(prompt_id=prompt_id, client_id="me", extra_data={"extra_pnginfo": {"workflow": {"id": "w"}}})
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("application/json")
    assert set(answer.json) == {"prompt_id", "number", "node_errors"}
    assert answer.json["prompt_id"] == prompt_id and answer.json["node_errors"] == {}
    entry = front.entry(prompt_id)
    number, id, prompt, extra, outputs = entry["prompt"]
    assert (number, id, prompt, outputs) == (answer.json["number"], prompt_id, graph(), ["9"])
    assert extra["client_id"] == "me" and extra["extra_pnginfo"] == {"workflow": {"id": "w"}} and extra["create_time"] > 1e12
    assert entry["outputs"]["9"]["images"][0]["type"] == "output"
    status = entry["status"]
    assert status["status_str"] == "success" and status["completed"] is True and status["messages"]
    ours = status["resvisor"]
    assert ours["type"] == "image" and ours["worker"] == "image/0" and ours["cold"] is False and ours["read_bytes"] == 0
    assert ours["run_ms"] > 0 and ours["wait_ms"] >= 0 and ours["load_ms"] == 0
    with Jobs(service) as jobs:
        job = jobs.get(prompt_id)
        assert job.state == rpc_pb2.JOB_DONE and [output.name for output in job.outputs] == ["history.json"]
        assert job.run_us >= ours["run_ms"] * 1000 - 1 and job.wait_us <= ours["wait_ms"] * 1000 + 1


def test_every_path_has_its_twin_below_api(front):
    prompt_id = front.id()
    front.entry(prompt_id)
    for path in ("/prompt", "/queue", f"/history/{prompt_id}", "/history"):
        plain, api = front.get(path), front.get(f"/api{path}")
        assert (plain.status, plain.json) == (api.status, api.json)
    assert front.post("/api/prompt", {"prompt": graph()}).status == 200


def test_the_type_is_that_of_the_graph(front, service):
    found = {
        "image": front.id(),
        "video": front.id(graph(sink="SaveAnimatedWEBP")),
    }
    asked = front.post("/prompt", {"prompt": graph()}, headers={"X-Resvisor-Type": "video", "Content-Type": "application/json"})
    found_types = {front.entry(id)["status"]["resvisor"]["type"]: id for id in found.values()}
    assert found_types == found
    assert front.entry(asked.json["prompt_id"])["status"]["resvisor"]["type"] == "video"
    by_query = front.post("/prompt?type=video", {"prompt": graph()}).json["prompt_id"]
    by_data = front.id(extra_data={"resvisor": {"type": "video"}})
    for prompt_id in (by_query, by_data):
        assert front.entry(prompt_id)["status"]["resvisor"]["type"] == "video"
    for answer in (
        front.post("/prompt?type=nothing", {"prompt": graph()}),
        front.prompt(extra_data={"resvisor": {"type": "nothing"}}),
    ):
        assert error_of(answer)["type"] == "no_such_type"


def test_the_worker_gets_the_body_as_it_was(front, fake):
    """Fields that nobody knows pass through, and so do the targets and the header."""
    nodes = {**graph(), "10": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}, "_meta": {"title": "x"}}}
    entry = front.run(nodes, partial_execution_targets=["10"], unknown={"a": [1, 2]}, client_id="c")
    assert entry["prompt"][2] == nodes and entry["prompt"][4] == ["10"] and set(entry["outputs"]) == {"10"}
    answer = front.post(
        "/prompt", {"prompt": graph()}, headers={"Comfy-Usage-Source": "test", "Content-Type": "application/json"}
    )
    front.entry(answer.json["prompt_id"])
    assert ["Comfy-Usage-Source", "test"] in [list(pair) for pair in fake.requests("/prompt", "POST")[-1]["headers"]]


def test_comfyui_refuses_at_once(front, fake):
    asked = len(fake.requests("/prompt", "POST"))
    assert "does not exist" in error_of(front.prompt(graph("FakeNothing")))["message"]
    answer = front.prompt(graph(("EmptyImage", {"width": "wide"})))
    assert error_of(answer)["type"] == "prompt_outputs_failed_validation"
    assert answer.json["node_errors"]["1"]["class_type"] == "EmptyImage"
    assert error_of(front.prompt({}))["type"] == "prompt_no_outputs"
    assert error_of(front.prompt({"1": {"inputs": {}}}))["message"].endswith("missing the class_type property.")
    assert len(fake.requests("/prompt", "POST")) == asked, "nothing was queued"
    partly = {**graph(), "7": {"class_type": "EmptyImage", "inputs": {"width": "wide", "height": 8, "color": 0}}}
    partly["8"] = {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "p"}}
    answer = front.prompt(partly)
    assert answer.status == 200 and answer.json["node_errors"]["7"]["dependent_outputs"] == ["8"]
    assert front.entry(answer.json["prompt_id"])["prompt"][4] == ["9"]


def counts(front):
    lines = front.get("/metrics").body.decode().splitlines()
    return {key: float(value) for key, _, value in (line.partition(" ") for line in lines) if key.startswith("resvisor_prompts_")}


@pytest.mark.parametrize("kind", ["status", "close", "no_json", "garbage"])
def test_a_judge_that_fails_refuses_nothing(front, fake, kind):
    before = counts(front)
    front.id()
    error_of(front.prompt({}))
    fake.fault("POST /resvisor/validate", kind)
    assert front.run()["status"]["status_str"] == "success"
    prompt_id = front.id(graph("FakeNothing"))  # judged at its run
    messages = front.entry(prompt_id)["status"]["messages"]
    assert messages[-1][0] == "execution_error" and "FakeNothing does not exist" in messages[-1][1]["exception_message"]
    assert messages[-1][1]["exception_type"] == "resvisor.PromptRefused"
    added = {key.removeprefix("resvisor_prompts_"): value - before[key] for key, value in counts(front).items()}
    assert added == {"total": 3, "refused_total": 1, "unvalidated_total": 2}


@pytest.mark.parametrize(
    "body, kind",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "invalid_json"),
        (b"[]", "no_prompt"),
        (b"3", "no_prompt"),
        (b"{}", "no_prompt"),
        (b'{"1": {"class_type": "SaveImage", "inputs": {}}}', "no_prompt"),
        (b'{"prompt": []}', "invalid_request"),
        (b'{"prompt": null}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": 1}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": {"resvisor": []}}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": {"resvisor": {"priority": 1.5}}}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": {"resvisor": {"priority": 1001}}}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": {"resvisor": {"retry": 1}}}', "invalid_request"),
        (b'{"prompt": {}, "extra_data": {"resvisor": {"type": 1}}}', "invalid_request"),
        (b'{"prompt": {}, "client_id": 5}', "invalid_request"),
        (b'{"prompt": {}, "number": "x"}', "invalid_request"),
        (b'{"prompt": {}, "number": 1e999}', "invalid_request"),
        (b'{"prompt": {}, "partial_execution_targets": {"1": 1}}', "invalid_request"),
        (b'{"prompt": {}, "partial_execution_targets": [1]}', "invalid_request"),
        (b'{"prompt": {}, "prompt_id": 5}', "invalid_prompt_id"),
        (b'{"prompt": {}, "prompt_id": "A0000000-0000-4000-8000-000000000000"}', "invalid_prompt_id"),
    ],
)
def test_a_body_that_is_no_prompt(front, body, kind):
    answer = front.post("/prompt", body, headers={"Content-Type": "application/json"})
    assert error_of(answer)["type"] == kind


def test_odd_graphs(front):
    """ComfyUI has its own words for some, 500 for others; here it is always an answer in its shape."""
    node = {"class_type": "SaveImage", "inputs": {}}
    cycle = {"1": {"class_type": "FakeSteps", "inputs": {"images": ["2", 0]}}}
    cycle["2"] = {"class_type": "FakeSteps", "inputs": {"images": ["1", 0]}}
    for nodes in ({"1": 5}, {"1": None}, {"1": {**node, "class_type": 7}}, {"1": {**node, "class_type": "x" * 600}}, {"1": []}):
        error_of(front.prompt(nodes))
    for nodes in (cycle, {"1": {**node, "inputs": {"images": ["99", 0]}}}, {"1": {**node, "inputs": []}}):
        answer = front.prompt(nodes)
        assert answer.status in (200, 400), answer
    assert front.run()["status"]["status_str"] == "success"


def test_a_prompt_of_many_megabytes(front, service):
    text = "x" * (15 << 20)
    entry = front.run(extra_data={"extra_pnginfo": {"picture": text}})
    assert entry["prompt"][3]["extra_pnginfo"]["picture"] == text
    head = b"POST /prompt HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert exchange(service, head % ((16 << 20) + 1))[0] == 413


def test_the_same_prompt_again(front, gate):
    prompt_id = str(uuid.uuid4())
    first = front.prompt(gated(gate), prompt_id=prompt_id)
    gate.wait_reached()
    assert front.prompt(gated(gate), prompt_id=prompt_id).json == first.json
    assert error_of(front.prompt(graph("FakeText"), prompt_id=prompt_id))["type"] == "job_exists"
    assert front.queue() == ([prompt_id], [])
    gate.open()
    front.entry(prompt_id)
    assert front.prompt(gated(gate), prompt_id=prompt_id).json == first.json
    assert front.queue() == ([], []), "it did not run again"


def test_queue_order_secrets_and_deletion(front, gate):
    running = front.id(gated(gate))
    gate.wait_reached()
    secret = {"auth_token_comfy_org": "s3cret", "api_key_comfy_org": "s3cret", "kept": 1}
    body = json.dumps({"prompt": graph(), "extra_data": secret}).replace("auth_token", "auth\\u005ftoken")
    first = front.post("/prompt", body, headers={"Content-Type": "application/json"}).json
    second = front.prompt().json
    before = front.prompt(front=True).json
    important = front.prompt(extra_data={"resvisor": {"priority": 5}}).json
    asked = front.prompt(number=first["number"] + 0.5).json
    assert before["number"] < 0 < first["number"] < second["number"] and asked["number"] == first["number"] + 0.5
    order = [important, before, first, asked, second]
    found = front.get("/queue").json
    assert [item[1] for item in found["queue_running"]] == [running]
    assert [item[1] for item in found["queue_pending"]] == [answer["prompt_id"] for answer in order]
    assert [item[0] for item in found["queue_pending"]] == [answer["number"] for answer in order]
    item = found["queue_pending"][2]
    assert item[2] == graph() and item[4] == ["9"]
    assert item[3] == {"kept": 1, "create_time": item[3]["create_time"]}
    assert b"s3cret" not in front.get("/queue").body
    assert front.get("/prompt").json == {"exec_info": {"queue_remaining": 6}}
    assert front.post("/queue", {"delete": [before["prompt_id"], running, "nothing", 5, None]}).status == 200
    assert front.queue() == ([running], [answer["prompt_id"] for answer in (important, first, asked, second)])
    assert front.post("/queue", {"clear": True}).body == b""
    assert front.queue() == ([running], [])
    assert front.get(f"/history/{first['prompt_id']}").json == {}, "what never ran is not in the history"
    gate.open()
    front.entry(running)


def test_secrets_are_not_in_the_history(front):
    prompt_id = front.id(extra_data={"auth_token_comfy_org": "s3cret", "kept": True})
    assert front.entry(prompt_id)["prompt"][3]["kept"] is True
    for path in (f"/history/{prompt_id}", "/history", f"/api/jobs/{prompt_id}", "/api/jobs"):
        assert b"s3cret" not in front.get(path).body


def test_a_full_queue_asks_to_come_again(front, make_gate):
    gate = make_gate()
    running = front.id(gated(gate), extra_data={"resvisor": {"type": "video"}})
    gate.wait_reached()
    for _ in range(2):
        front.id(extra_data={"resvisor": {"type": "video"}})
    answer = front.prompt(extra_data={"resvisor": {"type": "video"}})
    assert error_of(answer, 503)["type"] == "queue_full" and int(answer.headers["Retry-After"]) >= 1
    front.run()  # another type has room
    gate.open()
    front.entry(running)


def test_interrupt(front, make_gate):
    gates = [make_gate(), make_gate()]
    image = front.id(gated(gates[0]))
    video = front.id(gated(gates[1]), extra_data={"resvisor": {"type": "video"}})
    for gate in gates:
        gate.wait_reached()
    assert front.post("/interrupt", {"prompt_id": str(uuid.uuid4())}).status == 200
    assert sorted(front.queue()[0]) == sorted([image, video])
    front.post("/interrupt", {"prompt_id": image})
    status = front.entry(image)["status"]
    assert status["status_str"] == "error" and status["messages"][-1][0] == "execution_interrupted"
    assert front.queue()[0] == [video]
    assert front.post("/interrupt", b"no JSON").body == b""
    assert front.entry(video)["status"]["messages"][-1][0] == "execution_interrupted"


def test_an_error_of_a_node_is_in_the_history(front):
    status = front.run(graph(("FakeRaise", {"text": "a reason"})))["status"]
    assert status["status_str"] == "error" and status["resvisor"]["worker"] == "image/0"
    name, data = status["messages"][-1]
    assert name == "execution_error" and data["exception_message"].strip() == "a reason" and data["node_type"] == "FakeRaise"


def test_a_worker_that_dies_in_a_prompt(front, service):
    body = graph(("FakeKill", {"signal": int(signal.SIGKILL)}))
    prompt_id = front.id(body, client_id="me")
    entry = front.entry(prompt_id)
    name, data = entry["status"]["messages"][-1]
    assert name == "execution_error" and data["exception_type"] == "resvisor.WorkerDied" and "SIGKILL" in data["exception_message"]
    assert entry["prompt"][1:3] == [prompt_id, body] and entry["prompt"][3]["client_id"] == "me"
    with Jobs(service) as jobs:
        assert jobs.get(prompt_id).error.code == rpc_pb2.ERROR_WORKER_DIED


def test_again_after_a_death_only_if_asked(front, tmp_path):
    body = graph(("FakeKill", {"signal": int(signal.SIGKILL), "mark": str(tmp_path / "mark")}))
    entry = front.run(body, extra_data={"resvisor": {"retry": True}})
    assert entry["status"]["status_str"] == "success"


def test_no_worker_is_ready(front, service, fake):
    """A prompt waits for its worker; it is judged when it runs."""
    worker = service.worker("video")
    fake.fault("GET /prompt", "hang", after="body")  # the handshake of the next one
    os.kill(worker.pid, signal.SIGKILL)
    procfs.wait_until(lambda: service.worker("video").state != "READY", WAIT_S, "a dead worker")
    prompt_id = front.id(extra_data={"resvisor": {"type": "video"}})
    assert prompt_id in front.queue()[1]
    fake.clear()
    assert front.entry(prompt_id)["status"]["resvisor"]["type"] == "video"


def test_pages_of_the_history(front):
    assert front.post("/history", {"clear": True}).status == 200
    assert front.get("/history").json == {}
    ids = []
    for number in range(5):
        ids.append(front.id(extra_data={"resvisor": {"type": ("image", "video")[number % 2]}}))
        front.entry(ids[-1])
    assert list(front.get("/history").json) == ids
    assert list(front.get("/history?max_items=2").json) == ids[3:]
    assert list(front.get("/history?max_items=2&offset=1").json) == ids[1:3]
    assert list(front.get("/history?offset=3").json) == ids[3:]
    assert list(front.get("/history?max_items=99").json) == ids
    assert list(front.get("/history?max_items=0").json) == []
    assert front.get("/history?offset=99").json == {}
    assert error_of(front.get("/history?max_items=x"))["type"] == "invalid_request"
    assert front.post("/history", {"delete": [ids[0], "nothing", 7]}).body == b""
    assert list(front.get("/history").json) == ids[1:]
    assert front.get(f"/history/{ids[0]}").json == {}
    for path in ("/history", "/queue", "/api/jobs/cancel"):
        assert error_of(front.post(path, b"[]", headers={"Content-Type": "application/json"}))["type"] == "invalid_json"


def test_a_long_history_comes_in_pieces(front):
    text = "y" * (400 << 10)
    ids = [front.id(extra_data={"picture": text, "n": n}) for n in range(4)]
    for prompt_id in ids:
        front.entry(prompt_id)
    answer = front.get("/history?max_items=4")
    assert "Content-Length" not in answer.headers and list(answer.json) == ids
    assert [entry["prompt"][3]["n"] for entry in answer.json.values()] == [0, 1, 2, 3]
    assert front.request("HEAD", "/history").body == b""


def test_jobs_by_rpc_are_prompts_too(front, service, gate):
    with Jobs(service) as jobs:
        job = jobs.submit("image", job_id="my-job", payload=json.dumps(gated(gate)).encode())
        gate.wait_reached()
        waiting = jobs.submit("image", payload=json.dumps({"prompt": graph(), "client_id": "c"}).encode())
        nonsense = jobs.submit("image", payload=b"\xff no graph")
        found = front.get("/queue").json
        assert found["queue_running"][0][1:3] == ["my-job", gated(gate)]
        assert [(item[1], item[2]) for item in found["queue_pending"]] == [(waiting.job_id, graph()), (nonsense.job_id, {})]
        gate.open()
        job = jobs.wait("my-job")
        assert [output.name for output in job.outputs][1:] == ["history.json"]
        entry = front.entry("my-job")
        assert entry["prompt"][1] == "my-job" and "client_id" not in entry["prompt"][3]
        assert json.loads(jobs.output(job, 1))["outputs"] == entry["outputs"]
        assert "no JSON" in front.entry(nonsense.job_id)["status"]["messages"][-1][1]["exception_message"]
        front.post("/history", {"delete": ["my-job"]})
        assert front.get("/history/my-job").json == {} and jobs.output(job, 1), "its outputs are still the caller's"
        only = jobs.run("image", {"outputs": "history"}, payload=json.dumps(graph()).encode())
        assert [output.name for output in only.outputs] == ["history.json"]
        wrong = jobs.run("image", {"outputs": "none"}, payload=json.dumps(graph()).encode())
        assert "outputs is 'none'" in wrong.error.message


def test_the_list_of_jobs(front, gate):
    front.post("/history", {"clear": True})
    good = front.id(extra_data={"extra_pnginfo": {"workflow": {"id": "w1"}}})
    front.entry(good)
    bad = front.id(graph(("FakeRaise", {"text": "a reason"})))
    front.entry(bad)
    running = front.id(gated(gate))
    gate.wait_reached()
    waiting = front.id(extra_data={"extra_pnginfo": {"workflow": {"id": "w1"}}})

    def jobs(query=""):
        return front.get(f"/api/jobs{query}").json

    found = jobs()
    assert [(job["id"], job["status"]) for job in found["jobs"]] == [
        (waiting, "pending"), (running, "in_progress"), (bad, "failed"), (good, "completed")
    ]  # fmt: skip
    assert found["pagination"] == {"offset": 0, "limit": None, "total": 4, "has_more": False}
    job = found["jobs"][3]
    assert job["outputs_count"] == 1 and job["workflow_id"] == "w1" and job["create_time"] > 1e12
    assert job["execution_end_time"] >= job["execution_start_time"] and "execution_error" not in job
    preview = job["preview_output"]
    assert preview["nodeId"] == "9" and preview["mediaType"] == "images" and preview["type"] == "output"
    assert found["jobs"][2]["execution_error"]["exception_message"].strip() == "a reason"
    assert found["jobs"][0]["outputs_count"] == 0 and found["jobs"][0]["workflow_id"] == "w1"
    assert [job["id"] for job in jobs("?status=completed,FAILED")["jobs"]] == [bad, good]
    assert [job["id"] for job in jobs("?workflow_id=w1")["jobs"]] == [waiting, good]
    assert [job["id"] for job in jobs("?sort_order=asc")["jobs"]] == [good, bad, running, waiting]
    assert jobs("?sort_by=execution_duration")["pagination"]["total"] == 4
    page = jobs("?limit=2&offset=1")
    assert [job["id"] for job in page["jobs"]] == [running, bad]
    assert page["pagination"] == {"offset": 1, "limit": 2, "total": 4, "has_more": True}
    for query in ("?status=odd", "?sort_by=odd", "?sort_order=odd", "?limit=0", "?limit=x", "?offset=-1"):
        answer = front.get(f"/api/jobs{query}")
        assert answer.status == 400 and isinstance(answer.json["error"], str)
    one = front.get(f"/api/jobs/{good}").json
    assert one["outputs"]["9"]["images"] and one["execution_status"]["completed"] and one["workflow"]["prompt"] == graph()
    assert front.get(f"/api/jobs/{running}").json["status"] == "in_progress"
    assert front.get(f"/api/jobs/{uuid.uuid4()}").status == 404
    assert front.post(f"/api/jobs/{uuid.uuid4()}/cancel").status == 404
    assert front.post(f"/api/jobs/{good}/cancel").json == {"cancelled": False}
    assert front.post(f"/api/jobs/{waiting}/cancel").json == {"cancelled": True}
    assert front.queue() == ([running], [])
    assert front.post("/api/jobs/cancel", {"job_ids": [good, running]}).json == {"cancelled": True}
    front.entry(running)
    assert front.get(f"/api/jobs/{running}").json["status"] == "cancelled"


def test_a_new_router_still_has_the_history(front, service, gate):
    done = front.id()
    before = front.entry(done)
    running = front.id(gated(gate), client_id="me")
    gate.wait_reached()
    pid = service.status().router_pid
    os.kill(pid, signal.SIGKILL)
    service.wait_router(other_than=pid)
    with Front(service) as again:
        assert procfs.wait_until(lambda: again.get("/queue").status == 200, WAIT_S, "an answer")
        found = again.entry(done)
        assert found["outputs"] == before["outputs"] and found["prompt"][1:] == before["prompt"][1:]
        assert again.queue()[0] == [running]
        gate.open()
        entry = again.entry(running)
        assert entry["status"]["status_str"] == "success" and entry["prompt"][3]["client_id"] == "me"
    front.connection.close()  # it is made anew


def post_raw(sock, nodes=None, **fields):
    body = json.dumps({"prompt": graph() if nodes is None else nodes, **fields}).encode()
    head = "POST /prompt HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def test_a_client_that_leaves_before_the_judgement(front, service, fake):
    """Its prompt was not taken; nothing is left of it."""
    fake.fault("POST /resvisor/validate", "hang")
    ended = sum(entry.get("fault") == "hang" for entry in fake.requests())
    with raw(service) as sock:
        asked = len(fake.requests("/resvisor/validate"))
        post_raw(sock)
        fake.wait_request("/resvisor/validate", asked + 1)
    fake.wait_fault_ended("hang", ended + 1)
    assert front.queue() == ([], [])
    status, _ = exchange(service, b"GET /queue HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status == 200


def test_a_judge_that_dies(front, service, fake):
    """The prompt is taken as it is, and the next worker runs it."""
    fake.fault("POST /resvisor/validate", "hang", times=1)
    asked = len(fake.requests("/resvisor/validate"))
    prompt_id = str(uuid.uuid4())
    with raw(service) as sock:
        post_raw(sock, prompt_id=prompt_id)
        fake.wait_request("/resvisor/validate", asked + 1)
        os.kill(service.worker("image").pid, signal.SIGKILL)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ") and prompt_id.encode() in answer
    assert front.entry(prompt_id)["status"]["status_str"] == "success"


def test_a_stop_while_a_prompt_is_judged(tmp_path):
    fake = FakeComfyUI(tmp_path / "comfyui")
    service = listen(Service(tmp_path / "service"))
    service.config["types"] = {"image": fake.type()}
    try:
        service.start()
        service.wait_ready(60)
        with Front(service) as front:
            assert procfs.wait_until(lambda: front.get("/queue").status == 200, WAIT_S, "a settled router")
        fake.fault("POST /resvisor/validate", "hang")
        with raw(service) as sock:
            post_raw(sock)
            fake.wait_request("/resvisor/validate")
            assert service.stop() == 0
            assert read_all(sock)[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 503", b"")
        assert "router exited with" not in service.log() and "Sanitizer" not in service.log()
    finally:
        service.end()
