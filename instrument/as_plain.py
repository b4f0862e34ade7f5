"""Ops that run under a mode compute what they compute without one.

Five things differ while a `TorchDispatchMode` is on, and each is put right here:
1. Inside an op that was handed to a mode, conjugate and negative views are not resolved: complex `linalg.pinv` came out wrong.
2. Nor does autocast reach what such an op calls: `linalg.pinv` and `nn.Bilinear` came out in another precision.
3. The backward formulas of `prod`, `cumprod`, `max`, `min`, `median`, `det` and `matrix_exp`, and of `masked_fill` for a value that is trained,
   take another way, with other bits, or other bits of its own derivative.
4. `svdvals`, `eigvalsh` and `eigvals` of what needs no gradient compute vectors as well, by another routine of LAPACK's.
5. `matmul` of batches, one of them of a single matrix that needs no gradient, multiplies them as one large matrix, not one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from memopt.instrument.deep_graphs import DEEP, make_room
from memopt.instrument.nodes import nodes_below
from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.torch_internals import (
    DisableTorchDispatch,
    DispatchKey,
    ExcludeKey,
    RestoreThreadState,
    current_modes,
    exclude_key,
    inside_dual_level,
    is_functorch_wrapped,
    tree_iter,
)

_Key = DispatchKey
_CONJUGATE, _NEGATIVE, _ZERO = _Key.Conjugate, _Key.Negative, _Key.ZeroTensor
_exclude = exclude_key

_PINV, _TRILINEAR = torch.ops.aten.linalg_pinv, torch.ops.aten._trilinear
AUTOCAST_INSIDE = {
    "cpu": (_Key.AutocastCPU, {_PINV, _TRILINEAR}),
    "cuda": (_Key.AutocastCUDA, {_PINV}),  # `bilinear` itself is on autocast's list there
}
"""Ops with one kernel that calls ops which autocast casts for, while it is not on the list itself. `benchmarks/op_samples.py` tells of more."""

_CALL_CAST_OPS = {id(getattr(packet, name)) for packet in (_PINV, _TRILINEAR) for name in packet.overloads()}
"""ids of their overloads, which live as long as torch."""

_already_cast = threading.local()
"""`inside` is true in an op of autocast's list, which runs without autocast what it calls."""


def as_plain(func: Any) -> Any:
    """What a mode has to call in place of `func`. First thing in `__torch_dispatch__`: torch undoes it when that returns."""
    _exclude(_CONJUGATE, False)
    _exclude(_NEGATIVE, False)
    _exclude(_ZERO, False)
    return _with_autocast(func) if id(func) in _CALL_CAST_OPS else func


