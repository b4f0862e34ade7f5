"""The answer before any picture: one line, one or two sentences, and the figures that one looks for first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.reports import verdict
from memopt.reports.inputs import Inputs, Run
from memopt.reports.page.moment import Moment, end_of, is_one_moment, module_path, peak_of, phase_of
from memopt.reports.page.source import Source
from memopt.trace import Trace
from memopt.units import format_bytes, format_change, format_ms

Figure = tuple[str, str, str]
"""(what, how much, and something small beside it)."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the script, and the bytes that it made."""

    place: str
    """`train.py:41`."""
    size_bytes: int
    share: float
    code: str = ""
    """What stands there, where the file is still the one that ran."""


@dataclass(frozen=True, slots=True)
class Headline:
    """`tone` is `good`, `bad` or empty."""

    title: str
    leads: Sequence[str]
    figures: Sequence[Figure] = ()
    tone: str = ""
    eyebrow: str = ""
    notes: Sequence[str] = field(default_factory=list)
    lines: Sequence[Line] = ()
    lines_title: str = ""


def of_inputs(inputs: Inputs, *, with_source: bool = True) -> Headline:
    """The headline of a report; of what tells most where the files are of several kinds. Without source: no command and no line."""
    found = _of_inputs(inputs)
    if with_source:
        return _with_lines(found, inputs)
    leads = [lead for lead in found.leads if not _LINE.search(lead)]
    return replace(
        found, eyebrow="", leads=leads, notes=[note for note in found.notes if not _LINE.search(note)]
    )


def _with_lines(found: Headline, inputs: Inputs) -> Headline:
    """`found` with the lines that made most of the first profile's moment."""
    if len(inputs.runs) != 1:
        return found
    trace = inputs.runs[0].trace
    end = end_of(trace)
    moment = end or peak_of(trace)
    source = Source(trace.script)
    lines = [
        Line(place, size, size / max(1, moment.total_bytes), source.line(place))
        for place, size in list(moment.by_line.items())[:_MOST_LINES]
        if size * 50 >= moment.total_bytes
    ]
    return replace(found, lines=lines, lines_title=f"Lines that made most of what is there {'when it ended' if end else 'at the peak'}")  # fmt: skip


_MOST_LINES = 5
_LINE = re.compile(r"\.py\b|:\d+\b")


def _of_inputs(inputs: Inputs) -> Headline:
    if len(inputs.runs) > 1:
        return _of_two(inputs.runs[0], inputs.runs[-1])
    outcome = inputs.outcomes[0][1] if inputs.outcomes else None
    if inputs.runs:
        run = inputs.runs[0]
        if run.planned is not None:
            return _of_plan(run.planned.plan, run.trace, outcome)
        return _of_run(run.trace)
    if inputs.plans:
        return _of_plan(inputs.plans[0][1], None, outcome)
    if outcome is not None:
        return _of_outcome(outcome)
    if inputs.estimates:
        return _of_estimate(*inputs.estimates[0])
    if inputs.curves:
        return _of_curve(*inputs.curves[0])
    if inputs.comparisons:
        return _of_comparison(*inputs.comparisons[0])
    return _of_benchmark(inputs.benchmarks)


def command_of(trace: Trace | Plan, *, whole: bool = False) -> str:
    """`train.py --lr 0.1`; `whole`: with the script's path as it was typed."""
    argv = trace.script.argv
    if trace.script.as_module or whole or not argv:
        return shlex.join([*(["-m"] if trace.script.as_module else []), *argv])
    return shlex.join([Path(argv[0]).name, *argv[1:]])


