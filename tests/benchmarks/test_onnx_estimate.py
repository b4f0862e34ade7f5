"""From model.onnx to an estimate: within 2 % of the script's own, exact numbers on toys, and warnings where the file lacks something."""

from __future__ import annotations

import dataclasses
import gzip
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from benchmarks.estimate_onnx import MODELS, OPSETS, SMALL, export, script_peak_bytes
from memopt.errors import MemoptError, NotPossibleHere, UsageError
from memopt.estimators.fake.recorder import Target
from memopt.estimators.onnx.estimate import estimate_onnx, plan_training, record_onnx
from memopt.estimators.onnx.training import OPTIMIZERS
from memopt.estimators.recording import Recording

FLOAT = TensorProto.FLOAT


def weight(name: str, *dims: int, kind: Any = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(dims, kind), name)


def save(
    path: Path,
    nodes: list[Any],
    weights: list[Any],
    shape: list[Any],
    *,
    opset: int = 18,
    producer: str = "",
    kind: int = FLOAT,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name=producer), path
    )
    return path


# against the script

EXPORTS = Path(__file__).parents[1] / "data" / "onnx"
"""Written by `python -m benchmarks.estimate_onnx --save tests/data/onnx`: what torch.onnx exports, without the weights."""


def exported(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(gzip.decompress((EXPORTS / f"{name}.onnx.gz").read_bytes()))
    return path


@cache
def script_peak(model: str, target: Target, optimizer: str = "adamw") -> int:
    return script_peak_bytes(SMALL[model], optimizer, target, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("model", MODELS)
def test_within_two_percent_of_the_script(tmp_path: Path, model: str, opset: int) -> None:
    path, batch = exported(f"{model}_{opset}", tmp_path), SMALL[model].batch_size
    targets: tuple[Target, ...] = ("cpu", "cuda") if opset == 20 else ("cuda",)
    for target in targets:
        found = record_onnx(path, batch_size=batch, target=target, steps=2)
        assert found.recording.peak(512)[0] == pytest.approx(script_peak(model, target), rel=0.02), target
        assert not found.partial
        assert not any("batch norm" in note for note in found.notes)
    with torch.device("meta"):
        assert found.parameter_count == sum(p.numel() for p in SMALL[model].build().parameters())


@pytest.mark.slow
def test_a_fresh_export_is_as_the_kept_ones(tmp_path: Path) -> None:
    export(SMALL["vit"], tmp_path / "vit.onnx", 23, folded=False)
    fresh = record_onnx(tmp_path / "vit.onnx", batch_size=8)
    kept = record_onnx(exported("vit_23", tmp_path), batch_size=8)
    assert fresh.recording.peak() == kept.recording.peak()
    assert fresh.notes == kept.notes


def test_folded_batch_norm_is_said_and_assumed_back(tmp_path: Path) -> None:
    path = exported("resnet50_18_folded", tmp_path)
    script = script_peak("resnet50", "cuda", "sgd")
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in SMALL["resnet50"].build().modules())
    plain = record_onnx(path, batch_size=8, optimizer="sgd", assume_bn=False, steps=2)
    assumed = record_onnx(path, batch_size=8, optimizer="sgd", steps=2)
    (lacks,) = plain.recording.lacks
    assert lacks.startswith(f"batch norm was folded into {norms} convolutions")
    assert "(--assume-bn adds them)" in lacks
    assert not assumed.recording.lacks
    assert assumed.notes[0].startswith(f"batch norm was folded into {norms} convolutions")
    assert "one was assumed after each" in assumed.notes[0]
    assert plain.recording.peak(512)[0] < 0.95 * script
    assert assumed.recording.peak(512)[0] == pytest.approx(script, rel=0.02)


def test_a_network_that_never_had_batch_norm_is_not_suspected(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "0.weight", "0.bias"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "2.weight", "2.bias"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = [
        weight("0.weight", 4, 3, 3, 3),
        weight("0.bias", 4),
        weight("2.weight", 4, 4, 3, 3),
        weight("2.bias", 4),
    ]
    named = save(tmp_path / "a.onnx", nodes, weights, [2, 3, 16, 16])
    assert not any("batch norm" in note for note in record_onnx(named, target="cpu").notes)
    renamed = onnx.load(named)
    for item in renamed.graph.initializer:  # what the old exporter calls folded weights
        item.name = f"onnx::Conv_{item.name}"
    for node in renamed.graph.node:
        for i in range(1, len(node.input)):
            node.input[i] = f"onnx::Conv_{node.input[i]}"
    onnx.save(renamed, tmp_path / "b.onnx")
    assert any(
        "batch norm was folded into 2" in note
        for note in record_onnx(tmp_path / "b.onnx", target="cpu").notes
    )


@pytest.mark.parametrize(
    ("nodes", "suspected"),
    [
        # A network of convolutions before a transformer's norm, and a single convolution.
        (["Conv k onnx::Conv_1 onnx::Conv_2 a", "Relu a b", "Flatten b f"], 1),
        (["Conv k 0.weight 0.bias a", "Relu a b", "Flatten b f"], 0),
        (["Conv k fused_k fused_b a", "Sigmoid a s", "Mul a s b", "Flatten b f"], 1),
        # Patches, and a convolution before a norm: nothing was ever there.
        (["Conv k onnx::Conv_1 onnx::Conv_2 a", "Flatten a f"], 0),
        (["Conv k onnx::Conv_1 onnx::Conv_2 a", "Transpose a b", "Flatten b f"], 0),
        # Without a bias nothing was folded.
        (["Conv k onnx::Conv_1 _ a", "Relu a b", "Flatten b f"], 0),
    ],
)
def test_batch_norm_folded_beside_other_norms(tmp_path: Path, nodes: list[str], suspected: int) -> None:
    made, weights = [], [weight("n.weight", 1024), weight("n.bias", 1024)]
    for number, text in enumerate(nodes):
        op, *names = text.split()
        if op == "Conv":
            _, kernel, bias, out = names
            weights += [weight(kernel, 4, 3, 1, 1)] + [weight(bias, 4)] * (bias != "_")
            names = ["x", kernel, *([bias] if bias != "_" else []), out]
        made.append(helper.make_node(op, names[:-1], names[-1:], name=f"n{number}"))
    norm = helper.make_node("LayerNormalization", ["f", "n.weight", "n.bias"], ["y"])
    path = save(tmp_path / "m.onnx", [*made, norm], weights, [2, 3, 16, 16])
    said = [note for note in record_onnx(path, target="cpu").notes if "batch norm" in note]
    assert len(said) == suspected
    assert all(note.startswith(f"batch norm was folded into {suspected} conv") for note in said)
    assert all("it seems" in note for note in said)
    assert all("one was assumed after each" in note for note in said)
    without = record_onnx(path, target="cpu", assume_bn=False)
    assert any("batch norm was folded" in each for each in without.recording.lacks) == bool(suspected)


# exact numbers


def mlp(path: Path, kind: Any = np.float32) -> Path:
    """Two weights of 1 MiB (fp32); 1000 rows of 512."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    float_kind = FLOAT if kind is np.float32 else TensorProto.FLOAT16
    return save(
        path,
        nodes,
        [weight("w", 512, 512, kind=kind), weight("v", 512, 512, kind=kind)],
        ["n", 512],
        kind=float_kind,
    )


MIB = 2**20


def tensor_peak(recording: Recording) -> int:
    """Most bytes of tensors at once: cuBLAS's workspaces, which come with the first product, left out."""
    events = [e for e in recording.events if recording.rows[abs(e) - 1].category != "workspace"]
    return dataclasses.replace(recording, events=events).peak()[0]


@pytest.mark.parametrize(
    ("optimizer", "target", "weights"),
    [("sgd", "cpu", 2), ("sgd-momentum", "cpu", 3), ("adamw", "cuda", 5), ("adamw-fused", "cuda", 4)],
)
def test_parameters_gradients_state_and_the_foreach_temporary(
    tmp_path: Path, optimizer: str, target: Any, weights: int
) -> None:
    """With one row the activations are nothing: what is left is a number of copies of the 2 MiB of weights."""
    found = record_onnx(mlp(tmp_path / "m.onnx"), batch_size=1, optimizer=optimizer, target=target)
    peak = tensor_peak(found.recording)
    assert 0 <= peak - 2 * MIB * weights < 100_000


def test_the_for_loop_on_a_cpu_takes_temporaries_of_one_weight(tmp_path: Path) -> None:
    found = record_onnx(mlp(tmp_path / "m.onnx"), batch_size=1, optimizer="adam", target="cpu")
    assert 8 * MIB + MIB <= found.recording.peak()[0] < 8 * MIB + 4 * MIB


def test_activations_by_hand(tmp_path: Path) -> None:
    """Input, hidden, ReLU's result, output; the hidden layer before ReLU is let go as soon as it is read."""
    path = mlp(tmp_path / "m.onnx")
    recording = record_onnx(path, batch_size=4096, optimizer="sgd", loss="mean", target="cpu").recording
    rows = 4096 * 512 * 4
    forward_end = next(at for kind, at in recording.marks if kind == "backward")
    live = sum(recording.rows[i].size_bytes for i in recording.live_after(forward_end))
    # weights; input, ReLU's result. The loss is a mean: it keeps nothing, so the output is gone.
    assert live == pytest.approx(2 * MIB + 2 * rows, abs=16)
    peak = recording.peak()[0]
    # then: the gradient of the output (expanded, then contiguous), of ReLU's result, of a weight
    assert peak <= 2 * MIB + 2 * rows + 2 * rows + 2 * MIB + 100
    assert peak >= 2 * MIB + 3 * rows


def test_cross_entropy_keeps_the_log_probabilities(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx")
    mean = record_onnx(path, batch_size=4096, optimizer="sgd", loss="mean", target="cpu")
    entropy = record_onnx(path, batch_size=4096, optimizer="sgd", target="cpu")
    assert any("cross-entropy over the last dim of [4096, 512], guessed" in note for note in entropy.notes)
    assert entropy.recording.peak()[0] > mean.recording.peak()[0]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_steps(tmp_path: Path, optimizer: str) -> None:
    for target in ("cpu", "cuda"):
        recording = record_onnx(
            mlp(tmp_path / "m.onnx"), batch_size=4, optimizer=optimizer, target=target
        ).recording  # type: ignore[arg-type]
        assert sum(kind == "step" for kind, _ in recording.marks) == 3


def test_bf16_halves_what_fp32_takes(tmp_path: Path) -> None:
    for kind in (np.float32, np.float16):
        path = mlp(tmp_path / "m.onnx", kind)
        full = tensor_peak(
            record_onnx(path, batch_size=1024, dtype="fp32", target="cuda", loss="mean").recording
        )
        half = tensor_peak(
            record_onnx(path, batch_size=1024, dtype="bf16", target="cuda", loss="mean").recording
        )
        assert half == pytest.approx(full / 2, rel=0.01)


@pytest.mark.parametrize("dtype", ["amp-bf16", "amp-fp16"])
def test_autocast_keeps_weights_whole_and_halves_activations(tmp_path: Path, dtype: str) -> None:
    path = mlp(tmp_path / "m.onnx")
    for target in ("cpu", "cuda"):
        recording = record_onnx(path, batch_size=8192, dtype=dtype, target=target, loss="mean").recording  # type: ignore[arg-type]
        rows = 8192 * 512 * 2  # in half precision
        weights = sum(r.size_bytes for r in recording.rows if r.category == "parameter")
        kept = sorted(
            r.size_bytes for r in recording.rows if r.category == "activation" and r.size_bytes >= MIB // 2
        )
        assert weights == 2 * MIB
        # each step keeps the halved copy of one weight (the other's input needs no gradient), the input's and ReLU's result
        assert kept == [MIB // 2] * 3 + [rows] * 6


# parameters


def test_what_is_trained_and_what_is_not(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["a", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"], ["b"]
        ),
        helper.make_node("Mul", ["b", "gamma"], ["c"]),
        helper.make_node("Add", ["c", "mask"], ["d"]),
        helper.make_node("Add", ["d", "val_7"], ["e"]),
        helper.make_node("Mul", ["e", "half"], ["f"]),
        helper.make_node("Cast", ["linear.weight"], ["lw"], to=FLOAT),
        helper.make_node("Transpose", ["lw"], ["lt"], perm=[1, 0]),
        helper.make_node("GlobalAveragePool", ["f"], ["p"]),
        helper.make_node("Flatten", ["p"], ["q"]),
        helper.make_node("MatMul", ["q", "lt"], ["y"]),
    ]
    weights = [
        weight("conv.weight", 4, 3, 3, 3), *(weight(f"bn.{n}", 4) for n in ("weight", "bias", "running_mean", "running_var")),
        weight("gamma", 4, 1, 1), weight("mask", 1, 1, 8, 8), weight("val_7", 1, 4, 8, 8), weight("half"),
        weight("linear.weight", 10, 4, kind=np.float16),
    ]  # fmt: skip
    plan = plan_training(save(tmp_path / "m.onnx", nodes, weights, [2, 3, 8, 8]), batch_size=None, dims={})
    assert set(plan.trained) == {"conv.weight", "bn.weight", "bn.bias", "gamma", "linear.weight"}


def test_lstm_weights_in_another_order_are_one_parameter(tmp_path: Path) -> None:
    plan = plan_training(exported("lstm_18", tmp_path), batch_size=2, dims={})
    recurrent = sorted(w.dims for w in plan.trained.values() if len(w.dims) != 2 and w.dims[0] == 1)
    assert recurrent == [(1, 384, 96)] * 4
    assert sorted(w.dims for w in plan.trained.values() if w.dims[-1] == 768) == [(1, 768)] * 2
    assert not {"Slice", "Concat"} & {n.op for n in plan.graph.nodes}


def test_a_tied_head_that_was_folded_apart_is_said(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["head.weight", "x"], ["h"]),
        helper.make_node("MatMul", ["h", "val_3"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [weight("head.weight", 100, 8), weight("val_3", 8, 100)],
        [2, 4],
        kind=TensorProto.INT64,
    )
    assert any(
        "'head.weight' and 'val_3'" in note and "ties" in note
        for note in record_onnx(path, target="cpu").notes
    )


def test_a_model_without_weights_has_nothing_to_train(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [], [2, 4])
    with pytest.raises(UsageError, match="nothing to train"):
        record_onnx(path, target="cpu")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Shape", ["h"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=FLOAT),
    ]
    with pytest.raises(UsageError):
        record_onnx(save(tmp_path / "n.onnx", nodes, [weight("w", 4, 4)], [2, 4]), target="cpu")


def test_a_branch_that_a_constant_chooses_is_trained(tmp_path: Path) -> None:
    """All that the If itself reads is known; what its branches read around them is not."""
    port = helper.make_tensor_value_info("h", FLOAT, None)
    product = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["h"])], "then", [], [port])
    other = helper.make_graph([helper.make_node("Relu", ["x"], ["h"])], "else", [], [port])
    chosen = helper.make_node("If", ["yes"], ["y"], then_branch=product, else_branch=other)
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    path = save(tmp_path / "if.onnx", [chosen], [yes, weight("w", 4, 4)], [2, 4])
    plain = save(
        tmp_path / "p.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [weight("w", 4, 4)], [2, 4]
    )
    found = record_onnx(path, target="cpu")
    assert not found.partial
    assert found.recording.peak()[0] == record_onnx(plain, target="cpu").recording.peak()[0]


@pytest.mark.parametrize(
    ("op", "error", "why"),
    [
        ("BitwiseNot", NotPossibleHere, "derivative for aten::bitwise_not"),
        ("IsNaN", UsageError, "nothing to take a loss of"),
    ],
)
def test_a_model_that_cannot_be_trained_says_why(
    tmp_path: Path, op: str, error: type[MemoptError], why: str
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(op, ["h"], ["y"])]
    with pytest.raises(error) as told:
        record_onnx(save(tmp_path / "m.onnx", nodes, [weight("w", 4, 4)], [2, 4]), loss="mean")
    assert why in told.value.why


# speed, and the whole way


def deep(path: Path, blocks: int) -> Path:
    """An MLP-mixer of sorts: ten nodes a block."""
    nodes, weights, x = [], [], "x"
    for i in range(blocks):
        names = [f"{i}.{n}" for n in ("n", "m", "b", "g", "e", "d", "o", "h", "f")]
        n, m, b, g, e, d, o, h, f = names
        nodes += [
            helper.make_node("LayerNormalization", [x, f"{i}.norm.weight", f"{i}.norm.bias"], [n]),
            helper.make_node("MatMul", [n, f"{i}.up.weight"], [m]),
            helper.make_node("Add", [m, f"{i}.up.bias"], [b]),
            helper.make_node("Div", [b, "root"], [g]),
            helper.make_node("Erf", [g], [e]),
            helper.make_node("Add", [e, "one"], [d]),
            helper.make_node("Mul", ["half", d], [o]),
            helper.make_node("Mul", [b, o], [h]),
            helper.make_node("MatMul", [h, f"{i}.down.weight"], [f]),
            helper.make_node("Add", [f, x], [f"{i}.out"]),
        ]
        weights += [weight(f"{i}.norm.weight", 64), weight(f"{i}.norm.bias", 64), weight(f"{i}.up.weight", 64, 256),
                    weight(f"{i}.up.bias", 256), weight(f"{i}.down.weight", 256, 64)]  # fmt: skip
        x = f"{i}.out"
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    for name, value in (("root", 2**0.5), ("one", 1.0), ("half", 0.5)):
        weights.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return save(path, nodes, weights, ["batch", 16, 64])


def test_time_grows_with_the_nodes_and_no_faster(tmp_path: Path) -> None:
    """A tenth of the nodes beside all of them, in this process's own time: matching must not compare each with each."""

    def seconds(layers: int) -> float:
        path = deep(tmp_path / f"{layers}.onnx", layers)
        start = time.process_time()
        plan_training(path, batch_size=8, dims={})
        return time.process_time() - start

    seconds(1)  # imports
    assert seconds(100) < 30 * min(seconds(10), seconds(10))


def test_a_thousand_nodes(tmp_path: Path) -> None:
    plan = plan_training(deep(tmp_path / "m.onnx", 100), batch_size=8, dims={})
    assert sum(n.op == "Gelu" for n in plan.graph.nodes) == 100
    assert len(plan.graph.nodes) == 501


def test_the_whole_way_to_a_device(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx")
    found = estimate_onnx(path, batch_size=4096, device="a100-40gb")
    assert found.device == "a100-40gb"
    assert 10 * MIB < found.allocated_bytes <= found.reserved_bytes < (found.process_bytes or 0)
    assert found.by_category["parameter"] == 2 * MIB
    assert not found.partial
    here = estimate_onnx(path, batch_size=4096, device="cpu", optimizer="sgd", loss="mean")
    assert (
        here.allocated_bytes
        == record_onnx(path, batch_size=4096, optimizer="sgd", loss="mean", target="cpu").recording.peak()[0]
    )


def test_a_partial_estimate_names_the_operator(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Strange", ["h"], ["y"], domain="my.own"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [weight("w", 512, 512)], ["n", 512])
    found = record_onnx(path, batch_size=1024, target="cpu", loss="mean")
    assert found.partial
    assert any("my.own.Strange" in note for note in found.notes)
    plain = record_onnx(save(tmp_path / "p.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [weight("w", 512, 512)], ["n", 512]),
                        batch_size=1024, target="cpu", loss="mean")  # fmt: skip
    assert found.recording.peak()[0] > plain.recording.peak()[0]
