"""Kernels that no mode sees: regions that torch.compile has compiled, and Triton kernels that a script launches itself.

Who is running a region now, and what was written unseen. Their kernels allocate, reuse and overwrite memory behind every mode's back, so an op seen inside a region must not be made
again: its inputs may be something else by then. What a region does to its own arguments shows in their version counters.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.instrument.script.on_import import call_after_import
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.torch_internals import COMPILED, OUTPUT_GRAPH, Gone, call_compiler

log = logging.getLogger(__name__)


class CompiledRegions:
    """Counts the compiled regions that the training thread is in. Dynamo's output is wrapped as it leaves the compiler."""

    def __init__(self, thread: TrainingThread) -> None:
        self.depth = 0
        self.compiling = False
        """The compiler is running its own ops, on tensors without bytes."""
        self.has_compiled = False
        """Something was, in this process: its kernels run from now on."""
        self.compiles: Callable[[], None] | None = None
        """Told when something is compiled."""
        self.will_rewrite: Callable[[Tensor], None] | None = None
        """Told of every argument of a Triton kernel before it is launched: it may write there."""
        self.rewrote: Callable[[Tensor], None] | None = None
        """Told of every argument that a region has changed in place, or that a Triton kernel may have."""
        self._thread = thread
        self._original: Callable[..., Any] | None = None
        self._launch: Callable[..., Any] | None = None

    def install(self) -> None:
        """Be there when the script compiles something for the first time."""
        call_after_import(OUTPUT_GRAPH, self._patch)
        call_after_import("triton.runtime.jit", self._patch_triton)

    def remove(self) -> None:
        if self._launch is not None:
            sys.modules["triton.runtime.jit"].JITFunction.run = self._launch
            self._launch = None
        if self._original is not None:
            call_compiler.put(self._original)
            self._original = None

    def _patch(self) -> None:
        original = call_compiler.get()
        if isinstance(original, Gone):
            self.has_compiled = True
            self.depth += 1  # nothing tells of regions any more, so every op may be in one
            log.warning(
                "torch %s does not tell what torch.compile runs: %s are off", torch.__version__, COMPILED
            )
            return
        self._original = original

        @functools.wraps(original)
        def call_user_compiler(*args: Any, **kwargs: Any) -> Any:
            self.compiling = self.has_compiled = True
            if self.compiles is not None:
                self.compiles()
            try:
                return self._around(original(*args, **kwargs))
            finally:
                self.compiling = False

        call_compiler.put(call_user_compiler)

    def _patch_triton(self) -> None:
        function: Any = getattr(sys.modules["triton.runtime.jit"], "JITFunction", None)
        original = getattr(function, "run", None)
        if original is None:
            return
        self._launch = original

        @functools.wraps(original)
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if not tensors or self.depth or kwargs.get("warmup") or not self._thread.is_here:
                return original(kernel, *args, **kwargs)
            for tensor in tensors if self.will_rewrite is not None else ():
                self.will_rewrite(tensor)  # type: ignore[misc]
            try:
                return original(kernel, *args, **kwargs)
            finally:
                self._tell(tensors)

        function.run = run

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled, updated=())
        def region(*args: Any) -> Any:
            if not self._thread.is_here:
                return compiled(*args)
            before = [(a, a._version) for a in args if isinstance(a, Tensor) and not a.is_inference()]
            self.depth += 1
            try:
                return compiled(*args)
            finally:
                self.depth -= 1
                self._tell([a for a, version in before if a._version != version])

        return region

    def _tell(self, rewritten: list[Tensor]) -> None:
        for tensor in rewritten if self.rewrote is not None else ():
            self.rewrote(tensor)  # type: ignore[misc]
