"""A template, the process between it and a worker, and the worker: each killed or stopped at each moment of a fork."""

import pathlib
import signal

import pytest
from harness import procfs, standin
from harness.service import SANITIZED

pytestmark = pytest.mark.skipif(SANITIZED, reason="python would need the sanitizer's runtime first")


@pytest.fixture
def comfy(tmp_path):
    return standin.StandIn(tmp_path / "comfy")


@pytest.fixture
def service(make_service, comfy, tmp_path):
    """One type, its worker forked from its template."""
    made = make_service()
    made.config["types"] = {"image": comfy.type(tmp_path / "state")}
    made.start()
    made.wait_ready(60)
    assert "forked from" in made.worker("image").detail
    return made


def template(service):
    return service.status().templates[0]


def wait_again(service, starts):
    """Ready again, by a template that is ready again, and nothing is left of what was killed."""
    worker = service.wait_worker("image", starts=starts, timeout=60)
    procfs.wait_until(lambda: template(service).state == "READY", 60, "a ready template")
    known = {service.keeper_pid, *service.pids().values()}
    procfs.wait_until(lambda: procfs.descendants(service.keeper_pid) <= known, 10, "nobody else")
    assert procfs.stat(worker.pid)[1] == service.keeper_pid
    return worker


@pytest.mark.parametrize("gate", ["middle", "worker", "born"])
@pytest.mark.parametrize("victim", ["at the gate", "template"])
def test_a_kill_while_a_worker_is_forked(service, comfy, gate, victim):
    comfy.close(gate)
    worker = service.worker("image")
    procfs.kill(worker.pid)
    found = comfy.wait_gate(gate)
    assert service.worker("image").state == "STARTING" and service.worker("image").pid == 0
    procfs.kill(found if victim == "at the gate" else template(service).pid)
    if victim == "template":
        procfs.wait_until(lambda: template(service).starts == 2, 30, "a new template")
    comfy.open(gate)
    after = wait_again(service, worker.starts + 1)
    if (gate, victim) == ("born", "template"):  # it had been let go: the template's death is nothing to it
        assert after.pid == found and "forked from" in after.detail
        return
    reason = "killed by signal 9" if (gate, victim) == ("middle", "at the gate") else "it ended before it had said who it is"
    assert f"; started the long way: " in after.detail and reason in after.detail
    assert after.detail.split("long way: ")[1] in service.cli("status").stdout
    service.cli("restart", "image", timeout=60)
    assert "forked from" in service.worker("image").detail


def test_a_template_that_died_is_made_anew_and_workers_do_not_wait(service, comfy):
    before = template(service)
    (comfy.gates / "dies").touch()
    procfs.kill(before.pid)
    procfs.wait_until(lambda: template(service).state in ("BACKOFF", "STARTING"), 30, "the template's death")
    worker = service.worker("image")
    procfs.kill(worker.pid)
    after = service.wait_worker("image", starts=worker.starts + 1, timeout=60)
    assert "; started the long way: template/0 is " in after.detail and "signal 9" in after.detail


def test_a_template_that_dies_again_and_again_is_given_up_and_comes_back_by_restart(make_service, comfy, tmp_path):
    (comfy.gates / "dies").touch()
    service = make_service()
    service.config["types"] = {"image": comfy.type(tmp_path / "state", max_deaths=1000)}
    service.start()
    service.wait_log("FAILED: workers start the long way", timeout=90)
    assert template(service).state == "FAILED" and template(service).pid == 0
    (comfy.gates / "dies").unlink()
    service.cli("restart", "image", timeout=60)
    procfs.wait_until(lambda: template(service).state == "READY", 60, "a ready template")


def test_a_template_that_hangs_is_killed_and_the_worker_starts_the_long_way(service):
    before = template(service)
    procfs.kill(before.pid, procfs.signal.SIGSTOP)
    worker = service.worker("image")
    procfs.kill(worker.pid)
    after = wait_again(service, worker.starts + 1)
    assert "; started the long way: template/0 made no worker within 10 s" in after.detail
    assert "made no worker within 10 s" in template(service).last_exit and template(service).pid != before.pid


