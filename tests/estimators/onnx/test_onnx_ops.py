"""The interpreter's operators against onnx's own conformance cases, and its rules for what is known and what is not.

Every case is run twice: with its data known, where results must have the right shape, type and (integers) values, and with
its floating-point inputs fake, where shape and type must come out without them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memopt.estimators.onnx.interpret import Run, is_known
from memopt.estimators.onnx.ops.fallback import infer_outputs
from memopt.estimators.onnx.ops.registry import DTYPES, OPS
from memopt.estimators.onnx.read.graph import Node, _model
from memopt.estimators.onnx.read.lower import lower

PER_OPERATOR = 3
"""Cases taken of each operator; there are up to 120 of some."""

INFERRED = {
    "BitCast", "CausalConvWithState", "ImageDecoder", "LinearAttention", "MelWeightMatrix", "SequenceMap",
    "StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer",
}  # fmt: skip
"""Operators that are left to onnx's shape inference: the estimate is then partial."""

UPPER_BOUND = {"NonMaxSuppression", "Unique"}
SKIPPED = {
    "test_reduce_max_empty_set", "test_reduce_max_empty_set_bool", "test_reduce_min_empty_set",  # nothing to reduce
    "test_scan_sum",  # opset 8
}  # fmt: skip


@cache
def cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    taken: Counter[str] = Counter()
    chosen = []
    for case in found:
        if (
            case.model is None
            or not case.data_sets
            or case.name in SKIPPED
            or case.name.endswith("_expanded")
        ):
            continue
        operators = {n.op_type for n in case.model.graph.node if n.domain in ("", "ai.onnx")}
        if len(case.model.graph.node) != 1 or not operators or (op := operators.pop()) in INFERRED:
            continue
        taken[op] += 1
        if taken[op] <= PER_OPERATOR:
            chosen.append(case)
    return chosen


def as_tensor(value: Any) -> Any:
    if isinstance(value, list):
        return [as_tensor(v) for v in value]
    value = np.asarray(value)
    if value.dtype.kind in "OUS" or value.dtype.name not in {*_PLAIN, "bfloat16"}:
        raise TypeError(value.dtype.name)
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(value))


