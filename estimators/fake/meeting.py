"""Where gradients meet in backward: autograd's input buffer adds one into the other, a node's own formula makes a new tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memopt.instrument.accumulate import adds_in_place

if TYPE_CHECKING:
    from memopt.estimators.fake.record import FakeRecorder

_ADD = torch.ops.aten.add.Tensor


class Meetings:
    """Knows which node of the graph made a tensor of the backward pass."""

    def __init__(self, recorder: FakeRecorder) -> None:
        self.recorder = recorder
        self._makers: dict[int, int] = {}

    def born(self, row: int) -> None:
        """The storage in `row` is made now."""
        node = torch._C._current_autograd_node() if self.recorder.phase == "backward" else None
        if node is not None:
            self._makers[row] = node._sequence_nr()

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `func` on fake tensors is such an addition into its first operand."""
        if func is not _ADD or self.recorder.phase != "backward" or not isinstance(args[0], FakeTensor):
            return False
        return adds_in_place(args, kwargs) and not self._in_formula(args[0])

    def _in_formula(self, old: torch.Tensor) -> bool:
        """Both made by the node at work, which gives no input two gradients (as that of `x * x` does)."""
        node = torch._C._current_autograd_node()
        if node is None or self.recorder.row_of(old) is None:
            return False
        if self._makers.get(self.recorder.index_of(old)) != node._sequence_nr():
            return False
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) == len(edges)
