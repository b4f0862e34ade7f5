"""Training graphs of known shapes for the planner benchmark, from `tests.support.training_graphs.tape`.

`python -m tests.support.training_graphs.shapes NAME > graph.json` writes one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from memopt.advisors.graphs.graph import GraphFile
from tests.support.training_graphs.families import FAMILIES
from tests.support.training_graphs.tape import LAUNCH_MS, Images, Tape, loss


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
    **FAMILIES,
}

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(GRAPHS[sys.argv[1]]()))
