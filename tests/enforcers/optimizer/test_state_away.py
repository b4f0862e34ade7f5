"""State in a tier between the steps of any optimizer: the same bits, state whole whenever it is looked at, the peak as predicted."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.plan_reader import read_plan
from memopt.advisors.profiles.problem import Decisions
from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.in_pieces import why_not
from memopt.instrument.iterations import Iterations
from memopt.instrument.memory.meter import living_storages
from memopt.instrument.script.training_thread import TrainingThread
from memopt.instrument.stepping import in_pieces as stepping
from memopt.instrument.stepping.state_between_steps import state_tensors
from memopt.outcome import Outcome
from memopt.plan import OPTIMIZER_IN_PIECES, OPTIMIZER_STATE_AWAY, Plan, ScriptAction, Tier, load_plan
from tests.late.late_session import run_late
from tests.support.disks import Full
from tests.support.enforced import Loop, enforced, plan_with, recorded, seeded
from tests.support.stepping import LOOKS, everything, saved

STEPS = 6
WIDE = 96


class OfTheScript(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by an `update` of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.update(each, self.state[each], group["lr"])

    def update(self, each: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Own(OfTheScript):
    """Its update mixes the elements of a parameter, its state has lists and a counter in them."""

    def update(self, each: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        assert each.grad is not None
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(each)
            state["exp_avg_sq"] = torch.zeros_like(each)
            state["sides"] = [torch.zeros_like(each), [torch.zeros_like(each, dtype=torch.float64)]]
        state["step"] += 1
        state["exp_avg"].lerp_(each.grad, 0.1)
        state["exp_avg_sq"].mul_(0.9).addcmul_(each.grad, each.grad, value=0.1)
        state["sides"][0].add_(each.grad.norm())
        state["sides"][1][0].add_(each.grad)
        change = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + state["sides"][0].abs().mean() + 1)
        each.sub_(lr * change / change.norm().clamp_min(1e-6))


class Replacing(OfTheScript):
    """Puts new tensors in the place of some of its state at each step, as DiffGrad does."""

    def update(self, each: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        assert each.grad is not None
        if not state:
            state["exp_avg"] = state["before"] = torch.zeros_like(each)
        state["exp_avg"] = 0.9 * state["exp_avg"] + each.grad
        each.sub_(lr * state["exp_avg"] * torch.sigmoid((state["before"] - each.grad).abs()))
        state["before"] = each.grad.clone()


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Subclass(torch.optim.AdamW):
    """Not known to step each element by itself."""


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "own": Own,
    "replacing": Replacing,
    "hooked": hooked,
    "subclass": lambda p: Subclass(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, beta2_decay=-0.5),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


def training(
    make: Callable[[Any], torch.optim.Optimizer],
    between: Callable[[Any, torch.optim.Optimizer, int], list[str]] = lambda *_: [],
) -> Loop:
    def loop(steps: int) -> list[str]:
        model = Net()
        optimizer = make([model.second.weight, *model.first.parameters(), model.second.bias])
        found = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDE)).square().mean()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *between(model, optimizer, step)]
        return [*found, *everything(model, optimizer)]

    return loop


def plan_for(tier: Tier = "disk") -> Plan:
    return plan_with(
        ScriptAction(
            kind="optimizer",
            what=OPTIMIZER_STATE_AWAY,
            why="",
            saved_bytes=0,
            parameters=1,
            tier=tier,
            away_bytes=1 << 20,
            whole_from_bytes=1,
        )
    )


def check(loop: Loop, folder: Path, *, done: int = 1) -> Outcome:
    plain = seeded(loop, STEPS)
    computed, outcome = enforced(loop, plan_for(), folder, STEPS)
    assert computed == plain, outcome
    assert outcome.actions.done == done, outcome
    return outcome


@pytest.mark.parametrize("kind", MAKERS)
def test_every_optimizer_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    check(training(MAKERS[kind]), tmp_path, done=kind != "adafactor")  # its factors are small, and stay


@pytest.mark.parametrize("between", LOOKS)
def test_state_is_whole_whoever_asks(between: Any, tmp_path: Path) -> None:
    check(training(hooked, between), tmp_path)


@pytest.mark.parametrize("between", LOOKS[:5])
def test_state_in_lists_is_whole_whoever_asks(between: Any, tmp_path: Path) -> None:
    def flat(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        found: list[str] = [] if between.__name__ == "copies" else between(model, optimizer, step)
        lists = [each["sides"][1][0] for each in optimizer.state.values()]
        return [*found, *map(digest, lists)] if step % 2 else found

    check(training(Own, flat), tmp_path)


def test_state_is_away_between_steps_and_after_a_checkpoint_again(tmp_path: Path) -> None:
    seen: list[int] = []

    def loop(steps: int) -> list[str]:
        parameter = nn.Parameter(torch.ones(1 << 16))
        optimizer = Own([parameter])
        found = []
        for step in range(steps):
            parameter.grad = torch.ones(1 << 16)
            optimizer.step()
            parameter.grad = None
            if step == 1:
                found.append(saved(optimizer))
            seen.append(sum(each.nbytes() for each in living_storages("cpu")))
        return [*found, digest(parameter)]

    plain = seeded(loop, 4)
    before, seen[:] = list(seen), []
    computed, _ = enforced(loop, plan_for(), tmp_path, 4)
    assert computed == plain
    less = [a - b for a, b in zip(before, seen, strict=True)]
    whole = (3 * 4 + 8) << 16
    assert less == pytest.approx([whole, 0, whole, whole], rel=0.01, abs=4096)


def test_what_somebody_else_holds_stays(tmp_path: Path) -> None:
    """A logger keeps a tensor of the state, a view of another, and a list, and sees every step in them."""
    held: list[Any] = []

    def holds(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        if step == 0:
            state = optimizer.state[model.second.weight]
            held[:] = [state["exp_avg"], state["exp_avg_sq"].view(-1), state["sides"]]
        return [digest(held[0]), digest(held[1]), digest(held[2][0])]

    check(training(Own, holds), tmp_path)


def test_who_holds_the_state_itself_sees_every_step(tmp_path: Path) -> None:
    held: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Own(parameters)
        held[:] = [optimizer.state]
        return optimizer

    def looks(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        return [digest(held[0][model.second.weight]["exp_avg"])]

    outcome = check(training(make, looks), tmp_path, done=0)
    assert any("something else holds the optimizer's state" in note for note in outcome.notes)


def test_what_torch_compile_knows_by_its_address_stays(tmp_path: Path) -> None:
    left: list[int] = []

    def marks(model: Any, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
        for each in optimizer.state.values():
            torch._dynamo.mark_static_address(each["exp_avg"])
        left.append(sum(1 for _ in state_tensors(optimizer)))
        return []

    loop = training(hooked, marks)
    plain = seeded(loop, 3)
    computed, _ = enforced(loop, plan_for(), tmp_path, 3)
    assert computed == plain
    assert set(left) == {2}  # of two weights' second moments; biases are small


def test_a_capturable_optimizer_is_left_alone(tmp_path: Path) -> None:
    """A graph of the GPU's that has captured the step knows the addresses of its state."""

    def loop(steps: int) -> list[str]:
        parameter = nn.Parameter(torch.ones(1 << 12))
        optimizer = Own([parameter])
        optimizer.param_groups[0]["capturable"] = True
        for _ in range(steps):
            parameter.grad = torch.ones(1 << 12)
            optimizer.step()
        return [digest(parameter)]

    outcome = check(loop, tmp_path, done=0)
    assert any("capturable" in note for note in outcome.notes)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.enforcers.tiers.disk.DiskStore", Full)
    outcome = check(training(Own), tmp_path)
    assert any("the disk is full" in note for note in outcome.notes)


