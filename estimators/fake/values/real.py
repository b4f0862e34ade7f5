"""Which tensors of a fake run stay real: small integers and small explicit data, whose values a script may need."""

from __future__ import annotations

import functools
from typing import Any

import torch

from memopt.estimators.fake.torch_internals import has_kernel

_FLOATS_REAL = 4096
"""Factories of at most so many floating-point numbers give real tensors (drop-path rates, beta schedules)."""
_INTS_REAL = 4 << 20
_REAL_BYTES = 64 << 20
"""An op on real tensors that together are larger than this gives a fake one."""

_INTEGER_FACTORIES = {
    "aten::randint",
    "aten::randperm",
    "aten::arange",
    "aten::tril_indices",
    "aten::triu_indices",
}
_SIZED = {
    "aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn", "aten::randint",
    "aten::empty_strided", "aten::normal", "aten::eye", "aten::randperm", "aten::empty_permuted",
}  # fmt: skip


def _numel(name: str, args: tuple[Any, ...]) -> int | None:
    """How many elements a factory makes; None when its arguments do not say so plainly."""
    if name in ("aten::eye", "aten::randperm"):
        return int(args[0]) ** 2 if name == "aten::eye" else int(args[0])
    if name == "aten::arange":
        start, end, step = (0, *args[:1], 1) if len(args) == 1 else (*args[:2], *(args[2:3] or (1,)))
        return int((end - start) / step) if step else None
    if name not in _SIZED:
        return None
    for arg in args:
        if isinstance(arg, (list, tuple, torch.Size)):
            number = 1
            for size in arg:
                number *= int(size)
            return number
    return None


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.numel() * tensor.element_size()
    except RuntimeError:
        return 0


@functools.cache
def _runs_on_the_host(func: Any) -> bool:
    """Whether there is a kernel for real tensors of the cpu: of libraries made for a GPU there is none."""
    name, has = func.name(), has_kernel
    return func.namespace == "aten" or any(has(name, key) for key in ("CPU", *_COMPOSITE))


_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def stays_real(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    device: str,
) -> bool:
    """Whether an op without fake inputs runs for real: small outputs, and no large floating-point ones on the device."""
    if device == "cuda" and not _runs_on_the_host(func):
        return False
    if tensors:
        if torch.Tag.inplace_view in func.tags:
            return True  # a real tensor's geometry changes, whatever its size: torch refuses to on a stand-in
        if device == "cuda" and any(t.is_floating_point() and t.numel() > _FLOATS_REAL for t in tensors):
            return False
        return sum(_bytes(t) for t in tensors) <= _REAL_BYTES
    kind = kwargs.get("dtype") or torch.get_default_dtype()
    name = func._schema.name
    if name in _INTEGER_FACTORIES and kwargs.get("dtype") is None:
        kind = torch.int64
    number = _numel(name, args)
    if number is None:
        return True
    return number <= (_FLOATS_REAL if kind.is_floating_point or kind.is_complex else _INTS_REAL)
