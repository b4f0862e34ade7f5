"""The planner beside a script: a first plan soon, a better one later, one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memopt.advisors import background
from memopt.advisors.advise import Adviser
from memopt.advisors.background import Background
from memopt.advisors.best_effort import TRIES
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.blockers import Floor
from memopt.advisors.profiles.problem import Problem
from memopt.errors import BudgetInfeasible, RunFailed
from memopt.plan import Plan, load_plan
from memopt.trace import load_trace
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
    planner = Background()
    planner.look_for(trace_path, "60%", output, time_limit_s=1.0)
    assert planner.has_news(WAIT_S)
    first = planner.plan()
    assert not planner.is_over
    assert first.actions
    assert planner.has_news(WAIT_S)
    last = planner.plan()
    assert planner.is_over
    assert not first.is_better_than(last)
    assert load_plan(output) == last


def test_a_plan_that_was_taken_away_is_not_written_again(trace_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    planner = Background()
    planner.look_for(trace_path, "60%", output, time_limit_s=1.0)
    assert planner.has_news(WAIT_S)
    planner.plan()
    output.unlink()
    assert planner.has_news(WAIT_S)
    with pytest.raises(RunFailed, match="no plan could be made"):
        planner.plan()
    assert not output.exists()


def test_why_there_is_no_plan_is_told(tmp_path: Path) -> None:
    planner = Background()
    planner.look_for(tmp_path / "none.json.gz", "60%", tmp_path / "plan.json")
    assert planner.has_news(WAIT_S)
    with pytest.raises(RunFailed, match=r"none\.json\.gz"):
        planner.plan()
    assert planner.is_over


def test_an_order_never_goes_into_a_file_that_the_script_opened(trace_path: Path, tmp_path: Path) -> None:
    """A script that becomes a daemon closes all descriptors; the next files that it opens take their numbers."""
    planner = Background()
    os.close(planner._orders)
    os.close(planner._read)
    opened = [(tmp_path / f"{n}.txt").open("w") for n in range(8)]
    assert planner._orders in [file.fileno() for file in opened]
    planner.look_for(trace_path, "60%", tmp_path / "plan.json", time_limit_s=0.3)
    assert planner.has_news(WAIT_S)
    assert planner.plan().actions
    for file in opened:
        file.close()
        assert Path(file.name).read_text() == ""


def test_a_process_that_is_told_nothing_ends(tmp_path: Path) -> None:
    planner = Background()
    os.close(planner._orders)
    assert planner.has_news(WAIT_S), "its end of the pipe is closed"
    assert os.read(planner._read, 1) == b""


def test_an_order_that_nobody_reads_does_not_end_a_script_that_dies_of_sigpipe() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        nobody_reads, pipe = os.pipe()
        os.close(nobody_reads)
        try:
            background._write(pipe, b"order")
        except BrokenPipeError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_it_measures_a_disk_before_it_plans(trace_path: Path, tmp_path: Path) -> None:
    planner = Background()
    assert planner.disk_rates() is None, "it was not told to"
    planner.measure(tmp_path)
    planner.measure(tmp_path)
    rates = planner.disk_rates()
    assert rates is not None
    assert min(rates) > 0
    assert planner.disk_rates() is None
    planner.look_for(trace_path, "60%", tmp_path / "plan.json", time_limit_s=0.3)
    assert planner.has_news(WAIT_S)
    assert planner.plan().actions


@pytest.mark.parametrize("said", [b"", b"no rates"])
def test_another_plans_where_one_has_not_measured(
    said: bytes, trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says from then on might be about the disk."""
    monkeypatch.setattr(background, "_MEASURED_S", 0.0)
    planner = Background()
    planner.measure(tmp_path)
    if said:
        planner._read, pipe = os.pipe()
        os.write(pipe, said)
    assert planner.disk_rates() is None
    planner.look_for(trace_path, "60%", tmp_path / "plan.json", time_limit_s=0.3)
    assert planner.has_news(WAIT_S)
    assert planner.plan().actions


