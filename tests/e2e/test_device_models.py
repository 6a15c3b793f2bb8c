"""Models on devices: a file in several places at once, budgets, loads, changed files and lost memory of each place alone."""

import concurrent.futures
import contextlib
import os
import signal

import pytest

from harness import http, models, procfs
from harness.control import Refused
from harness.jobs import Jobs
from harness.probe import digests, look, probe_type
from harness.protos import control_pb2, rpc_pb2

MIB = 1 << 20
CLIENTS = 8
KNOWN_S = 60
WAIT_S = 30
HOST, FIRST, SECOND = "host", "cuda:0", "cuda:1"
BACKENDS = {"discrete": "cuda-vmm", "no-vmm": "cuda-ipc"}

# They say themselves where their models lie: to run them once more on a device would be the same again.
pytestmark = [pytest.mark.devices, pytest.mark.host_memory]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Where results of self-tests are kept: devices of one kind are tested once for all tests here."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def machine(make_service, make_devices, results):
    """machine(kind, count, memory, **config): a service, not started, that sees those devices (service.devices)."""

    def make(kind="discrete", count=2, memory="1GiB", name="service", keys=None, fresh=False, more=(), **config):
        devices = make_devices(kind=kind, count=count, memory=memory, keys=keys, more=more)
        state = results / ("fresh" if fresh else f"{kind}-{count}-{memory}-{keys}")
        service = make_service(config, name=name, env={**devices.env, "STATE_DIRECTORY": str(state)})
        service.devices = devices
        return service

    return make


def wait_known(service):
    """Waits until the devices are known."""
    procfs.wait_until(lambda: service.cli_json("devices")["devices"], KNOWN_S, "devices")
    return service


def started(service):
    return wait_known(service.start())


def row(service, name, device):
    """The model's row of that place; None = it has none."""
    return next((m for m in service.status().models if m.name == str(name) and m.device == device), None)


@contextlib.contextmanager
def leased(peer, model, device, **kwargs):
    """An attach by hand: the reply; its descriptors are closed at the end."""
    reply, index_fd, arena_fds = peer.attach(model, device=device, **kwargs)
    try:
        yield reply
    finally:
        for fd in [index_fd, *arena_fds]:
            os.close(fd)


def refusal(function, *args, **kwargs):
    with pytest.raises(Refused) as refused:
        function(*args, **kwargs)
    return refused.value


def files(service, *names, mib=8):
    for seed, name in enumerate(names):
        models.write_plain(service.models / f"{name}.safetensors", mib=mib, seed=seed + 1)
    service.config["models"] = {name: {"path": f"{name}.safetensors"} for name in names}


def stop_process(service, program):
    """The pid of the service's process of that program, which stands still from now on."""

    def found():
        return next((pid for pid in procfs.descendants(service.keeper_pid) if program in procfs.command(pid)), None)

    pid = procfs.wait_until(found, WAIT_S, program)
    procfs.kill(pid, signal.SIGSTOP)
    return pid


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("kind", BACKENDS)
def test_one_file_lies_on_the_host_and_on_two_devices_at_once(machine, kind):
    service = machine(kind)
    wanted = models.write_plain(service.models / "m.safetensors", mib=8, seed=3)
    service.config["models"] = {"m": {"path": "m.safetensors"}}
    service.config["types"] = {
        name: probe_type(models=["m"], device=device) for name, device in (("h", HOST), ("a", FIRST), ("b", SECOND))
    }
    started(service)
    service.wait_ready(KNOWN_S)
    backends = {HOST: "memfd", FIRST: BACKENDS[kind], SECOND: BACKENDS[kind]}
    with Jobs(service) as jobs:
        for name, device in (("h", HOST), ("a", FIRST), ("b", SECOND)):
            (model,) = look(jobs, name)["models"]
            assert model["tensors"] == digests(wanted)
            assert (model["device"], model["backend"], model["generation"]) == (device, backends[device], 1)
    for device, backend in backends.items():
        found = row(service, "m", device)
        assert (found.state, found.loads, found.leases, found.backend) == ("RESIDENT", 1, 1, backend)
        assert found.bytes >= 8 * MIB
    for number in (0, 1):
        service.devices.wait_allocated(8 * MIB, number)
    assert 8 * MIB <= service.status().pool_bytes < 9 * MIB, "what lies on devices is not the host's"
    assert [service.type(name).device for name in "hab"] == [HOST, FIRST, SECOND]
    table = service.cli("models").stdout.splitlines()
    assert "DEVICE" in table[0] and len(table) == 4
    in_use = refusal(service.control.model, rpc_pb2.MODEL_UNLOAD, "m")
    assert in_use.code == rpc_pb2.ERROR_MODEL_IN_USE and "--device" in in_use.error.remedy