def _of_run(trace: Trace) -> Headline:
    peak, end = peak_of(trace), end_of(trace)
    moment = end or peak
    if trace.partial:
        reason = trace.partial.rstrip(".")
        title = f"{_ending(trace.partial)} {format_bytes(moment.total_bytes)} on the device"
        leads = [
            f"{reason[:1].upper()}{reason[1:]}.",
            f"What is there then: {verdict.shares(moment)}.",
            _biggest(moment),
        ]
        tone = "" if _SNAPSHOT in trace.partial else "bad"
    else:
        top, size = next(iter(peak.by_category.items()), ("nothing", 0))
        part = f", {100 * size / max(1, peak.total_bytes):.0f} % of it {verdict.plural(top)}" if size else ""
        title, tone = f"One step peaks at {format_bytes(peak.total_bytes)}{part}", ""
        leads = [_where(trace, peak), _biggest(peak), _waiting(peak)]
    return Headline(
        title, [lead for lead in leads if lead], _run_figures(trace), tone, command_of(trace), trace.notes
    )


_SNAPSHOT = "made from a memory snapshot"


def _ending(partial: str) -> str:
    if _SNAPSHOT in partial:
        return "The snapshot peaks with"
    return "Out of memory, with" if "out of memory" in partial else "It ended early, with"


def _where(trace: Trace, peak: Moment) -> str:
    if not 0 <= peak.op < trace.op_count:
        return ""
    module = module_path(trace.strings[trace.ops.module[peak.op]])
    line = trace.strings[trace.ops.line[peak.op]]
    inside = f" of {module}" if module else ""
    return (
        f"The peak is in the {phase_of(trace, peak.op)}{inside}, while {verdict.short_op(trace.op_name(peak.op))} "
        f"runs{f' ({line})' if line else ''}: op {peak.op} of {trace.op_count}."
    )


def _biggest(moment: Moment) -> str:
    line, size = next(iter(moment.by_line.items()), ("", 0))
    if not line or size * 20 < moment.total_bytes:
        return ""
    return f"{100 * size / max(1, moment.total_bytes):.0f} % of it was made by one line, {line}."


def _waiting(moment: Moment) -> str:
    """What a plan has to work on."""
    size = sum(each.size_bytes for each in moment.held if each.idle_ms)
    if size * 20 < moment.total_bytes:
        return ""
    return f"{format_bytes(size)} of it only wait for the backward; memopt advise --budget 80% makes a plan for them."


def _run_figures(trace: Trace) -> list[Figure]:
    device = trace.device
    room = f"of {format_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    where = ("Device", device.kind, device.name if device.name != device.kind else "")
    if is_one_moment(trace):
        return [("On the device", format_bytes(trace.peak_bytes), room), ("Found", f"{trace.storage_count:,} tensors", ""), where]  # fmt: skip
    return [
        ("Peak", format_bytes(trace.peak_bytes), room),
        ("At the start", format_bytes(trace.base_bytes), "parameters, state"),
        ("Step", format_ms(trace.step_ms) if trace.step_ms else "–", f"iteration {trace.iteration}"),
        ("Recorded", f"{trace.op_count:,} ops", f"{trace.storage_count:,} tensors"),
        where,
    ]


def _of_plan(plan: Plan, trace: Trace | None, outcome: Outcome | None) -> Headline:
    peak, before = plan.predicted_peak_bytes, plan.unplanned_peak_bytes
    shown, fits = _title_of_plan(plan, outcome)
    kinds: dict[str, int] = {}
    for action in plan.actions:
        kinds[action.kind] = kinds.get(action.kind, 0) + 1
    doing = {
        "swap": "leave for the host or the disk",
        "recompute": "are computed again",
        "compress": "are held compressed",
        "drop": "are dropped",
        "keep": "stay",
    }
    what = ", ".join(
        f"{count} {doing[kind]}" for kind, count in sorted(kinds.items(), key=lambda each: -each[1])
    )
    does = [f"of the tensors that autograd saves, {what}"] if what else []
    does += [f"{each.what} is set" if each.kind == "allocator" else each.what for each in plan.script_actions]
    said = "; ".join(does) or "no tensor has to move"
    leads = [f"The budget is {format_bytes(plan.budget_bytes)}. {said[:1].upper()}{said[1:]}."]
    leads.append("Losses, gradients, parameters and buffers stay bit for bit what they are.")
    if trace is not None:
        leads.append(f"Without the plan the peak is {verdict.shares(peak_of(trace))}.")
    if outcome is not None:
        words = verdict.of_outcome(outcome)
        leads.append(f"Measured: {words[:1].lower()}{words[1:]}")
    figures: list[Figure] = [
        ("Without the plan", format_bytes(before), format_ms(plan.plain_step_ms)),
        (
            "Predicted",
            format_bytes(peak),
            f"{format_change(peak, before)}, {format_ms(plan.predicted_step_ms)}",
        ),
    ]
    if outcome is not None and outcome.measured_peak_bytes is not None:
        off = format_change(outcome.measured_peak_bytes, outcome.predicted_peak_bytes, none="as predicted")
        took = f", {format_ms(outcome.measured_step_ms)}" if outcome.measured_step_ms is not None else ""
        figures.append(("Measured", format_bytes(outcome.measured_peak_bytes), f"{off}{took}"))
    figures += [
        ("Budget", format_bytes(plan.budget_bytes), ""),
        ("Actions", str(len(plan.actions) + len(plan.script_actions)), f"by {plan.strategy}"),
        ("Device", plan.device.kind, plan.device.name if plan.device.name != plan.device.kind else ""),
    ]
    notes = [*(trace.notes if trace else []), *plan.notes]
    return Headline(shown, leads, figures, "good" if fits else "bad", command_of(plan), notes)


