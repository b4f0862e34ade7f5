"""What `memopt show --json` writes: plain data, stable names (docs/formats.md)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec

from memopt.plan import Plan
from memopt.reports import verdict
from memopt.reports.page.moment import Held, Moment, end_of, module_path, peak_of, phase_of
from memopt.trace import Trace


def summarize_trace(trace: Trace, *, top: int = 10) -> dict[str, Any]:
    """The figures of a profile. `categories_at_peak` sums to `peak_bytes`."""
    peak, end = peak_of(trace), end_of(trace)
    return {
        "kind": "profile",
        "schema": trace.schema,
        "script": trace.script.argv,
        "device": trace.device.kind,
        "device_name": trace.device.name,
        "torch": trace.script.torch,
        "verdict": verdict.of_peak(trace, peak),
        "peak_bytes": trace.peak_bytes,
        "peak_op": peak.op,
        "peak_op_name": trace.op_name(peak.op) if peak.op >= 0 else "",
        "peak_phase": phase_of(trace, peak.op),
        "peak_module": module_path(trace.strings[trace.ops.module[peak.op]]) if peak.op >= 0 else "",
        "categories_at_peak": peak.by_category,
        "modules_at_peak": peak.by_module(top),
        "lines_at_peak": dict(list(peak.by_line.items())[:top]),
        "biggest_at_peak": [_tensor(held) for held in peak.held[:top]],
        "from_before_bytes": peak.from_before_bytes,
        "base_bytes": trace.base_bytes,
        "step_ms": trace.step_ms,
        "iteration": trace.iteration,
        "ops": trace.op_count,
        "ops_by_phase": dict(Counter(phase_of(trace, op) for op in range(trace.op_count))),
        "storages": trace.storage_count,
        "saved_tensors": len(trace.slots.storage),
        "partial": trace.partial,
        "at_the_end": _moment(end) if end else None,
        "notes": trace.notes,
        "facts": trace.facts,
    }


def summarize_plan(plan: Plan, *, top: int = 10) -> dict[str, Any]:
    """The figures of a plan and its biggest actions."""
    ranked = sorted(plan.actions, key=lambda action: (-action.saved_bytes, -action.size_bytes))
    names = (
        "kind",
        "storage",
        "label",
        "size_bytes",
        "saved_bytes",
        "cost_ms",
        "exact",
        "tier",
        "codec",
        "why",
        "line",
    )
    return {
        "kind": "plan",
        "schema": plan.schema,
        "script": plan.script.argv,
        "device": plan.device.kind,
        "strategy": plan.strategy,
        "profile": plan.profile,
        "verdict": verdict.of_plan(plan),
        "budget_bytes": plan.budget_bytes,
        "unplanned_peak_bytes": plan.unplanned_peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "plain_step_ms": plan.plain_step_ms,
        "predicted_step_ms": plan.predicted_step_ms,
        "actions": len(plan.actions),
        "actions_by_kind": dict(Counter(action.kind for action in plan.actions)),
        "biggest_actions": [{name: getattr(action, name) for name in names} for action in ranked[:top]],
        "script_actions": msgspec.to_builtins(plan.script_actions),
        "notes": plan.notes,
    }


def encode(summary: dict[str, Any]) -> str:
    """Indented JSON in ASCII, so that no locale stands in its way; what is not finite becomes null."""
    return json.dumps(msgspec.json.decode(msgspec.json.encode(summary)), indent=2)


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "op": moment.op,
        "bytes": moment.total_bytes,
        "categories": moment.by_category,
        "biggest": [_tensor(held) for held in moment.held[:10]],
    }


def _tensor(held: Held) -> dict[str, Any]:
    return {
        "storage": held.storage,
        "label": held.label,
        "category": held.category,
        "size_bytes": held.size_bytes,
        "born_op": held.born_op,
        "module": held.module,
        "line": held.line,
        "idle_ms": round(held.idle_ms, 3),
    }
