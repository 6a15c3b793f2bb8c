"""The worker kind `comfyui` around ComfyUI: port, stop, warm-up, settings files, packs, log. A stub stands for ComfyUI."""

import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import urllib.request

import pytest
from harness import procfs
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.service import run_program

STUB = pathlib.Path(__file__).resolve().parent / "stub_comfyui"
USAGE = 2


@pytest.fixture
def make(make_service, tmp_path):
    """make({type: keys}, **config): a service with types of kind comfyui, not started; `stub` is their folder."""
    stub = tmp_path / "stub"
    shutil.copytree(STUB, stub, ignore=shutil.ignore_patterns("__pycache__"))

    def build(types, **config):
        service = make_service(config)
        common = {
            "kind": "comfyui", "directory": str(stub), "python": sys.executable, "pooling": "off",
            "state_folder": str(tmp_path / "state"), "start_timeout": "60s", "fast_start": "off",
        }  # fmt: skip
        service.config["types"] = {name: {**common, **keys} for name, keys in types.items()}
        service.stub, service.state = stub, tmp_path / "state" / "comfyui"
        return service

    return build


def port_of(service, number=0):
    return int(service.worker("image", number).detail.split("http://127.0.0.1:")[1].split(";")[0])


def ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/prompt", timeout=60) as answer:
        return json.load(answer)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---- port ----


def test_a_worker_keeps_its_port_over_its_restarts(make):
    service = make({"image": {"workers": 2}}).start()
    service.wait_ready(60)
    ports = [port_of(service, number) for number in range(2)]
    assert len(set(ports)) == 2 and [ask(port) for port in ports]
    os.kill(service.worker("image").pid, signal.SIGKILL)
    service.wait_worker("image", starts=2, timeout=60)
    service.cli("restart", "image", timeout=60)
    assert [port_of(service, number) for number in range(2)] == ports and [ask(port) for port in ports]


def test_nobody_can_take_the_port_of_a_worker_that_restarts(make):
    """Who connects in between waits for the next process; who wants to listen there is refused."""
    service = make({"image": {}}).start()
    service.wait_ready(60)
    port, pid = port_of(service), service.worker("image").pid
    os.kill(pid, signal.SIGKILL)
    procfs.wait_until(lambda: not procfs.alive(pid), 20, "the end of the process")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
            other.listen()
    assert "exec_info" in ask(port)


def test_a_port_that_is_taken_is_named_and_taken_over_when_it_is_free(make):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = make({"image": {"args": ["--port", str(port)]}}).start()
        found = service.wait_worker("image", "BACKOFF")
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; process {os.getpid()} has it: " in found.last_exit
        assert found.starts == 0
    service.wait_worker("image", timeout=60)
    assert port_of(service) == port and ask(port)


def test_a_stopped_service_refuses_connections(make):
    service = make({"image": {}}).start()
    service.wait_ready(60)
    port = port_of(service)
    assert service.stop() == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


# ---- stop ----


def test_an_idle_worker_stops_in_order(make):
    service = make({"image": {}}).start()
    service.wait_ready(60)
    assert service.stop() == 0
    assert service.log().count("Stopped server") == 1 and "Traceback" not in service.log()


def test_a_deaf_worker_gets_sigint_then_sigterm_then_sigkill(make):
    service = make({"image": {"env": {"STUB_DEAF": "1"}, "stop_timeout": "200ms"}}).start()
    service.wait_ready(60)
    assert service.stop(60) == 0
    log = service.log()
    assert 0 < log.index("got SIGINT") < log.index("got SIGTERM") < log.index("it did not end within 7.2 s of being asked")
    assert log.count("got SIGTERM") == 1


# ---- warm-up ----


def note(path, **inputs):
    return {"1": {"class_type": "Note", "inputs": {"path": str(path), **inputs}}}


def test_types_warm_up_one_after_another_in_their_order(make, tmp_path):
    notes = tmp_path / "notes"
    types = {}
    for name in ("image", "video", "audio"):
        graph = write(tmp_path / f"{name}.json", note(notes, seconds=0.1))
        types[name] = {"warmup": str(graph), "workers": 2 if name == "video" else 1}
    service = make(types).start()
    service.wait_ready(60)
    order = ["image/0", "video/0", "video/1", "audio/0"]
    assert notes.read_text().split("\n")[:-1] == [f"{what} {worker}" for worker in order for what in ("begin", "end")]
    with Jobs(service) as jobs:
        assert not jobs.list()  # a warm-up is no job


