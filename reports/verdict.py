"""The verdict in words, before any table: how much, where, of what."""

from __future__ import annotations

from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.reports.page.moment import Moment, is_one_moment, module_path, phase_of
from memopt.trace import Trace
from memopt.units import format_bytes, format_change, format_ms

_FIRST_MEASURED_STEP = 3

_PLURAL = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer state": "optimizer state",
    "buffer": "buffers",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "workspace",
}


def of_peak(trace: Trace, peak: Moment) -> str:
    """`Peak 21.4 GiB at op 512/1380 (backward of layers.23.mlp, addmm); 68 % activations, 20 % parameters`."""
    if is_one_moment(trace):
        line = trace.strings[trace.ops.line[0]]
        return f"{format_bytes(peak.total_bytes)} on the device when it ended{f' ({line})' if line else ''}; {shares(peak)}."
    return f"Peak {format_bytes(peak.total_bytes)}{place(trace, peak.op)}; {shares(peak)}."


def of_end(trace: Trace, end: Moment) -> str:
    """What was on the device when a partial recording was cut off."""
    return f"When it ended there were {format_bytes(end.total_bytes)}{place(trace, end.op)}; {shares(end)}."


def place(trace: Trace, op: int) -> str:
    """` at op 512/1380 (backward of layers.23.mlp, addmm)`; empty for a trace without ops."""
    if not 0 <= op < trace.op_count:
        return ""
    module = module_path(trace.strings[trace.ops.module[op]])
    line = trace.strings[trace.ops.line[op]]
    where = f"{phase_of(trace, op)} of {module}" if module else phase_of(trace, op)
    name = short_op(trace.op_name(op))
    return f" at op {op}/{trace.op_count} ({where}, {name}{f', {line}' if line else ''})"


def short_op(name: str) -> str:
    """`addmm` of `aten.addmm.default`."""
    return name.removeprefix("aten.").rpartition(".")[0] or name


def shares(moment: Moment, most: int = 3) -> str:
    """`68 % activations, 20 % parameters, 12 % gradients`."""
    total = max(1, moment.total_bytes)
    parts = [
        f"{100 * size / total:.0f} % {plural(name)}"
        for name, size in moment.by_category.items()
        if size * 200 >= total
    ]
    return ", ".join(parts[:most]) or "nothing named"


def plural(category: str) -> str:
    """`activations`."""
    return _PLURAL.get(category, category)


def of_run(trace: Trace) -> str:
    """`train.py on cpu (Xeon), iteration 3, step 82.1 ms, torch 2.13.0`."""
    device = trace.device
    name = f"{device.kind} ({device.name})" if device.name and device.name != device.kind else device.kind
    step = f", step {format_ms(trace.step_ms)}" if trace.step_ms else ""
    return f"{' '.join(trace.script.argv)} on {name}, iteration {trace.iteration}{step}, torch {trace.script.torch}"


def of_plan(plan: Plan) -> str:
    """`Peak 9.31 GiB instead of 14.2 GiB (-34 %), budget 10.0 GiB; step 210 ms instead of 180 ms (+17 %)`."""
    return (
        f"Peak {format_bytes(plan.predicted_peak_bytes)} instead of {format_bytes(plan.unplanned_peak_bytes)} "
        f"({format_change(plan.predicted_peak_bytes, plan.unplanned_peak_bytes)}), "
        f"{'above' if plan.over_bytes else 'within'} the budget of {format_bytes(plan.budget_bytes)}; "
        f"step {format_ms(plan.predicted_step_ms)} instead of {format_ms(plan.plain_step_ms)} "
        f"({format_change(plan.predicted_step_ms, plan.plain_step_ms)})."
    )


def of_outcome(outcome: Outcome) -> str:
    """Did the run stay within the budget, and what did it cost?"""
    if outcome.measured_peak_bytes is None:
        if outcome.steps >= _FIRST_MEASURED_STEP:
            return "The peak was not measured."
        return "Nothing was measured: the script ended before a whole step was enforced."
    over = outcome.measured_peak_bytes - outcome.budget_bytes
    verdict = (
        f"Peak {format_bytes(outcome.measured_peak_bytes)}, within the budget of {format_bytes(outcome.budget_bytes)}{' in the measured iterations' if outcome.outside_peak_bytes else ''}"
        if over <= 0
        else f"Peak {format_bytes(outcome.measured_peak_bytes)}, {format_bytes(over)} ABOVE the budget of {format_bytes(outcome.budget_bytes)}"
    )
    outside = outcome.outside_peak_bytes
    elsewhere = (
        f" Elsewhere (loading, evaluation) about {format_bytes(outside)} were held." if outside else ""
    )
    return f"{verdict}; without the plan {format_bytes(outcome.unplanned_peak_bytes)}.{elsewhere}"
