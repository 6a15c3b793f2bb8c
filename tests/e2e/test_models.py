"""Models: one load for all who ask, every byte as in the file, generations, budget, pins, descriptors, blobs."""

import concurrent.futures
import contextlib
import json
import os
import threading

import numpy
import pytest
import safetensors
import safetensors.numpy
import xxhash

from harness import models, placement, procfs
from harness.control import ControlPeer, Refused
from harness.index import Index
from harness.protos import rpc_pb2

CLIENTS = 10
MIB = 1024 * 1024


def close_all(index_fd, arena_fds):
    for fd in [index_fd, *arena_fds]:
        os.close(fd)


def read_all(peer, model, **kwargs):
    """{name: (dtype, shape, bytes, digest)}, metadata and the AttachReply."""
    reply, index_fd, arena_fds = peer.attach(model, **kwargs)
    try:
        with Index(index_fd, arena_fds, reply) as index:
            found = {t.name: (t.dtype, t.shape, index.bytes_of(t), t.digest) for t in index}
            for name in found:
                assert index.find(name).name == name
            assert index.find("no such tensor") is None
            return found, index.metadata(), reply
    finally:
        close_all(index_fd, arena_fds)


@pytest.mark.smoke
def test_a_foreign_reader_sees_every_byte_of_every_dtype(bare):
    path = bare.models / "every.safetensors"
    models.write_every_dtype(path)
    found, metadata, _ = read_all(bare.control, path)
    wanted = dict(safetensors.deserialize(path.read_bytes()))
    assert set(found) == set(wanted)
    for name, (dtype, shape, data, digest) in found.items():
        assert dtype == wanted[name]["dtype"], name
        assert list(shape) == wanted[name]["shape"], name
        assert data == bytes(wanted[name]["data"]), name
        assert digest == xxhash.xxh3_128_digest(data), name
    assert json.loads(metadata) == {"format": "pt", "note": "zwölf"}


def test_a_foreign_reader_agrees_with_safetensors_and_numpy(bare):
    path = bare.models / "numpy.safetensors"
    random = numpy.random.default_rng(3)
    arrays = {
        "f64": random.normal(size=(7, 3)), "f32": random.normal(size=(64, 33)).astype("f4"),
        "f16": random.normal(size=(5,)).astype("f2"), "i64": random.integers(-9, 9, (2, 2, 2)), "u8": numpy.arange(9, dtype="u1"),
        "bool": numpy.array([[True, False]]),
    }  # fmt: skip
    safetensors.numpy.save_file(arrays, str(path))
    found, _, _ = read_all(bare.control, path)
    loaded = safetensors.numpy.load_file(str(path))
    for name, (_, shape, data, _) in found.items():
        array = numpy.frombuffer(data, loaded[name].dtype).reshape(shape)
        assert numpy.array_equal(array, loaded[name]), name
        assert numpy.array_equal(array, arrays[name]), name


@pytest.mark.smoke
def test_ten_clients_cause_one_load_and_all_see_its_progress(make_service):
    service = make_service({"pool": {"direct": "always"}}).start()
    path = service.models / "shared.safetensors"
    models.write_plain(path, mib=256)
    barrier = threading.Barrier(CLIENTS)

    def client(_):
        with ControlPeer(service.runtime / "control/resvisor.sock") as peer:
            barrier.wait()
            reply, index_fd, arena_fds = peer.attach(path, want_progress=True)
            close_all(index_fd, arena_fds)
            return reply, list(peer.progress)

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(client, range(CLIENTS)))
    model = service.model(path)
    assert model.loads == 1
    assert model.read_bytes >= 256 * MIB
    assert model.read_bytes < 257 * MIB
    assert {reply.generation for reply, _ in answers} == {1}
    for reply, progress in answers:
        if reply.waited and reply.load_us > 200_000:
            assert progress, "a client that waited saw progress"
            assert all(done <= total for done, total in progress if total)
            assert progress == sorted(progress)


def test_a_resident_model_is_attached_without_reading(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path)
    _, _, first = read_all(bare.control, path)
    _, _, second = read_all(bare.control, path)
    assert first.waited and first.read_bytes > 0
    assert not second.waited and second.read_bytes == 0
    assert first.lease_id != second.lease_id
    assert bare.model(path).loads == 1


