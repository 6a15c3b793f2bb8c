"""`resvisor verify` where nothing runs: command lines, files and configurations that are wrong."""

import json
import os
import sys

import pytest
from harness import models
from harness.service import run_program

USAGE, NOT_RUNNING, REFUSED, NOT_FOUND = 2, 3, 4, 6
ENV = {key: value for key, value in os.environ.items() if key != "RESVISOR_CONFIG"}

GRAPH = {"1": {"class_type": "SaveImage", "inputs": {}}}
CLIP = {"1": {"class_type": "SaveVideo", "inputs": {}}}


@pytest.fixture
def place(tmp_path):
    """Two graphs and a configuration: `image` is of kind comfyui, `video` is not. Nothing listens."""
    (tmp_path / "comfyui").mkdir()
    (tmp_path / "comfyui" / "main.py").touch()
    (tmp_path / "models").mkdir()
    models.write_plain(tmp_path / "models" / "m.safetensors", mib=1)
    types = {
        "image": {"kind": "comfyui", "directory": str(tmp_path / "comfyui"), "python": "/usr/bin/python3"},
        "video": {"executor": "video"},
    }
    config = {"model_folders": [str(tmp_path / "models")], "types": types, "runtime_dir": str(tmp_path / "run")}
    (tmp_path / "resvisor.yaml").write_text(json.dumps(config))
    (tmp_path / "a.json").write_text(json.dumps(GRAPH))
    (tmp_path / "b.json").write_text(json.dumps({"prompt": GRAPH}))
    (tmp_path / "clip.json").write_text(json.dumps(CLIP))
    return tmp_path


def verify(place, *arguments, config=True):
    given = ("-c", place / "resvisor.yaml") if config else ()
    return run_program("verify", *given, *arguments, check=False, env=ENV, cwd=place)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "something is missing"),
        (("a.json",), "something is missing"),
        (("a.json", "b.json", "--order", "A,C,A"), "letters from A to B"),
        (("a.json", "b.json", "--order", "A,,A"), "letters from A to B"),
        (("a.json", "b.json", "--order", "A,B,"), "letters from A to B"),
        (("a.json", "b.json", "--order", ""), "letters from A to B"),
        (("a.json", "b.json", "--order", "A,A,B,B"), "no run after a switch"),
        (("a.json", "b.json", "--order", ",".join("AB" * 40)), "more than 64 runs"),
        (("a.json", "b.json", "--type", "image"), "A=TYPE"),
        (("a.json", "b.json", "--type", "C=image"), "A=TYPE"),
        (("a.json", "b.json", "--type", "A="), "A=TYPE"),
        (("a.json", "b.json", "--factor", "0.5"), "--factor"),
        (("a.json", "b.json", "--factor", "nan"), "--factor"),
        (("a.json", "b.json", "--nonsense"), "unknown option"),
        (("a.json",) * 9, "too many arguments"),
    ],
)
def test_a_wrong_command_line(place, arguments, words):
    result = verify(place, *arguments)
    assert result.returncode == USAGE and words in result.stderr, result.stderr


def test_files_that_are_no_prompt(place):
    (place / "editor.json").write_text('{"nodes": [{"id": 1, "type": "SaveImage"}], "links": []}')
    (place / "broken.json").write_text('{"1": ')
    (place / "large.json").write_text(json.dumps({"1": {"class_type": "SaveImage", "inputs": {"text": "x" * (17 << 20)}}}))
    for name, code, words in (
        ("nothing.json", REFUSED, "cannot be read"),
        ("editor.json", USAGE, "is a workflow of the editor"),
        ("broken.json", USAGE, "line 1"),
        ("large.json", REFUSED, "is larger than"),
    ):
        result = verify(place, "a.json", name)
        assert result.returncode == code and name in result.stderr and words in result.stderr, result.stderr
        error = json.loads(verify(place, "--json", "a.json", name).stdout)["error"]
        assert words in error["message"] + error["remedy"]


def test_types_that_cannot_run_graphs(place):
    result = verify(place, "a.json", "clip.json")
    assert result.returncode == REFUSED and "clip.json belongs to type video, whose workers are of kind native" in result.stderr
    result = verify(place, "a.json", "b.json", "--type", "B=sound")
    assert result.returncode == NOT_FOUND and "sound" in result.stderr
    (place / "sound.json").write_text(json.dumps({"1": {"class_type": "SaveAudio", "inputs": {}}}))
    result = verify(place, "a.json", "sound.json")
    assert result.returncode == NOT_FOUND and "sound.json: the graph is of kind audio" in result.stderr
    result = verify(place, "a.json", "b.json", config=False)
    assert result.returncode == NOT_FOUND and "--config FILE" in result.stderr


def test_nothing_runs(place):
    result = verify(place, "a.json", "b.json")
    assert result.returncode == NOT_RUNNING and "resvisor is not running" in result.stderr


def test_a_type_that_has_failed(make_service, place):
    (place / "comfyui" / "main.py").write_text("raise SystemExit(3)\n")
    service = make_service()
    service.config["types"] = {
        "image": {
            "kind": "comfyui", "directory": str(place / "comfyui"), "python": sys.executable, "max_deaths": 1,
            "state_folder": str(place / "state"),
        }
    }  # fmt: skip
    service.start()
    service.wait_worker("image", "FAILED")
    result = service.cli("verify", "-c", service.config_file, place / "a.json", place / "b.json", check=False)
    assert result.returncode == REFUSED and "image" in result.stderr and "resvisor restart" in result.stderr, result.stderr
