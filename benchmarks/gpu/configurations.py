"""The configurations that are recorded: convolutional nets, a vision transformer and language models, by precision,
optimizer and checkpointing. Imported where memopt is not installed: torch only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import BLOCKS, WORKLOADS, images, lm_gpt2, lm_llama, lm_neox, lm_opt, lm_t5
from benchmarks.models.language_models import MODELS as LANGUAGE_MODELS
from benchmarks.models.xmem_cnns import ConvNeXtBlock, convnext

PRECISIONS = ("fp32", "bf16", "amp-bf16", "amp-fp16")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}
STEPS = 3
TOKENS = 512

_LANGUAGE_BLOCKS = (lm_gpt2.Block, lm_opt.Block, lm_neox.Block, lm_llama.Block, lm_t5.FeedForward)
_TINY = {"vocab": 64, "width": 32, "inner": 64, "layers": 2, "heads": 2, "kv": 1, "dims": 16, "positions": 64}

_TABLE = """
resnet50        64 fp32     sgd
resnet50       256 amp-fp16 sgd
resnet50       256 bf16     adamw-fused checkpoint
vgg16           64 fp32     adamw
vgg16           64 fp32     sgd         checkpoint
vgg16          128 amp-bf16 sgd
mobilenet_v2    96 fp32     adamw-fused
mobilenet_v2   256 amp-fp16 adamw
mobilenet_v2   256 bf16     sgd         checkpoint
unet             8 fp32     adamw
unet            16 amp-bf16 adamw-fused
unet            16 bf16     sgd
convnext_tiny   64 fp32     adamw
convnext_tiny  128 amp-bf16 adamw-fused checkpoint
convnext_tiny  128 bf16     sgd
vit             64 fp32     adamw
vit            128 amp-fp16 sgd         checkpoint
vit            128 bf16     adamw-fused
gpt2             8 fp32     adamw
gpt2            16 amp-bf16 adamw-fused
gpt2            32 bf16     sgd         checkpoint
opt-350m         4 fp32     sgd
opt-350m         8 amp-fp16 adamw
opt-350m        16 bf16     adamw-fused checkpoint
pythia-410m      4 fp32     adamw-fused
pythia-410m      8 amp-bf16 adamw       checkpoint
pythia-410m      8 bf16     sgd
qwen2.5-0.5b     4 fp32     adamw       checkpoint
qwen2.5-0.5b     4 amp-bf16 adamw-fused
qwen2.5-0.5b     8 bf16     adamw
llama-3.2-1b     4 fp32     sgd
llama-3.2-1b     4 bf16     adamw
llama-3.2-1b     8 amp-bf16 adamw-fused checkpoint
t5-base          8 fp32     adamw
t5-base         16 amp-bf16 adamw       checkpoint
t5-base         16 bf16     adamw-fused
"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One training run; `name` is how files and tables call it."""

    model: str
    batch: int
    precision: str
    optimizer: str
    checkpoint: bool

    @property
    def name(self) -> str:
        return " ".join(self.words) + (" checkpoint" if self.checkpoint else "")

    @property
    def words(self) -> list[str]:
        return [self.model, str(self.batch), self.precision, self.optimizer]

    @property
    def argv(self) -> list[str]:
        """The arguments of `train.py`."""
        return [*self.words, *(["--checkpoint"] if self.checkpoint else [])]


def _row(line: str) -> Configuration:
    model, batch, precision, optimizer, *checkpoint = line.split()
    return Configuration(model, int(batch), precision, optimizer, bool(checkpoint))


CONFIGURATIONS = {each.name: each for each in map(_row, _TABLE.strip().splitlines())}


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its data and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    blocks: tuple[type[nn.Module], ...]
    """What somebody who checkpoints by hand would wrap."""


def task(model: str, *, tiny: bool = False) -> Task:
    """The task of a model in the table, or one of the same making that a CPU trains in milliseconds."""
    if model in LANGUAGE_MODELS:
        return _language(model, tiny)
    if model == "convnext_tiny":
        sizes: tuple[Any, ...] = (
            ((1, 1, 1, 1), (8, 16, 16, 16)) if tiny else ((3, 3, 9, 3), (96, 192, 384, 768))
        )
        make = partial(images, pixels=32 if tiny else 224, classes=1000)
        return Task(partial(convnext, *sizes, 0.1), make, _classified, (ConvNeXtBlock,))
    work = WORKLOADS[model]["tiny" if tiny else "paper"]
    return Task(work.build, work.make, _classified, (BLOCKS[model],))


def _classified(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _language(model: str, tiny: bool) -> Task:
    make = LANGUAGE_MODELS[model]
    if tiny:
        make = partial(
            make, **{name: size for name, size in _TINY.items() if name in signature(make).parameters}
        )
    sentence = partial(_sentences, length=16 if tiny else TOKENS, vocab=64 if tiny else 1000)
    return Task(make, sentence, lambda model, batch: model(*batch).loss, _LANGUAGE_BLOCKS)


def _sentences(rows: int, length: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, a mask without padding, and the labels."""
    ids = torch.randint(0, vocab, (rows, length))
    return ids, torch.ones_like(ids), ids.clone()
