"""The largest batch that fits: doubling, then halving the gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.errors import NotPossibleHere
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate

_MOST = 1 << 20


def largest_batch(
    estimate: Callable[[int], Estimate], say: Callable[[str], None] = lambda text: None
) -> tuple[int, Estimate]:
    """The largest batch size whose estimate fits its named device, with that estimate.

    Raises `NotPossibleHere` when not even a batch of one fits.
    """
    good: tuple[int, Estimate] | None = None
    size = 1
    while size <= _MOST:
        found = _asked(estimate, size, say)
        if not fits(found):
            break
        good = (size, found)
        size *= 2
    if good is None:
        raise NotPossibleHere(
            f"a batch of 1 does not fit: it needs {format_bytes(found.process_bytes or found.allocated_bytes)}",
            try_="memopt advise, or a larger --device",
        )
    low, high = good[0], size
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        found = _asked(estimate, middle, say)
        if fits(found):
            low, good = middle, (middle, found)
        else:
            high = middle
    return good


def _asked(estimate: Callable[[int], Estimate], size: int, say: Callable[[str], None]) -> Estimate:
    found = estimate(size)
    need = found.process_bytes or found.allocated_bytes
    say(f"batch {size}: {format_bytes(need)}, {'fits' if fits(found) else 'too much'}")
    return found


def fits(found: Estimate) -> bool:
    """Does the run fit on the device that was named, if only just?"""
    return found.fits_named is not None and found.fits_named.verdict != "no"
