"""The optimizer steps inside backward: the same bits in every loop where it may, the peak as predicted, and no step where it may not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.advisors.advise import Adviser, advise
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.costs import hooks_ms
from memopt.estimators.simulator.in_backward import in_backward, why_not
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import Plan
from memopt.trace import PHASES, Trace, load_trace
from tests.estimators.test_simulator_memory import same
from tests.support.enforced import Loop, any_mixture, enforced, enforced_from, recorded, seeded
from tests.support.loops import LOOPS
from tests.support.profiled import unexplained
from tests.support.stepping import (
    OPTIMIZERS,
    REFUSED,
    TASKS,
    everything,
    image_loss,
    images,
    stepping,
)

STEPS = 6
NOT_LOOKED_AT = "memopt.instrument.stepping.premises.speaks_of_gradients", lambda: ""


@pytest.fixture(autouse=True)
def _gradients_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the tests speak of gradients, which would be reason enough to refuse any loop that lives in them."""
    monkeypatch.setattr(*NOT_LOOKED_AT)


def moved_plan(trace: Trace, choose=lambda problem: Decisions()) -> Plan:
    """The plan that steps inside backward, with what `choose` decides besides."""
    adviser = Adviser(trace, DEFAULT_ALLOW)
    problem = adviser.variants.in_backward(adviser.problem(1))
    assert problem is not None, why_not(trace)
    return adviser.write(problem, choose(problem), "chosen by a test")


