"""Start, readiness, stop, two supervisors, configuration sources."""

import json
import os
import signal
import socket
import stat
import subprocess

import pytest

from harness import procfs
from harness.service import STOP_S, run_program

EXIT_USAGE = 2
EXIT_NOT_RUNNING = 3
EXIT_ALREADY_RUNNING = 10


@pytest.mark.smoke
def test_start_status_stop(bare):
    facts = bare.cli_json("status")
    assert facts["supervisor"]["pid"] == bare.status().supervisor_pid
    assert facts["supervisor"]["uptime_ms"] >= 0
    assert procfs.alive(facts["router"]["pid"])
    assert facts["router"]["state"] == "READY"
    assert facts["types"] == [] and facts["models"] == []
    assert set(facts["pool"]) >= {"bytes", "budget"}
    assert bare.stop() == 0
    bare.assert_nothing_left()
    assert bare.cli("status", check=False).returncode == EXIT_NOT_RUNNING


def test_the_keeper_is_the_parent_of_every_process(three):
    table = procfs.parents()
    for role, pid in three.pids().items():
        if role != "keeper":
            assert table[pid][0] == three.keeper_pid, role


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_stops_all(bare, number):
    bare.close_control()
    os.kill(bare.keeper_pid, number)
    assert bare.process.wait(STOP_S) == 0
    bare.assert_nothing_left()


def test_a_stopped_service_starts_again_in_the_same_folder(faulty):
    assert faulty.stop() == 0
    faulty.assert_nothing_left()
    faulty.start()
    faulty.wait_ready()
    assert faulty.worker("test").starts == 1


def test_detach_returns_when_ready(make_service):
    service = make_service()
    service.write_config()
    service.before = procfs.descendants(os.getpid())
    with open(service.log_file, "ab") as log:  # not a pipe: the detached processes may keep it
        result = subprocess.run(
            [str(service.program), "start", "-c", str(service.config_file), "--detach"],
            env=service.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=60,
        )  # fmt: skip
    assert result.returncode == 0, service.log()
    status = service.status()
    assert status.router_state == "READY"
    service.close_control()
    keeper = status.keeper_pid
    assert procfs.alive(keeper)
    service.cli("stop")
    procfs.wait_until(lambda: not procfs.alive(keeper), STOP_S, "the end of the keeper")
    service.process = None
    service.assert_nothing_left()


def test_detach_says_why_it_failed(make_service):
    service = make_service({"pool": {"budgt": "1GiB"}})
    service.write_config()
    result = service.cli("start", "-c", service.config_file, "--detach", check=False)
    assert result.returncode == EXIT_USAGE
    assert "budgt" in result.stderr and "budget" in result.stderr


def test_two_supervisors_one_wins_and_the_other_names_it(bare, make_service):
    second = make_service(name="second")
    second.env["RESVISOR_RUNTIME_DIR"] = str(bare.runtime)
    second.write_config()
    result = second.cli("start", "-c", second.config_file, check=False)
    assert result.returncode == EXIT_ALREADY_RUNNING
    pids = (str(bare.status().supervisor_pid), str(bare.keeper_pid))
    assert any(pid in result.stderr for pid in pids), result.stderr
    assert str(bare.runtime) in result.stderr
    bare.assert_healthy()


def test_ten_starts_at_once_give_one_winner(make_service):
    services = [make_service(name=f"start-{i}") for i in range(10)]
    for service in services:
        service.env["RESVISOR_RUNTIME_DIR"] = str(services[0].runtime)
    pipes = [service.spawn() for service in services]
    codes = []
    winner = None
    for service, pipe in zip(services, pipes):
        text = os.read(pipe, 64)
        os.close(pipe)
        if text == b"ready\n":
            winner = service
        else:
            codes.append(service.process.wait(STOP_S))
    assert winner is not None
    assert codes == [EXIT_ALREADY_RUNNING] * 9
    winner.runtime = services[0].runtime
    winner.assert_healthy()
    winner.close_control()
    assert winner.cli("stop").returncode == 0


def test_two_services_in_two_folders_do_not_meet(make_faulty):
    first, second = make_faulty(name="first").start(), make_faulty(name="second").start()
    assert first.status().supervisor_pid != second.status().supervisor_pid
    first.stop()
    second.assert_healthy()
    second.wait_ready()


def test_a_stale_socket_is_replaced(bare, make_service):
    bare.close_control()
    for pid in (bare.status().supervisor_pid,):
        bare.close_control()
        procfs.kill(pid)
    bare.process.wait(STOP_S)
    bare.kill_all()
    stale = bare.runtime / "control" / "resvisor.sock"
    if not stale.exists():  # the keeper may have cleaned up: leave one as a power cut would
        stale.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(str(stale))
    bare.start()
    bare.assert_healthy()


