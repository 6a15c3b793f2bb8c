"""A peer on a local socket of resvisor, speaking control.proto frames: honest by default, hostile on request."""

import array
import itertools
import os
import select
import socket

from . import placement
from .protos import FRAME_MAX, PROTOCOL_VERSION, control_pb2, rpc_pb2

FDS_MAX = 253
CUDA_IPC = 3  # enum rv_backend_id: the one without descriptors
TIMEOUT_S = 30.0


class Refused(Exception):
    """An Error frame as an answer."""

    def __init__(self, error):
        super().__init__(f"{rpc_pb2.ErrorCode.Name(error.code)}: {error.message}")
        self.code = error.code
        self.error = error


class Dropped(Exception):
    """The other side closed the connection."""


def attach_to(model, **fields):
    """An Attach where the suite has its models."""
    return control_pb2.Attach(model=str(model), **{"device": placement.DEVICE, **fields})


class ControlPeer:
    """One connection. `role` is what the Hello claims; hello=False sends none."""

    def __init__(self, path, role=control_pb2.ROLE_CLIENT, hello=True, version=PROTOCOL_VERSION):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        self.ids = itertools.count(1)
        self.hello_reply = None
        self.progress = []
        try:
            self.socket.connect(str(path))
            if hello:
                frame = control_pb2.Frame(
                    hello=control_pb2.Hello(version=version, role=role, pid=os.getpid(), name="tests", instance="tests")
                )
                self.hello_reply = self.request(frame)[0].hello_reply
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()

    def send_bytes(self, data, fds=()):
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], control, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Dropped(str(error)) from error

    def send(self, frame, fds=()):
        self.send_bytes(frame.SerializeToString(), fds)

    def receive(self, timeout=TIMEOUT_S):
        """(frame, descriptors); Dropped when the peer has closed. Spilled bodies are read in."""
        self.socket.settimeout(timeout)
        space = socket.CMSG_SPACE(FDS_MAX * 4)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(FRAME_MAX + 1, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:
            raise Dropped(str(error)) from error
        fds = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", payload[: len(payload) - len(payload) % 4]))
        if not data:
            for fd in fds:
                os.close(fd)
            raise Dropped("end of file")
        frame = control_pb2.Frame.FromString(data)
        if frame.WhichOneof("body") == "spill":
            body = fds.pop(0)
            try:
                frame = control_pb2.Frame.FromString(os.pread(body, frame.spill.size, 0))
            finally:
                os.close(body)
        return frame, fds

    def request(self, frame, fds=(), timeout=TIMEOUT_S):
        """Sends a request and returns (answer, descriptors). Progress on the way is kept in self.progress."""
        frame.id = next(self.ids)
        self.send(frame, fds)
        while True:
            answer, received = self.receive(timeout)
            if answer.WhichOneof("body") == "load_progress":
                self.progress.append((answer.load_progress.bytes_done, answer.load_progress.bytes_total))
                continue
            if answer.id != frame.id:
                for fd in received:
                    os.close(fd)
                continue
            if answer.WhichOneof("body") == "error":
                raise Refused(answer.error)
            return answer, received

    def wait_dropped(self, timeout=TIMEOUT_S):
        """Reads until the other side closes."""
        while True:
            try:
                _, fds = self.receive(timeout)
            except Dropped:
                return
            for fd in fds:
                os.close(fd)

    def has_answer(self, timeout=0.0):
        return bool(select.select([self.socket], [], [], timeout)[0])

    # ---- requests ----

    def attach(self, model, fd=None, want_progress=False, deadline_ms=0, timeout=TIMEOUT_S, device=placement.DEVICE):
        """(AttachReply, index descriptor, [arena descriptors])."""
        frame = control_pb2.Frame(
            attach=control_pb2.Attach(
                model=str(model), by_descriptor=fd is not None, want_progress=want_progress, deadline_ms=deadline_ms,
                device=device,
            )
        )
        answer, fds = self.request(frame, [fd] if fd is not None else [], timeout)
        assert answer.WhichOneof("body") == "attach_reply", answer
        with_descriptor = [arena for arena in answer.attach_reply.arenas if arena.backend != CUDA_IPC]
        assert len(fds) == 1 + len(with_descriptor), (answer, fds)
        return answer.attach_reply, fds[0], fds[1:]

    def detach(self, lease_id):
        return self.request(control_pb2.Frame(detach=control_pb2.Detach(lease_id=lease_id)))

    def status(self):
        return self.request(control_pb2.Frame(status_request=rpc_pb2.StatusRequest()))[0].status

    def model(self, action, model, timeout=TIMEOUT_S, device=placement.DEVICE):
        request = rpc_pb2.ModelRequest(action=action, model=str(model), device=device)
        frame = control_pb2.Frame(model_request=request)
        return self.request(frame, timeout=timeout)[0].model_status

    def rpc(self, request, timeout=TIMEOUT_S):
        """A Request to the router's local socket; (Reply, descriptors)."""
        request.version = 1
        answer, fds = self.request(control_pb2.Frame(rpc_request=request), timeout=timeout)
        return answer.rpc_reply, fds
