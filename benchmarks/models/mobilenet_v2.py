"""MobileNetV2 (Sandler et al., 2018), 3,504,872 parameters at full shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

# expansion, channels, blocks, first stride: table 2 of the paper
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, *, act: bool = True
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    if act:
        layers.append(nn.ReLU6(inplace=True))
    return nn.Sequential(*layers)


class InvertedResidual(nn.Module):
    """1x1 up, depthwise 3x3, linear 1x1 down; a shortcut where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(conv_bn(inputs, hidden, 1))
        layers += [conv_bn(hidden, hidden, 3, stride, groups=hidden), conv_bn(hidden, outputs, 1, act=False)]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """Stem, stages of inverted residuals, 1x1 head, dropout and linear."""

    def __init__(
        self, stages: Sequence[tuple[int, int, int, int]], width: float, head: int, classes: int
    ) -> None:
        super().__init__()
        channels = round_to_eight(32 * width)
        layers: list[nn.Module] = [conv_bn(3, channels, 3, stride=2)]
        for expansion, outputs, blocks, stride in stages:
            outputs = round_to_eight(outputs * width)
            for i in range(blocks):
                layers.append(InvertedResidual(channels, outputs, stride if i == 0 else 1, expansion))
                channels = outputs
        layers.append(conv_bn(channels, head, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(head, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def round_to_eight(channels: float) -> int:
    return max(8, int(channels + 4) // 8 * 8)


def build(
    stages: Sequence[tuple[int, int, int, int]] = STAGES,
    width: float = 1.0,
    head: int = 1280,
    classes: int = 1000,
) -> nn.Module:
    return MobileNetV2(stages, width, head, classes)