def check(loop: Loop, folder: Path, *, mixtures: int = 0, alike: bool = True) -> None:
    """`alike`: each step computes what the recorded one did."""
    plain = seeded(loop, STEPS)
    trace = recorded(loop, folder)
    assert seeded(loop, STEPS) == plain, "the loop does not repeat, or the profiler left something behind"
    assert why_not(trace) == ""
    for choose in (lambda problem: Decisions(), *map(any_mixture, range(mixtures))):
        plan = moved_plan(trace, choose)
        computed, outcome = enforced(loop, plan, folder, STEPS, measure=True)
        assert computed == plain, outcome
        assert outcome.actions.skipped == 0, outcome
        if alike and not plan.actions:
            assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=2e-4)
    assert torch.Tensor.grad is torch._C.TensorBase.grad


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    check(stepping("language", optimizer), tmp_path, alike=optimizer != "radam")  # its sixth step is another


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adamw"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_with_other_actions(task: str, optimizer: str, tmp_path: Path) -> None:
    check(stepping(task, optimizer, scheduler=True, clear_last=task == "images"), tmp_path, mixtures=3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    loop, reason = REFUSED[name]
    assert reason in why_not(recorded(loop, tmp_path))


@pytest.fixture(scope="module")
def plan_for_images(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*NOT_LOOKED_AT)
        return moved_plan(recorded(stepping("images", "sgd"), tmp_path_factory.mktemp("images")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", [*LOOPS, *(loop for loop, _ in REFUSED.values())])
def test_a_plan_for_another_loop_changes_no_result(loop: Loop, tmp_path: Path, plan_for_images: Plan) -> None:
    """Applied where it does not belong, it does nothing, or ends the run before anything could differ: never another result."""
    plain = seeded(loop, STEPS)
    plan = plan_for_images
    looks = loop in LOOPS or loop is REFUSED["logged after"][0]
    with contextlib.suppress(NotPossibleHere) if looks else contextlib.nullcontext():
        computed, outcome = enforced(loop, plan, tmp_path, STEPS)
        assert computed == plain
        assert outcome.actions.skipped == 1


def loop_that(at: int, happens: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Loop:
    """Steps right after backward; in step `at`, `happens` before the gradients are cleared."""

    def loop(steps: int) -> list[str]:
        model = images()
        optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
        found = []
        for step in range(steps):
            if step == at:
                happens(model, optimizer)
            optimizer.zero_grad()
            loss = image_loss(model)
            loss.backward()
            optimizer.step()
            found += [digest(loss), *everything(model, optimizer)]
        return found

    return loop


def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert model[0].conv1.weight.grad is not None


@pytest.mark.parametrize("begins_after", [1, 3])
def test_the_first_iteration_of_a_plan_that_begins_in_the_midst_of_a_run_is_one_of_it(
    begins_after: int, tmp_path: Path
) -> None:
    """What the steps before it have shown is known: its parameters are stepped inside backward at once."""
    loop = loop_that(-1, look)
    plain = seeded(loop, begins_after + 1)
    plan = moved_plan(recorded(loop, tmp_path))
    computed, outcome = enforced_from(loop, plan, tmp_path, begins_after + 1, begins_after=begins_after)
    assert computed == plain
    assert outcome.actions.done == 1, outcome
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=2e-4)


def clears_late(asks_at: int = -1) -> Loop:
    """Clears gradients once it has run forward; in step `asks_at` it reads one before."""

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
        found = []
        for step in range(steps):
            loss = model(torch.randn(8, 256)).square().mean()
            if step == asks_at:
                found.append(digest(model[1].weight.grad))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *everything(model, optimizer)]
        return found

    return loop


@pytest.mark.parametrize("asks_at", [-1, 2])
def test_gradients_of_the_step_before_a_plan_are_elsewhere_until_they_are_cleared(
    asks_at: int, tmp_path: Path, most: list[int]
) -> None:
    """They would be there beside the activations of the first iteration under it, and of no other."""
    plan = moved_plan(recorded(clears_late(), tmp_path))
    loop = clears_late(asks_at)
    plain = seeded(loop, 3)
    computed, outcome = enforced_from(loop, plan, tmp_path, 3, begins_after=2)
    assert computed == plain
    assert most == [8]  # biases, too
    assert outcome.actions.done == 1, outcome
    assert torch.Tensor.grad is torch._C.TensorBase.grad
    if asks_at < 0:
        assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, abs=64)


@pytest.mark.parametrize("asks_at", [-1, 1])
def test_so_are_those_of_the_first_step_under_a_kept_plan(
    asks_at: int, tmp_path: Path, most: list[int]
) -> None:
    """That step is the optimizer's own: the second iteration would hold them."""
    plan = moved_plan(recorded(clears_late(), tmp_path))
    loop = clears_late(asks_at)
    computed, outcome = enforced(loop, plan, tmp_path, 4)
    assert computed == seeded(loop, 4)
    assert most == [8]
    assert outcome.actions.done == 1, outcome


def two_phases(looks: bool = False) -> Loop:
    """A second optimizer trains the last layer alone: gradients of the others add up, uncleared, and nobody uses them."""

    def loop(steps: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        optimizer = OPTIMIZERS["sgd-momentum"](model.parameters())
        found = []
        for step in range(steps):
            if step == 5:
                optimizer = OPTIMIZERS["sgd-momentum"](model[2].parameters())
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *everything(model, optimizer)]
        if looks:
            found.append(digest(model[0].weight.grad))
        return found

    return loop


def test_gradients_that_nobody_trains_any_more_do_not_end_the_run(tmp_path: Path) -> None:
    plan = moved_plan(recorded(two_phases(), tmp_path))
    computed, outcome = enforced(two_phases(), plan, tmp_path, 9)
    assert computed == seeded(two_phases(), 9)
    assert outcome.actions.done == 1, outcome
    with pytest.raises(NotPossibleHere, match="looks at a gradient after it was used"):
        enforced(two_phases(looks=True), plan, tmp_path, 9)


def copy_whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copy.deepcopy(model)


def step_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def keep(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad = lambda: None


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_through_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def drop_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def gradients_of_inputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    torch.autograd.grad(F.cross_entropy(model(x), torch.arange(4)), x)


def another_phase(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Trains something else, while the gradients of the last step are still there."""
    other = nn.Linear(4, 4)
    F.cross_entropy(other(torch.randn(4, 4)), torch.arange(4)).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


def compile_it(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch.compile looks whether each parameter that a region is given has a gradient."""
    torch.compile(lambda x: model(x), backend="eager")(torch.randn(4, 3, 16, 16))


def look_in_a_region(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    torch.compile(lambda x: x + weight.grad, backend="eager")(torch.ones(1))


def fail_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    x.register_hook(raise_it)
    with contextlib.suppress(ZeroDivisionError):
        F.cross_entropy(model(x), torch.arange(4)).backward()


def raise_it(gradient: Tensor) -> None:
    raise ZeroDivisionError


def run_at(
    happens: Callable[[nn.Module, torch.optim.Optimizer], None], folder: Path
) -> tuple[list[str], list[str]]:
    """(what the loop computes plainly, and under a plan that was made where nothing happened)."""
    loop = loop_that(4, happens)
    plan = moved_plan(recorded(loop_that(99, keep), folder))
    return seeded(loop, STEPS), enforced(loop, plan, folder, STEPS)[0]


@pytest.mark.parametrize(
    "happens",
    [
        zero_in_place,
        zero_through_the_model,
        drop_by_hand,
        fail_in_backward,
        copy_whole,
        gradients_of_inputs,
        another_phase,
        compile_it,
    ],
)
def test_gradients_cleared_in_any_way(happens, tmp_path: Path) -> None:
    plain, computed = run_at(happens, tmp_path)
    assert computed == plain


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (look, "looks at a gradient after it was used"),
        (look_in_a_region, "looks at a gradient after it was used"),
        (step_again, "second step with the same gradients"),
        (keep, "adds to gradients that it has not cleared"),
    ],
)
def test_a_gradient_that_is_gone_ends_the_run(happens, why: str, tmp_path: Path) -> None:
    """Before step 4 nothing told that the script would want its gradients once more: it stops, with the reason."""
    with pytest.raises((NotPossibleHere, RuntimeError), match=why):  # the compiler gives it another type
        run_at(happens, tmp_path)
    assert torch.Tensor.grad is torch._C.TensorBase.grad


@pytest.mark.parametrize("ends_after", [3, 4])
def test_a_plan_that_ends_before_the_script_leaves_it_to_step_by_itself(
    ends_after: int, tmp_path: Path
) -> None:
    """The script may look at what nobody has let go of: in step 4, after the plan, at its own gradient."""
    loop = loop_that(5, look)
    plan = moved_plan(recorded(loop_that(99, keep), tmp_path))
    computed, outcome = enforced_from(loop, plan, tmp_path, STEPS, begins_after=1, ends_after=ends_after)
    assert computed == seeded(loop, STEPS)
    assert outcome.actions.done == 1, outcome
    assert torch.Tensor.grad is torch._C.TensorBase.grad


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (look, "looks at a gradient after it was used"),
        (look_in_a_region, "looks at a gradient after it was used"),
        (step_again, "second step with the same gradients"),
    ],
)
def test_gradients_of_a_plan_that_has_ended_are_missed(happens, why: str, tmp_path: Path) -> None:
    plan = moved_plan(recorded(loop_that(99, keep), tmp_path))
    with pytest.raises((NotPossibleHere, RuntimeError), match=why):
        enforced_from(loop_that(4, happens), plan, tmp_path, STEPS, begins_after=1, ends_after=4)
    assert torch.Tensor.grad is torch._C.TensorBase.grad


