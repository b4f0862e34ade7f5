"""What `memopt.load` gives: a file's data with tables, a figure, a page, and a look of its own in notebooks and terminals."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.errors import UsageError
from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.reports.headline import Headline, of_inputs
from memopt.reports.inputs import Inputs, Run, load_any, short_name, with_a_moment
from memopt.reports.text import esc, together
from memopt.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

Frame = Any
Figure = Any


class Loaded:
    """One file. `data` is what it holds (a `Trace`, `Plan`, `Outcome`, or the JSON object of an estimate or a curve)."""

    data: Any
    name: str

    @property
    def inputs(self) -> Inputs:
        """As a report takes it."""
        raise NotImplementedError

    @property
    def headline(self) -> Headline:
        return of_inputs(self.inputs)

    def to_pandas(self) -> Frame:
        """The data as a `pandas.DataFrame`."""
        raise NotImplementedError

    def plot(self) -> Figure:
        """A `plotly.graph_objects.Figure`."""
        raise NotImplementedError

    def report(self, path: str | Path, *, with_source: bool = True) -> Path:
        """Write the HTML page to `path` (over what is there) and return it."""
        from memopt.files import write_atomic
        from memopt.reports.page.html import page

        target = Path(path)
        write_atomic(target, page(self.inputs, [self.name], with_source=with_source).encode())
        return target

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.headline.title}>"

    def _repr_html_(self) -> str:
        """The verdict and the figures, without a script, so that every notebook shows them."""
        headline = self.headline
        cells = "".join(
            f"<td style='padding:4px 18px 4px 0;text-align:left'><div style='opacity:.7'>{esc(name)}</div>"
            f"<b>{esc(value)}</b> <span style='opacity:.7'>{esc(small, 60)}</span></td>"
            for name, value, small in headline.figures
        )
        leads = "".join(f"<div>{together(esc(lead, 600))}</div>" for lead in headline.leads)
        return f"<div><b style='font-size:1.25em'>{together(esc(headline.title, 300))}</b>{leads}<table><tr>{cells}</tr></table>{self._rows()}</div>"

    def _rows(self) -> str:
        return ""


class LoadedProfile(Loaded):
    """A profile: one recorded iteration."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.data, self.name = trace, name

    @property
    def trace(self) -> Trace:
        return self.data  # type: ignore[no-any-return]

    @property
    def peak_bytes(self) -> int:
        return self.trace.peak_bytes

    @property
    def inputs(self) -> Inputs:
        return Inputs(runs=[Run(self.name, with_a_moment(self.trace))])

    def to_pandas(self, what: str = "tensors") -> Frame:
        """`tensors`: one row a storage; `ops`: one row an op. Bytes, ms, and op numbers."""
        from memopt.reports import frames

        tables = {"tensors": frames.tensors, "ops": frames.ops}
        if what not in tables:
            raise ValueError(f"there is no table {what!r}: tensors, ops")
        return tables[what](self.trace)

    def plot(self, *, budget_bytes: int | None = None) -> Figure:
        """Bytes over the iteration, stacked by category."""
        from memopt.reports.figures import area

        return area(with_a_moment(self.trace), budget_bytes=budget_bytes)

    def __rich__(self) -> RenderableType:
        from memopt.reports.terminal import render_trace

        return render_trace(self.trace)

    def _rows(self) -> str:
        from memopt.reports.figures import COLORS
        from memopt.reports.page.moment import end_of, peak_of

        moment = end_of(self.trace) or peak_of(self.trace)
        total = max(1, moment.total_bytes)
        bars = "".join(
            f"<span title='{html.escape(name)} {100 * size / total:.1f} %' "
            f"style='display:inline-block;height:14px;width:{100 * size / total:.2f}%;background:{COLORS[name]}'></span>"
            for name, size in moment.by_category.items()
        )
        key = ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in moment.by_category.items())
        return f"<div style='white-space:nowrap;max-width:640px'>{bars}</div><div style='opacity:.7'>{html.escape(key)}</div>"


class LoadedPlan(Loaded):
    """A plan; drawn over its profile where that is beside it."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self.data, self.name, self._path = plan, path.name, path

    @property
    def plan(self) -> Plan:
        return self.data  # type: ignore[no-any-return]

    @property
    def inputs(self) -> Inputs:
        from memopt.reports.inputs import read_inputs

        return read_inputs([self._path])

    def to_pandas(self) -> Frame:
        """One row an action, those that save most first."""
        from memopt.reports import frames

        return frames.actions(self.plan)

    def plot(self) -> Figure:
        """Bytes over the step without and with the plan. Raises `UsageError` where the plan's profile is not there."""
        from memopt.reports.figures import before_and_after
        from memopt.reports.inputs import one_run

        run = one_run(self.inputs)
        assert run.planned is not None
        return before_and_after(run.trace, run.planned)

    def __rich__(self) -> RenderableType:
        from memopt.reports.terminal import render_plan

        return render_plan(self.plan)


class LoadedOutcome(Loaded):
    """What a run under a plan came to."""

    def __init__(self, outcome: Outcome, name: str) -> None:
        self.data, self.name = outcome, name

    @property
    def inputs(self) -> Inputs:
        return Inputs(outcomes=[(self.name, self.data)])

    def to_pandas(self) -> Frame:
        """Peak (bytes) and step (ms): without the plan, predicted, measured."""
        from memopt.reports import frames

        return frames.outcome(self.data)

    def plot(self) -> Figure:
        """Peak without the plan, predicted and measured, with the budget."""
        from memopt.reports.figures import peaks

        return peaks(self.data)


class LoadedFigures(Loaded):
    """An estimate, or a curve of `advise --pareto`."""

    def __init__(self, found: dict[str, Any], name: str) -> None:
        self.data, self.name = found, name

    @property
    def _is_curve(self) -> bool:
        return bool(self.data.get("kind") == "pareto")

    @property
    def inputs(self) -> Inputs:
        one = [(self.name, self.data)]
        return Inputs(curves=one) if self._is_curve else Inputs(estimates=one)

    def to_pandas(self) -> Frame:
        """A curve: one row a budget. An estimate: bytes at the peak by category."""
        from memopt.reports import frames

        return frames.points(self.data) if self._is_curve else frames.categories(self.data)

    def plot(self) -> Figure:
        """The curve; of an estimate what its peak is made of."""
        from memopt.reports import tradeoff
        from memopt.reports.figures import shares

        if self._is_curve:
            return tradeoff.drawn(tradeoff.marks_of(Inputs(curves=[(self.name, self.data)])))
        return shares(self.data["by_category"])


def loaded(path: Path) -> Loaded:
    """The file at `path`. Raises `BadFile`, `UsageError`."""
    found = load_any(path)
    if isinstance(found, Trace):
        return LoadedProfile(found, short_name(path))
    if isinstance(found, Plan):
        return LoadedPlan(found, path)
    if isinstance(found, Outcome):
        return LoadedOutcome(found, path.name)
    if "jobs" in found or "strategies" in found:
        what = "a benchmark's lines" if "jobs" in found else "a comparison of strategies"
        raise UsageError(
            f"{path} is {what}, not a profile, plan, outcome or estimate", try_=f"memopt report {path}"
        )
    return LoadedFigures(json.loads(json.dumps(found)), path.name)
