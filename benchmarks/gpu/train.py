"""Train one configuration: `python -m benchmarks.gpu.train resnet50 64 fp32 sgd`. What is recorded, and what is estimated."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu import look
from benchmarks.gpu.configurations import OPTIMIZERS, PRECISIONS, STEPS, task
from benchmarks.run_scripts import digest, repeatable

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
    parser.add_argument(
        "--peer", choices=("checkpoint", "save_on_cpu"), help="what people do by hand instead"
    )
    parser.add_argument("--tell", action="store_true", help="end with a line of JSON: losses, times, peaks")
    parser.add_argument("--digest", action="store_true", help="repeatable kernels; end with a digest of all weights and states")  # fmt: skip
    parser.add_argument("--look", choices=look.LOOKS, help="where the time of a few steps goes: a line of JSON as well")  # fmt: skip
    args = parser.parse_args(argv)
    if args.digest:
        repeatable()
    torch.manual_seed(0)
    work = task(args.model, tiny=args.tiny)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = work.build().to(args.device, dtype).train()
    if args.checkpoint or args.peer == "checkpoint":
        for module in model.modules():
            if isinstance(module, work.blocks):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "amp-fp16")
    amp = _AUTOCAST.get(args.precision)

    def placed(part: Tensor) -> Tensor:
        return part.to(args.device, dtype) if part.is_floating_point() else part.to(args.device)

    losses, times = [], []
    looker = look.LOOKS[args.look]() if args.look else None
    for step in range(args.steps):
        if looker is not None and step == look.STEPS.start:
            looker.begin()
        batch = tuple(placed(part) for part in work.batch(args.batch))
        begin = time.perf_counter()
        offload = save_on_cpu(pin_memory=True) if args.peer == "save_on_cpu" else contextlib.nullcontext()
        with offload, torch.autocast(args.device, amp, enabled=amp is not None):
            loss = work.loss(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item(), flush=True)
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append(loss.item().hex())
        if looker is not None and step == look.STEPS.stop - 1:
            print(json.dumps(looker.end()), flush=True)
    if args.digest:
        print(digest([model], [optimizer]), flush=True)
    if args.tell:
        print(json.dumps({"losses": losses, "step_ms": times} | _peaks(args.device)), flush=True)


def _peaks(device: str) -> dict[str, int]:
    if device == "cpu":
        return {"allocated": 1, "reserved": 1}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    main()
