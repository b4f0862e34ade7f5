"""Elementwise, reducing and multiplying ONNX operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.estimators.onnx.ops.registry import OPS, Call, Malformed, alike, op, positive

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil,
    "Cos": torch.cos, "Cosh": torch.cosh, "Det": torch.linalg.det, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "HardSwish": F.hardswish, "IsInf": torch.isinf, "IsNaN": torch.isnan, "Log": torch.log,
    "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": F.relu,
    "Round": torch.round, "Selu": F.selu, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh,
}  # fmt: skip

_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Pow": lambda a, b: _power(a, b),
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "BitwiseAnd": lambda a, b: a & b,
    "BitwiseOr": lambda a, b: a | b,
    "BitwiseXor": lambda a, b: a ^ b,
}


def _register_tables() -> None:
    for name, unary in _UNARY.items():
        OPS["", name] = _of_one(unary)
    for name, binary in _BINARY.items():
        OPS["", name] = _of_two(binary)
    for name, dims in _REDUCE.items():
        OPS["", name] = _reducing(dims)


def _of_one(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0))


def _of_two(function: Callable[[Any, Any], Tensor]) -> Callable[[Call], Tensor]:
    def binary(call: Call) -> Tensor:
        a, b = call.operand(0), call.operand(1)
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = call.tensor(0)
        if function in (torch.logical_and, torch.logical_or, torch.logical_xor):
            a, b = call.tensor(0), call.tensor(1)
        return function(a, b)

    return binary


def _power(base: Any, exponent: Any) -> Tensor:
    """A power of the base's type, as ONNX has it; a plain number's type gives way."""
    out: Tensor = torch.pow(base, exponent)
    return out.to(base.dtype) if isinstance(base, Tensor) and not base.is_floating_point() else out


@op("Div")
def div(call: Call) -> Tensor:
    a, b = call.operand(0), call.operand(1)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = call.tensor(0)
    whole = not any(t.is_floating_point() if isinstance(t, Tensor) else isinstance(t, float) for t in (a, b))
    if whole:
        return torch.div(call.tensor(0), b, rounding_mode="trunc")
    return a / b  # type: ignore[no-any-return]


@op("Mod")
def mod(call: Call) -> Tensor:
    function = torch.fmod if call.number("fmod", 0) else torch.remainder
    return function(call.tensor(0), call.tensor(1))


@op("BitShift")
def bit_shift(call: Call) -> Tensor:
    left = call.attribute("direction") == "LEFT"
    function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    return function(call.tensor(0), call.tensor(1))


@op("Sum")
def sum_of_all(call: Call) -> Tensor:
    return reduce(torch.add, call.tensors())


@op("Mean")
def mean_of_all(call: Call) -> Tensor:
    return reduce(torch.add, call.tensors()) / len(call.tensors())


@op("Max")
def max_of_all(call: Call) -> Tensor:
    return reduce(torch.maximum, call.tensors())


@op("Min")
def min_of_all(call: Call) -> Tensor:
    return reduce(torch.minimum, call.tensors())


@op("Clip")
def clip(call: Call) -> Tensor:
    x = call.tensor(0)
    low, high = call.attribute("min"), call.attribute("max")
    low = call.operand(1) if call.has(1) else low
    high = call.operand(2) if call.has(2) else high
    if low is None and high is None:
        return x
    return torch.clamp(x, min=low, max=high)


@op("LeakyRelu")
def leaky_relu(call: Call) -> Tensor:
    return F.leaky_relu(call.tensor(0), call.attribute("alpha", 0.01))


@op("Elu")
def elu(call: Call) -> Tensor:
    return F.elu(call.tensor(0), call.attribute("alpha", 1.0))


@op("Celu")
def celu(call: Call) -> Tensor:
    return F.celu(call.tensor(0), call.attribute("alpha", 1.0))


@op("ThresholdedRelu")
def thresholded_relu(call: Call) -> Tensor:
    return F.threshold(call.tensor(0), call.attribute("alpha", 1.0), 0.0)


@op("Shrink")
def shrink(call: Call) -> Tensor:
    lambd = call.attribute("lambd", 0.5)
    return (
        F.softshrink(call.tensor(0), lambd) if call.attribute("bias") else F.hardshrink(call.tensor(0), lambd)
    )


@op("HardSigmoid")
def hard_sigmoid(call: Call) -> Tensor:
    return F.hardsigmoid(call.tensor(0))


@op("Gelu")
@op("Gelu", domain="com.microsoft")
def gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0), approximate=call.attribute("approximate", "none"))


@op("Swish")
@op("Silu", domain="memopt")
def swish(call: Call) -> Tensor:
    alpha = call.attribute("alpha", 1.0)
    x = call.tensor(0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@op("SwiGLU")
def swiglu(call: Call) -> Tensor:
    if call.has(1):
        return F.silu(call.tensor(0)) * call.tensor(1)
    gate, up = call.tensor(0).chunk(2, call.number("axis", -1))
    return F.silu(gate) * up


@op("PRelu")
def prelu(call: Call) -> Tensor:
    x, slope = alike([call.tensor(0), call.tensor(1)])
    channels = x.shape[1] if x.dim() > 1 else 1
    if slope.numel() in (1, channels):
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@op("Softmax", "LogSoftmax", "Hardmax")
def softmax(call: Call) -> Tensor:
    x = call.tensor(0)
    functions: dict[str, Callable[[Tensor, int], Tensor]] = {
        "Softmax": lambda x, dim: F.softmax(x, dim=dim),
        "LogSoftmax": lambda x, dim: F.log_softmax(x, dim=dim),
        "Hardmax": _hardmax,
    }
    function = functions[call.node.op]
    if call.opset >= 13:
        return function(x, positive(call.number("axis", -1), x.dim()))
    axis = positive(call.number("axis", 1), x.dim()) if x.dim() > 1 else 0
    if axis == x.dim() - 1:
        return function(x, axis)
    return function(x.flatten(axis), axis).reshape(x.shape)


def _hardmax(x: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(x).scatter(dim, x.argmax(dim, keepdim=True), 1)


_Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((positive(a, x.dim()) for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.mean(x, axes, keepdim=keep)
    return torch.mean(x.double(), axes, keepdim=keep).to(x.dtype)


_REDUCE: dict[str, _Reduce] = {
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype),
    "ReduceMean": _mean,
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: torch.sum(torch.abs(x), axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keepdim=keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(torch.square(x), axes, keepdim=keep),
}


def _reducing(function: _Reduce) -> Callable[[Call], Tensor]:
    def reducing(call: Call) -> Tensor:
        x = call.tensor(0)
        axes = call.axes()
        if not axes:
            if call.number("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.dim()))
        axes = [positive(a, x.dim()) for a in axes]
        return function(x, axes, bool(call.number("keepdims", 1)))

    return reducing


@op("ArgMax", "ArgMin")
def arg_extreme(call: Call) -> Tensor:
    function = torch.argmax if call.node.op == "ArgMax" else torch.argmin
    x = call.tensor(0)
    return function(x, positive(call.number("axis", 0), x.dim()), keepdim=bool(call.number("keepdims", 1)))


@op("TopK")
def top_k(call: Call) -> tuple[Tensor, Tensor]:
    k = call.scalar(1) if call.has(1) else call.number("k", 1)
    largest = bool(call.number("largest", 1))
    values, indices = torch.topk(call.tensor(0), int(k), call.number("axis", -1), largest=largest)
    return values, indices


@op("CumSum", "CumProd")
def cumulative(call: Call) -> Tensor:
    function = torch.cumsum if call.node.op == "CumSum" else torch.cumprod
    x, axis, backwards = call.tensor(0), int(call.scalar(1)), bool(call.number("reverse", 0))
    x = x.flip(axis) if backwards else x
    if call.number("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), 0 if call.node.op == "CumSum" else 1)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    x = function(x, axis, dtype=x.dtype)
    return x.flip(axis) if backwards else x


@op("MatMul")
def matmul(call: Call) -> Tensor:
    a, b = alike([call.tensor(0), call.tensor(1)])
    return torch.matmul(a, b)


@op("Linear", domain="memopt")
def linear(call: Call) -> Tensor:
    """MatMul and Add put together again; the weight lies as MatMul reads it, inputs first."""
    x, weight, bias = alike([call.tensor(0), call.tensor(1), call.tensor(2)])
    return F.linear(x, weight.t(), bias.reshape(-1))


@op("Gemm")
@op("FusedGemm", domain="com.microsoft")
def gemm(call: Call) -> Tensor:
    a, b = alike([call.tensor(0), call.tensor(1)])
    a = a.t() if call.number("transA", 0) else a
    b = b if call.number("transB", 0) else b.t()
    c = call.optional(2)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if alpha == beta == 1.0 and (c is None or c.dim() == 1):
        return F.linear(a, b, c if c is None else c.to(a.dtype))
    out = torch.matmul(a, b.t())
    out = out if alpha == 1.0 else out * alpha
    return out if c is None else out + (c if beta == 1.0 else c * beta)


@op("Einsum")
def einsum(call: Call) -> Tensor:
    equation = call.attribute("equation")
    if not isinstance(equation, str):
        raise Malformed("attribute 'equation' is missing")
    return torch.einsum(equation.replace(" ", ""), *alike(call.tensors()))


@op("Rsqrt", domain="memopt")
def rsqrt(call: Call) -> Tensor:
    return torch.rsqrt(call.tensor(0))


_register_tables()
