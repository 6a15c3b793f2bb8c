"""The real ComfyUI as a worker: results, sharing, switches, faults."""

import io
import json
import os
import shutil
import signal
import urllib.request
import zipfile

import pytest
import tiny
from conftest import Comfy, comfy_type, wait_for
from harness import procfs
from harness.protos import rpc_pb2
from harness.python import run_python

pytestmark = pytest.mark.timeout(240)

VERIFY = """
    import json, resvisor, sys
    with resvisor.connect() as connection, connection.attach(sys.argv[1]) as lease:
        lease.verify()
        print(json.dumps({t.name: t.digest for t in lease.tensors()}))
"""


def done(job):
    assert job.state == rpc_pb2.JOB_DONE, job
    return job


def pixels(found):
    """Outputs by what they show: names have counters, and pictures carry the prompt."""
    return {name.split("_")[0]: data for name, data in found.items()}


def failed(job, code="ERROR_JOB_FAILED"):
    assert job.state != rpc_pb2.JOB_DONE and rpc_pb2.ErrorCode.Name(job.error.code) == code, job
    return job.error.message


def test_a_worker_says_what_is_pooled(service):
    for worker in service.type("image").workers:
        assert worker.detail.startswith("ComfyUI 0.3.75 at http://127.0.0.1:"), worker
        assert "; pooled: comfy.utils.load_torch_file, torch.nn.Module.load_state_dict" in worker.detail


def test_a_picture_comes_back(service, comfy):
    job = done(comfy.prompt(tiny.image(prefix="first")))
    found = comfy.outputs(job)
    types = {output.name: output.content_type for output in job.outputs}
    picture = next(name for name in found if name.endswith(".png"))
    assert types[picture] == "image/png" and found[picture].startswith(b"\x89PNG")
    assert "WanModel of" in service.log() and "17 parameters in place" in service.log()


def test_image_video_image_stays_warm_and_equal(comfy):
    first = pixels(comfy.outputs(done(comfy.prompt(tiny.image(prefix="warm")))))
    done(comfy.prompt(tiny.video()))
    for _ in range(3):  # both workers come by
        job = done(comfy.prompt(tiny.image(prefix="warm")))
        assert job.read_bytes == 0
        assert pixels(comfy.outputs(job)) == first
    animation = comfy.outputs(done(comfy.prompt(tiny.video(seed=2))))
    assert [data[8:12] for data in animation.values()] == [b"WEBP"]


def test_equal_with_and_without_the_pool(service, comfy, make_comfy):
    pooled = pixels(comfy.outputs(done(comfy.prompt(tiny.image(seed=7, prefix="same")))))
    plain = make_comfy({"image": {"pooling": "off"}})
    assert "unpooled: types.image.pooling is off" in plain.worker("image").detail
    with Comfy(plain) as other:
        job = done(other.prompt(tiny.image(seed=7, prefix="same")))
        assert pixels(other.outputs(job)) == pooled
    assert not plain.status().models


def test_loras_leave_the_pool_as_it_is(service, comfy, base):
    model = base / "models" / "diffusion_models" / "image.safetensors"
    graph = tiny.image(seed=3, prefix="lora")
    before = run_python(service, VERIFY, model)
    first = pixels(comfy.outputs(done(comfy.prompt(graph))))
    for change in (tiny.with_lora, tiny.with_hook_lora):
        changed = pixels(comfy.outputs(done(comfy.prompt(change(graph)))))
        assert changed["lora-latent"] != first["lora-latent"]
        assert run_python(service, VERIFY, model) == before
        for _ in range(2):
            assert pixels(comfy.outputs(done(comfy.prompt(graph)))) == first


def test_a_killed_worker_comes_back_and_reads_nothing(service, comfy):
    first = pixels(comfy.outputs(done(comfy.prompt(tiny.image(prefix="kill")))))
    worker = service.worker("image")
    os.kill(worker.pid, signal.SIGKILL)
    service.wait_worker("image", starts=worker.starts + 1, timeout=100)
    for _ in range(2):
        job = done(comfy.prompt(tiny.image(prefix="kill")))
        assert job.read_bytes == 0 and pixels(comfy.outputs(job)) == first


