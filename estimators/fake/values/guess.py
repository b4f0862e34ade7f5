"""What a fake run answers when an op needs a value that was never computed: a guess, noted with the script's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memopt.estimators.fake.kernels.indexing import fills, is_mask
from memopt.estimators.fake.kernels.moe import EXPERTS
from memopt.estimators.fake.torch_internals import FakeTensor
from memopt.estimators.fake.values.at_most import most
from memopt.estimators.fake.values.lines import (
    LBFGS,
    LBFGS_HOPES,
    asking_line,
    ends,
    hope_of,
    is_users,
    line_in,
    loop_at,
    split_line,
    user_line,
)
from memopt.estimators.fake.values.mask_share import selected
from memopt.estimators.fake.values.short_circuit import ABSORBING

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

aten = torch.ops.aten
FEW = 2
"""What is selected at least: a batch norm cannot do with one."""


class Guesser:
    """Answers data-dependent ops. `flipped` lines get the other truth value (the first guess made the script raise)."""

    def __init__(self, flipped: frozenset[str] = frozenset(), *, least: bool = False) -> None:
        self.flipped = flipped
        self.least = least
        """Whether sizes that only values could tell are taken as small as they can be, not as large."""
        self.bounded: dict[str, None] = {}
        """Where such sizes were taken, each told in a sentence."""
        self.lines: dict[str, str] = {}
        """What was guessed, by `file:line`."""
        self.branches: dict[str, bool] = {}
        """Truth values guessed, by `file:line`, latest last."""
        self.remarks: dict[str, None] = {}
        self._losses = 0
        self._entered: set[tuple[str, int]] = set()
        """Loops whose condition was known and true the last time."""

    def answer(
        self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """A one-tuple with the guessed result, or None when `func` can run on fake tensors as it is."""
        rule = _RULES.get(func)
        return rule(self, recorder, args, kwargs) if rule else None

    def truth(self, tensor: torch.Tensor) -> bool:
        """A guess for a boolean: what the script and its libraries hope for (no NaN; assertions hold; steps are accepted), what is
        likely where the script itself asks (some of a mask is true), else False."""
        where = user_line()
        hint = getattr(tensor, "_memopt_truth", None)
        if hint is None and (line := line_in(LBFGS)):
            hint = line.startswith(LBFGS_HOPES)
        elif hint is None:
            asking, own = asking_line(), split_line(where)
            hint = self._again(asking)
            if hint is None:
                hint = next((hope for hope in map(hope_of, (asking, own)) if hope is not None), None)
            if hint is None:
                hint = getattr(tensor, "_memopt_likely", False) and is_users(asking[0]) and not ends(*own)
        value = bool(hint) != (where in self.flipped)
        self.branches.pop(where, None)
        self.branches[where] = value
        self.note(where, f"a truth value was taken to be {value}")
        return value

    def known(self, result: Any) -> None:
        """Remember a loop that goes on since its condition, which was computed, holds."""
        if isinstance(result, bool) and (where := loop_at(asking_line())):
            (self._entered.add if result else self._entered.discard)(where)

    def _again(self, where: tuple[str, int]) -> bool | None:
        """Whether a loop that known values led into goes round once more: an adaptive solver's first step is rarely its only one."""
        if where not in self._entered:
            return None
        self._entered.discard(where)
        return True

    def number(self, tensor: torch.Tensor) -> float | int | complex | bool:
        """A guess for one element."""
        if tensor.dtype is torch.bool:
            return self.truth(tensor)
        self.note(user_line(), "a value was taken to be 1")
        if tensor.dtype.is_complex:
            return 1 + 0j
        if (told := getattr(tensor, "_memopt_number", None)) is not None:
            return int(told)
        if line_in(LBFGS):  # a loss that stands still would end its inner iterations
            self._losses += 1
            return 1.0 / self._losses
        return 1.0 if tensor.dtype.is_floating_point else 1

    def note(self, where: str, what: str) -> None:
        self.lines.setdefault(where, what)

    def most(self, number: int, what: str) -> int:
        """`number`, an upper bound that the script's line is noted for; the lower one where the least is asked for."""
        where = user_line()
        self.note(where, f"{what} (an upper bound)")
        self.bounded[f"{where}: {what}" if where else what] = None
        return min(FEW, number) if self.least else number

    def selected(self, mask: torch.Tensor) -> int:
        """How many elements of a mask are taken to be true."""
        number = selected(mask)
        if number is None:
            return self._not_ruled_out(mask)
        self.note(user_line(), "positions were taken to be spread evenly")
        return number

    def _not_ruled_out(self, mask: torch.Tensor) -> int:
        """All that nothing known rules out."""
        number = most(mask)
        if number is None:
            return self.most(mask.numel(), "every element of a mask was taken to be selected")
        return self.most(
            number, "every element of a mask that is not known to be false was taken to be selected"
        )

    def remark(self, text: str) -> None:
        """Something done differently than the script asked; told once."""
        self.remarks[text] = None

    def notes(self) -> list[str]:
        return [*self.remarks, *(f"{where}: {what}" if where else what for where, what in self.lines.items())]


