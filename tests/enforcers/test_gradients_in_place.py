"""Backward writes over gradients that it uses up: the same bits from every op of the table, the peak as predicted, and never over what
somebody else still looks at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.plan_reader import read_plan
from memopt.advisors.profiles.problem import Decisions
from memopt.enforcers.gradients_in_place import GradientsInPlace
from memopt.enforcers.guarding.standby import Standby
from memopt.enforcers.verify.digests import digest
from memopt.estimators.simulator.gradients_in_place import in_place, why_not
from memopt.instrument import gradients_in_place
from memopt.instrument.gradients_in_place import FORMULAS
from memopt.instrument.torch_internals import set_compiler
from memopt.plan import Plan
from memopt.trace import IN_PLACE, Trace
from tests.support.enforced import Loop, any_mixture, enforced, recorded, seeded, state_digests

aten = torch.ops.aten
STEPS = 5
SHAPES = [(7,), (3, 5), (33, 257), (4, 3, 129), (2, 3000)]


def _others(func, gradient: Tensor) -> tuple[tuple, dict]:
    """What the op reads besides the gradient."""
    other, last = torch.randn_like(gradient), gradient.dim() - 1
    by_name = {
        "gelu_backward": ((other,), {"approximate": "tanh"}),
        "threshold_backward": ((other, 0.1), {}),
        "leaky_relu_backward": ((other, 0.01, False), {}),
        "elu_backward": ((1.0, 1.5, 2.0, False, other), {}),
        "softplus_backward": ((other, 1.0, 0.5), {}),
        "hardtanh_backward": ((other, -0.5, 0.5), {}),
        "_log_softmax_backward_data": ((other.log_softmax(last), last, gradient.dtype), {}),
        "_softmax_backward_data": ((other.softmax(last), last, gradient.dtype), {}),
        "sigmoid_backward": ((other.sigmoid(),), {}),
        "tanh_backward": ((other.tanh(),), {}),
    }
    return by_name.get(func.overloadpacket.__name__, ((other,), {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("func", FORMULAS, ids=str)
def test_every_op_gives_the_same_bits_in_place(func, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    into, name, _ = FORMULAS[func]
    for shape in SHAPES:
        gradient = torch.randn(shape).to(dtype)
        others, kwargs = _others(func, gradient)
        plain = func(gradient, *others, **kwargs)
        address = gradient.data_ptr()
        made = into(gradient, *others, **kwargs, **{name: gradient})
        assert made.data_ptr() == address
        assert made.stride() == plain.stride()
        assert digest(made) == digest(plain)


def _language(steps: int) -> list[str]:
    torch.manual_seed(1)
    embed, up, down = nn.Embedding(600, 32), nn.Linear(32, 64), nn.Linear(64, 32)
    head = nn.Linear(32, 600)
    optimizer = torch.optim.SGD([*embed.parameters(), *up.parameters(), *down.parameters(), *head.parameters()], 0.1)  # fmt: skip
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 600, (4, 17))
        x = embed(ids[:, :-1])
        for _ in range(2):  # weights used twice: gradients meet, the first a view
            x = x + down(F.gelu(up(x)))
        loss = F.cross_entropy(head(x).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(embed, up, down, head)]
    return found


def _shared_weight(steps: int) -> list[str]:
    torch.manual_seed(1)
    linear = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 256)
        for _ in range(4):
            x = torch.tanh(linear(x))
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()
        found += state_digests(linear)
    return found


def changed_plan(trace: Trace, choose=lambda problem: Decisions()) -> Plan:
    adviser = Adviser(trace, DEFAULT_ALLOW)
    assert adviser.in_place is not None, why_not(trace)
    problem = adviser.in_place.problem(1)
    return adviser.in_place.write(problem, choose(problem), "chosen by a test")


@pytest.mark.parametrize("loop", [_language, _shared_weight])
def test_same_bits_and_the_predicted_peak(loop: Loop, tmp_path: Path) -> None:
    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    for choose in (lambda problem: Decisions(), any_mixture(0), any_mixture(1)):
        plan = changed_plan(trace, choose)
        assert plan.predicted_peak_bytes < trace.peak_bytes or loop is _language  # its peak is in forward
        computed, outcome = enforced(loop, plan, tmp_path, STEPS, measure=True)
        assert computed == plain, outcome
        assert outcome.actions.skipped == 0, outcome
        if not plan.actions:
            assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=2e-3)


def test_a_lower_floor_a_plan_that_says_so_and_is_read_again(tmp_path: Path) -> None:
    trace = recorded(_language, tmp_path)
    without = Adviser(trace, DEFAULT_ALLOW - {"in-place"})
    with_it = Adviser(trace, DEFAULT_ALLOW)
    assert with_it.floor.bytes < without.floor.bytes
    budget = (with_it.floor.bytes + without.floor.bytes) // 2
    plan = with_it.plan(budget)
    assert plan.in_place is not None
    assert plan.in_place.saved_bytes > 0
    assert plan.in_place.cost_ms > 0
    assert plan.predicted_peak_bytes <= budget
    assert read_plan(plan, trace).timeline.peak_bytes == plan.predicted_peak_bytes


def test_a_budget_that_is_met_cheaply_leaves_backward_alone(tmp_path: Path) -> None:
    trace = recorded(_language, tmp_path)
    plan = Adviser(trace, DEFAULT_ALLOW).plan(trace.peak_bytes + 1)
    assert plan.in_place is None


def test_only_where_it_was_marked(tmp_path: Path) -> None:
    trace = recorded(_language, tmp_path)
    marked = {trace.op_name(op) for op, flags in enumerate(trace.ops.flags) if flags & IN_PLACE}
    assert marked == {"aten._log_softmax_backward_data.default", "aten.gelu_backward.default", "aten.add.Tensor"}  # fmt: skip
    found = in_place(trace)
    assert found is not None
    changed, over = found
    assert changed.ops.live_bytes == trace.ops.live_bytes
    assert all(changed.ops.extra_bytes[op] == trace.ops.extra_bytes[op] - size for op, size in over.made)


# --- what somebody else looks at

KEPT: list[Tensor] = []


def _kept_by_hook(x: Tensor) -> Tensor:
    y = F.gelu(x)
    y.register_hook(KEPT.append)
    return y.square().sum()


def _view_kept_by_hook(x: Tensor) -> Tensor:
    y = F.gelu(x)
    y.register_hook(lambda gradient: KEPT.append(gradient.view(-1)))
    return y.square().sum()


def _as_numpy(x: Tensor) -> Tensor:
    y = F.gelu(x)
    y.register_hook(lambda gradient: KEPT.append(torch.from_numpy(gradient.numpy())))
    return y.square().sum()


def _retained(x: Tensor) -> Tensor:
    y = F.gelu(x)
    y.retain_grad()
    KEPT.append(y)
    return y.square().sum()


def _used_by_two_nodes(x: Tensor) -> Tensor:
    return (F.gelu(x) + torch.tanh(x) + x).square().sum()


def _used_twice_by_a_formula(x: Tensor) -> Tensor:
    y = F.silu(x) * 2
    return ((x * y) * 3).square().sum()


def _by_a_divisor(x: Tensor) -> Tensor:
    return (torch.ones(24, 24) / (F.gelu(x).square() + 1)).sum() + (F.gelu(x) / 3).square().sum()


def _formula_that_looks_for_modes(x: Tensor) -> Tensor:
    return torch.tanh(x[:4, :3]).prod() + F.gelu(x).square().sum()


def _expanded(x: Tensor) -> Tensor:
    return torch.tanh(x).sum()


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        made = gradient * 2
        KEPT.append(made)
        return made


def _kept_by_a_function(x: Tensor) -> Tensor:
    return _Keeps.apply(F.gelu(x)).square().sum()


class _Gives(torch.autograd.Function):
    """One tensor to two inputs."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        made = gradient * 2
        return made, made


