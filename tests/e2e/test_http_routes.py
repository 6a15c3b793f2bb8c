"""Every route, by http.client: the same jobs and models as by RPC and by the command line."""

import contextlib
import http.client
import json
import os
import re
import socket
import struct
import subprocess
import threading
import time

import pytest
from harness import http as web
from harness import models, procfs
from harness.service import ROOT

V1 = "/resvisor/v1"
TYPE = "application/json"


@pytest.fixture
def served(make_faulty):
    service = web.listen(make_faulty(), token=web.TOKEN)
    service.start()
    service.wait_ready()
    return service


@pytest.fixture
def client(served):
    with web.Client(served, web.TOKEN) as found:
        yield found


class Events:
    """A stream of server-sent events."""

    def __init__(self, service, path=f"{V1}/events", headers=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=web.TIMEOUT_S)
        self.connection.request("GET", path, headers={"Authorization": f"Bearer {web.TOKEN}", **(headers or {})})
        self.response = self.connection.getresponse()
        assert self.response.status == 200 and self.response.headers["Content-Type"] == "text/event-stream"
        self.hello = self.read(lambda event: event["event"] == "hello")[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.response.close()
        self.connection.close()

    def read(self, until):
        """Events as dictionaries, until one of them satisfies `until`."""
        found, fields = [], {}
        while line := self.response.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                found.append({"event": fields["event"], "id": fields.get("id", ""), **json.loads(fields["data"])})
                fields = {}
                if until(found[-1]):
                    return found
        raise AssertionError(f"the stream ended: {found}")


def sequence(number):
    return lambda event: event.get("sequence") == number


@pytest.mark.smoke
def test_health_needs_nothing(served):
    with web.Client(served) as stranger:
        answer = stranger.get("/healthz")
        assert (answer.status, answer.json) == (200, {"status": "ok"})
        assert answer.headers["Content-Type"] == TYPE and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.smoke
def test_submit_wait_and_download(client):
    job = client.submit(job_id="a", params={"output_bytes": 1000}, wait_ms=20000)
    assert job.status == 200 and job.json["state"] == "DONE" and job.headers["Location"] == f"{V1}/jobs/a"
    assert client.get(f"{V1}/jobs/a").json == job.json
    number = [output["name"] for output in job.json["outputs"]].index("bytes.bin")
    answer = client.get(f"{V1}/jobs/a/outputs/{number}")
    assert answer.body == bytes(i * 31 % 251 for i in range(1000))
    assert answer.headers["Content-Type"] == "application/octet-stream" and "bytes.bin" in answer.headers["Content-Disposition"]


def test_a_job_is_the_same_by_http_command_line_and_rpc(served, client):
    client.submit(job_id="a", params={"output_bytes": 10}, wait_ms=20000)
    by_cli = served.cli_json("job", "a")
    by_http = client.get(f"{V1}/jobs/a").json
    assert by_cli["job_id"] == by_http["job_id"] and by_cli["worker"] == by_http["worker"]
    served.cli("submit", "test", "--id", "b", "--wait")
    assert client.get(f"{V1}/jobs/b").json["state"] == "DONE"
    assert [job["job_id"] for job in client.get(f"{V1}/jobs").json["jobs"]] == ["b", "a"]


def test_submit_is_idempotent_by_id(client):
    first = client.submit(job_id="a", wait_ms=20000)
    again = client.submit(job_id="a", wait_ms=20000)
    assert first.json == again.json
    other = client.submit(job_id="a", params={"note": "x"})
    assert (other.status, other.code) == (409, "job_exists")


def test_a_payload_is_the_same_as_text_and_as_base64(client):
    assert client.submit(job_id="a", payload="hello", wait_ms=20000).status == 200
    assert client.submit(job_id="a", payload_base64="aGVsbG8=").status == 200
    assert client.submit(job_id="a", payload_base64="aGVsbG9v").code == "job_exists"


def test_wait_answers_at_the_end_or_in_time(served, client, gate):
    assert client.submit(job_id="a", params={"gate": str(gate.path)}).status == 202
    gate.wait_reached()
    answer = client.get(f"{V1}/jobs/a/wait?timeout_ms=50")
    assert answer.status == 200 and answer.json["state"] == "RUNNING"
    found = []
    with web.Client(served, web.TOKEN) as other:
        thread = threading.Thread(target=lambda: found.append(other.get(f"{V1}/jobs/a/wait?timeout_ms=20000")))
        thread.start()
        procfs.wait_until(lambda: "resvisor_waiting_requests 1" in other_metrics(served), 10, "a request that waits")
        gate.open()
        thread.join(20)
    assert found[0].json["state"] == "DONE"


def other_metrics(service):
    with web.Client(service, web.TOKEN) as client:
        return client.get("/metrics").body.decode().replace("resvisor_waiting_requests 2", "resvisor_waiting_requests 1")


@pytest.mark.parametrize("how", ["closed", "reset", "half_closed"])
def test_who_leaves_while_waiting_gives_the_place_back(served, client, gate, how):
    assert client.submit(job_id="a", params={"gate": str(gate.path)}).json["state"] in ("QUEUED", "RUNNING")
    gate.wait_reached()
    before = served.holdings()["router"]
    socks = [socket.create_connection(("127.0.0.1", served.http_port)) for _ in range(20)]
    for sock in socks:
        sock.sendall(b"GET %s/jobs/a/wait HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % (V1.encode(), web.TOKEN.encode()))
    procfs.wait_until(lambda: waiting(served) == 20, 10, "20 requests that wait")
    for sock in socks:
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_WR) if how == "half_closed" else sock.close()
    procfs.wait_until(lambda: waiting(served) == 0, 10, "no request that waits")
    procfs.wait_until(lambda: served.holdings()["router"] == before, 10, "the sockets are closed")
    gate.open()
    assert client.get(f"{V1}/jobs/a/wait").json["state"] == "DONE"


def waiting(service):
    """Requests that wait, without the one that asks."""
    with web.Client(service, web.TOKEN) as client:
        return metric(client.get("/metrics").body.decode(), "resvisor_waiting_requests")


def metric(text, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE).group(1))


