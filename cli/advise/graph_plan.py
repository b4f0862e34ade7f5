"""`memopt advise --graph`: plan a plain graph, compare strategies on it, write a plain schedule."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.cli.advise.words import is_lowest
from memopt.cli.shared.own_files import refuse_foreign
from memopt.errors import BudgetInfeasible, NotPossibleHere, UsageError
from memopt.units import format_bytes, format_ms, parse_bytes

if TYPE_CHECKING:
    from memopt.advisors.graphs.graph import Graph
    from memopt.advisors.graphs.schedule import Schedule

_KINDS = {"recompute": "recompute", "swap": "swap", "swap-host": "swap"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    strategy: str
    seconds: float
    schedule: Schedule | None = None
    failure: BudgetInfeasible | NotPossibleHere | None = None


def advise_graph(
    graph_path: Path,
    *,
    budget: str,
    schedule: Path | None = None,
    out_gbps: float | None = None,
    in_gbps: float | None = None,
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
    strategies: Sequence[str] = (),
    time_limit_s: float | None = None,
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Plan the graph at `graph_path`, show the outcome, write the best schedule to `schedule`; gives the exit code.

    A rate that is left out is as the other one; without either there is no link. Raises `BadFile` for a graph that is none and,
    when only one strategy is asked for, its `BudgetInfeasible` or `NotPossibleHere`.
    """
    from memopt.advisors.graphs.graph import read_graph
    from memopt.advisors.graphs.plan import find_graph_strategy, unplanned_peak
    from memopt.advisors.graphs.schedule import write_schedule

    kinds = _kinds(allow, deny)
    names = list(dict.fromkeys(find_graph_strategy(name) for name in strategies or ("auto",)))
    graph = read_graph(graph_path)
    if schedule is not None:
        refuse_foreign(schedule, "memopt.schedule", graph=graph.name, force=force)
    peak_bytes = unplanned_peak(graph)
    lowest = is_lowest(budget, names)
    budget_bytes = None if lowest else parse_bytes(budget, of_bytes=peak_bytes)
    rates = _rates(out_gbps, in_gbps)
    rows = [_plan(graph, budget_bytes, name, rates, kinds, time_limit_s) for name in names]
    plans = [row.schedule for row in rows if row.schedule is not None]
    best = min(plans, key=lambda plan: plan.overhead) if plans else None
    budget_bytes = best.budget_bytes if best is not None else budget_bytes or 0
    if best is None and len(rows) == 1:
        assert rows[0].failure is not None
        raise rows[0].failure
    if as_json:
        sys.stdout.write(json.dumps(_figures(graph, peak_bytes, budget_bytes, rows, best), indent=2) + "\n")
    else:
        _show(graph, peak_bytes, budget_bytes, rows, best)
    if best is None:
        return max(row.failure.exit_code for row in rows if row.failure is not None)
    if schedule is not None:
        write_schedule(schedule, best, graph)
        _say_written(schedule)
    return 0


def _rates(out_gbps: float | None, in_gbps: float | None) -> tuple[float, float]:
    """Both rates of the link; one that was left out is as the other, which is said."""
    from memopt.cli.shared.console import say

    known = [rate for rate in (out_gbps, in_gbps) if rate is not None]
    if len(known) == 1 and known[0]:
        missing = "--in-gbps" if in_gbps is None else "--out-gbps"
        say(f"{missing} was left out: the link has {known[0]:g} GB/s both ways")
    rate = known[0] if known else 0.0
    return rate if out_gbps is None else out_gbps, rate if in_gbps is None else in_gbps


def _kinds(allow: Sequence[str], deny: Sequence[str]) -> frozenset[str]:
    """What may be done, from `--allow` and `--deny` (each may hold several, with commas)."""
    allowed = {_kind(word) for text in allow for word in text.split(",") if word.strip()} or set(
        _KINDS.values()
    )
    denied = {_kind(word) for text in deny for word in text.split(",") if word.strip()}
    return frozenset(allowed - denied)


def _kind(word: str) -> str:
    try:
        return _KINDS[word.strip()]
    except KeyError:
        raise UsageError(
            f"'{word.strip()}' cannot be allowed or denied for a plain graph",
            why="a plain graph is planned with recompute and swap only",
            try_="--allow recompute,swap",
        ) from None


