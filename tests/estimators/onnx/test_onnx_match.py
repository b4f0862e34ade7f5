"""Decomposed operators are found again; hand-written ones of a PyTorch script stay as they are."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from memopt.estimators.onnx.estimate import plan_training, record_onnx
from memopt.estimators.onnx.read.graph import Node

FLOAT = TensorProto.FLOAT


class Builder:
    """Nodes and constants of one graph, written as expressions."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def __call__(self, op: str, *inputs: Any, **attributes: Any) -> str:
        out = f"t{len(self.nodes)}"
        names = [i if isinstance(i, str) else self.number(i) for i in inputs]
        self.nodes.append(helper.make_node(op, names, [out], **attributes))
        return out

    def number(self, value: float) -> str:
        name = f"val_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def ints(self, *values: int) -> str:
        name = f"val_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def weight(self, name: str, *dims: int) -> str:
        self.weights.append(numpy_helper.from_array(np.zeros(dims, np.float32), name))
        return name

    def save(
        self, folder: Path, out: str, shape: tuple[Any, ...], *, opset: int = 18, producer: str = ""
    ) -> Path:
        graph = helper.make_graph(
            [*self.nodes, helper.make_node("Identity", [out], ["out"])],
            "g",
            [helper.make_tensor_value_info("x", FLOAT, shape)],
            [helper.make_tensor_value_info("out", FLOAT, None)],
            self.weights,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)], producer_name=producer
        )
        path = folder / "model.onnx"
        onnx.save(model, path)
        return path


def operators(path: Path, **more: Any) -> Counter[str]:
    return Counter(n.op for n in plan_training(path, batch_size=None, dims={}, **more).graph.nodes)


def nodes_of(path: Path, op: str) -> list[Node]:
    return [n for n in plan_training(path, batch_size=None, dims={}).graph.nodes if n.op == op]


# activations


def gelu(b: Builder, x: str, form: int) -> str:
    if form == 0:  # torch.onnx: x * (0.5 * (1 + erf(x / sqrt 2)))
        return b("Mul", x, b("Mul", 0.5, b("Add", b("Erf", b("Div", x, math.sqrt(2))), 1.0)))
    if form == 1:  # the old exporter: (x * (1 + erf)) * 0.5
        return b("Mul", b("Mul", x, b("Add", b("Erf", b("Mul", x, math.sqrt(0.5))), 1.0)), 0.5)
    if form == 2:  # by hand: (x * 0.5) * (1 + erf)
        return b("Mul", b("Mul", x, 0.5), b("Add", 1.0, b("Erf", b("Div", x, math.sqrt(2)))))
    cubed = b("Mul", 0.044715, b("Pow", x, 3.0))
    inner = b("Tanh", b("Mul", math.sqrt(2 / math.pi), b("Add", x, cubed)))
    if form == 3:  # torch.onnx's tanh form
        return b("Mul", x, b("Mul", 0.5, b("Add", inner, 1.0)))
    return b("Mul", b("Mul", 0.5, x), b("Add", inner, 1.0))  # by hand, GPT-2's


@pytest.mark.parametrize("form", range(5))
def test_gelu_is_found_in_every_order(tmp_path: Path, form: int) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    found = nodes_of(b.save(tmp_path, gelu(b, h, form), (2, 8)), "Gelu")
    assert len(found) == 1
    assert found[0].attributes.get("approximate", "none") == ("tanh" if form >= 3 else "none")
    assert found[0].inputs == ("t0",)


@pytest.mark.parametrize(("form", "fused"), [(0, 1), (1, 1), (2, 0), (3, 1), (4, 0)])
def test_gelu_written_by_hand_in_a_torch_script_stays(tmp_path: Path, form: int, fused: int) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    path = b.save(tmp_path, gelu(b, h, form), (2, 8), producer="pytorch")
    assert operators(path)["Gelu"] == fused


