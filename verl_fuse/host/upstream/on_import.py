"""Runs a callback right after a module has been imported, without importing the module.

Invariants (tests/unit/host/test_on_import.py):
- registering costs no import; an already imported module is handled at once;
- each callback runs exactly once, in registration order, before the importing statement returns;
- an exception of a callback reaches the importing code, and the next try to import the module calls the callback again.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

Callback = Callable[[ModuleType], None]

_callbacks: dict[str, list[Callback]] = {}


class _CallbackLoader(Loader):
    """A loader that calls the real loader, then runs the callbacks of that module."""

    def __init__(self, loader: Loader, name: str):
        self._loader = loader
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._loader, attribute)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        waiting = _callbacks.get(self._name, [])
        while waiting:
            waiting[0](module)
            del waiting[0]
        _callbacks.pop(self._name, None)


class _Finder(MetaPathFinder):
    """A finder that wraps the loader of modules with callbacks; every other import passes through."""

    _searching: set[str] = set()  # noqa: RUF012

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _callbacks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader, fullname)
        return spec


def on_import(name: str, callback: Callback) -> None:
    """Call `callback(module)` once `name` is imported, or now if the module already is imported."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _callbacks.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
