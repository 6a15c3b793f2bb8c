"""The smallest useful gateway: submit a job, survive everything that may go wrong on the way, fetch its outputs.

    pip install pynng protobuf grpcio-tools
    python -m grpc_tools.protoc -I PREFIX/share/resvisor --python_out=. rpc.proto
    python gateway.py ipc:///run/resvisor/rpc/rpc.ipc image seed=7
"""

import itertools
import sys
import time
import uuid

import pynng
import rpc_pb2 as rpc

MESSAGE_MAX = 768 * 1024  # bytes
WAIT_MS = 20_000  # how long the router may hold one answer back
ANSWER_MS = WAIT_MS + 10_000
GIVE_UP_S = 600
RETRYABLE = (rpc.ERROR_NOT_READY, rpc.ERROR_QUEUE_FULL, rpc.ERROR_LIMIT)
ENDED = (rpc.JOB_DONE, rpc.JOB_FAILED, rpc.JOB_CANCELLED)
ids = itertools.count(1)


class Refused(Exception):
    pass


def call(socket, token="", **body):
    """One request. Every request is safe to repeat, so no answer and "try again" are answered by the same request."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        request = rpc.Request(version=1, id=next(ids), token=token, **body)
        try:
            socket.send(request.SerializeToString())
            reply = rpc.Reply.FromString(socket.recv())
        except pynng.Timeout:
            if time.monotonic() > deadline:
                raise
            continue
        if reply.error.code == rpc.ERROR_OK:
            return reply
        if reply.error.code not in RETRYABLE or time.monotonic() > deadline:
            raise Refused(f"{rpc.ErrorCode.Name(reply.error.code)}: {reply.error.message} ({reply.error.remedy})")
        time.sleep(max(reply.error.retry_after_ms, 100) / 1000)


def run(socket, kind, params):
    """Submits a job and waits for its end. After a restart of the router the same Submit finds the job, or queues it again."""
    submit = rpc.Submit(job_id=str(uuid.uuid4()), type=kind, wait_ms=WAIT_MS)
    for key, value in params.items():
        submit.params.add(key=key, value=value)
    while True:
        job = call(socket, submit=submit).job
        if job.state in ENDED:
            return job
        print(f"{job.job_id}: {job.progress_done} of {job.progress_total} {job.progress_text}")


def fetch(socket, job_id, number, path):
    offset = 0
    with open(path, "wb") as file:
        while True:
            piece = call(socket, fetch=rpc.Fetch(job_id=job_id, output=number, offset=offset)).piece
            file.write(piece.data)
            offset += len(piece.data)
            if offset >= piece.total:
                return


def main(address, kind, *params):
    with pynng.Req0(recv_max_size=MESSAGE_MAX, recv_timeout=ANSWER_MS, send_timeout=ANSWER_MS) as socket:
        socket.dial(address, block=False)
        job = run(socket, kind, dict(param.split("=", 1) for param in params))
        if job.state != rpc.JOB_DONE:
            raise SystemExit(f"{job.job_id}: {rpc.ErrorCode.Name(job.error.code)}: {job.error.message}")
        for number, output in enumerate(job.outputs):
            fetch(socket, job.job_id, number, output.name)
            print(f"{output.name}: {output.size} bytes, {output.content_type}")


if __name__ == "__main__":
    main(*sys.argv[1:])
