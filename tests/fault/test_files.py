"""Model files that are bad, missing, strange, or change while they are read."""

import itertools
import os
import stat
import threading

import pytest

from harness import models, placement, procfs
from harness.control import Refused
from harness.index import Index
from harness.protos import rpc_pb2

MIB = 1024 * 1024
PAGE = 4096


def refused(service, model, *codes, **kwargs):
    """Attaches, expects one of the codes, and returns the message."""
    with service.peer() as peer, pytest.raises(Refused) as caught:
        peer.attach(model, **kwargs)
    assert caught.value.code in codes, caught.value
    assert caught.value.error.message
    return caught.value.error.message


def attach(service, model, **kwargs):
    peer = service.peer()
    reply, index_fd, arena_fds = peer.attach(model, **kwargs)
    return peer, reply, index_fd, arena_fds


def finish(peer, index_fd, arena_fds):
    for fd in [index_fd, *arena_fds]:
        os.close(fd)
    peer.close()


def test_every_malformed_file_is_refused_with_a_reason_and_leaves_nothing(bare, watched):
    with watched(bare):
        for name, data in models.BAD_FILES.items():
            path = bare.models / f"{name}.safetensors"
            path.write_bytes(data)
            message = refused(bare, path, rpc_pb2.ERROR_MODEL_INVALID)
            assert len(message) > 10, name
            assert bare.model(path).state == "FAILED", name
            path.unlink()


def test_sub_byte_types_are_refused_as_unsupported(bare, watched):
    with watched(bare):
        for name, data in models.UNSUPPORTED_FILES.items():
            path = bare.models / f"{name}.safetensors"
            path.write_bytes(data)
            assert "F4" in refused(bare, path, rpc_pb2.ERROR_UNSUPPORTED)


def test_a_file_without_tensors_is_a_model_without_tensors(bare, watched):
    path = bare.models / "none.safetensors"
    path.write_bytes(models.pack({"__metadata__": {"a": "b"}}))
    with watched(bare):
        peer, reply, index_fd, arena_fds = attach(bare, path)
        with Index(index_fd, arena_fds, reply) as index:
            assert index.tensor_count == 0 and list(index) == []
            assert index.find("a") is None and index.metadata() == '{"a":"b"}'
        finish(peer, index_fd, arena_fds)
        unload(bare, path)


@pytest.mark.slow
def test_a_million_tensors(bare, watched):
    count = 1_000_000
    path = bare.models / "million.safetensors"
    data = models.write_many_tensors(path, count)
    with watched(bare):
        peer, reply, index_fd, arena_fds = attach(bare, path, timeout=60)
        with Index(index_fd, arena_fds, reply) as index:
            assert index.tensor_count == count
            for number in (0, 1, 4711, 499_999, count - 1):
                found = index.find(f"t.{number}")
                assert index.bytes_of(found) == data[number : number + 1]
            assert index.find("t.1000000") is None
        assert reply.generation == 1
        finish(peer, index_fd, arena_fds)
        unload(bare, path)


def test_a_failed_load_is_remembered_and_a_mended_file_is_tried_at_once(make_service, watched):
    service = make_service({"pool": {"load_retry": "1h"}}).start()
    path = service.models / "m.safetensors"
    path.write_bytes(models.BAD_FILES["overlap"])
    with watched(service):
        first = refused(service, path, rpc_pb2.ERROR_MODEL_INVALID)
        failures = service.log().count("m.safetensors")
        for _ in range(20):
            assert refused(service, path, rpc_pb2.ERROR_MODEL_INVALID) == first
        assert service.log().count("m.safetensors") == failures, "no further load was tried"
        assert service.model(path).error.retry_after_ms > 0
        models.write_plain(path, mib=1)
        peer, reply, index_fd, arena_fds = attach(service, path)
        assert reply.generation == 1
        finish(peer, index_fd, arena_fds)
        unload(service, path)


