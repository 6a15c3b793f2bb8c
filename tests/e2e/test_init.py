"""`resvisor init comfyui`: a configuration from an installation that is there. A folder of the same shape stands for it."""

import json
import os
import shutil
import sys

import pytest
from harness.service import run_program

DONE, USAGE, REFUSED = 0, 2, 4


@pytest.fixture
def place(tmp_path):
    """A folder of the shape of a ComfyUI: main.py, models, two packs of nodes, a virtual environment with a folder `torch`."""
    folder = tmp_path / "Comfy UI"
    for name in ("models/checkpoints", "custom_nodes/pack-b", "custom_nodes/pack-a", "custom_nodes/old.disabled", "custom_nodes/__pycache__"):
        (folder / name).mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "custom_nodes" / "example.py.example").touch()
    (folder / "comfyui_version.py").write_text('# made by a tool\n__version__ = "0.33.0"\n')
    make_environment(folder / "venv")
    return folder


def make_environment(folder, torch=True):
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "lib/python3.11/site-packages" / ("torch" if torch else "other")).mkdir(parents=True)
    return folder


def init(place, *arguments, check=True, **env):
    variables = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "CONDA_PREFIX", "RESVISOR_CONFIG")}
    return run_program("init", "comfyui", place, *arguments, env={**variables, **env}, cwd=place.parent, check=check)


def found(place, **env):
    """What init says it found, with the configuration in resvisor.yaml of the folder beside."""
    (place.parent / "resvisor.yaml").unlink(missing_ok=True)
    return json.loads(init(place, "--json", **env).stdout)


def test_the_file_is_good_and_says_what_was_found(place):
    result = init(place)
    file = place.parent / "resvisor.yaml"
    text = file.read_text()
    assert "resvisor.yaml: written and good: ComfyUI 0.33.0, 1 model folder, 2 node packs" in result.stdout
    assert f"interpreter: {place}/venv/bin/python, " in result.stdout and "`resvisor start -c resvisor.yaml`" in result.stdout
    assert 'listen: "127.0.0.1:8188"' in text and "http://127.0.0.1:8188" in result.stdout
    assert f'directory: "{place}"' in text and f'python: "{place}/venv/bin/python"' in text  # the link, not what it leads to
    assert "#   pack-a\n#   pack-b\n" in text and "old.disabled" not in text and "__pycache__" not in text and "which has torch" in text
    assert f'- "{place}/models"' in text
    assert "good, 0 models, 2 workflow types" in run_program("check", "-c", file).stdout
    assert sorted(path.name for path in place.parent.iterdir()) == ["Comfy UI", "resvisor.yaml"]


def test_the_written_types_take_every_kind_of_graph(place):
    init(place)
    graph = place.parent / "graph.json"
    for output, kind in (("SaveImage", "image"), ("SaveVideo", "video"), ("SaveAudio", "video"), ("SaveGLB", "image"), ("SaveText", "image")):
        graph.write_text(json.dumps({"1": {"class_type": output}}))
        answer = run_program("route", "--json", "-c", place.parent / "resvisor.yaml", graph).stdout
        assert json.loads(answer)["type"] == kind, output


def test_a_file_that_exists_is_not_replaced(place):
    file = place.parent / "mine.yaml"
    file.write_text("# mine\n")
    result = init(place, "-o", file, check=False)
    assert result.returncode == REFUSED and "File exists; remove it, or give another name with --out" in result.stderr
    assert file.read_text() == "# mine\n" and len(list(place.parent.iterdir())) == 2


def test_to_standard_output(place):
    text = init(place, "--out", "-").stdout
    assert text.startswith("# ComfyUI") and "kind: comfyui" in text and len(list(place.parent.iterdir())) == 1


def test_extra_model_paths_are_taken(place):
    other = place.parent / "other"
    for name in ("sd/checkpoints", "sd/loras", "home/vae"):
        (other / name).mkdir(parents=True)
    (place / "extra_model_paths.yaml").write_text(
        "a111:\n  base_path: ../other/sd\n  is_default: true\n  checkpoints: checkpoints\n"
        "  loras: |\n    loras\n    nowhere\n  vae: ~/vae\n  custom_nodes: packs\n"
        "comfyui:\n  base_path: $HOME/x\n  vae: vae\n"
    )
    answer = found(place, HOME=str(other / "home"))
    assert answer["model_folders"] == [str(place / "models"), *(str(other / name) for name in ("sd/checkpoints", "sd/loras", "home/vae"))]
    assert "# not taken: $HOME/x: it names an environment variable" in (place.parent / "resvisor.yaml").read_text()


@pytest.mark.parametrize("text", ["a: [\n", "", "- a\n", "a: &x {b: c}\nd: *x\n", "\x00", "a:\n  base_path: [1]\n", "a: b\n"])
def test_extra_model_paths_that_are_wrong_are_said_or_empty(place, text):
    (place / "extra_model_paths.yaml").write_text(text)
    assert found(place)["model_folders"] == [str(place / "models")]
    if not text.startswith("a:\n") and text != "a: b\n":
        assert "# not taken: " in (place.parent / "resvisor.yaml").read_text()


def test_folders_inside_each_other_are_one(place):
    (place / "extra_model_paths.yaml").write_text(f"a:\n  x: {place}/models/checkpoints\n  y: {place.parent}\n  z: /\n")
    assert found(place)["model_folders"] == [str(place.parent)]


def test_the_interpreter(place):
    shutil.rmtree(place / "venv")
    assert found(place)["python"] == "python3"
    active = make_environment(place.parent / "active")
    assert found(place, VIRTUAL_ENV=str(active))["python"] == f"{active}/bin/python"
    make_environment(place / ".venv", torch=False)
    assert found(place)["python"] == f"{place}/.venv/bin/python"
    assert found(place, CONDA_PREFIX=str(active))["python"] == f"{active}/bin/python"  # the one with torch
    (place.parent / "resvisor.yaml").unlink()
    named = json.loads(init(place, "--json", "--python", "active/bin/python").stdout)
    assert named["python"] == f"{active}/bin/python"


def test_what_is_no_comfyui_is_refused(place, tmp_path):
    for folder, message in ((tmp_path / "nothing", "No such file"), (place / "models", "main.py")):
        result = init(folder, check=False) if folder.is_dir() else run_program("init", "comfyui", folder, check=False)
        assert result.returncode == REFUSED and message in result.stderr
    result = run_program("init", "webui", place, check=False)
    assert result.returncode == USAGE and "allowed: comfyui" in result.stderr
    result = init(place, "--python", "no-such-python", check=False)
    assert result.returncode == USAGE and "no-such-python" in result.stderr and not (tmp_path / "resvisor.yaml").exists()
    shutil.rmtree(place / "models")
    result = init(place)
    assert "not taken: " in result.stdout and "/models: No such file" in result.stdout


def test_names_cannot_leave_their_place_in_the_file(place):
    (place / "custom_nodes" / "evil\ntypes: {}\x1b[31m").mkdir()
    init(place)
    text = (place.parent / "resvisor.yaml").read_text()
    assert "#   evil\\x0atypes: {}\\x1b[31m" in text
    strange = place.parent / 'quo"te\\'
    place.rename(strange)
    (place.parent / "resvisor.yaml").unlink()
    result = init(strange, check=False)
    assert result.returncode in (DONE, REFUSED)
    worse = place.parent / "new\nline"
    strange.rename(worse)
    assert init(worse, "-o", "other.yaml", check=False).returncode == REFUSED