def test_a_step_that_raises_leaves_the_state_whole(tmp_path: Path) -> None:
    class Raises(Own):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Raises.calls += 1
            if Raises.calls % 3 == 0:
                raise ArithmeticError
            super().step(closure)

    def loop(steps: int) -> list[str]:
        Raises.calls = 0
        model = net()
        optimizer = Raises(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, WIDE)).square().mean().backward()
            try:
                optimizer.step()
            except ArithmeticError:
                optimizer.zero_grad()
        return everything(model, optimizer)

    check(loop, tmp_path)


def test_it_leaves_when_the_plan_begins_in_the_midst_of_a_run(tmp_path: Path) -> None:
    from memopt.enforcers.tiers.per_device import disk_tier

    plain = seeded(training(Own), STEPS)
    tier = disk_tier(tmp_path)
    at_once: list[int] = []

    class Late:
        pieces: OptimizerInPieces | None = None

        def iteration_ended(self, count: int, milliseconds: float) -> None:
            if count == 2:
                self.pieces = OptimizerInPieces(iterations, 0, tier, whole_from=1)
                (stepped,) = iterations.stepped
                self.pieces.begin([stepped])
                at_once.append(sum(1 for _ in state_tensors(stepped)))

        def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
            if self.pieces is not None:
                self.pieces.step_begins(optimizer)

        def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
            if self.pieces is not None:
                self.pieces.step_ended(optimizer)

        def thread_changed(self) -> None: ...
        def backward_begins(self, roots: Any, **_: bool) -> None: ...
        def backward_ended(self) -> None: ...

    iterations = Iterations(Late())
    iterations.install()
    try:
        computed = seeded(training(Own), STEPS)
    finally:
        iterations.remove()
    tier.close()
    assert computed == plain
    assert at_once == [0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_on_a_device_whose_copies_come_late(
    tier: Tier, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = training(Own)
    computed, outcome, _, kernels = run_late(
        loop, plan_for(tier), tmp_path, 4, monkeypatch, seed, stays_open=True
    )
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == 1, outcome.notes
    assert kernels.noted


# --- the prediction


def deep(*makes: Callable[[Any], torch.optim.Optimizer], again: bool = False) -> Loop:
    """Layers whose activations are the peak, each optimizer with its share of them; `again`: the last steps twice an iteration."""

    def loop(steps: int) -> list[str]:
        layers = [nn.Linear(256, 256) for _ in range(6)]
        model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
        share = len(layers) // len(makes)
        owned = [layers[n * share : (n + 1) * share] for n in range(len(makes))]
        optimizers = [
            make([p for layer in own for p in layer.parameters()])
            for make, own in zip(makes, owned, strict=True)
        ]
        for _ in range(steps):
            for each in optimizers:
                each.zero_grad()
            model(torch.randn(1024, 256)).square().mean().backward()
            for each in (*optimizers, *optimizers[-1:] * again):
                each.step()
        return [line for each in optimizers for line in everything(model, each)]

    return loop


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("makes", "again", "what"),
    [
        ([Own], False, OPTIMIZER_STATE_AWAY),
        ([hooked], False, OPTIMIZER_STATE_AWAY),
        ([Own, hooked], False, OPTIMIZER_STATE_AWAY),
        ([Own, sgd], False, OPTIMIZER_IN_PIECES),
        ([Replacing], False, OPTIMIZER_STATE_AWAY),
        ([Own, Replacing], True, OPTIMIZER_STATE_AWAY),
    ],
    ids=["own", "hooked", "two", "mixed", "replacing", "replacing twice"],
)
def test_the_peak_is_as_predicted(makes: Any, again: bool, what: str, tmp_path: Path) -> None:
    loop = deep(*makes, again=again)
    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    assert why_not(trace) == ""
    adviser = Adviser(trace, DEFAULT_ALLOW)
    chosen = adviser.variants.in_pieces(adviser.problem(1))[-1]
    written = adviser.write(chosen, Decisions(), "chosen by a test")
    written.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.in_pieces is not None
    assert plan.in_pieces.what == what
    read = read_plan(plan, trace)
    assert read.timeline.peak_bytes == plan.predicted_peak_bytes
    computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True)
    assert computed == plain
    assert outcome.actions.skipped == 0, outcome.notes
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
    assert plan.predicted_peak_bytes < 0.9 * plan.unplanned_peak_bytes


