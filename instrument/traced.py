"""What torch.compile may trace of memopt: nothing of it is left in what it compiles. No other file of memopt is looked into."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memopt.errors import NotPossibleHere
from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.torch_internals import TRACE_RULES, jit_traces, skipped_files

_ROOMS = ("memopt", "instrument", "profiler", "enforcers", "estimators", "cli")


def unless_compiling(action: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs `action`, and is nothing while torch.compile or torch.jit traces whoever calls it.

    What looks at a ScriptModule's tensors while another is traced becomes part of that trace, and the tracer reads beyond its end.
    """

    def hook(*args: Any) -> None:
        if not (torch.compiler.is_compiling() or jit_traces()):
            action(*args)

    return hook


def or_while_compiling(action: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`action`, and `original` while torch.compile traces whoever calls it."""

    def either(*args: Any) -> Any:
        return original(*args) if torch.compiler.is_compiling() else action(*args)

    return either


def keep_out_of_compiler() -> None:
    """Let torch.compile step over every other file of memopt: after a graph break it would compile the hooks that it meets."""
    call_after_import(TRACE_RULES, _skip_files)


def _skip_files() -> None:
    house = Path(__file__).parent.parent
    files = {str(file) for room in _ROOMS for file in (house / room).rglob("*.py")} - {__file__}
    with contextlib.suppress(NotPossibleHere):
        skipped_files().update(files)