def test_a_load_without_a_device_goes_where_the_types_want_it(machine):
    service = machine()
    files(service, "m", "other")
    service.config["types"] = {
        "a": probe_type(models=["m"], device=FIRST, workers=1), "b": probe_type(models=["m"], device=SECOND),
    }  # fmt: skip
    service.config["models"]["m"]["pin"] = True
    service.config["models"]["other"]["preload"] = True
    started(service)
    service.wait_ready(KNOWN_S)
    procfs.wait_until(lambda: row(service, "other", HOST).state == "RESIDENT", WAIT_S, "the preloaded model on the host")
    assert row(service, "m", HOST) is None, "it is wanted on devices only"
    assert all(row(service, "m", device).pinned for device in (FIRST, SECOND))
    assert row(service, "m", FIRST).loads == 1, "preload and worker shared one load"
    service.cli("load", "m")
    assert service.cli("unload", "m", check=False).returncode != 0
    service.cli("unpin", "m", "--device", FIRST)
    assert not row(service, "m", FIRST).pinned and row(service, "m", SECOND).pinned


def test_one_request_loads_to_several_places_at_once(machine):
    service = machine(pool={"max_loads": 2}, devices={SECOND: {"budget": "20MiB"}})
    files(service, "m", "large")
    models.write_plain(service.models / "large.safetensors", mib=24)
    service.config["types"] = {
        name: probe_type(device=device, models=["m", "large"]) for name, device in (("a", FIRST), ("b", SECOND))
    }
    service.config["types"]["b"]["max_deaths"] = 1
    started(service)
    over = refusal(service.control.model, rpc_pb2.MODEL_LOAD, "large")
    assert over.code == rpc_pb2.ERROR_OVER_BUDGET and SECOND in over.error.message
    procfs.wait_until(lambda: row(service, "large", FIRST).state == "RESIDENT", WAIT_S, "the place that it fits into")
    assert row(service, "large", SECOND).state == "FAILED"
    service.wait_worker("a", timeout=KNOWN_S)
    service.wait_worker("b", "FAILED", timeout=KNOWN_S)
    service.cli("load", "m")
    assert [row(service, "m", device).state for device in (FIRST, SECOND)] == ["RESIDENT", "RESIDENT"]


def test_each_place_is_loaded_unloaded_and_pinned_by_itself(machine):
    service = machine()
    files(service, "m")
    started(service)
    assert service.cli("load", "m", "--device", FIRST).stdout.startswith("m: RESIDENT on cuda:0")
    service.cli("pin", "m", "--device", SECOND)
    service.cli("load", "m")
    assert {m.device for m in service.status().models} == {HOST, FIRST, SECOND}
    assert service.cli_json("unload", "m", "--device", FIRST)["state"] == "ABSENT"
    service.devices.wait_allocated(0, 0)
    service.devices.wait_allocated(8 * MIB, 1)
    assert row(service, "m", HOST).state == "RESIDENT"
    pinned = refusal(service.control.model, rpc_pb2.MODEL_UNLOAD, "m")
    assert pinned.code == rpc_pb2.ERROR_MODEL_PINNED and "on cuda:1" in pinned.error.message
    assert row(service, "m", HOST).state == "RESIDENT", "all or nothing"
    service.cli("unpin", "m")
    service.cli("unload", "m")
    assert all(m.state == "ABSENT" for m in service.status().models)
    service.devices.wait_allocated(0, 1)
    assert service.cli_json("unload", "m")["state"] == "ABSENT", "to unload what is not there is no failure"
    uuid = service.cli_json("devices")["devices"][1]["uuid"]
    assert service.cli_json("load", "m", "--device", uuid)["device"] == SECOND


