"""Trace, plan, outcome, estimate -> pandas tables: what `--format csv`, `to_pandas()` and the page are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memopt.errors import NotPossibleHere
from memopt.reports.page.moment import WORKSPACE, peak_op
from memopt.reports.page.moment import held as held_storage
from memopt.reports.terminal import what_it_does
from memopt.trace import CATEGORIES, PHASES, Trace

if TYPE_CHECKING:
    import pandas

    from memopt.advisors.profiles.plan_reader import ReadPlan
    from memopt.advisors.profiles.problem import Problem
    from memopt.outcome import Outcome
    from memopt.plan import Plan

Frame = Any
"""A `pandas.DataFrame`; pandas has no types that mypy is given here."""

STACKED = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "input",
    "activation",
    "temporary",
    WORKSPACE,
)
"""The categories from the bottom of a stacked picture to its top: what stays below, what comes and goes above."""
_MOST_COSTS = 3000
"""So many tensors, the largest that autograd holds, get a price for recomputing and swapping."""


def bytes_by_category(trace: Trace) -> dict[str, NDArray[np.int64]]:
    """Category -> bytes on the device while each op runs, in the order of `STACKED`; they add up to live + extra bytes."""
    n, storages = trace.op_count, trace.storages
    size = np.array(storages.size_bytes, dtype=np.int64)
    birth = np.clip(np.array(storages.birth_op, dtype=np.int64), 0, None)
    death = np.array(storages.death_op, dtype=np.int64)
    category = np.array(storages.category, dtype=np.int64)
    alive = (birth < n) & (death >= birth)
    found = {}
    for name in STACKED:
        rows = alive & (category == CATEGORIES.index(name))
        change = np.zeros(n + 2, dtype=np.int64)
        np.add.at(change, birth[rows], size[rows])
        np.add.at(change, np.minimum(death[rows] + 1, n + 1), -size[rows])
        found[name] = np.cumsum(change)[:n]
    named = sum(found.values(), np.zeros(n, dtype=np.int64))
    found[WORKSPACE] = found[WORKSPACE] + np.maximum(high_bytes(trace) - named, 0)
    return found


def high_bytes(trace: Trace) -> NDArray[np.int64]:
    """Most on the device while each op runs."""
    ops = trace.ops
    return np.array(ops.live_bytes, dtype=np.int64) + np.array(ops.extra_bytes, dtype=np.int64)


def tensors(trace: Trace, planned: ReadPlan | None = None) -> Frame:
    """One row a storage. Bytes, ms; `at_peak`: alive while the op of the peak runs; `recompute_ms` and `swap_ms`: what making it again, or
    copying it out and back, would take (NaN where that cannot be); `action`: what the plan does with it."""
    import pandas

    at = peak_op(trace)
    rows = [held_storage(trace, number) for number in range(trace.storage_count)]
    frame = pandas.DataFrame(
        {
            "tensor": [row.label for row in rows],
            "category": [row.category for row in rows],
            "size_bytes": [row.size_bytes for row in rows],
            "module": [row.module for row in rows],
            "line": [row.line for row in rows],
            "birth_op": trace.storages.birth_op,
            "death_op": trace.storages.death_op,
        }
    )
    frame["at_peak"] = (frame.birth_op <= at) & (at <= frame.death_op)
    frame.index.name = "storage"
    _add_costs(frame, trace)
    frame["action"] = ""
    frame["saved_bytes"] = 0
    if planned is not None:
        for action in planned.plan.actions:
            frame.loc[action.storage, ["action", "saved_bytes"]] = [what_it_does(action), action.saved_bytes]
    return frame


def _add_costs(frame: Frame, trace: Trace) -> None:
    """The columns `idle_ms`, `recompute_ms` and `swap_ms`."""
    from memopt.advisors.advise import Adviser
    from memopt.advisors.kinds import DEFAULT_ALLOW

    columns = {name: np.full(len(frame), np.nan) for name in ("idle_ms", "recompute_ms", "swap_ms")}
    try:
        problem = Adviser(trace, DEFAULT_ALLOW).problem(1) if trace.op_count else None
    except NotPossibleHere:  # a recording that is not whole
        problem = None
    if problem is not None:
        saved = sorted(problem.view.saved.values(), key=lambda each: -each.size_bytes)
        for each in saved[:_MOST_COSTS]:
            for name, value in _costs(problem, each.storage).items():
                columns[name][each.storage] = value
    for name, column in columns.items():
        frame[name] = column


def _costs(problem: Problem, storage: int) -> dict[str, float]:
    saved, times = problem.view.saved[storage], problem.view.start_ms
    begin, end = saved.gone_after + 1, min(saved.first_use, saved.release, problem.view.n - 1)
    found = {"idle_ms": float(times[end] - times[begin])} if begin < end else {}
    candidate = problem.candidate(storage)
    if candidate is None:
        return found
    again, swap = candidate.option("recompute"), candidate.option("swap")
    if again is not None and candidate.chain is not None:
        found["recompute_ms"] = problem.solo_ms(candidate, again)
    if swap is not None:
        copy = problem.simulator.copy_ms
        found["swap_ms"] = copy(saved.size_bytes, swap, out=True) + copy(saved.size_bytes, swap, out=False)
    return found


def ops(trace: Trace) -> Frame:
    """One row an op of the iteration."""
    import pandas

    columns, strings = trace.ops, trace.strings
    frame = pandas.DataFrame(
        {
            "name": [strings[i] for i in columns.name],
            "module": [strings[i] for i in columns.module],
            "phase": [PHASES[i] for i in columns.phase],
            "line": [strings[i] for i in columns.line],
            "time_us": columns.time_us,
            "live_bytes": columns.live_bytes,
            "extra_bytes": columns.extra_bytes,
            "workspace_bytes": columns.workspace_bytes,
        }
    )
    frame.index.name = "op"
    return frame


def actions(plan: Plan) -> Frame:
    """One row an action of the plan, those that save most first."""
    import pandas

    ranked = sorted(plan.actions, key=lambda each: (-each.saved_bytes, -each.size_bytes))
    names = ("storage", "label", "kind", "size_bytes", "saved_bytes", "cost_ms", "exact", "line", "why")
    frame = pandas.DataFrame({name: [getattr(each, name) for each in ranked] for name in names})
    frame.insert(2, "does", [what_it_does(each) for each in ranked])
    return frame


def outcome(found: Outcome) -> Frame:
    """Peak and step: without the plan, predicted, measured."""
    import pandas

    return pandas.DataFrame(
        {
            "plain": [found.unplanned_peak_bytes, found.plain_step_ms],
            "predicted": [found.predicted_peak_bytes, found.predicted_step_ms],
            "measured": [found.measured_peak_bytes, found.measured_step_ms],
        },
        index=pandas.Index(["peak_bytes", "step_ms"], name="figure"),
        dtype="float64",
    )


def points(curve: dict[str, Any]) -> Frame:
    """One row a budget of a curve of peak against time."""
    import pandas

    return pandas.DataFrame(curve["points"])


def categories(estimate: dict[str, Any]) -> Frame:
    """Bytes at an estimate's peak, by category."""
    import pandas

    return pandas.DataFrame({"size_bytes": estimate["by_category"]}).rename_axis("category")


def sums(frame: pandas.DataFrame, by: str) -> Frame:
    """Bytes of the tensors of `frame`, summed by the column `by`, largest first."""
    return frame.groupby(by)["size_bytes"].sum().sort_values(ascending=False)