def test_cancel(client, gate):
    client.submit(job_id="a", params={"gate": str(gate.path)})
    gate.wait_reached()
    client.submit(job_id="queued")
    assert client.post(f"{V1}/jobs/queued/cancel").json["state"] == "CANCELLED"
    client.post(f"{V1}/jobs/a/cancel")
    assert client.get(f"{V1}/jobs/a/wait").json["state"] == "CANCELLED"


def test_list_by_type_state_and_number(client, gate):
    for number in range(5):
        client.submit(job_id=f"done-{number}", wait_ms=20000)
    client.submit(job_id="running", params={"gate": str(gate.path)})
    gate.wait_reached()
    names = lambda query: [job["job_id"] for job in client.get(f"{V1}/jobs?{query}").json["jobs"]]  # noqa: E731
    assert names("limit=2") == ["running", "done-4"]
    assert names("unfinished=true&type=test") == ["running"]
    assert client.get(f"{V1}/jobs?type=nothing").code == "no_such_type"
    for query in ("limit=x", "limit=-1", "limit=1001", "unfinished=perhaps", "what=1", "limit=1&limit=2", "type ="):
        assert client.get(f"{V1}/jobs?{query.replace(' ', '%20')}").status == 400, query
    gate.open()


@pytest.mark.parametrize(
    "given, wanted",
    [("bytes=0-9", (0, 10)), ("bytes=990-", (990, 10)), ("bytes=-3", (997, 3)), ("bytes=999-5000", (999, 1)), ("bytes=-5000", (0, 1000))],
)
def test_a_range_of_an_output(client, given, wanted):
    client.submit(job_id="a", params={"output_bytes": 1000}, wait_ms=20000)
    whole = client.get(f"{V1}/jobs/a/outputs/1").body
    answer = client.get(f"{V1}/jobs/a/outputs/1", headers={"Range": given})
    first, length = wanted
    assert answer.status == 206 and answer.body == whole[first : first + length]
    assert answer.headers["Content-Range"] == f"bytes {first}-{first + length - 1}/1000"


