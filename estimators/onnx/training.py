"""A training step of an ONNX model on fake tensors: parameters, forward, loss, backward, optimizer, recorded."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.errors import BadFile, NotPossibleHere, UsageError
from memopt.estimators.fake.recorder import FakeRecorder, Target
from memopt.estimators.fake.torch_internals import FAKE_LOG, FakeTensorMode
from memopt.estimators.fake.training import estimate_training_step
from memopt.estimators.onnx.interpret import Env, Run, is_known
from memopt.estimators.onnx.ops.registry import DTYPES
from memopt.estimators.onnx.read.graph import Graph, Model, Weight
from memopt.estimators.onnx.read.parameters import FLOATS, INTEGERS
from memopt.estimators.recording import Recording

DTYPE_POLICIES = ("fp32", "bf16", "amp-bf16", "amp-fp16")
LOSSES = ("cross-entropy", "mean")

_ADAPTIVE = {"lr": 1e-3}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", _ADAPTIVE),
    "adamw": ("AdamW", _ADAPTIVE),
    "adam-fused": ("Adam", {**_ADAPTIVE, "fused": True}),
    "adamw-fused": ("AdamW", {**_ADAPTIVE, "fused": True}),
    "rmsprop": ("RMSprop", _ADAPTIVE),
    "adagrad": ("Adagrad", _ADAPTIVE),
    "adadelta": ("Adadelta", _ADAPTIVE),
    "adamax": ("Adamax", _ADAPTIVE),
    "nadam": ("NAdam", _ADAPTIVE),
    "radam": ("RAdam", _ADAPTIVE),
    "adafactor": ("Adafactor", {}),
}
"""Name -> the class in `torch.optim` and its settings; on a GPU the class's own choice (for-each) is made."""


@dataclass(slots=True)
class Plan:
    """A model ready to be trained: its graph, what is trained in it, and what need not be computed again."""

    graph: Graph
    trained: dict[str, Weight]
    known: dict[str, Any]
    opset: int
    main: torch.dtype
    loss: str
    notes: list[str] = field(default_factory=list)
    partial: dict[str, str] = field(default_factory=dict)
    bounded: list[str] = field(default_factory=list)
    """Where sizes depend on data, each told in a sentence."""
    least: bool = False
    """The smallest sizes are taken there, not the largest."""
    lacks: list[str] = field(default_factory=list)
    """What training may keep and the file does not show, told in a sentence each."""
    lacks_on_cpu: list[str] = field(default_factory=list)
    """The same, on a CPU alone."""


def main_type(trained: Mapping[str, Weight]) -> torch.dtype:
    """The element type that most of the trained weights have in the file."""
    sizes: Counter[torch.dtype] = Counter()
    for weight in trained.values():
        sizes[DTYPES[weight.kind]] += weight.elements
    return sizes.most_common(1)[0][0] if sizes else torch.float32


@contextmanager
def without_torch_logs() -> Iterator[None]:
    """Torch logs a traceback for every shape that does not fit; what does not fit is told in our own words."""
    logger = logging.getLogger(FAKE_LOG)
    silent = logging.Filter("nobody")
    logger.addFilter(silent)
    try:
        yield
    finally:
        logger.removeFilter(silent)


def fold(
    model: Model, graph: Graph, trained: Mapping[str, Weight], *, least: bool = False
) -> tuple[Env, Run]:
    """Every value of `graph` by name, known ones real and the others fake, without recording anything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    run = Run(model.opset, mode, main=main_type(trained), least=least)
    with without_torch_logs(), torch.no_grad(), mode:
        env: Env = {p.name: torch.empty(_whole(p.dims), dtype=_input_type(p.kind)) for p in graph.inputs}
        for name, weight in graph.weights.items():
            if name in trained:
                env[name] = torch.empty(weight.dims, dtype=DTYPES[weight.kind])
            else:
                env[name] = run.constant(weight)
        for node in graph.nodes:
            run.node(node, env, graph)
    return env, run


def _whole(dims: Any) -> tuple[int, ...]:
    return tuple(int(d) for d in dims or ())


def _input_type(kind: int) -> torch.dtype:
    found = DTYPES.get(kind)
    if found is None:
        raise BadFile(
            f"the model takes an input of the element type {kind}",
            why="only tensors of numbers can be trained on",
        )
    return found


def choose_loss(outputs: list[Any], asked: str | None) -> tuple[str, str]:
    """The loss and what to say of it: cross-entropy over the last dim of what looks like logits, else the mean."""
    floats = [o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
    if not floats:
        raise UsageError("the model has no floating-point output", why="there is nothing to take a loss of")
    if asked == "mean":
        return asked, "loss: the mean of the outputs (--loss mean)"
    shape = list(floats[0].shape)
    if asked == "cross-entropy":
        if len(shape) < 1 or shape[-1] < 2:
            raise UsageError(
                f"cross-entropy cannot be taken of an output of shape {shape}", try_="--loss mean"
            )
        return asked, f"loss: cross-entropy over the last dim of {shape} (--loss)"
    if len(shape) in (2, 3) and shape[-1] >= 2:
        return (
            "cross-entropy",
            f"loss: cross-entropy over the last dim of {shape}, guessed by its shape (--loss mean changes it)",
        )
    return (
        "mean",
        f"loss: the mean of the output {shape}, guessed by its shape (--loss cross-entropy changes it)",
    )


def take_loss(kind: str, outputs: list[Any], target: Tensor | None) -> Tensor:
    floats = [o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
    if kind == "mean":
        parts = [o.mean() for o in floats if o.requires_grad] or [floats[0].mean()]
        return sum(parts[1:], parts[0])
    logits = floats[0]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target)  # type: ignore[arg-type]


def check_choices(optimizer: str, dtype: str, loss: str | None) -> None:
    """Raise `UsageError` for a name that is not one of ours, before any file is read."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"there is no optimizer '{optimizer}' here", try_="--optimizer " + ", ".join(OPTIMIZERS)
        )
    if dtype not in DTYPE_POLICIES:
        raise UsageError(
            f"there is no dtype policy '{dtype}'", try_="--dtype " + " or --dtype ".join(DTYPE_POLICIES)
        )
    if loss is not None and loss not in LOSSES:
        raise UsageError(f"there is no loss '{loss}'", try_="--loss " + " or --loss ".join(LOSSES))


