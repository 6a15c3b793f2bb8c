"""The three places where ComfyUI's loader is connected with the pool.

- comfy.utils.load_torch_file gives the pool's tensors. It is replaced right after comfy.utils was executed, so that
  modules which take it by name get ours.
- torch.nn.Module.load_state_dict keeps them: where a parameter has the same dtype, shape and device it becomes the pool's
  tensor instead of a copy. Everything else is copied as ever, buffers always.
- comfy.utils.copy_to_param, which hook LoRAs write weights with, gives the module a private tensor first.

With --gpu-only the models of a type whose device is a GPU lie there, and ComfyUI makes its modules there; otherwise, on the host.
On a GPU the pool's memory is read-only: a store is no private copy of a page but the end of the process' use of the GPU.

Each looks at what it replaces, and leaves it alone when that is not what it knows. Whatever goes wrong inside a hook, the
original is called instead; that is counted and logged.
"""

import collections
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .imports import after_import
from .pool import Pool
from .report import Report, log, size

SUFFIXES = (".safetensors", ".sft")

_LOAD = ["ckpt", "safe_load", "device", "return_metadata"]
_COPY = ["obj", "attr", "value"]
_STATE = ["self", "state_dict", "strict", "assign"]


class _Unfit(Exception):
    """This module is loaded the ordinary way; the text says why."""


