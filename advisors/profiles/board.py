"""A recorded profile as a `Board`: an absence is between forward and backward, and the simulator finds how many are needed."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.advisors.board import Absence
from memopt.advisors.profiles.picking import prefix_that_suffices, swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem


class ProfileBoard:
    """The storages of a problem that may be swapped, to `tier` where they can."""

    def __init__(self, problem: Problem, tier: str | None = None) -> None:
        self.target_bytes, self.load_bytes = problem.target_bytes, problem.plain.high_bytes
        self._problem = problem
        self.swaps = {c.storage: swap_of(c, tier) for c in swappable(problem)}
        self.absences = [
            Absence(
                storage=c.storage,
                size_bytes=c.saved.size_bytes,
                made=c.saved.packed_op,
                here=slice(max(0, int(problem.view.birth[c.storage])), c.saved.release + 1),
                away=c.away,
            )
            for c in swappable(problem)
        ]

    def until_it_fits(self, order: Iterable[Absence]) -> Decisions:
        """The shortest prefix that fits; where none does, the one with the lowest peak."""
        return prefix_that_suffices(
            self._problem, [(each.storage, self.swaps[each.storage]) for each in order]
        )
