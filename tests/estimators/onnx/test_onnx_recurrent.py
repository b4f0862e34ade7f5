"""Recurrent layers that a script wrote as one module, and that ONNX has node by node, cost what the module costs.

Both directions of a layer are one weight in the file, two in the module: gradients are put together at another moment.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.training import estimate_training_step
from memopt.estimators.onnx.estimate import plan_training, record_onnx
from tests.support.onnx_weights import weight

LENGTH, BATCH, WIDTH = 40, 16, 128
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def model(
    path: Path, kind: str, modules: list[str], *, both: bool, dropout: float, seen: bool = False
) -> Path:
    """One layer for each name of a module; `seen`: the model's output reads what the layers hand on as well."""
    directions = 1 + both
    nodes, weights, at, handed = [], [], "x", []
    for i, module in enumerate(modules):
        width = WIDTH if i == 0 else directions * WIDTH
        rows = GATES[kind] * WIDTH
        weights += [weight(f"w{i}", directions, rows, width), weight(f"r{i}", directions, rows, WIDTH)]
        weights.append(weight(f"b{i}", directions, 2 * rows))
        direction = "bidirectional" if both else "forward"
        nodes += [
            helper.make_node(
                kind, [at, f"w{i}", f"r{i}", f"b{i}"], [f"y{i}"], f"/{module}/{kind}_{i}",
                hidden_size=WIDTH, direction=direction, **({"linear_before_reset": 1} if kind == "GRU" else {}),
            ),
            helper.make_node("Transpose", [f"y{i}"], [f"t{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"t{i}", "to"], [f"h{i}"]),
        ]  # fmt: skip
        at = f"h{i}"
        handed.append(at)
        if dropout and i < len(modules) - 1:
            nodes.append(helper.make_node("Dropout", [at, "ratio", "yes"], [f"d{i}"]))
            at = f"d{i}"
    if seen:
        nodes.append(helper.make_node("Add", handed[-2:], ["out"]))
    weights += [
        helper.make_tensor("to", TensorProto.INT64, [3], [0, 0, -1]),
        helper.make_tensor("ratio", TensorProto.FLOAT, [], [dropout]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [LENGTH, BATCH, WIDTH])],
        [helper.make_tensor_value_info("out" if seen else at, TensorProto.FLOAT, None)], weights,
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    )
    return path


def script_peak(kind: str, layers: int, *, both: bool, dropout: float) -> int:
    def build(recorder: FakeRecorder) -> tuple[Callable[[], Tensor], list[Tensor]]:
        with recorder.claiming("cuda"):
            module = getattr(nn, kind)(WIDTH, WIDTH, layers, bidirectional=both, dropout=dropout)
            x = torch.randn(LENGTH, BATCH, WIDTH)
        recorder.mark(x, "input")

        def step() -> Tensor:
            with recorder.claiming("cuda"):
                loss: Tensor = module(x)[0].mean()
                return loss

        return step, list(module.parameters())

    recording = estimate_training_step(build, lambda p: torch.optim.SGD(p, 0.1), target="cuda")
    return recording.peak(512)[0]


@pytest.mark.parametrize(
    ("kind", "layers", "both", "dropout"),
    [("LSTM", 2, False, 0.5), ("LSTM", 3, True, 0.0), ("GRU", 3, False, 0.1), ("RNN", 2, True, 0.2)],
)
def test_a_stack_costs_what_one_module_costs(
    tmp_path: Path, kind: str, layers: int, both: bool, dropout: float
) -> None:
    path = model(tmp_path / "m.onnx", kind, ["rnn"] * layers, both=both, dropout=dropout)
    found = record_onnx(path, optimizer="sgd", loss="mean")
    assert any("1 recurrent stack" in note for note in found.notes)
    expected = script_peak(kind, layers, both=both, dropout=dropout)
    assert found.recording.peak(512)[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("modules", "seen"), [(["one", "two"], False), (["rnn", "rnn"], True)], ids=["two modules", "read by others"]
)  # fmt: skip
def test_what_was_not_one_module_stays_apart(tmp_path: Path, modules: list[str], seen: bool) -> None:
    path = model(tmp_path / "m.onnx", "LSTM", modules, both=False, dropout=0.5, seen=seen)
    plan = plan_training(path, batch_size=None, dims={}, loss="mean")
    assert [node.op for node in plan.graph.nodes].count("LSTM") == 2
