"""A module with one piece of its source changed, as a module of its own: what a test of a rule must find."""

from __future__ import annotations

import inspect
import types
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """`module` with `old`, which must be there once, replaced by `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{source.count(old)} times in {module.__name__}: {old}"
    made = types.ModuleType(module.__name__)
    made.__file__ = module.__file__
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), made.__dict__)
    return made