def test_a_wrong_device_is_named_with_those_that_there_are(machine):
    service = machine(count=1)
    files(service, "m")
    started(service)
    wrong = refusal(service.control.attach, "m", device="cuda:5")
    assert wrong.code == rpc_pb2.ERROR_NO_SUCH_DEVICE and FIRST in wrong.error.message
    result = service.cli("load", "m", "--device", "gpu0", check=False)
    assert result.returncode != 0 and FIRST in result.stderr
    assert service.cli_json("unload", "m", "--device", FIRST)["state"] == "ABSENT"
    assert {m.device for m in service.status().models} == {HOST}, "asking makes no entry"


# ---- loads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BACKENDS)
def test_one_load_per_place_for_all_who_ask(machine, kind):
    service = machine(kind)
    files(service, "m")
    started(service)

    def attach(device):
        with service.peer() as peer, leased(peer, "m", device) as reply:
            return reply.generation

    with concurrent.futures.ThreadPoolExecutor(2 * CLIENTS) as pool:
        assert set(pool.map(attach, [FIRST, SECOND] * CLIENTS)) == {1}
    assert [row(service, "m", device).loads for device in (FIRST, SECOND)] == [1, 1]
    assert service.status().loads == 2
    procfs.wait_until(lambda: service.status().leases == 0, WAIT_S, "the end of all leases")
    for number in (0, 1):
        service.devices.wait_allocated(8 * MIB, number)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_changed_file_is_a_new_generation_where_it_is_asked_for(machine, kind):
    service = machine(kind)
    files(service, "m")
    started(service)
    with service.peer() as peer, service.peer() as other:
        with leased(peer, "m", FIRST) as old, leased(other, "m", SECOND):
            models.write_plain(service.models / "m.safetensors", mib=6, seed=9)
            with leased(other, "m", FIRST) as new:
                assert (old.generation, new.generation) == (1, 2)
                found = row(service, "m", FIRST)
                assert (found.generation, found.old_generations) == (2, 1)
                assert row(service, "m", SECOND).generation == 1, "nobody asked there"
                service.devices.wait_allocated(14 * MIB)
                peer.detach(old.lease_id)
        service.devices.wait_allocated(6 * MIB, 0)
        with leased(other, "m", SECOND) as again:
            assert again.generation == 2


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("how", ["unload", "kill"])
def test_a_load_that_ends_early_leaves_nothing_on_the_device(machine, kind, how):
    service = machine(kind, count=1)
    files(service, "m", mib=32)
    started(service)
    service.devices.fault("cuMemcpyHtoDAsync", nth="1+", program="resvisor-loader", delay=2000)
    with service.peer() as peer:
        peer.send(control_pb2.Frame(id=7, attach=control_pb2.Attach(model="m", device=FIRST)))
        procfs.wait_until(lambda: service.devices.allocated(0) >= 32 * MIB, WAIT_S, "the arena on the device")
        if how == "unload":
            service.cli("unload", "m", "--device", FIRST)
        else:
            procfs.kill(stop_process(service, "resvisor-loader"))
        answer = peer.receive()[0]
        code = {"unload": rpc_pb2.ERROR_CANCELLED, "kill": rpc_pb2.ERROR_INTERNAL}[how]
        assert answer.error.code == code, answer
    service.devices.wait_allocated(0, 0)
    service.devices.no_faults()
    service.cli("load", "m", "--device", FIRST)
    service.devices.wait_allocated(32 * MIB)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_worker_that_is_killed_leaks_nothing(machine, kind):
    service = machine(kind, count=1)
    files(service, "m")
    service.config["types"] = {"a": probe_type(models=["m"], device=FIRST)}
    started(service)
    service.wait_ready(KNOWN_S)
    for _ in range(3):
        before = service.worker("a")
        procfs.kill(before.pid)
        service.wait_worker("a", starts=before.starts + 1)
    assert row(service, "m", FIRST).loads == 1, "it came back without a load"
    service.devices.wait_allocated(8 * MIB)
    assert row(service, "m", FIRST).leases == 1


# ---- before the devices are known -----------------------------------------------------------------------------------


