"""A U-Net that finds discs in noisy generated images.

python examples/unet.py --steps 60
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def discs(batch, pixels):
    """Images with three discs each, and the masks of the discs."""
    axis = torch.linspace(0, 1, pixels)
    centre = torch.rand(batch, 3, 2, 1, 1)
    radius = 0.05 + 0.15 * torch.rand(batch, 3, 1, 1)
    distance = ((axis[:, None] - centre[:, :, 0]) ** 2 + (axis - centre[:, :, 1]) ** 2).sqrt()
    mask = (distance < radius).any(1, keepdim=True).float()
    colour = torch.randn(batch, 3, 1, 1)
    return mask * colour + 0.5 * torch.randn(batch, 3, pixels, pixels), mask


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1, inplace=True),
        )

    def forward(self, x):
        return self.layers(x)


class UNet(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.stem = DoubleConv(3, width)
        self.down = nn.ModuleList([DoubleConv(w, 2 * w) for w in widths[:-1]])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1])])
        self.join = nn.ModuleList([DoubleConv(2 * w, w) for w in reversed(widths[:-1])])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def dice_loss(logits, mask):
    probs = logits.sigmoid()
    overlap = (probs * mask).sum((1, 2, 3))
    return (1 - (2 * overlap + 1) / (probs.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        images, masks = (part.to(device) for part in discs(args.batch, args.pixels))
        logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits, masks) + dice_loss(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
