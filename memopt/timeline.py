"""Timeline: bytes on the device and lanes in time, for one (trace, plan, device). Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Interval:
    """A piece of work on a lane: a replay on the compute lane, a copy on a swap lane. Times in ms."""

    lane: str
    """`compute`, `swap_out` or `swap_in`."""
    label: str
    start_ms: float
    end_ms: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the device holds and when. Arrays have one entry an op."""

    live_bytes: NDArray[np.int64]
    """When the op starts, after replays and swap-ins that it waits for."""
    high_bytes: NDArray[np.int64]
    """Most on the device from the end of the previous op to the end of this one."""
    start_ms: NDArray[np.float64]
    peak_bytes: int
    peak_op: int
    step_ms: float
    replay_ms: float
    """Time spent on ops that ran again."""
    stall_ms: float
    """Time spent waiting for copies."""
    lanes: tuple[Interval, ...] = ()
