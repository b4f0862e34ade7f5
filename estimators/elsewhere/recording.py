"""Trace -> Recording: a recorded iteration as the sequence of storages that it allocated and freed, again and again.

What the allocator held beyond the storages that were seen (tensors of libraries, rounding) becomes storages of its own, so
that the sequence's peak is the profile's, to the byte.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from memopt.estimators.recording import Recording, StorageRow
from memopt.trace import CATEGORIES, PHASES, Trace

_BLOCK_BYTES = 512
"""What the CUDA allocator rounds to; its counts of live bytes hold the rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Bytes of one iteration: by storage, by op, and before the first and after the last op."""

    storage_bytes: list[int]
    workspace_bytes: list[int]
    """While the op runs, besides its outputs."""
    unseen_bytes: list[int]
    """When the op starts, in no storage of the trace."""
    before_bytes: int
    """In no storage, before the first op only."""
    after_bytes: int
    """In no storage, after the last op: what the peak needs that no op reached."""


def amounts_of(trace: Trace) -> Amounts:
    """What the iteration took, as recorded."""
    sizes = trace.storages.size_bytes
    step = _BLOCK_BYTES if trace.device.kind == "cuda" else 1
    rounded = [-(-size // step) * step for size in sizes]
    held, born = held_bytes(trace, rounded)
    live, extra = trace.ops.live_bytes, trace.ops.extra_bytes
    unseen = [max(0, total - seen) for total, seen in zip(live, held, strict=True)]
    work = [
        max(0, total + more - seen - rest - new)
        for total, more, seen, rest, new in zip(live, extra, held, unseen, born, strict=True)
    ]
    high = [sum(parts) for parts in zip(held, unseen, born, work, strict=True)]
    blocks = list(zip(rounded, trace.storages.birth_op, trace.storages.death_op, strict=True))
    first = sum(size for size, birth, _ in blocks if birth < 0)
    last = sum(size for size, _, death in blocks if death >= trace.op_count)
    before = max(0, trace.base_bytes - first)
    reached = max([*high, first + before, last])
    return Amounts(
        storage_bytes=list(sizes),
        workspace_bytes=work,
        unseen_bytes=unseen,
        before_bytes=before,
        after_bytes=trace.peak_bytes - last if trace.peak_bytes > reached else 0,
    )


def made_by_no_op(trace: Trace) -> list[bool]:
    """Per storage: did it appear inside the iteration without an op that wrote it?"""
    found = [birth >= 0 for birth in trace.storages.birth_op]
    for storage, producer in zip(trace.values.storage, trace.values.producer, strict=True):
        if producer >= 0 and producer == trace.storages.birth_op[storage]:
            found[storage] = False
    return found


def with_amounts(trace: Trace, amounts: Amounts) -> Trace:
    """`trace` with the bytes of `amounts`: of its storages, its ops, its base and its peak."""
    held, born = held_bytes(trace, amounts.storage_bytes)
    live = [at + more for at, more in zip(held, amounts.unseen_bytes, strict=True)]
    extra = [new + work for new, work in zip(born, amounts.workspace_bytes, strict=True)]
    first = sum(s for s, b in zip(amounts.storage_bytes, trace.storages.birth_op, strict=True) if b < 0)
    base = first + amounts.before_bytes
    return msgspec.structs.replace(
        trace,
        ops=msgspec.structs.replace(
            trace.ops, live_bytes=live, extra_bytes=extra, workspace_bytes=list(amounts.workspace_bytes)
        ),
        storages=msgspec.structs.replace(trace.storages, size_bytes=amounts.storage_bytes),
        base_bytes=base,
        peak_bytes=max([base, *(at + more for at, more in zip(live, extra, strict=True))]),
    )


def held_bytes(trace: Trace, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Bytes of the storages that are there when each op starts, and of those that it makes."""
    count = trace.op_count
    change, born = [0] * (count + 1), [0] * count
    rows = zip(sizes, trace.storages.birth_op, trace.storages.death_op, made_by_no_op(trace), strict=True)
    for size, birth, death, found in rows:
        first = max(birth if found or birth < 0 else birth + 1, 0)
        end = min(death + 1, count)
        if first < end:
            change[first] += size
            change[end] -= size
        if birth >= 0 and not found:
            born[birth] += size
    return list(accumulate(change))[:count], born


def recording_of(trace: Trace, amounts: Amounts, *, target: str, passes: int = 1) -> Recording:
    """The iteration, run `passes` times over. In later ones, what the one before left behind takes its old place."""
    writer = _Writer(trace, amounts)
    for number in range(passes):
        writer.iteration(first=number == 0)
    return Recording(
        target=target,
        rows=writer.rows,
        events=writer.events,
        marks=writer.marks,
        notes=list(trace.notes),
        op_count=trace.op_count * passes,
    )


