"""What `memopt run` does while the script waits for its plan, and how often it looks at all that lives: each look takes long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from memopt.cli.requests import RunRequest
from memopt.cli.run import words
from memopt.cli.run.cache import Cache
from memopt.cli.run.course import Course, Wishes
from memopt.cli.run.one_run import Run
from memopt.cli.run.stages import Stages
from memopt.instrument.script.command import Command
from memopt.plan import OPTIMIZER_IN_BACKWARD, OPTIMIZER_IN_PIECES, WEIGHTS_STREAMED, ScriptAction
from memopt.profiler.known import There
from tests.cli.test_run import SCRIPT, memopt, outcome_of
from tests.support.enforced import plan_with

LOGGED = """
import sys
from memopt.cli.main import main
from memopt.advisors import background
from memopt.cli.run import planning, stages
from memopt.enforcers.guarding import guard
from memopt.profiler import known, session
from memopt.profiler.timing import bandwidth

def logged(owner, name, word):
    whole = getattr(owner, name)
    def told(*args, **kwargs):
        print("LOG", word or sys._getframe(1).f_code.co_name, file=sys.stderr)
        return whole(*args, **kwargs)
    setattr(owner, name, told)

logged(known, "there_now", "")
logged(planning.Planning, "__init__", "order")
logged(session.ProfileSession, "finished", "finished")
logged(bandwidth, "measure_disk", "disk")  # the planner's process has done that
logged(background.Background, "__init__", "planner")
logged(guard.Guard, "_training_begins", "training")
logged(stages.Stages, "_enforce", "enforce")
main(prog_name="memopt")
"""
BESIDE = "\nimport threading\nstopped = threading.Event()\nthreading.Thread(target=lambda: stopped.wait(30), daemon=True).start()\n"


@pytest.mark.parametrize("beside", ["", BESIDE], ids=["alone", "beside a thread"])
def test_what_another_process_can_do_and_what_can_be_done_meanwhile_is_not_waited_for(
    beside: str, tmp_path: Path
) -> None:
    """A thread of the script's may make tensors meanwhile: then what lives is looked for when the plan is there."""
    (tmp_path / "train.py").write_text(beside + SCRIPT)
    (tmp_path / "logged.py").write_text(LOGGED)
    args = ("run", "--budget", "4MiB", "--time-limit", "0.5", "train.py")
    done = memopt(tmp_path, *args, until="memopt: under its plan", program=("logged.py",), cold=True)
    assert done.returncode == 0, done.stderr
    words = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("LOG ")]
    at = words.index("enforce")
    ready = ["enforce", "_first_look"] if beside else ["_get_ready", "enforce"]
    assert words[: at + 1 + bool(beside)] == [
        "planner",
        "training",
        "there",
        "there",
        "order",
        "finished",
        *ready,
    ]
    assert beside or words[at + 1 : at + 2] != ["_first_look"]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a script that has not begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    command = Command(("train.py",))
    wishes = Wishes(budget="1GB", device="cpu", swap_dir=tmp_path)
    return Stages(command, wishes, Cache(command, {}), lambda words: None)


MOVES: dict[str, tuple[Literal["optimizer", "weights"], str]] = {
    "": ("optimizer", "nothing"),
    "in_backward": ("optimizer", OPTIMIZER_IN_BACKWARD),
    "in_pieces": ("optimizer", OPTIMIZER_IN_PIECES),
    "streamed": ("weights", WEIGHTS_STREAMED),
}