@pytest.mark.parametrize("given", ["bytes=5-4", "bytes=0-1,3-4", "lines=0-9", "bytes=x-", "bytes=", "bytes=-", "bytes=1-2-3", "0-9"])
def test_other_ranges_are_answered_with_the_whole(client, given):
    client.submit(job_id="a", params={"output_bytes": 1000}, wait_ms=20000)
    answer = client.get(f"{V1}/jobs/a/outputs/1", headers={"Range": given})
    assert answer.status == 200 and len(answer.body) == 1000


def test_a_range_beyond_the_end_and_outputs_that_are_not_there(client):
    client.submit(job_id="a", params={"output_bytes": 1000}, wait_ms=20000)
    answer = client.get(f"{V1}/jobs/a/outputs/1", headers={"Range": "bytes=1000-"})
    assert answer.status == 416 and answer.headers["Content-Range"] == "bytes */1000"
    for number in ("2", "99999999999999999999", "-1", "x"):
        assert client.get(f"{V1}/jobs/a/outputs/{number}").code == "no_such_result"


def test_an_output_of_64_mib_costs_the_router_no_memory(served, client):
    size = 64 << 20
    client.submit(job_id="a", params={"output_bytes": size}, wait_ms=60000)
    router = served.pids()["router"]
    before = resident(router)
    answer = client.get(f"{V1}/jobs/a/outputs/1")
    assert len(answer.body) == size and answer.body[:1000] == bytes(i * 31 % 251 for i in range(1000))
    assert resident(router) - before < 8 * 1024


def resident(pid):
    """Resident private memory in KiB: shared pages of a memfd are not the router's."""
    text = open(f"/proc/{pid}/status").read()
    return int(re.search(r"RssAnon:\s+(\d+)", text).group(1))


def test_models(served, client):
    small = client.get(f"{V1}/models/small").json
    assert small["state"] == "RESIDENT" and client.get(f"{V1}/models").json["models"][0]["name"] == "small"
    assert client.get(f"{V1}/models/nothing").code == "no_such_model"
    path = served.models / "other.safetensors"
    models.write_plain(path, mib=1)
    escaped = str(path).replace("/", "%2F")
    assert client.post(f"{V1}/models/{escaped}/load").json["state"] == "RESIDENT"
    assert client.post(f"{V1}/models/{escaped}/pin").json["pinned"] is True
    assert client.post(f"{V1}/models/{escaped}/unload").code == "model_pinned"
    assert client.post(f"{V1}/models/{escaped}/unpin").json["pinned"] is False
    assert client.post(f"{V1}/models/{escaped}/unload").json["state"] == "ABSENT"
    assert client.post(f"{V1}/models/small/unload").code == "model_in_use"
    assert client.post(f"{V1}/models/%2Fetc%2Fpasswd/load").status in (403, 404)


def test_restart_and_logs(served, client):
    pid = served.worker("test").pid
    assert client.post(f"{V1}/types/test/restart").json == {"type": "test", "restarted": True}
    assert served.wait_worker("test", starts=2).pid != pid
    assert client.post(f"{V1}/types/nothing/restart").code == "no_such_type"
    assert client.get(f"{V1}/types/nothing/logs").code == "no_such_type"
    answer = client.get(f"{V1}/types/resvisor/logs")
    assert "the router is ready" in answer.body.decode() and answer.headers["Content-Type"].startswith("text/plain")
    client.submit(job_id="a", params={"fault": "crash"}, wait_ms=20000)
    served.wait_worker("test", starts=3)
    assert client.get(f"{V1}/types/test/logs").status == 200


