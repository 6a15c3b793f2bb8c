"""The public contract, from another language and another nanomsg implementation: pynng and rpc.proto alone."""

import os
import socket
import threading
import time
import uuid

import pynng
import pytest
from rpc_client import Client, RpcError, pb

from harness import procfs

SECOND_MS = 1000
MIB = 1024 * 1024


def address(service, name="rpc.ipc"):
    return f"ipc://{service.runtime / 'rpc' / name}"


@pytest.fixture
def client(faulty):
    with Client(address(faulty)) as found:
        yield found


@pytest.mark.smoke
def test_submit_wait_fetch(faulty, client):
    job = client.submit("test", params={"output_bytes": "1000"}, wait_ms=20 * SECOND_MS)
    assert job.state == pb.JOB_DONE and job.worker == "test/0"
    assert client.fetch(job.job_id, 1) == bytes(i * 31 % 251 for i in range(1000))
    assert client.get(job.job_id) == job


def test_submit_is_idempotent_and_answers_with_the_job_as_it_stands(faulty, client, gate, tmp_path):
    job_id = str(uuid.uuid4())
    params = {"gate": str(gate.path), "note": str(tmp_path / "note")}
    client.submit("test", job_id, params=params)
    gate.wait_reached()
    for _ in range(5):
        assert client.submit("test", job_id, params=params).state == pb.JOB_RUNNING
    with pytest.raises(RpcError) as refused:
        client.submit("test", job_id, params={**params, "other": "x"})
    assert refused.value.name == "JOB_EXISTS"
    gate.open()
    assert client.wait(job_id).state == pb.JOB_DONE
    assert client.submit("test", job_id, params=params).state == pb.JOB_DONE
    assert len((tmp_path / "note").read_text().splitlines()) == 1


def test_wait_answers_after_its_time_with_the_job_as_it_stands(faulty, client, gate):
    job = client.submit("test", params={"gate": str(gate.path)})
    gate.wait_reached()
    begin = time.monotonic()
    assert client.wait(job.job_id, timeout_ms=300).state == pb.JOB_RUNNING
    assert 0.2 < time.monotonic() - begin < 5
    gate.open()
    assert client.wait(job.job_id).state == pb.JOB_DONE


