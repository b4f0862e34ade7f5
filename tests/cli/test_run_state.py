"""`memopt run` where the optimizer's state has no room from its first step on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from memopt.cli.run.optimizer_state import StateBeside
from tests.cli.test_run import memopt, outcome_of, plain

SCRIPT = """
import hashlib
import torch
from torch import nn
torch.manual_seed(0)
def checked(state):
    return sum(each["exp_avg_sq"].sum().item() for each in state.values()).hex()
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(10):
    loss = model(torch.randn(128, 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
    if step == 7:
        print(checked(optimizer.state_dict()["state"]))
print(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest())
"""
BUDGET = 25 << 20
"""Parameters and gradients take 16 MiB, the state as much again, activations 4."""

Ran = tuple[Path, subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A folder in which the script ran twice."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "train.py").write_text(SCRIPT)
    args = ("run", "--budget", f"{BUDGET}B", "--outcome")
    first = memopt(folder, *args, "o.json", "train.py")
    return folder, first, memopt(folder, *args, "o2.json", "train.py")


@pytest.mark.parametrize("number", [1, 2])
def test_it_is_in_a_tier_from_the_first_step_on(ran: Ran, number: int) -> None:
    folder, done = ran[0], ran[number]
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(folder).stdout
    looked = outcome_of(folder, "o.json")["looked_at_bytes"]
    assert abs(looked - (32 << 20)) < 1 << 20, "at the state, all of which came back"
    assert "NOT held: 32.1 MiB, 7.06 MiB above the budget of 25.0 MiB, when the script looked at optimizer state" in done.stderr  # fmt: skip
    assert "had no room in its first step" in done.stderr
    course = outcome_of(folder, "o.json" if number == 1 else "o2.json")
    assert course["from_cache"] is (number == 2)
    assert 8 << 20 < course["state_away_bytes"] < 16 << 20
    assert all(guard["most_bytes"] <= BUDGET for guard in course["guards"])
    assert course["outcome"]["measured_peak_bytes"] <= BUDGET
    assert not list(folder.glob("*swap*"))


def test_the_time_of_its_way_is_in_the_plain_step(ran: Ran) -> None:
    """What the recorded steps take besides their ops no plan can save."""
    course = outcome_of(ran[0])
    assert course["plain_step_ms"] > 2


def test_it_stays_where_the_optimizer_is_denied(ran: Ran) -> None:
    folder = ran[0]
    done = memopt(
        folder,
        "run",
        "--fresh",
        "--deny",
        "optimizer",
        "--budget",
        f"{BUDGET}B",
        "--outcome",
        "d.json",
        "train.py",
    )
    assert done.stdout == plain(folder).stdout
    course = outcome_of(folder, "d.json")
    assert course["state_away_bytes"] == 0
    assert max(guard["most_bytes"] for guard in course["guards"]) > BUDGET


def test_where_no_such_plan_holds_the_budget_it_is_recorded_with_the_state(ran: Ran) -> None:
    """Parameters and gradients alone pass it: a plan that moves gradients has to see how the optimizer steps."""
    folder = ran[0]
    done = memopt(folder, "run", "--fresh", "--budget", "15MiB", "--outcome", "low.json", "train.py")
    assert done.stdout == plain(folder).stdout
    assert "recorded once more with the optimizer's state on the device" in done.stderr
    course = outcome_of(folder, "low.json")
    assert course["state_away_bytes"] == 0
    assert course["outcome"]["actions"]["done"] > 0
    assert course["enforced_after"] == 4


def test_what_the_budget_has_room_for_stays(ran: Ran) -> None:
    folder = ran[0]
    done = memopt(folder, "run", "--fresh", "--budget", "32MiB", "--outcome", "high.json", "train.py")
    assert done.stdout == plain(folder).stdout
    course = outcome_of(folder, "high.json")
    outcome = course["outcome"]
    assert 0 < course["state_away_bytes"] < 8 << 20
    assert 31 << 20 < outcome["measured_peak_bytes"] <= 32 << 20
    assert abs(outcome["measured_peak_bytes"] / outcome["predicted_peak_bytes"] - 1) < 0.02
    assert course["looked_at_bytes"] > 32 << 20


@pytest.mark.parametrize("foreseen", [True, False])
def test_state_that_was_there_when_the_plan_was_made_stays(
    foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step inside backward begins near the plan's peak: what the plan has seen of it is in that."""
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    guard, sent = cast(Any, SimpleNamespace(bytes_now=lambda: 100, budget_bytes=100, rests=False)), []
    monkeypatch.setattr(StateBeside, "_send", lambda self, loop, budget_bytes: sent.append(budget_bytes))
    beside = StateBeside(cast(Any, SimpleNamespace()), lambda: guard)
    beside.first_step(optimizer, cast(Any, None), guard, foreseen=foreseen)
    assert sent == ([] if foreseen else [100])


@pytest.mark.parametrize(("rests", "looks"), [(True, 2), (False, 6)])
def test_what_is_there_is_looked_for_once_for_many_first_steps(rests: bool, looks: int) -> None:
    """Of 82 optimizers, one for each parameter, each looked at all objects of the process: 7 s."""
    looked: list[int] = []

    def bytes_now() -> int:
        looked.append(1)
        return 0

    guard = cast(Any, SimpleNamespace(bytes_now=bytes_now, budget_bytes=1 << 20, rests=rests))
    beside = StateBeside(cast(Any, SimpleNamespace()), lambda: guard)
    for _ in range(2):
        beside.backward_begins()
        for _ in range(3):
            optimizer = torch.optim.Adam([torch.zeros(4, requires_grad=True)])
            beside.first_step(optimizer, cast(Any, None), guard, foreseen=True)
    assert len(looked) == looks


def test_what_steps_inside_backward_leaves_for_a_plan_that_needs_it(tmp_path: Path) -> None:
    """One optimizer for each parameter, in hooks: no plan takes those in pieces, and the smallest peak was told as one that no plan can go below."""
    loop = """
optimizers = {each: torch.optim.AdamW([each], 1e-3) for each in model.parameters()}
def used(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for each in model.parameters():
    each.register_post_accumulate_grad_hook(used)
for step in range(12):
    loss = model(torch.randn(128, 512)).square().mean()
    loss.backward()
    print(step, loss.item().hex(), flush=True)
"""
    before, after = SCRIPT[: SCRIPT.index("optimizer = ")], SCRIPT[SCRIPT.index("print(hashlib") :]
    (tmp_path / "train.py").write_text(before + loop + after)
    done = memopt(tmp_path, "run", "--budget", "60%", "--outcome", "o.json", "train.py")
    assert done.stdout == plain(tmp_path).stdout
    assert "recorded once more with the optimizer's state in a tier" in done.stderr
    course = outcome_of(tmp_path, "o.json")
    outcome = course["outcome"]
    assert course["state_away_bytes"] > 4 << 20
    assert outcome["measured_peak_bytes"] <= outcome["budget_bytes"]
    assert abs(outcome["measured_peak_bytes"] / outcome["predicted_peak_bytes"] - 1) < 0.02
    again = memopt(tmp_path, "run", "--budget", "60%", "--outcome", "o2.json", "train.py")
    assert again.stdout == done.stdout
    assert outcome_of(tmp_path, "o2.json")["from_cache"]


INSIDE = """
import hashlib, os
import torch
from torch import nn
from memopt.instrument.memory.meter import living_storages
torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held, zeros_like = [], torch.zeros_like
def counted(*args, **options):
    made = zeros_like(*args, **options)
    held.append(sum(each.nbytes() for each in living_storages("cpu")))
    return made
for step in range(8):
    loss = model(torch.randn(512, 512)).square().mean()
    loss.backward()
    torch.zeros_like = counted if step == 0 else zeros_like
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
state = optimizer.state_dict()["state"]
for tensors in ([v for each in state.values() for v in each.values()], [*model.parameters()]):
    print(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest())
with open("held", "w") as file:
    print(max(held), file=file)
"""


def test_the_first_step_under_a_kept_plan_is_within_the_budget(
    tmp_path: Path,
) -> None:
    """It makes the state beside weights and all gradients, 32 MiB here; the plan, which was kept, is of later steps, inside backward or in pieces."""
    (tmp_path / "train.py").write_text(INSIDE)
    args = ("--budget", "65%", "--time-limit", "1", "--outcome", "o.json", "--force", "train.py")  # fmt: skip
    expected, seen = plain(tmp_path).stdout, []
    plain_bytes = int((tmp_path / "held").read_text())
    for _ in range(2):
        ran = memopt(tmp_path, "run", *args)
        assert ran.stdout == expected
        seen.append(ran.stderr)
    assert "under the kept plan from iteration 1 on" in seen[1]
    outcome = outcome_of(tmp_path)
    assert plain_bytes > outcome["budget_bytes"] > int((tmp_path / "held").read_text())
    assert outcome["outcome"]["actions"]["skipped"] == 0
