"""Memory that ends in the middle of a load: an error with a reason, never SIGBUS, and nobody else notices."""

import os
import pathlib
import resource
import subprocess

import pytest

from harness import models
from harness.control import Refused
from harness.protos import rpc_pb2

MIB = 1024 * 1024


def attach_is_refused(service, path):
    with service.peer() as peer:
        with pytest.raises(Refused) as refused:
            peer.attach(path)
    return refused.value


@pytest.mark.host_memory
def test_no_room_for_an_arena_is_no_memory_and_never_sigbus(make_service, watched):
    """A write that the kernel refuses: the limit of file sizes counts for memory files too, so it stands for a full one."""
    service = make_service()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, before[1]))
    try:
        service.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    models.write_plain(service.models / "large.safetensors", mib=32)
    with watched(service):
        refused = attach_is_refused(service, service.models / "large.safetensors")
        assert refused.code == rpc_pb2.ERROR_NO_MEMORY, refused
    assert "SIGBUS" not in service.log()


def memory_cgroup():
    """A cgroup of our own below ours, v1 or v2: (folder, name of its limit file), or None where that is not allowed."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        roots = []
        if "memory" in controllers.split(","):
            roots.append(("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))
        elif controllers == "":
            roots.append(("/sys/fs/cgroup", "memory.max"))
        for root, limit in roots:
            folder = pathlib.Path(root + path) / f"resvisor-test-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            if os.access(folder / limit, os.W_OK):
                return folder, limit
            folder.rmdir()
    return None


def test_a_cgroup_that_runs_full_takes_the_loader_and_leaves_the_supervisor(make_service, watched):
    found = memory_cgroup()
    if not found:
        pytest.skip("no cgroup with a memory limit can be made here")
    folder, limit = found
    service = make_service()
    try:
        service.start()
        small = service.models / "small.safetensors"
        models.write_plain(small, mib=4)
        models.write_plain(service.models / "large.safetensors", mib=256)
        (folder / limit).write_text(str(96 * MIB))
        for pid in service.ours():
            (folder / "cgroup.procs").write_text(str(pid))
        with watched(service):
            refused = attach_is_refused(service, service.models / "large.safetensors")
            assert refused.code == rpc_pb2.ERROR_NO_MEMORY, refused
            assert service.process.poll() is None
        assert service.stop() == 0
    finally:
        service.end(clean=False)
        subprocess.run(["rmdir", str(folder)], check=False)