def test_fifty_clients_wait_at_once(faulty, client, gate):
    job = client.submit("test", params={"gate": str(gate.path)})
    gate.wait_reached()
    states = []

    def wait():
        with Client(address(faulty)) as other:
            states.append(other.wait(job.job_id).state)

    threads = [threading.Thread(target=wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(30)
    assert states == [pb.JOB_DONE] * 50


def test_a_large_result_comes_in_pieces(faulty, client):
    size = 3 * MIB + 17
    job = client.submit("test", params={"output_bytes": str(size)}, wait_ms=20 * SECOND_MS)
    assert job.outputs[1].size == size
    piece = client.fetch_piece(job.job_id, 1, offset=size - 10, length=100)
    assert (len(piece.data), piece.offset, piece.total) == (10, size - 10, size)
    assert len(client.fetch_piece(job.job_id, 1).data) == 512 * 1024
    data = client.fetch(job.job_id, 1)
    assert data == bytes((bytes(i * 31 % 251 for i in range(251)) * (size // 251 + 1))[:size])
    with pytest.raises(RpcError):
        client.fetch_piece(job.job_id, 9)


def test_events_are_numbered_without_gaps_and_can_be_asked_for(faulty, client):
    jobs = [client.submit("test", wait_ms=20 * SECOND_MS).job_id for _ in range(5)]
    reply = client.call(events_since=pb.EventsSince(sequence=0))
    sequences = [event.sequence for event in reply.events.events]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert len({event.epoch for event in reply.events.events}) == 1
    for job_id in jobs:
        states = [event.job.state for event in reply.events.events if event.job.job_id == job_id]
        assert states[0] == pb.JOB_QUEUED and states[-1] == pb.JOB_DONE and pb.JOB_RUNNING in states


def test_events_are_published(faulty, client):
    with pynng.Sub0(topics=b"", recv_timeout=10_000) as sub:
        sub.dial(address(faulty, "events.ipc"), block=True)
        seen = []

        def subscribed():  # a subscription is not confirmed: repeat until the first event arrives
            client.submit("test", wait_ms=20 * SECOND_MS)
            sub.recv_timeout = 200
            try:
                seen.append(pb.Event.FromString(sub.recv()))
            except pynng.Timeout:
                return False
            return True

        procfs.wait_until(subscribed, 20, "a first event")
        sub.recv_timeout = 10_000
        job_id = client.submit("test").job_id
        states = []
        while pb.JOB_DONE not in states:
            event = pb.Event.FromString(sub.recv())
            seen.append(event)
            if event.job.job_id == job_id:
                states.append(event.job.state)
        sequences = [event.sequence for event in seen]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def test_bad_messages_get_a_typed_answer_or_none_and_harm_nobody(faulty, client):
    router = faulty.status().router_pid
    assert client.exchange(b"\xff\xff\xff").error.code == pb.ERROR_BAD_REQUEST
    assert client.exchange(b"").error.code == pb.ERROR_BAD_VERSION
    assert client.exchange(pb.Request(version=9, id=5).SerializeToString()).error.code == pb.ERROR_BAD_VERSION
    assert client.exchange(pb.Request(version=1, id=5).SerializeToString()).error.code == pb.ERROR_BAD_REQUEST
    big = pb.Request(version=1, id=1, submit=pb.Submit(job_id="x", type="test", payload=b"x" * (512 * 1024 + 1)))
    assert client.exchange(big.SerializeToString()).error.code in (pb.ERROR_TOO_LARGE, pb.ERROR_BAD_REQUEST)
    assert client.submit("test", wait_ms=20 * SECOND_MS).state == pb.JOB_DONE
    assert faulty.status().router_pid == router


def test_a_message_over_the_limit_is_dropped_and_the_next_one_is_served(faulty):
    with Client(address(faulty), timeout_ms=1000) as client:
        with pytest.raises(Exception) as caught:
            client.exchange(b"\0" * (2 * MIB), timeout_ms=500)
        assert "pynng" in type(caught.value).__module__
    with Client(address(faulty)) as client:
        assert client.submit("test", wait_ms=20 * SECOND_MS).state == pb.JOB_DONE


def test_status_over_rpc_has_models_and_types(faulty, client):
    status = client.call(status=pb.StatusRequest()).status
    assert [t.name for t in status.types] == ["test"]
    assert status.supervisor_pid == faulty.status().supervisor_pid
    assert [m.name for m in status.models] == ["small"] and status.models[0].state == "RESIDENT"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tcp_needs_the_token(make_faulty, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    os.chmod(token, 0o600)
    port = free_port()
    service = make_faulty(rpc={"tcp": f"127.0.0.1:{port}", "token_file": str(token)}).start()
    service.wait_ready()
    with Client(f"tcp://127.0.0.1:{port}", token="correct horse") as client:
        assert client.submit("test", wait_ms=20 * SECOND_MS).state == pb.JOB_DONE
    for wrong in ("", "correct", "correct horse ", "x" * 10_000):
        with Client(f"tcp://127.0.0.1:{port}", token=wrong) as client, pytest.raises(RpcError) as refused:
            client.list()
        assert refused.value.name == "UNAUTHENTICATED"
    with Client(address(service)) as client:
        assert client.list()


def test_a_client_that_goes_away_while_it_waits_harms_nobody(faulty, client, gate):
    job = client.submit("test", params={"gate": str(gate.path)})
    gate.wait_reached()
    for _ in range(20):
        with Client(address(faulty), timeout_ms=50) as other:
            with pytest.raises(pynng.Timeout):
                other.exchange(
                    pb.Request(version=1, id=1, wait=pb.Wait(job_id=job.job_id, timeout_ms=60_000)).SerializeToString(), 50
                )
    gate.open()
    assert client.wait(job.job_id).state == pb.JOB_DONE
    assert client.submit("test", wait_ms=20 * SECOND_MS).state == pb.JOB_DONE
