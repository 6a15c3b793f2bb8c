"""`deploy/quickstart.sh --comfyui`: the story on the real ComfyUI, with the torch and the ComfyUI that the tests have already."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
import tiny
import workflows
from conftest import COMFYUI
from harness import procfs
from harness.service import BUILD, ROOT

pytestmark = pytest.mark.timeout(480)
QUICKSTART = ROOT / "deploy" / "quickstart.sh"


def quickstart(*arguments, **env):
    result = subprocess.run(
        ["sh", str(QUICKSTART), "--comfyui", *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "RESVISOR_BUILD": str(BUILD), "RESVISOR_QUICKSTART_PYTHON": sys.executable, **env},
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def last_line(text):
    return text.rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """One run with tiny models: (output, folder of the produced files, folder that must be empty again)."""
    private = tmp_path_factory.mktemp("private")
    (private / "comfyui").symlink_to(COMFYUI)
    out = private / "out"
    # Paths of sockets are short, those of pytest are not.
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="rv-", dir="/tmp"))
    before = procfs.descendants(os.getpid())
    code, text = quickstart(RESVISOR_QUICKSTART_COMFYUI=str(private), RESVISOR_QUICKSTART_OUT=str(out), RESVISOR_QUICKSTART_GIB="0.05",
                            TMPDIR=str(temporary))  # fmt: skip
    assert code == 0, text
    yield text, out, temporary, before
    shutil.rmtree(temporary)


def test_the_story_ends_well_and_leaves_nothing(story):
    text, out, temporary, before = story
    assert last_line(text).startswith("quickstart: ok in ")
    assert {path.name for path in out.iterdir()} == {"comfyui-image.png", "comfyui-video.webp"}
    assert list(temporary.iterdir()) == []
    assert procfs.wait_until(lambda: not procfs.descendants(os.getpid()) - before, 10, "no process left") is True


def test_the_story_shows_what_it_promises(story):
    text = story[0]
    for words in (
        "the last image read 0 bytes",
        "killed by signal 9 (SIGKILL)",
        "0 bytes read, the same picture bit for bit; video kept its process",
        "the node said 'first' before, 'second' now",
        "POST /prompt, image: ran on image/0 in ",
        "POST /prompt, video: ran on video/0 in ",
    ):
        assert words in text, text


def test_a_file_that_comfyui_saved_carries_its_workflow(story):
    out = story[1]
    for name, sink in (("comfyui-image.png", "SaveImage"), ("comfyui-video.webp", "SaveAnimatedWEBP")):
        graph = workflows.in_file(out / name)
        assert sink in {node["class_type"] for node in graph.values()}
    again = workflows.seeded(graph, 99)
    assert graph["4"]["inputs"]["seed"] == 7 and again["4"]["inputs"]["seed"] == 99


def test_an_installation_without_a_workflow_says_what_to_give():
    code, text = quickstart(COMFYUI)
    assert code == 1
    assert "image.json video.json" in text and "API format" in text
    assert last_line(text) == f"quickstart: FAILED: nothing in {COMFYUI}/output carries a workflow for image and video"


def test_a_workflow_of_the_editor_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"nodes": [], "links": []}))
    code, text = quickstart(COMFYUI, tmp_path / "a.json", tmp_path / "a.json")
    assert code == 1 and last_line(text) == f"quickstart: FAILED: {tmp_path}/a.json holds no workflow in API format"


@pytest.mark.parametrize("arguments, words", [(["/nonexistent"], "no main.py"), ([COMFYUI, "one.json"], "takes a folder")])
def test_wrong_arguments(arguments, words):
    code, text = quickstart(*arguments)
    assert code == 1 and last_line(text).startswith("quickstart: FAILED: ") and words in last_line(text)


def test_workflows_of_pictures(tmp_path):
    from PIL import Image, PngImagePlugin

    graph = tiny.image()
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "{}")
    info.add_text("prompt", json.dumps(graph))
    output = tmp_path / "output" / "deep"
    output.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(output / "a.png", pnginfo=info)
    Image.new("RGB", (8, 8)).save(output / "plain.png")
    data = (output / "a.png").read_bytes()
    for length in range(0, len(data), 97):
        (output / f"short-{length}.png").write_bytes(data[:length])
    (output / "text.webp").write_bytes(b"prompt:{not json")
    found = list(workflows.made_by(tmp_path))
    assert (output / "a.png", graph) in found and all(other == graph for _, other in found)
    assert workflows.parse(json.dumps({"prompt": graph})) == graph
    assert workflows.parse("[]") is workflows.parse("{}") is workflows.parse('{"a": 1}') is workflows.parse("[" * 10**5) is None


def test_the_quick_start_has_the_torch_of_the_tests():
    pins = [(ROOT / path).read_text() for path in ("deploy/comfyui/requirements-torch.txt", "tests/with_torch/requirements.txt")]
    assert len({line for text in pins for line in text.splitlines() if line.startswith("torch==")}) == 1
