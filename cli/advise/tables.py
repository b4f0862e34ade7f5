"""Tables of `memopt advise` beside the plan's own: strategies compared, the curve, one tensor explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from memopt.reports.tables import pairs_table, plain_table, share, words
from memopt.units import format_bytes, format_ms

if TYPE_CHECKING:
    from memopt.advisors.counsel.counsel import Advice
    from memopt.advisors.explain import Explanation
    from memopt.advisors.frontier import Point
    from memopt.advisors.lints.registry import Lint
    from memopt.cli.advise.comparison_row import Row
    from memopt.plan import Plan
    from memopt.trace import Script

_BAR = 30


def strategies_table(rows: list[Row]) -> RenderableType:
    """Peak, step time and actions of each strategy; below it, why some are not possible here."""
    cells = [(row.strategy, *_outcome(row), f"{row.seconds:.1f} s") for row in rows]
    columns = ("strategy", "peak", "step", "overhead", "actions", "planned in")
    reasons = [words(f"{row.strategy} is not possible here: {row.why_not}.") for row in rows if row.why_not]
    return Group(pairs_table("Strategies", columns, cells), *reasons)


def _outcome(row: Row) -> tuple[str, str, str, str]:
    plan = row.plan
    if plan is not None:
        step = _overhead(plan.predicted_step_ms, plan.plain_step_ms)
        peak = format_bytes(plan.predicted_peak_bytes)
        return peak, format_ms(plan.predicted_step_ms), step, str(len(plan.actions))
    if row.min_peak_bytes is None:
        return "not possible here", "-", "-", "-"
    peak = f"{'' if row.fits else 'not met: '}{format_bytes(row.min_peak_bytes)}"
    step = format_ms(row.step_ms) if row.step_ms is not None else "-"
    return peak, step, "-", "advice only" if row.advised else "-"


def explanation_table(found: Explanation, plan: Plan) -> RenderableType:
    """Options for one tensor, the chosen one marked."""
    rows = [
        (
            f"{'* ' if each.chosen else '  '}{each.what}",
            format_bytes(each.peak_bytes),
            format_ms(each.step_ms),
            _overhead(each.step_ms, plan.plain_step_ms),
            "yes" if each.fits else "no",
        )
        for each in found.alternatives
    ]
    title = f"Options for tensor {found.storage}: {found.label} ({format_bytes(found.size_bytes)})"
    table = pairs_table("", ("option", "peak of the plan", "step", "overhead", "fits"), rows)
    return Group(
        Text(),
        words(title, style="bold"),
        table,
        *(Text(f"{reason[0].upper()}{reason[1:]}.") for reason in found.reasons),
    )


def lints_table(lints: list[Lint]) -> RenderableType:
    """What the script itself could do better."""
    table = plain_table(
        "What no plan should have to fix", [("size", "right"), ("what, where, and what to write", "name")]
    )
    for lint in lints:
        where = [words(f"at {lint.line}", style="dim")] if lint.line else []
        told = Group(Text(f"{lint.name}: {lint.what}"), *where, Text(f"try: {lint.try_}", style="dim"))
        table.add_row(format_bytes(lint.size_bytes), told)
    return Group(Text(), table)


def advice_table(advice: Advice, script: str) -> RenderableType:
    """The verdict, then figures, then what to keep in mind."""
    table = plain_table(f"{advice.strategy}", [("what", "name"), ("how much", "left")])
    for what, amount in advice.rows:
        table.add_row(words(what), words(amount))
    parts: list[RenderableType] = [
        words(f"{script}: {advice.strategy}", style="dim"),
        words(advice.verdict, style="bold"),
    ]
    parts += [words(f"Note: {note}.") for note in advice.notes]
    return Group(*parts, Text(), table)


def pareto_table(points: list[Point], unplanned_bytes: int) -> RenderableType:
    """Budget, peak, overhead, with a bar for the overhead."""
    most = max((point.overhead for point in points if point.plan), default=0.0) or 1.0
    rows = []
    for point in points:
        if point.plan is None:
            rows.append(
                (
                    share(point.budget_bytes, unplanned_bytes),
                    f"not met: {format_bytes(point.min_peak_bytes)}",
                    "-",
                    "-",
                    "",
                )
            )
            continue
        bar = "█" * max(0, round(_BAR * point.overhead / most))
        step = point.plan.predicted_step_ms
        rows.append(
            (
                share(point.budget_bytes, unplanned_bytes),
                format_bytes(point.plan.predicted_peak_bytes),
                format_ms(step),
                _overhead(step, point.plan.plain_step_ms),
                bar,
            )
        )
    title = f"Peak against step time (unplanned peak {format_bytes(unplanned_bytes)})"
    table = plain_table(
        title, [(name, "right") for name in ("budget", "peak", "step", "overhead")] + [("", "left")]
    )
    for row in rows:
        table.add_row(*row)
    return table


def pareto_figures(points: list[Point], unplanned_bytes: int, script: Script) -> dict[str, Any]:
    """The curve as plain data."""
    return {
        "schema": "memopt.pareto/1",
        "kind": "pareto",
        "script": {"argv": script.argv, "cwd": script.cwd, "as_module": script.as_module},
        "unplanned_peak_bytes": unplanned_bytes,
        "points": [
            {
                "budget_bytes": point.budget_bytes,
                "feasible": point.plan is not None,
                "predicted_peak_bytes": point.min_peak_bytes,
                "predicted_step_ms": point.plan.predicted_step_ms if point.plan else None,
                "overhead": point.overhead if point.plan else None,
            }
            for point in points
        ],
    }


def _overhead(step_ms: float, plain_ms: float) -> str:
    return f"{100 * (step_ms / plain_ms - 1):+.1f} %" if plain_ms else "-"
