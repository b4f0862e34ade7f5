"""Plans in a process of its own: a first plan soon, for which the script may wait, and a better one while the script goes on.

The process leaves the script's at once (it becomes nobody's child: a script that waits for any child of its own never meets it), works
when the processor has nothing else to do once nobody waits for it, does not hear the terminal's Ctrl-C, and ends by itself, on a processor
that always has something else to do after some minutes, and ten seconds after the script, a minute where there is no plan yet. What it finds
is one file: the plan, or why there is none.

It stays in the script's session. Linux shares the processor among sessions before it looks at priorities (autogroups, `man 7 sched`), and
OpenMP threads that wait for one that does not run take up to twenty times as long for a step: two cores, beside a loop in Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memopt.errors import MemoptError, RunFailed
from memopt.plan import Plan, load_plan
from memopt.profiler.timing.disk_rates import Rates, measure_disk
from memopt.version import IMPORT_ROOT

if TYPE_CHECKING:
    from memopt.advisors.advise import Adviser
    from memopt.trace import Trace

_FIRST_S: Final = (0.25, 2.0)
"""Search for the first plan: as long as a step takes, but no less and no more. It comes somewhat later, for the quick rules."""
_FIRST_S_AN_OP: Final = 1e-4
"""Nor less than this for each op: what has no time for one rule finds nothing."""
_LONGER: Final = 4
"""Times as long is searched for the first plan where none was found that meets the budget."""
_SLOW: Final = (2.0, 3.0)
"""Plain steps that a step may take under a first plan that meets the budget, and under one that does not, before a better one is searched
for so much longer: once, or, where it meets the budget, for as long as some steps under it take more than plain ones."""
_STEPS: Final = 4
"""So many."""
_LEAST_GROWN: Final = 1.1
"""Below it no smaller growth is tried."""
_LONG_S: Final = 8.0
"""A search that would go on after this, by the wall, is left for later where there is a plan that does something, be it above the budget:
the script waits ten seconds at most."""
_LATEST_S: Final = 600
"""By the wall, once nobody waits: a process that gets no time would keep its memory for as long as the machine is busy."""
_LATEST: Final = 10
"""Times as long as it may search, where that is more."""
_AFTER_S: Final = 60
_AFTER_WITH_A_PLAN_S: Final = 10
"""By the wall, once the script has ended, without a plan and with one: what is found then is for its next run."""
_MEASURED_S: Final = 10.0
"""To measure a disk takes a tenth of a second; first of all the process has imported what it needs."""
_ENTRY: Final = (
    "import os, sys\nif os.fork(): os._exit(0)\nfrom memopt.advisors.background import main\nmain()"
)
"""The fork comes before anything is imported: it is the whole of what the script waits for."""


class Background:
    """A planner that has been started and imports what it needs until it is told what to `look_for`. Then `has_news` is cheap, `plan` gives
    what it found, and `is_over` tells whether that is all."""

    def __init__(self) -> None:
        """Raises `OSError` where no process can be started."""
        self.is_over = False
        self._start()

    def _start(self) -> None:
        orders, self._orders = os.pipe()
        self._read, alive = os.pipe()
        self._measures = False
        self._pipe = os.fstat(self._orders).st_ino
        try:
            started = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, str(alive)],
                stdin=orders,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[alive],
                process_group=0,
                env=os.environ | {"PYTHONPATH": _path_to_memopt()},
            )
            started.wait()
        finally:
            os.close(orders)
            os.close(alive)

    def measure(self, folder: Path) -> None:
        """Have it measure the disk of `folder`, while the script's process does other things; then ask for `disk_rates`."""
        if not self._measures:
            self._measures = self._send({"measure": str(folder)})

    def disk_rates(self) -> Rates | None:
        """What it was told to measure; None where it was not, or is gone."""
        if not self._measures:
            return None
        self._measures = False
        with contextlib.suppress(OSError, ValueError):
            known = select.select([self._read], [], [], _MEASURED_S)[0]
            out, in_ = map(float, os.read(self._read, 256).split() if known else ())
            return out, in_
        with contextlib.suppress(OSError):  # what it says from now on would be taken for news
            self._start()
        return None

    def look_for(
        self,
        trace: Path,
        budget: str,
        output: Path,
        *,
        allow: tuple[str, ...] = (),
        deny: tuple[str, ...] = (),
        time_limit_s: float | None = None,
        grown: float = 1.0,
    ) -> None:
        """Plan for the profile `trace` and write the plan to `output`, a first one soon, as the script waits; where that meets the budget, for
        an iteration that saves `grown` times as much.

        Raises `OSError` where the process that was started is gone and no other can be."""
        self._output = output
        self._why = _why_file(output)
        for path in (output, self._why):
            path.unlink(missing_ok=True)
        order = {
            "trace": str(trace),
            "budget": budget,
            "output": str(output),
            "allow": allow,
            "deny": deny,
            "time_limit_s": time_limit_s,
            "grown": grown,
        }
        if not self._send(order):
            self._start()
            self._send(order)
        with contextlib.suppress(OSError):
            os.close(self._orders)

    def _send(self, order: dict[str, Any]) -> bool:
        """False where the script has closed every descriptor that it did not open; ours may be a file of its own since."""
        try:
            if os.fstat(self._orders).st_ino != self._pipe:
                return False
            _write(self._orders, json.dumps(order).encode() + b"\n")
        except OSError:
            return False
        return True

    def has_news(self, wait_s: float = 0.0) -> bool:
        """Within `wait_s` seconds: has it found a plan, or ended?"""
        try:
            return self.is_over or bool(select.select([self._read], [], [], wait_s)[0])
        except (OSError, ValueError):  # the script has closed every descriptor that it did not open
            return self._output.exists() or self._why.exists()

    def plan(self) -> Plan:
        """What was found last; call when there is news. Raises `MemoptError` where there is no plan."""
        with contextlib.suppress(OSError):
            self.is_over = True
            self.is_over = not os.read(self._read, 1)
            if self.is_over:
                os.close(self._read)
        if self._output.exists():
            return load_plan(self._output)
        why = ""
        with contextlib.suppress(OSError):
            why = self._why.read_text(encoding="utf-8")
            self._why.unlink()
        raise RunFailed("no plan could be made", why=why or "the process that planned was ended from outside")


