"""xMem's training loop for convolutional networks: `python benchmarks/xmem_train.py ResNet50 AdamW 250 --zero 0`.

Recipe: groundtruth/XMEM_RECIPE.md. Images of 86x86, cross entropy, StepLR, everything else at its default.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from models.xmem_cnns import MODELS
from torch import Tensor, nn


def batches(count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a loader of CIFAR-10 gives: ten classes."""
    for _ in range(count):
        yield torch.randn(size, 3, 86, 86), torch.randint(0, 10, (size,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("optimizer")
    parser.add_argument("batch", type=int)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = MODELS[args.model]().to(args.device).train()
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    # the loop's own variables drop the last batch before the next one is moved
    for inputs, labels in batches(args.steps, args.batch):
        if args.zero == 0:
            optimizer.zero_grad()
        inputs, labels = inputs.to(args.device), labels.to(args.device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if args.zero == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predicted = torch.max(outputs, 1)  # noqa: F841  kept alive, as the recipe does
        if args.zero == 2:
            optimizer.zero_grad()
        scheduler.step()


if __name__ == "__main__":
    main()
