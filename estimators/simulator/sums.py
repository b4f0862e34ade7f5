"""Sums over ops that do not depend on the order in which things are added: what is taken away again leaves no trace.

Bytes are integers. Times are multiples of 2^-28 ms (0.004 ns): sums of them are exact in a double up to 2^25 ms, nine hours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int64, np.float64)
_STEPS = 1 << 28
"""Of a millisecond."""
_MOST_MS = float(1 << 23)
"""Two hours: what takes longer, or has no end, is taken for this long, so that a few of them still add up exactly."""


def on_grid(ms: float) -> float:
    """The nearest time whose sums are exact."""
    return round(min(ms, _MOST_MS) * _STEPS) / _STEPS


@dataclass(slots=True)
class Sums(Generic[Number]):
    """One sum for each op. What is added waits in a list, since NumPy takes many at once much faster."""

    total: NDArray[Number]
    where: list[int] = field(default_factory=list)
    what: list[float] = field(default_factory=list)

    def add(self, where: int, what: float) -> None:
        self.where.append(where)
        self.what.append(what)

    def extend(self, where: Iterable[int], what: Iterable[float]) -> None:
        self.where += where
        self.what += what

    def take(self) -> bool:
        """Bring `total` up to date; was there anything to add?"""
        if not self.where:
            return False
        np.add.at(
            self.total, np.array(self.where, dtype=np.intp), np.array(self.what, dtype=self.total.dtype)
        )
        self.where.clear()
        self.what.clear()
        return True
