"""MobileNetV3-Large (Howard et al., 2019), 5,483,032 parameters at full shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .mobilenet_v2 import round_to_eight

# kernel, expanded channels, output channels, squeeze-and-excite, hard swish, stride: table 1 of the paper
BLOCKS = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip
Block = tuple[int, int, int, bool, bool, int]


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int, groups: int, act: type[nn.Module] | None
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01),
    ]
    if act is not None:
        layers.append(act(inplace=True))
    return nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    """Channels scaled by a gate of their own means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, round_to_eight(channels / 4), 1)
        self.fc2 = nn.Conv2d(round_to_eight(channels / 4), channels, 1)
        self.relu = nn.ReLU()
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))


class InvertedResidual(nn.Module):
    """1x1 up, depthwise, squeeze-and-excite where the table says so, linear 1x1 down."""

    def __init__(self, inputs: int, block: Block) -> None:
        super().__init__()
        kernel, hidden, outputs, squeeze, swish, stride = block
        act: type[nn.Module] = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = [conv_bn(inputs, hidden, 1, 1, 1, act)] if hidden != inputs else []
        layers.append(conv_bn(hidden, hidden, kernel, stride, hidden, act))
        if squeeze:
            layers.append(SqueezeExcite(hidden))
        layers.append(conv_bn(hidden, outputs, 1, 1, 1, None))
        self.block = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x if self.shortcut else self.block(x)


class MobileNetV3(nn.Module):
    """Stem, inverted residuals, 1x1 head, two linear layers with hard swish and dropout between."""

    def __init__(self, blocks: Sequence[Block], head: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 16, 3, 2, 1, nn.Hardswish)]
        channels = 16
        for block in blocks:
            layers.append(InvertedResidual(channels, block))
            channels = block[2]
        layers.append(conv_bn(channels, 6 * channels, 1, 1, 1, nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, head),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(head, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def build(blocks: Sequence[Block] = BLOCKS, head: int = 1280, classes: int = 1000) -> nn.Module:
    return MobileNetV3(blocks, head, classes)
