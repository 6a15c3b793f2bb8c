"""Nothing that a client does by HTTP blocks or ends the router, or keeps the others out for longer than the limits say."""

import contextlib
import http.client
import resource
import socket
import struct
import threading
import time

import pytest
from harness import http as web
from harness import procfs

V1 = "/resvisor/v1"
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
TIMEOUT_S = 1


@pytest.fixture
def served(make_faulty):
    service = web.listen(make_faulty(), timeout=f"{TIMEOUT_S}s").start()
    service.wait_ready()
    return service


def assert_serves(service):
    with web.Client(service) as client:
        assert client.get("/healthz").status == 200
        assert client.submit(job_id=f"check-{time.monotonic_ns()}", wait_ms=20000).json["state"] == "DONE"


def metric(service, name):
    with web.Client(service) as client:
        text = client.get("/metrics").body.decode()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[1])


@pytest.mark.slow
def test_ten_thousand_connections_one_after_the_other(served):
    served.wait_quiet()
    held, memory = served.holdings(), procfs.rss(served.pids()["router"])
    for number in range(10000):
        with web.raw(served) as sock:
            if number % 3 == 1:
                sock.sendall(HEAD[: number % 30])
            elif number % 3 == 2:
                sock.sendall(HEAD + b"\r\n")
                assert sock.recv(12) == b"HTTP/1.1 200"
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_serves(served)
    served.close_control()
    served.wait_quiet()
    procfs.wait_until(lambda: metric(served, "resvisor_http_connections") <= 1, 10)
    procfs.wait_until(lambda: served.holdings()["router"][0] <= held["router"][0], 10, "no descriptor is left")
    assert procfs.rss(served.pids()["router"]) < memory + (8 << 20)


def test_more_connections_than_the_limit(make_faulty):
    service = web.listen(make_faulty(), connections=20, timeout="2s").start()
    service.wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(web.raw(service)).sendall(HEAD)
        answers = [web.exchange(service, HEAD + b"\r\n") for _ in range(20)]
        assert {status for status, _ in answers} <= {0, 503} and any(status == 503 for status, _ in answers)
        full = next(answer for status, answer in answers if status == 503)
        head, body = full.split(b"\r\n\r\n")
        assert b"Retry-After: 1" in head and f"Content-Length: {len(body)}".encode() in head and b'"limit"' in body
        procfs.wait_until(lambda: web.exchange(service, HEAD + b"Connection: close\r\n\r\n")[0] == 200, 10, "places after http.timeout")
    assert_serves(service)


def test_many_clients_at_once(served):
    failed = []

    def work(number):
        try:
            with web.Client(served) as client:
                for k in range(20):
                    assert client.submit(job_id=f"{number}-{k}", wait_ms=60000).json["state"] == "DONE"
                    assert client.get("/healthz").status == 200
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_slowloris(served):
    """A byte now and then does not keep a place for longer than http.timeout."""
    with web.raw(served) as sock:
        begin = time.monotonic()
        sock.sendall(HEAD)
        sock.settimeout(0.05)
        while time.monotonic() - begin < 20:
            with contextlib.suppress(TimeoutError):
                if sock.recv(100) == b"":
                    break
            with contextlib.suppress(OSError):
                sock.sendall(b"A: b\r\n")
        assert TIMEOUT_S * 0.8 < time.monotonic() - begin < TIMEOUT_S + 3
    assert metric(served, "resvisor_http_expired_connections_total") == 1