def test_from_opset_20_torch_exports_its_own_gelu(tmp_path: Path) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    assert operators(b.save(tmp_path, gelu(b, h, 0), (2, 8), opset=20, producer="pytorch"))["Gelu"] == 0


def test_silu_mish_and_hard_swish(tmp_path: Path) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    h = b("Mul", h, b("Sigmoid", h))
    h = b("Mul", b("Tanh", b("Softplus", h)), h)
    h = b("Div", b("Mul", h, b("Clip", b("Add", h, 3.0), 0.0, 6.0)), 6.0)
    h = b("Mul", h, b("HardSigmoid", h, alpha=1 / 6, beta=0.5))
    found = operators(b.save(tmp_path, h, (2, 8)))
    assert (found["Silu"], found["Mish"], found["HardSwish"]) == (1, 1, 2)
    assert found["Sigmoid"] == found["Tanh"] == found["Clip"] == 0


def test_what_is_close_to_an_activation_is_not_taken_for_one(tmp_path: Path) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    h = b("Mul", h, b("Sigmoid", b("Mul", h, 1.702)))  # quick GELU
    h = b("Mul", h, b("Mul", 0.5, b("Add", b("Erf", b("Div", h, 1.5)), 1.0)))
    found = operators(b.save(tmp_path, h, (2, 8)))
    assert found["Sigmoid"] == found["Erf"] == 1
    assert found["Gelu"] == found["Silu"] == 0


def test_an_inner_value_that_is_read_elsewhere_stays(tmp_path: Path) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    gate = b("Sigmoid", h)
    found = operators(b.save(tmp_path, b("Add", b("Mul", h, gate), gate), (2, 8)))
    assert found["Silu"] == 0
    assert found["Sigmoid"] == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fusing_keeps_outputs_and_never_adds_saved_memory(tmp_path: Path, data: st.DataObject) -> None:
    """Random pointwise graphs: matched or not, the output has its shape, and the matched graph needs no more memory."""
    b = Builder()
    values = [b("MatMul", "x", b.weight("w", 64, 64))]
    for _ in range(data.draw(st.integers(3, 14))):
        op = data.draw(st.sampled_from(["Add", "Mul", "Sigmoid", "Tanh", "Erf", "Softplus", "Relu", "scale"]))
        first = data.draw(st.sampled_from(values[-4:]))
        if op == "scale":
            values.append(
                b(
                    data.draw(st.sampled_from(["Mul", "Add", "Div"])),
                    first,
                    data.draw(st.sampled_from([0.5, 1.0, 2.0])),
                )
            )
        elif op in ("Add", "Mul"):
            values.append(b(op, first, data.draw(st.sampled_from(values[-4:]))))
        else:
            values.append(b(op, first))
    path = b.save(tmp_path, values[-1], (512, 64))
    fused = record_onnx(path, loss="mean", target="cpu", optimizer="sgd", steps=1)
    plain = record_onnx(path, loss="mean", target="cpu", optimizer="sgd", steps=1, faithful=True)
    assert fused.recording.peak()[0] <= plain.recording.peak()[0]


# norms and linear layers


def layer_norm(b: Builder, x: str, *, power: bool, reciprocal: bool) -> str:
    centred = b("Sub", x, b("ReduceMean", x, b.ints(-1)))
    square = b("Pow", centred, 2.0) if power else b("Mul", centred, centred)
    root = b("Sqrt", b("Add", b("ReduceMean", square, b.ints(-1)), 1e-5))
    normal = b("Mul", centred, b("Reciprocal", root)) if reciprocal else b("Div", centred, root)
    return b("Add", b("Mul", normal, b.weight("n.weight", 8)), b.weight("n.bias", 8))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_layer_norm_is_found(tmp_path: Path, power: bool, reciprocal: bool) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    path = b.save(tmp_path, layer_norm(b, h, power=power, reciprocal=reciprocal), (2, 4, 8))
    found = nodes_of(path, "LayerNormalization")
    assert len(found) == 1
    assert found[0].inputs == ("t0", "n.weight", "n.bias")
    assert found[0].attributes["epsilon"] == pytest.approx(1e-5)
    assert operators(path)["ReduceMean"] == 0


