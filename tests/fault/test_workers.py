"""Workers that die, hang, never start, ignore signals, or leave processes behind."""

import json
import os
import signal

import pytest

from harness import procfs
from harness.jobs import Jobs, RpcError
from harness.protos import rpc_pb2
from harness.service import THREE_TYPES

WORKER_DIED = rpc_pb2.ERROR_WORKER_DIED


def notes(path):
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def note_pids(path):
    return [int(line.split()[1]) for line in path.read_text().splitlines()]


@pytest.fixture
def jobs(faulty):
    with Jobs(faulty) as client:
        yield client


@pytest.mark.parametrize(
    ("fault", "word"), [("crash", "SIGSEGV"), ("abort", "SIGABRT"), ("exit", "7")]
)
def test_an_executor_that_ends_its_worker_fails_its_job_only(faulty, watched, fault, word):
    with watched(faulty), Jobs(faulty) as jobs:
        loads = faulty.model("small").loads
        job = jobs.run("test", {"fault": fault})
        assert job.state == rpc_pb2.JOB_FAILED and job.error.code == WORKER_DIED
        assert word in job.error.message
        worker = faulty.wait_worker("test", starts=2)
        assert word in worker.last_exit
        assert jobs.run_done("test").read_bytes == 0
        assert faulty.model("small").loads == loads


def test_a_death_is_one_line_with_who_how_uptime_job_and_what_next(faulty, gate):
    with Jobs(faulty) as jobs:
        job = jobs.submit("test", "obituary", {"gate": gate.path})
        gate.wait_reached()
        procfs.kill(faulty.worker("test").pid)
        jobs.wait(job.job_id)
        line = faulty.wait_log("SIGKILL")
        for part in ("test/0", "SIGKILL", "obituary", "s", "restart"):
            assert part in line, line
        faulty.wait_worker("test", starts=2)
        assert sum("test/0" in found and "SIGKILL" in found for found in faulty.log().splitlines()) == 1


