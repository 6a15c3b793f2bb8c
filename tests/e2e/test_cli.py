"""The command line: exit codes, --json, --help, completion, and what each command does."""

import json
import os
import signal
import subprocess
import time

import pytest

from harness import models, procfs
from harness.jobs import Jobs
from harness.service import PROGRAM, run_program

DONE, USAGE, NOT_RUNNING, REFUSED, JOB_FAILED, NOT_FOUND, NO_ROOM, DEADLINE, CANCELLED = 0, 2, 3, 4, 5, 6, 7, 8, 9

COMMANDS = (
    "start stop status models load unload pin unpin submit jobs cancel restart logs route verify init check version"
).split()  # fmt: skip
NEED_SERVICE = {
    "status": (), "models": (), "load": ("m",), "unload": ("m",), "pin": ("m",), "unpin": ("m",), "submit": ("image",),
    "jobs": (), "cancel": ("x",), "restart": ("image",), "logs": ("image",), "stop": (),
}  # fmt: skip


def test_every_command_has_help():
    text = run_program("help").stdout
    for command in COMMANDS:
        assert command in text, command
        assert f"resvisor {command}" in run_program(command, "--help").stdout, command


def test_wrong_command_lines_are_usage_errors():
    for arguments in (
        ("nonsense",), ("status", "--nonsense"), ("status", "extra"), ("submit",), ("load",),
        ("submit", "x", "--param", "nokey"), ("submit", "x", "--priority", "many"), ("logs", "x", "y"),
    ):  # fmt: skip
        result = run_program(*arguments, check=False)
        assert result.returncode == USAGE, arguments
        assert result.stderr, arguments


@pytest.mark.parametrize("command", NEED_SERVICE)
def test_without_a_service_every_command_says_not_running(make_service, command):
    service = make_service()
    result = service.cli(command, *NEED_SERVICE[command], check=False)
    assert result.returncode == NOT_RUNNING
    assert "not running" in result.stderr and "resvisor start" in result.stderr


def test_errors_are_json_with_json(make_service):
    result = make_service().cli("status", "--json", check=False)
    assert result.returncode == NOT_RUNNING
    error = json.loads(result.stdout)["error"]
    assert error["name"] == "not_running" and error["remedy"]


def test_exit_codes_of_models(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path, mib=1)
    bad = bare.models / "bad.safetensors"
    bad.write_bytes(models.BAD_FILES["overlap"])
    for arguments, code in (
        (("load", path), DONE), (("pin", path), DONE), (("unload", path), REFUSED), (("unpin", path), DONE),
        (("unload", path), DONE), (("load", bad), REFUSED), (("load", "nothing"), NOT_FOUND),
        (("load", bare.models / "nothing.safetensors"), NOT_FOUND), (("load", "/etc/passwd"), REFUSED),
        (("restart", "nothing"), NOT_FOUND), (("logs", "nothing"), NOT_FOUND), (("cancel", "nothing"), NOT_FOUND),
        (("submit", "nothing"), NOT_FOUND),
    ):  # fmt: skip
        result = bare.cli(*arguments, check=False)
        assert result.returncode == code, (arguments, result.stdout, result.stderr)
    rows = {row["name"]: row for row in bare.cli_json("models")["models"]}
    assert rows[str(path)]["state"] == "ABSENT" and rows[str(bad)]["state"] == "FAILED"


def test_exit_codes_of_jobs(faulty, gate):
    assert faulty.cli("submit", "test", "--wait").returncode == DONE
    result = faulty.cli("submit", "test", "--wait", "--param", "fault=fail", check=False)
    assert result.returncode == JOB_FAILED and "failed as the job asked" in result.stderr + result.stdout
    result = faulty.cli("submit", "test", "--wait", "--param", "fault=crash", check=False)
    assert result.returncode == JOB_FAILED and "SIGSEGV" in result.stderr + result.stdout
    # Its worker could not get the model, which as a request of its own is "not found" (6); as a job it has failed.
    result = faulty.cli("submit", "test", "--wait", "--model", "no-such-model", check=False)
    assert result.returncode == JOB_FAILED and "no_such_model" in result.stderr + result.stdout
    faulty.wait_worker("test", starts=2)
    result = faulty.cli(
        "submit", "test", "--id", "slow", "--wait", "--timeout", "0.3", "--param", f"gate={gate.path}", check=False
    )
    assert result.returncode == DEADLINE
    assert faulty.cli("cancel", "slow").returncode == DONE
    assert faulty.cli("submit", "test", "--id", "slow", "--wait", "--param", f"gate={gate.path}", check=False).returncode == CANCELLED


