"""Train the CS336 "medium" model as the snapshots in the ground truth did: `python benchmarks/cs336.py --context 128`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from models.cs336 import AdamW, Transformer, cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = Transformer(10000, args.context, 1024, 24, 16, 4096).to("cuda")
    optimizer = AdamW(model.parameters())
    tokens = torch.randint(0, 10000, (4, args.context), device="cuda")
    targets = torch.randint(0, 10000, (4, args.context), device="cuda")
    context = torch.autocast("cuda", dtype=torch.bfloat16) if args.bf16 else nullcontext()
    for _ in range(args.steps):
        optimizer.zero_grad()
        with context:
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
    print(loss.item(), torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
