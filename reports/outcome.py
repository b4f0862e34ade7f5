"""What a run under a plan came to: predicted beside measured, as rich renderables and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Group, RenderableType

from memopt.outcome import Outcome
from memopt.reports import verdict
from memopt.reports.tables import pairs_table, words
from memopt.units import format_bytes, format_change, format_ms
from memopt.words import waited_words


def render_outcome(outcome: Outcome | dict[str, Any]) -> RenderableType:
    """The verdict, and a table: plain, predicted, measured, and how far the prediction was off."""
    if isinstance(outcome, dict):
        outcome = msgspec.convert(outcome, Outcome)
    measured_bytes = outcome.measured_peak_bytes
    good = (
        measured_bytes is not None and max(measured_bytes, outcome.outside_peak_bytes) <= outcome.budget_bytes
    )
    counts = outcome.actions
    parts: list[RenderableType] = [
        words(verdict.of_outcome(outcome), style="bold green" if good else "bold red"),
        pairs_table("", ("", "plain", "predicted", "measured", "off by"), _rows(outcome)),
        words(
            f"Actions: {counts.planned} planned, {counts.done} done, {counts.skipped} skipped; {_divergences(outcome)}."
        ),
    ]
    if waited := waited_words(outcome.waited_share):
        parts.append(words(f"Times of steps: {waited}."))
    if outcome.reserved_peak_bytes:
        parts.append(words(_on_the_device(outcome)))
    if outcome.process_peak_bytes:
        parts.append(words(f"The process's resident set reached {format_bytes(outcome.process_peak_bytes)}."))
    return Group(*parts, *(words(f"Note: {note}.") for note in outcome.notes))


def render_ranks(outcomes: dict[int, Outcome], world: int) -> RenderableType:
    """One table of several ranks' outcomes, the worst verdict first, and notes with the ranks that they are of."""
    ranked = sorted(outcomes.items())
    over = [rank for rank, each in ranked if (each.measured_peak_bytes or 0) > each.budget_bytes]
    unmeasured = [rank for rank, each in ranked if each.measured_peak_bytes is None]
    said = f"{_ranks(over)} ABOVE the budget" if over else f"{_ranks([rank for rank, _ in ranked if rank not in unmeasured])} within the budget"  # fmt: skip
    elsewhere = max((each.outside_peak_bytes for _, each in ranked), default=0)
    if elsewhere:
        said += f" in the measured iterations; elsewhere (loading, evaluation) a rank held about {format_bytes(elsewhere)}"
    if unmeasured:
        said = f"{f'{said}; ' if len(unmeasured) < len(ranked) else ''}{_ranks(unmeasured)}: nothing was measured"
    if len(ranked) < world:
        said += f"; told here of {len(ranked)} of {world} ranks"
    columns = ("rank", "budget", "plain", "predicted", "measured", "off by", "step", "actions")
    rows = []
    for rank, each in ranked:
        peak = _row(str(rank), format_bytes, each.unplanned_peak_bytes, each.predicted_peak_bytes, each.measured_peak_bytes)  # fmt: skip
        step = format_ms(each.measured_step_ms) if each.measured_step_ms is not None else "-"
        done = f"{each.actions.done} of {each.actions.planned}"
        rows.append((peak[0], format_bytes(each.budget_bytes), *peak[1:], step, done))
    notes: dict[str, list[int]] = {}
    for rank, each in ranked:
        for note in each.notes:
            notes.setdefault(note, []).append(rank)
    told = [words(f"Note of {_ranks(ranks).lower()}: {note}.") for note, ranks in notes.items()]
    return Group(words(f"{said}.", style="bold red" if over else "bold green"), pairs_table("", columns, rows), *told)  # fmt: skip


def _ranks(ranks: list[int]) -> str:
    """`Rank 3`, `Ranks 0, 1, 2`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _on_the_device(outcome: Outcome) -> str:
    allocated, reserved = (
        format_bytes(outcome.allocated_peak_bytes),
        format_bytes(outcome.reserved_peak_bytes),
    )
    all_of_it = f"; the process holds {format_bytes(outcome.on_device_bytes)}, its CUDA context included" if outcome.on_device_bytes else ""  # fmt: skip
    return f"Of the device's memory, over the whole run, at most {allocated} were allocated and {reserved} reserved{all_of_it}."


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    o = outcome
    return [
        _row("peak", format_bytes, o.unplanned_peak_bytes, o.predicted_peak_bytes, o.measured_peak_bytes),
        _row("step", format_ms, o.plain_step_ms, o.predicted_step_ms, o.measured_step_ms, o.compared_step_ms),
    ]


def _row(
    name: str,
    shown: Callable[..., str],
    plain: float,
    predicted: float,
    measured: float | None,
    compared: float | None = None,
) -> tuple[str, ...]:
    """`compared`: what is held against the prediction where that is not what was measured."""
    if measured is None:
        return name, shown(plain), shown(predicted), "-", "-"
    off_by = format_change(measured if compared is None else compared, predicted, none="0 %")
    return name, shown(plain), shown(predicted), shown(measured), off_by


def _divergences(outcome: Outcome) -> str:
    if outcome.actions.planned and not outcome.actions.done:
        return "nothing of the plan was enforced"
    if not outcome.divergences:
        return "the run followed the profile" + (" where it could" if outcome.other_steps else "")
    times = f"{outcome.divergences} time{'s' if outcome.divergences > 1 else ''}"
    return f"the run left the profile {times} and kept its tensors there"
