"""The hooks alone, on modules and pools made up for it: what is kept, what is copied, and when they stand back."""

import collections
import inspect
import sys
import types

import pytest
import torch
from harness.python import PACKAGE

sys.path.insert(0, str(PACKAGE))

from resvisor.comfyui.hooks import Hooks  # noqa: E402
from resvisor.comfyui.report import Report  # noqa: E402


class FakePool:
    def __init__(self):
        self.addresses = {}
        self.fail = None

    def take(self, tensor):
        self.addresses[tensor.untyped_storage().data_ptr()] = "a.safetensors"
        return tensor

    def owner(self, tensor):
        return self.addresses.get(tensor.untyped_storage().data_ptr())

    def load(self, path):
        if self.fail:
            raise self.fail
        return {"weight": torch.ones(2)}, {"a": "b"}


@pytest.fixture
def hooks():
    return Hooks(FakePool(), Report())


@pytest.fixture
def load(hooks):
    return hooks._load_state_dict(torch.nn.Module.load_state_dict)


def test_what_fits_is_kept_and_the_rest_is_copied(hooks, load):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    other = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    given = other.state_dict()
    given["0.weight"] = hooks.pool.take(torch.randn(8, 8))
    given["0.bias"] = hooks.pool.take(torch.randn(8, dtype=torch.float64))
    bias = module[0].bias.data_ptr()
    result = load(module, given)
    assert not result.missing_keys and not result.unexpected_keys
    assert module[0].weight.data_ptr() == given["0.weight"].data_ptr() and module[0].weight.requires_grad
    assert module[0].bias.data_ptr() == bias and module[0].bias.dtype == torch.float32
    assert torch.equal(module[0].bias, given["0.bias"].float())
    assert module[1].running_mean.data_ptr() != given["1.running_mean"].data_ptr()


