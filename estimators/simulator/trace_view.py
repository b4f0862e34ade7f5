"""A trace decoded to arrays, with what planners and the simulator ask of it again and again."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopt.estimators.simulator.costs import pace_of, replay_ms
from memopt.estimators.simulator.early import early_uses
from memopt.estimators.simulator.in_backward import why_not
from memopt.estimators.simulator.saved import Part, left_until
from memopt.estimators.simulator.saved import Saved as Saved
from memopt.estimators.simulator.weights_away import weights_away
from memopt.trace import CATEGORIES, COPIES, PHASES, RANDOM, REPLAYABLE, Trace
from memopt.value_facts import ValueFacts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FORWARD = PHASES.index("forward")
_SUM = "aten.sum.dim_IntList"
_LONG_PART, _PARTS_OF_ALL = 8, 50
"""A time of more ops than that, and of more than this part of all, is worth being away once more."""
_MOST_SEEN_LONGER_MS = 0.025
"""By which an op is recorded as longer than it is: 26 us in a recurrent model of 13,500 ops, 11 in one of 3,500."""
_LEAST_OF_SEEN = 0.25
"""Of its recorded time, which each op takes in any case."""
_RANDOM_STATE_BYTES = 5056
"""A CPU generator's state, kept for every recorded op that draws random numbers."""


def unwatched_ms(trace: Trace) -> Floats:
    """Per op: what it takes when nobody looks. A recorded one is called from Python, with memopt's own code between ops in the caches: where
    all take more than the plain step that was timed, each is shorter by the same time, as far as that goes, and then by the same part."""
    seen_ms: Floats = np.array(trace.ops.time_us, dtype=np.float64) / 1000
    over_ms = float(seen_ms.sum()) - trace.step_ms
    if trace.device.kind != "cpu" or trace.step_ms <= 0 or over_ms <= 0:
        return seen_ms
    each_ms = min(over_ms / len(seen_ms), _MOST_SEEN_LONGER_MS)
    found = np.maximum(seen_ms - each_ms, _LEAST_OF_SEEN * seen_ms)
    return found * min(1.0, trace.step_ms / float(found.sum()))


