"""What may be away between forward and backward, and when."""

from __future__ import annotations

from dataclasses import dataclass


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
    """The version that the slots saved; -1 when they saved several."""
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
    """It stays until this op has run, for a backward call that makes a graph asks for it before; -1: it leaves once it is saved."""
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
