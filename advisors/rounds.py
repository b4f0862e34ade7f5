"""Where an iteration falls into rounds, such as micro-batches, be it a recorded profile or a plain graph: between two hills of memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

REPEATED = 0.7
"""Planning round by round pays when one round of each kind has at most this share of the ops."""


def valleys(hill: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The first moment after each hill, and that at which the next one begins."""
    ends = np.flatnonzero(hill[:-1] & ~hill[1:]) + 1
    starts = np.flatnonzero(~hill[:-1] & hill[1:]) + 1
    ends = ends[ends <= starts.max(initial=-1)]
    return list(zip(ends.tolist(), starts[np.searchsorted(starts, ends)].tolist(), strict=True))