def rms_norm(b: Builder, x: str, *, weight_first: bool) -> str:
    root = b("Sqrt", b("Add", b("ReduceMean", b("Pow", x, 2.0), b.ints(-1)), 1e-6))
    normal = b("Mul", x, b("Reciprocal", root))
    weight = b.weight("n.weight", 8)
    return b("Mul", weight, normal) if weight_first else b("Mul", normal, weight)


@pytest.mark.parametrize(("producer", "weight_first", "opset", "fused"), [
    ("", False, 18, 1), ("", True, 18, 1), ("pytorch", False, 18, 1), ("pytorch", True, 18, 0), ("pytorch", False, 23, 0),
])  # fmt: skip
def test_rms_norm_is_found_unless_a_torch_script_wrote_it(
    tmp_path: Path, producer: str, weight_first: bool, opset: int, fused: int
) -> None:
    b = Builder()
    h = b("MatMul", "x", b.weight("w", 8, 8))
    path = b.save(
        tmp_path, rms_norm(b, h, weight_first=weight_first), (2, 4, 8), opset=opset, producer=producer
    )
    assert operators(path)["RMSNormalization"] == fused
    assert operators(path, faithful=True)["RMSNormalization"] == 0


def test_group_norm_is_found(tmp_path: Path) -> None:
    b = Builder()
    h = b("Conv", "x", b.weight("w", 8, 8, 3, 3), pads=[1, 1, 1, 1])
    grouped = b("Reshape", h, b.ints(0, 4, -1))
    inner = b("InstanceNormalization", grouped, b.weight("one", 4), b.weight("zero", 4))
    back = b("Reshape", inner, b("Shape", h))
    h = b("Add", b("Mul", back, b.weight("g.weight", 8, 1, 1)), b.weight("g.bias", 8, 1, 1))
    path = b.save(tmp_path, h, (2, 8, 6, 6))
    found = nodes_of(path, "GroupNormalization")
    assert len(found) == 1
    assert found[0].attributes["num_groups"] == 4
    assert found[0].inputs[0] == "t0"
    assert not record_onnx(
        path, loss="mean", target="cpu", steps=1
    ).partial  # its scale and shift have three dims


def test_matmul_and_add_of_weights_are_a_linear_layer(tmp_path: Path) -> None:
    b = Builder()
    h = b("Add", b("MatMul", "x", b.weight("w", 8, 8)), b.weight("b", 8))
    h = b("Add", b.weight("c", 8), b("MatMul", h, b("Transpose", b.weight("v", 8, 8), perm=[1, 0])))
    h = b("Add", b("MatMul", h, b.weight("u", 8, 8)), h)
    found = operators(b.save(tmp_path, h, (2, 4, 8)))
    assert (found["Linear"], found["MatMul"], found["Add"]) == (2, 1, 1)


# attention


def attention(b: Builder, *, scale: str, mask: str, dropout: bool = False, swap: bool = True) -> str:
    parts = []
    for name in "qkv":
        h = b("MatMul", "x", b.weight(f"{name}.weight", 16, 16))
        parts.append(b("Transpose", b("Reshape", h, b.ints(2, 6, 4, 4)), perm=[0, 2, 1, 3]))
    q, k, v = parts
    turned = (
        b("Transpose", k, perm=[0, 1, 3, 2])
        if swap
        else b(
            "Reshape", b("Transpose", b("Reshape", k, b.ints(8, 6, 4)), perm=[0, 2, 1]), b.ints(2, 4, 4, 6)
        )
    )
    if scale == "both":
        q, turned = b("Mul", q, 0.7071), b("Mul", turned, 0.7071)
    scores = b("MatMul", q, turned)
    if scale == "after":
        scores = b("Div", scores, 2.0)
    triangle = b("Trilu", b("Expand", 1.0, b.ints(6, 6)), upper=0)
    hidden = b("Equal", triangle, 0.0)
    if mask == "added":
        scores = b("Add", scores, b("Where", hidden, float("-inf"), 0.0))
    if mask == "filled":
        scores = b("Where", hidden, float("-inf"), scores)
    if mask == "trained":
        scores = b("Add", scores, b.weight("relative.bias", 1, 4, 6, 6))
    weights = b("Softmax", scores, axis=-1)
    if dropout:
        weights = b("Dropout", weights, 0.1)
    out = b("MatMul", weights, v)
    return b("Reshape", b("Transpose", out, perm=[0, 2, 1, 3]), b.ints(2, 6, 16))


