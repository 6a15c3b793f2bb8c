"""`resvisor route`: what it prints, its exit codes, and how often it is right about ComfyUI's own workflow templates."""

import collections
import concurrent.futures
import json
import os
import subprocess

import pytest
from harness import models
from harness.service import PROGRAM, run_program
from harness.templates import templates, without_output_nodes

DONE, USAGE, REFUSED, NOT_FOUND = 0, 2, 4, 6
ENV = {key: value for key, value in os.environ.items() if key != "RESVISOR_CONFIG"}

# Templates whose category and our decision differ, each with the reason why the decision stays.
DIFFER = {
    # A still picture by a video model: the video model is what must be resident.
    "image_minimax_h3_t2i": "video",
    "video_bernini_r_image_editing": "video",
    "image_chrono_edit_14B": "video",
    "Image_capybara_v0_1_image_edit": "video",
    "Image_capybara_v0_1_text_to_image": "video",
    # A clip goes in, and pictures come out: masks, and frames without their background.
    "utility_video_segment_sam3": "image",
    "api_veed_remove_video_background": "image",
    # Sound for a clip, and a clip with the sound is saved too: video is stronger.
    "api_mirelo_video_to_sfx": "video",
    "api_sonilo_v2m": "video",
    # Speech to text saves a text.
    "api_fishaudio_speech_to_text": "text",
    "api_elevenLabs_speech_to_text": "text",
    # A solid, and a clip that shows it: video is stronger.
    "utility_sam3d_body": "video",
    "3d_triposplat_image_to_gaussian_splat": "video",
    # A lesson about numbers and texts, which shows texts.
    "basic_datatype_conversion": "text",
}
ACCURACY_MIN = 0.975  # 630 of 644 are as their category says; DIFFER has the rest
# Without a single known output node, by what makes something and by models alone: 615 of 644. The rest are services on the
# network whose class names do not say what they return.
BLIND_ACCURACY_MIN = 0.95


def route(*arguments, check=True, env=None, **kwargs):
    return run_program("route", *arguments, check=check, env=env or ENV, **kwargs)


def write(folder, graph, name="graph.json"):
    path = folder / name
    path.write_text(graph if isinstance(graph, str) else json.dumps(graph))
    return path


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


STILL = {"1": node("UNETLoader", unet_name="flux.safetensors"), "2": node("SaveImage", images=["1", 0])}
CLIP = {"7": node("SaveVideo", video=["8", 0]), "8": node("CreateVideo")}


# ---- one graph ----


@pytest.mark.smoke
def test_the_decision_is_explained(tmp_path):
    text = route(write(tmp_path, CLIP)).stdout
    lines = text.splitlines()
    assert lines[0] == "kind: video" and lines[1].startswith("rule: output (") and lines[2].startswith("type: none (")
    assert lines[5].split() == ["7", "SaveVideo", "saves", "video", "-"]


def test_json_has_everything(tmp_path):
    graph = {"1": node("UNETLoader", unet_name="wan2.2.safetensors"), "2": node("SaveImage", images=["1", 0])}
    answer = json.loads(route("--json", write(tmp_path, graph)).stdout)
    assert answer == {
        "kind": "video", "rule": "model", "type": None, "format": "prompt", "nodes": 2,
        "candidates": [
            {"kind": "video", "makes": 0, "shows": 0, "saves": 0, "model": 1},
            {"kind": "image", "makes": 0, "shows": 0, "saves": 1, "model": 0},
        ],
        "evidence": [
            {"node": "2", "class_type": "SaveImage", "role": "saves", "kind": "image", "file": None},
            {"node": "1", "class_type": "UNETLoader", "role": "model", "kind": "video", "file": "wan2.2.safetensors"},
        ],
    }  # fmt: skip


def test_a_graph_from_standard_input():
    command = [str(PROGRAM), "route", "--json", "-"]
    result = subprocess.run(command, input=json.dumps({"prompt": CLIP}), env=ENV, text=True, capture_output=True, check=True)
    assert json.loads(result.stdout)["kind"] == "video"


def test_exit_codes(tmp_path):
    for graph, code, message in (
        ("{", USAGE, "line 1"), ("[]", USAGE, "no graph"), ("{}", USAGE, "no node"),
        ('{"1": {"class_type": 5}}', USAGE, "node 1"), ("[" * 100, REFUSED, "nested deeper"),
        ('{"1": "' + "x" * (16 << 20) + '"}', REFUSED, "larger than 16 MiB"),
    ):  # fmt: skip
        path = write(tmp_path, graph)
        result = route(path, check=False)
        assert result.returncode == code and f"{path}: " in result.stderr and message in result.stderr, result.stderr
        error = json.loads(route("--json", path, check=False).stdout)["error"]
        assert message in error["message"]
    assert route(tmp_path / "nothing", check=False).returncode == REFUSED
    assert route(tmp_path, check=False).returncode == REFUSED
    assert route(check=False).returncode == USAGE
    wrong = route(write(tmp_path, CLIP), "--set", "types.a.accepts=nothing", check=False)
    assert wrong.returncode == USAGE and "types.a" in wrong.stderr


