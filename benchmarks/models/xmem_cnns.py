"""The convolutional networks of xMem's runs, written anew in plain torch with the published shapes.

VGG, ResNet, MobileNetV2 and V3, MNASNet, ConvNeXt, RegNet X/Y 400MF; `PARAMETERS` holds their published parameter counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Block = Callable[..., nn.Module]


def conv(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: nn.Module | None = None,
    eps: float = 1e-5,
) -> nn.Sequential:
    """Convolution without bias, batch norm, activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=eps),
    ]
    return nn.Sequential(*layers, *([act] if act is not None else []))


def vgg(config: str, classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for part in config.split():
        if part == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, int(part), 3, padding=1), nn.ReLU(True)]
            channels = int(part)
    head = [
        nn.Linear(512 * 49, 4096),
        nn.ReLU(True),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        nn.ReLU(True),
        nn.Dropout(0.5),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, classes))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = conv(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.down is not None:
            identity = self.down(x)
        out += identity
        return self.relu(out)


def resnet(depths: tuple[int, ...], classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [conv(3, 64, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(Bottleneck(inputs, 64 << stage, 2 if stage and not block else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Inverted(nn.Module):
    """MobileNetV2's and MNASNet's block."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        expand: int,
        act: Callable[[], nn.Module],
        linear: bool = False,
    ) -> None:
        super().__init__()
        width = inputs * expand
        layers: list[nn.Module] = [conv(inputs, width, 1, act=act())] if expand != 1 else []
        layers += [conv(width, width, kernel, stride, width, act()), conv(width, outputs, 1)]
        self.layers, self.skip = nn.Sequential(*layers), stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.skip else self.layers(x)


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    act = partial(nn.ReLU6, inplace=True)
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=act())]
    inputs = 32
    for expand, outputs, depth, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(depth):
            layers.append(Inverted(inputs, outputs, 3, stride if not block else 1, expand, act))
            inputs = outputs
    return nn.Sequential(
        *layers,
        conv(320, 1280, 1, act=act()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(1280, classes),
    )


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean([2, 3])


def mnasnet(classes: int = 10) -> nn.Module:
    act = partial(nn.ReLU, inplace=True)
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=act()), conv(32, 32, 3, 1, 32, act()), conv(32, 16, 1)]
    inputs = 16
    for outputs, kernel, stride, expand, depth in (
        (24, 3, 2, 3, 3),
        (40, 5, 2, 3, 3),
        (80, 5, 2, 6, 3),
        (96, 3, 1, 6, 2),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    ):
        for block in range(depth):
            layers.append(Inverted(inputs, outputs, kernel, stride if not block else 1, expand, act))
            inputs = outputs
    return nn.Sequential(
        *layers,
        conv(320, 1280, 1, act=act()),
        Mean(),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(1280, classes),
    )


def divisible(value: float, by: int = 8) -> int:
    rounded = max(by, int(value + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * value else rounded


class Squeeze(nn.Module):
    def __init__(self, width: int, narrow: int, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.gate = nn.Conv2d(width, narrow, 1), nn.Conv2d(narrow, width, 1), gate
        self.pool, self.relu = nn.AdaptiveAvgPool2d(1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.fc2(self.relu(self.fc1(self.pool(x))))) * x


class MobileV3Block(nn.Module):
    def __init__(
        self, inputs: int, kernel: int, width: int, outputs: int, squeeze: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        act: Callable[..., nn.Module] = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = (
            [conv(inputs, width, 1, act=act(inplace=True), eps=1e-3)] if width != inputs else []
        )
        layers.append(conv(width, width, kernel, stride, width, act(inplace=True), eps=1e-3))
        if squeeze:
            layers.append(Squeeze(width, divisible(width / 4), F.hardsigmoid))
        self.layers = nn.Sequential(*layers, conv(width, outputs, 1, eps=1e-3))
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        if self.skip:
            out += x
        return out


LARGE = """16 3 16 16 0 0 1|16 3 64 24 0 0 2|24 3 72 24 0 0 1|24 5 72 40 1 0 2|40 5 120 40 1 0 1|40 5 120 40 1 0 1|40 3 240 80 0 1 2
80 3 200 80 0 1 1|80 3 184 80 0 1 1|80 3 184 80 0 1 1|80 3 480 112 1 1 1|112 3 672 112 1 1 1|112 5 672 160 1 1 2
160 5 960 160 1 1 1|160 5 960 160 1 1 1"""
SMALL = """16 3 16 16 1 0 2|16 3 72 24 0 0 2|24 3 88 24 0 0 1|24 5 96 40 1 1 2|40 5 240 40 1 1 1|40 5 240 40 1 1 1|40 5 120 48 1 1 1
48 5 144 48 1 1 1|48 5 288 96 1 1 2|96 5 576 96 1 1 1|96 5 576 96 1 1 1"""


def mobilenet_v3(config: str, last: int, classes: int = 10) -> nn.Module:
    rows = [tuple(map(int, row.split())) for row in config.replace("\n", "|").split("|")]
    layers: list[nn.Module] = [conv(3, 16, 3, 2, act=nn.Hardswish(inplace=True), eps=1e-3)]
    layers += [MobileV3Block(i, k, w, o, bool(se), bool(hs), s) for i, k, w, o, se, hs, s in rows]
    width = rows[-1][3]
    layers += [
        conv(width, 6 * width, 1, act=nn.Hardswish(inplace=True), eps=1e-3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(
        *layers,
        nn.Linear(6 * width, last),
        nn.Hardswish(inplace=True),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(last, classes),
    )


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class StochasticDepth(nn.Module):
    """Row mode: one Bernoulli draw a sample."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        noise = torch.empty([x.shape[0]] + [1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(1 - self.p)
        if self.p < 1:
            noise.div_(1 - self.p)
        return x * noise


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width), Permute(0, 2, 3, 1), nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), Permute(0, 3, 1, 2),
        )  # fmt: skip
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * 1e-6)
        self.drop = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer_scale * self.block(x)
        result = self.drop(result)
        result += x
        return result


def convnext(depths: tuple[int, ...], widths: tuple[int, ...], drop: float, classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6)]
    done, total = 0, sum(depths)
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage:
            layers += [LayerNorm2d(widths[stage - 1], eps=1e-6), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        for _ in range(depth):
            layers.append(ConvNeXtBlock(width, drop * done / (total - 1)))
            done += 1
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        LayerNorm2d(widths[-1], eps=1e-6),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


class RegNetBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, group: int, squeeze: bool) -> None:
        super().__init__()
        self.proj = conv(inputs, width, 1, stride) if inputs != width or stride != 1 else None
        layers: list[nn.Module] = [
            conv(inputs, width, 1, act=nn.ReLU(True)),
            conv(width, width, 3, stride, width // group, nn.ReLU(True)),
        ]
        if squeeze:
            layers.append(Squeeze(width, round(inputs / 4), torch.sigmoid))
        self.layers, self.act = nn.Sequential(*layers, conv(width, width, 1)), nn.ReLU(True)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.proj(x) if self.proj is not None else x) + self.layers(x)
        return self.act(x)


def regnet(
    depths: tuple[int, ...], widths: tuple[int, ...], group: int, squeeze: bool, classes: int = 1000
) -> nn.Module:
    layers: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.ReLU(True))]
    inputs = 32
    for depth, width in zip(depths, widths, strict=True):
        for block in range(depth):
            layers.append(RegNetBlock(inputs, width, 2 if not block else 1, group, squeeze))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


