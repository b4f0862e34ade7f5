"""`memopt advise --strategy NAME` for strategies that advise on the run as a whole: buffer-sharing, zero-offload, cdma, megatron, ctdr.

They need no budget. With one, the exit code is 3 when what they advise would not meet it. A plan is written when `memopt apply`
can follow the advice, or when `-o` asks for the file.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from memopt.advisors.counsel.counsel import Advice, Counsel
from memopt.cli.advise.words import with_command
from memopt.errors import BudgetInfeasible, UsageError

if TYPE_CHECKING:
    from memopt.advisors.lints.registry import Lint


def study(path: Path, options: dict[str, Any]) -> int:
    """Print what the strategy finds; gives the exit code."""
    from memopt.advisors.advise import Adviser
    from memopt.advisors.lints.find import find_lints
    from memopt.advisors.profiles.problem import TIME_LIMIT_S, allowed, kinds_named
    from memopt.cli.advise.given import on_device, room_as_budget, script_stem
    from memopt.cli.shared.own_files import refuse_foreign
    from memopt.estimators.hidden.beside_tensors import parse_budget
    from memopt.trace import load_trace

    counsel = _counsel(options)
    named, denied = kinds_named(options["allow"]), kinds_named(options["deny"])
    if counsel.allows and counsel.allows <= denied:
        raise UsageError(f"{counsel.name} needs {', '.join(sorted(counsel.allows))}, which --deny excludes")
    room_as_budget(options)
    trace = on_device(load_trace(path), options["device"])
    output: Path = options["output"] or Path(f"memopt-{script_stem(trace)}.plan.json")
    if options["output"]:
        refuse_foreign(output, "memopt.plan", script=trace.script, force=options["force"])
    usual = allowed((), tuple(options["deny"]))
    adviser = Adviser(trace, usual, options["time_limit_s"] or TIME_LIMIT_S, str(path))
    budget = parse_budget(options["budget"] or "100%", trace, unplanned_bytes=adviser.unplanned_peak_bytes)
    problem = adviser.problem(budget.tensors_bytes)
    advice = counsel.study(problem, named - denied)
    met = options["budget"] is None or advice.peak_bytes <= problem.budget_bytes
    write = bool(options["output"]) or (advice.enforced and met)
    if write and not options["output"]:
        refuse_foreign(output, "memopt.plan", script=trace.script, force=options["force"])
    lints = [] if trace.partial else find_lints(trace)
    _print(advice, " ".join(trace.script.argv), output if write and met else None, lints, options)
    if not met:
        refused = BudgetInfeasible(
            problem.budget_bytes,
            advice.peak_bytes,
            (f"this is what {counsel.name} comes to; --strategy auto may find a plan",),
        )
        raise with_command(budget.told(refused), path, options)
    if write:
        _write(adviser.write(problem, {}, counsel.name, advice.notes), advice, output)
    return 0


def _counsel(options: dict[str, Any]) -> Counsel:
    from memopt.advisors.registry import counsels

    names = options["strategies"]
    for name in ("pareto", "max_overhead", "max_batch", "explain"):
        if options[name]:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --strategy {names[0]}")
    return counsels()[names[0]]


def _print(
    advice: Advice, script: str, output: Path | None, lints: list[Lint], options: dict[str, Any]
) -> None:
    if options["as_json"]:
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
    from memopt.cli.advise.tables import advice_table, lints_table
    from memopt.cli.shared.console import out

    out().print(advice_table(advice, script))
    if lints:
        out().print(lints_table(lints))


def _write(plan: Any, advice: Advice, output: Path) -> None:
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
