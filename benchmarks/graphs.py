"""Training graphs of known shapes for the planner benchmark: forward, backward and optimizer ops with bytes and
milliseconds from shapes and FLOPs (a device of 40 TFLOP/s and 800 GB/s, fp32), no PyTorch needed.

`python -m benchmarks.graphs NAME > graph.json` writes one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from memopt.advisors.graph import SCHEMA, GraphFile, OpRow, TensorRow

FLOPS_PER_MS = 40e9
BYTES_PER_MS = 0.8e9
LAUNCH_MS = 0.005


@dataclass
class _Forward:
    name: str
    inputs: list[int]
    output: int
    saved: list[int]
    parameters: list[int]
    ms: float
    extra: list[int]


@dataclass
class Tape:
    """Records forward ops as they are applied; `train` adds backward and optimizer."""

    name: str
    tensors: list[TensorRow] = field(default_factory=list)
    ops: list[OpRow] = field(default_factory=list)
    tape: list[_Forward] = field(default_factory=list)

    def tensor(self, size: int, name: str = "", *, resident: bool = False) -> int:
        """A new storage of `size` bytes."""
        self.tensors.append(TensorRow(id=len(self.tensors), bytes=int(size), name=name, resident=resident))
        return len(self.tensors) - 1

    def parameter(self, size: int) -> int:
        """A resident storage."""
        return self.tensor(size, "parameter", resident=True)

    def size(self, tensor: int) -> int:
        """Bytes of `tensor`."""
        return self.tensors[tensor].bytes

    def op(
        self,
        name: str,
        reads: list[int],
        writes: list[int],
        ms: float,
        phase: str,
        replayable: bool = True,
        workspace: int = 0,
    ) -> None:
        """One op at the end of the graph."""
        self.ops.append(
            OpRow(
                name=name,
                ms=round(ms, 6),
                reads=reads,
                writes=writes,
                phase=phase,
                replayable=replayable,
                workspace_bytes=workspace,
            )
        )

    def apply(
        self,
        name: str,
        inputs: list[int],
        size: int,
        *,
        flops: float = 0.0,
        save: str = "",
        parameters: list[int] | None = None,
        extra: int = 0,
        workspace: int = 0,
    ) -> int:
        """A forward op; `save` holds `i` to save its inputs for backward, `o` its output, `x` its side output."""
        parameters = parameters or []
        output = self.tensor(size, f"{name}.out")
        side = [self.tensor(extra, f"{name}.side")] if extra else []
        moved = sum(self.size(tensor) for tensor in [*inputs, *parameters, output, *side])
        ms = max(flops / FLOPS_PER_MS, moved / BYTES_PER_MS) + LAUNCH_MS
        self.op(name, [*inputs, *parameters], [output, *side], ms, "forward", workspace=workspace)
        saved = (
            (inputs if "i" in save else [])
            + ([output] if "o" in save else [])
            + (side if "x" in save else [])
        )
        self.tape.append(_Forward(name, inputs, output, saved, parameters, ms * (2 if flops else 1), side))
        return output

    def train(self, inputs: list[int], *, optimizer: bool = True) -> GraphFile:
        """Backward from the last output, then one optimizer op per gradient; gradients and loss are kept."""
        loss = self.tape[-1].output
        seed = self.tensor(self.size(loss), "loss.grad")
        self.op("ones_like", [loss], [seed], LAUNCH_MS, "backward")
        grads = {loss: seed}
        weights: dict[int, int] = {}
        for step in reversed(self.tape):
            if step.output not in grads:
                continue
            self._backward(step, grads, inputs, weights)
        if optimizer:
            for parameter, grad in weights.items():
                state = self.parameter(2 * self.size(parameter))
                self.op(
                    "adam",
                    [parameter, grad, state],
                    [],
                    4 * self.size(parameter) / BYTES_PER_MS + LAUNCH_MS,
                    "optimizer",
                    False,
                )
        return GraphFile(
            schema=SCHEMA, name=self.name, tensors=self.tensors, ops=self.ops, keep=[loss, *weights.values()]
        )

    def _backward(
        self, step: _Forward, grads: dict[int, int], inputs: list[int], weights: dict[int, int]
    ) -> None:
        grad = grads.pop(step.output)
        produced: list[int] = []
        fresh: list[tuple[dict[int, int], int, int]] = []
        for into, sources in ((grads, step.inputs), (weights, step.parameters)):
            for source in sources:
                if source not in inputs:
                    made = self.tensor(self.size(source), f"{step.name}.grad")
                    produced.append(made)
                    fresh.append((into, source, made))
        self.op(
            f"{step.name}.backward",
            list(dict.fromkeys([grad, *step.saved, *step.parameters])),
            produced,
            step.ms,
            "backward",
        )
        for into, source, made in fresh:
            if source in into:
                total = self.tensor(self.size(source), "accumulated.grad")
                self.op(
                    "add",
                    [into[source], made],
                    [total],
                    3 * self.size(source) / BYTES_PER_MS + LAUNCH_MS,
                    "backward",
                )
                into[source] = total
            else:
                into[source] = made


@dataclass
class Images:
    """Convolution blocks on a tape; tensors are tracked with their channels and side length."""

    tape: Tape
    batch: int
    shape: dict[int, tuple[int, int]] = field(default_factory=dict)

    def input(self, channels: int, side: int) -> int:
        """The batch of images, loaded by an op that cannot be replayed."""
        tensor = self.tape.tensor(4 * self.batch * channels * side * side, "images")
        self.tape.op("load", [], [tensor], 0.01, "forward", replayable=False)
        self.shape[tensor] = (channels, side)
        return tensor

    def conv(self, x: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> int:
        """Convolution that saves its input."""
        inputs, side = self.shape[x]
        side //= stride
        weights = channels * inputs * kernel * kernel // groups
        out = self.tape.apply(
            "conv", [x], 4 * self.batch * channels * side * side, flops=2.0 * self.batch * side * side * weights, save="i",
            parameters=[self.tape.parameter(4 * weights)], workspace=4 * self.batch * side * side * min(channels, 16),
        )  # fmt: skip
        self.shape[out] = (channels, side)
        return out

    def norm(self, x: int) -> int:
        """Batch norm that saves its input and two small statistics."""
        channels, _ = self.shape[x]
        out = self.tape.apply(
            "norm",
            [x],
            self.tape.size(x),
            save="ix",
            extra=8 * channels,
            parameters=[self.tape.parameter(8 * channels)],
        )
        self.shape[out] = self.shape[x]
        return out

    def relu(self, x: int) -> int:
        """ReLU that saves its output."""
        out = self.tape.apply("relu", [x], self.tape.size(x), save="o")
        self.shape[out] = self.shape[x]
        return out

    def block(self, x: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> int:
        """conv, norm, relu."""
        return self.relu(self.norm(self.conv(x, channels, kernel, stride, groups)))

    def pool(self, x: int) -> int:
        """Max pool by two, saving input and indices."""
        channels, side = self.shape[x]
        size = self.tape.size(x) // 4
        out = self.tape.apply("pool", [x], size, save="ix", extra=2 * size)
        self.shape[out] = (channels, side // 2)
        return out

    def join(self, name: str, xs: list[int], channels: int, side: int) -> int:
        """add or cat."""
        out = self.tape.apply(name, xs, 4 * self.batch * channels * side * side)
        self.shape[out] = (channels, side)
        return out

    def up(self, x: int, channels: int) -> int:
        """Transposed convolution that doubles the side."""
        inputs, side = self.shape[x]
        out = self.tape.apply(
            "up", [x], 16 * self.batch * channels * side * side, flops=8.0 * self.batch * side * side * inputs * channels,
            save="i", parameters=[self.tape.parameter(16 * inputs * channels)],
        )  # fmt: skip
        self.shape[out] = (channels, side * 2)
        return out

    def head(self, x: int, classes: int = 1000) -> int:
        """Global pool, linear, loss."""
        channels, _ = self.shape[x]
        pooled = self.tape.apply("mean", [x], 4 * self.batch * channels)
        logits = self.tape.apply(
            "linear", [pooled], 4 * self.batch * classes, flops=2.0 * self.batch * channels * classes, save="i",
            parameters=[self.tape.parameter(4 * channels * classes)],
        )  # fmt: skip
        return loss(self.tape, logits)


def loss(tape: Tape, logits: int) -> int:
    """log_softmax (saves its output) and a scalar loss."""
    logged = tape.apply("log_softmax", [logits], tape.size(logits), save="o")
    return tape.apply("nll_loss", [logged], 4)


def vgg(batch: int = 64) -> GraphFile:
    """VGG-16 at 224."""
    net = Images(Tape("vgg16"), batch)
    images = x = net.input(3, 224)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = net.relu(net.conv(x, channels))
        x = net.pool(x)
    net.head(x)
    return net.tape.train([images])


def resnet(batch: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> GraphFile:
    """Bottleneck ResNet; the default depths are ResNet-50."""
    net = Images(Tape(f"resnet{3 * sum(depths) + 2}"), batch)
    images = net.input(3, 224)
    x = net.pool(net.block(images, 64, 7, 2))
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            stride = 2 if index == 0 and stage else 1
            y = net.block(net.block(x, width, 1), width, 3, stride)
            y = net.norm(net.conv(y, 4 * width, 1))
            if index == 0:
                x = net.norm(net.conv(x, 4 * width, 1, stride))
            x = net.relu(net.join("add", [x, y], *net.shape[y]))
    net.head(x)
    return net.tape.train([images])


def mobilenet(batch: int = 128) -> GraphFile:
    """MobileNet v1 at 224."""
    net = Images(Tape("mobilenet"), batch)
    images = net.input(3, 224)
    x = net.block(images, 32, 3, 2)
    for channels, stride in (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ):
        x = net.block(x, net.shape[x][0], 3, stride, net.shape[x][0])
        x = net.block(x, channels, 1)
    net.head(x)
    return net.tape.train([images])


def unet(batch: int = 8, side: int = 256) -> GraphFile:
    """U-Net with four halvings."""
    net = Images(Tape("unet"), batch)
    images = net.input(3, side)
    x, mirrors = images, []
    for depth in range(4):
        x = net.block(net.block(x, 64 << depth), 64 << depth)
        mirrors.append(x)
        x = net.pool(x)
    x = net.block(net.block(x, 1024), 1024)
    for mirror in reversed(mirrors):
        channels, side = net.shape[mirror]
        x = net.join("cat", [net.up(x, channels), mirror], 2 * channels, side)
        x = net.block(net.block(x, channels), channels)
    loss(net.tape, net.conv(x, 2, 1))
    return net.tape.train([images])


def densenet(batch: int = 64) -> GraphFile:
    """DenseNet-121: every layer concatenates all before it."""
    net = Images(Tape("densenet121"), batch)
    images = net.input(3, 224)
    x = net.pool(net.block(images, 64, 7, 2))
    for index, count in enumerate((6, 12, 24, 16)):
        parts = [x]
        for _ in range(count):
            channels = sum(net.shape[part][0] for part in parts)
            y = net.join("cat", parts, channels, net.shape[x][1]) if len(parts) > 1 else x
            y = net.conv(net.relu(net.norm(y)), 128, 1)
            parts.append(net.conv(net.relu(net.norm(y)), 32))
        x = net.join("cat", parts, sum(net.shape[part][0] for part in parts), net.shape[x][1])
        x = net.relu(net.norm(x))
        if index < 3:
            x = net.pool(net.conv(x, net.shape[x][0] // 2, 1))
    net.head(x)
    return net.tape.train([images])


def transformer(batch: int = 8, length: int = 512, width: int = 768, layers: int = 12) -> GraphFile:
    """A GPT-like stack with explicit attention matrices, dropout masks and a large vocabulary."""
    tape = Tape(f"transformer{layers}")
    rows = batch * length
    heads = max(1, width // 64)

    def linear(x: int, inputs: int, outputs: int) -> int:
        weight = tape.parameter(4 * inputs * outputs)
        return tape.apply(
            "linear",
            [x],
            4 * rows * outputs,
            flops=2.0 * rows * inputs * outputs,
            save="i",
            parameters=[weight],
        )

    def same(name: str, xs: list[int], save: str, extra: int = 0) -> int:
        return tape.apply(name, xs, tape.size(xs[0]), save=save, extra=extra)

    tokens = tape.tensor(8 * rows, "tokens")
    tape.op("load", [], [tokens], 0.01, "forward", replayable=False)
    x = tape.apply(
        "embedding", [tokens], 4 * rows * width, save="i", parameters=[tape.parameter(4 * width * 32000)]
    )
    for _ in range(layers):
        y = same("layer_norm", [x], "ix", 8 * rows)
        q, k, v = (linear(y, width, width) for _ in range(3))
        scores = tape.apply(
            "bmm", [q, k], 4 * batch * heads * length * length, flops=2.0 * rows * length * width, save="i"
        )
        weights = same("softmax", [scores], "o")
        weights = same("dropout", [weights], "x", tape.size(weights) // 4)
        y = tape.apply("bmm", [weights, v], 4 * rows * width, flops=2.0 * rows * length * width, save="i")
        x = same("add", [x, same("dropout", [linear(y, width, width)], "x", rows * width)], "")
        y = same("gelu", [linear(same("layer_norm", [x], "ix", 8 * rows), width, 4 * width)], "i")
        x = same("add", [x, same("dropout", [linear(y, 4 * width, width)], "x", rows * width)], "")
    loss(tape, linear(same("layer_norm", [x], "ix", 8 * rows), width, 32000))
    return tape.train([tokens])


def lstm(batch: int = 256, width: int = 1024, steps: int = 100, layers: int = 2) -> GraphFile:
    """An unrolled LSTM; weights are read at every step, so their gradients accumulate."""
    tape = Tape(f"lstm{steps}")
    state = 4 * batch * width
    weights = [
        (tape.parameter(16 * width * width), tape.parameter(16 * width * width)) for _ in range(layers)
    ]
    inputs = tape.tensor(state * steps, "sequence")
    tape.op("load", [], [inputs], 0.01, "forward", replayable=False)
    zeros = tape.tensor(state, "zeros")
    tape.op("zeros", [], [zeros], LAUNCH_MS, "forward")
    h, c = [zeros] * layers, [zeros] * layers
    flops = 8.0 * batch * width * width
    for _ in range(steps):
        x = tape.apply("select", [inputs], state)
        for layer in range(layers):
            wx = tape.apply("linear", [x, weights[layer][0]], 4 * state, flops=flops, save="i")
            wh = tape.apply("linear", [h[layer], weights[layer][1]], 4 * state, flops=flops, save="i")
            gates = [tape.apply("gate", [tape.apply("add", [wx, wh], 4 * state)], 4 * state, save="o")]
            forget = tape.apply("mul", [gates[0], c[layer]], state, save="i")
            update = tape.apply("mul", [gates[0]], state, save="i")
            c[layer] = tape.apply("add", [forget, update], state)
            x = h[layer] = tape.apply(
                "mul", [gates[0], tape.apply("tanh", [c[layer]], state, save="o")], state, save="i"
            )
    loss(
        tape,
        tape.apply(
            "linear",
            [x],
            4 * batch * 1000,
            flops=2.0 * batch * width * 1000,
            save="i",
            parameters=[tape.parameter(4 * width * 1000)],
        ),
    )
    return tape.train([inputs, zeros])


GRAPHS: dict[str, Callable[[], GraphFile]] = {
    "vgg16": vgg,
    "resnet50": resnet,
    "resnet152": lambda: resnet(32, (3, 8, 36, 3)),
    "mobilenet": mobilenet,
    "unet": unet,
    "densenet121": densenet,
    "transformer12": transformer,
    "transformer48": lambda: transformer(2, 512, 1600, 48),
    "lstm60": lambda: lstm(256, 1024, 60, 2),
    "lstm200": lambda: lstm(256, 1024, 200, 2),
}

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(GRAPHS[sys.argv[1]]()))
