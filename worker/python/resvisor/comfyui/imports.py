"""Calls a function when a module has been executed for the first time, before anybody can take names from it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Function = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        function = self.functions.get(name)
        if function is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                # The hook is bound to the execution: a mere look at the spec (find_spec("torch")) must not spend it.
                _call_after(spec, function)
                return spec  # type: ignore[no-any-return]
        return None


def _call_after(spec: importlib.machinery.ModuleSpec, function: Function) -> None:
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        function(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader object


_finder = _Finder()
_late_is_fine = False


def allow_late() -> None:
    """In a process that was forked from a template modules are there already, and were made to be changed then."""
    global _late_is_fine
    _late_is_fine = True


def after_import(name: str, function: Function) -> None:
    """function(module) must not raise."""
    if name in sys.modules:
        if _late_is_fine:
            function(sys.modules[name])
            return
        raise RuntimeError(f"{name} is imported already")
    _finder.functions[name] = function
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
