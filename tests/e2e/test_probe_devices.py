"""What workers and clients of libresvisor have of models on devices: read where they lie, by the library and by the driver."""

import pathlib

import pytest

from harness import models, procfs
from harness.jobs import Jobs
from harness.probe import digests, look, probe_type
from harness.protos import rpc_pb2

MIB = 1 << 20
KNOWN_S = 60
WAIT_S = 30
BACKENDS = {"discrete": "cuda-vmm", "no-vmm": "cuda-ipc", "unified-plain": "memfd"}
ON_DEVICE = ("discrete", "no-vmm")
LAUNCH_FAILED = 719

# They say themselves where their models lie: to run them once more on a device would be the same again.
pytestmark = [pytest.mark.devices, pytest.mark.host_memory]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Where results of self-tests are kept: devices of one kind are tested once for all tests here."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def probing(make_service, make_devices, results):
    """probing(kind, types): a running service with two models on one device, and the probe or other executors as its types."""

    def make(kind, types=None, ready=True, folder=None):
        devices = make_devices(kind=kind, memory="1GiB")
        service = make_service(env={**devices.env, "STATE_DIRECTORY": str(results / kind)})
        service.devices = devices
        service.bytes = models.write_every_dtype(service.models / "every.safetensors")
        service.other = models.write_plain(service.models / "other.safetensors", mib=2, seed=5)
        service.config["models"] = {name: {"path": f"{name}.safetensors"} for name in ("every", "other")}
        if folder:
            service.config["model_folders"].append(str(folder))
            service.config["models"].update({path.stem: {"path": str(path)} for path in folder.iterdir()})
        service.config["types"] = types or {"look": probe_type(models=["every"], device="cuda:0")}
        service.start()
        if ready:
            service.wait_ready(KNOWN_S)
        return service

    return make


def device_state(service):
    return service.cli_json("devices")["devices"][0]["state"]


