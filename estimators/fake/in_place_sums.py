"""What autograd would write in place in backward, did no mode watch: which node made the tensor that is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memopt.estimators.fake.torch_internals import FakeTensor
from memopt.instrument.accumulate import goes_into_first, in_place
from memopt.instrument.torch_internals import current_node

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder


class Meetings:
    """Knows which node of the graph made a tensor of the backward pass."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._makers: dict[int, int] = {}

    def born(self, row: int) -> None:
        """The storage in `row` is made now."""
        node = current_node() if self.recorder.phase == "backward" else None
        if node is not None:
            self._makers[row] = node._sequence_nr()

    def as_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func` on fake tensors, or the op that writes into its first operand in its place."""
        if self.recorder.phase != "backward" or not isinstance(args[0], FakeTensor):
            return func
        return in_place(func) if goes_into_first(func, args, kwargs, self._maker) else func

    def _maker(self, tensor: torch.Tensor) -> int | None:
        known = self.recorder.row_of(tensor) is not None
        return self._makers.get(self.recorder.index_of(tensor)) if known else None
