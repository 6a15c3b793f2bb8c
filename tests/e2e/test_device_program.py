"""resvisor-device on the double of the CUDA driver: the self-test with every row going wrong, the holder, the watch."""

import os
import resource
import signal
import socket
import subprocess
import types

import pytest

from harness import devices as fake
from harness import procfs
from harness.control import ControlPeer, Dropped, Refused
from harness.device_standin import devices, request_test, wait_state
from harness.protos import PROTOCOL_VERSION, control_pb2, rpc_pb2
from harness.service import BUILD

PROGRAM = BUILD / "libexec" / "resvisor" / "resvisor-device"
WAIT_S = 60
END_S = 30
MIB = 1 << 20
HOLDER_ALLOCATIONS = 2048
GPU0 = fake.uuid(0)
ROWS = (
    "create", "copy", "import", "compare", "read-only", "close-order", "bandwidth", "read-bandwidth", "exporter-death",
    "after-exit",
)  # fmt: skip
VMM, IPC, MEMFD = "cuda-vmm", "cuda-ipc", "memfd"
DeviceStart = control_pb2.DeviceStart

pytestmark = pytest.mark.devices


def raw(uuid):
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


def environment(gpus):
    return {**os.environ, **(gpus.env if gpus else {})}


def actors(gpus, label=""):
    """Processes of the self-test that use these devices."""
    found = []
    for pid in procfs.parents():
        words = procfs.read(pid, "cmdline").split(b"\0")
        if words[1:2] == [b"actor"] and len(words) > 3 and label in words[3].decode():
            if f"FAKECUDA_STATE={gpus.state}".encode() in procfs.read(pid, "environ").split(b"\0"):
                found.append(pid)
    return found


def wait_nothing_left(gpus):
    procfs.wait_until(lambda: not actors(gpus), END_S, "the end of all processes of the self-test")
    procfs.wait_until(lambda: not gpus.records(), END_S, f"the end of all device memory: {gpus.records()}")


# ---- by hand --------------------------------------------------------------------------------------------------------


def by_hand(gpus, *arguments):
    return subprocess.run(
        [PROGRAM, *arguments], env=environment(gpus), text=True, capture_output=True, timeout=WAIT_S, stdin=subprocess.DEVNULL
    )


def rows_of(text):
    """{(backend, test): (result, detail)} of the printed table."""
    found = {}
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if words and words[0] in (VMM, IPC, MEMFD):
            found[words[0], words[1]] = (words[2], words[5] if len(words) > 5 else "")
    return found


def self_test(gpus, *arguments):
    result = by_hand(gpus, "--self-test", *arguments)
    rows = rows_of(result.stdout)
    assert rows, result
    wait_nothing_left(gpus)
    return result.returncode, rows


def outcome(rows, backend):
    return {test: result for (of, test), (result, _) in rows.items() if of == backend}


ALL_OK = dict.fromkeys(ROWS, "ok")
NO_BACKEND = {"create": "skipped"}
IPC_ROWS = {**ALL_OK, "read-only": "skipped", "exporter-death": "skipped", "after-exit": "skipped"}
MEMFD_ROWS = {**ALL_OK, "bandwidth": "skipped"}


@pytest.mark.parametrize(
    ("kind", "vmm", "ipc", "memfd", "code"),
    [
        ("discrete", ALL_OK, IPC_ROWS, NO_BACKEND, 0),
        ("unified", ALL_OK, IPC_ROWS, MEMFD_ROWS, 0),
        ("unified-plain", NO_BACKEND, NO_BACKEND, MEMFD_ROWS, 0),
        ("tegra", ALL_OK, NO_BACKEND, NO_BACKEND, 0),
        ("no-vmm", NO_BACKEND, IPC_ROWS, NO_BACKEND, 0),
        ("no-fd", NO_BACKEND, IPC_ROWS, NO_BACKEND, 0),
        ("no-ipc", ALL_OK, NO_BACKEND, NO_BACKEND, 0),
        ("wsl", NO_BACKEND, IPC_ROWS, NO_BACKEND, 0),
        ("bare", NO_BACKEND, NO_BACKEND, NO_BACKEND, 1),
    ],
)
def test_each_kind_of_device(make_devices, kind, vmm, ipc, memfd, code):
    gpus = make_devices(kind)
    returned, rows = self_test(gpus)
    assert {backend: outcome(rows, backend) for backend in (VMM, IPC, MEMFD)} == {VMM: vmm, IPC: ipc, MEMFD: memfd}
    assert returned == code
    if kind == "discrete":  # what is free on a unified device says nothing
        assert rows[VMM, "close-order"][1] == "27 orders, all memory came back"
        assert rows[VMM, "after-exit"][1] == "a descriptor alone kept it; closing that gave it back"
    if vmm == ALL_OK:
        detail = rows[VMM, "read-only"][1]
        assert "memset: " in detail and "copy: " in detail and "700" in detail
    assert "MB/s" in rows.get((VMM, "bandwidth"), ("", "MB/s"))[1] or "GB/s" in rows[VMM, "bandwidth"][1]