_PLAIN = {
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip


def outcome(case: Any, *, fake: bool) -> str:
    """`ok`, or what is wrong with the outputs."""
    inputs, wanted = case.data_sets[0]
    try:
        given, expected = [as_tensor(v) for v in inputs], [as_tensor(v) for v in wanted]
    except TypeError as error:
        return f"skipped: {error}"
    model = _model(case.model)
    run = Run(model.opset, FakeTensorMode(allow_non_fake_inputs=True))
    named = dict(zip([i.name for i in case.model.graph.input], given, strict=False))
    with run.fake_mode, torch.no_grad():
        if fake:
            named = {n: _faked(run, v) for n, v in named.items()}
        found = run.graph(lower(model), {}, named)
    if run.partial:
        return f"partial: {run.partial}"
    op = case.model.graph.node[0].op_type
    for a, b in zip(found, expected, strict=False):
        problem = "" if isinstance(b, list) else _differs(op, a, b)
        if problem:
            return problem
    return "ok"


def _faked(run: Run, value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 8:
        return run.fake_mode.from_tensor(value)
    return value


def _differs(op: str, a: Any, b: Tensor) -> str:
    if a is None or a.dtype != b.dtype:
        return f"type {None if a is None else a.dtype} instead of {b.dtype}"
    if op in UPPER_BOUND:
        return "" if all(x >= y for x, y in zip(a.shape, b.shape, strict=True)) else "not an upper bound"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    if is_known(a) and not a.is_floating_point() and op in _EXACT and not torch.equal(a, b):
        return "values"
    return ""


_EXACT = {
    "Add", "And", "BitShift", "Cast", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "Gather",
    "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "NonZero", "Not", "Or", "Pad", "Range", "Reshape", "ScatterElements", "Shape", "Size", "Slice", "Split", "Squeeze",
    "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
}  # fmt: skip
"""Operators of shape arithmetic: their integers are computed with."""


@pytest.mark.slow
@pytest.mark.parametrize("fake", [False, True], ids=["known", "fake"])
def test_conformance(fake: bool) -> None:
    results = {case.name: outcome(case, fake=fake) for case in cases()}
    wrong = {name: said for name, said in results.items() if said != "ok" and not said.startswith("skipped")}
    allowed = {"test_averagepool_2d_dilations", "test_lppool_2d_dilations", "test_col2im_5d"}
    assert {name: said for name, said in wrong.items() if name not in allowed} == {}
    assert sum(said == "ok" for said in results.values()) > 380


OF_TRAINING = """Conv ConvTranspose Gemm MatMul BatchNormalization LayerNormalization InstanceNormalization
    GroupNormalization RMSNormalization Relu LeakyRelu PRelu Elu Celu Selu Gelu Mish HardSwish HardSigmoid Sigmoid Tanh Softplus
    Softsign ThresholdedRelu Clip MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool Resize Upsample Pad Reshape
    Transpose Concat Split Slice Gather GatherElements GatherND ScatterElements ScatterND Expand Tile Where Range Shape
    Size ConstantOfShape NonZero ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceSumSquare ArgMax ArgMin TopK CumSum Einsum Softmax LogSoftmax Dropout LSTM GRU RNN Attention
    RotaryEmbedding If Loop Scan OneHot Trilu Cast CastLike Equal Greater Less And Or Not Xor Identity Constant"""


def test_the_registry_covers_the_operators_of_training() -> None:
    assert {name for name in OF_TRAINING.split() if ("", name) not in OPS} == set()
    assert len(OPS) >= 180


# what is known


def run_nodes(
    nodes: list[Any],
    inputs: dict[str, Tensor],
    output: str,
    weights: list[Any] | None = None,
    opset: int = 18,
) -> Any:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(v.shape)) for n, v in inputs.items()]
    graph = helper.make_graph(
        nodes, "g", ports, [helper.make_tensor_value_info(output, 1, None)], weights or []
    )
    model = _model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    run = Run(model.opset, FakeTensorMode(allow_non_fake_inputs=True))
    with run.fake_mode:
        fakes = {n: run.fake_mode.from_tensor(v) for n, v in inputs.items()}
        return run.graph(lower(model), {}, fakes)[0], run


def ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def test_shape_arithmetic_is_exact_while_data_stays_fake() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Mul", ["n", "two"], ["m"]),
        helper.make_node("Concat", ["m", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    y, run = run_nodes(
        nodes, {"x": torch.zeros(6, 8)}, "y", [ints("zero", 0), ints("two", 2), ints("rest", -1)]
    )
    assert isinstance(y, FakeTensor)
    assert tuple(y.shape) == (12, 4)
    assert not run.partial


def test_a_known_index_is_a_view() -> None:
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)]
    index = numpy_helper.from_array(np.array(0, np.int64), "i")
    x = torch.zeros(4, 5, 6)
    y, _ = run_nodes(nodes, {"x": x}, "y", [index])
    assert tuple(y.shape) == (4, 6)
    assert y._is_view()


def test_a_condition_that_is_known_takes_its_branch() -> None:
    def branch(op: str) -> Any:
        return helper.make_graph(
            [helper.make_node(op, ["x"], ["b"])], op, [], [helper.make_tensor_value_info("b", 1, None)]
        )

    nodes = [
        helper.make_node("Size", ["x"], ["n"]),
        helper.make_node("Greater", ["n", "ten"], ["big"]),
        helper.make_node("If", ["big"], ["y"], then_branch=branch("Transpose"), else_branch=branch("Relu")),
    ]
    ten = numpy_helper.from_array(np.array(10, np.int64), "ten")
    assert tuple(run_nodes(nodes, {"x": torch.zeros(3, 5)}, "y", [ten])[0].shape) == (5, 3)
    assert tuple(run_nodes(nodes, {"x": torch.zeros(2, 5)}, "y", [ten])[0].shape) == (2, 5)


def test_a_condition_on_data_is_guessed_and_said() -> None:
    def branch(*ops: str) -> Any:
        names = ["x", *(f"v{i}" for i in range(len(ops)))]
        nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(ops)]
        return helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info(names[-1], 1, None)])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Transpose", "Relu")
        ),
    ]
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    y, run = run_nodes(nodes, {"x": torch.zeros(3, 5)}, "y", [zero])
    assert tuple(y.shape) == (5, 3)
    assert "If" in run.partial


