"""What a fake run takes and gives back, in order: rows for storages, events for their births and deaths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from memopt.estimators.recording import StorageRow


class Enough(BaseException):
    """Raised through a script when enough was seen of it."""


class Point(NamedTuple):
    """How far a recording has come."""

    rows: int
    events: int
    op_count: int
    possible_bytes: int


class Ledger:
    """The rows and events of one recording, with the bytes that live."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[StorageRow] = []
        self.events: list[int] = []
        """`i + 1` when row i is allocated, `-(i + 1)` when it is freed."""
        self.marks: list[tuple[str, int]] = []
        self.live_bytes = self.peak_bytes = self.possible_bytes = 0
        self.possible: list[tuple[int, int]] = []
        """`(n, bytes)`: what may be taken for a while after the first n events."""
        self.op_count = 0
        self.op_limit = 0
        """The op at which the run has seen enough; 0: none."""
        self.batches_enough: int | None = None
        """How many more batches of a loader that has many are worth following; None: all."""
        self.memory_fraction = 1.0
        self.alloc_conf = ""
        self.ordinal = 0
        """Which GPU the op being run is on."""
        self.phase = "forward"
        self.where: Callable[[], str] = lambda: ""
        self.on_stream: Callable[[], int] = lambda: 0

    def point(self) -> Point:
        """How far the recording has come by now."""
        return Point(len(self.rows), len(self.events), self.op_count, self.possible_bytes)

    def told(self, until: Point | None) -> dict[str, Any]:
        """The rows and events as a `Recording` has them, up to a point."""
        end = until or self.point()
        marks = [
            (kind, at) for kind, at in self.marks if until is None or (at <= end.events and kind != "end")
        ]
        possible = [each for each in self.possible if each[0] <= end.events]
        taken = {"op_count": end.op_count, "possible_bytes": end.possible_bytes, "possible": possible}
        return {"rows": self.rows[: end.rows], "events": self.events[: end.events], "marks": marks, **taken}

    def _event(self, event: int) -> None:
        self.events.append(event)
        size = -(-self.rows[abs(event) - 1].size_bytes // 512) * 512
        self.live_bytes += size if event > 0 else -size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`, for the allocator."""
        self.marks.append(("empty_cache", len(self.events)))

    def _row(self, size_bytes: int, op: str, category: str = "") -> int:
        where, at, stream = self.where(), self.op_count, self.on_stream()
        self.rows.append(
            StorageRow(size_bytes, category, self.phase, where, op, at, ordinal=self.ordinal, stream=stream)
        )
        return len(self.rows) - 1

    def workspace(self, size_bytes: int, op: str, *, forever: bool = False) -> None:
        """Memory that a kernel takes from the allocator without a tensor to show for it."""
        if size_bytes <= 0:
            return
        index = self._row(size_bytes, op, "workspace")
        self._event(index + 1)
        if not forever:
            self._event(-(index + 1))

    def may_take(self, size_bytes: int) -> None:
        """So much may be taken, or may not, by a library inside one op or by batches ahead of their turn: told beside the recording."""
        if size_bytes > 0:
            self.possible.append((len(self.events), size_bytes))
            self.possible_bytes = max(self.possible_bytes, size_bytes)

    def workspace_later(self, op: str) -> int:
        """A workspace whose bytes are not known yet; the row to fill in."""
        index = self._row(0, op, "workspace")
        self.events += (index + 1, -(index + 1))
        return index
