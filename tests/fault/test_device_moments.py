"""Devices at bad moments: lost while they are tested, tested while a load is under way, stopped while clients hold their memory."""

import contextlib
import os
import resource
import signal

import pytest

from harness import procfs
from harness.control import Refused
from harness.device_standin import DeviceStandIn, devices, request_test, wait_state
from harness.protos import control_pb2, rpc_pb2

WAIT_S = 20
DEVICE = "cuda:0"
IPC_GOOD = "arena, = plan(); done([arena], [])"
VMM_GOOD = "arena = plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=2 * MIB)], [plain()])"

pytestmark = pytest.mark.host_memory  # they have devices of their own, which no driver knows


def load_frame():
    return control_pb2.Frame(id=7, model_request=rpc_pb2.ModelRequest(action=rpc_pb2.MODEL_LOAD, model="m", device=DEVICE))


def load(service):
    return service.control.model(rpc_pb2.MODEL_LOAD, "m", device=DEVICE)


# ---- a stop ----


@pytest.mark.parametrize("how", ["detaches", "closes", "keeps it"])
def test_a_stop_tells_clients_before_the_holder_s_memory_goes(make_scripted, how):
    service = make_scripted("cuda-ipc", cuda={"revoke_timeout": "1s" if how == "keeps it" else "60s"})
    service.standin.loads(IPC_GOOD)
    load(service)
    holder = devices(service)[0]["holder_pid"]
    with service.peer() as peer:
        reply, index_fd, _ = peer.attach("m", device=DEVICE)
        os.close(index_fd)
        service.close_control()
        procfs.kill(service.process.pid, signal.SIGTERM)
        revoked = peer.receive()[0].lease_revoke
        assert revoked.lease_id == reply.lease_id and "stopping" in revoked.reason
        assert not peer.has_answer(0.5), "it is not cut off: it has the memory still open"
        assert procfs.alive(holder) and service.standin.freed() == []
        if how == "detaches":
            peer.detach(reply.lease_id)
        if how != "closes":
            peer.wait_dropped()
    assert service.process.wait(WAIT_S) == 0
    service.assert_nothing_left()
    if how == "keeps it":
        assert "cuda.revoke_timeout" in service.log() or "have not let go" in service.log()


def test_a_second_stop_does_not_wait_for_clients(make_scripted):
    service = make_scripted("cuda-ipc", cuda={"revoke_timeout": "60s"})
    service.standin.loads(IPC_GOOD)
    load(service)
    with service.peer() as peer:
        _, index_fd, _ = peer.attach("m", device=DEVICE)
        os.close(index_fd)
        service.close_control()
        procfs.kill(service.process.pid, signal.SIGTERM)
        assert peer.receive()[0].lease_revoke.lease_id
        procfs.kill(service.process.pid, signal.SIGTERM)
        peer.wait_dropped()
    assert service.process.wait(WAIT_S) == 0
    service.assert_nothing_left()


# ---- a test, asked for at a bad moment ----


@pytest.mark.parametrize("moment", ["started", "admitted"])
def test_a_device_is_not_tested_under_a_load_that_has_begun(make_scripted, moment):
    service = make_scripted()
    service.standin.loads("wait('load'); " + VMM_GOOD if moment == "started" else "plan(); wait('load'); " + VMM_GOOD[16:])
    with service.peer() as peer:
        peer.send(load_frame())
        procfs.wait_until(lambda: service.standin.reached("load"), WAIT_S, "the loader")
        with pytest.raises(Refused) as refused:
            request_test(service, DEVICE)
        assert refused.value.code == rpc_pb2.ERROR_MODEL_IN_USE
        assert devices(service)[0]["state"] == "READY"
        service.standin.open("load")
        assert peer.receive()[0].model_status.state == "RESIDENT"
    service.assert_healthy()


def test_a_device_by_name_is_not_denied_before_the_search_has_ended(make_service, tmp_path):
    standin = DeviceStandIn(tmp_path)
    standin.does(test="wait('go'); found(); tests(); done()")
    service = make_service(program=standin.program).start()
    procfs.wait_until(lambda: standin.reached("go"), WAIT_S, "the self-test")
    with pytest.raises(Refused) as refused:
        request_test(service, DEVICE)
    assert refused.value.code == rpc_pb2.ERROR_NOT_READY
    standin.open("go")
    wait_state(service, "READY")
    assert request_test(service, DEVICE).devices[0].state == "READY"


