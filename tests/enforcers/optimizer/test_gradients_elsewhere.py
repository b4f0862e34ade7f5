"""Gradients in a tier between backward and the step: the same bits in every loop, and whole for whoever looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.optimizer import gradients_elsewhere
from memopt.enforcers.session import ApplySession, Options
from memopt.enforcers.tiers.per_device import disk_tier
from memopt.enforcers.verify.digests import Digests, digest
from memopt.estimators.simulator import gradients_away
from memopt.estimators.simulator.gradients_away import why_not
from memopt.instrument.iterations import Iterations
from memopt.instrument.memory.meter import living_storages
from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.profiler import updates
from memopt.trace import PHASES
from tests.enforcers.test_optimizer_in_pieces import EACH, STEPS, net, plan_for, training
from tests.support.disks import Full
from tests.support.enforced import Loop, enforced, recorded, seeded
from tests.support.loops import LOOPS
from tests.support.stepping import OPTIMIZERS, everything, stepping

OPTIMIZER = PHASES.index("optimizer")


@pytest.fixture(autouse=True)
def _all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients_elsewhere, gradients_away):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)


def plan(*, late: bool = False, parameters: int = 1) -> Plan:
    made = plan_for("disk", parameters=parameters)
    (action,) = made.script_actions
    action = msgspec.structs.replace(action, gradient_bytes=1, cleared_late=late)
    return msgspec.structs.replace(made, script_actions=[action])


def check(loop: Loop, folder: Path, *, late: bool = False, plain: list[str] | None = None) -> Outcome:
    plain = plain or seeded(loop, STEPS)
    computed, outcome = enforced(loop, plan(late=late), folder, STEPS)
    assert computed == plain, outcome
    return outcome


@pytest.mark.parametrize("optimizer", EACH)
def test_every_optimizer_gives_the_same_bits(optimizer: str, tmp_path: Path, most: list[int]) -> None:
    check(stepping("language", optimizer), tmp_path)
    assert most[0] > 5


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_clipping_finds_them(optimizer: str, late: bool, tmp_path: Path, most: list[int]) -> None:
    check(training(OPTIMIZERS[optimizer]), tmp_path, late=late)
    assert most[0] > 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS)
def test_no_loop_changes(loop: Loop, tmp_path: Path) -> None:
    plain = seeded(loop, STEPS)
    check(loop, tmp_path, plain=plain)
    check(loop, tmp_path, late=True, plain=plain)


def _loop(between: Callable[[nn.Module, torch.optim.Optimizer, int], list[str]]) -> Loop:
    def loop(steps: int) -> list[str]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        found = []
        for step in range(steps):
            loss = model(torch.randn(8, 3, 9, 9), more=step % 3 != 1).square().mean()
            loss.backward()
            found += between(model, optimizer, step)
        return [*found, *everything(model, optimizer)]

    return loop


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Adds up over three backward calls."""
    if step % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    return []


