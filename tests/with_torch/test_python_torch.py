"""The Python package with torch: values, views, memory, safe_open, a torch worker, types."""

import pathlib
import subprocess
import sys
import textwrap

import pytest
from harness import models
from harness.jobs import Jobs
from harness.python import python_programs, run_python
from harness.service import ROOT

SPECIAL = ("C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@pytest.fixture
def service(make_service, monkeypatch):
    monkeypatch.setitem(models.DTYPE_BYTES, "C64", 8)
    for name in SPECIAL[1:]:
        monkeypatch.setitem(models.DTYPE_BYTES, name, 1)
    made = make_service()
    models.write_every_dtype(made.models / "every.safetensors")
    models.write(made.models / "special.safetensors", [(name, name, (4, 3)) for name in SPECIAL])
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.config["models"] = {"plain": {"path": "plain.safetensors"}}
    return made.start()


COMPARE = """
    import json, sys, torch, safetensors, safetensors.torch, resvisor.torch
    def same(ours, theirs):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride(), (ours, theirs)
        assert ours.device == theirs.device and ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        if ours.numel():
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
"""


@pytest.mark.parametrize("name", ["every", "special"])
def test_load_file_equals_safetensors(service, name):
    code = COMPARE + """
    ours, theirs = resvisor.torch.load_file(sys.argv[1]), safetensors.torch.load_file(sys.argv[1])
    assert list(ours) == list(theirs)
    for name in theirs:
        same(ours[name], theirs[name])
    print(json.dumps(len(ours)))
    """
    assert run_python(service, code, service.models / f"{name}.safetensors") == (20 + len(SPECIAL) if name == "every" else len(SPECIAL))


def test_safe_open_equals_safetensors(service):
    code = COMPARE + """
    with resvisor.torch.safe_open(sys.argv[1], framework="pt", device="cpu") as ours, safetensors.safe_open(sys.argv[1], "pt") as theirs:
        assert ours.keys() == theirs.keys() and ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():
            same(ours.get_tensor(name), theirs.get_tensor(name))
        assert list(ours.get_tensors()) == list(theirs.get_tensors())
        a, b = ours.get_slice("large"), theirs.get_slice("large")
        assert a.get_shape() == b.get_shape() and a.get_dtype() == b.get_dtype()
        for index in ((slice(3, 9), slice(None)), (slice(None), 4), (5,), slice(10, 20)):
            assert torch.equal(a[index].view(torch.int32), b[index].view(torch.int32)), index
        kept = ours.get_tensor("large")
        wanted = theirs.get_tensor("large")
    same(kept, wanted)      # after the file is closed, too
    with resvisor.torch.safe_open(sys.argv[1], "np") as ours:
        print(json.dumps([str(ours.get_tensor("dtype.I16").dtype), ours.get_slice("dtype.U8")[1:].shape]))
    """
    assert run_python(service, code, service.models / "every.safetensors") == ["int16", [2, 5]]


def test_tensors_lie_in_the_pool_and_writes_stay_private(service):
    code = """
        import gc, json, sys, torch, resvisor, resvisor.torch
        path = sys.argv[1]
        lease = resvisor.connect().attach("plain")
        tensors = lease.torch()
        assert all(t.data_ptr() == lease[n].address and t.data_ptr() % 256 == 0 for n, t in tensors.items())
        total = sum(int(t.view(torch.uint8).sum()) for t in tensors.values())
        before = lease.copied_bytes()
        tensors["block.0.weight"].zero_()
        lease.verify()
        again = resvisor.torch.load_file(path)["block.0.weight"]
        print(json.dumps([before, lease.copied_bytes(), bool(again.view(torch.uint8).any())]))
    """
    before, copied, untouched = run_python(service, code, service.models / "plain.safetensors")
    assert before == 0 and 1024 * 1024 <= copied <= 1024 * 1024 + 8192 and untouched


def test_memory_lives_as_long_as_a_parameter_made_from_it(service):
    code = """
        import gc, json, sys, torch, resvisor, resvisor.torch
        def mapped():
            return sum("memfd:" in line for line in open("/proc/self/maps")) / 2
        module = torch.nn.Linear(64, 64, bias=False)
        state = {"weight": resvisor.torch.load_file(sys.argv[1])["block.2.weight"][:4096].view(64, 64)}
        pointer, wanted = state["weight"].data_ptr(), state["weight"].clone()
        module.load_state_dict(state, assign=True)
        del state; gc.collect()
        held = mapped()
        assert module.weight.data_ptr() == pointer and torch.equal(module.weight.view(torch.int32), wanted.view(torch.int32))
        view = module.weight.data[3:5]
        del module; gc.collect()
        still = mapped()
        del view
        print(json.dumps([held, still, mapped()]))
    """
    assert run_python(service, code, service.models / "plain.safetensors") == [1, 1, 0]


def test_the_interpreter_ends_with_tensors_alive(service):
    code = """
        import sys, torch, resvisor, resvisor.torch
        torch.kept = [resvisor.torch.load_file(sys.argv[1]), torch.from_dlpack(resvisor.connect().attach("plain")["block.1.weight"])]
    """
    result = run_python(service, code, service.models / "plain.safetensors", check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_dlpack_of_dtypes_that_numpy_does_not_have(service):
    code = """
        import json, sys, torch, resvisor
        lease = resvisor.connect().attach(sys.argv[1])
        from safetensors.torch import load_file
        wanted = load_file(sys.argv[1])
        names = ("dtype.BF16", "dtype.I32", "dtype.F8_E4M3", "dtype.F8_E5M2")
        for name in names:
            tensor = torch.from_dlpack(lease[name])
            assert tensor.data_ptr() == lease[name].address
            assert tensor.dtype == wanted[name].dtype
            assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8))
        print(json.dumps(str(torch.from_dlpack(lease["dtype.BF16"]).dtype)))
    """
    assert run_python(service, code, service.models / "every.safetensors") == "torch.bfloat16"


def test_fallback_reads_the_file(make_service):
    service = make_service()  # not started
    models.write_every_dtype(service.models / "every.safetensors")
    code = COMPARE + """
    import logging, resvisor
    logging.disable(logging.CRITICAL)
    theirs = safetensors.torch.load_file(sys.argv[1])
    ours = resvisor.torch.load_file(sys.argv[1], "cpu", fallback="file")
    for name in theirs:
        same(ours[name], theirs[name])
    with resvisor.torch.safe_open(sys.argv[1], "pt", fallback="file") as file:
        same(file.get_tensor("large"), theirs["large"])
    print(json.dumps(resvisor.fallbacks()))
    """
    assert run_python(service, code, service.models / "every.safetensors") == {"NOT_RUNNING": 2}


def test_other_devices_get_copies(service):
    code = """
        import json, sys, resvisor.torch
        tensors = resvisor.torch.load_file(sys.argv[1], device="meta")
        print(json.dumps([sorted({str(t.device) for t in tensors.values()}), sum("memfd:" in line for line in open("/proc/self/maps"))]))
    """
    assert run_python(service, code, service.models / "plain.safetensors") == [["meta"], 0]


def test_a_torch_worker(make_service):
    service = make_service()
    models.write(service.models / "m.safetensors", [("w", "U8", (8, 8))])
    (service.folder / "worker.py").write_text(textwrap.dedent("""
        import torch
        from resvisor.worker import Worker

        for job in Worker.open():
            with job:
                weight = job.models["m"].torch()["w"]
                job.add_output("sum", str(int(weight.to(torch.int64).sum())), "text/plain")
    """))  # fmt: skip
    service.config["models"] = {"m": {"path": "m.safetensors"}}
    service.config["types"] = {"t": {"kind": "python", "python": sys.executable, "script": "worker.py", "models": ["m"]}}
    service.start()
    service.wait_ready(60)
    wanted = sum(models.write(service.folder / "copy.safetensors", [("w", "U8", (8, 8))])["w"])
    with Jobs(service) as jobs:
        assert jobs.output(jobs.run_done("t")) == str(wanted).encode()


def test_programs_of_the_document_run(service, monkeypatch):
    programs = python_programs("torch")
    assert len(programs) == 2
    (service.folder / "model.safetensors").symlink_to(service.models / "every.safetensors")
    monkeypatch.chdir(service.folder)
    for program in programs:
        assert run_python(service, program + "\nprint(len(weights))") == 24


def test_types_are_strict(tmp_path):
    """mypy --strict on the package, and on a program that uses it as an installed one (py.typed)."""
    package = ROOT / "worker" / "python"
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent("""
        import numpy
        import torch
        import resvisor
        import resvisor.numpy
        import resvisor.torch
        from resvisor.worker import Worker

        with resvisor.connect(timeout=2) as connection, connection.attach("m", mapping="shared", progress=lambda a, b: a < b) as lease:
            name: str = next(iter(lease))
            tensor: torch.Tensor = lease[name].torch()
            size: int = lease.copied_bytes() + lease[name].nbytes
        loaded: dict[str, torch.Tensor] = resvisor.torch.load_file("f", fallback="file")
        for job in Worker.open(["m"]):
            with job:
                job.progress(1, 2)
                job.add_output("x", b"")
            done: bool = job.ended     # reachable: `with job` may swallow an exception
    """))  # fmt: skip
    for target in (str(package / "resvisor"), str(program)):
        result = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), target],
            cwd=package, env={"MYPYPATH": str(package), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    assert pathlib.Path(package / "resvisor" / "py.typed").exists()


# ---- what a CUDA tensor goes through. There is no GPU here: the memory is the host's, and torch takes it by the same capsule ----


def test_torch_takes_every_dtype_by_dlpack_of_bytes(service):
    code = COMPARE + """
    import gc, resvisor
    from resvisor._library import library
    from resvisor.torch import _by_dlpack, _DTYPES, from_tensor
    checked = 0
    for path in sys.argv[1:]:
        lease = resvisor.connect().attach(path)
        for tensor in lease.tensors():
            if tensor.nbytes:
                ours = _by_dlpack(tensor, _DTYPES[tensor.dtype])
                assert ours.data_ptr() == tensor.address == ours.untyped_storage().data_ptr()
                same(ours, from_tensor(tensor))
                checked += 1
                del ours
        gc.collect()
        assert library().rv_lease_dlpack_count(lease._held().pointer) == 0
    print(json.dumps(checked > 20))
    """
    assert run_python(service, code, service.models / "every.safetensors", service.models / "special.safetensors")


def test_a_view_keeps_the_lease_when_everything_else_is_gone(service):
    code = """
        import gc, json, torch, resvisor
        from resvisor.torch import _by_dlpack
        def load():
            with resvisor.connect() as connection, connection.attach("plain") as lease:
                tensor = next(lease.tensors())
                return torch.nn.Parameter(_by_dlpack(tensor, torch.float32), requires_grad=False)[1:], tensor.tobytes()
        view, wanted = load()
        gc.collect()
        with resvisor.connect() as other, other.attach("plain") as lease:
            pass
        assert view.contiguous().numpy().tobytes() == wanted[len(wanted) - view.nbytes:]
        print(json.dumps(True))
    """
    assert run_python(service, code)
    assert service.model("plain").leases == 0


MAPPED = """
    import json, sys, torch, resvisor, resvisor.torch, types
    import resvisor._lease as lease
    # a torch that has a GPU, as far as it is asked
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(uuid=UUID)
    moved = []
    resvisor.torch._move_to = lambda target: lambda tensor: moved.append(str(target)) or tensor
"""


@pytest.mark.parametrize("uuid", ["fa4ec0da-0000-4000-8000-000000000000", "GPU-fa4ec0da-0000-4000-8000-000000000000"])
def test_a_cuda_device_that_the_pool_does_not_have_is_an_error_or_a_counted_fallback(service, uuid):
    code = f"UUID = {uuid!r}" + textwrap.dedent(MAPPED + """
    try:
        resvisor.torch.load_file(sys.argv[1], device="cuda")
        raise SystemExit("no error")
    except resvisor.NoSuchDevice as error:
        assert 'fallback="host" copies' in str(error), error
    assert not resvisor.fallbacks()
    found = resvisor.torch.load_file(sys.argv[1], device="cuda:0", fallback="host")
    assert len(found) == len(moved) and set(moved) == {"cuda:0"}
    print(json.dumps(resvisor.fallbacks()))
    """)
    assert run_python(service, code, service.models / "plain.safetensors") == {"NO_SUCH_DEVICE": 1}


@pytest.mark.devices
def test_load_file_takes_the_pools_device_by_its_uuid(make_service, make_devices):
    """All but torch's own part: what it would take the pointers of is not memory here."""
    made = make_service(env=make_devices(memory="1GiB", count=2).env)
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.config["models"] = {"plain": {"path": "plain.safetensors"}}
    made.start()
    code = 'UUID = "fa4ec0da-0000-4000-8000-000000000001"' + textwrap.dedent(MAPPED + """
    taken = []
    resvisor.torch._by_dlpack = lambda tensor, dtype: taken.append((tensor.device, tensor.__dlpack_device__(), dtype)) or tensor
    found = resvisor.torch.load_file(sys.argv[1], device="cuda:1")
    assert {one[:2] for one in taken} == {("cuda:1", (2, 1))} and set(moved) == {"cpu"}
    assert not resvisor.fallbacks()
    with resvisor.torch.safe_open(sys.argv[1], "pt", device="cuda:1") as opened:
        assert opened.lease.device == "cuda:1" and opened.get_tensor(opened.keys()[0]).device == "cuda:1"
    try:
        resvisor.torch.load_file(sys.argv[1], device="cuda:0")  # torch and libresvisor count differently: never silently another one
    except resvisor.DeviceFailed as error:
        print(json.dumps(str(error)))
    """)
    assert "as number 1 of type 2" in run_python(made, code, made.models / "plain.safetensors")


@pytest.mark.devices
def test_a_comfyui_worker_gives_back_what_nobody_uses_on_its_device(make_service, make_devices):
    """Its pool keeps the lease as long as any tensor lives. Tensors are stand-ins that keep their capsule: torch has no GPU here."""
    made = make_service(env=make_devices(memory="1GiB").env)
    models.write_plain(made.models / "plain.safetensors", mib=8)
    made.start()
    code = """
        import gc, json, sys, types, resvisor, resvisor.torch
        from resvisor._dlpack import capsule
        from resvisor.comfyui.pool import Pool

        class Tensor:
            def __init__(self, tensor):
                self.capsule, self.address = capsule(tensor._mapping.pointer, tensor.name, 0), tensor.address
                self.device = types.SimpleNamespace(type="cuda")
            def untyped_storage(self):
                return types.SimpleNamespace(data_ptr=lambda: self.address)
        resvisor.torch._by_dlpack = lambda tensor, dtype: Tensor(tensor)
        pool = Pool(resvisor.connect())
        pool.device = "cuda:0"

        found, _ = pool.load(sys.argv[1])
        assert all(pool.owner(value) == sys.argv[1] for value in found.values())
        again, _ = pool.load(sys.argv[1])          # the same mapping
        assert [a.address for a in again.values()] == [b.address for b in found.values()] and len(pool._held) == 1
        kept = next(iter(found.values()))
        del found, again
        gc.collect()
        pool.sweep()
        assert pool.owner(kept) and len(pool._held) == 1 and pool.usage()[0] > 0
        del kept
        gc.collect()
        pool.sweep()
        print(json.dumps([len(pool._held), len(pool._owners), pool.usage()]))
    """
    assert run_python(made, code, made.models / "plain.safetensors") == [0, 0, [0, 0]]
    assert made.status().models[0].leases == 0
