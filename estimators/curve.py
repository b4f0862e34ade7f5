"""An estimate over its run: bytes by category after a few hundred of the allocations and releases, among them those of the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memopt.estimators.recording import Recording

MOST_POINTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Columns of one length. `at` counts allocations and releases; of each stretch of them the moment with the most bytes is kept."""

    at: list[int]
    by_category: dict[str, list[int]]
    phase: list[str]
    """Of the last allocation before."""
    steps: list[int]
    """After how many allocations and releases each optimizer step ended."""
    events: int


def curve_of(recording: Recording, peak_at: int) -> Curve:
    """The curve of `recording`; `peak_at` is the number of events after which its peak is reached."""
    events, rows = recording.events, recording.rows
    stretch = max(1, -(-len(events) // MOST_POINTS))
    live: Counter[str] = Counter()
    total, phase = 0, ""
    best: tuple[int, int, dict[str, int], str] | None = None
    kept: list[tuple[int, dict[str, int], str]] = []
    for position, event in enumerate(events, 1):
        row = rows[abs(event) - 1]
        size = row.size_bytes if event > 0 else -row.size_bytes
        live[row.category] += size
        total += size
        phase = row.phase if event > 0 else phase
        if position == peak_at or best is None or (total > best[1] and best[0] != peak_at):
            best = (position, total, dict(live), phase)
        if position % stretch == 0 or position == len(events):
            kept.append((best[0], best[2], best[3]))
            best = None
    names = [name for name in live if any(parts.get(name) for _, parts, _ in kept)]
    return Curve(
        at=[at for at, _, _ in kept],
        by_category={name: [parts.get(name, 0) for _, parts, _ in kept] for name in names},
        phase=[name for _, _, name in kept],
        steps=[at for kind, at in recording.marks if kind == "step"],
        events=len(events),
    )