def test_the_moved_trace_is_whole(tmp_path: Path) -> None:
    """Nothing appears or is lost by moving: a profile of the moved iteration is accepted, and bytes at each op are explained as before."""
    for optimizer in ("adamw", "adamw-foreach"):
        trace = recorded(stepping("language", optimizer), tmp_path)
        moved = in_backward(trace)
        path = tmp_path / "moved.profile.json.gz"
        moved.save(path)
        assert load_trace(path) == moved
        rows = zip(trace.updates.parameter, trace.updates.gradient, strict=True)
        freed = sum(trace.storages.size_bytes[gradient] for _, gradient in rows)
        assert moved.base_bytes == trace.base_bytes - freed
        first = moved.ops.phase.index(PHASES.index("backward"))
        assert moved.ops.live_bytes[first] == trace.ops.live_bytes[trace.ops.phase.index(1)]
        names = [sorted(t.op_name(op) for op in range(t.op_count)) for t in (trace, moved)]
        assert names[0] == names[1] or optimizer == "adamw-foreach"
        assert min(unexplained(moved)) >= min(unexplained(trace)) - 64
        assert max(unexplained(moved)) <= max(unexplained(trace)) + 64


def test_what_the_simulator_remembers_of_a_moved_trace(tmp_path: Path) -> None:
    view = TraceView(in_backward(recorded(stepping("images", "adamw"), tmp_path)))
    warm = Simulator(view)
    problem = Problem(view, warm, 1, DEFAULT_ALLOW)
    for seed in range(12):
        same(view, warm, any_mixture(seed)(problem))


def test_auto_moves_the_step_where_that_is_enough(tmp_path: Path) -> None:
    trace = recorded(stepping("language", "adamw-foreach"), tmp_path)
    peak = in_backward(trace).peak_bytes
    assert peak < 0.95 * trace.peak_bytes
    plan = advise(trace, budget_bytes=int(1.01 * peak))
    assert plan.in_backward is not None
    assert plan.actions == []
    assert plan.predicted_peak_bytes == peak
    assert plan.in_backward.parameters == len(trace.updates.parameter)
    assert plan.in_backward.saved_bytes == trace.peak_bytes - peak
    watched_ms = 0.03 * plan.in_backward.parameters + hooks_ms(trace)
    assert plan.predicted_step_ms == pytest.approx(trace.step_ms + watched_ms)
    without = advise(trace, budget_bytes=int(1.01 * peak), deny=("optimizer",), time_limit_s=1.0)
    assert without.in_backward is None
    assert without.predicted_step_ms > plan.predicted_step_ms


def test_a_peak_in_the_step_itself_is_worth_moving(tmp_path: Path) -> None:
    """Only ops of the optimizer are above the budget."""
    trace = recorded(stepping("wide", "adamw-foreach"), tmp_path)
    high = [live + extra for live, extra in zip(trace.ops.live_bytes, trace.ops.extra_bytes, strict=True)]
    others = max(h for h, phase in zip(high, trace.ops.phase, strict=True) if PHASES[phase] != "optimizer")
    assert others < trace.peak_bytes
    plan = advise(trace, budget_bytes=int(others / 0.994), time_limit_s=1.0)
    assert plan.in_backward is not None
    assert plan.actions == []
