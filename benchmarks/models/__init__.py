"""The benchmark models, written here in plain torch, and the sizes at which they are measured.

Three scales each. `tiny`: milliseconds, for tests. `bench`: the real widths and depths with batches (and, where said,
images or sequences) that give a step of 1-6 s on two CPU cores and let activations outweigh parameters and gradients,
so that 45-60 % of the peak is a budget worth planning for. `paper`: the published shape, for a GPU.

Plain SGD, no momentum, two cores; states = parameters + gradients, as a share of the step's peak of tensor bytes:

    bench          batch x size    peak MiB   states   step s
    resnet50        8 x 224 px          806     24 %      1.6
    vgg16          96 x  64 px          877     38 %      5.7
    mobilenet_v2   16 x 224 px         1218      2 %      1.0
    unet            8 x 128 px          846     28 %      4.3
    gpt2            2 x 512 tokens     2584     37 %      7
    vit             8 x 224 px         1594     41 %      6.5
    lstm           64 x  64 tokens      935     16 %      3.0
    encoder        16 x 128 tokens     1025     20 %      2.5

    from benchmarks.models import workload
    task = workload("resnet50")              # scale="bench"
    model = task.build()
    inputs, targets = task.batch()           # task.batch(4) for another batch size
    task.loss(model(inputs), targets).backward()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import encoder, gpt2, lstm, mobilenet_v2, resnet50, unet, vgg16, vit

SCALES = ("tiny", "bench", "paper")

Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    """A model, data for it and what it minimises, at one scale."""

    build: Callable[[], nn.Module]
    make: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch_size: int

    def batch(self, size: int | None = None) -> Batch:
        """Synthetic inputs and targets from the global random generator; `size` overrides the batch size."""
        return self.make(self.batch_size if size is None else size)


def images(size: int, pixels: int, classes: int) -> Batch:
    return torch.randn(size, 3, pixels, pixels), torch.randint(classes, (size,))


def masks(size: int, pixels: int, classes: int) -> Batch:
    return torch.randn(size, 3, pixels, pixels), torch.randint(classes, (size, pixels, pixels))


def sentences(size: int, length: int, vocab: int) -> Batch:
    tokens = torch.randint(vocab, (size, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _image_task(build: Callable[[], nn.Module], size: int, pixels: int, classes: int = 1000) -> Workload:
    return Workload(build, partial(images, pixels=pixels, classes=classes), F.cross_entropy, size)


def _text_task(build: Callable[[], nn.Module], size: int, length: int, vocab: int) -> Workload:
    return Workload(build, partial(sentences, length=length, vocab=vocab), token_loss, size)


def _unet_task(width: int, depth: int, size: int, pixels: int) -> Workload:
    return Workload(
        partial(unet.build, width=width, depth=depth),
        partial(masks, pixels=pixels, classes=2),
        F.cross_entropy,
        size,
    )


WORKLOADS: dict[str, dict[str, Workload]] = {
    "resnet50": {
        "tiny": _image_task(partial(resnet50.build, (1, 1, 1, 1), 8, 10), 4, 32, 10),
        "bench": _image_task(resnet50.build, 8, 224),
        "paper": _image_task(resnet50.build, 256, 224),
    },
    "vgg16": {
        "tiny": _image_task(partial(vgg16.build, (1, 1, 1), 8, 32, 32, 10), 4, 32, 10),
        "bench": _image_task(partial(vgg16.build, image=64), 96, 64),
        "paper": _image_task(vgg16.build, 256, 224),
    },
    "mobilenet_v2": {
        "tiny": _image_task(
            partial(mobilenet_v2.build, ((1, 8, 1, 1), (6, 16, 2, 2), (6, 24, 1, 2)), 1.0, 64, 10), 4, 32, 10
        ),
        "bench": _image_task(mobilenet_v2.build, 16, 224),
        "paper": _image_task(mobilenet_v2.build, 96, 224),
    },
    "unet": {
        "tiny": _unet_task(8, 2, 2, 32),
        "bench": _unet_task(64, 4, 8, 128),
        "paper": _unet_task(64, 4, 1, 576),
    },
    "gpt2": {
        "tiny": _text_task(partial(gpt2.build, 64, 32, 2, 32, 4), 4, 32, 64),
        "bench": _text_task(gpt2.build, 2, 512, 50257),
        "paper": _text_task(gpt2.build, 2, 512, 50257),
    },
    "vit": {
        "tiny": _image_task(partial(vit.build, 32, 8, 2, 32, 4, classes=10), 4, 32, 10),
        "bench": _image_task(vit.build, 8, 224),
        "paper": _image_task(vit.build, 256, 224),
    },
    "lstm": {
        "tiny": _text_task(partial(lstm.build, 64, 32, 2), 4, 16, 64),
        "bench": _text_task(lstm.build, 64, 64, 10000),
        "paper": _text_task(lstm.build, 20, 35, 10000),
    },
    "encoder": {
        "tiny": _text_task(partial(encoder.build, 64, 32, 2, 32, 4, 64), 4, 32, 64),
        "bench": _text_task(encoder.build, 16, 128, 8192),
        "paper": _text_task(encoder.build, 64, 512, 8192),
    },
}

MODELS = tuple(WORKLOADS)

BLOCKS: dict[str, type[nn.Module]] = {
    "resnet50": resnet50.Bottleneck,
    "vgg16": nn.Sequential,
    "mobilenet_v2": mobilenet_v2.InvertedResidual,
    "unet": nn.Sequential,
    "gpt2": gpt2.Block,
    "vit": vit.Block,
    "lstm": nn.LSTM,
    "encoder": nn.TransformerEncoderLayer,
}
"""What somebody who checkpoints by hand would wrap."""


def checkpoint_blocks(name: str, model: nn.Module) -> None:
    """Wrap every block of the model `name` in `torch.utils.checkpoint`, the usual way to save memory by hand."""
    for module in model.modules():
        if isinstance(module, BLOCKS[name]):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


def workload(name: str, scale: str = "bench") -> Workload:
    """The workload `name` at `scale`; raises `KeyError` for a name or scale that is not there."""
    return WORKLOADS[name][scale]
