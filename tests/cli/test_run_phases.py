"""`memopt run` on scripts that go over to another phase, which saves more than the recorded iteration for good: layers are unfrozen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from memopt.plan import load_plan
from tests.cli.test_run import memopt, outcome_of, plain

SCRIPT = """
import os, time
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model[:4].requires_grad_(False)
ends, step, late = time.time() + 60, 0, 0
while time.time() < ends and late < 12:
    if step == 8:
        model.requires_grad_(True)
    loss = model(torch.randn(1024, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 20:
        print(step, loss.item().hex(), flush=True)
    step += 1
    late += step > 20 and os.path.exists(os.environ.get("WAIT_FOR", "."))
"""
BUDGET = "7MiB"
"""A frozen step takes 4, another one 11."""

Ran = tuple[Path, subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A folder in which the script ran twice."""
    folder = tmp_path_factory.mktemp("phases")
    (folder / "train.py").write_text(SCRIPT)
    args = ("run", "--budget", BUDGET, "--time-limit", "0.5", "--outcome")
    first = memopt(folder, *args, "o.json", "train.py", until="memopt: the training goes on otherwise")
    second = memopt(folder, *args, "o2.json", "train.py", until="memopt: under the kept plan")
    return folder, first, second


def test_the_other_phase_has_a_plan_of_its_own_and_both_are_held(ran: Ran) -> None:
    folder, first, _ = ran
    assert first.returncode == 0, first.stderr
    assert first.stdout == plain(folder).stdout
    course = outcome_of(folder)
    (after,) = course["phases_after"]
    assert course["enforced_after"] < 8 < after < course["iterations"]
    outcome = course["outcome"]
    assert outcome["other_steps"] == 0
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0
    assert outcome["unplanned_peak_bytes"] > outcome["budget_bytes"] >= course["peak_bytes"] > 0
    assert "memopt: held: " in first.stderr
    assert f"under another after {after}, as the training goes on otherwise" in first.stderr
    assert "moved away beside the plan" in first.stderr


def test_the_next_run_has_both_plans(ran: Ran) -> None:
    folder, first, second = ran
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    course = outcome_of(folder, "o2.json")
    assert course["from_cache"]
    assert len(course["phases_after"]) == 1
    assert "recorded" not in second.stderr
    assert course["peak_bytes"] <= course["outcome"]["budget_bytes"]


def test_where_iterations_become_smaller_the_plan_for_the_large_ones_ends(tmp_path: Path) -> None:
    """A script halves its batch, or its longest batch came first: it went on with the actions of the plan, which it had no need of."""
    smaller = SCRIPT.replace("model[:4].requires_grad_(False)\n", "").replace(
        "1024", "1024 if step < 6 else 256"
    )
    (tmp_path / "train.py").write_text(smaller)
    args = ("run", "--budget", BUDGET, "--time-limit", "0.5", "--outcome", "o.json", "train.py")
    done = memopt(tmp_path, *args, until="memopt: the training goes on otherwise")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(tmp_path).stdout
    course = outcome_of(tmp_path)
    (after,) = course["phases_after"]
    assert course["enforced_after"] < 6 < 22 <= after < course["iterations"]
    assert course["outcome"]["actions"]["planned"] == 0, "they fit"
    assert ", iterations saved less than the plan is for" in done.stderr
    assert "memopt: held: " in done.stderr


PAGED = (
    SCRIPT.replace("nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)", "nn.Linear(512, 512), nn.GELU()")
    .replace("range(5)", "range(4)")
    .replace("SGD(model.parameters(), 0.01)", "AdamW(model.parameters(), 0.001)")
    .replace("model[:4].requires_grad_(False)\n", "")
    .replace("1024, 64", "64 if step < 6 else 512, 512")
)
"""Parameters, gradients and state take 16 MiB; the batch is eight times as large from step 6 on."""


def test_a_phase_is_recorded_though_the_plan_before_had_sent_state_away(tmp_path: Path) -> None:
    """It was not, for such a plan could not end; the guard alone held the rest of the run, at what that costs."""
    (tmp_path / "train.py").write_text(PAGED)
    args = ("run", "--budget", "75%", "--time-limit", "0.5", "--outcome", "o.json", "train.py")
    done = memopt(tmp_path, *args, until="memopt: the training goes on otherwise")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(tmp_path).stdout
    plans = [load_plan(each) for each in (tmp_path / ".memopt").glob("*.plan.json")]
    assert any(plan.in_pieces is not None and plan.in_pieces.tier for plan in plans)
    course = outcome_of(tmp_path)
    (after,) = course["phases_after"]
    assert course["enforced_after"] < 6 < after < course["iterations"]
    outcome = course["outcome"]
    assert outcome["measured_peak_bytes"] <= outcome["budget_bytes"] < outcome["unplanned_peak_bytes"]


@pytest.mark.parametrize("part", ["recording", "planning"])
def test_where_the_other_phase_comes_to_no_plan_the_one_before_goes_on(part: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text(BROKEN[part])
    args = ("run", "--budget", BUDGET, "--time-limit", "0.5", "--outcome", "o.json", "train.py")
    done = memopt(tmp_path, *args, until="memopt: under the plan before", program=("broken.py",))
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(tmp_path).stdout
    course = outcome_of(tmp_path)
    assert course["peak_bytes"] <= course["outcome"]["budget_bytes"], "by the guard"
    assert "memopt: held: " in done.stderr


_MAIN = """
from memopt.cli.main import main
main(prog_name="memopt")
"""
BROKEN = {
    "recording": """
from memopt.cli.run import stages
from memopt.errors import RunFailed
from memopt.profiler.session import ProfileSession
begin_in, seen = ProfileSession.begin_in, []
def once(self, loop):
    begin_in(self, loop)
    if seen:
        self.failure = RunFailed("no profile was written", why="it is the second")
    seen.append(self)
ProfileSession.begin_in = once
"""
    + _MAIN,
    "planning": """
from memopt.cli.run import planning
from memopt.errors import RunFailed
plan, seen = planning.Planning.plan, []
def once(self):
    if self._background not in seen:
        seen.append(self._background)
    if len(seen) > 1:
        raise RunFailed("no plan could be made", why="it is the second")
    return plan(self)
planning.Planning.plan = once
"""
    + _MAIN,
}
"""memopt, whose second recording, or planner, fails."""