def test_a_warm_up_that_fails_is_shown(make, tmp_path):
    graph = write(tmp_path / "fail.json", {"1": {"class_type": "Fail", "inputs": {}}})
    service = make({"image": {"warmup": str(graph)}, "video": {}}).start()
    service.wait_ready(60)
    assert "; the warm-up failed: node 1 (Fail): ValueError: as asked" in service.worker("image").detail
    assert "warm-up" not in service.worker("video").detail


def test_a_warm_up_that_must_work_ends_the_worker(make, tmp_path):
    graph = write(tmp_path / "fail.json", {"1": {"class_type": "Fail", "inputs": {}}})
    keys = {"warmup": str(graph), "warmup_failure": "fail", "max_deaths": 1}
    second = write(tmp_path / "good.json", note(tmp_path / "notes"))
    service = make({"image": keys, "video": {"warmup": str(second)}}).start()
    found = service.wait_worker("image", "FAILED", timeout=60)
    assert "the warm-up failed: node 1 (Fail): ValueError: as asked" in found.last_exit
    service.wait_worker("video", timeout=60)  # its turn came all the same


@pytest.mark.parametrize(
    "content, word",
    [
        (None, "No such file"),
        ("{", "allowed: a workflow in API format"),
        ('{"nodes": [{"id": 1, "type": "SaveImage"}], "links": []}', "Export (API)"),
        ('{"1": {"inputs": {}}}', "allowed: a workflow in API format"),
    ],
)
def test_check_looks_at_the_warm_up(make, tmp_path, content, word):
    path = tmp_path / "warmup.json"
    if content is not None:
        path.write_text(content)
    service = make({"image": {"warmup": str(path)}})
    service.write_config()
    result = run_program("check", "-c", service.config_file, check=False)
    assert result.returncode == USAGE and "types.image.warmup: " in result.stderr and word in result.stderr


# ---- settings files ----


def test_the_last_words_after_a_flood_are_the_reason_of_the_end(make):
    service = make({"image": {"max_deaths": 1, "env": {"STUB_FLOOD_LINES": "100000", "STUB_LAST_WORDS": "the last words"}}}).start()
    found = service.wait_worker("image", "FAILED", timeout=60)
    assert found.last_exit.endswith(": the last words"), found
    assert "image/0: its last line was: the last words" in service.cli("logs", "image").stdout


def test_last_words_that_come_in_pieces_after_a_flood_are_one_line(make):
    service = make({"image": {"max_deaths": 1, "env": {"STUB_FLOOD_LINES": "100000", "STUB_LAST_BYTES": "the last words"}}}).start()
    found = service.wait_worker("image", "FAILED", timeout=60)
    assert found.last_exit.endswith(": the last words"), found


def test_a_line_that_escapes_make_longer_stays_one_line(make):
    service = make({"image": {"env": {"STUB_WORDS": "\\\\x01" * 1000 + "\\nthe next line"}}}).start()
    service.wait_ready(60)
    assert "image/0: the next line" in service.cli("logs", "image").stdout.splitlines()


SETTINGS = {"Comfy.ColorPalette": "dark", "Comfy.Locale": "en"}


def test_truncated_settings_are_named_kept_and_restored_on_request(make):
    service = make({"image": {}, "video": {}}).start()
    service.wait_ready(60)
    path = write(service.state / "users" / "default" / "comfy.settings.json", SETTINGS)
    good = path.read_text()
    service.cli("restart", "image", timeout=60)  # a good start keeps a copy
    path.write_text(good[:30])
    assert service.cli("restart", "image", timeout=60, check=False).returncode != 0
    found = service.wait_worker("image", "FAILED")
    assert f"file_damaged: {path}:1:" in found.last_exit and "no JSON" in found.last_exit
    service.wait_log("`resvisor restore-config image`")
    assert path.read_text() == good[:30]  # nothing is restored by itself
    result = service.cli("restore-config", "image", "-c", service.config_file)
    assert "restored from" in result.stdout and path.read_text() == good
    assert [other.read_text() for other in path.parent.glob("comfy.settings.json.damaged-*")] == [good[:30]]
    service.cli("restart", "image", timeout=60)
    assert service.worker("image").state == "READY"
    again = service.cli("restore-config", "image", "-c", service.config_file)
    assert "image/0: no settings file is damaged" in again.stdout


