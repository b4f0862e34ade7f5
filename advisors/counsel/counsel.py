"""Strategies that look at a profile and tell what they find, where nothing, or nothing but a setting, can be enforced by memopt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from memopt.advisors.profiles.problem import Problem
from memopt.plan import ScriptAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a strategy found."""

    strategy: str
    verdict: str
    """One or two sentences."""
    rows: tuple[tuple[str, str], ...]
    """Figures in words: what, how much."""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    """The same as numbers, for programs."""
    peak_bytes: int
    """What must fit a budget when the advice is followed."""
    enforced: bool = False
    """Can `memopt apply` do it?"""
    actions: tuple[ScriptAction, ...] = ()
    notes: tuple[str, ...] = ()


class Counsel(Protocol):
    """A strategy that gives advice. `allows` names the kinds of action that it speaks of."""

    @property
    def name(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def needs(self) -> str: ...

    @property
    def allows(self) -> frozenset[str]: ...

    @property
    def not_on_graphs(self) -> str:
        """What a plain graph lacks for it."""

    @property
    def enforced(self) -> bool:
        """Can `memopt apply` follow what it advises?"""

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        """What it finds. `allow`: the kinds that were asked for by name. Raises `NotPossibleHere`, `UsageError`."""
