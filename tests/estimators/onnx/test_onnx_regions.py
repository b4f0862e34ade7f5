"""Regions, deformable convolutions and quantised numbers in ONNX models: the storages of a training step, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from memopt.errors import BadFile, UsageError
from memopt.estimators.onnx.estimate import OnnxRecording, record_onnx

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
IMAGE = 2 * 3 * 16 * 16 * 4


def weight(name: str, *dims: int, kind: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(dims, kind), name)


def recorded(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int]]],
    weights: list[onnx.TensorProto],
    dtype: str = "fp32",
) -> OnnxRecording:
    ports = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()]
    out = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "net", ports, out, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    path = folder / "m.onnx"
    onnx.save(model, path)
    return record_onnx(path, steps=1, optimizer="sgd", dtype=dtype, assume_bn=False)


def born(made: OnnxRecording, phase: str, *ops: str) -> list[int]:
    """Sizes of the storages that `ops` made in `phase`, in order."""
    return [row.size_bytes for row in made.recording.rows if row.phase == phase and row.op in ops]


def stem(channels: int) -> tuple[onnx.NodeProto, onnx.TensorProto]:
    node = helper.make_node("Conv", ["x", "stem.weight"], ["c"], pads=[1, 1, 1, 1])
    return node, weight("stem.weight", channels, 3, 3, 3)


def test_roi_align_keeps_its_regions_only(tmp_path: Path) -> None:
    conv, kernel = stem(8)
    align = helper.make_node("RoiAlign", ["c", "boxes", "which"], ["y"], output_height=4, output_width=5)
    inputs = {"x": (FLOAT, [2, 3, 16, 16]), "boxes": (FLOAT, [10, 4]), "which": (INT64, [10])}
    made = recorded(tmp_path, [conv, align], inputs, [kernel])
    assert not made.partial
    pooled = 10 * 8 * 4 * 5 * 4
    kept = [r.size_bytes for r in made.recording.rows if r.category == "activation" and r.size_bytes > 4]
    assert kept == [10 * 5 * 4]
    assert pooled in born(made, "forward", "made")
    assert born(made, "backward", "new_zeros.default") == [2 * 8 * 16 * 16 * 4]


def test_region_maxima_keep_their_places(tmp_path: Path) -> None:
    conv, kernel = stem(8)
    pool = helper.make_node("MaxRoiPool", ["c", "boxes"], ["y"], pooled_shape=[4, 5])
    inputs = {"x": (FLOAT, [2, 3, 16, 16]), "boxes": (FLOAT, [10, 5])}
    made = recorded(tmp_path, [conv, pool], inputs, [kernel])
    assert not made.partial
    kept = [r.size_bytes for r in made.recording.rows if r.category == "activation" and r.size_bytes > 4]
    assert kept == [10 * 8 * 4 * 5 * 4]


@pytest.mark.parametrize(("batch", "at_once"), [(2, 2), (34, 17), (37, 1)])
def test_deform_conv_holds_the_columns_of_as_many_images_as_the_kernel_does(
    tmp_path: Path, batch: int, at_once: int
) -> None:
    conv, kernel = stem(18)
    deform = helper.make_node("DeformConv", ["x", "w", "c", "b"], ["y"], pads=[1, 1, 1, 1])
    weights = [kernel, weight("w", 8, 3, 3, 3), weight("b", 8)]
    made = recorded(tmp_path, [conv, deform], {"x": (FLOAT, [batch, 3, 16, 16])}, weights)
    assert not made.partial
    out, columns = batch * 8 * 256 * 4, 3 * 9 * at_once * 256 * 4
    assert born(made, "forward", "made")[-3:] == [out, out, columns]
    assert born(made, "backward", "new_empty.default") == [columns, columns]
    assert born(made, "backward", "clone.default") == ([out] if at_once > 1 else [])
    image, offsets = batch * 3 * 256 * 4, batch * 18 * 256 * 4
    assert born(made, "backward", "zeros_like.default") == [image, offsets, batch * 4, 8 * 3 * 9 * 4]
    assert made.parameter_count == 18 * 27 + 8 * 27 + 8


def test_under_autocast_regions_are_pooled_in_fp32(tmp_path: Path) -> None:
    conv, kernel = stem(8)
    align = helper.make_node("RoiAlign", ["c", "boxes", "which"], ["y"], output_height=4, output_width=4)
    inputs = {"x": (FLOAT, [2, 3, 16, 16]), "boxes": (FLOAT, [10, 4]), "which": (INT64, [10])}
    made = recorded(tmp_path, [conv, align], inputs, [kernel], "amp-bf16")
    assert born(made, "backward", "new_zeros.default") == [2 * 8 * 16 * 16 * 4]


def test_offsets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    conv, kernel = stem(16)
    deform = helper.make_node("DeformConv", ["x", "w", "c"], ["y"], pads=[1, 1, 1, 1])
    weights = [kernel, weight("w", 8, 3, 3, 3)]
    with pytest.raises(BadFile, match="cannot be") as caught:
        recorded(tmp_path, [conv, deform], {"x": (FLOAT, [2, 3, 16, 16])}, weights)
    assert "offsets of [2, 16, 16, 16] do not fit an output of [16, 16]" in caught.value.why


def fake_quantized(name: str, out: str, **attributes: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}.q"], **attributes),
        helper.make_node("DequantizeLinear", [f"{name}.q", "scale", "zero"], [out], **attributes),
    ]


@pytest.mark.parametrize("channels", [1, 8])
def test_quantisation_aware_training_trains_what_is_quantised(tmp_path: Path, channels: int) -> None:
    """The gradient passes both pairs, of the activation and of the weight, each of which keeps a mask of bytes."""
    scales = weight("scale", channels) if channels > 1 else numpy_helper.from_array(np.float32(1), "scale")
    zeros = numpy_helper.from_array(np.zeros(scales.dims, np.int8), "zero")
    axis = {"axis": 0} if channels > 1 else {}
    nodes = [
        helper.make_node("Conv", ["x", "stem.weight"], ["c"], pads=[1, 1, 1, 1]),
        *fake_quantized("w", "wq", **axis),
        helper.make_node("Conv", ["c", "wq"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = [weight("stem.weight", 8, 3, 3, 3), weight("w", 8, 8, 3, 3), scales, zeros]
    made = recorded(tmp_path, nodes, {"x": (FLOAT, [2, 3, 16, 16])}, weights)
    assert not made.partial
    assert made.parameter_count == 8 * 27 + 8 * 72
    gradients = [row.size_bytes for row in made.recording.rows if row.category == "gradient"]
    assert sorted(gradients) == [8 * 27 * 4, 8 * 72 * 4]
    assert 8 * 72 in [row.size_bytes for row in made.recording.rows if row.category == "activation"]


def test_integer_products_hold_their_sums(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("ConvInteger", ["q", "k"], ["sums"], pads=[1, 1, 1, 1]),
        helper.make_node("Cast", ["sums"], ["f"], to=FLOAT),
        helper.make_node("Conv", ["f", "w"], ["y"]),
    ]
    weights = [weight("k", 4, 3, 3, 3, kind=np.uint8), weight("w", 5, 4, 1, 1)]
    made = recorded(tmp_path, nodes, {"x": (FLOAT, [2, 3, 16, 16])}, weights)
    assert not made.partial
    assert made.parameter_count == 20
    assert [row.size_bytes for row in made.recording.rows if row.size_bytes == IMAGE // 4] == [IMAGE // 4]
    assert 2 * 4 * 256 * 4 in born(made, "forward", "made")


def test_a_model_of_integers_alone_is_not_trained(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node(
            "QLinearMatMul", ["q", "scale", "zero", "w", "scale", "zero", "scale", "zero"], ["p"]
        ),
        helper.make_node("DequantizeLinear", ["p", "scale", "zero"], ["y"]),
    ]
    weights = [
        weight("w", 16, 5, kind=np.uint8),
        numpy_helper.from_array(np.float32(1), "scale"),
        numpy_helper.from_array(np.uint8(0), "zero"),
    ]
    with pytest.raises(UsageError, match="nothing to train") as caught:
        recorded(tmp_path, nodes, {"x": (FLOAT, [4, 16])}, weights)
    assert "its weights are integers" in caught.value.why
