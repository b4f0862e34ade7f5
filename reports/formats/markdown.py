"""A report as Markdown: for `$GITHUB_STEP_SUMMARY`, a pull request, a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memopt.reports import frames
from memopt.reports.headline import of_inputs
from memopt.reports.inputs import Inputs, Run
from memopt.reports.page.moment import end_of, peak_of
from memopt.reports.tables import share
from memopt.reports.text import shown
from memopt.units import format_bytes, format_ms

_SPECIAL = str.maketrans({c: f"\\{c}" for c in "\\`*_[]<>#|~"} | {"&": "&amp;", "@": "@\u200b"})


def markdown(inputs: Inputs, *, with_source: bool = True, top: int = 8) -> str:
    """The verdict, the figures, and what fills the device."""
    headline = of_inputs(inputs, with_source=with_source)
    parts = [f"### {escaped(headline.title)}", *(escaped(lead) for lead in headline.leads)]
    if headline.eyebrow and with_source:
        parts.insert(1, f"`{shown(headline.eyebrow).replace('`', chr(39))}`")
    rows = [(name, value, small) for name, value, small in headline.figures]
    if rows:
        parts.append(table(("", "", ""), rows))
    for run in inputs.runs:
        parts += _run(run, top, with_source)
    for _, plan in inputs.plans:
        parts += _actions(frames.actions(plan).head(top))
    for name, found in inputs.comparisons:
        parts += _strategies(name, found)
    for name, jobs in inputs.benchmarks:
        parts += _cases(name, jobs)
    return "\n\n".join(parts) + "\n"


def _strategies(name: str, found: dict[str, Any]) -> list[str]:
    rows = [
        (str(row["strategy"]), _size(row["predicted_peak_bytes"]), "–" if row["predicted_step_ms"] is None else format_ms(row["predicted_step_ms"]))
        for row in found["strategies"]
    ]  # fmt: skip
    return [f"**{escaped(name)}: strategies for {format_bytes(found['budget_bytes'])}**", table(("strategy", "peak", "step"), rows)]  # fmt: skip


def _cases(name: str, jobs: list[dict[str, Any]]) -> list[str]:
    from memopt.reports.benchmarks import table as cases_of

    rows = [
        (row.job, row.case, _size(row.peak_bytes), "–" if row.step_ms != row.step_ms else format_ms(row.step_ms), row.result)
        for row in cases_of(jobs).itertuples()
    ]  # fmt: skip
    return [f"**{escaped(name)}**", table(("job", "case", "peak", "step", "how it ended"), rows)]


def _size(amount: float | None) -> str:
    return "–" if amount is None or amount != amount else format_bytes(int(amount))


def _run(run: Run, top: int, with_source: bool) -> list[str]:
    moment = end_of(run.trace) or peak_of(run.trace)
    total = moment.total_bytes
    kinds = [(name, format_bytes(size), share(size, total)) for name, size in moment.by_category.items()]
    parts = [f"**{escaped(run.name)}: what fills the device**", table(("kind", "bytes", "share"), kinds)]
    held = [
        (each.label, each.category, format_bytes(each.size_bytes), *([each.line] if with_source else []))
        for each in moment.held[:top]
    ]
    parts.append(table(("tensor", "kind", "bytes", *(["line"] if with_source else [])), held))
    if run.planned is not None:
        parts += _actions(frames.actions(run.planned.plan).head(top))
    return parts


def _actions(frame: frames.Frame) -> list[str]:
    rows = [
        (row.label, row.does, format_bytes(row.saved_bytes), format_ms(row.cost_ms))
        for row in frame.itertuples()
    ]
    return (
        ["**The plan's biggest actions**", table(("tensor", "done", "off the peak", "time"), rows)]
        if rows
        else []
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of GitHub's Markdown, every cell as plain text."""
    lines = [f"| {' | '.join(map(escaped, heads))} |", f"|{' --- |' * len(heads)}"]
    return "\n".join(lines + [f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows])


def escaped(text: str) -> str:
    """`text` so that Markdown shows it as it is, and mentions nobody."""
    return shown(text, 400).translate(_SPECIAL)
