"""`resvisor verify` on the real ComfyUI: what it says of two workflows that take turns, and how it ends when something fails."""

import json
import os
import re
import signal
import subprocess

import pytest
import tiny
from conftest import Comfy, wait_for
from harness import procfs
from harness.protos import rpc_pb2
from harness.service import PROGRAM

pytestmark = pytest.mark.timeout(240)

DONE, NOT_GOOD, JOB_FAILED, CANCELLED = 0, 1, 5, 9
LOADERS = {"UNETLoader", "VAELoader"}
PATIENT = ("--factor", 1000)  # times are not what these tests are about


@pytest.fixture(scope="module")
def service(make_comfy):
    """A worker for pictures and one for clips."""
    return make_comfy({"image": {}, "video": {}})


@pytest.fixture
def files(tmp_path):
    found = []
    # By their nodes both are clips, so the first one names its type.
    picture = {"prompt": tiny.image(prefix="verify"), "extra_data": {"resvisor": {"type": "image"}}}
    for name, graph in (("a.json", picture), ("b.json", tiny.video(prefix="verify"))):
        (tmp_path / name).write_text(json.dumps(graph))
        found.append(tmp_path / name)
    return found


def verify(service, *arguments, check=True, **kwargs):
    return service.cli("verify", "-c", service.config_file, *arguments, check=check, timeout=200, **kwargs)


def answer(service, *arguments, code=DONE):
    result = verify(service, "--json", *PATIENT, *arguments, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_image_video_image_stays_warm(service, files):
    found = answer(service, *files)
    runs = found["runs"]
    assert found["good"] and found["reasons"] == []
    assert [(run["workflow"], run["type"], run["worker"]) for run in runs] == [
        ("A", "image", "image/0"), ("A", "image", "image/0"), ("B", "video", "video/0"), ("A", "image", "image/0"),
    ]  # fmt: skip
    assert [run["state"] for run in runs] == ["cold", "warm", "cold", "switch"]
    assert set(runs[0]["loaders"]) == set(runs[2]["loaders"]) == LOADERS
    for run in runs[1], runs[3]:
        # the sampler ran, since its seed is another one; no loader did, since nothing was thrown out
        assert run["loaders"] == [] and "KSampler" in run["executed"] and run["read_bytes"] == 0 and run["seeds"] == 1
    assert all(run["pooled"] and run["aliased_bytes"] > 1 << 20 and run["own_files"] == 0 for run in runs)
    assert len({run["seed_offset"] for run in runs}) == 4
    first = found["workflows"][0]
    assert first["file"] == str(files[0]) and min(first["cold_us"], first["warm_us"], first["switch_us"]) > 0
    assert found["workflows"][1]["warm_us"] is None


def test_in_one_worker_loaders_run_and_read_nothing(service, files):
    found = answer(service, *files, "--type", "A=video", "--type", "B=video", "--order", "B,A,B,A")
    assert [run["state"] for run in found["runs"]] == ["cold", "cold", "switch", "switch"]
    for run in found["runs"][2:]:
        assert run["worker"] == "video/0" and run["read_bytes"] == 0
        assert "UNETLoader" in run["loaders"] and set(run["loaders"]) <= LOADERS, run
        assert run["pool_files"] >= 1


def test_what_people_see(service, files):
    result = verify(service, *PATIENT, *files)
    lines = result.stdout.splitlines()
    assert lines[0] == f"A = {files[0]}, type image" and lines[1] == f"B = {files[1]}, type video"
    assert lines[3].split()[:5] == ["RUN", "STATE", "WORKER", "WAIT", "LOAD"]
    assert [line.split()[2] for line in lines[4:8]] == ["cold", "warm", "cold", "switch"]
    assert re.search(r"^A: cold .*, warm .*, after a switch .* \([\d.]+ x warm\)$", result.stdout, re.MULTILINE)
    assert lines[-1].startswith("verdict: good.")


def test_the_same_seed_is_answered_from_the_cache(service, files):
    assert verify(service, *PATIENT, "--same-seed", *files).stdout.count("computed nothing: ComfyUI answered it") >= 1


def test_a_switch_that_computes_nothing_is_not_good(service, tmp_path):
    for name in ("a.json", "b.json"):
        graph = {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
            "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": name[0]}},
        }
        (tmp_path / name).write_text(json.dumps(graph))
    found = answer(service, tmp_path / "a.json", tmp_path / "b.json", "-t", "A=image", "-t", "B=video", code=NOT_GOOD)
    assert any("computed nothing" in reason for reason in found["reasons"]), found


