"""ComfyUI's address: what is passed on to a worker, which worker, and what comes back, whatever either side does."""

import contextlib
import hashlib
import http.client
import json
import re
import select
import uuid

import pytest
from harness import http as web
from harness import procfs
from harness.fake_comfyui import FakeComfyUI, graph
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import SANITIZED, Service

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")

MIB = 1 << 20
GROWTH_MAX = 12 * MIB  # of the router's memory, for two buffers of 128 KiB a connection


class Stage:
    """Two types, one worker each; `image` is the primary. Only `video` has the class OnlyVideo and the route /video_pack/who."""

    def __init__(self, folder, **keys):
        self.service, self.token = web.listen(Service(folder), **keys), keys.get("token")
        self.fakes = {name: FakeComfyUI(folder / f"fake-{name}") for name in ("image", "video")}
        inputs = folder / "inputs"
        video = self.fakes["video"].folder
        nodes, server = video / "nodes.py", video / "server.py"
        nodes.write_text(nodes.read_text() + '\nNODE_CLASS_MAPPINGS["OnlyVideo"] = NODE_CLASS_MAPPINGS["EmptyImage"]\n')
        server.write_text(server.read_text().replace("/fake_pack/who", "/video_pack/who"))
        self.service.config["types"] = {
            name: fake.type(args=["--input-directory", str(inputs)]) for name, fake in self.fakes.items()
        }
        self.service.start()
        self.wait_ready()

    def wait_ready(self):
        """READY, and the router knows it: until then another worker may answer what all can."""
        self.service.wait_ready()
        with self.client(token=self.token) as client:
            for name in self.fakes:
                pinned = {"X-Resvisor-Worker": f"{name}/0"}
                procfs.wait_until(lambda: client.get("/users", headers=pinned).status == 200, web.TIMEOUT_S, f"{name}/0")  # noqa: B023

    def pid(self, name):
        return self.service.worker(name).pid

    def client(self, **kwargs):
        return web.Client(self.service, **kwargs)

    def get(self, path, **kwargs):
        with self.client() as client:
            return client.get(path, **kwargs)

    def post(self, path, body=None, **kwargs):
        with self.client() as client:
            return client.post(path, body, **kwargs)

    def router_memory(self):
        return procfs.rss(self.service.status().router_pid)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("front"))
    yield stage
    stage.service.end()


@pytest.fixture(autouse=True)
def without_faults(request):
    yield
    if "stage" in request.fixturenames:
        for fake in request.getfixturevalue("stage").fakes.values():
            fake.clear()


