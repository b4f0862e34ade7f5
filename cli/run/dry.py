"""`memopt run --dry-run`: record as `memopt profile` does, plan at once, show the plan, enforce nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.cli.requests import RunRequest
from memopt.errors import RunFailed

if TYPE_CHECKING:
    from memopt.instrument.script.command import Command
    from memopt.plan import Plan
    from memopt.trace import Trace


def dry_run(command: Command, request: RunRequest) -> int:
    """Run the script until an iteration is recorded, and show on stderr what `memopt run` would do. 3 where the budget cannot be met."""
    from memopt.cli.shared.console import err, say
    from memopt.files import swap_folder
    from memopt.instrument.script.children import Children
    from memopt.instrument.script.runner import run_to_the_end
    from memopt.profiler.child import RecordsChild
    from memopt.profiler.recordings import Wanted
    from memopt.profiler.session import ProfileSession
    from memopt.reports.terminal import render_plan
    from memopt.trace import load_trace

    wanted = Wanted(chooses=1, swap_dir=swap_folder(request.swap_dir), device=request.device or "")
    session = ProfileSession(command, wanted)
    session.install()
    with tempfile.TemporaryDirectory(prefix="memopt-dry-") as folder:
        in_child = RecordsChild(command, wanted, Path(folder, "p.profile.json.gz"), Path(folder, "recorded"))
        Children(in_child, wanted=lambda: not session.iterations_seen).install()
        code = run_to_the_end(command, lambda how: session.finished(), raised=session.ended_by)
        trace = (
            load_trace(in_child.path) if session.trace is None and in_child.claim.exists() else session.trace
        )
    if trace is None or trace.partial or session.failure is not None:
        why = trace.partial if trace is not None else "the script trained nothing that memopt could see"
        say(
            str(
                session.failure
                or RunFailed("there is no plan: no iteration was recorded to its end", why=why)
            )
        )
        return code or RunFailed.exit_code
    plan = _plan(trace, request)
    err().print(render_plan(plan, top=10))
    from memopt.plan import NOT_MET

    return 3 if any(note.startswith(NOT_MET) for note in plan.notes) else 0


def _plan(trace: Trace, request: RunRequest) -> Plan:
    from memopt.advisors.advise import Adviser
    from memopt.advisors.best_effort import best_effort, within_reason
    from memopt.advisors.kinds import allowed
    from memopt.advisors.profiles.problem import usual_limit_s
    from memopt.instrument.memory.room import free_bytes

    limit_s = request.time_limit_s or usual_limit_s(trace.op_count)
    adviser = Adviser(trace, allowed(request.allow, request.deny), limit_s, str(Path.cwd()))
    budget = request.budget or str(free_bytes(trace.device.kind) or trace.peak_bytes)
    return within_reason(adviser, best_effort(adviser, budget))
