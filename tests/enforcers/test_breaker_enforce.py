"""Loops that broke, or could have broken, an enforced run: found by scripts that were written to do so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.enforcers.verify.digests import digest
from memopt.instrument.memory.meter import living_storages
from tests.enforcers.codecs.test_codecs import CASES, Case, Run, make, same_bits
from tests.support.enforced import (
    Loop,
    any_mixture,
    enforced,
    everything,
    plan_of,
    recorded,
    seeded,
    state_digests,
)
from tests.support.loops import clamped_in_place


def _eval_then_train(steps: int) -> list[str]:
    """One BatchNorm, called in evaluation mode and, from the fourth step on, in training mode too before backward."""
    norm = nn.BatchNorm2d(8, momentum=0.5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        batch = torch.randn(4, 3, 16, 16) * 2 + 1
        model.eval()
        loss = model(batch).square().mean()
        model.train()
        if step > 3:
            loss = loss + norm(torch.randn(4, 8, 5, 5) * 9).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


def _statistics_read_by_hand(steps: int) -> list[str]:
    """Running statistics are an ordinary input of other ops, and then change without a version."""
    norm = nn.BatchNorm2d(8, momentum=0.5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        hidden = model[0](torch.randn(4, 3, 16, 16) + 1)
        centred = hidden - norm.running_mean.view(8, 1, 1)
        loss = torch.tanh(model[1](centred)).square().mean()
        if step > 3:
            loss = loss + norm(hidden).tanh().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model, norm)]
    return found


@pytest.mark.parametrize("loop", [_eval_then_train, _statistics_read_by_hand])
def test_statistics_that_change_between_forward_and_replay(loop, tmp_path):
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    assert any(action.kind == "recompute" for action in plan.actions)
    computed, outcome = enforced(loop, plan, tmp_path, 5)
    assert computed == seeded(loop, 5)
    assert outcome.actions.done > 0


def _lazy_penalty(steps: int) -> list[str]:
    """A gradient penalty every fourth step only: the profiled one has no create_graph."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.Hardtanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        batch = torch.randn(4, 3, 16, 16, requires_grad=step % 4 == 3)
        out = model(batch)
        loss = F.softplus(-out).mean()
        if batch.requires_grad:
            (slope,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
            loss = loss + 10 * slope.square().sum((1, 2, 3)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(model)]
    return found


@pytest.mark.parametrize("kind", ["compress", "recompute", "swap"])
def test_a_gradient_penalty_that_the_profile_did_not_see(kind, tmp_path):
    plan = plan_of(recorded(_lazy_penalty, tmp_path), everything(kind))
    assert any(action.kind in (kind, "drop") for action in plan.actions)
    computed, outcome = enforced(_lazy_penalty, plan, tmp_path, 9)
    assert computed == seeded(_lazy_penalty, 9)
    assert outcome.actions.done == outcome.actions.planned


class _Twice(Run):
    """A case differentiated twice: both gradients, with the second upstream drawn from a fixed seed."""

    def __init__(self, case: Case, dtype: torch.dtype, data: str, *, needs=None) -> None:
        torch.manual_seed(11)
        inputs = [make(spec, dtype, data) for spec in case.inputs]
        self.handles, self.read, self.needs, self.encoded = [], [], needs, 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            out = case.call(*inputs)
        if needs is None:
            self.slots = self._name_slots(out)
        trained = [x for x in inputs if x.requires_grad]
        upstream = torch.randn(out.shape).to(out.dtype).requires_grad_()
        first = torch.autograd.grad(out, trained, upstream, create_graph=True)
        live = [grad for grad in first if grad.requires_grad]
        again = [torch.randn(grad.shape).to(grad.dtype) for grad in live]
        second = torch.autograd.grad(live, [*trained, upstream], again, allow_unused=True) if live else ()
        self.grads = [*(grad.detach() for grad in first), *(grad for grad in second if grad is not None)]


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "hardsigmoid"], ids=lambda c: c.name)
def test_second_gradients_are_bit_identical_with_the_lesser_thing(case):
    for data in (kind for kind in ("plain", "bounds", "channels_last", "gaps") if kind not in case.not_as):
        try:
            plain = _Twice(case, case.dtypes[0], data)
        except RuntimeError as error:  # of grid_sample
            if "is not implemented" not in str(error) or torch.__version__ >= "2.12":
                raise
            pytest.skip(f"torch {torch.__version__}: {error}")
        less = _Twice(case, case.dtypes[0], data, needs=plain.slots)
        assert less.encoded > 0
        assert len(plain.grads) == len(less.grads)
        assert all(same_bits(a, b) for a, b in zip(plain.grads, less.grads, strict=True)), data


def test_torch_itself_does_not_differentiate_hardsigmoid_twice():
    with pytest.raises(RuntimeError, match="hardsigmoid_backward is not implemented"):
        _Twice(next(c for c in CASES if c.name == "hardsigmoid"), torch.float32, "plain")


def _functional(steps: int) -> list[str]:
    """No module at all: every op counts in one frame, and so would a codec's."""
    weights = [(torch.randn(32, 32) * 0.2).requires_grad_() for _ in range(4)]
    found = []
    for _ in range(steps):
        hidden = torch.randn(64, 32)
        for weight in weights:
            hidden = torch.relu(hidden @ weight)
            hidden = torch.tanh(hidden * torch.bernoulli(torch.full_like(hidden, 0.9)))
        loss = hidden.square().mean()
        loss.backward()
        for weight in weights:
            weight.data.add_(weight.grad, alpha=-0.1)
            weight.grad = None
        found.append(digest(loss))
    return found + [digest(weight) for weight in weights]


