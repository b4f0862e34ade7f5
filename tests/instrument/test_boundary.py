"""Which optimizer's steps divide a run into iterations."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.instrument.iterations import Iterations
from memopt.instrument.stepping.torchs_step import any_was_made
from memopt.profiler.timing.plain_steps import PlainSteps
from tests.support.enforced import all_again, enforced, plan_of, recorded


class Log:
    """A listener that writes down what ends when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        self.events.append(f"end {count}")

    def backward_begins(self, roots: Any, *, keep_graph: bool, create_graph: bool) -> None: ...
    def backward_ended(self) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self.events.append(str(optimizer.defaults["lr"]))


def steps(order: str, *, apart: bool = False, known: int = 0) -> list[str]:
    """What is logged when optimizers step in `order`: one digit an optimizer, its learning rate. `apart`: each has its parameter."""
    gc.collect()
    log = Log()
    weight = torch.nn.Parameter(torch.ones(2))
    weights = {name: torch.nn.Parameter(torch.ones(2)) if apart else weight for name in set(order)}
    optimizers = {name: torch.optim.SGD([weights[name]], lr=int(name)) for name in set(order)}
    iterations = Iterations(log, optimizers=known)
    iterations.install()
    try:
        for name in order:
            optimizers[name].step()
    finally:
        iterations.remove()
    return log.events


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("111", ["1", "end 1", "1", "end 2", "1", "end 3"]),
        # a GAN: from the second round on, iterations end after the generator's step
        ("121212", ["1", "end 1", "2", "end 2", "1", "2", "end 3", "1", "2", "end 4"]),
        ("123123", ["1", "end 1", "2", "end 2", "3", "end 3", "1", "2", "3", "end 4"]),
        # another phase: the first one steps no more
        ("11112222", ["1", "end 1", "1", "end 2", "1", "end 3", "1", "end 4", "2", "2", "end 5", "2", "end 6", "2", "end 7"]),
        # one that joins late does not move the boundary
        ("11121112", ["1", "end 1", "1", "end 2", "1", "end 3", "2", "1", "end 4", "1", "end 5", "1", "end 6", "2"]),
    ],
)  # fmt: skip
def test_boundary(order: str, ends: list[str]) -> None:
    assert steps(order) == ends


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        # a critic of three steps: from the second round on, iterations end after the generator's step
        ("111211121112", "1|1|1|2|1112|1112|"),
        # one that steps every 17th time joins too late
        ("1" * 17 + "21", "1|" * 17 + "21|"),
    ],
)
def test_boundary_of_optimizers_of_their_own_parameters(order: str, ends: str) -> None:
    found = steps(order, apart=True)
    assert "".join("|" if event.startswith("end") else event for event in found) == ends


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("121212", "12|12|12|"),
        ("111211121112", "1112|1112|1112|"),
        # the second one does not come in this run
        ("1" * 40, "1" * 32 + "|" + "1|" * 8),
    ],
)
def test_the_first_iteration_is_a_whole_one_where_the_optimizers_of_a_round_are_known(
    order: str, ends: str
) -> None:
    found = steps(order, apart=True, known=2)
    assert "".join("|" if event.startswith("end") else event for event in found) == ends


def test_a_wrapper_of_an_optimizer_that_steps_is_not_waited_for() -> None:
    """Lightning's and accelerate's are optimizers too, with the parameters of the one that they wrap, and none of torch's hooks sees them step."""
    gc.collect()
    first, second, third = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]) for _ in range(3))
    wrappers = [torch.optim.SGD(each.param_groups) for each in (first, second)]
    iterations = Iterations(Log())
    iterations.install()
    waits = []
    try:
        for each in (first, second, third, first, second, third):
            each.step()
            waits.append(iterations.waits_for_another)
    finally:
        iterations.remove()
    assert waits == [True, True, False, False, False, False]
    assert iterations.chosen is third
    assert all(each not in iterations.stepped for each in wrappers)


def test_optimizers_that_step_inside_backward_are_not_waited_for() -> None:
    """One for each parameter, stepped in hooks, and another of the embedding after backward: the recording waited for 16 of its rounds."""
    gc.collect()
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    *inside, after = (torch.optim.SGD([each]) for each in weights)
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for weight, optimizer in zip(weights, inside, strict=False)
    ]
    iterations = Iterations(Log())
    iterations.install()
    try:
        torch.stack([each.sum() for each in weights]).sum().backward()
        after.step()
        assert not iterations.waits_for_another
        assert iterations.chosen is after
        assert set(iterations.stepped) == {*inside, after}
    finally:
        iterations.remove()
        for hook in hooks:
            hook.remove()  # no collector finds the optimizers there