def test_a_write_that_the_processor_refuses_is_refused(make_devices):
    """A driver may copy between addresses of the host by the processor: then a page that is read-only is SIGSEGV."""
    code, rows = self_test(make_devices("unified-plain", keys={"processor": "1"}))
    assert (code, outcome(rows, MEMFD)) == (0, MEMFD_ROWS)
    assert rows[MEMFD, "read-only"][1].count("killed by signal 11 (SIGSEGV)") == 2


def test_with_mps_nothing_is_written_that_ends_other_programs(make_devices):
    gpus = make_devices("discrete", keys={"attr.133": "1"})
    code, rows = self_test(gpus)
    assert (code, outcome(rows, VMM)) == (0, {**ALL_OK, "read-only": "skipped"})
    assert "MPS" in rows[VMM, "read-only"][1]


def test_the_reason_why_a_backend_is_not_there(make_devices):
    _, rows = self_test(make_devices("bare"))
    assert "attribute 102" in rows[VMM, "create"][1]
    assert rows[IPC, "create"][1] == "cuIpcGetMemHandle: 801 CUDA_ERROR_NOT_SUPPORTED"
    assert "host's page tables" in rows[MEMFD, "create"][1]
    _, rows = self_test(make_devices("no-fd"))
    assert "attribute 103" in rows[VMM, "create"][1]
    _, rows = self_test(make_devices("wsl"))
    assert rows[VMM, "create"][1].startswith("cuMemCreate: 801 CUDA_ERROR_NOT_SUPPORTED")


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemSetAccess", "cuIpcOpenMemHandle"])
def test_a_function_that_the_driver_lacks_is_the_reason(make_devices, function):
    """Not an attribute of the device, which may well say yes."""
    backend = IPC if "Ipc" in function else VMM
    _, rows = self_test(make_devices(more=[f"missing {function}"]))
    assert rows[backend, "create"] == ("failed", f"{backend}: the CUDA driver lacks {function}")
    assert rows[VMM if backend == IPC else IPC, "compare"][0] == "ok"


