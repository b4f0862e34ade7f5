"""Train one of the benchmark models on synthetic data: the unmodified script that `memopt profile` is run on.

python benchmarks/train.py resnet50 --steps 5
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from models import MODELS, SCALES, checkpoint_blocks, workload


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, help="batch size (default: that of the scale)")
    parser.add_argument("--scale", choices=SCALES, default="bench")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--checkpoint", action="store_true", help="torch.utils.checkpoint on every block")
    parser.add_argument("--peer", help="one of PyTorch's own planners instead, as in peers.py")
    parser.add_argument("--device", default=None, help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device or accelerator or "cpu")
    task = workload(args.model, args.scale)
    model = task.build().to(device)
    if args.checkpoint:
        checkpoint_blocks(args.model, model)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return task.loss(model(inputs), targets)

    if args.peer:
        from peers import saved_by

        loss_of = saved_by(args.peer, model, loss_of)
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        inputs, targets = (part.to(device) for part in task.batch(args.batch))
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        # float.hex in the output tells two runs apart to the last bit
        print(
            f"step {step} loss {loss.item():.6f} {loss.item().hex()} {time.perf_counter() - begin:.3f} s",
            flush=True,
        )
    print(f"parameters and buffers {digest_of(model)}")


def digest_of(model: torch.nn.Module) -> str:
    """Of every bit of its parameters and buffers, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*model.parameters(), *model.buffers()):
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
