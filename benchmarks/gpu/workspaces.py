"""What convolutions take as workspace, by shape, batch and `cudnn.benchmark`; what the driver counts at each stage of a run."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

LAYERS = {
    "vgg conv1_2": (64, 64, 3, 1, 224, 1),
    "vgg conv3_1": (128, 256, 3, 1, 56, 1),
    "vgg conv5_1": (512, 512, 3, 1, 14, 1),
    "resnet stem": (3, 64, 7, 2, 224, 1),
    "resnet 3x3": (128, 128, 3, 1, 28, 1),
    "resnet 1x1": (256, 64, 1, 1, 56, 1),
    "resnet 3x3 stride": (256, 256, 3, 2, 28, 1),
    "convnext depthwise": (96, 96, 7, 1, 56, 96),
    "mobilenet depthwise": (144, 144, 3, 1, 56, 144),
}
"""Input and output channels, filter, stride, pixels, groups."""
BATCHES = (16, 64, 130, 256)
Found = dict[str, Any]


def _device() -> str:
    return "cpu" if os.environ.get("MEMOPT_CAMPAIGN_DRY") else "cuda"


def convolutions() -> Found:
    """Bytes above operands and results at the peak of one forward and of one backward, by dtype and `cudnn.benchmark`."""
    found: Found = {}
    dry = _device() == "cpu"
    for name, shape in LAYERS.items():
        for batch in BATCHES[:1] if dry else BATCHES:
            for dtype in (torch.float32, torch.bfloat16)[: 1 if dry else 2]:
                for tuned in (False, True):
                    torch.backends.cudnn.benchmark = tuned
                    words = f"{name}, batch {batch}, {str(dtype)[6:]}{', benchmark' if tuned else ''}"
                    try:
                        found[words] = _one(shape, batch, dtype)
                    except RuntimeError as error:
                        found[words] = str(error)[:100]
    torch.backends.cudnn.benchmark = False
    return found


def _one(shape: tuple[int, ...], batch: int, dtype: torch.dtype) -> list[int]:
    inputs, outputs, size, stride, pixels, groups = shape
    device = _device()
    if device == "cpu":
        pixels, batch = 8, 1
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False).to(device, dtype)
    x = torch.randn(batch, inputs, pixels, pixels, device=device, dtype=dtype, requires_grad=True)
    layer(x).sum().backward()  # plans are made, handles and gradients are there
    y, forward_bytes = _above(lambda: layer(x))
    layer.zero_grad(set_to_none=False)
    _, backward_bytes = _above(
        lambda: torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y), retain_graph=True)
    )
    return [forward_bytes, backward_bytes]


def _above(work: Any) -> tuple[Any, int]:
    """What `work` gives, and the most that the allocator held meanwhile above what it held in the end."""
    if _device() == "cpu":
        return work(), 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def stages() -> Found:
    """Reserved bytes and the driver's count after the context, after the model, after one step and after three."""
    from benchmarks.gpu.measure import device_used_bytes

    if _device() == "cpu":
        return {"left out": "no driver counts without a GPU"}
    found: Found = {}

    def note(stage: str) -> None:
        torch.cuda.synchronize()
        found[stage] = [torch.cuda.memory_reserved(), device_used_bytes()]

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    note("context")
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 30 * 30, 100)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    note("model")
    for step in range(3):
        model(torch.randn(64, 3, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {step}")
    return found
