"""The guard beside a plan: what the profiled iteration did not do is held too, it rests elsewhere, and no result changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, UntypedStorage, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.guarding.guard import Guard
from memopt.enforcers.guarding.in_vain import InVain
from memopt.enforcers.guarding.keeping import Keeping
from memopt.enforcers.guarding.standby import Standby, standby_of, staying_bytes
from memopt.enforcers.letting_go import LettingGo
from memopt.enforcers.measurements import Peaks
from memopt.enforcers.session import ApplySession
from memopt.enforcers.tiers.swapped import SwappedStorage
from memopt.enforcers.verify.digests import digest
from memopt.instrument.as_plain import PlainForms
from memopt.instrument.frames import Frames
from memopt.instrument.iterations import Iterations
from memopt.instrument.loop import Loop as WatchedLoop
from memopt.plan import Plan
from tests.support.enforced import Loop, any_mixture, enforced, enforced_from, plan_of, recorded, seeded
from tests.support.enforced import everything as all_of
from tests.support.loops import LOOPS
from tests.support.stepping import everything

STEPS = 8
Step = Callable[[int], int]


def never(step: int) -> int:
    return 0


def once(step: int) -> int:
    return 1


def layers(*, batches: Step = once, looks: Step = never, rows: Step = lambda step: 256, keeps: Step = never, evaluates: Step = never) -> Loop:  # fmt: skip
    """In each step: `looks` forward passes that nothing follows, `batches` with backward of `rows` rows, `keeps` kept rows for good, and an
    evaluation of `evaluates` rows, of 64 times as many that are there."""

    def loop(steps: int) -> list[str]:
        block = [[nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Dropout(0.1)] for _ in range(3)]  # fmt: skip
        model = nn.Sequential(*(nn.Sequential(*each) for each in block))
        optimizer = torch.optim.AdamW(model.parameters())
        found: list[str] = []
        kept: list[Tensor] = []
        for step in range(steps):
            found += [digest(model(torch.randn(rows(step), 64))) for _ in range(looks(step))]
            optimizer.zero_grad()
            for _ in range(batches(step)):
                loss = model(torch.randn(rows(step), 64)).square().mean()
                loss.backward()
                found.append(digest(loss))
            optimizer.step()
            kept.append(torch.zeros(keeps(step)))
            if evaluates(step):
                with torch.no_grad():
                    there = torch.randn(64, evaluates(step), 64)
                    found.append(digest(model(there[0])))
                    del there
        return [*found, *everything(model, optimizer)]

    return loop


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of what each of these loops does in its third step."""
    trace = recorded(layers(), tmp_path_factory.mktemp("profile"))
    made = Adviser(trace, allowed((), ("optimizer",)), 10.0).plan(int(0.65 * trace.peak_bytes))
    return msgspec.structs.replace(made, budget_bytes=int(1.01 * made.predicted_peak_bytes))


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[Guard]:
    found: list[Guard] = []
    end = Guard.end

    def told(self: Guard) -> None:
        found.append(self)
        end(self)

    monkeypatch.setattr(Guard, "end", told)
    return found


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much each iteration passed the budget with nothing left to move."""
    found: list[int] = []
    begin = Guard.new_iteration

    def told(self: Guard) -> None:
        found.append(self.passed.now_bytes)
        begin(self)

    monkeypatch.setattr(Guard, "new_iteration", told)
    return found


def later(count: int) -> Step:
    return lambda step: count if step > 4 else 1


OTHERS = {
    "several batches a step": layers(batches=later(3)),
    "a forward pass with gradients that nothing follows": layers(looks=lambda step: int(step > 4)),
    "more rows": layers(rows=lambda step: 320 if step > 4 else 256),
    "something that is kept": layers(keeps=lambda step: 1 << 15 if step == 4 else 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_budget_is_held_in_other_iterations_than_the_profiled_one(
    name: str, plan: Plan, guards: list[Guard], passed: list[int], tmp_path: Path
) -> None:
    loop, budget = OTHERS[name], plan.budget_bytes
    plain = seeded(loop, 2 * STEPS)
    computed, alone = enforced_from(loop, plan, tmp_path, 2 * STEPS, begins_after=3)
    assert computed == plain
    assert not guards
    assert (alone.measured_peak_bytes or 0) > 1.02 * budget, "the plan alone does not hold it"
    computed, held = enforced_from(loop, plan, tmp_path, 2 * STEPS, begins_after=3, holds_bytes=budget)
    assert computed == plain
    (guard,) = guards
    assert guard.moved > 0
    assert passed[-1] == 0, "held in the end, the first of them taught how"
    if name != "something that is kept":  # which is known only once it has been measured
        assert (held.measured_peak_bytes or 0) < (alone.measured_peak_bytes or 0)
    if name == "several batches a step":
        assert not any(passed)
        assert (held.measured_peak_bytes or 0) <= 1.005 * budget, (
            held
        )  # kernels take a little besides what they give
    assert any("were moved away beside the plan" in note for note in held.notes), held.notes


@pytest.mark.parametrize("teaches", [False, True])
def test_an_evaluation_is_told_apart_from_training(
    teaches: bool, plan: Plan, guards: list[Guard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the peak of what trained, "NOT held", and a reason to record again; unless modules were called so in the profiled iteration."""
    monkeypatch.setattr(Standby, "_will_rest", False)  # awake all along
    seen: list[Standby] = []
    ended = Standby.iteration_ended

    def told(self: Standby, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        self.for_good = True
        ended(self, *args, **kwargs)

    monkeypatch.setattr(Standby, "iteration_ended", told)
    loop = layers(evaluates=lambda step: 2048 if step == 6 else 0)
    plan = msgspec.structs.replace(plan, without_gradients=teaches)
    budget = plan.budget_bytes
    computed, outcome = enforced_from(loop, plan, tmp_path, STEPS + 4, begins_after=3, holds_bytes=budget)
    assert computed == seeded(loop, STEPS + 4)
    (guard,) = guards
    assert (seen[-1].most_bytes > 1.2 * budget) is teaches
    assert (guard.most_without_gradients > 1.2 * budget) is not teaches
    assert (seen[-1].another_phase or seen[-1]._often_needed > 0) is teaches
    if not teaches:
        assert seen[-1].most_bytes <= 1.02 * budget
        assert outcome.outside_peak_bytes >= guard.most_without_gradients


@pytest.mark.parametrize("alone", [True, False])
def test_it_moves_what_the_plan_brings_others_back_at(
    alone: bool, guards: list[Guard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved tensor at whose unpacking a planned swap comes back is watched, whether the swap is made or not."""

    def every_other(problem: Problem) -> Decisions:
        return dict(list(all_of("swap")(problem).items())[::2])

    made = plan_of(recorded(layers(), tmp_path), every_other)
    assert made.moments
    brought = {(moment.module, moment.ordinal) for moment in made.moments}
    planned = {(ref.module, ref.ordinal) for action in made.actions for ref in action.slots}
    assert brought - planned, "some of these stay"

    def from_now_on(standby: Standby) -> None:
        standby.alone = alone

    monkeypatch.setattr(Standby, "_choose", from_now_on)
    larger = layers(rows=lambda step: 256 if step < 3 else 512)
    budget = int(1.1 * made.predicted_peak_bytes)
    plan = msgspec.structs.replace(made, budget_bytes=budget)
    computed, _ = enforced(larger, plan, tmp_path, STEPS, holds_bytes=budget)
    assert computed == seeded(larger, STEPS)
    (guard,) = guards
    assert guard.moved > 0
    assert guard.passed.most_bytes == 0


def test_what_the_script_keeps_of_each_iteration_is_held_before_it_passes_the_budget(
    plan: Plan, guards: list[Guard], tmp_path: Path
) -> None:
    """Few iterations are measured, all of them early: such a run grew on under its kept plan, and said that it was held."""
    loop = layers(keeps=lambda step: 1 << 13)
    budget = int(1.2 * plan.predicted_peak_bytes)
    larger = msgspec.structs.replace(plan, budget_bytes=budget)
    computed, _ = enforced_from(loop, larger, tmp_path, 30, begins_after=3, holds_bytes=budget)
    assert computed == seeded(loop, 30)
    (guard,) = guards
    assert guard.moved > 0
    assert guard.most_bytes <= 1.06 * budget, "what the first have kept is not known"


def test_it_rests_where_all_iterations_are_alike(plan: Plan, guards: list[Guard], tmp_path: Path) -> None:
    enforced_from(layers(), plan, tmp_path, STEPS, begins_after=3, holds_bytes=plan.budget_bytes)
    (guard,) = guards
    assert guard.rests
    assert (guard.moved, guard.most_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("each", "awake"), [(20, [9, 29]), (4, [9, 13, 17, 21, 25, 29, 33]), (1, [*range(6, 37)])]
)
def test_it_stays_awake_the_longer_the_more_often_it_is_needed(
    each: int,
    awake: list[int],
    plan: Plan,
    guards: list[Guard],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each evaluation it stayed awake for 16 iterations, which cost a script of small ops eight times its own."""
    found: list[int] = []
    end = Standby.iteration_ended

    def told(self: Standby, *args: Any, **more: Any) -> None:
        found.extend([] if self.guard.rests else [self.guard._iterations.count])
        end(self, *args, **more)

    monkeypatch.setattr(Standby, "iteration_ended", told)
    loop = layers(looks=lambda step: int(step % each == 8 % each and step > 4))
    computed, _ = enforced_from(loop, plan, tmp_path, 36, begins_after=3, holds_bytes=plan.budget_bytes)
    assert computed == seeded(loop, 36)
    assert found == awake


def test_it_rests_again(plan: Plan, guards: list[Guard], tmp_path: Path) -> None:
    loop = layers(batches=lambda step: 3 if step == 4 else 1)
    assert enforced_from(loop, plan, tmp_path, 30, begins_after=3, holds_bytes=plan.budget_bytes)[0] == seeded(loop, 30)  # fmt: skip
    assert guards[0].moved > 0
    assert guards[0].rests


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_no_loop_changes(loop: Loop, tmp_path: Path, guards: list[Guard], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Under a plan for some of its tensors, and with a budget that makes every other one leave."""
    monkeypatch.setattr("memopt.enforcers.guarding.guard.LEAST_BYTES", 64)
    monkeypatch.setattr(Standby, "_choose", lambda self: None)
    monkeypatch.setattr(InVain, "is_over", lambda self, *_: False)
    plain = seeded(loop, STEPS)
    plan = plan_of(recorded(loop, tmp_path), any_mixture(0))
    woken = msgspec.structs.replace(plan, saved_elements=1, saved_bytes=1)
    computed, outcome = enforced(loop, woken, tmp_path, STEPS, holds_bytes=1)
    assert computed == plain, outcome
    assert outcome.actions.skipped == 0, outcome
    assert not any(guard.rests for guard in guards)


class Played:
    """A guard that moves something in each iteration in which it is woken."""

    budget_bytes, device = 1 << 40, "cpu"
    rests, moved, most_bytes = True, 0, 0
    passed = SimpleNamespace(now_bytes=0, now_training_bytes=0, first_step_bytes=0)

    def tensor_bytes(self) -> int:
        return 0

    def wake(self) -> None:
        self.rests, self.moved = False, self.moved + 1

    def rest(self) -> None:
        self.rests = True

    def goes_on(self) -> None:
        return None

    def new_iteration(self) -> None:
        return None


@pytest.mark.parametrize(
    ("rows", "is_another"),
    [
        ([2, 2, 2, 2], True),
        ([1, 2, 2, 1, 2, 2], True),
        ([2, 1, 2, 1, 2, 1, 2], True),
        ([2, 2, 2, 1, 1, 1, 1, 1, 2], False),
        ([2, 1, 1, 1, 1, 1, 2] * 3, False),
        ([2, 3, 4, 5, 6], False),
        ([*range(2, 18)], True),
        ([0.5] * 16, True),
        ([*[0.5] * 15, 1, *[0.5] * 15], False),
        ([0.8] * 16, False),
    ],
)
def test_another_phase_is_what_most_iterations_of_late_are(
    rows: list[float], is_another: bool, plan: Plan
) -> None:
    """Of an epoch of three batches the last is small, and was the profiled one; or a script has halved its batch, and needs no plan."""
    standby = Standby(cast(Guard, Played()), plan)
    for count in rows:
        standby.new_iteration()
        standby.saved(1, int(count * plan.saved_bytes), int(count * staying_bytes(plan)))
        standby.iteration_ended((plan.saved_tensors, int(count * plan.saved_elements)), None)
    standby.new_iteration()
    assert standby.another_phase is is_another
    if is_another:
        assert standby.unforeseen[-1] == (plan.saved_tensors, int(rows[-1] * plan.saved_elements))
        assert standby.unforeseen_iterations == sum(count != 1 for count in rows)


@pytest.mark.parametrize(
    ("tensors", "size", "is_another"), [((1, 1), 1.0, True), ((1, 3), 1.0, False), ((1, 3), 1.5, True)]
)
def test_where_each_iteration_has_its_own_number_of_ops_another_plan_gains_nothing(
    tensors: tuple[int, int], size: float, is_another: bool, plan: Plan
) -> None:
    """Sentences as long as the profiled one: no two of them save the same tensors, and each needed the guard; longer ones are another matter."""
    standby = Standby(cast(Guard, Played()), plan)
    for step in range(16):
        standby.new_iteration()
        standby.stays(1 << 41)
        standby.iteration_ended((100 + tensors[step % 2], int(size * plan.saved_elements)), None)
    standby.new_iteration()
    assert standby.another_phase is is_another


@pytest.mark.parametrize(("kept", "is_another"), [(0, False), (1 << 20, True)])
def test_iterations_that_save_as_planned_are_no_other_phase(kept: int, is_another: bool, plan: Plan) -> None:
    """A plan one of whose actions was not taken in any of them was made anew three times, with the same action; where the script keeps something
    another one knows of that."""
    standby = Standby(cast(Guard, Played()), plan)
    for _ in range(4):
        standby.new_iteration()
        standby.stays(1 << 41)
        standby._kept_bytes = kept
        standby.iteration_ended((plan.saved_tensors, plan.saved_elements), None)
    standby.new_iteration()
    standby._kept_bytes = kept
    assert standby.another_phase is is_another


@pytest.mark.parametrize(
    ("parts", "largest", "wakes"),
    [
        ([0.5, 0.5], 1, False),
        ([0.25] * 4, 1, False),
        ([0.7], 1, True),
        ([0.5], 2, True),
        ([0.6, 0.6], 1, True),
    ],
)
def test_what_is_saved_before_a_backward_call_is_held_at_once(
    parts: list[float], largest: int, wakes: bool, plan: Plan
) -> None:
    """The planned iteration calls backward twice; a check of a larger batch before it saves less than both together, and has larger ops."""
    standby = Standby(cast(Guard, Played()), plan)

    def iteration(parts: list[float], largest: int) -> bool:
        standby.new_iteration()
        saved = 0.0
        for part in parts:
            saved += part * plan.saved_bytes
            standby.saved(largest, int(saved), int(saved * staying_bytes(plan) / plan.saved_bytes))
            standby.backward_ended()
        standby.iteration_ended((plan.saved_tensors, int(sum(parts) * plan.saved_elements)), None)
        return not standby.guard.rests

    assert not iteration([0.5, 0.5], 1)
    assert iteration(parts, largest) is wakes


@pytest.mark.parametrize(
    ("size", "peaks"), [(1.0, Peaks(1007)), (0.8, Peaks(1007)), (0.5, Peaks()), (1.2, Peaks(0, 1007))]
)
def test_an_iteration_that_saves_little_is_none_that_a_larger_plan_is_for(
    size: float, peaks: Peaks, plan: Plan
) -> None:
    guard = Idle()
    guard.budget_bytes = 1000
    standby = Standby(cast(Guard, guard), plan)
    standby.new_iteration()
    guard.passed = SimpleNamespace(now_bytes=7, now_training_bytes=7, first_step_bytes=0)
    standby.iteration_ended((plan.saved_tensors, int(size * plan.saved_elements)), None)
    assert standby.peaks == peaks


def test_of_a_plan_for_larger_iterations_the_first_one_is_watched_too(plan: Plan) -> None:
    """A validation with gradients came first under a plan for iterations of 3.45 times the size: none of its tensors was to leave."""
    grown = msgspec.structs.replace(plan, grown=3.45)
    standby = Standby(cast(Guard, Played()), grown)
    standby.new_iteration()
    standby.saved(1, 2 * plan.saved_bytes, int(3.4 * staying_bytes(plan)))
    assert standby.guard.rests
    standby.saved(1, 2 * plan.saved_bytes, 2 * plan.saved_bytes)
    assert not standby.guard.rests


def test_beside_a_plan_of_an_iteration_that_saved_nothing_the_guard_wakes_at_the_first_tensor(
    plan: Plan, tmp_path: Path
) -> None:
    """Each third iteration computed gradients of each sample by `torch.func`, and was the recorded one: nothing held the budget in the others."""
    nothing = msgspec.structs.replace(plan, actions=[], saved_tensors=0, saved_elements=0, saved_bytes=0)
    loop = WatchedLoop(Frames(), Iterations(cast(Any, SimpleNamespace())), PlainForms())
    assert standby_of(nothing, loop, tmp_path, 0, cast(Any, SimpleNamespace())) is None
    assert standby_of(nothing, loop, tmp_path, 1000, cast(Any, SimpleNamespace())) is not None
    standby = Standby(cast(Guard, Played()), nothing)
    standby.new_iteration()
    assert standby.guard.rests
    standby.saved(1, 1, 0)
    assert not standby.guard.rests


@pytest.mark.parametrize(("parts", "most"), [([1.0] * 4, 1.0), ([0.5, 1.5, 0.5], 1.5), ([0.5], 1.0)])
def test_batches_that_add_up_to_a_step_are_no_larger_iteration(
    parts: list[float], most: float, plan: Plan
) -> None:
    """Lightning's schedule went over to four batches a step, and the next run planned for 8.34 times as much."""
    standby, saved = Standby(cast(Guard, Played()), plan), 0.0
    standby.new_iteration()
    for part in parts:
        saved += part * plan.saved_bytes
        standby.saved(1, int(saved), 0)
        standby.backward_ended()
    standby.iteration_ended((1, 1), None)
    session = SimpleNamespace(_measurements=SimpleNamespace(most_saved=4.0), _plan=plan, standby=standby)
    assert ApplySession.most_saved.fget(session) == pytest.approx(most, 0.01)  # type: ignore[attr-defined]


class Cycle:
    """Nothing but Python's garbage collector ends it."""

    living = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.me, self.tensor = self, tensor
        Cycle.living += 1
        Cycle.most = max(Cycle.most, Cycle.living)

    def __del__(self) -> None:
        Cycle.living -= 1


def _state_that_comes_late(steps: int) -> list[str]:
    """As Lookahead's slow weights."""
    model, found = nn.Linear(256, 256), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 256)).relu().square().mean()
        loss.backward()
        optimizer.step()
        if step == 3:
            for each in model.parameters():
                optimizer.state[each]["slow_buffer"] = each.detach().clone()
        found.append(digest(loss))
    return [*found, *everything(model, optimizer)]


def _cycles(steps: int) -> list[str]:
    model, found = nn.Linear(256, 256), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            made = model(torch.randn(64, 256)).relu()
            Cycle(made.detach())
            loss = made.square().mean()
            loss.backward()
            optimizer.step()
            found.append(digest(loss))
    finally:
        gc.enable()
    return [*found, *everything(model, optimizer)]


@pytest.mark.parametrize(("loop", "what"), [(_state_that_comes_late, "(optimizer state (slow_buffer) 257 KiB)"), (_cycles, "tensors in reference cycles")])  # fmt: skip
def test_what_a_later_iteration_began_with_is_told(loop: Loop, what: str, tmp_path: Path) -> None:
    made = plan_of(recorded(loop, tmp_path), lambda problem: {})
    computed, outcome = enforced_from(loop, made, tmp_path, STEPS, begins_after=3)
    assert computed == seeded(loop, STEPS)
    (note,) = [each for each in outcome.notes if "began with" in each]
    assert what in note


def test_garbage_is_collected_before_the_guard_gives_up(tmp_path: Path, guards: list[Guard]) -> None:
    """What lies in cycles adds up to far more than the budget leaves room for."""
    made = plan_of(recorded(_cycles, tmp_path), lambda problem: {})
    woken, budget = msgspec.structs.replace(made, saved_elements=1, saved_bytes=1), made.unplanned_peak_bytes
    computed, _ = enforced_from(_cycles, woken, tmp_path, 2 * STEPS, begins_after=3, holds_bytes=budget)
    assert computed == seeded(_cycles, 2 * STEPS)
    assert guards[0].passed.most_bytes == 0, guards[0].passed.words


def test_it_rests_where_all_that_grew_is_garbage(tmp_path: Path, guards: list[Guard]) -> None:
    """It was awake for good after the first measured iteration that began with some: each op took several times as long (torchsde)."""
    made = plan_of(recorded(_cycles, tmp_path), lambda problem: {})
    plain = seeded(_cycles, 2 * STEPS)
    assert Cycle.most == 2 * STEPS
    gc.collect()
    Cycle.most = 0
    computed, _ = enforced_from(_cycles, made, tmp_path, 2 * STEPS, begins_after=3, holds_bytes=made.unplanned_peak_bytes)  # fmt: skip
    assert computed == plain
    assert guards[0].rests
    assert Cycle.most < 2 * STEPS - 3


def test_looking_at_what_is_there_brings_no_state_back(tmp_path: Path) -> None:
    """The first measured iteration under a step in pieces had its peak from this: all of the optimizer's state came back for it."""
    from memopt.enforcers.optimizer.state_elsewhere import StateElsewhere
    from memopt.profiler.known import tell_state

    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    looked: list[int] = []
    optimizer.state = StateElsewhere(optimizer.state, lambda: looked.append(1))
    told: list[str] = []
    tell_state(lambda tensor, category, name: told.append(name), optimizer, {})
    assert len(told) == 6
    assert not looked


def _turns_double(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    found: list[str] = []
    for step in range(steps):
        if step == 5:
            model.double()
            optimizer = torch.optim.AdamW(model.parameters())
        optimizer.zero_grad()
        loss = model(torch.randn(256, 64).to(model[0].weight.dtype)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *everything(model, optimizer)]


def test_it_wakes_at_once_where_what_was_to_leave_is_of_another_data_type(
    guards: list[Guard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many elements are saved, of twice the bytes, and no action of the plan fits them."""
    trace = recorded(_turns_double, tmp_path)
    plan = Adviser(trace, allowed((), ("optimizer",)), 5.0).plan(int(0.85 * trace.peak_bytes))
    woken_in: list[int] = []
    wake = Guard.wake

    def told(self: Guard) -> None:
        woken_in.append(self._iterations.count)
        wake(self)

    monkeypatch.setattr(Guard, "wake", told)
    budget = int(1.01 * plan.predicted_peak_bytes)
    computed, _ = enforced_from(_turns_double, plan, tmp_path, 8, begins_after=3, holds_bytes=budget)
    assert computed == seeded(_turns_double, 8)
    assert woken_in[0] == 5
    assert guards[0].moved


def _logits_that_grow(steps: int) -> list[str]:
    """What is saved last of all is, in the sixth step, three times what it was."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found: list[str] = []
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(torch.randn(512, 64)).repeat(3 if step == 5 else 1, 1)
        loss = nn.functional.log_softmax(logits, 1)[:, 0].mean()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *everything(model, optimizer)]


def test_it_wakes_where_the_last_saved_tensor_alone_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan_of(recorded(_logits_that_grow, tmp_path), lambda problem: {})
    woken_in: list[int] = []
    wake = Guard.wake

    def told(self: Guard) -> None:
        woken_in.append(self._iterations.count)
        wake(self)

    monkeypatch.setattr(Guard, "wake", told)
    computed, _ = enforced_from(
        _logits_that_grow, made, tmp_path, 8, begins_after=3, holds_bytes=made.unplanned_peak_bytes
    )
    assert computed == seeded(_logits_that_grow, 8)
    assert woken_in[:1] == [5]


class Idle(Played):
    """One that finds nothing to do."""

    goes_on = new_iteration = staticmethod(lambda: None)

    def wake(self) -> None:
        self.rests = False


@pytest.mark.parametrize(("for_good", "looks"), [(False, 4), (True, 0)])
def test_nobody_looks_at_what_is_kept_while_the_guard_is_awake(
    for_good: bool, looks: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found too much at the end of the first iteration that it was asked in: what it is for, the guard does for the next 16."""
    asked: list[float] = []

    def more(self: Keeping, room: float) -> int:
        asked.append(room)
        return 1 << 41 if len(asked) == 1 else 0

    monkeypatch.setattr(Keeping, "more_bytes", more)
    standby = Standby(cast(Guard, Idle()), plan)
    standby.for_good = for_good
    for _ in range(18):
        standby.new_iteration()
        standby.saved(0, 0, 0)
        standby.iteration_ended((plan.saved_tensors, 0), None)
    assert len(asked) == looks


@pytest.mark.parametrize(("before", "for_good"), [(0, False), (1, True)])
def test_what_the_step_before_the_plan_has_left_does_not_keep_it_awake(
    before: int, for_good: bool, plan: Plan
) -> None:
    """The first iteration under a plan began with two gradients more; those after it, all alike, were recorded again, as the guard moved something
    in each of them."""
    guard, as_planned = Idle(), (plan.saved_tensors, plan.saved_elements)
    guard.budget_bytes = plan.predicted_peak_bytes
    standby = Standby(cast(Guard, guard), plan)
    for _ in range(before):
        standby.iteration_ended(as_planned, None)
        standby.new_iteration()
    standby.iteration_ended(as_planned, int(1.02 * plan.predicted_peak_bytes))
    assert standby.for_good is for_good


@pytest.mark.parametrize(("budget_share", "alone"), [(1.0, True), (0.9, False)])
def test_the_smallest_plan_there_is_is_not_left_for_the_guard_alone(
    budget_share: float, alone: bool, plan: Plan
) -> None:
    """It counted less than kernels took, and came to 5 % above a plan that was at the floor of a budget below it."""
    budget = int(budget_share * plan.predicted_peak_bytes)
    guard = Idle()
    standby = Standby(cast(Guard, guard), msgspec.structs.replace(plan, budget_bytes=budget))
    standby.for_good = True
    for over in (0, 5000):
        guard.passed = SimpleNamespace(now_bytes=over, now_training_bytes=over, first_step_bytes=0)
        standby.new_iteration()
    assert standby.alone is alone


@pytest.mark.parametrize(("size", "alone"), [(1.0, False), (1.2, True)])
def test_alone_or_beside_the_plan_is_judged_by_what_iterations_save(
    size: float, alone: bool, plan: Plan
) -> None:
    """Texts of many lengths: a longer one passed the budget by more alone than a shorter one beside the plan, and that was taken for the better way."""
    budget = 2 * plan.predicted_peak_bytes
    guard = Idle()
    guard.budget_bytes = budget
    standby = Standby(cast(Guard, guard), msgspec.structs.replace(plan, budget_bytes=budget))
    standby.for_good = True
    for rows, over in ((1.0, budget // 10), (size, budget // 8)):
        standby.new_iteration()
        guard.passed = SimpleNamespace(now_bytes=over, now_training_bytes=over, first_step_bytes=0)
        standby.iteration_ended((plan.saved_tensors, int(rows * plan.saved_elements)), None)
    standby.new_iteration()
    assert standby.alone is alone


@pytest.mark.parametrize("is_here", [True, False])
def test_what_two_ops_ask_for_is_counted_once(is_here: bool) -> None:
    """Tanh, whose gradient is written over, and the layer after it read one tensor. It was here for the second when the guard made room for it once
    more, and a plan was told not to have held, whenever that had to be awake."""
    needs, held, tensor = list[int](), list[UntypedStorage](), torch.ones(8)
    guard: Any = SimpleNamespace(rests=False, active=True, held_again=held.append, _make_room=lambda need, what: needs.append(need))  # fmt: skip
    place: Any = SimpleNamespace(size=(8,), dtype=torch.float32)
    here = tensor.untyped_storage() if is_here else None
    assert Guard.counted(guard, place, lambda: tensor, here) is tensor
    assert needs == [0 if is_here else 32]
    assert {each.data_ptr() for each in held} == {tensor.data_ptr()}


@pytest.mark.parametrize("begun", [True, False])
def test_what_a_copy_back_has_begun_for_is_here(begun: bool) -> None:
    """Or what has never left."""
    rows = torch.ones(8).untyped_storage()
    content = SwappedStorage.__new__(SwappedStorage)
    content.source, content._storage = lambda: None, rows if begun else None  # type: ignore[assignment, return-value]
    handle: Any = SimpleNamespace(content=content)
    assert LettingGo.here(cast(LettingGo, None), handle) is (rows if begun else None)
    content.source = lambda: rows  # type: ignore[assignment, return-value]
    assert LettingGo.here(cast(LettingGo, None), handle) is rows


def test_a_small_iteration_shows_no_room_for_what_is_kept(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard rested then, and the next whole one passed the budget unseen."""
    kept = [1 << 41, 0, 0]
    monkeypatch.setattr(Keeping, "more_bytes", lambda self, room: kept.pop(0))
    guard = Idle()
    standby = Standby(cast(Guard, guard), plan)
    rested = []
    for parts in (1, 4, 1):
        standby.new_iteration()
        standby.iteration_ended((plan.saved_tensors, plan.saved_elements // parts), None)
        rested.append(guard.rests)
    standby.new_iteration()
    assert [*rested, guard.rests] == [True, False, False, True]


def convolutions(images: Step) -> Loop:
    def loop(steps: int) -> list[str]:
        block = [[nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.SiLU()] for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, 24, 1), *(nn.Sequential(*each) for each in block))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        found: list[str] = []
        for step in range(steps):
            loss = model(torch.randn(images(step), 3, 32, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(digest(loss))
        return [*found, *everything(model, optimizer)]

    return loop


def test_it_leaves_room_for_what_ops_take_beside_their_results(tmp_path: Path) -> None:
    plan = plan_of(recorded(convolutions(lambda step: 8), tmp_path), lambda problem: {})
    calls = plan.workspace_calls["aten.convolution_backward.default"]
    assert max(took / touched for touched, took in calls) > 0.5
    budget = int(1.25 * plan.predicted_peak_bytes)
    plan = msgspec.structs.replace(plan, budget_bytes=budget)
    larger = convolutions(lambda step: 8 if step < 2 else 16)

    def peak_bytes(plan: Plan) -> int:
        computed, outcome = enforced(larger, plan, tmp_path, STEPS, measure=True, holds_bytes=budget)
        assert computed == seeded(larger, STEPS)
        assert outcome.measured_peak_bytes is not None
        return outcome.measured_peak_bytes

    assert peak_bytes(msgspec.structs.replace(plan, workspace_calls={})) > 1.03 * budget
    assert peak_bytes(plan) <= 1.01 * budget


def _data_turn_double(steps: int) -> list[str]:
    """Its weights stay what they are, so that nothing but what is saved tells of it."""
    scales = [nn.Parameter(torch.ones(64)) for _ in range(12)]
    optimizer = torch.optim.SGD(scales, 0.01)
    found: list[str] = []
    for step in range(steps):
        out = torch.randn(1024, 64, dtype=torch.float64 if step >= 4 else torch.float32)
        for scale in scales:
            out = nn.functional.gelu(out * scale)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(digest(loss))
    return [*found, *(digest(scale) for scale in scales)]


def test_the_same_elements_of_a_larger_type_are_more(tmp_path: Path, guards: list[Guard]) -> None:
    made = plan_of(recorded(_data_turn_double, tmp_path), lambda problem: {})
    budget = int(1.3 * made.predicted_peak_bytes)
    plan = msgspec.structs.replace(made, budget_bytes=budget)
    computed, _ = enforced(_data_turn_double, plan, tmp_path, STEPS, holds_bytes=budget)
    assert computed == seeded(_data_turn_double, STEPS)
    assert guards[0].moved > 0
