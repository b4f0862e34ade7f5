"""A script that runs torch.profiler itself has it, whenever it starts: memopt's own gives way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function

from memopt.enforcers.session import ApplySession, Options
from memopt.instrument.memory.allocator_events import MARK, marked, note_freed, started_profile, stop_profile
from memopt.instrument.script import script_profiler
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded, state_digests

CPU = [torch.profiler.ProfilerActivity.CPU]


def _loop(profile, seen: list[int]):
    def loop(steps: int) -> list[str]:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        optimizer = torch.optim.Adam(model.parameters())
        found = []
        with profile() as running:
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(128, 32)).square().mean().backward()
                optimizer.step()
                running.step()
                found += state_digests(model)
        seen.append(len(running.events() or []))
        return found

    return loop


def _whole() -> torch.profiler.profile:
    return torch.profiler.profile(activities=CPU)


def _scheduled() -> torch.profiler.profile:
    return torch.profiler.profile(
        activities=CPU, schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("profile", [_whole, _scheduled], ids=["whole", "scheduled"])
def test_the_script_profiles_itself(profile, tmp_path: Path) -> None:
    seen: list[int] = []
    loop = _loop(profile, seen)
    plain = seeded(loop, 8)
    trace = recorded(loop, tmp_path)
    assert trace.peak_bytes > trace.base_bytes
    assert max(trace.ops.time_us) > 0
    plan = plan_of(trace, everything("recompute"))
    session = ApplySession(plan, Options(swap_dir=tmp_path, measure=True))
    session.install()
    try:
        computed = seeded(loop, 8)
    finally:
        outcome = session.finished()
    assert computed == plain
    assert outcome is not None
    assert outcome.actions.done > 0
    assert min(seen) > 100, "a profile of the script's saw less than it runs"


@pytest.mark.filterwarnings("ignore")
def test_a_second_training_is_measured_again(tmp_path: Path) -> None:
    """What the script's profiler leaves behind does not keep memopt's from starting."""
    seen: list[int] = []
    seeded(_loop(_whole, seen), 2)
    trace = recorded(_loop(_whole, seen), tmp_path)
    computed, outcome = enforced(_loop(_whole, seen), plan_of(trace, everything("recompute")), tmp_path, 3)
    assert computed
    assert outcome.divergences == 0


def test_a_scope_that_is_open_when_memopts_profile_ends_is_never_closed() -> None:
    """torch would write its end time into memory that was freed with the profile, once the next one runs."""
    first = started_profile()
    assert first is not None
    scope = record_function("step")
    scope.__enter__()
    stop_profile(first)
    second = started_profile()
    assert second is not None
    scope.__exit__(None, None, None)
    with record_function("later") as later:
        pass
    stop_profile(second)
    assert script_profiler._never_closed[-1] is scope.record
    assert all(record is not later.record for record in script_profiler._never_closed)


@pytest.mark.filterwarnings("ignore")
def test_memopts_profile_notes_marks_and_memory_and_none_of_the_ops() -> None:
    """The ops inside are many times as many; while memopt's runs, and until it has stopped, nobody else profiles."""
    running = started_profile()
    assert running is not None
    mark = marked(MARK)
    kept = (torch.ones(1000) * 2).relu()
    mark.__exit__(None, None, None)
    assert note_freed(7)
    inner = running.profile.profiler
    events = stop_profile(running)
    assert events is not None
    told = inner.kineto_results.events()
    assert {each.name() for each in told} == {MARK, "[memory]", "memopt::freed 7"}
    assert [kind for _, kind, _ in events if kind != 1] == [2, 0]
    assert sum(size for _, _, size in events) == kept.nbytes - 7
    with _whole() as theirs:
        torch.ones(1000).relu()
    assert {"aten::ones", "aten::relu"} <= {each.name for each in theirs.events()}


@pytest.mark.filterwarnings("ignore")
def test_a_block_that_ends_is_noted_in_no_profile_of_the_scripts() -> None:
    with _whole() as theirs:
        assert not note_freed(7)
        torch.ones(1000).relu()
    names = {each.name for each in theirs.events()}
    assert "aten::relu" in names
    assert not any(name.startswith("memopt") for name in names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_torch_jit_can_still_script_a_scope() -> None:
    script_profiler.watch()

    def labelled(x: torch.Tensor) -> torch.Tensor:
        with record_function("scope"):
            return x + 1

    assert torch.jit.script(labelled)(torch.ones(1)).item() == 2
