"""Jobs: real outputs of the three executors, idempotency, order, cancel, results, and weights that are shared."""

import json
import os
import signal
import uuid

import pytest

from harness import outputs, procfs
from harness.jobs import Jobs, RpcError
from harness.protos import rpc_pb2
from harness.service import THREE_TYPES

EXPECTED = {
    "image": ("image/png", outputs.png),
    "video": ("image/webp", outputs.webp_animation),
    "audio": ("audio/wav", outputs.wav),
}
MIB = 1024 * 1024


@pytest.fixture
def jobs(faulty):
    with Jobs(faulty) as client:
        yield client


@pytest.fixture
def three_jobs(three):
    with Jobs(three) as client:
        yield client


def notes(path):
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


# ---- the shipped executors ----


@pytest.mark.smoke
def test_the_three_types_make_valid_files(three, three_jobs):
    for kind in THREE_TYPES:
        content_type, check = EXPECTED[kind]
        job = three_jobs.run_done(kind, {"seed": 5})
        assert job.outputs[0].content_type.replace("x-wav", "wav").replace("vnd.wave", "wav") == content_type
        data = three_jobs.output(job)
        assert len(data) == job.outputs[0].size
        check(data)
        assert job.read_bytes == 0, "the worker had attached its models before"
        assert job.worker == f"{kind}/0" and job.attempts == 1 and job.run_us > 0


def test_same_input_and_seed_give_the_same_bytes(three, three_jobs):
    for kind in THREE_TYPES:
        one, two, other = (three_jobs.output(three_jobs.run_done(kind, {"seed": seed})) for seed in (1, 1, 2))
        assert one == two, kind
        assert one != other, kind


def test_a_new_worker_makes_the_same_bytes_and_reads_nothing(three, three_jobs):
    before = three_jobs.output(three_jobs.run_done("image", {"seed": 9}))
    read = {model.name: model.read_bytes for model in three.status().models}
    procfs.kill(three.worker("image").pid)
    three.wait_worker("image", starts=2)
    job = three_jobs.run_done("image", {"seed": 9})
    assert three_jobs.output(job) == before
    assert job.read_bytes == 0
    assert {model.name: model.read_bytes for model in three.status().models} == read


def test_submit_by_command_line_writes_the_file(three):
    for kind in THREE_TYPES:
        out = three.folder / f"out-{kind}"
        three.cli("submit", kind, "--param", "seed=3", "--wait", "--out", out)
        EXPECTED[kind][1](out.read_bytes())


def test_three_types_share_the_text_encoder(three):
    model = three.model("text-encoder")
    assert model.loads == 1 and model.leases == 3


def test_writing_into_the_weights_changes_only_the_writers_own_copy(three, three_jobs):
    good = three_jobs.output(three_jobs.run_done("image", {"seed": 4}))
    job = three_jobs.run_done("image", {"seed": 4, "fault": "write-weights"})
    assert any(output.name == "weights-written.txt" for output in job.outputs)
    procfs.kill(three.worker("image").pid)
    three.wait_worker("image", starts=2)
    assert three_jobs.output(three_jobs.run_done("image", {"seed": 4})) == good


# ---- the contract of jobs ----


def test_a_job_sees_its_model_and_reports(faulty, jobs):
    job = jobs.run_done("test", {"output_bytes": 1000})
    report = json.loads(jobs.output_named(job, "report.json"))
    assert report["leases"] == 1 and report["tensors"] == 8 and report["copied"] == 0 and report["verified"]
    data = jobs.output_named(job, "bytes.bin")
    assert data == bytes(i * 31 % 251 for i in range(1000))


def test_submit_is_idempotent_by_id(faulty, jobs, tmp_path):
    note = tmp_path / "note"
    job_id = f"job-{uuid.uuid4()}"
    first = jobs.submit("test", job_id, {"note": note}, wait_ms=20_000)
    for _ in range(5):
        again = jobs.submit("test", job_id, {"note": note}, wait_ms=20_000)
        assert again.state == rpc_pb2.JOB_DONE and again.submitted_ms == first.submitted_ms
    assert notes(note) == [job_id]


def test_the_same_id_with_other_content_is_refused(faulty, jobs):
    job_id = f"job-{uuid.uuid4()}"
    jobs.submit("test", job_id, {"a": 1}, wait_ms=20_000)
    with pytest.raises(RpcError) as refused:
        jobs.submit("test", job_id, {"a": 2})
    assert refused.value.code == rpc_pb2.ERROR_JOB_EXISTS