def test_results_and_errors_are_those_of_torch(hooks, load):
    good = {"weight": hooks.pool.take(torch.randn(4, 4)), "bias": torch.zeros(4)}
    for change in ({"extra": torch.zeros(1)}, {"bias": torch.zeros(5)}):
        given = {**good, **change}
        with pytest.raises(RuntimeError) as expected:
            torch.nn.Linear(4, 4).load_state_dict(given)
        with pytest.raises(RuntimeError) as found:
            load(torch.nn.Linear(4, 4), given)
        assert str(found.value) == str(expected.value)
    found = load(torch.nn.Linear(4, 4), {"weight": good["weight"], "more": torch.zeros(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["more"])


def test_tied_parameters_stay_tied(hooks, load):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    weight = hooks.pool.take(torch.randn(4, 4))
    load(module, {"0.weight": weight, "1.weight": weight})
    assert module[0].weight is module[1].weight and torch.equal(module[0].weight, weight)
    assert hooks.report.fallbacks == 1


def test_without_pool_tensors_nothing_changes(hooks, load):
    module = torch.nn.Linear(4, 4)
    address = module.weight.data_ptr()
    load(module, torch.nn.Linear(4, 4).state_dict())
    assert module.weight.data_ptr() == address


def test_versions_of_a_state_dict_are_kept(hooks, load):
    seen = []

    class Versioned(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    given = Versioned(4, 4).state_dict()
    metadata = given._metadata
    given = collections.OrderedDict((name, hooks.pool.take(value.clone())) for name, value in given.items())
    given._metadata = metadata
    load(Versioned(4, 4), given)
    assert seen == [2]


def test_a_written_parameter_becomes_private_first(hooks):
    module = torch.nn.Linear(4, 4)
    pooled = hooks.pool.take(torch.ones(4, 4))
    module.weight = torch.nn.Parameter(pooled)

    def original(obj, attr, value):
        getattr(obj, attr).data.copy_(value)

    hooks._copy_to_param(original)(module, "weight", torch.zeros(4, 4))
    assert torch.equal(pooled, torch.ones(4, 4)) and torch.equal(module.weight, torch.zeros(4, 4))


def original_load(ckpt, safe_load=False, device=None, return_metadata=False):
    return "ComfyUI's own"


def test_only_safetensors_on_the_cpu_come_from_the_pool(hooks):
    load = hooks._load_torch_file(original_load)
    assert set(load("a.safetensors")) == {"weight"}
    assert load("a.SFT", return_metadata=True)[1] == {"a": "b"}
    assert set(load("a.safetensors", device=torch.device("cpu"))) == {"weight"}
    assert load("a.ckpt") == "ComfyUI's own"
    assert load("a.safetensors", device=torch.device("cuda")) == "ComfyUI's own"
    assert hooks.report.fallbacks == 0


def test_what_the_pool_refuses_comfyui_loads(hooks):
    hooks.pool.fail = ValueError("damaged")
    assert hooks._load_torch_file(original_load)("a.safetensors") == "ComfyUI's own"
    assert hooks.report.fallbacks == 1


def test_an_unknown_function_is_left_alone(hooks):
    def load_torch_file(path, mode):
        return path

    module = types.SimpleNamespace(load_torch_file=load_torch_file)
    hooks._replace(module, "comfy.utils", "load_torch_file", ["ckpt", "safe_load"], lambda original: original)
    hooks._replace(module, "comfy.utils", "copy_to_param", ["obj"], lambda original: original)
    assert module.load_torch_file is load_torch_file
    assert hooks.report.problems[0] == "comfy.utils.load_torch_file takes (path, mode), not (ckpt, safe_load)"
    assert "copy_to_param" in hooks.report.problems[1]


def test_the_hooks_know_this_torch(hooks):
    known = list(inspect.signature(torch.nn.Module.load_state_dict).parameters)
    assert known[:4] == ["self", "state_dict", "strict", "assign"]


def test_a_scalar_from_a_list_of_one_keeps_its_dtype(hooks, load):
    module = torch.nn.Linear(4, 4)
    module.scale = torch.nn.Parameter(torch.zeros(()))
    given = {"weight": hooks.pool.take(torch.randn(4, 4)), "bias": torch.zeros(4), "scale": torch.tensor([2.5], dtype=torch.float64)}
    load(module, given)
    assert module.scale.dtype == torch.float32 and module.scale.item() == 2.5 and hooks.pool.owner(module.weight)


def test_parameters_of_other_names_in_the_file_are_copied(hooks, load):
    """Such as the two of weight_norm, which old files name in another way: assigned, they would have the file's dtype."""
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4, dtype=torch.float64))
    given = {"weight_g": torch.ones(4, 1), "weight_v": hooks.pool.take(torch.randn(4, 4)), "bias": torch.zeros(4)}
    result = load(module, given)
    assert not result.missing_keys and not result.unexpected_keys and hooks.report.fallbacks == 1
    assert {value.dtype for value in module.parameters()} == {torch.float64}


def test_notes_at_parameters_stay(hooks, load):
    module = torch.nn.Linear(4, 4)
    module.weight.note = "of a pack"
    load(module, {"weight": hooks.pool.take(torch.randn(4, 4)), "bias": torch.zeros(4)})
    assert module.weight.note == "of a pack" and hooks.report.fallbacks == 1


# ---- on a device: torch's "meta" device stands for it, whose tensors have no memory at all ----


class DevicePool(FakePool):
    """Knows its tensors by identity: on meta all addresses are 0."""

    def __init__(self):
        super().__init__()
        self.mine = []

    def take(self, tensor):
        self.mine.append(tensor)
        return tensor

    def owner(self, tensor):
        return "a.safetensors" if any(tensor is mine for mine in self.mine) else None


@pytest.fixture
def on_device():
    return Hooks(DevicePool(), Report())


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_buffers_of_an_assigned_state_dict_are_the_modules_own(on_device):
    module = torch.nn.BatchNorm1d(8, device="meta")
    weight, mean = on_device.pool.take(meta(8)), on_device.pool.take(meta(8))
    seen = {}

    def original(module, state_dict, strict, assign):
        seen.update(state_dict)
        return torch.nn.Module.load_state_dict(module, state_dict, strict=strict, assign=assign)

    on_device._load_state_dict(original)(module, {"weight": weight, "running_mean": mean}, strict=False, assign=True)
    assert seen["weight"] is weight
    assert seen["running_mean"] is not mean and seen["running_mean"].shape == mean.shape


def test_nothing_is_copied_over_pool_memory_of_a_device(on_device):
    module = torch.nn.Linear(4, 4, bias=False, device="meta")
    before = on_device.pool.take(module.weight)
    on_device._load_state_dict(torch.nn.Module.load_state_dict)(module, {"weight": meta(4, 4)})
    assert module.weight is not before and on_device.pool.owner(module.weight) is None
    assert on_device.report.fallbacks == 0


def test_parameters_are_kept_only_on_their_own_device(on_device):
    value = on_device.pool.take(meta(4, 4))
    assert on_device._fits(value, torch.nn.Parameter(meta(4, 4)))
    assert not on_device._fits(value, torch.nn.Parameter(torch.zeros(4, 4)))
    assert not on_device._fits(value, torch.nn.Parameter(meta(4, 4, dtype=torch.float16)))


def test_files_are_asked_for_on_the_host_unless_comfyui_is_gpu_only(on_device, monkeypatch):
    asked = []
    on_device.pool.load = lambda path: asked.append(on_device.pool.device) or ({"weight": meta(2)}, None)
    signature = inspect.signature(lambda ckpt, safe_load=False, device=None, return_metadata=False: None)
    monkeypatch.delitem(sys.modules, "comfy.cli_args", raising=False)
    on_device._from_pool(signature, ("a.safetensors",), {})
    options = types.SimpleNamespace(args=types.SimpleNamespace(gpu_only=True))
    monkeypatch.setitem(sys.modules, "comfy.cli_args", options)
    management = types.SimpleNamespace(get_torch_device=lambda: torch.device("meta"))
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    on_device._from_pool(signature, ("a.safetensors",), {})
    assert asked == ["host", None]
    management.get_torch_device = lambda: torch.device("cuda:1")
    with pytest.raises(Exception, match="ComfyUI computes on cuda:1"):
        on_device._from_pool(signature, ("a.safetensors",), {})


def test_what_the_pool_holds_where_comfyui_computes_is_not_counted(on_device):
    module = torch.nn.Linear(4, 4, device="meta")
    states = module.state_dict()
    module.state_dict = lambda: states
    on_device.pool.take(states["weight"])
    for where, pooled in (("meta", 64), ("cpu", 0)):
        management = types.SimpleNamespace(get_torch_device=lambda where=where: torch.device(where))
        assert on_device._pooled_bytes(management, module) == pooled
