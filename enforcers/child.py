"""Enforces the plan in each process that the script has started to train in; the first of them that ends tells the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.enforcers.session import ApplySession, Options
from memopt.instrument.loop import forget_parents
from memopt.instrument.script.children import is_first
from memopt.plan import Plan


@dataclass(frozen=True, slots=True)
class EnforcesInChild:
    """A `Watcher`."""

    plan: Plan
    options: Options
    outcome: Path
    """Where the outcome goes; nobody has left one before."""
    claim: Path

    def run(self, target: Callable[[], Any]) -> Any:
        """Call `target` under the plan."""
        forget_parents(ApplySession)
        session = ApplySession(self.plan, self.options)
        session.install()
        try:
            return target()
        finally:
            outcome = session.finished()
            if outcome is not None and outcome.steps and is_first(self.claim):
                outcome.save(self.outcome)
