"""The largest batch that fits, exactly: from a first guess up or down, then along the line between what fits and what does not.

What a run needs grows nearly evenly with the batch, so the line finds the border in few estimates; where it does not, the gap is
halved. That more always needs more is taken for granted: a larger batch that happens to fit above one that does not is not found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memopt.errors import NotPossibleHere
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.estimators.estimate import Estimate

_MOST = 1 << 20
_ENOUGH = 32
"""A batch this large that needs no more than one of half its size was not made by the flag."""
_GROWING = ("activation", "temporary", "input")


def largest_batch(
    estimate: Callable[[int], Estimate],
    say: Callable[[str], None] = lambda text: None,
    start: int = 1,
    *,
    instead: Callable[[Estimate], str] = lambda smallest: "",
) -> tuple[int, Estimate]:
    """The largest batch size whose estimate fits its named device, with that estimate; `start` is where to look first.

    Raises `NotPossibleHere` when not even a batch of one fits, or when the batch size changes nothing; `instead` gives the command to try
    then, from the estimate of the smallest batch.
    """
    search = _Search(estimate, say, instead)
    search.ask(start)
    while search.high - search.low > 1 and search.low < _MOST:
        search.ask(search.following())
        search.refuse_constant()
    if not search.low:
        smallest = search.seen[1]
        raise NotPossibleHere(
            f"a batch of 1 does not fit: it needs {format_bytes(smallest.process_bytes or smallest.allocated_bytes)}",
            try_=instead(smallest),
        )
    return search.low, search.seen[search.low]


def fits(found: Estimate) -> bool:
    """Does the run fit on the device that was named, if only just, with all that may come on top?"""
    return found.fits_named is not None and found.fits_named.verdict != "no"


def least_bytes(found: Estimate) -> int:
    """What must fit at the least: the process when cached memory is given back, on a CPU the tensors; with what may come on top."""
    if found.process_bytes is None:
        return found.most_bytes.get("allocated", found.allocated_bytes)
    least = found.smallest_bytes or found.reserved_bytes
    return found.most_bytes.get("smallest", least) + found.context_bytes


@dataclass(slots=True)
class _Search:
    """`low` is the largest batch that was seen to fit, `high` the smallest that was not."""

    estimate: Callable[[int], Estimate]
    say: Callable[[str], None]
    instead: Callable[[Estimate], str]
    seen: dict[int, Estimate] = field(default_factory=dict)
    low: int = 0
    high: int = 2 * _MOST
    failed: bool = False
    """One has not fitted: before that, `high` is only where nobody looks."""
    slow: int = 0
    """How often in a row a gap that was known on both sides was not halved."""

    def ask(self, size: int) -> None:
        between, before = self.failed, self.high - self.low
        found = self.seen[size] = self.estimate(size)
        good = fits(found)
        need = found.process_bytes or found.allocated_bytes
        self.say(f"batch {size}: {format_bytes(need)}, {'fits' if good else 'too much'}")
        if good:
            self.low = size
        else:
            self.high, self.failed = size, True
        self.slow = self.slow + 1 if between and 2 * (self.high - self.low) > before else 0

    def following(self) -> int:
        """The batch to try next, between `low` and `high`."""
        if not self.failed:
            guess = 2 * self.low if self.low == 1 or len(self.seen) > 1 else self._crossing() + 1
            return min(max(guess, self.low + 1), 2 * self.low, _MOST)
        guess = (self.low + self.high) // 2 if self.slow > 1 else self._crossing()
        return min(max(guess, self.low + 1, 1), self.high - 1)

    def _crossing(self) -> int:
        """Where a line through what was seen meets the device's memory."""
        near = self.low or self.high
        found = self.seen[near]
        far = self.seen.get(self.high) if self.low else None
        if far is not None:
            slope = (least_bytes(far) - least_bytes(found)) / (self.high - self.low)
        else:
            slope = sum(found.by_category.get(name, 0) for name in _GROWING) / near
        if slope <= 0 or found.fits_named is None:
            return (self.low + self.high) // 2
        return near + int((found.fits_named.memory_bytes - least_bytes(found)) // slope)

    def refuse_constant(self) -> None:
        """Raise where a small batch and a large one were seen to need the same."""
        small = min(self.seen)
        if self.low < max(_ENOUGH, 2 * small):
            return
        large = self.seen[self.low]
        if large.allocated_bytes <= self.seen[small].allocated_bytes:
            raise NotPossibleHere(
                f"a batch of {self.low} needs no more than a batch of {small}",
                why=f"{format_bytes(large.allocated_bytes)} are allocated either way: --batch-arg may name another flag than the one for the batch size",
                try_=self.instead(self.seen[small]),
            )