def _zeros(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return [digest(each.grad) for each in model.parameters() if each.grad is not None]


def _looks(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    found = [digest(each.grad) for each in model.parameters() if each.grad is not None]
    optimizer.step()
    found += [digest(each.grad) for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return [*found, *(str(each.grad) for each in model.parameters())]


def _changes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """In place, by another tensor, and by none."""
    first, second, third = model.first.weight, model.second.weight, model.third.weight  # type: ignore[union-attr]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert isinstance(third, Tensor)
    assert third.grad is not None
    assert second.grad is not None
    third.grad.mul_(0.5)
    first.grad = None
    second.grad = second.grad.clone() * 2
    optimizer.step()
    for each in model.parameters():
        each.grad = None
    return []


def _copies(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """A model that is copied has its gradients, as has one that is moved."""
    other = copy.deepcopy(model)
    model.to(torch.float64).to(torch.float32)
    optimizer.step()
    optimizer.zero_grad()
    return [digest(each.grad) for each in other.parameters() if each.grad is not None]


def _never_cleared(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    optimizer.step()
    return []


def _held(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    """Who holds a gradient sees what backward adds to it."""
    held = [each.grad for each in model.parameters()]
    model(torch.randn(8, 3, 9, 9), more=True).square().mean().backward()
    found = [digest(each) for each in held if each is not None]
    optimizer.step()
    optimizer.zero_grad()
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("between", [_stepped, _zeros, _looks, _changes, _copies, _never_cleared, _held])
def test_they_are_whole_whoever_asks(between: Any, late: bool, tmp_path: Path, most: list[int]) -> None:
    check(_loop(between), tmp_path, late=late)
    assert most[0] > 3


def test_one_that_was_looked_at_leaves_again_with_the_next_look(tmp_path: Path) -> None:
    """A log of norms now and then: all of them came back, and none was told of."""
    away: list[int] = []
    told: list[int] = []

    class Room:
        def looked_at(self, size_bytes: int) -> None:
            told.append(size_bytes)

    tier = disk_tier(tmp_path)
    gradients = gradients_elsewhere.GradientsElsewhere(tier)
    gradients.room = cast(Any, Room())
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradients.install()
    try:
        gradients.watch([optimizer])
        model(torch.randn(8, 40)).square().mean().backward()
        gradients.backward_ended()
        plain = [digest(gradients.copy_of(each)) for each in model.parameters()]
        seen = []
        for each in model.parameters():
            assert each.grad is not None
            seen.append(digest(each.grad))
            away.append(sum(gradients.holds(other) for other in model.parameters()))
        held = [each.grad for each in model.parameters()]
        away.append(sum(gradients.holds(each) for each in model.parameters()))
        optimizer.zero_grad()
    finally:
        gradients.remove()
        tier.close()
    assert seen == plain == [digest(each) for each in held if each is not None]
    assert away == [3, 3, 3, 3, 0]
    assert told == [0]


def test_at_the_scripts_end_gradients_come_back_to_who_looks_alone(tmp_path: Path) -> None:
    """All of them at once had no room on a device that was filled to the budget."""
    tier = disk_tier(tmp_path)
    gradients = gradients_elsewhere.GradientsElsewhere(tier)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
    first, *others = model.parameters()
    gradients.install()
    try:
        gradients.watch([torch.optim.SGD(model.parameters(), 0.1)])
        model(torch.randn(8, 40)).square().mean().backward()
        gradients.backward_ended()
        plain = digest(gradients.copy_of(first))
        gradients.rest()
        away = [gradients.holds(each) for each in model.parameters()]
        assert first.grad is not None
        assert digest(first.grad) == plain
        gradients.read(others[0], "")
        left = [gradients.holds(each) for each in model.parameters()]
        model(torch.randn(8, 40)).square().mean().backward()
        sent = gradients.holds(first)
    finally:
        gradients.remove()
        tier.close()
    assert away == [True] * 4
    assert left == [False, False, True, True]
    assert not sent


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_and_a_hook_of_the_scripts(tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3))
        optimizer = torch.optim.Adam(model.parameters())
        found: list[str] = []

        def after(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found.append(digest(parameter.grad))

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(after)
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 40)).square().mean()
            loss.backward(create_graph=step % 2 == 1)
            if step % 2:
                sum(each.grad.square().sum() for each in model.parameters()).backward()  # type: ignore[union-attr,misc]
            optimizer.step()
        for each in model.parameters():
            each.grad = None
        return [*found, *everything(model, optimizer)]

    check(loop, tmp_path)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.enforcers.tiers.disk.DiskStore", Full)
    outcome = check(training(OPTIMIZERS["adamw"]), tmp_path)
    assert any("the disk is full" in note for note in outcome.notes)


def test_they_are_away_after_backward(tmp_path: Path) -> None:
    """None of their size lives then, nor after the step."""
    seen: list[int] = []

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            seen.append(sum(each.nbytes() for each in living_storages("cpu")))
            optimizer.step()
            seen.append(sum(each.nbytes() for each in living_storages("cpu")))
        return everything(model, optimizer)

    plain = seeded(loop, 3)
    before, seen[:] = list(seen), []
    computed, _ = enforced(loop, plan(), tmp_path, 3)
    assert computed == plain
    assert [a - b for a, b in zip(before, seen, strict=True)] == pytest.approx([2 << 20] * 6, rel=0.01)


def _digested(session: ApplySession | None, digests: Digests) -> None:
    """The steps of a loop, told to `digests`."""
    iterations = Iterations(digests, optimizers=1)
    if session is not None:
        digests.gradient_of = session.gradient_of
        session.install()
    else:
        iterations.install()
    try:
        seeded(stepping("language", "adamw"), STEPS)
    finally:
        if session is not None:
            session.finished()
        else:
            iterations.remove()
        digests._file.close()


def test_verify_digests_gradients_where_they_are(tmp_path: Path, most: list[int]) -> None:
    plain, enforced_too = Digests(tmp_path / "plain", STEPS + 1), Digests(tmp_path / "enforced", STEPS + 1)
    _digested(None, plain)
    options = Options(swap_dir=tmp_path, measure=False)
    _digested(ApplySession(plan(), options, also=enforced_too), enforced_too)
    assert most[0] > 5
    lines = [
        [msgspec.json.decode(line)["gradients"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("plain", "enforced")
    ]
    assert lines[0] == lines[1]
    assert all(len(gradients) > 5 for gradients in lines[0])


def with_gradients_away(adviser: Adviser) -> list[Problem]:
    """The ways to step in pieces in which gradients leave too."""
    ways = adviser.variants.in_pieces(adviser.problem(1))
    return [each for each in ways if each.pieces is not None and each.pieces.gradient_bytes]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "sgd"])
def test_the_peak_is_as_predicted(optimizer: str, late: bool, clip: bool, tmp_path: Path) -> None:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        stepped = OPTIMIZERS[optimizer](model.parameters())
        for _ in range(steps):
            if not late:
                stepped.zero_grad()
            loss = model(torch.randn(2, 512)).square().mean()
            if late:
                stepped.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepped.step()
        return everything(model, stepped)

    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    assert why_not(trace) == ""
    adviser = Adviser(trace, DEFAULT_ALLOW)
    chosen = with_gradients_away(adviser)
    if not chosen:
        assert clip
        return
    written = adviser.write(chosen[0], Decisions(), "chosen by a test")
    computed, outcome = enforced(loop, written, tmp_path, STEPS, measure=True)
    assert computed == plain
    assert outcome.actions.skipped == 0, outcome.notes
    assert outcome.measured_peak_bytes == pytest.approx(written.predicted_peak_bytes, rel=0.02)


def test_where_all_gradients_are_small_none_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded(stepping("language", "adamw"), tmp_path)
    monkeypatch.setattr(gradients_away, "LEAST_BYTES", 2**40)
    assert not with_gradients_away(Adviser(trace, DEFAULT_ALLOW))


@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_leaves_before_the_next_one_is_made(clip: bool, tmp_path: Path) -> None:
    """A large one behind a layer without parameters; what clipping reads all of is on the device once, in the step as well."""
    sizes = [512 * 1024 * 4, 1024 * 1024 * 4]

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4)
        )
        stepped = OPTIMIZERS["sgd-momentum"](model.parameters())
        for _ in range(steps):
            loss = model(torch.randn(256 if clip else 2, 512)).square().mean()
            stepped.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepped.step()
        return everything(model, stepped)

    plain = seeded(loop, STEPS)
    adviser = Adviser(recorded(loop, tmp_path), DEFAULT_ALLOW)
    (chosen,) = with_gradients_away(adviser)
    written = adviser.write(chosen, Decisions(), "chosen by a test")
    computed, outcome = enforced(loop, written, tmp_path, STEPS, measure=True)
    assert computed == plain
    most = sum(sizes) if clip else max(sizes)
    assert written.predicted_peak_bytes < (1.25 if clip else 1.1) * (sum(sizes) + most)
    assert outcome.measured_peak_bytes == pytest.approx(written.predicted_peak_bytes, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adagrad"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_large_gradient_is_stepped_part_by_part(optimizer: str, kind: torch.dtype, tmp_path: Path) -> None:
    """A model that is one matrix and little else: in the step a piece of its gradient is there, and the matrix comes back when that has left."""

    def loop(steps: int) -> list[str]:
        embed = nn.Embedding(12000, 64, dtype=kind)
        model = nn.Sequential(*[nn.Linear(64, 64, dtype=kind) for _ in range(3)])
        stepped = OPTIMIZERS[optimizer]([*embed.parameters(), *model.parameters()])
        for _ in range(steps):
            stepped.zero_grad()
            model(embed(torch.randint(12000, (4,)))).square().mean().backward()
            stepped.step()
        return everything(nn.ModuleList([embed, model]), stepped)

    adviser = Adviser(recorded(loop, tmp_path), DEFAULT_ALLOW)
    chosen = with_gradients_away(adviser)[-1]
    written = adviser.write(chosen, Decisions(), "chosen by a test")
    computed, outcome = enforced(loop, written, tmp_path, STEPS, measure=True)
    assert computed == seeded(loop, STEPS)
    assert outcome.actions.skipped == 0, outcome.notes
    matrix = 12000 * 64 * kind.itemsize
    assert written.predicted_peak_bytes < 2.2 * matrix, "the matrix, and its gradient while backward makes it"
    assert outcome.measured_peak_bytes == pytest.approx(written.predicted_peak_bytes, rel=0.02)
    live = chosen.simulator.run({}).high_bytes.tolist()
    stepping = [at for at, phase in zip(live, chosen.view.phase, strict=True) if phase == OPTIMIZER]
    assert max(stepping) < 1.5 * matrix


def test_gradients_that_processes_exchange_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: list[int]
) -> None:
    """DDP's reducer writes the mean over all processes into them from C++."""
    loop = stepping("language", "adamw")
    plain = seeded(loop, STEPS)
    for module in (gradients_elsewhere, updates):
        monkeypatch.setattr(module, "several_processes", lambda: True)
    assert recorded(loop, tmp_path).updates.gradients_stay == "several processes train together"  # type: ignore[union-attr]
    assert enforced(loop, plan(), tmp_path, STEPS)[0] == plain
    assert most == [0]


def test_those_that_are_there_leave_when_a_plan_begins_in_the_midst_of_a_run(tmp_path: Path) -> None:
    """The first iteration under a plan does not begin with what its script clears late."""
    from memopt.enforcers.session import ApplySession, Options
    from memopt.instrument.as_plain import PlainForms
    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.loop import Loop as Watched

    session = ApplySession(plan(late=True), Options(swap_dir=tmp_path, measure=False))
    seen: list[int] = []

    class Late:
        """Listens to the loop, and hands it to the session after two iterations."""

        def iteration_ended(self, count: int, milliseconds: float) -> None:
            if count == 2:
                seen.append(_big())
                session.begin_in(watched)
                seen.append(_big())

        def __getattr__(self, name: str) -> Any:
            return getattr(session, name)

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            loss = model(torch.randn(1, 256)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return everything(model, optimizer)

    plain = seeded(loop, STEPS)
    frames = Frames()
    iterations = Iterations(Late(), frames.thread)
    iterations.install()
    watched = Watched(frames, iterations, PlainForms())
    try:
        computed = seeded(loop, STEPS)
    finally:
        session.finished()
        iterations.remove()
    assert computed == plain
    assert seen[0] - seen[1] == 8 * 256 * 256 * 4


def _big() -> int:
    return sum(each.nbytes() for each in living_storages("cpu") if each.nbytes() == 256 * 256 * 4)
