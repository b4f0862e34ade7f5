"""The table of ONNX operators, filled by decorator, and what an operator's function is handed.

    @op("Relu")
    def relu(call: Call) -> Tensor:
        return F.relu(call.tensor(0))

An operator's function sees fake tensors, or, where every input's values are known (shape arithmetic), real small ones.
It returns a tensor, a tuple of them for several outputs, or a list for a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from memopt.estimators.onnx.read.graph import Graph, Node, Weight
from memopt.instrument.torch_internals import disable_current_modes

DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64,
    14: torch.complex64, 15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz, 19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
    21: torch.uint8, 22: torch.int8, 23: torch.uint8,
}  # fmt: skip
"""ONNX element types; 4-bit ones take a byte here."""

OPS: dict[tuple[str, str], Callable[[Call], Any]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def op(*names: str, domain: str = "") -> Callable[[Function], Function]:
    """Register a function as the meaning of the operators `names` of `domain`."""

    def register(function: Function) -> Function:
        for name in names:
            OPS[domain, name] = function
        return function

    return register


class NeedsValue(Exception):
    """An operator needs the values of an input of which only the shape is known."""


class Malformed(Exception):
    """A node lacks an input or an attribute, or has one that cannot be."""


class Run(Protocol):
    """What an operator may ask of the pass over the graph that it is computed in (`interpret.Run`)."""

    opset: int
    partial: dict[str, str]
    make: Callable[[tuple[int, ...], torch.dtype], Tensor]

    def dtype(self, kind: int, /) -> torch.dtype: ...

    def real(self, kind: torch.dtype, values: Any, /) -> Tensor: ...

    def outside(self, function: Callable[[], Tensor], /) -> Tensor: ...

    def bound(self, node: Node, most: int, /) -> int: ...

    def constant(self, weight: Weight, /) -> Tensor: ...

    def graph(self, graph: Graph, outer: dict[str, Any], inputs: Mapping[str, Any], /) -> list[Any]: ...

    def count(self) -> None: ...


class Call:
    """One node with its inputs at hand. `known` holds the values of those inputs that are known, else None."""

    __slots__ = ("env", "inputs", "known", "node", "opset", "run")

    def __init__(
        self, node: Node, inputs: list[Any], known: list[Tensor | None], run: Run, env: dict[str, Any]
    ) -> None:
        self.node = node
        self.inputs = inputs
        self.known = known
        self.opset = run.opset
        self.run = run
        self.env = env
        """What the node's branches and bodies can see."""

    def tensor(self, index: int) -> Tensor:
        """Input `index`, which the operator cannot do without."""
        value = self.optional(index)
        if value is None:
            raise Malformed(f"input {index} is missing")
        return value

    def optional(self, index: int) -> Tensor | None:
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is not None and not isinstance(value, Tensor):
            raise Malformed(f"input {index} is a sequence, not a tensor")
        return value

    def sequence(self, index: int) -> list[Tensor]:
        value = self.inputs[index] if index < len(self.inputs) else None
        if not isinstance(value, list):
            raise Malformed(f"input {index} is no sequence")
        return value

    def tensors(self) -> list[Tensor]:
        """All inputs that are there; at least one."""
        found = [self.tensor(i) for i, value in enumerate(self.inputs) if value is not None]
        if not found:
            raise Malformed("it has no inputs")
        return found

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def wants(self, index: int) -> bool:
        """Whether somebody reads output `index`."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def value(self, index: int) -> Tensor:
        """The values of input `index`; raises `NeedsValue` when they depend on data."""
        if not self.has(index):
            raise Malformed(f"input {index} is missing")
        known = self.known[index]
        if known is None:
            raise NeedsValue(f"the values of input {index} ('{self.node.inputs[index]}') depend on data")
        return known

    def ints(self, index: int) -> list[int]:
        return [int(v) for v in numbers_of(self.value(index))]

    def floats(self, index: int) -> list[float]:
        return [float(v) for v in numbers_of(self.value(index))]

    def scalar(self, index: int) -> Any:
        value = self.value(index)
        if value.numel() != 1:
            raise Malformed(f"input {index} is no single number")
        return numbers_of(value)[0]

    def operand(self, index: int) -> Any:
        """Input `index` for an elementwise operator: a plain number where the model has a known scalar."""
        known = self.known[index] if index < len(self.known) else None
        if known is not None and known.numel() == 1 and known.dim() <= 1:
            others = [v for i, v in enumerate(self.inputs) if i != index and isinstance(v, Tensor)]
            if all(v.dim() >= known.dim() and _absorbs(v, known) for v in others) and others:
                return numbers_of(known)[0]
        return self.tensor(index)

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def number(self, name: str, default: int) -> int:
        value = self.attribute(name, default)
        if not isinstance(value, int):
            raise Malformed(f"attribute '{name}' is no integer")
        return value

    def numbers(self, name: str) -> list[int] | None:
        value = self.attribute(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
            raise Malformed(f"attribute '{name}' is no list of integers")
        return list(value)

    def graph(self, name: str) -> Graph:
        value = self.attribute(name)
        if not isinstance(value, Graph):
            raise Malformed(f"attribute '{name}' is no graph")
        return value

    def weight(self, name: str) -> Weight | None:
        value = self.attribute(name)
        return value if isinstance(value, Weight) else None

    def axes(self, index: int = 1) -> list[int] | None:
        """The axes, an attribute in old opsets and an input in new ones; None when not given."""
        return self.ints(index) if self.has(index) else self.numbers("axes")


def numbers_of(known: Tensor) -> list[Any]:
    """The elements of a real tensor, looked at from within the fake world."""
    with disable_current_modes():
        return known.reshape(-1).tolist()


def _absorbs(value: Tensor, scalar: Tensor) -> bool:
    """Whether a Python number in place of `scalar` leaves the result's type as it is."""
    return value.is_floating_point() or not scalar.is_floating_point()


def positive(axis: int, rank: int) -> int:
    """`axis` counted from the front; raises `Malformed` outside the rank."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise Malformed(f"axis {axis} is outside a tensor of rank {rank}")
    return axis + rank if axis < 0 else axis


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in one element type, the promoted one, as ONNX demands and mixed precision breaks.

    Under autocast they stay as they are: it casts them itself.
    """
    if torch.is_autocast_enabled("cpu"):
        return list(tensors)
    kind = tensors[0].dtype
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    return [t if t.dtype == kind else t.to(kind) for t in tensors]