def test_optimizers_that_step_after_one_backward_call_share_an_iteration_however_many_they_are() -> None:
    """Pyro makes one for each parameter as that is first stepped. The profile was of what lies between two of them."""
    numbers: list[int] = []
    plain, made = PlainSteps(), dict[int, torch.optim.Optimizer]()

    class Numbered(Log):
        def iteration_ended(self, count: int, milliseconds: float) -> None:
            numbers.append(plain.number(count, iterations.rounds, came_late=iterations.came_late))

    iterations = Iterations(Numbered())
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(6)]
    iterations.install()
    try:
        for _ in range(3):
            torch.stack([each.sum() for each in weights]).sum().backward()
            for number, each in enumerate(weights):
                if number not in made:
                    made[number] = torch.optim.SGD([each], lr=0.1)
                made[number].step()
    finally:
        iterations.remove()
    assert numbers == [1, 1, 1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize(("known", "ends"), [(0, ["end 1", "end 2", "end 3"]), (1, ["end 1", "end 2"])])
def test_an_optimizer_that_an_earlier_run_has_shown_is_waited_for_though_backward_comes_first(
    known: int, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pyro makes optimizers when there are gradients. The kept plan's first iteration was what lies before the first step."""
    monkeypatch.setattr("memopt.instrument.iterations.any_was_made", lambda: False)
    monkeypatch.setattr("memopt.instrument.iterations.living", lambda kind: ([], []))
    log = Log()
    weight = torch.nn.Parameter(torch.ones(2))
    iterations = Iterations(log, optimizers=known)
    iterations.install()
    optimizer = None
    try:
        for _ in range(2):
            weight.square().sum().backward()
            optimizer = optimizer or torch.optim.SGD([weight], lr=0.1)
            optimizer.step()
    finally:
        iterations.remove()
    assert [event for event in log.events if event.startswith("end")] == ends


def test_a_step_that_raised_is_over() -> None:
    log = Log()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1)
    iterations = Iterations(log)
    iterations.install()
    try:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        for _ in range(2):
            optimizer.step()
    finally:
        iterations.remove()
    assert [event for event in log.events if event.startswith("end")] == ["end 1", "end 2"]
    assert not iterations.in_step


def test_the_steps_of_a_critic_and_that_of_what_it_criticizes_make_one_iteration(tmp_path: Path) -> None:
    """Three steps of the critic, through 1, 2 and 3 layers, to one of the other, through 2."""

    def loop(rounds: int) -> list[str]:
        critic, maker = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        of_critic = torch.optim.SGD(critic.parameters(), 0.1)
        of_maker = torch.optim.SGD(maker.parameters(), 0.1)
        for _ in range(rounds):
            for layers in (1, 2, 3):
                x = torch.ones(4, 8)
                for _ in range(layers):
                    x = critic(x)
                of_critic.zero_grad()
                x.square().mean().backward()
                of_critic.step()
            of_maker.zero_grad()
            critic(maker(torch.ones(4, 8))).square().mean().backward()
            of_maker.step()
        return []

    trace = recorded(lambda _: loop(9), tmp_path)
    names = [trace.op_name(op) for op in range(trace.op_count)]
    assert names.count("aten.addmm") + names.count("aten.addmm.default") == 1 + 2 + 3 + 2
    assert trace.facts["backward_calls"] == 4
    assert trace.facts["optimizers"] == trace.facts["in_first_round"] == 2
    short = recorded(lambda _: loop(2), tmp_path)
    assert short.facts["backward_calls"] == 1
    assert any("a part of one" in note for note in short.notes)


def test_the_phase_that_an_optimizer_joins_late_is_planned_for_and_measured(tmp_path: Path) -> None:
    """Six steps train a small head; from the seventh on the body is trained as well, by an optimizer of its own."""

    def loop(steps: int) -> list[str]:
        body = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
        ).requires_grad_(False)
        head = torch.nn.Linear(64, 1)
        of_head = torch.optim.SGD(head.parameters(), 0.1)
        of_body = torch.optim.SGD(body.parameters(), 0.1)
        for step in range(12):
            body.requires_grad_(step >= 6)
            of_head.zero_grad()
            of_body.zero_grad()
            head(body(torch.ones(4096, 64))).square().mean().backward()
            of_head.step()
            if step >= 6:
                of_body.step()
        return []

    trace = recorded(loop, tmp_path)
    assert trace.facts["optimizers"] == 2
    assert trace.facts["in_first_round"] == 0  # six steps without it are no part of a round
    plan = plan_of(trace, lambda problem: {})
    _, outcome = enforced(loop, plan, tmp_path, 12, measure=True)
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert outcome.notes == []


@pytest.mark.parametrize("calls", [1, 2])
def test_a_warm_up_before_the_optimizer_is_made_shifts_no_call_of_the_training(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted to the first iteration, as by a run that waits for the optimizer, its call would be the first, and training's the second."""
    monkeypatch.setattr("memopt.instrument.iterations.any_was_made", lambda: False)

    def loop(steps: int) -> list[str]:
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        for _ in range(calls):
            model(torch.ones(64, 64)).square().mean().backward()
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4096, 64)).square().mean().backward()
            optimizer.step()
        return []

    trace = recorded(loop, tmp_path)
    assert trace.facts["in_first_round"] == 0
    plan = plan_of(trace, all_again)
    _, outcome = enforced(loop, plan, tmp_path, 12, measure=True)
    assert plan.predicted_peak_bytes < 0.8 * trace.peak_bytes
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert outcome.actions.done == outcome.actions.planned > 0