# kind, backend, row, the fault, the start of the row's text
WRONG = [
    ("discrete", VMM, "create", "cuMemCreate nth=1+ error=2 program=owner", "cuMemCreate: 2 CUDA_ERROR_OUT_OF_MEMORY"),
    ("discrete", VMM, "create", "cuMemHostAlloc error=1 program=owner", "cuMemHostAlloc: 1 CUDA_ERROR_INVALID_VALUE"),
    ("discrete", VMM, "copy", "cuMemsetD8Async error=1 program=owner", "cuMemsetD8Async: 1 CUDA_ERROR_INVALID_VALUE"),
    ("discrete", VMM, "copy", "cuMemcpyHtoDAsync nth=2 error=719 program=owner", "cuMemcpyHtoDAsync: 719 "),
    ("discrete", VMM, "import", "cuMemExportToShareableHandle error=801 program=owner", "cuMemExportToShareableHandle: 801 "),
    ("discrete", VMM, "import", "cuMemImportFromShareableHandle error=1 program=importer", "cuMemImportFromShareableHandle: 1 "),
    ("discrete", VMM, "import", "cuMemSetAccess error=1 program=importer", "cuMemSetAccess: 1 "),
    ("discrete", VMM, "compare", "cuMemcpyDtoHAsync nth=2 error=700 program=importer", "cuMemcpyDtoHAsync: 700 "),
    ("discrete", VMM, "read-only", "cuMemMap error=1 program=writer", "cuMemMap: 1 "),
    ("discrete", VMM, "close-order", "cuMemUnmap nth=5 error=1 program=closer",
     "cuMemUnmap: 1 CUDA_ERROR_INVALID_VALUE, in the order unmap, release, free address, close descriptor"),
    ("discrete", VMM, "close-order", "cuMemAddressFree nth=27 error=999 program=closer",
     "cuMemAddressFree: 999 CUDA_ERROR_UNKNOWN, in the order unmap, end context, release, free address, close descriptor"),
    ("discrete", VMM, "bandwidth", "cuMemcpyHtoDAsync nth=3+ error=1 program=owner", "cuMemcpyHtoDAsync: 1 "),
    ("discrete", VMM, "exporter-death", "cuMemcpyDtoHAsync nth=5 error=1 program=importer", "cuMemcpyDtoHAsync: 1 "),
    ("discrete", VMM, "after-exit", "cuMemImportFromShareableHandle error=999 program=heir", "cuMemImportFromShareableHandle: 999 "),
    ("no-vmm", IPC, "create", "cuMemAlloc nth=1+ error=2 program=owner", "cuMemAlloc: 2 CUDA_ERROR_OUT_OF_MEMORY"),
    ("no-vmm", IPC, "create", "cuIpcGetMemHandle error=1 program=owner", "cuIpcGetMemHandle: 1 "),
    ("no-vmm", IPC, "import", "cuIpcOpenMemHandle error=201 program=importer", "cuIpcOpenMemHandle: 201 CUDA_ERROR_INVALID_CONTEXT"),
    ("no-vmm", IPC, "close-order", "cuIpcCloseMemHandle error=1 program=closing", "cuIpcCloseMemHandle: 1 "),
    ("no-vmm", IPC, "close-order", "cuMemFree error=1 program=closer", "cuMemFree: 1 "),
    ("no-vmm", IPC, "bandwidth", "cuMemcpyHtoDAsync nth=3+ error=1 program=owner", "cuMemcpyHtoDAsync: 1 "),
    ("unified-plain", MEMFD, "copy", "cuMemcpyDtoHAsync error=1 program=owner", "cuMemcpyDtoHAsync: 1 "),
    ("unified-plain", MEMFD, "compare", "cuMemcpyDtoHAsync error=1 program=importer", "cuMemcpyDtoHAsync: 1 "),
    ("unified-plain", MEMFD, "close-order", "cuDevicePrimaryCtxRetain nth=3 error=2 program=closer", "cuDevicePrimaryCtxRetain: 2 "),
    ("unified-plain", MEMFD, "read-bandwidth", "cuMemcpyDtoHAsync nth=3+ error=1 program=owner", "cuMemcpyDtoHAsync: 1 "),
]  # fmt: skip
ESSENTIAL = ("create", "copy", "import", "compare")


@pytest.mark.parametrize(("kind", "backend", "row", "fault", "text"), WRONG, ids=[f"{w[1]}-{w[2]}-{w[3].split()[0]}" for w in WRONG])
def test_a_row_that_goes_wrong_says_what_failed(make_devices, kind, backend, row, fault, text):
    gpus = make_devices(kind, more=[f"fault {fault}"])
    code, rows = self_test(gpus)
    assert code == 1
    assert rows[backend, row][0] == "failed"
    assert rows[backend, row][1].startswith(text), rows[backend, row]
    later = ROWS[ROWS.index(row) + 1 :]
    if row in ESSENTIAL:
        assert {rows[backend, test] for test in later} == {("skipped", f"`{row}` failed")}
    else:
        assert any(rows[backend, test][0] != "failed" for test in later) or not later


def test_memory_that_does_not_come_back_is_seen(make_devices):
    """One order of each pass, after the end of its context, loses an arena and says nothing that is an error there."""
    lost = [f"fault cuMemRelease nth={38 + 39 * number} error=709 program=closer" for number in range(3)]
    code, rows = self_test(make_devices("no-ipc", more=lost))
    assert code == 1
    assert rows[VMM, "close-order"] == ("failed", "8192 KiB of the device did not come back")
    code, rows = self_test(make_devices("no-ipc", more=lost[:1]))  # once: another program may have taken it
    assert code == 0
    assert rows[VMM, "close-order"][1].startswith("27 orders, all memory came back; cuMemRelease: 709 ")


