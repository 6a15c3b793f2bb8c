"""The real ComfyUI behind its address: files up and down, two kinds of work in turn, and models that are damaged or missing."""

import io
import json
import os
import uuid

import pytest
import tiny
from conftest import COMFYUI, START_S, comfy_type, wait_for
from harness import http, procfs
from harness.service import Service
from harness.websocket import WebSocket

pytestmark = pytest.mark.timeout(240)

WAIT_S = 90
LOADERS = {"UNETLoader", "VAELoader"}


@pytest.fixture(scope="module")
def service(tmp_path_factory, base):
    """Two types: image, which runs sound too, and video."""
    folder = tmp_path_factory.mktemp("front-real")
    service = http.listen(Service(folder, {"model_folders": [str(base / "models")]}))
    keys = {"state_folder": str(folder / "state")}
    service.config["types"] = {"image": comfy_type(base, accepts=["any"], **keys), "video": comfy_type(base, **keys)}
    service.start()
    service.wait_ready(timeout=START_S)
    http.wait_front(service)
    yield service
    service.end()


class Address(http.Client):
    """ComfyUI's address, as its clients use it."""

    def __init__(self, service):
        super().__init__(service, timeout=WAIT_S)

    def queue(self, nodes, **fields):
        answer = self.post("/prompt", {"prompt": nodes, **fields})
        assert answer.status == 200, answer
        return answer.json["prompt_id"]

    def entry(self, prompt_id):
        def ended():
            found = self.get(f"/history/{prompt_id}").json.get(prompt_id)
            return found if found and found["status"]["status_str"] in ("success", "error") else None

        return procfs.wait_until(ended, WAIT_S, f"the end of {prompt_id}")

    def run(self, nodes, **fields):
        entry = self.entry(self.queue(nodes, **fields))
        assert entry["status"]["status_str"] == "success", entry["status"]
        return entry

    def file(self, file, **headers):
        query = f"filename={file['filename']}&subfolder={file['subfolder']}&type={file['type']}"
        return self.get(f"/api/view?{query}", headers=headers)

    def upload(self, path, data, name="up.png", **fields):
        line = uuid.uuid4().hex
        parts = [f'--{line}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
        head = f'--{line}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\nContent-Type: image/png\r\n\r\n'
        body = b"".join(parts) + head.encode() + data + f"\r\n--{line}--\r\n".encode()
        return self.post(path, body, headers={"Content-Type": f"multipart/form-data; boundary={line}"})


@pytest.fixture
def address(service):
    with Address(service) as found:
        yield found


def picture(side=16):
    """A PNG of noise, made here."""
    from PIL import Image

    out = io.BytesIO()
    Image.frombytes("RGB", (side, side), os.urandom(side * side * 3)).save(out, "PNG")
    return out.getvalue()


def sound(seed=1):
    """A third model, which stands for a model of sound: what matters is that it is another one than video's."""
    nodes = tiny.image(seed, prefix="sound")
    del nodes["8"], nodes["7"], nodes["6"], nodes["5"]
    return nodes


def outputs(entry, node="8"):
    return [file for values in entry["outputs"][node].values() for file in values if isinstance(file, dict)]


def test_an_upload_goes_into_a_prompt_and_comes_back(address):
    data = picture()
    answer = address.upload("/upload/image", data, name="mine.png", overwrite="true")
    assert answer.status == 200 and answer.json == {"name": "mine.png", "subfolder": "", "type": "input"}, answer
    assert address.get("/view?filename=mine.png&type=input").body == data
    nodes = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "mine.png"}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "copy"}},
    }
    entry = address.run(nodes)
    (file,) = outputs(entry)
    from PIL import Image

    def pixels(found):
        return Image.open(io.BytesIO(found)).convert("RGB").tobytes()

    assert pixels(address.file(file).body) == pixels(data)
    reference = json.dumps({"filename": "mine.png", "subfolder": "", "type": "input"})
    mask = io.BytesIO()
    Image.new("RGBA", (16, 16), (0, 0, 0, 128)).save(mask, "PNG")
    answer = address.upload("/api/upload/mask", mask.getvalue(), name="mask.png", original_ref=reference, subfolder="", type="input")
    assert answer.status == 200, answer
    assert Image.open(io.BytesIO(address.get(f"/view?filename={answer.json['name']}&type=input").body)).mode == "RGBA"


def test_ranges_of_a_file(address):
    (file,) = outputs(address.run(tiny.image(prefix="range")))
    whole = address.file(file)
    assert whole.status == 200 and whole.headers["Content-Type"] == "image/png" and whole.body.startswith(b"\x89PNG")
    part = address.file(file, Range="bytes=10-19")
    assert part.status == 206 and part.body == whole.body[10:20]
    assert part.headers["Content-Range"] == f"bytes 10-19/{len(whole.body)}"
    assert address.file(file, Range="bytes=-7").body == whole.body[-7:]
    assert address.file(file, Range=f"bytes={len(whole.body)}-").status == 416
    assert address.get("/view?filename=nothing.png").status == 404


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_preview_comes_from_the_worker_that_made_it(address, kind):
    """A temp file lies in a folder of its worker; both have one of that name."""
    nodes = tiny.image(seed=5) if kind == "image" else tiny.video(seed=5)
    for node in ("8", "9"):
        nodes.pop(node, None)
    nodes["8"] = {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}}
    entry = address.run(nodes, extra_data={"resvisor": {"type": kind}})
    assert entry["status"]["resvisor"]["type"] == kind
    for file in outputs(entry):
        assert file["type"] == "temp"
        assert address.file(file).body.startswith(b"\x89PNG")


