"""How parameters are cut into pieces that an optimizer steps one after the other: the same for what plans a step and for what takes it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

ALIGNED = 1024
"""Elements; segments begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class Uncut:
    """A parameter: elements, bytes of one, and its kind; a piece has segments of one kind only."""

    numel: int
    itemsize: int
    kind: Hashable

    def is_larger(self, piece_bytes: int) -> bool:
        """Than a piece, so that it shares none with others."""
        return self.numel * self.itemsize > piece_bytes

    def most(self, piece_bytes: int) -> int:
        """How many elements of it a piece has at most."""
        return max(ALIGNED, piece_bytes // self.itemsize // ALIGNED * ALIGNED)

    def without_repeats(self, piece_bytes: int) -> Uncut:
        """It with no more than the first four of the equal pieces that it begins with: any three neighbours are there as before, and
        it takes no longer to look at all of them than at those of a small parameter."""
        most = self.most(piece_bytes)
        left_out = max(0, self.numel // most - 4) if self.is_larger(piece_bytes) else 0
        return replace(self, numel=self.numel - left_out * most)


Cut = tuple[int, int, int]
"""Which parameter, and which of its elements: from the first up to, not including, the second."""


def cut(parameters: Iterable[Uncut], piece_bytes: int) -> list[list[Cut]]:
    """Pieces of at most `piece_bytes`, in order. What is larger than a piece shares none with another."""
    pieces: list[list[Cut]] = []
    left, last = 0, None
    for number, each in enumerate(parameters):
        most, large = each.most(piece_bytes), each.is_larger(piece_bytes)
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