# ---- a loss, at a bad moment ----


def test_a_loss_during_a_test_is_not_forgotten_when_the_test_passes(make_service, tmp_path):
    standin = DeviceStandIn(tmp_path)
    standin.does(watch="memory(); wait('xid'); event(1, xid=79); stay()")
    service = make_service(program=standin.program).start()
    wait_state(service, "READY")
    procfs.wait_until(lambda: standin.reached("xid"), WAIT_S, "the watch")
    standin.does(test="found(); tests(); wait('end'); done()")
    frame = control_pb2.Frame(id=9, device_request=rpc_pb2.DeviceRequest(action=rpc_pb2.DEVICE_TEST, device=DEVICE))
    with service.peer() as peer:
        peer.send(frame)
        procfs.wait_until(lambda: standin.reached("end"), WAIT_S, "the self-test")
        standin.open("xid")
        wait_state(service, "LOST")
        standin.open("end")
        (found,) = peer.receive()[0].device_list.devices
        assert (found.state, found.backend) == ("LOST", "") and "Xid 79" in found.reason, found
    assert request_test(service, DEVICE).devices[0].state == "READY", "a test that began after it counts"
    service.assert_healthy()


@pytest.mark.parametrize("who", ["loader", "holder"])
def test_a_loader_or_holder_speaks_for_its_own_device_only(make_scripted, who):
    service = make_scripted("cuda-ipc")
    service.standin.does(
        test="""
        asked = [start.device.uuid[0]] if start.HasField("device") else [1, 2]
        [found(n) for n in asked]
        [tests(n, "cuda-ipc") for n in asked]
        done()
        """
    )
    request_test(service)
    event = "send(device_event=control_pb2.DeviceEvent(uuid=bytes([2]) * 16, error=719, what='cuCtxSynchronize'))"
    if who == "holder":
        service.standin.holds(event)
    service.standin.loads(f"{event if who == 'loader' else ''}; {IPC_GOOD}".lstrip("; "))
    try:
        assert load(service).state == "RESIDENT"
    except Refused as refused:  # a holder whose context failed, whichever it was, is ended: perhaps before the load
        assert who == "holder" and refused.code == rpc_pb2.ERROR_DEVICE
    service.wait_log("cuda:1 has passed its self-test: it stays in use")
    assert [d["state"] for d in devices(service)] == ["READY", "READY"]


@pytest.mark.parametrize("said", ["", "found(); tests(1, 'cuda-vmm', ['create']);"])
def test_a_self_test_that_somebody_kills_is_no_news_of_a_device_in_use(make_scripted, said):
    service = make_scripted()
    service.standin.loads(VMM_GOOD)
    load(service)
    service.standin.does(test=f"{said} wait('never')")
    with service.peer() as peer:
        peer.send(control_pb2.Frame(device_event=control_pb2.DeviceEvent(uuid=bytes([1]) * 16, error=700, what="cuCtxSynchronize")))
        procfs.kill(procfs.wait_until(lambda: service.standin.reached("never"), WAIT_S, "the self-test"))
        service.wait_log("cuda:0 stays in use, ")
    assert devices(service)[0]["state"] == "READY" and load(service).loads == 1
    service.assert_healthy()


# ---- no descriptors ----


@contextlib.contextmanager
def without_descriptors(service):
    supervisor = service.status().supervisor_pid
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (procfs.descriptor_count(supervisor), limits[1]))
    try:
        yield
    finally:
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)


def test_a_holder_that_cannot_be_started_fails_the_load_only(make_scripted):
    service = make_scripted("cuda-ipc")
    service.standin.loads("wait('load'); " + IPC_GOOD)
    with service.peer() as peer:
        peer.send(load_frame())
        procfs.wait_until(lambda: service.standin.reached("load"), WAIT_S, "the loader")
        with without_descriptors(service):
            service.standin.open("load")
            answer = peer.receive()[0]
        assert answer.error.code == rpc_pb2.ERROR_LIMIT and "the holder of cuda:0" in answer.error.message, answer
    service.standin.loads(IPC_GOOD)
    assert load(service).state == "RESIDENT"
    service.assert_healthy()


