"""`memopt estimate model.onnx` against the estimate of the same model as a script, at three opsets.

    python -m benchmarks.estimate_onnx                 # ResNet-50, MobileNetV3, ViT, GPT-2, LSTM; a table
    python -m benchmarks.estimate_onnx --scale small --models gpt2 --opsets 23

Each model is exported with `torch.onnx.export(dynamo=True)` in train mode, batch norm kept (`optimize=False`) and once
folded (`optimize=True`), and estimated with the loss and optimizer of the script. Figures are bytes allocated at the peak.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import onnx
import torch

from benchmarks.models import (
    WORKLOADS,
    Workload,
    gpt2,
    images,
    lstm,
    mobilenet_v3,
    resnet50,
    sentences,
    token_loss,
    vit,
)  # fmt: skip
from memopt.estimators.fake.recorder import FakeRecorder, Target
from memopt.estimators.fake.training import estimate_training_step
from memopt.estimators.onnx.estimate import record_onnx
from memopt.estimators.onnx.training import make_optimizer
from memopt.units import format_bytes

OPSETS = (18, 20, 23)
GOAL = 0.02
_CROSS_ENTROPY = torch.nn.functional.cross_entropy
_FEW_BLOCKS = mobilenet_v3.BLOCKS[:2] + mobilenet_v3.BLOCKS[3:4] + mobilenet_v3.BLOCKS[6:7]

MOBILENET_V3 = {
    "small": Workload(
        partial(mobilenet_v3.build, _FEW_BLOCKS, 128, 10),
        partial(images, pixels=64, classes=10),
        _CROSS_ENTROPY,
        8,
    ),
    "bench": Workload(mobilenet_v3.build, partial(images, pixels=224, classes=1000), _CROSS_ENTROPY, 16),
}
SMALL = {
    "resnet50": Workload(
        partial(resnet50.build, (1, 1, 1, 1), 16, 10),
        partial(images, pixels=64, classes=10),
        _CROSS_ENTROPY,
        8,
    ),
    "vit": Workload(
        partial(vit.build, 64, 8, 2, 128, 4, classes=10),
        partial(images, pixels=64, classes=10),
        _CROSS_ENTROPY,
        8,
    ),
    "gpt2": Workload(
        partial(gpt2.build, 512, 64, 2, 128, 4), partial(sentences, length=64, vocab=512), token_loss, 8
    ),
    "lstm": Workload(
        partial(lstm.build, 512, 96, 2), partial(sentences, length=24, vocab=512), token_loss, 16
    ),
    "mobilenet_v3": MOBILENET_V3["small"],
}
"""Small enough for a test, large enough that no tensor of weight is kept real by the recorder."""

MODELS = ("resnet50", "mobilenet_v3", "vit", "gpt2", "lstm")


class Row(NamedTuple):
    """One exported file beside its script."""

    model: str
    opset: int
    folded: bool
    target: str
    script_bytes: int
    onnx_bytes: int
    seconds: float
    notes: list[str]

    @property
    def error(self) -> float:
        return self.onnx_bytes / self.script_bytes - 1


def task_of(model: str, scale: str) -> Workload:
    if scale == "small":
        return SMALL[model]
    return MOBILENET_V3[scale] if model == "mobilenet_v3" else WORKLOADS[model][scale]


def export(task: Workload, path: Path, opset: int, *, folded: bool) -> None:
    """Write the model of `task`, in train mode with a dynamic batch, to `path`."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = task.batch(2)[0]
        dynamic = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(
            task.build().train(), (inputs,), dynamo=True, opset_version=opset, optimize=folded,
            dynamic_shapes=dynamic, verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(str(path))
    logging.disable(logging.NOTSET)


def hollow(path: Path) -> bytes:
    """The exported file without the values of its weights (they point outside, to nothing), gzipped: a few kilobytes."""
    proto = onnx.load(path)
    for weight in proto.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT and weight.dims:
            name, dims = weight.name, list(weight.dims)
            weight.Clear()
            weight.name, weight.data_type = name, onnx.TensorProto.FLOAT
            weight.dims.extend(dims)
            weight.data_location = onnx.TensorProto.EXTERNAL
            weight.external_data.add(key="location", value="left-out")
    for node in proto.graph.node:
        kept = [(m.key, m.value) for m in node.metadata_props if m.key in _TOLD]
        del node.metadata_props[:]
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
    del proto.graph.value_info[:]
    return gzip.compress(proto.SerializeToString(), 9, mtime=0)


_TOLD = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")


def save_hollow(folder: Path) -> None:
    """Write the small models, at every opset, batch norm kept, and ResNet folded: what the tests read."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(m, o, False) for m in MODELS for o in OPSETS] + [("resnet50", 18, True)]
    with tempfile.TemporaryDirectory() as scratch:
        for model, opset, folded in wanted:
            path = Path(scratch) / "model.onnx"
            export(SMALL[model], path, opset, folded=folded)
            (folder / f"{model}_{opset}{'_folded' if folded else ''}.onnx.gz").write_bytes(hollow(path))


def script_peak_bytes(task: Workload, optimizer: str, target: Target, steps: int = 3) -> int:
    """Peak of the same model traced directly: the same loss, the same optimizer, no file between."""

    def build(recorder: FakeRecorder) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        with recorder.claiming(target):
            model = task.build().train()
            inputs, targets = task.batch()
        recorder.mark(inputs, "input")

        def step() -> torch.Tensor:
            with recorder.claiming(target):
                return task.loss(model(inputs), targets)

        return step, list(model.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimate_training_step(
            build, make_optimizer(optimizer, target), target=target, steps=steps
        ).peak(512)[0]


def rows(
    models: tuple[str, ...], opsets: tuple[int, ...], scale: str, optimizer: str, targets: tuple[Target, ...]
) -> Iterator[Row]:
    for model in models:
        task = task_of(model, scale)
        scripts = {target: script_peak_bytes(task, optimizer, target) for target in targets}
        for opset in opsets:
            for folded in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "model.onnx"
                    export(task, path, opset, folded=folded)
                    for target in targets:
                        start = time.perf_counter()
                        found = record_onnx(
                            path, batch_size=task.batch_size, optimizer=optimizer, target=target
                        )
                        seconds = time.perf_counter() - start
                        peak = found.recording.peak(512)[0]
                        yield Row(model, opset, folded, target, scripts[target], peak, seconds, found.notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", default="bench", choices=("small", "bench", "paper"))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--opsets", nargs="+", type=int, default=OPSETS)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--targets", nargs="+", default=("cuda", "cpu"))
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="export the small models, without their weights, and stop"
    )
    asked = parser.parse_args()
    if asked.save:
        save_hollow(asked.save)
        return
    print(f"{'model':14}{'opset':>6}{'folded':>8}{'on':>6}{'script':>12}{'onnx':>12}{'error':>9}{'time':>8}")
    worst = 0.0
    for row in rows(
        tuple(asked.models), tuple(asked.opsets), asked.scale, asked.optimizer, tuple(asked.targets)
    ):
        worst = worst if row.folded else max(worst, abs(row.error))
        print(
            f"{row.model:14}{row.opset:6}{row.folded!s:>8}{row.target:>6}{format_bytes(row.script_bytes):>12}"
            f"{format_bytes(row.onnx_bytes):>12}{row.error:+9.2%}{row.seconds:7.1f}s", flush=True
        )  # fmt: skip
        if row.folded and row.opset == asked.opsets[0] and row.target == asked.targets[0]:
            print("".join(f"    {note}\n" for note in row.notes), end="")
    print(f"worst error with batch norm kept: {worst:.2%} (goal {GOAL:.0%})")


if __name__ == "__main__":
    main()
