"""A DCGAN on generated blobs: two networks, two optimizers, two backward passes of the discriminator per step.

python examples/dcgan.py --steps 60
"""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim

NOISE = 32


def blobs(batch, pixels=32):
    """Images in [-1, 1] with one soft coloured blob each."""
    axis = torch.linspace(-1, 1, pixels)
    centre = torch.rand(batch, 2, 1, 1) - 0.5
    size = 0.1 + 0.2 * torch.rand(batch, 1, 1)
    distance = (axis[:, None] - centre[:, 0]) ** 2 + (axis - centre[:, 1]) ** 2
    colour = torch.rand(batch, 3, 1, 1)
    return 2 * colour * torch.exp(-distance / size**2)[:, None] - 1


def up(inputs, outputs):
    return [
        nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True),
    ]  # fmt: skip


def down(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True),
    ]  # fmt: skip


class Generator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(True),
            *up(4 * width, 2 * width),
            *up(2 * width, width),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.main = nn.Sequential(
            *down(3, width),
            *down(width, 2 * width),
            *down(2 * width, 4 * width),
            nn.Conv2d(4 * width, 1, 4, bias=False),
        )

    def forward(self, image):
        return self.main(image).flatten()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    net_g, net_d = Generator(args.width).to(device), Discriminator(args.width).to(device)
    criterion = nn.BCEWithLogitsLoss()
    opt_d = optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real_label, fake_label = torch.ones(args.batch, device=device), torch.zeros(args.batch, device=device)
    for step in range(args.steps):
        net_d.zero_grad()
        loss_real = criterion(net_d(blobs(args.batch).to(device)), real_label)
        loss_real.backward()
        fake = net_g(torch.randn(args.batch, NOISE, 1, 1, device=device))
        loss_fake = criterion(net_d(fake.detach()), fake_label)
        loss_fake.backward()
        opt_d.step()

        net_g.zero_grad()
        loss_g = criterion(net_d(fake), real_label)
        loss_g.backward()
        opt_g.step()
        loss_d = (loss_real + loss_fake).item()
        print(f"step {step} loss {loss_d:.6f} generator {loss_g.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
