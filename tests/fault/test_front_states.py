"""ComfyUI's address while one side disappears: a worker is killed, or a client leaves, in every state that a request, a prompt or a
WebSocket can have. The client gets a clear error or what it was owed, others are served, and nothing is left."""

import contextlib
import http.client
import json
import socket
import struct
import time
import uuid

import pytest
from harness import procfs
from harness.front import Front, raw_prompt
from harness.http import raw, read_all
from harness.service import SANITIZED
from harness.websocket import Closed, WebSocket

pytestmark = [
    pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first"),
    pytest.mark.timeout(180),
]

MIB = 1 << 20


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    front = Front(tmp_path_factory.mktemp("front"))
    yield front
    front.end()


@pytest.fixture(autouse=True)
def proven(front):
    with front.watched():
        yield


def name_of_client():
    return uuid.uuid4().hex


@contextlib.contextmanager
def asking(front, method, path, body=None, headers=None):
    """A request that was sent; its connection. The answer is read by the test."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        yield connection
    finally:
        connection.close()


# ---- a worker is killed ----


def test_killed_before_its_answer(front):
    fake = front.fakes["image"]
    fake.fault("GET /users", "hang")
    with asking(front, "GET", "/users") as connection:
        fake.wait_request("/users", len(fake.requests("/users")) + (not fake.requests("/users")))
        starts = front.kill()
        answer = connection.getresponse()
        assert answer.status == 502 and json.loads(answer.read())["error"]["type"] == "worker_died"
    front.clear()
    front.wait_restart(starts)
    assert front.get("/users").status == 200


def test_killed_within_its_answer(front):
    front.fakes["image"].fault("GET /users", "half_body")
    with asking(front, "GET", "/users") as connection:
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read(500) == b"x" * 500
        starts = front.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            while answer.read(1):
                pass
            raise http.client.IncompleteRead(b"")  # http.client's read(n) does not raise at an early end
        assert answer.length, "the end was where it was promised"
    front.wait_restart(starts)


def test_killed_within_an_upload(front):
    fake = front.fakes["image"]
    fake.fault("POST /upload/image", "stall_unread")
    before = len(fake.requests("/upload/image"))
    with raw(front.service) as sock:
        head = f"POST /upload/image HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        sock.sendall(head.encode() + f"Content-Length: {16 * MIB}\r\n\r\n".encode())
        sock.sendall(b"x" * (64 << 10))
        fake.wait_request("/upload/image", before + 1)
        starts = front.kill()
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * (16 * MIB - (64 << 10)))  # most clients hear nothing before they have sent all
        found = read_all(sock)
    assert not found or (found.startswith(b"HTTP/1.1 502 ") and b"worker_died" in found), found[:300]
    front.wait_restart(starts)


def test_killed_while_it_judges_a_prompt(front):
    """Nothing is refused by a judge that is gone: the prompt is queued, and its run decides."""
    fake = front.fakes["image"]
    fake.fault("POST /resvisor/validate", "hang", times=1)
    before = len(fake.requests("/resvisor/validate"))
    body = front.body()
    with asking(front, "POST", "/prompt", json.dumps(body)) as connection:
        fake.wait_request("/resvisor/validate", before + 1)
        starts = front.kill()
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())["prompt_id"] == body["prompt_id"]
    front.wait_restart(starts)
    assert front.history(body["prompt_id"])["status"]["status_str"] == "success"


def test_killed_in_a_prompt_with_one_behind_it(front, gate):
    """The one that ran is lost, and says why, to its own client only; the one that waited runs on the next worker."""
    mine, other = name_of_client(), name_of_client()
    with front.socket(mine) as ws, front.socket(other) as bystander:
        lost = front.queue(("FakeGate", {"path": gate.path}), client=mine)
        gate.wait_reached()
        waits = front.queue(client=other)
        starts = front.kill()
        events = ws.wait_prompt(lost)
        error = events[-1]
        assert error["type"] == "execution_error" and error["data"]["exception_type"] == "resvisor.WorkerDied", error
        assert (error["data"]["node_id"], error["data"]["node_type"]) == ("1", "FakeGate")
        assert "SIGKILL" in error["data"]["exception_message"]
        ends = bystander.wait_prompt(waits, timeout=60)
        assert ends[-1]["type"] == "execution_success"
        assert not [e for e in bystander.seen if isinstance(e["data"], dict) and e["data"].get("prompt_id") == lost]
        ws.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
    front.wait_restart(starts)
    entry = front.history(lost)
    assert entry["status"]["status_str"] == "error" and "SIGKILL" in json.dumps(entry["status"]["messages"])


def test_killed_while_a_client_s_socket_is_idle(front):
    client = name_of_client()
    with front.socket(client) as ws:
        ws.send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        ws.wait_event("feature_flags")
        starts = front.kill()
        front.wait_restart(starts)
        fake = front.fakes["image"]
        fake.wait_socket(front.pid(), client, timeout=60)
        wanted = {"supports_preview_metadata": True}
        procfs.wait_until(lambda: fake.state(front.pid())["feature_flags"].get(client) == wanted, 20, "the flags again")
        events = None
        prompt = front.queue(("FakeSteps", {"preview": 4}), client=client)
        events = ws.wait_prompt(prompt)
        assert [e["type"] for e in events].count(4) == 3
        assert [e["type"] for e in ws.seen].count("feature_flags") == 1


def test_killed_within_the_handshake_of_a_socket(front):
    fake, client = front.fakes["image"], name_of_client()
    fake.fault("GET /ws", "hang")
    before = len(fake.requests("/ws"))
    with front.socket(client, wait=["video"]) as ws:
        fake.wait_request("/ws", before + 1)
        starts = front.kill()
        front.clear()
        front.wait_restart(starts)
        fake.wait_socket(front.pid(), client, timeout=60)
        assert ws.wait_prompt(front.queue(client=client))[-1]["type"] == "execution_success"


def test_killed_while_its_answer_is_merged(front):
    front.get("/object_info")
    starts = front.kill("video")
    front.wait_restart(starts, "video")  # what was kept of its answer is not good any more
    fake = front.fakes["video"]
    fake.fault("GET /object_info", "hang")
    before = len(fake.requests("/object_info"))
    with asking(front, "GET", "/object_info") as connection:
        fake.wait_request("/object_info", before + 1)
        starts = front.kill("video")
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200 and "SaveImage" in found, found
    front.wait_restart(starts, "video")


def test_the_prompt_thread_ends(front):
    """sys.exit() in a node: the server would answer for ever, and never run anything again."""
    client = name_of_client()
    starts = front.service.worker("image").starts + 1
    with front.socket(client) as ws:
        prompt = front.queue(("FakeExit", {"code": 3}), client=client)
        error = ws.wait_prompt(prompt)[-1]
        assert error["type"] == "execution_error" and "sys.exit()" in error["data"]["exception_message"], error
    front.wait_restart(starts)


def test_the_event_loop_stands_still(front, make_gate):
    """Nothing of that worker answers; the other type is served, and what waited arrives in the end."""
    stuck, client = make_gate(), name_of_client()
    with front.socket(client) as ws, asking(front, "GET", "/system_stats") as connection:
        assert connection.getresponse().status == 200
        prompt = front.queue(("FakeHangLoop", {"path": stuck.path}), client=client)
        stuck.wait_reached()
        front.is_served("video")
        for path in ("/queue", "/healthz", "/readyz", "/metrics"):
            assert front.get(path).status == 200, path
        with asking(front, "GET", "/users") as waiting:
            stuck.open()
            assert waiting.getresponse().status == 200
        assert ws.wait_prompt(prompt)[-1]["type"] == "execution_success"


# ---- a client leaves ----


def leave(sock, how):
    """FIN, or RST."""
    if how == "RST":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture(params=["FIN", "RST"])
def how(request):
    return request.param


@pytest.mark.parametrize("part", [0, 1, 20, 0.5, 0.99])
def test_a_client_leaves_within_a_prompt_s_bytes(front, how, part):
    """part: bytes, or the share, of what it sends."""
    data = raw_prompt(front.port, front.body())
    with raw(front.service) as sock:
        sock.sendall(data[: part if isinstance(part, int) else int(part * len(data))])
        leave(sock, how)
    assert front.get("/queue").json == {"queue_running": [], "queue_pending": []}


def test_a_client_leaves_before_the_answer(front, how):
    fake = front.fakes["image"]
    fake.fault("GET /users", "hang")
    ended = sum(e.get("fault") == "hang" for e in fake.requests())
    with raw(front.service) as sock:
        sock.sendall(f"GET /users HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\n\r\n".encode())
        procfs.wait_until(lambda: front.connections()["image"] >= 1, 20, "the request at the worker")
        fake.wait_request("/users", len([e for e in fake.requests("/users")]) or 1)
        leave(sock, how)
    fake.wait_fault_ended("hang", ended + 1)


def test_a_client_leaves_within_the_answer(front, how):
    fake = front.fakes["image"]
    fake.fault("GET /users", "endless")
    with raw(front.service) as sock:
        sock.sendall(f"GET /users HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\n\r\n".encode())
        assert len(sock.recv(1000)) > 0
        leave(sock, how)


def test_a_client_leaves_within_its_upload(front, how):
    fake = front.fakes["image"]
    before = len(fake.requests("/upload/image"))
    with raw(front.service) as sock:
        head = f"POST /upload/image HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        sock.sendall(head.encode() + f"Content-Length: {8 * MIB}\r\n\r\n".encode() + b"--b\r\n" + b"x" * MIB)
        fake.wait_request("/upload/image", before + 1)
        leave(sock, how)
    assert not [e for e in fake.requests() if "upload" in e], "half an upload was taken for a whole one"


@pytest.mark.parametrize("part", [10, 60, -1])
def test_a_client_leaves_within_its_handshake(front, how, part):
    data = (
        f"GET /ws?clientId=half HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()
    with raw(front.service) as sock:
        sock.sendall(data[:part] if part > 0 else data)
        leave(sock, how)


def test_a_client_leaves_while_its_socket_is_being_opened(front, how):
    for fake in front.fakes.values():
        fake.fault("GET /ws", "hang")
    before = len(front.fakes["image"].requests("/ws"))
    ws = WebSocket(front.port, "/ws?clientId=early")
    front.fakes["image"].wait_request("/ws", before + 1)
    leave(ws.sock, how)


@pytest.mark.parametrize("data", [b"", b"\x81", b"\x82\xfe\xff\xff", b"\x02\x85abcdhe"])
def test_a_client_leaves_within_a_frame(front, how, data):
    ws = front.socket(name_of_client())
    if data:
        ws.send_raw(data)
    leave(ws.sock, how)


def test_a_client_leaves_while_its_prompt_runs(front, how, gate):
    """The prompt goes on: the page may come back, and its history is there."""
    client = name_of_client()
    ws = front.socket(client)
    prompt = front.queue(("FakeGate", {"path": gate.path}), ("FakeSteps", {"preview": 1, "bytes": 100_000}), client=client)
    gate.wait_reached()
    leave(ws.sock, how)
    gate.open()
    assert front.history(prompt)["status"]["status_str"] == "success"


def test_a_client_leaves_with_much_unread(front, how):
    client = name_of_client()
    ws = front.socket(client, receive_buffer=4096)
    for fake, name in ((front.fakes[name], name) for name in front.fakes):
        fake.push(front.pid(name), client, "binary", bytes=10_000_000, count=3)
    ws.receive_frame()
    leave(ws.sock, how)


# ---- many, and the router itself ----


def test_many_sockets_leave_at_once(front):
    sockets = [front.socket(f"many-{i}", wait=()) for i in range(60)]
    procfs.wait_until(lambda: len(front.sockets()["image"]) == 60, 60, "60 sockets at the worker")
    for i, ws in enumerate(sockets):
        leave(ws.sock, ("FIN", "RST")[i % 2])


def test_all_workers_are_killed(front):
    client = name_of_client()
    with front.socket(client) as ws:
        starts = {name: front.kill(name) for name in front.fakes}
        answer = front.get("/users")
        assert answer.status in (200, 502, 503), answer
        if answer.status != 200:
            assert answer.json["error"]["message"], answer
        waits = front.queue(client=client)
        for name, number in starts.items():
            front.wait_restart(number, name)
        entry = front.history(waits)
        assert entry["status"]["status_str"] == "success", entry
        assert ws.wait_event("status") is not None


def test_a_flood_of_log_lines_does_not_hold_up_others(front):
    front.queue(("FakeLog", {"lines": 20_000}))
    front.is_served("video")
    front.is_served("image")


def test_ends_of_a_socket_by_the_worker(front):
    """Whatever way its side ends, the client's socket stays, and the next one is opened to that worker."""
    client, fake = name_of_client(), front.fakes["image"]
    with front.socket(client) as ws:
        for kind in ("end", "reset", "close"):
            begin = time.monotonic()
            asked = len(fake.requests("/ws"))
            fake.push(front.pid(), client, kind)
            fake.wait_request("/ws", asked + 1, timeout=60)
            fake.wait_socket(front.pid(), client)
            assert time.monotonic() - begin < 60
        assert ws.wait_prompt(front.queue(client=client))[-1]["type"] == "execution_success"
        assert ws.close() == 1000
    with pytest.raises(Closed):
        raise Closed(1000)
