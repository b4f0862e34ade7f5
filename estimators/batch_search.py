"""The largest batch that fits: doubling, then halving the gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.errors import NotPossibleHere
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate

_MOST = 1 << 20
_ENOUGH = 32
"""A batch this large that needs no more than a batch of one was not made by the flag."""


def largest_batch(
    estimate: Callable[[int], Estimate], say: Callable[[str], None] = lambda text: None
) -> tuple[int, Estimate]:
    """The largest batch size whose estimate fits its named device, with that estimate.

    Raises `NotPossibleHere` when not even a batch of one fits, or when the batch size changes nothing.
    """
    good: tuple[int, Estimate] | None = None
    size, least_bytes = 1, 0
    while size <= _MOST:
        found = _asked(estimate, size, say)
        if not fits(found):
            break
        least_bytes = least_bytes or found.allocated_bytes
        if size >= _ENOUGH and found.allocated_bytes <= least_bytes:
            raise NotPossibleHere(
                f"a batch of {size} needs no more than a batch of 1",
                why=f"{format_bytes(found.allocated_bytes)} are allocated either way",
                try_="--batch-arg with the flag that sets the script's batch size, or --device cpu if it never uses a GPU",
            )
        good = (size, found)
        size *= 2
    if good is None:
        raise NotPossibleHere(
            f"a batch of 1 does not fit: it needs {format_bytes(found.process_bytes or found.allocated_bytes)}",
            try_="memopt advise, or a larger --device",
        )
    if good[0] >= _MOST:
        return good
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
