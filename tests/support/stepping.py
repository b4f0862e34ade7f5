"""Training loops that step right after backward and do not look at gradients, for every optimizer; and ones that may not be enforced."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.enforcers.verify.digests import digest
from memopt.instrument.stepping.gradient_reads import gradient_of
from tests.support.enforced import Loop
from tests.support.loops import Block

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True, maximize=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9, weight_decay=0.01),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.01, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.01),
    "adamax-foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=True),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.01),
    "radam-foreach": lambda p: torch.optim.RAdam(p, lr=1e-2, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.01),
    "adadelta-foreach": lambda p: torch.optim.Adadelta(p, lr=0.5, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2.0, weight_decay=0.01),
    "asgd-foreach": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2.0, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "rprop-foreach": lambda p: torch.optim.Rprop(p, lr=1e-2, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adafactor-foreach": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True),
}  # fmt: skip


class Language(nn.Module):
    """A transformer block between an embedding and the same weights as output: their gradient comes from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, activation="gelu")
        self.unused = nn.Parameter(torch.ones(7))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.frozen(self.layer(self.embed(x))), self.embed.weight)


def images() -> nn.Module:
    return nn.Sequential(
        Block(3, 8), nn.MaxPool2d(2), Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def image_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4))


def language_loss(model: nn.Module) -> Tensor:
    x = torch.randint(0, 40, (4, 12))
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def autocast_loss(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return language_loss(model)


def checkpointed_loss(model: nn.Module) -> Tensor:
    x = torch.randn(4, 3, 16, 16)
    for part in model:
        x = checkpoint(part, x, use_reentrant=False)
    return F.cross_entropy(x, torch.arange(4))


def wide() -> nn.Module:
    """More parameters than activations: the peak is in the step."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "images": (images, image_loss),
    "language": (Language, language_loss),
    "autocast": (Language, autocast_loss),
    "checkpointed": (images, checkpointed_loss),
    "wide": (wide, lambda model: model(torch.randn(2, 64)).square().mean()),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: weights, and the rest at another rate."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 3e-3},
    ]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Digests of parameters, buffers and the optimizer's state."""
    found = [digest(t) for t in (*model.parameters(), *model.buffers())]
    state = optimizer.state_dict()
    found.append(str(state["param_groups"]))
    for number, entries in state["state"].items():
        for key, value in entries.items():
            found.append(f"{number} {key} {digest(value) if isinstance(value, Tensor) else value}")
    return found


def clears_first(
    model: nn.Module, stepped: Any, rates: Any, loss_of: Callable[[nn.Module], Tensor]
) -> Tensor:
    loss = loss_of(model)
    stepped.zero_grad()
    loss.backward()
    stepped.step()
    if rates is not None:
        rates.step()
    return loss


def clears_last(model: nn.Module, stepped: Any, rates: Any, loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
    loss = loss_of(model)
    loss.backward()
    stepped.step()
    if rates is not None:
        rates.step()
    model.zero_grad()
    return loss


def stepping(task: str, optimizer: str, *, scheduler: bool = False, clear_last: bool = False) -> Loop:
    """The loop that trains `task` with `optimizer`."""

    def loop(steps: int) -> list[str]:
        make, loss_of = TASKS[task]
        model = make()
        stepped = OPTIMIZERS[optimizer](groups(model))
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, 5) if scheduler else None
        found = []
        for _ in range(steps):
            one = clears_last if clear_last else clears_first
            found += [digest(one(model, stepped, rates, loss_of)), *everything(model, stepped)]
        return found

    return loop


# --- what may not be enforced


def _refused(
    body: Callable[[nn.Module, torch.optim.Optimizer, int], None], make: Make = OPTIMIZERS["adamw"]
) -> Loop:
    def loop(steps: int) -> list[str]:
        model = images()
        optimizer = make(model.parameters())
        found = []
        for step in range(steps):
            body(model, optimizer, step)
            found += everything(model, optimizer)
        return found

    return loop


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _scaled(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(image_loss(model)).backward()
    scaler.step(optimizer)
    scaler.update()


def _accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward()
    image_loss(model).backward()
    optimizer.step()


def _with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = image_loss(model)
        loss.backward()
        return loss

    optimizer.step(closure)


def _retained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward(retain_graph=True)
    optimizer.step()


def _zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    image_loss(model).backward()
    optimizer.step()


def _sometimes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss = image_loss(model)
    loss.backward()
    if loss < 1e9:
        optimizer.step()


def _rate_set_between(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
    optimizer.step()


def _reentrant(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=True), torch.arange(4))
    loss.backward()
    optimizer.step()


def _logged_after(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def _halve(parameter: Tensor) -> None:
    gradient_of(parameter).mul_(0.5)


def _hooked(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 0:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(_halve)
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizer.step()


def _step_hooked(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 0:
        optimizer.register_step_pre_hook(lambda o, args, kwargs: None)
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizer.step()


class _OwnAdamW(torch.optim.AdamW):
    pass


def _plainly(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizer.step()


def _through_two_names(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizers = [optimizer]
    optimizer.zero_grad()
    image_loss(model).backward()
    optimizers[0].step()


def two_train(steps: int) -> list[str]:
    """A generator and a discriminator: the backward call of the one leaves gradients with the other."""
    made, told = nn.Linear(8, 8), nn.Linear(8, 1)
    of_made, of_told = OPTIMIZERS["adam"](made.parameters()), OPTIMIZERS["adam"](told.parameters())
    found = []
    for _ in range(steps):
        of_told.zero_grad()
        loss = told(made(torch.randn(4, 8)).detach()).mean()
        loss.backward()
        of_told.step()
        of_made.zero_grad()
        loss = told(made(torch.randn(4, 8))).square().mean()
        loss.backward()
        of_made.step()
        found += [*everything(made, of_made), *everything(told, of_told)]
    return found


def sparse(steps: int) -> list[str]:
    model = nn.Embedding(40, 8, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 40, (4, 3))).square().mean().backward()
        optimizer.step()
        found += everything(model, optimizer)
    return found


def weight_used_late(steps: int) -> list[str]:
    """The update of `second` would come before backward has used its value, which takes no part in its gradient."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([first, second])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = first(torch.randn(4, 8))
        h = F.linear(x, second.weight.detach())
        second(torch.tanh(h)).square().mean().backward()
        optimizer.step()
        found += everything(model, optimizer)
    return found


REFUSED: dict[str, tuple[Loop, str]] = {
    "clipped": (_refused(_clipped), "does something else"),
    "scaled": (_refused(_scaled), "does something else"),
    "accumulated": (_refused(_accumulated), "does something else"),
    "closure": (_refused(_with_closure), "does something else"),
    "lbfgs": (_refused(_with_closure, lambda p: torch.optim.LBFGS(p, max_iter=2)), "LBFGS is not among"),
    "retained": (_refused(_retained), "keeps its graph"),
    "zeroed in place": (_refused(_zeroed_in_place), "not cleared to none"),
    "sometimes": (_refused(_sometimes), "does something else"),
    "rate set between": (_refused(_rate_set_between), "does something else"),
    "reentrant": (_refused(_reentrant), "inside backward"),
    "logged after": (_refused(_logged_after), "looks at gradients"),
    "hooked": (_refused(_hooked), "hooks its gradients"),
    "step hooked": (_refused(_step_hooked), "hooks the optimizer's step"),
    "subclass": (_refused(_plainly, _OwnAdamW), "_OwnAdamW is not among"),
    "two names": (_refused(_through_two_names), "does something else"),
    "two train": (two_train, "not cleared to none"),
    "sparse": (sparse, "sparse"),
    "weight used late": (weight_used_late, "after its gradient is whole"),
}  # fmt: skip


# --- what a script does with an optimizer's state between two steps (`exp_avg` and `exp_avg_sq`)


def saved(optimizer: torch.optim.Optimizer) -> str:
    """A checkpoint's bytes."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return digest(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))


def saves(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    return [saved(optimizer)] if step in (1, 4) else []


def loads(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    if step == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return []


def copies(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    twin = copy.deepcopy(optimizer)
    assert type(twin.state).__name__ == "defaultdict"
    return [digest(value) for inner in twin.state.values() for value in inner.values() if value is not None]


def pickles(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    again = pickle.loads(pickle.dumps(optimizer)) if step == 3 else optimizer
    return [str(list(each)) for each in again.state.values()] if step == 3 else []


def looks(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    found = [digest(optimizer.state[model.second.weight]["exp_avg"]), str(len(optimizer.state))]
    return found + [digest(inner["exp_avg_sq"]) for inner in dict(optimizer.state).values()]


def joins(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    if step == 2:
        model.late = nn.Parameter(torch.ones(3000))
        optimizer.add_param_group({"params": [model.late]})
    if step >= 2:
        model.late.grad = None
        (model.late * 0.5).square().sum().backward()
        optimizer.step()
    return []


def changes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Momentum restarts, and a moment is scaled by hand."""
    if step == 2:
        optimizer.state.clear()
    elif step == 4:
        optimizer.state[model.second.weight]["exp_avg"].mul_(0.5)
    return []


LOOKS = [saves, loads, copies, pickles, looks, joins, changes]
