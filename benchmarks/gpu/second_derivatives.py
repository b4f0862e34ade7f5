"""Trains with a loss of gradients: `python -m benchmarks.gpu.second_derivatives pinn --steps 12`.

What a backward call saves that makes a graph of its own, autograd's thread of the GPU saves: here is where memopt meets that thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


def pinn(device: str, size: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A physics-informed net of Burgers' equation at `size` x 4096 points."""
    layers: list[nn.Module] = [nn.Linear(2, 256), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.Tanh()]

    def loss(model: nn.Module) -> Tensor:
        x = torch.rand(size * 4096, 2, device=device, requires_grad=True)
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return (slope[:, 1] + u[:, 0] * slope[:, 0] - 0.01 * bend[:, 0]).square().mean()

    return nn.Sequential(*layers, nn.Linear(256, 1)), loss


class Energy(nn.Module):
    """Of atoms, by messages between all pairs; and the forces, its gradient by their places."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.kinds = nn.Embedding(10, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(4)
        )
        self.updates = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """`kinds`: molecules x atoms; `places`: molecules x atoms x 3."""
        places.requires_grad_()
        apart = (places[:, :, None] - places[:, None] + 1e-3).norm(dim=-1, keepdim=True)
        basis = torch.exp(-2 * (apart - torch.linspace(0, 6, 32, device=places.device)) ** 2)
        x = self.kinds(kinds)
        for filters, update in zip(self.filters, self.updates, strict=True):
            x = x + F.silu(update((x[:, None] * filters(basis)).sum(2)))
        energy = self.out(x).sum((1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -slope


def forces(device: str, size: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    def loss(model: nn.Module) -> Tensor:
        kinds = torch.randint(0, 10, (2 * size, 32), device=device)
        energy, force = model(kinds, torch.randn(2 * size, 32, 3, device=device))
        return energy.square().mean() + (force - torch.randn_like(force)).square().mean()

    return Energy(), loss


def maml(device: str, size: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Two inner steps for each of `size` tasks."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 5),
    )  # fmt: skip

    def loss(model: nn.Module) -> Tensor:
        total = torch.zeros((), device=device)
        for _ in range(size):
            images = torch.rand(25, 1, 28, 28, device=device)
            kinds = torch.randint(0, 5, (25,), device=device)
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = F.cross_entropy(functional_call(model, weights, images), kinds)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {name: p - 0.1 * s for (name, p), s in zip(weights.items(), slopes, strict=True)}
            total = total + F.cross_entropy(functional_call(model, weights, images), kinds)
        return total

    return model, loss


KINDS = {"pinn": pinn, "forces": forces, "maml": maml}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words = parser.parse_args()
    torch.manual_seed(0)
    model, loss_of = KINDS[words.kind](words.device, 1 if words.tiny else 8)
    model.to(words.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(words.steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9g}")


if __name__ == "__main__":
    main()
