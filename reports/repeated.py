"""Rows that differ only in a layer's number are one row: `layers.0-11.dropout ×12 · mul · 4×1024 fp32`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$| )|(?<=@)\d+(?=\.|$| )")
"""A part of a path that is a number: `3` of `layers.3.mlp`."""
_JOINT = " · "
_MOST_RANGES = 4
_Row = TypeVar("_Row")


def gather(
    rows: Iterable[_Row], name: Callable[[_Row], str], same: Callable[[_Row], Hashable] = lambda row: None
) -> list[tuple[str, list[_Row]]]:
    """The rows whose names differ in numbers only and that are the `same` otherwise, each group with its name, in the order of their firsts."""
    groups: dict[Hashable, list[_Row]] = {}
    for row in rows:
        groups.setdefault((path_pattern(name(row)), same(row)), []).append(row)
    return [(name_of([name(row) for row in group]), group) for group in groups.values()]


def path_pattern(path: str) -> str:
    """`Net.layers.#.act` of `Net.layers.3.act`."""
    return _NUMBER.sub("#", path)


def name_of(names: Sequence[str]) -> str:
    """One name for all: what their numbers are, and how many they are where they are several, after the place and before the op."""
    if len(names) == 1:
        return names[0]
    places = [sorted(set(map(int, column))) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    told = iter(_ranges(place) for place in places)
    place, *rest = _NUMBER.sub(lambda match: next(told), names[0]).split(_JOINT)
    return _JOINT.join([f"{place} ×{len(names)}", *rest])


def _ranges(numbers: list[int]) -> str:
    """`0-3,5` of 0, 1, 2, 3, 5; where there are many gaps, the first and the last with dots between them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > _MOST_RANGES:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