def test_a_script_that_closes_all_descriptors_has_its_disk_measured_by_itself(tmp_path: Path) -> None:
    planner = Background()
    os.close(planner._orders)
    planner.measure(tmp_path)
    assert planner.disk_rates() is None


ORDER: dict[str, Any] = {"budget": "20MiB", "allow": (), "deny": (), "time_limit_s": 60.0}


def test_the_first_plan_is_searched_for_longer_until_it_meets_the_budget(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guarded script that waits holds its budget; a plan that does not is no help."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    output, asked, told = tmp_path / "plan.json", list[float](), list[int]()
    whole: list[bool] = []

    def search(
        adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False
    ) -> Plan:
        asked.append(limit_s)
        whole.append(not soon)
        over = 3 * MIB - len(asked) * MIB
        return msgspec.structs.replace(found, predicted_peak_bytes=found.budget_bytes + over)

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_LONG_S", float("inf"))
    monkeypatch.setattr(Adviser, "floor", Floor(found.budget_bytes, ""))
    monkeypatch.setattr(
        background, "_step_back", lambda limit_s: told.append(load_plan(output).predicted_peak_bytes)
    )
    here, there = os.pipe()
    order = {**ORDER, "trace": str(trace_path), "alive": there}
    background._plan(order, output)
    assert os.read(here, 2) == b"."
    assert len(asked) == 4
    assert asked == sorted({*asked})
    assert asked[-1] == 60.0
    assert whole == [False, False, False, True], "the last has all the time that there is"
    assert told == [found.budget_bytes], "the third"


def test_a_first_plan_that_does_nothing_is_searched_for_longer(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a budget that no plan can meet, too: the nearest one still lowers the peak."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    over = msgspec.structs.replace(found, predicted_peak_bytes=2 * found.budget_bytes)
    output, asked = tmp_path / "plan.json", list[float]()

    def search(
        adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False
    ) -> Plan:
        asked.append(limit_s)
        return over if len(asked) > 1 else msgspec.structs.replace(over, predicted_peak_bytes=3 * found.budget_bytes, actions=[], script_actions=[])  # fmt: skip

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(Adviser, "floor", Floor(found.budget_bytes + 1, ""))
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    here, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, output)
    assert os.read(here, 2) == b"."
    assert load_plan(output).actions
    assert len(asked) == 3, "nothing, the nearest, and once more with all the time that there is"


@pytest.mark.parametrize(
    ("slower", "above_bytes", "searches"),
    [(40, 0, 4), (4, 0, 2), (2.5, 0, 1), (9, 100, 2), (3.5, 100, 1)],
)
def test_a_first_plan_that_is_much_too_slow_is_searched_for_longer(
    slower: float,
    above_bytes: int,
    searches: int,
    trace_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where time is short it may make every tensor again for each op that asks, or send all state away. For as long as four steps under it take more
    than plain ones; once only where it is as little above a budget, which none can meet, as the others are."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    if above_bytes:
        monkeypatch.setattr(Adviser, "floor", Floor(found.budget_bytes + 1, ""))
    output, asked = tmp_path / "plan.json", list[float]()

    def search(
        adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False
    ) -> Plan:
        asked.append(limit_s)
        assert not once
        step_ms = (slower - len(asked)) * found.plain_step_ms
        peak_bytes = (
            found.budget_bytes + above_bytes * len(asked) if above_bytes else found.predicted_peak_bytes
        )
        return msgspec.structs.replace(found, predicted_step_ms=step_ms, predicted_peak_bytes=peak_bytes)

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_LONG_S", float("inf"))
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    here, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, output)
    assert os.read(here, 2) == b"."
    assert [each / asked[0] for each in asked[:-1]] == [1, 4, 16, 64][:searches]
    assert asked[-1] == 60.0, "once more with all the time that there is"
    assert load_plan(output).predicted_step_ms == (slower - len(asked)) * found.plain_step_ms


@pytest.mark.parametrize(
    ("floor_of_grown", "slower", "tried"),
    [(0.5, 1.1, [1.4]), (2.0, 1.1, [1.0]), (0.5, 9.0, [1.4, 1.2, 1.1, 1.0, 1.0])],
)
def test_a_plan_for_larger_iterations_gives_way_where_it_is_slow_or_could_not_meet_the_budget(
    floor_of_grown: float,
    slower: float,
    tried: list[float],
    trace_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard holds those that are larger than the plan allows for; the steps of a plan all take as long."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    asked = list[float]()

    def search(adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False) -> Plan:  # fmt: skip
        asked.append(round(adviser.grown, 2))
        assert once == (soon and adviser.grown > 1)
        step_ms = (slower if adviser.grown > 1 else 1.1) * found.plain_step_ms
        return msgspec.structs.replace(found, predicted_step_ms=step_ms)

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    monkeypatch.setattr(Adviser, "floor", property(lambda adviser: Floor(int((floor_of_grown if adviser.grown > 1 else 0.5) * 20 * MIB), "")))  # fmt: skip
    here, there = os.pipe()
    order = {**ORDER, "trace": str(trace_path), "alive": there, "budget": "20MiB", "grown": 1.4}
    background._plan(order, tmp_path / "plan.json")
    assert os.read(here, 2) == b"."
    assert asked[: len(tried)] == tried
    assert load_plan(tmp_path / "plan.json").predicted_step_ms == 1.1 * found.plain_step_ms


@pytest.mark.parametrize(("takes_s", "searches"), [(0.0, 3), (0.3, 1)])
def test_the_script_does_not_wait_for_another_search_that_takes_as_long_as_the_first(
    takes_s: float, searches: int, trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an LSTM's thousands of ops one takes ten times as long as it is given: 11 s of a script of 60 ms a step."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    slow = msgspec.structs.replace(found, predicted_step_ms=9 * found.plain_step_ms)
    asked = list[float]()

    def search(adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False) -> Plan:  # fmt: skip
        asked.append(limit_s)
        time.sleep(takes_s)
        return slow

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_FIRST_S", (0.01, 0.01))
    monkeypatch.setattr(background, "_LONG_S", 0.5)
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    here, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, tmp_path / "plan.json")
    assert os.read(here, 2) == b"."
    assert len(asked) == searches + 1, "and once more with all the time that there is"


def test_nothing_is_waited_for_under_a_budget_that_no_plan_can_meet(trace_path: Path, tmp_path: Path) -> None:
    planner = Background()
    planner.look_for(trace_path, "12%", tmp_path / "plan.json", time_limit_s=3.0)
    assert planner.has_news(WAIT_S)
    first = planner.plan()
    assert not planner.is_over
    assert first.predicted_peak_bytes > first.budget_bytes
    assert planner.has_news(WAIT_S)


def test_a_script_that_waits_gets_a_plan_above_the_budget_before_a_long_search(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches one after the other took longer than it waits, and it ended without a plan."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    over = msgspec.structs.replace(found, predicted_peak_bytes=2 * found.budget_bytes)
    output, asked = tmp_path / "plan.json", list[float]()

    def search(
        adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False
    ) -> Plan:
        asked.append(limit_s)
        return over

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_LONG_S", 0.0)
    monkeypatch.setattr(Adviser, "floor", Floor(found.budget_bytes, ""))
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    here, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, output)
    assert os.read(here, 2) == b"."
    assert len(asked) == 2, "the first, and all the time that there is once the script has it"


def test_a_first_search_has_time_for_every_op(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a second found nothing for 11,000 ops, and the script waited for the next search in vain."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    asked = list[float]()

    def search(
        adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False
    ) -> Plan:
        asked.append(limit_s)
        return found

    monkeypatch.setattr(background, "_search", search)
    monkeypatch.setattr(background, "_FIRST_S_AN_OP", 1.0 / load_trace(trace_path).op_count)
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    _, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, tmp_path / "plan.json")
    assert asked[0] == pytest.approx(1.0)


def test_where_a_plan_meets_the_budget_nobody_asks_how_low_one_could_go(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took as long as the search itself, and the script waited."""
    found = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3).plan(20 * MIB)
    asked = list[Adviser]()

    def floor(adviser: Adviser) -> Floor:
        asked.append(adviser)
        return Floor(1, "")

    monkeypatch.setattr(Adviser, "floor", property(floor))
    monkeypatch.setattr(background, "_search", lambda *_, **__: found)
    monkeypatch.setattr(background, "_step_back", lambda limit_s: None)
    _, there = os.pipe()
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, tmp_path / "plan.json")
    assert not asked
    found = msgspec.structs.replace(found, predicted_peak_bytes=2 * found.budget_bytes)
    background._plan({**ORDER, "trace": str(trace_path), "alive": there}, tmp_path / "plan.json")
    assert asked


def test_searches_share_what_the_profile_gives(trace_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates do not depend on the budget, nor on what another search has had."""
    looked = list[int]()
    whole = Problem._candidate

    def counted(self: Problem, saved: Any) -> Any:
        looked.append(saved.storage)
        return whole(self, saved)

    monkeypatch.setattr(Problem, "_candidate", counted)
    adviser = Adviser(load_trace(trace_path), DEFAULT_ALLOW)
    for limit_s, budget in ((0.2, 20 * MIB), (0.3, 22 * MIB)):
        adviser.search_for(limit_s)
        adviser.plan(budget)
        looked.append(-1)
    first = looked.index(-1)
    assert first > 0
    assert looked[first + 1 : -1] == []


def test_a_planner_that_gets_no_time_ends_all_the_same() -> None:
    """Also where the script ignores SIGALRM, which its processes inherit."""
    lines = ("import signal, time", "from memopt.advisors import background", "signal.signal(signal.SIGALRM, signal.SIG_IGN)")  # fmt: skip
    then = ("background._LATEST_S = 1", "background._step_back(0.01)", "time.sleep(60)")
    ended = subprocess.run([sys.executable, "-c", "\n".join((*lines, *then))], timeout=50)
    assert ended.returncode == -signal.SIGALRM


@pytest.mark.parametrize("has_a_plan", [True, False])
def test_a_planner_does_not_stay_long_after_the_script_and_saves_what_it_is_saving(
    has_a_plan: bool, tmp_path: Path
) -> None:
    """It went on for ten minutes, with gigabytes, where the trace was large."""
    lines = (
        "import os, sys, threading, time",
        "from pathlib import Path",
        "from memopt.advisors import background",
        "background._AFTER_S, background._AFTER_WITH_A_PLAN_S = (60, 0.1) if len(sys.argv) > 2 else (0.1, 60)",
        "script, planner = os.pipe()",
        "threading.Thread(target=background._end_soon_after, args=(planner, Path(sys.argv[1])), daemon=True).start()",
        "time.sleep(0.5)",
        "with background._saving:",
        "    print('the script is there', flush=True)",
        "    os.close(script)",
        "    time.sleep(1)",
        "    print('saved', flush=True)",
        "time.sleep(60)",
    )
    output = tmp_path / "plan.json"
    if has_a_plan:
        output.touch()
    arguments = [str(output), "with a plan"][: 1 + has_a_plan]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines), *arguments], timeout=50, capture_output=True, text=True)  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "the script is there\nsaved\n")


def test_a_longer_search_for_a_plan_that_meets_the_budget_asks_for_no_other(
    trace_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search for the smallest peak found took as long again, and the script's patience ended before the one that would have met it."""
    adviser, asked = Adviser(load_trace(trace_path), DEFAULT_ALLOW, 0.3), list[int]()
    all_bytes = adviser.unplanned_peak_bytes
    plain = adviser.plan(all_bytes)

    def plan(adviser: Adviser, budget_bytes: int) -> Plan:
        if budget_bytes >= all_bytes:
            return plain
        asked.append(budget_bytes)
        raise BudgetInfeasible(budget_bytes, budget_bytes + 1)

    monkeypatch.setattr(Adviser, "plan", plan)
    background._search(adviser, "20MiB", 0.1, once=True)
    assert len(asked) == 1
    background._search(adviser, "20MiB", 0.1)
    assert len(asked) == 1 + TRIES
