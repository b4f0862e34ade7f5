"""Reports for a person at a terminal, as rich renderables: what a profile shows, what a plan does."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from memopt.codecs.table import CODECS
from memopt.plan import Action, Plan
from memopt.reports import verdict
from memopt.reports.area import Area
from memopt.reports.page.moment import Moment, end_of, is_one_moment, open_paths, peak_of
from memopt.reports.repeated import gather, name_of, path_pattern
from memopt.reports.tables import Name, biggest_table, pairs_table, plain_table, shares_table, words
from memopt.trace import Trace
from memopt.units import format_bytes, format_ms

_WHAT_FITS = 80


def render_trace(trace: Trace, *, top: int = 10) -> RenderableType:
    """The verdict, the picture, and what fills the device at the peak (or where a partial profile was cut off)."""
    peak, end = peak_of(trace), end_of(trace)
    parts: list[RenderableType] = [
        words(verdict.of_run(trace), style="dim"),
        words(verdict.of_peak(trace, peak), style="bold"),
    ]
    if trace.partial:
        parts.append(words(f"Partial: {trace.partial.rstrip('.')}.", style="bold red"))
    if end is not None and end.op != peak.op:
        parts.append(words(verdict.of_end(trace, end), style="bold"))
    parts += [words(f"Note: {note}.") for note in trace.notes]
    if trace.op_count and not is_one_moment(trace):
        parts += [Text(), Area(trace)]
    return Group(*parts, *_moment(trace, end or peak, top, at="when it ended" if end else "at the peak"))


def _moment(trace: Trace, moment: Moment, top: int, *, at: str) -> list[RenderableType]:
    total = moment.total_bytes
    parts: list[RenderableType] = [
        Text(),
        shares_table(f"What fills the device {at}", "kind", moment.by_category, total, 10, colors=True),
        shares_table(f"By module {at}", "module", _by_alike_modules(moment, max(top, 8)), total, max(top, 8)),
    ]
    if moment.by_line:
        parts.append(shares_table(f"By line {at}", "line", moment.by_line, total, top))
    parts.append(_Biggest(moment, top))
    before = [] if is_one_moment(trace) else [held for held in moment.held if held.born_op < 0]
    if before:
        sizes: dict[str, int] = defaultdict(int)
        for held in before:
            sizes[held.category] += held.size_bytes
        parts_of = ", ".join(
            f"{format_bytes(size)} {name}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        )
        parts.append(
            words(f"There before the iteration: {format_bytes(moment.from_before_bytes)} ({parts_of}).")
        )
    return parts


def _by_alike_modules(moment: Moment, most: int) -> dict[str, int]:
    """Module -> bytes below it, modules that differ in a layer's number only as one, largest first."""
    paths = [path for held in moment.held if (path := held.module)]
    sizes = open_paths([(path_pattern(held.module), held.size_bytes) for held in moment.held], most)
    named: dict[str, int] = {}
    for pattern, size in sizes.items():
        depth = pattern.count(".") + 1
        heads = {".".join(path.split(".")[:depth]) for path in paths}
        alike = sorted(head for head in heads if path_pattern(head) == pattern)
        named[name_of(alike) if alike else pattern] = size
    return named


class _Biggest:
    """The table of the biggest tensors, as wide as the terminal allows."""

    def __init__(self, moment: Moment, top: int) -> None:
        self._moment = moment
        self._top = top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield biggest_table(self._moment.held, self._moment.total_bytes, self._top, options.max_width)


def render_plan(plan: Plan, *, top: int = 10) -> RenderableType:
    """The verdict, totals by kind, and the biggest actions with their reasons."""
    parts: list[RenderableType] = [
        words(f"{' '.join(plan.script.argv)}: plan by {plan.strategy} from {plan.profile}", style="dim"),
        words(verdict.of_plan(plan), style="bold"),
    ]
    parts += [words(f"Note: {note}.") for note in plan.notes]
    for each in plan.script_actions:
        applied = "" if each.can_be_applied else " (advice only: memopt apply refuses it)"
        parts.append(
            words(f"{each.kind.capitalize()}: {each.what}{applied}. {each.why[:1].upper()}{each.why[1:]}.")
        )
    if not plan.actions:
        return Group(*parts, *([] if plan.script_actions else [Text("No action is needed.")]))
    return Group(*parts, Text(), _kinds(plan), _Actions(plan, top))


def what_it_does(action: Action) -> str:
    """`swap to disk`, `compress (to 1 bit)`, `recompute (3 ops)`."""
    if action.kind == "swap":
        return f"swap to {action.tier}"
    if action.kind == "compress":
        return f"compress ({CODECS[action.codec].effect if action.codec in CODECS else action.codec})"
    if action.kind == "recompute":
        count = len(action.records)
        how = " again" if action.again else " each time" if action.each else ""
        return f"recompute{how} ({count} op{'s' if count > 1 else ''})"
    return action.kind


def _kinds(plan: Plan) -> RenderableType:
    groups: dict[str, list[Action]] = defaultdict(list)
    for action in plan.actions:
        groups[action.kind].append(action)
    rows = [
        (
            kind,
            str(len(actions)),
            format_bytes(sum(a.size_bytes for a in actions)),
            format_bytes(sum(a.saved_bytes for a in actions)),
            format_ms(sum(a.cost_ms for a in actions)),
        )
        for kind, actions in sorted(groups.items(), key=lambda item: -sum(a.saved_bytes for a in item[1]))
    ]
    return pairs_table(
        "By kind of action", ("kind", "tensors", "their size", "saved at the peak", "cost a step"), rows
    )


class _Actions:
    """The biggest actions with their reasons, those of alike layers as one; on a narrow terminal what is done stands above the reason."""

    def __init__(self, plan: Plan, top: int) -> None:
        self._ranked = sorted(plan.actions, key=lambda action: (-action.saved_bytes, -action.size_bytes))
        self._top = top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WHAT_FITS
        columns = [("size", "right"), ("saved", "right"), ("cost", "right"), ("what", "left")]
        table = plain_table(
            "Biggest actions", [*(columns if wide else columns[1:3]), ("tensor, and why", "name")]
        )
        groups = gather(self._ranked, lambda each: each.label, what_it_does)
        groups.sort(key=lambda group: -sum(each.saved_bytes for each in group[1]))
        for name, group in groups[: self._top]:
            what = what_it_does(group[0])
            alike = len({each.why for each in group}) == 1
            why = group[0].why if alike else f"the first: {group[0].why}"
            told = words(why if wide else f"{what}: {why}", style="dim")
            table.add_row(*_figures(group, what if wide else None), Group(Name(name), told))
        rest = [action for _, group in groups[self._top :] for action in group]
        if rest:
            table.add_row(*_figures(rest, "" if wide else None), Name(f"({len(rest)} more)"))
        yield table


def _figures(actions: list[Action], what: str | None) -> list[str]:
    """Size, what is saved, cost and `what`; without `what` only the two that count."""
    saved = format_bytes(sum(action.saved_bytes for action in actions))
    cost = format_ms(sum(action.cost_ms for action in actions))
    return (
        [saved, cost]
        if what is None
        else [format_bytes(sum(a.size_bytes for a in actions)), saved, cost, what]
    )
