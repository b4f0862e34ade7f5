"""How parameters are cut into pieces that an optimizer steps one after the other: the same for what plans a step and for what takes it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

ALIGNED = 1024
"""Elements; segments begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Uncut:
    """A parameter: elements, bytes of one, and its kind; a piece has segments of one kind only."""

    numel: int
    itemsize: int
    kind: Hashable


Cut = tuple[int, int, int]
"""Which parameter, and which of its elements: from the first up to, not including, the second."""


def cut(parameters: Iterable[Uncut], piece_bytes: int) -> list[list[Cut]]:
    """Pieces of at most `piece_bytes`, in order. What is larger than a piece shares none with another."""
    pieces: list[list[Cut]] = []
    left, last = 0, None
    for number, each in enumerate(parameters):
        most = max(ALIGNED, piece_bytes // each.itemsize // ALIGNED * ALIGNED)
        large = each.numel * each.itemsize > piece_bytes
        start = 0
        left = 0 if large else left
        while start < each.numel:
            if each.kind != last or left <= 0:
                pieces.append([])
                left, last = most, each.kind
            stop = min(start + max(left, ALIGNED), each.numel)
            if each.numel - stop < ALIGNED:
                stop = each.numel
            pieces[-1].append((number, start, stop))
            left -= -(-(stop - start) // ALIGNED) * ALIGNED
            start = stop
        left = 0 if large else left
    return pieces