def _given_to_two(x: Tensor) -> Tensor:
    return _Gives.apply(F.gelu(x), torch.tanh(x)).square().sum()


def _sum_of_kept_views(x: Tensor) -> Tensor:
    one, two = x.t(), x.t()
    for each in (one, two):
        each.register_hook(KEPT.append)
    return (one @ torch.relu(two)).square().sum()


LOSSES = [
    _kept_by_hook, _view_kept_by_hook, _as_numpy, _retained, _used_by_two_nodes, _used_twice_by_a_formula, _by_a_divisor, _formula_that_looks_for_modes, _expanded,
    _kept_by_a_function, _given_to_two, _sum_of_kept_views,
]  # fmt: skip


def _everything(loss_of: Callable[[Tensor], Tensor], mode: GradientsInPlace | None) -> list[str]:
    KEPT.clear()
    torch.manual_seed(0)
    weight = torch.randn(24, 24, requires_grad=True)
    x = weight @ torch.randn(24, 24)
    loss = loss_of(x)
    if mode is not None:
        mode.backward_begins((loss,))
    loss.backward()
    if mode is not None:
        mode.backward_ended()
        mode.new_iteration()
    kept = [each.grad if each.grad_fn is not None else each for each in KEPT]
    return [digest(each.detach()) for each in (weight.grad, *kept)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("loss_of", LOSSES)
def test_what_somebody_looks_at_is_left_alone(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert _everything(loss_of, GradientsInPlace(0)) == _everything(loss_of, None)


def test_the_same_without_anybody_is_written_over() -> None:
    mode = GradientsInPlace(0)
    assert _everything(lambda x: F.gelu(x).square().sum(), mode) == _everything(lambda x: F.gelu(x).square().sum(), None)  # fmt: skip
    assert mode.most_used == 1


def test_gradients_asked_for_on_the_way() -> None:
    def gradients(mode: GradientsInPlace | None) -> list[str]:
        torch.manual_seed(0)
        x = torch.randn(9, 9, requires_grad=True)
        y = torch.tanh(x)
        z = F.gelu(y * 2)
        loss = (z * 3).square().sum()
        if mode is not None:
            mode.backward_begins((loss,))
        found = torch.autograd.grad(loss, [z, y, x])
        if mode is not None:
            mode.backward_ended()
        return [digest(each) for each in found]

    assert gradients(GradientsInPlace(0)) == gradients(None)


def test_a_gradient_of_the_scripts_own_stays_as_it_is() -> None:
    mode = GradientsInPlace(0)
    x = torch.randn(8, 8, requires_grad=True)
    given = torch.ones(8, 8)
    y = torch.sigmoid(x)
    mode.backward_begins((y,))
    y.backward(given)
    mode.backward_ended()
    assert given.eq(1).all()


@pytest.mark.parametrize("loop", [_language, _shared_weight])
def test_a_guard_that_is_awake_leaves_them_to_be_written_over(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second mode in backward would hold each gradient."""
    monkeypatch.setattr("memopt.enforcers.guarding.guard.LEAST_BYTES", 64)
    monkeypatch.setattr(Standby, "_choose", lambda self: None)
    plain = seeded(loop, STEPS)
    for choose in (lambda problem: Decisions(), any_mixture(0)):
        plan = changed_plan(recorded(loop, tmp_path), choose)
        woken = msgspec.structs.replace(plan, saved_elements=1, saved_bytes=1)
        computed, outcome = enforced(loop, woken, tmp_path, STEPS, holds_bytes=1)
        assert computed == plain, outcome
        assert outcome.actions.skipped == 0, outcome
        assert any("nothing was left that could be moved" in note for note in outcome.notes), outcome


def test_references_are_counted_again_where_somebody_had_one_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A garbage collection in another thread; nothing was written over then until the process ended."""
    look, looks = gradients_in_place._look, list[int]()

    def disturbed(hook: Any) -> frozenset[Any]:
        looks.append(0)
        found = look(hook)
        return found if len(looks) > 1 else frozenset((a, b + 1, *others) for a, b, *others in found)

    monkeypatch.setattr(gradients_in_place, "_look", disturbed)
    assert gradients_in_place._usual.__wrapped__() == gradients_in_place._usual()
    assert len(looks) > 3


def test_references_count_the_same_while_another_thread_compiles() -> None:
    """Frames are run another way then, in all threads, and each call holds what it hands on: nothing was written over."""
    usual = gradients_in_place._usual.__wrapped__()
    assert usual
    compiles, ends = threading.Event(), threading.Event()

    def compiling() -> None:
        set_compiler(False)
        compiles.set()
        ends.wait(60)
        set_compiler(None)

    thread = threading.Thread(target=compiling)
    thread.start()
    compiles.wait(60)
    try:
        assert gradients_in_place._usual.__wrapped__() == usual
    finally:
        ends.set()
        thread.join()