def loader_reads(service, base):
    """How often each model file was read."""
    return {str(model.name): model.loads for model in service.status().models}


def switched(service, base, address, first, second):
    """first, second, first, second …: after each was there once, no run reads a byte, no file is loaded again, results are equal."""
    results = {}
    for make, type_name in (first, second):
        entry = address.run(make(), extra_data={"resvisor": {"type": type_name}})
        results[make] = entry
    loads = loader_reads(service, base)
    for seed, (make, type_name) in enumerate((first, second, first), 100):
        entry = address.run(make(seed=seed), extra_data={"resvisor": {"type": type_name}})
        found = entry["status"]["resvisor"]
        assert found["type"] == type_name and found["read_bytes"] == 0 and not found["cold"], found
        cached = next(data["nodes"] for kind, data in entry["status"]["messages"] if kind == "execution_cached")
        loaders = {number for number, node in make().items() if node["class_type"] in LOADERS}
        assert loaders <= set(cached), f"loader nodes ran again: {loaders - set(cached)}"
    assert loader_reads(service, base) == loads


def test_image_video_image_runs_no_loader(service, base, address):
    switched(service, base, address, (tiny.image, "image"), (tiny.video, "video"))


def test_video_sound_video_runs_no_loader(service, base, address):
    switched(service, base, address, (tiny.video, "video"), (sound, "image"))


def test_the_type_follows_from_the_graph(address):
    empty = {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}}
    save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "empty"}}
    assert address.run({"1": empty, "8": save})["status"]["resvisor"]["type"] == "image"
    assert address.run(tiny.video(seed=11))["status"]["resvisor"]["type"] == "video"


def test_a_missing_model_is_refused_in_comfyui_s_words(address):
    answer = address.post("/prompt", {"prompt": tiny.image(model="nothing.safetensors")})
    assert answer.status == 400 and answer.json["error"]["type"] == "prompt_outputs_failed_validation", answer
    (error,) = answer.json["node_errors"]["1"]["errors"]
    assert error["type"] == "value_not_in_list" and "nothing.safetensors" in error["details"]


def test_a_corrupt_model_has_comfyui_s_own_words(address, base, service):
    folder = base / "models" / "diffusion_models"
    data = (folder / "image.safetensors").read_bytes()
    short = folder / "cut.safetensors"
    short.write_bytes(data[: len(data) // 2])
    client = uuid.uuid4().hex
    try:
        with WebSocket(service.http_port, f"/ws?clientId={client}", timeout=WAIT_S) as socket:
            socket.wait_event("status")
            prompt = address.queue(tiny.image(model="cut.safetensors"), client_id=client)
            error = socket.wait_prompt(prompt, WAIT_S)[-1]
    finally:
        short.unlink()
    assert error["type"] == "execution_error" and error["data"]["node_type"] == "UNETLoader", error
    assert "incomplete metadata, file not fully covered" in error["data"]["exception_message"], error
    entry = address.entry(prompt)
    assert entry["status"]["status_str"] == "error" and "incomplete metadata" in json.dumps(entry["status"]["messages"])


def test_a_prompt_that_waits_is_cancelled(address, tmp_path):
    mark = tmp_path / "begun"
    here = {"extra_data": {"resvisor": {"type": "image"}}}
    running = address.queue(tiny.node("TestWait", mark=str(mark)), **here)
    wait_for(mark)
    waiting = address.queue(tiny.image(seed=77), **here)
    assert [item[1] for item in address.get("/queue").json["queue_pending"]] == [waiting]
    assert address.post("/queue", {"delete": [waiting]}).status == 200
    assert address.get("/queue").json["queue_pending"] == []
    assert address.post("/interrupt", {"prompt_id": running}).status == 200
    entry = address.entry(running)
    assert "execution_interrupted" in [kind for kind, _ in entry["status"]["messages"]]


def test_what_both_have_and_what_the_primary_has(address):
    classes = address.get("/object_info").json
    assert {"KSampler", "SaveImage", "TestConditioning"} <= set(classes)
    assert address.get("/api/object_info/SaveImage").json == {"SaveImage": classes["SaveImage"]}
    assert address.get("/system_stats").json["system"]["comfyui_version"] in (COMFYUI / "comfyui_version.py").read_text()
    assert "image.safetensors" in address.get("/models/diffusion_models").json
    assert address.post("/api/settings/Comfy.Test", "1", headers={"Content-Type": "application/json"}).status == 200
    assert address.get("/api/settings").json["Comfy.Test"] == 1
    assert address.post("/userdata/workflows%2Fa.json?overwrite=true", "{}").status == 200
    assert address.get("/userdata/workflows%2Fa.json").body == b"{}"
