"""What autograd does in place on real tensors, and not on subclasses of them or while a dispatch mode watches: sums where gradients
meet (InputBuffer::accumulate), and gradients put into zeros that a formula has made (FunctionsManual.cpp, isTensorSubclassLike)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memopt.instrument.ops import fills_its_memory
from memopt.instrument.torch_internals import current_node, storage_of, storage_use_count

aten = torch.ops.aten
_ADD = aten.add.Tensor
_PUTS = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.index_add.default: aten.index_add_.default,
}
_PUT_IDS = frozenset(map(id, _PUTS))
"""Overloads hash themselves in Python, which takes longer."""
_MADE_AND_FILLED = frozenset(
    map(id, (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default, aten.new_empty.default))
)


def is_made_and_filled(func: Any) -> bool:
    """Is it one of those with which formulas make the tensor into which they put gradients?"""
    return id(func) in _MADE_AND_FILLED


_AROUND_A_MODE = ("torch/_dynamo/eval_frame.py", "torch/_compile.py")
"""Frames between a dispatch mode and whoever called the op."""


Maker = Callable[[torch.Tensor], int | None]
"""Of a tensor, the sequence number of the backward node that made it; None where it is not known."""


def goes_into_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], maker: Maker) -> bool:
    """Whether the op of a backward pass that a mode is shown would without a mode have written into its first operand."""
    if func is _ADD:
        return not kwargs and len(args) == 2 and not torch.is_grad_enabled() and _sums(*args, maker)
    return id(func) in _PUT_IDS and not torch.is_grad_enabled() and _puts(args[0], maker)


def in_place(func: Any) -> Any:
    """The op that writes into the first operand of `func`, of one that `goes_into_first`."""
    return aten.add_.Tensor if func is _ADD else _PUTS[func]


def _puts(zeros: torch.Tensor, maker: Maker) -> bool:
    """What a gradient is put into was made by the same formula. That of an assignment to a part of a tensor (`CopySlices`) is given a copy of
    the gradient, which it reads afterwards: no zeros of its own."""
    node = current_node()
    if node is None or maker(zeros) != node._sequence_nr() or "CopySlices" in node.name():
        return False
    return called_by_engine()


def _sums(old: Any, new: Any, maker: Maker) -> bool:
    """The engine's own sum of two gradients that meet in an input buffer goes into the first where nobody else holds that.
    A node's own formula makes a new tensor."""
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return False
    if (
        old.shape != new.shape
        or old.dtype != new.dtype
        or old.layout is not torch.strided
        or not fills_its_memory(old)
    ):
        return False
    return _only_holder(old) and called_by_engine() and _came_from_engine(maker(old))


_HOLDERS = 4
"""Of a gradient in one input buffer only, while a mode looks at the sum: the buffer, the op's stack, Python and whoever counts."""


def _only_holder(tensor: torch.Tensor) -> bool:
    """Two input buffers may hold one gradient (`AddBackward` gives both the same), and a view its base."""
    storage = storage_of(tensor)
    count = getattr(tensor, "_use_count", None)
    return count is not None and count() <= _HOLDERS and storage_use_count(storage._cdata) <= 2


def called_by_engine() -> bool:
    """Not by somebody's own backward, nor by a hook."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code.co_name != "__torch_dispatch__":
        caller = caller.f_back
    caller = caller and caller.f_back
    while caller is not None and caller.f_code.co_filename.endswith(_AROUND_A_MODE):
        caller = caller.f_back
    return caller is None or caller.f_code.co_name == "_engine_run_backward"


def _came_from_engine(maker: int | None) -> bool:
    """Made by another node than the one at work, or by that for an input to which it gives two gradients (as `x * x` does)."""
    node = current_node()
    if maker is None or node is None or maker != node._sequence_nr():
        return maker is not None
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)
