"""The WebSocket of ComfyUI's address: each client gets its own events of all workers, whatever becomes of a worker or a client."""

import contextlib
import json
import os
import signal
import struct
import uuid

import pytest
from harness import http, procfs
from harness.fake_comfyui import FakeComfyUI, graph
from harness.service import SANITIZED, Service
from harness.websocket import BINARY, CLOSE, PING, TEXT, Closed, Refused, WebSocket, frame

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")

FLAGS = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return FakeComfyUI(tmp_path_factory.mktemp("front-ws") / "fake")


@pytest.fixture(scope="module")
def service(tmp_path_factory, fake):
    """One type with two workers, which all tests share."""
    service = http.listen(Service(tmp_path_factory.mktemp("front-ws") / "service"))
    service.config["types"] = {"image": fake.type(workers=2)}
    service.start()
    service.wait_ready()
    yield service
    service.end()


KEPT_ALIVE = 4  # connections that the router keeps for the next request to a worker, which are not a client's


@pytest.fixture
def held(service, fake):
    """After the test nothing of its clients is left in the router, and nothing at the workers."""
    before = service.holdings()["router"][0]
    yield
    for pid in pids(service):
        procfs.wait_until(lambda pid=pid: not fake.state(pid)["sockets"], 20, "no client's socket at a worker")
    procfs.wait_until(lambda: service.holdings()["router"][0] <= before + KEPT_ALIVE, 20, "no descriptor left")


def pids(service):
    return [worker.pid for worker in service.type("image").workers]


def connect(service, client=None, path="/ws", wait=None, **keys):
    """A client, and its first event; wait: a FakeComfyUI at whose workers its sockets are waited for."""
    ws = WebSocket(service.http_port, path + (f"?clientId={client}" if client else ""), **keys)
    ws.first = ws.wait_event("status")
    for pid in pids(service) if wait else []:
        wait.wait_socket(pid, client)
    return ws


def submit(service, client, *nodes, **fields):
    with http.Client(service) as web:
        answer = web.request("POST", "/prompt", {"prompt": graph(*nodes), "client_id": client, **fields})
    assert answer.status == 200, answer
    return answer.json["prompt_id"]


def own_id():
    return uuid.uuid4().hex


# ---- who gets what ----


