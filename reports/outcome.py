"""What a run under a plan came to: predicted beside measured, as rich renderables and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType

from memopt.outcome import Outcome
from memopt.reports import verdict
from memopt.reports.tables import pairs_table, words
from memopt.units import format_bytes, format_ms


def render_outcome(outcome: Outcome | dict[str, Any]) -> RenderableType:
    """The verdict, and a table: plain, predicted, measured, and how far the prediction was off."""
    if isinstance(outcome, dict):
        outcome = msgspec.convert(outcome, Outcome)
    good = 0 < outcome.measured_peak_bytes <= outcome.budget_bytes
    counts = outcome.actions
    parts: list[RenderableType] = [
        words(verdict.of_outcome(outcome), style="bold green" if good else "bold red"),
        pairs_table("", ("", "plain", "predicted", "measured", "off by"), _rows(outcome)),
        words(
            f"Actions: {counts.planned} planned, {counts.done} done, {counts.skipped} skipped; {_divergences(outcome)}."
        ),
    ]
    if outcome.process_peak_bytes:
        parts.append(words(f"The process's resident set reached {format_bytes(outcome.process_peak_bytes)}."))
    return Group(*parts, *(words(f"Note: {note}.") for note in outcome.notes))


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    return [
        (
            "peak",
            format_bytes(outcome.unplanned_peak_bytes),
            format_bytes(outcome.predicted_peak_bytes),
            format_bytes(outcome.measured_peak_bytes) if outcome.measured_peak_bytes else "-",
            verdict.change(outcome.measured_peak_bytes, outcome.predicted_peak_bytes)
            if outcome.measured_peak_bytes
            else "-",
        ),
        (
            "step",
            format_ms(outcome.plain_step_ms),
            format_ms(outcome.predicted_step_ms),
            format_ms(outcome.measured_step_ms) if outcome.measured_step_ms else "-",
            verdict.change(outcome.measured_step_ms, outcome.predicted_step_ms)
            if outcome.measured_step_ms
            else "-",
        ),
    ]


def _divergences(outcome: Outcome) -> str:
    if not outcome.divergences:
        return "the run followed the profile" + (" where it could" if outcome.other_steps else "")
    times = f"{outcome.divergences} time{'s' if outcome.divergences > 1 else ''}"
    return f"the run left the profile {times} and kept its tensors there"