def test_killed_in_a_prompt(service, comfy, tmp_path):
    error = failed(comfy.prompt(tiny.node("TestKill", mark=str(tmp_path / "killed"))), "ERROR_WORKER_DIED")
    assert "SIGKILL" in error
    service.wait_ready(100)
    again = {"payload": json.dumps(tiny.node("TestKill", mark=str(tmp_path / "killed"))).encode()}
    assert comfy.outputs(done(comfy.run("image", **again))) == {"node-1.txt": b"alive"}


def test_sys_exit_in_a_node(service, comfy):
    # The job ends with its worker: between the two ends the worker would get a job that it cannot run.
    error = failed(comfy.prompt(tiny.node("TestExit", mark="")), "ERROR_WORKER_DIED")
    assert "prompt thread ended in node 1 (TestExit)" in error
    service.wait_log("exited with code 1")
    service.wait_ready(100)
    done(comfy.prompt(tiny.image(prefix="after-exit")))


def test_cancel(service, comfy, tmp_path):
    mark = tmp_path / "begun"
    job = comfy.submit("image", payload=json.dumps(tiny.node("TestWait", mark=str(mark))).encode())
    wait_for(mark)
    comfy.cancel(job.job_id)
    assert comfy.wait(job.job_id).state == rpc_pb2.JOB_CANCELLED
    done(comfy.prompt(tiny.image(prefix="after-cancel")))


def test_comfyui_refuses_a_prompt(comfy):
    graph = tiny.image()
    graph["1"]["inputs"]["unet_name"] = "nothing.safetensors"
    error = failed(comfy.prompt(graph), "ERROR_BAD_REQUEST")
    assert "value_not_in_list" in error and "nothing.safetensors" in error
    graph = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
    assert "NoSuchNode" in failed(comfy.prompt(graph), "ERROR_BAD_REQUEST")


