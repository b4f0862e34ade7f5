"""Train one configuration: `python -m benchmarks.gpu.train resnet50 64 fp32 sgd`. What is recorded, and what is estimated."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.configurations import OPTIMIZERS, PRECISIONS, STEPS, task

_AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    work = task(args.model, tiny=args.tiny)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = work.build().to(args.device, dtype).train()
    if args.checkpoint:
        for module in model.modules():
            if isinstance(module, work.blocks):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "amp-fp16")
    amp = _AUTOCAST.get(args.precision)

    def placed(part: Tensor) -> Tensor:
        return part.to(args.device, dtype) if part.is_floating_point() else part.to(args.device)

    for step in range(args.steps):
        batch = tuple(placed(part) for part in work.batch(args.batch))
        with torch.autocast(args.device, amp, enabled=amp is not None):
            loss = work.loss(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item(), flush=True)


if __name__ == "__main__":
    main()