def test_who_asks_for_a_device_too_early_waits_and_the_host_does_not(machine):
    service = machine(count=1, fresh=True)
    files(service, "m")
    service.devices.fault("cuInit", program="resvisor-device", delay=5000)
    service.start()
    tester = stop_process(service, "resvisor-device")
    service.devices.no_faults()
    with service.peer() as peer, service.peer() as waiting, service.peer() as gone:
        waiting.send(control_pb2.Frame(id=7, attach=control_pb2.Attach(model="m", device=FIRST)))
        for number in range(1, 66):
            gone.send(control_pb2.Frame(id=number, attach=control_pb2.Attach(model="m", device=FIRST)))
        limited = gone.receive()[0]
        assert limited.id == 65 and limited.error.code == rpc_pb2.ERROR_LIMIT
        gone.close()
        late = refusal(peer.attach, "m", device=FIRST, deadline_ms=50)
        assert late.code == rpc_pb2.ERROR_DEADLINE and "devices" in late.error.message
        with leased(peer, "m", HOST) as reply:
            assert not reply.HasField("device")
        assert not service.cli_json("devices")["devices"]
        procfs.kill(tester, signal.SIGCONT)
        answer, fds = waiting.receive(KNOWN_S)
        for fd in fds:
            os.close(fd)
        assert answer.id == 7 and answer.attach_reply.device.name == FIRST
        assert row(service, "m", FIRST).leases == 1, "those who have gone have none"


def test_a_device_that_there_is_not_fails_whoever_waited(machine):
    service = machine(fresh=True, more=["init 100"])
    files(service, "m")
    service.config["models"]["m"]["preload"] = True
    service.config["types"] = {"a": probe_type(models=["m"], device=FIRST)}
    service.start()
    with service.peer() as peer:
        assert refusal(peer.attach, "m", device=FIRST, timeout=KNOWN_S).code == rpc_pb2.ERROR_NO_SUCH_DEVICE
    service.wait_log("m is not preloaded on cuda:0", KNOWN_S)
    assert service.cli("load", "m", "--device", HOST).returncode == 0


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_each_device_has_its_own_budget(machine):
    service = machine(devices={FIRST: {"budget": "20MiB"}}, pool={"budget": "4MiB"})
    files(service, "one", "two", "three", mib=12)
    started(service)
    service.cli("load", "one", "--device", FIRST)
    over = refusal(service.control.model, rpc_pb2.MODEL_LOAD, "two", device=FIRST)
    assert over.code == rpc_pb2.ERROR_OVER_BUDGET
    assert "cuda:0" in over.error.message and "12.0 MiB are held" in over.error.message
    assert "one --device cuda:0" in over.error.remedy and "devices.cuda:0.budget" in over.error.remedy
    service.cli("load", "two", "--device", SECOND)
    service.cli("load", "three", "--device", SECOND)
    on_host = refusal(service.control.model, rpc_pb2.MODEL_LOAD, "one", device=HOST)
    assert on_host.code == rpc_pb2.ERROR_OVER_BUDGET and "pool.budget" in on_host.error.remedy
    assert "--device" not in on_host.error.remedy, "what lies on a device is of no help to the host"
    service.cli("unload", "one", "--device", FIRST)
    service.cli("load", "two", "--device", FIRST)
    rows = {d["name"]: d for d in service.cli_json("devices")["devices"]}
    assert rows[FIRST]["pool_bytes"] == 12 * MIB and rows[SECOND]["pool_bytes"] == 24 * MIB
    assert rows[FIRST]["budget_bytes"] == 20 * MIB and rows[FIRST]["promised_bytes"] == 0


def test_a_budget_is_a_share_of_the_device(machine):
    service = machine(devices={FIRST: {"budget": "2%"}})
    files(service, "m", mib=24)
    started(service)
    assert refusal(service.control.model, rpc_pb2.MODEL_LOAD, "m", device=FIRST).code == rpc_pb2.ERROR_OVER_BUDGET
    service.cli("load", "m", "--device", SECOND)


def test_a_full_device_refuses_and_others_go_on(machine):
    service = machine(devices={FIRST: {"budget": 0}}, keys={"oom": "16MiB"})
    files(service, "small", "large")
    models.write_plain(service.models / "large.safetensors", mib=64)
    started(service)
    full = refusal(service.control.model, rpc_pb2.MODEL_LOAD, "large", device=FIRST)
    assert full.code in (rpc_pb2.ERROR_NO_MEMORY, rpc_pb2.ERROR_OVER_BUDGET)
    service.devices.wait_allocated(0, 0)
    service.cli("load", "small", "--device", FIRST)