def make_optimizer(name: str, target: Target) -> Callable[[list[Any]], torch.optim.Optimizer]:
    """The optimizer's maker; on a GPU with the for-each implementation wherever torch would choose it."""
    kind, settings = OPTIMIZERS[name]
    optimizer: Any = getattr(torch.optim, kind)
    settings = dict(settings)
    if (
        "foreach" in inspect.signature(optimizer).parameters
        and "fused" not in settings
        and kind != "Adafactor"
    ):
        settings["foreach"] = target == "cuda"
    return lambda parameters: optimizer(parameters, **settings)


def record(plan: Plan, *, optimizer: str, dtype: str, target: Target, **settings: Any) -> Recording:
    """The recording of a few training steps of `plan`; `settings` as `estimate_training_step` takes them."""
    made = make_optimizer(optimizer, target)
    if not plan.trained:
        integers = any(w.kind in INTEGERS and len(w.dims) > 1 for w in plan.graph.weights.values())
        raise UsageError(
            "the model has nothing to train",
            why="its weights are integers: it was quantised for inference"
            if integers
            else "none of its floating-point weights is used as one (or they are inputs)",
            try_="the model before it was quantised" if integers else "",
        )

    def build(recorder: FakeRecorder) -> tuple[Callable[[], Tensor], list[Tensor]]:
        step = _Step(plan, recorder, dtype, target)
        return step, list(step.parameters.values())

    try:
        return estimate_training_step(build, made, target=target, **settings)
    except RuntimeError as error:  # torch's own: no derivative, shapes that only training brings together
        raise NotPossibleHere(
            "the model cannot be trained as it is",
            why=str(error).splitlines()[0],
            try_="the model that was exported, as a script",
        ) from error


class _Step:
    """Forward and loss of one step. Parameters, buffers, inputs and targets stay; everything else comes and goes."""

    def __init__(self, plan: Plan, recorder: FakeRecorder, dtype: str, target: Target) -> None:
        cast = torch.bfloat16 if dtype == "bf16" else torch.float32
        self.plan, self.recorder, self.target = plan, recorder, target
        self.run = Run(plan.opset, recorder.fake_mode, main=plan.main, cast=cast, least=plan.least)
        self.run.entering = self._entering
        self.run.make = lambda shape, kind: recorder.fake(shape, kind, category="")
        self.autocast = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(dtype)
        self.parameters: dict[str, Tensor] = {}
        self.given: Env = {}
        for name, weight in plan.graph.weights.items():
            if name in plan.trained:
                self.parameters[name] = recorder.parameter(weight.dims, self._kind(weight.kind))
                recorder.mark(self.parameters[name], "parameter", name)
            elif name not in plan.known:
                self.given[name] = recorder.fake(weight.dims, self._kind(weight.kind), category="buffer")
                recorder.mark(self.given[name], "buffer", name)
        for port in plan.graph.inputs:
            self.given[port.name] = recorder.fake(_whole(port.dims), self._kind(port.kind))
        self.labels: Tensor | None = None

    def _kind(self, kind: int) -> torch.dtype:
        return self.run.dtype(kind) if kind in DTYPES and kind in FLOATS else DTYPES.get(kind, torch.uint8)

    def _entering(self, scope: str) -> None:
        watch = self.recorder.watch
        if watch is not None:
            watch.paths[:] = [scope] if scope else []

    def _casting(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(
            "cpu", dtype=self.autocast
        )  # the recorder gives the cpu's key the target's op lists

    def __call__(self) -> Tensor:
        with self.recorder.claiming(self.target), self._casting():
            outputs = self.run.graph(
                self.plan.graph, {}, {**self.given, **self.parameters}, done=self.plan.known
            )
            self._entering("")
            loss = take_loss(self.plan.loss, outputs, self._labels(outputs))
        if not loss.requires_grad:
            raise UsageError(
                "the model's floating-point output does not depend on any trained weight",
                try_="" if self.plan.loss == "mean" else "--loss mean",
            )
        return loss

    def _labels(self, outputs: list[Any]) -> Tensor | None:
        if self.plan.loss == "cross-entropy" and self.labels is None:
            logits = next(o for o in outputs if isinstance(o, Tensor) and o.is_floating_point())
            self.labels = self.recorder.fake((logits.numel() // logits.shape[-1],), torch.int64)
        return self.labels


def known_values(graph: Graph, env: Env, trained: Mapping[str, Weight]) -> dict[str, Any]:
    """The values of `graph` that are known before any step is run."""
    wanted = (
        {n for node in graph.nodes for n in (*node.inputs, *node.outputs)}
        | set(graph.weights)
        | set(graph.outputs)
    )
    return {n: env[n] for n in wanted if n and n in env and n not in trained and is_known(env[n])}
