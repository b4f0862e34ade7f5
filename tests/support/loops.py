"""Training loops that do what real scripts do to hooks. Each takes a number of steps and returns digests of all it computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.enforcers.verify.digests import digest
from tests.support.enforced import state_digests


def _train(model: nn.Module, batch, loss, steps: int, *, lr: float = 0.05, make=torch.optim.SGD) -> list[str]:
    optimizer = make(model.parameters(), lr=lr)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, batch())
        value.backward()
        optimizer.step()
        found += [digest(value), *state_digests(model)]
    return found


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.drop(self.bn2(self.conv2(y)))
        y += self.shortcut(x)
        return self.relu(y)


def residual_in_place(steps: int) -> list[str]:
    model = nn.Sequential(
        Block(3, 8),
        Block(8, 8),
        nn.MaxPool2d(2),
        Block(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return _train(
        model, lambda: torch.randn(4, 3, 16, 16), lambda m, x: F.cross_entropy(m(x), torch.arange(4)), steps
    )


def transformer(steps: int) -> list[str]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))
    batch = lambda: torch.randint(0, 50, (4, 16))  # noqa: E731
    return _train(
        model,
        batch,
        lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        steps,
        make=torch.optim.AdamW,
        lr=1e-3,
    )


def tied_weights(steps: int) -> list[str]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 24)
            self.hidden = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(F.gelu(self.hidden(self.embed(x))), 0.2, inplace=True)
            return F.linear(F.silu(h), self.embed.weight)

    return _train(
        Tied(),
        lambda: torch.randint(0, 40, (6, 10)),
        lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        steps,
    )


def autocast_with_accumulation(steps: int) -> list[str]:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                value = F.cross_entropy(model(torch.randn(16, 32)), torch.randint(0, 8, (16,))) / 3
            value.backward()
            found.append(digest(value))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += state_digests(model)
    return found


def backward_inside_autocast(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(32, 64), nn.Softplus(), nn.Linear(64, 8))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = m(x)
            with torch.autocast("cpu", enabled=False):
                h = torch.tanh(h.float() @ torch.ones(8, 8))
            value = h.pow(2).mean()
            value.backward(retain_graph=True)
        return value

    return _train(model, lambda: torch.randn(16, 32), loss, steps)


def retained_graph(steps: int) -> list[str]:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        out = m(x)
        out.pow(2).mean().backward(retain_graph=True)
        return F.cross_entropy(out, torch.arange(8) % 4)

    return _train(model, lambda: torch.randn(8, 16), loss, steps)


def gradient_penalty(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        out = m(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (gradient.norm(dim=1) - 1).pow(2).mean()

    return _train(model, lambda: torch.randn(8, 16), loss, steps)


def checkpointed(steps: int) -> list[str]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1))
            self.middle = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
            self.last = nn.Sequential(nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.middle, x, use_reentrant=False)
            x = checkpoint(self.middle, x, use_reentrant=True)
            return self.last(x)

    return _train(
        Net(), lambda: torch.randn(8, 16), lambda m, x: F.cross_entropy(m(x), torch.arange(8) % 4), steps
    )


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        return gradient * (2 * y + again * x)


def custom_function(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    return _train(
        model,
        lambda: torch.randn(8, 16),
        lambda m, x: Cube.apply(m[1](Cube.apply(m[0](x) / 8))).mean(),
        steps,
    )


def two_optimizers(steps: int) -> list[str]:
    maker = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(True), nn.Linear(32, 16), nn.Tanh())
    critic = nn.Sequential(
        nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(32, 1)
    )
    one, two = torch.optim.Adam(critic.parameters(), 1e-3), torch.optim.Adam(maker.parameters(), 1e-3)
    found = []
    for _ in range(steps):
        fake = maker(torch.randn(8, 4))
        one.zero_grad()
        loss = F.softplus(-critic(torch.randn(8, 16))).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        one.step()
        two.zero_grad()
        second = F.softplus(-critic(fake)).mean()
        second.backward()
        two.step()
        found += [digest(loss), digest(second), *state_digests(maker, critic)]
    return found


def lbfgs(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x, y = torch.randn(20, 8), torch.randn(20, 1)
    found: list[str] = []
    losses: list[str] = []
    for _ in range(steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = F.mse_loss(model(x), y)
            value.backward()
            losses.append(digest(value))
            return value

        optimizer.step(closure)
        found += state_digests(model)
    return found + losses


def without_optimizer(steps: int) -> list[str]:
    w1, w2 = torch.randn(16, 32, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    found = []
    for _ in range(steps):
        h = torch.relu(torch.randn(8, 16) @ w1)
        value = F.cross_entropy(torch.sigmoid(h) @ w2, torch.arange(8) % 4)
        value.backward()
        found += [digest(value), digest(w1.grad), digest(w2.grad)]
        for w in (w1, w2):
            w.data.add_(w.grad, alpha=-0.1)
            w.grad = None
    return found


def lengths_that_change(steps: int) -> list[str]:
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 4)])
    draw = torch.Generator().manual_seed(5)

    def loss(m: nn.ModuleList, x: Tensor) -> Tensor:
        for _ in range(int(torch.randint(1, 5, (1,), generator=draw))):
            x = F.relu(m[0](x)) if x.sum() > 0 else torch.tanh(m[0](x) * 2)
        return F.cross_entropy(m[1](x), torch.arange(len(x)) % 4)

    return _train(model, lambda: torch.randn(int(torch.randint(2, 9, (1,), generator=draw)), 16), loss, steps)


def evaluation_between(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        if step % 2:
            model.eval()
            with torch.no_grad():
                found.append(digest(model(torch.randn(8, 16))))
            model.train()
        optimizer.zero_grad()
        value = F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4)
        value.backward()
        optimizer.step()
        found += [digest(value), *state_digests(model)]
    return found


def odd_ops(steps: int) -> list[str]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 16, sparse=True)
            self.scale = nn.Parameter(torch.ones(9, dtype=torch.complex64))
            self.rrelu = nn.RReLU()
            self.prelu = nn.PReLU()
            self.out = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            h = torch.fft.irfft(torch.fft.rfft(h) * self.scale, n=16)
            h = self.prelu(self.rrelu(h)).transpose(1, 2)
            h = torch.cat([h[:, :8], h[:, 8:].flip(2)], 1)
            h = torch.where(h > 0, h, h.exp() - 1).clamp(-2, 2)
            top, _ = h.topk(3, dim=2)
            return self.out((top.cumsum(2) * torch.softmax(h[..., :3], 2)).sum(2).expand(2, -1, -1).mean(0))

    model = Odd()
    return _train(
        model,
        lambda: torch.randint(0, 30, (4, 6)),
        lambda m, x: F.cross_entropy(m(x), torch.arange(4)),
        steps,
    )


def written_by_slices(steps: int) -> list[str]:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(x.shape[0], 16)
            h[:, :8] = self.a(x)
            h[:, 8:] = torch.relu(h[:, :8].clone())
            h.mul_(0.5).add_(1)
            g = torch.empty_like(h).copy_(h.exp())
            return self.b(F.layer_norm(g, (16,)))

    return _train(
        Writer(), lambda: torch.randn(6, 8), lambda m, x: F.cross_entropy(m(x), torch.arange(6) % 4), steps
    )


def recurrent(steps: int) -> list[str]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, 2, dropout=0.2, batch_first=True)
            self.cell = nn.GRUCell(16, 12)
            self.out = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.lstm(x)
            h = torch.zeros(x.shape[0], 12)
            for t in range(y.shape[1]):
                h = self.cell(y[:, t], h)
            return self.out(h)

    return _train(
        Net(), lambda: torch.randn(4, 5, 8), lambda m, x: F.cross_entropy(m(x), torch.arange(4)), steps
    )


def pools_and_pads(steps: int) -> list[str]:
    model = nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1),
        nn.Hardswish(), nn.AvgPool2d(2), nn.GroupNorm(2, 8), nn.ELU(inplace=True), nn.AdaptiveMaxPool2d(2), nn.Dropout2d(0.2),
        nn.Flatten(), nn.Linear(32, 4),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    batch = lambda: torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)  # noqa: E731
    return _train(model, batch, lambda m, x: F.cross_entropy(m(x), torch.arange(4)), steps)


def frozen_backbone(steps: int) -> list[str]:
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    )
    head = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    stem = nn.Conv2d(3, 3, 3, padding=1)
    body.requires_grad_(False).eval()
    model = nn.ModuleList([stem, body, head])
    return _train(
        model,
        lambda: torch.randn(4, 3, 8, 8),
        lambda m, x: F.cross_entropy(m[2](m[1](m[0](x))), torch.arange(4)),
        steps,
    )


def thawing_backbone(steps: int) -> list[str]:
    """Unfreezes after the profiled step: what was never read then is read now."""
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
    )
    stem, head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(128, 4)
    body.requires_grad_(False)
    model = nn.ModuleList([stem, body, head])
    count = [0]

    def loss(m: nn.ModuleList, x: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == 5:
            m[1].requires_grad_(True)
        return F.cross_entropy(m[2](m[1](m[0](x)).flatten(1)), torch.arange(4))

    return _train(model, lambda: torch.randn(4, 3, 8, 8), loss, steps)


def moving_threshold(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    count = [0]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        count[0] += 1
        bound = 1.0 / count[0]
        h = F.leaky_relu(m[0](x).clamp(-bound, bound), bound / 2, inplace=True)
        return F.cross_entropy(m[1](F.threshold(h, bound / 4, 0.0)), torch.arange(8) % 4)

    return _train(model, lambda: torch.randn(8, 16), loss, steps)


def functional_transforms(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        parameters = dict(m.named_parameters())

        def energy(point: Tensor) -> Tensor:
            return torch.func.functional_call(m, parameters, (point,)).sum()

        slopes = torch.func.vmap(torch.func.grad(energy))(x)
        return m(x).pow(2).mean() + slopes.pow(2).mean()

    return _train(model, lambda: torch.randn(6, 8), loss, steps)


def updates_in_backward_hooks(steps: int) -> list[str]:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )

    def update(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    found = []
    for _ in range(steps):
        value = F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4)
        value.backward()
        found += [digest(value), *state_digests(model)]
        for parameter in model.parameters():
            parameter.grad = None
    return found


def stepped_in_hooks(
    model: nn.Module,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    given: Callable[[], Tensor],
    steps: int,
) -> list[str]:
    """An optimizer for each parameter, stepped by a hook as soon as its gradient is there (PyTorch's tutorial "optimizer step in backward")."""
    optimizers = {p: make([p]) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    found = []
    try:
        for _ in range(steps):
            value = model(given()).square().mean()
            value.backward()
            found += [digest(value), *state_digests(model)]
    finally:
        for handle in handles:
            handle.remove()  # or the optimizers live for ever, which other loops would notice
    return found


def optimizers_in_backward(steps: int) -> list[str]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
    return stepped_in_hooks(model, lambda p: torch.optim.Adam(p, lr=0.01), lambda: torch.randn(64, 32), steps)


def observations_in_one_buffer(steps: int) -> list[str]:
    """The environment writes its next state over the last one, which numpy and torch share, before backward has read it."""
    policy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    state = np.random.RandomState(0).randn(8, 16).astype(np.float32)
    found = []
    for _ in range(steps):
        losses = []
        for _ in range(3):
            losses.append(policy(torch.from_numpy(state)).log_softmax(-1)[:, 0].mean())
            np.tanh(state * 1.5 + 0.1, out=state)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        found += [*(digest(loss) for loss in losses), *state_digests(policy)]
    return found


class _OwnKernel(torch.autograd.Function):
    """As a Triton or C++ kernel: it fills what torch only allocated, and no op tells of it."""

    @staticmethod
    def forward(ctx, x: Tensor, make) -> Tensor:
        out = make(x)
        np.tanh(x.detach().numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return gradient * (1 - out * out), None


class _OwnInPlaceKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        np.negative(x.detach().numpy(), out=x.detach().numpy())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -gradient


def kernels_that_no_mode_sees(steps: int) -> list[str]:
    """Values that are there though no op that was seen has made them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer, make in zip(self.layers, (torch.empty_like, torch.zeros_like) * 2, strict=True):
                x = F.gelu(_OwnKernel.apply(layer(x), make))
                x = _OwnInPlaceKernel.apply(x * 2.0).sigmoid() * x
            return x

    return _train(Net(), lambda: torch.randn(32, 16), lambda m, x: m(x).square().mean(), steps)


def jagged(steps: int) -> list[str]:
    """Sequences of several lengths in one nested tensor: autograd saves tensors that only wrap others."""
    model = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 4)])

    def loss(m: nn.ModuleList, x: Tensor) -> Tensor:
        hidden = F.gelu(m[0](x))
        return (m[1](hidden).values() * F.softplus(m[1](m[0](x.values())))).mean()

    batch = lambda: torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 9, 5)], layout=torch.jagged)  # noqa: E731
    return _train(model, batch, loss, steps)


def clamped_in_place(steps: int) -> list[str]:
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU6(inplace=True),
        nn.Linear(64, 64),
        nn.Hardtanh(inplace=True),
        nn.Linear(64, 4),
    )
    return _train(
        model, lambda: torch.randn(32, 16), lambda m, x: F.cross_entropy(m(x), torch.arange(32) % 4), steps
    )


def gathers(steps: int) -> list[str]:
    """Messages along the edges of a graph, gathered by index, and rows chosen by a mask of another size in each step."""
    node, edge = nn.Linear(16, 64), nn.Linear(64, 64)
    out = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    model = nn.ModuleList([node, edge, out])

    def loss(_: nn.Module, x: Tensor) -> Tensor:
        one, other = torch.randint(0, 40, (2, 300))
        x = torch.tanh(node(x))
        message = torch.tanh(edge(x)[other]) * x[one]
        x = x + torch.zeros_like(x).index_add(0, one, message)
        chosen = torch.rand(40) < 0.7
        return F.cross_entropy(out(x[chosen] * 0.5), torch.arange(int(chosen.sum())) % 4)

    return _train(model, lambda: torch.randn(40, 16), loss, steps)


def tangents(steps: int) -> list[str]:
    """A loss on a directional derivative: the tangent of a weight is zeros whose bytes are never allocated."""
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8))
    parameters = dict(model.named_parameters())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        direction = torch.ones_like(x)
        _, along = torch.func.jvp(
            lambda z: torch.func.functional_call(model, parameters, (z,)), (x,), (direction,)
        )
        return model(x).square().mean() + (along - direction).square().mean()

    return _train(model, lambda: torch.randn(32, 8), loss, steps)


def log_likelihood(steps: int) -> list[str]:
    """The loss alone saves the logarithms, whose values its backward never reads."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(1))
    return _train(
        model,
        lambda: torch.randn(64, 16),
        lambda m, x: F.nll_loss((m(x) + 0.01).log(), torch.arange(64) % 4),
        steps,
    )


def conjugates(steps: int) -> list[str]:
    """Ops that read a lazily conjugated or negated view of what other ops made: a correlation by Fourier transforms."""

    class Correlation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.complex64) / 3)
            self.out = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x)
            turned = spectrum @ self.weight.conj().T
            turned = turned * turned.abs().tanh()
            mixed = turned @ turned.conj().transpose(1, 2) @ turned.conj()
            waves = torch.fft.irfft(torch.tanh(mixed) * torch.tanh((turned + spectrum).conj()), n=16)
            waves = waves + torch.fft.irfft(
                torch.complex(turned.imag, (turned - spectrum).conj().imag.exp()), n=16
            )
            return self.out(waves.tanh()).mean(1)

    model = Correlation()
    return _train(
        model, lambda: torch.randn(8, 6, 16), lambda m, x: F.cross_entropy(m(x), torch.arange(8) % 4), steps
    )


def lazy_modules(steps: int) -> list[str]:
    """Their parameters are made when they are called first, one of them anew in each step."""
    model = nn.Sequential(nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))  # fmt: skip
    model(torch.randn(2, 3, 8, 8))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return nn.LazyLinear(2)(model(batch)).square().mean()

    return _train(model, lambda: torch.randn(4, 3, 8, 8), loss, steps)


LOOPS = [
    lazy_modules,
    conjugates,
    log_likelihood,
    tangents,
    residual_in_place, transformer, tied_weights, autocast_with_accumulation, backward_inside_autocast, retained_graph,
    gradient_penalty, checkpointed, custom_function, two_optimizers, lbfgs, without_optimizer, lengths_that_change,
    evaluation_between, odd_ops, written_by_slices, recurrent, pools_and_pads, frozen_backbone, thawing_backbone,
    moving_threshold, functional_transforms, updates_in_backward_hooks,
    optimizers_in_backward, observations_in_one_buffer, kernels_that_no_mode_sees, jagged, clamped_in_place, gathers,
]  # fmt: skip
