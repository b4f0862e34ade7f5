"""What an op on fake tensors gives, by what is known of its arguments: asked of torch once, remembered after that.

A training step runs few kinds of ops on many tensors of the same shapes, and torch's fake tensors take some 150 microseconds for
each, most of them to look the answer up. Remembered are sizes, strides and types of results that are new, views of the first
argument or that argument itself; all else (other layouts, values that are known, real tensors) is torch's each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memopt.estimators.fake.torch_internals import FakeTensor, FakeTensorMode, in_kernel
from memopt.instrument.torch_internals import BelowAutograd

_CPU = torch.device("cpu")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.memory_format, torch.layout)


_ABSOLUTE = frozenset(
    (
        torch.ops.aten.as_strided.default,
        torch.ops.aten.as_strided_.default,
        torch.ops.aten.as_strided_scatter.default,
    )
)
"""Ops that say where in the storage a view starts: of all others the result does not depend on where their arguments do."""


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""Shares memory and does not say so: what it is made of lives no longer."""


class _Unknown(Exception):
    """An argument of which more matters than a key can hold."""


class _Made(NamedTuple):
    """One result: its geometry, and whether it is a view of the first argument, behind whose start its own lies; no geometry: that
    argument itself."""

    geometry: tuple[Any, ...] | None = None
    view: bool = False


class Shapes:
    """Runs ops on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Any, tuple[type | None, list[_Made]] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        try:
            start = args[0].storage_offset() if func in _ABSOLUTE else 0
            key = (func, torch.get_default_dtype(), start, self._key(args), self._key(tuple(kwargs.items())))
        except _Unknown:
            return func(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            return func(*args, **kwargs) if known is None else self._remade(known, args)
        before = _geometry(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        result = func(*args, **kwargs)
        self._known[key] = _learned(func, args, kwargs, result, before)
        return result

    def _key(self, value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            return self._described(value)
        if kind in (list, tuple):
            return tuple([self._key(each) for each in value])
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, torch.Size):
            return value
        raise _Unknown

    def _described(self, tensor: Any) -> Any:
        plain = (
            tensor.fake_mode is self.mode
            and tensor.constant is None
            and tensor.fake_device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.dtype.is_complex
            and not tensor.is_neg()
        )
        if not plain:
            raise _Unknown
        return tensor.shape, tensor.stride(), tensor.dtype

    def _remade(self, known: tuple[type | None, list[_Made]], args: tuple[Any, ...]) -> Any:
        container, made = known
        results = [self._one(each, args) for each in made]
        return results[0] if container is None else container(results)

    def _one(self, made: _Made, args: tuple[Any, ...]) -> Any:
        if made.geometry is None:
            return args[0]
        size, stride, offset, dtype = made.geometry
        # `tensor.data` comes here by way of autograd, with a lock of the tensor's held that `as_strided` would ask for again
        with BelowAutograd(), in_kernel(self.mode):
            if made.view:
                plain = torch.as_strided(args[0], size, stride, args[0].storage_offset() + offset)
            else:
                plain = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor.__new__(FakeTensor, self.mode, plain, _CPU)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _learned(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any
) -> tuple[type | None, list[_Made]] | None:
    """What to remember; None where torch is to be asked again."""
    if func.namespace != "aten" or func._schema.name.startswith(("aten::lift", "aten::set_", "aten::resize")):
        return None
    container = type(result) if isinstance(result, (list, tuple)) else None
    made = [
        _kind(func, args, kwargs, each, before) for each in (result if container is not None else (result,))
    ]
    known = [each for each in made if each is not None]
    return (container, known) if known and len(known) == len(made) else None


def _kind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any) -> _Made | None:
    if type(result) is not FakeTensor or result.layout is not torch.strided or result.constant is not None:
        return None
    if result.fake_device.type != "cpu" or result.dtype.is_complex or result.is_quantized or result.is_neg():
        return None
    if args and result is args[0]:
        return _Made() if func._schema.is_mutable and _geometry(result) == before else None
    storage = result.untyped_storage()
    given = [x for x in _tensors((args, kwargs)) if x.untyped_storage()._cdata == storage._cdata]
    if given:
        of_first = (
            (func.is_view or func is _UNSAFE_VIEW) and given[0] is args[0] and result.dtype is args[0].dtype
        )
        size, stride, offset, dtype = _geometry(result)
        relative = (size, stride, offset - args[0].storage_offset(), dtype)
        return _Made(relative, view=True) if of_first else None
    if func._schema.is_mutable or result.storage_offset():
        return None
    needed = (
        1 + sum((n - 1) * s for n, s in zip(result.shape, result.stride(), strict=True))
    ) * result.itemsize
    exact = storage.nbytes() == (needed if result.numel() else 0)
    return _Made(_geometry(result)) if exact else None


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for each in value for x in _tensors(each)] if isinstance(value, (list, tuple)) else []
