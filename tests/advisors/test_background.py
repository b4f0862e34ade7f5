"""The planner beside a script: a first plan soon, a better one later, one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.advisors.background import Background
from memopt.errors import RunFailed
from memopt.plan import load_plan
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
WAIT_S = 120.0


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """The profile of a chain of 24 layers."""
    layers = [Layer((1 + i % 5) * MIB, 2.0 + i % 3, (i - 1,), op="aten.addmm.default", grad=MIB // 2) for i in range(24)]  # fmt: skip
    path = tmp_path / "chain.profile.json.gz"
    build(layers).save(path)
    return path


def test_a_script_that_waits_gets_a_plan_and_later_one_that_is_not_worse(
    trace_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    background = Background(trace_path, "60%", output, time_limit_s=1.0, waits=True)
    assert background.has_news(WAIT_S)
    first = background.plan()
    assert not background.is_over
    assert first.actions
    assert background.has_news(WAIT_S)
    last = background.plan()
    assert background.is_over
    assert not first.is_better_than(last)
    assert load_plan(output) == last


def test_a_script_that_goes_on_gets_one_plan(trace_path: Path, tmp_path: Path) -> None:
    background = Background(trace_path, "60%", tmp_path / "plan.json", time_limit_s=0.3)
    assert background.has_news(WAIT_S)
    assert background.plan().actions
    assert background.is_over


def test_a_plan_that_was_taken_away_is_not_written_again(trace_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    background = Background(trace_path, "60%", output, time_limit_s=1.0, waits=True)
    assert background.has_news(WAIT_S)
    background.plan()
    output.unlink()
    assert background.has_news(WAIT_S)
    with pytest.raises(RunFailed, match="no plan could be made"):
        background.plan()
    assert not output.exists()


def test_why_there_is_no_plan_is_told(tmp_path: Path) -> None:
    background = Background(tmp_path / "none.json.gz", "60%", tmp_path / "plan.json", waits=True)
    assert background.has_news(WAIT_S)
    with pytest.raises(RunFailed, match=r"none\.json\.gz"):
        background.plan()
    assert background.is_over
