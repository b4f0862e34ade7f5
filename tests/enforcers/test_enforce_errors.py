"""Errors stay errors: what autograd refuses is refused under every plan, in the same words; what fails falls back to keeping."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from memopt.enforcers.measurements import Measurements
from memopt.instrument.frames import Frames
from tests.support import warm
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded

ROOT = Path(__file__).resolve().parents[2]


class _Remembers(nn.Module):
    """Keeps a view of what it saved where a script could change it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.seen = h[:1]
        return self.b(torch.relu(h * h))


def _changes_a_saved_tensor(steps: int) -> list[str]:
    model = _Remembers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).sum()
        if step == 4:
            assert model.seen is not None
            with torch.no_grad():
                model.seen.add_(1)
        model.seen = None
        loss.backward()
        optimizer.step()
    return []


def _steps_between_two_backwards(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        first, second = model(torch.randn(4, 8)).sum(), model(torch.randn(4, 8)).sum()
        first.backward()
        if step == 4:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
        second.backward()
        optimizer.step()
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", [_changes_a_saved_tensor, _steps_between_two_backwards])
@pytest.mark.parametrize("kind", ["nothing", "recompute", "compress", "swap"])
def test_a_change_in_place_is_refused_as_ever(loop, kind: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seeded(loop, 6)
    trace = recorded(loop, tmp_path)
    plan = plan_of(trace, everything(kind))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        enforced(loop, plan, tmp_path, 6)


def _changes_an_output(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        out = model(torch.randn(4, 8))
        if step == 4:
            out.mul_(2)
        out.sum().backward()
        optimizer.step()
    return []


@pytest.mark.parametrize("kind", ["nothing", "recompute", "swap"])
def test_of_an_output_it_is_said_whose_it_is(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"output 0 of Tanh\w*, is at version 1") as plain:
        seeded(_changes_an_output, 6)
    plan = plan_of(recorded(_changes_an_output, tmp_path), everything(kind))
    with pytest.raises(RuntimeError) as found:
        enforced(_changes_an_output, plan, tmp_path, 6)
    assert str(found.value) == str(plain.value)


SWAPPER = """
import os, sys, torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(2048, 256)).pow(2).mean()
    if step == 4 and "die" in sys.argv:
        os.kill(os.getpid(), 9)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


def _memopt(folder: Path, *words: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return warm.python(["-m", "memopt", *words], cwd=folder, env=env, cold=cold)


@pytest.fixture(scope="module")
def swap_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script and a plan that swaps to disk."""
    folder = tmp_path_factory.mktemp("swaps")
    (folder / "train.py").write_text("import torch\ntorch.manual_seed(0)\n" + SWAPPER)
    assert _memopt(folder, "profile", "-o", "p.profile.json.gz", "train.py").returncode == 0
    done = _memopt(
        folder,
        "advise",
        "p.profile.json.gz",
        "--budget",
        "75%",
        "--deny",
        "recompute,compress",
        "-o",
        "p.plan.json",
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_a_killed_run_leaves_no_swap_file(swap_plan: Path, tmp_path: Path) -> None:
    done = _memopt(swap_plan, "apply", "--swap-dir", str(tmp_path), "p.plan.json", "die")
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_without_a_swap_folder_all_is_kept_and_told_once(swap_plan: Path, tmp_path: Path) -> None:
    plain = _memopt(swap_plan, "apply", "p.plan.json")
    done = _memopt(
        swap_plan,
        "apply",
        "--outcome",
        str(tmp_path / "o.json"),
        "--swap-dir",
        str(tmp_path / "no"),
        "p.plan.json",
    )
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    assert done.stderr.count("no swap file can be made") == 1
    assert '"done": 0' in (tmp_path / "o.json").read_text()


def test_a_changed_script_is_refused_unless_that_is_wanted(swap_plan: Path, tmp_path: Path) -> None:
    for name in ("train.py", "p.plan.json"):
        text = (swap_plan / name).read_text().replace(str(swap_plan), str(tmp_path))
        (tmp_path / name).write_text(text + ("\n# changed\n" if name == "train.py" else ""))
    refused = _memopt(tmp_path, "apply", "p.plan.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has changed since it was profiled" in refused.stderr
    assert "--changed-script" in refused.stderr
    done = _memopt(tmp_path, "apply", "--changed-script", "p.plan.json")
    assert done.returncode == 0
    assert "has changed since it was profiled" in done.stderr


def test_a_plan_without_a_hash_runs_nothing(swap_plan: Path, tmp_path: Path) -> None:
    """An edited one: any program might be in its place."""
    plan = json.loads((swap_plan / "p.plan.json").read_text().replace(str(swap_plan), str(tmp_path)))
    plan["script"]["sha256"] = ""
    (tmp_path / "p.plan.json").write_text(json.dumps(plan))
    (tmp_path / "train.py").write_text("print('anything')")
    refused = _memopt(tmp_path, "apply", "p.plan.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no hash" in refused.stderr


def test_a_plan_does_not_lead_into_another_folder_unasked(swap_plan: Path, tmp_path: Path) -> None:
    plan = str(swap_plan / "p.plan.json")
    refused = _memopt(tmp_path, "apply", plan)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"--cwd {swap_plan}" in refused.stderr
    assert "train.py" in refused.stderr
    done = _memopt(tmp_path, "apply", "--cwd", str(swap_plan), plan)
    assert done.returncode == 0, done.stderr
    assert f"train.py in {swap_plan}" in done.stderr
    elsewhere = tmp_path / "container"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_bytes((swap_plan / "train.py").read_bytes())
    moved = _memopt(elsewhere, "apply", "--cwd", ".", plan)
    assert moved.returncode == 0, moved.stderr
    assert moved.stdout == done.stdout


RESUMES = """
import os
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt"))
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(4096, 256)).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""


def test_verify_leaves_the_scripts_own_checkpoint_alone(tmp_path: Path) -> None:
    """It saves and resumes: a second run in the same folder would be another run."""
    (tmp_path / "resumes.py").write_text(RESUMES)
    for args in (("profile", "-o", "p.json.gz", "resumes.py"), ("advise", "p.json.gz", "--budget", "80%", "-o", "plan.json")):  # fmt: skip
        done = _memopt(tmp_path, *args)
        assert done.returncode == 0, done.stderr
    (tmp_path / "last.pt").unlink()
    done = _memopt(tmp_path, "apply", "--verify", "3", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    assert not (tmp_path / "last.pt").exists()
    _memopt(tmp_path, "apply", "--verify", "3", "--in-place", "plan.json")
    assert (tmp_path / "last.pt").exists()


def test_runs_that_are_compared_meet_at_stores_of_their_own() -> None:
    from memopt.enforcers.verify.compare import _apart

    torchrun = {"WORLD_SIZE": "2", "MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True", "A": "b"}
    found = [_apart(torchrun, number) for number in range(3)]
    assert len({each["MASTER_PORT"] for each in found} | {"65535"}) == 4
    assert {each["TORCHELASTIC_USE_AGENT_STORE"] for each in found} == {"False"}
    assert _apart({"A": "b"}, 1) == {"A": "b"}


def test_verify_says_identical_and_finds_a_difference(
    swap_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = _memopt(swap_plan, "apply", "--verify", "3", "p.plan.json", cold=True)
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout
    from memopt.enforcers.verify import compare
    from memopt.errors import VerifyFailed

    lines = [{"losses": {"l": "1"}, "gradients": {}, "parameters and buffers": {}}]
    other = [{"losses": {"l": "2"}, "gradients": {}, "parameters and buffers": {}}]
    runs = iter([(each, 0, None) for each in (lines, other, lines, other, lines)])
    monkeypatch.setattr(compare._Runs, "run", lambda *words: next(runs))
    with pytest.raises(VerifyFailed, match="differs"):
        compare.verify(Path("p"), [], 1, Path("."))


def test_verify_leaves_what_torch_func_differentiates_alone(tmp_path: Path) -> None:
    from memopt.enforcers.verify.digests import Digests

    digests = Digests(tmp_path / "digests", 1)

    def square(x: Tensor) -> Tensor:
        digests.backward_begins((x,), keep_graph=False, create_graph=False)
        return x * x

    torch.func.vmap(square)(torch.ones(3))
    assert digests._losses == {}
    square(torch.ones(3))
    assert list(digests._losses) == ["loss 0"]
    digests._file.close()


@pytest.mark.memopt_fails
@pytest.mark.parametrize("where", ["value_in", "let_go_of_bytes"])
def test_what_memopt_fails_to_let_go_of_is_kept_and_told(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(recorded(_trains, tmp_path), everything("recompute"))
    plain = seeded(_trains, 6)

    def fails(*args: object) -> None:
        raise NameError("a fault of memopt's")

    owner = "values.Values" if where == "value_in" else "letting_go"
    monkeypatch.setattr(f"memopt.enforcers.{owner}.{where}", fails)
    computed, outcome = enforced(_trains, plan, tmp_path, 6)
    assert computed == plain
    assert outcome.actions.done == 0
    assert any("memopt failed: NameError: a fault of memopt's" in note for note in outcome.notes)


def _trains(steps: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(repr(loss.item()))
    return losses


def test_what_fails_in_memopt_as_an_iteration_ends_leaves_the_script_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(recorded(_trains, tmp_path), everything("recompute"))
    ended: list[int] = []

    def fails(self: Measurements, after: int, *_: object, **__: object) -> None:
        ended.append(after)
        if after == 4:
            raise ZeroDivisionError("of a test")

    monkeypatch.setattr(Measurements, "iteration_begins", fails)
    computed, outcome = enforced(_trains, plan, tmp_path, 8)
    assert computed == seeded(_trains, 8)
    assert ended == [1, 2, 3, 4]
    assert any(
        "from iteration 5 on nothing was enforced: ZeroDivisionError: of a test" in note
        for note in outcome.notes
    )


def test_an_iteration_that_could_not_be_measured_may_be_followed_by_one_that_begins_with_more(
    tmp_path: Path,
) -> None:
    """The script's own profiler ran in the first one."""
    plan = plan_of(recorded(_trains, tmp_path), everything("recompute"))
    measurements = Measurements(plan, peaks=True)
    measurements.frames = Frames()
    measurements._look_what_is_there(plan.base_bytes + plan.predicted_peak_bytes, None)
    assert measurements.peak_bytes is None
    assert measurements.notes() == []
