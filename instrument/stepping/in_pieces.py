"""Optimizers whose step on slices of their parameters gives the same bits as their step on all, and that step.

An element of a parameter is updated from its own gradient and state alone in all of `ELEMENTWISE`. Whether a kernel also gives the same
bits at the end of a slice as in its middle is found out on this machine, for this optimizer with its options, before it is relied on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.instrument.ops import PLAIN_TYPES, is_shared
from memopt.instrument.stepping.single_parameter_step import (
    PROVED,
    Group,
    is_stepped,
    not_its_own_step,
    parameters_of,
)
from memopt.instrument.stepping.torchs_step import any_group_is
from memopt.pieces import ALIGNED, Uncut, cut

ELEMENTWISE = PROVED - {torch.optim.Adafactor}
"""Adafactor's factors are means over rows and columns."""
_TRIED = (0, 2 * ALIGNED, 4 * ALIGNED, 4 * ALIGNED + 907)
_TRIED_STEPS = 3
CLOSURE = "the step computes the loss itself, in a closure"

State = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Elements `start` to `stop` of a parameter, in the order in which they lie in memory."""

    parameter: Tensor
    group: int
    start: int
    stop: int
    shape: torch.Size
    """The parameter's when it was laid out, as its strides are: the script may give it other ones later."""
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.shape.numel()

    @property
    def is_whole(self) -> bool:
        return self.numel == self.shape.numel()

    def empty_whole(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that lies in memory as the parameter did when it was laid out."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that lies in memory as the parameter does, as a row (a scalar as it is); shares its bytes and version."""
        whole = tensor.detach()
        if not whole.dim():
            return whole
        return whole.as_strided((self.numel,), (1,), whole.storage_offset() + self.start)


def pieces_of(
    optimizer: torch.optim.Optimizer,
    piece_bytes: int,
    leaves: Callable[[Tensor], bool] = lambda parameter: True,
) -> list[list[Segment]]:
    """The parameters in pieces of at most `piece_bytes`, in order; a piece has segments of one group and one data type only, and of
    parameters that are alike in what `leaves` tells. What is larger than a piece shares none with another."""
    parameters = [
        (number, each)
        for number, group in enumerate(optimizer.param_groups)
        for each in group["params"]
        if is_stepped(optimizer, each) and each.numel()
    ]
    uncut = [Uncut(p.numel(), p.itemsize, (number, p.dtype, p.device, leaves(p))) for number, p in parameters]
    return [
        [_segment(*parameters[which], start, stop) for which, start, stop in piece]
        for piece in cut(uncut, piece_bytes)
    ]


def _segment(group: int, parameter: Tensor, start: int, stop: int) -> Segment:
    return Segment(parameter, group, start, stop, parameter.shape, parameter.stride())


def lies_like(tensor: Tensor, parameter: Tensor) -> bool:
    """Has `tensor` an element for each of the parameter's, at the same place in a dense stretch of memory?"""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.shape == parameter.shape
        and tensor.device == parameter.device
        and tensor.stride() == parameter.stride()
    )


def is_dense(tensor: Tensor) -> bool:
    """Do its elements fill a stretch of memory without gaps or overlaps?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def step_slices(
    optimizer: torch.optim.Optimizer, group: Group, slices: list[Tensor], states: list[State]
) -> list[State | None]:
    """The optimizer's own step on `slices`, whose gradients are set, with `states`; the states after it, None where the optimizer has made no
    entry (SGD without momentum). Hooks and counters of schedulers are left to the script's step."""
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [{**group, "params": slices}]
    given = zip(slices, states, strict=True)
    ours: defaultdict[Tensor, State] = defaultdict(dict, {each: state for each, state in given if state})
    optimizer.state = ours
    try:
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        optimizer.param_groups, optimizer.state = groups, state
    return [ours.get(each) for each in slices]


def why_not(optimizer: torch.optim.Optimizer, *, with_closure: bool = False) -> str:
    """Why `optimizer` must not step its parameters in pieces; empty when nothing speaks against it."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        return f"{kind.__name__} is not among the optimizers that update each element by itself"
    if why := not_its_own_step(optimizer):
        return why
    if with_closure:
        return CLOSURE
    if any_group_is(optimizer, "differentiable", "capturable"):
        return "the optimizer is differentiable or capturable"
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        return "a gradient scaler hands its scale to the step"
    return _why_not_these([each for _, each in parameters_of(optimizer) if is_stepped(optimizer, each)])


def _why_not_these(parameters: list[Tensor]) -> str:
    storages = set()
    for each in parameters:
        if type(each) not in PLAIN_TYPES or each.layout is not torch.strided or not each.is_leaf:
            return "a parameter is sparse, no leaf, or a tensor of another kind"
        if not each.is_floating_point() or not is_dense(each):
            return "a parameter is complex, or has gaps in memory"
        if is_shared(each.untyped_storage()):
            return "another process may read the parameters"
        storages.add((each.untyped_storage()._cdata, each.storage_offset()))
    return "two parameters are one" if len(storages) < len(parameters) else ""


def same_bits_in_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Tries it on tensors of its own, with the optimizer's options and state as they are: no parameter is touched."""
    with torch.no_grad():
        return all(
            _same_bits(optimizer, group, example)
            for group in optimizer.param_groups
            for example in _one_of_each(
                [each for each in group["params"] if is_stepped(optimizer, each) and each.numel()]
            )
        )


def _one_of_each(parameters: list[Tensor]) -> list[Tensor]:
    """The largest: state of one element cannot be told from a counter."""
    return list({(each.dtype, each.device): each for each in sorted(parameters, key=Tensor.numel)}.values())


def _same_bits(optimizer: torch.optim.Optimizer, group: Group, example: Tensor) -> bool:
    n = _TRIED[-1]
    values = torch.arange(n, dtype=torch.float64)

    def made(phase: float) -> Tensor:
        return (values * 0.7 + phase).sin().to(device=example.device, dtype=example.dtype)

    whole, parts = made(0.1), made(0.1)
    rows = [parts[a:b] for a, b in itertools.pairwise(_TRIED)]
    known: State | None = dict.get(optimizer.state, example) if example.numel() > 1 else None
    of_whole = {
        key: _tried_state(value, example, n)
        for key, value in (dict.items(known) if known is not None else ())
    }
    of_rows = [
        {key: value[a:b].clone() if _is_row(value, n) else _copied(value) for key, value in of_whole.items()}
        for a, b in itertools.pairwise(_TRIED)
    ]
    for step in range(_TRIED_STEPS):
        gradient = made(1.3 * step + 0.4)
        whole.grad = gradient
        for row, (a, b) in zip(rows, itertools.pairwise(_TRIED), strict=True):
            row.grad = gradient[a:b]
        of_whole = step_slices(optimizer, group, [whole], [of_whole])[0] or {}
        of_rows = [after or {} for after in step_slices(optimizer, group, rows, of_rows)]
    together = {
        key: torch.cat([each[key] for each in of_rows])
        for key, value in of_whole.items()
        if _is_row(value, n)
    }
    return _equal(whole, parts) and all(_equal(of_whole[key], value) for key, value in together.items())


def _tried_state(value: Any, example: Tensor, n: int) -> Any:
    """State as the optimizer has it: of an element (positive, as squares are), or of the parameter as a whole."""
    if isinstance(value, Tensor) and value.shape == example.shape:
        return (
            torch.arange(1, n + 1, dtype=torch.float64)
            .cos()
            .square()
            .to(device=value.device, dtype=value.dtype)
        )
    return _copied(value)


def _is_row(value: Any, n: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (n,)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
