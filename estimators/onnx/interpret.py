"""Runs an ONNX graph on fake tensors: shapes and lifetimes are computed, values only where shapes need them.

Small tensors whose values are known (shapes, axes, indices, scalar constants) are real and computed with, apart from
the fake world; everything else is fake. A value is let go after its last reader, as a local variable of a script is.
An operator that is not in the registry gets the output shapes of onnx's shape inference, saves its inputs and outputs
for backward, and makes the estimate partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from memopt.errors import BadFile
from memopt.estimators.fake.torch_internals import (
    DataDependentOutput,
    DynamicOutputShape,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperator,
)
from memopt.estimators.fake.values.guess import FEW
from memopt.estimators.onnx.ops import control as ops_control
from memopt.estimators.onnx.ops import index as ops_index
from memopt.estimators.onnx.ops import math as ops_math
from memopt.estimators.onnx.ops import microsoft as ops_microsoft
from memopt.estimators.onnx.ops import nn as ops_nn
from memopt.estimators.onnx.ops import quantized as ops_quantized
from memopt.estimators.onnx.ops import region as ops_region
from memopt.estimators.onnx.ops import sequence as ops_sequence
from memopt.estimators.onnx.ops import shape as ops_shape
from memopt.estimators.onnx.ops.fallback import infer_outputs, opaque
from memopt.estimators.onnx.ops.registry import DTYPES, OPS, Call, Malformed, NeedsValue
from memopt.estimators.onnx.read.graph import Graph, Node, Port, Weight
from memopt.estimators.onnx.read.lower import reads
from memopt.estimators.onnx.read.wire import SMALL_BYTES
from memopt.instrument.torch_internals import disable_current_modes

ROOMS = (
    ops_control, ops_index, ops_math, ops_microsoft, ops_nn, ops_quantized,
    ops_region, ops_sequence, ops_shape,
)  # fmt: skip
"""The modules whose import fills the registry."""

MOST_STEPS = 60_000
"""Node executions of one pass; a loop that wants more is refused."""

_GROWS = {
    "CenterCropPad", "ConstantOfShape", "Einsum", "Expand", "EyeLike", "If", "Loop", "MatMul", "OneHot", "Pad",
    "Range", "Resize", "Scan", "SequenceMap", "Tile", "Upsample",
}  # fmt: skip
_RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Dropout",
}  # fmt: skip
_UNFAKEABLE = (
    NeedsValue, NotImplementedError, DataDependentOutput, DynamicOutputShape,
    UnsupportedOperator, RuntimeError, ArithmeticError, AssertionError, IndexError, ValueError, TypeError,
    KeyError,
)  # fmt: skip

Env = dict[str, Any]


class Run:
    """One way of running a graph: its opset, its element types, and what had to be guessed on the way."""

    def __init__(
        self,
        opset: int,
        fake_mode: FakeTensorMode,
        *,
        main: torch.dtype = torch.float32,
        cast: torch.dtype | None = None,
        least: bool = False,
    ) -> None:
        self.least = least
        """Whether sizes that depend on data are taken as small as they can be, not as large."""
        self.opset = opset
        self.fake_mode = fake_mode
        self.main = main
        self.cast = cast or main
        """Floating-point values of the file's `main` type are of this type here."""
        self.exact = False
        self.partial: dict[str, str] = {}
        """Operators that were not really computed -> why."""
        self.bounded: dict[str, str] = {}
        """Nodes whose outputs' sizes depend on data -> their operators."""
        self.steps = 0
        self.entering: Callable[[str], None] | None = None
        """Told the module that each node comes from."""
        self.make: Callable[[tuple[int, ...], torch.dtype], Tensor] = self._empty
        self._guard = FakeTensorMode(allow_non_fake_inputs=True)

    # for operators

    def dtype(self, kind: int) -> torch.dtype:
        """The element type for an ONNX type number; inside shape arithmetic the file's own."""
        found = DTYPES.get(kind)
        if found is None:
            raise Malformed(f"there is no tensor element type {kind}")
        return self.cast if found == self.main and not self.exact else found

    def real(self, kind: torch.dtype, values: Any) -> Tensor:
        """A tensor whose values are known."""
        with disable_current_modes():
            return torch.tensor(values, dtype=kind)

    def outside(self, function: Callable[[], Tensor]) -> Tensor:
        """The result of `function`, which computes with known values only."""
        with disable_current_modes():
            return function()

    def bound(self, node: Node, most: int) -> int:
        """How much of `most` the data is taken to select; noted for `node`."""
        self.bounded[node.title] = node.op
        return min(FEW, most) if self.least else most

    def constant(self, weight: Weight) -> Tensor:
        """A weight that is not trained: real when its values are known, else fake."""
        if weight.values is not None:
            values = weight.values
            try:
                with disable_current_modes():
                    made = torch.from_numpy(values.copy()) if values.ndim else torch.tensor(values.item())
                    return made.to(DTYPES[weight.kind]).reshape(weight.dims)
            except (TypeError, KeyError, ValueError, RuntimeError):
                pass
        kind = DTYPES.get(weight.kind, torch.uint8)
        return self.make(weight.dims, self.cast if kind == self.main and not self.exact else kind)

    # running

    def _empty(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        with self.fake_mode:
            return torch.empty(shape, dtype=kind)

    def graph(
        self, graph: Graph, outer: Env, inputs: Mapping[str, Any], *, done: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """The outputs of `graph`. `outer` is what it can see around it, `done` what need not be computed again."""
        env: Env = {**outer, **inputs}
        for name, weight in graph.weights.items():
            if name not in env:
                env[name] = self.constant(weight)
        if done:
            env.update(done)
        last = last_uses(graph)
        for index, node in enumerate(graph.nodes):
            if not (done and all(o in done for o in node.outputs if o)):
                self.node(node, env, graph)
            for name in last.get(index, ()):
                env.pop(name, None)
        return [env[name] for name in graph.outputs]

    def count(self) -> None:
        """One operation more, or a turn of a loop, whose body may be empty."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise BadFile(
                f"the model runs more than {MOST_STEPS} operations in one pass",
                why="one of its loops does not end",
            )

    def node(self, node: Node, env: Env, graph: Graph) -> None:
        """Compute `node` and put its outputs into `env`."""
        self.count()
        if self.entering is not None:
            self.entering(node.scope)
        values = [env.get(name) if name else None for name in node.inputs]
        known = [v if is_known(v) else None for v in values]
        result: Any = None
        needed = 1 if node.op == "CastLike" else len(values)
        if all(k is not None for k, v in zip(known[:needed], values, strict=False) if v is not None):
            result = self._known(node, values, known, env)
        if result is None:
            result = self._faked(node, values, known, env, graph)
        outputs = result if isinstance(result, tuple) else (result,)
        for name, value in zip(node.outputs, outputs, strict=False):
            if name:
                env[name] = value
        for name in node.outputs[len(outputs) :]:
            if name:
                env[name] = None

    def _faked(
        self, node: Node, values: list[Any], known: list[Tensor | None], env: Env, graph: Graph
    ) -> Any:
        inputs = [self.fake(v) for v in values]
        function = OPS.get((node.domain, node.op))
        if function is None:
            self.partial.setdefault(_full_name(node), "memopt does not know this operator")
            return self._opaque(node, inputs, known, graph)
        call = Call(node, inputs, known, self, env)
        try:
            return function(call)
        except Malformed as wrong:
            raise BadFile(f"the model's node {node.title} cannot be", why=str(wrong)) from wrong
        except _UNFAKEABLE as error:
            return self._rescued(node, inputs, known, graph, error)

    def _rescued(
        self, node: Node, inputs: list[Any], known: list[Tensor | None], graph: Graph, error: Exception
    ) -> Any:
        why = str(error).strip().split("\n")[0] or type(error).__name__
        shapes = infer_outputs(node, inputs, known, self.opset)
        if shapes is None and not isinstance(error, NeedsValue | NotImplementedError | DynamicOutputShape):
            guessed = (
                f"; the shapes that {', '.join(self.partial)} gives were guessed" if self.partial else ""
            )
            raise BadFile(
                f"the model's node {node.title} cannot be computed", why=f"{why}; {_shapes(inputs)}{guessed}"
            ) from error
        self.partial.setdefault(_full_name(node), why)
        return self._opaque(node, inputs, known, graph)

    def _opaque(self, node: Node, inputs: list[Any], known: list[Tensor | None], graph: Graph) -> Any:
        found = infer_outputs(node, inputs, known, self.opset) or self._declared(node, inputs, graph)
        made = opaque([(shape, self.dtype(kind)) for shape, kind in found], inputs, self.make)
        return made[0] if len(made) == 1 else made

    def _declared(self, node: Node, inputs: list[Any], graph: Graph) -> list[tuple[tuple[int, ...], int]]:
        """What the file says of the outputs, else the shape of the first input."""
        first = next((v for v in inputs if isinstance(v, Tensor)), None)
        like = tuple(first.shape) if first is not None else ()
        out = []
        for name in node.outputs:
            port = graph.declared.get(name) or Port(name, 1, None)
            dims = port.dims
            if dims is None or len(dims) == len(like):
                dims = tuple(d if isinstance(d, int) else n for d, n in zip(dims or like, like, strict=True))
            shape = tuple(d if isinstance(d, int) else 1 for d in dims)
            out.append((shape, port.kind if port.kind in DTYPES else 1))
        return out

    def fake(self, value: Any) -> Any:
        """A known value as the fake world sees it; others as they are."""
        if is_known(value):
            with disable_current_modes():
                kind = self.cast if value.dtype == self.main else value.dtype
                return self.fake_mode.from_tensor(value.to(kind))
        if isinstance(value, list):
            return [self.fake(v) for v in value]
        return value

    # values

    def _known(self, node: Node, values: list[Any], known: list[Tensor | None], env: Env) -> Any:
        """The node's real results, when its inputs are known and its outputs small; else None."""
        function = OPS.get((node.domain, node.op))
        if function is None or node.op in _RANDOM:
            return None
        exact, self.exact = self.exact, True
        try:
            with disable_current_modes(), torch.no_grad():
                count = sum(k.numel() for k in known if k is not None)
                if (count > 64 or node.op in _GROWS) and not self._stays_small(
                    function, node, values, known, env
                ):
                    return None
                call = Call(node, values, known, self, env)
                result = function(call)
                return result if _small(result) and _real(result) else None
        except Malformed as wrong:
            raise BadFile(f"the model's node {node.title} cannot be", why=str(wrong)) from wrong
        except _UNFAKEABLE:
            return None
        finally:
            self.exact = exact

    def _stays_small(
        self,
        function: Callable[[Call], Any],
        node: Node,
        values: list[Any],
        known: list[Tensor | None],
        env: Env,
    ) -> bool:
        with self._guard:
            inputs = [self._guard.from_tensor(v) if isinstance(v, Tensor) else v for v in values]
            call = Call(node, inputs, known, self, env)
            return _small(function(call))


def is_known(value: Any) -> bool:
    """Whether a value is a real tensor, whose elements can be looked at."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor | torch.nn.Parameter)


def _small(result: Any) -> bool:
    if isinstance(result, tuple | list):
        return all(_small(r) for r in result if r is not None)
    return isinstance(result, Tensor) and result.numel() * result.element_size() <= SMALL_BYTES


def _real(result: Any) -> bool:
    """Not so when a branch reads values around it that are not known."""
    if isinstance(result, tuple | list):
        return all(_real(r) for r in result)
    return not isinstance(result, FakeTensor)


def last_uses(graph: Graph) -> dict[int, list[str]]:
    """Node index -> the names that nobody reads after it (the graph's outputs stay)."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in (*reads(node), *(o for o in node.outputs if o)):
            last[name] = index
    drops: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in graph.outputs:
            drops.setdefault(index, []).append(name)
    return drops


def _full_name(node: Node) -> str:
    return f"{node.domain}.{node.op}" if node.domain else node.op


def _shapes(inputs: Iterable[Any]) -> str:
    shapes = [str(list(v.shape)) if isinstance(v, Tensor) else "-" for v in inputs]
    return f"its inputs are {', '.join(shapes[:6])}" if shapes else "it has no inputs"


def nbytes(shape: Iterable[int], kind: torch.dtype) -> int:
    return math.prod(shape) * kind.itemsize