def form(name, data, **fields):
    """(body, headers) of an upload."""
    line = uuid.uuid4().hex
    parts = [f'--{line}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    head = f'--{line}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\nContent-Type: image/png\r\n\r\n'
    parts.append(head.encode() + data + f"\r\n--{line}--\r\n".encode())
    return b"".join(parts), {"Content-Type": f"multipart/form-data; boundary={line}"}


def error_of(answer):
    """The type of an error in ComfyUI's shape."""
    assert set(answer.json) == {"error", "node_errors"}, answer
    assert set(answer.json["error"]) == {"type", "message", "details", "extra_info"}, answer
    return answer.json["error"]["type"]


# ---- passed on ----


def test_fields_go_to_the_worker_but_those_between_neighbours(stage):
    headers = {"X-Own": "a, b", "Connection": "keep-alive, X-Named", "X-Named": "1", "TE": "trailers", "Keep-Alive": "5", "X-Empty": ""}
    headers |= {"Upgrade": "h2c", "Expect": "100-continue", "Proxy-Authorization": "x", "Cookie": "a=b", "Accept-Encoding": "br"}
    answer = stage.get("/api/fake_pack/who?a=1&a=2", headers=headers)
    assert (answer.status, answer.json["pid"]) == (200, stage.pid("image"))
    seen = {name.lower(): value for name, value in answer.json["headers"]}
    assert seen == {
        "host": f"127.0.0.1:{stage.service.http_port}", "x-own": "a, b", "x-empty": "", "cookie": "a=b", "accept-encoding": "br"
    }  # fmt: skip
    assert stage.fakes["image"].requests("/fake_pack/who")[-1]["target"] == "/api/fake_pack/who?a=1&a=2"


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_paths_with_and_without_api(stage, prefix):
    for path in ("/features", "/models", "/models/loras", "/embeddings", "/users", "/settings", "/i18n", "/internal/folder_paths"):
        assert stage.get(prefix + path).status == 200, path
        assert stage.fakes["image"].requests()[-1]["target"] == prefix + path


def test_fields_named_by_a_second_connection_field_stay_here(stage):
    with web.raw(stage.service) as sock:
        fields = b"Connection: keep-alive\r\nX-Named: 1\r\nX-Own: 2\r\nConnection: close, X-Named\r\n"
        sock.sendall(b"GET /fake_pack/who HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n")
        assert b" 200 " in web.read_all(sock)
    seen = {name.lower() for name, _ in stage.fakes["image"].requests("/fake_pack/who")[-1]["headers"]}
    assert "x-own" in seen and "x-named" not in seen and "connection" not in seen


def test_the_path_stays_as_it_came(stage):
    for name in ("a%2Fb.json", "%E4%BD%A0.json", "a%20b+c.json", "a|b{}.json", "a//b".replace("//", "%2F%2F")):
        with stage.client() as client:
            assert client.post(f"/userdata/{name}?overwrite=true", b"{}", headers={"Content-Type": "text/plain"}).status == 200
            assert client.get(f"/userdata/{name}").body == b"{}"
        assert stage.fakes["image"].requests()[-1]["target"] == f"/userdata/{name}"
    for path in ("/a/../prompt", "/%2e%2e/prompt", "/a/./b", "/api/%2E/x"):
        count = len(stage.fakes["image"].requests())
        answer = stage.get(path)
        assert (answer.status, error_of(answer)) == (400, "bad_request")
        assert len(stage.fakes["image"].requests()) == count


def test_a_body_goes_to_the_worker_and_comes_back(stage):
    for size in (0, 1, 4095, 4096, 131072, 131073, 3 * MIB):
        data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
        answer = stage.post("/fake_pack/echo", data[:size], headers={"Content-Type": "application/x-test"})
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/x-test")
        assert answer.body == data[:size]


def test_a_chunked_body_stays_chunked(stage):
    with stage.client() as client:
        client.connection.request("POST", "/fake_pack/echo", iter([b"a" * 70000, b"b", b"c" * 200000]), encode_chunked=True)
        answer = client.connection.getresponse()
        assert answer.read() == b"a" * 70000 + b"b" + b"c" * 200000
    seen = {name.lower(): value for name, value in stage.fakes["image"].requests("/fake_pack/echo")[-1]["headers"]}
    assert seen["transfer-encoding"] == "chunked" and "content-length" not in seen


def test_one_connection_serves_many_requests_and_so_does_the_worker_s(stage):
    pid = stage.pid("image")
    with stage.client() as client:
        assert client.get("/features").status == 200
        before = stage.fakes["image"].state(pid)["connections"]
        sock = client.connection.sock
        for _ in range(50):
            assert client.get("/features").status == 200
            assert client.get("/nothing").status == 404
        assert client.connection.sock is sock
        assert stage.fakes["image"].state(pid)["connections"] <= before


def test_head_has_the_length_and_no_body(stage):
    body, headers = form("head.png", b"x" * 5000)
    assert stage.post("/upload/image", body, headers=headers).status == 200
    with stage.client() as client:
        answer = client.request("HEAD", "/view?filename=head.png&type=input")
        assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "5000")
        assert client.get("/view?filename=head.png&type=input").body == b"x" * 5000


