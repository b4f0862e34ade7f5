"""What one of several strategies made of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one strategy made of the budget."""

    strategy: str
    plan: Plan | None = None
    min_peak_bytes: int | None = None
    """The lowest peak that it found, where that does not fit; what its advice comes to. None: it was not possible here."""
    advised: bool = False
    """It advises on the run as a whole: there is a peak, but no plan."""
    fits: bool = False
    step_ms: float | None = None
    why_not: str = ""
    """Why it was not possible here."""
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "feasible": self.fits,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes if self.plan else self.min_peak_bytes,
            "predicted_step_ms": self.step_ms,
            "actions": len(self.plan.actions) if self.plan else 0,
            "advice_only": self.advised,
            "why_not": self.why_not,
            "seconds": round(self.seconds, 3),
        }
