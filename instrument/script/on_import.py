"""Call a function right after a module is first imported: torch is instrumented when the script imports it, not before.

A script may set `OMP_NUM_THREADS` or `CUDA_VISIBLE_DEVICES` before `import torch`; importing it earlier would change what it does.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager


def call_after_import(
    name: str,
    action: Callable[[], None],
    *,
    within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Run `action` once, after module `name` has been imported `within` a context (now, if it has been already)."""
    if name in sys.modules:
        action()
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder) and each.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.wanted.append((action, within))


class _Finder(importlib.abc.MetaPathFinder):
    """Stays until the module has been imported: transformers asks for torch's spec long before anybody imports it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wanted: list[tuple[Callable[[], None], Callable[[], AbstractContextManager[None]]]] = []
        """Actions, in the order in which they are run, each with the context of its import."""
        self._searching = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for action, _ in self.wanted:
                action()


class _Loader(importlib.abc.Loader):
    """The module's own loader, then the actions."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with contextlib.ExitStack() as around:
            for _, within in self._finder.wanted:
                around.enter_context(within())
            self._loader.exec_module(module)
        self._finder.imported()


QUIET = "TORCH_CPP_LOG_LEVEL"


@contextlib.contextmanager
def quiet_allocator() -> Iterator[None]:
    """Import torch in this context: its C++ then keeps warnings about blocks older than a recording off the script's stderr.

    It reads the variable when it is loaded, so no child of the script ever inherits it.
    """
    name = QUIET
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(name, None)
