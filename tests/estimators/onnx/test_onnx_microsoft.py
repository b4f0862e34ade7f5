"""What ONNX Runtime's optimizer makes of a network costs what the network's script costs: same parameters, same peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import Tensor, nn

from memopt.errors import BadFile
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.training import estimate_training_step
from memopt.estimators.onnx.estimate import OnnxRecording, record_onnx
from tests.support.onnx_weights import weight

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 64, 128, 4, 512


def ort(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain="com.microsoft", **attributes)


def recorded(path: Path, nodes: list[onnx.NodeProto], weights: list[TensorProto]) -> OnnxRecording:
    """Training of `nodes`, from ids [batch, length] to logits, with SGD on a pretended GPU."""
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", LENGTH])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "ort", [ids], [logits], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return record_onnx(path, batch_size=BATCH, optimizer="sgd")


def scripted(build: Callable[[], nn.Module]) -> tuple[int, int]:
    """Parameters and peak of the same network in a script."""
    count = []

    def made(recorder: FakeRecorder) -> tuple[Callable[[], Tensor], list[Tensor]]:
        with recorder.claiming("cuda"):
            model = build()
            ids, labels = (torch.randint(0, WORDS, (BATCH, LENGTH)) for _ in range(2))
        count.append(sum(p.numel() for p in model.parameters()))

        def step() -> Tensor:
            with recorder.claiming("cuda"):
                return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

        return step, list(model.parameters())

    recording = estimate_training_step(made, lambda p: torch.optim.SGD(p, 0.1), target="cuda")
    return count[0], recording.peak(512)[0]


class Bert(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head, self.activation = nn.Linear(WIDTH, WORDS, bias=False), activation

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norms[0](self.words(ids) + self.places(torch.arange(LENGTH)))
        q, k, v = (
            part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[1](self.out(y) + x)
        x = self.norms[2](self.down(self.activation(self.up(x))) + x)
        return self.head(x)


@pytest.mark.parametrize(
    ("op", "activation"),
    [("BiasGelu", F.gelu), ("FastGelu", lambda x: F.gelu(x, approximate="tanh"))],
    ids=["BiasGelu", "FastGelu"],
)
def test_a_fused_bert_costs_what_its_script_costs(
    tmp_path: Path, op: str, activation: Callable[[Tensor], Tensor]
) -> None:
    nodes = [
        ort("EmbedLayerNormalization", ["ids", "", "words", "places", "", "g0", "b0"], ["x0", ""]),
        ort("Attention", ["x0", "qkv", "qkv_bias"], ["a"], num_heads=HEADS),
        helper.make_node("MatMul", ["a", "out"], ["o"]),
        ort("SkipLayerNormalization", ["o", "x0", "g1", "b1", "out_bias"], ["x1"]),
        helper.make_node("MatMul", ["x1", "up"], ["u"]),
        ort(op, ["u", "up_bias"], ["m"]),
        helper.make_node("MatMul", ["m", "down"], ["d"]),
        ort("SkipLayerNormalization", ["d", "x1", "g2", "b2", "down_bias"], ["x2"]),
        helper.make_node("MatMul", ["x2", "head"], ["logits"]),
    ]
    shapes = {
        "words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "qkv_bias": (3 * WIDTH,),
        "out": (WIDTH, WIDTH), "out_bias": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "up_bias": (4 * WIDTH,),
        "down": (4 * WIDTH, WIDTH), "down_bias": (WIDTH,), "head": (WIDTH, WORDS),
        **{f"{part}{i}": (WIDTH,) for part in "gb" for i in range(3)},
    }  # fmt: skip
    found = recorded(tmp_path / "bert.onnx", nodes, [weight(n, *dims) for n, dims in shapes.items()])
    count, peak = scripted(lambda: Bert(activation))
    assert not found.partial, found.notes
    assert found.parameter_count == count
    assert found.recording.peak(512)[0] == pytest.approx(peak, rel=0.02)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.register_buffer("cos", torch.zeros(LENGTH, 16))
        self.register_buffer("sin", torch.zeros(LENGTH, 16))

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        y = self.norms[0](x)
        q, k, v = (p(y).view(BATCH, LENGTH, -1, 32).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True)
        y = self.norms[1](x + self.out(y.transpose(1, 2).flatten(2)))
        return self.head(y * torch.sigmoid(1.702 * y))


def test_a_fused_llama_costs_what_its_script_costs(tmp_path: Path) -> None:
    """Rotary tables are no parameters; a skipped norm hands on the sum as well."""
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        ort("SimplifiedLayerNormalization", ["x", "g0"], ["y"]),
        *(helper.make_node("MatMul", ["y", name], [f"{name}y"]) for name in "qkv"),
        ort("RotaryEmbedding", ["qy", "zero", "c", "s"], ["qr"], num_heads=4),
        ort("RotaryEmbedding", ["ky", "zero", "c", "s"], ["kr"]),
        ort("GroupQueryAttention", ["qr", "kr", "vy"], ["a"], num_heads=4, kv_num_heads=2),
        helper.make_node("MatMul", ["a", "out"], ["o"]),
        ort("SkipSimplifiedLayerNormalization", ["x", "o", "g1"], ["z", "", "", "sum"]),
        ort("QuickGelu", ["z"], ["m"]),
        helper.make_node("MatMul", ["m", "head"], ["logits"]),
    ]
    shapes = {
        "words": (WORDS, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH // 2), "v": (WIDTH, WIDTH // 2),
        "out": (WIDTH, WIDTH), "head": (WIDTH, WORDS), "g0": (WIDTH,), "g1": (WIDTH,), "c": (LENGTH, 16), "s": (LENGTH, 16),
    }  # fmt: skip
    weights = [weight(n, *dims) for n, dims in shapes.items()]
    weights.append(helper.make_tensor("zero", TensorProto.INT64, [1], [0]))
    found = recorded(tmp_path / "llama.onnx", nodes, weights)
    count, peak = scripted(Llama)
    assert not found.partial, found.notes
    assert found.parameter_count == count
    assert found.recording.peak(512)[0] == pytest.approx(peak, rel=0.02)


def test_packed_queries_keys_and_values_are_one_product(tmp_path: Path) -> None:
    """[batch, length, heads, 3, size] and [batch, length, (heads + 2 kv heads) size] cost what three inputs cost."""
    peaks = set()
    packed = {
        "heads": [
            helper.make_node("Reshape", ["p", "to"], ["five"]),
            ort("MultiHeadAttention", ["five"], ["a"], num_heads=HEADS),
        ],
        "wide": [ort("GroupQueryAttention", ["p"], ["a"], num_heads=HEADS, kv_num_heads=HEADS)],
        "three": [
            helper.make_node("Split", ["p"], ["q", "k", "v"], axis=-1),
            ort("MultiHeadAttention", ["q", "k", "v"], ["a"], num_heads=HEADS, unidirectional=1),
        ],
    }
    for name, middle in packed.items():
        nodes = [
            helper.make_node("Gather", ["words", "ids"], ["x"]),
            helper.make_node("MatMul", ["x", "qkv"], ["p"]),
            *middle,
            helper.make_node("MatMul", ["a", "head"], ["logits"]),
        ]
        weights = [
            weight("words", WORDS, WIDTH),
            weight("qkv", WIDTH, 3 * WIDTH),
            weight("head", WIDTH, WORDS),
        ]
        weights.append(helper.make_tensor("to", TensorProto.INT64, [5], [0, 0, HEADS, 3, WIDTH // HEADS]))
        found = recorded(tmp_path / f"{name}.onnx", nodes, weights)
        assert not found.partial, (name, found.notes)
        peaks.add(found.recording.peak(512)[0])
    assert max(peaks) - min(peaks) <= 0.02 * min(peaks)


def test_a_node_after_an_unknown_one_is_not_blamed_alone(tmp_path: Path) -> None:
    nodes = [
        ort("MoE", ["ids"], ["x"]),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    with pytest.raises(BadFile) as caught:
        recorded(tmp_path / "unknown.onnx", nodes, [weight("head", WIDTH, WORDS)])
    assert "the shapes that com.microsoft.MoE gives were guessed" in caught.value.why


@pytest.mark.parametrize(
    "node",
    [
        ort("GroupNorm", ["x", "g", "g"], ["y"], groups=0),
        ort("Attention", ["x", "head"], ["y"], num_heads=-1),
        ort("GroupQueryAttention", ["x"], ["y"], num_heads=4, do_rotary=1),
        ort("SkipLayerNormalization", ["x"], ["y"]),
    ],
    ids=lambda node: node.op_type,
)
def test_attributes_that_cannot_be_are_refused(tmp_path: Path, node: onnx.NodeProto) -> None:
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        node,
        helper.make_node("MatMul", ["y", "head"], ["logits"]),
    ]
    weights = [weight("words", WORDS, WIDTH), weight("g", WIDTH), weight("head", WIDTH, WORDS)]
    with pytest.raises(BadFile, match=node.op_type):
        recorded(tmp_path / "bad.onnx", nodes, weights)