def test_too_slow_after_a_switch_is_not_good(service, tmp_path):
    """B leaves a file, and A takes 3 s when it is there."""
    for name, kind in (("a.json", "TestPause"), ("b.json", "TestTouch")):
        (tmp_path / name).write_text(json.dumps(tiny.node(kind, mark=str(tmp_path / "mark"))))
    files = (tmp_path / "a.json", tmp_path / "b.json")
    result = verify(service, *files, "-t", "A=image", "-t", "B=image", check=False)
    assert result.returncode == NOT_GOOD and result.stdout.endswith("verdict: not good\n")
    assert re.search(r"^not good: run 4 \(A, after a switch\) took 3.* s, .* times the warm ", result.stdout, re.MULTILINE)
    assert "note: run" not in result.stdout


def test_unpooled_is_not_good(make_comfy, files):
    plain = make_comfy({"image": {"pooling": "off"}})
    found = answer(plain, *files, "-t", "A=image", "-t", "B=image", code=NOT_GOOD)
    assert not found["good"] and "worker image/0 is unpooled" in found["reasons"][0]


def plain_processes():
    return [pid for pid in procfs.descendants(os.getpid()) if "/resvisor-baseline-" in str(procfs.command(pid))]


def test_the_same_on_a_plain_comfyui(service, files):
    found = answer(service, "--baseline", *files)
    assert [run["baseline"]["state"] for run in found["runs"]] == ["cold", "warm", "cold", "switch"]
    assert set(found["runs"][0]["baseline"]["loaders"]) == LOADERS
    assert found["runs"][1]["baseline"]["loaders"] == [] and "KSampler" in found["runs"][1]["baseline"]["executed"]
    assert found["baseline_ready_us"] > 0 and all(run["baseline"]["run_us"] > 0 for run in found["runs"])
    assert min(found["workflows"][0][key] for key in ("plain_cold_us", "plain_warm_us", "plain_switch_us")) > 0
    assert plain_processes() == []


def test_a_plain_comfyui_that_does_not_start(service, files, tmp_path):
    """Its last words are shown."""
    wrong = json.loads(service.config_file.read_text())
    wrong["types"]["image"]["args"] = ["--cpu", "--no-such-flag"]
    (tmp_path / "wrong.yaml").write_text(json.dumps(wrong))
    result = service.cli("verify", "-c", tmp_path / "wrong.yaml", "--baseline", *PATIENT, *files, check=False, timeout=200)
    assert result.returncode == JOB_FAILED and "--no-such-flag" in result.stderr, result.stderr


def test_a_job_that_fails(service, files, tmp_path):
    (tmp_path / "raise.json").write_text(json.dumps(tiny.node("TestRaise", mark="hello")))
    result = verify(service, files[0], tmp_path / "raise.json", "-t", "B=image", check=False)
    assert result.returncode == JOB_FAILED
    assert f"run 3, {tmp_path}/raise.json: node 1 (TestRaise): ValueError: this node says hello" in result.stderr


def spawn(service, *arguments):
    command = [str(PROGRAM), "verify", "-c", str(service.config_file), *map(str, arguments)]
    return subprocess.Popen(command, env=service.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_cancels_the_running_job(service, files, tmp_path):
    mark = tmp_path / "begun"
    (tmp_path / "wait.json").write_text(json.dumps(tiny.node("TestWait", mark=str(mark))))
    process = spawn(service, tmp_path / "wait.json", files[1], "-t", "A=image")
    wait_for(mark)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == CANCELLED and "was cancelled" in said
    with Comfy(service) as comfy:
        ended = [job for job in comfy.list() if job.job_id in said]
        assert [job.state for job in ended] == [rpc_pb2.JOB_CANCELLED]


def test_ctrl_c_ends_the_plain_comfyui(service, files):
    process = spawn(service, "--baseline", *PATIENT, *files)
    procfs.wait_until(plain_processes, 120, "a plain ComfyUI")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == CANCELLED and "interrupted" in said
    assert plain_processes() == []