def test_a_device_that_cannot_be_asked_is_left_out(make_devices):
    result = by_hand(make_devices("bare", count=2, more=["fault cuDeviceTotalMem nth=1 error=999"]), "--list")
    assert result.returncode == 0
    assert "cuda:0 is left out: cuDeviceTotalMem: 999" in result.stderr
    assert result.stdout.count("PCI") == 1


def test_want_of_memory_for_measuring_says_nothing_against_a_backend(make_devices):
    code, rows = self_test(make_devices("no-ipc", more=["fault cuMemCreate nth=2+ error=2 program=owner"]))
    assert code == 0
    assert rows[VMM, "bandwidth"][0] == rows[VMM, "read-bandwidth"][0] == "skipped"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in rows[VMM, "bandwidth"][1]


def test_a_small_device_is_measured_with_less(make_devices):
    code, rows = self_test(make_devices("discrete", memory="256MiB", keys={"context": "8MiB"}))
    assert code == 0
    assert rows[VMM, "bandwidth"][0] == "ok"


def test_a_call_that_hangs_has_a_deadline(make_devices):
    gpus = make_devices("no-ipc", more=["fault cuMemcpyHtoDAsync delay=600000 program=owner"])
    code, rows = self_test(gpus, "--timeout", "1")
    assert code == 1
    assert rows[VMM, "copy"] == ("failed", "no answer within 1 s while copying")


def test_a_driver_that_hangs_at_once_has_a_deadline(make_devices):
    gpus = make_devices(more=["fault cuInit delay=600000"])
    result = by_hand(gpus, "--self-test", "--timeout", "1")
    assert result.returncode == 1
    assert "no answer within 3 s while finding devices" in result.stderr
    wait_nothing_left(gpus)


def test_an_actor_that_dies_fails_its_row_with_the_signal(make_devices):
    gpus = make_devices("no-ipc", more=["fault cuMemcpyHtoDAsync delay=600000 program=owner"])
    child = subprocess.Popen([PROGRAM, "--self-test"], env=environment(gpus), text=True, stdout=subprocess.PIPE)
    try:
        for line in child.stdout:
            if line.split()[:3] == [VMM, "create", "ok"]:
                break
        (owner,) = actors(gpus, "owner")
        os.kill(owner, signal.SIGKILL)
        rows = rows_of(child.communicate(timeout=WAIT_S)[0])
    finally:
        child.kill()
        child.wait()
    assert rows[VMM, "copy"] == ("failed", "its process was killed by signal 9 (SIGKILL) while copying")
    wait_nothing_left(gpus)


def test_list(make_devices):
    result = by_hand(make_devices(only=["device unified", "device discrete name=Second_One"]), "--list")
    assert result.returncode == 0
    assert f"cuda:0  Fake unified 0  {GPU0}" in result.stdout
    assert "cuda:1  Second One" in result.stdout
    assert "granularity of cuda-vmm: 2048 KiB" in result.stdout
    assert len([line for line in result.stdout.splitlines() if line.split()[:1] == ["102"]]) == 2


