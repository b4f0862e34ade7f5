"""A script that computes on two streams: what one has saved is not let go of while the other may still read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.estimators.simulator.decision import Decision
from memopt.instrument import one_stream
from memopt.instrument.one_stream import SEVERAL, OneStream
from memopt.plan import Plan
from tests.late.late_device import Race
from tests.late.late_session import Compute, LateCpu, run_late
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded

STEPS = 4


class TwoStreams:
    """Each step's last layer runs on a second stream. The first goes on before it waits for it, as a script may."""

    def __init__(self) -> None:
        self.device: LateCpu | None = None
        self.second: Compute | None = None

    def told(self, device: LateCpu) -> None:
        self.device, self.second = device, device.another()

    def loop(self, steps: int) -> list[str]:
        first, last = nn.Linear(64, 64), nn.Linear(64, 64)
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.01)
        losses = []
        for _ in range(steps):
            noise = torch.randn(32, 64)
            hidden = first(torch.randn(32, 64)).tanh()
            self._begin()
            out = last(hidden)
            self._go_on_with_the_first()
            del hidden
            for _ in range(8):
                noise = noise.sin() * 1.5
            self._meet()
            loss = out.square().mean() + noise.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        return losses

    def _begin(self) -> None:
        if self.device is not None and self.second is not None:
            self.second.wait_event(self.device.default.record_event())
            self.device.compute_on(self.second)

    def _go_on_with_the_first(self) -> None:
        if self.device is not None:
            self.device.compute_on(self.device.default)

    def _meet(self) -> None:
        if self.device is not None and self.second is not None:
            self.device.default.wait_event(self.second.record_event())


def to_the_host(problem: Problem) -> Decisions:
    return dict.fromkeys(problem.candidates, Decision(kind="swap", tier="host"))


def plan_for(streams: TwoStreams, folder: Path) -> Plan:
    trace = recorded(streams.loop, folder)
    device = msgspec.structs.replace(trace.device, host_out_bytes_per_s=1e10, host_in_bytes_per_s=1e10)
    return plan_of(msgspec.structs.replace(trace, device=device), to_the_host)


def run(streams: TwoStreams, plan: Plan, folder: Path, patch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    for seed in range(8):
        computed, outcome, *_ = run_late(streams.loop, plan, folder, STEPS, patch, seed, told=streams.told)
    return computed, outcome


def test_what_another_stream_saves_too_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = TwoStreams()
    plan, plain = plan_for(streams, tmp_path), seeded(streams.loop, STEPS)
    computed, outcome = run(streams, plan, tmp_path, monkeypatch)
    assert computed == plain
    assert (outcome.actions.planned, outcome.actions.done) == (2, 1), (
        "what the first stream alone saves leaves"
    )
    assert outcome.notes == [f"1 action skipped: {SEVERAL}"]


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_nothing_is_let_go_of_on_another_stream_than_the_first(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made again on one may be read on the other; a copy on one reads what the other makes."""
    streams = TwoStreams()
    plan, plain = plan_of(recorded(streams.loop, tmp_path), everything(kind)), seeded(streams.loop, STEPS)
    _, before = enforced(streams.loop, plan, tmp_path, STEPS)
    monkeypatch.setattr(one_stream, "current_stream", lambda device: object())
    computed, outcome = enforced(streams.loop, plan, tmp_path, STEPS)
    assert computed == plain
    assert before.actions.done > 0 == outcome.actions.done
    assert any(SEVERAL in note for note in outcome.notes)


def test_the_first_stream_is_that_of_the_iteration_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"cuda:0": "a", "cuda:1": "b"}
    monkeypatch.setattr(one_stream, "current_stream", lambda device: here.get(str(device)))
    streams, zero, one = OneStream(), torch.device("cuda:0"), torch.device("cuda:1")
    assert [streams.why_keep(each) for each in (zero, one, torch.device("cpu"), zero)] == [""] * 4
    here["cuda:0"] = "c"
    assert [streams.why_keep(each) for each in (zero, one)] == [SEVERAL, ""]
    streams.new_iteration()
    assert streams.why_keep(zero) == ""
    here["cuda:0"] = "a"
    assert streams.why_keep(zero) == SEVERAL


def test_where_it_does_not_there_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = TwoStreams()
    plan = plan_for(streams, tmp_path)
    monkeypatch.setattr(OneStream, "why_keep", lambda self, device: "")
    with pytest.raises(Race):
        run(streams, plan, tmp_path, monkeypatch)
