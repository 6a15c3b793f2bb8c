"""These tests run in build/torch-venv, a stage of tests/run.sh of its own; without torch or ComfyUI there is nothing to collect.

RESVISOR_COMFYUI names the folder of the real ComfyUI. Each session has models, custom nodes and output of its own.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
import time

import pytest

from harness.jobs import Jobs

HERE = pathlib.Path(__file__).resolve().parent
COMFYUI = pathlib.Path(os.environ.get("RESVISOR_COMFYUI", "/nonexistent"))
START_S = 100

if importlib.util.find_spec("torch") is None or not (COMFYUI / "main.py").exists():
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(HERE.parents[1] / "deploy" / "comfyui"))
    import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """ComfyUI's --base-directory: tiny models, the pack of test nodes, folders for input and output, an empty frontend."""
    folder = tmp_path_factory.mktemp("comfyui")
    tiny.write(folder / "models")
    for name in ("input", "output", "web"):
        (folder / name).mkdir()
    (folder / "web" / "index.html").write_text("<html></html>")
    shutil.copytree(HERE / "nodes", folder / "custom_nodes" / "resvisor_test")
    for name, text in (("resvisor_twin", 'NODE_CLASS_MAPPINGS = {"TestTwin": type("TestTwin", (), {})}\n'), ("resvisor_broken", "import nowhere\n")):
        (folder / "custom_nodes" / name).mkdir()
        (folder / "custom_nodes" / name / "__init__.py").write_text(text)
    return folder


def comfy_type(base, **keys):
    """The configuration of a type."""
    arguments = ["--cpu", "--base-directory", base, "--front-end-root", base / "web", "--disable-all-custom-nodes"]
    arguments += ["--whitelist-custom-nodes", "resvisor_test", "--disable-api-nodes"]
    return {
        "kind": "comfyui", "directory": str(COMFYUI), "python": sys.executable, "args": [str(a) for a in arguments],
        "start_timeout": f"{START_S}s", "stop_timeout": "20s", "env": {"HF_HUB_OFFLINE": "1"}, **keys,
    }  # fmt: skip


@pytest.fixture(scope="module")
def make_comfy(tmp_path_factory, base):
    """make_comfy({type: keys}, prepare=function of the service): running, its workers ready. Ended with the module."""
    from harness.service import Service

    made = []

    def make(types, prepare=lambda service: None):
        folder = tmp_path_factory.mktemp("service")
        service = Service(folder, {"model_folders": [str(base / "models")]})
        service.config["types"] = {
            name: comfy_type(base, state_folder=str(folder / "state"), **keys) for name, keys in types.items()
        }
        prepare(service)
        made.append(service)
        service.start()
        service.wait_ready(timeout=START_S)
        return service

    yield make
    for service in made:
        service.end()


@pytest.fixture(scope="module")
def service(make_comfy):
    """Two workers of one type."""
    return make_comfy({"image": {"workers": 2}})


class Comfy(Jobs):
    """Prompts as jobs."""

    def prompt(self, graph, type_name="image", **fields):
        payload = graph if isinstance(graph, bytes) else json.dumps(graph).encode()
        return self.run(type_name, payload=payload, **fields)

    def outputs(self, job):
        """What the prompt made; the history has ids and times, and differs each time."""
        return {output.name: self.output(job, i) for i, output in enumerate(job.outputs) if output.name != "history.json"}


@pytest.fixture
def comfy(service):
    with Comfy(service) as found:
        yield found


def wait_for(path, timeout=30):
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
