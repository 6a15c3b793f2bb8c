"""An installation whose resvisor-device is a script of the test: it says what the test wants, true or not, at its own time.

DeviceStandIn(folder).program is `resvisor` of a tree of its own; all else in it is linked to the build. What the process does is
Python text for each work ("test", "watch", "hold"), run with the names of PRELUDE below; the text is read when it starts, so a
test may change it between two starts.
"""

import os
import shutil
import stat
import sys
import textwrap

from . import procfs, protos
from .protos import control_pb2, rpc_pb2
from .service import BUILD

PRELUDE = '''
import array, os, pathlib, select, signal, socket, sys, time
sys.path.insert(0, {protos!r})
import control_pb2, rpc_pb2
from control_pb2 import Frame

HERE = pathlib.Path({folder!r})
link = socket.socket(fileno=3)
BACKENDS = {{"cuda-vmm": ["create", "copy", "import", "compare", "close-order", "exporter-death", "after-exit", "read-only"],
            "cuda-ipc": ["create", "copy", "import", "compare", "close-order"],
            "memfd": ["import", "compare"]}}

def send(**body):
    link.send(Frame(**body).SerializeToString())

def receive():
    data = link.recv(65536)
    if not data:
        sys.exit(0)
    return Frame.FromString(data)

def wait(name):
    """A barrier: writes NAME.reached, and goes on when the test has made NAME."""
    (HERE / (name + ".reached")).write_text(str(os.getpid()))
    while not (HERE / name).exists():
        time.sleep(0.01)

def uuid(n):
    return bytes([n]) * 16

def found(n=1, driver="13.0", unified=False, pageable=False, granularity=2 << 20, total=16 << 30, product="Double", **more):
    send(device_found=control_pb2.DeviceFound(
        device=rpc_pb2.DeviceStatus(product=product, driver=driver, capability="9.0", unified=unified, total_bytes=total,
            attributes=[rpc_pb2.DeviceAttribute(number=102, name="vmm", value=1)], **more),
        uuid=uuid(n), granularity=granularity, pageable=pageable))

def tests(n=1, backend="cuda-vmm", names=None, result="ok", detail="", speed=400 * 10**9):
    rows = [rpc_pb2.DeviceTest(backend=backend, name=name, result=result, detail=detail, duration_us=10)
            for name in names or BACKENDS[backend]]
    if result == "ok":
        rows.append(rpc_pb2.DeviceTest(backend=backend, name="read-bandwidth", result="ok", bytes_per_second=speed))
    send(device_tests=control_pb2.DeviceTests(uuid=uuid(n), tests=rows))

def done(reason="", driver="13.0"):
    send(device_done=control_pb2.DeviceDone(reason=reason, driver=driver))

def memory(n=1, total=16 << 30, used=4 << 30, free=12 << 30, processes=()):
    send(device_memory=control_pb2.DeviceMemory(uuid=uuid(n), total_bytes=total, used_bytes=used, free_bytes=free,
        processes=[rpc_pb2.DeviceProcess(pid=p, bytes=b) for p, b in processes]))

def event(n=1, **body):
    send(device_event=control_pb2.DeviceEvent(uuid=uuid(n), **body))

def stay():
    while True:
        receive()

send(id=1, hello=control_pb2.Hello(version={version}, role=control_pb2.ROLE_DEVICE, pid=os.getpid(), name="device"))
while True:
    frame = receive()
    if frame.WhichOneof("body") == "device_start":
        break
start = frame.device_start
work = {{1: "test", 2: "hold", 3: "watch"}}[start.work]
with open(HERE / "starts", "a") as starts:
    print(work, file=starts)
exec((HERE / (work + ".py")).read_text())
'''

GOOD = "found(); tests(); done()"
WATCH = "memory(); stay()"
HOLD = "stay()"


class DeviceStandIn:
    def __init__(self, folder):
        self.folder = folder / "standin"
        tree = folder / "installed"
        libexec = tree / "libexec" / "resvisor"
        self.folder.mkdir(parents=True)
        libexec.mkdir(parents=True)
        (tree / "bin").mkdir()
        self.program = tree / "bin" / "resvisor"
        shutil.copy2(BUILD / "bin" / "resvisor", self.program)
        for path in (BUILD / "libexec" / "resvisor").iterdir():
            if path.name != "resvisor-device":
                os.symlink(path, libexec / path.name)
        for path in BUILD.iterdir():
            if path.name not in ("bin", "libexec"):
                os.symlink(path, tree / path.name)
        script = libexec / "resvisor-device"
        text = PRELUDE.format(protos=os.path.dirname(protos.control_pb2.__file__), folder=str(self.folder),
                              version=protos.PROTOCOL_VERSION)  # fmt: skip
        script.write_text(f"#!{sys.executable}\n{text}")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.does(test=GOOD, watch=WATCH, hold=HOLD)

    def does(self, **works):
        for work, text in works.items():
            new = self.folder / (work + ".new")
            new.write_text(textwrap.dedent(text))
            new.rename(self.folder / (work + ".py"))

    def starts(self, work):
        """How often it was started for that work."""
        path = self.folder / "starts"
        return path.read_text().split().count(work) if path.exists() else 0

    def reached(self, name):
        """The pid of the process that waits at that barrier; 0 = none yet."""
        path = self.folder / (name + ".reached")
        text = path.read_text() if path.exists() else ""
        return int(text) if text else 0

    def open(self, name):
        (self.folder / name).write_text("")


# ---- what a service says of its devices ----


def devices(service):
    return service.cli_json("devices")["devices"]


def wait_known(service):
    def known():
        found = service.cli_json("devices")
        return found if found["devices"] or "searched for" not in found["reason"] else None

    return procfs.wait_until(known, 20, "the end of the search for devices")


def wait_state(service, state, device="cuda:0"):
    def reached():
        return next((d for d in devices(service) if d["name"] == device and d["state"] == state), None)

    try:
        return procfs.wait_until(reached, 20, f"{device} {state}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{devices(service)}\n{service.log()}") from None


def request_test(service, device=""):
    frame = control_pb2.Frame(device_request=rpc_pb2.DeviceRequest(action=rpc_pb2.DEVICE_TEST, device=device))
    with service.peer() as peer:
        return peer.request(frame)[0].device_list
