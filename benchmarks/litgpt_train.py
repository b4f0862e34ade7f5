"""lit-gpt's fine-tuning and generation of October 2023: `python benchmarks/litgpt_train.py "Llama 2 7 B" lora 1 1304`.

Recipe: groundtruth/README.md. Everything in bf16 (`bf16-true`), AdamW on what is trained; one micro-batch padded to `length`.
"""

from __future__ import annotations

import argparse

import torch
from models.litgpt import SHAPES, LitGPT
from torch import Tensor
from torch.nn import functional as F

TYPICAL = 128
"""lit-gpt takes the longest sample first, so that memory runs out at once or never; the others of Alpaca are about this long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("method", choices=("lora", "adapter", "adapter_v2", "generate"))
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--quantised", choices=("", "nf4", "nf4-dq"), default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        shape = SHAPES[args.model]._replace(quantised=args.quantised)
        model = LitGPT(shape, args.method, args.length)
    torch.set_default_dtype(torch.float32)
    if args.method == "generate":
        generate(model, args.length, args.device)
    else:
        train(model, args.batch, args.length, args.steps, args.device)


def train(model: LitGPT, batch: int, length: int, steps: int, device: str) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    for step in range(steps):
        if step == 1:
            length = min(length, TYPICAL)
        ids = torch.randint(0, 1000, (batch, length)).to(device)
        targets = torch.randint(0, 1000, (batch, length)).to(device)
        logits = fp32(model(ids))
        logits[-1] = logits[-1][..., :-1, :]
        loss = chunked_cross_entropy(logits, targets[..., 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fp32(logits: list[Tensor]) -> list[Tensor]:
    """Fabric converts what a model returns to the default type."""
    return [piece.float() for piece in logits]


def chunked_cross_entropy(logits: list[Tensor], targets: Tensor) -> Tensor:
    pieces = [piece.reshape(-1, piece.shape[-1]) for piece in logits]
    wanted = [piece.reshape(-1) for piece in targets.split(logits[0].shape[1], dim=1)]
    losses = [
        F.cross_entropy(a, b, ignore_index=-1, reduction="none") for a, b in zip(pieces, wanted, strict=True)
    ]
    return torch.cat(losses).mean()


@torch.no_grad()
def generate(model: LitGPT, length: int, device: str, prompt: int = 16) -> None:
    """The prompt through the model, with a cache of keys and values and a mask for `length` positions."""
    shape = model.shape
    sizes = (1, shape.heads, length, shape.width // shape.heads)
    kind = torch.bfloat16
    past = [[torch.zeros(sizes, dtype=kind, device=device) for _ in range(2)] for _ in range(shape.layers)]
    mask = torch.ones((length, length), dtype=torch.bool, device=device).tril()[None, None]
    for count in (prompt, 1):
        ids = torch.randint(0, 1000, (1, count)).to(device)
        fp32(model(ids, past, mask[:, :, :count]))


if __name__ == "__main__":
    main()
