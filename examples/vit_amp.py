"""A small vision transformer under bfloat16 autocast, with gradient accumulation and a warm-up schedule.

python examples/vit_amp.py --steps 60
"""

import argparse

import torch
import torch.nn as nn


class ViT(nn.Module):
    def __init__(self, pixels=64, patch=8, width=128, layers=4, heads=4, classes=4):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (pixels // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.encoder(x)[:, 0])


def quadrants(batch, pixels):
    """Noise with one brighter quadrant; which one is the class."""
    labels = torch.randint(4, (batch,))
    images = torch.randn(batch, 3, pixels, pixels)
    half = pixels // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.7
    return images, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="of one micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--no-amp", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = ViT(args.pixels).to(device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    loss_fn = nn.CrossEntropyLoss()

    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            images, labels = (part.to(device) for part in quadrants(args.batch, args.pixels))
            with torch.autocast(device, dtype=torch.bfloat16, enabled=not args.no_amp):
                loss = loss_fn(model(images), labels) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {total:.6f}", flush=True)


if __name__ == "__main__":
    main()