@pytest.mark.parametrize("moves", MOVES)
def test_what_lived_before_a_plan_sent_some_of_it_away_is_not_measured(
    moves: str, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer state, gradients or weights leave as such a plan begins: they would count, and stay for so long."""
    begun = []
    session = SimpleNamespace(begin_in=lambda loop, there: begun.append(there), standby=None)
    monkeypatch.setattr("memopt.enforcers.session.ApplySession", lambda plan, options, steps: session)
    monkeypatch.setattr("memopt.cli.shared.plan_here.prepare_run", lambda plan, environment: None)
    kind, what = MOVES[moves]
    plan = plan_with(ScriptAction(kind=kind, what=what, why="", saved_bytes=0))
    assert bool(plan.in_backward or plan.in_pieces or plan.streamed) is bool(moves)
    there = There([], [], [], [])
    stages._loop, stages._there = True, there
    stages._enforce(plan, "its plan")
    assert begun == [None if moves else there]
    assert stages._there is None


@pytest.mark.parametrize(
    ("began_with_bytes", "is_away", "collected"),
    [(0, False, True), (1 << 40, False, False), (1 << 40, True, True)],
)
def test_garbage_is_collected_where_there_is_more_than_the_recorded_iteration_began_with(
    began_with_bytes: int, is_away: bool, collected: bool, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the process knows is looked at for that, which takes as long as many a step. How much there is nobody can say while state is away."""
    kept = torch.ones(1 << 20)
    done: list[str] = []
    monkeypatch.setattr("gc.collect", lambda: done.append("collected"))
    stages._trace = SimpleNamespace(
        device=SimpleNamespace(kind="cpu"), base_bytes=began_with_bytes, peak_bytes=kept.nbytes
    )
    monkeypatch.setattr(stages, "_state", SimpleNamespace(is_away=is_away))
    stages._collect_garbage()
    assert bool(done) is collected


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("moves", ["", "in_backward", "in_pieces"])
def test_a_first_step_that_the_plan_does_not_move_is_looked_at(
    moves: str, in_backward: bool, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not inside backward yet, where later ones are; state that leaves for it is back before the plan's own steps."""
    done: list[str] = []
    kind, what = MOVES[moves]
    plan = plan_with(ScriptAction(kind=kind, what=what, why="", saved_bytes=0))
    guard = SimpleNamespace()
    stages._apply = stages._session = SimpleNamespace(standby=SimpleNamespace(guard=guard))
    stages.course.plan = plan
    stages._loop = SimpleNamespace(iterations=SimpleNamespace(in_backward=in_backward))
    state = SimpleNamespace(is_away=True, first_step=lambda *a, **k: done.append("first"), end=lambda: done.append("back"), goes_on=lambda: done.append("goes on"))  # fmt: skip
    monkeypatch.setattr(stages, "_state", state)
    stages._first_step(SimpleNamespace())
    stages._stands_behind(guard)
    guard.goes_on()
    looked_at = not moves or (moves == "in_backward" and not in_backward)
    assert done == [*["first"] * looked_at, "back" if moves == "in_backward" else "goes on"]


@pytest.mark.parametrize(
    ("planning_ms", "expected"), [(900.0, ["again", "enforced"]), (19_000.0, ["enforced"] * 2)]
)
def test_no_more_than_one_iteration_is_recorded_for_a_plan_that_moves_the_state(
    planning_ms: float, expected: list[str], stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speech model was recorded four times in 40 iterations, seven times as slow, and never had a plan."""
    done: list[str] = []
    plan = SimpleNamespace(
        over_bytes=9, device=SimpleNamespace(kind="cpu"), saved_tensors=1, saved_elements=1
    )
    monkeypatch.setattr(stages._state, "comes_back_for_a_better_plan", lambda device: True)
    monkeypatch.setattr(stages, "_record_again", lambda why, warmup: done.append("again"))
    monkeypatch.setattr(stages, "_enforce", lambda plan, which: done.append("enforced"))
    for count in (5, 9):
        stages._planned(SimpleNamespace(ms=planning_ms, plan=lambda: plan), count)
    assert done == expected


@pytest.mark.parametrize(("was_needed", "for_good"), [(False, False), (True, False), (False, True)])
def test_no_better_plan_takes_over_while_the_guard_is_needed_beside_the_first(
    was_needed: bool, for_good: bool, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard beside the better one would rest until its first iteration has saved too much."""
    standby = SimpleNamespace(was_needed=was_needed, for_good=for_good, another_phase=False)
    stages._apply = stages._session = SimpleNamespace(standby=standby)
    stages._planning = SimpleNamespace(has_news=lambda: True)
    taken = []
    monkeypatch.setattr(stages, "_take_better", lambda planning, count: taken.append(count))
    stages._next(5)
    assert taken == ([] if was_needed or for_good else [5])


@pytest.mark.parametrize("planned", [False, True])
def test_a_phase_that_is_not_planned_for_any_more_is_told_of_once(planned: bool, stages: Any) -> None:
    """The last plan's outcome tells what was moved away beside it, and so did the note of the phase that had begun."""
    course = stages.course
    course.notes, course.phase, course.outcome = ["up to iteration 9, 26 storages"], 1, SimpleNamespace()
    course.phases_after = [9] if planned else []
    ended = "the script ended before there was a plan for how the training went on"
    assert stages.finished().notes == (["up to iteration 9, 26 storages"] if planned else [ended])


@pytest.mark.parametrize("ended", [20, 21])
def test_a_plan_that_came_with_the_last_iteration_is_not_told_of(ended: int, stages: Any) -> None:
    """It measured nothing and did nothing: "0 of 129 actions done", of a run that was held for 16 iterations."""

    def ends(peak_bytes: int | None) -> Any:
        outcome = SimpleNamespace(measured_peak_bytes=peak_bytes)
        ended = {"retire": lambda: (outcome, None, None), "finished": lambda *, ends: outcome}
        return SimpleNamespace(
            standby=None, most_saved=1.0, larger_at=0, peaks=None, ended_the_run=False, **ended
        )

    iterations = SimpleNamespace(count=20, elsewhere=0, waits_until=0)
    stages._loop = SimpleNamespace(iterations=iterations, remove=lambda: None)
    course, first, better = stages.course, SimpleNamespace(), SimpleNamespace()
    stages._apply, course.plan = ends(1000), first
    stages._end_enforcing()
    stages._apply, course.plan, course.better_after, stages._base = ends(None), better, 20, 20
    iterations.count = ended
    course = stages.finished()
    assert course.plan is (better if ended > 20 else first)
    assert course.better_after == (20 if ended > 20 else None)
    assert course.outcome.measured_peak_bytes == (None if ended > 20 else 1000)


REQUEST = RunRequest(budget="1MiB", device=None, dry_run=False, online=False, fresh=False, swap_dir=None, allow=(), deny=(), time_limit_s=None, outcome_path=None, force=False, no_measure=False, quiet=True, as_module=False, script="train.py", args=())  # fmt: skip


@pytest.mark.parametrize(("after_bytes", "told"), [(1000, 0), (1500, 1500)])
def test_what_comes_after_the_last_step_is_no_iteration(after_bytes: int, told: int, stages: Any) -> None:
    """An evaluation with gradients, after training: each run planned for less than the one before, and none held the budget."""
    guard = SimpleNamespace(most_bytes=after_bytes, most_at_looks=0)
    standby = SimpleNamespace(most_bytes=1000, guard=guard)
    outcome = SimpleNamespace(measured_peak_bytes=900)
    apply = stages._apply = SimpleNamespace(
        standby=standby, most_saved=2.0, larger_at=0, peaks="of the guard, too"
    )

    def finished(*, ends: bool) -> Any:
        apply.standby = apply.peaks = apply.most_saved = None
        return outcome

    apply.finished = finished
    stages._end_enforcing(goes_on=False)
    assert (stages.course.last_peak_bytes, stages.course.most_after) == (1000, told)
    assert (stages.course.most_saved, stages.course.last_peaks) == (2.0, "of the guard, too")


def test_a_kind_of_action_that_ended_a_run_is_left_out_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script looks at gradients now and then, which a plan that steps inside backward lets go of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    course = Course(budget="1MiB", ended_by_plan=True, plan=plan_with(ScriptAction(kind="optimizer", what="", why="", saved_bytes=0)))  # fmt: skip
    Run(REQUEST, Command(("train.py",)), None)._ended(course)
    assert Run(REQUEST, Command(("train.py",)), None)._cache.denied() == ("optimizer",)


@pytest.mark.parametrize("tells", ["which iteration", "how much more", "nothing"])
def test_what_the_next_run_plans_for_is_not_left_to_the_kept_plan_of_a_phase_before(
    tells: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script ended as another phase was recorded; the next run was said to plan for more, and began under the plan for less."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    run = Run(REQUEST, Command(("train.py",)), None)
    for phase in range(2):
        run._cache.plan_path(phase).write_text("")
    monkeypatch.setattr(words, "came_to", lambda course: 1.0 if tells == "nothing" else 3.0)
    monkeypatch.setattr(words, "did_what_it_said", lambda course: tells == "nothing")
    plan = plan_with(ScriptAction(kind="optimizer", what="", why="", saved_bytes=0))
    run._ended(Course(budget="1MiB", phase=1, plan=plan, larger_at=5 if tells == "which iteration" else 0))
    kept = [run._cache.plan_path(phase).exists() for phase in range(2)]
    assert kept == [tells == "nothing"] * 2
    assert (run._cache.largest_at(), run._cache.growth()) == {
        "which iteration": (5, 1.0),
        "how much more": (0, 3.0),
        "nothing": (0, 1.0),
    }[tells]


ONE_BY_ONE = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)])
optimizers = {}
for step in range(9):
    loss = model(torch.randn(1024, 64)).square().mean()
    loss.backward()
    for weight in model.parameters():
        if weight not in optimizers:
            optimizers[weight] = torch.optim.SGD([weight], lr=0.01)
        optimizers[weight].step()
        weight.grad = None
    print(step, loss.item().hex(), flush=True)
"""


def test_nothing_is_recorded_between_the_optimizers_of_the_first_round(tmp_path: Path) -> None:
    """Pyro makes one for each parameter as that is first stepped. The plan was for what lies between two of them."""
    (tmp_path / "train.py").write_text(ONE_BY_ONE)
    done = memopt(
        tmp_path, "run", "--budget", "4MiB", "--time-limit", "0.5", "--outcome", "o.json", "train.py"
    )
    assert done.returncode == 0, done.stderr
    assert "memopt: recorded iteration 3; planning" in done.stderr
    course = outcome_of(tmp_path)
    assert (course["enforced_after"], course["iterations"]) == (3, 9)
    assert course["outcome"]["actions"]["done"] == course["outcome"]["actions"]["planned"] > 0
