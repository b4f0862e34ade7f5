"""What every planning strategy on profiles is."""

from __future__ import annotations

from typing import Protocol

from memopt.advisors.profiles.problem import Decisions, Problem


class Strategy(Protocol):
    """Decides what is kept. Pure: the same problem gives the same decisions (an anytime search: within its time limit)."""

    @property
    def name(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def needs(self) -> str:
        """What it must find in the trace or on the device to be of use."""

    @property
    def allows(self) -> frozenset[str]:
        """The kinds of action that it may choose."""

    def plan(self, problem: Problem, /) -> Decisions:
        """Decisions whose peak the simulator puts at or below `problem.target_bytes`. Raises `BudgetInfeasible`."""