def test_a_self_test_that_cannot_be_started_takes_nothing_from_a_device_in_use(make_scripted):
    service = make_scripted()
    service.standin.loads(VMM_GOOD)
    load(service)
    with service.peer() as peer, without_descriptors(service):
        peer.send(control_pb2.Frame(device_event=control_pb2.DeviceEvent(uuid=bytes([1]) * 16, error=700, what="cuCtxSynchronize")))
        service.wait_log("cuda:0 stays in use, untested: cannot start the self-test")
    assert devices(service)[0]["state"] == "READY" and load(service).state == "RESIDENT"
    service.cli("unload", "m", "--device", DEVICE)
    with service.peer() as peer, without_descriptors(service):
        frame = control_pb2.Frame(id=9, device_request=rpc_pb2.DeviceRequest(action=rpc_pb2.DEVICE_TEST, device=DEVICE))
        (found,) = peer.request(frame)[0].device_list.devices
        assert found.state == "UNUSABLE" and "cannot start the self-test" in found.reason, "it says so, and is not TESTING for ever"
    assert request_test(service, DEVICE).devices[0].state == "READY"
    service.assert_healthy()


# ---- texts ----


@pytest.mark.parametrize(
    "test",
    ["send(error=rpc_pb2.Error(code=rpc_pb2.ERROR_DEVICE, message='x' + 'é' * 250))",
     "found(); tests(1, 'cuda-vmm', ['create'], 'failed', 'x' + 'é' * 76); done()",
     "found(); tests(1, 'cuda-vmm', ['create'], 'failed', 'é' * 76); done()"],
)  # fmt: skip
def test_a_text_that_is_cut_does_not_make_the_status_unreadable(make_service, tmp_path, test):
    standin = DeviceStandIn(tmp_path)
    standin.does(test=test)
    service = make_service(program=standin.program).start()
    service.wait_log("é")
    procfs.wait_until(lambda: "searched for" not in service.cli_json("status")["devices_reason"], WAIT_S, "the end of the search")
    with service.peer() as peer, pytest.raises(Refused) as refused:
        peer.attach("m", device=DEVICE)
    assert "é" in refused.value.error.message
    service.assert_healthy()


# ---- sizes ----


def test_the_largest_table_of_devices_can_be_read_by_all(make_service, tmp_path):
    standin = DeviceStandIn(tmp_path)
    standin.does(
        test="""
        for n in range(1, 17):
            rows = [rpc_pb2.DeviceAttribute(number=i, name="a" * 47, value=-i) for i in range(32)]
            device = rpc_pb2.DeviceStatus(product="\\x1b" * 40, driver="13.0", total_bytes=(1 << 64) - 1, attributes=rows)
            send(device_found=control_pb2.DeviceFound(device=device, uuid=uuid(n), granularity=1 << 31))
            tests(n)
            tests(n, "cuda-ipc", [f"row-{i}" for i in range(23)], "skipped", "é" * 79)
        done()
        """,
        watch="[memory(n, total=1, used=1 << 63, free=(1 << 64) - 1, processes=[(-i, 1 << 63) for i in range(400)]) for n in range(1, 17)]; stay()",
    )
    service = make_service(program=standin.program).start()
    wait_state(service, "READY", "cuda:15")
    procfs.wait_until(lambda: len(devices(service)[15]["processes"]) == 64, WAIT_S, "the watch's numbers")
    assert len(service.status().devices) == 16
    assert service.cli("devices").returncode == 0 and len(service.cli_json("status")["devices"]) == 16
    service.assert_healthy()


def test_a_client_is_told_of_every_lease_that_it_loses(make_scripted):
    service = make_scripted(clients={"max_leases": 2000})
    service.standin.loads(VMM_GOOD)
    service.standin.does(watch="memory(); wait('xid'); event(1, xid=79); stay()")
    procfs.kill(next(p for p in procfs.descendants(service.keeper_pid) if "device" in procfs.command(p)))
    procfs.wait_until(lambda: service.standin.reached("xid"), WAIT_S, "another watch")
    with service.peer() as peer:
        leases = set()
        for _ in range(1000):
            reply, index_fd, arena_fds = peer.attach("m", device=DEVICE)
            leases.add(reply.lease_id)
            for fd in [index_fd, *arena_fds]:
                os.close(fd)
        service.standin.open("xid")
        wait_state(service, "LOST")  # nothing is read meanwhile
        told = {peer.receive()[0].lease_revoke.lease_id for _ in range(1000)}
        assert told == leases
        for lease in leases:
            peer.detach(lease)
        assert service.status().leases == 0
    service.assert_healthy()