def test_texts_of_the_graph_are_escaped(tmp_path):
    graph = {"\x1b[31m": node("SaveVideo\x1b[2J"), "2": node("SaveVideo")}
    result = route(write(tmp_path, graph))
    assert "\x1b" not in result.stdout and "SaveVideo\\x1b[2J" in result.stdout
    failed = route("-t", "a\x1bb", write(tmp_path, graph), check=False)
    assert failed.returncode == NOT_FOUND and "\x1b" not in failed.stderr


# ---- with types ----


@pytest.fixture
def service(make_service):
    """A configuration with three types; it is not started."""
    service = make_service()
    for name in ("flux", "sdxl"):
        models.write_plain(service.models / f"{name}.safetensors", mib=1)
    service.config["models"] = {"flux": "flux.safetensors", "xl": "sdxl.safetensors"}
    service.config["types"] = {
        "image": {"executor": "image", "models": ["xl"]},
        "pictures": {"executor": "image", "models": ["flux"], "accepts": ["image"]},
        "video": {"executor": "video"},
    }
    return service


def decide(service, graph, *arguments, check=True):
    service.write_config()
    result = route("--json", "-c", service.config_file, *arguments, write(service.folder, graph), check=check)
    return result.returncode, json.loads(result.stdout)


def test_the_type_that_accepts_the_kind_and_holds_the_models(service):
    assert decide(service, CLIP)[1]["type"] == "video"
    assert decide(service, STILL)[1]["type"] == "pictures"
    assert decide(service, {"1": node("SaveImage")})[1]["type"] == "image"
    unknown = {"1": node("SomePack", anything="unet/flux.safetensors")}
    answer = decide(service, unknown)[1]
    assert (answer["type"], answer["rule"], answer["kind"]) == ("pictures", "affinity", "image")


def test_a_kind_that_no_type_accepts(service):
    graph = {"1": node("SaveAudio")}
    code, answer = decide(service, graph, check=False)
    assert code == NOT_FOUND and answer["kind"] == "audio" and answer["type"] is None
    assert answer["error"]["name"] == "no_such_type" and "audio" in answer["error"]["remedy"]
    assert decide(service, graph, "--set", "types.video.accepts=video,any")[1]["type"] == "video"


def test_an_explicit_type_wins(service):
    marked = {"prompt": CLIP, "extra_data": {"resvisor": {"type": "pictures"}}}
    assert decide(service, marked)[1] | {"type": "pictures", "rule": "explicit", "kind": "image"} == decide(service, marked)[1]
    assert decide(service, marked, "--type", "image")[1]["type"] == "image"
    code, answer = decide(service, marked, "-t", "nothing", check=False)
    assert code == NOT_FOUND and "nothing" in answer["error"]["message"]


# ---- the templates ----


def kinds(inputs):
    """The kind of each workflow, in order. inputs: JSON texts."""

    def one(text):
        result = subprocess.run([str(PROGRAM), "route", "--json", "-"], input=text, env=ENV, text=True, capture_output=True)
        assert result.returncode == DONE, result.stdout + result.stderr
        return json.loads(result.stdout)["kind"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, inputs))


def report(name, corpus, decided):
    wrong = {template.name: kind for template, kind in zip(corpus, decided) if kind != template.kind}
    accuracy = 1 - len(wrong) / len(corpus)
    pairs = collections.Counter((t.kind, kind) for t, kind in zip(corpus, decided) if kind != t.kind)
    print(f"{name}: {len(corpus) - len(wrong)} of {len(corpus)} templates as their category says, {accuracy:.1%}")
    for (wanted, kind), count in pairs.most_common():
        print(f"  {count:3} of kind {wanted} decided as {kind}")
    return accuracy, wrong


def test_every_template_of_comfyui_is_classified(capsys):
    corpus = templates()
    assert len(corpus) > 500
    with capsys.disabled():
        print()
        accuracy, wrong = report("route", corpus, kinds(template.path.read_text() for template in corpus))
    assert wrong == DIFFER
    assert accuracy >= ACCURACY_MIN


def test_templates_without_a_known_output_node(capsys):
    corpus = templates()
    texts = (json.dumps(without_output_nodes(json.loads(template.path.read_text()))) for template in corpus)
    with capsys.disabled():
        print()
        accuracy, _ = report("route, output nodes unknown", corpus, kinds(texts))
    assert accuracy >= BLIND_ACCURACY_MIN
