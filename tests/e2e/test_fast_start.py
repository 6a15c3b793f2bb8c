"""Workers of kind comfyui that are forked from a template: a stand-in for ComfyUI, without torch."""

import os
import pathlib
import subprocess
import sys

import pytest
from harness import procfs, standin
from harness.protos import control_pb2
from harness.python import PACKAGE, run_python
from harness.service import ROOT, SANITIZED

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")


@pytest.fixture
def comfy(tmp_path):
    return standin.StandIn(tmp_path / "comfy")


@pytest.fixture
def make(make_service, comfy, tmp_path):
    """make({type: keys}): a service whose types are the stand-in; not started."""

    def make(types=None, **keys):
        service = make_service()
        service.config["types"] = {
            name: comfy.type(tmp_path / "state", **own) for name, own in (types or {"image": keys}).items()
        }
        return service

    return make


def ready(service):
    service.start()
    service.wait_ready(60)
    return service


def template(service, number=0):
    return service.status().templates[number]


def restart(service, name="image"):
    service.cli("restart", name, timeout=60)
    return service.worker(name)


def test_a_worker_says_how_it_was_started(make):
    service = ready(make())
    worker, found = service.worker("image"), template(service)
    assert "; forked from template/0 in " in worker.detail and "pooled: comfy.utils.load_torch_file" in worker.detail
    assert (found.id, found.state, list(found.types), found.starts, found.forks) == ("template/0", "READY", ["image"], 1, 1)
    assert found.rss_bytes > 0 and "torch 0; " in found.detail
    assert procfs.stat(worker.pid)[1] == service.keeper_pid == procfs.stat(found.pid)[1]
    assert procfs.command(worker.pid) == "python -m resvisor.comfyui image/0"
    assert not procfs.zombies(service.keeper_pid)
    text = service.cli("status").stdout
    assert "template/0" in text and "long way" not in text
    json = service.cli_json("status")["templates"]
    assert json[0]["pid"] == found.pid and json[0]["types"] == ["image"] and 0 < json[0]["pss_bytes"] < json[0]["rss_bytes"]
    assert "extra nodes" in service.cli("logs", "template").stdout
    assert "failed ['broken.py']" in service.cli("logs", "image").stdout and "extra nodes" not in service.cli("logs", "image").stdout
    assert "Torch already imported" not in service.log()


def test_a_forked_worker_is_what_a_spawned_one_is(make, comfy):
    """Environment, limits, signals, descriptors and all that a process has from its start: compared with the long way."""
    comfy.node("facts", standin.FACTS)
    types = {
        "forked": {"workers": 2, "env": {"MY": "own", "OPENBLAS_NUM_THREADS": "2"}},
        "spawned": {"fast_start": "off", "env": {"MY": "own", "OPENBLAS_NUM_THREADS": "2"}},
    }
    service = ready(make(types))
    assert service.worker("spawned").detail.endswith("; started the long way: types.spawned.fast_start is off")
    assert len(service.status().templates) == 1
    first, second, plain = (standin.facts(comfy, name) for name in ("forked/0", "forked/1", "spawned/0"))
    assert first["drawn"][0] != second["drawn"][0] and first["name"] != second["name"]
    assert first["drawn"][1] == 0 or first["drawn"][1] != second["drawn"][1]
    assert int(first["incarnation"]) != int(second["incarnation"])
    for key in ("RESVISOR_WORKER", "RESVISOR_TYPE"):
        assert first["environ"].pop(key) != plain["environ"].pop(key)
    for found in (first, plain):  # the socket of its port has another number in each
        assert found["environ"].pop("RESVISOR_HTTP_FD") in found["fds"]
        found["fds"] = len(found["fds"])
    for key in ("drawn", "name", "incarnation"):
        for found in (first, plain):
            del found[key]
    assert first == plain


def test_custom_nodes_and_folders_are_each_workers_own(make, comfy):
    service = ready(make(workers=2))
    comfy.node("edited", "print('the node of', args.temp_directory, args.port)")
    assert "; forked from template/0" in restart(service).detail
    lines = [line for line in service.log().splitlines() if "the node of" in line]
    assert len(lines) == 2 and {"image-0", "image-1"} == {pathlib.Path(line.split()[-2]).parent.name for line in lines}
    assert len({line.split()[-1] for line in lines}) == 2
    assert template(service).starts == 1


def test_types_share_a_template_if_all_that_modules_see_is_equal(make):
    types = {"a": {}, "b": {}, "c": {"env": {"MY": "own"}}, "d": {"pooling": "off"}, "e": {"fast_start": "off"}}
    service = ready(make(types))
    assert [list(found.types) for found in service.status().templates] == [["a", "b"], ["c"], ["d"]]
    detail = service.worker("d").detail
    assert "; unpooled: types.d.pooling is off; " in detail and "; forked from template/2" in detail


@pytest.mark.parametrize("name", ["comfy/utils.py", "torch/__init__.py"])
def test_changed_files_make_a_new_template(make, comfy, name):
    service = ready(make())
    before = template(service)
    with open(comfy.folder / name, "a") as file:
        file.write("\nprint('edited', flush=True)\n")
    worker = restart(service)
    after = template(service)
    assert "; forked from template/0" in worker.detail and after.starts == 2 and after.pid != before.pid
    assert f"{comfy.folder / name} has changed" in service.log() and "edited" in service.cli("logs", "template").stdout
    assert service.status().worker_deaths == 0
    restart(service)
    assert template(service).pid == after.pid