@pytest.mark.parametrize("scale", ["both", "after", "none"])
@pytest.mark.parametrize("mask", ["none", "added", "filled", "trained"])
@pytest.mark.parametrize("swap", [True, False])
def test_attention_is_found(tmp_path: Path, scale: str, mask: str, swap: bool) -> None:
    b = Builder()
    path = b.save(tmp_path, attention(b, scale=scale, mask=mask, swap=swap), (2, 6, 16))
    found = nodes_of(path, "Attention")
    assert len(found) == 1
    assert operators(path)["Softmax"] == 0
    assert found[0].attributes["causal"] == (mask in ("added", "filled"))
    assert found[0].inputs[3] == ("relative.bias" if mask == "trained" else "")
    assert found[0].attributes["turned"] == 0
    assert operators(path, faithful=True)["Softmax"] == 1


def test_attention_keeps_its_dropout(tmp_path: Path) -> None:
    b = Builder()
    found = nodes_of(
        b.save(tmp_path, attention(b, scale="both", mask="added", dropout=True), (2, 6, 16)), "Attention"
    )
    assert found[0].attributes["ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(("inside", "after", "said"), [(False, True, 1), (True, True, 0), (False, False, 0)])
def test_attention_that_alone_lost_its_dropout_is_said(
    tmp_path: Path, inside: bool, after: bool, said: int
) -> None:
    b = Builder()
    out = attention(b, scale="both", mask="added", dropout=inside)
    path = b.save(tmp_path, b("Dropout", out, 0.1) if after else out, (2, 6, 16))
    plan = plan_training(path, batch_size=None, dims={}, loss="mean")
    assert sum("but none in its attention" in each for each in plan.lacks_on_cpu) == said


def test_a_torch_script_that_wrote_attention_by_hand_keeps_its_matrix(tmp_path: Path) -> None:
    b = Builder()
    path = b.save(tmp_path, attention(b, scale="after", mask="filled"), (2, 6, 16), producer="pytorch")
    assert operators(path)["Softmax"] == 1
    b = Builder()
    path = b.save(tmp_path, attention(b, scale="both", mask="added"), (2, 6, 16), producer="pytorch")
    assert operators(path)["Softmax"] == 0


def told(b: Builder, call: str) -> None:
    """As torch.onnx writes down which operator of the script every node came from."""
    for node in b.nodes:
        for key, last in (("name_scopes", "node"), ("class_hierarchy", call)):
            node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=f"['', 'Model', '{last}']")


@pytest.mark.parametrize(
    ("line", "fused"),
    [
        ("return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)", 1),
        ("return self.norm(x) * w", 0),
    ],
)
def test_rms_norm_is_known_by_the_line_that_called_it(tmp_path: Path, line: str, fused: int) -> None:
    b = Builder()
    out = rms_norm(b, b("MatMul", "x", b.weight("w", 8, 8)), weight_first=False)
    told(b, "aten.mul.Tensor")
    trace = f'File "model.py", line 7, in forward\n    {line}'
    b.nodes[-1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=trace)
    assert operators(b.save(tmp_path, out, (2, 4, 8), producer="pytorch"))["RMSNormalization"] == fused


