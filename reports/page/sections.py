"""The parts of the page that Python writes: the cards for pictures, and the tables and findings that need no script."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memopt.reports import frames
from memopt.reports.headline import Headline
from memopt.reports.page.source import Source
from memopt.reports.text import esc, together
from memopt.units import format_bytes, format_ms

if TYPE_CHECKING:
    from memopt.advisors.lints.registry import Lint
    from memopt.outcome import Outcome
    from memopt.plan import Plan
    from memopt.reports.inputs import Run

_MOST_ROWS = 300
_MOST_PARTS = 14


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and the number to sort by where it is one."""

    text: str
    value: float | None = None
    html: str = ""
    """Instead of `text`, already escaped."""


def size(amount: float | None) -> Cell:
    return Cell("–") if amount is None else Cell(format_bytes(int(amount)), float(amount))


def time(amount: float | None) -> Cell:
    return Cell("–") if amount is None else Cell(format_ms(amount), amount)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str) -> str:
    """A table whose columns are sorted by a click; a column of numbers stands to the right."""
    listed = list(rows)
    numbers = [
        bool(listed) and all(row[i].value is not None or row[i].text == "–" for row in listed)
        for i in range(len(heads))
    ]
    head = "".join(
        f'<th scope="col" aria-sort="none"{_right(number)}><button type="button">{esc(name)}</button></th>'
        for name, number in zip(heads, numbers, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, number) for cell, number in zip(row, numbers, strict=True))}</tr>"
        for row in listed
    )
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}"><table class="static"><caption class="sr">{esc(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _right(number: bool) -> str:
    return ' class="n"' if number else ""


def _cell(cell: Cell, number: bool) -> str:
    value = f' data-v="{cell.value}"' if cell.value is not None else ""
    return f"<td{_right(number)}{value}>{cell.html or esc(cell.text)}</td>"


def card(name: str, title: str, body: str, *, sub: str = "", tools: str = "", long: bool = False) -> str:
    """A titled part of the page; `body`, `sub` and `tools` are HTML."""
    return (
        f'<section class="card{" long" if long else ""}" id="{name}" tabindex="-1" aria-labelledby="{name}-title">'
        f'<header><h2 id="{name}-title">{title}</h2><span class="grow"></span>{tools}</header>'
        f"{f'<p class=sub>{sub}</p>' if sub else ''}{body}</section>"
    )


def _sentence(text: str) -> str:
    """`text` with a capital letter, unless it begins with a name such as `train.py:3`."""
    return text if re.match(r"\S*[._:/]", text) else text[:1].upper() + text[1:]


def hero(headline: Headline) -> str:
    """The verdict and the figures."""
    figures = "".join(
        f"<div><dt>{esc(name)}</dt><dd>{esc(value)} {f'<small>{esc(small, 60)}</small>' if small else ''}</dd></div>"
        for name, value, small in headline.figures
    )
    leads = "".join(
        f'<p class="lead">{together(esc(lead, 600))}</p>'
        for lead in headline.leads
        if not (headline.lines and "made by one line" in lead)
    )
    notes = "".join(
        f'<p class="note">{esc(_sentence(note).rstrip("."), 600)}.</p>' for note in headline.notes
    )
    return (
        f'<section class="hero"><p class="eyebrow">{esc(headline.eyebrow, 400)}</p>'
        f'<h1 class="{headline.tone}">{together(esc(headline.title, 300))}</h1>{leads}{notes}'
        f"{f'<dl class=kpis>{figures}</dl>' if figures else ''}{_lines(headline)}</section>"
    )


def _lines(headline: Headline) -> str:
    """The lines of the script that made most of what is there, each with its bytes."""
    rows = "".join(
        f'<li><span class="size">{format_bytes(line.size_bytes)}</span><span class="part">{100 * line.share:.0f} %</span>'
        f"<code>{esc(line.place, 80)}</code><code class=code>{esc(line.code, 120)}</code></li>"
        for line in headline.lines
    )
    return (
        f'<h2 class="eyebrow lines-title">{esc(headline.lines_title)}</h2><ol class="lines">{rows}</ol>'
        if rows
        else ""
    )


