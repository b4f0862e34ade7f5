"""`memopt run` on scripts whose iterations differ in size: the plan allows for larger ones than the recorded, and a run learns from the one
before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.cli.run.cache import Cache
from memopt.instrument.script.command import Command
from tests.cli.test_run import memopt, outcome_of, plain

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
lengths = [int(each) for each in sys.argv[1:]]
layers = [nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(500, 128), *layers, nn.Linear(128, 500))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
for step in range(12):
    tokens = torch.randint(0, 500, (4, lengths[min(step, len(lengths) - 1)]))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, *lengths: str, budget: str, told: str = "") -> tuple[str, float]:
    """What it printed, and the factor that its plan allowed for; `told`: what memopt said, too."""
    args = (
        "run",
        "--budget",
        budget,
        "--time-limit",
        "1",
        "--outcome",
        "o.json",
        "--force",
        "train.py",
        *lengths,
    )
    ran = memopt(folder, *args)
    assert ran.returncode == 0, ran.stderr
    assert told in ran.stderr
    plans = [*(folder / ".memopt").glob("*.plan.json")]
    return ran.stdout, json.loads(plans[0].read_text())["grown"] if plans else 0.0


def test_a_plan_allows_for_longer_texts_where_the_first_ones_differ(folder: Path) -> None:
    lengths = ("48", "64", "80", "96", "96")
    printed, grown = run(folder, *lengths, budget="14MiB")
    assert printed == plain(folder, *lengths).stdout
    outcome = outcome_of(folder)
    assert grown > 1.1
    assert outcome["outcome"]["other_steps"] > 0
    assert outcome["outcome"]["measured_peak_bytes"] <= outcome["outcome"]["budget_bytes"]


ROUTED = """
import torch
from torch import nn
torch.manual_seed(0)
experts = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
optimizer = torch.optim.AdamW([p for each in experts for p in each.parameters()], lr=0.001)
for step in range(12):
    rows = torch.randn(1024, 256).split([200 + 10 * step, 300 - 10 * step, 220 + 5 * step, 304 - 5 * step])
    loss = sum(expert(mine).square().sum() for expert, mine in zip(experts, rows))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
"""


@pytest.mark.parametrize("budget", ["75%", "40MiB"])
def test_a_plan_leaves_room_where_rows_go_to_other_experts(folder: Path, budget: str) -> None:
    (folder / "train.py").write_text(ROUTED)
    printed, grown = run(folder, budget=budget)
    assert printed == plain(folder).stdout
    assert 1.01 < grown <= 1.05
    outcome = outcome_of(folder)
    assert outcome["peak_bytes"] <= outcome["budget_bytes"]


def test_a_run_that_was_surprised_tells_the_next_one(folder: Path) -> None:
    lengths = ("64",) * 5 + ("130", "120") * 4  # alike they would be another phase, with a plan of its own
    first, _ = run(
        folder,
        *lengths,
        budget="10.5MiB",
        told="the next run of this command plans for iterations that take 2.",
    )
    (growth,) = (folder / ".memopt").glob("*.growth")
    assert float(growth.read_text().split()[0]) > 2
    assert first == plain(folder, *lengths).stdout


LAZY = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(256, 256), nn.Tanh())], nn.Linear(256, 1))
penalty = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.SGD([*net.parameters(), *penalty.parameters()], lr=0.001)
for step in range(1, 21):
    loss = net(torch.randn(1024, 256)).square().mean()
    if step % 4 == 0:
        x = torch.randn(1024, 256)
        loss = loss + penalty(x).square().mean() + net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
"""


def test_a_run_records_the_iteration_that_was_the_largest_of_the_one_before(tmp_path: Path) -> None:
    """A penalty in each fourth iteration: no plan for another one knows what that saves."""
    (tmp_path / "train.py").write_text(LAZY)
    args = ("run", "--budget", "60%", "--time-limit", "1", "--outcome", "o.json", "--force", "train.py")
    first = memopt(tmp_path, *args)
    passed_bytes = outcome_of(tmp_path)["peak_bytes"]
    second = memopt(tmp_path, *args)
    assert first.stdout == second.stdout == plain(tmp_path).stdout
    told = "the next run of this command records iteration 4, which saved tensors that this plan knows nothing of"
    assert told in first.stderr
    assert "recorded iteration 4; planning for" in second.stderr
    assert outcome_of(tmp_path)["peak_bytes"] <= 1.01 * passed_bytes
    assert "note: the next run of this command records" not in second.stderr


def test_no_late_iteration_is_waited_for_and_none_but_the_first_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    cache = Cache(Command(("train.py",)), {})
    assert not cache.record_at(0)
    assert not cache.record_at(100)
    assert cache.largest_at() == 0
    assert cache.record_at(8)
    assert not cache.record_at(12)
    assert cache.largest_at() == 8


def test_planning_for_more_ends_where_it_does_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is loaded into another model: each run planned for more than the one before, and none was held."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    cache = Cache(Command(("train.py",)), {})
    assert (cache.growth(), cache.grows_in_vain) == (1.0, False)
    cache.keep_growth(1.4, 1.0)
    assert (cache.growth(), cache.grows_in_vain) == (1.4, False)
    cache.keep_growth(1.4 * 1.2, 1.4)  # 20 % above, no more 40
    assert (cache.growth(), cache.grows_in_vain) == (1.68, False)
    cache.keep_growth(1.68 * 1.18, 1.68)
    assert (cache.growth(), cache.grows_in_vain) == (1.4, True)
    cache.keep_growth(3.0, 1.4)
    assert (cache.growth(), cache.grows_in_vain) == (1.4, True)


def test_a_run_plans_for_what_the_one_before_came_to(folder: Path) -> None:
    lengths = ("64",) * 5 + ("100", "92") * 4
    run(folder, *lengths, budget="14MiB")
    (kept,) = (folder / ".memopt").glob("*.plan.json")
    kept.with_name(kept.name.replace(".plan.json", ".growth")).write_text("1.6\n")
    kept.unlink()
    printed, grown = run(folder, *lengths, budget="14MiB")
    assert printed == plain(folder, *lengths).stdout
    assert grown == pytest.approx(1.6)


@pytest.mark.parametrize("budget", ["60%", "12MiB"])
def test_the_small_last_batch_of_a_small_dataset_is_not_what_is_planned_for(
    folder: Path, budget: str
) -> None:
    """Three batches an epoch: the third iteration is a third of the others, and 60 % of its peak would be no budget for them."""
    script = SCRIPT.replace("min(step, len(lengths) - 1)", "step % len(lengths)").replace(
        "range(12)", "range(18)"
    )
    (folder / "train.py").write_text(script)
    printed, _ = run(folder, "96", "96", "32", budget=budget, told="recorded iteration 5")
    assert printed == plain(folder, "96", "96", "32").stdout
    outcome = outcome_of(folder)
    assert outcome["peak_bytes"] <= outcome["budget_bytes"]