def test_a_missing_file_directory_fifo_device_and_unreadable_file_are_refused_at_once(bare, watched):
    folder = bare.models
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "fifo.safetensors")
    unreadable = folder / "unreadable.safetensors"
    models.write_plain(unreadable, mib=1)
    unreadable.chmod(0)
    with watched(bare):
        refused(bare, folder / "missing.safetensors", rpc_pb2.ERROR_NO_SUCH_MODEL)
        refused(bare, "no-such-name", rpc_pb2.ERROR_NO_SUCH_MODEL)
        refused(bare, folder / "folder.safetensors", rpc_pb2.ERROR_FILE, rpc_pb2.ERROR_NOT_PERMITTED)
        refused(bare, folder / "fifo.safetensors", rpc_pb2.ERROR_FILE, rpc_pb2.ERROR_NOT_PERMITTED)
        refused(bare, "/dev/zero", rpc_pb2.ERROR_FILE, rpc_pb2.ERROR_NOT_PERMITTED)
        refused(bare, "/etc/passwd", rpc_pb2.ERROR_NOT_PERMITTED)
        if os.geteuid() != 0:
            refused(bare, unreadable, rpc_pb2.ERROR_FILE)


def test_a_descriptor_of_something_that_is_no_file_is_refused(bare, watched):
    read_end, write_end = os.pipe()
    folder = os.open(bare.models, os.O_RDONLY)
    zero = os.open("/dev/zero", os.O_RDONLY)
    write_only = os.open(bare.models / "w", os.O_WRONLY | os.O_CREAT)
    try:
        with watched(bare):
            for fd in (read_end, folder, zero, write_only):
                refused(
                    bare, "thing", rpc_pb2.ERROR_FILE, rpc_pb2.ERROR_BAD_REQUEST, rpc_pb2.ERROR_NOT_PERMITTED,
                    rpc_pb2.ERROR_MODEL_INVALID, fd=fd,
                )  # fmt: skip
    finally:
        for fd in (read_end, write_end, folder, zero, write_only):
            os.close(fd)


def unload(service, path):
    """Gives the model's memory back, as soon as the last lease has ended."""
    procfs.wait_until(lambda: service.model(path).leases == 0, 10, "the end of the leases")
    service.control.model(rpc_pb2.MODEL_UNLOAD, path)


class Rewriter:
    """Changes a file again and again while it is being loaded."""

    def __init__(self, change):
        self.change = change
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        number = 0
        while not self.stop.is_set():
            self.change(number)
            number += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


PASSES = 251  # numbers of passes, as one byte


def is_one_moment(data):
    """Whether a file that is overwritten front to back, pass after pass, can have looked like this at one moment: pages of
    the newest pass, then pages of the one before. Pages that a reader took at two moments are in another order."""
    runs = [number for number, _ in itertools.groupby(data[::PAGE])]
    return len(runs) == 1 or (len(runs) == 2 and (runs[0] - runs[1]) % PASSES == 1)


