"""Codecs of values, planned by what the profile found of the values: the same bits, the predicted peak, and told where values have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.plan import Plan, load_plan
from memopt.trace import Trace, load_trace
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded

ROWS, WIDE = 1024, 512

Forward = Callable[[nn.Module, Tensor, int], Tensor]


def loop_of(forward: Forward) -> Callable[[int], list[str]]:
    """A loop that trains one layer; `forward` is given the layer, the batch and the number of the step."""

    def loop(steps: int) -> list[str]:
        layer = nn.Linear(WIDE, WIDE)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        found = []
        for step in range(steps):
            loss = forward(layer, torch.randn(ROWS, WIDE), step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [
                loss.item().hex(),
                *(p.detach().double().sum().item().hex() for p in layer.parameters()),
            ]
        return found

    return loop


def sparse(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """A third of the values that the product saves, and ReLU with it, is not zero."""
    hidden = torch.relu(layer(x) - 0.25)
    return layer(hidden).square().mean()


def picked(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """`gather` saves 1000 indices of 8 bytes a row."""
    return layer(x).gather(1, torch.randint(0, WIDE, (ROWS, 1000))).square().mean()


def widened(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """The products save what came from bf16 as fp32."""
    loss = torch.zeros(())
    for weight in (0.5, 0.25):
        loss = loss + ((x * weight).bfloat16().float() * layer(x).tanh()).square().mean()
    return loss


CASES = {"zero_bitmap": (sparse, 0.95), "narrow_int": (picked, 0.8), "exact_cast": (widened, 0.95)}
"""The loop, and the share of its peak that no plan without the codec meets."""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return {
        codec: recorded(loop_of(forward), tmp_path_factory.mktemp(codec))
        for codec, (forward, _) in CASES.items()
    }


def compressed(trace: Trace, share: float) -> Plan:
    """The planner's own, for `share` of the plain peak."""
    return Adviser(trace, allowed(("compress",), ())).plan(int(share * trace.peak_bytes), "auto")


@pytest.mark.parametrize("codec", CASES)
def test_a_plan_uses_the_codec_and_keeps_bits_and_peak(
    codec: str, traces: dict[str, Trace], tmp_path: Path
) -> None:
    forward, share = CASES[codec]
    plan = compressed(traces[codec], share)
    assert codec in {action.codec for action in plan.actions}
    plan.save(path := tmp_path / "plan.json")
    plan, loop = load_plan(path), loop_of(forward)
    computed, outcome = enforced(loop, plan, tmp_path, 6, measure=True)
    assert computed == seeded(loop, 6)
    assert outcome.actions.done == outcome.actions.planned
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-4)
    assert not [note for note in outcome.notes if "compressed" in note]


def test_the_profile_tells_what_it_found_and_a_file_keeps_it(
    traces: dict[str, Trace], tmp_path: Path
) -> None:
    (found,) = [f for f in traces["zero_bitmap"].value_facts if f.nonzero_share < 0.9]
    assert 0.25 < found.nonzero_share < 0.45
    (found,) = [f for f in traces["narrow_int"].value_facts if f.low is not None]
    assert (found.dtype, found.low, found.high) == ("int64", 0, WIDE - 1)
    casts = [f for f in traces["exact_cast"].value_facts if f.exact_as]
    assert [f.exact_as for f in casts] == ["bfloat16", "bfloat16"]
    traces["narrow_int"].save(path := tmp_path / "p.json.gz")
    assert load_trace(path).value_facts == traces["narrow_int"].value_facts


def test_what_a_node_has_decoded_is_there_until_its_last_op(tmp_path: Path) -> None:
    """The product's node multiplies twice: what it saved is decoded for both, beside what the first one makes."""

    def loop(steps: int) -> list[str]:
        net = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.8), nn.Linear(512, 512), nn.Linear(512, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(torch.randn(512, 64)), torch.randint(2, (512,))).backward()
            optimizer.step()
        return [p.detach().double().sum().item().hex() for p in net.parameters()]

    every = everything("compress")
    plan = plan_of(
        recorded(loop, tmp_path),
        lambda problem: {each: how for each, how in every(problem).items() if how.codec == "zero_bitmap"},
    )
    assert [action.codec for action in plan.actions] == ["zero_bitmap"]
    plain = seeded(loop, 4)
    computed, outcome = enforced(loop, plan, tmp_path, 4, measure=True)
    assert computed == plain
    assert outcome.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-4)


def grows_dense(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """From the fifth step on half of the values are not zero, then all."""
    hidden = torch.relu(layer(x) - 0.25 + 0.25 * max(0, step - 3))
    return layer(hidden).square().mean()


def loses_its_origin(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """From the fifth step on nothing came from bf16."""
    wide = x.bfloat16().float() if step < 4 else x + 0
    return (wide * layer(x).tanh()).square().mean()


def indexes_far(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """From the fifth step on the indices do not fit the planned type."""
    table = torch.cat([layer(x).flatten()] * 2)
    return table.take(torch.randint(0, 9 if step < 4 else len(table), (ROWS * 1000,))).square().mean()


@pytest.mark.parametrize("forward", [grows_dense, loses_its_origin, indexes_far])
def test_other_values_than_planned_keep_their_bits_and_are_told(forward: Forward, tmp_path: Path) -> None:
    loop = loop_of(forward)
    plan = plan_of(recorded(loop, tmp_path), everything("compress"))
    computed, outcome = enforced(loop, plan, tmp_path, 8, measure=True)
    assert computed == seeded(loop, 8)
    assert outcome.measured_peak_bytes > plan.predicted_peak_bytes
    (note,) = [note for note in outcome.notes if "compressed" in note]
    assert note.startswith("1 compressed tensors took up to ")


def zeros_at_first(layer: nn.Module, x: Tensor, step: int) -> Tensor:
    """As a LoRA's product before its second factor has been trained: representable in any type, for now."""
    return (x * (layer(x) * (0.0 if step < 4 else 1.0))).square().mean()


def test_zeros_alone_are_no_sign_of_a_narrower_type(tmp_path: Path) -> None:
    trace = recorded(loop_of(zeros_at_first), tmp_path)
    assert trace.value_facts
    assert not [f for f in trace.value_facts if f.exact_as]


def clamped(bound: float | None) -> Forward:
    """`clamp` without an upper bound until the fifth step, then with this one."""

    def forward(layer: nn.Module, x: Tensor, step: int) -> Tensor:
        return (layer(x) * 1.5).clamp(min=0.1, max=bound if step >= 4 else None).square().mean()

    return forward


@pytest.mark.parametrize(("bound", "skipped"), [(None, 0), (0.2, 0)])
def test_a_bound_that_the_profile_did_not_have_is_noticed(
    bound: float | None, skipped: int, tmp_path: Path
) -> None:
    loop = loop_of(clamped(bound))
    plan = plan_of(recorded(loop, tmp_path), everything("compress"))
    assert [ref.node for action in plan.actions for ref in action.slots] == ["ClampBackward1"]
    computed, outcome = enforced(loop, plan, tmp_path, 7)
    assert computed == seeded(loop, 7)
    assert outcome.actions.skipped == skipped
