"""What is on the device while one op runs: the storages that are alive then, and what no storage explains."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import CATEGORIES, PHASES, Trace, module_of_call

WORKSPACE = "workspace"
_SAVED_AT = re.compile(r"saved by \S+ \(\S+\) (?:at|after) (.+?)(?= · |$)")
"""How `out_of_memory` names what a node of a module's holds."""
_OWNED = {"parameter", "gradient", "optimizer state", "buffer"}


@dataclass(frozen=True, slots=True)
class Held:
    """One storage that is alive at the moment."""

    storage: int
    label: str
    category: str
    size_bytes: int
    born_op: int
    """-1: it was there before the iteration."""
    module: str
    """Path of the module that made or owns it; empty outside any."""
    line: str
    idle_ms: float
    """How long nobody but autograd holds it before backward asks for it; 0 when that never is so."""


class Moment:
    """The device while op `op` runs. `op` is -1 for a trace without ops."""

    def __init__(self, trace: Trace, op: int, total_bytes: int) -> None:
        self.trace = trace
        self.op = op
        self.total_bytes = total_bytes
        storages = trace.storages
        alive = [
            number
            for number, (birth, death) in enumerate(zip(storages.birth_op, storages.death_op, strict=True))
            if birth <= op <= death
        ]
        idle = _idle_ms(trace) if trace.op_count else {}
        self.held = sorted(
            (held(trace, number, idle.get(number, 0.0)) for number in alive),
            key=lambda held: -held.size_bytes,
        )
        self.named_bytes = sum(held.size_bytes for held in self.held)

    @property
    def workspace_bytes(self) -> int:
        """What no storage explains."""
        return max(0, self.total_bytes - self.named_bytes)

    @cached_property
    def by_category(self) -> dict[str, int]:
        """Category -> bytes, largest first; with the workspace it sums to `total_bytes`."""
        totals = _sums((held.category, held.size_bytes) for held in self.held)
        if self.workspace_bytes:
            totals[WORKSPACE] = totals.get(WORKSPACE, 0) + self.workspace_bytes
        return _largest_first(totals)

    @cached_property
    def by_line(self) -> dict[str, int]:
        """Source line -> bytes that it made; what has no line is left out."""
        return _largest_first(_sums((held.line, held.size_bytes) for held in self.held if held.line))

    def by_module(self, most: int) -> dict[str, int]:
        """Module path -> bytes below it, opened where the bytes are until there are `most` rows."""
        return open_paths([(held.module, held.size_bytes) for held in self.held], most)

    @cached_property
    def from_before_bytes(self) -> int:
        """Bytes that were there when the iteration began."""
        return sum(held.size_bytes for held in self.held if held.born_op < 0)


def peak_of(trace: Trace) -> Moment:
    """The moment of the peak."""
    return Moment(trace, peak_op(trace), trace.peak_bytes)


def peak_op(trace: Trace) -> int:
    """The first op during which the most is on the device; -1 in a trace without ops."""
    ops = trace.ops
    highs = [live + extra for live, extra in zip(ops.live_bytes, ops.extra_bytes, strict=True)]
    return max(range(len(highs)), key=highs.__getitem__, default=-1)


def end_of(trace: Trace) -> Moment | None:
    """The moment at which a partial recording was cut off; None when it was not."""
    op = trace.facts.get("stopped_at_op", -1)
    if not trace.partial or not 0 <= op < trace.op_count:
        return None
    return Moment(trace, op, trace.ops.live_bytes[op] + trace.ops.extra_bytes[op])


def is_one_moment(trace: Trace) -> bool:
    """Whether nothing was recorded: `trace` is what was found on the device when the script died."""
    return trace.op_count == 1 and trace.op_name(0) == "memopt.moment"


def phase_of(trace: Trace, op: int) -> str:
    return PHASES[trace.ops.phase[op]] if 0 <= op < trace.op_count else "before the iteration"


def module_path(key: str) -> str:
    """`GPT.blocks.0` of module call `GPT.blocks.0#3`; empty for a call outside any module."""
    return "" if key.startswith("@") else module_of_call(key)


def open_paths(sizes: list[tuple[str, int]], most: int) -> dict[str, int]:
    """Totals by dotted path, opened where the bytes are: a path is replaced by what is below it while the table stays
    short (about three times the `most` rows that are shown), or when the path alone holds more than half."""
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, size in sizes:
        groups[path.partition(".")[0]].append((path, size))
    closed: set[str] = set()
    half = sum(size for _, size in sizes) / 2
    while True:
        names = [name for name in groups if name not in closed]
        if not names:
            break
        totals = {name: sum(size for _, size in groups[name]) for name in names}
        name = max(names, key=totals.__getitem__)
        parts: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for path, size in groups[name]:
            parts[_one_deeper(name, path)].append((path, size))
        if set(parts) == {name} or (len(groups) + len(parts) > 3 * most and totals[name] <= half):
            closed.add(name)
            continue
        del groups[name]
        groups.update(parts)
        closed |= {name} & parts.keys()
    return _largest_first({name: sum(size for _, size in rows) for name, rows in groups.items()})


def _one_deeper(prefix: str, path: str) -> str:
    rest = path[len(prefix) + 1 :]
    return f"{prefix}.{rest.partition('.')[0]}" if rest else prefix


def held(trace: Trace, storage: int, idle_ms: float = 0.0) -> Held:
    """What is known of one storage."""
    storages = trace.storages
    label, birth = trace.storage_label(storage), storages.birth_op[storage]
    category = CATEGORIES[storages.category[storage]]
    if category in _OWNED and "." in label.partition(" · ")[0]:
        module = label.partition(" · ")[0].rpartition(" of ")[2].rpartition(".")[0]
    elif birth < 0:
        saved = _SAVED_AT.match(label)
        module = saved[1] if saved else ""
    else:
        module = module_path(trace.strings[trace.ops.module[birth]])
    return Held(
        storage=storage,
        label=label,
        category=category,
        size_bytes=storages.size_bytes[storage],
        born_op=birth,
        module=module,
        line=trace.strings[storages.line[storage]],
        idle_ms=idle_ms,
    )


def _idle_ms(trace: Trace) -> dict[int, float]:
    view = TraceView(trace)
    times = view.start_ms
    idle = {}
    for storage, saved in view.saved.items():
        begin, end = saved.gone_after + 1, min(saved.first_use, saved.release, view.n - 1)
        if begin < end:
            idle[storage] = float(times[end] - times[begin])
    return idle


def _sums(pairs: object) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for name, size in pairs:  # type: ignore[attr-defined]
        totals[name] += size
    return dict(totals)


def _largest_first(totals: dict[str, int]) -> dict[str, int]:
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