def test_an_interim_answer_is_not_the_answer(stage):
    with web.raw(stage.service) as sock:
        sock.sendall(b"POST /fake_pack/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert web.read_head(sock).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"hello")
        assert web.read_head(sock).startswith(b"HTTP/1.1 200 ")
        assert sock.recv(5) == b"hello"


# ---- which worker ----


def test_an_upload_is_seen_by_all_and_read_in_ranges(stage):
    data = hashlib.sha256(b"seed").digest() * 100000
    body, headers = form("up.png", data, type="input", overwrite="true")
    answer = stage.post("/upload/image", body, headers=headers)
    assert answer.json == {"name": "up.png", "subfolder": "", "type": "input"}
    url = "/api/view?filename=up.png&type=input"
    for pinned in ({}, {"X-Resvisor-Type": "video"}, {"X-Resvisor-Worker": "video/0"}):
        assert stage.get(url, headers=pinned).body == data
    answer = stage.get(url, headers={"Range": "bytes=100-199"})
    assert (answer.status, answer.body) == (206, data[100:200])
    assert answer.headers["Content-Range"] == f"bytes 100-199/{len(data)}"
    assert stage.get(url, headers={"Range": f"bytes={len(data)}-"}).status == 416


def test_a_file_comes_from_the_worker_that_has_it(stage):
    with Jobs(stage.service) as jobs:
        for kind in ("video", "image"):
            for sink, folder in (("PreviewImage", "temp"), ("SaveImage", "output")):
                inputs = {"filename_prefix": f"own-{kind}"} if sink == "SaveImage" else {}
                job = jobs.run(kind, payload=json.dumps(graph(sink=sink, bytes=70000, **inputs)).encode())
                assert job.state == rpc_pb2.JOB_DONE, job
                entry = json.loads(next(jobs.output(job, i) for i, o in enumerate(job.outputs) if o.name == "history.json"))
                file = next(f for node in entry["outputs"].values() for f in node["images"])
                assert file["type"] == folder
                answer = stage.get(f"/view?filename={file['filename']}&subfolder={file['subfolder']}&type={folder}")
                made = next(jobs.output(job, i) for i, o in enumerate(job.outputs) if o.name != "history.json")
                assert answer.status == 200 and answer.body == made, (kind, file)
    assert stage.get("/view?filename=nowhere.png&type=temp").status == 404
    assert stage.get("/view").status == 400


def test_node_classes_of_all_types(stage):
    known = stage.get("/object_info").json
    assert {"SaveImage", "OnlyVideo"} <= set(known)
    assert stage.get("/object_info/OnlyVideo").json == {"OnlyVideo": known["OnlyVideo"]}
    assert stage.get("/api/object_info/Nothing").json == {}
    # A type that is too busy to answer is known by what it said last; one that was not asked before is left out.
    stage.fakes["video"].fault("GET /object_info", "hang")
    assert set(stage.get("/api/object_info").json) == set(known)
    stage.fakes["video"].clear()
    stage.fakes["video"].fault("GET /object_info", "no_json")
    assert "OnlyVideo" not in stage.get("/object_info").json
    stage.fakes["image"].fault("GET /object_info", "status", status=500)
    stage.fakes["video"].fault("GET /object_info", "status", status=500)


def test_extensions_and_figures_of_all(stage):
    assert stage.get("/extensions").json == ["/extensions/core/fake.js"]
    stats = stage.get("/system_stats").json
    assert len(stats["devices"]) == 1 and stats["system"]["os"] == "posix"
    assert stats["resvisor"]["pool_bytes"] == 0 and stats["resvisor"]["models"] == []


def test_free_is_told_to_all(stage):
    counts = [len(fake.requests("/free")) for fake in stage.fakes.values()]
    assert stage.post("/free", {"unload_models": True}).status == 200
    assert [len(fake.requests("/free")) for fake in stage.fakes.values()] == [n + 1 for n in counts]


def test_a_route_of_another_type_s_pack_is_found(stage):
    assert stage.get("/video_pack/who").json["pid"] == stage.pid("video")
    assert stage.get("/fake_pack/who").json["pid"] == stage.pid("image")
    assert stage.get("/fake_pack/who", headers={"X-Resvisor-Worker": "video/0"}).status == 404
    answer = stage.get("/features", headers={"X-Resvisor-Worker": "audio/0"})
    assert (answer.status, error_of(answer)) == (400, "unknown_worker")


# ---- faults of the worker ----


@pytest.mark.parametrize("fault", ["half_head", "close", "garbage", "huge_head", "bad_length"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_head_is_a_bad_gateway(stage, fault, reset):
    stage.fakes["image"].fault("GET /features", fault, reset=reset, kib=80)
    answer = stage.get("/features")
    assert (answer.status, error_of(answer)) in ((502, "worker_died"), (502, "worker_answer_invalid"))
    stage.fakes["image"].clear()
    assert stage.get("/features").status == 200


@pytest.mark.parametrize("fault", ["long_length", "cut_chunk", "bad_chunk"])
@pytest.mark.parametrize("reset", [False, True])
def test_an_answer_that_is_cut_is_seen_to_be_cut(stage, fault, reset):
    stage.fakes["image"].fault("GET /features", fault, reset=reset)
    with stage.client() as client, pytest.raises((http.client.HTTPException, ConnectionError)):
        client.connection.request("GET", "/features")
        answer = client.connection.getresponse()
        assert answer.status == 200
        answer.read()
        pytest.fail("the end was not noticed")


def test_what_follows_an_answer_is_nobody_s(stage):
    stage.fakes["image"].fault("GET /features", "short_length")
    with stage.client() as client:
        assert client.get("/features").body == b"{}"
        assert client.get("/embeddings").json == []


def test_an_answer_that_switches_protocols_is_a_bad_gateway(stage):
    """What follows has no end, and no head that could be given on: the request stood still for ever."""
    stage.fakes["image"].fault("* /fake_pack/*", "switch")
    for answer in (stage.get("/fake_pack/who"), stage.post("/fake_pack/echo", b"x")):
        assert (answer.status, error_of(answer)) == (502, "worker_answer_invalid")


@pytest.mark.parametrize("status", ["000", "099"])
def test_an_answer_with_a_status_that_is_none_is_a_bad_gateway(stage, status):
    stage.fakes["image"].fault("GET /fake_pack/who", "status", status=status, body="x" * 300_000)
    assert stage.get("/fake_pack/who").status == 502


def test_a_folded_field_of_an_answer_is_not_given_on(stage):
    stage.fakes["image"].fault("GET /fake_pack/who", "folded")
    answer = stage.get("/fake_pack/who")
    assert (answer.status, error_of(answer)) == (502, "worker_answer_invalid") and "Set-Cookie" not in answer.headers


def test_an_answer_that_is_there_before_the_body_leaves_nothing_of_the_body_out(stage):
    stage.fakes["image"].fault("POST /fake_pack/echo", "early")
    for size in (100, 3 * MIB):
        answer = stage.post("/fake_pack/echo", b"x" * size)
        assert (answer.status, answer.body) == (200, b"early")
        procfs.wait_until(lambda: {e["read"] for e in stage.fakes["image"].requests() if "read" in e} >= {size}, web.TIMEOUT_S)  # noqa: B023
    stage.fakes["image"].clear()
    assert stage.post("/fake_pack/echo", b"after").body == b"after"


def test_a_slow_head_arrives(stage):
    stage.fakes["image"].fault("GET /features", "slow_head", step_ms=1)
    assert stage.get("/features").json == {}


def test_an_answer_before_the_body_was_read(stage):
    stage.fakes["image"].fault("POST /fake_pack/echo", "status", status=413, body="too large")
    answer = stage.post("/fake_pack/echo", b"x" * (8 * MIB))
    assert answer.status == 413 and b"large" in answer.body or answer.status == 502


def test_the_client_leaves_and_so_does_the_request(stage):
    fake = stage.fakes["image"]
    ended = len([e for e in fake.requests() if e.get("fault") == "hang"])
    fake.fault("GET /features", "hang")
    with web.raw(stage.service) as sock:
        ask_and_wait(stage, sock, "/features")
    fake.wait_fault_ended("hang", ended + 1)


def ask_and_wait(stage, sock, path):
    """Sends a request and waits until the primary has it."""
    count = len(stage.fakes["image"].requests(path))
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    stage.fakes["image"].wait_request(path, count + 1)


def send_until_it_stops(sock, head):
    """Bytes of a body that were taken until nothing moved for a second."""
    sock.sendall(head)
    sock.settimeout(1)
    sent, piece = 0, b"x" * 65536
    with contextlib.suppress(TimeoutError):
        while sent < 512 * MIB:
            sent += sock.send(piece)
    return sent


def test_a_worker_that_does_not_read_stops_the_client(stage):
    stage.fakes["image"].fault("POST /fake_pack/echo", "stall_unread")
    before = stage.router_memory()
    with web.raw(stage.service) as sock:
        sent = send_until_it_stops(sock, b"POST /fake_pack/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4294967296\r\n\r\n")
        assert sent < 64 * MIB  # what the sockets of the kernel hold
        assert stage.router_memory() - before < GROWTH_MAX
    stage.fakes["image"].clear()
    assert stage.get("/features").status == 200


def test_a_client_that_does_not_read_stops_the_worker(stage):
    fake, pid = stage.fakes["image"], stage.pid("image")
    before, connections = stage.router_memory(), fake.state(pid)["connections"]
    fake.fault("GET /features", "endless")
    with web.raw(stage.service) as sock:
        sock.sendall(b"GET /features HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert web.read_head(sock).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            read = 0
            while read < 64 * MIB:
                read += len(sock.recv(1 << 20))
            assert stage.router_memory() - before < GROWTH_MAX
    procfs.wait_until(lambda: fake.state(pid)["connections"] <= connections, web.TIMEOUT_S, "the end of the transfer")


# ---- what is refused here ----

HOST = b"Host: localhost\r\n"
POST = b"POST /fake_pack/echo HTTP/1.1\r\n" + HOST

AMBIGUOUS = {
    "two_lengths": POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    "two_different_lengths": POST + b"Content-Length: 4\r\nContent-Length: 0\r\n\r\nabcd",
    "length_and_coding": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another_coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "two_hosts": POST + HOST + b"Content-Length: 0\r\n\r\n",
    "no_host": b"GET /features HTTP/1.1\r\n\r\n",
    "bare_lf": b"GET /features HTTP/1.1\nHost: localhost\n\n",
    "bare_lf_in_a_field": POST + b"A: b\nContent-Length: 4\r\n\r\nabcd",
    "folded": b"GET /features HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_two_could_read_differently_goes_nowhere(stage, name):
    count = len(stage.fakes["image"].requests())
    with web.raw(stage.service) as sock:
        sock.sendall(AMBIGUOUS[name] + b"GET /features HTTP/1.1\r\n" + HOST + b"\r\n")
        found = web.read_all(sock)
    assert re.match(rb"HTTP/1\.1 (400|501) ", found), found
    assert found.count(b"HTTP/1.1 ") == 1
    assert len(stage.fakes["image"].requests()) == count


def test_pages_of_elsewhere_are_refused(stage):
    count = len(stage.fakes["image"].requests())
    assert stage.get("/features", headers={"Origin": "http://elsewhere.test"}).status == 403
    assert stage.get("/features", headers={"Host": "elsewhere.test"}).status == 403
    assert len(stage.fakes["image"].requests()) == count


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pictures_in_pages_of_elsewhere_are_refused(stage, site):
    """A browser asks for them without an Origin, and shows a cookie to every port of a host. A link may be followed."""
    foreign = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert stage.get("/features", headers=foreign).status == 403
    assert stage.get("/resvisor/v1/status", headers=foreign).status == 403
    assert stage.get("/features", headers={**foreign, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}).status == 200
    assert stage.get("/manager/reboot", headers={**foreign, "Sec-Fetch-Mode": "navigate"}).status == 403
    for own in ("same-origin", "none"):
        assert stage.get("/features", headers={**foreign, "Sec-Fetch-Site": own}).status == 200


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "get", "PROPFIND"])
def test_methods_that_could_change_what_a_connection_is_are_not_passed_on(stage, method):
    """aiohttp takes what follows a CONNECT for a tunnel's contents: the next client's request on that connection."""
    count = len(stage.fakes["image"].requests())
    for path in ("/features", "/prompt"):
        status, found = web.exchange(stage.service, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert status == 501 and b'"bad_request"' in found, found
    assert len(stage.fakes["image"].requests()) == count


def test_bodies_of_all_clients_have_one_limit(stage):
    """Bodies of prompts that are not complete: 20 of nearly 16 MiB each."""
    head = b"POST /prompt HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (15 * MIB)
    before, data = stage.router_memory(), b" " * (15 * MIB - 1)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(web.raw(stage.service)) for _ in range(20)]
        for sock in socks:
            sock.sendall(head + data)
        socks[-1].sendall(b" ")
        found = web.read_head(socks[-1])
        assert found.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: " in found
        assert stage.router_memory() - before < 300 * MIB
        assert stage.post("/prompt", {"prompt": graph()}).status == 200  # a small one has room
    procfs.wait_until(lambda: stage.post("/prompt", data + b" ").status == 400, web.TIMEOUT_S, "room again")


def test_routes_for_the_router_are_nobody_else_s(stage):
    count = len(stage.fakes["image"].requests("/resvisor/validate"))
    for path in ("/api/resvisor/validate", "/%72esvisor/validate", "/api/%72esvisor/validate", "/api/resvisor//validate"):
        answer = stage.post(path, {"prompt": {}})
        assert (answer.status, error_of(answer)) == (404, "not_found")
    assert len(stage.fakes["image"].requests("/resvisor/validate")) == count


def test_a_reboot_needs_the_token(stage):
    for path in ("/manager/reboot", "/api/manager/reboot", "/api/v2/manager/reboot"):
        for method in ("GET", "POST"):
            with stage.client() as client:
                answer = client.request(method, path)
            assert (answer.status, error_of(answer)) == (403, "not_permitted")
    assert stage.fakes["image"].requests("/manager/reboot") == []


def test_a_worker_that_dies_is_replaced(stage):
    service = stage.service
    starts = service.worker("image").starts
    stage.fakes["image"].fault("GET /users", "hang")
    with web.raw(service) as sock:
        ask_and_wait(stage, sock, "/users")
        procfs.kill(stage.pid("image"))
        found = sock.recv(65536)
    assert b" 502 " in found or b" 503 " in found
    stage.fakes["image"].clear()
    service.wait_worker("image", starts=starts + 1)
    stage.wait_ready()
    assert stage.get("/users").status == 200


def test_a_primary_that_is_not_there(tmp_path):
    stage = Stage(tmp_path / "gone")
    try:
        (stage.fakes["image"].folder / "main.py").write_text("print('its page is missing\\n*** ERROR ***', flush=True)\nraise SystemExit(78)\n")
        procfs.kill(stage.pid("image"))
        last_exit = stage.service.wait_worker("image", state="FAILED").last_exit
        assert last_exit.endswith(": its page is missing"), "the line of marks says nothing"

        def has_failed():
            answer = stage.get("/users")
            assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
            return error_of(answer) == "worker_failed" and "`resvisor restart image`" in answer.json["error"]["details"]

        procfs.wait_until(has_failed, web.TIMEOUT_S, "the router's knowledge of it")
        assert stage.post("/settings/x", "1").status == 503
        assert stage.get("/features", headers={"X-Resvisor-Type": "image"}).status == 503
        for path in ("/", "/features", "/models", "/object_info", "/extensions", "/system_stats"):
            assert stage.get(path).status == 200, path
        body, headers = form("late.png", b"x" * 100)
        assert stage.post("/upload/image", body, headers=headers).status == 200
        assert stage.get("/view?filename=late.png&type=input").body == b"x" * 100
    finally:
        stage.service.end()


def test_a_worker_that_is_silent_is_given_up(tmp_path):
    stage = Stage(tmp_path / "silent", worker_timeout="1s")
    try:
        for fault, path in (("hang", "/features"), ("hang", "/object_info"), ("stall_unread", "/fake_pack/echo")):
            stage.fakes["image"].fault(f"* {path}", fault)
            answer = stage.post(path, b"x" * 100) if fault == "stall_unread" else stage.get(path)
            if path == "/object_info":  # of the other type it is known
                assert set(answer.json) >= {"OnlyVideo"}
            else:
                assert (answer.status, error_of(answer)) == (504, "worker_timeout")
        stage.fakes["image"].fault("GET /embeddings", "half_body")
        with stage.client() as client, pytest.raises((http.client.HTTPException, ConnectionError)):
            client.get("/embeddings")
    finally:
        stage.fakes["image"].clear()
        stage.service.end()


def test_an_upload_waits_for_a_worker_that_is_busy(tmp_path):
    """As long as http.worker_timeout allows: the client could not send more, so its own time does not run."""
    stage = Stage(tmp_path / "busy", timeout="2s")
    size = 64 * MIB
    try:
        stage.fakes["image"].fault("POST /fake_pack/echo", "stall_unread")
        with web.raw(stage.service) as sock:
            head = b"POST /fake_pack/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
            sent = send_until_it_stops(sock, head)
            assert not select.select([sock], [], [], 7)[0]  # longer than three times http.timeout
            stage.fakes["image"].clear()
            sock.settimeout(web.TIMEOUT_S)
            sock.sendall(b"x" * (size - sent))
            assert web.read_head(sock).startswith(b"HTTP/1.1 502 ")
    finally:
        stage.fakes["image"].clear()
        stage.service.end()


def test_a_token_is_asked_for_and_kept_here(tmp_path):
    stage = Stage(tmp_path / "token", token=web.TOKEN)
    try:
        with web.Client(stage.service) as client:
            answer = client.get("/features")
            assert (answer.status, error_of(answer)) == (401, "unauthenticated")
        with web.Client(stage.service, token=web.TOKEN) as client:
            answer = client.get("/fake_pack/who")
            assert answer.status == 200 and "authorization" not in {name.lower() for name, _ in answer.json["headers"]}
            answer = client.get(f"/?token={web.TOKEN}")
            assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie, _, attributes = answer.headers["Set-Cookie"].partition(";")
        assert "HttpOnly" in attributes and "SameSite=Strict" in attributes
        with web.Client(stage.service) as client:
            answer = client.get("/fake_pack/who", headers={"Cookie": f"a=b; {cookie}; c=d"})
            assert answer.status == 200 and dict(answer.json["headers"])["Cookie"] == "a=b; c=d"
            assert client.get("/features", headers={"Cookie": cookie + "x"}).status == 401
            assert client.get("/resvisor/v1/status", headers={"Cookie": cookie}).status == 401
            for path in ("/?token=wrong", "/?token=", f"/users?token={web.TOKEN}"):
                answer = client.get(path)
                assert answer.status == 401 and "Set-Cookie" not in answer.headers
        with web.Client(stage.service, token=web.TOKEN) as client:
            starts = stage.service.worker("image").starts
            assert client.get("/manager/reboot").json == {"restarted": True}
            stage.service.wait_worker("image", starts=starts + 1)
        assert stage.fakes["image"].requests("/manager/reboot") == []
    finally:
        stage.service.end()

