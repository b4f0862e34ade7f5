"""Training scripts of many kinds in one file, for `benchmarks/run.py`: `python -m benchmarks.run_scripts KIND OPTIMIZER SIZE STEPS`.

Each prints its losses to the last bit, and at the end a digest of parameters, buffers and optimizer state. Where there is a GPU it trains
there, on larger batches, by torch's deterministic algorithms.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[int], Tensor]
Made = tuple[nn.Module, Loss]

SIZES = {"small": 1, "large": 8}
"""Times as large a batch."""

_ON_A_GPU = 8
"""Times as large again, or weights and workspaces would be nearly all that is there."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


class Block(nn.Module):
    """A transformer block, the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.one(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.two(x))))


class Language(nn.Module):
    def __init__(self, words: int = 8000, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[Block(width, 8) for _ in range(depth)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Adapted(nn.Module):
    """LoRA: a frozen layer and two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def language(batch: int) -> Made:
    model = Language()
    return model, lambda step: _next_word(model, torch.randint(0, 8000, (batch, 65)))


def _next_word(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def lora(batch: int) -> Made:
    model = Language(words=2000).requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model, lambda step: _next_word(model, torch.randint(0, 2000, (2 * batch, 129)))


def lengths(batch: int) -> Made:
    """Sequences of another length in every step."""
    model = Language(words=2000, depth=3)
    return model, lambda step: _next_word(model, torch.randint(0, 2000, (batch, 33 + 24 * (step % 4))))


def mlp(batch: int) -> Made:
    model = nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )
    return model, lambda step: F.cross_entropy(
        model(torch.randn(16 * batch, 784)), torch.randint(0, 10, (16 * batch,))
    )


def cnn(batch: int) -> Made:
    def stage(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )

    model = nn.Sequential(stage(3, 32), stage(32, 64), stage(64, 128), nn.Flatten(), nn.Linear(128 * 16, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 100))  # fmt: skip
    return model, lambda step: F.cross_entropy(model(torch.randn(4 * batch, 3, 32, 32)), torch.randint(0, 100, (4 * batch,)))  # fmt: skip


def residual(batch: int) -> Made:
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.body(x), inplace=True)

    model = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), *[Residual(48) for _ in range(4)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 100))  # fmt: skip
    return model, lambda step: F.cross_entropy(model(torch.randn(2 * batch, 3, 32, 32)), torch.randint(0, 100, (2 * batch,)))  # fmt: skip


def recurrent(batch: int) -> Made:
    embed, rnn, head = nn.Embedding(4000, 256), nn.LSTM(256, 384, 2, batch_first=True), nn.Linear(384, 4000)
    model = nn.ModuleList([embed, rnn, head])

    def loss(step: int) -> Tensor:
        ids = torch.randint(0, 4000, (2 * batch, 49))
        return F.cross_entropy(head(rnn(embed(ids[:, :-1]))[0]).flatten(0, 1), ids[:, 1:].flatten())

    return model, loss


def autoencoder(batch: int) -> Made:
    widths = [1024, 1024, 512, 128, 512, 1024, 1024]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers)

    def loss(step: int) -> Tensor:
        x = torch.randn(24 * batch, 1024)
        return F.mse_loss(model(x), x)

    return model, loss


def contrastive(batch: int) -> Made:
    one = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 256))
    other = nn.Sequential(nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, 256))
    model = nn.ModuleDict({"one": one, "other": other})
    model.scale = nn.Parameter(torch.tensor(2.0))

    def loss(step: int) -> Tensor:
        a = F.normalize(one(torch.randn(32 * batch, 512)), dim=1)
        b = F.normalize(other(torch.randn(32 * batch, 768)), dim=1)
        return F.cross_entropy(a @ b.T * model.scale.exp(), torch.arange(32 * batch))

    return model, loss


def policy(batch: int) -> Made:
    """REINFORCE on a game of its own: an episode's log-probabilities, weighed by what came of it."""
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8)
    )

    def loss(step: int) -> Tensor:
        state, found = torch.randn(4 * batch, 64), []
        for _ in range(8 + step % 3):
            chances = F.log_softmax(model(state), 1)
            act = torch.multinomial(chances.exp().detach(), 1)
            found.append(chances.gather(1, act).squeeze(1) * state[:, 0])
            state = state.roll(1, 1) + 0.1 * act
        return -torch.stack(found).mean()

    return model, loss


def clipped(batch: int) -> Made:
    """As `language`, with its gradients clipped before the step."""
    model, loss = language(batch)
    model.clip = True  # type: ignore[assignment]
    return model, loss


KINDS: dict[str, Callable[[int], Made]] = {
    each.__name__: each
    for each in (
        language,
        lora,
        lengths,
        mlp,
        cnn,
        residual,
        recurrent,
        autoencoder,
        contrastive,
        policy,
        clipped,
    )
}


def _gan(optimizer: str, batch: int, steps: int) -> Iterator[str]:
    make, other = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024)), nn.Sequential(nn.Linear(1024, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1))  # fmt: skip
    makes, judges = OPTIMIZERS[optimizer](make.parameters()), OPTIMIZERS[optimizer](other.parameters())
    for _ in range(steps):
        fake = make(torch.randn(16 * batch, 64))
        judges.zero_grad()
        judged = (
            F.softplus(other(fake.detach())).mean() + F.softplus(-other(torch.randn(16 * batch, 1024))).mean()
        )
        judged.backward()
        judges.step()
        makes.zero_grad()
        made = F.softplus(-other(fake)).mean()
        made.backward()
        makes.step()
        yield f"{judged.item().hex()} {made.item().hex()}"
    yield digest([make, other], [makes, judges])


def _usual(kind: str, optimizer: str, batch: int, steps: int) -> Iterator[str]:
    model, loss_of = KINDS[kind](batch)
    stepped = OPTIMIZERS[optimizer]([each for each in model.parameters() if each.requires_grad])
    for step in range(steps):
        loss = loss_of(step)
        stepped.zero_grad()
        loss.backward()
        if getattr(model, "clip", False):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        yield loss.item().hex()
    yield digest([model], [stepped])


def digest(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> str:
    """Of parameters, buffers and optimizer state, to the last bit."""
    found = hashlib.sha256()
    tensors = [value for model in models for value in model.state_dict().values()]
    for optimizer in optimizers:
        for inner in optimizer.state_dict()["state"].values():
            tensors += [value for value in inner.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def repeatable() -> None:
    """Deterministic algorithms on a GPU, where cuBLAS and cuDNN's recurrent layers have them with small workspaces only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)


def main() -> None:
    """Train as `sys.argv` says."""
    kind, optimizer, size, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    batch = 2 * SIZES[size]
    if torch.cuda.is_available():
        repeatable()
        torch.set_default_device("cuda")
        batch *= _ON_A_GPU
    torch.manual_seed(0)
    lines = _gan(optimizer, batch, steps) if kind == "gan" else _usual(kind, optimizer, batch, steps)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
