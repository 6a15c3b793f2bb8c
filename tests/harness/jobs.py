"""Jobs over the router's local socket: the messages of rpc.proto in control frames."""

import os
import time
import uuid

from .control import Dropped
from .protos import rpc_pb2

FINAL = (rpc_pb2.JOB_DONE, rpc_pb2.JOB_FAILED, rpc_pb2.JOB_CANCELLED)
JOB_TIMEOUT_S = 60
RETRY_CODES = (rpc_pb2.ERROR_NOT_READY,)
RETRY_STEP_S = 0.02


class RpcError(Exception):
    def __init__(self, error):
        super().__init__(f"{rpc_pb2.ErrorCode.Name(error.code)}: {error.message}")
        self.code = error.code
        self.error = error


class Jobs:
    """One connection to the router, made again when the router was restarted."""

    def __init__(self, service):
        self.service = service
        self.peer = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.peer:
            self.peer.close()
        self.peer = None

    def call(self, request, timeout=JOB_TIMEOUT_S):
        """One request, repeated as the contract allows while the router is away. (Reply, descriptors)."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self.peer is None:
                    self.peer = self.service.router_peer()
                reply, fds = self.peer.rpc(request, timeout)
            except (Dropped, OSError):
                self.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_STEP_S)
                continue
            if reply.error.code in RETRY_CODES and time.monotonic() < deadline:
                time.sleep(RETRY_STEP_S)
                continue
            if reply.error.code != rpc_pb2.ERROR_OK:
                raise RpcError(reply.error)
            return reply, fds

    def submit(self, type_name, job_id=None, params=None, wait_ms=0, **fields):
        """The Job as it stands; wait_ms as in rpc.proto."""
        request = rpc_pb2.Request(
            submit=rpc_pb2.Submit(
                job_id=job_id or f"test-{uuid.uuid4()}", type=type_name, wait_ms=wait_ms,
                params=[rpc_pb2.Param(key=key, value=str(value)) for key, value in (params or {}).items()], **fields,
            )
        )  # fmt: skip
        return self.call(request)[0].job

    def run(self, type_name, params=None, timeout=JOB_TIMEOUT_S, **fields):
        """Submits and waits for the end; the Job, whatever its end was."""
        return self.wait(self.submit(type_name, params=params, **fields).job_id, timeout)

    def run_done(self, type_name, params=None, **fields):
        """As run, and the job must be DONE."""
        job = self.run(type_name, params, **fields)
        assert job.state == rpc_pb2.JOB_DONE, f"{job}\n{self.service.log()}"
        return job

    def wait(self, job_id, timeout=JOB_TIMEOUT_S):
        """The job at its end."""
        job = self.call(rpc_pb2.Request(wait=rpc_pb2.Wait(job_id=job_id, timeout_ms=int(timeout * 1000))), timeout + 5)[0].job
        assert job.state in FINAL, f"not ended within {timeout} s: {job}\n{self.service.log()}"
        return job

    def get(self, job_id):
        return self.call(rpc_pb2.Request(get=rpc_pb2.Get(job_id=job_id)))[0].job

    def list(self, **fields):
        return list(self.call(rpc_pb2.Request(list=rpc_pb2.List(**fields)))[0].jobs.jobs)

    def type(self, name):
        """The router's TypeStatus: it knows what waits and runs."""
        status = self.call(rpc_pb2.Request(status=rpc_pb2.StatusRequest()))[0].status
        return next(t for t in status.types if t.name == name)

    def cancel(self, job_id):
        return self.call(rpc_pb2.Request(cancel=rpc_pb2.Cancel(job_id=job_id)))[0].job

    def output(self, job, number=0):
        """The bytes of an output: one descriptor, or pieces."""
        size, data = job.outputs[number].size, b""
        while True:
            reply, fds = self.call(
                rpc_pb2.Request(fetch=rpc_pb2.Fetch(job_id=job.job_id, output=number, offset=len(data)))
            )
            try:
                if fds:
                    return os.pread(fds[0], size, 0)
            finally:
                for fd in fds:
                    os.close(fd)
            data += reply.piece.data
            if len(data) >= size or not reply.piece.data:
                return data

    def output_named(self, job, name):
        names = [output.name for output in job.outputs]
        return self.output(job, names.index(name))