_11 = "64 M 128 M 256 256 M 512 512 M 512 512 M"
_16 = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"
_19 = "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M"

MODELS: dict[str, Callable[[], nn.Module]] = {
    "VGG11": partial(vgg, _11),
    "VGG16": partial(vgg, _16),
    "VGG19": partial(vgg, _19),
    "ResNet50": partial(resnet, (3, 4, 6, 3)),
    "ResNet101": partial(resnet, (3, 4, 23, 3)),
    "ResNet152": partial(resnet, (3, 8, 36, 3)),
    "MobileNetV2": mobilenet_v2,
    "MnasNet": mnasnet,
    "MobeNetV3Small": partial(mobilenet_v3, SMALL, 1024),
    "MobeNetV3Large": partial(mobilenet_v3, LARGE, 1280),
    "ConvNeXtTiny": partial(convnext, (3, 3, 9, 3), (96, 192, 384, 768), 0.1),
    "ConvNeXtBase": partial(convnext, (3, 3, 27, 3), (128, 256, 512, 1024), 0.5),
    "RegNetX400MF": partial(regnet, (1, 2, 7, 12), (32, 64, 160, 400), 16, False),
    "RegNetY400MF": partial(regnet, (1, 3, 6, 6), (48, 104, 208, 440), 8, True),
}

PARAMETERS = {
    "VGG11": 132_863_336, "VGG16": 138_357_544, "VGG19": 143_667_240, "ResNet50": 25_557_032, "ResNet101": 44_549_160,
    "ResNet152": 60_192_808, "MobileNetV2": 3_504_872, "MnasNet": 3_115_122, "MobeNetV3Small": 1_528_106,
    "MobeNetV3Large": 4_214_842, "ConvNeXtTiny": 28_589_128, "ConvNeXtBase": 88_591_464, "RegNetX400MF": 5_495_976,
    "RegNetY400MF": 4_344_144,
}  # fmt: skip
"""With 1000 classes, and 10 for MNASNet and MobileNetV3."""
