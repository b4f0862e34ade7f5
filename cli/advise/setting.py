"""What the verbs of `memopt advise` share: the profile as it is planned, who plans, what the script could do better, and where a file goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from memopt.advisors.advise import Adviser
from memopt.advisors.kinds import allowed
from memopt.advisors.lints.find import find_lints
from memopt.advisors.lints.registry import Lint
from memopt.advisors.profiles.problem import usual_limit_s
from memopt.cli.advise.comparison_row import Row
from memopt.cli.advise.given import on_device, script_stem
from memopt.cli.requests import AdviseRequest
from memopt.cli.shared.own_files import refuse_foreign
from memopt.errors import BudgetInfeasible, MemoptError
from memopt.estimators.hidden.beside_tensors import Budget, parse_budget
from memopt.trace import Trace, load_trace


@dataclass(frozen=True, slots=True)
class Setting:
    """One call of a verb on a profile."""

    request: AdviseRequest
    adviser: Adviser
    lints: list[Lint]
    output: Path

    def budget(self) -> Budget:
        """What tensors may have, of what was typed."""
        typed, adviser = self.request.budget, self.adviser
        assert typed is not None, "`words.check_goal` has asked for one"
        return parse_budget(typed, adviser.trace, unplanned_bytes=adviser.unplanned_peak_bytes)

    def figures(self, rows: list[Row] | None = None) -> dict[str, Any]:
        """What a program is told whether there is a plan or not."""
        import msgspec

        floor = self.adviser.floor
        figures = {
            "floor_bytes": floor.bytes,
            "floor": floor.words,
            "lints": msgspec.to_builtins(self.lints),
        }
        return figures if rows is None else figures | {"strategies": [row.figures() for row in rows]}

    def tell_no_plan(self, error: MemoptError | None, rows: list[Row] | None = None) -> None:
        """What there is to say beside the error: each strategy's own smallest peak on stdout, the lints on stderr."""
        from memopt.cli.advise.tables import strategies_table
        from memopt.cli.shared.console import err, out

        if self.request.as_json:
            from memopt.reports.formats.summary import encode

            figures: dict[str, Any] = {"kind": "no plan", "plan": None}
            if isinstance(error, BudgetInfeasible):
                figures["budget_bytes"] = error.budget_bytes
                figures["min_peak_bytes"] = error.min_peak_bytes
                figures["blockers"] = list(error.blockers)
            click.echo(encode(figures | self.figures(rows)))
            return
        if rows is not None:
            out().print(strategies_table(rows))
        tell_lints(self.lints, err())


def planned_trace(request: AdviseRequest) -> Trace:
    """The profile, as the device that was asked for would run it."""
    return on_device(load_trace(request.source), request.device)


def file_for(request: AdviseRequest, trace: Trace, kind: str = "plan") -> Path:
    """Where the verb writes. Raises `UsageError` where that is somebody else's file."""
    output = request.output or Path(f"memopt-{script_stem(trace)}.{kind}.json")
    refuse_foreign(output, f"memopt.{kind}", script=trace.script, force=request.force)
    return output


def setting_of(request: AdviseRequest, kind: str = "plan") -> Setting:
    """Read the profile, see that the file may be written, and look for what the script could do better."""
    allow = allowed(request.allow, request.deny)
    trace = planned_trace(request)
    output = file_for(request, trace, kind)
    limit = request.time_limit_s or usual_limit_s(trace.op_count)
    return Setting(request, Adviser(trace, allow, limit, str(request.source)), lints_of(trace), output)


def lints_of(trace: Trace) -> list[Lint]:
    """What the script could do better; of a profile that is not whole nothing is told."""
    return [] if trace.partial else find_lints(trace)


def tell_lints(lints: list[Lint], console: Any) -> None:
    """Print them, if there are any."""
    from memopt.cli.advise.tables import lints_table

    if lints:
        console.print(lints_table(lints))