class TraceView:
    """Columns of `trace` as NumPy arrays and the derived tables. Times in ms, positions are op numbers."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.n = trace.op_count
        self.shared: dict[object, Any] = {}
        """What problems on this view have found out, for others on it, by what it depends on."""
        ops, storages = trace.ops, trace.storages
        self.live: Ints = np.array(ops.live_bytes, dtype=np.int64)
        self.extra: Ints = np.array(ops.extra_bytes, dtype=np.int64)
        self.workspace: Ints = np.array(ops.workspace_bytes, dtype=np.int64)
        self.high: Ints = self.live + self.extra
        self.op_ms = unwatched_ms(trace)
        self.phase: Ints = np.array(ops.phase, dtype=np.int64)
        self.size: Ints = np.array(storages.size_bytes, dtype=np.int64)
        self.birth: Ints = np.array(storages.birth_op, dtype=np.int64)
        self.death: Ints = np.array(storages.death_op, dtype=np.int64)
        self.value_storage = trace.values.storage
        self.value_producer = trace.values.producer
        self.start_ms: Floats = self._start_ms()

    @cached_property
    def stays_after_backward(self) -> str:
        """Why the optimizer cannot step inside backward; empty when it can."""
        return why_not(self.trace)

    def _start_ms(self) -> Floats:
        """When each op starts in a plain step: op times in order, the rest of the step spread in proportion."""
        total = float(self.op_ms.sum())
        scale = max(1.0, self.trace.step_ms / total) if total > 0 else 1.0
        ends = np.cumsum(self.op_ms) * scale
        return np.concatenate([[0.0], ends[:-1]]) if self.n else ends

    @cached_property
    def pace(self) -> float:
        """Of memopt's own code in this script."""
        return pace_of(self.trace)

    @cached_property
    def replay_ms(self) -> list[float]:
        """Per op: what running it again takes, and remembering it."""
        own_ms = replay_ms(self.trace.device) * self.pace
        return [float(ms) + own_ms for ms in self.op_ms]

    @cached_property
    def reads(self) -> list[list[int]]:
        return [self.trace.ops.reads.row(op) for op in range(self.n)]

    @cached_property
    def reads_reversed(self) -> list[list[int]]:
        """For walks with a stack."""
        return [row[::-1] for row in self.reads]

    @cached_property
    def writes(self) -> list[list[int]]:
        return [self.trace.ops.writes.row(op) for op in range(self.n)]

    @cached_property
    def replayable(self) -> list[bool]:
        """Per op: may a forward op run again in backward?"""
        ops = self.trace.ops
        return [
            bool(flag & REPLAYABLE) and phase == _FORWARD
            for flag, phase in zip(ops.flags, ops.phase, strict=True)
        ]

    @cached_property
    def node_end(self) -> list[int]:
        """Per op: in backward the last op of its node, which holds until then what it has unpacked; elsewhere the op. Not sums at the end:
        autograd fits gradients to their inputs so (a bias), when the node's own function is over."""
        trace, found = self.trace, [*range(self.n)]
        ops = trace.ops
        for op in range(self.n - 2, -1, -1):
            node, last = (ops.forward_op[op], ops.phase[op]), op + 1
            if node[0] >= 0 and node == (ops.forward_op[last], ops.phase[last]):
                ends_in_sum = found[last] == last and trace.op_name(last) == _SUM
                found[op] = op if ends_in_sum else found[last]
        return found

    @cached_property
    def random(self) -> list[bool]:
        return [bool(flag & RANDOM) for flag in self.trace.ops.flags]

    @cached_property
    def copies(self) -> dict[int, list[int]]:
        """Value that autograd does not save -> values that forward made by copying it, byte for byte: these make it again, too."""
        found: dict[int, list[int]] = defaultdict(list)
        for op, (flags, phase) in enumerate(zip(self.trace.ops.flags, self.trace.ops.phase, strict=True)):
            if flags & COPIES and phase == _FORWARD and len(self.reads[op]) == len(self.writes[op]) == 1:
                value = self.reads[op][0]
                saved = self.saved.get(self.value_storage[value])
                if saved is None or saved.value != value:
                    found[value].append(self.writes[op][0])
        return found

    @cached_property
    def value_times(self) -> dict[int, list[tuple[int, int]]]:
        """Storage -> (op that wrote it, value), in order; -1 for the version from before."""
        times: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for value, (storage, producer) in enumerate(
            zip(self.value_storage, self.value_producer, strict=True)
        ):
            times[storage].append((producer, value))
        return times

    @cached_property
    def next_write(self) -> list[int]:
        """Per value: the op that overwrites it, the op count if none does."""
        over = [self.n] * len(self.value_storage)
        for versions in self.value_times.values():
            for (_, value), (writer, _) in pairwise(versions):
                over[value] = writer
        return over

    @cached_property
    def intact(self) -> list[tuple[int, int]]:
        """Per value: the op that makes its storage, and the last op before which that is alive and not overwritten."""
        birth, death = self.birth.tolist(), self.death.tolist()
        return [
            (birth[storage], min(death[storage], over))
            for storage, over in zip(self.value_storage, self.next_write, strict=True)
        ]

    @cached_property
    def saved(self) -> dict[int, Saved]:
        """Every storage that autograd saved and that is not a parameter, buffer, gradient or state; and weights that may be away."""
        slots = self.trace.slots
        by_storage: dict[int, list[int]] = defaultdict(list)
        for slot, storage in enumerate(slots.storage):
            by_storage[storage].append(slot)
        kept = {CATEGORIES.index(name) for name in ("parameter", "buffer", "gradient", "optimizer state")}
        found = {}
        for storage, rows in by_storage.items():
            if self.trace.storages.category[storage] not in kept and self.birth[storage] >= 0:
                found[storage] = self._saved(storage, rows)
        return found | weights_away(self.trace, self.value_times, self.reads)

    @cached_property
    def unasked(self) -> frozenset[int]:
        """Saved storages that no backward call asks for."""
        every = self.saved.values()
        return frozenset(each.storage for each in every if each.first_use >= self.n and not each.is_weight)

    @cached_property
    def left_until(self) -> dict[int, int]:
        """Saved storage that outlives the iteration -> the op of the next one after which it goes; -1 where that is not known."""
        return left_until(self.trace, self.saved)

    @cached_property
    def first_unpacked(self) -> dict[int, int]:
        """Op -> a slot that is unpacked before it, for the first time: a graph that is kept, or made again, unpacks twice."""
        found: dict[int, int] = {}
        for slot in range(len(self.trace.slots.storage)):
            unpacks = self.trace.slots.unpacks.row(slot)
            if unpacks:
                found.setdefault(unpacks[0], slot)
        return found

    @cached_property
    def early(self) -> dict[int, Saved]:
        """Storages some of whose sources go before their own consumer asks, as if they were asked for at the last moment at which all are
        there: the slices of one product, of which one has its backward first."""
        return early_uses(
            self.saved, self.value_producer, self.value_storage, self.reads, self.first_unpacked
        )

    def asked_as(self, storage: int, *, early: bool) -> Saved:
        """What is saved of it and when it is asked for: by its own consumer, or `early` where that can be."""
        return self.early.get(storage, self.saved[storage]) if early else self.saved[storage]

    @cached_property
    def value_facts(self) -> dict[int, ValueFacts]:
        """What the profile found of a storage's values."""
        return {facts.storage: facts for facts in self.trace.value_facts}

    def _saved(self, storage: int, rows: list[int]) -> Saved:
        slots = self.trace.slots
        uses = sorted(op for slot in rows for op in slots.unpacks.row(slot))
        values = {slots.value[slot] for slot in rows}
        acted = min(map(self._saved_by, rows))
        packed = min(slots.packed_before[slot] for slot in rows)
        held_until = self.trace.storages.only_saved_from[storage]
        never_free = self.n
        gone = (
            max(held_until, max(slots.packed_before[slot] for slot in rows) - 1)
            if held_until >= 0
            else never_free
        )
        leaves_after = self._leaves_after(rows, uses, gone)
        last_version = self._written_in_parts(storage, rows, gone) if len(values) > 1 else None
        if last_version is not None:
            values, leaves_after = {last_version}, gone
        if leaves_after >= 0:
            uses = [op for op in uses if op > leaves_after]
            acted = packed = leaves_after
            gone = max(gone, leaves_after)
        return Saved(
            storage=storage,
            size_bytes=int(self.size[storage]),
            slots=tuple(rows),
            value=values.pop() if len(values) == 1 else -1,
            packed_op=packed,
            acted_op=acted,
            gone_after=gone,
            first_use=uses[0] if uses else self.n,
            last_use=uses[-1] if uses else self.n,
            order=self._order(rows, uses),
            release=int(self.death[storage]),
            plain=all(slots.plain[slot] for slot in rows),
            leaves_after=leaves_after,
            written_in_parts=last_version is not None,
            parts=self._parts(storage, rows),
        )

    def _written_in_parts(self, storage: int, rows: list[int], gone: int) -> int | None:
        """The last version of a storage of which slots saved several; None where it may still be written once `gone` has run, after which nobody
        but autograd holds it. What was saved of it is in there: autograd refuses a tensor that was written since."""
        facts, times = self.trace.facts, self.value_times[storage]
        asked_again = facts.get("create_graph", 0) or facts.get("keep_graph", 0)
        if asked_again or gone >= self.n or self.phase[gone] != _FORWARD or times[-1][0] > gone:
            return None
        return times[-1][1] if all(self.trace.slots.value[slot] >= 0 for slot in rows) else None

    def _saved_by(self, slot: int) -> int:
        """The op that saves it: it reads what it saves, or has made it."""
        slots = self.trace.slots
        return slots.packed_before[slot] - slots.is_output(slot)

    def _parts(self, storage: int, rows: list[int]) -> tuple[Part, ...]:
        """The times between those that ask for it, and between these and the next that saves it, where graphs are kept and there is a long one
        after the first."""
        facts, storages, slots = self.trace.facts, self.trace.storages, self.trace.slots
        if not (facts.get("create_graph", 0) or facts.get("keep_graph", 0)):
            return ()
        before = storages.left_before.row(storage) if storages.left_before is not None else []
        left = sorted({*before, storages.only_saved_from[storage]} - {-1})
        uses = sorted({op for slot in rows for op in slots.unpacks.row(slot) if op < self.n})
        packs = sorted(map(self._saved_by, rows))
        found: list[Part] = []
        for begin, following in zip(left, [*left[1:], self.n], strict=False):
            saved_again = next((op for op in packs if op > begin), self.n)
            at = begin
            for use in (op for op in uses if begin < op <= saved_again):
                end = self.node_end[use]
                if at + 1 < use:
                    found.append(Part(at, use, end))
                elif found:
                    found[-1] = dataclasses.replace(found[-1], until=max(end, found[-1].until))
                at = max(at, end)
            if found and saved_again < self.n:
                found[-1] = dataclasses.replace(found[-1], until=following)
        long = max(_LONG_PART, self.n // _PARTS_OF_ALL)
        return tuple(found) if any(part.first_use - part.gone_after > long for part in found[1:]) else ()

    def _order(self, rows: list[int], uses: list[int]) -> int:
        """Among what is asked for at the first of `uses`, where it comes; -1: not known."""
        slots = self.trace.slots
        if not slots.unpack_order or not uses:
            return -1
        asked = (slot for slot in rows if slots.unpacks.row(slot) and slots.unpacks.row(slot)[0] >= uses[0])
        return min((slots.unpack_order[slot] for slot in asked), default=-1)

    def _leaves_after(self, rows: list[int], uses: list[int], gone: int) -> int:
        """Where a backward call that makes a graph asks for it, and the longest time until it is asked for again is after that: the op at whose
        end that time begins; else -1. Preferred are times after which nobody asks twice, who would find it gone the second time."""
        if not self.trace.facts.get("create_graph", 0) or not uses:
            return -1
        slots = self.trace.slots
        last = max(map(self._saved_by, rows))
        asked = {self.node_end[op] for op in uses if op < self.n and self.phase[op] == _FORWARD}
        longest, found = (False, 0.0), -1
        for op in sorted(asked | {last}):
            following = next((use for use in uses if use > op), self.n)
            if not last <= op < following < self.n or self.phase[op] != _FORWARD:
                continue
            free_ms = float(self.start_ms[following] - self.start_ms[min(max(op, gone) + 1, self.n - 1)])
            once = all(sum(use > op for use in slots.unpacks.row(slot)) < 2 for slot in rows)
            if free_ms > 0 and (once, free_ms) > longest:
                longest, found = (once, free_ms), op
        return found if found >= uses[0] else -1

    def slot_attributes(self, slot: int) -> dict[str, Any]:
        """What the node of `slot` holds besides tensors."""
        text = self.trace.strings[self.trace.slots.attributes[slot]]
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def record_bytes(self, op: int) -> int:
        """What remembering `op` for a replay costs besides its inputs."""
        return _RANDOM_STATE_BYTES if self.random[op] else 0