@pytest.mark.parametrize(("kind", "trained"), [("PARAMETER", True), ("BUFFER", False), ("", True)])
def test_an_exporter_that_tells_parameters_from_buffers_is_believed(
    tmp_path: Path, kind: str, trained: bool
) -> None:
    b = Builder()
    path = b.save(tmp_path, b("Mul", b("MatMul", "x", b.weight("w", 8, 8)), b.weight("scale", 8)), (2, 8))
    model = onnx.load(path)
    info = helper.make_tensor_value_info("scale", FLOAT, (8,))
    if kind:
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    model.graph.value_info.append(info)
    onnx.save(model, path)
    assert set(plan_training(path, batch_size=None, dims={}).trained) == (
        {"w", "scale"} if trained else {"w"}
    )


@pytest.mark.parametrize(
    ("kind", "call", "fused"),
    [
        ("Attention", "aten.scaled_dot_product_attention.default", 1),
        ("Attention", "aten.matmul.default", 0),
        ("Gelu", "aten.gelu.default", 1),
        ("Gelu", "aten.mul.Tensor", 0),
        ("Silu", "aten.silu.default", 1),
        ("Silu", "aten.mul.Tensor", 0),
        ("LayerNormalization", "aten.layer_norm.default", 1),
        ("LayerNormalization", "aten.add.Tensor", 0),
        ("Linear", "aten.linear.default", 1),
        ("Linear", "aten.add.Tensor", 0),
    ],
)
def test_an_exporter_that_tells_what_was_called_is_believed(
    tmp_path: Path, kind: str, call: str, fused: int
) -> None:
    b = Builder()
    shape: tuple[int, ...] = (2, 4, 8)
    if kind == "Attention":
        out, shape = attention(b, scale="both", mask="none"), (2, 6, 16)
    else:
        h = b("MatMul", "x", b.weight("w", 8, 8))
        out = {
            "Gelu": lambda: gelu(b, h, 0),
            "Silu": lambda: b("Mul", h, b("Sigmoid", h)),
            "LayerNormalization": lambda: layer_norm(b, h, power=True, reciprocal=False),
            "Linear": lambda: b("Add", h, b.weight("b", 8)),
        }[kind]()
    told(b, call)
    assert operators(b.save(tmp_path, out, shape, producer="pytorch"))[kind] == fused


def test_attention_whose_matrix_is_an_output_stays(tmp_path: Path) -> None:
    b = Builder()
    out = attention(b, scale="both", mask="none")
    softmax = next(n.output[0] for n in b.nodes if n.op_type == "Softmax")
    total = b(
        "Add",
        b("ReduceMean", out, b.ints(0, 1, 2), keepdims=0),
        b("ReduceMean", softmax, b.ints(0, 1, 2, 3), keepdims=0),
    )
    assert operators(b.save(tmp_path, total, (2, 6, 16)))["Softmax"] == 1


def test_a_mask_that_comes_from_an_input_is_passed_on(tmp_path: Path) -> None:
    b = Builder()
    attention(b, scale="both", mask="none")
    softmax = next(n for n in b.nodes if n.op_type == "Softmax")
    b.nodes.insert(
        b.nodes.index(softmax), helper.make_node("ReduceMax", ["x", b.ints(-1)], ["seen"], keepdims=0)
    )
    b.nodes.insert(
        b.nodes.index(softmax), helper.make_node("Reshape", ["seen", b.ints(2, 1, 1, 6)], ["mask"])
    )
    b.nodes.insert(b.nodes.index(softmax), helper.make_node("Add", [softmax.input[0], "mask"], ["masked"]))
    softmax.input[0] = "masked"
    found = nodes_of(b.save(tmp_path, b.nodes[-1].output[0], (2, 6, 16)), "Attention")
    assert found[0].inputs[3] == "mask"
    assert found[0].attributes["causal"] == 0