@pytest.mark.parametrize(
    "payload, word",
    [
        (b"", "no payload"),
        (b"{", "no JSON"),
        (b"[]", "no prompt"),
        (b'{"1": {"inputs": {}}}', "class_type"),
        (b'{"1": {"class_type": "A", "inputs": []}}', "inputs"),
        (b'{"nodes": [], "links": []}', "API format"),
        (b'{"1": {"class_type": "A", "inputs": {"a": NaN}}}', "NaN"),
        (b"[" * 40_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
    ],
)
def test_a_payload_that_is_no_prompt(comfy, payload, word):
    assert word in failed(comfy.prompt(payload), "ERROR_BAD_REQUEST")


def test_an_error_in_a_node(comfy):
    assert failed(comfy.prompt(tiny.node("TestRaise", mark="hello"))) == "node 1 (TestRaise): ValueError: this node says hello"


def test_many_outputs_come_as_one_archive(comfy):
    found = comfy.outputs(done(comfy.prompt(tiny.node("TestMany", mark="m"))))
    with zipfile.ZipFile(io.BytesIO(found.pop("outputs.zip"))) as archive:
        assert {archive.read(name) for name in archive.namelist()} == {f"m{i}".encode() for i in range(12)}
    assert not found


def test_a_corrupt_model_has_comfyuis_own_words(service, comfy, base):
    folder = base / "models" / "diffusion_models"
    data = (folder / "image.safetensors").read_bytes()
    (folder / "short.safetensors").write_bytes(data[: len(data) // 2])
    graph = tiny.image(model="short.safetensors")
    try:
        error = failed(comfy.prompt(graph))
    finally:
        (folder / "short.safetensors").unlink()
    assert "UNETLoader" in error and "incomplete metadata, file not fully covered" in error
    service.wait_log("not from the pool: ")


def test_a_new_file_of_the_same_name_is_loaded(service, comfy, base):
    """ComfyUI itself caches by name: after a restart, or from another graph, the new content counts."""
    folder = base / "models" / "diffusion_models"
    shutil.copy(folder / "image.safetensors", folder / "change.safetensors")
    graph = tiny.image(model="change.safetensors", prefix="change")
    first = pixels(comfy.outputs(done(comfy.prompt(graph))))
    shutil.copy(folder / "video.safetensors", folder / "new.safetensors")
    os.replace(folder / "new.safetensors", folder / "change.safetensors")
    for _ in range(2):
        done(comfy.prompt(tiny.video()))  # the other model, so that the first is dropped from ComfyUI's cache
    second = pixels(comfy.outputs(done(comfy.prompt(graph))))
    (folder / "change.safetensors").unlink()
    assert second["change-latent"] != first["change-latent"]


def test_workers_have_folders_and_files_of_their_own(service, base):
    state = service.folder.parent
    users = {path.parent.name for path in state.rglob("user") if path.parent.name.startswith("image-")}
    assert users == {"image-1"}
    assert list(state.rglob("comfyui/users"))  # of the primary worker
    assert {path.name for path in (base / "output").iterdir()} >= {"image-0", "image-1"}


def test_the_server_answers_at_the_address_that_was_said(service):
    url = service.worker("image").detail.split(" at ")[1].split(";")[0]
    with urllib.request.urlopen(f"{url}/system_stats", timeout=30) as answer:
        assert json.load(answer)["system"]["comfyui_version"] == "0.3.75"


def test_two_workers_share_a_model(service, comfy, base):
    for _ in range(4):
        done(comfy.prompt(tiny.image(prefix="share")))
    users = 0
    for worker in service.type("image").workers:
        with open(f"/proc/{worker.pid}/smaps") as lines:
            shared = copied = 0
            inside = False
            for line in lines:
                if "-" in line.split(" ")[0]:
                    inside = "/memfd:resvisor" in line
                elif inside and line.startswith("Pss:"):
                    shared += int(line.split()[1])
                elif inside and line.startswith("Anonymous:"):
                    copied += int(line.split()[1])
        users += shared > 0
    assert users >= 1
    model = service.model(base / "models" / "diffusion_models" / "image.safetensors")
    assert model.loads == 1 and model.leases >= users


def test_what_the_pool_holds_does_not_count_as_memory_of_comfyui(comfy):
    graph = tiny.image(prefix="size")
    found = comfy.outputs(done(comfy.prompt({"1": graph["1"], "2": tiny.node("TestSize", model=["1", 0])["1"]})))
    counted, whole = map(int, next(data for name, data in found.items() if name.endswith(".txt")).split())
    assert 0 < counted < whole / 10


def test_the_detail_says_what_is_in_the_pool(service, comfy):
    for _ in range(2):
        done(comfy.prompt(tiny.image(prefix="detail")))

    def said():
        return any("of the pool in place, " in worker.detail for worker in service.type("image").workers)

    procfs.wait_until(said, 30, "a detail with bytes in the pool")


def test_warm_up_packs_and_an_orderly_stop(make_comfy, base, tmp_path):
    warmup = tmp_path / "warmup.json"
    warmup.write_text(json.dumps(tiny.image(prefix="warmed")))
    arguments = comfy_type(base)["args"]
    at = arguments.index("resvisor_test")
    arguments[at:at] = ["resvisor_twin", "resvisor_broken"]
    service = make_comfy({"image": {"warmup": str(warmup), "args": arguments}})
    assert "warmed up with" in service.log() and "WanModel of" in service.log()
    detail = service.worker("image").detail
    assert "not imported: resvisor_broken: No module named 'nowhere'" in detail
    assert "node 'TestTwin' of resvisor_t" in detail and "is replaced by that of resvisor_t" in detail
    with Comfy(service) as comfy:
        assert not comfy.list()  # the warm-up was no job
        assert done(comfy.prompt(tiny.image(prefix="warmed-2"))).read_bytes == 0
    assert service.stop(60) == 0
    assert service.log().count("Stopped server") == 1
    assert procfs.wait_until(lambda: not service.ours(), 10, "no process left") is True
