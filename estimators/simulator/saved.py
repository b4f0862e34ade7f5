"""What may be away between forward and backward, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from memopt.trace import LEFT_OVER, Trace


@dataclass(frozen=True, slots=True)
class Absence:
    """When a storage may be away; both as in `Saved`."""

    gone_after: int
    first_use: int


@dataclass(frozen=True, slots=True)
class Part(Absence):
    """One of several times at which a storage may be away."""

    until: int
    """Once it is back, it stays until this op has run."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that autograd holds for backward: when it could be gone, and when it is asked for again."""

    storage: int
    size_bytes: int
    slots: tuple[int, ...]
    value: int
    """The version that the slots saved; -1 when they saved several. The last one, where it is `written_in_parts`."""
    packed_op: int
    """First op that started after the first pack."""
    acted_op: int
    """When this op has run, memopt acts on it: the op that saved it."""
    gone_after: int
    """After this op nobody but autograd holds it; it could be away from the next op on."""
    first_use: int
    """First op that starts after the first unpack; it must be back by then. The op count when it is never unpacked."""
    last_use: int
    order: int
    """Among those with the same first use, which is asked for first."""
    release: int
    """Natural death."""
    plain: bool
    leaves_after: int = -1
    """It stays until this op has run, for a backward call that makes a graph asks for it before, or it is still written; -1: it leaves once it is
    saved."""
    written_in_parts: bool = False
    """Slots saved several versions, for ops wrote its parts one after the other (the gates of a recurrent cell): as a whole it may be swapped."""
    parts: tuple[Part, ...] = ()
    """Of one for which backward calls ask again and again, long after one another: all the times at which it may be away."""
    held_until: int = -1
    """Of one of these parts: the op after which it is away again; else -1: it stays to its release."""
    is_weight: bool = False
    """Not saved, but a weight that is not read from `gone_after` to `first_use`."""
    again: tuple[Absence, ...] = ()
    """Of a weight: where it may be away once more, for each of the iteration's other backward calls."""

    @property
    def first_gone(self) -> int:
        """`gone_after`, or that of the first part."""
        return min(self.gone_after, self.parts[0].gone_after) if self.parts else self.gone_after

    @property
    def absences(self) -> tuple[Absence, ...]:
        """All of them, in order."""
        return Absence(self.gone_after, self.first_use), *self.again


def left_until(trace: Trace, saved: Mapping[int, Saved]) -> dict[int, int]:
    """Storage of `saved` that outlives the iteration -> the op of the next one after which it goes; -1 where that is not known.

    A variable holds its graph until the next iteration gives it another; backward has not asked for it (an output that is only looked at), or
    was told to keep the graph. The next iteration does as this one did with the storages of that size that it found."""
    n, storages = trace.op_count, trace.storages
    found = [each for each in saved.values() if each.release >= n > each.gone_after and not each.is_weight]
    if not found:
        return {}
    freed: dict[int, list[int]] = defaultdict(list)
    for storage, (birth, death) in enumerate(zip(storages.birth_op, storages.death_op, strict=True)):
        if birth < 0 <= death < n and trace.storage_label(storage).startswith(LEFT_OVER):
            freed[storages.size_bytes[storage]].append(death)
    for deaths in freed.values():
        deaths.sort(reverse=True)
    until = {}
    for each in found:
        deaths = freed[each.size_bytes]
        until[each.storage] = deaths.pop() if deaths else -1  # the earliest first: no more than is certain
    return until
