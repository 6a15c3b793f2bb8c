"""Workers in Python (kind: python): ten lines that do jobs, and everything that can happen to them."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from harness import models, procfs
from harness.jobs import Jobs
from harness.protos import rpc_pb2
from harness.python import run_python
from harness.service import ROOT, SANITIZED, run_program

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")

SCRIPT = """
    import os, signal, sys, time
    from resvisor.worker import Worker

    signal.signal(signal.SIGUSR1, lambda number, frame: print("signal", number, flush=True))
    worker = Worker.open()
    print("arguments", sys.argv[1:], flush=True)
    for job in worker:
        with job:
            what = job.params.get("do", "")
            if what == "raise":
                raise RuntimeError("no such luck")
            if what == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if what == "exit":
                sys.exit(3)
            if what == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if what == "fail":
                job.fail("by hand", 2)
            if what == "twice":
                job.finish()
                job.finish()
            if what == "gate":
                job.progress(1, 10, "at the gate")
                with open(job.params["gate"], "rb") as gate:
                    gate.read(1)
            if what == "endless":
                while True:
                    job.progress(1, 0, "endless")
                    time.sleep(0.01)
            if what == "outputs":
                job.progress(3, 4, "nearly")
                job.add_output("text.txt", "grün", "text/plain")
                job.add_output("bytes", b"abc")
                job.add_output("array", bytearray(b"defg"))
                job.add_output("readonly", memoryview(bytearray(b"hi")).toreadonly())
                job.add_output("empty", b"")
            if what == "badname":
                job.add_output("a/b", b"")
            if what == "models":
                job.add_output("models", repr({n: (l.generation, len(l), l.mapping) for n, l in job.models.items()}))
            if what == "write":
                job.models["small"]["block.0.weight"].memoryview()[:] = bytes(job.models["small"]["block.0.weight"].nbytes)
            if what == "payload":
                job.add_output("payload", job.payload)
            if what == "fork":
                view = job.models["small"]["block.0.weight"].memoryview()
                pid = os.fork()
                if pid == 0:
                    bytes(view)
                    sys.exit(7)
                job.add_output("status", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            if what == "file":
                import resvisor.numpy
                kept = resvisor.numpy.load_file(job.params["path"])
            if what == "where":
                job.add_output("where", repr((worker.id, worker.type, job.model, os.environ.get("MY"), sys.executable)))
"""


@pytest.fixture
def make_python(make_service):
    """make_python(script, **type_keys): a service with one type `py`; not started."""

    def make(script=SCRIPT, **keys):
        service = make_service()
        models.write_plain(service.models / "small.safetensors", mib=2)
        models.write_plain(service.models / "other.safetensors", mib=1, tensors=2)
        (service.folder / "worker.py").write_text(textwrap.dedent(script))
        service.config["models"] = {name: {"path": f"{name}.safetensors"} for name in ("small", "other")}
        service.config["types"] = {
            "py": {"kind": "python", "python": sys.executable, "script": "worker.py", "models": ["small"], **keys}
        }
        return service

    return make


@pytest.fixture
def python_service(make_python):
    service = make_python(args=["--one", "two words"], env={"MY": "own"}).start()
    service.wait_ready()
    return service


@pytest.fixture
def jobs(python_service):
    with Jobs(python_service) as made:
        yield made


def output(jobs, what, number=0, **fields):
    return jobs.output(jobs.run_done("py", {"do": what}, **fields), number)


def test_outputs_and_progress(jobs):
    job = jobs.run_done("py", {"do": "outputs"})
    assert [(o.name, o.content_type) for o in job.outputs] == [
        ("text.txt", "text/plain"), ("bytes", "application/octet-stream"), ("array", "application/octet-stream"),
        ("readonly", "application/octet-stream"), ("empty", "application/octet-stream"),
    ]  # fmt: skip
    assert [jobs.output(job, i) for i in range(4)] == ["grün".encode(), b"abc", b"defg", b"hi"]
    assert (job.progress_total, job.progress_text) == (4, "nearly")


def test_arguments_environment_and_payload(python_service, jobs):
    python_service.wait_log("py/0 is ready")
    assert "arguments ['--one', 'two words']" in python_service.cli("logs", "py").stdout
    assert output(jobs, "where").decode() == repr(("py/0", "py", "small", "own", sys.executable))
    assert output(jobs, "payload", payload=bytes(range(256)) * 100) == bytes(range(256)) * 100


def test_models_come_with_the_job_and_are_read_once(python_service, jobs):
    assert output(jobs, "models") == b"{'small': (1, 8, 'private')}"
    assert output(jobs, "models", model="other") == b"{'other': (1, 2, 'private'), 'small': (1, 8, 'private')}"
    procfs.wait_until(lambda: python_service.model("other").leases == 0, 5, "the job's own lease to end")
    job = jobs.run_done("py", {"do": "models"})
    assert job.read_bytes == 0 and python_service.model("small").loads == 1


def test_load_file_in_a_job_is_counted_as_the_jobs(python_service, jobs):
    path = python_service.folder / "elsewhere.safetensors"
    models.write_plain(path, mib=1)
    assert jobs.run_done("py", {"do": "file", "path": path}).read_bytes >= 1 << 20
    assert jobs.run_done("py", {"do": "file", "path": path}).read_bytes == 0


def test_a_new_generation_reaches_the_next_job(python_service, jobs):
    models.write_plain(python_service.folder / "next.safetensors", mib=1, tensors=3, seed=5)
    os.replace(python_service.folder / "next.safetensors", python_service.models / "small.safetensors")
    found = output(jobs, "models")
    assert found.endswith(b"3, 'private')}") and found != b"{'small': (1, 3, 'private')}"


def test_a_model_that_cannot_be_had_fails_the_job_with_its_code(python_service, jobs):
    (python_service.models / "other.safetensors").write_bytes(models.BAD_FILES["json_list"])
    job = jobs.run("py", {"do": "models"}, model="other")
    assert job.state == rpc_pb2.JOB_FAILED and job.error.code == rpc_pb2.ERROR_MODEL_INVALID
    assert output(jobs, "models") == b"{'small': (1, 8, 'private')}"


def test_an_exception_is_the_jobs_failure_and_the_worker_lives(python_service, jobs):
    pid = python_service.worker("py").pid
    for what, code, text in (
        ("raise", rpc_pb2.ERROR_JOB_FAILED, "RuntimeError: no such luck"),
        ("fail", rpc_pb2.ERROR_BAD_REQUEST, "by hand"),
        ("badname", rpc_pb2.ERROR_BAD_REQUEST, "an output's name"),
    ):
        job = jobs.run("py", {"do": what})
        assert (job.state, job.error.code) == (rpc_pb2.JOB_FAILED, code) and text in job.error.message
    assert jobs.run("py", {"do": "twice"}).state == rpc_pb2.JOB_DONE  # what comes after the end is the script's error
    jobs.run_done("py")
    assert python_service.worker("py").pid == pid
    log = python_service.cli("logs", "py").stdout
    assert 'raise RuntimeError("no such luck")' in log and "ValueError: job" in log


@pytest.mark.parametrize(("what", "text"), [("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")])
def test_ending_the_program_in_a_job_fails_the_job_and_ends_the_worker(python_service, jobs, what, text):
    job = jobs.run("py", {"do": what})
    assert job.error.code == rpc_pb2.ERROR_JOB_FAILED and text in job.error.message
    python_service.wait_worker("py", starts=2)
    jobs.run_done("py")


def test_a_crash_is_worker_died_and_the_next_worker_reads_nothing(python_service, jobs):
    job = jobs.run("py", {"do": "crash"})
    assert job.error.code == rpc_pb2.ERROR_WORKER_DIED and "SIGSEGV" in job.error.message
    assert jobs.run_done("py").read_bytes == 0
    assert python_service.model("small").loads == 1 and python_service.worker("py").starts == 2


def test_a_forked_child_may_end_as_it_likes(python_service, jobs):
    assert output(jobs, "fork") == b"7", python_service.log()
    jobs.run_done("py")
    assert python_service.worker("py").starts == 1


def test_signal_handlers_of_the_script_run_while_it_waits(python_service):
    procfs.kill(python_service.worker("py").pid, signal.SIGUSR1)
    procfs.wait_until(lambda: f"signal {int(signal.SIGUSR1)}" in python_service.cli("logs", "py").stdout, 10, "the handler's line")


def test_cancel_ends_a_job_that_shows_progress(python_service, jobs):
    job_id = jobs.submit("py", params={"do": "endless"}).job_id
    procfs.wait_until(lambda: jobs.get(job_id).progress_text == "endless", 10, "the job to run")
    jobs.cancel(job_id)
    assert jobs.wait(job_id).state == rpc_pb2.JOB_CANCELLED
    assert python_service.worker("py").starts == 1
    jobs.run_done("py")


def test_writes_stay_the_workers_own(python_service, jobs):
    jobs.run_done("py", {"do": "write"})
    code = """
        import json, resvisor
        lease = resvisor.connect().attach("small")
        lease.verify()
        print(json.dumps(any(lease["block.0.weight"].tobytes())))
    """
    assert run_python(python_service, code) is True


def test_stop_lets_a_job_end_and_the_worker_ends_by_itself(make_python, gate):
    service = make_python().start()
    service.wait_ready()
    with Jobs(service) as jobs:
        job_id = jobs.submit("py", params={"do": "gate", "gate": gate.path}).job_id
        gate.wait_reached()
        stopping = subprocess.Popen([str(service.program), "stop"], env=service.env, stdin=subprocess.DEVNULL)
        service.wait_worker("py", state="DRAINING")
        gate.open()
        assert stopping.wait(30) == 0
    assert service.process.wait(30) == 0
    assert "killed" not in service.log()


def test_an_idle_worker_ends_at_once_on_restart(python_service, jobs):
    python_service.cli("restart", "py")
    python_service.wait_worker("py", starts=2)
    assert python_service.worker("py").last_exit.startswith("exited with code 0")
    jobs.run_done("py")


def test_a_job_left_unended_fails_and_says_why(make_python):
    service = make_python("""
        from resvisor.worker import Worker
        for job in Worker.open():
            pass
    """).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        first = jobs.run("py")
        assert first.error.code == rpc_pb2.ERROR_JOB_FAILED and "use `with job:`" in first.error.message


def test_outside_a_worker_open_says_so(bare):
    result = run_python(bare, "from resvisor.worker import Worker; Worker.open()", check=False)
    assert "was not started by resvisor" in result.stderr and "Traceback" in result.stderr


def test_script_that_ends_at_once_is_given_up_visibly(make_python):
    service = make_python("raise SystemExit('not today')", max_deaths=2).start()
    service.wait_worker("py", state="FAILED")
    assert "not today" in service.cli("logs", "py").stdout


# ---- configuration ----


def check(tmp_path, type_keys, ok=False):
    (tmp_path / "s.py").write_text("")
    lines = "".join(f"    {line}\n" for line in type_keys)
    (tmp_path / "c.yaml").write_text(f"types:\n  py:\n{lines}")
    result = run_program("check", "-c", tmp_path / "c.yaml", *(["--show"] if ok else []), check=ok)
    return result.stdout if ok else result.stderr + result.stdout


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["kind: python"], "c.yaml:2: types.py.script: is missing; allowed: the path of a Python script"),
        (["kind: python", "script: nix.py"], "nix.py: No such file or directory; allowed: the path of a Python script"),
        (["kind: python", "script: ."], "Is a directory"),
        (["kind: python", "script: s.py", "python: nixthon"], 'no program "nixthon" is in PATH'),
        (["kind: python", "script: s.py", "python: bin/nix"], "bin/nix: No such file or directory; allowed: a name that is in PATH"),
        (["kind: python", "script: s.py", "python: ./s.py"], "Permission denied"),
        (["kind: python", "script: s.py", "executor: image"], "types.py.executor: is not a key of workers of kind python; allowed with kind: native"),
        (["executor: image", "args: [a]"], "types.py.args: is not a key of workers of kind native; allowed with kind: python"),
        (["kind: pyton", "script: s.py"], 'did you mean "python"?'),
    ],
)  # fmt: skip
def test_wrong_configuration_is_named(tmp_path, keys, text):
    found = check(tmp_path, keys)
    assert text in found


def test_relative_paths_and_the_default_interpreter(tmp_path):
    shown = check(tmp_path, ["kind: python", "script: s.py"], ok=True)
    assert re.search(rf"types\.py\.script +{re.escape(str(tmp_path))}/s\.py", shown)
    python = re.search(r"types\.py\.python +(\S+)", shown)[1]
    assert python.startswith("/") and pathlib.Path(python).name == "python3"
    (tmp_path / "venv").symlink_to(pathlib.Path(sys.executable).parent)
    shown = check(tmp_path, ["kind: python", "script: s.py", "python: venv/python"], ok=True)
    assert f"{tmp_path}/venv/python" in shown


def test_the_package_comes_before_the_users_pythonpath(make_python, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "resvisor.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "mine" / "helper.py").write_text("NAME = 'helper'")
    service = make_python("""
        import helper
        from resvisor.worker import Worker
        for job in Worker.open():
            with job:
                job.add_output("o", helper.NAME)
    """, env={"PYTHONPATH": str(tmp_path / "mine")}).start()  # fmt: skip
    service.wait_ready()
    with Jobs(service) as jobs:
        assert jobs.output(jobs.run_done("py")) == b"helper"


def test_the_example_worker_runs_and_has_ten_lines(make_service):
    script = ROOT / "deploy" / "examples" / "python" / "worker.py"
    service = make_service()
    models.write(service.models / "m.safetensors", [("a", "I8", (4,)), ("b", "U16", (2, 3))])
    service.config["models"] = {"m": {"path": "m.safetensors"}}
    service.config["types"] = {"means": {"kind": "python", "script": str(script), "models": ["m"], "python": sys.executable}}
    service.start()
    service.wait_ready()
    with Jobs(service) as jobs:
        lines = jobs.output(jobs.run_done("means")).decode().splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "b"]
    code = [line for line in script.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= 10
