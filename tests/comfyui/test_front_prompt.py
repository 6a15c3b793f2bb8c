"""Prompts through the front door, beside the same prompts at a plain ComfyUI: what clients see is the same."""

import contextlib
import http.client
import subprocess
import sys
import uuid

import pytest
import tiny
from conftest import COMFYUI, START_S, comfy_type, wait_for
from harness import procfs
from harness.http import Client, free_port, listen
from harness.service import Service

pytestmark = pytest.mark.timeout(240)

WAIT_S = 90


class Api(Client):
    """ComfyUI's API, wherever it is."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        self.token = None

    def prompt(self, nodes, **fields):
        return self.post("/prompt", {"prompt": nodes, **fields})

    def entry(self, prompt_id):
        return procfs.wait_until(lambda: self.get(f"/history/{prompt_id}").json.get(prompt_id), WAIT_S, f"history of {prompt_id}")

    def run(self, nodes, **fields):
        answer = self.prompt(nodes, **fields)
        assert answer.status == 200, answer
        return self.entry(answer.json["prompt_id"])


@pytest.fixture(scope="module")
def service(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("front")
    service = listen(Service(folder, {"model_folders": [str(base / "models")]}))
    service.config["types"] = {"image": comfy_type(base, state_folder=str(folder / "state"), accepts=["any"])}
    service.start()
    service.wait_ready(timeout=START_S)
    yield service
    service.end()


@pytest.fixture(scope="module")
def plain(tmp_path_factory, base):
    """The port of a ComfyUI without resvisor."""
    folder = tmp_path_factory.mktemp("plain")
    port = free_port()
    (folder / "user").mkdir()
    arguments = [str(a) for a in comfy_type(base)["args"]] + ["--port", str(port), "--temp-directory", str(folder)]
    arguments += ["--user-directory", str(folder / "user"), "--database-url", f"sqlite:///{folder}/db"]
    arguments += ["--output-directory", str(folder / "output")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, COMFYUI / "main.py", *arguments], cwd=COMFYUI, stdout=log, stderr=log)

    def answers():
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError), Api(port) as api:
            return api.get("/prompt").status == 200
        return False

    try:
        procfs.wait_until(answers, START_S, "a plain ComfyUI")
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def front(service):
    with Api(service.http_port) as api:
        # the router hears of a worker a moment after the supervisor
        procfs.wait_until(lambda: api.get("/system_stats").status == 200, START_S, "a worker")
        yield api
        api.post("/queue", {"clear": True})
        api.post("/interrupt", {})


@pytest.fixture
def other(plain):
    with Api(plain) as api:
        yield api


def shape(value):
    """Kinds of values, by name: what a client relies on."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def without_ours(entry):
    entry["status"].pop("resvisor", None)
    return entry


def test_a_good_prompt_looks_the_same(front, other):
    fields = {"client_id": "me", "extra_data": {"extra_pnginfo": {"workflow": {"id": "w", "nodes": []}}, "auth_token_comfy_org": "x"}}
    answers = [api.prompt(tiny.image(prefix="front"), **fields) for api in (front, other)]
    assert [answer.status for answer in answers] == [200, 200]
    assert shape(answers[0].json) == shape(answers[1].json)
    assert answers[0].headers["Content-Type"] == answers[1].headers["Content-Type"]
    entries = [api.entry(answer.json["prompt_id"]) for api, answer in zip((front, other), answers, strict=True)]
    ours = entries[0]["status"]["resvisor"]
    assert ours["worker"] == "image/0" and ours["type"] == "image" and ours["run_ms"] > 0
    assert ours["cold"] == (ours["read_bytes"] > 0)
    assert entries[0]["prompt"][0] == answers[0].json["number"]
    for entry in entries:
        entry["status"]["messages"] = [[name, sorted(data)] for name, data in entry["status"]["messages"]]
    assert shape(without_ours(entries[0])) == shape(entries[1])
    assert entries[0]["outputs"].keys() == entries[1]["outputs"].keys()


def broken(name, value):
    graph = tiny.image()
    node = next(key for key, found in graph.items() if name in found["inputs"])
    graph[node]["inputs"][name] = value
    return graph


INVALID = {
    "no such model": broken("unet_name", "nothing.safetensors"),
    "wrong kind of value": broken("steps", "many"),
    "out of range": broken("steps", -5),
    "no such node": {"1": {"class_type": "NoSuchNode", "inputs": {}}},
    "no class": {"1": {"inputs": {}}},
    "no output": {"1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}},
    "nothing": {},
    "missing input": {"1": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}}},
    "missing link": {"1": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x", "images": ["77", 0]}}},
}


