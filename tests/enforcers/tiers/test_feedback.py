"""A swap that comes late starts earlier in the next iteration, one that comes early and over the budget later; bits stay as they are."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.lookup import tables_of
from memopt.enforcers.measurements import Measurements
from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.tiers.feedback import Feedback
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.decision import Decision
from memopt.plan import Action, Moment, Plan, SlotRef
from memopt.trace import Trace
from tests.support.enforced import enforced, problem_of, recorded, seeded, state_digests

PAUSE_S = 0.03
"""What each layer's backward takes; a copy in takes half of it."""


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return gradient


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.linear(x).tanh())


def slow_net(steps: int) -> list[str]:
    model = torch.nn.Sequential(*[Layer() for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(1024, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(slow_net, tmp_path_factory.mktemp("slow"))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DiskStore._read_piece

    def slow(*args: object) -> object:
        time.sleep(PAUSE_S / 2)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "_read_piece", slow)


def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Milliseconds that each iteration waits for copies in; filled as they end."""
    found: list[float] = []
    ended = Feedback.iteration_ended

    def noting(feedback: Feedback, peak_bytes: int | None) -> None:
        found.append(feedback.waited_ms)
        ended(feedback, peak_bytes)

    monkeypatch.setattr(Feedback, "iteration_ended", noting)
    return found


def inner(problem: Problem) -> list[int]:
    """Storages that backward does not begin with."""
    found = sorted(problem.candidates, key=lambda s: problem.view.saved[s].first_use)
    return found[len(found) // 3 :]


def on_demand(problem: Problem) -> Decisions:
    return {s: Decision(kind="swap", tier="disk") for s in inner(problem)}


def at_once(problem: Problem) -> Decisions:
    first = int(problem.triggers[0])
    return {s: Decision(kind="swap", tier="disk", prefetch_op=first) for s in inner(problem)}


def plan_for(trace: Trace, decisions: Decisions, budget_bytes: int) -> Plan:
    adviser, problem = problem_of(trace, budget_bytes)
    return adviser.write(problem, decisions, "chosen by a test")


def test_what_came_late_starts_earlier_until_nothing_waits(
    trace: Trace, slow_disk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(trace, on_demand(problem_of(trace)[1]), 2 * trace.peak_bytes)
    assert len(plan.actions) >= 4
    waited = waits(monkeypatch)
    computed, outcome = enforced(slow_net, plan, tmp_path, 5)
    assert computed == seeded(slow_net, 5)
    assert waited[0] > 1000 * PAUSE_S / 2 * (len(plan.actions) - 1)
    assert median(waited[2:]) < 0.1 * waited[0], "one may be disturbed by others on the machine"
    (told,) = [note for note in outcome.notes if "earlier than planned" in note]
    assert told.startswith(f"of the copies back of {len(plan.actions)} swapped tensors ")
    assert outcome.actions.done == len(plan.actions)


def test_nothing_moves_to_where_its_bytes_would_pass_the_budget(
    trace: Trace, slow_disk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(trace, on_demand(problem_of(trace)[1]), 2 * trace.peak_bytes)
    full = [msgspec.structs.replace(each, room_bytes=0) for each in plan.moments]
    waited = waits(monkeypatch)
    _, outcome = enforced(slow_net, msgspec.structs.replace(plan, moments=full), tmp_path, 3)
    assert waited[-1] > 0.5 * waited[0]
    assert not any("than planned" in note for note in outcome.notes)


def test_what_came_early_and_over_the_budget_starts_later(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, problem = problem_of(trace)
    low, high = (problem.run(chosen(problem)).peak_bytes for chosen in (on_demand, at_once))
    budget = (low + high) // 2
    assert low < 0.98 * budget
    plan = plan_for(trace, at_once(problem), budget)
    assert plan.predicted_peak_bytes == high > budget
    peaks: list[int | None] = []
    ended = Measurements.iteration_ended

    def noting(*args: Any, **named: Any) -> int | None:
        peaks.append(ended(*args, **named))
        return peaks[-1]

    monkeypatch.setattr(Measurements, "iteration_ended", noting)
    computed, outcome = enforced(slow_net, plan, tmp_path, 7, measure=True)
    assert computed == seeded(slow_net, 7)
    assert peaks[2] is not None
    assert peaks[5] is not None
    assert peaks[5] <= budget < peaks[2]
    assert any("later than planned" in note for note in outcome.notes)


# --- exact moves, on a plan of one swap and five moments


def slot(ordinal: int) -> SlotRef:
    return SlotRef(module="net#0", ordinal=ordinal, node="", slot="", dtype="float32", dims=1)


def one_swap(plan: Plan, rooms: list[int], *, start: int | None, due: int | None = None) -> Feedback:
    action = Action(
        kind="swap",
        storage=0,
        label="x",
        size_bytes=100,
        slots=[slot(9)],
        why="",
        saved_bytes=0,
        cost_ms=0.0,
        tier="disk",
        prefetch=None if start is None else slot(start),
        away_by=None if due is None else slot(due),
        away_at_use=due is not None,
    )
    moments = [
        Moment(module="net#0", ordinal=n, at_ms=10.0 * n, room_bytes=room) for n, room in enumerate(rooms)
    ]
    device = msgspec.structs.replace(plan.device, kind="cuda")  # the plan's clock counts, not the host's
    made = msgspec.structs.replace(
        plan, actions=[action], moments=moments, device=device, budget_bytes=1000, predicted_peak_bytes=1000
    )
    return Feedback(made, tables_of(made))


def start_after(
    feedback: Feedback, *, waited_ms: float, used: int, peak_bytes: int | None = None, is_later: bool = False
) -> int:
    """Where the swap starts after an iteration like this one."""
    for number in range(used + 1):
        feedback.reach(number)
    use = replace(feedback.use_of(0, 100), begun=max(feedback._starts[0], 0), used=used, waited_ms=waited_ms)
    if feedback._starts[0] < 0:
        use.begun = used
    use.is_later = is_later
    feedback._round.uses = [use]
    feedback.iteration_ended(peak_bytes)
    return feedback._starts[0]


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return plan_for(trace, {}, 2 * trace.peak_bytes)


def test_a_late_swap_starts_a_quarter_more_than_its_copy_before_its_use(plan: Plan) -> None:
    assert start_after(one_swap(plan, [500] * 5, start=None), waited_ms=8, used=4) == 3
    assert start_after(one_swap(plan, [500] * 5, start=None), waited_ms=9, used=4) == 2
    assert start_after(one_swap(plan, [500] * 5, start=3), waited_ms=9, used=4) == 1


def test_no_swap_starts_before_its_copy_out_is_due(plan: Plan) -> None:
    assert start_after(one_swap(plan, [500] * 5, start=None, due=1), waited_ms=99, used=4) == 2


def test_a_late_swap_starts_after_the_last_moment_without_room(plan: Plan) -> None:
    assert start_after(one_swap(plan, [500, 500, 104, 500, 500], start=None), waited_ms=99, used=4) == 3
    assert start_after(one_swap(plan, [500, 500, 105, 500, 500], start=None), waited_ms=99, used=4) == 0


def test_what_is_asked_for_after_its_moment_needs_room_there_too(plan: Plan) -> None:
    """A weight that comes back when backward is over: at the last moment the peak may still be ahead."""
    for last, start in ((104, -1), (500, 0)):
        feedback = one_swap(plan, [500, 500, 500, 500, last], start=None)
        assert start_after(feedback, waited_ms=99, used=4, is_later=True) == start
    assert start_after(one_swap(plan, [500, 500, 500, 500, 104], start=None), waited_ms=99, used=4) == 0


def test_what_was_measured_above_the_prediction_is_no_room(plan: Plan) -> None:
    feedback = one_swap(plan, [500, 150, 500, 500, 500], start=None)
    assert start_after(feedback, waited_ms=99, used=4, peak_bytes=1100) == 2


def test_an_early_swap_starts_where_the_measured_peak_leaves_room(plan: Plan) -> None:
    rooms = [500, 30, 500, 500, 500]
    assert start_after(one_swap(plan, rooms, start=0), waited_ms=0, used=4, peak_bytes=1020) == 0
    assert start_after(one_swap(plan, rooms, start=0), waited_ms=0, used=4, peak_bytes=1040) == 2
    assert start_after(one_swap(plan, rooms, start=0), waited_ms=0, used=4) == 0


@pytest.mark.parametrize(
    ("swaps", "words"),
    [
        (1, "of the copies back of 1 swapped tensor the run began 1 earlier "),
        (2, "of the copies back of 2 swapped tensors the run began 2 earlier "),
    ],
)
def test_one_swap_is_told_as_one(swaps: int, words: str) -> None:
    feedback = SimpleNamespace(_at=[None] * 9, _starts=dict.fromkeys(range(swaps), 2), _planned=dict.fromkeys(range(swaps), 4), first_ms=1.0, last_ms=0.0)  # fmt: skip
    assert Feedback.told(feedback).startswith(words)  # type: ignore[arg-type]
