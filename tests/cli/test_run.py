"""`memopt run`: one run, recorded, planned for and enforced on the way; what it prints, returns and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memopt.enforcers.measurements import Peaks
from tests.support import warm

ROOT = Path(__file__).parents[2]

SCRIPT = """
import hashlib, os, sys, time
import torch
torch.manual_seed(0)
kind = sys.argv[1] if len(sys.argv) > 1 else ""
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ends = time.time() + 60
step = late = 0
while time.time() < ends and late < 12:
    loss = model(torch.randn(1024, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 40:
        print(step, loss.item().hex(), flush=True)
    step += 1
    late += step > 40 and kind != "wait" and os.path.exists(os.environ.get("WAIT_FOR", "."))
    if step == 5 and kind == "raise":
        raise ValueError("of the script")
    if step == 5 and kind == "exit":
        sys.exit(7)
    if kind == "short" and step == 2:
        break
    if step > 20:
        time.sleep(0.02)
"""


PLANNED = "memopt: under "
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def memopt(
    folder: Path, *args: str, until: str = "", program: tuple[str, ...] = ("-m", "memopt"), cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """`until`: the script, of which a step takes milliseconds, goes on until memopt says a line that begins so, however long that is.

    `cold`: in a process that has not imported torch."""
    enforced = folder / "enforced"
    enforced.unlink(missing_ok=True)
    waits = {"WAIT_FOR": str(enforced)} if until else {}
    start = started_cold if cold else started
    with start(folder, *args, program=program, **waits) as running, ThreadPoolExecutor() as pool:
        assert running.stdout is not None
        assert running.stderr is not None
        out, said = pool.submit(running.stdout.read), []
        for line in running.stderr:
            said.append(line)
            if until and line.startswith(until):
                enforced.touch()
        code = running.wait(timeout=180)
        return subprocess.CompletedProcess(args, code, out.result(), "".join(said))


def started(
    folder: Path, *args: str, program: tuple[str, ...] = ("-m", "memopt"), **environment: str
) -> AbstractContextManager[warm.Started]:
    return warm.started([*program, *args], cwd=folder, env=ENV | environment)


def started_cold(
    folder: Path, *args: str, program: tuple[str, ...], **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, *program, *args]
    return subprocess.Popen(command, cwd=folder, env=ENV | environment, stdout=-1, stderr=-1, text=True)


def plain(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return warm.python(["train.py", *args], cwd=folder, timeout=180)


def outcome_of(folder: Path, name: str = "o.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A folder in which the script ran twice under the same budget."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    args = ("run", "--budget", "60%", "--time-limit", "0.5")
    first = memopt(folder, *args, "--outcome", "o.json", "train.py", until=PLANNED, cold=True)
    second = memopt(folder, *args, "--outcome", "o2.json", "train.py")
    return folder, first, second


def test_the_run_is_enforced_on_the_way_and_prints_what_python_prints(ran: Any) -> None:
    folder, first, _ = ran
    assert first.returncode == 0, first.stderr
    assert first.stdout == plain(folder).stdout
    course = outcome_of(folder)
    assert 3 <= course["enforced_after"] < course["iterations"]
    outcome = course["outcome"]
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0
    assert 0 < outcome["measured_peak_bytes"] <= outcome["budget_bytes"] < outcome["unplanned_peak_bytes"]


def test_no_step_is_run_twice(ran: Any) -> None:
    _, first, _ = ran
    steps = [int(line.split()[0]) for line in first.stdout.splitlines()]
    assert steps == list(range(40))


def test_three_lines_tell_held_predicted_and_cost(ran: Any) -> None:
    *stages, held, beside, cost = ran[1].stderr.splitlines()
    assert list(dict.fromkeys(line.split(maxsplit=2)[1] for line in stages)) == [
        "running",
        "recorded",
        "under",
    ]
    assert held.startswith("memopt: held: peak ")
    assert beside.startswith("memopt: predicted peak ")
    assert " measured peak " in beside
    assert cost.startswith("memopt: cost ")
    assert [line.split(maxsplit=2)[1] for line in ran[2].stderr.splitlines()[:-3]] == ["running", "under"]


def test_the_second_run_starts_enforced(ran: Any) -> None:
    folder, first, second = ran
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    course = outcome_of(folder, "o2.json")
    assert course["from_cache"]
    assert course["enforced_after"] == 0
    assert course["outcome"]["measured_peak_bytes"] <= course["outcome"]["budget_bytes"]


TOLD_SLOWER = """
import msgspec
from memopt.cli.run import stages
class Background(stages.Background):
    first = True
    def plan(self):
        found, first, self.first = super().plan(), self.first, False
        return msgspec.structs.replace(found, predicted_step_ms=2 * found.predicted_step_ms) if first else found
stages.Background = Background
from memopt.cli.main import main
main(prog_name="memopt")
"""
"""memopt, to which the first plan seems to take twice as long a step as it does, so that the one after it is better for certain."""


def test_a_better_plan_takes_over_while_the_script_goes_on(ran: Any) -> None:
    folder, first, _ = ran
    (folder / "told_slower.py").write_text(TOLD_SLOWER)
    args = ("run", "--fresh", "--budget", "60%", "--deny", "optimizer", "--time-limit", "1", "--outcome", "better.json", "train.py")  # fmt: skip
    done = memopt(folder, *args, until="memopt: under a better plan", program=("told_slower.py",))
    assert done.returncode == 0, done.stderr
    assert done.stdout == first.stdout
    course = outcome_of(folder, "better.json")
    outcome = course["outcome"]
    assert 3 <= course["enforced_after"] < course["better_after"] < course["iterations"]
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0
    assert 0 < outcome["measured_peak_bytes"] <= outcome["budget_bytes"]


def test_a_better_plan_takes_over_from_one_whose_optimizer_state_is_in_a_tier(ran: Any) -> None:
    """The state stays there: the budget has no room for all of it."""
    folder, *_ = ran
    (folder / "told_slower.py").write_text(TOLD_SLOWER)
    wide = SCRIPT.replace("64, 64", "256, 256").replace("1024, 64", "64, 256").replace("step < 40", "True")
    (folder / "wide.py").write_text(wide.replace("late < 12", "late < 12 and step < int(sys.argv[2])"))
    args = ("run", "--fresh", "--budget", "60%", "--allow", "optimizer,swap,recompute", "--time-limit", "2", "--outcome", "wide.json", "wide.py", "", "9999")  # fmt: skip
    done = memopt(folder, *args, until="memopt: under a better plan", program=("told_slower.py",))
    assert done.returncode == 0, done.stderr
    course = outcome_of(folder, "wide.json")
    outcome, steps = course["outcome"], course["iterations"]
    assert 3 <= course["enforced_after"] < course["better_after"] < steps
    assert 0 < outcome["measured_peak_bytes"] <= outcome["budget_bytes"]
    assert outcome["actions"]["done"] == outcome["actions"]["planned"] > 0
    plainly = warm.python(["wide.py", "wait", str(steps)], cwd=folder, timeout=180)
    assert done.stdout == plainly.stdout


TELLS_WHAT_IS_IMPORTED = """
import atexit, sys
PLANS = ("memopt.advisors.profiles", "memopt.advisors.graphs", "memopt.reports")
atexit.register(lambda: print("imported:", *(each for each in sys.modules if each.startswith(PLANS)), file=sys.stderr))
from memopt.cli.main import main
main(prog_name="memopt")
"""


def test_what_makes_plans_is_imported_by_the_planner_alone(ran: Any) -> None:
    """In the script's process it took half a second of each run."""
    folder = ran[0]
    (folder / "tells.py").write_text(TELLS_WHAT_IS_IMPORTED)
    args = ("run", "--budget", "60%", "--time-limit", "0.5", "train.py", "exit")
    done = memopt(folder, *args, program=("tells.py",), cold=True)
    assert "memopt: held" in done.stderr
    assert done.stderr.splitlines()[-1] == "imported:"


def test_what_it_keeps_is_ignored_by_git(ran: Any) -> None:
    folder = ran[0]
    assert (folder / ".memopt" / ".gitignore").read_text().splitlines()[-1] == "*"
    assert list((folder / ".memopt").glob("train-*.plan.json"))


def test_other_arguments_are_another_run(ran: Any) -> None:
    folder = ran[0]
    done = memopt(folder, "run", "--budget", "60%", "--outcome", "o3.json", "train.py", "short")
    assert not outcome_of(folder, "o3.json")["from_cache"]
    assert done.stdout == plain(folder, "short").stdout
    assert "2 iterations of training were seen" in done.stderr


@pytest.mark.parametrize(("kind", "code"), [("raise", 1), ("exit", 7)])
def test_it_ends_as_the_script_ends(ran: Any, kind: str, code: int) -> None:
    folder = ran[0]
    done, wanted = memopt(folder, "run", "--budget", "60%", "train.py", kind), plain(folder, kind)
    assert done.returncode == wanted.returncode == code
    assert done.stdout == wanted.stdout
    theirs = [line for line in done.stderr.splitlines() if not line.startswith("memopt: ")]
    assert theirs == wanted.stderr.splitlines()


def test_ctrl_c_is_the_scripts(ran: Any) -> None:
    folder = ran[0]
    with started(folder, "run", "--budget", "60%", "train.py", "wait") as running:
        for line in running.stdout:
            if line.startswith("10 "):
                break
        os.kill(running.pid, signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(60) == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    assert "/cli/" not in said


def test_a_budget_that_cannot_be_met_is_neared_and_what_holds_the_floor_is_said(ran: Any) -> None:
    folder = ran[0]
    args = ("run", "--budget", "50KB", "--time-limit", "2", "--outcome", "low.json", "train.py")
    done = memopt(folder, *args, until=PLANNED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ran[1].stdout
    first = next(line for line in done.stderr.splitlines() if "held: peak " in line)
    assert first.startswith("memopt: NOT held: peak ")
    assert "no plan can go below" in first
    outcome = outcome_of(folder, "low.json")["outcome"]
    assert outcome["measured_peak_bytes"] < 0.85 * outcome["unplanned_peak_bytes"]


def test_a_small_number_without_a_unit_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')\n")
    ran = memopt(tmp_path, "run", "--budget", "16", "train.py")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--budget 16 is 16 bytes" in ran.stderr
    assert "try: --budget 16GB, or --budget 16B where that is meant" in ran.stderr
    assert "it ran" not in ran.stderr


def test_without_a_budget_it_is_what_is_free(ran: Any) -> None:
    folder = ran[0]
    done = memopt(folder, "run", "--outcome", "free.json", "train.py", until=PLANNED)
    assert done.returncode == 0, done.stderr
    assert "\nmemopt: held: training peaks at " in done.stderr
    assert outcome_of(folder, "free.json")["budget_bytes"] > 2**28


def test_a_dry_run_shows_the_plan_and_enforces_nothing(ran: Any) -> None:
    folder = ran[0]
    done = memopt(folder, "run", "--budget", "60%", "--dry-run", "--time-limit", "0.5", "train.py")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 40
    assert "within the budget" in done.stderr
    assert (
        memopt(folder, "run", "--budget", "50KB", "--dry-run", "--time-limit", "0.5", "train.py").returncode
        == 3
    )


@pytest.mark.parametrize("args", [("--budget", "x", "train.py"), ("--allow", "magic", "train.py"), ("none.py",), ("--swap-dir", "nowhere", "train.py")])  # fmt: skip
def test_what_cannot_be_meant_runs_nothing(ran: Any, args: tuple[str, ...]) -> None:
    done = memopt(ran[0], "run", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert "  try: " in done.stderr


def test_the_planner_leaves_with_its_work(ran: Any) -> None:
    """Nothing of ours is left of a run that ended while its plan was made."""
    folder = ran[0]
    memopt(folder, "run", "--budget", "61%", "--time-limit", "1", "train.py", "exit")
    deadline = time.time() + 60
    while time.time() < deadline and _planners(folder):
        time.sleep(0.2)
    assert not _planners(folder)


def _planners(folder: Path) -> list[str]:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "background" in line and str(folder) in line]


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_the_guard_could_not_hold_before_the_plan_is_told(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.cli.run import words
    from memopt.cli.run.words import _before_the_plan

    monkeypatch.setattr(words, "did_what_it_said", lambda course: is_kept)

    def course(most: int, over: int, recorded: int = 0) -> Any:
        stuck = "before aten.mm nothing was left that could be moved" if over else ""
        guard = SimpleNamespace(most_bytes=most, budget_bytes=2 << 20, passed=SimpleNamespace(words=stuck))
        return SimpleNamespace(guards=[guard], most_while_recorded=recorded)

    assert _before_the_plan(course(2 << 20, 0)) == []
    (told,) = _before_the_plan(course(2 << 20, 0, recorded=5 << 20))
    assert "reached 5.00 MiB, as an iteration was recorded" in told
    (told,) = _before_the_plan(course(3 << 20, 1 << 20))
    assert "reached 3.00 MiB: before aten.mm nothing was left" in told
    assert ("the next run starts under the plan" in told) is is_kept


@pytest.mark.parametrize("passed", [True, False])
def test_a_budget_that_was_passed_when_no_plan_was_in_force_is_not_just_held(
    passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.cli.run import words

    for name, told in (("_elsewhere_in_threads", ""), ("_outside_iterations", ""), ("_held", "held: peak 2 MiB"), ("_elsewhere", ""), ("_beside", ""), ("_cost", "")):  # fmt: skip
        monkeypatch.setattr(words, name, lambda *_, told=told, **__: told)
    for name in ("_of_the_first", "_grown", "_not_kept", "_before_the_plan"):
        monkeypatch.setattr(words, name, lambda *_: [])
    monkeypatch.setattr(words, "_recorded_again", lambda *_: ["note: live bytes reached 3 MiB"] * passed)
    course: Any = SimpleNamespace(plan=SimpleNamespace(), outcome=SimpleNamespace(notes=[]), online=False, problem="", peak_bytes=1, state_away_bytes=0, elsewhere=0, notes=[])  # fmt: skip
    lines = words.last_words(course)
    assert lines[0].startswith(
        "held under the plan: peak 2 MiB; it was passed" if passed else "held: peak 2 MiB"
    )
    assert ("note: live bytes reached 3 MiB" in lines) is passed


def test_what_recording_again_took_is_told_where_no_plan_took_as_much() -> None:
    from memopt.cli.run.words import _recorded_again

    def told(most: int, *, peak: int = 3 << 20) -> list[str]:
        course: Any = SimpleNamespace(most_recorded_again=most, peak_bytes=peak)
        plan: Any = SimpleNamespace(budget_bytes=2 << 20)
        return _recorded_again(course, plan)

    assert told(0) == told(3 << 20) == told(4 << 20, peak=4 << 20) == []
    (note,) = told(5 << 20)
    assert "when an iteration was recorded again, for another plan, live bytes reached 5.00 MiB" in note


@pytest.mark.parametrize(
    ("peak_bytes", "other_steps", "words"),
    [
        (1_293_200, 0, "NOT held: peak 1.23 MiB, 4.51 KiB above the budget of 1.23 MiB, without the plan 2.05 MiB; the smallest peak found is 1.34 MiB"),
        (1_288_586, 0, "held: peak 1.23 MiB, within the budget of 1.23 MiB; without the plan 2.05 MiB"),
        (1_048_576, 4, "held: peak 1.00 MiB, within the budget of 1.23 MiB, in iterations unlike the profiled one, which would take 1.34 MiB"),
        (3_145_728, 4, "NOT held: peak 3.00 MiB, 1.77 MiB above the budget of 1.23 MiB; the smallest peak found is 1.34 MiB"),
    ],
)  # fmt: skip
def test_a_budget_is_told_to_be_passed_where_it_was_and_by_how_much(
    peak_bytes: int, other_steps: int, words: str
) -> None:
    """The smallest peak that the planner found lies above the budget; what was measured may not. A peak above the plain one is of another iteration."""
    from memopt.cli.run.words import _held
    from memopt.plan import NOT_MET

    plan = SimpleNamespace(budget_bytes=1_288_586, unplanned_peak_bytes=2_147_644, predicted_peak_bytes=1_409_660, over_bytes=121_074, actions=[1], script_actions=[], state_beside_bytes=0, notes=[f"{NOT_MET}the smallest peak found is 1.34 MiB"])  # fmt: skip
    outcome = SimpleNamespace(notes=[], other_steps=other_steps)
    assert _held(plan, outcome, peak_bytes) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step_ms", "scaled_ms", "recorded", "waited_share", "words"),
    [
        (400.0, 110.0, [], 0.05, "cost +10 % a step, scaled to the profiled iteration's size (plain 100 ms), 1 of 1"),
        (110.0, None, [], 0.0, "cost +10 % a step (plain 100 ms), 1 of 1 actions done, enforced from the first of 9 iterations, as .memopt/ had the plan"),
        (50.0, None, [], 0.0, "cost not known: a step took 50.0 ms, the plain one that was timed 100 ms, as early ones are slow, 1 of 1"),
        (110.0, None, [5], 0.0, "as .memopt/ had the plan, under another after 6, as the training goes on otherwise, recording and waiting for the plan took 2.00 s more"),
        (110.0, None, [], 0.35, "(plain 100 ms; other processes had the processor for 35 % of the time, which is left out), 1 of 1"),
    ],
)  # fmt: skip
def test_the_cost_is_told_of_steps_and_of_what_was_recorded_again(
    step_ms: float, scaled_ms: float | None, recorded: list[int], waited_share: float, words: str
) -> None:
    from memopt.cli.run.words import _cost

    plan = SimpleNamespace(plain_step_ms=100.0)
    outcome = SimpleNamespace(
        compared_step_ms=scaled_ms or step_ms,
        as_profiled_step_ms=scaled_ms,
        other_steps=0,
        actions=SimpleNamespace(planned=1, done=1),
        waited_share=waited_share,
    )
    course = SimpleNamespace(iterations=9, enforced_after=0, phases_after=[6] if recorded else [], from_cache=True, better_after=None, recorded=recorded, extra_ms=2000.0)  # fmt: skip
    assert words in _cost(course, plan, outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last_bytes", "words"),
    [
        (1024, "measured peak 1.00 KiB (0 %), step 1.00 ms"),
        (1025, "measured peak 1.00 KiB (0 %), step 1.00 ms"),
        (2048, "measured peak 1.00 KiB (0 %) and 2.00 KiB in iterations that were not measured, step"),
        (1536, "measured peak 1.00 KiB (0 %) and 2.00 KiB under a plan before, step"),
    ],
)
def test_a_peak_that_the_measured_iterations_did_not_have_is_told_with_its_place(
    last_bytes: int, words: str
) -> None:
    from memopt.cli.run.words import _beside

    plan = SimpleNamespace(predicted_peak_bytes=1024, predicted_step_ms=1.0)
    outcome = SimpleNamespace(
        measured_peak_bytes=1024, measured_step_ms=1.0, compared_step_ms=1.0, as_profiled_step_ms=None
    )
    course = SimpleNamespace(peak_bytes=last_bytes if last_bytes < 1536 else 2048, last_peak_bytes=last_bytes)
    assert words in _beside(course, plan, outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looked", "after", "words"),
    [
        (0, 0, ""),
        (0, 2048, "NOT held: 2.00 KiB, 512 B above the budget of 1.50 KiB, after the last step (an evaluation, say); iterations peak at 1.00 KiB"),
        (2048, 0, "when the script looked at optimizer state or gradients that were away"),
        (0, 1500, ""),
    ],
)  # fmt: skip
def test_a_budget_that_is_passed_outside_iterations_is_told(looked: int, after: int, words: str) -> None:
    from memopt.cli.run.words import _outside_iterations

    course: Any = SimpleNamespace(most_at_looks=looked, most_after=after, peak_bytes=1024)
    plan: Any = SimpleNamespace(budget_bytes=1536)
    found = _outside_iterations(course, plan)
    assert words in found if words else not found


@pytest.mark.parametrize(("elsewhere", "told"), [(39, True), (20, True), (3, False), (0, False)])
def test_of_training_in_other_threads_nothing_is_told_to_be_held(elsewhere: int, told: bool) -> None:
    """Replicas in threads of the script's came to 49 MiB of the 3.8 that were told."""
    from memopt.cli.run.words import _elsewhere_in_threads

    course: Any = SimpleNamespace(elsewhere=elsewhere, iterations=20)
    assert bool(_elsewhere_in_threads(course)) is told


def test_what_holding_the_budget_took_is_told_where_no_plan_came() -> None:
    from memopt.cli.run.words import last_words

    guards = [SimpleNamespace(moved=each, moved_bytes=4096, most_bytes=3, budget_bytes=2, passed=SimpleNamespace(words="")) for each in (2, 0, 3)]  # fmt: skip
    course = SimpleNamespace(online=False, guards=guards, plan=None, outcome=None, problem="", still_planning=True, iterations=9, most_while_recorded=0)  # fmt: skip
    nothing, moved, passed = last_words(course)  # type: ignore[arg-type]
    assert nothing.startswith("nothing was enforced")
    assert "5 storages (8.00 KiB) were moved away, which takes time" in moved
    assert passed == "note: meanwhile, live bytes reached 3 B"


@pytest.mark.parametrize(
    ("kind", "outside_bytes", "told"), [("cpu", 2048, True), ("cpu", 1000, False), ("cuda", 2048, False)]
)
def test_what_passed_the_budget_outside_training_is_told(kind: str, outside_bytes: int, told: bool) -> None:
    """A graph network's evaluation of the whole graph took 229 MiB of 149, and "held" was all that was said."""
    from memopt.cli.run.words import _elsewhere

    plan: Any = SimpleNamespace(budget_bytes=1024, device=SimpleNamespace(kind=kind))
    outcome: Any = SimpleNamespace(outside_peak_bytes=outside_bytes)
    assert ("about 2.00 KiB were held outside training" in _elsewhere(plan, outcome)) is told


@pytest.mark.parametrize(
    ("predicted_bytes", "peak_bytes", "most_saved", "phase", "factor"),
    [
        (900, 2000, 3.0, 0, 3.0),
        (900, 1100, 1.0, 0, 1.2 * 1.12),
        (900, 1010, 1.0, 0, 1.2 * 1.015),
        (900, 1004, 1.0, 0, 1.0),
        (900, 1000, 3.0, 0, 1.0),
        (900, 1040, 3.0, 0, 1.0),
        (900, 1100, 1.0, 1, 1.0),
        (1100, 2000, 3.0, 0, 1.0),
    ],
    ids=["as much as was saved", "as much as it was passed by", "half as much again", "hardly passed", "held by the guard", "all but held by it", "of another phase", "no room"],
)  # fmt: skip
def test_the_next_run_plans_for_what_this_one_came_to(
    predicted_bytes: int, peak_bytes: int, most_saved: float, phase: int, factor: float
) -> None:
    """Under a budget below the smallest peak each run had the same plan, and said again that the next one would not."""
    from memopt.cli.run.words import _grown, came_to, did_what_it_said

    plan = SimpleNamespace(budget_bytes=1000, predicted_peak_bytes=predicted_bytes, over_bytes=max(0, predicted_bytes - 1000), grown=1.2)  # fmt: skip
    outcome = SimpleNamespace(actions=SimpleNamespace(planned=1, skipped=0))
    peaks = Peaks(larger=peak_bytes) if most_saved > 1.2 else Peaks(planned=peak_bytes)
    course: Any = SimpleNamespace(plan=plan, outcome=outcome, last_peaks=peaks, most_saved=most_saved, next_recorded=0, phase=phase, iterations=9, enforced_after=0, phases_after=[], grows_in_vain=False)  # fmt: skip
    assert came_to(course) == pytest.approx(factor)
    assert bool(_grown(course)) == (factor > 1)
    was_kept, course.grows_in_vain = did_what_it_said(course), True
    assert did_what_it_said(course)
    assert was_kept == (
        peak_bytes <= 1.005 * max(1000, predicted_bytes) or (most_saved > 1.2 and peak_bytes <= 1050)
    )


@pytest.mark.parametrize(
    ("peak_bytes", "skipped", "why"),
    [
        (1000, 0, ""),
        (1100, 0, "the peak passed what it predicts"),
        (900, 5, "many of its actions were skipped"),
    ],
)
def test_a_plan_that_is_not_kept_is_told(peak_bytes: int, skipped: int, why: str) -> None:
    from memopt.cli.run.words import _not_kept

    plan = SimpleNamespace(budget_bytes=1000, predicted_peak_bytes=900, over_bytes=0, grown=1.0)
    outcome = SimpleNamespace(actions=SimpleNamespace(planned=10, skipped=skipped))
    course = SimpleNamespace(plan=plan, outcome=outcome, last_peaks=Peaks(peak_bytes), next_recorded=0, iterations=9, enforced_after=3, phases_after=[], grows_in_vain=False)  # fmt: skip
    assert [told.partition(": ")[2] for told in _not_kept(course)] == ([why] if why else [])  # type: ignore[arg-type]


NEAR = """
import torch
from memopt.instrument.memory.meter import living_storages
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(8) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(torch.randn(4096, 256)).square().mean()
    print(sum(storage.nbytes() for storage in living_storages("cpu")), flush=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_iteration_before_the_recorded_one_keeps_its_saved_tensors_away_too(tmp_path):
    """A script that the guard had got through its first iteration ran out of memory in the second."""
    (tmp_path / "train.py").write_text(NEAR)
    held = memopt(tmp_path, "run", "--budget", "30MB", "train.py")
    before, now = ([int(line) for line in each.stdout.split()] for each in (plain(tmp_path), held))
    assert len(before) == len(now) == 3
    assert min(before) > 2 * 30e6
    assert max(now) < 1.2 * 30e6, held.stderr


def test_a_plan_is_told_of_iterations_by_their_number_in_the_run() -> None:
    """It was told of those since it took over, and of those before as it began: after a plan that was long in coming none but the first was
    measured."""
    from memopt.cli.run.stages import Stages

    told: list[int] = []
    session: Any = SimpleNamespace(iteration_ended=lambda count, _: told.append(count), standby=None)
    cache: Any = SimpleNamespace(largest_at=lambda: 0)
    stages = Stages(Any, SimpleNamespace(budget=None), cache, lambda _: None)  # type: ignore[arg-type]
    stages._session = stages._apply = session
    stages._base = 40
    stages.iteration_ended(41, 1.0)
    stages.iteration_ended(42, 1.0)
    assert told == [41, 42]
    assert not stages.course.problem


THREE_OPTIMIZERS = """
import torch
torch.manual_seed(0)
nets = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(3)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
for step in range(12):
    for net, optimizer in zip(nets, optimizers):
        optimizer.zero_grad()
        net(torch.randn(1024, 64)).square().mean().backward()
        optimizer.step()
"""


def test_where_torch_has_no_optimizer_what_a_plan_waits_for_is_said(tmp_path: Path) -> None:
    """The script updates nothing, and may yet make one, so that the recorded iteration may be part of another."""
    by_hand = (ROOT / "tests/scripts/no_optimizer.py").read_text()
    (tmp_path / "train.py").write_text(by_hand.replace("        weights -= 0.1 * weights.grad\n", ""))
    told = " ".join(memopt(tmp_path, "run", "--budget", "60%", "train.py").stderr.split())
    assert "ended after 6 iterations, before its plan was in force; no optimizer of torch's stepped" in told
    assert "a plan waits for 16 of those" in told
    (tmp_path / "train.py").write_text(by_hand)
    told = " ".join(memopt(tmp_path, "run", "--budget", "60%", "train.py").stderr.split())
    assert "enforced after 3 of 6 iterations" in told


def test_a_round_of_several_optimizers_is_one_iteration_from_the_first_on(tmp_path: Path) -> None:
    """Each of them ended one in the first round, so that 12 were told to be 14."""
    (tmp_path / "train.py").write_text(THREE_OPTIMIZERS)
    done = memopt(tmp_path, "run", "--budget", "60%", "--outcome", "o.json", "train.py")
    assert "recorded iteration 3;" in done.stderr
    assert "from iteration 4 on" in done.stderr
    assert "enforced after 3 of 12 iterations" in " ".join(done.stderr.split())
    course = outcome_of(tmp_path)
    assert (course["enforced_after"], course["iterations"]) == (3, 12)


def test_a_script_may_go_to_another_folder_before_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({os.sep!r})\n{NEAR}")
    done = memopt(tmp_path, "run", "--budget", "60%", "--outcome", "o.json", "train.py")
    assert done.returncode == 0
    assert "cannot run" not in done.stderr
    assert "memopt: recorded iteration 3" in done.stderr


def test_a_share_is_told_to_be_of_the_iteration_that_was_recorded_first() -> None:
    from memopt.cli.run.words import _of_the_first

    plan: Any = SimpleNamespace(budget_bytes=1000)

    def told(**facts: Any) -> bool:
        usual = {"is_share": True, "budget": "60%", "peak_bytes": 1200, "most_saved": 1.0, "grew": False}
        return bool(_of_the_first(SimpleNamespace(**usual | facts), plan))  # type: ignore[arg-type]

    assert told(grew=True)
    assert told(most_saved=1.5)
    assert not told()
    assert not told(grew=True, peak_bytes=900)
    assert not told(grew=True, is_share=False)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"streamed": SimpleNamespace(away_bytes=300)}, ""),
        (
            {"streamed": SimpleNamespace(away_bytes=700)},
            "there is no room for the frozen weights that are streamed",
        ),
        ({"in_pieces": SimpleNamespace(gradient_bytes=0)}, ""),
        (
            {"in_pieces": SimpleNamespace(gradient_bytes=700)},
            "there is no room for the gradients that its plan lets go of",
        ),
        ({"in_backward": SimpleNamespace(saved_bytes=300)}, ""),
        (
            {"in_backward": SimpleNamespace(saved_bytes=700)},
            "there is no room for the gradients that its plan lets go of",
        ),
    ],
)
def test_why_another_phase_is_not_recorded_is_told(facts: dict[str, Any], why: str) -> None:
    from memopt.cli.run.stages import _why_it_goes_on

    plan: Any = SimpleNamespace(**{"streamed": None, "in_pieces": None, "in_backward": None} | facts)
    guard: Any = SimpleNamespace(tensor_bytes=lambda: 500, budget_bytes=1000)
    assert _why_it_goes_on(plan, guard) == why
