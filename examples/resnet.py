"""A small ResNet that tells gratings by their direction, with a data loader, a learning-rate schedule and evaluation.

python examples/resnet.py --steps 60
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Gratings(Dataset):
    """Noisy stripes in one of eight directions; the direction is the class."""

    def __init__(self, length, pixels, seed):
        self.length, self.pixels, self.seed = length, pixels, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        angle = math.pi * (index % 8) / 8
        x = torch.linspace(-1, 1, self.pixels)
        wave = x[:, None] * math.cos(angle) + x * math.sin(angle)
        phase = 6.28 * torch.rand(3, 1, 1, generator=g)
        image = torch.sin(12 * wave + phase) + 0.8 * torch.randn(3, self.pixels, self.pixels, generator=g)
        return image, index % 8


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)])

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def resnet(width=16, classes=8):
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    inputs = width
    for factor, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1)):
        layers.append(Block(inputs, factor * width, stride))
        inputs = factor * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    device = next(model.parameters()).device
    right = [(model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in loader]
    return sum(right) / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=48)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = DataLoader(Gratings(256, args.pixels, 1), args.batch, shuffle=True, num_workers=args.workers)
    test = DataLoader(Gratings(64, args.pixels, 2), args.batch)
    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    step = 0
    while step < args.steps:
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = loss_fn(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            step += 1
            if step == args.steps:
                break
        print(f"accuracy {accuracy(model, test):.2f}, lr {scheduler.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
