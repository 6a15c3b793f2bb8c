"""The three places where ComfyUI's loader is connected with the pool.

- comfy.utils.load_torch_file gives the pool's tensors. It is replaced right after comfy.utils was executed, so that
  modules which take it by name get ours.
- torch.nn.Module.load_state_dict keeps them: where a parameter has the same dtype and shape it becomes the pool's tensor
  instead of a copy. Everything else is copied as ever.
- comfy.utils.copy_to_param, which hook LoRAs write weights with, gives the module a private tensor first.

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

        On a GPU the weights are this process's own, so there everything counts.
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
        if management.get_torch_device().type != "cpu":
            return 0
        values = module.state_dict().values()
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
        weights, metadata = self.pool.load(str(path))
        self._annotate(weights, str(path))
        return (weights, metadata) if bound.get("return_metadata") else weights

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
            if path is None or more:
                return original(module, state_dict, strict=strict, assign=assign, **more)
            if not assign:
                try:
                    prepared = self._prepare(module, state_dict)
                except Exception as error:
                    self.report.fallback(f"parameters of {type(module).__name__}", f"{type(error).__name__}: {error}")
                    return original(module, state_dict, strict=strict, assign=assign)
                state_dict, assign = prepared, True
            result = original(module, state_dict, strict=strict, assign=assign)
            self._count(module, path)
            return result

        return load_state_dict

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

    def _fits(self, value: Any, target: Any) -> bool:
        return (
            value.dtype == target.dtype
            and target.device.type == "cpu"
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
