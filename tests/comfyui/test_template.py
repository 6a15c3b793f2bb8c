"""The real ComfyUI, its workers forked from a template: equal results, edited nodes, faults, memory."""

import os
import shutil
import signal

import pytest
import tiny
from conftest import START_S, Comfy, comfy_type
from harness import procfs
from harness.protos import rpc_pb2
from harness.service import Service

pytestmark = pytest.mark.timeout(300)

EDITED = """
class TestEdited:
    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{}}}}
    @classmethod
    def IS_CHANGED(cls):
        return float("nan")
    def run(self):
        import os, random, torch
        return {{"ui": {{"text": ["{text}", str(torch.get_num_threads()), str(random.random()), str(os.getpid())]}}}}
NODE_CLASS_MAPPINGS = {{"TestEdited": TestEdited}}
"""


@pytest.fixture(scope="module")
def own_base(base, tmp_path_factory):
    """The models of the session, with custom nodes of our own."""
    folder = tmp_path_factory.mktemp("template")
    for name in ("models", "input", "web"):
        (folder / name).symlink_to(base / name)
    (folder / "output").mkdir()
    shutil.copytree(base / "custom_nodes" / "resvisor_test", folder / "custom_nodes" / "resvisor_test")
    return folder


@pytest.fixture(scope="module")
def types(own_base, tmp_path_factory):
    state = str(tmp_path_factory.mktemp("state"))
    keys = comfy_type(own_base, state_folder=state)
    at = keys["args"].index("resvisor_test")
    keys["args"][at + 1 : at + 1] = ["edited"]
    return {"image": {**keys, "workers": 2}, "plain": {**keys, "fast_start": "off"}}


@pytest.fixture(scope="module")
def service(base, own_base, types, tmp_path_factory):
    """Two workers from one template, and one that is started the long way."""
    edit(own_base, "one")
    made = Service(tmp_path_factory.mktemp("service"), {"model_folders": [str(base / "models")]})
    made.config["types"] = types
    made.start()
    made.wait_ready(timeout=START_S)
    yield made
    made.end()


@pytest.fixture
def comfy(service):
    with Comfy(service) as found:
        yield found


def edit(base, text):
    (base / "custom_nodes" / "edited").mkdir(exist_ok=True)
    (base / "custom_nodes" / "edited" / "__init__.py").write_text(EDITED.format(text=text))


def done(job):
    assert job.state == rpc_pb2.JOB_DONE, job
    return job


def texts(comfy, type_name="image"):
    outputs = comfy.outputs(done(comfy.prompt({"1": {"class_type": "TestEdited", "inputs": {}}}, type_name)))
    return [outputs[name].decode() for name in sorted(outputs, key=lambda name: (len(name), name))]


def pixels(found):
    return {name.split("_")[0]: data for name, data in found.items()}


def template(service):
    (found,) = service.status().templates
    return found


def test_two_workers_come_from_one_template(service):
    workers = service.type("image").workers
    assert all("; forked from template/0 in " in worker.detail and "; pooled: comfy.utils" in worker.detail for worker in workers)
    assert "; started the long way: types.plain.fast_start is off" in service.worker("plain").detail
    found = template(service)
    assert (found.state, list(found.types), found.starts) == ("READY", ["image"], 1) and "torch " in found.detail
    assert len(os.listdir(f"/proc/{found.pid}/task")) == 1
    for worker in workers:
        assert procfs.stat(worker.pid)[1] == service.keeper_pid


def test_outputs_are_those_of_the_long_way(comfy):
    for graph in (tiny.image(seed=11, prefix="way"), tiny.with_lora(tiny.image(seed=11, prefix="way")), tiny.video(seed=4, prefix="way")):
        plain = pixels(comfy.outputs(done(comfy.prompt(graph, "plain"))))
        assert pixels(comfy.outputs(done(comfy.prompt(graph)))) == plain
    forked, plain = texts(comfy), texts(comfy, "plain")
    assert forked[:2] == plain[:2] and forked[2] != plain[2]


def test_a_restart_sees_edited_nodes_and_reads_nothing(service, comfy, own_base):
    first = pixels(comfy.outputs(done(comfy.prompt(tiny.image(seed=5, prefix="edit")))))
    before, starts = template(service).pid, template(service).starts
    edit(own_base, "two")
    service.cli("restart", "image", timeout=100)
    assert texts(comfy)[0] == "two"
    assert (template(service).pid, template(service).starts) == (before, starts)
    job = done(comfy.prompt(tiny.image(seed=5, prefix="edit")))
    assert job.read_bytes == 0 and pixels(comfy.outputs(job)) == first


def test_a_killed_worker_is_forked_again_and_a_killed_template_harms_nobody(service, comfy):
    first = pixels(comfy.outputs(done(comfy.prompt(tiny.image(seed=6, prefix="kill")))))
    found, workers = template(service), service.type("image").workers
    os.kill(workers[0].pid, signal.SIGKILL)
    again = service.wait_worker("image", starts=workers[0].starts + 1, timeout=100)
    assert "; forked from template/0" in again.detail and template(service).pid == found.pid
    os.kill(found.pid, signal.SIGKILL)
    procfs.wait_until(lambda: template(service).starts == found.starts + 1, 30, "a new template")
    for _ in range(2):
        assert pixels(comfy.outputs(done(comfy.prompt(tiny.image(seed=6, prefix="kill"))))) == first
    procfs.wait_until(lambda: template(service).state == "READY", START_S, "a ready template")
    service.cli("restart", "image", timeout=100)
    assert all("; forked from template/0" in worker.detail for worker in service.type("image").workers)


def test_a_further_worker_costs_less_than_one_that_was_started_the_long_way(service):
    workers = [*service.type("image").workers, service.worker("plain")]
    private = [procfs.smaps(worker.pid)["Private_Dirty"] for worker in workers]
    assert max(private[:2]) < private[2] / 2, private