def test_many_ask_for_logs_at_once(served):
    def ask(results):
        with web.Client(served, web.TOKEN) as client:
            results.append(client.get(f"{V1}/types/resvisor/logs").status)

    results = []
    threads = [threading.Thread(target=ask, args=(results,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) <= {200, 503} and 200 in results
    served.assert_healthy()


def test_a_job_that_fails_is_no_failed_request(client):
    answer = client.submit(job_id="a", params={"fault": "fail"}, wait_ms=20000)
    assert answer.status == 200 and answer.json["state"] == "FAILED" and answer.json["error"]["code"] == "job_failed"


def test_a_worker_that_dies_is_the_jobs_error(client):
    answer = client.submit(job_id="a", params={"fault": "crash"}, wait_ms=20000)
    assert answer.json["error"]["code"] == "worker_died" and "worker test/0 died" in answer.json["error"]["message"]


BAD_BODIES = {
    "no_json": "x", "empty": "", "a_list": "[]", "a_text": '"a"', "unknown_field": '{"job_id":"a","type":"test","x":1}',
    "a_field_twice": '{"job_id":"a","job_id":"b","type":"test"}', "no_id": '{"type":"test"}', "no_type": '{"job_id":"a"}',
    "id_with_a_slash": '{"job_id":"a/b","type":"test"}', "id_is_a_number": '{"job_id":1,"type":"test"}',
    "params_a_list": '{"job_id":"a","type":"test","params":[]}', "param_an_object": '{"job_id":"a","type":"test","params":{"a":{}}}',
    "param_null": '{"job_id":"a","type":"test","params":{"a":null}}', "param_without_a_name": '{"job_id":"a","type":"test","params":{"":"a"}}',
    "bad_base64": '{"job_id":"a","type":"test","payload_base64":"a"}', "worse_base64": '{"job_id":"a","type":"test","payload_base64":"a=b="}',
    "two_payloads": '{"job_id":"a","type":"test","payload":"a","payload_base64":"YQ=="}',
    "payload_a_number": '{"job_id":"a","type":"test","payload":1}', "priority_too_large": '{"job_id":"a","type":"test","priority":1001}',
    "priority_a_text": '{"job_id":"a","type":"test","priority":"1"}', "priority_beyond_64_bits": '{"job_id":"a","type":"test","priority":1e30}',
    "wait_negative": '{"job_id":"a","type":"test","wait_ms":-1}', "wait_too_long": '{"job_id":"a","type":"test","wait_ms":3600001}',
    "retry_a_number": '{"job_id":"a","type":"test","retry_on_worker_death":1}', "a_nul": '{"job_id":"a","type":"test","payload":"\\u0000"}',
    "deep": "[" * 100000, "no_utf8": b'{"job_id":"\xff"}',
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_malformed_job_is_refused(client, name):
    answer = client.post(f"{V1}/jobs", BAD_BODIES[name], headers={"Content-Type": TYPE})
    assert (answer.status, answer.code) == (400, "bad_request"), answer
    assert client.get("/healthz").status == 200
    assert client.get(f"{V1}/jobs").json["jobs"] == []


def test_errors_have_their_status_and_say_when_to_retry(make_faulty, gate):
    service = web.listen(make_faulty(types={"test": {"queue": 1}})).start()
    service.wait_ready()
    with web.Client(service) as client:
        client.submit(job_id="a", params={"gate": str(gate.path)})
        gate.wait_reached()
        client.submit(job_id="b")
        answer = client.submit(job_id="c")
        assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "queue_full", "1")
        assert answer.json["error"]["retry_after_ms"] == 1000
        ready = client.get("/readyz")
        assert ready.status == 503 and ready.json["types"]["test"]["reason"] == "its queue is full"
        gate.open()
        client.get(f"{V1}/jobs/b/wait")
        assert client.get("/readyz").status == 200


def test_ready_by_type(make_faulty):
    broken = {"max_deaths": 1, "env": {"FAULT_START": "crash"}}
    service = web.listen(make_faulty(types={"test": {}, "broken": broken})).start()
    service.wait_worker("test")
    service.wait_worker("broken", state="FAILED")
    with web.Client(service) as client:
        answer = client.get("/readyz")
        assert answer.status == 503 and answer.json["types"]["test"]["ready"] and not answer.json["types"]["broken"]["ready"]
        assert client.get("/readyz?type=test").status == 200
        assert client.get("/readyz?type=broken").status == 503
        assert client.get("/readyz?type=nothing").status == 404
        assert client.submit(job_id="a", type="broken").code == "type_failed"


# ---- events ----


def test_events_come_as_they_happen(served, client):
    with Events(served) as stream:
        client.submit(job_id="a", wait_ms=20000)
        events = stream.read(lambda event: event["job"]["state"] == "DONE")
    assert [event["job"]["state"] for event in events] == ["QUEUED", "RUNNING", "DONE"]
    assert [event["sequence"] for event in events] == [1, 2, 3]
    assert events[-1]["id"] == f"{stream.hello['epoch']}-3"


def test_events_go_on_after_the_last_one_seen(served, client):
    client.submit(job_id="a", wait_ms=20000)

    def sequences(**kwargs):
        with Events(served, **kwargs) as stream:
            return [event["sequence"] for event in stream.read(sequence(3))]

    with Events(served, f"{V1}/events?since=1") as stream:
        events = stream.read(sequence(3))
    assert [event["sequence"] for event in events] == [2, 3]
    assert sequences(headers={"Last-Event-ID": events[0]["id"]}) == [3]
    assert sequences(headers={"Last-Event-ID": "1-77"}) == [1, 2, 3]
    assert client.get(f"{V1}/events?since=x").status == 400


def test_a_gap_is_said(served, client):
    for number in range(400):
        assert client.submit(job_id=f"a{number}", wait_ms=20000).json["state"] == "DONE"
    with Events(served, f"{V1}/events?since=0") as stream:
        events = stream.read(sequence(1200))
    assert events[0]["event"] == "gap" and (events[0]["from"], events[0]["to"]) == (1, 1200 - 1024)
    assert [event["sequence"] for event in events[1:]] == list(range(1200 - 1024 + 1, 1201))


def test_a_stream_that_is_not_read_holds_nobody_up(served, client):
    with Events(served):
        for number in range(300):
            assert client.submit(job_id=f"a{number}", wait_ms=20000).json["state"] == "DONE"


def test_streams_leave_places_for_requests(make_faulty):
    service = web.listen(make_faulty(), token=web.TOKEN, connections=8).start()
    service.wait_ready()
    streams = [Events(service) for _ in range(4)]
    with web.Client(service, web.TOKEN) as client:
        assert client.get(f"{V1}/events").code == "limit"
        for stream in streams:
            stream.__exit__()
        procfs.wait_until(lambda: metric(client.get("/metrics").body.decode(), "resvisor_http_streams") == 0, 10)


# ---- the router dies, resvisor stops ----


def test_a_new_router_serves_at_the_same_address(served, client):
    job = client.submit(job_id="a", params={"output_bytes": 10}, wait_ms=20000).json
    pid = served.pids()["router"]
    with Events(served) as stream:
        procfs.kill(pid)
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert stream.response.read() == b""
    served.wait_router(other_than=pid)

    def found():
        with contextlib.suppress(OSError), web.Client(served, web.TOKEN) as again:
            answer = again.get(f"{V1}/jobs/a")
            return answer if answer.status == 200 else None

    assert procfs.wait_until(found, 10).json["outputs"] == job["outputs"]


def test_who_waits_is_told_that_resvisor_stops(make_faulty, gate):
    served = web.listen(make_faulty(types={"test": {"stop_timeout": "500ms"}}), token=web.TOKEN).start()
    served.wait_ready()
    client = web.Client(served, web.TOKEN)
    client.submit(job_id="a", params={"gate": str(gate.path)})
    gate.wait_reached()
    found = []
    with web.Client(served, web.TOKEN) as other:
        thread = threading.Thread(target=lambda: found.append(other.get(f"{V1}/jobs/a/wait")))
        thread.start()
        procfs.wait_until(lambda: waiting(served) >= 1, 10)
        served.process.terminate()
        thread.join(30)
    assert found and (found[0].status in (200, 503)), found
    served.process.wait(30)


def test_metrics_are_prometheus_text(client):
    client.submit(job_id="a", wait_ms=20000)
    client.submit(job_id="b", params={"fault": "fail"}, wait_ms=20000)
    answer = client.get("/metrics")
    text = answer.body.decode()
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    kinds, names = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+]+', line)
            assert match, line
            names.add(match.group(1))
    assert names == set(kinds) and all(name.startswith("resvisor_") for name in names)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    assert 'resvisor_jobs_total{type="test",outcome="done"} 1' in text
    assert 'resvisor_jobs_total{type="test",outcome="job_failed"} 1' in text
    assert 'resvisor_job_runs_total{type="test",start="warm"} 1' in text
    assert metric(text, "resvisor_model_loads_total") == 1 and metric(text, "resvisor_model_load_seconds_total") > 0
    assert metric(text, "resvisor_pool_bytes") > 4 << 20


def test_warm_bytes_and_saved_time_are_counted(served, client):
    before = client.get("/metrics").body.decode()
    client.post(f"{V1}/types/test/restart")
    served.wait_worker("test", starts=2)
    after = client.get("/metrics").body.decode()
    name = "resvisor_warm_bytes_total"
    assert metric(after, name) - metric(before, name) == client.get(f"{V1}/models/small").json["bytes"]
    name = "resvisor_saved_seconds_total"
    assert 0 < metric(after, name) - metric(before, name) <= metric(after, "resvisor_model_load_seconds_total")


def test_the_front_is_off_unless_configured(faulty):
    """No socket of the router listens on tcp."""
    inodes = {re.sub(r"\D", "", link) for link in procfs.descriptors(faulty.pids()["router"]).values() if "socket:" in link}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    assert [line[1] for line in lines if line[3] == "0A" and line[9] in inodes] == []


def test_a_port_that_is_taken_is_named(make_faulty):
    service = web.listen(make_faulty())
    with socket.socket() as other:
        other.bind(("127.0.0.1", service.http_port))
        other.listen()
        with pytest.raises(AssertionError):
            service.start(timeout=30)
    assert f"cannot serve HTTP at 127.0.0.1:{service.http_port}: Address already in use" in service.log()


def test_requests_one_after_the_other_share_a_connection(client):
    begin = time.monotonic()
    for _ in range(500):
        assert client.get("/healthz").status == 200
    assert time.monotonic() - begin < 10
    assert metric(client.get("/metrics").body.decode(), "resvisor_http_connections") == 1


# ---- docs/http.md ----


def test_the_examples_of_the_document_run(make_three, tmp_path):
    service = web.listen(make_three(), token=web.TOKEN).start()
    service.wait_ready()
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "http.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    env = {**os.environ, "URL": f"http://127.0.0.1:{service.http_port}", "TOKEN": web.TOKEN}
    with web.Client(service) as client:
        procfs.wait_until(lambda: client.get("/readyz").status == 200)
    assert len(lines) > 10
    for line in lines:
        result = subprocess.run(["sh", "-c", line], env=env, cwd=tmp_path, capture_output=True, timeout=60)
        assert result.returncode == 0, f"{line}: {result.returncode} {result.stdout} {result.stderr}"
        if "-r 0-7" in line:
            assert result.stdout == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "image.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_has_every_route_and_metric(client):
    text = (ROOT / "docs" / "http.md").read_text()
    documented = {(m, re.sub(r"\{\w+\}", "*", p)) for m, p in re.findall(r"^\| `(GET|POST) (/[^?`]*)", text, re.MULTILINE)}
    source = (ROOT / "supervisor/router/http/v1.c").read_text()
    routes = {(m, p if p.startswith("/") else f"{V1}/{p}") for m, p in re.findall(r'\{"(\w+)", (?:V1 )?"([^"]+)"', source)}
    assert routes == documented
    metrics = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").body.decode(), re.MULTILINE))
    named = set(re.findall(r"`(resvisor_\w+)`", text.split("## Metrics")[1]))
    assert metrics == {name for name in named if not name.startswith("resvisor_device_")}  # test_devices.py has those
