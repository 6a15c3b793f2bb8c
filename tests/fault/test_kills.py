"""kill -9 of every kind of process, alone and at random moments: nothing leaks, no job runs twice, all is served again."""

import collections
import os
import random
import time
import uuid

import pytest

from harness import models, procfs
from harness.control import Dropped, Refused, attach_to
from harness.jobs import Jobs, RpcError
from harness.protos import control_pb2, rpc_pb2
from harness.service import FAULT_EXECUTOR, SANITIZED

KILLS = 100
WORKERS = 4
KILL_PAUSE_MAX_S = 0.1
CHURN_MIB = 1024  # long enough to load that a loader is hit before its end, on any machine
LOADER_PAUSE_MAX_S = 0.1
RESET_EVERY = 8
KINDS = ("worker",) * 6 + ("loader",) * 3 + ("router",)  # few routers: the waits between their restarts add up
SUPERVISOR_KILLS = 25
EXIT_WITHIN_S = 5.0
SEED = int(os.environ.get("RESVISOR_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


def notes(path):
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


# ---- the router ----


def test_a_killed_router_comes_back_and_a_running_job_is_not_run_twice(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        worker = faulty.worker("test").pid
        jobs.submit("test", "survivor", {"gate": gate.path, "note": note})
        gate.wait_reached()
        router = faulty.status().router_pid
        procfs.kill(router)
        faulty.wait_router(other_than=router)
        again = jobs.submit("test", "survivor", {"gate": gate.path, "note": note})
        assert again.state == rpc_pb2.JOB_RUNNING
        gate.open()
        job = jobs.wait("survivor")
        assert job.state == rpc_pb2.JOB_DONE
        assert notes(note) == ["survivor"]
        assert faulty.worker("test").pid == worker
        assert jobs.output_named(job, "report.json")


def test_a_result_that_was_not_taken_survives_the_router(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        jobs.submit("test", "kept", {"gate": gate.path, "note": note, "output_bytes": 5000})
        gate.wait_reached()
        router = faulty.status().router_pid
        procfs.kill(router)
        gate.open()
        faulty.wait_router(other_than=router)
        job = jobs.submit("test", "kept", {"gate": gate.path, "note": note, "output_bytes": 5000}, wait_ms=20_000)
        assert job.state == rpc_pb2.JOB_DONE and len(jobs.output_named(job, "bytes.bin")) == 5000
        assert notes(note) == ["kept"]


def test_queued_jobs_of_a_killed_router_run_once_when_repeated(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        jobs.submit("test", "first", {"gate": gate.path, "note": note})
        gate.wait_reached()
        for number in range(5):
            jobs.submit("test", f"queued-{number}", {"note": note})
        router = faulty.status().router_pid
        procfs.kill(router)
        faulty.wait_router(other_than=router)
        gate.open()
        for number in range(5):
            assert jobs.submit("test", f"queued-{number}", {"note": note}, wait_ms=20_000).state == rpc_pb2.JOB_DONE
        assert sorted(notes(note)) == sorted(["first"] + [f"queued-{number}" for number in range(5)])


def test_router_and_worker_killed_together_is_a_lost_or_failed_job_never_a_second_run(faulty, watched, gate, tmp_path):
    note = tmp_path / "note"
    with watched(faulty), Jobs(faulty) as jobs:
        jobs.submit("test", "lost", {"gate": gate.path, "note": note})
        gate.wait_reached()
        router = faulty.status().router_pid
        procfs.kill(router)
        procfs.kill(faulty.worker("test").pid)
        faulty.wait_router(other_than=router)
        faulty.wait_worker("test", starts=2)
        job = jobs.submit("test", "lost", {"gate": gate.path, "note": note}, wait_ms=20_000)
        assert job.state == rpc_pb2.JOB_FAILED
        assert job.error.code in (rpc_pb2.ERROR_JOB_LOST, rpc_pb2.ERROR_WORKER_DIED)
        assert notes(note) == ["lost"]
        assert jobs.run_done("test")


# ---- the loader ----


def loader_pid(service):
    for pid in procfs.descendants(service.keeper_pid):
        if "resvisor-loader" in procfs.command(pid):
            return pid
    return 0


def test_a_killed_loader_fails_its_load_with_a_reason_and_the_next_works(make_service, watched):
    service = make_service({"pool": {"load_retry": "0s", "direct": "always"}}).start()
    path = service.models / "large.safetensors"
    models.write_sparse(path, mib=CHURN_MIB)
    with watched(service):
        for _ in range(20):
            with service.peer() as peer:
                peer.send(attach_frame(path))
                pid = procfs.wait_until(lambda: loader_pid(service) or peer.has_answer() or None, 10, "a loader")
                if isinstance(pid, int) and pid > 1:
                    procfs.kill(pid)
                try:
                    answer, fds = peer.receive()
                    for fd in fds:
                        os.close(fd)
                except Refused:
                    pass
                if answer.WhichOneof("body") == "error":
                    assert answer.error.code in (rpc_pb2.ERROR_INTERNAL, rpc_pb2.ERROR_FILE, rpc_pb2.ERROR_NO_MEMORY)
                    assert "SIGKILL" in answer.error.message or "loader" in answer.error.message
                    break
            procfs.wait_until(lambda: service.model(path).leases == 0, 10, "no lease")
            service.control.model(rpc_pb2.MODEL_UNLOAD, path)
        else:
            pytest.fail("no loader was caught in the act")
        with service.peer() as peer:
            reply, index_fd, arena_fds = peer.attach(path)
            for fd in [index_fd, *arena_fds]:
                os.close(fd)
            assert reply.generation == 1
        procfs.wait_until(lambda: service.model(path).leases == 0, 10, "no lease")
        service.control.model(rpc_pb2.MODEL_UNLOAD, path)


def attach_frame(path):
    return control_pb2.Frame(id=1, attach=attach_to(path))


# ---- the supervisor and the keeper ----


@pytest.mark.parametrize("moment", range(SUPERVISOR_KILLS))
def test_a_killed_supervisor_takes_everything_with_it_within_five_seconds(make_faulty, tmp_path, moment):
    service = make_faulty({"test": {"workers": 2, "env": {"FAULT_START": "deaf"}}}).start()
    rng = random.Random(f"{SEED}-{moment}")
    if moment:
        service.wait_ready()
        with Jobs(service) as jobs:
            jobs.run_done("test", {"fault": "grandchild"})
            jobs.submit("test", params={"fault": "hang"})
    service.close_control()
    time.sleep(rng.random() * 0.05)  # the moment is what is random here
    victim = next(
        pid for pid in procfs.descendants(service.keeper_pid) if "_supervisor" in procfs.command(pid)
    )
    begin = time.monotonic()
    procfs.kill(victim)
    code = service.process.wait(EXIT_WITHIN_S)
    assert time.monotonic() - begin < EXIT_WITHIN_S
    assert code not in (0, None)
    service.assert_nothing_left_but_files(timeout=EXIT_WITHIN_S)
    service.start()
    service.wait_ready()
    with Jobs(service) as jobs:
        assert jobs.run_done("test")


def test_a_killed_keeper_leaves_no_process(make_faulty):
    service = make_faulty({"test": {"workers": 2}}).start()
    service.wait_ready()
    service.close_control()
    procfs.kill(service.keeper_pid)
    service.process.wait(EXIT_WITHIN_S)
    service.assert_nothing_left_but_files(timeout=EXIT_WITHIN_S)
    service.start()
    service.wait_ready()


# ---- random moments ----


class Traffic:
    """Jobs that go on all the time, each id once; what the ends were."""

    def __init__(self, service, note, rng):
        self.service, self.note, self.rng = service, note, rng
        self.jobs = Jobs(service)
        self.open = []
        self.ends = {}

    def submit(self):
        job_id = f"soak-{uuid.UUID(int=self.rng.getrandbits(128))}"
        params = {"note": self.note, "output_bytes": self.rng.choice((0, 1000, 200_000))}
        self.open.append((job_id, params))
        self.call(job_id, params, 0)

    def call(self, job_id, params, wait_ms):
        try:
            job = self.jobs.submit("test", job_id, params, wait_ms=wait_ms)
        except RpcError as error:
            assert error.code in (
                rpc_pb2.ERROR_QUEUE_FULL, rpc_pb2.ERROR_TYPE_FAILED, rpc_pb2.ERROR_NOT_READY,
            ), error  # fmt: skip
            return
        if job.state in (rpc_pb2.JOB_DONE, rpc_pb2.JOB_FAILED):
            self.ends[job_id] = (job.state, job.error.code)

    def finish(self):
        for job_id, params in self.open:
            procfs.wait_until(lambda: self.call(job_id, params, 5000) or job_id in self.ends, 60, f"the end of {job_id}")
        self.jobs.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_random_kills_leak_nothing_and_run_no_job_twice(make_service, watched, tmp_path):
    print(f"seed {SEED}: repeat with RESVISOR_SEED={SEED}")
    rng = random.Random(SEED)
    service = make_service({"pool": {"load_retry": "0s"}})
    models.write_plain(service.models / "small.safetensors", mib=4)
    churn = service.models / "churn.safetensors"
    models.write_sparse(churn, mib=CHURN_MIB)
    service.config["models"] = {"small": {"path": "small.safetensors"}}
    service.config["types"] = {
        "test": {"executor": str(FAULT_EXECUTOR), "models": ["small"], "workers": WORKERS, "queue": 1000, "max_deaths": 1000}
    }
    service.start()
    service.wait_ready()
    note = tmp_path / "note"
    traffic = Traffic(service, note, rng)
    counts = dict.fromkeys(KINDS, 0)
    next_reset = RESET_EVERY
    supervisor = service.status().supervisor_pid
    with watched(service):
        warm = service.model("small").loads
        for turn in range(2 * KILLS):
            if sum(counts.values()) >= KILLS:
                break
            traffic.submit()
            kind = rng.choice(KINDS)
            with service.peer() as peer:
                if kind == "loader":
                    peer.send(attach_frame(churn))
                    procfs.wait_until(lambda: loader_pid(service) or peer.has_answer(), 30, "a loader", poll=0.001)
                    time.sleep(rng.random() * LOADER_PAUSE_MAX_S)  # the moment is what is random here
                else:
                    time.sleep(rng.random() * KILL_PAUSE_MAX_S)
                pid = choose(service, kind, rng)
                if pid:
                    procfs.kill(pid)
                    counts[kind] += 1
                if kind == "loader":
                    wait_for_attach(service, peer, churn)
            if counts["worker"] >= next_reset:
                next_reset += RESET_EVERY
                service.cli("restart", "test", timeout=90)  # ends the backoff, which would only cost time here
        service.wait_router()
        for number in range(WORKERS):
            service.wait_worker("test", number=number, timeout=90)
        traffic.finish()
        procfs.wait_until(lambda: unloaded(service, churn), 20, "the churned model gone")
        assert service.model("small").loads == warm
    assert counts["worker"] > 20 and counts["loader"] > 0 and counts["router"] > 0, counts
    ran = notes(note)
    print(f"kills: {counts}; ends: {collections.Counter(map(end_name, traffic.ends.values()))}")
    assert len(ran) == len(set(ran)), "no job ran twice"
    done = [job_id for job_id, (state, _) in traffic.ends.items() if state == rpc_pb2.JOB_DONE]
    assert set(done) <= set(ran)
    allowed = {rpc_pb2.ERROR_WORKER_DIED, rpc_pb2.ERROR_JOB_LOST}
    assert {code for state, code in traffic.ends.values() if state == rpc_pb2.JOB_FAILED} <= allowed
    assert len(done) > KILLS // 4
    assert service.status().supervisor_pid == supervisor
    if not SANITIZED:
        assert procfs.rss(supervisor) < 16 * 1024 * 1024



def wait_for_attach(service, peer, path):
    """The end of an attach, whatever it is; then the model is given back."""
    try:
        _, fds = peer.receive()
    except Dropped:
        pytest.fail("the supervisor dropped an honest client")
    for fd in fds:
        os.close(fd)
    try:
        service.control.model(rpc_pb2.MODEL_UNLOAD, path)
    except Refused:
        pass  # still held for a moment, or not loaded


def end_name(end):
    state, code = end
    return rpc_pb2.ErrorCode.Name(code) if code else rpc_pb2.JobState.Name(state)


def choose(service, kind, rng):
    """A victim of that kind that lives now; 0 = none."""
    if kind == "loader":
        return loader_pid(service)
    found = service.status()
    if kind == "router":
        return found.router_pid if found.router_pid and procfs.alive(found.router_pid) else 0
    pids = [worker.pid for worker in found.types[0].workers if worker.pid and procfs.alive(worker.pid)]
    return rng.choice(pids) if pids else 0


def unloaded(service, path):
    try:
        service.control.model(rpc_pb2.MODEL_UNLOAD, path)
    except Refused:
        return False
    return True
