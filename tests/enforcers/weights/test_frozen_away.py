"""Frozen weights leave between forward and backward: bits, bytes, and whoever looks at them meanwhile."""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.enforcers.verify.digests import digest
from memopt.enforcers.weights.watched import WatchedWeights
from memopt.estimators.simulator.decision import Decision
from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.trace import Trace
from tests.late.late_session import run_late
from tests.support.enforced import SWAP, enforced, everything, plan_of, recorded, seeded, state_digests

WIDTH = 512
LAYERS = 6
WEIGHT_BYTES = WIDTH * WIDTH * 4
Look = Callable[[nn.Module], str]


class LoRA(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def nothing(model: nn.Module) -> str:
    return ""


def lora(steps: int, *, in_forward: Look = nothing, in_between: Look = nothing) -> list[str]:
    """`in_forward` is called when forward is over and backward is ahead, `in_between` after the step."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(steps):
        x = torch.randn(512, WIDTH)
        out = model(x)
        found.append(in_forward(model))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(in_between(model))
        found += [digest(loss), *state_digests(model)]
    return found


def distilled(steps: int) -> list[str]:
    """A teacher that is read once, without gradients, and a student."""
    teacher = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).requires_grad_(False)
    student = nn.Sequential(
        *[layer for _ in range(8) for layer in (nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))]
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        x = torch.randn(512, WIDTH)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(teacher, student)]
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(lora, tmp_path_factory.mktemp("lora"))


def all_away(trace: Trace) -> Plan:
    """Every frozen weight leaves, and comes back when it is asked for."""
    return plan_of(
        trace, lambda problem: {s: SWAP for s, c in problem.candidates.items() if c.saved.is_weight}
    )


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return all_away(trace)


def weights_of(plan: Plan) -> int:
    return sum(action.leaves_after is not None for action in plan.actions)


def close(outcome: Outcome) -> bool:
    assert outcome.measured_peak_bytes is not None
    return abs(outcome.measured_peak_bytes / outcome.predicted_peak_bytes - 1) < 0.02


def test_a_frozen_base_is_away_at_the_peak(trace: Trace, plan: Plan, tmp_path: Path) -> None:
    assert weights_of(plan) == LAYERS
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - (LAYERS - 2) * WEIGHT_BYTES
    computed, outcome = enforced(lora, plan, tmp_path, 4, measure=True)
    assert computed == seeded(lora, 4)
    assert outcome.actions.done == LAYERS, outcome.notes
    assert close(outcome), outcome
    assert not list(tmp_path.glob("*swap*"))


def test_a_teacher_is_away_while_its_student_trains(tmp_path: Path) -> None:
    plan = all_away(recorded(distilled, tmp_path))
    assert weights_of(plan) == LAYERS
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - 2 * WEIGHT_BYTES
    computed, outcome = enforced(distilled, plan, tmp_path, 4, measure=True)
    assert computed == seeded(distilled, 4)
    assert outcome.actions.done == LAYERS, outcome.notes
    assert close(outcome), outcome


def encoded(steps: int) -> list[str]:
    """An encoder that computes without gradients, by a kernel that reads two weights of one size, and a head."""
    layer = nn.TransformerEncoderLayer(WIDTH, 8, WIDTH, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.GELU() for _ in range(8)], nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        with torch.no_grad():
            features = encoder(torch.randn(16, 32, WIDTH))
        loss = head(features).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(encoder, head)]
    return found


def test_weights_that_could_be_trained_leave_after_a_call_without_gradients(tmp_path: Path) -> None:
    plan = all_away(recorded(encoded, tmp_path))
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes - WEIGHT_BYTES
    computed, outcome = enforced(encoded, plan, tmp_path, 4, measure=True)
    assert computed == seeded(encoded, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


def test_the_planner_meets_a_budget_with_them_that_activations_alone_cannot_meet(
    trace: Trace, tmp_path: Path
) -> None:
    trace = msgspec.structs.replace(trace, frozen=[])  # else they could be streamed
    stay = msgspec.structs.replace(trace, facts=trace.facts | {"backward_calls": 2})
    without = Adviser(stay, allowed((), ())).floor.bytes
    adviser = Adviser(trace, allowed((), ()), time_limit_s=2.0)
    assert adviser.floor.bytes < without
    plan = adviser.plan((adviser.floor.bytes + without) // 2)
    assert weights_of(plan) >= 1
    assert plan.predicted_peak_bytes <= plan.budget_bytes < without
    assert all(each.why.startswith("a weight") for each in plan.actions if each.leaves_after)
    computed, outcome = enforced(lora, plan, tmp_path, 4, measure=True)
    assert computed == seeded(lora, 4)
    assert outcome.measured_peak_bytes is not None
    assert outcome.measured_peak_bytes <= plan.budget_bytes
    assert close(outcome), outcome


# --- whoever looks


def checkpoint_of(model: nn.Module) -> str:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return hashlib.sha256(file.getvalue()).hexdigest()


def evaluated(model: nn.Module) -> str:
    with torch.no_grad():
        return digest(model(torch.ones(2, WIDTH)))


def in_a_thread(model: nn.Module) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(evaluated(model)))
    thread.start()
    thread.join()
    return found[0]


def written(model: nn.Module) -> str:
    model[3].base.weight.data.mul_(1.5)
    return ""


def shared_memory(model: nn.Module) -> str:
    """The very bytes, past torch."""
    weight = model[2].base.weight
    return str(ctypes.string_at(weight.data_ptr(), 64))


LOOKS: dict[str, Look] = {
    "a checkpoint": checkpoint_of,
    "a copy": lambda model: digest(copy.deepcopy(model)[1].base.weight),
    "words": lambda model: repr(model[1].base.weight) + repr(model),
    "data": lambda model: digest(model[1].base.weight.data),
    "numpy": lambda model: str(model[4].base.weight.detach().numpy()[0, :5]),
    "numbers": lambda model: str(model[4].base.weight[0, :5].tolist()),
    "an address": shared_memory,
    "pickled": lambda model: digest(pickle.loads(pickle.dumps(model[5])).base.weight),
    "norms": lambda model: str([each.norm().item() for _, each in model.named_parameters()]),
    "an evaluation": evaluated,
    "an evaluation in a thread": in_a_thread,
    "written past the version counter": written,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_while_they_are_away_finds_them(
    plan: Plan, tmp_path: Path, look: Look, sessions: list[WatchedWeights]
) -> None:
    away: list[int] = []

    def looking(model: nn.Module) -> str:
        away.append(len(sessions[-1].away) if sessions else 0)
        return look(model)

    loop = functools.partial(lora, in_forward=looking)
    computed, outcome = enforced(loop, plan, tmp_path, 3)
    assert away[0] == LAYERS, outcome.notes
    sessions.clear()
    assert computed == seeded(loop, 3)


@pytest.mark.parametrize("look", [checkpoint_of, evaluated, written], ids=lambda look: look.__name__)
def test_between_iterations_they_are_there(plan: Plan, tmp_path: Path, look: Look) -> None:
    loop = functools.partial(lora, in_between=look)
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == seeded(loop, 4)
    assert outcome.actions.done == LAYERS, outcome.notes


def test_replays_read_weights_that_are_away(trace: Trace, tmp_path: Path) -> None:
    def choose(problem: Problem) -> Decisions:
        return everything("recompute")(problem) | {
            s: SWAP for s, c in problem.candidates.items() if c.saved.is_weight
        }

    plan = plan_of(trace, choose)
    assert {action.kind for action in plan.actions} == {"swap", "recompute"}
    computed, outcome = enforced(lora, plan, tmp_path, 4, measure=True)
    assert computed == seeded(lora, 4)
    assert outcome.actions.done == outcome.actions.planned, outcome.notes
    assert close(outcome), outcome


def test_what_numpy_was_lent_stays(plan: Plan, tmp_path: Path) -> None:
    lent: list[object] = []

    def lend(model: nn.Module) -> str:
        lent.append(model[1].base.weight.detach().numpy())
        return ""

    _, outcome = enforced(functools.partial(lora, in_between=lend), plan, tmp_path, 3)
    assert outcome.actions.done == LAYERS - 1  # it was done in the first iteration only
    _, outcome = enforced(functools.partial(lora, in_forward=lend), plan, tmp_path, 3)
    assert float(lent[-1][0, 0]) == float(lent[-1][0, 0])  # type: ignore[index]


class Hidden(torch.autograd.Function):
    """Reads a weight in backward that it has not saved."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.weight.t(), None


def unforeseen(steps: int) -> list[str]:
    """Weights that are read in backward by a function of the script's, and by a checkpoint that runs forward again."""
    own = nn.ParameterList(
        [nn.Parameter(torch.randn(WIDTH, WIDTH) / 30, requires_grad=False) for _ in range(2)]
    )
    again = LoRA()
    first = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*first.parameters(), *again.down.parameters()], lr=0.1)
    found = []
    for _ in range(steps):
        x = first(torch.randn(256, WIDTH))
        for weight in own:
            x = Hidden.apply(x, weight).tanh()
        x = checkpoint(again, x, use_reentrant=False)
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(first, again, own)]
    return found


