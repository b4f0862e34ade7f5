"""What is known of a result although one operand was never computed: nothing is true with False, everything or True.

Generation loops end by it: "all done" is a real True at the maximum length, or'ed with a guess about end-of-text tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.estimators.fake.torch_internals import FakeTensor

aten = torch.ops.aten
_SMALL = 4096


def absorbed(guesser: Any, recorder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """The result of `and` (`*` of integers) with all zeros; None when the fake operand matters."""
    known, kind = _known(args)
    return None if known is None or known.any() else (torch.zeros_like(known, dtype=kind),)


def absorbed_or(
    guesser: Any, recorder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any] | None:
    """The result of `or` with all True; None when the fake operand matters."""
    known, kind = _known(args)
    return None if known is None or kind is not torch.bool or not known.all() else (torch.ones_like(known),)


def _known(args: tuple[Any, ...]) -> tuple[torch.Tensor | None, torch.dtype]:
    """The real one of two operands when it has the result's shape, both being truth values or integers; the result's type."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
    if len(tensors) != 2 or len(real) != 1 or real[0].numel() > _SMALL:
        return None, torch.bool
    kind = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    shape = torch.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    plain = not kind.is_floating_point and not kind.is_complex
    return (real[0] if plain and shape == real[0].shape else None), kind


ABSORBING = {
    aten.bitwise_and.Tensor: absorbed,
    aten.logical_and.default: absorbed,
    aten.mul.Tensor: absorbed,
    aten.bitwise_or.Tensor: absorbed_or,
    aten.logical_or.default: absorbed_or,
}
