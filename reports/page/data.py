"""A run as columns for the page's script: what it needs to draw any moment, any window and any order by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memopt.estimators.simulator.trace_view import TraceView
from memopt.reports import frames
from memopt.reports.figures import COLORS, phases
from memopt.reports.page.moment import end_of, module_path, peak_op
from memopt.reports.terminal import what_it_does
from memopt.reports.text import shown
from memopt.reports.verdict import short_op
from memopt.trace import Trace

if TYPE_CHECKING:
    from memopt.reports.inputs import Run

MOST_TENSORS = 30_000
"""Listed one by one, the largest; all others are summed up."""


class _Strings:
    """Every text once, safe to show."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        text = shown(text)
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def run_data(run: Run, *, with_lines: bool = True) -> dict[str, Any]:
    """The columns of `run`; long runs of numbers as differences."""
    trace, strings = run.trace, _Strings()
    n = trace.op_count
    moment = end_of(trace)
    at = moment.op if moment is not None else peak_op(trace)
    high = frames.high_bytes(trace)
    planned = run.planned
    after = None
    if planned is not None and run.drawn_with_plan and len(planned.timeline.high_bytes) == n:
        after = _ints(planned.timeline.high_bytes)
    return {
        "name": shown(run.name),
        "n": n,
        "at": at,
        "peak_op": peak_op(trace),
        "peak_bytes": trace.peak_bytes,
        "budget_bytes": planned.plan.budget_bytes if planned else 0,
        "partial": bool(trace.partial),
        "phases": phases(trace),
        "ops": _ops(trace, strings, with_lines),
        "high": _deltas(high),
        "series": {name: _deltas(row) for name, row in frames.bytes_by_category(trace).items() if row.any()},
        "after": after,
        "tensors": _tensors(run, strings, with_lines),
        "strings": strings.texts,
        "colors": COLORS,
    }


def _ops(trace: Trace, strings: _Strings, with_lines: bool) -> dict[str, Any]:
    ops, text = trace.ops, trace.strings
    names = {i: strings.place(short_op(text[i])) for i in set(ops.name)}
    modules = {i: strings.place(module_path(text[i])) for i in set(ops.module)}
    lines = {i: strings.place(text[i] if with_lines else "") for i in set(ops.line)}
    return {
        "name": [names[i] for i in ops.name],
        "module": [modules[i] for i in ops.module],
        "line": [lines[i] for i in ops.line],
        "start_us": _deltas((TraceView(trace).start_ms * 1000).round().astype(np.int64)),
    }


def _tensors(run: Run, strings: _Strings, with_lines: bool) -> dict[str, Any]:
    frame = frames.tensors(run.trace, run.planned)
    frame = frame.nlargest(MOST_TENSORS, "size_bytes", keep="first")
    categories = list(frames.STACKED)
    columns: dict[str, Any] = {
        "storage": frame.index.tolist(),
        "bytes": frame.size_bytes.tolist(),
        "category": [categories.index(name) for name in frame.category],
        "label": [strings.place(label) for label in frame.tensor],
        "module": [strings.place(module) for module in frame.module],
        "line": [strings.place(line if with_lines else "") for line in frame.line],
        "birth": frame.birth_op.tolist(),
        "death": frame.death_op.tolist(),
        "idle": [_rounded(value) for value in frame.idle_ms],
        "again": [_rounded(value) for value in frame.recompute_ms],
        "swap": [_rounded(value) for value in frame.swap_ms],
        "categories": categories,
        "listed": len(frame),
        "all": run.trace.storage_count,
    }
    columns["away"] = _away(run, {storage: row for row, storage in enumerate(columns["storage"])})
    return columns


def _away(run: Run, rows: dict[int, int]) -> list[list[Any]]:
    """[row, kind, what is done, bytes saved at the peak, gone before op, back before op, bytes left, why] of each planned tensor."""
    planned = run.planned
    if planned is None:
        return []
    spans = {each.storage: each for each in planned.away}
    found: list[list[Any]] = []
    for action in planned.plan.actions:
        span, row = spans.get(action.storage), rows.get(action.storage)
        if row is None or action.kind == "keep":
            continue
        where = [span.start, span.stop, span.left_bytes] if span else [-1, -1, 0]
        why = shown(action.why)
        found.append([row, action.kind, shown(what_it_does(action)), action.saved_bytes, *where, why])
    return found


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else float(f"{value:.3g}")


def _ints(column: NDArray[np.int64]) -> list[int]:
    return _deltas(column)


def _deltas(column: NDArray[np.int64]) -> list[int]:
    """The first number, then differences: what stands still is zeros, which take a sixth of the room."""
    whole = column.astype(np.int64)
    return np.diff(whole, prepend=0).tolist() if len(whole) else []