@pytest.mark.parametrize(
    "content, place, word",
    [
        ("a:\n  base_path: /x\n  checkpoints: [models\n", ":4:1: ", "no YAML"),
        ("", ":1:1: ", "it is empty"),
        ("- a\n- b\n", ":1:1: ", "must be a map"),
        ("a:\n  base_path: /x\n  vae: 3\n", ":3:3: ", "vae of a must be a text"),
        ("a:\n  base_path: 2020-99-99\n", ":1:1: ", "no YAML: month must be in 1..12"),
    ],
)
def test_a_damaged_extra_model_paths_file_is_named(make, tmp_path, content, place, word):
    pytest.importorskip("yaml")
    path = write(tmp_path / "more paths.yaml", content)
    service = make({"image": {"args": ["--extra-model-paths-config", str(path)]}}).start()
    found = service.wait_worker("image", "FAILED", timeout=60)
    assert f"{path}{place}" in found.last_exit and word in found.last_exit


def test_a_restored_file_stays_who_could_read_it_and_a_link_stays_a_link(make, tmp_path):
    service = make({"image": {}}).start()
    service.wait_ready(60)
    target = write(tmp_path / "dotfiles" / "settings.json", SETTINGS)
    target.chmod(0o600)
    link = service.state / "users" / "default" / "comfy.settings.json"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    service.cli("restart", "image", timeout=60)
    target.write_text('{"a": ' + "9" * 5000 + "}")  # digits that Python's own parser refuses in another way
    assert service.cli("restart", "image", timeout=60, check=False).returncode != 0
    assert "no JSON" in service.wait_worker("image", "FAILED").last_exit
    service.cli("restore-config", "image", "-c", service.config_file)
    assert link.is_symlink() and json.loads(target.read_text()) == SETTINGS and target.stat().st_mode & 0o777 == 0o600
    (copy,) = (service.state / "good-copies").glob("*-comfy.settings.json")
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_without_a_copy_is_an_error_and_the_other_workers_get_theirs(make):
    service = make({"image": {"workers": 2}}).start()
    service.wait_ready(60)
    first = service.state / "users" / "default" / "comfy.settings.json"
    second = write(service.state / "image-1" / "user" / "default" / "comfy.settings.json", SETTINGS)
    service.cli("restart", "image", timeout=60)
    write(first, "{")
    write(second, "{")
    result = service.cli("restore-config", "image", "-c", service.config_file, check=False)
    assert result.returncode != 0 and "no good copy is kept of it" in result.stdout
    assert "image/1: " in result.stdout and json.loads(second.read_text()) == SETTINGS


def test_restore_config_of_another_kind_or_no_type(make):
    service = make({"image": {}})
    service.config["types"]["plain"] = {"kind": "native", "executor": "image"}
    service.write_config()
    for name, word in (("plain", "kind native"), ("nothing", "no workflow type"), ("nothing", "--config FILE")):
        result = service.cli("restore-config", name, "-c", service.config_file, check=False)
        assert result.returncode != 0 and word in result.stderr


# ---- the users' folder, prefixes ----


def test_the_primary_worker_has_the_users_folder(make):
    service = make({"image": {"workers": 2}, "video": {"primary": True, "workers": 2}}).start()
    service.wait_ready(60)
    log = service.log()
    users = [line.split("--user-directory ")[1].split(" ")[0] for line in log.splitlines() if "--user-directory" in line]
    assert sorted(users) == sorted(
        str(service.state / name) for name in ("users", "video-1/user", "image-0/user", "image-1/user")
    )


def test_saved_files_get_a_prefix(make):
    types = {"image": {"workers": 2}, "video": {"output_prefix": "clips/"}, "audio": {"workers": 2, "output_prefix": "a%worker%-"}}
    service = make({name: {**keys, "env": {"STUB_OUTPUT": "/x"}} for name, keys in types.items()}).start()
    service.wait_ready(60)
    found = {line.split("saves as: ")[1] for line in service.log().splitlines() if "saves as: " in line}
    assert found == {"image-0/a/b", "image-1/a/b", "clips/a/b", "a0-a/b", "a1-a/b"}


