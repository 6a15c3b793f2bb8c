"""The executor cuda-image where it cannot compute: it loads, takes its models on the device, and says what is wrong."""

import subprocess

import pytest
from harness.service import BUILD, MAKE_MODEL

pytestmark = pytest.mark.skipif(
    not (BUILD / "lib" / "resvisor" / "executors" / "cuda-image.so").exists(), reason="this build has no executor cuda-image"
)


def service_with(make_service, device, env=None):
    service = make_service(env=env)
    for kind in ("image", "text-encoder"):
        subprocess.run([MAKE_MODEL, kind, "--bytes", "4MiB", service.models / f"{kind}.safetensors"], check=True, capture_output=True)
    service.config["models"] = {"image": "image.safetensors", "text": "text-encoder.safetensors"}
    service.config["types"] = {"image": {"executor": "cuda-image", "models": ["image", "text"], "device": device}}
    service.start()
    service.wait_worker("image")
    return service


def test_models_on_the_host_are_a_mistake_of_the_configuration(make_service):
    service = service_with(make_service, "host")
    result = service.cli("submit", "image", "--wait", "--json", check=False)
    assert result.returncode == 5 and "set the type's `device`" in result.stdout + result.stderr
    assert service.worker("image").starts == 1


@pytest.mark.devices
def test_a_runtime_that_fails_fails_the_job_and_ends_the_worker(make_service, make_devices):
    """The CUDA runtime wants more of a driver than the double has; so it fails, as it would on a driver that is too old."""
    service = service_with(make_service, "cuda:0", make_devices(memory="1GiB").env)
    result = service.cli("submit", "image", "--wait", "--json", check=False)
    assert result.returncode == 5 and "cudaSetDevice" in result.stdout + result.stderr
    service.wait_worker("image", starts=2)
    assert "its device has failed this process" in service.cli("logs", "image").stdout