@pytest.mark.parametrize("reads", [False, True])
def test_state_that_the_script_reads_between_steps_is_not_planned_away(reads: bool, tmp_path: Path) -> None:
    """It logs a norm of some of it in every iteration, for which all of it comes back."""

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
        optimizer = Own(model.parameters())
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4096, WIDE)).square().mean()
            if reads:
                found += [digest(inner["exp_avg"].norm()) for inner in list(optimizer.state.values())]
            loss.backward()
            optimizer.step()
        return found

    adviser = Adviser(recorded(loop, tmp_path), DEFAULT_ALLOW)
    pieces = [each.pieces for each in adviser.variants.in_pieces(adviser.problem(1))]
    assert any(each is not None and each.whole is not None for each in pieces) is not reads


def bytes_there(optimizer: torch.optim.Optimizer) -> int:
    """Of state, without a look at it."""
    tensors = [each for inner in dict.values(optimizer.state) for each in dict.values(inner)]
    return sum(each.untyped_storage().nbytes() for each in tensors if isinstance(each, Tensor) and each.dim())


@pytest.mark.parametrize("in_pieces", [True, False], ids=["in pieces", "whole"])
def test_what_a_checkpoint_has_looked_at_leaves_again_as_training_goes_on(
    in_pieces: bool, tmp_path: Path
) -> None:
    """It stayed until the next step: each iteration after a checkpoint passed the budget by all of the state."""
    there: list[int] = []
    plan = plan_for()
    if in_pieces:
        action = ScriptAction(
            kind="optimizer", what=OPTIMIZER_IN_PIECES, why="", saved_bytes=0, parameters=1, piece_bytes=8192, tier="disk"
        )  # fmt: skip
        plan = plan_with(action)

    def loop(steps: int) -> list[str]:
        model, found = Net(), []
        optimizer = torch.optim.AdamW(model.parameters()) if in_pieces else Subclass(model.parameters())
        for step in range(steps):
            if step == 3:
                found += everything(model, optimizer)
                there.append(bytes_there(optimizer))
            loss = model(torch.randn(8, WIDE)).square().mean()
            there.append(bytes_there(optimizer))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [*found, *everything(model, optimizer)]

    plain = seeded(loop, STEPS)
    there.clear()
    computed, outcome = enforced(loop, plan, tmp_path, STEPS)
    assert computed == plain, outcome
    looked = there.pop(3)
    assert looked > 50 * max(there), there


