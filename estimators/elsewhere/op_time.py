"""How long an op takes on a device that is not here: a roofline from plain shapes and dtypes. Modelled, never measured.

    time = max(launch on the host, ramp + max(flops / reachable flops, bytes / reachable bandwidth))

Flop formulas count a multiply-add as two, as torch.utils.flop_counter does. Matrix products are slowed by what their tiles
leave idle; everything else is bound by what it reads and writes. Views are free. Good for comparing plans (20-40 % off on
single ops of usual size); not for predicting a benchmark: no caches, no cuDNN algorithm choice, no overlap between streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from memopt.devices import DeviceSpec

REACHABLE_FLOPS = 0.75
"""Share of the data sheet's flops that a large matrix product reaches."""
REACHABLE_BANDWIDTH = 0.85
RAMP_US = 2.0
"""What a kernel takes on the device whatever its size."""
SYNC_US = 10.0
"""A read-back to the host (`.item()`)."""
_TILE = 128
_TENSORS_PER_LAUNCH = 100
"""Of a foreach op: a multi-tensor kernel takes about this many tensors at a time."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4,
    "uint64": 8, "complex32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor without its values: `TensorShape((8, 512), "bfloat16")`. The dtype may be written `torch.bfloat16`."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES.get(self.dtype.removeprefix("torch."), 4)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op: its name (`aten.addmm.default`, `addmm`), the tensors among its arguments in order, its results, and the
    arguments that its flops depend on (`transposed`, `groups`, `is_causal`, `output_mask`)."""

    name: str
    inputs: Sequence[TensorShape]
    outputs: Sequence[TensorShape]
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def base_name(self) -> str:
        """`addmm` for `aten.addmm.default` and `aten::addmm`."""
        parts = self.name.replace("::", ".").split(".")
        return parts[1] if len(parts) > 1 and parts[0] in _NAMESPACES else parts[0]

    @property
    def dtype(self) -> str:
        """Of the first floating-point operand, on which the choice of units depends."""
        names = [t.dtype.removeprefix("torch.") for t in (*self.inputs, *self.outputs)]
        return next(
            (name for name in names if "float" in name or "complex" in name), names[0] if names else ""
        )


_NAMESPACES = ("aten", "prims", "torch", "torchvision", "quantized", "prim")


def op_time_ms(op: OpCall, device: DeviceSpec, *, matmul_tf32: bool = False, conv_tf32: bool = True) -> float:
    """Milliseconds that `op` takes on `device`. The two switches are torch's defaults for fp32 on tensor cores."""
    name = op.base_name
    if name in _VIEWS:
        return 0.0
    launches = _launches(op)
    if not launches:
        return 0.0
    compute_us = _compute_us(op, device, tf32=conv_tf32 if "conv" in name else matmul_tf32)
    memory_us = op_bytes(op) / (device.memory_bytes_per_s * REACHABLE_BANDWIDTH) * 1e6
    ramp_us = RAMP_US if device.kind != "cpu" else 0.0
    sync_us = SYNC_US if name in _SYNCS and device.kind != "cpu" else 0.0
    return (
        max(device.launch_us * launches, ramp_us * launches + max(compute_us, memory_us)) / 1e3
        + sync_us / 1e3
    )


def op_flops(op: OpCall) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 for all that memory bounds."""
    formula = _FLOPS.get(op.base_name)
    return float(formula(op)) if formula is not None and op.inputs else 0.0


def op_bytes(op: OpCall) -> int:
    """Bytes read from and written to the device's memory."""
    name = op.base_name
    if name in _VIEWS:
        return 0
    written = sum(t.size_bytes for t in op.outputs)
    if name in _GATHERS:  # reads what it writes, not the whole table
        indices = sum(t.size_bytes for t in op.inputs if not _is_float(t))
        return 2 * written + indices
    if name in _FILLS:
        return written or sum(t.size_bytes for t in op.inputs[:1])
    read = sum(t.size_bytes for t in op.inputs)
    if name in _TWICE_READ and op.inputs:
        read += op.inputs[0].size_bytes
    return read + written


def _is_float(tensor: TensorShape) -> bool:
    return "float" in tensor.dtype or "complex" in tensor.dtype