def test_priority_first_then_order_of_arrival(faulty, jobs, gate, tmp_path):
    note = tmp_path / "note"
    holder = jobs.submit("test", "holder", {"gate": gate.path})
    gate.wait_reached()
    for job_id, priority in (("low-1", -1), ("mid-1", 0), ("high-1", 5), ("mid-2", 0), ("high-2", 5), ("low-2", -1)):
        jobs.submit("test", job_id, {"note": note}, priority=priority)
    gate.open()
    for job_id in ("low-1", "low-2", holder.job_id):
        jobs.wait(job_id)
    assert notes(note) == ["high-1", "high-2", "mid-1", "mid-2", "low-1", "low-2"]


def test_a_full_queue_refuses_and_recovers(make_faulty, gate):
    service = make_faulty({"test": {"queue": 2}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        jobs.submit("test", "running", {"gate": gate.path})
        gate.wait_reached()
        jobs.submit("test", "waiting-1")
        jobs.submit("test", "waiting-2")
        with pytest.raises(RpcError) as refused:
            jobs.submit("test", "too-many")
        assert refused.value.code == rpc_pb2.ERROR_QUEUE_FULL
        assert (jobs.type("test").queued, jobs.type("test").running) == (2, 1)
        facts = service.cli_json("status")["types"][0]
        assert (facts["queued"], facts["running"]) == (2, 1)
        gate.open()
        assert jobs.wait("waiting-2").state == rpc_pb2.JOB_DONE
        assert jobs.run_done("test", job_id="too-many").state == rpc_pb2.JOB_DONE


def test_a_queued_job_is_cancelled_at_once(faulty, jobs, gate, tmp_path):
    note = tmp_path / "note"
    jobs.submit("test", "holder", {"gate": gate.path})
    gate.wait_reached()
    jobs.submit("test", "queued", {"note": note})
    job = jobs.cancel("queued")
    assert job.state == rpc_pb2.JOB_CANCELLED and job.error.code == rpc_pb2.ERROR_CANCELLED
    gate.open()
    assert jobs.wait("holder").state == rpc_pb2.JOB_DONE
    assert notes(note) == []


def test_a_running_job_is_cancelled_and_its_worker_lives(faulty, jobs, gate):
    pid = faulty.worker("test").pid
    jobs.submit("test", "running", {"gate": gate.path})
    gate.wait_reached()
    jobs.cancel("running")
    assert jobs.wait("running").state == rpc_pb2.JOB_CANCELLED
    assert jobs.run_done("test").state == rpc_pb2.JOB_DONE
    assert faulty.worker("test").pid == pid


def test_a_deaf_job_is_cancelled_by_killing_its_worker(make_faulty, gate):
    service = make_faulty({"test": {"cancel_timeout": "1s"}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        jobs.submit("test", "deaf", {"gate": gate.path, "fault": "deaf"})
        gate.wait_reached()
        jobs.cancel("deaf")
        assert jobs.wait("deaf").state == rpc_pb2.JOB_CANCELLED
        service.wait_worker("test", starts=2)
        assert jobs.run_done("test").state == rpc_pb2.JOB_DONE


def test_a_failing_job_says_why_and_its_worker_lives(faulty, jobs):
    pid = faulty.worker("test").pid
    job = jobs.run("test", {"fault": "fail"})
    assert job.state == rpc_pb2.JOB_FAILED and job.error.code == rpc_pb2.ERROR_JOB_FAILED
    assert "failed as the job asked" in job.error.message
    assert faulty.worker("test").pid == pid


def test_a_job_over_its_time_ends(make_faulty, gate):
    service = make_faulty({"test": {"job_timeout": "1s", "cancel_timeout": "1s"}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        job = jobs.run("test", {"gate": gate.path})
        assert job.state in (rpc_pb2.JOB_FAILED, rpc_pb2.JOB_CANCELLED)
        assert job.error.code in (rpc_pb2.ERROR_DEADLINE, rpc_pb2.ERROR_WORKER_DIED)
        assert jobs.run_done("test").state == rpc_pb2.JOB_DONE


def test_two_workers_run_two_jobs_at_once(make_faulty, make_gate):
    service = make_faulty({"test": {"workers": 2}}).start()
    service.wait_ready()
    gates = [make_gate(), make_gate()]
    with Jobs(service) as jobs:
        ids = [jobs.submit("test", params={"gate": gate.path}).job_id for gate in gates]
        for gate in gates:
            gate.wait_reached()
        assert jobs.type("test").running == 2
        for gate in gates:
            gate.open()
        workers = {jobs.wait(job_id).worker for job_id in ids}
    assert workers == {"test/0", "test/1"}


def test_large_results_are_fetched_in_pieces(faulty, jobs):
    size = 5 * MIB + 123
    job = jobs.run_done("test", {"output_bytes": size})
    pattern = bytes(i * 31 % 251 for i in range(251))
    wanted = (pattern * (size // 251 + 1))[:size]
    assert jobs.output_named(job, "bytes.bin") == wanted


def test_unknown_type_model_and_job(faulty, jobs):
    for request, code in (
        (rpc_pb2.Request(submit=rpc_pb2.Submit(job_id="x", type="nothing")), rpc_pb2.ERROR_NO_SUCH_TYPE),
        (rpc_pb2.Request(get=rpc_pb2.Get(job_id="nothing")), rpc_pb2.ERROR_NO_SUCH_JOB),
        (rpc_pb2.Request(wait=rpc_pb2.Wait(job_id="nothing", timeout_ms=10)), rpc_pb2.ERROR_NO_SUCH_JOB),
        (rpc_pb2.Request(cancel=rpc_pb2.Cancel(job_id="nothing")), rpc_pb2.ERROR_NO_SUCH_JOB),
        (rpc_pb2.Request(fetch=rpc_pb2.Fetch(job_id="nothing")), rpc_pb2.ERROR_NO_SUCH_JOB),
        (rpc_pb2.Request(submit=rpc_pb2.Submit(job_id="bad id", type="test")), rpc_pb2.ERROR_BAD_REQUEST),
        (rpc_pb2.Request(submit=rpc_pb2.Submit(job_id="x" * 65, type="test")), rpc_pb2.ERROR_BAD_REQUEST),
        (rpc_pb2.Request(submit=rpc_pb2.Submit(type="test")), rpc_pb2.ERROR_BAD_REQUEST),
        (rpc_pb2.Request(), rpc_pb2.ERROR_BAD_REQUEST),
    ):
        with pytest.raises(RpcError) as refused:
            jobs.call(request, timeout=2)
        assert refused.value.code == code, request


def test_a_job_of_a_model_that_is_missing_fails_with_the_reason(make_faulty):
    service = make_faulty(models={"gone": {"path": "gone.safetensors"}})
    (service.models / "gone.safetensors").write_bytes(b"short lived")
    service.start()
    service.wait_ready()
    (service.models / "gone.safetensors").unlink()
    with Jobs(service) as jobs:
        try:
            job = jobs.run("test", model="gone")
            code = job.error.code
        except RpcError as error:
            code = error.code
        assert code in (rpc_pb2.ERROR_NO_SUCH_MODEL, rpc_pb2.ERROR_FILE)
        assert jobs.run_done("test").state == rpc_pb2.JOB_DONE


def test_list_shows_newest_first_and_can_be_narrowed(faulty, jobs, gate):
    for number in range(3):
        jobs.run_done("test", job_id=f"done-{number}")
    jobs.submit("test", "open", {"gate": gate.path})
    gate.wait_reached()
    assert [job.job_id for job in jobs.list()] == ["open", "done-2", "done-1", "done-0"]
    assert [job.job_id for job in jobs.list(unfinished_only=True)] == ["open"]
    assert [job.job_id for job in jobs.list(limit=2)] == ["open", "done-2"]
    gate.open()
    jobs.wait("open")


def test_a_stop_lets_the_running_job_end(make_faulty, gate, tmp_path):
    service = make_faulty({"test": {"stop_timeout": "20s"}}).start()
    service.wait_ready()
    note = tmp_path / "note"
    with Jobs(service) as jobs:
        jobs.submit("test", "last", {"gate": gate.path, "note": note})
        gate.wait_reached()
    service.close_control()
    os.kill(service.keeper_pid, signal.SIGTERM)
    gate.open()
    assert service.process.wait(30) == 0
    assert notes(note) == ["last"]


def test_restart_of_a_type_gives_new_workers_and_keeps_the_weights(faulty, jobs):
    old = faulty.worker("test").pid
    faulty.cli("restart", "test")
    new = faulty.wait_worker("test", starts=2)
    assert new.pid != old and faulty.model("small").loads == 1
    assert jobs.run_done("test").read_bytes == 0
