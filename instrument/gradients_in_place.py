"""Which ops of a backward pass could write what they make into the gradient that they use up, with the same bits.

Between two nodes of autograd's, nobody but its engine holds a gradient. An element-wise formula of a node, or a softmax's along the
last dimension, reads each element (each row) before it writes it, so that the `out=` form of the same kernel may be given the gradient
itself. The engine's own sums where gradients meet do so already, but not where the first one is a view, as the gradient of `weight.t()`
is (InputBuffer::accumulate). SuperNeurons and MXNet's memory planner call this in-place operations and memory sharing.

`tests/instrument/test_gradients_in_place.py` compares the bits of every op in the table, and what is held elsewhere is left alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memopt.instrument import modes
from memopt.instrument.accumulate import called_by_engine
from memopt.instrument.live_objects import no_collections
from memopt.instrument.ops import fills_its_memory, is_plain
from memopt.instrument.torch_internals import autograd_engine, current_node, storage_use_count

aten = torch.ops.aten

FORMULAS: dict[Any, tuple[Any, str, str]] = {
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input", "GeluBackward"),
    aten.threshold_backward.default: (
        aten.threshold_backward.grad_input,
        "grad_input",
        "ReluBackward ThresholdBackward",
    ),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input", "TanhBackward"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input", "SigmoidBackward"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input", "SiluBackward"),
    aten.leaky_relu_backward.default: (
        aten.leaky_relu_backward.grad_input,
        "grad_input",
        "LeakyReluBackward",
    ),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input", "EluBackward"),
    aten.softplus_backward.default: (aten.softplus_backward.grad_input, "grad_input", "SoftplusBackward"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input", "HardtanhBackward"),
    aten.hardsigmoid_backward.default: (
        aten.hardsigmoid_backward.grad_input,
        "grad_input",
        "HardsigmoidBackward",
    ),
    aten._log_softmax_backward_data.default: (
        aten._log_softmax_backward_data.out,
        "out",
        "LogSoftmaxBackward",
    ),
    aten._softmax_backward_data.default: (
        aten._softmax_backward_data.out,
        "grad_input",
        "SoftmaxBackward",
    ),
    aten.mul.Tensor: (aten.mul.out, "out", "MulBackward"),
    aten.div.Tensor: (aten.div.out, "out", "DivBackward"),
}
"""Op of a formula -> the form that writes into its argument of that name, and the nodes whose whole formula for one input it is.
The gradient is the first operand of each."""

_ADD = aten.add.Tensor
_NO_SUM_OF_ITS_OWN = frozenset((
    "AdaptiveAvgPool2DBackward", "AddBackward", "AddmmBackward", "AliasBackward", "AvgPool2DBackward", "BmmBackward", "CatBackward",
    "CloneBackward", "ConvolutionBackward", "CosBackward", "DivBackward", "EmbeddingBackward", "ExpBackward", "ExpandBackward",
    "GeluBackward", "LeakyReluBackward", "LogBackward", "LogSoftmaxBackward", "MaskedFillBackward", "MaxPool2DWithIndicesBackward",
    "MeanBackward", "MmBackward", "MulBackward", "NativeBatchNormBackward", "NativeGroupNormBackward", "NativeLayerNormBackward",
    "NegBackward", "NllLossBackward", "PermuteBackward", "PowBackward", "ReluBackward", "ReshapeAliasBackward", "RsqrtBackward",
    "ScaledDotProductFlashAttentionForCpuBackward", "SelectBackward", "SigmoidBackward", "SiluBackward", "SinBackward", "SliceBackward",
    "SoftmaxBackward", "SplitBackward", "SplitWithSizesBackward", "SqrtBackward", "SqueezeBackward", "StackBackward", "SubBackward",
    "SumBackward", "TanhBackward", "TBackward", "ToCopyBackward", "TransposeBackward", "UnbindBackward", "UnsafeViewBackward",
    "UnsqueezeBackward", "ViewBackward", "WhereBackward",
))  # fmt: skip
"""Nodes whose formulas add nothing (derivatives.yaml): a sum that the engine calls after one of them, or after a script's `Function`, is
its own."""
_IDS = frozenset(map(id, (*FORMULAS, _ADD)))
"""Overloads hash themselves in Python, which takes longer."""
_ROWS = (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)

_LOOKS = 5
"""At most, until two agree."""
Holders = tuple[int, int, int, int, int]
"""References to a tensor, to its Python object and to its storage; of a view, to its base and to that one's Python object."""


def in_place_form(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], least_bytes: int = 0
) -> Callable[[], Tensor] | None:
    """What makes the same bits as `func(*args, **kwargs)` in the memory of its first operand; None where that may not be, and where
    it has less than `least_bytes`.

    To be asked by a dispatch mode's `dispatch`, of an op that it was just given and of whose operands it holds none."""
    if id(func) not in _IDS or not args or torch.is_grad_enabled():
        return None
    node, gradient = current_node(), args[0]
    if node is None or not _may_be_only_use(func, node.name().rstrip("0123456789"), node):
        return None
    if not (_is_whole(gradient, least_bytes) and _go_with(func, gradient, args[1:], kwargs)):
        return None
    if not _is_only_use(func, node) or not _is_only_holder(gradient, object()) or not called_by_engine():
        return None
    if func is _ADD:
        return lambda: aten.add_.Tensor(*args)
    into, name, _ = FORMULAS[func]
    return lambda: into(*args, **kwargs, **{name: gradient})