def _launches(op: OpCall) -> int:
    """How many kernels the op starts."""
    tensors = max(len(op.inputs), len(op.outputs))
    if op.base_name.startswith(("_foreach", "_fused_")) and "attention" not in op.base_name:
        return max(1, -(-tensors // _TENSORS_PER_LAUNCH))
    if op.base_name in _BACKWARDS_OF_TWO:
        return 2
    return 1


def _compute_us(op: OpCall, device: DeviceSpec, *, tf32: bool) -> float:
    flops = op_flops(op)
    if not flops:
        return 0.0
    peak, tiled = _peak_flops(op, device, tf32=tf32)
    used = _tiles_used(op, device.multiprocessors) if tiled else 1.0
    return flops / (peak * REACHABLE_FLOPS * used) * 1e6


def _peak_flops(op: OpCall, device: DeviceSpec, *, tf32: bool) -> tuple[float, bool]:
    """The device's flops for the op's type, and whether tensor cores give them."""
    if _depthwise(op):
        return device.fp32_flops, False
    match op.dtype:
        case "float16":
            return device.fp16_flops, True
        case "bfloat16":
            return device.bf16_flops, device.bf16_flops > device.fp32_flops
        case "float8_e4m3fn" | "float8_e5m2":
            doubled = device.capability_pair >= (8, 9)
            return device.fp16_flops * (2 if doubled else 1), True
        case "float64" | "complex128":
            data_center = device.capability in ("6.0", "7.0", "8.0", "9.0", "9.4", "0.0")
            return device.fp32_flops / (2 if data_center else 64), False
    return (device.tf32_flops, True) if tf32 else (device.fp32_flops, True)


def _tiles_used(op: OpCall, multiprocessors: int) -> float:
    """Share of the device that the tiles of the largest product keep busy; split-k helps where tiles are few."""
    shape = op.outputs[0].shape if op.outputs else ()
    if len(shape) < 2 or not multiprocessors or 0 in shape:
        return 1.0
    if "conv" in op.base_name:  # as a product: batch x positions by channels
        rows, columns = math.prod(shape) // max(shape[1], 1), shape[1]
        batch = 1
    else:
        rows, columns, batch = shape[-2], shape[-1], math.prod(shape[:-2])
    depth = max(op_flops(op) / (2 * max(math.prod(shape), 1)), 1.0)
    tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
    filled = (rows / (_TILE * -(-rows // _TILE))) * (columns / (_TILE * -(-columns // _TILE)))
    if tiles < multiprocessors:
        tiles = min(multiprocessors, int(tiles * max(1, depth // 512)))
    waves = -(-tiles // multiprocessors)
    return max(filled, 0.05) * max(tiles / (waves * multiprocessors), 0.02)


def _depthwise(op: OpCall) -> bool:
    groups = op.arguments.get("groups", 1)
    return "conv" in op.base_name and isinstance(groups, int) and groups > 1 and groups == _channels(op)


def _channels(op: OpCall) -> int:
    backward = op.base_name.endswith("backward")
    tensor = op.inputs[1] if backward and len(op.inputs) > 1 else op.inputs[0] if op.inputs else None
    return tensor.shape[1] if tensor is not None and len(tensor.shape) > 1 else 0


Formula = Callable[[OpCall], float]


def _product(left: int, right: int) -> Formula:
    """Of `inputs[left] @ inputs[right]`, with or without leading dimensions."""

    def flops(op: OpCall) -> float:
        if len(op.inputs) <= max(left, right) or not op.inputs[left].shape or not op.inputs[right].shape:
            return 0.0
        a, b = op.inputs[left].shape, op.inputs[right].shape
        return 2.0 * math.prod(a) * (b[-1] if len(b) > 1 else 1)

    return flops


def _linear(op: OpCall) -> float:
    if len(op.inputs) < 2 or not op.inputs[1].shape:
        return 0.0
    return 2.0 * math.prod(op.inputs[0].shape) * op.inputs[1].shape[0]


def _conv(op: OpCall) -> float:
    """Each output element (transposed: each input element) meets one filter."""
    if len(op.inputs) < 2 or not op.outputs:
        return 0.0
    weight = op.inputs[1].shape
    positions = op.inputs[0] if op.arguments.get("transposed") else op.outputs[0]
    return 2.0 * positions.elements * math.prod(weight[1:])


def _conv_backward(op: OpCall) -> float:
    """inputs: output gradient, input, weight. Each wanted gradient costs as much as the forward."""
    if len(op.inputs) < 3:
        return 0.0
    mask = op.arguments.get("output_mask", (True, True, False))
    wanted = sum(map(bool, mask[:2])) if isinstance(mask, (list, tuple)) else 2
    positions = op.inputs[1] if op.arguments.get("transposed") else op.inputs[0]
    return wanted * 2.0 * positions.elements * math.prod(op.inputs[2].shape[1:])


def _attention(first: int, products: float) -> Formula:
    """`products` products of queries with keys, from `inputs[first]` on: query, key, value of (batch, heads, length, dim)."""

    def flops(op: OpCall) -> float:
        if len(op.inputs) < first + 3:
            return 0.0
        query, key, value = (op.inputs[first + i].shape for i in range(3))
        if min(len(query), len(key), len(value)) < 3:
            return 0.0
        length = key[-2]
        pairs = math.prod(query[:-1]) * length
        share = 0.5 if op.arguments.get("is_causal") else 1.0
        return products * share * pairs * (query[-1] + value[-1])

    return flops


def _recurrent(op: OpCall) -> float:
    """inputs: sequence and weights. Each weight matrix meets every step of every row once."""
    if not op.inputs or len(op.inputs[0].shape) < 2:
        return 0.0
    steps = math.prod(op.inputs[0].shape[:-1])
    weights = sum(t.elements for t in op.inputs[1:] if len(t.shape) == 2)
    return 2.0 * steps * weights


_FLOPS: dict[str, Formula] = {
    "mm": _product(0, 1), "bmm": _product(0, 1), "matmul": _product(0, 1), "mv": _product(0, 1), "_scaled_mm": _product(0, 1),
    "dot": _product(0, 1), "addmm": _product(1, 2), "baddbmm": _product(1, 2), "addbmm": _product(1, 2),
    "_addmm_activation": _product(1, 2), "addmv": _product(1, 2), "linear": _linear, "mkldnn_linear": _linear,
    "convolution": _conv, "_convolution": _conv, "cudnn_convolution": _conv, "mkldnn_convolution": _conv,
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "_conv_depthwise2d": _conv, "miopen_convolution": _conv,
    "slow_conv2d_forward": _conv, "_slow_conv2d_forward": _conv,
    "cudnn_convolution_transpose": lambda op: _conv(OpCall("", op.inputs, op.outputs, {"transposed": True})),
    "convolution_backward": _conv_backward, "_slow_conv2d_backward": _conv_backward,
    "scaled_dot_product_attention": _attention(0, 2.0),
    "_scaled_dot_product_flash_attention": _attention(0, 2.0),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(0, 2.0),
    "_scaled_dot_product_efficient_attention": _attention(0, 2.0),
    "_scaled_dot_product_cudnn_attention": _attention(0, 2.0),
    "_scaled_dot_product_fused_attention_overrideable": _attention(0, 2.0),
    "_scaled_dot_product_flash_attention_backward": _attention(1, 5.0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 5.0),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, 5.0),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1, 5.0),
    "_cudnn_rnn": _recurrent, "lstm": _recurrent, "gru": _recurrent, "mkldnn_rnn_layer": _recurrent, "miopen_rnn": _recurrent,
    "_cudnn_rnn_backward": lambda op: 2 * _recurrent(op), "mkldnn_rnn_layer_backward": lambda op: 2 * _recurrent(op),
}  # fmt: skip

_VIEWS = frozenset((
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "expand_as", "slice", "select", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "split_with_sizes", "chunk", "unbind", "diagonal", "narrow", "unfold",
    "view_as_real", "view_as_complex", "_reshape_alias", "lift_fresh", "movedim", "swapaxes", "real", "imag", "_conj",
    "flatten", "unflatten", "view_as", "numpy_T", "mT", "empty", "empty_like", "empty_strided", "new_empty", "reshape",
    "new_empty_strided", "is_same_size", "size", "stride", "set_", "resize_", "detach_", "squeeze_", "unsqueeze_",
    "transpose_", "t_", "_to_dense_view", "sym_size", "record_stream",
))  # fmt: skip
_GATHERS = frozenset(
    ("embedding", "index_select", "gather", "index", "take", "embedding_bag", "_embedding_bag")
)
_FILLS = frozenset((
    "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "zero_", "fill_", "new_zeros", "new_ones", "new_full",
    "arange", "rand", "randn", "rand_like", "randn_like", "randint", "bernoulli_", "uniform_", "normal_", "randperm",
))  # fmt: skip
_TWICE_READ = frozenset((
    "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward",
    "cudnn_batch_norm_backward", "native_layer_norm_backward", "native_group_norm", "_batch_norm_with_update",
    "batch_norm_backward",
))  # fmt: skip
_BACKWARDS_OF_TWO = frozenset((
    "convolution_backward", "native_layer_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
))  # fmt: skip
_SYNCS = frozenset(("_local_scalar_dense", "item", "nonzero", "unique", "_unique2", "masked_select", "equal"))
