"""The report as one HTML file: it opens offline, asks no host for anything, and shows no text that could be taken for markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from memopt.reports import benchmarks, figures, tradeoff
from memopt.reports.anonymous import without_files
from memopt.reports.headline import command_of, of_inputs
from memopt.reports.inputs import Inputs, Run
from memopt.reports.page import sections
from memopt.reports.page.data import run_data
from memopt.reports.page.source import Source
from memopt.reports.text import esc, json_in_html
from memopt.units import format_bytes
from memopt.version import VERSION

_SCRIPTS = ("core.js", "run.js", "area.js", "strip.js", "table.js", "page.js")
_PACK_FROM_BYTES = 400_000


def page(inputs: Inputs, names: Sequence[str], *, with_source: bool = True) -> str:
    """The page for `inputs`, which came from the files `names`. Without source: no line, path or argument of the script is in it."""
    drawn: dict[str, Any] = {}
    if not with_source:
        inputs = without_files(inputs)
    headline = of_inputs(inputs, with_source=with_source)
    parts = [sections.hero(headline)]
    parts += [f'<p class="note">{esc(note.rstrip("."), 600)}.</p>' for note in inputs.notes]
    parts += _comparison(inputs.runs, drawn, with_source)
    parts += _of_runs(inputs, drawn, with_source)
    for _, plan in inputs.plans:
        parts.append(sections.actions(plan, with_source=with_source))
    parts += [sections.outcome(found) for _, found in inputs.outcomes]
    for number, (_, found) in enumerate(inputs.estimates):
        if found.get("curve"):
            drawn[f"estimated{number}"] = figures.estimated(found["curve"])
            parts.append(sections.figure(f"estimated{number}", "Memory over the run, estimated", "Height is bytes of tensors on the device; nothing was run.", "Estimated bytes by category"))  # fmt: skip
        parts.append(sections.estimate(found))
    parts += _trade_off(inputs, drawn)
    parts += _benchmarks(inputs, drawn)
    parts.append(sections.about(names, _facts(inputs, with_source)))
    data = {
        "runs": [run_data(run, with_lines=with_source) for run in _all_runs(inputs.runs)],
        "figures": {name: json.loads(figure.to_json()) for name, figure in drawn.items()},
    }
    return _filled("".join(parts), data, headline.title)


def _all_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs, each followed by the one that its plan makes of it where the ops are others then."""
    return [each for run in runs for each in (run, run.with_optimizer_moved()) if each is not None]


def _trade_off(inputs: Inputs, drawn: dict[str, Any]) -> list[str]:
    """Peak against time, where there is more than the plan itself to be seen."""
    if not inputs.curves and not inputs.comparisons:
        return []
    marks = tradeoff.marks_of(inputs)
    plans = [run.planned.plan for run in inputs.runs if run.planned is not None] + [
        p for _, p in inputs.plans
    ]
    budget = next((plan.budget_bytes for plan in plans), 0)
    if not plans and inputs.comparisons:
        budget = inputs.comparisons[0][1]["budget_bytes"]
    drawn["pareto"] = tradeoff.drawn(marks, budget)
    sub = "Further down is less memory, further right more time. The line joins the fastest plans that were found for each budget."
    return [sections.figure("pareto", "Peak against step time", sub, "Peak against step time")]


def _benchmarks(inputs: Inputs, drawn: dict[str, Any]) -> list[str]:
    parts = []
    for number, (name, jobs) in enumerate(inputs.benchmarks):
        frame = benchmarks.table(jobs)
        figure = tradeoff.of_benchmark(frame)
        if figure is not None:
            drawn[f"bench{number}"] = figure
            parts.append(sections.figure(f"bench{number}", "Peak and step of each case", "Further down is less memory, further left is faster.", "Peak against step time"))  # fmt: skip
        parts.append(sections.benchmark(f"benchmark{number or ''}", name, frame))
    return parts


def _comparison(runs: Sequence[Run], drawn: dict[str, Any], with_source: bool) -> list[str]:
    if len(runs) < 2:
        return []
    drawn["curves"] = figures.curves([(run.name, run.trace) for run in runs])
    names = " and ".join(run.name for run in runs[:3])
    key = "".join(
        f'<li><i class="dot" style="--c:{color}"></i>{esc(run.name)}</li>'
        for run, color in zip(runs, itertools.cycle(figures.CURVES), strict=False)
    )
    sub = f"One scale; each iteration from its beginning to its end.</p><ul class=key>{key}</ul><p>"
    return [
        sections.figure("curves", "Over one iteration", sub, f"Bytes over the iteration of {names}"),
        sections.delta(runs[0], runs[-1], with_source=with_source),
    ]


