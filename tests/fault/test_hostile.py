"""Hostile use of the whole system: names, signals, limits and timings that no honest user makes by intent."""

import os
import random
import resource
import select
import signal
import socket
import subprocess
import time

import pytest

from harness import models, procfs
from harness.control import Dropped, Refused
from harness.jobs import Jobs
from harness.protos import control_pb2, rpc_pb2
from harness.service import PROGRAM, STOP_S

ALREADY_RUNNING = 10


def start_limited(service, limit, value):
    """Starts the service with a resource limit that all its processes inherit."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        ready = service.spawn()
    finally:
        resource.setrlimit(limit, before)
    resource.prlimit(service.process.pid, limit, (value, value))
    return ready


# ---- names ----


@pytest.mark.parametrize("name", [b"\xff\xfe.bin", b"a\nresvisor: forged.bin", b"\x1b[31mred.bin"], ids=["bytes", "line", "escape"])
def test_a_name_that_would_break_messages_or_log_lines_is_refused(faulty, watched, name):
    with watched(faulty):
        path = os.path.join(os.fsencode(faulty.models), name)
        with open(path, "wb") as file:
            file.write(b"weights")
        os.symlink(path, faulty.models / "link.bin")
        with faulty.peer() as peer:
            with pytest.raises(Refused) as refused:
                peer.attach(faulty.models / "link.bin")
            assert refused.value.code == rpc_pb2.ERROR_FILE
            fd = os.open(path, os.O_RDONLY)
            with pytest.raises(Refused) as refused:
                peer.attach("", fd=fd)
            os.close(fd)
            assert refused.value.code == rpc_pb2.ERROR_FILE
            assert peer.status().models
        with Jobs(faulty) as jobs:
            jobs.run_done("test")
        assert "\nresvisor: forged" not in faulty.log() and "\x1b" not in faulty.log()


def test_a_descriptor_of_a_removed_file_is_nobody_elses_model(bare, watched):
    path = bare.models / "gone.bin"
    with watched(bare):
        path.write_bytes(b"a" * 5000)
        fd = os.open(path, os.O_RDONLY)
        path.unlink()
        path.write_bytes(b"b" * 5000)
        with bare.peer() as peer:
            first, index, arenas = peer.attach("", fd=fd)
            assert os.pread(arenas[0], 4, 0) == b"aaaa"
            second, index2, arenas2 = peer.attach(path)
            assert os.pread(arenas2[0], 4, 0) == b"bbbb"
            assert first.model != second.model
            for used in [index, index2, *arenas, *arenas2]:
                os.close(used)
            peer.detach(first.lease_id)
            peer.detach(second.lease_id)
        os.close(fd)
        for name in (first.model, second.model):
            bare.control.model(rpc_pb2.MODEL_UNLOAD, name)


# ---- signals ----


def test_signals_that_mean_nothing_end_nobody(faulty, watched):
    with watched(faulty):
        pids = faulty.pids()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE, signal.SIGTTOU):
            for _ in range(20):
                for role in ("keeper", "supervisor"):
                    procfs.kill(pids[role], number)
        assert faulty.pids() == pids
        with Jobs(faulty) as jobs:
            jobs.run_done("test")


def test_a_keeper_whose_readers_have_gone_still_ends_in_order(make_service):
    service = make_service()
    ready = service.spawn()
    os.close(ready)
    procfs.wait_until(lambda: (service.runtime / "control" / "resvisor.sock").exists(), 20)
    service.wait_router()
    assert service.stop() == 0


def test_a_log_whose_reader_has_gone_ends_nobody(make_service):
    service = make_service()
    service.write_config()
    read, write = os.pipe()
    service.process = subprocess.Popen(
        [str(PROGRAM), "start", "-c", str(service.config_file)], env=service.env, stdin=subprocess.DEVNULL,
        stdout=write, stderr=write, start_new_session=True,
    )  # fmt: skip
    type(service).running.add(service)
    os.close(write)
    os.close(read)
    procfs.wait_until(lambda: (service.runtime / "control" / "router.sock").exists(), 20)
    procfs.kill(service.wait_router())
    service.wait_router()
    assert service.stop() == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_at_any_moment_of_the_start_is_an_orderly_end(make_faulty, seed):
    service = make_faulty()
    moment = random.Random(seed)
    for _ in range(12):
        ready = service.spawn()
        time.sleep(moment.uniform(0.0, 0.12))
        service.process.send_signal(signal.SIGTERM)
        code = service.process.wait(STOP_S)
        os.close(ready)
        assert code in (0, -signal.SIGTERM), f"{code}\n{service.log()}"
        assert "was killed by signal" not in service.log(), service.log()
        service.assert_nothing_left()


def test_stop_again_while_stopping_ends_it_at_once(make_faulty, gate):
    service = make_faulty(types={"test": {"stop_timeout": "60s"}}).start()
    service.wait_ready()
    with Jobs(service) as jobs:
        jobs.submit("test", params={"gate": gate.path, "fault": "deaf"})
        gate.wait_reached()
    service.close_control()
    first = service.cli("stop", "--timeout", "0.3", check=False)
    assert first.returncode != 0 and "again" in first.stderr
    assert service.cli("status").returncode == 0
    assert service.stop(timeout=20) == 0


def test_a_stopped_supervisor_makes_no_hung_worker(make_faulty, gate):
    service = make_faulty(types={"test": {"ping_interval": "0.2s", "ping_timeout": "0.6s"}}).start()
    service.wait_ready()
    supervisor = service.pids()["supervisor"]
    with Jobs(service) as jobs:
        job = jobs.submit("test", params={"gate": gate.path})
        gate.wait_reached()
        for _ in range(3):
            os.kill(supervisor, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(supervisor, signal.SIGCONT)
            time.sleep(0.5)
        gate.open()
        assert jobs.wait(job.job_id).state == rpc_pb2.JOB_DONE, service.log()
    assert service.worker("test").starts == 1


# ---- starts ----


def test_fifty_starts_at_once_give_one_winner_and_every_loser_names_it(make_service):
    service = make_service()
    service.start()
    service.stop()
    for _ in range(2):
        service.write_config()
        started = [
            subprocess.Popen(
                [str(PROGRAM), "start", "-c", str(service.config_file)], env=service.env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for _ in range(50)
        ]  # fmt: skip
        procfs.wait_until(lambda: sum(p.poll() is None for p in started) <= 1, 60)
        losers = [p for p in started if p.poll() is not None]
        assert [p.returncode for p in losers] == [ALREADY_RUNNING] * 49
        for loser in losers:
            assert "pid 0 " not in loser.stderr.read()
        winner = next(p for p in started if p.poll() is None)
        procfs.wait_until(lambda: (service.runtime / "control" / "router.sock").exists(), 20)
        service.wait_router()
        service.close_control()
        service.cli("stop")
        assert winner.wait(STOP_S) == 0


def test_start_right_at_the_end_of_another_works(make_service):
    service = make_service()
    for _ in range(15):
        service.start()
        service.close_control()
        keeper = service.process
        keeper.terminate()
        while True:
            ready = service.spawn()
            text = os.read(ready, 64)
            os.close(ready)
            if text == b"ready\n":
                break
            assert service.process.wait(STOP_S) == ALREADY_RUNNING, service.log()
        keeper.wait(STOP_S)
        service.status()
        service.close_control()
        service.process.terminate()
        assert service.process.wait(STOP_S) == 0


def test_a_refused_start_changes_no_mode_of_the_running_one(bare, make_service):
    control = bare.runtime / "control"
    control.chmod(0o750)
    bare.runtime.chmod(0o711)
    result = bare.cli("start", "-c", bare.config_file, check=False)
    assert result.returncode == ALREADY_RUNNING
    assert control.stat().st_mode & 0o777 == 0o750 and bare.runtime.stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_started_with_closed_standard_descriptors(make_faulty, closed):
    service = make_faulty()
    service.write_config()
    service.process = subprocess.Popen(
        ["sh", "-c", f'exec "{PROGRAM}" start -c "{service.config_file}" {closed}'], env=service.env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    type(service).running.add(service)
    procfs.wait_until(lambda: (service.runtime / "control" / "router.sock").exists(), 20)
    service.wait_ready()
    with Jobs(service) as jobs:
        jobs.run_done("test")
    assert service.stop() == 0


# ---- descriptors ----


def test_a_flood_of_clients_leaves_descriptors_for_a_dead_worker(make_faulty):
    service = make_faulty()
    ready = start_limited(service, resource.RLIMIT_NOFILE, 40)
    assert select.select([ready], [], [], 20)[0] and os.read(ready, 64) == b"ready\n", service.log()
    os.close(ready)
    service.wait_ready()
    before = service.worker("test")
    held = []
    for _ in range(60):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(2)
        try:
            peer.connect(str(service.runtime / "control" / "resvisor.sock"))
        except OSError:
            peer.close()
            break
        held.append(peer)
    procfs.kill(before.pid)
    service.wait_worker("test", starts=before.starts + 1)
    with Jobs(service) as jobs:
        jobs.run_done("test")
    for peer in held:
        peer.close()
    service.wait_quiet()
    with service.peer() as peer:
        peer.status()


def test_readers_that_take_no_descriptors_cannot_use_them_up(make_faulty):
    service = make_faulty()
    ready = start_limited(service, resource.RLIMIT_NOFILE, 200)
    assert select.select([ready], [], [], 20)[0] and os.read(ready, 64) == b"ready\n", service.log()
    os.close(ready)
    service.wait_ready()
    before = service.worker("test")
    held = [service.peer() for _ in range(12)]
    attach = control_pb2.Frame(id=7, attach=control_pb2.Attach(model="small")).SerializeToString()
    for peer in held:
        for _ in range(30):
            try:
                peer.send_bytes(attach)
            except (Dropped, OSError):
                break
    procfs.kill(before.pid)
    service.wait_worker("test", starts=before.starts + 1)
    with service.peer() as peer:
        _, index, arenas = peer.attach("small")
        for fd in [index, *arenas]:
            os.close(fd)
    for peer in held:
        peer.close()


def test_loaders_keep_a_log_after_starts_that_failed(make_faulty, tmp_path):
    service = make_faulty(pool={"max_loads": 1}).start()
    service.wait_ready()
    models.write_plain(service.models / "other.safetensors", mib=1)
    supervisor = service.pids()["supervisor"]
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    with service.peer() as peer:
        used = procfs.descriptor_count(supervisor)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (used + 2, limits[1]))
        with pytest.raises(Refused):
            peer.attach(service.models / "other.safetensors")
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
        (service.models / "bad.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(Refused):
            peer.attach(service.models / "bad.safetensors")
        _, index, arenas = peer.attach(service.models / "other.safetensors")
        for fd in [index, *arenas]:
            os.close(fd)
        answer, _ = peer.request(control_pb2.Frame(log_request=control_pb2.LogRequest(type="loader")))
        assert answer.WhichOneof("body") == "log_lines"


def test_silent_peers_of_the_router_give_their_places_back(faulty):
    path = str(faulty.runtime / "control" / "router.sock")
    held = []
    for _ in range(64):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(path)
        held.append(peer)
    result = faulty.cli("jobs", check=False)
    assert result.returncode != 0 and "64" in result.stderr, result.stderr
    assert select.select([held[0]], [], [], 15)[0] and held[0].recv(100) == b""
    faulty.cli("jobs")
    for peer in held:
        peer.close()


# ---- children that leave ----


def test_a_child_that_closes_its_connection_and_lives_on_is_replaced(faulty, watched):
    """A router that stands still until the supervisor has to give it up must not stay in the place of a new one."""
    router = faulty.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    for _ in range(400):
        worker = faulty.worker("test")
        if worker.pid:
            procfs.kill(worker.pid)
        with faulty.peer() as peer:
            try:
                peer.request(control_pb2.Frame(restart_type=control_pb2.RestartType(type="test")), timeout=20)
            except (Refused, Dropped, TimeoutError):
                pass
        if "does not read" in faulty.log():
            break
    assert "does not read" in faulty.log()
    assert faulty.wait_router(other_than=router)
    with Jobs(faulty) as jobs:
        jobs.run_done("test")


# ---- starts that cannot work ----


def test_a_router_that_can_never_start_is_the_end_of_the_start(make_service):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    service = make_service()
    token = service.folder / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    service.config["rpc"] = {"tcp": f"127.0.0.1:{taken.getsockname()[1]}", "token_file": str(token)}
    service.write_config()
    result = service.cli("start", "--detach", "-c", service.config_file, check=False, timeout=60)
    assert result.returncode == 1 and "resvisor.log" in result.stderr, result
    assert "cannot listen at tcp" in (service.runtime / "resvisor.log").read_text()
    assert not (service.runtime / "lock").exists()
    taken.close()


# ---- several names of one file ----


def test_several_names_of_one_file_are_loaded_once_and_pinned_and_unpinned_by_any(make_service):
    service = make_service()
    models.write_plain(service.models / "file.safetensors", mib=1)
    os.symlink("file.safetensors", service.models / "link.safetensors")
    service.config["models"] = {
        "second": {"path": "link.safetensors"},
        "first": {"path": "file.safetensors"},
        "third": {"path": "link.safetensors", "pin": True},
    }
    service.start()
    control = service.control
    procfs.wait_until(lambda: service.status().pool_bytes > 0, 20)
    before = service.status().pool_bytes
    with pytest.raises(Refused) as refused:
        control.model(rpc_pb2.MODEL_UNLOAD, "first")
    assert refused.value.code == rpc_pb2.ERROR_MODEL_PINNED
    for name in ("first", "second", "third", str(service.models / "link.safetensors")):
        lease, index, arenas = control.attach(name)
        control.detach(lease.lease_id)
        for fd in [index, *arenas]:
            os.close(fd)
    assert service.status().pool_bytes == before and sum(m.loads for m in service.status().models) == 1
    control.model(rpc_pb2.MODEL_UNPIN, "second")
    control.model(rpc_pb2.MODEL_UNLOAD, "third")
    assert service.status().pool_bytes == 0