def _plan(
    graph: Graph,
    budget_bytes: int | None,
    name: str,
    rates: tuple[float, float],
    kinds: frozenset[str],
    time_limit_s: float | None,
) -> _Row:
    """What the strategy makes of the budget; without one, of the smallest peak that it finds."""
    from memopt.advisors.graphs.plan import plan_graph, plan_lowest

    begin = time.monotonic()
    out_gbps, in_gbps = rates
    plan_it = plan_lowest if budget_bytes is None else partial(plan_graph, budget_bytes=budget_bytes)
    try:
        plan = plan_it(
            graph,
            strategy=name,
            out_gbps=out_gbps,
            in_gbps=in_gbps,
            allow=kinds,
            time_limit_s=time_limit_s,
        )
    except (BudgetInfeasible, NotPossibleHere) as failure:
        return _Row(strategy=name, seconds=time.monotonic() - begin, failure=failure)
    return _Row(strategy=name, seconds=time.monotonic() - begin, schedule=plan)


def _figures(
    graph: Graph, peak_bytes: int, budget_bytes: int, rows: list[_Row], best: Schedule | None
) -> dict[str, Any]:
    return {
        "graph": graph.name,
        "ops": graph.op_count,
        "tensors": graph.tensor_count,
        "unplanned_peak_bytes": peak_bytes,
        "budget_bytes": budget_bytes,
        "best": best.strategy if best else None,
        "strategies": [_row_figures(row) for row in rows],
    }


def _row_figures(row: _Row) -> dict[str, Any]:
    plan = row.schedule
    if plan is None:
        failed: dict[str, Any] = {"not_possible_here": _reason(row)}
        if isinstance(row.failure, BudgetInfeasible):
            failed = {"min_peak_bytes": row.failure.min_peak_bytes, "blockers": list(row.failure.blockers)}
        return {"strategy": row.strategy, "feasible": False, **failed, "seconds": round(row.seconds, 3)}
    return {
        "strategy": row.strategy,
        "feasible": True,
        "overhead": plan.overhead,
        "overhead_bound": plan.overhead_bound,
        "peak_bytes": plan.peak_bytes,
        "floor_bytes": plan.floor_bytes,
        "recompute_ms": plan.recompute_ms,
        "exposed_ms": plan.exposed_ms,
        "reruns": plan.reruns,
        "swaps": plan.swaps,
        "seconds": round(row.seconds, 3),
    }


def _show(graph: Graph, peak_bytes: int, budget_bytes: int, rows: list[_Row], best: Schedule | None) -> None:
    from memopt.cli.shared.console import out
    from memopt.reports.tables import pairs_table, words

    console = out()
    console.print(
        words(
            f"{graph.name or 'graph'}: {graph.op_count} ops, {graph.tensor_count} tensors, "
            f"unplanned peak {format_bytes(peak_bytes)}, budget {format_bytes(budget_bytes)}"
        )
    )
    columns = ("strategy", "overhead", "peak", "recomputed", "exposed", "reruns", "swaps", "planned in")
    console.print(pairs_table("Plans", columns, [_cells(row) for row in rows]))
    for row in rows:
        if isinstance(row.failure, NotPossibleHere):
            console.print(words(f"{row.strategy} is not possible here: {_reason(row)}"))
    if best is not None:
        console.print(words(_bounds(best)))


def _reason(row: _Row) -> str:
    assert row.failure is not None
    return "; ".join(text for text in (row.failure.what, row.failure.why) if text)


def _cells(row: _Row) -> tuple[str, ...]:
    plan = row.schedule
    if plan is None:
        what, peak = "not possible here", "-"
        if isinstance(row.failure, BudgetInfeasible):
            what, peak = "budget not met", f"not below {format_bytes(row.failure.min_peak_bytes)}"
        return (row.strategy, what, peak, "-", "-", "-", "-", f"{row.seconds:.1f} s")
    return (
        row.strategy,
        f"{plan.overhead:.2%}",
        format_bytes(plan.peak_bytes),
        format_ms(plan.recompute_ms),
        format_ms(plan.exposed_ms),
        str(plan.reruns),
        str(plan.swaps),
        f"{row.seconds:.1f} s",
    )


def _bounds(plan: Schedule) -> str:
    text = f"no plan can go below {format_bytes(plan.floor_bytes)}"
    if plan.overhead_bound > 0:
        off = (1 + plan.overhead) / (1 + plan.overhead_bound) - 1
        text += f"; no plan under this budget costs less than {plan.overhead_bound:.2%}: within {off:.2%} of optimal"
    return text


def _say_written(path: Path) -> None:
    from memopt.cli.shared.console import say

    say(f"wrote {path}")