def test_submit_prints_facts_and_writes_outputs(faulty, tmp_path):
    job = faulty.cli_json("submit", "test", "--wait", "--id", "facts", "--param", "output_bytes=700000", "--out", tmp_path / "o")
    assert job["job_id"] == "facts" and job["state"] == "DONE" and job["read_bytes"] == 0
    assert [output["name"] for output in job["outputs"]] == ["report.json", "bytes.bin"]
    listed = faulty.cli_json("jobs", "--all")["jobs"]
    assert [entry["job_id"] for entry in listed] == ["facts"]


def test_payload_and_order_of_files(faulty, tmp_path):
    payload = tmp_path / "payload"
    payload.write_bytes(os.urandom(512 * 1024))
    assert faulty.cli("submit", "test", "--wait", "--payload", payload).returncode == DONE
    payload.write_bytes(b"x" * (512 * 1024 + 1))
    assert faulty.cli("submit", "test", "--wait", "--payload", payload, check=False).returncode == REFUSED


def test_logs_show_what_a_worker_said_and_follow(faulty):
    with Jobs(faulty) as jobs:
        jobs.run("test", {"fault": "crash"})
    faulty.wait_worker("test", starts=2)
    follow = subprocess.Popen(
        [str(PROGRAM), "logs", "resvisor", "-f"], env=faulty.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        seen = []
        while not any("SIGSEGV" in line for line in seen):
            seen.append(follow.stdout.readline())
            assert seen[-1], seen
        procfs.kill(faulty.worker("test").pid)
        while not any("SIGKILL" in line for line in seen):
            seen.append(follow.stdout.readline())
            assert seen[-1], seen
    finally:
        follow.kill()
        follow.wait()
    assert "SIGSEGV" in faulty.cli("logs", "resvisor").stdout


def test_interrupting_a_waiting_submit_does_not_hang(faulty, gate):
    process = subprocess.Popen(
        [str(PROGRAM), "submit", "test", "--id", "held", "--wait", "--param", f"gate={gate.path}"],
        env=faulty.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    gate.wait_reached()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode != 0 and "held" in out
    with Jobs(faulty) as jobs:
        jobs.cancel("held")
        jobs.wait("held")


def test_completion_names_commands_types_and_models(faulty):
    script = run_program("complete", "bash", check=False)
    assert script.returncode == DONE and "resvisor" in script.stdout
    assert subprocess.run(["bash", "-n"], input=script.stdout, text=True).returncode == 0


def test_output_to_a_pipe_has_no_escape_codes(faulty):
    for arguments in (("status",), ("models",), ("jobs", "--all"), ("submit", "test", "--wait")):
        result = faulty.cli(*arguments)
        assert "\x1b" not in result.stdout + result.stderr, arguments
        assert result.stdout, arguments


def test_names_from_files_are_escaped(bare):
    path = bare.models / "evil\x1b[31m\n.safetensors"
    models.write_plain(path, mib=1)
    refused = bare.cli("load", path, check=False)
    assert refused.returncode == 4
    assert "\x1b" not in refused.stderr and "evil\\x1b[31m\\x0a.safetensors" in refused.stderr
    assert len(bare.cli("models").stdout.splitlines()) <= 1


def test_a_closed_pipe_ends_a_command_quietly(faulty):
    process = subprocess.Popen(
        [str(PROGRAM), "status", "--json"], env=faulty.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(10)


def test_status_is_fast(faulty):
    begin = time.monotonic()
    for _ in range(20):
        faulty.cli("status")
    assert (time.monotonic() - begin) / 20 < 0.5