def test_kill_in_the_middle_of_a_job_is_a_typed_error_and_costs_no_read(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        job = jobs.submit("test", "victim", {"gate": gate.path, "note": note})
        gate.wait_reached()
        procfs.kill(faulty.worker("test").pid)
        job = jobs.wait("victim")
        assert job.error.code == WORKER_DIED and "SIGKILL" in job.error.message and job.attempts == 1
        faulty.wait_worker("test", starts=2)
        assert jobs.run_done("test").read_bytes == 0
        assert notes(note) == ["victim"]
        # Idempotent for the dead one too: the repeat is answered with the failure and starts nothing.
        again = jobs.submit("test", "victim", {"gate": gate.path, "note": note})
        assert again.state == rpc_pb2.JOB_FAILED and notes(note) == ["victim"]


def test_a_second_try_if_the_submitter_allowed_it(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        jobs.submit("test", "twice", {"gate": gate.path, "note": note}, retry_on_worker_death=True)
        gate.wait_reached()
        procfs.kill(faulty.worker("test").pid)
        faulty.wait_worker("test", starts=2)
        gate.wait_reached()
        gate.open()
        job = jobs.wait("twice")
        assert job.state == rpc_pb2.JOB_DONE and job.attempts == 2
        assert notes(note) == ["twice", "twice"]


def test_a_job_that_kills_twice_is_quarantined(faulty, watched, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        job = jobs.run("test", {"fault": "crash", "note": note}, job_id="poison", retry_on_worker_death=True)
        assert job.state == rpc_pb2.JOB_FAILED and job.error.code == rpc_pb2.ERROR_QUARANTINED
        assert notes(note) == ["poison", "poison"]
        faulty.wait_worker("test", starts=3)
        assert jobs.run_done("test")
        assert jobs.submit("test", "poison", {"fault": "crash", "note": note}, retry_on_worker_death=True).state == 4
        assert notes(note) == ["poison", "poison"]


def test_other_types_do_not_notice(make_faulty, gate):
    service = make_faulty({"a": {}, "b": {}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        pid = service.worker("b").pid
        jobs.submit("b", "steady", {"gate": gate.path})
        gate.wait_reached()
        for starts in (2, 3):
            jobs.run("a", {"fault": "crash"})
            service.wait_worker("a", starts=starts)
        assert jobs.get("steady").state == rpc_pb2.JOB_RUNNING
        gate.open()
        assert jobs.wait("steady").state == rpc_pb2.JOB_DONE
        assert service.worker("b").pid == pid and service.worker("b").starts == 1


def test_a_worker_that_dies_at_start_is_failed_then_reset(make_faulty, tmp_path):
    switch = tmp_path / "broken"
    switch.write_text("")
    service = make_faulty(
        {"test": {"max_deaths": 2, "env": {"FAULT_START": "exit", "FAULT_START_FILE": str(switch)}}, "good": {}}
    ).start()
    service.wait_worker("good")
    with Jobs(service) as jobs:
        worker = service.wait_worker("test", "FAILED", timeout=30)
        assert worker.starts == 2 and "7" in worker.last_exit
        with pytest.raises(RpcError) as refused:
            jobs.submit("test")
        assert refused.value.code == rpc_pb2.ERROR_TYPE_FAILED
        assert jobs.run_done("good")
        switch.unlink()
        service.cli("restart", "test")
        service.wait_worker("test")
        assert jobs.run_done("test")
    service.assert_healthy()


def test_a_worker_that_never_becomes_ready_is_killed(make_faulty, tmp_path):
    switch = tmp_path / "broken"
    switch.write_text("")
    service = make_faulty(
        {"test": {"start_timeout": "1s", "env": {"FAULT_START": "hang", "FAULT_START_FILE": str(switch)}}}
    ).start()
    service.wait_log("start_timeout", timeout=20)
    switch.unlink()
    service.wait_worker("test", timeout=20)
    assert service.worker("test").starts >= 2


def test_an_executor_that_does_not_exist_any_more(make_faulty, tmp_path):
    copy = tmp_path / "executor.so"
    service = make_faulty()
    copy.write_bytes(open(service.config["types"]["test"]["executor"], "rb").read())
    copy.chmod(0o755)
    service.config["types"]["test"] |= {"executor": str(copy), "max_deaths": 2}
    service.start()
    service.wait_ready()
    copy.unlink()
    procfs.kill(service.worker("test").pid)
    service.wait_worker("test", "FAILED", timeout=30)
    assert "executor.so" in service.log()


def test_a_worker_that_ignores_sigterm_is_killed_at_stop(make_faulty, gate):
    service = make_faulty({"test": {"stop_timeout": "1s", "env": {"FAULT_START": "deaf"}}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        jobs.submit("test", "deaf", {"gate": gate.path, "fault": "deaf"})
        gate.wait_reached()
    service.close_control()
    os.kill(service.keeper_pid, signal.SIGTERM)
    assert service.process.wait(20) == 0
    service.assert_nothing_left()


@pytest.mark.parametrize("how", ["crash", "kill", "restart", "stop"])
def test_grandchildren_end_with_their_worker(faulty, how):
    with Jobs(faulty) as jobs:
        assert jobs.run_done("test", {"fault": "grandchild"})
        worker = faulty.worker("test").pid
        family = faulty.others()
        assert len(family) == 1
        if how == "crash":
            jobs.run("test", {"fault": "crash"})
        elif how == "kill":
            procfs.kill(worker)
        elif how == "restart":
            faulty.cli("restart", "test")
        else:
            faulty.stop()
        procfs.wait_until(lambda: not any(map(procfs.stat, family)), 15, "the end of the grandchild")
        if how != "stop":
            faulty.wait_worker("test", starts=2)
            faulty.assert_healthy()


def test_a_hanging_executor_is_ended_by_stall_timeout(make_faulty, watched):
    service = make_faulty({"test": {"stall_timeout": "1s", "ping_interval": "200ms"}}).start()
    service.wait_ready()
    with watched(service), Jobs(service) as jobs:
        job = jobs.run("test", {"fault": "hang"}, timeout=20)
        assert job.error.code == WORKER_DIED
        service.wait_worker("test", starts=2)
        assert jobs.run_done("test")


def test_a_stopped_process_is_ended_by_ping_timeout(make_faulty, watched, gate):
    service = make_faulty({"test": {"ping_interval": "200ms", "ping_timeout": "1s"}}).start()
    service.wait_ready()
    with watched(service), Jobs(service) as jobs:
        jobs.submit("test", "frozen", {"gate": gate.path})
        gate.wait_reached()
        os.kill(service.worker("test").pid, signal.SIGSTOP)
        job = jobs.wait("frozen", 20)
        assert job.error.code == WORKER_DIED
        service.wait_worker("test", starts=2)
        assert jobs.run_done("test")


@pytest.mark.host_memory
def test_writing_into_the_weights_changes_only_the_writers_copy(make_faulty, watched):
    service = make_faulty({"writer": {}, "reader": {}}).start()
    service.wait_ready()
    with watched(service), Jobs(service) as jobs:
        good = json.loads(jobs.output(jobs.run_done("reader")))
        bad = json.loads(jobs.output(jobs.run_done("writer", {"fault": "write"})))
        assert bad["fnv"] != good["fnv"] and bad["copied"] > 0
        assert bad["verified"], "the pool's own bytes still have their digests"
        after = json.loads(jobs.output(jobs.run_done("reader")))
        assert after["fnv"] == good["fnv"] and after["verified"] and after["copied"] == 0


def test_a_shared_mapping_turns_a_write_into_a_crash_of_the_writer(make_faulty, watched):
    service = make_faulty({"test": {"mapping": "shared"}}).start()
    service.wait_ready()
    with watched(service), Jobs(service) as jobs:
        job = jobs.run("test", {"fault": "write"})
        assert job.error.code == WORKER_DIED and "SIGSEGV" in job.error.message
        service.wait_worker("test", starts=2)
        assert json.loads(jobs.output(jobs.run_done("test")))["verified"]


@pytest.mark.host_memory  # they read weights by the CPU
@pytest.mark.parametrize("fault", ["crash", "abort", "exit", "fail", "fork-grandchild"])
def test_the_shipped_executors_survive_their_fault_menu(three, fault):
    with Jobs(three) as jobs:
        for kind in THREE_TYPES:
            job = jobs.run(kind, {"fault": fault})
            if fault == "fork-grandchild":
                assert job.state == rpc_pb2.JOB_DONE
            else:
                wanted = rpc_pb2.ERROR_JOB_FAILED if fault == "fail" else WORKER_DIED
                assert job.error.code == wanted, job
        for kind in THREE_TYPES:
            three.wait_worker(kind)
            assert jobs.run_done(kind).read_bytes == 0


def test_results_are_bounded_and_the_oldest_go_first(make_faulty):
    service = make_faulty(rpc={"result_count": 3}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        for number in range(8):
            jobs.run_done("test", {"output_bytes": 100_000}, job_id=f"r-{number}")
        router = service.status().router_pid
        procfs.wait_until(lambda: len(procfs.memfds(router)) <= 6, 10, "old results gone")
        assert len(jobs.output_named(jobs.get("r-7"), "bytes.bin")) == 100_000
        with pytest.raises(RpcError) as gone:
            jobs.output(jobs.get("r-0"))
        assert gone.value.code == rpc_pb2.ERROR_NO_SUCH_RESULT
