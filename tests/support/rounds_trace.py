"""Traces of accumulated steps made by hand: the rounds of `layers_trace` one after the other, with a gradient that stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from memopt.trace import CATEGORIES, Csr, Trace
from tests.support.layers_trace import Layer, build

SHARED = 2
"""The parameter and the input are the same in all rounds."""


def accumulated(rounds: Sequence[Sequence[Layer]], *, gradient: int = 50, **changes: Any) -> Trace:
    """One step of several forward and backward passes. The last op of the first makes a gradient of `gradient` bytes, which stays.

    Storages: parameter, input, then those of each round, then the gradient.
    """
    parts = [build(layers, **changes) for layers in rounds]
    total = sum(part.op_count for part in parts)
    strings = list(dict.fromkeys(text for part in parts for text in part.strings))
    columns: dict[str, dict[str, list[Any]]] = {"ops": {}, "values": {}, "storages": {}, "slots": {}}
    ragged = {
        ("ops", "reads"),
        ("ops", "writes"),
        ("slots", "shape"),
        ("slots", "stride"),
        ("slots", "unpacks"),
    }
    offset, beyond = 0, 0
    for number, part in enumerate(parts):
        mine = _Moved(part, strings, offset, beyond, total)
        for table, found in columns.items():
            skip = SHARED if number and table in ("values", "storages") else 0
            for name in getattr(part, table).__struct_fields__:
                if rows := mine.column(table, name):
                    found.setdefault(name, []).extend(rows[skip:])
        offset += part.op_count
        beyond += part.storage_count - SHARED
    born = parts[0].op_count - 1
    storages = len(columns["storages"]["size_bytes"])
    for name, value in {"storage": storages, "producer": born, "output": 1}.items():
        columns["values"][name].append(value)
    row = {
        "size_bytes": gradient, "category": CATEGORIES.index("gradient"), "birth_op": born, "death_op": total,
        "only_saved_from": -1, "label": 0, "line": 0,
    }  # fmt: skip
    for name, value in row.items():
        columns["storages"][name].append(value)
    columns["ops"]["writes"][born] = [*columns["ops"]["writes"][born], storages]
    columns["ops"]["extra_bytes"][born] += gradient
    for op in range(born + 1, total):
        columns["ops"]["live_bytes"][op] += gradient
    tables = {
        table: replace(
            getattr(parts[0], table),
            **{name: Csr.of(rows) if (table, name) in ragged else rows for name, rows in found.items()},
        )
        for table, found in columns.items()
    }
    live, extra = columns["ops"]["live_bytes"], columns["ops"]["extra_bytes"]
    return replace(
        parts[0],
        **tables,
        strings=strings,
        step_ms=sum(part.step_ms for part in parts),
        peak_bytes=max(a + b for a, b in zip(live, extra, strict=True)),
    )


class _Moved:
    """One round's columns, in the numbers of the whole."""

    def __init__(self, part: Trace, strings: list[str], offset: int, beyond: int, total: int) -> None:
        self.part, self.strings = part, strings
        self.offset, self.beyond, self.total = offset, beyond, total

    def column(self, table: str, name: str) -> list[Any]:
        column = getattr(getattr(self.part, table), name)
        if column is None:  # of another kind of trace
            return []
        if isinstance(column, Csr):
            return [self.moved(name, column.row(row)) for row in range(len(column.starts) - 1)]
        return self.moved(name, column)

    def moved(self, name: str, items: list[Any]) -> list[Any]:
        if name in ("reads", "writes", "storage", "value"):
            return [item + self.beyond if item >= SHARED else item for item in items]
        if name in ("name", "module", "line", "label", "node", "slot", "dtype", "attributes"):
            return [self.strings.index(self.part.strings[item]) for item in items]
        if name == "death_op":
            count = self.part.op_count
            return [self.total if item == count else item + self.offset for item in items]
        if name in (
            "producer", "birth_op", "only_saved_from", "consumer", "forward_op", "packed_before", "unpacks"
        ):  # fmt: skip
            return [item + self.offset if item >= 0 else -1 for item in items]
        return list(items)