@pytest.mark.parametrize("name", ["control/resvisor.sock", "control/router.sock", "rpc/rpc.ipc"])
def test_a_foreign_file_at_a_socket_path_is_never_deleted(make_service, name):
    service = make_service()
    path = service.runtime / name
    path.parent.mkdir(parents=True, mode=0o700)
    os.chmod(service.runtime, 0o700)
    path.write_text("precious")
    ready = service.spawn("--set", "log_level=debug")
    text = os.read(ready, 64) if name == "control/resvisor.sock" else b""
    os.close(ready)
    if name == "control/resvisor.sock":
        assert text == b""
        assert service.process.wait(STOP_S) not in (0, None)
    else:
        procfs.wait_until(lambda: str(path) in service.log() or path.name in service.log(), 20, "a line that names it")
    assert path.read_text() == "precious"
    assert str(path) in service.log()


def test_the_runtime_folder_gives_nothing_to_others(bare):
    for folder, mode in ((bare.runtime, 0o700), (bare.runtime / "control", 0o700), (bare.runtime / "rpc", 0o700)):
        assert stat.S_IMODE(folder.stat().st_mode) == mode, folder


def test_a_runtime_folder_that_others_write_to_is_refused_and_left_as_it_is(make_service):
    service = make_service()
    service.write_config()
    service.runtime.mkdir(exist_ok=True)
    service.runtime.chmod(0o1777)
    result = service.cli("start", "-c", service.config_file, check=False)
    assert result.returncode == EXIT_USAGE and "writable by others" in result.stderr
    assert stat.S_IMODE(service.runtime.stat().st_mode) == 0o1777 and not list(service.runtime.iterdir())


def test_a_runtime_folder_that_is_too_long_is_a_configuration_error(make_service):
    service = make_service()
    service.env["RESVISOR_RUNTIME_DIR"] = str(service.base / ("x" * 90))
    service.write_config()
    result = service.cli("start", "-c", service.config_file, check=False)
    assert result.returncode == EXIT_USAGE
    assert "runtime_dir" in result.stderr and "at most" in result.stderr


def test_precedence_flag_environment_file_default(make_service):
    service = make_service({"clients": {"max": 11}})
    service.write_config()

    def shown(*arguments, **env):
        result = run_program("check", "-c", service.config_file, "--show", "--json", *arguments, env={**service.env, **env})
        return json.dumps(json.loads(result.stdout))

    def value(*arguments, **env):
        found = json.loads(shown(*arguments, **env))
        entries = found["values"] if isinstance(found, dict) and "values" in found else found
        if isinstance(entries, dict):
            return entries["clients.max"]
        return next(entry for entry in entries if entry.get("key") == "clients.max")

    def number(entry):
        return int(entry["value"])

    assert number(value()) == 11
    assert number(value(RESVISOR_CLIENTS_MAX="12")) == 12
    assert number(value("--set", "clients.max=13", RESVISOR_CLIENTS_MAX="12")) == 13
    service.config.pop("clients")
    service.write_config()
    assert number(value()) == 512


def test_check_names_line_key_fault_and_what_is_allowed(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("log_level: loud\npool:\n  budgt: 4GiB\nclients:\n  max: -3\n")
    result = run_program("check", "-c", file, check=False)
    assert result.returncode == EXIT_USAGE
    text = result.stdout + result.stderr
    assert f"{file}:1" in text and "loud" in text and "warning" in text
    assert f"{file}:3" in text and "budgt" in text and "budget" in text
    assert f"{file}:5" in text and "clients.max" in text and "100000" in text


def test_start_with_a_bad_file_changes_nothing(bare):
    bare.config["nonsense"] = 1
    bare.write_config()
    result = bare.cli("start", "-c", bare.config_file, check=False)
    assert result.returncode == EXIT_USAGE
    bare.assert_healthy()


def test_status_over_frames_and_command_line_agree(faulty):
    status = faulty.status()
    facts = faulty.cli_json("status")
    assert facts["supervisor"]["pid"] == status.supervisor_pid
    assert [t["name"] for t in facts["types"]] == ["test"]
    worker = facts["types"][0]["workers"][0]
    assert (worker["id"], worker["state"], worker["starts"]) == ("test/0", "READY", 1)
    assert {"id", "pid", "state", "starts", "last_exit"} <= set(worker)
    model = facts["models"][0]
    assert {
        "name", "path", "state", "generation", "bytes", "tensors", "leases", "pinned", "loads", "load_ms", "read_bytes",
    } <= set(model)  # fmt: skip
    assert model["state"] == "RESIDENT" and model["leases"] == 1 and model["loads"] == 1


def test_idle_supervisor_does_not_wake_up(faulty):
    """Context switches of all long-lived processes over one second without a request."""
    pids = [pid for role, pid in faulty.pids().items()]
    faulty.close_control()

    def switches():
        total = 0
        for pid in pids:
            for line in procfs.read(pid, "status").decode().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    total += int(line.split()[1])
        return total

    procfs.wait_until(lambda: quiet(switches), 15, "an idle second")


def quiet(switches):
    """True if nothing was switched for one second."""
    before = switches()
    try:
        procfs.wait_until(lambda: switches() != before, 1.0)
    except AssertionError:
        return True
    return False