def _is_whole(gradient: Any, least_bytes: int) -> bool:
    """It fills a storage of its own, as dense as can be."""
    if not isinstance(gradient, Tensor) or not is_plain(gradient) or not gradient.dtype.is_floating_point:
        return False
    storage = gradient.untyped_storage()
    return (
        least_bytes <= storage.nbytes() == gradient.numel() * gradient.element_size()
        and storage.resizable()
        and fills_its_memory(gradient)
    )


def _go_with(func: Any, gradient: Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """What `func` makes of the gradient and `others` has its shape, type and strides."""
    if func is _ADD:
        (other,) = others if len(others) == 1 and not kwargs else (None,)
        return isinstance(other, Tensor) and is_plain(other) and _alike(gradient, other)
    if not gradient.is_contiguous():
        return False
    if func in _ROWS and others[1] not in (-1, gradient.dim() - 1):
        return False
    if func in _ROWS and others[2] is not gradient.dtype:
        return False
    return all(
        is_plain(other) and (other.dim() == 0 or _alike(gradient, other))
        for other in (*others, *kwargs.values())
        if isinstance(other, Tensor)
    )


def _alike(gradient: Tensor, other: Tensor) -> bool:
    return (
        other.shape == gradient.shape
        and other.dtype is gradient.dtype
        and other.device == gradient.device
        and other.stride() == gradient.stride()
        and other.untyped_storage()._cdata != gradient.untyped_storage()._cdata
    )


def _may_be_only_use(func: Any, name: str, node: Any) -> bool:
    """Is it the formula of a node of this name, which reads the gradient once if one input needs one?"""
    if func is _ADD:
        return name in _NO_SUM_OF_ITS_OWN or isinstance(node, BackwardCFunction)
    return name in FORMULAS[func][2].split()


def _is_only_use(func: Any, node: Any) -> bool:
    """Nothing in the formula that runs reads the gradient after `func`."""
    if func is _ADD:
        return True
    wanted = [place for place, edge in enumerate(node.next_functions) if edge[0] is not None]
    return len(wanted) == 1 and not (
        func is aten.div.Tensor and wanted[0]
    )  # the divisor's formula divides what was saved


def _is_only_holder(gradient: Tensor, beside: object) -> bool:
    """Nobody holds the gradient, its Python object or its bytes but the engine, or the view that it is. `beside`: what nobody else has."""
    found = _holders(gradient, beside)
    if _seen is not None:
        _seen.append(found)
        return False
    return found in _usual()


def _holders(gradient: Tensor, beside: object) -> Holders:
    """`beside` has a reference from each call that hands both on where frames are run another way: while some thread compiles (torch.compile)."""
    base: Any = gradient._base
    uses: Any = gradient
    of_base = (base._use_count(), sys.getrefcount(base)) if base is not None else (0, 0)
    there = storage_use_count(gradient.untyped_storage()._cdata)
    return uses._use_count(), sys.getrefcount(gradient) - sys.getrefcount(beside), there, *of_base


@cache
def _usual() -> frozenset[Holders]:
    """What `_holders` gives where only the engine holds a gradient, found by looking: versions of Python and torch count differently.
    Empty where it would not show that somebody else holds it."""
    with no_collections():  # a collection, of whichever thread, has references to all that is young
        for _ in range(_LOOKS):
            kept: list[Tensor] = []
            alone, held = _look(lambda gradient: None), _look(kept.append)
            if alone and not alone & held and alone == _look(lambda gradient: None):
                return alone
    return frozenset()


def prepare() -> None:
    """Look how references are counted, if that is not known, in a thread of its own, where neither hooks nor modes of the run's are on.
    Not while torch is being imported, for which that thread would wait."""
    if _usual.cache_info().currsize:
        return
    looking = threading.Thread(target=_usual, name="memopt: counting references")
    looking.start()
    looking.join()


_seen: list[Holders] | None = None


def _look(hook: Callable[[Tensor], object]) -> frozenset[Holders]:
    """The holders of two gradients, one that a formula uses and one that is a view and is added to; `hook` was shown both before."""
    global _seen
    _seen = []
    weight = torch.ones(2, 2, dtype=torch.float32, device="cpu", requires_grad=True)
    one, two = weight.t(), weight.t()
    used = (one @ two).sigmoid()
    result = used.neg()
    for each in (one, two, used):
        each.register_hook(hook)
    begin = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    try:
        with _Looking():  # type: ignore[no-untyped-call]
            autograd_engine.run_backward((result,), (begin,), False, False, (weight,), allow_unreachable=True, accumulate_grad=False)  # fmt: skip
        return frozenset(_seen)
    finally:
        _seen = None


class _Looking(modes.Mode):
    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_place_form(func, args, kwargs)
        return func(*args, **kwargs)
