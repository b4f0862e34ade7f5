"""Some rounds of a trace as a trace of their own, with what was on the device when each op started as it was recorded.

A plan for it is one for those rounds in the whole, decision for decision, but for copies that meet others on a link. O(ops of the rounds).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

from msgspec.structs import replace

from memopt.advisors.profiles.rounds import Round
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Csr, Ops, Slots, Storages, Trace, Values
from memopt.value_facts import ValueFacts

Table = TypeVar("Table", Ops, Values, Storages, Slots)


def trace_of(view: TraceView, rounds: Sequence[Round], time_us: Sequence[float]) -> tuple[Trace, list[int]]:
    """The trace of `rounds` (in order), whose ops take `time_us`, and the storage of the whole for each of its own."""
    kept = _Kept(view, rounds)
    columns = view.trace.ops
    ops = replace(
        _rows(columns, kept.ops),
        reads=kept.of_values(view.reads[op] for op in kept.ops),
        writes=kept.of_values(view.writes[op] for op in kept.ops),
        forward_op=[kept.exact(columns.forward_op[op]) for op in kept.ops],
        time_us=list(time_us),
    )
    total = sum(columns.time_us)
    return replace(
        view.trace,
        ops=ops,
        values=kept.values_table(),
        storages=kept.storages_table(),
        slots=kept.slots_table(),
        step_ms=view.trace.step_ms * (sum(time_us) / total if total > 0 else len(kept.ops) / view.n),
        updates=None,
        value_facts=kept.value_facts(),
    ), kept.storages


class _Kept:
    """What is left, with its new numbers."""

    def __init__(self, view: TraceView, rounds: Sequence[Round]) -> None:
        self.view, self.trace = view, view.trace
        self.begins = [each.begin for each in rounds]
        self.ends = [each.end for each in rounds]
        self.offsets = [0]
        for each in rounds:
            self.offsets.append(self.offsets[-1] + each.end - each.begin)
        self.ops = [op for each in rounds for op in range(each.begin, each.end)]
        self.slots = sorted(chain.from_iterable(each.slots for each in rounds))
        named = chain.from_iterable(view.reads[op] + view.writes[op] for op in self.ops)
        saved = (self.trace.slots.value[slot] for slot in self.slots)
        self.values = sorted({*named, *saved})
        self.storages = sorted(
            {
                *(view.value_storage[value] for value in self.values),
                *(self.trace.slots.storage[slot] for slot in self.slots),
            }
        )
        self.value_number = {value: number for number, value in enumerate(self.values)}
        self.storage_number = {storage: number for number, storage in enumerate(self.storages)}

    def last(self, op: int) -> int:
        """The last kept op at or before `op`; the new op count for what lasts until the end."""
        if op < 0:
            return -1
        if op >= self.view.n:
            return self.offsets[-1]
        place = bisect_right(self.begins, op) - 1
        return self.offsets[place] + min(op, self.ends[place] - 1) - self.begins[place] if place >= 0 else -1

    def first(self, op: int) -> int:
        """The first kept op at or after `op`."""
        place = bisect_right(self.begins, op) - 1
        return self.offsets[place] + min(op, self.ends[place]) - self.begins[place] if place >= 0 else 0

    def exact(self, op: int) -> int:
        """`op` where it is kept; else -1."""
        place = bisect_right(self.begins, op) - 1
        return self.last(op) if place >= 0 and op < self.ends[place] else -1

    def of_values(self, rows: Iterable[list[int]]) -> Csr:
        return Csr.of([[self.value_number[value] for value in row] for row in rows])

    def values_table(self) -> Values:
        """What another round made was there before."""
        columns = _rows(self.trace.values, self.values)
        return replace(
            columns,
            storage=[self.storage_number[storage] for storage in columns.storage],
            producer=[self.exact(op) for op in columns.producer],
        )

    def storages_table(self) -> Storages:
        columns, left = _rows(self.trace.storages, self.storages), self.trace.storages.left_before
        return replace(
            columns,
            birth_op=[self.last(op) for op in columns.birth_op],
            death_op=[self.last(op) for op in columns.death_op],
            only_saved_from=[self.last(op) for op in columns.only_saved_from],
            left_before=None
            if left is None
            else Csr.of([[self.last(op) for op in left.row(s)] for s in self.storages]),
        )

    def value_facts(self) -> list[ValueFacts]:
        known = self.view.value_facts
        return [replace(known[s], storage=number) for number, s in enumerate(self.storages) if s in known]

    def slots_table(self) -> Slots:
        """Nothing is to be done with what outlives its round."""
        columns = _rows(self.trace.slots, self.slots)
        birth, death = self.view.birth, self.view.death
        return replace(
            columns,
            storage=[self.storage_number[storage] for storage in columns.storage],
            value=[self.value_number[value] for value in columns.value],
            consumer=[self.exact(op) for op in columns.consumer],
            packed_before=[self.first(op) for op in columns.packed_before],
            unpacks=Csr.of([[self.first(op) for op in self.trace.slots.unpacks.row(s)] for s in self.slots]),
            plain=[
                int(plain and self._is_inside(int(birth[storage]), int(death[storage])))
                for plain, storage in zip(columns.plain, columns.storage, strict=True)
            ],
        )

    def _is_inside(self, birth: int, death: int) -> bool:
        place = bisect_right(self.begins, birth) - 1
        return place >= 0 and death < self.ends[place]


def _rows(table: Table, rows: list[int]) -> Table:
    """These rows of every column."""
    found: dict[str, Any] = {}
    for name in table.__struct_fields__:
        column = getattr(table, name)
        if isinstance(column, Csr):
            found[name] = Csr.of([column.row(row) for row in rows])
        elif column is not None:
            found[name] = [column[row] for row in rows] if column else []
    return replace(table, **found)
