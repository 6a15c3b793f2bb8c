"""Devices that lie, hang, die and are lost: only what uses them feels it, and it is told why.

The first half has a script for resvisor-device, which says whatever the test wants; the second the double of the driver.
"""

import os
import signal

import pytest

from harness import devices as gpus
from harness import models, procfs
from harness.control import Dropped
from harness.device_standin import devices, request_test, wait_known, wait_state
from harness.jobs import Jobs
from harness.probe import digests, look, probe_type
from harness.protos import control_pb2, rpc_pb2

WAIT_S = 30


# ---- a self-test that lies, hangs or dies ----

LIES = {
    "two of one uuid": "found(1); found(1); tests(1); done()",
    "no uuid": "send(device_found=control_pb2.DeviceFound(device=rpc_pb2.DeviceStatus(), uuid=b'short'))",
    "no device": "send(device_found=control_pb2.DeviceFound(uuid=uuid(1)))",
    "too many devices": "[found(n) for n in range(17)]; done()",
    "tests of a stranger": "found(1); tests(2); done()",
    "an unknown backend": "found(1); tests(1, 'vulkan', ['create']); done()",
    "an unknown result": "found(1); tests(1, 'cuda-vmm', ['create'], 'perhaps'); done()",
    "a row twice": "found(1); tests(1); tests(1); done()",
    "rows without end": "found(1); [tests(1, 'cuda-vmm', [f'row-{n}'], 'skipped') for n in range(40)]; done()",
    "a name that is none": r"found(1); tests(1, 'cuda-vmm', ['\x1b[31m'], 'skipped'); done()",
    "none after one": "found(1); tests(1); done('there are none')",
    "an odd granularity": "found(1, granularity=3000); tests(1); done()",
    "too many attributes": "found(1, attributes=[rpc_pb2.DeviceAttribute(number=n) for n in range(40)])",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_the_self_test_is_no_device(make_standin, standin, lie):
    text = LIES[lie].replace("found(1, attributes=", "send(device_found=control_pb2.DeviceFound(uuid=uuid(1), device=rpc_pb2.DeviceStatus(attributes=")  # fmt: skip
    if text != LIES[lie]:
        text = text[:-1] + ")))"
    standin.does(test=text + "\nstay()")
    service = make_standin().start()
    found = wait_known(service)
    assert found["devices"] == [] and found["reason"].startswith("the self-test "), found
    service.assert_healthy()
    standin.does(test="found(); tests(); done()")  # and the next one is believed
    assert request_test(service).devices[0].state == "READY"


@pytest.mark.parametrize(
    "text",
    ["holder = Frame(); holder.holder_allocated.SetInParent(); link.send(holder.SerializeToString())", "memory()",
     "link.send(b'\\xff' * 100)", "send(stop=control_pb2.Stop())", "send(attach=control_pb2.Attach(model='/etc/passwd'))"],
)  # fmt: skip
def test_what_is_not_its_part_ends_the_self_test(make_standin, standin, text):
    standin.does(test=text + "\nwhile receive(): pass")
    service = make_standin().start()
    found = wait_known(service)
    assert found["devices"] == [] and "the self-test" in found["reason"]
    service.assert_healthy()


def test_a_self_test_that_dies_is_the_reason_for_what_is_missing(make_standin, standin):
    standin.does(test="found(1); tests(1); found(2); tests(2, 'cuda-vmm', ['create']); os.kill(os.getpid(), 11)")
    service = make_standin().start()
    wait_known(service)
    first, second = devices(service)
    assert (first["state"], first["backend"]) == ("READY", "cuda-vmm")
    assert second["state"] == "UNUSABLE" and "copy was not tested: the self-test ended before its time" in second["reason"]
    assert "SIGSEGV" in second["reason"]


def test_a_silent_self_test_is_ended(make_standin, standin):
    standin.does(test="found(1); stay()")
    service = make_standin(cuda={"test_timeout": "1s"}).start()
    found = wait_known(service)["devices"][0]
    assert found["state"] == "UNUSABLE" and "cuda.test_timeout" in found["reason"]
    procfs.wait_until(lambda: standin.starts("watch") == 1, WAIT_S, "the watch")


def test_a_stop_does_not_wait_for_the_self_test(make_standin, standin):
    standin.does(test="wait('never')")
    service = make_standin().start()
    procfs.wait_until(lambda: standin.reached("never"), WAIT_S, "the self-test")
    assert service.stop() == 0
    service.assert_nothing_left()


def test_an_installation_without_the_program_says_so(make_standin, standin):
    (standin.program.parent.parent / "libexec" / "resvisor" / "resvisor-device").unlink()
    service = make_standin().start()
    assert "resvisor-device" in wait_known(service)["reason"]
    service.assert_healthy()


# ---- the watch ----


def test_a_watch_that_dies_is_started_again_and_not_for_ever(make_standin, standin):
    standin.does(watch="memory(); sys.exit(1)")
    service = make_standin().start()
    wait_state(service, "READY")
    procfs.wait_until(lambda: standin.starts("watch") >= 3, WAIT_S, "three watches")
    service.wait_log("the watch of devices exited with code 1")
    service.assert_healthy()


def test_a_machine_without_nvml_has_no_numbers(make_standin, standin):
    standin.does(watch="send(error=rpc_pb2.Error(code=rpc_pb2.ERROR_UNSUPPORTED, message='libnvidia-ml.so.1 is not there'))")
    service = make_standin().start()
    service.wait_log("not watched: libnvidia-ml.so.1 is not there")
    found = wait_state(service, "READY")
    assert (found["memory_source"], found["free_bytes"], found["used_bytes"]) == ("", 0, 0)
    assert standin.starts("watch") == 1


def test_an_xid_that_only_a_reset_mends_loses_the_device(make_standin, standin):
    standin.does(
        test="found(1); found(2); tests(1); tests(2); done()",
        watch="event(1, xid=31, what='page fault'); event(9, xid=79); wait('go'); event(1, xid=79, what='?'); stay()",
    )
    service = make_standin().start()
    wait_state(service, "READY")
    service.wait_log("Xid 31")
    assert wait_state(service, "READY")["state"] == "READY"
    standin.open("go")
    assert "Xid 79: the GPU has fallen off the bus" in wait_state(service, "LOST")["reason"]
    assert wait_state(service, "READY", "cuda:1")
    service.assert_healthy()


def report(service, error=719, number=1):
    with service.peer() as peer:
        event = control_pb2.DeviceEvent(uuid=bytes([number]) * 16, error=error, what="cuStreamSynchronize")
        peer.send(control_pb2.Frame(device_event=event))
        peer.status()  # it has been read


def test_a_client_that_complains_gets_a_test_and_not_its_will(make_standin, standin):
    standin.does(test="found(1); tests(1); done()")
    service = make_standin().start()
    wait_state(service, "READY")
    for _ in range(50):
        report(service)
    report(service, number=77)
    procfs.wait_until(lambda: standin.starts("test") == 2, WAIT_S, "a second test")
    service.wait_log("cuda:0 has passed its self-test")
    assert wait_state(service, "READY")
    assert standin.starts("test") == 2  # however often it complained


def test_a_complaint_that_the_self_test_confirms_loses_the_device(make_standin, standin):
    service = make_standin().start()
    wait_state(service, "READY")
    standin.does(test="found(1); tests(1, 'cuda-vmm', ['create'], 'failed', 'cuCtxCreate: 719'); done()")
    report(service, error=700)
    reason = wait_state(service, "LOST")["reason"]
    assert "met error 700 in cuStreamSynchronize" in reason and "create failed: cuCtxCreate: 719" in reason
    standin.does(test="found(1); tests(1); done()")
    assert request_test(service, "cuda:0").devices[0].state == "READY"


# ---- on the double of the driver ----

on_double = pytest.mark.skipif(not gpus.built(), reason="the build has no double of the driver")
TYPES = {"gpu": {"models": ["small"], "device": "cuda:0"}, "other": {"models": ["small"], "device": "cuda:1"}, "host": {"models": ["small"]}}


@pytest.fixture
def make_gpu(make_service, make_devices):
    """make_gpu(kind, **config): a running service with a type on each of two devices and on the host, and its GPUs."""

    def make(kind="discrete", types=("gpu", "other", "host"), **config):
        machine = make_devices(kind=kind, count=2, memory="1GiB")
        service = make_service(env=machine.env)
        service.bytes = models.write_plain(service.models / "small.safetensors", mib=4)
        service.config["models"] = {"small": {"path": "small.safetensors"}}
        service.config["types"] = {name: probe_type(**TYPES[name]) for name in types}
        service.config.update(config)
        service.start()
        service.wait_ready(timeout=60)
        service.gpus = machine
        return service

    return make


def sees_all(service, jobs, type_name):
    return look(jobs, type_name)["models"][0]["tensors"] == digests(service.bytes)


def wait_model(service, state, device):
    def reached():
        return next((m for m in service.status().models if m.device == device and m.state == state), None)

    return procfs.wait_until(reached, WAIT_S, f"a model {state} on {device}")


def wait_watched(service):
    """An Xid is told to those who listen: the watch does so before it says its first numbers."""
    procfs.wait_until(lambda: devices(service)[0]["memory_source"] == "nvml", WAIT_S, "numbers of NVML")


@on_double
def test_a_lost_device_takes_its_jobs_and_models_and_nothing_else(make_gpu, gate):
    service = make_gpu()
    with Jobs(service) as jobs:
        running = jobs.submit("gpu", params={"gate": gate.path}, retry_on_worker_death=True)
        gate.wait_reached()
        wait_watched(service)
        others = {name: service.worker(name).pid for name in ("other", "host")}
        service.gpus.lose(0)
        service.gpus.xid(0, 79)
        ended = jobs.wait(running.job_id)
        assert ended.state == rpc_pb2.JOB_FAILED and ended.error.code == rpc_pb2.ERROR_DEVICE_LOST, ended
        assert "Xid 79" in ended.error.message
        lost = service.wait_worker("gpu", "FAILED")
        assert "cuda:0 is lost" in lost.last_exit and lost.starts == 1
        assert wait_state(service, "LOST")["pool_bytes"] == 0
        service.gpus.wait_allocated(0)
        wait_model(service, "RESIDENT", "cuda:1")
        for name in ("other", "host"):
            assert sees_all(service, jobs, name) and service.worker(name).pid == others[name]
        assert request_test(service, "cuda:0").devices[0].state == "LOST"
        result = service.cli("restart", "gpu", check=False)
        assert result.returncode != 0 and "cuda:0 is lost" in result.stderr
        result = service.cli("load", "small", "--device", "cuda:0", check=False)
        assert result.returncode != 0 and "cuda:0 is lost" in result.stderr
        service.gpus.find(0)
        assert request_test(service, "cuda:0").devices[0].state == "READY"
        service.wait_worker("gpu", starts=2)
        assert sees_all(service, jobs, "gpu")
    service.assert_healthy()


@on_double
def test_what_a_worker_did_to_its_own_context_is_its_own(make_gpu):
    service = make_gpu(types=("gpu", "host"))
    pid = service.worker("gpu").pid
    with Jobs(service) as jobs:
        look(jobs, "gpu", report=719)
        service.wait_log("cuda:0 has passed its self-test: it stays in use", timeout=WAIT_S)
        assert wait_state(service, "READY") and service.worker("gpu").pid == pid
        assert wait_model(service, "RESIDENT", "cuda:0").loads == 1
        assert sees_all(service, jobs, "gpu")


@on_double
def test_want_of_memory_is_no_fault_of_a_device_in_use(make_gpu):
    service = make_gpu(types=("gpu",))
    service.gpus.fault("cuMemCreate", nth="1+", error=2, program="resvisor-device")  # full
    with Jobs(service) as jobs:
        look(jobs, "gpu", report=700)
        service.wait_log("cuda:0 has passed its self-test: it stays in use", timeout=WAIT_S)
        create = next(t for t in wait_state(service, "READY")["tests"] if t["name"] == "create")
        assert create["result"] == "failed" and create["no_memory"]
        assert sees_all(service, jobs, "gpu")
    service.stop()
    service.gpus.no_faults()
    service.start()
    assert wait_state(service, "READY")["cached"] is False  # that result was not kept


@on_double
def test_a_dead_holder_takes_what_it_kept_and_all_comes_back(make_gpu, gate):
    service = make_gpu(kind="no-vmm", types=("gpu", "host"))
    holder = wait_state(service, "READY")["holder_pid"]
    with Jobs(service) as jobs:
        assert sees_all(service, jobs, "gpu")
        running = jobs.submit("gpu", params={"gate": gate.path})
        gate.wait_reached()
        host = service.worker("host").pid
        os.kill(holder, signal.SIGKILL)
        ended = jobs.wait(running.job_id)
        assert ended.error.code == rpc_pb2.ERROR_DEVICE and "the holder of cuda:0 ended" in ended.error.message, ended
        service.wait_worker("gpu", starts=2)
        assert sees_all(service, jobs, "gpu") and service.worker("host").pid == host
        after = wait_state(service, "READY")
        assert after["holder_pid"] not in (0, holder)
        assert wait_model(service, "RESIDENT", "cuda:0").loads == 2
    service.assert_healthy()


@on_double
def test_a_holder_that_dies_again_and_again_makes_its_device_unusable(make_gpu):
    service = make_gpu(kind="no-vmm", types=("host",))
    wait_state(service, "READY")  # the self-test must not meet it
    service.gpus.fault("cuMemAlloc", nth="1+", error=2, program="resvisor-device")
    assert service.cli("load", "small", "--device", "cuda:0", check=False).returncode == 7  # no memory there
    service.gpus.no_faults()
    for _ in range(5):
        service.cli("load", "small", "--device", "cuda:0")
        os.kill(wait_state(service, "READY")["holder_pid"], signal.SIGKILL)
        wait_model(service, "FAILED", "cuda:0")  # it says that its memory went
    assert "its holder died 5 times" in wait_state(service, "UNUSABLE")["reason"]
    assert service.cli("load", "small", "--device", "cuda:0", check=False).returncode != 0
    assert request_test(service, "cuda:0").devices[0].state == "READY"
    service.cli("load", "small", "--device", "cuda:0")


@on_double
def test_a_holder_s_memory_goes_back_when_a_model_goes(make_gpu):
    service = make_gpu(kind="no-vmm", types=("host",))
    service.cli("load", "small", "--device", "cuda:0")
    assert service.gpus.allocated(0, kinds=("alloc",)) >= 4 << 20
    assert wait_state(service, "READY")["pool_bytes"] >= 4 << 20
    refused = service.cli("devices", "--test", "cuda:0", check=False)
    assert refused.returncode == 4 and "holds models" in refused.stderr
    service.cli("unload", "small", "--device", "cuda:0")
    service.gpus.wait_allocated(0)
    assert request_test(service, "cuda:0").devices[0].state == "READY"


@on_double
@pytest.mark.parametrize("kind", ["discrete", "no-vmm"])
def test_a_stop_leaves_nothing_on_the_device(make_gpu, kind):
    service = make_gpu(kind=kind, types=("gpu",))
    assert service.gpus.allocated(0) > 0
    assert service.stop() == 0
    service.assert_nothing_left()
    service.gpus.wait_allocated(0)


@on_double
def test_a_client_that_keeps_a_lost_device_s_memory_is_cut_off(make_gpu):
    service = make_gpu(types=("host",), cuda={"revoke_timeout": "200ms"})
    with service.peer() as peer:
        frame = control_pb2.Frame(attach=control_pb2.Attach(model="small", device="cuda:0"))
        answer, fds = peer.request(frame)
        for fd in fds:
            os.close(fd)
        assert answer.attach_reply.device.name == "cuda:0"
        wait_watched(service)
        service.gpus.xid(0, 79)
        told, _ = peer.receive()
        assert told.lease_revoke.lease_id == answer.attach_reply.lease_id and "lost" in told.lease_revoke.reason
        with pytest.raises(Dropped):
            peer.receive()
    service.assert_healthy()


@on_double
def test_a_loader_that_meets_a_dead_device_loses_it(make_gpu):
    service = make_gpu(types=("host",))
    wait_state(service, "READY")
    service.gpus.fault("cuMemcpyHtoDAsync", nth="1+", error=719, program="resvisor-loader")
    failed = service.cli("load", "small", "--device", "cuda:0", check=False)
    assert failed.returncode != 0
    assert "the loader (pid " in wait_state(service, "LOST")["reason"] and "719" in devices(service)[0]["reason"]
    service.gpus.no_faults()
    assert service.cli("load", "small", "--device", "cuda:1").returncode == 0
    service.gpus.wait_allocated(0)
    assert request_test(service, "cuda:0").devices[0].state == "READY"
    assert service.cli("load", "small", "--device", "cuda:0").returncode == 0


@on_double
def test_a_loader_whose_driver_does_not_start_leads_to_a_test_and_no_loss(make_gpu):
    """cuInit says 999 also of what is wrong with the machine or the process: no device was touched."""
    service = make_gpu(types=("host",))
    wait_state(service, "READY")
    service.gpus.fault("cuInit", error=999, program="resvisor-loader")
    failed = service.cli("load", "small", "--device", "cuda:0", check=False)
    assert failed.returncode != 0 and "cuInit: 999" in failed.stderr and "nvidia-modprobe" in failed.stderr
    service.wait_log("cuda:0 is tested again", WAIT_S)
    service.gpus.no_faults()
    assert request_test(service, "cuda:0").devices[0].state == "READY"
    assert "LOST" not in service.log()
    assert service.cli("load", "small", "--device", "cuda:0").returncode == 0


@on_double
def test_a_holder_that_meets_a_dead_device_loses_it(make_gpu):
    service = make_gpu(kind="no-vmm", types=("host",))
    wait_state(service, "READY")
    service.gpus.fault("cuMemAlloc", nth="1+", error=719, program="resvisor-device")
    failed = service.cli("load", "small", "--device", "cuda:0", check=False)
    assert failed.returncode != 0 and "719" in wait_state(service, "LOST")["reason"]
    service.gpus.no_faults()
    assert request_test(service, "cuda:0").devices[0].state == "READY"
    assert service.cli("load", "small", "--device", "cuda:0").returncode == 0


@on_double
def test_workers_of_a_device_that_cannot_be_used_wait_for_it(make_service, make_devices):
    machine = make_devices(count=1, memory="1GiB")
    machine.fault("cuMemCreate", nth="1+", error=801, program="resvisor-device")
    service = make_service(env=machine.env)
    bytes_of = models.write_plain(service.models / "small.safetensors", mib=1)
    service.config["models"] = {"small": {"path": "small.safetensors"}}
    service.config["types"] = {"gpu": probe_type(models=["small"], device="cuda:0")}
    service.config["devices"] = {"cuda:0": {"backend": "cuda-vmm"}}
    service.start()
    waiting = service.wait_worker("gpu", "FAILED")
    assert "cuda:0 cannot be used: cuda-vmm is configured and does not work: create skipped: cuMemCreate: 801" in waiting.last_exit
    assert waiting.starts <= 1  # it is not tried again and again
    machine.no_faults()
    assert request_test(service).devices[0].state == "READY"
    service.wait_worker("gpu", starts=waiting.starts + 1)
    with Jobs(service) as jobs:
        assert look(jobs, "gpu")["models"][0]["tensors"] == digests(bytes_of)


@on_double
@pytest.mark.slow
def test_a_holder_with_nothing_to_keep_ends_and_another_comes(make_gpu):
    service = make_gpu(kind="no-vmm", types=("host",))
    service.cli("load", "small", "--device", "cuda:0")
    first = devices(service)[0]["holder_pid"]
    service.cli("unload", "small", "--device", "cuda:0")
    procfs.wait_until(lambda: devices(service)[0]["holder_pid"] == 0, 60, "the end of the holder")
    service.cli("load", "small", "--device", "cuda:0")
    found = wait_state(service, "READY")
    assert found["holder_pid"] not in (0, first) and found["pool_bytes"] > 0


# ---- a holder that lies: the script holds, the loader is real and on the double ----

ANSWER = "ask = receive(); send(id=ask.id, holder_allocated=control_pb2.HolderAllocated(arena=control_pb2.Arena({})))"
HONEST = {"size": "ask.holder_allocate.size", "backend": "3", "page_size": "2 << 20", "handle": "b'h' * 64", "allocation": "7"}
HOLDER_LIES = {
    "too small": {"size": "ask.holder_allocate.size - 1"},
    "too large": {"size": "ask.holder_allocate.size + (16 << 20)"},
    "another backend": {"backend": "2"},
    "no handle": {"handle": "b''"},
    "a handle of zeros": {"handle": "bytes(64)"},
    "no name": {"allocation": "0"},
}


def answer(**fields):
    return ANSWER.format(", ".join(f"{key}={value}" for key, value in {**HONEST, **fields}.items()))


@pytest.fixture
def held(make_service, make_devices, standin):
    """A running service with one device of backend cuda-ipc, whose holder is the script."""
    machine = make_devices(kind="no-vmm", memory="1GiB", keys={"uuid": "GPU-01010101-0101-0101-0101-010101010101"})
    service = make_service(program=standin.program, env=machine.env)
    models.write_plain(service.models / "small.safetensors", mib=1)
    service.config["models"] = {"small": {"path": "small.safetensors"}}
    standin.does(test="found(1); tests(1, 'cuda-ipc'); done()")
    service.start()
    wait_state(service, "READY")
    return service


def load(service):
    return service.cli("load", "small", "--device", "cuda:0", check=False)


@on_double
@pytest.mark.parametrize("lie", HOLDER_LIES)
def test_a_holder_that_lies_is_ended(held, standin, lie):
    standin.does(hold=answer(**HOLDER_LIES[lie]) + "\nstay()")
    failed = load(held)
    assert failed.returncode != 0 and "the holder of cuda:0 ended: killed" in failed.stderr, failed
    held.assert_healthy()
    assert wait_state(held, "READY")["promised_bytes"] == 0


@on_double
@pytest.mark.parametrize(
    "text", ["receive(); sys.exit(3)", "receive(); os.kill(os.getpid(), 9)", "receive(); send(id=99, holder_allocated={})",
             "receive(); send(device_done={})", "sys.exit(0)", "receive(); link.send(b'\\xff' * 50)"],
)  # fmt: skip
def test_a_holder_that_dies_when_asked_fails_that_load_only(held, standin, text):
    standin.does(hold=text)
    failed = load(held)
    assert failed.returncode != 0 and "cuda:0" in failed.stderr, failed
    held.assert_healthy()
    standin.does(hold="while True: send(id=receive().id, error=rpc_pb2.Error(code=rpc_pb2.ERROR_NO_MEMORY, message='full'))")
    refused = load(held)  # the next holder is asked again
    assert refused.returncode == 7 and "full" in refused.stderr, refused
    assert wait_state(held, "READY")["promised_bytes"] == 0


@on_double
def test_an_allocation_that_nobody_waits_for_is_given_back(held, standin):
    after = "\nfreed = receive(); (HERE / 'freed').write_text(str(freed.holder_free.allocation)); stay()"
    standin.does(hold=answer().replace("; send(", "; wait('answer'); send(") + after)
    with held.peer() as peer:
        peer.send(control_pb2.Frame(id=1, model_request=rpc_pb2.ModelRequest(action=rpc_pb2.MODEL_LOAD, model="small", device="cuda:0")))
        procfs.wait_until(lambda: standin.reached("answer"), WAIT_S, "the holder was asked")
        held.cli("unload", "small", "--device", "cuda:0")
    standin.open("answer")
    freed = standin.folder / "freed"
    procfs.wait_until(lambda: freed.exists() and freed.read_text() == "7", WAIT_S, "it was given back")
    assert wait_state(held, "READY")["promised_bytes"] == 0