class Room:
    """What it was told."""

    def __init__(self) -> None:
        self.looks = list[int]()
        self.left = 0

    def has_room(self, size_bytes: int) -> bool:
        return True

    def make_room(self, size_bytes: int) -> None:
        return None

    def resized(self, storage: torch.UntypedStorage) -> None:
        return None

    def looked_at(self, size_bytes: int) -> None:
        self.looks.append(size_bytes)

    def leaves_again(self) -> None:
        self.left += 1


@pytest.mark.parametrize("in_pieces", [True, False], ids=["in pieces", "whole"])
def test_whoever_holds_the_budget_is_told_of_a_look(in_pieces: bool, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.Adam([weight]) if in_pieces else Subclass([weight])
    iterations, room = Iterations(SimpleNamespace(), TrainingThread()), Room()
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        pieces = OptimizerInPieces(iterations, 1 << 14, tier, whole_from=1 << 12)
        pieces.come_into(room)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        pieces.begin([optimizer])
        pieces.step_begins(optimizer)
        pieces.step_ended(optimizer)
        assert not room.looks
        stepped = room.left
        optimizer.state_dict()
        optimizer.state_dict()
        assert room.looks == [2 * weight.nbytes]
        assert room.left == stepped == 1
        pieces.goes_on()
        assert room.left == 2


def test_of_several_optimizers_the_largest_parameters_of_all_leave(tmp_path: Path) -> None:
    """Of each optimizer as many left as of all together were to."""
    weights = [torch.nn.Parameter(torch.ones(1 << size)) for size in (16, 14, 15)]
    optimizers = [torch.optim.Adam([weight]) for weight in weights]
    iterations = Iterations(SimpleNamespace(), TrainingThread())
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        pieces = OptimizerInPieces(iterations, 1 << 20, tier, 2)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            iterations._stepped.add(optimizer)
        pieces.begin(optimizers)
        assert pieces.away_bytes == 2 * (weights[0].nbytes + weights[2].nbytes)


def test_state_of_a_network_that_is_frozen_as_the_plan_begins_leaves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GAN one network is frozen while the other is stepped: the first iteration began with all of its state, 9 % above the predicted peak."""
    weight = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.Adam([weight])
    tried: list[Tensor] = []
    same = stepping._same_bits

    def told(optimizer: torch.optim.Optimizer, group: Any, example: Tensor) -> bool:
        tried.append(example)
        return same(optimizer, group, example)

    monkeypatch.setattr(stepping, "_same_bits", told)
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        pieces = OptimizerInPieces(Iterations(SimpleNamespace(), TrainingThread()), 1 << 20, tier)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = None
        weight.requires_grad_(False)
        pieces.begin([optimizer])
        assert pieces.away_bytes == 2 * weight.nbytes
        assert tried == [weight], "nothing is trusted untried"


def test_parameters_count_once_and_only_where_they_step_in_pieces(tmp_path: Path) -> None:
    """A wrapper has those of the optimizer that it wraps; another one's cannot be cut, and took their places."""
    small, other = torch.nn.Parameter(torch.ones(1 << 14)), torch.nn.Parameter(torch.ones(1 << 16))
    large = torch.nn.Parameter(torch.ones(1 << 15))
    inner = torch.optim.Adam([small, large])
    wrapper, odd = torch.optim.Adam(inner.param_groups), Subclass([other])
    iterations = Iterations(SimpleNamespace(), TrainingThread())
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        pieces = OptimizerInPieces(iterations, 1 << 20, tier, 2)
        for weight in (small, large, other):
            weight.grad = torch.ones_like(weight)
        for optimizer in (inner, odd):
            optimizer.step()
        for optimizer in (inner, odd, wrapper):
            iterations._stepped.add(optimizer)
        pieces.begin([inner])
        assert pieces.away_bytes == 2 * (small.nbytes + large.nbytes)


def test_state_goes_with_its_optimizer(tmp_path: Path) -> None:
    """Nothing of it waits for the garbage collector: a script that makes a new optimizer has the memory of the old one's state."""
    weight = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.Adam([weight])
    iterations = Iterations(SimpleNamespace(), TrainingThread())
    with contextlib.closing(DiskStore(tmp_path)) as tier:
        pieces = OptimizerInPieces(iterations, 1 << 20, tier)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        pieces.begin([optimizer])
        state = weakref.ref(optimizer.state_dict()["state"][0]["exp_avg"].untyped_storage())
        assert state() is not None, "it has come back"
        gc.disable()
        try:
            del optimizer
            assert state() is None
        finally:
            gc.enable()
