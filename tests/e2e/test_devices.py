"""Devices: what is found and chosen, what people see of it, and what is kept over starts. resvisor-device is a script here."""

import json
import re

import pytest

from harness import http, procfs
from harness.control import Refused
from harness.device_standin import devices, request_test, wait_known, wait_state
from harness.jobs import Jobs
from harness.protos import control_pb2, rpc_pb2
from harness.service import ROOT

GIB = 1 << 30
UUID = "GPU-01010101-0101-0101-0101-010101010101"


@pytest.mark.smoke
def test_a_machine_without_devices_says_why(make_standin, standin):
    standin.does(test="done('libcuda.so.1 is not installed', driver='')")
    service = make_standin().start()
    wait_known(service)
    assert service.cli("devices").stdout == "no devices: libcuda.so.1 is not installed\n"
    assert service.cli_json("devices") == {"devices": [], "reason": "libcuda.so.1 is not installed"}
    assert service.cli_json("status")["devices_reason"] == "libcuda.so.1 is not installed"
    assert "cuda:" not in service.cli("status").stdout
    assert standin.starts("watch") == 0
    assert not (service.base / "state").exists()


def test_with_cuda_off_nothing_is_searched_for(make_standin, standin):
    service = make_standin(cuda={"enabled": "off"}).start()
    assert "cuda.enabled is off" in service.cli("devices").stdout
    assert standin.starts("test") == 0
    result = service.cli("devices", "--test", check=False)
    assert result.returncode == 6 and "cuda.enabled is off" in result.stderr


@pytest.mark.smoke
def test_what_was_found_is_shown_with_the_choice_and_its_reason(make_standin, standin):
    standin.does(test="found(1); found(2, unified=True, pageable=True, product='Unified'); tests(1); tests(2, speed=10**11)\n"
                      "tests(2, 'memfd', speed=2 * 10**11); done()",
                 watch="memory(processes=[(1, 1 << 20), (os.getppid(), 2 << 20), (os.getpid(), 3 << 20)]); stay()")  # fmt: skip
    service = make_standin().start()
    wait_known(service)
    first, second = devices(service)
    assert (first["name"], first["uuid"], first["state"], first["backend"]) == ("cuda:0", UUID, "READY", "cuda-vmm")
    assert first["reason"] == "cuda-vmm: all 9 tests passed, 400 GB/s; memfd is not possible: not a unified device"
    assert first["total_bytes"] == 16 * GIB and first["budget_bytes"] == 16 * GIB // 100 * 90
    assert [t["name"] for t in first["tests"]][:3] == ["create", "copy", "import"]
    assert first["attributes"] == [{"number": 102, "name": "vmm", "value": 1}]
    assert (second["state"], second["backend"], second["unified"]) == ("READY", "memfd", True)
    assert second["memory_source"] == "meminfo" and second["free_bytes"] > 0

    def watched():
        row = devices(service)[0]
        return row if row["memory_source"] == "nvml" else None

    row = procfs.wait_until(watched, 20, "numbers of NVML")
    assert (row["used_bytes"], row["free_bytes"]) == (4 * GIB, 12 * GIB)
    assert [p["bytes"] for p in row["processes"]] == [1 << 20, 2 << 20, 3 << 20]
    text = service.cli("devices", "--attributes").stdout
    assert "cuda-vmm: all 9 tests passed" in text and "vmm" in text and UUID in text and "400.0 GB/s" in text
    assert "cuda:1" in service.cli("devices", "cuda:1").stdout and "cuda:0" not in service.cli("devices", "cuda:1").stdout
    assert "cuda:0" in service.cli("devices", UUID.lower().replace("gpu", "GPU")).stdout
    assert "cuda:0" in service.cli("status").stdout
    result = service.cli("devices", "cuda:7", check=False)
    assert result.returncode == 6 and "there are host, cuda:0, cuda:1" in result.stderr


def test_the_start_does_not_wait_for_the_self_test(make_standin, standin):
    standin.does(test="wait('go'); found(); tests(); done()")
    service = make_standin().start()
    procfs.wait_until(lambda: standin.reached("go"), 20, "the self-test")
    assert service.cli("devices").stdout == "no devices: they are being searched for\n"
    standin.open("go")
    assert wait_state(service, "READY")["backend"] == "cuda-vmm"


def test_a_configured_backend_is_used_or_the_device_is_not(make_standin, standin):
    standin.does(test="found(1); tests(1); tests(1, 'cuda-ipc', speed=10**11); found(2); tests(2)\n"
                      "tests(2, 'cuda-ipc', ['create'], 'failed', 'cuIpcGetMemHandle: 801'); done()")  # fmt: skip
    wish = {"backend": "cuda-ipc"}
    service = make_standin(devices={"cuda:0": {**wish, "budget": "1GiB"}, "GPU-" + "02020202-0202-0202-0202-020202020202": wish})
    service.start()
    wait_known(service)
    first, second = devices(service)
    assert (first["state"], first["backend"], first["budget_bytes"]) == ("READY", "cuda-ipc", GIB)
    assert "as configured" in first["reason"]
    assert (second["state"], second["backend"]) == ("UNUSABLE", "")
    assert second["reason"] == "cuda-ipc is configured and does not work: create failed: cuIpcGetMemHandle: 801"


