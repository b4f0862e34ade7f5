"""Two files beside each other: what the second has more of than the first. Tells profiles, plans, outcomes and estimates alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memopt.errors import BadFile
from memopt.outcome import Outcome
from memopt.plan import Plan
from memopt.reports.inputs import load_any, short_name
from memopt.reports.page.moment import Moment, peak_of
from memopt.trace import Trace
from memopt.units import format_bytes, format_change, format_ms


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one file."""

    name: str
    kind: str
    """`profile`, `plan` (predicted), `outcome` (measured) or `estimate`."""
    peak_bytes: int
    step_ms: float | None = None
    by_category: dict[str, int] = {}
    by_module: dict[str, int] = {}
    by_line: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Delta:
    """One figure of both: bytes, or ms."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` against `before`."""

    before: Side
    after: Side
    peak: Delta
    step: Delta | None
    parts: dict[str, list[Delta]] = field(default_factory=dict)
    """`category`, `module` and `line` -> what differs at the peak, the largest change first."""

    @property
    def growth(self) -> float:
        """By how much the peak has grown, as a share of the first; infinite where that was nothing."""
        return (
            self.peak.change / self.before.peak_bytes
            if self.before.peak_bytes
            else (float("inf") if self.after.peak_bytes else 0.0)
        )

    @property
    def words(self) -> str:
        change = format_change(self.after.peak_bytes, self.before.peak_bytes)
        return f"Peak {format_bytes(self.after.peak_bytes)} instead of {format_bytes(self.before.peak_bytes)} ({change})."

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "memopt.comparison/1",
            "before": msgspec.to_builtins(self.before),
            "after": msgspec.to_builtins(self.after),
            "peak_change_bytes": int(self.peak.change),
            "peak_change": self.growth if self.before.peak_bytes else None,
            "step_change_ms": self.step.change if self.step else None,
            "changes": {
                part: [{"name": d.name, "before_bytes": d.before, "after_bytes": d.after} for d in deltas]
                for part, deltas in self.parts.items()
            },
        }


def compare(before: Path, after: Path) -> Comparison:
    """The file `after` against the file `before`. Raises `BadFile` where there is nothing to compare."""
    a, b = side_of(before), side_of(after)
    step = Delta("step", a.step_ms, b.step_ms) if a.step_ms is not None and b.step_ms is not None else None
    both = {
        "category": (a.by_category, b.by_category),
        "module": (a.by_module, b.by_module),
        "line": (a.by_line, b.by_line),
    }
    parts = {name: _deltas(*sides) for name, sides in both.items() if all(sides)}
    return Comparison(
        a, b, Delta("peak", a.peak_bytes, b.peak_bytes), step, {k: v for k, v in parts.items() if v}
    )


def side_of(path: Path) -> Side:
    """The figures of the file at `path`."""
    found, name = load_any(path), short_name(path)
    if isinstance(found, Trace):
        peak = peak_of(found)
        return Side(
            name=name, kind="profile", peak_bytes=found.peak_bytes, step_ms=found.step_ms or None,
            by_category=peak.by_category, by_module=_modules(peak), by_line=peak.by_line,
        )  # fmt: skip
    if isinstance(found, Plan):
        return Side(
            name=name, kind="plan", peak_bytes=found.predicted_peak_bytes, step_ms=found.predicted_step_ms
        )
    if isinstance(found, Outcome):
        if found.measured_peak_bytes is None:
            raise BadFile(
                f"{path} cannot be compared",
                why="no peak was measured in that run",
                try_="memopt apply for more steps",
            )
        return Side(
            name=name, kind="outcome", peak_bytes=found.measured_peak_bytes, step_ms=found.measured_step_ms
        )
    if "allocated_bytes" not in found:
        raise BadFile(
            f"{path} cannot be compared",
            why="it is a curve of many plans, not one run",
            try_="a profile, a plan, an outcome or an estimate",
        )
    peak_bytes = found.get("process_bytes") or found["allocated_bytes"]
    return Side(
        name=name, kind="estimate", peak_bytes=int(peak_bytes),
        by_category=found["by_category"], by_module=found["by_module"],
    )  # fmt: skip


def _modules(peak: Moment) -> dict[str, int]:
    totals: dict[str, int] = {}
    for held in peak.held:
        totals[held.module] = totals.get(held.module, 0) + held.size_bytes
    return totals


def _deltas(a: dict[str, int], b: dict[str, int]) -> list[Delta]:
    rows = [Delta(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b])]
    return sorted((row for row in rows if row.change), key=lambda row: (-abs(row.change), row.name))


def rows_of(deltas: Sequence[Delta], *, time: bool = False) -> list[tuple[str, str, str, str]]:
    """Name, before, after, change: as text."""
    shown = format_ms if time else lambda amount: format_bytes(int(amount))
    return [
        (d.name or "(outside any module)", shown(d.before), shown(d.after), f"{'+' if d.change > 0 else '-'}{shown(abs(d.change))}" if d.change else "same")
        for d in deltas
    ]  # fmt: skip
