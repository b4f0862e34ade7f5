"""Sizes that depend on data: the answers are upper bounds, and the bar reaches down to what is needed when least is selected."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from memopt.estimators.estimate import Estimate, estimate_script
from memopt.estimators.fake.values.guess import FEW
from memopt.estimators.onnx.estimate import estimate_onnx
from memopt.reports.estimate import print_estimate

ROWS, WIDTH = 4096, 64
SCRIPT = f"""
import torch
weight = torch.nn.Parameter(torch.ones({WIDTH}))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(4):
    x = torch.randn({ROWS}, {WIDTH})
    chosen = x[x[:, 0] > 0]
    MORE
    (chosen * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def estimated(folder: Path, more: str = "pass") -> Estimate:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("MORE", more))
    return estimate_script([str(path)], device="cpu")


def told(found: Estimate) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_estimate(console, found, "train.py")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_mask_gives_the_range_and_its_line(tmp_path: Path) -> None:
    """Least: weight, two batches while the next is drawn, and the rows chosen of the last. Most: weight, batch, mask, its
    positions and the rows chosen of two batches, while the second is cut out."""
    found = estimated(tmp_path)
    assert found.bounded == [f"{tmp_path}/train.py:7: every element of a mask was taken to be selected"]
    row = WIDTH * 4
    least, most = row + 2 * ROWS * row + FEW * row, row + 3 * ROWS * row + ROWS + 8 * ROWS
    assert found.range_bytes == {"allocated": (least, most)}
    assert found.allocated_bytes == most
    assert found.as_json()["range_bytes"] == {"allocated": (least, most)}


def test_the_text_says_how_far_down_it_can_be(tmp_path: Path) -> None:
    text = told(estimated(tmp_path))
    assert "depends on data: allocated 2.00 MiB to 3.04 MiB" in text
    assert "train.py:7: every element of a mask was taken to be selected\n" in text
    assert "±" not in text
    assert "(an upper bound)" not in text


def test_a_run_that_needs_more_than_the_least_has_an_upper_bound_only(tmp_path: Path) -> None:
    found = estimated(tmp_path, "if len(chosen) < 100: raise ValueError(len(chosen))")
    assert found.range_bytes == {}
    assert len(found.bounded) == 1
    assert "less, or +" in told(found)
    assert "allocated ? to 3.04 MiB" in told(found)


def test_a_run_without_such_sizes_keeps_its_bar(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("x[x[:, 0] > 0]", "x[: len(x) // 2]").replace("MORE", "pass"))
    found = estimate_script([str(path)], device="cpu")
    assert (found.bounded, found.range_bytes) == ([], {})
    assert "±" in told(found)


def test_onnx_operators_that_pick_by_value_give_a_range(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"], name="picks"),
        helper.make_node("Slice", ["where", "zero", "one", "zero"], ["rows"]),
        helper.make_node("Squeeze", ["rows", "zero"], ["index"]),
        helper.make_node("Gather", ["x", "index"], ["picked"]),
        helper.make_node("MatMul", ["picked", "w"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((8, 4), np.float32), "w"),
        *(numpy_helper.from_array(np.array([n], np.int64), name) for n, name in ((0, "zero"), (1, "one"))),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [100, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    found = estimate_onnx(path, device="cpu")
    assert found.bounded == ["NonZero 'picks': the largest possible output was taken"]
    least, most = found.range_bytes["allocated"]
    assert most == found.allocated_bytes
    positions, picked, product = 2 * 8, 8 * 4, 4 * 4
    assert most - least >= (800 - FEW) * (positions + picked + product)
