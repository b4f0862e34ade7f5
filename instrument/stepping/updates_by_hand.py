"""Does the script update its parameters without an optimizer of torch's (`p.data.add_` in a loop, fastai's own optimizers)?"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from memopt.instrument.live_objects import living
from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.stepping.gradient_reads import gradient_of, is_leaf
from memopt.instrument.torch_internals import DisableTorchDispatch, DisableTorchFunction

_WATCHED = 2
"""Parameters, the smallest."""
_MOST_LOOKS = 2
"""At all tensors, which takes long."""


class UpdatesByHand:
    """Asked when a backward call is over, from the first one on: a few parameters are compared with what they were then."""

    def __init__(self) -> None:
        self.seen = False
        """Has one of them changed? Before the first update, no."""
        self._looks = 0
        self._before: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def look(self) -> None:
        """Compare them, and at first choose them."""
        if self.seen:
            return
        guard = DisableTorchDispatch()
        try:
            with DisableTorchFunction():
                self.seen = any(
                    (now := parameter()) is not None and _has_changed(now, before)
                    for parameter, before in self._before
                )
                if not self._before and self._looks < _MOST_LOOKS:
                    self._looks += 1
                    few = sorted(_with_gradients(), key=Tensor.numel)[:_WATCHED]
                    self._before = [(weakref.ref(each), each.detach().clone()) for each in few]
        finally:
            del guard


def _has_changed(now: Tensor, before: Tensor) -> bool:
    """Other values: not of another type, or on another device."""
    is_comparable = now.dtype == before.dtype and now.device == before.device
    return is_comparable and not torch.equal(now.detach(), before)


def _with_gradients() -> list[Tensor]:
    """Parameters that have one."""
    return [
        each
        for each in living(Tensor)[0]
        if type(each) in PLAIN_TYPES
        and each.requires_grad
        and each.layout is torch.strided
        and not each.is_meta
        and each.numel()
        and is_leaf(each)
        and gradient_of(each) is not None
    ]
