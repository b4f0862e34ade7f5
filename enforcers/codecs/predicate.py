"""Backward that only asks a yes-or-no question of each element (ReLU: was it positive?) gets one bit per element.

The question is put by the very kernel that will ask it: its gradient of ones tells yes from no, with that kernel's own
rounding of bounds in bf16. Decoding gives two values of the dtype that answer as the original did. Some vectorised CPU kernels
answer NaN otherwise than their scalar tail does, so except where NaN is proven (`_SURE_OF_NAN`) a tensor that holds one is declined
there. On a GPU each element has a thread of its own, and kernels load a bool as "not zero" (c10/util/Load.h): nothing is looked at,
for that would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memopt.codecs.meta import bitmap_bytes
from memopt.enforcers.codecs.bits import fill_by_bits, pack_bits, spread_bits
from memopt.enforcers.codecs.encoded import (
    Encoded,
    bits_of,
    cells_of,
    chunks_of,
    is_plain,
    meta_of,
    new_cells,
    part_of,
)

name = "predicate"

_aten = torch.ops.aten
_SURE_OF_NAN = frozenset({"relu", "threshold", "mask"})
_KERNELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "threshold": (_aten.threshold_backward, ("threshold",)),
    "leaky_relu": (lambda g, x, slope: _aten.leaky_relu_backward(g, x, slope, False), ("negative_slope",)),
    "hardtanh": (_aten.hardtanh_backward, ("min_val", "max_val")),
    "hardsigmoid": (_aten.hardsigmoid_backward, ()),
    "hardshrink": (_aten.hardshrink_backward, ("lambd",)),
    "softshrink": (_aten.softshrink_backward, ("lambd",)),
}
Ask = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A value that answers yes, one that answers no, and the answer that means yes."""

    yes: float
    no: float
    means_yes: torch.Tensor


_found: dict[str, Answers | None] = {}
_MOST_QUESTIONS = 1000


def _question(params: Mapping[str, object]) -> Ask | None:
    """Elementwise: the answer that the reader's backward gets, as a bool or as its gradient of 1."""
    test = str(params.get("test"))
    if test == "mask":
        return lambda x: x
    if test == "clamp":
        return lambda x: _inside(x, _number(params, "min"), _number(params, "max"))
    if test == "relu":
        return lambda x: (x <= 0).logical_not_()
    kernel, keys = _KERNELS.get(test, (None, ()))
    bounds = [_number(params, key) for key in keys]
    return None if kernel is None or None in bounds else lambda x: kernel(torch.ones_like(x), x, *bounds)


def _number(params: Mapping[str, object], key: str) -> float | int | None:
    value = params.get(key)
    return value if isinstance(value, int | float) else None


_BOUNDS_COUNT = torch.__version__ < "2.14.dev0"
"""Does `clamp` pass the gradient of what lies at a bound? It has no kernel of its own that could be asked. No release is taken on trust
(`is_proven_on`)."""


def _inside(x: torch.Tensor, low: float | int | None, high: float | int | None) -> torch.Tensor:
    above, below = (torch.ge, torch.le) if _BOUNDS_COUNT else (torch.gt, torch.lt)
    inside = torch.ones_like(x, dtype=torch.bool) if low is None else above(x, low)
    return inside if high is None else inside.logical_and_(below(x, high))


def _yes_and_no(ask: Ask, params: Mapping[str, object], like: torch.Tensor) -> Answers | None:
    """How this question is answered in this dtype, found once."""
    key = f"{sorted(params.items())} {like.dtype} {like.device}"
    if key not in _found:
        if len(_found) >= _MOST_QUESTIONS:
            _found.clear()
        _found[key] = _find_answers(ask, params, like)
    return _found[key]


def _find_answers(ask: Ask, params: Mapping[str, object], like: torch.Tensor) -> Answers | None:
    """None if only one answer can be found."""
    if like.dtype == torch.bool:
        return Answers(1.0, 0.0, torch.tensor(True, device=like.device))
    bounds = [float(v) for v in params.values() if isinstance(v, int | float)]
    bounds = [b for b in bounds if abs(b) < float("inf")]
    reach = 4 * max([abs(b) for b in bounds] + [2.0])
    middles = [(a + b) / 2 for a in bounds for b in bounds]
    values = torch.tensor([1.0, 0.0, -1.0, *middles, reach, -reach], dtype=torch.float64).to(like)
    answers = ask(values)
    yes, no = answers.max(), answers.min()
    if bool(yes == no) or not bool(((answers == yes) | (answers == no)).all()):
        return None
    return Answers(values[answers == yes][0].item(), values[answers == no][0].item(), yes)


def encode(tensor: torch.Tensor, params: Mapping[str, object]) -> Encoded | None:
    test, ask = params.get("test"), _question(params)
    if (
        ask is None
        or not is_plain(tensor)
        or not (tensor.dtype == torch.bool if test == "mask" else tensor.is_floating_point())
    ):
        return None
    found = _yes_and_no(ask, params, tensor)
    if found is None:
        return None
    meta = meta_of(tensor)
    cells = cells_of(tensor, meta)
    bitmap = torch.empty(bitmap_bytes(meta.cells), dtype=torch.uint8, device=meta.device)
    for part in chunks_of(meta.cells, meta.device):
        chunk = part_of(cells, part.start, part.stop)
        if _unsure(chunk, test):
            return None
        answers = ask(chunk)
        pack_bits(
            answers if answers.dtype == torch.bool else answers == found.means_yes,
            part_of(bitmap, part.start // 8, bitmap_bytes(part.stop)),
        )
    return Encoded(name, meta, (bitmap,), {"yes": found.yes, "no": found.no})


def _unsure(chunk: torch.Tensor, test: object) -> bool:
    """Whether the one bit could lose something on a CPU: a NaN where kernels disagree, a bool that is neither 0 nor 1."""
    if chunk.device.type != "cpu":
        return False
    if test == "mask":
        return bool(chunk.view(torch.uint8).max() > 1)
    return test not in _SURE_OF_NAN and bool(torch.isnan(chunk).any())


def decode(encoded: Encoded) -> torch.Tensor:
    tensor, cells = new_cells(encoded.meta)
    (bitmap,) = encoded.payload
    if cells.dtype == torch.bool and not encoded.meta.is_on_cpu:
        for part in chunks_of(encoded.meta.cells, encoded.meta.device):
            bits = part_of(bitmap, part.start // 8, bitmap_bytes(part.stop))
            spread_bits(bits, part.stop - part.start, part_of(cells, part.start, part.stop))
        return tensor
    no, yes = (bits_of(torch.full((), float(encoded.params[key]), dtype=cells.dtype, device=cells.device)) for key in ("no", "yes"))  # type: ignore[arg-type]  # fmt: skip
    out = bits_of(cells)
    for part in chunks_of(encoded.meta.cells, encoded.meta.device):
        bits = part_of(bitmap, part.start // 8, bitmap_bytes(part.stop))
        fill_by_bits(bits, part_of(out, part.start, part.stop), no, yes)
    return tensor