def _write(pipe: int, order: bytes) -> None:
    """Raises `BrokenPipeError` where nobody reads, also in a script that gave SIGPIPE its deadly default back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        os.write(pipe, order)
    except BrokenPipeError:
        signal.sigtimedwait({signal.SIGPIPE}, 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _why_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.why")


def _path_to_memopt() -> str:
    """Where `memopt` itself was imported from, then what the user has set."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), IMPORT_ROOT)))


def main() -> None:
    """The process: its standard input is the order, `sys.argv[1]` the descriptor that tells of news."""
    _import_all()
    order: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if "measure" not in order:
            break
        rates = measure_disk(Path(order["measure"]))
        with contextlib.suppress(BrokenPipeError):
            os.write(int(sys.argv[1]), " ".join(map(str, rates)).encode())
    if "output" not in order:  # nothing was recorded
        return
    order["alive"] = int(sys.argv[1])
    output = Path(order["output"])
    threading.Thread(target=_end_soon_after, args=(order["alive"], output), daemon=True).start()
    try:
        _plan(order, output)
    except BaseException as error:
        words = str(error) if isinstance(error, MemoptError) else f"{type(error).__name__}: {error}"
        if not output.exists():
            with contextlib.suppress(OSError):
                _why_file(output).write_text(words, encoding="utf-8")


def _import_all() -> None:
    """What planning needs, while nobody waits for it."""
    import numpy.ma  # noqa: F401  which `np.median` asks for

    import memopt.advisors.best_effort
    import memopt.estimators.elsewhere.trace_grown  # noqa: F401
    from memopt.advisors.registry import registered

    registered()
    with contextlib.suppress(ImportError):
        import highspy  # noqa: F401