def no_traces(value):
    """Tracebacks name lines of files, and dependent outputs come from a set, in another order in each process."""
    if isinstance(value, dict):
        found = {key: no_traces(item) for key, item in value.items() if key != "traceback"}
        return {**found, "dependent_outputs": sorted(found["dependent_outputs"])} if "dependent_outputs" in found else found
    return [no_traces(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_prompt_is_refused_in_comfyuis_words(front, other, name):
    answers = [api.prompt(INVALID[name]) for api in (front, other)]
    assert [answer.status for answer in answers] == [400, 400], answers
    assert no_traces(answers[0].json) == no_traces(answers[1].json)
    assert front.get("/queue").json == {"queue_running": [], "queue_pending": []}


def test_what_comfyui_answers_with_500_is_refused(front):
    """A cycle is found when it is validated; a body that is no prompt before that."""
    node = {"class_type": "SaveImage", "inputs": {"filename_prefix": "x", "images": ["1", 0]}}
    for answer in (
        front.prompt({"1": node}),
        front.prompt({"1": 5}),
        front.prompt({"1": {"class_type": ["x"], "inputs": {}}}),
        front.prompt({"1": {"class_type": "SaveImage", "inputs": 7}}),
        front.post("/prompt", b"[]", headers={"Content-Type": "application/json"}),
    ):
        assert answer.status == 400 and set(answer.json["error"]) == {"type", "message", "details", "extra_info"}, answer


def test_a_partly_valid_prompt_runs_in_part(front, other):
    graph = tiny.node("TestMany", mark="m")
    graph["2"] = {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}}
    answers = [api.prompt(graph) for api in (front, other)]
    assert answers[0].status == 200 and answers[0].json["node_errors"] == answers[1].json["node_errors"] != {}
    assert front.entry(answers[0].json["prompt_id"])["prompt"][4] == ["1"]


def test_an_error_in_a_node_looks_the_same(front, other):
    entries = [api.run(tiny.node("TestRaise", mark="hello")) for api in (front, other)]
    found = [entry["status"]["messages"][-1] for entry in entries]
    assert found[0][0] == found[1][0] == "execution_error"
    assert found[0][1]["exception_message"] == found[1][1]["exception_message"] == "this node says hello\n"
    assert found[0][1].keys() == found[1][1].keys()


def test_running_waiting_interrupted(front, other, tmp_path):
    """What waits is deleted, what runs is interrupted; the queue shows both."""
    for number, api in enumerate((front, other)):
        mark = tmp_path / f"begun-{number}"
        running = api.prompt(tiny.node("TestWait", mark=str(mark)), client_id="me").json["prompt_id"]
        wait_for(mark)
        waiting = api.prompt(tiny.node("TestMany", mark="m"), extra_data={"api_key_comfy_org": "s3cret", "k": 1}).json["prompt_id"]
        queue = api.get("/queue")
        assert b"s3cret" not in queue.body
        assert [item[1] for item in queue.json["queue_running"]] == [running]
        (item,) = queue.json["queue_pending"]
        assert item[1:3] == [waiting, tiny.node("TestMany", mark="m")] and item[4] == ["1"]
        assert set(item[3]) == {"k", "create_time"}
        assert api.get("/prompt").json == {"exec_info": {"queue_remaining": 2}}
        assert api.post("/queue", {"delete": [waiting]}).status == 200
        assert api.get("/queue").json["queue_pending"] == []
        assert api.get(f"/history/{waiting}").json == {}
        assert api.post("/interrupt", {"prompt_id": running}).status == 200
        status = api.entry(running)["status"]
        assert status["status_str"] == "error" and status["messages"][-1][0] == "execution_interrupted"
        assert api.run(tiny.node("TestMany", mark="after"))["status"]["completed"] is True


def test_pages_of_the_history(front, other):
    for api in (front, other):
        api.post("/history", {"clear": True})
        ids = [api.prompt(tiny.node("TestMany", mark=str(n))).json["prompt_id"] for n in range(4)]
        api.entry(ids[-1])
        for query, wanted in (
            ("", ids), ("?max_items=2", ids[2:]), ("?max_items=2&offset=1", ids[1:3]), ("?offset=3", ids[3:]),
            ("?max_items=9", ids), ("?max_items=0", []), ("?max_items=0&offset=1", ids[1:2]), ("?offset=-1&max_items=1", ids[3:]),
        ):  # fmt: skip
            assert list(api.get(f"/history{query}").json) == wanted, query
        api.post("/history", {"delete": [ids[1]]})
        assert list(api.get("/history").json) == [ids[0], ids[2], ids[3]]


def test_the_same_prompt_id_again(front):
    prompt_id = str(uuid.uuid4())
    answers = [front.prompt(tiny.node("TestMany", mark="m"), prompt_id=prompt_id) for _ in range(2)]
    assert answers[0].status == 200 and answers[0].json == answers[1].json
    assert front.entry(prompt_id)["prompt"][1] == prompt_id
    assert front.prompt(tiny.node("TestMany", mark="other"), prompt_id=prompt_id).json["error"]["type"] == "job_exists"
    assert front.prompt(tiny.node("TestMany", mark="m"), prompt_id="no-uuid").json["error"]["type"] == "invalid_prompt_id"


def test_handlers_of_packs_are_asked_if_it_is_not_good_without(service, front):
    """The pack of the tests turns a node's old name into its new one when a prompt comes."""
    entry = front.run(tiny.node("TestOldName", mark="m"))
    assert entry["status"]["status_str"] == "success" and entry["prompt"][2]["1"]["class_type"] == "TestMany"


def test_a_worker_killed_in_a_prompt(service, tmp_path):
    """The last one here: what comes then is a start that nobody needs to wait for."""
    with Api(service.http_port) as front:
        graph = tiny.node("TestKill", mark=str(tmp_path / "killed"))
        entry = front.run(graph, client_id="me")
        name, data = entry["status"]["messages"][-1]
        assert name == "execution_error" and data["exception_type"] == "resvisor.WorkerDied"
        assert "SIGKILL" in data["exception_message"]
        assert entry["prompt"][2] == graph and entry["prompt"][3]["client_id"] == "me"
        waiting = front.prompt(tiny.image())
        assert waiting.status == 200 and waiting.json["node_errors"] == {}, "it waits for the next worker"