class Hooks:
    """pool: None in a template, where nothing is loaded; its workers set it."""

    pool: Pool

    def __init__(self, pool: Pool | None, report: Report) -> None:
        if pool is not None:
            self.pool = pool
        self.report = report

    def install(self) -> None:
        after_import("comfy.utils", self._patch)
        after_import("comfy.model_management", self._patch_accounting)

    # ---- installing ----

    def _patch(self, module: ModuleType) -> None:
        import torch

        self._replace(module, "comfy.utils", "load_torch_file", _LOAD, self._load_torch_file)
        self._replace(torch.nn.Module, "torch.nn.Module", "load_state_dict", _STATE, self._load_state_dict)
        self._replace(module, "comfy.utils", "copy_to_param", _COPY, self._copy_to_param)

    def _replace(
        self, owner: Any, shown: str, name: str, known: list[str], make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        shown = f"{shown}.{name}"
        try:
            original = getattr(owner, name)
            found = list(inspect.signature(original).parameters)
        except (AttributeError, TypeError, ValueError) as error:
            self.report.problem(f"{shown}: {error}")
            return
        if found[: len(known)] != known:
            self.report.problem(f"{shown} takes ({', '.join(found)}), not ({', '.join(known)})")
            return
        replacement = functools.wraps(original)(make(original))
        replacement._resvisor = True  # type: ignore[attr-defined]
        setattr(owner, name, replacement)
        self.report.patch(shown)

    # ---- comfy.model_management.module_size ----

    def _patch_accounting(self, module: Any) -> None:
        """ComfyUI makes room in memory for models of this size: what the pool holds anyway is not to be made room for.

        What lies elsewhere than where ComfyUI computes is copied there, so that counts.
        """
        try:
            original = module.module_size
            found = list(inspect.signature(original).parameters)
            if found != ["module"]:
                raise TypeError(f"it takes ({', '.join(found)})")
        except (AttributeError, TypeError, ValueError) as error:
            self.report.note(f"ComfyUI counts pooled weights as its own: comfy.model_management.module_size: {error}")
            return

        @functools.wraps(original)
        def module_size(counted: Any) -> Any:
            whole = original(counted)
            try:
                return whole - self._pooled_bytes(module, counted)
            except Exception as error:
                self.report.fallback("counting", f"{type(error).__name__}: {error}")
                return whole

        module_size._resvisor = True  # type: ignore[attr-defined]
        module.module_size = module_size

    def _pooled_bytes(self, management: Any, module: Any) -> int:
        device = management.get_torch_device()
        values = [value for value in module.state_dict().values() if _same_device(value.device, device)]
        return sum(value.numel() * value.element_size() for value in values if self.pool.owner(value) is not None)

    def verify(self) -> None:
        """Before the worker is ready: is everything still ours, also where it was taken by name?"""
        import sys

        if not self.report.patched and not self.report.problems:
            self.report.problem("comfy.utils was never imported")
            return
        import torch

        places = [("comfy.utils", "load_torch_file"), ("comfy.utils", "copy_to_param")]
        places += [("comfy.clip_vision", "load_torch_file"), ("comfy.bg_removal_model", "load_torch_file")]
        for module, name in places:
            found = getattr(sys.modules.get(module), name, None)
            if found is not None and not getattr(found, "_resvisor", False) and f"comfy.utils.{name}" in self.report.patched:
                self.report.problem(f"{module}.{name} was replaced by {getattr(found, '__module__', '?')}")
        if "torch.nn.Module.load_state_dict" in self.report.patched:
            if not getattr(torch.nn.Module.load_state_dict, "_resvisor", False):
                self.report.problem("torch.nn.Module.load_state_dict was replaced after us")

    # ---- comfy.utils.load_torch_file ----

    def _load_torch_file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def load_torch_file(*args: Any, **kwargs: Any) -> Any:
            try:
                found = self._from_pool(signature, args, kwargs)
            except Exception as error:  # ComfyUI's own loader has its own words for what is wrong with the file
                self.report.fallback(str(args[0] if args else kwargs.get("ckpt")), f"{type(error).__name__}: {error}")
                found = None
            result = original(*args, **kwargs) if found is None else found
            self.report.loaded(str(args[0] if args else kwargs.get("ckpt")), pooled=found is not None)
            return result

        return load_torch_file

    def _from_pool(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """None = not a case for the pool."""
        bound = signature.bind(*args, **kwargs).arguments
        path, device = bound["ckpt"], bound.get("device")
        if set(bound) - set(_LOAD) or not str(path).lower().endswith(SUFFIXES):
            return None
        if device is not None and getattr(device, "type", device) != "cpu":
            return None
        self.pool.device = None if self._gpu_only() else "host"
        weights, metadata = self.pool.load(str(path))
        if self.pool.device is None:
            self._check_device(weights)
        self._annotate(weights, str(path))
        return (weights, metadata) if bound.get("return_metadata") else weights

    @staticmethod
    def _gpu_only() -> bool:
        """ComfyUI's modules are made where they compute. Without --gpu-only it moves them between memories by itself."""
        import sys

        return bool(getattr(getattr(sys.modules.get("comfy.cli_args"), "args", None), "gpu_only", False))

    @staticmethod
    def _check_device(weights: dict[str, Any]) -> None:
        """Pooled on another GPU than ComfyUI's is no use: all of it would be copied."""
        import sys

        management: Any = sys.modules.get("comfy.model_management")
        found = next((value.device for value in weights.values() if value.device.type != "cpu"), None)
        if found is None or management is None:
            return
        wanted = management.get_torch_device()
        if not _same_device(found, wanted):
            raise _Unfit(f"the pool has it on {found} and ComfyUI computes on {wanted}; set types.NAME.device, or CUDA_VISIBLE_DEVICES")

    @staticmethod
    def _annotate(weights: dict[str, Any], path: str) -> None:
        """Newer ComfyUI notes on each storage where it came from."""
        import sys

        annotate = getattr(sys.modules.get("comfy.storage"), "annotate_state_dict", None)
        if annotate is not None:
            annotate(weights, path)

    # ---- torch.nn.Module.load_state_dict ----

    def _load_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(module: Any, state_dict: Any, strict: bool = True, assign: bool = False, **more: Any) -> Any:
            path = self._first_owner(state_dict)
            if not assign:
                self._private_targets(module, state_dict)
            if path is None or more:
                return original(module, state_dict, strict=strict, assign=assign, **more)
            if not assign:
                try:
                    prepared = self._prepare(module, state_dict)
                except Exception as error:
                    self.report.fallback(f"parameters of {type(module).__name__}", f"{type(error).__name__}: {error}")
                    return original(module, state_dict, strict=strict, assign=assign)
                state_dict, assign = prepared, True
            else:
                state_dict = self._own_buffers(module, state_dict)
            result = original(module, state_dict, strict=strict, assign=assign)
            self._count(module, path)
            return result

        return load_state_dict

    def _private_targets(self, module: Any, state_dict: Any) -> None:
        """What was loaded before is copied over now: a page of the host is then copied for us, a device's memory is not."""
        try:
            names = [
                name
                for name, value in module.named_parameters(remove_duplicate=False)
                if name in state_dict and value.device.type != "cpu" and self.pool.owner(value) is not None
            ]
            for name in names:
                self._make_private(module, name)
        except Exception as error:
            self.report.fallback(f"parameters of {type(module).__name__}", f"{type(error).__name__}: {error}")

    def _first_owner(self, state_dict: Any) -> str | None:
        import torch

        try:
            for value in state_dict.values():
                if type(value) in (torch.Tensor, torch.nn.Parameter):
                    path = self.pool.owner(value)
                    if path is not None:
                        return path
        except Exception as error:
            self.report.fallback("a state_dict", f"{type(error).__name__}: {error}")
        return None

    def _prepare(self, module: Any, state_dict: Any) -> Any:
        """A state_dict for assign=True: pool tensors where they fit; else the module's own tensor, filled by a copy."""
        import torch

        own = dict(module.named_parameters(remove_duplicate=False))
        if len({id(value) for value in own.values()}) != len(own):
            raise _Unfit("it has tied parameters, and assigning would untie them")
        if any(type(value) is not torch.nn.Parameter for value in own.values()):
            raise _Unfit("it has parameters of a kind of their own")
        if any(vars(value) for value in own.values()):
            raise _Unfit("it has notes at its parameters, which would be lost")
        buffers = dict(module.named_buffers(remove_duplicate=False))
        if _renames(module) and not own.keys() | buffers.keys() >= state_dict.keys():
            raise _Unfit("it gives parameters other names while it loads")
        skipped = _custom_prefixes(module)
        prepared = collections.OrderedDict()
        for name, value in state_dict.items():
            target = own.get(name, buffers.get(name))
            if target is not None and isinstance(value, torch.Tensor) and (target.dim(), value.shape) == (0, (1,)):
                value = value[0]  # so torch takes it
            if target is None or not isinstance(value, torch.Tensor) or value.shape != target.shape:
                prepared[name] = value  # unexpected, or wrong: the original says so
            elif name.startswith(skipped):
                prepared[name] = value  # its module has a loader of its own, which decides
            elif name in own and self._fits(value, target):
                prepared[name] = value
            else:
                with torch.no_grad():
                    target.copy_(value)
                prepared[name] = target
        if hasattr(state_dict, "_metadata"):
            prepared._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return prepared

    def _own_buffers(self, module: Any, state_dict: Any) -> Any:
        """Of a state_dict that is assigned as it is: modules write to their buffers, which a device's memory does not take."""
        found = collections.OrderedDict()
        for name, _ in module.named_buffers(remove_duplicate=False):
            value = state_dict.get(name)
            if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" and self.pool.owner(value) is not None:
                found[name] = value.clone()
        if not found:
            return state_dict
        own = collections.OrderedDict((name, found.get(name, value)) for name, value in state_dict.items())
        if hasattr(state_dict, "_metadata"):
            own._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return own

    def _fits(self, value: Any, target: Any) -> bool:
        return (
            value.dtype == target.dtype
            and _same_device(value.device, target.device)
            and value.is_contiguous()
            and self.pool.owner(value) is not None
        )

    def _count(self, module: Any, path: str) -> None:
        try:
            shared = private = tensors = 0
            for value in module.parameters():
                count = value.numel() * value.element_size()
                if self.pool.owner(value) is not None:
                    shared, tensors = shared + count, tensors + 1
                elif value.device.type != "meta":
                    private += count
            self.report.filled(module, shared, private)
            log(
                f"{type(module).__name__} of {path}: {size(shared)} in {tensors} parameters in place, {size(private)} private"
            )
        except Exception as error:
            self.report.fallback("counting", f"{type(error).__name__}: {error}")

    # ---- comfy.utils.copy_to_param ----

    def _copy_to_param(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy_to_param(obj: Any, attr: str, value: Any) -> Any:
            try:
                self._make_private(obj, attr)
            except Exception as error:
                self.report.fallback(f"copy_to_param of {attr}", f"{type(error).__name__}: {error}")
            return original(obj, attr, value)

        return copy_to_param

    def _make_private(self, obj: Any, attr: str) -> None:
        import torch

        *path, name = attr.split(".")
        for part in path:
            obj = getattr(obj, part)
        before = getattr(obj, name)
        path_of = self.pool.owner(before)
        if path_of is None:
            return
        private = torch.nn.Parameter(torch.empty_like(before), requires_grad=before.requires_grad)
        setattr(obj, name, private)
        log(f"{attr} of {path_of} is written to: {size(private.numel() * private.element_size())} are private now")


def _same_device(one: Any, other: Any) -> bool:
    """A device without a number is the first: a worker of resvisor computes on one."""
    return one.type == other.type and (one.type == "cpu" or (one.index or 0) == (other.index or 0))


def _renames(module: Any) -> bool:
    """Functions are called with the state_dict first, as those that know names of before."""
    return any(getattr(child, "_load_state_dict_pre_hooks", None) for child in module.modules())


def _custom_prefixes(module: Any) -> tuple[str, ...]:
    """Where modules are that load their own tensors, as quantised ones do."""
    import torch

    found = []
    for name, child in module.named_modules():
        load = type(child)._load_from_state_dict
        if load is not torch.nn.Module._load_from_state_dict and not load.__module__.startswith("torch."):
            found.append(f"{name}." if name else "")
    return tuple(found)
