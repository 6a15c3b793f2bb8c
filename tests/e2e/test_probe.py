"""The probe where the suite has its models: on the host, or on a device (harness/placement.py)."""

import pytest

from harness import models, placement, procfs
from harness.jobs import Jobs
from harness.probe import digests, look, probe_type

WAIT_S = 10
# device, backend, DLPack's type and number of the device
WHERE = (placement.DEVICE, placement.BACKEND, 2, 0) if placement.ON else ("host", "memfd", 1, 0)


@pytest.fixture
def probing(make_service):
    service = make_service()
    service.bytes = models.write_every_dtype(service.models / "every.safetensors")
    service.other = models.write_plain(service.models / "other.safetensors", mib=2, seed=5)
    service.config["models"] = {name: {"path": f"{name}.safetensors"} for name in ("every", "other")}
    service.config["types"] = {"look": probe_type(models=["every"])}
    service.start()
    service.wait_ready()
    return service


def wait_for_no_lease(service):
    """The supervisor hears of a detach on another connection than the router of the job's end."""
    procfs.wait_until(lambda: service.model("other").leases == 0, WAIT_S, "no lease on the other model")


@pytest.mark.parametrize("read", ["lib", "driver"])
def test_the_probe_sees_the_bytes_of_the_file(probing, read):
    with Jobs(probing) as jobs:
        (model,) = look(jobs, "look", read=read)["models"]
    assert model["tensors"] == digests(probing.bytes)
    assert model["matches"] and model["verified"] and not model["revoked"]
    assert (model["device"], model["backend"], model["device_type"], model["device_id"]) == WHERE


def test_the_probe_attaches_and_holds_further_models(probing):
    some = ("block.0.weight", "block.7.weight")
    with Jobs(probing) as jobs:
        report = look(jobs, "look", attach="other@host", hold=1)
        assert [model["name"] for model in report["models"]] == ["every", "other"]
        assert report["models"][1]["tensors"] == digests(probing.other)
        assert probing.model("other").leases == 1
        report = look(jobs, "look", tensors=",".join(some), hold=1)
        assert report["models"][1]["tensors"] == digests({name: probing.other[name] for name in some})
        assert len(look(jobs, "look", drop=1)["models"]) == 1
    wait_for_no_lease(probing)


def test_dlpack_tensors_keep_a_model_that_is_no_longer_leased(probing):
    with Jobs(probing) as jobs:
        report = look(jobs, "look", attach="other", dlpack=1)
        assert report["dlpack"]["matches"] and report["dlpack"]["tensors"] == len(probing.bytes) + len(probing.other)
        assert report["dlpack"]["device_type"] == WHERE[2]
        assert report["dlpack"]["read_only"] == (placement.BACKEND in ("cuda-vmm", "cuda-ipc"))
    wait_for_no_lease(probing)
