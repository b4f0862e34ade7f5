"""What a planning rule may ask of a recorded profile and of a plain graph alike: which storages may be away when, and what is on the device.

A rule that asks nothing else is told once (`Strategy.boards`): it orders absences, and the board finds how many of them it takes. What only
one of the two plan languages can say (codecs and moments of unpacking; an op that runs again) is asked of `Problem` or `GraphProblem`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Choice = TypeVar("Choice", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A storage that may be in another tier while nobody uses it. Moments are ops of a profile, runs of a graph."""

    storage: int
    """On a graph: the tensor."""
    size_bytes: int
    made: int
    """When it is made; on a profile: first saved."""
    here: slice
    """When it takes memory, if it stays."""
    away: slice
    """Of these moments, those between its last use before and the next one."""


class Board(Protocol[Choice]):
    """A profile or a graph, and what is to be met. A choice is what its judge can price: decisions, or copies."""

    @property
    def absences(self) -> Sequence[Absence]:
        """One a storage, the longest, in the order in which they begin."""

    @property
    def load_bytes(self) -> NDArray[np.int64]:
        """What is on the device at each moment without a plan."""

    @property
    def target_bytes(self) -> int:
        """The most that may be there."""

    def until_it_fits(self, order: Iterable[Absence]) -> Choice:
        """As many of these, one after the other, as are needed."""