def test_reads_in_backward_that_autograd_does_not_know_of(tmp_path: Path) -> None:
    plan = all_away(recorded(unforeseen, tmp_path))
    assert weights_of(plan) >= 2
    computed, outcome = enforced(unforeseen, plan, tmp_path, 4, measure=True)
    assert computed == seeded(unforeseen, 4)
    assert outcome.actions.done >= 2, outcome.notes


@pytest.mark.parametrize("seed", range(3))
def test_on_a_device_whose_copies_come_late(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    links = dict.fromkeys(("host_out_bytes_per_s", "host_in_bytes_per_s"), 1e10)
    linked = msgspec.structs.replace(trace, device=msgspec.structs.replace(trace.device, **links))

    def choose(problem: Problem) -> Decisions:
        weights = [s for s, c in problem.candidates.items() if c.saved.is_weight]
        return {s: Decision(kind="swap", tier="host", prefetch_op=_trigger(problem, s, n % 3)) for n, s in enumerate(weights)}  # fmt: skip

    plan = plan_of(linked, choose)
    computed, outcome, _, kernels = run_late(lora, plan, tmp_path, 4, monkeypatch, seed)
    assert computed == seeded(lora, 4)
    assert outcome.actions.done == weights_of(plan) == LAYERS, outcome.notes
    assert kernels.noted


def _trigger(problem: Problem, storage: int, ahead: int) -> int:
    """So many unpacks before the use; 0: on demand."""
    before = [op for op in problem.triggers.tolist() if op < problem.view.saved[storage].first_use]
    return before[-ahead] if ahead else -1


def fails_at_times(steps: int) -> list[str]:
    """An exception in forward, and one in backward, that the script catches."""
    model = nn.Sequential(*[LoRA() for _ in range(LAYERS)])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        out = model(torch.randn(512, WIDTH))
        if step == 3:
            hook = model[2].up.weight.register_hook(_raise)
        try:
            if step == 2:
                _raise(out)
            optimizer.zero_grad()
            out.square().mean().backward()
        except OverflowError:
            found += state_digests(model)
        if step == 3:
            hook.remove()
        optimizer.step()
        found += [digest(out), *state_digests(model)]
    return found


def _raise(_: Tensor) -> None:
    raise OverflowError


def test_exceptions_that_a_script_catches(plan: Plan, tmp_path: Path) -> None:
    computed, outcome = enforced(fails_at_times, plan, tmp_path, 5)
    assert computed == seeded(fails_at_times, 5)
    assert outcome.actions.done == LAYERS, outcome.notes