def _plan(order: dict[str, Any], output: Path) -> None:
    from memopt.advisors.best_effort import may_be_met, within_reason
    from memopt.advisors.profiles.problem import usual_limit_s
    from memopt.trace import load_trace

    trace = load_trace(Path(order["trace"]))
    limit_s = float(order["time_limit_s"] or usual_limit_s(trace.op_count))
    least, most = _FIRST_S
    least = max(least, _FIRST_S_AN_OP * trace.op_count)
    first_s = min(limit_s, most, max(least, trace.step_ms / 1000))
    recorded, budget, began = _adviser(trace, order), order["budget"], time.monotonic()
    for adviser in _largest_first(recorded, float(order.get("grown", 1.0))):
        is_last = adviser is recorded
        if not (is_last or may_be_met(adviser, budget)):
            continue
        last = time.monotonic()
        first = _search(adviser, budget, first_s, soon=first_s < limit_s, once=not is_last)
        # larger iterations than this are the guard's, which costs less than that each of them takes long
        if not first.over_bytes and not _is_slow(first):
            break
    first, once_s = within_reason(adviser, first), _LONGER * first_s
    slow_s = _slow_s(first, once_s)
    while first_s < limit_s and (_LONGER * first_s <= slow_s or _falls_short(adviser, first)):
        next_s, now = min(limit_s, _LONGER * first_s), time.monotonic()
        # of thousands of ops one takes longer than it is given, and the next no less than the last
        if now - began + max(next_s, now - last) > _LONG_S and _does_something(first):
            break
        last = now
        # the smallest peak of all has been looked for, if this is one, but perhaps not the shortest step with it
        once = _does_something(first) and _LONGER * first_s > slow_s
        first_s = next_s  # the guard holds the budget, this plan would not
        again = _search(adviser, budget, first_s, soon=first_s < limit_s, once=once)
        again = within_reason(adviser, again)
        first = again if again.is_better_than(first) else first
        slow_s = _slow_s(first, once_s)
    _save(first, output)
    if first_s == limit_s or not _does_something(first):
        return
    with contextlib.suppress(BrokenPipeError):  # the script has ended; the plan is for its next run
        os.write(order["alive"], b".")
    _step_back(limit_s)
    longer = within_reason(adviser, _search(adviser, budget, limit_s))
    if longer.is_better_than(first) and output.exists():
        _save(longer, output)


def _is_slow(plan: Plan) -> bool:
    return plan.predicted_step_ms > _SLOW[bool(plan.over_bytes)] * plan.plain_step_ms


def _slow_s(plan: Plan, once_s: float) -> float:
    """How long it may be searched for a better plan than this one, whose steps take long: `once_s` at least; 0 where they do not."""
    if not _is_slow(plan):
        return 0.0
    extra_ms = plan.predicted_step_ms - plan.plain_step_ms
    return once_s if plan.over_bytes else max(once_s, _STEPS * extra_ms / 1000)


_saving = threading.Lock()


def _save(plan: Plan, output: Path) -> None:
    with _saving:
        plan.save(output)


def _does_something(plan: Plan) -> bool:
    return bool(plan.actions or plan.script_actions)


def _falls_short(adviser: Adviser, plan: Plan) -> bool:
    """Does it miss a budget that can be met, or do nothing where something can be done? What can be takes as long to know as a first search."""
    if not plan.over_bytes:
        return False
    floor_bytes = adviser.floor.bytes
    nothing_done = floor_bytes < plan.unplanned_peak_bytes and not _does_something(plan)
    return floor_bytes <= plan.budget_bytes or nothing_done


def _search(adviser: Adviser, budget: str, limit_s: float, *, soon: bool = False, once: bool = False) -> Plan:
    from memopt.advisors.best_effort import TRIES, best_effort

    adviser.search_for(limit_s, soon=soon)
    return best_effort(adviser, budget, tries=1 if once else TRIES)


def _largest_first(recorded: Adviser, grown: float) -> Iterator[Adviser]:
    """Of iterations that save `grown` times as much as the recorded one, of smaller ones, and of that itself."""
    from memopt.advisors.advise import Adviser
    from memopt.estimators.elsewhere.trace_grown import grown as as_grown

    while grown > 1.0:
        trace = as_grown(recorded.trace, grown)
        yield Adviser(trace, recorded.allow, profile=recorded.profile, recorded=recorded, grown=grown)
        grown = 1 + (grown - 1) / 2 if grown > _LEAST_GROWN else 1.0
    yield recorded


def _adviser(trace: Trace, order: dict[str, Any]) -> Adviser:
    """One for all searches: what is derived from the trace takes as long as a first search."""
    from memopt.advisors.advise import Adviser
    from memopt.advisors.kinds import allowed

    allow = allowed(tuple(order["allow"]), tuple(order["deny"]))
    return Adviser(trace, allow, profile=order["trace"])


def _step_back(limit_s: float) -> None:
    """Run when the processor has nothing else to do, and not for ever: nobody waits any more, and `limit_s` of its time are wanted."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(_LATEST_S, int(_LATEST * limit_s)))
    _idle()


def _idle() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(os.getpid(), os.SCHED_IDLE, os.sched_param(0))


def _end_soon_after(script: int, output: Path) -> None:
    """End the process soon after nobody can read any more what is written to `script`: where there is a plan already, sooner."""
    waits = select.poll()
    waits.register(script, 0)
    waits.poll()
    _idle()
    time.sleep(_AFTER_WITH_A_PLAN_S if output.exists() else _AFTER_S)
    with _saving:
        os._exit(0)