# ---- unified memory -------------------------------------------------------------------------------------------------


def test_a_unified_device_uses_the_entry_of_the_host(machine):
    service = machine("unified-plain", count=1, cuda={"reserve": 0})
    files(service, "m")
    started(service)
    with service.peer() as peer:
        with leased(peer, "m", FIRST) as reply:
            assert reply.device.name == FIRST and len(reply.device.uuid) == 16
            assert [arena.backend for arena in reply.arenas] == [1]
        with leased(peer, "m", HOST) as reply:
            assert not reply.HasField("device")
    (found,) = service.status().models
    assert (found.device, found.backend, found.loads) == (HOST, "memfd", 1)
    assert service.cli_json("unload", "m", "--device", FIRST)["state"] in ("ABSENT", "RESIDENT")


@pytest.mark.parametrize("kind", ["unified", "unified-plain"])
def test_memory_that_is_reserved_on_unified_devices_is_left_alone(machine, kind):
    service = machine(kind, count=1, cuda={"reserve": "512TiB"})
    files(service, "m")
    started(service)
    for device in (HOST, FIRST):
        over = refusal(service.control.model, rpc_pb2.MODEL_LOAD, "m", device=device)
        assert over.code == rpc_pb2.ERROR_OVER_BUDGET and "cuda.reserve" in over.error.message, device


# ---- a device that is lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_lay_on_a_lost_device_goes_and_its_clients_are_cut_off(machine, kind):
    service = machine(kind, cuda={"revoke_timeout": "500ms"})
    files(service, "m")
    started(service)
    with service.peer() as keeps, service.peer() as detaches, service.peer() as elsewhere:
        with leased(keeps, "m", FIRST), leased(detaches, "m", FIRST) as reply, leased(elsewhere, "m", SECOND):
            with leased(elsewhere, "m", HOST):
                service.devices.lose(0)
                service.devices.xid(0, 79)
                revoke = detaches.receive()[0].lease_revoke
                assert revoke.lease_id == reply.lease_id and "cuda:0" in revoke.reason
                detaches.detach(reply.lease_id)
                keeps.wait_dropped()
                assert detaches.status() and elsewhere.status(), "they are not cut off"
                found = row(service, "m", FIRST)
                assert (found.state, found.error.code) == ("FAILED", rpc_pb2.ERROR_DEVICE_LOST)
                assert found.bytes == 0 and found.leases == 0
                assert refusal(detaches.attach, "m", device=FIRST).code == rpc_pb2.ERROR_DEVICE_LOST
                assert [row(service, "m", device).leases for device in (HOST, SECOND)] == [1, 1]
                assert not elsewhere.has_answer()
    procfs.wait_until(lambda: service.status().leases == 0, WAIT_S, "no lease")


def test_what_is_pinned_comes_back_with_its_device(machine):
    service = machine()
    files(service, "pinned", "other")
    started(service)
    service.cli("pin", "pinned", "--device", FIRST)
    service.cli("load", "other", "--device", FIRST)
    service.devices.lose(0)
    service.devices.xid(0, 79)
    procfs.wait_until(lambda: row(service, "pinned", FIRST).state == "FAILED", WAIT_S, "the loss")
    service.devices.find(0)
    service.cli("devices", "--test", FIRST)
    procfs.wait_until(lambda: row(service, "pinned", FIRST).state == "RESIDENT", WAIT_S, "the pinned model")
    assert row(service, "other", FIRST).state == "FAILED", "nobody asked for it"
    service.cli("load", "other", "--device", FIRST)


# ---- what people see ------------------------------------------------------------------------------------------------


def test_http_names_the_place_and_counts_by_it(machine):
    service = machine()
    files(service, "m")
    started(http.listen(service))
    service.wait_router()
    with http.Client(service) as client:
        loaded = client.post("/resvisor/v1/models/m/load?device=cuda:1").json
        assert (loaded["device"], loaded["state"]) == (SECOND, "RESIDENT")
        assert client.post("/resvisor/v1/models/m/load").json["device"] == HOST
        metrics = client.get("/metrics").body.decode()
    assert 'resvisor_model_bytes{model="m",device="cuda:1"} ' in metrics
    assert 'resvisor_model_bytes{model="m"} ' in metrics, "the host's series are called as ever"