def _item(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    tensor = args[0]
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return (constant.item(),)
    return (guesser.number(tensor),)


def _true(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    guesser.note(user_line(), "two tensors were taken to be equal")
    return (True,)


def _new(recorder: Recorder, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    with recorder.fake_mode:
        return torch.empty(shape, dtype=dtype)


def _nonzero(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    return (_new(recorder, [guesser.selected(args[0]), args[0].dim()], torch.int64),)


def _masked_select(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    if args[0].shape == args[1].shape:
        number = guesser.selected(args[1])
    else:
        number = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        number = guesser.most(number, "every element was taken to be selected")
    return (_new(recorder, [number], args[0].dtype),)


_DIFFERENT = "all values were taken to be different"


def _unique(count_at: int) -> Callable[..., tuple[Any] | None]:
    def rule(
        guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        values = args[0]
        index = [guesser.most(values.numel(), _DIFFERENT)]
        return (
            (
                _new(recorder, index, values.dtype),
                _new(recorder, list(values.shape), torch.int64),
                _new(recorder, index, torch.int64),
            ),
        )

    return rule


def _unique_dim(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    shape, along = list(args[0].shape), args[1]
    length = shape[along]
    count = shape[along] = guesser.most(length, _DIFFERENT)
    return (
        (
            _new(recorder, shape, args[0].dtype),
            _new(recorder, [length], torch.int64),
            _new(recorder, [count], torch.int64),
        ),
    )


def _bincount(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    least = (args[2] if len(args) > 2 else kwargs.get("minlength", 0)) or 1
    dtype = torch.int64 if weights is None else weights.dtype
    guesser.note(user_line(), f"values to be counted were taken to be below {least}")
    return (_new(recorder, [least], dtype),)


def _repeat_interleave(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    size = kwargs.get("output_size")
    if size is None:
        guesser.note(user_line(), "every repeat count was taken to be 1")
        size = args[0].numel()
    return (_new(recorder, [size], torch.int64),)


def _pack(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """pack_padded_sequence: as long as the real lengths say; at full length when they are fake."""
    values, lengths, batch_first = args
    batch, longest = values.shape[0 if batch_first else 1], values.shape[1 if batch_first else 0]
    if isinstance(lengths, FakeTensor):
        short = guesser.most(longest, "every sequence was taken to have full length")
        lengths = torch.full((batch,), short)
        lengths[:1] = longest
    steps = torch.arange(int(lengths.max()))
    sizes = (lengths.unsqueeze(0) > steps.unsqueeze(1)).sum(1)
    return ((_new(recorder, [int(lengths.sum()), *values.shape[2:]], values.dtype), sizes),)


def _ctc_loss(
    guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """ATen/native/LossCTC.cpp: a loss a sequence, and the log probabilities of every extended label at every step."""
    values, targets, lengths = args[0], args[1], args[3]
    batch = values.shape[1] if values.dim() == 3 else 1
    if isinstance(lengths, FakeTensor):
        longest = targets.shape[1] if targets.dim() == 2 else targets.numel() // max(1, batch)
        longest = guesser.most(longest, "every target was taken to have full length")
    else:
        longest = max((int(n) for n in lengths), default=0)
    loss = _new(recorder, [batch] if values.dim() == 3 else [], values.dtype)
    return ((loss, _new(recorder, [batch, values.shape[0], 2 * longest + 1], values.dtype)),)


def _with_positions(name: str) -> Callable[..., tuple[Any] | None]:
    """Indexing by a mask: the mask becomes one index tensor a dimension, as long as the mask has elements."""
    op = getattr(aten, name)

    def rule(
        guesser: Guesser, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        indices = args[1]
        if not any(map(is_mask, indices)):
            return None
        wide: list[Any] = []
        makes_none = name != "index" and fills(args, kwargs)
        for index in indices:
            if not is_mask(index):
                wide.append(index)
            elif isinstance(index, FakeTensor):
                number = index.numel() if makes_none else guesser.selected(index)
                wide += [_new(recorder, [number], torch.int64) for _ in range(index.dim())]
            else:
                wide += index.nonzero().unbind(1)
        return (op(args[0], wide, *args[2:], **kwargs),)

    return rule


_RULES: dict[Any, Callable[..., tuple[Any] | None]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _true,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique(1),
    aten._unique.default: _unique(1),
    aten.unique_consecutive.default: _unique(1),
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._pack_padded_sequence.default: _pack,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten.index.Tensor: _with_positions("index"),
    aten.index_put_.default: _with_positions("index_put_"),
    aten.index_put.default: _with_positions("index_put"),
    **ABSORBING,
    **EXPERTS,
}