def _title_of_plan(plan: Plan, outcome: Outcome | None) -> tuple[str, bool]:
    """The verdict, and whether it fits: as it was measured, else as it is predicted."""
    peak, step_ms = plan.predicted_peak_bytes, plan.predicted_step_ms
    if outcome is not None and outcome.measured_peak_bytes is not None:
        peak = outcome.measured_peak_bytes
        step_ms = outcome.measured_step_ms if outcome.measured_step_ms is not None else step_ms
    fits = peak <= plan.budget_bytes
    step = format_change(step_ms, plan.plain_step_ms, none="no")
    slower = f"in {step[1:]} less time" if step.startswith("-") else f"for {step.lstrip('+')} more time"
    instead = f"{format_bytes(peak)} instead of {format_bytes(plan.unplanned_peak_bytes)}"
    return f"{'It fits' if fits else 'It does not fit'}: {instead}, {slower}", fits


def _of_outcome(outcome: Outcome) -> Headline:
    measured = outcome.measured_peak_bytes
    good = measured is not None and measured <= outcome.budget_bytes
    if measured is None:
        title = "Nothing was measured"
    else:
        title = f"{format_bytes(measured)} measured, {'within' if good else 'above'} the budget of {format_bytes(outcome.budget_bytes)}"
    figures: list[Figure] = [
        ("Without the plan", format_bytes(outcome.unplanned_peak_bytes), format_ms(outcome.plain_step_ms)),
        ("Predicted", format_bytes(outcome.predicted_peak_bytes), format_ms(outcome.predicted_step_ms)),
    ]
    if measured is not None:
        time = format_ms(outcome.measured_step_ms) if outcome.measured_step_ms is not None else ""
        figures.append(("Measured", format_bytes(measured), time))
    figures.append(("Actions", f"{outcome.actions.done} of {outcome.actions.planned}", "done"))
    return Headline(
        title, [verdict.of_outcome(outcome)], figures, "good" if good else "bad", "", outcome.notes
    )