class _Writer:
    """Writes events; rows of storages that are there now are in `held`."""

    def __init__(self, trace: Trace, amounts: Amounts) -> None:
        self.trace, self.amounts = trace, amounts
        self.rows: list[StorageRow] = []
        self.events: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.held: dict[int, int] = {}
        self.unseen: list[int] = []
        self.found = made_by_no_op(trace)
        self.births: dict[int, list[int]] = defaultdict(list)
        self.deaths: dict[int, list[int]] = defaultdict(list)
        for storage, birth in enumerate(trace.storages.birth_op):
            self.births[birth].append(storage)
        for storage, death in enumerate(trace.storages.death_op):
            self.deaths[death].append(storage)

    def iteration(self, *, first: bool) -> None:
        trace, amounts = self.trace, self.amounts
        self._start(first)
        backward = False
        for op in range(trace.op_count):
            self._release(op - 1)
            self._unseen(min(self._unseen_bytes(), amounts.unseen_bytes[op]), op)
            self._make(op, found=True)
            if not backward and PHASES[trace.ops.phase[op]] == "backward":
                backward = True
                self.marks.append(("backward", len(self.events)))
            self._unseen(amounts.unseen_bytes[op], op)
            self._make(op, found=False)
            self._free(self._hidden(amounts.workspace_bytes[op], op))
        self._release(trace.op_count - 1)
        if amounts.after_bytes:
            self._unseen(0, trace.op_count - 1)
            self._free(self._hidden(amounts.after_bytes, trace.op_count - 1))
        self.marks.append(("step", len(self.events)))

    def _start(self, first: bool) -> None:
        """Everything from before the iteration; what the last one left is taken for it where the size is the same."""
        sizes = self.amounts.storage_bytes
        left: dict[int, list[int]] = defaultdict(list)
        for storage in [s for s in self.held if self.trace.storages.birth_op[s] >= 0]:
            left[sizes[storage]].append(self.held.pop(storage))
        missing = [storage for storage in self.births[-1] if storage not in self.held]
        for storage in missing if not first else ():
            if left[sizes[storage]]:
                self.held[storage] = left[sizes[storage]].pop(0)
        for row in [row for rows in left.values() for row in rows]:
            self._free(row)
        self._unseen(min(self._unseen_bytes(), self.amounts.before_bytes), 0)
        for storage in missing:
            if storage not in self.held:
                self.held[storage] = self._allocate(storage)
        self._free(self._hidden(self.amounts.before_bytes - self._unseen_bytes(), 0))

    def _make(self, op: int, *, found: bool) -> None:
        for storage in self.births[op]:
            if self.found[storage] == found:
                self.held[storage] = self._allocate(storage)

    def _release(self, op: int) -> None:
        for storage in self.deaths[op]:
            if storage in self.held:
                self._free(self.held.pop(storage))

    def _unseen_bytes(self) -> int:
        return sum(self.rows[row].size_bytes for row in self.unseen)

    def _unseen(self, level_bytes: int, op: int) -> None:
        """Bring the bytes that no storage explains to `level_bytes`: the latest go first."""
        level = self._unseen_bytes()
        while level > level_bytes:
            row = self.unseen.pop()
            level -= self.rows[row].size_bytes
            self._free(row)
        if level < level_bytes:
            row = self._hidden(level_bytes - level, op)
            self.unseen.append(row)

    def _allocate(self, storage: int) -> int:
        trace, op = self.trace, self.trace.storages.birth_op[storage]
        return self._add(
            StorageRow(
                size_bytes=self.amounts.storage_bytes[storage],
                category=CATEGORIES[trace.storages.category[storage]],
                phase=PHASES[trace.ops.phase[op]] if op >= 0 else "other",
                module=module_of(trace, storage),
                op=trace.op_name(op) if op >= 0 else "",
                birth_op=op,
                label=trace.storage_label(storage),
            )
        )

    def _hidden(self, size_bytes: int, op: int) -> int:
        trace = self.trace
        known = 0 <= op < trace.op_count
        return self._add(
            StorageRow(
                size_bytes=size_bytes,
                category="workspace",
                phase=PHASES[trace.ops.phase[op]] if known else "other",
                module=plain_module(trace.strings[trace.ops.module[op]]) if known else "",
                op=trace.op_name(op) if known else "",
                birth_op=op,
            )
        )

    def _add(self, row: StorageRow) -> int:
        self.rows.append(row)
        self.events.append(len(self.rows))
        return len(self.rows) - 1

    def _free(self, row: int) -> None:
        self.events.append(-(row + 1))


def module_of(trace: Trace, storage: int) -> str:
    """The module that made the storage, or that the parameter belongs to whose gradient or state it is."""
    if CATEGORIES[trace.storages.category[storage]] in ("parameter", "buffer", "gradient", "optimizer state"):
        name = trace.storage_label(storage).partition(" · ")[0].rpartition(" of ")[2]
        return name.rpartition(".")[0]
    op = trace.storages.birth_op[storage]
    return plain_module(trace.strings[trace.ops.module[op]]) if op >= 0 else ""


def plain_module(call: str) -> str:
    """`GPT.blocks.0` of the module call `GPT.blocks.0#3`; empty outside any module."""
    return "" if call.startswith("@") else call.rpartition("#")[0]