def test_a_body_that_never_ends_in_time(served):
    with web.raw(served) as sock:
        begin = time.monotonic()
        sock.sendall(b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n" % V1.encode())
        sock.settimeout(0.05)
        while time.monotonic() - begin < 20:
            with contextlib.suppress(TimeoutError):
                if sock.recv(100) == b"":
                    break
            with contextlib.suppress(OSError):
                sock.sendall(b" ")
        assert time.monotonic() - begin < 3 * TIMEOUT_S + 3
    assert_serves(served)


def test_an_idle_connection_is_ended(served):
    with web.raw(served) as sock:
        sock.sendall(HEAD + b"\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        assert sock.recv(1000) == b""
        assert time.monotonic() - begin < 3 * TIMEOUT_S + 3


def test_a_reader_that_stops_reading(served, gate):
    """The answer waits in the socket; everybody else is served; after a time it is ended."""
    with web.Client(served) as client:
        client.submit(job_id="big", params={"output_bytes": 64 << 20}, wait_ms=60000)
    router = served.pids()["router"]
    before = ticks(router)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(web.raw(served)) for _ in range(10)]
        for sock in socks:
            sock.sendall(b"GET %s/jobs/big/outputs/1 HTTP/1.1\r\nHost: localhost\r\n\r\n" % V1.encode())
            assert sock.recv(10)
        assert_serves(served)
        procfs.wait_until(lambda: metric(served, "resvisor_http_connections") <= 1, 20, "the stalled ones are ended")
    assert ticks(router) - before < 200


@pytest.mark.parametrize("size", [2 << 20, 64 << 20])
def test_a_body_that_is_too_large(served, size):
    with web.Client(served) as client:
        try:
            answer = client.post(f"{V1}/jobs", b" " * size, headers={"Content-Type": "application/json"})
            assert (answer.status, answer.code) == (413, "too_large")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer was there before all was sent
    assert_serves(served)


def test_chunks_that_never_end(served):
    with web.raw(served) as sock:
        sock.sendall(b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % V1.encode())
        with pytest.raises(OSError):
            for _ in range(10000):
                sock.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
    assert_serves(served)


def test_chunks_that_are_too_many_get_an_answer(served):
    body = b"".join(b"10000\r\n" + b" " * 65536 + b"\r\n" for _ in range(32)) + b"0\r\n\r\n"
    status, _ = web.exchange(
        served, b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % V1.encode() + body
    )
    assert status == 413


@pytest.mark.parametrize("chunk", [b"-1\r\n", b"x\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabcdefgh\r\n", b"5;" + b"a" * 100000, b"\r\n"])
def test_malformed_chunks(served, chunk):
    status, _ = web.exchange(
        served, b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % V1.encode() + chunk
    )
    assert status in (0, 400, 413)
    assert_serves(served)


def test_heads_that_are_too_large(served):
    many = b"".join(b"A%d: b\r\n" % number for number in range(100))
    assert web.exchange(served, HEAD + many + b"\r\n")[0] == 431
    assert web.exchange(served, HEAD + b"A: " + b"b" * 20000 + b"\r\n\r\n")[0] == 431
    assert web.exchange(served, HEAD + b"A: " + b"b" * 1000000 + b"\r\n\r\n")[0] in (0, 413, 431)
    assert_serves(served)


def test_noise(served):
    import random

    noise = random.Random(7)
    for number in range(300):
        data = noise.randbytes(noise.randrange(1, 3000))
        with contextlib.suppress(OSError), web.raw(served) as sock:
            sock.sendall(data if number % 2 else HEAD + data + b"\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            web.read_all(sock)
    assert_serves(served)


def test_the_router_out_of_descriptors_goes_on(served):
    """At the limit of open files connections are refused, and workers still get theirs."""
    router = served.pids()["router"]
    open_now = procfs.descriptor_count(router)
    resource.prlimit(router, resource.RLIMIT_NOFILE, (open_now + 100, open_now + 100))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(web.raw(served))
        served.cli("jobs")
    procfs.wait_until(lambda: web.exchange(served, HEAD + b"Connection: close\r\n\r\n")[0] == 200, 20)
    served.assert_healthy()


def test_who_waits_costs_nothing(served, gate):
    """40 clients wait for one job: the router sleeps."""
    with web.Client(served) as client:
        client.submit(job_id="a", params={"gate": str(gate.path)})
    gate.wait_reached()
    router = served.pids()["router"]
    with contextlib.ExitStack() as stack:
        for number in range(40):
            sock = stack.enter_context(web.raw(served))
            more = HEAD + b"\r\n" if number % 2 else b""  # bytes behind a request that waits
            sock.sendall(b"GET %s/jobs/a/wait HTTP/1.1\r\nHost: localhost\r\n\r\n" % V1.encode() + more)
        procfs.wait_until(lambda: metric(served, "resvisor_waiting_requests") >= 40, 10)
        before = ticks(router)
        threading.Event().wait(1)
        assert ticks(router) - before <= 3
    gate.open()


def ticks(pid):
    """CPU time in hundredths of a second."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_clients_that_go_in_every_state(served):
    """Connections cut at each byte of a request and of its answer."""
    body = b'{"job_id":"cut","type":"test","params":{"output_bytes":"1000"},"wait_ms":1000}'
    request = b"POST %s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (V1.encode(), len(body)) + body
    for cut in range(0, len(request) + 1, 3):
        with web.raw(served) as sock:
            sock.sendall(request[:cut])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", cut % 2, 0))
    for cut in range(0, 2000, 97):
        with web.raw(served) as sock:
            sock.sendall(b"GET %s/jobs/cut/outputs/1 HTTP/1.1\r\nHost: localhost\r\n\r\n" % V1.encode())
            sock.recv(max(cut, 1))
    assert_serves(served)
    procfs.wait_until(lambda: metric(served, "resvisor_http_connections") <= 1, 10)


@pytest.mark.smoke
def test_a_short_way_through_everything(served):
    with web.Client(served) as client, contextlib.suppress(http.client.HTTPException):
        assert client.get(f"{V1}/status").status == 200
        assert client.get(f"{V1}/jobs").status == 200
        assert client.get("/metrics").status == 200
    assert_serves(served)
