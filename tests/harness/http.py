"""HTTP to a resvisor under test: by http.client, and byte by byte."""

import contextlib
import http.client
import json
import socket
import time

from . import models
from .service import FAULT_EXECUTOR, Service

TIMEOUT_S = 20
RETRY_STEP_S = 0.02
TOKEN = "a-token-for-tests"


def free_port():
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listen(service, token=None, **keys):
    """Gives the service (not started yet) an HTTP front on a free port; the same service."""
    service.http_port = free_port()
    service.config["http"] = {"listen": f"127.0.0.1:{service.http_port}", **keys}
    if token:
        file = service.folder / "token"
        file.write_text(token + "\n")
        file.chmod(0o600)
        service.config["http"]["token_file"] = str(file)
    return service


def start_small(folder, **kwargs):
    """A running service with HTTP, one type `test` of the fault executor, and a model `small`: for tests that share it."""
    service = listen(Service(folder), **kwargs)
    models.write_plain(service.models / "small.safetensors", mib=1)
    service.config["models"] = {"small": "small.safetensors"}
    service.config["types"] = {"test": {"executor": str(FAULT_EXECUTOR), "models": ["small"]}}
    service.start()
    service.wait_ready()
    return service


class Answer:
    def __init__(self, response, body):
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json["error"]["code"]

    def __repr__(self):
        return f"<{self.status} {dict(self.headers)} {self.body[:300]!r}>"


class Client:
    """One connection that is kept alive."""

    def __init__(self, service, token=None, timeout=TIMEOUT_S):
        self.connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=timeout)
        self.token = token

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def request(self, method, path, body=None, headers=None):
        headers = dict(headers or {})
        if self.token:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
            headers.setdefault("Content-Type", "application/json")
        while True:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
            answer = Answer(response, response.read())
            if answer.status != 503 or b'"not_ready"' not in answer.body:
                return answer
            time.sleep(RETRY_STEP_S)  # as the contract allows while the router has just started

    def get(self, path, **kwargs):
        return self.request("GET", path, **kwargs)

    def post(self, path, body=None, **kwargs):
        return self.request("POST", path, body, **kwargs)

    def submit(self, **fields):
        return self.post("/resvisor/v1/jobs", {"type": "test", **fields})


def wait_front(service, timeout=60):
    """Waits until ComfyUI's address answers: the router hears a moment after the supervisor that a worker is ready."""
    deadline = time.monotonic() + timeout
    while True:
        with Client(service) as client:
            answer = client.get("/users")
        if answer.status != 503:
            return
        assert time.monotonic() < deadline, answer
        time.sleep(RETRY_STEP_S)


@contextlib.contextmanager
def raw(service, timeout=TIMEOUT_S):
    with socket.create_connection(("127.0.0.1", service.http_port), timeout) as sock:
        yield sock


def read_all(sock):
    """What comes until the other side closes; a reset is an end too."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


def read_head(sock):
    found = b""
    while b"\r\n\r\n" not in found:
        data = sock.recv(1)
        if not data:
            break
        found += data
    return found


def exchange(service, data, timeout=TIMEOUT_S):
    """Sends bytes and reads until the other side closes: (status or 0, everything)."""
    with raw(service, timeout) as sock:
        sock.sendall(data)
        found = read_all(sock)
    return (int(found.split(b" ", 2)[1]) if found.startswith(b"HTTP/1.1 ") else 0), found