@pytest.mark.parametrize("direct", ["always", "never"])
def test_a_file_written_while_it_is_loaded_is_never_a_mixture_of_two_moments(make_service, watched, direct):
    """Either the load fails with MODEL_CHANGED, or what it gives is what the file was at one moment."""
    service = make_service({"pool": {"load_retry": "0s", "direct": direct}}).start()
    path = service.models / "m.safetensors"
    size = 32 * MIB
    header = models.pack({"a": models.entry("U8", [size], 0, size)}, pad_to=PAGE)
    path.write_bytes(header + b"\0" * size)

    def change(number):
        # In pieces, as programs copy: each piece is a new time stamp. What one single write() changes while its time
        # stamp is already old cannot be seen by anybody.
        piece = bytes([(number + 1) % PASSES]) * MIB
        with open(path, "r+b", buffering=0) as file:
            file.seek(len(header))
            for _ in range(size // MIB):
                file.write(piece)

    with watched(service):
        with Rewriter(change):
            changed = 0
            for _ in range(8):
                try:
                    peer, reply, index_fd, arena_fds = attach(service, path)
                except Refused as error:
                    assert error.code == rpc_pb2.ERROR_MODEL_CHANGED
                    changed += 1
                    continue
                with Index(index_fd, arena_fds, reply) as index:
                    assert is_one_moment(index.bytes_of(index.at(0)))
                finish(peer, index_fd, arena_fds)
        assert changed > 0
        if service.model(path).state == "RESIDENT":
            unload(service, path)


def test_a_file_replaced_while_it_is_loaded_gives_one_of_the_two_whole(make_service, watched):
    service = make_service({"pool": {"load_retry": "0s"}}).start()
    path = service.models / "m.safetensors"
    contents = [models.write_plain(path.with_suffix(f".{seed}"), mib=16, seed=seed) for seed in (1, 2)]
    files = [path.with_suffix(f".{seed}").read_bytes() for seed in (1, 2)]
    path.write_bytes(files[0])

    def change(number):
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(files[number % 2])
        os.replace(fresh, path)

    with watched(service):
        with Rewriter(change):
            for _ in range(8):
                try:
                    peer, reply, index_fd, arena_fds = attach(service, path)
                except Refused as error:
                    assert error.code == rpc_pb2.ERROR_MODEL_CHANGED
                    continue
                with Index(index_fd, arena_fds, reply) as index:
                    assert {t.name: index.bytes_of(t) for t in index} in contents
                finish(peer, index_fd, arena_fds)
        if service.model(path).state == "RESIDENT":
            unload(service, path)


def test_a_file_truncated_while_it_is_loaded_is_refused(make_service, watched):
    service = make_service({"pool": {"load_retry": "0s"}}).start()
    path = service.models / "m.safetensors"
    models.write_plain(path, mib=32)
    whole = path.read_bytes()

    def change(number):
        os.truncate(path, 1000 if number % 2 else 0)
        path.write_bytes(whole)

    with watched(service):
        with Rewriter(change):
            for _ in range(10):
                try:
                    peer, reply, index_fd, arena_fds = attach(service, path)
                except Refused as error:
                    assert error.code in (rpc_pb2.ERROR_MODEL_CHANGED, rpc_pb2.ERROR_MODEL_INVALID, rpc_pb2.ERROR_FILE)
                    continue
                with Index(index_fd, arena_fds, reply) as index:
                    assert len(list(index)) == 8
                finish(peer, index_fd, arena_fds)
        if service.model(path).state == "RESIDENT":
            unload(service, path)


def test_over_budget_is_refused_before_anything_is_allocated(make_service, watched):
    service = make_service(placement.budget("64MiB", load_retry="0s")).start()
    path = service.models / "large.safetensors"
    models.write_plain(path, mib=256)
    seen = []
    stop = threading.Event()

    def look():
        while not stop.is_set():
            with open("/proc/meminfo") as file:
                seen.extend(int(line.split()[1]) for line in file if line.startswith("Shmem:"))
            stop.wait(0.002)

    with watched(service):
        before = placement.pool_bytes(service.status())
        watcher = threading.Thread(target=look)
        watcher.start()
        for _ in range(5):
            refused(service, path, rpc_pb2.ERROR_OVER_BUDGET)
        stop.set()
        watcher.join()
        assert placement.pool_bytes(service.status()) == before
        assert max(seen) - seen[0] < 64 * 1024, "Shmem grew by less than 64 MiB in KiB"


def test_many_bad_loads_at_once(make_service, watched):
    service = make_service({"pool": {"max_loads": 2}}).start()
    paths = []
    for number in range(30):
        path = service.models / f"bad-{number}.safetensors"
        path.write_bytes(models.BAD_FILES["truncated"])
        paths.append(path)
    with watched(service):
        threads = [
            threading.Thread(target=refused, args=(service, path, rpc_pb2.ERROR_MODEL_INVALID)) for path in paths
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(service.model(path).state == "FAILED" for path in paths)
        procfs.wait_until(lambda: not service.loaders(), 10, "the end of the loaders")


def test_regular_files_stay_as_they_were(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path, mib=1)
    before = (path.read_bytes(), path.stat().st_mtime_ns, stat.S_IMODE(path.stat().st_mode))
    peer, _, index_fd, arena_fds = attach(bare, path)
    finish(peer, index_fd, arena_fds)
    assert (path.read_bytes(), path.stat().st_mtime_ns, stat.S_IMODE(path.stat().st_mode)) == before
