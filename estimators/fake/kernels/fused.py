"""Functions that `torch.compile` fuses, on a GPU that is not there: elementwise and reduced temporaries never reach memory.

Inductor needs Triton to plan for a GPU, so what is compiled runs eagerly. Where no gradient is wanted (an optimizer's update, as in
torchao's low-bit optimizers) its program is a few kernels over whole chains: what such an op made and nobody holds when the
outermost compiled call returns is taken out again. What a forward pass saves for backward is kept: that is the eager run's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memopt.estimators.fake.torch_internals import reduction

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

_TAGS = (torch.Tag.pointwise, reduction)
_LIKEWISE = (
    "_to_copy", "to", "where", "index", "gather", "scatter", "repeat", "full", "zeros", "ones", "empty", "arange", "_foreach_",
    "constant_pad",
)  # fmt: skip
"""How the names of ops begin that inductor generates code for, though torch does not tag them."""


class Fusion:
    """Knows which rows a compiled call made that its kernels would keep in registers."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.depth = 0
        self.compiles = False
        """Whether the script compiles anything for the GPU."""
        self._rows: list[int] = []

    def fused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` as a compiled function runs."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self._take_out()

        return run

    def ran(self, func: Any, first: int) -> None:
        """An op made the rows from `first` on."""
        if torch.is_grad_enabled():
            return
        name = func._schema.name.partition("::")[2]
        if name.startswith(_LIKEWISE) or any(tag in func.tags for tag in _TAGS):
            self._rows += range(first, len(self.recorder.rows))

    def _take_out(self) -> None:
        held = self.recorder.held()
        for index in self._rows:
            row = self.recorder.rows[index]
            if index not in held and row.category != "workspace":
                row.size_bytes = 0
        self._rows.clear()
