"""Inputs -> the bytes of a file, in the format that was asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memopt.errors import NotPossibleHere, UsageError
from memopt.reports import frames
from memopt.reports.inputs import Inputs, one_run
from memopt.reports.text import shown

SCHEMA = "memopt.report/1"
"""Of `--format json`."""
FORMATS = {
    "html": "report.html",
    "perfetto": "perfetto.json",
    "memory-viz": "pickle",
    "csv": "csv",
    "parquet": "parquet",
    "json": "report.json",
    "markdown": "md",
    "png": "png",
}
"""Format -> the end of the file's name."""


def exported(inputs: Inputs, names: Sequence[str], form: str, *, with_source: bool = True) -> bytes:
    """`inputs`, which came from the files `names`, in the format `form`; the same bytes for the same input."""
    if not with_source:
        from memopt.reports.anonymous import without_files

        inputs = without_files(inputs)
    if form == "html":
        from memopt.reports.page.html import page

        return page(inputs, names, with_source=with_source).encode()
    writers: dict[str, Callable[[Inputs, bool], bytes]] = {
        "perfetto": _perfetto,
        "memory-viz": _memory_viz,
        "csv": lambda given, source: bytes(_table(given, source).to_csv(index=False).encode()),
        "parquet": _parquet,
        "json": _json,
        "markdown": _markdown,
        "png": _png,
    }
    return writers[form](inputs, with_source)


def _perfetto(inputs: Inputs, with_source: bool) -> bytes:
    from memopt.reports.formats.perfetto import perfetto

    return perfetto(one_run(inputs), with_source=with_source)


def _memory_viz(inputs: Inputs, with_source: bool) -> bytes:
    from memopt.reports.formats.memory_viz import memory_viz

    return memory_viz(one_run(inputs).trace, with_source=with_source)


def _markdown(inputs: Inputs, with_source: bool) -> bytes:
    from memopt.reports.formats.markdown import markdown

    return markdown(inputs, with_source=with_source).encode()


def _table(inputs: Inputs, with_source: bool) -> frames.Frame:
    """Tensors of the one profile; else the actions of the one plan. A cell that a spreadsheet would compute is quoted."""
    if not inputs.runs and len(inputs.plans) == 1:
        frame = frames.actions(inputs.plans[0][1])
    elif not inputs.runs and len(inputs.benchmarks) == 1:
        from memopt.reports.benchmarks import table

        frame = table(inputs.benchmarks[0][1])
    elif not inputs.runs and len(inputs.outcomes) == 1:
        frame = frames.outcome(inputs.outcomes[0][1])
    elif not inputs.runs and len(inputs.curves) == 1:
        frame = frames.points(inputs.curves[0][1])
    elif not inputs.runs and len(inputs.estimates) == 1:
        frame = frames.categories(inputs.estimates[0][1])
    else:
        run = one_run(inputs)
        frame = frames.tensors(run.trace, run.planned)
    if not with_source:
        frame = frame.drop(columns="line", errors="ignore")
    for column in ("tensor", "label", "module", "line", "why", "job", "case", "result"):
        if column in frame:
            frame[column] = [_quoted(shown(text)) for text in frame[column]]
    return frame.reset_index(drop=frame.index.name is None)


def _quoted(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _parquet(inputs: Inputs, with_source: bool) -> bytes:
    file = io.BytesIO()
    try:
        _table(inputs, with_source).to_parquet(file, index=False)
    except ImportError as error:
        raise NotPossibleHere(
            "parquet cannot be written here",
            why="pyarrow is not installed",
            try_="pip install pyarrow, or --format csv",
        ) from error
    return file.getvalue()


def _json(inputs: Inputs, with_source: bool) -> bytes:
    from memopt.reports.formats.summary import summarize_plan, summarize_trace

    runs = []
    for run in inputs.runs:
        figures: dict[str, Any] = {"name": run.name, **summarize_trace(run.trace)}
        frame = frames.tensors(run.trace, run.planned)
        figures["tensors"] = json.loads(frame.reset_index().to_json(orient="records"))
        if run.planned is not None:
            figures["plan"] = summarize_plan(run.planned.plan)
        runs.append(figures if with_source else _without_source(figures))
    found = {
        "schema": SCHEMA,
        "profiles": runs,
        "plans": [{"name": name, **summarize_plan(plan)} for name, plan in inputs.plans],
        "outcomes": [{"name": name, **msgspec.to_builtins(each)} for name, each in inputs.outcomes],
        "estimates": [{"name": name, **each} for name, each in inputs.estimates],
        "curves": [{"name": name, **each} for name, each in inputs.curves],
        "comparisons": [
            {"name": name, "budget_bytes": each["budget_bytes"], "strategies": each["strategies"]}
            for name, each in inputs.comparisons
        ],
        "benchmarks": [{"name": name, "jobs": jobs} for name, jobs in inputs.benchmarks],
    }
    return json.dumps(msgspec.json.decode(msgspec.json.encode(found)), indent=1).encode() + b"\n"


_LINES = {"script", "line", "lines_at_peak", "verdict"}


def _without_source(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_source(each) for name, each in value.items() if name not in _LINES}
    return [_without_source(each) for each in value] if isinstance(value, list) else value


def _png(inputs: Inputs, with_source: bool) -> bytes:
    from memopt.reports import benchmarks, figures, tradeoff

    if len(inputs.runs) > 1:
        figure = figures.curves([(run.name, run.trace) for run in inputs.runs])
    elif inputs.runs and (planned := inputs.runs[0].planned) is not None:
        figure = figures.before_and_after(inputs.runs[0].trace, planned)
    elif inputs.runs:
        figure = figures.area(inputs.runs[0].trace)
    elif marks := tradeoff.marks_of(inputs):
        figure = tradeoff.drawn(marks)
    elif inputs.benchmarks and (cases := tradeoff.of_benchmark(benchmarks.table(inputs.benchmarks[0][1]))):
        figure = cases
    elif inputs.outcomes:
        figure = figures.peaks(inputs.outcomes[0][1])
    elif inputs.estimates:
        figure = figures.shares(dict(inputs.estimates[0][1]["by_category"]))
    else:
        raise UsageError("there is nothing to draw in these files", try_="memopt report --format png PROFILE")
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white", showlegend=True)
    try:
        return bytes(figure.to_image(format="png", width=1200, height=520, scale=2))
    except (ImportError, ValueError, RuntimeError) as error:
        raise NotPossibleHere(
            "a PNG cannot be made here",
            why=str(error).strip().splitlines()[0]
            if str(error).strip()
            else "kaleido, or the browser that it needs, is missing",
            try_="pip install 'memopt[png]' and a Chrome or Chromium, or --format html",
        ) from error