CACHING = """
if start.known and start.known_driver == "13.0":
    found(); done()
else:
    found(); tests(); done()
"""


def test_results_are_kept_over_starts(make_standin, standin):
    standin.does(test=CACHING)
    service = make_standin().start()
    assert wait_state(service, "READY")["cached"] is False
    service.stop()
    service.start()
    second = wait_state(service, "READY")
    assert second["cached"] is True and len(second["tests"]) == 9
    assert "tested at an earlier start" in service.cli("devices").stdout
    assert request_test(service).devices[0].cached is False  # who asks wants to know
    service.stop()
    # The same uuid with other attributes: what the cache says is of no use, and all is tested at once.
    standin.does(test="found(total=8 << 30)\nif not start.known: tests()\ndone()")
    service.start()
    assert wait_state(service, "READY")["cached"] is False
    service.stop()
    # Damage.
    [path] = (service.base / "state").rglob("devices")
    path.write_bytes(path.read_bytes()[:-20] + b"\0" * 20)
    standin.does(test="tests_wanted = not start.known; found()\nif tests_wanted: tests()\ndone()")
    service.start("--log-level", "debug")
    assert wait_state(service, "READY")["cached"] is False
    service.wait_log("earlier results of self-tests are not used")


def test_a_device_is_tested_again_on_request(make_standin, standin):
    standin.does(test="found(); tests(result='failed', detail='719'); done()")
    service = make_standin().start()
    assert wait_state(service, "UNUSABLE")["backend"] == ""
    standin.does(test="found(); tests(); done()")
    answer = json.loads(service.cli("devices", "--test", "cuda:0", "--json").stdout)
    assert answer["devices"][0]["state"] == "READY"
    assert standin.starts("test") == 2
    standin.does(test="found(); tests(result='failed', detail='719'); done()")
    refused = service.cli("devices", "--test", check=False)
    assert refused.returncode == 4 and "UNUSABLE" in refused.stdout
    # One that the driver does not list any more is lost, and comes back.
    standin.does(test="done('cuInit: 100 CUDA_ERROR_NO_DEVICE')")
    assert request_test(service).devices[0].state == "LOST"
    assert "CUDA_ERROR_NO_DEVICE" in devices(service)[0]["reason"]
    standin.does(test="found(3); found(); tests(); tests(3); done()")
    found = request_test(service).devices
    assert [(d.name, d.state) for d in found] == [("cuda:0", "READY"), ("cuda:1", "READY")]


def test_a_device_that_there_is_not_is_refused_by_name(make_standin):
    service = make_standin().start()
    wait_state(service, "READY")
    with service.peer() as peer:
        frame = control_pb2.Frame(device_request=rpc_pb2.DeviceRequest(action=rpc_pb2.DEVICE_TEST, device="cuda:9"))
        with pytest.raises(Refused) as refused:
            peer.request(frame)
    assert refused.value.code == rpc_pb2.ERROR_NO_SUCH_DEVICE


def test_devices_by_rpc_http_and_metrics(make_standin, standin):
    service = http.listen(make_standin())
    service.start()
    wait_state(service, "READY")
    service.wait_router()
    with Jobs(service) as jobs:
        shown = jobs.call(rpc_pb2.Request(device=rpc_pb2.DeviceRequest(device="cuda:0")))[0].devices
        assert [d.name for d in shown.devices] == ["cuda:0"] and shown.reason == ""
        assert [d.backend for d in jobs.call(rpc_pb2.Request(status=rpc_pb2.StatusRequest()))[0].status.devices] == ["cuda-vmm"]
        tested = jobs.call(rpc_pb2.Request(device=rpc_pb2.DeviceRequest(action=rpc_pb2.DEVICE_TEST)))[0].devices
        assert tested.devices[0].state == "READY" and standin.starts("test") == 2
    with http.Client(service) as client:
        everything = client.get("/resvisor/v1/devices").json
        assert [d["name"] for d in everything["devices"]] == ["cuda:0"]
        one = client.get(f"/resvisor/v1/devices/{UUID}").json
        assert (one["name"], one["state"], one["tests"][0]["result"]) == ("cuda:0", "READY", "ok")
        assert client.get("/resvisor/v1/devices/cuda:5").status == 404
        text = client.get("/metrics").body.decode()
    documented = set(re.findall(r"`(resvisor_device_\w+)`", (ROOT / "docs" / "http.md").read_text()))
    assert set(re.findall(r"^# TYPE (resvisor_device_\w+)", text, re.MULTILINE)) == documented
    assert 'resvisor_device_state{device="cuda:0",state="READY"} 1' in text
    assert f'resvisor_device_memory_bytes{{device="cuda:0"}} {16 * GIB}' in text
