"""Hostile and broken peers on every socket: only that peer is dropped, and nothing is left of it."""

import array
import os
import random
import resource
import select
import socket
import struct
import threading

import pytest

from harness import models, procfs
from harness.control import ControlPeer, Dropped, Refused, attach_to
from harness.jobs import Jobs
from harness.protos import FRAME_MAX, control_pb2, rpc_pb2

CONTROL, ROUTER = "control/resvisor.sock", "control/router.sock"
SOCKETS = [CONTROL, ROUTER]


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def field(number, wire, payload):
    return varint(number << 3 | wire) + payload


def nested(number, body):
    return field(number, 2, varint(len(body)) + body)


def deep(levels):
    body = b""
    for _ in range(levels):
        body = nested(71, nested(13, nested(1, body)))
        if len(body) > FRAME_MAX - 64:
            break
    return body[: FRAME_MAX - 8]


def frame(**body):
    return control_pb2.Frame(id=1, **body).SerializeToString()


HOSTILE = {
    "one_byte": b"\xff",
    "zeros": b"\0" * 100,
    "noise": random.Random(1).randbytes(2000),
    "noise_full": random.Random(2).randbytes(FRAME_MAX),
    "length_beyond_end": field(10, 2, varint(1 << 30)),
    "length_overflows": field(10, 2, varint(2**64 - 1)),
    "empty_repeated_messages": nested(71, nested(11, b"")) + nested(71, nested(11, nested(1, b"") * 30000)),
    "group_wire_type": field(10, 3, b""),
    "field_zero": b"\x00\x00",
    "no_body": control_pb2.Frame(id=7).SerializeToString(),
    "truncated": frame(hello=control_pb2.Hello(version=1, name="x" * 100))[:-5],
    "text_not_utf8": nested(3, nested(4, b"\xff\xfe\xfd")),
    "role_unknown": nested(3, field(1, 0, varint(1)) + field(2, 0, varint(99))),
    "deep": deep(5000),
    "status_before_hello": frame(status_request=rpc_pb2.StatusRequest()),
    "attach_before_hello": frame(attach=control_pb2.Attach(model="x")),
    "answer_frame": frame(hello_reply=control_pb2.HelloReply(version=1)),
    "loader_frame": frame(load_done=control_pb2.LoadDone()),
    "router_frame": frame(job_mark=control_pb2.JobMark()),
    "kill_worker": frame(kill_worker=control_pb2.KillWorker(worker="test/0", incarnation=1)),
}

AFTER_HELLO = {
    name: data for name, data in HOSTILE.items() if name not in ("status_before_hello", "attach_before_hello")
}  # fmt: skip
AFTER_HELLO["role_router_again"] = frame(hello=control_pb2.Hello(version=1, role=control_pb2.ROLE_ROUTER))
AFTER_HELLO["spill_without_descriptor"] = frame(spill=control_pb2.Spill(size=1000))
AFTER_HELLO["long_model_name"] = frame(attach=control_pb2.Attach(model="x" * 60000))


