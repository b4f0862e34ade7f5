"""Recording: which storages a run allocated and freed, in order, as plain data. No torch."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memopt.estimators.allocator.replay import EMPTY_CACHE
from memopt.units import format_bytes


@dataclass(slots=True)
class StorageRow:
    """One allocation. `category` is one of `memopt.trace.CATEGORIES`, or empty until `classify` has looked at its life."""

    size_bytes: int
    category: str
    phase: str
    module: str
    op: str
    birth_op: int
    label: str = ""
    ordinal: int = 0
    """Which of several GPUs it lies on, as in `cuda:1`."""
    stream: int = 0
    """The CUDA stream it was allocated on; a freed block serves that stream only."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When storages of a category are allocated and released, DNNMem's way."""

    allocation: str
    release: str


POLICIES = {
    "parameter": Policy("ALLOC_ON_START", "RELEASE_ON_EXIT"),
    "buffer": Policy("ALLOC_ON_START", "RELEASE_ON_EXIT"),
    "optimizer state": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_EXIT"),
    "gradient": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_DEATH"),
    "input": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_DEATH"),
    "activation": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_DEATH"),
    "temporary": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_DEATH"),
    "workspace": Policy("ALLOC_ON_DEMAND", "RELEASE_ON_DEATH"),
}
"""What the recorded sequences follow: a gradient dies at `zero_grad`, an activation with its last reader, a workspace inside its op."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The storages (`rows`) and the order in which they came (`i + 1`) and went (`-(i + 1)`)."""

    target: str
    rows: list[StorageRow]
    events: list[int]
    marks: list[tuple[str, int]] = field(default_factory=list)
    """`("backward" | "step" | "empty_cache" | "end", n)`: happened after the first n events; the last one where the script ended."""
    notes: list[str] = field(default_factory=list)
    """Guesses that the run needed, and what was done differently than the script asked."""
    op_count: int = 0
    possible_bytes: int = 0
    """Most that may come on top of what is recorded: inside one op, if a library picks such a kernel; on a CPU, early batches."""
    possible: list[tuple[int, int]] = field(default_factory=list)
    """`(n, bytes)`: so much of it may be taken after the first n events, and given back before the next one."""
    bounded: list[str] = field(default_factory=list)
    """Where sizes depend on data, each told in a sentence: there, the largest were recorded."""
    lacks: list[str] = field(default_factory=list)
    """What may be needed on top of it, nobody knows how much: told in a sentence each."""
    least: Recording | None = None
    """The same run with the smallest sizes there, if it could be followed."""
    alloc_conf: str = ""
    """Allocator settings that the script's environment or the script itself made."""
    memory_fraction: float = 1.0
    """As the script set it for its process."""
    aside: list[str] = field(default_factory=list)
    """Lines (`train.py:14`) of modules' calls in threads that were not recorded."""
    backward_elsewhere: bool = False
    """Whether most of what backward passes made is on another device than the one recorded."""

    @property
    def trains_elsewhere(self) -> bool:
        """Whether what is trained is on another device than the one recorded: no parameter lies on that one, be it for a while, and
        backward passes run elsewhere. Where weights, or the optimizer's step, are offloaded to the host, those run on the device."""
        return self.backward_elsewhere and not any(row.category == "parameter" for row in self.rows)

    def allocations(self) -> Iterator[tuple[int, int, int]]:
        """`(row, bytes, stream)` for an allocation, with `-bytes` for a release, `(EMPTY_CACHE, 0, 0)` where the script
        empties the cache; empty storages are left out."""
        emptied = {at for kind, at in self.marks if kind == "empty_cache"}
        for position, event in enumerate(self.events):
            if position in emptied:
                yield EMPTY_CACHE, 0, 0
            row = abs(event) - 1
            size, stream = self.rows[row].size_bytes, self.rows[row].stream
            if size:
                yield row, size if event > 0 else -size, stream

    def at_most(self) -> Recording:
        """The recording in which everything possible is taken."""
        taken: dict[int, int] = {}
        for at, size in self.possible:
            taken[at] = max(size, taken.get(at, 0))
        rows, events, moved = list(self.rows), list[int](), list[int]()
        for position in range(len(self.events) + 1):
            moved.append(len(events))
            if position in taken:
                before = self.rows[abs(self.events[position - 1]) - 1] if position else None
                stream, ordinal = (before.stream, before.ordinal) if before else (0, 0)
                row = StorageRow(
                    taken[position], "workspace", "", "", "possible", -1, ordinal=ordinal, stream=stream
                )
                rows.append(row)
                events += [len(rows), -len(rows)]
            events += self.events[position : position + 1]
        marks = [(kind, moved[at]) for kind, at in self.marks]
        return replace(self, rows=rows, events=events, marks=marks, possible=[], possible_bytes=0)

    def peak(self, rounding_bytes: int = 1, *, after: int = 0) -> tuple[int, int]:
        """Most bytes live at once when sizes are rounded up, and after how many events; `after` the first so many only."""
        live = most = at = 0
        for position, event in enumerate(self.events):
            size = -(-self.rows[abs(event) - 1].size_bytes // rounding_bytes) * rounding_bytes
            live += size if event > 0 else -size
            if live > most and position >= after:
                most, at = live, position + 1
        return most, at

    def live_after(self, event_count: int) -> list[int]:
        """Rows that are allocated after the first `event_count` events."""
        live: dict[int, None] = {}
        for event in self.events[:event_count]:
            if event > 0:
                live[event - 1] = None
            else:
                live.pop(-event - 1, None)
        return list(live)


def on_fullest(recording: Recording) -> Recording:
    """Of a run on several GPUs what the fullest one holds: rows of the others are empty, and a note tells their peaks."""
    used = sorted({row.ordinal for row in recording.rows if row.size_bytes})
    if len(used) < 2:
        return recording
    peaks = {n: _peak_on(recording, n) for n in used}
    fullest = max(peaks, key=lambda n: peaks[n])
    rows = [row if row.ordinal == fullest else replace(row, size_bytes=0) for row in recording.rows]
    told = ", ".join(f"cuda:{n} {format_bytes(peak)}" for n, peak in peaks.items())
    note = f"{len(peaks)} GPUs are used ({told} of tensors): what is told is cuda:{fullest}, the fullest"
    return replace(recording, rows=rows, notes=[note, *recording.notes])


def _peak_on(recording: Recording, ordinal: int) -> int:
    live = most = 0
    for event in recording.events:
        row = recording.rows[abs(event) - 1]
        if row.ordinal == ordinal:
            live += row.size_bytes if event > 0 else -row.size_bytes
            most = max(most, live)
    return most


def classify(recording: Recording) -> None:
    """Fill in the categories that nobody named: activations outlive the start of a backward pass, temporaries do not."""
    starts = [at for kind, at in recording.marks if kind == "backward"]
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    for position, event in enumerate(recording.events):
        (birth if event > 0 else death)[abs(event) - 1] = position
    end = len(recording.events)
    for index, row in enumerate(recording.rows):
        if row.category:
            continue
        first = bisect.bisect_right(starts, birth.get(index, end))
        lives = first < len(starts) and starts[first] <= death.get(index, end)
        row.category = "activation" if lives and row.phase in ("forward", "other") else "temporary"