@pytest.mark.parametrize(
    "keys, word",
    [
        ({"args": ["--port", "70000"]}, "up to 65535"),
        ({"args": ["--port", "65535"], "workers": 2}, "up to 65535"),
        ({"args": ["--port=8000"]}, "a worker of this type has the same --port"),
        ({"args": ["--listen", "192.0.2.1"]}, "127.0.0.1 or 0.0.0.0"),
        ({"args": ["--listen"]}, "127.0.0.1 or 0.0.0.0"),
        ({"args": ["--quick-test-for-ci"]}, "does not work in a worker"),
        ({"output_prefix": "../x"}, "relative path"),
        ({"output_prefix": "same/"}, "has the same one"),
        ({"output_prefix": "x", "workers": 2}, "%worker%"),
        ({"primary": True}, "is the primary type already"),
    ],
)
def test_check_refuses_what_two_workers_cannot_share(make, keys, word):
    first = {"args": ["--port", "7999"], "workers": 2, "output_prefix": "same%worker%/", "primary": True}
    if "has the same" in word and "output_prefix" in keys:
        first |= {"workers": 1, "output_prefix": "same/"}
    service = make({"first": first, "image": keys})
    service.write_config()
    result = run_program("check", "-c", service.config_file, check=False)
    assert result.returncode == USAGE and word in result.stderr, result.stderr


# ---- packs, event loop, log ----


def test_node_names_of_two_packs_and_failed_imports_are_shown(make, tmp_path):
    packs = tmp_path / "packs"
    for name, nodes in (("a-first", ["Mask", "Own"]), ("b-second", ["Mask"])):
        classes = ", ".join(f"{node!r}: type({node!r}, (), {{}})" for node in nodes)
        write(packs / name / "__init__.py", f"NODE_CLASS_MAPPINGS = {{{classes}}}\n")
    write(packs / "c-broken" / "__init__.py", "import no_such_module_anywhere\n")
    service = make({"image": {"env": {"STUB_PACKS": str(packs)}}}).start()
    service.wait_ready(60)
    detail = service.worker("image").detail
    assert "node 'Mask' of a-first is replaced by that of b-second" in detail and "'Own'" not in detail
    assert "not imported: c-broken: No module named 'no_such_module_anywhere'" in detail
    service.wait_log("node 'Mask' of a-first is replaced by that of b-second")


def test_a_worker_whose_event_loop_stands_still_is_restarted(make, tmp_path):
    stuck = tmp_path / "stuck"
    service = make({"image": {"loop_timeout": "1s", "env": {"STUB_STUCK": str(stuck)}}}).start()
    service.wait_ready(60)
    graph = json.dumps(note(tmp_path / "notes")).encode()
    with Jobs(service) as jobs:
        assert jobs.run("image", payload=graph).state == rpc_pb2.JOB_DONE
        stuck.touch()
        job = jobs.run("image", payload=graph, timeout=90)
        assert job.state != rpc_pb2.JOB_DONE and "event loop stands still" in job.error.message, job
        stuck.unlink()
    service.wait_worker("image", starts=2, timeout=60)


def test_pooling_required_makes_a_worker_without_hooks_fail(make):
    service = make({"image": {"pooling": "required"}}).start()
    found = service.wait_worker("image", "FAILED", timeout=60)
    assert "unpooled: comfy.utils was never imported; types.image.pooling is required" in found.last_exit


def test_pooling_preferred_shows_the_reason(make):
    service = make({"image": {"pooling": "preferred"}}).start()
    service.wait_ready(60)
    assert "unpooled: comfy.utils was never imported" in service.worker("image").detail


def test_a_flood_in_the_log_is_cut(make):
    lines = 200_000
    service = make({"image": {"env": {"STUB_FLOOD_LINES": str(lines)}}}).start()
    service.wait_ready(60)
    service.wait_log("image/0: it prints more than 64 KiB per second")
    said = service.wait_log("were left out of this log")
    assert 0 < int(said.split(" lines, were left out")[0].rsplit(" ", 1)[1]) < lines
    assert service.log_file.stat().st_size < 4 * 2**20
    assert "it prints more than" in service.cli("logs", "image").stdout