def test_without_cpu_only_packages_are_imported(make):
    service = ready(make(args=[]))
    assert "; forked from template/0" in service.worker("image").detail
    assert "none of ComfyUI's own" in template(service).detail
    assert "extra nodes" in service.cli("logs", "image").stdout


@pytest.mark.parametrize(("gate", "reason"), [("cuda", "torch.cuda is initialised"), ("thread", "it has 2 threads")])
def test_a_template_that_must_not_fork_does_not(make, comfy, gate, reason):
    comfy.close(gate)
    service = ready(make())
    worker = service.worker("image")
    assert "; started the long way: template/0 is FAILED: exited with code 78" in worker.detail and reason in worker.detail
    assert reason in service.cli("status").stdout
    comfy.open(gate)
    restart(service)  # resets it; the next start finds it ready
    assert "; forked from template/0" in restart(service).detail


def test_cuda_that_was_initialised_later_refuses_the_fork(make, comfy):
    service = ready(make())
    comfy.close("cuda")
    worker = restart(service)
    assert "started the long way: torch.cuda is initialised, which does not survive a fork" in worker.detail
    procfs.wait_until(lambda: template(service).state == "FAILED", 10, "a failed template")


OPENER = """
import ctypes
driver, init = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
driver.cuGetProcAddress_v2(b"cuInit", ctypes.byref(init), 12000, ctypes.c_uint64(1), None)
ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(init.value)(0)
"""


@pytest.mark.devices
def test_a_package_that_initialises_the_driver_keeps_the_template_from_forking(make_service, make_devices, comfy, tmp_path):
    """torch knows nothing of it, so the driver itself is asked."""
    (comfy.folder / "requirements.txt").write_text("opener\n")
    (comfy.folder / "opener.py").write_text(OPENER)
    service = make_service(env=make_devices().env)
    service.config["types"] = {"image": comfy.type(tmp_path / "state", args=[])}
    detail = ready(service).worker("image").detail
    assert "; started the long way: template/0 is FAILED" in detail and "the CUDA driver is initialised" in detail


@pytest.mark.devices
def test_gpu_only_workers_are_forked_from_a_template_that_leaves_the_gpu_alone(make_service, make_devices, comfy, tmp_path):
    devices = make_devices()
    service = make_service(env=devices.env)
    service.config["types"] = {"image": comfy.type(tmp_path / "state", args=["--gpu-only"])}
    ready(service)
    assert "; forked from template/0" in service.worker("image").detail and service.type("image").device == "cuda:0"
    assert template(service).pid not in {record.pid for record in devices.records()}


def test_the_messages_are_those_of_protobuf(tmp_path):
    request = control_pb2.Frame(id=7)
    fork = request.template_fork
    fork.worker, fork.keeper_pid, fork.incarnation, fork.directory, fork.umask = "image/0", 1, 2**40, b"/tmp", 0o22
    fork.arguments.extend([b"--state", b""])
    fork.environment.extend([b"A=b", b"C=\xff"])
    fork.limits.add(resource=7, soft=2**64 - 1, hard=5)
    code = """
        import json, os, socket, sys
        from resvisor.comfyui import wire
        from resvisor.comfyui.template import Request
        found = Request.read(wire.decode(bytes.fromhex(sys.argv[1])), [4, 5])
        made = wire.encode([(wire.FRAME_ID, 300), (wire.ERROR, wire.encode([(1, 29), (2, "text")]))]).hex()
        bad = 0
        for cut in range(1, len(sys.argv[1]) // 2):
            try:
                Request.read(wire.decode(bytes.fromhex(sys.argv[1])[:cut]), [4, 5])
            except (wire.Malformed, IndexError, KeyError):
                bad += 1
        found.environment = {key: os.fsencode(value).hex() for key, value in found.environment.items()}
        print(json.dumps([found.__dict__, made, bad]))
    """
    found, made, bad = run_python(None, code, request.SerializeToString().hex())
    assert found == {
        "id": 7, "worker": "image/0", "keeper": 1, "incarnation": 2**40, "arguments": ["--state", ""], "umask": 0o22,
        "environment": {"A": "62", "C": "ff"}, "directory": "/tmp", "limits": [[7, 2**64 - 1, 5]], "fds": [4, 5],
    }  # fmt: skip
    assert control_pb2.Frame.FromString(bytes.fromhex(made)) == control_pb2.Frame(id=300, error={"code": 29, "message": "text"})
    assert bad > 0


def test_a_large_environment_comes_as_a_file_in_memory(make):
    service = ready(make(env={f"LONG_{i}": "x" * 4000 for i in range(30)}))
    assert "; forked from template/0" in service.worker("image").detail


def test_a_template_by_hand_says_what_it_is_for():
    result = subprocess.run(
        [sys.executable, "-m", "resvisor.comfyui.template", "--help"], env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0 and "resvisor starts it" in result.stdout
