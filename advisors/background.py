"""Plans in a process of its own, while the script that is to be planned for goes on.

The process leaves the script's at once (it becomes nobody's child: a script that waits for any child of its own never meets it),
has a low priority unless a guard holds the budget meanwhile (which costs more than sharing the processor does), ignores the terminal's
Ctrl-C, and ends by itself. What it finds is one file: the plan, or why there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

from memopt.errors import MemoptError, RunFailed
from memopt.plan import Plan, load_plan
from memopt.version import IMPORT_ROOT

_NICE: Final = 10
"""Where nobody waits for the plan. OpenMP threads that spin leave such a process a tenth of a core: planning took five times as long."""
_ENTRY: Final = (
    "import os, sys\nif os.fork(): os._exit(0)\nfrom memopt.advisors.background import main\nmain()"
)
"""The fork comes before anything is imported: it is the whole of what the script waits for."""


class Background:
    """A planner that has been started. `is_over` is cheap; then `plan` gives what it found."""

    def __init__(
        self,
        trace: Path,
        budget: str,
        output: Path,
        *,
        allow: tuple[str, ...] = (),
        deny: tuple[str, ...] = (),
        time_limit_s: float | None = None,
        urgent: bool = False,
    ) -> None:
        """Plan for the profile `trace` and write the plan to `output`. Raises `OSError` where no process can be started."""
        self._output = output
        self._why = _why_file(output)
        for path in (output, self._why):
            path.unlink(missing_ok=True)
        self._read, write = os.pipe()
        order = {
            "trace": str(trace),
            "budget": budget,
            "output": str(output),
            "allow": allow,
            "deny": deny,
            "time_limit_s": time_limit_s,
            "alive": write,
            "nice": 0 if urgent else _NICE,
        }
        try:
            started = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[write],
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": _path_to_memopt()},
            )
            started.wait()
        finally:
            os.close(write)

    @property
    def is_over(self) -> bool:
        """Has the process ended?"""
        try:
            return bool(select.select([self._read], [], [], 0)[0])
        except (OSError, ValueError):  # the script has closed every descriptor that it did not open
            return self._output.exists() or self._why.exists()

    def plan(self) -> Plan:
        """What was found. Raises `MemoptError` where there is no plan."""
        with contextlib.suppress(OSError):
            os.close(self._read)
        if self._output.exists():
            return load_plan(self._output)
        why = ""
        with contextlib.suppress(OSError):
            why = self._why.read_text(encoding="utf-8")
            self._why.unlink()
        raise RunFailed("no plan could be made", why=why or "the process that planned was ended from outside")


def _why_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.why")


def _path_to_memopt() -> str:
    """Where `memopt` itself was imported from, then what the user has set."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), IMPORT_ROOT)))


def main() -> None:
    """The process: `sys.argv[1]` is the order."""
    order = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):
        os.nice(order["nice"])
    output = Path(order["output"])
    try:
        _plan(order, output)
    except BaseException as error:
        words = str(error) if isinstance(error, MemoptError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            _why_file(output).write_text(words, encoding="utf-8")


def _plan(order: dict[str, object], output: Path) -> None:
    from memopt.advisors.advise import Adviser
    from memopt.advisors.best_effort import best_effort
    from memopt.advisors.profiles.problem import allowed, usual_limit_s
    from memopt.trace import load_trace

    trace = load_trace(Path(str(order["trace"])))
    limit_s = order["time_limit_s"] or usual_limit_s(trace.op_count)
    allow = allowed(tuple(order["allow"]), tuple(order["deny"]))  # type: ignore[arg-type]
    adviser = Adviser(trace, allow, float(limit_s), str(order["trace"]))  # type: ignore[arg-type]
    best_effort(adviser, str(order["budget"])).save(output)
