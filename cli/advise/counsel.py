"""`memopt advise --strategy NAME` for strategies that advise on the run as a whole: buffer-sharing, zero-offload, cdma, megatron, ctdr.

They need no budget. With one, the exit code is 3 when what they advise would not meet it. A plan is written when `memopt apply`
can follow the advice, or when `-o` asks for the file.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from memopt.advisors.counsel.counsel import Advice, Counsel
from memopt.cli.advise.words import with_command
from memopt.cli.requests import AdviseRequest
from memopt.errors import BudgetInfeasible, UsageError

if TYPE_CHECKING:
    from memopt.advisors.lints.registry import Lint
    from memopt.plan import Plan


def study(request: AdviseRequest) -> int:
    """Print what the strategy finds; gives the exit code."""
    from memopt.advisors.advise import Adviser
    from memopt.advisors.kinds import allowed, kinds_named
    from memopt.advisors.profiles.problem import TIME_LIMIT_S
    from memopt.cli.advise.setting import file_for, lints_of, planned_trace
    from memopt.estimators.hidden.beside_tensors import parse_budget

    counsel = _counsel(request)
    named, denied = kinds_named(request.allow), kinds_named(request.deny)
    if counsel.allows and counsel.allows <= denied:
        raise UsageError(f"{counsel.name} needs {', '.join(sorted(counsel.allows))}, which --deny excludes")
    trace = planned_trace(request)
    output = file_for(request, trace) if request.output else None
    limit_s = request.time_limit_s or TIME_LIMIT_S
    adviser = Adviser(trace, allowed((), request.deny), limit_s, str(request.source))
    budget = parse_budget(request.budget or "100%", trace, unplanned_bytes=adviser.unplanned_peak_bytes)
    problem = adviser.problem(budget.tensors_bytes)
    advice = counsel.study(problem, named - denied)
    met = request.budget is None or advice.peak_bytes <= problem.budget_bytes
    if output is None and advice.enforced and met:
        output = file_for(request, trace)
    lints, script = lints_of(trace), " ".join(trace.script.argv)
    _print(advice, script, output if met else None, lints, as_json=request.as_json)
    if not met:
        refused = BudgetInfeasible(
            problem.budget_bytes,
            advice.peak_bytes,
            (f"this is what {counsel.name} comes to; --strategy auto may find a plan",),
        )
        raise with_command(budget.told(refused), request)
    if output is not None:
        _write(adviser.write(problem, {}, counsel.name, advice.notes), advice, output)
    return 0


def _counsel(request: AdviseRequest) -> Counsel:
    from memopt.advisors.registry import counsels

    (wanted,) = request.strategies
    for name in ("pareto", "max_overhead", "max_batch", "explain"):
        if getattr(request, name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --strategy {wanted}")
    return counsels()[wanted]


def _print(advice: Advice, script: str, output: Path | None, lints: list[Lint], *, as_json: bool) -> None:
    if as_json:
        from memopt.reports.formats.summary import encode

        figures = {
            "kind": "advice",
            "strategy": advice.strategy,
            "verdict": advice.verdict,
            "peak_bytes": advice.peak_bytes,
            "enforced": advice.enforced,
            "figures": advice.figures,
            "script_actions": msgspec.to_builtins(list(advice.actions)),
            "notes": list(advice.notes),
            "plan": str(output) if output else None,
            "lints": msgspec.to_builtins(lints),
        }
        click.echo(encode(figures))
        return
    from memopt.cli.advise.setting import tell_lints
    from memopt.cli.advise.tables import advice_table
    from memopt.cli.shared.console import out

    out().print(advice_table(advice, script))
    tell_lints(lints, out())


def _write(plan: Plan, advice: Advice, output: Path) -> None:
    from memopt.cli.shared.console import say

    plan = msgspec.structs.replace(plan, script_actions=list(advice.actions))
    plan.save(output)
    say(f"wrote {output}")
    if advice.enforced:
        say(f"next: memopt apply {shlex.quote(str(output))}")
    elif advice.actions:
        say("advice only: memopt apply refuses this plan")
    else:
        say("advice only: the plan holds no action")