def _with_autocast(func: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(t.device.type for t in tree_iter((args, kwargs)) if isinstance(t, Tensor))
        key, ops = AUTOCAST_INSIDE.get(device, (_ZERO, set()))
        with RestoreThreadState():
            casts = func.overloadpacket in ops and torch.is_autocast_enabled(device)
        if not casts or getattr(_already_cast, "inside", False):
            return func(*args, **kwargs)
        with ExcludeKey(key, False):
            return func(*args, **kwargs)

    return run


LOOKING = {
    "ProdBackward": "aten.prod.",
    "CumprodBackward": "aten.cumprod.",
    "MaxBackward1": "aten.max.default",
    "MinBackward1": "aten.min.default",
    "MedianBackward0": "aten.median.default",
    "NanmedianBackward0": "aten.nanmedian.default",
    "LinalgDetBackward": "aten._linalg_det.",
    "LinalgMatrixExpBackward": "aten.linalg_matrix_exp.",
    "MaskedFillBackward1": "aten.masked_fill",
}
"""Nodes whose formula looks whether a mode is on, by the beginning of their names, and their ops."""
_FILLED = "MaskedFillBackward1"
"""Looks for the gradient of its value, which seldom is trained."""
_LOOKING_NODES, _LOOKING_OPS = tuple(LOOKING), tuple(LOOKING.values())


def is_looking(name: str) -> bool:
    """Has the op of this name such a node?"""
    return name.startswith(_LOOKING_OPS)


def run_as_plain(roots: Iterable[Tensor]) -> None:
    """No mode is on while a node of `LOOKING` below `roots` runs; what it does is not seen then. Looks at all nodes below."""
    below = nodes_below(roots)
    for node in below:
        name = type(node).__name__
        if name.startswith(_LOOKING_NODES) and not (name == _FILLED and node.next_functions[1][0] is None):
            _without_modes(node)
    if len(below) > DEEP:
        make_room()


def _without_modes(node: Any) -> None:
    guards: list[Any] = []

    def before(gradients: Any) -> None:
        if not _script_has_modes():  # else the formula looks, and finds one, without memopt, too
            guards.append(DisableTorchDispatch())

    def after(inputs: Any, outputs: Any) -> None:
        guards.clear()

    node.register_prehook(before)
    node.register_hook(after)


def _pinverse(matrix: Tensor, rcond: float = 1e-15) -> Tensor:
    """On the CPU's list: here, unlike in a mode, one can see whether autocast has passed."""
    before = getattr(_already_cast, "inside", False)
    _already_cast.inside = before or not torch.is_autocast_enabled(matrix.device.type)
    try:
        inverse: Tensor = torch.ops.aten.linalg_pinv(matrix, rcond, False)
    finally:
        _already_cast.inside = before
    return inverse


def _svdvals(matrix: Tensor, *, driver: str | None = None) -> Tensor:
    values: Tensor = torch.ops.aten._linalg_svd(matrix, False, _wants_vectors(matrix), driver=driver)[1]
    return values


def _eigvalsh(matrix: Tensor, UPLO: str = "L") -> Tensor:
    values: Tensor = torch.ops.aten._linalg_eigh(matrix, UPLO, _wants_vectors(matrix))[0]
    return values


def _eigvals(matrix: Tensor) -> Tensor:
    values: Tensor = (
        torch.ops.aten.linalg_eig(matrix)[0]
        if _wants_vectors(matrix)
        else torch.ops.aten._linalg_eigvals(matrix)
    )
    return values


def _matmul(one: Tensor, other: Tensor) -> Tensor:
    """As torch's own (`_matmul_impl`), but for modes of memopt's."""
    if one.dim() == other.dim() == 3 and one.size(0) != other.size(0):
        single = one if one.size(0) == 1 else other
        if single.size(0) == 1 and not (single.requires_grad or _is_like_a_subclass(single)):
            return _one_by_one(one, other)
    found: Tensor = torch.ops.aten.matmul.default._op_dk(_Key.CompositeImplicitAutograd, one, other)
    return found


def _one_by_one(one: Tensor, other: Tensor) -> Tensor:
    count = one.size(0) * other.size(0)  # one of them is 1
    first, second = (each.expand(count, *each.shape[1:]) for each in (one, other))
    product = torch.bmm(first.reshape(first.shape), second.reshape(second.shape))
    found: Tensor = torch.ops.aten._unsafe_view(product, [count, one.size(1), other.size(2)])
    return found


def _script_has_modes() -> bool:
    return any(not type(mode).__module__.startswith("memopt.") for mode in current_modes())


def _wants_vectors(matrix: Tensor) -> bool:
    """Torch's own question (`_may_require_fw_or_bw_grad`), but for modes of memopt's."""
    if torch.is_grad_enabled() and matrix.requires_grad:
        return True
    if _is_like_a_subclass(matrix):
        return True
    return inside_dual_level() and forward_ad.unpack_dual(matrix).tangent is not None


def _is_like_a_subclass(tensor: Tensor) -> bool:
    """Torch's `isTensorSubclassLike`, but for modes of memopt's."""
    return type(tensor) not in PLAIN_TYPES or is_functorch_wrapped(tensor) or _script_has_modes()


class PlainForms:
    """Between `install` and `remove`, the ops that look whether a mode is on do not see memopt's."""

    def __init__(self) -> None:
        self._library: Any = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        forms = {
            "linalg_svdvals": _svdvals,
            "linalg_eigvalsh": _eigvalsh,
            "linalg_eigvals": _eigvals,
            "pinverse": _pinverse,
            "matmul": _matmul,
        }
        for name, form in forms.items():
            for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA"):
                self._library.impl(name, form, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