def test_hostile_first_frames_drop_only_their_peer(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            for name, data in HOSTILE.items():
                peer = ControlPeer(faulty.runtime / path, hello=False)
                try:
                    peer.send_bytes(data)
                    peer.wait_dropped(5)
                except (Dropped, OSError) as error:
                    assert not isinstance(error, TimeoutError), f"{path}: {name} was not dropped"
                finally:
                    peer.close()
        assert faulty.worker("test").starts == 1


def test_hostile_later_frames_are_refused_or_drop_only_their_peer(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            for name, data in AFTER_HELLO.items():
                with ControlPeer(faulty.runtime / path) as peer:
                    try:
                        peer.send_bytes(data)
                        answer, fds = peer.receive(5)
                    except (Dropped, BrokenPipeError):
                        continue
                    # A second Hello is honest whatever role it claims: the role comes from where the peer connected.
                    allowed = ("error", "hello_reply") if name == "role_router_again" else ("error",)
                    assert answer.WhichOneof("body") in allowed and not fds, f"{path}: {name}: {answer}"
        assert faulty.worker("test").starts == 1


def test_a_frame_that_is_too_long_drops_its_peer(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            with ControlPeer(faulty.runtime / path) as peer:
                try:
                    peer.send_bytes(b"\x0a" * (FRAME_MAX + 1))
                    peer.wait_dropped(5)
                except (Dropped, OSError) as error:
                    assert not isinstance(error, TimeoutError)


def test_an_empty_frame_is_not_an_endless_loop(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            with ControlPeer(faulty.runtime / path) as peer:
                try:
                    peer.socket.send(b"")
                    peer.wait_dropped(5)
                except (Dropped, OSError) as error:
                    assert not isinstance(error, TimeoutError)


def test_a_wrong_version_is_told_so(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            for version in (0, 2, 2**32 - 1):
                with pytest.raises((Refused, Dropped)) as caught:
                    ControlPeer(faulty.runtime / path, version=version)
                if isinstance(caught.value, Refused):
                    assert caught.value.code == rpc_pb2.ERROR_BAD_VERSION


def test_no_client_becomes_worker_loader_or_router_by_saying_so(faulty, watched):
    with watched(faulty):
        for role in (control_pb2.ROLE_WORKER, control_pb2.ROLE_LOADER, control_pb2.ROLE_ROUTER, control_pb2.ROLE_SUPERVISOR):
            with pytest.raises((Refused, Dropped)):
                with ControlPeer(faulty.runtime / CONTROL, role=role) as peer:
                    peer.send(control_pb2.Frame(id=9, worker_ready=control_pb2.WorkerReady()))
                    while True:
                        answer, _ = peer.receive(5)
                        if answer.WhichOneof("body") == "error":
                            raise Refused(answer.error)
        assert faulty.worker("test").starts == 1


def test_random_mutations_of_honest_frames(faulty, watched):
    seeds = [
        frame(hello=control_pb2.Hello(version=1, role=control_pb2.ROLE_CLIENT, name="n")),
        frame(attach=control_pb2.Attach(model="small", want_progress=True)),
        frame(status_request=rpc_pb2.StatusRequest()),
        frame(model_request=rpc_pb2.ModelRequest(action=rpc_pb2.MODEL_SHOW, model="small")),
        frame(rpc_request=rpc_pb2.Request(version=1, list=rpc_pb2.List(type="test", limit=3))),
    ]
    rng = random.Random(20)
    with watched(faulty):
        for path in SOCKETS:
            for _ in range(300):
                data = bytearray(rng.choice(seeds))
                for _ in range(rng.randint(1, 8)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                if rng.random() < 0.3:
                    data = data[: rng.randrange(len(data)) + 1]
                with ControlPeer(faulty.runtime / path) as peer:
                    try:
                        peer.send_bytes(bytes(data))
                        peer.send(control_pb2.Frame(id=77, status_request=rpc_pb2.StatusRequest()))
                        peer.socket.shutdown(socket.SHUT_WR)
                        peer.wait_dropped(5)
                    except (Dropped, OSError) as error:
                        assert not isinstance(error, TimeoutError), bytes(data)


def test_descriptors_that_nobody_asked_for_are_closed(faulty, watched):
    read_end, write_end = os.pipe()
    with watched(faulty):
        for path in SOCKETS:
            for count in (1, 16, 17, 100, 253):
                with ControlPeer(faulty.runtime / path) as peer:
                    try:
                        peer.send(control_pb2.Frame(id=1, status_request=rpc_pb2.StatusRequest()), [write_end] * count)
                        peer.receive(5)
                    except (Dropped, OSError) as error:
                        assert not isinstance(error, TimeoutError)
        os.close(write_end)
        assert select.select([read_end], [], [], 10)[0], "the last copy of the write end was closed"
        assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_peer_that_never_reads_is_dropped_and_others_are_served(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            with ControlPeer(faulty.runtime / path) as deaf, ControlPeer(faulty.runtime / path) as other:
                request = control_pb2.Frame(id=1, status_request=rpc_pb2.StatusRequest())
                if path == ROUTER:
                    request = control_pb2.Frame(id=1, rpc_request=rpc_pb2.Request(version=1, list=rpc_pb2.List()))
                deaf.socket.settimeout(2)
                try:
                    for _ in range(20_000):
                        deaf.send(request)
                except (Dropped, OSError):
                    pass  # dropped, or held back: both protect the others
                if path == ROUTER:
                    assert other.rpc(rpc_pb2.Request(list=rpc_pb2.List()))[0].error.code == 0
                else:
                    assert other.status().supervisor_pid > 0
        supervisor = faulty.status().supervisor_pid
        assert procfs.rss(supervisor) < 64 * 1024 * 1024


def test_a_client_that_takes_no_descriptors_blocks_nobody(faulty, watched):
    path = faulty.models / "other.safetensors"
    models.write_plain(path, mib=1)
    with watched(faulty):
        with faulty.peer() as greedy:
            for number in range(200):
                try:
                    greedy.send(control_pb2.Frame(id=number + 1, attach=attach_to(path)))
                except Dropped:  # it may be dropped for it while it still asks
                    break
            for _ in range(20):
                with faulty.peer() as peer:
                    _, index_fd, arena_fds = peer.attach(path)
                    for fd in [index_fd, *arena_fds]:
                        os.close(fd)
        procfs.wait_until(lambda: faulty.model(path).leases == 0, 10, "the end of the leases")
        faulty.control.model(rpc_pb2.MODEL_UNLOAD, path)


def test_a_client_killed_in_the_middle_leaks_nothing(faulty, watched):
    path = faulty.models / "other.safetensors"
    models.write_plain(path, mib=64)
    with watched(faulty):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    peer = faulty.peer()
                    peer.send(control_pb2.Frame(id=1, attach=attach_to(path, want_progress=True)))
                finally:
                    os.kill(os.getpid(), 9)
            os.waitpid(pid, 0)
        procfs.wait_until(lambda: faulty.model(path) is None or faulty.model(path).leases == 0, 20, "no lease")
        procfs.wait_until(lambda: faulty.model(path) is None or faulty.model(path).state != "LOADING", 20, "the load's end")
        if faulty.model(path) and faulty.model(path).state == "RESIDENT":
            faulty.control.model(rpc_pb2.MODEL_UNLOAD, path)


def test_more_clients_than_allowed_are_refused_and_the_rest_goes_on(make_service, watched):
    service = make_service({"clients": {"max": 8}}).start()
    held = []
    with watched(service):
        try:
            while len(held) < 20:
                held.append(service.peer())
        except (Refused, Dropped, OSError):
            pass
        assert 4 <= len(held) <= 8
        assert held[0].status().supervisor_pid > 0
        for peer in held:
            peer.close()
        procfs.wait_until(lambda: service.status().clients <= 2, 10, "the clients gone")


def test_leases_have_a_limit(make_service, watched):
    service = make_service({"clients": {"max_leases": 10}}).start()
    path = service.models / "m.safetensors"
    models.write_plain(path, mib=1)
    with watched(service):
        with service.peer() as peer:
            with pytest.raises(Refused) as refused:
                for _ in range(11):
                    _, index_fd, arena_fds = peer.attach(path)
                    for fd in [index_fd, *arena_fds]:
                        os.close(fd)
            assert refused.value.code == rpc_pb2.ERROR_LIMIT
        procfs.wait_until(lambda: service.model(path).leases == 0, 10, "the leases gone")
        service.control.model(rpc_pb2.MODEL_UNLOAD, path)


def test_descriptor_exhaustion_is_survived(faulty, watched):
    """With the supervisor's own limit at its present use, new clients wait or are refused; nothing spins or dies."""
    with watched(faulty):
        supervisor = faulty.status().supervisor_pid
        soft, hard = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        busy_before = cpu_ticks(supervisor)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (procfs.descriptor_count(supervisor) + 2, hard))
        held = []
        for _ in range(12):
            candidate = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            candidate.settimeout(2)
            held.append(candidate)
            try:
                candidate.connect(str(faulty.runtime / CONTROL))
            except OSError:
                break
        assert faulty.status().supervisor_pid == supervisor, "an old connection is served"
        stop = threading.Event()
        stop.wait(1.0)  # what is measured is one second of the supervisor's CPU time
        assert cpu_ticks(supervisor) - busy_before < 50, "it does not spin on accept"
        for candidate in held:
            candidate.close()
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (soft, hard))
        procfs.wait_until(lambda: connects(faulty), 10, "new clients are served again")


def cpu_ticks(pid):
    text = procfs.read(pid, "stat")
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[11]) + int(fields[12])


def connects(service):
    try:
        with service.peer() as peer:
            return peer.status().supervisor_pid > 0
    except (OSError, Dropped, Refused):
        return False


def test_the_loader_and_router_meet_descriptor_exhaustion(faulty, watched):
    with watched(faulty), Jobs(faulty) as jobs:
        router = faulty.status().router_pid
        soft, hard = resource.prlimit(router, resource.RLIMIT_NOFILE)
        assert jobs.run_done("test").outputs
        resource.prlimit(router, resource.RLIMIT_NOFILE, (procfs.descriptor_count(router), hard))
        try:
            job = jobs.submit("test", params={"output_bytes": 1000})
            assert job.job_id
        finally:
            resource.prlimit(router, resource.RLIMIT_NOFILE, (soft, hard))
        procfs.wait_until(lambda: jobs.get(job.job_id).state in (3, 4, 5), 30, "the end of the job")
        assert jobs.run_done("test").outputs
        faulty.wait_router()


def raw_nanomsg(path, data, timeout=2):
    """Speaks to a nanomsg ipc address without nanomsg: handshake for REQ, then any bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout)
        peer.connect(str(path))
        try:
            peer.sendall(data)
            while peer.recv(65536):
                pass
        except OSError:
            pass


HANDSHAKE = b"\0SP\0" + struct.pack(">HH", 48, 0)
IPC_MESSAGE = b"\x01"


def nanomsg_frame(body, length=None):
    return IPC_MESSAGE + struct.pack(">Q", len(body) if length is None else length) + body


RAW = {
    "noise": random.Random(3).randbytes(500),
    "wrong_handshake": b"\0XX\0" + b"\0" * 4,
    "wrong_protocol": b"\0SP\0" + struct.pack(">HH", 16, 0) + nanomsg_frame(b"hello"),
    "wrong_message_type": HANDSHAKE + b"\x07" + struct.pack(">Q", 4) + b"abcd",
    "length_huge": HANDSHAKE + nanomsg_frame(b"x", 2**63),
    "length_4gib": HANDSHAKE + nanomsg_frame(b"x", 2**32),
    "length_over_limit": HANDSHAKE + nanomsg_frame(b"\x80\0\0\1" + b"x" * (1024 * 1024)),
    "empty": HANDSHAKE + nanomsg_frame(b""),
    "no_request_id": HANDSHAKE + nanomsg_frame(b"ab"),
    "id_without_top_bit": HANDSHAKE + nanomsg_frame(b"\0\0\0\1" * 5),
    "id_only": HANDSHAKE + nanomsg_frame(b"\x80\0\0\1"),
    "protobuf_noise": HANDSHAKE + nanomsg_frame(b"\x80\0\0\1" + random.Random(4).randbytes(3000)),
    "many_small": HANDSHAKE + b"".join(nanomsg_frame(b"\x80\0\0\1" + bytes([i % 256])) for i in range(2000)),
}


def test_hostile_bytes_on_the_rpc_and_events_sockets(faulty, watched):
    """nanomsg aborts its process on some of these: then a new router comes, and nothing else has noticed."""
    worker = faulty.worker("test").pid
    with watched(faulty), Jobs(faulty) as jobs:
        for address in ("rpc/rpc.ipc", "rpc/events.ipc"):
            for name, data in RAW.items():
                faulty.wait_router()
                procfs.wait_until(lambda: (faulty.runtime / address).exists(), 10, address)
                raw_nanomsg(faulty.runtime / address, data, timeout=0.3)
                assert jobs.run_done("test").state == rpc_pb2.JOB_DONE, (address, name)
        faulty.wait_router()
        assert faulty.worker("test").pid == worker


def test_thousands_of_connections_come_and_go(faulty, watched):
    with watched(faulty):
        for path in SOCKETS:
            for _ in range(1000):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                    peer.connect(str(faulty.runtime / path))


def test_truncated_control_messages_close_what_came(faulty, watched):
    """A message whose descriptors do not fit: the receiver must close those that did."""
    with watched(faulty):
        null = os.open("/dev/null", os.O_RDONLY)
        for path in SOCKETS:
            with ControlPeer(faulty.runtime / path) as peer:
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 200))]
                try:
                    peer.socket.sendmsg([frame(attach=control_pb2.Attach(model="small", by_descriptor=True))], control)
                    peer.receive(5)
                except (Dropped, OSError) as error:
                    assert not isinstance(error, TimeoutError)
        os.close(null)