def _of_estimate(name: str, found: dict[str, object]) -> Headline:
    sizes = {
        key: value
        for key in ("allocated_bytes", "reserved_bytes", "process_bytes")
        if isinstance(value := found.get(key), int)
    }
    need = sizes.get("process_bytes") or sizes.get("allocated_bytes", 0)
    named = found.get("fits_named")
    title, tone = f"It would need {format_bytes(need)}", ""
    if isinstance(named, dict) and named.get("verdict") in ("yes", "tight", "no"):
        words = {"yes": "it fits", "tight": "it fits only just", "no": "it does not fit"}
        title += f": {words[str(named['verdict'])]} on {named.get('name')}"
        tone = "bad" if named["verdict"] == "no" else "good"
    errors = found.get("error")
    bars = errors if isinstance(errors, dict) else {}
    bar = "- {:.1f} %, or more" if found.get("lacks") else "± {:.1f} %"
    figures = [
        (label, format_bytes(sizes[key]), bar.format(100 * float(bars[short])) if short in bars else "")
        for key, short, label in (("process_bytes", "process", "Process, as nvidia-smi shows"), ("reserved_bytes", "reserved", "Reserved"), ("allocated_bytes", "allocated", "Allocated"))
        if key in sizes and (key != "reserved_bytes" or found.get("target") != "cpu")
    ]  # fmt: skip
    left = found.get("left_out")
    leads = ["Nothing was run: this is an estimate."]
    if isinstance(left, list) and left:
        leads.append(f"Left out: {'; '.join(map(str, left))}.")
    notes = found.get("notes")
    device = str(found.get("device", ""))
    return Headline(
        title,
        leads,
        [*figures, ("Device", device, "")],
        tone,
        name,
        [str(each) for each in notes] if isinstance(notes, list) else [],
    )


def _of_curve(name: str, found: dict[str, object]) -> Headline:
    points = found["points"]
    assert isinstance(points, list)
    met = [point for point in points if point["feasible"]]
    before = found["unplanned_peak_bytes"]
    assert isinstance(before, int)
    if not met:
        return Headline(f"No plan gets below {format_bytes(before)}", [], (), "bad", name)
    least = min(met, key=lambda point: int(point["predicted_peak_bytes"]))
    title = f"Between {format_bytes(int(least['predicted_peak_bytes']))} and {format_bytes(before)}: choose by time"
    return Headline(title, ["Each mark is the fastest plan found for one budget."], (), "", name)


def _of_comparison(name: str, found: dict[str, Any]) -> Headline:
    met = [
        row for row in found["strategies"] if row.get("feasible") and row.get("predicted_step_ms") is not None
    ]
    budget = format_bytes(found["budget_bytes"])
    if not met:
        return Headline(f"None of these strategies gets below {budget}", [], (), "bad", name)
    best = min(met, key=lambda row: float(row["predicted_step_ms"]))
    title = f"{str(best['strategy'])[:60]} is the fastest of {len(found['strategies'])} strategies within {budget}"
    step = format_change(best["predicted_step_ms"], found["plain_step_ms"])
    leads = [
        f"It peaks at {format_bytes(best['predicted_peak_bytes'])}, and a step takes {format_ms(best['predicted_step_ms'])} ({step})."
    ]
    return Headline(title, leads, (), "good", name)


def _of_benchmark(found: Sequence[tuple[str, list[dict[str, Any]]]]) -> Headline:
    from memopt.reports.benchmarks import table

    cases = [table(jobs) for _, jobs in found]
    count, jobs = sum(map(len, cases)), sum(len(jobs) for _, jobs in found)
    failed = sum(str(job.get("failed") or "") != "" for _, each in found for job in each)
    leads = [f"{failed} of the jobs did not end well." if failed else "All jobs ended well."]
    return Headline(f"{count:,} cases of {jobs:,} jobs were measured", leads, (), "", ", ".join(name for name, _ in found))  # fmt: skip


def _of_two(a: Run, b: Run) -> Headline:
    before, after = a.trace.peak_bytes, b.trace.peak_bytes
    change = format_change(after, before)
    if change == "no change":
        title, tone = f"Both peak at {format_bytes(after)}", ""
    else:
        more = after > before
        title = f"{b.name} peaks at {format_bytes(after)}, {change.lstrip('+-')} {'more' if more else 'less'} than {a.name}"
        tone = "bad" if more else "good"
    figures: list[Figure] = [
        ("Peak before", format_bytes(before), a.name),
        ("Peak after", format_bytes(after), change),
        ("Step before", format_ms(a.trace.step_ms), ""),
        ("Step after", format_ms(b.trace.step_ms), format_change(b.trace.step_ms, a.trace.step_ms)),
    ]
    leads = [f"{run.name}: {_where(run.trace, peak_of(run.trace))}" for run in (a, b)]
    return Headline(title, leads, figures, tone, f"{a.name} → {b.name}", [])
