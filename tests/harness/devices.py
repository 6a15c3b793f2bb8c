"""The machine's GPUs, as the double of the CUDA driver shows them (tests/fakecuda/fakecuda.h has the words).

    devices = Devices(tmp_path / "gpus", kind="discrete", count=2, memory="1GiB")
    service = make_service(env=devices.env)
    devices.allocated(0), devices.lose(0), devices.xid(0, 79), devices.fault("cuMemCreate", error=2)

A test that needs it carries @pytest.mark.devices and is skipped where the build has no double; the fixture
`make_devices` gives the folder.
"""

import dataclasses
import fcntl
import os
import pathlib

from . import procfs
from .service import BUILD

FOLDER = BUILD / "fakecuda"
OLD_FOLDER = FOLDER / "old"
KINDS = ("discrete", "unified", "unified-plain", "tegra", "no-vmm", "no-fd", "no-ipc", "wsl", "bare")
LAUNCH_FAILED = 719


def built():
    """Has this build the double?"""
    return (FOLDER / "libcuda.so.1").exists()


def uuid(number):
    """The uuid of the double's device `number`, unless its key uuid said another."""
    return f"GPU-fa4ec0da-0000-4000-8000-{number:012x}"


@dataclasses.dataclass(frozen=True)
class Record:
    """Device memory in use: kind vmm, alloc or context; pid is the process that made it."""

    device: int
    size: int
    pid: int
    kind: str


class Devices:
    """kind: one of KINDS; count of them; memory: of each, such as "1GiB"; keys: further keys of a device ("oom": "64MiB").

    more: further statements, such as "device unified memory=2GiB" or "late 5000"; only: statements instead of all that.
    """

    def __init__(self, state, kind="discrete", count=1, memory="8GiB", keys=None, more=(), only=None, old_driver=False):
        self.state = pathlib.Path(state)
        self.state.mkdir(parents=True, exist_ok=True)
        words = [f"device {kind} count={count} memory={memory}", *(f"{key}={value}" for key, value in (keys or {}).items())]
        self.text = "; ".join(only if only is not None else [" ".join(words), *more])
        self.folder = OLD_FOLDER if old_driver else FOLDER

    @property
    def env(self):
        """What `resvisor start`, and a client, needs in its environment."""
        path = os.environ.get("LD_LIBRARY_PATH")
        return {
            "LD_LIBRARY_PATH": f"{self.folder}:{path}" if path else str(self.folder),
            "FAKECUDA": self.text,
            "FAKECUDA_STATE": str(self.state),
        }

    # ---- what is in use ----

    def records(self, device=None):
        """All that is alive: held by a process, by a mapping, or by a descriptor anywhere."""
        found = []
        folder = self.state / "memory"
        with open(self.state / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in folder.iterdir() if folder.is_dir() else ():
                with open(path) as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:  # it is locked while anybody has it
                        number, size, pid, kind = file.read().split()
                        found.append(Record(int(number), int(size), int(pid), kind))
        return [record for record in found if device is None or record.device == device]

    def allocated(self, device=0, kinds=("vmm", "alloc")):
        """Bytes of that device's memory in use; contexts are not counted unless asked for."""
        return sum(record.size for record in self.records(device) if record.kind in kinds)

    def wait_allocated(self, wanted, device=0, timeout=30):
        """Waits until exactly that many bytes are in use."""
        procfs.wait_until(
            lambda: self.allocated(device) == wanted, timeout, f"{wanted} bytes in use on device {device}"
        )

    # ---- what happens to them ----

    def lose(self, device=0, error=LAUNCH_FAILED):
        """Every call that needs the device answers error from now on, in every process."""
        self._replace(f"lost{device}", f"{error}\n")

    def find(self, device=0):
        """The device is back, for processes that begin now."""
        (self.state / f"lost{device}").unlink(missing_ok=True)

    def hold(self, device=0):
        """The device hangs: no copy begins, and who waits for one waits until let_go."""
        (self.state / f"hold{device}").touch()

    def let_go(self, device=0):
        (self.state / f"hold{device}").unlink(missing_ok=True)

    def xid(self, device, number):
        """NVML reports that Xid to everybody who waits for it."""
        with open(self.state / "xid", "a") as file:
            file.write(f"{device} {number}\n")

    def xids(self):
        """Every (device, Xid) so far; a fault of the double's MMU is 31."""
        path = self.state / "xid"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines]

    def fault(self, function, **keys):
        """From now on: fault("cuMemCreate", nth="2+", error=2, program="resvisor-loader", delay=100, lose=0).

        Replaces what an earlier call said; every process counts from there anew.
        """
        self.faults([" ".join(["fault", function, *(f"{key}={value}" for key, value in keys.items())])])

    def faults(self, statements):
        self._replace("faults", "\n".join(statements) + "\n")

    def no_faults(self):
        (self.state / "faults").unlink(missing_ok=True)

    def _replace(self, name, text):
        """In one step: nobody reads half of it."""
        fresh = self.state / f".{name}.new"
        fresh.write_text(text)
        fresh.rename(self.state / name)
