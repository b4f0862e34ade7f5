"""Op times: flops against torch's own counter, the roofline's two sides by hand, and monotony on random shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from memopt.devices import DeviceSpec, find_device, named_devices
from memopt.estimators.elsewhere.op_time import (
    REACHABLE_BANDWIDTH,
    REACHABLE_FLOPS,
    OpCall,
    TensorShape,
    op_bytes,
    op_flops,
    op_time_ms,
)

A100 = find_device("a100-40gb")


def call(
    name: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], dtype: str = "float32", **more: object
) -> OpCall:
    return OpCall(name, [TensorShape(s, dtype) for s in inputs], [TensorShape(output, dtype)], more)


class Recorder(TorchDispatchMode):
    """Every op with its shapes, as the fake tracer hands them over."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        plain = {key: value for key, value in given.items() if not isinstance(value, torch.Tensor)}
        self.calls.append(OpCall(str(func), shapes(flat), shapes(result), plain))
        return result


def shapes(values: object) -> list[TensorShape]:
    items = values if isinstance(values, (list, tuple)) else [values]
    return [TensorShape(tuple(t.shape), str(t.dtype)) for t in items if isinstance(t, torch.Tensor)]


def run_conv() -> None:
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    y = torch.nn.Conv2d(8, 16, 3, padding=1)(x)
    torch.nn.ConvTranspose2d(16, 4, 2, stride=2)(y).sum().backward()


def run_products() -> None:
    a, b = torch.randn(7, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    c = torch.nn.Linear(3, 11)(a @ b)
    (
        torch.bmm(c[None], c.t()[None]) + torch.baddbmm(torch.zeros(1, 7, 7), c[None], c.t()[None])
    ).sum().backward()


@pytest.mark.parametrize("run", [run_conv, run_products])
def test_flops_are_those_of_torchs_counter(run: object) -> None:
    torch.manual_seed(0)
    counter = FlopCounterMode(display=False)
    with counter, Recorder() as recorder:
        run()  # type: ignore[operator]
    mine = sum(op_flops(c) for c in recorder.calls)
    assert mine == counter.get_total_flops() > 0


def test_attention_flops_are_those_of_torchs_formulas() -> None:
    query, key, value = (2, 4, 32, 16), (2, 4, 48, 16), (2, 4, 48, 24)
    out = (2, 4, 32, 24)
    forward = call("aten._scaled_dot_product_flash_attention.default", [query, key, value], out)
    assert op_flops(forward) == sdpa_flop_count(query, key, value)
    key, value = (2, 4, 48, 16), (2, 4, 48, 16)
    backward = call(
        "aten._scaled_dot_product_efficient_attention_backward.default", [query, query, key, value], query
    )
    assert op_flops(backward) == sdpa_backward_flop_count(query, query, key, value)
    causal = call(
        "aten._scaled_dot_product_flash_attention.default", [query, key, value], out, is_causal=True
    )
    assert op_flops(causal) == sdpa_flop_count(query, key, value) / 2


def test_a_large_product_runs_at_the_reachable_flops() -> None:
    op = call("aten.mm.default", [(13824, 8192), (8192, 8192)], (13824, 8192), "bfloat16")
    ideal_ms = 2 * 13824 * 8192 * 8192 / (A100.bf16_flops * REACHABLE_FLOPS) * 1e3
    assert op_time_ms(op, A100) == pytest.approx(ideal_ms, rel=0.01)  # 6912 tiles: 64 full waves


def test_an_elementwise_op_runs_at_the_reachable_bandwidth() -> None:
    op = call("aten.add.Tensor", [(1 << 26,), (1 << 26,)], (1 << 26,))
    ideal_ms = 3 * (1 << 28) / (A100.memory_bytes_per_s * REACHABLE_BANDWIDTH) * 1e3
    assert op_time_ms(op, A100) == pytest.approx(ideal_ms + 0.002)


def test_a_tiny_op_costs_its_launch() -> None:
    assert op_time_ms(call("aten.add.Tensor", [(1,), (1,)], (1,)), A100) == A100.launch_us / 1e3


@pytest.mark.parametrize("name", ["aten.view.default", "aten::t", "aten.empty.memory_format", "detach"])
def test_views_are_free(name: str) -> None:
    op = call(name, [(1 << 20,)], (1 << 20,))
    assert op_time_ms(op, A100) == 0
    assert op_bytes(op) == 0


def test_tf32_is_on_for_convolutions_and_off_for_products() -> None:
    product = call("aten.mm.default", [(4096, 4096), (4096, 4096)], (4096, 4096))
    assert op_time_ms(product, A100) == pytest.approx(
        8 * op_time_ms(product, A100, matmul_tf32=True), rel=0.05
    )
    conv = call(
        "aten.convolution.default", [(64, 256, 56, 56), (256, 256, 3, 3)], (64, 256, 56, 56), groups=1
    )
    assert op_time_ms(conv, A100) < op_time_ms(conv, A100, conv_tf32=False) / 4


def test_depthwise_convolutions_do_not_use_tensor_cores() -> None:
    op = call(
        "aten.convolution.default",
        [(64, 256, 56, 56), (256, 1, 7, 7)],
        (64, 256, 56, 56),
        "float16",
        groups=256,
    )
    flops = 2 * 64 * 256 * 56 * 56 * 49
    assert op_flops(op) == flops
    assert op_time_ms(op, A100) == pytest.approx(flops / (A100.fp32_flops * REACHABLE_FLOPS) * 1e3, rel=0.05)


def test_an_embedding_reads_rows_not_the_table() -> None:
    op = OpCall(
        "aten.embedding.default",
        [TensorShape((50000, 1024)), TensorShape((8, 128), "torch.int64")],
        [TensorShape((8, 128, 1024))],
    )
    assert op_bytes(op) == 2 * 8 * 128 * 1024 * 4 + 8 * 128 * 8


def test_a_read_back_waits() -> None:
    assert op_time_ms(OpCall("aten._local_scalar_dense.default", [TensorShape(())], []), A100) >= 0.01


def test_foreach_launches_by_groups_of_tensors() -> None:
    op = OpCall("aten._foreach_add_.Scalar", [TensorShape((1,))] * 250, [])
    assert op_time_ms(op, A100) == pytest.approx(3 * A100.launch_us / 1e3)


@pytest.mark.parametrize("device", named_devices(), ids=lambda row: row.name)
def test_every_device_gives_a_finite_time(device: DeviceSpec) -> None:
    for dtype in ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int64"):
        op = call("aten.mm.default", [(512, 512), (512, 512)], (512, 512), dtype)
        assert 0 < op_time_ms(op, device) < 1e4


NAMES = st.sampled_from([
    "aten.mm.default", "aten.addmm.default", "aten.convolution.default", "aten.convolution_backward.default", "aten.sum.dim_IntList",
    "aten._scaled_dot_product_flash_attention.default", "my.thing", "", "...", "aten._cudnn_rnn.default", "aten.embedding.default",
])  # fmt: skip
SHAPES = st.lists(st.lists(st.integers(0, 64), max_size=5).map(tuple), max_size=4)


@settings(max_examples=300, deadline=None)
@given(name=NAMES, inputs=SHAPES, outputs=SHAPES)
def test_any_shapes_give_a_time(
    name: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]]
) -> None:
    op = OpCall(name, [TensorShape(s) for s in inputs], [TensorShape(s) for s in outputs])
    assert 0 <= op_time_ms(op, A100) < 1e6
    assert op_flops(op) >= 0
