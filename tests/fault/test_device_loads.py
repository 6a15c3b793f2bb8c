"""Loaders and holders of devices that lie, die or say nothing: the load fails with a reason, nothing is kept, nobody waits."""

import os

import pytest

from harness import models, procfs
from harness.control import Refused
from harness.protos import control_pb2, rpc_pb2

WAIT_S = 20
DEVICE = "cuda:0"
VMM_GOOD = "arena = plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=2 * MIB)], [plain()])"
IPC_GOOD = "arena, = plan(); done([arena], [])"

pytestmark = pytest.mark.host_memory  # they have a device of their own, which no driver knows


def load(service):
    return service.control.model(rpc_pb2.MODEL_LOAD, "m", device=DEVICE)


def load_frame():
    return control_pb2.Frame(id=7, model_request=rpc_pb2.ModelRequest(action=rpc_pb2.MODEL_LOAD, model="m", device=DEVICE))


def refused(service):
    with pytest.raises(Refused) as found:
        load(service)
    return found.value


def row(service):
    return next(m for m in service.status().models if m.device == DEVICE)


LIES = {
    "another kind": "plan(); done([Arena(size=4 * MIB, backend=MEMFD, page_size=4096)], [sealed(4 * MIB)])",
    "a handle instead of a descriptor": "plan(); done([Arena(size=4 * MIB, backend=IPC, page_size=2 * MIB, handle=b'h' * 64)], [])",
    "no kind that there is": "plan(); done([Arena(size=4 * MIB, backend=77, page_size=2 * MIB)], [plain()])",
    "more than planned": "plan(); done([Arena(size=64 * MIB, backend=VMM, page_size=2 * MIB)], [plain()])",
    "sizes that wrap": "plan(); done([Arena(size=(1 << 64) - 2 * MIB, backend=VMM, page_size=2 * MIB)] * 8, [plain()] * 8)",
    "no pages": "plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=0)], [plain()])",
    "half a page": "plan(); done([Arena(size=3 * MIB, backend=VMM, page_size=2 * MIB)], [plain()])",
    "a folder": "plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=2 * MIB)], [os.open('/', os.O_RDONLY)])",
    "a descriptor too many": "plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=2 * MIB)], [plain(), plain()])",
    "a descriptor too few": "plan(); done([Arena(size=4 * MIB, backend=VMM, page_size=2 * MIB)], [])",
    "too many arenas": "plan(); done([Arena(size=2 * MIB, backend=VMM, page_size=2 * MIB)] * 9, [plain()] * 9)",
    "an index that is not sealed": "plan(); globals().update(sealed=lambda n: plain()); done([], [])",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_the_loader_is_no_model(make_scripted, lie):
    service = make_scripted()
    service.standin.loads(LIES[lie])
    service.status()
    before = service.holdings()
    found = refused(service)
    assert found.code == rpc_pb2.ERROR_INTERNAL
    assert "ended before its time" not in found.error.message, "it was judged by what it handed over"
    assert row(service).state == "FAILED" and row(service).bytes == 0
    service.assert_holdings(before)
    service.standin.loads(VMM_GOOD)
    found = load(service)
    assert (found.state, found.backend, found.device) == ("RESIDENT", "cuda-vmm", DEVICE)
    service.cli("unload", "m", "--device", DEVICE)
    service.assert_holdings(before)
    service.assert_healthy()


def test_what_the_holder_gave_is_what_loader_and_clients_get_and_it_is_freed_once(make_scripted):
    service = make_scripted("cuda-ipc")
    service.standin.loads(IPC_GOOD)
    load(service)
    with service.peer() as peer:
        reply, index_fd, arena_fds = peer.attach("m", device=DEVICE)
        os.close(index_fd)
        (arena,) = reply.arenas
        assert arena_fds == [] and arena.handle == b"h" * 64 and arena.allocation == 1
        models.write_plain(service.models / "m.safetensors", mib=1, seed=2)
        assert load(service).old_generations == 1
        assert service.standin.freed() == [], "it is still leased"
    procfs.wait_until(lambda: service.standin.freed() == [1], WAIT_S, "the old one freed")
    service.cli("unload", "m", "--device", DEVICE)
    procfs.wait_until(lambda: service.standin.freed() == [1, 2], WAIT_S, "the new one freed")


IPC_LIES = {
    "another allocation": "arena, = plan(); arena.allocation += 1; done([arena], [])",
    "another size": "arena, = plan(); arena.size *= 2; done([arena], [])",
    "another kind": "arena, = plan(); arena.backend = VMM; done([arena], [])",
    "a descriptor beside it": "arena, = plan(); done([arena], [plain()])",
    "nothing of it": "plan(); done([], [])",
    "twice": "arena, = plan(); done([arena, arena], [])",
    "its death": "plan(); os.kill(os.getpid(), 11)",
    "its end": "plan()",
    "an error": "plan(); send(error=rpc_pb2.Error(code=rpc_pb2.ERROR_DEVICE, message='cuIpcOpenMemHandle: 999'))",
}


@pytest.mark.parametrize("lie", IPC_LIES)
def test_what_was_allocated_for_a_load_that_fails_is_freed(make_scripted, lie):
    service = make_scripted("cuda-ipc")
    service.standin.loads(IPC_LIES[lie])
    found = refused(service)
    assert lie.startswith("its ") or "ended before its time" not in found.error.message
    assert found.code in (rpc_pb2.ERROR_INTERNAL, rpc_pb2.ERROR_DEVICE)
    procfs.wait_until(lambda: service.standin.freed() == [1], WAIT_S, "its arena freed")
    (found,) = service.cli_json("devices")["devices"]
    assert found["pool_bytes"] == found["promised_bytes"] == 0
    service.standin.loads(IPC_GOOD)
    assert load(service).state == "RESIDENT"
    service.assert_healthy()


HOLDER_LIES = {
    "too small": "arena.size = 4096",
    "too large": "arena.size *= 9",
    "no handle": "arena.handle = bytes(64)",
    "half a handle": "arena.handle = b'h' * 32",
    "another kind": "arena.backend = 2",
    "an error": "send(id=frame.id, error=rpc_pb2.Error(code=rpc_pb2.ERROR_NO_MEMORY, message='cuMemAlloc: 2')); continue",
    "its death": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("lie", HOLDER_LIES)
def test_a_holder_without_a_good_arena_fails_the_load(make_scripted, lie):
    service = make_scripted("cuda-ipc")
    service.standin.holds(HOLDER_LIES[lie])
    service.standin.loads(IPC_GOOD)
    found = refused(service)
    assert found.code in (rpc_pb2.ERROR_INTERNAL, rpc_pb2.ERROR_NO_MEMORY, rpc_pb2.ERROR_DEVICE), found
    assert row(service).state == "FAILED"
    procfs.wait_until(
        lambda: service.cli_json("devices")["devices"][0]["promised_bytes"] == 0, WAIT_S, "nothing promised any more"
    )
    service.assert_healthy()


@pytest.mark.parametrize("how", ["unload", "kill", "stop"])
def test_a_load_that_waits_for_the_holder_can_end(make_scripted, how):
    service = make_scripted("cuda-ipc")
    service.standin.holds("wait('asked')")
    service.standin.loads(IPC_GOOD)
    with service.peer() as peer:
        peer.send(load_frame())
        procfs.wait_until(lambda: service.standin.reached("asked"), WAIT_S, "the holder")
        if how == "stop":
            assert service.stop() == 0
            return
        if how == "unload":
            service.cli("unload", "m", "--device", DEVICE)
        else:
            loader = next(p for p in procfs.descendants(service.keeper_pid) if "resvisor-loader" in procfs.command(p))
            procfs.kill(loader)
        answer = peer.receive()[0]
        assert answer.error.code == (rpc_pb2.ERROR_CANCELLED if how == "unload" else rpc_pb2.ERROR_INTERNAL), answer
    service.standin.open("asked")
    procfs.wait_until(lambda: service.standin.freed() == [1], WAIT_S, "what came too late freed")
    service.assert_healthy()


def test_a_holder_that_dies_takes_what_it_held(make_scripted):
    service = make_scripted("cuda-ipc")
    service.standin.loads(IPC_GOOD)
    load(service)
    with service.peer() as peer:
        reply, index_fd, _ = peer.attach("m", device=DEVICE)
        os.close(index_fd)
        (found,) = service.cli_json("devices")["devices"]
        procfs.kill(found["holder_pid"])
        assert peer.receive()[0].lease_revoke.lease_id == reply.lease_id
        assert (row(service).state, row(service).bytes) == ("FAILED", 0)
        peer.detach(reply.lease_id)
        assert load(service).state == "RESIDENT", "a new holder is there"
        assert service.standin.freed() == [], "what is gone is not freed"
    service.assert_healthy()


def test_a_holder_that_dies_ends_the_load_that_fills_its_arena(make_scripted):
    service = make_scripted("cuda-ipc")
    service.standin.loads("arena, = plan(); wait('filled'); done([arena], [])")
    with service.peer() as peer:
        peer.send(load_frame())
        procfs.wait_until(lambda: service.standin.reached("filled"), WAIT_S, "the loader")
        procfs.kill(service.cli_json("devices")["devices"][0]["holder_pid"])
        answer = peer.receive()[0]
        assert answer.error.code == rpc_pb2.ERROR_DEVICE, answer
    service.standin.loads(IPC_GOOD)
    assert load(service).state == "RESIDENT"
    service.assert_healthy()