def test_a_loop_runs_its_known_turns_and_stacks_what_it_scans() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["going"]),
            helper.make_node("Concat", ["a", "x"], ["b"], axis=0),
            helper.make_node("Relu", ["x"], ["kept"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", 1, None),
        ],
        [helper.make_tensor_value_info(n, 1, None) for n in ("going", "b", "kept")],
    )
    count = numpy_helper.from_array(np.array(3, np.int64), "count")
    loop = helper.make_node("Loop", ["count", "", "x"], ["grown", "all"], body=body)
    x = {"x": torch.zeros(2, 5)}
    assert tuple(run_nodes([loop], x, "grown", [count])[0].shape) == (8, 5)
    y, run = run_nodes([loop], x, "all", [count])
    assert tuple(y.shape) == (3, 2, 5)
    assert not run.partial


def test_a_loop_without_a_count_ends_by_what_it_counts_itself() -> None:
    """As `EmbeddingBag` is exported: neither the counter nor what is sliced by it depends on data."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["i", "one"], ["next"]),
            helper.make_node("Less", ["next", "most"], ["going"]),
            helper.make_node("Slice", ["x", "i", "next"], ["row"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("i", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info(n, 1, None) for n in ("going", "next", "row")],
    )
    numbers = {"one": [1], "most": [4], "first": [0], "yes": True}
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    loop = helper.make_node("Loop", ["", "yes", "first"], ["end", "rows"], body=body)
    rows, run = run_nodes([loop], {"x": torch.zeros(9, 5)}, "rows", weights)
    assert tuple(rows.shape) == (4, 1, 5)
    assert not run.partial


def test_softmax_of_old_opsets_flattens() -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["y"])]
    for opset in (11, 13):
        y, _ = run_nodes(nodes, {"x": torch.zeros(2, 3, 4)}, "y", opset=opset)
        assert tuple(y.shape) == (2, 3, 4)


def test_an_unknown_operator_gets_inferred_shapes_and_is_named() -> None:
    nodes = [helper.make_node("CausalConvWithState", ["x", "w"], ["y", "state"])]
    inputs = {"x": torch.zeros(2, 4, 9), "w": torch.zeros(4, 1, 3)}
    y, run = run_nodes(nodes, inputs, "y", opset=27)
    assert tuple(y.shape) == (2, 4, 9)
    assert set(run.partial) == {"CausalConvWithState"}


def test_a_foreign_operator_gets_the_shape_that_the_file_declares() -> None:
    node = helper.make_node("Strange", ["x"], ["y"], domain="some.where")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 8])],
        [helper.make_tensor_value_info("y", 1, ["b", 3, 7])],
    )
    proto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("some.where", 1)]
    )
    model = _model(proto)
    run = Run(18, FakeTensorMode(allow_non_fake_inputs=True))
    with run.fake_mode:
        x = torch.zeros(2, 8, requires_grad=True)
        y = run.graph(lower(model), {}, {"x": x})[0]
    assert tuple(y.shape) == (1, 3, 7)
    assert set(run.partial) == {"some.where.Strange"}
    assert y.requires_grad


def test_inference_says_when_it_does_not_know() -> None:
    assert infer_outputs(Node("Nonsense", "", ("x",), ("y",)), [torch.zeros(2)], [None], 18) is None
    assert infer_outputs(Node("Relu", "", ("x",), ("y",)), [torch.zeros(2, 3)], [None], 18) == [((2, 3), 1)]


def test_element_types_are_onnxs_own() -> None:
    for name in (
        "FLOAT",
        "FLOAT16",
        "BFLOAT16",
        "DOUBLE",
        "INT8",
        "INT64",
        "BOOL",
        "UINT8",
        "COMPLEX64",
        "FLOAT8E5M2",
    ):
        kind = getattr(TensorProto, name)
        assert DTYPES[kind].itemsize == helper.tensor_dtype_to_np_dtype(kind).itemsize