def _segment(label: str, name: str, choices: Sequence[tuple[str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" data-set="{name}={value}" aria-pressed="false">{esc(text)}</button>'
        for value, text in choices
    )
    return f'<span class="seg" role="group" aria-label="{esc(label)}">{buttons}</span>'


def iteration(runs: Sequence[Run]) -> str:
    """The stacked picture, and what the moment under the line is made of."""
    tools = _segment("Horizontal axis", "x", [("time", "By time"), ("op", "By op")])
    if any(run.drawn_with_plan for run in runs):
        tools = _segment("Shown", "view", [("run", "As it runs"), ("plan", "With the plan")]) + tools
    if len(runs) > 1:
        tools = _segment("Profile", "run", [(str(i), run.name) for i, run in enumerate(runs)]) + tools
    tools += '<button class="ghost" type="button" data-do="whole">Whole step</button><button class="ghost" type="button" data-do="png" aria-label="Download the picture as PNG">PNG</button>'
    body = (
        '<div class="fig" id="area" role="group" aria-label="Bytes on the device over one iteration, stacked by category. The slider below chooses a moment; the text below it says the same in words."></div>'
        '<input class="scrub" id="moment-slider" type="range" min="0" max="2000" step="1" aria-label="Moment of the iteration: the op that is looked at">'
        '<div class="moment"><p aria-live="polite"><span id="moment-what"></span><br><span class="where" id="moment-where"></span></p>'
        '<span class="steps"><button class="ghost" type="button" data-do="earlier" aria-label="One op earlier">←</button>'
        '<button class="ghost" type="button" data-do="peak">Peak</button>'
        '<button class="ghost" type="button" data-do="later" aria-label="One op later">→</button></span></div>'
        '<div class="mix" id="mix" aria-hidden="true"></div><ul class="key" id="key"></ul>'
    )
    sub = (
        "Height is bytes on the device. Click, or use the slider, to look at a moment: everything below follows it. Drag across the picture to zoom."
        + (' <span id="dotted"></span>' if any(run.planned for run in runs) else "")
    )
    return card("iteration", "Memory over one iteration", body, sub=sub, tools=tools)


_HATCHED = {
    "swap": "away, on the host or the disk",
    "recompute": "gone, made again",
    "compress": "held smaller",
    "drop": "dropped",
}


def strip(kinds: Collection[str]) -> str:
    """Lifetimes of the tensors of the moment; `kinds` of actions are drawn on them."""
    key = "".join(
        f'<li><i class="hatch {kind}"></i>{words}</li>' for kind, words in _HATCHED.items() if kind in kinds
    )
    body = (
        '<div class="fig" id="strip" role="group" aria-label="Lifetimes of the tensors that are alive; the table below lists the same tensors."></div>'
        f'<p class="sub" id="strip-note"></p>{f"<ul class=key>{key}</ul>" if key else ""}'
    )
    sub = (
        "Each bar is a tensor, from birth to death and as high as it is large. Bars that only wait for the backward are what a plan can move."
        + (" Hatched: the plan takes it off the device." if key else "")
    )
    return card("strip-card", 'Tensors alive <span data-moment="1"></span>', body, sub=sub)


def tensor_table() -> str:
    """The table that the script fills."""
    body = (
        '<div class="tools"><input type="search" id="search" placeholder="Search names, modules, lines ( / )" aria-label="Search tensors">'
        '<span id="chips" role="group" aria-label="Kinds that are shown" style="display:contents"></span></div>'
        '<p class="sub" id="table-note" aria-live="polite"></p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Tensors"><table><caption class="sr">Tensors that are alive at the moment</caption>'
        '<thead><tr id="heads"></tr></thead><tbody id="rows"></tbody></table></div>'
        '<button class="ghost more" id="table-more" type="button" data-do="more" hidden></button>'
    )
    tools = '<button class="ghost" type="button" data-do="csv">CSV</button><button class="ghost" type="button" data-do="json">JSON</button>'
    return card(
        "tensors", 'What fills the device <span data-moment="1"></span>', body, tools=tools, long=True
    )


def modules() -> str:
    body = '<div class="fig" id="modules" role="group" aria-label="Bytes by module"></div>'
    sub = "Width is bytes of the tensors that are alive, below the module that made or owns them. Click a module to go into it."
    return card("modules-card", 'Where in the model <span data-moment="1"></span>', body, sub=sub)


def figure(name: str, title: str, sub: str, label: str) -> str:
    return card(
        f"{name}-card",
        title,
        f'<div class="fig" id="{name}" data-figure="{name}" role="group" aria-label="{esc(label)}"></div>',
        sub=sub,
    )


def actions(plan: Plan, *, with_source: bool = True) -> str:
    """What the plan does, tensor by tensor, and about the run as a whole."""
    frame = frames.actions(plan)
    rows = [
        [
            Cell(row.label, html=f'<span>{esc(row.label)}</span>{f"<small><code>{esc(row.line)}</code></small>" if row.line and with_source else ""}'),
            Cell(row.does, html=f'<span class="does">{esc(row.does)}</span>'), size(row.size_bytes), size(row.saved_bytes), time(row.cost_ms),
            Cell(row.why, html=f'<span class="why">{esc(row.why)}</span>'),
        ]
        for row in frame.head(_MOST_ROWS).itertuples()
    ]  # fmt: skip
    heads = ("Tensor", "What is done", "Size", "Off the peak", "Time added", "Why")
    whole = "".join(
        f"<p><b>{esc(each.what[:1].upper() + each.what[1:])}</b>: {esc(each.why, 400)}. {format_bytes(each.saved_bytes)} off the peak."
        f"{'' if each.can_be_applied else ' Advice only: memopt apply does not do it.'}</p>"
        for each in plan.script_actions
    )
    rest = len(frame) - _MOST_ROWS
    more = f'<p class="sub">{rest} smaller actions are in the plan file.</p>' if rest > 0 else ""
    body = (
        whole
        + (
            table(heads, rows, "Actions of the plan")
            if rows
            else ""
            if whole
            else "<p>No tensor has to move.</p>"
        )
        + more
    )
    return card(
        "plan",
        "What the plan does",
        body,
        sub=f"By the strategy {esc(plan.strategy)}, largest saving first.",
        long=True,
    )


def lints(found: Sequence[Lint], source: Source | None) -> str:
    """What the script itself could do better, with its lines; without a `source` no line is named."""
    parts = []
    for each in found:
        lines = "".join(
            f"<span{' class=hit' if hit else ''}><i>{number}</i>{esc(text, 160)}</span>"
            for number, text, hit in (source.around(each.line) if source else [])
        )
        where = f"<code>{esc(each.line)}</code>" if each.line and source else ""
        parts.append(
            f'<div class="lint"><div><span class="size">{format_bytes(each.size_bytes)}</span><br>{where}</div>'
            f'<div><p><b>{esc(each.name)}</b>: {esc(each.what, 400)}.</p><p class="try">Try: {esc(each.try_, 400)}</p>'
            f"{f'<pre class=src>{lines}</pre>' if lines else ''}</div></div>"
        )
    sub = "Each finding is memory that no plan should have to win back."
    return card("lints", "Worth changing in the script", "".join(parts), sub=sub, long=True)


def outcome(found: Outcome) -> str:
    frame = frames.outcome(found)
    rows = []
    for name, shown in (("peak_bytes", size), ("step_ms", time)):
        values = frame.loc[name]
        row: list[Cell] = [Cell({"peak_bytes": "Peak", "step_ms": "Step"}[name])]
        row += [
            shown(None if values[column] != values[column] else float(values[column]))
            for column in frame.columns
        ]
        rows.append(row)
    counts = found.actions
    words = f"{counts.planned} actions planned, {counts.done} done, {counts.skipped} skipped; the run left the profile {found.divergences} times."
    return card(
        "outcome",
        "What the run under the plan came to",
        table(("Figure", "Without the plan", "Predicted", "Measured"), rows, "Outcome"),
        sub=words,
    )


def estimate(found: dict[str, Any]) -> str:
    """What an estimate's peak is made of, and where it fits."""
    parts = [("By kind", "by_category"), ("By module", "by_module")]
    tables = ""
    for title, key in parts:
        sizes = {str(k): int(v) for k, v in found[key].items() if isinstance(v, int)}
        total = sum(sizes.values()) or 1
        first = list(sizes.items())[:_MOST_PARTS]
        rest = sum(sizes.values()) - sum(amount for _, amount in first)
        if rest > 0:
            first.append((f"{len(sizes) - len(first)} more", rest))
        rows = [
            [Cell(name), size(amount), Cell(f"{100 * amount / total:.1f} %", 100 * amount / total)]
            for name, amount in first
        ]
        tables += f"<div><h3>{title}</h3>{table(('What', 'Bytes', 'Share'), rows, title)}</div>"
    body = f'<div class="pair">{tables}</div>'
    fits = [fit for fit in found["fits"] if isinstance(fit, dict)]
    if fits:
        words = {"yes": "fits", "tight": "fits only just", "no": "does not fit"}
        rows = [
            [
                Cell(str(f.get("name"))),
                size(f.get("memory_bytes", 0)),
                Cell(words.get(str(f.get("verdict")), "?")),
            ]
            for f in fits
        ]
        body += f"<h3>Where it fits</h3>{table(('GPU', 'Memory', 'Verdict'), rows, 'GPUs')}"
    sub = (
        f"At the peak, in the {esc(found.get('peak_phase', ''))}, while {esc(found['peak_op'])} runs."
        if found.get("peak_op")
        else ""
    )
    return card("estimate", "What the estimate is made of", body, sub=sub, long=True)


def benchmark(name: str, title: str, frame: Any) -> str:
    """The cases of a benchmark; columns that no case has are left out."""
    shapes = {"plain_bytes": ("Without the plan", size), "predicted_bytes": ("Predicted", size), "peak_bytes": ("Measured peak", size),
              "reserved_bytes": ("Reserved", size), "step_ms": ("Step", time)}  # fmt: skip
    used = {column: shape for column, shape in shapes.items() if frame[column].notna().any()}
    rows = [
        [Cell(row["job"]), Cell(row["case"]), *(shown_as(None if row[column] != row[column] else row[column]) for column, (_, shown_as) in used.items()), Cell(row["result"])]
        for row in frame.head(_MOST_ROWS).to_dict("records")
    ]  # fmt: skip
    heads = ("Job", "Case", *(head for head, _ in used.values()), "How it ended")
    more = f"{len(frame) - _MOST_ROWS} more cases are in the file." if len(frame) > _MOST_ROWS else ""
    return card(name, f"Benchmark {esc(title)}", table(heads, rows, "Cases"), sub=more, long=True)


def delta(a: Run, b: Run, *, with_source: bool = True) -> str:
    """What became more and what less at the peak, by kind, module and line."""
    tables = ""
    before, after = (frames.tensors(run.trace)[lambda f: f.at_peak] for run in (a, b))
    parts = [
        ("By kind", "category"),
        ("By module", "module"),
        *([("By line", "line")] if with_source else []),
    ]
    for title, by in parts:
        rows = [
            [Cell(name or f"no {by}"), size(x), size(y), _change(y - x)]
            for name, x, y in changes(before, after, by)[:14]
        ]
        tables += f"<div><h3>{title}</h3>{table(('What', a.name, b.name, 'Change'), rows, title)}</div>"
    return card(
        "delta",
        "What changed at the peak",
        f'<div class="pair">{tables}</div>',
        sub="Largest change first.",
        long=True,
    )


def changes(before: Any, after: Any, by: str) -> list[tuple[str, int, int]]:
    """(name, bytes before, bytes after) of what differs, by the column `by`; the largest change first."""
    import pandas

    both = pandas.concat([frames.sums(before, by), frames.sums(after, by)], axis=1).fillna(0).astype("int64")
    rows = [
        (str(name), int(x), int(y)) for name, (x, y) in zip(both.index, both.to_numpy().tolist(), strict=True)
    ]
    return sorted(rows, key=lambda row: (-abs(row[2] - row[1]), row[0]))


def _change(amount: int) -> Cell:
    if not amount:
        return Cell("same", 0.0)
    sign = "+" if amount > 0 else "−"
    tone = "delta-up" if amount > 0 else "delta-down"
    return Cell("", float(amount), f'<span class="{tone}">{sign}{format_bytes(abs(amount))}</span>')


HELP = """<details><summary>How to read this</summary><dl class="help">
<dt>Peak</dt><dd>The most bytes of tensors that are on the device at once during one steady iteration. That is what has to fit, with what the allocator and the CUDA context take besides.</dd>
<dt>Kinds</dt><dd>Parameters, buffers and optimizer state stay for the whole run. Gradients come in the backward. Activations are what the forward saves for the backward. Temporaries live for an op or two; workspace is what kernels use and no tensor explains.</dd>
<dt>What a plan does</dt><dd>Swap: the tensor is copied to the host's memory or the disk, and back before it is needed. Recompute: it is let go, and made again from what is kept. Compress: only what the backward reads of it is held, without loss. Drop: nobody reads it again. All others are kept.</dd>
<dt>Op</dt><dd>One operator of PyTorch's, such as a matrix product; a step is a few hundred to some ten thousand of them, numbered as they run.</dd>
<dt>Allocated, reserved</dt><dd>Allocated is what tensors have. Reserved is what PyTorch's allocator has taken from the driver for them, in segments: that is what nvidia-smi shows, with the CUDA context. The difference is rounding and free pieces (fragmentation).</dd>
<dt>Idle</dt><dd>For so long only autograd holds the tensor: it takes room and nobody reads it. That is what swapping, recomputing and compressing win back.</dd>
<dt>To recompute, to swap</dt><dd>What making the tensor again, or copying it out and back, would take. Copies can hide behind computing; recomputing cannot.</dd>
<dt>Off the peak</dt><dd>By how much the plan's peak would rise without this one action. Savings do not add up: several tensors may have to go together before the peak falls.</dd>
<dt>Keys</dt><dd><kbd>/</kbd> search, <kbd>p</kbd> peak, <kbd>[</kbd> <kbd>]</kbd> one op earlier or later, <kbd>0</kbd> whole step, <kbd>Esc</kbd> lets a tensor go. The address keeps what is looked at: copy it to show somebody else the same.</dd>
</dl></details>"""


def about(files: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<dt>{esc(name)}</dt><dd class=file>{esc(value, 500)}</dd>" for name, value in facts if value
    )
    shown = ", ".join(esc(name) for name in files)
    return card(
        "about",
        "About this report",
        f"{HELP}<details><summary>What it was made from</summary><dl class=help><dt>Files</dt><dd class=file>{shown}</dd>{rows}</dl></details>",
    )
