"""xMem's training loop for language models: `python benchmarks/xmem_lm_train.py gpt2 AdamW 27 --zero 0`.

Recipe: groundtruth/XMEM_RECIPE.md. Rows of at most 128 tokens of WikiText, padded to the longest of the batch, which from a few
rows on is 128; fp32; the model goes to the device after the optimizer was made. Adafactor is torch's: the two temporaries of
the embedding's size that transformers' makes would alone exceed what was measured on the A100.
"""

from __future__ import annotations

import argparse

import torch
from models.language_models import MODELS
from torch import Tensor

LENGTH = 128


def texts(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, which of them are no padding, and labels. The first row fills the length."""
    lengths = torch.linspace(length, 1, rows).long()
    kept = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(0, 1000, (rows, length)) * kept
    return ids, kept, ids.masked_fill(kept == 0, -100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("optimizer")
    parser.add_argument("batch", type=int)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    model = MODELS[args.model]().train()
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.001)
    model.to(args.device)
    for _ in range(args.steps):
        if args.zero == 0:
            optimizer.zero_grad()
        ids, kept, labels = (part.to(args.device) for part in texts(args.batch, args.length))
        outputs = model(ids, kept, labels)
        if args.zero == 1:
            optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        if args.zero == 2:
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
