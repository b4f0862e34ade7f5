"""Figures, made with plotly: for the page, for notebooks, for `--format png`. Colours tell categories apart for colour-blind readers too."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memopt.estimators.simulator.trace_view import TraceView
from memopt.reports.frames import STACKED, bytes_by_category, high_bytes
from memopt.trace import PHASES, Trace
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.advisors.profiles.plan_reader import ReadPlan
    from memopt.outcome import Outcome

COLORS = {
    "parameter": "#0072b2",
    "buffer": "#7d8fa3",
    "optimizer state": "#cc79a7",
    "gradient": "#56b4e9",
    "input": "#009e73",
    "activation": "#e69f00",
    "temporary": "#d55e00",
    "workspace": "#9a9a9a",
}
"""After Okabe and Ito, who chose colours that no common colour blindness confuses."""
BEFORE, AFTER = "#9a9a9a", "#009e73"
CURVES = (
    BEFORE,
    *(COLORS[name] for name in ("parameter", "activation", "input", "optimizer state", "temporary")),
)
"""Of runs over each other, the first in grey."""
MOST_POINTS = 1600
"""Of a curve, at first; a zoom into the page draws all that is in the window."""

Figure = Any
"""A `plotly.graph_objects.Figure`."""


def thinned(high: NDArray[np.int64], most: int = MOST_POINTS) -> NDArray[np.int64]:
    """At most `most` positions of `high`, in order: of each stretch the one with the most bytes, so that no peak is lost."""
    count = len(high)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most + 1).astype(np.int64)
    return np.array([a + int(np.argmax(high[a:b])) for a, b in itertools.pairwise(edges)])


def area(trace: Trace, *, budget_bytes: int | None = None) -> Figure:
    """Bytes on the device over one iteration, by category, stacked; bands tell the phases, a mark the peak."""
    import plotly.graph_objects as go

    high, series = high_bytes(trace), bytes_by_category(trace)
    at = thinned(high)
    figure = go.Figure(layout=plain_layout())
    for name in STACKED:
        if not series[name].any():
            continue
        figure.add_scatter(
            x=at.tolist(),
            y=series[name][at].tolist(),
            name=name,
            stackgroup="bytes",
            mode="lines",
            line={"width": 0.6, "color": COLORS[name], "shape": "hv"},
            fillcolor=translucent(COLORS[name], 0.78),
            customdata=[format_bytes(int(value)) for value in series[name][at]],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    most = int(high.max()) if len(high) else 0
    figure.update_yaxes(byte_axis(max(most, budget_bytes or 0)))
    figure.update_xaxes(title_text="op of the iteration", range=[0, max(1, len(high) - 1)])
    _bands(figure, trace)
    if len(high):
        peak = int(high.argmax())
        figure.add_annotation(
            x=peak, y=most, text=f"peak {format_bytes(most)}", name="peak", showarrow=True, ay=-22, ax=0
        )
    if budget_bytes:
        figure.add_hline(
            y=budget_bytes, line={"dash": "dash", "width": 1.5, "color": "#d55e00"}, name="budget"
        )
    return figure


def _bands(figure: Figure, trace: Trace) -> None:
    for start, stop, phase in phases(trace):
        if (stop - start) * 200 < trace.op_count:
            continue
        figure.add_shape(
            type="rect", xref="x", yref="paper", x0=start, x1=stop, y0=0, y1=1, layer="below", line={"width": 0},
            fillcolor="rgba(128,128,128,.09)" if PHASES.index(phase) % 2 else "rgba(128,128,128,0)", name=phase,
        )  # fmt: skip


def phases(trace: Trace) -> list[tuple[int, int, str]]:
    """(first op, first op after it, phase) of each stretch of one phase."""
    phase = np.array(trace.ops.phase, dtype=np.int64)
    if not len(phase):
        return []
    edges = [0, *(np.flatnonzero(np.diff(phase)) + 1).tolist(), len(phase)]
    return [(a, b, PHASES[int(phase[a])]) for a, b in itertools.pairwise(edges)]


def before_and_after(trace: Trace, planned: ReadPlan) -> Figure:
    """Bytes on the device over the iteration without and with the plan; what is between them is saved."""
    import plotly.graph_objects as go

    plain, after = high_bytes(trace), planned.timeline.high_bytes
    figure = go.Figure(layout=plain_layout())
    starts = planned.timeline.start_ms, TraceView(trace).start_ms
    by_time = all(start.any() for start in starts)
    for name, high, color, start in (
        ("with the plan", after, AFTER, starts[0]),
        ("without", plain, BEFORE, starts[1]),
    ):
        at = thinned(high)
        x = start[at].round(3) if by_time else at
        figure.add_scatter(
            x=x.tolist(),
            y=high[at].tolist(),
            name=name,
            mode="lines",
            line={"width": 2 if color == AFTER else 1.4, "color": color, "shape": "hv"},
            fill="tozeroy" if color == AFTER else "tonexty",
            fillcolor=translucent(color, 0.16 if color == AFTER else 0.14),
            customdata=[format_bytes(int(value)) for value in high[at]],
            hovertemplate="%{customdata}<extra>" + name + "</extra>",
        )
    figure.add_hline(
        y=planned.plan.budget_bytes, line={"dash": "dash", "width": 1.5, "color": "#d55e00"}, name="budget",
        annotation_text=f"budget {format_bytes(planned.plan.budget_bytes)}", annotation_position="top left",
    )  # fmt: skip
    figure.update_yaxes(byte_axis(max(int(plain.max()), planned.plan.budget_bytes)))
    figure.update_xaxes(title_text="ms of the step" if by_time else "op of the iteration")
    return figure


def _shares(trace: Trace) -> NDArray[np.float64]:
    """How much of the iteration has passed when each op starts: of its time, or of its ops where no time is known."""
    start = TraceView(trace).start_ms
    if not start.any():
        start = np.arange(trace.op_count, dtype=np.float64)
    return (start / max(float(start[-1]), 1e-12)).round(5) if len(start) else start


def lanes(planned: ReadPlan, most: int = 1500) -> Figure | None:
    """Work that the plan adds, by lane and in time: replays on the compute lane, copies out and in. None where there is none."""
    import plotly.graph_objects as go

    found = sorted(planned.timeline.lanes, key=lambda each: each.start_ms - each.end_ms)[:most]
    if not found:
        return None
    names = {"compute": "recompute", "swap_out": "copies out", "swap_in": "copies in"}
    colors = {"compute": COLORS["activation"], "swap_out": COLORS["parameter"], "swap_in": COLORS["gradient"]}
    figure = go.Figure(layout=plain_layout(height=190))
    for lane, name in names.items():
        rows = [each for each in found if each.lane == lane]
        if rows:
            figure.add_bar(
                orientation="h",
                y=[name] * len(rows),
                base=[each.start_ms for each in rows],
                x=[each.end_ms - each.start_ms for each in rows],
                marker={"color": colors[lane], "line": {"width": 0.5, "color": "rgba(255,255,255,.6)"}},
                name=name,
                customdata=[f"{each.label[:80]}, {format_bytes(each.size_bytes)}" for each in rows],
                hovertemplate="%{customdata}<br>%{base:.1f} ms, for %{x:.2f} ms<extra></extra>",
            )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_xaxes(title_text="ms of the step")
    return figure


def curves(runs: list[tuple[str, Trace]]) -> Figure:
    """The runs over each other, on one scale; x is the share of the iteration, since they may differ in ops."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=plain_layout())
    most = 0
    for (name, trace), color in zip(runs, itertools.cycle(CURVES), strict=False):
        high = high_bytes(trace)
        at = thinned(high)
        most = max(most, int(high.max()) if len(high) else 0)
        figure.add_scatter(
            x=_shares(trace)[at].tolist(), y=high[at].tolist(), name=name, mode="lines", fill="tozeroy",
            fillcolor=translucent(color, 0.12), line={"width": 2, "color": color, "shape": "hv"},
            customdata=[format_bytes(int(value)) for value in high[at]], hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(byte_axis(most))
    figure.update_xaxes(title_text="share of the iteration", tickformat=".0%", range=[0, 1])
    return figure


def plain_layout(height: int = 380) -> dict[str, Any]:
    """What all figures have in common; the page paints text and grid in its own colours."""
    return {
        "height": height,
        "margin": {"l": 74, "r": 18, "t": 26, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": False,
        "font": {"size": 12.5},
        "xaxis": {"gridcolor": "rgba(128,128,128,.18)", "zeroline": False, "title": {"font": {"size": 12}}},
        "yaxis": {"gridcolor": "rgba(128,128,128,.18)", "zeroline": False, "fixedrange": True},
    }


def byte_axis(most: int) -> dict[str, Any]:
    """An axis from 0 to `most` whose ticks are round in binary units."""
    step = 1
    while most / step > 6:
        step *= 2
    ticks = list(range(0, int(most * 1.08) + step, step))
    return {
        "range": [0, max(1, most) * 1.08],
        "tickvals": ticks,
        "ticktext": [format_bytes(tick) for tick in ticks],
    }


def translucent(color: str, alpha: float) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def peaks(outcome: Outcome) -> Figure:
    """Three bars and the budget: the peak without the plan, as predicted, as measured."""
    import plotly.graph_objects as go

    bars = {
        "without the plan": (outcome.unplanned_peak_bytes, BEFORE),
        "predicted": (outcome.predicted_peak_bytes, COLORS["parameter"]),
        "measured": (outcome.measured_peak_bytes or 0, AFTER),
    }
    figure = go.Figure(layout=plain_layout(300))
    figure.add_bar(
        x=list(bars), y=[size for size, _ in bars.values()], text=[format_bytes(size) for size, _ in bars.values()],
        marker_color=[color for _, color in bars.values()], hoverinfo="skip",
    )  # fmt: skip
    figure.add_hline(
        y=outcome.budget_bytes, line={"dash": "dash", "width": 1.5, "color": "#d55e00"}, name="budget"
    )
    figure.update_yaxes(byte_axis(max(outcome.budget_bytes, *(size for size, _ in bars.values()))))
    return figure


def estimated(curve: dict[str, Any]) -> Figure:
    """An estimate over its run, stacked by category; a line where each optimizer step ends."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=plain_layout())
    series = curve["by_category"]
    for name in STACKED:
        if name in series:
            figure.add_scatter(
                x=curve["at"], y=series[name], name=name, stackgroup="bytes", mode="lines",
                line={"width": 0.6, "color": COLORS[name], "shape": "hv"}, fillcolor=translucent(COLORS[name], 0.78),
                customdata=[format_bytes(size) for size in series[name]], hovertemplate="%{customdata}<extra>" + name + "</extra>",
            )  # fmt: skip
    totals = [sum(parts) for parts in zip(*series.values(), strict=True)] or [0]
    most = max(totals)
    figure.update_yaxes(byte_axis(most))
    figure.update_xaxes(title_text="allocations and releases of the steps that were followed")
    for number, at in enumerate(curve["steps"], 1):
        figure.add_vline(x=at, line={"width": 1, "dash": "dot", "color": BEFORE}, annotation_text=f"step {number} ends", annotation_position="top left", annotation_font_size=11)  # fmt: skip
    if series:
        peak = totals.index(most)
        figure.add_annotation(x=curve["at"][peak], y=most, text=f"peak {format_bytes(most)}", name="peak", showarrow=True, ay=-14, ax=44)  # fmt: skip
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.22})
    return figure


def shares(by_category: dict[str, int]) -> Figure:
    """One bar a category."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=plain_layout(300))
    figure.add_bar(
        x=list(by_category), y=list(by_category.values()), text=[format_bytes(size) for size in by_category.values()],
        marker_color=[COLORS.get(name, BEFORE) for name in by_category], hoverinfo="skip",
    )  # fmt: skip
    figure.update_yaxes(byte_axis(max(by_category.values(), default=0)))
    return figure
