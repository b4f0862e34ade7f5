"""Who looks at gradients: every read and setting of `tensor.grad` from Python, and every `zero_grad`, while installed.

`grad` is a property of the C base class; a property of `torch.Tensor` goes before it. Code inside torch reads the same way.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from memopt.instrument.torch_internals import TensorBase

_GRAD: Any = TensorBase.__dict__["grad"]
_HOUSE = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).parent
_COMPILER = (
    str(_TORCH / "_dynamo" / "variables" / "builder.py"),
    str(_TORCH / "_subclasses" / "meta_utils.py"),
)
"""torch.compile looks whether each tensor that a region is given has a gradient. What a region computes from one is a look of its own."""
_EXPECTED = (
    *(f"{_HOUSE / room}/" for room in ("instrument", "profiler", "enforcers")),
    f"{_TORCH / 'optim'}/",
    str(_TORCH / "nn" / "modules" / "module.py"),
    *_COMPILER,
)
"""Code that may look at gradients without making anything of them that a training loop would see."""


def gradient_of(tensor: Tensor) -> Tensor | None:
    """`tensor.grad`, without anybody being told."""
    found: Tensor | None = _GRAD.__get__(tensor)
    return found


def kept_gradient(tensor: Tensor) -> Tensor | None:
    """The gradient that `tensor` holds: a leaf's, be it frozen since, or one that `retain_grad()` asked for. Of others torch only warns."""
    return gradient_of(tensor) if tensor.retains_grad or is_leaf(tensor) else None


def is_leaf(tensor: Tensor) -> bool:
    """`tensor.is_leaf`. No, of a view that autograd refuses since its base was written: asking raises then."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def let_go(tensor: Tensor) -> None:
    """`tensor.grad = None`, without anybody being told."""
    _GRAD.__set__(tensor, None)


def give_back(tensor: Tensor, gradient: Tensor) -> None:
    """`tensor.grad = gradient`, without anybody being told."""
    _GRAD.__set__(tensor, gradient)


class _Told(property):
    """A property in the place of the C base class's `grad`: torch (2.11's dynamo, as it is imported) asks whose such an attribute is."""

    __objclass__ = Tensor


class Reader(Protocol):
    """Who is told."""

    def read(self, tensor: Tensor, where: str) -> None:
        """The script, or a library that it uses, is about to read `tensor.grad` at `where` (`train.py:41`)."""

    def set(self, tensor: Tensor) -> None:
        """`tensor.grad` is about to be set."""

    def zeroed(self, tensors: Iterable[Tensor], *, to_none: bool) -> None:
        """`zero_grad` is about to run on these."""


class GradientReads:
    """Tells `reader`, between `install` and `remove`; several may be told at once."""

    def __init__(self, reader: Reader, *, everywhere: bool = False) -> None:
        """`everywhere`: tell of torch's own looks, too, but for those of the compiler."""
        self.reader = reader
        self.expected = _COMPILER if everywhere else _EXPECTED

    def install(self) -> None:
        if not _installed:
            _watch()
        if self not in _installed:
            _installed.append(self)

    def remove(self) -> None:
        if self in _installed:
            _installed.remove(self)
            if not _installed:
                _watch_no_more()


_installed: list[GradientReads] = []
_zero_grads: list[tuple[Any, Any]] = []
"""Classes, and what their `zero_grad` was."""


def _watch() -> None:
    torch.Tensor.grad = _Told(_read, _write, _delete)  # type: ignore[assignment]
    _watch_zero_grad(torch.optim.Optimizer, lambda o: [p for g in o.param_groups for p in g["params"]])
    _watch_zero_grad(torch.nn.Module, lambda module: module.parameters())


def _watch_no_more() -> None:
    del torch.Tensor.grad
    for owner, original in _zero_grads:
        owner.zero_grad = original
    _zero_grads.clear()


def _read(tensor: Tensor) -> Tensor | None:
    frame = sys._getframe(1)
    name = frame.f_code.co_filename
    for each in (*_installed,):
        if not name.startswith(each.expected):
            each.reader.read(tensor, f"{name.rpartition(os.sep)[2]}:{frame.f_lineno}")
    return gradient_of(tensor)


def _write(tensor: Tensor, gradient: Tensor | None) -> None:
    for each in (*_installed,):
        each.reader.set(tensor)
    _GRAD.__set__(tensor, gradient)


def _delete(tensor: Tensor) -> None:
    for each in (*_installed,):
        each.reader.set(tensor)
    _GRAD.__delete__(tensor)


def _watch_zero_grad(owner: Any, tensors: Any) -> None:
    original = owner.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for each in (*_installed,):
            each.reader.zeroed(tensors(self), to_none=set_to_none)
        original(self, set_to_none)

    _zero_grads.append((owner, original))
    owner.zero_grad = zero_grad
