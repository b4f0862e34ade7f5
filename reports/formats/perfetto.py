"""A run in the trace-event format that ui.perfetto.dev and chrome://tracing open: ops, bytes by category, tensors, and a plan's lanes.

Times are microseconds of the step. Each op is a slice on the row of its phase, each tensor an asynchronous span from birth to death (the
largest, and all that a plan acts on), the bytes a stacked counter. Source: the Trace Event Format document of the Chromium project.
"""

from __future__ import annotations

from typing import Any

import msgspec

from memopt.estimators.simulator.trace_view import TraceView
from memopt.reports import frames
from memopt.reports.inputs import Run
from memopt.reports.page.moment import module_path
from memopt.reports.text import shown
from memopt.trace import CATEGORIES, PHASES, Trace

MOST_SPANS = 4000
_PID = 1
_FIRST_ROW = 1
"""Row of the first phase: a thread numbered 0 is the idle one in Perfetto, whose name it drops."""
_LANES = {"compute": 11, "swap_out": 12, "swap_in": 13}
_LANE_NAMES = {11: "plan: computed again", 12: "plan: copies out", 13: "plan: copies in"}

Event = dict[str, Any]


def perfetto(run: Run, *, with_source: bool = True) -> bytes:
    """The JSON; without source no line of the script is in it."""
    trace = run.trace
    view = TraceView(trace)
    starts = [*(float(x) * 1000 for x in view.start_ms)]
    if trace.op_count and not any(starts):
        starts = [float(op) for op in range(trace.op_count)]
    ends = [*starts[1:], max(trace.step_ms * 1000, (starts[-1] if starts else 0.0) + 1)]
    events = [*_names(run), *_ops(trace, starts, ends, with_source), *_counters(trace, starts)]
    events += _spans(run, starts, ends[-1], with_source)
    if run.planned is not None:
        events += _planned(run)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _names(run: Run) -> list[Event]:
    rows = dict(enumerate(PHASES, start=_FIRST_ROW))
    if run.planned is not None:
        rows |= _LANE_NAMES
    named = [_meta("process_name", 0, f"memopt: {shown(run.name)}")]
    return named + [_meta("thread_name", tid, name) for tid, name in rows.items()]


def _meta(what: str, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": _PID, "tid": tid, "name": what, "args": {"name": name}}


def _ops(trace: Trace, starts: list[float], ends: list[float], with_source: bool) -> list[Event]:
    ops, strings = trace.ops, trace.strings
    return [
        {
            "ph": "X", "pid": _PID, "tid": _FIRST_ROW + ops.phase[op], "name": shown(trace.op_name(op)), "cat": PHASES[ops.phase[op]],
            "ts": round(starts[op], 3), "dur": round(min(ops.time_us[op] or 1.0, max(0.001, ends[op] - starts[op])), 3),
            "args": {
                "op": op, "module": shown(module_path(strings[ops.module[op]])), "live_bytes": ops.live_bytes[op],
                "extra_bytes": ops.extra_bytes[op], "workspace_bytes": ops.workspace_bytes[op],
            } | ({"line": shown(strings[ops.line[op]])} if with_source else {}),
        }
        for op in range(trace.op_count)
    ]  # fmt: skip


def _counters(trace: Trace, starts: list[float]) -> list[Event]:
    series = {name: row.tolist() for name, row in frames.bytes_by_category(trace).items() if row.any()}
    return [
        {"ph": "C", "pid": _PID, "name": "device bytes", "ts": round(start, 3), "args": {name: row[op] for name, row in series.items()}}
        for op, start in enumerate(starts)
    ]  # fmt: skip


def _spans(run: Run, starts: list[float], end: float, with_source: bool) -> list[Event]:
    trace, storages = run.trace, run.trace.storages
    acted = {each.storage: each for each in run.planned.plan.actions} if run.planned is not None else {}
    ranked = sorted(range(trace.storage_count), key=lambda s: (s not in acted, -storages.size_bytes[s], s))
    events: list[Event] = []
    for storage in sorted(ranked[:MOST_SPANS]):
        birth, death = storages.birth_op[storage], storages.death_op[storage]
        facts = {
            "bytes": storages.size_bytes[storage],
            "category": CATEGORIES[storages.category[storage]],
            "plan": acted[storage].kind if storage in acted else "keep",
        }
        if with_source:
            facts["line"] = shown(trace.strings[storages.line[storage]])
        span = {
            "pid": _PID,
            "tid": _FIRST_ROW,
            "cat": "tensor",
            "id": storage,
            "name": shown(trace.storage_label(storage)),
        }
        begin = starts[birth] if 0 <= birth < len(starts) else 0.0 if birth < 0 else end
        until = starts[death + 1] if death + 1 < len(starts) else end
        events.append({"ph": "b", "ts": round(begin, 3), "args": facts, **span})
        events.append({"ph": "e", "ts": round(max(begin, until), 3), **span})
    return events


def _planned(run: Run) -> list[Event]:
    assert run.planned is not None
    timeline = run.planned.timeline
    events: list[Event] = [
        {
            "ph": "X", "pid": _PID, "tid": _LANES[each.lane], "name": shown(each.label), "cat": "plan", "ts": round(each.start_ms * 1000, 3),
            "dur": round(max(0.001, (each.end_ms - each.start_ms) * 1000), 3), "args": {"bytes": each.size_bytes},
        }
        for each in timeline.lanes
    ]  # fmt: skip
    return events + [
        {"ph": "C", "pid": _PID, "name": "device bytes with the plan", "ts": round(float(start) * 1000, 3), "args": {"bytes": int(high)}}
        for start, high in zip(timeline.start_ms, timeline.high_bytes, strict=True)
    ]  # fmt: skip