def test_a_gradient_check_before_the_training_is_no_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls backward more often than an optimizer that may still be made is waited for."""
    monkeypatch.setattr("memopt.instrument.iterations.any_was_made", lambda: False)

    def loop(steps: int) -> list[str]:
        inputs = torch.ones(5, 4, dtype=torch.double, requires_grad=True)
        torch.autograd.gradcheck(torch.sin, (inputs,))
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4096, 64)).square().mean().backward()
            optimizer.step()
        return []

    trace = recorded(loop, tmp_path)
    assert trace.facts["optimizers"] == trace.facts["backward_calls"] == 1
    assert trace.peak_bytes > 2 * 4096 * 64 * 4


def test_the_plain_step_of_two_optimizers_is_a_whole_one(tmp_path: Path) -> None:
    """The first round ends two iterations, one at each optimizer's first step; neither is a whole step."""

    def two(steps: int) -> list[str]:
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        one, other = torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
        for _ in range(steps):
            time.sleep(0.2)
            for model, optimizer in ((first, one), (second, other)):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        return []

    trace = recorded(two, tmp_path)
    assert trace.step_ms > 200
    assert trace.facts["backward_calls"] == 2
    _, outcome = enforced(two, plan_of(trace, lambda problem: {}), tmp_path, 4, measure=True)
    assert outcome.steps == 4  # its first iteration is a whole one


def _after_backwards(count: int) -> Iterations:
    """As many backward calls, and no step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    iterations = Iterations(Quiet())
    iterations.install()
    try:
        for _ in range(count):
            (parameter * 2).sum().backward()
    finally:
        iterations.remove()
    return iterations


@pytest.mark.parametrize(("backwards", "looks"), [(1, 0), (2, 1), (100, 6)])
def test_many_backward_calls_before_a_step_do_not_look_at_all_that_lives_each_time(
    monkeypatch, backwards, looks
):
    looked = []
    monkeypatch.setattr("memopt.instrument.iterations.any_was_made", lambda: True)
    monkeypatch.setattr(
        "memopt.instrument.iterations.living", lambda *kinds: looked.append(kinds) or [["an optimizer"]]
    )
    iterations = _after_backwards(backwards)
    assert len(looked) == looks
    assert iterations.count == 0


@pytest.mark.parametrize(("was_made", "ended"), [(False, 3), (True, 2)])
def test_where_no_optimizer_lives_backward_calls_end_iterations(monkeypatch, was_made, ended):
    """One that was made and is gone is waited for once."""
    monkeypatch.setattr("memopt.instrument.iterations.any_was_made", lambda: was_made)
    monkeypatch.setattr("memopt.instrument.iterations.living", lambda *kinds: [[]])
    assert _after_backwards(3).count == ended


def test_an_optimizer_that_was_made_is_seen_also_below_what_the_script_puts_around_its_step():
    class Base(torch.optim.Optimizer):
        def step(self):
            return None

    class Own(Base):
        def step(self):
            return None

    assert not any_was_made(Base)
    Own([torch.nn.Parameter(torch.ones(1))], {})
    assert any_was_made(Base)
    Own.step = functools.wraps(Own.step)(lambda self: None)
    assert any_was_made(Base)


class Quiet:
    """A listener that does nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_backward_calls_beside_the_thread_that_trains_are_counted() -> None:
    iterations = Iterations(Log())
    iterations.install()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    try:
        weight.sum().backward()
        optimizer.step()
        beside = threading.Thread(target=lambda: weight.sum().backward())
        beside.start()
        beside.join()
    finally:
        iterations.remove()
    assert (iterations.elsewhere, iterations.count) == (1, 1)


@pytest.mark.parametrize(
    "updates",
    [
        lambda each: each.data.add_(each.grad, alpha=-0.1),
        lambda each: each.data.copy_(each.data - 0.1 * each.grad),
        None,
    ],
    ids=["in place", "anew", "none"],
)
def test_no_optimizer_is_waited_for_where_the_script_updates_its_parameters_itself(
    updates: Callable[[torch.Tensor], object] | None,
) -> None:
    """Each run of such a script, or of fastai's optimizers, went on for 16 iterations before it had a plan."""
    gc.collect()
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    iterations = Iterations(Log())
    iterations.install()
    waits = []
    try:
        for _ in range(4):
            torch.stack([each.square().sum() for each in weights]).sum().backward()
            waits.append(iterations.waits_for_another)
            for each in weights:
                if updates is not None:
                    updates(each)
                each.grad = None
    finally:
        iterations.remove()
    assert iterations.boundary == "backward"
    assert waits[-1] is (updates is None)
    assert iterations.waits_until == (0 if updates is not None else 16)
