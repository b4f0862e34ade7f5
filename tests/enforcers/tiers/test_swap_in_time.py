"""A disk that is slower than the profile said costs time, not memory: the run waits where the prediction has the bytes away."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import torch

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.device import Device
from memopt.enforcers.tiers.disk import DiskStore
from memopt.enforcers.tiers.swapped import Swapper
from memopt.estimators.simulator.decision import Decision
from memopt.trace import Trace
from tests.support.enforced import SWAP, enforced, plan_of, problem_of, recorded, seeded

TENSOR_BYTES = 1024 * 256 * 4
"""What a layer of `with_a_teacher` saves."""


def deep_net(steps: int) -> list[str]:
    model = torch.nn.Sequential(
        *[layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(2048, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex()]


def all_to_disk(problem: Problem) -> Decisions:
    return dict.fromkeys(problem.candidates, SWAP)


def a_machine(trace: Trace, out_bytes_per_s: float) -> Device:
    """Whose disk takes so many bytes, and whose other rates are none that this one has just now."""
    rates = {"disk_out_bytes_per_s": out_bytes_per_s, "disk_in_bytes_per_s": 1e13, "copy_bytes_per_s": 1e10}
    return msgspec.structs.replace(trace.device, **rates)


def test_late_copies_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded(deep_net, tmp_path)
    plan = plan_of(msgspec.structs.replace(trace, device=a_machine(trace, 1e13)), all_to_disk)
    assert plan.predicted_peak_bytes < 0.7 * plan.unplanned_peak_bytes
    assert sum(action.away_by is not None for action in plan.actions) >= 6
    write = DiskStore._write_piece

    def slow(*args: object) -> object:
        time.sleep(0.05)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "_write_piece", slow)
    _, waiting = enforced(deep_net, plan, tmp_path, 4, measure=True)
    assert waiting.actions.done == waiting.actions.planned > 4
    assert waiting.measured_peak_bytes <= 1.02 * plan.predicted_peak_bytes
    careless = [msgspec.structs.replace(action, away_by=None) for action in plan.actions]
    plan_of_the_careless = msgspec.structs.replace(plan, actions=careless)
    _, late = enforced(deep_net, plan_of_the_careless, tmp_path, 4, measure=True)
    assert late.measured_peak_bytes > 1.1 * plan.predicted_peak_bytes


def with_a_teacher(steps: int) -> list[str]:
    """Nothing is saved while the teacher runs, which needs the most."""
    model, teacher = (
        torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())])
        for _ in range(2)
    )
    wide = torch.nn.Linear(256, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(TENSOR_BYTES // (256 * 4), 256)
        out = model(x)
        with torch.no_grad():
            wanted = wide(teacher(x)).mean(1, keepdim=True)
        loss = (out - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item().hex()]


def test_late_copies_are_waited_for_where_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(with_a_teacher, tmp_path)
    trace = msgspec.structs.replace(trace, step_ms=0.0)
    trace = msgspec.structs.replace(
        trace, ops=msgspec.structs.replace(trace.ops, time_us=[1000.0] * trace.op_count)
    )
    # the six that the student saves are on their way for 15 ops, past its own last one
    device = a_machine(trace, 6 * TENSOR_BYTES / 15 * 1000)
    plan = plan_of(msgspec.structs.replace(trace, device=device), all_to_disk)
    waits = [action.away_before for action in plan.actions if action.away_before is not None]
    assert len(waits) >= 2
    assert all(action.away_by is None for action in plan.actions if action.away_before is not None)
    write = DiskStore._write_piece

    def slow(*args: object) -> object:
        time.sleep(0.25)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskStore, "_write_piece", slow)
    plain = seeded(with_a_teacher, 3)
    same, waiting = enforced(with_a_teacher, plan, tmp_path, 3, measure=True)
    assert same == plain
    assert waiting.actions.done == waiting.actions.planned
    assert waiting.measured_peak_bytes <= 1.02 * plan.predicted_peak_bytes
    careless = [msgspec.structs.replace(action, away_before=None) for action in plan.actions]
    plan_of_the_careless = msgspec.structs.replace(plan, actions=careless)
    _, late = enforced(with_a_teacher, plan_of_the_careless, tmp_path, 3, measure=True)
    assert late.measured_peak_bytes >= plan.predicted_peak_bytes + TENSOR_BYTES


def gradient_penalty(steps: int) -> list[str]:
    """What the first forward saves is unpacked last; what the second saves twice, in the backward that makes a graph and in its own."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(4096, 64)).square().mean()
        x = torch.randn(4096, 64, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (loss + gradient.norm()).backward()
        optimizer.step()
    return [loss.item().hex()]


def test_a_slot_that_is_unpacked_twice_triggers_the_first_time(tmp_path: Path) -> None:
    """The copy in would start at the first unpack, long before the prediction has the bytes back."""
    trace = recorded(gradient_penalty, tmp_path)
    unpacks = [trace.slots.unpacks.row(slot) for slot in range(len(trace.slots.storage))]
    _, problem = problem_of(trace)
    triggers = problem.triggers.tolist()
    assert triggers == sorted({row[0] for row in unpacks if row})
    again = {op for row in unpacks for op in row[1:]} - {*triggers}
    asked = {s: problem.view.saved[s].first_use for s in problem.candidates}
    assert any(min(again) < use for use in asked.values()), "the loop has what is tested"
    chosen = {
        s: Decision(kind="swap", tier="disk", prefetch_op=max(op for op in triggers if op <= use))
        for s, use in asked.items()
    }
    plan = plan_of(trace, lambda _: chosen)
    places = {
        (trace.strings[trace.slots.module[slot]], trace.slots.ordinal[slot]): row
        for slot, row in enumerate(unpacks)
    }
    started = [places[a.prefetch.module, a.prefetch.ordinal][0] for a in plan.actions if a.prefetch]
    assert started == [chosen[a.storage].prefetch_op for a in plan.actions]


def test_copies_that_end_in_backward_are_waited_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host runs ahead of the copies; on a CPU backward begins by waiting for all of them."""
    trace = recorded(deep_net, tmp_path)
    ops = msgspec.structs.replace(trace.ops, time_us=[1000.0] * trace.op_count)
    trace = msgspec.structs.replace(trace, ops=ops)
    forward_ms = trace.ops.phase.count(0)
    in_all = 8 * 2 * 2048 * 256 * 4
    device = msgspec.structs.replace(a_machine(trace, in_all / (2.5 * forward_ms) * 1000), kind="cuda")
    plan = plan_of(msgspec.structs.replace(trace, device=device, step_ms=0.0), all_to_disk)
    plan = msgspec.structs.replace(plan, device=trace.device)
    in_backward = {n for n, action in enumerate(plan.actions) if action.away_at_use}
    assert 2 <= len(in_backward) < len(plan.actions)
    monkeypatch.setattr(Swapper, "wait_for_all", lambda self: None)
    write, wait = DiskStore._write_piece, Swapper.wait_until_away
    waited: list[int] = []

    def slow(*args: object) -> object:
        time.sleep(0.02)
        return write(*args)  # type: ignore[arg-type]

    def watched(swapper: Swapper, actions: Iterable[int]) -> None:
        wait(swapper, actions)
        swapped = [content for n in actions if (content := swapper._swapped[n]()) is not None]
        assert all(content.source() is None for content in swapped), "it has left"
        if torch._C._current_graph_task_id() >= 0:
            waited.extend(actions)

    monkeypatch.setattr(DiskStore, "_write_piece", slow)
    monkeypatch.setattr(Swapper, "wait_until_away", watched)
    _, outcome = enforced(deep_net, plan, tmp_path, 3)
    assert outcome.actions.done == len(plan.actions)
    assert sorted(waited) == sorted(3 * list(in_backward))