def test_one_device_by_name(make_devices):
    gpus = make_devices("bare", count=3)
    assert by_hand(gpus, "--self-test", "cuda:1").stdout.count("Fake") == 1
    assert fake.uuid(2) in by_hand(gpus, "--self-test", fake.uuid(2)).stdout
    result = by_hand(gpus, "--self-test", "cuda:7")
    assert (result.returncode, result.stdout) == (1, "")
    assert "does not see that device" in result.stderr


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"only": ["devices none"]}, "cuInit: 100 CUDA_ERROR_NO_DEVICE"),
        ({"more": ["init 34"]}, "cuInit: 34 CUDA_ERROR_STUB_LIBRARY; this libcuda.so.1 is the Toolkit's stub"),
        ({"more": ["init 999"]}, "cuInit: 999 CUDA_ERROR_UNKNOWN; see that /dev/nvidia-uvm is there"),
        ({"more": ["missing cuMemcpyHtoDAsync"]}, "cuMemcpyHtoDAsync"),
        ({"old_driver": True}, "12.0"),
    ],
)
def test_why_there_is_no_device(make_devices, keys, text):
    for arguments in (["--list"], ["--self-test"]):
        result = by_hand(make_devices(**keys), *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert text in result.stderr


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--list", "x"], ["--self-test", "--timeout", "0"], ["--self-test", "a", "b"]])
def test_wrong_usage(arguments):
    result = by_hand(None, *arguments)
    assert result.returncode == 2
    assert "usage:" in result.stderr


def test_without_arguments_it_is_not_for_people():
    result = subprocess.run([PROGRAM], env={**os.environ, "RESVISOR_CONTROL_FD": "0"}, capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == 2
    assert "--help" in result.stderr
    assert by_hand(None, "--help").returncode == 0


# ---- as the supervisor starts it --------------------------------------------------------------------------------------


class Child(ControlPeer):
    """A resvisor-device at the other end of a socket pair."""

    def __init__(self, gpus, work, **keys):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        self.ids = iter(range(1, 1 << 30))
        self.progress = []
        with theirs:
            env = {**environment(gpus), "RESVISOR_CONTROL_FD": str(theirs.fileno())}
            self.process = subprocess.Popen([PROGRAM], env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        frame, _ = self.receive(WAIT_S)
        assert frame.hello.role == control_pb2.ROLE_DEVICE
        reply = control_pb2.HelloReply(version=PROTOCOL_VERSION, pid=os.getpid(), instance="tests")
        self.send(control_pb2.Frame(id=frame.id, hello_reply=reply))
        self.send(control_pb2.Frame(device_start=DeviceStart(work=work, **keys)))

    def close(self):
        super().close()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()

    def next(self, kind, where=lambda body: True):
        """The next frame of that kind, others are passed over."""
        while True:
            frame, _ = self.receive(WAIT_S)
            if frame.WhichOneof("body") == kind and where(getattr(frame, kind)):
                return getattr(frame, kind)

    def all(self):
        """Every frame until it closes: [(kind, body)]."""
        found = []
        while True:
            try:
                frame, _ = self.receive(WAIT_S)
            except Dropped:
                assert self.process.wait(END_S) == 0
                return found
            kind = frame.WhichOneof("body")
            found.append((kind, getattr(frame, kind)))


def rows_told(frames):
    """{uuid: [rows]} of the frames of a self-test."""
    found = {}
    for kind, body in frames:
        if kind == "device_tests":
            found.setdefault(body.uuid, []).extend(body.tests)
    return found


def test_the_report_to_the_supervisor(make_devices):
    gpus = make_devices(only=["device discrete", "device unified"])
    with Child(gpus, DeviceStart.WORK_TEST) as child:
        frames = child.all()
    kinds = [kind for kind, _ in frames]
    assert kinds[:2] == ["device_found", "device_found"]
    assert kinds[-1] == "device_done" and set(kinds[2:-1]) == {"device_tests"}
    first, second = frames[0][1], frames[1][1]
    assert (first.device.name, second.device.name) == ("cuda:0", "cuda:1")
    assert (first.device.uuid, first.uuid) == (GPU0, raw(GPU0))
    assert (first.device.driver, first.device.capability, first.device.product) == ("13.0", "9.0", "Fake discrete 0")
    assert (first.device.unified, second.device.unified) == (False, True)
    assert (first.pageable, second.pageable) == (False, True)
    assert first.granularity == 2 * MIB
    assert first.device.total_bytes == 8 << 30
    assert {attribute.number: attribute.value for attribute in first.device.attributes}[102] == 1
    assert frames[-1][1] == control_pb2.DeviceDone(driver="13.0")
    rows = rows_told(frames)
    assert set(rows) == {first.uuid, second.uuid}
    assert [test.name for test in rows[first.uuid] if test.backend == VMM] == list(ROWS)
    assert [test.name for test in rows[second.uuid] if test.backend == MEMFD] == list(ROWS)
    speeds = {test.name: test.bytes_per_second for test in rows[first.uuid] if test.backend == VMM}
    assert {name for name, speed in speeds.items() if speed} == {"bandwidth", "read-bandwidth"}
    assert all(len(test.detail) < 160 for test in rows[first.uuid] + rows[second.uuid])
    assert all(len(list(of)) <= 32 for of in rows.values())
    wait_nothing_left(gpus)


def test_known_results_are_not_found_anew(make_devices):
    gpus = make_devices("no-ipc", count=2)
    known = {"known": [raw(GPU0)], "known_driver": "13.0"}
    with Child(gpus, DeviceStart.WORK_TEST, **known) as child:
        frames = child.all()
    assert [kind for kind, _ in frames].count("device_found") == 2
    assert set(rows_told(frames)) == {raw(fake.uuid(1))}
    with Child(gpus, DeviceStart.WORK_TEST, **{**known, "known_driver": "12.8"}) as child:
        assert set(rows_told(child.all())) == {raw(GPU0), raw(fake.uuid(1))}


def test_one_device_again(make_devices):
    gpus = make_devices("bare", count=2)
    one = control_pb2.Device(name="cuda:1", uuid=raw(fake.uuid(1)))
    with Child(gpus, DeviceStart.WORK_TEST, device=one) as child:
        frames = child.all()
    assert [body.device.name for kind, body in frames if kind == "device_found"] == ["cuda:1"]
    assert set(rows_told(frames)) == {one.uuid}
    with Child(gpus, DeviceStart.WORK_TEST, device=control_pb2.Device(uuid=bytes(16))) as child:
        frames = child.all()
    assert frames == [("device_done", control_pb2.DeviceDone(reason="the driver does not see that device", driver="13.0"))]


@pytest.mark.parametrize(
    ("keys", "text"), [({"only": ["devices none"]}, "CUDA_ERROR_NO_DEVICE"), ({"more": ["init 999"]}, "cuInit: 999")]
)
def test_no_device_is_a_reason_to_the_supervisor(make_devices, keys, text):
    with Child(make_devices(**keys), DeviceStart.WORK_TEST) as child:
        ((kind, done),) = child.all()
    assert kind == "device_done" and text in done.reason


def test_a_self_test_without_its_supervisor_ends_with_its_actors(make_devices):
    gpus = make_devices("no-ipc", more=["fault cuMemcpyHtoDAsync delay=600000 program=owner"])
    child = Child(gpus, DeviceStart.WORK_TEST)
    child.next("device_tests", lambda body: body.tests[0].name == "create")
    assert actors(gpus, "owner")
    child.close()
    wait_nothing_left(gpus)


def test_actors_end_with_a_self_test_that_is_killed(make_devices):
    gpus = make_devices("no-ipc", more=["fault cuMemcpyHtoDAsync delay=600000 program=owner"])
    with Child(gpus, DeviceStart.WORK_TEST) as child:
        child.next("device_tests", lambda body: body.tests[0].name == "create")
        child.process.kill()
        wait_nothing_left(gpus)


# ---- holder -----------------------------------------------------------------------------------------------------------


def holder(gpus, uuid=GPU0):
    return Child(gpus, DeviceStart.WORK_HOLD, device=control_pb2.Device(name="cuda:0", uuid=raw(uuid)))


def allocate(child, size):
    frame = control_pb2.Frame(holder_allocate=control_pb2.HolderAllocate(size=size))
    return child.request(frame)[0].holder_allocated.arena


def free(child, allocation):
    return child.request(control_pb2.Frame(holder_free=control_pb2.HolderFree(allocation=allocation)))[0]


def test_a_holder_allocates_and_frees(make_devices):
    gpus = make_devices("no-vmm")
    with holder(gpus) as child:
        first, second = allocate(child, 3 * MIB), allocate(child, 5 * MIB)
        assert first.allocation != second.allocation
        assert len(first.handle) == 64 and first.handle != second.handle
        assert first.backend == 3
        assert first.size >= 3 * MIB and first.size % first.page_size == 0
        gpus.wait_allocated(first.size + second.size)
        assert free(child, first.allocation).WhichOneof("body") == "done"
        gpus.wait_allocated(second.size)
        third = allocate(child, MIB)
        assert third.allocation not in (first.allocation, second.allocation)
    assert child.process.returncode == 0
    wait_nothing_left(gpus)


def test_a_program_of_the_driver_may_gain_privileges(make_devices):
    """nvidia-modprobe makes the nodes in /dev for users who are not root, at the first use after a start."""
    with holder(make_devices("no-vmm")) as child:
        allowed = [line for line in procfs.read(child.process.pid, "status").splitlines() if line.startswith(b"NoNewPrivs")]
        mine = [line for line in procfs.read(os.getpid(), "status").splitlines() if line.startswith(b"NoNewPrivs")]
    assert allowed == mine


def test_what_a_holder_refuses(make_devices):
    gpus = make_devices("no-vmm", memory="256MiB", keys={"context": "8MiB"})
    with holder(gpus) as child:
        with pytest.raises(Refused) as refused:
            free(child, 77)
        assert refused.value.error.code == rpc_pb2.ERROR_BAD_REQUEST
        with pytest.raises(Refused) as refused:
            allocate(child, 0)
        assert refused.value.error.code == rpc_pb2.ERROR_BAD_REQUEST
        with pytest.raises(Refused) as refused:
            allocate(child, 1 << 40)
        assert refused.value.error.code == rpc_pb2.ERROR_NO_MEMORY
        assert "CUDA_ERROR_OUT_OF_MEMORY" in refused.value.error.message
        assert allocate(child, MIB).size >= MIB  # and it goes on
        child.send(control_pb2.Frame(ping=control_pb2.Ping(sequence=1)))
        child.wait_dropped()
    assert child.process.returncode == 1


@pytest.fixture
def many_files():
    """A descriptor for each allocation: the supervisor raises this limit for its children, a shell often has 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HOLDER_ALLOCATIONS + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} descriptors are not allowed here")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_table_of_a_holder_is_refused_until_one_is_freed(make_devices, many_files):
    gpus = make_devices("no-vmm", memory="64GiB")
    alone = types.SimpleNamespace(env={**gpus.env, "FAKECUDA_STATE": ""})  # nobody else looks: the double need not count
    with holder(alone) as child:
        first = allocate(child, 1)
        for _ in range(HOLDER_ALLOCATIONS - 1):
            allocate(child, 1)
        with pytest.raises(Refused) as refused:
            allocate(child, 1)
        assert refused.value.error.code == rpc_pb2.ERROR_LIMIT
        free(child, first.allocation)
        assert allocate(child, 1).allocation > HOLDER_ALLOCATIONS


def test_a_holder_reports_a_lost_device(make_devices):
    gpus = make_devices("no-vmm")
    with holder(gpus) as child:
        arena = allocate(child, MIB)
        gpus.lose(0)
        child.send(control_pb2.Frame(id=99, holder_free=control_pb2.HolderFree(allocation=arena.allocation)))
        event = child.next("device_event")
        assert (event.uuid, event.error, event.xid) == (raw(GPU0), 719, 0)
        assert "719" in event.what
        error = child.next("error")
        assert error.code == rpc_pb2.ERROR_DEVICE_LOST


@pytest.mark.parametrize("uuid", ["GPU-" + 32 * "0", ""])
def test_a_holder_without_its_device_says_why(make_devices, uuid):
    gpus = make_devices("no-vmm")
    with holder(gpus, uuid) as child:
        error = child.next("error")
        assert error.code in (rpc_pb2.ERROR_NO_SUCH_DEVICE, rpc_pb2.ERROR_BAD_REQUEST)
        child.wait_dropped()
    assert child.process.returncode == 1


# ---- watch ------------------------------------------------------------------------------------------------------------


def watch(gpus):
    return Child(gpus, DeviceStart.WORK_WATCH, watch_ms=50)


def test_the_watch_tells_memory_and_processes(make_devices):
    gpus = make_devices("no-vmm", count=2, memory="1GiB")
    with holder(gpus) as owner, watch(gpus) as child:
        arena = allocate(owner, 64 * MIB)
        seen = child.next("device_memory", lambda body: body.used_bytes >= arena.size and body.processes)
        assert seen.uuid == raw(GPU0)
        assert (seen.total_bytes, seen.free_bytes) == (1 << 30, (1 << 30) - seen.used_bytes)
        (process,) = seen.processes
        assert process.pid == owner.process.pid and process.bytes >= arena.size
        assert child.next("device_memory", lambda body: body.uuid == raw(fake.uuid(1))).used_bytes == 0
    assert child.process.returncode == 0


def test_silent_nvml_gives_zeros_and_still_processes(make_devices):
    gpus = make_devices("unified")
    with holder(gpus) as owner, watch(gpus) as child:
        allocate(owner, MIB)
        seen = child.next("device_memory", lambda body: body.processes)
        assert (seen.total_bytes, seen.used_bytes, seen.free_bytes) == (0, 0, 0)
        assert [process.pid for process in seen.processes] == [owner.process.pid]


def test_the_watch_tells_xids(make_devices):
    gpus = make_devices(count=2)
    with watch(gpus) as child:
        child.next("device_memory")
        gpus.xid(1, 79)
        event = child.next("device_event")
        assert (event.uuid, event.error, event.xid) == (raw(fake.uuid(1)), 0, 79)
        assert event.what == "Xid 79: it has fallen off the bus"
        gpus.xid(0, 12345)
        event = child.next("device_event")
        assert (event.uuid, event.xid, event.what) == (raw(GPU0), 12345, "Xid 12345: the kernel's log says more")


def test_the_watch_tells_a_lost_device_once(make_devices):
    gpus = make_devices(count=2)
    with watch(gpus) as child:
        child.next("device_memory")
        gpus.lose(0)
        event = child.next("device_event")
        assert (event.uuid, event.xid) == (raw(GPU0), 79)
        for _ in range(3):  # the other one goes on, and nothing is said twice
            frame, _ = child.receive(WAIT_S)
            assert frame.WhichOneof("body") == "device_memory"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"more": ["nvml 9"]}, "nvmlInit_v2: 9 Driver Not Loaded"),
        ({"only": ["device tegra"]}, "NVML sees no device"),
        ({"old_driver": True}, "libnvidia-ml.so.1 is not installed"),
    ],
)
def test_nothing_to_watch_is_said_and_no_error(make_devices, keys, text):
    gpus = make_devices(**keys)
    if keys.get("old_driver") and os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has NVML")
    with Child(gpus, DeviceStart.WORK_WATCH) as child:
        ((kind, error),) = child.all()
    assert (kind, error.code, error.message) == ("error", rpc_pb2.ERROR_UNSUPPORTED, text)


# ---- with the real supervisor -----------------------------------------------------------------------------------------


def wait_found(service):
    """The real self-test takes seconds for each device on a machine that does other things too."""
    procfs.wait_until(lambda: devices(service), WAIT_S, "the end of the search for devices")


@pytest.mark.smoke
def test_a_machine_with_one_of_each(make_service, make_devices):
    kinds = ("discrete", "unified-plain", "no-vmm", "bare")
    gpus = make_devices(only=[f"device {kind}" for kind in kinds])
    service = make_service(env=gpus.env).start()
    wait_found(service)
    rows = devices(service)
    assert [row["state"] for row in rows] == ["READY"] * 3 + ["UNUSABLE"]
    assert [row["backend"] for row in rows] == [VMM, MEMFD, IPC, ""]
    assert {test["result"] for row in rows for test in row["tests"]} == {"ok", "skipped"}
    procfs.wait_until(lambda: devices(service)[0]["memory_source"] == "nvml", END_S, "numbers of NVML")
    wait_nothing_left(gpus)


def test_a_device_that_is_lost_is_tested_again(make_service, make_devices):
    gpus = make_devices("no-ipc", count=2)
    service = make_service(env=gpus.env).start()
    wait_found(service)
    procfs.wait_until(lambda: devices(service)[0]["memory_source"] == "nvml", END_S, "the watch")
    gpus.xid(0, 79)
    wait_state(service, "LOST")
    assert devices(service)[1]["state"] == "READY"
    gpus.lose(0)
    request_test(service, "cuda:0")
    assert devices(service)[0]["state"] in ("LOST", "UNUSABLE")
    gpus.find(0)
    request_test(service, "cuda:0")
    assert devices(service)[0]["state"] == "READY"
    wait_nothing_left(gpus)