def test_a_lease_ends_with_its_connection(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path)
    with bare.peer() as peer:
        reply, index_fd, arena_fds = peer.attach(path)
        close_all(index_fd, arena_fds)
        assert bare.model(path).leases == 1
        peer.detach(reply.lease_id)
        assert bare.model(path).leases == 0
        close_all(*peer.attach(path)[1:])
        assert bare.model(path).leases == 1
    procfs.wait_until(lambda: bare.model(path).leases == 0, 5, "the end of the lease")


def test_nobody_ends_a_lease_of_somebody_else(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path)
    with bare.peer() as one, bare.peer() as two:
        reply, index_fd, arena_fds = one.attach(path)
        close_all(index_fd, arena_fds)
        with contextlib.suppress(Refused):
            two.detach(reply.lease_id)
        assert bare.model(path).leases == 1


def test_a_changed_file_is_a_new_generation_and_the_old_one_lives_until_its_last_lease(bare):
    path = bare.models / "m.safetensors"
    old_bytes = models.write_plain(path, seed=1)
    with bare.peer() as holder:
        reply, index_fd, arena_fds = holder.attach(path)
        assert reply.generation == 1
        fresh = path.with_suffix(".new")
        new_bytes = models.write_plain(fresh, seed=2)
        os.replace(fresh, path)
        found, _, second = read_all(bare.control, path)
        assert second.generation == 2
        assert {name: data for name, (_, _, data, _) in found.items()} == new_bytes
        with Index(index_fd, arena_fds, reply) as index:
            assert {t.name: index.bytes_of(t) for t in index} == old_bytes
        close_all(index_fd, arena_fds)
        model = bare.model(path)
        assert (model.generation, model.old_generations, model.loads) == (2, 1, 2)
    procfs.wait_until(lambda: bare.model(path).old_generations == 0, 5, "the end of the old generation")


def test_a_configured_link_that_is_moved_leads_to_another_model(make_service):
    service = make_service()
    link = service.models / "current.safetensors"
    contents = {seed: models.write_plain(service.models / f"v{seed}.safetensors", seed=seed) for seed in (1, 2)}
    link.symlink_to("v1.safetensors")
    service.config["models"] = {"current": {"path": "current.safetensors"}}
    service.start()
    for seed in (1, 2, 1):
        link.unlink()
        link.symlink_to(f"v{seed}.safetensors")
        found, _, _ = read_all(service.control, "current")
        assert {name: data for name, (_, _, data, _) in found.items()} == contents[seed], seed
        assert service.model("current").path == str((service.models / f"v{seed}.safetensors").resolve())


