"""A foreign client of resvisor's RPC: pynng and protobuf, and nothing of resvisor but proto/rpc.proto.

It exists to prove the contract from another language and another nanomsg implementation, and is short enough to be
copied as the start of a gateway:

    with Client("ipc:///run/resvisor/rpc/rpc.ipc") as client:
        job = client.submit("image", params={"seed": "1"}, wait_ms=60_000)
        data = client.fetch(job.job_id, 0)

Needs: pip install pynng protobuf grpcio-tools (or a protoc on the PATH instead of grpcio-tools).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import uuid

import pynng

MESSAGE_MAX = 768 * 1024  # bytes; a larger message is refused, a larger result is fetched in pieces
VERSION = 1
RESEND_MS = 60_000  # a request without an answer is sent again; all requests are safe to repeat
WAIT_SLACK_MS = 10_000  # how much longer than its own time a wait may take to be answered


def find_proto() -> pathlib.Path:
    """rpc.proto: of $RESVISOR_PROTO, the source tree, or an installation."""
    here = pathlib.Path(__file__).resolve()
    candidates = [pathlib.Path(os.environ["RESVISOR_PROTO"])] if "RESVISOR_PROTO" in os.environ else []
    candidates += [here.parents[2] / "proto" / "rpc.proto", pathlib.Path(sys.prefix) / "share" / "resvisor" / "rpc.proto"]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError("rpc.proto is at none of: " + ", ".join(map(str, candidates)))


def generate(proto: pathlib.Path, out: str) -> None:
    arguments = [f"-I{proto.parent}", f"--python_out={out}", proto.name]
    try:
        from grpc_tools import protoc
    except ImportError:
        subprocess.run(["protoc", *arguments], check=True)
        return
    if protoc.main(["protoc", *arguments]) != 0:
        raise RuntimeError(f"protoc cannot translate {proto}")


def load_messages():
    """The module of messages, generated for this run and removed at once."""
    with tempfile.TemporaryDirectory(prefix="resvisor-proto-") as out:
        generate(find_proto(), out)
        sys.path.insert(0, out)
        try:
            return importlib.import_module("rpc_pb2")
        finally:
            sys.path.remove(out)


pb = load_messages()

ENDED = (pb.JOB_DONE, pb.JOB_FAILED, pb.JOB_CANCELLED)


class RpcError(Exception):
    """A reply with an error: `code` is pb.ErrorCode, `name` its short name such as QUEUE_FULL."""

    def __init__(self, error) -> None:
        self.code = error.code
        self.name = pb.ErrorCode.Name(error.code).removeprefix("ERROR_")
        self.message = error.message
        self.remedy = error.remedy
        self.retry_after_ms = error.retry_after_ms
        super().__init__(f"{self.name}: {error.message}" + (f" ({error.remedy})" if error.remedy else ""))


class Client:
    """One connection, one request at a time. Use one Client per thread."""

    def __init__(self, address: str, token: str = "", timeout_ms: int = 30_000) -> None:
        self.token = token
        self.timeout_ms = timeout_ms
        self._ids = itertools.count(1)
        self._socket = pynng.Req0(recv_max_size=MESSAGE_MAX, resend_time=RESEND_MS, send_timeout=timeout_ms)
        self._socket.dial(address, block=False)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def exchange(self, data: bytes, timeout_ms: int | None = None):
        """Sends raw bytes and returns the Reply as it came, errors included."""
        self._socket.recv_timeout = timeout_ms or self.timeout_ms
        self._socket.send(data)
        return pb.Reply.FromString(self._socket.recv())

    def call(self, timeout_ms: int | None = None, **body):
        """call(get=pb.Get(job_id="x")): the Reply; RpcError if it carries an error."""
        request = pb.Request(version=VERSION, id=next(self._ids), token=self.token, **body)
        reply = self.exchange(request.SerializeToString(), timeout_ms)
        if reply.error.code != pb.ERROR_OK:
            raise RpcError(reply.error)
        if reply.version != VERSION or reply.id != request.id:
            raise RuntimeError(f"reply {reply.id} of version {reply.version} to request {request.id}")
        return reply

    def submit(self, type: str, job_id: str | None = None, *, model: str = "", params: dict[str, str] | None = None,
               payload: bytes = b"", priority: int = 0, retry: bool = False, wait_ms: int = 0):
        submit = pb.Submit(job_id=job_id or str(uuid.uuid4()), type=type, model=model, payload=payload,
                           priority=priority, retry_on_worker_death=retry, wait_ms=wait_ms)
        for key, value in (params or {}).items():
            submit.params.add(key=key, value=value)
        return self.call(self._waiting(wait_ms), submit=submit).job

    def wait(self, job_id: str, timeout_ms: int = 60_000):
        """The job at its end, or as it stands after timeout_ms."""
        return self.call(self._waiting(timeout_ms), wait=pb.Wait(job_id=job_id, timeout_ms=timeout_ms)).job

    def get(self, job_id: str):
        return self.call(get=pb.Get(job_id=job_id)).job

    def list(self, type: str = "", unfinished_only: bool = False, limit: int = 0):
        request = pb.List(type=type, unfinished_only=unfinished_only, limit=limit)
        return list(self.call(list=request).jobs.jobs)

    def cancel(self, job_id: str):
        return self.call(cancel=pb.Cancel(job_id=job_id)).job

    def fetch_piece(self, job_id: str, output: int = 0, offset: int = 0, length: int = 0):
        return self.call(fetch=pb.Fetch(job_id=job_id, output=output, offset=offset, length=length)).piece

    def fetch(self, job_id: str, output: int = 0) -> bytes:
        """A whole output, piece by piece."""
        data = bytearray()
        while True:
            piece = self.fetch_piece(job_id, output, len(data))
            data += piece.data
            if len(data) >= piece.total:
                return bytes(data)
            if not piece.data:
                raise RuntimeError(f"output {output} of {job_id} ended after {len(data)} of {piece.total} bytes")

    def events_since(self, sequence: int = 0):
        """(events, oldest sequence number still kept)"""
        events = self.call(events_since=pb.EventsSince(sequence=sequence)).events
        return list(events.events), events.oldest

    def status(self):
        return self.call(status=pb.StatusRequest()).status

    def model(self, name: str, action: int = pb.MODEL_SHOW, timeout_ms: int = 300_000):
        return self.call(timeout_ms, model=pb.ModelRequest(action=action, model=name)).model

    def _waiting(self, wait_ms: int) -> int:
        return max(self.timeout_ms, wait_ms + WAIT_SLACK_MS)


class Subscriber:
    """Events as they are published. A gap in the sequence numbers is asked for by Client.events_since."""

    def __init__(self, address: str, timeout_ms: int = 30_000) -> None:
        self._socket = pynng.Sub0(recv_max_size=MESSAGE_MAX, recv_timeout=timeout_ms, topics=b"")
        self._socket.dial(address, block=True)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_) -> None:
        self._socket.close()

    def next(self):
        return pb.Event.FromString(self._socket.recv())

    def until(self, condition):
        """All events up to the first that fulfils the condition."""
        events = []
        while not events or not condition(events[-1]):
            events.append(self.next())
        return events


def main(arguments: list[str]) -> int:
    """rpc_client.py ADDRESS [TYPE]: shows the status; with a type, runs one job and says how it ended."""
    if not 1 <= len(arguments) <= 2:
        print(main.__doc__, file=sys.stderr)
        return 2
    with contextlib.closing(Client(arguments[0], os.environ.get("RESVISOR_TOKEN", ""))) as client:
        if len(arguments) == 1:
            print(client.status())
            return 0
        job = client.submit(arguments[1], wait_ms=600_000)
        print(job)
        for i, output in enumerate(job.outputs):
            print(f"{output.name}: {len(client.fetch(job.job_id, i))} bytes fetched")
        return 0 if job.state == pb.JOB_DONE else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
