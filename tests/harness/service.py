"""A real resvisor in a folder of its own, and the proof at its end that nothing of it is left."""

import ctypes
import json
import os
import pathlib
import select
import shutil
import stat
import subprocess
import tempfile
import time

from . import placement, procfs
from .control import ControlPeer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("RESVISOR_BUILD", ROOT / "build" / "release")).resolve()
PROGRAM = BUILD / "bin" / "resvisor"
MAKE_MODEL = BUILD / "libexec" / "resvisor" / "resvisor-make-model"
FAULT_EXECUTOR = BUILD / "tests" / "fault_executor.so"
SANITIZED = BUILD.name in ("asan", "tsan")
THREE_TYPES = ("image", "video", "audio")

STABLE = 5  # equal readings of what a process holds
STABLE_POLL_S = 0.02
START_S = 60 if SANITIZED else 20
STOP_S = 30
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper():
    """Orphans of the programs under test become our children: nothing can hide from the checks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class CommandFailed(AssertionError):
    def __init__(self, result):
        super().__init__(f"{result.args} ended with {result.returncode}\nstdout: {result.stdout}\nstderr: {result.stderr}")
        self.result = result


def run_program(*arguments, env=None, timeout=60, check=True, cwd=None, program=PROGRAM, **kwargs):
    """Runs `resvisor ARGUMENTS`; the CompletedProcess with text. check: CommandFailed on a code that is not 0."""
    result = subprocess.run(
        [str(program), *map(str, arguments)],
        env=env, timeout=timeout, text=True, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, **kwargs,
    )  # fmt: skip
    if check and result.returncode != 0:
        raise CommandFailed(result)
    return result


class Service:
    """Writes the configuration, starts `resvisor start`, and ends it.

    config: what the YAML file holds, as Python data (JSON is YAML). The folder for models is self.models; the
    configuration may name it by that.
    """

    def __init__(self, folder, config=None, program=PROGRAM, env=None):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.models = self.folder / "models"
        self.models.mkdir(exist_ok=True)
        self.base = pathlib.Path(tempfile.mkdtemp(prefix="rv-", dir="/tmp"))
        self.runtime = self.base / "run"
        self.program = program
        self.config = {"model_folders": [str(self.models)], **(config or {})}
        self.config_file = self.folder / "resvisor.yaml"
        self.log_file = self.folder / "resvisor.log"
        state = {"STATE_DIRECTORY": str(self.base / "state")}  # results of self-tests must not come from another service
        self.env = {**os.environ, **state, **placement.environment(), "RESVISOR_RUNTIME_DIR": str(self.runtime), **(env or {})}
        self.env.pop("RESVISOR_CONFIG", None)
        self.process = None
        self.before = set()
        self._control = None

    running = set()

    # ---- life ----

    def write_config(self):
        self.config_file.write_text(json.dumps(placement.configure(self.config), indent=2))

    def spawn(self, *arguments):
        """Starts the keeper and returns the descriptor on which readiness will be written."""
        self.write_config()
        self.before = procfs.descendants(os.getpid())
        ready, tell = os.pipe()
        os.set_inheritable(tell, True)
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                [str(self.program), "start", "-c", str(self.config_file), "--ready-fd", str(tell), *map(str, arguments)],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[tell], start_new_session=True,
            )  # fmt: skip
        os.close(tell)
        Service.running.add(self)
        return ready

    def start(self, *arguments, timeout=START_S):
        ready = self.spawn(*arguments)
        try:
            if not select.select([ready], [], [], timeout)[0]:
                raise AssertionError(f"not ready within {timeout} s\n{self.log()}")
            text = os.read(ready, 64)
            if text != b"ready\n":
                code = self.process.wait(STOP_S)
                raise AssertionError(f"start ended with {code}, said {text!r}\n{self.log()}")
        finally:
            os.close(ready)
        return self

    def stop(self, timeout=STOP_S):
        """`resvisor stop`, then waits for the keeper; its exit code."""
        self.close_control()
        self.cli("stop", timeout=timeout)
        return self.process.wait(timeout)

    def ours(self):
        """Processes that came with this service and are still there, zombies included."""
        table = procfs.parents()
        found = procfs.descendants(os.getpid(), table) - self.before
        if self.process and self.process.poll() is not None:
            found.discard(self.process.pid)
        for other in Service.running - {self}:
            found -= procfs.descendants(other.process.pid, table) | {other.process.pid}
        return {pid for pid in found if procfs.stat(pid)}

    def assert_nothing_left(self, timeout=10.0):
        """No process, zombie or socket of this service may remain."""
        self.assert_nothing_left_but_files(timeout)
        if self.runtime.exists():
            sockets = [str(path) for path in self.runtime.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
            assert not sockets, f"sockets are left: {sockets}"

    def assert_nothing_left_but_files(self, timeout=10.0):
        """No process or zombie may remain; sockets may, when nobody was left to remove them."""

        def gone():
            for pid in self.ours():
                procfs.reap(pid)
            return not self.ours()

        try:
            procfs.wait_until(gone, timeout)
        except AssertionError:
            left = [f"{pid} {procfs.stat(pid)} {procfs.command(pid)}" for pid in self.ours()]
            raise AssertionError(f"processes are left: {left}\n{self.log()}") from None

    def end(self, clean=True):
        """End of a test: stops what runs, kills what does not stop, and with clean checks that nothing is left."""
        self.close_control()
        try:
            if self.process and self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    self.kill_all()
                    raise AssertionError(f"SIGTERM did not end it within {STOP_S} s\n{self.log()}") from None
            if self.process and clean:
                self.assert_nothing_left()
        finally:
            self.kill_all()
            Service.running.discard(self)
            shutil.rmtree(self.base, ignore_errors=True)

    def kill_all(self):
        for _ in range(100):
            left = self.ours()
            if not left:
                break
            for pid in left:
                procfs.kill(pid)
                if not (self.process and pid == self.process.pid):
                    procfs.reap(pid)
            if self.process:
                self.process.poll()
            time.sleep(procfs.POLL_S)

    # ---- talking to it ----

    def cli(self, *arguments, **kwargs):
        return run_program(*arguments, env=self.env, program=self.program, **kwargs)

    def cli_json(self, *arguments, **kwargs):
        return json.loads(self.cli(*arguments, "--json", **kwargs).stdout)

    def peer(self, **kwargs):
        """A new connection to the supervisor."""
        return ControlPeer(self.runtime / "control" / "resvisor.sock", **kwargs)

    def router_peer(self, **kwargs):
        return ControlPeer(self.runtime / "control" / "router.sock", **kwargs)

    @property
    def control(self):
        """The connection that the helpers below share."""
        if self._control is None:
            self._control = self.peer()
        return self._control

    def close_control(self):
        if self._control is not None:
            self._control.close()
            self._control = None

    def status(self):
        return self.control.status()

    def type(self, name):
        return next(t for t in self.status().types if t.name == name)

    def worker(self, type_name, number=0):
        return self.type(type_name).workers[number]

    def model(self, name):
        found = [m for m in self.status().models if m.name == str(name)]
        return next((m for m in found if m.device == placement.DEVICE), found[0] if found else None)

    def wait_worker(self, type_name, state="READY", starts=None, number=0, timeout=START_S):
        """Waits for a worker's state (and number of starts); the WorkerStatus."""

        def reached():
            found = self.worker(type_name, number)
            return found if found.state == state and (starts is None or found.starts >= starts) else None

        try:
            return procfs.wait_until(reached, timeout, f"worker {type_name}/{number} {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{self.log()}") from None

    def wait_ready(self, timeout=START_S):
        """All workers READY, and the router, which has heard of them."""
        for type_status in self.status().types:
            for number in range(len(type_status.workers)):
                self.wait_worker(type_status.name, number=number, timeout=timeout)
        self.wait_router(timeout=timeout)

    def wait_router(self, other_than=0, timeout=START_S):
        """Waits for a router that answers; its pid."""

        def reached():
            found = self.status()
            return found.router_pid if found.router_pid not in (0, other_than) and found.router_state == "READY" else 0

        return procfs.wait_until(reached, timeout, "a ready router")

    def log(self):
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def wait_log(self, text, timeout=10.0, count=1):
        """Waits until the log has `text` at least `count` times; the last such line."""
        procfs.wait_until(lambda: self.log().count(text) >= count, timeout, f"{text!r} in the log of {self.log_file}")
        return [line for line in self.log().splitlines() if text in line][-1]

    # ---- what it holds ----

    @property
    def keeper_pid(self):
        return self.process.pid

    def others(self):
        """Processes that come and go; those that watch devices or hold their memory stay."""
        found = procfs.descendants(self.keeper_pid) - set(self.pids().values())
        return {pid for pid in found if "resvisor-device" not in procfs.command(pid)}

    def loaders(self):
        """The loaders that are at work."""
        return {pid for pid in procfs.descendants(self.keeper_pid) if "resvisor-loader" in procfs.command(pid)}

    def pids(self):
        """{role: pid} of the long-lived processes."""
        found = self.status()
        pids = {"keeper": self.keeper_pid, "supervisor": found.supervisor_pid, "router": found.router_pid}
        for type_status in found.types:
            for worker in type_status.workers:
                pids[worker.id] = worker.pid
        pids.update({template.id: template.pid for template in found.templates})
        return pids

    def holdings(self):
        """Descriptors and memfds of keeper, supervisor and router: equal before and after, or something leaks.

        The router's memfds are results that wait to be fetched: its store has limits of its own, and a test of its own.
        """
        found = {}
        for role, pid in self.pids().items():
            if role in ("keeper", "supervisor", "router"):
                held = len(procfs.memfds(pid))
                found[role] = (procfs.descriptor_count(pid) - held, 0 if role == "router" else held)
        return found

    def wait_quiet(self, timeout=20.0):
        """Waits until what was asked for is over: no loader, only the connection of these helpers is open, and the router has
        its channels."""

        def quiet():
            found = self.status()
            if found.clients > 1 or any(device.state == "TESTING" for device in found.devices):
                return False
            return not self.others()

        procfs.wait_until(quiet, timeout, "no loader and no other client")
        # The supervisor's answer to the router comes after the channels that still wait to be taken by it.
        self.cli("status", "--json")
        # The router sees the end of that connection a moment later.
        last = []

        def same():
            last.append(self.holdings())
            return last[-STABLE:] == [last[-1]] * STABLE

        procfs.wait_until(same, timeout, "holdings that stay the same", poll=STABLE_POLL_S)

    def assert_holdings(self, wanted, timeout=10.0):
        """Waits until the holdings are as they were, or fewer."""

        def no_more():
            return all(now <= then for role, found in self.holdings().items() for now, then in zip(found, wanted[role]))

        try:
            procfs.wait_until(no_more, timeout)
        except AssertionError:
            detail = {role: procfs.descriptors(pid) for role, pid in self.pids().items()}
            raise AssertionError(f"holdings are {self.holdings()}, were {wanted}\n{detail}\n{self.log()}") from None

    def assert_healthy(self):
        """It answers, has no zombie, and all its parts are there."""
        found = self.status()
        assert procfs.alive(found.supervisor_pid) and procfs.alive(self.keeper_pid)
        procfs.wait_until(lambda: not procfs.zombies(self.keeper_pid), 5, "no zombie below the keeper")

