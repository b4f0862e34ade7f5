"""U-Net (Ronneberger et al., 2015) with padded convolutions and batch norm, 31,043,586 parameters for two classes on RGB."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """`depth` halvings down, as many doublings up, each joined with its mirror on the way down."""

    def __init__(self, channels: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.stem = double_conv(channels, width)
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        rising = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in rising)
        self.join = nn.ModuleList(double_conv(2 * b, b) for _, b in rising)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        mirrors = []
        for down in self.down:
            mirrors.append(x)
            x = down(self.pool(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([mirrors.pop(), up(x)], dim=1))
        return self.head(x)


def build(channels: int = 3, width: int = 64, depth: int = 4, classes: int = 2) -> nn.Module:
    return UNet(channels, width, depth, classes)