def test_a_file_overwritten_in_place_does_not_change_what_clients_hold(bare):
    path = bare.models / "m.safetensors"
    old = models.write_plain(path, seed=1)
    reply, index_fd, arena_fds = bare.control.attach(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    with Index(index_fd, arena_fds, reply) as index:
        assert {t.name: index.bytes_of(t) for t in index} == old
    path.write_bytes(b"")
    with Index(index_fd, arena_fds, reply) as index:
        assert {t.name: index.bytes_of(t) for t in index} == old
    close_all(index_fd, arena_fds)
    assert reply.generation == 1


def test_any_other_file_is_held_as_one_blob(bare):
    path = bare.models / "tokenizer.model"
    data = os.urandom(123_457)
    path.write_bytes(data)
    found, metadata, _ = read_all(bare.control, path)
    assert len(found) == 1 and metadata is None
    ((dtype, shape, held, digest),) = found.values()
    assert (dtype, shape, held) == ("BLOB", (len(data),), data)
    assert digest == xxhash.xxh3_128_digest(data)


def test_a_client_may_bring_its_own_descriptor(bare, tmp_path):
    path = tmp_path / "outside.safetensors"
    wanted = models.write_plain(path)
    with pytest.raises(Refused) as refused:
        bare.control.attach(path)
    assert refused.value.code == rpc_pb2.ERROR_NOT_PERMITTED
    fd = os.open(path, os.O_RDONLY)
    try:
        found, _, _ = read_all(bare.control, "outside", fd=fd)
    finally:
        os.close(fd)
    assert {name: data for name, (_, _, data, _) in found.items()} == wanted


def test_a_link_out_of_the_model_folder_is_refused(bare, tmp_path):
    outside = tmp_path / "outside.safetensors"
    models.write_plain(outside)
    link = bare.models / "link.safetensors"
    link.symlink_to(outside)
    for path in (link, bare.models / ".." / ".." / outside.name):
        with pytest.raises(Refused) as refused:
            bare.control.attach(path)
        assert refused.value.code in (rpc_pb2.ERROR_NOT_PERMITTED, rpc_pb2.ERROR_NO_SUCH_MODEL)


def test_load_pin_unload(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path)
    status = bare.control.model(rpc_pb2.MODEL_LOAD, path)
    assert (status.state, status.tensors, status.loads) == ("RESIDENT", 8, 1)
    assert placement.pool_bytes(bare.status()) == status.bytes > 4 * MIB
    bare.control.model(rpc_pb2.MODEL_PIN, path)
    with pytest.raises(Refused) as refused:
        bare.control.model(rpc_pb2.MODEL_UNLOAD, path)
    assert refused.value.code == rpc_pb2.ERROR_MODEL_PINNED
    bare.control.model(rpc_pb2.MODEL_UNPIN, path)
    reply, index_fd, arena_fds = bare.control.attach(path)
    close_all(index_fd, arena_fds)
    with pytest.raises(Refused) as refused:
        bare.control.model(rpc_pb2.MODEL_UNLOAD, path)
    assert refused.value.code == rpc_pb2.ERROR_MODEL_IN_USE
    bare.control.detach(reply.lease_id)
    assert bare.control.model(rpc_pb2.MODEL_UNLOAD, path).state == "ABSENT"
    assert placement.pool_bytes(bare.status()) == 0
    supervisor = bare.status().supervisor_pid
    assert procfs.memfds(supervisor) == []


def test_a_model_over_the_budget_is_refused_before_anything_is_allocated(make_service):
    service = make_service(placement.budget("16MiB")).start()
    small, large = service.models / "small.safetensors", service.models / "large.safetensors"
    models.write_plain(small, mib=4)
    models.write_plain(large, mib=32)
    with pytest.raises(Refused) as refused:
        service.control.attach(large)
    assert refused.value.code == rpc_pb2.ERROR_OVER_BUDGET
    assert "MiB" in refused.value.error.message
    assert placement.pool_bytes(service.status()) == 0
    found, _, _ = read_all(service.control, small)
    assert len(found) == 8


def test_preloaded_and_pinned_models_are_there_at_the_start(make_service):
    service = make_service()
    models.write_plain(service.models / "m.safetensors")
    service.config["models"] = {"m": {"path": "m.safetensors", "preload": True, "pin": True}}
    service.start()
    procfs.wait_until(lambda: service.model("m").state == "RESIDENT", 10, "the preloaded model")
    assert service.model("m").pinned


@pytest.mark.parametrize("direct", ["always", "never"])
def test_both_ways_of_reading_give_the_same_bytes(make_service, direct):
    service = make_service({"pool": {"direct": direct}}).start()
    path = service.models / "m.safetensors"
    wanted = models.write(path, [("a", "U8", (1,)), ("b", "F32", (1_234_567,)), ("c", "U8", (4097,)), ("d", "BF16", (333, 777))])
    found, _, reply = read_all(service.control, path)
    assert {name: data for name, (_, _, data, _) in found.items()} == wanted
    assert reply.read_bytes >= sum(map(len, wanted.values()))


@pytest.mark.host_memory
def test_nobody_can_write_into_an_arena(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path)
    _, index_fd, arena_fds = bare.control.attach(path)
    for fd in [index_fd, *arena_fds]:
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
    for fd in arena_fds:
        reopened = None
        try:
            reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            with pytest.raises(OSError):
                os.pwrite(reopened, b"x", 0)
        except PermissionError:
            pass
        finally:
            if reopened is not None:
                os.close(reopened)
    close_all(index_fd, arena_fds)


def test_the_supervisor_maps_no_model_and_stays_small(bare):
    path = bare.models / "m.safetensors"
    models.write_plain(path, mib=64)
    read_all(bare.control, path)
    supervisor = bare.status().supervisor_pid
    assert "/memfd:" not in procfs.read(supervisor, "maps").decode()
    if "asan" not in str(bare.program):
        assert procfs.rss(supervisor) <= 8 * MIB
