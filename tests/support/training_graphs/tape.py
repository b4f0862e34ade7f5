"""A tape for made-up training graphs: forward ops as they are applied, then backward and optimizer, with bytes and milliseconds from
shapes and FLOPs (a device of 40 TFLOP/s and 800 GB/s, fp32), no PyTorch needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.advisors.graphs.graph import SCHEMA, GraphFile, OpRow, TensorRow

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
