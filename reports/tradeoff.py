"""Peak against time: the curve of the fastest plans, every strategy that was compared, the plan that was chosen, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memopt.reports.figures import AFTER, BEFORE, COLORS, Figure, byte_axis, plain_layout
from memopt.reports.text import shown
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.outcome import Outcome
    from memopt.plan import Plan
    from memopt.reports.inputs import Inputs

_MARKS = {
    "plan for a budget": (COLORS["parameter"], "circle", 9),
    "strategy": (COLORS["optimizer state"], "circle-open", 10),
    "as it is": (BEFORE, "diamond", 11),
    "chosen": (AFTER, "star", 16),
    "measured": (COLORS["temporary"], "x", 10),
}
_PLACES = {"strategy": "bottom center", "chosen": "top right"}
"""Where a name stands beside its mark: apart from those that are often at the same place."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One plan, or one run."""

    kind: str
    """A key of `_MARKS`."""
    name: str
    peak_bytes: int
    added: float
    """Time added to a step, as a share of it."""


def marks_of(inputs: Inputs) -> list[Mark]:
    """All that the files tell of peak and time, of one script."""
    marks: list[Mark] = []
    plans = [run.planned.plan for run in inputs.runs if run.planned is not None]
    plans += [plan for _, plan in inputs.plans]
    for _, curve in inputs.curves:
        marks += _of_curve(curve)
    for _, found in inputs.comparisons:
        marks += _of_comparison(found)
    marks += [_chosen(plan) for plan in plans if plan.plain_step_ms]
    if marks and plans:
        marks += [mark for _, outcome in inputs.outcomes if (mark := _measured(outcome)) is not None]
        marks.append(Mark("as it is", "as it is", plans[0].unplanned_peak_bytes, 0.0))
    return list(dict.fromkeys(marks))


def _of_curve(curve: dict[str, Any]) -> list[Mark]:
    met = [point for point in curve["points"] if point["feasible"] and point.get("overhead") is not None]
    found = [
        Mark("plan for a budget", f"budget {format_bytes(p['budget_bytes'])}", p["predicted_peak_bytes"], p["overhead"])
        for p in met
    ]  # fmt: skip
    return [Mark("as it is", "as it is", curve["unplanned_peak_bytes"], 0.0), *found]


def _of_comparison(found: dict[str, Any]) -> list[Mark]:
    plain = found["plain_step_ms"]
    return [
        Mark("strategy", shown(str(row["strategy"]), 40), row["predicted_peak_bytes"], row["predicted_step_ms"] / plain - 1)
        for row in found["strategies"]
        if row.get("predicted_peak_bytes") is not None and row.get("predicted_step_ms") is not None and plain
    ]  # fmt: skip


def _chosen(plan: Plan) -> Mark:
    return Mark("chosen", f"this plan ({plan.strategy})", plan.predicted_peak_bytes, plan.predicted_step_ms / plan.plain_step_ms - 1)  # fmt: skip


def _measured(outcome: Outcome) -> Mark | None:
    if outcome.measured_peak_bytes is None or outcome.compared_step_ms is None or not outcome.plain_step_ms:
        return None
    return Mark("measured", "measured", outcome.measured_peak_bytes, outcome.compared_step_ms / outcome.plain_step_ms - 1)  # fmt: skip


def drawn(marks: Sequence[Mark], budget_bytes: int = 0) -> Figure:
    """The marks, a line through the plans for budgets, and the budget."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=plain_layout())
    for kind, (color, symbol, size) in _MARKS.items():
        rows = sorted((mark for mark in marks if mark.kind == kind), key=lambda mark: mark.added)
        if not rows:
            continue
        line = {"line": {"color": color, "width": 2, "shape": "hv"}} if kind == "plan for a budget" else {}
        written = kind != "plan for a budget"
        figure.add_scatter(
            x=[100 * mark.added for mark in rows],
            y=[mark.peak_bytes for mark in rows],
            mode=("lines+markers" if line else "markers") + ("+text" if written else ""),
            text=[mark.name for mark in rows] if written else None,
            textposition=_PLACES.get(kind, "middle right"),
            textfont={"size": 11.5},
            name=kind,
            marker={"size": size, "color": color, "symbol": symbol, "line": {"width": 1.6, "color": color}},
            cliponaxis=False,
            customdata=[[mark.name, format_bytes(mark.peak_bytes)] for mark in rows],
            hovertemplate="%{customdata[0]}: %{customdata[1]}, %{x:.1f} % slower<extra></extra>",
            **line,
        )
    if budget_bytes:
        figure.add_hline(
            y=budget_bytes, line={"dash": "dash", "width": 1.5, "color": "#d55e00"}, name="budget",
            annotation_text=f"budget {format_bytes(budget_bytes)}", annotation_position="bottom right",
        )  # fmt: skip
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(byte_axis(max([budget_bytes, *(mark.peak_bytes for mark in marks)])))
    figure.update_xaxes(title_text="time added to a step, %", rangemode="tozero" if min(m.added for m in marks) >= 0 else "normal")  # fmt: skip
    return figure


def of_benchmark(frame: Any) -> Figure | None:
    """Peak against step time of the cases of a benchmark that have both; None where fewer than two have."""
    import plotly.graph_objects as go

    rows = frame.dropna(subset=["peak_bytes", "step_ms"])
    if len(rows) < 2:
        return None
    figure = go.Figure(layout=plain_layout())
    palette = [color for name, color in COLORS.items() if name not in ("workspace", "buffer")]
    for number, (job, cases) in enumerate(rows.groupby("job", sort=False)):
        figure.add_scatter(
            x=cases.step_ms.tolist(), y=cases.peak_bytes.tolist(), mode="markers+text", name=shown(job, 60),
            text=[shown(name, 40) for name in cases.case], textposition="middle right", textfont={"size": 11.5}, cliponaxis=False,
            marker={"size": 10, "color": palette[number % len(palette)]},
            customdata=[[shown(f"{job} {name}", 90), format_bytes(int(peak))] for name, peak in zip(cases.case, cases.peak_bytes, strict=True)],
            hovertemplate="%{customdata[0]}: %{customdata[1]}, %{x:.1f} ms<extra></extra>",
        )  # fmt: skip
    figure.update_layout(hovermode="closest", showlegend=rows.job.nunique() > 1)
    figure.update_yaxes(byte_axis(int(rows.peak_bytes.max())))
    figure.update_xaxes(title_text="ms a step", rangemode="tozero")
    return figure