def test_the_first_status_has_the_id_and_no_other(service, fake, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        assert ws.first == {"status": {"exec_info": {"queue_remaining": 0}}, "sid": client}
        prompt = submit(service, client)
        ws.wait_prompt(prompt)
        ws.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
        assert [event["data"].get("sid") for event in ws.seen if event["type"] == "status"][1:].count(client) == 0
    with connect(service, path="/api/ws") as ws:
        assert len(ws.first["sid"]) == 32
        for pid in pids(service):
            fake.wait_socket(pid, ws.first["sid"])


def test_two_clients_with_previews_get_their_own_events_only(service, fake, make_gate, held):
    """Both prompts stand at a gate between two steps, so they run at the same time."""
    clients, gates = [own_id(), own_id()], [make_gate(), make_gate()]
    with connect(service, clients[0], wait=fake) as a, connect(service, clients[1], wait=fake) as b:
        sockets, prompts = [a, b], []
        for client, gate, kind in zip(clients, gates, (1, 4), strict=True):
            step = {"steps": 1, "preview": kind, "bytes": 100_000}
            nodes = [("FakeSteps", {**step, "path": gate.path}), ("FakeSteps", step), ("FakeText", {"text": client})]
            prompts.append(submit(service, client, *nodes))
        for gate in gates:
            gate.wait_reached()
        for gate in gates:
            gate.open()
        for ws, client, prompt, other in zip(sockets, clients, prompts, reversed(prompts), strict=True):
            events = ws.wait_prompt(prompt)
            assert [e["data"]["node"] for e in events if e["type"] == "progress"] == ["1", "2"]
            previews = [e["data"] for e in events if e["type"] in (1, 4)]
            assert len(previews) == 2 and all(prompt.encode() in data and other.encode() not in data for data in previews)
            assert [e["data"][4:] for e in events if e["type"] == 3] == [b"3" + client.encode()]
            assert {e["data"].get("prompt_id") for e in events if isinstance(e["data"], dict)} <= {prompt, None}


def test_large_and_fragmented_messages_arrive_as_they_are(service, fake, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        for pid in pids(service):
            fake.push(pid, client, "binary", bytes=20_000_000)
            message = ws.receive()
            assert len(message) == 20_000_000 and message[:8] == struct.pack(">II", 1, 1) and set(message[8:]) == {ord("x")}
            text = json.dumps({"type": "pack.event", "data": "ä" * 500}, ensure_ascii=False)
            fake.push(pid, client, "fragments", text=text)
            assert ws.receive() == text
        fake.push(pid, client, "pings", count=10_000)
        fake.push(pid, client, "text", text='{"type": "after"}')
        assert ws.event() == {"type": "after"}


def test_a_status_of_a_worker_is_merged(service, fake, held):
    client = own_id()
    pid = pids(service)[1]
    with connect(service, client, wait=fake) as ws:
        fake.event(pid, "status", {"status": {"exec_info": {"queue_remaining": 77}}}, client)
        fake.event(pid, "status", {"status": {"exec_info": {"queue_remaining": 77, "new": 1}}, "sid": "x"}, client)
        assert ws.event()["data"] == {"status": {"exec_info": {"queue_remaining": 0, "new": 1}}}


def test_the_queue_of_all_workers_is_counted(service, fake, make_gate, held):
    client, gates = own_id(), [make_gate() for _ in range(3)]
    with connect(service, client, wait=fake) as ws, connect(service, own_id()) as other:
        prompts = [submit(service, client, ("FakeGate", {"path": gate.path})) for gate in gates]
        for each in (ws, other):
            each.wait_event("status", status={"exec_info": {"queue_remaining": 3}})
        with http.Client(service) as web:  # the one that waits: its end is told by the number only
            web.request("POST", "/queue", {"delete": [prompts[2]]})
        other.wait_event("status", status={"exec_info": {"queue_remaining": 2}})
        for gate in gates[:2]:
            gate.open()
        other.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
        ws.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
        ends = [e["data"]["prompt_id"] for e in ws.seen if e["type"] == "execution_success"]
        assert sorted(ends) == sorted(prompts[:2])
        assert not [e for e in ws.seen if e["type"] in ("execution_error", "execution_interrupted")]


def test_what_a_client_says_reaches_all_workers(service, fake, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        ws.send({"type": "a pack's"})
        ws.send(b"x" * 1_000_000)

        def heard():
            found = [e["text"] for e in fake.requests() if e.get("ws") == client]
            return found.count('{"type": "a pack\'s"}') == 2 and found.count("binary 1000000") == 2

        procfs.wait_until(heard, 20, "both messages at both workers")


def test_messages_before_the_workers_are_reached_are_kept(service, fake, held):
    """They may come in one piece with the handshake."""
    client = own_id()
    early = frame(TEXT, json.dumps(FLAGS).encode()) + frame(TEXT, b"second") + frame(PING, b"p")
    with http.raw(service) as sock:
        sock.sendall(
            f"GET /ws?clientId={client} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode() + early
        )
        assert http.read_head(sock).startswith(b"HTTP/1.1 101 ")

        def heard():
            found = [e["text"] for e in fake.requests() if e.get("ws") == client]
            return found == [json.dumps(FLAGS)] * 2 + ["second"] * 2 or sorted(found) == sorted([json.dumps(FLAGS), "second"] * 2)

        procfs.wait_until(heard, 20, "both messages at both workers")


# ---- a worker's end ----


def restart(service, number=0, sig=signal.SIGKILL):
    """Kills a worker; when another is ready in its place, its pid."""
    before = service.worker("image", number)
    os.kill(before.pid, sig)
    return service.wait_worker("image", number=number, starts=before.starts + 1, timeout=60).pid


def test_feature_flags_are_replayed_and_answered_once(service, fake, held):
    client = own_id()
    with connect(service, client) as ws:
        ws.send(FLAGS)
        assert ws.wait_event("feature_flags") == {"supports_preview_metadata": True, "max_upload_size": 100 << 20}

        def known(pid):
            return fake.state(pid)["feature_flags"].get(client) == FLAGS["data"]

        for pid in pids(service):
            procfs.wait_until(lambda pid=pid: known(pid), 20, "the flags at a worker")
        pid = restart(service)
        fake.wait_socket(pid, client)
        procfs.wait_until(lambda: known(pid), 20, "the flags at the new worker")
        fake.event(pid, "done", {}, client)
        ws.wait_event("done")
        assert [e["type"] for e in ws.seen].count("feature_flags") == 1
        assert [e["data"].get("sid") for e in ws.seen if e["type"] == "status"].count(client) == 1


def test_a_worker_that_dies_within_a_prompt(service, fake, gate, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        prompt = submit(service, client, "EmptyImage", ("FakeGate", {"path": gate.path}))
        gate.wait_reached()
        ws.wait_event("executing", node="2")
        with http.Client(service) as web:
            number = int(web.get(f"/resvisor/v1/jobs/{prompt}").json["worker"].removeprefix("image/"))
        restart(service, number)
        events = ws.wait_prompt(prompt)
        error = events[-1]["data"]
        assert events[-1]["type"] == "execution_error"
        assert (error["node_id"], error["node_type"], error["exception_type"]) == ("2", "FakeGate", "resvisor.WorkerDied")
        assert "signal 9" in error["exception_message"] or "SIGKILL" in error["exception_message"], error
        assert f"image/{number}" in error["exception_message"]
        ws.wait_event("status", status={"exec_info": {"queue_remaining": 0}})
        for pid in pids(service):
            fake.wait_socket(pid, client)
        again = submit(service, client)
        assert ws.wait_prompt(again)[-1]["type"] == "execution_success"
        assert [e["data"]["prompt_id"] for e in ws.seen if e["type"] == "execution_error"] == [prompt]


def test_an_error_of_a_node_is_comfyui_s_own(service, fake, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        prompt = submit(service, client, ("FakeRaise", {"text": "a reason"}))
        error = ws.wait_prompt(prompt)[-1]["data"]
        assert (error["exception_message"].strip(), error["node_type"]) == ("a reason", "FakeRaise")
        with http.Client(service) as web:
            assert web.request("GET", f"/resvisor/v1/jobs/{prompt}/wait").json["state"] == "FAILED"
        ws.wait_prompt(submit(service, client))
        assert [e["data"]["prompt_id"] for e in ws.seen if e["type"] == "execution_error"] == [prompt]


def test_an_interrupted_prompt(service, fake, gate, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        prompt = submit(service, client, ("FakeGate", {"path": gate.path}))
        gate.wait_reached()
        with http.Client(service) as web:
            assert web.request("POST", "/interrupt", {"prompt_id": prompt}).status == 200
        assert ws.wait_prompt(prompt)[-1]["type"] == "execution_interrupted"
        gate.close()


def test_a_prompt_that_is_refused_when_it_runs(service, fake, held):
    """Nobody has judged it before, so ComfyUI has no socket to tell it to: the router does."""
    client = own_id()
    number = fake.fault("POST /resvisor/validate", "status")
    with connect(service, client, wait=fake) as ws:
        prompt = submit(service, client, "FakeNothing")
        fake.clear(number)
        end = ws.wait_prompt(prompt)[-1]
        assert (end["type"], end["data"]["exception_type"]) == ("execution_error", "resvisor.PromptRefused")
        assert "FakeNothing" in end["data"]["exception_message"]
        ws.wait_event("status", status={"exec_info": {"queue_remaining": 0}})


def test_broken_frames_of_a_worker_cost_nobody_else_anything(service, fake, held):
    """Each kind at a client of its own: its socket is opened again, and the client has not noticed."""
    kinds = ["half_frame", "half_head", "masked", "reserved", "unknown_opcode", "bad_utf8", "huge_length", "lone_continuation", "long_ping"]
    pid = pids(service)[0]
    clients = {kind: own_id() for kind in [*kinds, "end", "reset", "close"]}
    with contextlib.ExitStack() as stack:
        sockets = {kind: stack.enter_context(connect(service, client, wait=fake)) for kind, client in clients.items()}
        before = len(fake.requests("/ws"))
        for kind, client in clients.items():
            fake.push(pid, client, kind, **({"then": "end"} if kind.startswith("half") else {}))
        procfs.wait_until(lambda: len(fake.requests("/ws")) >= before + len(clients), 30, "new sockets")
        for kind, client in clients.items():
            fake.wait_socket(pid, client)
            fake.event(pid, "still.here", {}, client)
            sockets[kind].wait_event("still.here")


def test_a_worker_that_does_not_answer_the_handshake(service, fake, held):
    """It is waited for as long as it lives: a second socket would be forgotten when the first one ends."""
    client, pid = own_id(), pids(service)[0]
    number = fake.fault("GET /ws", "hang", pid=pid)
    with connect(service, client) as ws:
        fake.wait_socket(pids(service)[1], client)
        fake.event(pids(service)[1], "of.the.other", {}, client)
        ws.wait_event("of.the.other")
        fake.clear(number)
        fake.wait_socket(pid, client)
        fake.event(pid, "at.last", {}, client)
        ws.wait_event("at.last")


def test_handshakes_that_a_worker_spoils(service, fake, held):
    """Each kind once, at a client of its own; then it is tried again."""
    kinds = ["slow_head", "half_head", "close", "status", "long_length", "garbage", "huge_head", "bad_length", "cut_chunk"]
    pid = pids(service)[0]
    with contextlib.ExitStack() as stack:
        clients = {}
        for kind in kinds:
            client, before = own_id(), len(fake.requests("/ws", pid=pid))
            fake.fault("GET /ws", kind, pid=pid, times=1)
            clients[client] = stack.enter_context(connect(service, client))
            procfs.wait_until(lambda before=before: len(fake.requests("/ws", pid=pid)) > before, 20, "the handshake")
        for client, ws in clients.items():
            fake.wait_socket(pid, client, timeout=60)
            fake.event(pid, "at.last", {}, client)
            ws.wait_event("at.last")


# ---- a client's end ----


def test_a_client_that_leaves_leaves_nothing(service, fake, held):
    client = own_id()
    for way in ("close", "drop"):
        ws = connect(service, client, wait=fake)
        if way == "close":
            assert ws.close(1001) == 1001
        else:
            ws.sock.close()
        for pid in pids(service):
            fake.wait_no_socket(pid, client)


def test_nothing_leaks(service, fake, held):
    before = service.holdings()
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(connect(service, own_id())) for _ in range(20)]
            for number, ws in enumerate(sockets):
                if number % 3 == 0:
                    ws.send(b"x" * 1000)
                if number % 3 == 1:
                    ws.send_raw(b"\x81\x00")
        service.assert_holdings(before)


def test_the_same_id_again(service, fake, gate, held):
    """A page that is loaded anew, or whose old connection is not known to be dead: the newer socket gets the events."""
    client = own_id()
    with connect(service, client, wait=fake) as old:
        opened = [e for e in fake.requests() if e.get("ws") == client and e.get("gone")]
        with connect(service, client) as new:
            procfs.wait_until(
                lambda: len([e for e in fake.requests() if e.get("ws") == client and e.get("gone")]) == len(opened) + 2, 20, "the end of both"
            )
            for pid in pids(service):
                fake.wait_socket(pid, client)
            prompt = submit(service, client, ("FakeGate", {"path": gate.path}))
            new.wait_event("executing", node="1")
            old.close()
            gate.open()
            assert new.wait_prompt(prompt)[-1]["type"] == "execution_success"
            order = [e for e in fake.requests() if e.get("ws") == client or (f"clientId={client}" in e.get("target", "") and e.get("method"))]
            for pid in pids(service):  # a socket is opened only when the one before it has ended
                assert ["gone" in e for e in order if e["pid"] == pid] == [False, True, False]


def test_a_page_that_comes_back_within_a_prompt_is_told_the_node(service, fake, gate, held):
    client = own_id()
    with connect(service, client, wait=fake) as ws:
        prompt = submit(service, client, ("FakeGate", {"path": gate.path}))
        ws.wait_event("executing", node="1")
    with connect(service, client) as ws:
        ws.wait_event("executing", node="1")
        gate.open()
        assert ws.wait_prompt(prompt)[-1]["type"] == "execution_success"


def test_a_slow_reader_holds_up_its_own_socket_only(service, fake, held):
    """20 messages of 2 MB do not fit anywhere: the worker's socket is not read until the client reads."""
    client, other = own_id(), own_id()
    pid = pids(service)[0]
    with connect(service, client, wait=fake, receive_buffer=65536) as ws, connect(service, other, wait=fake) as quick:
        fake.push(pid, client, "binary", bytes=2_000_000, count=20)
        for _ in range(3):
            fake.event(pid, "for.other", {}, other)
            quick.wait_event("for.other")
        with http.Client(service) as web:
            assert web.request("GET", "/healthz").status == 200
        assert [len(ws.receive()) for _ in range(20)] == [2_000_000] * 20
        fake.event(pid, "done", {}, client)
        ws.wait_event("done")


def test_a_reader_that_stands_still_is_dropped(service, fake, held):
    client = own_id()
    pid = pids(service)[0]
    with connect(service, client, wait=fake, receive_buffer=65536, timeout=60) as ws:
        fake.push(pid, client, "binary", bytes=2_000_000, count=20)

        def dropped():
            with contextlib.suppress(OSError):
                ws.send_raw(frame(PING))  # it lives, and still it does not read
            return client not in fake.state(pid)["sockets"]

        procfs.wait_until(dropped, 100, "the end of its socket")
        with pytest.raises(Closed):
            while True:
                ws.receive()


def test_what_waits_for_workers_that_do_not_read_is_bounded(service, fake, held):
    """Both workers stand still, as one whose node holds Python's lock: what 12 clients send has no place in the router."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(service, own_id(), wait=fake)) for _ in range(12)]
        before = procfs.rss(service.status().router_pid)
        for pid in pids(service):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        ends = []
        for _ in range(32):  # what the kernel's sockets hold is not counted
            for ws in [] if 1013 in ends else clients:
                ws.sock.settimeout(20)
                with contextlib.suppress(OSError):
                    ws.send(b"x" * 1_000_000)
                ws.sock.settimeout(0.01)
                with contextlib.suppress(OSError):
                    try:
                        ws.receive()
                    except Closed as closed:
                        ends.append(closed.code)
        assert 1013 in ends, ends
        assert procfs.rss(service.status().router_pid) - before < 150_000_000


@pytest.mark.parametrize(
    "data, code",
    [
        (frame(TEXT, b"hi", mask=b""), 1002),
        (frame(PING, b"p" * 126), None),
        (frame(PING, b"p", final=False), None),
        (frame(0, b"x"), 1002),
        (frame(3, b"x"), 1002),
        (frame(TEXT, b"\xff\xfe"), 1007),
        (b"\x82\xff" + struct.pack(">Q", 1 << 40) + b"mask" + b"x" * 1000, 1009),
        (b"\x82\xff" + struct.pack(">Q", 1 << 63) + b"mask" + b"x" * 1000, None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (os.urandom(100) + b"\x81\x00" * 100, None),
        (frame(CLOSE, struct.pack(">H", 1005)), 1002),
        (frame(CLOSE), 1005),
        (frame(BINARY, b"", final=False) + frame(BINARY, b""), 1002),
    ],
)  # fmt: skip
def test_a_client_that_breaks_the_rules(service, fake, data, code):
    with connect(service) as ws:
        ws.send_raw(data)
        with contextlib.suppress(OSError):
            ws.send_raw(b"x" * 16)
            ws.sock.shutdown(1)
        with pytest.raises(Closed) as closed:
            while True:
                ws.receive()
        if code:
            assert closed.value.code == code


# ---- who is let in ----


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Upgrade": None}, 400),
        ({"Connection": "keep-alive"}, 400),
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"Sec-WebSocket-Key": None}, 400),
    ],
)  # fmt: skip
def test_handshakes_that_are_refused(service, headers, status):
    with pytest.raises(Refused) as refused:
        connect(service, headers={"Connection": "close, Upgrade", **headers})
    assert refused.value.status == status
    assert json.loads(refused.value.body)["error"]["message"]


def test_a_page_of_our_own_is_let_in(service):
    host = f"127.0.0.1:{service.http_port}"
    with connect(service, headers={"Origin": f"http://{host}", "Sec-WebSocket-Extensions": "permessage-deflate"}) as ws:
        assert "permessage-deflate" not in ws.head
    for path, status in (("/ws?clientId=" + "x" * 129, 400), ("/ws?a=" + "/" * 3000, 414)):
        with pytest.raises(Refused) as refused:
            connect(service, path=path)
        assert refused.value.status == status


def test_token_limit_and_end(make_service, tmp_path):
    """A service of its own: few connections, a token, and its end while clients are there."""
    fake = FakeComfyUI(tmp_path / "fake")
    service = http.listen(make_service(), token=http.TOKEN, connections=8)
    service.config["types"] = {"image": fake.type()}
    service.start()
    service.wait_ready()
    with pytest.raises(Refused) as refused:
        connect(service, headers={"Connection": "close, Upgrade"})
    assert refused.value.status == 401
    token = {"Authorization": f"Bearer {http.TOKEN}"}
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(service, own_id(), wait=fake, headers=token)) for _ in range(4)]
        with pytest.raises(Refused) as refused:
            connect(service, headers=token)
        assert refused.value.status == 503 and "Retry-After" in refused.value.head
        clients.pop().close()
        procfs.wait_until(lambda: len(fake.state(pids(service)[0])["sockets"]) == 3, 20, "three sockets")
        clients.append(stack.enter_context(connect(service, headers=token)))
        assert not [e for e in fake.requests("/ws") if http.TOKEN in json.dumps(e)]
        service.stop()
        for ws in clients:
            with pytest.raises(Closed) as closed:
                while True:
                    ws.receive()
            assert closed.value.code == 1001