BORN = 'import array, os, socket\nsocket.socket(fileno=os.dup(3)).sendmsg([bytes.fromhex("92050208") + b"\\x01"], {ancillary})'
STRANGER = "[(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', {fds}))]"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("import os\nos.write(3, b'x')", "its first message is not the expected one"),
        ("import os\nos.write(3, bytes(60000))", "its first message is not the expected one"),
        (BORN.format(ancillary="[]"), "its first message is not the expected one"),
        (BORN.format(ancillary=STRANGER.format(fds="[os.pidfd_open(os.getppid())]")), "its pidfd is not its own"),
        (BORN.format(ancillary=STRANGER.format(fds="[1]")), "its pidfd is not its own"),
        (BORN.format(ancillary=STRANGER.format(fds="[os.pidfd_open(os.getpid()), 1, 1]")), "its first message is not the expected one"),
    ],
)
def test_a_worker_that_is_not_who_it_says_is_not_taken(service, comfy, says, reason):
    (comfy.gates / "says").write_text(says)
    worker = service.worker("image")
    service.wait_quiet()
    before = service.holdings()
    procfs.kill(worker.pid)
    after = wait_again(service, worker.starts + 1)
    assert f"; started the long way: {reason}" in after.detail
    service.wait_quiet()
    service.assert_holdings(before)


@pytest.mark.parametrize("gate", ["middle", "worker", "born"])
def test_a_stop_in_the_middle_of_a_fork(service, comfy, gate):
    comfy.close(gate)
    procfs.kill(service.worker("image").pid)
    found = comfy.wait_gate(gate)
    assert service.stop() == 0
    procfs.wait_until(lambda: not procfs.alive(found), 10, "the end of who stood at the gate")


def test_a_restart_in_the_middle_of_a_fork(service, comfy):
    comfy.close("born")
    procfs.kill(service.worker("image").pid)
    left = comfy.wait_gate("born")
    comfy.open("born")
    service.cli("restart", "image", timeout=60)
    worker = wait_again(service, 2)
    assert "forked from" in worker.detail
    assert worker.pid == left or not procfs.alive(left)


def test_requests_that_a_leaving_template_left_unread_go_to_the_new_one(make_service, comfy, tmp_path):
    service = make_service()
    service.config["types"] = {"image": comfy.type(tmp_path / "state", workers=3)}
    service.start()
    service.wait_ready(60)
    before = template(service)
    procfs.kill(before.pid, signal.SIGSTOP)
    with open(comfy.folder / "comfy" / "utils.py", "a") as file:
        file.write("\nEDITED = True\n")
    workers = service.type("image").workers
    for worker in workers:
        procfs.kill(worker.pid)

    def asked():
        return all(worker.state == "STARTING" and worker.pid == 0 for worker in service.type("image").workers)

    procfs.wait_until(asked, 10, "three requests that nobody reads")
    procfs.kill(before.pid, signal.SIGCONT)
    for number in range(3):
        found = service.wait_worker("image", starts=2, number=number, timeout=60)
        assert "forked from template/0" in found.detail, found
    assert template(service).starts == 2


def test_the_supervisors_end_takes_the_template_along(service):
    found = template(service)
    procfs.kill(service.status().supervisor_pid)
    procfs.wait_until(lambda: not procfs.alive(found.pid), 10, "the template's end")
    service.process.wait(30)
    service.assert_nothing_left_but_files()
    service.close_control()
    service.start()


def test_a_keeper_that_dies_takes_forked_workers_along(service):
    worker, found = service.worker("image"), template(service)
    procfs.kill(service.keeper_pid)
    service.process.wait(30)
    for pid in (worker.pid, found.pid):
        procfs.wait_until(lambda pid=pid: not procfs.alive(pid), 10, "the end of the keeper's children")
    service.assert_nothing_left_but_files()
    service.close_control()
    service.start()  # nobody was left to remove the sockets


def test_what_a_forked_worker_leaves_behind_is_killed(service, comfy):
    """Also a fork of its own without exec, in a session of its own: /proc shows it the worker's number."""
    note = comfy.folder / "left"
    comfy.node("leaves", f"""
import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
    while True:
        time.sleep(1)
""")
    service.cli("restart", "image", timeout=60)
    assert "forked from" in service.worker("image").detail
    left = int(procfs.wait_until(lambda: note.exists() and note.read_text(), 10, "the process that is left"))
    (pathlib.Path(comfy.folder) / "custom_nodes" / "leaves.py").unlink()
    procfs.kill(service.worker("image").pid)
    procfs.wait_until(lambda: not procfs.alive(left), 10, "the end of what was left behind")


def test_many_forks_keep_no_descriptor(service):
    """Nothing of a template is lost over many forks."""
    service.wait_quiet()
    before = service.holdings(), procfs.descriptor_count(template(service).pid)
    for _ in range(5):
        service.cli("restart", "image", timeout=60)
        assert "forked from" in service.worker("image").detail
    service.wait_quiet()
    service.assert_holdings(before[0])
    assert procfs.descriptor_count(template(service).pid) == before[1]