@pytest.mark.parametrize("seed", range(4))
def test_ops_of_codecs_do_not_count_among_those_of_the_script(seed, tmp_path):
    plan = plan_of(recorded(_functional, tmp_path), any_mixture(seed))
    kinds = {action.kind for action in plan.actions}
    assert "recompute" in kinds
    computed, outcome = enforced(_functional, plan, tmp_path, 6)
    assert computed == seeded(_functional, 6)
    assert outcome.divergences == 0
    assert outcome.actions.skipped == 0


def test_what_clamps_in_place_is_compressed(tmp_path: Path) -> None:
    plan = plan_of(recorded(clamped_in_place, tmp_path), everything("compress"))
    assert [(a.codec, [ref.node for ref in a.slots]) for a in plan.actions] == [
        ("predicate", ["HardtanhBackward0"])
    ] * 2
    _, outcome = enforced(clamped_in_place, plan, tmp_path, 6)
    assert outcome.actions.done == 2


def test_an_op_that_runs_in_some_steps_only_shifts_nothing(tmp_path: Path) -> None:
    """Step 2 is profiled, and 2 and 4 are measured: a decoder that takes its own best guess in 3 and 4."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.out = nn.Embedding(50, 32), nn.GRUCell(32, 32), nn.Linear(32, 50)

        def forward(self, given: torch.Tensor, force: bool) -> torch.Tensor:
            token, state, found = given[:, 0], torch.zeros(len(given), 32), []
            for at in range(1, given.shape[1]):
                state = self.cell(F.gelu(self.embed(token)), state)
                logits = self.out(state)
                found.append(logits)
                token = given[:, at] if force else logits.argmax(1)
            return torch.stack(found, 1)

    def loop(steps: int) -> list[str]:
        model = Decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(steps):
            given = torch.randint(0, 50, (64, 8))
            loss = F.cross_entropy(model(given, step < 3).flatten(0, 1), given[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *state_digests(model)]
        return found

    plain = seeded(loop, 5)
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    assert any(record.module == "Decoder#0" for action in plan.actions for record in action.records)
    computed, outcome = enforced(loop, plan, tmp_path, 5, measure=True)
    assert computed == plain
    assert outcome.divergences == 0
    assert outcome.actions.skipped == 0
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def _large_at(*large: int) -> Loop:
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, steps + 1):
            loss = model(torch.randn(40_000 if step in large else 1000, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.item().hex()]

    return loop


@pytest.mark.parametrize(("large", "is_found"), [((8,), True), ((10,), True), ((9,), False)])
def test_the_peak_is_measured_until_an_iteration_was_like_the_profiled_one(
    large: tuple[int, ...], is_found: bool, tmp_path: Path
) -> None:
    """A script that penalises gradients each second time is measured in a step that does."""
    plan = plan_of(recorded(_large_at(3), tmp_path), everything("recompute"))
    _, outcome = enforced(_large_at(*large), plan, tmp_path, 12, measure=True)
    ratio = outcome.measured_peak_bytes / plan.predicted_peak_bytes
    assert (ratio == pytest.approx(1, abs=0.02)) if is_found else ratio < 0.5


def test_a_carried_state_holds_nothing_of_the_past(tmp_path: Path) -> None:
    """Its op is recorded in the shorter sequences that follow the profiled one: each state would stand on all those before."""
    held = []

    def loop(steps: int) -> list[str]:
        inward, onward = nn.Linear(256, 64), nn.Linear(64, 64)
        optimizer = torch.optim.SGD([*inward.parameters(), *onward.parameters()], lr=0.01)
        state, found = torch.zeros(512, 64), []
        held.clear()
        for step in range(steps):
            state, loss = state.detach(), torch.zeros(())
            for _ in range(6 if step == 2 else 5):
                given = torch.from_numpy(np.random.rand(512, 256).astype("float32")).clone()
                state = torch.tanh(inward(given) + onward(state))
                loss = loss + state.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(digest(loss))
            held.append(sum(storage.nbytes() for storage in living_storages("cpu")))
        return found

    np.random.seed(0)
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    np.random.seed(1)
    plain = seeded(loop, 8)
    np.random.seed(1)
    computed, outcome = enforced(loop, plan, tmp_path, 8, measure=True)
    assert computed == plain
    assert outcome.actions.done == len(plan.actions) == 5
    assert max(held[3:]) - held[2] < 512 * 256 * 4, "one input"
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_what_a_graph_of_the_iteration_before_stands_on_is_overwritten(tmp_path: Path) -> None:
    """Its backward comes an iteration later, after its source was changed in place: it is made again from what was there before."""

    def loop(steps: int) -> list[str]:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found, waiting = [], []
        for step in range(steps):
            source = torch.randn(1000, 64).mul(2)
            waiting.append((model(source + 1).mean(), source))
            del source
            if step < 3 or len(waiting) > 1:
                loss, source = waiting.pop(0)
                if step >= 3:
                    source.zero_()
                else:
                    del source
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found += [digest(loss), *state_digests(model)]
        return found

    plain = seeded(loop, 7)
    plan = plan_of(recorded(loop, tmp_path), everything("recompute"))
    assert [len(action.records) for action in plan.actions] == [
        3
    ]  # random numbers, their double, and one more
    computed, outcome = enforced(loop, plan, tmp_path, 7)
    assert computed == plain
    assert outcome.actions.done == len(plan.actions)
