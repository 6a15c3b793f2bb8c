"""An installation whose resvisor-loader is a script of the test too, beside its resvisor-device (device_standin.py).

LoaderStandIn(folder).loads(TEXT): what the next loader does when it has got its LoadStart, with the names of PRELUDE below.
The text is read when the loader starts. `holds` is what a holder does that answers as it should, and writes down what it
frees.
"""

import os
import stat
import sys
import textwrap

from . import protos
from .device_standin import DeviceStandIn

PRELUDE = '''
import array, os, pathlib, socket, sys, time
sys.path.insert(0, {protos!r})
import control_pb2, rpc_pb2
from control_pb2 import Arena, Frame

HERE = pathlib.Path({folder!r})
MIB = 1 << 20
MEMFD, VMM, IPC = 1, 2, 3
link = socket.socket(fileno=3)

def send(fds=(), **body):
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([Frame(**body).SerializeToString()], control)

def receive():
    data = link.recvmsg(65536, socket.CMSG_SPACE(64))[0]
    if not data:
        sys.exit(0)
    return Frame.FromString(data)

def sealed(size):
    """A sealed memfd, as the index must be."""
    fd = os.memfd_create("index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    import fcntl
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd

def plain():
    """What stands for a device's descriptor: the supervisor cannot look into it."""
    return os.memfd_create("arena", os.MFD_CLOEXEC)

def plan(arena=4 * MIB, index=4096):
    send(load_plan=control_pb2.LoadPlan(arena_bytes=arena, index_bytes=index, tensors=1, header_digest=bytes(16)))
    answer = receive()
    (HERE / "admitted").write_bytes(answer.SerializeToString())
    if answer.WhichOneof("body") != "load_admit":
        sys.exit(0)
    return answer.load_admit.arenas

def done(arenas, fds, index=4096):
    body = control_pb2.LoadDone(arenas=arenas, index_size=index, tensors=1, header_digest=bytes(16), method="test")
    send([sealed(index), *fds], load_done=body)
    receive()

def wait(name):
    """A barrier: writes NAME.reached, and goes on when the test has made NAME."""
    (HERE / (name + ".reached")).write_text(str(os.getpid()))
    while not (HERE / name).exists():
        time.sleep(0.01)

send(id=1, hello=control_pb2.Hello(version={version}, role=control_pb2.ROLE_LOADER, pid=os.getpid(), name="loader"))
while True:
    frame = receive()
    if frame.WhichOneof("body") == "load_start":
        break
start = frame.load_start
exec((HERE / "load.py").read_text())
'''

HOLD = """
count = 0
while True:
    frame = receive()
    kind = frame.WhichOneof("body")
    if kind == "holder_allocate":
        count += 1
        arena = control_pb2.Arena(size=frame.holder_allocate.size, backend=3, page_size=2 << 20, handle=b"h" * 64, allocation=count)
        {change}
        send(id=frame.id, holder_allocated=control_pb2.HolderAllocated(arena=arena))
    elif kind == "holder_free":
        with open(HERE / "freed", "a") as file:
            print(frame.holder_free.allocation, file=file)
        send(id=frame.id, done=control_pb2.Done())
"""


class LoaderStandIn(DeviceStandIn):
    def __init__(self, folder, backend="cuda-vmm"):
        super().__init__(folder)
        self.does(test=f"found(); tests(1, {backend!r}); done()")
        self.holds()
        script = self.program.parent.parent / "libexec" / "resvisor" / "resvisor-loader"
        script.unlink()
        text = PRELUDE.format(protos=os.path.dirname(protos.control_pb2.__file__), folder=str(self.folder),
                              version=protos.PROTOCOL_VERSION)  # fmt: skip
        script.write_text(f"#!{sys.executable}\n{text}")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def loads(self, text):
        self.does(load=text)

    def holds(self, change="pass"):
        """change: what happens to `arena`, or instead of the answer, before it is sent."""
        self.does(hold=HOLD.format(change=textwrap.indent(textwrap.dedent(change), " " * 8).strip()))

    def freed(self):
        """Allocations that the holder was told to free."""
        path = self.folder / "freed"
        return [int(line) for line in path.read_text().split()] if path.exists() else []