@pytest.mark.smoke
@pytest.mark.parametrize("read", ["lib", "driver"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_worker_reads_its_model_on_the_device(probing, kind, read):
    service = probing(kind)
    with Jobs(service) as jobs:
        (model,) = look(jobs, "look", read=read)["models"]
    assert model["tensors"] == digests(service.bytes)
    assert model["matches"] and model["verified"] and not model["revoked"]
    assert (model["device"], model["backend"]) == ("cuda:0", BACKENDS[kind])
    assert (model["device_type"], model["device_id"]) == (2, 0)
    assert model["mapping"] == ("private" if kind == "unified-plain" else "shared")
    assert service.worker("look").detail.endswith("mapped on cuda:0")


@pytest.mark.parametrize("kind", BACKENDS)
def test_one_process_has_models_on_the_host_and_on_the_device(probing, kind):
    service = probing(kind)
    with Jobs(service) as jobs:
        report = look(jobs, "look", attach="other@cuda:0,other@host,every@cuda:0", hold=1)
        assert [m["device"] for m in report["models"]] == ["cuda:0", "cuda:0", "host", "cuda:0"]
        assert all(m["matches"] and m["verified"] for m in report["models"])
        assert report["models"][1]["tensors"] == report["models"][2]["tensors"] == digests(service.other)
        assert len(look(jobs, "look", drop=1)["models"]) == 1


@pytest.mark.parametrize("kind", BACKENDS)
def test_dlpack_tensors_keep_memory_of_a_device(probing, kind):
    service = probing(kind)
    with Jobs(service) as jobs:
        report = look(jobs, "look", attach="other@cuda:0", dlpack=1)
    found = report["dlpack"]
    assert found["matches"] and found["tensors"] == len(service.bytes) + len(service.other)
    assert (found["device_type"], found["device_id"]) == (2, 0)
    assert found["read_only"] == (kind != "unified-plain")


def test_a_write_through_a_mapping_is_refused_and_the_pool_stays_as_it_is(probing):
    service = probing("discrete")
    with Jobs(service) as jobs:
        report = look(jobs, "look", write=1)
        assert report["write"]["refused"] and report["write"]["error"] != 0
        # That worker's context is broken: its next job fails with a word for it, and somebody looks at the device.
        job = jobs.run("look")
        assert job.state == rpc_pb2.JOB_FAILED and job.error.code == rpc_pb2.ERROR_DEVICE_LOST
        service.cli("restart", "look")
        service.wait_worker("look", starts=2, timeout=WAIT_S)
        (model,) = look(jobs, "look")["models"]
        assert model["tensors"] == digests(service.bytes) and model["generation"] == 1
    assert device_state(service) == "READY"


@pytest.mark.parametrize("kind", ON_DEVICE)
def test_an_executor_that_reads_by_the_cpu_is_refused_at_its_start(probing, kind):
    service = probing(kind, {"image": {"executor": "image", "models": ["every"], "device": "cuda:0"}}, ready=False)
    failed = procfs.wait_until(
        lambda: next((t for t in service.status().types if t.name == "image" and t.state == "FAILED"), None),
        KNOWN_S, "a type that has failed",
    )  # fmt: skip
    assert failed.name == "image"
    log = service.cli("logs", "image").stdout
    assert "the executor image reads weights by the CPU" in log and "types.NAME.device to host" in log


def test_an_executor_that_reads_by_the_cpu_works_on_unified_memory(probing, real_models):
    types = {"image": {"executor": "image", "models": ["image", "text-encoder"], "device": "cuda:0"}}
    service = probing("unified-plain", types, folder=real_models)
    with Jobs(service) as jobs:
        assert jobs.output(jobs.run_done("image", {"steps": 1})).startswith(b"\x89PNG")
    assert service.worker("image").detail.endswith("mapped on cuda:0")


def test_the_pool_is_read_once_for_workers_and_clients_on_a_device(probing):
    service = probing("discrete", {"look": probe_type(models=["every"], device="cuda:0", workers=3)})
    with Jobs(service) as jobs:
        for _ in range(3):
            (model,) = look(jobs, "look", attach="every@cuda:0")["models"][:1]
            assert model["read_bytes"] == 0 or model["waited"]
    service.devices.wait_allocated(2 * MIB)


def test_a_workers_report_makes_resvisor_look_at_the_device_itself(probing):
    service = probing("discrete")
    with Jobs(service) as jobs:
        look(jobs, "look", report=LAUNCH_FAILED)
        service.wait_log(f"met error {LAUNCH_FAILED}", WAIT_S)
        procfs.wait_until(lambda: device_state(service) == "READY", WAIT_S, "a device that has passed its test again")
        assert look(jobs, "look")["models"][0]["matches"], "the worker goes on meanwhile"


def test_a_report_about_a_device_that_is_lost_takes_its_models_away(probing):
    service = probing("discrete")
    service.devices.lose(0)
    with Jobs(service) as jobs:
        job = jobs.run("look")
        assert job.state == rpc_pb2.JOB_FAILED and job.error.code == rpc_pb2.ERROR_DEVICE_LOST
        procfs.wait_until(lambda: device_state(service) == "LOST", WAIT_S, "a lost device")
        procfs.wait_until(lambda: service.devices.allocated(0) == 0, WAIT_S, "no memory of the lost device in use")


@pytest.mark.parametrize("kind", ON_DEVICE)
def test_a_client_of_the_library_learns_that_its_lease_is_revoked(probing, kind):
    service = probing(kind, {"look": probe_type(models=["other"], device="host")})
    with Jobs(service) as jobs:
        held = look(jobs, "look", attach="every@cuda:0", hold=1)["models"][1]
        assert held["matches"] and not held["revoked"]
        service.devices.lose(0)
        service.cli("devices", "--test", check=False)
        procfs.wait_until(lambda: device_state(service) == "LOST", WAIT_S, "a lost device")
        host, held = look(jobs, "look", hold=1)["models"]
        assert held["revoked"] and host["matches"] and not host["revoked"]
        assert len(look(jobs, "look", drop=1)["models"]) == 1
    service.cli("restart", "look")  # a context that broke gives its mappings back only with its process
    procfs.wait_until(lambda: service.devices.allocated(0) == 0, WAIT_S, "no memory of the lost device in use")


def test_a_worker_without_models_on_devices_loads_no_driver(probing):
    service = probing("discrete", {"look": probe_type(models=["every"], device="host")})
    with Jobs(service) as jobs:
        assert look(jobs, "look", attach="other@host", dlpack=1)["models"][0]["matches"]
        assert not loaded_driver(service.worker("look").pid)
        assert look(jobs, "look", attach="other@cuda:0")["models"][1]["matches"]
        assert loaded_driver(service.worker("look").pid), "what the first half of this test would have found"


def loaded_driver(pid):
    return "libcuda" in pathlib.Path(f"/proc/{pid}/maps").read_text()
