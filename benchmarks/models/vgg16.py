"""VGG-16 (Simonyan and Zisserman, 2014, configuration D), 138,357,544 parameters at full shape.

The classifier is sized by the grid that the image leaves behind (7x7 at 224 pixels), as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

DEPTHS = (2, 2, 3, 3, 3)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions and a max-pool, then three linear layers with dropout."""

    def __init__(self, depths: Sequence[int], width: int, image: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for i, depth in enumerate(depths):
            outputs = width * min(2**i, 8)
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        grid = image // 2 ** len(depths)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * grid * grid, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def build(
    depths: Sequence[int] = DEPTHS, width: int = 64, image: int = 224, hidden: int = 4096, classes: int = 1000
) -> nn.Module:
    return VGG(depths, width, image, hidden, classes)