def _of_runs(inputs: Inputs, drawn: dict[str, Any], with_source: bool) -> list[str]:
    """What is shown of profiles: pictures and tables of the moment, then plans, then what the script could do better."""
    runs = inputs.runs
    if not runs:
        return []
    planned = [run for run in runs if run.planned is not None]
    parts = [
        sections.iteration(_all_runs(runs)),
        sections.strip({each.kind for run in planned if run.planned for each in run.planned.plan.actions}),
        sections.tensor_table(),
        sections.modules(),
        *_allocator(runs, drawn),
    ]
    for number, run in enumerate(planned):
        assert run.planned is not None
        plan = run.planned.plan
        drawn[f"before{number}"] = figures.before_and_after(run.trace, run.planned)
        saved = format_bytes(max(0, plan.unplanned_peak_bytes - plan.predicted_peak_bytes))
        parts.append(sections.figure(f"before{number}", "Before and after", f"Grey: as it runs. Green: with the plan. The peak falls by {saved}.", "Bytes without and with the plan"))  # fmt: skip
        lanes = figures.lanes(run.planned)
        if lanes is not None:
            drawn[f"lanes{number}"] = lanes
            parts.append(sections.figure(f"lanes{number}", "What the plan adds to a step", "Copies run beside the computing; what is computed again does not.", "Replays and copies in time"))  # fmt: skip
        parts.append(sections.actions(plan, with_source=with_source))
    for run in runs:
        if not run.trace.partial and run.trace.op_count:
            from memopt.advisors.lints.find import find_lints

            found = find_lints(run.trace)
            if found:
                parts.append(sections.lints(found, Source(run.trace.script) if with_source else None))
                break
    return parts


def _allocator(runs: Sequence[Run], drawn: dict[str, Any]) -> list[str]:
    """The segments of the first file that has any."""
    from memopt.reports.page import allocator_figure
    from memopt.reports.page.allocator_view import at_the_peak

    view = next((view for run in runs if (view := run.layout or at_the_peak(run.trace)) is not None), None)
    if view is None or not view.segments:
        return []
    drawn["allocator"] = allocator_figure.drawn(view)
    card = sections.figure(
        "allocator",
        "How the allocator's memory lies",
        esc(allocator_figure.told(view), 900),
        "Segments of the allocator",
    )
    return [
        card.removesuffix("</section>")
        + allocator_figure.key()
        + allocator_figure.by_pool(view)
        + "</section>"
    ]


def _facts(inputs: Inputs, with_source: bool) -> list[tuple[str, str]]:
    facts = []
    for run in inputs.runs:
        script, device = run.trace.script, run.trace.device
        if with_source:
            facts += [("Command", command_of(run.trace, whole=True)), ("Folder", script.cwd)]
        facts += [
            ("Recorded", run.trace.created),
            ("Versions", f"memopt {run.trace.memopt}, torch {script.torch}, Python {script.python}"),
            ("Device", f"{device.name or device.kind}, allocator {device.allocator or 'not known'}"),
        ]
    return facts


@cache
def _template(name: str) -> str:
    return (files("memopt.reports") / "templates" / name).read_text(encoding="utf-8")


def _filled(body: str, data: dict[str, Any], title: str) -> str:
    theme = _template("theme.js")
    script = '"use strict";\n(() => {\n' + "\n".join(_template(name) for name in _SCRIPTS) + "\n})();\n"
    wants_plotly = bool(data["runs"] or data["figures"])
    plotly = _plotly() if wants_plotly else ""
    slots = {
        "csp": _policy([theme, script, *([plotly] if plotly else [])]),
        "version": VERSION,
        "title": esc(f"{title} · memopt", 200),
        "css": _template("page.css"),
        "theme": theme,
        "nav": _nav(body),
        "body": body,
        "data": _packed(data),
        "plotly": f"<script>{plotly}</script>" if plotly else "",
        "script": script,
    }
    pieces = _template("page.html").split("{{")
    return pieces[0] + "".join(
        slots[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:])
    )


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _policy(scripts: Sequence[str]) -> str:
    """Only these scripts run, and nothing is loaded or sent; plotly writes style elements, and pictures for download."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"


def _packed(data: dict[str, Any]) -> str:
    text = json_in_html(data)
    if len(text) < _PACK_FROM_BYTES:
        return text
    return "gzip:" + base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


_NAV = (
    ("delta", "Changes"), ("iteration", "Iteration"), ("strip-card", "Lifetimes"), ("tensors", "Tensors"), ("modules-card", "Modules"), ("allocator-card", "Allocator"),
    ("before0-card", "Before, after"), ("plan", "Plan"), ("lints", "Findings"), ("outcome", "Outcome"), ("estimated0-card", "Over the run"), ("estimate", "Estimate"),
    ("pareto-card", "Trade-off"), ("bench0-card", "Cases"), ("benchmark", "Benchmark"), ("about", "About"),
)  # fmt: skip


def _nav(body: str) -> str:
    return "".join(f'<a href="#{name}">{title}</a>' for name, title in _NAV if f'id="{name}"' in body)
